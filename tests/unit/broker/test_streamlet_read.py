"""Reading from a streamlet: whole chunks, budgets, ends, refused positions, and counting of records.

The streamlets here have two segments of four chunks in a group, so a lane looks like this:

    group 1: segment 1 [0 1 2 3]  segment 2 [4 5 6 7]    group 2: segment 1 [8 9 10 11] …
"""

import pytest

from kera.broker.log import read_plan as reading
from kera.broker.log.bounds import lag_records
from kera.broker.log.entry import EntryListener
from kera.broker.log.read_plan import first_record, ordinal_of, plan_read
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidCursor
from tests.unit.broker.support import CHUNK_BYTES, Engine, Log, position

BEHIND_ALL = Position(1 << 40, 1, 0)


@pytest.fixture
def full(log: Log) -> Log:
    """Eleven chunks, 0 to 10, over two groups."""
    log.append_many(11)
    return log


def refuse(log: Log, start: Position, end: Position | None = None, *, entry: int = 0) -> InvalidCursor:
    with pytest.raises(InvalidCursor) as raised:
        log.read(start, end, entry=entry)
    return raised.value


# --- starts and ends ---------------------------------------------------------------------------------------


def test_an_entry_without_chunks_has_nothing_and_stays_at_the_earliest_position(log: Log) -> None:
    assert log.read() == ([], EARLIEST)
    assert (log.streamlet.entries[0].start, log.streamlet.entries[0].end) == (EARLIEST, EARLIEST)


def test_the_earliest_position_is_the_first_available_chunk(engine: Engine) -> None:
    log = Log(engine)
    log.append_many(2)

    assert log.read(EARLIEST) == ([0, 1], Position(1, 1, 2048))
    assert log.streamlet.entries[0].start == Position(1, 1, 0)


def test_a_read_from_the_earliest_position_reports_a_loss_at_the_start(engine: Engine) -> None:
    log = Log(engine, first_group_id=50)
    log.append_many(2)
    with pytest.raises(DataLost) as raised:
        log.read(EARLIEST)

    assert raised.value.attributes["lost_from"] == [0, 0, 0]
    assert raised.value.attributes["available_from"] == [50, 1, 0]
    assert log.read(Position(50, 1, 0)) == ([0, 1], Position(50, 1, 2048))


def test_a_read_goes_through_segments_and_groups_up_to_the_durable_head(full: Log) -> None:
    assert full.read() == (list(range(11)), Position(2, 1, 3072))
    assert full.streamlet.entries[0].end == Position(2, 1, 3072)


@pytest.mark.parametrize("first", range(11))
def test_a_read_can_start_at_every_chunk(engine: Engine, first: int) -> None:
    log = Log(engine)
    appended = log.append_many(11)

    assert log.read(position(appended[first]))[0] == list(range(first, 11))


@pytest.mark.parametrize("start", [Position(1, 1, 4096), Position(1, 2, 0)])
def test_the_end_of_a_segment_and_the_start_of_the_next_are_the_same_place(full: Log, start: Position) -> None:
    assert full.read(start, bytes_max=1024) == ([4], Position(1, 2, 1024))


def test_a_read_at_the_durable_head_is_empty_until_more_is_published(log: Log) -> None:
    log.append()
    _, here = log.read()
    unpublished = log.append(publish=False)
    assert log.read(here) == ([], here)

    log.streamlet.publish(unpublished)

    assert log.read(here) == ([1], Position(1, 1, 2048))


def test_unpublished_chunks_are_not_read_even_in_a_closed_segment(log: Log) -> None:
    log.append_many(3)
    last = [log.append(publish=False) for _ in range(3)]
    assert log.read() == ([0, 1, 2], Position(1, 1, 3072))
    assert log.streamlet.entries[0].end == Position(1, 1, 3072)

    log.streamlet.publish(last[0])

    # Nothing of the next segment may be seen yet, so a reader is not sent there: it may be lost.
    assert log.read() == ([0, 1, 2, 3], Position(1, 1, 4096))

    log.streamlet.publish(last[1])

    assert log.read() == ([0, 1, 2, 3, 4], Position(1, 2, 1024))


@pytest.mark.parametrize("last", range(12))
def test_a_read_stops_exactly_at_its_end(full: Log, last: int) -> None:
    at = ([Position(1, 1, 1024 * n) for n in range(4)] + [Position(1, 2, 1024 * n) for n in range(4)]
          + [Position(2, 1, 1024 * n) for n in range(4)])  # fmt: skip

    assert full.read(EARLIEST, at[last]) == (list(range(last)), max(at[last], Position(1, 1, 0)))


