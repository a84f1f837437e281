"""Loads from disk: for waiting readers, ahead of readers, and into the reserve."""

import errno

import pytest

from kera.broker.storage.loads import LOADS_IN_FLIGHT_MAX, READ_AHEAD_SEGMENTS
from kera.broker.storage.slots import LOADED_SHARE_MAX, WANTED_MS, WANTED_MS_MIN
from kera.core.errors import ArenaFull, DiskFailed, DiskFull
from tests.unit.broker.persistence_support import (
    NEVER_MS,
    SEGMENT,
    MakeEngine,
    finish,
    loaded,
    on_disk_only,
    resident,
)
from tests.unit.broker.support import Engine, Log, Outcome


def test_a_requested_segment_is_loaded_and_the_following_ones_are_read_ahead(
    make_engine: MakeEngine,
) -> None:
    log = on_disk_only(Log(make_engine(slots=15)), 6)
    outcome = Outcome()
    log.engine.memory.loads.load(log.entry, (1, 2), outcome)
    jobs = log.engine.memory.plan()
    assert loaded(jobs) == [(1, 2), (2, 1)], "not more than the disk has use for"
    assert len(jobs) == LOADS_IN_FLIGHT_MAX
    finish(log.engine, jobs[:1])
    assert outcome.calls == [None]
    assert resident(log) == [(1, 2), (2, 1)]
    finish(log.engine, jobs[1:])
    log.engine.run()

    assert resident(log) == [(1, 2), (2, 1), (2, 2)]
    assert len(resident(log)) == 1 + READ_AHEAD_SEGMENTS


@pytest.mark.parametrize("readers", [0, 1])
def test_segments_are_read_ahead_only_for_readers_that_read_on(make_engine: MakeEngine, readers: int) -> None:
    log = on_disk_only(Log(make_engine(slots=15)), 6)
    outcomes = [Outcome(), Outcome()]
    for reader, outcome in enumerate(outcomes, start=1):
        log.engine.memory.loads.load(log.entry, (1, 2), outcome, ahead=reader <= readers)
    log.engine.run()

    assert [outcome.calls for outcome in outcomes] == [[None]] * 2
    assert resident(log) == [(1, 2), (2, 1), (2, 2)][: 1 + readers * READ_AHEAD_SEGMENTS]


def test_a_segment_is_loaded_once_for_all_its_waiting_readers(log: Log) -> None:
    on_disk_only(log, 1)
    outcomes = [Outcome(), Outcome(), Outcome()]
    for outcome in outcomes[:2]:
        log.engine.memory.loads.load(log.entry, (1, 1), outcome)
    jobs = log.engine.memory.plan()
    log.engine.memory.loads.load(log.entry, (1, 1), outcomes[2])
    assert loaded(jobs) == [(1, 1)]
    assert log.engine.memory.plan() == []
    finish(log.engine, jobs)

    assert [outcome.calls for outcome in outcomes] == [[None]] * 3
    again = Outcome()
    log.engine.memory.loads.load(log.entry, (1, 1), again)
    assert again.calls == [None], "it is there"
    assert log.engine.memory.totals.segments_loaded == 1


def test_loads_of_missing_segments_end_at_once_however_many_they_are(log: Log) -> None:
    memory, waiting = log.engine.memory, Outcome()
    for group in range(100, 2100):
        memory.loads.load(log.entry, (group, 1), waiting)

    assert memory.plan() == []
    assert waiting.calls == [None] * 2000


