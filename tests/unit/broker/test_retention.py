"""Retention: which segments are removed by age, size and consumption, and what holds them back."""

import pytest

from kera.broker.log.entry import Entry
from kera.broker.log.read_plan import plan_read
from kera.broker.log.retention import SEGMENTS_MAX, Rules, new_starts
from kera.core.base.ids import Position
from kera.v1 import common_pb2
from tests.unit.broker.support import CHUNK_BYTES, SLOT_BYTES, Engine, Log

SEGMENT = 4
HOUR_US = 3_600_000_000


def apply(log: Log, now_us: int = 0, *, segments_max: int = SEGMENTS_MAX, **rules: object) -> list[Position]:
    """Move the starts as the engine does; return where the first chunk of each entry is."""
    for entry, position, record in new_starts(log.streamlet, Rules(**rules), now_us, segments_max):  # type: ignore[arg-type]
        entry.start, entry.start_record = position, record
        log.engine.memory.removals.collect(entry)
    log.engine.run()
    return [_first(entry) for entry in log.streamlet.entries]


def _first(entry: Entry) -> Position:
    following = entry.following((entry.start.group_id, entry.start.segment_id))
    gone = entry.find((entry.start.group_id, entry.start.segment_id)) is None
    return Position(*following[0], 0) if gone and following is not None else entry.start


@pytest.fixture(params=["memory", "disk"])
def aged(request: pytest.FixtureRequest, engine: Engine) -> Log:
    """Segments (1, 1), (1, 2), (2, 1) with chunks of the hours 1, 2 and 3, and an open one of hour 4."""
    log = Log(engine)
    for hour in (1, 2, 3):
        engine.memory.now_us = hour * HOUR_US
        log.append_many(SEGMENT, record_count=10)
    engine.memory.now_us = 4 * HOUR_US
    log.append()
    if request.param == "disk":
        engine.run()
    return log


# --- passes ------------------------------------------------------------------------------------------------


def test_segments_with_a_pending_removal_do_not_count_again(aged: Log) -> None:
    """Passes may come faster than the disk removes files."""
    rules = Rules(bytes_max=aged.streamlet.length_bytes - 2 * SEGMENT * CHUNK_BYTES)
    for _ in range(3):
        for entry, position, record in new_starts(aged.streamlet, rules, 0):
            entry.move_start(position, record)
            aged.engine.memory.removals.collect(entry)
    (start,) = {entry.start for entry in aged.streamlet.entries.made}
    assert start == Position(1, 2, SEGMENT * CHUNK_BYTES)

    aged.engine.run()

    assert aged.streamlet.length_bytes == rules.bytes_max
    assert new_starts(aged.streamlet, rules, 0) == []


# --- rules -------------------------------------------------------------------------------------------------


def test_rules_are_those_of_the_configuration() -> None:
    config = common_pb2.StreamConfig(
        retention_ms=5, retention_bytes=7, retention_consumer_groups=["a", "b"], retention_consumed=True
    )

    assert Rules.of(config) == Rules(5000, 7, ("a", "b"), consumed=True)
    assert not Rules.of(common_pb2.StreamConfig())


@pytest.mark.parametrize("rules", [Rules(), Rules(consumer_groups=("a",)), Rules(consumed=True)])
def test_rules_without_a_limit_remove_nothing(aged: Log, rules: Rules) -> None:
    assert not rules
    assert new_starts(aged.streamlet, rules, 1 << 60) == []


