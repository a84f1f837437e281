"""Output of `kera cluster`, and the welcome of `kera dev`. Tests against real daemons are in tests/integration."""

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.cli import cluster as cluster_module
from kera.cli import dev as dev_module
from kera.cli._run import run_app
from kera.cli.app import app
from kera.client import (
    BackupDescription,
    BrokerDescription,
    BrokerLoad,
    ClusterDescription,
    DrainStatus,
    MoveResult,
    Rebalancing,
    RecoveryDescription,
    StreamletMove,
)
from kera.local.cluster import LocalCluster
from tests.unit.cli.fake_client import FakeClient

MIB = 1 << 20
BROKER = BrokerDescription(1, "node/boot", "h:1", "h:2", "", 8 * MIB, 256 * MIB, alive=True)


def backup(backup_id: int, *, alive: bool = True, version: str = "") -> BackupDescription:
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
        version=version,
        alive=alive,
    )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClient]:
    monkeypatch.setattr(cluster_module, "POLL_INTERVAL_S", 0)
    with FakeClient().answering() as made:
        yield made


def has(client: FakeClient, *backups: BackupDescription, catching_up: str = "") -> None:
    """Have the cluster described with one broker and these backups."""
    client.looks["describe_cluster"] = ClusterDescription("c1", [BROKER], list(backups), catching_up=catching_up)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_app(app, ["cluster", "describe", *arguments]) == 0
    return capsys.readouterr().out


