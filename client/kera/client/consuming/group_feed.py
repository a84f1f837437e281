"""Fetching ahead of groups of segments: which ones changes all the time, as groups are given, finished and taken away.

A broker whose memory can be read in place pushes the groups that it has (see ``feed``), each over a lane. From others
they are pulled: those of one stream that are at one broker by one request, as far as they are not being asked for
already. One that has just come does not wait for a request that the broker holds because the others have nothing.

A group has ended when its next position is in another group of the entry: then it is closed, and nothing is left.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any, NamedTuple

from kera.client.cluster.asking import is_route_error, of_broker
from kera.client.cluster.batches import RANGES_MAX, batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, Fetcher, Wanted
from kera.client.cluster.push import Reason, Subscriber, Subscription, SubscriptionEnd
from kera.client.cluster.retry import Patience
from kera.client.consuming.group_consumer_settings import GroupConsumerSettings
from kera.client.types import StreamDescription
from kera.core.errors import DataLost, InvalidCursor, KeraError, UnknownStream
from kera.core.ids import EntryId, Position
from kera.core.telemetry import get_logger

log = get_logger("kera.consumer")

REQUESTS_MAX = 8
"""At one broker, of one stream, at a time."""
_LAST = (1 << 32) - 1


class GroupKey(NamedTuple):
    """A group, as it was given to this consumer once: it may be given again, with another lease."""

    entry: EntryId
    group_id: int
    lease: int


class Found(NamedTuple):
    """What came of a group: chunks, a gap, or its end."""

    key: GroupKey
    fetched: Fetched | None = None
    """There may be chunks of the entry's next group at its end."""
    gap: DataLost | None = None
    """Something is gone; what comes then is behind it."""

    @property
    def size_bytes(self) -> int:
        """Of the chunks."""
        return self.fetched.size_bytes if self.fetched is not None else 0

    @property
    def copied_bytes(self) -> int:
        """The same, if they were pulled."""
        return self.size_bytes if self.fetched is not None and self.fetched.slot is None else 0


class _Part:
    """A group that is being fetched."""

    __slots__ = ("at_head", "busy", "key", "lane", "next", "patience", "pull_until_s")

    def __init__(self, key: GroupKey, start: Position, patience: Patience) -> None:
        self.key = key
        self.next = start
        self.patience = patience
        self.busy = False
        """It is pushed, a request asks for it, or it waits to be tried again."""
        self.lane: Subscription | None = None
        """Over which it is pushed."""
        self.pull_until_s: float | None = None
        """It is pulled until then, though its broker may be able to push; None: not so."""
        self.at_head = False
        """There was nothing more in the entry."""

    @property
    def wanted(self) -> Wanted:
        """What to ask for.

        Who waits at the head does not say where to stop: so the first chunk of the entry's next group ends the wait.
        """
        end = None if self.at_head else Position(self.key.group_id, _LAST, _LAST)
        return Wanted(self.key.entry, self.next, end)


