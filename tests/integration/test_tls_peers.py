"""TLS with foreign peers: the view of openssl and grpcurl on each port, and the log of refused connections."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster
from tests.certificates import HOST, Issuing, Pair

pytestmark = pytest.mark.timeout(120)

OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
GRPCURL = pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on the path")
WAIT_S = 30.0
DAEMONS = {
    "coordinator": ("grpc", "metrics"),
    "broker-1": ("grpc", "frames", "metrics"),
    "backup-1": ("grpc", "frames"),
}
PORTS = [(daemon, port) for daemon, ports in DAEMONS.items() for port in ports]
EACH_PORT = pytest.mark.parametrize(("daemon", "port"), PORTS, ids=["-".join(each) for each in PORTS])
SERVICES = {"coordinator": "kera.v1.Coordinator", "broker-1": "kera.v1.Broker", "backup-1": "kera.v1.Backup"}


class Refused(NamedTuple):
    """A client with a certificate that must be refused."""

    kind: str
    alert: str
    """The alert that openssl gets."""
    logged: str


REFUSED = [
    Refused("", "certificate required", "it shows no certificate"),
    Refused("expired", "certificate expired", "certificate has expired"),
    Refused("not_yet_valid", "bad certificate", "certificate is not yet valid"),
    Refused("self_signed", "unknown ca", "signed certificate; is its authority in tls_ca?"),
    Refused("of_a_stranger", "unknown ca", "unable to get local issuer certificate; is its authority in tls_ca?"),
    Refused("of_servers_only", "unsupported certificate", "certificate purpose"),
]


class Watched:
    """A cluster whose daemons require certificates, and the certificates of its clients."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.authority, _ = Authority.open_or_make(directory / "authority")
        self.stranger, _ = Authority.open_or_make(directory / "stranger")
        self._issuing = Issuing(self.authority, directory / "issued")
        host = self.authority.issue(HOST)
        files = {"tls_cert": host.cert, "tls_key": host.key, "tls_ca": self.authority.path}
        daemon = {**files, "tls_client_auth": "required", "metrics_port": 0}
        self.cluster = stack.enter_context(
            LocalCluster.running(
                backups=1,
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                coordinator_settings=daemon,
                broker_settings=daemon,
                backup_settings=daemon,
            )
        )

    def address(self, daemon: str, port: str) -> str:
        found: str = self.cluster.ready[daemon][f"{port}_address"]
        return found

    def shown(self, kind: str) -> list[str]:
        """Flags with which openssl and grpcurl show a certificate; empty: none."""
        if not kind:
            return []
        pair: Pair = getattr(self._issuing, kind)()
        return ["-cert", str(pair.cert), "-key", str(pair.key)]

    def openssl(self, daemon: str, port: str, *options: str, until_closed: bool = False) -> str:
        """The output of openssl; `until_closed`: for a connection that the daemon ends."""
        command = ["openssl", "s_client", "-connect", self.address(daemon, port), "-CAfile", str(self.authority.path)]
        if port == "grpc":
            command += ["-alpn", "h2"]
        return run([*command, *(["-ign_eof"] if until_closed else []), *options])

    def grpcurl(
        self, daemon: str, *options: str, ca: Path | None = None, call: str = "list", patience_s: int = 10
    ) -> str:
        """The output of grpcurl; it tries to connect for `patience_s`, whatever the reason for the failure is."""
        command = ["grpcurl", "-connect-timeout", str(patience_s), "-cacert", str(ca or self.authority.path), *options]
        return run([*command, self.address(daemon, "grpc"), call])

    def refusals(self, daemon: str, port: str) -> list[str]:
        """The logged reasons of refused connections at a port."""
        lines = (self.cluster.log_dir / f"{daemon}.log").read_text().splitlines()
        records: list[dict[str, Any]] = [json.loads(line) for line in lines if line.startswith("{")]
        return [
            each["reason"] for each in records if each["event"] == "connection refused" and each["interface"] == port
        ]


def run(command: list[str]) -> str:
    """The output on both streams."""
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=False
    )
    return ended.stdout.decode(errors="replace")


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        yield Watched(tmp_path_factory.mktemp("peers"), stack)


@OPENSSL
@EACH_PORT
def test_openssl_with_a_valid_certificate_is_accepted_at_each_port(watched: Watched, daemon: str, port: str) -> None:
    for version in ("-tls1_2", "-tls1_3"):
        shown = watched.shown("good")
        said = watched.openssl(daemon, port, version, "-verify_return_error", "-verify_ip", HOST, *shown)
        assert "Verify return code: 0 (ok)" in said
        assert "alert" not in said


