"""Push through shared memory between real processes: when it is used, what it holds, and deaths of participants."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client import EARLIEST, ChunkBatch, Client, ClientSettings, Producer
from kera.core.base.settings import KIB, MIB
from kera.core.errors import InvalidArgument
from kera.local.cluster import RunningCluster
from tests.integration.support import (
    BROKER,
    TIMEOUT_S,
    Follower,
    keeping_cluster,
    load,
    metric,
    number_of,
    tell,
    until,
    value_of,
)

pytestmark = pytest.mark.usefixtures("chunks_alone")

ARENA_BYTES = 4 * MIB
SEGMENT_BYTES = 64 * KIB


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    """A broker with memory for 64 small segments."""
    with keeping_cluster(tmp_path, arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES) as running:
        yield running
        tell(running)


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as connected:
        yield connected


async def fill(client: Client, stream: str, size: int, first: int = 0) -> int:
    """Write records `first`, … of `size` bytes together; returns the number of the next record."""
    values: list[bytes] = []
    while size > 0:
        values.append(value_of(first + len(values)))
        size -= len(values[-1])
    async with client.producer(chunk_bytes_max=16 * KIB) as producer:
        batch = pa.record_batch({"value": pa.array(values, pa.binary())})
        async with asyncio.timeout(TIMEOUT_S):
            await (await producer.send_batch(stream, batch, streamlet=0))
    return first + len(values)


async def take(client: Client, stream: str = "s", **settings: Any) -> list[ChunkBatch]:
    """All chunks of a stream, kept in memory."""
    async with asyncio.timeout(TIMEOUT_S), client.consumer(stream, start="earliest", end="latest", **settings) as all_:
        return [chunk async for chunk in all_.batches()]


def numbers(chunks: list[ChunkBatch]) -> list[int]:
    return [number_of(value) for chunk in chunks for value in chunk.batch["value"].to_pylist()]


@contextlib.asynccontextmanager
async def reading_process(cluster: RunningCluster, code: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A consumer in a process of its own; it ends with the block."""
    argv = (sys.executable, "-c", code, cluster.bootstrap)
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process) -> bytes:
    """The next line that it has printed."""
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        return await process.stdout.readline()


