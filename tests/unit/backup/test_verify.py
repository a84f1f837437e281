"""Offline checks of backups' directories: damage with its place, and replicas that differ."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kera.backup.fences import store_fences
from kera.backup.frames import COPY_AT
from kera.backup.jobs import WriteReplicasJob
from kera.backup.log_file import NAME, LogFile, aligned
from kera.backup.registration import BackupDirectory
from kera.backup.verify import BackupFiles, LogComparison, ReplicasChecked, compare, is_backup
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.errors import StartError
from kera.server.verifying import Defect
from tests.unit.backup.support import BROKER_ID, FRAME_BYTES, IDENTITY, FakeBackup, Segment, placed, request

CHUNK_BYTES = 1024
FIRST_CHUNK_AT = 2 * BLOCK_BYTES
"""Where the first chunk of the first replica is: behind the header of the file and the replica's own header."""


class World:
    """Directories of backups, made by the backup's own code."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directories: list[Path] = []

    def backup(self, *segments: Segment, backup_id: int = IDENTITY[0], identity: bool = True) -> FakeBackup:
        """A backup with replicas of virtual segments, all on disk."""
        directory = self.path / f"backup-{len(self.directories) + 1}"
        self.directories.append(directory)
        if identity:
            owner = BackupDirectory(directory)
            owner.store(backup_id, IDENTITY[1])
            owner.close()
        backup = FakeBackup(LogFile(directory / "log"))  # type: ignore[arg-type]
        backup.store.persistence.set_identity(backup_id, IDENTITY[1])
        for segment in segments:
            backup.append(request(segment.number, checksum=_chain(segment)), *segment.chunks)
        return backup

    def check(self) -> tuple[list[Defect], ReplicasChecked]:
        """The defects of each directory, then those between directories."""
        totals = ReplicasChecked()
        found: list[Defect] = []
        with ExitStack() as stack:
            files = [stack.enter_context(BackupFiles.opened(directory)) for directory in self.directories]
            for each in files:
                found += each.check(totals)
            found += compare(files)
        return found, totals

    def file(self, number: int = 1) -> Path:
        return self.directories[number - 1] / "log" / NAME

    def write(self, offset: int, data: bytes, number: int = 1) -> None:
        with self.file(number).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def read(self, offset: int, size: int) -> bytes:
        with self.file().open("rb") as file:
            file.seek(offset)
            return file.read(size)


def _chain(segment: Segment) -> int:
    return segment.end(len(segment.chunks)).checksum


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def segment_of(count: int, number: int = 1, first: int = 0) -> Segment:
    segment = Segment(number)
    segment.chunks = [placed(at, first_record=at) for at in range(first, first + count)]
    return segment


def closed(backup: FakeBackup, segment: Segment, count: int) -> None:
    """Close a replica behind its first `count` chunks, and put all on disk."""
    part = Segment(segment.number)
    part.chunks = list(segment.chunks)
    backup.append(part.end(count))
    backup.run()


def durable(backup: FakeBackup) -> None:
    backup.store.seal_all()
    backup.run()


def test_whole_replicas_are_counted_without_findings_or_changes(world: World) -> None:
    one, two = segment_of(3), segment_of(2, number=2)
    backup = world.backup(one, two)
    closed(backup, one, 3)
    durable(backup)
    before = world.file().read_bytes()

    found, totals = world.check()

    assert found == []
    assert (totals.replicas, totals.chunks, totals.bytes) == (2, 5, 5 * CHUNK_BYTES)
    assert world.file().read_bytes() == before


def test_a_damaged_chunk_is_reported_with_its_place_and_the_others_are_counted(world: World) -> None:
    segment = segment_of(4)
    closed(world.backup(segment), segment, 4)
    world.write(FIRST_CHUNK_AT + CHUNK_BYTES + 500, b"?")
    world.write(FIRST_CHUNK_AT + 2 * CHUNK_BYTES + 500, b"?")

    found, totals = world.check()

    assert [(each.severity, each.path, each.offset, each.length_bytes) for each in found] == [
        ("damage", world.file(), FIRST_CHUNK_AT + CHUNK_BYTES, CHUNK_BYTES),
        ("damage", world.file(), FIRST_CHUNK_AT + 2 * CHUNK_BYTES, CHUNK_BYTES),
    ]
    assert found[0].text == "a chunk of virtual segment 0x1 of broker 3 does not match its checksums"
    assert totals.chunks == 2


def test_a_cut_off_replica_is_damage_with_the_end_of_the_file(world: World) -> None:
    segment = segment_of(4)
    closed(world.backup(segment), segment, 4)
    end = FIRST_CHUNK_AT + 2 * CHUNK_BYTES + 100
    os.truncate(world.file(), end)

    found, totals = world.check()

    assert {each.severity for each in found} == {"damage"}
    assert found[0].offset == FIRST_CHUNK_AT + 2 * CHUNK_BYTES
    assert found[0].text.endswith(f"does not match its checksums: the file is cut off, and ends at {end}")
    assert totals.chunks == 2


@pytest.mark.parametrize(("size", "identity"), [(0, True), (100, True), (100, False)])
def test_a_file_too_short_for_its_header_is_cut_off(world: World, size: int, identity: bool) -> None:
    world.backup(identity=identity)
    os.truncate(world.file(), size)

    found = [each for each in world.check()[0] if each.severity == "damage"]

    assert [each.path for each in found] == [world.file()]
    assert found[0].text == f"is cut off: it has {size} bytes, and its header alone takes {BLOCK_BYTES}"


def test_an_empty_file_of_a_killed_first_start_is_only_a_warning(world: World) -> None:
    world.backup(identity=False)
    os.truncate(world.file(), 0)

    assert [each.severity for each in world.check()[0]] == ["warning"]  # the backup would join as a new one


def test_backup_ids_come_from_replica_headers_and_the_identity_file(world: World, tmp_path: Path) -> None:
    segment = segment_of(1)
    closed(world.backup(segment, backup_id=7), segment, 1)
    world.backup(backup_id=8)
    with ExitStack() as stack:
        one, none = (stack.enter_context(BackupFiles.opened(directory)) for directory in world.directories)
        assert (one.backup_ids, none.backup_ids) == ({7}, {8})

    apart = tmp_path / "disk"
    world.file(2).parent.rename(apart)
    with BackupFiles.opened(world.directories[1]) as files:
        assert files.backup_ids == set()
    with BackupFiles.opened(apart) as files:
        assert files.backup_ids == set()


def test_swapped_chunks_do_not_match_the_checksum_over_all_chunks(world: World) -> None:
    segment = segment_of(2)
    closed(world.backup(segment), segment, 2)
    world.write(FIRST_CHUNK_AT, segment.chunks[1] + segment.chunks[0])

    (finding,) = world.check()[0]

    assert (finding.severity, finding.offset, finding.length_bytes) == ("damage", FIRST_CHUNK_AT, 2 * CHUNK_BYTES)
    assert "does not match the checksum over its chunks" in finding.text


def test_an_unfinished_write_is_a_warning_and_earlier_chunks_are_counted(world: World) -> None:
    segment = segment_of(1)
    backup = world.backup(segment)
    backup.store.persistence.wait(backup.get(), CHUNK_BYTES, lambda _: None)
    backup.run()
    more = segment_of(1, first=1).chunks
    backup.append(segment.next(*more), *more)
    backup.store.persistence.wait(backup.get(), 2 * CHUNK_BYTES, lambda _: None)
    (job,) = backup.store.persistence.plan()
    assert isinstance(job, WriteReplicasJob)
    block = aligned(BLOCK_BYTES)
    block[:] = job.parts[0].header.encode()
    backup.disks[0].write(BLOCK_BYTES, [block])  # without the data

    (finding,), totals = world.check()

    assert (finding.severity, finding.offset, finding.length_bytes) == (
        "warning",
        FIRST_CHUNK_AT + CHUNK_BYTES,
        CHUNK_BYTES,
    )
    assert "the next start cuts it" in finding.text
    assert (totals.replicas, totals.chunks) == (1, 1)
    restarted = FakeBackup(*backup.disks)
    assert restarted.get().length == CHUNK_BYTES, "the start agrees"


def test_a_replica_is_lost_only_when_both_copies_of_its_header_are_damaged(world: World) -> None:
    segment = segment_of(1)
    closed(world.backup(segment), segment, 1)
    world.write(BLOCK_BYTES + 20, b"????")
    assert world.check()[0] == []
    world.write(BLOCK_BYTES + COPY_AT + 20, b"????")
    (finding,), totals = world.check()
    assert (finding.severity, finding.offset) == ("damage", BLOCK_BYTES)
    assert totals.replicas == 0


def test_a_damaged_file_header_is_reported(world: World) -> None:
    segment = segment_of(1)
    closed(world.backup(segment), segment, 1)
    world.write(0, bytes(BLOCK_BYTES))
    (finding,) = world.check()[0]
    assert (finding.offset, finding.text) == (0, "the header of the file is damaged")


def test_only_the_later_version_of_a_replica_counts(world: World) -> None:
    segment = segment_of(2)
    first = world.backup(segment)
    closed(first, segment, 2)
    first.disks[0].close()  # type: ignore[attr-defined]
    header, rest = world.read(BLOCK_BYTES, BLOCK_BYTES), world.read(FIRST_CHUNK_AT, FRAME_BYTES - BLOCK_BYTES)
    again = segment_of(1)
    later = Segment()
    later.chunks = again.chunks
    backup = FakeBackup(LogFile(world.directories[0] / "log"))  # type: ignore[arg-type]
    backup.append(request(checksum=_chain(later)), *later.chunks)
    durable(backup)
    frames = BLOCK_BYTES + backup.get().frame.number * FRAME_BYTES
    other = BLOCK_BYTES + FRAME_BYTES * (0 if frames > BLOCK_BYTES else 1)
    world.write(other, header + rest)  # as if the older frame had not been given back

    found, totals = world.check()

    assert found == []
    assert (totals.replicas, totals.chunks) == (1, 1)


def test_replicas_of_different_lengths_agree_on_their_common_part(world: World) -> None:
    segment, longer = segment_of(2), segment_of(3)
    closed(world.backup(segment), segment, 2)
    durable(world.backup(longer, backup_id=6))
    found, totals = world.check()
    assert found == []
    assert totals.replicas == 2


def test_a_differing_replica_is_reported_with_both_places(world: World) -> None:
    segment = segment_of(3)
    closed(world.backup(segment), segment, 3)
    other = segment_of(3)
    other.chunks[1] = placed(1, first_record=1, fill=b"y")
    durable(world.backup(other, backup_id=6))

    (finding,) = world.check()[0]

    assert (finding.severity, finding.path) == ("damage", world.file(2))
    assert (finding.offset, finding.length_bytes) == (FIRST_CHUNK_AT + CHUNK_BYTES, CHUNK_BYTES)
    assert finding.text.endswith(f"differs from the one in {world.file(1)} at {FIRST_CHUNK_AT + CHUNK_BYTES}")


def test_damage_is_not_reported_as_a_difference_too(world: World) -> None:
    segment = segment_of(3)
    for backup_id in (5, 6):
        closed(world.backup(segment, backup_id=backup_id), segment, 3)
    world.write(FIRST_CHUNK_AT + 500, b"?", number=2)
    (finding,) = world.check()[0]
    assert "does not match its checksums" in finding.text


def test_replicas_closed_at_different_lengths_are_reported(world: World) -> None:
    segment = segment_of(3)
    closed(world.backup(segment), segment, 3)
    closed(world.backup(segment, backup_id=6), segment, 2)
    (finding,) = world.check()[0]
    assert "was closed at 2048, and at 3072" in finding.text


def test_log_chunks_are_compared_with_replicas_and_differences_are_reported(world: World) -> None:
    segment = segment_of(3)
    for backup_id in (5, 6):
        closed(world.backup(segment, backup_id=backup_id), segment, 3)
    log = Path("a.segment")
    with ExitStack() as stack:
        files = [stack.enter_context(BackupFiles.opened(directory)) for directory in world.directories]
        for each in files:
            assert list(each.check(ReplicasChecked())) == []
        comparison = LogComparison(files, BROKER_ID)
        assert comparison.check(memoryview(segment.chunks[1]), log, 0) == (2, [])
        assert comparison.check(memoryview(placed(7, first_record=7)), log, 0) == (0, [])
        count, findings = comparison.check(memoryview(placed(2, first_record=2, fill=b"y")), log, 77)
    assert count == 2
    assert [each.path for each in findings] == [world.file(1), world.file(2)]
    assert all(each.text.endswith("differs from the one in the log, a.segment at 77") for each in findings)
    assert all(each.offset == FIRST_CHUNK_AT + 2 * CHUNK_BYTES for each in findings)


def test_replicas_of_two_backups_in_one_file_are_reported(world: World) -> None:
    one, two = segment_of(1), segment_of(1, number=2)
    backup = world.backup(one)
    closed(backup, one, 1)
    backup.store.persistence.set_identity(6, IDENTITY[1])
    backup.append(request(2, checksum=_chain(two)), *two.chunks)
    durable(backup)
    (finding,) = world.check()[0]
    assert finding.text == "has replicas of 2 backups: 5 of cluster, 6 of cluster"


def test_damaged_and_missing_identity_and_fences_files_are_reported(world: World) -> None:
    segment = segment_of(1)
    closed(world.backup(segment), segment, 1)
    directory = world.directories[0]
    store_fences(directory, {BROKER_ID: 4})
    assert world.check()[0] == []
    (directory / "backup.copy.json").unlink()
    (directory / "backup.json").write_text("{}")
    (directory / "fences.json").write_text("?")
    assert [(each.severity, each.path.name) for each in world.check()[0]] == [
        ("damage", "backup.json"),
        ("warning", "backup.copy.json"),
        ("damage", "fences.json"),
    ]
    (directory / "fences.copy.json").unlink()
    assert [(each.severity, each.path.name) for each in world.check()[0]][-1] == ("warning", "fences.copy.json")


def test_a_log_directory_can_be_checked_alone(world: World) -> None:
    segment = segment_of(1)
    closed(world.backup(segment, identity=False), segment, 1)
    world.directories = [world.directories[0] / "log"]
    assert is_backup(world.directories[0])
    with BackupFiles.opened(world.directories[0]) as files:
        assert list(files.check(ReplicasChecked())) == []
        assert files.count == 1


def test_a_data_directory_without_replicas_is_a_warning_that_names_log_dirs(world: World) -> None:
    world.backup()
    world.file().unlink()
    (finding,) = world.check()[0]
    assert (finding.severity, finding.path) == ("warning", world.directories[0])
    assert "--log-dirs" in finding.text


def test_a_read_error_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = segment_of(1)
    closed(world.backup(segment), segment, 1)
    with BackupFiles.opened(world.directories[0]) as files:

        def fail(*_: object) -> Iterator[None]:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(files, "read", fail)
        (finding,) = files.check(ReplicasChecked())
    assert finding.text == "cannot be read: Input/output error; it has virtual segment 0x1 of broker 3"


def test_the_directory_of_a_running_backup_is_refused(world: World) -> None:
    world.backup()
    owner = BackupDirectory(world.directories[0])
    with pytest.raises(StartError, match="a backup uses"), BackupFiles.opened(world.directories[0]):
        pass
    owner.close()


def test_other_directories_are_not_taken_for_backups(tmp_path: Path) -> None:
    assert not is_backup(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "broker.json").touch()
    assert not is_backup(tmp_path)
