"""A client's view of brokers with real logs, in this process. A streamlet moves between them."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from kera.broker.log.arena import Arena
from kera.client.cluster.cluster import Cluster
from kera.client.settings import ClientSettings
from kera.client.types import StreamDescription
from kera.core.errors import KeraError
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import Channel, Method, Reply, api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.moving_support import Cluster as Map
from tests.unit.broker.support import SLOT_BYTES, Engine

STREAM = "s"
SLOTS = 6


class RealBroker:
    """A connection to one broker. See `kera.core.rpc.Channel`."""

    transport = "tcp"
    closed = False

    def __init__(self, brokers: "RealBrokers", broker_id: int) -> None:
        self._brokers = brokers
        self._broker_id = broker_id

    def submit(self, method: Method[Any, Any], message: Any, _: Any = (), *, timeout_s: float) -> Any:
        request = method.request.FromString(message.SerializeToString())
        self._brokers.asked.append((self._broker_id, request))
        return asyncio.ensure_future(asyncio.wait_for(self._handle(method, request), timeout_s))

    async def _handle(self, method: Method[Any, Any], request: Any) -> Reply[Any]:
        failure = self._brokers.failure(self._broker_id)
        if failure is not None:
            raise failure
        result = self._brokers.map.brokers[self._broker_id].start(method, request)
        reply = await result if isinstance(result, Awaitable) else result
        return Reply(method.response.FromString(reply.message.SerializeToString()))

    async def close(self) -> None:
        pass


class RealBrokers(Cluster):
    """The client's cluster; the stream is called ``s``."""

    def __init__(self, placed: Map, **settings: Any) -> None:
        super().__init__("127.0.0.1:1", ClientSettings(**{"retry_backoff_ms": 1, "retry_timeout_ms": 5000, **settings}))
        self.map = placed
        self.asked: list[tuple[int, Any]] = []
        """Brokers and the requests to them, in order."""
        self.questions = 0
        """The number of requests to the coordinator."""
        self.failure: Callable[[int], KeraError | None] = lambda _: None
        """Called before each request to a broker."""

    async def ask(self, method: Method[Any, Any], *_: Any, **__: Any) -> Any:
        assert method is api.DESCRIBE_STREAM
        self.questions += 1
        info = common_pb2.StreamInfo()
        info.CopyFrom(self.map.info)
        info.name = STREAM
        info.schemas[0].arrow_schema = schema_to_bytes(DEFAULT_SCHEMA)
        brokers = [common_pb2.BrokerInfo(broker_id=number, alive=True) for number in self.map.brokers]
        return coordinator_pb2.DescribeStreamResponse(stream=info, brokers=brokers)

    async def channel(self, _: StreamDescription, broker_id: int) -> Channel:
        return RealBroker(self, broker_id)

    def stop(self) -> None:
        """Stop all writes to disk: calls that the loop still has to make must not find their directory gone."""
        for broker in self.map.brokers.values():
            broker.paused = True


@contextlib.contextmanager
def engines(count: int) -> Iterator[list[Engine]]:
    root = Path(tempfile.mkdtemp(prefix="kera-test-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root)
        made = []
        for number in range(count):
            directory = root / str(number)
            directory.mkdir()
            arena = Arena.create(
                root, arena_bytes=SLOTS * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=directory, ephemeral=True
            )
            stack.callback(arena.close)
            made.append(Engine(arena, directory))
            stack.callback(made[-1].close)
        yield made
