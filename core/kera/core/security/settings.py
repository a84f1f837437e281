"""The settings of certificates, the same for daemons and clients."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from kera.core.base.address import host_of, is_everywhere
from kera.core.base.settings import InvalidSettings, KeraSettings
from kera.core.errors import InvalidArgument
from kera.core.security.files import SYSTEM, ClientAuth, TlsFiles
from kera.core.security.tls import Tls


class TlsSettings(KeraSettings):
    """The TLS settings of callers."""

    tls_ca: Path | None = Field(
        None,
        description="File of the authorities (PEM) whose certificates are taken from peers; system: those of the"
        " operating system. Set: connections over the network are encrypted.",
    )
    tls_cert: Path | None = Field(
        None,
        description="File of this process's certificate, followed by intermediate certificates (PEM). It is read"
        " again when it has changed, and so are tls_key and tls_ca.",
    )
    tls_key: Path | None = Field(None, description="File of the key of tls_cert (PEM, without a password).")


class DaemonTlsSettings(TlsSettings):
    """The TLS settings of servers: tls_cert, tls_key and tls_ca all together."""

    tls_client_auth: ClientAuth = Field(
        "none",
        description="Client certificates by tls_ca. required: each client needs a valid one; optional: a client may"
        " send one, which has to be valid (not over gRPC); none.",
    )
    insecure: bool = Field(
        default=False,
        description="Listen beyond this host although clients need neither show a certificate nor authenticate over"
        " TLS: for networks that only clients with all rights can reach.",
    )


def tls_of(settings: TlsSettings) -> Tls | None:
    """Return a client's certificates; None: its connections are not encrypted.

    Raises `InvalidSettings` if the settings are incomplete, and `InvalidTls` if the files are invalid.
    """
    return _tls(settings, required=("tls_ca",), who="a client", client_auth="none")


def tls_of_daemon(settings: DaemonTlsSettings, host: str, *, authenticates: bool = False) -> Tls | None:
    """Return the certificates of a daemon that will listen at `host`; see `tls_of`.

    `authenticates`: peers have to authenticate, though not by a certificate. Raises `InvalidSettings` also if peers on
    other hosts could connect without credentials, and the setting `insecure` does not allow that.
    """
    if settings.tls_client_auth != "none" and settings.tls_cert is None:
        raise InvalidSettings("tls_client_auth needs certificates: set tls_cert, tls_key and tls_ca")
    known = settings.tls_client_auth == "required" or (authenticates and settings.tls_cert is not None)
    if not known and not settings.insecure and not is_on_this_host(host):
        raise InvalidSettings(
            f"host {host}: every client that reaches it from another host gets all rights. Set tls_cert, tls_key,"
            " tls_ca and tls_client_auth required (kera tls init makes certificates), or these files and security;"
            " or set insecure, if only trusted clients can reach it",
            host=host,
        )
    if settings.tls_ca == SYSTEM and settings.tls_client_auth != "none":
        raise InvalidSettings(
            "tls_ca system: everyone can get a certificate of these authorities, and would be admitted; name your"
            " own authority, or set tls_client_auth none"
        )
    return _tls(
        settings,
        required=("tls_ca", "tls_cert", "tls_key"),
        who="a daemon",
        client_auth=settings.tls_client_auth,
        names=_names(settings, host),
    )


def is_on_this_host(host: str) -> bool:
    """Return whether a server that listens at this name or address can be reached from this host only."""
    if not host:
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return True  # no server can listen there; the attempt will report the error
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def _names(settings: DaemonTlsSettings, host: str) -> tuple[str, ...]:
    """Return the hosts under which others call a daemon. Invalid addresses are left out; the daemon reports them."""
    found = []
    told = [getattr(settings, name, "") for name in ("advertised_address", "advertised_frames_address")]
    for address in [each for each in told if each] or [host]:
        with contextlib.suppress(InvalidArgument):
            found.append(host_of(address).strip("[]"))
    return tuple(name for name in dict.fromkeys(found) if not is_everywhere(name))


def _tls(
    settings: TlsSettings,
    *,
    required: Sequence[str],
    who: str,
    client_auth: ClientAuth,
    names: tuple[str, ...] = (),
) -> Tls | None:
    given = {name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    if not any(given.values()):
        return None
    missing = [name for name in required if given[name] is None]
    if missing:
        raise InvalidSettings(f"{', '.join(missing)} is missing: {who} with TLS needs it")
    return Tls(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca, client_auth, names))
