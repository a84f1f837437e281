"""The outcome of a registration, decided before anything changes. No I/O, no waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from kera.coordinator.cluster.member_kinds import FENCED, InfoT, RecordT
from kera.coordinator.cluster.membership import Membership, stale_launch
from kera.core.errors import InvalidArgument
from kera.v1 import common_pb2

VERSION_CHARACTERS_MAX = 100
CHOSEN_ID_MAX = (1 << 31) - 1
"""Maximum of an id that a member chooses: the coordinator gives ids above the highest one, and needs some left."""


@dataclass(frozen=True, slots=True)
class Admission(Generic[RecordT]):
    """The outcome of a registration, decided but not carried out."""

    record: RecordT
    """The request with id and epoch filled in, as it is stored for the member."""
    member_id: int
    epoch: int
    passing: dict[str, Any]
    """See `MemberKind.passing`."""
    new_member: bool
    """The member takes a new id."""
    new_launch: bool
    """The launch takes a new epoch. The member itself finds out which of its data it still has."""
    changed: bool
    """The record differs from the stored one; if not, this is a repeated request."""


def decide_admission(
    members: Membership[RecordT, InfoT], request: RecordT, *, next_id: int, next_epoch: int, keeps_epoch: bool = False
) -> Admission[RecordT]:
    """Decide the outcome of `request`; nothing changes. Raises `InvalidArgument`.

    `keeps_epoch`: the launch has its epoch already, though the metadata do not know it.
    """
    noun = members.kind.noun
    if not request.launch_id:
        raise InvalidArgument(f"a registration needs a launch_id, unique for each launch of the {noun}")
    if not members.kind.info(request).grpc_address:
        raise InvalidArgument(f"a registration needs the {noun}'s grpc_address")
    known = _known(members, request)
    new_launch = known is None or known.launch_id != request.launch_id
    chosen_id, _ = members.kind.id_and_epoch(request)
    member_id, epoch = (chosen_id or next_id, next_epoch) if known is None else members.kind.id_and_epoch(known)
    if known is not None and known.launch_id == FENCED + request.launch_id:
        raise stale_launch(noun, member_id, f"this launch of {noun} {member_id} was given up for lost; it must end")
    if new_launch:
        epoch = members.kind.id_and_epoch(request)[1] if keeps_epoch else next_epoch
    record = members.kind.new_record()
    record.CopyFrom(request)
    for field in members.kind.of_request:
        record.ClearField(field)
    members.kind.set_id_and_epoch(record, member_id, epoch)
    info = members.kind.info(record)
    passing = {field: getattr(info, field) for field in members.kind.passing}
    info.alive = False  # never stored, as what follows; see `describe`
    info.restarting, info.grace_left_ms = False, 0
    info.draining = known is not None and members.kind.info(known).draining
    for field in members.kind.passing:
        setattr(info, field, 0)
    return Admission(
        record,
        member_id,
        epoch,
        passing,
        new_member=known is None,
        new_launch=new_launch,
        changed=record != known,
    )


def check_level(noun: str, info: common_pb2.BrokerInfo | common_pb2.BackupInfo, feature_level: int) -> None:
    """Raise `InvalidArgument` for a member that is too old for the cluster, or whose version string is too long."""
    if len(info.version) > VERSION_CHARACTERS_MAX:
        raise InvalidArgument(f"a {noun}'s version has at most {VERSION_CHARACTERS_MAX} characters")
    if info.feature_level < feature_level:
        raise InvalidArgument(
            f"this {noun} has version {info.version or 'unknown'} and feature level {info.feature_level}, and the"
            f" cluster has level {feature_level}, which never falls: start a {noun} of a newer version",
            feature_level=feature_level,
        )


def _known(members: Membership[RecordT, InfoT], request: RecordT) -> RecordT | None:
    member_id, _ = members.kind.id_and_epoch(request)
    if request.chosen_id:
        return _chosen(members, member_id, request.launch_id)
    if not member_id:  # a new member repeats its registration when the answer is lost; it must not become two
        names = {request.launch_id, FENCED + request.launch_id}
        records = (members.record(one) for one in members.ids())
        return next((record for record in records if record is not None and record.launch_id in names), None)
    noun, record = members.kind.noun, members.record(member_id)
    if record is not None:
        _check_same(noun, member_id, record, request)
        return record
    was_forgotten = members.forgotten.get(member_id) in {"", request.directory_id}
    if request.directory_id and member_id <= CHOSEN_ID_MAX and not was_forgotten:
        return None  # our metadata were restored from a copy that is older than this member: it keeps its id
    raise InvalidArgument(
        f"no {noun} of this cluster has id {member_id}: it was forgotten, or the {noun}'s data directory"
        f" belongs to another cluster; name that cluster's coordinator, or start the {noun} with an empty data"
        " directory",
        **{f"{noun}_id": member_id},
    )


def _check_same(noun: str, member_id: int, record: RecordT, request: RecordT) -> None:
    """Raise `InvalidArgument` for a data directory with the id of another: each directory has different data."""
    if record.directory_id and request.directory_id and record.directory_id != request.directory_id:
        raise InvalidArgument(
            f"another {noun} has id {member_id}, with another data directory: the id was given twice, as the"
            f" metadata were restored from a copy that is older than this {noun}. Empty the other one (kera cluster"
            f" drain {noun}-{member_id}), stop it, and forget it (kera cluster forget {noun}-{member_id}); then"
            " start this one again",
            **{f"{noun}_id": member_id},
        )


def _chosen(members: Membership[RecordT, InfoT], member_id: int, launch_id: str) -> RecordT | None:
    """Return the record of a new member that chose its id, if this launch has registered with it before.

    Raises `InvalidArgument` if the id is out of range, or another member has it.
    """
    noun, record = members.kind.noun, members.record(member_id)
    if not 0 < member_id <= CHOSEN_ID_MAX:
        raise InvalidArgument(f"a {noun} may choose an id from 1 to {CHOSEN_ID_MAX}, not {member_id}")
    if record is None:
        return None
    if record.launch_id not in {launch_id, FENCED + launch_id}:
        raise InvalidArgument(
            f"there is a {noun} {member_id} already, and it is not this one, whose data directory is new: choose"
            f" another id, or start with the data directory of {noun} {member_id}; if that is gone for good,"
            f" kera cluster forget {noun}-{member_id} makes its id free",
            **{f"{noun}_id": member_id},
        )
    return record
