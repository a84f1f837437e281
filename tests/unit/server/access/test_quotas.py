"""Rates: usage over a rate becomes debt, and debtors pay it off in equal parts."""

from __future__ import annotations

import pytest

from kera.server.access.quotas import BURST_S, Debt, Rate

PER_S = 1000.0


def owed(rate: Rate, debtor: str, amount: float, now_s: float) -> Debt:
    debt = rate.use(debtor, amount, now_s)
    assert debt is not None
    return debt


def used_up(now_s: float = 0.0) -> Rate:
    """A rate that is used up."""
    rate = Rate(PER_S, now_s)
    assert rate.use("somebody", PER_S * BURST_S, now_s) is None
    assert rate.is_used_up(now_s)
    return rate


def test_a_seconds_worth_may_be_used_at_once() -> None:
    rate = Rate(PER_S, 5.0)
    assert rate.use("a", PER_S * BURST_S, 5.0) is None
    assert rate.use("a", 500, 5.5) is None
    assert rate.use("a", 501, 6.0) is not None


def test_an_unused_rate_saves_up_no_more_than_one_burst() -> None:
    rate = Rate(PER_S, 0.0)
    assert rate.use("a", PER_S * BURST_S, 3600.0) is None
    assert rate.use("a", 1, 3600.0) is not None


def test_a_debt_is_paid_off_over_time() -> None:
    rate = used_up()
    debt = owed(rate, "a", 500, 0.0)
    assert rate.next_s() == pytest.approx(0.5)
    assert rate.settled(0.4) == []
    assert rate.is_used_up(0.4)
    assert rate.settled(0.5) == [debt]
    assert debt.over
    assert rate.next_s() is None
    assert not rate.is_used_up(0.6)


def test_a_large_use_owes_only_the_part_over_the_burst() -> None:
    rate = Rate(PER_S, 0.0)
    owed(rate, "a", PER_S * BURST_S + 100, 0.0)
    assert rate.next_s() == pytest.approx(0.1)


def test_a_small_debt_does_not_wait_for_a_large_one() -> None:
    rate = used_up()
    much = owed(rate, "greedy", 10_000, 0.0)
    little = owed(rate, "polite", 10, 0.0)
    assert rate.next_s() == pytest.approx(0.02)
    assert rate.settled(0.02) == [little]
    assert rate.next_s() == pytest.approx(10.01)
    assert rate.settled(10.01) == [much]


def test_debtors_get_equal_parts_for_small_and_large_uses() -> None:
    """Each debtor asks again right after it has paid."""
    rate, sizes = used_up(), {"large": 700, "small": 20, "tiny": 1}
    got = dict.fromkeys(sizes, 0)
    for name, size in sizes.items():
        owed(rate, name, size, 0.0)
    now_s = 0.0
    while now_s < 60.0:
        now_s = rate.next_s() or 0.0
        for debt in rate.settled(now_s):
            name = str(debt.debtor)
            got[name] += sizes[name]
            owed(rate, name, sizes[name], now_s)
    assert sum(got.values()) == pytest.approx(60 * PER_S, rel=0.05)
    for each in got.values():
        assert each == pytest.approx(60 * PER_S / 3, rel=0.05)


def test_a_debtor_with_several_debts_gets_one_share() -> None:
    rate = used_up()
    several = [owed(rate, "a", 100, 0.0) for _ in range(3)]
    one = owed(rate, "b", 100, 0.0)
    assert rate.settled(0.2) == [several[0], one]
    assert rate.settled(0.3) == [several[1]]
    assert rate.settled(0.4) == [several[2]]


def test_debts_of_a_debtor_are_paid_one_after_the_other() -> None:
    rate = used_up()
    first = owed(rate, "a", 100, 0.0)
    second = owed(rate, "a", 100, 0.05)
    assert rate.settled(0.1) == [first]
    assert rate.settled(0.2) == [second]


def test_a_forgiven_debt_does_not_delay_others() -> None:
    rate = used_up()
    forgiven, other = owed(rate, "a", 10_000, 0.0), owed(rate, "b", 100, 0.0)
    forgiven.forgive()
    forgiven.forgive()
    assert forgiven.over
    assert rate.next_s() == pytest.approx(0.1)
    assert rate.settled(0.1) == [other]
    other.forgive()
    assert rate.next_s() is None
    assert rate.use("a", PER_S * BURST_S, 5.0) is None


def test_all_debts_can_be_forgiven() -> None:
    rate = used_up()
    debts = [owed(rate, name, 100, 0.0) for name in "aab"]
    assert rate.settled(0.2) == [debts[0], debts[2]]
    assert rate.forgive_all() == [debts[1]]
    assert rate.forgive_all() == []
    assert rate.next_s() is None


def test_a_debt_is_paid_at_the_new_rate_after_a_change() -> None:
    rate = used_up()
    debt = owed(rate, "a", 1000, 0.0)
    rate.change(PER_S * 10, 0.5)
    assert rate.next_s() == pytest.approx(0.55)
    assert rate.settled(0.55) == [debt]
    rate.change(10, 100.0)
    assert rate.use("a", 10, 100.0) is None
    owed(rate, "a", 1, 100.0)


def test_a_clock_that_goes_back_earns_nothing() -> None:
    rate = used_up(10.0)
    owed(rate, "a", 100, 5.0)
    assert rate.settled(10.05) == []
    assert rate.next_s() == pytest.approx(10.1)


def test_a_rate_forgets_users_without_debt() -> None:
    rate = Rate(PER_S, 0.0)
    for number in range(10_000):
        rate.use(number, 10, number * 0.01)
    rate.settled(1000.0)
    assert not rate._accounts
    assert not rate._debts
