"""Finds the chunks in memory that claims to be a segment: after a restart, after a load from disk, and offline.

Every chunk names its segment, so remains of an earlier segment in a slot or a file never pass for this segment's. The
durable heads in later chunks (`ChunkHeader.durable_head`) distinguish damage from an unfinished end:

* Bytes that are not a chunk, before the durable head that a later chunk names, are **damage**: a hole of exactly the
  chunk that was there. The chunks behind it are served.
* Bytes that are not a chunk behind that point are a **torn tail**: an unfinished write, which was never acknowledged.
  The segment ends before them, at a chunk boundary.

Pure: no I/O.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from kera.broker.records import Hole, SegmentAddress
from kera.core.errors import CorruptChunk
from kera.core.format.chunk import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    MAGIC,
    ChunkHeader,
    verify_header,
    verify_payload,
)
from kera.core.format.newer_format import unknown_version

_MAGIC = int.from_bytes(MAGIC, "little")


@dataclass(slots=True)
class SegmentScan:
    """The content of a segment."""

    end: int = 0
    """End of the last chunk or hole, in bytes from the segment's start."""
    chunk_ends: array[int] = field(default_factory=lambda: array("I"))
    """The ends of all chunks and holes, ascending."""
    holes: list[Hole] = field(default_factory=list)
    torn_bytes: int = 0
    """Bytes that were cut off behind `end`."""
    headers: list[ChunkHeader] = field(default_factory=list)
    """Headers of the whole chunks, in order."""
    address: SegmentAddress | None = None
    """The segment that the chunks name; None if there are no chunks."""
    unknown_version: int = 0
    """Format version of a chunk that a newer program has written, and that counts as damaged or torn here; 0: none."""

    @property
    def record_count(self) -> int:
        """The number of records in the whole chunks."""
        return sum(header.record_count for header in self.headers)


def address_of(header: ChunkHeader) -> SegmentAddress:
    """Return the segment that a placed chunk names."""
    return SegmentAddress(header.stream_id, header.streamlet_id, header.entry, header.group_id, header.segment_id)


def scan_segment(
    view: memoryview,
    *,
    address: SegmentAddress | None = None,
    length: int | None = None,
    durable: int = 0,
    finished: bool = True,
) -> SegmentScan:
    """Verify all chunks from the start of `view`, including every checksum.

    `address`: the segment whose chunks count; None: the first whole chunk names it. `length`: chunks are known to have
    filled the segment up to here, so everything else is damage; None: find the end. `durable`: the segment was complete
    up to here, whatever chunks say. `finished`: chunks prove that the bytes before them were durable; if False, the
    segment ends at the first bytes that are not a chunk.
    """
    limit = len(view) if length is None else length
    result = SegmentScan(address=address)
    found: list[tuple[int, ChunkHeader]] = []
    bad: list[Hole] = []
    at = 0
    while at < limit:
        try:
            header = _chunk_at(view, at, limit, result.address)
        except CorruptChunk as error:
            reason = error.message
            result.unknown_version = result.unknown_version or unknown_version(error)
        else:
            if result.address is None:
                result.address = address_of(header)
            found.append((at, header))
            at += header.chunk_bytes
            continue
        following = _resume(view, at, limit, result.address)
        if following is None:
            if length is not None:
                bad.append(Hole(at, limit, reason))
            else:
                known = min(durable, limit) if finished else 0
                if at < known:
                    bad.append(Hole(at, known, reason))
                result.torn_bytes = _used_bytes(view[max(at, known) : limit])
            break
        bad.append(Hole(at, following, reason))
        at = following
    if length is None and bad:
        if finished:
            durable = max([durable, *(header.durable_head for _, header in found)])
        torn = next((hole for hole in bad if hole.start >= durable), None)
        if torn is not None:
            result.torn_bytes += at - torn.start
            found = [item for item in found if item[0] < torn.start]
            bad = [hole for hole in bad if hole.start < torn.start]
    result.holes = bad
    result.headers = [header for _, header in found]
    ends = [start + header.chunk_bytes for start, header in found] + [hole.end for hole in bad]
    result.chunk_ends = array("I", sorted(ends))
    result.end = result.chunk_ends[-1] if ends else 0
    return result


def _chunk_at(view: memoryview, at: int, limit: int, address: SegmentAddress | None) -> ChunkHeader:
    """Return the header of the whole chunk at `at`. Raises `CorruptChunk`."""
    header = verify_header(view[:limit], at)
    if not header.placed or (address is not None and address_of(header) != address):
        raise CorruptChunk(f"the chunk at offset {at} belongs to another segment", offset=at)
    if at + header.chunk_bytes > limit:
        raise CorruptChunk(f"the chunk at offset {at} is cut short", offset=at)
    verify_payload(view, at, header)
    return header


def _resume(view: memoryview, at: int, limit: int, address: SegmentAddress | None) -> int | None:
    """Return where the next chunk of this segment starts behind `at`; None if there is none."""
    usable = limit - limit % ALIGNMENT_BYTES
    words = np.frombuffer(view[:usable], dtype="<u4")[:: ALIGNMENT_BYTES // 4]
    first = at // ALIGNMENT_BYTES + 1
    for index in np.flatnonzero(words[first:] == _MAGIC):
        start = (first + int(index)) * ALIGNMENT_BYTES
        if start + HEADER_BYTES > limit:
            break
        try:
            header = verify_header(view[:limit], start)
        except CorruptChunk:
            continue
        if header.placed and (address is None or address_of(header) == address):
            return start
    return None


def _used_bytes(rest: memoryview) -> int:
    """Return the length of `rest` without its trailing zeros."""
    used = np.flatnonzero(np.frombuffer(rest, dtype=np.uint8))
    return int(used[-1]) + 1 if len(used) else 0
