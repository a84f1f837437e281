"""A consumer that shares streams with its consumer group: the coordinator assigns groups of segments to it.

This is the stream consumer of thesis 6.2.3. The coordinator assigns groups, and takes them back, in answer to *rounds*
(``rounds``). A group that is assigned to this member is a lease (``lease``, ``leases``). The consumer fetches leased
groups ahead, and delivers their data as long as no other member can have the group (``liveness``).

The consumer commits from time to time what the caller has processed; with ``commit_interval_ms`` 0, when the caller
calls `GroupConsumer.commit`. So after a crash, other members read the records since the last commit again, and miss
none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from kera.client import arguments
from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.delivering.chunks import Chunks
from kera.client.consuming.delivering.decoding import DecodedRecords, Decoding
from kera.client.consuming.delivering.records import records_of
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.fetching.ranges import Arrived
from kera.client.consuming.groups.keep_alive import KeepAlive
from kera.client.consuming.groups.lease import Lease
from kera.client.consuming.groups.leases import STEPS_MAX, Leases, LostGroup
from kera.client.consuming.groups.liveness import Liveness
from kera.client.consuming.groups.rounds import Rounds
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.consuming.groups.work_pace import WorkPace
from kera.client.consuming.plugins import NO_PLUGINS, Plugins
from kera.client.tasks import Tasks, Turns
from kera.client.types import Record
from kera.client.unclosed import Guard, Loss
from kera.core.base.clock import Clock
from kera.core.base.ids import Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import ClosedError, DataLost, InvalidArgument, KeraError

log = get_logger("kera.consumer")

T = TypeVar("T")


class GroupConsumer(DecodedRecords):
    """Reads streams together with the other consumers of its consumer group. Made by `Client.group_consumer`.

    Use it as an async context manager. ``async for record in consumer`` gives records as Python values, and
    `batches` Arrow batches. Records of one group come in their order. After leaving such a loop, another loop goes on
    where the first one stopped.
    """

    def __init__(  # noqa: PLR0913 - what a consumer is made of
        self,
        cluster: Cluster,
        consumer_group: str,
        streams: Sequence[str],
        settings: GroupConsumerSettings,
        *,
        on_lost: Callable[[list[LostGroup]], None] | None = None,
        decoding: Decoding | None = None,
        clock: Clock | None = None,
        steps_max: int = STEPS_MAX,
        plugins: Plugins = NO_PLUGINS,
    ) -> None:
        """`on_lost`: called instead of raising `LeaseLost` when groups have gone to other members.

        `steps_max`: maximum number of groups whose progress one request reports.
        """
        streams = arguments.names("streams", streams)
        arguments.text("consumer_group", consumer_group, "the name of a consumer group")
        if not streams:
            raise InvalidArgument("a consumer needs a stream")
        if not consumer_group:
            raise InvalidArgument("consumers that share streams need the name of their consumer group")
        self.member_id = cluster.runtime.new_id()
        self.consumer_group = consumer_group
        self._cluster = cluster
        self._names = tuple(dict.fromkeys(streams))
        self._settings = settings = settings.model_copy(update={"consumer_group": consumer_group})
        clock = clock or cluster.runtime.clock
        self._tasks = Tasks(self._fail)
        self._chunks = Chunks(cluster, settings)
        self._fetcher = Fetcher(cluster, settings, make_hooks=plugins.at_fetcher)
        self._delivery = plugins.delivery(self._chunks.streams)
        self._liveness = Liveness(
            cluster.coordinator_addresses,
            settings,
            clock,
            consumer_group=consumer_group,
            member_id=self.member_id,
            heartbeats=cluster.runtime.heartbeats
            or partial(KeepAlive, tls=cluster.runtime.tls, introduction=cluster.runtime.introduction),
        )
        self._pace = WorkPace()
        self._leases = Leases(
            consumer_group,
            self._chunks.streams,
            self._fetcher,
            pace=self._pace,
            processed_when_back=settings.commit_interval_ms > 0,
            report_soon=lambda: self._rounds.speak_soon(),  # noqa: PLW0108 - `_rounds` is made after this
            on_lost=on_lost,
            steps_max=steps_max,
        )
        self._rounds = Rounds(
            cluster,
            settings,
            self.member_id,
            self._chunks.streams,
            leases=self._leases,
            liveness=self._liveness,
            tasks=self._tasks,
            clock=clock,
        )
        self._started = False
        self._starting, self._in_turn = asyncio.Lock(), asyncio.Lock()
        self._turns = Turns()
        """Makes tasks open fetched data in turn; otherwise one task's data would replace another's."""
        self._guard: Guard | None = None
        self._closing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """The error that ended the reading; raised for every further call."""
        self._current: Lease | None = None
        """The lease whose chunks are being delivered: `_chunks` has the rest of them."""
        self._decoding = decoding
        self._open: ChunkBatch | None = None
        """The chunk whose records are being delivered."""
        self._open_records: Iterator[Record] = iter(())
        self._coming: AsyncIterator[Record] | None = None
        """The records that `_next_records` continues with."""
        self._come: list[Record] = []
        """The records that it had taken when it was cancelled or failed."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams and join the consumer group. Raises `UnknownStream`."""
        async with self._starting:  # one of several tasks starts the consumer; the others wait for it
            if self._started:
                return
            self._check_open()
            for name in self._names:
                stream = await self._cluster.stream(name)
                if self._decoding is not None:
                    self._decoding.check(stream)
                self._chunks.streams[stream.stream_id] = stream
            self._check_open()  # `close` may have been called meanwhile
            self._started = True
            self._liveness.start()
            self._guard = Guard(self)
            self._tasks.start(self._rounds.run())

    def batches(self) -> AsyncIterator[ChunkBatch]:
        """Return an iterator over chunks as Arrow batches in place; small ones together (``joined_bytes_max``).

        Raises `LeaseLost` once when groups have gone to other members, unless there is `on_lost`: they read again the
        records that were delivered here and not committed. Raises `DataLost` once for each gap, see the setting
        ``on_data_lost``. The caller may go on after both. Raises `UnknownStream` when a stream was deleted,
        `CorruptChunk`, and `Unavailable` when a broker cannot be reached for longer than ``retry_timeout_ms``.
        """
        batches = self._each_batch()
        return batches if self._delivery is None else self._delivery.batches(batches)

    async def _each_batch(self) -> AsyncIterator[ChunkBatch]:
        await self.start()
        if self._decoding is not None:
            self._decoding.forget()
        self._caller_is_back()
        await self._as_waiting(self._be_sure())
        if self._open is not None:  # only some of its records were delivered
            chunk, self._open, self._open_records = self._open, None, iter(())
            lease = self._leases.in_hand
            if lease is not None and not lease.lost:
                chunk = chunk.rest(lease.delivered.next)
                self._deliver(lease, chunk)
                yield chunk
                self._caller_is_back()
        while True:
            lease, chunk = await self._next_chunk(copied=False)
            self._deliver(lease, chunk)
            yield chunk
            del chunk  # frees its place in the broker's memory: the next chunk may take long to come
            self._caller_is_back()

    async def _each_record(self) -> AsyncIterator[Record]:
        await self.start()
        self._caller_is_back()
        await self._as_waiting(self._be_sure())
        while True:
            chunk, lease = self._open, self._leases.in_hand
            if chunk is not None and lease is not None:
                if self._decoding is not None:
                    stream = self._chunks.streams[chunk.entry.stream_id]
                    await self._as_waiting(self._decoding.learn(chunk.batch, stream))
                final, ends = chunk.header.first_record + chunk.batch.num_rows - 1, chunk.ends()
                last, behind = next(ends)
                for record in self._open_records:
                    if lease.lost:
                        break  # another member has the rest
                    while record.offset > last:
                        last, behind = next(ends)
                    if record.offset == final:
                        self._open = None
                        self._deliver(lease, chunk)
                    elif record.offset == last:
                        lease.deliver(behind, last + 1)
                    self._liveness.caller_works()
                    yield record
                    if self._liveness.caller_waits():
                        await self._as_waiting(self._be_sure())
                if not chunk.batch.num_rows:  # an unreadable chunk, which is skipped
                    self._deliver(lease, chunk)
                self._open = None
                self._caller_is_back()
            lease, self._open = await self._next_chunk(copied=True)
            self._leases.take_in_hand(lease)
            self._open_records = records_of(self._open, self._chunks.streams[self._open.entry.stream_id])

    async def _next_records(self, records_max: int | None) -> list[Record]:
        coming = self._coming or self._each_record()
        self._coming = None  # an iterator that raises has ended
        records, self._come = self._come, []
        if not records:
            records.append(await anext(coming))
            chunk, lease, offset = self._open, self._leases.in_hand, records[0].offset
            end = offset + 1
            if chunk is not None and lease is not None:
                end = next((last for last, _ in chunk.ends() if last > offset), end)
            if records_max is not None:
                end = min(end, offset + records_max)
            try:
                while (offset := offset + 1) < end and lease is not None and not lease.lost:
                    records.append(await anext(coming))
            except BaseException:
                self._come = records  # the next call returns them
                raise
        self._coming = coming
        return records

    def _has_at_hand(self) -> bool:
        lease = self._leases.in_hand
        return self._open is not None and lease is not None and not (lease.lost or self._liveness.in_doubt)

    async def commit(self) -> None:
        """Commit all delivered records. When it returns, the commit is stored, and no member reads them again.

        Raises `LeaseLost` when it is too late for some of them, and `Unavailable` or `Uncertain` when the coordinator
        cannot be reached for longer than ``retry_timeout_ms``.
        """
        await self.start()
        self._check_open()
        if self._failure is not None:
            raise self._failure
        self._leases.raise_lost(committing=True)
        self._leases.process_all()
        await self._rounds.commit()

    def positions(self, stream: str | None = None) -> dict[tuple[int, int], Position]:
        """Return how far the groups of this consumer were delivered, by streamlet and group."""
        return self._leases.positions(stream or self._names[0])

    @property
    def busy_ms(self) -> int:
        """Time since the caller has been running its own code; 0: it waits for records."""
        return self._liveness.busy_ms

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up (docs/quotas.md)."""
        return self._fetcher.throttled_ms

    async def close(self) -> None:
        """Leave the consumer group: commit what is processed, so that the groups go to other members at once.

        The last delivered chunk does not count as processed, because the caller has not asked for the next one; if it
        is processed, call `commit` first. Waits for an unreachable coordinator for some seconds at most.
        """
        if self._cluster.is_inherited:
            return
        if self._closing is None or self._closing.cancelled():  # `asyncio.run` cancels all tasks at its end
            self._closing = asyncio.ensure_future(self._end())
        await asyncio.shield(self._closing)  # the cleaning up goes on even if the caller is cancelled

    @property
    def _closed(self) -> bool:
        return self._closing is not None

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the consumer is closed")

    async def _end(self) -> None:
        self._liveness.stop()
        await self._tasks.end()
        await self._fetcher.close()
        self._chunks.clear()
        self._open, self._open_records = None, iter(())
        self._rounds.fail(ClosedError("the consumer is closed"))
        if self._started:
            await self._rounds.leave()
        if self._guard is not None:
            await self._guard.disarm()

    def loss(self) -> Loss | None:
        """Return the delay for other consumers if this one is dropped without `close`."""
        if not self._started or self._closed:
            return None
        return Loss(
            "consumer was not closed; others get its groups after the session time-out",
            {"consumer_group": self.consumer_group},
            f"a consumer of consumer group {self.consumer_group!r} was dropped without leaving: others get its groups"
            " after the session time-out, and read again what was not committed; close it",
        )

    def _fail(self, error: BaseException) -> None:
        """End the consumer with an error."""
        self._failure = error
        self._rounds.fail(error)
        self._fetcher.arrivals.wake()

    # -- delivering ----------------------------------------------------------------------------------------------

    def _deliver(self, lease: Lease, chunk: ChunkBatch) -> None:
        """Note that a chunk goes to the caller."""
        lease.deliver(chunk.next, chunk.header.first_record + chunk.header.record_count)
        self._leases.take_in_hand(lease)
        self._rounds.delivered(chunk.header.chunk_bytes)
        self._liveness.caller_works()

    def _caller_is_back(self) -> None:
        """Note that the caller asks for more: it has processed its chunk, unless it has not got all records of it."""
        self._liveness.caller_waits()
        if self._open is None:
            self._pace.processed(self._rounds.bytes_delivered, self._liveness.worked_s)
            self._leases.caller_is_back()

    async def _next_chunk(self, *, copied: bool) -> tuple[Lease, ChunkBatch]:
        self._liveness.caller_waits()
        async with self._in_turn:
            return await self._as_waiting(self._wait_for_chunk(copied=copied))

    async def _as_waiting(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; when it ends, also by an error or a cancellation, the caller counts as busy again."""
        try:
            return await work
        finally:
            self._liveness.caller_works()

    async def _wait_for_chunk(self, *, copied: bool) -> tuple[Lease, ChunkBatch]:
        await self._turns.give()
        while True:
            self._check_open()
            if self._failure is not None:
                raise self._failure
            self._leases.raise_lost(committing=False)
            await self._be_sure()
            while (gap := self._leases.next_gaps()) is not None:  # records removed before any member found them
                self._tell_gap(gap)
            try:
                lease = self._current
                if lease is not None:
                    chunk = await _following(self._chunks, lease, copied=copied)
                    if chunk is not None:
                        lease.given = chunk.next
                        return lease, chunk
                    self._leases.end_opened(lease)
                    self._current = None
                    self._chunks.clear()
                arrived = await self._fetcher.take()
            except KeraError as error:
                self._failure = error
                raise
            if arrived is not None:
                self._use(arrived)

    async def _be_sure(self) -> None:
        """Wait while other members may have this member's groups."""
        while not self._closed and self._failure is None and self._liveness.in_doubt:
            await self._rounds.answer()

    def _use(self, arrived: Arrived) -> None:
        """Deliver an arrival of a group. Raises `DataLost`."""
        lease = self._leases.of(arrived.range)
        if lease is None:
            return
        if arrived.fetched is not None:
            if lease.open(arrived.fetched, arrived.range):
                self._current = lease
                self._chunks.open(arrived.fetched)
        elif arrived.gap is None:
            if arrived.range is lease.range:
                self._leases.end(lease)
        else:
            self._tell_gap(self._leases.pass_gap(lease, arrived.gap))

    def _tell_gap(self, gap: DataLost | None) -> None:
        if gap is None:
            return
        if self._settings.on_data_lost == "raise":
            raise gap
        log.warning("records are gone; skipped", consumer_group=self.consumer_group, error=gap.message)


async def _following(chunks: Chunks, lease: Lease, *, copied: bool) -> ChunkBatch | None:
    """Return the next chunk of a lease's group; None: it has no further one."""
    chunk = await chunks.following(copied=copied) if lease.usable else None
    # The fetched data may go on with the entry's next group behind the end of this one.
    if chunk is None or chunk.start.group_id != lease.key.group_id:
        return None
    cut_at = lease.opened_range.cut_at
    return chunk if cut_at is None or chunk.next <= cut_at else chunk.until(cut_at)
