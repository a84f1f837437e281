"""A cluster whose network connections are encrypted: everything works, and clients without a certificate are
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kera.client import Client, ClientSettings
from kera.core.base.address import split_address
from kera.core.errors import KeraError, Unavailable
from kera.core.security.issuing import Authority, Issued
from kera.core.security.tls import LOOK_EVERY_S
from kera.local.cluster import LocalCluster
from tests.integration.support import troubles
from tests.integration.zookeeper import ZooKeeper, secured_by

pytestmark = pytest.mark.timeout(180)
HOST = "127.0.0.1"
VALUES = [b"%d" % number for number in range(1000)]
IMPATIENT: dict[str, Any] = {"retry_timeout_ms": 300, "connect_timeout_ms": 2000}
Transport = Literal["tcp", "grpc", "auto"]


class Secured:
    """A cluster with two brokers and a backup, each of which requires a certificate of every client."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.authority, _ = Authority.open_or_make(directory)
        self.host = self.authority.issue(HOST)
        self.alice = self.authority.issue("alice", client=True)
        files = {"tls_cert": self.host.cert, "tls_key": self.host.key, "tls_ca": self.authority.path}
        daemon = {**files, "tls_client_auth": "required", "metrics_port": 0}
        self.cluster = stack.enter_context(
            LocalCluster.running(
                brokers=2,
                backups=1,
                replication=1,
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                coordinator_settings=daemon,
                broker_settings=daemon,
                backup_settings=daemon,
            )
        )

    def settings(self, one: Issued | None = None, **settings: Any) -> ClientSettings:
        cert: dict[str, Any] = {} if one is None else {"tls_cert": one.cert, "tls_key": one.key}
        return ClientSettings(tls_ca=self.authority.path, **cert, **settings)

    async def connect(self, **settings: Any) -> Client:
        return await Client.connect(self.cluster.bootstrap, self.settings(self.alice, **settings))

    def addresses(self, name: str) -> list[str]:
        """The network addresses at which a daemon listens."""
        ready = self.cluster.ready[name]
        return [ready[each] for each in ("grpc_address", "frames_address", "metrics_address") if each in ready]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        yield Secured(tmp_path_factory.mktemp("certificates"), stack)


@pytest.mark.parametrize(
    "transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow), pytest.param("auto", marks=pytest.mark.slow)]
)
async def test_records_are_written_and_read_over_tls(secured: Secured, transport: Transport) -> None:
    stream = f"tls-{transport}"
    async with await secured.connect(transport=transport) as client:
        await client.admin.create_stream(stream, streamlets=2, replication=1)
        async with client.producer() as producer:
            await producer.prepare(stream)
            for value in VALUES:
                producer.send(stream, value)
        read = [
            value
            async for chunk in client.consumer(stream, start="earliest", end="latest").batches()
            for value in chunk.batch["value"].to_pylist()
        ]
        assert sorted(read) == sorted(VALUES)
        async with client.group_consumer(f"group-{transport}", stream) as consumer:
            count = 0
            async for _ in consumer:
                count += 1
                if count == len(VALUES):
                    break


async def test_a_streamlet_moves_between_brokers_over_tls(secured: Secured) -> None:
    """So brokers and backups can talk to each other, too: a move, and chunks with replicas after it."""
    async with await secured.connect(transport="tcp") as client:
        created = await client.admin.create_stream("tls-moved", streamlets=1, replication=1)
        owner = created.assignments[0].broker_id
        async with client.producer() as producer:
            await producer.prepare("tls-moved")
            await producer.send("tls-moved", b"before")
            await client.admin.move_streamlet("tls-moved", 0, 3 - owner)
            await producer.send("tls-moved", b"behind")
        read = [
            value
            async for chunk in client.consumer("tls-moved", start="earliest", end="latest").batches()
            for value in chunk.batch["value"].to_pylist()
        ]
    assert read == [b"before", b"behind"]


async def test_clients_without_an_accepted_certificate_are_refused(secured: Secured, tmp_path: Path) -> None:
    stranger, _ = Authority.open_or_make(tmp_path / "stranger")
    strange = stranger.issue("mallory", client=True)
    for settings, text in [
        (secured.settings(**IMPATIENT), "if it wants a certificate, set tls_cert and tls_key"),
        (secured.settings(strange, **IMPATIENT), "it closes the connection|certificate|Socket closed|reset"),
        (ClientSettings(**IMPATIENT), "if it speaks TLS, set tls_ca"),
        (
            ClientSettings(tls_ca=stranger.path, **IMPATIENT),
            "its certificate is not accepted: unable to get local issuer certificate",
        ),
    ]:
        async with await Client.connect(secured.cluster.bootstrap, settings) as client:
            with pytest.raises(KeraError, match=text) as caught:
                await client.admin.list_streams()
            assert isinstance(caught.value, Unavailable)


@pytest.mark.parametrize("name", ["coordinator", "broker-1", "backup-1"])
async def test_plain_text_is_refused(secured: Secured, name: str) -> None:
    for address in secured.addresses(name):
        with socket.create_connection(split_address(address), 10) as plain:
            plain.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 4)
            answer = await asyncio.to_thread(_all_of, plain)
        assert b"HTTP/1.1 200" not in answer
        assert b"kera_" not in answer


