"""Schemas of Arrow: columns can be added, and can become wider."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pytest

from kera.core.errors import InvalidSchema
from kera.core.schemas import SchemaType
from kera.server.schemas.compatibility import Definition
from tests.unit.core.schemas.support import arrow, backward, forward


def of(*fields: Any) -> Definition:
    return arrow(pa.schema(list(fields)))


def deep(levels: int) -> pa.DataType:
    kind = pa.int32()
    for _ in range(levels):
        kind = pa.list_(kind)
    return kind


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("!!", "in base64"),
        (base64.b64encode(b"\xff" * 100).decode(), "not an Arrow schema"),
        (base64.b64encode(b"").decode() or "AA==", "not an Arrow schema"),
        (arrow(pa.schema([])).text, "the schema has no column"),
        (of(("a", pa.int32()), ("a", pa.int32())).text, "2 columns named 'a'"),
        (of(("a", deep(40))).text, "more than 32 within each other"),
        (of(*((f"c{n}", pa.struct([("x", pa.int8())])) for n in range(900))).text[:-400], "not an Arrow schema"),
    ],
)
def test_an_invalid_schema_is_refused(definition: str, said: str) -> None:
    with pytest.raises(InvalidSchema, match=said):
        Definition(SchemaType.ARROW, definition).parsed()


WIDER = [
    (pa.int8(), pa.int32()),
    (pa.uint8(), pa.int16()),
    (pa.uint8(), pa.uint64()),
    (pa.int16(), pa.float32()),
    (pa.int32(), pa.float64()),
    (pa.float32(), pa.float64()),
    (pa.string(), pa.large_string()),
    (pa.decimal128(9, 2), pa.decimal128(12, 4)),
    (pa.list_(pa.int8()), pa.list_(pa.int16())),
    (pa.list_(pa.int8()), pa.large_list(pa.int8())),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16()), ("b", pa.string())])),
    (pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64())),
    (pa.timestamp("us", tz="UTC"), pa.timestamp("us", tz="UTC")),
    (pa.null(), pa.string()),
]


@pytest.mark.parametrize(("narrow", "wide"), WIDER)
def test_types_may_become_wider(narrow: pa.DataType, wide: pa.DataType) -> None:
    assert backward(of(("a", narrow)), of(("a", wide))) == []
    assert forward(of(("a", wide)), of(("a", narrow))) == []


OTHERS = [
    (pa.int32(), pa.int16()),
    (pa.int8(), pa.uint8()),
    (pa.uint8(), pa.int8()),
    (pa.int64(), pa.float64()),
    (pa.float64(), pa.float32()),
    (pa.large_string(), pa.string()),
    (pa.string(), pa.binary()),
    (pa.decimal128(9, 2), pa.decimal128(9, 3)),
    (pa.large_list(pa.int8()), pa.list_(pa.int8())),
    (pa.timestamp("us", tz="UTC"), pa.timestamp("us")),
    (pa.timestamp("ms"), pa.timestamp("us")),
    (pa.list_(pa.int8(), 3), pa.list_(pa.int8(), 4)),
]


@pytest.mark.parametrize(("old", "new"), OTHERS)
def test_other_changes_of_types_are_incompatible(old: pa.DataType, new: pa.DataType) -> None:
    assert backward(of(("a", old)), of(("a", new))) == [f"field a: {new}, was {old}"]


def test_columns_may_only_be_added_and_have_to_be_nullable() -> None:
    one, two = ("a", pa.int8()), ("b", pa.int8())
    assert backward(of(one), of(one, two)) == forward(of(one), of(one, two)) == []
    assert backward(of(one, two), of(one)) == ["field b: is gone: columns are only added"]
    never_null = pa.field("b", pa.int8(), nullable=False)
    assert backward(of(one), of(one, never_null)) == ["field b: is new, and may not be null"]
    assert forward(of(one, never_null), of(one)) == ["field b: is gone, and could not be null"]
    assert backward(of(two), of(never_null)) == ["field b: may not be null, was may be null"]


def test_columns_within_columns_are_named() -> None:
    old = of(("a", pa.struct([("b", pa.list_(pa.int32()))])))
    new = of(("a", pa.struct([("b", pa.list_(pa.string()))])))
    assert backward(old, new) == ["field a.b[]: string, was int32"]
