"""Whether a member of a consumer group may deliver."""

from kera.client.consuming.groups.liveness import Liveness
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.clock import FakeClock


def made(clock: FakeClock) -> Liveness:
    settings = GroupConsumerSettings(session_timeout_ms=10_000, progress_timeout_ms=60_000)
    return Liveness(["127.0.0.1:1"], settings, clock, consumer_group="app", member_id="m")


def test_who_has_not_been_heard_of_for_the_session_timeout_is_in_doubt_until_there_is_an_answer() -> None:
    clock = FakeClock()
    liveness = made(clock)
    doubts = []
    for seconds in (10, 1, 0):
        clock.advance(seconds)
        doubts.append(liveness.in_doubt)
        if doubts[-1]:
            liveness.answered(clock.boottime_s())
    assert doubts == [False, True, False]


def test_who_comes_back_too_late_is_in_doubt_until_what_was_sent_since_is_answered() -> None:
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


def test_who_waits_is_not_busy_however_long_that_takes() -> None:
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
