"""W3C Trace Context: valid and invalid ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.tracing import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_context_has_its_trace_its_span_and_its_headers() -> None:
    found = TraceContext.parse(GOOD.encode(), b"vendor=value")
    assert found is not None
    assert (found.trace_id, found.span_id, found.sampled) == (int(TRACE, 16), int(SPAN, 16), True)
    assert found.headers == {"traceparent": GOOD.encode(), "tracestate": b"vendor=value"}
    assert TraceContext(GOOD).headers == {"traceparent": GOOD.encode()}


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)])
def test_the_flags_tell_whether_a_trace_is_recorded(flags: str, sampled: bool) -> None:
    found = TraceContext.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None
    assert found.sampled is sampled


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01 ",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 1000}",
        b"\xff" * 55,
        f"00_{TRACE}_{SPAN}_01",
    ],
)
def test_an_invalid_context_gives_none_without_an_error(text: str | bytes | None) -> None:
    assert TraceContext.parse(text, "a=b") is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-01-more") == TraceContext(GOOD)


@pytest.mark.parametrize("state", ["a" * 513, b"\x00", "ü", b"\xff", "a=b\n"])
def test_a_bad_tracestate_is_left_out(state: str | bytes) -> None:
    assert TraceContext.parse(GOOD, state) == TraceContext(GOOD)


@given(st.one_of(st.text(max_size=80), st.binary(max_size=80)), st.one_of(st.none(), st.text(), st.binary()))
def test_arbitrary_headers_raise_no_error(parent: str | bytes, state: str | bytes | None) -> None:
    found = TraceContext.parse(parent, state)
    assert found is None or TraceContext.parse(*found) == found
