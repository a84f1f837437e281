"""The secret with which the daemons of a cluster authenticate: a file with one line, or two while it is replaced.

A daemon shows the secret in the first line to others, and that in the second to daemons that refuse the first; it
accepts either from others. So the secret can be replaced without an interruption: at all daemons, first put the new one
before the old one, and then remove the old one.

The file is read again when it has changed. An invalid file is ignored: the previous secret stays in use, and a warning
says why. A peer that has authenticated with a secret that is removed is no longer authenticated.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from kera.core.access.credentials import secret_in
from kera.core.access.passwords import verifier_for
from kera.core.base.health import Observation, concern, well
from kera.core.base.repeated import Repeated
from kera.core.base.settings import InvalidSettings, setting
from kera.core.base.telemetry import get_logger
from kera.core.errors import AuthenticationFailed
from kera.v1 import access_pb2 as messages

log = get_logger("kera.access")

SETTING = "cluster_secret_file"
SECRET_CHARS_MIN = 16
"""Long, as people need not remember it."""
SECRETS_MAX = 2
LOOK_EVERY_S = 1.0
"""Minimum time between two checks whether the file has changed."""
SALT_BYTES = 16
_HOW = "openssl rand -base64 32 makes one"


class _Secret(NamedTuple):
    text: str
    verifier: messages.ScramVerifier
    version: int
    """An increasing number that is never used again."""


class ClusterSecret:
    """The secret that daemons authenticate with, read again from its file; an invalid file keeps the old secret."""

    def __init__(
        self,
        path: Path,
        now_s: Callable[[], float] = monotonic,
        *,
        secrets_in: Callable[[Path], Sequence[str]] | None = None,
    ) -> None:
        """`secrets_in`: replaces the function that reads the file. Raises `InvalidSettings`."""
        self._path = path
        self._secrets_in = secrets_in or _secrets_in
        self._now_s = now_s
        self._salt = secrets.token_bytes(SALT_BYTES)
        """The same salt for all secrets, so that a peer need not say which one it shows."""
        self._last_version = 0
        self._changes = 0
        self._problem = ""
        self._failing = Repeated(log)
        self._looked_s = now_s()
        self._known: Sequence[_Secret] = ()
        self._known = self._read()

    def shown(self) -> Sequence[str]:
        """Return the secrets to show to others, the newest first."""
        return [each.text for each in self._current()]

    def verifiers(self) -> Sequence[messages.ScramVerifier]:
        """Return verifiers for the secrets that others show; all have the same salt."""
        return [each.verifier for each in self._current()]

    def version_of(self, verifier: messages.ScramVerifier) -> int:
        """Return the version of the secret that a peer has shown."""
        return next(each.version for each in self._known if each.verifier == verifier)

    def is_taken(self, version: int) -> bool:
        """Return whether the secret with this version is still accepted."""
        return any(each.version == version for each in self._current())

    @property
    def changes(self) -> int:
        """How often the file has changed."""
        self._current()
        return self._changes

    @property
    def problem(self) -> str:
        """Why the present content of the file is not accepted; empty: it is."""
        self._current()
        return self._problem

    def look(self) -> Observation:
        """Return whether this daemon uses the present content of the file, for `Health.add`."""
        if problem := self.problem:
            return concern(f"the file's new content is not accepted, the previous secret stays in use: {problem}")
        if len(self.shown()) > 1:
            return well("the previous secret is accepted, too: remove it once all daemons have the new one")
        return well()

    def _current(self) -> Sequence[_Secret]:
        now_s = self._now_s()
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._known

    def _look(self) -> None:
        try:
            known = self._read()
        except InvalidSettings as error:
            self._problem = error.message
            self._failing.goes_on(
                "the cluster's new secret is not accepted; keeping the previous one", reason=error.message
            )
            return
        self._problem = ""
        self._failing.over("the cluster's secret is accepted again")
        if known != self._known:
            self._known = known
            self._changes += 1
            log.info("the cluster's secret has changed", secrets=len(known))

    def _read(self) -> Sequence[_Secret]:
        before = {each.text: each for each in self._known}
        with setting(f"{SETTING} {self._path}"):
            return [before.get(text) or self._new(text) for text in self._secrets_in(self._path)]

    def _new(self, text: str) -> _Secret:
        self._last_version += 1
        return _Secret(text, verifier_for(text, salt=self._salt), self._last_version)

    def __repr__(self) -> str:
        """Return it without secrets."""
        return f"ClusterSecret({str(self._path)!r})"


def _secrets_in(path: Path) -> Sequence[str]:
    """Return the secrets in a file, the newest first. Raises `InvalidSettings`."""
    try:
        found = [line.strip() for line in secret_in(SETTING, path).splitlines() if line.strip()]
    except AuthenticationFailed as error:
        raise InvalidSettings(error.message, **error.attributes) from error
    if len(found) > SECRETS_MAX:
        text = f"has {len(found)} lines: expected the secret, and on a second line the previous one: {_HOW}"
        raise InvalidSettings(f"{SETTING} {path} {text}", path=str(path))
    for secret in found:
        if len(secret) < SECRET_CHARS_MIN:
            text = f"has {len(secret)} characters, and a secret has {SECRET_CHARS_MIN} at least: {_HOW}"
            raise InvalidSettings(f"{SETTING} {path} {text}", path=str(path))
    return found
