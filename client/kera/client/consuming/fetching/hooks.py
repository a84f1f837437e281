"""The places at which something can be plugged into the fetching of chunks. Nothing of it is needed to fetch.

    MakeFetchHooks  given to a fetcher, which makes its hooks with it
    FetchHooks      called when something happens to the fetcher, see the methods

`FetchHooks` do nothing: a subclass overrides the methods that it needs. Hooks are called for what was fetched together,
never for a record, and must not raise. A fetcher without hooks calls none.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.ranges import Home, Range
from kera.client.types import StreamDescription


class FetchHooks:
    """Called by one fetcher."""

    def on_range(self) -> None:
        """Another range is fetched."""

    def on_fetched(self, item: Range, fetched: Fetched) -> None:
        """Data of a range have come, and wait to be taken. They are taken in the order in which they have come."""

    def on_asked(self) -> None:
        """The application asks for more."""

    def on_taken(self, item: Range, fetched: Fetched) -> None:
        """The application takes what has come."""

    def on_closed(self) -> None:
        """Nothing more comes, and what waits is not taken."""

    def pause_s(self, stream_id: int, answer: Iterable[Fetched]) -> float:  # noqa: ARG002
        """How long the next request to a broker is put off after this answer, so that more comes together."""
        return 0.0


class FetcherPort(NamedTuple):
    """A fetcher as hooks see it."""

    streams: Mapping[int, StreamDescription]
    """All that were read."""
    home: Callable[[Range], Home]
    """The broker that has the next position of a range, as far as is known."""
    homes: Callable[[], Iterable[Home]]
    """The brokers that chunks come from now. One may be named twice."""
    start: Callable[[Coroutine[Any, Any, None]], object]
    """Starts a task that ends with the fetcher. An error of it ends the reading."""


MakeFetchHooks = Callable[[FetcherPort], FetchHooks]
