"""Gathering: small batches share chunks; their rows, their order, and their deliveries."""

import asyncio
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.producing.encoding.partitioner import streamlet_of
from kera.client.producing.open_chunks.gathering import GatheredDelivery
from kera.client.producing.outcomes.outcome import BatchDelivery
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.base.clock import FakeClock
from kera.core.errors import ClosedError, InvalidArgument, KeraError, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.examples import first_quick
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import WAIT_S, FakeCluster, Fault, stream_info, until

KEYS = DEFAULT_SCHEMA.field("keys").type
STREAMLETS = 4


def batch(*values: bytes, **columns: Any) -> pa.RecordBatch:
    return pa.record_batch({**columns, "value": pa.array(values, pa.binary())})


def keyed(*values: bytes) -> pa.RecordBatch:
    """Rows whose keys are their values."""
    return batch(*values, keys=pa.array([[value] for value in values], KEYS))


async def give(awaitable: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await awaitable


def parts(deliveries: list[Any]) -> list[tuple[int, int | None, int]]:
    return [(each.entry.streamlet_id, each.record, each.record_count) for each in deliveries]


def records_of_chunks(cluster: FakeCluster, streamlet: int = 0) -> list[int]:
    return [header.record_count for header, _ in cluster.chunks(streamlet=streamlet)]


@pytest.fixture
async def wide(make_cluster: MakeCluster) -> FakeCluster:
    return make_cluster(stream_info(streamlets=STREAMLETS))


# --- together ----------------------------------------------------------------------------------------------


async def test_small_batches_share_a_chunk_and_each_delivery_has_its_own_rows(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    sent = [await producer.send_batch("s", batch(*values)) for values in ((b"a", b"b"), (b"c",), (b"d", b"e", b"f"))]
    assert all(type(each) is GatheredDelivery for each in sent)
    await give(producer.flush())

    deliveries = [await give(each) for each in sent]

    assert [parts(each) for each in deliveries] == [[(0, 0, 2)], [(0, 2, 1)], [(0, 3, 3)]]
    assert len({each.position for (each,) in deliveries}) == 1
    assert records_of_chunks(cluster) == [6]
    assert cluster.values() == [b"a", b"b", b"c", b"d", b"e", b"f"]


async def test_rows_with_keys_are_partitioned_together(wide: FakeCluster, make_producer: MakeProducer) -> None:
    values = [b"%d" % number for number in range(60)]
    producer = make_producer(wide, linger_ms=60_000)
    sent = [await producer.send_batch("s", keyed(*values[first : first + 20])) for first in (0, 20, 40)]
    await give(producer.flush())

    deliveries = [parts(await give(each)) for each in sent]

    stored: dict[int, list[bytes]] = {streamlet: [] for streamlet in range(STREAMLETS)}
    for first, found in zip((0, 20, 40), deliveries, strict=True):
        expected = []
        for streamlet, before in stored.items():
            rows = [value for value in values[first : first + 20] if streamlet_of(value, STREAMLETS) == streamlet]
            if rows:
                expected.append((streamlet, len(before), len(rows)))
            before.extend(rows)
        assert found == expected
    for streamlet, rows in stored.items():
        assert wide.values("s", streamlet) == rows
        assert records_of_chunks(wide, streamlet) == [len(rows)]


async def test_records_behind_a_gathered_batch_are_stored(wide: FakeCluster, make_producer: MakeProducer) -> None:
    """When the batch closes, it takes another streamlet's turn, just before the record's chunk opens."""
    producer = make_producer(wide)
    sent = [b"%d" % number for number in range(12)]
    await producer.send_batch("s", batch(sent[0]))
    await producer.send_batch("s", batch(sent[1]))  # this batch waits for the first one
    pending = [producer.send("s", sent[2])]
    await give(producer.flush())
    pending += [producer.send("s", value) for value in sent[3:]]
    await give(producer.flush())

    deliveries = [await give(each) for each in pending]
    assert len({(each.entry, each.record) for each in deliveries}) == len(pending)
    assert sorted(value for streamlet in range(STREAMLETS) for value in wide.values("s", streamlet)) == sorted(sent)


async def test_batches_for_streamlets_are_gathered_by_streamlet(wide: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(wide, linger_ms=60_000)
    for number in range(6):
        await producer.send_batch("s", batch(b"%d" % number), streamlet=number % 2)
    await give(producer.flush())

    assert [records_of_chunks(wide, streamlet) for streamlet in range(3)] == [[3], [3], []]
    assert wide.values("s", 1) == [b"1", b"3", b"5"]


async def test_a_batch_that_need_not_wait_is_sent_alone(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster)
    first, second, third = [await producer.send_batch("s", batch(value)) for value in (b"1", b"2", b"3")]

    assert [type(each) for each in (first, second, third)] == [BatchDelivery, GatheredDelivery, GatheredDelivery]
    await give(producer.flush())
    assert records_of_chunks(cluster) == [1, 2]
    assert cluster.values() == [b"1", b"2", b"3"]


async def test_a_chunk_is_sent_when_it_is_full(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster, chunk_bytes_max=10_000, linger_ms=60_000)
    sent = [await producer.send_batch("s", batch(b"x" * 1000)) for _ in range(17)]

    await give(asyncio.gather(*sent[:16]))

    assert records_of_chunks(cluster) == [8, 8]
    assert not sent[-1].done()
    await give(producer.flush())
    assert sent[-1].done()


async def test_a_partly_filled_chunk_is_sent_after_its_linger_time(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(cluster, linger_ms=20)
    assert parts(await give(await producer.send_batch("s", batch(b"a")))) == [(0, 0, 1)]


async def test_batches_sent_during_a_request_share_the_next_chunk(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    cluster.loopback.faults.append(Fault.HELD)
    producer = make_producer(cluster)
    await producer.send_batch("s", batch(b"first"))
    await until(lambda: bool(cluster.loopback.held))
    for number in range(5):
        await producer.send_batch("s", batch(b"%d" % number))
    cluster.loopback.release()
    await give(producer.flush())

    assert records_of_chunks(cluster) == [1, 5]


async def test_tables_of_one_batch_are_gathered_too(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    for value in (b"a", b"b"):
        await producer.send_batch("s", pa.table({"value": [value]}))
    await give(producer.flush())

    assert records_of_chunks(cluster) == [2]


async def test_small_slices_of_a_large_batch_are_gathered(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    rows = batch(*[b"%07d" % number for number in range(20_000)])
    producer = make_producer(cluster, linger_ms=60_000)
    for first in range(0, 100, 10):
        await producer.send_batch("s", rows.slice(first, 10))
    await give(producer.flush())

    assert records_of_chunks(cluster) == [100]
    assert cluster.values() == [b"%07d" % number for number in range(100)]


# --- order -------------------------------------------------------------------------------------------------


async def test_records_and_gathered_batches_keep_their_order(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    await producer.prepare("s")
    producer.send("s", b"1")
    await producer.send_batch("s", batch(b"2"))
    await producer.send_batch("s", batch(b"3"))
    producer.send("s", b"4")
    producer.send("s", b"5")
    await producer.send_batch("s", batch(b"6"))
    await producer.send_batch("s", batch(*[b"x" * 100] * 3000))
    await producer.send_batch("s", batch(b"7"))
    await give(producer.flush())

    assert [value for value in cluster.values() if value != b"x" * 100] == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
    assert cluster.values().index(b"7") == 3006


@pytest.mark.parametrize("seed", first_quick(range(8), 2))
async def test_random_records_and_batches_are_stored_once_and_in_order(
    wide: FakeCluster, make_producer: MakeProducer, seed: int
) -> None:
    random = Random(seed)
    producer = make_producer(wide, linger_ms=random.choice([0, 60_000]), chunk_bytes_max=random.choice([300, 4000]))
    await producer.prepare("s")
    expected: dict[int, list[bytes]] = {streamlet: [] for streamlet in range(STREAMLETS)}
    sent: list[tuple[BatchDelivery, int]] = []
    number = 0
    for _ in range(150):
        values = [b"%05d" % (number + more) for more in range(random.choice([1, 1, 3, 40]))]
        number += len(values)
        how = random.randrange(5)
        streamlet = random.randrange(STREAMLETS)
        if how == 0:
            producer.send("s", values[0], keys=values[0])
            values = values[:1]
        elif how == 1:
            producer.send("s", values[0], streamlet=streamlet)
            values = values[:1]
        elif how == 2:
            sent.append((await producer.send_batch("s", batch(*values), streamlet=streamlet), len(values)))
        else:
            sent.append((await producer.send_batch("s", keyed(*values)), len(values)))
        for value in values:
            place = streamlet if how in {1, 2} else streamlet_of(value, STREAMLETS)
            expected[place].append(value)
        if random.random() < 0.1:
            await asyncio.sleep(0)
    await give(producer.flush())

    for streamlet, values in expected.items():
        assert wide.values("s", streamlet) == values
    for delivery, rows in sent:
        assert sum(each.record_count for each in await give(delivery)) == rows


async def test_batches_with_different_columns_are_not_mixed(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    for each in (batch(b"1"), keyed(b"2"), keyed(b"3"), batch(b"4"), batch(b"5")):
        await producer.send_batch("s", each, streamlet=0)
    await give(producer.flush())

    assert records_of_chunks(cluster) == [1, 2, 2]
    assert cluster.values() == [b"1", b"2", b"3", b"4", b"5"]


# --- accepted batches --------------------------------------------------------------------------------------


async def test_a_row_has_the_time_when_its_batch_was_accepted(cluster: FakeCluster) -> None:
    clock = FakeClock()
    times_us = []
    async with Producer(cluster, ProducerSettings(linger_ms=60_000), clock) as producer:  # type: ignore[arg-type]
        for count in (2, 1):
            times_us += [clock.now_us()] * count
            await producer.send_batch("s", batch(*[b"a"] * count))
            clock.advance(5)

    assert cluster.stored().column("timestamp").cast(pa.int64()).to_pylist() == times_us


async def test_the_caller_may_reuse_memory_after_a_batch_was_accepted(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    memory = np.frombuffer(bytearray(b"abcd"), np.uint8)
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32))
    values = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(memory)])
    producer = make_producer(cluster, linger_ms=60_000)
    await producer.send_batch("s", pa.record_batch({"value": values}))
    memory[:] = 0
    await give(producer.flush())

    assert cluster.values() == [b"ab", b"cd"]


@pytest.mark.parametrize(
    "bad",
    [
        pa.record_batch({"value": pa.array([1])}),
        pa.record_batch({"value": [b"a"], "other": [1]}),
        pa.record_batch({"value": [b"a"], "timestamp": pa.array([None], pa.timestamp("us", "UTC"))}),
    ],
)
async def test_a_bad_batch_is_refused_and_the_others_are_stored(
    cluster: FakeCluster, make_producer: MakeProducer, bad: pa.RecordBatch
) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    timed = {"timestamp": pa.array([7], pa.timestamp("us", "UTC"))}
    for value in (b"a", b"b"):
        await producer.send_batch("s", batch(value, **timed))
        with pytest.raises(SchemaMismatch):
            await producer.send_batch("s", bad)
    await give(producer.flush())

    assert cluster.values() == [b"a", b"b"]


async def test_a_batch_that_is_invalid_for_arrow_is_refused_after_good_ones(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    offsets = pa.py_buffer(np.array([0, 5, 4], np.int32))
    broken = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(b"abcd")])
    producer = make_producer(cluster, linger_ms=60_000)
    await producer.send_batch("s", batch(b"a", b"b"))
    with pytest.raises(SchemaMismatch, match="not valid for Arrow"):
        await producer.send_batch("s", pa.record_batch({"value": broken}))
    await give(producer.flush())

    assert cluster.values() == [b"a", b"b"]


async def test_columns_of_other_types_are_converted_and_gathered(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    for values in ([b"a"], [b"b", b"c"]):
        await producer.send_batch("s", pa.record_batch({"value": pa.array(values, pa.large_binary())}))
    await give(producer.flush())

    assert records_of_chunks(cluster) == [3]
    assert cluster.values() == [b"a", b"b", b"c"]


# --- deliveries and errors ---------------------------------------------------------------------------------


async def test_a_gathered_delivery_works_like_a_future(wide: FakeCluster, make_producer: MakeProducer) -> None:
    wide.loopback.default_fault = Fault.HELD
    producer = make_producer(wide, request_bytes_max=1, linger_ms=1)
    delivery = await producer.send_batch("s", keyed(*[b"%d" % number for number in range(200)]))
    called: list[Any] = []
    delivery.add_done_callback(called.append)
    for ask in (delivery.result, delivery.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()
    await until(lambda: len(wide.loopback.held) == STREAMLETS)
    held, wide.loopback.held = wide.loopback.held, []
    held[0]()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not delivery.done()
    assert not called
    for go_on in held[1:]:
        go_on()
    await until(lambda: called == [delivery])

    assert delivery.done()
    assert delivery.exception() is None
    assert delivery.result() == await give(delivery)
    delivery.add_done_callback(called.append)
    await until(lambda: len(called) == 2)


async def test_an_error_of_a_chunk_fails_all_of_its_batches(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    errors: list[KeraError] = [InvalidArgument("not this one")]
    cluster.loopback.refuse = lambda: errors.pop() if errors else None
    producer = make_producer(cluster, linger_ms=60_000)
    sent = [await producer.send_batch("s", batch(value)) for value in (b"a", b"b")]

    with pytest.raises(InvalidArgument):
        await give(producer.flush())
    for each in sent:
        with pytest.raises(InvalidArgument, match="not this one"):
            await give(each)
        assert isinstance(each.exception(), InvalidArgument)
    await producer.send_batch("s", batch(b"c"))
    await give(producer.flush())
    assert cluster.values() == [b"c"]


async def test_closing_without_a_flush_fails_gathered_batches(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    producer = make_producer(cluster, linger_ms=60_000)
    sent = await producer.send_batch("s", batch(b"a", b"b", b"c"))
    loss = producer.loss()
    assert loss is not None
    assert loss.attributes["records"] == 3
    await producer.close(flush=False)

    with pytest.raises(ClosedError):
        await give(sent)
    assert cluster.values() == []


async def test_gathered_batches_take_room_in_the_buffer(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    cluster.loopback.default_fault = Fault.HELD
    producer = make_producer(cluster, buffer_bytes_max=4000, linger_ms=60_000)
    for _ in range(7):
        await producer.send_batch("s", batch(b"x" * 500))
    sending = asyncio.ensure_future(producer.send_batch("s", batch(b"y" * 500)))
    await until(lambda: bool(cluster.loopback.held))  # the call waits for room, so gathered rows no longer linger
    assert not sending.done()
    cluster.loopback.default_fault = Fault.NONE
    cluster.loopback.release()
    await give(sending)
    await give(producer.flush())

    assert cluster.values() == [b"x" * 500] * 7 + [b"y" * 500]
