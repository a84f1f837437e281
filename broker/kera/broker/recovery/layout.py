"""Computes where the chunks of a recovered segment go: one after the other, and behind holes. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from kera.broker.records import SegmentRecord
from kera.broker.recovery.merge import digests_of
from kera.core.format.chunk import ALIGNMENT_BYTES
from kera.core.format.header_table import Column, Headers, chunk_bytes, column, end_records

HOLE_BYTES = ALIGNMENT_BYTES
"""Size of a hole where the missing size is unknown: less than any chunk."""


def lay_out(chunks: Headers, *, from_start: bool) -> tuple[Column, int]:
    """Return the positions of a segment's chunks, and the end of the last one; `from_start`: none is missing before.

    If records are missing before the first chunk, they may all have been in the segment before.
    """
    sizes = chunk_bytes(chunks)
    packed = np.cumsum(sizes) - sizes
    behind_hole = np.zeros(len(chunks), dtype=np.bool_)
    behind_hole[0] = not from_start
    behind_hole[1:] = end_records(chunks)[:-1] != column(chunks, "first_record")[1:]
    holes = np.zeros(len(chunks), dtype=np.int64)
    shift = 0
    for row in np.flatnonzero(behind_hole).tolist():
        at = int(packed[row]) + shift
        holes[row] = max(at + HOLE_BYTES if row else 0, int(chunks["durable_head"][row])) - at
        shift += int(holes[row])
    positions = packed + np.cumsum(holes)
    return positions, int(positions[-1] + sizes[-1])


@dataclass(slots=True)
class Places:
    """The places of a recovered segment's chunks, in 21 bytes per chunk."""

    first_records: array[int] = field(default_factory=lambda: array("Q"))
    positions: array[int] = field(default_factory=lambda: array("I"))
    digests: array[int] = field(default_factory=lambda: array("Q"))

    def find(self, first_record: int, digest: int) -> int | None:
        """Return the number of a chunk; None if it is not one of them."""
        at = bisect_left(self.first_records, first_record)
        while at < len(self.first_records) and self.first_records[at] == first_record:  # several: some have no records
            if self.digests[at] == digest:
                return at
            at += 1
        return None


def places(record: SegmentRecord, chunks: Headers) -> Places:
    """Return the places of the chunks of a segment whose future content `record` describes.

    Chunks may be missing that were found when the record was made. Then the chunks before the first missing one are
    placed from the start of the segment, and those behind the last missing one from its end; the places of others are
    unknown.
    """
    end_record = record.first_record + record.record_count
    within = column(chunks, "first_record") >= record.first_record
    within &= end_records(chunks) <= end_record
    mine, positions = positions_of(record, chunks[within])
    return Places(
        array("Q", mine["first_record"].tobytes()),
        array("I", positions.astype(np.uint32).tobytes()),
        array("Q", digests_of(mine).tobytes()),
    )


def positions_of(record: SegmentRecord, chunks: Headers) -> tuple[Headers, Column]:
    """Return the chunks whose places are known, and their positions."""
    if len(chunks) and len(chunks) == record.chunk_count:
        for from_start in (True, False):
            positions, end = lay_out(chunks, from_start=from_start)
            if end == record.length:
                return chunks, positions
    sizes, firsts, ends = chunk_bytes(chunks), column(chunks, "first_record"), end_records(chunks)
    end_record = record.first_record + record.record_count
    holes = np.flatnonzero(np.append(record.first_record, ends) != np.append(firsts, end_record))
    head, tail = (int(holes[0]), int(holes[-1])) if len(holes) else (len(chunks), len(chunks))
    before = np.cumsum(sizes[:head]) - sizes[:head]
    behind = record.length - np.cumsum(sizes[tail:][::-1])[::-1]
    return np.concatenate((chunks[:head], chunks[tail:])), np.concatenate((before, behind))
