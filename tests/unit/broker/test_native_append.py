"""The native core's way of chunks into memory, beside the one in Python: both do the same with whatever comes.

Two brokers are sent the same requests, of good chunks and of all that may be wrong with one. Everything that can be
seen of them has to be equal: answers, segments byte by byte, producers, counters, and what goes to backups.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from random import Random
from typing import Any

import pytest

from kera.broker.log.intervals import Holding
from kera.broker.serving import write
from kera.broker.serving.write_access import AppendRules
from kera.core.native import native
from tests.native_twins import needs_native
from tests.unit.broker.native_support import PRODUCERS, Producers, Side, good
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import CHUNK_BYTES

pytestmark = needs_native

REQUESTS = 60


class Counting:
    """The native core, and how many chunks it has appended."""

    def __init__(self) -> None:
        self.chunks = 0

    def append_chunks(self, *arguments: Any) -> Any:
        assert native is not None
        result = native.append_chunks(*arguments)
        self.chunks += result[2]
        return result


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
async def test_both_do_the_same_with_whatever_comes(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    lag_bytes_max = random.choice([4 * CHUNK_BYTES, 1 << 30])
    counting = Counting()
    monkeypatch.setattr(write, "native", counting)
    by_native = Side(make_engine, lag_bytes_max=lag_bytes_max)
    monkeypatch.setattr(write, "native", None)
    by_python = Side(make_engine, lag_bytes_max=lag_bytes_max)
    producers = Producers(random)
    for _ in range(REQUESTS):
        data, durability = producers.request()
        for side in (by_native, by_python):
            side.send(data, durability)
        if random.random() < 0.3:
            await by_native.go_on()
            await by_python.go_on()
        if random.random() < 0.5:  # what is not looked at, the core remembers from one request to the next
            assert list(by_native.seen()) == list(by_python.seen())
    assert await by_native.finish() == await by_python.finish()
    assert list(by_native.seen()) == list(by_python.seen())
    assert by_native.broker.counters.chunks_appended > REQUESTS
    assert by_native.broker.counters.chunks_refused > REQUESTS // 2
    assert counting.chunks > by_native.broker.counters.chunks_appended // 8


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
async def test_both_keep_the_promises_of_epochs(
    seed: int, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    limits = {"epoch_ms": 1, "epoch_grace_ms": 1, "timestamp_ahead_max_ms": random.choice([0, 1])}
    counting = Counting()
    monkeypatch.setattr(write, "native", counting)
    by_native = Side(make_engine, settings=limits)
    monkeypatch.setattr(write, "native", None)
    by_python = Side(make_engine, settings=limits)
    now_us = 10_000
    producers = Producers(random, odd=0.1, times=lambda: now_us + random.choice([1500, *range(-4000, -900, 70)]))
    for _ in range(REQUESTS):
        data, durability = producers.request()
        now_us += random.randrange(200)
        place = random.choice([7, 8, 9, 10]), random.choice([0, 1]), random.random() < 0.3
        for side in (by_native, by_python):
            side.engine.memory.tick(0, now_us, idle_close_ms=1 << 40)
            if place[2]:
                streamlet = side.broker.streams.streamlet(*place[:2])
                for entry in streamlet.entries:
                    streamlet.promise(entry)
            side.send(data, durability)
        if random.random() < 0.3:
            await by_native.go_on()
            await by_python.go_on()
    assert await by_native.finish() == await by_python.finish()
    assert list(by_native.seen()) == list(by_python.seen())
    assert by_native.broker.counters.punctuations > 2
    assert counting.chunks > by_native.broker.counters.chunks_appended // 8


async def test_what_is_remembered_is_what_python_finds_when_it_looks(make_engine: MakeEngine) -> None:
    side = Side(make_engine)
    streamlet = side.broker.streams.streamlet(7, 0)
    random = Random(2)
    following = dict.fromkeys(PRODUCERS[1:3], 0)  # which the core remembers in one place
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
async def test_what_is_remembered_does_not_outlive_what_it_is_about(make_engine: MakeEngine, change: str) -> None:
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


async def test_nothing_of_what_was_looked_at_is_kept(make_engine: MakeEngine) -> None:
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


@pytest.mark.parametrize(
    "arguments", [(), (1,) * 8, ((), None, b"", 0, 0, 0, 0, 0), ((1,) * 6, None, b"", 0, 0, 0, 0, 0)]
)
def test_a_call_that_is_none_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.append_chunks(*arguments)


@pytest.mark.parametrize("change", [{3: -1}, {4: -1}])
def test_places_before_the_start_are_refused(change: dict[int, int]) -> None:
    assert native is not None
    arguments: list[Any] = [({}, None, None, tuple, 0, True, None), None, b"x", 0, 1, 0, 0, 0]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(ValueError, match="negative"):
        native.append_chunks(*arguments)


def test_the_fields_of_the_rules_are_those_that_c_reads() -> None:
    assert native is not None
    assert tuple(native.APPEND_RULES.split()) == AppendRules._fields


def test_beyond_the_end_there_is_nothing() -> None:
    assert native is not None
    rules: tuple[Any, ...] = ({}, None, None, tuple, 0, True, None)
    assert native.append_chunks(rules, None, b"x" * 200, 100, 9, 0, 0, 0) == (100, b"", 0, 0, 0)
    assert native.append_chunks(rules, None, b"", 0, 9, 0, 0, 0) == (0, b"", 0, 0, 0)
    assert native.append_chunks(rules, None, b"x", 1 << 62, 9, 0, 0, 0) == (1 << 62, b"", 0, 0, 0)


def test_what_the_broker_should_have_and_has_not_is_an_error_and_nothing_is_appended() -> None:
    assert native is not None
    data = good(Random(1), stream_id=7)
    rules = ({7: object()}, None, None, tuple, 0, True, None)
    with pytest.raises(AttributeError):
        native.append_chunks(rules, None, data, 0, 9, 0, 0, 0)
