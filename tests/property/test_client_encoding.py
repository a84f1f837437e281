"""The chunks of any batch have its rows, in order, and are never larger than a segment.

And the estimates of `send` are never below the size of a record.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kera.client.producing.encoding.partitioner import partition_by_key, primary_keys, streamlet_of
from kera.client.producing.encoding.payloads import check_rows, payloads, record_payloads, records_to_batch, timestamps
from kera.client.producing.encoding.record_message import write_message
from kera.client.producing.open_chunks.records import RECORD_OVERHEAD_BYTES, bytes_of, headers_bytes
from kera.client.producing.open_chunks.stream_writer import BATCH_OVERHEAD_BYTES
from kera.core.errors import RecordTooLarge
from kera.core.format.chunk import HEADER_BYTES, chunk_bytes_of, padded
from kera.core.format.record_batch import decode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.v1 import common_pb2
from tests.property.batches import INT64, RECORDS, default_batch
from tests.unit.client.support import description

SEGMENT_BYTES = 8 << 10
SMALL = st.binary(max_size=300)
LARGE = st.integers(0, SEGMENT_BYTES * 2).map(lambda size: b"x" * size)
HEADERS = st.lists(st.tuples(st.text(max_size=20), st.none() | SMALL), max_size=3).map(tuple)
PYTHON_RECORDS = st.lists(
    st.tuples(
        st.none() | SMALL | LARGE,
        st.none() | st.lists(SMALL, max_size=3).map(tuple),
        st.none() | HEADERS,
    ),
    min_size=1,
    max_size=30,
)


@given(RECORDS.filter(bool), st.integers(512, 2 * SEGMENT_BYTES), st.sampled_from(common_pb2.Codec.values()))
def test_chunks_have_the_rows_of_the_batch_and_fit(
    records: list[dict[str, Any]], chunk_bytes_max: int, codec: int
) -> None:
    batch = default_batch(records)
    stream = description(segment_bytes=SEGMENT_BYTES, codec=codec)
    try:
        check_rows(batch, stream)
    except RecordTooLarge:
        rows = [batch.slice(row, 1) for row in range(batch.num_rows)]
        assert max(map(chunk_bytes_of, rows)) > SEGMENT_BYTES
        return
    made = list(payloads(batch, stream, chunk_bytes_max, now_us=0))
    assert all(HEADER_BYTES + padded(len(payload.payload)) <= SEGMENT_BYTES for payload in made)
    decoded = [decode_payload(payload.payload, DEFAULT_SCHEMA) for payload in made]
    assert [batch.num_rows for batch in decoded] == [payload.record_count for payload in made]
    assert pa.Table.from_batches(decoded, DEFAULT_SCHEMA).equals(pa.Table.from_batches([batch], DEFAULT_SCHEMA))


@given(
    st.lists(st.tuples(INT64, SMALL, st.lists(SMALL, max_size=3)), min_size=1, max_size=70),
    st.sampled_from([1, 50]),  # few, and many
    st.booleans(),
)
def test_record_messages_have_the_bytes_that_arrow_writes(
    records: list[tuple[int, bytes, list[bytes]]], times_over: int, keyed: bool
) -> None:
    records *= times_over
    times, values, keys = ([*column] for column in zip(*records, strict=True))
    nothing = [None] * len(records)
    batch = records_to_batch(values, times, keys if keyed else nothing, nothing)
    message = write_message(np.array(times, np.int64), values, keys if keyed else None)
    assert message.to_pybytes() == batch.serialize().to_pybytes()


@given(PYTHON_RECORDS, st.integers(512, 2 * SEGMENT_BYTES), st.sampled_from(common_pb2.Codec.values()))
def test_records_are_decoded_as_they_were_encoded(
    records: list[tuple[Any, Any, Any]], chunk_bytes_max: int, codec: int
) -> None:
    values, *others = ([*column] for column in zip(*records, strict=True))
    keys, headers = (column if any(column) else None for column in others)
    times = timestamps([number / 1e6 for number in range(len(records))], {0: -5})
    batch = records_to_batch(values, times, keys, headers)
    stream = description(segment_bytes=SEGMENT_BYTES, codec=codec)
    try:
        made = list(record_payloads(values, times, keys, headers, stream, chunk_bytes_max))
    except RecordTooLarge:
        rows = [batch.slice(row, 1) for row in range(batch.num_rows)]
        assert max(map(chunk_bytes_of, rows)) > SEGMENT_BYTES - BATCH_OVERHEAD_BYTES
        return
    assert all(HEADER_BYTES + padded(len(payload.payload)) <= SEGMENT_BYTES for payload in made)
    decoded = [decode_payload(payload.payload, DEFAULT_SCHEMA) for payload in made]
    for each, payload in zip(decoded, made, strict=True):
        each.validate(full=True)
        shown = each.column("timestamp").cast(pa.int64()).to_pylist()
        assert (payload.min_timestamp_us, payload.max_timestamp_us) == (min(shown), max(shown))
    assert pa.Table.from_batches(decoded, DEFAULT_SCHEMA).equals(pa.Table.from_batches([batch], DEFAULT_SCHEMA))


@given(PYTHON_RECORDS)
def test_the_size_of_records_is_estimated_from_above(records: list[tuple[Any, Any, Any]]) -> None:
    values, keys, headers = ([*column] for column in zip(*records, strict=True))
    batch = records_to_batch(values, [0] * len(records), keys, headers)
    estimates = [
        RECORD_OVERHEAD_BYTES
        + (len(value) if value is not None else 0)
        + sum(bytes_of("key", key) + 8 for key in record_keys or ())
        + headers_bytes(record_headers or ())
        for value, record_keys, record_headers in records
    ]
    assert chunk_bytes_of(batch) <= sum(estimates) + BATCH_OVERHEAD_BYTES


@given(RECORDS, st.integers(1, 9), st.data())
def test_a_key_has_the_same_streamlet_in_a_batch_as_alone(
    records: list[dict[str, Any]], streamlets: int, data: st.DataObject
) -> None:
    keyless = data.draw(st.integers(0, streamlets - 1))
    batch = default_batch(records)
    parts = partition_by_key(batch, primary_keys(batch.column("keys")), streamlets, keyless).parts()
    expected: dict[int, list[int]] = {}
    for row, record in enumerate(records):
        key = record["keys"][0] if record["keys"] else None
        expected.setdefault(keyless if key is None else streamlet_of(key, streamlets), []).append(row)
    if streamlets > 1 and not records:
        assert sum(part.num_rows for _, part in parts) == 0
        return
    assert {streamlet for streamlet, part in parts if part.num_rows} == set(expected)
    for streamlet, part in parts:
        assert part.equals(batch.take(pa.array(expected.get(streamlet, []), pa.int64())))
