"""The chunk: the unit in which records are written, replicated, stored, pushed and read.

A chunk is framed and checksummed once, by the producer, and then moved as opaque bytes. Its header says where it
belongs, so that groups can be rebuilt from any set of chunks. Little-endian:

    0        4  5  6        8             12            16                          24            28
    ┌────────┬──┬──┬────────┬─────────────┬─────────────┬───────────────────────────┬─────────────┬────────────┐
    │ "KERA" │v │fl│hdr len │payload_bytes│record_count │ stream_id                 │streamlet_id │ schema_id  │
    ├────────┴──┴──┴────────┴─────────────┼─────────────┼─────────────┬─────────────┴─────────────┴────────────┤
    │32 producer_id                       │40 prod_epoch│44 codec     │48 sequence                             │
    ├─────────────────────────────────────┼─────────────┴─────────────┼────────────────────────────────────────┤
    │56 created_us                        │64 min_timestamp_us        │72 max_timestamp_us                     │
    ├──────────────────┬──────────────────┼───────────────────────────┴────────────────────────────────────────┤
    │80 payload_crc32c │84 header_crc32c  │   header_crc32c covers bytes 0..83; all of this is the producer's  │
    ├──────────────────┴──────────────────┼─────────────┬─────────────┬────────────────────────────────────────┤
    │88 group_id                          │96 segment_id│100 entry    │104 first_record                        │
    ├─────────────────────────────────────┼─────────────┼─────────────┼────────────────────────────────────────┤
    │112 broker_epoch                     │120 durable_ │124 placement│   bytes 88..127: written by the broker │
    ├─────────────────────────────────────┴─────head────┴─crc32c──────┴────────────────────────────────────────┤
    │128 payload: of version 1 one Arrow IPC record-batch message, of version 2 a lean one; zero-padded to 64 n│
    └──────────────────────────────────────────────────────────────────────────────────────────────────────────┘

Promises:

* `payload_crc32c` covers the payload *with* its padding, `header_crc32c` bytes 0..83, `placement_crc32c` bytes 88..123.
  Before the broker places a chunk, bytes 88..127 must all be zero. So any flipped bit is detected.
* A chunk's length is a multiple of 64, and so every chunk and every payload in a segment is 64-byte aligned if the
  segment is; within a payload, Arrow aligns its buffers to 8 bytes.
* The size is known exactly before encoding (`chunk_bytes_of`), unless the payload is compressed.

Other modules decide what is in the record batch (``kera.client``) and where chunks go (``kera.broker``).
"""

from __future__ import annotations

import enum
import struct
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from kera.core.errors import CorruptChunk, InvalidArgument, invariant
from kera.core.format.checksum import crc32c
from kera.core.native import accelerated

MAGIC = b"KERA"
ARROW_VERSION = 1
"""The format version whose payload is an Arrow message (``kera.core.format.record_batch``)."""
LEAN_VERSION = 2
"""The format version whose payload has only the parts that differ from chunk to chunk (``kera.core.format.lean``)."""
VERSIONS = (ARROW_VERSION, LEAN_VERSION)
HEADER_BYTES = 128
ALIGNMENT_BYTES = 64
PAYLOAD_BYTES_MAX = 1 << 30
"""No segment comes near this; a larger length means a corrupt header, and is refused before memory is allocated."""

_PRODUCER = struct.Struct("<4sBBHIIQIIQIIQqqqI")  # bytes 0..83
_PLACEMENT = struct.Struct("<QIIQQI")  # bytes 88..123
_CRC = struct.Struct("<I")
_CREATED_US = struct.Struct("<56xq")
_HEADER = struct.Struct("<4sBBHIIQIIQIIQqqqIIQIIQQII")
PAYLOAD_CRC_AT = 80
HEADER_CRC_AT = 84
PLACEMENT_AT = 88
PLACEMENT_CRC_AT = 124
_PLACED = struct.Struct("<QIIQQII")  # bytes 88..127
_COVERED_AND_CRC = struct.Struct(f"<{_PLACEMENT.size}sI")  # bytes 88..127 as well
MAX_TIMESTAMP_AT = 72
"""The offset of `max_timestamp_us` in a header, for callers that read it from many headers at once."""
_CHECKED = struct.Struct("<4sBxHI68xIIQ28xI")  # the fields that `verify_placed` reads
_UNPLACED = bytes(HEADER_BYTES - PLACEMENT_AT)
_NO_PLACEMENT = _PLACED.unpack(_UNPLACED)
_KNOWN = tuple((MAGIC, version, HEADER_BYTES) for version in VERSIONS)
_PADDING = bytes(ALIGNMENT_BYTES)

