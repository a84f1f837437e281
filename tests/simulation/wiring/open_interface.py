"""The open interface without gRPC: the same methods and messages, in frames over the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kera.core.errors import KeraError, Unavailable, Uncertain
from kera.core.rpc.answer import Answer
from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_options import CONNECTION_CALLS_MAX_DEFAULT
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Doorkeeper, Method, Reply, RequestT, ResponseT, Service
from kera.core.security import Tls


class FramedChannel:
    """See `kera.core.rpc.Channel`. Connects for the first request, and again after the connection broke."""

    transport = "grpc"

    def __init__(self, address: str, *, bulk_bytes_max: int = BULK_BYTES_MAX) -> None:
        self._address = address
        self._bulk_bytes_max = bulk_bytes_max
        self._loop = asyncio.get_running_loop()
        self._frames: FrameChannel | None = None
        self._connecting = asyncio.Lock()
        self._calls: dict[asyncio.Task[None], None] = {}
        self._closed = False

    @property
    def closed(self) -> bool:
        """See `Channel.closed`."""
        return self._closed

    def submit(
        self,
        method: Method[RequestT, ResponseT],
        message: RequestT,
        bulk: Sequence[Any] = (),
        *,
        timeout_s: float,
    ) -> Answer[Reply[ResponseT]]:
        """See `Channel.submit`."""
        answer: Answer[Reply[ResponseT]] = Answer(loop=self._loop)
        if self._closed:
            answer.set_exception(Unavailable(f"connection to {self._address} is closed", address=self._address))
            return answer
        copied = method.request()
        copied.CopyFrom(message)
        pieces = [bytes(piece) for piece in bulk]
        task = self._loop.create_task(self._call(answer, method, copied, pieces, timeout_s))
        self._calls[task] = None
        task.add_done_callback(self._calls.pop)
        # Not in the task itself, because a task that is cancelled before its first step never runs.
        task.add_done_callback(lambda _: _fail(answer, self._lost()))
        return answer

    def _lost(self) -> Uncertain:
        return Uncertain(f"connection to {self._address} was lost: closed", address=self._address)

    async def _call(
        self,
        answer: Answer[Reply[ResponseT]],
        method: Method[RequestT, ResponseT],
        message: RequestT,
        bulk: Sequence[Any],
        timeout_s: float,
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                frames = await self._connected(timeout_s)
                reply = await frames.submit(method, message, bulk, timeout_s=2 * timeout_s)
        except TimeoutError:
            error: KeraError = Uncertain(f"no answer from {self._address} to {method.name}", address=self._address)
        except KeraError as failure:
            error = failure
        else:
            if not answer.done():
                answer.set_result(reply)
            return
        _fail(answer, error)

    async def _connected(self, timeout_s: float) -> FrameChannel:
        async with self._connecting:
            if self._frames is None or self._frames.closed:
                self._frames = await FrameChannel.connect_tcp(
                    self._address, timeout_s=timeout_s, bulk_bytes_max=self._bulk_bytes_max
                )
            return self._frames

    async def close(self) -> None:
        """See `Channel.close`."""
        self._closed = True
        calls = list(self._calls)
        for task in calls:
            task.cancel()
        if calls:
            await asyncio.wait(calls)
        if self._frames is not None:
            await self._frames.close()


def _fail(answer: Answer[Any], error: KeraError) -> None:
    if not answer.done():
        answer.set_exception(error)


class FramedServer:
    """See `kera.core.runtime.OpenServer`."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX_DEFAULT,
        connection_calls_max: int = CONNECTION_CALLS_MAX_DEFAULT,
        tls: Tls | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        del connection_calls_max, tls, doorkeeper
        methods = {method: handler for service in services for method, handler in service.items()}
        self._frames = FrameServer(methods, bulk_bytes_max=bulk_bytes_max, connections_max=connections_max)

    async def listen(self, host: str, port: int) -> int:
        """See `OpenServer.listen`."""
        return await self._frames.listen_tcp(host, port)

    async def close(self, grace_s: float = 0.5) -> None:
        """See `OpenServer.close`."""
        await self._frames.close(grace_s)
