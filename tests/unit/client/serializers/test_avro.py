"""Avro: schemas, values, and bounds that protect the reader from hostile bytes."""

import datetime
import io
import json
from decimal import Decimal
from typing import Any

import fastavro
import pytest

from kera.client import RegisteredSchema
from kera.client.serializers import AvroDeserializer, AvroSerializer
from kera.client.serializers.avro_limits import Limits
from kera.core.errors import CannotDecode, CannotEncode, InvalidArgument
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import unframe
from tests.unit.client.serializers.fake_registry import FakeRegistry
from tests.unit.client.serializers.support import CONTEXT, framed_round_trip, ready

LINE = {"type": "record", "name": "Line", "fields": [{"name": "price", "type": "double"}]}
ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "lines", "type": {"type": "array", "items": LINE}},
        {"name": "note", "type": "string", "default": ""},
    ],
}
NODE = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
TWO_NODES = {"type": "record", "name": "R", "fields": [{"name": "a", "type": NODE}, {"name": "b", "type": "Node"}]}
PEAR = {"id": 1, "lines": [{"price": 1.5}], "note": "ripe"}


def unframed(schema: Any) -> tuple[AvroSerializer, AvroDeserializer]:
    return AvroSerializer(schema, framed=False), AvroDeserializer(schema, framed=False)


async def test_a_value_is_read_with_the_schema_that_it_names() -> None:
    assert await framed_round_trip(AvroSerializer(ORDER), AvroDeserializer(), PEAR) == PEAR
    assert await framed_round_trip(AvroSerializer(json.dumps(ORDER)), AvroDeserializer(), PEAR) == PEAR


async def test_a_value_is_resolved_to_the_schema_of_the_reader() -> None:
    newer = {**ORDER, "fields": [ORDER["fields"][0], {"name": "paid", "type": "boolean", "default": True}]}
    assert await framed_round_trip(AvroSerializer(ORDER), AvroDeserializer(newer), PEAR) == {"id": 1, "paid": True}
    other = {**ORDER, "fields": [{"name": "id", "type": "string"}]}
    with pytest.raises(CannotDecode):
        await framed_round_trip(AvroSerializer(ORDER), AvroDeserializer(other), PEAR)


async def test_a_schema_parsed_by_fastavro_is_registered_without_its_private_fields() -> None:
    registry = FakeRegistry()
    await ready(AvroSerializer(fastavro.parse_schema(dict(ORDER))), registry)
    assert "__" not in registry.schemas[0].definition


@pytest.mark.parametrize(
    ("value", "field", "words"),
    [
        ({**PEAR, "id": 1 << 40}, "id", "int"),  # the library would write this value
        ({**PEAR, "id": 1.5}, "id", "float"),
        ({**PEAR, "lines": [{"price": "x"}]}, "lines.Line.price", "str"),
        ({"id": 1}, "lines", "None"),
        ({**PEAR, "nte": "a slip"}, "", "nte"),
        ({**PEAR, "note": "\ud800"}, "", "surrogates"),
        (7, "", "7"),
        (None, "", "None"),
    ],
)
def test_the_error_for_a_value_outside_the_schema_names_the_field(value: Any, field: str, words: str) -> None:
    serializer, _ = unframed(ORDER)
    with pytest.raises(CannotEncode, match=words) as caught:
        serializer(value, CONTEXT)
    assert caught.value.attributes["field"] == field
    assert "__" not in caught.value.message


def logical(kind: str, name: str) -> dict[str, str]:
    return {"type": kind, "logicalType": name}


