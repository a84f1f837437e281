"""Fetching ahead: ranges in, what they have to give out, from whatever brokers have it.

A range is with one reader at any time: that of the broker that has its next position. A broker whose memory can be read
in place pushes what comes of its ranges (`_PushReader`); from the others one task per stream and broker pulls, the
ranges in turn (`_Reader`). All that comes goes into one queue, and is bounded: what was pulled by its sum, what is
pushed by the window of each broker.

A range goes to another reader when its next position is in groups that are elsewhere; when its broker does not have it
any more, or cannot be reached, once the coordinator has been asked where it is; and when its broker wants it to be
pulled, for a while. The other ranges go on meanwhile. Readers come and go with their ranges.

Promise: what a range gives comes out in order, nothing twice and nothing left out, wherever the range has been and
however it came. What a reader has got is in the queue before its range leaves it, and a range moves with its position.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kera.client.cluster.asking import is_route_error, of_broker
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.push import PushChannel, Reason, Subscriber, Subscription, SubscriptionEnd
from kera.client.cluster.read_session import Given, ReadSession
from kera.client.cluster.retry import Patience
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.errors import ClosedError, InvalidArgument, InvalidCursor, KeraError, NotOwner, UnknownStream
from kera.core.rpc import Channel
from kera.core.telemetry import get_logger

log = get_logger("kera.consumer")


class _Range:
    """What is left to read of an entry."""

    __slots__ = ("patience", "pull_until_s", "wanted")

    def __init__(self, wanted: Wanted, patience: Patience) -> None:
        self.wanted = wanted
        self.patience = patience
        self.pull_until_s: float | None = None
        """It is pulled until then, though its broker may be able to push; None: not so."""


class Feed:
    """Fetches ranges of streams ahead of whoever takes what they give. Belongs to one event loop."""

    def __init__(self, cluster: Cluster, settings: ConsumerSettings, *, complete: bool = False) -> None:
        """`complete`: all that is wanted is there already; when it is not, that is an error, and not waited for."""
        self.settings = settings
        self._cluster = cluster
        self._complete = complete
        self._streams: dict[int, StreamDescription] = {}
        self._readers: dict[tuple[int, int], _Reader] = {}
        """By stream and broker: those that pull, and have ranges."""
        self._push_readers: dict[tuple[int, int], _PushReader] = {}
        """By stream and broker: those that were pushed something."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: deque[Fetched | BaseException | None] = deque()
        """What has come; None for each range that has ended."""
        self._arrived = asyncio.Event()
        """Something has, or the feed is closed. It is looked at only when the queue is empty."""
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
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            item = self._queue.popleft()
            if item is None:
                self._running -= 1
            elif isinstance(item, BaseException):
                self._failure = item
            else:
                if item.slot is None:
                    self._queued_bytes -= item.size_bytes
                    self._room.set()
                item.taken()
                return item

    @property
    def queued_bytes(self) -> int:
        """Pulled and not taken yet."""
        return self._queued_bytes

    async def close(self) -> None:
        """Stop fetching. Whoever waits for more gets `ClosedError`."""
        self._closed = True
        self._arrived.set()
        for reader in self._push_readers.values():
            reader.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._queue.clear()

    def _put(self, item: Fetched | BaseException | None) -> None:
        self._queue.append(item)
        self._arrived.set()

    # -- ranges and readers ------------------------------------------------------------------------------------

    def _assign(self, item: _Range) -> None:
        """Give a range to the reader of the broker that has its next position, as far as is known."""
        home = item.wanted.entry.stream_id, self.broker_of(item.wanted)
        try:
            pushed = self._can_push(item, home)
        except KeraError as error:
            self._put(error)
            return
        if pushed:
            push_reader = self._push_readers.get(home)
            if push_reader is None:
                push_reader = self._push_readers[home] = _PushReader(self, *home)
            push_reader.add(item)
            return
        reader = self._readers.get(home)
        if reader is None:
            reader = self._readers[home] = _Reader(self, *home)
            self.start(self._read, reader)
        reader.add(item)

    def _can_push(self, item: _Range, home: tuple[int, int]) -> bool:
        """Raises `InvalidArgument` if a range has to be pushed, and cannot be."""
        if item.pull_until_s is not None:
            if asyncio.get_running_loop().time() < item.pull_until_s:
                return False
            item.pull_until_s = None
        stream_id, broker_id = home
        broker = self._streams[stream_id].brokers.get(broker_id)
        return self._cluster.locality.reachable(broker, self.settings.shared_memory)

    def broker_of(self, wanted: Wanted) -> int:
        """The broker that has the next position of a range, as far as is known."""
        return self._streams[wanted.entry.stream_id].assignments[wanted.entry.streamlet_id].broker_at(wanted.start)

    async def _read(self, reader: _Reader) -> None:
        """Let a reader fetch until it has no ranges any more."""
        try:
            await reader.run()
        finally:
            del self._readers[reader.stream_id, reader.broker_id]

    def start(self, work: Callable[..., Coroutine[Any, Any, None]], *of: Any) -> None:
        """Begin a task of a reader's, or of our own; what it raises is told to the caller."""
        task = asyncio.get_running_loop().create_task(self._guarded(work, *of))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *of: Any) -> None:
        try:
            await work(*of)
        except Exception as error:  # noqa: BLE001 - raised where the caller waits
            self._put(error)

    # -- used by readers ---------------------------------------------------------------------------------------

    async def wait_for_room(self) -> None:
        """Wait until enough has been taken."""
        while self._queued_bytes >= self.settings.prefetch_bytes_max:
            self._room.clear()
            await self._room.wait()

    async def connect(self, stream_id: int, broker_id: int) -> Channel:
        """Over which to pull from a broker."""
        return await self._cluster.channel(self._streams[stream_id], broker_id)

    async def connect_push(self, stream_id: int, broker_id: int) -> PushChannel | None:
        """What a broker pushes over; None: pull from it. Raises why not, if that is no choice."""
        broker = self._streams[stream_id].brokers[broker_id]
        return await self._cluster.locality.connection(broker, self.settings.shared_memory)

    async def read(self, session: ReadSession[_Range]) -> list[Given[_Range]]:
        """One request."""
        return await session.read(
            bytes_max=self.settings.fetch_bytes_max,
            wait_ms=0 if self._complete else self.settings.fetch_wait_ms,
            timeout_s=self._cluster.request_timeout_s,
        )

    def nothing(self, items: Sequence[_Range]) -> None:
        """There is nothing for any of these ranges. Raises `InvalidArgument`, see `complete`."""
        if self._complete:
            wanted = items[0].wanted
            raise InvalidArgument(
                f"{tuple(wanted.end or ())} lies behind the end of streamlet {wanted.entry.streamlet_id} of stream"
                f" {self._streams[wanted.entry.stream_id].name!r}",
                streamlet_id=wanted.entry.streamlet_id,
            )

    def fetched(self, item: _Range, answer: Fetched) -> bool:
        """Queue what a range gave; whether there is more to read of it."""
        item.patience.succeeded()
        wanted = item.wanted
        if answer.next != wanted.start:
            self._queued_bytes += answer.size_bytes
            self._put(answer)
        item.wanted = wanted._replace(start=answer.next)
        if wanted.end is not None and answer.next >= wanted.end:
            self._put(None)
            return False
        return True

    def pushed(self, item: _Range, run: Fetched) -> None:
        """Queue what was pushed of a range. Its end comes by itself."""
        item.patience.succeeded()
        item.wanted = Wanted(run.entry, run.next, item.wanted.end)
        self._put(run)

    def push_ended(self, home: tuple[int, int], item: _Range, end: SubscriptionEnd) -> None:
        """Nothing more is pushed of a range by this broker, for now."""
        if end.reason is Reason.PULL or isinstance(end.error, InvalidCursor):  # pulling tells what is wrong, if it is
            self.pull(item)
        elif end.error is not None:
            try:
                self.failed(*home, [(item, end.error)])
            except KeraError as error:
                self._put(error)
        else:
            item.patience.succeeded()
            if end.next != item.wanted.start:
                self._put(Fetched(item.wanted.entry, item.wanted.start, end.next, [], 0, None))
                item.wanted = item.wanted._replace(start=end.next)
            if item.wanted.end is not None and end.next >= item.wanted.end:
                self._put(None)
            else:
                self._assign(item)

    def pull(self, item: _Range) -> None:
        """Have a range pulled for a while."""
        item.pull_until_s = asyncio.get_running_loop().time() + self._cluster.timing.push_again_s
        self._assign(item)

    def stays(self, item: _Range, home: tuple[int, int]) -> bool:
        """Whether a range that is pulled goes on with the same reader."""
        if self.broker_of(item.wanted) != home[1]:
            return False
        return item.pull_until_s is None or not self._can_push(item, home)

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
            self.start(self._find, name, items, pause_s)

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
    """Pulls what one broker has of a stream's ranges, in a read session. It ends when it has none."""

    def __init__(self, feed: Feed, stream_id: int, broker_id: int) -> None:
        self.stream_id = stream_id
        self.broker_id = broker_id
        self._feed = feed
        self._waiting: list[_Range] = []
        """For the session to begin."""
        self._failing: list[_Range] = []
        """Those that had failed before they came."""
        self._session: ReadSession[_Range] | None = None
        self._fetching: asyncio.Task[list[Given[_Range]]] | None = None
        self._interrupted = False

    def add(self, item: _Range) -> None:
        """A range comes. It does not wait for a request that the broker holds because the others have nothing."""
        if item.patience.attempt:
            self._failing.append(item)
        if self._session is None:
            self._waiting.append(item)
            return
        self._session.add(item)
        if self._fetching is not None and self._fetching.cancel():
            self._interrupted = True

    async def run(self) -> None:
        """Fetch until all ranges have ended or gone elsewhere. Raises what no retry helps against."""
        while self._session is None or len(self._session):
            await self._feed.wait_for_room()
            try:
                if self._session is None:
                    channel = await self._feed.connect(self.stream_id, self.broker_id)
                    self._session = ReadSession(channel, self._feed.settings.consumer_group, self._waiting)
                given = await self._read(self._session)
            except KeraError as error:
                lost = self._waiting if self._session is None else self._session.items
                self._feed.failed(self.stream_id, self.broker_id, [(item, error) for item in lost])
                return
            if given is not None:
                self._take(self._session, given)

    async def _read(self, session: ReadSession[_Range]) -> list[Given[_Range]] | None:
        """One request; None when another range has come meanwhile, and it was given up for that."""
        self._interrupted = False
        fetching = self._fetching = asyncio.get_running_loop().create_task(self._feed.read(session))
        try:
            return await fetching
        except asyncio.CancelledError:
            if not self._interrupted or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return None
        finally:
            self._fetching = None

    def _take(self, session: ReadSession[_Range], given: Sequence[Given[_Range]]) -> None:
        if not given:
            self._feed.nothing(session.items)
        lost: list[tuple[_Range, KeraError]] = []
        leaving: list[_Range] = []
        for item, fetched, ended in given:
            if fetched.error is not None:
                lost.append((item, fetched.error))
                continue
            goes_on = self._feed.fetched(item, fetched)
            stays = goes_on and self._feed.stays(item, (self.stream_id, self.broker_id))
            if not stays and not ended:
                session.remove(item)
            elif stays and ended:
                session.add(item)
            if goes_on and not stays:
                leaving.append(item)
        failed = {item for item, _ in lost}
        for item in self._failing:
            if item not in failed:  # no error is a success, also without chunks
                item.patience.succeeded()
        self._failing.clear()
        for item in leaving:
            self._feed.leaves(item)
        if lost:
            self._feed.failed(self.stream_id, self.broker_id, lost)


