"""How what backups have of a broker that is gone goes together (thesis 6.6). Pure.

    headers of chunks, in any order, each perhaps more than once ──Merge──► per entry and segment the runs of chunks,
                                                                            and what is cut

* The same chunk may be in several virtual segments: it is taken once. Two chunks in one place that differ are a
  conflict, which no failure of backups explains; of those the one of the later launch is taken.
* A chunk's place is what decides: within an entry chunks are in the order of ordinals. Those without records, which
  brokers took once, have the ordinal of the chunk that follows them; they are in the log like any other, before it,
  since what comes behind them in their segment lies where it lies.
* Ordinals of an entry have no gap. What is behind a hole was never acknowledged, and is cut; unless it is known to have
  been: because its virtual segment was closed, its segment tells of a durable head, or it is known that the entry went
  on behind the hole, as where it was handed over. Then what was there has been removed by retention (and what is before
  it is only left because its virtual segment is), or more backups are gone than the stream has replicas. Who recovers
  and knows where entries start says so.
* In memory there are the headers, 128 bytes per chunk, and what sorts them; never the chunks. What is done is done to
  all of them at once, and one by one only around holes and conflicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kera.broker.records import SegmentAddress
from kera.core.base.ids import EntryId
from kera.core.format.chunk import ChunkHeader
from kera.core.format.header_table import (
    Column,
    Headers,
    Rows,
    column,
    differs_from_before,
    end_records,
    parted,
    table,
)

ENTRY = ("stream_id", "streamlet_id", "entry")
SEGMENT = (*ENTRY, "group_id", "segment_id")

_LOW_BITS = 32


class MergedRun(NamedTuple):
    """Chunks that follow each other in one segment."""

    address: SegmentAddress
    chunks: Headers


class Cut(NamedTuple):
    """Chunks behind a hole, that were never acknowledged: not part of what is recovered."""

    entry: EntryId
    end_record: int
    """Where the entry ends instead."""
    chunks: Headers


@dataclass(slots=True)
class Recovered:
    """The outcome of reading."""

    runs: list[MergedRun] = field(default_factory=list)
    """The runs of all entries, in the order of the log."""
    cuts: list[Cut] = field(default_factory=list)
    sure: dict[EntryId, int] = field(default_factory=dict)
    """By entry: ordinal up to which as many backups had all as were promised, as far as that was seen."""
    removed: list[Headers] = field(default_factory=list)
    """Chunks before the start of their entry: they were in the log once, and tell how far their producers had got."""


class Origin(NamedTuple):
    """The part of a segment that a source has."""

    source: int
    address: SegmentAddress
    taken: bool
    """Chunks that were taken from there; else ones that others have, too, or that lost a conflict."""


def digest_of(header: ChunkHeader) -> int:
    """A digest of all its checksums: two verified chunks with the same digest have the same bytes."""
    high = header.header_crc32c ^ header.payload_crc32c
    return high << _LOW_BITS | header.payload_crc32c ^ header.placement_crc32c


def digests_of(headers: Headers) -> npt.NDArray[np.uint64]:
    """See `digest_of`."""
    header, payload, placement = (
        headers[f"{name}_crc32c"].astype(np.uint64) for name in ("header", "payload", "placement")
    )
    return (header ^ payload) << np.uint64(_LOW_BITS) | payload ^ placement


def address_at(headers: Headers, row: int) -> SegmentAddress:
    """Where a chunk belongs."""
    return SegmentAddress(*(int(headers[name][row]) for name in SEGMENT))


class _Chunks(NamedTuple):
    """Chunks that have come, and how."""

    headers: Headers
    closed: Rows
    sure: Rows
    sources: Column


NOTHING = _Chunks(table(), np.zeros(0, np.bool_), np.zeros(0, np.bool_), np.zeros(0, np.int64))


class Merge:
    """Puts the chunks of all virtual segments in order; they may come in any order, and more than once."""

    def __init__(self, starts: Mapping[EntryId, int] | None = None, ends: Mapping[EntryId, int] | None = None) -> None:
        """`starts`: where entries start, as ordinals of records; of others, what is found first is the start.

        `ends`: where entries were once known to end. What is missing before that is lost or was removed, which says
        nothing of what is there.
        """
        self._starts = starts or {}
        self._ends = ends or {}
        self._came: list[_Chunks] = []
        self._taken: Rows | None = None
        """If they are all in order, by entry and ordinal: which are taken. Those are before others of their ordinal."""

    def add(self, headers: Headers, *, closed: bool, source: int = 0, sure: bool = True) -> None:
        """Take note of placed and verified chunks.

        `closed`: they are within a virtual segment that was closed, so they were acknowledged. `source`: see `Origin`.
        `sure`: as many backups have them as were promised.
        """
        if len(headers):
            count = len(headers)
            rows = np.full(count, closed), np.full(count, closed or sure), np.full(count, source)
            self._came.append(_Chunks(headers.copy(), *rows))
            self._taken = None

    def origins(self) -> set[Origin]:
        """Where chunks came from."""
        chunks, taken = self._ordered()
        begins = differs_from_before(chunks.headers, *SEGMENT)
        begins[1:] |= chunks.sources[1:] != chunks.sources[:-1]
        begins[1:] |= taken[1:] != taken[:-1]
        return {
            Origin(int(chunks.sources[row]), address_at(chunks.headers, row), bool(taken[row]))
            for row in np.flatnonzero(begins).tolist()
        }

    def segments(self) -> dict[SegmentAddress, Headers]:
        """All that have come and were not dropped, by segment, each in the order of its ordinals."""
        chunks, taken = self._ordered()
        headers = _only(chunks.headers, taken)
        if not _ascends(headers):
            headers = headers[np.lexsort([headers[name] for name in reversed(SEGMENT)])]
        parts = parted(headers, differs_from_before(headers, *SEGMENT))
        return {address_at(part, 0): part for part in parts}

    def finish(self) -> Recovered:
        """The runs of all chunks that belong to the log, and what is not part of it."""
        result = Recovered()
        chunks, taken = self._ordered()
        bounds = [*np.flatnonzero(differs_from_before(chunks.headers, *ENTRY)).tolist(), len(taken)]
        for start, end in pairwise(bounds):
            headers = chunks.headers[start:end]
            entry = EntryId(*address_at(headers, 0)[:3])
            closed = _only(headers, chunks.closed[start:end])
            acknowledged = int(end_records(closed).max(initial=self._ends.get(entry, 0)))
            sure = _only(headers, chunks.sure[start:end])
            result.sure[entry] = int(end_records(sure).max(initial=acknowledged))
            self._entry(entry, _in_order(_only(headers, taken[start:end])), acknowledged, result)
        return result

    def _ordered(self) -> tuple[_Chunks, Rows]:
        if self._taken is None:
            came, self._came = self._came, []
            chunks = _Chunks(*map(np.concatenate, zip(*came, strict=True))) if came else NOTHING
            del came  # there may be gigabytes of it
            # Of the same ordinal the latest launch comes first, and of that whatever came first: the sort is stable.
            headers = chunks.headers
            empty = headers["record_count"] == 0
            keys = [~headers["broker_epoch"], headers["first_record"], *(headers[name] for name in reversed(ENTRY))]
            if empty.any():
                keys[1:1] = _order_of_empty(headers, empty)
            order = np.lexsort([key for key in keys if len(key) and (key != key[0]).any()] or keys)
            chunks = _Chunks(headers[order], chunks.closed[order], chunks.sure[order], chunks.sources[order])
            self._came = [chunks]
            self._taken = differs_from_before(chunks.headers, *ENTRY, "first_record")
            if empty.any():
                self._taken |= _first_of_empty(chunks.headers)
        return self._came[0], self._taken

    def _entry(self, entry: EntryId, chunks: Headers, acknowledged: int, result: Recovered) -> None:
        begins = np.ones(len(chunks), dtype=np.bool_)
        begins[1:] = end_records(chunks)[:-1] != column(chunks, "first_record")[1:]
        stretches = parted(chunks, begins)
        start = self._starts.get(entry)
        if start is not None:
            # What retention has removed may be left, in virtual segments that others need: it is not part of the log.
            left = [_end_record(each) > start or _first_record(each[-1:]) >= start for each in stretches]
            result.removed += [each for each, is_left in zip(stretches, left, strict=True) if not is_left]
            stretches = [each for each, is_left in zip(stretches, left, strict=True) if is_left]
        if not stretches:
            return
        from_start = start is None or _first_record(stretches[0]) <= start
        known = [from_start or _counts(None, stretches[0], acknowledged)]
        known += [_counts(before, after, acknowledged) for before, after in pairwise(stretches)]
        kept = max((at for at, counts in enumerate(known, 1) if counts), default=0)
        for stretch in stretches[:kept]:
            parts = parted(stretch, differs_from_before(stretch, *SEGMENT))
            result.runs += [MergedRun(address_at(part, 0), part) for part in parts]
        if kept < len(stretches):
            end = _end_record(stretches[kept - 1]) if kept else start or 0
            result.cuts.append(Cut(entry, end, np.concatenate(stretches[kept:])))


def _order_of_empty(headers: Headers, empty: Rows) -> list[npt.NDArray[np.uint64]]:
    """Keys that put chunks without records before the one with their ordinal, by their places; the last counts most.

    A header does not say where in its segment a chunk is; its durable head grows with that.
    """
    none = np.uint64(0)
    digests = np.where(empty, digests_of(headers), none)
    places = (
        np.where(empty, headers[name], 0).astype(np.uint64) for name in ("durable_head", "segment_id", "group_id")
    )
    return [digests, *places, (~empty).astype(np.uint64)]


def _first_of_empty(headers: Headers) -> Rows:
    """For chunks in that order: True for those without records that did not come before, and for the chunks behind
    such.
    """
    empty = headers["record_count"] == 0
    digests = digests_of(headers)
    first = np.ones(len(headers), dtype=np.bool_)
    first[1:] = np.where(empty[1:], ~empty[:-1] | (digests[1:] != digests[:-1]), empty[:-1])
    return first


def _only(headers: Headers, rows: Rows) -> Headers:
    return headers if rows.all() else headers[rows]


def _first_record(chunks: Headers) -> int:
    return int(chunks["first_record"][0])


def _end_record(chunks: Headers) -> int:
    return int(end_records(chunks[-1:])[0])


def _ascends(headers: Headers) -> bool:
    """Whether segments of each entry come in the order of the log."""
    same = ~differs_from_before(headers, *ENTRY)[1:]
    group, segment = headers["group_id"], headers["segment_id"]
    backwards = (group[1:] < group[:-1]) | ((group[1:] == group[:-1]) & (segment[1:] < segment[:-1]))
    return not (same & backwards).any()


def _in_order(chunks: Headers) -> Headers:
    """Chunks of an entry whose ordinals do not overlap and whose positions grow, of those in the order of ordinals."""
    ends = end_records(chunks)
    if _ascends(chunks) and (column(chunks, "first_record")[1:] >= ends[:-1]).all():
        return chunks
    kept: list[int] = []
    firsts, epochs = column(chunks, "first_record").tolist(), column(chunks, "broker_epoch").tolist()
    places = list(zip(chunks["group_id"].tolist(), chunks["segment_id"].tolist(), strict=True))
    for row in range(len(chunks)):
        while kept and (firsts[row] < ends[kept[-1]] or places[row] < places[kept[-1]]):
            if epochs[row] <= epochs[kept[-1]]:
                break
            kept.pop()
        else:
            kept.append(row)
    return chunks[kept]


def _counts(before: Headers | None, after: Headers, acknowledged: int) -> bool:
    """Whether something behind a hole is known to have been acknowledged; `before` and `after`: what is around it.

    `acknowledged`: up to there everything was. So a hole that ends there is no end of what was written.
    """
    if _first_record(after) <= acknowledged:
        return True
    tells = after["durable_head"] > 0
    if before is not None:
        # In the segment in which the hole is, a durable head may be one of before it.
        group, segment = before["group_id"][-1], before["segment_id"][-1]
        tells &= (after["group_id"] > group) | ((after["group_id"] == group) & (after["segment_id"] > segment))
    return bool(tells.any())
