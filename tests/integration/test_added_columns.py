"""Columns that are added to a typed stream while it is in use."""

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from kera.client import ChunkBatch, Client, Consumer, GroupConsumer
from kera.core.errors import SchemaMismatch
from kera.local.cluster import RunningCluster
from tests.integration.support import keeping_cluster

pytestmark = pytest.mark.usefixtures("chunks_alone")

COLUMNS = pa.schema([pa.field("user", pa.string()), pa.field("fare", pa.int32(), nullable=False)])
TIP = pa.schema([("tip", pa.float64()), ("tags", pa.list_(pa.string()))])


def old(number: int) -> pa.RecordBatch:
    return pa.record_batch([[f"u{number}"], pa.array([number], pa.int32())], schema=COLUMNS)


def new(number: int) -> pa.RecordBatch:
    schema = pa.schema([*COLUMNS, *TIP])
    return pa.record_batch([[f"u{number}"], pa.array([number], pa.int32()), [number / 2], [["x"]]], schema=schema)


def row(number: int, tip: float | None = None) -> dict[str, object]:
    return {"user": f"u{number}", "fare": number, "tip": tip, "tags": None if tip is None else ["x"]}


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as made:
        yield made


async def send(client: Client, stream: str, *batches: pa.RecordBatch) -> None:
    async with client.producer() as producer:
        for batch in batches:
            await producer.send_batch(stream, batch)
            await producer.flush()


@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("never", marks=pytest.mark.slow)])
async def test_records_older_than_a_column_read_as_null_in_it(client: Client, shared_memory: str) -> None:
    name = f"older-{shared_memory}"
    await client.admin.create_stream(name, schema=COLUMNS, key_column="user")
    await send(client, name, old(1), old(2))
    altered = await client.admin.alter_stream(name, add_columns=TIP)
    assert altered.schema.names == ["user", "fare", "tip", "tags"]
    await send(client, name, new(3), old(4))
    expected = [row(1), row(2), row(3, 1.5), row(4)]
    async with client.consumer(name, start="earliest", end="latest", shared_memory=shared_memory) as consumer:
        batches = [chunk.batch async for chunk in consumer.batches()]
    assert pa.Table.from_batches(batches).to_pylist() == expected
    async with client.consumer(name, start="earliest", end="latest", shared_memory=shared_memory) as consumer:
        assert [record.row async for record in consumer] == expected


async def test_an_open_producer_learns_an_added_column_when_a_batch_has_it(
    cluster: RunningCluster, client: Client
) -> None:
    await client.admin.create_stream("going-on", schema=COLUMNS)
    async with client.producer() as producer:
        await producer.send_batch("going-on", old(1))
        async with await Client.connect(cluster.bootstrap) as other:
            await other.admin.alter_stream("going-on", add_columns=TIP)
        await producer.send_batch("going-on", old(2))
        await producer.send_batch("going-on", new(3))
        with pytest.raises(SchemaMismatch, match="has no column 'extra'"):
            await producer.send_batch("going-on", old(4).append_column("extra", pa.array([1])))
    async with client.consumer("going-on", start="earliest", end="latest") as consumer:
        chunks = [chunk async for chunk in consumer.batches()]
    first, second, third = (chunk.header.schema_id for chunk in chunks)
    assert first == second == 1 < third


@pytest.mark.parametrize("shared_memory", ["auto", pytest.param("never", marks=pytest.mark.slow)])
@pytest.mark.parametrize("grouped", [False, True])
async def test_an_open_consumer_gets_added_columns(
    cluster: RunningCluster, client: Client, shared_memory: str, grouped: bool
) -> None:
    name = f"learning-{shared_memory}-{grouped}"
    await client.admin.create_stream(name, schema=COLUMNS)
    await send(client, name, old(1))
    consumer: Consumer | GroupConsumer
    if grouped:
        consumer = client.group_consumer(f"app-{name}", name, shared_memory=shared_memory)
    else:
        consumer = client.consumer(name, start="earliest", shared_memory=shared_memory)
    async with consumer:
        batches = cast("AsyncGenerator[ChunkBatch, None]", consumer.batches())
        first = await anext(batches)
        assert first.batch.schema == COLUMNS
        async with await Client.connect(cluster.bootstrap) as other:
            await other.admin.alter_stream(name, add_columns=TIP)
            await send(other, name, old(2), new(3), old(4))
        rows = [(await anext(batches)).batch.to_pylist() for _ in range(3)]
        await batches.aclose()
    assert rows == [[row(2)], [row(3, 1.5)], [row(4)]]


async def test_added_columns_survive_a_restart_of_the_cluster(tmp_path: Path) -> None:
    with keeping_cluster(tmp_path) as running:
        async with await Client.connect(running.bootstrap) as client:
            await client.admin.create_stream("kept", schema=COLUMNS)
            await send(client, "kept", old(1))
            await client.admin.alter_stream("kept", add_columns=TIP)
            await send(client, "kept", new(2))
    with keeping_cluster(tmp_path) as running:
        async with await Client.connect(running.bootstrap) as client:
            await send(client, "kept", new(3))
            async with client.consumer("kept", start="earliest", end="latest") as consumer:
                assert [record.row async for record in consumer] == [row(1), row(2, 1.0), row(3, 1.5)]
