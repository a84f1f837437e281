"""Where in its log an entry has so many records or bytes, or a time, and where a range of it can be cut.

Answers are chunk boundaries. No chunk travels: brokers answer from what they know of their segments, and look into one
only where a boundary within it is asked for.

An entry that has moved is followed from broker to broker, each of which tells how far one gets with it. What was lost
between two of them is passed over, as brokers do with what was lost within an interval: who reads the range is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kera.client import arguments
from kera.client.cluster.asking import ask_broker, broker_failed, same_stream
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import retrying
from kera.client.positions import check_position
from kera.client.types import StreamDescription, fill_cursor, position_of
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError, ProtocolError, Unavailable
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2

QUERIES_MAX = 512
"""In one request; brokers take twice as many, and a query can be two."""


class ChunkQuery(NamedTuple):
    """From `start` on, up to `end` (None: the durable head of when it is asked); exactly one of the last three is set.

    `records_max`, `bytes_max`: the furthest boundary with at most so many records, or bytes of chunks, before it, but
    at least one chunk, if there is one. `timestamp_us`: the first chunk with a record at or after this time; the end if
    there is none.
    """

    streamlet_id: int
    entry: int
    start: Position
    end: Position | None = None
    records_max: int | None = None
    bytes_max: int | None = None
    timestamp_us: int | None = None


class ChunkPlace(NamedTuple):
    """A chunk boundary."""

    position: Position
    record: int
    """Ordinal of the record there."""
    bytes: int
    """Of chunks between the query's start and this place."""


class SegmentBounds(NamedTuple):
    """A piece of an entry that is in one segment, and so at one broker. It is not empty.

    Who cuts a range does so where pieces start: then what is missing between two of them belongs to the part that ends
    there, and whoever reads that is told.
    """

    start: Position
    end: Position
    first_record: int
    next_record: int
    length_bytes: int
    broker_id: int
    """Where it is."""
    resident: bool
    """It is in the broker's memory now."""


async def locate(cluster: Cluster, name: str, queries: Sequence[ChunkQuery]) -> list[ChunkPlace]:
    """See `Client.locate`."""
    stream = await cluster.stream_or_last_seen(name)
    arguments.all_of("queries", queries, Sequence, ChunkQuery, "a list of ChunkQuery")
    searches = [_Search.of(stream, query) for query in queries]

    async def attempt() -> None:
        await _round(cluster, name, stream.stream_id, [search for search in searches if search.place is None])

    while any(search.place is None for search in searches):
        await retrying(attempt, cluster.settings)
    return [search.place for search in searches if search.place is not None]


async def positions_at(cluster: Cluster, name: str, timestamp_us: int) -> dict[int, list[ChunkPlace]]:
    """See `Client.positions_at`."""
    stream = await cluster.stream_or_last_seen(name)
    entries = range(stream.config.entries)
    streamlets = sorted(stream.assignments)
    queries = [
        ChunkQuery(streamlet_id, entry, EARLIEST, timestamp_us=timestamp_us)
        for streamlet_id in streamlets
        for entry in entries
    ]
    places = iter(await locate(cluster, name, queries))
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
        """Ask for more; where to go on."""
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
            return _available(error)
        found.extend(_segment_bounds(each, broker_id) for each in answer.segments)
        return position_of(answer.next)

    while position < end:
        following = await retrying(attempt, cluster.settings)
        if following <= position:
            raise InvalidCursor(
                f"{tuple(end)} lies behind the end of streamlet {streamlet_id} of stream {name!r}",
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
    """A query on its way over the brokers of its entry."""

    entry: EntryId
    query: ChunkQuery
    position: Position
    """Where it goes on."""
    record: int = 0
    """Ordinal there, known once something was passed over."""
    bytes: int = 0
    """Of chunks that were passed over."""
    start_record: int | None = None
    """Ordinal at the query's start, which a query for records begins with."""
    place: ChunkPlace | None = None
    """The answer."""

    @classmethod
    def of(cls, stream: StreamDescription, query: ChunkQuery) -> _Search:
        """Raises `InvalidArgument`, `StreamletOutOfRange`."""
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
        """Whether the ordinal of the start has to be asked for, too."""
        return self.query.records_max is not None and self.start_record is None

    @property
    def left(self) -> int:
        """What of `records_max` or `bytes_max` is left here."""
        if self.query.records_max is not None:
            return self.query.records_max - (self.record - (self.start_record or 0) if self.bytes else 0)
        return (self.query.bytes_max or 0) - self.bytes

    def messages(self) -> list[broker_pb2.ChunkQuery]:
        """What to ask the broker that has `position`."""
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
        origin = broker_pb2.ChunkQuery(start=asked.start, end=asked.start, bytes_max=0)  # it says what is at its start
        return [origin, asked]

    def take(self, answers: Sequence[broker_pb2.ChunkPlace]) -> bool:
        """Take note of what the broker says; returns whether that gets it any further. Raises its error."""
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
            self.place = ChunkPlace(self.position, self.record, self.bytes)
            return True
        further = position > self.position
        self.position, self.record, self.bytes = position, answer.record, self.bytes + answer.bytes
        end = self.query.end
        used_up = self.query.timestamp_us is None and self.bytes > 0 and self.left <= 0
        if not answer.moved or used_up or (end is not None and position >= end):
            self.place = ChunkPlace(position, answer.record, self.bytes)
        return further or self.place is not None

    def _is_over(self, answer: broker_pb2.ChunkPlace) -> bool:
        """Whether a chunk that comes first at this broker, but not for the query, is too large for it."""
        if self.query.records_max is not None:
            return answer.record - (self.start_record or 0) > self.query.records_max
        return self.query.bytes_max is not None and self.bytes + answer.bytes > self.query.bytes_max

    def _skip(self, error: DataLost) -> None:
        """Go on behind what is not there any more."""
        self.position = _available(error)
        self.record = error.attributes.get("available_record", self.record)
        if not self.bytes:
            self.start_record = None  # it starts there


async def _round(cluster: Cluster, name: str, stream_id: int, searches: Sequence[_Search]) -> None:
    """Ask all brokers for what they have, each once. Raises the first error if that gets none of them any further."""
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
    """Ask one broker; whether that gets any search further, and what went wrong."""
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


def _available(error: DataLost) -> Position:
    """Where an entry goes on behind what is not there any more. Raises `ProtocolError` if the broker does not say."""
    match error.attributes.get("available_from"):
        case [int(group_id), int(segment_id), int(offset)]:
            return Position(group_id, segment_id, offset)
    raise ProtocolError(f"a broker does not say from where on there is something: {error.message}")
