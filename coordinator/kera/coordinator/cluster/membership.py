"""The members of the cluster, the current launch of each, and which are alive. No I/O, no waiting.

Brokers and backups are members alike: one `Membership` for each kind (``member_kinds``). What a registration amounts to
is decided by ``admission``.

Invariants, for each kind:

1. An id is given once. A member that starts again and says who it is keeps its id.
2. Every launch of every member has an epoch of its own, greater than all before it.
3. Of each member one launch is current, or none: it is fenced. Heartbeats of others are refused, which makes them end.
4. A launch that has been fenced never becomes current again, not even by registering once more.

A member is alive while its last heartbeat is younger than `heartbeats_missed_max` intervals. One that is not alive
stays a member, with all that it has, until a recovery fences it (``recovery``).

A member that stops in order to start again says so first, and gets nothing new from then on:

    alive ── leave ──► leaving, still alive ── `restarting`, stored ──► expected ── its next launch ──► alive
                                                                           └── silent for `restart_grace_ms` ──► lost

Silence counts only while we listen: `Membership.tick`, called every interval, finds from the time between two calls
that this process was stopped itself, and does not hold that against anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic

from kera.coordinator.cluster.member_kinds import FENCED, InfoT, MemberKind, RecordT, read_forgotten
from kera.coordinator.ids import Launch
from kera.core.base.clock import Clock
from kera.core.errors import StaleEpoch
from kera.v1 import common_pb2, coordinator_pb2

LATE_INTERVALS = 2
"""A tick that comes after more than so many intervals is late: this process was stopped, or starved."""


@dataclass(slots=True)
class _Member(Generic[RecordT]):
    record: RecordT
    heard_s: float
    """When the member was last seen, on the monotonic clock."""
    passing: dict[str, Any]
    leaving: bool = False
    """Its launch has said that it is about to stop. Not stored: one that has yet to stop says so again."""


def stale_launch(noun: str, member_id: int, message: str, **attributes: Any) -> StaleEpoch:
    """The error for a launch that is not, or no more, the current one of its member."""
    return StaleEpoch(message, **{f"{noun}_id": member_id, **attributes})


class Membership(Generic[RecordT, InfoT]):
    """The members of one kind."""

    def __init__(
        self,
        kind: MemberKind[RecordT, InfoT],
        clock: Clock,
        *,
        heartbeat_interval_ms: int,
        heartbeats_missed_max: int,
        restart_grace_ms: int = 0,
    ) -> None:
        self.kind: MemberKind[RecordT, InfoT] = kind
        self._clock = clock
        self._silence_max_s = heartbeat_interval_ms * heartbeats_missed_max / 1000
        self._interval_s = heartbeat_interval_ms / 1000
        self._grace_s = restart_grace_ms / 1000
        self._ticked_s = clock.monotonic_s()
        self._members: dict[int, _Member[RecordT]] = {}
        self.forgotten: dict[int, str] = {}
        """The ids of the data directories of members that are gone for good, by theirs; empty: not known."""

    def load(self, records: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Take up what is stored. Members count as just seen: that we were away says nothing about them."""
        for value in records:
            self.admit(self.kind.new_record.FromString(value), {})
        self.forgotten = dict(map(read_forgotten, forgotten))

    def admit(self, record: RecordT, passing: dict[str, Any]) -> InfoT:
        """A registration counts, once it is stored. `passing`: what is true of the member now, see `MemberKind`."""
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id] = _Member(record, self._clock.monotonic_s(), passing)
        return self.describe(member_id)

    def record(self, member_id: int) -> RecordT | None:
        """The registration of a member, as it is stored."""
        return self._members[member_id].record if member_id in self._members else None

    def heartbeat(self, member_id: int, epoch: int, **passing: int) -> None:
        """A member says that it lives, and what is true of it now: all of `MemberKind.passing`.

        Raises `StaleEpoch` unless it is the current launch of a member we know.
        """
        member = self._current(member_id, epoch)
        member.heard_s = self._clock.monotonic_s()
        member.passing = passing

    def _current(self, member_id: int, epoch: int) -> _Member[RecordT]:
        noun, member = self.kind.noun, self._members.get(member_id)
        current = self.epoch(member_id) if member else None
        if member is None or current != epoch or self.is_fenced(member_id):
            known = f"is not the current one ({current})"
            if current is None or epoch > current:
                known = "is not known: the metadata may have been restored from an older copy"
            raise stale_launch(
                noun,
                member_id,
                f"launch {epoch} of {noun} {member_id} {known}; it must end",
                **{f"{noun}_epoch": epoch, "current_epoch": current},
            )
        return member

    def tick(self) -> None:
        """To be called every heartbeat interval: what a late call tells of a pause of our own delays all judgements."""
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._ticked_s - self._interval_s
        self._ticked_s = now_s
        if late_s > (LATE_INTERVALS - 1) * self._interval_s:
            for member in self._members.values():
                member.heard_s = min(now_s, member.heard_s + late_s)

    def leave(self, member_id: int, epoch: int) -> None:
        """This launch stops soon, in order to start again: it gets nothing new. Raises `StaleEpoch`."""
        self._current(member_id, epoch).leaving = True

    def forget(self, member_id: int) -> None:
        """It is gone for good, and that is stored."""
        self.forgotten[member_id] = self._members.pop(member_id).record.directory_id

    def replace(self, record: RecordT) -> None:
        """The record of a member has changed, and is stored."""
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id].record = record

    def declare_dead(self, member_id: int) -> None:
        """It was found to be gone, whatever it said a moment ago. A heartbeat brings it back, unless it is fenced."""
        self._members[member_id].heard_s = -math.inf

    def epoch(self, member_id: int) -> int:
        """The epoch of the member's current launch; of one that is fenced, the one below which launches are refused.

        0 for one that was forgotten.
        """
        if member_id not in self._members:
            return 0
        _, epoch = self.kind.id_and_epoch(self._members[member_id].record)
        return epoch

    def is_current(self, launch: Launch) -> bool:
        """Whether this is the current launch of a member that is alive."""
        return self.is_alive(launch.member_id) and self.epoch(launch.member_id) == launch.epoch

    def is_fenced(self, member_id: int) -> bool:
        """Whether the member has no current launch, since the last one was given up for lost, or it was forgotten."""
        member = self._members.get(member_id)
        return member is None or member.record.launch_id.startswith(FENCED)

    def has_lost_memory(self, member_id: int) -> bool:
        """Whether the member's launch has begun without what the one before had in memory."""
        member = self._members.get(member_id)
        return member is not None and bool(getattr(member.record, "lost_memory", False))

    def is_draining(self, member_id: int) -> bool:
        """Whether the member is to be emptied."""
        return self.kind.info(self._members[member_id].record).draining

    def heard_s(self, member_id: int) -> float:
        """When it was last seen, on the clock's monotonic time."""
        return self._members[member_id].heard_s

    def is_alive(self, member_id: int) -> bool:
        """Whether the member is known, was seen recently, and is neither fenced nor stopped by its own word."""
        member = self._members.get(member_id)
        if member is None or self.is_fenced(member_id) or self.kind.info(member.record).restarting:
            return False
        return self._clock.monotonic_s() - member.heard_s <= self._silence_max_s

    def is_leaving(self, member_id: int) -> bool:
        """Whether its launch stops, or has stopped, in order to start again."""
        member = self._members[member_id]
        return member.leaving or self.kind.info(member.record).restarting

    def is_expected(self, member_id: int) -> bool:
        """Whether the member has stopped in order to start again, and still has time for that."""
        member = self._members.get(member_id)
        if member is None:
            return False
        return self.kind.info(member.record).restarting and member.heard_s + self._grace_s > self._clock.monotonic_s()

    def describe(self, member_id: int) -> InfoT:
        """A copy of what is known of the member, with its state of now."""
        member = self._members[member_id]
        info: InfoT = self.kind.new_info()
        info.CopyFrom(self.kind.info(member.record))
        for field, value in member.passing.items():
            setattr(info, field, value)
        info.alive = self.is_alive(member_id)
        info.restarting = (info.alive and member.leaving) or self.is_expected(member_id)
        if info.restarting:
            grace_left_s = member.heard_s + self._grace_s - self._clock.monotonic_s()
            info.grace_left_ms = max(0, round(grace_left_s * 1000))
        return info

    def describe_all(self) -> list[InfoT]:
        """All members that ever were, by id."""
        return [self.describe(member_id) for member_id in self.ids()]

    def ids(self) -> list[int]:
        """All members that ever were."""
        return sorted(self._members)

    def live_ids(self) -> list[int]:
        """All members that are alive."""
        return [member_id for member_id in self.ids() if self.is_alive(member_id)]

    def open_ids(self) -> list[int]:
        """All members that are alive and may be given something: they are neither draining nor about to stop."""
        return [
            member_id
            for member_id in self.live_ids()
            if not (self.is_draining(member_id) or self.is_leaving(member_id))
        ]


BrokerMembers = Membership[coordinator_pb2.RegisterBrokerRequest, common_pb2.BrokerInfo]
BackupMembers = Membership[coordinator_pb2.RegisterBackupRequest, common_pb2.BackupInfo]
