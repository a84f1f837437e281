"""For how long this broker may take chunks that others could get to see.

The coordinator gives a broker's replicated streamlets to others when it has not heard of it for some time. A broker
that cannot reach the coordinator stops by itself before: the lease is counted from when a request was sent that has
been answered, so it ends earlier here than there. A host that was suspended wakes up without it, as the clock that it
is counted by goes on meanwhile. See "Alive or not" in docs/cluster.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kera.core.base.clock import boottime_s


class Lease:
    """Until when, on this host's boot-time clock."""

    def __init__(self, now_s: Callable[[], float] = boottime_s) -> None:
        self._now_s = now_s
        self.until_s = math.inf
        """A coordinator that gives no lease sets no limit."""

    def renew(self, sent_s: float, lease_ms: int) -> None:
        """A request that was sent at `sent_s` was answered; 0 ms: no limit."""
        self.until_s = sent_s + lease_ms / 1000 if lease_ms else math.inf

    @property
    def holds(self) -> bool:
        """Whether chunks may be taken now."""
        return self._now_s() < self.until_s
