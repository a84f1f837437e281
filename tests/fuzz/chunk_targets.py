"""Targets: chunks, their payloads, and runs of them, as brokers, backups and readers decode them."""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pyarrow as pa
from pydantic import ByteSize

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.fetch import Fetched, NewerSchema, batches_of
from kera.client.consuming.delivering.values import rows_of
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.errors import CorruptChunk, KeraError, SchemaMismatch, invariant
from kera.core.format import chunk as chunk_format
from kera.core.format import header_table, lean
from kera.core.format.chunk import HEADER_BYTES, LEAN_VERSION, check_sent, iterate_chunks, read_header
from kera.core.format.payload import check_payload
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX
from kera.core.format.written_out import check_written_out
from tests.chaos.chunk_uses import stream_of
from tests.chaos.chunks import Source, opened, use
from tests.fuzz.payloads import (
    GROUP_ID,
    SEGMENT_ID,
    STREAM_ID,
    framed,
    placed,
    sources,
    spoilt_chunk,
    spoilt_payload,
    with_payload,
    with_spoilt_field,
)
from tests.fuzz.target import Target
from tests.native_twins import Outcome, twin_of
from tests.native_twins import outcome as outcome_of

_NUMBER = struct.Struct("<I")
lean_decode: Any = sys.modules["kera.core.format.lean.decode"]
joining: Any = sys.modules["kera.core.format.joining"]
CHUNKS_MAX = 6
VALUES_MAX = 1 << 22
WRITTEN_OUT_BYTES_MAX = VALUES_MAX
"""Limits of a batch whose values are read one by one."""
RECORDS_MAX = 8
"""Records of each of the chunks that follow each other."""
PLACE = ("stream", "streamlet_id", "entry", "position")
"""Attributes of an error about a chunk that locate it."""
EACH = ConsumerSettings(joined_bytes_max=ByteSize(0))
TOGETHER = ConsumerSettings()
SKIPPING = ConsumerSettings(corrupt_chunks="skip")


def numbered(number: int, data: bytes) -> bytes:
    """`data` with the number of its source in front."""
    return _NUMBER.pack(number) + data


def source_of(data: bytes) -> tuple[Source, bytes]:
    """The source that an input names, and the rest of the input."""
    number = _NUMBER.unpack(data[:4])[0] if len(data) >= 4 else 0
    return sources()[number % len(sources())], data[4:]


def both_ways(function: Callable[..., Any], *arguments: Any, **named: Any) -> Outcome:
    """The outcome of a call, which must be the same in Python and in the native core."""
    found = outcome_of(function, *arguments, **named)
    twin = twin_of(function)
    if twin is not None:
        other = outcome_of(twin, *arguments, **named)
        invariant(found == other, f"{function.__name__}: {found} and {other}")
    if found.error is not None and not issubclass(found.error[0], KeraError):
        raise AssertionError(f"{function}: {found.error}")
    return found


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Decode lean payloads, and join chunks, in Python."""
    native, lean_decode.native, joining.native = lean_decode.native, None, None
    try:
        yield
    finally:
        lean_decode.native = joining.native = native


# -- headers -----------------------------------------------------------------------------------------------------------


@cache
def _small() -> list[bytes]:
    """Chunks of each source with a small payload, placed and not."""
    found = [framed(source, source.payload) for source in sources() if len(source.payload) < 4_000]
    return [*found, *map(placed, found)]


def _chunk(random_: Random) -> bytes:
    chunk = spoilt_chunk(random_.choice(_small()), random_)
    return chunk + random_.choice(_small()) if random_.random() < 0.3 else chunk


def _headers(data: bytes) -> str:
    """All functions that check headers and checksums alone."""
    view = memoryview(data)
    header = both_ways(chunk_format.verify_header, view, 0)
    whole = both_ways(chunk_format.verify_chunk, view, 0)
    kept = both_ways(chunk_format.verify_placed, view, 0, 7)
    both_ways(chunk_format.verify_run, view, 64, 7, 3)
    both_ways(header_table.check_headers, view[: len(view) // HEADER_BYTES * HEADER_BYTES])
    outcome_of(lambda: list(iterate_chunks(view)))
    if kept.error is None:
        invariant(whole.error is None, "kept, and not whole")
        return "placed"
    if whole.error is None:
        sent = outcome_of(check_sent, read_header(view))
        return "whole" if sent.error is None else "not as sent"
    return "header" if header.error is None else "refused"


# -- payloads ----------------------------------------------------------------------------------------------------------


def _payload(random_: Random) -> bytes:
    number = random_.randrange(len(sources()))
    return numbered(number, spoilt_payload(sources()[number], random_))


def _open(data: bytes) -> str:
    """Open a payload as readers do. Python and the native core decode a lean one to the same values."""
    source, payload = source_of(data)
    if source.version != LEAN_VERSION or lean_decode.native is None:
        opened(source, payload)
        return "read"
    found = outcome_of(opened, source, payload)
    with without_native():
        twin = outcome_of(opened, source, payload)
    if found.error is None and twin.error is None:
        one, other = found.value[1], twin.value[1]
        invariant(one.equals(other) or repr(rows_of(one)) == repr(rows_of(other)), "other values")
        return "read"
    invariant(found == twin, f"decoded with {found.error}, and in Python with {twin.error}")
    raise CorruptChunk("both refuse it") if found.error and found.error[0] is CorruptChunk else AssertionError(found)


def _use(data: bytes) -> str:
    """Use the values of a payload as the SDK, ``kera consume`` and Spark's Python worker do."""
    source, payload = source_of(data)
    batch = opened(source, payload)
    if has_many_values(batch):
        return "read, and not used"
    return use(batch)


