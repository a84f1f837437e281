"""Where a group of segments is split: what has been fetched of it is looked through for a place where a chunk ends.

A consumer that is asked for the rest of a group keeps what it has begun, up to such a place. Only headers are looked
at, and only when a group is split. Nothing here decides whether it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kera.client.cluster.fetch import Fetched
from kera.core.base.ids import Position
from kera.core.errors import CorruptChunk
from kera.core.format.chunk import iterate_chunks


class Cut(NamedTuple):
    """A place in a group where a chunk ends."""

    position: Position
    record: int
    """Ordinal of the record there."""


def bytes_behind(fetched: Fetched, position: Position) -> int:
    """How many bytes of what was fetched lie behind a position."""
    if fetched.next <= position:
        return 0
    begins_before = fetched.start < position and fetched.next[:2] == position[:2]
    return fetched.next.offset - position.offset if begins_before else fetched.size_bytes


def cut_behind(fetched: Fetched, position: Position, bytes_min: int) -> Cut | None:
    """The first place in what was fetched with at least so many bytes between it and `position`, in the same group.

    None: there is no such place, or the bytes cannot be relied upon.
    """
    try:
        found = next((cut for cut, behind in _places(fetched, position) if behind >= bytes_min), None)
    except CorruptChunk:
        return None
    return found if fetched.slot is None or fetched.slot.intact else None


def _places(fetched: Fetched, position: Position) -> Iterator[tuple[Cut, int]]:
    """Where chunks end behind a position of the same group, and how many bytes lie between."""
    start, passed = fetched.start, 0
    for buffer in fetched.buffers:
        for header, _ in iterate_chunks(memoryview(buffer)):
            if header.group_id != position.group_id:
                return
            if header.segment_id != start.segment_id:
                start = Position(header.group_id, header.segment_id, 0)
            start = start._replace(offset=start.offset + header.chunk_bytes)
            if start > position:
                passed += header.chunk_bytes
                yield Cut(start, header.first_record + header.record_count), passed
