"""The certificates of a process: files that are invalid, and files that change."""

import contextlib
import re
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from structlog.testing import capture_logs

from kera.core.base.settings import InvalidSettings
from kera.core.security import ClientAuth, InvalidTls, Tls, TlsFiles
from kera.core.security import files as security_files
from kera.core.security.files import FILE_BYTES_MAX
from kera.core.security.issuing import Authority, Issued
from kera.core.security.settings import DaemonTlsSettings, TlsSettings, tls_of, tls_of_daemon
from kera.core.security.tls import LOOK_EVERY_S
from tests.certificates import Issuing, Pair
from tests.examples import first_rows_quick

HOST = "127.0.0.1"


class Timer:
    """Moves on at each call, so that each question looks at the files."""

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


def in_der(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.write_bytes(ssl.PEM_cert_to_DER_cert(files.cert.read_text()))


def empty(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.write_text("")


def a_directory(files: TlsFiles) -> None:
    assert files.cert is not None
    files.cert.unlink()
    files.cert.mkdir()


def a_key_instead(files: TlsFiles) -> None:
    assert files.cert is not None
    assert files.key is not None
    files.cert.write_bytes(files.key.read_bytes())


def a_certificate_instead(files: TlsFiles) -> None:
    assert files.cert is not None
    assert files.key is not None
    files.key.write_bytes(files.cert.read_bytes())


def a_key_that_grpc_does_not_know(files: TlsFiles) -> None:
    assert files.cert is not None
    assert files.ca is not None
    authority, _ = Authority.open_or_make(files.ca.parent)
    put(files, Issuing(authority, files.ca.parent / "issued").of_ed25519())


def put(files: TlsFiles, pair: Pair | Issued) -> None:
    """Replace the certificate and then the key, each atomically."""
    for path, new in (files.cert, pair.cert), (files.key, pair.key):
        assert path is not None
        copy = path.with_name("new")
        copy.write_bytes(new.read_bytes())
        copy.replace(path)


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
    (no_pem, r"tls_cert .*127\.0\.0\.1\.pem is not PEM$"),
    (in_der, r"tls_cert .*127\.0\.0\.1\.pem is not PEM; if it is DER, .*: openssl x509 -inform der -in "),
    (empty, r"tls_cert .*127\.0\.0\.1\.pem is empty"),
    (a_directory, r"tls_cert .*127\.0\.0\.1\.pem cannot be read: Is a directory"),
    (a_key_instead, r"tls_cert .*127\.0\.0\.1\.pem has no certificate in it"),
    (a_certificate_instead, r"tls_key .*127\.0\.0\.1-key\.pem has no key in it"),
    (a_key_that_grpc_does_not_know, r"tls_cert .* has a key of a kind that gRPC does not know \(Ed25519\)"),
    (truncated, r"are not a certificate and its key in PEM"),
    (too_large, r"tls_ca .*ca\.pem has more than 1048576 bytes: it is not a PEM file"),
    (no_authorities, r"tls_ca .*ca\.pem has no certificates of authorities in PEM"),
    (binary_authorities, r"tls_ca .*ca\.pem has no certificates of authorities in PEM"),
    (another_key, r"tls_key .*-key\.pem is not the key of tls_cert .*127\.0\.0\.1\.pem"),
    (encrypted_key, r"tls_key .*-key\.pem is encrypted with a password: give one that is not"),
]


@pytest.mark.parametrize(("spoil", "text"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_the_error_names_invalid_files(authority: Authority, spoil: Callable[[TlsFiles], None], text: str) -> None:
    files = files_of(authority, authority.issue(HOST))
    spoil(files)
    with pytest.raises(InvalidTls, match=text):
        Tls(files)


@pytest.mark.parametrize(("spoil", "text"), first_rows_quick(BAD, 3), ids=[spoil.__name__ for spoil, _ in BAD])
def test_files_that_become_invalid_are_ignored_until_they_are_valid_again(
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
    if files.cert is not None and files.cert.is_dir():
        files.cert.rmdir()
    authority.issue(HOST)
    assert tls.server_context() is not context
    assert tls.version != version
    assert tls.problem == ""


OTHERS_WOULD_NOT_TAKE = [
    ("expired", "when they call 127.0.0.1: certificate has expired"),
    ("not_yet_valid", "when they call 127.0.0.1: certificate is not yet valid"),
    ("self_signed", "when they call 127.0.0.1: self-signed certificate"),
    ("of_a_stranger", "when they call 127.0.0.1: unable to get local issuer certificate"),
    ("for_another_host", "when they call 127.0.0.1: IP address mismatch"),
    ("without_hosts", "when they call 127.0.0.1: IP address mismatch"),
    ("of_clients_only", "when they call 127.0.0.1: unsuitable certificate purpose"),
    ("of_servers_only", "when this daemon calls them: unsuitable certificate purpose"),
]


@pytest.mark.parametrize(("kind", "text"), OTHERS_WOULD_NOT_TAKE, ids=[kind for kind, _ in OTHERS_WOULD_NOT_TAKE])
def test_a_daemon_does_not_load_a_certificate_that_others_would_refuse(
    authority: Authority, tmp_path: Path, kind: str, text: str
) -> None:
    issuing = Issuing(authority, tmp_path / "issued")
    files = files_of(authority, authority.issue(HOST))._replace(client_auth="required", names=(HOST,))
    tls = Tls(files, Timer())
    context = tls.server_context()

    put(files, getattr(issuing, kind)())
    assert tls.server_context() is context
    assert re.search(rf"others would not take .*127\.0\.0\.1\.pem {text}", tls.problem)
    assert not tls.unfit

    put(files, issuing.good())
    assert tls.server_context() is not context
    assert (tls.problem, tls.unfit) == ("", "")


@pytest.mark.parametrize(
    ("kind", "text"), first_rows_quick(OTHERS_WOULD_NOT_TAKE, 2), ids=[kind for kind, _ in OTHERS_WOULD_NOT_TAKE]
)
def test_a_daemon_starts_with_a_certificate_that_others_refuse_and_logs_it(
    authority: Authority, tmp_path: Path, kind: str, text: str
) -> None:
    issuing = Issuing(authority, tmp_path / "issued")
    files = files_of(authority, authority.issue(HOST))._replace(client_auth="required", names=(HOST,))
    put(files, getattr(issuing, kind)())
    with capture_logs() as lines:
        tls = Tls(files, Timer())
    assert [line["event"] for line in lines] == ["invalid certificate"]
    assert re.search(text, tls.unfit)
    assert tls.problem == ""

    put(files, issuing.expired())
    assert "expired" in tls.unfit
    put(files, issuing.good())
    assert (tls.problem, tls.unfit) == ("", "")


def test_a_certificate_is_loaded_when_it_becomes_valid(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuing = Issuing(authority, tmp_path / "issued")
    files = files_of(authority, authority.issue(HOST))._replace(names=(HOST,))
    tls = Tls(files, Timer())
    version = tls.version
    put(files, issuing.not_yet_valid())
    assert "not yet valid" in tls.problem
    assert tls.version == version
    monkeypatch.setattr("kera.core.security.tls.unfit", lambda *_: "")  # tests cannot set the clock of OpenSSL
    assert tls.version != version
    assert tls.problem == ""


def test_an_authority_is_kept_while_the_certificate_needs_it(authority: Authority, tmp_path: Path) -> None:
    new, _ = Authority.open_or_make(tmp_path / "new")
    files = files_of(authority, authority.issue(HOST))._replace(names=(HOST,))
    tls = Tls(files, Timer())
    old = authority.path.read_bytes()

    authority.path.write_bytes(new.path.read_bytes())
    assert "unable to get local issuer certificate" in tls.problem
    authority.path.write_bytes(old + new.path.read_bytes())
    assert tls.problem == ""
    put(files, new.issue(HOST))
    assert tls.problem == ""
    version = tls.version
    authority.path.write_bytes(new.path.read_bytes())
    assert tls.version != version
    assert tls.problem == ""


def test_a_certificate_and_its_key_come_from_one_read(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files may be replaced after they were read and before OpenSSL loads them."""
    files = files_of(authority, authority.issue(HOST))
    other = Issuing(authority, tmp_path / "issued").good()

    def replaced(setting: str, path: Path | None) -> bytes | None:
        found = read(setting, path)
        if setting == "tls_ca":
            put(files, other)
        return found

    read = security_files._read
    monkeypatch.setattr(security_files, "_read", replaced)
    loaded = security_files.load(files)
    assert loaded.cert is not None
    assert shown(loaded) == ssl.PEM_cert_to_DER_cert(loaded.cert.decode())


def shown(loaded: security_files.Loaded) -> bytes | None:
    """The certificate that a client sees."""
    assert loaded.server is not None
    ends = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = loaded.client.wrap_bio(ends[0], ends[1], server_hostname=HOST)
    server = loaded.server.wrap_bio(ends[1], ends[0], server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return client.getpeercert(binary_form=True)


def test_files_are_read_again_only_after_an_interval(authority: Authority) -> None:
    now_s = 0.0
    tls = Tls(files_of(authority, authority.issue(HOST)), lambda: now_s)
    version = tls.version
    authority.issue(HOST)
    assert tls.version == version
    now_s = LOOK_EVERY_S
    assert tls.version != version


def test_the_end_of_the_certificate_is_known(authority: Authority) -> None:
    one = authority.issue(HOST, days=3)
    assert Tls(files_of(authority, one)).not_after_s == one.not_after.timestamp()
    assert Tls(TlsFiles(ca=authority.path)).not_after_s is None


def test_contexts_require_tls_1_2_and_check_the_server(authority: Authority) -> None:
    tls = Tls(files_of(authority, authority.issue(HOST)))
    for context in (tls.server_context(), tls.client_context()):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.client_context().check_hostname
    assert tls.client_context().verify_mode == ssl.CERT_REQUIRED


def test_a_server_context_needs_a_certificate(authority: Authority) -> None:
    with pytest.raises(InvalidTls, match="set tls_cert and tls_key"):
        Tls(TlsFiles(ca=authority.path)).server_context()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (DaemonTlsSettings(tls_ca=Path("a")), "tls_cert, tls_key is missing: a daemon with TLS needs it"),
        (DaemonTlsSettings(tls_cert=Path("c")), "tls_ca, tls_key is missing: a daemon with TLS needs it"),
        (DaemonTlsSettings(tls_client_auth="required"), "tls_client_auth needs certificates"),
        *[
            (
                DaemonTlsSettings(
                    tls_ca=Path("system"), tls_cert=Path("c"), tls_key=Path("k"), tls_client_auth=client_auth
                ),
                "tls_ca system: everyone can get a certificate of these authorities, and would be admitted",
            )
            for client_auth in ("required", "optional")
        ],
    ],
)
def test_incomplete_settings_of_a_daemon_are_refused(settings: DaemonTlsSettings, text: str) -> None:
    with pytest.raises(InvalidSettings, match=text):
        tls_of_daemon(settings, HOST)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (TlsSettings(tls_cert=Path("c"), tls_key=Path("k")), "tls_ca is missing: a client with TLS needs it"),
        (TlsSettings(tls_ca=Path("system"), tls_cert=Path("c")), "tls_cert and tls_key belong together"),
    ],
)
def test_incomplete_settings_of_a_client_are_refused(settings: TlsSettings, text: str) -> None:
    with pytest.raises((InvalidSettings, InvalidTls), match=text):
        tls_of(settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.invalid:x"])
@pytest.mark.parametrize("client_auth", ["none", "optional"])
def test_a_daemon_open_to_other_hosts_needs_client_certificates_or_insecure(
    authority: Authority, host: str, client_auth: ClientAuth
) -> None:
    one = authority.issue(HOST)
    files: dict[str, Any] = {"tls_cert": one.cert, "tls_key": one.key, "tls_ca": authority.path}
    for given in ({}, {**files, "tls_client_auth": client_auth}):
        if host == "example.invalid:x":
            tls_of_daemon(DaemonTlsSettings(**given), host)  # a daemon cannot listen there
            continue
        with pytest.raises(
            InvalidSettings, match=f"host {re.escape(host)}: every client that reaches it from another host"
        ):
            tls_of_daemon(DaemonTlsSettings(**given), host)
        tls_of_daemon(DaemonTlsSettings(**given, insecure=True), host)
    tls_of_daemon(DaemonTlsSettings(**files, tls_client_auth="required"), host)
    tls_of_daemon(DaemonTlsSettings(**files), host, authenticates=True)


def test_a_daemon_with_passwords_needs_tls_to_listen_beyond_its_host() -> None:
    with pytest.raises(InvalidSettings, match="or these files and security"):
        tls_of_daemon(DaemonTlsSettings(), "10.0.0.1", authenticates=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_daemon_on_its_own_host_needs_no_tls(host: str) -> None:
    assert tls_of_daemon(DaemonTlsSettings(), host) is None


def test_a_client_without_settings_uses_no_tls() -> None:
    assert tls_of(TlsSettings()) is None


@pytest.mark.parametrize(
    ("advertised", "frames", "host", "names"),
    [
        ("", "", "10.0.0.1", ("10.0.0.1",)),
        ("broker-1.example.com", "", "0.0.0.0", ("broker-1.example.com",)),
        ("broker-1.example.com:7410", "[2001:db8::1]:7411", "::", ("broker-1.example.com", "2001:db8::1")),
        ("::1", "", "::1", ("::1",)),
        ("", "", "::", ()),
        ("no address:at all:x", "", "10.0.0.1", ()),
    ],
)
def test_the_certificate_has_to_name_the_advertised_hosts(
    authority: Authority, advertised: str, frames: str, host: str, names: tuple[str, ...]
) -> None:
    class Advertised(DaemonTlsSettings):
        advertised_address: str = advertised
        advertised_frames_address: str = frames

    one = authority.issue(HOST)
    settings = Advertised(tls_cert=one.cert, tls_key=one.key, tls_ca=authority.path, tls_client_auth="required")
    tls = tls_of_daemon(settings, host)
    assert tls is not None
    assert tls.files.names == names


def test_a_client_can_use_the_authorities_of_the_operating_system(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))  # OpenSSL takes it for the file of the operating system
    tls = tls_of(TlsSettings(tls_ca=Path("system")))
    assert tls is not None
    assert tls.client_context().cert_store_stats()["x509_ca"] == 1
