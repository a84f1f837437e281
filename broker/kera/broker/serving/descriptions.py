"""Describes this broker's part of streamlets: their bounds, their groups, and the data behind a cursor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

from kera.broker.counters import Counters
from kera.broker.log.bounds import end_of, lag_bytes, lag_records, list_groups, oldest_us, ordinal_at
from kera.broker.log.entry import Entry, still_unsure
from kera.broker.log.intervals import NO_END, interval_of
from kera.broker.log.read_plan import entry_of, first_record, interval_at, resolve
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.watermarks import end_of_written, watermark_of
from kera.broker.ownership.epoch_lag import could_promise_us
from kera.broker.ownership.streams import Streams
from kera.broker.serving.cursors import fill_cursor, position_of
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.stream_access import CheckStream, nothing_is_kept
from kera.core.access.rights import Operation
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import Turns
from kera.core.errors import InvalidArgument, KeraError
from kera.core.format.punctuation import NO_TIME
from kera.core.rpc import Call, Reply
from kera.core.rpc.method import Peer
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2

GROUPS_MAX = 4096
"""Maximum number of groups in one answer."""
CURSORS_MAX = 65536
"""Maximum number of cursors that one request measures."""
STREAMLETS_MAX = 65536
"""Maximum number of streamlets in one request for descriptions."""


class Descriptions:
    """Handles describeStreamlets, listGroups and measureLag."""

    def __init__(
        self,
        streams: Streams,
        turns: Turns,
        limits: ServingLimits,
        check: CheckStream = nothing_is_kept,
        *,
        counters: Counters,
        now_us: Callable[[], int],
        may_promise: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """`may_promise`: whether the broker holds its lease, and its clock is right within a grace in microseconds."""
        self._may_promise = may_promise
        self._now_us = now_us
        self._counters = counters
        self._check = check
        self._streams = streams
        self._turns = turns
        self._entries_max = limits.described_entries_max

    async def describe_streamlets(
        self, call: Call[broker_pb2.DescribeStreamletsRequest]
    ) -> Reply[broker_pb2.DescribeStreamletsResponse]:
        """Return starts and durable heads of all entries of streamlets, as far as this broker has them."""
        if len(call.message.streamlet_ids) > STREAMLETS_MAX:
            raise InvalidArgument(f"at most {STREAMLETS_MAX} streamlets in a request", limit=STREAMLETS_MAX)
        return Reply(await self._turns.run(self._descriptions(call.message), id(call.peer)))

    def _descriptions(
        self, request: broker_pb2.DescribeStreamletsRequest
    ) -> Generator[None, None, broker_pb2.DescribeStreamletsResponse]:
        response = broker_pb2.DescribeStreamletsResponse()
        stream = self._streams.get(request.stream_id)
        entries = 0
        for streamlet_id in request.streamlet_ids or sorted(stream.streamlets):
            yield
            streamlet = self._streams.streamlet(request.stream_id, streamlet_id)
            entries += len(streamlet.entries)
            if entries > self._entries_max:
                raise InvalidArgument(
                    f"at most {self._entries_max} entries are described in an answer: name fewer streamlets",
                    limit=self._entries_max,
                )
            first, last = streamlet.available_groups()
            count = last - first + 1 if first else 0
            info = response.streamlets.add(streamlet_id=streamlet_id, group_count=count, owned=streamlet.owned)
            info.leads = streamlet.intervals[0].leads
            could_us = could_promise_us(streamlet, self._now_us(), self._may_promise)
            for entry in streamlet.entries:
                if entry.unsure is not None:  # its end may lie before data that was acknowledged or read
                    raise still_unsure(entry)
                end, next_record = end_of(streamlet, entry)
                row = info.entries.add(
                    first_record=first_record(entry), next_record=next_record, length_bytes=entry.length_bytes
                )
                fill_cursor(row.start, entry, entry.start)
                fill_cursor(row.end, entry, end)
                self._fill_times(row, streamlet, entry, could_us)
                if request.promise and could_us != NO_TIME:
                    self._promise(row, streamlet, entry)
                seen = [gap for gap in entry.gaps if not gap.unseen]
                if seen:
                    fill_cursor(row.lost_from, entry, seen[-1].start)
                    fill_cursor(row.lost_to, entry, seen[-1].end)
        return response

    def _fill_times(self, row: broker_pb2.EntryInfo, streamlet: Streamlet, entry: Entry, could_promise_us: int) -> None:
        watermark_us = watermark_of(entry)
        if watermark_us != NO_TIME:
            row.watermark_us = watermark_us
        if entry.removed_watermark_us != NO_TIME:
            row.removed_watermark_us = entry.removed_watermark_us
        if streamlet.epochs.are_kept:
            settled_us = max(watermark_us, entry.promised_us, could_promise_us)
            if settled_us != NO_TIME:
                row.settled_us = settled_us

    def _promise(self, row: broker_pb2.EntryInfo, streamlet: Streamlet, entry: Entry) -> None:
        promised_us = streamlet.promise(entry)
        if promised_us is not None:
            self._counters.promises += 1
            row.promised_us = promised_us
            fill_cursor(row.promised_at, entry, end_of_written(entry))

    async def list_groups(self, call: Call[broker_pb2.ListGroupsRequest]) -> Reply[broker_pb2.ListGroupsResponse]:
        """Return groups of one of this broker's intervals with their durable bounds, in order."""
        return Reply(await self._turns.run(self._groups(call.message), id(call.peer)))

    def _groups(self, request: broker_pb2.ListGroupsRequest) -> Generator[None, None, broker_pb2.ListGroupsResponse]:
        streamlet = self._streamlet(request)
        interval = interval_of(streamlet.intervals, request.after_group_id + 1)
        if interval is None:
            end = min(request.after_group_id + 1, NO_END - 1)  # a foreign client may ask behind the last possible id
            return broker_pb2.ListGroupsResponse(complete=True, end_group_id=end)
        groups, complete = yield from list_groups(
            streamlet, request.after_group_id, min(request.groups_max or GROUPS_MAX, GROUPS_MAX)
        )
        self._streamlet(request)  # raises if it was dropped meanwhile, because the groups may then be incomplete
        # A reader that takes the list for all groups would skip the groups of another broker in between.
        here = [group for group in groups if group.group_id < interval.end_group_id]
        response = broker_pb2.ListGroupsResponse(
            complete=complete or len(here) < len(groups), end_group_id=interval.end_group_id if interval.closed else 0
        )
        for group in here:
            row = response.groups.add(
                group_id=group.group_id,
                entry=group.entry,
                closed=group.closed,
                first_record=group.first_record,
                next_record=group.next_record,
                length_bytes=group.length_bytes,
            )
            entry = streamlet.entries[group.entry]
            fill_cursor(row.start, entry, group.start)
            fill_cursor(row.end, entry, group.end)
            yield
        return response

    async def measure_lag(self, call: Call[broker_pb2.MeasureLagRequest]) -> Reply[broker_pb2.MeasureLagResponse]:
        """Measure the durable data at this broker behind cursors."""
        if len(call.message.cursors) > CURSORS_MAX:
            raise InvalidArgument(f"at most {CURSORS_MAX} cursors in a request", limit=CURSORS_MAX)
        return Reply(await self._turns.run(self._lags(call.peer, call.message.cursors), id(call.peer)))

    def _lags(
        self, peer: Peer, cursors: Iterable[common_pb2.Cursor]
    ) -> Generator[None, None, broker_pb2.MeasureLagResponse]:
        response = broker_pb2.MeasureLagResponse()
        for cursor in cursors:
            yield  # a single cursor may walk through a thousand segments
            lag = response.lags.add()
            try:
                self._check(peer, Operation.DESCRIBE, cursor.stream_id)
                streamlet = self._streamlet(cursor)
                entry = entry_of(streamlet, cursor.entry)
                position = _in_a_segment(streamlet, entry, position_of(cursor))
                lag.records = lag_records(streamlet, entry, position)
                lag.bytes = lag_bytes(entry, position, lag.records)
                lag.oldest_us = oldest_us(entry, position)
                lag.next_record = ordinal_at(streamlet, entry, position)
            except KeraError as error:
                lag.error.CopyFrom(error_to_message(error))
        return response

    def _streamlet(self, request: Any) -> Streamlet:
        return self._streams.streamlet(request.stream_id, request.streamlet_id)


def _in_a_segment(streamlet: Streamlet, entry: Entry, position: Position) -> Position:
    """Return a position as a place in a segment; `EARLIEST` becomes the entry's start. Raises as `resolve`."""
    interval_at(streamlet, position.group_id)
    if position == EARLIEST:
        return entry.start
    key, offset = resolve(streamlet, entry, position)
    return Position(*key, offset)
