"""Serializers with real daemons and their registry; and the examples of docs/serializers.md, as written there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kera.client import Client
from kera.client.serializers import (
    AvroDeserializer,
    AvroSerializer,
    JsonDeserializer,
    JsonSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
)
from kera.client.sync import Client as SyncClient
from kera.core.errors import CannotDecode, IncompatibleSchema, UnknownSchema, UnknownStream
from kera.core.schemas.framing import frame
from kera.local.cluster import RunningCluster
from kera.v1 import common_pb2
from tests.docs_examples import ROOT, examples

TIMEOUT_S = 60
PAGE = ROOT / "docs" / "serializers.md"
SCHEMA: dict[str, Any] = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
JSON_SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}}


async def test_the_examples_of_the_serializers_page_run(cluster: RunningCluster) -> None:
    pages = [example for example in examples(PAGE, "python") if "spark" not in example.text]
    assert len(pages) == 8
    names: dict[str, Any] = {}
    async with await Client.connect(cluster.bootstrap) as client:
        await _delete_streams(client)  # from other modules that share the cluster
        try:
            for example in pages:
                body = "\n".join(f"    {line}" for line in example.text.splitlines())
                names.update(client=client, print=lambda *_: None)
                text = f"async def main():\n{body}\n    return locals()\n"
                exec(compile(text, str(example), "exec", dont_inherit=True), names)
                async with asyncio.timeout(TIMEOUT_S):
                    names.update(await names["main"]())
        finally:
            await _delete_streams(client)


async def _delete_streams(client: Client) -> None:
    for stream in ("clicks", "orders", "sales", "visits"):
        with contextlib.suppress(UnknownStream):
            await client.admin.delete_stream(stream)


@pytest.mark.parametrize(
    ("serializer", "deserializer", "value"),
    [
        (AvroSerializer(SCHEMA), AvroDeserializer(), {"id": 1}),
        (JsonSerializer(JSON_SCHEMA), JsonDeserializer(JSON_SCHEMA), {"id": 1}),
        (
            ProtobufSerializer(common_pb2.Cursor),
            ProtobufDeserializer(common_pb2.Cursor),
            common_pb2.Cursor(stream_id=1),
        ),
    ],
)
async def test_a_group_decodes_records_with_schemas_from_the_registry(
    cluster: RunningCluster, serializer: Any, deserializer: Any, value: Any
) -> None:
    name = f"serialized-{type(serializer).__name__}"
    async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(name, streamlets=2)
        async with client.producer(serializer=serializer, key_serializer=str) as producer:
            await producer.prepare(name)
            for number in range(10):
                producer.send(name, value, keys=f"k{number}")
        async with client.producer() as producer:
            await producer.prepare(name)
            await producer.send(name, b"\x00")
        assert await client.schemas.versions(f"{name}-value") == [1]
        found: list[Any] = []
        bad = 0
        async with client.group_consumer(
            f"{name}-group", name, deserializer=deserializer, key_deserializer=str
        ) as consumer:
            records = consumer.records()
            while len(found) + bad < 11:
                try:
                    record = await anext(records)
                except CannotDecode:
                    bad += 1
                else:
                    found.append((record.key, record.value))
            await consumer.commit()
        assert sorted(found, key=lambda each: each[0]) == [(f"k{number}", value) for number in range(10)]
        assert bad == 1


async def test_an_incompatible_schema_is_refused_when_the_stream_is_prepared(
    cluster: RunningCluster,
) -> None:
    other = {**SCHEMA, "fields": [{"name": "id", "type": "string"}]}
    async with asyncio.timeout(TIMEOUT_S), await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("serialized-changed")
        async with client.producer(serializer=AvroSerializer(SCHEMA), register_schemas=False) as producer:
            with pytest.raises(UnknownSchema, match="register_schemas"):
                await producer.prepare("serialized-changed")
        async with client.producer(serializer=AvroSerializer(SCHEMA)) as producer:
            await producer.prepare("serialized-changed")
        async with client.producer(serializer=AvroSerializer(SCHEMA), register_schemas=False) as producer:
            await producer.prepare("serialized-changed")
        async with client.producer(serializer=AvroSerializer(other)) as producer:
            with pytest.raises(IncompatibleSchema):
                await producer.prepare("serialized-changed")


def test_the_synchronous_client_serializes_and_deserializes(cluster: RunningCluster) -> None:
    name = "serialized-sync"
    with SyncClient(cluster.bootstrap) as client:
        client.admin.create_stream(name)
        with client.producer(serializer=AvroSerializer(SCHEMA)) as producer:
            assert producer.send(name, {"id": 1}).result()
        with client.producer() as producer:
            producer.send(name, frame(1 << 30, b"\x02"))
        with client.consumer(
            name, start="earliest", end="latest", deserializer=AvroDeserializer(), undecodable_records="skip"
        ) as consumer:
            assert [record.value for record in consumer] == [{"id": 1}]
            assert consumer.skipped_records == 1


@pytest.mark.parametrize("kind", ["to_pandas", "to_polars"])
def test_data_frames_have_deserialized_values(cluster: RunningCluster, kind: str) -> None:
    name, options = f"serialized-{kind}", {"start": "earliest", "end": "latest"}
    values = [{"id": number, "note": "x"} if number % 2 else {"id": number} for number in range(10)]
    with SyncClient(cluster.bootstrap) as client:
        client.admin.create_stream(name)
        with client.producer(serializer=JsonSerializer(), key_serializer=str) as producer:
            for number, value in enumerate(values):
                producer.send(name, value, keys=f"k{number}")
        with client.consumer(name, **options) as consumer:  # type: ignore[arg-type]
            frame = getattr(consumer, kind)(deserializer=JsonDeserializer(), key_deserializer=str)
        assert list(frame.columns) == ["timestamp", "key", "keys", "value", "headers"]
        assert list(frame["key"]) == [f"k{number}" for number in range(10)]
        found = list(frame["value"])
        assert found == [{"id": 0, "note": None, **value} for value in values] if kind == "to_polars" else values

        with client.producer() as producer:
            producer.send(name, b"no JSON").result()
        with client.consumer(name, **options) as consumer:  # type: ignore[arg-type]
            with pytest.raises(CannotDecode):
                getattr(consumer, kind)(deserializer=JsonDeserializer())
            assert consumer.positions()[0][0].offset == 0, "nothing was given out"
        with client.consumer(name, undecodable_records="skip", **options) as consumer:  # type: ignore[arg-type]
            assert len(getattr(consumer, kind)(deserializer=JsonDeserializer())) == 10
        with client.consumer(name, **options) as consumer:  # type: ignore[arg-type]
            assert getattr(consumer, kind)()["value"][10] == b"no JSON"
