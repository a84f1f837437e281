"""The open chunks of one stream, at most one per streamlet, until they are closed and queued.

An open chunk is closed when it is full, when it is due, and before anything that must come behind it. Then it is
encoded and queued in its lane; `kera.client.producing.sending.routes` decides which sender sends it. Small batches are
gathered and closed in the same way: those for one streamlet together, or those that will be partitioned.

Invariant: at any time there are either open chunks, or gatherings for single streamlets, or one gathering that will be
partitioned. This keeps rows and records in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pyarrow as pa

from kera.client.producing.encoding.conforming import Conformer, conform
from kera.client.producing.encoding.epoch_cuts import epoch_end_us, is_one_epoch
from kera.client.producing.encoding.partition_payloads import Payloads, one_by_one, partition_payloads, spread
from kera.client.producing.encoding.partitioner import PARTITIONERS, Partition, partition_by_key, primary_keys, whole
from kera.client.producing.encoding.payloads import (
    Payload,
    checked_size,
    limit_of,
    too_large,
)
from kera.client.producing.encoding.row_sizes import OVERHEAD_BYTES
from kera.client.producing.lanes.lane import Lane
from kera.client.producing.lanes.stream_lanes import ProducerIdentity, StreamLanes
from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.open_chunks.gathering import GatheredDelivery, Gathering
from kera.client.producing.open_chunks.hooks import ChunkHooks
from kera.client.producing.outcomes.outcome import BundleOutcome, Outcome
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import NOTHING_DUE, Due, FillTime, earlier
from kera.client.producing.sending.routes import Routes
from kera.client.settings import ProducerSettings
from kera.client.types import StreamDescription, streamlet_number
from kera.core.base.forks import leave_to_parent
from kera.core.errors import InvalidArgument, KeraError, SchemaMismatch, StreamletOutOfRange, UnknownStream
from kera.core.format.chunk import HEADER_BYTES, Codec, padded
from kera.core.format.lean import is_lean

GATHERED_ROW_BYTES = 16
"""Size of a row of a gathered batch without its values; estimated from above."""
BATCH_OVERHEAD_BYTES = 1024
"""Size of the chunk header, and of Arrow's overhead for a batch of one row; estimated from above."""
SMALLEST_SHARE = 0.5
"""A batch whose payload would have to be a smaller share of its size to fit into a chunk is not encoded as a whole."""
GROWTH_SHARE = 4096
"""A codec makes data that it cannot compress larger by this part of them at most: by a few bytes for each 64 KiB."""


