"""A backup's restart: rebuilding its replicas from the disks."""

import struct

import pytest

from kera.backup.frames import Layout, ReplicaHeader, decode_header, encode_file_header
from kera.backup.jobs import WriteReplicasJob
from kera.backup.restart import scan_disk
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.errors import CorruptChunk, StartError
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_CRC_AT, VERSIONS
from tests.unit.backup.support import (
    BROKER_ID,
    EPOCH,
    FRAME_BYTES,
    IDENTITY,
    SEGMENT_BYTES,
    FakeBackup,
    FakeDisk,
    Outcome,
    Segment,
    chain,
    placed,
    request,
)

A, B, C = (placed(number, size=1024, fill=bytes([number + 1])) for number in range(3))
DATA_AT = 2 * BLOCK_BYTES
"""Where the data of the first frame begins."""


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def backup(disk: FakeDisk) -> FakeBackup:
    return FakeBackup(disk)


def commit(backup: FakeBackup, segment: Segment, *chunks: bytes, close: bool = False) -> None:
    """Append chunks and make them durable."""
    segment.append(backup, *chunks, close=close)
    replica, outcome = backup.get(segment.number), Outcome()
    backup.store.persistence.wait(replica, replica.length, outcome)
    for job in backup.store.persistence.plan():
        backup.perform(job)
    assert outcome.succeeded


@pytest.mark.parametrize("close", [False, True])
def test_a_restart_finds_replicas_unchanged(backup: FakeBackup, close: bool) -> None:
    for number in (1, 2):
        commit(backup, Segment(number), A, B, close=close)
    before = [backup.get(number).info() for number in (1, 2)]
    again = backup.restarted()

    assert [again.get(number).info() for number in (1, 2)] == before
    assert bytes(again.read(2).chunks) == A + B
    assert (again.slots.free, again.store.epochs) == (4, {BROKER_ID: EPOCH})


def test_a_restart_does_not_read_replicas_whose_headers_vouch_for_them(backup: FakeBackup, disk: FakeDisk) -> None:
    commit(backup, Segment(), A, B, close=True)
    backup.run()
    disk.flip(DATA_AT + 1024 + 200)
    again = backup.restarted()

    assert (again.found.unclosed, again.found.chunks_damaged, again.get().chunk_count) == (0, 0, 2)
    found = again.read()
    assert (bytes(found.chunks), found.damaged, found.next_offset) == (A, [1024], 2048)


def test_an_open_replica_takes_no_chunks_after_a_restart(backup: FakeBackup) -> None:
    segment = Segment()
    commit(backup, segment, A)
    again = backup.restarted()

    with pytest.raises(Exception, match="open another virtual segment"):
        again.append(segment.next(B), B)


def test_an_unfinished_last_write_is_cut_off(backup: FakeBackup, disk: FakeDisk) -> None:
    segment = Segment()
    commit(backup, segment, A, B)
    commit(backup, segment, C)
    disk.flip(DATA_AT + 2048 + 500)
    again = backup.restarted()

    assert (again.found.torn_replicas, again.found.torn_bytes, again.found.chunks_damaged) == (1, 1024, 0)
    info = again.get().info()
    assert (info.length, info.durable_length, info.checksum, info.chunk_count) == (2048, 2048, chain(A, B), 2)
    again.run()
    third = again.restarted()
    assert third.found.torn_replicas == 0, "the header was written anew"
    assert bytes(third.read().chunks) == A + B


def test_a_closed_replica_with_an_unfinished_last_write_is_open_and_cut(backup: FakeBackup, disk: FakeDisk) -> None:
    segment = Segment()
    commit(backup, segment, A)
    commit(backup, segment, B, close=True)
    disk.flip(DATA_AT + 1024)
    info = backup.restarted().get().info()

    assert (info.closed, info.length, info.checksum) == (False, 1024, chain(A))


