"""Appending to a streamlet: order, where chunks go, deduplication."""

from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import ProducerLimits
from kera.core.base.ids import PRODUCER_IDS, Position
from kera.core.errors import ArenaFull, KeraError, NotAccepted, OutOfSequence, ProducerFenced, RecordTooLarge
from kera.core.format.chunk import HEADER_CRC_AT, verify_chunk
from tests.unit.broker.support import CHUNK_BYTES, SLOT_BYTES, Engine, Log, place, position

MakeEngine = Callable[..., Engine]


def trace(log: Log) -> Any:
    """Everything about a streamlet that an append may change."""
    streamlet = log.streamlet
    return (
        [(segment.address, segment.closed, segment.head, bytes(segment.slot.view)) for segment in log.segments()],
        [(entry.next_record, entry.start, entry.end, len(entry.tail)) for entry in streamlet.entries],
        (streamlet.next_group_id, dict(streamlet.producers), log.engine.arena.free_slots),
    )


def refuse(log: Log, error: type[KeraError], *arguments: Any, **fields: Any) -> KeraError:
    """Append a chunk that is refused with `error`, and check that nothing changes."""
    before = trace(log)
    with pytest.raises(error) as raised:
        log.append(*arguments, **fields)
    assert trace(log) == before
    return raised.value


# --- order and place ---------------------------------------------------------------------------------------


def test_chunks_lie_one_after_the_other_and_their_headers_say_where(engine: Engine) -> None:
    log = Log(engine, broker_epoch=77)
    appended = [log.append(record_count=count) for count in (3, 2, 5)]

    assert [place(chunk) for chunk in appended] == [
        (0, 1, 1, 0, 0, False),
        (0, 1, 1, 1024, 3, False),
        (0, 1, 1, 2048, 5, False),
    ]
    view = log.entry.tail[0].slot.view
    for chunk in appended:
        header = verify_chunk(view, chunk.position)
        assert (header.entry, header.group_id, header.segment_id) == (0, 1, 1)
        assert (header.first_record, header.broker_epoch) == (chunk.first_record, 77)


@pytest.mark.parametrize("entries", [1, 2, 3, 4])
def test_a_producer_always_uses_the_entry_of_its_id(engine: Engine, entries: int) -> None:
    log = Log(engine, entries=entries)

    for producer in (1, 2, 3, 4, 5, 2**64 - 1):
        assert {appended.entry for appended in log.append_many(2, producer)} == {producer % entries}


def test_records_are_numbered_per_entry(engine: Engine) -> None:
    log = Log(engine, entries=2)
    appended = [log.append(producer, record_count=10) for producer in (1, 2, 1, 3, 2)]

    assert [(chunk.entry, chunk.first_record) for chunk in appended] == [(1, 0), (0, 0), (1, 10), (1, 20), (0, 10)]


def test_a_full_segment_closes_and_a_full_group_too(log: Log) -> None:
    appended = log.append_many(13)

    assert [(chunk.group_id, chunk.segment_id) for chunk in appended] == (
        [(1, 1)] * 4 + [(1, 2)] * 4 + [(2, 1)] * 4 + [(2, 2)]
    )
    assert [log.streamlet.is_active(group_id, log.entry) for group_id in (1, 2)] == [False, True]
    assert [segment.closed for segment in log.entry.tail] == [True, True, True, False]


def test_a_chunk_that_does_not_fit_behind_the_head_goes_to_the_next_segment(log: Log) -> None:
    log.append(size=2048)
    appended = [log.append(size=3072), log.append(size=1024), log.append(size=512)]

    assert [position(chunk) for chunk in appended] == [(1, 2, 0), (1, 2, 3072), (2, 1, 0)]


def test_group_ids_grow_by_one_over_all_entries(engine: Engine) -> None:
    log = Log(engine, entries=3, group_segments=1, first_group_id=100)
    for producer in (3, 1, 2):
        log.append(producer)
    log.append_many(4, 1)

    entries = [log.streamlet.entry_of(group_id) for group_id in (100, 101, 102, 103)]
    assert [entry.index for entry in entries if entry is not None] == [0, 1, 2, 1]
    assert log.streamlet.available_groups() == (100, 103)


def test_a_chunk_may_fill_a_segment_but_not_more(log: Log) -> None:
    log.append(size=SLOT_BYTES)
    error = refuse(log, RecordTooLarge, size=SLOT_BYTES + 64)

    assert error.attributes == {"chunk_bytes": SLOT_BYTES + 64, "limit": SLOT_BYTES}
    assert position(log.append(size=SLOT_BYTES)) == (1, 2, 0), "the producer goes on with the same sequence"


# --- no room -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_segments", [1, 2])
def test_an_append_to_a_full_arena_changes_nothing_and_succeeds_when_slots_are_free(
    make_engine: MakeEngine, group_segments: int
) -> None:
    engine = make_engine(slots=2)
    log = Log(engine, group_segments=group_segments)
    other = Log(engine)
    other.append()
    log.append_many(4)
    for _ in range(2):
        assert refuse(log, ArenaFull).retriable
    other.streamlet.drop()
    appended = log.append()

    expected = (1, 2, 0) if group_segments == 2 else (2, 1, 0)
    assert (position(appended), appended.first_record, appended.duplicate) == (expected, 4, False)


