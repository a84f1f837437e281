"""Daemons that are killed and restarted, with clients at work."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kera.client import EARLIEST, Client, ConsumerSettings
from kera.core.base.settings import KIB, MIB
from kera.core.errors import DataLost, UnknownStream
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.support import (
    BROKER,
    TIMEOUT_S,
    arena_of,
    keeping_cluster,
    load,
    lose_host,
    metric,
    read,
    until,
)


@pytest.fixture
def own_cluster() -> Iterator[RunningCluster]:
    """A cluster of one broker for a test that breaks it."""
    with LocalCluster.running(arena_bytes=32 * MIB, segment_bytes=64 * KIB) as running:
        yield running


async def in_thread(function: Callable[..., None], *arguments: object, **settings: object) -> None:
    """Run one of the cluster's blocking methods."""
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.to_thread(function, *arguments, **settings)


async def test_readers_of_a_broker_that_lost_its_memory_learn_the_exact_gap(tmp_path: Path) -> None:
    """Durability ``leader`` means the broker's memory: data on disk survive, and no wrong data are served for the
    rest.
    """
    with keeping_cluster(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s")
            async with client.producer(payload="arrow") as producer:
                await producer.prepare("s")
                # One and a half of two segments: lean ones would all be in the first.
                before = [await producer.send("s", b"before %d" % number) for number in range(100)]
                first_segment = [each for each in before if each.position[:2] == (1, 1)]
                await until(lambda: metric(cluster, "segments_flushed_total") == 1)
                old = client.consumer("s", start={0: [before[-1].position]}, shared_memory="never")
                await in_thread(lose_host, cluster)
                pending = [producer.send("s", b"after %d" % number) for number in range(100)]
                await in_thread(cluster.restart, BROKER)
                async with asyncio.timeout(TIMEOUT_S):
                    after = [await delivery for delivery in pending]

            kept = len(first_segment)
            assert 0 < kept < len(before)
            assert [delivery.record for delivery in after] == list(range(kept, kept + 100)), "in order, each once"
            assert after[0].position > before[-1].position, "positions never go back"
            async with asyncio.timeout(TIMEOUT_S), client.consumer("s", start="earliest") as consumer:
                records = aiter(consumer)
                assert [(await anext(records)).value for _ in range(kept)] == [b"before %d" % n for n in range(kept)]
            async with client.consumer("s", start={0: [after[0].position]}, end="latest") as consumer:
                assert [record.value async for record in consumer] == [b"after %d" % n for n in range(100)]

            # A reader in the gap learns its extent, and never gets other records for the lost ones.
            async with asyncio.timeout(TIMEOUT_S):
                with pytest.raises(DataLost) as caught:
                    await anext(old.batches())
            await old.close()
            assert caught.value.attributes["lost_from"] == list(before[-1].position)
            assert caught.value.attributes["available_from"] == list(after[0].position)


async def test_an_entry_whose_ordinals_start_over_reports_the_possible_loss(
    own_cluster: RunningCluster,
) -> None:
    """One entry was empty, and one has as many records as before: by ordinals alone, nothing has happened."""
    async with await Client.connect(own_cluster.bootstrap) as client:
        await client.admin.create_stream("s", streamlets=2)
        async with client.producer() as producer:
            await producer.prepare("s")
            await producer.send("s", b"read", streamlet=0)
            await producer.flush()
            ((of_read,), (of_empty,)) = (await client.bounds("s")).values()
            assert (of_read.lost, of_empty.lost) == (None, None)
            await asyncio.gather(*(producer.send("s", b"%d" % number, streamlet=1) for number in range(50)))
        await in_thread(own_cluster.kill, BROKER)
        await in_thread(own_cluster.restart, BROKER)
        async with client.producer() as producer:
            await producer.prepare("s")
            await producer.send("s", b"anew", streamlet=1)
            await producer.send("s", b"anew", streamlet=0)
            await producer.flush()
        bounds = await client.bounds("s")
        for before, (now,) in ((of_read, bounds[0]), (of_empty, bounds[1])):
            assert (now.first_record, now.next_record) == (0, 1)
            assert now.lost is not None
            assert now.lost[0] <= before.end < now.lost[1] == now.start
        async with client.consumer("s", start={0: [of_read.end], 1: [of_read.end]}, end="latest") as consumer:
            with pytest.raises(DataLost):
                await anext(consumer.batches())


async def test_an_empty_entry_reports_no_loss_if_its_broker_finds_its_memory(tmp_path: Path) -> None:
    with keeping_cluster(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s")
            await in_thread(cluster.kill, BROKER)
            await in_thread(cluster.restart, BROKER)
            async with client.producer() as producer:
                await producer.prepare("s")
                await producer.send("s", b"first")
                await producer.flush()
            ((now,),) = (await client.bounds("s")).values()
            assert (now.first_record, now.next_record, now.lost) == (0, 1, None)


@pytest.mark.parametrize("killed", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "settings", [pytest.param({"arena_bytes": 8 * MIB}, marks=pytest.mark.slow), {"segment_bytes": 128 * KIB}]
)
async def test_a_broker_can_restart_with_memory_of_another_size(
    tmp_path: Path, killed: bool, settings: dict[str, int]
) -> None:
    with keeping_cluster(tmp_path) as cluster:
        async with await Client.connect(cluster.bootstrap) as client:
            await client.admin.create_stream("s", streamlets=2)
            async with client.producer(chunk_bytes_max=8 * KIB) as producer:
                await producer.prepare("s")
                counts = []
                for _ in range(2):
                    async with load(producer) as running:
                        await until(lambda running=running: len(running.deliveries) > 1000)  # type: ignore[misc]
                    counts.append(len(running.deliveries))
                    if killed:
                        cluster.kill(BROKER)
                    old = arena_of(cluster)
                    await in_thread(cluster.restart, BROKER, **settings)
                    assert old.exists() == (len(counts) == 2 and killed), "the old one goes, but for one that fits"
            found = await read(client)
        for streamlet in range(2):
            assert found[streamlet] == [n for count in counts for n in range(streamlet, count, 2)]


async def test_clients_continue_without_the_coordinator_and_streams_survive_its_restart(
    own_cluster: RunningCluster,
) -> None:
    async with await Client.connect(own_cluster.bootstrap) as client:
        created = await client.admin.create_stream("s", streamlets=2)
        async with client.producer() as producer, client.consumer("s", start="earliest") as consumer:
            await producer.prepare("s")
            records = aiter(consumer)
            await producer.send("s", b"before")
            async with asyncio.timeout(TIMEOUT_S):
                assert (await anext(records)).value == b"before"
                await in_thread(own_cluster.kill, "coordinator")
                await producer.send("s", b"meanwhile")
                assert (await anext(records)).value == b"meanwhile"
                await in_thread(own_cluster.restart, "coordinator")
                found = await client.admin.describe_stream("s")
                assert (found.stream_id, found.config) == (created.stream_id, created.config)
                assert found.assignments == created.assignments, "the same launch of the broker still owns all of it"
                await client.admin.create_stream("t")
                await producer.send("s", b"after")
                assert (await anext(records)).value == b"after"


@pytest.mark.slow
async def test_deleting_a_stream_ends_its_reader_with_an_error_and_frees_memory(own_cluster: RunningCluster) -> None:
    async with await Client.connect(own_cluster.bootstrap) as client:
        settings = ConsumerSettings.load(shared_memory="never")
        await client.admin.create_stream("s")
        async with client.producer() as producer:
            await producer.prepare("s")
            delivery = await producer.send("s", b"x")
            assert delivery.position > EARLIEST
        async with client.consumer("s", start="earliest", settings=settings) as consumer:
            records = aiter(consumer)
            async with asyncio.timeout(TIMEOUT_S):
                await anext(records)
                await client.admin.delete_stream("s")
                with pytest.raises(UnknownStream, match=r"deleted|no stream"):
                    await anext(records)
        # Twice the broker's memory goes through deleted streams: their segments are used again.
        for number in range(8):
            await client.admin.create_stream(f"big-{number}")
            async with client.producer() as producer:
                await producer.prepare(f"big-{number}")
                for _ in range(8 * 1024 // 4):
                    producer.send(f"big-{number}", bytes(4 * 1024 - 100))
                    await producer.drain()
            await client.admin.delete_stream(f"big-{number}")
