"""The members of the cluster, the current launch of each, and which are alive. No I/O, no waiting.

Brokers and backups are members alike: one `Membership` for each kind (``member_kinds``). ``admission`` decides the
outcome of a registration.

Invariants, for each kind:

1. An id is given once. A member that starts again and names its id keeps it.
2. Every launch of every member has its own epoch, greater than all before it.
3. Each member has one current launch, or none if it is fenced. Heartbeats of other launches are refused, and they end.
4. A launch that has been fenced never becomes current again, not even by registering once more.

A member is alive while its last heartbeat is younger than `heartbeats_missed_max` intervals. A member that is not alive
stays a member and keeps all that it has, until a recovery fences it (``recovery``).

A member that stops in order to start again announces this, and gets nothing new from then on:

    alive ── leave ──► leaving, still alive ── `restarting`, stored ──► expected ── its next launch ──► alive
                                                                           └── silent for `restart_grace_ms` ──► lost

Silence counts only while this process listens: `Membership.tick`, called every interval, recognises by the time between
two calls that this process itself was stopped, and extends every member's deadline by that time.
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
"""A tick that comes after more than this many intervals is late: this process was stopped, or starved."""


@dataclass(slots=True)
class _Member(Generic[RecordT]):
    record: RecordT
    heard_s: float
    """When the member was last seen, on the monotonic clock."""
    passing: dict[str, Any]
    leaving: bool = False
    """The launch has announced that it is about to stop. Not stored: a launch that still runs announces it again."""


def stale_launch(noun: str, member_id: int, message: str, **attributes: Any) -> StaleEpoch:
    """Return the error for a launch that is not, or no longer, the current one of its member."""
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
        """The members that are gone for good: the id of each one's data directory, by member id; empty: not known."""

    def load(self, records: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Load the stored members. They count as just seen: the absence of the coordinator says nothing about them."""
        for value in records:
            self.admit(self.kind.new_record.FromString(value), {})
        self.forgotten = dict(map(read_forgotten, forgotten))

    def admit(self, record: RecordT, passing: dict[str, Any]) -> InfoT:
        """Apply a registration that is stored. `passing`: the member's present figures, see `MemberKind`."""
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id] = _Member(record, self._clock.monotonic_s(), passing)
        return self.describe(member_id)

    def record(self, member_id: int) -> RecordT | None:
        """Return the stored registration of a member, or None."""
        return self._members[member_id].record if member_id in self._members else None

    def heartbeat(self, member_id: int, epoch: int, **passing: int) -> None:
        """Take note that a member lives, and of its present figures: all of `MemberKind.passing`.

        Raises `StaleEpoch` unless this is the current launch of a known member.
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
        """Call this every heartbeat interval: if a late call shows that this process paused, all members get that much
        more time.
        """
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._ticked_s - self._interval_s
        self._ticked_s = now_s
        if late_s > (LATE_INTERVALS - 1) * self._interval_s:
            for member in self._members.values():
                member.heard_s = min(now_s, member.heard_s + late_s)

    def leave(self, member_id: int, epoch: int) -> None:
        """Give this launch nothing new: it will stop soon, in order to start again. Raises `StaleEpoch`."""
        self._current(member_id, epoch).leaving = True

    def forget(self, member_id: int) -> None:
        """Remove a member that is gone for good, once that is stored."""
        self.forgotten[member_id] = self._members.pop(member_id).record.directory_id

    def replace(self, record: RecordT) -> None:
        """Replace the record of a member, once the new one is stored."""
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id].record = record

    def declare_dead(self, member_id: int) -> None:
        """Treat a member as dead, however recent its last heartbeat. The next one revives it, unless it is fenced."""
        self._members[member_id].heard_s = -math.inf

    def epoch(self, member_id: int) -> int:
        """Return the epoch of the member's current launch; for a fenced member, the epoch below which launches are
        refused.

        0 for a forgotten member.
        """
        if member_id not in self._members:
            return 0
        _, epoch = self.kind.id_and_epoch(self._members[member_id].record)
        return epoch

    def is_current(self, launch: Launch) -> bool:
        """Whether this is the current launch of a member that is alive."""
        return self.is_alive(launch.member_id) and self.epoch(launch.member_id) == launch.epoch

    def is_fenced(self, member_id: int) -> bool:
        """Whether the member has no current launch, because its last one was declared lost, or it was forgotten."""
        member = self._members.get(member_id)
        return member is None or member.record.launch_id.startswith(FENCED)

    def has_lost_memory(self, member_id: int) -> bool:
        """Whether the member's launch started without the memory of the launch before."""
        member = self._members.get(member_id)
        return member is not None and bool(getattr(member.record, "lost_memory", False))

    def is_draining(self, member_id: int) -> bool:
        """Whether the member is known, and is being emptied."""
        member = self._members.get(member_id)
        return member is not None and self.kind.info(member.record).draining

    def heard_s(self, member_id: int) -> float:
        """Return when the member was last seen, on the clock's monotonic time."""
        return self._members[member_id].heard_s

    def is_alive(self, member_id: int) -> bool:
        """Whether the member is known, was seen recently, is not fenced, and has not stopped for a restart."""
        member = self._members.get(member_id)
        if member is None or self.is_fenced(member_id) or self.kind.info(member.record).restarting:
            return False
        return self._clock.monotonic_s() - member.heard_s <= self._silence_max_s

    def is_leaving(self, member_id: int) -> bool:
        """Whether the member's launch is about to stop, or has stopped, in order to start again."""
        member = self._members[member_id]
        return member.leaving or self.kind.info(member.record).restarting

    def is_expected(self, member_id: int) -> bool:
        """Whether the member has stopped in order to start again, and its grace time is not over."""
        member = self._members.get(member_id)
        if member is None:
            return False
        return self.kind.info(member.record).restarting and member.heard_s + self._grace_s > self._clock.monotonic_s()

    def describe(self, member_id: int) -> InfoT:
        """Return a copy of the member's description with its present state."""
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
        """Describe all members, dead ones included, by id."""
        return [self.describe(member_id) for member_id in self.ids()]

    def ids(self) -> list[int]:
        """Return the ids of all members, dead ones included."""
        return sorted(self._members)

    def live_ids(self) -> list[int]:
        """Return the ids of all members that are alive."""
        return [member_id for member_id in self.ids() if self.is_alive(member_id)]

    def open_ids(self) -> list[int]:
        """Return the ids of all members that may be given something: alive, neither draining nor about to stop."""
        return [
            member_id
            for member_id in self.live_ids()
            if not (self.is_draining(member_id) or self.is_leaving(member_id))
        ]


BrokerMembers = Membership[coordinator_pb2.RegisterBrokerRequest, common_pb2.BrokerInfo]
BackupMembers = Membership[coordinator_pb2.RegisterBackupRequest, common_pb2.BackupInfo]
