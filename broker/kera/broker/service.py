"""The broker's remote operations: thesis tables 6.1 and 6.2, and what the coordinator asks.

Handlers translate between messages and `Streamlet`; decisions are made there. A write is decided and answered within
one call of its handler, so requests of one connection are appended in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Awaitable, Iterable
from typing import Any

from kera.broker.arena import Arena
from kera.broker.metrics import Counters
from kera.broker.stream import Streams
from kera.broker.streamlet import Appended, Entry, Streamlet, Waiter
from kera.core.chunk import HEADER_BYTES, ChunkHeader, verify_header, verify_payload
from kera.core.errors import CorruptChunk, InvalidArgument, KeraError, SchemaMismatch, Unavailable
from kera.core.ids import EARLIEST, Position
from kera.core.rpc import Call, Reply, Service, api
from kera.core.rpc.method import Handler, Peer
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

READ_BYTES_MAX = 16 << 20
"""Bound on one response, whatever the reader asks for."""
READ_RANGES_MAX = 65536
READ_WAIT_MS_MAX = 60_000
_LEASES = "leases"
_LEVELS = (common_pb2.DURABILITY_UNSPECIFIED, common_pb2.DURABILITY_LEADER)

_Write = Call[broker_pb2.MultiWriteChunksRequest]
_Read = Call[broker_pb2.MultiReadChunksRequest]


class BrokerService:
    """All handlers of one broker; `service()` gives them to the transports."""

    def __init__(
        self, streams: Streams, arena: Arena, counters: Counters, *, read_bytes_max: int = READ_BYTES_MAX
    ) -> None:
        self._streams = streams
        self._arena = arena
        self._counters = counters
        self._read_bytes_max = min(read_bytes_max, READ_BYTES_MAX)  # what the transports can send may be less
        self._registered: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def registered(self, broker_id: int, owned: Iterable[common_pb2.StreamInfo]) -> None:
        """The coordinator has given this broker its id, and the streams it owns streamlets of."""
        for stream in owned:
            self._streams.open(stream, broker_id)
        self._registered.set_result(broker_id)

    def service(self) -> Service:
        """The handlers by method."""
        return {
            api.MULTI_WRITE_CHUNKS: self._once_registered(self.multi_write_chunks),
            api.MULTI_READ_CHUNKS: self._once_registered(self.multi_read_chunks),
            api.GET_NEXT_GROUPS: self._once_registered(self.get_next_groups),
            api.GET_NEXT_SEGMENTS: self._once_registered(self.get_next_segments),
            api.GET_AVAILABLE_GROUPS: self._once_registered(self.get_available_groups),
            api.GET_AVAILABLE_SEGMENTS: self._once_registered(self.get_available_segments),
            api.DESCRIBE_STREAMLETS: self._once_registered(self.describe_streamlets),
            api.OPEN_STREAMLETS: self.open_streamlets,
            api.DROP_STREAM: self.drop_stream,
        }

    def _once_registered(self, handler: Handler) -> Handler:
        """Refuse what comes earlier: a client who was here before the restart would be told that its stream is gone."""

        def checked(call: Call[Any]) -> Reply[Any] | Awaitable[Reply[Any]]:
            if not self._registered.done():
                raise Unavailable("the broker is starting and does not know its streams yet; try again")
            return handler(call)

        return checked

    # -- writing -----------------------------------------------------------------------------------------------

    def multi_write_chunks(self, call: _Write) -> Reply[broker_pb2.MultiWriteChunksResponse]:
        """Append the chunks of a request; each has a status of its own."""
        counters = self._counters
        counters.write_requests += 1
        request, bulk = call.message, call.bulk
        if request.durability not in _LEVELS:
            raise InvalidArgument(
                "this version acknowledges at level leader only: there are no backups yet",
                durability=_level_name(request.durability),
            )
        response = broker_pb2.MultiWriteChunksResponse()
        statuses = response.statuses
        at, end = 0, len(bulk)
        while at < end:
            try:
                header = _whole_header(bulk, at)
            except CorruptChunk as error:
                # Where the next chunk starts is not known: this one and all that follow it are refused. Their number
                # is only claimed, so no more are answered than the bytes have room for.
                claimed = min(request.chunk_count, end // HEADER_BYTES)
                missing = max(1, claimed - len(statuses))
                counters.chunks_refused += missing
                for _ in range(missing):
                    statuses.add(error=error_to_message(error))
                break
            chunk_bytes = header.chunk_bytes
            try:
                verify_payload(bulk, at, header)
                streamlet, appended = self._append(header, bulk[at : at + chunk_bytes])
            except KeraError as error:
                counters.chunks_refused += 1
                statuses.add(error=error_to_message(error))
            else:
                if appended.duplicate:
                    counters.chunks_duplicate += 1
                else:
                    counters.chunks_appended += 1
                    counters.records_appended += header.record_count
                    counters.bytes_appended += chunk_bytes
                    streamlet.publish(appended)  # level leader: appended is durable enough
                statuses.add(
                    entry=appended.entry,
                    group_id=appended.group_id,
                    segment_id=appended.segment_id,
                    position=appended.position,
                    first_record=appended.first_record,
                    durability=common_pb2.DURABILITY_LEADER,
                    duplicate=appended.duplicate,
                )
            at += chunk_bytes
        return Reply(response)

    def _append(self, header: ChunkHeader, chunk: memoryview) -> tuple[Streamlet, Appended]:
        stream = self._streams.get(header.stream_id)
        streamlet = stream.streamlet(header.streamlet_id)
        if header.schema_id not in stream.schema_ids:
            raise SchemaMismatch(
                f"stream {stream.name!r} has no schema {header.schema_id}",
                stream=stream.name,
                schema_id=header.schema_id,
            )
        if header.placed:
            raise InvalidArgument("chunk has been placed by a broker before", stream=stream.name)
        return streamlet, streamlet.append(chunk, header)

    # -- reading -----------------------------------------------------------------------------------------------

    def multi_read_chunks(
        self, call: _Read
    ) -> Reply[broker_pb2.MultiReadChunksResponse] | Awaitable[Reply[broker_pb2.MultiReadChunksResponse]]:
        """Read from each range; when all are at their ends, wait for the first that is not."""
        self._counters.read_requests += 1
        request = call.message
        if len(request.ranges) > READ_RANGES_MAX:
            raise InvalidArgument(f"at most {READ_RANGES_MAX} ranges in a request", limit=READ_RANGES_MAX)
        if request.by_reference and call.peer.transport != "unix":
            raise InvalidArgument("by_reference works over a unix socket only", transport=call.peer.transport)
        self._release(call.peer, request.released_slots)
        reply, found = self._read(call)
        if found or not request.wait_ms:
            return reply
        return self._read_later(call)

    async def _read_later(self, call: _Read) -> Reply[broker_pb2.MultiReadChunksResponse]:
        # Other requests were handled since the first look, before this task began: whom they woke was not us.
        reply, found = self._read(call)
        if found:
            return reply
        waiter = _FutureWaiter()
        entries = self._entries(call.message)
        for entry in entries:
            entry.waiters.add(waiter)
        try:
            async with asyncio.timeout(min(call.message.wait_ms, READ_WAIT_MS_MAX) / 1000):
                await waiter.future
        except TimeoutError:
            pass
        finally:
            for entry in entries:
                entry.waiters.discard(waiter)
        return self._read(call)[0]

    def _entries(self, request: broker_pb2.MultiReadChunksRequest) -> list[Entry]:
        return [
            self._streams.get(r.start.stream_id).streamlet(r.start.streamlet_id).entries[r.start.entry]
            for r in request.ranges
        ]

    def _read(self, call: _Read) -> tuple[Reply[broker_pb2.MultiReadChunksResponse], bool]:
        """The reply as of now, and whether it has anything to tell."""
        request = call.message
        response = broker_pb2.MultiReadChunksResponse()
        by_reference = request.by_reference
        if by_reference:
            response.arena_path = str(self._arena.path)
        bulk: list[memoryview] = []
        budget = bytes_max = min(request.bytes_max or self._read_bytes_max, self._read_bytes_max)
        found = False
        for wanted in request.ranges:
            result = response.results.add()
            start = wanted.start
            result.next.CopyFrom(start)
            try:
                streamlet = self._streams.get(start.stream_id).streamlet(start.streamlet_id)
                stop = _position(wanted.end) if wanted.HasField("end") else None
                # A response whose budget is used up still says where its other ranges stand, at no cost.
                plan = None
                if budget > 0:
                    plan = streamlet.read(start.entry, _position(start), stop, budget, strict=budget < bytes_max)
            except KeraError as error:
                result.error.CopyFrom(error_to_message(error))
                found = True
                continue
            if plan is None:
                continue
            length = 0
            for segment, begin, end in plan.ranges:
                slot = segment.slot
                slot.lease()
                length += end - begin
                if by_reference:
                    result.references.add(
                        slot=slot.index,
                        generation=slot.generation,
                        arena_offset=slot.arena_offset + begin,
                        length_bytes=end - begin,
                    )
                    self._keep(call.peer, slot.index)
                else:
                    view = slot.view[begin:end]
                    weakref.finalize(view, slot.release)  # the transport lets go of it when it is sent
                    bulk.append(view)
            result.length_bytes = length
            result.next.group_id, result.next.segment_id, result.next.position = plan.next
            result.lag_records = streamlet.lag_records(start.entry, plan.next)
            budget -= length
            found = found or length > 0
            self._counters.bytes_read += length
        return Reply(response, bulk), found

    def _keep(self, peer: Peer, slot_index: int) -> None:
        """Remember a lease of this connection, which ends with the connection at the latest."""
        leases: Counter[int] | None = peer.state.get(_LEASES)
        if leases is None:
            leases = peer.state[_LEASES] = Counter()
            peer.on_close.append(lambda: self._release_all(peer))
        leases[slot_index] += 1

    def _release(self, peer: Peer, slot_indexes: Iterable[int]) -> None:
        """End leases of this connection: all of them or, when one of them is not leased, none."""
        leases: Counter[int] = peer.state.get(_LEASES, Counter())
        released = Counter(slot_indexes)
        for slot_index, times in released.items():
            if leases[slot_index] < times:
                raise InvalidArgument(f"slot {slot_index} is not leased to this reader", slot=slot_index)
        leases.subtract(released)
        for slot_index in released.elements():
            self._arena.slot(slot_index).release()

    def _release_all(self, peer: Peer) -> None:
        leases: Counter[int] = peer.state.pop(_LEASES, Counter())
        for slot_index in leases.elements():
            self._arena.slot(slot_index).release()

    # -- discovery ---------------------------------------------------------------------------------------------

    def get_next_groups(self, call: Call[broker_pb2.GetNextGroupsRequest]) -> Reply[broker_pb2.GetNextGroupsResponse]:
        """Thesis table 6.1: each group is given to an application once."""
        request = call.message
        streamlet = self._streamlet(request)
        if not request.application_id:
            raise InvalidArgument("getNextGroups needs an application_id")
        groups = streamlet.next_groups(request.application_id, request.groups_max or len(streamlet.entries))
        return Reply(
            broker_pb2.GetNextGroupsResponse(
                groups=[
                    broker_pb2.GroupInfo(group_id=group.group_id, entry=group.entry, closed=group.closed)
                    for group in groups
                ]
            )
        )

    def get_next_segments(
        self, call: Call[broker_pb2.GetNextSegmentsRequest]
    ) -> Reply[broker_pb2.GetNextSegmentsResponse]:
        """Thesis table 6.1: the segments of a group that a consumer does not know yet."""
        group = self._streamlet(call.message).group(call.message.group_id)
        return Reply(
            broker_pb2.GetNextSegmentsResponse(
                segments=[
                    broker_pb2.SegmentInfo(
                        segment_id=segment.segment_id,
                        closed=segment.closed,
                        durable_head=segment.durable_head,
                        record_count=segment.record_count,
                        min_timestamp_us=segment.min_timestamp_us,
                        max_timestamp_us=segment.max_timestamp_us,
                    )
                    for segment in group.segments[call.message.after_segment_id :]
                ],
                group_closed=group.closed,
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
        group = self._streamlet(call.message).group(call.message.group_id)
        return Reply(broker_pb2.GetAvailableSegmentsResponse(first_segment_id=1, last_segment_id=len(group.segments)))

    def describe_streamlets(
        self, call: Call[broker_pb2.DescribeStreamletsRequest]
    ) -> Reply[broker_pb2.DescribeStreamletsResponse]:
        """Starts and durable heads of all entries of streamlets."""
        stream = self._streams.get(call.message.stream_id)
        response = broker_pb2.DescribeStreamletsResponse()
        for streamlet_id in call.message.streamlet_ids or sorted(stream.streamlets):
            streamlet = stream.streamlet(streamlet_id)
            info = response.streamlets.add(streamlet_id=streamlet_id, group_count=len(streamlet.groups))
            for entry in streamlet.entries:
                row = info.entries.add(
                    first_record=streamlet.first_record(entry.index),
                    next_record=streamlet.end_record(entry.index),
                    length_bytes=sum(segment.durable_head for _, segment in entry.segments()),
                )
                for cursor, position in ((row.start, entry.start), (row.end, entry.end)):
                    cursor.stream_id, cursor.streamlet_id, cursor.entry = stream.stream_id, streamlet_id, entry.index
                    cursor.group_id, cursor.segment_id, cursor.position = position
        return Reply(response)

    def _streamlet(self, request: Any) -> Streamlet:
        return self._streams.get(request.stream_id).streamlet(request.streamlet_id)

    # -- from the coordinator ----------------------------------------------------------------------------------

    async def open_streamlets(
        self, call: Call[broker_pb2.OpenStreamletsRequest]
    ) -> Reply[broker_pb2.OpenStreamletsResponse]:
        """Own the streamlets that are assigned to this broker.

        The coordinator may ask before its answer to the registration has arrived: such a request waits for it.
        """
        broker_id = await asyncio.shield(self._registered)
        self._streams.open(call.message.stream, broker_id)
        return Reply(broker_pb2.OpenStreamletsResponse())

    async def drop_stream(self, call: Call[broker_pb2.DropStreamRequest]) -> Reply[broker_pb2.DropStreamResponse]:
        """Forget a stream and free its memory.

        Waits like `open_streamlets`: the answer to the registration, if it comes later, may still name the stream.
        """
        await asyncio.shield(self._registered)
        self._streams.drop(call.message.stream_id)
        return Reply(broker_pb2.DropStreamResponse())


class _FutureWaiter(Waiter):
    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)


def _level_name(durability: int) -> str:
    """The name of a level, or the number of one that only newer clients know."""
    known = common_pb2.Durability.DESCRIPTOR.values_by_number.get(durability)
    return str(known.name) if known is not None else str(durability)


def _position(cursor: common_pb2.Cursor) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST


def _whole_header(bulk: memoryview, at: int) -> ChunkHeader:
    """The verified header of the chunk at `at`, which is all there. Raises `CorruptChunk`."""
    header = verify_header(bulk, at)
    if at + header.chunk_bytes > len(bulk):
        raise CorruptChunk(
            f"chunk at offset {at} is cut short: {len(bulk) - at} of {header.chunk_bytes} bytes", offset=at
        )
    return header
