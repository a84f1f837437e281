"""The persistence manager: which segments it flushes, commits and evicts, and in which order."""

import errno
from typing import Any

import pytest

from kera.broker.log.retention import Rules, new_starts
from kera.broker.records import EntryRecord
from kera.broker.storage import segment_writer
from kera.broker.storage.jobs import RETRY_MS, StoreJob
from kera.core.base.ids import Position
from kera.core.errors import ArenaFull, DiskFailed, DiskFull, NotPersisted
from tests.unit.broker.persistence_support import (
    NEVER_MS,
    SEGMENT,
    MakeEngine,
    finish,
    flushed,
    keys,
    on_disk_only,
    persist,
    resident,
    written,
)
from tests.unit.broker.support import CHUNK_BYTES, SLOT_BYTES, Engine, Log, Outcome

# --- flush -------------------------------------------------------------------------------------------------


def test_closed_segments_are_flushed_and_open_ones_are_not(log: Log) -> None:
    log.append_many(SEGMENT - 1)
    assert log.engine.memory.plan() == []
    log.append_many(SEGMENT)
    jobs = log.engine.memory.plan()
    assert written(jobs) == [(1, 1)]
    finish(log.engine, jobs)

    assert keys(log.entry.tail) == [(1, 2)]
    assert log.entry.last_stored == (1, 1)
    assert resident(log) == [(1, 1), (1, 2)], "it stays in memory as long as nobody needs that"
    assert log.engine.memory.plan() == []


def test_segments_of_an_entry_are_flushed_in_the_order_of_the_log(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(5 * SEGMENT)
    jobs = engine.memory.plan()

    assert written(jobs) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_the_bytes_of_one_flush_are_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(engine)
    log.append_many(5 * SEGMENT)
    order = []
    for bytes_max in (1, 2 * SLOT_BYTES, 2 * SLOT_BYTES):
        monkeypatch.setattr(segment_writer, "FLUSH_BYTES_MAX", bytes_max)
        jobs = engine.memory.plan()
        order.append(written(jobs))
        finish(engine, jobs)

    assert order == [[(1, 1)], [(1, 2), (2, 1)], [(2, 2)]]


def test_a_segment_that_closes_while_it_is_committed_is_flushed_before_those_behind_it(log: Log) -> None:
    engine = log.engine
    appended = log.append(publish=False)
    assert appended.segment is not None
    engine.memory.commits.persist([(appended.segment, appended.end)], Outcome())
    jobs = engine.memory.plan()
    log.append_many(2 * SEGMENT)
    finish(engine, jobs)
    order = []
    while jobs := engine.memory.plan():
        order += written(jobs)
        finish(engine, jobs)

    assert order == [(1, 1), (1, 2)]
    assert log.entry.last_stored == (1, 2)
    assert log.read_all() == list(range(2 * SEGMENT + 1))


def test_an_entry_has_at_most_one_write_under_way(engine: Engine) -> None:
    log, other = Log(engine), Log(engine)
    log.append_many(2 * SEGMENT)
    first = engine.memory.plan()
    assert written(first) == [(1, 1)]
    log.append_many(SEGMENT)
    other.append_many(2 * SEGMENT)
    engine.memory.commits.persist([(log.entry.tail[-1], log.entry.tail[-1].head)], Outcome())
    assert written(engine.memory.plan()) == [], "neither flush nor commit: its records are being changed"
    finish(engine, first)
    second = engine.memory.plan()

    assert written(second) == [(1, 2), (2, 1), (1, 1)]
    assert [job.commit for job in second if isinstance(job, StoreJob)] == [True, False]
    finish(engine, second)
    assert engine.memory.plan() == []


def test_a_full_memory_first_flushes_segments_that_all_readers_have_read(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=4)
    unread, read = Log(engine), Log(engine)
    unread.append_many(SEGMENT + 1)
    read.append_many(SEGMENT + 1)
    unread.entry.readers[1] = (1, 1)
    read.entry.readers[2] = (1, 2)
    (job,) = engine.memory.plan()

    assert isinstance(job, StoreJob)
    assert [part.segment.entry for part in job.parts] == [read.entry, unread.entry]


def test_an_idle_segment_is_closed_and_flushed(log: Log) -> None:
    memory = log.engine.memory
    log.append()
    memory.tick(999, idle_close_ms=1000)
    assert memory.plan() == []
    log.append()
    memory.tick(1998, idle_close_ms=1000)
    assert memory.plan() == []
    memory.tick(1999, idle_close_ms=1000)
    log.engine.run()

    assert log.entry.last_stored == (1, 1)
    assert log.read_all() == [0, 1]


def test_a_segment_older_than_the_retention_age_is_closed(engine: Engine) -> None:
    old, new = Log(engine), Log(engine)
    old.append()
    engine.memory.tick(600, idle_close_ms=NEVER_MS)
    new.append()
    old.append()
    engine.memory.tick(1000, idle_close_ms=NEVER_MS)
    engine.memory.close_older([old.entry, new.entry], 1000)

    assert [old.entry.head, new.entry.head] == [None, new.entry.tail[0]]


# --- delayed flushes -----------------------------------------------------------------------------------------


@pytest.fixture
def patient(make_engine: MakeEngine) -> Engine:
    return make_engine(slots=8, flush_delay_ms=1000)


def test_a_full_segment_waits_for_the_delay_in_memory(patient: Engine) -> None:
    log = Log(patient)
    log.append_many(SEGMENT + 1)
    woken: list[bool] = []
    patient.events.disk_work.listen(lambda: woken.append(True))
    patient.memory.tick(999, idle_close_ms=NEVER_MS)
    assert patient.memory.plan() == []
    patient.memory.tick(1000, idle_close_ms=NEVER_MS)
    assert len(woken) == 2, "nobody else would plan it"
    assert written(patient.memory.plan()) == [(1, 1)]


def test_no_flush_is_delayed_when_memory_is_scarce(patient: Engine) -> None:
    log = Log(patient)
    log.append_many(5 * SEGMENT)
    assert patient.memory.plan() == []
    log.append_many(SEGMENT)  # two slots of eight are left
    assert written(patient.memory.plan()) == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)]


