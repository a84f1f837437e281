"""locateChunks and listSegments: run ``kera.broker.log.locate``, and load the segments that it has to look into.

Loads have the same time limit and errors as those of readers (``kera.broker.serving.fetch``). A request looks into one
segment after the other, so it needs only one of them in memory at a time. Other requests are handled in between.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from kera.broker.log.entry import Entry
from kera.broker.log.locate import Progress, Query, Step, list_segments, locate
from kera.broker.log.read_plan import entry_of
from kera.broker.log.segment import Segment
from kera.broker.ownership.streams import Streams
from kera.broker.records import Key
from kera.broker.serving.cursors import position_of
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.stream_access import CheckStream, nothing_is_kept
from kera.broker.storage.load_wait import until_loaded
from kera.broker.storage.persistence import PersistenceManager
from kera.core.access.rights import Operation
from kera.core.base.turns import TimeSlices, Turns
from kera.core.errors import InvalidArgument, KeraError, Unavailable
from kera.core.rpc import Call, Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2


class _Lookup(NamedTuple):
    """A query, as received and as `locate` takes it, and the message for its answer."""

    wanted: broker_pb2.ChunkQuery
    query: Query
    place: broker_pb2.ChunkPlace


class _Waiting(NamedTuple):
    """A query that needs a segment that is only on disk."""

    lookup: _Lookup
    entry: Entry
    step: Step


class _Turn:
    """Lets other requests have their turn whenever this one has walked through `segments` segments."""

    def __init__(self, pace: TimeSlices, segments: int) -> None:
        self._pace = pace
        self._segments = self.left = segments

    async def took(self, segments: int) -> None:
        """Note that the request has walked through further segments, and wait for its next turn if it has to."""
        self.left -= segments
        if self.left <= 0:
            self.left = self._segments
            await self._pace.step()


class Lookups:
    """Handles locateChunks and listSegments for the service."""

    def __init__(
        self,
        streams: Streams,
        memory: PersistenceManager,
        turns: Turns,
        limits: ServingLimits,
        check: CheckStream = nothing_is_kept,
    ) -> None:
        self._check = check
        self._streams = streams
        self._memory = memory
        self._turns = turns
        self._limits = limits

    async def locate(self, call: Call[broker_pb2.LocateChunksRequest]) -> Reply[broker_pb2.LocateChunksResponse]:
        """Return one place, or error, per query."""
        queries, limits = call.message.queries, self._limits
        if len(queries) > limits.queries_max:
            raise InvalidArgument(f"at most {limits.queries_max} queries in a request", limit=limits.queries_max)
        response = broker_pb2.LocateChunksResponse()
        segments_max = max(limits.walk_segments_min, limits.walk_segments // max(1, len(queries)))
        load_until = asyncio.get_running_loop().time() + self._limits.load_wait_ms / 1000
        waiting: list[_Waiting] = []
        await self._turns.turn(id(call.peer))  # so that many simultaneous requests do not all begin at once
        turn = _Turn(self._turns.pace(id(call.peer)), limits.turn_segments)
        for wanted in queries:
            place = response.places.add()
            try:
                self._check(call.peer, Operation.DESCRIBE, wanted.start.stream_id)
                lookup = _Lookup(wanted, _query(wanted), place)
                entry, step = await self._go_on(lookup, Progress(position_of(wanted.start)), segments_max, turn)
            except KeraError as error:
                place.error.CopyFrom(error_to_message(error))
                continue
            if step.missing is not None:
                waiting.append(_Waiting(lookup, entry, step))
        # Queries that wait for a recovery come last, because it is slow: the others need only this broker's disk.
        waiting.sort(key=lambda each: each.step.missing is not None and each.entry.recovering(each.step.missing))
        loads = 0
        for each in waiting:
            try:
                loads += await self._look_into(each, limits.loads_max - loads, load_until, segments_max, turn)
            except KeraError as error:
                each.lookup.place.error.CopyFrom(error_to_message(error))
        return Reply(response)

    async def _go_on(self, lookup: _Lookup, begun: Progress, segments_max: int, turn: _Turn) -> tuple[Entry, Step]:
        """Continue a query through at most `segments_max` segments, and fill in its answer if it has one."""
        while True:
            entry, step = self._step(lookup, begun, min(segments_max, turn.left))
            segments_max -= step.walked
            await turn.took(step.walked)
            if not step.cut or segments_max <= 0:
                return entry, step
            begun = step.progress

    def _step(self, lookup: _Lookup, begun: Progress, segments_max: int) -> tuple[Entry, Step]:
        """Continue a query within one turn, and fill in its answer, or how far it got."""
        start = lookup.wanted.start
        streamlet = self._streams.streamlet(start.stream_id, start.streamlet_id)
        entry = entry_of(streamlet, start.entry)
        step = locate(streamlet, start.entry, lookup.query, begun, segments_max)
        if step.place is not None:
            answer = lookup.place
            _fill(answer.place, start, step.place.position)
            answer.record, answer.bytes, answer.moved = step.place.record, step.place.bytes, step.place.moved
            if step.place.lost_from is not None:
                _fill(answer.lost_from, start, step.place.lost_from)
        return entry, step

    async def _look_into(
        self, waiting: _Waiting, loads_max: int, until_s: float, segments_max: int, turn: _Turn
    ) -> int:
        """Load the segments that a query needs until it is answered; return how many were loaded."""
        lookup, entry, step = waiting
        loads = 0
        while step.missing is not None:
            if loads == loads_max:
                limit = self._limits.loads_max
                raise Unavailable(
                    f"at most {limit} segments are loaded for one request; ask again for the rest", limit=limit
                )
            loads += 1
            key = step.missing
            await self._load(entry, key, until_s)
            segment = entry.resident.get(key)
            entry, step = await self._go_on(lookup, step.progress, segments_max, turn)
            self._let_go(segment)
        return loads

    async def _load(self, entry: Entry, key: Key, until_s: float) -> None:
        """Wait until a segment is in memory, or turns out to be removed. Raises if it cannot be loaded in time."""
        await until_loaded(self._memory.loads, entry, key, until_s, ahead=False)

    def _let_go(self, segment: Segment | None) -> None:
        """Note that the request needs a segment, if there is one, no longer."""
        if segment is not None:
            self._memory.slots.touched(segment)

    async def list_segments(self, call: Call[broker_pb2.ListSegmentsRequest]) -> Reply[broker_pb2.ListSegmentsResponse]:
        """Return the segments of a range of one entry, as far as this broker has them."""
        request = call.message
        start, end = position_of(request.start), position_of(request.end) if request.HasField("end") else None
        segments_max = min(request.segments_max or self._limits.list_segments_max, self._limits.list_segments_max)
        load_until = asyncio.get_running_loop().time() + self._limits.load_wait_ms / 1000
        loaded: Segment | None = None
        await self._turns.turn(id(call.peer))
        while True:
            streamlet = self._streams.streamlet(request.start.stream_id, request.start.streamlet_id)
            listing = list_segments(streamlet, request.start.entry, start, end, segments_max)
            self._let_go(loaded)
            if listing.missing is None or listing.segments:
                break
            entry = streamlet.entries[request.start.entry]
            await self._load(entry, listing.missing, load_until)
            loaded = entry.resident.get(listing.missing)
        response = broker_pb2.ListSegmentsResponse(complete=listing.complete)
        _fill(response.next, request.start, listing.next)
        for each in listing.segments:
            row = response.segments.add(
                first_record=each.first_record,
                next_record=each.next_record,
                length_bytes=each.end.offset - each.start.offset,
                resident=each.resident,
            )
            _fill(row.start, request.start, each.start)
            _fill(row.end, request.start, each.end)
        return Reply(response)


def _query(wanted: broker_pb2.ChunkQuery) -> Query:
    """Return a query from its wire form. Raises `InvalidArgument` if it has no limit to look for."""
    limit = wanted.WhichOneof("limit")
    if limit is None:
        raise InvalidArgument("a query looks for records, bytes or a time")
    return Query(position_of(wanted.end) if wanted.HasField("end") else None, **{limit: getattr(wanted, limit)})


def _fill(cursor: common_pb2.Cursor, where: common_pb2.Cursor, position: tuple[int, int, int]) -> None:
    """Make `cursor` stand for a position in the entry of `where`."""
    cursor.stream_id, cursor.streamlet_id, cursor.entry = where.stream_id, where.streamlet_id, where.entry
    cursor.group_id, cursor.segment_id, cursor.position = position
