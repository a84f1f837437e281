"""Removal of data for good, by retention, truncation and deletion; and cursors, which decide about it."""

import errno
from typing import Any

import lmdb
import pytest
from structlog.testing import capture_logs

from kera.broker.storage import removals
from kera.broker.storage.jobs import RETRY_MS, IndexJob, RemoveJob, StoreJob
from kera.core.base.ids import Position
from kera.core.errors import DiskFailed, NotPersisted
from tests.unit.broker.persistence_support import (
    NEVER_MS,
    SEGMENT,
    finish,
    flushed,
    on_disk_only,
    persist,
    resident,
)
from tests.unit.broker.support import ADDRESS, CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Engine, Log, Outcome, placed

# --- removal -----------------------------------------------------------------------------------------------


def move_start(log: Log, start: Position, record: int) -> Outcome:
    outcome = Outcome()
    log.entry.start, log.entry.start_record = start, record
    log.engine.memory.removals.collect(log.entry, outcome)
    return outcome


def state(log: Log) -> tuple[list[tuple[int, int]], list[int], int]:
    """Segments in the index, files, slots in use."""
    engine = log.engine
    return (
        [(address.group_id, address.segment_id) for address, _ in engine.index.segments(log.entry.log_id)],
        list(engine.store.physical_ids()),
        engine.arena.slot_count - engine.arena.free_slots,
    )


def test_segments_before_the_start_are_removed_from_memory_index_and_disk(log: Log) -> None:
    flushed(log, 4)
    outcome = move_start(log, Position(2, 1, 0), 8)
    assert outcome.calls == [], "not before it is gone for good"
    log.engine.run()

    assert outcome.calls == [None]
    assert state(log) == ([(2, 1), (2, 2)], [3, 4], 2)
    assert (log.entry.stored_segments, log.entry.stored_bytes) == (2, 2 * SLOT_BYTES)
    record = log.engine.index.entry(log.entry.log_id)
    assert record is not None
    assert (record.start, record.start_record, record.stored_segments) == (Position(2, 1, 0), 8, 2)
    assert log.read_all() == list(range(8, 16))
    totals = log.engine.memory.totals
    assert (totals.segments_removed, totals.bytes_removed) == (2, 2 * SLOT_BYTES)


def test_a_segment_is_removed_when_all_of_it_is_before_the_start(log: Log) -> None:
    flushed(log, 2)
    move_start(log, Position(1, 1, CHUNK_BYTES), 1)
    log.engine.run()
    assert state(log)[0] == [(1, 1), (1, 2)]
    move_start(log, Position(1, 1, SLOT_BYTES), 4)
    log.engine.run()

    assert state(log)[0] == [(1, 2)]


def test_closed_segments_can_be_removed_while_the_disk_is_full(log: Log) -> None:
    log.append_many(2 * SEGMENT + 1)
    log.engine.disk.write_error = errno.ENOSPC
    log.engine.run()
    outcome = move_start(log, Position(2, 1, 0), 8)
    log.engine.run()

    assert outcome.calls == [None]
    assert state(log) == ([], [], 1)
    assert log.entry.last_stored == (1, 2)
    assert log.append(sequence=3).duplicate, "who has appended is remembered"
    assert log.engine.index.producers(STREAM_ID, 0)[1].next_sequence == 8
    assert log.read_all() == [8]


def test_files_of_failed_writes_are_removed_with_their_segments(log: Log) -> None:
    persist(log)
    log.engine.disk.write_error = errno.ENOSPC
    log.engine.run()
    assert state(log)[1] == [1], "the file was created before the write failed"
    log.append_many(SEGMENT)
    move_start(log, Position(1, 2, 0), SEGMENT)
    log.engine.run()

    assert state(log)[1] == []


def test_a_removal_waits_for_a_write_of_the_entry_under_way(log: Log) -> None:
    log.append_many(2 * SEGMENT + 1)
    writing = log.engine.memory.plan()
    outcome = move_start(log, Position(2, 1, 0), 8)
    assert log.engine.memory.plan() == []
    finish(log.engine, writing)
    log.engine.run()

    assert outcome.calls == [None]
    assert state(log) == ([], [], 1)


def test_a_removal_does_not_free_leased_memory(log: Log) -> None:
    flushed(log, 1)
    slot = log.entry.resident[1, 1].slot
    content = bytes(slot.view)
    slot.lease()
    move_start(log, Position(1, 1, SLOT_BYTES), 4)
    log.engine.run()

    assert (state(log), bytes(slot.view)) == (([], [], 1), content)
    slot.release()
    assert log.engine.arena.free_slots == 8


def test_a_segment_removed_while_it_is_loaded_leaves_no_memory_in_use(log: Log) -> None:
    on_disk_only(log, 1)
    outcome = Outcome()
    log.engine.memory.loads.load(log.entry, (1, 1), outcome)
    (load,) = log.engine.memory.plan()
    move_start(log, Position(1, 1, SLOT_BYTES), 4)
    finish(log.engine, log.engine.memory.plan())
    log.engine.perform(load)
    log.engine.run()

    assert len(outcome.calls) == 1
    assert (state(log), resident(log)) == (([], [], 0), [])


