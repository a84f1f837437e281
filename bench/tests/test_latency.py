"""Decisions of the benchmark of latency targets about its figures; its measurements are not tested."""

import numpy as np
import pyarrow as pa
import pytest

from bench.experiments import latency as experiments
from bench.experiments.setup import judge
from bench.latency import AT_ONCE, FULL, Cpu, Run, cost_table, fills, in_time, target
from bench.latency_reader import Arrivals, Seen, part_within, summed_up


def run(mean_ms: float, *, cpu_us: float = 1.0, seen: Seen | None = None) -> Run:
    return Run(20_000.0, mean_ms, mean_ms, False, Cpu(cpu_us, 0.0), 400.0, seen)


def test_windows_group_records_by_their_time_of_acceptance() -> None:
    accepted_us = np.array([0, 900_000, 1_100_000, 1_900_000, 2_000_000, 2_400_000])
    waited_us = np.array([10_000, 30_000, 50_000, 50_000, 70_000, 110_000])

    seen = summed_up(accepted_us, waited_us, 0.5, window_s=1.0)

    assert seen.means_ms == [20.0, 70.0]  # the rest counts to the window before, as it is less than half a window
    assert seen.mean_ms == pytest.approx(53.33, abs=0.01)
    assert (seen.held(70.0), seen.held(50.0), seen.held(19.0)) == (1.0, 0.5, 0.0)
    assert seen.held_p99(70.0) == 0.5


def test_no_records_give_no_windows() -> None:
    seen = summed_up(np.empty(0, np.int64), np.empty(0), 0.5, window_s=1.0)

    assert (seen.means_ms, seen.cpu_s, seen.held(1.0)) == ([], 0.5, 1.0)
    assert part_within([], 1.0) == 1.0


def test_arrivals_average_the_latency_of_each_counted_record() -> None:
    rows = pa.record_batch({"timestamp": pa.array([1_000, 2_000, 3_000], pa.timestamp("us"))})
    arrivals = Arrivals()

    arrivals.add(rows, 5_000.0)
    arrivals.add(rows.slice(1, 2), 9_000.0)

    assert arrivals.records == 5
    assert arrivals.since(2_000.0, 0.0).mean_ms == (3 + 2 + 7 + 6) / 4
    assert arrivals.since(3_000.0, 0.0).mean_ms == (2 + 6) / 2


def test_processor_time_per_record_excludes_the_time_without_records() -> None:
    assert Cpu(3.0, 1.0, 0.5).less(Cpu(0.5, 0.6, 0.0), 2.0) == Cpu(2.0, 0.0, 0.5)
    assert run(1.0)._replace(each_us=Cpu(1.0, 2.0, 3.0)).cpu_us == 6.0


def test_a_chunk_size_that_misses_the_target_is_excluded() -> None:
    four, sixteen = run(14.0), run(58.0)

    assert in_time([four, sixteen], 50) == [four]
    assert in_time([four, sixteen], 10) == []


def test_the_full_policy_is_measured_only_if_chunks_become_full() -> None:
    assert fills(FULL, 64, 200_000, 5.0)
    assert not fills(FULL, 1_024, 1_000, 5.0)
    assert not fills(AT_ONCE, 1, 200_000, 5.0)


def test_a_row_of_the_table_shows_the_saving_of_a_target_and_how_often_it_is_held() -> None:
    goal = target(200)
    seen = Seen(100.0, 190.0, [100.0, 210.0], [190.0, 250.0], 0.1)

    *_, row = cost_table(
        [AT_ONCE, goal], {AT_ONCE.name: run(1.0, cpu_us=10.0), goal.name: run(99.0, cpu_us=2.0, seen=seen)}
    ).splitlines()

    assert row == "| 200 ms | 400 | 2.00 | 2.00 / 0.00 / 0.00 | 5.0 x | 99.0 / 99.0 | 100.0 / 190.0 | 50% / 50% |"


@pytest.mark.parametrize(
    ("cpu_us", "means_ms", "holds"),
    [
        ((20.0, 3.0, 2.5), [100.0] * 99 + [201.0], [True, True, True]),
        ((20.0, 5.0, 2.5), [100.0] * 98 + [201.0] * 2, [False, False, False]),
    ],
)
def test_claims_about_a_target_are_judged_by_the_readers_latencies(
    cpu_us: tuple[float, ...], means_ms: list[float], holds: list[bool]
) -> None:
    seen = Seen(100.0, 190.0, means_ms, [], 0.1)
    runs = {name: run(90.0, cpu_us=us, seen=seen) for name, us in zip(experiments.COST_POLICIES, cpu_us, strict=True)}

    samples = {(series, experiments.COST_RATE): [one] for series, one in experiments.cost_samples_of(runs).items()}

    assert [judge(claim, samples, 2).state == "yes" for claim in experiments.COST.claims] == holds
