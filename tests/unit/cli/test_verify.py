"""`kera verify`: output and exit code. The tests of its findings are in tests/unit/broker/test_verify.py."""

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kera.backup.frames import Layout
from kera.backup.log_file import NAME
from kera.broker.ownership.stream_records import put_stream
from kera.broker.records import Change
from kera.broker.registration import BrokerDirectory
from kera.broker.replication.virtual_index import delete_virtual_segment, put_virtual_segment, virtual_segments
from kera.broker.replication.virtual_segment import Extent, VirtualSegment
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_segment, put_entry
from kera.broker.storage.segment_files import segment_path
from kera.cli import verify as verify_module
from kera.cli._run import run_app
from kera.cli.app import app
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.base.ids import EntryId, Position
from kera.core.base.settings import KIB
from kera.core.format.chunk import chained_checksum, iterate_chunks
from kera.v1 import common_pb2
from tests.unit.backup.support import FakeDisk

SAMPLE = Path(__file__).parents[2] / "data" / "broker-format-2"
FIRST_FILE = "log/segments/000000/000000000001.segment"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "broker"))


def damage(data_dir: Path) -> Path:
    path = data_dir / FIRST_FILE
    with path.open("r+b") as file:
        file.seek(1216 + 140)
        file.write(b"?")
    return path


def test_an_undamaged_directory_is_one_line_and_exit_code_0(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["verify", str(data_dir)]) == 0
    assert capsys.readouterr() == ("4 segments, 24 chunks, 768 records, 53 KiB: no damage\n", "")


