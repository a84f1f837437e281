"""Log lines about latency constraints that are not held."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kera.coordinator.latency.budgets import Verdict
from kera.coordinator.latency.news import EVERY_S, HANDFUL, News
from kera.v1 import latency_pb2 as messages
from tests.unit.coordinator.latency.support import World

HELD, VIOLATED, BROKEN, UNKNOWN = (
    Verdict(messages.LatencyState.Value(f"LATENCY_STATE_{name}"), reason=name.lower())
    for name in ("HELD", "VIOLATED", "BROKEN", "UNKNOWN")
)


@pytest.fixture
def news() -> News:
    return News()


def told(news: News, now_s: float, **seen: Verdict) -> list[dict[str, Any]]:
    for name, verdict in seen.items():
        news.saw(name, verdict)
    with capture_logs() as lines:
        news.tell(now_s)
    return [{key: value for key, value in line.items() if key != "log_level"} for line in lines]


def test_a_lost_constraint_is_logged_once_and_once_more_when_it_is_held_again(news: News) -> None:
    lost = {"event": "latency constraint is not held", "constraint": "a"}
    assert told(news, 0, a=VIOLATED) == [{**lost, "reason": "violated"}]
    assert told(news, 10, a=VIOLATED) == []
    assert told(news, 20, a=UNKNOWN) == []
    assert told(news, 30, a=BROKEN) == [{**lost, "reason": "broken"}]
    assert told(news, 40, a=HELD) == [{"event": "latency constraint is held again", "constraint": "a"}]
    assert told(news, 50, a=HELD, b=UNKNOWN) == []


def test_a_thousand_lost_constraints_are_logged_in_one_line_with_the_first_names(news: News) -> None:
    names = [f"c{number:04}" for number in range(1_000)]
    (line,) = told(news, 0, **dict.fromkeys(names, VIOLATED))
    assert line == {
        "event": "latency constraints are not held",
        "count": 1_000,
        "first": dict.fromkeys(names[:HANDFUL], "violated"),
    }
    assert news.not_held == 1_000
    (line,) = told(news, 10, **dict.fromkeys(names, HELD))
    assert line == {"event": "latency constraints are held again", "count": 1_000, "first": names[:HANDFUL]}
    assert news.not_held == 0


def test_constraints_lost_soon_after_another_are_logged_together(news: News) -> None:
    """Windows of constraints end at different times."""
    assert len(told(news, 0, a=VIOLATED)) == 1
    for number in range(20):
        assert told(news, EVERY_S * number / 20, **{f"c{number}": VIOLATED}) == []
    (line,) = told(news, EVERY_S)
    assert line["count"] == 20


def test_a_violation_that_ends_before_its_log_line_is_not_logged(news: News) -> None:
    assert len(told(news, 0, a=VIOLATED)) == 1
    assert told(news, 1, b=VIOLATED, a=HELD) == []
    assert told(news, 2, b=HELD, a=VIOLATED) == []
    assert told(news, EVERY_S) == []
    told(news, 2 * EVERY_S, b=VIOLATED, a=HELD)
    news.saw("c", VIOLATED)
    news.forget("c")
    news.forget("b")
    assert (told(news, 9 * EVERY_S), news.not_held) == ([], 0)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([HELD, VIOLATED, BROKEN, UNKNOWN, None]))))
def test_the_log_finally_names_every_constraint_that_is_not_held(steps: list[tuple[str, Verdict | None]]) -> None:
    news, known, last, now_s = News(), dict[str, bool](), dict[str, Verdict](), 0.0
    with capture_logs() as lines:
        for name, verdict in steps:
            now_s += 1
            if verdict is None:
                news.forget(name)
                known.pop(name, None)
                last.pop(name, None)
            else:
                news.saw(name, verdict)
                last[name] = verdict
                if verdict is not UNKNOWN:
                    known[name] = verdict is HELD
            news.tell(now_s)
        news.tell(now_s + EVERY_S)
    assert news.not_held == sum(each in (VIOLATED, BROKEN) for each in last.values())
    seen = {line["constraint"]: line["event"] for line in lines if "constraint" in line}
    if all("constraint" in line for line in lines):
        for name, held in known.items():
            if not held:
                assert seen[name] == "latency constraint is not held"


async def test_many_constraints_lost_at_once_are_one_line_in_the_coordinators_log(world: World) -> None:
    for number in range(16):
        await world.create(f"c{number:02}", window_ms=1_000 + number)
    await world.window()
    with capture_logs() as lines:
        await world.window(work=900_000)
    lost = [line for line in lines if line["event"].startswith("latency constraint")]
    assert [(line["event"], line["count"]) for line in lost] == [("latency constraints are not held", 16)]
