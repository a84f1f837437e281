"""Decides what a recovery does next, given the present state (thesis 6.6). Pure.

A recovery is about a *source*: all that launches of one broker before an epoch had of replicated streams.

    FENCING ──► TAKING_OVER ──► RECOVERING ──► RESTORING ──► DONE
       │             │          new owners     all can be    sources are gone from the
       └─────────────┴────►     take chunks    read again    assignments, replicas freed
              CANCELLED: the broker came back with its memory, and no part of it had a new owner yet

The progress of each streamlet is written in its assignment, and nowhere else:

* *lost*: the broker owns it with an epoch before the source's, or has older groups of it;
* *taken over*: its `sources` have the source; another broker (or a later launch of the same) owns it;
* neither: it is restored, or was never concerned.

`decide` looks at the assignments and returns what is missing. It is called again after the actions have succeeded or
failed, or after some time, by this coordinator or by the next one; so an interruption loses nothing.

A broker that is emptied (cause `DRAINED`) lives, and is not fenced: it loses only older groups, which do not change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kera.coordinator.cluster.intervals import broker_ids_of, taken_over
from kera.coordinator.ids import Launch, StreamletId
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

DEAD = "dead"
REPORTED = "reported"
LOST_MEMORY = "lost memory"
DRAINED = "drained"

ENDED = frozenset({RECOVERY_PHASE_DONE, RECOVERY_PHASE_CANCELLED})
PENDING = frozenset({RECOVERY_PHASE_FENCING, RECOVERY_PHASE_TAKING_OVER})
"""Phases in which something lost may still have no new owner."""

_ENDS_OF_PHASES = {
    RECOVERY_PHASE_TAKING_OVER: "fenced_us",
    RECOVERY_PHASE_RECOVERING: "opened_us",
    RECOVERY_PHASE_RESTORING: "readable_us",
    RECOVERY_PHASE_DONE: "restored_us",
}
"""The field that each phase sets at its beginning, for the end of the one before it."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The facts about a living broker that matter for the choice of new owners."""

    epoch: int
    segment_bytes: int
    streamlets: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that decides what a recovery does next."""

    streams: Sequence[common_pb2.StreamInfo]
    owners: Mapping[int, Owner]
    """The living brokers."""
    backups: frozenset[Launch] = frozenset()
    """The living backups."""
    segment_bytes: int = 0
    """Segment size of the lost broker: its segments are restored byte by byte, into segments no smaller."""
    fenced: frozenset[Launch] = frozenset()
    """Backups that have confirmed that they refuse the source."""
    freed: frozenset[Launch] = frozenset()
    """Backups that have confirmed that they have nothing of the source any more."""
    planned: Mapping[StreamletId, Launch] = field(default_factory=dict)
    """Brokers that were asked to take over before; they keep their streamlets while they live."""
    opened: frozenset[tuple[StreamletId, Launch]] = frozenset()
    """Streamlets that owners have confirmed to serve."""
    readable: frozenset[StreamletId] = frozenset()
    """Streamlets whose present owner reports that all of them can be read."""
    restored: frozenset[StreamletId] = frozenset()
    """Streamlets whose present owner reports that all of them have their replicas again."""
    older: tuple[int, ...] = ()
    """`before_epoch` of the recoveries of earlier launches of the same broker that have not ended."""


@dataclass(frozen=True, slots=True)
class FenceAtBackup:
    """Have a backup refuse the source."""

    backup: Launch


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Have a broker find out where streamlets end, then write that it owns them."""

    owner: Launch
    streamlets: tuple[StreamletId, ...]


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Have an owner open its streamlets of a stream, again if need be."""

    owner: Launch
    stream_id: int


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Write that streams have nothing of the source any more, and inform their brokers."""

    stream_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeReplicas:
    """Have a backup delete the replicas of the source."""

    backup: Launch


@dataclass(frozen=True, slots=True)
class EnterPhase:
    """Write that the next phase has begun."""

    phase: RecoveryPhase.ValueType


