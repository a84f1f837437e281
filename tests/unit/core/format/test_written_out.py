"""Chunks of a few kilobytes with gigabytes of values when each is written out, and chunks that only look like them."""

from __future__ import annotations

import contextlib
import random
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import Codec, encode_chunk, encode_payload, verify_header
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX, check_payload, decode_payload, is_readable, shape_of
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.format.written_out import LIST_BYTES, check_written_out, may_grow, shared_columns
from tests.chaos.growing import GROWING, IN_METADATA, OTHERS, growing
from tests.examples import first_quick

GIB = 1 << 30
EACH_CODEC = pytest.mark.parametrize("codec", first_quick([Codec.NONE, Codec.ZSTD, Codec.LZ4], 2))


@pytest.mark.parametrize("name", GROWING)
@EACH_CODEC
def test_a_payload_that_would_become_gigabytes_is_refused_without_allocation(name: str, codec: Codec) -> None:
    batch = growing(name)
    payload = encode_payload(batch, codec)
    assert payload.size < 2 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(CorruptChunk, match=r"decompressed_bytes_max|records") as refused:
        decode_payload(payload, batch.schema, records=batch.num_rows)
    assert refused.value.attributes.get("limit", 0) in (DECOMPRESSED_BYTES_MAX, 0)
    assert pa.total_allocated_bytes() - before < 8 << 20


@pytest.mark.parametrize("name", IN_METADATA)
def test_a_broker_refuses_a_chunk_with_too_many_values_in_its_metadata(name: str) -> None:
    batch = growing(name)
    chunk = encode_chunk(
        encode_payload(batch), record_count=batch.num_rows, stream_id=1, streamlet_id=0, schema_id=1, producer_id=1,
        producer_epoch=0, sequence=0, created_us=1, min_timestamp_us=1, max_timestamp_us=1,
    ).to_bytes()  # fmt: skip
    with pytest.raises(CorruptChunk, match="values"):
        check_payload(memoryview(chunk), 0, verify_header(chunk))


_READ = """
import resource, sys
from tests.chaos.growing import growing
from tests.chaos.chunk_uses import USES
from kera.core.format.chunk import encode_payload
from kera.core.errors import CorruptChunk
from kera.core.format.record_batch import decode_payload
batch = growing(sys.argv[1])
payload = encode_payload(batch).to_pybytes()
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]), int(sys.argv[2])))
try:
    found = decode_payload(payload, batch.schema)
except CorruptChunk:
    sys.exit(0)
for use in USES:
    use(found)
sys.exit(3)
"""


