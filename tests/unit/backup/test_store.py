"""The replica store: replicas in memory and their way to disk."""

import errno

import pytest

from kera.backup import replica
from kera.backup.errors import ReplicaClosed, ReplicaOffset, UnknownReplica
from kera.backup.jobs import PunchJob, WriteReplicasJob
from kera.core.base.blocks import BLOCK_BYTES
from kera.core.errors import (
    BackupFull,
    CorruptChunk,
    DiskFailed,
    DiskFull,
    KeraError,
    NotAccepted,
    RecordTooLarge,
    StaleEpoch,
)
from tests.unit.backup.support import (
    BROKER_ID,
    EPOCH,
    FRAME_BYTES,
    SEGMENT_BYTES,
    STREAM_ID,
    FakeBackup,
    FakeDisk,
    Outcome,
    Segment,
    chain,
    placed,
    request,
)
from tests.unit.broker.support import chunk

A, B, C = (placed(number, size=1024, fill=bytes([number + 1])) for number in range(3))


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.fixture
def backup(disk: FakeDisk) -> FakeBackup:
    return FakeBackup(disk)


def persist(backup: FakeBackup, number: int = 1) -> Outcome:
    """Wait until all chunks of a replica are durable."""
    outcome = Outcome()
    replica = backup.get(number)
    backup.store.persistence.wait(replica, replica.length, outcome)
    return outcome


def fail(backup: FakeBackup, message: object, *chunks: bytes) -> KeraError:
    """The error of a request that must change nothing."""
    before = {replica.replica_id: replica.info() for replica in backup.store.replicas}
    with pytest.raises(NotAccepted) as raised:
        backup.append(message, *chunks)  # type: ignore[arg-type]
    assert {replica.replica_id: replica.info() for replica in backup.store.replicas} == before
    return raised.value


# --- appending ---------------------------------------------------------------------------------------------


def test_appended_chunks_are_listed_and_read(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A, B)
    segment.append(backup, C)

    info = backup.get().info()
    assert (info.broker_id, info.broker_epoch, info.stream_id, info.virtual_log_id) == (BROKER_ID, EPOCH, STREAM_ID, 2)
    assert (info.length, info.checksum, info.chunk_count) == (3072, chain(A, B, C), 3)
    assert (info.durable_length, info.closed, info.chunks_damaged) == (0, False, 0)
    assert bytes(backup.read().chunks) == A + B + C


def test_an_open_replica_without_waiters_is_not_written_to_disk(backup: FakeBackup) -> None:
    Segment().append(backup, A)

    assert backup.store.persistence.plan() == []


@pytest.mark.parametrize("offset", [1, 512, 1024, 3072])
def test_an_append_at_a_wrong_offset_is_refused_with_both_lengths(backup: FakeBackup, offset: int) -> None:
    Segment().append(backup, A, B)
    error = fail(backup, request(offset=offset, checksum=chain(A, B, C)), C)

    assert isinstance(error, ReplicaOffset)
    assert error.attributes == {"length": 2048, "offset": offset}


def test_an_append_to_an_unknown_replica_is_refused(backup: FakeBackup) -> None:
    assert isinstance(fail(backup, request(offset=1024, checksum=chain(A, B)), B), UnknownReplica)
    assert isinstance(fail(backup, request(offset=1024, checksum=chain(A), close=True)), UnknownReplica)


@pytest.mark.parametrize("flipped", [0, 40, 100, 126, 128, 1023])
def test_a_damaged_chunk_refuses_the_whole_request(backup: FakeBackup, flipped: int) -> None:
    segment = Segment()
    segment.append(backup, A)
    damaged = bytearray(C)
    damaged[flipped] ^= 1
    error = fail(backup, segment.next(B, C), B, bytes(damaged))

    assert isinstance(error, CorruptChunk)
    assert error.attributes["offset"] == 1024


