"""State that the native core remembers from one append to the next, compared with the state in Python."""

from __future__ import annotations

import sys
from collections import defaultdict
from random import Random

import pytest

from kera.broker.log.intervals import Holding
from tests.native_twins import needs_native
from tests.unit.broker.native_support import PRODUCERS, Side, good
from tests.unit.broker.persistence_support import MakeEngine

pytestmark = needs_native


async def test_the_remembered_state_equals_the_state_in_python(make_engine: MakeEngine) -> None:
    side = Side(make_engine)
    streamlet = side.broker.streams.streamlet(7, 0)
    random = Random(2)
    following = dict.fromkeys(PRODUCERS[1:3], 0)  # the core remembers both in one place
    for _ in range(100):
        producer = random.choice(PRODUCERS[1:3])
        side.send([good(random, stream_id=7, producer=producer, sequence=following[producer])], 0)
        following[producer] += 1
    assert {producer: record.next_sequence for producer, record in streamlet.producers.items()} == following
    segments = [segment for entry in streamlet.entries.made for segment in entry.tail]
    assert len(segments) > 2
    assert sum(len(segment.chunk_ends) for segment in segments) == 100
    for segment in segments:
        headers = [segment.header_at(start) for start in (0, *segment.chunk_ends[:-1])]
        last = {header.producer_id: header.sequence + 1 for header in headers}
        assert {producer: record.next_sequence for producer, record in segment.producers.items()} == last
        assert segment.record_count == sum(header.record_count for header in headers)
    assert side.broker.counters.chunks_refused == 0


@pytest.mark.parametrize("change", ["seal", "let go", "forget", "fence", "drop"])
async def test_the_remembered_state_does_not_outlive_changes_of_its_streamlet(
    make_engine: MakeEngine, change: str
) -> None:
    side, random, producer = Side(make_engine), Random(3), PRODUCERS[0]
    stream, streamlet = side.broker.streams.get(7), side.broker.streams.streamlet(7, 0)
    for sequence in range(5):
        side.send([good(random, stream_id=7, producer=producer, sequence=sequence)], 0)
    match change:
        case "seal":
            streamlet.seal()
        case "let go":
            streamlet.hold(Holding(owned=False))
        case "forget":
            del streamlet.producers[producer]
        case "fence":
            streamlet.first_epochs = {producer: 9}
        case _:
            streamlet.drop()
            del stream.streamlets[0]
    side.send([good(random, stream_id=7, producer=producer, sequence=5)], 0)
    assert side.broker.counters.chunks_refused == 1
    assert side.broker.counters.chunks_appended == 5


async def test_the_native_core_keeps_no_references(make_engine: MakeEngine) -> None:
    side = Side(make_engine)
    streamlet = side.broker.streams.streamlet(7, 0)
    random = Random(1)
    kept: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for sequence in range(24):
        data = [good(random, stream_id=7, producer=PRODUCERS[0], sequence=sequence)]
        side.send([*data, *data, b"no chunk"], 0)
        segment = streamlet.entries[0].tail[-1]
        kept[segment.key].append(
            sum(map(sys.getrefcount, (streamlet, segment, segment.slot, segment.slot.view, segment.chunk_ends)))
        )
    counts = [each[1:] for each in kept.values() if len(each) > 2]  # the memory of a segment is looked up once
    assert counts
    assert all(len(set(each)) == 1 for each in counts)
