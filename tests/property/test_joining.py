"""Runs of chunks, honest, spoilt and of all kinds, joined by the native core and by Python with equal results.

And the joined batch has the records of the single chunks.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kera.core.errors import CorruptChunk
from kera.core.format import lean
from kera.core.format.chunk import (
    HEADER_BYTES,
    LEAN_VERSION,
    Codec,
    encode_chunk,
    encode_payload,
    place_chunk,
    verify_chunk,
)
from kera.core.format.joining import Joined, join_chunks
from kera.core.format.payload import encode_lean, open_payload
from tests.examples import fuzz_examples
from tests.native_twins import needs_native, python_only
from tests.property.batches import BATCHES
from tests.property.test_native import ODD, REPAIRED, repair

pytestmark = needs_native

BYTES_MAX = 1 << 20
SCHEMA_ID = 1
ODDITIES = st.sampled_from(("arrow", "compressed", "schema", "group", "gap", "count"))
SPOILT_AT = st.integers(0, HEADER_BYTES + 100) | st.sampled_from((4, 8, 12, 28, 44, 88, 96, 104, 128, 130))


@st.composite
def parts(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """Batches of one schema: rows of one or of two, some of them more than once, so that nulls come and go."""
    batch = draw(BATCHES)
    assume(lean.is_lean(batch.schema))
    nulls = pa.RecordBatch.from_arrays([pa.nulls(3, kind) for kind in batch.schema.types], schema=batch.schema)
    cuts = st.tuples(st.integers(0, batch.num_rows), st.integers(0, batch.num_rows)).map(
        lambda ends: batch.slice(min(ends), abs(ends[0] - ends[1]))
    )
    return draw(st.lists(cuts | st.just(batch) | st.just(nulls), min_size=1, max_size=6))


@st.composite
def runs(draw: st.DrawFn) -> tuple[bytes, pa.Schema]:
    """Consecutive chunks; one of them may be odd, and some bytes of one may be changed."""
    chunks: list[bytearray] = []
    batches = draw(parts())
    odd_one, oddity = draw(st.integers(0, 5)), draw(st.none() | ODDITIES)
    first_record = draw(st.integers(0, 5))
    for number, batch in enumerate(batches):
        odd = oddity if number == odd_one else None
        chunks.append(bytearray(_chunk(batch, first_record + (odd == "gap"), number, odd)))
        first_record += batch.num_rows
    if draw(st.booleans()):
        chunk = draw(st.sampled_from(chunks))
        for _ in range(draw(st.integers(1, 2))):
            chunk[min(draw(SPOILT_AT), len(chunk) - 1)] = draw(ODD)
        repair(chunk, 0, draw(REPAIRED))
    data = b"".join(chunks)
    return data[: draw(st.just(len(data)) | st.integers(0, len(data)))], batches[0].schema


def _chunk(batch: pa.RecordBatch, first_record: int, sequence: int, odd: str | None) -> bytes:
    codec = Codec.LZ4 if odd == "compressed" else Codec.NONE
    payload = encode_payload(batch) if odd == "arrow" else encode_lean(batch, codec)
    encoded = encode_chunk(
        payload or b"",
        record_count=batch.num_rows + (odd == "count"),
        stream_id=1,
        streamlet_id=2,
        schema_id=SCHEMA_ID + (odd == "schema"),
        producer_id=3,
        producer_epoch=4,
        sequence=sequence,
        created_us=5,
        min_timestamp_us=-sequence,
        max_timestamp_us=sequence,
        codec=codec,
        version=1 if odd == "arrow" else LEAN_VERSION,
    )
    data = bytearray(encoded.to_bytes())
    place_chunk(data, 0, (1 + (odd == "group"), 1, 0, first_record, 1, 0))
    return bytes(data)


def seen(found: Joined | None) -> list[Any] | None:
    """The result as text: a NaN is not equal to itself."""
    return None if found is None else [*found[1:], *as_text(found.batch)]


def as_text(batch: pa.RecordBatch) -> list[str]:
    return [str(batch.schema), *(column.to_string(window=batch.num_rows) for column in batch.columns)]


@settings(max_examples=fuzz_examples(400, 80))
@given(runs(), st.booleans(), st.booleans(), st.sampled_from((1, 500, 5000, 1 << 20)))
def test_runs_are_joined_as_in_python(
    run: tuple[bytes, pa.Schema], verify: bool, trusted: bool, joined_bytes_max: int
) -> None:
    data, schema = run
    assume(verify or not trusted)  # trusted and unverified chunks come without a promise
    options = {"verify": verify, "trusted": trusted, "joined_bytes_max": joined_bytes_max, "bytes_max": BYTES_MAX}
    found = join_chunks(memoryview(data), 0, schema, SCHEMA_ID, **options)  # type: ignore[arg-type]
    with python_only():
        expected = join_chunks(memoryview(data), 0, schema, SCHEMA_ID, **options)  # type: ignore[arg-type]
    if not trusted:
        assert seen(found) == seen(expected)
    elif found is not None:
        sum(sum(memoryview(buffer)) for each in found.batch.columns for buffer in each.buffers() if buffer is not None)


@settings(max_examples=fuzz_examples(200, 40))
@given(runs())
def test_a_joined_batch_has_the_records_of_the_single_chunks(run: tuple[bytes, pa.Schema]) -> None:
    data, schema = run
    found = join_chunks(
        memoryview(data),
        0,
        schema,
        SCHEMA_ID,
        verify=True,
        trusted=False,
        joined_bytes_max=1 << 20,
        bytes_max=BYTES_MAX,
    )
    batches, at = [], 0
    while at < (len(data) if found is None else found.end):
        try:
            header = verify_chunk(data, at)
            payload = pa.py_buffer(data).slice(at + HEADER_BYTES, header.payload_bytes)
            batches.append(open_payload(payload, schema, header, decompressed_bytes_max=BYTES_MAX))
        except CorruptChunk:
            assert found is None
            return
        at += header.chunk_bytes
    if found is not None:
        found.batch.validate(full=True)
        (together,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or batches[:1]
        assert as_text(found.batch) == as_text(together)
