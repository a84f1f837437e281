"""What of a consumer is traced: for each batch or record that has a context, that it was given out, and what was done.

    receive   from when the application asked for more until it got it; links to the contexts of the records
    process   from then until it asks for more, or leaves; within `receive`, with the same links. It is the current span
              meanwhile: what the application begins belongs to it

What has no context, or one of a trace that is not recorded, makes no spans. Contexts are looked for in the headers of a
batch as columns: records do not become Python objects for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from kera.client.chunk_batch import ChunkBatch
from kera.client.types import Record, StreamDescription
from kera.core.tracing import LINKS_MAX, TRACEPARENT, TRACESTATE, Kind, Span, TraceContext, Tracing
from kera.core.tracing.conventions import messaging

T = TypeVar("T")

LOOKED_AT_MAX = 4 * LINKS_MAX
"""Contexts that are looked at in a batch: many may be of traces that are not recorded."""


def contexts_of(headers: pa.Array) -> list[TraceContext]:
    """Of recorded traces, in the headers of a batch's records, up to `LINKS_MAX`."""
    if headers.null_count == len(headers):
        return []
    first, end = headers.offsets[0].as_py(), headers.offsets[len(headers)].as_py()
    names, values = headers.keys.slice(first, end - first), headers.items.slice(first, end - first)
    found: list[TraceContext] = []
    for at in pc.indices_nonzero(pc.equal(names, TRACEPARENT))[:LOOKED_AT_MAX].to_pylist():
        # Who writes both writes one behind the other.
        state = values[at + 1].as_py() if at + 1 < len(names) and names[at + 1].as_py() == TRACESTATE else None
        context = TraceContext.parse(values[at].as_py(), state)
        if context is not None and context.sampled:
            found.append(context)
            if len(found) == LINKS_MAX:
                break
    return found


def contexts_of_headers(headers: Mapping[str, bytes]) -> list[TraceContext]:
    """Of one record, likewise."""
    context = TraceContext.parse(headers.get(TRACEPARENT), headers.get(TRACESTATE))
    return [context] if context is not None and context.sampled else []


class _Seen:
    """What is told of something that was received."""

    def __init__(self, stream: str, streamlet: int, messages: int, contexts: list[TraceContext]) -> None:
        self.stream = stream
        self.streamlet = streamlet
        self.messages = messages
        self.contexts = contexts


class TracedIteration(AsyncIterator[T], Generic[T]):
    """What a consumer gives out, with spans."""

    def __init__(
        self, given: AsyncIterator[T], tracing: Tracing, look: Callable[[T], _Seen | None], consumer_group: str
    ) -> None:
        self._given = given
        self._tracing = tracing
        self._look = look
        self._group = consumer_group
        self._process: Span | None = None
        self._leave = contextlib.ExitStack()
        """Ends that the span is the current one."""
        self._task: asyncio.Task[Any] | None = None
        """In which it is."""

    async def __anext__(self) -> T:
        """The next one."""
        self._processed()
        begun_ns = time.time_ns()
        item = await anext(self._given)
        seen = self._look(item)
        if seen is not None and seen.contexts:
            self._received(seen, begun_ns)
        return item

    def _received(self, seen: _Seen, begun_ns: int) -> None:
        receive = self._span("receive", Kind.CLIENT, seen, None, begun_ns)
        receive.end()
        self._process = process = self._span("process", Kind.CONSUMER, seen, receive.context, None)
        self._task = asyncio.current_task()
        self._leave = contextlib.ExitStack()
        self._leave.enter_context(process.current())

    def _span(self, operation: str, kind: Kind, seen: _Seen, parent: TraceContext | None, begun_ns: int | None) -> Span:
        attributes = messaging(operation, seen.stream, messages=seen.messages, group=self._group)
        attributes["messaging.destination.partition.id"] = str(seen.streamlet)
        return self._tracing.span(
            f"{operation} {seen.stream}",
            kind,
            parent=parent,
            links=seen.contexts,
            attributes=attributes,
            begun_ns=begun_ns,
        )

    def _processed(self, error: BaseException | None = None) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if error is not None:
            process.fail(error)
        if asyncio.current_task() is self._task:  # of another task it is not the current one
            self._leave.close()
        process.end()

    async def aclose(self) -> None:
        """Whoever went through it has left."""
        self._processed()
        close = getattr(self._given, "aclose", None)
        if close is not None:
            await close()

    def __del__(self) -> None:
        process = self._process
        if process is not None:
            process.end()


def trace(consumer: Any, tracing: Tracing, consumer_group: str) -> None:
    """Have `batches` and `records` of a `Consumer` or `GroupConsumer` make spans."""
    batches, records = consumer.batches, consumer.records
    streams: Mapping[int, StreamDescription] = consumer._chunks.streams  # noqa: SLF001 - a part of it

    def look_at_batch(chunk: ChunkBatch) -> _Seen | None:
        stream, batch = streams.get(chunk.entry.stream_id), chunk.batch
        at = batch.schema.get_field_index("headers")
        if stream is None or stream.typed or at < 0:
            return None
        return _Seen(stream.name, chunk.entry.streamlet_id, batch.num_rows, contexts_of(batch.column(at)))

    def look_at_record(record: Record) -> _Seen:
        return _Seen(record.stream, record.streamlet, 1, contexts_of_headers(record.headers))

    consumer.__dict__["batches"] = lambda: TracedIteration(batches(), tracing, look_at_batch, consumer_group)
    consumer.__dict__["records"] = lambda: TracedIteration(records(), tracing, look_at_record, consumer_group)
