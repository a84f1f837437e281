"""Gathers small batches until they are sent as one batch.

A gathering copies the batches it accepts (into an Arrow stream in memory), so their owner may reuse the memory when
`add` returns. When the gathering is closed, all its rows are assigned to streamlets and chunks together. Each batch
remembers which rows of the gathering are its own.

`kera.client.producing.open_chunks.stream_writer` decides which batches may be gathered, and when to close a gathering.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kera.client.producing.lanes.lane import Lane
from kera.client.producing.outcomes.deliveries import Deliveries
from kera.client.producing.outcomes.outcome import BatchDelivery, Outcome
from kera.client.types import Delivery
from kera.core.errors import KeraError
from kera.core.format.schema import DEFAULT_SCHEMA

_TIMESTAMP = DEFAULT_SCHEMA.field("timestamp")


class _RowStream:
    """Batches with the same columns, as an Arrow stream in memory."""

    def __init__(self, schema: pa.Schema) -> None:
        self._sink = pa.BufferOutputStream()
        self._writer = pa.ipc.new_stream(self._sink, schema)

    def add(self, batch: pa.RecordBatch) -> None:
        """Copy a batch."""
        self._writer.write_batch(batch)

    def take(self) -> pa.RecordBatch:
        """Return all batches as one, and free them: a delivery that is kept does not keep the rows. Works once."""
        self._writer.close()
        stream = self._sink.getvalue()
        del self._sink, self._writer
        (rows,) = pa.ipc.open_stream(stream).read_all().combine_chunks().to_batches()
        return rows


class Gathering:
    """Batches of one stream with the same columns, all for one streamlet or all to be partitioned."""

    def __init__(self, schema: pa.Schema, lane: Lane, created_us: int, opened_s: float) -> None:
        """`lane`: its sender closes the gathering when it is due.

        `created_us`, `opened_s`: time of opening, in microseconds of the day and on the loop's clock. Batches without a
        column of times get one here: the time when they were accepted.
        """
        self.lane = lane
        self.created_us = created_us
        self.opened_s = opened_s
        self.delivered = Outcome()
        """Outcome of the first chunk made of the gathering, or the error if none could be made."""
        self.size = 0
        """Estimate of the bytes of its rows, from above."""
        self.row_count = 0
        self.schema = schema
        self._stream = _RowStream(schema)
        self._times_us: list[int] = []
        self._counts: list[int] = []
        self._chunks: Sequence[Outcome] = ()
        self._ends: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._order: npt.NDArray[np.int64] | None = None
        self._places: npt.NDArray[np.int64] | None = None

    def add(self, batch: pa.RecordBatch, size: int, now_us: int) -> GatheredDelivery:
        """Add a batch with the columns of `schema`, accepted at `now_us`; `size` is the estimate of its bytes."""
        self._stream.add(batch)
        first, count = self.row_count, batch.num_rows
        self._times_us.append(now_us)
        self._counts.append(count)
        self.row_count = first + count
        self.size += size
        return GatheredDelivery(self, first, self.row_count)

    def batch(self, *, with_times: bool) -> pa.RecordBatch:
        """Return all rows in the order of their arrival; call this last.

        `with_times`: add the column with times of acceptance, if it is missing.
        """
        rows = self._stream.take()
        if not with_times or _TIMESTAMP.name in self.schema.names:
            return rows
        times = pa.array(np.repeat(self._times_us, self._counts), _TIMESTAMP.type)
        return pa.RecordBatch.from_arrays([*rows.columns, times], schema=rows.schema.append(_TIMESTAMP))

    def sent_as(self, chunks: Sequence[Outcome], counts: Sequence[int], order: npt.NDArray[Any] | None) -> None:
        """Note the chunks that the rows became, with their row counts. `order`: of partitioned rows, else None."""
        self._chunks, self._ends, self._order = chunks, np.cumsum(counts, dtype=np.int64), order

    def parts(self, first: int, end: int) -> list[tuple[Outcome, int, int]]:
        """Return the chunks of the rows from `first` to `end`: outcome, first row in the chunk, and number of rows.

        The rows of a batch that are in the same chunk follow each other there.
        """
        if not self._chunks:
            return [(self.delivered, 0, 0)]
        if self._order is None:
            places = np.arange(first, end)
        else:
            if self._places is None:
                self._places = np.empty(self.row_count, np.int64)
                self._places[self._order] = np.arange(self.row_count)
            places = np.sort(self._places[first:end])
        within = np.searchsorted(self._ends, places, side="right")
        chunks, starts, counts = np.unique(within, return_index=True, return_counts=True)
        found = []
        for chunk, row, count in zip(chunks.tolist(), places[starts].tolist(), counts.tolist(), strict=True):
            before = int(self._ends[chunk - 1]) if chunk else 0
            found.append((self._chunks[chunk], row - before, count))
        return found

    def fail(self, error: KeraError) -> None:
        """Fail all rows with `error`."""
        self.delivered.settle(error)


class GatheredDelivery(BatchDelivery):
    """The deliveries of a gathered batch: one for each chunk with some of its rows, reduced to these rows."""

    __slots__ = ("_end", "_first", "_gathering")

    def __init__(self, gathering: Gathering, first: int, end: int) -> None:
        """The rows from `first` to `end` are the batch's."""
        super().__init__([])
        self._gathering = gathering
        self._first = first
        self._end = end

    def _parts(self) -> list[tuple[Outcome, int, int]]:
        """Return the batch's parts of chunks. Only meaningful once `delivered` of the gathering is known."""
        return self._gathering.parts(self._first, self._end)

    def __await__(self) -> Generator[Any, None, Sequence[Delivery]]:
        yield from self._gathering.delivered.wait()
        for outcome, _, _ in self._parts():
            yield from outcome.wait()
            outcome.result()  # raises
        return self.result()

    def done(self) -> bool:
        """See `BatchDelivery`; likewise what follows."""
        return self._gathering.delivered.done() and all(outcome.done() for outcome, _, _ in self._parts())

    def result(self) -> Sequence[Delivery]:
        """Return the deliveries."""
        if not self._gathering.delivered.done():
            self._gathering.delivered.result()  # raises
        return Deliveries(_part_of(outcome.result(), first, count) for outcome, first, count in self._parts())

    def exception(self) -> KeraError | None:
        """Return the first error."""
        self._gathering.delivered.exception()  # raises while it is not known
        return next((error for outcome, _, _ in self._parts() if (error := outcome.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[BatchDelivery], object]) -> None:
        """Have the event loop call `callback` with this object when all chunks are delivered or have failed."""

        def known() -> None:
            delivered = self._gathering.delivered
            outcomes = [outcome for outcome, _, _ in self._parts()] if delivered.done() else [delivered]
            waiting = next((outcome for outcome in outcomes if not outcome.done()), None)
            if waiting is None:
                callback(self)
            else:
                waiting.when_done(known)

        self._gathering.delivered.when_done(known)


def _part_of(chunk: Delivery, first: int, count: int) -> Delivery:
    record = None if chunk.record is None else chunk.record + first
    return chunk._replace(record=record, record_count=count)
