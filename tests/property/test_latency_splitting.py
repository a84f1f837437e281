"""Limits split over hops, against a model that gives one microsecond at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.latency.budgets import Wanted, budgets_of, splits_of
from kera.coordinator.latency.splitting import FILLING, UNLIMITED, Hop, Measured, hops_of, shared, split
from kera.core.base.turns import at_once

NAMES = ("a", "b", "c", "d")
TIMES = st.integers(0, 400_000)
MEASURED = st.builds(
    Measured,
    chunks=st.integers(1, 1 << 40),
    mean_us=TIMES,
    p99_us=TIMES,
    window_ms=st.integers(0, 60_000),
    granted_us=st.one_of(TIMES, st.just(math.inf)),
    most_us=st.one_of(TIMES, st.just(UNLIMITED)),
)


@st.composite
def paths(draw: st.DrawFn) -> tuple[Hop, ...]:
    """Paths over one to four streams, in any order."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 4))]
    ends = draw(st.booleans())
    stages = [(name, "" if ends and name == names[-1] else f"{name}-group") for name in names]
    return tuple(hops_of(stages))


@st.composite
def figures(draw: st.DrawFn) -> Mapping[Hop, Measured]:
    every = hops_of([(name, f"{name}-group") for name in NAMES])
    return {hop: draw(MEASURED) for hop in every if draw(st.booleans())}


def naive(total: int, weights: list[int], most: list[float]) -> list[int]:
    """Give one unit at a time to the receiver with room that has the least by its weight."""
    shares = [0] * len(weights)
    for _ in range(total):
        room = [i for i in range(len(weights)) if shares[i] + 1 <= most[i]]
        if not room:
            break
        shares[min(room, key=lambda i: (shares[i] / weights[i], i))] += 1
    return shares


@given(
    st.integers(0, 500),
    st.lists(st.tuples(st.integers(1, 9), st.one_of(st.integers(0, 300), st.just(UNLIMITED))), min_size=1, max_size=5),
)
def test_shares_agree_with_giving_one_unit_at_a_time(total: int, each: list[tuple[int, float]]) -> None:
    weights, most = [weight for weight, _ in each], [room for _, room in each]
    expected, found = naive(total, weights, most), shared(total, weights, most)
    assert sum(found) <= total
    assert all(share <= room for share, room in zip(found, most, strict=True))
    assert all(abs(one - other) <= len(each) for one, other in zip(expected, found, strict=True))


@given(paths(), st.integers(1_000, 3_600_000_000), figures(), st.booleans())
def test_a_split_never_allows_more_than_its_limit(
    hops: tuple[Hop, ...], limit_us: int, measured: Mapping[Hop, Measured], by_p99: bool
) -> None:
    found = split(hops, limit_us, measured, by_p99=by_p99)
    assert list(found.parts) == list(hops)
    assert all(part.need_us >= 0 and part.grant_us >= 0 for part in found.parts.values())
    assert all(part.grant_us == 0 for hop, part in found.parts.items() if hop.hop not in FILLING)
    total = sum(part.allowed_us for part in found.parts.values())
    if found.is_feasible:
        assert total <= limit_us * 0.9 + 1
    else:
        means_us = sum(part.need_us for part in split(hops, limit_us, measured).parts.values())
        assert means_us > limit_us or all(part.grant_us == 0 for part in found.parts.values())
        assert sum(part.grant_us for part in found.parts.values()) <= limit_us * 0.9
        assert found.slowest is not None
        assert found.parts[found.slowest].need_us == max(part.need_us for part in found.parts.values())
    needs = sum(part.need_us for part in found.parts.values())
    assert found.is_feasible == (needs <= limit_us * 0.9 or found.least_limit_us == limit_us)


@given(paths(), st.integers(1_000, 1_000_000), figures())
def test_the_least_limit_is_one_that_can_be_held(
    hops: tuple[Hop, ...], limit_us: int, measured: Mapping[Hop, Measured]
) -> None:
    everything = {hop: measured.get(hop, Measured(1, 1_000, 1_000, 1_000)) for hop in hops}
    found = split(hops, limit_us, everything)
    assert split(hops, found.least_limit_us, everything).is_feasible
    if found.least_limit_us > 2:
        assert not split(hops, found.least_limit_us - 2, everything).is_feasible


@given(
    st.lists(st.tuples(paths(), st.integers(1_000, 2_000_000), st.booleans()), min_size=1, max_size=4),
    figures(),
    st.integers(0, 3),
)
def test_budgets_hold_every_constraint(
    constraints: list[tuple[tuple[Hop, ...], int, bool]], measured: Mapping[Hop, Measured], kept: int
) -> None:
    """Buffers wait by the smallest of all budgets, so no path gets longer than its limit."""
    wanted = [
        Wanted(f"c{number}", hops, limit_us, 15_000, by_p99=by_p99)
        for number, (hops, limit_us, by_p99) in enumerate(constraints)
    ]
    splits = {each.name: split(each.hops, each.limit_us, measured, by_p99=each.by_p99) for each in wanted[:kept]}
    splits |= at_once(splits_of(wanted[kept:], dict(splits), measured))
    budgets = at_once(budgets_of(wanted, splits))
    assert set(budgets) == {hop.stream for each in wanted for hop in each.hops}
    for each in wanted:
        found = splits[each.name]
        needs = sum(part.need_us for part in found.parts.values())
        waits = sum(budgets[hop.stream].granted_us(hop) for hop in each.hops)
        assert waits == 0 or needs > each.limit_us or needs + waits <= each.limit_us * 0.9 + 1
        assert waits <= each.limit_us * 0.9
