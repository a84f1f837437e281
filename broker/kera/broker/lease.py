"""For how long this broker may take chunks that others could get to see.

The coordinator gives a broker's replicated streamlets to others when it has not heard of it for some time. A broker
that cannot reach the coordinator stops by itself before: the lease is counted from when a request was sent that has
been answered, so it ends earlier here than there. See "Alive or not" in docs/cluster.md.
"""

from __future__ import annotations

import math


class Lease:
    """Until when, on this host's monotonic clock."""

    def __init__(self) -> None:
        self.until_s = math.inf
        """A coordinator that gives no lease sets no limit."""

    def renew(self, sent_s: float, lease_ms: int) -> None:
        """A request that was sent at `sent_s` was answered; 0 ms: no limit."""
        self.until_s = sent_s + lease_ms / 1000 if lease_ms else math.inf
