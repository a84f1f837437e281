"""Records one by one: those that are at hand, the next ones from who waits for them.

An asynchronous generator would do the same, but what it yields comes as the value of a `StopIteration`; and one with a
tuple in it (a `Record` is one) is made the long way, which takes as long as to make the record. A record is taken when
the wait for it begins: a wait that is given up before that loses none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from kera.client.types import Record


class OneByOne(AsyncIterator[Record]):
    """An asynchronous iterator over records. A cancelled wait loses none of them."""

    def __init__(self, more: Callable[[], Awaitable[Record]]) -> None:
        """`more` is asked when nothing is at hand; it raises `StopAsyncIteration` at the end, or whatever is wrong."""
        self._more = more
        self._at_hand: Iterator[Record] = iter(())

    def take(self, records: Iterator[Record]) -> None:
        """These are at hand, and none of those that were before."""
        self._at_hand = records

    async def __anext__(self) -> Record:
        for record in self._at_hand:
            return record
        return await self._more()
