"""Authentication by any kind of evidence: a certificate, a password, a token, or the user of a process.

An identity is valid only as long as the evidence for it: `holds` says whether it still is.
"""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache

from kera.core.access.accounts import TOKEN_PREFIX, Accounts
from kera.core.access.certificates import CertificateNames, names_in
from kera.core.access.cluster_secret import ClusterSecret
from kera.core.access.identity import CHANGED, DAEMON_USER, EXPIRED, ROLE, Identity, check_name
from kera.core.access.passwords import REFUSED, Logins
from kera.core.base.crowd import Crowd
from kera.core.errors import AuthenticationFailed, InvalidArgument, KeraError, Unavailable
from kera.v1 import access_pb2 as messages

SESSION_PREFIX = "kera-session_"
SESSION_S = 3600.0
"""Lifetime of a session, after which a caller over gRPC has to show its password again."""
SESSIONS_MAX = 10_000
"""Maximum of sessions; beyond it, the oldest session of the user with the most sessions ends."""
NO_ACCOUNTS = Accounts(messages.AccessTable(), 0, 0.0)


class Authenticator:
    """Authentication at one daemon. Belongs to an event loop."""

    def __init__(
        self,
        names: CertificateNames,
        *,
        now_s: Callable[[], float],
        super_users: frozenset[str] = frozenset(),
        cluster_secret: ClusterSecret | None = None,
        of_jwt: Callable[[str], Identity] | None = None,
        not_told: Callable[[], KeraError] | None = None,
    ) -> None:
        """`super_users`: their principals; `cluster_secret`: authenticates daemons, besides certificates; `of_jwt`:
        returns the identity for a JSON web token, or raises `AuthenticationFailed`; `not_told`: returns the error for
        users before this daemon knows the users; `now_s`: the boot-time clock.
        """
        self._names = names
        self.now_s = now_s
        self._super_users = super_users
        self.cluster_secret = cluster_secret
        self._of_jwt = of_jwt
        self.not_told = not_told or _not_told
        """The error for users before this daemon knows the users."""
        self._logins = Logins(self._verifiers_of, now_s, decoys=lambda: self.accounts.decoys)
        self._sessions: dict[str, Identity] = {}
        self._crowd = Crowd[str](SESSIONS_MAX)
        self.accounts = NO_ACCOUNTS

    @property
    def is_told(self) -> bool:
        """Whether the coordinator has sent the users."""
        return self.accounts is not NO_ACCOUNTS

    # -- authentication --------------------------------------------------------------------------------------------

    def of_certificate(self, certificate: bytes) -> Identity | None:
        """Return the identity for a certificate that TLS has verified; None: unknown."""
        names = names_in(certificate)
        if self._names.is_daemon(names):
            return Identity("", how="certificate", is_daemon=True)
        user = self._names.user(names)
        return self._user(user, "certificate") if user else None

    def of_process(self, user_id: int) -> Identity | None:
        """Return the identity of the process at the other end of a unix socket; None: unknown.

        The daemon's own user can read all of its data anyway, so it has all rights.
        """
        if user_id in {0, os.geteuid()}:
            return Identity("", how="socket", is_super=True, is_daemon=True)
        name = _name_of(user_id)
        return self._user(name, "socket") if name else None

    def of_token(self, text: str) -> Identity:
        """Return the identity for a token.

        Raises `AuthenticationFailed`, and `Unavailable` before this daemon knows the users.
        """
        if text.startswith(SESSION_PREFIX):
            session = self._sessions.get(text)
            if session is None or not self.holds(session):
                self._sessions.pop(text, None)
                self._crowd.remove(text)
                raise AuthenticationFailed("this session has ended; authenticate again", session_ended=True)
            return session
        if text.startswith(TOKEN_PREFIX):
            self._check_told()
            return self.known(self.accounts.owner_of(text, self.now_s()))
        if self._of_jwt is None:
            raise AuthenticationFailed(
                "unknown token: it does not belong to this cluster, and jwt_keys sets no other issuer"
            )
        return self.known(self._of_jwt(text))

    def begin_login(self, client_first: bytes, peer: object, host: str = "") -> tuple[int, bytes]:
        """Begin a password exchange; return its id and the answer.

        Raises `AuthenticationFailed`, and the error of `not_told`.
        """
        return self._logins.begin(client_first, peer, host)

    def end_login(self, exchange_id: int, client_final: bytes, peer: object) -> tuple[Identity, bytes]:
        """End a password exchange; return the identity and the answer. Raises `AuthenticationFailed`."""
        name, answer, verifier = self._logins.end(exchange_id, client_final, peer)
        if verifier not in self._verifiers_of(name):
            raise AuthenticationFailed(REFUSED, user=name)  # the password has changed since the exchange began
        if name == DAEMON_USER and self.cluster_secret is not None:
            version = self.cluster_secret.version_of(verifier)
            return Identity("", how="password", is_daemon=True, password_version=version), answer
        version = self.accounts.password_version_of(name)
        return self._user(name, "password")._replace(password_version=version), answer

    def session_for(self, identity: Identity) -> tuple[str, float]:
        """Return a session that stands for an identity from now on, and its lifetime in seconds."""
        session = SESSION_PREFIX + secrets.token_urlsafe(32)
        crowded_out = self._crowd.add(session, identity.user)
        if crowded_out is not None:
            del self._sessions[crowded_out]
        until_s = min(identity.until_s, self.now_s() + SESSION_S)
        self._sessions[session] = identity._replace(until_s=until_s)
        return session, until_s - self.now_s()

    # -- validity --------------------------------------------------------------------------------------------------

    def holds(self, who: Identity) -> bool:
        """Return whether an identity is still valid, and has not expired."""
        return not self.why_ended(who)

    def why_ended(self, who: Identity) -> str:
        """Return why an identity is no longer valid; empty: it is, see `holds`."""
        if self.now_s() >= who.until_s:
            return EXPIRED
        return "" if self.is_still(who) else CHANGED

    def is_still(self, who: Identity) -> bool:
        """Return whether the same credentials would give the same identity now, regardless of expiry."""
        if who.is_daemon:
            secret = self.cluster_secret
            return who.how != "password" or secret is None or secret.is_taken(who.password_version)
        if not self.is_told:
            return True
        if who.token_id and self.accounts.until_s(who.token_id) is None:
            return False
        if who.how == "password" and self.accounts.password_version_of(who.user) != who.password_version:
            return False
        return who.roles == self._roles_of(who)

    def _user(self, name: str, how: str) -> Identity:
        return self.known(Identity(name, how=how))

    def known(self, who: Identity) -> Identity:
        """Return an identity with its roles, and whether it is a super user."""
        roles = self._roles_of(who)
        mine = {who.principal, *(f"{ROLE}{role}" for role in roles)}
        return who._replace(roles=roles, is_super=not self._super_users.isdisjoint(mine))

    def _roles_of(self, who: Identity) -> frozenset[str]:
        return who.brought | self.accounts.roles_of(who.user)

    def _verifiers_of(self, name: str) -> Sequence[messages.ScramVerifier]:
        if name == DAEMON_USER:
            return [] if self.cluster_secret is None else self.cluster_secret.verifiers()
        self._check_told()  # now, since an exchange of a user that is not known yet would end as a wrong password
        verifier = self.accounts.verifier_of(name)
        return [] if verifier is None else [verifier]

    def _check_told(self) -> None:
        if not self.is_told:
            raise self.not_told()

    def forget(self) -> None:
        """Forget the users and rules."""
        self.accounts = NO_ACCOUNTS


def _not_told() -> KeraError:
    return Unavailable("this daemon has not heard from the coordinator yet which users there are; try again")


@lru_cache(256)
def _name_of(user_id: int) -> str:
    """Return the name of a user of this host; empty: it has no name, or an invalid one."""
    try:
        return check_name("user", pwd.getpwuid(user_id).pw_name)
    except (KeyError, InvalidArgument):
        return ""