def test_damage_is_a_line_with_its_place_and_exit_code_1(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(data_dir)
    (data_dir / "log/segments/left").touch()

    assert run_app(app, ["verify", str(data_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    reason = "chunk payload at offset 1216 does not match its checksum (stream 1, streamlet 0, sequence 1)"
    assert lines == [
        f"damage: {path} at 1216, 1536 bytes: {reason}",
        f"warning: {data_dir}/log/segments/left: no record of the index names it",
        "4 segments, 23 chunks, 754 records, 53 KiB: 1 damaged place, 1 warning",
    ]


def test_warnings_alone_leave_exit_code_0(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data_dir / "broker.copy.json").unlink()

    assert run_app(app, ["verify", str(data_dir)]) == 0
    assert capsys.readouterr().out.endswith("53 KiB: 0 damaged places, 1 warning\n")


def test_the_json_output_has_figures_and_findings(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(data_dir)

    assert run_app(app, ["verify", str(data_dir), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (finding,) = document.pop("findings")
    assert document == {"segments": 4, "chunks": 23, "records": 754, "bytes": 54272, "segments_to_come": 0}
    assert finding.pop("text").startswith("chunk payload at offset 1216")
    assert finding == {"severity": "damage", "path": str(path), "offset": 1216, "length_bytes": 1536}


def test_a_directory_that_cannot_be_checked_is_a_usage_error(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["verify", str(tmp_path / "none")]) == 2
    assert run_app(app, ["verify", str(tmp_path)]) == 2
    directory = BrokerDirectory(data_dir)
    assert run_app(app, ["verify", str(data_dir)]) == 2
    directory.close()

    missing, other, used = capsys.readouterr().err.splitlines()
    assert "does not exist" in missing
    assert "is not a broker's data directory" in other
    assert "a broker uses data directory" in used


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_ctrl_c_ends_verify_and_inspect_with_exit_code_130(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert run_app(app, [command, str(data_dir)]) == 130


def test_a_long_check_shows_its_progress_on_a_terminal(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_module, "QUIET_S", 0.0)
    monkeypatch.setattr(verify_module, "PROGRESS_INTERVAL_S", 0.0)
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert run_app(app, ["verify", str(data_dir)]) == 0
        terminal.flush()
        shown = ""
        while not shown.endswith("\r\x1b[K"):  # the progress is cleared in the end; reads from a terminal are partial
            shown += os.read(reader, 1 << 16).decode()
    os.close(reader)

    assert "\r4 of 4 segments, 53 KiB\x1b[K" in shown
    assert capsys.readouterr().out.count("\n") == 1


# -- with backups --------------------------------------------------------------------------------------------------

SEGMENT_BYTES = 64 * KIB
VIRTUAL_SEGMENT_ID = (1 << 32) + 1


def replicate(data_dir: Path, backup_dir: Path, backup_id: int) -> Path:
    """Make a backup with a closed replica of the log's first segment, known to the index; return its file."""
    from kera.backup import registration
    from kera.backup.disks import DiskState
    from kera.backup.log_file import LogFile
    from kera.backup.performer import Performer
    from kera.backup.restart import scan_disk
    from kera.backup.slots import Slots
    from kera.backup.store import ReplicaStore
    from kera.v1 import backup_pb2

    owner = registration.BackupDirectory(backup_dir)
    owner.store(backup_id, "cluster")
    owner.close()
    disk, layout = LogFile(backup_dir / "log"), Layout(SEGMENT_BYTES)
    scan_disk(disk, 0, layout, (backup_id, "cluster"))
    state = DiskState(0, disk.name, layout)
    state.set_free_bytes(FakeDisk().free_bytes())
    store = ReplicaStore(Slots(2, SEGMENT_BYTES), [state], (backup_id, "cluster"), on_work=lambda: None)

    index = SegmentIndex.open(data_dir / "log/index")
    address, record = next(iter(index.all_segments()))
    chunks = memoryview(segment_path(data_dir / "log", record.physical_id).read_bytes())[: record.length]
    checksum = 0
    for _, at in iterate_chunks(chunks):
        checksum = chained_checksum(chunks, at, checksum)
    place = VirtualSegment(VIRTUAL_SEGMENT_ID, address.stream_id, 0, [1, 2], 0)
    place.head, place.checksum = record.length, checksum
    place.extents.append(Extent(address, 0, record.length))
    index.commit([put_virtual_segment(place)], None)
    index.close(clean=True)
    identity = json.loads((data_dir / "broker.json").read_bytes())
    request = backup_pb2.ReplicateRequest(
        broker_id=identity["broker_id"],
        broker_epoch=1,
        stream_id=address.stream_id,
        virtual_segment_id=VIRTUAL_SEGMENT_ID,
        checksum=checksum,
        close=True,
    )
    store.append(request, chunks)
    performer = Performer([disk], layout)
    while jobs := store.persistence.plan():
        for job in jobs:
            performer.perform(job)
            store.persistence.finished(job)
    disk.close()
    return backup_dir / "log" / NAME


@pytest.fixture
def backup_dirs(data_dir: Path, tmp_path: Path) -> list[Path]:
    directories = [tmp_path / "backup-1", tmp_path / "backup-2"]
    for backup_id, directory in enumerate(directories, 1):
        replicate(data_dir, directory, backup_id)
    return directories


def test_replicas_of_backups_are_checked_and_compared_with_each_other_and_the_log(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = map(str, backup_dirs)
    assert run_app(app, ["verify", one]) == 0
    assert run_app(app, ["verify", one, two]) == 0
    assert run_app(app, ["verify", one, two, "--json"]) == 0
    alone, both, *document = capsys.readouterr().out.splitlines()
    assert alone.startswith("1 replica, ")
    assert both.startswith("2 replicas, ")
    assert both.endswith(": no damage")
    assert json.loads("\n".join(document))["replicas"]["replicas"] == 2

    assert run_app(app, ["verify", str(data_dir), one, two]) == 0
    warning, summary = capsys.readouterr().out.splitlines()
    assert warning.endswith("4 chunks of stream 1, streamlet 0, entry 0, group 1, segment 2: no replica found")
    assert summary.startswith("4 segments, 24 chunks, 768 records, 53 KiB; 2 replicas, ")
    assert summary.endswith(": 0 damaged places, 1 warning")


def test_no_replica_is_reported_missing_while_a_backup_is_left_out(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["verify", str(data_dir), str(backup_dirs[0])]) == 0
    assert capsys.readouterr().out.endswith(": no damage\n")


def test_a_damaged_replica_is_reported_with_its_place_and_its_backups_in_the_index(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in backup_dirs:
        with (directory / "log" / NAME).open("r+b") as file:
            file.seek(2 * BLOCK_BYTES + 140)
            file.write(b"?")
    assert run_app(app, ["verify", str(data_dir), *map(str, backup_dirs)]) == 1
    lines = capsys.readouterr().out.splitlines()
    for directory, line in zip(backup_dirs, lines, strict=False):
        assert line.startswith(f"damage: {directory}/log/{NAME} at {2 * BLOCK_BYTES}, ")
    assert any("virtual segment 0x100000001 should be on backup 1, 2, and is not" in line for line in lines)


def test_a_running_backup_is_a_usage_error(backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    from kera.backup.registration import BackupDirectory

    owner = BackupDirectory(backup_dirs[0])
    assert run_app(app, ["verify", str(backup_dirs[0])]) == 2
    owner.close()
    assert "a backup uses data directory" in capsys.readouterr().err


# -- missing replicas ----------------------------------------------------------------------------------------------


def emptied(backup_dir: Path, size: int = BLOCK_BYTES) -> None:
    """Truncate a backup's file: by default after its header, so that it has no replicas."""
    os.truncate(backup_dir / "log" / NAME, size)


def changed(data_dir: Path, change: Callable[[SegmentIndex], list[Change]], **meta: object) -> None:
    """Change a broker's index, and the index's data about the broker itself."""
    index = SegmentIndex.open(data_dir / "log/index")
    index.commit(change(index), index.meta() | meta)
    index.close(clean=True)


def nothing(_: SegmentIndex) -> list[Change]:
    return []


def told(capsys: pytest.CaptureFixture[str], *directories: Path) -> tuple[int, list[str]]:
    """The exit code, and severity and text of each line but those of chunks without a replica."""
    code = run_app(app, ["verify", *map(str, directories)])
    lines = [line.split(": ", 2) for line in capsys.readouterr().out.splitlines()[:-1]]
    return code, [f"{severity}: {text}" for severity, _, text in lines if not text.endswith("no replica found")]


IS_NOT = "virtual segment 0x100000001 should be on backup {}, and is not, or differs"
LOST = "damage: " + IS_NOT + "; no backup has it, nor has another broker that is given"


def test_a_virtual_segment_without_any_replica_is_damage(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    emptied(backup_dirs[0])
    assert told(capsys, data_dir, *backup_dirs) == (0, ["warning: " + IS_NOT.format("1")])
    emptied(backup_dirs[1])
    assert told(capsys, data_dir, *backup_dirs) == (1, [LOST.format("1, 2")])


def test_a_file_shorter_than_its_header_is_damage(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    emptied(backup_dirs[0], 100)
    code, (cut, missing) = told(capsys, data_dir, *backup_dirs)
    assert code == 1
    assert cut == "damage: is cut off: it has 100 bytes, and its header alone takes 4096"
    assert missing == "warning: " + IS_NOT.format("1")


def test_replicas_missing_after_a_crash_are_a_warning_and_no_damage(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    changed(data_dir, nothing, clean=False)
    for directory in backup_dirs:
        emptied(directory)
    code, (line,) = told(capsys, data_dir, *backup_dirs)
    assert code == 0
    assert line.startswith(f"warning: {IS_NOT.format('1, 2')}; no backup has it: the broker did not stop by itself")


def test_a_different_closed_replica_is_damage_even_after_a_crash(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def longer(index: SegmentIndex) -> list[Change]:
        (place,) = virtual_segments(index)
        place.head += 8
        return [put_virtual_segment(place)]

    changed(data_dir, longer, clean=False)
    assert told(capsys, data_dir, *backup_dirs) == (1, [LOST.format("1, 2")])


def test_replicas_of_segments_removed_by_retention_are_not_reported(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def removed(index: SegmentIndex) -> list[Change]:
        address, record = next(iter(index.all_segments()))
        entry = index.entry(EntryId(*address[:3]))
        assert entry is not None
        start = Position(address.group_id, address.segment_id + 1, 0)
        entry = entry._replace(start=start, start_record=record.record_count, stored_segments=entry.stored_segments - 1)
        (data_dir / FIRST_FILE).unlink()
        return [delete_segment(address), put_entry(EntryId(*address[:3]), entry)]

    changed(data_dir, removed)
    for directory in backup_dirs:
        emptied(directory)
    assert told(capsys, data_dir, *backup_dirs) == (0, [])


def test_data_that_other_replicas_or_brokers_have_are_not_reported_lost(
    data_dir: Path, backup_dirs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def covered_before(index: SegmentIndex) -> list[Change]:
        (place,) = virtual_segments(index)
        place.virtual_segment_id -= 1
        return [put_virtual_segment(place)]

    elsewhere = "; other replicas, or other brokers, have all of it"
    other = Path(shutil.copytree(SAMPLE, tmp_path / "other"))
    changed(data_dir, covered_before)
    code, lines = told(capsys, data_dir, *backup_dirs)
    assert (code, lines) == (0, [f"warning: {IS_NOT.format('1, 2').replace('1 should', '0 should')}{elsewhere}"])

    for directory in backup_dirs:
        emptied(directory)
    code, lines = told(capsys, data_dir, other, *backup_dirs)
    assert code == 0
    assert f"warning: {IS_NOT.format('1, 2')}{elsewhere}" in lines


def test_a_backup_without_its_log_directories_is_a_warning_to_name_them(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    log_dir = backup_dirs[0] / "log"
    log_dir.rename(backup_dirs[0].with_name("disk"))
    assert told(capsys, data_dir, *backup_dirs) == (
        0,
        ["warning: has no replicas; name the directories of its --log-dirs as well"],
    )


def test_chunks_without_a_replica_are_reported_even_if_the_index_names_no_backup(
    data_dir: Path, backup_dirs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def described(index: SegmentIndex) -> list[Change]:
        (place,) = virtual_segments(index)
        info = common_pb2.StreamInfo(stream_id=place.stream_id)
        info.config.replication = 1
        return [delete_virtual_segment(place), put_stream(info)]

    changed(data_dir, described, clean=False)
    for directory in backup_dirs:
        emptied(directory)
    assert run_app(app, ["verify", str(data_dir), *map(str, backup_dirs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("no replica found; the index does not say at which backups they were" in line for line in lines)
