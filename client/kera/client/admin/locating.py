"""Finds places in entries: after a number of records or bytes, at a time, and where a range can be cut.

Brokers answer with chunk boundaries, from their knowledge of their segments; no chunks are transferred. A place by
record (`Unit`) can lie within a chunk. To find it, the one chunk at the boundary is read.

A search follows an entry that has moved from broker to broker; each answers how far its part goes. It passes over
records that were lost between two brokers, as brokers pass over records lost within an interval: readers of the range
get the error. A place right behind lost records says so (`ChunkPlace.lost_from`), if the target may have been among
them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import pyarrow.compute as pc

from kera.client import arguments
from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.asking import ask_broker, broker_failed, same_stream
from kera.client.cluster.batches import batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.cluster.retry import retrying
from kera.client.cluster.sense import available_from
from kera.client.consuming.delivering.records import times_of
from kera.client.consuming.range_reading import read_range
from kera.client.positions import ChunkPlace, check_position
from kera.client.settings import ConsumerSettings
from kera.client.types import EntryBounds, StreamDescription, fill_cursor, position_of
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError, ProtocolError, Unavailable
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2

QUERIES_MAX = 512
"""Maximum number of queries in one request; brokers take twice as many, and a query can need two."""
READ_AT_ONCE_MAX = 64
"""Chunks that are read at the same time to find places within them."""

Unit = Literal["chunk", "record"]
"""How exact a place is: the start of a chunk, or a record, which can lie within a chunk."""


class ChunkQuery(NamedTuple):
    """A query for a place from `start` up to `end` (None: the present durable head), by one of the last three fields.

    `records_max`, `bytes_max`: the furthest boundary with at most so many records, or bytes of chunks, before it, but
    behind at least one chunk, if there is one. `timestamp_us`: the first chunk with a record at or after this time; the
    end if there is none.
    """

    streamlet_id: int
    entry: int
    start: Position
    end: Position | None = None
    records_max: int | None = None
    bytes_max: int | None = None
    timestamp_us: int | None = None


class SegmentBounds(NamedTuple):
    """A piece of an entry that is in one segment, and so at one broker. It is not empty.

    Cut a range only where pieces start: then records that are missing between two pieces belong to the part that ends
    there, and its reader gets the error.
    """

    start: Position
    end: Position
    first_record: int
    next_record: int
    length_bytes: int
    broker_id: int
    """The broker that has it."""
    resident: bool
    """Whether it is in the broker's memory now."""


async def locate(
    cluster: Cluster, name: str, queries: Sequence[ChunkQuery], *, unit: Unit = "chunk"
) -> list[ChunkPlace]:
    """See `Client.locate`."""
    if unit not in get_args(Unit):
        raise InvalidArgument(f"unit is {unit!r}, and takes 'chunk' or 'record'", unit=str(unit))
    stream = await cluster.stream_or_last_seen(name)
    arguments.all_of("queries", queries, Sequence, ChunkQuery, "a list of ChunkQuery")
    if unit == "record" and any(query.bytes_max is not None for query in queries):
        raise InvalidArgument("bytes are those of whole chunks: with unit='record', a query takes no bytes_max")
    searches = [_Search.of(stream, query) for query in queries]

    async def attempt() -> None:
        await _round(cluster, name, stream.stream_id, [search for search in searches if search.place is None])

    while any(search.place is None for search in searches):
        await retrying(attempt, cluster.settings)
    places = [search.place for search in searches if search.place is not None]
    return await _by_record(cluster, stream, searches, places) if unit == "record" else places


async def _by_record(
    cluster: Cluster, stream: StreamDescription, searches: Sequence[_Search], places: Sequence[ChunkPlace]
) -> list[ChunkPlace]:
    """Find the places of records from places at chunk boundaries. Reads the chunk at each boundary."""
    if not places:
        return []
    bounds = await cluster.bounds(stream.name)
    # One chunk of each range is enough.
    settings = ConsumerSettings.load(
        shared_memory="never", corrupt_chunks="skip", joined_bytes_max=0, fetch_bytes_max=1, prefetch_bytes_max=1
    )

    async def find(search: _Search, place: ChunkPlace) -> ChunkPlace:
        place = search.boundary_before(place)
        _, streamlet_id, entry = search.entry
        end = search.query.end or bounds[streamlet_id][entry].end
        if place.position < end:
            range_ = Wanted(search.entry, place.position, end)
            async with aclosing(read_range(cluster, settings, stream, range_)) as chunks:
                async for chunk in chunks:
                    return search.place_within(chunk, place, stream)
        return place

    found: list[ChunkPlace] = []
    for some in batched(zip(searches, places, strict=True), READ_AT_ONCE_MAX):
        found += await asyncio.gather(*(find(search, place) for search, place in some))
    return found


