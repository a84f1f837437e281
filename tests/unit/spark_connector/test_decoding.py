"""Decoding of values with registered schemas into Arrow arrays, without Spark."""

import base64
import json
import pickle
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from hypothesis import given, settings

from kera.client.serializers import AvroSerializer, Context
from kera.client.serializers.protobuf import definition_of
from kera.core.errors import CannotDecode, InvalidArgument, UnknownSchema, UnknownSubject
from kera.core.schemas import SchemaType
from kera.core.schemas.framing import frame, message_path_to_bytes
from kera.spark_connector.decoding import avro_types, json_types, protobuf_types
from kera.spark_connector.decoding.subject import Subject, Version, fetch
from kera.spark_connector.decoding.workers import Decoder
from kera.v1 import coordinator_pb2
from tests.examples import examples
from tests.unit.client.serializers.avro_values import WITHOUT_FIELD, Typed, typed_values, with_field

ORDER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "codes", "type": {"type": "map", "values": {"type": "string", "logicalType": "uuid"}}},
        {"name": "color", "type": {"type": "enum", "name": "Color", "symbols": ["RED"]}},
        {"name": "other", "type": ["null", "Color"]},
        {
            "name": "cost",
            "type": {"type": "fixed", "name": "Cost", "size": 8, "logicalType": "decimal", "precision": 9},
        },
    ],
}
VALUE = {"id": 1, "codes": {"a": uuid.UUID(int=7)}, "color": "RED", "other": None, "cost": Decimal(5)}
EXPECTED = {"id": 1, "codes": [("a", str(uuid.UUID(int=7)))], "color": "RED", "other": None, "cost": Decimal(5)}


def avro(schema: Any, schema_id: int = 1) -> Version:
    return Version(schema_id, SchemaType.AVRO, json.dumps(schema))


def framed(value: Any, schema: Any = ORDER, schema_id: int = 1) -> bytes:
    return frame(schema_id, AvroSerializer(schema, framed=False)(value, Context("orders")))


def decoder(*versions: Version, undecodable: Any = "fail") -> Decoder:
    made: Decoder = pickle.loads(pickle.dumps(Decoder(Subject("orders-value", versions), undecodable)))  # as Spark does
    return made


def test_an_avro_value_becomes_a_struct_column() -> None:
    found = decoder(avro(ORDER)).array(pa.array([framed(VALUE), None]))
    found.validate(full=True)
    assert found.to_pylist() == [EXPECTED, None]


def test_older_values_get_the_columns_of_the_newest_schema() -> None:
    older = {**ORDER, "fields": ORDER["fields"][:1]}
    newer = {**older, "fields": [*older["fields"], {"name": "paid", "type": "boolean", "default": True}]}
    found = decoder(avro(older), avro(newer, 2)).array(pa.array([framed({"id": 1}, older)]))
    assert found.to_pylist() == [{"id": 1, "paid": True}]


def test_an_undecodable_value_is_an_error_or_null() -> None:
    bad = [b"", b"nonsense", frame(9, b""), frame(1, b"\x02"), framed(VALUE) + b"x"]
    for value in bad:
        with pytest.raises(CannotDecode, match="a value of subject 'orders-value' cannot be decoded"):
            decoder(avro(ORDER)).array(pa.array([value]))
    with pytest.raises(CannotDecode, match=r"schema 9: .* registered after the query began"):
        decoder(avro(ORDER)).array(pa.array([frame(9, b"")]))
    lenient = decoder(avro(ORDER), undecodable="null")
    assert lenient.array(pa.array([*bad, framed(VALUE)])).to_pylist() == [*[None] * len(bad), EXPECTED]


def test_a_value_too_large_for_its_column_is_an_error_or_null() -> None:
    schema = {"type": "bytes", "logicalType": "decimal", "precision": 3}
    # Another writer has written more digits than the schema allows.
    large = frame(1, b"\x10" + (10**15).to_bytes(8, "big"))
    with pytest.raises(CannotDecode):
        decoder(avro(schema)).array(pa.array([large]))
    assert decoder(avro(schema), undecodable="null").array(pa.array([large, frame(1, b"\x02\x05")])).to_pylist() == [
        None,
        Decimal(5),
    ]


def nested(depth: int) -> Any:
    return "int" if not depth else {"type": "array", "items": nested(depth - 1)}


def doubled(depth: int) -> Any:
    """A schema in which each record contains the next one twice."""
    below = doubled(depth - 1) if depth else "int"
    again = f"R{depth - 1}" if depth else "int"
    return {
        "type": "record",
        "name": f"R{depth}",
        "fields": [{"name": "a", "type": below}, {"name": "b", "type": again}],
    }


NODE = {"type": "record", "name": "N", "fields": [{"name": "next", "type": ["null", "N"]}]}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (NODE, "next cannot be a column: N contains"),
        (["int", "string"], "union of several"),
        ({"type": "record", "name": "E", "fields": []}, "no fields"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 50}, "up to 38 digits"),
        ("Unheard", "no type is called"),
        ({"type": {"type": "int"}}, "no type is called {'type': 'int'}"),
        ({"type": ["null", "int"]}, "no type is called"),
        (nested(40), "levels deep"),
        (doubled(20), "more than 10000 fields"),
    ],
)
def test_an_avro_schema_without_a_column_type_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        avro_types.arrow_type_of(json.dumps(schema))