@pytest.mark.parametrize("end", [Position(1, 1, 4096), Position(1, 2, 0)])
def test_an_end_at_the_end_of_a_segment_is_exact_as_well(full: Log, end: Position) -> None:
    assert full.read(EARLIEST, end) == ([0, 1, 2, 3], end)


@pytest.mark.parametrize("end", [Position(2, 1, 4096), Position(2, 2, 0), BEHIND_ALL])
def test_an_end_behind_the_durable_head_stops_at_the_durable_head(full: Log, end: Position) -> None:
    assert full.read(EARLIEST, end) == (list(range(11)), Position(2, 1, 3072))


def test_an_end_at_a_group_that_has_not_begun_is_reached_when_the_last_group_is_closed(
    full: Log, engine: Engine
) -> None:
    """An interval began there that has no chunks left: a reader with that end must not wait for ever."""
    begins, later = Position(3, 1, 0), Position(4, 1, 0)
    assert full.read(EARLIEST, begins) == (list(range(11)), Position(2, 1, 3072))
    engine.memory.segments.close_all()
    assert full.read(EARLIEST, begins) == (list(range(11)), begins)
    assert full.read(EARLIEST, later) == (list(range(11)), Position(2, 1, 3072))


def test_an_empty_entry_reaches_an_end_at_the_next_group_id_and_none_beyond(engine: Engine) -> None:
    log = Log(engine, entries=2)
    log.append_many(9, 0)
    assert log.streamlet.next_group_id == 3

    assert log.read(EARLIEST, Position(3, 1, 0), entry=1) == ([], Position(3, 1, 0))
    assert log.read(EARLIEST, Position(4, 1, 0), entry=1) == ([], EARLIEST), "group 3 may be its own"
    assert log.read(EARLIEST, entry=1) == ([], EARLIEST)


@pytest.mark.parametrize("end", [EARLIEST, Position(1, 1, 0), Position(1, 1, 1024), Position(1, 1, 2048)])
@pytest.mark.parametrize(
    "start",
    [Position(1, 1, 2048), Position(1, 1, 4096), Position(1, 2, 0), Position(1, 2, 4096), Position(2, 1, 3072)],
)
def test_a_read_that_starts_at_its_end_or_behind_it_gives_nothing_and_skips_nothing(
    full: Log, start: Position, end: Position
) -> None:
    assert full.read(start, end) == ([], start)


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_read_from_the_end_of_another_one_misses_no_chunk(full: Log, stop: int) -> None:
    end = Position(1, 1 + stop // 4, 1024 * (stop % 4))
    before, here = full.read(EARLIEST, end)
    after, _ = full.read(here)

    assert before + after == list(range(11))


# --- budgets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bytes_max", "expected"),
    [(2 * CHUNK_BYTES, 2), (3 * CHUNK_BYTES - 1, 2), (4 * CHUNK_BYTES, 4), (5 * CHUNK_BYTES + 1, 5), (1 << 20, 11)],
)
def test_a_read_takes_as_many_whole_chunks_as_its_budget_allows(full: Log, bytes_max: int, expected: int) -> None:
    assert full.read(bytes_max=bytes_max)[0] == list(range(expected))


def test_a_chunk_larger_than_the_budget_is_given_alone(log: Log) -> None:
    log.append(size=3072)
    log.append(size=512)
    log.append(size=2048)

    assert log.read(bytes_max=1) == ([0], Position(1, 1, 3072))
    assert log.read(Position(1, 1, 3072), bytes_max=800) == ([1], Position(1, 2, 0))
    assert log.read(Position(1, 1, 3584), bytes_max=800) == ([2], Position(1, 2, 2048))


def test_a_chunk_larger_than_the_rest_of_the_budget_waits_for_the_next_read(log: Log) -> None:
    log.append(size=512)
    log.append(size=2048)

    assert log.read(bytes_max=2400) == ([0], Position(1, 1, 512))


@pytest.mark.parametrize("bytes_max", [1, CHUNK_BYTES, 3 * CHUNK_BYTES, 1 << 20])
@pytest.mark.parametrize("strict", [False, True])
def test_a_read_in_the_open_segment_has_the_same_plan_as_any_other(full: Log, bytes_max: int, strict: bool) -> None:
    streamlet = full.streamlet
    entry = streamlet.entries[0]

    for offset in range(0, 3 * CHUNK_BYTES + 1, CHUNK_BYTES):
        start = Position(2, 1, offset)  # in the open segment
        expected = reading._plan(streamlet, entry, start, None, bytes_max, strict=strict)

        assert plan_read(streamlet, 0, start, None, bytes_max, strict=strict) == expected