def test_damage_before_the_last_write_is_reported_and_the_other_chunks_are_read(
    backup: FakeBackup, disk: FakeDisk
) -> None:
    segment = Segment()
    commit(backup, segment, A, B)
    commit(backup, segment, C)
    disk.flip(DATA_AT + 1024 + 40)
    again = backup.restarted()

    info = again.get().info()
    assert (info.length, info.chunk_count, info.chunks_damaged) == (3072, 3, 1)
    assert again.found.chunks_damaged == 1
    assert bytes(again.read().chunks) == A + C


def test_a_replica_without_durable_chunks_is_gone_and_its_frame_is_free(backup: FakeBackup, disk: FakeDisk) -> None:
    commit(backup, Segment(), A)
    disk.flip(DATA_AT)
    again = backup.restarted()

    assert (again.numbers(), again.found.frames_superseded) == ([], 1)
    assert (again.store.persistence.disks[0].used_bytes, again.store.persistence.disks[0].free_frames) == (0, [])
    assert disk.next_data(BLOCK_BYTES) is None


def test_the_later_of_two_frames_for_one_replica_counts(backup: FakeBackup) -> None:
    commit(backup, Segment(), A)
    Segment().append(backup, B)
    backup.store.persistence.wait(backup.get(), 1024, Outcome())
    (write,) = [job for job in backup.store.persistence.plan() if isinstance(job, WriteReplicasJob)]
    backup.perform(write)
    again = backup.restarted()

    assert bytes(again.read().chunks) == B
    assert again.found.frames_superseded == 1
    assert bytes(again.restarted().read().chunks) == B


