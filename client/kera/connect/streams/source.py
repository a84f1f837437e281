"""A stream as the source of a copy. Its parts are its entries, called ``streamlet/entry``.

A place is a position and the ordinal of the record there: ``[group, segment, offset, record]``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal

import pyarrow as pa

from kera.client import ChunkBatch, Client, ConsumerSettings, EntryBounds, Position, StreamDescription
from kera.connect.errors import RecordsGone, SourceChanged
from kera.connect.pieces import Piece, Place, Span
from kera.core.errors import DataLost, InternalError
from kera.core.format.arrow_types import empty_batch


class StreamSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False

    def __init__(
        self, client: Client, stream: str, *, follow: bool, from_latest: bool = False, skip_lost: bool = False
    ) -> None:
        """`follow`: continue for ever. `from_latest`: begin with new records instead of the existing ones.

        `skip_lost`: continue after records that were removed or lost before they were copied.
        """
        self.shown = self.identity = f"stream {stream}"
        self.notes: list[str] = []
        self.schema = pa.schema([])
        self.streamlets = 0
        self._client = client
        self._name = stream
        self._follow = follow
        self._from_latest = from_latest
        self._skips = skip_lost
        self._stream: StreamDescription | None = None
        # The copy holds pieces for longer than a broker should have to keep its memory for them.
        on_data_lost: Literal["raise", "skip"] = "skip" if skip_lost else "raise"
        self._settings = ConsumerSettings.load(shared_memory="never", on_data_lost=on_data_lost)

    async def open(self) -> None:
        """See `Source`. Raises `UnknownStream`."""
        self._stream = await self._client.describe(self._name)
        cluster = await self._client.admin.describe_cluster()
        self.identity = f"stream {self._name} ({self._stream.stream_id}) of cluster {cluster.cluster_id}"
        self.schema = self._stream.schema
        self.streamlets = self._stream.config.streamlets

    @property
    def stream(self) -> StreamDescription:
        """The stream that is copied."""
        if self._stream is None:
            raise InternalError("the source was not opened")
        return self._stream

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`."""
        left = 0
        for streamlet, entries in (await self._client.bounds(self._name)).items():
            for entry, bounds in enumerate(entries):
                place = places.get(part_of(streamlet, entry))
                first = bounds.next_record if self._from_latest else bounds.first_record
                left += max(0, bounds.next_record - (first if place is None else place[3]))
        return left

    async def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `RecordsGone` if records were removed or lost before they were copied."""
        del piece_bytes  # a chunk is a piece
        reached = dict(places)
        start: dict[int, list[Position]] = {}
        for streamlet, entries in (await self._client.bounds(self._name)).items():
            for entry, bounds in enumerate(entries):
                first = [*bounds.end, bounds.next_record] if self._from_latest else [*bounds.start, bounds.first_record]
                part = part_of(streamlet, entry)
                if self._from_latest and part not in reached:  # an empty piece makes the target store the place
                    yield Piece(part, first, first, empty_batch(self.schema), streamlet)
                elif part not in reached and bounds.starts_behind_loss:
                    self._refuse_loss(bounds)
                place = reached.setdefault(part, first)
                start.setdefault(streamlet, []).append(Position(*place[:3]))
        consumer = self._client.consumer(
            self._name, start=start, end=None if self._follow else "latest", settings=self._settings
        )
        async with consumer:
            try:
                async for chunk in consumer.batches():
                    part = part_of(chunk.entry.streamlet_id, chunk.entry.entry)
                    end = _behind(chunk)
                    if self._skips and reached[part][:3] < [*chunk.start]:  # lost records are a piece without rows
                        start_of_chunk = [*chunk.start, chunk.header.first_record]
                        rows = empty_batch(self.schema)
                        yield Piece(part, reached[part], start_of_chunk, rows, chunk.entry.streamlet_id)
                        reached[part] = start_of_chunk
                    yield Piece(part, reached[part], end, chunk.batch, chunk.entry.streamlet_id)
                    reached[part] = end
            except DataLost as error:
                raise RecordsGone(
                    f"stream {self._name!r} has lost the next records: {error.message}, with --skip-lost",
                    **error.attributes,
                ) from error

    def _refuse_loss(self, bounds: EntryBounds) -> None:
        if bounds.lost is not None and not self._skips:
            raise RecordsGone(
                f"stream {self._name!r} lost the records from {tuple(bounds.lost[0])} up to {tuple(bounds.start)}"
                " with the memory of a broker's host, before they were copied; --skip-lost continues behind them",
                lost_from=list(bounds.lost[0]),
                available_from=list(bounds.start),
            )

    async def kept(self, places: Mapping[str, Place]) -> None:
        """Do nothing: the stream's retention decides. See `Source`."""

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`."""
        found: list[pa.RecordBatch | None] = []
        for part, start, end, rows, *_ in spans:
            if not rows:  # the piece at the begin of the copy, or lost records
                found.append(empty_batch(self.schema))
                continue
            streamlet, entry = (int(number) for number in part.split("/"))
            try:
                chunks = [
                    chunk.batch
                    async for chunk in self._client.read_range(
                        self._name, streamlet, entry, Position(*start[:3]), Position(*end[:3]), settings=self._settings
                    )
                ]
            except DataLost as error:
                raise SourceChanged(
                    f"stream {self._name!r} has lost records that were being copied when the copy ended:"
                    f" {error.message}"
                ) from error
            found.append(pa.concat_batches(chunks) if chunks else empty_batch(self.schema))
        return found

    async def close(self) -> None:
        """Do nothing: the client belongs to the caller."""


def part_of(streamlet: int, entry: int) -> str:
    """Return the name of an entry."""
    return f"{streamlet}/{entry}"


def _behind(chunk: ChunkBatch) -> list[int]:
    return [*chunk.next, chunk.header.first_record + chunk.batch.num_rows]
