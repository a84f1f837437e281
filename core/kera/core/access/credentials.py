"""Who we are: what the calling end shows. Passwords and tokens are read anew whenever they are shown.

A secret is never in a message, a log line or a `repr`; what is shown of a password is only that it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

from kera.core.access.authenticator import DAEMON_USER
from kera.core.access.passwords import Login
from kera.core.errors import AuthenticationFailed, InvalidArgument
from kera.core.home import expanded
from kera.v1 import access_pb2 as messages

SECRET_BYTES_MAX = 64 << 10
"""Of a file with a password or a token."""

Steps = Generator[messages.AuthenticateRequest, messages.AuthenticateResponse, str]


class Credentials:
    """See `kera.core.rpc.method.Introduction`."""

    def __init__(
        self,
        *,
        user: str = "",
        password: Callable[[], str] | None = None,
        token: Callable[[], str] | None = None,
    ) -> None:
        """A user and its password, or a token."""
        self._user = user
        self._password = password
        self._token = token

    def __call__(self, *, each_call: bool) -> Steps:
        """See `kera.core.rpc.method.Introduction`. Raises `AuthenticationFailed`."""
        if self._token is not None:
            token = self._token()
            if not each_call:
                yield messages.AuthenticateRequest(token=token)
            return token
        if self._password is None:
            return ""
        login = Login(self._user, self._password())
        answer = yield messages.AuthenticateRequest(scram=login.first())
        final = login.final(answer.scram)
        answer = yield messages.AuthenticateRequest(scram=final, exchange_id=answer.exchange_id)
        login.check(answer.scram)
        return answer.session

    def __repr__(self) -> str:
        """Without secrets."""
        return f"Credentials({self._user or 'token'!r})"


def of_daemon(cluster_secret: str) -> Credentials:
    """By which daemons of a cluster know each other."""
    return Credentials(user=DAEMON_USER, password=lambda: cluster_secret)


def secret_in(setting: str, path: Path) -> str:
    """What a file has, without white space around it. Raises `AuthenticationFailed`, which names the setting."""
    try:
        with expanded(path).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 1)
        text = data.decode().strip()
    except (OSError, UnicodeDecodeError, InvalidArgument) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        if isinstance(error, InvalidArgument):
            reason = error.message
        raise AuthenticationFailed(f"{setting} {path} cannot be read: {reason}", path=str(path)) from error
    if not text or len(data) > SECRET_BYTES_MAX:
        what = "is empty" if not text else f"has more than {SECRET_BYTES_MAX} bytes"
        raise AuthenticationFailed(f"{setting} {path} {what}", path=str(path))
    return text