@pytest.mark.parametrize("name", first_quick(["views", "list of nulls", "runs"], 1))
@pytest.mark.timeout(60)
def test_a_reader_with_little_memory_refuses_growing_chunks(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _READ, name, str(3 * GIB)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 3 * GIB, "only the child is limited"


@pytest.mark.parametrize("name", OTHERS)
@EACH_CODEC
def test_a_batch_that_does_not_grow_is_read(name: str, codec: Codec) -> None:
    batch = OTHERS[name]()
    assert decode_payload(encode_payload(batch, codec), batch.schema).equals(batch)
    assert is_readable(batch, compressed=codec is not Codec.NONE)


@pytest.mark.parametrize("name", OTHERS)
def test_the_written_out_size_is_the_sum_of_the_values(name: str) -> None:
    batch = OTHERS[name]()
    batch = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    if not shared_columns(batch.schema) or not batch.num_rows:
        check_written_out(batch, 0)
        return
    total = sum(_size(value, column.type) for column in batch.columns for value in column.to_pylist())
    check_written_out(batch, total)
    with pytest.raises(CorruptChunk) as refused:
        check_written_out(batch, total - 1)
    assert refused.value.attributes["limit"] == total - 1


def test_many_empty_lists_are_refused() -> None:
    inner = pa.ListViewArray.from_arrays(
        pa.array([0] * 1000, pa.int32()), pa.array([0] * 1000, pa.int32()), pa.nulls(0)
    )
    outer = pa.ListViewArray.from_arrays(
        pa.array([0] * 10_000, pa.int32()), pa.array([1000] * 10_000, pa.int32()), inner
    )
    batch = pa.record_batch({"c": outer})
    payload = encode_payload(batch)
    assert payload.size < 100_000
    with pytest.raises(CorruptChunk, match="decompressed_bytes_max"):
        decode_payload(payload, batch.schema, records=batch.num_rows)


def _size(value: object, kind: pa.DataType) -> int:
    """The rule, value by value; all numbers of `OTHERS` have eight bytes."""
    if isinstance(value, bytes | str):
        return max(1, len(value if isinstance(value, bytes) else value.encode()))
    if isinstance(value, list | tuple):
        size = sum(_size(each, kind) for each in value)
        return size + LIST_BYTES if isinstance(value, list) else max(1, size)
    if isinstance(value, dict):
        return max(1, sum(_size(each, kind) for each in value.values()))
    return 8 if isinstance(value, int) else 1


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_a_union_of_nothing_within_nulls_is_read(mode: str) -> None:
    """The buffers of the union are absent; a request to Arrow for them ended the process."""
    union = pa.union([pa.field("a", pa.int32()), pa.field("b", pa.string_view())], mode)
    for kind in (pa.list_(union), pa.map_(pa.string(), union), pa.list_view(union)):
        batch = pa.record_batch({"c": pa.nulls(3, kind), "d": pa.nulls(3, pa.string_view())})
        assert (
            decode_payload(encode_payload(batch), batch.schema, records=3).to_pylist() == [{"c": None, "d": None}] * 3
        )


def test_only_schemas_whose_values_may_grow_are_checked() -> None:
    assert shared_columns(DEFAULT_SCHEMA) == ()
    assert not may_grow(DEFAULT_SCHEMA)
    within = pa.struct([("a", pa.list_(pa.string_view()))])
    schema = pa.schema([("plain", pa.int64()), ("view", within), ("nothing", pa.null())])
    assert shared_columns(schema) == (1,)
    assert may_grow(schema)
    assert may_grow(pa.schema([("nothing", pa.list_(pa.null()))]))
    assert shared_columns(pa.schema([("nothing", pa.list_(pa.null()))])) == ()


@given(st.sampled_from(sorted(OTHERS)), st.integers(0, 1 << 32))
def test_arbitrary_numbers_in_buffers_raise_corrupt_chunk_only(name: str, seed: int) -> None:
    batch, random_ = OTHERS[name](), random.Random(seed)
    data = bytearray(batch.serialize().to_pybytes())
    body_at = shape_of(memoryview(data)).body_at
    for _ in range(3 if len(data) > body_at else 0):
        at = random_.randrange(body_at, max(len(data), body_at + 1)) & -4
        data[at : at + 4] = np.int32(random_.choice((0, 1, -1, 7, 1 << 30, -(1 << 31), 1 << 16))).tobytes()
    found = pa.ipc.read_record_batch(pa.py_buffer(bytes(data)), batch.schema)
    with contextlib.suppress(CorruptChunk, pa.ArrowInvalid):
        found.validate()
        check_written_out(found, DECOMPRESSED_BYTES_MAX)


def test_views_below_nulls_count_with_their_full_size() -> None:
    batch = growing("views")
    _, views, *data = batch.column(0).buffers()
    rows = batch.num_rows
    nulls = pa.Array.from_buffers(pa.binary_view(), rows, [pa.py_buffer(bytes(-(-rows // 8))), views, *data])
    with pytest.raises(CorruptChunk, match="decompressed_bytes_max"):
        check_written_out(pa.RecordBatch.from_arrays([nulls], batch.schema.names), DECOMPRESSED_BYTES_MAX)
