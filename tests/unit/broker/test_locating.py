"""Locating places in an entry by records, bytes or time, and listing the segments of a range.

The streamlets here have two segments of four chunks in a group, so a lane looks like this:

    group 1: segment 1 [0 1 2 3]  segment 2 [4 5 6 7]    group 2: segment 1 [8 9 10] …

Each chunk has ten records; the times of chunk n are 100 + n.
"""

from typing import Any

import pytest

from kera.broker.log.intervals import Holding, Interval
from kera.broker.log.locate import Bounds, FoundPlace, Listing, Progress, Query, list_segments, locate
from kera.broker.records import Gap, Key
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidCursor, NotOwner
from tests.unit.broker.persistence_support import on_disk_only
from tests.unit.broker.support import CHUNK_BYTES, Log, Outcome

SEGMENTS_MAX = 100


def fill(log: Log, count: int, **fields: Any) -> None:
    done = log.sequences[1]
    for number in range(done, done + count):
        times = {"min_timestamp_us": 100 + number, "max_timestamp_us": 100 + number}
        log.append(record_count=10, **{**times, **fields})


@pytest.fixture
def full(log: Log) -> Log:
    """Eleven chunks, 0 to 10, over two groups."""
    fill(log, 11)
    return log


@pytest.fixture
def stored(log: Log) -> Log:
    """Twelve chunks in three segments, on disk only."""
    fill(log, 12)
    return on_disk_only(log, 0)


def find(log: Log, start: Position = EARLIEST, *, segments_max: int = SEGMENTS_MAX, **query: Any) -> FoundPlace:
    """The place, found without loading a segment."""
    step = locate(log.streamlet, 0, Query(**query), Progress(start), segments_max)
    assert step.missing is None
    assert step.place is not None
    return step.place


def find_loading(log: Log, start: Position = EARLIEST, **query: Any) -> tuple[FoundPlace, list[Key]]:
    """The place, and the segments that had to be loaded for it."""
    loaded: list[Key] = []
    step = locate(log.streamlet, 0, Query(**query), Progress(start), SEGMENTS_MAX)
    while step.missing is not None:
        assert step.missing not in loaded, "it was there, and did not help"
        loaded.append(step.missing)
        log.engine.memory.loads.load(log.entry, step.missing, Outcome(), ahead=False)
        log.engine.run()
        step = locate(log.streamlet, 0, Query(**query), step.progress, SEGMENTS_MAX)
    assert step.place is not None
    return step.place, loaded


def listed(log: Log, start: Position = EARLIEST, end: Position | None = None, **options: Any) -> Listing:
    return list_segments(log.streamlet, 0, start, end, **{"segments_max": SEGMENTS_MAX} | options)


# --- records and bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records_max", "chunks"),
    [
        (0, 1),
        (1, 1),
        (10, 1),
        (19, 1),
        (20, 2),
        (40, 4),
        (45, 4),
        (79, 7),
        (80, 8),
        (109, 10),
        (110, 11),
        (1 << 40, 11),
    ],
)
def test_a_limit_of_records_gives_the_whole_chunks_within_it_and_at_least_one(
    full: Log, records_max: int, chunks: int
) -> None:
    group, rest = divmod(chunks, 8)
    segment, number = divmod(rest, 4)
    place = find(full, records_max=records_max)

    assert place == FoundPlace(
        Position(group + 1, segment + 1, number * CHUNK_BYTES), 10 * chunks, chunks * CHUNK_BYTES
    )


@pytest.mark.parametrize(
    ("bytes_max", "chunks"), [(0, 1), (1023, 1), (1024, 1), (2047, 1), (2048, 2), (4096, 4), (5000, 4), (1 << 40, 11)]
)
def test_a_limit_of_bytes_gives_the_whole_chunks_within_it_and_at_least_one(
    full: Log, bytes_max: int, chunks: int
) -> None:
    place = find(full, bytes_max=bytes_max)

    assert (place.record, place.bytes) == (10 * chunks, chunks * CHUNK_BYTES)
    assert find(full, place.position, bytes_max=0).bytes == (CHUNK_BYTES if chunks < 11 else 0)


def test_counting_begins_at_the_start_and_stops_at_the_end(full: Log) -> None:
    start, end = Position(1, 1, 2048), Position(1, 2, 2048)

    assert find(full, start, records_max=30) == FoundPlace(Position(1, 2, 1024), 50, 3072)
    assert find(full, start, end=end, records_max=70) == FoundPlace(end, 60, 4096)
    assert find(full, start, end=end, bytes_max=9999) == FoundPlace(end, 60, 4096)
    assert find(full, end, end=start, records_max=70) == FoundPlace(end, 60, 0), "an end before the start"
    assert find(full, Position(1, 1, 4096), records_max=10) == FoundPlace(Position(1, 2, 1024), 50, 1024)
    assert find(full, start, end=Position(1, 1, 4096), records_max=70).position == Position(1, 1, 4096)


