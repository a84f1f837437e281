"""The kind of node for a type, and the size of its nulls."""

import pyarrow as pa
import pytest

from kera.core.format.lean.kinds import kind_of, null_bytes, storage_of, within
from kera.core.format.lean.layout import Kind


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (pa.null(), Kind.NULL),
        (pa.bool_(), Kind.BITS),
        (pa.uint8(), Kind.FIXED_1),
        (pa.float16(), Kind.FIXED_2),
        (pa.date32(), Kind.FIXED_4),
        (pa.timestamp("us", tz="UTC"), Kind.FIXED_8),
        (pa.month_day_nano_interval(), Kind.FIXED_16),
        (pa.binary(3), Kind.FIXED),
        (pa.decimal128(3, 1), Kind.FIXED_16),
        (pa.decimal256(50, 1), Kind.FIXED),
        (pa.map_(pa.string(), pa.int8()), Kind.LIST),
        (pa.large_string(), Kind.LARGE_TEXT),
        (pa.string_view(), None),
    ],
    ids=str,
)
def test_each_type_has_its_kind(kind: pa.DataType, found: Kind | None) -> None:
    assert kind_of(kind) is found


def test_nested_and_stored_types_are_found() -> None:
    assert within(pa.list_(pa.int8())) == [pa.int8()]
    assert within(pa.map_(pa.string(), pa.int8()))[0].num_fields == 2
    assert storage_of(pa.uuid()) == pa.binary(16)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (pa.null(), 1),
        (pa.bool_(), 1),
        (pa.int16(), 2),
        (pa.decimal256(50, 1), 32),
        (pa.binary(0), 1),
        (pa.uuid(), 16),
        (pa.string(), 4),
        (pa.large_list(pa.int8()), 8),
        (pa.map_(pa.string(), pa.int8()), 4),
        (pa.string_view(), 16),
        (pa.list_(pa.int64(), 10), 81),
        (pa.struct([("a", pa.int64()), ("b", pa.list_(pa.bool_(), 3))]), 13),
    ],
    ids=str,
)
def test_a_null_takes_the_bytes_of_its_type(kind: pa.DataType, size: int) -> None:
    assert null_bytes(kind) == size