def test_a_truncated_or_unplaced_chunk_is_refused(backup: FakeBackup) -> None:
    assert isinstance(fail(backup, request(checksum=chain(A)), A[:-64]), CorruptChunk)
    unplaced = chunk()
    assert "placement" in fail(backup, request(checksum=chain(unplaced)), unplaced).message


def test_chunks_in_the_wrong_order_are_refused(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A)

    assert isinstance(fail(backup, segment.next(B, C), C, B), CorruptChunk)


def test_a_request_over_both_the_byte_and_the_chunk_limit_is_refused(
    backup: FakeBackup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chunks of a request are verified in one go."""
    monkeypatch.setattr(replica, "REPLICATED_BYTES_MAX", 3 * 1024)
    monkeypatch.setattr(replica, "REQUEST_CHUNKS_MAX", 4)
    segment = Segment()
    error = fail(backup, segment.next(*[A] * 5), *[A] * 5)
    assert isinstance(error, RecordTooLarge)
    assert error.attributes == {"limit_bytes": 3 * 1024, "limit_chunks": 4}
    Segment().append(backup, *[A] * 4)
    monkeypatch.setattr(replica, "REQUEST_CHUNKS_MAX", 1)
    Segment().append(backup, *[A] * 3)


def test_a_request_that_does_not_fit_into_the_replica_is_refused(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, *[A] * 8)
    error = fail(backup, segment.next(B), B)

    assert isinstance(error, RecordTooLarge)
    assert error.attributes == {"replica_bytes": SEGMENT_BYTES + 1024, "limit": SEGMENT_BYTES}


def test_offset_0_begins_a_replica_anew(backup: FakeBackup) -> None:
    Segment().append(backup, A, B)
    Segment().append(backup, C)
    backup.run()

    assert bytes(backup.read().chunks) == C
    assert backup.slots.free == 3
    assert backup.store.persistence.disks[0].used_bytes == FRAME_BYTES


# --- closing -----------------------------------------------------------------------------------------------


def test_a_closed_replica_takes_no_chunks_and_frees_its_memory_once_on_disk(backup: FakeBackup, disk: FakeDisk) -> None:
    segment = Segment()
    segment.append(backup, A, B, close=True)
    assert isinstance(fail(backup, request(offset=2048, checksum=chain(A, B, C)), C), ReplicaClosed)
    assert backup.slots.free == 3
    backup.run()

    assert backup.slots.free == 4
    assert backup.get().info().durable_length == 2048
    assert backup.store.persistence.disks[0].used_bytes == 2 * BLOCK_BYTES, "no more than it has"
    assert bytes(backup.read().chunks) == A + B
    assert disk.writes[1] == (BLOCK_BYTES, 2 * BLOCK_BYTES), "header and data in one write"


@pytest.fixture
def patient(disk: FakeDisk) -> FakeBackup:
    return FakeBackup(disk, flush_delay_ms=1000)


def test_a_closed_replica_waits_in_memory_for_the_flush_delay(disk: FakeDisk) -> None:
    woken: list[bool] = []
    patient = FakeBackup(disk, flush_delay_ms=1000, on_work=lambda: woken.append(True))
    Segment().append(patient, A, close=True)
    del woken[:]
    patient.store.persistence.tick(999)
    assert woken
    assert patient.store.persistence.plan() == []
    patient.store.persistence.tick(1000)
    assert len(woken) == 2
    patient.run()
    assert patient.slots.free == 4
    assert bytes(patient.restarted().read().chunks) == A


def test_a_replica_freed_during_the_flush_delay_is_never_written(patient: FakeBackup, disk: FakeDisk) -> None:
    outcome = Outcome()
    disk.writes.clear()
    Segment().append(patient, A, close=True)
    patient.store.free(BROKER_ID, [1], outcome)
    patient.store.persistence.tick(1000)
    patient.run()

    assert outcome.succeeded
    assert disk.writes == []
    assert patient.slots.free == 4


def test_scarce_memory_ends_the_flush_delay(patient: FakeBackup) -> None:
    for number in (1, 2):
        Segment(number).append(patient, A, close=True)
    assert patient.store.persistence.plan() == []
    Segment(3).append(patient, A)
    patient.run()
    assert patient.slots.free == 3


def test_a_waiter_for_durability_ends_the_flush_delay(patient: FakeBackup) -> None:
    Segment().append(patient, A, close=True)
    outcome = persist(patient)
    patient.run()
    assert outcome.succeeded


@pytest.mark.parametrize("durable", ["nothing", "all", "a job writes it"])
def test_closing_at_an_earlier_offset_cuts_the_replica(backup: FakeBackup, durable: str) -> None:
    segment = Segment()
    segment.append(backup, A, B, C)
    jobs = []
    if durable != "nothing":
        assert persist(backup).calls == []
        jobs = backup.store.persistence.plan()
    if durable == "all":
        backup.perform(jobs.pop())
    replica = backup.append(segment.end(2))
    assert replica is not None
    assert (replica.length, replica.durable_length, replica.closed) == (2048, 2048 * (durable == "all"), True)
    for job in jobs:
        backup.perform(job)
    assert replica.durable_length == 2048 * (durable != "nothing")
    backup.run()
    again = backup.restarted()

    assert bytes(again.read().chunks) == A + B
    info = again.get().info()
    assert (info.length, info.checksum, info.closed, info.chunk_count) == (2048, chain(A, B), True, 2)


def test_a_waiter_for_chunks_that_are_cut_gets_an_error(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A, B)
    outcome = persist(backup)
    backup.append(segment.end(1))

    assert isinstance(outcome.calls[0], NotAccepted)
    backup.run()
    assert len(outcome.calls) == 1


def test_closing_inside_a_chunk_behind_the_end_or_with_a_wrong_checksum_is_refused(backup: FakeBackup) -> None:
    Segment().append(backup, A, B)

    for offset, checksum in [(512, chain(A)), (1024, chain(B)), (2048, chain(A))]:
        assert isinstance(fail(backup, request(offset=offset, checksum=checksum, close=True)), CorruptChunk)
    assert isinstance(fail(backup, request(offset=3072, checksum=0, close=True)), ReplicaOffset)


def test_closing_at_offset_0_frees_the_replica_and_can_be_repeated(backup: FakeBackup) -> None:
    Segment().append(backup, A)

    for _ in range(2):
        assert backup.append(request(close=True)) is None
        assert (backup.numbers(), backup.slots.free) == ([], 4)


def test_closing_again_succeeds_only_at_the_same_offset(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A, B)
    for _ in range(2):
        backup.append(segment.end(2))
        backup.run()

    assert isinstance(fail(backup, Segment.end(segment, 1)), ReplicaClosed)


# --- the disk ----------------------------------------------------------------------------------------------


def test_requests_that_gather_during_a_commit_share_the_next_sync(backup: FakeBackup, disk: FakeDisk) -> None:
    first, second, third = (Segment(number) for number in (1, 2, 3))
    first.append(backup, A)
    waiting = [persist(backup)]
    (job,) = backup.store.persistence.plan()
    second.append(backup, A)
    third.append(backup, A)
    waiting += [persist(backup, 2), persist(backup, 3)]
    assert backup.store.persistence.plan() == []
    backup.perform(job)
    assert [outcome.calls for outcome in waiting] == [[None], [], []]
    (job,) = backup.store.persistence.plan()
    syncs = disk.syncs
    backup.perform(job)

    assert all(outcome.succeeded for outcome in waiting)
    assert disk.syncs == syncs + 1


def test_a_commit_writes_only_new_blocks_and_the_header(backup: FakeBackup, disk: FakeDisk) -> None:
    segment = Segment()
    segment.append(backup, A, B, C, A)
    persist(backup)
    backup.run()
    segment.append(backup, B)
    disk.writes.clear()
    persist(backup)
    backup.run()

    assert disk.writes == [(3 * BLOCK_BYTES, BLOCK_BYTES), (BLOCK_BYTES, BLOCK_BYTES)]


def test_chunks_appended_during_a_commit_are_not_durable_after_it(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A)
    persist(backup)
    (job,) = backup.store.persistence.plan()
    segment.append(backup, B)
    later = persist(backup)
    backup.perform(job)
    assert (backup.get().durable_length, later.calls) == (1024, [])
    backup.run()

    assert (backup.get().durable_length, later.calls) == (2048, [None])


@pytest.mark.parametrize("written", [0, 1, 3, 4])
def test_an_append_during_a_commit_does_not_change_the_blocks_being_written(backup: FakeBackup, written: int) -> None:
    """Otherwise a file system with block checksums would store a checksum that does not match."""
    segment = Segment()
    for _ in range(written):
        segment.append(backup, A)
    if written:
        persist(backup)
        backup.run()
    segment.append(backup, A)
    persist(backup)
    (job,) = backup.store.persistence.plan()
    assert isinstance(job, WriteReplicasJob)
    (part,) = job.parts
    before = b"".join(part.data)
    segment.append(backup, B)

    assert b"".join(part.data) == before
    assert before == segment.content[part.offset : -len(B)].ljust(BLOCK_BYTES, b"\0")
    assert all(len(piece) % BLOCK_BYTES == 0 for piece in part.data)


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, DiskFailed), (errno.ENOSPC, DiskFull)])
def test_a_failed_write_is_an_error_but_loses_no_chunks(
    backup: FakeBackup, disk: FakeDisk, number: int, error: type[KeraError]
) -> None:
    segment = Segment()
    segment.append(backup, A)
    disk.write_error = number
    outcome = persist(backup)
    backup.run()
    assert isinstance(outcome.calls[0], error)
    assert isinstance(fail(backup, segment.next(B), B), error)
    assert isinstance(fail(backup, request(2, checksum=chain(A)), A), error), "a disk that fails takes no other one"
    assert bytes(backup.read().chunks) == A
    backup.append(segment.end(1))
    disk.write_error = 0
    backup.retry()

    assert backup.slots.free == 4
    assert bytes(backup.read().chunks) == A
    assert backup.store.persistence.disks[0].error is None


def test_blocks_that_a_failed_write_spoiled_are_written_again(backup: FakeBackup, disk: FakeDisk) -> None:
    segment = Segment()
    segment.append(backup, A, B)
    persist(backup)
    backup.run()
    segment.append(backup, C)
    disk.write_error, disk.scribbles = errno.EIO, True
    persist(backup)
    backup.run()
    disk.write_error = 0
    backup.append(segment.end(3))
    backup.retry()

    assert bytes(backup.restarted().read().chunks) == A + B + C


def test_a_failed_disk_without_pending_writes_is_tried_again(backup: FakeBackup, disk: FakeDisk) -> None:
    Segment().append(backup, A)
    disk.write_error = errno.EIO
    persist(backup)
    backup.run()
    disk.write_error = 0
    backup.retry()
    Segment(2).append(backup, A)
    outcome = persist(backup, 2)
    backup.run()

    assert outcome.succeeded


def test_a_replica_is_never_in_two_jobs(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A)
    outcomes = [persist(backup)]
    (commit,) = backup.store.persistence.plan()
    segment.append(backup, B, close=True)
    outcomes.append(persist(backup))
    assert backup.store.persistence.plan() == []
    backup.perform(commit)
    (commit,) = backup.store.persistence.plan()
    backup.perform(commit)

    assert all(outcome.succeeded for outcome in outcomes)
    assert backup.slots.free == 4


def test_replicas_go_to_the_working_disk_with_the_most_room() -> None:
    disks = FakeDisk("/a"), FakeDisk("/b"), FakeDisk("/c")
    disks[0].free, disks[1].free, disks[2].free = (count * FRAME_BYTES for count in (2, 3, 9))
    backup = FakeBackup(*disks, slots=9)
    disks[2].write_error = errno.EIO
    Segment(9).append(backup, A)
    persist(backup, 9)
    backup.run()
    for number in (1, 2, 3, 4):
        Segment(number).append(backup, A)

    assert [backup.get(number).frame.disk for number in (9, 1, 2, 3, 4)] == [2, 1, 0, 1, 0]


# --- room --------------------------------------------------------------------------------------------------


def test_full_memory_is_refused_with_its_size_until_a_replica_is_on_disk() -> None:
    backup = FakeBackup(slots=2)
    Segment(1).append(backup, A)
    Segment(2).append(backup, A, close=True)
    error = fail(backup, request(3, checksum=chain(A)), A)
    assert isinstance(error, BackupFull)
    assert error.attributes == {"resource": "memory", "limit_bytes": 2 * SEGMENT_BYTES, "free_bytes": 0}
    backup.run()

    Segment(3).append(backup, A)


def test_a_full_disk_is_refused_with_its_size_but_open_replicas_can_be_written() -> None:
    backup = FakeBackup(bytes_max=2 * FRAME_BYTES)
    segments = [Segment(number) for number in (1, 2)]
    for segment in segments:
        segment.append(backup, A)
    error = fail(backup, request(3, checksum=chain(A)), A)
    assert isinstance(error, BackupFull)
    assert error.attributes == {"resource": "disk", "limit_bytes": 2 * FRAME_BYTES, "free_bytes": 0}
    for segment in segments:
        segment.append(backup, *[B] * 7, close=True)
    backup.run()
    assert backup.store.persistence.disks[0].used_bytes == 2 * FRAME_BYTES
    backup.store.free(BROKER_ID, [1], Outcome())
    backup.run()

    Segment(3).append(backup, A)


def test_the_free_space_of_the_file_system_bounds_new_replicas(disk: FakeDisk) -> None:
    disk.free = 5 * FRAME_BYTES
    backup = FakeBackup(disk)
    Segment(1).append(backup, A)
    disk.free = FRAME_BYTES
    backup.look()

    assert isinstance(fail(backup, request(2, checksum=chain(A)), A), BackupFull), "the first has yet to be written"


# --- epochs and freeing ------------------------------------------------------------------------------------


def test_an_older_launch_gets_stale_epoch(backup: FakeBackup) -> None:
    backup.store.see_epoch(BROKER_ID, EPOCH + 1)
    error = fail(backup, request(checksum=chain(A)), A)

    assert isinstance(error, StaleEpoch)
    assert error.attributes == {"broker_id": BROKER_ID, "broker_epoch": EPOCH + 1}


def test_a_newer_launch_seals_open_replicas_of_older_ones_and_frees_their_memory(backup: FakeBackup) -> None:
    segment = Segment()
    segment.append(backup, A)
    backup.store.see_epoch(BROKER_ID, EPOCH + 1)
    assert isinstance(fail(backup, segment.next(B, epoch=EPOCH + 1), B), ReplicaClosed)
    backup.run()

    assert backup.slots.free == 4
    info = backup.get().info()
    assert (info.length, info.durable_length, info.closed) == (1024, 1024, False)


@pytest.mark.parametrize("when", ["in memory", "open and durable", "on disk", "during a job"])
def test_freeing_a_replica_gives_back_its_memory_and_disk_space(backup: FakeBackup, disk: FakeDisk, when: str) -> None:
    segment = Segment()
    segment.append(backup, A, close=when == "on disk")
    if when != "in memory":
        persist(backup)
    jobs = backup.store.persistence.plan()
    outcome = Outcome()
    if when == "during a job":
        backup.store.free(BROKER_ID, [1], outcome)
        assert backup.slots.free == 3, "the job looks at it"
    for job in jobs:
        backup.perform(job)
    if when != "during a job":
        backup.run()
        backup.store.free(BROKER_ID, [1, 1, 77], outcome)
    backup.run()

    assert outcome.succeeded
    assert (backup.numbers(), backup.slots.free, backup.store.persistence.disks[0].used_bytes) == ([], 4, 0)
    assert disk.next_data(BLOCK_BYTES) is None
    assert backup.restarted().numbers() == []


def test_a_waiter_for_a_freed_replica_gets_an_error(backup: FakeBackup) -> None:
    Segment().append(backup, A)
    outcome = persist(backup)
    backup.store.free(BROKER_ID, [1], Outcome())

    assert [type(error) for error in outcome.calls] == [NotAccepted]


def test_a_frame_is_reused_only_when_it_is_durably_empty(backup: FakeBackup) -> None:
    Segment(1).append(backup, A, close=True)
    backup.run()
    backup.store.free(BROKER_ID, [1], Outcome())
    (job,) = backup.store.persistence.plan()
    assert isinstance(job, PunchJob)
    Segment(2).append(backup, A)
    backup.perform(job)
    Segment(3).append(backup, A)

    assert [backup.get(number).frame.number for number in (2, 3)] == [1, 0]


def test_freeing_is_retried_after_a_disk_failure(backup: FakeBackup, disk: FakeDisk) -> None:
    Segment().append(backup, A, close=True)
    backup.run()
    disk.write_error = errno.EIO
    outcomes = Outcome(), Outcome()
    backup.store.free(BROKER_ID, [1], outcomes[0])
    backup.run()
    assert isinstance(outcomes[0].calls[0], DiskFailed)
    backup.store.free(BROKER_ID, [1], outcomes[1])
    assert outcomes[1].calls == [], "it could still come back"
    disk.write_error = 0
    backup.retry()

    assert outcomes[1].succeeded
    assert backup.store.persistence.disks[0].used_bytes == 0


def test_a_replica_begun_anew_is_freed_only_when_its_first_version_cannot_return(backup: FakeBackup) -> None:
    Segment().append(backup, A)
    persist(backup)
    backup.run()
    Segment().append(backup, B)
    outcome = Outcome()
    backup.store.free(BROKER_ID, [1], outcome)
    assert outcome.calls == []
    assert backup.restarted().numbers() == [1]
    backup.run()

    assert outcome.succeeded
    assert backup.restarted().numbers() == []


def test_a_reader_keeps_memory_and_frame_until_it_is_finished(backup: FakeBackup) -> None:
    Segment().append(backup, A, close=True)
    replica = backup.get()
    backup.store.pin(replica)
    backup.run()
    assert backup.slots.free == 3
    backup.store.free(BROKER_ID, [1], Outcome())
    backup.run()
    assert backup.store.persistence.disks[0].used_bytes
    backup.store.unpin(replica)
    backup.run()

    assert (backup.slots.free, backup.store.persistence.disks[0].used_bytes) == (4, 0)


def test_replicas_are_listed_in_order_page_by_page(backup: FakeBackup) -> None:
    for number in (3, 1, 4, 2):
        Segment(number).append(backup, A)
    page, complete = backup.store.replicas.after(BROKER_ID, 1, 2)

    assert ([replica.virtual_segment_id for replica in page], complete) == ([2, 3], False)
    page, complete = backup.store.replicas.after(BROKER_ID, 3, 2)
    assert ([replica.virtual_segment_id for replica in page], complete) == ([4], True)
    assert backup.store.replicas.after(99, 0, 2) == ([], True)


def test_the_next_flush_vouches_for_a_finished_replica(backup: FakeBackup, disk: FakeDisk) -> None:
    Segment(1).append(backup, A, close=True)
    (flush,) = backup.store.persistence.plan()
    Segment(2).append(backup, A, close=True)
    backup.perform(flush)
    (job,) = backup.store.persistence.plan()
    assert isinstance(job, WriteReplicasJob)
    assert [(part.replica.virtual_segment_id, part.data_bytes) for part in job.parts] == [(2, BLOCK_BYTES), (1, 0)]
    backup.perform(job)

    assert [backup.get(number).vouched for number in (1, 2)] == [True, False]
    assert disk.syncs == 3
