"""Planned restarts: a broker or a backup stops in order to start again, and must not be taken for lost.

    broker       "I am about to stop" ──► its streamlets move to others, as many as can in the time that it gives
                 "I stop now"         ──► stored: it restarts; its absence is not a loss until the grace is over
                 registers, beats     ──► its streamlets move back
    backup       "I am about to stop" ──► brokers learn of it, and continue at other backups
                 "I stop now"         ──► likewise; its replicas count as present until the grace is over

The coordinator stores what a broker gives away before the moves, so that whichever coordinator leads when the broker is
back gives it back. A streamlet that another move has taken elsewhere meanwhile stays there. The moves are those of
``migration``: older groups stay with the broker, and their readers wait until it is back. A broker that does not come
back in time is lost like any other.

A streamlet that cannot move (there is no other broker, or it did not become durable in time) waits with its broker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from kera.coordinator.cluster.catalog import owned_streamlets
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.keys import HANDED_OVER, handed_over_key, member_key
from kera.coordinator.cluster.member_kinds import InfoT, RecordT
from kera.coordinator.cluster.membership import Membership
from kera.coordinator.cluster.state import State
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.loads import MeasuredLoads
from kera.coordinator.operations.migration import LIMITS, Migration
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, KeraError
from kera.core.rpc import api
from kera.v1 import coordinator_pb2

log = get_logger("kera.coordinator")

TOGETHER_MAX = 64
"""Maximum of a stream's streamlets that move as one: each waits until all of them have moved."""
SCATTERED_MAX = LIMITS.moves_waiting_max // 4
"""Maximum of moves requested at once, which leaves room for other requests."""
HANDED_OVER_MAX = 50_000
"""Maximum of streamlets that a broker gets back: as many as fit into a record. Rebalancing takes care of the others."""
WAIT_MS_MAX = 60_000

T = TypeVar("T")