class _PushReader:
    """Has one broker push what it has of a stream's ranges."""

    def __init__(self, feed: Feed, stream_id: int, broker_id: int) -> None:
        self._feed = feed
        self._home = stream_id, broker_id
        self._subscriber: Subscriber | None = None
        self._waiting: list[_Range] = []
        """For the connection."""

    def add(self, item: _Range) -> None:
        """A range comes."""
        if self._subscriber is not None and not self._subscriber.channel.closed:
            self._open(self._subscriber, item)
            return
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._feed.start(self._connect)

    async def _connect(self) -> None:
        try:
            connection = await self._feed.connect_push(*self._home)
        except KeraError as error:
            lost, self._waiting = self._waiting, []
            self._feed.failed(*self._home, [(item, error) for item in lost])
            return
        waiting, self._waiting = self._waiting, []
        if connection is None:
            for item in waiting:
                self._feed.pull(item)
            return
        settings = self._feed.settings
        self._subscriber = connection.subscriber(settings.consumer_group, settings.prefetch_bytes_max)
        for item in waiting:
            self._open(self._subscriber, item)

    def _open(self, subscriber: Subscriber, item: _Range) -> Subscription:
        feed = self._feed
        return subscriber.open(
            item.wanted, lambda run: feed.pushed(item, run), lambda end: feed.push_ended(self._home, item, end)
        )

    def close(self) -> None:
        """Have nothing more pushed."""
        if self._subscriber is not None:
            self._subscriber.close()


async def read_again(
    cluster: Cluster, settings: ConsumerSettings, stream: StreamDescription, rest: Wanted
) -> list[Fetched]:
    """Copies of a range that was pushed and is not there any more (see `Overwritten`). Raises what `Feed.take` does."""
    feed = Feed(cluster, settings.model_copy(update={"shared_memory": "never"}), complete=True)
    feed.add(stream, rest)
    found = []
    try:
        while (item := await feed.take()) is not None:
            found.append(item)
    finally:
        await feed.close()
    return found
