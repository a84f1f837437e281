"""Fetching ahead: ranges in, what they have to give out, from whatever brokers have it.

One task per stream and broker (a `_Reader`) fetches, the ranges in turn, into a queue of bounded size. A range is with
one reader at any time: that of the broker that has its next position. It goes to another reader when its next position
is in groups that are elsewhere; and when its broker does not have it any more, or cannot be reached, once the
coordinator has been asked where it is. The other ranges go on meanwhile. Readers come and go with their ranges.

Promise: what a range gives comes out in order, nothing twice and nothing left out, wherever the range has been. What a
reader has fetched is in the queue before its range leaves it, and a range moves with its position.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kera.client.cluster import Cluster
from kera.client.fetch import Fetched, Fetcher, Wanted
from kera.client.retry import Patience, is_route_error, of_broker
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.errors import ClosedError, KeraError, NotOwner, UnknownStream
from kera.core.telemetry import get_logger

log = get_logger("kera.consumer")


class _Range:
    """What is left to read of an entry."""

    __slots__ = ("patience", "wanted")

    def __init__(self, wanted: Wanted, patience: Patience) -> None:
        self.wanted = wanted
        self.patience = patience


class Feed:
    """Fetches ranges of streams ahead of whoever takes what they give. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings) -> None:
        self.settings = settings
        self._cluster = cluster
        self._streams: dict[int, StreamDescription] = {}
        self._readers: dict[tuple[int, int], _Reader] = {}
        """By stream and broker: those that have ranges."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[Fetched | BaseException | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._running = 0
        """Ranges whose end has not been taken from the queue."""
        self._failure: BaseException | None = None
        """What ended the reading; told to everyone who asks for more."""
        self._closed = False

    def add(self, stream: StreamDescription, wanted: Wanted) -> None:
        """Fetch a range of `stream`, too."""
        known = self._streams.get(stream.stream_id)
        if known is None or known.is_older_than(stream):
            self._streams[stream.stream_id] = stream
        self._running += 1
        self._assign(_Range(wanted, Patience(self._cluster.settings)))

    async def take(self) -> Fetched | None:
        """The next that was fetched; None when all ranges have come to their ends.

        It may be without chunks, when all that came of it is that the range goes on at another place.

        Raises `ClosedError`, and what ended the fetching: `DataLost`, `UnknownStream`, …, and `Unavailable` or another
        error that has not passed within ``retry_timeout_ms``.
        """
        while True:
            if self._closed:
                raise ClosedError("the consumer is closed")
            if self._failure is not None:
                raise self._failure
            if not self._running:
                return None
            item = await self._queue.get()
            if item is None:
                self._running -= 1
            elif isinstance(item, BaseException):
                self._failure = item
            else:
                self._queued_bytes -= _size(item)
                self._room.set()
                return item

    @property
    def queued_bytes(self) -> int:
        """Fetched and not taken yet."""
        return self._queued_bytes

    async def close(self) -> None:
        """Stop fetching. Whoever waits for more gets `ClosedError`."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    # -- ranges and readers ------------------------------------------------------------------------------------

    def _assign(self, item: _Range) -> None:
        """Give a range to the reader of the broker that has its next position, as far as is known."""
        stream_id = item.wanted.entry.stream_id
        broker_id = self.broker_of(item.wanted)
        reader = self._readers.get((stream_id, broker_id))
        if reader is None:
            reader = self._readers[stream_id, broker_id] = _Reader(self, stream_id, broker_id)
            self._start(self._read, reader)
        reader.add(item)

    def broker_of(self, wanted: Wanted) -> int:
        """The broker that has the next position of a range, as far as is known."""
        return self._streams[wanted.entry.stream_id].assignments[wanted.entry.streamlet_id].broker_at(wanted.start)

    async def _read(self, reader: _Reader) -> None:
        """Let a reader fetch until it has no ranges any more."""
        try:
            await reader.run()
        finally:
            del self._readers[reader.stream_id, reader.broker_id]

    def _start(self, work: Callable[..., Coroutine[Any, Any, None]], *of: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work, *of))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *of: Any) -> None:
        try:
            await work(*of)
        except Exception as error:  # noqa: BLE001 - raised where the application waits
            self._queue.put_nowait(error)

    # -- used by readers ---------------------------------------------------------------------------------------

    async def wait_for_room(self) -> None:
        """Wait until enough has been taken."""
        while self._queued_bytes >= self.settings.prefetch_bytes_max:
            self._room.clear()
            await self._room.wait()

    async def connect(self, stream_id: int, broker_id: int) -> Fetcher:
        """What fetches from a broker."""
        return Fetcher(await self._cluster.channel(self._streams[stream_id], broker_id), self.settings)

    async def fetch(self, fetcher: Fetcher, asked: Sequence[_Range]) -> list[Fetched]:
        """One request."""
        return await fetcher.fetch(
            [item.wanted for item in asked],
            bytes_max=self.settings.fetch_bytes_max,
            wait_ms=self.settings.fetch_wait_ms,
            timeout_s=self._cluster.request_timeout_s,
        )

    def fetched(self, item: _Range, answer: Fetched) -> bool:
        """Queue what a range gave; whether there is more to read of it."""
        item.patience.succeeded()
        if answer.next != item.wanted.start:
            self._queued_bytes += _size(answer)
            self._queue.put_nowait(answer)
        item.wanted = item.wanted._replace(start=answer.next)
        if item.wanted.end is not None and answer.next >= item.wanted.end:
            self._queue.put_nowait(None)
            return False
        return True

    def leaves(self, item: _Range) -> None:
        """The next position of a range is at another broker."""
        self._assign(item)

    def failed(self, stream_id: int, broker_id: int, lost: Sequence[tuple[_Range, KeraError]]) -> None:
        """A broker did not give what these ranges asked for: try again later, there or elsewhere.

        Raises the first error after which that is of no use.
        """
        name = self._streams[stream_id].name
        now_s = asyncio.get_running_loop().time()
        later: dict[float, list[_Range]] = {}
        for item, failure in lost:
            error = of_broker(failure)
            if is_route_error(error):
                self._cluster.forget(name)
            pause_s = item.patience.failed(error, now_s)
            if pause_s is None:
                raise error
            if pause_s not in later and item.patience.attempt == 1:
                tell = log.info if isinstance(error, NotOwner) else log.warning
                tell("fetch failed; retrying", broker_id=broker_id, stream=name, error=error.message)
            later.setdefault(pause_s, []).append(item)
        for pause_s, items in later.items():
            self._start(self._find, name, items, pause_s)

    async def _find(self, name: str, items: list[_Range], pause_s: float) -> None:
        """After a pause, give ranges to the brokers that have them now."""
        await asyncio.sleep(pause_s)
        stream = await self._cluster.stream_or_last_seen(name)
        known = self._streams.get(stream.stream_id)
        if known is None:
            raise UnknownStream(
                f"stream {name!r} was deleted and created again; open it again", stream=name, stream_id=stream.stream_id
            )
        if not stream.is_older_than(known):
            self._streams[stream.stream_id] = stream
        for item in items:
            self._assign(item)