Action = FenceAtBackup | TakeOver | OpenStream | ReleaseSource | FreeReplicas | EnterPhase


@dataclass(frozen=True, slots=True)
class Decision:
    """The next actions, which can run at the same time, and the obstacles to others."""

    actions: tuple[Action, ...]
    waits_for: tuple[str, ...] = ()


def source_of(recovery: RecoveryInfo) -> common_pb2.RecoverySource:
    """Return the source of a recovery."""
    return common_pb2.RecoverySource(broker_id=recovery.broker_id, before_epoch=recovery.before_epoch)


def is_lost(recovery: RecoveryInfo, stream: common_pb2.StreamInfo, assignment: common_pb2.StreamletAssignment) -> bool:
    """Whether the lost broker has a part of the streamlet, and no new owner has it yet."""
    if not stream.config.replication or source_of(recovery) in assignment.sources:
        return False
    if assignment.broker_id == recovery.broker_id:
        # A streamlet that a drained broker owns is moved away from it, and is no matter of a recovery.
        return recovery.cause != DRAINED and assignment.broker_epoch < recovery.before_epoch
    return recovery.broker_id in broker_ids_of(assignment)


def is_taken_over(recovery: RecoveryInfo, assignment: common_pb2.StreamletAssignment) -> bool:
    """Whether the streamlet has a new owner that has not restored all of it yet."""
    return source_of(recovery) in assignment.sources


def recovered(
    recovery: RecoveryInfo,
    assignment: common_pb2.StreamletAssignment,
    owner: Launch,
    state: common_pb2.StreamletState,
    own_losses: Iterable[RecoveryInfo] = (),
) -> common_pb2.StreamletAssignment:
    """Return the assignment of a lost streamlet once `owner` has taken it over.

    `own_losses`: recoveries of earlier launches of the owner. Older groups of the streamlet that those launches had
    belong to the owner from now on. The other recoveries then skip the streamlet, so these groups have to be recovered
    with it.
    """
    changed = taken_over(
        assignment, recovery.broker_id, owner.member_id, owner.epoch, next_group_id=state.next_group_id
    )
    also = [one for one in own_losses if one.broker_id in broker_ids_of(assignment)]
    changed.sources.extend(source for source in map(source_of, (recovery, *also)) if source not in assignment.sources)
    return changed


def released(recovery: RecoveryInfo, assignment: common_pb2.StreamletAssignment) -> common_pb2.StreamletAssignment:
    """Return the assignment of a streamlet that is restored."""
    changed = common_pb2.StreamletAssignment()
    changed.CopyFrom(assignment)
    changed.sources.remove(source_of(recovery))
    return changed


def decide(recovery: RecoveryInfo, view: View) -> Decision:
    """Return the next step of `recovery`. An empty step without obstacles: work is under way, or the recovery
    has ended.
    """
    match recovery.phase:
        case phase if phase == RECOVERY_PHASE_FENCING:
            unfenced = _unfenced(recovery, view)
            return Decision(unfenced or (EnterPhase(RECOVERY_PHASE_TAKING_OVER),))
        case phase if phase == RECOVERY_PHASE_TAKING_OVER:
            return _take_over(recovery, view)
        case phase if phase == RECOVERY_PHASE_RECOVERING:
            left = _taken_over(recovery, view)
            done = all(streamlet in view.readable for streamlet, _ in left)
            step = (EnterPhase(RECOVERY_PHASE_RESTORING),) if done else ()
            return Decision((*_unfenced(recovery, view), *step), () if done else _orphans(view, left))
        case phase if phase == RECOVERY_PHASE_RESTORING:
            return _restore(recovery, view)
        case phase if phase == RECOVERY_PHASE_DONE:
            # A backup that was away gets the order when it is back.
            return Decision((*_unfenced(recovery, view), *_unfreed(recovery, view)))
    return Decision(())