def test_segments_that_can_be_evicted_count_as_free_memory(patient: Engine) -> None:
    log = Log(patient)
    log.append_many(6 * SEGMENT)
    patient.run()
    log.append_many(2 * SEGMENT)
    assert patient.arena.free_slots == 0
    assert patient.memory.plan() == []


def test_level_persisted_does_not_wait_for_the_delay(patient: Engine) -> None:
    outcome = persist(Log(patient), SEGMENT)
    patient.run()
    assert outcome.calls == [None]


def test_closing_all_segments_flushes_them_without_the_delay(patient: Engine) -> None:
    log = Log(patient)
    log.append_many(SEGMENT + 1)
    patient.memory.segments.close_all()
    patient.run()
    assert patient.memory.idle
    assert log.entry.tail == []


# --- errors of the disk ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_flush_is_retried_after_a_while_and_no_chunk_is_lost(engine: Engine, number: int) -> None:
    log = Log(engine)
    log.append_many(3 * SEGMENT)
    engine.disk.write_error = number
    engine.run()
    assert engine.memory.plan() == [], "not at once"
    assert (engine.memory.disk.error is not None, engine.memory.totals.disk_errors) == (True, 1)
    log.append_many(SEGMENT)
    engine.memory.tick(RETRY_MS - 1, idle_close_ms=NEVER_MS)
    assert engine.memory.plan() == []
    engine.disk.write_error = 0
    engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    jobs = engine.memory.plan()
    assert written(jobs) == [(1, 1), (1, 2), (2, 1)]
    finish(engine, jobs)
    engine.run()

    assert engine.memory.disk.error is None
    assert log.read_all() == list(range(4 * SEGMENT))
    assert sorted(record.physical_id for _, record in engine.index.all_segments()) == list(engine.store.physical_ids())


