"""How much of what the whole cluster has one principal may take, so that one user cannot use it up for all others.

Whoever administers the cluster, and daemons, have no share: somebody can always make room. Without security nobody is
known, and nobody has one.
"""

from __future__ import annotations

from kera.core.access.rights import CLUSTER, Operation
from kera.core.errors import QuotaExceeded
from kera.server.access.guard import CALLER, Guard

SETTING = "principal_share_percent"


class Shares:
    """See the head of this module."""

    def __init__(self, guard: Guard | None, percent: int) -> None:
        """`guard`: in front of the coordinator; None: security is off."""
        self._guard = guard
        self._percent = percent

    def caller(self) -> str:
        """The principal whose share a request counts for; empty: nobody's."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        return "" if who is None or who.is_daemon else who.principal

    def of(self, limit: int) -> int | None:
        """How much of `limit` who asks may have; None: there is no share."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        if who is None or self._guard is None or who.is_daemon or who.is_super:
            return None
        if self._guard.may(who, Operation.ADMINISTER, CLUSTER):
            return None
        return max(1, limit * self._percent // 100)


NO_SHARES = Shares(None, 100)
"""Without security: nobody has a share."""


def beyond_share(principal: str, has: str, share: int, what: str, way_out: str) -> QuotaExceeded:
    """`has`: what the principal has, or would have, in words; `share`: of `what`."""
    return QuotaExceeded(
        f"{principal} {has}, and the share of one principal is {share}; {way_out}, or have the coordinator run with a"
        f" larger {SETTING}",
        quota=what,
        value=share,
        principal=principal,
    )