def test_the_first_chunk_of_an_entry_that_finds_no_room_makes_no_group(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1)
    log, other = Log(engine, first_group_id=5), Log(engine)
    other.append()
    refuse(log, ArenaFull)
    assert log.streamlet.available_groups() == (0, 0)
    other.streamlet.drop()

    assert position(log.append()) == (5, 1, 0)


def test_small_chunks_are_accepted_while_a_large_one_finds_no_room(make_engine: MakeEngine) -> None:
    log = Log(make_engine(slots=1))
    log.append(size=2048)
    refuse(log, ArenaFull, size=3072)

    assert position(log.append(2, size=2048)) == (1, 1, 2048)


# --- deduplication -----------------------------------------------------------------------------------------


def test_a_repeat_gives_the_position_of_the_first_time_and_stores_nothing(engine: Engine) -> None:
    log = Log(engine, entries=2)
    first = {
        (producer, sequence): log.append(producer, record_count=2) for sequence in range(8) for producer in (1, 2, 3)
    }
    before = trace(log)

    for (producer, sequence), appended in first.items():
        again = log.append(producer, sequence, record_count=2, publish=False)
        assert place(again) == place(appended._replace(duplicate=True))
        assert (again.segment, again.end) == (appended.segment, appended.end), "whoever waits for it waits for the same"
    assert trace(log) == before