def _all_of(sock: socket.socket) -> bytes:
    found = b""
    try:
        while more := sock.recv(4096):
            found += more
    except ConnectionResetError:
        pass
    return found


async def test_the_command_line_takes_its_certificates_from_the_environment(secured: Secured) -> None:
    environment = {
        "KERA_BOOTSTRAP": secured.cluster.bootstrap,
        "KERA_CLIENT_TLS_CA": str(secured.authority.path),
        "KERA_CLIENT_TLS_CERT": str(secured.alice.cert),
        "KERA_CLIENT_TLS_KEY": str(secured.alice.key),
    }
    output, code = await run([sys.executable, "-m", "kera.cli", "stream", "list"], environment)
    assert code == 0, output
    assert "STREAMLETS" in output or output == "no streams\n"
    # The daemons accept them, too: this command asks each of them.
    output, _ = await run([sys.executable, "-m", "kera.cli", "cluster", "health", "--json"], environment)
    assert troubles(json.loads(output)) == []


async def test_the_command_line_reports_a_refused_certificate_in_one_line(secured: Secured, tmp_path: Path) -> None:
    stranger, _ = Authority.open_or_make(tmp_path / "stranger")
    environment = {"KERA_BOOTSTRAP": secured.cluster.bootstrap, "KERA_CLIENT_TLS_CA": str(stranger.path)}
    output, code = await run([sys.executable, "-m", "kera.cli", "stream", "list"], environment)
    assert code == 1
    assert output.count("\n") == 1
    assert "its certificate is not accepted: unable to get local issuer certificate" in output


async def run(command: list[str], environment: dict[str, str]) -> tuple[str, int | None]:
    """The output on both streams, and the exit code."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode(errors="replace"), process.returncode


async def test_new_certificates_are_loaded_without_dropping_connections(secured: Secured) -> None:
    """All certificates change, and also the authority, which is there beside the old one for a while."""
    async with await secured.connect(transport="tcp") as client:
        await client.admin.create_stream("tls-renewed", replication=1)
        async with client.producer() as producer:
            await producer.prepare("tls-renewed")
            await producer.send("tls-renewed", b"before")
            addresses = [address for name in secured.cluster.ready for address in secured.addresses(name)]
            before = [await asyncio.to_thread(_certificate, secured, address) for address in addresses]

            secured.authority.issue(HOST)

            while True:
                now = [await asyncio.to_thread(_certificate, secured, address) for address in addresses]
                if not set(before) & set(now):
                    break
                await asyncio.sleep(LOOK_EVERY_S / 4)
            assert len(set(now)) == 1
            await producer.send("tls-renewed", b"behind")
        assert await client.admin.list_streams()


def _certificate(secured: Secured, address: str) -> bytes:
    context = ssl.create_default_context(cafile=str(secured.authority.path))
    context.load_cert_chain(secured.alice.cert, secured.alice.key)
    with (
        socket.create_connection(split_address(address), 10) as sock,
        context.wrap_socket(sock, server_hostname=HOST) as wrapped,
    ):
        found = wrapped.getpeercert(binary_form=True)
    assert found is not None
    return found


async def test_probes_need_no_certificate_and_see_only_the_state(secured: Secured) -> None:
    context = ssl.create_default_context(cafile=str(secured.authority.path))
    known = ssl.create_default_context(cafile=str(secured.authority.path))
    known.load_cert_chain(secured.alice.cert, secured.alice.key)
    address = secured.cluster.ready["broker-1"]["metrics_address"]
    for path, stranger, somebody in [
        ("/livez", (200, "live\n"), (200, "live\n")),
        ("/readyz", (200, "ready\n"), (200, "] certificate: ")),
        ("/metrics", (403, "show a certificate"), (200, "# HELP ")),
        ("/metrics/all", (403, "show a certificate"), (200, "# HELP ")),
        ("/nowhere", (404, "there is no such path"), (404, "there is no such path")),
    ]:
        for who, (status, text) in ((context, stranger), (known, somebody)):
            found, body = await asyncio.to_thread(_get, f"https://{address}{path}", who)
            assert found == status
            assert body == text if text.endswith("\n") else text in body


def _get(url: str, context: ssl.SSLContext) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_idle_connections_do_not_block_new_ones(secured: Secured) -> None:
    for address in secured.addresses("broker-1"):
        idle = [socket.create_connection(split_address(address), 10) for _ in range(150)]
        try:
            assert await asyncio.to_thread(_certificate, secured, address)
        finally:
            for each in idle:
                each.close()


async def test_a_coordinator_reaches_zookeeper_over_tls(tmp_path: Path) -> None:
    authority, _ = Authority.open_or_make(tmp_path / "certificates")
    one = authority.issue(HOST)
    files = {"tls_cert": one.cert, "tls_key": one.key, "tls_ca": authority.path}
    with ZooKeeper(tmp_path / "zookeeper", secure=secured_by(authority, one)) as server:
        cluster = LocalCluster(
            arena_bytes=64 << 20,
            segment_bytes=1 << 20,
            zookeeper=server.secure_address,
            coordinator_settings={**files, "zookeeper_tls": True},
            broker_settings=files,
        )
        async with cluster, await Client.connect(cluster.bootstrap, ClientSettings(tls_ca=authority.path)) as client:
            await client.admin.create_stream("in-zookeeper")
            assert [each.name for each in await client.admin.list_streams()] == ["in-zookeeper"]
