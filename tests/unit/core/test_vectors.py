"""docs/vectors.json and docs/writing-a-client.md, for clients in other languages, agree with this code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from crc32c import crc32c

from kera.client.producing.encoding.partitioner import streamlet_of
from kera.core.errors import CorruptChunk
from kera.core.format.chunk import (
    HEADER_BYTES,
    LEAN_VERSION,
    PLACEMENT_AT,
    ChunkHeader,
    Codec,
    Flags,
    encode_chunk,
    verify_chunk,
)
from kera.core.format.lean import known_of
from kera.core.format.payload import check_payload, encode_lean, open_payload
from kera.core.format.punctuation import encode_punctuation, is_punctuation
from kera.core.format.schema import DEFAULT_SCHEMA, schema_from_bytes
from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from kera.core.rpc.frames import FrameKind, decode_header
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, common_pb2, consumer_group_pb2, coordinator_pb2

DOCS = Path(__file__).resolve().parents[3] / "docs"
VECTORS: dict[str, Any] = json.loads((DOCS / "vectors.json").read_text(encoding="utf-8"))
SCHEMAS = {each["schema_id"]: schema_from_bytes(bytes.fromhex(each["arrow_schema"])) for each in VECTORS["schemas"]}
LEAN_CHUNKS = [each for each in VECTORS["chunks"] if each["header"]["version"] == LEAN_VERSION]
METHODS = {
    f"{method.service.removeprefix('kera.v1.')}.{method.name}": method.number
    for table in (api.BROKER_METHODS, api.COORDINATOR_METHODS, api.CONSUMER_GROUPS_METHODS)
    for method in table
}


def described(lists: str, name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", VECTORS[lists], ids=[str(each[name]) for each in VECTORS[lists]])


def as_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value


def rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows as the vectors have them: timestamps are microseconds, bytes are hexadecimal digits."""
    columns = [column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column for column in batch.columns]
    listed = pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
    return [{name: as_json(value) for name, value in row.items()} for row in listed]


def test_the_first_schema_is_the_default_one() -> None:
    assert SCHEMAS[1].equals(DEFAULT_SCHEMA)


@described("chunks", "what")
def test_a_chunk_has_its_documented_fields(vector: dict[str, Any]) -> None:
    header = verify_chunk(bytes.fromhex(vector["placed"]))
    assert {name: value for name, value in header._asdict().items() if name != "magic"} == vector["header"]
    assert set(vector["header"]) == set(ChunkHeader._fields) - {"magic"}


@described("chunks", "what")
def test_a_chunk_is_encoded_to_its_documented_bytes(vector: dict[str, Any]) -> None:
    fields = vector["header"]
    encoded = encode_chunk(
        pa.py_buffer(bytes.fromhex(vector["payload"])),
        **{name: fields[name] for name in (
            "record_count", "stream_id", "streamlet_id", "schema_id", "producer_id", "producer_epoch", "sequence",
            "created_us", "min_timestamp_us", "max_timestamp_us",
        )},
        codec=Codec(fields["codec"]),
        typed=bool(fields["flags"] & Flags.TYPED),
        version=fields["version"],
    )  # fmt: skip
    assert encoded.to_bytes().hex() == vector["chunk"]
    assert vector["placed"][: 2 * PLACEMENT_AT] == vector["chunk"][: 2 * PLACEMENT_AT]
    assert vector["placed"][2 * HEADER_BYTES :] == vector["chunk"][2 * HEADER_BYTES :]


@described("chunks", "what")
def test_a_chunk_has_its_documented_records(vector: dict[str, Any]) -> None:
    header = verify_chunk(bytes.fromhex(vector["chunk"]))
    batch = open_payload(bytes.fromhex(vector["payload"]), SCHEMAS[header.schema_id], header)
    assert rows(batch) == vector["records"]
    assert batch.num_rows == vector["header"]["record_count"]


@pytest.mark.parametrize("vector", LEAN_CHUNKS, ids=[each["what"] for each in LEAN_CHUNKS])
def test_a_lean_payload_has_its_documented_bytes(vector: dict[str, Any]) -> None:
    chunk = memoryview(bytes.fromhex(vector["chunk"]))
    header = verify_chunk(chunk)
    check_payload(chunk, 0, header, known_of(SCHEMAS[header.schema_id]))
    batch = open_payload(bytes.fromhex(vector["payload"]), SCHEMAS[header.schema_id], header)
    made = encode_lean(batch, Codec(header.codec))
    assert made is not None
    if not header.codec:  # the compressed bytes depend on the version of the library
        assert made.hex() == vector["payload"]