class _Reader:
    """Fetches what one broker has of a stream's ranges, the ranges in turn. It ends when it has none."""

    def __init__(self, feed: Feed, stream_id: int, broker_id: int) -> None:
        self.stream_id = stream_id
        self.broker_id = broker_id
        self._feed = feed
        self._ranges: list[_Range] = []
        self._fetching: asyncio.Task[list[Fetched]] | None = None
        self._interrupted = False

    def add(self, item: _Range) -> None:
        """A range comes. It does not wait for a request that the broker holds because the others have nothing."""
        self._ranges.append(item)
        if self._fetching is not None and self._fetching.cancel():
            self._interrupted = True

    async def run(self) -> None:
        """Fetch until all ranges have ended or gone elsewhere. Raises what no retry helps against."""
        fetcher: Fetcher | None = None
        while self._ranges:
            await self._feed.wait_for_room()
            try:
                if fetcher is None:
                    fetcher = await self._feed.connect(self.stream_id, self.broker_id)
                asked = list(self._ranges)
                answers = await self._fetch(fetcher, asked)
            except KeraError as error:
                lost, self._ranges = self._ranges, []
                self._feed.failed(self.stream_id, self.broker_id, [(item, error) for item in lost])
                return
            if answers is not None:
                self._take(asked, answers)

    async def _fetch(self, fetcher: Fetcher, asked: Sequence[_Range]) -> list[Fetched] | None:
        """One request; None when another range has come meanwhile, and it was given up for that."""
        self._interrupted = False
        fetching = self._fetching = asyncio.get_running_loop().create_task(self._feed.fetch(fetcher, asked))
        try:
            return await fetching
        except asyncio.CancelledError:
            if not self._interrupted or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return None
        finally:
            self._fetching = None

    def _take(self, asked: Sequence[_Range], answers: Sequence[Fetched]) -> None:
        lost: list[tuple[_Range, KeraError]] = []
        staying: list[_Range] = []
        leaving: list[_Range] = []
        for item, answer in zip(asked, answers, strict=True):
            if answer.error is not None:
                lost.append((item, answer.error))
            elif self._feed.fetched(item, answer):
                here = self._feed.broker_of(item.wanted) == self.broker_id
                (staying if here else leaving).append(item)
        # In turn: a response has a bound, and whoever is asked first must not always be the same.
        self._ranges = staying[1:] + staying[:1] + self._ranges[len(asked) :]
        for item in leaving:
            self._feed.leaves(item)
        if lost:
            self._feed.failed(self.stream_id, self.broker_id, lost)


def _size(fetched: Fetched) -> int:
    return sum(buffer.size for buffer in fetched.buffers)
