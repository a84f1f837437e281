"""The native core's way of chunks into memory, beside the one in Python: both do the same with whatever comes.

Two brokers are sent the same requests, of good chunks and of all that may be wrong with one. Everything that can be
seen of them has to be equal: answers, segments byte by byte, producers, counters, and what goes to backups.
"""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest

from kera.broker.serving import write
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
        assert list(by_native.seen()) == list(by_python.seen())
    assert await by_native.finish() == await by_python.finish()
    assert list(by_native.seen()) == list(by_python.seen())
    assert by_native.broker.counters.chunks_appended > REQUESTS
    assert by_native.broker.counters.chunks_refused > REQUESTS // 2
    assert counting.chunks > by_native.broker.counters.chunks_appended // 8


async def test_nothing_of_what_was_looked_at_is_kept(make_engine: MakeEngine) -> None:
    side = Side(make_engine)
    streamlet = side.broker.streams.streamlet(7, 0)
    random = Random(1)
    kept: list[int] = []
    for sequence in range(12):
        data = [good(random, stream_id=7, producer=PRODUCERS[0], sequence=sequence)]
        side.send([*data, *data, b"no chunk"], 0)
        segment = streamlet.entries[0].tail[-1]
        kept.append(
            sum(map(sys.getrefcount, (streamlet, segment, segment.slot, segment.slot.view, segment.chunk_ends)))
        )
    assert len(set(kept[4:])) == 1


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
    arguments: list[Any] = [({}, None, None, tuple, 0, True), None, b"x", 0, 1, 0, 0, 0]
    for index, value in change.items():
        arguments[index] = value
    with pytest.raises(ValueError, match="negative"):
        native.append_chunks(*arguments)


def test_beyond_the_end_there_is_nothing() -> None:
    assert native is not None
    door: tuple[Any, ...] = ({}, None, None, tuple, 0, True)
    assert native.append_chunks(door, None, b"x" * 200, 100, 9, 0, 0, 0) == (100, b"", 0, 0, 0)
    assert native.append_chunks(door, None, b"", 0, 9, 0, 0, 0) == (0, b"", 0, 0, 0)
    assert native.append_chunks(door, None, b"x", 1 << 62, 9, 0, 0, 0) == (1 << 62, b"", 0, 0, 0)


def test_what_the_broker_should_have_and_has_not_is_an_error_and_nothing_is_appended() -> None:
    assert native is not None
    data = good(Random(1), stream_id=7)
    door = ({7: object()}, None, None, tuple, 0, True)
    with pytest.raises(AttributeError):
        native.append_chunks(door, None, data, 0, 9, 0, 0, 0)
