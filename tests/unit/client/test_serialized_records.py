"""Producers and consumers with serializers, against a fake cluster and a fake registry."""

import asyncio
import dataclasses
import struct
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client, Record
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.delivering import decoding
from kera.client.producing.producer import Producer
from kera.client.producing.serializing import Serialization
from kera.client.serializers import AvroDeserializer, AvroSerializer, Context, JsonDeserializer, JsonSerializer, Schemas
from kera.client.settings import ProducerSettings
from kera.client.sync import Client as SyncClient
from kera.client.testing import FakeCluster
from kera.core.errors import (
    CannotDecode,
    CannotEncode,
    InvalidArgument,
    SchemaMismatch,
    Unavailable,
    UnknownSchema,
    UnknownStream,
)
from kera.core.schemas.framing import frame
from tests.unit.client.conftest import MakeMember, MakeProducer
from tests.unit.client.group_support import ROWS, GroupCluster
from tests.unit.client.serializers.fake_registry import FakeRegistry
from tests.unit.client.support import WAIT_S
from tests.unit.core.tracing.recorded import recorded

SCHEMA = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}


@dataclasses.dataclass
class Order:
    id: int


@pytest.fixture
async def fake() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.create_stream("orders")
        yield cluster


@pytest.fixture
def registry() -> FakeRegistry:
    return FakeRegistry()


@pytest.fixture
def client(fake: FakeCluster, registry: FakeRegistry) -> Client:
    made = fake.client()
    made.schemas = registry  # type: ignore[assignment]
    return made


async def sent(client: Client, *values: Any, keys: Any = (), **options: Any) -> None:
    async with client.producer(**options) as producer:
        await producer.prepare("orders")
        for value in values:
            producer.send("orders", value, keys=keys)


def reading(client: Client, **options: Any) -> Any:
    return client.consumer("orders", start="earliest", end="latest", **options)


async def read(client: Client, **options: Any) -> list[Record]:
    async with reading(client, **options) as consumer:
        return [record async for record in consumer]


async def test_serialized_values_and_keys_are_read_back(client: Client, fake: FakeCluster) -> None:
    await sent(client, {"id": 1}, None, serializer=JsonSerializer(), keys="a", key_serializer=str)
    assert fake.stream("orders").values() == [b'{"id":1}', None]
    first, second = await read(client, deserializer=JsonDeserializer(), key_deserializer=str)
    assert (first.value, first.key, first.keys) == ({"id": 1}, "a", (b"a",))
    assert second.value is None


async def test_a_function_is_a_serializer_too(client: Client) -> None:
    def reversed_bytes(value: bytes, context: Context) -> bytes:
        assert context == ("orders", "value")
        return value[::-1]

    await sent(client, b"abc", serializer=reversed_bytes)
    assert [record.value for record in await read(client)] == [b"cba"]
    assert [record.value for record in await read(client, deserializer=reversed_bytes)] == [b"abc"]


async def test_only_a_list_gives_several_keys(client: Client) -> None:
    await sent(client, b"v", keys=[1, 2], key_serializer=int)
    await sent(client, b"v", keys=None, key_serializer=int)
    first, second = await read(client, key_deserializer=int)
    assert (first.key, first.keys) == (1, (struct.pack(">q", 1), struct.pack(">q", 2)))
    assert (second.key, second.keys) == (None, ())


async def test_a_schema_is_registered_once_and_looked_up_once(client: Client, registry: FakeRegistry) -> None:
    await sent(client, {"id": 1}, {"id": 2}, serializer=AvroSerializer(SCHEMA))
    assert registry.asked == ["register orders-value"]
    async with reading(client, deserializer=AvroDeserializer()) as consumer:
        assert [record.value async for record in consumer] == [{"id": 1}, {"id": 2}]
    assert registry.asked == ["register orders-value", "by_id 1"]


async def test_a_serializer_may_serve_two_clusters_with_different_schema_ids(client: Client) -> None:
    serializer = AvroSerializer(SCHEMA)
    await sent(client, {"id": 1}, serializer=serializer)
    async with FakeCluster() as other:
        other.create_stream("orders")
        second, registry = other.client(), FakeRegistry()
        second.schemas = registry  # type: ignore[assignment]
        await JsonSerializer({}).ready(Context("x"), Schemas(registry))
        await sent(second, {"id": 1}, serializer=serializer)
        assert other.stream("orders").values() == [frame(2, b"\x02")]


async def test_a_schema_is_not_registered_if_the_setting_forbids_it(client: Client, registry: FakeRegistry) -> None:
    async with client.producer(serializer=AvroSerializer(SCHEMA), register_schemas=False) as producer:
        with pytest.raises(UnknownSchema, match="register_schemas"):
            await producer.prepare("orders")
    assert registry.schemas == []


