"""A cluster whose brokers, backups and coordinators crash, stop and wake at any step: for tests of the control plane.

A real coordinator over fake daemons that keep to their contracts: they obey the latest coordinator, serve what they
were opened for, and end when they are told that they are not current any more. Each request to a daemon and each write
to the store is a *step*; faults are planned for steps. After each, the promises are checked that hold at all times.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kera.coordinator.cluster.intervals import intervals_of
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.recovery.decide import DRAINED
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import StoredRecord, VersionConflict
from kera.core.base.clock import FakeClock
from kera.core.errors import KeraError, StaleEpoch, Unavailable, Uncertain
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

SETTINGS = CoordinatorSettings.for_testing(Path("unused")).model_copy(
    update={"heartbeats_missed_max": 3, "report_grace_ms": 0}
)
BROKERS = 4
BACKUPS = 3

Key = tuple[int, int]
"""Stream and streamlet."""


class Broker:
    """A launch of a broker."""

    def __init__(self, broker_id: int, launch_id: str) -> None:
        self.broker_id = broker_id
        self.launch_id = launch_id
        self.epoch = 0
        self.paused = False
        self.streams: dict[int, common_pb2.StreamInfo] = {}
        """What it was told last of each stream."""
        self.sealed: dict[Key, int] = {}
        """The version of the assignments that it knew then; only a later one undoes it."""
        self.worked: Counter[tuple[int, int, int, int]] = Counter()
        """For how many heartbeats it has recovered each streamlet from each source."""

    def learn(self, stream: common_pb2.StreamInfo) -> None:
        known = self.streams.get(stream.stream_id)
        if known is not None and known.assignments_version > stream.assignments_version:
            return
        self.streams[stream.stream_id] = stream
        for one in stream.assignments:
            key = (stream.stream_id, one.streamlet_id)
            if stream.assignments_version > self.sealed.get(key, stream.assignments_version):
                del self.sealed[key]

    def serves(self) -> set[Key]:
        """The replicated streamlets that it takes chunks for."""
        return {
            (stream.stream_id, one.streamlet_id)
            for stream in self.streams.values()
            for one in stream.assignments
            if stream.config.replication and (one.broker_id, one.broker_epoch) == (self.broker_id, self.epoch)
        } - set(self.sealed)

    def progress(self, slowness: int) -> list[coordinator_pb2.RecoveryProgress]:
        """It recovers whatever it was opened for, in so many heartbeats, and takes twice as long for the replicas."""
        told: dict[tuple[int, int], coordinator_pb2.RecoveryProgress] = {}
        for stream in self.streams.values():
            for one in stream.assignments:
                if (one.broker_id, one.broker_epoch) != (self.broker_id, self.epoch):
                    continue
                for source in one.sources:
                    progress = told.setdefault(
                        (source.broker_id, source.before_epoch), coordinator_pb2.RecoveryProgress(source=source)
                    )
                    work = (stream.stream_id, one.streamlet_id, source.broker_id, source.before_epoch)
                    self.worked[work] += 1
                    if self.worked[work] > slowness:
                        progress.readable.add(stream_id=stream.stream_id, streamlet_id=one.streamlet_id)
                    if self.worked[work] > 2 * slowness:
                        progress.restored.add(stream_id=stream.stream_id, streamlet_id=one.streamlet_id)
        return list(told.values())


class Store:
    """What one coordinator sees of the store: it may write as long as it is the last one that began to lead."""

    def __init__(self, world: "World", epoch: int) -> None:
        self._world = world
        self._epoch = epoch

    async def get(self, key: str) -> StoredRecord | None:
        return await self._world.records.get(key)

    async def list(self, prefix: str) -> dict[str, StoredRecord]:
        return await self._world.records.list(prefix)

    async def write(self, *writes: Any) -> None:
        await self._world.step()
        if self._epoch != self._world.epoch:
            raise VersionConflict("another coordinator leads")
        await self._world.records.write(*writes)
        await self._world.step()

    async def close(self) -> None:
        pass


class World:
    """All of it."""

    def __init__(self, slowness: int = 0) -> None:
        self.records = MemoryStore()
        self.clock = FakeClock()
        self.epoch = 0
        self.coordinators: list[Coordinator] = []
        """All that ever led; the last one does, the others do not know better."""
        self.brokers: dict[int, Broker] = {}
        """Those whose process runs."""
        self.launches = 0
        self.orders: dict[str, int] = {}
        """The highest epoch of a coordinator that each launch of a broker had orders of."""
        self.fences: dict[tuple[int, int], int] = {}
        """By backup and broker: epochs below are refused."""
        self.freed: list[tuple[int, int]] = []
        self.faults: list[tuple[int, Callable[[World], None]]] = []
        """What happens, and at which step, in this order."""
        self.slowness = slowness
        self.steps = 0
        self.wants_coordinator = False
        self.waking: list[tuple[int, bool]] = []
        """Brokers that are about to be started again, and whether they have lost their memory."""

    @property
    def coordinator(self) -> Coordinator:
        return self.coordinators[-1]

    # --- steps and faults ----------------------------------------------------------------------------------------

    async def step(self) -> None:
        await asyncio.sleep(0)
        self.steps += 1
        while self.faults and self.faults[0][0] <= self.steps:
            self.faults.pop(0)[1](self)
        self.check()

    async def lead(self) -> None:
        """Another coordinator begins to lead; the one before does not know."""
        self.wants_coordinator = False
        self.epoch += 1
        store = Store(self, self.epoch)
        self.coordinators.append(
            await Coordinator.load(
                store,
                self,
                Backups(self),
                self.clock,
                SETTINGS,
                coordinator_epoch=self.epoch,
            )
        )

    async def start_broker(self, broker_id: int, *, lost_memory: bool = False) -> None:
        self.launches += 1
        broker = Broker(broker_id, f"launch-{self.launches}")
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=common_pb2.BrokerInfo(
                broker_id=broker_id if self.known(broker_id) else 0,
                grpc_address=f"broker-{broker_id}:1",
                segment_bytes=1 << 20,
            ),
            launch_id=broker.launch_id,
            lost_memory=lost_memory,
        )
        try:
            answer = await self.coordinator.members.register_broker(request)
        except KeraError:
            self.waking.append((broker_id, lost_memory))
            return
        assert answer.broker_id == broker_id
        broker.epoch = answer.broker_epoch
        self.brokers[broker_id] = broker
        for stream in answer.streams:
            broker.learn(stream)
        self.check()

    def known(self, broker_id: int) -> bool:
        return broker_id in self.coordinator.state.brokers.ids()

    def kill(self, broker_id: int) -> None:
        self.brokers.pop(broker_id, None)

    async def round(self) -> None:
        """A heartbeat interval goes by."""
        self.clock.advance(SETTINGS.heartbeat_interval_ms / 1000)
        if self.wants_coordinator:
            await self.lead()
        waking, self.waking = self.waking, []
        for broker_id, lost_memory in waking:
            if broker_id not in self.brokers:
                await self.start_broker(broker_id, lost_memory=lost_memory)
        for broker in list(self.brokers.values()):
            if not broker.paused:
                await self.heartbeat(broker)
        for backup in self.coordinator.state.backups.describe_all():
            self.coordinator.members.backup_heartbeat(
                coordinator_pb2.BackupHeartbeatRequest(backup_id=backup.backup_id, backup_epoch=backup.backup_epoch)
            )
        for coordinator in self.coordinators[-2:]:
            coordinator.tick()
            await coordinator.idle()
        self.check()

    async def heartbeat(self, broker: Broker) -> None:
        request = coordinator_pb2.HeartbeatRequest(
            broker_id=broker.broker_id, broker_epoch=broker.epoch, recoveries=broker.progress(self.slowness)
        )
        try:
            await self.coordinator.members.heartbeat(request)
        except StaleEpoch:
            if self.brokers.get(broker.broker_id) is broker:
                self.kill(broker.broker_id)

    async def close(self) -> None:
        for coordinator in self.coordinators:
            await coordinator.close()

    # --- brokers, as coordinators reach them -----------------------------------------------------------------------

    async def _order(self, info: common_pb2.BrokerInfo, coordinator_epoch: int) -> Broker:
        await self.step()
        broker = self.brokers.get(info.broker_id)
        if broker is None:
            raise Unavailable("nobody listens")
        if broker.paused:
            raise Uncertain("no answer")
        if coordinator_epoch < self.orders.get(broker.launch_id, 0):
            raise StaleEpoch("a later coordinator leads")
        self.orders[broker.launch_id] = coordinator_epoch
        return broker

    async def open_streamlets(
        self,
        info: common_pb2.BrokerInfo,
        stream: common_pb2.StreamInfo,
        *,
        coordinator_epoch: int,
        handed_over: Sequence[common_pb2.StreamletState] = (),
        created: bool = False,
    ) -> list[int]:
        del handed_over, created
        (await self._order(info, coordinator_epoch)).learn(stream)
        await self.step()
        return []

    async def drop_stream(self, info: common_pb2.BrokerInfo, stream_id: int, *, coordinator_epoch: int) -> None:
        (await self._order(info, coordinator_epoch)).streams.pop(stream_id, None)

    async def seal_streamlets(
        self,
        info: common_pb2.BrokerInfo,
        stream_id: int,
        streamlet_ids: Sequence[int],
        *,
        wait_ms: int,
        coordinator_epoch: int,
        assignments_version: int,
    ) -> list[common_pb2.StreamletState]:
        del wait_ms
        broker = await self._order(info, coordinator_epoch)
        assert assignments_version >= broker.streams[stream_id].assignments_version, "it would be refused"
        broker.sealed |= {(stream_id, one): broker.streams[stream_id].assignments_version for one in streamlet_ids}
        await self.step()
        return [self._end(stream_id, one) for one in streamlet_ids]

    async def where_ended(
        self, info: common_pb2.BrokerInfo, stream_id: int, streamlet_id: int, *, coordinator_epoch: int
    ) -> common_pb2.StreamletState:
        await self._order(info, coordinator_epoch)
        return self._end(stream_id, streamlet_id)

    def _end(self, stream_id: int, streamlet_id: int) -> common_pb2.StreamletState:
        """A group is written to a streamlet whenever somebody asks where it ends."""
        assignment = self.coordinator.state.catalog.with_id(stream_id).assignments[streamlet_id]
        last = max(intervals_of(assignment)[-1].first_group_id, assignment.first_group_id)
        return common_pb2.StreamletState(streamlet_id=streamlet_id, next_group_id=last + 1, next_records=[last])

    async def take_over(
        self, info: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        await self._order(info, request.coordinator_epoch)
        lost, before = request.source.broker_id, request.source.before_epoch
        causes = {(one.broker_id, one.before_epoch): one.cause for one in self.coordinator.recoveries.describe_all()}
        lives = causes.get((lost, before)) == DRAINED
        for backup_id in () if lives else range(1, BACKUPS + 1):
            assert self.fences.get((backup_id, lost), 0) >= before, "nothing is taken over before the fence"
        answer = broker_pb2.TakeOverResponse()
        for one in request.streams:
            for streamlet_id in one.streamlet_ids:
                state = self._end(one.stream.stream_id, streamlet_id)
                answer.streamlets.add(stream_id=one.stream.stream_id, state=state)
        await self.step()
        return answer

    async def measure_lag(
        self, broker: common_pb2.BrokerInfo, cursors: Sequence[common_pb2.Cursor]
    ) -> list[broker_pb2.Lag]:
        raise NotImplementedError  # nobody looks at metrics here

    async def refuses(self, info: common_pb2.BrokerInfo) -> bool:
        return info.broker_id not in self.brokers

    # --- promises --------------------------------------------------------------------------------------------------

    def can_acknowledge(self, broker: Broker) -> bool:
        return any(
            self.fences.get((backup_id, broker.broker_id), 0) <= broker.epoch for backup_id in range(1, BACKUPS + 1)
        )

    def check(self) -> None:
        """One broker at most can get chunks of a replicated streamlet acknowledged."""
        servers: dict[Key, int] = {}
        for broker in self.brokers.values():
            if not self.can_acknowledge(broker):
                continue
            for key in broker.serves():
                assert key not in servers, f"{key} at {servers[key]} and {broker.broker_id}"
                servers[key] = broker.broker_id

    def check_settled(self) -> None:
        """Everything has come to its end."""
        coordinator = self.coordinator
        assert all(info.restored_us or "CANCELLED" in str(info) for info in coordinator.recoveries.describe_all()), (
            coordinator.recoveries.describe_all()
        )
        for stream in coordinator.state.catalog.streams():
            for one in stream.assignments:
                intervals = intervals_of(one)
                assert [*one.intervals] == ([] if len(intervals) == 1 else intervals)
                assert intervals[-1].broker_id == one.broker_id
                begins = [interval.first_group_id for interval in intervals]
                assert begins == sorted(set(begins))
                if not stream.config.replication:
                    continue
                assert not one.sources
                for broker_id in {one.broker_id, *(interval.broker_id for interval in intervals)}:
                    assert broker_id in self.brokers
                owner = self.brokers[one.broker_id]
                assert owner.epoch == one.broker_epoch
                assert (stream.stream_id, one.streamlet_id) in owner.serves()


class Backups:
    """The backups, as coordinators reach them."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def fence(self, backup: common_pb2.BackupInfo, broker_id: int, before_epoch: int) -> None:
        for _ in range(backup.backup_id):  # some are slower
            await self._world.step()
        key = (backup.backup_id, broker_id)
        self._world.fences[key] = max(self._world.fences.get(key, 0), before_epoch)
        await self._world.step()

    async def free(
        self, backup: common_pb2.BackupInfo, broker_id: int, broker_epoch: int, *, before_epoch: int
    ) -> None:
        await self._world.step()
        if broker_epoch < self._world.fences.get((backup.backup_id, broker_id), 0):
            raise StaleEpoch("a later launch was fenced")
        for stream in self._world.coordinator.state.catalog.streams():
            for one in stream.assignments:
                for source in one.sources:
                    needed = source.broker_id == broker_id and source.before_epoch <= before_epoch
                    assert not needed, "freed too early"

    async def count_replicas(self, backup: common_pb2.BackupInfo, broker_ids: Iterable[int]) -> int:
        del backup, broker_ids
        return 0

    async def close(self) -> None:
        pass