def has_many_values(batch: pa.RecordBatch) -> bool:
    """Whether Python takes long to make the values of a batch: its size is limited only by the bytes of a chunk."""
    try:
        check_written_out(batch, WRITTEN_OUT_BYTES_MAX)
    except CorruptChunk:
        return True
    return sum(map(_values_within, batch.columns)) > VALUES_MAX


def _values_within(column: pa.Array) -> int:
    """The number of values, with those within others. Nulls in a list take no bytes, but in Python they do."""
    kind = column.type
    within: list[pa.Array] = []
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        within = [column.field(at) for at in range(kind.num_fields)]
    elif hasattr(column, "values"):
        within = [column.values]
    return len(column) + sum(map(_values_within, within))


def _door(data: bytes) -> str:
    """Check a chunk as a broker does before it takes it, in Python and in the native core."""
    source, payload = source_of(data)
    chunk = framed(source, payload)
    header, known = read_header(chunk), lean.known_of(source.batch.schema)
    if header.version == LEAN_VERSION:
        view = memoryview(chunk)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        compressed = header.codec != 0
        sizes = {"compressed": compressed, "bytes_max": DECOMPRESSED_BYTES_MAX}
        both_ways(lean.check, view, known, header.record_count, **sizes)
    check_payload(memoryview(chunk), 0, header, known)
    return "taken"


# -- chunks that follow each other -------------------------------------------------------------------------------------


@cache
def _following(number: int) -> list[bytes]:
    """Some chunks of a few records each, as they follow each other in a segment."""
    source, found, first = sources()[number], [], 0
    for at in range(CHUNKS_MAX):
        batch = source.batch.slice(at, 1 + at % RECORDS_MAX)
        batch = pa.RecordBatch.from_pylist(batch.to_pylist(), batch.schema)  # not a slice of another batch
        payload = lean.encode(batch, None, bytes_max=1 << 20)
        invariant(payload is not None, "not lean")
        one = framed(source._replace(batch=batch), bytes(payload or b""), sequence=at)
        found.append(placed(one, first))
        first += batch.num_rows
    return found


@cache
def _joinable() -> list[int]:
    """Numbers of the sources whose chunks can be joined."""
    return [
        number
        for number, source in enumerate(sources())
        if source.version == LEAN_VERSION and not source.codec and source.batch.num_rows == 40
    ]


