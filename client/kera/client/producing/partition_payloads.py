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

    Those of each streamlet come in their order.
    """
    target = min(chunk_bytes_max, limit_of(stream, chunk_bytes_max))
    at_once = lean and stream.codec is Codec.NONE and not may_grow(stream.schema) and is_lean(stream.schema)
    if at_once:
        partition = _divided(partition, target)
    batch = partition.batch
    if not at_once or len(partition.ends) == 1:
        for streamlet, rows in partition.parts():
            size = chunk_bytes if rows is batch else None
            yield streamlet, payloads(rows, stream, chunk_bytes_max, now_us, size, lean=lean)
        return
    rows_max = max(1, batch.num_rows * TOGETHER_BYTES_MAX // chunk_bytes)
    first = start = 0
    while first < len(partition.ends):
        last = max(first + 1, bisect_right(partition.ends, start + rows_max))
        streamlets, ends = partition.streamlets[first:last], partition.ends[first:last]
        starts, alone = [start, *ends[:-1]], list(range(last - first))
        if ends[-1] - start <= rows_max:
            rows = batch.slice(start, ends[-1] - start)
            made, alone = _made_together(rows, streamlets, [end - start for end in ends], stream, target, now_us)
            if made is not None:
                yield made
        for index in alone:
            part = batch.slice(starts[index], ends[index] - starts[index])
            yield streamlets[index], payloads(part, stream, chunk_bytes_max, now_us, lean=lean)
        first, start = last, ends[-1]


def one_by_one(made: Payloads | tuple[int, Iterator[Payload]]) -> Iterator[tuple[int, Payload]]:
    """What `partition_payloads` gives, each chunk by itself, with its streamlet."""
    if isinstance(made, Payloads):
        for index, streamlet in enumerate(made.streamlets.tolist()):
            yield streamlet, made.one(index)
    else:
        streamlet, of_streamlet = made
        for payload in of_streamlet:
            yield streamlet, payload


def _divided(partition: Partition, target: int) -> Partition:
    """The same, with the rows of a streamlet in several parts where these make more than one chunk of few rows."""
    batch = partition.batch
    rows_max = max(1, batch.num_rows * (target - HEADER_BYTES) // max(1, batch.nbytes))
    if rows_max > ROWS_TOGETHER_MAX:
        return partition
    streamlets: list[int] = []
    ends: list[int] = []
    start = 0
    for streamlet, end in zip(partition.streamlets, partition.ends, strict=True):
        parts = [*range(start + rows_max, end, rows_max), end]
        streamlets += [streamlet] * len(parts)
        ends += parts
        start = end
    return partition._replace(streamlets=streamlets, ends=ends)


def _made_together(
    rows: pa.RecordBatch,
    streamlets: Sequence[int],
    ends: Sequence[int],
    stream: StreamDescription,
    target: int,
    now_us: int,
) -> tuple[Payloads | None, list[int]]:
    """A payload of the rows up to each end; and which parts have to be looked at by themselves.

    With one part of a streamlet, all of it: they stay in their order.
    """
    made = encode_lean_rows(rows, ends, stream.schema)
    largest = target - target % ALIGNMENT_BYTES - HEADER_BYTES
    fits = [payload is not None and len(payload) <= largest for payload in made]
    alone: list[int] = []
    if not all(fits):
        odd = {streamlet for streamlet, good in zip(streamlets, fits, strict=True) if not good}
        alone = [index for index, streamlet in enumerate(streamlets) if streamlet in odd]
        fits = [streamlet not in odd for streamlet in streamlets]
    good = [payload for payload, together in zip(made, fits, strict=True) if together and payload is not None]
    if not good:
        return None, alone
    up_to = np.array(ends, np.int64)
    starts = np.concatenate(([0], up_to[:-1]))
    lows, highs = _time_ranges(rows, starts, up_to, stream, now_us)
    counts, places = up_to - starts, np.array(streamlets, np.int64)
    if alone:
        places, counts, lows, highs = (np.delete(each, alone) for each in (places, counts, lows, highs))
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
