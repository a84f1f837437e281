"""Avro defaults: readers get the default's value, and so do writers that leave the field out."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings

from kera.client import RegisteredSchema
from kera.client.serializers import AvroDeserializer, AvroSerializer
from kera.core.errors import CannotDecode, InvalidArgument
from kera.core.schemas import SchemaType
from tests.examples import examples
from tests.unit.client.serializers.avro_values import WITHOUT_FIELD, Typed, typed_values, with_field
from tests.unit.client.serializers.support import CONTEXT


def written(schema: Any, value: Any) -> bytes:
    return AvroSerializer(schema, framed=False).payload(value, CONTEXT)


def read(data: bytes, written_with: Any, wanted: Any) -> Any:
    schema = RegisteredSchema("s-value", 1, 1, SchemaType.AVRO, json.dumps(written_with))
    return AvroDeserializer(wanted).reader_of(schema)(data, CONTEXT)


@given(typed_values())
@settings(max_examples=examples(80))
def test_a_default_reads_the_same_as_its_written_value(typed: Typed) -> None:
    wanted, plain = with_field(typed, default=True), with_field(typed, default=False)
    explicit = read(written(plain, {"id": 1, "f": typed.value}), plain, wanted)
    by_default = read(written(WITHOUT_FIELD, {"id": 1}), WITHOUT_FIELD, wanted)
    assert by_default == explicit == {"id": 1, "f": typed.value}
    assert repr(by_default["f"]) == repr(explicit["f"])  # the types are equal too


@given(typed_values())
@settings(max_examples=examples(80))
def test_a_writer_may_leave_out_a_field_with_a_default(typed: Typed) -> None:
    schema = with_field(typed, default=True)
    data = written(schema, {"id": 1})
    assert data == written(schema, {"id": 1, "f": typed.value})
    assert AvroDeserializer(schema, framed=False)(data, CONTEXT) == {"id": 1, "f": typed.value}


@pytest.mark.parametrize("wrap", [lambda each: ["null", each], lambda each: {"type": "array", "items": each}])
def test_defaults_of_records_within_other_types_are_converted(wrap: Any) -> None:
    typed = Typed({"type": "int", "logicalType": "date"}, None, 0)
    older, newer = wrap(WITHOUT_FIELD), wrap(with_field(typed, default=True))
    value = {"id": 1} if isinstance(older, list) else [{"id": 1}]
    found = read(written(older, value), older, newer)
    assert str((found if isinstance(found, dict) else found[0])["f"]) == "1970-01-01"


def test_a_default_may_be_of_a_type_that_is_referenced_by_name() -> None:
    money = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    price = {"type": "record", "name": "Price", "namespace": "shop", "fields": [{"name": "of", "type": money}]}
    fields = [{"name": "a", "type": price}, {"name": "b", "type": ["null", "Price"], "default": {"of": "\u0064"}}]
    newer = {"type": "record", "name": "shop.R", "fields": fields}
    older = {"type": "record", "name": "shop.R", "fields": fields[:1]}
    found = read(written(older, {"a": {"of": b"\x01"}}), older, newer)
    assert str(found) == "{'a': {'of': Decimal('0.01')}, 'b': {'of': Decimal('1.00')}}"


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_a_default_that_is_nan_or_infinite_is_text(text: str) -> None:
    found = read(
        written(WITHOUT_FIELD, {"id": 1}), WITHOUT_FIELD, with_field(Typed("double", None, text), default=True)
    )
    assert str(found["f"]) == str(float(text))


def test_values_do_not_share_the_lists_and_mappings_of_a_default() -> None:
    typed = Typed({"type": "map", "values": {"type": "array", "items": "int"}}, None, {"a": [1]})
    wanted = with_field(typed, default=True)
    schema = RegisteredSchema("s-value", 1, 1, SchemaType.AVRO, json.dumps(WITHOUT_FIELD))
    reader, data = AvroDeserializer(wanted).reader_of(schema), written(WITHOUT_FIELD, {"id": 1})
    first = reader(data, CONTEXT)
    first["f"]["a"].append(2)
    first["f"]["b"] = []
    assert reader(data, CONTEXT)["f"] == {"a": [1]}


@pytest.mark.parametrize(
    ("kind", "default", "why"),
    [
        ("int", True, "is not of type int"),
        ("int", 1 << 31, "is not of type int"),
        ("float", 1e39, "too large for a float"),
        ("bytes", "\u0100", "stand for no byte"),
        ({"type": "fixed", "name": "F", "size": 2}, "a", "has 1 bytes, and F has 2"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "B", "not a symbol of E"),
        ({"type": "array", "items": "int"}, ["a"], "is not of type int"),
        (["null", "int"], "a", "no branch"),
        ({"type": "record", "name": "S", "fields": [{"name": "x", "type": "int"}]}, {}, "lacks the field x"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 4}, "\0" * 200, "a decimal of 200 bytes"),
    ],
)
def test_a_default_that_does_not_match_its_type_is_refused(kind: Any, default: Any, why: str) -> None:
    schema = with_field(Typed(kind, None, default), default=True)
    for use in (AvroSerializer, AvroDeserializer):
        with pytest.raises(InvalidArgument, match=rf"the default .* of R\.f .*{why}"):
            use(schema)


def test_a_default_without_a_python_value_fails_only_when_it_is_read() -> None:
    kind = {"type": "long", "logicalType": "timestamp-micros"}
    schema = with_field(Typed(kind, None, 1 << 62), default=True)
    with pytest.raises(CannotDecode, match=r"the default 4611686018427387904 of R\.f cannot be read"):
        read(written(WITHOUT_FIELD, {"id": 1}), WITHOUT_FIELD, schema)
    assert read(written(schema, {"id": 1, "f": 0}), schema, schema)["f"].year == 1970
    assert written(schema, {"id": 1}) == written(schema, {"id": 1, "f": 1 << 62})


def test_defaults_with_too_many_values_are_refused() -> None:
    leaf: Any = {"type": "record", "name": "R0", "fields": [{"name": "a", "type": "int", "default": 1}]}
    for depth in range(1, 18):
        fields = [{"name": "a", "type": leaf, "default": {}}, {"name": "b", "type": f"R{depth - 1}", "default": {}}]
        leaf = {"type": "record", "name": f"R{depth}", "fields": fields}
    with pytest.raises(InvalidArgument, match="the defaults have more than 100000 values"):
        AvroSerializer(leaf)


@given(typed_values())
@settings(max_examples=examples(60))
def test_the_readers_logical_type_decides_how_a_value_is_read(typed: Typed) -> None:
    logical = with_field(typed, default=True)
    plain = json.loads(re.sub(r'"logicalType": "[^"]*"', '"x": 1', json.dumps(with_field(typed, default=False))))
    data = written(logical, {"id": 1, "f": typed.value})
    assert read(data, plain, logical)["f"] == typed.value
    assert read(data, logical, plain) == read(data, plain, plain)
