"""A long list, a page at a time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kera.console import limits

T = TypeVar("T")


@dataclass(frozen=True)
class Paged(Generic[T]):
    """The rows of one page of a list."""

    rows: Sequence[T]
    number: int
    """Of the page, from 1."""
    pages: int
    total: int
    """Rows of the whole list."""
    first: int
    """Of the first row of the page, from 1; 0: there is none."""


def paged(rows: Sequence[T], number: int, per_page: int = limits.ROWS_PER_PAGE) -> Paged[T]:
    """Page `number` of a list; the last one, if there are fewer."""
    pages = max(1, -(-len(rows) // per_page))
    number = min(max(number, 1), pages)
    at = (number - 1) * per_page
    shown = rows[at : at + per_page]
    return Paged(shown, number, pages, len(rows), at + 1 if shown else 0)
