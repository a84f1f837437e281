"""Fetches the data of ranges ahead of the consumer, from the brokers that have them.

A range is a piece of an entry, or a group of segments that a consumer group has assigned to this consumer. Such ranges
come and go all the time. When records of a group were removed, the range reports the gap and continues after it.

At any time, one reader has a range: the reader of the broker that has its next position. A broker whose memory can be
read in place pushes the data of its ranges (`_PushReader`). For the others, one task per stream and broker pulls the
ranges in turn (`_PullReader`). All data go into one queue, which is bounded: pulled data by their total size, pushed
data by the window of each broker.

A range goes to another reader when its next position is at another broker, when its broker does not have it or cannot
be reached (then the fetcher asks the coordinator), and when its broker wants it pulled for a while. Other ranges go on
meanwhile.

Promise: the data of a range come out in order, nothing twice and nothing left out, whichever readers fetched them. A
reader queues its data before its range leaves it, and a range moves together with its position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import chain

from kera.client.cluster.asking import broker_failed, same_stream
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.cluster.push import Reason, Subscriber, SubscriptionEnd
from kera.client.cluster.read_session import ReadSession, Told
from kera.client.cluster.retry import RetryTime
from kera.client.cluster.sense import available_from
from kera.client.consuming.fetching.arrivals import Arrivals, HeardArrivals
from kera.client.consuming.fetching.hooks import FetcherPort, MakeFetchHooks
from kera.client.consuming.fetching.ranges import Arrived, Home, Range
from kera.client.settings import ConsumerSettings
from kera.client.tasks import Tasks
from kera.client.types import StreamDescription
from kera.core.base.ids import Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError, NotOwner

log = get_logger("kera.consumer")


class Fetcher:
    """Fetches ranges of streams ahead of the consumer. Belongs to one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        settings: ConsumerSettings,
        *,
        complete: bool = False,
        make_hooks: MakeFetchHooks | None = None,
    ) -> None:
        """`complete`: all data of the ranges exist already; missing data are an error, and not waited for.

        `make_hooks`: makes the hooks; None: there are none.
        """
        self.cluster = cluster
        self.settings = settings
        self.complete = complete
        self._streams: dict[int, StreamDescription] = {}
        self._pull_readers: dict[Home, _PullReader] = {}
        """Pull readers with ranges."""
        self._push_readers: dict[Home, _PushReader] = {}
        """Push readers, also those whose ranges have ended."""
        self.tasks = Tasks(lambda error: self.arrivals.put(error))  # noqa: PLW0108 - `arrivals` is made after this
        homes = partial(chain, self._pull_readers, self._push_readers)
        port = FetcherPort(self._streams, self._home, homes, self.tasks.start)
        self.hooks = None if make_hooks is None else make_hooks(port)
        """The hooks; the queue calls most of their methods."""
        bytes_max = settings.prefetch_bytes_max
        self.arrivals = Arrivals(bytes_max) if self.hooks is None else HeardArrivals(bytes_max, self.hooks)
        self._running = 0
        """Ranges whose end has not been taken from the queue."""
        self.throttled_ms = 0
        """Total time that brokers have held answers back because a quota was used up."""

    def add(self, stream: StreamDescription, wanted: Wanted, *, is_group: bool = False) -> Range:
        """Begin to fetch a range of `stream`. `is_group`: the range is of a group, see `rest_of_group`."""
        known = self._streams.get(stream.stream_id)
        if known is None or known.is_older_than(stream):
            self._streams[stream.stream_id] = stream
        self._running += 1
        item = Range(wanted, RetryTime(self.cluster.settings), is_group=is_group)
        self.assign(item)
        if self.hooks is not None:
            self.hooks.on_range()
        return item

    def remove(self, item: Range) -> None:
        """Stop fetching a range; its data in the queue stay there."""
        if not item.closed:
            self._running -= 1
            self._close(item)

    async def take(self) -> Arrived | None:
        """Take the next arrival; an empty one means that its range has ended. None after `wake`.

        Raises `ClosedError`, and the error that ended the fetching: `DataLost`, `UnknownStream`, …, and `Unavailable`
        or another error that has not passed within ``retry_timeout_ms``.
        """
        item = await self.arrivals.take()
        if item is not None and item.fetched is None:
            self._running -= item.gap is None
        return item

    async def fetched(self) -> Fetched | None:
        """Take the next fetched data; None when all ranges have come to their ends. Raises the errors of `take`."""
        while self._running:
            item = await self.take()
            if item is not None and item.fetched is not None:
                return item.fetched
        return None

    async def close(self) -> None:
        """Stop fetching. A waiting `take` raises `ClosedError`."""
        self.arrivals.close()
        for reader in self._push_readers.values():
            reader.close()
        try:
            await self.tasks.end()
        finally:
            self.arrivals.clear()

    # -- ranges and readers ------------------------------------------------------------------------------------

    def assign(self, item: Range) -> None:
        """Give a range to the reader of the broker that has its next position, as far as known."""
        if item.closed:
            return
        home = self._home(item)
        try:
            pushed = self._can_push(item, home)
        except KeraError as error:
            self.arrivals.put(error)
            return
        if pushed:
            push_reader = self._push_readers.get(home)
            if push_reader is None:
                push_reader = self._push_readers[home] = _PushReader(self, home)
            push_reader.add(item)
            return
        reader = self._pull_readers.get(home)
        if reader is None:
            reader = self._pull_readers[home] = _PullReader(self, home)
            self.tasks.start(self._pull(reader))
        reader.add(item)

    def _home(self, item: Range) -> Home:
        """Return the broker of a range's next position, as far as known."""
        entry, start, _ = item.wanted
        return entry.stream_id, self._streams[entry.stream_id].assignments[entry.streamlet_id].broker_at(start)

    def _can_push(self, item: Range, home: Home) -> bool:
        """Return whether the broker can push a range. Raises `InvalidArgument` if it must and cannot."""
        if item.pull_until_s is not None:
            if asyncio.get_running_loop().time() < item.pull_until_s:
                return False
            item.pull_until_s = None
        stream_id, broker_id = home
        stream = self._streams[stream_id]
        broker, domain = stream.brokers.get(broker_id), stream.config.memory_domain
        return self.cluster.locality.reachable(broker, domain, self.settings.shared_memory)

    async def _pull(self, reader: _PullReader) -> None:
        """Let a reader fetch until it has no ranges left."""
        try:
            await reader.run()
        finally:
            del self._pull_readers[reader.home]

    def _close(self, item: Range) -> None:
        item.closed = True
        if item.stop is not None:
            item.stop()

    # -- used by readers ---------------------------------------------------------------------------------------

    def stream(self, home: Home) -> StreamDescription:
        """Return the stream of a reader."""
        return self._streams[home[0]]

    def came(self, item: Range, fetched: Fetched) -> bool:
        """Queue data of a range. Returns whether there is more to read of it."""
        item.patience.succeeded()
        if fetched.buffers or (fetched.next != item.wanted.start and not item.is_group):
            self.arrivals.put(Arrived(item, fetched))
        return self._goes_on(item, fetched.next)

    def pushed(self, item: Range, run: Fetched) -> None:
        """Queue pushed data of a range. `push_ended` reports its end, unless the end is not known."""
        item.patience.succeeded()
        if item.open_end and run.start >= item.wanted.end:  # type: ignore[operator]  # a group has an end
            run.taken()  # data of the entry's next group, which may belong to another member
            self._goes_on(item, run.next)
            return
        self.arrivals.put(Arrived(item, run))
        item.advance(run.next)

    def push_ended(self, home: Home, item: Range, end: SubscriptionEnd) -> None:
        """Continue with a range after this broker has stopped pushing it."""
        item.stop = None
        if isinstance(end.error, InvalidCursor) and item.ends_with_group and not item.open_end:
            item.open_end = True
            self.assign(item)
        elif end.reason is Reason.PULL or isinstance(end.error, InvalidCursor):  # a pull shows whether it is an error
            self.pull(item)
        elif end.error is not None:
            try:
                self.failed(home, [(item, end.error)])
            except KeraError as error:
                self.arrivals.put(error)
        elif self.came(item, Fetched(item.wanted.entry, item.wanted.start, end.next, [], 0, None)):
            self.assign(item)

    def throttled(self, home: Home, ms: int) -> None:
        """Note that a broker has held an answer back for `ms`."""
        if ms and not self.throttled_ms:
            log.warning("reading is limited by a quota: brokers delay their answers", broker_id=home[1], ms=ms)
        self.throttled_ms += ms

    def _goes_on(self, item: Range, position: Position) -> bool:
        """Note that all before `position` has come. Returns whether there is more; if not, queues the end."""
        item.advance(position)
        if item.at_end:
            self._close(item)
            self.arrivals.put(Arrived(item))
        return not item.closed

    def pull(self, item: Range) -> None:
        """Have a range pulled for a while."""
        item.pull_until_s = asyncio.get_running_loop().time() + self.cluster.timing.push_again_s
        self.assign(item)

    def stays(self, item: Range, home: Home) -> bool:
        """Return whether a range that is pulled goes on with the same reader."""
        return self._home(item) == home and (item.pull_until_s is None or not self._can_push(item, home))

    def failed(self, home: Home, failures: Sequence[tuple[Range, KeraError]]) -> None:
        """Retry ranges for which a broker has answered with errors: later, there or at another broker.

        Raises the first error after which a retry is of no use.
        """
        name, now_s = self.stream(home).name, asyncio.get_running_loop().time()
        later: dict[float, list[Range]] = {}
        refused: list[tuple[Range, KeraError]] = []
        for item, failure in failures:
            if item.closed or (isinstance(failure, DataLost) and self._passed(item, failure)):
                continue
            error = broker_failed(self.cluster, name, failure)
            if isinstance(error, InvalidCursor):
                refused.append((item, error))
                continue
            pause_s = item.patience.failed(error, now_s)
            if pause_s is None:
                raise error
            if pause_s not in later and item.patience.attempt == 1:
                tell = log.info if isinstance(error, NotOwner) else log.warning
                tell("fetch failed; retrying", broker_id=home[1], stream=name, error=error.message)
            later.setdefault(pause_s, []).append(item)
        for pause_s, items in later.items():
            self.tasks.start(self._find(home, items, pause_s))
        if refused:
            self.tasks.start(self._find_refused(home, refused))

    async def _find_refused(self, home: Home, refused: Sequence[tuple[Range, KeraError]]) -> None:
        """Handle positions that a broker does not know: valid if the streamlet has moved to another broker since."""
        try:
            self.cluster.forget(self.stream(home).name)
            await self._look_again(home)
        except KeraError as error:
            self.arrivals.put(error)
            return
        for item, refusal in refused:
            if self._home(item) == home:
                self.arrivals.put(refusal)
            else:
                self.assign(item)

    def _passed(self, item: Range, gap: DataLost) -> bool:
        """Continue a range behind removed records, if it is of a group or the setting says to skip them.

        False: it is not to be continued, or there are no records behind. Raises `ProtocolError`.
        """
        if not (item.is_group or self.settings.on_data_lost == "skip"):
            return False
        available = available_from(gap, item.wanted.start)
        if available <= item.wanted.start:
            return False
        if item.is_group:
            self.arrivals.put(Arrived(item, gap=gap))
        else:
            log.warning("records are gone; skipped", error=gap.message)
        if self.came(item, Fetched(item.wanted.entry, item.wanted.start, available, [], 0, None)):
            self.assign(item)
        return True

    async def _find(self, home: Home, items: list[Range], pause_s: float) -> None:
        """After a pause, give ranges to the brokers that now have them."""
        await asyncio.sleep(pause_s)
        await self._look_again(home)
        for item in items:
            self.assign(item)

    async def _look_again(self, home: Home) -> None:
        """Look up again which brokers have a stream's streamlets."""
        known = self.stream(home)
        found = same_stream(await self.cluster.stream_or_last_seen(known.name), known.stream_id)
        if not found.is_older_than(self.stream(home)):
            self._streams[found.stream_id] = found


