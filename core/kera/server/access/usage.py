"""The usage of a daemon by each principal, and the delays of principals that exceed their quota.

Each daemon counts for itself. What a request costs is known when it is served; so it is served in any case, and what is
beyond a rate is owed (``quotas``). Until that is paid, the answer waits, and so does what comes next over the
connection: nothing is refused, and who sends too much is slowed down. All connections of a principal that owe something
pay at the same time, each an equal part of the rate.

An answer waits for at most `WAIT_S_MAX`, and what is owed by then is forgiven: who asks would take the daemon for dead
otherwise. So each connection gets a request through every `WAIT_S_MAX`, however small a rate is.

Nothing holds calls of gRPC back that come side by side, so they are served only when they are paid, each behind those
that came before over its connection; what has not been by then is refused after `CALL_S_MAX`.

Whoever goes before it has paid leaves that behind, for as long as it would have waited: until then no request of the
principal is served. To connect anew is not a way around a quota.

Clients of the daemon's own user on its host, and what is pushed to those, count as daemons: they have no quotas.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from heapq import nlargest
from weakref import WeakValueDictionary

from kera.core.access.accounts import NO_QUOTA
from kera.core.access.identity import Identity
from kera.core.rpc.method import Peer
from kera.server.access.quotas import Debt, Rate
from kera.server.access.totals import exceeded
from kera.v1 import access_pb2 as messages

WAIT_S_MAX = 2.0
"""A client that keeps five requests in flight, as ours do, gets the answer to the last one in less than the 10 s for
which it waits."""
CALL_S_MAX = 5.0
"""Less than that for which our clients wait for an answer."""
READ_S = 1.0
"""A reader is given no more at once than it may have in so long, but for a single chunk."""
UINT32_MAX = (1 << 32) - 1
REQUESTS, BYTES_IN, BYTES_OUT = "requests_per_s", "bytes_in_per_s", "bytes_out_per_s"
RATES = (REQUESTS, BYTES_IN, BYTES_OUT)

QuotaOf = Callable[[Identity], messages.Quota]


class Wait:
    """A request whose cost was more than was left: its answer waits, and its connection."""

    def __init__(self, usage: Usage, peer: Peer, s_max: float) -> None:
        self._usage = usage
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self.is_paid = False
        """It was over as all was paid."""
        self.ms = 0
        """For how long it was, when it is over."""
        self._debts: set[Debt] = set()
        self._gone = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._latest = self._loop.call_later(s_max, self.end)
        peer.hold()

    @property
    def is_over(self) -> bool:
        """Whether nothing waits any more."""
        return self._over.done()

    def add(self, debt: Debt) -> None:
        """Wait for this, too."""
        self._debts.add(debt)

    def paid(self, debt: Debt) -> None:
        """One of what it waits for."""
        self._debts.discard(debt)
        if not self._debts:
            self.is_paid = True
            self.end()

    def end(self) -> None:
        """Wait no longer: what is still owed is forgiven. May be repeated."""
        if self._over.done():
            return
        self._over.set_result(None)
        self._latest.cancel()
        for debt in self._debts:
            self._usage.forgive(debt)
        waited_s = self._loop.time() - self._begun_s
        self.ms = math.ceil(waited_s * 1000)
        self._usage.waited_s += waited_s
        if self._gone:
            self._usage.left_behind.discard(self)
        else:
            self._peer.release()

    def leave(self) -> None:
        """Nobody is there any more to be answered. May be repeated, and when it is over."""
        if self._over.done() or self._gone:
            return
        self._gone = True
        self._usage.left_behind.add(self)
        self._peer.release()

    async def over(self) -> None:
        """Wait until it is over."""
        await asyncio.shield(self._over)


class Usage:
    """The usage of one principal at this daemon, for as long as it is remembered."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.quota = NO_QUOTA
        self.connections = 0
        self.requests = self.bytes_in = self.bytes_out = 0
        self.waits = 0
        """Answers that have waited."""
        self.waited_s = 0.0
        """They have, altogether."""
        self.rates: dict[str, Rate] = {}
        """By what they are of; empty: it may use as much as it likes."""
        self.left_behind: set[Wait] = set()
        """Waits of requests whose callers have gone before they had paid."""
        self._waiting: dict[Debt, Wait] = {}
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, quota: messages.Quota) -> None:
        """Set the quota from now on."""
        self.quota = quota
        if self.rates:
            self._look()
        wanted = {what: max(1, getattr(quota, what)) for what in RATES if quota.HasField(what)}  # type: ignore[arg-type]
        for what in self.rates.keys() - wanted.keys():
            gone = self.rates.pop(what)
            for debt in gone.forgive_all():
                self._paid(debt)
        if not wanted:
            return
        now_s = asyncio.get_running_loop().time()
        for what, per_s in wanted.items():
            known = self.rates.get(what)
            if known is None:
                self.rates[what] = Rate(per_s, now_s)
            else:
                known.change(per_s, now_s)
        self._look()

    # -- connections -----------------------------------------------------------------------------------------------

    def connect(self, peer: Peer, *, again: bool = False) -> None:
        """A peer is its own from now on. Raises `QuotaExceeded` for a connection that is one too many.

        `again`: it was before, and it will be said that it is not any more.
        """
        if not peer.lasts:
            return
        if not again and self.quota.HasField("connections") and self.connections >= self.quota.connections:
            has = f"has {self.connections} connection{'' if self.connections == 1 else 's'} to this daemon"
            raise exceeded(self.who.principal, "connections", self.quota.connections, has)
        self.connections += 1

    def disconnect(self, peer: Peer) -> None:
        """It is not any more."""
        self.connections -= peer.lasts

    # -- what is used ----------------------------------------------------------------------------------------------

    @property
    def is_used_up(self) -> bool:
        """Whether what is asked now will have to wait: of requests, or of bytes that come in."""
        now_s = asyncio.get_running_loop().time()
        return any(self.rates[what].is_used_up(now_s) for what in (REQUESTS, BYTES_IN) if what in self.rates)

    @property
    def read_bytes_max(self) -> int | None:
        """Maximum of one answer; None: unlimited."""
        return max(1, min(int(self.quota.bytes_out_per_s * READ_S), UINT32_MAX)) if BYTES_OUT in self.rates else None

    def asked(self, peer: Peer, bytes_in: int, requests: int = 1) -> list[Debt]:
        """Requests have come; returns what is owed for them."""
        self.requests += requests
        self.bytes_in += bytes_in
        return self._use(peer, ((REQUESTS, requests), (BYTES_IN, bytes_in))) if self.rates else []

    def answered(self, peer: Peer, bytes_out: int) -> list[Debt]:
        """Chunks are about to be sent; returns what is owed for that."""
        self.bytes_out += bytes_out
        return self._use(peer, ((BYTES_OUT, bytes_out),)) if self.rates else []

    def _use(self, peer: Peer, amounts: tuple[tuple[str, int], ...]) -> list[Debt]:
        now_s, debtor = asyncio.get_running_loop().time(), debtor_of(peer)
        debts = []
        for what, amount in amounts:
            rate = self.rates.get(what)
            if rate is not None and amount and (debt := rate.use(debtor, amount, now_s)) is not None:
                debts.append(debt)
        return debts

    # -- waiting ---------------------------------------------------------------------------------------------------

    def wait(self, peer: Peer, debts: list[Debt], wait: Wait | None = None, *, s_max: float | None = None) -> Wait:
        """Have the connection wait until debts are paid, of which there are some; in `wait`, if that is not over.

        `s_max`: for no longer than that, `WAIT_S_MAX` if it is None.
        """
        if wait is None:
            wait = Wait(self, peer, WAIT_S_MAX if s_max is None else s_max)
            self.waits += 1
        for debt in debts:
            wait.add(debt)
            self._waiting[debt] = wait
        self._look_again()
        return wait

    async def others_have_paid(self) -> int:
        """Wait until those who have left anything behind have paid; returns for how many ms that was."""
        begun_s = asyncio.get_running_loop().time()
        for wait in list(self.left_behind):
            await wait.over()
        return math.ceil((asyncio.get_running_loop().time() - begun_s) * 1000)

    def forgive(self, debt: Debt) -> None:
        """Nobody waits for it any more."""
        if self._waiting.pop(debt, None) is not None:
            debt.forgive()
            self._look_again()

    def _paid(self, debt: Debt) -> None:
        wait = self._waiting.pop(debt, None)
        if wait is not None:
            wait.paid(debt)

    def _look(self) -> None:
        """End the waits of all that have paid."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for rate in list(self.rates.values()):
            for debt in rate.settled(now_s):
                self._paid(debt)
        self._look_again()

    def _look_again(self) -> None:
        """When the next debt is paid."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times_s = [at_s for rate in self.rates.values() if (at_s := rate.next_s()) is not None]
        if self._waiting and times_s:
            self._timer = asyncio.get_running_loop().call_at(min(times_s), self._look)


def debtor_of(peer: Peer) -> Hashable:
    """The connection: streams and calls of gRPC have it in common."""
    return peer.address if peer.transport == "grpc" else id(peer)


class Usages:
    """The usages of all principals that are remembered. Belongs to an event loop."""

    def __init__(self, quota_of: QuotaOf) -> None:
        self._quota_of = quota_of
        self._of: WeakValueDictionary[tuple[str, bool], Usage] = WeakValueDictionary()
        """By user, and whether it is a super user; for as long as anybody has one."""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, who: Identity) -> Usage | None:
        """The usage of an identity; None: it is not counted, as it is a daemon."""
        if who.is_daemon:
            return None
        key = who.user, who.is_super
        usage = self._of.get(key)
        if usage is None:
            usage = self._of[key] = Usage(who)
            usage.limit(self._quota_of(who))
        return usage

    def apply(self) -> None:
        """Quotas may have changed."""
        for usage in list(self._of.values()):
            usage.limit(self._quota_of(usage.who))

    def busiest(self, count: int) -> list[Usage]:
        """Those that have moved the most bytes, and then, that have asked the most."""
        return nlargest(
            count, list(self._of.values()), key=lambda each: (each.bytes_in + each.bytes_out, each.requests)
        )
