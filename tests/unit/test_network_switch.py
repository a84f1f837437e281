"""The treatment of frames by the switch between hosts, and the completeness of the rounds of the `network` chaos."""

from itertools import islice, product
from typing import Any, cast

from tests.chaos.partitions import DELAY, DELAY_S, FROM, HALF_OPEN, KINDS, LOSS, LOSSES, PAIRS, TO, plan
from tests.network_switch import FRAMES_MAX, Link, Switch, Wires


def test_whole_links_pass_all_frames_at_once() -> None:
    wires = Wires(3, seed=1)
    assert all(wires.send(from_, to, b"frame", 0.0) for from_, to in [(0, 1), (1, 0), (2, 1)])
    assert wires.wait_s(0.0) is None


def test_a_link_is_cut_in_one_direction_until_it_is_healed() -> None:
    wires = Wires(2, seed=1)
    wires.set(0, 1, Link(is_cut=True))
    assert not wires.send(0, 1, b"frame", 0.0)
    assert wires.send(1, 0, b"frame", 0.0)
    wires.heal()
    assert wires.send(0, 1, b"frame", 0.0)


def test_a_lossy_link_loses_its_share_of_frames() -> None:
    wires = Wires(2, seed=1)
    wires.set(0, 1, Link(loss=0.3))
    arrived = sum(wires.send(0, 1, b"frame", 0.0) for _ in range(10_000))
    assert 6_700 < arrived < 7_300


def test_delayed_frames_arrive_in_order_and_on_time_even_after_healing() -> None:
    wires = Wires(2, seed=1)
    wires.set(0, 1, Link(delay_s=0.2))
    for number, at_s in enumerate((0.0, 0.0, 0.05)):
        assert not wires.send(0, 1, bytes([number]), at_s)
    wires.heal()
    assert wires.wait_s(0.15) == 0.2 - 0.15
    assert list(wires.arrived(0.199)) == []
    assert list(wires.arrived(0.2)) == [(1, b"\0"), (1, b"\1")]
    assert list(wires.arrived(1.0)) == [(1, b"\2")]


def test_frames_beyond_the_bound_are_dropped() -> None:
    wires = Wires(2, seed=1)
    wires.set(0, 1, Link(delay_s=1.0))
    for _ in range(FRAMES_MAX + 7):
        wires.send(0, 1, b"frame", 0.0)
    assert wires.dropped == 7
    assert len(list(wires.arrived(1.0))) == FRAMES_MAX


def test_each_pair_of_roles_breaks_in_each_way_before_any_repeats() -> None:
    count = len(PAIRS) * len(KINDS)
    for begin in (0, count):
        rounds = list(islice(plan(seed=3), begin, begin + count))
        assert {(each.pair, each.kind) for each in rounds} == set(product(PAIRS, KINDS))
        for each in rounds:
            assert bool(each.loss) == (each.kind == LOSS)
            assert not each.loss or each.loss in LOSSES
            assert each.killed == (each.others if each.kind == HALF_OPEN else ())
            assert not set(each.ones) & set(each.others)


def test_a_seed_determines_the_rounds() -> None:
    assert list(islice(plan(seed=5), 50)) == list(islice(plan(seed=5), 50)) != list(islice(plan(seed=6), 50))


def test_a_break_sets_its_links() -> None:
    rounds = list(islice(plan(seed=1), len(PAIRS) * len(KINDS)))
    hosts: Any = {name: name for each in rounds for name in each.ones + each.others}
    for each in rounds:
        recorder = Recorder()
        each.apply(cast("Switch", recorder), hosts)
        one, other = each.ones[0], each.others[0]
        assert ((one, other) in recorder.links) == (each.kind != FROM)
        assert ((other, one) in recorder.links) == (each.kind != TO)
        link = next(iter(recorder.links.values()))
        assert link.is_cut == (each.kind not in (LOSS, DELAY))
        assert link.delay_s == (DELAY_S if each.kind == DELAY else 0.0)


class Recorder:
    """Stands in for a switch."""

    def __init__(self) -> None:
        self.links: dict[tuple[str, str], Link] = {}

    def set(self, link: Link, from_: str, to: str) -> None:
        self.links[from_, to] = link
