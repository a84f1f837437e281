"""The chunk format on one small chunk: its bytes, and each kind of damage. Arbitrary chunks: tests/property."""

import mmap
import struct
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from kera.core.errors import CorruptChunk, InvalidArgument
from kera.core.format.chunk import (
    HEADER_BYTES,
    PAYLOAD_BYTES_MAX,
    Codec,
    EncodedChunk,
    Flags,
    Placement,
    chained_checksum,
    check_sent,
    encode_chunk,
    encode_payload,
    iterate_chunks,
    padded,
    place_chunk,
    read_header,
    verify_chunk,
    verify_header,
    verify_placed,
)
from kera.core.format.record_batch import decode_payload

pytestmark = pytest.mark.usefixtures("either_core")

FIELDS: dict[str, Any] = {
    "record_count": 3,
    "stream_id": 0x0102030405060708,
    "streamlet_id": 11,
    "schema_id": 12,
    "producer_id": 13,
    "producer_epoch": 14,
    "sequence": 15,
    "created_us": 1_700_000_000_000_000,
    "min_timestamp_us": -1,
    "max_timestamp_us": 17,
}
PLACEMENT = Placement(group_id=1, segment_id=2, entry=3, first_record=4, broker_epoch=5)
PAYLOAD = b"not Arrow, but the frame does not look at it"


def encoded(payload: bytes = PAYLOAD, **changes: Any) -> EncodedChunk:
    return encode_chunk(pa.py_buffer(payload), **(FIELDS | changes))


UNPLACED = encoded().to_bytes()


def placed() -> bytes:
    chunk = bytearray(UNPLACED)
    place_chunk(chunk, 0, PLACEMENT)
    return bytes(chunk)


BOTH = pytest.mark.parametrize("chunk", [UNPLACED, placed()], ids=["unplaced", "placed"])


def with_header_fields(chunk: bytes, at: int, value: bytes) -> bytearray:
    """`chunk` with `value` at `at`, and a header checksum that agrees with it."""
    changed = bytearray(chunk)
    changed[at : at + len(value)] = value
    changed[84:88] = struct.pack("<I", crc32c(changed[:84]))
    return changed


# --- the bytes ---------------------------------------------------------------------------------------------


def test_each_field_is_at_its_documented_offset() -> None:
    chunk = bytearray(encoded(codec=Codec.ZSTD, typed=True).to_bytes())
    place_chunk(chunk, 0, PLACEMENT)

    def at(offset: int, kind: str) -> Any:
        return struct.unpack_from("<" + kind, chunk, offset)[0]

    assert bytes(chunk[:4]) == b"KERA"
    assert (at(4, "B"), at(5, "B"), at(6, "H")) == (1, Flags.COMPRESSED | Flags.TYPED, 128)
    assert (at(8, "I"), at(12, "I")) == (len(PAYLOAD), 3)
    assert (at(16, "Q"), at(24, "I"), at(28, "I")) == (0x0102030405060708, 11, 12)
    assert (at(32, "Q"), at(40, "I"), at(44, "I"), at(48, "Q")) == (13, 14, 2, 15)
    assert (at(56, "q"), at(64, "q"), at(72, "q")) == (1_700_000_000_000_000, -1, 17)
    assert at(80, "I") == crc32c(chunk[128:])
    assert at(84, "I") == crc32c(chunk[:84])
    assert (at(88, "Q"), at(96, "I"), at(100, "I"), at(104, "Q"), at(112, "Q"), at(120, "I")) == (1, 2, 3, 4, 5, 0)
    assert at(124, "I") == crc32c(chunk[88:124])
    assert bytes(chunk[128:]) == PAYLOAD.ljust(64, b"\0")