def test_after_a_failed_write_a_segment_goes_to_a_new_file(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(SEGMENT + 1)
    engine.disk.write_error = errno.EIO
    engine.run()
    engine.disk.write_error = 0
    engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    engine.run()
    (record,) = [record for _, record in engine.index.all_segments()]

    assert record.physical_id == 2
    assert list(engine.store.physical_ids()) == [2]


def test_the_error_of_a_full_memory_over_a_full_disk_names_the_path(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = Log(engine)
    log.append_many(2 * SEGMENT)
    engine.disk.write_error = errno.ENOSPC
    engine.run()
    with pytest.raises(DiskFull, match="has no room") as raised:
        log.append()

    assert raised.value.retriable
    assert str(engine.root) in raised.value.attributes["path"]


# --- commit ------------------------------------------------------------------------------------------------


def test_chunks_at_level_persisted_are_written_together_and_then_acknowledged(engine: Engine) -> None:
    logs = [Log(engine), Log(engine)]
    outcomes = []
    for log in logs:
        for _ in range(2):
            appended = log.append(publish=False)
            outcomes.append(Outcome())
            assert appended.segment is not None
            engine.memory.commits.persist([(appended.segment, appended.end)], outcomes[-1])
    (job,) = engine.memory.plan()
    assert isinstance(job, StoreJob)
    assert (len(job.parts), job.commit) == (2, True)
    assert [log.entry.end for log in logs] == [Position(1, 1, 0)] * 2
    assert [outcome.calls for outcome in outcomes] == [[]] * 4
    engine.perform(job)

    assert [outcome.calls for outcome in outcomes] == [[None]] * 4
    assert [log.entry.end for log in logs] == [Position(1, 1, 2 * CHUNK_BYTES)] * 2, "readers see it now"
    assert engine.memory.totals.commits == 1
    assert engine.memory.plan() == []


def test_chunks_appended_during_a_commit_go_with_the_next_one(log: Log) -> None:
    memory = log.engine.memory
    first = persist(log)
    jobs = memory.plan()
    second = persist(log)
    assert memory.plan() == []
    finish(log.engine, jobs)
    assert (first.calls, second.calls) == ([None], [])
    assert log.entry.end == Position(1, 1, CHUNK_BYTES)
    log.engine.run()

    assert second.calls == [None]
    assert log.engine.store.path(1).read_bytes()[: 2 * CHUNK_BYTES] == bytes(
        log.entry.tail[0].slot.view[: 2 * CHUNK_BYTES]
    )


def test_a_segment_committed_in_steps_becomes_a_stored_segment(log: Log) -> None:
    for _ in range(3 * SEGMENT):
        outcome = persist(log)
        log.engine.run()
        assert outcome.calls == [None]
        assert log.entry.end == Position(*log.entry.tail[-1].key, log.entry.tail[-1].head)
    log.engine.memory.segments.close_all()
    log.engine.run()

    assert log.entry.tail == []
    records = [record for _, record in log.engine.index.all_segments()]
    assert [(record.physical_id, record.length, record.open) for record in records] == [
        (number, SLOT_BYTES, False) for number in (1, 2, 3)
    ]
    on_disk_only(log, 0)
    assert log.read_all() == list(range(3 * SEGMENT)), "the checksums are those of the whole"
    assert log.engine.memory.totals.chunks_damaged == 0


def test_an_open_segment_that_was_committed_is_in_the_index_as_open(log: Log) -> None:
    persist(log)
    log.engine.run()

    assert [record.open for _, record in log.engine.index.open_segments(log.entry.log_id)] == [True]
    record = log.engine.index.entry(log.entry.log_id) or EntryRecord()
    assert (record.last_group_id, record.stored_segments) == (0, 0), "the entry's stored part are its closed segments"


def test_a_commit_over_several_segments_is_acknowledged_when_all_are_on_disk(log: Log) -> None:
    outcome = persist(log, 2 * SEGMENT + 1)
    (job,) = log.engine.memory.plan()
    assert written([job]) == [(1, 1), (1, 2), (2, 1)], "what is before it in the log goes with it"
    log.engine.perform(job)

    assert outcome.calls == [None]
    assert (log.entry.last_stored, log.entry.end) == ((1, 2), Position(2, 1, CHUNK_BYTES))


def test_a_commit_of_chunks_already_on_disk_is_acknowledged_at_once(log: Log) -> None:
    persist(log)
    log.engine.run()
    outcome = Outcome()
    log.engine.memory.commits.persist([(log.entry.tail[0], CHUNK_BYTES)], outcome)

    assert outcome.calls == [None]


def test_a_failed_commit_is_reported_once_and_completes_when_the_disk_works_again(log: Log) -> None:
    engine = log.engine
    failed = persist(log, 2)
    engine.disk.write_error = errno.EIO
    engine.run()
    ((error,),) = (failed.calls,)
    assert isinstance(error, NotPersisted)
    assert log.entry.end == Position(1, 1, 0), "nothing of it can be read"
    assert engine.memory.plan() == []

    engine.disk.write_error = 0
    again = Outcome()
    engine.memory.commits.persist([(log.entry.tail[0], 2 * CHUNK_BYTES)], again)
    assert engine.memory.plan() == [], "not before its time"
    engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    engine.run()

    assert again.calls == [None]
    assert len(failed.calls) == 1, "told once"
    assert log.entry.end == Position(1, 1, 2 * CHUNK_BYTES)


def test_a_failed_commit_is_retried_without_another_request(log: Log) -> None:
    persist(log)
    log.engine.disk.write_error = errno.EIO
    log.engine.run()
    log.engine.disk.write_error = 0
    log.engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    log.engine.run()

    assert log.entry.end == Position(1, 1, CHUNK_BYTES)


def test_a_failed_commit_leaves_durable_chunks_on_disk_until_another_file_has_them(log: Log) -> None:
    engine = log.engine
    persist(log)
    engine.run()
    persist(log)
    engine.disk.write_error = errno.EIO
    engine.run()
    assert list(engine.store.physical_ids()) == [1]
    assert engine.store.scan_file(1).end == CHUNK_BYTES
    engine.disk.write_error = 0
    engine.memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    engine.run()

    assert list(engine.store.physical_ids()) == [2]
    assert engine.store.scan_file(2).end == 2 * CHUNK_BYTES
    assert [record.physical_id for _, record in engine.index.all_segments()] == [2]


def test_the_disk_check_fails_while_the_disk_takes_nothing(log: Log) -> None:
    memory = log.engine.memory
    memory.disk.check()
    persist(log)
    log.engine.disk.write_error = errno.EIO
    log.engine.run()
    with pytest.raises(DiskFull):
        memory.disk.check()
    log.engine.disk.write_error = 0
    memory.tick(RETRY_MS, idle_close_ms=NEVER_MS)
    log.engine.run()

    memory.disk.check()


# --- eviction ----------------------------------------------------------------------------------------------


def evicted(log: Log, *readers: tuple[int, int]) -> list[tuple[int, int]]:
    """The order in which segments of a log leave the memory, with readers at these places."""
    for number, reader in enumerate(readers):
        log.entry.readers[number] = reader
    log.engine.fill_memory()
    order = []
    while before := resident(log):
        log.engine.memory.slots.allocate()
        (gone,) = set(before) - set(resident(log))
        order.append(gone)
    return order


def test_the_oldest_segments_are_evicted_first_when_there_are_no_readers(log: Log) -> None:
    assert evicted(flushed(log, 4)) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_segments_that_all_readers_have_read_are_evicted_first_and_then_the_farthest(log: Log) -> None:
    flushed(log, 6)

    assert evicted(log, (2, 1)) == [(1, 1), (1, 2), (3, 2), (3, 1), (2, 2), (2, 1)]


def test_the_distance_to_the_nearest_reader_decides_the_eviction(log: Log) -> None:
    flushed(log, 6)

    assert evicted(log, (1, 1), (3, 1)) == [(2, 2), (2, 1), (1, 2), (3, 2), (1, 1), (3, 1)]


def test_streams_with_a_lower_memory_priority_are_evicted_first(make_engine: MakeEngine) -> None:
    """Also their segments that are read next. The order within one priority is the usual one."""
    engine = make_engine(slots=8)
    low, high = flushed(Log(engine), 2), flushed(Log(engine), 4)
    high.streamlet.entries.set_memory_priority(3)
    low.entry.readers[1] = (1, 1)
    high.entry.readers[1] = (2, 1)
    engine.fill_memory()
    order = []
    while before := [(log, key) for log in (low, high) for key in resident(log)]:
        engine.memory.slots.allocate()
        (gone,) = [one for one in before if one[1] not in resident(one[0])]
        order.append((gone[0] is high, gone[1]))

    assert [key for is_high, key in order if not is_high] == [key for _, key in order[:2]]
    assert order[2:] == [(True, (1, 1)), (True, (1, 2)), (True, (2, 2)), (True, (2, 1))]


def test_segments_that_are_leased_or_not_on_disk_are_not_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3)
    log = Log(engine)
    flushed(log, 2)
    leased = log.entry.resident[1, 1].slot
    leased.lease()
    log.append()  # in the third slot
    engine.memory.slots.allocate()
    assert resident(log) == [(1, 1), (2, 1)]
    with pytest.raises(ArenaFull):
        engine.memory.slots.allocate()
    leased.release()
    engine.memory.slots.allocate()

    assert resident(log) == [(2, 1)]


def test_evicted_segments_are_read_from_disk(log: Log) -> None:
    on_disk_only(log, 4)

    assert log.read_all() == list(range(4 * SEGMENT))
    assert log.engine.memory.totals.segments_loaded == 4


# --- no room -----------------------------------------------------------------------------------------------


def full(engine: Engine) -> list[Log]:
    """Fill the memory with open segments, the stalest first."""
    logs = [Log(engine) for _ in range(engine.arena.slot_count)]
    for now_ms, log in enumerate(logs):
        engine.memory.tick(now_ms, idle_close_ms=NEVER_MS)
        log.append()
    return logs


def test_back_pressure_closes_the_segment_that_has_been_idle_the_longest(engine: Engine) -> None:
    logs = full(engine)
    engine.memory.tick(100, idle_close_ms=NEVER_MS)
    logs[0].append()
    room = list[str]()
    engine.events.room.listen(lambda: room.append("room"))
    with pytest.raises(ArenaFull):
        Log(engine).append()
    assert room == []
    engine.run()

    assert room
    assert [log.entry.head is None for log in logs] == [False, True, *[False] * 6]
    Log(engine).append()
    assert resident(logs[1]) == []


def test_a_full_memory_with_a_segment_to_flush_closes_no_other(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3)
    log, other = Log(engine), Log(engine)
    log.append_many(SEGMENT + 1)
    other.append()
    with pytest.raises(ArenaFull):
        Log(engine).append()
    engine.run()

    assert (log.entry.head is None, other.entry.head is None) == (False, False)
    Log(engine).append()


def test_the_end_of_a_lease_announces_room(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = flushed(Log(engine), 2)
    slots = [segment.slot for segment in log.segments()]
    for slot in slots:
        slot.lease()
    room = list[str]()
    engine.events.room.listen(lambda: room.append("room"))
    with pytest.raises(ArenaFull):
        log.append()
    engine.run()
    assert room == []
    slots[0].release()

    assert room == ["room"]
    log.append()


# --- cursors, states, the end ------------------------------------------------------------------------------


def test_a_cursor_is_stored_when_its_commit_is_acknowledged(log: Log) -> None:
    outcome = Outcome()
    log.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 1, 0), outcome)
    assert log.engine.index.cursors(log.entry.log_id) == {}
    log.engine.run()

    assert outcome.calls == [None]
    assert log.engine.index.cursors(log.entry.log_id) == {"a": Position(1, 1, 0)}
    assert log.entry.committed == {"a": Position(1, 1, 0)}


