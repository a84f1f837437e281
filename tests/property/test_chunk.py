"""The chunk format over arbitrary batches, headers and damage; see `kera.core.format.chunk` for its promises.

The exhaustive tests over one small chunk are in ``tests/unit/core/format/test_chunk.py``.
"""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import CorruptChunk
from kera.core.format.chunk import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    ChunkHeader,
    Codec,
    Flags,
    Placement,
    chunk_bytes_of,
    encode_chunk,
    encode_payload,
    iterate_chunks,
    place_chunk,
    read_header,
    verify_chunk,
    verify_header,
)
from kera.core.format.record_batch import decode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.property.batches import BATCHES, BATCHES_AND_SLICES, DEFAULT_BATCHES, INT64

pytestmark = pytest.mark.usefixtures("either_core")

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
CODECS = st.sampled_from(Codec)
# A producer's fields of a chunk. Payload, codec and record count come from the batch.
FIELDS = st.fixed_dictionaries(
    {
        "stream_id": U64,
        "streamlet_id": U32,
        "schema_id": U32,
        "producer_id": U64,
        "producer_epoch": U32,
        "sequence": U64,
        "created_us": INT64,
        "min_timestamp_us": INT64,
        "max_timestamp_us": INT64,
        "typed": st.booleans(),
    }
)
PLACEMENTS = st.builds(
    Placement,
    group_id=st.integers(1, 2**64 - 1),
    segment_id=U32,
    entry=U32,
    first_record=U64,
    broker_epoch=U64,
    durable_head=U32,
)


