"""Iterates over records one by one: first those at hand, then those that a function fetches.

An asynchronous generator would do the same, but it passes each value in a `StopIteration`. Python makes a
`StopIteration` with a tuple (a `Record` is one) in a slow way, which takes as long as making the record. A record is
taken when the wait for it begins: a wait that is cancelled before that loses none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from kera.client.types import Record


class OneByOne(AsyncIterator[Record]):
    """An asynchronous iterator over records. A cancelled wait loses none of them."""

    def __init__(self, more: Callable[[], Awaitable[Record]]) -> None:
        """`more` returns a record when none is at hand; it raises `StopAsyncIteration` at the end, or an error."""
        self._more = more
        self._at_hand: Iterator[Record] = iter(())

    def take(self, records: Iterator[Record]) -> None:
        """Replace the records at hand."""
        self._at_hand = records

    async def __anext__(self) -> Record:
        for record in self._at_hand:
            return record
        return await self._more()