def test_a_loaded_segment_is_kept_for_its_reader_until_its_time_is_up(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    engine.memory.loads.load(log.entry, (1, 1), Outcome())
    engine.run()
    engine.arena.allocate()
    with pytest.raises(ArenaFull):
        engine.memory.slots.allocate()
    engine.memory.tick(WANTED_MS - 1, idle_close_ms=NEVER_MS)
    with pytest.raises(ArenaFull):
        engine.memory.slots.allocate()
    engine.memory.tick(WANTED_MS, idle_close_ms=NEVER_MS)
    engine.memory.slots.allocate()

    assert resident(log) == []


def test_a_loaded_segment_can_be_evicted_once_it_is_read(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    engine.memory.loads.load(log.entry, (1, 1), Outcome())
    engine.run()
    engine.memory.slots.touched(log.entry.resident[1, 1])
    engine.arena.allocate()
    engine.memory.slots.allocate()

    assert resident(log) == []


def test_reading_ahead_leaves_most_of_the_memory_to_others(engine: Engine) -> None:
    log = on_disk_only(Log(engine), 6)
    assert engine.arena.slot_count // LOADED_SHARE_MAX == 2
    for key in ((1, 1), (2, 1), (3, 1)):
        engine.memory.loads.load(log.entry, key)
    engine.run()

    assert len(resident(log)) == 2
    outcome = Outcome()
    engine.memory.loads.load(log.entry, (3, 2), outcome)
    engine.run()
    assert outcome.calls == [None], "what somebody waits for is loaded nevertheless"


def test_a_load_waits_for_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    slots = engine.fill_memory()
    outcome = Outcome()
    engine.memory.loads.load(log.entry, (1, 1), outcome)
    engine.run()
    assert outcome.calls == []
    slots[0].retire()
    engine.run()

    assert outcome.calls == [None]


@pytest.mark.parametrize("begun", [False, True])
def test_a_waiter_that_gave_up_is_forgotten_and_the_segment_is_loaded_for_others(log: Log, *, begun: bool) -> None:
    engine = on_disk_only(log, 1).engine
    gone, stays = Outcome(), Outcome()
    engine.memory.loads.load(log.entry, (1, 1), gone)
    jobs = engine.memory.plan() if begun else []
    engine.memory.loads.forget(log.entry, (1, 1), gone)
    engine.memory.loads.forget(log.entry, (1, 1), gone)
    engine.memory.loads.forget(log.entry, (9, 9), gone)
    engine.memory.loads.load(log.entry, (1, 1), stays)
    finish(engine, jobs)
    engine.run()

    assert (gone.calls, stays.calls, resident(log)) == ([], [None], [(1, 1)])


def test_a_failed_load_is_an_error_and_is_tried_again_on_the_next_request(log: Log) -> None:
    on_disk_only(log, 1)
    log.engine.disk.read_error = errno.EIO
    failed, again = Outcome(), Outcome()
    log.engine.memory.loads.load(log.entry, (1, 1), failed)
    log.engine.run()
    assert [type(error) for error in failed.calls] == [DiskFailed]
    assert (resident(log), log.engine.arena.free_slots) == ([], 8)
    log.engine.disk.read_error = 0
    log.engine.memory.loads.load(log.entry, (1, 1), again)
    log.engine.run()

    assert again.calls == [None]


# --- the reserve -------------------------------------------------------------------------------------------

RESERVE = 2


@pytest.fixture
def full(make_engine: MakeEngine) -> Log:
    """Four segments on a full disk, and writers that have taken all the memory that they can get."""
    engine = make_engine(reserve_slots=RESERVE)
    log, other = on_disk_only_of(Log(engine), 4), Log(engine)
    engine.disk.write_error = errno.ENOSPC
    with pytest.raises(DiskFull):
        append_without_end(other)
    return log


def append_without_end(log: Log) -> None:
    while True:
        log.append()
        log.engine.run()


def on_disk_only_of(log: Log, segments: int) -> Log:
    log.append_many(SEGMENT * segments)
    log.engine.memory.segments.close_all()
    log.engine.run()
    while log.engine.memory.slots.evict():
        pass
    return log


def test_writers_leave_a_reserve_for_loads_that_readers_may_not_lease(full: Log) -> None:
    memory = full.engine.memory
    assert full.engine.arena.free_slots == RESERVE
    for key in ((1, 1), (1, 2), (2, 1), (2, 2)):
        outcome = Outcome()
        memory.loads.load(full.entry, key, outcome)
        full.engine.run()
        assert outcome.calls == [None], key
        segment = full.entry.resident[key]
        assert not memory.slots.may_lease(segment)
        memory.slots.touched(segment)


@pytest.mark.parametrize("error", [0, errno.ENOSPC])
def test_readers_may_lease_all_but_the_reserve_even_while_the_disk_works(make_engine: MakeEngine, error: int) -> None:
    """When the disk gets full, readers could keep slots of the reserve forever."""
    engine = make_engine(reserve_slots=RESERVE)
    log = Log(engine)
    for _ in range(engine.arena.slot_count - 1):
        log.append_many(SEGMENT)
        engine.memory.segments.close_all()
        engine.run()
    engine.disk.write_error = error
    log.append()
    engine.memory.segments.close_all()
    engine.run()
    stored = [segment for segment in log.segments() if segment.in_index]
    leased = []
    for segment in stored:
        if engine.memory.slots.may_lease(segment):
            segment.slot.lease()
            leased.append(segment)
    assert len(leased) == len(stored) - RESERVE
    assert all(engine.memory.slots.may_lease(segment) for segment in leased), "who holds it already takes nothing more"
    with pytest.raises((ArenaFull, DiskFull)):
        engine.memory.slots.allocate()
    leased[0].slot.release()
    engine.memory.slots.allocate()


def test_leases_leave_the_reserve_to_other_readers_when_the_disk_gets_full(make_engine: MakeEngine) -> None:
    """Readers lease all written and loaded segments that they may, and release none."""
    engine = make_engine(reserve_slots=RESERVE)
    cold, log = on_disk_only_of(Log(engine), 4), Log(engine)

    def append_and_hold_without_end() -> None:
        while True:
            log.append_many(SEGMENT)
            for segment in log.segments():
                if not segment.slot.leases and engine.memory.slots.may_lease(segment):
                    segment.slot.lease()
            engine.run()

    with pytest.raises(ArenaFull):
        append_and_hold_without_end()
    for key, error in (((1, 1), 0), ((1, 2), 0), ((2, 1), errno.ENOSPC), ((2, 2), errno.ENOSPC)):
        engine.disk.write_error = error
        outcome = Outcome()
        engine.memory.loads.load(cold.entry, key, outcome)
        engine.run()
        assert outcome.calls == [None], key
        segment = cold.entry.resident[key]
        if engine.memory.slots.may_lease(segment):
            segment.slot.lease()
        engine.memory.slots.touched(segment)


def test_nothing_is_read_ahead_into_the_reserve(full: Log) -> None:
    full.engine.memory.loads.load(full.entry, (1, 1), Outcome())
    full.engine.run()

    assert resident(full) == [(1, 1)]


def test_an_absent_reader_keeps_others_from_the_reserve_only_briefly(full: Log) -> None:
    memory = full.engine.memory
    for key in ((1, 1), (1, 2)):
        memory.loads.load(full.entry, key, Outcome())
    full.engine.run()
    outcome = Outcome()
    memory.loads.load(full.entry, (2, 1), outcome)
    memory.tick(WANTED_MS_MIN - 1, idle_close_ms=NEVER_MS)
    full.engine.run()
    assert (outcome.calls, resident(full)) == ([], [(1, 1), (1, 2)])
    memory.tick(WANTED_MS_MIN, idle_close_ms=NEVER_MS)
    full.engine.run()

    assert outcome.calls == [None]


def test_a_load_without_room_fails_with_the_reason_and_advice(make_engine: MakeEngine) -> None:
    log = on_disk_only(Log(make_engine()), 1)
    plain = log.engine.memory.loads.not_loaded(log.entry, (1, 1))
    assert "released by its readers" in plain.message
    Log(log.engine).append_many(2 * SEGMENT)
    log.engine.disk.write_error = errno.ENOSPC
    log.engine.run()
    error = log.engine.memory.loads.not_loaded(log.entry, (1, 1))

    assert error.retriable
    assert f"the broker's disk has no room; make room for {log.engine.root}" in error.message
    assert error.attributes["errno"] == errno.ENOSPC


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "has no room; make room for"),
        (errno.EROFS, "mount it writable, and start the broker again"),
        (errno.EIO, "the kernel's log may say why: writing resumes when"),
    ],
)
def test_a_disk_that_fails_writes_is_an_error_with_advice(make_engine: MakeEngine, code: int, advice: str) -> None:
    log = Log(make_engine())
    log.append_many(2 * SEGMENT)
    log.engine.disk.write_error = code
    log.engine.run()

    with pytest.raises(DiskFull, match=advice):
        log.engine.memory.disk.check()
