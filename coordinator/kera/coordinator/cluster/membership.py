"""Who belongs to the cluster, which launch of each member is the current one, and who is alive. No I/O, no waiting.

Brokers and backups are members alike: one `Membership` for each `Kind`. Their messages have the same fields under the
names of their kind, and that is all in which they differ here.

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

import json
import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kera.coordinator.ids import Launch
from kera.core.clock import Clock
from kera.core.errors import InvalidArgument, StaleEpoch
from kera.v1 import common_pb2, coordinator_pb2

RecordT = TypeVar("RecordT", coordinator_pb2.RegisterBrokerRequest, coordinator_pb2.RegisterBackupRequest)
InfoT = TypeVar("InfoT", common_pb2.BrokerInfo, common_pb2.BackupInfo)


FENCED = "fenced:"
"""How the stored `launch_id` of a member begins whose last launch is fenced; that launch's own follows."""
CHOSEN_ID_MAX = (1 << 31) - 1
"""Ids that are given go on behind the highest one, and there must be some left."""
LATE_INTERVALS = 2
"""A tick that comes after more than so many intervals is late: this process was stopped, or starved."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[RecordT, InfoT]):
    """What a member can be: how its messages name it."""

    noun: str
    """In words, and in the names of fields: a broker's registration has `broker`, which has `broker_id`."""
    new_record: type[RecordT]
    new_info: type[InfoT]
    of_request: tuple[Any, ...] = ("chosen_id",)
    """Fields of a registration that are for this once, and not stored."""
    passing: tuple[str, ...] = ()
    """Fields of its description that hold for a moment: registrations and heartbeats tell them, nothing stores them."""

    def info(self, record: RecordT) -> InfoT:
        """The description within a registration."""
        info: InfoT = getattr(record, self.noun)
        return info

    def id_and_epoch(self, record: RecordT) -> tuple[int, int]:
        """Who registered, and which launch of it."""
        info = self.info(record)
        return getattr(info, f"{self.noun}_id"), getattr(info, f"{self.noun}_epoch")

    def set_id_and_epoch(self, record: RecordT, member_id: int, epoch: int) -> None:
        """Say who it is, and which launch of it."""
        info = self.info(record)
        setattr(info, f"{self.noun}_id", member_id)
        setattr(info, f"{self.noun}_epoch", epoch)


BROKER = Kind(
    "broker",
    coordinator_pb2.RegisterBrokerRequest,
    common_pb2.BrokerInfo,
    of_request=("chosen_id", "held_streams", "known_coordinator_epoch"),
)
BACKUP = Kind(
    "backup",
    coordinator_pb2.RegisterBackupRequest,
    common_pb2.BackupInfo,
    passing=("free_memory_bytes", "free_disk_bytes"),
)


@dataclass(frozen=True, slots=True)
class Registration(Generic[RecordT]):
    """What a registration amounts to, decided but not done."""

    record: RecordT
    """The request with id and epoch filled in: this is what is stored for each member."""
    member_id: int
    epoch: int
    passing: dict[str, Any]
    """See `Kind.passing`."""
    new_member: bool
    """It takes a new id."""
    new_launch: bool
    """It takes a new epoch. What of its data the member still has, it finds out itself."""
    changed: bool
    """The record differs from the stored one; if not, this is a repeated request."""


@dataclass(slots=True)
class _Member(Generic[RecordT]):
    record: RecordT
    heard_s: float
    """When the member was last heard of, on the monotonic clock."""
    passing: dict[str, Any]
    leaving: bool = False
    """Its launch has said that it is about to stop. Not stored: one that has yet to stop says so again."""


