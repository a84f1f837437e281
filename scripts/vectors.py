"""Writes docs/vectors.json: chunks, frames, keys and errors for testing a client in another language.

The bytes of a payload depend on the version of Arrow that wrote them, and are no contract; all other bytes are. So
tests compare the file with the present code, and this script runs again only when there is something new to show.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from kera.client.producing.encoding.partitioner import streamlet_of
from kera.core.errors import DataLost, KeraError, NotOwner, OutOfSequence, UnknownStream
from kera.core.format.chunk import (
    ARROW_VERSION,
    LEAN_VERSION,
    ChunkHeader,
    Codec,
    Flags,
    Placement,
    encode_chunk,
    encode_payload,
    place_chunk,
    verify_header,
)
from kera.core.format.payload import encode_lean
from kera.core.format.punctuation import encode_punctuation
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Method
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

OUT = Path(__file__).resolve().parent.parent / "docs" / "vectors.json"
STREAM_ID, PRODUCER_ID = 7_300_000_000_000_001, 42
CREATED_US = 1_700_000_000_000_000
TYPED_SCHEMA = pa.schema(
    [
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("delay", pa.int16()),
        pa.field("legs", pa.list_(pa.struct([("from", pa.string()), ("miles", pa.float64())]))),
    ]
)
PRODUCERS = (
    "record_count", "stream_id", "streamlet_id", "schema_id", "producer_id", "producer_epoch", "sequence", "created_us",
    "min_timestamp_us", "max_timestamp_us",
)  # fmt: skip
BROKERS = ("group_id", "segment_id", "entry", "first_record", "broker_epoch", "durable_head")
"""The fields of a header that producers and brokers fill in."""
Records = list[dict[str, Any]]


def main() -> None:
    """Write the file, or the file that the argument names."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.write_text(json.dumps(vectors(), indent=1) + "\n", encoding="utf-8")


