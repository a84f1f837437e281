"""Places by records, bytes and time in a real cluster: in a streamlet that has moved, with data that is only on
disk.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from kera.client import EARLIEST, ChunkBatch, ChunkPlace, ChunkQuery, Client, Position
from kera.core.base.settings import KIB, MIB
from tests.integration.control_support import (
    SEGMENT_BYTES,
    TIMEOUT_S,
    broker_id_of,
    broker_names,
    connect,
    control_cluster,
)
from tests.integration.support import value_of

pytestmark = pytest.mark.usefixtures("chunks_alone")

RECORDS = 1500
"""In each interval, more than a broker's memory holds."""
TIME_US = 1_700_000_000_000_000


def time_us(number: int) -> int:
    """The time of record `number`: each is a second later, and some are half a minute late."""
    return TIME_US + (number - 30 * (number % 7 == 0)) * 1_000_000


async def write(client: Client, first: int, count: int) -> None:
    async with client.producer(chunk_bytes_max=8 * KIB) as producer:
        await producer.prepare("s")
        for number in range(first, first + count):
            await producer.send("s", value_of(number), streamlet=0, timestamp_us=time_us(number))
        await producer.drain()


async def chunks_of(client: Client) -> list[ChunkBatch]:
    """All chunks, read from the start."""
    async with client.consumer("s", start="earliest", end="latest", shared_memory="never") as consumer:
        return [chunk async for chunk in consumer.batches()]


def size_of(chunk: ChunkBatch) -> int:
    return chunk.header.chunk_bytes


def walk(chunks: Sequence[ChunkBatch], first: int, query: ChunkQuery) -> tuple[int, int]:
    """The record and bytes of the place of a query that starts at chunk number `first`, found by a scan of all
    chunks.
    """
    begin, passed = chunks[first].header.first_record, 0
    record = begin
    for chunk in chunks[first:]:
        following = chunk.header.first_record + chunk.header.record_count
        if query.timestamp_us is not None:
            over = chunk.header.max_timestamp_us >= query.timestamp_us
        elif query.records_max is not None:
            over = passed > 0 and following - begin > query.records_max
        else:
            over = passed > 0 and passed + size_of(chunk) > (query.bytes_max or 0)
        if over:
            break
        record, passed = following, passed + size_of(chunk)
    return record, passed


async def check_places(client: Client, chunks: Sequence[ChunkBatch]) -> None:
    chance = random.Random(5)
    queries: list[tuple[int, ChunkQuery]] = []
    for _ in range(60):
        first = chance.randrange(len(chunks))
        query = ChunkQuery(0, 0, chunks[first].start)
        queries += [
            (first, query._replace(records_max=chance.randrange(2 * RECORDS))),
            (first, query._replace(bytes_max=chance.randrange(2 * MIB))),
            (first, query._replace(timestamp_us=time_us(chance.randrange(2 * RECORDS + 50)))),
        ]
    places = await client.locate("s", [query for _, query in queries])
    starts = {chunk.header.first_record: chunk.start for chunk in chunks}
    for (first, query), place in zip(queries, places, strict=True):
        assert (place.record, place.bytes) == walk(chunks, first, query), query
        assert place.position == starts.get(place.record, chunks[-1].next)


async def check_reading_from(client: Client, place: ChunkPlace, since_us: int) -> None:
    """Check that a consumer that starts there gets that record first, in a chunk that reaches this time."""
    async with client.consumer("s", start={0: [place.position]}) as consumer:
        async with asyncio.timeout(TIMEOUT_S):
            chunk = await anext(consumer.batches())
    assert chunk.header.first_record == place.record
    assert chunk.header.max_timestamp_us >= since_us


async def test_places_and_segments_of_a_moved_streamlet_on_disk_are_right(tmp_path: Path) -> None:
    async with (
        control_cluster(tmp_path, brokers=2, backups=1, arena_bytes=MIB, segment_bytes=SEGMENT_BYTES) as cluster,
        await connect(cluster) as client,
    ):
        ids = [broker_id_of(cluster, name) for name in broker_names(cluster)]
        await client.admin.create_stream("s", streamlets=1, entries=1, group_segments=4, replication=0)
        owner = (await client.admin.describe_stream("s")).assignments[0].broker_id
        stale = await connect(cluster)
        async with stale:
            await stale.describe("s")
            await write(client, 0, RECORDS)
            await client.admin.move_streamlet("s", 0, next(each for each in ids if each != owner))
            await write(client, RECORDS, RECORDS)
            end = (await client.bounds("s"))[0][0].end
            (place,) = await stale.locate("s", [ChunkQuery(0, 0, end, timestamp_us=0)])
            assert (place.position, place.record) == (end, 2 * RECORDS), "who has an old map finds the new owner"

        pieces = await client.segments("s", 0, 0, EARLIEST)
        assert {piece.broker_id for piece in pieces} == set(ids)
        assert sum(not piece.resident for piece in pieces) > 10, "memory has room for few"
        chunks = await chunks_of(client)
        assert sum(chunk.header.record_count for chunk in chunks) == 2 * RECORDS

        await check_places(client, chunks)
        for since_us in (time_us(1), time_us(RECORDS - 3), time_us(2 * RECORDS - 1)):
            ((place,),) = (await client.positions_at("s", since_us)).values()
            assert (place.record, place.bytes) == walk(chunks, 0, ChunkQuery(0, 0, EARLIEST, timestamp_us=since_us))
            await check_reading_from(client, place, since_us)

        pieces = await client.segments("s", 0, 0, chunks[3].start, chunks[-3].start)
        assert (pieces[0].start, pieces[-1].end) == (chunks[3].start, chunks[-3].start)
        assert pieces[0].first_record == chunks[3].header.first_record
        assert all(one.next_record == other.first_record for one, other in pairwise(pieces))
        assert sum(piece.length_bytes for piece in pieces) == sum(map(size_of, chunks[3:-3]))
        cuts = [piece.start for piece in pieces] + [pieces[-1].end]
        read = [await part(client, start, stop) for start, stop in pairwise(cuts)]
        assert read == [piece.next_record - piece.first_record for piece in pieces]


async def part(client: Client, start: Position, end: Position) -> int:
    """The number of records between two cuts."""
    return sum([chunk.batch.num_rows async for chunk in client.read_range("s", 0, 0, start, end)])
