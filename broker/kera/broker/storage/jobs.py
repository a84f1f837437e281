"""Jobs that the persistence manager plans and ``kera.broker.storage.segment_files`` performs: plain data, both ways."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

from kera.broker.log.entry import Entry
from kera.broker.log.segment import Segment
from kera.broker.records import Change, Graft, Hole, Key, SegmentAddress
from kera.core.base.done import Done
from kera.core.errors import KeraError

RETRY_MS = 1_000
"""Pause before a retry after an error of the disk."""


@dataclass(slots=True)
class WritePart:
    """A piece of a segment that has to be written."""

    segment: Segment
    physical_id: int
    create: bool
    reserve_bytes: int
    """Reserved size of a new file."""
    offset: int
    view: memoryview
    """The whole blocks to write."""
    begin: int
    end: int
    """`begin` to `end` are the new bytes, which are added to the checksum."""
    chunk_ends: array[int]
    """Ends of the chunks in the new bytes, from the segment's start; empty if chunks are damaged, because the checksum
    is unknown then."""
    final: bool
    crc32c: int
    """Checksum of everything before `begin`, and after the job of everything before `end`; 0: unknown."""


@dataclass(slots=True)
class StoreJob:
    """Write parts of segments, then change the index."""

    parts: list[WritePart]
    changes: list[Change]
    """Changes besides the segments' records, which the job derives from the parts."""
    meta: dict[str, Any] | None
    commit: bool
    error: OSError | None = None


@dataclass(slots=True)
class LoadJob:
    """Read a segment into its slot."""

    segment: Segment
    error: OSError | None = None
    failure: KeraError | None = None
    """Why the segment cannot be used now, although the file was read."""
    chunk_ends: Any = None
    holes: list[Hole] = field(default_factory=list)


@dataclass(slots=True)
class IndexJob:
    """Change the index; files that have to be removed are only marked, which is quick."""

    changes: list[Change]
    physical_ids: dict[int, SegmentAddress | None]
    """Physical ids of files to remove, each with its segment if that is known."""
    done: list[Done]
    entries: list[Entry]
    stored: list[tuple[Entry, Key, int]] = field(default_factory=list)
    """Segments on disk that are removed, with their lengths."""
    tail: list[Segment] = field(default_factory=list)
    """Segments that are removed without ever having been on disk and in the index."""
    gone: list[SegmentAddress] = field(default_factory=list)
    """Segments of dropped streamlets."""
    error: OSError | None = None


@dataclass(slots=True)
class RemoveJob:
    """Remove files that the index has marked, and the marks."""

    physical_ids: list[int]
    error: OSError | None = None


@dataclass(slots=True)
class ArriveJob:
    """Move complete files to their places, and change the index."""

    changes: list[Change]
    meta: dict[str, Any]
    physical_ids: list[int]
    """Ids of the files, in the order in which they become durable."""
    done: list[Done]
    entries: list[Entry]
    grafts: list[tuple[Entry, Graft]] = field(default_factory=list)
    installed: list[tuple[Entry, Key]] = field(default_factory=list)
    error: OSError | None = None


Job = StoreJob | LoadJob | IndexJob | RemoveJob | ArriveJob


@dataclass(slots=True)
class DiskTotals:
    """Totals since the start."""

    segments_flushed: int = 0
    bytes_flushed: int = 0
    commits: int = 0
    bytes_committed: int = 0
    segments_loaded: int = 0
    bytes_loaded: int = 0
    segments_evicted: int = 0
    segments_removed: int = 0
    bytes_removed: int = 0
    chunks_damaged: int = 0
    disk_errors: int = 0
