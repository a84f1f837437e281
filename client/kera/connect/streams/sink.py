"""A stream as the target of a copy. It gets each row once, by numbered chunks and a journal of their contents.

`kera.connect.planning.rounds` describes what is sent when. Only `Journal` and `Chunks` depend on a cluster.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import pyarrow as pa

from kera.client import AppendResult, Client, StreamDescription
from kera.client.settings import PartitionerName
from kera.connect.errors import CopyElsewhere, CopyMismatch, SourceChanged
from kera.connect.pieces import Piece, Place, Progress, Source, Span
from kera.connect.planning.rounds import (
    DEFAULT_PARTITIONER,
    FIRST_EPOCH,
    Planned,
    Round,
    Written,
    abandoned,
    next_round,
)
from kera.connect.planning.slicing import ends_of_slices, slices, slices_needed
from kera.connect.records import is_default
from kera.connect.streams.journal import Journal, open_journal, producer_id
from kera.connect.streams.source import StreamSource
from kera.core.errors import (
    InternalError,
    InvalidArgument,
    OutOfSequence,
    ProducerFenced,
    SchemaMismatch,
    UnknownStream,
    invariant,
)
from kera.core.format.chunk import PAYLOAD_BYTES_MAX

SLICE_BYTES = 1 << 20
"""Size of the rows of one chunk."""
PIECE_BYTES_MAX = 8 << 20
FAR_AHEAD = 1 << 62
"""A sequence that no copy reaches."""


class Chunks(Protocol):
    """The used part of `kera.client.Appender`."""

    stream: StreamDescription
    chunk_bytes_max: int

    def at_epoch(self, producer_epoch: int) -> Chunks: ...  # noqa: D102 - the appender's
    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...  # noqa: D102
    def split(self, rows: pa.RecordBatch, keyless: int) -> list[tuple[int, pa.RecordBatch]]: ...  # noqa: D102
    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult: ...  # noqa: D102


class Creation(NamedTuple):
    """How to create the stream if it does not exist."""

    streamlets: int | None = None
    """The number of streamlets; None: the source's, or one."""
    key_column: str | None = None
    timestamp_column: str | None = None
    replication: int | None = None

    def like(self, source: Source) -> Creation:
        """Return this, with the key and the time column of `source` if it is a stream and no others are given."""
        if not isinstance(source, StreamSource):
            return self
        return self._replace(
            key_column=self.key_column or source.stream.key_column,
            timestamp_column=self.timestamp_column or source.stream.timestamp_column,
        )


