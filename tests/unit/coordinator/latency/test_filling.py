"""Chunks that are full before they have waited for as long as they may."""

from __future__ import annotations

from kera.coordinator.latency.filling import ADVICE_S, USEFUL_US_MIN, Filling
from kera.coordinator.latency.splitting import UNLIMITED

CLICKS = "clicks"
WINDOW_S = 15.0
LATER_S = WINDOW_S
SETTLED_S = ADVICE_S + 1.1 * WINDOW_S
"""After it was granted first, or much more than before."""


def test_chunks_that_are_full_early_keep_twice_their_time() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == 12_000
    filling.grant(CLICKS, 12_000, LATER_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, 2 * LATER_S)
    assert filling.most_us(CLICKS) == 12_000  # as they are full early all the same
    filling.look(CLICKS, 11_000, 11_000, WINDOW_S, 3 * LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED
    assert filling.most_us("visits") == UNLIMITED


def test_what_was_closed_before_writers_knew_says_nothing() -> None:
    """The first chunk of a stream with a new constraint waits for nothing, as nobody has told its writer."""
    filling = Filling()
    filling.look(CLICKS, 20, 20, WINDOW_S, 0.0)
    filling.grant(CLICKS, 1_000_000, 1.0)
    filling.look(CLICKS, 20, 20, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED
    filling.grant(CLICKS, 1_000_000, LATER_S)  # the same again
    filling.look(CLICKS, 20, 20, WINDOW_S, 1.0 + SETTLED_S)
    assert filling.most_us(CLICKS) == USEFUL_US_MIN


def test_chunks_that_went_at_once_do_not_hide_those_that_fill_for_long() -> None:
    """Writers tell of what they closed before they knew, and of few chunks since: a window is without these later."""
    filling = Filling()
    for granted_us, granted_s in ((1_000_000_000, 0.0), (2_000_000_000, 100.0), (10_000_000_000, 200.0)):
        filling.grant(CLICKS, granted_us, granted_s)
        if granted_s != 100.0:
            filling.look(CLICKS, 20, 20, WINDOW_S, granted_s + SETTLED_S - 1)
            assert filling.most_us(CLICKS) == UNLIMITED
        filling.look(CLICKS, granted_us, granted_us, WINDOW_S, granted_s + SETTLED_S)
        assert filling.most_us(CLICKS) == UNLIMITED


def test_windows_may_be_shorter_than_it_takes_to_tell_all_writers() -> None:
    filling = Filling()
    filling.grant(CLICKS, 1_000_000, 0.0)
    filling.look(CLICKS, 20, 20, 1.0, ADVICE_S + 1)
    assert filling.most_us(CLICKS) == UNLIMITED
    filling.look(CLICKS, 20, 20, 1.0, ADVICE_S + 1.1)
    assert filling.most_us(CLICKS) == USEFUL_US_MIN
    filling.grant(CLICKS, 900_000, 10.0)
    filling.look(CLICKS, 800_000, 800_000, 1.0, 10.0 + ADVICE_S - 0.1)
    assert filling.most_us(CLICKS) == USEFUL_US_MIN
    filling.look(CLICKS, 800_000, 800_000, 1.0, 10.0 + ADVICE_S)
    assert filling.most_us(CLICKS) == UNLIMITED


def test_what_was_known_counts_until_more_is() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    filling.grant(CLICKS, 12_000, LATER_S)
    filling.look(CLICKS, 12_000, 12_000, WINDOW_S, LATER_S + 1.0)
    assert filling.most_us(CLICKS) == 12_000


def test_of_streams_without_a_constraint_nothing_is_kept() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == 12_000
    filling.keep(["visits"])
    assert filling.most_us(CLICKS) == UNLIMITED
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, 2 * LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED


def test_a_few_that_are_late_of_many_that_are_full_early_get_more_time_and_not_all() -> None:
    """What hand-over and replication may wait is not taken from them because a machine was busy for a moment."""
    filling = Filling()
    filling.grant(CLICKS, 20_000, 0.0)
    filling.look(CLICKS, 9_000, 16_000, WINDOW_S, SETTLED_S)
    assert filling.most_us(CLICKS) == 32_000
    filling.look(CLICKS, 11_000, 16_000, WINDOW_S, 2 * SETTLED_S)
    assert filling.most_us(CLICKS) == UNLIMITED
