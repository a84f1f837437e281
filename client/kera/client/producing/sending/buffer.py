"""Records that a producer has accepted and not delivered yet, within ``buffer_bytes_max``; and whether it takes more.

Records in open chunks count with an estimate of their bytes, closed chunks with the bytes of their payload. Each chunk
is finished once: `finish` sets its outcome and makes room. The buffer keeps the first error since the last `flush`.
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
"""Fixed cost of a chunk, in bytes, added to its size: it keeps a queue of small chunks short."""
_BUNDLED_CHUNK_COST_BYTES = 1 << 10
"""Fixed cost of a chunk in a bundle, in bytes."""

if TYPE_CHECKING or native is None:

    class Room:
        """The room that is left in a producer's buffer."""

        left_bytes: int
        """Bytes left; below 0 when a record is larger than the buffer."""

else:
    Room = native.Room
"""Base class with the attribute that `native.sender` changes per record, see `producing.open_chunks.records`."""


class Buffer(Room):
    """The undelivered records of a producer, within `buffer_bytes_max`. Each chunk is finished exactly once."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.left_bytes = bytes_max
        self.room_bytes = bytes_max // 2
        """Room that is enough for `drain`, unless the last refused record needs more."""
        self.refused_bytes = 0
        """Size of the last record that was refused; 0: none was since the last `drain`."""
        self.queued_bytes = 0
        """Bytes and fixed costs of chunks that were queued since the event loop last had a chance to send."""
        self.failure: KeraError | None = None
        """Why the producer has failed as a whole; None: it has not."""
        self.ended = False
        """Whether the producer accepts nothing more: it is closed, or has failed."""
        self.closed = False
        """Whether the producer was closed."""
        self.is_inherited = False
        """Whether this is a child process, which has inherited the buffer from its parent."""
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
        """Return whether there is no room for `wanted_bytes`. An empty buffer has room for a record of any size."""
        return wanted_bytes > self.left_bytes and self.left_bytes < self.bytes_max

    async def wait_for_room(self, wanted_bytes: int, close_open_chunks: Callable[[], None]) -> None:
        """Wait until there is room for `wanted_bytes`, or the producer ends. Closes open chunks: sending makes room."""
        while self.is_full(wanted_bytes) and not self.ended:
            self._room.clear()  # first, because closed chunks may fail at once, and make room
            close_open_chunks()
            await self._room.wait()

    def refuse(self, size: int) -> BufferFull:
        """Note that there is no room for a record of `size` bytes, and return the error."""
        self.refused_bytes, limit = size, self.bytes_max
        return BufferFull(f"{limit} bytes wait to be acknowledged; await drain() before sending more", limit=limit)

    async def drain(self, close_open_chunks: Callable[[], None]) -> None:
        """Wait until there is room for `room_bytes` and for the last refused record. Lets the loop run if necessary."""
        wanted, self.refused_bytes = max(self.refused_bytes, self.room_bytes), 0
        if self.is_full(wanted):
            await self.wait_for_room(wanted, close_open_chunks)
        elif self.queued_bytes:
            await self.let_loop_run()

    async def let_loop_run(self) -> None:
        """Let the event loop send queued chunks."""
        self.queued_bytes = 0
        await asyncio.sleep(0)

    def take(self, size: int) -> None:
        """Count a record of `size` bytes that was added to an open chunk."""
        self.left_bytes -= size

    def release(self, size: int) -> None:
        """Give back the bytes of an open chunk that was closed, or of a finished chunk."""
        self.left_bytes += size
        self._room.set()

    def add(self, chunk: PendingChunk) -> None:
        """Count a chunk that was queued."""
        size = chunk.payload_bytes
        self.left_bytes -= size
        self.queued_bytes += size + _CHUNK_COST_BYTES
        self._unfinished.add(chunk)

    def add_bundle(self, bundle: Bundle) -> None:
        """Count the chunks of a bundle that was queued."""
        self.left_bytes -= bundle.payload_bytes
        self.queued_bytes += bundle.payload_bytes + _BUNDLED_CHUNK_COST_BYTES * bundle.chunk_count
        self._bundles.add(bundle)

    def deliver_bundle(self, bundle: Bundle, stored: StoredBundle) -> None:
        """Finish all chunks of a bundle, as stored."""
        if bundle in self._bundles:  # else the producer was closed before the answer came
            self._bundles.remove(bundle)
            self.release(bundle.payload_bytes)
            bundle.delivered.settle(stored)

    def take_apart(self, bundle: Bundle) -> list[PendingChunk]:
        """Return the chunks of a bundle, which finish one by one from now on."""
        chunks = bundle.take_apart()
        if bundle in self._bundles:
            self._bundles.remove(bundle)
            self._unfinished.update(chunks)
        return chunks

    def finish(self, chunk: PendingChunk, outcome: Stored | KeraError) -> None:
        """Finish a chunk: it is delivered, or has failed for good."""
        if chunk not in self._unfinished:
            return  # the producer was closed before the answer came
        self._unfinished.remove(chunk)
        self.release(chunk.payload_bytes)
        if isinstance(outcome, KeraError):
            self.note_error(outcome)
        chunk.delivered.settle(outcome)

    def deliver(self, chunks: Sequence[PendingChunk], stored: Sequence[Stored]) -> None:
        """Finish chunks that were in flight, as stored."""
        if not self._unfinished:
            return  # the producer was closed before the answer came
        self._unfinished.difference_update(chunks)
        self.release(sum([chunk.payload_bytes for chunk in chunks]))
        for chunk, outcome in zip(chunks, stored, strict=True):
            chunk.delivered.settle(outcome)

    def note_error(self, error: KeraError) -> None:
        """Have the next `flush` raise the error, if it is the first one."""
        self._first_error = self._first_error or error

    def fail(self, error: KeraError) -> None:
        """Fail the producer as a whole: it accepts nothing more."""
        self.failure, self.ended = error, True
        self._room.set()

    async def flush(self) -> None:
        """Wait until the present chunks are finished. Raises the failure, else the first error since the last `flush`.

        The failure comes first because it is final, whereas the error of a single chunk may be retriable.
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
        """Forget all chunks, which the parent process sends, and accept nothing more; see `kera.core.base.forks`."""
        self._unfinished, self._bundles, self._first_error = set(), set(), None
        self.is_inherited = True
        self.fail(inherited())

    def close(self) -> None:
        """Accept nothing more, and give up unfinished chunks."""
        self.ended = self.closed = True
        self._room.set()
        for bundle in list(self._bundles):
            self.take_apart(bundle)
        for chunk in list(self._unfinished):
            self.finish(chunk, _given_up(chunk))

    def record_counts(self) -> Counter[str]:
        """Return the number of records in unfinished chunks, by stream."""
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
