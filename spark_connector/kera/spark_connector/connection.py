"""How a process of Spark's reaches its cluster, and as whom. Pure.

The driver goes by what options, the environment and the settings file say. Executors get a `Connection` that the driver
has made from its own: see ``delegation``.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKEN_LIFETIME_MS = 8 * 3600 * 1000
"""Lifetime of the executors' tokens, unless an option says otherwise."""
CREDENTIALS = ("user", "password_file", "token_file")
"""Settings of the client that say who it is, of those that options can give."""


class Secret:
    """A text that nobody sees who prints it, or what it is in; it goes along when that is pickled."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text."""
        return self._text

    def __repr__(self) -> str:
        """Without the text."""
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
    """Settings of the client that options have given, all of them names of files or of a user."""
    token: Secret | None = None
    """To show in place of all else that says who it is; None: what `given` or the process's own environment says."""
    token_lifetime_ms: int | None = None
    """Lifetime of the tokens that are made for executors; None: not given."""
    drivers_ca: str = ""
    """File of authorities that the driver goes by: for executors to which nobody has named one."""

    @property
    def files(self) -> dict[str, str]:
        """Paths of certificates, by the names of the settings."""
        return {name: value for name, value in self.given if name not in CREDENTIALS}

    @property
    def credentials(self) -> dict[str, str]:
        """The credentials of `given`."""
        return {name: value for name, value in self.given if name in CREDENTIALS}

    def with_token(self, token: Secret, drivers_ca: str = "") -> Connection:
        """For executors: it shows the token, and has nothing else of who the driver is."""
        return Connection(self.bootstrap, tuple(self.files.items()), token, drivers_ca=drivers_ca)
