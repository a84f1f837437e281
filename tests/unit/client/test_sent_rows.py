"""`send_rows` and `send_frame`: models and data frames as rows, against a fake cluster."""

import asyncio
import dataclasses
import datetime
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pydantic
import pytest

from kera.client import Client, arrow_schema_of
from kera.client.producing import rows
from kera.client.serializers import JsonDeserializer
from kera.client.sync import Client as SyncClient
from kera.client.testing import FakeCluster
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument, SchemaMismatch

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)


@dataclasses.dataclass
class Line:
    price: float


@dataclasses.dataclass
class Order:
    id: int
    at: datetime.datetime = NOON
    lines: list[Line] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Named:
    id: int
    name: str


class Item(pydantic.BaseModel):
    id: int
    cost: Decimal = pydantic.Field(max_digits=10, decimal_places=2)


ORDERS = [Order(number, lines=[Line(1.5)] * number) for number in range(3)]
ITEMS = [Item(id=number, cost=Decimal("1.25")) for number in range(3)]


@pytest.fixture
async def fake() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.create_stream("plain")
        yield cluster


@pytest.fixture
def client(fake: FakeCluster) -> Client:
    return fake.client()


@pytest.mark.parametrize("sent", [ORDERS, ITEMS])
async def test_sent_instances_are_read_back_equal(client: Client, sent: list[Any]) -> None:
    model = type(sent[0])
    described = await client.admin.create_stream("typed", schema=model, key_column="id")
    assert described.schema.equals(arrow_schema_of(model))
    async with client.producer() as producer:
        await (await producer.send_rows("typed", sent))
        await (await producer.send_rows("typed", iter(())))
    async with client.consumer("typed", start="earliest", end="latest", deserializer=model) as consumer:
        records = [record async for record in consumer]
    assert [record.value for record in records] == sent
    assert [record.key for record in records] == [b"0", b"1", b"2"]
    assert records[0].row is not None


async def test_rows_with_a_bad_one_are_refused_as_a_whole(client: Client, fake: FakeCluster) -> None:
    await client.admin.create_stream("typed", schema=Order)
    async with client.producer() as producer:
        with pytest.raises(CannotEncode, match="field id of row 1: it is str, not int"):
            await producer.send_rows("typed", [Order(1), Order("2")])  # type: ignore[arg-type]
        with pytest.raises(CannotEncode, match="not dict; send_batch takes"):
            await producer.send_rows("typed", [{"id": 1}])
        with pytest.raises(CannotEncode, match="cost of row 0: the stream has no such column"):
            await producer.send_rows("typed", ITEMS)
        with pytest.raises(SchemaMismatch, match="schema="):
            await producer.send_rows("plain", ORDERS)
    assert fake.stream("typed").table().num_rows == 0


async def test_a_row_that_does_not_fit_the_model_is_an_error_of_that_record(client: Client) -> None:
    class Small(pydantic.BaseModel):
        id: int = pydantic.Field(lt=2)

    await client.admin.create_stream("typed", schema=Order)
    async with client.producer() as producer:
        await producer.send_rows("typed", ORDERS)
    async with client.consumer("typed", start="earliest", end="latest", deserializer=Small) as consumer:
        records = consumer.records()
        assert [(await anext(records)).value.id for _ in range(2)] == [0, 1]
        with pytest.raises(CannotDecode, match=r"the row of record 2 of stream 'typed'.* less than 2"):
            await anext(records)
    with pytest.raises(InvalidArgument, match="no column 'cost', which Item needs"):
        await client.consumer("typed", deserializer=Item).start()


