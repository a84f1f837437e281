"""Spans with OpenTelemetry's SDK."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from kera.core.errors import NotOwner
from kera.core.tracing import LINKS_MAX, SpanKind, TraceContext
from tests.unit.core.tracing.recorded import recorded

PARENT = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", "vendor=value")
UNRECORDED = TraceContext(f"00-{'a' * 32}-{'b' * 16}-00")


def test_a_span_belongs_to_its_parents_trace_and_has_its_links() -> None:
    with recorded() as found:
        span = found.tracing.span(
            "x", SpanKind.SERVER, parent=PARENT, links=[PARENT] * (LINKS_MAX + 5), attributes={"a": 1}
        )
        context = span.context
        span.set("b", "c")
        span.fail(NotOwner("with a secret in it"))
        span.end()
        (told,) = found.spans()

    assert context is not None
    assert (context.trace_id, context.tracestate, context.sampled) == (PARENT.trace_id, "vendor=value", True)
    assert (told.parent.span_id, told.kind, len(told.links)) == (PARENT.span_id, trace.SpanKind.SERVER, LINKS_MAX)
    assert dict(told.attributes) == {"a": 1, "b": "c", "error.type": "not_owner"}
    assert told.status.description is None
    assert told.events == ()
    assert told.resource.attributes["service.name"] == "test"


def test_a_span_of_an_unrecorded_trace_is_not_recorded() -> None:
    with recorded() as found:
        span = found.tracing.span("x", SpanKind.SERVER, parent=UNRECORDED)
        assert span.context is None
        span.end()
        assert found.spans() == []


@pytest.mark.parametrize(("ratio", "starts"), [(0.0, False), (1.0, True)])
def test_the_ratio_decides_whether_a_new_trace_starts(ratio: float, starts: bool) -> None:
    with recorded(ratio) as found:
        assert found.tracing.starts() is starts


@pytest.mark.parametrize("sampled", [True, False])
def test_the_trace_of_the_application_decides_within_it(sampled: bool) -> None:
    provider = TracerProvider(shutdown_on_exit=False) if sampled else TracerProvider(ALWAYS_OFF, shutdown_on_exit=False)
    with recorded(0.0 if sampled else 1.0) as found, provider.get_tracer("app").start_as_current_span("app") as app:
        assert found.tracing.starts() is sampled
        found.tracing.span("x", SpanKind.PRODUCER).end()
        told = found.spans()
    assert len(told) == sampled
    if sampled:
        assert told[0].parent.span_id == app.get_span_context().span_id


def test_the_current_span_of_the_application_is_ours_within_a_span() -> None:
    with recorded() as found:
        span = found.tracing.span("x", SpanKind.CONSUMER)
        with span.current():
            inside = trace.get_current_span().get_span_context()
        span.end()
        assert span.context is not None
        assert inside.span_id == span.context.span_id
        assert not trace.get_current_span().get_span_context().is_valid