NOON = datetime.datetime(2026, 1, 2, 12, 0, 0, 123456, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (logical("long", "timestamp-millis"), NOON, r"would be read as 2026-01-02 12:00:00\.123000"),
        (logical("long", "timestamp-micros"), NOON.replace(tzinfo=None), "no time zone, and its type needs one"),
        (logical("long", "local-timestamp-micros"), NOON, "its type has no time zone"),
        (logical("int", "time-millis"), datetime.time(12, 0, 0, 1), "would be read as 12:00:00"),
        (logical("long", "time-micros"), datetime.time(12, tzinfo=datetime.UTC), "its type has no time zone"),
        (logical("int", "date"), NOON.replace(tzinfo=None), "would be read as 2026-01-02"),
        (logical("string", "uuid"), "no UUID", "not a UUID"),
        ("double", 2**53 + 1, "cannot hold exactly"),
        (["null", "float"], 2**24 + 1, "cannot hold exactly"),
        ("float", 1e300, "out of the range"),
        ("float", 1e-300, "out of the range"),
        ({"type": "map", "values": ["string", "double"]}, {"a": 2**53 + 1}, "cannot hold exactly"),
    ],
)
def test_a_value_that_would_read_back_differently_is_refused(kind: Any, value: Any, words: str) -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "f", "type": {"type": "array", "items": kind}}]}
    with pytest.raises(CannotEncode, match=words) as caught:
        unframed(schema)[0]({"f": [value]}, CONTEXT)
    assert str(caught.value.attributes["field"]).startswith("f[0]") or words == "not a UUID"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (logical("long", "timestamp-millis"), NOON.replace(microsecond=123000)),
        (logical("long", "local-timestamp-micros"), NOON.replace(tzinfo=None)),
        (logical("int", "date"), NOON.date()),
        ("double", 2**53),
        ("float", float("inf")),
    ],
)
def test_a_value_that_its_type_holds_exactly_reads_back_the_same(kind: Any, value: Any) -> None:
    write, read = unframed(kind)
    assert read(write(value, CONTEXT), CONTEXT) == value


def test_malformed_bytes_are_refused() -> None:
    serializer, deserializer = unframed(ORDER)
    data = serializer(PEAR, CONTEXT)
    for bad in (b"", data[:-1], data + b"x", b"\xff" * 100):
        with pytest.raises(CannotDecode):
            deserializer(bad, CONTEXT)


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_deeply_nested_values_are_refused(depth: int) -> None:
    serializer, deserializer = unframed(NODE)
    with pytest.raises(CannotDecode, match="deep"):
        deserializer(b"\x02" * depth + b"\x00", CONTEXT)
    value: Any = None
    for _ in range(depth):
        value = {"next": value}
    with pytest.raises(CannotEncode, match="deep"):
        serializer(value, CONTEXT)
    while value:  # freeing the whole value at once goes deep too
        value = value.pop("next")


def test_a_value_that_contains_itself_is_refused() -> None:
    value: dict[str, Any] = {}
    value["next"] = value
    with pytest.raises(CannotEncode, match="contains itself"):
        unframed(NODE)[0](value, CONTEXT)
    twice = {"type": "record", "name": "T", "fields": [{"name": "both", "type": {"type": "array", "items": "T"}}]}
    value = {}
    value["both"] = [value, value]
    with pytest.raises(CannotEncode, match="contains itself"):
        unframed(twice)[0](value, CONTEXT)


def test_a_recursive_value_of_moderate_depth_reads_back_the_same() -> None:
    serializer, deserializer = unframed(NODE)
    value: Any = None
    for _ in range(60):
        value = {"next": value}
    assert deserializer(serializer(value, CONTEXT), CONTEXT) == value


def long_of(number: int) -> bytes:
    """The number as Avro writes it."""
    left, made = number << 1 if number >= 0 else (-number << 1) - 1, bytearray()
    while left > 0x7F:
        made.append(left & 0x7F | 0x80)
        left >>= 7
    return bytes([*made, left])


@pytest.mark.parametrize(
    "items",
    [
        "null",
        {"type": "fixed", "name": "F", "size": 0},
        {"type": "record", "name": "E", "fields": []},
        {"type": "record", "name": "E", "fields": [{"name": "n", "type": "null"}]},
    ],
)
def test_the_number_of_items_without_bytes_is_bounded(items: Any) -> None:
    _, deserializer = unframed({"type": "array", "items": items})
    for count in (100_000, (1 << 63) - 1):
        with pytest.raises(CannotDecode, match="too many parts of no size"):
            deserializer(long_of(count) + b"\x00", CONTEXT)
    assert len(deserializer(long_of(3) + b"\x00", CONTEXT)) == 3


