"""Recoveries of lost brokers, one scenario each; any order of faults is in tests/simulation."""

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
    """Three brokers and two backups; the stream ``copied`` is replicated, ``plain`` is not, each on all brokers."""
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
    """Of streamlets of the first stream."""
    return coordinator_pb2.RecoveryProgress(
        source=common_pb2.RecoverySource(broker_id=broker_id, before_epoch=before_epoch),
        readable=[common_pb2.StreamletRef(stream_id=1, streamlet_id=one) for one in readable],
        restored=[common_pb2.StreamletRef(stream_id=1, streamlet_id=one) for one in restored],
        **fields,
    )


# --- from the loss to the end ------------------------------------------------------------------------------------


async def test_what_a_dead_broker_had_goes_to_others_and_what_is_not_replicated_stays(three: Cluster) -> None:
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


async def test_a_recovery_goes_by_what_the_new_owners_say_to_its_end(three: Cluster) -> None:
    await three.silence(1)

    await three.heartbeat(2, recoveries=[progress(1, 4, bytes_total=100, bytes_recovered=40, waits_for=["a disk"])])
    assert (only(three).bytes_recovered, list(only(three).waits_for)) == (40, ["broker 2: a disk"])
    await three.heartbeat(3, recoveries=[progress(1, 4, readable=(0,), restored=(0,))])  # not its owner
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


async def test_the_launch_that_was_given_up_must_end_and_a_new_one_begins_anew(three: Cluster) -> None:
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
    assert sorted(stream.name for stream in streams) == ["copied", "plain"]  # it keeps what others recover from it
    assert owners(three, "plain")[0] == (1, 5)
    assert owners(three)[0] == (2, 2)


async def test_nobody_recovers_what_is_not_replicated(cluster: Cluster) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("plain", streamlets=2, replication=0)

    await cluster.silence(1)

    assert cluster.coordinator.recoveries.describe_all() == []
    await cluster.heartbeat(1)  # it was only slow
    assert len(cluster.coordinator.state.brokers.live_ids()) == 2


