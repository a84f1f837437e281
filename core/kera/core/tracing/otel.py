"""Traces with OpenTelemetry's SDK; no other module imports it.

The provider is our own and not the global one of the process: an application without a provider gets none, and an
application with a provider keeps it. Contexts are shared, so we still see the application's current span: our spans
belong to its trace, and are recorded if it is.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.trace.span import TraceState

from kera.core.base.build import this_build
from kera.core.errors import KeraError
from kera.core.tracing.context import TraceContext
from kera.core.tracing.export import Exporting
from kera.core.tracing.face import LINKS_MAX, NO_SPAN, Attributes, Span, SpanKind, Tracing

EXPORT_TIMEOUT_S = 5.0
_SCOPE = "kera"
_KINDS = {kind: trace.SpanKind[kind.value] for kind in SpanKind}


class OtelSpan(Span):
    """A span that is recorded."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.context = TraceContext(
            f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
            context.trace_state.to_header(),
        )

    def set(self, name: str, value: str | float) -> None:
        """See `Span`."""
        self._span.set_attribute(name, value)

    def fail(self, error: BaseException | str) -> None:
        """See `Span`. The text of the error is not recorded, as it may contain confidential data."""
        code = error.code if isinstance(error, KeraError) else type(error).__name__
        self._span.set_attribute("error.type", error if isinstance(error, str) else code)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        """See `Span`."""
        self._span.end()

    @contextlib.contextmanager
    def current(self) -> Iterator[Span]:
        """See `Span`."""
        with trace.use_span(self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield self


class _Queued(SpanProcessor):
    """Puts ended spans into the queue."""

    def __init__(self, exporting: Exporting) -> None:
        self._exporting = exporting

    def on_end(self, span: ReadableSpan) -> None:
        """See `SpanProcessor`."""
        self._exporting.add(span)


class OtelTracing(Tracing):
    """Traces that are exported over OTLP/HTTP."""

    is_on = True

    def __init__(self, endpoint: str, ratio: float, service: str, *, exporter: Any = None) -> None:
        """`exporter`: replaces the exporter to `endpoint`."""
        # It would log each failure while a collector is gone; `Exporting` reports that once a minute.
        logging.getLogger("opentelemetry.exporter.otlp.proto").setLevel(logging.CRITICAL)
        self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._exporting = Exporting(self._send)
        self._ratio = ratio
        described = Resource({SERVICE_NAME: service, "service.version": this_build().version})
        self._provider = TracerProvider(
            # `starts` has already decided about spans without a parent.
            sampler=ParentBased(ALWAYS_ON),
            resource=described.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(_Queued(self._exporting))
        self._tracer = self._provider.get_tracer(_SCOPE, this_build().version)
        atexit.register(self._exporting.close)

    def _send(self, spans: Sequence[Any]) -> bool:
        with contextlib.ExitStack() as stack:
            token = contexts.attach(contexts.set_value("suppress_instrumentation", value=True))
            stack.callback(contexts.detach, token)
            done: bool = self._exporter.export(spans) is SpanExportResult.SUCCESS
            return done

    def starts(self) -> bool:
        """See `Tracing`."""
        current = trace.get_current_span().get_span_context()
        if current.is_valid:
            return bool(current.trace_flags & TraceFlags.SAMPLED)
        return random.random() < self._ratio

    def span(
        self,
        name: str,
        kind: SpanKind,
        *,
        parent: TraceContext | None = None,
        links: Sequence[TraceContext] = (),
        attributes: Attributes | None = None,
        begun_ns: int | None = None,
    ) -> Span:
        """See `Tracing`."""
        context = None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(_seen(parent)))
        span = self._tracer.start_span(
            name,
            context,
            _KINDS[kind],
            dict(attributes or {}),
            [trace.Link(_seen(each)) for each in islice(links, LINKS_MAX)],
            start_time=begun_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        return OtelSpan(span) if span.is_recording() else NO_SPAN

    def flush(self, timeout_s: float) -> bool:
        """See `Tracing`."""
        return self._exporting.flush(timeout_s)


def _seen(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags, trace_state=state)
