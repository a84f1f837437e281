"""Merging replicas: after any loss within the promise, all acknowledged chunks are recovered, in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kera.broker.log.scan import address_of
from kera.broker.records import SegmentAddress
from kera.broker.recovery.merge import Merge, Recovered
from kera.core.base.ids import EntryId
from kera.core.format.chunk import ChunkHeader, padded, read_header
from kera.core.format.header_table import as_headers, table
from tests.unit.broker.support import ADDRESS, placed

BASE = read_header(placed(address=ADDRESS))
SEGMENT_BYTES = 4096
ENTRIES = 3


@dataclass
class Log:
    """The chunks that a broker has appended to an entry, with their positions."""

    entry: EntryId
    headers: list[ChunkHeader] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def append(self, records: int, payload_bytes: int) -> ChunkHeader:
        last = self.headers[-1] if self.headers else None
        size = 128 + padded(payload_bytes)
        segment, position, first = 1, 0, 0
        if last is not None and not last.record_count:
            records = max(1, records)  # several chunks without records at one place have an unknown order
        if last is not None:
            segment, first = last.segment_id, last.first_record + last.record_count
            position = self.positions[-1] + last.chunk_bytes
            if position + size > SEGMENT_BYTES:
                segment, position = segment + 1, 0
        header = BASE._replace(
            stream_id=self.entry.stream_id,
            streamlet_id=self.entry.streamlet_id,
            entry=self.entry.entry,
            group_id=1,
            segment_id=segment,
            first_record=first,
            record_count=records,
            payload_bytes=payload_bytes,
            payload_crc32c=len(self.headers),
            placement_crc32c=self.entry.streamlet_id,
        )
        self.headers.append(header)
        self.positions.append(position)
        return header


@dataclass
class Case:
    """Logs, and the rest of their virtual segments: chunks, and whether these were closed."""

    logs: list[Log]
    acknowledged: dict[EntryId, int]
    left: list[tuple[list[ChunkHeader], bool]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    logs = [Log(EntryId(7, number, 0)) for number in range(ENTRIES)]
    sizes = st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 5), st.integers(1, 1500))
    chunks = [logs[which].append(records, size) for which, records, size in draw(st.lists(sizes, max_size=40))]
    durable = draw(st.integers(0, len(chunks)))
    acknowledged: dict[EntryId, int] = {}
    for header in chunks[:durable]:
        entry = EntryId(header.stream_id, header.streamlet_id, header.entry)
        acknowledged[entry] = header.first_record + header.record_count
    # Whole virtual segments of the acknowledged chunks; of the rest, any that happened to arrive.
    cuts = sorted(draw(st.sets(st.integers(0, durable), max_size=4)) | {0, durable})
    left = [(chunks[start:end], draw(st.booleans())) for start, end in pairwise(cuts)]
    # (A chunk without records that was never acknowledged may vanish without a trace: its ordinals leave no hole.)
    left.append(([header for header in chunks[durable:] if draw(st.booleans()) or not header.record_count], False))
    # Some chunks were sent again, elsewhere.
    left += [([draw(st.sampled_from(chunks))], False) for _ in range(draw(st.integers(0, 5))) if chunks]
    return Case(logs, acknowledged, draw(st.permutations(left)))


def recover(case: Case) -> Recovered:
    merge = Merge({log.entry: 0 for log in case.logs})
    for headers, closed in case.left:
        merge.add(table(headers), closed=closed)
    return merge.finish()


@given(cases())
def test_all_acknowledged_chunks_and_no_unsent_ones_are_merged_once_in_place(case: Case) -> None:
    result = recover(case)

    for log in case.logs:
        runs = [run for run in result.runs if EntryId(*run.address[:3]) == log.entry]
        found = [chunk for run in runs for chunk in as_headers(run.chunks)]
        assert [chunk.first_record for chunk in found] == [each.first_record for each in log.headers[: len(found)]]
        assert (found[-1].first_record + found[-1].record_count if found else 0) >= case.acknowledged.get(log.entry, 0)
        positions = []
        for run in runs:
            at = 0
            for chunk in as_headers(run.chunks):
                positions.append(at)
                at += chunk.chunk_bytes
        assert positions == log.positions[: len(found)]
        addresses = [SegmentAddress(*log.entry, each.group_id, each.segment_id) for each in log.headers[: len(found)]]
        assert [address_of(chunk) for chunk in found] == addresses


@given(cases())
def test_each_remaining_chunk_is_in_a_run_once_or_is_cut(case: Case) -> None:
    result = recover(case)

    came = {header for headers, _ in case.left for header in headers}
    in_runs = sum(len(run.chunks) for run in result.runs)
    cut = sum(len(each.chunks) for each in result.cuts)
    assert in_runs + cut == len(came)
