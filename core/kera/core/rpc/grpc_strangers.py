"""Calls over gRPC of which nobody knows whose they are, where somebody has to: no message of theirs is received.

gRPC receives a message as a whole, of whatever size its limit allows, and a server can tell it neither that one method
takes less than another nor that one caller does. So a call is looked at before its message is: of a stranger's nothing
is received at all. What it asks to become known is metadata of its call, of which gRPC takes `METADATA_BYTES_MAX`.
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
"""Maximum of a request to authenticate: gRPC has metadata of its own in a call."""


def beside_call(request: bytes) -> tuple[tuple[str, bytes]]:
    """A request to authenticate as a caller shows it. Raises `AuthenticationFailed` for one that no daemon takes."""
    if len(request) > SHOWN_BYTES_MAX:
        raise AuthenticationFailed(
            f"the credentials have {len(request)} bytes, over the limit of {SHOWN_BYTES_MAX} for gRPC"
        )
    return ((AUTHENTICATE_METADATA, request),)


def closing(requests: AsyncIterator[bytes]) -> contextlib.aclosing[AsyncGenerator[bytes, None]]:
    """The requests that gRPC receives of a call, closed when the block ends: a generator of gRPC's.

    One that is left before its end keeps itself and its call until the garbage collector has looked twice.
    """
    return contextlib.aclosing(cast("AsyncGenerator[bytes, None]", aiter(requests)))


async def request_of(peer: Peer, method: Method[Any, Any], context: Any, requests: AsyncIterator[bytes]) -> bytes:
    """The request of a unary call. Raises `AuthenticationFailed` if nothing is received of it."""
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
