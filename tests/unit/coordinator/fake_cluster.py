"""A cluster for unit tests: a real coordinator, and fakes of all that is around it."""

import asyncio
from pathlib import Path
from typing import Any

from kera.coordinator.coordinator import Coordinator
from kera.coordinator.memory_store import MemoryStore
from kera.coordinator.metadata import MetadataStore
from kera.coordinator.settings import CoordinatorSettings
from kera.core.clock import FakeClock
from kera.v1 import common_pb2, coordinator_pb2

SETTINGS = CoordinatorSettings.for_testing(Path("unused"))


class FakeBrokers:
    """Brokers that answer as told: at once, with an error, or when `answering` is set."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, str]] = []
        self.dropped: list[tuple[int, int]] = []
        self.streams: dict[tuple[int, int], common_pb2.StreamInfo] = {}
        """What each broker was told last, by its id and the stream's."""
        self.failures: dict[int, Exception] = {}
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = asyncio.Event()

    async def open_streamlets(self, broker: common_pb2.BrokerInfo, stream: common_pb2.StreamInfo) -> None:
        self.asked.set()
        await self.answering.wait()
        if broker.broker_id in self.failures:
            raise self.failures[broker.broker_id]
        self.opened.append((broker.broker_id, stream.name))
        self.streams[broker.broker_id, stream.stream_id] = stream

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int) -> None:
        if broker.broker_id in self.failures:
            raise self.failures[broker.broker_id]
        self.dropped.append((broker.broker_id, stream_id))
        self.streams.pop((broker.broker_id, stream_id), None)

    async def close(self) -> None:
        pass


class Cluster:
    """A coordinator over what is around it: a store, a clock and brokers, which outlive it."""

    def __init__(self, store: MetadataStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = FakeClock()
        self.brokers = FakeBrokers()
        self.settings = SETTINGS
        self.coordinator: Coordinator

    async def restart(self) -> Coordinator:
        self.coordinator = await Coordinator.load(self.store, self.brokers, self.clock, self.settings)
        return self.coordinator

    async def register(
        self, launch_id: str, broker_id: int = 0
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        return await self.coordinator.register_broker(registration(launch_id, broker_id))

    async def register_backup(self, launch_id: str, backup_id: int = 0, **fields: Any) -> common_pb2.BackupInfo:
        return await self.coordinator.register_backup(backup_registration(launch_id, backup_id, **fields))

    async def create(
        self, name: str, streamlets: int = 1, brokers: int = 0, replication: int | None = None
    ) -> common_pb2.StreamInfo:
        wanted = config(streamlets, brokers, replication)
        return await self.coordinator.create_stream(name, wanted, common_pb2.StreamSchema())

    async def alter(self, name: str, **changes: Any) -> common_pb2.StreamInfo:
        return await self.coordinator.alter_stream(coordinator_pb2.AlterStreamRequest(name=name, **changes))


def registration(launch_id: str, broker_id: int = 0, port: int = 1) -> coordinator_pb2.RegisterBrokerRequest:
    broker = common_pb2.BrokerInfo(broker_id=broker_id, grpc_address=f"{launch_id}:{port}", node_id="node")
    return coordinator_pb2.RegisterBrokerRequest(broker=broker, launch_id=launch_id)


def backup_registration(
    launch_id: str, backup_id: int = 0, port: int = 1, **fields: Any
) -> coordinator_pb2.RegisterBackupRequest:
    backup = common_pb2.BackupInfo(
        backup_id=backup_id, grpc_address=f"{launch_id}:{port}", node_id="node", memory_bytes=200, **fields
    )
    return coordinator_pb2.RegisterBackupRequest(backup=backup, launch_id=launch_id)


def config(streamlets: int = 1, brokers: int = 0, replication: int | None = None) -> common_pb2.StreamConfig:
    return common_pb2.StreamConfig(
        streamlets=streamlets, brokers=brokers, entries=1, group_segments=4, replication=replication
    )