class StreamWriter:
    """The open chunks of one stream: records go in, and closed chunks go to their lanes in order.

    Belongs to one `Producer`.
    """

    def __init__(
        self,
        stream: StreamDescription,
        identity: ProducerIdentity,
        settings: ProducerSettings,
        buffer: Buffer,
        routes: Routes,
        filling: dict[str, Accumulator],
        hooks: ChunkHooks,
    ) -> None:
        """`filling`: see `StreamWriters.filling`; the writer removes a chunk that no longer takes the next record."""
        self.lanes = StreamLanes(stream, identity)
        self.streamlet_count = stream.config.streamlets
        self.sticky_streamlet = identity.producer_id % self.streamlet_count
        """Streamlet of records without keys; moves on with each chunk."""
        self.open_chunks: dict[int, Accumulator] = {}
        """The open chunk that takes the next record, by streamlet."""
        self._gatherings: dict[int | None, Gathering] = {}
        """Gatherings of small batches, by streamlet; None: the batches will be partitioned."""
        self._conformer = Conformer()
        self._chunk_bytes_max = int(settings.chunk_bytes_max)
        self._small_bytes_max = min(self._chunk_bytes_max, stream.segment_bytes_min or self._chunk_bytes_max) // 2
        """Batches up to this size are gathered: each of their rows fits into a segment."""
        self._gathered_bytes_max = max(
            self._chunk_bytes_max, min(int(settings.request_bytes_max), self._chunk_bytes_max * self.streamlet_count)
        )
        """Batches that will be partitioned are gathered up to this size."""
        self._lean = settings.lean
        self._payload_share = SMALLEST_SHARE
        """The payload of the last whole batch, as a share of the batch's size."""
        self.partitioner = PARTITIONERS[settings.partitioner]
        self._loop = asyncio.get_running_loop()
        self._buffer = buffer
        self._routes = routes
        routes.deleted.discard(stream.name)
        self._filling = filling
        leave_to_parent(self)
        self._hooks = hooks
        hooks.on_prepared(stream.stream_id, self.open_chunks)

    @property
    def stream(self) -> StreamDescription:
        """The last known description of the stream."""
        return self.lanes.stream

    @property
    def deleted(self) -> UnknownStream | None:
        """The error of a stream that no longer exists."""
        return self.lanes.deleted

    def open_chunk(self, streamlet: int, record_bytes: int, time_us: int, *, spread: bool = False) -> Accumulator:
        """Return the open chunk of a streamlet, if it is of the epoch of `time_us`, or of a later one; else a new one.

        `spread`: the record has no keys, so its streamlet may change when a chunk is closed. Raises
        `StreamletOutOfRange`, `RecordTooLarge`, `SchemaMismatch`.
        """
        accumulator = self.open_chunks.get(streamlet)
        while accumulator is not None and time_us >= accumulator.epoch_end_us:
            self.close_chunk(accumulator)
            streamlet = self.sticky_streamlet if spread else streamlet
            accumulator = self.open_chunks.get(streamlet)
        if accumulator is None or record_bytes > self._chunk_bytes_max:
            self._check(streamlet, record_bytes)
        if accumulator is None:
            self.close_gatherings()
            end_us = epoch_end_us(time_us, self.stream.config.epoch_ms)
            accumulator = Accumulator(self.stream.name, streamlet, self._loop.time(), end_us)
            self.open_chunks[streamlet] = accumulator
            self._routes.chunk_opened(self.lanes, self.lanes.lanes[streamlet])
            self._hooks.on_accepted(self.stream.stream_id, accumulator.opened_s)
        return accumulator

    def _check(self, streamlet: int, record_bytes: int) -> None:
        if self.stream.typed:
            raise SchemaMismatch(
                f"stream {self.stream.name!r} has a schema of its own; use send_batch", stream=self.stream.name
            )
        self._check_streamlet(streamlet)
        limit = self.stream.segment_bytes_min
        growth_bytes = 0 if self.stream.codec is Codec.NONE else record_bytes // GROWTH_SHARE
        if limit and record_bytes + BATCH_OVERHEAD_BYTES + growth_bytes > limit:
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
        """Return `streamlet` as a checked number. Raises `InvalidArgument`, `StreamletOutOfRange`."""
        number = streamlet_number(streamlet)
        self._check_streamlet(number)
        return number

    def size_of(self, batch: pa.RecordBatch) -> int:
        """Return the size of a batch's rows in Arrow's form, or more: a small one may be a slice of larger buffers."""
        size: int = batch.get_total_buffer_size()
        return size if size <= self._small_bytes_max or not _is_slice(batch) else int(batch.nbytes)

    def gather(self, batch: pa.RecordBatch, size: int, streamlet: int | None, now_us: int) -> GatheredDelivery | None:
        """Gather a small batch that conforms; return None, and take nothing, for any other. `size`: see `size_of`.

        Also returns None if the batch need not wait for anything.
        """
        if not self._gatherings and self._buffer.idle:
            lane = self.lanes.lanes[self.sticky_streamlet if streamlet is None else streamlet]
            if not self._routes.wait_s(lane):
                return None
        size += GATHERED_ROW_BYTES * batch.num_rows
        if size > self._small_bytes_max or not batch.num_rows or self._buffer.is_full(size):
            return None
        conforming = self._conformer.small(batch, self.stream, now_us)
        if conforming is None:
            return None
        bytes_max = self._gathered_bytes_max if streamlet is None else self._chunk_bytes_max
        gathering = self._gatherings.get(streamlet)
        if (
            gathering is None
            or gathering.size + size + BATCH_OVERHEAD_BYTES > bytes_max
            or not gathering.schema.equals(conforming.schema)
        ):
            gathering = self._open_gathering(conforming.schema, streamlet, now_us)
        delivery = gathering.add(conforming, size, now_us)
        self._buffer.take(size)
        self._hooks.on_accepted(self.stream.stream_id, self._loop.time())
        return delivery

    def _open_gathering(self, schema: pa.Schema, streamlet: int | None, now_us: int) -> Gathering:
        self._close_open_chunks()
        if streamlet is None or None in self._gatherings:
            self.close_gatherings()
        else:
            self._close_gathering(streamlet)  # it is full, or has other columns
        self._filling.pop(self.stream.name, None)
        lane = self.lanes.lanes[self.sticky_streamlet if streamlet is None else streamlet]
        gathering = self._gatherings[streamlet] = Gathering(schema, lane, now_us, self._loop.time())
        self._routes.chunk_opened(self.lanes, lane)
        return gathering

    def close_gatherings(self) -> None:
        """Send the small batches that have been gathered."""
        for streamlet in list(self._gatherings):
            self._close_gathering(streamlet)

    def _close_gathering(self, streamlet: int | None, now_s: float | None = None) -> None:
        gathering = self._gatherings.pop(streamlet, None)
        if gathering is None:
            return
        closed_s = self._loop.time() if now_s is None else now_s
        self._buffer.release(gathering.size)
        stream, now_us = self.stream, gathering.created_us
        try:
            rows = conform(gathering.batch(with_times=not stream.typed), stream, now_us)
            chunk_bytes = checked_size(rows, stream, self._chunk_bytes_max, lean=self._lean)
            partition = self.partition(rows, chunk_bytes, streamlet)
            chunks = [
                chunk
                for made in partition_payloads(
                    partition, stream, self._chunk_bytes_max, now_us, chunk_bytes, lean=self._lean
                )
                for chunk in one_by_one(made)
            ]
        except (KeraError, pa.ArrowException, ValueError, TypeError) as error:
            gathering.fail(self._not_encoded(error))
            return
        outcomes = [gathering.delivered, *(Outcome() for _ in chunks[1:])]
        gathering.sent_as(outcomes, [payload.record_count for _, payload in chunks], partition.order)
        for (place, payload), outcome in zip(chunks, outcomes, strict=True):
            self._routes.enqueue(self.lanes, place, payload, now_us, outcome, gathering.opened_s, closed_s)

    def whole_chunk(
        self, batch: pa.RecordBatch, size: int, streamlet: int | None, now_us: int
    ) -> tuple[int, Payload] | None:
        """Return the streamlet and payload of a batch that makes one chunk, if that is likely; else None.

        `size`: see `size_of`. Encodes the batch in order to know its size, unless the batch before it says that it is
        too large.
        """
        limit = min(self._chunk_bytes_max, limit_of(self.stream, self._chunk_bytes_max)) - HEADER_BYTES
        likely_bytes = int(size * self._payload_share) + OVERHEAD_BYTES
        if not self._lean or not batch.num_rows or likely_bytes > limit or size * SMALLEST_SHARE > limit:
            return None
        keyless = streamlet is None and self.streamlet_count > 1
        payload = self._conformer.payload(batch, self.stream, now_us, keyless=keyless)
        if payload is None:
            return None
        if size > self._small_bytes_max:
            self._payload_share = len(payload.payload) / size
        if padded(len(payload.payload)) > limit:
            return None
        if not is_one_epoch(payload.min_timestamp_us, payload.max_timestamp_us, self.stream.config.epoch_ms):
            return None
        self.close_gatherings()
        if keyless:
            streamlet = self.sticky_streamlet
            self._move_on(1)
        return streamlet or 0, payload

    def checked_parts(self, parts: Sequence[pa.RecordBatch], now_us: int) -> list[tuple[pa.RecordBatch, int]]:
        """Return the parts of a batch, each with the length of the chunk that it would be.

        Finds all faults of a batch before any of its rows is accepted. Raises `SchemaMismatch`, `RecordTooLarge`.
        """
        stream = self.stream
        conforming = [self._conformer.conform(part, stream, now_us) for part in parts if part.num_rows]
        return [(part, checked_size(part, stream, self._chunk_bytes_max, lean=self._lean)) for part in conforming]

    def partition(self, batch: pa.RecordBatch, chunk_bytes: int, streamlet: int | None) -> Partition:
        """Partition `batch`, which would be a chunk of `chunk_bytes`; with a `streamlet`, all rows go there."""
        if streamlet is not None:
            return whole(batch, streamlet)
        if self.streamlet_count == 1:
            return whole(batch, 0)
        first, bytes_max, stream = self.sticky_streamlet, self._chunk_bytes_max, self.stream
        keys = _keys_of(batch, stream)
        if keys is not None:
            self._move_on(1)
            return partition_by_key(batch, keys, self.streamlet_count, first, self.partitioner)
        if chunk_bytes <= bytes_max:
            partition = whole(batch, first)
        else:  # a chunk for each streamlet in turn, as for records
            lean = self._lean and is_lean(stream.schema)
            partition = spread(batch, chunk_bytes, first, self.streamlet_count, bytes_max, lean=lean)
        self._move_on(len(partition.ends))
        return partition

    def _move_on(self, chunks: int) -> None:
        self._filling.pop(self.stream.name, None)
        self.sticky_streamlet = (self.sticky_streamlet + chunks) % self.streamlet_count

    def close_open_chunk(self, streamlet: int) -> None:
        """Close the open chunk of a streamlet, if there is one."""
        accumulator = self.open_chunks.get(streamlet)
        if accumulator is not None:
            self.close_chunk(accumulator)

    def close_open_chunks(self) -> None:
        """Close all gatherings and open chunks."""
        self.close_gatherings()
        self._close_open_chunks()

    def _close_open_chunks(self) -> None:
        for accumulator in list(self.open_chunks.values()):
            self.close_chunk(accumulator)

    def close_due_chunks(self, lanes: set[Lane], fill_time: FillTime, *, idle: bool) -> Due:
        """Close open chunks and gatherings of `lanes` that are due. Returns what was due, and when the next one is.

        Chunks that need not wait for a time are closed when `idle`: nothing is in flight.
        """
        if not self.open_chunks and not self._gatherings:
            return NOTHING_DUE
        now_s = self._loop.time()
        wait_s = fill_time.wait_s(self.stream.stream_id, now_s)
        if not wait_s and not idle:
            return NOTHING_DUE
        since_s, later_s = now_s - wait_s, wait_s + fill_time.grace_s
        closed, next_s, due_s = 0, None, None
        for accumulator in list(self.open_chunks.values()):
            if self.lanes.lanes[accumulator.streamlet] not in lanes:
                continue
            if accumulator.opened_s > since_s + fill_time.early_s(wait_s, closed):
                next_s = accumulator.opened_s + later_s
                break  # the chunks behind it were opened later
            due_s = accumulator.opened_s + later_s if due_s is None else due_s
            self.close_chunk(accumulator, now_s)
            closed += 1
        for streamlet, gathering in list(self._gatherings.items()):
            if gathering.lane not in lanes:
                continue
            if gathering.opened_s > since_s + fill_time.early_s(wait_s, closed):
                next_s = earlier(next_s, gathering.opened_s + later_s)
            else:
                due_s = earlier(due_s, gathering.opened_s + later_s)
                self._close_gathering(streamlet, now_s)
                closed += 1
        return Due(closed > 0, next_s, due_s if wait_s else None)

    def close_chunk(self, accumulator: Accumulator, now_s: float | None = None) -> None:
        """Encode the records of an open chunk and queue them; the next record opens another.

        `now_s`: when the decision to close it was made, if other chunks were closed in between.
        """
        closed_s = self._loop.time() if now_s is None else now_s
        del self.open_chunks[accumulator.streamlet]
        self._hooks.on_chunk_closed(self.stream.stream_id, accumulator)
        if self._filling.get(self.stream.name) is accumulator:
            del self._filling[self.stream.name]
        if accumulator.streamlet == self.sticky_streamlet:
            self._move_on(1)
        self._buffer.release(accumulator.size)
        try:
            chunks = accumulator.chunks(self.stream, self._chunk_bytes_max, lean=self._lean)
        except (KeraError, pa.ArrowException, ValueError, TypeError) as error:
            accumulator.fail(self._not_encoded(error))
            return
        streamlet, created_us, opened_s = accumulator.streamlet, accumulator.created_us, accumulator.opened_s
        for payload, outcome in chunks:
            self._routes.enqueue(self.lanes, streamlet, payload, created_us, outcome, opened_s, closed_s)

    def _not_encoded(self, error: Exception) -> KeraError:
        """Return the error for waiting callers, and note it for `flush`.

        Rare, because rows are checked when they are accepted. Raising would not do: the caller may be a timer.
        """
        if not isinstance(error, KeraError):
            error = InvalidArgument(f"records cannot be encoded: {error}", stream=self.stream.name)
        self._buffer.note_error(error)
        return error

    def enqueue(self, streamlet: int, payload: Payload, created_us: int, outcome: Outcome, accepted_s: float) -> None:
        """Queue a chunk of a batch, as the last one of its streamlet."""
        self._hooks.on_accepted(self.stream.stream_id, accepted_s)
        self._routes.enqueue(self.lanes, streamlet, payload, created_us, outcome, accepted_s, accepted_s)

    def enqueue_together(self, payloads: Payloads, created_us: int, accepted_s: float) -> list[Outcome | BundleOutcome]:
        """Queue chunks of a batch, as the last ones of their streamlets: in bundles, as far as possible."""
        if self.open_chunks:
            for streamlet in payloads.streamlets.tolist():
                self.close_open_chunk(streamlet)  # records that were sent before stay before
        self._hooks.on_accepted(self.stream.stream_id, accepted_s)
        bundled, others = self._routes.add_bundles(self.lanes, payloads, created_us, accepted_s)
        outcomes: list[Outcome | BundleOutcome] = [*bundled]
        if others:
            for streamlet, payload in one_by_one(payloads.some(others)):
                outcomes.append(outcome := Outcome())
                self.enqueue(streamlet, payload, created_us, outcome, accepted_s)
        return outcomes

    def open_records(self) -> int:
        """Return the number of records in open chunks and gatherings."""
        in_chunks = sum(len(accumulator.values) for accumulator in self.open_chunks.values())
        return in_chunks + sum(gathering.row_count for gathering in self._gatherings.values())

    def forked(self) -> None:
        """Forget all open chunks, which the parent process sends; see `kera.core.base.forks`."""
        self._filling.pop(self.stream.name, None)
        self.open_chunks.clear()
        self._gatherings.clear()

    def abandon(self, error: KeraError) -> None:
        """Fail all records in open chunks and gatherings with `error`."""
        for accumulator in self.open_chunks.values():
            accumulator.fail(error)
        self.open_chunks.clear()
        for gathering in self._gatherings.values():
            gathering.fail(error)
        self._gatherings.clear()
        self._filling.pop(self.stream.name, None)


def _is_slice(batch: pa.RecordBatch) -> bool:
    """Return whether a batch may be a small part of its buffers: `nbytes`, which finds out, takes tens of us."""
    if not batch.num_columns:
        return True
    column = batch.column(0)
    numbers = column.buffers()[1:2]  # values of a fixed width, or offsets: at most 16 bytes for each row
    return column.offset != 0 or not numbers or numbers[0] is None or numbers[0].size > 16 * (batch.num_rows + 8)


def _keys_of(batch: pa.RecordBatch, stream: StreamDescription) -> pa.Array | None:
    """Return the keys that decide the streamlets of rows; None: there are none."""
    if stream.typed:
        return None if stream.key_column is None else batch.column(stream.key_column)
    column = batch.column("keys")
    return None if column.null_count == batch.num_rows else primary_keys(column)
