"""The share of the cluster's limits that one principal may use, so that no user takes all the room of the others.

Administrators of the cluster, and daemons, have no such limit: somebody can always make room. Without security there
are no principals, and no shares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kera.core.access.rights import CLUSTER, Operation
from kera.core.errors import QuotaExceeded
from kera.server.access.guard import CALLER, Guard

SETTING = "principal_share_percent"


class Limit(NamedTuple):
    """A limit of the whole cluster, of which each principal has a share."""

    quota: str
    """The limit's name in errors."""
    would_have: str
    """The limit in words, with {} for the figure."""
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
        """`guard`: the guard of the coordinator; None: security is off."""
        self._guard = guard
        self._percent = percent

    def caller(self) -> str:
        """Return the principal whose share a request counts for; empty: no principal's."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        return "" if who is None or who.is_daemon else who.principal

    def check(self, limit: Limit, total: int, principal: str, would_have: Callable[[], int]) -> None:
        """Raise `QuotaExceeded` if a principal would exceed its share of `limit`, of which the cluster has `total`.

        `would_have` returns the principal's figure after the request; it is only called if the caller has a share.
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
        """Return the caller's share of `total`; None: the caller has no share, and may use all."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        if who is None or self._guard is None or who.is_daemon or who.is_super:
            return None
        if self._guard.may(who, Operation.ADMINISTER, CLUSTER):
            return None
        return max(1, total * self._percent // 100)


NO_SHARES = Shares(None, 100)
"""For a cluster without security: no principal has a share."""
