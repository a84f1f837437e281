"""Users, tokens and rules as the coordinator has sent them. Replaced as a whole, never changed.

The remaining time of a token is counted from its arrival here, on a clock of this host that is never set.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from kera.core.access.identity import Identity
from kera.core.access.rights import Rights
from kera.core.errors import AuthenticationFailed
from kera.v1 import access_pb2 as messages

TOKEN_PREFIX = "kera_"  # noqa: S105 - a prefix, and not a secret
"""First characters of a delegation token: KerA, and programs that look for leaked secrets, recognise it by them."""


NO_QUOTA = messages.Quota()


class Token(NamedTuple):
    """A delegation token as its owner shows it: ``kera_<id>_<secret>``."""

    token_id: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> Token | None:
        """Return the token in `text`; None: it is not a token."""
        token_id, _, secret = text.removeprefix(TOKEN_PREFIX).partition("_")
        return cls(token_id, secret) if text.startswith(TOKEN_PREFIX) and token_id and secret else None

    def __str__(self) -> str:
        """Return the token with its secret, as it is shown to a daemon."""
        return f"{TOKEN_PREFIX}{self.token_id}_{self.secret}"

    def __repr__(self) -> str:
        """Return it without the secret."""
        return f"Token({self.token_id})"

    @property
    def digest(self) -> bytes:
        """The digest of the secret, which may be given to others: a random secret cannot be guessed from it."""
        return hashlib.sha256(self.secret.encode()).digest()


class Accounts:
    """An immutable snapshot of the users, tokens and rules that the coordinator sent."""

    def __init__(self, table: messages.AccessTable, coordinator_epoch: int, now_s: float) -> None:
        """`now_s`: when the table has arrived, on the boot-time clock."""
        self.version = table.version
        self.coordinator_epoch = coordinator_epoch
        self.rights = Rights(table.rules)
        self.default_quota = table.default_quota
        self.decoys = table.decoys
        self._users = {user.name: user for user in table.users}
        self._tokens = {token.token_id: token for token in table.tokens}
        self._told_s = now_s

    def verifier_of(self, name: str) -> messages.ScramVerifier | None:
        """Return the verifier of a user's password; None: the user has no password, or does not exist."""
        user = self._users.get(name)
        return user.scram if user is not None and user.HasField("scram") else None

    def password_version_of(self, name: str) -> int:
        """Return the version of a user's password, see `UserRecord`; 0: the user has none, or does not exist."""
        user = self._users.get(name)
        return user.password_version if user is not None and user.HasField("scram") else 0

    def roles_of(self, name: str) -> frozenset[str]:
        """Return the roles that were given to a user."""
        user = self._users.get(name)
        return frozenset(user.roles) if user is not None else frozenset()

    def quota_of(self, name: str, *, is_super: bool = False) -> messages.Quota:
        """Return the quota of a user: its own, or, unless it is a super user, the default one."""
        user = self._users.get(name)
        if user is not None and user.HasField("quota"):
            return user.quota
        return NO_QUOTA if is_super else self.default_quota

    def owner_of(self, text: str, now_s: float) -> Identity:
        """Return the identity for a delegation token. Raises `AuthenticationFailed`."""
        shown = Token.parse(text)
        token = None if shown is None else self._tokens.get(shown.token_id)
        if shown is None or token is None or not hmac.compare_digest(token.digest, shown.digest):
            raise AuthenticationFailed("the token is not known: it was revoked, has expired, or was never given")
        until_s = self._until_s(token)
        if now_s >= until_s:
            raise AuthenticationFailed(f"token {token.token_id} has expired; get a new one", token_id=token.token_id)
        return Identity(
            token.owner,
            how="token",
            brought=frozenset(token.owner_roles),
            token_id=token.token_id,
            narrowed=tuple(token.resources),
            until_s=until_s,
        )

    def until_s(self, token_id: str) -> float | None:
        """Return until when a token is valid, on the boot-time clock; None: it is no longer known."""
        token = self._tokens.get(token_id)
        return None if token is None else self._until_s(token)

    def _until_s(self, token: messages.TokenRecord) -> float:
        return self._told_s + token.expires_in_ms / 1000