def _run(random_: Random) -> bytes:
    number = random_.choice(_joinable())
    chunks = list(_following(number)[: random_.randrange(2, CHUNKS_MAX + 1)])
    for _ in range(random_.choice((0, 1, 1, 2))):
        at = random_.randrange(len(chunks))
        one = chunks[at]
        match random_.randrange(5):
            case 0:
                chunks[at] = placed(with_spoilt_field(one, random_))
            case 1:
                chunks[at] = with_spoilt_field(one, random_)
            case 2:
                source = sources()[number]._replace(payload=one[HEADER_BYTES:])
                chunks[at] = with_payload(one, spoilt_payload(source, random_))
            case 3:
                chunks.insert(at, random_.choice(chunks))
            case _:
                chunks[at] = spoilt_chunk(one, random_)
    return numbered(number, b"".join(chunks))


def _fetched(data: bytes) -> Fetched:
    start = Position(GROUP_ID, SEGMENT_ID, 0)
    return Fetched(EntryId(STREAM_ID, 0, 0), start, start, [pa.py_buffer(data)], 0, None)


def _records(stream: StreamDescription, data: bytes, settings: ConsumerSettings) -> tuple[list[Any], str]:
    """The records that a reader gets, with their ordinals, and the error that ends the read."""
    found: list[Any] = []
    try:
        for batch in batches_of(_fetched(data), stream, settings):
            found += _told(batch)
    except CorruptChunk as error:
        missing = [name for name in PLACE if name not in error.attributes]
        invariant(not missing, f"an error about a chunk does not say its {missing}: {error.message}")
        return found, str(error)
    except (SchemaMismatch, NewerSchema) as error:
        return found, type(error).__name__
    return found, ""


def _told(batch: ChunkBatch) -> list[Any]:
    rows = rows_of(batch.batch)
    ends = list(batch.ends())
    invariant(len(ends) == batch.chunks and ends[-1][1] == batch.next, "it ends elsewhere than its chunks")
    return [*((batch.header.first_record + at, repr(row)) for at, row in enumerate(rows)), *ends]


def _read(data: bytes) -> str:
    """Chunks read one by one, or joined, give the same records, and the same error behind them."""
    source, data = source_of(data)
    stream = replace(stream_of(source.batch.schema), stream_id=STREAM_ID)
    each, together = _records(stream, data, EACH), _records(stream, data, TOGETHER)
    with without_native():
        in_python = _records(stream, data, TOGETHER)
    for found in (together, in_python):
        invariant(
            sorted(map(repr, each[0])) == sorted(map(repr, found[0])) and each[1] == found[1],
            f"read one by one: {len(each[0])} {each[1]!r}, together: {len(found[0])} {found[1]!r}",
        )
    skipped, _ = _records(stream, data, SKIPPING)
    invariant(len(skipped) >= len(each[0]), "fewer are read when what is corrupt is left out")
    return "read" if not each[1] else f"{'read up to' if each[0] else 'refused with'} an error"


CHUNK_TARGETS = (
    Target("chunk-headers", _chunk, _headers, ("kera.core.format.chunk", "kera.core.format.header_table")),
    Target(
        "payloads",
        _payload,
        _open,
        (
            *(
                "kera.core.format.payload",
                "kera.core.format.record_batch",
                "kera.core.format.written_out",
                "kera.core.format.lean.check",
            ),
            *("kera.core.format.lean.decode", "kera.core.format.lean.layout"),
        ),
    ),
    Target(
        "values",
        _payload,
        _use,
        (
            *("kera.client.consuming.delivering.records", "kera.client.consuming.delivering.values"),
            *("kera.cli._format", "kera.spark_connector.columns"),
        ),
        slow_s=15.0,  # many values, one by one
    ),
    Target(
        "broker-door",
        _payload,
        _door,
        ("kera.core.format.payload", "kera.core.format.record_batch", "kera.core.format.lean.check"),
    ),
    Target(
        "chunks-in-a-row",
        _run,
        _read,
        ("kera.client.cluster.fetch", "kera.core.format.joining", "kera.core.format.lean.decode"),
    ),
)
