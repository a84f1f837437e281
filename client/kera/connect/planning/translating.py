"""Finds where in a stream a copy has put the records from an offset of a topic on: the chunk of the copy, by sequence.

It uses the rounds of a journal, without I/O. Offsets of Kafka have gaps (marks of transactions, compaction), so that
they do not count records: a round has the offsets of its pieces, and the offset with which each of its chunks begins.
The answer is a chunk that begins at or before the offset. So no record is skipped, and only records of that chunk are
read again.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from kera.connect.errors import Untranslatable
from kera.connect.planning.rounds import Round, Written
from kera.connect.planning.slicing import ends_of_slices


class CopiedChunk(NamedTuple):
    """A chunk of a copy, in the streamlet with the partition's number."""

    sequence: int
    records_before_max: int
    """Maximum number of the chunk's records that come before the offset."""


class OffsetTable:
    """Finds the chunk for one offset of each partition. Rounds are added in their order."""

    def __init__(self, offsets: Mapping[int, int]) -> None:
        """`offsets`: the offset of the first unread record, per partition."""
        self._offsets = dict(offsets)
        self._first: dict[int, int] = {}
        """The offset with which the rounds begin, per partition."""
        self._found: dict[int, Written] = {}
        self._last: Round | None = None

    def add(self, added: Round) -> None:
        """Add the next round of the journal."""
        self._last = added
        for written in added.pieces:
            partition, start, end = int(written.span.part), written.span.start, written.span.end
            self._first.setdefault(partition, start)
            offset = self._offsets.get(partition)
            if offset is not None and start <= offset < end:
                self._found[partition] = written

    def copied_to(self, partition: int) -> int | None:
        """Return the offset after the last copied record; None: no record of the partition is copied."""
        place = None if self._last is None else self._last.places.get(str(partition))
        return None if place is None else int(place)

    def chunks_of(self, partition: int) -> int:
        """Return how many chunks the copy has for the partition's streamlet, including those of its last round."""
        return 0 if self._last is None else self._last.sequences.get(partition, 0)

    def find(self, partition: int) -> CopiedChunk:
        """Return the chunk at which to continue, for an offset before `copied_to`. Raises `Untranslatable`."""
        offset = self._offsets[partition]
        written = self._found.get(partition)
        if written is None:
            first = self._first.get(partition)
            known = "nothing of this partition" if first is None else f"offsets from {first} on"
            raise Untranslatable(
                f"the journal of the copy no longer has offset {offset} of partition {partition}: it has {known}. Set"
                " the cursors by time or offset instead, with kera group reset",
                partition=partition,
                offset=offset,
            )
        if written.keyless is not None or written.chunks.keys() != {partition}:
            raise Untranslatable(
                f"the copy did not put partition {partition} into streamlet {partition}, as the stream has another"
                " number of streamlets than the topic has partitions: its offsets have no place in the stream. Set the"
                " cursors by time instead, with kera group reset --to",
                partition=partition,
            )
        return _chunk_of(written, partition, offset)


def _chunk_of(written: Written, partition: int, offset: int) -> CopiedChunk:
    span, (first, count) = written.span, written.chunks[partition]
    ends = ends_of_slices(span.rows, count)
    starts = list(written.starts)
    if not starts:
        consecutive = span.end - span.start == span.rows
        # Without the offsets of chunks, and with gaps between offsets, only the piece's first chunk is certain.
        starts, ends = (
            ([span.start + end for end in ends[:-1]], ends) if consecutive else ([span.start], [0, span.rows])
        )
    at = max(0, bisect.bisect_right(starts, offset) - 1)
    sizes = [end - start for start, end in pairwise(ends)]
    return CopiedChunk(first + at, max(0, min(sizes[at], offset - starts[at])))