# --- push or pull -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared_memory", "pushed"),
    [("auto", True), pytest.param("always", True, marks=pytest.mark.slow), ("never", False)],
)
async def test_a_consumer_on_the_brokers_node_uses_push_unless_it_is_switched_off(
    cluster: RunningCluster, client: Client, shared_memory: str, pushed: bool
) -> None:
    await client.admin.create_stream("s")
    end = await fill(client, "s", MIB // 2)
    chunks = await take(client, shared_memory=shared_memory)
    assert numbers(chunks) == list(range(end))
    assert {chunk.pushed for chunk in chunks} == {pushed}
    of_range = [
        chunk.pushed
        async for chunk in client.read_range(
            "s", 0, 0, EARLIEST, None, settings=client.consumer("s", shared_memory=shared_memory)._settings
        )
    ]
    assert set(of_range) == {pushed}
    size = 2 * sum(chunk.header.chunk_bytes for chunk in chunks)
    assert metric(cluster, "push_bytes_total") == (size if pushed else 0)
    assert metric(cluster, "bytes_read_total") == (0 if pushed else size)


async def test_the_error_for_required_shared_memory_says_why_it_is_missing(cluster: RunningCluster) -> None:
    async with await Client.connect(cluster.bootstrap, ClientSettings.load(transport="tcp")) as client:
        await client.admin.create_stream("s")
        end = await fill(client, "s", SEGMENT_BYTES)
        assert numbers(await take(client)) == list(range(end))
        with pytest.raises(InvalidArgument, match="by tcp"):
            await take(client, shared_memory="always")
    assert metric(cluster, "push_bytes_total") == 0


async def test_all_consumers_of_a_client_share_one_push_connection(cluster: RunningCluster, client: Client) -> None:
    await client.admin.create_stream("s")
    await fill(client, "s", MIB // 2)
    chunks = await take(client)
    for chunk in chunks[::3]:
        (again,) = [each async for each in client.read_range("s", 0, 0, chunk.start, chunk.next)]
        assert (again.pushed, again.start, again.batch) == (True, chunk.start, chunk.batch)
    async with client.consumer("s", start="earliest") as one, client.consumer("s", start="earliest") as two:
        for consumer in (one, two):
            assert (await anext(consumer.batches())).pushed
        assert metric(cluster, "push_connections") == 1
    await until(lambda: metric(cluster, "push_subscriptions") == 0)


# --- memory that readers hold
# --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_consumer_reads_from_disk_and_then_the_records_written_meanwhile(
    cluster: RunningCluster, client: Client
) -> None:
    """There is much more data than memory, and a producer writes all the time."""
    await client.admin.create_stream("s", streamlets=2)
    async with client.producer() as producer:
        await producer.prepare("s")
        await follow_from_disk(cluster, client, producer)


async def follow_from_disk(cluster: RunningCluster, client: Client, producer: Producer) -> None:
    async with load(producer, pause_s=0.0) as running:
        await until(lambda: len(running.deliveries) > 100 and metric(cluster, "segments_evicted_total") > 20)
        async with client.consumer("s", start="earliest", prefetch_bytes_max=MIB) as consumer:
            follower = Follower(consumer)
            following = asyncio.ensure_future(follower.run())
            seen = follower.seen
            before = running.sent
            await until(lambda: following.done() or sum(map(len, seen.values())) > before)
            running.stopping = True  # readers need not be faster than writers
            await until(lambda: following.done() or sum(map(len, seen.values())) >= running.sent)
        following.cancel()
    assert seen == {streamlet: list(range(streamlet, running.sent, 2)) for streamlet in range(2)}
    assert metric(cluster, "bytes_loaded_total") >= 20 * SEGMENT_BYTES // 2  # segments need not be full
    await pushed_mostly(cluster, client, running.sent)


async def pushed_mostly(cluster: RunningCluster, client: Client, count: int) -> None:
    """Read everything without a writer: as soon as all data is on disk, readers get their share of the memory."""
    async with asyncio.timeout(TIMEOUT_S):
        pushed = pulled = 0.0
        while pushed <= pulled:
            before = metric(cluster, "push_bytes_total"), metric(cluster, "bytes_read_total")
            async with client.consumer("s", start="earliest", end="latest", prefetch_bytes_max=MIB) as consumer:
                assert sum([chunk.batch.num_rows async for chunk in consumer.batches()]) == count
            pushed = metric(cluster, "push_bytes_total") - before[0]
            pulled = metric(cluster, "bytes_read_total") - before[1]


async def test_a_reader_that_keeps_all_batches_gets_copies_and_blocks_no_writer(
    cluster: RunningCluster, client: Client
) -> None:
    await client.admin.create_stream("s")
    end = await fill(client, "s", 3 * ARENA_BYTES)
    kept = await take(client)
    assert {chunk.pushed for chunk in kept} == {True, False}
    assert metric(cluster, 'push_ends_total{reason="pull"}') >= 1
    assert 0 < metric(cluster, "arena_slots_leased") <= metric(cluster, "arena_slots") // 2
    await fill(client, "s", 2 * ARENA_BYTES, first=end)  # through the memory that is left
    assert all(chunk.intact for chunk in kept)
    assert numbers(kept) == list(range(end)), "nobody wrote over them"
    kept.clear()
    gc.collect()
    await until(lambda: metric(cluster, "arena_slots_leased") == 0)


@pytest.mark.slow
async def test_idle_consumers_block_no_producer_or_consumer_of_the_same_client(
    cluster: RunningCluster, client: Client
) -> None:
    await client.admin.create_stream("s")
    await fill(client, "s", MIB // 2)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            await stack.enter_async_context(client.consumer("s", start="earliest"))
        await until(lambda: metric(cluster, "push_bytes_total") > 0)
        end = await fill(client, "s", 2 * ARENA_BYTES, first=0)
        async with asyncio.timeout(TIMEOUT_S), client.consumer("s", start="earliest", end="latest") as busy:
            count = 0
            async for chunk in busy.batches():
                count += chunk.batch.num_rows
        assert count > end
    await until(lambda: metric(cluster, "arena_slots_leased") == 0)


async def test_group_consumers_use_push(cluster: RunningCluster, client: Client) -> None:
    await client.admin.create_stream("s", group_segments=2)
    end = await fill(client, "s", 2 * ARENA_BYTES)
    seen: set[int] = set()
    async with asyncio.timeout(TIMEOUT_S), client.group_consumer("app", "s", prefetch_bytes_max=MIB) as consumer:
        live = end
        async for chunk in consumer.batches():
            found = {number_of(value) for value in chunk.batch["value"].to_pylist()}
            assert not found & seen, "each record once"
            seen |= found
            if len(seen) == end == live:
                live = await fill(client, "s", SEGMENT_BYTES * 5, first=end)  # the open group, and the groups after it
            if len(seen) == live:
                break
    assert seen == set(range(live))
    assert metric(cluster, "push_bytes_total") > metric(cluster, "bytes_read_total")


# --- deaths ------------------------------------------------------------------------------------------------


KEEPER = """
import asyncio, sys
from kera.client import Client

async def main():
    client = await Client.connect(sys.argv[1])
    consumer = client.consumer("s", start="earliest", end="latest", shared_memory="always")
    held = [chunk async for chunk in consumer.batches()]
    print(len(held), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_consumer_frees_the_memory_that_it_held(cluster: RunningCluster, client: Client) -> None:
    await client.admin.create_stream("s")
    await fill(client, "s", MIB // 2)
    async with reading_process(cluster, KEEPER) as reader:
        assert int(await said(reader)) > 0
        assert metric(cluster, "arena_slots_leased") > 0
        reader.kill()
        await until(lambda: metric(cluster, "arena_slots_leased") == 0)
    await until(lambda: metric(cluster, "push_connections") == 0)


FOLLOWER = """
import asyncio, sys
from kera.client import Client

async def main():
    client = await Client.connect(sys.argv[1])
    async with client.consumer("s", start="earliest", shared_memory="always") as consumer:
        seen = 0
        async for chunk in consumer.batches():
            assert chunk.header.first_record == seen, (chunk.header.first_record, seen)
            seen += chunk.batch.num_rows
            print(seen, flush=True)

asyncio.run(main())
"""


async def test_a_paused_consumer_blocks_no_producer(cluster: RunningCluster, client: Client) -> None:
    await client.admin.create_stream("s")
    end = await fill(client, "s", MIB // 2)
    async with reading_process(cluster, FOLLOWER) as reader:
        while int(await said(reader)) < end:
            pass
        os.kill(reader.pid, signal.SIGSTOP)
        end = await fill(client, "s", 4 * ARENA_BYTES, first=end)
        assert metric(cluster, "arena_slots_leased") <= metric(cluster, "arena_slots") // 2
        os.kill(reader.pid, signal.SIGCONT)
        while int(await said(reader)) < end:  # the chunks pushed meanwhile, and the rest from disk
            pass


async def test_kills_of_a_pushing_broker_skip_and_repeat_no_record(cluster: RunningCluster, client: Client) -> None:
    await client.admin.create_stream("s", streamlets=2)
    async with client.producer() as producer, client.consumer("s", start="earliest") as consumer:
        await producer.prepare("s")
        follower = Follower(consumer)
        following = asyncio.ensure_future(follower.run())
        async with load(producer) as running:
            for round_ in range(1, 4):
                await until(
                    lambda seen=round_: following.done() or sum(map(len, follower.seen.values())) > 100 * seen  # type: ignore[misc]
                )
                assert metric(cluster, "push_bytes_total") > 0, "since it was started again, too"
                await asyncio.to_thread(cluster.kill, BROKER)
                await asyncio.to_thread(cluster.restart, BROKER)
                sent = running.sent
                await until(
                    lambda sent=sent: (
                        following.done()  # type: ignore[misc]
                        or (len(running.deliveries) > sent and metric(cluster, "push_bytes_total") > 0)
                    )
                )
        await until(lambda: following.done() or sum(map(len, follower.seen.values())) >= running.sent)
        following.cancel()
    assert follower.seen == {streamlet: list(range(streamlet, running.sent, 2)) for streamlet in range(2)}


async def kept_over_a_crash(cluster: RunningCluster, client: Client) -> list[ChunkBatch]:
    """Batches that a killed launch of the broker had pushed, of a stream that was deleted since."""
    await client.admin.create_stream("s")
    end = await fill(client, "s", MIB // 2)
    kept = await take(client)
    assert all(chunk.pushed for chunk in kept)
    await asyncio.to_thread(cluster.kill, BROKER)
    await asyncio.to_thread(cluster.restart, BROKER)
    assert all(chunk.intact for chunk in kept)
    assert numbers(kept) == list(range(end))
    await client.admin.delete_stream("s")
    await client.admin.create_stream("t")
    return kept


async def test_the_launch_after_a_crash_does_not_overwrite_memory_that_readers_hold(
    cluster: RunningCluster, client: Client
) -> None:
    kept = await kept_over_a_crash(cluster, client)
    for _ in range(3):
        await fill(client, "t", ARENA_BYTES)
    assert metric(cluster, "arena_slots_leased") > 0
    assert all(chunk.intact for chunk in kept)


@pytest.mark.slow
async def test_memory_held_over_a_crash_is_reused_after_the_grace_and_batches_notice(tmp_path: Path) -> None:
    with keeping_cluster(
        tmp_path, arena_bytes=ARENA_BYTES, segment_bytes=SEGMENT_BYTES, reader_grace_ms=1_000
    ) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            kept = await kept_over_a_crash(cluster, client)
            await until(lambda: metric(cluster, "arena_slots_leased") == 0)  # the leases of the killed launch
            for _ in range(3):
                await fill(client, "t", ARENA_BYTES)
            assert not any(chunk.intact for chunk in kept)
