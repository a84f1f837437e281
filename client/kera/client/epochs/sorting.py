"""The rows of an epoch in total order: by time, stream (in the given order), streamlet, entry and ordinal. Pure.

Rows of streams with the same columns are of one kind, and can be in one batch; a batch ends where the order goes from
one kind to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client.consuming.delivering.records import records_at, typed_records_at
from kera.client.epochs.epoch import Epoch
from kera.client.types import Record, StreamDescription

Indexes = npt.NDArray[np.int64]
ORIGINS = pa.schema(
    [
        pa.field("stream", pa.string(), nullable=False),
        pa.field("streamlet", pa.uint32(), nullable=False),
        pa.field("entry", pa.uint32(), nullable=False),
        pa.field("offset", pa.uint64(), nullable=False),
        pa.field("timestamp_us", pa.int64(), nullable=False),
    ]
)


class OrderedBatch:
    """Consecutive rows in the total order of streams, in their own memory."""

    def __init__(self, rows: OrderedRows, batch: pa.RecordBatch, indexes: Indexes, *, ends_epoch: bool) -> None:
        """Made by `OrderedRows.batch`."""
        self.batch = batch
        """The columns of the stream, or of the streams, which have the same ones."""
        self.epoch = rows.epoch
        """The number of the epoch of all rows."""
        self.ends_epoch = ends_epoch
        """Whether these are the last rows of the epoch, so that `OrderedConsumer.commit` now counts it as processed."""
        self.stream = rows.stream_at(indexes[0])
        """Stream of the first row; other rows may be of other streams with the same columns, see `origins`."""
        self._rows = rows
        self._indexes = indexes

    @cached_property
    def origins(self) -> pa.RecordBatch:
        """The stream, streamlet, entry and offset of each row, and its time for sorting (``timestamp_us``)."""
        return self._rows.origins(self._indexes)

    def records(self) -> Iterator[Record]:
        """Return an iterator over the rows as Python values, in their order."""
        streams, streamlets, entries, offsets, times = (column.to_pylist() for column in self.origins.columns)
        if self.stream.typed:
            key_column = self.stream.key_column
            return typed_records_at(self.batch, key_column, streams, streamlets, entries, offsets, times)
        return records_at(self.batch, streams, streamlets, entries, offsets, times)


class _Kind(NamedTuple):
    """The common properties of streams whose rows can be in one batch."""

    schema: pa.Schema
    typed: bool
    key_column: str | None
    timestamp_column: str | None


def _kind_of(stream: StreamDescription) -> _Kind:
    return _Kind(stream.schema, stream.typed, stream.key_column, stream.timestamp_column)


class OrderedRows:
    """The sorted rows of an epoch, copied from its chunks."""

    def __init__(self, epoch: Epoch) -> None:
        """Sort the rows. Raises `InvalidArgument` for a stream without a timestamp column."""
        self.epoch = epoch.number
        chunks = [chunk for chunk in epoch.batches if chunk.batch.num_rows]
        self._streams = [epoch.stream_of(chunk) for chunk in chunks]
        """The stream of each chunk."""
        counts = np.array([chunk.batch.num_rows for chunk in chunks], np.int64)
        self._ends: Indexes = np.cumsum(counts)
        """The end of each chunk in all rows, in the order of the epoch's chunks."""
        self._streamlets = np.array([chunk.entry.streamlet_id for chunk in chunks], np.uint32)
        self._entries = np.array([chunk.entry.entry for chunk in chunks], np.uint32)
        self._first_records = np.array([chunk.header.first_record for chunk in chunks], np.int64) - self._ends + counts
        """For each chunk, the difference between a record's ordinal and its index in all rows."""
        self._times = np.concatenate([epoch.times(chunk) for chunk in chunks] or [np.zeros(0, np.int64)])
        self._order: Indexes = np.argsort(self._times, kind="stable")
        kinds: dict[_Kind, int] = {}
        of_stream = {
            stream_id: kinds.setdefault(_kind_of(epoch.streams[stream_id]), len(kinds))
            for stream_id in dict.fromkeys(chunk.entry.stream_id for chunk in chunks)
        }
        self._kinds = np.array([of_stream[chunk.entry.stream_id] for chunk in chunks], np.int64)
        self._shifts = np.zeros(len(chunks), np.int64)
        """For each chunk, the difference between a row's index among the rows of its kind and its index in all rows."""
        self._tables: list[pa.Table] = []
        for kind in range(len(kinds)):
            mine = np.flatnonzero(self._kinds == kind)
            rows = [epoch.rows_of(chunks[number]) for number in mine.tolist()]
            self._tables.append(pa.Table.from_batches(rows).combine_chunks())
            self._shifts[mine] = np.cumsum(counts[mine]) - self._ends[mine]
        self._cuts = np.zeros(0, np.int64)
        """Indexes in the order at which rows of another kind begin."""
        if len(kinds) > 1:
            in_order = self._kinds[self._chunks_of(self._order)]
            self._cuts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, start: int, rows_max: int) -> OrderedBatch:
        """Return rows from `start` on in the order: up to `rows_max`, of one kind."""
        end = min(start + rows_max, len(self))
        passed = int(np.searchsorted(self._cuts, start, side="right"))
        if passed < len(self._cuts):
            end = min(end, int(self._cuts[passed]))
        indexes = self._order[start:end]
        kind = int(self._kinds[self._chunks_of(indexes[:1])[0]])
        within = indexes + self._shifts[self._chunks_of(indexes)] if len(self._tables) > 1 else indexes
        (batch,) = self._tables[kind].take(pa.array(within)).combine_chunks().to_batches()
        return OrderedBatch(self, batch, indexes, ends_epoch=end == len(self))

    def stream_at(self, index: np.int64) -> StreamDescription:
        """Return the stream of a row."""
        return self._streams[int(self._chunks_of(np.array([index]))[0])]

    def origins(self, indexes: Indexes) -> pa.RecordBatch:
        """See `OrderedBatch.origins`."""
        chunks = self._chunks_of(indexes)
        names = pa.array([stream.name for stream in self._streams], pa.string())
        columns = [
            names.take(pa.array(chunks)),
            pa.array(self._streamlets[chunks]),
            pa.array(self._entries[chunks]),
            pa.array((indexes + self._first_records[chunks]).astype(np.uint64)),
            pa.array(self._times[indexes]),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=ORIGINS)

    def _chunks_of(self, indexes: Indexes) -> Indexes:
        return np.searchsorted(self._ends, indexes, side="right")
