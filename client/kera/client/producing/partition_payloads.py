"""The payloads of a batch that was partitioned: those of streamlets with few rows are made together. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client.producing.encoding import Payload, limit_of, payloads, time_range, times_of
from kera.client.producing.partitioner import Partition
from kera.client.producing.row_sizes import RowSizes, lean_room
from kera.client.types import StreamDescription
from kera.core.chunk import ALIGNMENT_BYTES, HEADER_BYTES, LEAN_VERSION, Codec
from kera.core.lean import is_lean
from kera.core.payload import encode_lean_rows
from kera.core.written_out import may_grow

TOGETHER_BYTES_MAX = 4 << 20
"""Of chunks whose payloads are made at once: about as much memory is taken for them."""
ROWS_TOGETHER_MAX = 1024
"""Chunks of more rows are made one by one: what each costs by itself is little beside its bytes."""
_Numbers: TypeAlias = npt.NDArray[np.int64]


class Payloads(NamedTuple):
    """What goes into some chunks, in columns; see `Payload`."""

    streamlets: _Numbers
    payloads: list[bytes]
    record_counts: _Numbers
    min_timestamps_us: _Numbers
    max_timestamps_us: _Numbers
    schema_id: int
    version: int = LEAN_VERSION

    def one(self, index: int) -> Payload:
        """That of one of the chunks."""
        return Payload(
            self.payloads[index],
            int(self.record_counts[index]),
            int(self.min_timestamps_us[index]),
            int(self.max_timestamps_us[index]),
            self.schema_id,
            self.version,
        )

    def some(self, which: Sequence[int] | slice) -> Payloads:
        """Those at these indexes."""
        payloads = self.payloads
        return self._replace(
            streamlets=self.streamlets[which],
            payloads=payloads[which] if isinstance(which, slice) else [payloads[index] for index in which],
            record_counts=self.record_counts[which],
            min_timestamps_us=self.min_timestamps_us[which],
            max_timestamps_us=self.max_timestamps_us[which],
        )

    def cut(self, bytes_max: int, chunks_max: int) -> Iterator[Payloads]:
        """The same in parts of which each is so many chunks at most, of so many bytes, or a single one."""
        sizes = (HEADER_BYTES + ALIGNMENT_BYTES - 1 + np.array([*map(len, self.payloads)])) & -ALIGNMENT_BYTES
        ends = np.cumsum(sizes)
        start, count = 0, len(ends)
        while start < count:
            before = ends[start - 1] if start else 0
            end = max(start + 1, min(start + chunks_max, int(np.searchsorted(ends, before + bytes_max, "right"))))
            yield self if end - start == count else self.some(slice(start, end))
            start = end


def partition_payloads(
    partition: Partition,
    stream: StreamDescription,
    chunk_bytes_max: int,
    now_us: int,
    chunk_bytes: int,
    *,
    lean: bool,
) -> Iterator[Payloads | tuple[int, Iterator[Payload]]]:
    """The payloads of chunks with few rows, made together; or a streamlet, and `payloads` of some of its rows.

    They come in the order of the rows.
    """
    target = min(chunk_bytes_max, limit_of(stream, chunk_bytes_max))
    at_once = lean and stream.codec is Codec.NONE and not may_grow(stream.schema) and is_lean(stream.schema)
    if at_once:
        partition = _divided(partition, target, chunk_bytes)
    batch, ends = partition.batch, partition.ends
    if not at_once or len(ends) == 1 or batch.num_rows > ROWS_TOGETHER_MAX * len(ends):
        for streamlet, rows in partition.parts():
            size = chunk_bytes if rows is batch else None
            yield streamlet, payloads(rows, stream, chunk_bytes_max, now_us, size, lean=lean)
        return
    rows_max = max(1, batch.num_rows * TOGETHER_BYTES_MAX // chunk_bytes)
    first = start = 0
    while first < len(ends):
        last = max(first + 1, bisect_right(ends, start + rows_max))
        streamlets, bounds = partition.streamlets[first:last], [start, *ends[first:last]]
        first, start = last, bounds[-1]
        if start - bounds[0] <= rows_max:
            rows = batch.slice(bounds[0], start - bounds[0])
            made, alone = _made_together(
                rows, streamlets, [end - bounds[0] for end in bounds[1:]], stream, target, now_us
            )
        else:
            made, alone = None, {*streamlets}
        if made is not None and not alone:
            yield made
            continue
        at = 0
        for index, streamlet in enumerate(streamlets):
            if streamlet in alone:
                part = batch.slice(bounds[index], bounds[index + 1] - bounds[index])
                yield streamlet, payloads(part, stream, chunk_bytes_max, now_us, lean=lean)
            elif made is not None:
                yield made.some([at])
                at += 1


def one_by_one(made: Payloads | tuple[int, Iterator[Payload]]) -> Iterator[tuple[int, Payload]]:
    """What `partition_payloads` gives, each chunk by itself, with its streamlet."""
    if isinstance(made, Payloads):
        for index, streamlet in enumerate(made.streamlets.tolist()):
            yield streamlet, made.one(index)
    else:
        streamlet, of_streamlet = made
        for payload in of_streamlet:
            yield streamlet, payload


def spread(
    batch: pa.RecordBatch, chunk_bytes: int, first: int, streamlets: int, chunk_bytes_max: int, *, lean: bool
) -> Partition:
    """Rows that may go anywhere: a chunk for each streamlet in turn, from the `first` on.

    `chunk_bytes`: of a chunk of all rows.
    """
    rows = batch.num_rows
    if lean:
        ends = RowSizes(batch).ends(0, rows, lean_room(chunk_bytes_max))
    else:
        step = max(1, rows * chunk_bytes_max // chunk_bytes)
        ends = [*range(step, rows, step), rows]
    return Partition(batch, [(first + number) % streamlets for number in range(len(ends))], ends)


def _divided(partition: Partition, target: int, chunk_bytes: int) -> Partition:
    """The same, with the rows of a streamlet in several parts where these make more than one chunk of few rows.

    `chunk_bytes`: of a chunk of all rows.
    """
    batch, room = partition.batch, lean_room(target)
    if chunk_bytes <= target or batch.num_rows * room > ROWS_TOGETHER_MAX * chunk_bytes:
        return partition
    sizes, start = RowSizes(batch), 0
    if sizes.largest(partition.ends) <= room:
        return partition
    streamlets: list[int] = []
    ends: list[int] = []
    for streamlet, end in zip(partition.streamlets, partition.ends, strict=True):
        bounds = sizes.ends(start, end, room)
        streamlets += [streamlet] * len(bounds)
        ends += bounds
        start = end
    return partition._replace(streamlets=streamlets, ends=ends)


def _made_together(
    rows: pa.RecordBatch,
    streamlets: Sequence[int],
    ends: Sequence[int],
    stream: StreamDescription,
    target: int,
    now_us: int,
) -> tuple[Payloads | None, set[int]]:
    """A payload of the rows up to each end, but those of the streamlets whose parts have to be looked at.

    All of such a streamlet's: they stay in their order.
    """
    made = encode_lean_rows(rows, ends, stream.schema)
    largest = target - target % ALIGNMENT_BYTES - HEADER_BYTES
    alone = {
        streamlet
        for streamlet, payload in zip(streamlets, made, strict=True)
        if payload is None or len(payload) > largest
    }
    good = [
        payload
        for streamlet, payload in zip(streamlets, made, strict=True)
        if payload is not None and streamlet not in alone
    ]
    if not good:
        return None, alone
    up_to, places = np.array(ends, np.int64), np.array(streamlets, np.int64)
    starts = np.concatenate(([0], up_to[:-1]))
    lows, highs = _time_ranges(rows, starts, up_to, stream, now_us)
    columns = (places, up_to - starts, lows, highs)
    if alone:
        together = np.array([streamlet not in alone for streamlet in streamlets])
        columns = tuple(column[together] for column in columns)
    places, counts, lows, highs = columns
    return Payloads(places, good, counts, lows, highs, stream.schema_id), alone


def _time_ranges(
    rows: pa.RecordBatch, starts: _Numbers, ends: _Numbers, stream: StreamDescription, now_us: int
) -> tuple[_Numbers, _Numbers]:
    """The first and the last time of the rows up to each end, of which each has some."""
    times = times_of(rows, stream)
    if times is None:
        return np.full(len(ends), now_us, np.int64), np.full(len(ends), now_us, np.int64)
    if times.null_count:
        pieces = (rows.slice(start, end - start) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
        lows, highs = zip(*(time_range(piece, stream, now_us) for piece in pieces), strict=True)
        return np.array(lows, np.int64), np.array(highs, np.int64)
    numbers = np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset)
    return np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
