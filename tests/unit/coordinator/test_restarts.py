"""Planned restarts of brokers and backups at the coordinator."""

import asyncio

import pytest

from kera.core.errors import InvalidArgument, StaleEpoch, Unavailable
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster

GRACE_S = 60


@pytest.fixture
async def three(cluster: Cluster) -> Cluster:
    """Three brokers with two streamlets each, and two backups; each streamlet has one replica."""
    for launch in "abc":
        await cluster.register(launch)
    for launch in "xy":
        await cluster.register_backup(launch)
    await cluster.create("orders", streamlets=6, replication=1)
    await cluster.heartbeat(1, 2, 3)
    return cluster


def owners(cluster: Cluster) -> list[int]:
    return [one.broker_id for one in cluster.coordinator.state.catalog.named("orders").assignments]


async def prepare(
    cluster: Cluster, broker_id: int, *, stopping: bool = False, wait_ms: int = 1000
) -> coordinator_pb2.PrepareRestartResponse:
    epoch = cluster.coordinator.state.brokers.epoch(broker_id)
    request = coordinator_pb2.PrepareRestartRequest(
        broker_id=broker_id, epoch=epoch, wait_ms=wait_ms, stopping=stopping
    )
    return await cluster.coordinator.restarts.prepare(request)


async def stop(cluster: Cluster, broker_id: int) -> None:
    await prepare(cluster, broker_id)
    await prepare(cluster, broker_id, stopping=True)


async def start(cluster: Cluster, broker_id: int) -> None:
    """Start a broker again: it registers and sends a heartbeat."""
    await cluster.register(f"again-{broker_id}-{cluster.coordinator.state.brokers.epoch(broker_id)}", broker_id)
    await cluster.heartbeat(broker_id)
    await cluster.settle()


async def go_by(cluster: Cluster, seconds: int) -> None:
    """Let time pass in which brokers 2 and 3 and the backups send heartbeats."""
    for _ in range(seconds):
        for _ in range(10):
            cluster.clock.advance(0.1)
            cluster.coordinator.tick()
        await cluster.heartbeat(2, 3)
        cluster.backup_heartbeat(1, 2)
        await cluster.settle()


def broker(cluster: Cluster, broker_id: int) -> common_pb2.BrokerInfo:
    return cluster.coordinator.state.brokers.describe(broker_id)


async def test_a_restarting_broker_gives_its_streamlets_away_and_gets_them_back(three: Cluster) -> None:
    before = owners(three)

    answer = await prepare(three, 1)
    assert (answer.streamlets_given, answer.streamlets_left, answer.grace_ms) == (2, 0, GRACE_S * 1000)
    assert sorted(owners(three)) == [2, 2, 2, 3, 3, 3]
    assert (broker(three, 1).alive, broker(three, 1).restarting) == (True, True)

    await prepare(three, 1, stopping=True)
    assert (broker(three, 1).alive, broker(three, 1).restarting) == (False, True)
    assert three.coordinator.state.brokers.live_ids() == [2, 3]
    await three.silence(1)
    assert three.coordinator.recoveries.describe_all() == []
    assert broker(three, 1).grace_left_ms < GRACE_S * 1000

    await start(three, 1)
    assert owners(three) == before
    assert (broker(three, 1).alive, broker(three, 1).restarting) == (True, False)
    assert await three.store.list("handed-over/") == {}


async def test_streamlets_of_one_stream_move_together(three: Cluster) -> None:
    versions = three.coordinator.state.catalog.named("orders").assignments_version
    await prepare(three, 1)
    assert three.coordinator.state.catalog.named("orders").assignments_version == versions + 1
    assert len([one for one in three.brokers.sealed if one[0] == 1]) == 2
    assert await three.store.list("moves/") == {}


async def test_a_restarting_broker_is_recovered_when_its_grace_is_over(three: Cluster) -> None:
    await stop(three, 1)
    await go_by(three, GRACE_S - 1)
    assert three.coordinator.recoveries.describe_all() == []

    await go_by(three, 2)
    (recovery,) = three.coordinator.recoveries.describe_all()
    assert (recovery.broker_id, recovery.cause) == (1, "dead")
    assert not broker(three, 1).restarting


async def test_a_report_of_a_restarting_broker_is_ignored(three: Cluster) -> None:
    await stop(three, 1)
    three.brokers.refused = {1}
    three.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1, reason="refused"))
    await three.settle()
    assert three.coordinator.recoveries.describe_all() == []


async def test_the_next_coordinator_knows_a_restarting_broker_and_its_streamlets(three: Cluster) -> None:
    before = owners(three)
    await stop(three, 1)
    await three.restart()
    assert (broker(three, 1).alive, broker(three, 1).restarting) == (False, True)
    await go_by(three, GRACE_S - 1)
    assert three.coordinator.recoveries.describe_all() == []
    await start(three, 1)
    assert owners(three) == before


