"""A private certificate authority, and its certificates, for a small cluster without another authority.

A directory holds the authority (``ca.pem``, ``ca-key.pem``) and, per host or client, ``<name>.pem`` and
``<name>-key.pem``. Only the owner can read keys; with ``ca-key.pem`` one can impersonate any host or client.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kera.core.access.certificates import DAEMON_NAME
from kera.core.errors import InvalidArgument, PathNotWritable

CA_DAYS = 3650
CERT_DAYS = 365
CERT_DAYS_MAX = 3650
_BACKDATED = datetime.timedelta(minutes=5)
"""How far the begin of a certificate lies in the past, as clocks of hosts differ."""
_NAME = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:-]{0,199}")
_NUMBERS = re.compile(r"[0-9.]+")
_LABEL_CHARS_MAX = 63
_COMMON_NAME_CHARS_MAX = 64
_KEY_SUFFIX = "-key"
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Issued(NamedTuple):
    """A certificate that was made."""

    name: str
    cert: Path
    key: Path
    not_after: datetime.datetime


class Authority:
    """A certificate authority in a directory, which issues certificates for hosts and clients."""

    def __init__(self, directory: Path, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._directory = directory
        self._cert = cert
        self._key = key

    @classmethod
    def open_or_make(cls, directory: Path, *, days: int = CA_DAYS) -> tuple[Authority, bool]:
        """Return the authority in `directory`, and whether it was made just now.

        Raises `PathNotWritable`, and `InvalidArgument` if the existing files are not an authority.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PathNotWritable(f"cannot make {directory}: {error.strerror}", path=str(directory)) from error
        cert_path, key_path = _paths(directory, "ca")
        if cert_path.exists() or key_path.exists():
            return cls(directory, *_load_authority(cert_path, key_path)), False
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"KerA authority {x509.random_serial_number():x}"[:40])]
        )
        cert = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        _write(key_path, _key_bytes(key), secret=True)
        _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), secret=False)
        return cls(directory, cert, key), True

    @property
    def path(self) -> Path:
        """The path of its certificate."""
        return _paths(self._directory, "ca")[0]

    def issue(self, name: str, *, days: int = CERT_DAYS, client: bool = False) -> Issued:
        """Issue a certificate for a host, by its name or IP address (and for ``localhost``), or for a client.

        The certificate of a host also identifies a daemon. It replaces an older certificate. Raises `InvalidArgument`
        and `PathNotWritable`.
        """
        check_request([] if client else [name], [name] if client else [], days)
        cert_path, key_path = _paths(self._directory, name)
        if _is_of_a_host(cert_path) is client:
            is_now, other = ("a host", "client") if client else ("a client", "host")
            raise InvalidArgument(
                f"{cert_path} is the certificate of {is_now}: give the {other} another name", name=name
            )
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:_COMMON_NAME_CHARS_MAX])])
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._cert.subject, key.public_key(), days)
        if not client:
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
            names = [*_names((name, *_LOCAL)), x509.UniformResourceIdentifier(DAEMON_NAME)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        cert = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        _write(key_path, _key_bytes(key), secret=True)
        _write(cert_path, cert.public_bytes(serialization.Encoding.PEM), secret=False)
        return Issued(name, cert_path, key_path, cert.not_valid_after_utc)


def check_request(hosts: Sequence[str], clients: Sequence[str], days: int) -> None:
    """Check that all these certificates can be issued, before the first one is. Raises `InvalidArgument`."""
    for name in (*hosts, *clients):
        reason = _no_file_name(name) or (_no_host(name) if name in hosts else _no_user(name))
        if reason:
            raise InvalidArgument(f"{name!r} is not a host or client name{reason}", name=name)
    both = [name for name in hosts if name in clients]
    if both:
        raise InvalidArgument(f"{both[0]!r} is given as a host and as a client: give the client another name")
    if not 1 <= days <= CERT_DAYS_MAX:
        raise InvalidArgument(f"a certificate is valid for 1 to {CERT_DAYS_MAX} days, not {days}", days=days)


def _no_file_name(name: str) -> str:
    """Return why files cannot have this name; empty: they can."""
    if "*" in name:
        return ": name each host by itself"
    if name == "ca":
        return ": these are the files of the authority"
    if name.endswith(_KEY_SUFFIX):
        return f": {name}.pem would be taken for a key"
    return "" if _NAME.fullmatch(name) else ", of letters, digits, dots and hyphens"


def _no_host(name: str) -> str:
    """Return why clients cannot call a host by this name; empty: they can."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return ": it stands for all addresses, and clients call one" if address.is_unspecified else ""
    if ":" in name:
        return ": give it without a port"
    if _NUMBERS.fullmatch(name):
        return ": it is not an IP address"
    if any(not label or len(label) > _LABEL_CHARS_MAX or label.endswith("-") for label in name.split(".")):
        return ": it has a part that is empty, too long, or ends with a hyphen"
    return ""


def _no_user(name: str) -> str:
    """Return why a user cannot have this name, which is the common name of its certificate; empty: it can."""
    return f": it has more than {_COMMON_NAME_CHARS_MAX} characters" if len(name) > _COMMON_NAME_CHARS_MAX else ""


def _is_of_a_host(path: Path) -> bool | None:
    """Return whether the certificate at `path` is a host's; None: there is no certificate."""
    try:
        cert = x509.load_pem_x509_certificate(path.read_bytes())
        return ExtendedKeyUsageOID.SERVER_AUTH in cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return None


def _load_authority(cert_path: Path, key_path: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    except OSError as error:
        raise InvalidArgument(f"{error.filename} cannot be read: {error.strerror}", path=str(error.filename)) from error
    except (ValueError, TypeError) as error:
        text = f"{cert_path} and {key_path} are not a certificate and its key in PEM, without a password"
        raise InvalidArgument(text, path=str(cert_path)) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise InvalidArgument(f"{key_path} is not the key of {cert_path}", path=str(key_path))
    try:
        cert.verify_directly_issued_by(cert)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise InvalidArgument(f"{cert_path} is not the certificate of an authority", path=str(cert_path)) from error
    if cert.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise InvalidArgument(
            f"the authority {cert_path} expired on {cert.not_valid_after_utc:%Y-%m-%d}", path=str(cert_path)
        )
    return cert, key


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}-key.pem"


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _names(names: Iterable[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in dict.fromkeys(names):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, secret: bool) -> None:
    """Replace a file atomically: until then, readers find the old content. Raises `PathNotWritable`."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise PathNotWritable(f"cannot write {path}: {error.strerror}", path=str(path)) from error
