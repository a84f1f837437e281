"""The files of certificates: read together, and checked before they are used.

Errors name the setting and the file. Contexts are made of the same bytes that were checked, since files may be replaced
at any time, one after the other, and a certificate only works with its own key.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kera.core.base.home import expanded
from kera.core.errors import InvalidArgument, StartError
from kera.core.security.alerts import AlertingContext

ClientAuth = Literal["none", "optional", "required"]

FILE_BYTES_MAX = 1 << 20
"""Larger than any chain of certificates or bundle of authorities."""
SYSTEM = Path("system")
"""Stands for a file of authorities: those of the operating system."""

_MODES: dict[ClientAuth, ssl.VerifyMode] = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
_ASKING = {**_MODES, "required": ssl.CERT_OPTIONAL}
_CURVES = ("secp256r1", "secp384r1")
_DER = b"\x30"
"""The first byte of a file in DER."""


class InvalidTls(StartError):
    """A file of certificates or keys cannot be read, or they do not belong together; the message names it."""

    code = "invalid_tls"


class TlsFiles(NamedTuple):
    """The paths of the files, which are in PEM; None: there is no such file."""

    cert: Path | None = None
    """This process's certificate, followed by intermediate certificates."""
    key: Path | None = None
    ca: Path | None = None
    """Authorities, or `SYSTEM`."""
    client_auth: ClientAuth = "none"
    names: tuple[str, ...] = ()
    """Hosts under which others call this process, for which the certificate has to be valid; empty: it serves none."""


class Loaded(NamedTuple):
    """The content of the files, as contexts of both ends."""

    digest: bytes
    server: ssl.SSLContext | None
    asking: ssl.SSLContext | None
    """As `server`, for ports that may admit peers without a certificate."""
    client: ssl.SSLContext
    cert: bytes | None
    key: bytes | None
    ca: bytes | None
    not_after_s: float | None


def load(files: TlsFiles, before: Loaded | None = None) -> Loaded:
    """Load the files; `before` itself if nothing has changed. Raises `InvalidTls`."""
    if (files.cert is None) != (files.key is None):
        raise InvalidTls("tls_cert and tls_key belong together: set both, or none")
    cert, key = _read("tls_cert", files.cert), _read("tls_key", files.key)
    ca = None if files.ca == SYSTEM else _read("tls_ca", files.ca)
    digest = hashlib.sha256(repr((cert, key, ca)).encode()).digest()
    if before is not None and before.digest == digest:
        return before
    if cert is not None and key is not None:
        _check_pem("tls_cert", files.cert, cert, b"CERTIFICATE-----", "certificate")
        _check_pem("tls_key", files.key, key, b"PRIVATE KEY-----", "key")
    client = calling(files, ca)
    server = asking = None
    if cert is not None:
        identify(client, files, cert, key)
        server = serving(files, cert, key, ca, _MODES[files.client_auth])
        asking = serving(files, cert, key, ca, _ASKING[files.client_auth])
    return Loaded(digest, server, asking, client, cert, key, ca, _look_at(files.cert, cert))


def calling(files: TlsFiles, ca: bytes | None) -> ssl.SSLContext:
    """Return the context of a caller, which shows no certificate yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.hostname_checks_common_name = False  # gRPC ignores the common name, too
    _trust(context, files, ca)
    return _safe(context)


def serving(
    files: TlsFiles, cert: bytes | None, key: bytes | None, ca: bytes | None, mode: ssl.VerifyMode
) -> ssl.SSLContext:
    """Return the context of a server."""
    context = AlertingContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # peers are checked at each connection; clients of KerA do not use tickets
    identify(context, files, cert, key)
    _trust(context, files, ca)
    context.verify_mode = mode
    safe: ssl.SSLContext = _safe(context)
    return safe


def identify(context: ssl.SSLContext, files: TlsFiles, cert: bytes | None, key: bytes | None) -> None:
    """Have a context show the process's own certificate. Raises `InvalidTls`."""
    try:
        with _in_memory(cert or b"") as cert_path, _in_memory(key or b"") as key_path:
            context.load_cert_chain(cert_path, key_path, password=_no_password)
    except _PasswordNeeded as error:
        text = f"tls_key {files.key} is encrypted with a password: give one that is not"
        raise InvalidTls(text, path=str(files.key)) from error
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if reason == "KEY_VALUES_MISMATCH":
            text = f"tls_key {files.key} is not the key of tls_cert {files.cert}"
        elif reason.endswith(("TOO_SMALL", "TOO_WEAK")):
            text = f"tls_cert {files.cert} uses cryptography that is no longer safe, and would be refused ({reason})"
        else:
            text = f"tls_cert {files.cert} and tls_key {files.key} are not a certificate and its key in PEM ({reason})"
        raise InvalidTls(text, path=str(files.cert)) from error


