"""`kera.connect.values`: rows and JSON become values with a registered schema, or are refused with the field."""

from __future__ import annotations

import datetime
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import fastavro
import pyarrow as pa
import pytest

from kera.client.serializers import AvroDeserializer, Context
from kera.connect.errors import Refused
from kera.connect.pieces import Piece, Place, Span
from kera.connect.values.avro import AvroEncoder
from kera.connect.values.columns import avro_schema_of, json_schema_of, plain_values
from kera.connect.values.encoding import Encoding, UnknownField
from kera.connect.values.json_values import JsonEncoder
from kera.connect.values.source import EncodedSource
from kera.connect.values.subject import choose
from kera.core.errors import CannotEncode, InvalidArgument, SchemaMismatch, UnknownSubject
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import unframe

CONTEXT = Context("orders")
HEADERS = [("h", b"1"), ("h", None)]
NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)


class Version(NamedTuple):
    version: int
    schema_id: int
    schema_type: SchemaType
    definition: str
    message: str = ""


class Registry:
    """A registry with one subject; its schema ids are 100 more than its versions."""

    def __init__(self, *definitions: Any, kind: SchemaType = SchemaType.AVRO) -> None:
        self.kind = kind
        self.versions = [json.dumps(each) for each in definitions]

    async def register(self, subject: str, schema_type: SchemaType, definition: str) -> Version:
        self.kind = schema_type
        if definition not in self.versions:
            self.versions.append(definition)
        return await self.latest(subject)

    async def latest(self, subject: str) -> Version:
        if not self.versions:
            raise UnknownSubject("none", subject=subject)
        return Version(len(self.versions), 100 + len(self.versions), self.kind, self.versions[-1])


class Rows:
    """A source with some rows, one piece per batch."""

    shown = identity = "table orders"
    may_shrink = False
    streamlets = 2

    def __init__(self, *batches: pa.RecordBatch) -> None:
        self.schema = batches[0].schema
        self.notes: list[str] = []
        self.batches = batches

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def left(self, places: Mapping[str, Place]) -> int | None:
        del places
        return 7

    async def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        del places, piece_bytes
        for number, batch in enumerate(self.batches):
            yield Piece("0", number, number + 1, batch, 1)

    async def kept(self, places: Mapping[str, Place]) -> None: ...

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        return [self.batches[span.start] for span in spans]


def encoded(source: Rows, registry: Registry, **encoding: Any) -> EncodedSource:
    kind = encoding.pop("kind", SchemaType.AVRO)
    return EncodedSource(source, Encoding(kind, "orders-value", **encoding), registry, "orders")


async def pieces_of(source: EncodedSource) -> list[Piece]:
    try:
        await source.open()
        return [piece async for piece in source.read({}, 1 << 20)]
    finally:
        await source.close()


def orders() -> pa.RecordBatch:
    return pa.record_batch(
        {
            "id": pa.array([1, 2], pa.int64()),
            "at": pa.array([NOON, None], pa.timestamp("us", "UTC")),
            "price": pa.array([Decimal("1.50"), None], pa.decimal128(9, 2)),
            "tags": pa.array([["a"], []], pa.list_(pa.string())),
            "by_place": pa.array([[("x", 1)], None], pa.map_(pa.string(), pa.int32())),
            "to": pa.array(
                [{"zip": "1", "day": NOON.date()}, None], pa.struct([("zip", pa.string()), ("day", pa.date32())])
            ),
            "raw": pa.array([b"\xff", None], pa.binary()),
        }
    )


def json_records(*values: Any, key: bytes | None = b"k") -> pa.RecordBatch:
    texts = [None if value is None else json.dumps(value).encode() for value in values]
    count = len(values)
    columns = [
        pa.array([NOON] * count, DEFAULT_SCHEMA.field("timestamp").type),
        pa.array([[key]] * count, DEFAULT_SCHEMA.field("keys").type),
        pa.array(texts, pa.binary()),
        pa.array([HEADERS] * count, DEFAULT_SCHEMA.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)


def order(*fields: Any) -> dict[str, Any]:
    return {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}, *fields]}


async def test_rows_become_avro_with_a_schema_derived_from_their_columns() -> None:
    registry = Registry()
    source = encoded(Rows(orders()), registry, key="id", time=None)

    (piece,) = await pieces_of(source)

    assert piece.rows.schema.names == ["keys", "value"]
    assert piece.rows.column("keys").to_pylist() == [[b"1"], [b"2"]]
    assert (piece.streamlet, source.streamlets) == (None, 0)
    values = piece.rows.column("value").to_pylist()
    (definition,) = registry.versions
    read = AvroDeserializer(definition, framed=False)
    assert [unframe(value)[0] for value in values] == [101, 101]
    assert [read(unframe(value)[1], CONTEXT) for value in values] == [
        {
            "id": 1,
            "at": NOON,
            "price": Decimal("1.50"),
            "tags": ["a"],
            "by_place": {"x": 1},
            "to": {"zip": "1", "day": NOON.date()},
            "raw": b"\xff",
        },
        {"id": 2, "at": None, "price": None, "tags": [], "by_place": None, "to": None, "raw": None},
    ]
    assert source.notes == ["values are written as avro, version 1 of subject orders-value"]


