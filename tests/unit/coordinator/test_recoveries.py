"""Recoveries of lost brokers, one scenario each; tests/simulation covers random orders of faults."""

from typing import Any

import pytest

from kera.coordinator.cluster.catalog import GROUPS_PER_LAUNCH
from kera.coordinator.recovery import carry_out as recoveries_module
from kera.coordinator.recovery import decide as recovery_module
from kera.coordinator.recovery import take_over as take_over_module
from kera.coordinator.recovery.records import KEPT, records_of
from kera.coordinator.store.metadata import Write
from kera.core.errors import StaleEpoch, Unavailable
from kera.v1 import common_pb2, consumer_group_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import FIRST_VERSION, Cluster, registration


@pytest.fixture
async def three(cluster: Cluster) -> Cluster:
    """Three brokers and two backups; both streams are on all brokers, and only ``copied`` is replicated."""
    for launch in "abc":
        await cluster.register(launch)
    for launch in "xy":
        await cluster.register_backup(launch)
    await cluster.create("copied", streamlets=3, replication=2)
    await cluster.create("plain", streamlets=3, replication=0)
    return cluster


def owners(cluster: Cluster, name: str = "copied") -> list[tuple[int, int]]:
    return [(one.broker_id, one.broker_epoch) for one in cluster.coordinator.state.catalog.named(name).assignments]


def sources(cluster: Cluster) -> list[list[tuple[int, int]]]:
    return [
        [(source.broker_id, source.before_epoch) for source in one.sources]
        for one in cluster.coordinator.state.catalog.named("copied").assignments
    ]


def only(cluster: Cluster) -> coordinator_pb2.RecoveryInfo:
    (recovery,) = cluster.coordinator.recoveries.describe_all()
    return recovery


def phase(cluster: Cluster) -> str:
    return coordinator_pb2.RecoveryPhase.Name(only(cluster).phase).removeprefix("RECOVERY_PHASE_")


def progress(
    broker_id: int, before_epoch: int, *, readable: tuple[int, ...] = (), restored: tuple[int, ...] = (), **fields: Any
) -> coordinator_pb2.RecoveryProgress:
    """The progress of a recovery with streamlets of the first stream."""
    return coordinator_pb2.RecoveryProgress(
        source=common_pb2.RecoverySource(broker_id=broker_id, before_epoch=before_epoch),
        readable=[common_pb2.StreamletRef(stream_id=1, streamlet_id=one) for one in readable],
        restored=[common_pb2.StreamletRef(stream_id=1, streamlet_id=one) for one in restored],
        **fields,
    )


# --- from the loss to the end of a recovery ----------------------------------------------------------------------


async def test_replicated_streamlets_of_a_dead_broker_go_to_others_and_the_rest_stays(three: Cluster) -> None:
    assert owners(three) == [(1, 1), (2, 2), (3, 3)]

    await three.silence(1)

    assert owners(three) == [(2, 2), (2, 2), (3, 3)]
    assert sources(three) == [[(1, 4)], [], []]
    assert (1, 1) in owners(three, "plain")
    assert sorted(three.backups.fenced) == [(1, 1, 4), (2, 1, 4)]
    stream = three.coordinator.state.catalog.named("copied")
    assert three.brokers.streams[2, 1] == stream
    assert (stream.assignments_version, stream.assignments[0].first_group_id) == (FIRST_VERSION + 1, 2)
    assert phase(three) == "RECOVERING"
    recovery = only(three)
    assert (recovery.broker_id, recovery.before_epoch, recovery.cause) == (1, 4, "dead")
    assert 0 < recovery.detected_us <= recovery.fenced_us <= recovery.opened_us
    assert (recovery.streamlets_total, recovery.streamlets_opened, list(recovery.owner_ids)) == (1, 1, [2])
    assert recovery.bytes_total == 100