class RoundWriter:
    """Appends rounds, independent of the cluster and the source."""

    def __init__(
        self,
        chunks: Chunks,
        journal: Journal,
        *,
        run: str,
        source: str,
        by_number: bool,
        partitioner: str = DEFAULT_PARTITIONER,
    ) -> None:
        """`by_number`: pieces that name a streamlet go there. `partitioner`: how `chunks` splits rows."""
        self._chunks = chunks
        self._journal = journal
        self._by_number = by_number
        self._partitioner = partitioner
        self._last = Round(-1, run, source, chunks.stream.stream_id)
        self._run = run
        self._source = source
        self._keyless = 0
        self._whole = False
        """Whether all chunks of the last round are acknowledged."""
        self._slice_bytes = min(SLICE_BYTES, max(1, chunks.chunk_bytes_max // 2))

    async def begin(self) -> Progress:
        """Return the progress of the copy. Raises `CopyMismatch` if the journal belongs to another copy."""
        last = await self._journal.last()
        stream = self._chunks.stream
        if last is None:
            last = Round(0, self._run, self._source, stream.stream_id, partitioner=self._partitioner)
            await self._journal.add(last)
        if last.source != self._source:
            raise CopyMismatch(
                f"the copy of this name is from {last.source}, not from {self._source}: give this one another --name"
            )
        if last.stream_id != stream.stream_id:
            raise CopyMismatch(
                f"stream {stream.name!r} was deleted and created again since the copy wrote to it. Restart the copy"
                " from its beginning with kera connect forget",
                stream=stream.name,
            )
        if last.partitioner != self._partitioner:
            raise CopyMismatch(
                f"the copy of this name places keys by {last.partitioner}, not by {self._partitioner}: go on with"
                f" --partitioner {last.partitioner}, or start a new copy, with another --name and into another stream"
            )
        self._last = last
        self._chunks = self._chunks.at_epoch(last.epoch)
        return Progress(last.places, last.records, last.spans)

    async def settle(self, rows: Sequence[pa.RecordBatch | None], *, may_shrink: bool) -> Progress:
        """Append the last round of the journal again; `rows` are the rows of its pieces.

        A None among them abandons the round: the copy continues from where the round began. `may_shrink`: some rows may
        be missing. If too few rows are left for a piece's chunks, these chunks must be stored already. Raises
        `SourceChanged` if the rows do not fit the round.
        """
        if any(found is None for found in rows):
            added = abandoned(self._last, self._run)
            await self._journal.add(added)
            self._last, self._chunks = added, self._chunks.at_epoch(added.epoch)
            return Progress(added.places, added.records)
        appends: dict[int, list[tuple[pa.RecordBatch, int]]] = {}
        for written, found in zip(self._last.pieces, rows, strict=True):
            span = written.span
            if found is None:
                continue
            parts = self._parts_again(written, found)
            shrunk = found.num_rows < span.rows
            if parts.keys() - written.chunks.keys() or found.num_rows > span.rows or (shrunk and not may_shrink):
                raise _changed(span, found.num_rows)
            for streamlet, (first, count) in written.chunks.items():
                part = parts.get(streamlet)
                if part is not None and part.num_rows >= count:
                    chunks = [(chunk, first + at) for at, chunk in enumerate(slices(part, count))]
                    appends.setdefault(streamlet, []).extend(chunks)
                elif await self._stored(streamlet) < first + count:
                    raise _changed(span, found.num_rows)
        await self._append(appends)
        return Progress(self._last.places, self._last.records)

    def _parts_again(self, written: Written, rows: pa.RecordBatch) -> dict[int, pa.RecordBatch]:
        """Return the rows of a piece by streamlet, split as when the piece was written."""
        streamlets = list(written.chunks) if written.keyless is None else None
        return dict(self._split(rows, written.keyless or 0, streamlets))

    async def _stored(self, streamlet: int) -> int:
        """Return how many chunks of this copy a streamlet has, by sending a chunk that the broker must refuse."""
        probe = self._chunks.conform(pa.record_batch({"value": pa.array([None], pa.binary())}))
        try:
            await self._chunks.append(streamlet, probe, FAR_AHEAD)
        except OutOfSequence as error:
            return int(error.attributes["expected_sequence"])
        raise InternalError("a chunk was taken long before its predecessors")

    async def finish(self) -> Mapping[str, Place]:
        """If the last round is stored completely, record that in the journal, so that it need not be settled again.

        Return the places of the copy in that case; otherwise none.
        """
        if self._last.pieces and self._whole:
            added = next_round(self._last, self._run, [])
            await self._journal.add(added)
            self._last = added
        return {} if self._last.pieces else dict(self._last.places)

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """Append the rows of `pieces` as the next round. Return where the round begins: it may have to be repeated."""
        begins = dict(self._last.places)
        planned: list[Planned] = []
        cut: list[list[tuple[int, list[pa.RecordBatch]]]] = []
        for piece in pieces:
            span = Span(piece.part, piece.start, piece.end, piece.rows.num_rows, piece.digest)
            keyless, self._keyless = self._keyless, (self._keyless + 1) % self._chunks.stream.config.streamlets
            wanted = self._streamlets_of(piece)
            parts = [
                (streamlet, slices(rows, slices_needed(rows, self._slice_bytes)))
                for streamlet, rows in self._split(piece.rows, keyless, wanted)
            ]
            counts = {streamlet: len(chunks) for streamlet, chunks in parts}
            starts = () if wanted is None else _starts(piece, counts)
            planned.append(Planned(span, keyless if wanted is None else None, counts, starts))
            cut.append(parts)
        added = next_round(self._last, self._run, planned)
        await self._journal.add(added)
        self._last, self._whole = added, False
        appends: dict[int, list[tuple[pa.RecordBatch, int]]] = {}
        for written, parts in zip(added.pieces, cut, strict=True):
            for streamlet, chunks in parts:
                first = written.chunks[streamlet].first
                appends.setdefault(streamlet, []).extend((chunk, first + at) for at, chunk in enumerate(chunks))
        await self._append(appends)
        return begins

    def _streamlets_of(self, piece: Piece) -> list[int] | None:
        """Return the streamlets that get all rows of a piece; None: the keys of the rows decide."""
        if piece.everywhere:
            return list(range(self._chunks.stream.config.streamlets))
        return [piece.streamlet] if self._by_number and piece.streamlet is not None else None

    def _split(
        self, rows: pa.RecordBatch, keyless: int, streamlets: Sequence[int] | None
    ) -> list[tuple[int, pa.RecordBatch]]:
        if not rows.num_rows:
            return []
        rows = self._chunks.conform(rows)
        return self._chunks.split(rows, keyless) if streamlets is None else [(each, rows) for each in streamlets]

    async def _append(self, appends: Mapping[int, list[tuple[pa.RecordBatch, int]]]) -> None:
        found = await asyncio.gather(
            *(self._append_all(streamlet, chunks) for streamlet, chunks in appends.items()), return_exceptions=True
        )
        for error in found:
            if error is not None:
                raise error
        self._whole = True

    async def _append_all(self, streamlet: int, chunks: Sequence[tuple[pa.RecordBatch, int]]) -> None:
        """Append chunks one after the other, because the broker takes no chunk before its predecessors."""
        stream = self._chunks.stream.name
        for rows, sequence in chunks:
            try:
                result = await self._chunks.append(streamlet, rows, sequence)
            except ProducerFenced as error:  # the other process has abandoned the round that this one appends
                raise CopyElsewhere(
                    "another process runs this copy, and has gone on with it; one of them is enough, or give this one"
                    " another --name"
                ) from error
            except OutOfSequence as error:
                expected = error.attributes.get("expected_sequence")
                raise CopyMismatch(
                    f"streamlet {streamlet} of stream {stream!r} has only {expected} chunks of this copy, and has"
                    f" acknowledged {sequence}: the stream has lost records. Copy the missing records again, into"
                    " another stream; replication, or the level persisted, prevents such losses",
                    stream=stream,
                    streamlet_id=streamlet,
                ) from error
            invariant(
                result.duplicate or result.record_count == rows.num_rows,
                "a slice fits into a chunk",
                rows=rows.num_rows,
                chunk=result.record_count,
            )


def _starts(piece: Piece, counts: Mapping[int, int]) -> tuple[int, ...]:
    """Return `Written.starts`; `counts` has the number of the piece's chunks by streamlet."""
    places, rows = piece.row_places, piece.rows.num_rows
    if places is None or not rows or places[-1] - piece.start + 1 == rows:
        return ()
    (count,) = counts.values()
    return tuple(places[row] for row in ends_of_slices(rows, count)[:-1])


def _changed(span: Span, rows: int) -> SourceChanged:
    where = f" of {span.part}" if span.part else ""
    return SourceChanged(
        f"the source has changed: between {span.start!r} and {span.end!r}{where} it had {span.rows} records when the"
        f" copy ended, and has {rows} now. It is unknown which of them were copied: copy again, into another stream"
    )


class StreamSink:
    """See `kera.connect.pieces.Sink`."""

    def __init__(
        self,
        client: Client,
        stream: str,
        name: str,
        creation: Creation | None,
        *,
        partitioner: PartitionerName = "crc32c",
    ) -> None:
        """`name`: the copy's name. `creation`: None if the stream must exist. `partitioner`: that of producers."""
        self.shown = f"stream {stream}"
        self.piece_bytes = SLICE_BYTES
        self.notes: list[str] = []
        self._client = client
        self._stream = stream
        self._name = name
        self._creation = creation
        self._partitioner: PartitionerName = partitioner
        self._may_shrink = False
        self._writer: RoundWriter | None = None

    async def open(self, source: Source) -> Progress:
        """See `Sink`. Raises `UnknownStream` with the way out."""
        stream = await self._described(source)
        _check_columns(source, stream)
        streamlets = stream.config.streamlets
        journal = await open_journal(self._client, self._name, stream)
        chunks = await self._client.appender(
            self._stream,
            producer_id=producer_id(self._name, journal.stream.stream_id),
            producer_epoch=FIRST_EPOCH,
            chunk_bytes_max=PAYLOAD_BYTES_MAX,
            cut_at_epochs=False,  # the journal fixes the number of chunks, but the stream's epochs may change later
            partitioner=self._partitioner,
            compares=True,  # records without a time get the present one, so a repeated round may differ
        )
        by_number = source.streamlets == streamlets
        note = _note_of_placing(source, streamlets, self._partitioner)
        if note:
            self.notes.append(note)
        self.piece_bytes = min(PIECE_BYTES_MAX, SLICE_BYTES * streamlets)
        self._may_shrink = source.may_shrink
        run = secrets.token_hex(8)
        self._writer = RoundWriter(
            chunks,
            journal,
            run=run,
            source=source.identity,
            by_number=by_number,
            partitioner=self._partitioner,
        )
        return await self._writer.begin()

    async def _described(self, source: Source) -> StreamDescription:
        """Return the stream, and create it first if that is wanted."""
        try:
            stream = await self._client.describe(self._stream)
        except UnknownStream as error:
            if self._creation is None:
                raise UnknownStream(
                    f"there is no stream {self._stream!r}: create it with kera stream create, or add --create, which"
                    " gives it the columns of the source",
                    stream=self._stream,
                ) from error
        else:
            if self._creation is not None:
                _check_created(stream, self._creation)
            return stream
        made = self._creation.like(source)
        typed = not is_default(source.schema)
        for option, column in (("--key", made.key_column), ("--time", made.timestamp_column)):
            if column is not None and (not typed or column not in source.schema.names):
                has = ", ".join(source.schema.names) if typed else "records without columns of their own"
                raise InvalidArgument(f"{option}: {source.shown} has no column {column!r}; it has {has}")
        await self._client.admin.create_stream(
            self._stream,
            streamlets=made.streamlets or source.streamlets or 1,
            schema=source.schema if typed else None,
            key_column=made.key_column,
            timestamp_column=made.timestamp_column,
            replication=made.replication,
        )
        self.notes.append(f"stream {self._stream} was created")
        return await self._client.describe(self._stream)

    @property
    def _opened(self) -> RoundWriter:
        if self._writer is None:
            raise InternalError("the target was not opened")
        return self._writer

    async def settle(self, rows: Sequence[pa.RecordBatch | None]) -> Progress:
        """See `Sink`."""
        return await self._opened.settle(rows, may_shrink=self._may_shrink)

    async def put(self, pieces: Sequence[Piece]) -> Mapping[str, Place]:
        """See `Sink`."""
        return await self._opened.put(pieces)

    async def finish(self, *, complete: bool) -> Mapping[str, Place]:
        """See `Sink`."""
        del complete  # the journal records the end in either case
        return await self._opened.finish()

    async def close(self) -> None:
        """Do nothing: the client belongs to the caller."""


def _check_created(stream: StreamDescription, creation: Creation) -> None:
    """Raise `InvalidArgument` if the existing stream differs from the one that would be created."""
    for option, wanted, has in (
        ("--streamlets", creation.streamlets, stream.config.streamlets),
        ("--key", creation.key_column, stream.key_column),
        ("--time", creation.timestamp_column, stream.timestamp_column),
    ):
        if wanted is not None and wanted != has:
            raise InvalidArgument(
                f"{option} {wanted}: stream {stream.name!r} exists, and has {has or 'none'}: leave the option out, or"
                " copy into another stream",
                option=option,
            )


def _note_of_placing(source: Source, streamlets: int, partitioner: str) -> str:
    """Return a note on where the records go; empty if there is only one streamlet."""
    if streamlets == 1:
        return ""
    if source.streamlets == streamlets:
        return f"part p of {source.shown} goes to streamlet p, whatever the keys are"
    by_key = f"records go where their keys say (partitioner {partitioner})"
    if source.streamlets:
        return (
            f"{source.shown} has {source.streamlets} parts, the stream {streamlets} streamlets: {by_key}, and only"
            " those with the same key stay in order"
        )
    return by_key


def _check_columns(source: Source, stream: StreamDescription) -> None:
    """Raise `SchemaMismatch` if the stream cannot take the source's rows."""
    default = is_default(source.schema)
    if stream.typed == default:
        has = f"columns {', '.join(stream.schema.names)}" if stream.typed else "no columns of its own"
        gives = "records without columns" if default else f"columns {', '.join(source.schema.names)}"
        raise SchemaMismatch(
            f"stream {stream.name!r} has {has}, and {source.shown} gives {gives}: copy into another stream (--create"
            f" makes one that fits{'' if default else '; --value avro makes a value of each row'})",
            stream=stream.name,
        )
    if stream.typed:
        extra = [field for field in source.schema if field.name not in stream.schema.names]
        if extra:
            raise SchemaMismatch(
                f"stream {stream.name!r} has no column {extra[0].name!r}, and {source.shown} has one: add it with"
                f" kera stream alter {stream.name} --add-column '{extra[0].name}:{extra[0].type}', and start the copy"
                " again",
                stream=stream.name,
            )
