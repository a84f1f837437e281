"""gRPC's own services on servers that authenticate: unknown callers may check the health, as probes do, and no more.

The answer is the health of the daemon as a whole, whatever service the caller names: the server receives no messages
from unknown callers (see `grpc_strangers`), and all services of a daemon have the same health.

Watching the health and describing services need authentication, since such a call lasts as long as the caller likes,
and the number of calls is limited for all callers together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

Admit = Callable[[Any], Awaitable[None]]
"""Ends a call, by its context, if its caller is unknown."""


class OthersBehind:
    """Stands for a server in the functions of gRPC that register services, and adds authentication to the services."""

    def __init__(self, server: grpc.aio.Server, admit: Admit) -> None:
        self._server = server
        self._admit = admit

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Do nothing: the same handlers are registered by method."""

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
