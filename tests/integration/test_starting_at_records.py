"""Places of records: a consumer that starts at one delivers that record first, wherever it lies in its chunk."""

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa
import pytest

from kera.client import EARLIEST, ChunkPlace, ChunkQuery, Client, Position
from kera.client.sync import Client as SyncClient
from kera.core.errors import DataLost, InvalidArgument, StreamletOutOfRange
from kera.local.cluster import RunningCluster

TIMEOUT_S = 30.0
CHUNK = 10
RECORDS = 3 * CHUNK
LATE = 4
"""In each chunk, the record with this number is older than those before it."""


def time_us(number: int) -> int:
    return 1000 * (number if number % CHUNK != LATE else number - LATE)


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def fill(client: Client, stream: str) -> None:
    """Three chunks of ten records each in the only entry."""
    await client.admin.create_stream(stream)
    async with client.producer() as producer:
        for first in range(0, RECORDS, CHUNK):
            numbers = range(first, first + CHUNK)
            columns = {
                "value": pa.array([b"%d" % number for number in numbers], pa.binary()),
                "timestamp": pa.array([time_us(number) for number in numbers], pa.timestamp("us", tz="UTC")),
            }
            await (await producer.send_batch(stream, pa.record_batch(columns)))


async def read(client: Client, stream: str, start: object, **settings: object) -> list[int]:
    """The ordinals of the records that a consumer delivers."""
    async with asyncio.timeout(TIMEOUT_S):
        async with client.consumer(stream, start=start, end="latest", **settings) as consumer:  # type: ignore[arg-type]
            records = [(record.offset, record.value) async for record in consumer]
    assert all(value == b"%d" % offset for offset, value in records)
    return [offset for offset, _ in records]


async def read_batches(client: Client, stream: str, start: object, **settings: object) -> list[int]:
    """The same, read in batches."""
    found: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async with client.consumer(stream, start=start, end="latest", **settings) as consumer:  # type: ignore[arg-type]
            async for chunk in consumer.batches():
                first, count = chunk.header.first_record, chunk.header.record_count
                assert chunk.batch["value"].to_pylist() == [b"%d" % number for number in range(first, first + count)]
                found += range(first, first + count)
    return found


@pytest.mark.parametrize("joined_bytes_max", [0, 1 << 18])
async def test_a_consumer_starts_at_exactly_the_requested_record(client: Client, joined_bytes_max: int) -> None:
    stream = f"at-record-{joined_bytes_max}"
    await fill(client, stream)
    for record in (0, 1, CHUNK - 1, CHUNK, CHUNK + 7, RECORDS - 1, RECORDS):
        start = await client.positions_of(stream, {0: [record]})
        ((place,),) = start.values()
        assert (place.record, place.skip_records) == (record, record % CHUNK)
        wanted = list(range(record, RECORDS))
        assert await read(client, stream, start, joined_bytes_max=joined_bytes_max) == wanted
        assert await read_batches(client, stream, start, joined_bytes_max=joined_bytes_max) == wanted
        chunks = [chunk async for chunk in client.read_range(stream, 0, 0, place, None)]
        assert sum(chunk.batch.num_rows for chunk in chunks) == len(wanted)


async def test_the_position_within_a_chunk_is_its_start_until_it_is_delivered(client: Client) -> None:
    await fill(client, "at-record-position")
    start = await client.positions_of("at-record-position", {0: [CHUNK + 7]})
    async with client.consumer("at-record-position", start=start, joined_bytes_max=0) as consumer:
        async with asyncio.timeout(TIMEOUT_S):
            assert consumer.positions() == {0: [start[0][0].position]}
            assert [(await anext(aiter(consumer))).offset for _ in range(2)] == [CHUNK + 7, CHUNK + 8]
            assert consumer.positions() == {0: [start[0][0].position]}
            rest = await anext(consumer.batches())  # the whole chunk that was begun, but nothing before the start
    assert (rest.header.first_record, rest.batch.num_rows) == (CHUNK + 7, 3)


