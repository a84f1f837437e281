"""The creators of streams: how many streams each may have, and how much may be stored in them."""

from __future__ import annotations

from kera.coordinator.cluster.catalog import Catalog
from kera.coordinator.operations.stored import StoredBytes
from kera.core.access.guard import CALLER, Guard
from kera.core.access.identity import Identity
from kera.core.access.totals import exceeded


class Creators:
    """See the head of this module."""

    def __init__(self, catalog: Catalog, stored: StoredBytes, guard: Guard | None) -> None:
        """`guard`: in front of the coordinator; None: security is off, and nobody asks who creates what."""
        self._catalog = catalog
        self._stored = stored
        self._guard = guard

    def caller(self) -> Identity | None:
        """The identity that creates the requested stream; None: a daemon, or unknown."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        return None if who is None or who.is_daemon else who

    def check(self, who: Identity | None) -> None:
        """Whether somebody may have another stream. Raises `QuotaExceeded`."""
        if who is None or self._guard is None:
            return
        quota = self._guard.quota_of(who)
        count = self._catalog.created[who.principal]
        if quota.HasField("streams") and count >= quota.streams:
            has = f"has created {count} stream{'' if count == 1 else 's'}"
            raise exceeded(who.principal, "streams", quota.streams, has)
        stored = self._stored.of(who.principal)
        if quota.HasField("stored_bytes") and stored >= quota.stored_bytes:
            has = f"has stored {stored} bytes in its streams"
            raise exceeded(who.principal, "stored_bytes", quota.stored_bytes, has)