class Membership(Generic[RecordT, InfoT]):
    """The members of one kind."""

    def __init__(
        self,
        kind: Kind[RecordT, InfoT],
        clock: Clock,
        *,
        heartbeat_interval_ms: int,
        heartbeats_missed_max: int,
        restart_grace_ms: int = 0,
    ) -> None:
        self.kind: Kind[RecordT, InfoT] = kind
        self._clock = clock
        self._silence_max_s = heartbeat_interval_ms * heartbeats_missed_max / 1000
        self._interval_s = heartbeat_interval_ms / 1000
        self._grace_s = restart_grace_ms / 1000
        self._ticked_s = clock.monotonic_s()
        self._members: dict[int, _Member[RecordT]] = {}
        self._forgotten: dict[int, str] = {}
        """The ids of the data directories of members that are gone for good, by theirs; empty: not known."""

    def restore(self, value: bytes) -> None:
        """Take up a stored member. It counts as just heard of: that we were away says nothing about it."""
        record = self.kind.new_record.FromString(value)
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id] = _Member(record, self._clock.monotonic_s(), {})

    def decide(
        self, request: RecordT, *, next_id: int, next_epoch: int, keeps_epoch: bool = False
    ) -> Registration[RecordT]:
        """What `request` amounts to; nothing changes. Raises `InvalidArgument`.

        `keeps_epoch`: it is of a launch that has its epoch already, and of which we do not know.
        """
        noun = self.kind.noun
        if not request.launch_id:
            raise InvalidArgument(f"a registration needs a launch_id, unique for each launch of the {noun}")
        if not self.kind.info(request).grpc_address:
            raise InvalidArgument(f"a registration needs the {noun}'s grpc_address")
        known = self._known(request)
        new_launch = known is None or known.launch_id != request.launch_id
        chosen_id, _ = self.kind.id_and_epoch(request)
        member_id, epoch = (chosen_id or next_id, next_epoch) if known is None else self.kind.id_and_epoch(known)
        if known is not None and known.launch_id == FENCED + request.launch_id:
            raise self._stale(member_id, f"this launch of {noun} {member_id} was given up for lost; it must end")
        if new_launch:
            epoch = self.kind.id_and_epoch(request)[1] if keeps_epoch else next_epoch
        record = self.kind.new_record()
        record.CopyFrom(request)
        for field in self.kind.of_request:
            record.ClearField(field)
        self.kind.set_id_and_epoch(record, member_id, epoch)
        info = self.kind.info(record)
        passing = {field: getattr(info, field) for field in self.kind.passing}
        info.alive = False  # never stored, as what follows; see `describe`
        info.restarting, info.grace_left_ms = False, 0
        info.draining = known is not None and self.kind.info(known).draining
        for field in self.kind.passing:
            setattr(info, field, 0)
        return Registration(
            record,
            member_id,
            epoch,
            passing,
            new_member=known is None,
            new_launch=new_launch,
            changed=record != known,
        )

    def _known(self, request: RecordT) -> RecordT | None:
        member_id, _ = self.kind.id_and_epoch(request)
        if request.chosen_id:
            return self._chosen(member_id, request.launch_id)
        if member_id in self._members:
            record = self._members[member_id].record
            self._check_same(member_id, record, request)
            return record
        if request.directory_id and member_id <= CHOSEN_ID_MAX and not self._was_forgotten(member_id, request):
            return None  # our metadata were restored from a copy that is older than this member: it keeps its id
        if member_id:
            noun = self.kind.noun
            raise InvalidArgument(
                f"no {noun} of this cluster has id {member_id}: it was forgotten, or the {noun}'s data directory"
                f" belongs to another cluster; name that cluster's coordinator, or start the {noun} with an empty data"
                " directory",
                **{f"{noun}_id": member_id},
            )
        # A new member repeats its registration when the answer is lost; it must not become two.
        names = {request.launch_id, FENCED + request.launch_id}
        repeated = (member.record for member in self._members.values() if member.record.launch_id in names)
        return next(repeated, None)

    def _was_forgotten(self, member_id: int, request: RecordT) -> bool:
        return self._forgotten.get(member_id) in {"", request.directory_id}

    def _check_same(self, member_id: int, record: RecordT, request: RecordT) -> None:
        """Raise `InvalidArgument` for a data directory that has the id of another one: each holds data of its own."""
        if record.directory_id and request.directory_id and record.directory_id != request.directory_id:
            noun = self.kind.noun
            raise InvalidArgument(
                f"another {noun} has id {member_id}, with another data directory: the id was given twice, as the"
                f" metadata were restored from a copy that is older than this {noun}. Empty the other one (kera cluster"
                f" drain {noun}-{member_id}), stop it, and forget it (kera cluster forget {noun}-{member_id}); then"
                " start this one again",
                **{f"{noun}_id": member_id},
            )

    def _chosen(self, member_id: int, launch_id: str) -> RecordT | None:
        """The record of a new member that asks for an id, if this launch has registered with it before."""
        noun, member = self.kind.noun, self._members.get(member_id)
        if not 0 < member_id <= CHOSEN_ID_MAX:
            raise InvalidArgument(f"a {noun} may choose an id from 1 to {CHOSEN_ID_MAX}, not {member_id}")
        if member is None:
            return None
        if member.record.launch_id not in {launch_id, FENCED + launch_id}:
            raise InvalidArgument(
                f"there is a {noun} {member_id} already, and it is not this one, whose data directory is new: choose"
                f" another id, or start with the data directory of {noun} {member_id}; if that is gone for good,"
                f" kera cluster forget {noun}-{member_id} makes its id free",
                **{f"{noun}_id": member_id},
            )
        return member.record

    def admit(self, registration: Registration[RecordT]) -> InfoT:
        """Do what was decided, once it is stored."""
        self._members[registration.member_id] = _Member(
            registration.record, self._clock.monotonic_s(), registration.passing
        )
        return self.describe(registration.member_id)

    def heartbeat(self, member_id: int, epoch: int, **passing: int) -> None:
        """A member says that it lives, and what is true of it now: all of `Kind.passing`.

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
            raise self._stale(
                member_id,
                f"launch {epoch} of {noun} {member_id} {known}; it must end",
                **{f"{noun}_epoch": epoch, "current_epoch": current},
            )
        return member

    def _stale(self, member_id: int, message: str, **attributes: Any) -> StaleEpoch:
        return StaleEpoch(message, **{f"{self.kind.noun}_id": member_id, **attributes})

    def tick(self) -> None:
        """To be called every heartbeat interval: what a late call tells of a pause of our own delays all judgements."""
        now_s = self._clock.monotonic_s()
        late_s = now_s - self._ticked_s - self._interval_s
        self._ticked_s = now_s
        if late_s > (LATE_INTERVALS - 1) * self._interval_s:
            for member in self._members.values():
                member.heard_s = min(now_s, member.heard_s + late_s)

    def fenced(self, member_id: int, epoch: int) -> RecordT:
        """The record of a member none of whose launches before `epoch` may do anything any more. Nothing changes."""
        record = self._copy(member_id)
        if not record.launch_id.startswith(FENCED):
            record.launch_id = FENCED + record.launch_id
        self.kind.info(record).restarting = False
        self.kind.set_id_and_epoch(record, member_id, epoch)
        return record

    def drained(self, member_id: int, *, draining: bool) -> RecordT:
        """The record of a member that is to be emptied, or not any more. Nothing changes. Raises `InvalidArgument`."""
        if member_id not in self._members:
            raise InvalidArgument(f"there is no {self.kind.noun} {member_id}", **{f"{self.kind.noun}_id": member_id})
        record = self._copy(member_id)
        self.kind.info(record).draining = draining
        return record

    def leave(self, member_id: int, epoch: int) -> None:
        """This launch stops soon, in order to start again: it gets nothing new. Raises `StaleEpoch`."""
        self._current(member_id, epoch).leaving = True

    def restarting(self, member_id: int, epoch: int) -> RecordT:
        """The record of a member whose launch has stopped in order to start again. Nothing changes.

        Raises `StaleEpoch`.
        """
        self._current(member_id, epoch)
        record = self._copy(member_id)
        self.kind.info(record).restarting = True
        return record

    def forgotten(self, member_id: int) -> bytes:
        """What is kept of a member that is gone for good: it may not come back. Nothing changes."""
        return json.dumps({"id": member_id, "directory_id": self._members[member_id].record.directory_id}).encode()

    def restore_forgotten(self, value: bytes) -> None:
        """Take up what `forgotten` gave."""
        record = json.loads(value)
        self._forgotten[record["id"]] = record["directory_id"]

    def forget(self, member_id: int) -> None:
        """It is gone for good, and so is its record, once `forgotten` is stored."""
        self._forgotten[member_id] = self._members.pop(member_id).record.directory_id

    def replace(self, record: RecordT) -> None:
        """A record from `fenced`, `drained` or `restarting`, once it is stored."""
        member_id, _ = self.kind.id_and_epoch(record)
        self._members[member_id].record = record

    def _copy(self, member_id: int) -> RecordT:
        record = self.kind.new_record()
        record.CopyFrom(self._members[member_id].record)
        return record

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

    def launch(self, member_id: int) -> Launch:
        """The member's current launch, see `epoch`."""
        return Launch(member_id, self.epoch(member_id))

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
        """When it was heard of, on the clock's monotonic time."""
        return self._members[member_id].heard_s

    def is_alive(self, member_id: int) -> bool:
        """Whether the member is known, was heard of recently, and is neither fenced nor stopped by its own word."""
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
        return self.kind.info(self._members[member_id].record).restarting and self._grace_left_s(member_id) > 0

    def _grace_left_s(self, member_id: int) -> float:
        return self._members[member_id].heard_s + self._grace_s - self._clock.monotonic_s()

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
            info.grace_left_ms = max(0, round(self._grace_left_s(member_id) * 1000))
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
