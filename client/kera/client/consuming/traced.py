"""The spans of a consumer: the receipt and the processing of each batch or record with a trace context.

    receive   from the application's request for more until it got it; links to the contexts of the records
    process   from then until the application asks for more, or leaves; a child of `receive`, with the same links. It is
              the current span meanwhile: spans that the application begins belong to it

Lists of records or batches (`next_records`, `next_batches`, and so consumers without asyncio) make `receive` only,
because the end of their processing is not known.

Records without a context, or with one of a trace that is not recorded, make no spans. Contexts are searched in the
headers of a batch as columns: records do not become Python objects for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.plugins import DeliveryHooks
from kera.client.types import Record, StreamDescription
from kera.core.tracing import LINKS_MAX, TRACEPARENT, TRACESTATE, Span, SpanKind, TraceContext, Tracing
from kera.core.tracing.conventions import messaging

T = TypeVar("T")

LOOKED_AT_MAX = 4 * LINKS_MAX
"""Maximum number of contexts that are examined in a batch: many may be of traces that are not recorded."""


def contexts_of(headers: pa.Array) -> list[TraceContext]:
    """Return the contexts of recorded traces in the headers of a batch's records, up to `LINKS_MAX`."""
    if headers.null_count == len(headers):
        return []
    bounds = np.asarray(headers.offsets)
    first = int(bounds[0])
    names, values = (part.slice(first, int(bounds[-1]) - first) for part in (headers.keys, headers.items))
    places = np.asarray(pc.indices_nonzero(pc.equal(names, TRACEPARENT)))[:LOOKED_AT_MAX]
    ends = bounds[np.searchsorted(bounds, places + first, side="right")] - first
    found: list[TraceContext] = []
    for place, (at, end) in enumerate(zip(places.tolist(), ends.tolist(), strict=True)):
        if place + 1 < len(places) and places[place + 1] < end:
            continue  # if a name repeats, its last value counts
        # A producer that writes both writes TRACESTATE directly behind TRACEPARENT.
        state = values[at + 1].as_py() if at + 1 < end and names[at + 1].as_py() == TRACESTATE else None
        context = TraceContext.parse(values[at].as_py(), state)
        if context is not None and context.sampled:
            found.append(context)
            if len(found) == LINKS_MAX:
                break
    return found


def contexts_of_headers(headers: Mapping[str, bytes | None]) -> list[TraceContext]:
    """Return the context in the headers of one record, if it is of a recorded trace."""
    context = TraceContext.parse(headers.get(TRACEPARENT), headers.get(TRACESTATE))
    return [context] if context is not None and context.sampled else []


class _Seen:
    """The attributes of a receipt."""

    def __init__(self, stream: str, streamlet: int | None, messages: int, contexts: list[TraceContext]) -> None:
        self.stream = stream
        self.streamlet = streamlet
        self.messages = messages
        self.contexts = contexts


class ConsumerTraces(DeliveryHooks):
    """Spans of one consumer."""

    def __init__(self, tracing: Tracing, consumer_group: str, streams: Mapping[int, StreamDescription]) -> None:
        """`streams`: the streams that the consumer reads; filled when it starts."""
        self._tracing = tracing
        self._group = consumer_group
        self._streams = streams

    def batches(self, given: AsyncIterator[ChunkBatch]) -> AsyncIterator[ChunkBatch]:
        """See `DeliveryHooks`; likewise what follows."""
        return TracedIteration(given, self, self._look_at_batch)

    def records(self, given: AsyncIterator[Record]) -> AsyncIterator[Record]:
        """Make spans for each record with a context."""
        return TracedIteration(given, self, _look_at_record)

    async def next_batches(self, coming: Awaitable[list[ChunkBatch]]) -> list[ChunkBatch]:
        """Make one span for all batches."""
        return await self._several(coming, self._look_at_batch)

    async def next_records(self, coming: Awaitable[list[Record]]) -> list[Record]:
        """Make one span for all records."""
        return await self._several(coming, _look_at_record)

    async def _several(self, coming: Awaitable[list[T]], look: Callable[[T], _Seen | None]) -> list[T]:
        begun_ns = time.time_ns()
        found = await coming
        seen = _together([each for each in map(look, found) if each is not None and each.contexts])
        if seen is not None:
            self.receive(seen, begun_ns)
        return found

    def _look_at_batch(self, chunk: ChunkBatch) -> _Seen | None:
        stream, batch = self._streams.get(chunk.entry.stream_id), chunk.batch
        at = batch.schema.get_field_index("headers")
        if stream is None or stream.typed or at < 0:
            return None
        return _Seen(stream.name, chunk.entry.streamlet_id, batch.num_rows, contexts_of(batch.column(at)))

    def receive(self, seen: _Seen, begun_ns: int) -> Span:
        """Make the span of a receipt that ends now; the application asked for it at `begun_ns`."""
        span = self._span("receive", SpanKind.CLIENT, seen, None, begun_ns)
        span.end()
        return span

    def process(self, seen: _Seen, received: Span) -> Span:
        """Begin the span of the processing of a receipt."""
        return self._span("process", SpanKind.CONSUMER, seen, received.context, None)

    def _span(
        self, operation: str, kind: SpanKind, seen: _Seen, parent: TraceContext | None, begun_ns: int | None
    ) -> Span:
        attributes = messaging(operation, seen.stream, messages=seen.messages, group=self._group)
        if seen.streamlet is not None:
            attributes["messaging.destination.partition.id"] = str(seen.streamlet)
        return self._tracing.span(
            f"{operation} {seen.stream}",
            kind,
            parent=parent,
            links=seen.contexts,
            attributes=attributes,
            begun_ns=begun_ns,
        )


class TracedIteration(AsyncIterator[T], Generic[T]):
    """Iterates over the deliveries of a consumer, and makes spans for them."""

    def __init__(self, given: AsyncIterator[T], traces: ConsumerTraces, look: Callable[[T], _Seen | None]) -> None:
        self._given = given
        self._traces = traces
        self._look = look
        self._process: Span | None = None
        self._leave = contextlib.ExitStack()
        """Its end restores the current span from before."""
        self._task: asyncio.Task[Any] | None = None
        """The task whose current span this is."""

    async def __anext__(self) -> T:
        """Return the next item."""
        self._processed()
        begun_ns = time.time_ns()
        item = await anext(self._given)
        seen = self._look(item)
        if seen is not None and seen.contexts:
            self._process = process = self._traces.process(seen, self._traces.receive(seen, begun_ns))
            self._task = asyncio.current_task()
            self._leave = contextlib.ExitStack()
            self._leave.enter_context(process.current())
        return item

    def _processed(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if _current_task() is self._task:  # in another task it is not the current span
            self._leave.close()
        process.end()

    async def aclose(self) -> None:
        """End the span, and close the iterator below."""
        self._processed()
        close = getattr(self._given, "aclose", None)
        if close is not None:
            await close()

    def __del__(self) -> None:
        self._processed()  # a loop that is left by a break or an error does not close its iterator


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None


def _look_at_record(record: Record) -> _Seen:
    return _Seen(record.stream, record.streamlet, 1, contexts_of_headers(record.headers))


def _together(seen: list[_Seen]) -> _Seen | None:
    """Combine several receipts, possibly of several streamlets, into one."""
    if not seen:
        return None
    streamlets = {each.streamlet for each in seen}
    return _Seen(
        seen[0].stream,
        seen[0].streamlet if len(streamlets) == 1 else None,
        sum(each.messages for each in seen),
        list(islice(chain.from_iterable(each.contexts for each in seen), LINKS_MAX)),
    )
