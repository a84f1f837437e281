"""Liveness: whether a member of a consumer group may deliver records."""

from kera.client.consuming.groups.liveness import Liveness
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.clock import FakeClock


def made(clock: FakeClock) -> Liveness:
    settings = GroupConsumerSettings(session_timeout_ms=10_000, progress_timeout_ms=60_000)
    return Liveness(["127.0.0.1:1"], settings, clock, consumer_group="app", member_id="m")


def test_a_member_is_in_doubt_after_the_session_timeout_until_an_answer_comes() -> None:
    clock = FakeClock()
    liveness = made(clock)
    doubts = []
    for seconds in (10, 1, 0):
        clock.advance(seconds)
        doubts.append(liveness.in_doubt)
        if doubts[-1]:
            liveness.answered(clock.boottime_s())
    assert doubts == [False, True, False]


def test_a_caller_that_worked_too_long_is_in_doubt_until_a_later_request_is_answered() -> None:
    clock = FakeClock()
    liveness = made(clock)
    liveness.caller_works()
    clock.advance(61)
    before_s = clock.boottime_s() - 0.1
    assert liveness.busy_ms == 61_000
    assert liveness.caller_waits()
    doubts = []
    for sent_s in (before_s, clock.boottime_s()):
        liveness.answered(sent_s)
        doubts.append(liveness.in_doubt)
    assert doubts == [True, False], "others may have got its groups since the first of them was sent"


def test_a_waiting_caller_is_not_busy() -> None:
    clock = FakeClock()
    liveness = made(clock)
    liveness.caller_works()
    assert liveness.busy_ms == 1
    assert not liveness.caller_waits()
    clock.advance(100)
    assert liveness.busy_ms == 0
    liveness.answered(clock.boottime_s())
    assert not liveness.caller_waits()
    assert not liveness.in_doubt


def test_the_time_at_work_does_not_include_waits() -> None:
    clock = FakeClock()
    liveness = made(clock)
    for worked_s, waited_s in ((2, 5), (3, 7)):
        liveness.caller_works()
        clock.advance(worked_s)
        liveness.caller_waits()
        clock.advance(waited_s)
        liveness.caller_waits()
    assert liveness.worked_s == 5
