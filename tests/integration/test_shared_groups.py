"""Consumers of a consumer group that share a stream of one streamlet, with real daemons."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable

import pyarrow as pa
import pytest

from kera.client import Client, GroupConsumer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import until

CONSUMERS = 4
PAUSE_S = 0.002
"""A consumer's pause after each chunk: without it, the first one would read everything before the others have begun."""


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def write(client: Client, stream: str, records: int, value_bytes: int) -> None:
    """Write numbered records."""
    padding = bytes(value_bytes - 8)
    async with client.producer(chunk_bytes_max=64 * KIB) as producer:
        for first in range(0, records, 1000):
            numbers = range(first, min(records, first + 1000))
            values = pa.array([b"%08d" % number + padding for number in numbers], pa.binary())
            await producer.send_batch(stream, pa.record_batch({"value": values}))


async def take(consumer: GroupConsumer, taken: list[int], told: Callable[[], object]) -> None:
    """Take records until cancelled."""
    async for chunk in consumer.batches():
        taken += [int(value[:8]) for value in chunk.batch["value"].to_pylist()]
        told()
        await asyncio.sleep(PAUSE_S)  # sleep: the work of a consumer


async def shares(client: Client, stream: str, records: int, *, value_bytes: int, before: bool) -> list[int]:
    """The number of records of each consumer; each record goes to one of them.

    `before`: they are written before the consumer group exists; otherwise while the consumers read.
    """
    if before:
        await write(client, stream, records, value_bytes)
    taken: list[list[int]] = [[] for _ in range(CONSUMERS)]
    count = 0

    def told() -> None:
        nonlocal count
        count = sum(map(len, taken))

    async with contextlib.AsyncExitStack() as stack:
        consumers = [client.group_consumer(stream, stream, joined_bytes_max=0) for _ in taken]
        for consumer in consumers:
            await stack.enter_async_context(consumer)
        tasks = [asyncio.create_task(take(*each, told)) for each in zip(consumers, taken, strict=True)]
        try:
            if not before:
                await write(client, stream, records, value_bytes)
            await until(lambda: count >= records or any(task.done() for task in tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    found = Counter(number for each in taken for number in each)
    assert set(found) == set(range(records)), "nothing is left out"
    assert set(found.values()) == {1}, "nobody has failed, so nothing comes twice"
    return [len(each) for each in taken]


async def test_consumers_share_a_stream_of_a_single_group(client: Client) -> None:
    await client.admin.create_stream("one-group", streamlets=1)
    counts = await shares(client, "one-group", 1000, value_bytes=8000, before=True)
    assert min(counts) > 0, counts
    (progress,) = [
        each for each in (await client.admin.describe_consumer_group("one-group")).entries if each.stream == "one-group"
    ]
    assert progress.lag is not None


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
async def test_each_of_four_consumers_gets_a_share_of_50_mb_with_default_settings(before: bool) -> None:
    with LocalCluster.running(arena_bytes=128 * MIB) as running:
        async with await Client.connect(running.bootstrap) as client:
            await client.admin.create_stream("fifty", streamlets=1)
            counts = await shares(client, "fifty", 50_000, value_bytes=1000, before=before)
    assert min(counts) >= 500, counts


async def test_in_order_consumers_read_an_entry_one_after_the_other(client: Client) -> None:
    """Groups of one segment each: without the setting all consumers would read at once."""
    await client.admin.create_stream("ordered", streamlets=1, group_segments=1)
    await write(client, "ordered", 600, 8000)
    numbers: list[int] = []

    async def read(consumer: GroupConsumer) -> None:
        async for record in consumer:
            numbers.append(int((record.value or b"")[:8]))  # noqa: PERF401 - the others look at it

    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for _ in range(3):
            consumer = await stack.enter_async_context(client.group_consumer("ordered", "ordered", in_order=True))
            tasks.append(asyncio.create_task(read(consumer)))
        await until(lambda: len(numbers) >= 600 or any(task.done() for task in tasks))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert numbers == list(range(600))
