"""Micro-batches follow each other without gap or overlap, their ends never go back, and each loss is reported."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidArgument, KeraError, UnknownStream
from kera.spark_connector.planning import (
    Advance,
    Now,
    Planned,
    cap,
    conclude,
    heads,
    limited,
    next_ends,
    ranges,
    revise,
    waiting,
)
from kera.spark_connector.planning.admission import BatchLimits, Take, Waiting, decide
from kera.spark_connector.planning.offsets import EntryOffset, Offsets, StreamOffsets, StreamRecreated
from tests.unit.spark_connector.worlds import RECORD_BYTES, at, entry, named, now_of, offsets, stream_now


def both(*streams: Offsets) -> Offsets:
    return Offsets({name: stream for part in streams for name, stream in part.streams.items()})


def stored(end: Offsets) -> Offsets:
    """The offsets as they come back from the checkpoint."""
    return Offsets.from_json(json.loads(json.dumps(end.to_json())))


# --- what is new --------------------------------------------------------------------------------------------


def test_a_micro_batch_ends_at_the_head_of_each_entry() -> None:
    now = now_of(stream_now({0: [entry(8), entry(6)]}), stream_now({0: [entry(4)]}, "trains", 8))
    start = both(offsets((at(8), at(2))), offsets((at(1),), name="trains", stream_id=8))

    advance = next_ends(start, now, fail_on_data_loss=True)

    assert advance == Advance(start, both(offsets((at(8), at(6))), offsets((at(4),), name="trains", stream_id=8)))


def test_an_end_never_goes_back_in_any_entry() -> None:
    advance = next_ends(offsets((at(8), at(2))), now_of(stream_now({0: [entry(5), entry(6)]})), fail_on_data_loss=True)

    assert advance.heads == offsets((at(8), at(6)))


def test_a_renamed_position_without_new_records_keeps_the_start() -> None:
    start = offsets((EntryOffset(Position(1, 1, 640), 10),))
    bounds = replace(entry(10), end=Position(1, 2, 0))

    advance = next_ends(start, now_of(stream_now({0: [bounds]})), fail_on_data_loss=True)

    assert conclude(start, advance, advance.heads) is start


@pytest.mark.parametrize("before", [900, 5])
def test_an_entry_whose_ordinals_begin_anew_is_still_read(before: int) -> None:
    """The group ids go on, the ordinals begin anew."""
    bounds = replace(entry(5, group=2), start=Position(1, 1, 0))
    now = now_of(stream_now({0: [bounds]}))

    advance = next_ends(offsets((at(before),)), now, fail_on_data_loss=True)

    assert advance.heads == offsets((at(5, group=2),))
    assert waiting(advance, now)[named()].records == 1


def test_new_streams_and_streamlets_begin_at_their_first_record() -> None:
    now = now_of(stream_now({0: [entry(8)], 1: [entry(5, first=3)]}), stream_now({0: [entry(4)]}, "trains", 8))

    advance = next_ends(offsets((at(8),)), now, fail_on_data_loss=True)

    assert advance.start == both(offsets((at(8),), (at(3),)), offsets((at(0),), name="trains", stream_id=8))
    assert advance.heads == heads(now)
    assert advance.warnings == ()


def test_a_position_in_a_removed_empty_group_moves_to_the_first_record() -> None:
    now = now_of(stream_now({0: [entry(10, first=4, group=3)]}))
    read_all = offsets((EntryOffset(Position(1, 2, 640), 4),))

    advance = next_ends(read_all, now, fail_on_data_loss=True)

    assert advance == Advance(offsets((at(4, group=3),)), offsets((at(14, group=3),)))


@pytest.mark.parametrize("before", [EntryOffset(EARLIEST, 0), at(50)])
def test_an_entry_whose_broker_lost_its_memory_has_lost_records_even_if_the_ordinals_match(before: EntryOffset) -> None:
    """50 records came after the checkpoint and were lost; the ordinals began anew and reached the same number."""
    lost = EARLIEST, Position(2, 1, 0)
    bounds = replace(entry(10, first=before.record, group=2), lost=lost)
    now = now_of(stream_now({0: [bounds]}))

    with pytest.raises(DataLost, match="an unknown number of records of stream 'flights'"):
        next_ends(offsets((before,)), now, fail_on_data_loss=True)
    advance = next_ends(offsets((before,)), now, fail_on_data_loss=False)
    assert advance.start == offsets((at(before.record, group=2),))
    again = next_ends(advance.start, now, fail_on_data_loss=True)
    assert again.start == advance.start, "that is told once"


def test_a_new_entry_that_begins_with_a_loss_has_lost_records() -> None:
    bounds = replace(entry(10, group=2), lost=(EARLIEST, Position(2, 1, 0)))
    now = now_of(stream_now({0: [bounds]}))

    with pytest.raises(DataLost, match="an unknown number of records of stream 'flights'"):
        next_ends(Offsets({}), now, fail_on_data_loss=True)
    advance = next_ends(Offsets({}), now, fail_on_data_loss=False)
    assert advance.start == offsets((at(0, group=2),))
    assert len(advance.warnings) == 1


# --- what is gone -------------------------------------------------------------------------------------------

HERE = stream_now({0: [entry(8)], 1: [entry(8)]})
BEFORE = offsets((at(2),), (at(3),))
LOSSES: dict[str, tuple[Now, type[KeraError], str, dict[str, Any]]] = {
    "deleted": (
        {},
        UnknownStream,
        "is in the checkpoint, but was deleted, is no longer subscribed, or may not be seen.*failOnDataLoss to false",
        {"stream": "flights"},
    ),
    "recreated": (
        now_of(stream_now({0: [entry(8)], 1: [entry(8)]}, stream_id=9)),
        StreamRecreated,
        "deleted and created again: .*incarnation 7, now it is 9.*new checkpointLocation.*failOnDataLoss to false",
        {"stream": "flights", "checkpoint_stream_id": 7, "stream_id": 9},
    ),
    "truncated": (
        now_of(stream_now({0: [entry(8)], 1: [entry(6, first=5)]})),
        DataLost,
        "2 records of stream 'flights', streamlet 1, entry 0 are gone .*retention keep more.*failOnDataLoss to false",
        {"stream": "flights", "streamlet": 1, "entry": 0, "records": 2}
        | {"lost_from": (1, 1, 192), "available_from": (1, 1, 320)},
    ),
    "lost with its ordinals": (
        now_of(stream_now({0: [entry(8)], 1: [entry(1, group=2)]})),
        DataLost,
        "an unknown number of records of stream 'flights', streamlet 1, entry 0 are gone",
        {"stream": "flights", "streamlet": 1, "entry": 0, "records": 0}
        | {"lost_from": (1, 1, 192), "available_from": (2, 1, 0)},
    ),
    "unassigned": (
        now_of(stream_now({0: [entry(8)]})),
        InvalidArgument,
        "streamlet 1, entry 0 is in the checkpoint, but is no longer assigned.*failOnDataLoss to false",
        {"option": "assign", "stream": "flights", "streamlet": 1, "entry": 0},
    ),
}
AFTER = {
    "deleted": Offsets({}),
    "recreated": offsets((at(0),), (at(0),), stream_id=9),
    "truncated": offsets((at(2),), (at(5),)),
    "lost with its ordinals": offsets((at(2),), (at(0, group=2),)),
    "unassigned": offsets((at(2),)),
}
"""The start after each loss when losses are tolerated."""


@pytest.mark.parametrize("what", LOSSES)
@pytest.mark.parametrize(
    "ask",
    [
        lambda now: next_ends(BEFORE, now, fail_on_data_loss=True),
        lambda now: revise(BEFORE, heads(now_of(HERE)), now, fail_on_data_loss=True),
    ],
    ids=["next_ends", "revise"],
)
def test_a_loss_is_an_error_that_names_the_loss_and_the_way_out(what: str, ask: Callable[[Now], object]) -> None:
    now, error, words, attributes = LOSSES[what]

    with pytest.raises(error, match=words) as caught:
        ask(now)

    assert caught.value.attributes == attributes


@pytest.mark.parametrize("what", LOSSES)
def test_a_tolerated_loss_is_one_warning_and_the_query_goes_on(what: str) -> None:
    now = LOSSES[what][0]

    advance = next_ends(BEFORE, now, fail_on_data_loss=False)

    assert advance.start == AFTER[what]
    assert advance.heads == heads(now)
    (warning,) = advance.warnings
    assert "flights" in warning
    end = stored(conclude(BEFORE, advance, advance.heads))
    assert end.since == advance.start.streams, "or a restart would begin elsewhere"
    again = next_ends(end, now, fail_on_data_loss=True)
    assert again.warnings == ()
    assert conclude(end, again, again.heads) is end


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_is_recorded_even_without_new_records(what: str) -> None:
    advance = next_ends(BEFORE, LOSSES[what][0], fail_on_data_loss=False)

    assert conclude(BEFORE, advance, advance.start).streams == AFTER[what].streams


# --- what is stored -----------------------------------------------------------------------------------------

NOW = now_of(stream_now({0: [entry(8), entry(6)]}))


def test_without_new_records_the_end_is_the_start() -> None:
    start = Offsets(heads(NOW).streams, offsets((at(0), at(0))).streams, "readers")
    advance = next_ends(start, NOW, fail_on_data_loss=True)

    assert conclude(start, advance, advance.heads, group="others", first=True) is start


def test_an_empty_stream_that_joins_is_not_recorded_yet() -> None:
    start = heads(NOW)
    advance = next_ends(start, {**NOW, **now_of(stream_now({0: [entry(0)]}, "trains", 8))}, fail_on_data_loss=True)

    assert conclude(start, advance, advance.heads) is start


def test_only_the_first_end_records_where_the_query_began() -> None:
    start = offsets((at(1), at(2)))
    advance = next_ends(start, NOW, fail_on_data_loss=True)

    first = conclude(start, advance, advance.heads, group="readers", first=True)
    assert first == Offsets(heads(NOW).streams, start.streams, "readers")
    more = now_of(stream_now({0: [entry(9), entry(6)]}))
    assert conclude(first, next_ends(first, more, fail_on_data_loss=True), heads(more)) == Offsets(
        heads(more).streams, None, "readers"
    )


def test_the_first_end_with_a_new_stream_records_where_that_stream_began() -> None:
    start = heads(NOW)
    trains = stream_now({0: [entry(4, first=2)]}, "trains", 8)
    advance = next_ends(start, {**NOW, **now_of(trains)}, fail_on_data_loss=True)

    end = stored(conclude(start, advance, advance.heads))

    assert end.since == both(start, offsets((at(2),), name="trains", stream_id=8)).streams
    planned = revise(start, end, {**NOW, **now_of(trains)}, fail_on_data_loss=True)
    assert [(item.entry, item.start) for item in ranges(planned.start, planned.end, {**NOW, **now_of(trains)})] == [
        (named(stream="trains"), at(2))
    ]


# --- available now ------------------------------------------------------------------------------------------


def test_available_now_reads_no_further_than_its_target() -> None:
    advance = Advance(offsets((at(1), at(1))), offsets((at(9), at(1))))

    assert cap(advance, offsets((at(5), at(4)))).heads == offsets((at(5), at(1)))


def test_available_now_does_not_go_back_to_its_target() -> None:
    advance = Advance(offsets((at(7),)), offsets((at(9),)))

    assert cap(advance, offsets((at(5),))).heads == offsets((at(7),))


def test_available_now_reads_no_streams_that_came_later() -> None:
    start = both(offsets((at(0),)), offsets((at(0),), name="trains", stream_id=8))
    advance = Advance(start, both(offsets((at(9),)), offsets((at(9),), name="trains", stream_id=8)))

    assert cap(advance, offsets((at(5),))).heads == both(
        offsets((at(5),)), offsets((at(0),), name="trains", stream_id=8)
    )
    assert cap(advance, both(offsets((at(5),), stream_id=6), offsets((at(5),), name="trains", stream_id=8))).heads == (
        both(offsets((at(0),)), offsets((at(5),), name="trains", stream_id=8))
    )


# --- how much waits -----------------------------------------------------------------------------------------


def test_the_backlog_is_counted_by_ordinals_and_its_bytes_are_exact_in_one_segment() -> None:
    advance = next_ends(offsets((at(3), at(6))), NOW, fail_on_data_loss=True)

    assert waiting(advance, NOW) == {named(0, 0): Waiting(5, 5 * RECORD_BYTES, 5 * RECORD_BYTES)}


def test_the_bytes_of_a_backlog_over_segments_are_estimated_from_the_whole_entry() -> None:
    bounds = replace(entry(100), end=Position(3, 1, 0), length_bytes=100_000)
    now = now_of(stream_now({0: [bounds]}))

    assert waiting(next_ends(offsets((at(75),)), now, fail_on_data_loss=True), now) == {
        named(): Waiting(25, 25_000, 100_000)
    }
    assert waiting(next_ends(offsets((at(0),)), now, fail_on_data_loss=True), now) == {
        named(): Waiting(100, 100_000, 100_000)
    }


def test_a_limited_end_is_between_start_and_head() -> None:
    advance = Advance(offsets((at(2), at(2), at(2))), offsets((at(9), at(9), at(9))))

    end = limited(advance, {named(0, 0): at(5), named(0, 1): at(1)})

    assert end == offsets((at(5), at(2), at(9)))
    assert limited(advance, {named(0, 2): at(11)}) == advance.heads


# --- a micro-batch that is planned again --------------------------------------------------------------------


def test_a_replanned_micro_batch_begins_where_it_began_before() -> None:
    end = Offsets(offsets((at(7), at(6))).streams, offsets((at(2), at(6))).streams)

    planned = revise(offsets((at(4), at(4))), stored(end), NOW, fail_on_data_loss=True)

    assert planned == Planned(offsets((at(2), at(6))), offsets((at(7), at(6))))


def test_a_missing_stream_that_gives_no_records_is_ignored() -> None:
    start = both(offsets((at(4), at(4))), offsets((at(9),), name="trains", stream_id=8))
    end = both(offsets((at(7), at(6))), offsets((at(9),), name="trains", stream_id=8))

    planned = revise(start, end, NOW, fail_on_data_loss=True)

    assert planned == Planned(offsets((at(4), at(4))), offsets((at(7), at(6))))


@pytest.mark.parametrize("what", LOSSES)
def test_a_replanned_micro_batch_reads_only_remaining_records_after_a_tolerated_loss(what: str) -> None:
    now = LOSSES[what][0]

    planned = revise(BEFORE, heads(now_of(HERE)), now, fail_on_data_loss=False)

    assert len(planned.warnings) == 1
    expected = {
        "deleted": [],
        "recreated": [],
        "truncated": [(named(0), at(2), at(8)), (named(1), at(5), at(8))],
        "lost with its ordinals": [(named(0), at(2), at(8))],
        "unassigned": [(named(0), at(2), at(8))],
    }
    found = ranges(planned.start, planned.end, now)
    assert [(item.entry, item.start, item.end) for item in found] == expected[what]


def test_a_replanned_micro_batch_of_removed_records_reads_nothing() -> None:
    now = now_of(stream_now({0: [entry(3, first=9)]}))

    planned = revise(offsets((at(2),)), offsets((at(5),)), now, fail_on_data_loss=False)

    assert (planned.start, planned.end) == (offsets((at(5),)), offsets((at(5),)))
    (warning,) = planned.warnings
    assert warning.startswith("7 records of stream 'flights', streamlet 0, entry 0 are gone")


def test_a_query_that_begins_behind_the_end_of_its_first_micro_batch_reads_nothing() -> None:
    """Spark asks for the initial offset again after a kill in a first micro-batch without a record."""
    planned = revise(offsets((at(7), at(6))), offsets((at(2), at(6))), NOW, fail_on_data_loss=True)

    assert ranges(planned.start, planned.end, NOW) == []


# --- all together -------------------------------------------------------------------------------------------

says = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans(), st.booleans()), min_size=1, max_size=30
)


@given(says, st.integers(1, 40))
def test_micro_batches_cover_each_record_exactly_once(
    rounds: list[tuple[int, int, bool, bool]], records_max: int
) -> None:
    """A simple model lists every record that a partition covers; none may be missing or come twice.

    Heads move back and forth, the second stream joins late and disappears, and launches end after planning.
    """
    checkpoint = offsets((at(0),))
    seen: dict[str, list[int]] = {"flights": [], "trains": []}
    most = {"flights": 0, "trains": 0}
    first = True
    for head, other, joined, restarted in rounds:
        now = dict(now_of(stream_now({0: [entry(head)]})))
        if joined or "trains" in checkpoint.streams:
            now |= now_of(stream_now({0: [entry(other)]}, "trains", 8))
            most["trains"] = max(most["trains"], other)
        most["flights"] = max(most["flights"], head)
        advance = next_ends(checkpoint, now, fail_on_data_loss=True)
        decision = decide(waiting(advance, now), BatchLimits(records_max=records_max), waited_ms=0)
        assert isinstance(decision, Take)
        begin = advance.start.places()
        places = {
            where: at(begin[where].record + share.records_max)
            for where, share in decision.shares.items()
            if share.records_max is not None
        }
        end = limited(advance, places)
        assert all(begin[where] <= place for where, place in end.entries())
        following = conclude(checkpoint, advance, end, first=first)
        if following is checkpoint:
            continue
        planned = revise(
            offsets((at(0),)) if first and restarted else checkpoint, stored(following), now, fail_on_data_loss=True
        )
        for item in ranges(planned.start, planned.end, now):
            seen[item.entry.stream] += range(item.start.record, item.end.record)
        checkpoint, first = stored(following), False

    for stream, records in seen.items():
        assert records == list(range(len(records)))
        assert len(records) <= most[stream]


@given(st.data())
def test_ends_are_never_before_starts(data: st.DataObject) -> None:
    entries = data.draw(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4))
    start = Offsets({"flights": StreamOffsets(7, {0: tuple(at(record, group + 1) for record, group, *_ in entries)})})
    now = now_of(
        stream_now({0: [entry(records, first=record, group=group + 1) for record, group, records, _ in entries[::-1]]})
    )
    target = offsets(tuple(at(record) for *_, record in entries))

    advance = cap(next_ends(start, now, fail_on_data_loss=False), target)
    end = limited(advance, {named(0, number): at(number) for number in range(len(entries))})

    assert dict(advance.start.entries()).keys() == dict(end.entries()).keys()
    begin = advance.start.places()
    for where, place in end.entries():
        assert begin[where] <= place <= max(begin[where], advance.heads.places()[where])
