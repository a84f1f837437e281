"""Group discovery: a member reports the groups of all intervals, up to the first one that may still be lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kera.client.admin import consumer_groups
from kera.client.admin.consumer_groups import unread
from kera.client.cluster.intervals import start_of_group
from kera.client.consuming.groups.discovery import GROUPS_MAX, Finds, list_groups, look_around
from kera.client.settings import ClientSettings
from kera.client.types import StreamDescription
from kera.coordinator.consumer_groups.discovery import LOOKS_MAX
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import NotOwner, Unavailable, UnknownStream
from kera.core.rpc import Reply, api
from kera.core.rpc.limits import HEAD_BYTES_MAX
from kera.v1 import broker_pb2, common_pb2, consumer_group_pb2
from tests.unit.client.support import stream_info

PAGE = 3


def group(
    group_id: int, entry: int = 0, *, closed: bool = True, empty: bool = False, at: int = 64
) -> broker_pb2.GroupBounds:
    """A group whose records before `at` have been removed."""
    start = common_pb2.Cursor(entry=entry, group_id=group_id, segment_id=1, position=at)
    end = common_pb2.Cursor(entry=entry, group_id=group_id, segment_id=1, position=at if empty else 640)
    return broker_pb2.GroupBounds(
        group_id=group_id,
        entry=entry,
        closed=closed,
        start=start,
        end=end,
        first_record=group_id * 100,
        next_record=group_id * 100 + 50,
    )


def cursor(group_id: int, segment_id: int, position: int) -> common_pb2.Cursor:
    return common_pb2.Cursor(group_id=group_id, segment_id=segment_id, position=position)


class Brokers:
    """A cluster with one streamlet of stream ``s``, whose groups are at several brokers."""

    request_timeout_s = 1.0

    def __init__(self, *intervals: tuple[int, int]) -> None:
        """Intervals: first group id, and broker."""
        self.info = stream_info(entries=2)
        (assignment,) = self.info.assignments
        for first_group_id, broker_id in intervals:
            assignment.intervals.add(first_group_id=first_group_id, broker_id=broker_id)
        self.groups: dict[int, list[broker_pb2.GroupBounds]] = {broker_id: [] for _, broker_id in intervals}
        self.failures: dict[int, Exception] = {}
        self.settings = ClientSettings(retry_backoff_ms=1, retry_timeout_ms=20)
        self.forgotten = 0
        self.lost_to = cursor(0, 0, 0)
        """The end of the lost records of each entry."""
        self.end_group_id = 0
        """Brokers say that groups from this one on are at another broker."""

    async def stream(self, name: str) -> StreamDescription:
        if name != "s":
            raise UnknownStream("no such stream")
        return StreamDescription.from_message(self.info)

    stream_or_last_seen = stream

    def forget(self, _: str) -> None:
        self.forgotten += 1

    def bounds(self) -> broker_pb2.DescribeStreamletsResponse:
        """The bounds at the last broker, the owner."""
        answer = broker_pb2.DescribeStreamletsResponse()
        streamlet = answer.streamlets.add()
        for entry, end in enumerate((cursor(5, 1, 64), cursor(9, 2, 0))):
            row = streamlet.entries.add(
                start=cursor(3, 1, 0), end=end, first_record=300 + entry, next_record=700 + entry
            )
            if self.lost_to.group_id:
                row.lost_from.CopyFrom(cursor(0, 0, 0))
                row.lost_to.CopyFrom(self.lost_to)
        return answer

    async def channel(self, _: StreamDescription, broker_id: int) -> Any:
        brokers = self

        class Channel:
            def submit(self, method: Any, request: Any, _: Any = (), *, timeout_s: float) -> asyncio.Future[Any]:
                assert timeout_s > 0
                future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                if broker_id in brokers.failures:
                    future.set_exception(brokers.failures[broker_id])
                elif method is api.DESCRIBE_STREAMLETS:
                    future.set_result(Reply(brokers.bounds()))
                else:
                    rest = [each for each in brokers.groups[broker_id] if each.group_id > request.after_group_id]
                    answer = broker_pb2.ListGroupsResponse(
                        groups=rest[:PAGE], complete=len(rest) <= PAGE, end_group_id=brokers.end_group_id
                    )
                    future.set_result(Reply(answer))
                return future

        return Channel()


async def look(brokers: Brokers, after: int = 0, *, start: str = "earliest", begin: bool = False) -> Any:
    looks = [consumer_group_pb2.Look(stream_id=7, after_group_id=after, start=begin)]
    return await look_around(brokers, "s", looks, start=start)  # type: ignore[arg-type]


def ids(seen: consumer_group_pb2.SeenGroups) -> list[int]:
    return [group.start.group_id for group in seen.groups]


async def test_groups_of_all_intervals_are_reported_in_order() -> None:
    brokers = Brokers((1, 3), (10, 4), (20, 3))
    brokers.groups[3] = [*map(group, (1, 2, 3, 4, 5)), *map(group, (20, 21))]
    brokers.groups[4] = [*map(group, (11, 12, 13, 14))]
    (seen,) = (await look(brokers)).seen
    assert ids(seen) == [1, 2, 3, 4, 5, 11, 12, 13, 14, 20, 21]
    assert (seen.after_group_id, seen.through_group_id) == (0, 21)
    (seen,) = (await look(brokers, after=13)).seen
    assert (ids(seen), seen.after_group_id) == ([14, 20, 21], 13)
    assert [group.start.entry for group in await list_groups(brokers, "s", 0)] == [0] * 11  # type: ignore[arg-type]


async def test_a_streamlet_that_moved_during_discovery_is_looked_up_again() -> None:
    brokers = Brokers((1, 3))
    brokers.groups[3] = [group(1), group(2)]
    brokers.end_group_id = 3
    assert not await look(brokers)
    assert brokers.forgotten == 1
    moved = Brokers((1, 3), (3, 4))
    moved.groups = {3: brokers.groups[3], 4: [group(3)]}
    moved.end_group_id = 3
    brokers.info, brokers.groups = moved.info, moved.groups
    with pytest.raises(NotOwner):
        await list_groups(brokers, "s", 0)  # type: ignore[arg-type]
    moved.end_group_id = 0
    (seen,) = (await look(moved)).seen
    assert ids(seen) == [1, 2, 3]


async def test_an_interval_without_groups_is_passed_over() -> None:
    brokers = Brokers((1, 3), (10, 4))
    (seen,) = (await look(brokers)).seen
    assert (ids(seen), seen.through_group_id) == ([], 9)


async def test_groups_behind_one_that_may_still_be_lost_are_not_reported() -> None:
    brokers = Brokers((1, 3))
    brokers.groups[3] = [group(1), group(2, 1, closed=False, empty=True, at=0), group(3)]
    (seen,) = (await look(brokers)).seen
    assert (ids(seen), seen.through_group_id) == ([1], 1)
    brokers.groups[3][1] = group(2, 1, empty=True)
    (seen,) = (await look(brokers)).seen
    assert (ids(seen), seen.through_group_id) == ([1, 3], 3)


async def test_an_open_group_is_reported_after_all_of_its_records_were_removed() -> None:
    brokers = Brokers((1, 3))
    brokers.groups[3] = [group(1), group(2, 1, closed=False, empty=True), group(3)]
    (seen,) = (await look(brokers)).seen
    assert (ids(seen), seen.through_group_id) == ([1, 2, 3], 3)
    assert not seen.groups[1].HasField("end_record")


@pytest.mark.parametrize("failure", [Unavailable("away"), NotOwner("not here"), UnknownStream("not here")])
async def test_groups_behind_an_unreachable_broker_are_not_reported(failure: Exception) -> None:
    brokers = Brokers((1, 3), (10, 4))
    brokers.groups[3] = [group(1)]
    brokers.groups[4] = [group(10)]
    brokers.failures[3] = failure
    assert (await look(brokers)).seen == []
    assert brokers.forgotten == 1
    (seen,) = (await look(brokers, after=9)).seen
    assert ids(seen) == [10]


async def test_a_new_group_begins_at_the_oldest_group_or_at_the_end() -> None:
    """At earliest, records count from the oldest listed group, or else from the bounds of the broker."""
    brokers = Brokers((1, 3))
    brokers.groups[3] = list(map(group, range(2, 8)))
    finds = await look(brokers, begin=True)
    (start,), (seen,) = finds.starts, finds.seen
    assert [cursor.group_id for cursor in start.cursors] == [0, 0]
    assert [each.record for each in start.records] == [200, 301]
    assert (seen.after_group_id, ids(seen)) == (0, list(range(2, 8)))
    finds = await look(brokers, begin=True, start="latest")
    (start,), (seen,) = finds.starts, finds.seen
    assert [(cursor.entry, cursor.group_id, cursor.position) for cursor in start.cursors] == [(0, 5, 64), (1, 9, 0)]
    assert [each.record for each in start.records] == [700, 701]
    assert (seen.after_group_id, ids(seen)) == (4, [5, 6, 7])


@pytest.mark.parametrize(("lost_to", "more"), [(3, 1), (2, 0)])
async def test_a_new_group_reports_a_loss_only_if_it_begins_with_one(lost_to: int, more: int) -> None:
    """The coordinator takes ordinals that go back as lost records of an unknown number."""
    brokers = Brokers((1, 3))
    brokers.groups[3] = list(map(group, range(3, 8)))
    brokers.lost_to = cursor(lost_to, 1, 0)

    (start,) = (await look(brokers, begin=True)).starts

    assert [each.record for each in start.records] == [300 + more, 301 + more]


async def test_a_new_group_does_not_begin_while_its_broker_is_unreachable() -> None:
    brokers = Brokers((1, 3))
    brokers.failures[3] = Unavailable("away")
    for start in ("earliest", "latest"):
        assert not await look(brokers, begin=True, start=start)


def test_reports_of_many_streamlets_are_split_into_messages_of_limited_size() -> None:
    """For a new consumer group on a long stream, one message with all groups would be refused again and again."""
    big = 1 << 30
    found = [
        consumer_group_pb2.SeenGroups(
            stream_id=big,
            streamlet_id=streamlet_id,
            through_group_id=big + GROUPS_MAX,
            groups=[
                consumer_group_pb2.SeenGroup(
                    start=common_pb2.Cursor(
                        stream_id=big, streamlet_id=streamlet_id, entry=1, group_id=big + number, segment_id=1
                    ),
                    first_record=big,
                    end_record=big,
                )
                for number in range(GROUPS_MAX)
            ],
        )
        for streamlet_id in range(LOOKS_MAX)
    ]
    assert consumer_group_pb2.ConsumeRoundRequest(seen=found).ByteSize() > HEAD_BYTES_MAX
    finds = Finds()
    finds.add(Finds([consumer_group_pb2.StreamletStart(stream_id=7)], found))
    told: list[consumer_group_pb2.SeenGroups] = []
    starts = 0
    while finds:
        message = finds.take()
        starts += len(message.starts)
        told += message.seen
        request = consumer_group_pb2.ConsumeRoundRequest(starts=message.starts, seen=message.seen)
        assert request.ByteSize() < api.CONSUME_ROUND.request_bytes_max // 2
    assert (starts, told) == (1, found)


async def test_the_end_of_a_group_is_reported_once_the_group_is_closed() -> None:
    brokers = Brokers((1, 3))
    brokers.groups[3] = [group(1), group(2, closed=False)]
    (seen,) = (await look(brokers)).seen
    assert [(each.first_record, each.HasField("end_record"), each.end_record) for each in seen.groups] == [
        (100, True, 150),
        (200, False, 0),
    ]


async def test_discovery_of_a_deleted_stream_fails() -> None:
    looks = [consumer_group_pb2.Look(stream_id=7)]
    with pytest.raises(UnknownStream):
        await look_around(Brokers((1, 3)), "gone", looks, start="earliest")  # type: ignore[arg-type]


# -- unread groups -----------------------------------------------------------------------------------------------------


def progress(group_id: int, offset: int, *, done: bool = False) -> consumer_group_pb2.GroupProgress:
    next_ = common_pb2.Cursor(group_id=group_id, segment_id=1, position=offset)
    return consumer_group_pb2.GroupProgress(next=next_, done=done)


def test_done_groups_behind_the_cursor_are_not_unread() -> None:
    cursor = Position(3, 1, 10)
    assert unread(cursor, []) == [(cursor, None)]
    assert unread(
        cursor, [progress(3, 10), progress(5, 99, done=True), progress(6, 20), progress(8, 70, done=True)]
    ) == [
        (cursor, start_of_group(5)),
        (Position(6, 1, 20), start_of_group(8)),
        (Position(8, 1, 70), None),
    ]


def test_lag_is_measured_once_at_each_broker_from_the_position_on() -> None:
    """Each broker that has groups from a position on measures once."""
    stream = StreamDescription.from_message(Brokers((1, 3), (10, 4), (20, 3), (30, 5)).info)
    entry = stream.entry_id(0, 1)
    at = Position(4, 1, 64)
    assert consumer_groups._parts(stream, entry, at) == {3: at, 4: start_of_group(10), 5: start_of_group(30)}
    at = Position(12, 1, 0)
    assert consumer_groups._parts(stream, entry, at) == {4: at, 3: start_of_group(20), 5: start_of_group(30)}
    assert consumer_groups._parts(stream, entry, EARLIEST)[3] == EARLIEST


def test_a_message_takes_a_limited_number_of_starts_and_groups() -> None:
    starts = [consumer_group_pb2.StreamletStart(streamlet_id=at, cursors=[cursor(1, 1, 0)] * 3) for at in range(3)]
    seen = [
        consumer_group_pb2.SeenGroups(streamlet_id=at, groups=[consumer_group_pb2.SeenGroup()] * 2) for at in range(3)
    ]
    finds = Finds(list(starts), list(seen))
    taken = [finds.take(4) for _ in range(5)]
    assert [([one.streamlet_id for one in each.starts], [one.streamlet_id for one in each.seen]) for each in taken] == [
        ([0], []),
        ([1], []),
        ([2], []),
        ([], [0, 1]),
        ([], [2]),
    ], "at least one, and groups after the places where their entries begin"
    assert not finds