invariant(_HEADER.size == HEADER_BYTES, "the chunk header must be exactly 128 bytes: offsets are part of the format")
invariant(_PRODUCER.size == HEADER_CRC_AT, "header_crc32c follows the fields it covers")
invariant(_PRODUCER.size == MAX_TIMESTAMP_AT + 8 + _CRC.size, "max_timestamp_us is the last but payload_crc32c")
invariant(PLACEMENT_AT + _PLACEMENT.size == PLACEMENT_CRC_AT, "placement_crc32c follows the fields it covers")
invariant(PLACEMENT_AT + _PLACED.size == HEADER_BYTES, "the broker's fields are the last ones")
invariant(_CHECKED.size == HEADER_BYTES, "placement_crc32c is the last field")
invariant(HEADER_BYTES % ALIGNMENT_BYTES == 0, "a payload must start aligned, as Arrow buffers are read in place")


class Flags(enum.IntFlag):
    """Bits of the header's `flags` field."""

    COMPRESSED = 1
    """The bodies of the record batch are compressed with the header's codec."""
    TYPED = 2
    """The batch has the stream's own schema, not the default one."""


class Codec(enum.IntEnum):
    """Compression of the record batch's bodies; values are part of the format."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


_COMPRESSED = int(Flags.COMPRESSED)
_FLAGS = int(Flags.COMPRESSED | Flags.TYPED)
_LAST_CODEC = int(max(Codec))
ARROW_CODECS: dict[int, str] = {Codec.LZ4: "lz4", Codec.ZSTD: "zstd"}
"""Arrow's names of the codecs."""


class ChunkHeader(NamedTuple):
    """All fields of a chunk header, in the order of the format."""

    magic: bytes
    version: int
    flags: int
    header_bytes: int
    payload_bytes: int
    """Length of the payload, without padding."""
    record_count: int
    stream_id: int
    streamlet_id: int
    schema_id: int
    producer_id: int
    producer_epoch: int
    codec: int
    sequence: int
    """Per producer and streamlet, from 0, without gaps."""
    created_us: int
    """When the chunk's first record was accepted by the producer."""
    min_timestamp_us: int
    max_timestamp_us: int
    payload_crc32c: int
    header_crc32c: int
    group_id: int
    """0: not placed yet."""
    segment_id: int
    entry: int
    first_record: int
    """Ordinal of the chunk's first record within its entry."""
    broker_epoch: int
    durable_head: int
    """The segment's durable head when the chunk was appended: data before it had reached the stream's level."""
    placement_crc32c: int

    @property
    def chunk_bytes(self) -> int:
        """Length of the whole chunk: header, payload, padding."""
        # `HEADER_BYTES` is a multiple of the alignment, too. No call of `padded`: this runs several times per chunk.
        return (HEADER_BYTES + ALIGNMENT_BYTES - 1 + self.payload_bytes) & -ALIGNMENT_BYTES

    @property
    def placed(self) -> bool:
        """Whether a broker has appended the chunk."""
        return self.group_id != 0


class Placement(NamedTuple):
    """The place of a chunk in the log, chosen by the broker."""

    group_id: int
    segment_id: int
    entry: int
    first_record: int
    broker_epoch: int
    durable_head: int = 0


_read_fields = _HEADER.unpack_from
_as_header = tuple.__new__
"""Does the same as `ChunkHeader._make` in half the time; the format has as many fields as the tuple."""
_PLACEMENT_FIELD = ChunkHeader._fields.index("group_id")
"""The first of a header's fields that the broker writes."""


class EncodedChunk(NamedTuple):
    """A chunk ready to be sent: its parts in order, for a scatter/gather write."""

    header: bytes
    payload: pa.Buffer | bytes
    padding: bytes

    @property
    def chunk_bytes(self) -> int:
        """Length of all parts together."""
        return HEADER_BYTES + len(self.payload) + len(self.padding)

    def to_bytes(self) -> bytes:
        """One contiguous copy."""
        return b"".join((self.header, self.payload, self.padding))


def padded(payload_bytes: int) -> int:
    """`payload_bytes` rounded up to the alignment."""
    return (payload_bytes + ALIGNMENT_BYTES - 1) & -ALIGNMENT_BYTES


