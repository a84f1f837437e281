"""The settings of authentication and rights, the same for all daemons, and the guard that they make."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import Field

from kera.core.access.certificates import DAEMONS, USERS, CertificateNames
from kera.core.access.cluster_secret import ClusterSecret
from kera.core.access.credentials import of_daemon
from kera.core.access.identity import check_principal
from kera.core.base.clock import Clock
from kera.core.base.settings import InvalidSettings, setting
from kera.core.errors import KeraError, UnknownStream
from kera.core.runtime import Runtime, secured
from kera.core.security.settings import DaemonTlsSettings, tls_of_daemon
from kera.server.access.audit import Audit
from kera.server.access.authenticator import Authenticator
from kera.server.access.guard import Beside, Door, Guard, NameOf
from kera.server.access.jwt_sources import keys_source

if TYPE_CHECKING:
    from kera.server.access.jwt_keys import JwtKeys
    from kera.server.access.jwt_tokens import JwtTokens

_STREAM = re.compile(r"(?!\.\.?$)[a-zA-Z0-9._-]{1,249}")
"""The form of a stream's name."""


class DaemonAccessSettings(DaemonTlsSettings):
    """Whether clients of a daemon have to authenticate, and how."""

    security: bool = Field(
        default=False,
        description="Every caller has to authenticate, and has the rights that rules give. The same for all daemons of"
        " a cluster; they know each other by cluster_secret_file, or by certificates with tls_client_auth required.",
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="File with a secret that only the daemons of the cluster have; on a second line the former one,"
        " while it is replaced. It is read again when it has changed.",
    )
    super_users: list[str] = Field(
        [], description="Principals with all rights, regardless of rules: user:NAME or role:NAME."
    )
    certificate_daemons: list[str] = Field(
        list(DAEMONS),
        description="Regular expressions of names in certificates (CN=…,O=…, URI:…, DNS:…) that make it a daemon's.",
    )
    certificate_users: list[str] = Field(
        list(USERS),
        description="The same, with the user's name in a group (?P<user>…). By default the common name is the user.",
    )
    audit_stream: str = Field(
        "",
        description="Stream into which this daemon writes audit events, besides its log (kera.audit): a record of JSON"
        " for each event. It is created if it does not exist. Empty: only the log.",
    )
    jwt_keys: str = Field(
        "",
        description="Key set (JWKS) of an issuer of JSON web tokens: a file, which is read again when it has"
        " changed; or an address, https://… (http://… on this host), which is asked every five minutes, and when a"
        " token names a key that is not there. Set: tokens of that issuer are taken.",
    )
    jwt_issuer: str = Field("", description="Issuer of accepted tokens: their claim iss. Needed with jwt_keys.")
    jwt_audience: str = Field(
        "",
        description="For whom tokens have to be: their claim aud, or one of it. Needed with jwt_keys, as an issuer has"
        " tokens for others as well.",
    )
    jwt_user_claim: str = Field("sub", min_length=1, description="Claim of a token that is the user's name.")
    jwt_roles_claim: str = Field(
        "roles",
        min_length=1,
        description="Claim with the user's roles, a list or a text with spaces between; with dots, one within another:"
        " realm_access.roles. They come on top of those that the user has here.",
    )
    jwt_leeway_ms: int = Field(
        60_000, ge=0, le=600_000, description="By how much the issuer's clock may be off this host's."
    )


def secure_daemon(runtime: Runtime, settings: DaemonAccessSettings, host: str) -> Runtime:
    """Return the runtime of a daemon that listens at `host`; it encrypts and authenticates as the settings say.

    Raises `InvalidSettings` also if peers on other hosts could connect without credentials, and the setting `insecure`
    does not allow that.
    """
    tls = tls_of_daemon(settings, host, authenticates=settings.security)
    if not settings.security:
        return runtime if tls is None else secured(runtime, tls)
    if settings.cluster_secret_file is None and settings.tls_client_auth != "required":
        raise InvalidSettings(
            "security needs credentials for the daemons: set cluster_secret_file, or tls_cert, tls_key, tls_ca and"
            " tls_client_auth required"
        )
    secret = _cluster_secret(settings, runtime)
    return secured(runtime, tls, None if secret is None else of_daemon(secret.shown))