class Restarts:
    """Carries out planned restarts: a member that announced one is not lost until its grace is over."""

    def __init__(self, state: State, migration: Migration, loads: MeasuredLoads) -> None:
        self._state = state
        self._migration = migration
        self._loads = loads
        self.work = Work()
        self._due: set[int] = set()
        """Brokers that get streamlets back."""

    def load(self) -> None:
        """Load from the ledger which brokers get streamlets back."""
        records = map(coordinator_pb2.HandedOver.FromString, self._state.ledger.values(HANDED_OVER))
        self._due = {record.broker_id for record in records}

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.PREPARE_RESTART: self.prepare}

    # --- a member stops ----------------------------------------------------------------------------------------

    async def prepare(self, request: coordinator_pb2.PrepareRestartRequest) -> coordinator_pb2.PrepareRestartResponse:
        """See the message. Raises `InvalidArgument`, and `StaleEpoch` for a launch that is not the current one."""
        if bool(request.broker_id) == bool(request.backup_id):
            raise InvalidArgument("name the broker or the backup that restarts: one of the two")
        if request.backup_id:
            return await self._backup(request)
        return await self._broker(request)

    async def _backup(self, request: coordinator_pb2.PrepareRestartRequest) -> coordinator_pb2.PrepareRestartResponse:
        backups = self._state.backups
        backups.leave(request.backup_id, request.epoch)
        if request.stopping:
            await self._stops(backups, request.backup_id, request.epoch)
        needed = max((stream.config.replication for stream in self._state.catalog.streams()), default=0)
        return coordinator_pb2.PrepareRestartResponse(
            others_go_on=bool(self._state.brokers.live_ids()) and 0 < needed <= len(backups.open_ids()),
            grace_ms=self._state.settings.restart_grace_ms,
        )

    async def _broker(self, request: coordinator_pb2.PrepareRestartRequest) -> coordinator_pb2.PrepareRestartResponse:
        brokers, broker_id = self._state.brokers, request.broker_id
        brokers.leave(broker_id, request.epoch)
        owned = await self._owned(broker_id)
        if request.stopping:
            await self._stops(brokers, broker_id, request.epoch)
        elif not self._state.catching_up:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(request.wait_ms, WAIT_MS_MAX) / 1000):
                    await self._hand_over(broker_id, owned)
        left = await self._owned(broker_id)
        if not request.stopping:
            log.info("broker is about to stop", broker_id=broker_id, given=len(owned) - len(left), left=len(left))
        return coordinator_pb2.PrepareRestartResponse(
            streamlets_given=len(set(owned) - set(left)),
            streamlets_left=len(left),
            grace_ms=self._state.settings.restart_grace_ms,
        )

    async def _stops(self, members: Membership[RecordT, InfoT], member_id: int, epoch: int) -> None:
        """Record that the member is away and expected back from now on."""

        async def write() -> None:
            members.leave(member_id, epoch)
            noun, known = members.kind.noun, members.record(member_id)
            if known is None:
                return
            record = members.kind.changed(known, restarting=True)
            await self._state.write({member_key(noun, member_id): record.SerializeToString()})
            members.replace(record)
            log.info("member restarting", grace_ms=self._state.settings.restart_grace_ms, **{f"{noun}_id": member_id})

        await self._state.change(write())

    async def _owned(self, broker_id: int) -> list[StreamletId]:
        found, pace = [], self._state.pace()
        for stream, one in owned_streamlets(self._state.catalog, broker_id):
            await pace.step()
            found.append(StreamletId(stream.stream_id, one.streamlet_id))
        return found

    # --- handing streamlets over -------------------------------------------------------------------------------

    async def _hand_over(self, broker_id: int, owned: Sequence[StreamletId]) -> None:
        """Move streamlets to the other brokers; what cannot move stays. Ends when no more can be done."""
        together = TOGETHER_MAX
        while owned and (targets := self._targets(owned)):
            await self._state.change(self._note(broker_id, targets))
            await self._move(targets, "its broker restarts", together)
            still = await self._owned(broker_id)
            if together == 1 and len(still) == len(owned):
                return  # each was tried alone, and none has moved
            owned, together = still, 1

    def _targets(self, streamlets: Iterable[StreamletId]) -> dict[StreamletId, int]:
        """Return a target for each streamlet, so that those of each stream, and all of them, spread evenly over
        the others.
        """
        counts = self._state.catalog.streamlet_counts()
        loads = {one: counts[one] for one in self._state.brokers.open_ids()}
        targets: dict[StreamletId, int] = {}
        given: Counter[tuple[int, int]] = Counter()
        for streamlet in streamlets if loads else ():
            target = min(loads, key=lambda one: (loads[one], given[streamlet.stream_id, one], one))
            loads[target] += 1
            given[streamlet.stream_id, target] += 1
            targets[streamlet] = target
        return targets

    async def _note(self, broker_id: int, targets: Mapping[StreamletId, int]) -> None:
        """Store the targets before the moves, together with what was given away before and is not back."""
        places = {**self._places(broker_id), **targets}
        record = coordinator_pb2.HandedOver(broker_id=broker_id)
        for (stream_id, streamlet_id), target in list(places.items())[:HANDED_OVER_MAX]:
            record.places.add(stream_id=stream_id, streamlet_id=streamlet_id, broker_id=target)
        await self._state.write({handed_over_key(broker_id): record.SerializeToString()})
        self._due.add(broker_id)

    def _places(self, broker_id: int) -> dict[StreamletId, int]:
        value = self._state.ledger.get(handed_over_key(broker_id))
        record = coordinator_pb2.HandedOver.FromString(value or b"")
        return {StreamletId(one.stream_id, one.streamlet_id): one.broker_id for one in record.places}

    async def _move(self, targets: Mapping[StreamletId, int], reason: str, together: int) -> list[KeraError]:
        """Move streamlets, up to `together` of a stream and an owner as one; return the errors."""
        groups: defaultdict[tuple[int, int], list[StreamletId]] = defaultdict(list)
        for streamlet in targets:
            stream = self._state.catalog.find(streamlet.stream_id)
            if stream is not None:  # else it was deleted a moment ago
                groups[streamlet.stream_id, stream.assignments[streamlet.streamlet_id].broker_id].append(streamlet)
        moves = [each for group in groups.values() for each in _batches(group, together)]
        errors: list[KeraError] = []
        for some in _batches(moves, SCATTERED_MAX):
            outcomes = await asyncio.gather(*(self._move_together(each, targets, reason) for each in some))
            errors += filter(None, outcomes)
        return errors

    async def _move_together(
        self, streamlets: Sequence[StreamletId], targets: Mapping[StreamletId, int], reason: str
    ) -> KeraError | None:
        try:
            stream = self._state.catalog.with_id(streamlets[0].stream_id)
            new_owners = {streamlet.streamlet_id: targets[streamlet] for streamlet in streamlets}
            await self._migration.move_together(stream.name, new_owners, reason)
        except KeraError as error:
            log.warning("streamlets did not move", stream_id=streamlets[0].stream_id, error=error.message)
            return error
        return None

    # --- giving streamlets back --------------------------------------------------------------------------------

    def advance(self) -> None:
        """Give back what can be given back now; called every heartbeat interval, and with each heartbeat."""
        brokers = self._state.brokers
        self.work.forget_failures(self._due.__contains__)
        for broker_id in self._due:
            there = brokers.is_alive(broker_id) and not brokers.is_leaving(broker_id)
            if there and self._loads.are_known(broker_id):
                self.work.start(broker_id, lambda broker_id=broker_id: self._give_back(broker_id))  # type: ignore[misc]

    async def _give_back(self, broker_id: int) -> None:
        """Move a broker's streamlets back. Raises the error of a move that may succeed later."""
        drained = self._state.brokers.is_draining(broker_id)
        targets = {} if drained else dict.fromkeys(self._to_give_back(broker_id), broker_id)
        errors = await self._move(targets, "its broker is back", TOGETHER_MAX)
        for error in errors:
            if error.retriable and self._to_give_back(broker_id):
                raise error
        await self._state.change(self._drop(broker_id))
        log.info("broker is back", broker_id=broker_id, streamlets=len(targets))

    async def _drop(self, broker_id: int) -> None:
        if self._state.ledger.get(handed_over_key(broker_id)) is not None:
            await self._state.write({handed_over_key(broker_id): None})
        self._due.discard(broker_id)

    def _to_give_back(self, broker_id: int) -> list[StreamletId]:
        """Return the streamlets that are still where they were given."""
        catalog = self._state.catalog
        return [
            streamlet
            for streamlet, holder in self._places(broker_id).items()
            if streamlet.stream_id in catalog
            and catalog.with_id(streamlet.stream_id).assignments[streamlet.streamlet_id].broker_id == holder
        ]


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[first : first + size] for first in range(0, len(items), size))
