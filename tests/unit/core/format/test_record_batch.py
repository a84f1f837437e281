"""The shape of a payload, for valid and for arbitrary bytes."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import Codec, encode_chunk, encode_payload, verify_header
from kera.core.format.record_batch import (
    BUFFERS_MAX,
    Shape,
    check_payload,
    check_size,
    decode_payload,
    decompressed_bytes,
    shape_of,
    values_of,
)
from kera.core.format.schema import DEFAULT_SCHEMA

CODECS = list(Codec)


def batch(rows: int = 3, value: bytes = b"value") -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"timestamp": number, "keys": [b"k"], "value": value} for number in range(rows)], DEFAULT_SCHEMA
    )


def payload(rows: int = 3, codec: Codec = Codec.NONE, **fields: Any) -> memoryview:
    return memoryview(encode_payload(batch(rows, **fields), codec).to_pybytes())


def chunk(data: memoryview, records: int, codec: Codec = Codec.NONE) -> memoryview:
    encoded = encode_chunk(
        pa.py_buffer(data),
        record_count=records,
        stream_id=1,
        streamlet_id=0,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=0,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
        codec=codec,
    )
    return memoryview(encoded.to_bytes())


def check(data: memoryview) -> None:
    check_payload(data, 0, verify_header(data))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_the_shape_has_the_number_of_records_and_the_compression(rows: int, codec: Codec) -> None:
    found = shape_of(payload(rows, codec))
    assert (found.records, found.compressed) == (rows, codec is not Codec.NONE)
    assert found.body_at + found.body_bytes == len(payload(rows, codec))


@pytest.mark.parametrize("schema", [pa.schema([]), pa.schema([("only", pa.null())])])
def test_a_batch_without_buffers_has_a_shape(schema: pa.Schema) -> None:
    empty = pa.RecordBatch.from_pylist([{}] * 5, schema)
    assert shape_of(memoryview(empty.serialize())).records == (5 if schema else 0)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_the_decompressed_size_is_known_and_limited_before_decompression(codec: Codec) -> None:
    data = payload(1000, codec, value=bytes(1000))
    assert 1_000_000 <= decompressed_bytes(data, shape_of(data)) <= 1_100_000 > len(data)
    check_size(data, shape_of(data), 1_100_000)
    with pytest.raises(CorruptChunk) as refused:
        check_size(data, shape_of(data), 1_000_000)
    assert refused.value.attributes["limit"] == 1_000_000


def test_a_header_that_agrees_with_the_batch_passes() -> None:
    for codec in CODECS:
        check(chunk(payload(3, codec), 3, codec))


@pytest.mark.parametrize("records", [1, 2, 4, (1 << 32) - 1])
def test_a_header_with_a_wrong_number_of_records_is_refused(records: int) -> None:
    with pytest.raises(CorruptChunk) as refused:
        check(chunk(payload(3), records))
    assert (refused.value.attributes["record_count"], refused.value.attributes["rows"]) == (records, 3)


@pytest.mark.parametrize(("said", "done"), [(Codec.NONE, Codec.ZSTD), (Codec.LZ4, Codec.NONE)])
def test_a_header_with_a_wrong_codec_is_refused(said: Codec, done: Codec) -> None:
    with pytest.raises(CorruptChunk, match="codec"):
        check(chunk(payload(3, done), 3, said))


@pytest.mark.parametrize("data", [b"\0", bytes(64), b"x" * 200, DEFAULT_SCHEMA.serialize().to_pybytes()])
def test_a_payload_without_a_record_batch_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptChunk, match="not an Arrow record batch"):
        check(chunk(memoryview(data), 1))


def test_a_batch_that_lists_too_many_buffers_is_refused() -> None:
    data = bytearray(payload(3, Codec.LZ4))
    found = shape_of(memoryview(data))
    struct.pack_into("<I", data, found.buffers_at, BUFFERS_MAX + 1)
    with pytest.raises(CorruptChunk, match="buffers"):
        decompressed_bytes(memoryview(data), found)


@pytest.mark.parametrize("fields", [1, 64, 65, 300])
def test_the_number_of_values_counts_all_fields(fields: int) -> None:
    columns = {f"c{at}": [True] * 10 for at in range(fields - 1)} | {"list": [[1, 2]] * 10}
    data = bytearray(pa.RecordBatch.from_pydict(columns).serialize())
    found = shape_of(memoryview(data))
    assert values_of(memoryview(data), found) == 10 * fields + 20
    struct.pack_into("<q", data, found.nodes_at + 4, -5)
    with pytest.raises(CorruptChunk, match="values"):
        check_size(memoryview(data), found)
    struct.pack_into("<I", data, found.nodes_at, 1 << 31)
    with pytest.raises(CorruptChunk, match="table of fields"):
        values_of(memoryview(data), found)


@given(st.sampled_from(CODECS), st.data())
def test_arbitrary_bytes_give_a_shape_or_corrupt_chunk(codec: Codec, draw: st.DataObject) -> None:
    data = bytearray(payload(3, codec))
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, min(len(data), 700) - 1))
        data[at] = draw.draw(st.integers(0, 255))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(0, len(data) - 1)) :]
    view = memoryview(data)
    try:
        found = shape_of(view)
        assert isinstance(found, Shape)
        assert found.body_at + found.body_bytes <= len(data)
        decompressed_bytes(view, found)
    except CorruptChunk:
        pass


def test_a_check_looks_at_the_chunk_at_the_given_offset() -> None:
    first, second = chunk(payload(3), 3), chunk(payload(5), 4)
    both = memoryview(bytes(first) + bytes(second))
    check_payload(both, 0, verify_header(both, 0))
    with pytest.raises(CorruptChunk) as refused:
        check_payload(both, len(first), verify_header(both, len(first)))
    assert refused.value.attributes["rows"] == 5


def test_nulls_of_a_column_that_is_not_nullable_are_refused() -> None:
    written = pa.RecordBatch.from_pydict({"a": pa.array([1, None])})
    required = pa.schema([pa.field("a", pa.int64(), nullable=False)])
    with pytest.raises(CorruptChunk, match="nulls in column 'a', which is not nullable"):
        decode_payload(encode_payload(written), required, records=2)
    assert decode_payload(encode_payload(written.slice(0, 1)), required, records=1).num_rows == 1
