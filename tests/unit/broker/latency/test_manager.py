from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric

from kera.broker.latency import manager as managing
from kera.broker.latency.budgets import STREAMS_MAX, WAIT_US_MAX, WINDOW_MS_MAX, WINDOW_MS_MIN, Budget
from kera.broker.latency.manager import GROUPS_MAX, HOPS_MAX, VALID_MS, Figures, LatencyManager
from kera.broker.latency.manager import STREAMLETS_MAX as STREAMLETS_FIGURES_MAX
from kera.broker.latency.running_hop import PARTS, STREAMLETS_MAX, RunningHop, StreamletMeans, Sums
from kera.broker.latency.series import HopCollector
from kera.core.base.clock import FakeClock
from kera.core.latency.hop import Hop
from kera.core.latency.report import Of
from kera.core.latency.sample import Sample
from kera.v1 import latency_pb2

WINDOW_S = 10


def budget(stream_id: int = 7, **fields: Any) -> latency_pb2.StreamBudget:
    usual: dict[str, Any] = {"window_ms": WINDOW_S * 1000, "gather_us": 20_000, "hand_over_us": 5_000}
    return latency_pb2.StreamBudget(stream_id=stream_id, **usual | fields)


def on_paths(*groups: str, stream_id: int = 7, next_of: str = "") -> latency_pb2.StreamBudget:
    following = [latency_pb2.NextStream(consumer_group=next_of, stream_id=8)] if next_of else []
    return budget(stream_id, next=following, ends=latency_pb2.PathEnds(consumer_groups=groups))


def all_hops(manager: LatencyManager) -> list[RunningHop]:
    return [running for watched in manager._streams.values() for running in watched.hops.values()]


def sample(*times_us: int) -> Sample:
    made = Sample()
    for us in times_us:
        made.add(us)
    return made


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def manager(clock: FakeClock) -> LatencyManager:
    made = LatencyManager(clock)
    made.set_budgets(3, [budget()])
    return made


def by_hop(manager: LatencyManager) -> dict[tuple[Hop, str], Figures]:
    return {(each.hop, each.consumer_group): each for each in manager.figures()}


class TestBudgets:
    def test_extreme_budgets_are_clamped(self) -> None:
        most = Budget.of(budget(window_ms=1 << 31, gather_us=1 << 62, replicate_us=1 << 62, hand_over_us=1 << 62))
        assert most == Budget(WINDOW_MS_MAX / 1000, WAIT_US_MAX, WAIT_US_MAX, WAIT_US_MAX)
        assert Budget.of(latency_pb2.StreamBudget()) == Budget(WINDOW_MS_MIN / 1000, 0, 0, 0)

    def test_only_the_first_streams_up_to_the_limit_are_watched(self, manager: LatencyManager) -> None:
        manager.set_budgets(4, [budget(number) for number in range(STREAMS_MAX + 5)])
        assert manager.watches(STREAMS_MAX - 1)
        assert not manager.watches(STREAMS_MAX)

    def test_a_stream_without_a_budget_is_forgotten(self, manager: LatencyManager) -> None:
        manager.reported([(Of(7, 0, Hop.GATHER), sample(5))])
        manager.set_budgets(4, [budget(8)])
        manager.set_budgets(5, [budget(7), budget(8)])
        assert (manager.version, manager.figures()) == (5, [])

    def test_a_changed_budget_keeps_the_figures_if_its_window_is_the_same(self, manager: LatencyManager) -> None:
        manager.reported([(Of(7, 0, Hop.GATHER), sample(5))])
        manager.set_budgets(4, [budget(gather_us=1)])
        assert [each.mean_us for each in manager.figures()] == [5]
        assert manager.advise_writer([7])[0].linger_us == 1
        manager.set_budgets(5, [budget(window_ms=2_000)])
        assert manager.figures() == []

    def test_a_forgotten_stream_is_not_watched(self, manager: LatencyManager) -> None:
        manager.forget(7)
        manager.forget(7)
        assert not manager.watches(7)


class TestAdvice:
    def test_only_streams_with_a_budget_get_advice(self, manager: LatencyManager) -> None:
        (advice,) = manager.advise_writer([6, 7])
        assert advice == latency_pb2.WriterAdvice(stream_id=7, linger_us=20_000, valid_ms=VALID_MS)
        (to_reader,) = manager.advise_reader([7, 8])
        assert (to_reader.stream_id, to_reader.fetch_wait_us, to_reader.valid_ms) == (7, 5_000, VALID_MS)
        assert to_reader.fetch_bytes_min > 0

    def test_a_reader_without_hand_over_budget_does_not_wait_for_bytes(self, manager: LatencyManager) -> None:
        manager.set_budgets(4, [budget(hand_over_us=0)])
        assert manager.advise_reader([7]) == [latency_pb2.ReaderAdvice(stream_id=7, valid_ms=VALID_MS)]


