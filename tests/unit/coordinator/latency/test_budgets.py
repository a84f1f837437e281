"""Budgets of streams under several latency constraints, and the verdicts about these constraints."""

from __future__ import annotations

from collections.abc import Mapping

from kera.coordinator.latency.budgets import Budget, Wanted, budgets_of, in_words, judged, splits_of, steady
from kera.coordinator.latency.figures import Figures
from kera.coordinator.latency.paths import checked
from kera.coordinator.latency.splitting import GATHER, SEND, WORK, Hop, Measured, Split, split
from kera.core.base.turns import at_once
from kera.v1 import latency_pb2 as messages

CHECKOUT = ("clicks", "group:enrich", "visits", "group:dashboard")


def wanted(name: str, limit_ms: int, *path: str, window_ms: int = 15_000, p99: bool = False) -> Wanted:
    statistic = messages.LATENCY_STATISTIC_P99 if p99 else messages.LATENCY_STATISTIC_MEAN
    return Wanted.of(
        checked(
            messages.LatencyConstraint(
                name=name, path=path or CHECKOUT, limit_us=limit_ms * 1000, window_ms=window_ms, statistic=statistic
            )
        )
    )


def measured(*constraints: Wanted) -> dict[Hop, Measured]:
    return {hop: Measured(100, 1_000, 1_000, 15_000) for each in constraints for hop in each.hops}


def planned(
    *due: Wanted, others: Mapping[str, Split] | None = None, measured: Mapping[Hop, Measured]
) -> dict[str, Split]:
    return at_once(splits_of(due, others or {}, measured))


def test_the_strictest_of_several_constraints_on_a_stream_counts() -> None:
    lax, strict = wanted("lax", 1_000), wanted("strict", 50, "visits", "group:dashboard", window_ms=5_000)
    splits = planned(lax, strict, measured=measured(lax, strict))
    budgets = at_once(budgets_of([lax, strict], splits))
    assert budgets["visits"].constraint == "strict"
    assert budgets["visits"].window_ms == 5_000
    assert budgets["visits"].gather_us == splits["strict"].granted_us(Hop("visits", GATHER)) == 45_000 - 6_000
    assert budgets["clicks"].constraint == "lax"


def test_time_that_a_stricter_constraint_takes_from_a_stream_goes_to_other_streams() -> None:
    lax, strict = wanted("lax", 1_000), wanted("strict", 50, "visits", "group:dashboard")
    budgets = at_once(budgets_of([lax, strict], planned(lax, strict, measured=measured(lax, strict))))
    assert budgets["clicks"].gather_us == 900_000 - 12_000 - budgets["visits"].gather_us
    kept = planned(strict, measured=measured(strict))
    assert planned(lax, others=kept, measured=measured(lax))["lax"].granted_us(Hop("visits", GATHER)) == 39_000


def test_a_path_that_ends_with_a_stream_does_not_limit_its_readers() -> None:
    ends, reads = wanted("ends", 100, "clicks"), wanted("reads", 500, "clicks", "group:enrich")
    early = measured(ends, reads) | {Hop("clicks", GATHER): Measured(9, 100, 200, 15_000, 50_000, 400)}
    budget = at_once(budgets_of([ends, reads], planned(ends, reads, measured=early)))["clicks"]
    assert budget.hand_over_us > 0
    assert budget.limit_us <= 90_000
    assert at_once(budgets_of([ends], planned(ends, measured=early)))["clicks"].hand_over_us == 0


def test_the_message_of_a_budget_has_all_its_fields() -> None:
    message = Budget(1, 2, 3, 4, 5, "c").message(9)
    assert message == messages.StreamBudget(
        stream_id=9, window_ms=1, limit_us=2, gather_us=3, replicate_us=4, hand_over_us=5, constraint="c"
    )


def test_a_budget_keeps_its_values_when_they_hardly_change() -> None:
    before = Budget(15_000, 100_000, 50_000, 0, 0, "c")
    near = before._replace(gather_us=51_000, limit_us=99_000)
    assert steady(before, near) is before
    assert steady(None, near) is near
    assert steady(before, far := before._replace(gather_us=40_000)) is far
    assert steady(before, other := near._replace(constraint="d")) is other


def test_a_small_change_of_a_short_limit_counts() -> None:
    """Half a millisecond is half of a short limit: buffers would wait though no time is left for that."""
    before = Budget(15_000, 1_000, 400, 0, 0, "c")
    assert steady(before, after := before._replace(gather_us=0)) is after
    assert steady(before, before._replace(gather_us=390)) is before


def figures(mean_us: int, p99_us: int = 0) -> Figures:
    return Figures(10, mean_us, p99_us or mean_us, mean_us, 0)


def test_a_constraint_is_held_up_to_its_limit() -> None:
    each = wanted("c", 300)
    found = split(each.hops, each.limit_us, measured(each))
    verdict = judged(each, found, {hop: figures(25_000) for hop in each.hops})
    assert (verdict.state, verdict.mean_us, verdict.violators) == (messages.LATENCY_STATE_HELD, 300_000, ())
    assert judged(each, found, {}).state == messages.LATENCY_STATE_UNKNOWN


def test_hops_that_take_more_than_their_share_violate_a_constraint() -> None:
    each = wanted("c", 300)
    found = split(each.hops, each.limit_us, measured(each))
    slow, slower = Hop("visits", SEND), Hop("clicks", WORK, "enrich")
    verdict = judged(each, found, {slow: figures(100_000), slower: figures(250_000), Hop("clicks", SEND): figures(5)})
    assert verdict.state == messages.LATENCY_STATE_VIOLATED
    assert verdict.violators == (slower, slow)
    assert "work of clicks to enrich exceeds its share the most" in verdict.reason


def test_a_p99_constraint_compares_the_sum_of_99th_percentiles() -> None:
    each = wanted("c", 300, p99=True)
    current = {hop: figures(1_000, 30_000) for hop in each.hops}
    verdict = judged(each, split(each.hops, each.limit_us, measured(each)), current)
    assert (verdict.state, verdict.mean_us, verdict.p99_us) == (messages.LATENCY_STATE_VIOLATED, 12_000, 360_000)


def test_the_verdict_of_an_infeasible_constraint_names_the_hop_and_the_least_limit() -> None:
    each = wanted("c", 300)
    slow = Hop("clicks", WORK, "enrich")
    told = measured(each) | {slow: Measured(10, 400_000, 400_000, 15_000)}
    verdict = judged(each, split(each.hops, each.limit_us, told), {slow: figures(400_000)})
    assert verdict.state == messages.LATENCY_STATE_INFEASIBLE
    assert verdict.violators[0] == slow
    assert verdict.least_limit_us == 456_667
    assert "work of clicks to enrich: the minimum limit is 457 ms" in verdict.reason
    held = judged(each, split(each.hops, each.limit_us, told), {slow: figures(290_000)})
    assert (held.state, held.reason) == (messages.LATENCY_STATE_HELD, "with less than 10% to spare")


def test_a_violating_hop_is_named_even_before_the_first_split() -> None:
    each = wanted("c", 300)
    assert judged(each, None, {Hop("clicks", SEND): figures(400_000)}).violators == (Hop("clicks", SEND),)


def test_the_words_for_a_hop_name_its_stream_and_reader() -> None:
    assert in_words(Hop("clicks", GATHER)) == "gather of clicks"
    assert in_words(Hop("clicks", WORK, "enrich")) == "work of clicks to enrich"
