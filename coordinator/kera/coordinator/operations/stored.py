"""How much is stored in the streams that each principal has created, as brokers report it, and whose quotas are
used up.

The sums are as of the last heartbeats of living brokers. They are not stored: after a failover each broker reports
again, and until all have, streams that took no chunks before still take none.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kera.coordinator.cluster.membership import BrokerMembers
from kera.coordinator.ids import Launch
from kera.core.access.accounts import Accounts
from kera.core.access.identity import USER, Identity
from kera.server.access.guard import Guard
from kera.v1 import coordinator_pb2 as messages

UINT64_MAX = (1 << 64) - 1


class Told(NamedTuple):
    """The answer to a broker."""

    full: list[messages.FullPrincipal]
    """Principals of its streams whose quota is used up."""
    incomplete: bool
    """There may be more, because not all brokers have reported everything."""


class StoredBytes:
    """Sums the bytes that brokers store for each creator, and finds the creators whose quota is used up."""

    def __init__(self, brokers: BrokerMembers, guard: Guard | None) -> None:
        """`guard`: the guard of the coordinator; None: security is off, and there are no quotas."""
        self._brokers = brokers
        self._guard = guard
        self._told: dict[Launch, dict[str, int]] = {}
        """The bytes that a launch has reported, by principal."""
        self._complete: set[Launch] = set()
        """Launches that have reported all that they have."""
        self._totals: Counter[str] = Counter()
        self._limits: dict[str, int | None] = {}
        """Quotas by principal, as of `_accounts`; None: no quota."""
        self._accounts: Accounts | None = None

    def of(self, principal: str) -> int:
        """Return the bytes of a principal, as far as they are known."""
        self._forget_lost()
        return self._totals[principal]

    def most(self, count: int) -> list[tuple[str, int]]:
        """Return the principals that store the most, and how much."""
        return self._totals.most_common(count)

    def heard(self, request: messages.HeartbeatRequest) -> Told:
        """Take the report of a living broker."""
        if self._guard is None:
            return Told([], incomplete=False)
        self._forget_lost()
        launch = Launch(request.broker_id, request.broker_epoch)
        self._take_back(launch)
        told = self._told[launch] = {each.principal: each.bytes for each in request.stored}
        self._totals.update(told)
        if not request.stored_incomplete:
            self._complete.add(launch)
        incomplete = any(
            Launch(broker_id, self._brokers.epoch(broker_id)) not in self._complete
            for broker_id in self._brokers.live_ids()
        )
        return Told(self._full(self._guard, told), incomplete)

    def _full(self, guard: Guard, told: dict[str, int]) -> list[messages.FullPrincipal]:
        accounts = guard.authenticator.accounts
        if accounts is not self._accounts:
            self._accounts = accounts
            self._limits.clear()
        full = []
        for principal in told:
            try:
                limit = self._limits[principal]
            except KeyError:
                limit = self._limits[principal] = _limit(guard, principal)
            if limit is not None and (stored := self._totals[principal]) >= limit:
                has = min(stored, UINT64_MAX)
                full.append(messages.FullPrincipal(principal=principal, stored_bytes=has, quota_bytes=limit))
        return full

    def _forget_lost(self) -> None:
        for launch in [launch for launch in self._told if not self._brokers.is_current(launch)]:
            self._take_back(launch)

    def _take_back(self, launch: Launch) -> None:
        self._complete.discard(launch)
        for principal, size in self._told.pop(launch, {}).items():
            self._totals[principal] -= size
            if not self._totals[principal]:
                del self._totals[principal]


def _limit(guard: Guard, principal: str) -> int | None:
    who = guard.authenticator.known(Identity(principal.removeprefix(USER)))
    quota = guard.quota_of(who)
    return quota.stored_bytes if quota.HasField("stored_bytes") else None
