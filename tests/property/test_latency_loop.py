"""Constraints that are planned again and again, over streams whose load changes.

The model of a stream: a number of chunks are filled at a time, each at a rate of records, until it is full or its
allowed wait is over. Other hops take their own time, plus their allowed wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kera.coordinator.latency.budgets import Budget, Wanted, budgets_of, splits_of
from kera.coordinator.latency.filling import Filling
from kera.coordinator.latency.splitting import GATHER, HAND_OVER, REPLICATE, Hop, Measured, hops_of
from kera.core.base.turns import at_once

WINDOW_MS = 15_000
SETTLED_WINDOWS = 2
"""The number of windows after which a constraint is held again when the load has changed."""
CHUNK_RECORDS = 256


@dataclass
class Stream:
    """See the head of this module."""

    buffers: int
    """Chunks that are filled at a time."""
    records_per_s: float
    """Into each of them."""
    needs_us: Mapping[int, int] = field(default_factory=dict)
    """The needs of other hops, for any budget."""

    def measured(self, hop: Hop, budget: Budget | None) -> Measured:
        """The time of a hop under a budget; without one writers do not wait."""
        granted_us = 0 if budget is None else budget.granted_us(hop)
        fill_us = min(granted_us, CHUNK_RECORDS / self.records_per_s * 1e6)
        chunks_per_s = self.buffers / (1 / self.records_per_s + fill_us / 1e6)
        took_us = fill_us if hop.hop == GATHER else self.needs_us.get(hop.hop, 500)
        if hop.hop in {HAND_OVER, REPLICATE}:
            took_us += granted_us
        chunks = max(1, round(chunks_per_s * WINDOW_MS / 1000))
        return Measured(chunks, round(took_us), round(took_us), WINDOW_MS, granted_us)

    def chunks_per_s(self, gather_us: float) -> float:
        fill_us = min(gather_us, CHUNK_RECORDS / self.records_per_s * 1e6)
        return self.buffers / (1 / self.records_per_s + fill_us / 1e6)


class Loop:
    """Constraints, and the times and budgets of the last window."""

    def __init__(self, streams: dict[str, Stream], wanted: list[Wanted]) -> None:
        self.streams = streams
        self.wanted = wanted
        self.filling = Filling()
        self.now_s = 0.0
        self.budgets: dict[str, Budget] = {}
        self.took_us: dict[str, int] = {}

    def window(self) -> None:
        """Pass one window: measure under the present budgets, and plan the next ones."""
        hops = {hop for each in self.wanted for hop in each.hops}
        self.now_s += WINDOW_MS / 1000
        measured = {hop: self.streams[hop.stream].measured(hop, self.budgets.get(hop.stream)) for hop in hops}
        for hop, found in measured.items():
            if hop.hop == GATHER:
                self.filling.look(hop.stream, found.mean_us, found.p99_us, WINDOW_MS / 1000, self.now_s)
                measured[hop] = found._replace(most_us=self.filling.most_us(hop.stream))
        self.took_us = {each.name: sum(measured[hop].mean_us for hop in each.hops) for each in self.wanted}
        splits = at_once(splits_of(self.wanted, {}, measured))
        self.budgets = at_once(budgets_of(self.wanted, splits))
        for stream, budget in self.budgets.items():
            self.filling.grant(stream, budget.gather_us, self.now_s)

    def hold(self) -> bool:
        return all(self.took_us[each.name] <= each.limit_us for each in self.wanted)


@st.composite
def streams(draw: st.DrawFn) -> dict[str, Stream]:
    return {
        name: Stream(
            draw(st.integers(1, 1024)),
            draw(st.floats(0.1, 100_000)),
            {hop: draw(st.integers(0, 5_000)) for hop in range(2, 7)},
        )
        for name in ("a", "b", "c")
    }


def constraint(name: str, names: str, limit_us: int) -> Wanted:
    return Wanted(name, tuple(hops_of([(each, f"{each}-group") for each in names])), limit_us, WINDOW_MS, by_p99=False)


@given(
    streams(),
    st.integers(100_000, 2_000_000),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.5, 2.0), st.integers(0, 10_000)), max_size=8),
)
def test_constraints_are_held_two_windows_after_any_change(
    streams: dict[str, Stream], limit_us: int, changes: list[tuple[str, float, int]]
) -> None:
    loop = Loop(streams, [constraint("all", "abc", limit_us), constraint("one", "b", limit_us // 2)])
    for name, factor, need_us in [("a", 1.0, 500), *changes]:
        stream = loop.streams[name]
        stream.records_per_s *= factor
        stream.needs_us = {**stream.needs_us, 6: need_us}
        for _ in range(SETTLED_WINDOWS):
            loop.window()
        loop.window()
        assert loop.hold(), loop.took_us


@given(streams(), st.integers(100_000, 2_000_000))
def test_budgets_settle_within_four_windows(streams: dict[str, Stream], limit_us: int) -> None:
    loop = Loop(streams, [constraint("all", "abc", limit_us)])
    for _ in range(5):
        loop.window()
    before = {name: budget.gather_us for name, budget in loop.budgets.items()}
    for _ in range(3):
        loop.window()
    for name, budget in loop.budgets.items():
        full_us = CHUNK_RECORDS / streams[name].records_per_s * 1e6
        useful = (min(full_us, before[name]), min(full_us, budget.gather_us))  # a longer wait gains nothing
        assert abs(useful[0] - useful[1]) <= max(0.15 * useful[0], 2_000), (before, loop.budgets)


@given(st.integers(1, 100), st.tuples(*[st.integers(1, 9)] * 3), st.integers(420_000, 800_000))
def test_hardly_any_other_split_makes_fewer_chunks(scale: int, buffers: tuple[int, ...], limit_us: int) -> None:
    """For streams whose chunks do not get full: three windows are enough to find the split."""
    busy = {name: Stream(scale * count, 400.0) for name, count in zip("abc", buffers, strict=True)}
    loop = Loop(busy, [constraint("all", "abc", limit_us)])
    for _ in range(4):
        loop.window()
    grants = {name: budget.gather_us for name, budget in loop.budgets.items()}
    assert all(50_000 <= grant_us <= 500_000 for grant_us in grants.values())  # chunks have many records, and room
    made = sum(stream.chunks_per_s(grants[name]) for name, stream in busy.items())
    rest_us = sum(grants.values())
    for first in range(1, 20):
        for second in range(1, 20 - first):
            shares = (first, second, 20 - first - second)
            others = sum(
                stream.chunks_per_s(rest_us * share / 20) for stream, share in zip(busy.values(), shares, strict=True)
            )
            assert made <= others * 1.1
