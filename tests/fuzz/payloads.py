"""Chunks with valid checksums and wrong bytes: headers, Arrow messages, lean payloads. Pure.

`tests.chaos.chunks` changes payloads at random. Here the changes also go where they hurt: the numbers of records,
values and nulls, the place of each buffer, the decompressed length, where each value of a list or a text begins.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from random import Random
from typing import NamedTuple

import pyarrow as pa
from crc32c import crc32c

from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    HEADER_CRC_AT,
    PAYLOAD_CRC_AT,
    Placement,
    encode_chunk,
    padding_of,
    place_chunk,
)
from kera.core.format.record_batch import Shape, shape_of
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.chaos import chunks as chaos_chunks
from tests.chaos.chunks import Source, arrow_source
from tests.fuzz.mutating import mutated, near, wild
from tests.integration.field_mutants import HEADER_FIELDS, PLACEMENT_FIELDS, field_of, with_field

STREAM_ID, STREAMLET_ID, SCHEMA_ID = 7, 0, 1
GROUP_ID, SEGMENT_ID, EPOCH = 1, 1, 1
DEEP = 40
"""Depth of the lists within lists of a schema."""
_I64 = struct.Struct("<q")


class Chunk(NamedTuple):
    """A chunk and its source."""

    source: Source
    data: bytes


@cache
def sources() -> list[Source]:
    """All kinds of payloads, to be changed. Kept inputs name them by number: new ones come last."""
    nested: pa.Array = pa.array(range(8), pa.int8())
    for _ in range(DEEP):
        nested = pa.ListArray.from_arrays(pa.array([0, *range(1, len(nested) + 1)], pa.int32()), nested)
    wide = pa.RecordBatch.from_pydict({f"c{number}": pa.array([number] * 4) for number in range(200)})
    deep = pa.RecordBatch.from_arrays([nested], names=["deep"])
    before = chaos_chunks.whole() + chaos_chunks.too_large()
    return [*before, arrow_source(deep), arrow_source(wide), *chaos_chunks.nested(), *chaos_chunks.never_null()]


def spoilt_payload(source: Source, random_: Random) -> bytes:
    """The payload of `source`, with some changes."""
    if random_.random() < (0.3 if source.version == ARROW_VERSION else 0.8):
        return chaos_chunks.mutated(source, random_)
    if source.version != ARROW_VERSION or random_.random() < 0.1:
        return mutated(source.payload, random_, [source.payload])
    data = bytearray(source.payload)
    shape = shape_of(memoryview(source.payload))
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        random_.choice(_CHANGES)(data, shape, random_)
    return bytes(data)


def _put(data: bytearray, at: int, width: int, random_: Random) -> None:
    if at >= 0 and at + width <= len(data):
        was = int.from_bytes(data[at : at + width], "little")
        data[at : at + width] = near(random_, was, 8 * width).to_bytes(width, "little")


def _count(data: bytearray, at: int) -> int:
    return min(1 << 14, int.from_bytes(data[at : at + 4], "little")) if at and at + 4 <= len(data) else 0


def _records(data: bytearray, shape: Shape, random_: Random) -> None:
    """Change the number of records, at one of the places in the metadata with that number."""
    places = [at for at in range(8, shape.body_at - 7, 4) if _I64.unpack_from(data, at)[0] == shape.records]
    if places:
        _put(data, random_.choice(places), 8, random_)


def _node(data: bytearray, shape: Shape, random_: Random) -> None:
    """Change how many values or nulls a field has, or how many fields there are."""
    count = _count(data, shape.nodes_at)
    if not count or random_.random() < 0.1:
        _put(data, shape.nodes_at, 4, random_)
    else:
        _put(data, shape.nodes_at + 4 + 8 * random_.randrange(2 * count), 8, random_)


def _buffer(data: bytearray, shape: Shape, random_: Random) -> None:
    """Change where a buffer is, or its length; or replace both by another buffer's; or change the number of buffers."""
    count = _count(data, shape.buffers_at)
    if not count or random_.random() < 0.1:
        _put(data, shape.buffers_at, 4, random_)
        return
    at = shape.buffers_at + 4 + 16 * random_.randrange(count)
    if random_.random() < 0.3:
        other = shape.buffers_at + 4 + 16 * random_.randrange(count)
        data[at : at + 16] = data[other : other + 16]
    else:
        _put(data, at + random_.choice((0, 8)), 8, random_)


