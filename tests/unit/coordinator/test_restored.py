"""A coordinator with metadata from an older copy decides nothing before brokers have reported."""

import json
from collections.abc import AsyncIterator

import pytest

from kera.coordinator.recovery.decide import LOST_MEMORY
from kera.coordinator.store.leadership import LEADER
from kera.coordinator.store.memory_store import MemoryStore
from kera.coordinator.store.metadata import Write
from kera.coordinator.store.metadata_copy import RESTORED, put_back
from kera.core.errors import StaleEpoch, Unavailable, UnknownLaunch
from kera.server.lineage import comes_from
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import SETTINGS, Cluster, registration

BROKERS = 3
SILENCE_S = SETTINGS.heartbeat_interval_ms * SETTINGS.heartbeats_missed_max / 1000
GRACE_S = SETTINGS.restart_grace_ms / 1000
EPOCHS = 10
"""The number of coordinator epochs that may have passed between a copy and its restore."""


class Restoring(Cluster):
    """A cluster whose metadata are restored from a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, common_pb2.StreamInfo] = {}
        """The latest description of the stream that each broker knows, by broker id."""

    async def lead(self) -> None:
        """Start another coordinator, which records its lead in the store as `Leadership` does."""
        last = await self.store.get(LEADER)
        previous = json.loads(last.value)["epoch"] if last else 0
        self.epoch = max(previous, self.epoch) + EPOCHS
        record = json.dumps({"epoch": self.epoch, "previous_epoch": previous}).encode()
        await self.store.write(Write(LEADER, record, last.version if last else 0))
        self.coordinator = await self.load()

    async def go_back(self, copy: bytes) -> None:
        """Restore the copy as the command does, and start a coordinator with it."""
        self.store = MemoryStore()
        await put_back(self.store, copy)
        await self.lead()

    def holding(self, launch_id: str, broker_id: int) -> coordinator_pb2.RegisterBrokerRequest:
        """The registration of a new launch of a broker that has the stream."""
        request = registration(launch_id, broker_id)
        request.directory_id = f"directory-{broker_id}"
        if broker_id in self.known:
            stream = self.known[broker_id]
            request.held_streams.add(
                stream_id=stream.stream_id,
                assignments_version=stream.assignments_version,
                config_version=stream.config_version,
            )
        return request

    async def join(self, launch_id: str, broker_id: int) -> None:
        await self.coordinator.members.register_broker(self.holding(launch_id, broker_id))

    async def tell(self, *broker_ids: int) -> None:
        """Let brokers report the streams that they hold, and describe those that the coordinator does not know."""
        for broker_id in broker_ids:
            request = self.beat(broker_id)
            request.held_streams.extend(self.holding("any", broker_id).held_streams)
            request.held_streams_told = True
            await self.coordinator.members.heartbeat(request)
            if (await self.coordinator.members.heartbeat(request)).unknown_stream_ids:
                request = self.beat(broker_id)
                request.unknown_streams.add(stream=self.known[broker_id], bytes=1, records=1)
                await self.coordinator.members.heartbeat(request)
        await self.coordinator.idle()

    def beat(self, broker_id: int) -> coordinator_pb2.HeartbeatRequest:
        epoch = self.coordinator.state.brokers.epoch(broker_id)
        return coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=epoch)

    @property
    def later(self) -> common_pb2.StreamInfo:
        return self.known[2]


@pytest.fixture
async def gone_back() -> AsyncIterator[Restoring]:
    """Since the restored copy, broker 1 was lost and broker 2 took over its streamlet."""
    cluster = Restoring()
    await cluster.lead()
    for number in range(1, BROKERS + 1):
        await cluster.register(f"a-{number}", directory_id=f"directory-{number}")
    await cluster.register_backup("backup")
    cluster.known[1] = await cluster.create("orders", brokers=1, replication=1)
    assert cluster.known[1].assignments[0].broker_id == 1
    copy = await cluster.coordinator.copy_metadata()
    await cluster.lead()
    await cluster.silence(1)
    for _ in range(BROKERS):
        await cluster.settle()
    cluster.known[2] = cluster.coordinator.state.catalog.named("orders")
    owner = cluster.known[2].assignments[0].broker_id
    assert owner == 2
    for one in cluster.known[2].assignments:
        del one.sources[:]  # the recovery has ended
    await cluster.go_back(copy)
    cluster.brokers.opened.clear()
    yield cluster
    await cluster.coordinator.close()


async def refused(cluster: Restoring, launch_id: str, broker_id: int) -> str:
    with pytest.raises(Unavailable) as caught:
        await cluster.join(launch_id, broker_id)
    assert caught.value.attributes["catching_up"]
    return caught.value.message


async def test_a_stream_recovered_since_the_copy_stays_with_its_new_owner(gone_back: Restoring) -> None:
    assert "broker 2" in await refused(gone_back, "b-1", 1)
    for number in (2, 3):
        await refused(gone_back, f"b-{number}", number)
    gone_back.clock.advance(SILENCE_S)
    for number in (1, 2, 3):
        await gone_back.join(f"b-{number}", number)
        assert gone_back.coordinator.state.catalog.named("orders").assignments[0].broker_id == 1, (
            "nobody has told of it"
        )
    assert "broker" in gone_back.coordinator.state.catching_up

    await gone_back.tell(1, 2, 3)

    stream = gone_back.coordinator.state.catalog.named("orders")
    assert stream.assignments[0].broker_id == 2
    assert stream.assignments[0].broker_epoch == gone_back.coordinator.state.brokers.epoch(2)
    assert comes_from(stream, gone_back.later.assignments_version)
    assert gone_back.coordinator.unknown.describe_all() == []
    assert gone_back.brokers.opened == [(1, "orders"), (2, "orders")]  # the former owner too
    await gone_back.settle()
    assert gone_back.coordinator.state.catching_up == ""
    assert RESTORED not in await gone_back.store.list("")


async def test_brokers_get_a_new_version_of_each_stream_when_catching_up_ends(
    gone_back: Restoring,
) -> None:
    for number in (1, 2, 3):
        await refused(gone_back, f"b-{number}", number)
    gone_back.clock.advance(SILENCE_S)
    for number in (1, 2, 3):
        await gone_back.join(f"b-{number}", number)
    await gone_back.tell(1, 2, 3)
    taken_up = gone_back.coordinator.state.catalog.named("orders")
    await gone_back.settle()
    stream = gone_back.coordinator.state.catalog.named("orders")
    assert stream.assignments == taken_up.assignments
    assert stream.assignments_version > taken_up.assignments_version
    assert gone_back.brokers.streams[2, stream.stream_id].assignments_version == stream.assignments_version


async def test_streams_are_not_recovered_moved_altered_or_deleted_while_catching_up(gone_back: Restoring) -> None:
    for number in (2, 3):
        await refused(gone_back, f"b-{number}", number)
    gone_back.clock.advance(SILENCE_S + 1)
    await gone_back.settle()
    assert "broker 1 to say what they hold" in gone_back.coordinator.state.catching_up

    with pytest.raises(Unavailable, match="older than the cluster"):
        await gone_back.coordinator.migration.move("orders", 0, 3)
    with pytest.raises(Unavailable, match="older than the cluster"):
        await gone_back.coordinator.streams.delete("orders")
    with pytest.raises(Unavailable, match="older than the cluster"):
        await gone_back.alter("orders", retention_ms=5)
    gone_back.coordinator.drains.advance()
    gone_back.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1, broker_epoch=0))
    await gone_back.settle()

    assert gone_back.coordinator.recoveries.describe_all() == []
    assert gone_back.coordinator.state.catalog.named("orders") == gone_back.known[1]


async def test_catching_up_waits_for_a_missing_broker_only_for_the_grace(gone_back: Restoring) -> None:
    for number in (2, 3):
        await refused(gone_back, f"b-{number}", number)
    gone_back.clock.advance(GRACE_S)
    for number in (2, 3):
        await gone_back.join(f"b-{number}", number)
    await gone_back.tell(2, 3)
    await gone_back.settle()

    assert gone_back.coordinator.state.catching_up == ""
    assert gone_back.coordinator.state.catalog.named("orders").assignments[0].broker_id == 2
    assert gone_back.coordinator.recoveries.describe_all() == [], "what broker 1 had is elsewhere"


async def admitted(cluster: Restoring, *, lost_memory: int = 0) -> None:
    """Let all brokers be refused once, and register them when the first wait is over."""
    for number in (1, 2, 3):
        await refused(cluster, f"b-{number}", number)
    cluster.clock.advance(SILENCE_S)
    for number in (1, 2, 3):
        request = cluster.holding(f"b-{number}", number)
        request.lost_memory = number == lost_memory
        await cluster.coordinator.members.register_broker(request)


async def test_a_broker_that_lost_its_memory_is_recovered_after_catching_up(gone_back: Restoring) -> None:
    lost = gone_back.later.assignments[0]
    await admitted(gone_back, lost_memory=2)
    await gone_back.tell(1, 2, 3)

    assert gone_back.coordinator.state.catalog.named("orders").assignments[0] == lost
    (recovery,) = gone_back.coordinator.recoveries.describe_all()
    assert (recovery.broker_id, recovery.cause) == (2, LOST_MEMORY)
    gone_back.backup_heartbeat(*gone_back.coordinator.state.backups.ids())
    for _ in range(BROKERS):
        await gone_back.settle()
    assert gone_back.brokers.taken_over


async def test_a_stream_that_cannot_be_taken_up_continues_as_in_the_metadata(
    gone_back: Restoring,
) -> None:
    gone_back.later.assignments[0].sources.add(broker_id=1, before_epoch=4)  # its recovery has not ended
    await admitted(gone_back)
    await gone_back.tell(1, 2, 3)
    for _ in range(2):
        await gone_back.settle()

    assert gone_back.coordinator.state.catching_up == ""
    owner = gone_back.coordinator.state.catalog.named("orders").assignments[0]
    assert (owner.broker_id, owner.broker_epoch) == (1, gone_back.coordinator.state.brokers.epoch(1))
    assert gone_back.brokers.opened[-1] == (1, "orders")
    (problem,) = gone_back.coordinator.unknown.describe_all()
    assert "was being recovered" in problem.problem


async def test_the_next_coordinator_continues_to_wait_for_brokers(gone_back: Restoring) -> None:
    await refused(gone_back, "b-1", 1)
    await gone_back.lead()

    assert "broker 2" in await refused(gone_back, "b-1", 1)


async def test_a_restored_directory_is_detected_by_a_brokers_known_coordinator_epoch(
    gone_back: Restoring,
) -> None:
    await gone_back.edit(Write(RESTORED, None, 1))
    coordinator = await gone_back.load()
    gone_back.coordinator = coordinator
    gone_back.epoch += EPOCHS
    request = gone_back.holding("b-1", 1)
    assert coordinator.state.catching_up == ""
    request.known_coordinator_epoch = coordinator.state.coordinator_epoch - 1
    with pytest.raises(Unavailable, match="older than the cluster"):
        await coordinator.members.register_broker(request)

    assert (await gone_back.store.list(RESTORED)).keys() == {RESTORED}


async def test_a_restored_directory_is_detected_by_the_version_of_assignments(gone_back: Restoring) -> None:
    await gone_back.edit(Write(RESTORED, None, 1))
    gone_back.coordinator = await gone_back.load()

    await refused(gone_back, "b-2", 2)


async def test_a_running_launch_that_is_later_than_the_metadata_keeps_its_epoch(gone_back: Restoring) -> None:
    coordinator, epoch = gone_back.coordinator, gone_back.coordinator.state.brokers.epoch(2) + 2
    gone_back.clock.advance(epoch + 1_600_000_000)
    beat = coordinator_pb2.HeartbeatRequest(broker_id=2, broker_epoch=epoch)
    with pytest.raises(UnknownLaunch):
        await coordinator.members.heartbeat(beat)
    request = registration("a-later-one", 2)
    request.broker.broker_epoch, request.directory_id = epoch, "directory-2"

    for _ in range(2):  # the answer may be lost
        broker = await coordinator.members.register_broker(request)
        assert broker.broker_epoch == epoch

    await coordinator.members.heartbeat(beat)
    assert coordinator.state.next_epoch("broker") > epoch
    with pytest.raises(StaleEpoch):
        await coordinator.members.heartbeat(coordinator_pb2.HeartbeatRequest(broker_id=2, broker_epoch=epoch - 2))


async def test_a_launch_later_than_the_metadata_that_lost_its_memory_is_recovered(gone_back: Restoring) -> None:
    """It had registered without its memory, and no broker had taken over yet, so none knows later assignments."""
    coordinator, epoch = gone_back.coordinator, gone_back.coordinator.state.brokers.epoch(1) + BROKERS
    gone_back.known = dict.fromkeys(gone_back.known, coordinator.state.catalog.named("orders"))
    gone_back.clock.advance(epoch + 1_600_000_000)
    request = registration("a-later-one", 1)
    request.broker.broker_epoch, request.directory_id, request.lost_memory = epoch, "directory-1", True
    await coordinator.members.register_broker(request)
    for number in (2, 3):
        await gone_back.join(f"b-{number}", number)
    await gone_back.tell(1, 2, 3)
    await gone_back.settle()

    (recovery,) = coordinator.recoveries.describe_all()
    assert (recovery.broker_id, recovery.before_epoch, recovery.cause) == (1, epoch, LOST_MEMORY)


async def test_brokers_register_at_once_when_the_metadata_are_not_older() -> None:
    cluster = Restoring()
    await cluster.lead()
    await cluster.register("a", directory_id="directory-1")
    cluster.known[1] = await cluster.create("orders")
    request = cluster.holding("b", 1)
    request.known_coordinator_epoch = cluster.coordinator.state.coordinator_epoch
    await cluster.lead()

    await cluster.coordinator.members.register_broker(request)

    assert cluster.coordinator.state.catching_up == ""
