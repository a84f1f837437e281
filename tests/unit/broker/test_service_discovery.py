"""The broker's answers about groups, segments and entries (thesis tables 6.1 and 6.2)."""

from typing import Any

import pytest

from kera.core.errors import InvalidArgument, NotOwner, StreamletOutOfRange, UnknownGroup, UnknownStream
from kera.core.ids import EARLIEST, Position
from kera.core.rpc import api
from kera.core.rpc.method import Method
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, stream_info

WHERE: dict[str, Any] = {"stream_id": STREAM_ID, "streamlet_id": 0}


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    """Streamlet 0: groups 1 (full) and 3 of entry 1, group 2 of entry 0. Streamlet 1: empty. Streamlet 2: elsewhere."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2))
    broker.append(*(chunk(1, n, record_count=10, max_timestamp_us=100 + n) for n in range(8)), chunk(2, 0), chunk(1, 8))
    return broker


async def test_groups_are_given_to_an_consumer_group_once(broker: Broker) -> None:
    async def ask(consumer_group: str, groups_max: int) -> list[tuple[int, int, bool]]:
        request = api.GET_NEXT_GROUPS.request(**WHERE, consumer_group=consumer_group, groups_max=groups_max)
        answer = await broker.ask(api.GET_NEXT_GROUPS, request)
        return [(group.group_id, group.entry, group.closed) for group in answer.groups]

    assert await ask("a", 1) == [(1, 1, True)]
    assert await ask("a", 0) == [(2, 0, False), (3, 1, False)], "by default one group per entry"
    assert await ask("a", 9) == []
    assert await ask("b", 0) == [(1, 1, True), (2, 0, False)]


async def test_groups_are_given_to_consumer_groups_with_a_name_only(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="consumer_group"):
        await broker.ask(api.GET_NEXT_GROUPS, api.GET_NEXT_GROUPS.request(**WHERE))


async def test_segments_of_a_group_are_described_from_where_the_consumer_knows_them(broker: Broker) -> None:
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
    async def ask(group_id: int) -> Any:
        request = api.GET_NEXT_SEGMENTS.request(**WHERE, group_id=group_id)
        return (await broker.ask(api.GET_NEXT_SEGMENTS, request)).SerializeToString()

    before = [await ask(group_id) for group_id in (1, 2, 3)], list(await describe(broker))
    broker.engine.run()
    broker.engine.fill_memory()
    slots = [broker.engine.memory.allocate() for _ in range(2)]
    assert len(slots) == 2, "both segments of group 1 have left the memory"

    assert ([await ask(group_id) for group_id in (1, 2, 3)], list(await describe(broker))) == before


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


@pytest.mark.parametrize("method", [api.GET_NEXT_SEGMENTS, api.GET_AVAILABLE_SEGMENTS])
async def test_a_group_that_is_not_there_is_refused(broker: Broker, method: Method[Any, Any]) -> None:
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


async def describe(broker: Broker, *streamlet_ids: int) -> Any:
    request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=streamlet_ids)
    return (await broker.ask(api.DESCRIBE_STREAMLETS, request)).streamlets


def place(cursor: Any) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position)


async def test_entries_are_described_with_their_ends_and_records(broker: Broker) -> None:
    (streamlet,) = await describe(broker, 0)
    even, odd = streamlet.entries

    assert (streamlet.streamlet_id, streamlet.group_count) == (0, 3)
    assert (place(even.start), place(even.end)) == ((2, 1, 0), (2, 1, 1024))
    assert (place(odd.start), place(odd.end)) == ((1, 1, 0), (3, 1, 1024))
    assert [(e.first_record, e.next_record, e.length_bytes) for e in (even, odd)] == [(0, 1, 1024), (0, 81, 9 * 1024)]
    assert [(e.start.stream_id, e.start.streamlet_id, e.start.entry) for e in (even, odd)] == [(7, 0, 0), (7, 0, 1)]


async def test_an_entry_without_chunks_starts_and_ends_at_the_earliest_position(broker: Broker) -> None:
    (streamlet,) = await describe(broker, 1)

    assert [(place(e.start), place(e.end), e.first_record, e.next_record) for e in streamlet.entries] == [
        (EARLIEST, EARLIEST, 0, 0)
    ] * 2


async def test_all_streamlets_of_the_broker_are_described_when_none_is_named(broker: Broker) -> None:
    assert [streamlet.streamlet_id for streamlet in await describe(broker)] == [0, 1]


async def test_a_streamlet_of_another_broker_is_not_described(broker: Broker) -> None:
    with pytest.raises(NotOwner):
        await describe(broker, 0, 2)


async def test_an_answer_describes_so_many_entries(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream may have a million of them: they would fit into no message, and take the broker's memory."""
    (row,) = await describe(broker, 0)
    monkeypatch.setattr("kera.broker.serving.service.ENTRIES_MAX", 2 * len(row.entries))

    assert len(await describe(broker, 0, 0)) == 2
    with pytest.raises(InvalidArgument, match="name fewer streamlets"):
        await describe(broker, 0, 0, 0)
