"""Producers with names: a successor goes on where the one before stopped, and shuts it out."""

import asyncio
from pathlib import Path

import pytest

from kera.client import Client, Producer
from kera.core.errors import InvalidArgument, ProducerFenced
from tests.integration.control_support import broker_id_of, broker_names, connect, control_cluster

TIMEOUT_S = 60.0


async def values(client: Client, stream: str) -> list[bytes | None]:
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        return [record.value async for record in consumer]


async def put(producer: Producer, *contents: bytes) -> None:
    for content in contents:
        await producer.prepare("s")
        await producer.send("s", content)


async def test_a_successor_shuts_out_the_one_before_also_where_the_streamlet_went(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        control_cluster(tmp_path, brokers=2, backups=1) as cluster,
        await connect(cluster) as client,
        await connect(cluster) as other,
    ):
        await client.admin.create_stream("s", entries=3, replication=1)
        first = client.producer(name="loader")
        await put(first, b"1", b"2")
        async with other.producer(name="loader") as second, client.producer() as nameless:
            await put(nameless, b"of somebody else")
            await put(second, b"3")
            ids = [broker_id_of(cluster, name) for name in broker_names(cluster)]
            owner = (await client.describe("s")).assignments[0].broker_id
            await client.admin.move_streamlet("s", 0, next(each for each in ids if each != owner))
            with pytest.raises(ProducerFenced, match="a newer producer with the name 'loader' has taken over"):
                await put(first, b"too late")
            with pytest.raises(ProducerFenced):
                first.send("s", b"nor this")
            await first.close(flush=False)
            await put(second, b"4")
        found = await values(client, "s")
        assert [each for each in found if each != b"of somebody else"] == [b"1", b"2", b"3", b"4"], "in one entry"
        assert len(found) == 5
        with pytest.raises(InvalidArgument, match="a producer cannot be called 'a/b'"):
            await put(client.producer(name="a/b"), b"never")