def _values(data: bytearray, shape: Shape, random_: Random) -> None:
    """Change a number in a buffer, such as an offset, an index or a decompressed length; or change many of them."""
    count = _count(data, shape.buffers_at)
    if not count:
        return
    at = shape.buffers_at + 4 + 16 * random_.randrange(count)
    begin = shape.body_at + int.from_bytes(data[at : at + 8], "little")
    length = int.from_bytes(data[at + 8 : at + 16], "little")
    if not 0 < length <= len(data) - begin or begin < 0:
        return
    width = random_.choice((1, 4, 4, 8))
    places = max(1, length // width)
    first = random_.choice((0, 0, places - 1, random_.randrange(places)))
    if random_.random() < 0.2:
        value = wild(random_, 8 * width).to_bytes(width, "little")
        data[begin + first * width : begin + places * width] = value * (places - first)
    else:
        _put(data, begin + first * width, width, random_)


def _metadata(data: bytearray, shape: Shape, random_: Random) -> None:
    """Change a word of the tables that locate everything else."""
    _put(data, random_.randrange(0, max(1, shape.body_at // 2)) * 2, random_.choice((1, 2, 4, 8)), random_)


def _length(data: bytearray, shape: Shape, random_: Random) -> None:
    if random_.random() < 0.5:
        del data[random_.randrange(shape.body_at, len(data) + 1) :]
    else:
        data += bytes(8 * random_.randrange(64))


_CHANGES: tuple[Callable[[bytearray, Shape, Random], None], ...] = (
    *(_records, _node, _node, _buffer, _buffer, _values, _values, _values, _metadata, _metadata, _length),
)


# -- chunks ------------------------------------------------------------------------------------------------------------


def framed(source: Source, payload: bytes, *, sequence: int = 0, records: int | None = None) -> bytes:
    """A chunk of this payload as its producer sends it, with valid checksums."""
    return encode_chunk(
        payload,
        record_count=source.batch.num_rows if records is None else records,
        stream_id=STREAM_ID,
        streamlet_id=STREAMLET_ID,
        schema_id=SCHEMA_ID,
        producer_id=9,
        producer_epoch=0,
        sequence=sequence,
        created_us=5,
        min_timestamp_us=0,
        max_timestamp_us=5,
        codec=source.codec,
        typed=not source.batch.schema.equals(DEFAULT_SCHEMA),
        version=source.version,
    ).to_bytes()


def placed(chunk: bytes, first_record: int = 0) -> bytes:
    """A chunk as it is in a log."""
    if len(chunk) < HEADER_BYTES:
        return chunk
    data = bytearray(chunk)
    place_chunk(data, 0, Placement(GROUP_ID, SEGMENT_ID, 0, first_record, EPOCH))
    return bytes(data)


def with_payload(chunk: bytes, payload: bytes) -> bytes:
    """`chunk` with another payload and valid checksums."""
    header = bytearray(chunk[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
    body = payload + padding_of(len(payload))
    header[8:12] = len(payload).to_bytes(4, "little")
    header[PAYLOAD_CRC_AT:HEADER_CRC_AT] = crc32c(body).to_bytes(4, "little")
    header[HEADER_CRC_AT : HEADER_CRC_AT + 4] = crc32c(bytes(header[:HEADER_CRC_AT])).to_bytes(4, "little")
    return bytes(header) + body


def with_spoilt_field(chunk: bytes, random_: Random) -> bytes:
    """`chunk` with another number in a field of its header, and valid checksums."""
    if len(chunk) < HEADER_BYTES:
        return chunk
    name = random_.choice([*HEADER_FIELDS, *PLACEMENT_FIELDS])
    _, layout, smallest, largest = HEADER_FIELDS.get(name) or PLACEMENT_FIELDS[name]
    bits = 8 * struct.calcsize(layout)
    value = near(random_, field_of(chunk, name) % (1 << bits), bits)
    if smallest < 0 and value > largest:
        value -= 1 << bits
    return with_field(chunk, name, value)


def spoilt_chunk(chunk: bytes, random_: Random) -> bytes:
    """A chunk with some changes; most of the time its checksums are valid."""
    match random_.randrange(6):
        case 0:
            return mutated(chunk, random_)
        case 1 | 2:
            return with_payload(chunk, mutated(chunk[HEADER_BYTES:], random_))
        case _:
            return with_spoilt_field(chunk, random_)