def test_chunks_that_are_not_durable_do_not_count(full: Log) -> None:
    fill(full, 1, publish=False)
    fill(full, 5, publish=False)

    assert find(full, records_max=1000) == FoundPlace(Position(2, 1, 3072), 110, 11 * CHUNK_BYTES)
    assert find(full, timestamp_us=111) == FoundPlace(Position(2, 1, 3072), 110, 11 * CHUNK_BYTES)
    assert listed(full).segments[-1] == Bounds(Position(2, 1, 0), Position(2, 1, 3072), 80, 110, resident=True)


def test_an_entry_without_chunks_has_only_its_start_and_no_segments(log: Log) -> None:
    assert find(log, records_max=5) == find(log, timestamp_us=0) == FoundPlace(EARLIEST, 0, 0)
    assert listed(log) == Listing([], EARLIEST, complete=True)

    log.append(publish=False)
    assert find(log, bytes_max=5) == FoundPlace(Position(1, 1, 0), 0, 0)
    assert listed(log) == Listing([], Position(1, 1, 0), complete=True)


# --- times -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(11))
def test_a_time_gives_the_first_chunk_with_that_time_or_a_later_one(full: Log, number: int) -> None:
    place = find(full, timestamp_us=100 + number)

    assert (place.record, place.bytes) == (10 * number, CHUNK_BYTES * number)


def test_a_time_before_all_chunks_gives_the_start_and_one_behind_all_gives_the_end(full: Log) -> None:
    assert find(full, timestamp_us=-5) == FoundPlace(Position(1, 1, 0), 0, 0)
    assert find(full, timestamp_us=111) == FoundPlace(Position(2, 1, 3072), 110, 11 * CHUNK_BYTES)
    assert find(full, end=Position(1, 2, 0), timestamp_us=105) == FoundPlace(Position(1, 2, 0), 40, 4 * CHUNK_BYTES)


def test_times_need_not_ascend(log: Log) -> None:
    for time_us in (50, 90, 20, 70, 10, 80, 60):
        log.append(max_timestamp_us=time_us)

    records = {time_us: find(log, timestamp_us=time_us).record for time_us in (40, 60, 85, 95)}
    assert records == {40: 0, 60: 1, 85: 1, 95: 7}
    assert find(log, Position(1, 1, 2048), timestamp_us=75).record == 5


