"""Traces (OpenTelemetry), as everything but this package sees them: a small face that does nothing unless it is on.

    context  what travels with records and requests: W3C Trace Context
    setting  what the setting ``traces`` and the variables of OpenTelemetry say; pure
    face     `Tracing` and `Span`, and the ones that do nothing
    otel     those that do something; the only module that imports OpenTelemetry
    conventions  attributes, as OpenTelemetry calls them
    export   spans on their way to a collector: bounded, on a thread, and never in anybody's way

Who can be traced takes a `Tracing` where it is wired, and is wired differently when it `is_on`: so a hot path does not
even ask. No attribute of a span has a value, a key or a header of a record, or what somebody authenticates by;
names of streams and consumer groups are there.
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
