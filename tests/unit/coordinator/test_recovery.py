"""The single decisions of a recovery; whole recoveries are in test_recoveries.py."""

import dataclasses

import pytest

from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.recovery.decide import (
    DEAD,
    DRAINED,
    EnterPhase,
    FenceAtBackup,
    FreeReplicas,
    OpenStream,
    Owner,
    ReleaseSource,
    TakeOver,
    View,
    begun,
    decide,
    enter,
    is_lost,
    recovered,
    released,
    word,
)
from kera.coordinator.recovery.progress import Unneeded, gather, with_progress
from kera.v1 import common_pb2, coordinator_pb2
from kera.v1.coordinator_pb2 import (
    RECOVERY_PHASE_CANCELLED,
    RECOVERY_PHASE_DONE,
    RECOVERY_PHASE_FENCING,
    RECOVERY_PHASE_RECOVERING,
    RECOVERY_PHASE_RESTORING,
    RECOVERY_PHASE_TAKING_OVER,
    RecoveryInfo,
    RecoveryPhase,
)
from tests.unit.coordinator.test_intervals import assignment

SOURCE = common_pb2.RecoverySource(broker_id=1, before_epoch=9)
X, Y = Launch(1, 1), Launch(2, 2)
"""Launches of two backups."""


def stream(*assignments: common_pb2.StreamletAssignment, replication: int = 1) -> common_pb2.StreamInfo:
    for number, one in enumerate(assignments):
        one.streamlet_id = number
    config = common_pb2.StreamConfig(replication=replication)
    return common_pb2.StreamInfo(stream_id=5, assignments=assignments, config=config)


def taken(broker_id: int, epoch: int) -> common_pb2.StreamletAssignment:
    made = assignment((broker_id, 1), epoch=epoch)
    made.sources.append(SOURCE)
    return made


def recovery(phase: RecoveryPhase.ValueType = RECOVERY_PHASE_TAKING_OVER, cause: str = DEAD) -> RecoveryInfo:
    made = begun(1, 9, cause, 1000)
    made.phase = phase
    return made


def view(*assignments: common_pb2.StreamletAssignment) -> View:
    """A view with live brokers 2 and 3, of epochs 2 and 3, and two fenced backups."""
    return View(
        streams=[stream(*assignments)],
        owners={2: Owner(2, 8, 5), 3: Owner(3, 8, 4)},
        backups=frozenset({X, Y}),
        fenced=frozenset({X, Y}),
    )


def test_only_replicated_streamlets_of_the_lost_launches_are_lost() -> None:
    owned, held = assignment((1, 1), epoch=8), assignment((1, 1), (2, 57))
    later, others = assignment((1, 1), epoch=9), assignment((2, 1))
    copied, plain = stream(), stream(replication=0)

    assert [is_lost(recovery(), copied, one) for one in (owned, held, later, others)] == [True, True, False, False]
    assert not is_lost(recovery(), plain, owned)
    assert not is_lost(recovery(), copied, taken(2, 2))
    drained = recovery(cause=DRAINED)
    assert [is_lost(drained, copied, one) for one in (owned, held)] == [False, True]


def test_backups_are_fenced_first_and_late_ones_in_every_phase() -> None:
    some = dataclasses.replace(view(), fenced=frozenset({X}))
    assert decide(recovery(RECOVERY_PHASE_FENCING), some).actions == (FenceAtBackup(Y),)
    assert decide(recovery(RECOVERY_PHASE_FENCING), view()).actions == (EnterPhase(RECOVERY_PHASE_TAKING_OVER),)
    for phase in (RECOVERY_PHASE_TAKING_OVER, RECOVERY_PHASE_RECOVERING, RECOVERY_PHASE_RESTORING):
        assert FenceAtBackup(Y) in decide(recovery(phase), some).actions
    assert FenceAtBackup(Y) not in decide(recovery(cause=DRAINED), some).actions


def test_owners_share_a_recovery_whatever_their_load_is_and_the_least_loaded_begins() -> None:
    lost = view(*[assignment((1, 1), epoch=8) for _ in range(4)])
    uneven = dataclasses.replace(lost, owners={2: Owner(2, 8, 100), 3: Owner(3, 8, 0)})  # broker 3 has just started
    s = [StreamletId(5, number) for number in range(4)]
    assert decide(recovery(), uneven).actions == (
        TakeOver(Launch(2, 2), (s[1], s[3])),
        TakeOver(Launch(3, 3), (s[0], s[2])),
    )


def test_streamlets_keep_their_planned_owners_while_these_live() -> None:
    lost = view(*[assignment((1, 1), epoch=8) for _ in range(4)])
    s = [StreamletId(5, number) for number in range(4)]
    actions = decide(recovery(), lost).actions

    planned = dataclasses.replace(lost, planned=dict.fromkeys(s, Launch(2, 2)))
    assert decide(recovery(), planned).actions == (TakeOver(Launch(2, 2), tuple(s)),)
    gone = dataclasses.replace(lost, planned=dict.fromkeys(s, Launch(2, 1)))
    assert decide(recovery(), gone).actions == actions