async def test_sending_before_prepare_says_what_to_call(client: Client) -> None:
    async with client.producer(serializer=JsonSerializer()) as producer:
        with pytest.raises(CannotEncode, match=r"not ready: await producer\.prepare\('orders'\)"):
            producer.send("orders", {})


async def test_a_value_or_key_that_cannot_be_serialized_is_not_sent(client: Client, fake: FakeCluster) -> None:
    def bad(_value: Any, _context: Context) -> Any:
        return "text"

    def worse(_value: Any, _context: Context) -> Any:
        raise KeyError("price")

    await sent(client, {"id": 1}, serializer=JsonSerializer())
    for serializer, value, words in (
        (JsonSerializer(), {"id": {1}}, "field id: TypeError"),
        (bad, 1, "gave str, not bytes"),
        (worse, 1, "KeyError: 'price'"),
    ):
        with pytest.raises(CannotEncode, match=f"the value for stream 'orders' cannot be serialized.*{words}"):
            await sent(client, value, serializer=serializer)
    with pytest.raises(CannotEncode, match="the key for stream 'orders'"):
        await sent(client, {}, serializer=JsonSerializer(), keys=7, key_serializer=str)
    assert fake.stream("orders").values() == [b'{"id":1}']


async def test_a_producer_without_serializers_has_no_extra_layer(client: Client) -> None:
    async with client.producer() as producer:
        assert producer.serialization is None
        assert producer.send_bytes == producer.send


BAD = [b'{"id":1}', b"nonsense", b'{"id":2}', b"[" * 10_000, b'{"a":1,"a":2}', b'{"id":3}', b"\xff"]


async def values_and_gaps(consumer: Any, count: int = 1 << 20) -> list[Any]:
    """The values of up to `count` records; an unreadable record gives its ordinal."""
    found: list[Any] = []
    while len(found) < count:
        try:
            async for record in consumer:
                found.append(record.value)
                if len(found) == count:
                    break
            else:
                break
        except CannotDecode as error:
            found.append(error.attributes["offset"])
    return found


async def test_a_consumer_goes_on_after_undecodable_records(client: Client) -> None:
    await sent(client, *BAD)
    async with reading(client, deserializer=JsonDeserializer()) as consumer:
        found = await values_and_gaps(consumer)
        ends = consumer.positions()
    assert found == [{"id": 1}, 1, {"id": 2}, 3, 4, {"id": 3}, 6]
    (bounds,) = (await client.bounds("orders"))[0]
    assert ends == {0: [bounds.end]}


async def test_the_error_for_an_undecodable_record_names_its_place(client: Client) -> None:
    await sent(client, b"nonsense")
    with pytest.raises(CannotDecode, match="the value of record 0 of stream 'orders', streamlet 0, entry 0") as caught:
        await read(client, deserializer=JsonDeserializer())
    reason = caught.value.attributes.pop("reason")
    assert reason in caught.value.message
    assert caught.value.attributes == {"stream": "orders", "streamlet_id": 0, "entry": 0, "offset": 0, "part": "value"}
    assert not caught.value.retriable


