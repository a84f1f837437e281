"""The whole fake cluster: its brokers, its coordinator, its streams, and its clients."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, Self

from kera.client.arguments import whole
from kera.client.client import Client
from kera.client.cluster.cluster import Cluster
from kera.client.settings import ClientSettings
from kera.client.testing.broker import FakeBroker
from kera.client.testing.coordinator import FakeCoordinator
from kera.client.testing.streams import Changes, FakeStream, check_broker
from kera.core.errors import InvalidArgument
from kera.v1 import common_pb2

BROKERS_MAX = 1000
STREAMLETS_MAX = 16_384
SEGMENT_BYTES = 1 << 20
SEGMENT_BYTES_MAX = 1 << 30
PATIENCE: dict[str, Any] = {"retry_backoff_ms": 1, "retry_timeout_ms": 10_000}
"""Default settings of clients: in a fake cluster, nothing takes long."""


class _State(Enum):
    NEW = "has not been entered"
    RUNNING = "runs"
    CLOSED = "has been closed"


class FakeCluster:
    """Brokers 1 to `brokers` and a coordinator, for as long as ``async with`` goes on. See ``kera.client.testing``."""

    def __init__(self, *, brokers: int = 1, segment_bytes: int = SEGMENT_BYTES, grpc: bool = False) -> None:
        """Make a cluster whose chunks have at most `segment_bytes`.

        With `grpc`, brokers listen for gRPC, besides frames over TCP.
        """
        whole("brokers", brokers, 1, BROKERS_MAX)
        whole("segment_bytes", segment_bytes, 1, SEGMENT_BYTES_MAX)
        self._state = _State.NEW
        self._streams: dict[int, FakeStream] = {}
        self._changes = Changes()
        self.brokers = {
            number: FakeBroker(number, self._streams, self._changes, segment_bytes=segment_bytes, grpc=grpc)
            for number in range(1, brokers + 1)
        }
        """The brokers, by id."""
        self._infos = {number: broker.info for number, broker in self.brokers.items()}
        self.coordinator = FakeCoordinator(self._infos, self._streams, self._changes)
        self._clients: list[Client] = []

    async def __aenter__(self) -> Self:
        if self._state is not _State.NEW:
            raise InvalidArgument(f"a fake cluster is entered once, and this one {self._state.value}: make another one")
        self._state = _State.RUNNING
        await self.coordinator.start()
        for broker in self.brokers.values():
            await broker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the clients, without flushing, and all connections."""
        self._state = _State.CLOSED
        await asyncio.gather(*(client.close(flush=False) for client in self._clients), return_exceptions=True)
        await asyncio.gather(*(broker.close() for broker in self.brokers.values()))
        await self.coordinator.close()

    @property
    def bootstrap(self) -> str:
        """The coordinator's address, ``host:port``. Raises `InvalidArgument` unless the cluster runs."""
        if self._state is not _State.RUNNING:
            raise InvalidArgument(f"the fake cluster {self._state.value}: use it within its async with")
        return self.coordinator.address

    def settings(self, **settings: Any) -> ClientSettings:
        """Return settings for clients of this cluster: short times, whatever the environment says, and `settings`."""
        return ClientSettings(**{**PATIENCE, **settings})

    def client(self, **settings: Any) -> Client:
        """Make a client, closed with the cluster at the latest; `settings` are fields of `ClientSettings`."""
        self._clients.append(Client(Cluster(self.bootstrap, self.settings(**settings))))
        return self._clients[-1]

    def create_stream(self, name: str, *, streamlets: int = 1) -> FakeStream:
        """Create a stream with the default schema, without a request to the coordinator."""
        whole("streamlets", streamlets, 1, STREAMLETS_MAX)
        config = common_pb2.StreamConfig(streamlets=streamlets, entries=1, group_segments=1)
        return self.coordinator.create(name, config, common_pb2.StreamSchema())

    def delete_stream(self, name: str) -> None:
        """Delete a stream, without a request to the coordinator. Raises `UnknownStream`."""
        self.coordinator.delete(name)

    def stream(self, name: str) -> FakeStream:
        """Return the stream called `name`. Raises `UnknownStream`."""
        return self.coordinator.stream(name)

    def take_over(self, lost: int, new: int) -> None:
        """Give the streamlets of a crashed broker to `new`: their records can be read after `recovered`."""
        check_broker(self._infos, lost, crashed=True)
        check_broker(self._infos, new)
        for stream in self._streams.values():
            stream.take_over(lost, new)

    def recovered(self) -> None:
        """Make all records of `take_over` readable."""
        for stream in self._streams.values():
            stream.recovered()
