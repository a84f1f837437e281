"""Recovery plans for any rest on backups and on this broker: each record keeps its place, and losses are reported."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from kera.broker.log.intervals import Interval
from kera.broker.records import EntryRecord, Gap, ProducerRecord, SegmentAddress, SegmentRecord
from kera.broker.recovery.layout import places
from kera.broker.recovery.merge import digest_of
from kera.broker.recovery.plan import EntryStart, Known, StreamletMerge, StreamletPlan
from kera.core.base.ids import Position
from kera.core.format.chunk import ChunkHeader, padded, read_header
from kera.core.format.header_table import table
from tests.unit.broker.support import ADDRESS, placed

BASE = read_header(placed(address=ADDRESS))
SEGMENT_BYTES = 4096
GROUP_SEGMENTS = 2
ENTRIES = 2
STREAM, STREAMLET = 7, 3


@dataclass
class Appended:
    """A chunk and its position."""

    header: ChunkHeader
    position: int

    @property
    def address(self) -> SegmentAddress:
        header = self.header
        return SegmentAddress(STREAM, STREAMLET, header.entry, header.group_id, header.segment_id)

    @property
    def end_record(self) -> int:
        return self.header.first_record + self.header.record_count


def appended(sizes: list[tuple[int, int, int]], durable: list[bool]) -> list[Appended]:
    """Append chunks as a broker does; `sizes` has entry, records and payload bytes of each."""
    log: list[Appended] = []
    last: dict[int, Appended] = {}
    sequences: dict[int, int] = {}
    group = 0
    for (entry, records, payload), is_durable in zip(sizes, durable, strict=True):
        before = last.get(entry)
        size = 128 + padded(payload)
        key, position = (0, 0), 0
        if before is not None:
            position = before.position + before.header.chunk_bytes
            key = (before.header.group_id, before.header.segment_id)
        if before is None or position + size > SEGMENT_BYTES:
            position = 0
            if before is not None and key[1] < GROUP_SEGMENTS:
                key = (key[0], key[1] + 1)
            else:
                group += 1
                key = (group, 1)
        header = BASE._replace(
            stream_id=STREAM,
            streamlet_id=STREAMLET,
            entry=entry,
            group_id=key[0],
            segment_id=key[1],
            first_record=before.end_record if before is not None else 0,
            record_count=records,
            payload_bytes=payload,
            payload_crc32c=len(log),
            producer_id=entry,
            sequence=sequences.get(entry, 0),
            durable_head=position if is_durable else 0,
        )
        sequences[entry] = header.sequence + 1
        last[entry] = Appended(header, position)
        log.append(last[entry])
    return log


@st.composite
def logs(draw: st.DrawFn, records_min: int = 1, payload_min: int = 1, chunks_min: int = 0) -> list[Appended]:
    sizes = st.tuples(st.integers(0, ENTRIES - 1), st.integers(records_min, 5), st.integers(payload_min, 1500))
    found = draw(st.lists(sizes, min_size=chunks_min, max_size=24))
    return appended(found, [draw(st.booleans()) for _ in found])


KNOWN = Known(STREAM, STREAMLET, ENTRIES, (Interval(0),))


def plan_of(merge: StreamletMerge) -> StreamletPlan:
    return merge.plan([None] * ENTRIES, {})


def segments_of(plan: StreamletPlan) -> dict[SegmentAddress, SegmentRecord]:
    return {address: record for entry in plan.entries for address, record in entry.new.items()}


@given(logs(records_min=0), st.randoms(use_true_random=False))
def test_a_complete_log_gets_all_its_places_back(log: list[Appended], random: object) -> None:
    merge = StreamletMerge(KNOWN, {})
    shuffled = [*log, *log[:5]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for each in shuffled:
        merge.add(table([each.header]), closed=False)
    plan, chunks = plan_of(merge), merge.chunks()

    assert (plan.records_lost, plan.chunks_cut) == (0, 0)
    assert [entry.gaps for entry in plan.entries] == [()] * ENTRIES
    segments = segments_of(plan)
    assert set(segments) == {each.address for each in log}
    for address, record in segments.items():
        mine = [each for each in log if each.address == address]
        found = places(record, chunks[address])
        numbers = [found.find(each.header.first_record, digest_of(each.header)) for each in mine]
        assert set(numbers) == set(range(len(mine))), "each chunk has a place of its own"
        for number, each in zip(
            numbers, mine, strict=True
        ):  # chunks without records only change places among themselves
            assert number is not None
            assert found.positions[number] == each.position or not each.header.record_count
        assert record.length == mine[-1].position + mine[-1].header.chunk_bytes
        assert (record.first_record, record.record_count) == (
            mine[0].header.first_record,
            mine[-1].end_record - mine[0].header.first_record,
        )
    for entry in range(ENTRIES):
        mine = [each for each in log if each.header.entry == entry]
        record_ = plan.entries[entry].record
        assert record_.next_record == (mine[-1].end_record if mine else 0)
        assert record_.stored_segments == len({each.address for each in mine})
        assert record_.stored_bytes == sum(each.header.chunk_bytes for each in mine)
        if mine:
            assert record_.start == Position(mine[0].header.group_id, 1, 0)
            assert plan.producers[entry] == ProducerRecord(0, len(mine))
    assert plan.next_group_id == max((each.header.group_id for each in log), default=0) + 1


@given(logs(), st.data())
def test_lost_records_are_counted_and_the_rest_fits_at_its_place(log: list[Appended], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.integers(0, len(log) - 1), max_size=6)) if log else set()
    merge = StreamletMerge(KNOWN, {})
    for number, each in enumerate(log):
        if number not in lost:
            merge.add(table([each.header]), closed=True)
    plan, chunks = plan_of(merge), merge.chunks()

    segments = segments_of(plan)
    known_lost = 0
    for entry in range(ENTRIES):
        mine = [(number, each) for number, each in enumerate(log) if each.header.entry == entry]
        last = max((at for at, (number, _) in enumerate(mine) if number not in lost), default=-1)
        known_lost += sum(each.header.record_count for number, each in mine[: last + 1] if number in lost)
    assert plan.records_lost == known_lost
    for address, record in segments.items():
        found = places(record, chunks[address])
        true_ones = {each.header.first_record: each for each in log if each.address == address}
        ends = 0
        whole = True
        for first_record, position in zip(found.first_records, found.positions, strict=True):
            true = true_ones[first_record]
            assert ends <= position <= true.position, "it fits, and nothing is where something else was"
            whole = whole and all(
                number not in lost
                for number, each in enumerate(log)
                if each.address == address and each.header.first_record < first_record
            )
            if whole:
                assert position == true.position
            ends = position + true.header.chunk_bytes
        assert record.length >= ends


@given(logs(), st.data())
def test_present_segments_are_not_recovered_again_and_fill_gaps(log: list[Appended], data: st.DataObject) -> None:
    addresses = sorted({each.address for each in log})
    here = data.draw(st.sets(st.sampled_from(addresses))) if addresses else set()
    present: dict[int, list[tuple[SegmentAddress, SegmentRecord]]] = {}
    for address in sorted(here):
        mine = [each for each in log if each.address == address]
        record = SegmentRecord(
            physical_id=1,
            length=mine[-1].position + mine[-1].header.chunk_bytes,
            open=False,
            chunk_count=len(mine),
            crc32c=1,
            first_record=mine[0].header.first_record,
            record_count=mine[-1].end_record - mine[0].header.first_record,
            min_timestamp_us=0,
            max_timestamp_us=0,
            newest_us=0,
        )
        present.setdefault(address.entry, []).append((address, record))
    also = data.draw(st.booleans())
    merge = StreamletMerge(KNOWN, present)
    for each in log:
        if also or each.address not in here:
            merge.add(table([each.header]), closed=True)
    plan = plan_of(merge)

    assert set(segments_of(plan)) == set(addresses) - here
    assert (plan.records_lost, [entry.gaps for entry in plan.entries]) == (0, [()] * ENTRIES)
    for entry in range(ENTRIES):
        mine = [each for each in log if each.header.entry == entry]
        assert plan.entries[entry].record.stored_bytes == sum(each.header.chunk_bytes for each in mine)


@given(logs(payload_min=1000, chunks_min=13), st.data())  # at least three groups: six such chunks fill one
def test_intervals_of_other_brokers_are_not_gaps(log: list[Appended], data: st.DataObject) -> None:
    first = data.draw(st.integers(2, max(each.header.group_id for each in log) - 1))
    end = first + 1
    ours = [each for each in log if each.header.group_id != first]

    def records_before(group: int) -> tuple[int, ...]:
        return tuple(
            sum(each.header.record_count for each in log if each.header.entry == entry and each.header.group_id < group)
            for entry in range(ENTRIES)
        )

    intervals = (
        Interval(0, first, (), records_before(first)),
        Interval(end, first_records=records_before(end), leads=False),
    )
    known = Known(STREAM, STREAMLET, ENTRIES, intervals)
    merge = StreamletMerge(known, {})
    for each in log:
        merge.add(table([each.header]), closed=True)
    plan = plan_of(merge)
    assert set(segments_of(plan)) == {each.address for each in ours}
    assert plan.records_lost == 0
    assert all(not entry.gaps for entry in plan.entries)


def test_a_recorded_gap_is_dropped_when_the_ordinals_are_continuous() -> None:
    later = SegmentAddress(*ADDRESS[:3], 1 << 24, 1)
    merge = StreamletMerge(KNOWN, {})
    for address, first_record in ((ADDRESS, 0), (later, 1)):
        merge.add(table([read_header(placed(0, address, first_record=first_record), 0)]), closed=True)
    gap = Gap(Position(1, 1, 1024), Position(9, 1, 0))
    old = EntryRecord(start=Position(1, 1, 0), gaps=(gap,))

    plan = merge.plan([old, *[None] * (ENTRIES - 1)], {})

    assert plan.records_lost == 0
    assert plan.entries[0].record.gaps == ()
    assert plan.entries[0].record.next_record == 2


def test_a_producer_whose_only_chunk_was_removed_is_still_known() -> None:
    """Otherwise the same chunk, sent again because its answer was lost, would be stored a second time."""
    header = read_header(placed(0, ADDRESS))._replace(streamlet_id=STREAMLET)
    start = EntryStart(Position(ADDRESS.group_id, ADDRESS.segment_id + 1, 0), header.first_record + header.record_count)
    merge = StreamletMerge(replace(KNOWN, starts={0: start}, keeps_all=False), {})
    merge.add(table([header]), closed=True)

    plan = merge.plan([None] * ENTRIES, {})

    assert plan.producers == {header.producer_id: ProducerRecord(header.producer_epoch, header.sequence + 1)}
    assert segments_of(plan) == {}
    assert plan.entries[0].record.next_record == start.first_record
