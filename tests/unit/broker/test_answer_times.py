"""How long a backup takes to answer, as its broker sees it."""

from __future__ import annotations

import pytest

from kera.broker.replication.replicator import ANSWERS_S, AnswerTimes


def test_the_answer_time_is_the_mean_of_the_last_seconds() -> None:
    times = AnswerTimes()
    assert times.seconds(100.0) == 0.0
    for at_s, took_s in ((100.0, 0.2), (101.0, 0.4)):
        times.answered(times.sent(at_s), at_s + took_s)
    assert times.seconds(102.0) == pytest.approx(0.3)
    assert times.seconds(100.0 + ANSWERS_S + 1) == pytest.approx(0.3)
    times.answered(times.sent(107.0), 107.9)
    assert times.seconds(108.0) == pytest.approx(0.5)
    assert times.seconds(107.0 + 3 * ANSWERS_S) == 0.0


def test_a_pending_request_that_waits_longer_than_others_counts() -> None:
    times = AnswerTimes()
    first, second = times.sent(100.0), times.sent(100.5)
    assert times.seconds(103.0) == 3.0
    times.answered(second, 103.0)
    assert times.seconds(104.0) == 4.0
    times.answered(first, 104.0)
    assert times.seconds(104.0) == pytest.approx((2.5 + 4.0) / 2)


def test_requests_of_a_lost_connection_do_not_count() -> None:
    times = AnswerTimes()
    times.answered(times.sent(100.0), 101.0)
    late = times.sent(100.0)
    times.clear()
    times.answered(late, 103.0)
    assert times.seconds(103.0) == 0.0
