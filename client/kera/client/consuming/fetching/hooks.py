"""Hooks for plug-ins of the fetching of chunks; a fetcher works without any.

    MakeFetchHooks  makes the hooks of a fetcher
    FetchHooks      called on events of the fetcher, see the methods

The methods of `FetchHooks` do nothing: a subclass overrides the methods that it needs. Hooks are called once for data
that were fetched together, never for a record, and must not raise.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.ranges import Home, Range
from kera.client.types import StreamDescription


class FetchHooks:
    """Hooks that one fetcher calls."""

    def on_range(self) -> None:
        """The fetcher begins to fetch another range."""

    def on_fetched(self, item: Range, fetched: Fetched) -> None:
        """Data of a range have come, and wait to be taken. They are taken in order of arrival."""

    def on_asked(self) -> None:
        """The application asks for more."""

    def on_taken(self, item: Range, fetched: Fetched) -> None:
        """The application takes fetched data."""

    def on_closed(self) -> None:
        """The fetcher is closed: no more data come, and waiting data are dropped."""

    def pause_s(self, stream_id: int, answer: Iterable[Fetched]) -> float:  # noqa: ARG002
        """Return the pause between this answer and the next request to the broker, so that more data come together."""
        return 0.0


class FetcherPort(NamedTuple):
    """The view of a fetcher that hooks get."""

    streams: Mapping[int, StreamDescription]
    """All streams that were read, by id."""
    home: Callable[[Range], Home]
    """Returns the broker that has the next position of a range, as far as known."""
    homes: Callable[[], Iterable[Home]]
    """Returns the brokers that chunks come from now. One may occur twice."""
    start: Callable[[Coroutine[Any, Any, None]], object]
    """Starts a task that ends with the fetcher. An error of the task ends the reading."""


MakeFetchHooks = Callable[[FetcherPort], FetchHooks]
