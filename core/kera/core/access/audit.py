"""What happened to access: who could not authenticate, who was denied what, and what was changed.

Each is one line of the log, of the logger ``kera.audit``, with fixed fields. They tell nobody's secrets: no password,
token or key ever gets here. What a peer repeats is bounded, so nobody can fill a log with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from kera.core.telemetry import get_logger

log = get_logger("kera.audit")

Kind = Literal["authentication_failed", "denied", "changed"]
REPEATED_S = 10.0
"""The same of the same peer is told once in so many seconds."""
REMEMBERED_MAX = 1024
"""Of what was told: beyond that, the oldest is forgotten."""


class Audit:
    """Of one daemon."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._told: dict[tuple[str, ...], float] = {}
        self.failed = 0
        """Authentications."""
        self.denied = 0
        self.changed = 0

    def authentication_failed(self, peer: str, transport: str, reason: str, *, user: str = "") -> None:
        """Somebody has shown nothing that is good."""
        self.failed += 1
        if self._is_news("failed", peer.rpartition(":")[0], user, reason):
            log.warning("authentication failed", peer=peer, transport=transport, user=user, reason=reason)

    def denied_to(self, principal: str, peer: str, operation: str, resource: str, reason: str) -> None:
        """Somebody may not do something."""
        self.denied += 1
        if self._is_news("denied", principal, operation, resource):
            log.warning("denied", principal=principal, peer=peer, operation=operation, resource=resource, reason=reason)

    def changed_by(self, principal: str, peer: str, what: str, **fields: object) -> None:
        """Somebody has changed users, rules or tokens, or the cluster."""
        self.changed += 1
        log.info("changed", principal=principal, peer=peer, what=what, **fields)

    def _is_news(self, *what: str) -> bool:
        now_s = self._now_s()
        if now_s < self._told.get(what, now_s - 1) + REPEATED_S and what in self._told:
            return False
        self._told.pop(what, None)
        while len(self._told) >= REMEMBERED_MAX:
            del self._told[next(iter(self._told))]
        self._told[what] = now_s
        return True