def test_a_repeat_reads_only_a_few_headers(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(make_engine(slots=64))
    count, others = 300, 4
    first = [log.append(1, number, size=192) for number in range(count)]
    for number in range(count):
        log.append(1 + others, number, size=192)
    looks = 0
    header_at = Segment.header_at

    def counted(self: Segment, offset: int) -> Any:
        nonlocal looks
        looks += 1
        return header_at(self, offset)

    monkeypatch.setattr(Segment, "header_at", counted)
    for number, appended in enumerate(first):
        again = log.append(1, number, size=192, publish=False)
        assert place(again) == place(appended._replace(duplicate=True))
    assert looks < 12 * count


def test_a_repeat_is_recognized_even_when_the_arena_is_full(make_engine: MakeEngine) -> None:
    log = Log(make_engine(slots=1))
    log.append(size=SLOT_BYTES)

    assert log.append(sequence=0, size=SLOT_BYTES).duplicate


def test_a_repeat_of_a_removed_chunk_is_recognized_without_a_place(log: Log) -> None:
    log.append_many(5)
    log.entry.start, log.entry.start_record = Position(1, 2, 0), 4
    log.engine.memory.removals.collect(log.entry)
    log.engine.run()

    again = log.append(sequence=1)
    assert place(again) == (0, 0, 0, 0, 0, True)
    assert (again.segment, again.end) == (None, 0)


def test_a_repeat_of_a_chunk_only_on_disk_is_recognized_without_a_place(log: Log) -> None:
    log.append_many(5)
    log.engine.run()
    log.engine.fill_memory()
    log.engine.memory.slots.allocate()
    assert [segment.key for segment in log.segments()] == [(1, 2)]

    assert place(log.append(sequence=3)) == (0, 0, 0, 0, 0, True)
    assert place(log.append(sequence=4)) == (0, 1, 2, 0, 4, True)


def test_a_repeat_of_a_chunk_on_disk_and_in_memory_gets_its_place(log: Log) -> None:
    first = log.append_many(5)
    log.engine.run()
    assert log.entry.last_stored == (1, 1)

    assert place(log.append(sequence=2)) == place(first[2]._replace(duplicate=True))


def test_a_gap_is_refused_with_the_expected_sequence(log: Log) -> None:
    log.append_many(2)
    error = refuse(log, OutOfSequence, sequence=3)

    assert error.retriable
    assert isinstance(error, NotAccepted)
    assert error.attributes == {"producer_id": 1, "streamlet_id": 0, "sequence": 3, "expected_sequence": 2}
    assert not log.append(sequence=2).duplicate
    assert not log.append(sequence=3).duplicate


def test_an_unknown_producer_begins_with_sequence_0(log: Log) -> None:
    assert refuse(log, OutOfSequence, sequence=1).attributes["expected_sequence"] == 0
    assert not log.append(sequence=0).duplicate


def test_producers_of_one_entry_have_separate_sequences(log: Log) -> None:
    log.append_many(3, 1)
    refuse(log, OutOfSequence, 2, 3)

    assert not log.append(2, 0).duplicate
    assert log.append(1, 0).duplicate


def test_the_least_recent_producers_are_forgotten_except_those_with_chosen_ids(
    engine: Engine,
) -> None:
    log = Log(engine, producer_limits=ProducerLimits(kept=4, spare=2, in_order=3))
    own = PRODUCER_IDS[:3]
    for producer in (*own, 1, 2, 3, 2, 1, 4, 5, 1, 6):
        log.append(producer)
    assert set(log.streamlet.producers) == {*own, 1, 2, 3, 4, 5, 6}
    log.append(7)
    assert set(log.streamlet.producers) == {*own, 1, 5, 6, 7}, "so many are kept"

    refused = refuse(log, OutOfSequence, 2, 2)
    assert refused.attributes["expected_sequence"] == 0, "it begins a new epoch"
    assert not log.append(2, 0, producer_epoch=2).duplicate
    assert log.append(1, 2).duplicate
    for producer in range(10, 20):
        log.append(producer)
    assert len(log.streamlet.producers) <= 3 + 4 + 2
    assert log.append(own[0], 0).duplicate


def test_other_records_with_a_stored_sequence_are_refused_as_another_writers(log: Log) -> None:
    log.append(fill=b"a")
    error = refuse(log, ProducerFenced, sequence=0, fill=b"b")

    assert "another writer uses producer id 1" in str(error)
    assert log.append(sequence=0, fill=b"a").duplicate


@pytest.mark.parametrize("at", [0, HEADER_CRC_AT - 4, HEADER_CRC_AT], ids=["magic", "checksum-of-payload", "checksum"])
def test_a_repeat_of_a_damaged_chunk_is_recognized(log: Log, at: int) -> None:
    log.append()
    log.entry.tail[0].slot.view[at] ^= 1

    assert log.append(sequence=0).duplicate


# --- epochs of producers -----------------------------------------------------------------------------------


def test_an_older_epoch_is_fenced_by_a_newer_one(log: Log) -> None:
    log.append(sequence=0, producer_epoch=4)
    for sequence in (0, 1):
        error = refuse(log, ProducerFenced, sequence=sequence, producer_epoch=3)
        assert error.attributes == {"producer_id": 1, "producer_epoch": 4}
        assert not error.retriable

    assert not log.append(sequence=1, producer_epoch=4).duplicate


def test_an_epoch_below_the_fence_is_refused_where_no_later_epoch_was_written(log: Log) -> None:
    log.append(sequence=0, producer_epoch=3)
    log.streamlet.first_epochs = {1: 4}
    for sequence in (0, 1):
        error = refuse(log, ProducerFenced, sequence=sequence, producer_epoch=3)
        assert error.attributes == {"producer_id": 1, "producer_epoch": 4}

    assert not log.append(2, sequence=0, producer_epoch=3).duplicate
    assert not log.append(sequence=0, producer_epoch=4).duplicate


def test_a_newer_epoch_counts_from_0_behind_the_chunks_of_the_older_one(log: Log) -> None:
    old = [log.append(sequence=sequence, producer_epoch=1) for sequence in range(3)]
    new = [log.append(sequence=sequence, producer_epoch=2) for sequence in range(2)]

    assert not any(chunk.duplicate for chunk in old + new)
    assert [chunk.first_record for chunk in old + new] == [0, 1, 2, 3, 4]
    again = log.append(sequence=0, producer_epoch=2)
    assert place(again) == place(new[0]._replace(duplicate=True)), "not that of the old epoch"
    assert refuse(log, OutOfSequence, sequence=3, producer_epoch=2).attributes["expected_sequence"] == 2


def test_a_repeat_is_not_mistaken_for_a_chunk_of_an_older_epoch_in_memory(log: Log) -> None:
    old = [log.append(sequence=sequence, producer_epoch=1) for sequence in range(4)]
    log.append(sequence=0, producer_epoch=2, size=SLOT_BYTES)
    log.append(producer=2)
    log.engine.run()
    log.engine.fill_memory()
    log.engine.memory.slots.allocate()
    log.engine.memory.slots.allocate().retire()  # room for one, not for those ahead of it
    log.read(position(old[0]), Position(1, 1, SLOT_BYTES))
    assert [segment.key for segment in log.segments()] == [(1, 1), (2, 1)], "that of the older epoch was loaded"

    assert place(log.append(sequence=0, producer_epoch=2, size=SLOT_BYTES)) == (0, 0, 0, 0, 0, True)


def test_a_newer_epoch_that_does_not_begin_with_0_is_refused_and_fences_no_other(log: Log) -> None:
    log.append(sequence=0, producer_epoch=1)
    error = refuse(log, OutOfSequence, sequence=1, producer_epoch=2)

    assert error.attributes["expected_sequence"] == 0
    assert not log.append(sequence=1, producer_epoch=1).duplicate, "the old epoch goes on"


@pytest.mark.parametrize(("size", "error"), [(SLOT_BYTES + 64, RecordTooLarge), (SLOT_BYTES, ArenaFull)])
def test_a_newer_epoch_whose_first_chunk_is_not_stored_fences_no_other(
    make_engine: MakeEngine, size: int, error: type[KeraError]
) -> None:
    log = Log(make_engine(slots=1))
    log.append(sequence=0, producer_epoch=1, size=CHUNK_BYTES)
    refuse(log, error, sequence=0, producer_epoch=2, size=size)

    assert not log.append(sequence=1, producer_epoch=1).duplicate
