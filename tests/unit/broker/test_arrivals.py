"""Segments that arrive from elsewhere: their records, the readers that wait, and removals before the arrival."""

import os
from pathlib import Path
from typing import Any

from kera.broker.log.segment import Segment
from kera.broker.records import EntryRecord, Gap, Graft, OriginRecord, SegmentRecord
from kera.broker.storage.index_format import put_entry, put_origin, put_segment, streamlet_of
from kera.broker.storage.loads import AWAITED_MS
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import Recovering
from tests.unit.broker.persistence_support import flushed
from tests.unit.broker.support import ADDRESS, CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Engine, Log, Outcome, placed


def record_of(first_record: int, physical_id: int = 0) -> SegmentRecord:
    return SegmentRecord(physical_id, SLOT_BYTES, False, 4, 0, first_record, 4, 10, 20, 5)


def to_come(engine: Engine, segments: int = 3, **options: Any) -> Log:
    """A streamlet whose `segments` segments, in groups of two, have all yet to arrive."""
    addresses = [ADDRESS._replace(group_id=1 + at // 2, segment_id=1 + at % 2) for at in range(segments)]
    changes = [put_segment(address, record_of(4 * at)) for at, address in enumerate(addresses)]
    last = addresses[-1]
    entry = EntryRecord(
        Position(1, 1, 0), 0, 4 * segments, segments * SLOT_BYTES, segments, last.group_id, last.segment_id
    )
    engine.index.commit([*changes, put_entry(last[:3], entry)])  # type: ignore[arg-type]
    return Log(engine, **options)


def arrive(engine: Engine, log: Log, key: tuple[int, int], outcome: Outcome) -> Path:
    """Complete the file of a segment, and install it."""
    physical_id = engine.memory.ids.take()
    address = log.entry.address(key)
    record = engine.index.segment(address)
    assert record is not None
    path = engine.store.arriving_path(physical_id)
    path.parent.mkdir(exist_ok=True)
    chunks = [
        placed(at, address, first_record=record.first_record + at, size=CHUNK_BYTES)
        for at in range(record.record_count)
    ]
    path.write_bytes(b"".join(chunks))
    engine.memory.arrivals.install(log.entry, key, record._replace(physical_id=physical_id), outcome)
    return path


def test_a_segment_keeps_its_place_before_its_arrival_and_is_loaded_after_it(engine: Engine) -> None:
    log = to_come(engine)
    assert (log.entry.next_record, log.streamlet.next_group_id) == (12, 3)
    assert log.entry.recovering((1, 1))
    waiting, outcome = Outcome(), Outcome()
    engine.memory.loads.load(log.entry, (1, 1), waiting)
    engine.run()
    assert waiting.calls == []
    path = arrive(engine, log, (1, 1), outcome)
    engine.run()

    assert (outcome.calls, waiting.calls) == ([None], [None])
    assert not log.entry.recovering((1, 1))
    assert not path.exists()
    assert log.read(bytes_max=SLOT_BYTES)[0] == [0, 1, 2, 3]


def test_a_recovery_learns_what_readers_wait_for_and_readers_time_out(engine: Engine) -> None:
    log = to_come(engine)
    wanted = []
    engine.memory.events.awaited.listen(lambda entry, key: wanted.append((entry, key)))
    outcome = Outcome()
    engine.memory.loads.load(log.entry, (1, 2), outcome)
    engine.run()
    engine.memory.loads.load(log.entry, (2, 1))  # ahead: no reader waits
    engine.run()
    assert wanted == [(log.entry, (1, 2))]
    engine.memory.tick(AWAITED_MS - 1, idle_close_ms=1 << 40)
    assert outcome.calls == []
    engine.memory.tick(AWAITED_MS, idle_close_ms=1 << 40)

    (error,) = outcome.calls
    assert isinstance(error, Recovering)


def test_new_chunks_go_behind_segments_that_have_yet_to_arrive(engine: Engine) -> None:
    log = to_come(engine)
    appended = log.append()
    assert (appended.group_id, appended.first_record) == (3, 12)
    engine.memory.segments.close_all()
    engine.run()
    assert log.entry.last_stored == (3, 1)
    assert [key for key, _ in log.entry.segments()] == [(1, 1), (1, 2), (2, 1), (3, 1)]


def test_a_segment_removed_before_its_arrival_does_not_come_back(engine: Engine) -> None:
    log = to_come(engine)
    log.entry.start, log.entry.start_record = Position(2, 1, 0), 8
    outcome = Outcome()
    engine.memory.removals.collect(log.entry, outcome)
    engine.run()
    assert outcome.calls == [None]
    assert engine.index.removals() == []
    late = Outcome()
    address = log.entry.address((1, 1))
    engine.memory.arrivals.install(log.entry, (1, 1), record_of(0, physical_id=7), late)
    engine.run()

    assert late.calls == [None]
    assert engine.index.segment(address) is None
    assert log.entry.stored_segments == 1


def test_a_failed_write_to_the_index_is_tried_again(engine: Engine) -> None:
    log = to_come(engine)
    outcome = Outcome()
    arrive(engine, log, (1, 1), outcome)
    jobs = engine.memory.plan()
    jobs[0].error = OSError(28, os.strerror(28), "index")
    engine.memory.finished(jobs[0])
    assert outcome.calls == []
    engine.memory.tick(1 << 20, idle_close_ms=1 << 40)
    engine.run()
    assert outcome.calls == [None]


def test_segments_are_grafted_before_and_behind_existing_ones(engine: Engine) -> None:
    log = flushed(Log(engine, first_group_id=1), 1)
    entry = log.entry
    key = (5, 1)
    address = entry.address(key)
    graft = Graft(Position(*key, 0), 20, 24, SLOT_BYTES, 1, Position(*key, SLOT_BYTES))
    outcome = Outcome()
    engine.memory.arrivals.graft({entry: graft}, [put_segment(address, record_of(20))], outcome)
    engine.run()
    assert outcome.calls == [None]
    assert (entry.start, entry.last_stored, entry.next_record) == (Position(1, 1, 0), key, 24)
    assert (entry.stored_segments, entry.stored_bytes) == (2, 2 * SLOT_BYTES)
    middle = entry.address((3, 1))
    graft = Graft(Position(3, 1, 0), 8, 12, SLOT_BYTES, 1, Position(3, 1, SLOT_BYTES))
    engine.memory.arrivals.graft({entry: graft}, [put_segment(middle, record_of(8))], Outcome())
    engine.run()

    assert [found for found, _ in entry.segments()] == [(1, 1), (3, 1), (5, 1)]
    assert engine.index.entry(entry.log_id) == entry.record()
    assert entry.record().next_record == 24
    nothing = Graft(EARLIEST, 0, 0, 0, 0, EARLIEST)
    engine.memory.arrivals.graft({entry: nothing}, [], Outcome())
    engine.run()
    assert entry.record().next_record == 24


def test_an_entry_without_records_starts_where_its_graft_starts(engine: Engine) -> None:
    """The records between were removed at the lost broker: readers at them must get an error."""
    entry = flushed(Log(engine, first_group_id=1), 1).entry
    entry.move_start(Position(2, 1, 0), 4)
    engine.memory.removals.collect(entry)
    engine.run()
    assert entry.stored_segments == 0

    def start_after(graft: Graft) -> tuple[Position, int, int]:
        engine.memory.arrivals.graft({entry: graft}, [], Outcome())
        engine.run()
        return entry.start, entry.start_record, entry.next_record

    lost = Gap(Position(3, 1, 0), Position(5, 1, 0))
    later = Graft(Position(5, 1, 0), 20, 20, 0, 0, EARLIEST)
    assert start_after(Graft(Position(2, 1, 512), 6, 6, 0, 0, EARLIEST)) == (Position(2, 1, 512), 6, 6)
    assert start_after(Graft(EARLIEST, 0, 8, 0, 0, EARLIEST)) == (Position(2, 1, 512), 6, 8)
    assert start_after(Graft(Position(1, 1, 0), 0, 0, 0, 0, EARLIEST)) == (Position(2, 1, 512), 6, 8)
    assert start_after(later._replace(gaps=(lost,))) == (Position(2, 1, 512), 6, 20), "what is lost is told as lost"


def test_a_graft_is_not_overwritten_by_the_retry_of_an_older_change(engine: Engine) -> None:
    """The disk refused the start of an entry; the graft of a takeover meanwhile starts earlier."""
    memory, entry_id = engine.memory, EntryId(STREAM_ID, 0, 0)
    older, newer = EntryRecord(Position(2, 1, 0), 16, 16), EntryRecord(Position(1, 1, 0), 0, 16, stored_segments=1)
    memory.index_writer.note([put_entry(entry_id, older)], Outcome())
    jobs = memory.plan()
    jobs[0].error = OSError(5, os.strerror(5), "index")
    memory.finished(jobs[0])
    outcome = Outcome()
    memory.arrivals.graft({}, [put_entry(entry_id, newer)], outcome)
    assert memory.plan() == [], "it waits"

    memory.tick(1 << 20, idle_close_ms=1 << 40)
    engine.run()
    assert outcome.calls == [None]
    assert engine.index.entry(entry_id) == newer


def test_one_streamlet_can_be_dropped_without_its_stream(engine: Engine) -> None:
    one, other = to_come(engine), Log(engine)
    flushed(other, 2)
    kept = other.entry.stored_segments
    other_files = [record.physical_id for _, record in engine.index.segments_of_streamlet(STREAM_ID, 1)]
    gone: list[object] = []
    engine.events.gone.listen(gone.append)
    engine.index.commit([put_origin(STREAM_ID, 0, OriginRecord(frozenset({(1, 9)}), 4, 0))])
    one.streamlet.drop()
    outcome = Outcome()
    engine.memory.removals.drop_streamlet(STREAM_ID, 0, outcome)
    engine.run()

    assert outcome.calls == [None]
    assert engine.index.keys_of_streamlet(STREAM_ID, 0) == []
    assert len(gone) == 3
    assert len(list(engine.index.segments_of_streamlet(STREAM_ID, 1))) == kept
    assert all(engine.store.path(physical_id).exists() for physical_id in other_files)
    assert {streamlet_of(key) for key in engine.index.keys_of_stream(STREAM_ID)} == {(STREAM_ID, 1)}


def test_the_origin_of_a_streamlet_is_stored_with_its_next_group_id(engine: Engine) -> None:
    record = OriginRecord(frozenset({(1, 9), (2, 12)}), 77, 3)
    engine.index.commit([put_origin(STREAM_ID, 4, record)])
    assert engine.index.origin(STREAM_ID, 4) == record
    assert engine.index.origin(STREAM_ID, 5) is None
    assert Log(engine, streamlet_id=4).streamlet.next_group_id == 77


def test_an_arrived_segment_is_loaded_like_any_other(engine: Engine) -> None:
    log = to_come(engine, 1)
    arrive(engine, log, (1, 1), Outcome())
    engine.run()
    assert log.read()[0] == [0, 1, 2, 3]
    assert isinstance(log.entry.find((1, 1)), Segment)
