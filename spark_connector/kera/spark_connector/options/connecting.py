"""The options that say how a query reaches its cluster, and as which user. Their names are those of client settings.

No option is a password or a token, because plans, Spark's UI and event logs show options. So options name files, which
only the driver reads.
"""

from __future__ import annotations

from collections.abc import Mapping

from kera.core.errors import InvalidArgument
from kera.spark_connector.connection import Connection
from kera.spark_connector.options.names import (
    PASSWORD_FILE,
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    TOKEN_FILE,
    TOKEN_LIFETIME,
    USER,
)
from kera.spark_connector.options.values import bootstrap_of, duration_ms, wrong

_SETTINGS = {
    TLS_CA: "tls_ca",
    TLS_CERT: "tls_cert",
    TLS_KEY: "tls_key",
    USER: "user",
    PASSWORD_FILE: "password_file",
    TOKEN_FILE: "token_file",
}
TOKEN_LIFETIME_MS_MIN = 5_000
"""Each renewal reaches all daemons, so tokens must not be renewed more often than this allows."""
TOKEN_LIFETIME_MS_MAX = 24 * 3600 * 1000
"""The coordinator's bound; it would silently shorten a longer lifetime."""


def connection_of(given: Mapping[str, str]) -> Connection:
    """The connection of the options; raises `InvalidArgument`."""
    settings = {}
    for option, setting in _SETTINGS.items():
        if option in given:
            value = given[option].strip()
            if not value:
                raise wrong(option, "is empty; leave it out, and the client's settings say it")
            settings[setting] = value
    if TOKEN_FILE in given and (USER in given or PASSWORD_FILE in given):
        raise wrong(TOKEN_FILE, f"names the user already: leave {USER} and {PASSWORD_FILE} out")
    _require_both(given, USER, PASSWORD_FILE)
    _require_both(given, TLS_CERT, TLS_KEY)
    lifetime_ms = None
    if TOKEN_LIFETIME in given:
        lifetime_ms = duration_ms(TOKEN_LIFETIME, given[TOKEN_LIFETIME])
        if lifetime_ms < TOKEN_LIFETIME_MS_MIN:
            raise wrong(TOKEN_LIFETIME, f"must be {TOKEN_LIFETIME_MS_MIN // 1000}s at least", given[TOKEN_LIFETIME])
        if lifetime_ms > TOKEN_LIFETIME_MS_MAX:
            raise wrong(
                TOKEN_LIFETIME, "must be 1d at most; tokens are renewed while they are needed", given[TOKEN_LIFETIME]
            )
    return Connection(bootstrap_of(given), tuple(settings.items()), token_lifetime_ms=lifetime_ms)


def _require_both(given: Mapping[str, str], one: str, other: str) -> None:
    if (one in given) != (other in given):
        missing = other if one in given else one
        raise InvalidArgument(f"options {one} and {other} go together; {missing} is missing", option=missing)