def test_the_null_of_a_union_may_be_written_as_an_object() -> None:
    assert avro_types.arrow_type_of('[{"type": "null"}, "int"]') == pa.int32()


def test_avro_names_are_resolved_in_their_namespace() -> None:
    inner = {"type": "record", "name": "Inner", "fields": [{"name": "n", "type": "int"}]}
    schema = {
        "type": "record",
        "name": "a.Outer",
        "fields": [{"name": "x", "type": inner}, {"name": "y", "type": "a.Inner"}, {"name": "z", "type": "Inner"}],
    }
    kind = avro_types.arrow_type_of(json.dumps(schema))
    assert {field.type for field in kind} == {pa.struct([("n", pa.int32())])}


def test_a_json_schema_becomes_columns() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "b": {"$ref": "#/$defs/x~1y"},
            "c": {"type": "object", "additionalProperties": {"type": "boolean"}},
            "d": {"type": ["string", "integer"]},
            "e": True,
            "f": {"type": "array"},
            "g": {"type": "string", "format": "date"},
            "h": {"$ref": "#/$defs/list/oneOf/1"},
            "i": {"$ref": "#/$defs/a%20b"},
        },
        "$defs": {
            "x/y": {"type": "number"},
            "a b": {"type": "boolean"},
            "list": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        },
    }
    assert json_types.arrow_type_of(json.dumps(schema)) == pa.struct(
        [
            ("a", pa.int64()),
            ("b", pa.float64()),
            ("c", pa.map_(pa.string(), pa.bool_())),
            ("d", pa.string()),
            ("e", pa.string()),
            ("f", pa.list_(pa.string())),
            ("g", pa.date32()),
            ("h", pa.int64()),
            ("i", pa.bool_()),
        ]
    )


def twice(depth: int) -> Any:
    definitions = {
        f"d{at}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/d{at + 1}"} for name in "ab"}}
        for at in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer"}, "neither objects nor arrays"),
        ({"$ref": "#"}, "contains itself"),
        ({"$ref": "http://somewhere/else"}, "not in the schema"),
        ({"$ref": "#/nowhere"}, "not in the schema"),
        ({"$ref": "#/allOf/2", "allOf": [{}, {}]}, "not in the schema"),
        ({"$ref": "#node", "$defs": {"node": {"$anchor": "node"}}}, r"write the place.* as in #/\$defs/node"),
        ({"$ref": 7}, "not in the schema"),
        (twice(14), "more than 10000 fields"),
    ],
)
def test_a_json_schema_without_a_column_type_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        json_types.arrow_type_of(json.dumps(schema))


def test_a_protobuf_message_becomes_columns() -> None:
    message = coordinator_pb2.CreateStreamRequest(name="s")
    message.config.streamlets = 3
    message.config.retention_consumer_groups.append("g")
    descriptor = message.DESCRIPTOR
    version = Version(1, SchemaType.PROTOBUF, definition_of(descriptor), descriptor.full_name)
    at = list(descriptor.file.message_types_by_name).index(descriptor.name)
    value = frame(1, message_path_to_bytes([at]) + message.SerializeToString())
    (found,) = decoder(version).array(pa.array([value])).to_pylist()
    assert (found["name"], found["config"]["streamlets"], found["schema"]) == ("s", 3, None)
    assert found["config"]["retention_consumer_groups"] == ["g"]


def file_of(*fields: FieldDescriptorProto, syntax: str = "proto3") -> str:
    file = FileDescriptorProto(name="t.proto", syntax=syntax, package="t")
    file.enum_type.add(name="E").value.add(name="ZERO", number=0)
    file.message_type.add(name="M", field=fields)
    return base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode()


def test_unsigned_numbers_become_decimals_and_enum_values_become_names() -> None:
    kinds = FieldDescriptorProto
    definition = file_of(
        kinds(name="u", number=1, type=kinds.TYPE_UINT64, label=kinds.LABEL_OPTIONAL),
        kinds(name="e", number=2, type=kinds.TYPE_ENUM, type_name=".t.E", label=kinds.LABEL_OPTIONAL),
        kinds(name="b", number=3, type=kinds.TYPE_BYTES, label=kinds.LABEL_REPEATED),
    )
    largest = b"\x08" + b"\xff" * 9 + b"\x01"
    values = [frame(1, b"\x00" + largest), frame(1, b"\x00\x10\x07\x1a\x01\xff")]
    assert decoder(Version(1, SchemaType.PROTOBUF, definition)).array(pa.array(values)).to_pylist() == [
        {"u": Decimal((1 << 64) - 1), "e": "ZERO", "b": []},
        {"u": Decimal(0), "e": "7", "b": [b"\xff"]},
    ]


