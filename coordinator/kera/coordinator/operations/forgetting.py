"""Removing the records of members that are gone for good (``kera cluster forget``).

Otherwise a member stays a member forever, since it may come back. A forgotten member is on no list any more, no
recovery waits for it, and should it come back, its registration is refused.

The request is refused for a member that is alive or expected back, and for one that is still needed:

    broker   its part of replicated streams is being recovered, or has yet to be: that ends without help, or shows what
             it waits for. Records of streams without replicas are at their broker only: `force` gives them up.
    backup   a recovery is under way, which may read from it; or a broker has not reported that all it has there is
             elsewhere, too. `force` gives up the latter.

With `force`, a streamlet without replicas gets another owner, and continues far behind the lost records (see
`first_group_id_of`): readers get ``DataLost``. The answer says in words what was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from kera.coordinator.cluster.catalog import first_group_id_of, with_assignments
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.intervals import broker_ids_of, emptied, intervals_of, moved
from kera.coordinator.cluster.keys import HANDOVERS, forgotten_key, handed_over_key, member_key, streamlet_key
from kera.coordinator.cluster.member_kinds import InfoT, RecordT, forgotten_record
from kera.coordinator.cluster.membership import Membership
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.migration import Migration
from kera.coordinator.operations.moves import move_record
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.decide import ENDED
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class Forgetting:
    """Removes the records of members that are gone for good, unless the cluster still needs them."""

    def __init__(self, state: State, recoveries: Recoveries, migration: Migration) -> None:
        self._state = state
        self._recoveries = recoveries
        self._migration = migration

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.FORGET_MEMBER: self.forget}

    async def forget(self, request: coordinator_pb2.ForgetMemberRequest) -> coordinator_pb2.ForgetMemberResponse:
        """Forget a member; return what is lost by that. Raises `InvalidArgument` with the reason if it may not
        be forgotten.
        """
        if bool(request.broker_id) == bool(request.backup_id):
            raise InvalidArgument("name the broker or the backup to forget: one of the two")
        self._state.check_caught_up()
        if request.backup_id:
            forgetting = self._forget_backup(request.backup_id, force=request.force)
            lost = await self._state.change(forgetting, for_caller=True)
        else:
            of_broker = self._forget_broker(request.broker_id, force=request.force)
            lost, streams = await self._state.change(of_broker, for_caller=True)
            for stream in streams:
                await self._state.tell(stream, otherwise="broker not yet notified that it owns streamlets without data")
        return coordinator_pb2.ForgetMemberResponse(lost=lost)

    # --- backups -----------------------------------------------------------------------------------------------

    async def _forget_backup(self, backup_id: int, *, force: bool) -> list[str]:
        _check_gone(self._state.backups, backup_id)
        lost = [
            f"broker {broker_id} may have replicas there that are not on other backups yet"
            for broker_id in self._state.brokers.ids()
            if self._has_something(broker_id)
            and not self._recoveries.unneeded.of(broker_id, self._state.brokers.epoch(broker_id), backup_id)
        ]
        backups = self._state.backups
        if lost and backups.is_expected(backup_id) and backups.is_draining(backup_id) and not force:
            raise Unavailable(
                f"backup {backup_id} was drained, and has stopped a moment ago; {lost[0]}: wait for their next"
                " heartbeats",
                backup_id=backup_id,
            )
        _check_not_expected(backups, backup_id, is_empty=not lost)
        under_way = [one for one in self._recoveries.describe_all() if one.phase not in ENDED]
        if under_way:
            raise InvalidArgument(
                f"a recovery of the data of broker {under_way[0].broker_id} is under way, and backup {backup_id} may"
                " have some of them; if the recovery waits for it, give it up with kera cluster drain"
                f" backup-{backup_id}, then forget it",
                backup_id=backup_id,
            )
        _check_forced(f"backup {backup_id}", lost, force=force)
        await self._remove(self._state.backups, backup_id)
        return lost

    def _has_something(self, broker_id: int) -> bool:
        return any(stream.config.replication for stream in self._state.catalog.concerning(broker_id))

    # --- brokers -----------------------------------------------------------------------------------------------

    async def _forget_broker(self, broker_id: int, *, force: bool) -> tuple[list[str], list[common_pb2.StreamInfo]]:
        _check_gone(self._state.brokers, broker_id)
        _check_not_expected(
            self._state.brokers, broker_id, is_empty=not list(self._state.catalog.concerning(broker_id))
        )
        if self._recoveries.records.active_of(broker_id):
            raise InvalidArgument(
                f"a recovery of the data of broker {broker_id} is under way; kera cluster recoveries shows its"
                " progress and its obstacles; forget the broker when it is done",
                broker_id=broker_id,
            )
        lost: list[str] = []
        for stream in self._state.catalog.concerning(broker_id):
            if stream.config.replication:
                raise InvalidArgument(
                    f"stream {stream.name!r} has records of broker {broker_id} that have yet to be recovered; kera"
                    " cluster recoveries shows what delays the recovery",
                    broker_id=broker_id,
                    stream=stream.name,
                )
            owns = Counter(one.broker_id == broker_id for one in stream.assignments if broker_id in broker_ids_of(one))
            where = [f"all records of {owns[True]} of its streamlets there"] if owns[True] else []
            where += [f"older records of {owns[False]} of its streamlets"] if owns[False] else []
            lost.append(f"stream {stream.name!r}, which has no replicas: {' and '.join(where)}")
        _check_forced(f"broker {broker_id}", lost, force=force)
        streams = []
        for stream in self._state.catalog.concerning(broker_id):
            version, changes, taken = self._without(stream, broker_id)
            await self._state.write(changes, [version])
            self._migration.take_up(taken)
            streams.append(version)
        await self._remove(self._state.brokers, broker_id)
        return lost, streams

    def _without(
        self, stream: common_pb2.StreamInfo, broker_id: int
    ) -> tuple[common_pb2.StreamInfo, dict[str, bytes | None], list[StreamletId]]:
        """Return the stream without the broker's part, the changes to write with it, and the streamlets that moved."""
        changed: list[common_pb2.StreamletAssignment] = []
        changes: dict[str, bytes | None] = {}
        taken: list[StreamletId] = []
        counts = self._state.catalog.streamlet_counts()
        for one in stream.assignments:
            if broker_id not in broker_ids_of(one):
                continue
            after = one
            if one.broker_id == broker_id:
                owner_id = self._owner(one, counts)
                counts[owner_id] += 1
                # Ordinals go on where those of the last interval began, as the number of lost records is unknown.
                records = list(intervals_of(one)[-1].first_records)
                epoch = self._state.brokers.epoch(owner_id)
                next_group_id = first_group_id_of(one, epoch)
                after = moved(one, owner_id, epoch, next_group_id=next_group_id, first_records=records)
                streamlet = StreamletId(stream.stream_id, one.streamlet_id)
                end = common_pb2.StreamletState(
                    streamlet_id=one.streamlet_id, next_group_id=next_group_id, next_records=records
                )
                move = coordinator_pb2.Move(
                    stream=stream.name,
                    streamlet_id=one.streamlet_id,
                    from_broker_id=broker_id,
                    to_broker_id=owner_id,
                    reason="its broker is gone for good",
                )
                key, value = move_record(streamlet, move)
                changes |= {key: value, streamlet_key(HANDOVERS, *streamlet): end.SerializeToString()}
                taken.append(streamlet)
            for interval, following in pairwise(intervals_of(after)):
                if interval.broker_id == broker_id:
                    after = emptied(after, broker_id, interval.first_group_id, following.first_group_id)
            changed.append(after)
        return with_assignments(stream, changed, self._state.coordinator_epoch), changes, taken

    def _owner(self, assignment: common_pb2.StreamletAssignment, counts: Counter[int]) -> int:
        """Return a new owner for a streamlet that has lost its own, preferably a broker without groups of it."""
        candidates = self._state.brokers.open_ids()
        if not candidates:
            raise Unavailable("there is no live broker that could go on with its streamlets; start one")
        known = broker_ids_of(assignment)
        return min(candidates, key=lambda one: (one in known, counts[one], one))

    async def _remove(self, members: Membership[RecordT, InfoT], member_id: int) -> None:
        noun, record = members.kind.noun, members.record(member_id)
        directory_id = record.directory_id if record is not None else ""
        changes: dict[str, bytes | None] = {
            member_key(noun, member_id): None,
            forgotten_key(noun, member_id): forgotten_record(member_id, directory_id),
        }
        if noun == "broker" and self._state.ledger.get(handed_over_key(member_id)) is not None:
            changes[handed_over_key(member_id)] = None
        await self._state.write(changes)
        members.forget(member_id)
        log.warning("member forgotten", **{f"{noun}_id": member_id})