def test_a_failed_removal_is_reported(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed(log, 1)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    outcome = move_start(log, Position(1, 1, SLOT_BYTES), 4)
    monkeypatch.setattr(log.engine.index, "commit", fail)
    log.engine.run()

    (error,) = outcome.calls
    assert isinstance(error, DiskFailed)
    assert "the change may still come to be" in error.message
    assert log.engine.memory.totals.disk_errors == 1


def test_a_lasting_failure_of_the_index_is_logged_once_and_so_is_its_end(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed(log, 1)

    def fail(*_: Any) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    with capture_logs() as lines:
        with monkeypatch.context() as failing:
            failing.setattr(log.engine.index, "commit", fail)
            move_start(log, Position(1, 1, SLOT_BYTES), 4)
            for _ in range(4):
                log.engine.run()
                log.engine.memory.tick(log.engine.memory.now_ms + RETRY_MS, idle_close_ms=NEVER_MS)
            assert log.engine.memory.totals.disk_errors > 2
        log.engine.run()
    events = [line["event"] for line in lines if "index" in line["event"]]
    assert events == ["cannot change the index; retrying", "the index can be changed again"]


def test_removal_of_files_is_retried_while_the_index_cannot_be_read(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed(log, 1)
    engine = log.engine

    def fail(*_: Any) -> None:
        raise lmdb.ReadersFullError("MDB_READERS_FULL")

    with capture_logs(), monkeypatch.context() as failing:
        failing.setattr(engine.index, "removal", fail)
        move_start(log, Position(1, 1, SLOT_BYTES), 4)
        engine.run()
        assert (list(engine.store.physical_ids()), engine.memory.removals.failed) == ([1], True)
    engine.memory.tick(engine.memory.now_ms + RETRY_MS, idle_close_ms=NEVER_MS)
    engine.run()

    assert (list(engine.store.physical_ids()), engine.memory.removals.removing) == ([], False)


# --- dropping a stream -------------------------------------------------------------------------------------


def drop(log: Log) -> Outcome:
    outcome = Outcome()
    log.streamlet.drop()
    log.engine.memory.removals.drop_stream(STREAM_ID, outcome)
    return outcome


def nothing_is_left(engine: Engine) -> None:
    engine.run()
    assert engine.arena.free_slots == engine.arena.slot_count
    assert list(engine.store.physical_ids()) == []
    assert engine.index.keys_of_stream(STREAM_ID) == []
    assert engine.index.removals() == []
    assert engine.memory.idle


def test_a_stream_dropped_during_a_flush_leaves_nothing(log: Log) -> None:
    log.append_many(2 * SEGMENT + 1)
    writing = log.engine.memory.plan()
    drop(log)
    removing = log.engine.memory.plan()
    finish(log.engine, [*removing, *writing])
    nothing_is_left(log.engine)


def test_a_stream_dropped_during_a_commit_leaves_nothing_and_fails_waiting_writes(log: Log) -> None:
    waiting = persist(log, 2)
    jobs = log.engine.memory.plan()
    drop(log)
    assert [type(error) for error in waiting.calls] == [NotPersisted]
    finish(log.engine, jobs)
    nothing_is_left(log.engine)

    assert len(waiting.calls) == 1


def test_a_stream_dropped_during_a_failing_write_leaves_nothing(log: Log) -> None:
    log.append_many(SEGMENT + 1)
    jobs = log.engine.memory.plan()
    drop(log)
    log.engine.disk.write_error = errno.EIO
    finish(log.engine, jobs)
    log.engine.disk.write_error = 0
    log.engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    nothing_is_left(log.engine)


def test_a_stream_dropped_during_a_load_leaves_nothing_and_answers_waiting_reads(log: Log) -> None:
    on_disk_only(log, 4)
    outcomes = [Outcome(), Outcome()]
    log.engine.memory.loads.load(log.entry, (1, 1), outcomes[0])
    jobs = log.engine.memory.plan()
    log.engine.memory.loads.load(log.entry, (2, 2), outcomes[1])
    drop(log)
    finish(log.engine, jobs)
    nothing_is_left(log.engine)

    assert [len(outcome.calls) for outcome in outcomes] == [1, 1]


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_dropped_while_its_start_moves_leaves_nothing(log: Log, begun: bool) -> None:
    log.append_many(2 * SEGMENT + 1)
    log.engine.run()
    removal = move_start(log, Position(1, 2, 0), 4)
    jobs = log.engine.memory.plan() if begun else []
    dropping = drop(log)
    finish(log.engine, jobs)
    nothing_is_left(log.engine)

    assert (len(removal.calls), dropping.calls) == (1, [None])


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_dropped_during_a_cursor_commit_leaves_nothing(log: Log, begun: bool) -> None:
    log.append_many(SEGMENT + 1)
    log.engine.run()
    committed = Outcome()
    log.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 1, 0), committed)
    jobs = log.engine.memory.plan() if begun else []
    drop(log)
    finish(log.engine, jobs)
    nothing_is_left(log.engine)

    assert len(committed.calls) == 1


def test_files_of_failed_writes_are_removed_with_their_stream(log: Log) -> None:
    persist(log)
    log.engine.disk.write_error = errno.ENOSPC
    log.engine.run()
    assert state(log)[1] == [1], "the file was created before the write failed"
    drop(log)
    nothing_is_left(log.engine)


def test_a_committed_open_segment_is_removed_with_its_stream(log: Log) -> None:
    persist(log)
    log.engine.run()
    drop(log)
    nothing_is_left(log.engine)


def test_a_long_log_is_removed_in_several_jobs(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "REMOVALS_MAX", 2)
    flushed(log, 5)
    log.entry.start, log.entry.start_record = log.entry.end, log.entry.next_record
    outcome = Outcome()
    log.engine.memory.removals.collect(log.entry, outcome)

    (job,) = log.engine.memory.plan()
    assert isinstance(job, IndexJob)
    assert len(job.physical_ids) == 2
    log.engine.perform(job)
    assert outcome.calls == [None]  # the start is stored: the segments cannot come back
    log.engine.run()

    assert log.entry.stored_bytes == log.entry.stored_segments == 0
    assert list(log.engine.index.all_segments()) == []


# --- files -------------------------------------------------------------------------------------------------


def removal_of(log: Log) -> RemoveJob:
    """The first job that removes files, once the index has forgotten four segments, each with a file."""
    flushed(log, 4)
    move_start(log, log.entry.end, log.entry.next_record)
    (forgetting,) = log.engine.memory.plan()
    log.engine.perform(forgetting)
    (job,) = log.engine.memory.plan()
    assert isinstance(job, RemoveJob)
    return job


def test_an_entry_is_written_to_disk_while_its_files_are_removed(log: Log) -> None:
    removing = removal_of(log)
    log.append_many(SEGMENT + 1)
    (storing,) = log.engine.memory.plan()
    assert isinstance(storing, StoreJob)
    log.engine.perform(storing)

    assert log.entry.stored_segments == 1
    assert log.engine.memory.idle
    log.engine.perform(removing)
    assert list(log.engine.store.physical_ids()) == [5]


def test_many_files_are_removed_a_few_at_a_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "FILES_MAX", 3)
    job = removal_of(log)
    assert job.physical_ids == [1, 2, 3]
    assert log.engine.memory.plan() == [], "one after the other"
    log.engine.perform(job)

    assert list(log.engine.store.physical_ids()) == log.engine.index.removals() == [4]
    log.engine.run()
    assert list(log.engine.store.physical_ids()) == log.engine.index.removals() == []