def test_a_draining_broker_takes_over_only_if_no_other_can() -> None:
    lost = view(assignment((1, 1), epoch=8))
    emptied = dataclasses.replace(lost, owners={2: Owner(2, 8, 5), 3: Owner(3, 8, 0, draining=True)})
    assert decide(recovery(), emptied).actions == (TakeOver(Launch(2, 2), (StreamletId(5, 0),)),)
    alone = dataclasses.replace(lost, owners={3: Owner(3, 8, 0, draining=True)})
    assert decide(recovery(), alone).actions == (TakeOver(Launch(3, 3), (StreamletId(5, 0),)),)
    small = dataclasses.replace(lost, segment_bytes=16)
    assert decide(recovery(), small).waits_for == ("a live broker with segments of at least 16 bytes",)


def test_older_groups_wait_for_their_owner_to_be_alive() -> None:
    held = assignment((1, 1), (2, 57), epoch=2)
    assert decide(recovery(), view(held)).actions == (TakeOver(Launch(2, 2), (StreamletId(5, 0),)),)

    dead = assignment((1, 1), (4, 57), epoch=4)
    decision = decide(recovery(), view(dead))
    assert decision.actions == ()
    assert decision.waits_for == ("broker 4, which owns streamlets of which it had older groups",)


def test_owners_must_open_their_streamlets_and_a_recovery_waits_for_dead_owners() -> None:
    both = view(taken(2, 2), taken(3, 3))
    assert decide(recovery(), both).actions == (OpenStream(Launch(2, 2), 5), OpenStream(Launch(3, 3), 5))
    opened = frozenset({(StreamletId(5, 0), Launch(2, 2)), (StreamletId(5, 1), Launch(3, 3))})
    assert decide(recovery(), dataclasses.replace(both, opened=opened)).actions == (
        EnterPhase(RECOVERY_PHASE_RECOVERING),
    )
    died = decide(recovery(), view(taken(4, 4)))
    assert (died.actions, died.waits_for) == ((), ("broker 4, which had taken over streamlets, or its recovery",))
    for phase in (RECOVERY_PHASE_RECOVERING, RECOVERY_PHASE_RESTORING):
        assert decide(recovery(phase), view(taken(4, 4))) == died


def test_a_recovery_ends_when_streamlets_are_restored_and_replicas_freed() -> None:
    one, both = frozenset({StreamletId(5, 0)}), frozenset({StreamletId(5, 0), StreamletId(5, 1)})
    now = view(taken(2, 2), taken(3, 3))
    recovering, restoring = recovery(RECOVERY_PHASE_RECOVERING), recovery(RECOVERY_PHASE_RESTORING)

    assert decide(recovering, dataclasses.replace(now, readable=one)).actions == ()
    entering = decide(recovering, dataclasses.replace(now, readable=both)).actions
    assert entering == (EnterPhase(RECOVERY_PHASE_RESTORING),)
    assert decide(restoring, dataclasses.replace(now, restored=one)).actions == ()
    assert decide(restoring, dataclasses.replace(now, restored=both)).actions == (ReleaseSource((5,)),)
    assert decide(restoring, view()).actions == (FreeReplicas(X), FreeReplicas(Y))
    freed = dataclasses.replace(view(), freed=frozenset({X, Y}))
    assert decide(restoring, freed).actions == (EnterPhase(RECOVERY_PHASE_DONE),)
    assert decide(recovery(RECOVERY_PHASE_RESTORING, DRAINED), view()).actions == (EnterPhase(RECOVERY_PHASE_DONE),)
    assert decide(recovery(RECOVERY_PHASE_DONE), dataclasses.replace(freed, freed=frozenset({X}))).actions == (
        FreeReplicas(Y),
    )
    assert decide(recovery(RECOVERY_PHASE_CANCELLED), view()).actions == ()


def test_replicas_are_not_freed_while_an_older_recovery_may_read_them() -> None:
    decision = decide(recovery(RECOVERY_PHASE_RESTORING), dataclasses.replace(view(), older=(4, 7)))
    assert (decision.actions, decision.waits_for) == ((), ("the recovery of broker 1, incarnations before epoch 7",))


def test_replicas_are_not_freed_while_a_later_recovery_has_to_read_them() -> None:
    """The later recovery took over the losses of both, and its sources include all launches before it."""
    later = assignment((2, 1), epoch=2)
    later.sources.add(broker_id=1, before_epoch=12)
    other = assignment((3, 1), epoch=3)
    other.sources.add(broker_id=2, before_epoch=12)
    decision = decide(recovery(RECOVERY_PHASE_RESTORING), view(later, other))
    assert (decision.actions, decision.waits_for) == ((), ("the recovery of broker 1, incarnations before epoch 12",))
    assert decide(recovery(RECOVERY_PHASE_RESTORING), view(other)).actions == (FreeReplicas(X), FreeReplicas(Y))


