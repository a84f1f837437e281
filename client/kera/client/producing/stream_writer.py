"""From records to chunks of one stream: its open chunks, one per streamlet at most, until they are closed and queued.

An open chunk is closed when it is full, when it has lingered, and before anything that must come behind it. It is
encoded then, and its lane has it; who sends it is left to `kera.client.producing.routes`.
"""

from __future__ import annotations

import asyncio

import pyarrow as pa

from kera.client.arrow_input import Columns, record_batches
from kera.client.producing.accumulator import Accumulator
from kera.client.producing.buffer import Buffer
from kera.client.producing.encoding import Payload, check_rows, conform, record_payloads, timestamps, too_large
from kera.client.producing.lane import Lane, PendingChunk
from kera.client.producing.outcome import Outcome
from kera.client.producing.partitioner import Partition, partition_by_key, primary_keys, whole
from kera.client.producing.routes import Routes
from kera.client.producing.stream_lanes import ProducerIdentity, StreamLanes
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription, streamlet_number
from kera.core.errors import InvalidArgument, KeraError, SchemaMismatch, StreamletOutOfRange, UnknownStream

BATCH_OVERHEAD_BYTES = 1024
"""Chunk header, and what Arrow adds to a batch of one row; estimated from above."""


class StreamWriter:
    """See the head of this module. Belongs to one `Producer`."""

    def __init__(
        self,
        stream: StreamDescription,
        identity: ProducerIdentity,
        settings: ProducerSettings,
        buffer: Buffer,
        routes: Routes,
        filling: dict[str, Accumulator],
    ) -> None:
        """`filling`: the producer's; what is not the one to take its stream's next record any more, goes from it."""
        self.lanes = StreamLanes(stream, identity)
        self.streamlet_count = stream.config.streamlets
        self.sticky_streamlet = identity.producer_id % self.streamlet_count
        """Where records without keys go; moves on with each chunk."""
        self.open_chunks: dict[int, Accumulator] = {}
        """By streamlet: the chunk that takes its next record."""
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._lean = settings.lean
        self._delivery_timeout_s = settings.delivery_timeout_ms / 1000
        self._linger_s = settings.linger_ms / 1000
        self._loop = asyncio.get_running_loop()
        self._buffer = buffer
        self._routes = routes
        self._filling = filling

    @property
    def stream(self) -> StreamDescription:
        """As it was last seen."""
        return self.lanes.stream

    @property
    def deleted(self) -> UnknownStream | None:
        """Says that the stream is not there any more."""
        return self.lanes.deleted

    def open_chunk(self, streamlet: int, record_bytes: int) -> Accumulator:
        """The open chunk of a streamlet. Raises `StreamletOutOfRange`, `RecordTooLarge`, `SchemaMismatch`."""
        accumulator = self.open_chunks.get(streamlet)
        if accumulator is None or record_bytes > self._chunk_bytes_max:
            self._check(streamlet, record_bytes)
        if accumulator is None:
            accumulator = Accumulator(self.stream.name, streamlet, self._loop.time())
            self.open_chunks[streamlet] = accumulator
            self._routes.chunk_opened(self.lanes, self.lanes.lanes[streamlet])
        return accumulator

    def _check(self, streamlet: int, record_bytes: int) -> None:
        if self.stream.typed:
            raise SchemaMismatch(
                f"stream {self.stream.name!r} has a schema of its own; use send_batch", stream=self.stream.name
            )
        self._check_streamlet(streamlet)
        limit = self.stream.segment_bytes_min
        if limit and record_bytes + BATCH_OVERHEAD_BYTES > limit:
            raise too_large(record_bytes, limit, self.stream)

    def _check_streamlet(self, streamlet: int) -> None:
        if not 0 <= streamlet < self.streamlet_count:
            raise StreamletOutOfRange(
                f"stream {self.stream.name!r} has streamlets 0 to {self.streamlet_count - 1}, not {streamlet}",
                stream=self.stream.name,
                streamlet_id=streamlet,
                streamlets=self.streamlet_count,
            )

    def checked_streamlet(self, streamlet: object) -> int:
        """`streamlet` as a number of one. Raises `InvalidArgument`, `StreamletOutOfRange`."""
        number = streamlet_number(streamlet)
        self._check_streamlet(number)
        return number

    def checked_parts(self, batch: Columns, now_us: int) -> list[tuple[pa.RecordBatch, int]]:
        """The parts of a batch, with the length of the chunk that each would be.

        All that can be wrong with a batch is found here, before any of its rows is accepted.
        """
        stream = self.stream
        parts = record_batches(batch)
        conforming = [conform(part, stream, now_us) for part in parts if part.num_rows]
        return [(part, check_rows(part, stream)) for part in conforming]

    def partition(self, batch: pa.RecordBatch, streamlet: int | None) -> Partition:
        """`batch` by streamlet, all of it in the one that is given."""
        if streamlet is not None:
            return whole(batch, streamlet)
        keyless = self.sticky_streamlet
        self._move_on()
        if self.streamlet_count == 1:
            return whole(batch, 0)
        if self.stream.typed:
            if self.stream.key_column is None:
                return whole(batch, keyless)
            keys = batch.column(self.stream.key_column)
        else:
            column = batch.column("keys")
            if column.null_count == batch.num_rows:
                return whole(batch, keyless)
            keys = primary_keys(column)
        return partition_by_key(batch, keys, self.streamlet_count, keyless)

    def _move_on(self) -> None:
        self._filling.pop(self.stream.name, None)
        self.sticky_streamlet = (self.sticky_streamlet + 1) % self.streamlet_count

    def close_open_chunk(self, streamlet: int) -> None:
        """Send what has gathered for a streamlet."""
        accumulator = self.open_chunks.get(streamlet)
        if accumulator is not None:
            self.close_chunk(accumulator)

    def close_open_chunks(self) -> None:
        """Send what has gathered."""
        for accumulator in list(self.open_chunks.values()):
            self.close_chunk(accumulator)

    def close_due_chunks(self, lanes: set[Lane]) -> bool:
        """Send what has gathered for any of `lanes` and lingered long enough; whether there was something."""
        due_s = self._loop.time() - self._linger_s
        closed = False
        for accumulator in list(self.open_chunks.values()):
            if self._linger_s and accumulator.opened_s > due_s:
                break  # those behind it were opened later
            if self.lanes.lanes[accumulator.streamlet] in lanes:
                self.close_chunk(accumulator)
                closed = True
        return closed

    def close_chunk(self, accumulator: Accumulator) -> None:
        """Encode the records of an open chunk and queue them; the next record opens another."""
        del self.open_chunks[accumulator.streamlet]
        if accumulator.streamlet == self.sticky_streamlet:
            self._move_on()
        self._buffer.release(accumulator.size)
        # An accumulator is about a chunk's size, but a single record may be as large as a segment.
        chunk_bytes_max = max(accumulator.size * 2, self._chunk_bytes_max)
        try:
            times_us = timestamps(accumulator.times_s, accumulator.timestamps_us)
            made = list(
                record_payloads(
                    accumulator.values,
                    times_us,
                    accumulator.keys,
                    accumulator.headers,
                    self.stream,
                    chunk_bytes_max,
                    lean=self._lean,
                )
            )
        except (KeraError, pa.ArrowException, ValueError, TypeError) as error:
            self._cannot_encode(accumulator, error)
            return
        outcomes = [accumulator.delivered] + [Outcome() for _ in made[1:]]
        accumulator.split([payload.record_count for payload in made], outcomes)
        streamlet, created_us, opened_s = accumulator.streamlet, accumulator.created_us, accumulator.opened_s
        for payload, outcome in zip(made, outcomes, strict=True):
            self.enqueue(streamlet, payload, created_us, outcome, opened_s)

    def _cannot_encode(self, accumulator: Accumulator, error: Exception) -> None:
        """`send` checks what it takes, so this is rare. We may have been called by a timer: nobody could catch it."""
        if not isinstance(error, KeraError):
            error = InvalidArgument(
                f"records cannot be encoded: {error}", stream=accumulator.stream, streamlet_id=accumulator.streamlet
            )
        self._buffer.note_error(error)
        accumulator.fail(error)

    def enqueue(self, streamlet: int, payload: Payload, created_us: int, outcome: Outcome, accepted_s: float) -> None:
        """Have a chunk sent: the last one of its streamlet."""
        lane = self.lanes.lanes[streamlet]
        chunk = PendingChunk(lane, payload, created_us, accepted_s + self._delivery_timeout_s, outcome)
        lane.add(chunk)
        self._buffer.add(chunk)
        self._routes.chunk_added(self.lanes, lane)

    def open_records(self) -> int:
        """How many records are in open chunks."""
        return sum(len(accumulator.values) for accumulator in self.open_chunks.values())

    def abandon(self, error: KeraError) -> None:
        """Send nothing more; what has gathered fails with `error`."""
        for accumulator in self.open_chunks.values():
            accumulator.fail(error)
        self.open_chunks.clear()
        self._filling.pop(self.stream.name, None)
