"""The certificates of a process: its own, and the authorities whose certificates it takes from others.

The files are read anew when they have changed: each connection is made with what they hold then, and those that are
there already go on. What cannot be read, or does not belong together (half of a change is there), is not taken: the
process goes on with what it had, and says so, until the files are whole again.

TLS 1.2 at least. Whoever calls checks that the certificate is one of an authority in `TlsFiles.ca` and names the host
that was called; whoever serves asks for certificates as `TlsFiles.client_auth` says.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import grpc

from kera.core.errors import InvalidArgument, StartError
from kera.core.home import expanded
from kera.core.security.alerts import AlertingContext
from kera.core.telemetry import get_logger

log = get_logger("kera.tls")

ClientAuth = Literal["none", "optional", "required"]

LOOK_EVERY_S = 1.0
"""How often it is looked whether the files have changed, at most."""
FILE_BYTES_MAX = 1 << 20
"""More than any chain of certificates or bundle of authorities has."""
SYSTEM = Path("system")
"""In place of a file of authorities: those of the operating system."""


_MODES: dict[ClientAuth, ssl.VerifyMode] = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_ASKING = {**_MODES, "required": ssl.CERT_OPTIONAL}


class InvalidTls(StartError):
    """A file of certificates or keys cannot be read, or they do not belong together; the message names it."""

    code = "invalid_tls"


class TlsFiles(NamedTuple):
    """Where they are, in PEM; None: there is none."""

    cert: Path | None = None
    """This process's certificate, and those between it and its authority."""
    key: Path | None = None
    ca: Path | None = None
    """Authorities, or `SYSTEM`."""
    client_auth: ClientAuth = "none"


class _Loaded(NamedTuple):
    """What the files held, as contexts of both ends."""

    digest: bytes
    server: ssl.SSLContext | None
    asking: ssl.SSLContext | None
    """As `server`, for those who may let in somebody without a certificate."""
    client: ssl.SSLContext
    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    not_after_s: float | None


class Tls:
    """See the head of this module. May be used from several threads."""

    def __init__(self, files: TlsFiles, now_s: Callable[[], float] = monotonic) -> None:
        """Raises `InvalidTls`."""
        self.files = files
        self._now_s = now_s
        self._loaded = _load(files)
        self._looked_s = now_s()
        self._problem = ""

    @property
    def version(self) -> bytes:
        """Changes when the files do."""
        return self._current().digest

    @property
    def problem(self) -> str:
        """Why what the files hold now is not taken; empty: it is."""
        self._current()
        return self._problem

    @property
    def not_after_s(self) -> float | None:
        """Until when this process's certificate is good, in seconds since 1970; None: it has none, or cannot tell."""
        return self._current().not_after_s

    def server_context(self, *, only_asks: bool = False) -> ssl.SSLContext:
        """For the next connection that somebody makes to this process. Raises `InvalidTls` without a certificate.

        `only_asks`: who shows no certificate is let in, though one is required; the caller sees to it what it gets.
        """
        loaded = self._current()
        context = loaded.asking if only_asks else loaded.server
        if context is None:
            raise InvalidTls("who serves over TLS needs a certificate: set tls_cert and tls_key")
        return context

    def client_context(self) -> ssl.SSLContext:
        """For the next connection that this process makes."""
        return self._current().client

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server of gRPC, which asks for what the files hold at each connection.

        gRPC knows no certificates that are asked for and may be absent: `optional` has it ask for none.
        """
        given = b""

        def current() -> grpc.ServerCertificateConfiguration | None:
            nonlocal given
            loaded = self._current()
            if loaded.digest == given:
                return None
            given = loaded.digest
            return _server_configuration(loaded, self.files)

        loaded = self._current()
        given = loaded.digest
        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(loaded, self.files),
            current,  # type: ignore[arg-type]  # None: nothing has changed
            require_client_authentication=self.files.client_auth == "required",
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel of gRPC: of what the files hold now; see `version`."""
        loaded = self._current()
        return grpc.ssl_channel_credentials(loaded.ca, loaded.key, loaded.cert)

    def _current(self) -> _Loaded:
        now_s = self._now_s()
        if now_s >= self._looked_s + LOOK_EVERY_S:
            self._looked_s = now_s
            self._look()
        return self._loaded

    def _look(self) -> None:
        try:
            loaded = _load(self.files, self._loaded)
        except InvalidTls as error:
            if self._problem != error.message:
                self._problem = error.message
                log.warning("certificates are not taken; going on with those from before", reason=error.message)
            return
        self._problem = ""
        if loaded is not self._loaded:
            self._loaded = loaded
            log.info("certificates have changed")


