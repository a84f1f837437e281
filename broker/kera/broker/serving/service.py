"""The broker's remote operations: thesis tables 6.1 and 6.2, and what the coordinator asks.

Handlers translate between messages and `Streamlet`; decisions are made there. Writes are in
``kera.broker.serving.write``, reads in ``kera.broker.serving.fetch``, searches in ``kera.broker.serving.lookups``, what
the coordinator orders in ``kera.broker.ownership.orders``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any

from kera.broker.counters import Counters
from kera.broker.log.bounds import end_of, lag_bytes, lag_records, list_groups, oldest_us, ordinal_at
from kera.broker.log.entry import Entry, length_of
from kera.broker.log.intervals import interval_after, interval_before, interval_of
from kera.broker.log.read_plan import (
    check_possible,
    entry_of,
    first_record,
    group_entry,
    interval_at,
    ordinal_of,
    resolve,
)
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.waiting import until_done
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.orders import Orders, Takeovers
from kera.broker.ownership.streams import Streams
from kera.broker.records import Key, SegmentRecord
from kera.broker.replication.manager import Replication
from kera.broker.serving.fetch import READ_BYTES_MAX, Fetches, ReadCall, ReadReply, position_of
from kera.broker.serving.lookups import Lookups
from kera.broker.serving.read_sessions import ReadSessions
from kera.broker.serving.write import PayloadCheck, Writer
from kera.broker.storage.persistence import PersistenceManager
from kera.core.errors import DataLost, InvalidArgument, KeraError, Unavailable
from kera.core.ids import EARLIEST, Position
from kera.core.record_batch import check_payload
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.method import Handler
from kera.core.rpc.wire import error_to_message
from kera.core.turns import Turns
from kera.v1 import broker_pb2, common_pb2

CONSUMER_GROUP_BYTES_MAX = 256
CONSUMER_GROUPS_MAX = 1024
"""Whose cursors an entry remembers."""
GROUPS_MAX = 4096
"""Told of in one answer."""
CURSORS_MAX = 65536
"""In one request that asks about them."""
CHANGES_MAX = 8192
"""Cursors in one request to commit or to truncate: each waits for the disk, and results are kept until all are done."""
ENTRIES_MAX = 32768
"""Described in one answer, in at most 128 bytes each: it has to fit into a message."""
STREAMLETS_MAX = 65536
"""In one request for descriptions."""


class BrokerService:
    """All handlers of one broker; `service()` gives them to the transports."""

    def __init__(  # noqa: PLR0913 - what a broker is made of
        self,
        streams: Streams,
        memory: PersistenceManager,
        replication: Replication,
        counters: Counters,
        *,
        pump: Callable[[], None],
        read_bytes_max: int = READ_BYTES_MAX,
        takeovers: Takeovers | None = None,
        coordinator: CoordinatorEpoch | None = None,
        check_payload: PayloadCheck = check_payload,
    ) -> None:
        """`pump`: carries out what replication wants to be done; `takeovers`: by default there are none.

        `coordinator`: whose orders are carried out; by default of any that is not older than one before it.
        `check_payload`: what is asked of a chunk's payload.
        """
        self._streams = streams
        self._memory = memory
        coordinator = coordinator or CoordinatorEpoch(confirmed=False)
        self.orders = Orders(streams, memory, takeovers, coordinator=coordinator)
        self.lease = Lease()
        """To be renewed by who hears of the coordinator."""
        self.writer = Writer(streams, memory, replication, counters, pump, self.lease, check_payload=check_payload)
        self.turns = Turns()
        self.fetches = Fetches(streams, memory, counters, self.turns, read_bytes_max=read_bytes_max)
        self.sessions = ReadSessions(
            streams, memory, counters, self.turns, self.fetches.outgoing, read_bytes_max=self.fetches.read_bytes_max
        )
        self._lookups = Lookups(streams, memory, self.turns)
        self._registered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def registered(self, broker_id: int, owned: Iterable[common_pb2.StreamInfo], broker_epoch: int = 0) -> None:
        """The coordinator has given this launch its id and epoch, and the streams of which anything is here."""
        self.orders.registered(broker_id, broker_epoch, owned)
        self._registered.set_result(broker_id)

    async def close(self) -> None:
        """End what is under way for the coordinator."""
        await self.orders.close()

    def service(self) -> Service:
        """The handlers by method."""
        return {
            api.MULTI_WRITE_CHUNKS: self._once_registered(self.writer.write),
            api.MULTI_READ_CHUNKS: self._once_registered(self.multi_read_chunks),
            api.GET_NEXT_GROUPS: self._once_registered(self.get_next_groups),
            api.GET_NEXT_SEGMENTS: self._once_registered(self.get_next_segments),
            api.GET_AVAILABLE_GROUPS: self._once_registered(self.get_available_groups),
            api.GET_AVAILABLE_SEGMENTS: self._once_registered(self.get_available_segments),
            api.DESCRIBE_STREAMLETS: self._once_registered(self.describe_streamlets),
            api.OPEN_STREAMLETS: self.open_streamlets,
            api.DROP_STREAM: self.drop_stream,
            api.TRUNCATE_STREAMLETS: self._once_registered(self.truncate_streamlets),
            api.COMMIT_CURSORS: self._once_registered(self.commit_cursors),
            api.MEASURE_LAG: self._once_registered(self.measure_lag),
            api.SEAL_STREAMLETS: self._once_registered(self.seal_streamlets),
            api.TAKE_OVER: self._once_registered(self.take_over),
            api.LIST_GROUPS: self._once_registered(self.list_groups),
            api.LOCATE_CHUNKS: self._once_registered(self._lookups.locate),
            api.LIST_SEGMENTS: self._once_registered(self._lookups.list_segments),
        }

    def _once_registered(self, handler: Handler) -> Handler:
        """Refuse what comes earlier: a client who was here before the restart would be told that its stream is gone."""

        def checked(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            if not self._registered.done():
                raise Unavailable("the broker is starting and does not know its streams yet; try again")
            return handler(call)

        return checked

    # -- discovery ---------------------------------------------------------------------------------------------

    def multi_read_chunks(self, call: ReadCall) -> ReadReply | Awaitable[ReadReply]:
        """Read from ranges that the request names, or from those of a session."""
        return (self.sessions if call.message.session_id else self.fetches).read(call)

    def get_next_groups(self, call: Call[broker_pb2.GetNextGroupsRequest]) -> Reply[broker_pb2.GetNextGroupsResponse]:
        """Thesis table 6.1: each group is given to a consumer group once."""
        request = call.message
        streamlet = self._streamlet(request)
        if not request.consumer_group:
            raise InvalidArgument("getNextGroups needs a consumer_group")
        if len(request.consumer_group) > CONSUMER_GROUP_BYTES_MAX:
            raise InvalidArgument("consumer_group is too long", limit=CONSUMER_GROUP_BYTES_MAX)
        groups = streamlet.next_groups(request.consumer_group, request.groups_max or len(streamlet.entries))
        return Reply(
            broker_pb2.GetNextGroupsResponse(
                groups=[
                    broker_pb2.GroupInfo(
                        group_id=group_id, entry=entry.index, closed=not streamlet.is_active(group_id, entry)
                    )
                    for group_id, entry in groups
                ]
            )
        )

    async def get_next_segments(
        self, call: Call[broker_pb2.GetNextSegmentsRequest]
    ) -> Reply[broker_pb2.GetNextSegmentsResponse]:
        """Thesis table 6.1: the segments of a group that a consumer does not know yet."""
        return Reply(await self.turns.run(self._next_segments(call.message), id(call.peer)))

    def _next_segments(
        self, request: broker_pb2.GetNextSegmentsRequest
    ) -> Generator[None, None, broker_pb2.GetNextSegmentsResponse]:
        streamlet, group_id = self._streamlet(request), request.group_id
        entry = group_entry(streamlet, group_id)
        # Before the segments: what comes to the group meanwhile is behind what is told.
        response = broker_pb2.GetNextSegmentsResponse(group_closed=not streamlet.is_active(group_id, entry))
        for key, segment in entry.group_segments(group_id, request.after_segment_id):
            response.segments.append(_segment_info(key, segment))
            yield
        return response

    def get_available_groups(
        self, call: Call[broker_pb2.GetAvailableGroupsRequest]
    ) -> Reply[broker_pb2.GetAvailableGroupsResponse]:
        """Thesis table 6.2: the interval of groups that are there."""
        first, last = self._streamlet(call.message).available_groups()
        return Reply(broker_pb2.GetAvailableGroupsResponse(first_group_id=first, last_group_id=last))

    async def get_available_segments(
        self, call: Call[broker_pb2.GetAvailableSegmentsRequest]
    ) -> Reply[broker_pb2.GetAvailableSegmentsResponse]:
        """Thesis table 6.2: the interval of segments of a group."""
        return Reply(await self.turns.run(self._available_segments(call.message), id(call.peer)))

    def _available_segments(
        self, request: broker_pb2.GetAvailableSegmentsRequest
    ) -> Generator[None, None, broker_pb2.GetAvailableSegmentsResponse]:
        entry = group_entry(self._streamlet(request), request.group_id)
        response = broker_pb2.GetAvailableSegmentsResponse()
        for (_, segment_id), _ in entry.group_segments(request.group_id):
            response.first_segment_id = response.first_segment_id or segment_id
            response.last_segment_id = segment_id
            yield
        return response

    async def describe_streamlets(
        self, call: Call[broker_pb2.DescribeStreamletsRequest]
    ) -> Reply[broker_pb2.DescribeStreamletsResponse]:
        """Starts and durable heads of all entries of streamlets, as far as they are here."""
        if len(call.message.streamlet_ids) > STREAMLETS_MAX:
            raise InvalidArgument(f"at most {STREAMLETS_MAX} streamlets in a request", limit=STREAMLETS_MAX)
        return Reply(await self.turns.run(self._descriptions(call.message), id(call.peer)))

    def _descriptions(
        self, request: broker_pb2.DescribeStreamletsRequest
    ) -> Generator[None, None, broker_pb2.DescribeStreamletsResponse]:
        response = broker_pb2.DescribeStreamletsResponse()
        stream = self._streams.get(request.stream_id)
        entries = 0
        for streamlet_id in request.streamlet_ids or sorted(stream.streamlets):
            yield
            streamlet = self._streams.get(request.stream_id).streamlet(streamlet_id)
            entries += len(streamlet.entries)
            if entries > ENTRIES_MAX:
                raise InvalidArgument(
                    f"at most {ENTRIES_MAX} entries are described in an answer: name fewer streamlets",
                    limit=ENTRIES_MAX,
                )
            first, last = streamlet.available_groups()
            info = response.streamlets.add(streamlet_id=streamlet_id, group_count=last - first + 1 if first else 0)
            for entry in streamlet.entries:
                end, next_record = end_of(streamlet, entry)
                row = info.entries.add(
                    first_record=first_record(entry), next_record=next_record, length_bytes=entry.length_bytes
                )
                _fill(row.start, entry, entry.start)
                _fill(row.end, entry, end)
                if entry.gaps:
                    _fill(row.lost_from, entry, entry.gaps[-1].start)
                    _fill(row.lost_to, entry, entry.gaps[-1].end)
        return response

    async def list_groups(self, call: Call[broker_pb2.ListGroupsRequest]) -> Reply[broker_pb2.ListGroupsResponse]:
        """Groups of this broker's intervals with their durable bounds, in order."""
        return Reply(await self.turns.run(self._groups(call.message), id(call.peer)))

    def _groups(self, request: broker_pb2.ListGroupsRequest) -> Generator[None, None, broker_pb2.ListGroupsResponse]:
        streamlet = self._streamlet(request)
        groups, complete = yield from list_groups(
            streamlet, request.after_group_id, min(request.groups_max or GROUPS_MAX, GROUPS_MAX)
        )
        self._streamlet(request)  # it may have been dropped, and its groups with it: then they were not all
        response = broker_pb2.ListGroupsResponse(complete=complete)
        for group in groups:
            row = response.groups.add(
                group_id=group.group_id,
                entry=group.entry,
                closed=group.closed,
                first_record=group.first_record,
                next_record=group.next_record,
                length_bytes=group.length_bytes,
            )
            entry = streamlet.entries[group.entry]
            _fill(row.start, entry, group.start)
            _fill(row.end, entry, group.end)
            yield
        return response

    async def measure_lag(self, call: Call[broker_pb2.MeasureLagRequest]) -> Reply[broker_pb2.MeasureLagResponse]:
        """What is durable at this broker behind cursors."""
        if len(call.message.cursors) > CURSORS_MAX:
            raise InvalidArgument(f"at most {CURSORS_MAX} cursors in a request", limit=CURSORS_MAX)
        return Reply(await self.turns.run(self._lags(call.message.cursors), id(call.peer)))

    def _lags(self, cursors: Iterable[common_pb2.Cursor]) -> Generator[None, None, broker_pb2.MeasureLagResponse]:
        response = broker_pb2.MeasureLagResponse()
        for cursor in cursors:
            yield  # one may walk through a thousand segments
            lag = response.lags.add()
            try:
                streamlet = self._streamlet(cursor)
                entry = entry_of(streamlet, cursor.entry)
                position = position_of(cursor)
                position = _here(streamlet, entry, position)
                lag.records = lag_records(streamlet, entry, position)
                lag.bytes = lag_bytes(entry, position, lag.records)
                lag.oldest_us = oldest_us(entry, position)
                lag.next_record = ordinal_at(streamlet, entry, position)
            except KeraError as error:
                lag.error.CopyFrom(error_to_message(error))
        return response

    def _streamlet(self, request: Any) -> Streamlet:
        return self._streams.get(request.stream_id).streamlet(request.streamlet_id)

    # -- truncation and cursors --------------------------------------------------------------------------------

    async def truncate_streamlets(
        self, call: Call[broker_pb2.TruncateStreamletsRequest]
    ) -> Reply[broker_pb2.TruncateStreamletsResponse]:
        """Remove what is before cursors; answered when it cannot come back. What is gone already is no error."""
        return Reply(broker_pb2.TruncateStreamletsResponse(results=await self._each(call, self._truncate)))

    async def _each(
        self, call: Call[Any], action: Callable[[Streamlet, Entry, Position], Awaitable[None]]
    ) -> list[broker_pb2.CursorResult]:
        """Do something with each cursor of a request; one that fails does not fail its neighbours."""
        cursors = call.message.cursors
        if len(cursors) > CHANGES_MAX:
            raise InvalidArgument(f"at most {CHANGES_MAX} cursors in a request", limit=CHANGES_MAX)
        results = []
        pace = self.turns.pace(id(call.peer))
        for cursor in cursors:
            await pace.step()
            result = broker_pb2.CursorResult()
            try:
                streamlet = self._streams.get(cursor.stream_id).streamlet(cursor.streamlet_id)
                entry = entry_of(streamlet, cursor.entry)
                await action(streamlet, entry, position_of(cursor))
                _fill(result.start, entry, entry.start)
            except KeraError as error:
                result.error.CopyFrom(error_to_message(error))
            results.append(result)
        return results

    async def _truncate(self, streamlet: Streamlet, entry: Entry, position: Position) -> None:
        check_possible(position)
        if position <= entry.start:
            return
        if interval_of(streamlet.intervals, position.group_id) is None:
            await self._truncate_before(streamlet, entry, position)
            return
        key = (position.group_id, position.segment_id)
        if position.offset and key not in entry.resident and isinstance(entry.find(key), SegmentRecord):
            await until_done(lambda done: self._memory.load(entry, key, done))  # to see where its chunks end
        try:
            resolve(streamlet, entry, position)
        except DataLost:
            if position < entry.start:
                return  # retention was there first
            raise
        if position == EARLIEST or position <= entry.start:
            return
        self._streams.move_start(entry, position, ordinal_of(entry, position))
        await until_done(lambda done: self._memory.collect(entry, done))

    async def _truncate_before(self, streamlet: Streamlet, entry: Entry, position: Position) -> None:
        """Remove what is here before a position that is at another broker."""
        before = interval_before(streamlet.intervals, position.group_id)
        after = interval_after(streamlet.intervals, position.group_id)
        if before is None:
            return
        if after is not None:
            start, record = after.start, after.first_record(entry.index)
        else:
            start, record = before.following, before.end_record(entry.index)
        if start > entry.start:
            self._streams.move_start(entry, start, record)
            await until_done(lambda done: self._memory.collect(entry, done))

    async def commit_cursors(
        self, call: Call[broker_pb2.CommitCursorsRequest]
    ) -> Reply[broker_pb2.CommitCursorsResponse]:
        """Remember how far a consumer group has read: retention goes by it. Answered when that is on disk."""
        consumer_group = call.message.consumer_group
        if not consumer_group or len(consumer_group.encode()) > CONSUMER_GROUP_BYTES_MAX:
            raise InvalidArgument(
                f"a cursor belongs to a consumer_group of 1 to {CONSUMER_GROUP_BYTES_MAX} bytes",
                limit=CONSUMER_GROUP_BYTES_MAX,
            )

        async def commit(streamlet: Streamlet, entry: Entry, position: Position) -> None:
            await self._commit_cursor(streamlet, entry, consumer_group, position)

        return Reply(broker_pb2.CommitCursorsResponse(results=await self._each(call, commit)))

    async def _commit_cursor(self, streamlet: Streamlet, entry: Entry, consumer_group: str, position: Position) -> None:
        if position == EARLIEST:
            return
        check_possible(position)
        interval = interval_of(streamlet.intervals, position.group_id)
        beyond = interval is None and interval_before(streamlet.intervals, position.group_id) is not None
        if position > end_of(streamlet, entry)[0] and not beyond:
            raise InvalidArgument(
                f"{tuple(position)} is beyond the durable head {tuple(entry.end)}", position=list(position)
            )  # invariant 9
        if consumer_group not in entry.committed and len(entry.committed) >= CONSUMER_GROUPS_MAX:
            raise InvalidArgument(
                f"{CONSUMER_GROUPS_MAX} consumer groups have committed cursors here already", limit=CONSUMER_GROUPS_MAX
            )
        await until_done(lambda done: self._memory.commit_cursor(entry, consumer_group, position, done))

    # -- from the coordinator ----------------------------------------------------------------------------------

    async def seal_streamlets(
        self, call: Call[broker_pb2.SealStreamletsRequest]
    ) -> Reply[broker_pb2.SealStreamletsResponse]:
        """Take no more chunks for streamlets, and say where they end when all of that is durable."""
        return Reply(broker_pb2.SealStreamletsResponse(states=await self.orders.seal(call.message)))

    async def take_over(self, call: Call[broker_pb2.TakeOverRequest]) -> Reply[broker_pb2.TakeOverResponse]:
        """Find out from backups where streamlets of a lost broker end, which this one is to have."""
        return Reply(await self.orders.take_over(call.message))

    async def open_streamlets(
        self, call: Call[broker_pb2.OpenStreamletsRequest]
    ) -> Reply[broker_pb2.OpenStreamletsResponse]:
        """Have what is assigned to this broker, with the configuration that the stream has now.

        The coordinator may ask before its answer to the registration has arrived: such a request waits for it.
        """
        await asyncio.shield(self._registered)
        await self.orders.open(call.message)
        return Reply(broker_pb2.OpenStreamletsResponse())

    async def drop_stream(self, call: Call[broker_pb2.DropStreamRequest]) -> Reply[broker_pb2.DropStreamResponse]:
        """Forget a stream, and free its memory and its disk.

        Waits like `open_streamlets`: the answer to the registration, if it comes later, may still name the stream.
        """
        await asyncio.shield(self._registered)
        await self.orders.drop(call.message)
        return Reply(broker_pb2.DropStreamResponse())


def _here(streamlet: Streamlet, entry: Entry, position: Position) -> Position:
    """A position as one that is in a segment, if there is one. Raises as `resolve`."""
    interval_at(streamlet, position.group_id)
    if position == EARLIEST:
        return entry.start
    key, offset = resolve(streamlet, entry, position)
    return Position(*key, offset)


def _segment_info(key: Key, segment: Segment | SegmentRecord) -> broker_pb2.SegmentInfo:
    closed, durable_head = (
        (segment.closed, segment.durable_head) if isinstance(segment, Segment) else (True, length_of(segment))
    )
    return broker_pb2.SegmentInfo(
        segment_id=key[1],
        closed=closed,
        durable_head=durable_head,
        record_count=segment.record_count,
        min_timestamp_us=segment.min_timestamp_us,
        max_timestamp_us=segment.max_timestamp_us,
    )


def _fill(cursor: common_pb2.Cursor, entry: Entry, position: Position) -> None:
    cursor.stream_id, cursor.streamlet_id, cursor.entry = entry.log_id
    cursor.group_id, cursor.segment_id, cursor.position = position
