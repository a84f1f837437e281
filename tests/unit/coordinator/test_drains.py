from typing import Any

import pytest

from kera.core.errors import InvalidArgument, Unavailable
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster

STAYS = (
    "has older groups there, and no replicas: they stay for ever, as it has no retention: set one, truncate it or"
    " delete it"
)


async def drain(cluster: Cluster, **member: Any) -> coordinator_pb2.DrainResponse:
    """Ask for a drain, wait until the work that it starts is done, and ask again."""
    await cluster.coordinator.drains.drain(coordinator_pb2.DrainRequest(**member))
    await cluster.settle()
    await cluster.settle()
    return await cluster.coordinator.drains.drain(coordinator_pb2.DrainRequest(**member))


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two brokers, two backups, a stream with replicas and one without; both are on the first broker."""
    await cluster.register("a")
    for launch in "xy":
        await cluster.register_backup(launch)
    await cluster.create("copied", streamlets=2, replication=1)
    await cluster.create("plain", streamlets=1, replication=0)
    await cluster.register("b")
    return cluster


def owners(cluster: Cluster, name: str) -> list[int]:
    return [one.broker_id for one in cluster.coordinator.state.catalog.named(name).assignments]


async def recover(cluster: Cluster) -> None:
    """Let the owner report that it has recovered everything."""
    told = [
        coordinator_pb2.RecoveryProgress(source=source, readable=[ref], restored=[ref])
        for one in cluster.coordinator.state.catalog.named("copied").assignments
        for source in one.sources
        for ref in [common_pb2.StreamletRef(stream_id=1, streamlet_id=one.streamlet_id)]
    ]
    await cluster.heartbeat(2, recoveries=told)
    await cluster.coordinator.idle()


async def test_a_draining_broker_moves_its_streamlets_and_then_its_replicated_older_groups(two: Cluster) -> None:
    status = await drain(two, broker_id=1)

    assert (owners(two, "copied"), owners(two, "plain")) == ([2, 2], [2])
    (recovery,) = two.coordinator.recoveries.describe_all()
    assert (recovery.broker_id, recovery.cause) == (1, "drained")
    assert two.backups.fenced == []  # the broker lives
    assert len(two.coordinator.state.brokers.live_ids()) == 2
    assert (status.done, status.streamlets_owned, status.streamlets_held) == (False, 0, 1)
    assert list(status.reasons) == [
        f"stream 'plain' {STAYS}",
        "what it had is being recovered",
    ]
    assert (1, "copied") not in two.brokers.opened[-1:]  # it keeps the groups that others recover from its replicas

    await recover(two)
    assert two.brokers.streams[1, 1] == two.coordinator.state.catalog.named("copied")
    assert two.backups.freed == []  # the broker frees its replicas itself
    _, following = two.coordinator.state.catalog.named("plain").assignments[0].intervals
    empty = coordinator_pb2.EmptyInterval(
        stream_id=2, streamlet_id=0, first_group_id=1, end_group_id=following.first_group_id
    )
    await two.heartbeat(1, empty_intervals=[empty])
    status = await drain(two, broker_id=1)
    assert (status.done, list(status.reasons)) == (True, [])


async def test_a_broker_may_not_remove_groups_that_others_recover_from_it(two: Cluster) -> None:
    """Others may have been asked before the removal, and would wait for ever for records that no backup has."""

    async def refused() -> list[int]:
        start = common_pb2.EntryStart(
            start=common_pb2.Cursor(stream_id=1, streamlet_id=1, group_id=1, segment_id=1, position=64), first_record=3
        )
        epoch = two.coordinator.state.brokers.epoch(1)
        request = coordinator_pb2.HeartbeatRequest(broker_id=1, broker_epoch=epoch, starts=[start])
        request.empty_intervals.add(stream_id=1, streamlet_id=1, first_group_id=1, end_group_id=2)
        answer = await two.coordinator.members.heartbeat(request)
        return [one.streamlet_id for one in answer.starts_refused]

    def held() -> list[int]:
        (_, one) = two.coordinator.state.catalog.named("copied").assignments
        return [interval.broker_id for interval in one.intervals]

    assert await refused() == []
    two.brokers.waits_for = ["backup 2, which is away"]
    await drain(two, broker_id=1)
    assert (await refused(), held()) == ([1], [1, 2])

    two.brokers.waits_for = []
    await two.settle()
    (_, one) = two.coordinator.state.catalog.named("copied").assignments
    assert [source.broker_id for source in one.sources] == [1]
    assert await refused() == [1]
    assert len(await two.store.list("starts/")) == 1, "of what was said before"


async def test_a_draining_broker_gets_no_streamlets_and_stays_draining_over_restarts(two: Cluster) -> None:
    await drain(two, broker_id=1)
    await two.register("a2", broker_id=1)
    await two.restart()

    assert [broker.draining for broker in two.coordinator.state.brokers.describe_all()] == [True, False]
    assert {one.broker_id for one in (await two.create("more", streamlets=2)).assignments} == {2}

    status = await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1, undo=True))
    assert not status.done
    assert [one.broker_id for one in (await two.create("another")).assignments] == [1]
    assert [broker.draining for broker in (await two.restart()).state.brokers.describe_all()] == [False, False]


async def test_a_later_drain_does_not_report_the_reasons_of_an_earlier_one(two: Cluster) -> None:
    two.brokers.failures[1] = Unavailable("7 bytes did not get to disk within 2000 ms")
    await drain(two, broker_id=1)
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1, undo=True))
    await two.settle()

    status = await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1))
    assert list(status.reasons) == ["streamlets are being moved (3)"]


async def test_a_member_forgotten_during_a_query_of_its_drain_is_not_draining(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def count(*_: object) -> int:
        two.coordinator.state.backups.forget(1)
        return 0

    monkeypatch.setattr(two.backups, "count_replicas", count)
    assert not (await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=1))).draining


async def test_a_drain_reports_what_holds_it_up(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("plain", streamlets=2)

    status = await drain(cluster, broker_id=1)
    assert (status.done, status.streamlets_owned) == (False, 2)
    assert list(status.reasons) == ["there is no other live broker to take them; start one (2)"]

    await cluster.register("b")
    cluster.brokers.failures[1] = Unavailable("7 bytes did not get to disk within 2000 ms")
    status = await drain(cluster, broker_id=1)
    assert list(status.reasons) == ["7 bytes did not get to disk within 2000 ms (2)"]

    await cluster.silence(1)
    status = await drain(cluster, broker_id=1)
    assert "it is not alive, and what is not replicated only it has (2)" in status.reasons


async def test_streamlets_that_wait_for_their_turn_stay_when_the_drain_is_undone(cluster: Cluster) -> None:
    cluster.settings = cluster.settings.model_copy(update={"moves_in_flight_max": 2})
    await cluster.restart()
    await cluster.register("a")
    await cluster.create("s", streamlets=6)
    await cluster.register("b")
    await cluster.brokers.hold_up(cluster.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1)))
    cluster.coordinator.tick()
    await cluster.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1, undo=True))
    cluster.brokers.answering.set()
    await cluster.settle()
    assert owners(cluster, "s") == [2, 2, 1, 1, 1, 1]

    await cluster.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1))
    await cluster.coordinator.idle()  # no tick: the next streamlets move when there is room
    assert owners(cluster, "s") == [2] * 6


async def test_streamlets_that_cannot_move_do_not_hold_up_the_others(cluster: Cluster) -> None:
    cluster.settings = cluster.settings.model_copy(update={"moves_in_flight_max": 1})
    await cluster.restart()
    await cluster.register("a")
    await cluster.create("s", streamlets=3)
    await cluster.register("b")
    cluster.brokers.unsealable = {0}

    for _ in range(4):
        await drain(cluster, broker_id=1)
    assert owners(cluster, "s") == [1, 2, 2]
    status = await drain(cluster, broker_id=1)
    assert list(status.reasons) == [
        f"stream 's' {STAYS} (2)",
        "streamlet 0 is not durable in time",
    ]


async def test_a_drain_waits_for_streams_being_created_on_the_broker(two: Cluster) -> None:
    await drain(two, broker_id=2)
    assert (await drain(two, broker_id=2)).done
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2, undo=True))
    creation = await two.brokers.hold_up(two.create("new", replication=0))

    status = await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2))
    assert (status.done, list(status.reasons)) == (False, ["streams are being created there"])

    two.brokers.answering.set()
    assert [one.broker_id for one in (await creation).assignments] == [2]
    await drain(two, broker_id=2)
    assert owners(two, "new") == [1]


async def test_a_drain_reports_what_older_groups_wait_for(two: Cluster) -> None:
    two.brokers.unsealable = {1}
    status = await drain(two, broker_id=1)
    assert "older groups go to their owners when all that it owns has moved" in status.reasons
    await two.alter("plain", retention_ms=5)
    assert (
        "stream 'plain' has older groups there, and no replicas: they stay until retention removes them"
        in (await drain(two, broker_id=1)).reasons
    )

    two.brokers.unsealable.clear()
    two.brokers.waits_for = ["backup 2"]
    status = await drain(two, broker_id=1)
    assert any(reason.startswith("its recovery: broker 2") and "backup 2" in reason for reason in status.reasons)
    assert "older groups are being recovered to their owners (2)" in status.reasons


async def test_a_draining_broker_that_dies_is_recovered(two: Cluster) -> None:
    two.brokers.failures[1] = Unavailable("too slow")
    await drain(two, broker_id=1)
    await two.silence(1)
    await recover(two)

    assert owners(two, "copied") == [2, 2]
    assert [one.cause for one in two.coordinator.recoveries.describe_all()] == ["dead"]
    status = await drain(two, broker_id=1)
    assert (status.done, status.streamlets_owned) == (False, 1)  # the streamlet without replicas


async def test_a_drain_of_a_backup_is_done_when_it_has_no_replicas(two: Cluster) -> None:
    two.backups.replicas[2] = 7
    status = await drain(two, backup_id=2)
    assert (status.done, status.replicas) == (False, 7)
    assert list(status.reasons) == ["brokers create the replicas again on other backups"]
    assert [one.draining for one in two.coordinator.state.backups.describe_all()] == [False, True]

    two.backups.replicas[2] = 0
    assert (await drain(two, backup_id=2)).done
    undone = await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=2, undo=True))
    assert not undone.done
    assert [one.draining for one in two.coordinator.state.backups.describe_all()] == [False, False]


async def test_a_drain_reports_what_keeps_replicas_on_a_backup(two: Cluster) -> None:
    two.backups.replicas[2] = 7
    await two.create("everywhere", replication=2)
    await two.silence(1, 2)  # so that no broker recovers anything
    status = await drain(two, backup_id=2)
    assert set(status.reasons) == {
        "stream 'everywhere' needs 2 other live backups, there are 1",
        "broker 1 is not alive: its replicas stay until it is back, or recovered",
        "broker 2 is not alive: its replicas stay until it is back, or recovered",
    }
    two.backups.failures[2] = Unavailable("nobody there")
    assert list((await drain(two, backup_id=2)).reasons) == ["it does not report its content: nobody there"]
    two.clock.advance(3600)
    status = await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=2))
    assert list(status.reasons) == ["it is not alive: its content is unknown"]


async def test_a_query_of_a_drain_changes_nothing(two: Cluster) -> None:
    asked = coordinator_pb2.DrainRequest(broker_id=1, ask=True)
    status = await two.coordinator.drains.drain(asked)
    assert (status.done, status.draining, status.streamlets_owned) == (False, False, 3)
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1))
    assert (await two.coordinator.drains.drain(asked)).draining
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1, undo=True))
    assert not (await two.coordinator.drains.drain(asked)).draining
    assert not (await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=1, ask=True))).draining
    with pytest.raises(InvalidArgument, match="there is no broker 9"):
        await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=9, ask=True))
    with pytest.raises(InvalidArgument, match="a query cannot undo a drain"):
        await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=1, ask=True, undo=True))
    await two.coordinator.idle()


async def test_a_drain_must_name_exactly_one_existing_member(two: Cluster) -> None:
    both: dict[str, Any] = {"broker_id": 1, "backup_id": 1}
    for wrong in ({}, both):
        with pytest.raises(InvalidArgument, match="one of the two"):
            await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(**wrong))
    with pytest.raises(InvalidArgument, match="there is no broker 9"):
        await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=9))
    with pytest.raises(InvalidArgument, match="there is no backup 9"):
        await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(backup_id=9))