async def test_a_restarted_broker_does_not_get_back_a_streamlet_moved_since(three: Cluster) -> None:
    before = owners(three)
    await stop(three, 1)
    moved, stays = (number for number, owner in enumerate(before) if owner == 1)
    elsewhere = 5 - owners(three)[moved]
    await three.coordinator.migration.move("orders", moved, elsewhere)
    await start(three, 1)
    assert (owners(three)[moved], owners(three)[stays]) == (elsewhere, 1)
    assert await three.store.list("handed-over/") == {}


async def test_the_only_broker_keeps_its_streamlets_over_a_restart(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.create("orders", streamlets=2, replication=1)
    answer = await prepare(cluster, 1)
    assert (answer.streamlets_given, answer.streamlets_left) == (0, 2)
    await prepare(cluster, 1, stopping=True)
    await cluster.silence(1)
    assert cluster.coordinator.recoveries.describe_all() == []
    await start(cluster, 1)
    assert (owners(cluster), broker(cluster, 1).alive) == ([1, 1], True)


async def test_a_streamlet_that_cannot_move_does_not_hold_up_the_others(three: Cluster) -> None:
    stuck = owners(three).index(1)
    three.brokers.unsealable = {stuck}
    answer = await prepare(three, 1)
    assert (answer.streamlets_given, answer.streamlets_left) == (1, 1)
    assert owners(three)[stuck] == 1


async def test_a_stream_deleted_during_a_handover_does_not_hold_up_the_others(three: Cluster) -> None:
    await three.create("other", streamlets=3)
    async with three.coordinator.state.changing:
        deletion = asyncio.create_task(three.coordinator.streams.delete("other"))
        for _ in range(3):
            await asyncio.sleep(0)
        preparing = asyncio.create_task(prepare(three, 1))
        for _ in range(5):
            await asyncio.sleep(0)
    answer = await preparing
    await deletion
    assert answer.streamlets_left == 0
    assert 1 not in owners(three)


async def test_all_brokers_can_stop_at_the_same_time_and_keep_their_streamlets(three: Cluster) -> None:
    answers = await asyncio.gather(*(prepare(three, broker_id) for broker_id in (1, 2, 3)))
    for broker_id in (1, 2, 3):
        await prepare(three, broker_id, stopping=True)
    assert [answer.streamlets_left for answer in answers] == [2, 2, 2]
    assert all(each.restarting and not each.alive for each in three.coordinator.state.brokers.describe_all())
    with pytest.raises(Unavailable):
        await three.create("more")


async def test_a_handover_ends_after_its_time_limit(three: Cluster) -> None:
    three.brokers.answering.clear()
    answer = await prepare(three, 1, wait_ms=1)
    assert answer.streamlets_left == 2
    three.brokers.answering.set()
    await three.coordinator.close()


async def test_a_restart_needs_the_current_launch_of_one_member(three: Cluster) -> None:
    request = coordinator_pb2.PrepareRestartRequest(broker_id=1, epoch=99)
    with pytest.raises(StaleEpoch):
        await three.coordinator.restarts.prepare(request)
    with pytest.raises(InvalidArgument, match="one of the two"):
        await three.coordinator.restarts.prepare(coordinator_pb2.PrepareRestartRequest())


async def test_a_restarting_broker_gets_no_streamlets(three: Cluster) -> None:
    await stop(three, 1)
    created = await three.create("more", streamlets=4, replication=1)
    assert {one.broker_id for one in created.assignments} == {2, 3}
    with pytest.raises(Unavailable, match="is not alive"):
        await three.coordinator.migration.move("orders", 1, 1)


async def test_a_stopped_backup_counts_as_restarting_during_its_grace(three: Cluster) -> None:
    def backup() -> common_pb2.BackupInfo:
        return three.coordinator.state.backups.describe(1)

    request = coordinator_pb2.PrepareRestartRequest(backup_id=1, epoch=backup().backup_epoch)
    assert (await three.coordinator.restarts.prepare(request)).others_go_on
    assert (backup().alive, backup().restarting) == (True, True)
    request.stopping = True
    await three.coordinator.restarts.prepare(request)
    assert (backup().alive, backup().restarting) == (False, True)
    three.clock.advance(GRACE_S + 1)
    assert not backup().restarting

    await three.register_backup("x2", 1)
    assert (backup().alive, backup().restarting) == (True, False)


async def test_others_do_not_go_on_without_a_backup_that_a_stream_needs(three: Cluster) -> None:
    await three.create("twice", replication=2)
    request = coordinator_pb2.PrepareRestartRequest(backup_id=1, epoch=three.coordinator.state.backups.epoch(1))
    assert not (await three.coordinator.restarts.prepare(request)).others_go_on
