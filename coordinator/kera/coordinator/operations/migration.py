"""Migration of streamlets: another broker becomes the owner (thesis 6.5). Only metadata change: no record moves.

    written: Move ─► old owner seals, reports the end ─► written: assignment, and the state handed over
                         │ fails                                  │
                         ▼                                        ▼
          old owner learns that nothing has changed      new owner opens ─► old owner learns of the move
                         │                                                        │
                         └──────────► the Move is deleted ◄───────────────────────┘

A move that is interrupted anywhere is resolved by its stored record (``moves``).

No broker accepts chunks for a streamlet from the seal until the new owner has opened it: this time is the *stall*.
Streamlets of one stream with the same owner may move together, in the same steps: then the stall of all is hardly
longer than that of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import NamedTuple

from kera.coordinator.cluster.catalog import CATALOG_BYTES_MAX, with_assignments
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.intervals import intervals_of, moved
from kera.coordinator.cluster.keys import HANDOVERS, STARTS, streamlet_key
from kera.coordinator.cluster.starts import without_interval
from kera.coordinator.cluster.state import State
from kera.coordinator.ids import StreamletId
from kera.coordinator.operations.moves import UnresolvedMoves, move_record
from kera.coordinator.recovery.records import RecoveryRecords
from kera.coordinator.store.metadata import VALUE_BYTES_MAX
from kera.core.base.telemetry import get_logger
from kera.core.errors import (
    InvalidArgument,
    KeraError,
    NotAccepted,
    StreamletOutOfRange,
    Unavailable,
    invariant,
)
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class MigrationLimits(NamedTuple):
    """Limits for moves."""

    stream_bytes_max: int = VALUE_BYTES_MAX * 3 // 4
    """Maximum of a stream's description after a move: each streamlet that is in two places makes it longer. The
    rest of the
    record is for the additions of recoveries, which must not fail.
    """
    catalog_bytes_max: int = CATALOG_BYTES_MAX * 3 // 2
    """Maximum of the descriptions of all streams after a move: a broker that registers gets all of its own in
    one message.
    """
    moves_waiting_max: int = 1024
    """Maximum of moves that wait for their turn. Callers with more moves ask for some at a time."""


LIMITS = MigrationLimits()

ObserveMove = Callable[[str, float], None]
"""Called when a move has ended: ``ok`` or the code of the error, and for how many seconds no broker took chunks."""


class MoveResult(NamedTuple):
    """A move that was carried out."""

    stream: common_pb2.StreamInfo
    stall_us: int


class Migration:
    """Moves streamlets, several at a time, and each streamlet at most once at a time."""

    def __init__(
        self,
        state: State,
        recoveries: RecoveryRecords,
        *,
        observe_move: ObserveMove = lambda *_: None,
        limits: MigrationLimits = LIMITS,
    ) -> None:
        self._state = state
        self._recoveries = recoveries
        self._observe_move = observe_move
        self._limits = limits
        self._moving: set[StreamletId] = set()
        self._slots = asyncio.Semaphore(state.settings.moves_in_flight_max)
        self._waiting = 0
        self._closed = False
        self._unresolved = UnresolvedMoves(state)
        self._moved_s: dict[StreamletId, float] = {}

    def load(self) -> None:
        """Load the stored moves; `advance` resolves them."""
        self._unresolved.load()

    async def close(self) -> None:
        """Begin no more moves, and stop resolving moves; the next coordinator resolves them."""
        self._closed = True
        await self._unresolved.work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._unresolved.work.idle()

    def is_moving(self, streamlet: StreamletId) -> bool:
        """Whether a move of this streamlet is under way, or has to be resolved."""
        return streamlet in self._moving or streamlet in self._unresolved

    def rests(self, streamlet: StreamletId) -> bool:
        """Whether this coordinator has moved the streamlet, or failed to, so recently that it should stay.

        Its new load is not known yet, or it would only stall again in vain.
        """
        rested_s = self._state.clock.monotonic_s() - self._state.settings.move_rest_ms / 1000
        return self._moved_s.get(streamlet, -math.inf) > rested_s

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {api.MOVE_STREAMLET: self._answer_move}

    async def _answer_move(
        self, request: coordinator_pb2.MoveStreamletRequest
    ) -> coordinator_pb2.MoveStreamletResponse:
        moved = await self.move(request.stream, request.streamlet_id, request.broker_id)
        return coordinator_pb2.MoveStreamletResponse(stream=moved.stream, stall_us=moved.stall_us)

    async def move(self, name: str, streamlet_id: int, broker_id: int, reason: str = "asked for") -> MoveResult:
        """Make `broker_id` the owner of a streamlet; return when it is.

        Raises `UnknownStream`, `StreamletOutOfRange`; `InvalidArgument` if the broker does not exist, or is being
        emptied;
        `Unavailable` if one of the two brokers is away, the streamlet is being recovered or moved, or too many moves
        wait; and
        the old owner's error if it cannot seal the streamlet in time. After an error everything is as it was.
        """
        return await self.move_together(name, {streamlet_id: broker_id}, reason)

    async def move_together(self, name: str, targets: Mapping[int, int], reason: str) -> MoveResult:
        """Make brokers the owners of streamlets of one stream that have the same owner now: all of them, or none.

        `targets`: the new owner of each streamlet. Takes hardly longer than one move. Raises the errors of `move`.
        """
        return await self._state.to_the_end(self._move(name, targets, reason))

    async def _move(self, name: str, targets: Mapping[int, int], reason: str) -> MoveResult:
        outcome, stall_us = "internal", 0
        try:
            async with self._turn():
                result = await self._move_alone(name, targets, reason)
            outcome, stall_us = "ok", result.stall_us
            return result
        except KeraError as error:
            outcome = error.code
            raise
        finally:
            for _ in targets:
                self._observe_move(outcome, stall_us / 1e6)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for a turn among the moves that may run at the same time, and hold it."""
        if self._waiting >= self._limits.moves_waiting_max:
            raise Unavailable(f"{self._waiting} moves wait for their turn; ask again when some are done")
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._closed:
                raise Unavailable("this coordinator is ending; ask the next one")
            yield
        finally:
            self._slots.release()

    async def _move_alone(self, name: str, targets: Mapping[int, int], reason: str) -> MoveResult:
        state = self._state
        state.check_caught_up()
        stream = state.catalog.named(name)
        for streamlet_id, broker_id in targets.items():
            self._check(stream, streamlet_id, broker_id)
        before = {
            one.streamlet_id: one
            for one in stream.assignments
            if targets.get(one.streamlet_id, one.broker_id) != one.broker_id
        }
        if not before:
            return MoveResult(stream, 0)
        invariant(len({one.broker_id for one in before.values()}) == 1, "what moves together has one owner")
        streamlets = [StreamletId(stream.stream_id, streamlet_id) for streamlet_id in before]
        self._moving.update(streamlets)
        try:
            await state.change(self._write_moves(stream.stream_id, before, targets, reason))
            self._unresolved.add(streamlets)
            async with state.gate(stream.stream_id):
                stream, stall_us = await self._carry_out(stream.stream_id, before, targets)
        finally:
            self._moving.difference_update(streamlets)
            self._moved_s.update(dict.fromkeys(streamlets, state.clock.monotonic_s()))
        for streamlet_id in before:
            to = targets[streamlet_id]
            log.info("streamlet moved", stream=name, streamlet_id=streamlet_id, to=to, stall_us=stall_us)
        return MoveResult(stream, stall_us)

    async def _write_moves(
        self,
        stream_id: int,
        before: Mapping[int, common_pb2.StreamletAssignment],
        targets: Mapping[int, int],
        reason: str,
    ) -> None:
        """Write the records of moves that begin, unless something has changed since `_check`."""
        stream = self._state.catalog.with_id(stream_id)
        records: dict[str, bytes | None] = {}
        for streamlet_id, old in before.items():
            self._check_unchanged(old, stream.assignments[streamlet_id], targets[streamlet_id], back=False)
            move = coordinator_pb2.Move(
                stream=stream.name,
                streamlet_id=streamlet_id,
                from_broker_id=old.broker_id,
                to_broker_id=targets[streamlet_id],
                reason=reason,
            )
            key, value = move_record(StreamletId(stream_id, streamlet_id), move)
            records[key] = value
        await self._state.write(records)

    async def _carry_out(
        self, stream_id: int, before: Mapping[int, common_pb2.StreamletAssignment], targets: Mapping[int, int]
    ) -> tuple[common_pb2.StreamInfo, int]:
        """Carry out a stored move; return the new version of the stream, and the stall in microseconds."""
        state, owners_told = self._state, False
        streamlets = [StreamletId(stream_id, streamlet_id) for streamlet_id in before]
        began_s = state.clock.monotonic_s()
        try:
            ends = await self._seal(stream_id, before)
            stream = await state.change(self._write_moved(stream_id, before, targets, ends))
            try:
                await self._unresolved.open(streamlets)
            except NotAccepted as error:
                if not error.retriable:  # it will never accept the streamlet: back to the old owner
                    now = {streamlet_id: stream.assignments[streamlet_id] for streamlet_id in before}
                    back = {streamlet_id: one.broker_id for streamlet_id, one in before.items()}
                    await state.change(self._write_moved(stream_id, now, back, ends, back=True))
                raise
            owners_told = True
            stall_us = round((state.clock.monotonic_s() - began_s) * 1e6)
        finally:
            await self._unresolved.finish(streamlets, owners_told=owners_told)
        return stream, stall_us

    def _check(self, stream: common_pb2.StreamInfo, streamlet_id: int, broker_id: int) -> None:
        brokers, name = self._state.brokers, stream.name
        if streamlet_id >= len(stream.assignments):
            raise StreamletOutOfRange(
                f"stream {name!r} has {len(stream.assignments)} streamlets, no {streamlet_id}", stream=name
            )
        if broker_id not in brokers.ids():
            raise InvalidArgument(f"there is no broker {broker_id}", broker_id=broker_id)
        if brokers.is_draining(broker_id):
            raise InvalidArgument(f"broker {broker_id} is being emptied, it gets no streamlets", broker_id=broker_id)
        owner = stream.assignments[streamlet_id]
        for needed in (owner.broker_id, broker_id):
            if not brokers.is_alive(needed):
                raise Unavailable(f"broker {needed} is not alive; ask again when it is", broker_id=needed)
            if self._recoveries.pending_of(needed):
                raise Unavailable(
                    f"a takeover of the data of broker {needed} is under way; ask again", broker_id=needed
                )
        if brokers.is_leaving(broker_id):
            raise Unavailable(f"broker {broker_id} is stopping; ask again when it is back", broker_id=broker_id)
        if owner.sources or owner.broker_epoch != brokers.epoch(owner.broker_id):
            raise Unavailable(f"streamlet {streamlet_id} of stream {name!r} is being recovered; ask again", stream=name)
        if self.is_moving(StreamletId(stream.stream_id, streamlet_id)):
            raise Unavailable(f"streamlet {streamlet_id} of stream {name!r} is being moved; ask again", stream=name)

    async def _seal(
        self, stream_id: int, before: Mapping[int, common_pb2.StreamletAssignment]
    ) -> dict[int, common_pb2.StreamletState]:
        """Seal streamlets at their owner, which accepts no more chunks for them; return where they end."""
        state = self._state
        (owner_id,) = {one.broker_id for one in before.values()}
        states = await state.broker_calls.seal_streamlets(
            state.brokers.describe(owner_id),
            stream_id,
            list(before),
            wait_ms=state.settings.seal_wait_ms,
            coordinator_epoch=state.coordinator_epoch,
            assignments_version=state.catalog.with_id(stream_id).assignments_version,
        )
        ends = {one.streamlet_id: one for one in states}
        for streamlet_id in before:
            if streamlet_id not in ends:
                raise Unavailable(f"broker {owner_id} does not say where streamlet {streamlet_id} ends")
        return ends

    async def _write_moved(
        self,
        stream_id: int,
        before: Mapping[int, common_pb2.StreamletAssignment],
        targets: Mapping[int, int],
        ends: Mapping[int, common_pb2.StreamletState],
        *,
        back: bool = False,
    ) -> common_pb2.StreamInfo:
        """Write the new owners and the state handed over. `back`: the streamlets return to their old owner."""
        state = self._state
        stream = state.catalog.with_id(stream_id)
        after: list[common_pb2.StreamletAssignment] = []
        handed_over: dict[str, bytes | None] = {}
        for streamlet_id, old in before.items():
            now, target, end = stream.assignments[streamlet_id], targets[streamlet_id], ends[streamlet_id]
            self._check_unchanged(old, now, target, back=back)
            if end.ByteSize() > VALUE_BYTES_MAX:
                raise InvalidArgument(
                    f"streamlet {streamlet_id} of stream {stream.name!r} stays at its broker: the state of its"
                    f" {len(end.producers)} producers takes more than {VALUE_BYTES_MAX} bytes to hand over;"
                    " producers that chose their ids are remembered until the stream is deleted",
                    limit_bytes=VALUE_BYTES_MAX,
                )
            epoch, first = state.brokers.epoch(target), list(end.next_records)
            after.append(moved(now, target, epoch, next_group_id=end.next_group_id, first_records=first))
            handed_over[streamlet_key(HANDOVERS, stream_id, streamlet_id)] = end.SerializeToString()
            handed_over |= self._starts_without_empty(StreamletId(stream_id, streamlet_id), now, end)
        version = with_assignments(stream, after, state.coordinator_epoch)
        if version.ByteSize() > stream.ByteSize():  # a smaller version is always allowed, so that there is a way out
            self._check_room(version)
        await state.write(handed_over, [version])
        return version

    def _starts_without_empty(
        self, streamlet: StreamletId, now: common_pb2.StreamletAssignment, end: common_pb2.StreamletState
    ) -> dict[str, bytes | None]:
        """Return the change that removes the starts of an owner that wrote no group.

        It leaves no interval behind, so its starts would become those of the next interval.
        """
        key, last = streamlet_key(STARTS, *streamlet), intervals_of(now)[-1]
        value = self._state.ledger.get(key)
        if value is None or not now.intervals or last.first_group_id != end.next_group_id:
            return {}
        known = broker_pb2.TakeOverStream.FromString(value).starts
        left = without_interval(now, known, len(now.intervals) - 1)
        return {key: broker_pb2.TakeOverStream(starts=left).SerializeToString() if left else None}

    def _check_unchanged(
        self,
        before: common_pb2.StreamletAssignment,
        now: common_pb2.StreamletAssignment,
        broker_id: int,
        *,
        back: bool,
    ) -> None:
        brokers = self._state.brokers
        unchanged = (now.broker_id, now.broker_epoch, now.sources) == (
            before.broker_id,
            before.broker_epoch,
            before.sources,
        )
        if not unchanged or not brokers.is_alive(broker_id):
            raise Unavailable(f"streamlet {now.streamlet_id} was not moved: a broker was lost meanwhile; ask again")
        if self._recoveries.pending_of(broker_id):  # a new launch has lost its memory, so its data have holes
            raise Unavailable(
                f"streamlet {now.streamlet_id} was not moved: the data of broker {broker_id} must be recovered"
                " first; ask again when they are",
                broker_id=broker_id,
            )
        if (brokers.is_draining(broker_id) or brokers.is_leaving(broker_id)) and not back:
            raise Unavailable(
                f"broker {broker_id} is being drained or stopped since a moment ago; move the streamlet to another"
                " broker"
            )

    def _check_room(self, stream: common_pb2.StreamInfo) -> None:
        """Check that there is room for the description of a stream whose streamlets have moved. Raises
        `InvalidArgument`.
        """
        limits = self._limits
        if not self._state.catalog.fits(stream, limits.catalog_bytes_max):
            raise InvalidArgument(
                f"the descriptions of all streams would take more than {limits.catalog_bytes_max} bytes: too many"
                " streamlets have groups at several brokers; wait until retention has removed older ones",
                limit_bytes=limits.catalog_bytes_max,
            )
        if stream.ByteSize() > limits.stream_bytes_max:
            raise InvalidArgument(
                f"the description of stream {stream.name!r} would take more than {limits.stream_bytes_max} bytes: too"
                " many of its streamlets have groups at several brokers; wait until retention has removed older ones",
                limit_bytes=limits.stream_bytes_max,
            )

    def advance(self) -> None:
        """Resolve interrupted moves; called every heartbeat interval."""
        self._moved_s = {streamlet: when_s for streamlet, when_s in self._moved_s.items() if self.rests(streamlet)}
        self._unresolved.advance(self._moving)

    def take_up(self, streamlets: Iterable[StreamletId]) -> None:
        """Resolve moves that another part has written, together with the state handed over."""
        self._unresolved.add(streamlets)
        self.advance()