def test_a_cluster_without_backups_has_no_table_of_backups(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    has(client)
    assert "BACKUP" not in output(capsys)


def test_the_description_begins_with_the_reason_why_restored_metadata_wait(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    has(client, catching_up="the metadata are older than the cluster")
    assert output(capsys).splitlines()[1:3] == ["the metadata are older than the cluster", ""]


def test_backups_are_shown_with_their_memory_and_disk_use(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    has(client, backup(1, version="1.2"), backup(2, alive=False))

    assert output(capsys).splitlines()[-3:] == [
        "BACKUP  ALIVE  VERSION  GRPC  FRAMES  MEMORY USED         DISK USED     SEGMENT SIZE  RACK  NODE",
        "     1  yes    1.2      b:1   f:1     100 MiB of 256 MiB  0 B of 1 GiB  8 MiB         r1    node",
        "     2  no     ?        b:2   f:2     ? of 256 MiB        ? of 1 GiB    8 MiB         -     node",
    ]
    members = json.loads(output(capsys, "--json"))
    assert [(one["backup_id"], one["alive"], one["free_memory_bytes"]) for one in members["backups"]] == [
        (1, True, 156 * MIB),
        (2, False, 156 * MIB),
    ]


class Started(LocalCluster):
    """A cluster that appears to run."""

    bootstrap = "127.0.0.1:7400"
    directory = Path("data")

    @property
    def ready(self) -> dict[str, dict[str, Any]]:
        address = {"grpc_address": "h:1", "frames_address": "h:2"}
        backups = {f"backup-{n}": {"ready": "backup", **address} for n in range(1, self.backup_count + 1)}
        return {"coordinator": {"ready": "coordinator"}, **backups, "broker-1": {"ready": "broker", **address}}


def test_the_welcome_shows_backups_and_replication_if_there_are_any() -> None:
    lines = dev_module.welcome(Started(backups=2, replication=1, backup_memory_bytes=64 * MIB)).splitlines()

    assert lines[0].endswith(": a cluster of 1 broker and 2 backups on this machine")
    assert "  backup 2     grpc h:1, frames h:2" in lines
    assert "  replication  1 backup" in lines
    assert "  memory       256 MiB per broker, 64 MiB per backup, segments of 8 MiB" in lines

    optional = dev_module.welcome(Started(backups=1))
    assert "  replication  none by default" in optional.splitlines()

    plain = dev_module.welcome(Started())
    assert ": a cluster of 1 broker on this machine" in plain
    assert "backup" not in plain
    assert "replication" not in plain


def test_several_coordinators_need_zookeeper(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["dev", "--coordinators", "2"]) == 2
    assert "--coordinators 2 needs --zookeeper" in capsys.readouterr().err


def test_dev_refuses_replication_above_the_number_of_backups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["dev", "--backups", "1", "--replication", "2"]) == 2
    assert "--replication 2 needs --backups 2, or more" in capsys.readouterr().err


# --- moves and drains ----------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert run_app(app, ["cluster", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def moved(stall_us: int) -> MoveResult:
    return MoveResult(None, stall_us)  # type: ignore[arg-type]  # the stream is not shown


def test_a_move_shows_how_long_appends_paused(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    client.in_turn = [moved(12_345), moved(0), moved(7)]

    assert run(capsys, "move", "orders", "3", "2") == [
        "broker 2 owns streamlet 3 of orders; appends paused for 12.3 ms"
    ]
    assert run(capsys, "move", "orders", "3", "2") == ["broker 2 owns streamlet 3 of orders; it was already there"]
    assert json.loads(run(capsys, "move", "orders", "3", "2", "--json")[0])["stall_us"] == 7
    assert client.asked[0] == ("move_streamlet", "orders", 3, 2)


def test_rebalancing_shows_moves_with_their_reasons_and_loads(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    moves = [StreamletMove("orders", 3, 1, 2, "broker 1 is busy"), StreamletMove("orders", 4, 1, 2, "", "away")]
    done = Rebalancing(moves, [BrokerLoad(1, 2 * MIB, 4, MIB, 3, 0.9, 0.455), BrokerLoad(2, 0, 1, MIB, 2)])
    client.in_turn = [done, done, Rebalancing([], [])]

    assert run(capsys, "rebalance", "--dry-run") == [
        "STREAM  STREAMLET  FROM  TO  REASON",
        "orders          3     1   2  broker 1 is busy",
        "orders          4     1   2  not moved: away",
        "",
        "BROKER  LOAD     LOAD AFTER  LOOP  LOOP AFTER  STREAMLETS  STREAMLETS AFTER",
        "     1  2 MiB/s  1 MiB/s     90%   46%                  4                 3",
        "     2  0 B/s    1 MiB/s     0%    0%                   1                 2",
    ]
    assert json.loads("".join(run(capsys, "rebalance", "--json")))["moves"][1]["error"] == "away"
    assert run(capsys, "rebalance")[0] == "nothing to move: the brokers have about the same load"
    assert [asked[-1] for asked in client.asked] == [{"dry_run": True}, {"dry_run": False}, {"dry_run": False}]


def test_a_drain_shows_its_remaining_work_and_waits_on_request(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    under_way = DrainStatus(False, 2, 1, 0, ["not durable yet (2)"])
    done = DrainStatus(True, 0, 0, 0, [])
    later = dataclasses.replace(under_way, streamlets_owned=1, reasons=["not durable yet"])
    other = dataclasses.replace(later, reasons=["there is no other live broker"])
    client.in_turn = [under_way, under_way, later, other, done, DrainStatus(False, 0, 0, 5, []), done, done]

    assert run(capsys, "drain", "broker-1") == [
        "broker 1 is draining; remaining: 2 streamlets, older records of 1 streamlet",
        "  not durable yet (2)",
    ]
    assert run_app(app, ["cluster", "drain", "broker-1", "--wait"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == ["broker 1 is drained and can be stopped"]
    assert said.err.splitlines() == [
        "remaining: 2 streamlets, older records of 1 streamlet",
        "  not durable yet (2)",
        "remaining: 1 streamlet, older records of 1 streamlet",
        "  there is no other live broker",
    ]
    assert [named for _, _, named in client.asked[1:]] == [{"undo": False}, *[{"ask": True}] * 3]
    assert run(capsys, "drain", "backup-2") == ["backup 2 is draining; remaining: 5 replicas"]
    assert run(capsys, "drain", "backup-2", "--undo") == ["backup 2 is back in service"]
    assert json.loads("".join(run(capsys, "drain", "backup-2", "--json")))["done"] is True
    assert client.asked[0] == ("drain_broker", 1, {"undo": False})
    assert client.asked[-2] == ("drain_backup", 2, {"undo": True})


def test_a_wait_for_a_drain_fails_when_the_drain_is_cancelled(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    under_way = DrainStatus(False, 2, 0, 0, ["not durable yet (2)"])
    client.in_turn = [under_way, dataclasses.replace(under_way, draining=False)]

    assert run_app(app, ["cluster", "drain", "broker-1", "--wait"]) == 1
    assert "the drain of broker 1 was cancelled" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["1"], ["node-1"], ["broker-x"], ["broker-" + "9" * 5000], ["broker-1", "--undo", "--wait"]]
)
def test_a_drain_with_invalid_arguments_is_refused(client: FakeClient, wrong: list[str]) -> None:
    assert run_app(app, ["cluster", "drain", *wrong]) == 2
    assert client.asked == []


# --- copies of the metadata ----------------------------------------------------------------------------------------


def test_a_metadata_backup_is_written_to_the_target_of_a_link(
    client: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    client.in_turn = [b"first", b"second", b"third"]
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "copy", tmp_path / "link"
    link.symlink_to(Path("there") / "copy")

    for copy in (b"first", b"second"):  # a new file, and one that is replaced
        assert run(capsys, "backup", str(link))[0].startswith(f"backed up the metadata to {link}")
        assert target.read_bytes() == copy
    run(capsys, "backup", str(target))

    assert link.is_symlink()
    assert link.read_bytes() == b"third"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["copy", "link", "there"]


def test_a_metadata_backup_is_readable_only_by_its_owner_and_has_the_data_of_one_run(
    client: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, at_once = tmp_path / "copy", tmp_path / "copy.part"
    at_once.write_bytes(b"of another run")  # a run that took this name would collide with it
    file.touch(0o644)
    client.in_turn = [b"whole"]

    run(capsys, "backup", str(file))

    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (b"whole", 0o600)
    assert at_once.read_bytes() == b"of another run"


def test_a_failed_metadata_backup_leaves_only_the_previous_file(
    client: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy").write_bytes(b"before")
    client.in_turn = [b"whole"]
    monkeypatch.setattr(os, "fsync", full)

    assert run_app(app, ["cluster", "backup", str(tmp_path / "copy")]) == 2

    assert capsys.readouterr().err == f"kera: error: cannot write {tmp_path}/copy: No space left on device\n"
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("copy", b"before")]


def full(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_metadata_backup_replaces_only_regular_files(
    client: FakeClient, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)

    for file, reason in (
        (pipe, "it is not a regular file"),
        (link, "it is not a regular file"),
        (loop, "Too many levels of symbolic links"),
        (tmp_path, "it is a directory"),
        (".", "it is a directory"),
    ):
        assert run_app(app, ["cluster", "backup", str(file)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"kera: error: cannot write {file}: {reason}")
        assert said.count("\n") == 1

    assert client.asked == []
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "loop", "pipe"]


# --- recoveries and members ----------------------------------------------------------------------------------------


def test_a_recovery_is_shown_as_a_timeline(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    one = RecoveryDescription(
        broker_id=1,
        before_epoch=4,
        cause="dead",
        phase="restoring",
        detected_us=1_000_000,
        fenced_us=1_010_000,
        opened_us=1_500_000,
        readable_us=2_500_000,
        restored_us=0,
        bytes_total=300 * MIB,
        bytes_recovered=300 * MIB,
        bytes_restored=100 * MIB,
        streamlets_total=6,
        streamlets_opened=6,
        streamlets_readable=6,
        streamlets_restored=2,
        waits_for=["a disk"],
        owner_ids=[2, 3],
        records_lost=5,
    )
    client.in_turn = [[one], [one], []]

    lines = run(capsys, "recoveries")
    assert lines[0] == "broker 1, incarnations before epoch 4"
    assert lines[3:] == [
        "  phase           restoring",
        "  backups fenced  after 0.010 s",
        "  writable        after 0.500 s, 6 of 6 streamlets",
        "  readable        after 1.500 s, 6 of 6 streamlets",
        "  restored        not yet, 2 of 6 streamlets",
        "  recovered       300 MiB of 300 MiB, 314.6 MB/s",
        "  replicated      100 MiB of 300 MiB",
        "  new owners      2, 3",
        "  records lost    5",
        "  waiting for     a disk",
    ]
    assert json.loads("".join(run(capsys, "recoveries", "--json")))[0]["phase"] == "restoring"
    assert run(capsys, "recoveries") == ["no recent recoveries"]


def test_draining_members_are_marked(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    has(client, dataclasses.replace(backup(1), draining=True))
    assert "yes, draining" in output(capsys)


def test_restarting_members_are_marked(client: FakeClient, capsys: pytest.CaptureFixture[str]) -> None:
    has(
        client,
        dataclasses.replace(backup(1), restarting=True, grace_left_ms=60_000),
        dataclasses.replace(backup(2, alive=False), restarting=True, grace_left_ms=41_400),
    )
    shown = output(capsys)
    assert "yes, stopping" in shown
    assert "no, restarting, lost in 41 s" in shown


def test_forget_names_the_forgotten_member_and_the_lost_data(
    client: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    client.in_turn = [[], ["stream 's'"]]
    assert run(capsys, "forget", "backup-3") == ["forgot backup 3"]
    assert run(capsys, "forget", "broker-2", "--force") == ["forgot broker 2", "  lost: stream 's'"]
    assert client.asked == [("forget_backup", 3, {"force": False}), ("forget_broker", 2, {"force": True})]
    assert run_app(app, ["cluster", "forget", "2"]) != 0
