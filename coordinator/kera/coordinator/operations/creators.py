"""The creators of streams: how many streams each may have, and how much may be stored in them."""

from __future__ import annotations

from kera.coordinator.cluster.catalog import MEMORY_DOMAINS_MAX, Catalog
from kera.coordinator.cluster.shares import DESCRIPTIONS, MEMORY_DOMAINS, Shares
from kera.coordinator.operations.stored import StoredBytes
from kera.core.access.identity import Identity
from kera.server.access.guard import CALLER, Guard
from kera.server.access.totals import exceeded
from kera.v1 import common_pb2


class Creators:
    """Checks the creator of a stream against its quotas of streams and of stored bytes."""

    def __init__(self, catalog: Catalog, stored: StoredBytes, guard: Guard | None, shares: Shares) -> None:
        """`guard`: the guard of the coordinator; None: security is off, and creators are unknown."""
        self._catalog = catalog
        self._stored = stored
        self._guard = guard
        self._shares = shares

    def caller(self) -> Identity | None:
        """Return the identity that creates the requested stream; None: a daemon, or unknown."""
        peer = CALLER.get()
        who = None if peer is None or self._guard is None else peer.identity
        return None if who is None or who.is_daemon else who

    def check(self, who: Identity | None) -> None:
        """Check that somebody may create another stream. Raises `QuotaExceeded`."""
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

    def check_share(self, stream: common_pb2.StreamInfo) -> None:
        """Check that a new stream, or a new description of one, leaves room for streams of others.

        Raises `QuotaExceeded`.
        """
        catalog, by, domain = self._catalog, stream.created_by, stream.config.memory_domain
        known = catalog.find(stream.stream_id)
        if known is None or stream.ByteSize() > known.ByteSize():
            self._shares.check(DESCRIPTIONS, catalog.bytes_max, by, lambda: catalog.bytes_created(stream))
        if domain not in catalog.memory_domains():
            self._shares.check(MEMORY_DOMAINS, MEMORY_DOMAINS_MAX, by, lambda: len(catalog.memory_domains(by)) + 1)