def encode(batch: pa.RecordBatch, codec: Codec, fields: dict[str, Any]) -> bytes:
    payload = encode_payload(batch, codec)
    return encode_chunk(payload, record_count=batch.num_rows, codec=codec, **fields).to_bytes()


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Chunks of any batch, placed or not."""
    chunk = bytearray(encode(draw(BATCHES), draw(CODECS), draw(FIELDS)))
    placement = draw(st.none() | PLACEMENTS)
    if placement is not None:
        place_chunk(chunk, 0, placement)
    return bytes(chunk)


CHUNKS = chunks()


def payload_of(chunk: bytes, header: ChunkHeader) -> memoryview:
    return memoryview(chunk)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]


@given(batch=BATCHES_AND_SLICES, codec=CODECS, fields=FIELDS)
def test_an_encoded_batch_is_decoded_again(batch: pa.RecordBatch, codec: Codec, fields: dict[str, Any]) -> None:
    chunk = encode(batch, codec, fields)

    header = verify_chunk(chunk)
    decoded = decode_payload(payload_of(chunk, header), batch.schema)

    decoded.validate(full=True)
    assert decoded.equals(batch)
    assert header.record_count == batch.num_rows
    assert header.codec == codec
    assert bool(header.flags & Flags.COMPRESSED) == (codec is not Codec.NONE)
    assert bool(header.flags & Flags.TYPED) == fields.pop("typed")
    assert fields == {name: getattr(header, name) for name in fields}
    assert not header.placed


@given(batch=BATCHES_AND_SLICES, codec=CODECS, fields=FIELDS)
def test_lengths_are_aligned_and_known_before_encoding(
    batch: pa.RecordBatch, codec: Codec, fields: dict[str, Any]
) -> None:
    announced = chunk_bytes_of(batch)
    payload = encode_payload(batch, codec)
    encoded = encode_chunk(payload, record_count=batch.num_rows, codec=codec, **fields)
    chunk = encoded.to_bytes()

    if codec is Codec.NONE:
        assert len(chunk) == announced
    assert len(chunk) % ALIGNMENT_BYTES == 0
    assert len(chunk) == encoded.chunk_bytes == read_header(chunk).chunk_bytes
    assert len(chunk) - HEADER_BYTES - payload.size < ALIGNMENT_BYTES


@given(chunk=CHUNKS, data=st.data())
def test_a_flipped_bit_anywhere_is_detected(chunk: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(chunk) - 1), label="bit")
    damaged = bytearray(chunk)
    damaged[bit // 8] ^= 1 << bit % 8

    with pytest.raises(CorruptChunk):
        verify_chunk(damaged)
    if bit // 8 < HEADER_BYTES:
        with pytest.raises(CorruptChunk):
            verify_header(damaged)


@given(chunk=CHUNKS, data=st.data())
def test_a_burst_of_errors_up_to_the_width_of_the_checksum_is_detected(chunk: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(chunk) - 4), label="at")
    noise = data.draw(st.binary(min_size=4, max_size=4).filter(any), label="noise")
    damaged = bytearray(chunk)
    for index, byte in enumerate(noise, at):
        damaged[index] ^= byte

    with pytest.raises(CorruptChunk):
        verify_chunk(damaged)


@given(chunk=CHUNKS, data=st.data())
def test_a_chunk_cut_anywhere_is_detected(chunk: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(chunk) - 1), label="length")

    with pytest.raises(CorruptChunk):
        verify_chunk(chunk[:length])


@given(noise=st.binary(max_size=400), offset=st.integers(0, 300))
def test_noise_raises_only_corrupt_chunk(noise: bytes, offset: int) -> None:
    with pytest.raises(CorruptChunk):
        verify_header(noise, offset)
    with pytest.raises(CorruptChunk):
        verify_chunk(noise, offset)
    if len(noise) > offset:
        with pytest.raises(CorruptChunk):
            list(iterate_chunks(noise, offset))


@given(parts=st.lists(CHUNKS, max_size=5), before=st.integers(0, 3), after=st.integers(0, 3))
def test_each_chunk_of_a_concatenation_is_found(parts: list[bytes], before: int, after: int) -> None:
    start = before * ALIGNMENT_BYTES
    area = bytes(start) + b"".join(parts) + bytes(after * ALIGNMENT_BYTES)
    end = len(area) - after * ALIGNMENT_BYTES

    found = list(iterate_chunks(area, start, end))

    assert [area[at : at + header.chunk_bytes] for header, at in found] == parts
    assert [header for header, _ in found] == [verify_chunk(area, at) for _, at in found]


@given(parts=st.lists(CHUNKS, min_size=1, max_size=3), data=st.data())
def test_a_concatenation_that_ends_within_a_chunk_is_refused(parts: list[bytes], data: st.DataObject) -> None:
    area = b"".join(parts)
    cut = data.draw(st.integers(1, len(parts[-1]) - 1), label="cut")

    found = iterate_chunks(area, 0, len(area) - cut)

    assert [next(found)[0].chunk_bytes for _ in parts[:-1]] == [len(part) for part in parts[:-1]]
    with pytest.raises(CorruptChunk):
        next(found)


@given(chunk=CHUNKS, placement=PLACEMENTS, before=st.integers(0, 2))
def test_placing_a_chunk_sets_its_placement_and_changes_nothing_else(
    chunk: bytes, placement: Placement, before: int
) -> None:
    at = before * ALIGNMENT_BYTES
    area = bytearray(bytes(at) + chunk + b"next")

    place_chunk(area, at, placement)

    header = verify_chunk(area, at)
    assert header.placed
    assert Placement(*(getattr(header, name) for name in Placement._fields)) == placement
    assert area[: at + 88] == bytes(at) + chunk[:88]
    assert area[at + HEADER_BYTES :] == chunk[HEADER_BYTES:] + b"next"


def decode_or_refuse(payload: Any, schema: pa.Schema) -> pa.RecordBatch | None:
    """The batch in `payload`, if it is valid; `decode_payload` must not raise any other exception."""
    try:
        batch = decode_payload(payload, schema)
    except CorruptChunk:
        return None
    batch.validate()
    return batch


@given(noise=st.binary(max_size=300))
def test_noise_is_refused_as_a_payload(noise: bytes) -> None:
    assert decode_or_refuse(noise, DEFAULT_SCHEMA) is None


@given(batch=DEFAULT_BATCHES, codec=CODECS, data=st.data())
def test_a_damaged_payload_is_refused_or_stays_within_its_memory(
    batch: pa.RecordBatch, codec: Codec, data: st.DataObject
) -> None:
    payload = bytearray(encode_payload(batch, codec))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=8), label="damaged"):
        payload[at] = data.draw(st.integers(0, 255), label="byte")

    decode_or_refuse(payload, batch.schema)


@given(batch=BATCHES, codec=CODECS, other=BATCHES)
def test_a_payload_read_with_another_schema_is_refused_or_stays_within_its_memory(
    batch: pa.RecordBatch, codec: Codec, other: pa.RecordBatch
) -> None:
    decode_or_refuse(encode_payload(batch, codec), other.schema)
