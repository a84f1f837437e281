"""Joins small consecutive chunks into one record batch, so that the cost of a batch is paid once for all of them.

A chunk costs its reader some microseconds regardless of its number of records, and each batch costs every later step
some more. So the values of a run of small chunks are copied into one batch: chunks of one segment, with lean payloads
of one schema that are not compressed. Larger chunks get a batch each, in place.

Promise: the batch has the same records as the separate chunks, checked in the same way. A run ends before a damaged
chunk, and a reader that opens this chunk separately gets the error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from kera.core.base.settings import KIB
from kera.core.errors import CorruptChunk
from kera.core.format import lean
from kera.core.format.chunk import (
    HEADER_BYTES,
    LEAN_VERSION,
    MAGIC,
    ChunkHeader,
    padded,
    read_header,
    verify_chunk,
)
from kera.core.format.header_table import table
from kera.core.format.lean.decode import import_batch, validate, written_bytes
from kera.core.format.lean.kinds import Known, known_of
from kera.core.format.punctuation import is_punctuation
from kera.core.native import native

JOINED_PAYLOAD_BYTES_MAX = 16 * KIB
"""Maximum of a chunk's payload; larger chunks are not joined."""
JOINED_RECORDS_MAX = 64 * KIB
"""A run ends with the chunk with which it reaches this number of records."""
_GIST = struct.Struct("<4sBxHI16xI12xI")
"""Fields of a header: magic, version, length of the header, length of the payload, schema, codec."""
_PLACE_FIELDS = slice(ChunkHeader._fields.index("group_id"), ChunkHeader._fields.index("first_record"))


class Joined(NamedTuple):
    """The records of several chunks."""

    batch: pa.RecordBatch
    headers: bytes
    """The headers of the chunks, one after the other."""
    end: int
    """Where the last chunk ends."""
    min_timestamp_us: int
    max_timestamp_us: int

    def header(self, at: int) -> ChunkHeader:
        """Return the header of one chunk from `at` to the end, with other fields from the header of the first chunk."""
        return read_header(self.headers)._replace(
            payload_bytes=self.end - at - HEADER_BYTES,
            record_count=self.batch.num_rows,
            min_timestamp_us=self.min_timestamp_us,
            max_timestamp_us=self.max_timestamp_us,
        )


def joined_schema(chunks: memoryview, at: int) -> int:
    """Return the schema id of the chunk at `at` if it can probably be joined with later ones; otherwise 0."""
    try:
        magic, version, header_bytes, payload_bytes, schema_id, codec = _GIST.unpack_from(chunks, at)
    except struct.error:
        return 0
    lean_one = magic == MAGIC and version == LEAN_VERSION and header_bytes == HEADER_BYTES and not codec
    follows = at + HEADER_BYTES + padded(payload_bytes) < len(chunks)
    return schema_id if lean_one and follows and payload_bytes <= JOINED_PAYLOAD_BYTES_MAX else 0


def join_chunks(
    chunks: memoryview,
    at: int,
    schema: pa.Schema,
    schema_id: int,
    *,
    verify: bool,
    trusted: bool,
    joined_bytes_max: int,
    bytes_max: int,
) -> Joined | None:
    """Join the chunks from `at` on, as far as they can be joined; None: there are fewer than two such chunks.

    `verify`: verify their checksums. `trusted`, and `bytes_max` of a chunk: see `lean.decode`. A run ends with the
    chunk with which its headers and written-out values reach `joined_bytes_max`.
    """
    if native is not None and (known := known_of(schema)).type is not None:
        found = native.join_chunks(
            chunks, at, known.type, schema, schema_id, verify, trusted, joined_bytes_max, bytes_max, import_batch
        )
        if found == ():
            return None
        if found is not None:
            joined = Joined(*found)
            if trusted or _is_valid(joined.batch, known):
                return joined
    return _join_one_by_one(
        chunks,
        at,
        schema,
        schema_id,
        verify=verify,
        trusted=trusted,
        joined_bytes_max=joined_bytes_max,
        bytes_max=bytes_max,
    )


def _is_valid(batch: pa.RecordBatch, known: Known) -> bool:
    try:
        validate(batch, known)
    except CorruptChunk:
        return False
    return True


def _join_one_by_one(
    chunks: memoryview,
    at: int,
    schema: pa.Schema,
    schema_id: int,
    *,
    verify: bool,
    trusted: bool,
    joined_bytes_max: int,
    bytes_max: int,
) -> Joined | None:
    """See `join_chunks`."""
    batches: list[pa.RecordBatch] = []
    headers: list[ChunkHeader] = []
    records = taken_bytes = 0
    while records < JOINED_RECORDS_MAX and taken_bytes < joined_bytes_max:
        try:
            header = verify_chunk(chunks, at) if verify else read_header(chunks, at)
            payload_at = at + HEADER_BYTES
            payload = pa.py_buffer(chunks[payload_at : payload_at + header.payload_bytes])
            whole = at + header.chunk_bytes <= len(chunks)
            if not whole or not _can_join(header, schema_id, headers[-1:]):
                break
            batch = lean.decode(
                payload, schema, records=header.record_count, codec=None, bytes_max=bytes_max, trusted=trusted
            )
        except CorruptChunk:
            break
        batches.append(batch)
        headers.append(header)
        records += header.record_count
        taken_bytes += HEADER_BYTES + written_bytes(payload, schema, header.record_count)
        at += header.chunk_bytes
    if len(batches) < 2:
        return None
    (batch,) = pa.Table.from_batches(batches, schema).combine_chunks().to_batches() or batches[:1]
    return Joined(
        batch,
        table(headers).tobytes(),
        at,
        min(header.min_timestamp_us for header in headers),
        max(header.max_timestamp_us for header in headers),
    )


def _can_join(header: ChunkHeader, schema_id: int, before: Sequence[ChunkHeader]) -> bool:
    """Return whether a chunk can join the run; `before`: the header of the last chunk in it, if any."""
    return (
        (header.magic, header.version, header.header_bytes) == (MAGIC, LEAN_VERSION, HEADER_BYTES)
        and header.payload_bytes <= JOINED_PAYLOAD_BYTES_MAX
        and (header.codec, header.schema_id) == (0, schema_id)
        and not is_punctuation(header)
        and all(
            header[_PLACE_FIELDS] == each[_PLACE_FIELDS]
            and header.first_record == each.first_record + each.record_count
            for each in before
        )
    )
