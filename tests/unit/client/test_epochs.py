"""Epochs without brokers: the epoch of a chunk, when an epoch closes, its rows, and where reading begins."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.chunk_batch import ChunkBatch, PushedSlot
from kera.client.cluster.fetch import Fetched, Wanted
from kera.client.epochs import beginning as beginnings
from kera.client.epochs.beginning import Beginning
from kera.client.epochs.entry_reader import EntryReader
from kera.client.epochs.epoch import Epoch, in_order
from kera.client.epochs.marks import Marker, epoch_of, parts
from kera.client.epochs.merging import Decision, Reached, decide
from kera.client.epochs.reader import Epochs, pause_s
from kera.client.settings import ConsumerSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import ClosedError, CorruptChunk, DataLost, InvalidArgument, Unavailable
from kera.core.format.chunk import HEADER_BYTES
from tests.unit.client.epoch_support import CREATED_AT, ENTRY, STREAM, chunk, punctuation, raw, together
from tests.unit.client.support import stream_info


def marked(chunks: list[ChunkBatch], epoch_us: int = 10) -> list[tuple[int, list[int]]]:
    marker = Marker(epoch_us)
    return [
        (epoch, [int(value) for value in each.batch["value"].to_pylist()])
        for one in chunks
        for epoch, each in marker.mark(one)
    ]


@pytest.mark.parametrize(("time_us", "epoch"), [(0, 0), (9, 0), (10, 1), (-1, -1), (-10, -1), (-11, -2)])
def test_epochs_are_counted_from_1970_in_both_directions(time_us: int, epoch: int) -> None:
    assert epoch_of(time_us, 10) == epoch


def test_a_chunk_is_of_the_epoch_of_the_greatest_time_so_far() -> None:
    assert marked([chunk([-15]), chunk([3]), chunk([25, 4]), chunk([9]), chunk([31])]) == [
        (-2, [-15]),
        (0, [3]),
        (2, [25, 4]),
        (2, [9]),
        (3, [31]),
    ]


def test_a_punctuation_advances_the_epoch_and_is_not_delivered() -> None:
    assert marked([chunk([3]), punctuation(29), chunk([5]), chunk([40])]) == [(0, [3]), (2, [5]), (4, [40])]


def test_joined_chunks_are_split_where_an_epoch_ends() -> None:
    chunks = [[1], [2, 3], [14], [9], [8, 35], [36]]
    expected = [(0, [1, 2, 3]), (1, [14, 9]), (3, [8, 35, 36])]
    assert marked([together(*chunks)]) == expected
    assert marked([together([1], [9])]) == [(0, [1, 9])]
    by_one: dict[int, list[int]] = {}
    for epoch, values in marked([chunk(each) for each in chunks]):
        by_one.setdefault(epoch, []).extend(values)
    assert list(by_one.items()) == expected, "as it is for who gets each by itself"


def test_parts_of_joined_chunks_have_their_own_positions_and_headers() -> None:
    whole = together([1], [2, 3], [14], [9])
    end = list(whole.ends())[1][1]
    first, rest = parts(whole, np.array([0, 2]))
    assert (first.start, first.next, rest.start, rest.next) == (whole.start, end, end, whole.next)
    assert [(each.header.first_record, each.header.record_count) for each in (first, rest)] == [(0, 3), (3, 2)]
    assert [(each.header.min_timestamp_us, each.header.max_timestamp_us) for each in (first, rest)] == [(1, 3), (9, 14)]
    assert [header.record_count for each in (first, rest) for header in each.headers] == [1, 2, 1, 1]
    assert [list(each.ends())[-1][1] for each in (first, rest)] == [end, whole.next]


# --- when an epoch closes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], Decision(None, ())),
        ([Reached("a", None, 5)], Decision(None, ("a",))),
        ([Reached("a", 3, 3)], Decision(3, ("a",))),
        ([Reached("a", 3, 4)], Decision(3, ())),
        ([Reached("a", 3, 4), Reached("b", None, 3)], Decision(3, ("b",))),
        ([Reached("a", 3, 4), Reached("b", None, 4)], Decision(3, ())),
        ([Reached("a", 3, 4), Reached("b", 2, 2)], Decision(2, ("b",))),
        ([Reached("a", 3, 4), Reached("b", None, None)], Decision(3, ())),
        ([Reached("a", None, None)], Decision(None, ())),
    ],
)
def test_an_epoch_closes_when_no_entry_can_get_more_of_it(entries: list[Reached[str]], expected: Decision[str]) -> None:
    assert decide(entries) == expected


ARRIVALS = ((4, 1, 1), (5, 2, 3), (6, 2, 4), (7, 1, 2), (8, 2, 6), (9, 1, 5))
"""The arrival, the source and the time of each event: table 4.1 of the dissertation."""


def waiting(may_go: Callable[[int, dict[int, int], dict[int, deque[int]]], bool]) -> int:
    """The total wait of all events that go before the last arrival; `may_go` gets event, watermarks and queues."""
    watermarks, queues = {1: 0, 2: 0}, {1: deque[int](), 2: deque[int]()}
    arrived: dict[int, int] = {}
    total = 0
    for now, source, time in ARRIVALS:
        arrived[time] = now
        watermarks[source] = time
        queues[source].append(time)
        while ready := [queue for queue in queues.values() if queue and may_go(queue[0], watermarks, queues)]:
            total += now - arrived[min(ready, key=lambda queue: queue[0]).popleft()]
    return total


def test_waiting_times_match_the_table_of_the_dissertation() -> None:
    """Epochs there are (0, 3] and (3, 6], so their times are ours a unit earlier."""

    def strictly(time: int, watermarks: dict[int, int], _: object) -> bool:
        return time <= min(watermarks.values())

    def by_epoch(time: int, watermarks: dict[int, int], _: object) -> bool:
        reached = [Reached(source, None, epoch_of(at - 1, 3)) for source, at in watermarks.items()]
        epoch = epoch_of(time - 1, 3)
        before = decide([Reached(0, epoch - 1, None), *reached])
        return not epoch or not before.waits_for

    assert waiting(strictly) == 8
    assert waiting(by_epoch) == 4
    assert waiting(lambda *_: True) == 0


async def test_only_an_entry_without_promises_by_design_is_not_waited_for() -> None:
    """With punctuation by the clock, a broker that has just started makes no promise yet, but will again."""
    wanted = Wanted(ENTRY, EARLIEST, None)
    cluster: Any = None
    reader = EntryReader(cluster, STREAM, wanted, ConsumerSettings(), epoch_us=10, first_epoch=None)
    empty = EntryBounds(EARLIEST, EARLIEST, 0, 0, 0)
    reader.learn(empty, by_clock=True)
    assert reader.reached().open is not None
    reader.learn(empty, by_clock=False)
    assert reader.reached().open is None
    with pytest.raises(DataLost, match="removed before"):
        reader.learn(EntryBounds(Position(1, 1, 64), Position(1, 1, 64), 1, 1, 0), by_clock=True)


class Given:
    """A fetcher that returns the given chunks, and then waits for ever."""

    def __init__(self, *fetched: Fetched) -> None:
        self._left = list(fetched)

    async def fetched(self) -> Fetched:
        if not self._left:
            await asyncio.Event().wait()
        return self._left.pop(0)


def entry_reader(data: bytes, end: Position) -> EntryReader:
    """A reader whose only chunk arrives with the answer that the next chunk is on another broker, at `end`."""
    cluster: Any = None
    settings = ConsumerSettings(shared_memory="never")
    reader = EntryReader(cluster, STREAM, Wanted(ENTRY, EARLIEST, None), settings, epoch_us=10, first_epoch=None)
    given: Any = Given(Fetched(ENTRY, Position(1, 1, 0), end, [pa.py_buffer(data)], 0, None))
    reader._fetcher = given
    reader.learn(EntryBounds(Position(1, 1, 0), end, 0, 1, 0), by_clock=True)
    return reader


async def test_an_entry_that_moved_after_its_last_chunk_is_read_to_its_end() -> None:
    reader = entry_reader(raw([25])[0], Position(4, 1, 0))
    async with asyncio.timeout(10):
        while reader.has_more:
            await reader.read(None)
    assert reader.read_to == (4, 1, 0)
    assert [chunk.batch["value"].to_pylist() for chunk in reader.take(2)] == [[b"25"]]


async def test_a_corrupt_chunk_stops_the_reader_each_time() -> None:
    data = bytearray(raw([25])[0])
    data[HEADER_BYTES] ^= 1
    reader = entry_reader(bytes(data), Position(4, 1, 0))
    for _ in range(2):
        with pytest.raises(CorruptChunk):
            await reader.read(None)
    assert reader.read_to == EARLIEST


async def test_a_chunk_overwritten_in_the_brokers_memory_is_read_again_before_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, _ = raw([25])
    start, end = Position(1, 1, 0), Position(1, 1, len(data))
    reader = entry_reader(data, end)
    await reader.read(None)
    (held,) = reader._pending
    generations = [4]
    reader._pending[0] = held._replace(chunk=held.chunk._replace(slot=PushedSlot(generations, 0, 4)))
    assert reader.is_intact(2)
    generations[0] = 5
    assert not reader.is_intact(2)

    async def again(wanted: Wanted) -> list[Fetched]:
        assert wanted == Wanted(ENTRY, start, end)
        return [Fetched(ENTRY, start, end, [pa.py_buffer(data)], 0, None)]

    monkeypatch.setattr(reader._chunks, "_read_again", again)
    await reader.read_again(2)
    assert reader.is_intact(2)
    (chunk,) = reader.take(2)
    assert (chunk.batch["value"].to_pylist(), chunk.pushed, reader.pending_bytes) == ([b"25"], False, 0)


# --- an epoch ----------------------------------------------------------------------------------------------


def epoch(*chunks: ChunkBatch, streams: dict[int, StreamDescription] | None = None) -> Epoch:
    return Epoch(2, 20, 30, chunks, streams or {7: STREAM})


def test_rows_are_sorted_by_time_and_then_by_place() -> None:
    found = epoch(chunk([25, 21]), chunk([21, 3], 2))
    assert found.rows()["value"].to_pylist() == [b"3", b"21", b"21", b"25"]
    assert (found.records, found.late_records) == (4, 1)
    assert epoch(chunk([20, 21])).rows()["value"].to_pylist() == [b"20", b"21"]
    assert epoch().rows().num_rows == 0


def test_records_without_a_time_get_the_time_of_their_own_chunk() -> None:
    info = stream_info("t", 7)
    info.schemas[0].typed, info.schemas[0].timestamp_column = True, "timestamp"
    whole = together([21, 22], [23])
    headers = bytearray(whole.joined)
    for number, created_us in enumerate((25, 15)):
        struct.pack_into("<q", headers, number * HEADER_BYTES + CREATED_AT, created_us)
    times = pa.array([None, 22, None], whole.batch.schema.field("timestamp").type)
    batch = whole.batch.set_column(0, "timestamp", times)
    whole = whole._replace(batch=batch, joined=bytes(headers))
    for chunks in ((whole,), tuple(parts(whole, np.array([0, 1])))):
        found = epoch(*chunks, streams={7: StreamDescription.from_message(info)})
        assert found.late_records == 1
        assert found.rows()["value"].to_pylist() == [b"23", b"22", b"21"]


def test_a_digest_depends_on_the_records_and_their_order_only() -> None:
    one, other = chunk([21]), chunk([22], 1)
    assert epoch(one, other).digest == epoch(one, other).digest
    assert len({epoch(one, other).digest, epoch(other, one).digest, epoch(one).digest, epoch().digest}) == 4
    assert epoch(together([21], [22])).digest == epoch(one, other).digest, "however they came"


def test_batches_are_in_the_order_in_which_the_streams_were_named() -> None:
    entries = [EntryId(9, 0, 0), EntryId(7, 1, 0), EntryId(7, 0, 1), EntryId(7, 0, 0)]
    chunks = {entry: [chunk([number])] for number, entry in enumerate(entries)}
    assert [each.header.min_timestamp_us for each in in_order(chunks, {9: 0, 7: 1})] == [0, 3, 2, 1]


def test_rows_of_streams_with_other_columns_are_refused() -> None:
    info = stream_info("t", 8)
    info.schemas[0].arrow_schema = pa.schema([("x", pa.int8())]).serialize().to_pybytes()
    info.schemas[0].typed = True
    typed = StreamDescription.from_message(info)
    other = chunk([21])._replace(entry=EntryId(8, 0, 0), batch=pa.record_batch({"x": pa.array([1], pa.int8())}))
    with pytest.raises(InvalidArgument, match="different columns"):
        epoch(chunk([21]), other, streams={7: STREAM, 8: typed}).rows()
    with pytest.raises(InvalidArgument, match="no timestamp column"):
        epoch(other, streams={8: typed}).rows()
    assert epoch(other, streams={8: typed}).late_records == 0


def test_rows_overwritten_in_the_brokers_memory_are_an_error() -> None:
    generations = [4]
    found = epoch(chunk([25, 21])._replace(slot=PushedSlot(generations, 0, 4)))
    rows = found.rows()
    assert rows["value"].to_pylist() == [b"21", b"25"]
    generations[0] = 5
    with pytest.raises(Unavailable, match="read the epoch again"):
        found.rows()


def test_rows_in_a_brokers_memory_are_copied_out() -> None:
    pushed = chunk([21, 25])._replace(slot=PushedSlot([4], 0, 4))
    theirs = pushed.batch["value"].buffers()[2].address
    assert epoch(pushed).rows()["value"].chunk(0).buffers()[2].address != theirs


def test_rows_older_than_a_column_have_nulls_in_it() -> None:
    info = stream_info("t", 7, schema=pa.schema([("at", pa.timestamp("us")), ("x", pa.int8())]), timestamp_column="at")
    info.schemas[0].typed = True
    stream = StreamDescription.from_message(info)
    older = pa.record_batch({"at": pa.array([25, 21], pa.timestamp("us"))})
    newer = pa.record_batch({"at": pa.array([23], pa.timestamp("us")), "x": pa.array([1], pa.int8())})
    found = epoch(chunk([25, 21])._replace(batch=older), chunk([23])._replace(batch=newer), streams={7: stream}).rows()
    assert found["x"].to_pylist() == [None, 1, None]


@pytest.mark.parametrize(("look_s", "pause"), [(0.0, 0.05), (0.001, 0.05), (0.02, 0.18), (0.1, 0.9), (5.0, 1.0)])
def test_a_waiting_reader_spends_about_a_tenth_of_its_time_on_lookups(look_s: float, pause: float) -> None:
    assert pause_s(look_s) == pytest.approx(pause)


async def test_epochs_closed_during_their_start_raise_closed_error() -> None:
    go_on = asyncio.Event()

    class Slow:
        async def stream(self, name: str) -> StreamDescription:
            return StreamDescription.from_message(stream_info(name, epoch_ms=10))

        async def bounds(self, *_: object, **__: object) -> dict[int, list[EntryBounds]]:
            await go_on.wait()
            return {}

    cluster: Any = Slow()
    epochs = Epochs(
        cluster, ["s"], ConsumerSettings(), epoch_ms=None, start="earliest", end=None, epoch_bytes_max=1 << 20
    )
    starting = asyncio.create_task(epochs.start())
    await asyncio.sleep(0)
    await epochs.close()
    go_on.set()
    with pytest.raises(ClosedError):
        await starting


class Removing:
    """A cluster where each lookup finds records up to the next of these times removed, and at the end the last."""

    def __init__(self, *times_us: int) -> None:
        self._times_us = times_us
        self.looks = 0

    async def bounds(self, *_: object, **__: object) -> dict[int, list[EntryBounds]]:
        removed_us = self._times_us[min(self.looks, len(self._times_us) - 1)]
        self.looks += 1
        there = Position(1, 1, self.looks)
        return {0: [EntryBounds(there, there, self.looks, 1000, 0, watermark_us=99, removed_watermark_us=removed_us)]}


async def nowhere(*_: object) -> dict[int, list[Any]]:
    return {}


def beginning(cluster: Any, start: Any) -> Beginning:
    return Beginning(cluster, [STREAM], ConsumerSettings(), start, epoch_us=10)


async def test_a_start_is_found_while_earlier_records_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings, "positions_at", nowhere)
    cluster = Removing(*range(80))
    found = await beginning(cluster, 5).find()
    assert (found.first, cluster.looks) == (5, 2)
    cluster = Removing(5, 15, 16)
    found = await beginning(cluster, "earliest").find()
    assert (found.first, cluster.looks) == (2, 3), "what came later is of the same epoch"


async def test_the_search_for_a_start_ends_when_records_are_removed_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beginnings, "positions_at", nowhere)
    with pytest.raises(DataLost, match="start with 'latest'"):
        await beginning(Removing(*range(0, 10_000, 10)), "earliest").find()
