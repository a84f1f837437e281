"""Consumers of real daemons: where they start and stop, how they wait, and which of the brokers' memory they hold."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kera.client import Client, ClientSettings, Position
from kera.core.base.settings import KIB, MIB
from kera.core.errors import InvalidArgument, InvalidCursor, StreamletOutOfRange, Unavailable, UnknownStream
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import until

pytestmark = pytest.mark.usefixtures("chunks_alone")

TIMEOUT_S = 30.0
NEVER_MS = 60_000
"""A wait of this length would fail the test."""


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def fill(client: Client, stream: str, *values: bytes, streamlet: int | None = None) -> None:
    async with client.producer() as producer:
        await producer.send_batch(
            stream, pa.record_batch({"value": pa.array(values, pa.binary())}), streamlet=streamlet
        )


async def test_a_consumer_reads_from_its_start_to_its_end(client: Client) -> None:
    """Earliest, latest and positions, over several streamlets, entries and brokers."""
    await client.admin.create_stream("ends", streamlets=3, entries=2)
    for streamlet in range(3):
        for producer in range(2):  # one per entry
            await fill(client, "ends", b"old %d" % producer, streamlet=streamlet)

    async def values(start: object, end: object) -> list[bytes]:
        async with asyncio.timeout(TIMEOUT_S), client.consumer("ends", start=start, end=end) as consumer:  # type: ignore[arg-type]
            return sorted([record.value or b"" async for record in consumer])

    old = [b"old 0"] * 3 + [b"old 1"] * 3
    assert await values("earliest", "latest") == old
    assert await values("latest", "latest") == []
    async with client.consumer("ends", start="earliest", end="latest") as consumer:
        middle = consumer.positions()
        async for _ in consumer.batches():
            pass
        ends = consumer.positions()
    bounds = await client.bounds("ends")
    assert ends == {streamlet: [entry.end for entry in entries] for streamlet, entries in bounds.items()}
    async with client.consumer("ends", start="latest") as follower:
        await fill(client, "ends", b"new", streamlet=1)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(aiter(follower))).value == b"new"
    assert await values(ends, "latest") == [b"new"]
    assert await values(middle, ends) == old
    with pytest.raises(InvalidArgument, match="streamlet 1, entry 1"):
        await values({0: ends[0], 1: ends[1][:1], 2: ends[2]}, None)
    misplaced = Position(*ends[0][0][:2], ends[0][0].offset + 64)
    with pytest.raises(InvalidCursor, match="not a chunk boundary"):
        await values({**ends, 0: [misplaced, ends[0][1]]}, None)


async def test_a_waiting_consumer_gets_the_first_record_at_once(client: Client) -> None:
    await client.admin.create_stream("poll", streamlets=4)
    async with client.consumer("poll", fetch_wait_ms=NEVER_MS) as consumer:
        records = aiter(consumer)
        async with asyncio.timeout(TIMEOUT_S):
            for number in range(10):
                waiting = asyncio.ensure_future(anext(records))
                await fill(client, "poll", b"%d" % number, streamlet=number % 4)
                assert (await waiting).value == b"%d" % number


async def test_a_consumer_reads_several_streams(client: Client) -> None:
    names = [f"many-{number}" for number in range(3)]
    for name in names:
        await client.admin.create_stream(name, streamlets=2)
        await fill(client, name, *[name.encode()] * 100)
    taken: dict[str, list[bytes | None]] = {name: [] for name in names}
    async with asyncio.timeout(TIMEOUT_S), client.consumer(*names, start="earliest", end="latest") as consumer:
        async for record in consumer:
            taken[record.stream].append(record.value)
        assert all(sorted(consumer.positions(name)) == [0, 1] for name in names)
    assert taken == {name: [name.encode()] * 100 for name in names}


async def test_a_range_is_read_exactly(client: Client) -> None:
    await client.admin.create_stream("range-read")
    values = [b"%04d" % number + bytes(1000) for number in range(3000)]
    async with client.producer(chunk_bytes_max=16 * KIB) as producer:
        deliveries = await (await producer.send_batch("range-read", pa.record_batch({"value": values})))
    async with asyncio.timeout(TIMEOUT_S):
        for first, last in ((0, len(deliveries)), (3, 100), (50, 51), (7, 7)):
            end = deliveries[last].position if last < len(deliveries) else None
            ranges = client.read_range("range-read", 0, 0, deliveries[first].position, end, bytes_max=100 * KIB)
            taken = [value async for chunk in ranges for value in chunk.batch["value"].to_pylist()]
            stop = deliveries[last].record if last < len(deliveries) else len(values)
            assert taken == values[deliveries[first].record : stop]
        with pytest.raises(StreamletOutOfRange, match="0 to 0, not 1"):
            await anext(client.read_range("range-read", 1, 0, Position(0, 0, 0), None))
        with pytest.raises(InvalidArgument, match="entries 0 to 0, not 1"):
            await anext(client.read_range("range-read", 0, 1, Position(0, 0, 0), None))
        beyond = Position(deliveries[-1].position.group_id + 7, 1, 0)
        ranges = client.read_range("range-read", 0, 0, deliveries[-1].position, beyond)
        assert (await anext(ranges)).start == deliveries[-1].position
        with pytest.raises(InvalidArgument, match="beyond the end"):
            await anext(ranges)
        await client.admin.delete_stream("range-read")
        with pytest.raises(UnknownStream):
            await anext(client.read_range("range-read", 0, 0, Position(0, 0, 0), None))


async def test_the_error_for_too_few_brokers_says_how_many_are_needed(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap, ClientSettings.load(retry_timeout_ms=100)) as client:
        with pytest.raises(Unavailable, match=r"needs 9 live brokers, there are 2"):
            await client.admin.create_stream("wide", streamlets=9, brokers=9)


# -- shared memory ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[RunningCluster]:
    """One broker that reports how many of its segments are free."""
    env = {"KERA_BROKER_METRICS_PORT": "0"}
    with LocalCluster.running(arena_bytes=8 * MIB, segment_bytes=64 * KIB, env=env) as running:
        yield running
        arena = Path(running.ready["broker-1"]["arena_path"])
    assert not arena.exists()


class Slots:
    """The broker's own count of its segments."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._url = f"http://{cluster.ready['broker-1']['metrics_address']}/metrics"

    def _gauge(self, name: str) -> int:
        with urllib.request.urlopen(self._url, timeout=TIMEOUT_S) as response:
            lines = response.read().decode().splitlines()
        return next(int(float(line.split()[1])) for line in lines if line.startswith(f"{name} "))

    def all_free(self) -> bool:
        return self._gauge("kera_broker_arena_slots_free") == self._gauge("kera_broker_arena_slots")