async def test_a_consumer_skips_undecodable_records_with_the_setting(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(decoding.log, "warning", lambda _event, **values: told.append(values))
    await sent(client, *BAD)
    async with reading(client, deserializer=JsonDeserializer(), undecodable_records="skip") as consumer:
        assert [record.value async for record in consumer] == [{"id": 1}, {"id": 2}, {"id": 3}]
        assert consumer.skipped_records == 4
    assert told[0]["records"] == 1
    assert len(told) == 1  # not one line for each


async def test_the_error_for_an_undecodable_key_names_the_key(client: Client) -> None:
    await sent(client, b"v", keys=b"\xff")
    with pytest.raises(CannotDecode, match="the key of record 0") as caught:
        await read(client, key_deserializer=str)
    assert caught.value.attributes["part"] == "key"


async def test_batches_are_not_decoded(client: Client) -> None:
    await sent(client, *BAD)
    async with reading(client, deserializer=JsonDeserializer()) as consumer:
        with pytest.raises(CannotDecode):
            async for _ in consumer:
                pass
        rest = [value async for batch in consumer.batches() for value in batch.batch["value"].to_pylist()]
    assert rest == BAD  # the chunk comes whole: its last record was not delivered


async def test_lookups_of_unknown_schemas_are_bounded(client: Client, registry: FakeRegistry) -> None:
    await sent(client, {"id": 1}, serializer=AvroSerializer(SCHEMA))
    await sent(client, *[frame(number, b"\x02") for number in range(2, 1000)], frame(1, b"\x04"))
    registry.asked.clear()
    async with reading(client, deserializer=AvroDeserializer(), undecodable_records="skip") as consumer:
        assert [record.value async for record in consumer] == [{"id": 1}, {"id": 2}]
        assert consumer.skipped_records == 998
    assert len(registry.asked) <= 2 * decoding.LOOKED_UP_MAX
    with pytest.raises(CannotDecode, match="schema 2: no schema has the id 2"):
        await read(client, deserializer=AvroDeserializer())


async def test_schemas_dropped_from_the_cache_are_looked_up_again(
    client: Client, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "READERS_MAX", 2)
    for number, name in enumerate(("A", "B", "A", "C", "A", "B")):
        await sent(client, {"id": number}, serializer=AvroSerializer({**SCHEMA, "name": name}))
    registry.asked.clear()
    async with reading(client, deserializer=AvroDeserializer(), joined_bytes_max=0) as consumer:
        assert [record.value["id"] async for record in consumer] == [*range(6)]
    assert registry.asked == ["by_id 1", "by_id 2", "by_id 3", "by_id 2"]


async def test_values_are_read_after_failed_schema_lookups(client: Client, registry: FakeRegistry) -> None:
    await sent(client, {"id": 1}, {"id": 2}, serializer=AvroSerializer(SCHEMA))
    registry.failures = [Unavailable("no coordinator"), asyncio.CancelledError()]  # type: ignore[list-item]
    async with reading(client, deserializer=AvroDeserializer()) as consumer:
        records = consumer.records()
        with pytest.raises(Unavailable):
            await anext(records)
        with pytest.raises(asyncio.CancelledError):
            await anext(records)
        assert [record.value async for record in records] == [{"id": 1}, {"id": 2}]


async def test_a_batch_can_be_read_after_a_failed_schema_lookup(client: Client, registry: FakeRegistry) -> None:
    await sent(client, {"id": 1}, {"id": 2}, serializer=AvroSerializer(SCHEMA))
    registry.failures = [Unavailable("no coordinator")]
    async with reading(client, deserializer=AvroDeserializer()) as consumer:
        with pytest.raises(Unavailable):
            await anext(consumer.records())
        assert [batch.batch.num_rows async for batch in consumer.batches()] == [2]


async def test_next_records_returns_the_records_before_an_undecodable_one(client: Client) -> None:
    await sent(client, *BAD)
    found: list[Any] = []
    async with reading(client, deserializer=JsonDeserializer()) as consumer:
        while True:
            try:
                records = await consumer.next_records()
            except CannotDecode as error:
                found.append(error.attributes["offset"])
                continue
            if not records:
                break
            found += [record.value for record in records]
    assert found == [{"id": 1}, 1, {"id": 2}, 3, 4, {"id": 3}, 6]
    async with reading(client, deserializer=JsonDeserializer(), undecodable_records="skip") as consumer:
        found = []
        while records := await consumer.next_records():
            found += [record.value for record in records]
    assert found == [{"id": 1}, {"id": 2}, {"id": 3}]


async def test_serializers_are_refused_for_streams_with_columns(client: Client) -> None:
    await client.admin.create_stream("columns", schema=pa.schema([pa.field("id", pa.int64())]))
    async with client.producer(serializer=AvroSerializer(SCHEMA)) as producer:
        await producer.prepare("columns")
        with pytest.raises(SchemaMismatch, match="send_rows"):
            producer.send("columns", {"id": 1})
        await (await producer.send_batch("columns", pa.record_batch({"id": [1]})))
    with pytest.raises(InvalidArgument, match="a dataclass or a pydantic model of its columns"):
        await client.consumer("columns", deserializer=JsonDeserializer()).start()


def number_of(data: bytes, _context: Context) -> str:
    if data[5:6] == b"3":
        raise ValueError("threes are not read")
    return f"n{int(data[:6])}"


async def test_a_consumer_in_a_group_goes_on_after_undecodable_records(
    make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups()
    consumer = make_member(decoding=decoding.Decoding(number_of, None, None))
    async with asyncio.timeout(WAIT_S):
        found = await values_and_gaps(consumer, ROWS)
        read = {int(each[1:]) for each in found if isinstance(each, str)}
        assert read == {number for number in range(ROWS) if number % 10 != 3}
        assert len(found) - len(read) == len([number for number in range(ROWS) if number % 10 == 3])
        await consumer.commit()


@pytest.mark.parametrize("undecodable", ["fail", "skip"])
async def test_next_records_in_a_group_returns_every_decodable_record(
    make_member: MakeMember, fill_groups: Any, undecodable: Any
) -> None:
    await fill_groups()
    consumer = make_member(decoding=decoding.Decoding(number_of, None, None, undecodable=undecodable))
    read: list[int] = []
    bad = 0
    wanted = [number for number in range(ROWS) if number % 10 != 3]
    async with asyncio.timeout(WAIT_S):
        while len(read) < len(wanted) or bad + consumer.skipped_records < ROWS - len(wanted):
            try:
                read += [int(record.value[1:]) for record in await consumer.next_records()]
            except CannotDecode:
                bad += 1
    assert sorted(read) == wanted
    assert (bad == 0) == (undecodable == "skip")


async def test_a_group_retries_a_failed_schema_lookup(
    make_member: MakeMember, make_producer: MakeProducer, groups: GroupCluster
) -> None:
    registry = FakeRegistry()
    serialize = await AvroSerializer(SCHEMA).ready(Context("s"), Schemas(registry))
    producer = make_producer(groups)
    await producer.prepare("s")
    producer.send("s", serialize({"id": 1}, Context("s")))
    await producer.flush()
    registry.failures = [Unavailable("no coordinator")]
    consumer = make_member(decoding=decoding.Decoding(AvroDeserializer(), None, registry))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable):
            await anext(consumer.records())
        assert (await anext(consumer.records())).value == {"id": 1}


@pytest.mark.parametrize("by_a_batch", [False, True])
async def test_a_recreated_stream_is_prepared_again_by_a_call_or_by_a_batch(
    client: Client, fake: FakeCluster, *, by_a_batch: bool
) -> None:
    async with client.producer(serializer=JsonSerializer()) as producer:
        await client.admin.create_stream("again", schema=Order)
        await producer.prepare("again")
        await client.admin.delete_stream("again")
        await client.admin.create_stream("again")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(UnknownStream):
                await (await producer.send_rows("again", [Order(1)]))
            if by_a_batch:
                await (await producer.send_batch("again", pa.record_batch({"value": [b"a"]})))
            else:
                await producer.prepare("again")
            await producer.send("again", {"id": 1})
        with pytest.raises(UnknownStream):  # the error of the earlier rows
            await producer.flush()
    assert fake.stream("again").values() == [*[b"a"] * by_a_batch, b'{"id":1}']


@pytest.mark.parametrize("serialized_before", [False, True])
async def test_sending_a_serialized_value_is_traced(fake: FakeCluster, *, serialized_before: bool) -> None:
    with recorded() as found:
        cluster = Cluster(fake.bootstrap, fake.settings())
        serialization = Serialization(JsonSerializer(), None, None)
        producer = Producer(cluster, ProducerSettings(), serialization=serialization, tracing=found.tracing)
        await producer.prepare("orders")
        if serialized_before:  # like the synchronous client
            value, _ = serialization.encoded("orders", {"id": 1}, ())
            await producer.send_bytes("orders", value)
        else:
            await producer.send("orders", {"id": 1})
        await producer.close()
        await cluster.close()
        assert found.named("create orders")
    assert fake.stream("orders").values() == [b'{"id":1}']


async def test_a_framed_deserializer_without_a_registry_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="registry"):
        decoding.Decoding(AvroDeserializer(), None, None)