async def test_a_time_is_found_by_chunk_or_by_record(client: Client) -> None:
    await fill(client, "at-time")
    since_us = time_us(CHUNK + 3)
    ((by_chunk,),) = (await client.positions_at("at-time", since_us)).values()
    assert (by_chunk.record, by_chunk.skip_records) == (CHUNK, 0)
    start = await client.positions_at("at-time", since_us, unit="record")
    ((by_record,),) = start.values()
    assert by_record == ChunkPlace(by_chunk.position, CHUNK + 3, by_chunk.bytes, 3)
    assert await read(client, "at-time", start) == list(range(CHUNK + 3, RECORDS)), "the late one comes as well"

    start = await client.positions_at("at-time", time_us(RECORDS), unit="record")
    assert [place.record for place in start[0]] == [RECORDS]
    assert await read(client, "at-time", start) == []
    start = await client.positions_at("at-time", 0, unit="record")
    assert await read(client, "at-time", start) == list(range(RECORDS))


async def test_records_are_counted_from_the_start_of_a_query(client: Client) -> None:
    await fill(client, "count-records")
    (second,) = await client.locate("count-records", [ChunkQuery(0, 0, EARLIEST, records_max=CHUNK)])
    queries = [
        ChunkQuery(0, 0, EARLIEST, records_max=5),
        ChunkQuery(0, 0, second.position, records_max=5),
        ChunkQuery(0, 0, second.position, records_max=CHUNK + 5),
        ChunkQuery(0, 0, EARLIEST, second.position, records_max=CHUNK + 5),
        ChunkQuery(0, 0, EARLIEST, records_max=10 * RECORDS),
    ]
    places = await client.locate("count-records", queries, unit="record")
    assert [(place.record, place.skip_records) for place in places] == [(5, 5), (15, 5), (25, 5), (10, 0), (30, 0)]
    assert [place.record for place in await client.locate("count-records", queries)] == [10, 20, 20, 10, 30]
    assert await client.locate("count-records", [], unit="record") == []


async def test_the_error_for_an_invalid_place_gives_the_reason(client: Client) -> None:
    await fill(client, "no-place")
    with pytest.raises(InvalidArgument, match="has no record 31 yet: the next one will be 30"):
        await client.positions_of("no-place", {0: [RECORDS + 1]})
    with pytest.raises(InvalidArgument, match="takes 'chunk' or 'record'"):
        await client.positions_at("no-place", 0, unit="row")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="takes no bytes_max"):
        await client.locate("no-place", [ChunkQuery(0, 0, EARLIEST, bytes_max=1)], unit="record")
    for wrong in (5, {0: 5}, {0: ["5"]}, {0: [-1]}, {0: [0, 0]}, {1: [0]}):
        with pytest.raises((InvalidArgument, StreamletOutOfRange)):
            await client.positions_of("no-place", wrong)  # type: ignore[arg-type]
    end = (await client.bounds("no-place"))[0][0].end
    await client.admin.truncate_stream("no-place", {0: [end]})
    bounds = (await client.bounds("no-place"))[0][0]
    assert bounds.first_record == RECORDS
    with pytest.raises(DataLost, match="has been removed: the oldest is 30") as caught:
        await client.positions_of("no-place", {0: [0]})
    assert caught.value.attributes["available_record"] == RECORDS
    place = ChunkPlace(Position(1, 1, 0), 3, 0, 3)
    with pytest.raises(InvalidArgument, match="chunk boundaries only: give the place's position"):
        client.consumer("no-place", end={0: [place]})  # type: ignore[list-item]


def test_the_synchronous_client_starts_at_records(cluster: RunningCluster) -> None:
    with SyncClient(cluster.bootstrap) as client:
        client.admin.create_stream("sync-places")
        with client.producer() as producer:
            values = pa.array([b"%d" % number for number in range(CHUNK)], pa.binary())
            producer.send_batch("sync-places", pa.record_batch({"value": values})).result()
        start = client.positions_of("sync-places", {0: [7]})
        with client.consumer("sync-places", start=start, end="latest") as consumer:
            assert [record.offset for record in consumer] == [7, 8, 9]
        with client.consumer("sync-places", start=start, end="latest") as consumer:
            assert consumer.to_arrow()["value"].to_pylist() == [b"7", b"8", b"9"]
        places = client.locate("sync-places", [ChunkQuery(0, 0, EARLIEST, records_max=7)], unit="record")
        assert [(place.record, place.skip_records) for place in places] == [(7, 7)]
        (of_time,) = client.positions_at("sync-places", 0, unit="record")[0]
        assert of_time.record == 0