class GroupFeed:
    """Fetches groups into a queue of bounded size. Belongs to one event loop."""

    def __init__(
        self, cluster: Cluster, settings: GroupConsumerSettings, streams: Mapping[int, StreamDescription]
    ) -> None:
        """`streams`: all whose groups will be added."""
        self._cluster = cluster
        self._settings = settings
        self._streams = dict(streams)
        self._parts: dict[GroupKey, _Part] = {}
        self._fetchers: dict[tuple[int, int], Fetcher] = {}
        self._subscribers: dict[tuple[int, int], Subscriber] = {}
        """By stream and broker, of those that have pushed something."""
        self._connecting: dict[tuple[int, int], list[_Part]] = {}
        """What is to be pushed as soon as there is a connection."""
        self._requests: Counter[tuple[int, int]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queue: asyncio.Queue[Found | BaseException | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._closed = False

    def add(self, key: GroupKey, start: Position) -> None:
        """Fetch a group from `start` on."""
        self._parts[key] = _Part(key, start, Patience(self._cluster.settings))
        self._pump()

    def remove(self, key: GroupKey) -> None:
        """Do not fetch a group any more; what is queued of it stays in the queue."""
        part = self._parts.pop(key, None)
        if part is not None and part.lane is not None:
            part.lane.close()

    async def take(self) -> Found | None:
        """What came next; a `Found` without anything: the group has ended. None after `wake`.

        Raises what no retry helps against.
        """
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        if item is not None:
            if item.fetched is not None:
                item.fetched.taken()
            if item.copied_bytes:
                self._queued_bytes -= item.copied_bytes
                self._pump()
        return item

    def wake(self, error: BaseException | None = None) -> None:
        """Have `take` return, or raise `error`."""
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """Stop fetching."""
        self._closed = True
        self._parts.clear()
        for subscriber in self._subscribers.values():
            subscriber.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._queue.empty():
            self._queue.get_nowait()

    # -- requests ----------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Ask for what nobody is asking for."""
        if self._closed:
            return
        room = self._queued_bytes < self._settings.prefetch_bytes_max
        ready: dict[tuple[int, int], list[_Part]] = {}
        for part in list(self._parts.values()):
            if part.busy:
                continue
            home = self._home(part)
            if self._can_push(part, home):
                part.busy = True
                self._push(part, home)
            elif room:
                ready.setdefault(home, []).append(part)
        for home, parts in ready.items():
            if self._requests[home] < REQUESTS_MAX:
                for some in batched(parts, RANGES_MAX):
                    for part in some:
                        part.busy = True
                    self._requests[home] += 1
                    self._start(self._ask(home, some))

    def _home(self, part: _Part) -> tuple[int, int]:
        """Stream and broker of a group's next position, as far as is known."""
        entry = part.key.entry
        return entry.stream_id, self._streams[entry.stream_id].assignments[entry.streamlet_id].broker_at(part.next)

    async def _ask(self, home: tuple[int, int], parts: list[_Part]) -> None:
        try:
            answers = await self._fetch(home, parts)
        except KeraError as error:
            self._fetchers.pop(home, None)
            for part in parts:
                self._failed(part, error)
        else:
            for part, answer in zip(parts, answers, strict=True):
                self._answered(part, answer)
        finally:
            self._requests[home] -= 1
        self._pump()

    async def _fetch(self, home: tuple[int, int], parts: list[_Part]) -> list[Fetched]:
        stream_id, broker_id = home
        channel = await self._cluster.channel(self._streams[stream_id], broker_id)
        fetcher = self._fetchers.get(home)
        if fetcher is None or fetcher.channel is not channel:
            fetcher = self._fetchers[home] = Fetcher(channel, self._settings.consumer_group)
        return await fetcher.fetch(
            [part.wanted for part in parts],
            bytes_max=self._settings.fetch_bytes_max,
            wait_ms=self._settings.fetch_wait_ms,
            timeout_s=self._cluster.request_timeout_s,
        )

    def _answered(self, part: _Part, answer: Fetched) -> None:
        if self._parts.get(part.key) is not part:
            return  # taken away meanwhile
        if answer.error is not None:
            self._failed(part, answer.error)
            return
        part.patience.succeeded()
        part.busy = False
        part.at_head = answer.lag_records == 0
        if answer.buffers:
            found = Found(part.key, answer)
            self._queued_bytes += found.size_bytes
            self._queue.put_nowait(found)
            # In turn: a response has a bound, and whoever is asked first must not always be the same.
            self._parts[part.key] = self._parts.pop(part.key)
        self._go_on(part, answer.next)

    # -- lanes -------------------------------------------------------------------------------------------------

    def _can_push(self, part: _Part, home: tuple[int, int]) -> bool:
        """Raises `InvalidArgument` if a group has to be pushed, and cannot be."""
        if part.pull_until_s is not None:
            if asyncio.get_running_loop().time() < part.pull_until_s:
                return False
            part.pull_until_s = None
        stream_id, broker_id = home
        broker = self._streams[stream_id].brokers.get(broker_id)
        return self._cluster.locality.reachable(broker, self._settings.shared_memory)

    def _push(self, part: _Part, home: tuple[int, int]) -> None:
        subscriber = self._subscribers.get(home)
        if subscriber is not None and not subscriber.channel.closed:
            self._open(part, subscriber)
        elif home in self._connecting:
            self._connecting[home].append(part)
        else:
            self._connecting[home] = [part]
            self._start(self._connect(home))

    async def _connect(self, home: tuple[int, int]) -> None:
        stream_id, broker_id = home
        settings = self._settings
        try:
            broker = self._streams[stream_id].brokers[broker_id]
            connection = await self._cluster.locality.connection(broker, settings.shared_memory)
        except KeraError as error:
            for part in self._connecting.pop(home):
                self._failed(part, error)
            return
        waiting = [part for part in self._connecting.pop(home) if self._parts.get(part.key) is part]
        if connection is None:
            for part in waiting:
                self._pull(part)
            self._pump()
            return
        subscriber = connection.subscriber(settings.consumer_group, settings.prefetch_bytes_max)
        self._subscribers[home] = subscriber
        for part in waiting:
            self._open(part, subscriber)

    def _open(self, part: _Part, subscriber: Subscriber) -> None:
        part.lane = subscriber.open(
            part.wanted, lambda run: self._pushed(part, run), lambda end: self._push_ended(part, end)
        )

    def _pushed(self, part: _Part, run: Fetched) -> None:
        part.patience.succeeded()
        if run.start.group_id > part.key.group_id:  # the entry's next group: somebody else's, perhaps
            run.taken()
        else:
            self._queue.put_nowait(Found(part.key, run))
        self._go_on(part, run.next)

    def _push_ended(self, part: _Part, end: SubscriptionEnd) -> None:
        part.lane = None
        if end.reason is Reason.PULL:
            self._pull(part)
        elif isinstance(end.error, InvalidCursor) and not part.at_head:  # nobody knows where it ends
            part.at_head, part.busy = True, False
        elif end.error is not None:
            self._failed(part, end.error)
        else:
            part.patience.succeeded()
            part.busy = False
            self._go_on(part, end.next)
        self._pump()

    def _pull(self, part: _Part) -> None:
        """Have a group pulled for a while."""
        part.pull_until_s = asyncio.get_running_loop().time() + self._cluster.timing.push_again_s
        part.busy = False

    # -- what came of it ---------------------------------------------------------------------------------------

    def _go_on(self, part: _Part, next_: Position) -> None:
        part.next = next_
        if next_.group_id > part.key.group_id:
            self.remove(part.key)
            self._queue.put_nowait(Found(part.key))

    def _failed(self, part: _Part, failure: KeraError) -> None:
        if self._parts.get(part.key) is not part:
            return
        error = of_broker(failure)
        if isinstance(error, DataLost):
            available = Position(*error.attributes.get("available_from", part.next))
            if available > part.next:
                part.busy = False
                self._queue.put_nowait(Found(part.key, gap=error))
                self._go_on(part, available)
                return
        stream = self._streams[part.key.entry.stream_id]
        if is_route_error(error):
            self._cluster.forget(stream.name)
        pause_s = part.patience.failed(error, asyncio.get_running_loop().time())
        if pause_s is None:
            self._queue.put_nowait(error)
            return
        if part.patience.attempt == 1:
            log.warning("fetch failed; retrying", stream=stream.name, error=error.message)
        self._start(self._try_again(part, stream.name, pause_s))

    async def _try_again(self, part: _Part, name: str, pause_s: float) -> None:
        """After a pause, at the broker that has the group now."""
        await asyncio.sleep(pause_s)
        stream = await self._cluster.stream_or_last_seen(name)
        known = self._streams.get(stream.stream_id)
        if known is None:
            raise UnknownStream(f"stream {name!r} was deleted and created again; open it again", stream=name)
        if not stream.is_older_than(known):
            self._streams[stream.stream_id] = stream
        part.busy = False
        self._pump()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - raised where the caller waits
            self._queue.put_nowait(error)
