"""Places and segments over several brokers: the requests, and the handling of errors."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kera.broker.serving.limits import ServingLimits
from kera.client.admin import locating
from kera.client.admin.locating import ChunkQuery, SegmentBounds, locate, positions_at, segments
from kera.client.positions import ChunkPlace
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import (
    DataLost,
    InvalidArgument,
    InvalidCursor,
    KeraError,
    NotOwner,
    ProtocolError,
    Recovering,
    StreamletOutOfRange,
    Unavailable,
    UnknownStream,
)
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2
from tests.unit.broker.moving_support import Cluster as Map
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID, Engine, chunk
from tests.unit.client.real_brokers import STREAM, RealBrokers, engines


@pytest.fixture
def two_engines() -> Iterator[list[Engine]]:
    with engines(2) as made:
        yield made


@pytest.fixture
async def client(two_engines: list[Engine]) -> AsyncIterator[RealBrokers]:
    made = RealBrokers(Map(*two_engines))
    yield made
    made.stop()


def send(client: RealBrokers, *times_us: int) -> None:
    """Send a chunk of ten records for each of these times."""
    for time_us in times_us:
        number = client.map.sequences[1]
        (status,) = client.map.owner.append(
            chunk(1, number, record_count=10, min_timestamp_us=1, max_timestamp_us=time_us)
        )
        assert not status.error.code
        client.map.sequences[1] += 1


async def spread(client: RealBrokers) -> None:
    """Chunks 0 to 2 at broker 1 (group 1), 3 and 4 at broker 2 (group 2), 5 to 7 at broker 1 again (group 3)."""
    send(client, 100, 101, 102)
    await client.map.move(2)
    send(client, 103, 104)
    await client.map.move(1)
    send(client, 105, 106, 107)


async def find(
    client: RealBrokers, start: Position = EARLIEST, end: Position | None = None, **limit: int
) -> ChunkPlace:
    (place,) = await locate(client, STREAM, [ChunkQuery(0, 0, start, end, **limit)])
    return place


def located(client: RealBrokers) -> list[int]:
    """The brokers that were asked for places, in order."""
    return [broker for broker, request in client.asked if isinstance(request, broker_pb2.LocateChunksRequest)]


# --- from broker to broker ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records_max", "chunks", "position"),
    [
        (10, 1, Position(1, 1, 1024)),
        (30, 3, Position(2, 1, 0)),
        (35, 3, Position(2, 1, 0)),
        (40, 4, Position(2, 1, 1024)),
        (50, 5, Position(3, 1, 0)),
        (59, 5, Position(3, 1, 0)),
        (70, 7, Position(3, 1, 2048)),
        (999, 8, Position(3, 1, 3072)),
    ],
)
async def test_records_and_bytes_are_counted_over_brokers(
    client: RealBrokers, records_max: int, chunks: int, position: Position
) -> None:
    await spread(client)
    wanted = ChunkPlace(position, 10 * chunks, chunks * CHUNK_BYTES)

    assert await find(client, records_max=records_max) == wanted
    assert await find(client, bytes_max=records_max * CHUNK_BYTES // 10) == wanted


async def test_counting_may_begin_within_one_broker_and_end_within_another(client: RealBrokers) -> None:
    await spread(client)
    start = Position(1, 1, 2048)

    assert await find(client, start, records_max=40) == ChunkPlace(Position(3, 1, 1024), 60, 4 * CHUNK_BYTES)
    assert await find(client, start, Position(2, 1, 1024), bytes_max=1 << 30) == ChunkPlace(
        Position(2, 1, 1024), 40, 2 * CHUNK_BYTES
    )
    client.asked.clear()
    assert await find(client, start, Position(2, 1, 0), records_max=999) == ChunkPlace(
        Position(2, 1, 0), 30, CHUNK_BYTES
    )
    assert located(client) == [1], "the end is where the other broker begins: it has nothing to say"


async def test_a_time_is_searched_for_over_brokers(client: RealBrokers) -> None:
    await spread(client)

    assert [(await find(client, timestamp_us=100 + number)).record for number in range(8)] == [*range(0, 80, 10)]
    assert await find(client, timestamp_us=108) == ChunkPlace(Position(3, 1, 3072), 80, 8 * CHUNK_BYTES)
    assert await positions_at(client, STREAM, 104) == {0: [ChunkPlace(Position(2, 1, 1024), 40, 4 * CHUNK_BYTES)]}


async def test_queries_for_the_same_broker_share_a_request(client: RealBrokers) -> None:
    await spread(client)
    queries = [ChunkQuery(0, 0, Position(group, 1, 0), bytes_max=1) for group in (1, 2, 3, 2, 1)]
    places = await locate(client, STREAM, queries)

    assert [place.record for place in places] == [10, 40, 60, 40, 10]
    assert located(client) == [1, 2]
    assert await locate(client, STREAM, []) == []


async def test_several_limited_requests_give_the_same_answer_as_few_unlimited_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = [
        *(ChunkQuery(0, 0, EARLIEST, records_max=number) for number in range(0, 210, 15)),
        *(ChunkQuery(0, 0, Position(1, 1, 2048), bytes_max=1000 * number) for number in range(21)),
        *(ChunkQuery(0, 0, EARLIEST, timestamp_us=time_us) for time_us in range(99, 122)),
    ]

    async def answers(limits: ServingLimits) -> tuple[Any, Any, int]:
        with engines(2) as made:
            client = RealBrokers(Map(*made, limits=limits))
            send(client, *range(100, 114))
            await client.map.move(2)
            send(client, *range(114, 120))
            found = await locate(client, STREAM, queries), await segments(client, STREAM, 0, 0, EARLIEST, None)
            client.stop()
            return *found, len(located(client))

    whole, pieces, _ = await answers(ServingLimits())
    monkeypatch.setattr(locating, "QUERIES_MAX", 5)
    places, listed, requests = await answers(ServingLimits(walk_segments=1, walk_segments_min=1, list_segments_max=1))

    assert (places, listed) == (whole, pieces)
    assert requests > len(queries) / 5


async def test_segments_are_listed_with_their_brokers(client: RealBrokers) -> None:
    await spread(client)
    wanted = [
        SegmentBounds(Position(1, 1, 0), Position(1, 1, 3072), 0, 30, 3072, 1, resident=True),
        SegmentBounds(Position(2, 1, 0), Position(2, 1, 2048), 30, 50, 2048, 2, resident=True),
        SegmentBounds(Position(3, 1, 0), Position(3, 1, 3072), 50, 80, 3072, 1, resident=True),
    ]

    assert await segments(client, STREAM, 0, 0, EARLIEST, None) == wanted
    assert await segments(client, STREAM, 0, 0, EARLIEST, Position(3, 1, 3072)) == wanted
    (cut,) = await segments(client, STREAM, 0, 0, Position(2, 1, 1024), Position(3, 1, 0))
    assert cut == SegmentBounds(Position(2, 1, 1024), Position(2, 1, 2048), 40, 50, 1024, 2, resident=True)
    assert await segments(client, STREAM, 0, 0, Position(2, 1, 0), Position(2, 1, 0)) == []


async def test_a_stream_without_records_has_places(client: RealBrokers) -> None:
    assert await positions_at(client, STREAM, 0) == {0: [ChunkPlace(EARLIEST, 0, 0)]}
    assert await segments(client, STREAM, 0, 0, EARLIEST, None) == []

    send(client, 1)
    await client.map.move(2)
    assert await find(client, timestamp_us=5) == ChunkPlace(Position(2, 1, 0), 10, CHUNK_BYTES)
    assert len(await segments(client, STREAM, 0, 0, EARLIEST, None)) == 1


# --- lost records ------------------------------------------------------------------------------------------


async def lose(client: RealBrokers, broker_id: int, to: Position, record: int) -> None:
    """Delete all chunks of a broker before a position."""
    streams = client.map.brokers[broker_id].streams
    streams.move_start(streams.get(STREAM_ID).streamlet(0).entries[0], to, record)


async def test_records_lost_between_brokers_are_passed_over(client: RealBrokers) -> None:
    await spread(client)
    await lose(client, 2, Position(2, 1, 1024), 40)

    assert await find(client, records_max=50) == ChunkPlace(Position(3, 1, 0), 50, 4 * CHUNK_BYTES)
    lost_from = Position(2, 1, 0)
    assert await find(client, timestamp_us=103) == ChunkPlace(
        Position(2, 1, 1024), 40, 3 * CHUNK_BYTES, lost_from=lost_from
    )
    assert (await find(client, timestamp_us=105)).lost_from is None
    for records_max, lost in ((35, lost_from), (40, None), (50, None)):  # the last two places are behind the loss
        assert (await find(client, records_max=records_max)).lost_from == lost
    found = await segments(client, STREAM, 0, 0, EARLIEST, None)
    assert [each[:2] for each in found[:2]] == [
        (Position(1, 1, 0), Position(1, 1, 3072)),
        (Position(2, 1, 1024), Position(2, 1, 2048)),
    ]
    with pytest.raises(DataLost) as raised:
        await find(client, Position(2, 1, 0), records_max=50)
    assert raised.value.attributes["available_from"] == [2, 1, 1024]
    with pytest.raises(DataLost):
        await segments(client, STREAM, 0, 0, Position(2, 1, 0), None)


async def test_earliest_is_the_oldest_remaining_record_at_any_broker(client: RealBrokers) -> None:
    """The first broker has lost all records, the second a part: records count from the remaining ones."""
    await spread(client)
    await lose(client, 2, Position(2, 1, 1024), 40)
    await lose(client, 1, Position(3, 1, 0), 50)

    assert await find(client, records_max=20) == ChunkPlace(Position(3, 1, 1024), 60, 2 * CHUNK_BYTES)
    assert await find(client, timestamp_us=0) == ChunkPlace(Position(2, 1, 1024), 40, 0)
    assert (await segments(client, STREAM, 0, 0, EARLIEST, None))[0].start == Position(2, 1, 1024)


async def test_an_end_beyond_the_stream_is_refused_for_segments_and_ignored_for_places(client: RealBrokers) -> None:
    await spread(client)
    beyond = Position(3, 2, 0)

    assert (await find(client, end=beyond, records_max=999)).position == Position(3, 1, 3072)
    with pytest.raises(InvalidCursor, match="beyond the end"):
        await segments(client, STREAM, 0, 0, EARLIEST, beyond)
    with pytest.raises(InvalidCursor):
        await segments(client, STREAM, 0, 0, EARLIEST, Position(3, 1, 77))


# --- errors ------------------------------------------------------------------------------------------------


async def test_a_stale_map_is_refreshed(client: RealBrokers) -> None:
    send(client, 100, 101)
    await client.stream(STREAM)
    await client.map.move(2)
    send(client, 102)

    assert (await find(client, Position(2, 1, 0), timestamp_us=102)).record == 20
    assert located(client) == [1, 2]
    assert client.questions == 2
    await client.map.move(1)
    send(client, 103)
    found = await segments(client, STREAM, 0, 0, Position(1, 1, 0), Position(3, 1, 1024))
    assert [each.broker_id for each in found] == [1, 2, 1]


@pytest.mark.parametrize("error", [Unavailable("away"), NotOwner("elsewhere"), Recovering("wait"), UnknownStream("?")])
async def test_temporary_errors_are_retried(client: RealBrokers, error: KeraError) -> None:
    await spread(client)
    failures: list[KeraError | None] = []
    client.failure = lambda _: failures.pop() if failures else None

    failures[:] = [error] * 3
    assert (await find(client, records_max=60)).record == 60
    failures[:] = [error] * 3
    assert len(await segments(client, STREAM, 0, 0, EARLIEST, Position(3, 1, 1024))) == 3
    assert failures == []


async def test_an_unreachable_broker_fails_after_the_retry_timeout(two_engines: list[Engine]) -> None:
    client = RealBrokers(Map(*two_engines), retry_timeout_ms=20)
    await spread(client)
    client.failure = lambda broker: Unavailable("away") if broker == 2 else None

    assert (await find(client, records_max=20)).record == 20
    with pytest.raises(Unavailable):
        await find(client, records_max=40)
    with pytest.raises(Unavailable):
        await segments(client, STREAM, 0, 0, EARLIEST, Position(3, 1, 0))
    client.stop()


async def test_a_query_that_is_retried_does_not_repeat_the_answered_ones(client: RealBrokers) -> None:
    await spread(client)
    asked = 0

    def fail(broker: int) -> KeraError | None:
        nonlocal asked
        asked += broker == 2
        return Recovering("wait") if broker == 2 and asked < 4 else None

    client.failure = fail
    queries = [ChunkQuery(0, 0, Position(2, 1, 0), bytes_max=1), ChunkQuery(0, 0, EARLIEST, bytes_max=1)]
    assert [place.record for place in await locate(client, STREAM, queries)] == [40, 10]
    assert located(client).count(1) == 1, "who has an answer is not asked again"


async def test_places_in_a_stream_that_was_created_again_are_refused(client: RealBrokers) -> None:
    send(client, 100)
    await client.stream(STREAM)

    def recreated(_: int) -> KeraError | None:
        client.map.info.stream_id = STREAM_ID + 1
        return NotOwner("gone")

    client.failure = recreated
    with pytest.raises(UnknownStream, match="created again"):
        await find(client, records_max=1)


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"records_max": 1, "bytes_max": 1},
        {"records_max": -1},
        {"bytes_max": 1 << 64},
        {"timestamp_us": 1 << 63},
    ],
)
async def test_invalid_queries_are_refused_before_any_request(client: RealBrokers, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await locate(client, STREAM, [ChunkQuery(0, 0, EARLIEST, **query)])
    assert client.asked == []


async def test_queries_for_a_missing_streamlet_or_entry_are_refused(client: RealBrokers) -> None:
    with pytest.raises(StreamletOutOfRange):
        await locate(client, STREAM, [ChunkQuery(1, 0, EARLIEST, records_max=1)])
    with pytest.raises(InvalidArgument):
        await segments(client, STREAM, 0, 1, EARLIEST, None)


# --- invalid answers ---------------------------------------------------------------------------------------


def answering(monkeypatch: pytest.MonkeyPatch, answer: broker_pb2.LocateChunksResponse) -> None:
    async def ask(*_: object) -> broker_pb2.LocateChunksResponse:
        return answer

    monkeypatch.setattr(locating, "ask_broker", ask)


@pytest.mark.parametrize("places", [0, 3])
async def test_an_answer_with_the_wrong_number_of_places_is_rejected(
    client: RealBrokers, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    answering(monkeypatch, broker_pb2.LocateChunksResponse(places=[broker_pb2.ChunkPlace()] * places))
    with pytest.raises(ProtocolError, match=f"was asked for 2 places, and answered with {places}"):
        await find(client, Position(1, 1, 0), records_max=5)


@pytest.mark.parametrize("attributes", [{}, {"available_from": [1, 2]}, {"available_from": "far"}])
async def test_a_gap_without_a_known_end_is_rejected(
    client: RealBrokers, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any]
) -> None:
    lost = error_to_message(DataLost("it is gone", **attributes))
    place = broker_pb2.ChunkPlace(error=lost)
    answering(monkeypatch, broker_pb2.LocateChunksResponse(places=[place, place]))
    with pytest.raises(ProtocolError, match="does not report the start of an entry"):
        await find(client, EARLIEST, records_max=5)
