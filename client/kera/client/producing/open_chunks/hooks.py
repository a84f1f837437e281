"""The places at which something can be plugged into open chunks; nothing of it is needed to fill and close them."""

from __future__ import annotations

from collections.abc import Mapping

from kera.client.producing.open_chunks.accumulator import Accumulator


class ChunkHooks:
    """Called for the streams of one producer, never for a record. By default nothing happens.

    What is plugged in overrides the methods that it needs; they must not raise. Times are on the loop's clock.
    """

    def on_prepared(self, stream_id: int, open_chunks: Mapping[int, Accumulator]) -> None:
        """A stream is written to from now on. `open_chunks` are those of each moment, in the order they were opened."""

    def on_accepted(self, stream_id: int, at_s: float) -> None:
        """The first record of a chunk, or rows of a batch, were accepted."""

    def on_chunk_closed(self, stream_id: int, chunk: Accumulator) -> None:
        """A chunk is not open any more; its records are sent next."""
