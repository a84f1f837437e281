"""The size of lean payloads, and the types that cannot have one."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from kera.core.errors import InvalidArgument
from kera.core.format.lean import decode, encode, is_lean
from kera.core.format.lean.encode import PACKED_VALUES_MAX
from kera.core.format.schema import DEFAULT_SCHEMA

BYTES_MAX = 1 << 27


def records(count: int, *, value_bytes: int = 100, spread: int = 0, step_us: int = 1) -> pa.RecordBatch:
    rows = [
        {"timestamp": 1_700_000_000_000_000 + step_us * at, "value": bytes(value_bytes + (at % 2) * spread)}
        for at in range(count)
    ]
    return pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA)


def size_beside_values(batch: pa.RecordBatch) -> int:
    payload = encode(batch, None, bytes_max=BYTES_MAX)
    assert payload is not None
    return len(payload) - sum(len(value) for value in batch.column("value").to_pylist())


def test_ten_records_without_keys_add_few_bytes_to_their_values() -> None:
    assert size_beside_values(records(10, step_us=0)) == 16
    assert size_beside_values(records(10, spread=7, step_us=1000)) <= 64


def test_small_columns_are_packed_and_large_ones_are_read_in_place() -> None:
    small, large = (records(count, spread=1) for count in (PACKED_VALUES_MAX, PACKED_VALUES_MAX + 1))
    assert size_beside_values(small) < 4 * PACKED_VALUES_MAX
    payload = pa.py_buffer(encode(large, None, bytes_max=BYTES_MAX))
    found = decode(payload, large.schema, records=large.num_rows, codec=None, bytes_max=BYTES_MAX, trusted=False)
    held = range(payload.address, payload.address + payload.size)
    for name in ("timestamp", "value"):
        assert all(each.address in held for each in found.column(name).buffers() if each is not None)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.list_view(pa.int8()),
        pa.dictionary(pa.int8(), pa.string()),
        pa.run_end_encoded(pa.int32(), pa.int8()),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.struct([("a", pa.list_(pa.binary_view()))]),
    ],
    ids=str,
)
def test_types_whose_values_share_bytes_are_not_lean(kind: pa.DataType) -> None:
    assert not is_lean(pa.schema([("a", pa.int8()), ("b", kind)]))


def test_a_batch_of_a_type_that_is_not_lean_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(["a"], pa.string_view())], ["a"])
    with pytest.raises(InvalidArgument, match="no lean payloads of string_view"):
        encode(batch, None, bytes_max=BYTES_MAX)


def test_extension_types_are_encoded_as_their_storage() -> None:
    kind: Any = pa.uuid()
    batch = pa.RecordBatch.from_arrays([pa.array([bytes(16), None, b"x" * 16], pa.binary(16)).cast(kind)], ["id"])
    assert is_lean(batch.schema)
    payload = encode(batch, None, bytes_max=BYTES_MAX)
    found = decode(pa.py_buffer(payload), batch.schema, records=3, codec=None, bytes_max=BYTES_MAX, trusted=False)
    assert found.equals(batch)


def test_a_batch_too_large_for_a_reader_is_not_encoded() -> None:
    assert encode(records(10, value_bytes=0, step_us=0), None, bytes_max=100) is None
    many = pa.RecordBatch.from_arrays([pa.nulls(1)] * 70_000, [str(at) for at in range(70_000)])
    assert encode(many, None, bytes_max=BYTES_MAX) is None