@pytest.mark.parametrize("step", ["remove_error", "sync_error"])
def test_a_failed_removal_of_files_is_retried(log: Log, step: str) -> None:
    """A power loss may bring back files until their removal is durable: the index keeps them until then."""
    engine = log.engine
    job = removal_of(log)
    setattr(engine.disk, step, errno.EROFS)
    engine.perform(job)
    assert engine.index.removals() == job.physical_ids
    assert engine.memory.totals.disk_errors == 1
    assert engine.memory.plan() == []
    assert not engine.memory.removals.removing, "nobody waits for what the next start does"

    setattr(engine.disk, step, 0)
    engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    engine.run()
    assert list(engine.store.physical_ids()) == engine.index.removals() == []


@pytest.mark.parametrize("dropped", [True, False])
def test_a_file_with_another_segment_is_set_aside_and_not_removed(log: Log, dropped: bool) -> None:
    """Files of two brokers may have been mixed up, and this may be the other one's only copy."""
    flushed(log, 3)
    store, foreign = log.engine.store, placed(0, ADDRESS._replace(stream_id=99))
    store.path(2).write_bytes(foreign)
    if dropped:
        log.engine.memory.removals.drop_stream(STREAM_ID)
    else:
        move_start(log, log.entry.end, log.entry.next_record)
    with capture_logs() as logged:
        log.engine.run()

    assert log.engine.index.removals() == list(store.physical_ids()) == []
    (aside,) = (store.root / "set-aside").iterdir()
    assert aside.read_bytes() == foreign
    assert [line["set_aside"] for line in logged if "set_aside" in line] == [str(aside)]


def test_a_segment_removed_before_its_flush_is_not_written(log: Log) -> None:
    log.append_many(2 * SEGMENT + 1)
    move_start(log, Position(1, 1, SLOT_BYTES), SEGMENT)
    log.engine.run()

    assert log.engine.memory.totals.segments_flushed == 1
    assert state(log)[0] == [(1, 2)]
