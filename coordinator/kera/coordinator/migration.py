"""Migration of streamlets: another broker owns a streamlet from now on (thesis 6.5). Metadata only: no record moves.

    written: Move ─► old owner seals, says where it ends ─► written: assignment, and what was handed over
                         │ fails                                  │
                         ▼                                        ▼
          old owner is told that nothing has changed      new owner opens ─► old owner is told
                         │                                                        │
                         └───────────────► the Move goes ◄────────────────────────┘

A Move in the store says that somebody may be sealed, or that the new owner may not know yet what was handed over. So
whoever finds one, this coordinator after a failure or the next one at its start, looks at the assignment: if it names
the old owner, that one is told so, in a new version, which unseals it; else the new owner is told. Then the Move goes.

No chunk is taken for a streamlet from the seal to the moment when the new owner has opened it: the *stall*.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from kera.coordinator.catalog import CATALOG_BYTES_MAX, with_assignments
from kera.coordinator.intervals import moved
from kera.coordinator.metadata import VALUE_BYTES_MAX
from kera.coordinator.recoveries import Recoveries
from kera.coordinator.recovery import Launch, Streamlet
from kera.coordinator.state import HANDOVERS, MOVES, State, streamlet_key
from kera.coordinator.work import Work
from kera.core.errors import InvalidArgument, KeraError, NotAccepted, StreamletOutOfRange, Unavailable, UnknownStream
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

MOVED_STREAM_BYTES_MAX = VALUE_BYTES_MAX * 3 // 4
"""Of a stream's description after a move: each streamlet that is in two places makes it longer. The rest is for what
recoveries add, which must not fail."""

MOVED_CATALOG_BYTES_MAX = CATALOG_BYTES_MAX * 3 // 2
"""Of the descriptions of all streams, likewise: brokers that register get them in one message."""
MOVES_WAITING_MAX = 1024
"""For their turn. Who has more to move asks for some at a time."""

ObserveMove = Callable[[str, float], None]
"""Called when a move has ended: ``ok`` or the code of the error, and for how many seconds no broker took chunks."""


class Moved(NamedTuple):
    """A move that was carried out."""

    stream: common_pb2.StreamInfo
    stall_us: int


class Migration:
    """Moves streamlets, several at a time, each streamlet once at a time."""

    def __init__(self, state: State, recoveries: Recoveries, *, observe_move: ObserveMove = lambda *_: None) -> None:
        self._state = state
        self._recoveries = recoveries
        self._observe_move = observe_move
        self._moving: set[Streamlet] = set()
        self._slots = asyncio.Semaphore(state.settings.moves_in_flight_max)
        self._waiting = 0
        self._closed = False
        self._work = Work()
        self._moved_s: dict[Streamlet, float] = {}
        self._unresolved: set[Streamlet] = set()

    def load(self) -> None:
        """Take up what the ledger has; `advance` resolves it."""
        for value in self._state.ledger.values(MOVES):
            move = coordinator_pb2.Move.FromString(value)
            try:
                stream = self._state.catalog.named(move.stream)
            except UnknownStream:
                continue  # deleted meanwhile, and its records with it
            self._unresolved.add(Streamlet(stream.stream_id, move.streamlet_id))

    async def close(self) -> None:
        """Begin no more moves, and end what is being resolved; the next coordinator resolves it."""
        self._closed = True
        await self._work.close()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        await self._work.idle()

    def is_moving(self, streamlet: Streamlet) -> bool:
        """Whether a move of this streamlet is under way, or has to be resolved."""
        return streamlet in self._moving or streamlet in self._unresolved

    def rests(self, streamlet: Streamlet) -> bool:
        """Whether the streamlet was moved, or could not be, so lately, by this coordinator, that it had better stay.

        Its load is not known yet, or it would only stall again for nothing.
        """
        rested_s = self._state.clock.monotonic_s() - self._state.settings.move_rest_ms / 1000
        return self._moved_s.get(streamlet, -math.inf) > rested_s

    async def move(self, name: str, streamlet_id: int, broker_id: int, reason: str) -> Moved:
        """Have `broker_id` own a streamlet; returns when it does.

        Raises `UnknownStream`, `StreamletOutOfRange`; `InvalidArgument` when there is no such broker, or it is being
        emptied; `Unavailable` when one of the two brokers is away, the streamlet is being recovered or moved, or too
        many moves wait; what the old owner says when it cannot seal the streamlet in time. Then all is as it was.
        """
        return await self._state.to_the_end(self._move(name, streamlet_id, broker_id, reason))

    async def _move(self, name: str, streamlet_id: int, broker_id: int, reason: str) -> Moved:
        outcome, stall_us = "internal", 0
        try:
            async with self._turn():
                result = await self._move_alone(name, streamlet_id, broker_id, reason)
            outcome, stall_us = "ok", result.stall_us
            return result
        except KeraError as error:
            outcome = error.code
            raise
        finally:
            self._observe_move(outcome, stall_us / 1e6)

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the moves that may be under way at the same time."""
        if self._waiting >= MOVES_WAITING_MAX:
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

    async def _move_alone(self, name: str, streamlet_id: int, broker_id: int, reason: str) -> Moved:
        state = self._state
        stream = self._checked(name, streamlet_id, broker_id)
        before = stream.assignments[streamlet_id]
        streamlet = Streamlet(stream.stream_id, streamlet_id)
        if self.is_moving(streamlet):
            raise Unavailable(f"streamlet {streamlet_id} of stream {name!r} is being moved; ask again", stream=name)
        if before.broker_id == broker_id:
            return Moved(stream, 0)
        self._moving.add(streamlet)
        try:
            move = coordinator_pb2.Move(
                stream=name,
                streamlet_id=streamlet_id,
                from_broker_id=before.broker_id,
                to_broker_id=broker_id,
                reason=reason,
            )
            await state.change(state.write({_key(streamlet): move.SerializeToString()}))
            self._unresolved.add(streamlet)
            async with state.gate(stream.stream_id):
                stream, stall_us = await self._carry_out(streamlet, before, broker_id)
        finally:
            self._moving.discard(streamlet)
            self._moved_s[streamlet] = state.clock.monotonic_s()
        log.info("streamlet moved", stream=name, streamlet_id=streamlet_id, to=broker_id, stall_us=stall_us)
        return Moved(stream, stall_us)

    async def _carry_out(
        self, streamlet: Streamlet, before: common_pb2.StreamletAssignment, broker_id: int
    ) -> tuple[common_pb2.StreamInfo, int]:
        """The stream as it is then, and the stall in microseconds."""
        state, owner_told = self._state, False
        began_s = state.clock.monotonic_s()
        try:
            end = await self._seal(streamlet, before)
            stream = await state.change(self._write_moved(streamlet, before, broker_id, end))
            try:
                await self._open(streamlet)
            except NotAccepted as error:
                if not error.retriable:  # it will never take it: back to where it was
                    now = stream.assignments[streamlet.streamlet_id]
                    await state.change(self._write_moved(streamlet, now, before.broker_id, end, back=True))
                raise
            owner_told = True
            stall_us = round((state.clock.monotonic_s() - began_s) * 1e6)
        finally:
            await self._settle(streamlet, owner_told=owner_told)
        return stream, stall_us

    def _checked(self, name: str, streamlet_id: int, broker_id: int) -> common_pb2.StreamInfo:
        state, brokers = self._state, self._state.brokers
        stream = state.catalog.named(name)
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
                raise Unavailable(f"what broker {needed} had is being taken over; ask again", broker_id=needed)
        if owner.sources or owner.broker_epoch != brokers.epoch(owner.broker_id):
            raise Unavailable(f"streamlet {streamlet_id} of stream {name!r} is being recovered; ask again", stream=name)
        return stream

    async def _seal(self, streamlet: Streamlet, before: common_pb2.StreamletAssignment) -> common_pb2.StreamletState:
        """Where the streamlet ends at its owner, which takes nothing for it any more."""
        state = self._state
        states = await state.broker_calls.seal_streamlets(
            state.brokers.describe(before.broker_id),
            streamlet.stream_id,
            [streamlet.streamlet_id],
            wait_ms=state.settings.seal_wait_ms,
            coordinator_epoch=state.coordinator_epoch,
            assignments_version=state.catalog.with_id(streamlet.stream_id).assignments_version,
        )
        end = next((one for one in states if one.streamlet_id == streamlet.streamlet_id), None)
        if end is None:
            raise Unavailable(f"broker {before.broker_id} does not say where streamlet {streamlet.streamlet_id} ends")
        return end

    async def _write_moved(
        self,
        streamlet: Streamlet,
        before: common_pb2.StreamletAssignment,
        broker_id: int,
        end: common_pb2.StreamletState,
        *,
        back: bool = False,
    ) -> common_pb2.StreamInfo:
        """`back`: to where it was."""
        state = self._state
        stream = state.catalog.with_id(streamlet.stream_id)
        now = stream.assignments[streamlet.streamlet_id]
        unchanged = (now.broker_id, now.broker_epoch, now.sources) == (
            before.broker_id,
            before.broker_epoch,
            before.sources,
        )
        if not unchanged or not state.brokers.is_alive(broker_id):
            raise Unavailable(
                f"streamlet {streamlet.streamlet_id} was not moved: a broker was lost meanwhile; ask again"
            )
        if state.brokers.is_draining(broker_id) and not back:
            raise Unavailable(f"broker {broker_id} is to be emptied since a moment ago; move the streamlet elsewhere")
        after = moved(
            now,
            broker_id,
            state.brokers.epoch(broker_id),
            next_group_id=end.next_group_id,
            first_records=end.next_records,
        )
        before_bytes, stream = stream.ByteSize(), with_assignments(stream, [after])
        is_longer = stream.ByteSize() > before_bytes  # else it is a way out
        if is_longer and not state.catalog.fits(stream, MOVED_CATALOG_BYTES_MAX):
            raise InvalidArgument(
                f"the descriptions of all streams would take more than {MOVED_CATALOG_BYTES_MAX} bytes: too many"
                " streamlets have groups at several brokers; wait until retention has removed older ones",
                limit_bytes=MOVED_CATALOG_BYTES_MAX,
            )
        if is_longer and stream.ByteSize() > MOVED_STREAM_BYTES_MAX:
            raise InvalidArgument(
                f"the description of stream {stream.name!r} would take more than {MOVED_STREAM_BYTES_MAX} bytes: too"
                " many of its streamlets have groups at several brokers; wait until retention has removed older ones",
                limit_bytes=MOVED_STREAM_BYTES_MAX,
            )
        if end.ByteSize() > VALUE_BYTES_MAX:
            raise InvalidArgument(
                f"streamlet {streamlet.streamlet_id} of stream {stream.name!r} stays where it is: how far its"
                f" {len(end.producers)} producers got takes more than {VALUE_BYTES_MAX} bytes to hand over; those"
                " that chose their ids are remembered until the stream is deleted",
                limit_bytes=VALUE_BYTES_MAX,
            )
        handed_over = {streamlet_key(HANDOVERS, *streamlet): end.SerializeToString()}
        await state.write(handed_over, [stream])
        return stream

    # --- moves that were cut short -----------------------------------------------------------------------------

    def advance(self) -> None:
        """Resolve what was cut short; called every heartbeat interval."""
        self._moved_s = {streamlet: when_s for streamlet, when_s in self._moved_s.items() if self.rests(streamlet)}
        for streamlet in self._unresolved - self._moving:
            self._work.start(streamlet, lambda streamlet=streamlet: self._resolve(streamlet))  # type: ignore[misc]

    async def _resolve(self, streamlet: Streamlet) -> None:
        async with self._state.gate(streamlet.stream_id):
            await self._settle(streamlet)

    async def _settle(self, streamlet: Streamlet, *, owner_told: bool = False) -> None:
        """Tell the brokers what the assignment says, then drop the Move.

        Raises what an owner that lives answers; it is tried again later.
        """
        state = self._state
        value = state.ledger.get(_key(streamlet))
        if value is None:
            self._unresolved.discard(streamlet)  # the stream was deleted
            return
        if state.lost.done():
            return
        move = coordinator_pb2.Move.FromString(value)
        if not owner_told:
            if not self._has_moved(streamlet, move):
                await state.change(self._renew(streamlet))
            await self._open(streamlet)
        if self._has_moved(streamlet, move) and state.brokers.is_alive(move.from_broker_id):
            try:
                await state.open(move.from_broker_id, state.catalog.with_id(streamlet.stream_id))
            except KeraError as error:
                log.warning(
                    "broker does not know yet what moved away from it",
                    broker_id=move.from_broker_id,
                    error=error.message,
                )
                return
        await state.change(self._drop_move(streamlet))
        self._unresolved.discard(streamlet)

    async def _open(self, streamlet: Streamlet) -> None:
        """Tell the owner that it is, with what was handed over if it was not before."""
        state = self._state
        stream = state.catalog.with_id(streamlet.stream_id)
        move = coordinator_pb2.Move.FromString(state.ledger.get(_key(streamlet)) or b"")
        owner = stream.assignments[streamlet.streamlet_id]
        has_moved = self._has_moved(streamlet, move)
        if self._is_current(Launch(owner.broker_id, owner.broker_epoch)):
            handed_over = state.ledger.get(streamlet_key(HANDOVERS, *streamlet)) if has_moved else None
            states = [] if handed_over is None else [common_pb2.StreamletState.FromString(handed_over)]
            await state.open(owner.broker_id, stream, states)
        elif has_moved:
            # What was handed over is in the store; it gets it when it is back, or whoever takes over from it does.
            raise Unavailable(f"broker {owner.broker_id} has gone before it opened streamlet {streamlet.streamlet_id}")

    def _has_moved(self, streamlet: Streamlet, move: coordinator_pb2.Move) -> bool:
        stream = self._state.catalog.with_id(streamlet.stream_id)
        return stream.assignments[streamlet.streamlet_id].broker_id != move.from_broker_id

    async def _renew(self, streamlet: Streamlet) -> None:
        """Write that nothing has changed, as a new version: an order from before the seal does not undo it."""
        await self._state.write({}, [with_assignments(self._state.catalog.with_id(streamlet.stream_id), [])])

    async def _drop_move(self, streamlet: Streamlet) -> None:
        if self._state.ledger.get(_key(streamlet)) is not None:
            await self._state.write({_key(streamlet): None})

    def _is_current(self, launch: Launch) -> bool:
        brokers = self._state.brokers
        return brokers.is_alive(launch.member_id) and brokers.epoch(launch.member_id) == launch.epoch


def _key(streamlet: Streamlet) -> str:
    return streamlet_key(MOVES, *streamlet)
