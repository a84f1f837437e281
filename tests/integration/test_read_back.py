"""A million records from several producers come back byte-equal, in order per producer and streamlet."""

import asyncio
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from kera.client import Client, ClientSettings, EntryId
from kera.local.cluster import RunningCluster

PRODUCERS = 4
STREAMLETS = 8
RECORDS_PER_PRODUCER = 250_000
BATCH_ROWS = 5_000
RECORDS_SENT_SINGLY = 20_000
"""For each producer: by `send`, with keys, before the batches."""


def value(producer: int, number: int) -> bytes:
    """A value that names its producer and number, and varies in length."""
    return b"%d:%d:" % (producer, number) + bytes((number + index) % 256 for index in range(number % 23))


async def produce(client: Client, stream: str, producer_number: int) -> dict[int, list[bytes]]:
    """Send all records of one producer; returns what each streamlet must hold of it, in order."""
    sent: dict[int, list[bytes]] = defaultdict(list)
    payload = "lean" if producer_number % 2 else "arrow"  # a stream may have chunks of both versions
    async with client.producer(chunk_bytes_max=32 * 1024, request_bytes_max=128 * 1024, payload=payload) as producer:
        await producer.prepare(stream)
        for number in range(RECORDS_SENT_SINGLY):
            streamlet = number % STREAMLETS
            record = value(producer_number, number)
            producer.send(stream, record, streamlet=streamlet)
            sent[streamlet].append(record)
            if number % 500 == 0:
                await producer.drain()
        for start in range(RECORDS_SENT_SINGLY, RECORDS_PER_PRODUCER, BATCH_ROWS):
            records = [value(producer_number, start + index) for index in range(BATCH_ROWS)]
            streamlet = (start // BATCH_ROWS) % STREAMLETS
            await producer.send_batch(stream, pa.record_batch({"value": pa.array(records)}), streamlet=streamlet)
            sent[streamlet].extend(records)
    return sent


@pytest.mark.timeout(300)
@pytest.mark.parametrize("entries", [pytest.param(1, marks=pytest.mark.slow), 4])
async def test_a_million_records_come_back_byte_equal_and_in_order(cluster: RunningCluster, entries: int) -> None:
    name = f"million-{entries}"
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(name, streamlets=STREAMLETS, entries=entries, group_segments=2)
        sent = await asyncio.gather(*(produce(client, name, number) for number in range(PRODUCERS)))
        stored: dict[tuple[int, int], list[pa.Array]] = defaultdict(list)
        entries_of: dict[int, set[int]] = defaultdict(set)
        next_record: dict[EntryId, int] = defaultdict(int)
        async with client.consumer(name, start="earliest", end="latest") as consumer:
            async for chunk in consumer.batches():
                assert chunk.header.first_record == next_record[chunk.entry], "ordinals of an entry have no gap"
                next_record[chunk.entry] += chunk.batch.num_rows
                column = chunk.batch.column("value")
                # A batch may combine small chunks of several producers.
                writers = pc.cast(pc.cast(pc.binary_slice(column, 0, 1), pa.string()), pa.int32())
                for producer in pc.unique(writers).to_pylist():
                    entries_of[producer].add(chunk.entry.entry)
                    # A copy: values that are kept for long must not hold the broker's memory.
                    stored[producer, chunk.entry.streamlet_id].append(column.filter(pc.equal(writers, producer)))
        await client.admin.delete_stream(name)

    assert sum(next_record.values()) == PRODUCERS * RECORDS_PER_PRODUCER
    for producer, streamlets in enumerate(sent):
        for streamlet, records in streamlets.items():
            got = pa.concat_arrays(stored.pop((producer, streamlet)))
            assert got.equals(pa.array(records, pa.binary())), f"producer {producer}, streamlet {streamlet}"
    assert not stored, "nothing is there that nobody sent"
    assert all(len(used) == 1 for used in entries_of.values()), "a producer always writes to the same entry"
    assert len(set.union(*entries_of.values())) == min(entries, PRODUCERS)


@pytest.mark.parametrize("transport", ["unix", "tcp", "grpc"])
@pytest.mark.parametrize("shared_memory", ["never", pytest.param("auto", marks=pytest.mark.slow)])
async def test_every_transport_returns_the_same_bytes(
    cluster: RunningCluster, transport: str, shared_memory: str
) -> None:
    name = f"ways-{transport}-{shared_memory}"
    rows = np.random.default_rng(7).bytes(64 * 20_000)
    values = pa.FixedSizeBinaryArray.from_buffers(pa.binary(64), 20_000, [None, pa.py_buffer(rows)]).cast(pa.binary())
    settings = ClientSettings.load(transport=transport)
    async with await Client.connect(cluster.bootstrap, settings) as client:
        await client.admin.create_stream(name, streamlets=1)
        async with client.producer() as producer:
            await producer.send_batch(name, pa.record_batch({"value": values}))
        async with client.consumer(name, start="earliest", end="latest", shared_memory=shared_memory) as consumer:
            pieces = [chunk.batch.column("value") async for chunk in consumer.batches()]
            assert pa.concat_arrays(pieces).equals(values)
        await client.admin.delete_stream(name)
