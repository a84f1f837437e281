"""Answers calls of methods that a gRPC server does not have, without looking at their paths.

A path can be any bytes that a caller sends. gRPC's own server decodes it in the loop that accepts calls, for all
methods that are not registered: a single path that is not UTF-8 ends that loop, and with it the server, while the
process lives on without its port (grpcio 1.85). So all methods are registered (`GrpcServer`), and calls of others are
kept from that loop. An older gRPC, which accepts all calls in the same way, reads each path in a separate task.

This uses internals of gRPC, as there is no other way to get at a call before that loop does;
`tests/unit/core/rpc/test_grpc.py` checks that it still works.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # an extension without stubs

NOT_FOUND = "Method not found!"
"""gRPC's own text."""


def server(options: Sequence[tuple[str, Any]], calls_max: int) -> grpc.aio.Server:
    """Return a gRPC server whose methods have to be registered; it answers calls of others with `UNIMPLEMENTED`."""
    original = cygrpc.AioServer
    if hasattr(original, "_make_request_call_future"):
        cygrpc.AioServer = _guarded(original)
    try:
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=calls_max)
    finally:
        cygrpc.AioServer = original


def _guarded(original: Any) -> Any:
    class Guarded(original):  # type: ignore[misc]  # a class that only gRPC has
        """Accepts the calls of unregistered methods in place of gRPC's own loop."""

        def _make_request_call_future(self, method: bytes | None) -> Any:
            if method is not None:
                return super()._make_request_call_future(method)
            return asyncio.get_running_loop().create_task(self._refuse_unknown())

        async def _refuse_unknown(self) -> None:
            """Refuse calls until the server ends, which ends the request for the next call as well."""
            loop, refusals = asyncio.get_running_loop(), set()
            while True:
                state = await self._request_call()
                refusal = loop.create_task(_refuse(state, loop))
                refusals.add(refusal)
                refusal.add_done_callback(refusals.discard)

    return Guarded


async def _refuse(state: Any, loop: asyncio.AbstractEventLoop) -> None:
    context = cygrpc._ServicerContext(state, None, None, loop)  # noqa: SLF001 - the context of gRPC's handlers
    with contextlib.suppress(Exception):  # it always raises, to end a handler; or else because the caller is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, NOT_FOUND)
