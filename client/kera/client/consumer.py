"""The consumer: pulls chunks of one or more streams from all their brokers (thesis 7.1.2).

One task per broker fetches ahead, in the order of each entry, into a queue of bounded size; the application takes
batches or records from the queue. Between entries there is no order, as between partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Literal, Self

from kera.client.cluster import Cluster
from kera.client.fetch import Fetched, Fetcher, Wanted, batches_of
from kera.client.records import records_of
from kera.client.retry import backoff_s
from kera.client.settings import ConsumerSettings
from kera.client.types import ChunkBatch, Record, StreamDescription
from kera.core.errors import ClosedError, InvalidArgument, KeraError, NotOwner, Unavailable, UnknownStream
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.telemetry import get_logger

log = get_logger("kera.consumer")

Start = Literal["earliest", "latest"]
End = Literal["latest"]
Positions = Mapping[int, Sequence[Position]]
"""Per streamlet, one position per entry."""


class Consumer:
    """Reads streams from a start on. Made by `Client.consumer`; use it as an async context manager.

    ``async for record in consumer`` gives records as Python values; ``async for batch in consumer.batches()`` gives
    Arrow batches without turning values into Python objects, which is some forty times faster. A consumer with
    ``end="latest"`` stops at what was there when it started. Whoever leaves such a loop may begin another one, which
    goes on where the first one stopped.
    """

    def __init__(
        self,
        cluster: Cluster,
        streams: Sequence[str],
        settings: ConsumerSettings,
        *,
        start: Start | Positions = "latest",
        end: End | Positions | None = None,
    ) -> None:
        if not streams:
            raise InvalidArgument("a consumer needs a stream")
        if len(streams) > 1 and not (isinstance(start, str) and (end is None or isinstance(end, str))):
            raise InvalidArgument("explicit positions go with a single stream")
        self._cluster = cluster
        self._names = tuple(dict.fromkeys(streams))
        self._settings = settings
        self._start = start
        self._end = end
        self._streams: dict[int, StreamDescription] = {}
        self._positions: dict[EntryId, Position] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[Fetched | BaseException | None] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._running = 0
        """Tasks whose end has not been taken from the queue."""
        self._failure: BaseException | None = None
        """What ended the reading; told to everyone who asks for more."""
        self._chunks: Iterator[ChunkBatch] = iter(())
        """The rest of what was taken from the queue last."""
        self._open: ChunkBatch | None = None
        """The chunk whose records are being taken."""
        self._open_records: Iterator[Record] = iter(())
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Look up the streams, decide where to start, begin to fetch. Raises `UnknownStream`, `InvalidArgument`."""
        if self._tasks:
            return
        if self._closed:
            raise ClosedError("the consumer is closed")
        wanted: dict[tuple[str, int], list[Wanted]] = {}
        for name in self._names:
            stream = await self._cluster.stream(name)
            self._streams[stream.stream_id] = stream
            for item in await self._ranges(stream):
                owner = stream.assignments[item.entry.streamlet_id].broker_id
                self._positions[item.entry] = item.start
                if item.end is None or item.start < item.end:
                    wanted.setdefault((name, owner), []).append(item)
        for (name, broker_id), ranges in wanted.items():
            self._tasks.append(asyncio.create_task(self._run(name, broker_id, ranges)))
        self._running = len(self._tasks)

    async def _ranges(self, stream: StreamDescription) -> list[Wanted]:
        """What to read of each entry, those included that have nothing to read."""
        needs_bounds = self._start == "latest" or self._end == "latest"
        bounds = await self._cluster.bounds(stream.name) if needs_bounds else {}
        ranges = []
        for streamlet_id in stream.assignments:
            for entry in range(stream.config.entries):
                start, end = EARLIEST, None
                if self._start == "latest":
                    start = bounds[streamlet_id][entry].end
                elif not isinstance(self._start, str):
                    start = _given(self._start, streamlet_id, entry, stream)
                if self._end == "latest":
                    end = bounds[streamlet_id][entry].end
                elif self._end is not None:
                    end = _given(self._end, streamlet_id, entry, stream)
                ranges.append(Wanted(EntryId(stream.stream_id, streamlet_id, entry), start, end))
        return ranges

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Where to go on after what was taken so far, per streamlet and entry; can be given as a new `start`.

        A chunk counts as taken when it came out of `batches`, or when its last record came out of `records`.
        """
        name = stream or self._names[0]
        found: dict[int, list[Position]] = {}
        for entry, position in sorted(self._positions.items()):
            if self._streams[entry.stream_id].name == name:
                found.setdefault(entry.streamlet_id, []).append(position)
        return found

    async def commit(self) -> None:
        """Tell the brokers how far the application (the setting ``application_id``) has read all its streams.

        That is up to `positions`: what was taken counts as read, so commit when it has been dealt with. In this version
        a commit only holds back retention (``retention_applications``); it does not yet say where a consumer starts.

        Raises `InvalidArgument` when ``application_id`` is empty, `UnknownStream` when a stream was deleted, and
        `Unavailable` or `Uncertain` when a broker cannot be reached for longer than ``retry_timeout_ms``.
        """
        positions = dict(self._positions)  # what is taken meanwhile is not part of it
        for stream in self._streams.values():
            taken = {entry: at for entry, at in positions.items() if entry.stream_id == stream.stream_id}
            await self._cluster.commit(self._settings.application_id, stream.name, taken)

    async def batches(self) -> AsyncIterator[ChunkBatch]:
        """Each chunk as an Arrow batch in place.

        Raises `DataLost` when what it should read next has been removed, `UnknownStream` when a stream was deleted,
        `CorruptChunk`, and `Unavailable` when a broker cannot be reached for longer than ``retry_timeout_ms``.
        """
        await self.start()
        if self._open is not None:  # begun as records, and not taken to its end
            chunk, self._open, self._open_records = self._open, None, iter(())
            self._positions[chunk.entry] = chunk.next
            yield chunk
        while (chunk_or_end := await self._next_chunk()) is not None:
            self._positions[chunk_or_end.entry] = chunk_or_end.next
            yield chunk_or_end

    async def records(self) -> AsyncIterator[Record]:
        """Each record as Python values; see `batches` for what is raised."""
        await self.start()
        while True:
            chunk = self._open
            if chunk is not None:
                last = chunk.header.first_record + chunk.batch.num_rows - 1
                for record in self._open_records:
                    if record.offset == last:
                        self._open = None
                        self._positions[chunk.entry] = chunk.next
                    yield record
            self._open = await self._next_chunk()
            if self._open is None:
                return
            self._open_records = records_of(self._open, self._streams[self._open.entry.stream_id])

    async def _next_chunk(self) -> ChunkBatch | None:
        """The next chunk; None when everything that was asked for has been taken."""
        while True:
            if self._closed:
                raise ClosedError("the consumer is closed")
            if self._failure is not None:
                raise self._failure
            try:
                for chunk in self._chunks:
                    return chunk
            except KeraError as error:
                self._failure = error
                raise
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
                stream = self._streams[item.entry.stream_id]
                verify = self._settings.verify_checksums
                self._chunks = batches_of(item, stream.schema, stream.schema_id, verify=verify)

    def __aiter__(self) -> AsyncIterator[Record]:
        return self.records()

    async def close(self) -> None:
        """Stop fetching. Whoever waits for more gets `ClosedError`; batches that were taken stay as they are."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._chunks, self._open, self._open_records = iter(()), None, iter(())
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    # -- fetching ----------------------------------------------------------------------------------------------

    async def _run(self, name: str, broker_id: int, ranges: list[Wanted]) -> None:
        """Fetch from one broker until all ranges have ended; the queue learns how it ended."""
        try:
            await self._fetch_all(name, broker_id, ranges)
            self._queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised where the application waits
            self._queue.put_nowait(error)

    async def _fetch_all(self, name: str, broker_id: int, ranges: list[Wanted]) -> None:
        fetcher: Fetcher | None = None
        attempt, deadline_s = 0, 0.0
        loop = asyncio.get_running_loop()
        while ranges:
            await self._wait_for_room()
            try:
                fetcher = fetcher or await self._connect(name, broker_id)
                answers = await self._fetch(fetcher, ranges)
                attempt = 0
            except KeraError as error:
                if isinstance(error, (NotOwner, Unavailable, UnknownStream)):
                    self._cluster.forget(name)
                if not error.retriable:
                    raise
                attempt += 1
                if attempt == 1:
                    deadline_s = loop.time() + self._cluster.settings.retry_timeout_ms / 1000
                    log.warning("fetch failed; retrying", broker_id=broker_id, error=error.message)
                if loop.time() >= deadline_s:
                    raise
                fetcher = None
                await asyncio.sleep(backoff_s(self._cluster.settings, attempt))
                continue
            following = []
            for item, answer in zip(ranges, answers, strict=True):
                if answer.buffers:
                    self._queued_bytes += _size(answer)
                    self._queue.put_nowait(answer)
                if item.end is None or answer.next < item.end:
                    following.append(item._replace(start=answer.next))
            # In turn: a response has a bound, and whoever is asked first must not always be the same.
            ranges = following[1:] + following[:1]

    async def _wait_for_room(self) -> None:
        while self._queued_bytes >= self._settings.prefetch_bytes_max:
            self._room.clear()
            await self._room.wait()

    async def _fetch(self, fetcher: Fetcher, ranges: list[Wanted]) -> list[Fetched]:
        """One request; an error of a single range is an error of all."""
        answers = await fetcher.fetch(
            ranges,
            bytes_max=self._settings.fetch_bytes_max,
            wait_ms=self._settings.fetch_wait_ms,
            timeout_s=self._cluster.request_timeout_s,
        )
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return answers

    async def _connect(self, name: str, broker_id: int) -> Fetcher:
        stream = await self._cluster.stream(name)
        if stream.stream_id not in self._streams:
            raise InvalidArgument(
                f"stream {name!r} was deleted and created again; open it again", stream=name, stream_id=stream.stream_id
            )
        channel = await self._cluster.channel(stream, broker_id)
        return Fetcher(channel, self._settings)


def _given(positions: Positions, streamlet_id: int, entry: int, stream: StreamDescription) -> Position:
    try:
        return Position(*positions[streamlet_id][entry])
    except (KeyError, IndexError):
        raise InvalidArgument(
            f"no position is given for streamlet {streamlet_id}, entry {entry} of stream {stream.name!r}",
            stream=stream.name,
            streamlet_id=streamlet_id,
        ) from None


def _size(fetched: Fetched) -> int:
    return sum(buffer.size for buffer in fetched.buffers)