def enter(recovery: RecoveryInfo, phase: RecoveryPhase.ValueType, now_us: int) -> RecoveryInfo:
    """Return the record of a recovery whose next phase begins."""
    changed = RecoveryInfo()
    changed.CopyFrom(recovery)
    changed.phase = phase
    del changed.waits_for[:]
    if phase in _ENDS_OF_PHASES:
        setattr(changed, _ENDS_OF_PHASES[phase], now_us)
    if phase == RECOVERY_PHASE_DONE:
        changed.bytes_recovered = changed.bytes_restored = changed.bytes_total
        changed.streamlets_readable = changed.streamlets_restored = changed.streamlets_opened
    return changed


def _unfenced(recovery: RecoveryInfo, view: View) -> tuple[Action, ...]:
    """Return the actions to fence the source; in later phases, too, for backups that were away before."""
    if recovery.cause == DRAINED:
        return ()
    return tuple(FenceAtBackup(backup) for backup in sorted(view.backups - view.fenced))


def _unfreed(recovery: RecoveryInfo, view: View) -> tuple[Action, ...]:
    # A living broker frees its replicas itself, once it learns that it has no groups of the stream any more.
    if recovery.cause == DRAINED:
        return ()
    return tuple(FreeReplicas(backup) for backup in sorted((view.backups & view.fenced) - view.freed))


def _taken_over(recovery: RecoveryInfo, view: View) -> list[tuple[StreamletId, common_pb2.StreamletAssignment]]:
    return [
        (StreamletId(stream.stream_id, one.streamlet_id), one)
        for stream in view.streams
        for one in stream.assignments
        if is_taken_over(recovery, one)
    ]


def _take_over(recovery: RecoveryInfo, view: View) -> Decision:
    plan, waits_for = plan_owners(recovery, view)
    taken = _taken_over(recovery, view)
    orphans = _orphans(view, taken)
    by_owner: dict[Launch, list[StreamletId]] = {}
    for streamlet, owner in plan.items():
        by_owner.setdefault(owner, []).append(streamlet)
    unopened = {
        OpenStream(owner, streamlet.stream_id)
        for streamlet, one in taken
        if (streamlet, owner := Launch(one.broker_id, one.broker_epoch)) not in view.opened and _lives(view, owner)
    }
    actions: list[Action] = [
        *_unfenced(recovery, view),
        *(TakeOver(owner, tuple(streamlets)) for owner, streamlets in sorted(by_owner.items())),
        *sorted(unopened, key=lambda action: (action.stream_id, action.owner)),
    ]
    if not actions and not waits_for and not orphans:
        actions.append(EnterPhase(RECOVERY_PHASE_RECOVERING))
    return Decision(tuple(actions), (*waits_for, *orphans))


def _orphans(view: View, taken: Iterable[tuple[StreamletId, common_pb2.StreamletAssignment]]) -> tuple[str, ...]:
    """Return the obstacles due to new owners that are gone, too: each comes back, or is recovered itself."""
    gone = {one.broker_id for _, one in taken if not _lives(view, Launch(one.broker_id, one.broker_epoch))}
    return tuple(f"broker {broker_id}, which had taken over streamlets, or its recovery" for broker_id in sorted(gone))


def _restore(recovery: RecoveryInfo, view: View) -> Decision:
    left = _taken_over(recovery, view)
    if not all(streamlet in view.restored for streamlet, _ in left):
        return Decision(_unfenced(recovery, view), _orphans(view, left))
    if left:
        return Decision((ReleaseSource(tuple(sorted({one.stream_id for one, _ in left}))),))
    covers = _covered_by(recovery, view)
    if covers:  # a later recovery took over from this source, too, and reads the replicas that would be freed
        waits_for = f"the recovery of broker {recovery.broker_id}, incarnations before epoch {covers}"
        return Decision(_unfenced(recovery, view), (waits_for,))
    if view.older:  # they may still have to read replicas that would be freed with this source's
        waits_for = f"the recovery of broker {recovery.broker_id}, incarnations before epoch {max(view.older)}"
        return Decision(_unfenced(recovery, view), (waits_for,))
    return Decision((*_unfenced(recovery, view), *_unfreed(recovery, view)) or (EnterPhase(RECOVERY_PHASE_DONE),))


