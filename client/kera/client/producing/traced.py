"""What of a producer is traced: a span for each record that is sampled, and one for each request that has any.

    create   a record is accepted: its context is the record's from then on, in its headers. A record that comes with a
             context of its own keeps it
    send     a request to a broker, from when it is sent until it is answered: in the trace of the first of its records
             that is traced, with links to all of them (up to a limit). Its context goes to the broker with the request

Records of a chunk that is sent again are in a request of its own, with a span of its own. `Producer.send_batch` is not
traced: its records are columns, and have no headers but those that they came with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from kera.client.producing.accumulator import Pending
from kera.client.producing.lane import PendingChunk
from kera.client.producing.outcome import Outcome
from kera.core.errors import KeraError
from kera.core.rpc import Reply
from kera.core.rpc.wire import error_from_message
from kera.core.tracing import LINKS_MAX, TRACEPARENT, TRACESTATE, Kind, Span, TraceContext, Tracing
from kera.core.tracing.conventions import messaging
from kera.v1 import broker_pb2

Answered = asyncio.Future[Reply[broker_pb2.MultiWriteChunksResponse]]


class ProducerTraces:
    """Of one producer. Everything is called in its event loop."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._of_chunks: WeakKeyDictionary[Outcome, list[TraceContext]] = WeakKeyDictionary()
        """Contexts of records, by what the chunk that they are in is answered with."""

    def sending(self, send: Callable[..., Pending]) -> Callable[..., Pending]:
        """`send` of a producer, with spans."""
        tracing, note = self._tracing, self._note

        def traced(stream: str, value: Any, *, headers: Mapping[str, bytes] | None = None, **others: Any) -> Pending:
            if headers and TRACEPARENT in headers:  # its own creation context, which is not ours to replace
                pending = send(stream, value, headers=headers, **others)
                note(pending, TraceContext.parse(headers[TRACEPARENT], headers.get(TRACESTATE)))
                return pending
            if not tracing.starts():
                return send(stream, value, headers=headers, **others)
            span = tracing.span(f"create {stream}", Kind.PRODUCER, attributes=messaging("create", stream))
            try:
                context = span.context
                more = headers if context is None else {**(headers or {}), **context.headers}
                pending = send(stream, value, headers=more, **others)
            except BaseException as error:
                span.fail(error)
                raise
            finally:
                span.end()
            note(pending, context)
            return pending

        return traced

    def _note(self, pending: Pending, context: TraceContext | None) -> None:
        if context is None or not context.sampled:
            return
        outcome = pending._accumulator.delivered  # noqa: SLF001 - the chunk that it will be in
        known = self._of_chunks.setdefault(outcome, [])
        if len(known) < LINKS_MAX:
            known.append(context)

    def begin(
        self, request: broker_pb2.MultiWriteChunksRequest, chunks: Iterable[PendingChunk], broker_id: int
    ) -> SendSpan | None:
        """A request is about to be sent; None: nobody traces anything of it."""
        if not self._of_chunks:
            return None
        traced = [(chunk, found) for chunk in chunks if (found := self._of_chunks.get(chunk.delivered))]
        if not traced:
            return None
        contexts = [context for _, found in traced for context in found]
        stream = traced[0][0].lane.identity.stream
        records = sum(chunk.payload.record_count for chunk, _ in traced)
        span = self._tracing.span(
            f"send {stream}",
            Kind.CLIENT,
            parent=contexts[0],
            links=contexts,
            attributes={
                **messaging("send", stream, messages=records),
                "messaging.destination.partition.id": str(traced[0][0].lane.identity.streamlet_id),
                "kera.broker.id": broker_id,
                "kera.chunks": len(traced),
            },
        )
        context = span.context
        if context is None:
            return None
        request.traceparent, request.tracestate = context.traceparent, context.tracestate
        return SendSpan(span)


class SendSpan:
    """Of a request that is under way."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def failed(self, error: BaseException) -> None:
        """It was not sent, or not answered."""
        self._span.fail(error)
        self._span.end()

    def answered(self, done: Answered) -> None:
        """It was answered, or not."""
        error = done.exception() if not done.cancelled() else asyncio.CancelledError()
        if error is not None:
            self.failed(error)
            return
        message = done.result().message
        if not message.all_stored:
            refusal: KeraError | None = next(
                (error_from_message(each.error) for each in message.statuses if each.HasField("error")), None
            )
            if refusal is not None:
                self._span.fail(refusal)
        self._span.end()
