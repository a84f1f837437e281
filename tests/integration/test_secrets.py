"""Secrets appear only where the test put them: they carry a mark, and everything written or printed is searched for
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.client import Client, ClientSettings
from kera.client.cluster.cluster import Cluster
from kera.core.access.credentials import of_daemon
from kera.core.credential_settings import secure
from kera.core.errors import KeraError
from kera.core.runtime import MACHINE, secured
from kera.local.cluster import LocalCluster

pytestmark = pytest.mark.timeout(180)
MARK = "x5ecret"
CLUSTER_SECRET = f"{MARK}-of-the-cluster-0123456789"
PASSWORD, WRONG, NEW = f"{MARK}-password", f"{MARK}-wrong-password", f"{MARK}-new-password"
STREAM = "s"


def secrets_in(directory: Path, but: Path) -> Iterator[tuple[Path, bytes]]:
    """Files that contain a marked secret."""
    for path in directory.rglob("*"):
        if path.is_file() and path != but:
            data = path.read_bytes()
            if MARK.encode() in data:
                at = data.index(MARK.encode())
                yield path, data[max(0, at - 100) : at + 100]


async def refused(bootstrap: str, **wrong: Any) -> list[str]:
    """The error for a client with these credentials, in all its forms, and its settings as text."""
    settings = ClientSettings(retry_timeout_ms=200, **wrong)
    try:
        async with await Client.connect(bootstrap, settings) as client:
            await client.admin.list_streams()
    except KeraError as error:
        return [
            str(error),
            repr(error),
            repr(error.attributes),
            repr(settings),
            str(settings),
            settings.model_dump_json(),
        ]
    raise AssertionError("it was let in")


@pytest.mark.usefixtures("programs_start_alone")
async def test_secrets_appear_in_no_file_log_metric_or_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = tmp_path / "secret"
    secret.write_text(CLUSTER_SECRET)
    shm = Path("/dev/shm") / f"kera-test-{tmp_path.parent.name}-{tmp_path.name}"
    shm.mkdir()
    daemon: dict[str, object] = {
        "security": True,
        "cluster_secret_file": secret,
        "metrics_port": 0,
        "log_level": "debug",
    }
    said: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, shm)
        cluster = stack.enter_context(
            LocalCluster.running(
                brokers=2,
                backups=1,
                replication=1,
                arena_bytes=64 << 20,
                backup_memory_bytes=64 << 20,
                segment_bytes=1 << 20,
                data_dir=tmp_path / "data",
                log_dir=tmp_path / "logs",
                coordinator_settings=daemon,
                broker_settings={**daemon, "shm_dir": shm},
                backup_settings=daemon,
            )
        )
        bootstrap = cluster.bootstrap
        introduction = of_daemon(CLUSTER_SECRET)
        said += [repr(introduction), repr(secured(MACHINE, None, introduction))]
        async with Client(Cluster(bootstrap, ClientSettings(), runtime=secured(MACHINE, None, introduction))) as first:
            await first.access.create_user("alice", PASSWORD)
            await first.access.grant("user:alice", ["read", "write", "create"], f"stream:{STREAM}")
            await first.access.grant("user:alice", ["describe"], "cluster")
            said.append(repr(await first.access.users()))
        settings = ClientSettings(user="alice", password=PASSWORD, transport="tcp")
        said += [repr(settings), repr(secure(MACHINE, settings)), settings.model_dump_json()]
        async with await Client.connect(bootstrap, settings) as alice:
            await alice.admin.create_stream(STREAM, replication=1)
            async with alice.producer() as producer:
                await producer.prepare(STREAM)
                await producer.send(STREAM, b"1")
            token = await alice.access.issue_token()
            said += [repr(token), repr(await alice.access.tokens())]
            said += await refused(bootstrap, user="alice", password=WRONG)
            said += await refused(bootstrap, token=f"kera_0123_{MARK}")
            said += await refused(bootstrap, token=f"{MARK}.{MARK}.{MARK}")
            for name, ready in cluster.ready.items():
                for path in ("/metrics", "/metrics/all", "/readyz"):
                    request = urllib.request.Request(f"http://{ready['metrics_address']}{path}")
                    request.add_header("Authorization", f"Bearer {token.secret}")
                    with await asyncio.to_thread(urllib.request.urlopen, request, timeout=30) as answer:
                        said.append(f"{name} {answer.read().decode()}")
            await alice.access.set_password("alice", NEW)
        async with await Client.connect(bootstrap, ClientSettings(user="alice", password=NEW)) as alice:
            await alice.admin.list_streams()
        for process in cluster.processes.values():
            said.append(Path(f"/proc/{process}/cmdline").read_text())
        while_running = list(secrets_in(tmp_path, but=secret)) + list(secrets_in(shm, but=secret))
        of_token = [
            path
            for directory in (tmp_path, shm)
            for path in directory.rglob("*")
            if path.is_file() and token.secret.rpartition("_")[2].encode() in path.read_bytes()
        ]
    output = capfd.readouterr()
    said += [output.out, output.err, caplog.text]
    assert [path for path, _ in secrets_in(tmp_path, but=shm)] == [secret]  # proof that the search would find it
    assert while_running == []
    assert of_token == []
    assert list(secrets_in(tmp_path, but=secret)) == []
    for text in said:
        assert MARK not in text, text
        assert token.secret.rpartition("_")[2] not in text, text
