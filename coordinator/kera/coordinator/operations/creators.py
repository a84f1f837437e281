"""The creators of streams: how many streams each may have, and how much may be stored in them."""

from __future__ import annotations

from kera.coordinator.cluster.catalog import Catalog
from kera.coordinator.cluster.shares import Shares, beyond_share
from kera.coordinator.operations.stored import StoredBytes
from kera.core.access.identity import Identity
from kera.server.access.guard import CALLER, Guard
from kera.server.access.totals import exceeded
from kera.v1 import common_pb2


class Creators:
    """See the head of this module."""

    def __init__(self, catalog: Catalog, stored: StoredBytes, guard: Guard | None, shares: Shares) -> None:
        """`guard`: in front of the coordinator; None: security is off, and nobody asks who creates what."""
        self._catalog = catalog
        self._stored = stored
        self._guard = guard
        self._shares = shares

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

    def check_share(self, stream: common_pb2.StreamInfo) -> None:
        """Whether a new stream, or a larger description of one, leaves room for streams of others.

        Raises `QuotaExceeded`.
        """
        share = self._shares.of(self._catalog.bytes_max)
        if share is None or not stream.created_by:
            return
        size = self._catalog.bytes_created(stream)
        if size > share:
            raise beyond_share(
                stream.created_by,
                f"would have descriptions of streams of {size} bytes",
                share,
                "descriptions",
                "delete streams, or create some with fewer streamlets",
            )