async def positions_of(
    cluster: Cluster, name: str, records: Mapping[int, Sequence[int]]
) -> dict[int, list[ChunkPlace]]:
    """See `Client.positions_of`."""
    stream = await cluster.stream_or_last_seen(name)
    expected = "the ordinals of records per streamlet and entry, as {0: [1000]}"
    arguments.instance("records", records, Mapping, expected)
    for streamlet_id, ordinals in records.items():
        arguments.instance("records", ordinals, Sequence, expected)
        for entry, ordinal in enumerate(ordinals):
            stream.entry_id(streamlet_id, entry)
            arguments.whole("records", ordinal, 0, (1 << 63) - 1)
    bounds = await cluster.bounds(name)
    queries = []
    for streamlet_id, ordinals in records.items():
        for entry, ordinal in enumerate(ordinals):
            there = bounds[streamlet_id][entry]
            if not there.first_record <= ordinal <= there.next_record:
                raise _no_record(name, streamlet_id, entry, ordinal, there)
            passed = ordinal - there.first_record
            queries.append(ChunkQuery(streamlet_id, entry, there.start, there.end, records_max=passed))
    places = iter(await locate(cluster, name, queries, unit="record"))
    return {streamlet_id: [next(places) for _ in ordinals] for streamlet_id, ordinals in records.items()}


def _no_record(name: str, streamlet_id: int, entry: int, ordinal: int, there: EntryBounds) -> KeraError:
    where = f"streamlet {streamlet_id}, entry {entry} of stream {name!r}"
    attributes = {"stream": name, "streamlet_id": streamlet_id, "entry": entry}
    if ordinal < there.first_record:
        return DataLost(
            f"record {ordinal} of {where} has been removed: the oldest is {there.first_record}",
            **attributes,
            available_from=list(there.start),
            available_record=there.first_record,
        )
    return InvalidArgument(
        f"{where} has no record {ordinal} yet: the next one will be {there.next_record}", **attributes, record=ordinal
    )


async def positions_at(
    cluster: Cluster, name: str, timestamp_us: int, *, unit: Unit = "chunk"
) -> dict[int, list[ChunkPlace]]:
    """See `Client.positions_at`."""
    stream = await cluster.stream_or_last_seen(name)
    entries = range(stream.config.entries)
    streamlets = sorted(stream.assignments)
    queries = [
        ChunkQuery(streamlet_id, entry, EARLIEST, timestamp_us=timestamp_us)
        for streamlet_id in streamlets
        for entry in entries
    ]
    places = iter(await locate(cluster, name, queries, unit=unit))
    return {streamlet_id: [next(places) for _ in entries] for streamlet_id in streamlets}


async def segments(
    cluster: Cluster, name: str, streamlet_id: int, entry: int, start: Position, end: Position | None
) -> list[SegmentBounds]:
    """See `Client.segments`."""
    stream = await cluster.stream_or_last_seen(name)
    entry_id = stream.entry_id(streamlet_id, entry)
    start = check_position("start", start)
    if end is not None:
        end = check_position("end", end)
    if end is None:
        end = (await cluster.bounds(name))[streamlet_id][entry].end
    found: list[SegmentBounds] = []
    position = start

    async def attempt() -> Position:
        """Ask one broker for more segments. Returns where to go on."""
        now = same_stream(await cluster.stream_or_last_seen(name), entry_id.stream_id)
        broker_id = now.assignments[streamlet_id].broker_at(position)
        request = broker_pb2.ListSegmentsRequest()
        fill_cursor(request.start, entry_id, position)
        fill_cursor(request.end, entry_id, end)
        try:
            answer = await ask_broker(cluster, now, broker_id, api.LIST_SEGMENTS, request)
        except DataLost as error:
            if position == start != EARLIEST:
                raise
            return available_from(error)
        found.extend(_segment_bounds(each, broker_id) for each in answer.segments)
        return position_of(answer.next)

    while position < end:
        following = await retrying(attempt, cluster.settings)
        if following <= position:
            raise InvalidCursor(
                f"{tuple(end)} is beyond the end of streamlet {streamlet_id} of stream {name!r}",
                stream=name,
                streamlet_id=streamlet_id,
            )
        position = following
    return found


