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
"""After an error of the disk."""


@dataclass(slots=True)
class WritePart:
    """One piece of a segment to be written."""

    segment: Segment
    physical_id: int
    create: bool
    reserve_bytes: int
    """Reserved size of a new file."""
    offset: int
    view: memoryview
    """Whole blocks."""
    begin: int
    end: int
    """The new bytes: what is added to the checksum."""
    chunk_ends: array[int]
    """Ends of the chunks in them, from the segment's start; none when some are damaged: their checksum is not known
    then."""
    final: bool
    crc32c: int
    """Over everything before `begin`; after the job, before `end`. 0: not known."""


@dataclass(slots=True)
class StoreJob:
    """Write parts, then change the index."""

    parts: list[WritePart]
    changes: list[Change]
    """Besides the segments' records, which the job makes of the parts."""
    meta: dict[str, Any] | None
    commit: bool
    error: OSError | None = None


@dataclass(slots=True)
class LoadJob:
    """Read a segment into its slot."""

    segment: Segment
    error: OSError | None = None
    failure: KeraError | None = None
    """Why it is of no use now, though the file was read."""
    chunk_ends: Any = None
    holes: list[Hole] = field(default_factory=list)


@dataclass(slots=True)
class IndexJob:
    """Change the index: files that are to be removed are marked, which takes no time."""

    changes: list[Change]
    physical_ids: dict[int, SegmentAddress | None]
    """Files to remove, each with its segment if that is known."""
    done: list[Done]
    entries: list[Entry]
    stored: list[tuple[Entry, Key, int]] = field(default_factory=list)
    """Segments on disk that go, with their lengths."""
    tail: list[Segment] = field(default_factory=list)
    """Segments that go without ever having been there."""
    gone: list[SegmentAddress] = field(default_factory=list)
    """Segments of streamlets that go."""
    error: OSError | None = None


@dataclass(slots=True)
class RemoveJob:
    """Remove files that the index has marked, and the marks."""

    physical_ids: list[int]
    error: OSError | None = None


@dataclass(slots=True)
class ArriveJob:
    """Put files that are complete where they belong, and change the index."""

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
