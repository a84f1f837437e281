"""The usage of a daemon by each principal, and the delays of principals that exceed their quota.

Each daemon counts separately. The cost of a request is known only when it is served. So it is served in any case, and
use beyond a rate becomes a debt (``quotas``). Until the debt is paid, the answer waits, and so do later requests of the
connection: nothing is refused, but a client that sends too much is slowed down. All connections of a principal that
have debts pay at the same time, each an equal part of the rate.

An answer waits for at most `WAIT_S_MAX`, and the debt that is left then is forgiven, as the client would otherwise take
the daemon for dead. So each connection gets a request through every `WAIT_S_MAX`, however small a rate is.

Concurrent calls over gRPC cannot be held back in this way, so each is served only when it is paid, after earlier calls
of its connection; a call that is not paid after `CALL_S_MAX` is refused.

A client that leaves before it has paid leaves its debt behind, for as long as it would have waited: until then no
request of the principal is served. So reconnecting does not evade a quota.

Clients of the daemon's own user on its host, and data pushed to them, count as daemons, which have no quotas.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
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
"""Maximum time that an answer waits: a client with five requests in flight, as ours, gets the answer to the last one
within its time-out of 10 s."""
CALL_S_MAX = 5.0
"""Maximum time that a call over gRPC waits, less than the time-out of our clients."""
READ_S = 1.0
"""An answer to a reader has no more than its rate allows in this time, except for a single chunk."""
UINT32_MAX = (1 << 32) - 1
REQUESTS, BYTES_IN, BYTES_OUT = "requests_per_s", "bytes_in_per_s", "bytes_out_per_s"
RATES = (REQUESTS, BYTES_IN, BYTES_OUT)

KEPT_MAX = 4096
"""Usages that are kept when nothing refers to them: the burst of a user's rates is not to begin anew."""

QuotaOf = Callable[[Identity], messages.Quota]


class Wait:
    """The wait of a request with debts: its answer waits, and its connection is held."""

    def __init__(self, usage: Usage, peer: Peer, s_max: float) -> None:
        self._usage = usage
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self.is_paid = False
        """Whether it has ended because all debts are paid."""
        self.ms = 0
        """How long it was, in milliseconds, once it is over."""
        self._debts: set[Debt] = set()
        self._gone = False
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._latest = self._loop.call_later(s_max, self.end)
        peer.hold()

    @property
    def is_over(self) -> bool:
        """Whether the wait has ended."""
        return self._over.done()

    def add(self, debt: Debt) -> None:
        """Wait for this debt, too."""
        self._debts.add(debt)

    def paid(self, debt: Debt) -> None:
        """Note that a debt is paid; the wait ends with the last one."""
        self._debts.discard(debt)
        if not self._debts:
            self.is_paid = True
            self.end()

    def end(self) -> None:
        """End the wait: debts that are left are forgiven. May be called repeatedly."""
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
        """Note that the caller is gone. May be called repeatedly, also when the wait is over."""
        if self._over.done() or self._gone:
            return
        self._gone = True
        self._usage.left_behind.add(self)
        self._peer.release()

    async def over(self) -> None:
        """Wait until it is over."""
        await asyncio.shield(self._over)


