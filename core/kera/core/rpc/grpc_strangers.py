"""Calls over gRPC of unauthenticated callers ("strangers"): a server that authenticates receives no messages of theirs.

gRPC receives a message as a whole, up to its size limit, and a server cannot set a lower limit for one method or one
caller. So the server looks at a call before its message, and receives no message of a stranger. A stranger's request to
authenticate is metadata of its call, which gRPC bounds by `METADATA_BYTES_MAX`.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

from kera.core.access.identity import not_authenticated
from kera.core.errors import AuthenticationFailed
from kera.core.rpc import api
from kera.core.rpc.grpc_options import AUTHENTICATE_METADATA, METADATA_BYTES_MAX
from kera.core.rpc.method import Method, Peer

SHOWN_BYTES_MAX = METADATA_BYTES_MAX - (2 << 10)
"""Maximum of a request to authenticate, as gRPC adds its own metadata to a call."""


def beside_call(request: bytes) -> tuple[tuple[str, bytes]]:
    """Return the metadata for a request to authenticate. Raises `AuthenticationFailed` if it is too large."""
    if len(request) > SHOWN_BYTES_MAX:
        raise AuthenticationFailed(
            f"the credentials have {len(request)} bytes, over the limit of {SHOWN_BYTES_MAX} for gRPC"
        )
    return ((AUTHENTICATE_METADATA, request),)


def closing(requests: AsyncIterator[bytes]) -> contextlib.aclosing[AsyncGenerator[bytes, None]]:
    """Return gRPC's generator of a call's requests as a context manager, which closes it at the end of the block.

    A generator that is left before its end keeps itself and its call until the garbage collector has run twice.
    """
    return contextlib.aclosing(cast("AsyncGenerator[bytes, None]", aiter(requests)))


async def request_of(peer: Peer, method: Method[Any, Any], context: Any, requests: AsyncIterator[bytes]) -> bytes:
    """Return the request of a unary call. Raises `AuthenticationFailed` if the caller has to authenticate first."""
    if method is api.AUTHENTICATE:
        for key, value in context.invocation_metadata() or ():
            if key == AUTHENTICATE_METADATA:
                return bytes(value)
    if peer.identity is not None:
        async with closing(requests) as received:
            return await anext(received, b"")
    if method is not api.AUTHENTICATE:
        raise not_authenticated()
    raise AuthenticationFailed(
        f"over gRPC a request to authenticate is metadata of its call ({AUTHENTICATE_METADATA}) with no message"
    )
