"""Chunks that are full before their granted time is over."""

from __future__ import annotations

from kera.coordinator.latency.filling import ADVICE_S, USEFUL_US_MIN, Filling
from kera.coordinator.latency.splitting import UNLIMITED

CLICKS = "clicks"
WINDOW_S = 15.0
LATER_S = WINDOW_S
SETTLED_S = ADVICE_S + 1.1 * WINDOW_S
"""The time after a first or a much larger grant until measurements count."""


def test_chunks_that_fill_early_keep_twice_their_fill_time() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == 12_000
    filling.grant(CLICKS, 12_000, LATER_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, 2 * LATER_S)
    assert filling.most_us(CLICKS) == 12_000  # they still fill early
    filling.look(CLICKS, 11_000, 11_000, WINDOW_S, 3 * LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED
    assert filling.most_us("visits") == UNLIMITED


def test_chunks_closed_before_writers_got_the_advice_do_not_count() -> None:
    """The first chunk of a stream with a new constraint does not wait, as its writer has no advice yet."""
    filling = Filling()
    filling.look(CLICKS, 20, 20, WINDOW_S, 0.0)
    filling.grant(CLICKS, 1_000_000, 1.0)
    filling.look(CLICKS, 20, 20, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED
    filling.grant(CLICKS, 1_000_000, LATER_S)  # the same grant again
    filling.look(CLICKS, 20, 20, WINDOW_S, 1.0 + SETTLED_S)
    assert filling.most_us(CLICKS) == USEFUL_US_MIN


def test_early_chunks_do_not_hide_later_chunks_that_take_long_to_fill() -> None:
    """Early reports contain mostly chunks from before the advice; only later windows are free of them."""
    filling = Filling()
    for granted_us, granted_s in ((1_000_000_000, 0.0), (2_000_000_000, 100.0), (10_000_000_000, 200.0)):
        filling.grant(CLICKS, granted_us, granted_s)
        if granted_s != 100.0:
            filling.look(CLICKS, 20, 20, WINDOW_S, granted_s + SETTLED_S - 1)
            assert filling.most_us(CLICKS) == UNLIMITED
        filling.look(CLICKS, granted_us, granted_us, WINDOW_S, granted_s + SETTLED_S)
        assert filling.most_us(CLICKS) == UNLIMITED


def test_a_window_can_be_shorter_than_the_time_until_all_writers_have_the_advice() -> None:
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


def test_the_known_fill_time_counts_until_the_next_measurement() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    filling.grant(CLICKS, 12_000, LATER_S)
    filling.look(CLICKS, 12_000, 12_000, WINDOW_S, LATER_S + 1.0)
    assert filling.most_us(CLICKS) == 12_000


def test_the_fill_time_of_a_stream_without_a_constraint_is_forgotten() -> None:
    filling = Filling()
    filling.grant(CLICKS, 100_000, LATER_S - SETTLED_S)
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, LATER_S)
    assert filling.most_us(CLICKS) == 12_000
    filling.keep(["visits"])
    assert filling.most_us(CLICKS) == UNLIMITED
    filling.look(CLICKS, 6_000, 6_000, WINDOW_S, 2 * LATER_S)
    assert filling.most_us(CLICKS) == UNLIMITED


def test_a_few_late_chunks_among_early_ones_raise_the_time_but_not_to_unlimited() -> None:
    """Hand-over and replication do not lose their waiting time because a machine was busy for a moment."""
    filling = Filling()
    filling.grant(CLICKS, 20_000, 0.0)
    filling.look(CLICKS, 9_000, 16_000, WINDOW_S, SETTLED_S)
    assert filling.most_us(CLICKS) == 32_000
    filling.look(CLICKS, 11_000, 16_000, WINDOW_S, 2 * SETTLED_S)
    assert filling.most_us(CLICKS) == UNLIMITED
