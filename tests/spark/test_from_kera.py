"""`from_kera`: values with registered schemas as columns; and models sent as rows."""

import dataclasses
import datetime
import enum
import uuid
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pydantic
import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, Row, functions

from kera.client import Client
from kera.client.serializers import AvroSerializer, JsonSerializer, ModelSerializer, ProtobufSerializer
from kera.core.errors import InvalidArgument, UnknownSubject
from kera.core.schemas.framing import frame
from kera.spark_connector import from_kera
from kera.v1 import common_pb2
from tests.docs_examples import ROOT, examples
from tests.spark.support import Kera, columnar_first

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)
NAIVE = NOON.replace(tzinfo=None)
"""The same time as Spark returns it."""
AVRO: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "cost", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
        {"name": "code", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {"type": "record", "name": "Line", "fields": [{"name": "price", "type": ["null", "double"]}]},
            },
        },
    ],
}
NEWER = {**AVRO, "fields": [*AVRO["fields"], {"name": "paid", "type": "boolean", "default": False}]}
VALUE: dict[str, Any] = {
    "id": 1,
    "at": NOON,
    "cost": Decimal("1.25"),
    "code": uuid.UUID(int=7),
    "tags": {"a": 1},
    "lines": [{"price": 1.5}, {"price": None}],
}
EXPECTED = {
    "id": 1,
    "at": NAIVE,
    "cost": Decimal("1.25"),
    "code": str(uuid.UUID(int=7)),
    "tags": {"a": 1},
    "lines": [{"price": 1.5}, {"price": None}],
}


def options(kera: Kera) -> dict[str, str]:
    return {"kera.bootstrap.servers": kera.bootstrap}


def send(kera: Kera, stream: str, values: Sequence[Any], **producer: Any) -> None:
    async def work(client: Client) -> None:
        async with client.producer(**producer) as sending:
            await sending.prepare(stream)
            for value in values:
                sending.send(stream, value)

    kera.run(work)


def rows(frame: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict(recursive=True) for row in frame.collect()]


