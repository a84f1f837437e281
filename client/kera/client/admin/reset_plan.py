"""The request for a reset of a consumer group, and the changes that it makes: types and arithmetic, without I/O.

An offset is the number of a record in its entry, from 0. Cursors are chunk boundaries: a cursor for an offset is the
start of the chunk that has the record, so that no record is skipped, and at most the rest of one chunk is read again.
`kera.client.admin.resetting` looks up where that is, and carries it out.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kera.core.base.ids import Position


@dataclass(frozen=True, slots=True)
class ToOffset:
    """Each entry goes to the record with this offset, or to the nearest one that it has."""

    offset: int
    """The number of a record in its entry, from 0."""


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """Each entry goes on by so many records, or back where the number is negative, as far as it has records."""

    records: int


@dataclass(frozen=True, slots=True)
class CursorChange:
    """The change that a reset makes to the cursor of one entry."""

    streamlet: int
    entry: int
    old: Position | None
    """None: the consumer group has not read this entry."""
    old_offset: int | None
    """Offset of the first record that was not read; None: there is no cursor, or its place is lost."""
    new: Position
    new_offset: int
    """Offset of the record at `new`."""
    records_again: int | None
    """Records that were read and will be read again; None: unknown, as the old place is lost."""
    records_skipped: int | None
    """Records that were not read and will not be; None: unknown, as the old place is lost."""
    note: str = ""
    """Why `new_offset` is not what was asked for; empty: it is, or it is the start of the chunk that has the record."""


@dataclass(frozen=True, slots=True)
class ResetPlan:
    """The changes that a reset makes to a consumer group in a stream; `Admin.reset_consumer_group` carries it out."""

    consumer_group: str
    stream: str
    stream_id: int
    changes: tuple[CursorChange, ...]
    """By streamlet and entry."""

    @property
    def records_again(self) -> int:
        """All records that are known to be read again."""
        return sum(change.records_again or 0 for change in self.changes)

    @property
    def records_skipped(self) -> int:
        """All records that are known to be skipped."""
        return sum(change.records_skipped or 0 for change in self.changes)


ResetTo = (
    Literal["earliest", "latest"]
    | datetime.datetime
    | ToOffset
    | ShiftBy
    | Mapping[int, Sequence[Position]]
    | ResetPlan
)
"""Where to: the oldest record, the end as it is now, the first record of a time or later, an offset, a number of
records on or back, positions per streamlet and entry (streamlets that are left out keep their cursors), or a plan."""

OffsetSpan = tuple[int, int]
"""From the first offset up to before the second."""


def compare(unread_spans: Iterable[OffsetSpan], new_offset: int, end: int) -> tuple[int, int]:
    """How many records a cursor at `new_offset` reads again, and how many it skips.

    `unread_spans`: what was not read so far, without overlaps. `end`: the offset behind the entry's last record.
    """
    still_unread = skipped = 0
    for first, behind in unread_spans:
        skipped += max(0, min(behind, new_offset) - first)
        still_unread += max(0, behind - max(first, new_offset))
    return max(0, end - new_offset - still_unread), skipped
