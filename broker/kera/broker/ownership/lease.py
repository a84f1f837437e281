"""The lease: how long this broker may take chunks of replicated streams.

When the coordinator has not heard from a broker for some time, it gives the broker's replicated streamlets to others. A
broker that cannot reach the coordinator stops before that: it counts the lease from the sending of its last answered
request, so the lease ends earlier here than at the coordinator. A suspended host wakes up without a lease, because the
lease's clock continues meanwhile. See "Alive or not" in docs/cluster.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kera.core.base.clock import boottime_s


class Lease:
    """The broker's lease, on this host's boot-time clock."""

    def __init__(self, now_s: Callable[[], float] = boottime_s) -> None:
        self._now_s = now_s
        self.until_s = math.inf
        """When the lease ends; infinite if the coordinator gives no lease."""

    def renew(self, sent_s: float, lease_ms: int) -> None:
        """Renew the lease by the answer to a request that was sent at `sent_s`; 0 ms: no limit."""
        self.until_s = sent_s + lease_ms / 1000 if lease_ms else math.inf

    @property
    def holds(self) -> bool:
        """Whether the broker may take chunks now."""
        return self._now_s() < self.until_s