async def test_the_synchronous_client_serializes_and_deserializes_too(
    fake: FakeCluster, registry: FakeRegistry
) -> None:
    def use() -> list[Any]:
        found: list[Any] = []
        with SyncClient(fake.bootstrap) as client:
            client._client.schemas = registry  # type: ignore[assignment]
            with client.producer(serializer=AvroSerializer(SCHEMA), key_serializer=str) as producer:
                changing = {"id": 1}
                producer.send("orders", changing, keys="a")
                changing["id"] = 2  # the sent value does not change any more
                producer.send("orders", changing)
                with pytest.raises(CannotEncode, match="field id"):
                    producer.send("orders", {"id": "x"})
            with client.producer() as producer:
                producer.send("orders", b"nonsense")
                producer.send("orders", frame(1, b"\x06"))
            options: Any = {"deserializer": AvroDeserializer(), "key_deserializer": str}
            with client.consumer("orders", start="earliest", end="latest", **options) as consumer:
                while True:
                    try:
                        for record in consumer:
                            found.append((record.value, record.key))  # noqa: PERF401 - it may not end
                        break
                    except CannotDecode as error:
                        found.append(error.attributes["offset"])
            options["undecodable_records"] = "skip"
            with client.consumer("orders", start="earliest", end="latest", **options) as consumer:
                assert [record.value for record in consumer] == [{"id": 1}, {"id": 2}, {"id": 3}]
                assert consumer.skipped_records == 1
        return found

    assert await asyncio.to_thread(use) == [({"id": 1}, "a"), ({"id": 2}, None), 2, ({"id": 3}, None)]