def chunk_bytes_of(batch: pa.RecordBatch) -> int:
    """Return the exact length of the chunk that `encode_chunk` makes of `batch` without compression."""
    return HEADER_BYTES + padded(pa.ipc.get_record_batch_size(batch))


def encode_payload(batch: pa.RecordBatch, codec: Codec = Codec.NONE) -> pa.Buffer:
    """Encode `batch` as one Arrow IPC record-batch message; only its bodies are compressed."""
    if codec is Codec.NONE:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=ARROW_CODECS[codec])
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    # A stream is the schema's message, the batch's, and an 8-byte end mark; the schema is stored with the stream.
    stream = sink.getvalue()
    start = batch.schema.serialize().size
    return stream.slice(start, stream.size - 8 - start)


def encode_chunk(  # noqa: PLR0913 - the fields of a header, each named by the caller
    payload: pa.Buffer | bytes,
    *,
    record_count: int,
    stream_id: int,
    streamlet_id: int,
    schema_id: int,
    producer_id: int,
    producer_epoch: int,
    sequence: int,
    created_us: int,
    min_timestamp_us: int,
    max_timestamp_us: int,
    codec: Codec = Codec.NONE,
    typed: bool = False,
    version: int = ARROW_VERSION,
) -> EncodedChunk:
    """Frame `payload`, whose format is that of `version`, as a chunk that is not placed yet.

    Raises `InvalidArgument` if the payload is larger than `PAYLOAD_BYTES_MAX`.
    """
    header = encode_header(
        payload, version, flags_of(codec, typed=typed), record_count, stream_id, streamlet_id, schema_id, producer_id,
        producer_epoch, codec, sequence, created_us, min_timestamp_us, max_timestamp_us,
    )  # fmt: skip
    return EncodedChunk(header, payload, padding_of(len(payload)))


def flags_of(codec: Codec, *, typed: bool) -> int:
    """Return the flags of chunks with this codec; `typed`: the stream has its own schema."""
    return (_COMPRESSED if codec else 0) | (int(Flags.TYPED) if typed else 0)


def padding_of(payload_bytes: int) -> bytes:
    """Return the zeros that follow a payload."""
    return _PADDING[: -payload_bytes % ALIGNMENT_BYTES]


@accelerated()
def encode_header(  # noqa: PLR0913, PLR0917 - the fields of a header, in their order
    payload: Any,
    version: int,
    flags: int,
    record_count: int,
    stream_id: int,
    streamlet_id: int,
    schema_id: int,
    producer_id: int,
    producer_epoch: int,
    codec: int,
    sequence: int,
    created_us: int,
    min_timestamp_us: int,
    max_timestamp_us: int,
) -> bytes:
    """Return the header of a chunk with this payload that is not placed yet; see `encode_chunk`."""
    payload_bytes = len(payload)
    if payload_bytes > PAYLOAD_BYTES_MAX:
        raise InvalidArgument(
            f"chunk payload of {payload_bytes} bytes is over the limit of {PAYLOAD_BYTES_MAX}",
            payload_bytes=payload_bytes,
            limit=PAYLOAD_BYTES_MAX,
        )
    payload_crc = crc32c(padding_of(payload_bytes), crc32c(payload))
    covered = _PRODUCER.pack(
        MAGIC, version, flags, HEADER_BYTES, payload_bytes, record_count, stream_id, streamlet_id, schema_id,
        producer_id, producer_epoch, codec, sequence, created_us, min_timestamp_us, max_timestamp_us, payload_crc,
    )  # fmt: skip
    return covered + _CRC.pack(crc32c(covered)) + _UNPLACED


def read_header(buffer: Any, offset: int = 0) -> ChunkHeader:
    """Return the header at `offset` unchecked. Raises `CorruptChunk` only if fewer than 128 bytes are there."""
    try:
        return _as_header(ChunkHeader, _read_fields(buffer, offset))
    except struct.error:
        raise CorruptChunk(f"chunk header cut short at offset {offset}", offset=offset) from None


def created_us_at(buffer: Any, offset: int = 0) -> int:
    """Return when the first record of the chunk at `offset` was accepted, from a whole header that is not checked."""
    created_us: int = _CREATED_US.unpack_from(buffer, offset)[0]
    return created_us


