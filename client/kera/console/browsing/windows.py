"""Which records a page takes of several entries, and where the next page goes on. Pure.

A page looks at a stretch of each entry, from the oldest record on or from the newest one back, and takes the first
`count` that fit, merged by their times. Within an entry the order is always the log's. What was looked at and fits, and
is not taken, is the next page's: so no page leaves a record out, and none shows one twice.
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
        """Its ordinal in its entry."""
        ...

    @property
    def timestamp_us(self) -> int:
        """When it happened."""
        ...


R = TypeVar("R", bound=HasPlace)


@dataclass
class Stretch(Generic[R]):
    """The searched part of an entry: ordinals from `low` up to `high`, and the records of it that fit, in order."""

    low: int
    high: int
    found: list[R] = field(default_factory=list)


def pick(
    stretches: Mapping[EntryKey, Stretch[R]], count: int, *, backward: bool
) -> tuple[list[tuple[EntryKey, R]], dict[EntryKey, int]]:
    """The records of a page, and per entry the ordinal from which (backward: before which) the next page looks."""
    sign = -1 if backward else 1
    strands = [_strand(key, each, sign) for key, each in stretches.items()]
    # A strand's times need not be in order: its order stays, as merging only compares the heads.
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
    """Rows that come in order, of which only the newest are kept that have so many bytes; at least one.

    `low` is the ordinal from which on nothing is missing; None: nothing was dropped. Before `reached` all rows were
    looked at, whether they were added or not.
    """

    def __init__(self, bytes_max: int) -> None:
        self.rows: deque[R] = deque()
        self.low: int | None = None
        self.reached = 0
        self._weights: deque[int] = deque()
        self._left = bytes_max

    def add(self, rows: Iterable[R], bytes_each: int) -> None:
        """Others behind those that there are."""
        for row in rows:
            self.rows.append(row)
            self._weights.append(bytes_each)
            self._left -= bytes_each
            while self._left < 0 and len(self.rows) > 1:
                self.rows.popleft()
                self._left += self._weights.popleft()
                self.low = self.rows[0].offset

    def pass_by(self, ordinal: int) -> None:
        """All rows before this one were looked at."""
        self.reached = max(self.reached, ordinal)


Marks = Mapping[EntryKey, int]
MARKS_TEXT_MAX = 2048
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def marks_to_text(marks: Marks, turn: int = 0) -> str:
    """Marks as a parameter of a page: ``turn~streamlet.entry.ordinal~…``, numbers to the base of 36."""
    parts = [".".join(map(_to_text, (*key, ordinal))) for key, ordinal in sorted(marks.items())]
    return "~".join([_to_text(turn), *parts])


def marks_from_text(text: str, known: Sequence[EntryKey]) -> tuple[dict[EntryKey, int], int]:
    """The same back: the marks, and the turn. Raises `InvalidArgument` unless they are of entries that are `known`."""
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
