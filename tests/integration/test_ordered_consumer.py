"""Ordered consumers with real daemons: one order of all records, the same for every reader."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client, OrderedConsumer, Record, sync
from kera.core.errors import CannotDecode, ClosedError, InvalidArgument, UnknownStream
from kera.local.cluster import RunningCluster

pytestmark = pytest.mark.timeout(120)
WAIT_S = 60.0
TYPED = pa.schema([("at", pa.timestamp("us", "UTC")), ("user", pa.int32())])


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def write(client: Client, stream: str, *chunks: list[int], streamlet: int | None = None) -> None:
    """Write each list as a chunk of its own."""
    async with client.producer() as producer:
        await producer.prepare(stream)
        for times in chunks:
            for at in times:
                producer.send(stream, b"%d" % at, timestamp_us=at, streamlet=streamlet)
            await producer.flush()


async def history(client: Client, stream: str, **settings: Any) -> None:
    """Two streamlets, five epochs of 10 ms, the last of which is open."""
    await client.admin.create_stream(stream, streamlets=2, epoch_ms=10, punctuation="producers", **settings)
    await write(client, stream, [1000, 3000], [12_000, 9000], [31_000], [95_000], streamlet=0)
    await write(client, stream, [2000], [25_000], [8000], [38_000], [99_000], streamlet=1)


IN_ORDER = [b"1000", b"2000", b"3000", b"9000", b"12000", b"8000", b"25000", b"31000", b"38000"]


async def taken(consumer: OrderedConsumer, count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        async for record in consumer:
            found.append(record)
            if len(found) == count:
                break
    return found


async def test_records_and_batches_come_in_the_order_of_time_within_each_epoch(client: Client) -> None:
    await history(client, "ordered-history")
    places: dict[str, Any] = {"start": "earliest", "end": 9}
    async with client.ordered_consumer("ordered-history", **places) as consumer:
        records = [record async for record in consumer]
    assert [record.value for record in records] == IN_ORDER
    assert [(record.streamlet, record.offset) for record in records[:3]] == [(0, 0), (1, 0), (0, 1)]
    assert consumer.late_records == 2
    async with client.ordered_consumer("ordered-history", **places) as consumer:
        batches = [batch async for batch in consumer.batches()]
    assert [(batch.epoch, batch.batch.num_rows, batch.ends_epoch) for batch in batches] == [
        (0, 3, True),
        (1, 2, True),
        (2, 2, True),
        (3, 2, True),
    ]
    assert [value for batch in batches for value in batch.batch["value"].to_pylist()] == IN_ORDER
    assert [record for batch in batches for record in batch.records()] == records
    async with client.ordered_consumer("ordered-history", start=0, end=1, epoch_ms=90) as consumer:
        table = await consumer.to_arrow()
        assert consumer.epoch_ms == 90
    assert table["value"].to_pylist() == sorted(IN_ORDER, key=int), "one epoch has them all"
    assert (await collected(client, "ordered-history", shared_memory="never")) == records


async def collected(client: Client, *streams: str, **settings: Any) -> list[Record]:
    async with client.ordered_consumer(*streams, start="earliest", end="latest", **settings) as consumer:
        return [record async for record in consumer]


async def test_several_streams_with_different_columns_come_in_one_order(client: Client) -> None:
    await history(client, "ordered-a")
    await client.admin.create_stream(
        "ordered-b", schema=TYPED, timestamp_column="at", key_column="user", epoch_ms=5, punctuation="producers"
    )
    async with client.producer() as producer:
        await producer.prepare("ordered-b")
        for at in (2000, 26_000, 99_000):
            await producer.send_batch(
                "ordered-b", pa.table({"at": pa.array([at], TYPED[0].type), "user": pa.array([at], pa.int32())})
            )
            await producer.flush()
    records = await collected(client, "ordered-b", "ordered-a")
    assert [(record.timestamp_us, record.stream) for record in records[:4]] == [
        (1000, "ordered-a"),
        (2000, "ordered-b"),
        (2000, "ordered-a"),
        (3000, "ordered-a"),
    ]
    assert [record.row["user"] for record in records if record.row is not None] == [2000, 26_000]
    assert [record.value for record in records if record.row is None] == IN_ORDER
    async with client.ordered_consumer("ordered-a", "ordered-b", start="earliest", end="latest") as consumer:
        batches = [batch async for batch in consumer.batches()]
        assert consumer.epoch_ms == 10, "the longest"
    assert [batch.stream.name for batch in batches[:3]] == ["ordered-a", "ordered-b", "ordered-a"]
    assert [batch.ends_epoch for batch in batches[:3]] == [False, False, True]
    async with client.ordered_consumer("ordered-a", "ordered-b", start="earliest", end="latest") as consumer:
        with pytest.raises(InvalidArgument, match="different columns"):
            await consumer.to_arrow()


async def test_a_commit_within_an_epoch_repeats_only_that_epoch(client: Client) -> None:
    await history(client, "ordered-commit")
    settings: dict[str, Any] = {"consumer_group": "ordered", "start": "committed"}
    async with client.ordered_consumer("ordered-commit", **settings) as consumer:
        begun = consumer.positions()
        assert [record.value for record in await taken(consumer, 2)] == IN_ORDER[:2]
        assert consumer.positions() == begun
        await consumer.commit()
    async with client.ordered_consumer("ordered-commit", **settings) as consumer:
        assert [record.value for record in await taken(consumer, 4)] == IN_ORDER[:4]
        assert consumer.positions() != begun
        await consumer.commit()
    async with client.ordered_consumer("ordered-commit", **settings) as consumer:
        assert [record.value for record in await taken(consumer, 6)] == IN_ORDER[3:]
        await consumer.commit()
        assert [entry.streamlet_id for entry in consumer.held_up_by()] == [0, 1]


async def test_switching_from_records_to_batches_repeats_the_current_epoch(client: Client) -> None:
    await history(client, "ordered-mixed")
    async with client.ordered_consumer("ordered-mixed", start="earliest", end="latest") as consumer:
        await taken(consumer, 4)
        batches = consumer.batches()
        assert (await anext(batches)).batch["value"].to_pylist() == IN_ORDER[3:5]
        assert [record.value for record in await taken(consumer, 2)] == IN_ORDER[5:7]
        assert (await anext(batches)).batch["value"].to_pylist() == IN_ORDER[7:]
        assert await anext(batches, None) is None
        await consumer.close()
        with pytest.raises(ClosedError):
            await taken(consumer, 1)


@pytest.mark.slow
async def test_a_stream_that_is_written_to_has_the_same_order_live_and_later(client: Client) -> None:
    await client.admin.create_stream("ordered-live", streamlets=2, entries=2, epoch_ms=100, epoch_grace_ms=100)
    first = time.time_ns() // 100_000_000
    random, stop = Random(5), asyncio.Event()

    async def produce(streamlet: int) -> None:
        async with client.producer() as producer:
            await producer.prepare("ordered-live")
            while not stop.is_set():
                at = time.time_ns() // 1000 - random.choice([0, 0, 0, 30_000, 500_000])
                producer.send("ordered-live", b"%d" % at, timestamp_us=at, streamlet=streamlet)
                await producer.flush()
                await asyncio.sleep(random.choice([0.001, 0.01, 0.1]))  # sleep: paces the writer, nothing waits

    producers = [asyncio.create_task(produce(streamlet)) for streamlet in (0, 1)]
    async with client.ordered_consumer("ordered-live", start=first) as consumer:
        live = await taken(consumer, 150)
    stop.set()
    await asyncio.gather(*producers)
    others: list[dict[str, Any]] = [{}, {"joined_bytes_max": 0}]
    for settings in others:
        async with client.ordered_consumer("ordered-live", start=first, **settings) as consumer:
            assert await taken(consumer, 150) == live


async def test_streams_that_cannot_be_ordered_are_refused(client: Client) -> None:
    await client.admin.create_stream("ordered-none")
    with pytest.raises(InvalidArgument, match="has no epochs"):
        await collected(client, "ordered-none")
    with pytest.raises(UnknownStream):
        await collected(client, "ordered-unknown")
    with pytest.raises(InvalidArgument, match="name one at least"):
        client.ordered_consumer()
    await client.admin.create_stream("ordered-timeless", schema=pa.schema([("x", pa.int8())]), epoch_ms=10)
    with pytest.raises(InvalidArgument, match="no timestamp column"):
        await collected(client, "ordered-timeless")
    await client.admin.create_stream("ordered-endless", epoch_ms=10)
    async with client.ordered_consumer("ordered-endless", start="earliest") as consumer:
        with pytest.raises(InvalidArgument, match="with an end"):
            await consumer.to_arrow()


async def test_an_ordered_consumer_decodes_values(client: Client) -> None:
    await history(client, "ordered-decoded")
    assert [record.value for record in await collected(client, "ordered-decoded", deserializer=str)] == [
        value.decode() for value in IN_ORDER
    ]
    with pytest.raises(CannotDecode, match="record 2 of stream 'ordered-decoded'"):
        await collected(client, "ordered-decoded", deserializer=int)


def test_the_synchronous_client_has_ordered_consumers(cluster: RunningCluster) -> None:
    with sync.Client(cluster.bootstrap) as client:
        client.admin.create_stream("ordered-sync", epoch_ms=10, punctuation="producers")
        with client.producer() as producer:
            for times in ([5, 1], [12], [25], [31]):
                for at in times:
                    producer.send("ordered-sync", b"%d" % at, timestamp_us=1000 * at)
                producer.flush()
        settings: dict[str, Any] = {"start": "committed", "consumer_group": "sync"}
        with client.ordered_consumer("ordered-sync", **settings, end=3) as consumer:
            for record in consumer:
                assert record.value == b"1"
                break
            consumer.commit()
            assert [record.value for record in consumer] == [b"5", b"12", b"25"]
            assert (consumer.epoch_ms, len(consumer.positions()[0])) == (10, 1)
            assert [entry.streamlet_id for entry in consumer.held_up_by()] == [0]
            assert (consumer.throttled_ms, consumer.skipped_records) == (0, 0)
        with client.ordered_consumer("ordered-sync", **settings, end=3) as consumer:
            assert [batch.batch["value"].to_pylist() for batch in consumer.batches()] == [
                [b"1", b"5"],
                [b"12"],
                [b"25"],
            ]
            consumer.commit()
        with client.ordered_consumer("ordered-sync", **settings, end=3) as consumer:
            assert list(consumer) == []
        with client.ordered_consumer("ordered-sync", start="earliest", end="latest") as consumer:
            assert consumer.to_arrow()["value"].to_pylist() == [b"1", b"5", b"12", b"25"]


def kera(cluster: RunningCluster, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kera.cli", *arguments, "--bootstrap", cluster.bootstrap],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr


async def test_the_command_line_prints_records_in_order(client: Client, cluster: RunningCluster) -> None:
    await history(client, "ordered-cli")
    consume = ("consume", "ordered-cli", "--ordered", "--until-end")
    assert kera(cluster, *consume)[1] == [value.decode() for value in IN_ORDER]
    assert kera(cluster, *consume, "--format", r"%p/%o@%T\n", "--count", "4")[1] == [
        "0/0@1000",
        "1/0@2000",
        "0/1@3000",
        "0/3@9000",
    ]
    assert kera(cluster, *consume, "--epoch", "90ms")[1] == [str(at) for at in sorted(map(int, IN_ORDER))]
    assert kera(cluster, *consume, "--since", "1970-01-01T00:00:00.009500Z")[1] == [
        value.decode() for value in IN_ORDER[3:]
    ], "what is before in the epoch of that time is left out, what is late in one behind is not"
    await client.admin.create_stream(
        "ordered-cli-typed", schema=TYPED, timestamp_column="at", epoch_ms=10, punctuation="producers"
    )
    async with client.producer() as producer:
        await producer.prepare("ordered-cli-typed")
        for at in (2500, 99_000):
            await producer.send_batch(
                "ordered-cli-typed", pa.table({"at": pa.array([at], TYPED[0].type), "user": pa.array([1], pa.int32())})
            )
            await producer.flush()
    code, lines, _ = kera(cluster, "consume", "ordered-cli", "ordered-cli-typed", *consume[2:], "--json")
    found = [json.loads(line) for line in lines[:4]]
    assert (code, [row.get("value") for row in found]) == (0, ["1000", "2000", None, "3000"])
    assert found[2]["user"] == 1
    assert kera(cluster, "consume", "ordered-cli", "--ordered", "--epoch", "15ms")[0] == 1


async def test_a_silent_entry_is_settled_by_the_clock_or_named_as_what_holds_up(
    client: Client, cluster: RunningCluster
) -> None:
    for punctuation in ("clock", "producers"):
        await client.admin.create_stream(
            f"ordered-silent-{punctuation}", streamlets=8, epoch_ms=100, epoch_grace_ms=100, punctuation=punctuation
        )
    first = time.time_ns() // 100_000_000
    times = [first * 100_000 + at for at in (1, 150_000, 350_000)]
    for streamlet in range(8):
        for name in ("ordered-silent-clock", "ordered-silent-producers"):
            await write(client, name, *([at] for at in (times[:1] if streamlet == 5 else times)), streamlet=streamlet)
    async with client.ordered_consumer("ordered-silent-clock", start=first) as consumer:
        assert [record.timestamp_us for record in await taken(consumer, 22)] == 8 * times[:1] + 7 * times[
            1:2
        ] + 7 * times[2:]
    async with client.ordered_consumer("ordered-silent-producers", start=first) as consumer:
        reading = asyncio.ensure_future(taken(consumer, 1))
        async with asyncio.timeout(WAIT_S):
            while [entry.streamlet_id for entry in consumer.held_up_by()] != [5]:
                await asyncio.sleep(0.01)
        code, out, _ = kera(cluster, "epochs", "lag", "ordered-silent-producers", "--json")
        behind = json.loads("\n".join(out))
        assert (code, behind[0]["streamlet"], behind[0]["settled_us"]) == (0, 5, times[0])
        assert not reading.done()
        await write(client, "ordered-silent-producers", times[2:], streamlet=5)
        assert [record.timestamp_us for record in await reading] == times[:1], "it went on when that was written"