def _covered_by(recovery: RecoveryInfo, view: View) -> int:
    """Return `before_epoch` of a later recovery of the same broker from which streamlets still come; 0: none."""
    sources = (source for stream in view.streams for one in stream.assignments for source in one.sources)
    epochs = (source.before_epoch for source in sources if source.broker_id == recovery.broker_id)
    return max((epoch for epoch in epochs if epoch > recovery.before_epoch), default=0)


def plan_owners(recovery: RecoveryInfo, view: View) -> tuple[dict[StreamletId, Launch], tuple[str, ...]]:
    """Return the brokers that have to take over the lost streamlets, and the obstacles where none can.

    A streamlet of which the lost broker had only older groups stays with its owner. Others are spread evenly over the
    living brokers, so that all of them recover; the broker with the fewest streamlets gets the first one.
    """
    given = Counter(owner.member_id for owner in view.planned.values() if _lives(view, owner))
    plan: dict[StreamletId, Launch] = {}
    waits_for: set[str] = set()
    for stream in view.streams:
        for one in stream.assignments:
            if not is_lost(recovery, stream, one):
                continue
            streamlet = StreamletId(stream.stream_id, one.streamlet_id)
            if one.broker_id != recovery.broker_id:
                owner = Launch(one.broker_id, one.broker_epoch)
                if _lives(view, owner):
                    plan[streamlet] = owner
                else:
                    waits_for.add(f"broker {one.broker_id}, which owns streamlets of which it had older groups")
                continue
            before = view.planned.get(streamlet)
            if before is not None and _lives(view, before):
                plan[streamlet] = before
                continue
            chosen = choose(view.owners, given, view.segment_bytes)
            if chosen is None:
                waits_for.add(f"a live broker with segments of at least {view.segment_bytes} bytes")
                continue
            given[chosen] += 1
            plan[streamlet] = Launch(chosen, view.owners[chosen].epoch)
    return plan, tuple(sorted(waits_for))


def choose(owners: Mapping[int, Owner], given: Mapping[int, int], segment_bytes: int) -> int | None:
    """Return the broker that gets the next streamlet; a draining broker only if there is no other."""

    def order(broker_id: int) -> tuple[bool, int, int, int]:
        owner = owners[broker_id]
        return owner.draining, given.get(broker_id, 0), owner.streamlets, broker_id

    fitting = [broker_id for broker_id, owner in owners.items() if owner.segment_bytes >= segment_bytes]
    return min(fitting, key=order, default=None)


def _lives(view: View, launch: Launch) -> bool:
    owner = view.owners.get(launch.member_id)
    return owner is not None and owner.epoch == launch.epoch


def key_of(recovery: RecoveryInfo) -> tuple[int, int]:
    """Return the key that identifies a recovery."""
    return recovery.broker_id, recovery.before_epoch


def begun(broker_id: int, before_epoch: int, cause: str, now_us: int) -> RecoveryInfo:
    """Return the record of a new recovery."""
    fencing = RECOVERY_PHASE_TAKING_OVER if cause == DRAINED else RECOVERY_PHASE_FENCING
    recovery = coordinator_pb2.RecoveryInfo(
        broker_id=broker_id, before_epoch=before_epoch, cause=cause, phase=fencing, detected_us=now_us
    )
    if cause == DRAINED:
        recovery.fenced_us = now_us  # a drained broker is not fenced
    return recovery


def word(phase: RecoveryPhase.ValueType) -> str:
    """Return the name of a phase for people, in lower case."""
    return RecoveryPhase.Name(phase).removeprefix("RECOVERY_PHASE_").lower()
