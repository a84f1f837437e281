"""Decides which epoch each chunk of an entry belongs to. Pure.

Epoch k of an entry goes from boundary(kE) up to boundary((k+1)E), where boundary(T) is the first chunk in the order of
the log with a time at or after T. So the epoch of a chunk is that of the greatest time of all chunks up to itself. It
depends on the log alone, and ascends, in whatever order the times are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kera.client.chunk_batch import ChunkBatch
from kera.core.format.chunk import HEADER_BYTES, read_header
from kera.core.format.header_table import HEADER, chunk_bytes, column
from kera.core.format.punctuation import NO_TIME, is_punctuation


class Marked(NamedTuple):
    """Consecutive chunks of one epoch."""

    epoch: int
    chunk: ChunkBatch


def epoch_of(time_us: int, epoch_us: int) -> int:
    """Return the epoch of a time."""
    return time_us // epoch_us


class Marker:
    """Marks the chunks of one entry, starting at the boundary of an epoch."""

    def __init__(self, epoch_us: int) -> None:
        self._epoch_us = epoch_us
        self.watermark_us = NO_TIME
        """The greatest time so far."""

    def mark(self, chunk: ChunkBatch) -> Sequence[Marked]:
        """Return a chunk with its epoch, joined chunks divided by epoch; of a punctuation, only note the time."""
        if chunk.joined and not self._is_of_one_epoch(chunk):
            return list(self._parted(chunk))
        header = chunk.header
        self.watermark_us = max(self.watermark_us, header.max_timestamp_us)
        return () if is_punctuation(header) else (Marked(self.watermark_us // self._epoch_us, chunk),)

    def _parted(self, chunk: ChunkBatch) -> Iterator[Marked]:
        headers = np.frombuffer(chunk.joined, dtype=HEADER)
        watermarks = np.maximum.accumulate(column(headers, "max_timestamp_us"))
        watermarks = np.maximum(watermarks, self.watermark_us)
        numbers = watermarks // self._epoch_us
        firsts = np.concatenate(([0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1))
        self.watermark_us = int(watermarks[-1])
        yield from map(Marked, numbers[firsts].tolist(), parts(chunk, firsts))

    def _is_of_one_epoch(self, chunk: ChunkBatch) -> bool:
        """Return whether all joined chunks are obviously of one epoch: their times and the watermark are in it."""
        first = epoch_of(max(self.watermark_us, chunk.header.min_timestamp_us), self._epoch_us)
        return first == epoch_of(max(self.watermark_us, chunk.header.max_timestamp_us), self._epoch_us)


def parts(chunk: ChunkBatch, firsts: npt.NDArray[np.int64]) -> Iterator[ChunkBatch]:
    """Divide joined chunks into parts: each begins with the chunk whose number is in `firsts`, the first with 0."""
    headers = np.frombuffer(chunk.joined, dtype=HEADER)
    lows = np.minimum.reduceat(column(headers, "min_timestamp_us"), firsts).tolist()
    highs = np.maximum.reduceat(column(headers, "max_timestamp_us"), firsts).tolist()
    counts = np.add.reduceat(column(headers, "record_count"), firsts).tolist()
    sizes = np.add.reduceat(chunk_bytes(headers), firsts).tolist()
    edges = [*(firsts * HEADER_BYTES).tolist(), len(chunk.joined)]
    row, start = 0, chunk.start
    for number, rows in enumerate(counts):
        joined = chunk.joined[edges[number] : edges[number + 1]]
        following = start._replace(offset=start.offset + sizes[number])
        header = read_header(joined)._replace(
            record_count=rows,
            payload_bytes=sizes[number] - HEADER_BYTES,
            min_timestamp_us=lows[number],
            max_timestamp_us=highs[number],
        )
        yield chunk._replace(
            batch=chunk.batch.slice(row, rows), header=header, start=start, next=following, joined=joined
        )
        row, start = row + rows, following
