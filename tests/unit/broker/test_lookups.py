"""LocateChunks and ListSegments: limits, errors of single queries, and segments that have to be loaded."""

import asyncio
import errno
from collections.abc import Sequence
from typing import Any

import pytest

from kera.broker.records import EntryRecord, SegmentAddress, SegmentRecord
from kera.broker.serving.limits import ServingLimits
from kera.broker.storage.index_format import put_entry, put_segment
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.turns import Turns
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, Recovering, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.v1 import broker_pb2
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    cursor,
    limited,
    stream_info,
)
from tests.virtual_loop import run_virtually

END = Position(4, 1, 1024)


@pytest.fixture
async def broker(engine: Engine, limits: ServingLimits) -> Broker:
    return on_disk(engine, limits)


def on_disk(engine: Engine, limits: ServingLimits) -> Broker:
    """25 chunks of ten records each; all but the last one are on disk only."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID + 1)), limits=limits, turns=Turns(0.0))
    for number in range(25):
        broker.append(chunk(1, number, record_count=10, max_timestamp_us=100 + number))
        engine.run()
    spill(broker)
    return broker


def spill(broker: Broker) -> None:
    """Evict all segments that are on disk."""
    entry, engine = entry_of(broker), broker.engine
    slots = engine.fill_memory()
    slots += [engine.memory.slots.allocate() for segment in list(entry.resident.values()) if segment.in_index]
    for slot in slots:
        slot.retire()
    assert list(entry.resident) == [(4, 1)]


def entry_of(broker: Broker) -> Any:
    return broker.streams.get(STREAM_ID).streamlet(0).entries[0]


def query(start: Position = EARLIEST, end: Position | None = None, *, where: Any = None, **limit: int) -> Any:
    asked = broker_pb2.ChunkQuery(start=cursor(start, **(where or {})), **limit)  # type: ignore[arg-type]
    if end is not None:
        asked.end.CopyFrom(cursor(end))
    return asked


async def locate(broker: Broker, *queries: Any) -> Sequence[Any]:
    answer = await broker.ask(api.LOCATE_CHUNKS, api.LOCATE_CHUNKS.request(queries=queries))
    return list(answer.places)


def told(place: Any) -> tuple[Position, int, int, bool]:
    assert not place.error.code, place.error
    at = place.place
    assert (at.stream_id, at.streamlet_id, at.entry) == (STREAM_ID, 0, 0)
    return Position(at.group_id, at.segment_id, at.position), place.record, place.bytes, place.moved


def codes(places: Sequence[Any]) -> list[str]:
    return [place.error.code for place in places]


async def segments(broker: Broker, start: Position = EARLIEST, end: Position | None = None, **fields: Any) -> Any:
    request = api.LIST_SEGMENTS.request(start=cursor(start), **fields)
    if end is not None:
        request.end.CopyFrom(cursor(end))
    return await broker.ask(api.LIST_SEGMENTS, request)


async def test_places_are_answered_in_order_and_each_query_fails_alone(broker: Broker) -> None:
    places = await locate(
        broker,
        query(records_max=65),
        query(where={"streamlet": 1}, records_max=1),
        query(Position(1, 1, 1000), records_max=1),
        query(timestamp_us=117),
        query(where={"entry": 1}, bytes_max=1),
        query(),
        query(bytes_max=1 << 40),
        query(where={"stream_id": 99}, bytes_max=1),
        query(Position(1, 0, 0), records_max=1),
    )

    assert codes(places) == [
        "",
        "not_owner",
        "invalid_cursor",
        "",
        "invalid_cursor",
        "invalid_argument",
        "",
        "unknown_stream",
        "invalid_cursor",
    ]
    assert told(places[0]) == (Position(1, 2, 2048), 60, 6 * CHUNK_BYTES, False)
    assert told(places[3]) == (Position(3, 1, 1024), 170, 17 * CHUNK_BYTES, False)
    assert told(places[6]) == (END, 250, 25 * CHUNK_BYTES, False)


async def test_only_segments_with_a_place_inside_are_loaded(broker: Broker) -> None:
    totals = broker.engine.memory.totals
    await locate(broker, query(records_max=80), query(timestamp_us=999), query(END, bytes_max=1))
    listing = await segments(broker)

    assert [each.resident for each in listing.segments] == [False] * 6 + [True]
    assert totals.segments_loaded == 0
    await locate(broker, query(Position(1, 1, 1024), records_max=70))
    assert totals.segments_loaded == 1, "that of the start; nobody reads on behind it"


async def test_room_for_one_segment_at_a_time_is_enough(broker: Broker) -> None:
    slots = broker.engine.fill_memory()
    slots.pop().retire()
    places = await locate(broker, *(query(Position(1, 1, 1024), records_max=number) for number in (45, 95, 145, 185)))

    assert [told(place)[1] for place in places] == [50, 100, 150, 190]


def test_a_load_that_finds_no_room_in_time_is_a_retriable_error(engine: Engine) -> None:
    async def main() -> None:
        broker = on_disk(engine, ServingLimits())
        slots = engine.fill_memory()
        places = await locate(broker, query(records_max=15), query(records_max=40))
        assert codes(places) == [Unavailable.code, ""]
        assert places[0].error.retriable
        with pytest.raises(Unavailable):
            await segments(broker, Position(1, 1, 1024))

        slots[0].retire()
        assert told((await locate(broker, query(records_max=15)))[0])[1] == 10

    run_virtually(main())


async def test_an_unreadable_disk_is_an_error_of_the_query(broker: Broker) -> None:
    broker.engine.disk.read_error = errno.EIO

    assert codes(await locate(broker, query(records_max=15), query(records_max=40))) == ["disk_failed", ""]


async def test_a_search_passes_segments_under_recovery_but_cannot_look_into_them(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(8)
    address = SegmentAddress(STREAM_ID, 0, 0, 1, 1)
    record = SegmentRecord(0, 1024, False, 2, 0, 0, 7, 10, 20, 5)
    entry = EntryRecord(Position(1, 1, 0), 0, 7, 1024, 1, 1, 1)
    engine.index.commit([put_segment(address, record), put_entry(EntryId(*address[:3]), entry)])
    broker = Broker(engine, stream_info(), limits=ServingLimits(load_wait_ms=10))

    places = await locate(broker, query(timestamp_us=15), query(records_max=7), query(timestamp_us=21))
    assert codes(places) == [Recovering.code, "", ""]
    assert told(places[1]) == told(places[2]) == (Position(1, 1, 1024), 7, 1024, False)
    (listed,) = (await segments(broker)).segments
    assert (listed.first_record, listed.next_record, listed.length_bytes, listed.resident) == (0, 7, 1024, False)
    with pytest.raises(Recovering):
        await segments(broker, end=Position(1, 1, 512))


def test_a_query_that_waits_for_a_recovery_does_not_fail_the_others(engine: Engine) -> None:
    """It may wait for the time of the whole request, and the other queries need little of it."""

    async def main() -> list[str]:
        broker = on_disk(engine, ServingLimits())
        address = SegmentAddress(STREAM_ID, 0, 0, 1, 1)
        record = engine.index.segment(address)
        assert record is not None
        engine.index.commit([put_segment(address, record._replace(physical_id=0))])
        return codes(await locate(broker, query(records_max=15), query(records_max=95)))

    assert run_virtually(main()) == [Recovering.code, ""]


@limited(queries_max=2, loads_max=1, list_segments_max=3)
async def test_requests_are_bounded(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="at most 2 queries"):
        await locate(broker, *[query(records_max=1)] * 3)

    places = await locate(broker, query(records_max=15), query(records_max=135))
    assert codes(places) == ["", Unavailable.code]
    assert places[1].error.retriable

    first = await segments(broker)
    assert (len(first.segments), first.complete) == (3, False)
    assert len((await segments(broker, segments_max=2)).segments) == 2


@limited(walk_segments=4, walk_segments_min=2, turn_segments=1)
async def test_a_long_walk_is_cut_and_lets_others_have_their_turn(broker: Broker) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(others())
    places = await locate(broker, *[query(timestamp_us=999)] * 8)
    task.cancel()

    assert {told(place) for place in places} == {(Position(2, 1, 0), 80, 8 * CHUNK_BYTES, True)}
    assert turns >= 16


async def test_listed_segments_on_disk_are_clipped_to_the_range(broker: Broker) -> None:
    listing = await segments(broker, Position(1, 1, 3072), Position(2, 1, 1024))
    assert (len(listing.segments), listing.complete) == (2, False), "what needs no loading comes first"
    rest = await segments(broker, Position(2, 1, 0), Position(2, 1, 1024))

    rows = [*listing.segments, *rest.segments]
    assert [(row.first_record, row.next_record, row.length_bytes) for row in rows] == [
        (30, 40, 1024),
        (40, 80, 4096),
        (80, 90, 1024),
    ]
    assert (rest.complete, rest.next.group_id, rest.next.position) == (True, 2, 1024)


async def test_a_listing_fails_as_a_read_does(broker: Broker) -> None:
    for wrong in (Position(1, 1, 100), Position(9, 1, 0)):
        with pytest.raises(InvalidCursor):
            await segments(broker, wrong)
    entry = entry_of(broker)
    entry.start, entry.start_record = Position(1, 2, 0), 1
    with pytest.raises(DataLost):
        await segments(broker, Position(1, 1, 0))


async def test_dropping_a_stream_fails_waiting_queries_and_listings(broker: Broker) -> None:
    broker.paused = True
    places = asyncio.ensure_future(locate(broker, query(records_max=15)))
    listing = asyncio.ensure_future(segments(broker, Position(1, 1, 1024)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not places.done()
    broker.streams.drop(STREAM_ID)

    assert codes(await places) == ["unknown_stream"]
    with pytest.raises(UnknownStream):
        await listing


async def test_a_starting_broker_is_unavailable_for_lookups(engine: Engine) -> None:
    broker = Broker(engine)
    for method in (api.LOCATE_CHUNKS, api.LIST_SEGMENTS):
        with pytest.raises(Unavailable):
            await broker.ask(method, method.request())
