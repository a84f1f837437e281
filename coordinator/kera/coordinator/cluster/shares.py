"""How much of what the whole cluster has one principal may take, so that one user cannot use it up for all others.

Whoever administers the cluster, and daemons, have no share: somebody can always make room. Without security nobody is
known, and nobody has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kera.core.access.rights import CLUSTER, Operation
from kera.core.errors import QuotaExceeded
from kera.server.access.guard import CALLER, Guard

SETTING = "principal_share_percent"


class Limit(NamedTuple):
    """Something of which the whole cluster has so much, and each principal a share."""

    quota: str
    """As errors name it."""
    would_have: str
    """In words, with {} for the figure."""
    way_out: str


DESCRIPTIONS = Limit(
    "descriptions",
    "descriptions of streams of {} bytes",
    "delete streams, or create some with fewer streamlets",
)
MEMORY_DOMAINS = Limit(
    "memory_domains", "streams in {} memory domains", "put the stream into one of those, or delete all streams of one"
)
CONSUMER_GROUPS = Limit("consumer_groups", "{} consumer groups", "delete unused ones")
SCHEMAS = Limit("schemas", "schemas of {} bytes", "delete unused subjects")
PRODUCER_NAMES = Limit(
    "producer_names",
    "{} producers with a name",
    "reuse a name, or give none: only a producer that restarts needs a name",
)
LATENCY_CONSTRAINTS = Limit("latency_constraints", "{} latency constraints", "delete unused ones")
LATENCY_STREAMS = Limit("latency_streams", "latency constraints about {} streams", "delete unused constraints")


class Shares:
    """Checks that a principal stays within its share of the cluster's limits. Administrators are exempt."""

    def __init__(self, guard: Guard | None, percent: int) -> None:
        """`guard`: in front of the coordinator; None: security is off."""
        self._guard = guard
        self._percent = percent

    def caller(self) -> str:
        """The principal whose share a request counts for; empty: nobody's."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        return "" if who is None or who.is_daemon else who.principal

    def check(self, limit: Limit, total: int, principal: str, would_have: Callable[[], int]) -> None:
        """Check whether the caller may let a principal have so much of what the cluster has `total` of.

        `would_have` is only called if there is a share. Raises `QuotaExceeded`.
        """
        share = self._of(total)
        if share is None or not principal or (figure := would_have()) <= share:
            return
        raise QuotaExceeded(
            f"{principal} would have {limit.would_have.format(figure)}, and the share of one principal is {share};"
            f" {limit.way_out}, or have the coordinator run with a larger {SETTING}",
            quota=limit.quota,
            value=share,
            principal=principal,
        )

    def _of(self, total: int) -> int | None:
        """The caller's share of `total`; None: it has no share, and may have all."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        if who is None or self._guard is None or who.is_daemon or who.is_super:
            return None
        if self._guard.may(who, Operation.ADMINISTER, CLUSTER):
            return None
        return max(1, total * self._percent // 100)


NO_SHARES = Shares(None, 100)
"""Without security: nobody has a share."""