def test_the_bytes_of_format_version_1_do_not_change() -> None:
    # A difference here makes chunks on disk and of other versions unreadable.
    header = """
        4b455241 01 00 8000  2c000000 03000000  0807060504030201  0b000000 0c000000
        0d00000000000000  0e000000 00000000  0f00000000000000
        00401e18240a0600  ffffffffffffffff  1100000000000000  40ae7113 165d8f2d
    """
    placement = "0100000000000000  02000000 03000000  0400000000000000  0500000000000000  00000000 9096a86a"
    assert UNPLACED[:HEADER_BYTES] == bytes.fromhex(header) + bytes(40)
    assert placed()[:HEADER_BYTES] == bytes.fromhex(header) + bytes.fromhex(placement)


def test_the_parts_of_an_encoded_chunk_make_up_the_chunk() -> None:
    chunk = encoded()

    assert bytes(memoryview(chunk.payload)) == PAYLOAD  # unchanged: for a scatter/gather write, without a copy
    assert chunk.header + bytes(memoryview(chunk.payload)) + chunk.padding == chunk.to_bytes()
    assert chunk.chunk_bytes == len(chunk.to_bytes()) == read_header(chunk.to_bytes()).chunk_bytes


@pytest.mark.parametrize(("payload_bytes", "on_disk"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
def test_a_payload_is_padded_to_64_bytes(payload_bytes: int, on_disk: int) -> None:
    chunk = encoded(bytes(payload_bytes)).to_bytes()

    assert padded(payload_bytes) == on_disk
    assert len(chunk) == HEADER_BYTES + on_disk
    verify_chunk(chunk)


def test_a_payload_over_the_limit_is_refused_by_the_producer() -> None:
    with (
        mmap.mmap(-1, PAYLOAD_BYTES_MAX + 1) as pages,  # no page takes memory before a read
        memoryview(pages) as payload,
        pytest.raises(InvalidArgument, match="over the limit") as caught,
    ):
        encode_chunk(payload, **FIELDS)

    assert caught.value.attributes == {"payload_bytes": PAYLOAD_BYTES_MAX + 1, "limit": PAYLOAD_BYTES_MAX}


# --- damage ------------------------------------------------------------------------------------------------


@BOTH
def test_the_chunk_is_intact_before_it_is_damaged(chunk: bytes) -> None:
    assert verify_chunk(chunk) == verify_header(chunk) == read_header(chunk)


@BOTH
def test_any_flipped_bit_is_detected(chunk: bytes) -> None:
    missed = []
    for bit in range(8 * len(chunk)):
        damaged = bytearray(chunk)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            verify_chunk(damaged)
        except CorruptChunk:
            continue
        missed.append(bit)

    assert missed == []


@BOTH
def test_any_flipped_bit_of_the_header_is_detected_without_the_payload(chunk: bytes) -> None:
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(chunk[:HEADER_BYTES])
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptChunk):
            verify_header(damaged)


@BOTH
def test_a_chunk_cut_short_anywhere_is_detected(chunk: bytes) -> None:
    for length in range(len(chunk)):
        with pytest.raises(CorruptChunk):
            verify_chunk(chunk[:length])


def test_the_one_pass_check_of_a_placed_chunk_agrees_with_the_separate_checks() -> None:
    chunk = memoryview(bytes(64) + placed() + UNPLACED)

    end, checksum = verify_placed(chunk, 64, 7)

    assert end == 64 + verify_chunk(chunk, 64).chunk_bytes
    assert checksum == chained_checksum(chunk, 64, 7)
    with pytest.raises(CorruptChunk, match="no placement") as caught:
        verify_placed(chunk, end, checksum)
    assert caught.value.attributes == {"offset": end}


def test_the_one_pass_check_reports_any_damage_like_verify_chunk() -> None:
    chunk = placed()
    versions = [chunk[:length] for length in range(len(chunk))]
    for bit in range(8 * len(chunk)):
        flipped = bytearray(chunk)
        flipped[bit // 8] ^= 1 << bit % 8
        versions.append(bytes(flipped))

    for damaged in versions:
        with pytest.raises(CorruptChunk) as expected:
            verify_chunk(damaged)
        with pytest.raises(CorruptChunk) as caught:
            verify_placed(memoryview(damaged), 0, 0)
        assert caught.value.message == expected.value.message


@BOTH
def test_swapped_bytes_of_the_payload_are_detected(chunk: bytes) -> None:
    damaged = chunk[:128] + chunk[129:130] + chunk[128:129] + chunk[130:]

    with pytest.raises(CorruptChunk):
        verify_chunk(damaged)


def test_the_error_names_the_offset_and_the_chunk() -> None:
    area = bytearray(64) + UNPLACED
    area[-1] ^= 1

    with pytest.raises(CorruptChunk, match="at offset 64") as caught:
        verify_chunk(area, 64)

    assert caught.value.attributes == {
        "offset": 64,
        "stream_id": FIELDS["stream_id"],
        "streamlet_id": FIELDS["streamlet_id"],
        "sequence": FIELDS["sequence"],
    }


def test_a_chunk_of_another_version_is_refused_and_its_version_is_named() -> None:
    with pytest.raises(CorruptChunk, match="format version 3") as caught:
        verify_header(with_header_fields(UNPLACED, 4, b"\3"))

    assert caught.value.attributes["version"] == 3


def test_the_error_about_a_wrong_header_length_names_both_lengths() -> None:
    with pytest.raises(CorruptChunk, match="has header_bytes 64, format version 1 has 128") as caught:
        verify_header(with_header_fields(UNPLACED, 6, b"\x40\0"))

    assert caught.value.attributes["header_bytes"] == 64


def test_a_valid_header_of_a_producer_is_accepted() -> None:
    check_sent(verify_header(UNPLACED))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"record_count": 0}, "record_count"),
        ({"payload_bytes": 0}, "payload_bytes"),
        ({"codec": 3, "flags": 1}, "codec"),
        ({"codec": 1}, "flags"),
        ({"flags": 1}, "flags"),
        ({"flags": 4}, "flags"),
        ({"flags": 255, "codec": 1}, "flags"),
        ({"min_timestamp_us": 3, "max_timestamp_us": 2}, "min_timestamp_us"),
        ({"group_id": 1}, "group_id"),
        ({"durable_head": 64}, "group_id"),
        ({"placement_crc32c": 7}, "group_id"),
    ],
)
def test_the_error_about_an_invalid_field_names_it(fields: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_sent(verify_header(UNPLACED)._replace(**fields))  # type: ignore[arg-type]
    assert refused.value.attributes["field"] == field


@pytest.mark.parametrize("payload_bytes", [len(PAYLOAD) + 64, 1 << 30, (1 << 30) + 1, (1 << 32) - 1])
def test_a_length_beyond_the_present_bytes_is_refused(payload_bytes: int) -> None:
    liar = with_header_fields(UNPLACED, 8, struct.pack("<I", payload_bytes))

    verify_header(liar)  # only the length is wrong
    with pytest.raises(CorruptChunk, match="cut short"):
        verify_chunk(liar)
    with pytest.raises(CorruptChunk):
        list(iterate_chunks(liar))


def test_a_partly_cleared_placement_is_detected() -> None:
    chunk = bytearray(placed())
    chunk[88:124] = bytes(36)

    with pytest.raises(CorruptChunk, match="placement"):
        verify_header(chunk)


# --- placing -----------------------------------------------------------------------------------------------


def in_bytearray(chunk: bytes) -> Any:
    return bytearray(chunk)


def in_shared_memory(chunk: bytes) -> Any:
    memory = mmap.mmap(-1, 4096)
    memory[: len(chunk)] = chunk
    return memory


def in_arrow_buffer(chunk: bytes) -> Any:
    buffer = pa.allocate_buffer(len(chunk))
    memoryview(buffer).cast("B")[:] = chunk
    return buffer


@pytest.mark.parametrize("memory_of", [in_bytearray, in_shared_memory, in_arrow_buffer])
def test_a_chunk_is_placed_in_any_kind_of_memory(memory_of: Any) -> None:
    memory = memory_of(UNPLACED)

    place_chunk(memory, 0, PLACEMENT)

    assert bytes(memoryview(memory)[: len(UNPLACED)]) == placed()
    assert verify_chunk(memory).placed


# --- iterating ---------------------------------------------------------------------------------------------


def test_an_empty_range_has_no_chunks() -> None:
    assert list(iterate_chunks(b"")) == []
    assert list(iterate_chunks(UNPLACED, 64, 64)) == []


def test_iterating_does_not_look_beyond_the_end() -> None:
    area = UNPLACED + placed() + UNPLACED

    found = [at for _, at in iterate_chunks(area, len(UNPLACED), 2 * len(UNPLACED))]

    assert found == [len(UNPLACED)]


@pytest.mark.parametrize("rest", [b"K", UNPLACED[:127], UNPLACED[:128], UNPLACED[:-1], bytes(64), bytes(192)])
def test_iterating_over_an_incomplete_chunk_fails_with_its_offset(rest: bytes) -> None:
    found = iterate_chunks(UNPLACED + rest)

    assert next(found)[1] == 0
    with pytest.raises(CorruptChunk, match=f"offset {len(UNPLACED)}"):
        next(found)


# --- payloads ----------------------------------------------------------------------------------------------

BATCH = pa.record_batch({"number": pa.array([1, 2, None], pa.int64()), "text": pa.array(["a", None, "ccc"])})


def test_a_batch_is_read_in_place() -> None:
    payload = encode_payload(BATCH)

    batch = decode_payload(payload, BATCH.schema)

    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None]
    assert buffers
    for buffer in buffers:
        assert payload.address <= buffer.address
        assert buffer.address + buffer.size <= payload.address + payload.size