def _segment_bounds(message: broker_pb2.SegmentBounds, broker_id: int) -> SegmentBounds:
    return SegmentBounds(
        position_of(message.start),
        position_of(message.end),
        message.first_record,
        message.next_record,
        message.length_bytes,
        broker_id,
        message.resident,
    )


@dataclass(slots=True)
class _Search:
    """The state of a query that goes over the brokers of its entry."""

    entry: EntryId
    query: ChunkQuery
    position: Position
    """Position where the entry continues."""
    record: int = 0
    """Ordinal at `position`, known once chunks were passed."""
    bytes: int = 0
    """Size of the chunks that were passed."""
    start_record: int | None = None
    """Ordinal at the query's start; a query for records asks for it first."""
    lost_from: Position | None = None
    """The start of lost records that end at `position`."""
    place: ChunkPlace | None = None
    """The answer."""

    @classmethod
    def of(cls, stream: StreamDescription, query: ChunkQuery) -> _Search:
        """Make a search for a checked query. Raises `InvalidArgument`, `StreamletOutOfRange`."""
        limits = query.records_max, query.bytes_max, query.timestamp_us
        if sum(limit is not None for limit in limits) != 1:
            raise InvalidArgument("a query has exactly one of records_max, bytes_max and timestamp_us")
        for parameter, limit in zip(("records_max", "bytes_max"), limits[:2], strict=True):
            if limit is not None:
                arguments.whole(parameter, limit, 0, (1 << 63) - 1)
        if query.timestamp_us is not None:
            unit = " (microseconds since the Unix epoch)"
            arguments.whole("timestamp_us", query.timestamp_us, -1 << 63, (1 << 63) - 1, what=unit)
        start = check_position("start", query.start)
        if query.end is not None:
            check_position("end", query.end)
        return cls(stream.entry_id(query.streamlet_id, query.entry), query, start)

    @property
    def needs_origin(self) -> bool:
        """Whether the search also has to ask for the ordinal of the start."""
        return self.query.records_max is not None and self.start_record is None

    @property
    def left(self) -> int:
        """The rest of `records_max` or `bytes_max` at this point."""
        if self.query.records_max is not None:
            return self.query.records_max - (self.record - (self.start_record or 0) if self.bytes else 0)
        return (self.query.bytes_max or 0) - self.bytes

    def messages(self) -> list[broker_pb2.ChunkQuery]:
        """Return the queries for the broker that has `position`."""
        asked = broker_pb2.ChunkQuery()
        fill_cursor(asked.start, self.entry, self.position)
        if self.query.end is not None:
            fill_cursor(asked.end, self.entry, self.query.end)
        if self.query.timestamp_us is not None:
            asked.timestamp_us = self.query.timestamp_us
        elif self.query.records_max is not None:
            asked.records_max = self.left
        else:
            asked.bytes_max = self.left
        if not self.needs_origin:
            return [asked]
        origin = broker_pb2.ChunkQuery(start=asked.start, end=asked.start, bytes_max=0)  # returns the start's ordinal
        return [origin, asked]

    def take(self, answers: Sequence[broker_pb2.ChunkPlace]) -> bool:
        """Apply a broker's answers. Returns whether the search got further. Raises the broker's error."""
        try:
            for each in answers:
                if each.HasField("error"):
                    raise error_from_message(each.error)
        except DataLost as error:
            if self.position == self.query.start != EARLIEST:
                raise
            self._skip(error)
            return True
        if self.needs_origin:
            self.start_record = answers[0].record
        answer = answers[-1]
        position = position_of(answer.place)
        if self.bytes and self._is_over(answer):
            self.place = self._found()
            return True
        further = position > self.position
        if answer.HasField("lost_from"):
            self.lost_from = position_of(answer.lost_from)
        elif answer.bytes:
            self.lost_from = None
        self.position, self.record, self.bytes = position, answer.record, self.bytes + answer.bytes
        end = self.query.end
        used_up = self.query.timestamp_us is None and self.bytes > 0 and self.left <= 0
        if not answer.moved or used_up or (end is not None and position >= end):
            self.place = self._found()
        return further or self.place is not None

    def _found(self) -> ChunkPlace:
        wanted = self._wanted_record
        may_be_lost = self.query.timestamp_us is not None or (wanted is not None and self.record > wanted)
        return ChunkPlace(self.position, self.record, self.bytes, lost_from=self.lost_from if may_be_lost else None)

    def boundary_before(self, place: ChunkPlace) -> ChunkPlace:
        """Return the last boundary at or before the wanted record; `place` is the answer by chunks."""
        wanted = self._wanted_record
        if wanted is None or place.record <= wanted or place.lost_from is not None:
            return place
        return ChunkPlace(self.query.start, self.start_record or 0, 0)  # its first chunk has more than `records_max`

    def place_within(self, chunk: ChunkBatch, boundary: ChunkPlace, stream: StreamDescription) -> ChunkPlace:
        """Return the place in `chunk`, the first one at `boundary`; behind the chunk if it does not have the record."""
        first, count = chunk.header.first_record, chunk.header.record_count
        skipped, wanted = 0, self._wanted_record
        if wanted is not None:
            skipped = min(max(0, wanted - first), count)
        elif chunk.batch.num_rows:  # a damaged chunk has none
            late_enough = pc.greater_equal(times_of(chunk, stream), self.query.timestamp_us)
            index = pc.index(late_enough, value=True).as_py()
            skipped = count if index < 0 else index
        if skipped < count:
            return ChunkPlace(
                chunk.start, first + skipped, boundary.bytes, skipped, None if skipped else boundary.lost_from
            )
        return ChunkPlace(chunk.next, first + count, boundary.bytes + chunk.header.chunk_bytes)

    @property
    def _wanted_record(self) -> int | None:
        """Ordinal of the record to find; None: the query is for a time."""
        limit = self.query.records_max
        return None if limit is None else (self.start_record or 0) + limit

    def _is_over(self, answer: broker_pb2.ChunkPlace) -> bool:
        """Return whether the first chunk at this broker, which is not the query's first, is too large for the query."""
        if self.query.records_max is not None:
            return answer.record - (self.start_record or 0) > self.query.records_max
        return self.query.bytes_max is not None and self.bytes + answer.bytes > self.query.bytes_max

    def _skip(self, error: DataLost) -> None:
        """Go on behind records that no longer exist."""
        if self.bytes:  # otherwise retention may just have removed them
            self.lost_from = self.lost_from or self.position
        self.position = available_from(error)
        self.record = error.attributes.get("available_record", self.record)
        if not self.bytes:
            self.start_record = None  # the search starts there
        elif self.query.records_max is not None and self.left < 0:
            self.place = self._found()  # the record is among the lost ones