def doubled(depth: int, leaf: Any) -> Any:
    """A record that has the next record twice, and so on."""
    if not depth:
        return leaf
    again = f"R{depth - 1}" if depth > 1 else leaf
    fields = [{"name": "a", "type": doubled(depth - 1, leaf)}, {"name": "b", "type": again}]
    return {"type": "record", "name": f"R{depth}", "fields": fields}


def test_a_schema_whose_empty_value_has_too_many_parts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a value of 0 bytes may have"):
        AvroDeserializer(doubled(19, "null"), framed=False)
    # As many parts that have bytes do no harm: the data lacks the bytes.
    with pytest.raises(CannotDecode):
        AvroDeserializer(doubled(19, "int"), framed=False)(b"\x00" * 100, CONTEXT)
    items = {"type": "array", "items": ["null", doubled(12, "null")]}
    with pytest.raises(CannotDecode, match="too many parts of no size"):
        unframed(items)[1](long_of(50) + b"\x02" * 50 + b"\x00", CONTEXT)


def a_record(name: str, *types: Any) -> dict[str, Any]:
    fields = [{"name": f"f{number}", "type": each} for number, each in enumerate(types)]
    return {"type": "record", "name": name, "fields": fields}


@pytest.mark.parametrize("of", ["items", "values"])
def test_items_of_one_byte_with_dozens_of_parts_each_are_bounded(of: str) -> None:
    """Otherwise each byte would take kilobytes of memory, and a value of a megabyte would take gigabytes."""
    kind = "array" if of == "items" else "map"
    item = b"\x01" if of == "items" else b"\x00\x01"
    sparse = {"type": kind, of: a_record("Sparse", "boolean", *["null"] * 40)}
    deserializer = AvroDeserializer(sparse, framed=False)
    assert len(deserializer(long_of(1) + item + b"\x00", CONTEXT)) == 1
    with pytest.raises(CannotDecode, match="too many parts of no size"):
        deserializer(long_of(1000) + item * 1000 + b"\x00", CONTEXT)


