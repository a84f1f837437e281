"""The answers of a fake broker to reads: ranges of its streams' logs, and sessions that keep the ranges."""

from __future__ import annotations

from kera.client.testing.streams import FakeStream, FakeStreamlet
from kera.client.types import position_of
from kera.core.base.ids import Position
from kera.core.errors import KeraError, NotOwner, Recovering, SessionLost, UnknownStream
from kera.core.format.chunk import read_header
from kera.core.rpc import Reply
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

END = Position(1 << 40, 1, 0)


def _fill(cursor: common_pb2.Cursor, position: Position) -> None:
    cursor.group_id, cursor.segment_id, cursor.position = position


def _copy(range_: broker_pb2.ReadRange) -> broker_pb2.ReadRange:
    copy = broker_pb2.ReadRange()
    copy.CopyFrom(range_)
    return copy


class Reads:
    """Reads of a broker's streams."""

    def __init__(self, broker_id: int, streams: dict[int, FakeStream]) -> None:
        self._broker_id = broker_id
        self._streams = streams
        self._sessions: dict[int, tuple[int, dict[int, broker_pb2.ReadRange]]] = {}
        """The step of each session, and its ranges by handle."""
        self.refused = 0
        """Number of ranges that were answered with an error."""

    def stream(self, stream_id: int) -> FakeStream:
        """Return a stream by its id. Raises `UnknownStream`."""
        found = self._streams.get(stream_id)
        if found is None:
            raise UnknownStream("no such stream here", stream_id=stream_id)
        return found

    def ranges(self, request: broker_pb2.MultiReadChunksRequest) -> list[broker_pb2.ReadRange]:
        """Return the ranges of a request; for a session, all its ranges after this request. Raises `SessionLost`."""
        wanted = [_copy(each) for each in request.ranges]  # a session's ranges advance; the request must not change
        if not request.session_id:
            return wanted
        step, ranges = self._sessions.get(request.session_id, (-1, {}))
        if request.step == 0:
            ranges = {}
        elif step != request.step - 1:
            raise SessionLost("restart the session")
        for handle in request.removed:
            ranges.pop(handle, None)
        ranges.update({each.handle: each for each in wanted})
        self._sessions[request.session_id] = request.step, ranges
        return list(ranges.values())

    def look(
        self, request: broker_pb2.MultiReadChunksRequest, ranges: list[broker_pb2.ReadRange]
    ) -> tuple[Reply[broker_pb2.MultiReadChunksResponse], bool]:
        """Return the present answer, and whether it has data or errors."""
        response = broker_pb2.MultiReadChunksResponse(session_kept=True)
        bulk: list[memoryview] = []
        found = False
        for wanted in ranges:
            result = response.results.add(handle=wanted.handle)
            changed = self._range(wanted, result, bulk, request.bytes_max)
            found = found or changed
            if request.session_id and not changed:
                del response.results[-1]
            elif request.session_id:
                self._advance(request.session_id, wanted, result)
        return Reply(response, bulk), found

    def _advance(self, session_id: int, wanted: broker_pb2.ReadRange, result: broker_pb2.ReadResult) -> None:
        """Advance a range of a session, or end it."""
        reached = wanted.HasField("end") and position_of(result.next) >= position_of(wanted.end)
        result.ended = result.HasField("error") or reached or not result.length_bytes
        wanted.start.CopyFrom(result.next)
        if result.ended and session_id in self._sessions:
            self._sessions[session_id][1].pop(wanted.handle, None)

    def _range(
        self, wanted: broker_pb2.ReadRange, result: broker_pb2.ReadResult, bulk: list[memoryview], bytes_max: int
    ) -> bool:
        """Fill in the result of a range, and return whether it has data or an error."""
        start = position_of(wanted.start)
        result.next.CopyFrom(wanted.start)
        try:
            streamlet = self.stream(wanted.start.stream_id).known_at(self._broker_id, wanted.start.streamlet_id)
            chunks, following, begin = self._chunks(streamlet, wanted, bytes_max)
        except KeraError as error:
            result.error.CopyFrom(error_to_message(error))
            self.refused += 1
            return True
        _fill(result.next, following)
        result.length_bytes = sum(map(len, chunks))
        result.begins_at = 0 if begin == start else begin.offset
        bulk += map(memoryview, chunks)
        return following != start

    def _chunks(
        self, streamlet: FakeStreamlet, wanted: broker_pb2.ReadRange, bytes_max: int
    ) -> tuple[list[bytes], Position, Position]:
        """Return the chunks of a range that fit, the position behind them, and the position of the first one.

        There is at least one chunk if the range has any.
        """
        start = position_of(wanted.start)
        index = streamlet.interval_of(start)
        if streamlet.intervals[index].broker_id != self._broker_id:
            raise NotOwner("another broker has these groups")
        streamlet.check_start(start)
        later = streamlet.intervals[index + 1] if index + 1 < len(streamlet.intervals) else None
        end = Position(later.first_group_id, 1, 0) if later is not None else END
        if wanted.HasField("end"):
            end = min(end, position_of(wanted.end))
        found = [chunk for chunk in streamlet.log if start <= chunk.start < end]
        if found and found[0].start.group_id in streamlet.recovering:
            raise Recovering("the records are being recovered")
        taken: list[bytes] = []
        following, left = start, bytes_max
        for chunk in found:
            if chunk.start.group_id in streamlet.recovering or (taken and len(chunk.data) > left):
                break
            taken.append(chunk.data)
            following, left = chunk.end, left - len(chunk.data)
        if not found and later is not None:
            following = Position(later.first_group_id, 1, 0)
        return taken, following, found[0].start if taken else start

    def describe(self, request: broker_pb2.DescribeStreamletsRequest) -> broker_pb2.DescribeStreamletsResponse:
        """Return the bounds of streamlets' entries at this broker. Raises `UnknownStream`."""
        stream = self.stream(request.stream_id)
        response = broker_pb2.DescribeStreamletsResponse()
        for streamlet_id in request.streamlet_ids:
            streamlet = stream.known_at(self._broker_id, streamlet_id)
            entry = response.streamlets.add(streamlet_id=streamlet_id).entries.add()
            next_record = streamlet.records - sum(chunk.records for chunk in streamlet.log)
            for chunk in streamlet.log:
                first_record, next_record = next_record, next_record + chunk.records
                if streamlet.intervals[streamlet.interval_of(chunk.start)].broker_id != self._broker_id:
                    continue
                if not entry.length_bytes:
                    _fill(entry.start, chunk.start)
                    entry.first_record = first_record
                _fill(entry.end, chunk.end)
                entry.next_record = next_record
                entry.length_bytes += len(chunk.data)
                latest_us = read_header(chunk.data).max_timestamp_us
                entry.watermark_us = max(latest_us, entry.watermark_us) if entry.HasField("watermark_us") else latest_us
                if stream.message.config.epoch_ms:
                    entry.settled_us = entry.watermark_us
        return response
