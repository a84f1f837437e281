"""`kera cluster` and the welcome of `kera dev`: what is printed. Against real daemons they are in tests/integration."""

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kera.cli import cluster as cluster_module
from kera.cli import dev as dev_module
from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import BackupDescription, BrokerDescription, ClusterDescription
from kera.client.local_cluster import LocalCluster

MIB = 1 << 20
BROKER = BrokerDescription(1, "node/boot", "h:1", "h:2", "", 8 * MIB, 256 * MIB, alive=True)


def backup(backup_id: int, *, alive: bool = True) -> BackupDescription:
    return BackupDescription(
        backup_id,
        "node/boot",
        "r1" if backup_id == 1 else "",
        f"b:{backup_id}",
        f"f:{backup_id}",
        "",
        segment_bytes=8 * MIB,
        memory_bytes=256 * MIB,
        disk_bytes=1024 * MIB,
        free_memory_bytes=156 * MIB,
        free_disk_bytes=1024 * MIB,
        alive=alive,
    )


class FakeClient:
    """A client, and its admin, of a cluster with these members."""

    def __init__(self, *backups: BackupDescription) -> None:
        self.admin = self
        self.backups = list(backups)

    async def describe_cluster(self) -> ClusterDescription:
        return ClusterDescription("c1", [BROKER], self.backups)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    made = FakeClient()

    @contextlib.asynccontextmanager
    async def connected(_: str) -> AsyncIterator[FakeClient]:
        yield made

    monkeypatch.setattr(cluster_module, "connected", connected)
    return made


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(app, ["cluster", "describe", *arguments]) == 0
    return capsys.readouterr().out


def test_a_cluster_without_backups_shows_its_brokers_alone(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.backups = []
    assert "BACKUP" not in output(capsys)


def test_backups_are_shown_with_what_they_use(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    client.backups = [backup(1), backup(2, alive=False)]

    assert output(capsys).splitlines()[-3:] == [
        "BACKUP  ALIVE  GRPC  FRAMES  MEMORY USED         DISK USED     SEGMENTS OF  RACK  NODE",
        "     1  yes    b:1   f:1     100 MiB of 256 MiB  0 B of 1 GiB  8 MiB        r1    node",
        "     2  no     b:2   f:2     ? of 256 MiB        ? of 1 GiB    8 MiB        -     node",
    ]
    members = json.loads(output(capsys, "--json"))
    assert [(one["backup_id"], one["alive"], one["free_memory_bytes"]) for one in members["backups"]] == [
        (1, True, 156 * MIB),
        (2, False, 156 * MIB),
    ]


class Started(LocalCluster):
    """A cluster that looks as if it ran."""

    bootstrap = "127.0.0.1:7400"
    directory = Path("data")

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        address = {"grpc_address": "h:1", "frames_address": "h:2"}
        backups = {f"backup-{n}": {"ready": "backup", **address} for n in range(1, self.backup_count + 1)}
        return {"coordinator": {"ready": "coordinator"}, **backups, "broker-1": {"ready": "broker", **address}}


def test_the_welcome_tells_of_backups_where_there_are_some() -> None:
    lines = dev_module._welcome(Started(backups=2, replication=1, backup_memory_bytes=64 * MIB)).splitlines()

    assert lines[0].endswith(": a cluster of 1 broker and 2 backups on this machine")
    assert "  backup 2     grpc h:1, frames h:2" in lines
    assert "  replication  1 backup" in lines
    assert "  memory       256 MiB per broker, 64 MiB per backup, segments of 8 MiB" in lines

    optional = dev_module._welcome(Started(backups=1))
    assert "  replication  no backup, unless a stream says so" in optional.splitlines()

    plain = dev_module._welcome(Started())
    assert ": a cluster of 1 broker on this machine" in plain
    assert "backup" not in plain
    assert "replication" not in plain


def test_replication_needs_as_many_backups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["dev", "--backups", "1", "--replication", "2"]) == 2
    assert "--replication 2 needs --backups 2, or more" in capsys.readouterr().err
