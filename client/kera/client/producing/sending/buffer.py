"""Records that a producer has accepted and not delivered yet, within ``buffer_bytes_max``; and whether it takes more.

Records of open chunks count with an estimate of their bytes, chunks that are closed with their payload's. Each chunk
is finished once: `finish` tells its outcome and makes room. Errors are kept for `flush`, the first one since the last.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kera.client.producing.lanes.bundle import Bundle
from kera.client.producing.lanes.lane import PendingChunk
from kera.client.producing.outcomes.deliveries import Stored, StoredBundle
from kera.core.base.forks import inherited, leave_to_parent
from kera.core.errors import BufferFull, ClosedError, KeraError, Uncertain
from kera.core.native import native

_CHUNK_COST_BYTES = 16 << 10
"""Cost of a chunk besides its bytes, in bytes: it keeps a queue of small chunks short."""
_BUNDLED_CHUNK_COST_BYTES = 1 << 10
"""The same for a chunk in a bundle."""

if TYPE_CHECKING or native is None:

    class Room:
        """How much more a producer takes."""

        left_bytes: int
        """Below 0 when a record is larger than the buffer."""

else:
    Room = native.Room
"""Base class with what `native.sender` changes for each record, see `kera.client.producing.open_chunks.records`."""


class Buffer(Room):
    """The undelivered records of a producer, within `buffer_bytes_max`. Each chunk is finished exactly once."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.left_bytes = bytes_max
        self.room_bytes = bytes_max // 2
        """So much room is enough for `drain`, unless more was asked for."""
        self.refused_bytes = 0
        """Size of the last record that there was no room for; 0: there was room for all since the last `drain`."""
        self.queued_bytes = 0
        """Bytes and costs of chunks that were queued since the event loop last had a chance to send."""
        self.failure: KeraError | None = None
        """Why nothing more is taken, though nobody has closed the producer."""
        self.ended = False
        """Nothing more is taken: the producer is closed, or has failed."""
        self.closed = False
        """Somebody has closed the producer."""
        self.is_inherited = False
        """This is a child process, and everything here is its parent's."""
        self._unfinished: set[PendingChunk] = set()
        self._bundles: set[Bundle] = set()
        self._room = asyncio.Event()
        self._first_error: KeraError | None = None
        leave_to_parent(self)

    @property
    def idle(self) -> bool:
        """Whether all chunks are finished."""
        return not (self._unfinished or self._bundles)

    def is_full(self, wanted_bytes: int) -> bool:
        """Whether there is no room for so much. What is larger than the buffer goes when the buffer is empty."""
        return wanted_bytes > self.left_bytes and self.left_bytes < self.bytes_max

    async def wait_for_room(self, wanted_bytes: int, close_open_chunks: Callable[[], None]) -> None:
        """Until there is room for so much, or the end. Room comes from what is sent: nothing lingers meanwhile."""
        while self.is_full(wanted_bytes) and not self.ended:
            self._room.clear()  # before: what is closed may fail at once, and make room
            close_open_chunks()
            await self._room.wait()

    def refuse(self, size: int) -> BufferFull:
        """The error for a record of so many bytes, for which there is no room."""
        self.refused_bytes, limit = size, self.bytes_max
        return BufferFull(f"{limit} bytes wait to be acknowledged; await drain() before sending more", limit=limit)

    async def drain(self, close_open_chunks: Callable[[], None]) -> None:
        """Until there is `room_bytes`, and for the record that was refused last. Also lets the loop run."""
        wanted, self.refused_bytes = max(self.refused_bytes, self.room_bytes), 0
        if self.is_full(wanted):
            await self.wait_for_room(wanted, close_open_chunks)
        elif self.queued_bytes:
            await self.let_loop_run()

    async def let_loop_run(self) -> None:
        """So that what is queued is sent."""
        self.queued_bytes = 0
        await asyncio.sleep(0)

    def take(self, size: int) -> None:
        """A record of so many bytes is in an open chunk."""
        self.left_bytes -= size

    def release(self, size: int) -> None:
        """An open chunk of so many bytes is closed."""
        self.left_bytes += size
        self._room.set()

    def add(self, chunk: PendingChunk) -> None:
        """A chunk is closed and queued."""
        size = chunk.payload_bytes
        self.left_bytes -= size
        self.queued_bytes += size + _CHUNK_COST_BYTES
        self._unfinished.add(chunk)

    def add_bundle(self, bundle: Bundle) -> None:
        """Chunks are queued together."""
        self.left_bytes -= bundle.payload_bytes
        self.queued_bytes += bundle.payload_bytes + _BUNDLED_CHUNK_COST_BYTES * bundle.chunk_count
        self._bundles.add(bundle)

    def deliver_bundle(self, bundle: Bundle, stored: StoredBundle) -> None:
        """All chunks of a bundle are delivered."""
        if bundle in self._bundles:  # else the producer was closed before the answer came
            self._bundles.remove(bundle)
            self.release(bundle.payload_bytes)
            bundle.delivered.settle(stored)

    def take_apart(self, bundle: Bundle) -> list[PendingChunk]:
        """The chunks of a bundle, which finish one by one from now on."""
        chunks = bundle.take_apart()
        if bundle in self._bundles:
            self._bundles.remove(bundle)
            self._unfinished.update(chunks)
        return chunks

    def finish(self, chunk: PendingChunk, outcome: Stored | KeraError) -> None:
        """`chunk` is delivered, or has failed for good."""
        if chunk not in self._unfinished:
            return  # the producer was closed before the answer came
        self._unfinished.remove(chunk)
        self.release(chunk.payload_bytes)
        if isinstance(outcome, KeraError):
            self.note_error(outcome)
        chunk.delivered.settle(outcome)

    def deliver(self, chunks: Sequence[PendingChunk], stored: Sequence[Stored]) -> None:
        """Chunks that were in flight are delivered."""
        if not self._unfinished:
            return  # the producer was closed before the answer came
        self._unfinished.difference_update(chunks)
        self.release(sum([chunk.payload_bytes for chunk in chunks]))
        for chunk, outcome in zip(chunks, stored, strict=True):
            chunk.delivered.settle(outcome)

    def note_error(self, error: KeraError) -> None:
        """The next `flush` raises it, if it is the first one."""
        self._first_error = self._first_error or error

    def fail(self, error: KeraError) -> None:
        """Take nothing more."""
        self.failure, self.ended = error, True
        self._room.set()

    async def flush(self) -> None:
        """Wait until all chunks of now are finished. Raises the failure, else the first error since the last time.

        The failure comes first because it is final: an error of a single chunk may say that the caller can try again.
        """
        bundles = list(self._bundles)
        for chunk in list(self._unfinished):
            await chunk.delivered.settled()
        for bundle in bundles:
            await bundle.delivered.settled()
        error, self._first_error = self._first_error, None
        if self.failure is not None:
            raise self.failure
        if error is not None:
            raise error

    def forked(self) -> None:
        """See `kera.core.base.forks`: the parent sends what was accepted, and nothing more is taken here."""
        self._unfinished, self._bundles, self._first_error = set(), set(), None
        self.is_inherited = True
        self.fail(inherited())

    def close(self) -> None:
        """Take nothing more, and give up what is not finished."""
        self.ended = self.closed = True
        self._room.set()
        for bundle in list(self._bundles):
            self.take_apart(bundle)
        for chunk in list(self._unfinished):
            self.finish(chunk, _given_up(chunk))

    def record_counts(self) -> Counter[str]:
        """Records of the unfinished chunks, by stream."""
        records: Counter[str] = Counter()
        for chunk in self._unfinished:
            records[chunk.lane.identity.stream] += chunk.payload.record_count
        for bundle in self._bundles:
            records[bundle.identity.stream] += int(bundle.record_counts.sum())
        return records


def _given_up(chunk: PendingChunk) -> KeraError:
    if chunk.in_flight or chunk.uncertain:
        return Uncertain("the producer was closed before the chunk was acknowledged", stream=chunk.lane.identity.stream)
    return ClosedError("the producer was closed before the chunk was sent", stream=chunk.lane.identity.stream)