def is_in_arena(array: pa.Array, arena: Path) -> bool:
    """Whether the values lie in the broker's memory, and not in a copy."""
    address = array.buffers()[2].address
    ranges = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(arena) in line
    ]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


async def test_batches_lie_in_the_brokers_memory_and_hold_it_until_released(small_cluster: RunningCluster) -> None:
    slots, arena = Slots(small_cluster), Path(small_cluster.ready["broker-1"]["arena_path"])
    values = [b"%d" % number + bytes(10_000) for number in range(40)]
    async with await Client.connect(small_cluster.bootstrap) as client:
        assert slots.all_free()
        await client.admin.create_stream("held")
        await fill(client, "held", *values)
        async with client.consumer("held", start="earliest", end="latest") as consumer:
            held = [chunk.batch["value"] async for chunk in consumer.batches()]
        assert all(is_in_arena(column, arena) for column in held)
        async with client.consumer("held", start="earliest", end="latest", shared_memory="never") as consumer:
            copied = [chunk.batch["value"] async for chunk in consumer.batches()]
        assert not any(is_in_arena(column, arena) for column in copied)

        await client.admin.delete_stream("held")
        assert not slots.all_free()
        await client.admin.create_stream("next")
        others = [bytes(10_000)] * 200
        await fill(client, "next", *others)  # most of the memory
        assert [value for column in held for value in column.to_pylist()] == values, "nobody wrote over them"
        await client.admin.delete_stream("next")
        # The consumer is closed and nothing else is read: the memory that it held is given back all the same.
        held.clear()
        await until(slots.all_free)


async def test_a_consumer_of_a_recreated_stream_gets_an_error(client: Client) -> None:
    """Its positions mean nothing in the new stream."""
    await client.admin.create_stream("anew")
    await fill(client, "anew", b"old")
    async with client.consumer("anew", start="earliest") as consumer:
        async with asyncio.timeout(TIMEOUT_S):
            assert (await anext(aiter(consumer))).value == b"old"
            await client.admin.delete_stream("anew")
            await client.admin.create_stream("anew")
            await fill(client, "anew", b"new")
            with pytest.raises(UnknownStream):
                await anext(aiter(consumer))