def test_the_documented_punctuation_is_that_of_brokers() -> None:
    (vector,) = VECTORS["punctuations"]
    chunk = bytes.fromhex(vector["chunk"])
    header = verify_chunk(chunk)
    assert is_punctuation(header)
    assert header.placed
    assert (header.min_timestamp_us, header.max_timestamp_us) == (vector["timestamp_us"],) * 2
    made = encode_punctuation(header.stream_id, header.streamlet_id, header.max_timestamp_us, header.created_us)
    assert chunk[:PLACEMENT_AT] == made[:PLACEMENT_AT]


@described("damaged_chunks", "why")
def test_a_damaged_chunk_is_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(CorruptChunk):
        verify_chunk(bytes.fromhex(vector["chunk"]))


@described("unreadable_chunks", "why")
def test_an_unreadable_chunk_with_good_checksums_is_refused(vector: dict[str, Any]) -> None:
    chunk = bytes.fromhex(vector["chunk"])
    header = verify_chunk(chunk)
    payload = chunk[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    with pytest.raises(CorruptChunk):
        open_payload(payload, SCHEMAS[header.schema_id], header)


@described("keys", "key")
def test_a_key_has_its_documented_streamlet(vector: dict[str, Any]) -> None:
    key = bytes.fromhex(vector["key"])
    assert crc32c(key) == vector["crc32c"]
    assert {m: streamlet_of(key, int(m)) for m in vector["streamlet"]} == vector["streamlet"]


@described("frames", "frame")
def test_a_frame_has_its_documented_contents(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["frame"])
    header = decode_header(memoryview(frame), 0, BULK_BYTES_MAX)
    message, bulk = bytes.fromhex(vector["message"]), bytes.fromhex(vector["bulk"])
    assert (header.method, header.request_id) == (vector["number"], vector["request_id"])
    assert (header.head_bytes, header.bulk_bytes) == (len(message), len(bulk))
    assert frame[FRAME_HEADER_BYTES:] == message + bulk
    assert METHODS[vector["method"].removeprefix("kera.v1.").replace("/", ".")] == vector["number"]
    assert FrameKind(header.kind).name.lower() == vector["kind"]


def test_the_documented_frames_have_each_kind_and_can_be_decoded() -> None:
    frames = {(each["kind"], each["number"]): each for each in VECTORS["frames"]}
    assert {kind for kind, _ in frames} == {"request", "reply", "error"}
    error = common_pb2.Error.FromString(bytes.fromhex(frames["error", api.DESCRIBE_STREAMLETS.number]["message"]))
    assert (error.code, dict(error.attributes)) == ("unknown_stream", {"stream_id": "5"})
    written = frames["reply", api.MULTI_WRITE_CHUNKS.number]
    assert written["request_id"] == frames["request", api.MULTI_WRITE_CHUNKS.number]["request_id"]
    (status,) = broker_pb2.MultiWriteChunksResponse.FromString(bytes.fromhex(written["message"])).statuses
    assert (status.group_id, status.segment_id, status.first_record) == (5, 2, 1000)
    read = frames["reply", api.MULTI_READ_CHUNKS.number]
    assert read["request_id"] == frames["request", api.MULTI_READ_CHUNKS.number]["request_id"]
    first, second = broker_pb2.MultiReadChunksResponse.FromString(bytes.fromhex(read["message"])).results
    assert (first.length_bytes, first.next.position, second.length_bytes) == (len(read["bulk"]) // 2,) * 2 + (0,)
    assert verify_chunk(bytes.fromhex(read["bulk"])).chunk_bytes == first.length_bytes


@described("errors", "code")
def test_an_error_has_its_documented_contents(vector: dict[str, Any]) -> None:
    error = error_from_message(common_pb2.Error.FromString(bytes.fromhex(vector["error"])))
    assert (error.code, error.message, error.retriable) == (vector["code"], vector["message"], vector["retriable"])
    assert error.attributes == vector["attributes"]


def test_the_page_names_the_methods_by_their_numbers() -> None:
    page = (DOCS / "writing-a-client.md").read_text(encoding="utf-8")
    told = {name: int(number) for name, number in re.findall(r"\| `(\w+\.\w+)` \| (\d+)", page)}
    assert len(told) >= 15
    assert told == {name: METHODS[name] for name in told}


def test_the_page_names_every_field_that_a_producer_fills_in() -> None:
    page = (DOCS / "writing-a-client.md").read_text(encoding="utf-8")
    header = page[page.index("### The header") : page.index("### Sequences")]
    ours = ChunkHeader._fields[: ChunkHeader._fields.index("group_id")]
    assert [name for name in ours if f"`{name}`" not in header] == []


@pytest.mark.parametrize("messages", [consumer_group_pb2, broker_pb2, common_pb2, coordinator_pb2])
def test_the_messages_name_one_go_package(messages: Any) -> None:
    assert messages.DESCRIPTOR.GetOptions().go_package == "kera/v1;kerav1"
