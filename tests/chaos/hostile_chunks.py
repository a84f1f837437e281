"""Chunks of careless or hostile writers: all kinds that a program may send, each from its own producer.

Their checksums are right, and they name an existing stream and streamlet; all else may be anything. This module only
builds the chunks, and does not send them. Readable records of theirs have the value `FOREIGN`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from kera.core.base.ids import PRODUCER_IDS
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.chaos.chunks import arrow_source, mutated
from tests.integration.field_mutants import HEADER_FIELDS, PLACEMENT_FIELDS, with_field

FOREIGN = b"of somebody"
ROWS = 3
SEGMENT_FILL = 160
"""Chunks of the usual size that fill more than a segment of 64 KiB."""
LARGEST = (1 << 32) - 1
_DECIDES_WHOSE = frozenset({"magic", "version", "header_bytes", "stream_id", "streamlet_id", "payload_crc32c"})
"""Fields without which the bytes are not a chunk, or belong to another stream."""
_SPOILT = 12
"""Randomly spoilt payloads of each producer that sends such payloads."""


class Target(NamedTuple):
    """The destination of chunks."""

    stream_id: int
    streamlet_id: int
    schema_id: int


class Kind(NamedTuple):
    """A kind of hostile chunks: `build` makes the chunks of the producer with the given id, in the order of sending."""

    name: str
    build: Callable[[Target, int], list[bytes]]


def chunk(target: Target, producer_id: int, sequence: int, *, rows: int = ROWS, epoch: int = 0) -> bytes:
    """A correct chunk; with `rows=0` it is correct except that a producer would not make it."""
    return _framed(target, producer_id, sequence, _payload(rows), rows=rows, epoch=epoch)


def _payload(rows: int) -> bytes:
    payload: bytes = encode_payload(_batch(rows)).to_pybytes()
    return payload


def _batch(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"timestamp": 5, "value": FOREIGN}] * rows, DEFAULT_SCHEMA)


def _framed(target: Target, producer_id: int, sequence: int, payload: bytes, *, rows: int, epoch: int = 0) -> bytes:
    return encode_chunk(
        pa.py_buffer(payload),
        record_count=rows,
        stream_id=target.stream_id,
        streamlet_id=target.streamlet_id,
        schema_id=target.schema_id,
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=sequence,
        created_us=5,
        min_timestamp_us=5,
        max_timestamp_us=5,
    ).to_bytes()


def _changed(field: str, value: int, *, good: int = 1) -> Callable[[Target, int], list[bytes]]:
    """Some good chunks, one whose field has this value, and the chunks that would follow it."""

    def build(target: Target, producer: int) -> list[bytes]:
        before = [chunk(target, producer, number) for number in range(good)]
        spoilt = with_field(chunk(target, producer, good), field, value)
        return [*before, spoilt, *(chunk(target, producer, good + number) for number in range(2))]

    return build


def _sequences(*numbers: int) -> Callable[[Target, int], list[bytes]]:
    return lambda target, producer: [chunk(target, producer, number) for number in numbers]


def _empty(count: int, *, rows: int = 0, payload: bool = True) -> Callable[[Target, int], list[bytes]]:
    """Chunks that claim to have no records, in a row."""

    def build(target: Target, producer: int) -> list[bytes]:
        content = _payload(rows) if payload else b""
        return [_framed(target, producer, number, content, rows=0) for number in range(count)]

    return build


def _empty_between(target: Target, producer: int) -> list[bytes]:
    return [chunk(target, producer, number, rows=ROWS * (number % 2)) for number in range(7)]


def _wild(target: Target, producer: int) -> list[bytes]:
    """Payloads whose offsets, counts and lengths are spoilt."""
    random_, valid = random.Random(producer), arrow_source(_batch(ROWS))
    return [_framed(target, producer, at, mutated(valid, random_), rows=ROWS) for at in range(_SPOILT)]


def _noise(target: Target, producer: int) -> list[bytes]:
    random_ = random.Random(producer)
    return [_framed(target, producer, at, random_.randbytes(64 << at), rows=ROWS) for at in range(4)]


def _chosen_id(target: Target, producer: int) -> list[bytes]:
    """Chunks under ids that were never assigned."""
    ids = (0, PRODUCER_IDS.start + producer, PRODUCER_IDS.stop - 1, producer + (1 << 40))
    return [chunk(target, one, number) for one in ids for number in range(2)]


def _epochs(target: Target, producer: int) -> list[bytes]:
    """Chunks with an epoch that goes up, down, and to the maximum."""
    epochs = ((0, 0), (5, 0), (4, 0), (5, 1), (0, 1), (LARGEST, 0), (LARGEST, 1), (0, 0))
    return [chunk(target, producer, sequence, epoch=epoch) for epoch, sequence in epochs]


def _fields() -> Iterator[Kind]:
    for name, (_, _, smallest, largest) in {**HEADER_FIELDS, **PLACEMENT_FIELDS}.items():
        if name in _DECIDES_WHOSE | {"payload_bytes", "producer_id"}:
            continue
        for value in dict.fromkeys((0, 1, 2, smallest, largest, largest - 1)):
            if not (name == "record_count" and value == 0):
                yield Kind(f"{name} {value}", _changed(name, value))


KINDS = (
    Kind("one empty chunk", _empty(1)),
    Kind("empty chunks in a row", _empty(5)),
    Kind("empty chunks between others", _empty_between),
    Kind("more empty chunks than a segment takes", _empty(SEGMENT_FILL)),
    Kind("no records in the header, three in the payload", _empty(3, rows=ROWS)),
    Kind("no records and no payload", _empty(3, payload=False)),
    Kind("one record more than there are", _changed("record_count", ROWS + 1)),
    Kind("a sequence again and again", _sequences(0, 0, 0, 1, 1)),
    Kind("sequences out of order", _sequences(1, 0, 2, 1)),
    Kind("sequences backwards", _sequences(*range(4), *range(3, -1, -1))),
    Kind("a sequence left out", _sequences(0, 2, 3)),
    Kind("epochs", _epochs),
    Kind("ids that nobody gave", _chosen_id),
    Kind("wild offsets", _wild),
    Kind("noise", _noise),
    *_fields(),
)


def impersonating(target: Target, producer_id: int, epoch: int, sequence: int) -> list[bytes]:
    """Chunks under the id of a producer that has sent up to `sequence`: repeated ones, and ones far ahead."""
    past = [chunk(target, producer_id, number, epoch=epoch) for number in (sequence, 0)]
    later = [chunk(target, producer_id, sequence + ahead, epoch=epoch) for ahead in (1_000, 1 << 40)]
    empty = _framed(target, producer_id, sequence, _payload(0), rows=0, epoch=epoch)
    return [*past, *later, empty]
