"""Payloads of a partitioned batch: payloads of streamlets with few rows are made together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client.producing.encoding.epoch_cuts import cut_at_epochs
from kera.client.producing.encoding.partitioner import Numbers, Partition
from kera.client.producing.encoding.payloads import Payload, limit_of, payloads, time_range, times_of
from kera.client.producing.encoding.row_sizes import RowSizes, cut_evenly, lean_room
from kera.client.types import StreamDescription
from kera.core.format.chunk import ALIGNMENT_BYTES, HEADER_BYTES, LEAN_VERSION, Codec, padded
from kera.core.format.lean import is_lean
from kera.core.format.many_chunks import NOT_LEAN, begin_chunks
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX
from kera.core.format.written_out import may_grow

TOGETHER_BYTES_MAX = 4 << 20
"""Total size of the chunks whose payloads are made at once: they take about as much memory."""
ROWS_TOGETHER_MAX = 1024
"""Chunks of more rows are made one by one: the fixed cost of each is small beside the cost of its bytes."""


class Payloads(NamedTuple):
    """The contents of some chunks, in columns; see `Payload`."""

    streamlets: Numbers
    chunks: memoryview
    """The payloads in their places, with room for the headers; see ``kera.core.format.many_chunks``."""
    payload_bytes: Numbers
    record_counts: Numbers
    min_timestamps_us: Numbers
    max_timestamps_us: Numbers
    schema_id: int
    version: int = LEAN_VERSION

    def ends(self) -> Numbers:
        """Return the offset in `chunks` at which each chunk ends."""
        return np.cumsum(HEADER_BYTES + (self.payload_bytes + ALIGNMENT_BYTES - 1 & -ALIGNMENT_BYTES))

    def all(self) -> Iterator[Payload]:
        """Yield the payloads one by one."""
        columns = (self.payload_bytes, self.record_counts, self.min_timestamps_us, self.max_timestamps_us)
        at = HEADER_BYTES
        for size, count, low, high in zip(*(column.tolist() for column in columns), strict=True):
            yield Payload(bytes(self.chunks[at : at + size]), count, low, high, self.schema_id, self.version)
            at += padded(size) + HEADER_BYTES

    def parts(self, bounds: Iterable[int]) -> Iterator[Payloads]:
        """Yield consecutive parts: each begins where the one before it ends, which is before a number of `bounds`."""
        first, start, ends = 0, 0, self.ends()
        for last in bounds:
            end = int(ends[last - 1])
            yield self._columns(slice(first, last), self.chunks[start:end])
            first, start = last, end

    def some(self, chosen: Sequence[int] | npt.NDArray[np.bool_]) -> Payloads:
        """Copy the chosen payloads, so that their chunks follow each other again."""
        which, ends = np.asarray(chosen), self.ends()
        starts = np.concatenate(([0], ends[:-1]))
        pieces = [
            self.chunks[start:end] for start, end in zip(starts[which].tolist(), ends[which].tolist(), strict=True)
        ]
        return self._columns(which, memoryview(bytearray().join(pieces)))

    def _columns(self, which: npt.NDArray[Any] | slice, chunks: memoryview) -> Payloads:
        return self._replace(
            streamlets=self.streamlets[which],
            chunks=chunks,
            payload_bytes=self.payload_bytes[which],
            record_counts=self.record_counts[which],
            min_timestamps_us=self.min_timestamps_us[which],
            max_timestamps_us=self.max_timestamps_us[which],
        )

    def cut(self, bytes_max: int, chunks_max: int) -> Iterator[Payloads]:
        """Yield parts of at most `chunks_max` chunks and `bytes_max` bytes; a larger chunk is a part on its own."""
        count = len(self.streamlets)
        if count <= chunks_max and len(self.chunks) <= bytes_max:
            yield self
            return
        ends, bounds = self.ends(), [0]
        while (start := bounds[-1]) < count:
            before = ends[start - 1] if start else 0
            end = max(start + 1, min(start + chunks_max, int(np.searchsorted(ends, before + bytes_max, "right"))))
            bounds.append(end)
        yield from self.parts(bounds[1:])


def partition_payloads(
    partition: Partition,
    stream: StreamDescription,
    chunk_bytes_max: int,
    now_us: int,
    chunk_bytes: int,
    *,
    lean: bool,
) -> Iterator[Payloads | tuple[int, Iterator[Payload]]]:
    """Yield payloads of chunks with few rows, made together; or a streamlet, and `payloads` of some of its rows.

    The payloads come in the order of the rows. A row of a later epoch than the rows before it begins a chunk.
    `chunk_bytes`: the length of a chunk of all rows.
    """
    partition = cut_at_epochs(partition, stream)
    target = min(chunk_bytes_max, limit_of(stream, chunk_bytes_max))
    at_once = lean and stream.codec is Codec.NONE and not may_grow(stream.schema) and is_lean(stream.schema)
    if at_once:
        partition = _divided(partition, target, chunk_bytes)
    ends, row_count = partition.ends, partition.batch.num_rows
    if not at_once or len(ends) == 1 or row_count > ROWS_TOGETHER_MAX * len(ends):
        for streamlet, rows in partition.parts():
            size = chunk_bytes if rows.num_rows == row_count else None
            yield streamlet, payloads(rows, stream, chunk_bytes_max, now_us, size, lean=lean)
        return
    rows_max = max(1, row_count * TOGETHER_BYTES_MAX // chunk_bytes)
    first = start = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, start + rows_max, "right")))
        end = int(ends[last - 1])
        part = partition.rows(start, end)._replace(
            streamlets=partition.streamlets[first:last], ends=ends[first:last] - start
        )
        made, alone = None, {*part.streamlets.tolist()}
        if end - start <= rows_max:
            made, alone = _made_together(part, stream, target, now_us)
        first, start = last, end
        if made is not None and not alone:
            yield made
            continue
        others: Iterator[Payloads] = iter(()) if made is None else made.parts(range(1, len(made.streamlets) + 1))
        for streamlet, rows in part.parts():
            if streamlet in alone:
                yield streamlet, payloads(rows, stream, chunk_bytes_max, now_us, lean=lean)
            else:
                yield next(others)


def one_by_one(made: Payloads | tuple[int, Iterator[Payload]]) -> Iterator[tuple[int, Payload]]:
    """Yield a result of `partition_payloads` chunk by chunk, each with its streamlet."""
    if isinstance(made, Payloads):
        yield from zip(made.streamlets.tolist(), made.all(), strict=True)
    else:
        streamlet, of_streamlet = made
        for payload in of_streamlet:
            yield streamlet, payload


def spread(
    batch: pa.RecordBatch, chunk_bytes: int, first: int, streamlets: int, chunk_bytes_max: int, *, lean: bool
) -> Partition:
    """Spread rows without keys: a chunk for each streamlet in turn, from the `first` on.

    `chunk_bytes`: the length of a chunk of all rows.
    """
    rows = batch.num_rows
    if lean:
        ends = RowSizes(batch).ends(0, rows, lean_room(chunk_bytes_max))
    else:
        ends = cut_evenly(0, rows, rows * chunk_bytes_max // chunk_bytes)
    return Partition(batch, np.arange(first, first + len(ends)) % streamlets, ends, sized=lean)


def _divided(partition: Partition, target: int, chunk_bytes: int) -> Partition:
    """Divide the rows of a streamlet into several parts if they make more than one chunk of few rows.

    `chunk_bytes`: the length of a chunk of all rows.
    """
    room, row_count = lean_room(target), partition.batch.num_rows
    if partition.sized or chunk_bytes <= target or row_count * room > ROWS_TOGETHER_MAX * chunk_bytes:
        return partition
    grouped = partition.grouped()
    sizes, start = RowSizes(grouped.batch), 0
    if sizes.largest(partition.ends) <= room:
        return partition
    bounds = []
    for end in partition.ends.tolist():
        bounds.append(sizes.ends(start, end, room))
        start = end
    streamlets = np.repeat(partition.streamlets, [*map(len, bounds)])
    return grouped._replace(streamlets=streamlets, ends=np.concatenate(bounds))


def _made_together(
    partition: Partition, stream: StreamDescription, target: int, now_us: int
) -> tuple[Payloads | None, set[int]]:
    """Make a payload of the rows up to each end; return the payloads, and the streamlets left out.

    A streamlet is left out with all its parts, so that they stay in order, when one of them cannot be a lean chunk of
    the `target` size.
    """
    batch, streamlets, ends = partition.batch, partition.streamlets, partition.ends
    chunks, sizes = begin_chunks(batch, partition.order, ends.astype(np.uint32), DECOMPRESSED_BYTES_MAX)
    payload_bytes = np.frombuffer(sizes, np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    lows, highs = _time_ranges(partition, starts, ends, stream, now_us)
    there = payload_bytes != NOT_LEAN
    columns = (streamlets, payload_bytes, ends - starts, lows, highs)
    if not there.all():
        columns = tuple(column[there] for column in columns)
    places, sizes_there, counts, lows, highs = columns
    made = Payloads(places, memoryview(chunks), sizes_there, counts, lows, highs, stream.schema_id)
    largest = target - target % ALIGNMENT_BYTES - HEADER_BYTES
    alone = {*streamlets[~there].tolist(), *places[sizes_there > largest].tolist()}
    if alone:
        together = ~np.isin(places, [*alone])
        return (made.some(together) if together.any() else None), alone
    return made, alone


def _time_ranges(
    partition: Partition, starts: Numbers, ends: Numbers, stream: StreamDescription, now_us: int
) -> tuple[Numbers, Numbers]:
    """Return the first and the last time of each part; every part has rows."""
    times = times_of(partition.batch, stream)
    if times is None:
        return np.full(len(ends), now_us, np.int64), np.full(len(ends), now_us, np.int64)
    if times.null_count:
        ranges = (time_range(rows, stream, now_us) for _, rows in partition.parts())
        lows, highs = zip(*ranges, strict=True)
        return np.array(lows, np.int64), np.array(highs, np.int64)
    numbers = np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset)
    if partition.order is not None:
        numbers = numbers[partition.order]
    return np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
