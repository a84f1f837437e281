"""The payload of a chunk, in any version of the format: brokers check it on arrival, readers open it.

The versions are in ``kera.core.format.record_batch`` (1, an Arrow message) and ``kera.core.format.lean`` (2).
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from kera.core.errors import CorruptChunk
from kera.core.format import lean, record_batch
from kera.core.format.chunk import ARROW_CODECS, HEADER_BYTES, LEAN_VERSION, ChunkHeader, Codec
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX


def check_payload(chunk: memoryview, at: int, header: ChunkHeader, known: lean.Known) -> None:
    """Check the payload of the chunk at `at` against its header, whose checksums were verified, and its schema.

    Raises `CorruptChunk` if it is not a record batch, if its number of records is not that in the header, or if it
    would be too large when it is decompressed or written out; in version 2 also if it does not match the schema.
    """
    if header.version != LEAN_VERSION:
        record_batch.check_payload(chunk, at, header)
        return
    payload_at = at + HEADER_BYTES
    payload = chunk[payload_at : payload_at + header.payload_bytes]
    try:
        lean.check(payload, known, header.record_count, compressed=header.codec != 0, bytes_max=DECOMPRESSED_BYTES_MAX)
    except CorruptChunk as error:
        names = {"stream_id": header.stream_id, "streamlet_id": header.streamlet_id, "sequence": header.sequence}
        raise CorruptChunk(
            f"{error.message} (stream {header.stream_id}, streamlet {header.streamlet_id}, sequence {header.sequence})",
            **{**error.attributes, **names},
        ) from None


def open_payload(
    payload: Any,
    schema: pa.Schema,
    header: ChunkHeader,
    *,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
    trusted: bool = False,
) -> pa.RecordBatch:
    """Return the record batch in a chunk's payload; as far as the format allows, its columns are `payload`'s memory.

    Whatever the bytes are, no column reaches beyond its buffers, and text is valid: a checksum only shows that the
    bytes are what some program has written. Raises `CorruptChunk` if they are not a batch of `schema`, if the number of
    records is not that in the header, or if they would take more than `decompressed_bytes_max`, also when each value is
    written out. `trusted`: check only what decoding needs, so that none of this holds if a dishonest program has
    written the payload.
    """
    if header.version != LEAN_VERSION:
        return record_batch.decode_payload(
            payload,
            schema,
            records=header.record_count,
            decompressed_bytes_max=decompressed_bytes_max,
            trusted=trusted,
        )
    if header.codec and header.codec not in ARROW_CODECS:
        raise CorruptChunk(f"chunk has codec {header.codec}, which this program does not know", codec=header.codec)
    return lean.decode(
        payload if isinstance(payload, pa.Buffer) else pa.py_buffer(payload),
        schema,
        records=header.record_count,
        codec=ARROW_CODECS.get(header.codec),
        bytes_max=decompressed_bytes_max,
        trusted=trusted,
    )


def encode_lean(batch: pa.RecordBatch, codec: Codec, schema: pa.Schema | None = None) -> bytes | None:
    """Return a batch as a payload of version 2; None: it has to be of version 1 (`kera.core.format.lean.encode`).

    `schema`: the batch's schema, given by callers that encode many batches with it. Its properties are cached by the
    identity of the object, and `batch.schema` makes a new object each time.
    """
    if not lean.is_lean(schema or batch.schema):
        return None
    return lean.encode(batch, ARROW_CODECS.get(codec), bytes_max=DECOMPRESSED_BYTES_MAX)