def test_a_reader_at_the_end_of_a_removed_segment_misses_nothing(aged: Log) -> None:
    at_its_end = Position(1, 2, SLOT_BYTES)

    assert apply(aged, int(4.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(2, 1, 0)]

    plan = plan_read(aged.streamlet, 0, at_its_end, None, 1)
    found = plan.missing or plan.ranges[0].segment.key
    assert found == (2, 1)


# --- age ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made_us", [0, 1000 * HOUR_US])
@pytest.mark.parametrize("disk", [False, True])
def test_age_counts_from_the_append_whatever_time_the_producer_gives(engine: Engine, made_us: int, disk: bool) -> None:
    log = Log(engine)
    for hour in (1, 2, 3):
        engine.memory.now_us = hour * HOUR_US
        log.append_many(SEGMENT, created_us=made_us)
    log.append()
    if disk:
        engine.run()

    assert apply(log, int(3.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(1, 2, 0)]
    assert apply(log, int(4.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(2, 1, 0)]


@pytest.mark.parametrize("disk", [False, True])
def test_segments_from_the_future_are_removed_when_later_ones_are_old_enough(engine: Engine, disk: bool) -> None:
    """Such times come from an index with times of producers, or from a clock that was wrong for long."""
    log = Log(engine)
    for hour in (1000, 2, 900, 3):
        engine.memory.now_us = hour * HOUR_US
        log.append_many(SEGMENT)
    log.append()
    if disk:
        engine.run()

    assert apply(log, int(3.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(1, 1, 0)]
    assert apply(log, int(4.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(2, 1, 0)]
    assert apply(log, int(5.5 * HOUR_US), age_us=2 * HOUR_US) == [Position(3, 1, 0)]


def test_a_last_segment_from_the_future_is_removed_by_size_but_not_by_age(engine: Engine) -> None:
    log = Log(engine)
    engine.memory.now_us = 1000 * HOUR_US
    log.append_many(SEGMENT + 1)

    assert new_starts(log.streamlet, Rules(age_us=HOUR_US), 900 * HOUR_US) == []
    assert len(new_starts(log.streamlet, Rules(age_us=HOUR_US, bytes_max=1), 900 * HOUR_US)) == 1


@pytest.mark.parametrize(
    ("now_hours", "start", "record"),
    [
        (2, Position(1, 1, 0), 0),
        (3, Position(1, 1, 0), 0),
        (3.5, Position(1, 2, 0), 40),
        (4.5, Position(2, 1, 0), 80),
        (5.5, Position(2, 2, 0), 120),
        (99, Position(2, 2, 0), 120),
    ],
)
def test_closed_segments_are_removed_when_their_newest_chunk_is_too_old(
    aged: Log, now_hours: float, start: Position, record: int
) -> None:
    assert apply(aged, int(now_hours * HOUR_US), age_us=2 * HOUR_US) == [start]
    assert aged.entry.start_record == record
    assert aged.read_all()[0] == {0: 0, 40: 4, 80: 8, 120: 12}[record]


def test_one_new_chunk_keeps_its_segment(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(SEGMENT - 1)
    engine.memory.now_us = 10 * HOUR_US
    log.append_many(2)

    assert apply(log, 11 * HOUR_US, age_us=2 * HOUR_US) == [Position(1, 1, 0)]


def test_an_old_segment_behind_a_new_one_waits_for_it(engine: Engine) -> None:
    """Clocks are set back. Retention always removes the oldest part of the log."""
    log = Log(engine)
    for hour in (9, 1, 1):
        engine.memory.now_us = hour * HOUR_US
        log.append_many(SEGMENT)
    log.append()

    assert apply(log, 10 * HOUR_US, age_us=2 * HOUR_US) == [Position(1, 1, 0)]


def test_an_entry_may_lose_all_its_segments(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(SEGMENT, created_us=1)
    log.engine.memory.segments.close_all()
    end = log.entry.end

    assert apply(log, HOUR_US, age_us=1000) == [end]
    assert log.read() == ([], end)
    assert log.append().first_record == SEGMENT
    assert log.read(end)[0] == [SEGMENT]


# --- size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_max", "start"),
    [
        (1 << 40, Position(1, 1, 0)),
        (3 * SLOT_BYTES + CHUNK_BYTES, Position(1, 1, 0)),
        (3 * SLOT_BYTES, Position(1, 1, 0)),  # less than the limit would be left
        (2 * SLOT_BYTES + CHUNK_BYTES, Position(1, 2, 0)),
        (2 * SLOT_BYTES, Position(1, 2, 0)),
        (1, Position(2, 2, 0)),
    ],
)
def test_the_oldest_segments_are_removed_while_at_least_the_limit_is_left(
    aged: Log, bytes_max: int, start: Position
) -> None:
    assert apply(aged, bytes_max=bytes_max) == [start]
    assert apply(aged, bytes_max=bytes_max) == [start], "and then it is enough"


def test_the_size_limit_of_a_streamlet_removes_the_oldest_segment_of_any_entry(engine: Engine) -> None:
    log = Log(engine, entries=2)
    for hour, producer in ((1, 1), (2, 2), (3, 2), (4, 1)):
        engine.memory.now_us = hour * HOUR_US
        log.append_many(SEGMENT, producer)
    engine.memory.segments.close_all()

    assert apply(log, bytes_max=3 * SLOT_BYTES) == [Position(2, 1, 0), Position(1, 2, 0)]
    assert apply(log, bytes_max=2 * SLOT_BYTES) == [Position(2, 2, 0), Position(1, 2, 0)]
    assert apply(log, bytes_max=1 * SLOT_BYTES) == [Position(2, 2, SLOT_BYTES), Position(1, 2, 0)]


# --- consumption -------------------------------------------------------------------------------------------


def commit(log: Log, consumer_group: str, position: Position) -> None:
    log.entry.committed[consumer_group] = position


@pytest.mark.parametrize(
    ("first", "second", "start"),
    [
        (None, None, Position(1, 1, 0)),
        (Position(2, 2, 0), None, Position(1, 1, 0)),
        (Position(2, 2, 0), Position(1, 1, SLOT_BYTES - CHUNK_BYTES), Position(1, 1, 0)),
        (Position(2, 2, 0), Position(1, 1, SLOT_BYTES), Position(1, 2, 0)),
        (Position(1, 2, 0), Position(2, 1, 0), Position(1, 2, 0)),
        (Position(2, 2, CHUNK_BYTES), Position(2, 2, CHUNK_BYTES), Position(2, 2, 0)),
    ],
)
def test_segments_that_all_consumer_groups_have_read_are_removed(
    aged: Log, first: Position | None, second: Position | None, start: Position
) -> None:
    for consumer_group, position in (("a", first), ("b", second)):
        if position is not None:
            commit(aged, consumer_group, position)

    assert apply(aged, consumer_groups=("a", "b"), consumed=True) == [start]


@pytest.mark.parametrize("rules", [{"age_us": 1}, {"bytes_max": 1}, {"age_us": 1, "bytes_max": 1, "consumed": True}])
def test_consumer_groups_hold_back_all_rules(aged: Log, rules: dict[str, int]) -> None:
    assert apply(aged, 99 * HOUR_US, consumer_groups=("a",), **rules) == [Position(1, 1, 0)]
    commit(aged, "a", Position(2, 1, CHUNK_BYTES))

    assert apply(aged, 99 * HOUR_US, consumer_groups=("a",), **rules) == [Position(2, 1, 0)]


def test_consumer_groups_that_are_not_named_hold_back_nothing(aged: Log) -> None:
    commit(aged, "other", Position(1, 1, 0))

    assert apply(aged, 99 * HOUR_US, age_us=1) == [Position(2, 2, 0)]


# --- what stays --------------------------------------------------------------------------------------------


def everything(log: Log) -> list[Position]:
    return apply(log, 1 << 60, age_us=1, bytes_max=1)


def test_segments_that_are_not_readable_yet_stay(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(2 * SEGMENT + 1, publish=False)

    assert everything(log) == [Position(1, 1, 0)]


def test_an_open_segment_stays_whatever_its_age(log: Log) -> None:
    log.append_many(SEGMENT - 1)

    assert everything(log) == [Position(1, 1, 0)]


def test_only_the_remaining_part_of_a_truncated_segment_counts(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(2 * SEGMENT + 1)
    engine.run()
    log.entry.start, log.entry.start_record = Position(1, 1, 3 * CHUNK_BYTES), 3

    assert apply(log, bytes_max=SLOT_BYTES + 2 * CHUNK_BYTES) == [Position(1, 1, 3 * CHUNK_BYTES)]


def test_a_pass_is_bounded_and_the_next_one_goes_on(aged: Log) -> None:
    starts = [apply(aged, 1 << 60, segments_max=2, age_us=1, bytes_max=1)[0] for _ in range(2)]

    assert starts == [Position(2, 1, 0), Position(2, 2, 0)]
