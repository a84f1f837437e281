"""Small batches on their way to chunks: gathered as they come, until they are sent as one batch.

What is accepted is copied (into an Arrow stream in memory): the memory of a batch is its owner's when `add` returns.
Which rows go to which streamlet, and into which chunk, is decided for all of them together, when the gathering is
closed; until then a batch knows which rows of it are its own.

Left to `kera.client.producing.open_chunks.stream_writer`: which batches may be gathered, and when it is closed.
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
        """All of them as one; once. Who keeps a delivery does not keep the rows."""
        self._writer.close()
        stream = self._sink.getvalue()
        del self._sink, self._writer
        (rows,) = pa.ipc.open_stream(stream).read_all().combine_chunks().to_batches()
        return rows


class Gathering:
    """Batches of one stream with the same columns, all for one streamlet or all to be partitioned."""

    def __init__(self, schema: pa.Schema, lane: Lane, created_us: int, opened_s: float) -> None:
        """`lane`: whose sender closes it when it is due. `created_us`, `opened_s`: on both clocks, when it was opened.

        Batches without a column that has the time of each row get it here: when they were accepted.
        """
        self.lane = lane
        self.created_us = created_us
        self.opened_s = opened_s
        self.delivered = Outcome()
        """Outcome of the first chunk that it becomes, or the reason why it has become none."""
        self.size = 0
        """Estimate of its bytes, from above."""
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
        """Take a batch of these columns."""
        self._stream.add(batch)
        first, count = self.row_count, batch.num_rows
        self._times_us.append(now_us)
        self._counts.append(count)
        self.row_count = first + count
        self.size += size
        return GatheredDelivery(self, first, self.row_count)

    def batch(self, *, with_times: bool) -> pa.RecordBatch:
        """All rows, in the order in which they came; nothing is added after that. `with_times`: if they have none."""
        rows = self._stream.take()
        if not with_times or _TIMESTAMP.name in self.schema.names:
            return rows
        times = pa.array(np.repeat(self._times_us, self._counts), _TIMESTAMP.type)
        return pa.RecordBatch.from_arrays([*rows.columns, times], schema=rows.schema.append(_TIMESTAMP))

    def sent_as(self, chunks: Sequence[Outcome], counts: Sequence[int], order: npt.NDArray[Any] | None) -> None:
        """It has become these chunks, of so many rows each. `order`: of the rows, if they were partitioned."""
        self._chunks, self._ends, self._order = chunks, np.cumsum(counts, dtype=np.int64), order

    def parts(self, first: int, end: int) -> list[tuple[Outcome, int, int]]:
        """The chunks of the rows from `first` to `end`: the outcome, the first row there, and the number of rows.

        Rows that follow each other in a batch do so in each chunk.
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
        """Nothing of it will be delivered."""
        self.delivered.settle(error)


class GatheredDelivery(BatchDelivery):
    """The deliveries of the rows of a batch that was gathered: its parts of the chunks that they are in."""

    __slots__ = ("_end", "_first", "_gathering")

    def __init__(self, gathering: Gathering, first: int, end: int) -> None:
        """The rows from `first` to `end` are the batch's."""
        super().__init__([])
        self._gathering = gathering
        self._first = first
        self._end = end

    def _parts(self) -> list[tuple[Outcome, int, int]]:
        """Once `delivered` of the gathering is known; before that it may not be known which they are."""
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
        """The deliveries."""
        if not self._gathering.delivered.done():
            self._gathering.delivered.result()  # raises
        return Deliveries(_part_of(outcome.result(), first, count) for outcome, first, count in self._parts())

    def exception(self) -> KeraError | None:
        """The first error."""
        self._gathering.delivered.exception()  # raises while it is not known
        return next((error for outcome, _, _ in self._parts() if (error := outcome.exception()) is not None), None)

    def add_done_callback(self, callback: Callable[[BatchDelivery], object]) -> None:
        """Tell it when all is known."""

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
