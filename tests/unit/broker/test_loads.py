"""What the persistence manager brings back from disk, for whom, and what it does not bring back."""

import errno

import pytest

from kera.broker import loads
from kera.broker.loads import LOADS_IN_FLIGHT_MAX, READ_AHEAD_SEGMENTS, WANTED_MS
from kera.core.errors import ArenaFull, DiskFailed
from tests.unit.broker.persistence_support import (
    NEVER_MS,
    MakeEngine,
    finish,
    loaded,
    on_disk_only,
    resident,
)
from tests.unit.broker.support import Engine, Log, Outcome


def test_a_segment_that_a_reader_waits_for_is_loaded_and_the_following_ones_ahead_of_it(
    make_engine: MakeEngine,
) -> None:
    log = on_disk_only(Log(make_engine(slots=15)), 6)
    outcome = Outcome()
    log.engine.memory.load(log.entry, (1, 2), outcome)
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
def test_nothing_is_read_ahead_for_who_will_not_read_on(make_engine: MakeEngine, readers: int) -> None:
    log = on_disk_only(Log(make_engine(slots=15)), 6)
    outcomes = [Outcome(), Outcome()]
    for reader, outcome in enumerate(outcomes, start=1):
        log.engine.memory.load(log.entry, (1, 2), outcome, ahead=reader <= readers)
    log.engine.run()

    assert [outcome.calls for outcome in outcomes] == [[None]] * 2
    assert resident(log) == [(1, 2), (2, 1), (2, 2)][: 1 + readers * READ_AHEAD_SEGMENTS]


def test_a_segment_is_loaded_once_however_many_wait_for_it(log: Log) -> None:
    on_disk_only(log, 1)
    outcomes = [Outcome(), Outcome(), Outcome()]
    for outcome in outcomes[:2]:
        log.engine.memory.load(log.entry, (1, 1), outcome)
    jobs = log.engine.memory.plan()
    log.engine.memory.load(log.entry, (1, 1), outcomes[2])
    assert loaded(jobs) == [(1, 1)]
    assert log.engine.memory.plan() == []
    finish(log.engine, jobs)

    assert [outcome.calls for outcome in outcomes] == [[None]] * 3
    again = Outcome()
    log.engine.memory.load(log.entry, (1, 1), again)
    assert again.calls == [None], "it is there"
    assert log.engine.memory.totals.segments_loaded == 1


def test_what_is_gone_is_not_waited_for(log: Log) -> None:
    outcome = Outcome()
    log.engine.memory.load(log.entry, (9, 9), outcome)

    assert (log.engine.memory.plan(), outcome.calls) == ([], [None])


def test_what_was_loaded_for_a_reader_is_kept_until_he_has_come_or_his_time_is_up(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    engine.memory.load(log.entry, (1, 1), Outcome())
    engine.run()
    engine.arena.allocate()
    with pytest.raises(ArenaFull):
        engine.memory.allocate()
    engine.memory.tick(WANTED_MS - 1, idle_close_ms=NEVER_MS)
    with pytest.raises(ArenaFull):
        engine.memory.allocate()
    engine.memory.tick(WANTED_MS, idle_close_ms=NEVER_MS)
    engine.memory.allocate()

    assert resident(log) == []


def test_what_was_loaded_and_read_can_be_evicted(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    engine.memory.load(log.entry, (1, 1), Outcome())
    engine.run()
    engine.memory.touched(log.entry.resident[1, 1])
    engine.arena.allocate()
    engine.memory.allocate()

    assert resident(log) == []


def test_reading_ahead_leaves_most_of_the_memory_to_others(engine: Engine) -> None:
    log = on_disk_only(Log(engine), 6)
    assert engine.arena.slot_count // loads.LOADED_SHARE_MAX == 2
    for key in ((1, 1), (2, 1), (3, 1)):
        engine.memory.load(log.entry, key)
    engine.run()

    assert len(resident(log)) == 2
    outcome = Outcome()
    engine.memory.load(log.entry, (3, 2), outcome)
    engine.run()
    assert outcome.calls == [None], "what somebody waits for is loaded nevertheless"


def test_a_load_waits_for_memory(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2)
    log = on_disk_only(Log(engine), 1)
    slots = engine.fill_memory()
    outcome = Outcome()
    engine.memory.load(log.entry, (1, 1), outcome)
    engine.run()
    assert outcome.calls == []
    slots[0].retire()
    engine.run()

    assert outcome.calls == [None]


def test_a_disk_that_cannot_be_read_is_told_and_tried_again_when_somebody_asks(log: Log) -> None:
    on_disk_only(log, 1)
    log.engine.disk.read_error = errno.EIO
    failed, again = Outcome(), Outcome()
    log.engine.memory.load(log.entry, (1, 1), failed)
    log.engine.run()
    assert [type(error) for error in failed.calls] == [DiskFailed]
    assert (resident(log), log.engine.arena.free_slots) == ([], 8)
    log.engine.disk.read_error = 0
    log.engine.memory.load(log.entry, (1, 1), again)
    log.engine.run()

    assert again.calls == [None]


def test_however_many_segments_are_wanted_that_are_gone_nobody_waits_for_them(log: Log) -> None:
    memory, waiting = log.engine.memory, Outcome()
    for group in range(100, 2100):
        memory.load(log.entry, (group, 1), waiting)

    assert memory.plan() == []
    assert waiting.calls == [None] * 2000
