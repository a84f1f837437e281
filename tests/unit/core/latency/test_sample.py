import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.latency.buckets import BOUNDS_US, BUCKETS, bucket_of, quantile_us
from kera.core.latency.hop import Hop
from kera.core.latency.sample import TIME_US_MAX, Sample
from kera.core.latency.window import PARTS, Running, RunningMost
from kera.v1 import latency_pb2

TIMES = st.lists(st.integers(0, 2**33), min_size=1, max_size=300)


def sample_of(times: list[int]) -> Sample:
    sample = Sample()
    for us in times:
        sample.add(us)
    return sample


def contents(sample: Sample) -> tuple[int, int, int, list[int]]:
    return sample.count, sample.sum_us, sample.max_us, list(sample.buckets)


class TestHop:
    def test_hops_are_those_of_the_messages(self) -> None:
        assert {f"HOP_{hop.name}": int(hop) for hop in Hop} | {"HOP_UNSPECIFIED": 0} == dict(latency_pb2.Hop.items())

    def test_hops_have_words(self) -> None:
        assert [hop.word for hop in Hop] == ["gather", "send", "replicate", "hand-over", "prefetch", "work"]
        assert [hop.of_reader for hop in Hop] == [False] * 3 + [True] * 3


class TestBuckets:
    def test_bounds_grow_to_about_50_minutes(self) -> None:
        assert BOUNDS_US[:8] == (1, 1, 2, 2, 4, 5, 8, 11)
        assert 45 * 60e6 < BOUNDS_US[-1] < 55 * 60e6

    @pytest.mark.parametrize(("us", "bucket"), [(-5, 0), (0, 0), (1, 0), (2, 2), (3, 4), (4, 4), (5, 5), (1 << 40, 63)])
    def test_a_time_is_in_its_bucket(self, us: int, bucket: int) -> None:
        assert bucket_of(us) == bucket

    @given(st.integers(0, BOUNDS_US[-1]))
    def test_a_bound_exceeds_the_time_by_the_root_of_two_at_most(self, us: int) -> None:
        bound = BOUNDS_US[bucket_of(us)]
        assert us <= bound <= max(us, 1) * math.sqrt(2)

    def test_statistics_without_times_are_zero(self) -> None:
        assert quantile_us([0] * BUCKETS, 0.99, 0) == 0
        assert quantile_us([], 0.99, 7) == 0


class TestSample:
    def test_statistics_without_times_are_zero(self) -> None:
        assert (Sample().mean_us, Sample().p99_us) == (0, 0)

    def test_a_negative_time_counts_as_zero(self) -> None:
        sample = Sample()
        sample.add(-3)
        assert contents(sample) == (1, 0, 0, [1] + [0] * (BUCKETS - 1))

    def test_a_time_over_a_week_counts_as_a_week(self) -> None:
        sample = Sample()
        sample.add(TIME_US_MAX + 1, 2)
        assert contents(sample) == (2, 2 * TIME_US_MAX, TIME_US_MAX, [0] * (BUCKETS - 1) + [2])

    @given(TIMES)
    def test_mean_and_p99_agree_with_the_times(self, times: list[int]) -> None:
        sample = sample_of(times)
        assert sample.mean_us == math.ceil(Fraction(sum(times), len(times)))
        exact = sorted(times)[math.ceil(0.99 * len(times)) - 1]
        assert exact <= sample.p99_us <= max(times)
        if exact <= BOUNDS_US[-1]:
            assert sample.p99_us <= max(exact, 1) * math.sqrt(2)

    @given(TIMES, st.lists(st.integers(0, 4), min_size=300, max_size=300))
    def test_merged_samples_equal_one_sample_of_all_times(self, times: list[int], where: list[int]) -> None:
        merged = Sample()
        for number in range(5):
            merged.merge(sample_of([us for us, at in zip(times, where, strict=False) if at == number]))
        assert contents(merged) == contents(sample_of(times))

    def test_a_time_can_count_several_times(self) -> None:
        sample = Sample()
        sample.add(10, 3)
        assert contents(sample) == contents(sample_of([10, 10, 10]))


class TestRunning:
    @given(
        st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10**6), st.booleans(), st.booleans()), max_size=200),
    )
    def test_the_window_agrees_with_a_list_of_all_values(self, steps: list[tuple[int, int, bool, bool]]) -> None:
        running, now, all_of_it = Running(10.0), 0, []
        for step, us, merges, asks in steps:
            now += step
            all_of_it.append((now, us))
            if merges:
                running.merge(now, sample_of([us]))
            else:
                running.add(now, us)
            if asks:
                kept = [us for at, us in all_of_it if at >= now - PARTS]
                assert contents(running.sample(now)) == contents(sample_of(kept))

    def test_a_window_forgets_old_times_without_new_ones(self) -> None:
        running = Running(1.0)
        running.add(100.0, 7)
        assert running.sample(100.9).count == 1
        assert running.sample(101.2).count == 0
        assert running.sample(101.2).mean_us == 0


class TestRunningMost:
    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1 << 64), st.booleans()), max_size=200))
    def test_the_window_agrees_with_a_list_of_all_values(self, steps: list[tuple[int, int, bool]]) -> None:
        running, now, all_of_it = RunningMost(10.0), 0, []
        for step, value, asks in steps:
            now += step
            all_of_it.append((now, value))
            running.add(now, value)
            if asks:
                assert running.most(now) == max(value for at, value in all_of_it if at >= now - PARTS)
        assert running.most(now + 30) == 0