@OPENSSL
@EACH_PORT
def test_openssl_with_a_wrong_certificate_is_refused_and_the_log_says_why(
    watched: Watched, daemon: str, port: str
) -> None:
    for refused in REFUSED:
        if port == "metrics" and not refused.kind:
            continue  # probes show none, and see only whether it is ready
        said = watched.openssl(daemon, port, *watched.shown(refused.kind), until_closed=True)
        assert port == "grpc" or refused.alert in said, said  # gRPC closes the connection without an alert
        eventually(lambda refused=refused: any(refused.logged in each for each in watched.refusals(daemon, port)))  # type: ignore[misc]


@OPENSSL
@EACH_PORT
def test_old_versions_and_weak_ciphers_are_refused_at_each_port(watched: Watched, daemon: str, port: str) -> None:
    shown = watched.shown("good")
    weak = ["-cipher", "DEFAULT:@SECLEVEL=0"]
    for options, alert in [
        (["-tls1", *weak], "alert protocol version"),
        (["-tls1_1", *weak], "alert protocol version"),
        (["-tls1_2", "-cipher", "NULL:@SECLEVEL=0"], "alert handshake failure"),
        (["-tls1_2", "-cipher", "AES128-SHA"], "alert handshake failure"),
    ]:
        said = watched.openssl(daemon, port, *options, *shown, until_closed=True)
        assert "Cipher is (NONE)" in said
        assert port == "grpc" or alert in said
    eventually(lambda: any("it speaks neither TLS 1.2 nor" in each for each in watched.refusals(daemon, port)))


@OPENSSL
@EACH_PORT
def test_openssl_notices_a_wrong_name_or_authority(watched: Watched, daemon: str, port: str) -> None:
    checks = ["-verify_return_error", *watched.shown("good")]
    assert "hostname mismatch" in watched.openssl(daemon, port, "-verify_hostname", "db.example.com", *checks)
    said = watched.openssl(daemon, port, "-CAfile", str(watched.stranger.path), *checks)
    assert "unable to get local issuer certificate" in said or "self-signed certificate in certificate chain" in said


@OPENSSL
def test_tls_sessions_are_not_resumed(watched: Watched, tmp_path: Path) -> None:
    """A resumed session would admit a client whose certificate has expired meanwhile."""
    session = tmp_path / "session"
    said = watched.openssl("broker-1", "frames", "-tls1_3", "-sess_out", str(session), *watched.shown("good"))
    assert "New, TLSv1.3" in said
    assert "Post-Handshake New Session Ticket" not in said
    assert not session.exists()


@GRPCURL
@pytest.mark.parametrize("daemon", list(SERVICES))
def test_grpcurl_with_a_valid_certificate_sees_all_services(watched: Watched, daemon: str) -> None:
    shown = watched.shown("good")
    services = watched.grpcurl(daemon, *shown).splitlines()
    assert {SERVICES[daemon], "kera.v1.Daemon", "grpc.health.v1.Health"} <= set(services)
    assert f"service {SERVICES[daemon].rpartition('.')[2]} " in watched.grpcurl(daemon, *shown, call="describe")
    assert '"status": "SERVING"' in watched.grpcurl(daemon, *shown, call="grpc.health.v1.Health/Check")
    described = json.loads(watched.grpcurl(daemon, *shown, call="kera.v1.Daemon/DescribeDaemon"))
    assert described["role"] == daemon.partition("-")[0]


@GRPCURL
@pytest.mark.parametrize("daemon", list(SERVICES))
def test_grpcurl_with_a_wrong_certificate_is_refused_and_the_log_says_why(watched: Watched, daemon: str) -> None:
    for refused in REFUSED:
        said = watched.grpcurl(daemon, *watched.shown(refused.kind), patience_s=1)
        assert "Failed to dial target host" in said
        assert "kera.v1" not in said
        eventually(lambda refused=refused: any(refused.logged in each for each in watched.refusals(daemon, "grpc")))  # type: ignore[misc]


@GRPCURL
def test_grpcurl_notices_a_wrong_name_authority_or_plain_text(watched: Watched) -> None:
    shown = watched.shown("good")
    assert "db.example.com" in watched.grpcurl("coordinator", "-servername", "db.example.com", *shown)
    assert "unknown authority" in watched.grpcurl("coordinator", *shown, ca=watched.stranger.path)
    plain = run(["grpcurl", "-connect-timeout", "1", "-plaintext", watched.address("coordinator", "grpc"), "list"])
    assert "Failed to dial target host" in plain
