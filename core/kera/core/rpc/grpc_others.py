"""gRPC's own services, where callers have to authenticate: anybody may ask for health, as probes do, and nothing else.

Who asks is told of the daemon as a whole, whatever service it names: no message of somebody unknown is received (see
`grpc_strangers`), and all services of a daemon have the same health.

Who waits for health to change, or has services described, holds a call for as long as it likes; of those there are so
many for all callers together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

Admit = Callable[[Any], Awaitable[None]]
"""Ends a call, by its context, if nobody knows whose it is."""


class OthersBehind:
    """Registers services with a server, as the functions do that gRPC generates, behind a door."""

    def __init__(self, server: grpc.aio.Server, admit: Admit) -> None:
        self._server = server
        self._admit = admit

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same ones are registered by method."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """See `grpc.aio.Server`."""
        guarded = {name: self._guarded(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))
        self._server.add_registered_method_handlers(service, guarded)

    def _guarded(self, handler: Any) -> Any:
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:

            async def answer(requests: AsyncIterator[bytes], context: Any) -> Any:
                del requests
                return await handler.unary_unary(read(b""), context)

            return grpc.stream_unary_rpc_method_handler(answer, None, write)

        if handler.unary_stream is not None:

            async def go_on(requests: AsyncIterator[bytes], context: Any) -> None:
                await self._admit(context)
                await handler.unary_stream(read(await anext(requests, b"")), context)

            return grpc.stream_stream_rpc_method_handler(go_on, None, write)

        async def talk(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            await self._admit(context)
            async for answered in handler.stream_stream(requests, context):
                yield answered

        return grpc.stream_stream_rpc_method_handler(talk, read, write)
