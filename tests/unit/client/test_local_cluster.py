"""`kera.local.cluster`: starts, order and flags of the daemons, with small programs in place of daemons."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kera.core.errors import InvalidArgument
from kera.local import cluster as cluster_module
from kera.local.cluster import LocalCluster
from kera.local.daemon_command import daemon_command

DAEMON = """
import json, os, signal, sys
journal, daemon, *flags = sys.argv[1:]
given = dict(zip(flags[::2], flags[1::2]))
name = os.path.basename(given["--data-dir"])

def note(event):
    with open(journal, "a") as file:
        file.write(json.dumps([event, name, flags]) + "\\n")

def stop(*_):
    note("stop")
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
note("start")
port = given["--port"] if given["--port"] != "0" else "7"
print(json.dumps({"ready": daemon, "grpc_address": f"127.0.0.1:{port}"}), flush=True)
while True:
    signal.pause()
"""


class Journal:
    """A journal of the children's starts and stops."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self, event: str) -> list[tuple[str, list[str]]]:
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [(name, flags) for what, name, flags in lines if what == event]

    def flags_of(self, name: str) -> dict[str, str]:
        """The flags of the child's last start."""
        flags = [flags for one, flags in self.entries("start") if one == name][-1]
        return dict(zip(flags[::2], flags[1::2], strict=False))


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    kept = Journal(tmp_path / "journal")

    def command(daemon: str, settings: Mapping[str, object]) -> list[str]:
        _, _, _, *arguments = daemon_command(daemon, settings)
        return [sys.executable, "-c", DAEMON, str(kept.path), *arguments]

    monkeypatch.setattr(cluster_module, "daemon_command", command)
    return kept


async def test_backups_start_before_brokers_and_stop_after_them(journal: Journal) -> None:
    async with LocalCluster(brokers=2, backups=2) as cluster:
        names = ["coordinator", "backup-1", "backup-2", "broker-1", "broker-2"]
        assert list(cluster.processes) == names
        assert [ready["ready"] for ready in cluster.ready.values()] == [name.partition("-")[0] for name in names]

    assert [name for name, _ in journal.entries("start")] == names
    stopped = [name for name, _ in journal.entries("stop")]
    assert set(stopped[:2]) == {"broker-1", "broker-2"}
    assert set(stopped[2:4]) == {"backup-1", "backup-2"}
    assert stopped[4] == "coordinator"


async def test_each_kind_of_daemon_has_its_flags(journal: Journal) -> None:
    async with LocalCluster(
        backups=1,
        replication=1,
        arena_bytes=100,
        backup_memory_bytes=200,
        segment_bytes=10,
        broker_settings={"idle_close_ms": 5},
        backup_settings={"rack": "r1"},
    ) as cluster:
        directory = cluster.directory

    coordinator, backup, broker = map(journal.flags_of, ("coordinator", "backup-1", "broker-1"))
    assert coordinator == {
        "--host": "127.0.0.1",
        "--data-dir": str(directory / "coordinator"),
        "--port": "0",
        "--default-replication": "1",
    }
    member = {"--host": "127.0.0.1", "--port": "0", "--frames-port": "0", "--coordinator": "127.0.0.1:7"}
    assert backup == {
        **member,
        "--data-dir": str(directory / "backup-1"),
        "--segment-bytes": "10",
        "--memory-bytes": "200",
        "--rack": "r1",
    }
    assert broker == {
        **member,
        "--data-dir": str(directory / "broker-1"),
        "--segment-bytes": "10",
        "--arena-bytes": "100",
        "--idle-close-ms": "5",
    }
    for name in ("backup-1", "broker-1"):
        assert [flags[-1] for one, flags in journal.entries("start") if one == name] == ["--ephemeral"]


async def test_daemons_are_not_ephemeral_with_a_data_directory(journal: Journal, tmp_path: Path) -> None:
    async with LocalCluster(backups=1, data_dir=tmp_path / "data"):
        pass

    assert all("--ephemeral" not in flags for _, flags in journal.entries("start"))
    assert "--default-replication" not in journal.flags_of("coordinator")


async def test_settings_of_a_restart_last_and_are_for_its_kind_alone(journal: Journal) -> None:
    async with LocalCluster(brokers=2, backups=2) as cluster:
        await cluster.restart("broker-1", idle_close_ms=5)
        await cluster.restart("backup-1", rack="r1")
        for name in ("broker-2", "backup-2", "coordinator"):
            await cluster.restart(name)

    brokers = [journal.flags_of(name) for name in ("broker-1", "broker-2")]
    backups = [journal.flags_of(name) for name in ("backup-1", "backup-2")]
    assert [flags.get("--idle-close-ms") for flags in (*brokers, *backups)] == ["5", "5", None, None]
    assert [flags.get("--rack") for flags in (*brokers, *backups)] == [None, None, "r1", "r1"]
    assert journal.flags_of("coordinator")["--port"] == "7"


async def test_a_killed_backup_can_be_restarted(journal: Journal) -> None:
    async with LocalCluster(backups=1) as cluster:
        await cluster.kill("backup-1")
        assert "backup-1" not in cluster.processes
        await cluster.restart("backup-1")
        assert "backup-1" in cluster.processes

    assert [name for name, _ in journal.entries("start")].count("backup-1") == 2


async def test_several_coordinators_share_a_zookeeper_and_brokers_know_them_all(
    journal: Journal, tmp_path: Path
) -> None:
    async with LocalCluster(
        coordinators=2,
        zookeeper="z:1/root",
        port=9000,
        data_dir=tmp_path,
        coordinator_settings={"heartbeat_interval_ms": 7},
    ) as cluster:
        assert list(cluster.processes) == ["coordinator-1", "coordinator-2", "broker-1"]
        assert cluster.bootstrap == "127.0.0.1:9000,127.0.0.1:9001"
        await cluster.restart("coordinator-2")

    for number in (1, 2):
        assert journal.flags_of(f"coordinator-{number}") == {
            "--host": "127.0.0.1",
            "--data-dir": str(tmp_path / f"coordinator-{number}"),
            "--port": str(8999 + number),
            "--heartbeat-interval-ms": "7",
            "--zookeeper": "z:1/root",
        }
    assert journal.flags_of("broker-1")["--coordinator"] == "127.0.0.1:9000,127.0.0.1:9001"
    assert {name for name, _ in journal.entries("stop")[-2:]} == {"coordinator-1", "coordinator-2"}


async def test_a_paused_child_can_be_resumed_and_stopped(journal: Journal) -> None:
    async with LocalCluster() as cluster:
        for _ in range(2):
            await cluster.pause("broker-1")
            await cluster.resume("broker-1")
        await cluster.pause("broker-1")
        with pytest.raises(InvalidArgument, match="no child is called broker-2"):
            await cluster.pause("broker-2")

    assert [name for name, _ in journal.entries("stop")] == ["broker-1", "coordinator"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"coordinators": 0}, "needs a coordinator"),
        ({"coordinators": 2}, "2 coordinators need a ZooKeeper"),
        ({"backups": -1}, "cannot have -1 backups"),
        ({"replication": 1}, "replication 1 needs as many backups, and there are 0"),
        ({"replication": -1, "backups": 2}, "replication -1"),
        ({"data_dir": ""}, "data_dir is empty"),
        ({"log_dir": ""}, "log_dir is empty"),
    ],
)
def test_an_impossible_cluster_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        LocalCluster(**arguments)