def test_only_the_last_lost_launch_of_each_broker_says_which_backups_are_unneeded() -> None:
    unneeded = Unneeded()
    of = [
        common_pb2.RecoverySource(broker_id=1, before_epoch=9),
        common_pb2.RecoverySource(broker_id=2, before_epoch=5),
    ]
    unneeded.note(Launch(1, 7), [3, 4])
    assert not unneeded.by_all(of, 3), "broker 2 has said nothing"

    unneeded.note(Launch(2, 4), [3])
    assert [backup_id for backup_id in (3, 4) if unneeded.by_all(of, backup_id)] == [3]
    unneeded.note(Launch(1, 8), [4])
    unneeded.note(Launch(1, 9), [3])  # a later launch does not know the data of the earlier ones
    assert not unneeded.by_all(of, 3)


def test_a_new_owner_keeps_the_source_until_it_is_released() -> None:
    state = common_pb2.StreamletState(next_group_id=80)

    after = recovered(recovery(), assignment((1, 1), (2, 57), (1, 70), epoch=8), Launch(2, 2), state)

    assert (after.broker_id, after.broker_epoch, after.first_group_id, len(after.intervals)) == (2, 2, 80, 0)
    assert list(after.sources) == [SOURCE]
    assert list(released(recovery(), after).sources) == []
    assert list(after.sources) == [SOURCE]


def test_a_new_owner_that_has_lost_older_groups_recovers_them_with_the_rest() -> None:
    own = coordinator_pb2.RecoveryInfo(broker_id=2, before_epoch=9)
    elsewhere = coordinator_pb2.RecoveryInfo(broker_id=3, before_epoch=9)
    state = common_pb2.StreamletState(next_group_id=80)

    after = recovered(recovery(), assignment((1, 1), (2, 57), (1, 70), epoch=8), Launch(2, 9), state, [own, elsewhere])

    assert list(after.sources) == [SOURCE, common_pb2.RecoverySource(broker_id=2, before_epoch=9)]


def test_only_reports_of_the_present_owners_count() -> None:
    refs = [common_pb2.StreamletRef(stream_id=5, streamlet_id=number) for number in range(3)]
    told = coordinator_pb2.RecoveryProgress(
        source=SOURCE, readable=refs, restored=refs[:1], bytes_total=10, bytes_recovered=5, waits_for=["w"]
    )
    other = coordinator_pb2.RecoveryProgress(source=common_pb2.RecoverySource(broker_id=4), readable=refs)
    streams = [stream(taken(2, 2), taken(3, 3), assignment((2, 1), epoch=2))]

    found = gather(recovery(), streams, {Launch(2, 2): [told, other], Launch(3, 3): [other]})

    assert (found.readable, found.restored) == (frozenset({StreamletId(5, 0)}), frozenset({StreamletId(5, 0)}))
    assert (found.bytes_total, found.bytes_recovered, found.waits_for) == (10, 5, ("broker 2: w",))
    shown = with_progress(recovery(), streams, found, ["a disk"])
    assert (shown.streamlets_total, shown.streamlets_opened, shown.streamlets_readable) == (2, 2, 1)
    assert (list(shown.owner_ids), list(shown.waits_for)) == ([2, 3], ["a disk", "broker 2: w"])
    many = with_progress(recovery(), streams, found, [f"reason {number:02}" for number in range(30)])
    assert (len(many.waits_for), many.waits_for[-1]) == (21, "and for 11 things more")
    nothing = gather(recovery(), streams, {})
    assert with_progress(shown, streams, nothing, []).bytes_recovered == 5  # numbers never decrease


@pytest.mark.parametrize(
    ("phase", "field"),
    [
        (RECOVERY_PHASE_TAKING_OVER, "fenced_us"),
        (RECOVERY_PHASE_RECOVERING, "opened_us"),
        (RECOVERY_PHASE_RESTORING, "readable_us"),
        (RECOVERY_PHASE_DONE, "restored_us"),
    ],
)
def test_each_phase_records_the_end_of_the_previous_one(phase: RecoveryPhase.ValueType, field: str) -> None:
    before = recovery(RECOVERY_PHASE_FENCING)
    before.waits_for.append("a disk")
    after = enter(before, phase, 2000)
    assert (after.phase, getattr(after, field), list(after.waits_for)) == (phase, 2000, [])
    assert before.phase == RECOVERY_PHASE_FENCING
    assert word(RECOVERY_PHASE_TAKING_OVER) == "taking_over"