def test_a_strict_read_gives_nothing_when_the_next_chunk_is_over_its_budget(full: Log) -> None:
    assert full.read(bytes_max=1023, strict=True) == ([], Position(1, 1, 0))
    assert full.read(bytes_max=1024, strict=True) == ([0], Position(1, 1, 1024))


@pytest.mark.parametrize("bytes_max", [1, 1024, 1200, 2048, 4000, 4096, 5200])
def test_small_reads_one_after_the_other_give_every_chunk_once(full: Log, bytes_max: int) -> None:
    found: list[int] = []
    here = EARLIEST
    while len(found) < 11:
        sequences, here = full.read(here, bytes_max=bytes_max)
        assert sequences
        found += sequences

    assert found == list(range(11))
    assert full.read(here) == ([], Position(2, 1, 3072))


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [
        Position(1, 1, 1),  # inside a header
        Position(1, 1, 512),  # inside a chunk, though aligned
        Position(1, 1, 4097),
        Position(2, 1, 4096),  # behind the head
        Position(1, 3, 0),  # no such segment
        Position(2, 2, 0),  # not opened yet
        Position(4, 1, 0),  # no such group, and not the next one
    ],
)
def test_a_position_that_is_not_a_boundary_is_refused_and_named(full: Log, start: Position) -> None:
    error = refuse(full, start)

    assert error.attributes["position"] == list(start)
    assert error.attributes["streamlet_id"] == 0


def test_a_position_between_the_durable_head_and_the_head_is_refused(log: Log) -> None:
    log.append_many(2)
    log.append(publish=False)

    assert log.read(Position(1, 1, 2048)) == ([], Position(1, 1, 2048))
    refuse(log, Position(1, 1, 3072))


@pytest.mark.parametrize("end", [Position(1, 1, 1), Position(1, 1, 1200), Position(1, 2, 400), Position(2, 1, 2800)])
def test_an_end_inside_a_chunk_is_refused_and_not_passed(full: Log, end: Position) -> None:
    assert refuse(full, EARLIEST, end).attributes["position"] == list(end)


def test_the_start_of_another_entrys_group_stands_for_the_next_chunk_of_the_entry(engine: Engine) -> None:
    """A reader is sent to the first group of an interval, and that may belong to another entry."""
    log = Log(engine, entries=2, group_segments=1)
    log.append(2)
    log.append(1)
    log.append_many(4, 2)

    assert log.read(Position(1, 1, 0), entry=0)[0] == [0, 1, 2, 3, 4]
    assert log.read(Position(2, 1, 0), entry=0)[0] == [4]
    assert log.read(Position(4, 1, 0), entry=0) == ([], Position(4, 1, 0))
    assert refuse(log, Position(2, 1, 1024), entry=0).attributes["entry"] == 0
    assert refuse(log, Position(5, 1, 0), entry=0).attributes["entry"] == 0
    assert log.read(Position(1, 1, 0), entry=1)[0] == [0]  # the entry starts later, and has lost nothing
    log.streamlet.entries[1].start_record = 1
    with pytest.raises(DataLost) as raised:
        log.read(Position(1, 1, 0), entry=1)  # now it has lost something
    assert (raised.value.attributes["entry"], raised.value.attributes["available_from"]) == (1, [2, 1, 0])


@pytest.mark.parametrize("entry", [-1, 2])
def test_an_entry_that_does_not_exist_is_refused(engine: Engine, entry: int) -> None:
    assert refuse(Log(engine, entries=2), EARLIEST, entry=entry).attributes == {"entry": entry}


# --- losses ------------------------------------------------------------------------------------------------


def test_a_read_from_a_position_of_an_earlier_launch_reports_the_exact_loss(engine: Engine) -> None:
    log = Log(engine, first_group_id=10)
    log.append()
    with pytest.raises(DataLost) as raised:
        log.read(Position(9, 2, 2048))

    assert raised.value.attributes == {
        "streamlet_id": 0,
        "entry": 0,
        "lost_from": [9, 2, 2048],
        "available_from": [10, 1, 0],
        "reason": "it was lost with the memory of the broker's host",
        "available_record": 0,
    }
    assert not raised.value.retriable


