"""A user's own authority: the certificates that it issues, and files that it refuses."""

import ssl
import stat
from pathlib import Path

import pytest

from kera.core.errors import InvalidArgument, PathNotWritable
from kera.core.security.issuing import Authority


def test_keys_are_readable_by_their_owner_only(authority: Authority) -> None:
    one = authority.issue("broker-1.example.com")
    key_of_authority = authority.path.with_name("ca-key.pem")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (one.key, key_of_authority)] == [0o600, 0o600]
    assert stat.S_IMODE(authority.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["127.0.0.1", "::1", "broker-1.example.com", "localhost"])
def test_a_certificate_is_valid_for_its_host_and_for_localhost(authority: Authority, name: str) -> None:
    one = authority.issue(name)
    for host in (name, "localhost", "127.0.0.1"):
        assert handshake(authority.path, one.cert, one.key, host)


def test_a_client_certificate_is_not_valid_for_a_host(authority: Authority) -> None:
    one = authority.issue("alice", client=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(authority.path, one.cert, one.key, "localhost")


def test_an_existing_authority_is_reused(authority: Authority) -> None:
    again, made = Authority.open_or_make(authority.path.parent)
    one = again.issue("localhost")
    assert not made
    assert handshake(authority.path, one.cert, one.key, "localhost")


NO_NAMES = [
    *("", "ca", "../evil", "a/b", ".", "a b", "x" * 64, "-", "ä", "*.example.com", "[::1]", "fe80::1%eth0"),
    *("10.0.0.1:7400", "999.0.0.1", "127.1", "010.0.0.1", "0.0.0.0", "::", "a..b", "a.", "a-.b"),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_invalid_names_are_refused(authority: Authority, name: str) -> None:
    before = sorted(authority.path.parent.iterdir())
    with pytest.raises(InvalidArgument, match="is not a host or client name"):
        authority.issue(name)
    assert sorted(authority.path.parent.iterdir()) == before


@pytest.mark.parametrize("client", [False, True])
def test_a_certificate_never_replaces_a_key(authority: Authority, client: bool) -> None:
    authority.issue("alice", client=True)
    before = {path: path.read_bytes() for path in authority.path.parent.iterdir()}
    for name in ("ca-key", "alice-key"):
        with pytest.raises(InvalidArgument, match=f"{name}.pem would be taken for a key"):
            authority.issue(name, client=client)
    assert {path: path.read_bytes() for path in authority.path.parent.iterdir()} == before


@pytest.mark.parametrize("client", [False, True])
def test_hosts_and_clients_cannot_replace_each_others_certificates(authority: Authority, client: bool) -> None:
    one = authority.issue("alice", client=client)
    before = one.cert.read_bytes(), one.key.read_bytes()
    with pytest.raises(InvalidArgument, match=f"is the certificate of a {'client' if client else 'host'}: give the"):
        authority.issue("alice", client=not client)
    assert (one.cert.read_bytes(), one.key.read_bytes()) == before
    assert authority.issue("alice", client=client).cert.read_bytes() != before[0]


def test_a_client_name_over_64_characters_is_refused(authority: Authority) -> None:
    authority.issue("x" * 64, client=True)
    with pytest.raises(InvalidArgument, match="it has more than 64 characters"):
        authority.issue("x" * 64 + "y", client=True)


def test_a_host_name_may_be_longer_than_64_characters(authority: Authority) -> None:
    name = "broker-0.broker-headless.production-streaming.svc.cluster.local.example"
    one = authority.issue(name)
    assert handshake(authority.path, one.cert, one.key, name)


@pytest.mark.parametrize("days", [0, -1, 3651])
def test_an_invalid_number_of_days_is_refused(authority: Authority, days: int) -> None:
    with pytest.raises(InvalidArgument, match="is valid for 1 to 3650 days"):
        authority.issue("localhost", days=days)


def test_invalid_files_of_an_authority_are_refused(authority: Authority, tmp_path: Path) -> None:
    directory = authority.path.parent
    key = directory / "ca-key.pem"
    other, _ = Authority.open_or_make(tmp_path / "other")
    one = authority.issue("localhost")

    key.write_bytes((tmp_path / "other" / "ca-key.pem").read_bytes())
    with pytest.raises(InvalidArgument, match=r"ca-key\.pem is not the key of .*ca\.pem"):
        Authority.open_or_make(directory)
    authority.path.write_bytes(one.cert.read_bytes())
    key.write_bytes(one.key.read_bytes())
    with pytest.raises(InvalidArgument, match=r"ca\.pem is not the certificate of an authority"):
        Authority.open_or_make(directory)
    key.write_text("nothing")
    with pytest.raises(InvalidArgument, match="are not a certificate and its key in PEM"):
        Authority.open_or_make(directory)
    key.unlink()
    with pytest.raises(InvalidArgument, match=r"ca-key\.pem cannot be read: No such file or directory"):
        Authority.open_or_make(directory)
    assert other.path.exists()


def test_the_error_names_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PathNotWritable, match=r"cannot make .*file/certificates"):
        Authority.open_or_make(tmp_path / "file" / "certificates")


def handshake(ca: Path, cert: Path, key: Path, host: str) -> bool:
    """Shake hands between two ends in memory. Raises the client's error about the certificate."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(cert, key)
    calling = ssl.create_default_context(cafile=str(ca))
    ends = [ssl.MemoryBIO(), ssl.MemoryBIO()]
    client = calling.wrap_bio(ends[0], ends[1], server_hostname=host)
    server = serving.wrap_bio(ends[1], ends[0], server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.version() is not None
