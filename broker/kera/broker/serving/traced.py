"""Spans for traced writes: how long an append took, and how long it waited for its durability level.

    append     from the start of the request until all its chunks are verified and in memory
    replicate  from then until backups have them; or ``persist``: until the disk has them. Within `append`'s parent

A request says in its message that it is traced; of its chunks, only the header of the first one is read, for the
stream's name. The native core, which takes many requests at once, leaves traced ones to this path.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from kera.broker.ownership.stream import Stream
from kera.broker.ownership.streams import Streams
from kera.broker.serving.hooks import RequestHooks, Write, WriteCall
from kera.broker.serving.pending_write import WriteReply
from kera.core.errors import KeraError
from kera.core.format.chunk import HEADER_BYTES, verify_header
from kera.core.rpc import Reply
from kera.core.rpc.wire import error_from_message
from kera.core.tracing import Span, SpanKind, TraceContext, Tracing
from kera.core.tracing.conventions import SYSTEM


class TracedWrites(RequestHooks):
    """Creates spans for traced writes."""

    def __init__(self, tracing: Tracing, streams: Streams) -> None:
        self._tracing = tracing
        self._streams = streams

    def around_write(self, write: Write) -> Write:
        """Return a handler that calls `write`, and creates spans for traced requests."""
        return partial(self._traced, write)

    def _traced(self, write: Write, call: WriteCall) -> WriteReply | asyncio.Future[WriteReply]:
        request = call.message
        if not request.traceparent:
            return write(call)
        parent = TraceContext.parse(request.traceparent, request.tracestate)
        if parent is None or not parent.sampled:
            return write(call)
        stream = self._stream_of(call.bulk)
        name = "" if stream is None else stream.name
        append = self._span("append", SpanKind.SERVER, name, parent)
        append.set("kera.chunks", request.chunk_count)
        append.set("kera.chunks.bytes", len(call.bulk))
        try:
            answer = write(call)
        except BaseException as error:
            append.fail(error)
            append.end()
            raise
        if isinstance(answer, Reply):
            _answered(append, answer)
            return answer
        append.end()
        waits = "replicate" if stream is not None and stream.replication else "persist"
        span = self._span(waits, SpanKind.INTERNAL, name, append.context or parent)
        answer.add_done_callback(lambda done: _done(span, done))
        return answer

    def _span(self, operation: str, kind: SpanKind, stream: str, parent: TraceContext) -> Span:
        attributes: dict[str, Any] = {"messaging.system": SYSTEM, "messaging.operation.name": operation}
        if stream:
            attributes["messaging.destination.name"] = stream
        return self._tracing.span(f"{operation} {stream}".rstrip(), kind, parent=parent, attributes=attributes)

    def _stream_of(self, bulk: memoryview) -> Stream | None:
        if len(bulk) < HEADER_BYTES:
            return None
        try:
            return self._streams.by_id.get(verify_header(bulk, 0).stream_id)
        except KeraError:  # the writer reports it
            return None


def _answered(span: Span, reply: WriteReply) -> None:
    refused = next((each.error for each in reply.message.statuses if each.HasField("error")), None)
    if refused is not None:
        span.fail(error_from_message(refused))
    span.end()


def _done(span: Span, done: asyncio.Future[WriteReply]) -> None:
    error = asyncio.CancelledError() if done.cancelled() else done.exception()
    if error is None:
        _answered(span, done.result())
    else:
        span.fail(error)
        span.end()
