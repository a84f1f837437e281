"""A rate at which somebody may use something. Pure: the time is given.

Nothing is refused. What is used beyond the rate is owed, and paid off as time goes by; who owes is to wait until it has
paid. A second's worth (`BURST_S`) that was not used may be used at once, later.

Several debtors share one rate: the connections of a principal. They pay at the same time, each an equal part of it, and
not one after the other: who owes little has paid soon, whatever the others owe, and who owes much, by several requests
at once, gets no more than one that owes less. (As in processor sharing, by a clock on which each debtor pays 1 per
tick: a debt is paid at a time of this clock that is known when it is made, and does not change when others come.)
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from itertools import count

BURST_S = 1.0
_ROUNDING = 1e-3
"""A part of a byte, or of a request: less than that is not owed."""


class Debt:
    """The debt of one debtor for one thing that it has used."""

    __slots__ = ("_rate", "debtor", "due", "over")

    def __init__(self, rate: Rate, debtor: Hashable, due: float) -> None:
        self._rate = rate
        self.debtor = debtor
        self.due = due
        """The amount that each debtor has paid by then, since there were any debtors."""
        self.over = False
        """It was paid, or forgiven."""

    def forgive(self) -> None:
        """It need not be paid."""
        if not self.over:
            self._rate.end(self)


class _Account:
    """The account of a debtor."""

    __slots__ = ("debts", "due")

    def __init__(self) -> None:
        self.debts = 0
        """That are not over."""
        self.due = 0.0
        """When the last debt is due."""


class Rate:
    """A rate that debtors share: use beyond it becomes a debt, which time pays off. It refuses nothing."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._now_s = now_s
        self._left = per_s * BURST_S
        """That may be used without owing anything; 0 as long as anything is owed."""
        self._accounts: dict[Hashable, _Account] = {}
        """The accounts of all that have debts."""
        self._paid = 0.0
        """By each of them, since there were any."""
        self._debts: list[tuple[float, int, Debt]] = []
        """A heap, with some that are over."""
        self._numbers = count()
        self._settled: list[Debt] = []
        """Paid, and not told yet."""

    def change(self, per_s: float, now_s: float) -> None:
        """Another rate from now on; what is owed stays."""
        self._pass(now_s)
        self._per_s = per_s
        self._left = min(self._left, per_s * BURST_S)

    def use(self, debtor: Hashable, amount: float, now_s: float) -> Debt | None:
        """So much is used. Returns what is owed for that; None: nothing."""
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
        """Whether what is used now will be owed."""
        self._pass(now_s)
        return self._left <= 0

    def settled(self, now_s: float) -> list[Debt]:
        """The debts that were paid since the last call, in that order."""
        self._pass(now_s)
        settled, self._settled = self._settled, []
        return settled

    def next_s(self) -> float | None:
        """When the next debt will be paid if nobody else comes to owe something; None: there is none."""
        self._drop_over()
        if not self._debts:
            return None
        return self._now_s + (self._debts[0][0] - self._paid) * len(self._accounts) / self._per_s

    def forgive_all(self) -> list[Debt]:
        """Nothing of what is owed need be paid; returns what was."""
        forgiven = [debt for _, _, debt in self._debts if not debt.over]
        for debt in forgiven:
            debt.forgive()
        return forgiven

    def _pass(self, now_s: float) -> None:
        """Give the income since the last time to the debtors, and keep the rest."""
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