class TestFigures:
    def test_a_stream_without_a_budget_has_no_figures(self, manager: LatencyManager) -> None:
        manager.reported([(Of(8, 0, Hop.GATHER), sample(5))])
        manager.replicated([8], 1.0)
        assert manager.figures() == []

    def test_the_clock_error_of_hand_over_is_the_worst_of_writers_plus_the_readers_own(
        self, manager: LatencyManager, clock: FakeClock
    ) -> None:
        for error_us in (700, 300):
            manager.reported([(Of(7, 0, Hop.GATHER), sample(5))], error_us=error_us)
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "app"), sample(9))], error_us=50)
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "other"), sample(9))], error_us=60)
        assert {each.consumer_group: each.clock_error_us for each in manager.figures()} == {
            "": 0,
            "app": 750,
            "other": 760,
        }
        clock.advance(WINDOW_S / 2)
        manager.reported([(Of(7, 0, Hop.GATHER), sample(5)), (Of(7, 0, Hop.HAND_OVER, "app"), sample(9))], error_us=1)
        clock.advance(WINDOW_S * 0.9)
        assert by_hop(manager)[Hop.HAND_OVER, "app"].clock_error_us == 2

    def test_gather_reports_the_longest_own_linger_of_a_writer(self, manager: LatencyManager) -> None:
        for own_us in (0, 500_000, 20_000):
            manager.reported([(Of(7, 0, hop), sample(5)) for hop in (Hop.GATHER, Hop.SEND)], own_linger_us=own_us)
        assert {each.hop: each.own_linger_us for each in manager.figures()} == {Hop.GATHER: 500_000, Hop.SEND: 0}
        assert manager.figures()[0].message().own_linger_us == 500_000

    def test_hand_over_is_corrected_for_writers_whose_clocks_are_ahead(self, manager: LatencyManager) -> None:
        manager.reported([(Of(7, 0, Hop.GATHER), sample(1_000, 1_000))], ahead_us=5_000_000)
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "app"), sample(0, 20))], ahead_us=4_996_000)
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "other"), sample(0, 20))], ahead_us=4_997_000)
        found = by_hop(manager)
        assert found[Hop.HAND_OVER, "app"].mean_us == 10 - 1_000 + 4_000
        assert found[Hop.HAND_OVER, "other"].mean_us == 10 - 1_000 + 3_000

    def test_each_hop_excludes_the_hops_before_it(self, manager: LatencyManager) -> None:
        """A reported time includes the hops before it."""
        manager.reported(
            [(Of(7, 0, Hop.GATHER), sample(1_000, 3_000)), (Of(7, 0, Hop.SEND), sample(5_000, 5_000))], ahead_us=-500
        )
        manager.replicated([7], 0.004)
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "app"), sample(9_000)), (Of(7, 0, Hop.PREFETCH, "app"), sample(70))])
        found = by_hop(manager)
        means = {hop: figures.mean_us for (hop, _), figures in found.items()}
        assert means == {
            Hop.GATHER: 2_000,
            Hop.SEND: 1_000,
            Hop.REPLICATE: 4_000,
            Hop.HAND_OVER: 1_500,
            Hop.PREFETCH: 70,
        }
        assert found[Hop.HAND_OVER, "app"].p99_us >= 1_500

    def test_the_99th_percentiles_of_the_hops_add_up_to_that_of_the_path(self, manager: LatencyManager) -> None:
        waits = [100 * number for number in range(1, 201)]
        manager.reported([(Of(7, 0, Hop.GATHER), sample(*waits))])
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "app"), sample(*(us + 500 for us in waits)))])
        found = by_hop(manager)
        assert found[Hop.HAND_OVER, "app"].mean_us == 500
        together_us = found[Hop.GATHER, ""].p99_us + found[Hop.HAND_OVER, "app"].p99_us
        assert 200 * 99 + 500 <= together_us <= max(waits) + 500 + 1

    def test_no_hop_is_negative(self, manager: LatencyManager) -> None:
        manager.replicated([7], 4.0)
        manager.reported([(Of(7, 0, Hop.SEND), sample(5_000)), (Of(7, 0, Hop.HAND_OVER, "app"), sample(9_000))])
        found = by_hop(manager)
        assert found[Hop.SEND, ""][3:7] == (1, 0, 0, 0)
        assert found[Hop.HAND_OVER, "app"].mean_us == 4_000  # the writers' time includes replication

    def test_the_worst_streamlet_is_named(self, manager: LatencyManager) -> None:
        for streamlet in range(STREAMLETS_MAX + 10):
            manager.reported([(Of(7, streamlet, Hop.GATHER), sample(1_000 if streamlet == 77 else 10))])
        (figures,) = manager.figures()
        assert (figures.chunks, figures.worst_mean_us, figures.worst_streamlet_id) == (STREAMLETS_MAX + 10, 1_000, 77)

    def test_consumer_groups_have_separate_figures_up_to_a_limit(self, manager: LatencyManager) -> None:
        for number in range(GROUPS_MAX + 5):
            manager.reported([(Of(7, 0, Hop.PREFETCH, f"group-{number}"), sample(number))])
            manager.reported([(Of(7, 0, Hop.GATHER), sample(1))])
        assert len(by_hop(manager)) == GROUPS_MAX + 1

    def test_only_consumer_groups_on_paths_are_measured(self, manager: LatencyManager) -> None:
        """Even when many other groups come first."""
        manager.set_budgets(4, [on_paths("real", next_of="works")])
        for name in (*(f"group-{number}" for number in range(GROUPS_MAX + 5)), "works", "real"):
            manager.reported([(Of(7, 0, Hop.PREFETCH, name), sample(1)), (Of(7, 0, Hop.HAND_OVER, name), sample(1))])
        manager.reported([(Of(7, 0, Hop.GATHER), sample(1))])
        readers = {(hop, name) for hop in (Hop.HAND_OVER, Hop.PREFETCH) for name in ("works", "real")}
        assert by_hop(manager).keys() == {(Hop.GATHER, ""), *readers}
        assert [manager.measures(7, Hop.WORK, name) for name in ("real", "works", "other", "")] == [
            True,
            True,
            False,
            False,
        ]
        assert not manager.measures(8, Hop.WORK, "real")

    def test_a_group_that_left_all_paths_is_forgotten(self, manager: LatencyManager) -> None:
        manager.set_budgets(4, [on_paths("one", "other")])
        manager.reported([(Of(7, 0, Hop.WORK, name), sample(1)) for name in ("one", "other")])
        manager.set_budgets(5, [on_paths("other")])
        assert list(by_hop(manager)) == [(Hop.WORK, "other")]
        manager.set_budgets(6, [on_paths()])
        assert by_hop(manager) == {}

    def test_each_stream_gets_an_equal_share_of_the_room(
        self, manager: LatencyManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Limits a hundredth as large stand for the real ones."""
        monkeypatch.setattr(managing, "HOPS_MAX", HOPS_MAX // 100)
        monkeypatch.setattr(managing, "STREAMLETS_MAX", STREAMLETS_FIGURES_MAX // 100)
        names, streams = [f"group-{number}" for number in range(5)], range(STREAMS_MAX // 100)
        manager.set_budgets(4, [on_paths(*names, stream_id=each) for each in streams])
        for stream_id in streams:
            for hop in Hop:
                for name in names if hop.of_reader else [""]:
                    manager.reported([(Of(stream_id, streamlet, hop, name), sample(1)) for streamlet in range(40)])
        figures = manager.figures()
        assert len(figures) == HOPS_MAX // 100
        assert {each.consumer_group for each in figures} == {"", names[0]}
        assert {each.chunks for each in figures} == {40}
        assert sum(running.streamlets for running in all_hops(manager)) == STREAMLETS_FIGURES_MAX // 100

    def test_figures_without_room_are_forgotten(self, manager: LatencyManager) -> None:
        names = ["group-0", "group-1"]
        manager.set_budgets(4, [on_paths(*names)])
        manager.reported([(Of(7, each, Hop.WORK, name), sample(1)) for name in names for each in range(STREAMLETS_MAX)])
        assert sum(running.streamlets for running in all_hops(manager)) == 2 * STREAMLETS_MAX
        manager.set_budgets(5, [on_paths(*names, stream_id=each) for each in range(STREAMS_MAX)])
        assert list(by_hop(manager)) == [(Hop.WORK, "group-0")]
        assert sum(running.streamlets for running in all_hops(manager)) == 0

    def test_figures_are_reported_in_turn(self, manager: LatencyManager) -> None:
        streams = range(10)
        manager.set_budgets(4, [budget(each) for each in streams])
        manager.reported([(Of(each, 0, Hop.GATHER), sample(1)) for each in streams])
        told = [manager.next_figures(4) for _ in range(5)]
        assert [left_out for _, left_out in told] == [6] * 5
        assert [each.stream_id for figures, _ in told for each in figures] == [*streams, *streams]
        assert [len(manager.next_figures(10)[0]), manager.next_figures(11)[1]] == [10, 0]

    def test_figures_cover_the_last_window(self, manager: LatencyManager, clock: FakeClock) -> None:
        manager.reported([(Of(7, 0, Hop.GATHER), sample(100))])
        clock.advance(WINDOW_S * 0.6)
        manager.reported([(Of(7, 0, Hop.GATHER), sample(200))])
        assert manager.figures()[0].mean_us == 150
        clock.advance(WINDOW_S * 0.6)
        assert manager.figures()[0].mean_us == 200
        clock.advance(WINDOW_S * 0.6)
        assert manager.figures() == []

    @given(
        st.lists(
            st.tuples(st.sampled_from([Hop.GATHER, Hop.PREFETCH, Hop.WORK]), st.integers(0, 3), st.integers(0, 10**6)),
            min_size=1,
            max_size=100,
        )
    )
    def test_figures_match_all_reported_times(self, times: list[tuple[Hop, int, int]]) -> None:
        manager = LatencyManager(FakeClock())
        manager.set_budgets(1, [budget()])
        for hop, streamlet, us in times:
            manager.reported([(Of(7, streamlet, hop, "app" if hop.of_reader else ""), sample(us))])
        for figures in manager.figures():
            all_us = sorted(us for hop, _, us in times if hop is figures.hop)
            of_streamlets = {
                streamlet: [us for hop, each, us in times if hop is figures.hop and each == streamlet]
                for streamlet in range(4)
            }
            means = [sum(each) / len(each) for each in of_streamlets.values() if each]
            assert figures.chunks == len(all_us)
            assert abs(figures.mean_us - sum(all_us) / len(all_us)) <= 1
            assert all_us[-1 - len(all_us) // 100] <= figures.p99_us <= all_us[-1] + 1
            assert abs(figures.worst_mean_us - max(means)) <= 1


class TestStreamlets:
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 10**6)), max_size=60))
    def test_means_cover_only_times_within_the_window(self, steps: list[tuple[int, int, int]]) -> None:
        """There are places for six streamlets; a place is free again when its streamlet's last sum is gone."""
        means, now, came = StreamletMeans(float(PARTS)), 0, list[tuple[int, int, int]]()
        for seconds, streamlet, us in steps:
            now += seconds
            came = [each for each in came if each[0] >= now - PARTS]
            known = {each for _, each, _ in came}
            if streamlet in known or len(known) < 6:
                came.append((now, streamlet, us))
            means.add(now, {streamlet: Sums(us, 1)}, 6)
            found = {each: mean for mean, each in means.all(now)}
            expected = {each: [us for _, of, us in came if of == each] for each in {each for _, each, _ in came}}
            assert found == pytest.approx({each: sum(all_us) / len(all_us) for each, all_us in expected.items()})
            assert len(means) == len(found)


class TestMetrics:
    @staticmethod
    def collected(manager: LatencyManager, *, everything: bool) -> Metric:
        steps = HopCollector(manager, {7: "clicks"}.get).steps(everything=everything)
        try:
            while True:
                next(steps)
        except StopIteration as end:
            (family,) = end.value
            found: Metric = family
            return found

    def test_each_hop_has_a_mean_and_a_p99(self, manager: LatencyManager) -> None:
        manager.set_budgets(4, [budget(), budget(8)])
        manager.reported([(Of(7, 0, Hop.HAND_OVER, "app"), sample(2_000)), (Of(8, 0, Hop.GATHER), sample(1))])
        family = self.collected(manager, everything=True)
        labels = {"stream": "clicks", "hop": "hand-over", "consumer_group": "app"}
        assert [(each.labels, each.value) for each in family.samples] == [
            (labels | {"statistic": "mean"}, 0.002),
            (labels | {"statistic": "p99"}, 0.002),
        ]
        assert self.collected(manager, everything=False).samples == []
