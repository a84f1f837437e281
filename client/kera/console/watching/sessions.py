"""Sessions of signed-in users, for as long as they do something. Bounded, and never stored.

A session is known by a token that only its browser has. It ends when it was idle for too long, with the clock that goes
on while the host is suspended, and takes its connections, and so the only place that knows the password, with it.
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
    """Somebody who has signed in."""

    token: str = field(repr=False)
    user: str
    view: T
    """The user's view of the cluster."""
    used_s: float


class Sessions(Generic[T]):
    """All of them, by their tokens. What leaves it is returned, to be closed."""

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
        """The session of a token; None: there is none, or not any more. `used`: somebody does something with it now."""
        session = self._by_token.get(token)
        if session is None or self._is_idle(session):
            return None
        if used:
            session.used_s = self._now_s()
        return session

    def check_room(self, user: str) -> None:
        """Raise `Refused` if nobody else can sign in now."""
        alive = [each for each in self._by_token.values() if not self._is_idle(each)]
        if len(alive) >= self._sessions_max and sum(each.user == user for each in alive) < self._per_user_max:
            raise Refused(
                503,
                "Too many people are signed in",
                f"{self._sessions_max} sessions are the most that this console has.",
                "Sign out of sessions that you do not need, or wait: unused sessions end.",
            )

    def begin(self, user: str, view: T) -> tuple[Session[T], list[Session[T]]]:
        """A new session; and those that have ended for it. Raises `Refused`."""
        self.check_room(user)
        session = Session(secrets.token_urlsafe(TOKEN_BYTES), user, view, self._now_s())
        mine = sorted((each for each in self._by_token.values() if each.user == user), key=lambda each: each.used_s)
        ended = [self._by_token.pop(each.token) for each in mine[: max(0, len(mine) - self._per_user_max + 1)]]
        self._by_token[session.token] = session
        return session, ended

    def end(self, token: str) -> Session[T] | None:
        """Somebody signs out."""
        return self._by_token.pop(token, None)

    def expire(self) -> list[Session[T]]:
        """Those that nobody has used for too long."""
        idle = [each for each in self._by_token.values() if self._is_idle(each)]
        return [self._by_token.pop(each.token) for each in idle]

    def end_all(self) -> list[Session[T]]:
        """The console stops."""
        ended, self._by_token = list(self._by_token.values()), {}
        return ended

    def _is_idle(self, session: Session[T]) -> bool:
        return self._now_s() - session.used_s >= self._idle_s