async def _round(cluster: Cluster, name: str, stream_id: int, searches: Sequence[_Search]) -> None:
    """Ask the brokers of all searches, each once. Raises a final error, or the first one if no search got further."""
    stream = same_stream(await cluster.stream_or_last_seen(name), stream_id)
    of_brokers: dict[int, list[_Search]] = {}
    for search in searches:
        broker_id = stream.assignments[search.entry.streamlet_id].broker_at(search.position)
        of_brokers.setdefault(broker_id, []).append(search)
    outcomes = await asyncio.gather(
        *(
            _locate_at(cluster, stream, broker_id, there[first : first + QUERIES_MAX])
            for broker_id, there in of_brokers.items()
            for first in range(0, len(there), QUERIES_MAX)
        )
    )
    errors = [error for _, some in outcomes for error in some]
    final = next((error for error in errors if not error.retriable), None)
    if final is not None:
        raise final
    if not any(further for further, _ in outcomes):
        raise errors[0] if errors else Unavailable(f"brokers of stream {name!r} do not get any further", stream=name)


async def _locate_at(
    cluster: Cluster, stream: StreamDescription, broker_id: int, searches: Iterable[_Search]
) -> tuple[bool, list[KeraError]]:
    """Ask one broker. Returns whether any search got further, and the errors."""
    request = broker_pb2.LocateChunksRequest()
    asked = [(search, search.messages()) for search in searches]
    for _, messages in asked:
        request.queries.extend(messages)
    try:
        answer = await ask_broker(cluster, stream, broker_id, api.LOCATE_CHUNKS, request)
    except KeraError as error:
        return False, [error]
    wanted = sum(len(messages) for _, messages in asked)
    if len(answer.places) != wanted:
        text = f"broker {broker_id} was asked for {wanted} places, and answered with {len(answer.places)}"
        return False, [ProtocolError(text, broker_id=broker_id)]
    places = iter(answer.places)
    further, errors = False, []
    for search, messages in asked:
        try:
            further |= search.take([next(places) for _ in messages])
        except KeraError as error:
            errors.append(broker_failed(cluster, stream.name, error))
    return further, errors
