"""Traces (OpenTelemetry) behind a small interface, which does nothing unless traces are on.

    context  the trace context of records and requests: W3C Trace Context
    setting  the setting ``traces``, and the variables of OpenTelemetry; pure
    face     the interface, `Tracing` and `Span`, whose base classes do nothing
    otel     the classes that record spans; the only module that imports OpenTelemetry
    conventions  attributes, as OpenTelemetry calls them
    export   sends spans to a collector: bounded, on a thread, and without delaying other threads

A component that can be traced gets a `Tracing` where it is wired, and is wired differently if it `is_on`: so a hot path
need not even check. No attribute of a span contains a value, a key or a header of a record, or credentials; names of
streams and consumer groups may be in them.
"""

from kera.core.tracing.context import TRACEPARENT, TRACESTATE, TraceContext
from kera.core.tracing.face import LINKS_MAX, OFF, Span, SpanKind, Tracing
from kera.core.tracing.setting import TracesSettings, tracing_of

__all__ = [
    "LINKS_MAX",
    "OFF",
    "TRACEPARENT",
    "TRACESTATE",
    "Span",
    "SpanKind",
    "TraceContext",
    "TracesSettings",
    "Tracing",
    "tracing_of",
]
