"""What lasts is told at once, seldom, and when it is over."""

from __future__ import annotations

import itertools

from structlog.testing import capture_logs

from kera.core.base.clock import FakeClock
from kera.core.base.repeated import INTERVAL_S_MAX, INTERVAL_S_MIN, Repeated
from kera.core.base.telemetry import get_logger


def test_what_lasts_for_an_hour_is_told_at_once_and_then_at_growing_intervals() -> None:
    clock = FakeClock()
    with capture_logs() as lines:
        waiting = Repeated(get_logger("test"), clock)
        for _ in range(5 * 3600):
            waiting.goes_on("waiting", level="info", address="a:1")
            clock.advance(0.2)
        waiting.over("there it is", address="a:1")

    *told, last = lines
    times = [line.get("for_s", 0.0) for line in told]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert pauses == sorted(pauses)
    assert (round(pauses[0]), round(pauses[-1])) == (INTERVAL_S_MIN, INTERVAL_S_MAX)
    assert len(told) < 20
    assert {line["address"] for line in lines} == {"a:1"}
    assert (last["event"], last["after_s"]) == ("there it is", 3600.0)


def test_what_never_began_is_never_over_and_what_begins_again_is_told_at_once() -> None:
    clock = FakeClock()
    with capture_logs() as lines:
        waiting = Repeated(get_logger("test"), clock)
        waiting.over("there it is")
        for _ in range(2):
            waiting.goes_on("waiting")
            waiting.goes_on("waiting")
            waiting.over("there it is")
            waiting.over("there it is")

    assert [line["event"] for line in lines] == ["waiting", "there it is"] * 2
