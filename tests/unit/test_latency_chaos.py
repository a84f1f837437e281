"""The measured truth of `tests.chaos.latency`, and its verdicts on wrong figures."""

from dataclasses import asdict

import pytest

from tests.chaos.latency_client import SLOT_S, Slot
from tests.chaos.latency_truth import PASSAGES, Look, Looks, Truth, compared, settled

LIMIT_US = 300_000
WINDOW_S = 5.0
AT_S = 100.0


def truth(path_us: int = 260_000, lag_us: int = 0, seconds: float = 40.0, until_s: float = AT_S + 20) -> Truth:
    """Chunks that take `path_us`, half of it in each of two streams; and a loop that is `lag_us` late once a slot."""
    found = Truth()
    for number in range(round((until_s - seconds) / SLOT_S), round(until_s / SLOT_S)):
        slot = Slot(number, runs=4, runs_us=2 * path_us, chunks=2, chunks_us=path_us, lags_us=[lag_us])
        found.add("worker", asdict(slot))
        found.add("writer", asdict(Slot(number, sent=10, acknowledged=10, lags_us=[lag_us // 2])))
    return found


def look(after_s: float, mean_us: int = 260_000, state: str = "held") -> Look:
    return Look(AT_S + after_s, state, mean_us, "why", round_trip_us=3_000, measured=9)


def test_a_slot_reported_twice_counts_once_and_totals_stay() -> None:
    found = truth()
    found.add("writer", asdict(Slot(round(AT_S / SLOT_S), sent=99)))
    assert found.totals["writer"].sent == 10 * 40 / SLOT_S
    told = found.over(AT_S, AT_S + WINDOW_S)
    assert (told.path_us, told.runs, told.records) == (260_000, 80, 0)
    assert found.known_until_s() == AT_S + 20


@pytest.mark.parametrize(("after_s", "in_time"), [(9.9, True), (10.1, False)])
def test_a_constraint_must_be_held_within_the_given_time(after_s: float, in_time: bool) -> None:
    looks = [look(0.5), look(after_s, 400_000, "violated"), look(14.0)]
    found = settled(looks, truth(), AT_S, 10.0, LIMIT_US, WINDOW_S)
    assert found.in_time == in_time
    assert found.held_after_s == pytest.approx(after_s + SLOT_S)


def test_a_held_state_with_a_mean_above_the_limit_does_not_count() -> None:
    assert not settled([look(11.0, 301_000)], truth(), AT_S, 10.0, LIMIT_US, WINDOW_S).in_time


@pytest.mark.parametrize(("beyond_us", "in_time"), [(0.9, True), (1.1, False)])
def test_a_busy_machine_excuses_only_the_delay_that_it_explains(beyond_us: float, in_time: bool) -> None:
    """A lag of 10 ms once in 250 ms: a random arrival waits for 0.2 ms on average."""
    busy = truth(lag_us=10_000)
    explained_us = PASSAGES * 200
    assert busy.explained_us(AT_S + 11, WINDOW_S) == pytest.approx(explained_us)
    late = look(11.0, LIMIT_US + round(explained_us * beyond_us), "violated")
    found = settled([late], busy, AT_S, 10.0, LIMIT_US, WINDOW_S)
    assert (found.in_time, found.busy) == (in_time, int(in_time))


def test_a_pause_counts_once_per_client() -> None:
    """Both clients lag 200 ms once in 250 ms: a record that waits often for a processor still waits no longer."""
    assert truth(lag_us=200_000).explained_us(AT_S + 11, WINDOW_S) == 2 * 200_000


def test_a_busy_machine_does_not_excuse_missing_measurements() -> None:
    nothing = look(11.0, 0, "unknown")._replace(measured=0)
    assert not settled([nothing], truth(lag_us=100_000), AT_S, 10.0, LIMIT_US, WINDOW_S).in_time


@pytest.mark.parametrize(("mean_us", "wrong"), [(265_500, 0), (254_500, 0), (265_700, 1), (254_300, 1)])
def test_figures_may_be_off_by_at_most_a_round_trip(mean_us: int, wrong: int) -> None:
    """Another hundredth is allowed, because chunks are weighted."""
    found = compared([look(1.0, mean_us)], truth(), WINDOW_S)
    assert (found.looks, len(found.wrong)) == (1, wrong)
    assert found.off_us == pytest.approx(abs(mean_us - 260_000))


def test_figures_may_be_as_old_as_a_description_can_be() -> None:
    """Two seconds ago records began to take twice as long: a description may know nothing or all of that."""
    found = truth(until_s=AT_S)
    for number in range(round(AT_S / SLOT_S), round((AT_S + 2) / SLOT_S)):
        found.add("worker", asdict(Slot(number, runs=4, runs_us=1_040_000, chunks=2, chunks_us=520_000)))
    low_us, high_us = found.band_us(AT_S + 2, WINDOW_S)
    assert low_us == 260_000
    assert 260_000 * 1.4 <= high_us <= 260_000 * 1.5


def test_quantiles_of_lags_come_from_the_worst_client() -> None:
    found = truth(lag_us=8_000)
    assert found.lags_ms(AT_S, AT_S + 1) == [8.0, 8.0, 8.0]


def test_only_the_latest_looks_are_kept() -> None:
    looks = Looks()
    assert looks.last is None
    for number in range(1_000):
        looks.add(look(number * SLOT_S))
    assert len(looks.within(AT_S, AT_S + 1_000 * SLOT_S)) == 480
