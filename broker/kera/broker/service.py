"""The broker's remote operations: thesis tables 6.1 and 6.2, and what the coordinator asks.

Handlers translate between messages and `Streamlet`; decisions are made there. Writes are in ``kera.broker.writing``,
reads in ``kera.broker.fetching``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from kera.broker.arena import Arena
from kera.broker.entry import Entry, Key, length_of
from kera.broker.fetching import READ_BYTES_MAX, Fetches, position_of
from kera.broker.jobs import Done
from kera.broker.metrics import Counters
from kera.broker.persistence import PersistenceManager
from kera.broker.reading import end_record, entry_of, first_record, group_entry, ordinal_of, resolve
from kera.broker.replication import Replication
from kera.broker.segment import Segment
from kera.broker.segment_index import SegmentRecord
from kera.broker.stream import Streams
from kera.broker.streamlet import Streamlet
from kera.broker.writing import Writer
from kera.core.errors import DataLost, InvalidArgument, KeraError, Unavailable
from kera.core.ids import EARLIEST, Position
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.method import Handler
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

APPLICATION_ID_BYTES_MAX = 256
APPLICATIONS_MAX = 1024
"""Whose cursors an entry remembers."""


class BrokerService:
    """All handlers of one broker; `service()` gives them to the transports."""

    def __init__(
        self,
        streams: Streams,
        arena: Arena,
        memory: PersistenceManager,
        replication: Replication,
        counters: Counters,
        *,
        pump: Callable[[], None],
        read_bytes_max: int = READ_BYTES_MAX,
    ) -> None:
        """`pump`: carries out what replication wants to be done."""
        self._streams = streams
        self._memory = memory
        self.writer = Writer(streams, memory, replication, counters, pump)
        self.fetches = Fetches(streams, arena, memory, counters, read_bytes_max=read_bytes_max)
        self._registered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def registered(self, broker_id: int, owned: Iterable[common_pb2.StreamInfo]) -> None:
        """The coordinator has given this broker its id, and the streams it owns streamlets of."""
        for stream in owned:
            self._streams.open(stream, broker_id)
        self._registered.set_result(broker_id)

    def service(self) -> Service:
        """The handlers by method."""
        return {
            api.MULTI_WRITE_CHUNKS: self._once_registered(self.writer.write),
            api.MULTI_READ_CHUNKS: self._once_registered(self.fetches.read),
            api.GET_NEXT_GROUPS: self._once_registered(self.get_next_groups),
            api.GET_NEXT_SEGMENTS: self._once_registered(self.get_next_segments),
            api.GET_AVAILABLE_GROUPS: self._once_registered(self.get_available_groups),
            api.GET_AVAILABLE_SEGMENTS: self._once_registered(self.get_available_segments),
            api.DESCRIBE_STREAMLETS: self._once_registered(self.describe_streamlets),
            api.OPEN_STREAMLETS: self.open_streamlets,
            api.DROP_STREAM: self.drop_stream,
            api.TRUNCATE_STREAMLETS: self._once_registered(self.truncate_streamlets),
            api.COMMIT_CURSORS: self._once_registered(self.commit_cursors),
        }

    def _once_registered(self, handler: Handler) -> Handler:
        """Refuse what comes earlier: a client who was here before the restart would be told that its stream is gone."""

        def checked(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            if not self._registered.done():
                raise Unavailable("the broker is starting and does not know its streams yet; try again")
            return handler(call)

        return checked

    # -- discovery ---------------------------------------------------------------------------------------------

    def get_next_groups(self, call: Call[broker_pb2.GetNextGroupsRequest]) -> Reply[broker_pb2.GetNextGroupsResponse]:
        """Thesis table 6.1: each group is given to an application once."""
        request = call.message
        streamlet = self._streamlet(request)
        if not request.application_id:
            raise InvalidArgument("getNextGroups needs an application_id")
        if len(request.application_id) > APPLICATION_ID_BYTES_MAX:
            raise InvalidArgument("application_id is too long", limit=APPLICATION_ID_BYTES_MAX)
        groups = streamlet.next_groups(request.application_id, request.groups_max or len(streamlet.entries))
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

    def get_next_segments(
        self, call: Call[broker_pb2.GetNextSegmentsRequest]
    ) -> Reply[broker_pb2.GetNextSegmentsResponse]:
        """Thesis table 6.1: the segments of a group that a consumer does not know yet."""
        streamlet, group_id = self._streamlet(call.message), call.message.group_id
        entry = group_entry(streamlet, group_id)
        return Reply(
            broker_pb2.GetNextSegmentsResponse(
                segments=[
                    _segment_info(key, segment)
                    for key, segment in entry.group_segments(group_id)
                    if key[1] > call.message.after_segment_id
                ],
                group_closed=not streamlet.is_active(group_id, entry),
            )
        )

    def get_available_groups(
        self, call: Call[broker_pb2.GetAvailableGroupsRequest]
    ) -> Reply[broker_pb2.GetAvailableGroupsResponse]:
        """Thesis table 6.2: the interval of groups that are there."""
        first, last = self._streamlet(call.message).available_groups()
        return Reply(broker_pb2.GetAvailableGroupsResponse(first_group_id=first, last_group_id=last))

    def get_available_segments(
        self, call: Call[broker_pb2.GetAvailableSegmentsRequest]
    ) -> Reply[broker_pb2.GetAvailableSegmentsResponse]:
        """Thesis table 6.2: the interval of segments of a group."""
        entry = group_entry(self._streamlet(call.message), call.message.group_id)
        segments = [key[1] for key, _ in entry.group_segments(call.message.group_id)]
        return Reply(
            broker_pb2.GetAvailableSegmentsResponse(first_segment_id=segments[0], last_segment_id=segments[-1])
        )

    def describe_streamlets(
        self, call: Call[broker_pb2.DescribeStreamletsRequest]
    ) -> Reply[broker_pb2.DescribeStreamletsResponse]:
        """Starts and durable heads of all entries of streamlets."""
        stream = self._streams.get(call.message.stream_id)
        response = broker_pb2.DescribeStreamletsResponse()
        for streamlet_id in call.message.streamlet_ids or sorted(stream.streamlets):
            streamlet = stream.streamlet(streamlet_id)
            first, last = streamlet.available_groups()
            info = response.streamlets.add(streamlet_id=streamlet_id, group_count=last - first + 1 if first else 0)
            for entry in streamlet.entries:
                row = info.entries.add(
                    first_record=first_record(entry), next_record=end_record(entry), length_bytes=entry.length_bytes
                )
                _fill(row.start, entry, entry.start)
                _fill(row.end, entry, entry.end)
        return Reply(response)

    def _streamlet(self, request: Any) -> Streamlet:
        return self._streams.get(request.stream_id).streamlet(request.streamlet_id)

    # -- truncation and cursors --------------------------------------------------------------------------------

    async def truncate_streamlets(
        self, call: Call[broker_pb2.TruncateStreamletsRequest]
    ) -> Reply[broker_pb2.TruncateStreamletsResponse]:
        """Remove what is before cursors; answered when it cannot come back. What is gone already is no error."""
        return Reply(
            broker_pb2.TruncateStreamletsResponse(results=await self._each(call.message.cursors, self._truncate))
        )

    async def _each(
        self, cursors: Iterable[common_pb2.Cursor], action: Callable[[Streamlet, Entry, Position], Awaitable[None]]
    ) -> list[broker_pb2.CursorResult]:
        """Do something with each cursor; one that fails does not fail its neighbours."""
        results = []
        for cursor in cursors:
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
        if position <= entry.start:
            return
        key = (position.group_id, position.segment_id)
        if position.offset and key not in entry.resident and isinstance(entry.find(key), SegmentRecord):
            await self._until(lambda done: self._memory.load(entry, key, done))  # to see where its chunks end
        try:
            resolve(streamlet, entry, position)
        except DataLost:
            if position < entry.start:
                return  # retention was there first
            raise
        if position == EARLIEST or position <= entry.start:
            return
        record = ordinal_of(entry, position)
        entry.start, entry.start_record = position, record
        await self._until(lambda done: self._memory.collect(entry, done))

    async def commit_cursors(
        self, call: Call[broker_pb2.CommitCursorsRequest]
    ) -> Reply[broker_pb2.CommitCursorsResponse]:
        """Remember how far an application has read: retention goes by it. Answered when that is on disk."""
        application_id = call.message.application_id
        if not application_id or len(application_id.encode()) > APPLICATION_ID_BYTES_MAX:
            raise InvalidArgument(
                f"a cursor belongs to an application_id of 1 to {APPLICATION_ID_BYTES_MAX} bytes",
                limit=APPLICATION_ID_BYTES_MAX,
            )

        async def commit(_streamlet: Streamlet, entry: Entry, position: Position) -> None:
            await self._commit_cursor(entry, application_id, position)

        return Reply(broker_pb2.CommitCursorsResponse(results=await self._each(call.message.cursors, commit)))

    async def _commit_cursor(self, entry: Entry, application_id: str, position: Position) -> None:
        if position == EARLIEST:
            return
        if position > entry.end:
            raise InvalidArgument(
                f"{tuple(position)} is beyond the durable head {tuple(entry.end)}", position=list(position)
            )  # invariant 9
        if application_id not in entry.committed and len(entry.committed) >= APPLICATIONS_MAX:
            raise InvalidArgument(
                f"{APPLICATIONS_MAX} applications have committed cursors here already", limit=APPLICATIONS_MAX
            )
        await self._until(lambda done: self._memory.commit_cursor(entry, application_id, position, done))

    async def _until(self, begin: Callable[[Done], None]) -> None:
        """Wait for what `begin` begins, and raise its error."""
        future: asyncio.Future[KeraError | None] = asyncio.get_running_loop().create_future()

        def done(error: KeraError | None) -> None:
            if not future.done():
                future.set_result(error)

        begin(done)
        error = await future
        if error is not None:
            raise error

    # -- from the coordinator ----------------------------------------------------------------------------------

    async def open_streamlets(
        self, call: Call[broker_pb2.OpenStreamletsRequest]
    ) -> Reply[broker_pb2.OpenStreamletsResponse]:
        """Own the streamlets that are assigned to this broker, with the configuration that the stream has now.

        The coordinator may ask before its answer to the registration has arrived: such a request waits for it.
        """
        broker_id = await asyncio.shield(self._registered)
        self._streams.open(call.message.stream, broker_id)
        return Reply(broker_pb2.OpenStreamletsResponse())

    async def drop_stream(self, call: Call[broker_pb2.DropStreamRequest]) -> Reply[broker_pb2.DropStreamResponse]:
        """Forget a stream, and free its memory and its disk.

        Waits like `open_streamlets`: the answer to the registration, if it comes later, may still name the stream.
        """
        await asyncio.shield(self._registered)
        await self._until(lambda done: self._streams.drop(call.message.stream_id, done))
        return Reply(broker_pb2.DropStreamResponse())


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
