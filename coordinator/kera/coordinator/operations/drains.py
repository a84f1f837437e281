"""Emptying brokers and backups, so that they can be stopped (``kera cluster drain``).

The stored record of a member says that it is being emptied, over all its launches, until that is undone. The
assignments show what is left to do. A broker's streamlets move to others, one by one. Once it owns none, its older
groups of replicated streams are recovered from its backups by their owners. Without replicas, older groups can be read
from nowhere else: they stay until retention has removed them, and the reasons say so.

At most `moves_in_flight_max` streamlets are moved at a time. The others wait here, so that they stay if the drain is
undone, and each goes to the broker that has fewest streamlets when its turn comes.

Brokers empty backups: they learn of the drain with their heartbeats, and create the replicas again elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from kera.coordinator.cluster.catalog import owned_streamlets
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.intervals import broker_ids_of
from kera.coordinator.cluster.keys import member_key
from kera.coordinator.cluster.member_kinds import InfoT, RecordT
from kera.coordinator.cluster.membership import Membership
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.migration import Migration
from kera.coordinator.recovery.carry_out import Recoveries
from kera.coordinator.recovery.decide import DRAINED
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, KeraError
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

REASONS_MAX = 20
"""Maximum of reasons in one answer; the others are counted."""


class Drains:
    """Empties brokers and backups step by step, across launches, until they can be stopped or the drain is undone."""

    def __init__(self, state: State, recoveries: Recoveries, migration: Migration) -> None:
        self._state = state
        self._recoveries = recoveries
        self._migration = migration
        self._moves = Work(self.advance)
        self._recovers = Work()
        self._targets: dict[StreamletId, int] = {}
        """Targets of the moves under way."""

    async def close(self) -> None:
        """Cancel the work under way; the next coordinator continues it."""
        await self._moves.close()
        await self._recovers.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._moves.idle()
        await self._recovers.idle()

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.DRAIN: self.drain}

    async def drain(self, request: coordinator_pb2.DrainRequest) -> coordinator_pb2.DrainResponse:
        """Begin to drain a member, undo that, or only ask; return the progress. Raises `InvalidArgument`."""
        if bool(request.broker_id) == bool(request.backup_id):
            raise InvalidArgument("name the broker or the backup to drain: one of the two")
        if request.ask and request.undo:
            raise InvalidArgument("a query cannot undo a drain: leave out one of the two")
        if request.broker_id:
            await self._changed(self._state.brokers, request.broker_id, request)
            if not request.ask:
                self.advance()
            status = await self._broker_status(request.broker_id)
            status.draining = self._state.brokers.is_draining(request.broker_id)
        else:
            await self._changed(self._state.backups, request.backup_id, request)
            status = await self._backup_status(request.backup_id)
            status.draining = self._state.backups.is_draining(request.backup_id)
        return status

    async def _changed(
        self, members: Membership[RecordT, InfoT], member_id: int, request: coordinator_pb2.DrainRequest
    ) -> None:
        if members.record(member_id) is None:
            noun = members.kind.noun
            raise InvalidArgument(f"there is no {noun} {member_id}", **{f"{noun}_id": member_id})
        if not request.ask:
            await self._state.change(self._mark(members, member_id, draining=not request.undo), for_caller=True)

    async def _mark(self, members: Membership[RecordT, InfoT], member_id: int, *, draining: bool) -> None:
        known = members.record(member_id)
        if known is not None and draining != members.is_draining(member_id):
            noun, record = members.kind.noun, members.kind.changed(known, draining=draining)
            await self._state.write({member_key(noun, member_id): record.SerializeToString()})
            members.replace(record)
            log.info("drain started" if draining else "drain cancelled", **{f"{noun}_id": member_id})

    # --- brokers -----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Start what can be done now; called every heartbeat interval, and when a streamlet has moved."""
        if self._state.lost.done() or self._state.catching_up:
            return
        brokers, draining = self._state.brokers, list[int]()
        for broker_id in brokers.live_ids():
            if not brokers.is_draining(broker_id):
                continue
            if self._state.catalog.owned_count(broker_id):
                draining.append(broker_id)
            elif self._needs_recovery(broker_id):
                self._recovers.start(broker_id, lambda broker_id=broker_id: self._recover(broker_id))  # type: ignore[misc]
        self._recovers.forget_failures(brokers.is_draining)
        self._moves.forget_failures(lambda streamlet: self._owner(streamlet) in draining)
        # Streamlets that failed come last: they must not take the turns of the others.
        for failed in (False, True):
            for streamlet in chain.from_iterable(map(self._owned, draining)):
                if len(self._moves) >= self._state.settings.moves_in_flight_max:
                    return
                if bool(self._moves.failure(streamlet)) is not failed or self._moves.is_under_way(streamlet):
                    continue
                if self._migration.is_moving(streamlet):
                    continue  # or a failed move is being undone: its error is still the reason why it is here
                self._moves.start(streamlet, lambda streamlet=streamlet: self._move(streamlet))  # type: ignore[misc]

    async def _move(self, streamlet: StreamletId) -> None:
        stream = self._state.catalog.with_id(streamlet.stream_id)
        target = self._target(stream.assignments[streamlet.streamlet_id].broker_id)
        self._targets[streamlet] = target
        try:
            await self._migration.move(stream.name, streamlet.streamlet_id, target, "its broker is being emptied")
        finally:
            del self._targets[streamlet]

    def _target(self, broker_id: int) -> int:
        load = self._state.catalog.streamlet_counts() + Counter(self._targets.values())
        others = [one for one in self._state.brokers.open_ids() if one != broker_id]
        if not others:
            raise InvalidArgument("there is no other live broker to take them; start one")
        return min(others, key=lambda one: (load[one], one))

    def _needs_recovery(self, broker_id: int) -> bool:
        # Below an epoch that no launch has had yet, so that everything of the broker counts.
        records = self._recoveries.records
        return not records.active_of(broker_id) and records.has_lost(broker_id, 1 << 63, DRAINED)

    async def _recover(self, broker_id: int) -> None:
        brokers = self._state.brokers
        await self._recoveries.begin(
            broker_id,
            DRAINED,
            is_needed=lambda: (
                brokers.is_alive(broker_id) and brokers.is_draining(broker_id) and self._needs_recovery(broker_id)
            ),
        )

    def _owner(self, streamlet: StreamletId) -> int | None:
        stream = self._state.catalog.find(streamlet.stream_id)
        return None if stream is None else stream.assignments[streamlet.streamlet_id].broker_id

    def _owned(self, broker_id: int) -> Iterator[StreamletId]:
        for stream, one in owned_streamlets(self._state.catalog, broker_id):
            yield StreamletId(stream.stream_id, one.streamlet_id)

    def _being_created(self, broker_id: int) -> int:
        """Return how many streams are being created that have streamlets at this launch of the broker."""
        return len(self._state.catalog.creating(broker_id, self._state.brokers.epoch(broker_id)))

    async def _broker_status(self, broker_id: int) -> coordinator_pb2.DrainResponse:
        pace = self._state.pace()
        owned = held = 0
        owns = self._state.catalog.owned_count(broker_id) > 0
        reasons: Counter[str] = Counter()
        for stream in self._state.catalog.concerning(broker_id):
            for one in stream.assignments:
                await pace.step()
                if one.broker_id == broker_id:
                    owned += 1
                    reasons[self._why_owned(broker_id, stream, one.streamlet_id)] += 1
                elif one.intervals and broker_id in broker_ids_of(one):
                    held += 1
                    reasons[self._why_held(stream, one, owned=owns)] += 1
        owned = max(owned, self._state.catalog.owned_count(broker_id))  # it may have got some meanwhile
        recovering = self._recoveries.records.active_of(broker_id)
        if recovering:
            reasons["what it had is being recovered"] += 1
        for recovery in self._recoveries.describe_all():
            if recovery.broker_id == broker_id:
                reasons.update(f"its recovery: {what}" for what in recovery.waits_for)
        creating = self._being_created(broker_id)
        if creating:
            reasons["streams are being created there"] += creating
        return coordinator_pb2.DrainResponse(
            done=self._state.brokers.is_draining(broker_id) and not (owned or held or recovering or creating),
            streamlets_owned=owned,
            streamlets_held=held,
            reasons=_told(reasons),
        )

    def _why_owned(self, broker_id: int, stream: common_pb2.StreamInfo, streamlet_id: int) -> str:
        if self._state.brokers.is_alive(broker_id):
            failure = self._moves.failure(StreamletId(stream.stream_id, streamlet_id))
            return failure or "streamlets are being moved"
        if stream.config.replication:
            return "it is not alive, and others have yet to take over what is replicated"
        return "it is not alive, and what is not replicated only it has"

    def _why_held(
        self, stream: common_pb2.StreamInfo, assignment: common_pb2.StreamletAssignment, *, owned: bool
    ) -> str:
        config, owner_id = stream.config, assignment.broker_id
        if not config.replication:
            until = (
                "until retention removes them"
                if config.retention_ms or config.retention_bytes or config.retention_consumed
                else "for ever, as it has no retention: set one, truncate it or delete it"
            )
            return f"stream {stream.name!r} has older groups there, and no replicas: they stay {until}"
        if not self._state.brokers.is_alive(owner_id):
            return f"older groups go to broker {owner_id}, which is not alive"
        if owned:
            return "older groups go to their owners when all that it owns has moved"
        return "older groups are being recovered to their owners"

    # --- backups -----------------------------------------------------------------------------------------------

    async def _backup_status(self, backup_id: int) -> coordinator_pb2.DrainResponse:
        state = self._state
        if not state.backups.is_alive(backup_id):
            return coordinator_pb2.DrainResponse(reasons=["it is not alive: its content is unknown"])
        backup = state.backups.describe(backup_id)
        try:
            replicas = await state.backup_calls.count_replicas(backup, state.brokers.ids())
        except KeraError as error:
            return coordinator_pb2.DrainResponse(reasons=[f"it does not report its content: {error.message}"])
        reasons = self._why_replicas_stay() if replicas else []
        return coordinator_pb2.DrainResponse(done=not replicas and backup.draining, replicas=replicas, reasons=reasons)

    def _why_replicas_stay(self) -> list[str]:
        state = self._state
        others = len(state.backups.open_ids())
        reasons = Counter(
            f"stream {stream.name!r} needs {stream.config.replication} other live backups, there are {others}"
            for stream in state.catalog.streams()
            if stream.config.replication > others
        )
        reasons.update(
            f"broker {broker_id} is not alive: its replicas stay until it is back, or recovered"
            for broker_id in {one for stream in self._replicated() for one in self._state.catalog.holders(stream)}
            if not state.brokers.is_alive(broker_id)
        )
        return _told(reasons) or ["brokers create the replicas again on other backups"]

    def _replicated(self) -> list[common_pb2.StreamInfo]:
        return [stream for stream in self._state.catalog.streams() if stream.config.replication]


def _told(reasons: Counter[str]) -> list[str]:
    """Return each reason once, with how often it holds, as many as fit."""
    told = [f"{reason} ({count})" if count > 1 else reason for reason, count in reasons.most_common(REASONS_MAX)]
    left = len(reasons) - len(told)
    return [*told, f"and {left} more"] if left else told
