"""Records made from chunks, and chunks cut at an ordinal."""

import datetime
import gc
import sys
from array import array
from typing import Any

import pyarrow as pa
import pytest

from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.delivering.records import records_of
from kera.client.headers import NO_HEADERS, Headers
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.format.chunk import encode_chunk, encode_payload, read_header
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.support import description

MIN_TIMESTAMP_US = 77

pytestmark = pytest.mark.usefixtures("either_core")


def chunk_of(batch: pa.RecordBatch, stream: StreamDescription) -> ChunkBatch:
    encoded = encode_chunk(
        encode_payload(batch), record_count=batch.num_rows, stream_id=stream.stream_id, streamlet_id=3, schema_id=1,
        producer_id=1, producer_epoch=1, sequence=0, created_us=0, min_timestamp_us=MIN_TIMESTAMP_US,
        max_timestamp_us=99,
    )  # fmt: skip
    header = read_header(encoded.header)._replace(first_record=100)
    return ChunkBatch(batch, header, Position(1, 1, 0), Position(1, 1, 64), EntryId(stream.stream_id, 3, 1))


def test_records_of_the_default_schema_have_all_fields() -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 5, "keys": [b"k", b"l"], "value": b"v", "headers": [("h", b"x"), ("h", b"y")]},
        {"timestamp": -1, "keys": [], "value": None, "headers": None},
        {"timestamp": 0, "keys": None, "value": b"", "headers": []},
    ]
    arrays = [pa.array([row[field.name] for row in rows], field.type) for field in DEFAULT_SCHEMA]
    stream = description()
    first, second, third = records_of(
        chunk_of(pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA), stream), stream
    )
    assert (first.stream, first.streamlet, first.entry, first.offset, first.timestamp_us) == ("s", 3, 1, 100, 5)
    assert (first.key, first.keys, first.value, first.headers, first.row) == (
        b"k",
        (b"k", b"l"),
        b"v",
        Headers([("h", b"x"), ("h", b"y")]),
        None,
    )
    assert (second.offset, second.key, second.keys, second.value, second.headers) == (101, None, (), None, NO_HEADERS)
    assert (third.timestamp_us, third.value, third.headers) == (0, b"", NO_HEADERS)


@pytest.mark.parametrize(
    "keys",
    [
        [[b"a"], [b"b"], [b""]],
        [[b"a", b"b"], [], [b"c"]],
        [[b"a"], None, [b"b", b"c"]],
        [None, None, None],
        [[], [], []],
        [[b"a"], [None], [b"b"]],
    ],
)
@pytest.mark.parametrize("begin", [0, 1])
def test_each_record_has_its_own_keys(keys: list[Any], begin: int) -> None:
    columns = {"timestamp": [0] * 3, "keys": keys, "value": [b"v"] * 3, "headers": [None] * 3}
    arrays = [pa.array(columns[field.name], field.type) for field in DEFAULT_SCHEMA]
    batch = pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA).slice(begin)
    stream = description()

    found = list(records_of(chunk_of(batch, stream), stream))

    assert [record.keys for record in found] == [tuple(row or ()) for row in keys[begin:]]
    assert [record.key for record in found] == [row[0] if row else None for row in keys[begin:]]


def test_a_batch_is_freed_after_its_last_record() -> None:
    held = bytearray(b"abc")
    values = pa.Array.from_buffers(pa.binary(), 3, [None, pa.py_buffer(array("i", range(4))), pa.py_buffer(held)])
    arrays = [pa.array([0] * 3, DEFAULT_SCHEMA[0].type), pa.nulls(3, DEFAULT_SCHEMA[1].type), values]
    arrays.append(pa.nulls(3, DEFAULT_SCHEMA[3].type))
    stream = description()
    records = records_of(chunk_of(pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA), stream), stream)
    del arrays, values

    first = next(records)
    assert [first.value, *(record.value for record in records)] == [b"a", b"b", b"c"]
    assert next(records, None) is None
    del records
    held.extend(b"nobody looks at it any more")


