"""A cluster for unit tests: a real coordinator with fakes of its store, clock, brokers and backups."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kera.coordinator.coordinator import Coordinator
from kera.coordinator.operations.migration import ObserveMove
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.census import CENSUS
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import Write
from kera.core.base.clock import FakeClock
from kera.core.errors import Unavailable
from kera.server.access.guard import Guard
from kera.server.lineage import CHANGES_BITS
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

T = TypeVar("T")

WAIT_S = 20.0
"""Bound on all waiting: long, since it only ends a test that fails."""
SETTINGS = CoordinatorSettings.for_testing(Path("unused"))
FIRST_VERSION = 1 << CHANGES_BITS
"""The first version of the assignments of a stream that the first coordinator creates."""


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a condition holds. Fails the test if that takes too long."""
    now_s = asyncio.get_running_loop().time
    until_s = now_s() + WAIT_S
    while not condition():
        assert now_s() < until_s, f"after {WAIT_S:g} s it is still not so that {what}"
        await asyncio.sleep(0)


class FakeBrokers:
    """Brokers that answer at once, with an error, or when `answering` is set, as the test chooses."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, str]] = []
        self.dropped: list[tuple[int, int]] = []
        self.streams: dict[tuple[int, int], common_pb2.StreamInfo] = {}
        """The last description of each stream that each broker got, by broker id and stream id."""
        self.handed_over: dict[tuple[int, int, int], common_pb2.StreamletState] = {}
        """The state that each broker got with a streamlet, by the ids of broker, stream and streamlet."""
        self.sealed: list[tuple[int, int, int]] = []
        self.asked_where: list[tuple[int, int, int]] = []
        """Requests for the end of a streamlet: ids of broker, stream and streamlet."""
        self.taken_over: list[tuple[int, broker_pb2.TakeOverRequest]] = []
        self.ends: dict[tuple[int, int], common_pb2.StreamletState] = {}
        """The ends of streamlets, by stream id and streamlet id; others end before their second group."""
        self.failures: dict[int, Exception] = {}
        """The exception that every call of a broker raises, by broker id."""
        self.unsealable: set[int] = set()
        """Streamlets that cannot be sealed."""
        self.lacking: set[int] = set()
        """Streamlets that a broker opens only with their handed-over states."""
        self.refused: set[int] = set()
        """Brokers whose addresses refuse connections."""
        self.waits_for: list[str] = []
        """The reasons why brokers do not take over yet."""
        self.unreadable: dict[str, str] = {}
        """The reasons why brokers do not take over certain streams yet, by name of the stream."""
        self.unopenable: set[str] = set()
        """Names of streams for which brokers have no room."""
        self.measured: list[tuple[int, list[common_pb2.Cursor]]] = []
        """Requests for the lag behind cursors: broker id and cursors."""
        self.lag: Callable[[int, common_pb2.Cursor], broker_pb2.Lag] = lambda *_: broker_pb2.Lag()
        """The lag that a broker reports for a cursor."""
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = asyncio.Event()
        self.created: list[str] = []
        """Names of streams that brokers opened as newly created ones."""
        self.epochs: list[int] = []
        """The epoch of the coordinator behind each order."""

    async def hold_up(self, request: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a request, and return when it waits for a broker, which does not answer until `answering` is set."""
        self.answering.clear()
        self.asked.clear()
        task = asyncio.create_task(request)
        await until(self.asked.is_set, "a broker is asked")
        return task

    async def _answer(self, broker: common_pb2.BrokerInfo, coordinator_epoch: int) -> None:
        self.epochs.append(coordinator_epoch)
        self.asked.set()
        await self.answering.wait()
        if broker.broker_id in self.failures:
            raise self.failures[broker.broker_id]

    async def open_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream: common_pb2.StreamInfo,
        *,
        coordinator_epoch: int,
        handed_over: Sequence[common_pb2.StreamletState] = (),
        created: bool = False,
    ) -> list[int]:
        await self._answer(broker, coordinator_epoch)
        if created:
            self.created.append(stream.name)
        if stream.name in self.unopenable:
            raise Unavailable(f"the disk has no room for {stream.name}")
        self.opened.append((broker.broker_id, stream.name))
        self.streams[broker.broker_id, stream.stream_id] = stream
        for state in handed_over:
            self.handed_over[broker.broker_id, stream.stream_id, state.streamlet_id] = state
        given = {key[2] for key in self.handed_over if key[:2] == (broker.broker_id, stream.stream_id)}
        return sorted(self.lacking - given)

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int, *, coordinator_epoch: int) -> None:
        self.epochs.append(coordinator_epoch)
        if broker.broker_id in self.failures:
            raise self.failures[broker.broker_id]
        self.dropped.append((broker.broker_id, stream_id))
        self.streams.pop((broker.broker_id, stream_id), None)

    def end(self, stream_id: int, streamlet_id: int) -> common_pb2.StreamletState:
        new = common_pb2.StreamletState(streamlet_id=streamlet_id, next_group_id=2, next_records=[10])
        return self.ends.get((stream_id, streamlet_id), new)

    async def seal_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream_id: int,
        streamlet_ids: Sequence[int],
        *,
        wait_ms: int,
        coordinator_epoch: int,
        assignments_version: int,
    ) -> list[common_pb2.StreamletState]:
        assert wait_ms > 0
        told = self.streams.get((broker.broker_id, stream_id))
        assert told is None or assignments_version >= told.assignments_version, "it would be refused"
        await self._answer(broker, coordinator_epoch)
        for streamlet_id in self.unsealable.intersection(streamlet_ids):
            raise Unavailable(f"streamlet {streamlet_id} is not durable in time")
        self.sealed += [(broker.broker_id, stream_id, streamlet_id) for streamlet_id in streamlet_ids]
        return [self.end(stream_id, streamlet_id) for streamlet_id in streamlet_ids]

    async def where_ended(
        self, broker: common_pb2.BrokerInfo, stream_id: int, streamlet_id: int, *, coordinator_epoch: int
    ) -> common_pb2.StreamletState:
        await self._answer(broker, coordinator_epoch)
        self.asked_where.append((broker.broker_id, stream_id, streamlet_id))
        return self.end(stream_id, streamlet_id)

    async def take_over(
        self, broker: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        await self._answer(broker, request.coordinator_epoch)
        self.taken_over.append((broker.broker_id, request))
        if self.waits_for:
            return broker_pb2.TakeOverResponse(waits_for=self.waits_for)
        taken = [
            broker_pb2.TakenOver(stream_id=one.stream.stream_id, state=self.end(one.stream.stream_id, streamlet_id))
            for one in request.streams
            for streamlet_id in one.streamlet_ids
            if one.stream.name not in self.unreadable
        ]
        waits_for = [self.unreadable[name] for one in request.streams if (name := one.stream.name) in self.unreadable]
        return broker_pb2.TakeOverResponse(streamlets=taken, bytes_total=100 * len(taken), waits_for=waits_for)

    async def measure_lag(
        self, broker: common_pb2.BrokerInfo, cursors: Sequence[common_pb2.Cursor]
    ) -> list[broker_pb2.Lag]:
        if broker.broker_id in self.failures:
            raise self.failures[broker.broker_id]
        self.measured.append((broker.broker_id, list(cursors)))
        return [self.lag(broker.broker_id, cursor) for cursor in cursors]

    async def refuses(self, broker: common_pb2.BrokerInfo) -> bool:
        return broker.broker_id in self.refused

    async def close(self) -> None:
        pass


class FakeBackups:
    """Backups that answer at once, or with an error."""

    def __init__(self) -> None:
        self.fenced: list[tuple[int, int, int]] = []
        """Backup, broker, and the epoch before which the backup refuses the broker."""
        self.freed: list[tuple[int, int, int]] = []
        self.replicas: Counter[int] = Counter()
        self.failures: dict[int, Exception] = {}

    def _answer(self, backup: common_pb2.BackupInfo) -> None:
        if backup.backup_id in self.failures:
            raise self.failures[backup.backup_id]

    async def fence(self, backup: common_pb2.BackupInfo, broker_id: int, before_epoch: int) -> None:
        self._answer(backup)
        self.fenced.append((backup.backup_id, broker_id, before_epoch))

    async def free(
        self, backup: common_pb2.BackupInfo, broker_id: int, broker_epoch: int, *, before_epoch: int
    ) -> None:
        assert broker_epoch >= before_epoch
        self._answer(backup)
        self.freed.append((backup.backup_id, broker_id, before_epoch))

    async def count_replicas(self, backup: common_pb2.BackupInfo, broker_ids: Iterable[int]) -> int:
        self._answer(backup)
        return self.replicas[backup.backup_id] if list(broker_ids) else 0

    async def close(self) -> None:
        pass


class Cluster:
    """A coordinator with a store, a clock, brokers and backups that outlive it."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.clock = FakeClock()
        self.brokers = FakeBrokers()
        self.backups = FakeBackups()
        self.settings = SETTINGS
        self.epoch = 0
        self.observe_move: ObserveMove = lambda *_: None
        self.guard: Guard | None = None
        """The guard of coordinators that are loaded from then on."""
        self.coordinator: Coordinator
        self._loaded: list[Coordinator] = []

    async def load(self) -> Coordinator:
        """Load another coordinator from the store."""
        loaded = await Coordinator.load(
            self.store,
            self.brokers,
            self.backups,
            self.clock,
            self.settings,
            coordinator_epoch=self.epoch,
            observe_move=self.observe_move,
            guard=self.guard,
        )
        self._loaded.append(loaded)
        return loaded

    async def close(self) -> None:
        """Close all coordinators, so that their work does not begin more while the event loop ends."""
        self.brokers.answering.set()
        for coordinator in self._loaded:
            await coordinator.close()

    async def edit(self, *writes: Write) -> None:
        """Change records as a coordinator without a census does."""
        places = {f"{CENSUS}{write.key.partition('/')[0] if '/' in write.key else '.'}" for write in writes}
        known = {place: self.store.records[place].version for place in places if place in self.store.records}
        await self.store.write(*writes, *(Write(place, None, version) for place, version in known.items()))

    async def restart(self) -> Coordinator:
        self.epoch += 1
        self.coordinator = await self.load()
        return self.coordinator

    async def settle(self) -> None:
        """Let a heartbeat interval pass, and wait for all work that it starts."""
        self.coordinator.tick()
        await self.coordinator.idle()

    async def heartbeat(self, *broker_ids: int, **fields: Any) -> None:
        """Send heartbeats of the current launches of brokers."""
        for broker_id in broker_ids:
            epoch = self.coordinator.state.brokers.epoch(broker_id)
            request = coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=epoch, **fields)
            await self.coordinator.members.heartbeat(request)

    def backup_heartbeat(self, *backup_ids: int) -> None:
        """Send heartbeats of the current launches of backups."""
        for backup_id in backup_ids:
            epoch = self.coordinator.state.backups.epoch(backup_id)
            request = coordinator_pb2.BackupHeartbeatRequest(backup_id=backup_id, backup_epoch=epoch)
            self.coordinator.members.backup_heartbeat(request)

    async def silence(self, *broker_ids: int) -> None:
        """Send heartbeats of all members but these brokers, until these count as dead."""
        members = self.coordinator.state
        for _ in range(self.settings.heartbeats_missed_max + 1):
            self.clock.advance(self.settings.heartbeat_interval_ms / 1000)
            await self.heartbeat(*(one for one in members.brokers.live_ids() if one not in broker_ids))
            self.backup_heartbeat(*members.backups.live_ids())
            await self.settle()

    async def register(
        self, launch_id: str, broker_id: int = 0, *, lost_memory: bool = False, directory_id: str = ""
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        request = registration(launch_id, broker_id)
        request.lost_memory, request.directory_id = lost_memory, directory_id
        answer = await self.coordinator.members.register_broker(request)
        return self.coordinator.state.brokers.describe(answer.broker_id), list(answer.streams)

    async def register_backup(self, launch_id: str, backup_id: int = 0, **fields: Any) -> common_pb2.BackupInfo:
        answer = await self.coordinator.members.register_backup(backup_registration(launch_id, backup_id, **fields))
        return self.coordinator.state.backups.describe(answer.backup_id)

    async def create(
        self, name: str, streamlets: int = 1, brokers: int = 0, replication: int | None = None
    ) -> common_pb2.StreamInfo:
        wanted = config(streamlets, brokers, replication)
        return await self.coordinator.streams.create(name, wanted, common_pb2.StreamSchema())

    async def alter(self, name: str, **changes: Any) -> common_pb2.StreamInfo:
        return await self.coordinator.streams.alter(coordinator_pb2.AlterStreamRequest(name=name, **changes))


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
