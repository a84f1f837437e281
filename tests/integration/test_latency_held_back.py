"""With real daemons: where chunks are full early, brokers use up the rest of the time that a latency constraint
allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kera.client import Client, LatencyHop, Producer
from kera.local.cluster import RunningCluster
from tests.integration.replication_support import replicated_cluster, samples
from tests.integration.support import until_found

pytestmark = pytest.mark.timeout(240)
LIMIT_MS = 400
CHUNK_BYTES = 4 << 10
RECORD = b"x" * 1000
PAUSE_S = 0.003
"""At this pace, chunks are full after about ten milliseconds."""
SEVERAL = 2
"""Chunks that go together; more of them do if machines are not busy."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with replicated_cluster(tmp_path / "data", 1) as running:
        yield running


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def write(producer: Producer) -> None:
    """Write records until cancelled."""
    while True:
        producer.send("full", RECORD)
        await producer.drain()
        await asyncio.sleep(PAUSE_S)  # sleep: the load


async def until_held_back(client: Client, cluster: RunningCluster, hop: str, counter: str) -> LatencyHop:
    """Wait until a hop's buffer may wait, several chunks go together, and the constraint is held."""

    def counted() -> tuple[float, float]:
        found = samples(cluster)
        return found["chunks_appended_total"], found[counter]

    async with asyncio.timeout(150):
        while True:
            before = await asyncio.to_thread(counted)
            await asyncio.sleep(1)  # sleep: measures one second
            after = await asyncio.to_thread(counted)
            chunks, together = (now - then for now, then in zip(after, before, strict=True))
            described = await client.latency.describe("c")
            (found,) = [each for each in described.hops if each.hop == hop]
            if found.advised_us > LIMIT_MS * 1000 / 4 and chunks > SEVERAL * together > 0 and described.state == "held":
                return found


async def test_references_to_chunks_wait_and_are_replicated_together(client: Client, cluster: RunningCluster) -> None:
    await client.admin.create_stream("full", streamlets=1, replication=1)
    async with client.producer(chunk_bytes_max=CHUNK_BYTES) as producer:
        await producer.prepare("full")
        load = asyncio.create_task(write(producer))
        await client.latency.create("c", ["full"], LIMIT_MS, window_ms=1_000)
        found = await until_held_back(client, cluster, "replicate", "replication_batches_total")
        assert found.mean_us <= found.allowed_us
        await client.latency.delete("c")
        load.cancel()
        await asyncio.wait([load])


@pytest.mark.slow
async def test_readers_are_notified_of_several_chunks_together(client: Client, cluster: RunningCluster) -> None:
    await client.admin.create_stream("full", streamlets=1, replication=1)
    came = asyncio.Event()

    async def read() -> None:
        async with client.group_consumer("g", "full", shared_memory="always", joined_bytes_max=0) as consumer:
            async for _ in consumer.batches():
                came.set()

    async with client.producer(chunk_bytes_max=CHUNK_BYTES) as producer:
        await producer.prepare("full")
        tasks = [asyncio.create_task(write(producer)), asyncio.create_task(read())]
        await came.wait()
        await client.latency.create("c", ["full", "group:g"], LIMIT_MS, window_ms=1_000)
        found = await until_held_back(client, cluster, "hand-over", "push_runs_total")
        assert found.mean_us <= found.allowed_us
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@pytest.mark.slow
async def test_a_producer_with_its_own_linger_is_not_held_back(client: Client, cluster: RunningCluster) -> None:
    """Another producer's chunks are full early: there is time to wait for references."""
    await client.admin.create_stream("full", streamlets=1, replication=1)
    async with client.producer(chunk_bytes_max=CHUNK_BYTES) as full, client.producer(linger_ms=0) as quick:
        await asyncio.gather(full.prepare("full"), quick.prepare("full"))
        load = asyncio.create_task(write(full))
        await client.latency.create("c", ["full"], 10_000, window_ms=1_000)
        found = await until_held_back(client, cluster, "replicate", "replication_batches_total")

        async def are_mostly_quick() -> bool:
            took_s = []
            for _ in range(9):
                begun_s = asyncio.get_running_loop().time()
                await quick.send("full", RECORD)
                took_s.append(asyncio.get_running_loop().time() - begun_s)
            return sorted(took_s)[4] < found.advised_us / 1e6

        await until_found(are_mostly_quick)  # a machine may be busy, but not all the time
        await client.latency.delete("c")
        load.cancel()
        await asyncio.wait([load])
