"""In real-time mode a micro-batch ends where its tasks are, and no record is read twice or left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.base.ids import EntryId
from kera.core.errors import InvalidArgument, NotAccepted
from kera.spark_connector.planning import (
    Advance,
    Cutting,
    Piece,
    Tail,
    behind_latest,
    cap,
    conclude,
    cut,
    heads,
    limited,
    moved,
    next_ends,
    ranges,
    revise,
    rounded,
    stopped,
    tails,
    to_ask,
    waiting,
)
from kera.spark_connector.planning.offsets import EntryOffset, Offsets
from tests.unit.spark_connector.worlds import (
    Log,
    at,
    entry,
    named,
    now_of,
    offsets,
    stream_now,
)


def within(chunk: EntryOffset, record: int) -> EntryOffset:
    """A place in the chunk that begins at `chunk`."""
    return EntryOffset(chunk.position, record)


def advance_of(*rows: tuple[EntryOffset, ...]) -> Advance:
    return Advance(offsets(*rows), offsets(*rows))


def test_each_entry_becomes_a_task() -> None:
    now = now_of(stream_now({0: [entry(9)], 1: [entry(3, first=2), entry(0)]}))
    advance = next_ends(offsets((at(4),)), now, fail_on_data_loss=True)

    assert tails(advance.start, now, fail_on_data_loss=False) == [
        Tail("flights", EntryId(7, 0, 0), at(4).position, 4, typed=True, fail_on_data_loss=False),
        Tail("flights", EntryId(7, 1, 0), at(2).position, 2, typed=True, fail_on_data_loss=False),
        Tail("flights", EntryId(7, 1, 1), at(0).position, 0, typed=True, fail_on_data_loss=False),
    ]


def test_a_micro_batch_ends_where_its_tasks_are() -> None:
    advance = advance_of((at(4),), (at(2),))

    end = moved(advance, [(named(0), within(at(4), 6))])

    assert end == offsets((within(at(4), 6),), (at(2),))


def test_a_micro_batch_never_ends_before_its_start() -> None:
    advance = advance_of((within(at(4), 6),))

    assert moved(advance, [(named(0), at(3))]) == advance.start
    assert moved(advance, [(named(0), at(4))]) == advance.start
    assert moved(advance, [(named(0), within(at(4), 5))]) == advance.start


def test_a_position_in_an_entry_that_is_not_read_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="stream 'flights', streamlet 5, entry 0 is not read"):
        moved(advance_of((at(4),)), [(named(5), at(5))])


def test_an_end_keeps_its_consumer_group_and_is_the_start_when_no_record_came() -> None:
    given_ = Offsets(offsets((at(4),)).streams, group="etl")
    advance = Advance(Offsets(given_.streams), Offsets(given_.streams))

    assert conclude(given_, advance, moved(advance, [])) is given_
    end = conclude(given_, advance, moved(advance, [(named(0), within(at(4), 5))]))
    assert (end.group, end.since) == ("etl", None)
    assert conclude(given_, advance, moved(advance, [(named(0), at(5))]), first=True).since == given_.streams


# -- a micro-batch after one of real-time mode -----------------------------------------------------------------


def test_the_next_micro_batch_leaves_out_the_records_already_read_from_a_chunk() -> None:
    log = Log([(1, 1, [5, 2, 5])])
    now = now_of(stream_now({0: [log.bounds]}))
    start = within(log.boundaries[1], 6)
    advance = next_ends(offsets((start,)), now, fail_on_data_loss=True)

    assert waiting(advance, now)[named()].records == 6
    found = ranges(advance.start, advance.heads, now)
    (piece,) = cut(found, now, {}, Cutting(stable=True), fail_on_data_loss=True)
    assert (piece.start, piece.first_record, piece.records) == (start.position, 6, 6)


def test_an_offset_within_a_chunk_never_goes_back_to_its_beginning() -> None:
    now = now_of(stream_now({0: [entry(4)]}))
    start = offsets((within(at(4), 6),))  # as after a restart of a broker that had not replicated the records

    advance = next_ends(start, now, fail_on_data_loss=True)

    assert advance.start == advance.heads == start
    assert cap(advance, heads(now)).heads == start
    assert limited(advance, {named(): at(4)}) == start
    assert revise(start, start, now, fail_on_data_loss=True).end == Offsets({})
    assert conclude(start, advance, advance.heads) is start


def test_a_micro_batch_cannot_end_within_the_chunk_that_it_begins_in() -> None:
    now = now_of(stream_now({0: [entry(9)]}))
    start, end = offsets((within(at(4), 6),)), offsets((within(at(4), 7),))

    with pytest.raises(NotAccepted, match=r"ends within the chunk at .*not there any more") as caught:
        ranges(start, end, now)
    assert caught.value.attributes["streamlet"] == 0
    assert ranges(end, start, now) == []


@given(
    groups=st.lists(
        st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    data=st.data(),
)
def test_partitions_from_any_record_on_cover_the_rest_exactly_once(
    groups: list[list[list[int]]], data: st.DataObject
) -> None:
    log = Log([(number, 1 + number % 2, chunks) for number, group in enumerate(groups, 1) for chunks in group])
    now = now_of(stream_now({0: [log.bounds]}, assignments={0: log.assignment}))
    last = log.bounds.next_record
    record = data.draw(st.integers(0, last - 1))
    begun = max(place for place in log.boundaries if place.record <= record)
    start = within(begun, record)
    cutting = Cutting(
        data.draw(st.none() | st.integers(1, 6)),
        data.draw(st.none() | st.integers(1, 6)),
        stable=data.draw(st.booleans()),
    )

    advance = next_ends(offsets((start,)), now, fail_on_data_loss=True)
    found = ranges(advance.start, advance.heads, now)
    segments = {each.entry: log.between(begun, each.end) for each in to_ask(found, now, cutting)}
    planned = cut(found, now, segments, cutting, fail_on_data_loss=True)

    assert [records_of(log, piece) for piece in planned] == [piece.records for piece in planned]
    assert sum(piece.records for piece in planned) == last - record
    assert [piece.start for piece in planned] == sorted(piece.start for piece in planned)


def records_of(log: Log, piece: Piece) -> int:
    """The number of records of a task, which leaves out those before its first record in the first chunk."""
    begun = {place.position: place.record for place in log.boundaries}.get(piece.start, piece.first_record)
    assert begun <= piece.first_record
    return len([each for each in log.records_of(piece.start, piece.end) if each >= piece.first_record])


# -- lag -------------------------------------------------------------------------------------------------------


def test_the_lag_counts_only_entries_with_a_known_offset() -> None:
    assert behind_latest(offsets((at(4),), (at(2),)), offsets((at(9),), (at(2),), (at(7),))) == {
        "minOffsetsBehindLatest": "0",
        "maxOffsetsBehindLatest": "5",
        "avgOffsetsBehindLatest": "2.5",
    }
    assert behind_latest(offsets((at(4),)), offsets((at(3),)))["maxOffsetsBehindLatest"] == "0"


def test_without_known_offsets_there_is_no_lag() -> None:
    assert behind_latest(None, offsets((at(4),))) == {}
    assert behind_latest(offsets((at(4),)), None) == {}
    assert behind_latest(offsets((at(4),), stream_id=8), offsets((at(4),))) == {}


# -- repeated with another trigger -----------------------------------------------------------------------------------


def test_a_repeated_micro_batch_stops_within_its_last_chunk() -> None:
    now = now_of(stream_now({0: [entry(9)], 1: [entry(9)]}))
    start, end = offsets((at(2),), (at(1),)), offsets((within(at(4), 5),), (at(3),))
    chunk = EntryOffset(at(4).position, 4), EntryOffset(at(6).position, 6)
    of_other = EntryOffset(at(3).position, 3), EntryOffset(at(5).position, 5)

    planned = revise(start, end, now, fail_on_data_loss=True)
    planned, stops = rounded(planned, {named(0): chunk, named(1): of_other})
    found = ranges(planned.start, planned.end, now)
    pieces = stopped(cut(found, now, {}, Cutting(), fail_on_data_loss=True), stops)

    assert [(piece.start, piece.end, piece.records, piece.stop) for piece in pieces] == [
        (at(2).position, at(6).position, 3, EntryOffset(at(4).position, 5)),
        (at(1).position, at(3).position, 2, None),
    ]


def test_a_repeated_micro_batch_within_one_chunk_has_only_its_own_records() -> None:
    now = now_of(stream_now({0: [entry(9)]}))
    start, end = offsets((within(at(4), 5),)), offsets((within(at(4), 7),))

    planned = revise(start, end, now, fail_on_data_loss=True)
    planned, stops = rounded(planned, {named(0): (at(4), at(9))})
    (piece,) = stopped(cut(ranges(planned.start, planned.end, now), now, {}, Cutting(), fail_on_data_loss=True), stops)

    assert (piece.first_record, piece.records, piece.stop) == (5, 2, within(at(4), 7))