async def test_a_recovery_advances_to_its_end_with_the_reports_of_the_new_owners(three: Cluster) -> None:
    await three.silence(1)

    await three.heartbeat(2, recoveries=[progress(1, 4, bytes_total=100, bytes_recovered=40, waits_for=["a disk"])])
    assert (only(three).bytes_recovered, list(only(three).waits_for)) == (40, ["broker 2: a disk"])
    await three.heartbeat(3, recoveries=[progress(1, 4, readable=(0,), restored=(0,))])  # not the owner
    await three.coordinator.idle()
    assert phase(three) == "RECOVERING"

    await three.heartbeat(2, recoveries=[progress(1, 4, bytes_recovered=100, readable=(0,), records_lost=3)])
    await three.coordinator.idle()
    assert phase(three) == "RESTORING"
    assert three.backups.freed == []
    assert only(three).streamlets_readable == 1

    await three.heartbeat(2, recoveries=[progress(1, 4, bytes_restored=100, readable=(0,), restored=(0,))])
    await three.coordinator.idle()
    assert phase(three) == "DONE"
    assert sources(three) == [[], [], []]
    assert sorted(three.backups.freed) == [(1, 1, 4), (2, 1, 4)]
    assert three.brokers.streams[2, 1] == three.coordinator.state.catalog.named("copied")
    recovery = only(three)
    assert recovery.opened_us <= recovery.readable_us <= recovery.restored_us
    assert (recovery.bytes_recovered, recovery.bytes_restored, recovery.records_lost) == (100, 100, 3)
    assert (await three.restart()).recoveries.describe_all() == [recovery]


async def test_a_fenced_launch_is_refused_and_a_new_launch_is_accepted(three: Cluster) -> None:
    await three.silence(1)

    with pytest.raises(StaleEpoch):
        await three.coordinator.members.heartbeat(coordinator_pb2.HeartbeatRequest(broker_id=1, broker_epoch=1))
    with pytest.raises(StaleEpoch, match="given up for lost"):
        await three.register("a", broker_id=1)
    await three.restart()
    with pytest.raises(StaleEpoch, match="given up for lost"):
        await three.register("a", broker_id=1)

    info, streams = await three.register("a2", broker_id=1)
    assert info.broker_epoch == 5
    assert sorted(stream.name for stream in streams) == ["copied", "plain"]  # others recover from it
    assert owners(three, "plain")[0] == (1, 5)
    assert owners(three)[0] == (2, 2)


async def test_a_dead_broker_without_replicated_streams_is_not_recovered(cluster: Cluster) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("plain", streamlets=2, replication=0)

    await cluster.silence(1)

    assert cluster.coordinator.recoveries.describe_all() == []
    await cluster.heartbeat(1)  # it was only slow
    assert len(cluster.coordinator.state.brokers.live_ids()) == 2


