"""A closed epoch, which is the same for every reader."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.fetch import widened
from kera.client.producing.encoding.payloads import times_of
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId
from kera.core.errors import InvalidArgument, Unavailable

DIGEST_BYTES = 16
_PLACE = struct.Struct("<QIIQII")


@dataclass(frozen=True)
class Epoch:
    """The chunks of some streams between two times, by stream, streamlet and entry, each in the order of its log."""

    number: int
    start_us: int
    """Start, inclusive; microseconds since the Unix epoch."""
    end_us: int
    """End, exclusive; microseconds since the Unix epoch."""
    batches: tuple[ChunkBatch, ...]
    streams: Mapping[int, StreamDescription]
    """Streams by their ids."""

    @property
    def records(self) -> int:
        """Number of records."""
        return sum(chunk.batch.num_rows for chunk in self.batches)

    @cached_property
    def late_records(self) -> int:
        """Number of records that are older than the epoch, and belong to it because they came late.

        There are none in a typed stream without a timestamp column, whose chunks have the time when they were made.
        """
        return sum(self._late_of(chunk) for chunk in self.batches)

    def _late_of(self, chunk: ChunkBatch) -> int:
        stream = self.stream_of(chunk)
        if not _has_times(stream):
            return 0
        # The times in a header do not cover records without a time; in the default schema, every record has one. The
        # header decides the epoch of its chunk, so it can also show that no record is late.
        if chunk.header.min_timestamp_us >= self.start_us and not stream.typed:
            return 0
        return _older(self.times(chunk), self.start_us)

    @cached_property
    def digest(self) -> str:
        """A digest that is the same for two readers exactly if they got the same chunks in the same order."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for chunk in self.batches:
            for header in chunk.headers:
                digest.update(
                    _PLACE.pack(
                        header.stream_id,
                        header.streamlet_id,
                        chunk.entry.entry,
                        header.first_record,
                        header.record_count,
                        header.payload_crc32c,
                    )
                )
        return digest.hexdigest()

    def rows(self) -> pa.Table:
        """Return all records, sorted by time, stream, streamlet, entry and ordinal: the same order for all readers.

        The table has its own memory, and the newest columns of the stream: records older than a column have nulls
        there.

        Raises `InvalidArgument` for streams with different columns, or without a timestamp column, and `Unavailable` if
        chunks have left the broker's memory (`ChunkBatch.intact`): read the epoch again.
        """
        if not self.batches:
            return pa.Table.from_batches([], next(iter(self.streams.values())).schema)
        schemas = {self.stream_of(chunk).schema for chunk in self.batches}
        if len(schemas) > 1:
            raise InvalidArgument("the streams have different columns: their rows cannot be put into one table")
        self._check_intact()
        times = np.concatenate([self.times(chunk) for chunk in self.batches])
        table = pa.Table.from_batches([self.rows_of(chunk) for chunk in self.batches])
        if any(chunk.pushed for chunk in self.batches) or bool((times[1:] < times[:-1]).any()):
            table = table.take(pa.array(np.argsort(times, kind="stable")))
        else:
            table = table.combine_chunks()
        self._check_intact()
        return table

    def _check_intact(self) -> None:
        for chunk in self.batches:
            if not chunk.intact:
                _, streamlet_id, entry = chunk.entry
                name = self.stream_of(chunk).name
                raise Unavailable(
                    f"epoch {self.number}: a chunk of entry {entry} of streamlet {streamlet_id} of stream {name!r} is"
                    " not in its broker's memory any more: read the epoch again, or with shared_memory='never'",
                    stream=name,
                    streamlet_id=streamlet_id,
                    entry=entry,
                    epoch=self.number,
                )

    def rows_of(self, chunk: ChunkBatch) -> pa.RecordBatch:
        """Return the rows of a chunk, with the newest columns of its stream."""
        schema = self.stream_of(chunk).schema
        return chunk.batch if len(chunk.batch.schema) == len(schema) else widened(chunk.batch, schema)

    def times(self, chunk: ChunkBatch) -> npt.NDArray[np.int64]:
        """Return the time of each record of a chunk, in microseconds since the Unix epoch.

        A record without a time gets the time when its chunk was made. Raises `InvalidArgument` if the stream has no
        timestamp column.
        """
        stream = self.stream_of(chunk)
        times = times_of(chunk.batch, stream)
        if times is None:
            raise _without_times(stream)
        if times.null_count:
            headers = list(chunk.headers)  # joined chunks have one header each
            created = np.repeat([each.created_us for each in headers], [each.record_count for each in headers])
            times = pc.coalesce(times, pa.array(created, pa.int64()).cast(times.type))
        return np.frombuffer(times.buffers()[1], np.int64, len(times), 8 * times.offset)

    def stream_of(self, chunk: ChunkBatch) -> StreamDescription:
        """Return the stream of a chunk."""
        return self.streams[chunk.entry.stream_id]


def require_times(stream: StreamDescription) -> None:
    """Raise `InvalidArgument` for a stream without a timestamp column."""
    if not _has_times(stream):
        raise _without_times(stream)


def _without_times(stream: StreamDescription) -> InvalidArgument:
    return InvalidArgument(
        f"stream {stream.name!r} has no timestamp column: its records cannot be sorted by time", stream=stream.name
    )


def _has_times(stream: StreamDescription) -> bool:
    return not stream.typed or stream.timestamp_column is not None


def _older(times: npt.NDArray[np.int64], than_us: int) -> int:
    return int((times < than_us).sum())


def in_order(chunks: Mapping[EntryId, Sequence[ChunkBatch]], order: Mapping[int, int]) -> tuple[ChunkBatch, ...]:
    """Return chunks ordered by stream (in the reader's order of streams), streamlet and entry."""
    entries = sorted(chunks, key=lambda entry: (order[entry.stream_id], entry.streamlet_id, entry.entry))
    return tuple(chunk for entry in entries for chunk in chunks[entry])
