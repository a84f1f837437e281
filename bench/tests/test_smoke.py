"""The arithmetic of the regression gate; its measurements are not tested."""

import pytest

from bench.smoke import BEST, RATIOS, Ratio, best, judge, table, with_new

ROUND = {
    "copy_s_per_gb": 0.1,
    "socket_mb_per_s": 4_000.0,
    "large_mb_per_s": 2_000.0,
    "producer_s_per_gb": 0.3,
    "broker_s_per_gb": 0.2,
    "replicated_mb_per_s": 1_000.0,
    "small_mb_per_s": 500.0,
    "keyed_mb_per_s": 400.0,
    "push_s_per_gb": 0.2,
    "pull_s_per_gb": 0.5,
    "append_m_per_core_s": 20.0,
    "send_m_records_per_core_s": 2.0,
    "ping_ms": 0.02,
    "ack_p50_ms": 0.2,
    "plain_m_per_core_s": 40.0,
    "epochs_m_per_core_s": 30.0,
    "ordered_m_per_core_s": 10.0,
    "strict_m_per_core_s": 2.0,
}


def test_each_ratio_is_computed_from_the_figures_of_a_round() -> None:
    found = {name: ratio.of(ROUND) for name, ratio in RATIOS.items()}
    assert found == pytest.approx({
        "send_batch": 0.5,
        "replicated": 0.5,
        "small_requests": 0.25,
        "keyed": 0.2,
        "push": 2.5,
        "send": 0.1,
        "ack": 10.0,
        "epochs": 0.75,
        "ordered": 5.0,
        "producer_cpu": 3.0,
        "broker_cpu": 2.0,
    })  # fmt: skip


def test_the_best_round_counts_for_each_figure() -> None:
    worse = {name: value * (2 if BEST[name] is min else 0.5) for name, value in ROUND.items()}
    half = len(ROUND) // 2
    first = dict(list(ROUND.items())[:half] + list(worse.items())[half:])
    second = dict(list(worse.items())[:half] + list(ROUND.items())[half:])
    assert best([first, second]) == ROUND


def test_a_round_with_a_disturbed_denominator_does_not_flatter_a_ratio() -> None:
    disturbed = ROUND | {"socket_mb_per_s": 100.0, "copy_s_per_gb": 3.0, "push_s_per_gb": 9.0, "large_mb_per_s": 50.0}
    figures = best([ROUND, disturbed])
    assert {name: ratio.of(figures) for name, ratio in RATIOS.items()} == {
        name: ratio.of(ROUND) for name, ratio in RATIOS.items()
    }


def test_a_loss_is_relative_whether_more_or_less_is_better() -> None:
    more = Ratio("more", lambda _: 0.0)
    less = Ratio("less", lambda _: 0.0, more_is_better=False)
    assert more.loss(then=4.0, now=3.0) == pytest.approx(0.25)
    assert more.loss(then=4.0, now=5.0) == pytest.approx(-0.25)
    assert less.loss(then=3.0, now=4.0) == pytest.approx(0.25)
    assert less.loss(then=3.0, now=2.0) == pytest.approx(-0.5)


def test_only_a_loss_above_the_limit_fails() -> None:
    then = {"push": 4.0, "ack": 3.0}
    assert [line.ok for line in judge(then, {"push": 3.0, "ack": 4.0}, 0.25)] == [True, True]
    assert [line.ok for line in judge(then, {"push": 2.9, "ack": 4.1}, 0.25)] == [False, False]
    assert [line.ok for line in judge(then, {"push": 40.0, "ack": 0.3}, 0.25)] == [True, True]


def test_only_unrecorded_ratios_are_added() -> None:
    recorded = {"machine": {"load": 1.0}, "ratios": {"send": 0.1}, "rounds": [{"ping_ms": 1.0}]}
    measured = {"machine": {"load": 3.0}, "ratios": {"send": 0.2, "epochs": 0.7}, "rounds": [{"ping_ms": 2.0}]}

    both = with_new(recorded, measured)

    assert both["ratios"] == {"send": 0.1, "epochs": 0.7}
    assert (both["machine"], both["rounds"]) == (recorded["machine"], recorded["rounds"])
    assert both["added"] == [{**measured, "ratios": {"epochs": 0.7}}]
    assert with_new(both, measured) == both


def test_an_unrecorded_ratio_is_new_and_passes() -> None:
    (line,) = judge({}, {"push": 1.0}, 0.25)
    assert line.ok
    assert line.then is None
    assert "| new | ok |" in table([line])


def test_the_table_shows_the_recorded_and_the_new_ratio() -> None:
    text = table(judge({"push": 4.0}, {"push": 2.0}, 0.25))
    assert text.endswith("| more | 4 | 2 | 0.50 × | **lost** |")
