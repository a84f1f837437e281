"""The request for a reset of a consumer group, and the changes that it makes: types and arithmetic, without I/O.

An offset is the number of a record in its entry, from 0. Cursors are chunk boundaries: a cursor for an offset is the
start of the chunk that has the record, so that no record is skipped, and at most a part of one chunk is read again.
`kera.client.admin.resetting` looks the places up, and carries the reset out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kera.core.base.ids import Position


@dataclass(frozen=True, slots=True)
class ToOffset:
    """Move each entry's cursor to the record with this offset, or to the nearest one that it has."""

    offset: int
    """The number of a record in its entry, from 0."""


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """Move each entry's cursor by this number of records, back if it is negative, as far as there are records."""

    records: int


@dataclass(frozen=True, slots=True)
class CursorChange:
    """The change that a reset makes to the cursor of one entry."""

    streamlet: int
    entry: int
    old: Position | None
    """The cursor before; None: the consumer group has not read this entry."""
    old_offset: int | None
    """Offset of the first unread record; None: there is no cursor, or its place is lost."""
    new: Position
    new_offset: int
    """Offset of the record at `new`."""
    records_again: int | None
    """Records that were read and will be read again; None: unknown, because the old place is lost."""
    records_skipped: int | None
    """Records that were not read and will not be; None: unknown, because the old place is lost."""
    note: str = ""
    """Why `new_offset` differs from the requested place; empty: it is that place, or the start of its chunk."""


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The changes that a reset makes to a consumer group in a stream; `Admin.reset_consumer_group` carries it out."""

    consumer_group: str
    stream: str
    stream_id: int
    changes: tuple[CursorChange, ...]
    """Changes, ordered by streamlet and entry."""

    @property
    def records_again(self) -> int:
        """Number of records that are known to be read again."""
        return sum(change.records_again or 0 for change in self.changes)

    @property
    def records_skipped(self) -> int:
        """Number of records that are known to be skipped."""
        return sum(change.records_skipped or 0 for change in self.changes)


ResetTo = (
    Literal["earliest", "latest"]
    | datetime.datetime
    | ToOffset
    | ShiftBy
    | Mapping[int, Sequence[Position]]
    | ResetPlan
)
"""The target of a reset: the oldest record, the present end, the first record at or after a time, an offset, a number
of records on or back, positions per streamlet and entry (left-out streamlets keep their cursors), or a plan."""

OffsetSpan = tuple[int, int]
"""The first offset of a span, and the offset behind its last one."""


def compare(unread_spans: Iterable[OffsetSpan], new_offset: int, end: int) -> tuple[int, int]:
    """Return how many records a cursor at `new_offset` reads again, and how many it skips.

    `unread_spans`: records not read so far, without overlaps. `end`: the offset behind the entry's last record.
    """
    still_unread = skipped = 0
    for first, behind in unread_spans:
        skipped += max(0, min(behind, new_offset) - first)
        still_unread += max(0, behind - max(first, new_offset))
    return max(0, end - new_offset - still_unread), skipped