# --- what has to be loaded ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "record", "loaded"),
    [
        ({"records_max": 40}, 40, []),
        ({"records_max": 120}, 120, []),
        ({"records_max": 60}, 60, [(1, 2)]),
        ({"bytes_max": 8 * CHUNK_BYTES}, 80, []),
        ({"bytes_max": 9 * CHUNK_BYTES}, 90, [(2, 1)]),
        ({"timestamp_us": 107}, 70, [(1, 2)]),
        ({"timestamp_us": 999}, 120, []),
    ],
)
def test_a_segment_is_loaded_only_for_a_boundary_within_it(
    stored: Log, query: dict[str, Any], record: int, loaded: list[Key]
) -> None:
    place, missing = find_loading(stored, **query)

    assert (place.record, place.bytes) == (record, record // 10 * CHUNK_BYTES)
    assert missing == loaded


def test_a_start_within_a_segment_loads_that_segment_once(stored: Log) -> None:
    place, loaded = find_loading(stored, Position(1, 1, 1024), records_max=70)

    assert (place.record, place.bytes) == (80, 7 * CHUNK_BYTES)
    assert loaded == [(1, 1)]
    step = locate(stored.streamlet, 0, Query(records_max=45), Progress(Position(1, 1, 1024), 0, 10), SEGMENTS_MAX)
    assert step.missing == (1, 2), "it goes on from there, even if the first one has gone again"


def test_a_search_goes_on_behind_the_segments_it_has_passed(stored: Log) -> None:
    step = locate(stored.streamlet, 0, Query(bytes_max=6 * CHUNK_BYTES), Progress(EARLIEST), SEGMENTS_MAX)

    assert (step.place, step.missing, step.walked) == (None, (1, 2), 2)
    assert step.progress == Progress(Position(1, 2, 0), 4 * CHUNK_BYTES)


def test_an_end_within_a_segment_on_disk_is_counted_exactly(stored: Log) -> None:
    place, loaded = find_loading(stored, end=Position(1, 2, 2048), bytes_max=1 << 30)
    assert (place, loaded) == (FoundPlace(Position(1, 2, 2048), 60, 6 * CHUNK_BYTES), [(1, 2)])

    with pytest.raises(InvalidCursor):
        find_loading(stored, end=Position(1, 2, 2000), timestamp_us=999)


def test_a_walk_over_too_many_segments_is_cut(stored: Log) -> None:
    place = find(stored, segments_max=2, timestamp_us=999)

    assert place == FoundPlace(Position(2, 1, 0), 80, 8 * CHUNK_BYTES, moved=True)
    assert find(stored, place.position, segments_max=2, timestamp_us=999).bytes == 4 * CHUNK_BYTES


# --- segments ----------------------------------------------------------------------------------------------


def test_segments_are_clipped_to_the_range(full: Log) -> None:
    found = listed(full, Position(1, 1, 1024), Position(2, 1, 2048))

    assert found.segments == [
        Bounds(Position(1, 1, 1024), Position(1, 1, 4096), 10, 40, resident=True),
        Bounds(Position(1, 2, 0), Position(1, 2, 4096), 40, 80, resident=True),
        Bounds(Position(2, 1, 0), Position(2, 1, 2048), 80, 100, resident=True),
    ]
    assert (found.next, found.complete) == (Position(2, 1, 2048), True)
    assert listed(full, Position(1, 1, 4096), Position(1, 2, 0)) == Listing([], Position(1, 2, 0), complete=True)


def test_many_segments_are_listed_in_parts(full: Log) -> None:
    first = listed(full, segments_max=2)
    assert (len(first.segments), first.next, first.complete) == (2, Position(2, 1, 0), False)

    rest = listed(full, first.next, segments_max=2)
    assert ([each.start for each in rest.segments], rest.complete) == ([Position(2, 1, 0)], True)


def test_segments_on_disk_are_listed_without_loading_them(stored: Log) -> None:
    found = listed(stored)
    assert [each[2:] for each in found.segments] == [(0, 40, False), (40, 80, False), (80, 120, False)]

    assert listed(stored, Position(1, 1, 1024)).missing == (1, 1)
    cut = listed(stored, EARLIEST, Position(2, 1, 1024))
    assert (len(cut.segments), cut.next, cut.complete, cut.missing) == (2, Position(2, 1, 0), False, (2, 1))


# --- what is not there -------------------------------------------------------------------------------------


def test_a_removed_start_is_lost_but_the_earliest_position_is_not(full: Log) -> None:
    full.entry.start, full.entry.start_record = Position(1, 2, 1024), 50

    assert find(full, records_max=10) == FoundPlace(Position(1, 2, 2048), 60, 1024)
    assert find(full, timestamp_us=0) == FoundPlace(Position(1, 2, 1024), 50, 0)
    assert listed(full).segments[0][:3] == (Position(1, 2, 1024), Position(1, 2, 4096), 50)
    for lost in (Position(1, 1, 0), Position(1, 2, 0)):
        with pytest.raises(DataLost) as raised:
            find(full, lost, records_max=10)
        assert raised.value.attributes["available_from"] == [1, 2, 1024]
        with pytest.raises(DataLost):
            listed(full, lost)


@pytest.mark.parametrize("wrong", [Position(1, 1, 100), Position(1, 1, 5000), Position(1, 3, 0), Position(9, 1, 0)])
def test_a_start_or_end_that_is_no_boundary_is_refused(full: Log, wrong: Position) -> None:
    with pytest.raises(InvalidCursor):
        find(full, wrong, bytes_max=1)
    with pytest.raises(InvalidCursor):
        listed(full, wrong)
    with pytest.raises(InvalidCursor):
        find(full, end=Position(1, 1, 100), bytes_max=4096)
    with pytest.raises(InvalidCursor):
        listed(full, end=Position(1, 1, 100))


def test_a_gap_is_passed_over_and_a_start_in_it_is_lost(full: Log) -> None:
    gap = Gap(Position(2, 1, 3072), Position(1 << 24, 1, 0))
    full.engine.memory.close(full.segments()[-1])
    full.entry.gaps.append(gap)
    assert find(full, timestamp_us=111) == FoundPlace(gap.start, 110, 11 * CHUNK_BYTES), "nothing is behind it yet"

    full.streamlet.next_group_id = 1 << 24
    fill(full, 5)
    place = find(full, timestamp_us=111)
    assert place == FoundPlace(gap.end, 110, 11 * CHUNK_BYTES, lost_from=gap.start)
    assert find(full, timestamp_us=112).lost_from is None, "it is behind a chunk that is there"
    assert find(full, Position(2, 1, 2048), records_max=30) == FoundPlace(gap.end._replace(offset=2048), 130, 3072)
    bounds = listed(full, Position(2, 1, 0)).segments
    assert [(each.start, each.end) for each in bounds[:2]] == [
        (Position(2, 1, 0), gap.start),
        (gap.end, gap.end._replace(offset=4096)),
    ]
    inside = gap.start._replace(group_id=77)
    assert find(full, end=inside, records_max=1000).position == gap.start
    for lost in (gap.start, inside):
        with pytest.raises(DataLost) as raised:
            find(full, lost, records_max=10)
        assert raised.value.attributes["available_from"] == list(gap.end)


@pytest.fixture
def damaged(stored: Log) -> Log:
    """Chunks 1, 2 and 4 are damaged; 1 and 2 form one damaged range."""
    for file, offset in ((1, CHUNK_BYTES), (1, 2 * CHUNK_BYTES), (2, 0)):
        with stored.engine.store.path(file).open("r+b") as writing:
            writing.seek(offset)
            writing.write(b"\xff" * 128)
    return stored


def test_a_damaged_chunk_counts_with_its_missing_records(damaged: Log) -> None:
    counts = {number: find_loading(damaged, records_max=number)[0] for number in (5, 15, 30, 45, 50)}

    assert [place.position.offset for place in counts.values()] == [1024, 1024, 3072, 0, 1024]
    assert [place.record for place in counts.values()] == [10, 10, 30, 40, 50]
    assert find_loading(damaged, Position(1, 1, 1024), records_max=1)[0] == FoundPlace(
        Position(1, 1, 3072), 30, 2048, lost_from=Position(1, 1, 1024)
    )
    assert find_loading(damaged, Position(1, 2, 0), bytes_max=1)[0] == FoundPlace(
        Position(1, 2, 1024), 50, 1024, lost_from=Position(1, 2, 0)
    )


def test_a_damaged_chunk_has_no_time(damaged: Log) -> None:
    found = [find_loading(damaged, timestamp_us=time_us)[0] for time_us in (100, 101, 103, 104)]
    assert [place.record for place in found] == [0, 30, 30, 50]
    assert [place.lost_from for place in found] == [None, Position(1, 1, 1024), Position(1, 1, 1024), Position(1, 2, 0)]


def test_segments_with_damage_are_listed_like_others(damaged: Log) -> None:
    find_loading(damaged, records_max=5)
    find_loading(damaged, records_max=45)

    assert [each[2:] for each in listed(damaged).segments] == [(0, 40, True), (40, 80, True), (80, 120, False)]
    assert listed(damaged, Position(1, 1, 3072), Position(1, 2, 1024)).segments == [
        Bounds(Position(1, 1, 3072), Position(1, 1, 4096), 30, 40, resident=True),
        Bounds(Position(1, 2, 0), Position(1, 2, 1024), 40, 50, resident=True),
    ]


# --- intervals ---------------------------------------------------------------------------------------------


@pytest.fixture
def sealed(log: Log) -> Log:
    """Six chunks in group 1; groups from 5 on are at another broker, where ordinals go on with 60."""
    fill(log, 6)
    log.streamlet.hold(Holding((Interval(0, 5, (), (60,)),), owned=False))
    return log


def test_a_search_beyond_the_end_of_an_interval_goes_on_at_another_broker(sealed: Log) -> None:
    beyond, whole = FoundPlace(Position(5, 1, 0), 60, 6 * CHUNK_BYTES, moved=True), 6 * CHUNK_BYTES

    assert find(sealed, records_max=100) == find(sealed, bytes_max=whole) == find(sealed, timestamp_us=106) == beyond
    assert find(sealed, end=Position(7, 1, 0), records_max=100) == beyond
    assert find(sealed, end=Position(1, 2, 2048), records_max=100) == FoundPlace(Position(1, 2, 2048), 60, whole)
    assert find(sealed, records_max=50) == FoundPlace(Position(1, 2, 1024), 50, 5 * CHUNK_BYTES)
    assert find(sealed, Position(1, 2, 2048), records_max=50) == beyond._replace(bytes=0)
    assert listed(sealed)[1:] == (Position(5, 1, 0), True, None)
    assert len(listed(sealed).segments) == 2


def test_a_start_outside_the_intervals_of_this_broker_is_not_owned(sealed: Log) -> None:
    with pytest.raises(NotOwner):
        find(sealed, Position(5, 1, 0), records_max=100)
    with pytest.raises(NotOwner):
        listed(sealed, Position(5, 1, 0))


def test_a_search_leaves_an_interval_without_records_at_once(sealed: Log) -> None:
    sealed.entry.start, sealed.entry.start_record = Position(5, 1, 0), 60

    assert find(sealed, timestamp_us=0) == FoundPlace(Position(5, 1, 0), 60, 0, moved=True)
    assert listed(sealed) == Listing([], Position(5, 1, 0), complete=True)


def test_an_interval_without_writes_has_a_place(log: Log) -> None:
    log.streamlet.hold(Holding((Interval(5, first_records=(60,), leads=False),)))

    assert find(log, Position(5, 1, 0), timestamp_us=0) == FoundPlace(Position(5, 1, 0), 60, 0)
    assert listed(log, Position(5, 1, 0)) == Listing([], Position(5, 1, 0), complete=True)
