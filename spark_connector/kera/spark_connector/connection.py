"""How a Spark process reaches its cluster, and as which user. Pure.

The driver follows the options, the environment and the settings file. Executors get a `Connection` that the driver
makes from its own: see ``delegation``.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN_LIFETIME_MS = 8 * 3600 * 1000
"""Lifetime of the executors' tokens, unless an option says otherwise."""
CREDENTIALS = ("user", "password_file", "token_file")
"""The client settings with credentials, among those that options can give."""


class Secret:
    """A text that stays hidden when it, or an object that contains it, is printed; pickling keeps it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        """Return a placeholder without the text."""
        return "Secret()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True)
class Connection:
    """The address and credentials with which a Spark process reaches its cluster."""

    bootstrap: str
    """host:port of one or more coordinators, separated by commas."""
    given: tuple[tuple[str, str], ...] = ()
    """The client settings from the options: names of files or of a user."""
    token: Secret | None = None
    """The token that replaces all other credentials; None: use those of `given` or of the process's environment."""
    token_lifetime_ms: int | None = None
    """Lifetime of the tokens that are made for executors; None: not given."""
    drivers_ca: str = ""
    """The driver's file of certificate authorities, for executors that have none configured."""

    @property
    def files(self) -> dict[str, str]:
        """Paths of certificates, by the names of the settings."""
        return {name: value for name, value in self.given if name not in CREDENTIALS}

    @property
    def credentials(self) -> dict[str, str]:
        """The credentials of `given`."""
        return {name: value for name, value in self.given if name in CREDENTIALS}

    def with_token(self, token: Secret, drivers_ca: str = "") -> Connection:
        """Return the connection for executors, which has the token and none of the driver's other credentials."""
        return Connection(self.bootstrap, tuple(self.files.items()), token, drivers_ca=drivers_ca)