def test_a_reused_frame_has_no_chunks_of_its_former_replica(backup: FakeBackup, disk: FakeDisk) -> None:
    commit(backup, Segment(1), A, B, C, A, B, C, A, close=True)
    backup.store.free(BROKER_ID, [1], Outcome())
    backup.run()
    segment = Segment(2)
    commit(backup, segment, C)
    segment.append(backup, C)
    again = backup.restarted()

    assert again.numbers() == [2]
    assert bytes(again.read(2).chunks) == C
    assert disk.block(DATA_AT // BLOCK_BYTES) == C.ljust(BLOCK_BYTES, b"\0")


def test_old_chunks_in_a_reused_frame_are_not_taken_for_the_last_write(backup: FakeBackup, disk: FakeDisk) -> None:
    """A file system without holes keeps the old chunks; only the header of the new write has arrived."""
    disk.has_holes = False
    commit(backup, Segment(1), A, B, close=True)
    old = disk.block(DATA_AT // BLOCK_BYTES)
    backup.store.free(BROKER_ID, [1], Outcome())
    backup.run()
    segment = Segment(2)
    commit(backup, segment, A)
    commit(backup, segment, C)
    disk.synced[DATA_AT // BLOCK_BYTES] = old
    again = backup.restarted()

    assert bytes(again.read(2).chunks) == A
    assert again.get(2).info().checksum == chain(A)


def test_free_frames_are_reused_lowest_first(backup: FakeBackup) -> None:
    for number in (1, 2, 3, 4):
        commit(backup, Segment(number), A, close=True)
    backup.run()
    backup.store.free(BROKER_ID, [1, 3], Outcome())
    backup.run()
    again = backup.restarted()
    for number in (5, 6, 7):
        Segment(number).append(again, A)

    assert [again.get(number).frame.number for number in (5, 6, 7)] == [0, 2, 4]
    assert again.store.persistence.disks[0].used_bytes == 2 * 2 * BLOCK_BYTES + 3 * FRAME_BYTES


# --- headers -----------------------------------------------------------------------------------------------


def header(sequence: int = 1) -> ReplicaHeader:
    return ReplicaHeader(sequence, 5, BROKER_ID, EPOCH, 7, 2, 1 << 40, 4096, 0xFFFFFFFF, 3, 1024, 9, True, "cluster")


def test_a_header_round_trips() -> None:
    block = header().encode()

    assert len(block) == BLOCK_BYTES
    assert decode_header(block, "") == header()


@pytest.mark.parametrize("at", [0, 8, 60, 205])
def test_a_header_survives_the_loss_of_one_of_its_copies(at: int) -> None:
    for copy in (0, 2048):
        block = bytearray(header().encode())
        block[copy + at] ^= 1
        assert decode_header(bytes(block), "") == header()
        block[2048 - copy + at] ^= 1
        assert decode_header(bytes(block), "") is None


def test_the_later_of_two_header_copies_counts() -> None:
    for first, second in [(1, 2), (2, 1)]:
        block = header(first).encode()[:2048] + header(second).encode()[2048:]
        assert decode_header(block, "") == header(2)


def test_a_header_with_two_damaged_copies_loses_only_its_own_replica(backup: FakeBackup, disk: FakeDisk) -> None:
    for number in (1, 2):
        commit(backup, Segment(number), A)
    for at in (10, 2048 + 10):
        disk.flip(BLOCK_BYTES + at)
    again = backup.restarted()

    assert (again.numbers(), again.found.headers_damaged) == ([2], 1)


# --- whose file it is --------------------------------------------------------------------------------------


def test_replicas_of_another_size_stop_the_start_with_an_error_that_names_the_setting(disk: FakeDisk) -> None:
    FakeBackup(disk)
    with pytest.raises(StartError, match=f"--segment-bytes {SEGMENT_BYTES}"):
        scan_disk(disk, 0, Layout(2 * SEGMENT_BYTES), IDENTITY)


@pytest.mark.parametrize("identity", [(0, ""), (6, "cluster"), (5, "other")])
def test_replicas_of_another_backup_stop_the_start(
    backup: FakeBackup, disk: FakeDisk, identity: tuple[int, str]
) -> None:
    scan_disk(disk, 0, Layout(SEGMENT_BYTES), identity)
    commit(backup, Segment(), A)
    with pytest.raises(StartError, match="has replicas of backup 5 of cluster cluster"):
        scan_disk(disk, 0, Layout(SEGMENT_BYTES), identity)


def test_a_file_header_with_two_damaged_copies_stops_the_start_but_one_whole_copy_suffices(disk: FakeDisk) -> None:
    FakeBackup(disk)
    disk.flip(9)
    scan_disk(disk, 0, Layout(SEGMENT_BYTES), IDENTITY)
    disk.flip(2048 + 9)
    with pytest.raises(StartError, match="damaged header"):
        scan_disk(disk, 0, Layout(SEGMENT_BYTES), IDENTITY)


def test_a_file_of_a_newer_version_stops_the_start(disk: FakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.backup.frames.FORMAT", 2)
    disk.write(0, [memoryview(encode_file_header(SEGMENT_BYTES))])
    monkeypatch.undo()
    with pytest.raises(StartError, match="has format 2, this version knows 1"):
        scan_disk(disk, 0, Layout(SEGMENT_BYTES), IDENTITY)


def of_newer_version(disk: FakeDisk, at: int) -> None:
    """Give the chunk at offset `at` of the disk the format version of a newer program."""
    number, offset = divmod(at, BLOCK_BYTES)
    block = bytearray(disk.block(number))
    block[offset + 4] = max(VERSIONS) + 1
    struct.pack_into("<I", block, offset + HEADER_CRC_AT, crc32c(bytes(block[offset : offset + HEADER_CRC_AT])))
    disk.synced[number] = bytes(block)


@pytest.mark.parametrize("at", [0, 1024, 2048])
def test_chunks_of_a_newer_version_stop_the_start_and_stay_on_disk(backup: FakeBackup, disk: FakeDisk, at: int) -> None:
    segment = Segment()
    commit(backup, segment, A, B)
    commit(backup, segment, C)
    of_newer_version(disk, DATA_AT + at)
    before = dict(disk.synced)

    with pytest.raises(StartError, match="newer program: it has chunks of format version 3"):
        backup.restarted()
    assert disk.synced == before


def test_a_refused_request_leaves_no_replica_for_the_restart(backup: FakeBackup) -> None:
    with pytest.raises(CorruptChunk):
        backup.append(request(checksum=1), A)

    assert backup.restarted().numbers() == []
