"""Data that have arrived for a range, by push or pull, and their chunks as batches.

The bytes of an answer are in their own memory. The bytes of a pushed run (``kera.client.cluster.push``) are in the
broker's arena. Both are Arrow buffers, and each chunk's batch refers to a slice of one, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa

from kera.client.arrow_input import null_column
from kera.client.chunk_batch import ChunkBatch, PushedSlot
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import CorruptChunk, KeraError, SchemaMismatch
from kera.core.format.arrow_types import empty_batch
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, read_header, verify_chunk, verify_header
from kera.core.format.joining import join_chunks, joined_schema
from kera.core.format.payload import open_payload
from kera.core.format.punctuation import is_punctuation_at

log = get_logger("kera.consumer")


class Wanted(NamedTuple):
    """A range to read."""

    entry: EntryId
    start: Position
    end: Position | None
    """Position to stop at; None: read up to the durable head."""


class Fetched(NamedTuple):
    """The data of a range."""

    entry: EntryId
    start: Position
    next: Position
    buffers: list[pa.Buffer]
    """Buffers of whole, consecutive chunks."""
    lag_records: int
    error: KeraError | None
    slot: PushedSlot | None = None
    """The place of pushed buffers in the broker's memory; None: they were pulled."""
    on_taken: Callable[[int], None] | None = None
    """For pushed data: called with the number of bytes when the caller takes them."""

    @property
    def size_bytes(self) -> int:
        """Size of all buffers."""
        return sum([buffer.size for buffer in self.buffers])

    def taken(self) -> None:
        """Note that the caller has taken the data."""
        if self.on_taken is not None:
            self.on_taken(self.size_bytes)


class Overwritten(Exception):
    """The broker has reused the memory of pushed chunks: it has died, or the connection is gone.

    Not a `KeraError`: the code that opens the chunks reads them again.
    """

    def __init__(self, rest: Wanted) -> None:
        super().__init__(rest)
        self.rest = rest
        """The part of a `Fetched` that has not been delivered."""


class NewerSchema(Exception):
    """A chunk names a version of the schema that is not known: columns have been added since the stream was looked up.

    Not a `KeraError`: the code that opens the chunks looks the version up (`Cluster.with_schema`), and opens the rest.
    """

    def __init__(self, rest: Fetched, schema_id: int) -> None:
        super().__init__(rest.entry, schema_id)
        self.rest = rest
        """The part that has not been delivered, from this chunk on."""
        self.schema_id = schema_id


class _Opened(NamedTuple):
    """An opened chunk, or several joined ones."""

    header: ChunkHeader
    batch: pa.RecordBatch
    copied: bool
    headers: bytes = b""
    """Headers of the chunks, if there are several."""