class _PullReader:
    """Pulls the ranges of a stream from one broker, in a read session. It ends when it has no ranges."""

    def __init__(self, fetcher: Fetcher, home: Home) -> None:
        self.home = home
        self._fetcher = fetcher
        self._waiting: list[Range] = []
        """Ranges for the session, before it begins."""
        self._failing: list[Range] = []
        """Ranges that had failed before they came here."""
        self._unwanted: list[Range] = []
        """Closed ranges that are still in the session; a request in flight may still return data of them."""
        self._session: ReadSession[Range] | None = None
        self._fetching: asyncio.Task[list[Told[Range]]] | None = None
        self._interrupt: asyncio.TimerHandle | None = None
        """Timer that interrupts the request in flight because another range has come."""
        self._interrupted = False

    def add(self, item: Range) -> None:
        """Add a range. Soon interrupts a request that waits because the other ranges have no data.

        Not at once: the answer may come soon, and many ranges in quick succession would each cause a new request.
        """
        item.stop = lambda: self._unwanted.append(item)
        if item.patience.attempt:
            self._failing.append(item)
        if self._session is None:
            self._waiting.append(item)
            return
        self._session.add(item)
        if self._fetching is not None and self._interrupt is None:
            delay_s = self._fetcher.cluster.timing.interrupt_read_s
            self._interrupt = asyncio.get_running_loop().call_later(delay_s, self._give_up, self._fetching)

    def _give_up(self, fetching: asyncio.Task[list[Told[Range]]]) -> None:
        self._interrupted = fetching.cancel()

    async def run(self) -> None:
        """Fetch until all ranges have ended or gone elsewhere. Raises errors that no retry can help."""
        fetcher = self._fetcher
        while self._session is None or self._left(self._session):
            await fetcher.arrivals.wait_for_room()
            try:
                if self._session is None:
                    channel = await fetcher.cluster.channel(fetcher.stream(self.home), self.home[1])
                    self._session = ReadSession(
                        channel,
                        fetcher.settings.consumer_group,
                        self._waiting,
                        session_id=next(fetcher.cluster.session_ids),
                    )
                told = await self._read(self._session)
            except KeraError as error:
                lost = self._waiting if self._session is None else self._session.items
                fetcher.failed(self.home, [(item, error) for item in lost])
                return
            if told is not None:
                self._take(self._session, told)
                await self._pause(told)

    async def _pause(self, told: Sequence[Told[Range]]) -> None:
        """Pause before the next request, if the hooks ask for it, so that more data come together."""
        hooks = self._fetcher.hooks
        if hooks is not None and (pause_s := hooks.pause_s(self.home[0], (fetched for _, fetched, _ in told))):
            await asyncio.sleep(pause_s)

    def _left(self, session: ReadSession[Range]) -> int:
        """Remove closed ranges from the session. Returns the number of ranges that are left."""
        unwanted, self._unwanted = self._unwanted, []
        for item in unwanted:
            if item in session:
                session.remove(item)
        return len(session)

    async def _read(self, session: ReadSession[Range]) -> list[Told[Range]] | None:
        """Make one request; None if it was interrupted because another range has come."""
        self._interrupted = False
        settings = self._fetcher.settings
        work = session.read(
            bytes_max=settings.fetch_bytes_max,
            wait_ms=0 if self._fetcher.complete else settings.fetch_wait_ms,
            timeout_s=self._fetcher.cluster.request_timeout_s,
        )
        fetching = self._fetching = asyncio.get_running_loop().create_task(work)
        throttled_ms = session.throttled_ms
        try:
            return await fetching
        except asyncio.CancelledError:
            if not self._interrupted or asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            return None
        finally:
            self._fetcher.throttled(self.home, session.throttled_ms - throttled_ms)
            self._fetching = None
            if self._interrupt is not None:
                self._interrupt.cancel()
                self._interrupt = None

    def _take(self, session: ReadSession[Range], told: Sequence[Told[Range]]) -> None:
        fetcher = self._fetcher
        if not told and fetcher.complete:
            raise self._incomplete(session.items[0].wanted)
        failures: list[tuple[Range, KeraError]] = []
        leaving: list[Range] = []
        for item, fetched, ended in told:
            if item.closed:
                continue
            if fetched.error is not None:
                failures.append((item, fetched.error))
                continue
            goes_on = fetcher.came(item, fetched)
            stays = goes_on and fetcher.stays(item, self.home)
            if not stays and not ended:
                session.remove(item)
            elif stays and ended:
                session.add(item)
            if goes_on and not stays:
                leaving.append(item)
        failed = {item for item, _ in failures}
        for item in self._failing:
            if item not in failed:  # an answer without an error is a success, even without chunks
                item.patience.succeeded()
        self._failing.clear()
        for item in leaving:
            fetcher.assign(item)
        if failures:
            fetcher.failed(self.home, failures)

    def _incomplete(self, wanted: Wanted) -> InvalidArgument:
        return InvalidArgument(
            f"{tuple(wanted.end or ())} is beyond the end of streamlet {wanted.entry.streamlet_id} of stream"
            f" {self._fetcher.stream(self.home).name!r}",
            streamlet_id=wanted.entry.streamlet_id,
        )


