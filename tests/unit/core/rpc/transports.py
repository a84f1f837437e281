"""One interface to all transports, for tests that run over each of them, and methods to call over them."""

import asyncio
import contextlib
import inspect
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kera.core.rpc import Call, Channel, Method, Reply, Service
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.security import Tls
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

ClosableT = TypeVar("ClosableT")

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
"""For calls that get an answer. A correct test ends long before."""

# No method of KerA has bulk in both directions; these have.
ECHO = Method(
    "kera.test.Echo",
    "Echo",
    9001,
    broker_pb2.MultiWriteChunksRequest,
    broker_pb2.MultiReadChunksResponse,
    bulk=True,
)
OTHER_ECHO = Method(
    "kera.test.Echo",
    "OtherEcho",
    9002,
    broker_pb2.MultiWriteChunksRequest,
    broker_pb2.MultiReadChunksResponse,
    bulk=True,
)
UNARY = Method(
    "kera.test.Echo", "Unary", 9003, coordinator_pb2.GetStreamIdRequest, coordinator_pb2.DescribeClusterResponse
)

EchoRequest = broker_pb2.MultiWriteChunksRequest
EchoResponse = broker_pb2.MultiReadChunksResponse
UnaryRequest = coordinator_pb2.GetStreamIdRequest
UnaryResponse = coordinator_pb2.DescribeClusterResponse


def numbered(number: int) -> EchoRequest:
    """A request that tests can tell from others."""
    return EchoRequest(chunk_count=number)


def answer(text: str) -> EchoResponse:
    """A response that tests can tell from others."""
    return EchoResponse(results=[broker_pb2.ReadResult(error=common_pb2.Error(message=text))])


def text_of(response: EchoResponse) -> str:
    """The text given to `answer`; empty for any other response."""
    return "".join(result.error.message for result in response.results)


def echo(call: Call[EchoRequest]) -> Reply[EchoResponse]:
    """Answers with the number and the bulk of the request."""
    return Reply(answer(str(call.message.chunk_count)), [memoryview(bytes(call.bulk))])


def unary_echo(call: Call[UnaryRequest]) -> Reply[UnaryResponse]:
    """Answers with the name of the request."""
    return Reply(UnaryResponse(cluster_id=call.message.name))


async def eventually(condition: Callable[[], Any], what: str = "") -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what or condition}"
        await asyncio.sleep(0.002)


async def settled(value: Callable[[], int]) -> int:
    """Wait until `value` is above zero and does not move any more."""
    unmoved, last = 0, 0
    while unmoved < 20 or not last:
        await asyncio.sleep(0.01)
        now = value()
        unmoved = unmoved + 1 if now == last else 0
        last = now
    return last


@contextlib.contextmanager
def silent_listener() -> Iterator[socket.socket]:
    """A listener with a full queue: it drops new connections, as a cut network does."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((HOST, 0))
        listener.listen(0)
        for _ in range(4):
            queued = opened.enter_context(socket.socket())
            queued.setblocking(False)
            queued.connect_ex(listener.getsockname())
        yield listener


class Closing:
    """Closes the given objects, the last one first."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def __call__(self, closable: ClosableT) -> ClosableT:
        self._open.append(closable)
        return closable

    async def close(self) -> None:
        while self._open:
            closed = self._open.pop().close()
            if inspect.isawaitable(closed):
                await closed


class Wire(ABC):
    """One transport. Servers and channels that are still open are closed after the test."""

    name: str
    address: str
    """The address of the last started server."""

    def __init__(self) -> None:
        self._closing = Closing()

    async def serve(self, service: Service, *, bulk_bytes_max: int = BULK_BYTES_MAX) -> Any:
        """Start a server; returns it."""
        server, self.address = await self.start(service, bulk_bytes_max)
        return self._closing(server)

    async def connect(self, *, bulk_bytes_max: int = BULK_BYTES_MAX) -> Channel:
        """A new connection to the last started server."""
        return self._closing(await self.open(bulk_bytes_max))

    async def close(self) -> None:
        await self._closing.close()

    @abstractmethod
    async def start(self, service: Service, bulk_bytes_max: int) -> tuple[Any, str]: ...

    @abstractmethod
    async def open(self, bulk_bytes_max: int) -> Channel: ...

    @abstractmethod
    async def stop(self, server: Any) -> None:
        """Stop a server without grace: calls in flight are cut off."""


class Grpc(Wire):
    name = "grpc"

    def __init__(self, tls: Tls | None = None) -> None:
        super().__init__()
        self._tls = tls

    async def start(self, service: Service, bulk_bytes_max: int) -> tuple[Any, str]:
        server = GrpcServer([service], bulk_bytes_max=bulk_bytes_max, tls=self._tls)
        return server, f"{HOST}:{await server.listen(HOST, 0)}"

    async def open(self, bulk_bytes_max: int) -> Channel:
        return GrpcChannel(self.address, bulk_bytes_max=bulk_bytes_max, tls=self._tls)

    async def stop(self, server: GrpcServer) -> None:
        await server.close(grace_s=0)


class Tcp(Wire):
    name = "tcp"

    def __init__(self, tls: Tls | None = None) -> None:
        super().__init__()
        self._tls = tls

    async def start(self, service: Service, bulk_bytes_max: int) -> tuple[Any, str]:
        server = FrameServer(service, bulk_bytes_max=bulk_bytes_max, tls=self._tls)
        return server, f"{HOST}:{await server.listen_tcp(HOST, 0)}"

    async def open(self, bulk_bytes_max: int) -> Channel:
        return await FrameChannel.connect_tcp(
            self.address, timeout_s=TIMEOUT_S, bulk_bytes_max=bulk_bytes_max, tls=self._tls
        )

    async def stop(self, server: FrameServer) -> None:
        await server.close(grace_s=0)


class Unix(Wire):
    name = "unix"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def start(self, service: Service, bulk_bytes_max: int) -> tuple[Any, str]:
        server = FrameServer(service, bulk_bytes_max=bulk_bytes_max)
        await server.listen_unix(self._path)
        return server, str(self._path)

    async def open(self, bulk_bytes_max: int) -> Channel:
        return await FrameChannel.connect_unix(self.address, timeout_s=TIMEOUT_S, bulk_bytes_max=bulk_bytes_max)

    async def stop(self, server: FrameServer) -> None:
        await server.close(grace_s=0)
