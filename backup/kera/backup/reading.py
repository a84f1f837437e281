"""Chunks of a replica, for whom recovers: verified, filtered, whole, and no more than asked for.

Damage (bytes that are no chunk, or one that does not match its checksums) is skipped and told, never served: what
follows it is found by the next header that is whole. Runs on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kera.backup.frames import Layout
from kera.backup.log_file import Disk
from kera.core.blocks import BLOCK_BYTES, block_ceiling, block_floor
from kera.core.chunk import ALIGNMENT_BYTES, HEADER_BYTES, MAGIC, ChunkHeader, verify_header, verify_payload
from kera.core.errors import CorruptChunk

WINDOW_BYTES = 1 << 20
"""Read from a disk in one go, at least."""

Window = Callable[[int, int], memoryview]
"""The bytes of a replica from an offset on, at least as many as asked for, unless it ends."""
Streamlets = Mapping[int, frozenset[int]]
"""Streamlets by stream; an empty set: all of it. No stream at all: everything."""

NONE_OF_THEM: Streamlets = {-1: frozenset()}
"""To look at all chunks and take none."""

_MAGIC = int.from_bytes(MAGIC, "little")


@dataclass(slots=True)
class Walk:
    """What was found."""

    chunks: bytearray = field(default_factory=bytearray)
    next_offset: int = 0
    """A chunk that is whole begins there, or the replica ends."""
    damaged: list[int] = field(default_factory=list)
    """Where damage begins that was come upon."""
    ends: list[int] = field(default_factory=list)
    """Of all chunks that are whole, wanted or not."""


def memory_window(view: memoryview, length: int) -> Window:
    """Of a replica in memory."""
    return lambda offset, _size: view[offset:length]


def disk_window(disk: Disk, layout: Layout, index: int, length: int, buffer: memoryview) -> Window:
    """Of a replica in a frame, by way of `buffer`, which has room for any replica. Raises ``OSError``."""
    start = layout.offset(index) + BLOCK_BYTES

    def window(offset: int, size: int) -> memoryview:
        begin, end = block_floor(offset), block_ceiling(min(offset + size, length))
        count = disk.read(start + begin, buffer[: end - begin])
        buffer[count : end - begin] = bytes(end - begin - count)  # a file that was cut short: damage
        return buffer[offset - begin : min(end, length) - begin]

    return window


def walk(
    window: Window, length: int, *, offset: int = 0, bytes_max: int = 1 << 62, streamlets: Streamlets | None = None
) -> Walk:
    """Go through the chunks from `offset` to `length`; stop before one that is wanted and passes `bytes_max`.

    A single chunk larger than that is still returned, alone.
    """
    result = Walk(next_offset=offset)
    view, base = memoryview(b""), offset
    at, searching = offset, False
    while at < length:
        have = base + len(view) - at
        if have < min(HEADER_BYTES, length - at):
            view, base = window(at, min(max(WINDOW_BYTES, bytes_max), length - at)), at
        try:
            header = verify_header(view, at - base)
            end = at + header.chunk_bytes
            if not header.placed or end > length:
                raise CorruptChunk(f"no chunk of this replica at offset {at}", offset=at)
            if end > base + len(view):
                view, base = window(at, max(WINDOW_BYTES, end - at)), at
            following = end
            verify_payload(view, at - base, header)
        except CorruptChunk:
            if not searching and (at > offset or offset == 0):
                result.damaged.append(at)
            resumed = _end_of_damaged(view, base, at, length)
            searching = resumed is None
            at = result.next_offset = _next_header(view, base, at, length) if resumed is None else resumed
            continue
        searching = False
        if _wanted(header, streamlets):
            if result.chunks and len(result.chunks) + following - at > bytes_max:
                return result
            result.chunks += view[at - base : following - base]
        result.ends.append(following)
        at = result.next_offset = following
    return result


def _wanted(header: ChunkHeader, streamlets: Streamlets | None) -> bool:
    if not streamlets:
        return True
    numbers = streamlets.get(header.stream_id)
    return numbers is not None and (not numbers or header.streamlet_id in numbers)


def _end_of_damaged(view: memoryview, base: int, at: int, length: int) -> int | None:
    """Where the damaged chunk at `at` ends, if its header is whole and says so."""
    try:
        end = at + verify_header(view, at - base).chunk_bytes
    except CorruptChunk:
        return None
    return end if end <= length else None


def _next_header(view: memoryview, base: int, at: int, length: int) -> int:
    """Where the next chunk may start behind `at`: at a header that is whole, or where more has to be looked at."""
    end = base + len(view)
    first = at + ALIGNMENT_BYTES
    rest = view[first - base :]
    usable = len(rest) - len(rest) % ALIGNMENT_BYTES
    words = np.frombuffer(rest[:usable], dtype="<u4")[:: ALIGNMENT_BYTES // 4]
    for index in np.flatnonzero(words == _MAGIC):
        start = first + int(index) * ALIGNMENT_BYTES
        if start + HEADER_BYTES > end:
            return min(start, length)
        try:
            if verify_header(view, start - base).placed:
                return start
        except CorruptChunk:
            continue
    return min(first + usable, length)