async def test_rows_become_json_with_a_schema_derived_from_their_columns() -> None:
    registry = Registry()

    source = encoded(Rows(orders().slice(0, 1)), registry, kind=SchemaType.JSON, time="at")
    (piece,) = await pieces_of(source)

    assert piece.rows.column("timestamp").to_pylist() == [NOON]
    assert piece.streamlet == 1
    schema_id, payload = unframe(piece.rows.column("value")[0].as_py())
    assert schema_id == 101
    assert json.loads(payload) == {
        "id": 1,
        "at": "2026-01-02T12:00:00Z",
        "price": "1.50",
        "tags": ["a"],
        "by_place": {"x": 1},
        "to": {"zip": "1", "day": "2026-01-02"},
        "raw": "/w==",
    }
    schema = json.loads(registry.versions[0])
    assert schema["properties"]["at"] == {"type": ["null", "string"], "format": "date-time"}
    JsonEncoder(json.dumps(schema), CONTEXT)(json.loads(payload))


async def test_json_records_keep_their_keys_times_and_headers() -> None:
    registry = Registry(order({"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}}))
    source = encoded(Rows(json_records({"id": 5, "at": "2026-01-02T12:00:00Z"}, None)), registry)

    (piece,) = await pieces_of(source)

    assert (source.streamlets, piece.streamlet) == (2, 1)
    first, second = piece.rows.to_pylist()
    assert (first["keys"], first["timestamp"], first["headers"]) == ([b"k"], NOON, HEADERS)
    assert second["value"] is None
    read = AvroDeserializer(registry.versions[0], framed=False)
    assert read(unframe(first["value"])[1], CONTEXT) == {"id": 5, "at": NOON}


async def test_a_json_value_stays_byte_for_byte() -> None:
    texts = [b'{"p": 169299987.353451120001, "id": 23958446825181076828}', b' {"p": 1.10}', b"null", None]
    rows = pa.RecordBatch.from_arrays(
        [pa.array([0] * 4).cast(DEFAULT_SCHEMA.types[0]), *(pa.nulls(4, DEFAULT_SCHEMA.types[1]), pa.array(texts))],
        schema=pa.schema([DEFAULT_SCHEMA.field(at) for at in range(3)]),
    )
    registry = Registry({"type": ["object", "null"]}, kind=SchemaType.JSON)
    (piece,) = await pieces_of(encoded(Rows(rows), registry, kind=SchemaType.JSON, key="p"))

    stored = piece.rows.column("value").to_pylist()
    assert [each and each[5:] for each in stored] == texts
    assert piece.rows.column("keys").to_pylist() == [[b"169299987.353451120001"], [b"1.10"], None, None]


async def test_a_field_of_the_value_can_be_the_key_and_the_time() -> None:
    registry = Registry(order({"name": "at", "type": "string"}))
    batch = json_records({"id": 5, "at": "2026-01-02T13:00:00+01:00"})

    (piece,) = await pieces_of(encoded(Rows(batch), registry, key="id", time="at"))

    assert piece.rows.column("keys").to_pylist() == [[b"5"]]
    assert piece.rows.column("timestamp").to_pylist() == [NOON]
    with pytest.raises(SchemaMismatch, match="--time"):
        await pieces_of(encoded(Rows(json_records({"id": 5, "at": "soon"})), registry, time="at"))
    with pytest.raises(InvalidArgument, match="--key: table orders has no column 'nope'; it has id"):
        await pieces_of(encoded(Rows(orders()), Registry(), key="nope"))


async def test_rows_that_are_read_again_become_the_same_records() -> None:
    source = encoded(Rows(orders(), orders().slice(1)), Registry(), key="id")
    await source.open()
    first = [piece.rows async for piece in source.read({}, 1 << 20)]

    again = await source.again([Span("0", 0, 1, 2), Span("0", 1, 2, 1)])
    await source.close()

    assert all(other is not None and one.equals(other) for one, other in zip(first, again, strict=True))
    assert source.identity == "table orders as avro of subject orders-value, key id"


async def test_an_added_column_becomes_an_optional_field_of_the_next_version() -> None:
    registry = Registry(order({"name": "note", "type": "string", "default": ""}))
    batch = pa.record_batch({"id": pa.array([1]), "zip": pa.array(["x"])})

    chosen = await choose(registry, "orders-value", SchemaType.AVRO, batch.schema, "table orders")

    assert chosen.version.version == 2
    fields = json.loads(chosen.version.definition)["fields"]
    assert fields[1:] == [
        {"name": "note", "type": "string", "default": ""},
        {"name": "zip", "type": ["null", "string"], "default": None},
    ]
    payload = AvroEncoder(chosen.version.definition, CONTEXT)({"id": 1, "zip": "x"})
    assert AvroDeserializer(chosen.version.definition, framed=False)(payload, CONTEXT)["note"] == ""
    same = await choose(registry, "orders-value", SchemaType.AVRO, batch.schema, "table orders")
    assert same.version.version == 2


async def test_an_added_column_becomes_a_property_of_the_next_json_version() -> None:
    registry = Registry({"type": "object", "properties": {"id": {"type": "integer"}}}, kind=SchemaType.JSON)
    columns = pa.schema([("id", pa.int64()), ("zip", pa.string())])

    chosen = await choose(registry, "orders-value", SchemaType.JSON, columns, "table orders")

    assert json.loads(chosen.version.definition)["properties"] == {
        "id": {"type": "integer"},
        "zip": {"type": ["null", "string"]},
    }


@pytest.mark.parametrize(
    ("registry", "kind", "columns", "raised", "said"),
    [
        (Registry(), SchemaType.AVRO, None, UnknownSubject, "kera schema register orders-value FILE --type avro"),
        (Registry("x", kind=SchemaType.PROTOBUF), SchemaType.AVRO, None, Refused, "type protobuf, and --value is avro"),
        (
            Registry("string"),
            SchemaType.AVRO,
            ["id"],
            SchemaMismatch,
            "version 1 of subject 'orders-value' is not a record",
        ),
        (Registry(order()), SchemaType.AVRO, ["zip"], SchemaMismatch, "field 'id' without a default"),
        (Registry(), SchemaType.AVRO, ["a b"], SchemaMismatch, "'a b' has a name that Avro does not allow"),
    ],
)
async def test_a_subject_that_does_not_fit_the_columns_is_refused(
    registry: Registry, kind: SchemaType, columns: list[str] | None, raised: type[Exception], said: str
) -> None:
    schema = None if columns is None else pa.schema([(name, pa.int64()) for name in columns])

    with pytest.raises(raised, match=said):
        await choose(registry, "orders-value", kind, schema, "table orders")


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON])
async def test_a_field_missing_in_the_schema_is_refused_with_the_command_to_register_it(kind: SchemaType) -> None:
    known = order() if kind is SchemaType.AVRO else {"type": "object", "properties": {"id": {"type": "integer"}}}
    registry = Registry(known, kind=kind)
    source = encoded(Rows(json_records({"id": 1}), json_records({"id": 2}, {"id": 3, "zip": "x"})), registry, kind=kind)

    with pytest.raises(CannotEncode) as refused:
        await pieces_of(source)
    assert refused.value.message == (
        "table orders, record 2 after 1 of part 0: version 1 of subject 'orders-value' has no field 'zip'; register a"
        f" version that has it, and start the copy again: kera schema register orders-value FILE --type {kind}"
    )


async def test_a_running_copy_uses_a_version_registered_meanwhile() -> None:
    registry = Registry(order())
    source = encoded(Rows(json_records({"id": 1}), json_records({"id": 2, "zip": "x"})), registry)
    await source.open()
    reading = source.read({}, 1 << 20)
    first = await anext(reading)

    registry.versions.append(json.dumps(order({"name": "zip", "type": ["null", "string"], "default": None})))
    second = await anext(reading)
    await source.close()

    ids = [unframe(piece.rows.column("value")[0].as_py())[0] for piece in (first, second)]
    assert ids == [101, 102]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"{", "the value is not JSON"),
        (b"\x00\x00\x00\x00\x01\x02", "copy it without --value"),
        (b'{"id": "1"}', "field id"),
        (b'{"id": 1.5}', "field id"),
        (b"[1]", "value"),
    ],
)
async def test_a_value_that_does_not_fit_is_refused_with_its_place(value: bytes, said: str) -> None:
    batch = json_records({"id": 1}, {"id": 2})
    batch = batch.set_column(2, "value", pa.array([b'{"id": 1}', value], pa.binary()))

    with pytest.raises((CannotEncode, SchemaMismatch)) as refused:
        await pieces_of(encoded(Rows(batch), Registry(order())))
    assert "record 2 after 0 of part 0" in refused.value.message
    assert said in refused.value.message