class _PushReader:
    """Has one broker push the data of a stream's ranges."""

    def __init__(self, fetcher: Fetcher, home: Home) -> None:
        self._fetcher = fetcher
        self._home = home
        self._subscriber: Subscriber | None = None
        self._waiting: list[Range] = []
        """Ranges that wait for the connection."""

    def add(self, item: Range) -> None:
        """Add a range."""
        if self._subscriber is not None and not self._subscriber.channel.closed:
            self._open(self._subscriber, item)
            return
        self._waiting.append(item)
        if len(self._waiting) == 1:
            self._fetcher.tasks.start(self._connect())

    async def _connect(self) -> None:
        fetcher = self._fetcher
        settings = fetcher.settings
        try:
            stream = fetcher.stream(self._home)
            broker, domain = stream.brokers.get(self._home[1]), stream.config.memory_domain
            if broker is None:  # the stream was looked up again, and the broker has left
                left, self._waiting = self._waiting, []
                for item in left:
                    fetcher.assign(item)
                return
            channel = await fetcher.cluster.locality.connection(broker, domain, settings.shared_memory)
        except KeraError as error:
            lost, self._waiting = self._waiting, []
            fetcher.failed(self._home, [(item, error) for item in lost])
            return
        waiting, self._waiting = self._waiting, []
        if channel is not None:
            self._subscriber = channel.subscriber(settings.consumer_group, settings.prefetch_bytes_max)
        for item in waiting:
            if channel is None:
                fetcher.pull(item)
            elif self._subscriber is not None and not item.closed:
                self._open(self._subscriber, item)

    def _open(self, subscriber: Subscriber, item: Range) -> None:
        fetcher, (entry, start, end) = self._fetcher, item.wanted
        item.stop = subscriber.open(
            Wanted(entry, start, None if item.open_end else end),
            lambda run: fetcher.pushed(item, run),
            lambda ended: fetcher.push_ended(self._home, item, ended),
        ).close

    def close(self) -> None:
        """Stop all pushing."""
        if self._subscriber is not None:
            self._subscriber.close()
