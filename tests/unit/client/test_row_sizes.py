"""Estimated sizes of rows, the cuts into chunks, and the spread of rows without keys."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.producing.encoding.conforming import conform
from kera.client.producing.encoding.partition_payloads import spread
from kera.client.producing.encoding.row_sizes import OVERHEAD_BYTES, RowSizes, lean_bytes_of, lean_room
from kera.core.format.chunk import HEADER_BYTES, Codec
from kera.core.format.payload import encode_lean
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.support import description

STREAM = description()
COLUMNS: list[dict[str, Any]] = [
    {"value": [b"x" * 100] * 50},
    {"value": [b"x" * (number * 7 % 90) for number in range(50)]},
    {"value": [None, b"x"] * 25, "timestamp": pa.array(range(50), DEFAULT_SCHEMA.field("timestamp").type)},
    {"value": [b"x" * 30] * 50, "keys": pa.array([[b"key", b"2"]] * 50, DEFAULT_SCHEMA.field("keys").type)},
    {"value": [None] * 50},
    {"value": []},
]


def rows_of(columns: dict[str, Any]) -> pa.RecordBatch:
    values = pa.array(columns["value"], pa.binary())
    return conform(pa.record_batch({**columns, "value": values}), STREAM, 7)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("start", "end"), [(0, 50), (3, 40), (7, 8)])
def test_the_estimate_of_a_payload_is_an_upper_bound_and_close(columns: dict[str, Any], start: int, end: int) -> None:
    batch = rows_of(columns).slice(start, end - start)
    payload = encode_lean(batch, Codec.NONE)
    assert payload is not None
    estimate = lean_bytes_of(batch)

    assert len(payload) <= estimate + OVERHEAD_BYTES
    if columns in COLUMNS[:2]:
        assert estimate <= 1.1 * len(payload) + OVERHEAD_BYTES
    assert RowSizes(batch).largest(np.array([batch.num_rows])) == pytest.approx(estimate, abs=batch.num_rows)


def test_rows_are_cut_where_a_chunk_is_full() -> None:
    sizes = [10, 10, 10, 200, 5, 5, 5, 40, 10]
    batch = pa.record_batch({"value": pa.array([b"x" * (size - 2) for size in sizes], pa.binary())})
    found = RowSizes(batch)
    assert found.ends(0, 9, 50).tolist() == [3, 4, 7, 9]
    assert found.ends(4, 8, 55).tolist() == [8]
    assert found.ends(4, 8, 1).tolist() == [5, 6, 7, 8]
    assert found.ends(5, 5, 50).tolist() == [5]
    assert found.largest(np.array([3, 4, 9])) == 200


@pytest.mark.parametrize("room", [1, 9, 10, 25, 80, 1000])
def test_rows_of_equal_size_are_cut_like_rows_of_mixed_sizes(room: int) -> None:
    values = [b"x" * 8] * 8
    same = RowSizes(pa.record_batch({"value": pa.array(values, pa.binary())}))
    other = RowSizes(pa.record_batch({"value": pa.array([*values, b""], pa.binary())}))
    for start, end in [(0, 8), (3, 8), (2, 5), (4, 4)]:
        assert same.ends(start, end, room).tolist() == other.ends(start, end, room).tolist()


@pytest.mark.parametrize("lean", [True, False])
def test_rows_without_keys_go_to_the_streamlets_in_turn(lean: bool) -> None:
    batch = rows_of({"value": [b"x" * 100] * 100})
    size = HEADER_BYTES + OVERHEAD_BYTES + lean_bytes_of(batch)
    partition = spread(batch, size, 6, 8, 1024, lean=lean)

    ends = partition.ends.tolist()
    assert partition.streamlets.tolist() == [(6 + number) % 8 for number in range(len(ends))]
    assert ends == sorted({*ends})
    assert ends[-1] == 100
    assert ends[0] == (8 if lean else 100 * 1024 // size)
    assert lean_room(1024) == 1024 - HEADER_BYTES - OVERHEAD_BYTES
