"""The audit of access: failed authentications, denials, and changes.

Each event is one line of the log, from the logger ``kera.audit``, with fixed fields, and an `AuditEvent` for other
receivers. Events contain no secrets: no password, token or key ever gets here. Peers cannot fill the log: repeated
events of a peer are reported once in `REPEATED_S`, and failures and denials at most `TOLD_MAX` times each in that time.
The next reported event says how many were left out. Names that peers send are cut to the length of the longest name.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from kera.core.access.audit_events import AuditEvent
from kera.core.base.telemetry import get_logger

log = get_logger("kera.audit")

REPEATED_S = 10.0
"""The same event of the same peer is reported once in this many seconds."""
TOLD_MAX = 100
"""Maximum of reported failures, and of denials, in that time: an attacker can name another user in each attempt."""
TEXT_CHARS_MAX = 256
"""Maximum of each text of an event that peers can influence. Existing names are shorter."""
REMEMBERED_MAX = 1024
"""Maximum of reported events; beyond it, the oldest is forgotten."""


class _Few:
    """Bounds how many events are reported."""

    def __init__(self) -> None:
        self._since_s = -REPEATED_S
        self._told = 0
        """Events reported since then."""
        self._untold = 0
        """Events left out since the last reported one."""

    def untold(self, now_s: float) -> int | None:
        """Count an event; return how many were left out before it; None: this event is to be left out, too."""
        if now_s >= self._since_s + REPEATED_S:
            self._since_s, self._told = now_s, 0
        if self._told >= TOLD_MAX:
            self._untold += 1
            return None
        self._told += 1
        untold, self._untold = self._untold, 0
        return untold


class Audit:
    """The audit of one daemon."""

    def __init__(self, now_s: Callable[[], float], put: Callable[[AuditEvent], None] = lambda _: None) -> None:
        """`put`: called with each reported event."""
        self._now_s = now_s
        self._put = put
        self._told: dict[tuple[str, ...], float] = {}
        self._failures, self._denials = _Few(), _Few()
        self.failed = 0
        """Number of failed authentications."""
        self.denied = 0
        self.changed = 0

    def authentication_failed(self, peer: str, transport: str, reason: str, *, user: str = "") -> None:
        """Report that a peer has shown invalid credentials."""
        self.failed += 1
        user, reason = _cut(user), _cut(reason)
        if not self._is_news("failed", peer.rpartition(":")[0], user, reason):
            return
        untold = self._failures.untold(self._now_s())
        if untold is not None:
            fields = {"peer": peer, "transport": transport, "user": user, "reason": reason}
            log.warning("authentication failed", **fields, untold=untold)
            principal = f"user:{user}" if user else ""
            self._put(AuditEvent("authentication_failed", principal, peer, transport, reason=_with(untold, reason)))

    def denied_to(self, principal: str, peer: str, operation: str, resource: str, reason: str) -> None:
        """Report that a principal was denied an operation."""
        self.denied += 1
        resource, reason = _cut(resource), _cut(reason)
        if not self._is_news("denied", principal, operation, resource):
            return
        untold = self._denials.untold(self._now_s())
        if untold is not None:
            fields = {"principal": principal, "peer": peer, "operation": operation, "resource": resource}
            log.warning("denied", **fields, reason=reason, untold=untold)
            said = _with(untold, reason)
            self._put(AuditEvent("denied", principal, peer, operation=operation, resource=resource, reason=said))

    def changed_by(self, principal: str, peer: str, what: str, **fields: object) -> None:
        """Report that a principal has changed users, rules or tokens."""
        self.changed += 1
        log.info("changed", principal=principal, peer=peer, what=what, **fields)
        self._put(AuditEvent("changed", principal, peer, operation=what, reason=json.dumps(fields, default=str)))

    def done_by(self, principal: str, peer: str, operation: str, resource: str) -> None:
        """Report a change of streams, consumer groups or members; calls that poll its progress are left out."""
        self.changed += 1
        resource = _cut(resource)
        if self._is_news("changed", principal, operation, resource):
            log.info("changed", principal=principal, peer=peer, what=operation, resource=resource)
            self._put(AuditEvent("changed", principal, peer, operation=operation, resource=resource))

    def _is_news(self, *what: str) -> bool:
        now_s = self._now_s()
        if now_s < self._told.get(what, now_s - 1) + REPEATED_S and what in self._told:
            return False
        self._told.pop(what, None)
        while len(self._told) >= REMEMBERED_MAX:
            del self._told[next(iter(self._told))]
        self._told[what] = now_s
        return True


def _with(untold: int, reason: str) -> str:
    return f"{reason}; {untold} earlier ones of this kind are not recorded" if untold else reason


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}…"