def _safe(context: ssl.SSLContext) -> ssl.SSLContext:
    """Set safe options, which with all versions of Python have the same effect as gRPC's own.

    Any certificate in tls_ca is trusted, even one that another certificate has signed, and no certificate is refused
    because an older authority has left out extensions.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VerifyFlags.VERIFY_X509_STRICT
    return context


def _trust(context: ssl.SSLContext, files: TlsFiles, ca: bytes | None) -> None:
    """Have a context accept certificates of these authorities. Raises `InvalidTls`."""
    if ca is None:
        if files.ca == SYSTEM:
            context.load_default_certs()
        return
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidTls(f"tls_ca {files.ca} has no certificates of authorities in PEM", path=str(files.ca)) from error


def _look_at(path: Path | None, cert: bytes | None) -> float | None:
    """Return until when a certificate is valid. Raises `InvalidTls` for a key that gRPC cannot use."""
    if cert is None:
        return None
    try:
        from cryptography import x509  # noqa: PLC0415 - daemons have this library, but clients may not
        from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: PLC0415
    except ModuleNotFoundError:
        return None
    try:
        found = x509.load_pem_x509_certificate(cert)
        key = found.public_key()
    except Exception:  # noqa: BLE001 - OpenSSL accepts more than this library, which raises various errors
        return None
    usual = isinstance(key, rsa.RSAPublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES
    )
    if not usual:
        kind = (
            key.curve.name
            if isinstance(key, ec.EllipticCurvePublicKey)
            else type(key).__name__.removesuffix("PublicKey")
        )
        raise InvalidTls(
            f"tls_cert {path} has a key of a kind that gRPC does not know ({kind}); RSA will do, and EC with P-256 or"
            " P-384",
            path=str(path),
        )
    return found.not_valid_after_utc.timestamp()


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with expanded(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except InvalidArgument as error:
        raise InvalidTls(f"{setting}: {error.message}", path=str(path)) from error
    except OSError as error:
        raise InvalidTls(f"{setting} {path} cannot be read: {error.strerror}", path=str(path)) from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidTls(f"{setting} {path} has more than {FILE_BYTES_MAX} bytes: it is not a PEM file", path=str(path))
    return data


def _check_pem(setting: str, path: Path | None, data: bytes, label: bytes, what: str) -> None:
    """Check that a file has PEM of the right kind: OpenSSL's own messages do not explain these mistakes."""
    if not data.strip():
        raise InvalidTls(f"{setting} {path} is empty", path=str(path))
    if b"-----BEGIN " not in data:
        way_out = f"; if it is DER, openssl makes PEM of it: openssl pkey -inform der -in {path}"
        if what == "certificate":
            way_out = way_out.replace("pkey", "x509")
        raise InvalidTls(f"{setting} {path} is not PEM{way_out if data[:1] == _DER else ''}", path=str(path))
    if label not in data:
        raise InvalidTls(f"{setting} {path} has no {what} in it", path=str(path))


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """Provide `data` under a path, as OpenSSL reads certificates and keys only from files."""
    descriptor = os.memfd_create("kera-tls")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class _PasswordNeeded(Exception):
    """Raised instead of a prompt for a password."""


def _no_password(*_: Any) -> str:
    raise _PasswordNeeded
