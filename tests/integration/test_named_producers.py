"""Named producers: a successor continues after its predecessor, and fences it."""

import asyncio

import pytest

from kera.client import Client, Producer
from kera.core.errors import InvalidArgument, ProducerFenced
from tests.integration.control_support import broker_id_of, broker_name, broker_names, connect
from tests.integration.shared_cluster import SharedCluster

TIMEOUT_S = 60.0


async def values(client: Client, stream: str) -> list[bytes | None]:
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        return [record.value async for record in consumer]


async def put(producer: Producer, *contents: bytes) -> None:
    for content in contents:
        await producer.prepare("s")
        await producer.send("s", content)


async def until_refused(producer: Producer, streamlet: int) -> None:
    """Check that the next chunk that it sends is refused."""
    with pytest.raises(ProducerFenced):
        await producer.send("s", b"too late", streamlet=streamlet)


@pytest.mark.parametrize("streamlet", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_a_successor_fences_its_predecessor_before_it_has_written_anything(
    members: SharedCluster, streamlet: int
) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        await connect(members) as client,
        await connect(members) as other,
    ):
        await client.admin.create_stream("s", streamlets=2, replication=1)
        owners = (await client.describe("s")).assignments
        first = client.producer(name="loader")
        await first.prepare("s")
        for each in (0, 1):
            await first.send("s", b"%d" % each, streamlet=each)
        # One of its brokers is away while the successor starts, and has lost all its state when it is back.
        away = broker_name(members, owners[streamlet].broker_id)
        async with other.producer(name="loader") as second:
            await members.kill(away)
            await second.prepare("s")
            await members.restart(away)
            await until_refused(first, streamlet)
            await first.close(flush=False)
        assert sorted(map(bytes, await values(client, "s"))) == [b"0", b"1"]  # type: ignore[arg-type]


async def test_a_successor_fences_its_predecessor_after_a_move_of_the_streamlet(members: SharedCluster) -> None:
    async with (
        asyncio.timeout(TIMEOUT_S),
        await connect(members) as client,
        await connect(members) as other,
    ):
        await client.admin.create_stream("s", entries=3, replication=1)
        first = client.producer(name="loader")
        await put(first, b"1", b"2")
        async with other.producer(name="loader") as second, client.producer() as nameless:
            await put(nameless, b"of somebody else")
            await put(second, b"3")
            ids = [broker_id_of(members, name) for name in broker_names(members)]
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