async def test_a_dead_broker_is_not_fenced_while_no_other_can_replace_it(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.create("copied", replication=1)

    await cluster.silence(1)
    assert cluster.coordinator.recoveries.describe_all() == []

    await cluster.heartbeat(1)
    await cluster.register("b")
    await cluster.silence(1)
    assert owners(cluster) == [(2, 2)]


async def test_a_pause_of_the_coordinator_makes_no_member_dead(three: Cluster) -> None:
    await three.settle()
    three.clock.advance(3600)
    await three.settle()

    assert three.coordinator.recoveries.describe_all() == []
    assert (len(three.coordinator.state.brokers.live_ids()), len(three.coordinator.state.backups.live_ids())) == (3, 2)


# --- obstacles to a recovery -------------------------------------------------------------------------------------


async def test_no_streamlet_is_taken_over_before_all_live_backups_fence_the_broker(three: Cluster) -> None:
    three.backups.failures[2] = Unavailable("nobody there")
    await three.silence(1)
    assert phase(three) == "FENCING"
    assert three.brokers.taken_over == []
    assert list(only(three).waits_for) == ["backup 2: nobody there"]

    three.backups.failures.clear()
    await three.settle()
    assert phase(three) == "RECOVERING"


async def test_a_backup_that_registers_during_a_recovery_fences_the_broker(three: Cluster) -> None:
    await three.silence(1)
    await three.register_backup("z")
    await three.coordinator.idle()

    assert (3, 1, 4) in three.backups.fenced


async def test_a_takeover_waits_for_the_replicas_that_it_needs(three: Cluster) -> None:
    three.brokers.waits_for = ["backup 2, which has virtual segment 7"]
    await three.silence(1)
    assert phase(three) == "TAKING_OVER"
    assert list(only(three).waits_for) == ["broker 2: it waits for backup 2, which has virtual segment 7"]
    assert owners(three)[0] == (1, 1)

    three.brokers.waits_for = []
    await three.settle()
    assert phase(three) == "RECOVERING"


async def test_a_stream_that_waits_for_replicas_does_not_hold_up_other_streams(cluster: Cluster) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    for name in ("copied", "also"):
        await cluster.create(name, streamlets=2, replication=1)
    cluster.brokers.unreadable["also"] = "its only backup"
    await cluster.silence(1)

    assert owners(cluster)[0] == (2, 2)
    assert cluster.brokers.streams[2, 1] == cluster.coordinator.state.catalog.named("copied"), "it takes records"
    assert owners(cluster, "also") == [(1, 1), (2, 2)]
    assert [reason for reason in only(cluster).waits_for if "its only backup" in reason]
    assert phase(cluster) == "TAKING_OVER"

    cluster.brokers.unreadable.clear()
    await cluster.settle()
    assert phase(cluster) == "RECOVERING"
    assert only(cluster).bytes_total == 200, "each was counted once"


async def test_a_recovery_waits_for_an_owner_that_cannot_open_its_streamlets(
    three: Cluster,
) -> None:
    three.brokers.unopenable.add("copied")
    await three.silence(1)
    assert phase(three) == "TAKING_OVER"
    assert list(only(three).waits_for) == ["broker 2: the disk has no room for copied"]

    three.brokers.unopenable.clear()
    await three.settle()
    assert phase(three) == "RECOVERING"
    assert not only(three).waits_for


async def test_failures_of_abandoned_work_are_forgotten(three: Cluster) -> None:
    three.brokers.failures[2] = three.brokers.failures[3] = Unavailable("nobody there")
    await three.silence(1)
    work = three.coordinator.recoveries._work
    assert work._failures
    await three.coordinator.streams.delete("copied")
    await three.settle()

    assert work._failures == {}


async def test_the_work_of_a_recovery_is_linear_in_the_number_of_streams(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    streams = 60
    for number in range(streams):
        await cluster.create(f"s{number}", replication=1)
    looks = 0

    def counted(*arguments: Any) -> recovery_module.Decision:
        nonlocal looks
        looks += 1
        return recovery_module.decide(*arguments)

    monkeypatch.setattr(recoveries_module, "decide", counted)
    await cluster.silence(1)
    assert phase(cluster) == "RECOVERING"
    assert looks < streams / 2, "each look is at all of them"


async def test_a_broker_that_returns_with_its_memory_cancels_its_recovery(three: Cluster) -> None:
    three.brokers.waits_for = ["a backup"]
    await three.silence(1)

    info, streams = await three.register("a2", broker_id=1)

    assert phase(three) == "CANCELLED"
    assert owners(three)[0] == (1, info.broker_epoch)
    assert (
        three.coordinator.state.catalog.named("copied").assignments[0].first_group_id
        == info.broker_epoch * GROUPS_PER_LAUNCH
    )
    assert len(streams) == 2
    three.brokers.waits_for = []
    await three.settle()
    assert owners(three)[0] == (1, info.broker_epoch)


async def test_a_broker_that_lost_its_memory_gets_its_replicated_streamlets_by_recovery(three: Cluster) -> None:
    info, _ = await three.register("a2", broker_id=1, lost_memory=True)
    assert owners(three)[0] == (1, 1)
    assert owners(three, "plain")[0] == (1, info.broker_epoch)
    await three.coordinator.idle()

    recovery = only(three)
    assert (recovery.cause, recovery.before_epoch) == ("lost memory", info.broker_epoch)
    assert sources(three)[0] == [(1, 4)]
    owner = owners(three)[0][0]
    await three.heartbeat(owner, recoveries=[progress(1, 4, readable=(0,), restored=(0,))])
    await three.coordinator.idle()
    assert phase(three) == "DONE"
    await three.heartbeat(1)  # it lives


async def test_a_recovery_of_lost_memory_continues_over_another_restart(three: Cluster) -> None:
    three.brokers.waits_for = ["a backup"]
    await three.register("a2", broker_id=1, lost_memory=True)
    await three.coordinator.idle()
    await three.register("a3", broker_id=1)  # with the memory of a2, which was empty
    await three.coordinator.idle()

    assert phase(three) == "TAKING_OVER"
    assert owners(three)[0] == (1, 1)
    three.brokers.waits_for = []
    await three.settle()
    assert sources(three)[0] == [(1, 4)]


async def test_a_broker_has_holes_until_others_have_recovered_its_lost_memory(three: Cluster) -> None:
    async def has_holes(launch_id: str, *, lost_memory: bool = False) -> bool:
        request = registration(launch_id, 1)
        request.lost_memory = lost_memory
        return (await three.coordinator.members.register_broker(request)).has_holes

    assert not await has_holes("a2")
    three.brokers.waits_for = ["a backup"]
    assert await has_holes("a3", lost_memory=True)
    await three.coordinator.idle()
    assert await has_holes("a4")
    three.brokers.waits_for = []
    await three.settle()
    assert not await has_holes("a5")


async def test_the_only_broker_recovers_itself(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.create("copied", replication=1)

    await cluster.register("a2", broker_id=1, lost_memory=True)
    await cluster.coordinator.idle()

    assert owners(cluster) == [(1, 2)]
    assert sources(cluster) == [[(1, 2)]]


async def test_an_owner_that_dies_while_it_recovers_passes_on_its_unfinished_recovery(three: Cluster) -> None:
    await three.silence(1)
    await three.silence(1, 2)

    assert owners(three) == [(3, 3), (3, 3), (3, 3)]
    assert sources(three) == [[(1, 4), (2, 5)], [(2, 5)], []]
    (_, request), *_ = [one for one in three.brokers.taken_over if one[0] == 3]
    (asked,) = request.streams
    assert list(asked.streamlet_ids) == [0, 1]
    assert [(one.broker_id, one.before_epoch) for one in asked.stream.assignments[0].sources] == [(1, 4)]

    for streamlets in (0,), (0, 1):
        told = [progress(1, 4, readable=(0,), restored=(0,)), progress(2, 5, readable=streamlets, restored=streamlets)]
        await three.heartbeat(3, recoveries=told)
        await three.coordinator.idle()
    assert sources(three) == [[], [], []]
    assert {one.phase for one in three.coordinator.recoveries.describe_all()} == {coordinator_pb2.RECOVERY_PHASE_DONE}


async def test_the_next_coordinator_continues_a_recovery(three: Cluster) -> None:
    three.brokers.failures[2] = Unavailable("nobody there")
    three.brokers.failures[3] = Unavailable("nobody there")
    await three.silence(1)
    assert phase(three) == "TAKING_OVER"

    three.brokers.failures.clear()
    await three.restart()
    assert phase(three) == "TAKING_OVER"
    await three.settle()

    assert phase(three) == "RECOVERING"
    assert three.brokers.epochs[-1] == 2


async def test_the_next_coordinator_has_owners_open_their_streamlets_again(three: Cluster) -> None:
    await three.silence(1)
    opened = len(three.brokers.opened)
    info = coordinator_pb2.RecoveryInfo()
    info.CopyFrom(only(three))
    info.phase = coordinator_pb2.RECOVERY_PHASE_TAKING_OVER
    key = "recoveries/00000001/0000000000000004"
    state = three.coordinator.state
    await state.write({key: info.SerializeToString()})  # as if it had stopped before the answers of the owners

    await three.restart()
    await three.settle()

    assert len(three.brokers.opened) == opened + 1
    assert phase(three) == "RECOVERING"


async def test_older_groups_of_a_lost_broker_go_to_the_owner(three: Cluster) -> None:
    await three.coordinator.migration.move("copied", 0, 2)
    await three.silence(1)

    (assignment, *_) = three.coordinator.state.catalog.named("copied").assignments
    assert (assignment.broker_id, len(assignment.intervals)) == (2, 0)
    assert sources(three)[0] == [(1, 4)]


async def test_a_takeover_request_contains_starts_cursors_and_handed_over_states(three: Cluster) -> None:
    read = consumer_group_pb2.StreamletStart(stream_id=1, cursors=[common_pb2.Cursor(stream_id=1, group_id=5)])
    reset = consumer_group_pb2.ResetConsumerGroupRequest(consumer_group="readers", starts=[read])
    await three.coordinator.consumer_groups.reset(reset)
    start = common_pb2.EntryStart(start=common_pb2.Cursor(stream_id=1, streamlet_id=1, group_id=3), first_record=9)
    await three.coordinator.migration.move("copied", 0, 2)
    await three.heartbeat(2, starts=[start])
    writes = len(await three.store.list("starts/"))
    await three.heartbeat(2, starts=[start])  # a repeated report is not written again
    await three.silence(2)

    requests = [request for _, request in three.brokers.taken_over]
    asked = {tuple(one.streamlet_ids): one for request in requests for one in request.streams}
    assert sorted(asked) == [(0,), (1,)]
    assert [list(one.starts) for _, one in sorted(asked.items())] == [[], [start]]
    assert [[each.group_id for each in one.cursors] for _, one in sorted(asked.items())] == [[5], []]
    assert [[each.next_group_id for each in one.handed_over] for _, one in sorted(asked.items())] == [[2], []]
    assert all([one.backup_id for one in request.backups] == [1, 2] for request in requests)
    assert (writes, len(await three.store.list("handover/"))) == (1, 1)
    await three.coordinator.streams.delete("copied")
    assert await three.store.list("starts/") == await three.store.list("handover/") == {}


async def test_the_size_of_takeover_requests_is_limited(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("copied", streamlets=4, replication=1)
    monkeypatch.setattr(take_over_module, "TAKE_OVER_BYTES_MAX", 1)

    await cluster.silence(1)

    asked = [[list(one.streamlet_ids) for one in request.streams] for _, request in cluster.brokers.taken_over]
    assert asked == [[[0]], [[2]]]
    assert {broker_id for broker_id, _ in owners(cluster)} == {2}


@pytest.mark.parametrize(("said", "waited_for"), [((), True), ((2,), False)])
async def test_a_takeover_does_not_wait_for_a_dead_backup_that_was_unneeded(
    three: Cluster, said: tuple[int, ...], waited_for: bool
) -> None:
    for _ in range(three.settings.heartbeats_missed_max + 1):
        three.clock.advance(three.settings.heartbeat_interval_ms / 1000)
        await three.heartbeat(1, 2, 3, unneeded_backup_ids=said)
        three.backup_heartbeat(1)
        await three.settle()
    assert len(three.coordinator.state.backups.live_ids()) == 1
    for _ in range(three.settings.heartbeats_missed_max + 1):
        three.clock.advance(three.settings.heartbeat_interval_ms / 1000)
        await three.heartbeat(2, 3)
        three.backup_heartbeat(1)
        await three.settle()

    request = three.brokers.taken_over[0][1]
    assert [(one.backup_id, one.alive) for one in request.backups] == [(1, True), (2, False)]
    assert request.backups[1].draining is not waited_for


async def test_streamlets_go_only_to_brokers_with_segments_that_are_large_enough(cluster: Cluster) -> None:
    for launch, segment_bytes in (("a", 8), ("b", 4), ("c", 8)):
        request = coordinator_pb2.RegisterBrokerRequest(
            broker=common_pb2.BrokerInfo(grpc_address=f"{launch}:1", segment_bytes=segment_bytes), launch_id=launch
        )
        await cluster.coordinator.members.register_broker(request)
    await cluster.register_backup("x")
    await cluster.create("copied", streamlets=2, replication=1)

    await cluster.silence(1)
    assert owners(cluster)[0] == (3, 3)
    await cluster.silence(1, 3)

    assert owners(cluster)[0] == (3, 3)  # no other broker has segments that large, so this one is not fenced
    assert len(cluster.coordinator.recoveries.describe_all()) == 1


async def test_a_recovery_ends_with_its_stream_and_is_then_described_without_a_look_at_the_catalog(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await three.silence(1)
    await three.coordinator.streams.delete("copied")
    await three.settle()
    monkeypatch.delattr(type(three.coordinator.state.catalog), "concerning")

    assert phase(three) == "DONE"


async def test_a_limited_number_of_ended_recoveries_is_kept(three: Cluster) -> None:
    ended = [
        coordinator_pb2.RecoveryInfo(
            broker_id=9, before_epoch=number, phase=coordinator_pb2.RECOVERY_PHASE_DONE, detected_us=number
        )
        for number in range(1, KEPT + 1)
    ]
    await three.store.write(*(Write(key, value or b"", 0) for key, value in records_of(ended).items()))
    await three.restart()
    await three.silence(1)
    (recovery, *others) = three.coordinator.recoveries.describe_all()
    assert (recovery.broker_id, others) == (1, ended[::-1])
    done = progress(1, recovery.before_epoch, readable=(0, 1, 2), restored=(0, 1, 2))
    await three.heartbeat(2, 3, recoveries=[done])
    await three.coordinator.idle()

    assert three.coordinator.recoveries.describe_all()[1:] == others[:-1]
    assert len(await three.store.list("recoveries/")) == KEPT
