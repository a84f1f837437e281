"""Streams with epochs: each chunk is of one epoch as long as times ascend, for records and batches alike."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa
import pytest

from kera.client.producing.producer import Producer
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import FakeCluster, stream_info

EPOCH_US = 10_000
TIME = DEFAULT_SCHEMA[0].type
TYPED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("at", TIME)])
SETTINGS: dict[str, Any] = {"linger_ms": 60_000}


@pytest.fixture
async def epochs(make_cluster: MakeCluster) -> FakeCluster:
    """Stream ``s`` has two streamlets and epochs of 10 ms; ``plain`` is without epochs, ``typed`` has columns."""
    config: dict[str, Any] = {"timestamp_ahead_max_ms": 0, "epoch_ms": 10, "punctuation": 1}
    return make_cluster(
        stream_info(streamlets=2, **config),
        stream_info("plain", 8),
        stream_info("typed", 9, schema=TYPED, timestamp_column="at", **config),
        stream_info("timeless", 10, schema=TYPED, **config),
    )


def times_of(cluster: FakeCluster) -> list[tuple[int, int, int]]:
    """The streamlet, the first and the last time of each chunk."""
    return [
        (header.streamlet_id, header.min_timestamp_us, header.max_timestamp_us)
        for headers in cluster.loopback.writes
        for header in headers
    ]


def at(*times_us: int, column: str = "timestamp") -> dict[str, pa.Array]:
    return {column: pa.array(times_us, TIME)}


async def flushed(producer: Producer, cluster: FakeCluster) -> list[tuple[int, int, int]]:
    await give(producer.flush())
    return times_of(cluster)


async def test_a_record_of_a_later_epoch_begins_a_chunk(epochs: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("s")
    for time_us in (5, EPOCH_US - 1, EPOCH_US, 7, EPOCH_US + 5, 5 * EPOCH_US, -1):
        producer.send("s", b"x", timestamp_us=time_us, streamlet=1)
    assert await flushed(producer, epochs) == [
        (1, 5, EPOCH_US - 1),
        (1, 7, EPOCH_US + 5),
        (1, -1, 5 * EPOCH_US),
    ], "what is older goes to the chunk that is there"


async def test_each_streamlet_has_its_own_epochs(epochs: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("s")
    for time_us, streamlet in ((5, 0), (2 * EPOCH_US, 1), (6, 0), (2 * EPOCH_US + 1, 1)):
        producer.send("s", b"x", timestamp_us=time_us, streamlet=streamlet)
    assert sorted(await flushed(producer, epochs)) == [(0, 5, 6), (1, 2 * EPOCH_US, 2 * EPOCH_US + 1)]


async def test_without_keys_each_chunk_goes_to_the_next_streamlet(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("s")
    for number in range(4):
        for _ in range(3):
            producer.send("s", b"x", timestamp_us=number * EPOCH_US)
    found = sorted(await flushed(producer, epochs), key=lambda each: each[1])
    assert [low for _, low, _ in found] == [0, EPOCH_US, 2 * EPOCH_US, 3 * EPOCH_US]
    assert [streamlet for streamlet, _, _ in found] in ([0, 1, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize("named", [{}, {"keys": b"k"}], ids=["a value", "with a key"])
async def test_a_chunk_of_records_without_times_closes_when_the_epoch_ends(
    epochs: FakeCluster, make_producer: MakeProducer, named: dict[str, Any]
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("s")
    seen, sent = set[int](), 0
    while len(seen) < 3:
        seen.add(time.time_ns() // 1000 // EPOCH_US)
        producer.send("s", b"x", **named)
        sent += 1
    found = await flushed(producer, epochs)
    assert len({low // EPOCH_US for _, low, _ in found}) > 1
    assert all(low // EPOCH_US == high // EPOCH_US for _, low, high in found)
    assert epochs.counters.records_appended == sent


async def test_a_chunk_of_a_stream_without_epochs_may_have_any_times(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("plain")
    for time_us in (5, EPOCH_US, 1 << 60):
        producer.send("plain", b"x", timestamp_us=time_us)
    await producer.send_batch("plain", batch(b"a", b"b", **at(5, EPOCH_US)))
    assert await flushed(producer, epochs) == [(0, 5, 1 << 60), (0, 5, EPOCH_US)]


@pytest.mark.parametrize("payload", ["auto", "arrow"])
@pytest.mark.parametrize("linger_ms", [0, 60_000])
@pytest.mark.parametrize("streamlet", [None, 1])
async def test_a_batch_is_cut_where_an_epoch_ends(
    epochs: FakeCluster, make_producer: MakeProducer, payload: str, linger_ms: int, streamlet: int | None
) -> None:
    producer = make_producer(epochs, linger_ms=linger_ms, payload=payload)
    times = (5, 6, EPOCH_US - 1, EPOCH_US, 7 * EPOCH_US, 7 * EPOCH_US + 1)
    for _ in range(2):  # the second batch has the layout of the first, and takes a quicker path
        delivery = await producer.send_batch(
            "s", batch(*(b"%d" % each for each in times), **at(*times)), streamlet=streamlet
        )
        await give(producer.flush())
        assert [each.record_count for each in await give(delivery)] == [3, 1, 2]
    found = [(low, high) for _, low, high in times_of(epochs)]
    assert found == [(5, EPOCH_US - 1), (EPOCH_US, EPOCH_US), (7 * EPOCH_US, 7 * EPOCH_US + 1)] * 2
    assert sorted(epochs.values() + epochs.values(streamlet=1)) == sorted([b"%d" % each for each in times] * 2)


async def test_a_batch_with_keys_is_cut_for_each_streamlet(epochs: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(epochs)
    count = 400
    times = [number * 100 for number in range(count)]
    keys = pa.array([[b"%d" % (number % 17)] for number in range(count)], DEFAULT_SCHEMA.field("keys").type)
    values = [b"%d" % each for each in times]
    for _ in range(2):
        await give(await producer.send_batch("s", batch(*values, keys=keys, **at(*times))))
    found = times_of(epochs)
    assert all(low // EPOCH_US == high // EPOCH_US for _, low, high in found)
    assert len(found) == 2 * 2 * count * 100 // EPOCH_US
    assert sorted(epochs.values() + epochs.values(streamlet=1)) == sorted(values * 2)


async def test_older_rows_stay_in_the_chunk_of_the_rows_before_them(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs)
    times = (EPOCH_US, 5, 2 * EPOCH_US, 7, 2 * EPOCH_US + 1)
    await give(await producer.send_batch("s", batch(*(b"x" for _ in times), **at(*times)), streamlet=0))
    assert times_of(epochs) == [(0, 5, EPOCH_US), (0, 7, 2 * EPOCH_US + 1)]


async def test_gathered_small_batches_are_cut_where_an_epoch_ends(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    for times in ((5,), (6, 7), (EPOCH_US,), (8, EPOCH_US + 1), (9,), (3 * EPOCH_US,)):
        await producer.send_batch("s", batch(*(b"x" for _ in times), **at(*times)), streamlet=0)
    found = await flushed(producer, epochs)
    assert [(low, high) for _, low, high in found] == [
        (5, 7),
        (8, EPOCH_US + 1),
        (3 * EPOCH_US, 3 * EPOCH_US),
    ]


async def test_a_chunk_of_small_batches_without_times_closes_when_the_epoch_ends(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    seen = set[int]()
    while len(seen) < 3:
        seen.add(time.time_ns() // 1000 // EPOCH_US)
        await producer.send_batch("s", batch(b"a", b"b"), streamlet=0)
    found = await flushed(producer, epochs)
    assert len({low // EPOCH_US for _, low, _ in found}) > 1
    assert all(low // EPOCH_US == high // EPOCH_US for _, low, high in found)


@pytest.mark.parametrize("settings", [SETTINGS, {}])
async def test_a_typed_batch_is_cut_by_its_timestamp_column(
    epochs: FakeCluster, make_producer: MakeProducer, settings: dict[str, Any]
) -> None:
    producer = make_producer(epochs, **settings)
    ids = pa.array([1, 2, 3], pa.int64())
    for times in ((5, EPOCH_US, EPOCH_US + 1), (5, None, EPOCH_US)):
        rows = pa.record_batch({"id": ids, "at": pa.array(times, TIME)}, schema=TYPED)
        for stream in ("typed", "timeless"):
            await producer.send_batch(stream, rows)
            await give(producer.flush())
    found = [(header.stream_id, header.record_count) for headers in epochs.loopback.writes for header in headers]
    assert [count for stream, count in found if stream == 9] == [1, 2, 2, 1], "what has none goes with what is before"
    assert [count for stream, count in found if stream == 10] == [3, 3]


async def test_refreshing_the_routes_updates_the_length_of_epochs(
    epochs: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(epochs, **SETTINGS)
    await producer.prepare("s")
    info = epochs.infos["s"]
    info.config.epoch_ms = 1000
    info.config_version += 1
    writer = producer._writers.by_name["s"]
    await producer.routes.refresh(writer.lanes)
    for time_us in (5, EPOCH_US, 1_000_000):
        producer.send("s", b"x", timestamp_us=time_us, streamlet=0)
    assert await flushed(producer, epochs) == [(0, 5, EPOCH_US), (0, 1_000_000, 1_000_000)]
