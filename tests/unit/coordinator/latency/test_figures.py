"""Figures of hops, combined from the reports of brokers."""

from __future__ import annotations

from typing import Any

from kera.coordinator.ids import Launch
from kera.coordinator.latency.figures import TIME_US_MAX, Figures, HopKey, MeasuredHops
from kera.v1 import latency_pb2 as messages

SEND = messages.HOP_SEND
KEY = HopKey(7, SEND, "")
ONE, OTHER = Launch(1, 1), Launch(2, 1)


def told(chunks: int, mean_us: int, p99_us: int = 0, **more: Any) -> messages.HopFigures:
    return messages.HopFigures(stream_id=7, hop=SEND, count=chunks, mean_us=mean_us, p99_us=p99_us, **more)


def test_figures_of_brokers_combine_by_sum_weighted_mean_and_worst() -> None:
    hops = MeasuredHops(lambda _: True)
    hops.note(ONE, [told(30, 1_000, 5_000, worst_mean_us=2_000, worst_streamlet_id=4)])
    hops.note(OTHER, [told(10, 5_000, 4_000, worst_mean_us=9_000, worst_streamlet_id=1)])
    assert hops.of(KEY) == Figures(40, 2_000, 5_000, 9_000, 1)
    hops.note(OTHER, [told(10, 1_000, 1_000)])  # a new report replaces the earlier one
    assert hops.of(KEY) == Figures(40, 1_000, 5_000, 2_000, 4)


def test_a_hop_left_out_of_a_report_keeps_its_figures_for_one_round() -> None:
    hops = MeasuredHops(lambda _: True)
    other = HopKey(7, SEND, "other")
    hops.note(ONE, [told(1, 1_000)], 2)
    hops.note(ONE, [told(1, 3_000, consumer_group="other")], 2)
    assert (hops.of(KEY), hops.of(other)) == (Figures(1, 1_000, 0, 1_000, 0), Figures(1, 3_000, 0, 3_000, 0))
    hops.note(ONE, [told(1, 5_000, consumer_group="other")], 2)
    hops.note(ONE, [told(1, 5_000, consumer_group="other")], 2)
    assert hops.of(KEY) is None  # by now the hop should have been reported again
    hops.note(ONE, [told(1, 1_000)])
    assert (hops.of(KEY), hops.of(other)) == (Figures(1, 1_000, 0, 1_000, 0), None)


def test_the_largest_clock_error_and_the_largest_own_linger_count() -> None:
    hops = MeasuredHops(lambda _: True)
    hops.note(ONE, [told(1, 1_000, clock_error_us=700, own_linger_us=5)])
    hops.note(OTHER, [told(1, 1_000, clock_error_us=300, own_linger_us=(1 << 64) - 1)])
    found = hops.of(KEY)
    assert found is not None
    assert (found.clock_error_us, found.own_linger_us) == (700, TIME_US_MAX)


def test_only_figures_of_live_brokers_count() -> None:
    alive = {ONE, OTHER}
    hops = MeasuredHops(alive.__contains__)
    hops.note(ONE, [told(1, 1_000)])
    hops.note(OTHER, [told(1, 3_000)])
    alive.remove(ONE)
    hops.forget_lost()
    assert hops.of(KEY) == Figures(1, 3_000, 0, 3_000, 0)
    hops.note(OTHER, [])
    assert hops.of(KEY) is None


def test_invalid_figures_are_ignored_or_limited() -> None:
    hops = MeasuredHops(lambda _: True)
    strange = messages.HopFigures(stream_id=7, hop=77, count=1)  # type: ignore[arg-type]
    hops.note(ONE, [told(0, 5), strange, told(1, 1, consumer_group="g" * 256)])
    assert hops.of(KEY) is None
    hops.note(ONE, [told(1, (1 << 64) - 1, (1 << 64) - 1)])
    assert hops.of(KEY) == Figures(1, TIME_US_MAX, TIME_US_MAX, TIME_US_MAX, 0)
    hops.note(ONE, [told(1, 1_000), told(5, 2_000)])  # the last of two figures of one hop counts
    assert hops.of(KEY) == Figures(5, 2_000, 0, 2_000, 0)
