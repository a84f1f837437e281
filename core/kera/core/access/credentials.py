"""Credentials of the calling end. Passwords and tokens are read again whenever they are shown.

A secret is never in an error message, a log line or a `repr`. A password itself is never sent: the caller only proves
that it knows the password.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import BinaryIO

from kera.core.access.identity import DAEMON_USER
from kera.core.access.passwords import Login
from kera.core.base.home import expanded
from kera.core.errors import AuthenticationFailed, InvalidArgument
from kera.v1 import access_pb2 as messages

SECRET_BYTES_MAX = 64 << 10
"""Maximum of a file with a password or a token."""
CALL_TOKEN_CHARS_MAX = 4 << 10
"""A longer token is shown once, for a session, and not with each call: gRPC takes some 8 KiB of metadata."""

Steps = Generator[messages.AuthenticateRequest, messages.AuthenticateResponse, str]


class Credentials:
    """See `kera.core.rpc.method.Introduction`."""

    def __init__(
        self,
        *,
        user: str = "",
        password: Callable[[], str] | None = None,
        passwords: Callable[[], Sequence[str]] | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        """A user and its password, or a token; `passwords`: alternatives, tried in order until one is accepted."""
        self._user = user
        self._passwords = passwords if password is None else lambda: [password()]
        self._token = token

    def __call__(self, *, each_call: bool) -> Steps:
        """See `kera.core.rpc.method.Introduction`. Raises `AuthenticationFailed`."""
        if self._token is not None:
            token = self._token()
            if each_call and len(token) <= CALL_TOKEN_CHARS_MAX:
                return token
            answer = yield messages.AuthenticateRequest(token=token)
            return answer.session
        if self._passwords is None:
            return ""
        *others, last = self._passwords()
        for password in others:
            with contextlib.suppress(AuthenticationFailed):
                return (yield from self._show(password))
        return (yield from self._show(last))

    def _show(self, password: str) -> Steps:
        login = Login(self._user, password)
        answer = yield messages.AuthenticateRequest(scram=login.first())
        final = login.final(answer.scram)
        answer = yield messages.AuthenticateRequest(scram=final, exchange_id=answer.exchange_id)
        login.check(answer.scram)
        return answer.session

    def __repr__(self) -> str:
        """Return it without secrets."""
        return f"Credentials({self._user or 'token'!r})"


def of_daemon(cluster_secret: str | Callable[[], Sequence[str]]) -> Credentials:
    """Return the credentials of a daemon: the secret of its cluster, or several (see `ClusterSecret.shown`)."""
    secrets = cluster_secret if callable(cluster_secret) else lambda: [cluster_secret]
    return Credentials(user=DAEMON_USER, passwords=secrets)


def secret_in(setting: str, path: Path) -> str:
    """Return the content of a file, without surrounding white space.

    Raises `AuthenticationFailed`, which names the setting.
    """
    try:
        with expanded(path).open("rb") as file:
            return secret_from(f"{setting} {path}", file)
    except OSError as error:
        raise AuthenticationFailed(f"{setting} {path} cannot be read: {error.strerror}", path=str(path)) from error
    except InvalidArgument as error:
        raise AuthenticationFailed(f"{setting} {path} cannot be read: {error.message}", path=str(path)) from error


def secret_from(what: str, file: BinaryIO) -> str:
    """Return the content of an open file, see `secret_in`; errors call it `what`.

    Raises `AuthenticationFailed`, and `OSError`.
    """
    data = file.read(SECRET_BYTES_MAX + 1)
    try:
        text = data.decode().strip()
    except UnicodeDecodeError as error:
        raise AuthenticationFailed(f"{what} cannot be read: it is not UTF-8 text") from error
    if not text or len(data) > SECRET_BYTES_MAX:
        reason = "is empty" if not text else f"has more than {SECRET_BYTES_MAX} bytes"
        raise AuthenticationFailed(f"{what} {reason}")
    return text