def field(kind: Any) -> str:
    return json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": kind}]})


def logical(kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


DECIMAL = logical("bytes", "decimal", precision=9, scale=2)


@pytest.mark.parametrize(
    ("kind", "given", "read"),
    [
        (logical("int", "date"), "2026-01-02", NOON.date()),
        (logical("long", "timestamp-millis"), "2026-01-02T12:00:00.000Z", NOON),
        (logical("long", "timestamp-micros"), 0, datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)),
        (logical("long", "local-timestamp-micros"), "2026-01-02T12:00:00", NOON.replace(tzinfo=None)),
        (logical("int", "time-millis"), "12:30:00", datetime.time(12, 30)),
        (DECIMAL, "1.50", Decimal("1.50")),
        (DECIMAL, 1.5, Decimal("1.50")),
        (DECIMAL, 3, Decimal("3.00")),
        (["null", DECIMAL], "1.50", Decimal("1.50")),
        (["null", "long", logical("long", "timestamp-micros")], "2026-01-02T12:00:00Z", NOON),
        ({"type": "map", "values": DECIMAL}, {"a": "1.00"}, {"a": Decimal("1.00")}),
        ("double", 1, 1.0),
    ],
)
def test_json_values_are_converted_to_the_types_of_the_avro_schema(kind: Any, given: Any, read: Any) -> None:
    payload = AvroEncoder(field(kind), CONTEXT)({"x": given})

    assert AvroDeserializer(field(kind), framed=False)(payload, CONTEXT) == {"x": read}


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (logical("int", "date"), "soon", "field x"),
        (logical("long", "timestamp-millis"), "2026-01-02T12:00:00.000001Z", "has microseconds"),
        (logical("long", "timestamp-micros"), "2026-01-02T12:00:00", "has no time zone"),
        (logical("long", "local-timestamp-micros"), "2026-01-02T12:00:00Z", "has a time zone"),
        (DECIMAL, "1.505", "scale|Scale"),
        (DECIMAL, "NaN", "not a decimal number"),
        (DECIMAL, "twelve", "field x"),
        (DECIMAL, 0.1234567890123456, "write it as text"),
        ("bytes", "abc", "for which JSON has no form"),
        ("double", 2**53 + 1, "cannot hold"),
        pytest.param("double", 10**400, "cannot hold", id="too large for a double"),
        pytest.param(["double", "string"], 10**400, "cannot be serialized", id="too large for a union"),
        ("float", 2**24 + 1, "cannot hold"),
        pytest.param("float", 2**200, "cannot hold", id="too large for a float"),
        ("int", 2**40, "x"),
        ("string", None, "x"),
    ],
)
def test_json_values_that_avro_would_change_are_refused(kind: Any, given: Any, said: str) -> None:
    with pytest.raises(CannotEncode, match=said):
        AvroEncoder(field(kind), CONTEXT)({"x": given})


