"""Forgetting members that are gone for good."""

import pytest

from kera.coordinator.cluster.catalog import GROUPS_PER_LAUNCH
from kera.core.errors import InvalidArgument, Unavailable, UnknownStream
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two brokers and two backups."""
    for launch in "ab":
        await cluster.register(launch)
    for launch in "xy":
        await cluster.register_backup(launch)
    return cluster


async def forget(cluster: Cluster, *, broker_id: int = 0, backup_id: int = 0, force: bool = False) -> list[str]:
    request = coordinator_pb2.ForgetMemberRequest(broker_id=broker_id, backup_id=backup_id, force=force)
    return list((await cluster.coordinator.forgetting.forget(request)).lost)


def broker_ids(cluster: Cluster) -> list[int]:
    return [one.broker_id for one in cluster.coordinator.state.brokers.describe_all()]


async def silence_backup(cluster: Cluster, backup_id: int) -> None:
    for _ in range(cluster.settings.heartbeats_missed_max + 1):
        cluster.clock.advance(cluster.settings.heartbeat_interval_ms / 1000)
        await cluster.heartbeat(1, 2)
        cluster.backup_heartbeat(*(one for one in (1, 2) if one != backup_id))
        await cluster.settle()


async def test_a_live_unknown_or_unnamed_member_cannot_be_forgotten(two: Cluster) -> None:
    for member in ({"broker_id": 1}, {"backup_id": 1}):
        with pytest.raises(InvalidArgument, match="is alive"):
            await forget(two, force=True, **member)
    with pytest.raises(InvalidArgument, match="there is no broker 9"):
        await forget(two, broker_id=9)
    with pytest.raises(InvalidArgument, match="one of the two"):
        await forget(two)


async def test_a_member_that_is_expected_back_cannot_be_forgotten(two: Cluster) -> None:
    epoch = two.coordinator.state.brokers.epoch(1)
    request = coordinator_pb2.PrepareRestartRequest(broker_id=1, epoch=epoch, stopping=True)
    await two.coordinator.restarts.prepare(request)
    with pytest.raises(InvalidArgument, match="expected back; ask again in 60 s"):
        await forget(two, broker_id=1, force=True)


async def test_a_member_that_was_drained_and_stopped_can_be_forgotten_at_once(two: Cluster) -> None:
    await two.create("copied", streamlets=1, replication=1)
    state, restarts = two.coordinator.state, two.coordinator.restarts
    (owner,) = (one.broker_id for one in state.catalog.named("copied").assignments)
    idle = 3 - owner
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=idle))
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=1))
    stop = coordinator_pb2.PrepareRestartRequest
    await restarts.prepare(stop(broker_id=idle, epoch=state.brokers.epoch(idle), stopping=True))
    await restarts.prepare(stop(backup_id=1, epoch=state.backups.epoch(1), stopping=True))
    assert state.brokers.is_expected(idle)
    assert state.backups.is_expected(1)

    assert await forget(two, broker_id=idle) == []
    with pytest.raises(Unavailable, match=f"was drained, and has stopped a moment ago; broker {owner} may have"):
        await forget(two, backup_id=1)
    await two.heartbeat(owner, unneeded_backup_ids=[1])
    assert await forget(two, backup_id=1) == []


async def test_a_forgotten_broker_cannot_return_and_its_id_is_not_used_again(two: Cluster) -> None:
    await two.silence(1)
    assert await forget(two, broker_id=1) == []
    assert broker_ids(two) == [2]
    await two.restart()
    assert broker_ids(two) == [2]
    with pytest.raises(InvalidArgument, match="it was forgotten"):
        await two.register("a2", 1)
    info, _ = await two.register("c")
    assert info.broker_id == 3  # ids are given once
    await two.settle()


async def test_members_that_are_later_than_the_metadata_keep_their_ids(cluster: Cluster) -> None:
    """This happens after a restore of the metadata from a copy that is older than these members."""
    for broker_id in (4, 3):
        info, _ = await cluster.register(f"launch-{broker_id}", broker_id, directory_id=f"directory-{broker_id}")
        assert info.broker_id == broker_id
    info, _ = await cluster.register("new", directory_id="another")
    assert info.broker_id == 5
    with pytest.raises(InvalidArgument, match="it was forgotten"):
        await cluster.register("nobody", 6)


async def test_an_id_belongs_to_one_data_directory_until_that_is_forgotten(two: Cluster) -> None:
    info, _ = await two.register("new", directory_id="younger")
    with pytest.raises(
        InvalidArgument, match=f"another broker has id {info.broker_id}.*forget broker-{info.broker_id}"
    ):
        await two.register("old", info.broker_id, directory_id="older")
    again, _ = await two.register("new-2", info.broker_id, directory_id="younger")
    assert again.broker_id == info.broker_id

    await two.silence(info.broker_id)
    await forget(two, broker_id=info.broker_id)
    await two.restart()
    with pytest.raises(InvalidArgument, match="it was forgotten"):
        await two.register("new-3", info.broker_id, directory_id="younger")
    old, _ = await two.register("old-2", info.broker_id, directory_id="older")
    assert old.broker_id == info.broker_id
    await two.settle()


async def test_a_broker_cannot_be_forgotten_before_its_recovery_is_done(two: Cluster) -> None:
    await two.create("copied", streamlets=2, replication=1)
    await two.silence(1)
    with pytest.raises(InvalidArgument, match="a recovery of the data of broker 1 is under way"):
        await forget(two, broker_id=1, force=True)

    refs = [
        coordinator_pb2.RecoveryProgress(source=source, readable=[ref], restored=[ref])
        for one in two.coordinator.state.catalog.named("copied").assignments
        for source in one.sources
        for ref in [common_pb2.StreamletRef(stream_id=1, streamlet_id=one.streamlet_id)]
    ]
    await two.heartbeat(2, recoveries=refs)
    await two.coordinator.idle()
    await two.settle()
    assert await forget(two, broker_id=1) == []
    await two.register_backup("z")  # the new backup learns of recoveries that have ended
    await two.settle()
    assert broker_ids(two) == [2]


async def test_unreplicated_records_of_a_broker_are_given_up_only_by_force_and_reported(two: Cluster) -> None:
    await two.create("plain", streamlets=2, replication=0)
    two.brokers.ends[1, 1] = common_pb2.StreamletState(streamlet_id=1, next_group_id=5, next_records=[40])
    mine = next(
        one.streamlet_id for one in two.coordinator.state.catalog.named("plain").assignments if one.broker_id == 1
    )
    await two.silence(1)
    with pytest.raises(InvalidArgument, match=r"'plain', which has no replicas.*--force"):
        await forget(two, broker_id=1)
    assert broker_ids(two) == [1, 2]

    lost = await forget(two, broker_id=1, force=True)
    assert lost == ["stream 'plain', which has no replicas: all records of 1 of its streamlets there"]
    assignment = two.coordinator.state.catalog.named("plain").assignments[mine]
    assert (assignment.broker_id, assignment.first_group_id) == (2, 2 * GROUPS_PER_LAUNCH)
    assert list(assignment.intervals) == []
    await two.coordinator.idle()
    assert two.brokers.streams[2, 1] == two.coordinator.state.catalog.named("plain")
    assert two.brokers.handed_over[2, 1, mine].next_group_id == 2 * GROUPS_PER_LAUNCH
    assert await two.store.list("moves/") == {}
    assert (await two.restart()).state.catalog.named("plain").assignments[mine] == assignment
    await two.settle()


async def test_intervals_of_a_forgotten_broker_are_removed(two: Cluster) -> None:
    await two.create("plain", streamlets=1, replication=0)
    two.brokers.ends[1, 0] = common_pb2.StreamletState(streamlet_id=0, next_group_id=5, next_records=[40])
    await two.coordinator.migration.move("plain", 0, 2)
    await two.silence(1)
    assert await forget(two, broker_id=1, force=True) == [
        "stream 'plain', which has no replicas: older records of 1 of its streamlets"
    ]
    assert [
        one.broker_id for one in two.coordinator.state.brokers_of(two.coordinator.state.catalog.named("plain"))
    ] == [2]


async def test_a_backup_can_be_forgotten_when_no_broker_needs_it(two: Cluster) -> None:
    await two.create("copied", streamlets=2, replication=1)
    await silence_backup(two, 1)
    with pytest.raises(InvalidArgument, match="broker 1 may have replicas there"):
        await forget(two, backup_id=1)

    await two.heartbeat(1, 2, unneeded_backup_ids=[1])
    assert await forget(two, backup_id=1) == []
    assert [one.backup_id for one in two.coordinator.state.backups.describe_all()] == [2]
    with pytest.raises(InvalidArgument, match="it was forgotten"):
        await two.register_backup("x2", 1)


async def test_force_forgets_a_backup_that_brokers_may_need(two: Cluster) -> None:
    await two.create("copied", streamlets=2, replication=1)
    await silence_backup(two, 1)
    assert len(await forget(two, backup_id=1, force=True)) == 2


async def test_a_forgotten_broker_does_not_hold_up_the_drop_of_a_stream(two: Cluster) -> None:
    await two.create("plain", streamlets=2, replication=0)
    await two.silence(1)
    await two.coordinator.streams.delete("plain")
    await two.settle()
    assert await forget(two, broker_id=1) == []
    await two.settle()
    assert await two.store.list("drops/") == {}
    with pytest.raises(UnknownStream):
        two.coordinator.state.catalog.named("plain")


async def test_a_new_member_gets_the_id_that_it_chooses_unless_it_is_taken(two: Cluster) -> None:
    async def choose(launch_id: str, broker_id: int) -> int:
        broker = common_pb2.BrokerInfo(broker_id=broker_id, grpc_address="h:1")
        request = coordinator_pb2.RegisterBrokerRequest(broker=broker, launch_id=launch_id, chosen_id=True)
        info = await two.coordinator.members.register_broker(request)
        return info.broker_id

    assert await choose("k", 17) == 17
    assert await choose("k", 17) == 17  # its answer was lost
    with pytest.raises(InvalidArgument, match=r"there is a broker 17 already.*kera cluster forget broker-17"):
        await choose("l", 17)
    assert await choose("m", 5) == 5
    assert (await two.register("n"))[0].broker_id == 18
    assert broker_ids(two) == [1, 2, 5, 17, 18]
    with pytest.raises(InvalidArgument, match="may choose an id from 1"):
        await choose("o", 1 << 31)
