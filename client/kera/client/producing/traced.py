"""The spans of a producer: one for each sampled record, and one for each request with sampled records.

    create      a record is accepted: the span's context is put into the record's headers. A record that already has a
                context keeps it
    send_batch  a batch, until all of it is delivered: the context is put into the headers of its first record, if the
                stream has headers and the batch has none
    send        a request to a broker, from sending to the answer: in the trace of its first traced record or batch,
                with links to all of them (up to a limit). Its context goes to the broker with the request

A chunk that is sent again is in another request, with a new span. Requests with gathered small batches, and with
batches that are sent as bundles because they have many streamlets, have no context: their chunks are known too late.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa

from kera.client.arrow_input import Columns
from kera.client.headers import NO_HEADERS, Headers, HeadersLike
from kera.client.producing.open_chunks.accumulator import Pending
from kera.client.producing.outcomes.outcome import BatchDelivery, Outcome
from kera.client.producing.sending.hooks import SenderHooks
from kera.client.producing.sending.request import Request
from kera.client.types import StreamDescription
from kera.core.errors import KeraError
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc.wire import error_from_message
from kera.core.tracing import LINKS_MAX, TRACEPARENT, TRACESTATE, Span, SpanKind, TraceContext, Tracing
from kera.core.tracing.conventions import messaging
from kera.v1 import broker_pb2

SendBatch = Callable[..., Awaitable[BatchDelivery]]
_HEADERS = DEFAULT_SCHEMA.field("headers")


class ProducerTraces:
    """The spans of one producer. Everything is called in its event loop."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._of_chunks: WeakKeyDictionary[Outcome, list[TraceContext]] = WeakKeyDictionary()
        """Contexts of records, by the outcome of their chunk."""

    def sending(self, send: Callable[..., Pending]) -> Callable[..., Pending]:
        """Return `send` of a producer, with spans."""
        tracing, note = self._tracing, self._note

        def traced(stream: str, value: Any, *, headers: HeadersLike | None = None, **others: Any) -> Pending:
            own = None if headers is None else Headers(headers)
            if own and TRACEPARENT in own:  # the caller's creation context, which must stay
                pending = send(stream, value, headers=own, **others)
                note(pending, TraceContext.parse(own[TRACEPARENT], own.get(TRACESTATE)))
                return pending
            if not tracing.starts():
                return send(stream, value, headers=own, **others)
            span = tracing.span(f"create {stream}", SpanKind.PRODUCER, attributes=messaging("create", stream))
            try:
                context = span.context
                more = own if context is None else Headers([*(own or NO_HEADERS).pairs, *context.headers.items()])
                pending = send(stream, value, headers=more, **others)
            except BaseException as error:
                span.fail(error)
                raise
            finally:
                span.end()
            note(pending, context)
            return pending

        return traced

    def sending_batches(
        self, send_batch: SendBatch, described: Callable[[str], Awaitable[StreamDescription]]
    ) -> SendBatch:
        """Return `send_batch` of a producer, with spans. `described`: describes a stream by its name."""
        tracing = self._tracing

        async def traced(stream: str, batch: Columns, *, streamlet: int | None = None) -> BatchDelivery:
            if not tracing.starts():
                return await send_batch(stream, batch, streamlet=streamlet)
            typed = (await described(stream)).typed
            rows = batch.num_rows if isinstance(batch, pa.RecordBatch | pa.Table) else None
            attributes = messaging("send_batch", stream, messages=rows, kind="send")
            span = tracing.span(f"send_batch {stream}", SpanKind.PRODUCER, attributes=attributes)
            context = span.context
            try:
                given = batch if typed or context is None else with_context(batch, context)
                delivery = await send_batch(stream, given, streamlet=streamlet)
            except BaseException as error:
                span.fail(error)
                span.end()
                raise
            for outcome in getattr(delivery, "_outcomes", ()):
                if isinstance(outcome, Outcome):
                    self._note_chunk(outcome, context)
            delivery.add_done_callback(partial(_delivered, span))
            return delivery

        return traced

    def _note(self, pending: Pending, context: TraceContext | None) -> None:
        self._note_chunk(pending._accumulator.delivered, context)  # noqa: SLF001 - the outcome of its chunk

    def _note_chunk(self, outcome: Outcome, context: TraceContext | None) -> None:
        if context is None or not context.sampled:
            return
        known = self._of_chunks.setdefault(outcome, [])
        if len(known) < LINKS_MAX:
            known.append(context)

    def begin(self, request: Request, broker_id: int) -> Span | None:
        """Begin the span of a request that is about to be sent; None: none of its chunks is traced."""
        if not self._of_chunks:
            return None
        traced = [(chunk, found) for chunk in request.chunks if (found := self._of_chunks.get(chunk.delivered))]
        if not traced:
            return None
        contexts = [context for _, found in traced for context in found]
        stream = traced[0][0].lane.identity.stream
        records = sum(chunk.payload.record_count for chunk, _ in traced)
        span = self._tracing.span(
            f"send {stream}",
            SpanKind.CLIENT,
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
        request.message.traceparent, request.message.tracestate = context.traceparent, context.tracestate
        return span


class RequestSpans(SenderHooks):
    """The spans of the requests in flight to one broker."""

    def __init__(self, traces: ProducerTraces, broker_id: int) -> None:
        self._traces = traces
        self._broker_id = broker_id
        self._spans: dict[Request, Span] = {}

    def on_request(self, request: Request) -> None:
        """See `SenderHooks`; likewise what follows."""
        span = self._traces.begin(request, self._broker_id)
        if span is not None:
            self._spans[request] = span

    def on_failure(self, request: Request, error: BaseException) -> None:
        """End the span of a request that was not sent, or not answered."""
        span = self._spans.pop(request, None)
        if span is not None:
            span.fail(error)
            span.end()

    def on_answer(self, request: Request, answer: broker_pb2.MultiWriteChunksResponse, now_s: float) -> None:  # noqa: ARG002
        """End the span of an answered request; it fails if a chunk was refused."""
        span = self._spans.pop(request, None)
        if span is None:
            return
        if not answer.all_stored:
            refusal: KeraError | None = next(
                (error_from_message(each.error) for each in answer.statuses if each.HasField("error")), None
            )
            if refusal is not None:
                span.fail(refusal)
        span.end()


def with_context(batch: Columns, context: TraceContext) -> Columns:
    """Put a context into the headers of a batch's first record; leaves a batch with headers, or a table, unchanged."""
    if not isinstance(batch, pa.RecordBatch) or not batch.num_rows:
        return batch
    at = batch.schema.get_field_index(_HEADERS.name)
    if at >= 0 and batch.column(at).null_count < batch.num_rows:
        return batch
    first = pa.array([list(context.headers.items())], _HEADERS.type)
    column = pa.concat_arrays([first, pa.nulls(batch.num_rows - 1, _HEADERS.type)])
    return batch.append_column(_HEADERS, column) if at < 0 else batch.set_column(at, _HEADERS, column)


def _delivered(span: Span, delivery: BatchDelivery) -> None:
    error = delivery.exception()
    if error is not None:
        span.fail(error)
    span.end()
