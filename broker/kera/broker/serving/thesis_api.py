"""The discovery calls of thesis tables 6.1 and 6.2, for clients that go through a streamlet group by group.

A broker answers for the groups that it has. Each answer about groups also has the streamlet's intervals, which name the
brokers that have the other groups. The broker keeps only in memory which groups it has given to a consumer group: after
a restart or a move of the streamlet, it gives all of them again.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from heapq import heappop, heappush
from typing import Any
from weakref import WeakKeyDictionary

from kera.broker.log.entry import Entry, length_of
from kera.broker.log.read_plan import group_entry
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.streams import Streams
from kera.broker.records import Key, SegmentRecord
from kera.broker.serving.descriptions import GROUPS_MAX
from kera.broker.serving.limits import CONSUMER_GROUP_BYTES_MAX
from kera.core.base.turns import Turns
from kera.core.errors import InvalidArgument
from kera.core.rpc import Call, Reply
from kera.v1 import broker_pb2, common_pb2

CONSUMER_GROUPS_MAX = 1024
"""Consumer groups whose given groups are remembered, per streamlet; beyond that, the group that has been silent for
longest is forgotten."""


class GivenGroups:
    """The last group of one streamlet that each consumer group was given."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        """By consumer group; the group that has been silent for longest comes first."""

    def next(
        self, streamlet: Streamlet, consumer_group: str, groups_max: int
    ) -> Generator[None, None, list[tuple[int, Entry]]]:
        """Return the next groups that this consumer group was not given yet, at most `groups_max`, in order.

        Yields after each look at an entry. Groups that are opened meanwhile are left to the next request.
        """
        through_id = streamlet.next_group_id - 1
        last = self._note(consumer_group, 0)
        heads: list[tuple[int, int]] = []
        for entry in list(streamlet.entries.made):
            _push(heads, entry, last, through_id)
            yield
        found: list[tuple[int, Entry]] = []
        while heads and len(found) < groups_max:
            group_id, index = heappop(heads)
            entry = streamlet.entries[index]
            last = self._note(consumer_group, last)
            if group_id > last:  # otherwise another request has taken it meanwhile
                last = self._note(consumer_group, group_id)
                found.append((group_id, entry))
            _push(heads, entry, last, through_id)
            yield
        return found

    def _note(self, consumer_group: str, group_id: int) -> int:
        """Note that a consumer group was given the groups up to one; return the last one that it was given."""
        last = self._last[consumer_group] = max(group_id, self._last.pop(consumer_group, 0))
        if len(self._last) > CONSUMER_GROUPS_MAX:
            del self._last[next(iter(self._last))]
        return last


class ThesisApi:
    """Handles getNextGroups, getNextSegments, getAvailableGroups and getAvailableSegments."""

    def __init__(self, streams: Streams, turns: Turns) -> None:
        self._streams = streams
        self._turns = turns
        self._given: WeakKeyDictionary[Streamlet, GivenGroups] = WeakKeyDictionary()

    async def get_next_groups(
        self, call: Call[broker_pb2.GetNextGroupsRequest]
    ) -> Reply[broker_pb2.GetNextGroupsResponse]:
        """Return groups of a streamlet; each group is given to a consumer group once."""
        return Reply(await self._turns.run(self._next_groups(call.message), id(call.peer)))

    def _next_groups(
        self, request: broker_pb2.GetNextGroupsRequest
    ) -> Generator[None, None, broker_pb2.GetNextGroupsResponse]:
        streamlet = self._streamlet(request)
        if not request.consumer_group:
            raise InvalidArgument("getNextGroups needs a consumer_group")
        if len(request.consumer_group.encode()) > CONSUMER_GROUP_BYTES_MAX:
            raise InvalidArgument(
                f"consumer_group is too long: it has at most {CONSUMER_GROUP_BYTES_MAX} bytes",
                limit=CONSUMER_GROUP_BYTES_MAX,
            )
        given = self._given.setdefault(streamlet, GivenGroups())
        groups_max = min(request.groups_max or len(streamlet.entries), GROUPS_MAX)
        groups = yield from given.next(streamlet, request.consumer_group, groups_max)
        owner_id, intervals = self._where(request)
        return broker_pb2.GetNextGroupsResponse(
            groups=[
                broker_pb2.GroupInfo(
                    group_id=group_id, entry=entry.index, closed=not streamlet.is_active(group_id, entry)
                )
                for group_id, entry in groups
            ],
            owner_id=owner_id,
            intervals=intervals,
        )

    async def get_next_segments(
        self, call: Call[broker_pb2.GetNextSegmentsRequest]
    ) -> Reply[broker_pb2.GetNextSegmentsResponse]:
        """Return the segments of a group that a consumer does not know yet."""
        return Reply(await self._turns.run(self._next_segments(call.message), id(call.peer)))

    def _next_segments(
        self, request: broker_pb2.GetNextSegmentsRequest
    ) -> Generator[None, None, broker_pb2.GetNextSegmentsResponse]:
        streamlet, group_id = self._streamlet(request), request.group_id
        entry = group_entry(streamlet, group_id)
        # Determined before the segments: if the group is closed, all its segments follow.
        response = broker_pb2.GetNextSegmentsResponse(group_closed=not streamlet.is_active(group_id, entry))
        for key, segment in entry.group_segments(group_id, request.after_segment_id):
            response.segments.append(_segment_info(key, segment))
            yield
        return response

    def get_available_groups(
        self, call: Call[broker_pb2.GetAvailableGroupsRequest]
    ) -> Reply[broker_pb2.GetAvailableGroupsResponse]:
        """Return the interval of groups that are here, and the brokers that have others."""
        first, last = self._streamlet(call.message).available_groups()
        owner_id, intervals = self._where(call.message)
        return Reply(
            broker_pb2.GetAvailableGroupsResponse(
                first_group_id=first, last_group_id=last, owner_id=owner_id, intervals=intervals
            )
        )

    async def get_available_segments(
        self, call: Call[broker_pb2.GetAvailableSegmentsRequest]
    ) -> Reply[broker_pb2.GetAvailableSegmentsResponse]:
        """Return the interval of a group's segments."""
        return Reply(await self._turns.run(self._available_segments(call.message), id(call.peer)))

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

    def _where(self, request: Any) -> tuple[int, Iterable[common_pb2.GroupInterval]]:
        """Return the owner of a streamlet that is here, and its intervals.

        The owner is 0 while the streamlet is sealed: another broker may own it already, unknown to this one.
        """
        stream, streamlet_id = self._streams.get(request.stream_id), request.streamlet_id
        owner_id = 0 if stream.streamlets[streamlet_id].sealed else stream.owners[streamlet_id]
        known = stream.spread.get(streamlet_id)
        return owner_id, () if known is None else known.intervals

    def _streamlet(self, request: Any) -> Streamlet:
        return self._streams.streamlet(request.stream_id, request.streamlet_id)


def _push(heads: list[tuple[int, int]], entry: Entry, after: int, through_id: int) -> None:
    """Add the first group of an entry behind `after`, if there is one up to `through_id`, to a heap of groups."""
    group_id = entry.next_group(after)
    if group_id is not None and group_id <= through_id:
        heappush(heads, (group_id, entry.index))


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
