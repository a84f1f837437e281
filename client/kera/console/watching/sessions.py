"""Sessions of signed-in users. Their number is bounded, and they are never stored.

A session is identified by a token that only its browser has. It ends if it was idle for too long, on a clock that also
runs while the host is suspended. Its connections, the only place that has the password, end with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kera.console import limits
from kera.console.web.problems import Refused

T = TypeVar("T")
TOKEN_BYTES = 32


@dataclass
class Session(Generic[T]):
    """The session of a signed-in user."""

    token: str = field(repr=False)
    user: str
    view: T
    """The user's view of the cluster."""
    used_s: float


class Sessions(Generic[T]):
    """All sessions, by their tokens. Methods that end sessions return them, so that the caller closes their views."""

    def __init__(
        self,
        now_s: Callable[[], float],
        *,
        sessions_max: int = limits.SESSIONS_MAX,
        per_user_max: int = limits.SESSIONS_PER_USER_MAX,
        idle_s: float = limits.SESSION_IDLE_S,
    ) -> None:
        self._now_s = now_s
        self._sessions_max, self._per_user_max, self._idle_s = sessions_max, per_user_max, idle_s
        self._by_token: dict[str, Session[T]] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def find(self, token: str, *, used: bool = True) -> Session[T] | None:
        """Return the session of a token; None: there is none, or it has ended. `used`: whether this counts as use."""
        session = self._by_token.get(token)
        if session is None or self._is_idle(session):
            return None
        if used:
            session.used_s = self._now_s()
        return session

    def check_room(self, user: str) -> None:
        """Raise `Refused` if there are too many sessions for `user` to sign in now."""
        alive = [each for each in self._by_token.values() if not self._is_idle(each)]
        if len(alive) >= self._sessions_max and sum(each.user == user for each in alive) < self._per_user_max:
            raise Refused(
                503,
                "Too many people are signed in",
                f"{self._sessions_max} sessions are the most that this console has.",
                "Sign out of sessions that you do not need, or wait: unused sessions end.",
            )

    def begin(self, user: str, view: T) -> tuple[Session[T], list[Session[T]]]:
        """Begin a session. Return it, and the sessions that had to end for it. Raises `Refused`."""
        self.check_room(user)
        session = Session(secrets.token_urlsafe(TOKEN_BYTES), user, view, self._now_s())
        mine = sorted((each for each in self._by_token.values() if each.user == user), key=lambda each: each.used_s)
        ended = [self._by_token.pop(each.token) for each in mine[: max(0, len(mine) - self._per_user_max + 1)]]
        self._by_token[session.token] = session
        return session, ended

    def end(self, token: str) -> Session[T] | None:
        """End a session, and return it; None: there is none."""
        return self._by_token.pop(token, None)

    def expire(self) -> list[Session[T]]:
        """End the sessions that were idle for too long, and return them."""
        idle = [each for each in self._by_token.values() if self._is_idle(each)]
        return [self._by_token.pop(each.token) for each in idle]

    def end_all(self) -> list[Session[T]]:
        """End all sessions, and return them."""
        ended, self._by_token = list(self._by_token.values()), {}
        return ended

    def _is_idle(self, session: Session[T]) -> bool:
        return self._now_s() - session.used_s >= self._idle_s