def vectors() -> dict[str, Any]:
    """Return all lists of the file."""
    chunks = [
        chunk("one record", 1, DEFAULT_SCHEMA, [record(0, keys=[b"user-1"], value=b"home")], sequence=0),
        chunk(
            "three records: no key, two keys, nothing but a time",
            1,
            DEFAULT_SCHEMA,
            [
                record(1, value=b"\x00\xff"),
                record(2, keys=[b"a", b"b"], value=b"", headers=[("trace", b"\x01\x02"), ("", b"")]),
                record(3),
            ],
            sequence=1,
        ),
        chunk("LZ4", 1, DEFAULT_SCHEMA, [record(4, value=b"abc" * 200)], sequence=2, codec=Codec.LZ4),
        chunk("Zstandard", 1, DEFAULT_SCHEMA, [record(5, value=b"abc" * 200)], sequence=3, codec=Codec.ZSTD),
        chunk(
            "a stream with a schema of its own",
            2,
            TYPED_SCHEMA,
            [
                {"carrier": "UA", "time": CREATED_US, "delay": -3, "legs": [{"from": "EWR", "miles": 719.5}]},
                {"carrier": "ÖBB", "time": None, "delay": None, "legs": None},
            ],
            sequence=4,
            typed=True,
        ),
        *lean_chunks(),
    ]
    return {
        "schemas": [
            {"schema_id": 1, "what": "the default schema", "arrow_schema": schema_to_bytes(DEFAULT_SCHEMA).hex()},
            {"schema_id": 2, "what": str(TYPED_SCHEMA), "arrow_schema": schema_to_bytes(TYPED_SCHEMA).hex()},
        ],
        "chunks": chunks,
        "damaged_chunks": damaged(bytes.fromhex(chunks[0]["placed"])),
        "unreadable_chunks": unreadable({each["what"]: each for each in chunks}),
        "punctuations": [punctuation()],
        "keys": [key(data) for data in (b"", b"user-1", b"123456789", "Zürich".encode(), bytes(32), b"\xff" * 32)],
        "frames": [
            frame(api.DESCRIBE_STREAM, 1, coordinator_pb2.DescribeStreamRequest(name="clicks")),
            frame(api.MULTI_WRITE_CHUNKS, 2, broker_pb2.MultiWriteChunksRequest(chunk_count=1), chunks[0]["chunk"]),
            frame(api.MULTI_READ_CHUNKS, 1 << 40, read_request()),
            frame(api.MULTI_WRITE_CHUNKS, 2, write_response(), kind=FrameKind.REPLY),
            frame(
                api.MULTI_READ_CHUNKS,
                1 << 40,
                read_response(len(chunks[0]["placed"]) // 2),
                chunks[0]["placed"],
                kind=FrameKind.REPLY,
            ),
            error_frame(api.DESCRIBE_STREAMLETS, 3, UnknownStream("no stream 5 here", stream_id=5)),
        ],
        "errors": [
            error(NotOwner("streamlet 3 is with broker 2", stream="clicks", streamlet_id=3)),
            error(OutOfSequence("expected 4", producer_id=PRODUCER_ID, sequence=6, expected_sequence=4)),
            error(DataLost("removed by retention", lost_from=[1, 1, 0], available_from=[4, 1, 0])),
        ],
    }


def punctuation() -> dict[str, Any]:
    """Return a chunk without records, as a broker writes it."""
    chunk = bytearray(encode_punctuation(STREAM_ID, 3, CREATED_US, CREATED_US + 5))
    place_chunk(chunk, 0, Placement(7, 2, 1, 900, 4_000_000_000_000_000, 512))
    return {"timestamp_us": CREATED_US, "chunk": chunk.hex()}


def lean_chunks() -> list[dict[str, Any]]:
    """Return chunks of version 2, which together have each encoding."""
    return [
        chunk(
            "version 2: values of the same length, no keys, one time",
            1,
            DEFAULT_SCHEMA,
            [record(0, value=b"%03d" % number) for number in range(5)],
            sequence=5,
            version=LEAN_VERSION,
        ),
        chunk(
            "version 2: values of other lengths, times that differ, keys, headers",
            1,
            DEFAULT_SCHEMA,
            [
                record(0, value=b"a"),
                record(70_000, keys=[b"user-1"], value=b"x" * 300),
                record(7, keys=[], headers=[("trace", b"\x01\x02"), ("none", None)]),
            ],
            sequence=6,
            version=LEAN_VERSION,
        ),
        chunk(
            "version 2: Zstandard",
            1,
            DEFAULT_SCHEMA,
            [record(8, value=b"abc" * 200)],
            sequence=7,
            codec=Codec.ZSTD,
            version=LEAN_VERSION,
        ),
        chunk(
            "version 2: a stream with a schema of its own",
            2,
            TYPED_SCHEMA,
            [
                {"carrier": "UA", "time": CREATED_US, "delay": -3, "legs": [{"from": "EWR", "miles": 719.5}]},
                {"carrier": "ÖBB", "time": None, "delay": None, "legs": None},
            ],
            sequence=8,
            typed=True,
            version=LEAN_VERSION,
        ),
        chunk(
            "version 2: LZ4, times that are far apart, a key that is null, lists that are all empty",
            1,
            DEFAULT_SCHEMA,
            [
                record(-CREATED_US - 1, keys=[None, b""], value=b"", headers=[]),
                record(1 << 50, keys=[b"user-1"], value=b"abc" * 90, headers=[]),
            ],
            sequence=9,
            codec=Codec.LZ4,
            version=LEAN_VERSION,
        ),
        chunk(
            "version 2: times that are far apart, nothing but empty lists",
            1,
            DEFAULT_SCHEMA,
            [record(0, keys=[], headers=[]), record(1 << 33, keys=[], headers=[])],
            sequence=10,
            version=LEAN_VERSION,
        ),
    ]


def record(
    number: int, *, keys: list[bytes | None] | None = None, value: bytes | None = None, headers: Any = None
) -> dict[str, Any]:
    """Return a record of a stream with the default schema."""
    return {"timestamp": CREATED_US + number, "keys": keys, "value": value, "headers": headers}


def chunk(
    what: str,
    schema_id: int,
    schema: pa.Schema,
    records: Records,
    *,
    sequence: int,
    codec: Codec = Codec.NONE,
    typed: bool = False,
    version: int = ARROW_VERSION,
) -> dict[str, Any]:
    """Return a chunk as a producer sends it, and as a broker stores it."""
    batch = pa.RecordBatch.from_pylist(records, schema)
    times = [each["time" if typed else "timestamp"] or CREATED_US for each in records]
    encoded = encode_chunk(
        encode_payload(batch, codec) if version == ARROW_VERSION else encode_lean(batch, codec),
        record_count=len(records),
        stream_id=STREAM_ID,
        streamlet_id=sequence % 4,
        schema_id=schema_id,
        producer_id=PRODUCER_ID,
        producer_epoch=1,
        sequence=sequence,
        created_us=CREATED_US,
        min_timestamp_us=min(times),
        max_timestamp_us=max(times),
        codec=codec,
        typed=typed,
        version=version,
    )
    sent = encoded.to_bytes()
    placed = bytearray(sent)
    place_chunk(placed, 0, (5, 2, PRODUCER_ID % 2, 1000 + sequence, 9 << 32, 128 * sequence))
    return {
        "what": what,
        "header": header_fields(verify_header(placed)),
        "payload": bytes(memoryview(encoded.payload)).hex(),
        "chunk": sent.hex(),
        "placed": placed.hex(),
        "records": [{name: as_json(value) for name, value in each.items()} for each in records],
    }


def header_fields(header: ChunkHeader) -> dict[str, Any]:
    """Return a header's fields, without the magic, which JSON cannot represent."""
    return {name: int(value) for name, value in header._asdict().items() if name != "magic"}


def damaged(placed: bytes) -> list[dict[str, str]]:
    """Return invalid chunks."""

    def with_byte(at: int) -> str:
        return (placed[:at] + bytes([placed[at] ^ 1]) + placed[at + 1 :]).hex()

    newer = bytearray(placed)
    newer[4] = LEAN_VERSION + 1
    newer[84:88] = struct.pack("<I", crc32c(bytes(newer[:84])))
    return [
        {"why": "the magic is another one", "chunk": with_byte(0)},
        {"why": "a bit of the header has flipped", "chunk": with_byte(48)},
        {"why": "a bit of the placement has flipped", "chunk": with_byte(104)},
        {"why": "a bit of the payload has flipped", "chunk": with_byte(200)},
        {"why": "a bit of the padding has flipped", "chunk": with_byte(len(placed) - 1)},
        {"why": "it is cut short", "chunk": placed[:-64].hex()},
        {"why": "another version of the format", "chunk": newer.hex()},
    ]


ONE = "one record"
LEAN = "version 2: values of the same length, no keys, one time"
LEAN_KEYS = "version 2: values of other lengths, times that differ, keys, headers"
LEAN_ZSTD = "version 2: Zstandard"
UNREADABLE = [
    ("version 1: an offset beyond its buffer", ONE, struct.pack("<2i", 0, 4), struct.pack("<2i", 0, 1 << 30)),
    ("version 1: offsets that fall", ONE, struct.pack("<2i", 0, 6), struct.pack("<2i", 6, 0)),
    ("version 2: nodes that reach out of the payload", LEAN, b"\x0d\0", b"\xff\xff"),
    ("version 2: fewer bytes of nodes than nodes", LEAN, b"\x0d\0", b"\x0c\0"),
    ("version 2: a time of another kind", LEAN, b"\x45", b"\x44"),
    ("version 2: bytes that cannot be divided among the values", LEAN, b"\x48\x0f", b"\x48\x0e"),
    ("version 2: values that reach out of the body", LEAN, b"\x48\x0f", b"\x48\x14"),
    ("version 2: text that is not UTF-8", LEAN_KEYS, b"tracenone", b"\xff\xfeacenone"),
    (
        "version 2: lengths that do not add up to the sum",
        LEAN_KEYS,
        struct.pack("<2H", 1, 300),
        struct.pack("<2H", 1, 299),
    ),
    ("version 2: another length of the body than it has", LEAN_ZSTD, struct.pack("<I", 600), struct.pack("<I", 601)),
]
"""The reason, the original chunk, and the bytes of its payload to replace, with their replacement."""


def unreadable(chunks: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """Return chunks with right checksums and an invalid payload."""
    found = []
    for why, of, old, new in UNREADABLE:
        payload = bytes.fromhex(chunks[of]["payload"])
        at = payload.index(old)
        fields = chunks[of]["header"]
        found.append({"why": why, "chunk": placed(payload[:at] + new + payload[at + len(old) :], fields).hex()})
    fields = {**chunks[ONE]["header"], "record_count": 2}
    return [
        *found,
        {
            "why": "another number of records than it has",
            "chunk": placed(bytes.fromhex(chunks[ONE]["payload"]), fields).hex(),
        },
    ]


def placed(payload: bytes, fields: dict[str, int]) -> bytearray:
    """Return a chunk with these header fields, as a broker places it; the payload may be invalid."""
    encoded = encode_chunk(
        pa.py_buffer(payload),
        **{name: fields[name] for name in PRODUCERS},
        codec=Codec(fields["codec"]),
        typed=bool(fields["flags"] & Flags.TYPED),
        version=fields["version"],
    )
    chunk = bytearray(encoded.to_bytes())
    place_chunk(chunk, 0, Placement(**{name: fields[name] for name in BROKERS}))
    return chunk


def key(data: bytes) -> dict[str, Any]:
    """Return the streamlets of records with a key."""
    return {"key": data.hex(), "crc32c": crc32c(data), "streamlet": {m: streamlet_of(data, m) for m in (1, 4, 1000)}}


def frame(
    method: Method[Any, Any], request_id: int, message: Any, bulk: str = "", *, kind: FrameKind = FrameKind.REQUEST
) -> dict[str, Any]:
    """Return a request, or its reply, as a frame."""
    pieces = [bytes.fromhex(bulk)] if bulk else []
    parts = encode_frame(kind, method, request_id, message, pieces, BULK_BYTES_MAX)
    return {
        "kind": kind.name.lower(),
        "method": f"{method.service}/{method.name}",
        "number": method.number,
        "request_id": request_id,
        "message": message.SerializeToString(deterministic=True).hex(),
        "bulk": bulk,
        "frame": b"".join(parts).hex(),
    }


def error_frame(method: Method[Any, Any], request_id: int, cause: KeraError) -> dict[str, Any]:
    """Return the answer to a request that has failed as a whole."""
    return frame(method, request_id, error_to_message(cause), kind=FrameKind.ERROR)


def write_response() -> broker_pb2.MultiWriteChunksResponse:
    """Return the response for one stored chunk."""
    status = broker_pb2.ChunkStatus(group_id=5, segment_id=2, entry=0, position=0, first_record=1000)
    return broker_pb2.MultiWriteChunksResponse(statuses=[status])


def read_response(length_bytes: int) -> broker_pb2.MultiReadChunksResponse:
    """Return a response for two ranges: the first has a chunk, the second has no data for now."""
    asked = read_request().ranges
    following = common_pb2.Cursor()
    following.CopyFrom(asked[0].start)
    following.group_id, following.segment_id, following.position = 5, 2, length_bytes
    results = [
        broker_pb2.ReadResult(length_bytes=length_bytes, next=following),
        broker_pb2.ReadResult(next=asked[1].start),
    ]
    return broker_pb2.MultiReadChunksResponse(results=results)


def read_request() -> broker_pb2.MultiReadChunksRequest:
    """Return a request for two ranges: one from the oldest record on, one in the middle."""
    ranges = [
        broker_pb2.ReadRange(start=common_pb2.Cursor(stream_id=STREAM_ID, streamlet_id=0, entry=0)),
        broker_pb2.ReadRange(
            start=common_pb2.Cursor(
                stream_id=STREAM_ID, streamlet_id=3, entry=1, group_id=5, segment_id=2, position=512
            )
        ),
    ]
    return broker_pb2.MultiReadChunksRequest(ranges=ranges, bytes_max=1 << 20, wait_ms=500)


def error(cause: KeraError) -> dict[str, Any]:
    """Return an error in its form on the wire."""
    message = error_to_message(cause)
    return {
        "code": message.code,
        "message": message.message,
        "retriable": message.retriable,
        "attributes": {name: json.loads(text) for name, text in sorted(message.attributes.items())},
        "error": message.SerializeToString(deterministic=True).hex(),
    }


def as_json(value: Any) -> Any:
    """Convert a value of a record for JSON."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value


if __name__ == "__main__":
    main()