def test_reading_a_value_does_not_parse_a_schema_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing thousands of types would take a second, and an error about a value that fits none of them minutes."""
    types = ["null", a_record("R", "int")]
    values: list[tuple[Any, bytes, Any]] = [
        (types, long_of(1) + long_of(7), {"f0": 7}),
        ({"type": "array", "items": types}, long_of(1) + b"\x00\x00", [None]),
        ({"type": "map", "values": types}, long_of(1) + b"\x02a\x00\x00", {"a": None}),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, b"\x02", "B"),
        (types[1], long_of(7), {"f0": 7}),
    ]
    deepest: Any = "int"
    for _ in range(63):
        deepest = {"type": "array", "items": deepest}
    values.append((deepest, b"\x00", []))
    readers = [AvroDeserializer(schema, framed=False) for schema, _, _ in values]
    parse, parsed = fastavro.parse_schema, []

    def counted(schema: Any, *args: Any, **options: Any) -> Any:
        parsed.append("__fastavro_parsed" in schema)
        return parse(schema, *args, **options)

    monkeypatch.setattr("fastavro._read.parse_schema", counted)
    assert [reader(data, CONTEXT) for reader, (_, data, _) in zip(readers, values, strict=True)] == [
        value for _, _, value in values
    ]
    assert parsed == [True] * len(values)


@pytest.mark.parametrize(
    "wanted", [["null", "long"], a_record("R", "long"), {"type": "array", "items": "long"}, "long"]
)
def test_a_branch_of_a_union_is_resolved_to_the_matching_type_of_the_reader(wanted: Any) -> None:
    branches = ["null", "int", a_record("R", "int"), {"type": "array", "items": "int"}]
    values = {"null": None, "long": 7, "R": {"f0": 7}, "array": [7]}
    fit = {"array": 3, "record": 2}.get(wanted["type"], 1) if isinstance(wanted, dict) else 1
    written = io.BytesIO()
    fastavro.schemaless_writer(written, branches, list(values.values())[fit])
    schema = RegisteredSchema("s-value", 1, 1, SchemaType.AVRO, json.dumps(branches))
    assert AvroDeserializer(wanted).reader_of(schema)(written.getvalue(), CONTEXT) == list(values.values())[fit]


def test_only_types_with_more_parts_than_bytes_need_bounds() -> None:
    large = a_record("Large", *["long"] * 100)
    ordinary = a_record("Ordinary", ["null", "string"], ["null", large], {"type": "array", "items": "long"})
    assert not Limits({"type": "array", "items": ordinary}).unbounded
    assert not Limits({"type": "map", "values": ["null", large]}).unbounded
    assert Limits({"type": "array", "items": a_record("Sparse", "boolean", *["null"] * 3)}).unbounded


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: Any = "int"
    for _ in range(5_000):
        schema = {"type": "array", "items": schema} if isinstance(schema, str) else [schema]
    text = '{"type":"array","items":' * 5_000 + '"int"' + "}" * 5_000
    for given in (text, schema):
        with pytest.raises(InvalidArgument):
            AvroSerializer(given)


@pytest.mark.parametrize(
    "kind", ["string", "bytes", {"type": "map", "values": "int"}, {"type": "array", "items": "int"}]
)
@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 62), -5])
def test_lengths_beyond_the_end_of_the_data_are_refused(kind: Any, length: int) -> None:
    with pytest.raises(CannotDecode):
        unframed(kind)[1](long_of(length) + b"x", CONTEXT)


def test_a_decimal_of_very_many_digits_is_refused() -> None:
    serializer, deserializer = unframed({"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2})
    assert deserializer(serializer(Decimal("1.25"), CONTEXT), CONTEXT) == Decimal("1.25")
    with pytest.raises(CannotDecode, match="a decimal has 1048576 bytes"):
        deserializer(long_of(1 << 20) + b"x" * (1 << 20), CONTEXT)


@pytest.mark.parametrize(
    ("schema", "recursive", "unbounded"),
    [
        (ORDER, False, False),
        ({"type": "map", "values": "null"}, False, False),  # each entry has a name of at least a byte
        (NODE, True, True),
        ({"type": "array", "items": NODE}, True, True),
        (["null", {"type": "array", "items": ["null"]}], False, False),
        ({"type": "array", "items": {"type": "array", "items": "null"}}, False, True),
        (TWO_NODES, True, True),
    ],
)
def test_limits_find_recursive_types_and_types_of_unbounded_size(schema: Any, recursive: bool, unbounded: bool) -> None:
    limits = Limits(fastavro.parse_schema(schema))
    assert (limits.recursive, limits.unbounded) == (recursive, unbounded)


@pytest.mark.parametrize("schema", ["no JSON", {"type": "record"}, "[" * 10_000, {"type": "Unheard"}, 7, None])
def test_an_invalid_schema_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidArgument):
        AvroSerializer(schema)
    with pytest.raises(InvalidArgument):
        AvroDeserializer(schema, framed=False)


async def test_a_registered_schema_that_is_not_avro_is_refused() -> None:
    registry = FakeRegistry()
    await registry.register("orders-value", SchemaType.JSON, "{}")
    await registry.register("orders-value", SchemaType.AVRO, "nonsense")
    for schema in registry.schemas:
        with pytest.raises(CannotDecode, match=f"schema {schema.schema_id}"):
            AvroDeserializer().reader_of(schema)


async def test_a_value_begins_with_the_schema_id_of_its_subject() -> None:
    registry = FakeRegistry()
    data = (await ready(AvroSerializer(ORDER), registry))(PEAR, CONTEXT)
    assert unframe(data)[0] == registry.schemas[0].schema_id
    assert registry.schemas[0].subject == "orders-value"


def test_an_unprepared_serializer_or_deserializer_says_so() -> None:
    with pytest.raises(CannotEncode, match="not ready"):
        AvroSerializer(ORDER)(PEAR, CONTEXT)
    with pytest.raises(CannotDecode, match="give the deserializer to a consumer"):
        AvroDeserializer()(b"", CONTEXT)