def test_a_loss_is_reported_before_there_is_any_new_chunk(engine: Engine) -> None:
    log = Log(engine, first_group_id=10)
    with pytest.raises(DataLost) as raised:
        log.read(Position(1, 1, 0))

    assert raised.value.attributes["available_from"] == [10, 1, 0]


def test_an_entry_can_be_read_from_the_place_where_a_loss_ends(engine: Engine) -> None:
    log = Log(engine, entries=2, first_group_id=10)
    log.append(2)
    log.append(1)
    with pytest.raises(DataLost) as raised:
        log.read(Position(9, 1, 0), entry=1)
    available = Position(*raised.value.attributes["available_from"])

    assert available == (10, 1, 0), "group 10 is of entry 0, and what comes behind it is of entry 1"
    assert log.read(available, entry=1) == ([0], Position(11, 1, 1024))


# --- counting ----------------------------------------------------------------------------------------------


def lag(log: Log, at: Position) -> int:
    return lag_records(log.streamlet, log.entry, at)


def end_record(log: Log) -> int:
    return ordinal_of(log.entry, log.entry.end)


def test_the_lag_counts_records_between_a_position_and_the_durable_head(log: Log) -> None:
    appended = log.append_many(11, record_count=10)

    assert [lag(log, position(chunk)) for chunk in appended] == list(range(110, 0, -10))
    assert lag(log, EARLIEST) == 110
    assert lag(log, Position(1, 1, 4096)) == lag(log, Position(1, 2, 0)) == 70
    assert lag(log, Position(1, 2, 4096)) == lag(log, Position(2, 1, 0)) == 30
    assert lag(log, log.read()[1]) == lag(log, BEHIND_ALL) == 0


def test_unpublished_records_are_not_counted(log: Log) -> None:
    log.append_many(4, record_count=10)
    unpublished = log.append(record_count=10, publish=False)
    assert lag(log, EARLIEST) == 40
    assert end_record(log) == 40

    log.streamlet.publish(unpublished)

    assert lag(log, EARLIEST) == 50
    assert end_record(log) == 50


def test_an_entry_without_records_counts_none(log: Log) -> None:
    assert (
        first_record(log.entry),
        end_record(log),
        lag(log, EARLIEST),
    ) == (0, 0, 0)


def test_an_entry_whose_first_chunk_is_not_published_has_no_records_yet(log: Log) -> None:
    log.append(record_count=5, publish=False)

    assert (
        first_record(log.entry),
        end_record(log),
        lag(log, EARLIEST),
    ) == (0, 0, 0)
    assert log.entry.end == Position(1, 1, 0)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 9])
def test_the_ordinals_of_an_entry_span_its_records(log: Log, count: int) -> None:
    log.append_many(count, record_count=3)

    assert (first_record(log.entry), end_record(log)) == (0, 3 * count)


# --- waiting -----------------------------------------------------------------------------------------------


class Sleeper(EntryListener):
    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


def test_a_reader_is_woken_when_the_durable_head_of_its_entry_moves(engine: Engine) -> None:
    log = Log(engine, entries=2)
    sleeper = Sleeper()
    log.streamlet.entries[1].waiters.add(sleeper)
    log.append(2)
    unpublished = log.append(1, publish=False)
    assert sleeper.woken == 0, "another entry, and what cannot be read yet"

    log.streamlet.publish(unpublished)

    assert sleeper.woken == 1


def test_publishing_a_chunk_does_not_publish_those_behind_it(log: Log) -> None:
    first, _ = log.append(publish=False), log.append(publish=False)
    log.streamlet.publish(first)

    assert log.read()[0] == [0]


def test_publishing_an_earlier_chunk_does_not_move_the_durable_head_back(log: Log) -> None:
    first, second = log.append(), log.append()
    log.streamlet.publish(first)

    assert log.read()[1].offset == second.position + CHUNK_BYTES


def test_dropping_frees_all_slots_and_wakes_all_readers(engine: Engine) -> None:
    log = Log(engine, entries=2)
    sleepers = [Sleeper(), Sleeper()]
    for entry, sleeper in zip(log.streamlet.entries, sleepers, strict=True):
        entry.waiters.add(sleeper)
    log.append_many(5, 1, publish=False)
    log.append_many(5, 2, publish=False)
    assert engine.arena.free_slots == 4
    log.streamlet.drop()

    assert engine.arena.free_slots == 8
    assert [sleeper.woken for sleeper in sleepers] == [1, 1]
