"""The settings of certificates, the same for daemons and clients."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kera.core.runtime import Runtime, secured
from kera.core.security.tls import ClientAuth, InvalidTls, Tls, TlsFiles
from kera.core.settings import InvalidSettings, KeraSettings


class TlsSettings(KeraSettings):
    """What whoever calls needs."""

    tls_ca: Path | None = Field(
        None,
        description="File of the authorities (PEM) whose certificates are taken from peers; system: those of the"
        " operating system. Set: connections over the network are encrypted.",
    )
    tls_cert: Path | None = Field(
        None,
        description="File of the own certificate, with those between it and its authority (PEM). It is read again when"
        " it has changed, and so are tls_key and tls_ca.",
    )
    tls_key: Path | None = Field(None, description="File of the key of tls_cert (PEM, without a password).")


class DaemonTlsSettings(TlsSettings):
    """What whoever serves needs: tls_cert, tls_key and tls_ca all together."""

    tls_client_auth: ClientAuth = Field(
        "none",
        description="Whether clients have to show a certificate of tls_ca: required; optional: one that is shown has"
        " to be good (over gRPC none is asked for then); none.",
    )


def secure(runtime: Runtime, settings: TlsSettings) -> Runtime:
    """A runtime whose connections over the network are encrypted, if the settings say so; else as it is.

    Raises `InvalidSettings` if they are not complete, and `InvalidTls` if the files are no good.
    """
    daemon = isinstance(settings, DaemonTlsSettings)
    given = {name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "tls_key")}
    if not any(given.values()):
        if isinstance(settings, DaemonTlsSettings) and settings.tls_client_auth != "none":
            raise InvalidSettings("tls_client_auth needs certificates: set tls_cert, tls_key and tls_ca")
        return runtime
    missing = [name for name, path in given.items() if path is None and (daemon or name == "tls_ca")]
    if missing:
        who = "a daemon" if daemon else "a client"
        raise InvalidSettings(f"{', '.join(missing)} is missing: {who} with TLS needs it")
    client_auth = settings.tls_client_auth if isinstance(settings, DaemonTlsSettings) else "none"
    return secured(runtime, Tls(TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_ca, client_auth)))


__all__ = ["DaemonTlsSettings", "InvalidTls", "TlsSettings", "secure"]