def test_a_failed_commit_of_a_cursor_lets_retention_remove_nothing(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader whose commit failed goes on from the cursor before."""
    outcome = Outcome()
    log.append_many(SEGMENT + 1)
    log.engine.run()
    log.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 1, CHUNK_BYTES), Outcome())
    log.engine.run()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    log.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 2, 0), outcome)
    monkeypatch.setattr(log.engine.index, "commit", fail)
    log.engine.run()
    assert [type(error) for error in outcome.calls] == [DiskFailed]

    assert new_starts(log.streamlet, Rules(consumer_groups=("a",), consumed=True), 0) == []


def test_segments_are_counted_by_the_states_of_the_thesis(log: Log) -> None:
    memory = log.engine.memory
    flushed(log, 3)
    log.append_many(SEGMENT + 1)
    assert memory.segments_by_state() == {"head": 1, "group": 4, "processed": 0, "loading": 0}
    log.entry.readers[1] = (2, 1)

    assert memory.segments_by_state() == {"head": 1, "group": 2, "processed": 2, "loading": 0}


def test_memory_is_idle_once_all_closed_segments_are_on_disk(log: Log) -> None:
    memory = log.engine.memory
    log.append_many(SEGMENT + 1)
    memory.segments.close_all()
    idle = [memory.idle]
    jobs = memory.plan()
    idle.append(memory.idle)
    finish(log.engine, jobs)
    log.engine.run()
    idle.append(memory.idle)

    assert idle == [False, False, True]
    assert log.entry.tail == []
    assert memory.ids.meta["next_physical_id"] == 3


def test_a_commit_of_chunks_that_a_flush_has_just_written_blocks_nothing(log: Log) -> None:
    log.append_many(SEGMENT)
    log.engine.memory.segments.close_all()
    (flush,) = log.engine.memory.plan()
    outcome = Outcome()
    log.engine.memory.commits.persist(
        [(log.entry.tail[0], log.entry.tail[0].head)], outcome
    )  # a repeat of its last chunk

    log.engine.perform(flush)
    log.engine.run()

    assert outcome.calls == [None]
    assert log.engine.memory.idle
    waiting = persist(log)
    log.engine.run()
    assert waiting.calls == [None]


def test_a_disk_error_is_over_when_the_data_that_failed_is_dropped(make_engine: MakeEngine) -> None:
    log = Log(make_engine(slots=4))
    log.append_many(SEGMENT)
    log.engine.memory.segments.close_all()
    log.engine.disk.write_error = errno.ENOSPC
    log.engine.run()
    with pytest.raises(DiskFull):
        log.engine.memory.disk.check()

    log.streamlet.drop()
    log.engine.memory.tick(log.engine.memory.now_ms + RETRY_MS, idle_close_ms=NEVER_MS)

    log.engine.memory.disk.check()
