"""Latency constraints with real daemons: the measured hops of a path, and the time that chunks wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kera.broker.latency.manager import VALID_MS
from kera.client import Client, GroupConsumer, Producer
from kera.client.settings import SharedMemory
from kera.local.cluster import RunningCluster

pytestmark = pytest.mark.timeout(180)
LIMIT_MS = 400
PAUSE_S = 0.004
HOPS = ["gather", "send", "replicate", "hand-over", "prefetch", "work"]


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def write(producer: Producer, stream: str) -> None:
    """Write records until cancelled."""
    number = 0
    while True:
        producer.send(stream, b"x" * 100, streamlet=number % 2)
        number += 1
        await asyncio.sleep(PAUSE_S)  # sleep: the load


async def read(consumer: GroupConsumer, begun: asyncio.Event) -> None:
    """Read all records until cancelled."""
    async for _ in consumer.batches():
        begun.set()


@pytest.mark.parametrize("shared_memory", ["always", pytest.param("never", marks=pytest.mark.slow)])
async def test_all_hops_of_a_path_are_measured_and_chunks_fill(client: Client, shared_memory: SharedMemory) -> None:
    stream, group = f"late-clicks-{shared_memory}", f"late-enrich-{shared_memory}"
    await client.admin.create_stream(stream, streamlets=2)
    async with (
        client.group_consumer(group, stream, shared_memory=shared_memory) as consumer,
        client.producer() as producer,
        asyncio.TaskGroup() as tasks,
    ):
        await producer.prepare(stream)
        begun = asyncio.Event()
        load = [tasks.create_task(write(producer, stream)), tasks.create_task(read(consumer, begun))]
        await begun.wait()
        await client.latency.create(stream, [stream, f"group:{group}"], LIMIT_MS, window_ms=2_000)
        async with asyncio.timeout(120):
            while True:
                found = await client.latency.describe(stream)
                gather = next((hop for hop in found.hops if hop.hop == "gather"), None)
                if (
                    [hop.hop for hop in found.hops if hop.chunks] == HOPS
                    and gather is not None
                    and gather.mean_us > LIMIT_MS * 1000 / 4  # a quarter: longer than a request takes
                ):
                    break
                await asyncio.sleep(0.2)
        assert gather.advised_us <= LIMIT_MS * 1000 * 0.9
        for task in load:
            task.cancel()
    await client.latency.delete(stream)


async def test_work_is_measured_until_the_first_record_that_results_from_it(client: Client) -> None:
    """The work does not last until the application asks for more after other things."""
    for stream in ("late-orders", "late-bills"):
        await client.admin.create_stream(stream, streamlets=2)
    after_s = 0.2

    async def bill(consumer: GroupConsumer, producer: Producer, begun: asyncio.Event) -> None:
        async for _ in consumer.batches():
            begun.set()
            producer.send("late-bills", b"made of it")
            await asyncio.sleep(after_s)  # sleep: the load

    async with (
        client.group_consumer("bill", "late-orders") as consumer,
        client.producer() as producer,
        asyncio.TaskGroup() as tasks,
    ):
        await producer.prepare("late-orders")
        await producer.prepare("late-bills")
        begun = asyncio.Event()
        load = [tasks.create_task(write(producer, "late-orders")), tasks.create_task(bill(consumer, producer, begun))]
        await begun.wait()
        await client.latency.create("billing", ["late-orders", "group:bill", "late-bills"], 2_000, window_ms=2_000)
        async with asyncio.timeout(120):
            while True:
                hops = {(hop.stream, hop.hop): hop for hop in (await client.latency.describe("billing")).hops}
                work = hops["late-orders", "work"]
                if work.chunks > 2 and work.mean_us < after_s * 1e6 / 4:
                    break
                await asyncio.sleep(0.2)
        for task in load:
            task.cancel()
    await client.latency.delete("billing")


async def test_a_constraint_on_one_stream_does_not_delay_another_stream(client: Client) -> None:
    """Chunks of the other stream go at once, through the same broker and from the same producer."""
    for stream in ("late-slow", "late-quick"):
        await client.admin.create_stream(stream, streamlets=2)
    await client.latency.create("of-slow", ["late-slow"], LIMIT_MS, window_ms=1_000)
    loop = asyncio.get_running_loop()
    async with client.producer() as producer:

        async def took_s(stream: str) -> float:
            begun_s = loop.time()
            await producer.send(stream, b"x")
            return loop.time() - begun_s

        for stream in ("late-slow", "late-quick"):
            await producer.prepare(stream)
        async with asyncio.timeout(120):
            while await took_s("late-slow") < LIMIT_MS / 1000 / 4:
                await asyncio.sleep(PAUSE_S)
            while await took_s("late-quick") > LIMIT_MS / 1000 / 8:  # a machine may be busy, but not each time
                pass
    await client.latency.delete("of-slow")


@pytest.mark.slow
async def test_a_chunk_that_waits_longer_than_advice_is_valid_learns_of_changes(client: Client) -> None:
    """Meanwhile no request can carry a report, and no chunk is sent because of the change."""
    await client.admin.create_stream("late-rare", streamlets=1)
    await client.latency.create("hour", ["late-rare"], 3_600_000, window_ms=1_000)
    async with client.producer() as producer:
        await producer.prepare("late-rare")
        async with asyncio.timeout(120):
            while True:
                pending = asyncio.ensure_future(_delivered(producer))
                done, _ = await asyncio.wait({pending}, timeout=2)
                if not done:
                    break
        done, _ = await asyncio.wait({pending}, timeout=1.5 * VALID_MS / 1000)
        assert not done
        await client.latency.alter("hour", limit_ms=50)
        async with asyncio.timeout(60):
            await pending
    await client.latency.delete("hour")


async def _delivered(producer: Producer) -> None:
    await producer.send("late-rare", b"x")
