"""Discovery of groups and segments, as in thesis tables 6.1 and 6.2."""

from typing import Any

import pytest

from kera.broker.log.streamlet import Streamlet
from kera.broker.serving import thesis_api
from kera.broker.serving.limits import CONSUMER_GROUP_BYTES_MAX
from kera.broker.serving.thesis_api import GivenGroups
from kera.core.base.turns import at_once
from kera.core.errors import InvalidArgument, NotOwner, StreamletOutOfRange, UnknownGroup, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Method
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, Log, chunk, stream_info

WHERE: dict[str, Any] = {"stream_id": STREAM_ID, "streamlet_id": 0}


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    """Streamlet 0: groups 1 (full) and 3 of entry 1, group 2 of entry 0. Streamlet 1: empty. Streamlet 2: elsewhere."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2))
    broker.append(*(chunk(1, n, record_count=10, max_timestamp_us=100 + n) for n in range(8)), chunk(2, 0), chunk(1, 8))
    return broker


async def test_each_consumer_group_is_given_each_group_once_in_order(broker: Broker) -> None:
    async def ask(consumer_group: str, groups_max: int) -> list[tuple[int, int, bool]]:
        request = api.GET_NEXT_GROUPS.request(**WHERE, consumer_group=consumer_group, groups_max=groups_max)
        answer = await broker.ask(api.GET_NEXT_GROUPS, request)
        return [(group.group_id, group.entry, group.closed) for group in answer.groups]

    assert await ask("a", 1) == [(1, 1, True)]
    assert await ask("b", 0) == [(1, 1, True), (2, 0, False)], "by default one group per entry"
    assert await ask("a", 9) == [(2, 0, False), (3, 1, False)]
    assert await ask("a", 9) == []


async def test_a_request_for_groups_needs_the_name_of_a_consumer_group(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="consumer_group"):
        await broker.ask(api.GET_NEXT_GROUPS, api.GET_NEXT_GROUPS.request(**WHERE))


async def test_the_length_of_a_consumer_groups_name_is_limited_in_bytes(broker: Broker) -> None:
    request = api.GET_NEXT_GROUPS.request(**WHERE, consumer_group="ä" * CONSUMER_GROUP_BYTES_MAX)
    with pytest.raises(InvalidArgument, match=f"at most {CONSUMER_GROUP_BYTES_MAX} bytes"):
        await broker.ask(api.GET_NEXT_GROUPS, request)


async def test_an_answer_has_a_limited_number_of_groups(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thesis_api, "GROUPS_MAX", 2)
    request = api.GET_NEXT_GROUPS.request(**WHERE, consumer_group="a", groups_max=2**32 - 1)
    answers = [await broker.ask(api.GET_NEXT_GROUPS, request) for _ in range(2)]

    assert [[group.group_id for group in answer.groups] for answer in answers] == [[1, 2], [3]]


async def test_segments_of_a_group_are_described_after_the_last_known_one(broker: Broker) -> None:
    async def ask(group_id: int, after: int) -> Any:
        request = api.GET_NEXT_SEGMENTS.request(**WHERE, group_id=group_id, after_segment_id=after)
        return await broker.ask(api.GET_NEXT_SEGMENTS, request)

    first, second = (await ask(1, 0)).segments
    assert (first.segment_id, first.closed, first.durable_head, first.record_count) == (1, True, 4096, 40)
    assert (first.min_timestamp_us, first.max_timestamp_us) == (10, 103)
    assert [segment.segment_id for segment in (await ask(1, 1)).segments] == [2]
    assert list((await ask(1, 2)).segments) == []
    assert list((await ask(1, 99)).segments) == []
    assert [(await ask(group_id, 0)).group_closed for group_id in (1, 2, 3)] == [True, False, False]
    assert second.closed
    assert [(s.closed, s.durable_head) for s in (await ask(3, 0)).segments] == [(False, 1024)]


async def test_segments_on_disk_are_described_like_those_in_memory(broker: Broker) -> None:
    async def ask() -> list[bytes]:
        described = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID)
        answers = [await broker.ask(api.DESCRIBE_STREAMLETS, described)]
        for group_id in (1, 2, 3):
            request = api.GET_NEXT_SEGMENTS.request(**WHERE, group_id=group_id)
            answers.append(await broker.ask(api.GET_NEXT_SEGMENTS, request))
        return [answer.SerializeToString() for answer in answers]

    before = await ask()
    broker.engine.run()
    broker.engine.fill_memory()
    slots = [broker.engine.memory.slots.allocate() for _ in range(2)]
    assert len(slots) == 2, "both segments of group 1 have left the memory"

    assert await ask() == before


async def test_available_groups_and_segments_are_intervals(broker: Broker) -> None:
    groups = await broker.ask(api.GET_AVAILABLE_GROUPS, api.GET_AVAILABLE_GROUPS.request(**WHERE))
    empty = await broker.ask(
        api.GET_AVAILABLE_GROUPS, api.GET_AVAILABLE_GROUPS.request(stream_id=STREAM_ID, streamlet_id=1)
    )
    segments = [
        await broker.ask(api.GET_AVAILABLE_SEGMENTS, api.GET_AVAILABLE_SEGMENTS.request(**WHERE, group_id=group_id))
        for group_id in (1, 2)
    ]

    assert (groups.first_group_id, groups.last_group_id) == (1, 3)
    assert (empty.first_group_id, empty.last_group_id) == (0, 0)
    assert [(s.first_segment_id, s.last_segment_id) for s in segments] == [(1, 2), (1, 1)]


@pytest.mark.parametrize("method", [api.GET_NEXT_GROUPS, api.GET_AVAILABLE_GROUPS], ids=lambda method: method.name)
async def test_answers_name_the_owner_and_the_brokers_that_have_other_groups(
    broker: Broker, method: Method[Any, Any]
) -> None:
    request = {**WHERE, "consumer_group": "a"} if method is api.GET_NEXT_GROUPS else WHERE
    answer = await broker.ask(method, method.request(**request))
    assert (answer.owner_id, list(answer.intervals)) == (BROKER_ID, [])
    assert broker.streams.get(STREAM_ID).spread == {}, "nothing is kept of what has never moved"
    broker.streams.streamlet(STREAM_ID, 0).seal()
    answer = await broker.ask(method, method.request(**request))
    assert answer.owner_id == 0, "it may have moved, and this broker was not told yet"

    info = stream_info(owners=(BROKER_ID + 1, BROKER_ID, BROKER_ID + 1), entries=2)
    info.assignments_version = 1
    for first_group_id, broker_id in ((1, BROKER_ID), (4, BROKER_ID + 1)):
        info.assignments[0].intervals.add(first_group_id=first_group_id, broker_id=broker_id)
    broker.streams.open(info, BROKER_ID)
    answer = await broker.ask(method, method.request(**request))
    assert answer.owner_id == BROKER_ID + 1
    assert [(each.first_group_id, each.broker_id) for each in answer.intervals] == [(1, BROKER_ID), (4, BROKER_ID + 1)]

    info.assignments[0].broker_id, info.assignments_version = BROKER_ID, 2
    del info.assignments[0].intervals[:]
    broker.streams.open(info, BROKER_ID)
    answer = await broker.ask(method, method.request(**request))
    assert (answer.owner_id, list(answer.intervals)) == (BROKER_ID, [])


@pytest.mark.parametrize("method", [api.GET_NEXT_SEGMENTS, api.GET_AVAILABLE_SEGMENTS])
async def test_a_group_that_does_not_exist_is_refused(broker: Broker, method: Method[Any, Any]) -> None:
    for group_id in (0, 4):
        with pytest.raises(UnknownGroup):
            await broker.ask(method, method.request(**WHERE, group_id=group_id))


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ({"stream_id": 99, "streamlet_id": 0}, UnknownStream),
        ({"stream_id": STREAM_ID, "streamlet_id": 2}, NotOwner),
        ({"stream_id": STREAM_ID, "streamlet_id": 3}, StreamletOutOfRange),
    ],
)
@pytest.mark.parametrize(
    "method",
    [api.GET_NEXT_GROUPS, api.GET_NEXT_SEGMENTS, api.GET_AVAILABLE_GROUPS, api.GET_AVAILABLE_SEGMENTS],
    ids=lambda method: method.name,
)
async def test_a_streamlet_that_is_not_here_is_refused(
    broker: Broker, method: Method[Any, Any], where: dict[str, int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await broker.ask(method, method.request(**where))


# --- entries -----------------------------------------------------------------------------------------------


def given(groups: GivenGroups, streamlet: Streamlet, consumer_group: str, groups_max: int) -> list[int]:
    return [group_id for group_id, _ in at_once(groups.next(streamlet, consumer_group, groups_max))]


@pytest.fixture
def streamlet(engine: Engine) -> Streamlet:
    """Groups 10 to 14 of two entries, one segment each."""
    log = Log(engine, entries=2, group_segments=1, first_group_id=10)
    for producer in (1, 2, 1, 1, 2):
        log.append(producer, size=4096)
    return log.streamlet


def test_concurrent_requests_of_a_consumer_group_get_different_groups(streamlet: Streamlet) -> None:
    groups = GivenGroups()
    first = groups.next(streamlet, "a", 9)
    for _ in range(4):  # the two entries, and two groups
        next(first)
    assert given(groups, streamlet, "a", 2) == [12, 13]

    assert [group_id for group_id, _ in at_once(first)] == [10, 11, 14]


def test_a_group_opened_later_is_given_to_the_next_request(engine: Engine) -> None:
    log, groups = Log(engine, group_segments=1), GivenGroups()
    log.append(size=4096)
    assert given(groups, log.streamlet, "a", 9) == [1]
    assert given(groups, log.streamlet, "a", 9) == []
    log.append(size=4096)

    assert given(groups, log.streamlet, "a", 9) == [2]
