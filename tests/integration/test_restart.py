"""Daemons that are killed and started again, with clients at work."""

import asyncio
from collections.abc import Iterator

import pytest

from kera.client import EARLIEST, Client, ConsumerSettings
from kera.client.local_cluster import LocalCluster, RunningCluster
from kera.core.errors import DataLost, UnknownStream
from kera.core.settings import KIB, MIB

TIMEOUT_S = 60.0


@pytest.fixture
def own_cluster() -> Iterator[RunningCluster]:
    """A cluster of one broker for a test that breaks it."""
    with LocalCluster.running(arena_bytes=32 * MIB, segment_bytes=64 * KIB) as running:
        yield running


async def in_thread(function: object, *arguments: str) -> None:
    """Run one of the cluster's blocking methods."""
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.to_thread(function, *arguments)  # type: ignore[arg-type]


def broker_name(cluster: RunningCluster) -> str:
    """The broker's name, also when it does not run."""
    return next(name for name in cluster.ready if name.startswith("broker"))


async def test_killed_broker_comes_back_and_the_producer_goes_on(own_cluster: RunningCluster) -> None:
    """Level ``leader`` loses the memory of the broker; nothing wrong is served for it."""
    async with await Client.connect(own_cluster.bootstrap) as client:
        await client.admin.create_stream("s")
        async with client.producer() as producer:
            await producer.prepare("s")
            for number in range(99):
                await producer.send("s", b"before %d" % number)
            before = await producer.send("s", b"before 99")
            old = client.consumer("s", start={0: [before.position]}, shared_memory="never")
            await in_thread(own_cluster.kill, broker_name(own_cluster))
            pending = [producer.send("s", b"after %d" % number) for number in range(100)]
            await in_thread(own_cluster.restart, broker_name(own_cluster))
            async with asyncio.timeout(TIMEOUT_S):
                after = [await delivery for delivery in pending]

        assert [delivery.record for delivery in after] == list(range(100)), "in order, each once, and counted anew"
        assert after[0].position > before.position, "positions never go back"
        async with client.consumer("s", start="earliest", end="latest") as consumer:
            assert [record.value async for record in consumer] == [b"after %d" % number for number in range(100)]

        # Who stands before the gap is told its exact extent, and never gets other records for those that are gone.
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(DataLost) as caught:
                await anext(old.batches())
        await old.close()
        assert caught.value.attributes["lost_from"] == list(before.position)
        assert caught.value.attributes["available_from"] == list(after[0].position)


async def test_clients_go_on_without_the_coordinator_and_streams_survive_it(own_cluster: RunningCluster) -> None:
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


async def test_stream_deleted_under_a_reader_is_an_error_and_frees_its_memory(own_cluster: RunningCluster) -> None:
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
        # Twice the broker's memory goes through streams that are deleted: their segments are used again.
        for number in range(8):
            await client.admin.create_stream(f"big-{number}")
            async with client.producer() as producer:
                await producer.prepare(f"big-{number}")
                for _ in range(8 * 1024 // 4):
                    producer.send(f"big-{number}", bytes(4 * 1024 - 100))
                    await producer.drain()
            await client.admin.delete_stream(f"big-{number}")
