"""The pace of a query with a latency target, against a simulation of a query with a known cost of micro-batches."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.base.ids import Position
from kera.spark_connector.planning.offsets import EntryName, EntryOffset
from kera.spark_connector.planning.pacing import (
    ALIKE,
    ENOUGH,
    FIRST_BYTES,
    HOLD_S,
    MARKS_MAX,
    Arrivals,
    Fit,
    MicroBatch,
    Pacer,
    Pause,
    Starts,
    pause,
)

MIB = 1 << 20
ENTRY = EntryName("numbers", 0, 0)
OTHER = EntryName("numbers", 1, 0)


def at(record: int) -> EntryOffset:
    return EntryOffset(Position(1, 1, 64 * record), record)


# --- the cost of micro-batches ------------------------------------------------------------------------------


def many(fixed_s: float, per_mib_s: float, *sizes_mib: float) -> list[MicroBatch]:
    """Enough micro-batches that the fit adds no margin for too few of them."""
    return line(fixed_s, per_mib_s, *sizes_mib) * 20


def line(fixed_s: float, per_mib_s: float, *sizes_mib: float) -> list[MicroBatch]:
    return [MicroBatch(int(size * MIB), fixed_s + per_mib_s * size) for size in sizes_mib]


def fitted(seen: list[MicroBatch]) -> Fit:
    starts = Starts()
    for one in seen:
        starts.done(one)
    return Fit.of(seen, starts.bytes)


def test_fixed_time_and_time_per_byte_are_distinguished() -> None:
    fit = fitted(many(0.3, 0.01, 1, 5, 20, 60))

    assert fit.fixed_s == pytest.approx(0.3)
    assert fit.per_byte_s * MIB == pytest.approx(0.01)
    assert fit.told_apart
    assert fit.bytes_within(0.8) / MIB == pytest.approx(50, rel=0.05)
    assert fit.bytes_within(0.2) == 0


def test_a_slow_outlier_does_not_change_the_fitted_cost() -> None:
    seen = [*line(0.3, 0.01, *range(1, 40, 3)), MicroBatch(2 * MIB, 9.0), *line(0.3, 0.01, *range(2, 40, 3))]
    fit = fitted(seen)

    assert fit.seconds(20 * MIB) == pytest.approx(0.5, rel=0.1)


def test_small_micro_batches_during_a_slowdown_do_not_inflate_the_fixed_cost() -> None:
    fast, slow = [MicroBatch(40 * MIB, 1.0)] * 10, [MicroBatch(40 * MIB, 2.0), *[MicroBatch(20 * MIB, 1.1)] * 10]
    fit = fitted([*line(0.2, 0.02, 5, 10, 20), *fast, *slow])

    assert fit.fixed_s <= 0.5
    assert fit.seconds(40 * MIB) >= 1.8


def test_sizes_beyond_the_largest_one_are_predicted_in_proportion() -> None:
    fit = fitted(many(0.5, 0.01, 1, 10, 50))

    assert fit.seconds(100 * MIB) == pytest.approx(2.0, rel=0.05)
    assert fit.bytes_within(2.0) == pytest.approx(100 * MIB, rel=0.05)


def test_similar_sizes_do_not_tell_the_fixed_cost_from_the_cost_of_a_byte() -> None:
    fit = fitted([MicroBatch(10 * MIB, 0.6), MicroBatch(11 * MIB, 0.5), MicroBatch(10 * MIB, 0.4)])

    assert not fit.told_apart
    assert fit.seconds(1) == pytest.approx(0.5, rel=0.3)  # not less than the measurements
    assert fit.bytes_within(fit.seconds(11 * MIB) / 11) == pytest.approx(MIB, rel=0.01)


def test_predictions_grow_after_one_slow_micro_batch_and_stay_up_only_after_several() -> None:
    steady = line(0.3, 0.01, *([5, 20] * 8))
    slower = [MicroBatch(size, 2 * seconds) for size, seconds in line(0.3, 0.01, 5, 20)]

    assert fitted([*steady, slower[0]]).seconds(5 * MIB) == pytest.approx(0.7, rel=0.05)
    assert fitted([*steady, slower[0], steady[0]]).seconds(5 * MIB) == pytest.approx(0.35, rel=0.06)
    assert fitted([*steady, *slower, *steady[:8]]).seconds(5 * MIB) == pytest.approx(0.7, rel=0.05)


batches = st.lists(st.builds(MicroBatch, st.integers(1, 1 << 40), st.floats(0, 1e5)), min_size=1, max_size=40)


@given(batches, st.integers(1, 1 << 41), st.integers(1, 1 << 41))
def test_a_larger_micro_batch_is_never_predicted_to_be_faster(seen: list[MicroBatch], one: int, other: int) -> None:
    fit = fitted(seen)

    assert fit.fixed_s >= 0
    assert fit.per_byte_s >= 0
    assert fit.seconds(min(one, other)) <= fit.seconds(max(one, other)) * (1 + 1e-9)
    assert math.isfinite(fit.seconds(one))


@given(batches, st.floats(1e-3, 1e4))
def test_the_bytes_that_fit_into_a_time_are_predicted_to_take_no_longer(seen: list[MicroBatch], seconds: float) -> None:
    fit = fitted(seen)
    room = fit.bytes_within(seconds)

    assert 0 <= room <= 1 << 60
    if fit.told_apart and room:
        assert fit.seconds(room) <= seconds * 1.001 + 1e-6


# --- time and size of the next micro-batch ------------------------------------------------------------------


def pacer(target_s: float, *seen: MicroBatch) -> Pacer:
    found = Pacer(target_s)
    for one in (MicroBatch(1, 5.0), *seen):
        found.done(*one)
    return found


def test_the_first_micro_batch_begins_at_once_and_is_small() -> None:
    pace = Pacer(2.0).decide(1 << 40, 0.0)

    assert pace == (pace.__class__(0.0, FIRST_BYTES, None))


def test_the_first_micro_batch_counts_only_until_another_is_known() -> None:
    found = Pacer(2.0)
    found.done(FIRST_BYTES, 6.0)
    assert found.bytes_max == pytest.approx(FIRST_BYTES * 1.8 / 6 / 1.2, rel=0.01)
    found.done(MIB, 0.3)

    assert found.bytes_max == pytest.approx(6 * MIB / 1.2, rel=0.01)


def test_a_backlog_waits_until_it_would_be_late() -> None:
    found = pacer(2.0, *many(0.3, 0.01, 1, 5, 20, 60))

    assert found.decide(10 * MIB, 0.0).wait_s == pytest.approx(1.8 - 0.4, rel=0.03)
    assert found.decide(10 * MIB, 1.3).wait_s == pytest.approx(0.1, abs=0.02)
    assert found.decide(10 * MIB, 1.5).wait_s == 0
    assert found.decide(10 * MIB, math.inf).wait_s == 0


def test_some_full_micro_batches_are_halved_to_learn_the_cost_of_a_start() -> None:
    found, sizes = pacer(2.0, *line(0.1, 0.01, 1, 5, 20, 60)), []
    for _ in range(4 * ALIKE):
        sizes.append(found.bytes_max)
        found.done(sizes[-1], 0.3 + 0.03 * sizes[-1] / MIB)  # slower than before

    assert sum(size < 0.6 * before for before, size in pairwise(sizes[4:])) in range(2, 4)
    assert found.fit is not None
    assert found.fit.fixed_s == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_fixed_cost_near_the_target_does_not_keep_micro_batches_small(chunks: int) -> None:
    """Otherwise a query keeps its small first size, as it has measured no other."""
    paced = Simulation(rate(0.1, 10_000), 1.5, 0.02, target_s=2.0, chunk_mib=0.5 * chunks).run(60)

    assert paced.taken / MIB * 0.02 >= 0.6 * paced.now_s


def test_a_tiny_micro_batch_is_predicted_to_take_as_long_as_the_fastest_one() -> None:
    """While Spark warms up, later small micro-batches are faster, as if a start cost nothing."""
    found = pacer(2.0, *[MicroBatch(size, size * 2e-4) for size in (4000, 3900, 2400, 2500, 1300, 1400)])
    assert found.fit is not None
    assert found.fit.fixed_s < 0.05

    assert found.decide(10, 0.0).wait_s == pytest.approx(1.8 - 0.26)
    assert found.least_s(0.0) == pytest.approx(0.26 / 0.9)


def test_a_backlog_that_fills_a_micro_batch_does_not_wait() -> None:
    found = pacer(2.0, *many(0.3, 0.01, 1, 5, 20, 200))
    pace = found.decide(500 * MIB, 0.0)

    assert pace.wait_s == 0
    assert pace.bytes_max == pytest.approx(150 * MIB, rel=0.05)
    assert pace.predicted_s == pytest.approx(1.8, rel=0.02)


@pytest.mark.parametrize(
    ("fixed_s", "longest_s"),
    [(0.0, 0.36), (0.1, 0.7), (0.4, 0.9), (0.45, 0.9), (0.6, 8 * 0.6 - 3 * 0.9), (0.9, 4.5), (1.5, 7.5)],
)
def test_a_full_micro_batch_grows_with_its_fixed_cost_and_more_when_the_target_cannot_be_kept(
    fixed_s: float, longest_s: float
) -> None:
    found = pacer(1.0, *many(fixed_s, 0.01, 1, 5, 20, 800))

    assert fixed_s + 0.01 * found.bytes_max / MIB == pytest.approx(longest_s, rel=0.03)


def test_a_target_that_cannot_be_kept_does_not_slow_a_query_down() -> None:
    paced = Simulation(rate(0.1, 10_000), 1.5, 0.02, noise=0.05, target_s=1.0).run(100)

    assert paced.taken / MIB * 0.02 >= 0.7 * paced.now_s


@pytest.mark.parametrize("nonsense", [(0, 1.0), (-1, 1.0), (5, -1.0), (5, math.nan), (5, math.inf)])
def test_impossible_measurements_are_ignored(nonsense: tuple[int, float]) -> None:
    found = Pacer(1.0)
    found.done(*nonsense)

    assert found.fit is None


def test_the_shortest_possible_target_is_known_after_some_micro_batches() -> None:
    assert pacer(2.0, *line(0.3, 0.01, *range(1, ENOUGH))).least_s(0.06) is None
    assert pacer(2.0, *line(0.3, 0.01, 1, 5, 20, 40, 80)).least_s(0.06) == pytest.approx(0.41, rel=0.01)
    assert pacer(2.0, *[MicroBatch(MIB, 0.45 + n / 10) for n in range(5)]).least_s(0.0) == pytest.approx(0.5)


def test_a_growing_backlog_enlarges_micro_batches_before_the_query_counts_as_behind() -> None:
    found = pacer(2.0, *many(0.1, 0.01, 1, 5, 20, 200))
    worth = found.bytes_max
    sizes, behind = [], []
    for waiting, taken in [*((100 + n, 50) for n in range(10)), (100, 50), (40, 40), (100, 50)]:
        found.began(waiting, taken)
        sizes.append(found.bytes_max > worth)
        behind.append(found.falls_behind)

    assert sizes == [*[False] * 4, *[True] * 7, False, False]
    assert behind == [*[False] * 9, True, True, False, False]
    found = pacer(2.0, *many(0.1, 0.01, 1, 5, 20, 200))
    for _ in range(5):
        found.began(100, 50)
    assert found.bytes_max == worth


# --- pauses before the next question ------------------------------------------------------------------------


def test_a_query_that_asks_again_at_once_is_held_back_for_a_moment() -> None:
    assert pause(1.0, 0.01) == Pause(HOLD_S, again=False)
    assert pause(HOLD_S + 0.005, 0.01) == Pause(HOLD_S + 0.005, again=True)
    assert pause(0.0, 0.01) is None


def test_a_micro_batch_begins_now_when_the_next_trigger_would_be_too_late() -> None:
    assert pause(1.5, 1.0) == Pause(0.0, again=False)
    assert pause(0.9, 1.0) is None
    assert pause(1.2, 1.0, 0.3) is None


def test_a_slow_look_at_the_cluster_begins_sooner() -> None:
    found = pause(0.15, 0.01, 0.1)

    assert found is not None
    assert found.again
    assert found.sleep_s == pytest.approx(0.05)
    assert pause(0.1, 0.01, 0.1) is None


# --- the age of a backlog -----------------------------------------------------------------------------------


def test_records_at_the_first_look_may_have_any_age() -> None:
    arrivals = Arrivals()
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(9)}, 100.0)

    assert arrivals.oldest_s({ENTRY: at(0)}, 100.0) == math.inf


def test_a_record_is_no_older_than_the_last_look_without_it() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 100.0)
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(9)}, 101.0)
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(20)}, 102.0)

    assert arrivals.oldest_s({ENTRY: at(0)}, 102.5) == 2.5
    arrivals.look({ENTRY: at(9)}, {ENTRY: at(20)}, 103.0)
    assert arrivals.oldest_s({ENTRY: at(9)}, 103.0) == 2.0


def test_the_creation_time_of_one_record_corrects_the_age_of_the_others() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 100.0)
    starts = {ENTRY: at(0), OTHER: at(0)}
    arrivals.look(starts, {ENTRY: at(9), OTHER: at(1)}, 100.1)
    assert arrivals.unknown(starts, 1) == [ENTRY]
    arrivals.created({ENTRY: 99.7}, starts)

    assert arrivals.unknown(starts, 1) == []
    assert arrivals.oldest_s(starts, 100.1) == pytest.approx(0.4)
    assert arrivals.on_the_way_s == pytest.approx(0.4)
    assert arrivals.oldest_s({OTHER: at(0), ENTRY: at(9)}, 100.1) == pytest.approx(0.4)


def test_a_record_from_the_future_is_aged_from_when_it_was_seen() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 100.0)
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(9)}, 100.1)
    arrivals.created({ENTRY: 5000.0}, {ENTRY: at(0)})

    assert arrivals.oldest_s({ENTRY: at(0)}, 100.6) == pytest.approx(0.5)
    assert arrivals.on_the_way_s == 0


def test_a_creation_time_long_before_the_arrival_is_not_used_as_age() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 100.0)
    starts = {ENTRY: at(0), OTHER: at(0)}
    arrivals.look(starts, {ENTRY: at(9), OTHER: at(9)}, 100.1)

    assert arrivals.created({ENTRY: -7100.0}, starts, 2.0) == pytest.approx(7200.0)
    assert arrivals.oldest_s(starts, 100.6) == pytest.approx(0.6)
    assert arrivals.on_the_way_s == 0
    assert arrivals.created({ENTRY: 99.0}, starts, 2.0) == 0
    assert arrivals.oldest_s({ENTRY: at(0), OTHER: at(9)}, 100.6) == pytest.approx(1.6)


def test_an_entry_whose_head_goes_back_is_observed_anew() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 100.0)
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(9)}, 101.0)
    arrivals.look({ENTRY: at(0)}, {ENTRY: at(3)}, 102.0)

    assert arrivals.oldest_s({ENTRY: at(0)}, 102.0) == 1.0


def test_many_looks_use_bounded_memory_and_make_no_record_seem_younger() -> None:
    arrivals = Arrivals()
    arrivals.look({}, {}, 0.0)
    for number in range(1, 10 * MARKS_MAX):
        arrivals.look({ENTRY: at(0)}, {ENTRY: at(number)}, float(number))

    assert arrivals.oldest_s({ENTRY: at(0)}, 1000.0) == 1000.0
    assert len(arrivals._entries[ENTRY].marks) == MARKS_MAX


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=100))
def test_a_record_never_seems_younger_than_it_is(steps: list[tuple[int, int]]) -> None:
    """A model remembers the arrival of each record."""
    arrivals, came, taken = Arrivals(), [], 0
    arrivals.look({}, {}, 0.0)
    for number, (more, fewer) in enumerate(steps, 1):
        came += [number - 0.5] * more
        waits = {ENTRY: at(taken)} if taken < len(came) else {}
        arrivals.look(waits, dict.fromkeys(waits, at(len(came))), float(number))
        if waits:
            true_s = number - came[taken]
            found_s = arrivals.oldest_s(waits, float(number))
            assert found_s >= true_s
            if number < MARKS_MAX:
                assert found_s <= true_s + 1
        taken = min(taken + fewer, len(came))


# --- simulated queries --------------------------------------------------------------------------------------


@dataclass
class Simulation:
    """A query of one entry that Spark runs as soon as it can; `bytes_by` gives the bytes that arrived by a time."""

    bytes_by: Callable[[float], float]
    fixed_s: float
    per_mib_s: float
    noise: float = 0.0
    target_s: float | None = None
    chunk_mib: float = 0.0
    """The least size of a micro-batch."""
    others: Callable[[float, random.Random], float] | None = None
    """The factor by which other load slows down a micro-batch that begins now."""
    trigger_s: float = 0.0
    seed: int = 0
    now_s: float = 0.0
    taken: float = 0.0
    durations_s: list[float] = field(default_factory=list)
    latest_s: list[float] = field(default_factory=list)
    """The age of the oldest record of each micro-batch at its end."""
    sizes: list[float] = field(default_factory=list)
    questions: int = 0

    def run(self, until_s: float) -> "Simulation":
        pace = None if self.target_s is None else Pacer(self.target_s)
        drawn, arrivals = random.Random(self.seed), Arrivals()
        recall_s = 0.01
        while self.now_s < until_s:
            self.questions += 1
            size = self._asked(pace, arrivals, recall_s)
            begun_s = self.now_s
            if size:
                oldest_s = self._come_at(self.taken)
                slowed = self.others(self.now_s, drawn) if self.others else 1 + drawn.uniform(-1, 1) * self.noise
                self.now_s += (self.fixed_s + self.per_mib_s * size / MIB) * slowed
                self.taken += size
                self.durations_s.append(self.now_s - begun_s)
                self.latest_s.append(self.now_s - oldest_s)
                self.sizes.append(size)
                if pace is not None:
                    pace.done(int(size), self.now_s - begun_s)
            else:
                self.now_s += 0.01
            if self.trigger_s:
                self.now_s = math.ceil(self.now_s / self.trigger_s) * self.trigger_s
            if not size:
                recall_s = self.now_s - begun_s
        return self

    def _asked(self, pace: Pacer | None, arrivals: Arrivals, recall_s: float) -> float:
        while True:
            waiting = self.bytes_by(self.now_s) - self.taken
            if pace is None or waiting < 1:
                arrivals.look({}, {}, self.now_s)
                return waiting if waiting >= 1 else 0
            starts, heads = {ENTRY: at(int(self.taken))}, {ENTRY: at(int(self.taken + waiting))}
            arrivals.look(starts, heads, self.now_s)
            found = pace.decide(int(waiting), arrivals.oldest_s(starts, self.now_s))
            held = pause(found.wait_s, recall_s)
            if held is None:
                size = min(waiting, max(found.bytes_max, self.chunk_mib * MIB))
                pace.began(int(waiting), int(size))
                return size
            self.now_s += held.sleep_s
            if not held.again:
                return 0

    def _come_at(self, place: float) -> float:
        low, high = 0.0, self.now_s
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.bytes_by(middle) > place else (middle, high)
        return high


def rate(mib_a_second: float, backlog_mib: float = 0.0) -> Callable[[float], float]:
    return lambda now_s: (backlog_mib + mib_a_second * now_s) * MIB


queries = {
    "fixed_s": st.floats(0.05, 0.4),
    "per_mib_s": st.floats(0.002, 0.05),
    "noise": st.floats(0, 0.1),
    "seed": st.integers(0, 99),
}


@given(**queries)
def test_a_backlog_is_read_within_the_target_and_nearly_as_fast_as_without(
    fixed_s: float, per_mib_s: float, noise: float, seed: int
) -> None:
    # A single micro-batch with the whole backlog would take a minute.
    backlog = 60 / per_mib_s
    paced = Simulation(rate(0.1, backlog), fixed_s, per_mib_s, noise, target_s=2.0, seed=seed).run(40)

    assert max(paced.durations_s[3:]) <= 2.0
    # A query without a target is busy nearly all of the time; learning costs a share of it at first.
    least = 0.78 if fixed_s <= 0.1 else 0.7 if fixed_s <= 0.25 else 0.6
    assert paced.taken / MIB * per_mib_s >= least * paced.now_s


@given(**queries, load=st.floats(0.001, 0.3))
def test_a_low_rate_needs_few_micro_batches_and_none_is_late(
    fixed_s: float, per_mib_s: float, noise: float, seed: int, load: float
) -> None:
    come = rate(load / per_mib_s)
    plain = Simulation(come, fixed_s, per_mib_s, noise, seed=seed).run(40)
    paced = Simulation(come, fixed_s, per_mib_s, noise, target_s=2.0, seed=seed).run(40)

    assert max(paced.latest_s[5:]) <= 2.0
    assert max(paced.durations_s[3:]) <= 2.0
    assert len(paced.durations_s) <= len(plain.durations_s) / 2 + 3 or fixed_s > 0.3


@given(**queries)
def test_after_a_backlog_the_target_holds_again(fixed_s: float, per_mib_s: float, noise: float, seed: int) -> None:
    paced = Simulation(rate(0.2 / per_mib_s, 10 / per_mib_s), fixed_s, per_mib_s, noise, 2.0, seed=seed).run(40)

    assert max(paced.latest_s[-5:]) <= 2.0


def heavy_tailed(_: float, drawn: random.Random) -> float:
    """Most durations are as expected; one of twenty is at least two and a half times as long."""
    return min(0.95 * drawn.paretovariate(3.2), 8.0)


def share_beyond(paced: Simulation, target_s: float) -> float:
    settled = paced.durations_s[3:]
    return sum(each > target_s for each in settled) / len(settled)


@given(fixed_s=st.floats(0.02, 0.2), per_mib_s=st.floats(0.002, 0.05), seed=st.integers(0, 99))
def test_few_micro_batches_miss_the_target_when_some_take_much_longer(
    fixed_s: float, per_mib_s: float, seed: int
) -> None:
    come = rate(0.1, 120 / per_mib_s)
    paced = Simulation(come, fixed_s, per_mib_s, target_s=2.0, others=heavy_tailed, seed=seed).run(120)

    # Without a margin for longer ones, more than half of the micro-batches would miss the target.
    assert share_beyond(paced, 2.0) <= 0.3
    mean = sum(heavy_tailed(0, random.Random(seed)) for seed in range(1000)) / 1000
    assert paced.taken / MIB * per_mib_s * mean >= 0.5 * paced.now_s


@given(fixed_s=st.floats(0.02, 0.12), per_mib_s=st.floats(0.002, 0.05), factor=st.floats(1.0, 2.0))
def test_a_slowdown_during_a_backlog_stays_within_the_target(fixed_s: float, per_mib_s: float, factor: float) -> None:
    come = rate(0.1, 120 / per_mib_s)
    others = lambda now_s, _: factor if 20 < now_s < 40 else 1.0  # noqa: E731  # a step, and back
    paced = Simulation(come, fixed_s, per_mib_s, target_s=2.0, others=others).run(60)

    assert max(paced.durations_s[3:]) <= 2.0


def test_a_query_keeps_most_of_its_throughput_with_erratic_durations() -> None:
    def others(_: float, drawn: random.Random) -> float:
        return drawn.choice([0.7, 1.0, 3.0])

    paced = Simulation(rate(8.0), 0.6, 0.05, target_s=2.0, others=others).run(400)

    # A query that takes everything at once leaves only the records that arrive meanwhile.
    assert paced.taken >= 0.8 * 8.0 * MIB * paced.now_s


def test_a_slowdown_makes_only_one_micro_batch_miss_the_target() -> None:
    come = rate(0.1, 10_000)
    others = lambda now_s, _: 3.0 if 20 < now_s < 40 else 1.0  # noqa: E731  # a step, and back
    paced = Simulation(come, 0.1, 0.02, target_s=2.0, others=others).run(60)

    assert sum(each > 2.0 for each in paced.durations_s) == 1


def test_the_target_holds_with_a_trigger_of_one_second() -> None:
    paced = Simulation(rate(1.0), 0.2, 0.01, target_s=3.0, trigger_s=1.0).run(40)

    assert max(paced.latest_s[5:]) <= 3.0
    assert len(paced.durations_s) <= 25


def test_a_held_back_query_is_asked_at_most_about_ten_times_a_second() -> None:
    paced = Simulation(rate(1.0), 0.2, 0.01, target_s=3.0).run(40)

    assert paced.questions <= 450