def test_a_delivered_record_is_tracked_and_counted_like_any_object() -> None:
    """The garbage collector tracks it, and it holds one reference to its type."""
    row = {"timestamp": 1, "keys": [b"k"], "value": b"v", "headers": None}
    batch, stream = pa.RecordBatch.from_pylist([row], DEFAULT_SCHEMA), description()
    references = sys.getrefcount(Record)
    (record,) = records_of(chunk_of(batch, stream), stream)
    assert record == Record("s", 3, 1, 100, 1, b"k", (b"k",), b"v", NO_HEADERS, None)
    assert sys.getrefcount(Record) == references + 1
    assert type(record) is Record
    assert gc.is_tracked(record)
    del record
    assert sys.getrefcount(Record) == references


def test_records_of_a_typed_stream_are_rows() -> None:
    schema = pa.schema([("at", pa.timestamp("ms", "UTC")), ("id", pa.int64())])
    stream = description(schema=schema, key_column="id", timestamp_column="at")
    batch = pa.RecordBatch.from_arrays([pa.array([5, None], schema[0].type), pa.array([12, None])], schema=schema)
    first, second = records_of(chunk_of(batch, stream), stream)
    time = datetime.datetime.fromtimestamp(0.005, datetime.UTC)
    assert (first.key, first.keys, first.timestamp_us, first.row) == (b"12", (b"12",), 5000, {"at": time, "id": 12})
    assert (second.key, second.keys, second.timestamp_us, second.value) == (None, (), MIN_TIMESTAMP_US, None)


def test_records_of_a_typed_stream_without_key_and_time_have_the_time_of_the_chunk() -> None:
    schema = pa.schema([("name", pa.string())])
    stream = description(schema=schema)
    (record,) = records_of(chunk_of(pa.record_batch({"name": ["a"]}), stream), stream)
    assert (record.key, record.timestamp_us, record.row) == (None, MIN_TIMESTAMP_US, {"name": "a"})


def test_a_binary_key_is_taken_unchanged() -> None:
    stream = description(schema=pa.schema([("k", pa.binary())]), key_column="k")
    (record,) = records_of(chunk_of(pa.record_batch({"k": [b"\xff"]}), stream), stream)
    assert record.key == b"\xff"


def joined_of(*counts: int) -> ChunkBatch:
    """Joined chunks with these numbers of records; the first record has ordinal 100."""
    encoded = [
        encode_chunk(
            b"x" * 8, record_count=count, stream_id=1, streamlet_id=0, schema_id=1, producer_id=1, producer_epoch=1,
            sequence=number, created_us=0, min_timestamp_us=0, max_timestamp_us=0,
        )
        for number, count in enumerate(counts)
    ]  # fmt: skip
    batch = pa.record_batch({"n": pa.array(range(100, 100 + sum(counts)), pa.int64())})
    header = read_header(encoded[0].header)._replace(first_record=100, record_count=sum(counts))
    joined = b"".join(bytes(each.header) for each in encoded)
    end = Position(1, 1, sum(read_header(each.header).chunk_bytes for each in encoded))
    return ChunkBatch(batch, header, Position(1, 1, 0), end, EntryId(1, 0, 0), joined=joined)


@pytest.mark.parametrize("record", range(98, 112))
def test_since_leaves_out_earlier_records_of_joined_chunks(record: int) -> None:
    chunks = joined_of(3, 4, 3)
    parts = list(chunks.since(record))
    first = max(record, 100)
    assert [value for part in parts for value in part.batch["n"].to_pylist()] == list(range(first, 110))
    assert parts[-1].next == chunks.next
    for part in parts:
        assert part.header.record_count == part.batch.num_rows
        if part.batch.num_rows:
            assert part.batch["n"][0].as_py() == part.header.first_record
            assert list(part.ends())[-1] == (part.batch["n"][-1].as_py(), part.next)
    starts = dict(zip((100, 103, 107), (chunks.start, *(end for _, end in chunks.ends())), strict=False))
    assert parts[0].start == starts[max((at for at in starts if at <= record), default=100)] or record >= 110


def test_since_leaves_out_earlier_records_of_a_single_chunk() -> None:
    chunk = joined_of(5)._replace(joined=b"")
    (part,) = chunk.since(102)
    assert (part.batch["n"].to_pylist(), part.header.first_record) == ([102, 103, 104], 102)
    assert (part.start, part.next) == (chunk.start, chunk.next)
    (nothing,) = chunk.since(105)
    assert (nothing.batch.num_rows, nothing.next) == (0, chunk.next)
