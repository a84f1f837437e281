"""A span for each micro-batch of a query, with links to the traces of records that it reads.

Each record has its own trace context, and the driver sees no records. So with tracing on, the driver reads the first
chunk of a few of the micro-batch's entries, and takes contexts from there: a sample, bounded in chunks and in links. A
span begins when the micro-batch is planned, and ends when Spark reports it done, or plans another one instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kera.core.errors import KeraError
from kera.core.tracing import LINKS_MAX, Span, SpanKind, TraceContext
from kera.core.tracing.conventions import messaging
from kera.spark_connector.planning import Piece

if TYPE_CHECKING:
    from kera.client import Client

ENTRIES_MAX = 8
"""Maximum number of entries whose first chunks are read."""
LOOK_S = 2.0
"""Time limit for reading all of them, while the micro-batch waits."""
FLUSH_S = 1.0


class MicroBatchTraces:
    """The traces of one query. A pickled copy starts empty."""

    def __init__(self) -> None:
        self._span: Span | None = None
        self._end: Any = None
        """The end of the micro-batch that `_span` is for."""
        self._tracing: Any = None

    def __reduce__(self) -> tuple[type[MicroBatchTraces], tuple[()]]:
        return MicroBatchTraces, ()

    async def planned(self, client: Client, pieces: Sequence[Piece], end: Any, group: str) -> None:
        """Begin a span for a micro-batch that was planned, unless it is the same one as before."""
        if not client.tracing.is_on or not pieces or (self._span is not None and self._end == end):
            return
        self.finish()
        links = await _contexts(client, pieces)
        if not links:
            return
        self._tracing = client.tracing
        streams = sorted({piece.stream for piece in pieces})
        name = streams[0] if len(streams) == 1 else ""
        records = sum(piece.records for piece in pieces)
        attributes = messaging("process", name, messages=records, group=group)
        attributes["kera.spark.tasks"] = len(pieces)
        self._span = client.tracing.span(
            f"process {', '.join(streams[:ENTRIES_MAX])}", SpanKind.CONSUMER, links=links, attributes=attributes
        )
        self._end = end

    def done(self, end: Any) -> None:
        """End the span, if it is of the micro-batch up to `end`, which Spark has done."""
        if self._span is not None and self._end == end:
            self.finish()

    def finish(self) -> None:
        """End the span, whatever the outcome."""
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def flush(self) -> None:
        """Send the finished spans, because the process may be killed at any time."""
        if self._tracing is not None:
            self._tracing.flush(FLUSH_S)


async def _contexts(client: Client, pieces: Sequence[Piece]) -> list[TraceContext]:
    """Return the contexts of some of the records; none if reading fails or takes too long."""
    first = {piece.entry: piece for piece in reversed(pieces) if not piece.typed and piece.records}
    chosen = sorted(first.values(), key=lambda piece: piece.entry)[:ENTRIES_MAX]
    found: list[TraceContext] = []
    with contextlib.suppress(KeraError, TimeoutError):
        async with asyncio.timeout(LOOK_S):
            for contexts in await asyncio.gather(*(_of_first_chunk(client, piece) for piece in chosen)):
                found += contexts
    return found[:LINKS_MAX]


async def _of_first_chunk(client: Client, piece: Piece) -> list[TraceContext]:
    from kera.client.consuming.traced import contexts_of

    chunks = client.read_range(piece.stream, piece.entry.streamlet_id, piece.entry.entry, piece.start, piece.end)
    async with contextlib.aclosing(chunks):  # type: ignore[type-var]  # it is a generator
        async for chunk in chunks:
            at = chunk.batch.schema.get_field_index("headers")
            return contexts_of(chunk.batch.column(at)) if at >= 0 else []
    return []