@columnar_first
def test_avro_values_of_all_versions_get_the_columns_of_the_newest(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    send(kera, stream, [VALUE, None], serializer=AvroSerializer(AVRO))
    send(kera, stream, [{**VALUE, "id": 2, "paid": True}], serializer=AvroSerializer(NEWER))
    value = from_kera("value", f"{stream}-value", options(kera))
    found = rows(kera.read(stream).select("offset", value.alias("order")).orderBy("offset"))
    assert [row["order"] for row in found] == [
        {**EXPECTED, "paid": False},
        None,
        {**EXPECTED, "id": 2, "paid": True},
    ]
    streamed: list[Row] = []
    query = (
        kera.stream(stream, startingOffsets="earliest")
        .select(value.alias("order"))
        .select("order.id")
        .writeStream.foreachBatch(lambda frame, _: streamed.extend(frame.collect()))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(row.id or 0 for row in streamed) == [0, 1, 2]


@pytest.mark.slow
def test_from_kera_gives_the_same_columns_without_arrow_udfs(
    kera: Kera, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(functions, "arrow_udf")  # as before Spark 4.1
    kera.create(stream)
    send(kera, stream, [VALUE, None], serializer=AvroSerializer(AVRO))
    value = from_kera("value", f"{stream}-value", options(kera))
    found = rows(kera.read(stream).select("offset", value.alias("order")).orderBy("offset"))
    assert [row["order"] for row in found] == [EXPECTED, None]


def test_an_undecodable_value_ends_the_query_or_is_null(kera: Kera, stream: str) -> None:
    kera.create(stream)
    send(kera, stream, [VALUE], serializer=AvroSerializer(AVRO))
    send(kera, stream, [b"nonsense", frame(1 << 30, b"x"), b"\x00", frame(1, b"\x02" * 1000)])
    name = f"{stream}-value"
    with pytest.raises(PythonException, match="cannot be decoded"):
        kera.read(stream).select(from_kera("value", name, options(kera))).collect()
    lenient = from_kera("value", name, options(kera), undecodable="null")
    found = rows(kera.read(stream).select("offset", lenient.alias("order")).orderBy("offset"))
    assert [row["order"] is None for row in found] == [False, True, True, True, True]


def test_json_is_decoded_by_its_schema_with_a_frame_and_without(kera: Kera, stream: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "name": {"type": ["string", "null"]},
            "at": {"type": "string", "format": "date-time"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}},
            "any": {},
        },
        "$defs": {"Line": {"type": "object", "properties": {"price": {"type": "number"}}}},
    }
    kera.create(stream)
    value = {"id": 1, "name": None, "at": "2026-01-02T12:00:00Z", "lines": [{"price": 1.5}], "any": {"x": [1]}}
    send(kera, stream, [value], serializer=JsonSerializer(schema))
    send(kera, stream, [b'{"id": 2}', b"nonsense"])
    lenient = from_kera("value", f"{stream}-value", options(kera), undecodable="null").alias("v")
    found = rows(kera.read(stream).select("offset", lenient).orderBy("offset"))
    empty = dict.fromkeys(value)
    assert [row["v"] for row in found] == [{**value, "at": NAIVE, "any": '{"x":[1]}'}, {**empty, "id": 2}, empty]
    with pytest.raises(Exception, match="MALFORMED_RECORD"):
        kera.read(stream).select(from_kera("value", f"{stream}-value", options(kera))).collect()


@pytest.mark.slow
def test_a_protobuf_message_becomes_columns(kera: Kera, stream: str) -> None:
    kera.create(stream)
    message = common_pb2.StreamConfig(streamlets=3, retention_consumer_groups=["a", "b"])
    send(kera, stream, [message], serializer=ProtobufSerializer(common_pb2.StreamConfig))
    value = from_kera("value", f"{stream}-value", options(kera)).alias("v")
    (row,) = kera.read(stream).select(value).select("v.*").collect()
    assert (row.streamlets, row.retention_consumer_groups) == (3, ["a", "b"])
    assert (row.codec, row.replication, row.retention_ms) == ("CODEC_NONE", None, 0)


def test_from_kera_refuses_unknown_subjects_unions_and_wrong_options(kera: Kera, stream: str) -> None:
    kera.create(stream)
    with pytest.raises(UnknownSubject):
        from_kera("value", f"{stream}-value", options(kera))
    union = {"type": "record", "name": "R", "fields": [{"name": "f", "type": ["int", "string"]}]}
    send(kera, stream, [{"f": 1}], serializer=AvroSerializer(union))
    with pytest.raises(InvalidArgument, match="f cannot be a column: a union"):
        from_kera("value", f"{stream}-value", options(kera))
    with pytest.raises(InvalidArgument, match="takes fail or null"):
        from_kera("value", f"{stream}-value", options(kera), undecodable="skip")  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_example_of_the_page_runs(kera: Kera, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = (each for each in examples(ROOT / "docs" / "serializers.md", "python") if "spark" in each.text)
    kera.create("orders")
    try:
        send(kera, "orders", [VALUE], serializer=AvroSerializer(AVRO))
        exec(
            compile(example.text.replace("127.0.0.1:7400", kera.bootstrap), str(example), "exec"), {"spark": kera.spark}
        )
    finally:
        kera.delete("orders")
    assert "|lines|" in capsys.readouterr().out.replace(" ", "")


# --- models as rows -----------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Line:
    price: float
    note: str | None = None


@dataclasses.dataclass
class Order:
    id: int
    at: datetime.datetime
    day: datetime.date
    cost: Decimal
    color: Color
    code: uuid.UUID
    blob: bytes
    line: Line
    lines: list[Line]
    tags: dict[str, int]
    maybe: int | None = None


class Item(pydantic.BaseModel):
    id: int
    lines: list[Line]
    cost: Decimal = pydantic.Field(max_digits=10, decimal_places=2)


ORDERS = [
    Order(
        number,
        NOON,
        NOON.date(),
        Decimal("1.25"),
        Color.RED,
        uuid.UUID(int=7),
        b"\xff",
        Line(1.5),
        [Line(2.5, "x")] * number,
        {"a": number},
        number or None,
    )
    for number in range(3)
]
ITEMS = [Item(id=number, lines=[Line(1.5)], cost=Decimal("1.25")) for number in range(3)]


@columnar_first
def test_models_sent_as_rows_are_rows_in_spark(kera: Kera, stream: str) -> None:
    kera.create(f"{stream}-orders", schema=Order, key_column="id")
    kera.create(f"{stream}-items", schema=Item)

    async def work(client: Client) -> None:
        async with client.producer() as producer:
            await producer.send_rows(f"{stream}-orders", ORDERS)
            await producer.send_rows(f"{stream}-items", ITEMS)

    kera.run(work)
    expected = [{**dataclasses.asdict(order), "at": NAIVE, "color": "red", "code": str(order.code)} for order in ORDERS]
    assert rows(kera.read(f"{stream}-orders").orderBy("id")) == expected
    assert rows(kera.read(f"{stream}-items").orderBy("id")) == [
        {"id": item.id, "lines": [dataclasses.asdict(line) for line in item.lines], "cost": item.cost} for item in ITEMS
    ]


@pytest.mark.slow
def test_pandas_and_polars_frames_are_rows_in_spark(kera: Kera, stream: str) -> None:
    kera.create(stream, schema=Line)
    columns = {"price": [1.5, 2.5], "note": ["x", None]}

    async def work(client: Client) -> None:
        async with client.producer() as producer:
            await producer.send_frame(stream, pd.DataFrame(columns))
            await producer.send_frame(stream, pl.DataFrame(columns))

    kera.run(work)
    expected = [{"price": 1.5, "note": "x"}, {"price": 2.5, "note": None}]
    assert sorted(rows(kera.read(stream)), key=lambda row: row["price"]) == [expected[0]] * 2 + [expected[1]] * 2


@pytest.mark.slow
def test_json_made_by_a_model_becomes_columns(kera: Kera, stream: str) -> None:
    kera.create(stream)
    send(kera, stream, ITEMS, serializer=ModelSerializer(Item, framed=True))
    value = from_kera("value", f"{stream}-value", options(kera)).alias("v")
    found = rows(kera.read(stream).select(value).select("v.id", "v.lines").orderBy("id"))
    assert found[0] == {"id": 0, "lines": [{"price": 1.5, "note": None}]}