FRAME = {"id": [1, 2], "who": ["a", None], "at": [NOON, NOON], "note": ["x", "y"]}


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
async def test_the_other_columns_of_a_frame_become_json(client: Client, make: Any) -> None:
    async with client.producer() as producer:
        await (await producer.send_frame("plain", make(FRAME), key_column="who", timestamp_column="at"))
    async with client.consumer("plain", start="earliest", end="latest", deserializer=JsonDeserializer()) as consumer:
        records = [record async for record in consumer]
    assert [record.value for record in records] == [{"id": 1, "note": "x"}, {"id": 2, "note": "y"}]
    assert [(record.key, record.keys) for record in records] == [(b"a", (b"a",)), (None, ())]
    assert {record.timestamp_us for record in records} == {round(NOON.timestamp() * 1e6)}


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
async def test_a_frame_may_have_its_values_in_a_column(client: Client, fake: FakeCluster, make: Any) -> None:
    async with client.producer() as producer:
        frame = make({"k": [7, 8], "v": ["ä", "b"]})
        await (await producer.send_frame("plain", frame, value_column="v", key_column="k"))
        await (await producer.send_frame("plain", make({"v": [b"\xff"]}), value_column="v"))
    assert fake.stream("plain").values() == ["ä".encode(), b"b", b"\xff"]


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
async def test_columns_of_a_frame_match_a_typed_stream_by_name(client: Client, fake: FakeCluster, make: Any) -> None:
    await client.admin.create_stream("typed", schema=Named)
    async with client.producer() as producer:
        await (await producer.send_frame("typed", make({"name": ["a"], "id": [1]})))
        with pytest.raises(InvalidArgument, match="leave key_column out"):
            await producer.send_frame("typed", make({"id": [1]}), key_column="id")
    assert fake.stream("typed").table().to_pylist() == [{"id": 1, "name": "a"}]


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"v": ["a"]}, {"value_column": "w"}, "value_column is 'w', and the frame has v"),
        ({"v": ["a"], "w": [1]}, {"value_column": "v"}, "columns w of the frame go nowhere"),
        ({"v": [1.5]}, {"value_column": "v"}, "a column of double, and takes one of text or bytes"),
        ({"v": [1]}, {"value_column": "v"}, "a column of int64"),
        ({"k": ["a"]}, {"key_column": "k"}, "no column of the frame is left"),
        ({"k": [1.5], "v": [1]}, {"key_column": "k"}, "a column of double"),
        ({"t": [1], "v": [1]}, {"timestamp_column": "t"}, "'t' is int64, not a time"),
    ],
)
async def test_a_frame_with_ambiguous_or_unfit_columns_is_refused(
    client: Client, fake: FakeCluster, columns: Any, options: Any, words: str
) -> None:
    async with client.producer() as producer:
        with pytest.raises(InvalidArgument, match=words):
            await producer.send_frame("plain", pa.table(columns), **options)
        naive = pa.table({"t": pa.array([0], pa.timestamp("us")), "v": ["a"]})
        with pytest.raises(SchemaMismatch, match="time zone"):
            await producer.send_frame("plain", naive, timestamp_column="t", value_column="v")
    assert fake.stream("plain").values() == []


async def test_values_of_a_frame_that_json_lacks_are_converted(
    client: Client, fake: FakeCluster, monkeypatch: Any
) -> None:
    monkeypatch.setattr(rows, "JSON_ROWS", 2)
    frame = pa.table(
        {
            "nan": [float("nan"), 1.5, None],
            "blob": [b"\xff", b"", None],
            "cost": [Decimal("1.25"), None, None],
            "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    async with client.producer() as producer:
        await (await producer.send_frame("plain", frame))
        await (await producer.send_frame("plain", frame.slice(0, 0)))
        await (await producer.send_frame("plain", frame.schema.empty_table()))
    assert [json.loads(value or b"") for value in fake.stream("plain").values()] == [
        {"nan": None, "blob": "_w==", "cost": "1.25", "map": {"a": 1}},
        {"nan": 1.5, "blob": "", "cost": None, "map": {}},
        {"nan": None, "blob": None, "cost": None, "map": None},
    ]


async def test_the_synchronous_client_sends_rows_and_frames_too(fake: FakeCluster) -> None:
    def use() -> None:
        with SyncClient(fake.bootstrap) as client:
            client.admin.create_stream("typed", schema=Order)
            with client.producer() as producer:
                assert producer.send_rows("typed", ORDERS).result()
                assert producer.send_frame("plain", pl.DataFrame({"v": ["a"]}), value_column="v").result()
                with pytest.raises(CannotEncode, match="field id of row 0"):
                    producer.send_rows("typed", [Order("x")])  # type: ignore[arg-type]
            with client.consumer("typed", start="earliest", end="latest", deserializer=Order) as consumer:
                assert [record.value for record in consumer] == ORDERS

    await asyncio.to_thread(use)
    assert fake.stream("plain").values() == [b"a"]