async def test_a_broker_that_nobody_can_replace_is_not_given_up(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.create("copied", replication=1)

    await cluster.silence(1)
    assert cluster.coordinator.recoveries.describe_all() == []

    await cluster.heartbeat(1)
    await cluster.register("b")
    await cluster.silence(1)
    assert owners(cluster) == [(2, 2)]


async def test_a_pause_of_the_coordinator_itself_is_held_against_nobody(three: Cluster) -> None:
    await three.settle()
    three.clock.advance(3600)
    await three.settle()

    assert three.coordinator.recoveries.describe_all() == []
    assert (len(three.coordinator.state.brokers.live_ids()), len(three.coordinator.state.backups.live_ids())) == (3, 2)


# --- what is in the way ------------------------------------------------------------------------------------------


async def test_nothing_is_taken_over_before_all_live_backups_are_fenced(three: Cluster) -> None:
    three.backups.failures[2] = Unavailable("nobody there")
    await three.silence(1)
    assert phase(three) == "FENCING"
    assert three.brokers.taken_over == []
    assert list(only(three).waits_for) == ["backup 2: nobody there"]

    three.backups.failures.clear()
    await three.settle()
    assert phase(three) == "RECOVERING"


async def test_a_backup_that_comes_late_is_fenced_when_it_comes(three: Cluster) -> None:
    await three.silence(1)
    await three.register_backup("z")
    await three.coordinator.idle()

    assert (3, 1, 4) in three.backups.fenced


async def test_who_takes_over_may_have_to_wait_for_replicas(three: Cluster) -> None:
    three.brokers.waits_for = ["backup 2, which has virtual segment 7"]
    await three.silence(1)
    assert phase(three) == "TAKING_OVER"
    assert list(only(three).waits_for) == ["broker 2: it waits for backup 2, which has virtual segment 7"]
    assert owners(three)[0] == (1, 1)

    three.brokers.waits_for = []
    await three.settle()
    assert phase(three) == "RECOVERING"


async def test_what_need_not_wait_for_replicas_is_not_held_up_by_what_does(cluster: Cluster) -> None:
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


async def test_an_owner_that_cannot_open_what_it_has_taken_over_is_what_the_recovery_waits_for(
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


async def test_what_nobody_tries_again_is_forgotten(three: Cluster) -> None:
    three.brokers.failures[2] = three.brokers.failures[3] = Unavailable("nobody there")
    await three.silence(1)
    work = three.coordinator.recoveries._work
    assert work._failures
    await three.coordinator.streams.delete("copied")
    await three.settle()

    assert work._failures == {}


async def test_the_work_of_a_recovery_grows_with_what_is_lost_and_not_with_its_square(
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


async def test_a_broker_that_is_back_with_its_memory_in_time_keeps_everything(three: Cluster) -> None:
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


async def test_what_was_lost_with_memory_is_not_there_again_at_the_next_start(three: Cluster) -> None:
    three.brokers.waits_for = ["a backup"]
    await three.register("a2", broker_id=1, lost_memory=True)
    await three.coordinator.idle()
    await three.register("a3", broker_id=1)  # with the memory of a2, which had nothing
    await three.coordinator.idle()

    assert phase(three) == "TAKING_OVER"
    assert owners(three)[0] == (1, 1)
    three.brokers.waits_for = []
    await three.settle()
    assert sources(three)[0] == [(1, 4)]


async def test_a_broker_is_told_that_others_have_yet_to_recover_what_it_had_in_memory(three: Cluster) -> None:
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


async def test_an_owner_that_dies_while_it_recovers_is_recovered_with_what_it_had_to_do(three: Cluster) -> None:
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


async def test_the_next_coordinator_goes_on_where_the_last_one_stopped(three: Cluster) -> None:
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


async def test_owners_are_told_again_by_the_next_coordinator_until_all_have_opened(three: Cluster) -> None:
    await three.silence(1)
    opened = len(three.brokers.opened)
    info = coordinator_pb2.RecoveryInfo()
    info.CopyFrom(only(three))
    info.phase = coordinator_pb2.RECOVERY_PHASE_TAKING_OVER
    key = "recoveries/00000001/0000000000000004"
    state = three.coordinator.state
    await state.write({key: info.SerializeToString()})  # as if it had stopped before it was told of the opening

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


async def test_who_takes_over_is_told_where_entries_start_and_what_was_handed_over(three: Cluster) -> None:
    read = consumer_group_pb2.StreamletStart(stream_id=1, cursors=[common_pb2.Cursor(stream_id=1, group_id=5)])
    reset = consumer_group_pb2.ResetConsumerGroupRequest(consumer_group="readers", starts=[read])
    await three.coordinator.consumer_groups.reset(reset)
    start = common_pb2.EntryStart(start=common_pb2.Cursor(stream_id=1, streamlet_id=1, group_id=3), first_record=9)
    await three.coordinator.migration.move("copied", 0, 2)
    await three.heartbeat(2, starts=[start])
    writes = len(await three.store.list("starts/"))
    await three.heartbeat(2, starts=[start])  # said again, written once
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


async def test_who_takes_over_gets_the_streamlets_of_one_stream_in_requests_of_bounded_size(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
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
async def test_nobody_waits_for_a_backup_that_is_gone_and_was_not_needed_any_more(
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


async def test_segments_are_put_back_where_they_fit(cluster: Cluster) -> None:
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

    assert owners(cluster)[0] == (3, 3)  # nobody else has segments that large: it is not even given up
    assert len(cluster.coordinator.recoveries.describe_all()) == 1


async def test_a_stream_that_is_deleted_meanwhile_is_no_hindrance(three: Cluster) -> None:
    await three.silence(1)
    await three.coordinator.streams.delete("copied")
    await three.settle()

    assert phase(three) == "DONE"


async def test_a_recovery_that_has_ended_is_told_without_a_look_at_its_streams(
    three: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await three.silence(1)
    await three.coordinator.streams.delete("copied")
    await three.settle()
    monkeypatch.delattr(type(three.coordinator.state.catalog), "concerning")

    assert phase(three) == "DONE"


async def test_recoveries_that_ended_are_kept_up_to_a_number(three: Cluster) -> None:
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
