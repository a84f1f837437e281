"""Rounds of consumers that wait until there is something to say to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator


class Polls:
    """At most one for each member of each consumer group: a later one ends the one before."""

    def __init__(self) -> None:
        self._polls: dict[tuple[str, str], asyncio.Event] = {}

    def __contains__(self, member: tuple[str, str]) -> bool:
        """Whether a round of this member waits; by consumer group and member."""
        return member in self._polls

    @contextlib.contextmanager
    def begin(self, name: str, member_id: str) -> Iterator[asyncio.Event]:
        """A round waits: the event is set when there is something to say, or it has to end."""
        poll = self._polls[name, member_id] = asyncio.Event()
        try:
            yield poll
        finally:
            if self._polls.get((name, member_id)) is poll:
                del self._polls[name, member_id]

    def end(self, name: str, member_id: str) -> None:
        """The member asks for something else by now."""
        poll = self._polls.pop((name, member_id), None)
        if poll is not None:
            poll.set()

    def wake(self, name: str, member_ids: Iterable[str]) -> None:
        """There is something to say to these members."""
        for member_id in member_ids:
            poll = self._polls.get((name, member_id))
            if poll is not None:
                poll.set()

    def close(self) -> None:
        """All that wait are answered."""
        for poll in self._polls.values():
            poll.set()
