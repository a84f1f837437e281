"""The secret by which the daemons of a cluster know each other: a file with one line, or two while it changes.

The first line is shown to others, and the second to those who do not know the first; either is taken from others. So
another secret comes in without an interruption: at all daemons it goes before the old one, and then the old one goes.

The file is read again when it has changed. An invalid one is ignored: what was there before goes on, and a warning
says why. Who was known by a secret that is gone is known no more.
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
"""It is not for people to remember."""
SECRETS_MAX = 2
LOOK_EVERY_S = 1.0
"""How often it is looked whether the file has changed, at most."""
SALT_BYTES = 16
_HOW = "openssl rand -base64 32 makes one"


class _Secret(NamedTuple):
    text: str
    verifier: messages.ScramVerifier
    version: int
    """Grows, and is never given again."""


class ClusterSecret:
    """The secret that daemons authenticate with, read again from its file; an invalid file keeps the old secret."""

    def __init__(
        self,
        path: Path,
        now_s: Callable[[], float] = monotonic,
        *,
        secrets_in: Callable[[Path], Sequence[str]] | None = None,
    ) -> None:
        """`secrets_in`: what the file has, if that is to be found out in another way. Raises `InvalidSettings`."""
        self._path = path
        self._secrets_in = secrets_in or _secrets_in
        self._now_s = now_s
        self._salt = secrets.token_bytes(SALT_BYTES)
        """The same for all: who wants to show one need not say which."""
        self._last_version = 0
        self._changes = 0
        self._problem = ""
        self._failing = Repeated(log)
        self._looked_s = now_s()
        self._known: Sequence[_Secret] = ()
        self._known = self._read()

    def shown(self) -> Sequence[str]:
        """Texts that are shown to others, the newest first."""
        return [each.text for each in self._current()]

    def verifiers(self) -> Sequence[messages.ScramVerifier]:
        """Verifiers for the texts that others show; all have the same salt."""
        return [each.verifier for each in self._current()]

    def version_of(self, verifier: messages.ScramVerifier) -> int:
        """Which of them somebody has shown."""
        return next(each.version for each in self._known if each.verifier == verifier)

    def is_taken(self, version: int) -> bool:
        """Whether who has shown that one is known by it still."""
        return any(each.version == version for each in self._current())

    @property
    def changes(self) -> int:
        """How often the file had another secret."""
        self._current()
        return self._changes

    @property
    def problem(self) -> str:
        """Why what the file holds now is not taken; empty: it is."""
        self._current()
        return self._problem

    def look(self) -> Observation:
        """For `Health.add`: whether what the file has is what this daemon goes by."""
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
        """Without secrets."""
        return f"ClusterSecret({str(self._path)!r})"


def _secrets_in(path: Path) -> Sequence[str]:
    """The secrets that a file has, the newest first. Raises `InvalidSettings`."""
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
