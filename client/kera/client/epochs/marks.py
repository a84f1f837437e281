"""Which epoch each chunk of an entry belongs to. Pure.

Epoch k of an entry goes from boundary(kE) up to boundary((k+1)E), where boundary(T) is the first chunk in the order of
the log with a time at or after T. So a chunk is of the epoch in which the greatest time of all chunks up to itself is:
a function of the log alone, which ascends whatever order times have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kera.client.chunk_batch import ChunkBatch
from kera.core.chunk import HEADER_BYTES
from kera.core.header_table import HEADER, column
from kera.core.punctuation import NO_TIME, is_punctuation


class Marked(NamedTuple):
    """Chunks that follow each other, all of one epoch."""

    epoch: int
    chunk: ChunkBatch


def epoch_of(time_us: int, epoch_us: int) -> int:
    """The epoch in which a time is."""
    return time_us // epoch_us


class Marker:
    """Of one entry, from one of its boundaries on."""

    def __init__(self, epoch_us: int) -> None:
        self._epoch_us = epoch_us
        self.watermark_us = NO_TIME
        """The greatest time so far."""

    def mark(self, chunk: ChunkBatch) -> Sequence[Marked]:
        """The chunk with its epoch; several that came together by epoch. Of a punctuation only the time is noted."""
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
        cuts = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
        ends = list(chunk.ends())
        self.watermark_us = int(watermarks[-1])
        rest, passed = chunk, 0
        for cut in cuts.tolist():
            position = ends[cut - 1][1]
            before, rest = split(rest, cut - passed, position)
            yield Marked(int(numbers[cut - 1]), before)
            passed = cut
        yield Marked(int(numbers[-1]), rest)

    def _is_of_one_epoch(self, chunk: ChunkBatch) -> bool:
        """Whether all of them are, as can be seen at once: their times and the watermark are in one."""
        first = epoch_of(max(self.watermark_us, chunk.header.min_timestamp_us), self._epoch_us)
        return first == epoch_of(max(self.watermark_us, chunk.header.max_timestamp_us), self._epoch_us)


def split(chunk: ChunkBatch, chunks: int, position: tuple[int, int, int]) -> tuple[ChunkBatch, ChunkBatch]:
    """Chunks that came together in two parts: the first `chunks` of them, up to `position`, and the rest."""
    rest = chunk.rest(type(chunk.start)(*position))
    rows = chunk.batch.num_rows - rest.batch.num_rows
    joined = chunk.joined[: chunks * HEADER_BYTES]
    header = chunk.header._replace(
        record_count=rows, payload_bytes=rest.start.offset - chunk.start.offset - HEADER_BYTES
    )
    first = chunk._replace(batch=chunk.batch.slice(0, rows), header=header, next=rest.start, joined=joined)
    return _with_times(first), _with_times(rest)


def _with_times(chunk: ChunkBatch) -> ChunkBatch:
    """With the times of its own chunks."""
    headers = np.frombuffer(chunk.joined, dtype=HEADER)
    header = chunk.header._replace(
        min_timestamp_us=int(headers["min_timestamp_us"].min()),
        max_timestamp_us=int(headers["max_timestamp_us"].max()),
        payload_crc32c=int(headers["payload_crc32c"][0]),
    )
    return chunk._replace(header=header)
