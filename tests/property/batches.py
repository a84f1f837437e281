"""Strategies for record batches, of the default schema and of arbitrary typed ones."""

import datetime
import decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from kera.core.format.schema import DEFAULT_SCHEMA

INT64 = st.integers(-(2**63), 2**63 - 1)
# Mostly small, sometimes over many pages: then one piece repeated, as drawing that many bytes takes hypothesis long.
BYTES = st.binary(max_size=40) | st.binary(min_size=1, max_size=5).map(lambda piece: piece * 20_000)
RECORDS = st.lists(
    st.fixed_dictionaries(
        {
            "timestamp": INT64,
            "keys": st.none() | st.lists(st.none() | BYTES, max_size=4),
            "value": st.none() | BYTES,
            "headers": st.none() | st.lists(st.tuples(st.text(max_size=8), st.none() | BYTES), max_size=3),
        }
    ),
    max_size=12,
)


def default_batch(records: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = [pa.array([record[field.name] for record in records], field.type) for field in DEFAULT_SCHEMA]
    return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)


DATES = st.dates(datetime.date(1, 1, 1), datetime.date(9999, 12, 31))
TEXT = st.text(max_size=20)
COLUMN_TYPES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 65535)),
    (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.int64(), INT64),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=20)),
    (pa.binary(4), st.binary(min_size=4, max_size=4)),
    (pa.date32(), DATES),
    (pa.timestamp("us", tz="UTC"), INT64),
    (pa.duration("ns"), INT64),
    (pa.decimal128(20, 3), st.decimals(-(10**16), 10**16, places=3).map(decimal.Decimal)),
    (pa.null(), st.none()),
    (pa.list_(pa.int32()), st.lists(st.none() | st.integers(0, 9), max_size=3)),
    (pa.list_(pa.int16(), 2), st.lists(st.integers(0, 9), min_size=2, max_size=2)),
    (pa.struct([("a", pa.int64()), ("b", pa.string())]), st.fixed_dictionaries({"a": INT64, "b": TEXT})),
    (pa.map_(pa.string(), pa.int32()), st.lists(st.tuples(TEXT, st.none() | st.integers(0, 9)), max_size=3)),
]


@st.composite
def typed_batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Batches of one to five columns, each of any type."""
    columns = draw(st.lists(st.sampled_from(COLUMN_TYPES), min_size=1, max_size=5))
    rows = draw(st.integers(0, 10))
    arrays = []
    for data_type, values in columns:
        arrays.append(pa.array(draw(st.lists(st.none() | values, min_size=rows, max_size=rows)), data_type))
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{index}" for index in range(len(columns))])


@st.composite
def slices(draw: st.DrawFn, batches: st.SearchStrategy[pa.RecordBatch]) -> pa.RecordBatch:
    """Some rows of a batch: they share the buffers of all rows, where sizes easily go wrong."""
    batch = draw(batches)
    start = draw(st.integers(0, batch.num_rows))
    return batch.slice(start, draw(st.integers(0, batch.num_rows - start)))


DEFAULT_BATCHES = RECORDS.map(default_batch)
TYPED_BATCHES = typed_batches()
BATCHES = DEFAULT_BATCHES | TYPED_BATCHES
BATCHES_AND_SLICES = BATCHES | slices(BATCHES)