def _check_gone(members: Membership[RecordT, InfoT], member_id: int) -> None:
    noun = members.kind.noun
    attributes = {f"{noun}_id": member_id}
    if member_id not in members.ids():
        raise InvalidArgument(f"there is no {noun} {member_id}", **attributes)
    if members.is_alive(member_id):
        raise InvalidArgument(
            f"{noun} {member_id} is alive; kera cluster drain {noun}-{member_id} empties it, then stop it", **attributes
        )


def _check_not_expected(members: Membership[RecordT, InfoT], member_id: int, *, is_empty: bool) -> None:
    """Refuse members that were stopped and may be about to start again, unless they were emptied before that."""
    noun = members.kind.noun
    if members.is_expected(member_id) and not (is_empty and members.is_draining(member_id)):
        left_s = members.describe(member_id).grace_left_ms / 1000
        raise InvalidArgument(
            f"{noun} {member_id} restarts, and is expected back; ask again in {left_s:.0f} s if it is not",
            **{f"{noun}_id": member_id},
        )


def _check_forced(member: str, lost: Iterable[str], *, force: bool) -> None:
    lost = list(lost)
    if lost and not force:
        raise InvalidArgument(
            f"{member} is still needed: {'; '.join(lost)}. Start it again, or give that up for lost with --force",
            lost=lost,
        )
