"""Reads chunks of a replica for recoveries: verified, filtered, whole, and no more than requested.

Damage (bytes that are not a chunk, or a chunk that does not match its checksums) is skipped and reported, never served;
the next intact header shows where chunks continue. If only headers are requested, payloads are not read; if only chunks
of some streamlets are requested, payloads of others are not read. So on disk, large ones are skipped. Blocks that were
read stay in the buffer, and are not read again. Runs on threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kera.backup.frames import Layout
from kera.backup.log_file import BlockDisk
from kera.core.base.blocks import BLOCK_BYTES, block_ceiling
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

WINDOW_BYTES = 1 << 20
"""Size of one read from a disk, if all chunks are wanted."""
WINDOW_GROWTH = 4
"""If only some chunks are wanted, the first read is a block, and each further one is this many times as large."""
SKIPPED_BYTES_MIN = 64 << 10
"""Chunks from this size on are skipped on disk if only their headers count: reading them takes longer than a seek."""

Window = Callable[[int, int], memoryview]
"""Returns the bytes of a replica from an offset on, at least as many as requested, unless the replica ends."""
Streamlets = Mapping[int, frozenset[int]]
"""Streamlets by stream; an empty set: all of the stream. No stream at all: everything."""

NONE_OF_THEM: Streamlets = {-1: frozenset()}
"""Selects no chunk: a walk then checks all chunks and returns none."""

_MAGIC = int.from_bytes(MAGIC, "little")


@dataclass(slots=True)
class Walk:
    """The findings of a walk."""

    chunks: bytearray = field(default_factory=bytearray)
    next_offset: int = 0
    """Where to continue: a whole chunk begins there, or the replica ends."""
    damaged: list[int] = field(default_factory=list)
    """Offsets at which damage begins."""
    ends: list[int] = field(default_factory=list)
    """Ends of all whole chunks, wanted or not."""
    unknown_version: int = 0
    """Format version of a chunk that a newer program has written, and that counts as damaged here; 0: none found."""


def memory_window(view: memoryview, length: int) -> Window:
    """Return the window of a replica in memory."""
    return lambda offset, _size: view[offset:length]


def disk_window(
    disk: BlockDisk, layout: Layout, index: int, length: int, buffer: memoryview, here: bytearray | None = None
) -> Window:
    """Return the window of a replica in a frame, which reads into `buffer`, large enough for any replica.

    `here`: a byte for each block of the buffer, 1 if it is read already; None: none is. The window raises ``OSError``.
    """
    start = layout.offset(index) + BLOCK_BYTES
    known = bytearray(len(buffer) // BLOCK_BYTES) if here is None else here

    def window(offset: int, size: int) -> memoryview:
        last = block_ceiling(min(offset + size, length)) // BLOCK_BYTES
        block = known.find(0, offset // BLOCK_BYTES, last)
        while block >= 0:
            following = known.find(1, block, last)
            stop = following if following >= 0 else last
            begin, end = block * BLOCK_BYTES, stop * BLOCK_BYTES
            count = disk.read(start + begin, buffer[begin:end])
            buffer[begin + count : end] = bytes(end - begin - count)  # a file that was cut short: damage
            known[block:stop] = b"\1" * (stop - block)
            block = known.find(0, stop, last)
        return buffer[offset : min(last * BLOCK_BYTES, length)]

    return window


def walk(
    window: Window,
    length: int,
    *,
    offset: int = 0,
    bytes_max: int = 1 << 62,
    streamlets: Streamlets | None = None,
    headers_only: bool = False,
    wanted_only: bool = False,
    window_bytes: int = WINDOW_BYTES,
) -> Walk:
    """Go through the chunks from `offset` to `length`; stop before a wanted chunk that would exceed `bytes_max`.

    A single chunk larger than that is still returned, alone. `headers_only`: return only the verified header of each
    chunk. `wanted_only`: verify only the headers of chunks that are not wanted. `window_bytes`: maximum of one read,
    unless a chunk needs more.
    """
    result = Walk(next_offset=offset)
    view, base = memoryview(b""), offset
    at, searching = offset, False
    choosy = headers_only or (wanted_only and bool(streamlets))
    ahead = HEADER_BYTES if choosy else window_bytes
    while at < length:
        have = base + len(view) - at
        if have < min(HEADER_BYTES, length - at):
            view, base = window(at, ahead), at
            ahead = min(max(ahead, BLOCK_BYTES) * WINDOW_GROWTH, window_bytes)
        try:
            header = verify_header(view, at - base)
            end = at + header.chunk_bytes
            if not header.placed or end > length:
                raise CorruptChunk(f"no chunk of this replica at offset {at}", offset=at)
            wanted = _wanted(header, streamlets)
            if not headers_only and (wanted or not wanted_only):
                if end > base + len(view):
                    view, base = window(at, max(ahead, end - at + HEADER_BYTES)), at  # and the next header
                    ahead = min(max(ahead, BLOCK_BYTES) * WINDOW_GROWTH, window_bytes)
                verify_payload(view, at - base, header)
            elif end - at >= SKIPPED_BYTES_MIN:
                ahead = HEADER_BYTES
            following, kept = end, HEADER_BYTES if headers_only else end - at
        except CorruptChunk as error:
            if not searching:
                result.unknown_version = result.unknown_version or unknown_version(error)
            if not searching and (at > offset or offset == 0):
                result.damaged.append(at)
            resumed = _end_of_damaged(view, base, at, length)
            searching = resumed is None
            at = result.next_offset = _next_header(view, base, at, length) if resumed is None else resumed
            continue
        searching = False
        if wanted:
            if result.chunks and len(result.chunks) + kept > bytes_max:
                return result
            result.chunks += view[at - base : at - base + kept]
        result.ends.append(following)
        at = result.next_offset = following
    return result


def _wanted(header: ChunkHeader, streamlets: Streamlets | None) -> bool:
    if not streamlets:
        return True
    numbers = streamlets.get(header.stream_id)
    return numbers is not None and (not numbers or header.streamlet_id in numbers)


def _end_of_damaged(view: memoryview, base: int, at: int, length: int) -> int | None:
    """Return where the damaged chunk at `at` ends, by its header; None: the header is damaged, too."""
    try:
        end = at + verify_header(view, at - base).chunk_bytes
    except CorruptChunk:
        return None
    return end if end <= length else None


def _next_header(view: memoryview, base: int, at: int, length: int) -> int:
    """Return where to continue behind `at`: at an intact header, or where the next bytes have to be read."""
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
