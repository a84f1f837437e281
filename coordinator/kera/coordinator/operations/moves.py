"""The stored moves of streamlets: completes what brokers have to know, and then deletes the records.

A Move in the store says that the old owner may be sealed, or that the new owner may lack the state handed over. So the
assignment decides. If it names the old owner, that broker gets a new version of it, which unseals the streamlet; else
the new owner gets the assignment and the state. Then the Move is deleted.

Metadata that were restored from a copy older than a move lack the state handed over. If the new owner has not got it
either, the old one is asked for it again (`written_again`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kera.coordinator.cluster.catalog import with_assignments
from kera.coordinator.cluster.intervals import before_last, intervals_of
from kera.coordinator.cluster.keys import HANDOVERS, MOVES, streamlet_key
from kera.coordinator.cluster.recovering import last_handover
from kera.coordinator.cluster.state import State, all_of
from kera.coordinator.cluster.work import Work
from kera.coordinator.ids import Launch, StreamletId
from kera.coordinator.store.ledger import Ledger
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, Unavailable, UnknownStream
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")


class UnresolvedMoves:
    """Moves that have begun and not ended, under way or interrupted."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.work = Work()
        self._unresolved: set[StreamletId] = set()

    def load(self) -> None:
        """Load the stored moves; `advance` resolves them."""
        for value in self._state.ledger.values(MOVES):
            move = coordinator_pb2.Move.FromString(value)
            try:
                stream = self._state.catalog.named(move.stream)
            except UnknownStream:
                continue  # deleted meanwhile, together with its records
            self._unresolved.add(StreamletId(stream.stream_id, move.streamlet_id))

    def __contains__(self, streamlet: StreamletId) -> bool:
        """Whether a move of this streamlet has not ended."""
        return streamlet in self._unresolved

    def add(self, streamlets: Iterable[StreamletId]) -> None:
        """Add streamlets whose moves are stored."""
        self._unresolved.update(streamlets)

    def advance(self, moving: set[StreamletId]) -> None:
        """Resolve interrupted moves; `moving`: the streamlets whose moves are still under way."""
        self.work.forget_failures(self._unresolved.__contains__)
        for streamlet in self._unresolved - moving:
            self.work.start(streamlet, lambda streamlet=streamlet: self._resolve(streamlet))  # type: ignore[misc]

    async def _resolve(self, streamlet: StreamletId) -> None:
        async with self._state.gate(streamlet.stream_id):
            await self.finish([streamlet])

    async def finish(self, streamlets: Sequence[StreamletId], *, owners_told: bool = False) -> None:
        """Bring the brokers in line with the assignments of a stream, then delete the Moves.

        Raises the error of a living owner; a later call tries again.
        """
        state = self._state
        moves = self._moves_of(streamlets)
        self._unresolved.difference_update(set(streamlets) - set(moves))  # the stream was deleted
        if not moves or state.lost.done():
            return
        stream_id = streamlets[0].stream_id
        if not owners_told:
            if not all(self._has_moved(streamlet, move) for streamlet, move in moves.items()):
                await state.change(self._renew(stream_id))
            await self.open(streamlets)
        left = {move.from_broker_id for streamlet, move in moves.items() if self._has_moved(streamlet, move)}
        for broker_id in filter(state.brokers.is_alive, left):
            try:
                await state.open(broker_id, state.catalog.with_id(stream_id))
            except KeraError as error:
                log.warning(
                    "broker is not yet notified of streamlets that moved away from it",
                    broker_id=broker_id,
                    error=error.message,
                )
                return
        await state.change(self._drop_moves(moves))
        self._unresolved.difference_update(moves)

    def _moves_of(self, streamlets: Iterable[StreamletId]) -> dict[StreamletId, coordinator_pb2.Move]:
        """Return the stored Moves of streamlets."""
        values = {streamlet: self._state.ledger.get(move_key(streamlet)) for streamlet in streamlets}
        return {
            streamlet: coordinator_pb2.Move.FromString(value)
            for streamlet, value in values.items()
            if value is not None
        }

    async def open(self, streamlets: Sequence[StreamletId]) -> None:
        """Have the owners open the streamlets, with the state handed over if they may lack it."""
        state = self._state
        stream = state.catalog.with_id(streamlets[0].stream_id)
        states: dict[Launch, list[common_pb2.StreamletState]] = {}
        for streamlet, move in self._moves_of(streamlets).items():
            assignment = stream.assignments[streamlet.streamlet_id]
            owner = Launch(assignment.broker_id, assignment.broker_epoch)
            has_moved = self._has_moved(streamlet, move)
            if state.brokers.is_current(owner):
                handed_over = last_handover(state.ledger, *streamlet) if has_moved else None
                given = states.setdefault(owner, [])
                if handed_over is not None:
                    given.append(handed_over)
            elif has_moved:
                # The state handed over is in the store for the owner when it is back, or the broker that takes over.
                raise Unavailable(
                    f"broker {owner.member_id} has gone before it opened streamlet {streamlet.streamlet_id}"
                )
        failed = await all_of(self._open_at(owner, stream, given) for owner, given in states.items())
        for error in failed:
            if error is not None:
                raise error

    async def _open_at(
        self, owner: Launch, stream: common_pb2.StreamInfo, given: list[common_pb2.StreamletState]
    ) -> None:
        lacking = await self._state.open(owner.member_id, stream, given)
        moved = (StreamletId(stream.stream_id, streamlet_id) for streamlet_id in lacking)
        late = [await self._ask_where_it_ended(streamlet) for streamlet in moved if streamlet in self._unresolved]
        if late:
            await self._state.open(owner.member_id, stream, late)

    async def _ask_where_it_ended(self, streamlet: StreamletId) -> common_pb2.StreamletState:
        """Have the broker that handed over a streamlet report its end again, and write that."""
        state = self._state
        stream = state.catalog.with_id(streamlet.stream_id)
        before = before_last(stream.assignments[streamlet.streamlet_id])
        if before is None or not state.brokers.is_alive(before.broker_id):
            who = (
                f"broker {before.broker_id} (which is away: start it)"
                if before is not None
                else "a broker that has left the cluster"
            )
            raise Unavailable(
                f"streamlet {streamlet.streamlet_id} of stream {stream.name!r} cannot be opened yet: only {who} has"
                " the state that was handed over",
                stream=stream.name,
                streamlet_id=streamlet.streamlet_id,
            )
        told = await state.broker_calls.where_ended(
            state.brokers.describe(before.broker_id), *streamlet, coordinator_epoch=state.coordinator_epoch
        )
        await state.change(self._write_end(streamlet, told))
        return told

    async def _write_end(self, streamlet: StreamletId, told: common_pb2.StreamletState) -> None:
        self._state.catalog.with_id(streamlet.stream_id)  # else the record of a deleted stream would stay for ever
        await self._state.write({streamlet_key(HANDOVERS, *streamlet): told.SerializeToString()})

    def _has_moved(self, streamlet: StreamletId, move: coordinator_pb2.Move) -> bool:
        stream = self._state.catalog.with_id(streamlet.stream_id)
        return stream.assignments[streamlet.streamlet_id].broker_id != move.from_broker_id

    async def _renew(self, stream_id: int) -> None:
        """Write a new version without changes, so that an order from before the seal cannot undo it."""
        state = self._state
        await state.write({}, [with_assignments(state.catalog.with_id(stream_id), [], state.coordinator_epoch)])

    async def _drop_moves(self, streamlets: Iterable[StreamletId]) -> None:
        keys = [move_key(streamlet) for streamlet in streamlets]
        await self._state.write({key: None for key in keys if self._state.ledger.get(key) is not None})