def test_a_batch_keeps_the_memory_that_it_refers_to() -> None:
    batch = decode_payload(memoryview(bytearray(encode_payload(BATCH))), BATCH.schema)

    assert batch.equals(BATCH)


@pytest.mark.parametrize("codec", [Codec.LZ4, Codec.ZSTD])
def test_compression_makes_repeated_text_smaller(codec: Codec) -> None:
    batch = pa.record_batch({"text": ["the same again and again"] * 1000})

    payload = encode_payload(batch, codec)

    assert payload.size < encode_payload(batch).size / 5
    assert decode_payload(payload, batch.schema).equals(batch)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 8,
        b"\xff\xff\xff\xff\0\0\0\0",
        b"\xff" * 64,
        BATCH.schema.serialize().to_pybytes(),
        encode_payload(BATCH).to_pybytes()[:-64],
    ],
    ids=["nothing", "zeros", "end mark", "ones", "a schema", "a batch cut short"],
)
def test_a_payload_without_a_valid_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(CorruptChunk, match="not an Arrow record batch"):
        decode_payload(payload, BATCH.schema)


def test_a_batch_of_another_schema_is_refused() -> None:
    with pytest.raises(CorruptChunk):
        decode_payload(encode_payload(BATCH), pa.schema([("other", pa.list_(pa.string())), ("more", pa.int8())]))


def test_a_batch_without_its_dictionary_is_refused() -> None:
    batch = pa.record_batch({"text": pa.array(["a", "b"]).dictionary_encode()})

    with pytest.raises(CorruptChunk):
        decode_payload(encode_payload(batch), batch.schema)


def test_a_column_that_reaches_out_of_its_buffer_is_refused() -> None:
    # The last offset is the end of the text; a reader that trusts it reads foreign memory.
    batch = pa.record_batch({"text": ["a" * 10, "b" * 10]})
    payload = bytearray(encode_payload(batch))
    offsets = struct.pack("<3i", 0, 10, 20)
    at = payload.index(offsets)
    payload[at : at + len(offsets)] = struct.pack("<3i", 0, 10, 1 << 20)

    with pytest.raises(CorruptChunk):
        decode_payload(payload, batch.schema)
