"""The identity of a peer, as authentication establishes it and rights are checked for it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from kera.core.errors import AuthenticationFailed, InvalidArgument

NAME_CHARS_MAX = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]*")
USER, ROLE = "user:", "role:"
DAEMON_USER = ":daemon"
"""The name under which daemons show the secret of their cluster; no user can have it."""
EVERYBODY = "user:*"
"""The principal that stands for all users who have authenticated."""
DAEMONS = "daemons"
"""The name of daemons, in place of a principal."""
NOBODY = "nobody"
"""The name of peers that have not authenticated."""

CHANGED = "your rights have changed, or your credentials are no longer valid: connect again"
"""The message for a connected peer that has lost rights."""
EXPIRED = "the token, or the session made with it, has expired: authenticate again with a valid token"
"""The message for a connected peer whose token or session has expired."""


class Identity(NamedTuple):
    """A peer that has authenticated. Two equal identities have the same rights."""

    user: str
    """Its name; empty: it is a daemon of the cluster."""
    roles: frozenset[str] = frozenset()
    """Roles that it was given here, and roles that it `brought`."""
    how: str = ""
    """How it has authenticated: certificate, password, token, jwt, socket."""
    is_super: bool = False
    """Whether it may do everything except what only daemons may."""
    is_daemon: bool = False
    """Whether it may do everything."""
    brought: frozenset[str] = frozenset()
    """Roles that are in the credentials that it has shown."""
    password_version: int = 0
    """Version of the password, or of the secret of the cluster, that it has shown."""
    token_id: str = ""
    """Id of the delegation token that it has shown."""
    narrowed: tuple[str, ...] = ()
    """The only resources that it may use; empty: there is no such restriction."""
    until_s: float = math.inf
    """Until when it is valid, on the boot-time clock."""

    @property
    def principal(self) -> str:
        """Its name in rules."""
        return f"{USER}{self.user}" if self.user else DAEMONS


def check_name(what: str, name: str) -> str:
    """Return `name` if it is valid for a user or a role; errors call it `what`. Raises `InvalidArgument`."""
    if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
        raise InvalidArgument(
            f"{what} {name!r}: letters, digits, and . _ @ + - within, at most {NAME_CHARS_MAX} of them", name=name
        )
    return name


def not_authenticated() -> AuthenticationFailed:
    """Return the error for a peer that has not authenticated."""
    return AuthenticationFailed(
        f"{NOBODY} has authenticated over this connection: show a certificate, a password or a token (KERA_CLIENT_USER"
        " and KERA_CLIENT_PASSWORD_FILE, KERA_CLIENT_TOKEN_FILE, KERA_CLIENT_TLS_CERT)"
    )


def check_principal(principal: str) -> str:
    """Check the principal of a rule. Raises `InvalidArgument`."""
    if principal != EVERYBODY:
        kind = next((kind for kind in (USER, ROLE) if principal.startswith(kind)), None)
        if kind is None:
            meant = f"; did you mean '{USER}{principal}'?" if _NAME.fullmatch(principal) else ""
            raise InvalidArgument(f"principal {principal!r}: user:NAME, role:NAME, or user:* for everybody{meant}")
        check_name(kind[:-1], principal.removeprefix(kind))
    return principal