def test_an_unknown_nested_field_is_named_by_its_path() -> None:
    inner = {"type": "array", "items": {"type": "record", "name": "L", "fields": [{"name": "a", "type": "int"}]}}

    with pytest.raises(UnknownField, match=r"x\[1\]\.b"):
        AvroEncoder(field(inner), CONTEXT)({"x": [{"a": 1}, {"b": 2}]})


def test_every_column_type_has_a_schema_or_is_refused_with_the_column() -> None:
    kinds = [
        *(pa.bool_(), pa.int8(), pa.int32(), pa.uint32(), pa.int64(), pa.float32(), pa.float64(), pa.string()),
        *(pa.large_string(), pa.binary(), pa.binary(4), pa.date32(), pa.time32("ms"), pa.time64("us")),
        *(pa.timestamp("ns"), pa.timestamp("ms", "UTC"), pa.decimal128(5, 2), pa.dictionary(pa.int8(), pa.string())),
    ]
    columns = pa.schema([(f"c{number}", kind) for number, kind in enumerate(kinds)])
    fastavro.parse_schema(avro_schema_of(columns, "R"))
    assert len(json_schema_of(columns)["properties"]) == len(kinds)
    derivations: list[Callable[[pa.Schema], Any]] = [lambda schema: avro_schema_of(schema, "R"), json_schema_of]
    for kind in (pa.duration("s"), pa.month_day_nano_interval(), pa.map_(pa.int32(), pa.int32())):
        nested = pa.schema([("outer", pa.struct([("inner", kind)]))])
        for derive in derivations:
            with pytest.raises(SchemaMismatch, match=r"column 'outer\.inner' is "):
                derive(nested)


def test_a_map_with_a_repeated_key_is_refused() -> None:
    column = pa.array([[[("a", 1)]], [[("a", 1), ("a", 2)]]], pa.list_(pa.map_(pa.string(), pa.int32())))

    assert plain_values(column[:1]) == [[{"a": 1}]]
    with pytest.raises(ValueError, match="twice"):
        plain_values(column)
