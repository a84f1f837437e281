"""Chooses the records of a page from several entries, and where the next page continues. Pure.

A page examines a stretch of each entry, forward from the oldest record or back from the newest one, and takes the first
`count` fitting records, merged by their times. Within an entry the order is always the log's. The next page gets the
fitting records that were not taken. So pages leave no record out, and show none twice.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

from kera.core.errors import InvalidArgument


class EntryKey(NamedTuple):
    """An entry of the stream that is browsed."""

    streamlet: int
    entry: int


class HasPlace(Protocol):
    """The known place of a record."""

    @property
    def offset(self) -> int:
        """The record's ordinal in its entry."""
        ...

    @property
    def timestamp_us(self) -> int:
        """The record's time."""
        ...


R = TypeVar("R", bound=HasPlace)


@dataclass
class Stretch(Generic[R]):
    """The examined part of an entry: the ordinals from `low` up to before `high`, and its fitting records, in order."""

    low: int
    high: int
    found: list[R] = field(default_factory=list)


def pick(
    stretches: Mapping[EntryKey, Stretch[R]], count: int, *, backward: bool
) -> tuple[list[tuple[EntryKey, R]], dict[EntryKey, int]]:
    """Return a page's records, and per entry the ordinal from which (backward: before which) the next page looks."""
    sign = -1 if backward else 1
    strands = [_strand(key, each, sign) for key, each in stretches.items()]
    # A strand's times need not be in order: merging compares only the heads, so the strand's order stays.
    merged = heapq.merge(*strands, key=lambda item: item[0])
    taken = [(key, row) for _, key, row in (item for item, _ in zip(merged, range(count), strict=False))]
    numbers = dict.fromkeys(stretches, 0)
    for key, _ in taken:
        numbers[key] += 1
    return taken, {key: _mark(each, numbers[key], backward=backward) for key, each in stretches.items()}


def _strand(key: EntryKey, stretch: Stretch[R], sign: int) -> Iterator[tuple[int, EntryKey, R]]:
    rows = stretch.found if sign > 0 else reversed(stretch.found)
    return ((sign * row.timestamp_us, key, row) for row in rows)


def _mark(stretch: Stretch[R], taken: int, *, backward: bool) -> int:
    rest = len(stretch.found) - taken
    if backward:
        return stretch.found[rest - 1].offset + 1 if rest else stretch.low
    return stretch.found[taken].offset if rest else stretch.high


class Newest(Generic[R]):
    """The newest of rows that arrive in order: as many as fit into `bytes_max`, but at least one.

    `low` is the ordinal from which on no row is missing; None: no row was dropped. All rows before `reached` were
    examined, whether they were added or not.
    """

    def __init__(self, bytes_max: int) -> None:
        self.rows: deque[R] = deque()
        self.low: int | None = None
        self.reached = 0
        self._weights: deque[int] = deque()
        self._left = bytes_max

    def add(self, rows: Iterable[R], bytes_each: int) -> None:
        """Append rows of `bytes_each` bytes, and drop the oldest ones if there are too many."""
        for row in rows:
            self.rows.append(row)
            self._weights.append(bytes_each)
            self._left -= bytes_each
            while self._left < 0 and len(self.rows) > 1:
                self.rows.popleft()
                self._left += self._weights.popleft()
                self.low = self.rows[0].offset

    def pass_by(self, ordinal: int) -> None:
        """Note that all rows before this ordinal were examined."""
        self.reached = max(self.reached, ordinal)


Marks = Mapping[EntryKey, int]
MARKS_TEXT_MAX = 2048
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def marks_to_text(marks: Marks, turn: int = 0) -> str:
    """Return marks as a parameter of a page: ``turn~streamlet.entry.ordinal~…``, with numbers in base 36."""
    parts = [".".join(map(_to_text, (*key, ordinal))) for key, ordinal in sorted(marks.items())]
    return "~".join([_to_text(turn), *parts])


def marks_from_text(text: str, known: Sequence[EntryKey]) -> tuple[dict[EntryKey, int], int]:
    """Parse the text of `marks_to_text` into marks and turn. Raises `InvalidArgument` if entries are not `known`."""
    marks: dict[EntryKey, int] = {}
    try:
        first, *parts = text.split("~")
        turn = _from_text(first)
        if not parts:
            raise ValueError(text)
        for part in parts:
            streamlet, entry, ordinal = map(_from_text, part.split("."))
            key = EntryKey(streamlet, entry)
            if key in marks or key not in known:
                raise ValueError(part)
            marks[key] = ordinal
    except ValueError:
        raise InvalidArgument(
            "this page continues another one, whose end does not fit the stream; start with the first page",
            parameter="marks",
        ) from None
    return marks, turn


def _to_text(number: int) -> str:
    digits = ""
    while number >= 36:
        number, digit = divmod(number, 36)
        digits = _ALPHABET[digit] + digits
    return _ALPHABET[number] + digits


def _from_text(text: str) -> int:
    if not text or len(text) > 13 or not text.isascii() or not text.isalnum():
        raise ValueError(text)
    return int(text, 36)
