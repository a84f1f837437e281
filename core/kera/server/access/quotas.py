"""A rate at which a principal may use a resource. Pure: callers pass the time.

Nothing is refused. Use beyond the rate becomes a debt, which is paid off as time goes by; the caller has to make the
debtor wait until then. Up to a second's worth (`BURST_S`) that was not used may be used later, at once.

Several debtors share one rate: the connections of a principal. They pay at the same time, each an equal part of the
rate, and not one after the other: a debtor with a small debt has paid soon, whatever the others owe, and a debtor with
a large debt, from several requests at once, gets no more than others. (This is processor sharing, with a clock on which
each debtor pays 1 per tick: the time at which a debt is paid on this clock is known when the debt is made, and does not
change when others are added.)
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count

BURST_S = 1.0
_ROUNDING = 1e-3
"""A part of a byte, or of a request; a debt below that counts as paid."""


class Debt:
    """The debt of one debtor for one use of the rate."""

    __slots__ = ("_rate", "debtor", "due", "over")

    def __init__(self, rate: Rate, debtor: Hashable, due: float) -> None:
        self._rate = rate
        self.debtor = debtor
        self.due = due
        """The amount paid by each debtor (`Rate._paid`) at which this debt is paid."""
        self.over = False
        """Whether it was paid or forgiven."""

    def forgive(self) -> None:
        """Cancel the debt."""
        if not self.over:
            self._rate.end(self)


class _Account:
    """The account of a debtor."""

    __slots__ = ("debts", "due")

    def __init__(self) -> None:
        self.debts = 0
        """Number of debts that are not over."""
        self.due = 0.0
        """`Debt.due` of the last debt."""


class Rate:
    """A rate that debtors share: use beyond it becomes a debt, which time pays off. It refuses nothing."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._now_s = now_s
        self._left = per_s * BURST_S
        """The amount that may be used without a debt; 0 as long as there are debts."""
        self._accounts: dict[Hashable, _Account] = {}
        """The accounts of all debtors with debts."""
        self._paid = 0.0
        """The amount paid by each debtor since the first of them became one."""
        self._debts: list[tuple[float, int, Debt]] = []
        """A heap of debts, by due; some may be over."""
        self._numbers = count()
        self._settled: list[Debt] = []
        """Paid debts that `settled` has not returned yet."""

    def change(self, per_s: float, now_s: float) -> None:
        """Change the rate from now on; debts stay."""
        self._pass(now_s)
        self._per_s = per_s
        self._left = min(self._left, per_s * BURST_S)

    def use(self, debtor: Hashable, amount: float, now_s: float) -> Debt | None:
        """Note that `amount` is used. Return the debt for it; None: nothing is owed."""
        self._pass(now_s)
        if amount <= self._left:
            self._left -= amount
            return None
        owed, self._left = amount - self._left, 0.0
        account = self._accounts.get(debtor)
        if account is None:
            account = self._accounts[debtor] = _Account()
        account.debts += 1
        account.due = max(account.due, self._paid) + owed
        debt = Debt(self, debtor, account.due)
        heapq.heappush(self._debts, (debt.due, next(self._numbers), debt))
        return debt

    def is_used_up(self, now_s: float) -> bool:
        """Return whether any use now would become a debt."""
        self._pass(now_s)
        return self._left <= 0

    def settled(self, now_s: float) -> list[Debt]:
        """Return the debts that were paid since the last call, in the order of payment."""
        self._pass(now_s)
        settled, self._settled = self._settled, []
        return settled

    def next_s(self) -> float | None:
        """Return when the next debt will be paid, unless new debts are added; None: there are no debts."""
        self._drop_over()
        if not self._debts:
            return None
        return self._now_s + (self._debts[0][0] - self._paid) * len(self._accounts) / self._per_s

    def forgive_all(self) -> list[Debt]:
        """Cancel all debts, and return them."""
        forgiven = [debt for _, _, debt in self._debts if not debt.over]
        for debt in forgiven:
            debt.forgive()
        return forgiven

    def _pass(self, now_s: float) -> None:
        """Distribute the income since the last call among the debtors, and keep the rest."""
        earned = max(0.0, now_s - self._now_s) * self._per_s
        self._now_s = max(now_s, self._now_s)
        while self._accounts:
            self._drop_over()
            debtors = len(self._accounts)
            due, _, debt = self._debts[0]
            needed = (due - self._paid) * debtors
            if needed > earned + _ROUNDING:
                self._paid += earned / debtors
                return
            earned = max(0.0, earned - needed)
            self._paid = due
            self.end(debt)
            self._settled.append(debt)
        self._left = min(self._left + earned, self._per_s * BURST_S)

    def _drop_over(self) -> None:
        while self._debts and self._debts[0][2].over:
            heapq.heappop(self._debts)

    def end(self, debt: Debt) -> None:
        """End a debt of this rate that is not over."""
        debt.over = True
        account = self._accounts[debt.debtor]
        account.debts -= 1
        if not account.debts:
            del self._accounts[debt.debtor]
            if not self._accounts:
                self._paid = 0.0
                self._debts.clear()
