"""Certificates that are wrong in one way each, for tests of the programs that accept or refuse them."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kera.core.security.issuing import Authority

HOST = "127.0.0.1"
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
DAY = datetime.timedelta(days=1)
Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Pair(NamedTuple):
    """The files of a certificate and of its key."""

    cert: Path
    key: Path


class Signer(NamedTuple):
    """The name and the key of an issuer."""

    name: x509.Name
    key: Key


class Issuing:
    """Issues certificates that `kera tls init` would not; by default for `HOST`, from yesterday on and for 90 days."""

    def __init__(self, authority: Authority, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(exist_ok=True)
        key = serialization.load_pem_private_key(authority.path.with_name("ca-key.pem").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._authority = Signer(x509.load_pem_x509_certificate(authority.path.read_bytes()).subject, key)

    def good(self) -> Pair:
        """A valid certificate."""
        return self._issue("good")

    def expired(self) -> Pair:
        """A certificate that expired an hour ago."""
        return self._issue("expired", begin=-2 * DAY, end=-DAY / 24)

    def not_yet_valid(self) -> Pair:
        """A certificate that becomes valid tomorrow."""
        return self._issue("not_yet_valid", begin=DAY)

    def self_signed(self) -> Pair:
        """A certificate without an authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._issue("self_signed", key=key, signer=Signer(_name("self_signed"), key))

    def of_a_stranger(self) -> Pair:
        """A certificate of another authority."""
        return self._issue("of_a_stranger", signer=Signer(_name("stranger"), ec.generate_private_key(ec.SECP256R1())))

    def for_another_host(self) -> Pair:
        """A certificate for a host that clients do not call here."""
        return self._issue("for_another_host", hosts=("db.example.com",))

    def without_hosts(self) -> Pair:
        """A certificate that names a host only in its subject, as old ones did."""
        return self._issue(HOST, hosts=())

    def of_servers_only(self) -> Pair:
        """A certificate like those of public authorities: clients cannot show it."""
        return self._issue("of_servers_only", purposes=(SERVER,))

    def of_clients_only(self) -> Pair:
        """A certificate that servers cannot show."""
        return self._issue("of_clients_only", purposes=(CLIENT,))

    def of_ed25519(self) -> Pair:
        """A certificate with a kind of signature that gRPC does not support."""
        return self._issue("of_ed25519", key=ed25519.Ed25519PrivateKey.generate())

    def _issue(
        self,
        name: str,
        *,
        begin: datetime.timedelta = -DAY,
        end: datetime.timedelta = 90 * DAY,
        hosts: Sequence[str] = (HOST, "localhost"),
        purposes: Sequence[x509.ObjectIdentifier] = (SERVER, CLIENT),
        key: Key | None = None,
        signer: Signer | None = None,
    ) -> Pair:
        key, signer = key or ec.generate_private_key(ec.SECP256R1()), signer or self._authority
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(signer.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begin)
            .not_valid_after(now + end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False
            )
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}-key.pem")
        pair.cert.write_bytes(builder.sign(signer.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
