"""Chunks for tests of epochs, made without a broker."""

from __future__ import annotations

import pyarrow as pa

from kera.client.chunk_batch import ChunkBatch
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.format.chunk import HEADER_BYTES, Placement, encode_chunk, encode_payload, place_chunk, read_header
from kera.core.format.punctuation import encode_punctuation
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.support import stream_info

ENTRY = EntryId(7, 0, 0)
CREATED_AT = 56
"""The place of the creation time in a header, see docs/format.md."""
STREAM = StreamDescription.from_message(stream_info("s", 7))


def raw(times: list[int], first_record: int = 0) -> tuple[bytes, pa.RecordBatch]:
    rows = [{"timestamp": at, "value": b"%d" % at} for at in times]
    batch = pa.RecordBatch.from_pylist(rows, DEFAULT_SCHEMA)
    chunk = bytearray(
        encode_chunk(
            encode_payload(batch),
            record_count=len(times),
            stream_id=7,
            streamlet_id=0,
            schema_id=1,
            producer_id=1,
            producer_epoch=0,
            sequence=0,
            created_us=5,
            min_timestamp_us=min(times),
            max_timestamp_us=max(times),
        ).to_bytes()
    )
    place_chunk(chunk, 0, Placement(1, 1, 0, first_record, 9))
    return bytes(chunk), batch


def chunk(times: list[int], first_record: int = 0) -> ChunkBatch:
    data, batch = raw(times, first_record)
    return ChunkBatch(batch, read_header(data), Position(1, 1, 0), Position(1, 1, len(data)), ENTRY)


def punctuation(at: int) -> ChunkBatch:
    header = read_header(encode_punctuation(7, 0, at, 5))
    batch = pa.RecordBatch.from_pylist([], DEFAULT_SCHEMA)
    return ChunkBatch(batch, header, Position(1, 1, 0), Position(1, 1, HEADER_BYTES), ENTRY)


def together(*chunks: list[int]) -> ChunkBatch:
    """Several chunks that arrived as one batch."""
    headers, at = b"", 0
    batches: list[pa.RecordBatch] = []
    for times in chunks:
        data, batch = raw(times, sum(each.num_rows for each in batches))
        headers += data[:HEADER_BYTES]
        batches.append(batch)
        at += len(data)
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    times = [at for each in chunks for at in each]
    header = read_header(headers)._replace(
        record_count=len(times), min_timestamp_us=min(times), max_timestamp_us=max(times)
    )
    return ChunkBatch(whole, header, Position(1, 1, 0), Position(1, 1, at), ENTRY, joined=headers)