def _load(files: TlsFiles, before: _Loaded | None = None) -> _Loaded:
    """What the files hold; `before` itself if nothing has changed."""
    if (files.cert is None) != (files.key is None):
        raise InvalidTls("tls_cert and tls_key belong together: set both, or none")
    cert, key = _read("tls_cert", files.cert), _read("tls_key", files.key)
    ca = None if files.ca == SYSTEM else _read("tls_ca", files.ca)
    digest = hashlib.sha256(repr((cert, key, ca)).encode()).digest()
    if before is not None and before.digest == digest:
        return before
    client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    if files.ca != SYSTEM:
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(client, files, ca)
    server = asking = None
    if cert is not None:
        _identify(client, files)
        server, asking = (_serving(files, ca, mode) for mode in (_MODES[files.client_auth], _ASKING[files.client_auth]))
    for context in filter(None, (client, server, asking)):
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    return _Loaded(digest, server, asking, client, cert, key, ca, _not_after_s(cert))


def _serving(files: TlsFiles, ca: bytes | None, mode: ssl.VerifyMode) -> ssl.SSLContext:
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    _identify(context, files)
    _trust(context, files, ca)
    context.verify_mode = mode
    return context


def _not_after_s(cert: bytes | None) -> float | None:
    if cert is None:
        return None
    try:
        from cryptography import x509  # noqa: PLC0415 - daemons have it, and a client need not
    except ModuleNotFoundError:
        return None
    return x509.load_pem_x509_certificate(cert).not_valid_after_utc.timestamp()


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with _expanded(setting, path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidTls(f"{setting} {path} cannot be read: {error.strerror}", path=str(path)) from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidTls(f"{setting} {path} has more than {FILE_BYTES_MAX} bytes: it is no PEM file", path=str(path))
    return data


def _expanded(setting: str, path: Path) -> Path:
    try:
        return expanded(path)
    except InvalidArgument as error:
        raise InvalidTls(f"{setting}: {error.message}", path=str(path)) from error


def _trust(context: ssl.SSLContext, files: TlsFiles, ca: bytes | None) -> None:
    """Take certificates of these authorities from peers."""
    if ca is None:
        if files.ca == SYSTEM:
            context.load_default_certs()
        return
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidTls(f"tls_ca {files.ca} has no certificates of authorities in PEM", path=str(files.ca)) from error


def _identify(context: ssl.SSLContext, files: TlsFiles) -> None:
    """Show the process's own certificate to peers."""
    if files.cert is None or files.key is None:
        return
    cert, key = _expanded("tls_cert", files.cert), _expanded("tls_key", files.key)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _PasswordNeeded as error:
        raise InvalidTls(f"tls_key {key} is encrypted with a password: give one that is not", path=str(key)) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidTls(f"tls_key {key} is not the key of tls_cert {cert}", path=str(key)) from error
        raise InvalidTls(
            f"tls_cert {cert} and tls_key {key} are no certificate and its key in PEM ({error.reason or error})",
            path=str(cert),
        ) from error
    except OSError as error:
        raise InvalidTls(
            f"tls_cert {cert} or tls_key {key} cannot be read: {error.strerror}", path=str(cert)
        ) from error


class _PasswordNeeded(Exception):
    """Instead of a prompt at which nobody sits."""


def _no_password(*_: Any) -> str:
    raise _PasswordNeeded


def _server_configuration(loaded: _Loaded, files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    ca = loaded.ca if files.client_auth == "required" else None
    return grpc.ssl_server_certificate_configuration([(loaded.key or b"", loaded.cert or b"")], ca)
