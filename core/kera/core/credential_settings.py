"""The settings with which a client authenticates, and a runtime that uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import Field, SecretStr

from kera.core.access.cluster_secret import ClusterSecret
from kera.core.access.credentials import Credentials, of_daemon, secret_in
from kera.core.access.identity import check_name
from kera.core.base.settings import InvalidSettings, setting
from kera.core.runtime import Runtime, secured
from kera.core.security.settings import TlsSettings, tls_of


class CredentialSettings(TlsSettings):
    """The user or token of a client, and its certificates."""

    user: str = Field("", description="Name to authenticate with, with password_file or password.")
    password_file: Path | None = Field(
        None, description="File with the user's password; it is read whenever the password is shown."
    )
    password: SecretStr | None = Field(
        None, description="The password itself, best from the environment; password_file is safer."
    )
    token_file: Path | None = Field(
        None,
        description="File with a token to authenticate with, instead of a user and a password; it is read whenever the"
        " token is shown, so a newer one is taken.",
    )
    token: SecretStr | None = Field(None, description="The token itself, best from the environment.")


def secure(runtime: Runtime, settings: CredentialSettings) -> Runtime:
    """Return a client's runtime whose connections are encrypted and authenticated as its settings say.

    Credentials that the runtime already has take precedence (`as_daemon`). Raises `InvalidSettings` if the settings are
    incomplete, and `InvalidTls` if the files are invalid.
    """
    tls, introduction = tls_of(settings) or runtime.tls, runtime.introduction or _credentials(settings)
    return runtime if tls is None and introduction is None else secured(runtime, tls, introduction)


def as_daemon(runtime: Runtime, cluster_secret_file: Path) -> Runtime:
    """Return a client's runtime that authenticates with the cluster secret, and so has all rights of daemons.

    It is for operators, as long as no user exists who may create users, or if none knows its password any more. Raises
    `InvalidSettings`.
    """
    return replace(runtime, introduction=of_daemon(ClusterSecret(cluster_secret_file).shown))


def _credentials(settings: CredentialSettings) -> Credentials | None:
    passwords = [each for each in (settings.password_file, settings.password) if each is not None]
    tokens = [each for each in (settings.token_file, settings.token) if each is not None]
    if not (settings.user or passwords or tokens):
        return None
    if len(passwords) > 1 or len(tokens) > 1 or (passwords and tokens):
        raise InvalidSettings("set one of password_file, password, token_file and token, and no more")
    if tokens:
        if settings.user:
            raise InvalidSettings("user: a token names its user; set user with a password only")
        return Credentials(token=_secret("token_file", settings.token_file, settings.token))
    if not (settings.user and passwords):
        raise InvalidSettings("user and password_file (or password) belong together: set both")
    with setting("user"):
        user = check_name("user", settings.user)
    return Credentials(user=user, password=_secret("password_file", settings.password_file, settings.password))


def _secret(name: str, path: Path | None, value: SecretStr | None) -> Callable[[], str]:
    if path is not None:
        return lambda: secret_in(name, path)
    text = value.get_secret_value().strip() if value is not None else ""
    return lambda: text