def guard_of(
    settings: DaemonAccessSettings,
    runtime: Runtime,
    *,
    name_of: NameOf = lambda _: None,
    unknown: Callable[[int], UnknownStream] | None = None,
    not_told: Callable[[], KeraError] | None = None,
    coordinators: Callable[[], str] = lambda: "",
    daemon: str = "",
) -> Door:
    """Return the guard in front of a daemon, see `Guard`. Raises `InvalidSettings`.

    `coordinators`: returns their addresses once the daemon runs; `daemon`: the name of the daemon for audit events;
    empty: the guard is only checked, and no daemon will run.
    """
    if not settings.security:
        if settings.audit_stream:
            raise InvalidSettings(
                "audit_stream needs security: without it no event is audited; turn security on, or leave"
                " audit_stream out"
            )
        return Door()
    with setting("super_users"):
        super_users = frozenset(map(check_principal, settings.super_users))
    with setting("certificate_daemons, certificate_users"):
        names = CertificateNames.of(settings.certificate_daemons, settings.certificate_users)
    now_s = runtime.clock.boottime_s
    jwt = _jwt(settings, runtime.clock)
    authenticator = Authenticator(
        names,
        now_s=now_s,
        super_users=super_users,
        cluster_secret=_cluster_secret(settings, runtime),
        of_jwt=None if jwt is None else jwt.tokens.identify,
        not_told=not_told,
    )
    beside: dict[str, Beside] = {} if jwt is None else {"jwt_keys": jwt.keys}
    audit = Audit(now_s)
    if settings.audit_stream and not _STREAM.fullmatch(settings.audit_stream):
        raise InvalidSettings(
            f"audit_stream: a stream cannot be called {settings.audit_stream!r}: letters, digits, dots, underscores and"
            " hyphens, at most 249 of them"
        )
    if settings.audit_stream and daemon:
        if runtime.audit_stream is None:
            raise InvalidSettings("audit_stream needs a daemon that is run with kera: this one cannot write to streams")
        into = beside["audit_stream"] = runtime.audit_stream(settings.audit_stream, coordinators, daemon, runtime)
        audit = Audit(now_s, into.put)
    return Guard(authenticator, audit, name_of=name_of, unknown=unknown, beside=beside)


class _Jwt(NamedTuple):
    """The parts that accept tokens of another issuer."""

    keys: JwtKeys
    tokens: JwtTokens


def _jwt(settings: DaemonAccessSettings, clock: Clock) -> _Jwt | None:
    """Return the parts; None: no other issuer is set. Raises `InvalidSettings`."""
    if not settings.jwt_keys:
        if settings.jwt_issuer or settings.jwt_audience:
            raise InvalidSettings("jwt_issuer and jwt_audience belong to jwt_keys: set all three, or none")
        return None
    if not (settings.jwt_issuer and settings.jwt_audience):
        raise InvalidSettings(
            "jwt_keys needs jwt_issuer and jwt_audience: the same keys sign tokens that are not for this cluster"
        )
    # Daemons have the libraries that these import, but clients may not.
    from kera.server.access.jwt_keys import JwtKeys  # noqa: PLC0415
    from kera.server.access.jwt_tokens import JwtRules, JwtTokens  # noqa: PLC0415

    with setting("jwt_keys"):
        keys = JwtKeys(keys_source(settings.jwt_keys), clock.boottime_s)
    rules = JwtRules(
        settings.jwt_issuer,
        settings.jwt_audience,
        settings.jwt_user_claim,
        settings.jwt_roles_claim,
        settings.jwt_leeway_ms / 1000,
    )
    return _Jwt(keys, JwtTokens(rules, keys, clock))


def _cluster_secret(settings: DaemonAccessSettings, runtime: Runtime) -> ClusterSecret | None:
    path = settings.cluster_secret_file
    return None if path is None else ClusterSecret(path, runtime.clock.boottime_s)