@accelerated(ChunkHeader)
def verify_header(buffer: Any, offset: int = 0) -> ChunkHeader:
    """Return the header at `offset` after verifying both of its checksums; raises `CorruptChunk`."""
    header = read_header(buffer, offset)
    if header.magic != MAGIC:
        raise CorruptChunk(f"no chunk at offset {offset}: magic is {header.magic!r}", offset=offset)
    if crc32c(buffer[offset : offset + HEADER_CRC_AT]) != header.header_crc32c:
        raise CorruptChunk(f"chunk header at offset {offset} does not match its checksum", offset=offset)
    if header.version not in VERSIONS:
        raise CorruptChunk(
            f"chunk at offset {offset} has format version {header.version}, this program knows {LEAN_VERSION} and older"
            " ones",
            offset=offset,
            version=header.version,
        )
    if header.header_bytes != HEADER_BYTES:
        raise CorruptChunk(
            f"chunk at offset {offset} has header_bytes {header.header_bytes}, format version {header.version}"
            f" has {HEADER_BYTES}",
            offset=offset,
            header_bytes=header.header_bytes,
        )
    if (
        header[_PLACEMENT_FIELD:] != _NO_PLACEMENT
        and crc32c(buffer[offset + PLACEMENT_AT : offset + PLACEMENT_CRC_AT]) != header.placement_crc32c
    ):
        raise CorruptChunk(f"chunk placement at offset {offset} does not match its checksum", offset=offset)
    return header


@accelerated(ChunkHeader)
def verify_chunk(buffer: Any, offset: int = 0) -> ChunkHeader:
    """Return the header of the chunk at `offset` after verifying header and payload.

    Raises `CorruptChunk`, naming the offset, for a wrong checksum, a cut chunk or an unknown version.
    """
    header = verify_header(buffer, offset)
    verify_payload(buffer, offset, header)
    return header


@accelerated()
def verify_payload(buffer: Any, offset: int, header: ChunkHeader) -> None:
    """Check the payload of the chunk at `offset`, whose header was verified; raises `CorruptChunk`."""
    payload_bytes = padded(header.payload_bytes)
    payload_at = offset + HEADER_BYTES
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    payload = view[payload_at : payload_at + payload_bytes]
    if len(payload) != payload_bytes or payload_bytes > PAYLOAD_BYTES_MAX:
        raise CorruptChunk(
            f"chunk at offset {offset} is cut short: {len(payload)} of {payload_bytes} payload bytes",
            offset=offset,
        )
    if crc32c(payload) != header.payload_crc32c:
        raise CorruptChunk(
            f"chunk payload at offset {offset} does not match its checksum"
            f" (stream {header.stream_id}, streamlet {header.streamlet_id}, sequence {header.sequence})",
            offset=offset,
            stream_id=header.stream_id,
            streamlet_id=header.streamlet_id,
            sequence=header.sequence,
        )


def check_sent(header: ChunkHeader) -> None:
    """Check the fields that a producer has chosen, since any program can write a header with correct checksums.

    Raises `InvalidArgument`, naming the field, for a chunk without records or without a payload, for an unknown codec
    or unknown flags, for flags and a codec that do not agree, for a minimum time above the maximum, and for a chunk
    that has been placed before.
    """
    if (
        header.record_count
        and header.payload_bytes
        and header.flags & _COMPRESSED == (header.codec != 0)
        and header.flags <= _FLAGS
        and header.codec <= _LAST_CODEC
        and header.min_timestamp_us <= header.max_timestamp_us
        and header[_PLACEMENT_FIELD:] == _NO_PLACEMENT
    ):
        return
    for field, wrong, rule in (
        ("record_count", not header.record_count, "a chunk has at least one record"),
        ("payload_bytes", not header.payload_bytes, "a chunk has a record batch"),
        ("codec", header.codec > _LAST_CODEC, f"the codecs are 0 to {_LAST_CODEC}"),
        ("flags", header.flags > _FLAGS, f"the flags that there are add up to {_FLAGS}"),
        (
            "flags",
            header.flags & _COMPRESSED != (header.codec != 0),
            "flag 1 goes with a codec, and without one it is not set",
        ),
        ("min_timestamp_us", header.min_timestamp_us > header.max_timestamp_us, "it is not above max_timestamp_us"),
    ):
        if wrong:
            value = getattr(header, field)
            raise InvalidArgument(
                f"chunk header has {field} {value}: {rule} (stream {header.stream_id}, streamlet {header.streamlet_id},"
                f" sequence {header.sequence})",
                field=field,
                value=value,
                stream_id=header.stream_id,
                streamlet_id=header.streamlet_id,
                sequence=header.sequence,
            )
    raise InvalidArgument(
        f"chunk has been placed by a broker before, in group {header.group_id}: bytes {PLACEMENT_AT} to"
        f" {HEADER_BYTES - 1} of a header are zero when it is sent",
        field="group_id",
        value=header.group_id,
        stream_id=header.stream_id,
    )


