"""Serialized values are read back equal, and any bytes are a value or are refused."""

import dataclasses
import datetime
import enum
import uuid
from decimal import Decimal
from typing import Annotated, Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kera.client.serializers import (
    AvroDeserializer,
    AvroSerializer,
    BytesDeserializer,
    BytesSerializer,
    Context,
    IntDeserializer,
    IntSerializer,
    JsonDeserializer,
    JsonSerializer,
    ModelDeserializer,
    ModelSerializer,
    MsgpackDeserializer,
    MsgpackSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
    StrDeserializer,
    StrSerializer,
)
from kera.client.serializers.columns import columns_of
from kera.core.errors import CannotDecode, CannotEncode
from kera.v1 import common_pb2

CONTEXT = Context("s")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TIMES = st.datetimes(timezones=st.just(datetime.UTC))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)
NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
MSGPACK = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.binary() | TIMES,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)
AVRO_SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Node",
    "fields": [
        {"name": "text", "type": "string"},
        {"name": "number", "type": ["null", "long"]},
        {"name": "real", "type": "double"},
        {"name": "blob", "type": "bytes"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "cost", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {"name": "nothings", "type": {"type": "array", "items": "null"}},
        {"name": "below", "type": {"type": "array", "items": "Node"}},
    ],
}
NO_NODES: st.SearchStrategy[list[Any]] = st.just([])
AVRO = st.recursive(
    NO_NODES,
    lambda inner: st.lists(
        st.fixed_dictionaries(
            {
                "text": TEXT,
                "number": st.none() | INT64,
                "real": st.floats(allow_nan=False),
                "blob": st.binary(),
                "at": TIMES,
                "cost": st.decimals(-(10**9), 10**9, places=2),
                "tags": st.dictionaries(TEXT, st.integers(-(1 << 31), (1 << 31) - 1)),
                "nothings": st.lists(st.none()),
                "below": inner,
            }
        ),
        min_size=1,
        max_size=2,
    ),
    max_leaves=4,
).filter(bool)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Line:
    price: float
    blob: bytes


@dataclasses.dataclass
class Order:
    number: int
    text: str | None
    at: datetime.datetime
    day: datetime.date
    cost: Decimal
    color: Color
    code: uuid.UUID
    lines: list[Line]
    tags: dict[str, int]


ORDERS = st.builds(
    Order,
    number=st.integers(-(10**30), 10**30),
    text=st.none() | TEXT,
    at=TIMES,
    cost=st.decimals(allow_nan=False, allow_infinity=False),
    lines=st.lists(st.builds(Line, price=st.floats(allow_nan=False), blob=st.binary())),
    tags=st.dictionaries(TEXT, st.integers()),
)
CURSORS = st.builds(common_pb2.Cursor, stream_id=st.integers(0, (1 << 32) - 1), group_id=st.integers(0, (1 << 32) - 1))
AVRO_PAIR = AvroSerializer(AVRO_SCHEMA, framed=False), AvroDeserializer(AVRO_SCHEMA, framed=False)
CURSOR = common_pb2.Cursor
PROTOBUF_PAIR = ProtobufSerializer(CURSOR, framed=False), ProtobufDeserializer(CURSOR, framed=False)
PAIRS: dict[str, tuple[Any, Any, st.SearchStrategy[Any]]] = {
    "json": (JsonSerializer(), JsonDeserializer(), JSON),
    "avro": (*AVRO_PAIR, AVRO.map(lambda nodes: nodes[0])),
    "msgpack": (MsgpackSerializer(), MsgpackDeserializer(), MSGPACK),
    "model": (ModelSerializer(Order), ModelDeserializer(Order), ORDERS),
    "protobuf": (*PROTOBUF_PAIR, CURSORS),
    "str": (StrSerializer(), StrDeserializer(), TEXT),
    "int": (IntSerializer(), IntDeserializer(), INT64),
    "bytes": (BytesSerializer(), BytesDeserializer(), st.binary()),
}


@dataclasses.dataclass
class Row:
    number: int
    text: str | None
    at: datetime.datetime
    day: datetime.date
    span: datetime.timedelta
    cost: Annotated[Decimal, pa.decimal128(12, 2)]
    color: Color | None
    code: uuid.UUID
    line: Line | None
    lines: list[Line | None] | None
    tags: dict[str, list[int]] | None
    words: frozenset[str]


LINES = st.builds(Line, price=st.floats(allow_nan=False), blob=st.binary(max_size=8))
ROWS = st.builds(
    Row,
    number=INT64,
    text=st.none() | TEXT,
    at=TIMES,
    span=st.timedeltas(datetime.timedelta(days=-(10**8)), datetime.timedelta(days=10**8)),
    cost=st.decimals(-(10**9), 10**9, places=2),
    line=st.none() | LINES,
    lines=st.none() | st.lists(st.none() | LINES, max_size=3),
    tags=st.none() | st.dictionaries(TEXT, st.lists(INT64, max_size=3), max_size=3),
    words=st.frozensets(TEXT, max_size=3),
)


@given(st.lists(ROWS, max_size=5))
def test_rows_of_models_are_read_back_equal(rows: list[Row]) -> None:
    columns = columns_of(Row)
    batch = columns.batch(rows, columns.schema, "s")
    batch.validate(full=True)
    assert [columns.row(row) for row in batch.to_pylist()] == rows


@pytest.mark.parametrize("name", PAIRS)
@given(st.data())
def test_a_serialized_value_is_read_back_equal(name: str, data: st.DataObject) -> None:
    serializer, deserializer, values = PAIRS[name]
    value = data.draw(values)
    assert deserializer(serializer(value, CONTEXT), CONTEXT) == value


@pytest.mark.parametrize("name", PAIRS)
@given(st.data())
def test_changed_bytes_are_a_value_or_refused(name: str, data: st.DataObject) -> None:
    serializer, deserializer, values = PAIRS[name]
    spoilt = bytearray(serializer(data.draw(values), CONTEXT))
    for _ in range(data.draw(st.integers(0, 4))):
        if spoilt:
            spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
    del spoilt[data.draw(st.just(len(spoilt)) | st.integers(0, len(spoilt))) :]
    try:
        deserializer(bytes(spoilt), CONTEXT)
    except CannotDecode as error:
        assert error.attributes.get("reason") or error.message  # noqa: PT017 - it may be read as well


@pytest.mark.parametrize("name", PAIRS)
@given(st.binary(max_size=64))
@example(b"")
def test_any_bytes_are_a_value_or_refused(name: str, data: bytes) -> None:
    try:
        PAIRS[name][1](data, CONTEXT)
    except CannotDecode as error:
        assert str(error)  # noqa: PT017 - they may be read as well


@pytest.mark.parametrize("name", ["json", "msgpack", "avro", "model", "str", "int"])
@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.dates() | st.builds(object),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=10,
    )
)
def test_any_value_is_read_back_equal_or_refused(name: str, value: Any) -> None:
    serializer, deserializer, _ = PAIRS[name]
    try:
        data = serializer(value, CONTEXT)
    except CannotEncode as error:
        assert error.attributes["stream"] == "s"  # noqa: PT017 - it may be written as well
    else:
        assert repr(deserializer(data, CONTEXT)) == repr(value)  # NaN is not equal to itself, and true is equal to 1
