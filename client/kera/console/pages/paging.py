"""Sorts long lists, and divides them into pages. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from kera.console import limits
from kera.core.errors import InvalidArgument

T = TypeVar("T")


@dataclass(frozen=True)
class Paged(Generic[T]):
    """The rows of one page of a list."""

    rows: Sequence[T]
    number: int
    """Number of the page, from 1."""
    pages: int
    total: int
    """Number of rows of the whole list."""
    first: int
    """Number of the first row of the page, from 1; 0: the list is empty."""


def paged(rows: Sequence[T], number: int, per_page: int = limits.ROWS_PER_PAGE) -> Paged[T]:
    """Return page `number` of a list, or the last page if there are fewer."""
    pages = max(1, -(-len(rows) // per_page))
    number = min(max(number, 1), pages)
    at = (number - 1) * per_page
    shown = rows[at : at + per_page]
    return Paged(shown, number, pages, len(rows), at + 1 if shown else 0)


class Order(NamedTuple):
    """The column by which a list is sorted."""

    column: str
    descending: bool = False

    def __str__(self) -> str:
        """Return the form in an address: ``records``, or ``-records`` for the largest first."""
        return f"-{self.column}" if self.descending else self.column


def parse_order(text: str, columns: Collection[str], default: str) -> Order:
    """Parse the order of ``sort=text``; empty: by `default`. Raises `InvalidArgument`."""
    column = text.removeprefix("-") or default
    if column not in columns:
        raise InvalidArgument(f"sort is {text!r}, and takes one of {', '.join(columns)}", parameter="sort")
    return Order(column, text.startswith("-"))


def ordered(rows: Iterable[T], order: Order, value: Callable[[T], Any | None]) -> list[T]:
    """Sort `rows` by their values, and keep the order of equal ones; rows without a value come last."""
    known: list[tuple[Any, T]] = []
    unknown: list[T] = []
    for row in rows:
        found = value(row)
        if found is None:
            unknown.append(row)
        else:
            known.append((found, row))
    known.sort(key=lambda each: each[0], reverse=order.descending)
    return [row for _, row in known] + unknown
