"""Joining small consecutive chunks into one batch: which chunks join, and that no bytes are lost or held."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from kera.core.format.checksum import crc32c
from kera.core.format.chunk import (
    HEADER_BYTES,
    HEADER_CRC_AT,
    LEAN_VERSION,
    ChunkHeader,
    Codec,
    encode_chunk,
    encode_payload,
    place_chunk,
    read_header,
)
from kera.core.format.joining import JOINED_PAYLOAD_BYTES_MAX, JOINED_RECORDS_MAX, Joined, join_chunks, joined_schema
from kera.core.format.payload import encode_lean
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.native_twins import needs_native, python_only

pytestmark = pytest.mark.usefixtures("either_core")

SCHEMA_ID = 3
GENEROUS = {"joined_bytes_max": 1 << 20, "bytes_max": 1 << 27}


def rows(*values: bytes | None, schema: pa.Schema = DEFAULT_SCHEMA) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"timestamp": 1, "value": value} for value in values], schema)


def chunk_of(
    batch: pa.RecordBatch, first_record: int, *, place: tuple[int, int, int] = (9, 2, 1), **other: Any
) -> bytes:
    """A placed chunk; `other` has its unusual fields."""
    codec, version = other.pop("codec", Codec.NONE), other.pop("version", LEAN_VERSION)
    payload = encode_lean(batch, codec) if version == LEAN_VERSION else encode_payload(batch)
    fields: dict[str, Any] = {
        "record_count": batch.num_rows,
        "stream_id": 7,
        "streamlet_id": 0,
        "schema_id": SCHEMA_ID,
        "producer_id": 1,
        "producer_epoch": 0,
        "sequence": first_record,
        "created_us": 1,
        "min_timestamp_us": first_record - 5,
        "max_timestamp_us": first_record + 5,
    }
    flag = other.pop("flag", 0)
    data = bytearray(encode_chunk(payload or b"", codec=codec, version=version, **fields | other).to_bytes())
    if flag:
        data[5] |= flag
        data[HEADER_CRC_AT : HEADER_CRC_AT + 4] = crc32c(data[:HEADER_CRC_AT]).to_bytes(4, "little")
    place_chunk(data, 0, (*place, first_record, 9, 0))
    return bytes(data)


def run_of(batches: Sequence[pa.RecordBatch], first_record: int = 0, **other: Any) -> list[bytes]:
    chunks = []
    for batch in batches:
        chunks.append(chunk_of(batch, first_record, **other))
        first_record += batch.num_rows
    return chunks


def joined(chunks: bytes, *, at: int = 0, schema: pa.Schema = DEFAULT_SCHEMA, **other: Any) -> Joined | None:
    settings: dict[str, Any] = {"verify": True, "trusted": False, **GENEROUS}
    return join_chunks(memoryview(chunks), at, schema, SCHEMA_ID, **settings | other)


def count(found: Joined | None) -> int:
    """The number of joined chunks."""
    return 0 if found is None else len(found.headers) // HEADER_BYTES


SMALL = [rows(b"a"), rows(b"bb", None), rows(None), rows(b"", b"c" * 300)]
GOOD = run_of(SMALL)


def test_the_batch_has_the_records_of_all_chunks_in_order() -> None:
    found = joined(b"".join(GOOD))
    assert found is not None
    found.batch.validate(full=True)
    assert found.batch.equals(pa.Table.from_batches(SMALL).combine_chunks().to_batches()[0])
    assert found.headers == b"".join(chunk[:HEADER_BYTES] for chunk in GOOD)
    assert found.end == sum(map(len, GOOD))


def test_the_joined_header_is_that_of_one_chunk_with_all_records() -> None:
    data = b"".join(GOOD)
    found = joined(data, at=len(GOOD[0]))
    assert found is not None
    header, first = found.header(len(GOOD[0])), read_header(GOOD[1])
    assert header.chunk_bytes == len(data) - len(GOOD[0])
    assert (header.record_count, header.first_record, header.sequence) == (5, 1, first.sequence)
    assert (header.min_timestamp_us, header.max_timestamp_us) == (1 - 5, 4 + 5)
    assert header[ChunkHeader._fields.index("group_id") :] == first[ChunkHeader._fields.index("group_id") :]


LARGE = rows(b"x" * JOINED_PAYLOAD_BYTES_MAX)
OTHERS: dict[str, dict[str, Any]] = {
    "an Arrow payload": {"version": 1},
    "compressed": {"codec": Codec.LZ4},
    "another schema": {"schema_id": SCHEMA_ID + 1},
    "another group": {"place": (10, 2, 1)},
    "another segment": {"place": (9, 3, 1)},
    "records are missing before it": {"first_record": 100},
    "large": {"batch": LARGE},
    "a punctuation, though with records": {"flag": 4},
    "another number of records": {"batch": rows(b"o", b"dd"), "record_count": 3},
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_run_ends_before_a_chunk_of_another_kind(which: str) -> None:
    other = {"batch": rows(b"odd"), "first_record": 6, **OTHERS[which]}
    odd = chunk_of(**other)
    data = b"".join([*GOOD, odd, *run_of(SMALL, 7)])
    assert count(joined(data)) == len(GOOD)
    assert joined(data, at=len(b"".join(GOOD[:3]))) is None, "one is not several"


@pytest.mark.parametrize("at", [2, 8, 12, 28, 50, 90, 104, 126, HEADER_BYTES + 3, -1])
def test_a_run_ends_before_a_damaged_chunk(at: int) -> None:
    damaged = bytearray(GOOD[2])
    damaged[at] ^= 1
    assert count(joined(b"".join([*GOOD[:2], damaged, GOOD[3]]))) == 2
    assert count(joined(b"".join([damaged, *GOOD[3:]]))) == 0


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, -1])
def test_a_run_ends_before_a_chunk_that_is_cut_short(left: int) -> None:
    assert count(joined(b"".join(GOOD[:3]) + GOOD[3][:left])) == 3


def test_a_chunk_without_all_of_its_padding_is_cut_short() -> None:
    payload_bytes = int.from_bytes(GOOD[2][8:12], "little")
    assert len(GOOD[2]) > HEADER_BYTES + payload_bytes
    assert count(joined(b"".join(GOOD[:2]) + GOOD[2][:-1], verify=False)) == 2


def test_a_run_ends_when_it_is_large_enough() -> None:
    data = b"".join(run_of([rows(b"v" * 1000)] * 50))
    assert count(joined(data)) == 50
    assert 8 <= count(joined(data, joined_bytes_max=10_000)) <= 10
    assert joined(data, joined_bytes_max=1) is None
    without_bytes = rows(*[None] * 40_000)
    assert count(joined(b"".join(run_of([without_bytes] * 3)))) == -(-JOINED_RECORDS_MAX // 40_000)


def test_the_written_out_size_of_a_batch_is_limited() -> None:
    """Each chunk has some bytes, and 8 MB of values when these are written out."""
    schema = pa.schema([("many", pa.list_(pa.int64(), 100_000))])
    batch = pa.record_batch([pa.FixedSizeListArray.from_arrays(pa.array([5] * 1_000_000), 100_000)], schema=schema)
    data = b"".join(run_of([batch] * 10))
    assert len(data) < 10_000
    assert joined(data, schema=schema) is None, "one is more than enough"
    assert count(joined(data, schema=schema, joined_bytes_max=9_000_000)) == 2
    assert joined(data, schema=schema, bytes_max=1_000_000) is None


def test_a_chunk_with_values_invalid_for_the_schema_is_not_joined() -> None:
    day = pa.schema([("time", pa.time32("s"))])
    wrong = pa.RecordBatch.from_arrays([pa.array([86_400], pa.int32()).view(pa.time32("s"))], schema=day)
    right = pa.RecordBatch.from_arrays([pa.array([5], pa.int32()).view(pa.time32("s"))], schema=day)
    data = b"".join(run_of([right, right, wrong, right, right]))
    assert count(joined(data, schema=day)) == 2
    assert count(joined(data, schema=day, trusted=True)) == 5


def test_checksums_are_verified_only_on_request() -> None:
    damaged = bytearray(GOOD[0])
    damaged[84] ^= 1
    data = bytes(damaged) + b"".join(GOOD[1:])
    assert joined(data) is None
    assert count(joined(data, verify=False)) == len(GOOD)


def test_only_a_small_lean_chunk_with_a_successor_is_tried() -> None:
    data = memoryview(b"".join(GOOD))
    last = len(data) - len(GOOD[-1])
    assert (joined_schema(data, 0), joined_schema(data, last)) == (SCHEMA_ID, 0)
    for odd in (chunk_of(LARGE, 0), chunk_of(rows(b"a"), 0, version=1), chunk_of(rows(b"a"), 0, codec=Codec.LZ4)):
        assert joined_schema(memoryview(odd + GOOD[0]), 0) == 0
    assert joined_schema(data, len(data) - 20) == 0


@needs_native
def test_a_joined_batch_does_not_hold_the_chunks() -> None:
    data = bytes(bytearray(b"".join(GOOD)))
    references = sys.getrefcount(data)
    found = joined(data)
    assert found is not None
    column = found.batch.column("value")
    del found
    gc.collect()
    assert sys.getrefcount(data) == references
    assert column.to_pylist() == [b"a", b"bb", None, None, b"", b"c" * 300]


@needs_native
def test_both_cores_join_the_same() -> None:
    data = b"".join(run_of([rows(*[b"v" * (n % 7)] * (n % 5 + 1)) for n in range(100)]))
    found = joined(data)
    with python_only():
        expected = joined(data)
    assert found == expected
