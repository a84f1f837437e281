"""Calls of methods that a gRPC server does not have: answered here, without a look at what they are called.

A path is bytes of whoever calls. gRPC's own server makes text of it in the loop that accepts calls, for all methods it
was not told of beforehand: a single path that is not UTF-8 ends that loop, and with it the server, while the process
lives on without its port (grpcio 1.85). So it is told of all methods there are (`GrpcServer`), and of the others none
gets to that loop. An older gRPC, which accepts all calls in the same way, reads paths in tasks of their own.

This reaches into gRPC, as there is no other way to have a call before that: `tests/unit/core/rpc/test_grpc.py` says
whether it still does what it should.
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
    """A server of gRPC whose methods have to be registered; calls of others are answered as `UNIMPLEMENTED`."""
    original = cygrpc.AioServer
    if hasattr(original, "_make_request_call_future"):
        cygrpc.AioServer = _guarded(original)
    try:
        return grpc.aio.server(options=options, maximum_concurrent_rpcs=calls_max)
    finally:
        cygrpc.AioServer = original


def _guarded(original: Any) -> Any:
    class Guarded(original):  # type: ignore[misc]  # a class that only gRPC has
        """Accepts calls of methods that are not registered by itself."""

        def _make_request_call_future(self, method: bytes | None) -> Any:
            if method is not None:
                return super()._make_request_call_future(method)
            return asyncio.get_running_loop().create_task(self._refuse_unknown())

        async def _refuse_unknown(self) -> None:
            """Until the server ends, and with it the request for the next call."""
            loop, refusals = asyncio.get_running_loop(), set()
            while True:
                state = await self._request_call()
                refusal = loop.create_task(_refuse(state, loop))
                refusals.add(refusal)
                refusal.add_done_callback(refusals.discard)

    return Guarded


async def _refuse(state: Any, loop: asyncio.AbstractEventLoop) -> None:
    context = cygrpc._ServicerContext(state, None, None, loop)  # noqa: SLF001 - what gRPC's handlers are given
    with contextlib.suppress(Exception):  # it always raises, so that a handler ends; or the caller is gone
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, NOT_FOUND)