class _Opener:
    """Opens chunks of a stream by the settings; all batches have the newest known columns."""

    def __init__(self, stream: StreamDescription, settings: ConsumerSettings) -> None:
        self._stream = stream
        self._verify, self._trusted = settings.verify_checksums, not settings.validate_chunks
        self._open_header = verify_chunk if settings.verify_checksums else read_header
        self._decompressed_bytes_max = int(settings.decompressed_bytes_max)
        self._joined_bytes_max = int(settings.joined_bytes_max)

    def several(self, view: memoryview, at: int) -> _Opened | None:
        """Open the chunks from `at` on, if they are small and can be joined; else None. `one` reports errors."""
        schema_id = joined_schema(view, at) if self._joined_bytes_max else 0
        schema = self._stream.schema_of(schema_id)
        if not schema_id or schema is None:
            return None
        joined = join_chunks(
            view,
            at,
            schema,
            schema_id,
            verify=self._verify,
            trusted=self._trusted,
            joined_bytes_max=self._joined_bytes_max,
            bytes_max=self._decompressed_bytes_max,
        )
        if joined is None:
            return None
        return _Opened(joined.header(at), self._widened(joined.batch, schema), copied=True, headers=joined.headers)

    def punctuation(self, view: memoryview, at: int) -> _Opened:
        """Open the chunk at `at`, which claims to be a punctuation. Raises `CorruptChunk`."""
        header = self._open_header(view, at)
        if header.record_count or header.payload_bytes:
            raise CorruptChunk(f"the chunk at offset {at} is a punctuation, and says to have records")
        return _Opened(header, empty_batch(self._stream.schema), copied=True)

    def one(self, view: memoryview, buffer: pa.Buffer, at: int, *, copied: bool) -> _Opened:
        """Open the chunk at `at`; `view` is of `buffer`. Raises `CorruptChunk`, `SchemaMismatch`."""
        header = self._open_header(view, at)
        schema = self._stream.schema_of(header.schema_id)
        if schema is None:
            raise SchemaMismatch(
                f"chunk has schema {header.schema_id}, which stream {self._stream.name!r} does not have",
                stream=self._stream.name,
                stream_id=header.stream_id,
                schema_id=header.schema_id,
            )
        if header.payload_bytes > buffer.size - at - HEADER_BYTES:
            raise CorruptChunk(
                f"chunk at offset {at} is cut short: it says to have {header.payload_bytes} payload bytes"
            )
        payload = buffer.slice(at + HEADER_BYTES, header.payload_bytes)
        batch = open_payload(
            payload.to_pybytes() if copied else payload,
            schema,
            header,
            decompressed_bytes_max=self._decompressed_bytes_max,
            trusted=self._trusted,
        )
        return _Opened(header, self._widened(batch, schema), copied)

    def _widened(self, batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        return batch if schema is self._stream.schema else widened(batch, self._stream.schema)


def batches_of(
    fetched: Fetched,
    stream: StreamDescription,
    settings: ConsumerSettings,
    *,
    copying: Callable[[], bool] = bool,
    punctuations: bool = False,
) -> Iterator[ChunkBatch]:
    """Yield each fetched chunk as a batch in place, or several small ones as a copy (``joined_bytes_max``).

    Raises `CorruptChunk`, `Overwritten` and `NewerSchema`. If the `settings` say so, a chunk with a valid header and
    unreadable records counts as one without records.

    A chunk that is older than columns of the `stream` has nulls there: all batches have the newest known columns.

    `punctuations`: also yield punctuations, as batches without records; by default they are left out.

    `copying`: called for each chunk in the broker's memory; returns whether to copy it; by default it is not copied.
    Callers that go through all values at once should copy: it costs little beside that, and Arrow trusts the offsets of
    values, so memory that is overwritten meanwhile could crash the process.
    """
    entry, start, slot = fetched.entry, fetched.start, fetched.slot
    opener = _Opener(stream, settings)
    for number, buffer in enumerate(fetched.buffers):
        at, size = 0, buffer.size
        view = memoryview(buffer)  # reading headers from it takes half the time
        while at < size:
            is_one = at + HEADER_BYTES <= size and is_punctuation_at(view, at)
            try:
                opened = opener.punctuation(view, at) if is_one else opener.several(view, at)
                if opened is None:
                    opened = opener.one(view, buffer, at, copied=slot is not None and copying())
            except KeraError as error:
                if slot is not None and not slot.intact:
                    raise Overwritten(Wanted(entry, start, fetched.next)) from None
                unknown = error.attributes.get("schema_id") if isinstance(error, SchemaMismatch) else None
                if unknown is not None and unknown > stream.schema_id:
                    left = [buffer.slice(at), *fetched.buffers[number + 1 :]]
                    raise NewerSchema(fetched._replace(start=start, buffers=left), unknown) from None
                if not isinstance(error, CorruptChunk):
                    raise
                corrupt = _at_its_place(error, stream, entry, start)
                if settings.corrupt_chunks == "fail" or not _ends_within(view, at):
                    raise corrupt from error
                header = read_header(view, at)
                log.warning("a chunk cannot be read and is left out", **corrupt.attributes)
                opened = _Opened(header, empty_batch(stream.schema), copied=True)
            if slot is not None and not slot.intact:  # checked after reading: the bytes may have been overwritten
                raise Overwritten(Wanted(entry, start, fetched.next))
            header = opened.header
            group_id, segment_id, offset = start
            if header.segment_id != segment_id or header.group_id != group_id:
                group_id, segment_id, offset = header.group_id, header.segment_id, 0
                start = Position(group_id, segment_id, offset)
            chunk_bytes = header.chunk_bytes
            following = Position(group_id, segment_id, offset + chunk_bytes)
            if punctuations or not is_one:
                yield ChunkBatch(
                    opened.batch, header, start, following, entry, None if opened.copied else slot, opened.headers
                )
            start = following
            at += chunk_bytes


def _at_its_place(error: CorruptChunk, stream: StreamDescription, entry: EntryId, start: Position) -> CorruptChunk:
    """Return the error of a chunk, with the chunk's place, and the setting that skips it."""
    return CorruptChunk(
        f"chunk at {tuple(start)} of stream {stream.name!r}, streamlet {entry.streamlet_id}, entry {entry.entry}:"
        f' {error.message}; corrupt_chunks="skip" continues after it',
        **error.attributes
        | {
            "stream": stream.name,
            "streamlet_id": entry.streamlet_id,
            "entry": entry.entry,
            "position": list(start),
            "reason": error.message,
        },
    )


def _ends_within(view: memoryview, at: int) -> bool:
    """Return whether the end of the chunk is known and within the buffer: its header is valid."""
    try:
        header = verify_header(view, at)
    except CorruptChunk:
        return False
    return at + header.chunk_bytes <= len(view)


def widened(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Add the last columns of `schema`, which are newer than `batch`, as nulls. Does not copy `batch`."""
    added = [null_column(batch.num_rows, field.type) for field in list(schema)[batch.num_columns :]]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=schema)