class Usage:
    """The usage of one principal at this daemon, as long as it is remembered."""

    def __init__(self, who: Identity) -> None:
        self.who = who
        self.quota = NO_QUOTA
        self.connections = 0
        self.requests = self.bytes_in = self.bytes_out = 0
        self.waits = 0
        """Number of answers that have waited."""
        self.waited_s = 0.0
        """How long they have waited altogether."""
        self.rates: dict[str, Rate] = {}
        """The rates of its quota, by their names in `RATES`; empty: there are no limits."""
        self.left_behind: set[Wait] = set()
        """Waits of requests whose callers have left before they had paid."""
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
        """Count a peer's connection. Raises `QuotaExceeded` if there are too many.

        `again`: it is counted already, and `disconnect` will be called for the previous count.
        """
        if not peer.lasts:
            return
        if not again and self.quota.HasField("connections") and self.connections >= self.quota.connections:
            has = f"has {self.connections} connection{'' if self.connections == 1 else 's'} to this daemon"
            raise exceeded(self.who.principal, "connections", self.quota.connections, has)
        self.connections += 1

    def disconnect(self, peer: Peer) -> None:
        """Stop counting a peer's connection."""
        self.connections -= peer.lasts

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def is_used_up(self) -> bool:
        """Whether a request now would have to wait: by the rate of requests or of incoming bytes."""
        now_s = asyncio.get_running_loop().time()
        return any(self.rates[what].is_used_up(now_s) for what in (REQUESTS, BYTES_IN) if what in self.rates)

    @property
    def read_bytes_max(self) -> int | None:
        """Maximum of one answer; None: unlimited."""
        return max(1, min(int(self.quota.bytes_out_per_s * READ_S), UINT32_MAX)) if BYTES_OUT in self.rates else None

    def asked(self, peer: Peer, bytes_in: int, requests: int = 1) -> list[Debt]:
        """Count requests; return the debts for them."""
        self.requests += requests
        self.bytes_in += bytes_in
        return self._use(peer, ((REQUESTS, requests), (BYTES_IN, bytes_in))) if self.rates else []

    def answered(self, peer: Peer, bytes_out: int) -> list[Debt]:
        """Count bytes of chunks that are about to be sent; return the debts for them."""
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
        """Make the connection wait until `debts`, at least one, are paid; return the wait.

        `wait`: a wait that is not over, to which the debts are added. `s_max`: the maximum, None: `WAIT_S_MAX`.
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
        """Wait until the debts that were left behind are paid; return how long that took, in ms."""
        begun_s = asyncio.get_running_loop().time()
        for wait in list(self.left_behind):
            await wait.over()
        return math.ceil((asyncio.get_running_loop().time() - begun_s) * 1000)

    def forgive(self, debt: Debt) -> None:
        """Forgive a debt for which a request has waited."""
        if self._waiting.pop(debt, None) is not None:
            debt.forgive()
            self._look_again()

    def _paid(self, debt: Debt) -> None:
        wait = self._waiting.pop(debt, None)
        if wait is not None:
            wait.paid(debt)

    def _look(self) -> None:
        """End the waits whose debts are paid."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for rate in list(self.rates.values()):
            for debt in rate.settled(now_s):
                self._paid(debt)
        self._look_again()

    def _look_again(self) -> None:
        """Set the timer to the time at which the next debt is paid."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times_s = [at_s for rate in self.rates.values() if (at_s := rate.next_s()) is not None]
        if self._waiting and times_s:
            self._timer = asyncio.get_running_loop().call_at(min(times_s), self._look)


def debtor_of(peer: Peer) -> Hashable:
    """Return the connection as a debtor; streams and calls of gRPC over the same connection are one debtor."""
    return peer.address if peer.transport == "grpc" else id(peer)


class Usages:
    """The usages of all principals that are remembered. Belongs to an event loop."""

    def __init__(self, quota_of: QuotaOf) -> None:
        self._quota_of = quota_of
        self._of: WeakValueDictionary[tuple[str, bool], Usage] = WeakValueDictionary()
        """The usages by user, and whether it is a super user."""
        self._kept: OrderedDict[tuple[str, bool], Usage] = OrderedDict()
        """The usages that were asked for last; others go when nothing refers to them."""

    def __len__(self) -> int:
        return len(self._of)

    def of(self, who: Identity) -> Usage | None:
        """Return the usage of an identity; None: it is a daemon, which is not counted."""
        if who.is_daemon:
            return None
        key = who.user, who.is_super
        usage = self._of.get(key)
        if usage is None:
            usage = self._of[key] = Usage(who)
            usage.limit(self._quota_of(who))
        self._kept[key] = usage
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return usage

    def apply(self) -> None:
        """Apply quotas that may have changed."""
        for usage in list(self._of.values()):
            usage.limit(self._quota_of(usage.who))

    def busiest(self, count: int) -> list[Usage]:
        """Return the usages with the most bytes, and then with the most requests."""
        return nlargest(
            count, list(self._of.values()), key=lambda each: (each.bytes_in + each.bytes_out, each.requests)
        )
