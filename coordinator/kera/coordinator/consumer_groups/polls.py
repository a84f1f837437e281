"""Consumers' rounds that wait until there is news for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator


class Polls:
    """The waiting rounds, at most one for each member of each consumer group: a later round ends the one before."""

    def __init__(self) -> None:
        self._polls: dict[tuple[str, str], asyncio.Event] = {}

    def __contains__(self, member: tuple[str, str]) -> bool:
        """Whether a round of this member waits; `member`: consumer group and member id."""
        return member in self._polls

    @contextlib.contextmanager
    def begin(self, name: str, member_id: str) -> Iterator[asyncio.Event]:
        """Register a waiting round: the event is set when there is news, or the round has to end."""
        poll = self._polls[name, member_id] = asyncio.Event()
        try:
            yield poll
        finally:
            if self._polls.get((name, member_id)) is poll:
                del self._polls[name, member_id]

    def end(self, name: str, member_id: str) -> None:
        """End the member's waiting round, since the member has sent another request."""
        poll = self._polls.pop((name, member_id), None)
        if poll is not None:
            poll.set()

    def wake(self, name: str, member_ids: Iterable[str]) -> None:
        """Wake the waiting rounds of these members, for which there is news."""
        for member_id in member_ids:
            poll = self._polls.get((name, member_id))
            if poll is not None:
                poll.set()

    def close(self) -> None:
        """Wake all waiting rounds."""
        for poll in self._polls.values():
            poll.set()
