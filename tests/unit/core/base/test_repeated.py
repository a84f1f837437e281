"""A lasting or recurring problem is logged at once, then seldom, and when it is over."""

from __future__ import annotations

from structlog.testing import capture_logs

from kera.core.base.clock import FakeClock
from kera.core.base.repeated import INTERVAL_S, Repeated
from kera.core.base.telemetry import get_logger


def test_a_lasting_problem_is_logged_at_once_then_once_a_minute_and_when_it_is_over() -> None:
    clock = FakeClock()
    with capture_logs() as lines:
        failing = Repeated(get_logger("test"), clock)
        for _ in range(10 * 180):
            failing.goes_on("failing", level="error", path="p")
            clock.advance(0.1)
        failing.over("works again", path="p")
        failing.over("works again", path="p")

    assert [line["event"] for line in lines] == ["failing"] * 3 + ["works again"]
    assert [(line.get("times"), line.get("for_s")) for line in lines[:3]] == [(None, None), (600, 60.0), (600, 120.0)]
    assert lines[3]["after_s"] == 180.0
    assert {(line["path"], line["log_level"]) for line in lines[:3]} == {("p", "error")}


def test_a_recurring_problem_is_logged_once_a_minute_with_a_count() -> None:
    clock = FakeClock()
    with capture_logs() as lines:
        failing = Repeated(get_logger("test"), clock)
        for _ in range(3 * int(INTERVAL_S)):
            failing.goes_on("failing")
            failing.over("works again")
            clock.advance(1.0)

    assert [line["event"] for line in lines] == ["failing", "works again"] * 3
    assert [line.get("times") for line in lines if line["event"] == "failing"] == [None, 60, 60]


def test_a_problem_that_never_began_is_not_logged_as_over() -> None:
    with capture_logs() as lines:
        Repeated(get_logger("test"), FakeClock()).over("works again")
    assert lines == []
