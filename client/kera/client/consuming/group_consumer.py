"""The consumer of a consumer group that shares streams: groups of segments are given to it, and taken back.

That is the stream consumer of thesis 6.2.3. The coordinator says which groups, in answer to *rounds*: what the consumer
has done, told whenever there is something to tell, and else about once a second. Here is what happens to a group:

    given ──► fetched ahead ──► its chunks are taken ──► closed, and all of it dealt with: finished
                     │                  └── asked back: when what was taken is dealt with, released
                     └── lost: others have it, since this consumer was silent or stuck for too long

A chunk is *taken* when the caller gets it, and *dealt with* when it comes for the next one. What is dealt with is
committed from time to time; with ``commit_interval_ms`` 0, only what `GroupConsumer.commit` was called for counts as
dealt with. So after a crash, records since the last commit are read again by others, and none is left out.

While the coordinator cannot be reached for longer than the session time-out, nothing more is handed out: somebody else
may have the groups by then. Likewise when the caller comes back after more than the progress time-out, until the
coordinator has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Self, TypeVar

from kera.client import arguments
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Fetched, NewerSchema, Overwritten, Wanted, batches_of
from kera.client.cluster.intervals import start_of_group
from kera.client.cluster.retry import backoff_s
from kera.client.consuming.feed import read_again
from kera.client.consuming.group_consumer_settings import GroupConsumerSettings
from kera.client.consuming.group_discovery import Finds, look_around
from kera.client.consuming.group_feed import Found, GroupFeed, GroupKey
from kera.client.consuming.keep_alive import KeepAlive
from kera.client.consuming.records import records_of
from kera.client.types import ChunkBatch, Record, StreamDescription, fill_cursor, position_of
from kera.client.unclosed import Guard, Loss
from kera.core.clock import boottime_s
from kera.core.errors import ClosedError, DataLost, InvalidArgument, KeraError, LeaseLost
from kera.core.ids import EntryId, Position
from kera.core.rpc import api
from kera.core.rpc.method import Method, RequestT, ResponseT
from kera.core.telemetry import get_logger
from kera.v1 import consumer_group_pb2

log = get_logger("kera.consumer")

T = TypeVar("T")

LEAVE_TIMEOUT_S = 5.0
STEPS_MAX = 4096
"""In one request to the coordinator, of some 60 bytes each; others go with the next round, which follows at once."""
ENDED_MAX = 8192
"""Of which one request says that they are waiting for a commit. Who has more of them gets no others before that."""


class LostGroup(NamedTuple):
    """A group of segments that others have now."""

    stream: str
    streamlet: int
    entry: int
    group_id: int


class _Reach(NamedTuple):
    """How far somebody is in a group."""

    next: Position
    record: int | None
    """Ordinal of what comes there; None: not known."""
    told: tuple[tuple[int, int], ...] = ()
    """Gaps before the group of which the caller has been told."""


class _Held:
    """A group that this consumer holds."""

    def __init__(self, key: GroupKey, lease: consumer_group_pb2.GroupLease) -> None:
        self.key = key
        self.taken = _Reach(position_of(lease.next), lease.next_record if lease.HasField("next_record") else None)
        """Up to here the caller has got it."""
        self.safe = self.taken
        """Up to here it is dealt with."""
        self.told = self.taken
        """Up to here the coordinator knows."""
        self.end_record = lease.end_record if lease.HasField("end_record") else None
        """Ordinal of the end of the group; None: not known."""
        self.lost: list[tuple[int, int]] = []
        """Gaps of which the caller has to be told."""
        self.ended = False
        """It is closed, and the caller has got all of it."""
        self.leaving = False
        """It was asked back: nothing more of it is handed out. That stays so, as what was fetched is dropped."""
        self.gone = False
        """Others have it."""

    @property
    def finished(self) -> bool:
        """All of it is dealt with."""
        return self.ended and self.safe == self.taken

    def step(self) -> consumer_group_pb2.GroupStep:
        """How far it is, as the coordinator is told."""
        step = consumer_group_pb2.GroupStep(lease=self.key.lease, finished=self.finished, next_record=self.safe.record)
        fill_cursor(step.next, self.key.entry, self.safe.next)
        for first, end in self.safe.told:
            step.told.add(first_record=first, end_record=end)
        return step


class GroupConsumer:
    """Reads streams together with the other consumers of its consumer group. Made by `Client.group_consumer`.

    Use it as an async context manager. ``async for record in consumer`` gives records as Python values, and
    `batches` Arrow batches. Records of one group come in their order. Whoever leaves such a loop may begin another one,
    which goes on where the first one stopped.
    """

    def __init__(  # noqa: PLR0915 - one per field, with its line
        self,
        cluster: Cluster,
        consumer_group: str,
        streams: Sequence[str],
        settings: GroupConsumerSettings,
        *,
        on_lost: Callable[[list[LostGroup]], None] | None = None,
    ) -> None:
        """`on_lost`: called instead of raising `LeaseLost` when groups have gone to others."""
        streams = arguments.names("streams", streams)
        arguments.text("consumer_group", consumer_group, "the name of a consumer group")
        if not streams:
            raise InvalidArgument("a consumer needs a stream")
        if not consumer_group:
            raise InvalidArgument("consumers that share streams need the name of their consumer group")
        self.member_id = uuid.uuid4().hex
        self.consumer_group = consumer_group
        self._cluster = cluster
        self._names = tuple(dict.fromkeys(streams))
        self._settings = settings.model_copy(update={"consumer_group": consumer_group})
        self._on_lost = on_lost
        self._streams: dict[int, StreamDescription] = {}
        self._held: dict[GroupKey, _Held] = {}
        self._feed = GroupFeed(cluster, self._settings, {})
        self._keep_alive = KeepAlive(
            cluster.coordinator_addresses,
            consumer_group=consumer_group,
            member_id=self.member_id,
            interval_s=settings.heartbeat_interval_ms / 1000,
            busy_ms=self._busy_ms,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = self._telling = False
        self._guard: Guard | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._lost: list[LostGroup] = []
        """To be told to the caller."""
        self._gaps: deque[_Held] = deque()
        """Groups before which something is gone, of which the caller is to be told."""
        self._speak = asyncio.Event()
        """There is something to tell the coordinator."""
        self._answered = asyncio.Event()
        """Set, and replaced, with each answer of the coordinator."""
        self._commits: list[asyncio.Future[None]] = []
        """Who waits for a commit."""
        self._steps_left = False
        """The last round could not take all that was to be committed."""
        self._committed_s = boottime_s()
        self._busy_since_s: float | None = None
        """Since when the caller does not wait for more; None: it does."""
        self._sure_s = float("-inf")
        """Who has not been heard of since then, may hold nothing any more."""
        self._bytes_consumed = 0
        self._finds = Finds()
        """That the coordinator is to be told."""
        self._looking: set[tuple[int, int]] = set()
        self._moved: dict[EntryId, Position] = {}
        """Cursors that brokers are to be told."""
        self._current: _Held | None = None
        """Whose chunks are being handed out: the rest of `_chunks`."""
        self._chunks: Iterator[ChunkBatch] = iter(())
        self._copying = False
        """Whether the next one is copied: all its values are looked at."""
        self._handed: _Held | None = None
        """Of which the caller has a chunk that it may not have dealt with."""
        self._open: ChunkBatch | None = None
        """The chunk whose records are being taken."""
        self._open_records: Iterator[Record] = iter(())

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams and join the consumer group. Raises `UnknownStream`."""
        if self._started:
            return
        if self._closed:
            raise ClosedError("the consumer is closed")
        for name in self._names:
            stream = await self._cluster.stream(name)
            self._streams[stream.stream_id] = stream
        self._started = True
        self._feed = GroupFeed(self._cluster, self._settings, self._streams)
        self._busy_since_s = boottime_s()
        self._keep_alive.heard_s = boottime_s()
        self._keep_alive.start()
        self._guard = Guard(self)
        self._start(self._rounds())

    # -- what the caller calls ----------------------------------------------------------------------------

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Each chunk as an Arrow batch in place.

        Raises `LeaseLost` once when groups have gone to others, unless there is `on_lost`: what was taken of them and
        not committed is read by others again. Raises `DataLost` once for each gap, see the setting ``on_data_lost``.
        After both one may go on. Raises `UnknownStream` when a stream was deleted, `CorruptChunk`, and `Unavailable`
        when a broker cannot be reached for longer than ``retry_timeout_ms``.
        """
        await self.start()
        self._back()
        await self._as_waiting(self._wait_for_lease())
        if self._open is not None:  # begun as records, and not taken to its end
            chunk, self._open, self._open_records = self._open, None, iter(())
            held = self._handed
            if held is not None and not held.gone:
                self._take(held, chunk)
                yield chunk
                self._back()
        while True:
            held, chunk = await self._next_chunk()
            self._take(held, chunk)
            yield chunk
            del chunk  # and with it the place in the broker's memory, though the next one may be long in coming
            self._back()

    async def records(self) -> AsyncIterator[Record]:
        """Each record as Python values; see `batches` for what is raised."""
        await self.start()
        self._back()
        await self._as_waiting(self._wait_for_lease())
        while True:
            chunk, held = self._open, self._handed
            if chunk is not None and held is not None:
                last = chunk.header.first_record + chunk.batch.num_rows - 1
                for record in self._open_records:
                    if held.gone:
                        break  # others have the rest
                    if record.offset == last:
                        self._open = None
                        self._take(held, chunk)
                    self._busy_since_s = boottime_s()
                    yield record
                    if self._has_come():
                        await self._as_waiting(self._wait_for_lease())
                if not chunk.batch.num_rows:  # it cannot be read, and is left out
                    self._take(held, chunk)
                self._open = None
                self._back()
            self._handed, self._open = await self._next_chunk(copied=True)
            self._open_records = records_of(self._open, self._streams[self._open.entry.stream_id])

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.records()

    async def commit(self) -> None:
        """Commit all that was taken. When it returns, it is stored, and nobody reads it again.

        Raises `LeaseLost` when that is too late for some of it, and `Unavailable` or `Uncertain` when the coordinator
        cannot be reached for longer than ``retry_timeout_ms``.
        """
        await self.start()
        if self._closed:
            raise ClosedError("the consumer is closed")
        if self._failure is not None:
            raise self._failure
        self._raise_lost(committing=True)
        for held in self._held.values():
            held.safe = held.taken
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits.append(waiter)
        self._speak.set()
        await waiter

    def positions(self, stream: str | None = None) -> dict[tuple[int, int], Position]:
        """By streamlet and group, of the groups that this consumer holds: up to where it has taken them."""
        name = stream or self._names[0]
        return {
            (held.key.entry.streamlet_id, held.key.group_id): held.taken.next
            for held in sorted(self._held.values(), key=lambda held: held.key)
            if self._streams[held.key.entry.stream_id].name == name
        }

    async def close(self) -> None:
        """Leave the consumer group: what is dealt with is committed, and the groups go to others at once.

        The chunk that was taken last is not dealt with, as nobody came for the next one; `commit` it if it is. Waits
        for a coordinator that cannot be reached no longer than some seconds.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._closing)  # whoever gives up waiting leaves nothing behind

    @property
    def _closed(self) -> bool:
        return self._closing is not None

    async def _end(self) -> None:
        self._keep_alive.stop()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._feed.close()
        self._chunks, self._open, self._open_records = iter(()), None, iter(())
        self._feed.wake()
        self._answered.set()
        for waiter in self._commits:
            _fail(waiter, ClosedError("the consumer is closed"))
        if self._started:
            await self._leave()
        if self._guard is not None:
            await self._guard.disarm()

    def loss(self) -> Loss | None:
        """What it takes longer to learn for others, if this one is dropped without `close`."""
        if not self._started or self._closed:
            return None
        return Loss(
            "consumer was not closed; others get its groups after the session time-out",
            {"consumer_group": self.consumer_group},
            f"a consumer of consumer group {self.consumer_group!r} was dropped without leaving: others get its groups"
            " after the session time-out, and read again what was not committed; close it",
        )

    # -- handing out -------------------------------------------------------------------------------------------

    def _busy_ms(self) -> int:
        since_s = self._busy_since_s
        return 0 if since_s is None else max(1, round((boottime_s() - since_s) * 1000))

    def _take(self, held: _Held, chunk: ChunkBatch) -> None:
        """A chunk goes to the caller."""
        held.taken = held.taken._replace(next=chunk.next, record=chunk.header.first_record + chunk.header.record_count)
        self._handed = held
        self._bytes_consumed += chunk.header.chunk_bytes
        self._busy_since_s = boottime_s()

    def _has_come(self) -> bool:
        """The caller comes for more; whether that is too late."""
        late = self._busy_ms() > self._settings.progress_timeout_ms
        if late:
            self._sure_s = boottime_s()
        self._busy_since_s = None
        return late

    def _back(self) -> None:
        """The caller comes for more: it has dealt with what it had."""
        self._has_come()
        held = self._handed
        if held is not None and self._open is None:
            self._handed = None
            if self._settings.commit_interval_ms:
                held.safe = held.taken
            self._go_on(held)

    async def _next_chunk(self, *, copied: bool = False) -> tuple[_Held, ChunkBatch]:
        self._has_come()
        self._copying = copied
        return await self._as_waiting(self._wait_for_chunk())

    async def _as_waiting(self, work: Coroutine[Any, Any, T]) -> T:
        """Whatever ends the wait, also an error or a cancellation: then it is the caller's turn."""
        try:
            return await work
        finally:
            self._busy_since_s = boottime_s()

    async def _wait_for_chunk(self) -> tuple[_Held, ChunkBatch]:
        while True:
            if self._closed:
                raise ClosedError("the consumer is closed")
            if self._failure is not None:
                raise self._failure
            self._raise_lost(committing=False)
            await self._wait_for_lease()
            self._tell_gaps()
            held = self._current
            if held is not None:
                chunk = None if held.gone or held.leaving else await self._following(held)
                if chunk is not None:
                    return held, chunk
                self._current, self._chunks = None, iter(())
            try:
                found = await self._feed.take()
            except KeraError as error:
                self._failure = error
                raise
            if found is not None:
                self._use(found)

    async def _following(self, held: _Held) -> ChunkBatch | None:
        try:
            chunk = next(self._chunks, None)
        except Overwritten as gone:
            await self._read_again(gone.rest)
            return await self._following(held)
        except NewerSchema as newer:
            await self._learn_schema(newer)
            return await self._following(held)
        except KeraError as error:
            self._failure = error
            raise
        # Behind the end of the group, the entry's next one may have come along.
        return chunk if chunk is not None and chunk.start.group_id == held.key.group_id else None

    def _batches_of(self, fetched: Fetched) -> Iterator[ChunkBatch]:
        stream = self._streams[fetched.entry.stream_id]
        return batches_of(fetched, stream, self._settings, copying=lambda: self._copying)

    async def _learn_schema(self, newer: NewerSchema) -> None:
        """Columns were added to a stream: what is left of what came last is opened with them."""
        stream_id = newer.rest.entry.stream_id
        try:
            known = self._streams[stream_id]
            self._streams[stream_id] = await self._cluster.with_schema(known, newer.schema_id)
        except KeraError as error:
            self._failure = error
            raise
        self._chunks = chain(self._batches_of(newer.rest), self._chunks)

    async def _read_again(self, rest: Wanted) -> None:
        """Take the rest of what came last from elsewhere: it is not in the broker's memory any more."""
        try:
            found = await read_again(self._cluster, self._settings, self._streams[rest.entry.stream_id], rest)
        except KeraError as error:
            self._failure = error
            raise
        self._chunks = chain.from_iterable(map(self._batches_of, found))

    def _use(self, found: Found) -> None:
        """Something of a group comes to be handed out."""
        held = self._held.get(found.key)
        if held is None or held.leaving:
            return
        if found.fetched is not None:
            self._current = held
            self._chunks = self._batches_of(found.fetched)
        elif found.gap is None:
            held.ended = True
            self._speak.set()
        else:
            self._pass_gap(held, found.gap)

    def _pass_gap(self, held: _Held, gap: DataLost) -> None:
        """Something of a group is gone that comes next. Each group tells its own part, as far as ordinals show it."""
        available = Position(*gap.attributes["available_from"])
        record: int | None = gap.attributes.get("available_record")
        known, end, clipped = held.taken.record, held.end_record, False
        if available.group_id != held.key.group_id:
            available = held.taken.next
            if record is not None and end is not None and record > end:  # the coordinator sees what went behind it
                record, clipped, entry = end, True, held.key.entry
                gap = DataLost(
                    f"stream {self._streams[entry.stream_id].name!r}, streamlet {entry.streamlet_id}, entry"
                    f" {entry.entry}: the rest of group {held.key.group_id} from {tuple(available)} on is gone",
                    **{
                        **gap.attributes,
                        "available_from": list(start_of_group(held.key.group_id + 1)),
                        "available_record": end,
                    },
                )
        held.taken = held.taken._replace(next=available, record=record)
        if self._settings.commit_interval_ms:
            held.safe = held.taken
        if not clipped or record != known:
            self._raise_gap(gap)

    def _tell_gaps(self) -> None:
        """Tell the caller what went before anybody had found it."""
        while self._gaps:
            held = self._gaps.popleft()
            if held.gone or held.leaving or held.finished or not held.lost:
                continue  # the coordinator has somebody else tell it
            lost, held.lost = held.lost, []
            held.taken = held.taken._replace(told=(*held.taken.told, *lost))
            if self._settings.commit_interval_ms:
                held.safe = held.safe._replace(told=held.taken.told)
            self._speak.set()
            self._raise_gap(self._gap_before(held, lost))

    def _gap_before(self, held: _Held, lost: list[tuple[int, int]]) -> DataLost:
        key, name = held.key, self._streams[held.key.entry.stream_id].name
        spans = ", ".join(f"{first} up to {end}" for first, end in lost if end > first)
        count = sum(end - first for first, end in lost)
        exact = all(end > first for first, end in lost)
        what = f"{count} records ({spans})" if exact else "records, nobody knows how many,"
        return DataLost(
            f"stream {name!r}, streamlet {key.entry.streamlet_id}, entry {key.entry.entry}: {what} before group"
            f" {key.group_id} are gone; their groups went before any consumer had found them",
            stream=name,
            streamlet_id=key.entry.streamlet_id,
            entry=key.entry.entry,
            lost_records=[list(each) for each in lost],
            records=count if exact else None,
            available_from=list(held.taken.next),
        )

    def _raise_gap(self, gap: DataLost) -> None:
        if self._settings.on_data_lost == "raise":
            raise gap
        log.warning("records are gone; skipped", consumer_group=self.consumer_group, error=gap.message)

    def _go_on(self, held: _Held) -> None:
        """Whether a group is finished, or can be given back; then that is said at once."""
        if not held.gone and (held.finished or self._can_give_back(held)):
            self._speak.set()

    def _can_give_back(self, held: _Held) -> bool:
        return held.leaving and held.safe == held.taken and held is not self._handed

    async def _wait_for_lease(self) -> None:
        """Wait while it is too long ago that the coordinator has heard of us."""
        session_s = self._settings.session_timeout_ms / 1000
        while (
            not self._closed
            and self._failure is None
            and (self._silent_s() > session_s or self._keep_alive.heard_s < self._sure_s)
        ):
            answered = self._answered
            self._speak.set()
            await answered.wait()

    def _silent_s(self) -> float:
        return boottime_s() - self._keep_alive.heard_s

    def _raise_lost(self, *, committing: bool) -> None:
        """Tell the caller about groups that it has lost: as it likes, or with `LeaseLost`."""
        lost, self._lost = self._lost, []
        if not lost:
            return
        if self._on_lost is not None:
            self._on_lost(lost)
            if not committing:
                return
        names = ", ".join(f"{each.group_id} of {each.stream}/{each.streamlet}" for each in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise LeaseLost(
            f"consumer group {self.consumer_group!r}: group {names}{more} is not this consumer's any more: it was"
            " silent or stuck for too long, and others have it, or the consumer group was reset; what was not committed"
            " of it is read again. Ask for more with another call of records() or batches()",
            consumer_group=self.consumer_group,
            groups=[list(each) for each in lost],
        )

    # -- rounds ------------------------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        """Talk to the coordinator, until the consumer is closed or cannot go on."""
        attempt = 0
        while True:
            self._speak.clear()
            commits, self._commits = self._commits, []
            request = self._request(committing=bool(commits))
            sent_s = boottime_s()
            try:
                answer = await self._exchange(request)
                attempt = 0
                if answer is not None:
                    self._apply(request, answer, sent_s)
                    if self._steps_left:
                        self._commits += commits  # done when all of it is told
                    else:
                        self._settle_commits(commits)
            except BaseException as error:
                for waiter in commits:  # whatever it is, nobody is to wait for ever
                    _fail(waiter, error if isinstance(error, Exception) else ClosedError("the consumer is closed"))
                if not isinstance(error, KeraError) or not error.retriable:
                    raise
                self._finds.add(request.starts, request.seen)
                attempt += 1
                if attempt == 1:
                    log.warning("round failed; trying again", consumer_group=self.consumer_group, error=error.message)
                await asyncio.sleep(backoff_s(self._cluster.settings, attempt))

    def _settle_commits(self, commits: Iterable[asyncio.Future[None]]) -> None:
        error: LeaseLost | None = None
        if commits and self._lost:
            try:
                self._raise_lost(committing=True)
            except LeaseLost as lost:
                error = lost
        for waiter in commits:
            if error is not None:
                _fail(waiter, error)
            elif not waiter.done():
                waiter.set_result(None)

    async def _say(self, method: Method[RequestT, ResponseT], request: RequestT) -> ResponseT:
        """Rounds may wait at the coordinator, and each has to come there before the next one."""
        return await self._cluster.ask(method, request, conversation=self.member_id)

    async def _exchange(
        self, request: consumer_group_pb2.ConsumeRoundRequest
    ) -> consumer_group_pb2.ConsumeRoundResponse | None:
        """One round. One that has nothing to say waits at the coordinator, until there is: then None."""
        asking = asyncio.ensure_future(self._say(api.CONSUME_ROUND, request))
        if not request.wait_ms:
            return await asking
        speaking = asyncio.ensure_future(self._speak.wait())
        try:
            await asyncio.wait((asking, speaking), return_when=asyncio.FIRST_COMPLETED)
            return await asking if asking.done() else None
        finally:
            for each in (asking, speaking):
                each.cancel()
                each.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _round(self) -> consumer_group_pb2.ConsumeRoundRequest:
        """Who asks, and with what in hand."""
        return consumer_group_pb2.ConsumeRoundRequest(
            consumer_group=self.consumer_group,
            member_id=self.member_id,
            client=f"{socket.gethostname()}/{os.getpid()}",
            session_timeout_ms=self._settings.session_timeout_ms,
            progress_timeout_ms=self._settings.progress_timeout_ms,
            busy_ms=self._busy_ms(),
            bytes_consumed=self._bytes_consumed,
            groups_max=self._settings.groups_max,
            stream_ids=self._streams,
        )

    def _request(self, *, committing: bool) -> consumer_group_pb2.ConsumeRoundRequest:
        finds = self._finds.take()
        request = self._round()
        request.starts.extend(finds.starts)
        request.seen.extend(finds.seen)
        interval_s = self._settings.commit_interval_ms / 1000
        due = committing or self._steps_left or (interval_s and boottime_s() >= self._committed_s + interval_s)
        self._steps_left = False
        for held in list(self._held.values()):
            over = held.finished or self._can_give_back(held)
            if not over and held.ended and not held.leaving and len(request.ended) < ENDED_MAX:
                request.ended.append(held.step())
            if not (over or (due and held.safe != held.told)):
                continue
            if len(request.steps) == STEPS_MAX:
                self._steps_left = True
                break
            step = held.step()
            step.released = over and not step.finished
            request.steps.append(step)
            self._held[held.key] = self._held.pop(held.key)  # behind the others, should there be too many
        if due:
            self._committed_s = boottime_s()
        if not (request.steps or request.starts or request.seen or committing):
            waits_ms = [self._settings.heartbeat_interval_ms, round(self._cluster.request_timeout_s * 500)]
            if interval_s:
                waits_ms.append(self._settings.commit_interval_ms)
            request.wait_ms = max(1, min(waits_ms))
        return request

    def _apply(
        self,
        request: consumer_group_pb2.ConsumeRoundRequest,
        answer: consumer_group_pb2.ConsumeRoundResponse,
        sent_s: float,
    ) -> None:
        """Do what the coordinator says."""
        refused = {_key(step) for step in answer.refused}
        lost = []
        for step in request.steps:
            key = _key(step)
            held = self._held.get(key)
            if held is None:
                continue
            if key in refused:
                lost.append(held)
            elif step.finished or step.released:
                del self._held[key]
                self._feed.remove(key)
            else:
                held.told = _reach_of(step)
        given = {_key(lease): lease for lease in answer.held}
        lost += [held for key, held in self._held.items() if key not in given and key not in refused]
        for held in lost:
            self._lose(held)
        for key, lease in given.items():
            known = self._held.get(key)
            if known is None:
                known = self._held[key] = _Held(key, lease)
                self._feed.add(key, known.taken.next)
            gaps = [(lost.first_record, lost.end_record) for lost in lease.lost]
            known.lost = [gap for gap in gaps if gap not in known.taken.told]
            if known.lost and known not in self._gaps:
                self._gaps.append(known)
                self._feed.wake()
            if lease.give_back and not known.leaving:
                known.leaving = True
                self._feed.remove(key)
            self._go_on(known)
        self._look(answer.look)
        self._tell_brokers(answer.moved)
        self._keep_alive.heard_s = max(self._keep_alive.heard_s, sent_s)
        answered, self._answered = self._answered, asyncio.Event()
        answered.set()
        if lost:
            self._feed.wake()

    def _lose(self, held: _Held) -> None:
        entry = held.key.entry
        held.gone = held.leaving = True
        self._feed.remove(held.key)
        del self._held[held.key]
        name = self._streams[entry.stream_id].name
        self._lost.append(LostGroup(name, entry.streamlet_id, entry.entry, held.key.group_id))

    def _fail(self, error: BaseException) -> None:
        """The consumer cannot go on."""
        self._failure = error
        self._answered.set()
        self._feed.wake()
        for waiter in self._commits:
            _fail(waiter, error)

    async def _leave(self) -> None:
        """Last words."""
        steps = [held.step() for held in self._held.values() if held.safe != held.told or held.finished]
        request = consumer_group_pb2.LeaveRequest(consumer_group=self.consumer_group, member_id=self.member_id)
        try:
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                while len(steps) > STEPS_MAX:
                    before = self._round()
                    before.steps.extend(steps[:STEPS_MAX])
                    self._note_moved((await self._say(api.CONSUME_ROUND, before)).moved)
                    del steps[:STEPS_MAX]
                request.steps.extend(steps)
                self._note_moved((await self._say(api.LEAVE, request)).moved)
                await self._tell()
        except (KeraError, TimeoutError) as error:
            log.warning(
                "could not tell the coordinator that this consumer leaves",
                consumer_group=self.consumer_group,
                error=str(error),
            )
        finally:
            self._cluster.end_conversation(self.member_id)

    # -- in the background -------------------------------------------------------------------------------------

    def _look(self, looks: Iterable[consumer_group_pb2.Look]) -> None:
        """Find out what the coordinator wants to know; the next round tells it.

        Each streamlet by itself: what one broker has is not to wait for another one that stands still.
        """
        for look in looks:
            place = (look.stream_id, look.streamlet_id)
            if place not in self._looking and look.stream_id in self._streams:
                self._looking.add(place)
                self._start(self._look_around(look))

    async def _look_around(self, look: consumer_group_pb2.Look) -> None:
        try:
            name = self._streams[look.stream_id].name
            finds = await look_around(self._cluster, name, [look], start=self._settings.start)
            self._finds.add(finds.starts, finds.seen)
            if finds:
                self._speak.set()
        finally:
            self._looking.discard((look.stream_id, look.streamlet_id))

    def _tell_brokers(self, moved: Iterable[Any]) -> None:
        """Brokers are to know cursors, too: retention by consumption goes by them."""
        self._note_moved(moved)
        if self._moved and not self._telling:
            self._telling = True
            self._start(self._tell_and_note())

    def _note_moved(self, moved: Iterable[Any]) -> None:
        for cursor in moved:
            self._moved[EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)] = position_of(cursor)

    async def _tell_and_note(self) -> None:
        try:
            await self._tell()
        finally:
            self._telling = False

    async def _tell(self) -> None:
        while self._moved:
            moved, self._moved = self._moved, {}
            for stream_id, stream in self._streams.items():
                positions = {entry: position for entry, position in moved.items() if entry.stream_id == stream_id}
                if not positions:
                    continue
                try:
                    await self._cluster.commit(self.consumer_group, stream.name, positions)
                except KeraError as error:  # the next move tells more
                    log.info("brokers do not know a cursor", consumer_group=self.consumer_group, error=error.message)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(self._guarded(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # if it was cancelled before it began

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await work
            except Exception as error:  # noqa: BLE001 - raised where the caller waits
                self._fail(error)


def _key(item: consumer_group_pb2.GroupStep | consumer_group_pb2.GroupLease) -> GroupKey:
    cursor = item.next
    entry = EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry)
    return GroupKey(entry, cursor.group_id, item.lease)


def _reach_of(step: consumer_group_pb2.GroupStep) -> _Reach:
    told = tuple((gap.first_record, gap.end_record) for gap in step.told)
    return _Reach(position_of(step.next), step.next_record if step.HasField("next_record") else None, told)


def _fail(waiter: asyncio.Future[None], error: BaseException) -> None:
    if not waiter.done():
        waiter.set_exception(error)