def test_an_unset_protobuf_field_has_its_default() -> None:
    kinds = FieldDescriptorProto
    optional = kinds.LABEL_OPTIONAL
    definition = file_of(
        kinds(name="i", number=1, type=kinds.TYPE_INT32, label=optional, default_value="-7"),
        kinds(name="b", number=2, type=kinds.TYPE_BYTES, label=optional, default_value="\\000\\377"),
        kinds(name="e", number=3, type=kinds.TYPE_ENUM, type_name=".t.E", label=optional, default_value="ZERO"),
        kinds(name="none", number=4, type=kinds.TYPE_INT32, label=optional),
        syntax="proto2",
    )
    message = protobuf_types.message_class(definition, "")()
    assert protobuf_types.value_of(message) == {"i": -7, "b": b"\0\xff", "e": "ZERO", "none": None}


def test_a_protobuf_message_without_a_column_type_is_refused() -> None:
    kinds = FieldDescriptorProto
    itself = kinds(name="m", number=1, type=kinds.TYPE_MESSAGE, type_name=".t.M", label=kinds.LABEL_OPTIONAL)
    with pytest.raises(InvalidArgument, match=r"t\.M contains itself"):
        protobuf_types.arrow_type_of(protobuf_types.message_class(file_of(itself), ""))
    with pytest.raises(InvalidArgument, match="no fields"):
        protobuf_types.arrow_type_of(protobuf_types.message_class(file_of(), ""))
    for definition in ("", "nonsense", base64.b64encode(b"\xff").decode()):
        with pytest.raises(InvalidArgument, match="not a valid Protobuf schema"):
            protobuf_types.message_class(definition, "t.M")


async def test_schema_versions_too_large_for_a_task_are_refused() -> None:
    class Registry:
        async def versions(self, _subject: str) -> list[int]:
            return list(range(100))

        async def version(self, _subject: str, number: int) -> Version:
            return Version(number, SchemaType.AVRO, " " * (256 << 10))

    class Client:
        schemas = Registry()

    with pytest.raises(InvalidArgument, match="delete those"):
        await fetch(Client(), "orders-value")  # type: ignore[arg-type]


async def test_the_error_for_the_name_of_a_stream_suggests_its_subjects() -> None:
    class Registry:
        async def versions(self, subject: str) -> list[int]:
            raise UnknownSubject(f"no subject {subject}", subject=subject)

    class Client:
        schemas = Registry()

    with pytest.raises(UnknownSubject, match="are orders-value and orders-key"):
        await fetch(Client(), "orders")  # type: ignore[arg-type]
    with pytest.raises(UnknownSubject, match=r"no subject orders-key$"):
        await fetch(Client(), "orders-key")  # type: ignore[arg-type]


async def test_schema_versions_deleted_during_the_fetch_are_left_out() -> None:
    class Registry:
        async def versions(self, _subject: str) -> list[int]:
            return [1, 2]

        async def version(self, _subject: str, number: int) -> Version:
            if number == 1:
                raise UnknownSchema("gone")
            return avro(ORDER, 7)

    class Client:
        schemas = Registry()

    found = await fetch(Client(), "orders-value")  # type: ignore[arg-type]
    assert [version.schema_id for version in found.versions] == [7]


@given(typed_values().filter(lambda typed: _is_column(typed.type)))
@settings(max_examples=examples(60))
def test_an_avro_default_gives_the_same_column_as_the_written_value(typed: Typed) -> None:
    plain, newest = with_field(typed, default=False), with_field(typed, default=True)
    explicit = framed({"id": 1, "f": typed.value}, plain, 2)
    found = decoder(avro(WITHOUT_FIELD), avro(plain, 2), avro(newest, 3)).array(
        pa.array([framed({"id": 1}, WITHOUT_FIELD), explicit, framed({"id": 1}, newest, 3)])
    )
    found.validate(full=True)
    by_default, by_value, left_out = found.to_pylist()
    assert by_default == by_value == left_out
    assert by_value["f"] is not None or typed.value is None


def _is_column(kind: Any) -> bool:
    """Whether Spark has a column type for it; it has none for a record without fields."""
    try:
        avro_types.arrow_type_of(json.dumps(kind))
    except InvalidArgument:
        return False
    return True


@pytest.mark.parametrize(
    ("older", "newest"),
    [(None, "timestamp-millis"), (None, "timestamp-micros"), ("timestamp-millis", None), ("timestamp-micros", None)],
)
def test_the_newest_schema_decides_the_logical_type_of_a_number(older: str | None, newest: str | None) -> None:
    def schema(logical: str | None) -> dict[str, Any]:
        return with_field(
            Typed({"type": "long", **({"logicalType": logical} if logical else {})}, None, 0), default=True
        )

    plain = with_field(Typed("long", None, 0), default=False)
    versions = avro(schema(older)), avro(schema(newest), 2)
    found = decoder(*versions).array(pa.array([framed({"id": 1, "f": 1_500_000}, plain)])).to_pylist()[0]["f"]
    seconds = {"timestamp-millis": 1500, "timestamp-micros": 1.5}
    assert found == (datetime.fromtimestamp(seconds[newest], UTC) if newest else 1_500_000)