def iterate_chunks(buffer: Any, start: int = 0, end: int | None = None) -> Iterator[tuple[ChunkHeader, int]]:
    """Yield each chunk between `start` and `end` as (header, offset), from the headers alone.

    It verifies no checksums, so it is for bytes that were verified when they arrived. Raises `CorruptChunk` where the
    bytes are not a sequence of whole chunks.
    """
    end = len(memoryview(buffer)) if end is None else end
    offset = start
    while offset < end:
        header = read_header(buffer, offset)
        if header.magic != MAGIC or offset + header.chunk_bytes > end:
            raise CorruptChunk(f"no whole chunk at offset {offset}", offset=offset)
        yield header, offset
        offset += header.chunk_bytes


@accelerated()
def place_chunk(buffer: Any, offset: int, placement: Placement | tuple[int, int, int, int, int, int]) -> None:
    """Write `placement` and its checksum into the header at `offset`; the broker that appends a chunk does this once.

    A plain tuple of the fields of a `Placement` is accepted too, as the broker needs one for each chunk.
    """
    covered = _PLACEMENT.pack(*placement)
    _COVERED_AND_CRC.pack_into(buffer, offset + PLACEMENT_AT, covered, crc32c(covered))


def chained_checksum(buffer: Any, offset: int, checksum: int) -> int:
    """Extend `checksum`, which is over the chunks before, to the placed chunk at `offset`: a checksum over checksums.

    It covers the checksums of payload and header, and the placement itself (but not the placement's checksum: the
    crc32c of bytes that end with their own crc32c is a constant). So two sequences of verified chunks with the same
    chained checksum have the same bytes in the same order, and no payload is read for it (thesis 7.3.2).
    """
    return crc32c(buffer[offset + PAYLOAD_CRC_AT : offset + PLACEMENT_CRC_AT], checksum)


@accelerated()
def chained_checksums(buffer: Any, start: int, ends: array[int], checksum: int) -> int:
    """Apply `chained_checksum` to consecutive chunks: the first begins at `start`, and each ends at one of `ends`."""
    for end in ends:
        checksum = chained_checksum(buffer, start, checksum)
        start = end
    return checksum


@accelerated()
def verify_placed(view: memoryview, offset: int, checksum: int) -> tuple[int, int]:
    """Verify the placed chunk at `offset`; return where it ends, and `checksum` extended over it.

    This does the work of `verify_chunk` and `chained_checksum` in half the time, for receivers that only store chunks.
    Raises `CorruptChunk`, also for a chunk without placement.
    """
    size = len(view)
    if offset + HEADER_BYTES <= size:
        magic, version, header_bytes, payload_bytes, payload_crc, header_crc, group_id, placement_crc = (
            _CHECKED.unpack_from(view, offset)
        )
        payload_at = offset + HEADER_BYTES
        end = payload_at + padded(payload_bytes)
        if (
            group_id
            and end <= size
            and (magic, version, header_bytes) in _KNOWN
            and crc32c(view[payload_at:end]) == payload_crc
            and crc32c(view[offset : offset + HEADER_CRC_AT]) == header_crc
            and crc32c(view[offset + PLACEMENT_AT : offset + PLACEMENT_CRC_AT]) == placement_crc
        ):
            return end, crc32c(view[offset + PAYLOAD_CRC_AT : offset + PLACEMENT_CRC_AT], checksum)
    header = verify_chunk(view, offset)  # it raises the error that says what is wrong
    if not header.placed:
        raise CorruptChunk(f"the chunk at offset {offset} has no placement", offset=offset)
    return offset + header.chunk_bytes, chained_checksum(view, offset, checksum)


@accelerated()
def verify_run(view: memoryview, base: int, checksum: int, chunks_max: int) -> tuple[bytes, int]:
    """Verify the first `chunks_max` placed chunks in `view`; return their ends, and `checksum` extended over them.

    Each is verified as by `verify_placed`. `base` is added to the ends, which are the bytes of an ``array("I")``.
    """
    ends, at = array("I"), 0
    while at < len(view) and len(ends) < chunks_max:
        at, checksum = verify_placed(view, at, checksum)
        ends.append(base + at)
    return ends.tobytes(), checksum
