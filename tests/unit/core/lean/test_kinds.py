"""Which kind of node a type is."""

import pyarrow as pa
import pytest

from kera.core.lean.kinds import kind_of, storage_of, within
from kera.core.lean.layout import Kind


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
def test_a_type_is_of_a_kind(kind: pa.DataType, found: Kind | None) -> None:
    assert kind_of(kind) is found


def test_what_is_within() -> None:
    assert within(pa.list_(pa.int8())) == [pa.int8()]
    assert within(pa.map_(pa.string(), pa.int8()))[0].num_fields == 2
    assert storage_of(pa.uuid()) == pa.binary(16)
