"""Merges what backups have of a lost broker's data (thesis 6.6). Pure.

    headers of chunks, in any order, each perhaps more than once ──Merge──► per entry and segment the runs of chunks,
                                                                            and the chunks that are cut off

* The same chunk may be in several virtual segments: it is taken once. Two different chunks in one place are a conflict,
  which no failure of backups explains; the chunk of the later launch is taken.
* The place of a chunk decides: within an entry, chunks are in the order of ordinals. Chunks without records, which
  brokers accepted once, have the ordinal of the chunk that follows them. They are in the log like any other, before
  that chunk, because the positions of the chunks behind them in their segment include them.
* The ordinals of an entry have no gap. Chunks behind a hole were never acknowledged, and are cut off, unless there is
  evidence that they were acknowledged: their virtual segment was closed, their segment names a durable head, or the
  entry is known to have continued behind the hole, as after a handover. Then either retention has removed the missing
  chunks (and those before the hole are only left because their virtual segment is), or more backups are lost than the
  stream has replicas. A caller that knows the starts of entries passes them.
* Memory holds the headers, 128 bytes per chunk, and their sort keys, never the chunks. All headers are processed at
  once, and one by one only around holes and conflicts.
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
    """Consecutive chunks of one segment."""

    address: SegmentAddress
    chunks: Headers


class Cut(NamedTuple):
    """Chunks behind a hole that were never acknowledged, and are not recovered."""

    entry: EntryId
    end_record: int
    """The ordinal at which the entry ends instead."""
    chunks: Headers


@dataclass(slots=True)
class Recovered:
    """The outcome of a merge."""

    runs: list[MergedRun] = field(default_factory=list)
    """The runs of all entries, in the order of the log."""
    cuts: list[Cut] = field(default_factory=list)
    sure: dict[EntryId, int] = field(default_factory=dict)
    """By entry: the ordinal up to which all promised replicas were seen."""
    removed: list[Headers] = field(default_factory=list)
    """Chunks before the start of their entry: they were in the log once, and show the progress of their producers."""


class Origin(NamedTuple):
    """A source that has chunks of a segment."""

    source: int
    address: SegmentAddress
    taken: bool
    """Whether chunks were taken from this source; if not, other sources have them, too, or they lost a conflict."""


def digest_of(header: ChunkHeader) -> int:
    """Return a digest of all checksums of a chunk: two verified chunks with the same digest have the same bytes."""
    high = header.header_crc32c ^ header.payload_crc32c
    return high << _LOW_BITS | header.payload_crc32c ^ header.placement_crc32c


def digests_of(headers: Headers) -> npt.NDArray[np.uint64]:
    """Return the digests of chunks, see `digest_of`."""
    header, payload, placement = (
        headers[f"{name}_crc32c"].astype(np.uint64) for name in ("header", "payload", "placement")
    )
    return (header ^ payload) << np.uint64(_LOW_BITS) | payload ^ placement


def address_at(headers: Headers, row: int) -> SegmentAddress:
    """Return the segment of a chunk."""
    return SegmentAddress(*(int(headers[name][row]) for name in SEGMENT))


class _Chunks(NamedTuple):
    """Headers of chunks, with the arguments of `Merge.add` for each."""

    headers: Headers
    closed: Rows
    sure: Rows
    sources: Column


NOTHING = _Chunks(table(), np.zeros(0, np.bool_), np.zeros(0, np.bool_), np.zeros(0, np.int64))


class Merge:
    """Puts the chunks of all virtual segments in order; they may come in any order, and more than once."""

    def __init__(self, starts: Mapping[EntryId, int] | None = None, ends: Mapping[EntryId, int] | None = None) -> None:
        """`starts`: the ordinals at which entries start; an entry without one starts at its first chunk found.

        `ends`: the ordinals at which entries were known to end once. Chunks missing before that are lost or were
        removed, which is no reason to cut off the others.
        """
        self._starts = starts or {}
        self._ends = ends or {}
        self._came: list[_Chunks] = []
        self._taken: Rows | None = None
        """The chunks that are taken, if all are sorted by entry and ordinal; None: they have to be sorted."""

    def add(self, headers: Headers, *, closed: bool, source: int = 0, sure: bool = True) -> None:
        """Add placed and verified chunks.

        `closed`: their virtual segment was closed, so they were acknowledged. `source`: see `Origin`. `sure`: they have
        all promised replicas.
        """
        if len(headers):
            count = len(headers)
            rows = np.full(count, closed), np.full(count, closed or sure), np.full(count, source)
            self._came.append(_Chunks(headers.copy(), *rows))
            self._taken = None

    def origins(self) -> set[Origin]:
        """Return the origins of all chunks."""
        chunks, taken = self._ordered()
        begins = differs_from_before(chunks.headers, *SEGMENT)
        begins[1:] |= chunks.sources[1:] != chunks.sources[:-1]
        begins[1:] |= taken[1:] != taken[:-1]
        return {
            Origin(int(chunks.sources[row]), address_at(chunks.headers, row), bool(taken[row]))
            for row in np.flatnonzero(begins).tolist()
        }

    def segments(self) -> dict[SegmentAddress, Headers]:
        """Return the chunks that are taken, by segment, each in the order of ordinals."""
        chunks, taken = self._ordered()
        headers = _only(chunks.headers, taken)
        if not _ascends(headers):
            headers = headers[np.lexsort([headers[name] for name in reversed(SEGMENT)])]
        parts = parted(headers, differs_from_before(headers, *SEGMENT))
        return {address_at(part, 0): part for part in parts}

    def finish(self) -> Recovered:
        """Return the runs of all chunks that belong to the log, and the chunks that do not."""
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
            del came  # it may be gigabytes
            # For each ordinal, the latest launch comes first, then the chunk that was added first: the sort is stable.
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
            # Chunks that retention has removed may be left in virtual segments that still have other chunks.
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
    """Return sort keys, the last one first, that put chunks without records before the one with their ordinal.

    A header does not have the chunk's offset in the segment, but its durable head grows with it.
    """
    none = np.uint64(0)
    digests = np.where(empty, digests_of(headers), none)
    places = (
        np.where(empty, headers[name], 0).astype(np.uint64) for name in ("durable_head", "segment_id", "group_id")
    )
    return [digests, *places, (~empty).astype(np.uint64)]


def _first_of_empty(headers: Headers) -> Rows:
    """Return which chunks, in that order, are taken: new ones without records, and each chunk behind such."""
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
    """Whether the chunks of each entry have their segments in the order of the log."""
    same = ~differs_from_before(headers, *ENTRY)[1:]
    group, segment = headers["group_id"], headers["segment_id"]
    backwards = (group[1:] < group[:-1]) | ((group[1:] == group[:-1]) & (segment[1:] < segment[:-1]))
    return not (same & backwards).any()


def _in_order(chunks: Headers) -> Headers:
    """Return the chunks of an entry, sorted by ordinals, without those that overlap or whose segments go back."""
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
    """Whether chunks `after` a hole are known to have been acknowledged; `before`: the chunks before the hole.

    `acknowledged`: the ordinal up to which all chunks were acknowledged; so the log did not end at a hole before it.
    """
    if _first_record(after) <= acknowledged:
        return True
    tells = after["durable_head"] > 0
    if before is not None:
        # In the segment with the hole, a durable head may lie before the hole.
        group, segment = before["group_id"][-1], before["segment_id"][-1]
        tells &= (after["group_id"] > group) | ((after["group_id"] == group) & (after["segment_id"] > segment))
    return bool(tells.any())