def written_again(ledger: Ledger, stream: common_pb2.StreamInfo) -> tuple[dict[str, bytes | None], list[StreamletId]]:
    """Return Moves to write for a stream that only its brokers know, for streamlets that may not have been opened.

    Earlier records of moves and of state handed over are deleted: an owner that got that state again would give group
    ids that it has given since. Returns the changes to write, and the streamlets of the new Moves.
    """
    changes: dict[str, bytes | None] = {}
    streamlets = []
    for one in stream.assignments:
        before, last = before_last(one), intervals_of(one)[-1]
        known = last_handover(ledger, stream.stream_id, one.streamlet_id)
        if known is not None and known.next_group_id == last.first_group_id:
            continue
        streamlet = StreamletId(stream.stream_id, one.streamlet_id)
        gone = (move_key(streamlet), streamlet_key(HANDOVERS, *streamlet))
        changes |= {key: None for key in gone if ledger.get(key) is not None}
        if before is None or before.broker_id == one.broker_id or one.sources:
            continue
        move = coordinator_pb2.Move(
            stream=stream.name,
            streamlet_id=one.streamlet_id,
            from_broker_id=before.broker_id,
            to_broker_id=one.broker_id,
            reason="the metadata were restored",
        )
        key, value = move_record(streamlet, move)
        changes[key] = value
        streamlets.append(streamlet)
    return changes, streamlets


def move_record(streamlet: StreamletId, move: coordinator_pb2.Move) -> tuple[str, bytes]:
    """Return the key and the value of a Move."""
    return move_key(streamlet), move.SerializeToString()


def move_key(streamlet: StreamletId) -> str:
    """Return the key of a Move."""
    return streamlet_key(MOVES, *streamlet)
