"""Hooks for plug-ins of open chunks; chunks are filled and closed without any plug-in as well."""

from __future__ import annotations

from collections.abc import Mapping

from kera.client.producing.open_chunks.accumulator import Accumulator


class ChunkHooks:
    """Hooks for the streams of one producer; no hook is called per record. By default they do nothing.

    A plug-in overrides the methods that it needs; they must not raise. Times are on the loop's clock.
    """

    def on_prepared(self, stream_id: int, open_chunks: Mapping[int, Accumulator]) -> None:
        """A stream was prepared for writing. `open_chunks` is a live view, in order of opening."""

    def on_accepted(self, stream_id: int, at_s: float) -> None:
        """The first record of a chunk, or rows of a batch, were accepted."""

    def on_chunk_closed(self, stream_id: int, chunk: Accumulator) -> None:
        """A chunk was closed; its records are queued next."""
