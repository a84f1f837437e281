"""The certificates of a process: files that are no good, and files that change."""

import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kera.core.security import ClientAuth, Tls, TlsFiles
from kera.core.security.issuing import Authority, Issued
from kera.core.security.settings import DaemonTlsSettings, TlsSettings, tls_of, tls_of_daemon
from kera.core.security.tls import FILE_BYTES_MAX, LOOK_EVERY_S, InvalidTls
from kera.core.settings import InvalidSettings

HOST = "127.0.0.1"


class Timer:
    """Moves on by itself, so that each question looks at the files."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += LOOK_EVERY_S
        return self.now_s


def files_of(authority: Authority, one: Issued) -> TlsFiles:
    return TlsFiles(one.cert, one.key, authority.path)


def absent(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.unlink()


def no_pem(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.write_text("hello")


def truncated(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.write_bytes(files.cert.read_bytes()[:300])


def too_large(files: TlsFiles) -> None:
    assert files.ca is not None
    files.ca.write_bytes(b"#" * (FILE_BYTES_MAX + 1))


def no_authorities(files: TlsFiles) -> None:
    assert files.ca is not None
    files.ca.write_text("# none yet")


def binary_authorities(files: TlsFiles) -> None:
    assert files.ca is not None
    files.ca.write_bytes(b"\xff\xfe\x00")


def another_key(files: TlsFiles) -> None:
    assert files.key is not None
    files.key.write_bytes(_key(serialization.NoEncryption()))


def encrypted_key(files: TlsFiles) -> None:
    assert files.key is not None
    files.key.write_bytes(_key(serialization.BestAvailableEncryption(b"secret")))


def _key(encryption: serialization.KeySerializationEncryption) -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )


BAD: list[tuple[Callable[[TlsFiles], None], str]] = [
    (absent, r"tls_cert .*127\.0\.0\.1\.pem cannot be read: No such file or directory"),
    (no_pem, r"are no certificate and its key in PEM"),
    (truncated, r"are no certificate and its key in PEM"),
    (too_large, r"tls_ca .*ca\.pem has more than 1048576 bytes: it is no PEM file"),
    (no_authorities, r"tls_ca .*ca\.pem has no certificates of authorities in PEM"),
    (binary_authorities, r"tls_ca .*ca\.pem has no certificates of authorities in PEM"),
    (another_key, r"tls_key .*-key\.pem is not the key of tls_cert .*127\.0\.0\.1\.pem"),
    (encrypted_key, r"tls_key .*-key\.pem is encrypted with a password: give one that is not"),
]


@pytest.mark.parametrize(("spoil", "text"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_files_that_are_no_good_are_named(authority: Authority, spoil: Callable[[TlsFiles], None], text: str) -> None:
    files = files_of(authority, authority.issue(HOST))
    spoil(files)
    with pytest.raises(InvalidTls, match=text):
        Tls(files)


@pytest.mark.parametrize(("spoil", "text"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_files_that_become_no_good_are_not_taken_until_they_are_whole_again(
    authority: Authority, spoil: Callable[[TlsFiles], None], text: str
) -> None:
    files = files_of(authority, authority.issue(HOST))
    ca = authority.path.read_bytes()
    tls = Tls(files, Timer())
    version, context = tls.version, tls.server_context()

    spoil(files)
    assert tls.server_context() is context
    assert tls.version == version
    assert re.search(text, tls.problem)

    authority.path.write_bytes(ca)
    authority.issue(HOST)
    assert tls.server_context() is not context
    assert tls.version != version
    assert tls.problem == ""


def test_files_are_looked_at_now_and_then_only(authority: Authority) -> None:
    now_s = 0.0
    tls = Tls(files_of(authority, authority.issue(HOST)), lambda: now_s)
    version = tls.version
    authority.issue(HOST)
    assert tls.version == version
    now_s = LOOK_EVERY_S
    assert tls.version != version


def test_what_is_good_until_when_is_told(authority: Authority) -> None:
    one = authority.issue(HOST, days=3)
    assert Tls(files_of(authority, one)).not_after_s == one.not_after.timestamp()
    assert Tls(TlsFiles(ca=authority.path)).not_after_s is None


def test_nobody_speaks_what_is_not_safe(authority: Authority) -> None:
    tls = Tls(files_of(authority, authority.issue(HOST)))
    for context in (tls.server_context(), tls.client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.client_context().check_hostname
    assert tls.client_context().verify_mode == ssl.CERT_REQUIRED


def test_who_serves_needs_a_certificate(authority: Authority) -> None:
    with pytest.raises(InvalidTls, match="set tls_cert and tls_key"):
        Tls(TlsFiles(ca=authority.path)).server_context()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (DaemonTlsSettings(tls_ca=Path("a")), "tls_cert, tls_key is missing: a daemon with TLS needs it"),
        (DaemonTlsSettings(tls_cert=Path("c")), "tls_ca, tls_key is missing: a daemon with TLS needs it"),
        (DaemonTlsSettings(tls_client_auth="required"), "tls_client_auth needs certificates"),
    ],
)
def test_settings_of_a_daemon_that_are_not_complete_are_refused(settings: DaemonTlsSettings, text: str) -> None:
    with pytest.raises(InvalidSettings, match=text):
        tls_of_daemon(settings, HOST)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (TlsSettings(tls_cert=Path("c"), tls_key=Path("k")), "tls_ca is missing: a client with TLS needs it"),
        (TlsSettings(tls_ca=Path("system"), tls_cert=Path("c")), "tls_cert and tls_key belong together"),
    ],
)
def test_settings_of_a_client_that_are_not_complete_are_refused(settings: TlsSettings, text: str) -> None:
    with pytest.raises((InvalidSettings, InvalidTls), match=text):
        tls_of(settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.invalid:x"])
@pytest.mark.parametrize("client_auth", ["none", "optional"])
def test_who_listens_beyond_its_host_lets_in_nobody_unseen_unless_that_is_meant(
    authority: Authority, host: str, client_auth: ClientAuth
) -> None:
    one = authority.issue(HOST)
    files: dict[str, Any] = {"tls_cert": one.cert, "tls_key": one.key, "tls_ca": authority.path}
    for given in ({}, {**files, "tls_client_auth": client_auth}):
        if host == "example.invalid:x":
            tls_of_daemon(DaemonTlsSettings(**given), host)  # nobody can listen there
            continue
        with pytest.raises(InvalidSettings, match=f"host {re.escape(host)}: anybody who reaches it from elsewhere"):
            tls_of_daemon(DaemonTlsSettings(**given), host)
        tls_of_daemon(DaemonTlsSettings(**given, insecure=True), host)
    tls_of_daemon(DaemonTlsSettings(**files, tls_client_auth="required"), host)
    tls_of_daemon(DaemonTlsSettings(**files), host, authenticates=True)


def test_passwords_and_tokens_go_over_tls_only_where_others_could_hear_them() -> None:
    with pytest.raises(InvalidSettings, match="or these files and security"):
        tls_of_daemon(DaemonTlsSettings(), "10.0.0.1", authenticates=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_on_its_own_host_a_daemon_needs_nothing(host: str) -> None:
    assert tls_of_daemon(DaemonTlsSettings(), host) is None


def test_without_settings_nothing_is_encrypted() -> None:
    assert tls_of(TlsSettings()) is None


def test_the_authorities_of_the_operating_system_will_do() -> None:
    tls = tls_of(TlsSettings(tls_ca=Path("system")))
    assert tls is not None
    assert tls.client_context().cert_store_stats()["x509_ca"] >= 0
