"""A chunk whose records are being delivered one by one, or several that have come together.

Each is delivered with its last record, so that one is kept back: those before it are at hand, to be taken without
asking anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kera.client.chunk_batch import ChunkBatch
from kera.client.types import Record
from kera.core.base.ids import EARLIEST, Position


class OpenChunk:
    """See the head of this module."""

    def __init__(self, offer: Callable[[Iterator[Record]], None]) -> None:
        """`offer` is told what is at hand, whenever that is something else."""
        self._offer = offer
        self.chunk: ChunkBatch | None = None
        self.at_hand: Iterator[Record] = iter(())
        """The records up to the last one of a chunk."""
        self._records: Iterator[Record] = iter(())
        self._ends: Iterator[tuple[int, Position]] = iter(())
        """See `ChunkBatch.ends`: of what comes behind `_span`."""
        self._span = (0, 0, EARLIEST)
        """The chunk that is being delivered: its first and last record, and where the next one starts."""

    def open(self, chunk: ChunkBatch, records: Iterator[Record]) -> None:
        """Begin with its records."""
        self.chunk, self._records, self._ends = chunk, records, chunk.ends()
        self._offer_from(chunk.header.first_record)

    def pass_end(self) -> tuple[Position, Record | None]:
        """Deliver a chunk whose other records were taken: where the next one starts, and its last record, if any."""
        first, last, behind = self._span
        record = next(self._records, None) if first <= last else None
        self._offer_from(last + 1)
        return behind, record

    def close(self) -> None:
        """Have no chunk."""
        self.chunk, self._records, self.at_hand = None, iter(()), iter(())
        self._offer(self.at_hand)

    def _offer_from(self, first: int) -> None:
        for last, behind in self._ends:
            self._span = first, last, behind
            self.at_hand = islice(self._records, max(0, last - first))
            self._offer(self.at_hand)
            return
        self.close()
