"""Certificates that are not as they should be, each in one way, for tests of who takes them and what they say."""

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
    """Who signs."""

    name: x509.Name
    key: Key


class Issuing:
    """Issues by an authority what `kera tls init` would not: for `HOST`, from yesterday on and for 90 days, else."""

    def __init__(self, authority: Authority, directory: Path) -> None:
        self._directory = directory
        self._directory.mkdir(exist_ok=True)
        key = serialization.load_pem_private_key(authority.path.with_name("ca-key.pem").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        self._authority = Signer(x509.load_pem_x509_certificate(authority.path.read_bytes()).subject, key)

    def good(self) -> Pair:
        """As it should be."""
        return self._issue("good")

    def expired(self) -> Pair:
        """An hour ago."""
        return self._issue("expired", begin=-2 * DAY, end=-DAY / 24)

    def not_yet_valid(self) -> Pair:
        """Tomorrow."""
        return self._issue("not_yet_valid", begin=DAY)

    def self_signed(self) -> Pair:
        """By no authority."""
        key = ec.generate_private_key(ec.SECP256R1())
        return self._issue("self_signed", key=key, signer=Signer(_name("self_signed"), key))

    def of_a_stranger(self) -> Pair:
        """By another authority."""
        return self._issue("of_a_stranger", signer=Signer(_name("stranger"), ec.generate_private_key(ec.SECP256R1())))

    def for_another_host(self) -> Pair:
        """That nobody calls here."""
        return self._issue("for_another_host", hosts=("db.example.com",))

    def without_hosts(self) -> Pair:
        """Only its subject names one, as was done once."""
        return self._issue(HOST, hosts=())

    def of_servers_only(self) -> Pair:
        """As public authorities issue them: clients cannot show it."""
        return self._issue("of_servers_only", purposes=(SERVER,))

    def of_clients_only(self) -> Pair:
        """Servers cannot show it."""
        return self._issue("of_clients_only", purposes=(CLIENT,))

    def of_ed25519(self) -> Pair:
        """gRPC knows no such signatures."""
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
