"""Schemas of Avro: valid ones, and which can read values of another."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest

from kera.core.errors import InvalidSchema
from kera.core.schemas.json_text import DEPTH_MAX
from kera.server.schemas.avro.parsing import FIXED_BYTES_MAX, TYPES_MAX, VALUES_MAX
from tests.unit.core.schemas.support import avro, backward, forward, record

ENUM = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
FIXED = {"type": "fixed", "name": "F", "size": 4}


def logical(kind: str, name: str, **more: int) -> dict[str, Any]:
    return {"type": kind, "logicalType": name, **more}


def nested(levels: int) -> Any:
    kind: Any = "int"
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return kind


GOOD = [
    "int",
    ["null", "string"],
    {"type": "string"},
    nested(DEPTH_MAX),
    record(("a", ENUM, "A"), ("b", FIXED, "\u00ff123"), ("c", ["null", "E"], None), ("d", "F")),
    record(("a", ["null", "int"], 5), ("b", "double", 1), ("c", "float", 1.5), ("d", "boolean", False)),
    record(("a", {"type": "map", "values": "long"}, {"x": 1}), ("b", {"type": "array", "items": "int"}, [1, 2])),
    record(("next", ["null", "R"], None), namespace="a.b"),
    record(("a", record(("x", "int"), ("y", "int", 3), name="c.Inner"), {"x": 1}), ("b", ["null", "c.Inner"])),
    {"type": "error", "name": "Failed", "fields": []},
    record(("a", logical("bytes", "decimal", precision=9, scale=2)), ("b", logical("string", "uuid"))),
    record(("a", logical("int", "no such thing")), ("b", logical("string", "date"))),
    {"type": "fixed", "name": "D", "size": 8, "logicalType": "decimal", "precision": 18},
]


@pytest.mark.parametrize("schema", GOOD)
def test_a_valid_schema_is_accepted_here_and_by_fastavro(schema: Any) -> None:
    avro(schema).parsed()
    fastavro.parse_schema(json.loads(json.dumps(schema)))


BAD: list[tuple[Any, str]] = [
    (5, "5 is not a type"),
    (None, "None is not a type"),
    ([], "a union needs a type"),
    ("nope", "there is no type 'nope' before it is used"),
    ({}, 'None is not a "type" of an object'),
    ({"type": "nope"}, "'nope' is not a \"type\" of an object"),
    ({"type": {"type": "int"}}, 'is not a "type" of an object'),
    ({"type": ["int"]}, 'is not a "type" of an object'),
    ({"type": "array"}, '"items" is missing'),
    ({"type": "map"}, '"values" is missing'),
    (["int", "int"], "the union has 'int' twice"),
    (["int", ["null"]], "a union has no unions in it"),
    ([nested(1), nested(1)], "the union has 'array' twice"),
    ({"type": "record", "name": "R"}, '"fields" is missing'),
    ({"type": "record", "name": "R", "fields": {}}, '"fields" of record R are a list'),
    ({"type": "record", "name": "R", "fields": ["a"]}, "a field of record R is an object"),
    ({"type": "record", "fields": []}, '"name" is missing'),
    ({"type": "record", "name": "a b", "fields": []}, "a type cannot be called 'a b'"),
    ({"type": "record", "name": "int", "fields": []}, "int is the name of a type already"),
    ({"type": "record", "name": "R", "namespace": "a..b", "fields": []}, "a namespace cannot be called"),
    ({"type": "record", "name": "R", "namespace": 5, "fields": []}, "a namespace cannot be called"),
    (record(("a b", "int")), "a field of record R cannot be called 'a b'"),
    (record((5, "int")), "a field of record R cannot be called 5"),
    (record(("a", "int"), ("a", "int")), "record R has two fields 'a'"),
    (record(("a", FIXED), ("b", FIXED)), "there are two types F"),
    (record(("a", "int", "x")), "field a: the default 'x' is not a value of its type"),
    (record(("a", "int", 1 << 31)), "field a: the default"),
    (record(("a", "int", True)), "field a: the default"),
    (record(("a", "long", 1 << 63)), "field a: the default"),
    (record(("a", "null", 0)), "field a: the default"),
    (record(("a", "float", "1")), "field a: the default"),
    (record(("a", "bytes", "\u0100")), "field a: the default"),
    (record(("a", ["null", "int"], "x")), "field a: the default"),
    (record(("a", FIXED, "abc")), "field a: the default"),
    (record(("a", ENUM, "C")), "field a: the default"),
    (record(("a", nested(1), ["x"])), "field a: the default"),
    (record(("a", record(("x", "int"), name="I"), {})), "field a: the default"),
    ({"type": "record", "name": "R", "fields": [{"name": "a"}]}, '"type" is missing'),
    ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "int", "aliases": "b"}]}, "aliases"),
    ({"type": "record", "name": "R", "aliases": ["a b"], "fields": []}, "aliases"),
    ({"type": "enum", "name": "E", "symbols": []}, '"symbols" of enum E are a list'),
    ({"type": "enum", "name": "E", "symbols": ["a b"]}, "enum E cannot have a symbol 'a b'"),
    ({"type": "enum", "name": "E", "symbols": ["a", "a"]}, "enum E has a symbol twice"),
    (ENUM | {"default": "C"}, "the default 'C' of enum E is not one of its symbols"),
    (ENUM | {"default": None}, "the default None of enum E"),
    (FIXED | {"size": 0}, "fixed F takes 1 to"),
    (FIXED | {"size": True}, "fixed F takes 1 to"),
    (FIXED | {"size": FIXED_BYTES_MAX + 1}, "fixed F takes 1 to"),
    (logical("bytes", "decimal"), "a decimal needs a precision"),
    (logical("bytes", "decimal", precision=2, scale=3), "a decimal needs a precision"),
    (FIXED | {"logicalType": "decimal", "precision": 30}, "does not fit into 4 bytes"),
    (record(("next", "S"), name="R", namespace="a"), "there is no type 'a.S'"),
    (nested(DEPTH_MAX + 1), "nested deeper than 64"),
    (record(*((f"f{n}", "int") for n in range(TYPES_MAX // 2))), "more than 10000 types"),
    (record(("a", nested(1), [0] * (VALUES_MAX + 1))), "the defaults have more than 100000 values"),
]


@pytest.mark.parametrize(("schema", "said"), BAD, ids=[said for _, said in BAD])
def test_an_invalid_schema_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(InvalidSchema) as caught:
        avro(schema)._replace(text=json.dumps(schema, separators=(",", ":"))).parsed()
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Expecting property name"),
        ("int", "Expecting value in line 1, column 1"),
        ('{"type":"int","type":"long"}', "'type' comes twice in one object"),
        ("[1e999]", "not a number that can be kept"),
        ("[NaN]", "NaN is not a number"),
        ("1" * 5000, "not JSON"),
        ('"' + "a" * 5000, "Unterminated string"),
        ('{"a":' * 5000, "nested deeper than 64"),
    ],
)
def test_invalid_json_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidSchema, match=said):
        avro("int")._replace(text=text).parsed()


def test_brackets_within_strings_do_not_count_as_nesting() -> None:
    avro(record(("a", "string", '[[[[{{{{\\"' * 100))).parsed()


COMPATIBLE: list[tuple[Any, Any]] = [
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("int", ["null", "int"]),
    ("int", ["null", "long"]),
    (["int", "null"], ["null", "int", "string"]),
    (["int", "long"], "long"),
    (nested(2), nested(2)),
    ({"type": "map", "values": "int"}, {"type": "map", "values": "long"}),
    (record(("a", "int")), record()),
    (record(), record(("a", "int", 0))),
    (record(("a", "int")), record(("b", "int", 0), ("a", "int"))),
    (record(name="x.R"), record(name="y.R")),
    (record(name="Old"), record(name="New", aliases=["Old"])),
    (record(name="x.Old"), record(name="y.New", aliases=["x.Old"])),
    (ENUM, ENUM | {"symbols": ["B", "A", "C"]}),
    (ENUM, ENUM | {"symbols": ["A"], "default": "A"}),
    (record(("next", ["null", "R"], None)), record(("next", ["null", "R"], None), ("a", "int", 0))),
    (logical("long", "timestamp-millis"), "long"),
    ("long", logical("long", "timestamp-millis")),
    (
        {"type": "record", "name": "R", "fields": [{"name": "old", "type": "int"}]},
        {"type": "record", "name": "R", "fields": [{"name": "new", "aliases": ["old"], "type": "long"}]},
    ),
]


@pytest.mark.parametrize(("writer", "reader"), COMPATIBLE)
def test_schemas_that_the_specification_resolves_are_compatible(writer: Any, reader: Any) -> None:
    assert backward(avro(writer), avro(reader)) == []
    assert forward(avro(reader), avro(writer)) == []


DIFFERENT: list[tuple[Any, Any, list[str], list[str]]] = [
    ("long", "int", ["the schema: int, was long"], []),
    ("int", "string", ["the schema: string, was int"], ["the schema: string, was int"]),
    (
        "bytes",
        "string",
        ["the schema: string, was bytes"],
        [],
    ),
    (["null", "int"], "int", ["the schema: int, which has none for null, that it could be before"], []),
    (
        ["null", "int"],
        ["null", "string"],
        ["the schema: union of null, string, which has none for int, that it could be before"],
        ["the schema: can be string, was union of null, int"],
    ),
    (record(("a", "int")), record(("a", "int"), ("b", "int")), ["field b: is new, and has no default"], []),
    (record(("a", "int"), ("b", "int")), record(("a", "int")), [], ["field b: is gone, and had no default"]),
    (
        record(("address", record(("zip", "string"), name="A"))),
        record(("address", record(("zip", "int"), name="A"))),
        ["field address.zip: int, was string"],
        ["field address.zip: int, was string"],
    ),
    (record(name="Old"), record(name="New"), ["the schema: record New, without an alias, was record Old"], None),  # type: ignore[list-item]
    (
        ENUM,
        ENUM | {"symbols": ["A"]},
        ["the schema: enum E has no longer B, and no default"],
        [],
    ),
    (FIXED, FIXED | {"size": 5}, ["the schema: fixed F of 5 bytes, was fixed F of 4 bytes"], None),  # type: ignore[list-item]
    (FIXED, ENUM | {"name": "F"}, ["the schema: enum F, was fixed F of 4 bytes"], None),  # type: ignore[list-item]
    (
        logical("long", "timestamp-millis"),
        logical("long", "timestamp-micros"),
        ["the schema: long (timestamp-micros), was long (timestamp-millis)"],
        ["the schema: long (timestamp-micros), was long (timestamp-millis)"],
    ),
    (
        logical("bytes", "decimal", precision=9, scale=2),
        logical("bytes", "decimal", precision=9, scale=3),
        ["the schema: bytes (decimal(9, 3)), was bytes (decimal(9, 2))"],
        None,  # type: ignore[list-item]
    ),
    (
        record(("items", {"type": "array", "items": "int"}), ("by", {"type": "map", "values": "int"})),
        record(("items", {"type": "array", "items": "string"}), ("by", {"type": "map", "values": "string"})),
        ["field items[]: string, was int", "field by{}: string, was int"],
        None,  # type: ignore[list-item]
    ),
    (
        record(("v", "int"), ("next", ["null", "R"], None)),
        record(("v", "string"), ("next", ["null", "R"], None)),
        ["field v: string, was int"],
        ["field v: string, was int"],
    ),
    (
        record(("a", "int"), ("b", "int")),
        {"type": "record", "name": "R", "fields": [{"name": "b", "aliases": ["a"], "type": "int"}]},
        ["field b: goes by an alias for a and b, which are two fields"],
        None,  # type: ignore[list-item]
    ),
]


@pytest.mark.parametrize(("old", "new", "in_reading", "of_readers"), DIFFERENT)
def test_incompatible_changes_are_named_by_field_and_reason(
    old: Any, new: Any, in_reading: list[str], of_readers: list[str] | None
) -> None:
    assert backward(avro(old), avro(new)) == in_reading
    if of_readers is not None:
        assert forward(avro(old), avro(new)) == of_readers


def fails_to_read(writer: Any, reader: Any, value: Any) -> bool:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(writer), value)
    try:
        fastavro.schemaless_reader(
            io.BytesIO(out.getvalue()), fastavro.parse_schema(writer), fastavro.parse_schema(reader)
        )
    except Exception:  # noqa: BLE001 - whatever it is
        return True
    return False


@pytest.mark.parametrize(
    ("writer", "reader", "said"),
    [
        # One side defines a type where the other names it, and only one of them has a union.
        (record(("x", ENUM), ("y", "E")), record(("y", ["null", ENUM])), "define it in the same place"),
        (record(("y", ENUM)), record(("z", ENUM, "A"), ("y", ["null", "E"])), "define it in the same place"),
        (
            record(("b", "int"), ("a", "int")),
            {"type": "record", "name": "R", "fields": [{"name": "b", "aliases": ["a"], "type": "int"}]},
            "which are two fields",
        ),
        (record(("a", ["string", "bytes"])), record(("a", ["string", "bytes"]), ("b", "int", 0)), "string, was bytes"),
    ],
)
def test_changes_that_fastavro_cannot_resolve_are_incompatible(writer: Any, reader: Any, said: str) -> None:
    value = {"x": "A", "y": "A", "a": b"\xff", "b": 1}
    if "int" in json.dumps(writer):
        value["a"] = 1
    assert fails_to_read(writer, reader, value)
    assert said in " ".join(backward(avro(writer), avro(reader)))


def test_types_nested_too_deep_by_reference_are_refused() -> None:
    kinds: list[Any] = [record(name="R0")]
    kinds += [record(("a", f"R{n - 1}"), name=f"R{n}") for n in range(1, 300)]
    old, new = record(("one", kinds), ("x", "R299"), name="Z"), record(("two", kinds, {}), ("x", "R299"), name="Z")
    with pytest.raises(InvalidSchema, match="more than 100 levels deep"):
        backward(avro(old), avro(new))


def test_a_comparison_that_takes_too_long_is_refused() -> None:
    old = [{"type": "fixed", "name": f"F{n}", "size": 1} for n in range(2_000)]
    new = [{"type": "fixed", "name": f"G{n}", "size": 1} for n in range(2_000)]
    with pytest.raises(InvalidSchema, match="takes too long"):
        backward(avro(old), avro(new))


def test_the_number_of_reported_differences_is_limited() -> None:
    many = [(f"f{n}", "int") for n in range(200)]
    found = backward(avro(record()), avro(record(*many)))
    assert len(found) == 51
    assert found[-1] == "and more"
