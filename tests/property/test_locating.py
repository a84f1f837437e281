"""Places and segments of a log agree with a walk over all its chunks, wherever the chunks are.

Chunks of any size, with any number of records and times that do not ascend, in memory or on disk only; the streamlet
moves between two brokers; some chunks have been removed, some are damaged. Everything but the network is real: the
test calls the client's `locate`, `segments` and `positions_at`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client.admin.locating import ChunkQuery, SegmentBounds, locate, positions_at, segments
from kera.client.positions import ChunkPlace
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import ArenaFull, DataLost
from kera.core.rpc import api
from tests.examples import examples
from tests.unit.broker.moving_support import Cluster as Map
from tests.unit.broker.support import SLOT_BYTES, STREAM_ID, Broker, chunk, cursor
from tests.unit.client.real_brokers import STREAM, RealBrokers, engines

ENTRIES = 2
NEVER_MS = 1 << 40


@dataclass
class Stored:
    """A chunk."""

    start: Position
    end: Position
    first_record: int
    next_record: int
    size: int
    time_us: int
    broker_id: int
    damaged: bool = False


@dataclass
class World:
    """Two brokers, and the expected chunks of each entry."""

    map: Map
    client: RealBrokers
    logs: list[list[Stored]] = field(default_factory=lambda: [[] for _ in range(ENTRIES)])
    now_ms: int = 0

    def append(self, size: int, records: int, time_us: int, entry: int) -> None:
        sequence = self.map.sequences[entry]
        data = chunk(entry, sequence, size=size, record_count=records, min_timestamp_us=0, max_timestamp_us=time_us)
        if self.map.owner.arena.free_slots < ENTRIES:
            self.to_disk(self.map.owner)  # so that the append need not wait for room
        (status,) = self.map.owner.append(data)
        assert not status.error.code, status.error
        self.map.sequences[entry] += 1
        start = Position(status.group_id, status.segment_id, status.position)
        end = start._replace(offset=start.offset + size)
        broker_id = self.map.info.assignments[0].broker_id
        first = status.first_record
        self.logs[entry].append(Stored(start, end, first, first + records, size, time_us, broker_id))

    def to_disk(self, broker: Broker) -> None:
        """Move all chunks of a broker to disk."""
        engine = broker.engine
        engine.memory.segments.close_all()
        engine.run()
        self.now_ms += 60_000
        engine.memory.tick(self.now_ms, idle_close_ms=NEVER_MS)  # no reader comes for segments that were read ahead
        engine.run()
        slots = engine.fill_memory()
        with contextlib.suppress(ArenaFull):
            while True:
                slots.append(engine.memory.slots.allocate())
        for slot in slots:
            slot.retire()
        engine.run()

    async def truncate(self, entry: int, number: int) -> None:
        log = self.logs[entry]
        if not log:
            return
        kept = log[number % (1 + len(log) // 3) :]
        for broker in self.map.brokers.values():
            if STREAM_ID in broker.streams:
                request = api.TRUNCATE_STREAMLETS.request(cursors=[cursor(kept[0].start, entry=entry)])
                await broker.ask(api.TRUNCATE_STREAMLETS, request)
        self.logs[entry] = kept

    def damage(self, entry: int, number: int) -> None:
        """Change a byte of a chunk in its file. Not next to damage: the records of two adjacent ones are not known."""
        log = self.logs[entry]
        if not log:
            return
        at = number % len(log)
        if any(each.damaged for each in log[max(0, at - 1) : at + 2]):
            return
        found = log[at]
        engine = self.map.brokers[found.broker_id].engine
        address = (STREAM_ID, 0, entry, found.start.group_id, found.start.segment_id)
        record = engine.index.segment(address)  # type: ignore[arg-type]
        assert record is not None
        with engine.store.path(record.physical_id).open("r+b") as file:
            file.seek(found.start.offset + 150)
            (byte,) = file.read(1)
            file.seek(found.start.offset + 150)
            file.write(bytes([byte ^ 1]))
        found.damaged = True


@contextlib.contextmanager
def worlds() -> Iterator[World]:
    """Make a world."""
    with engines(2) as made:
        placed = Map(*made, entries=ENTRIES)
        client = RealBrokers(placed)
        yield World(placed, client)
        client.stop()


# -- a walk over all chunks ------------------------------------------------------------------------------------


def index_of(log: Sequence[Stored], position: Position) -> int:
    """The number of chunks before a position: two positions without a chunk between them are one place."""
    return sum(each.end <= position for each in log)


def walk(log: Sequence[Stored], query: ChunkQuery) -> tuple[int, int, int]:
    """Index, record and bytes of the place for a query."""
    start = at = index_of(log, query.start)
    stop = len(log) if query.end is None else max(start, index_of(log, query.end))
    origin = log[start].first_record if start < len(log) else 0
    passed = 0
    while at < stop:
        found = log[at]
        if query.timestamp_us is not None:
            over = found.time_us >= query.timestamp_us and not found.damaged
        elif query.records_max is not None:
            over = at > start and found.next_record - origin > query.records_max
        else:
            over = at > start and passed + found.size > (query.bytes_max or 0)
        if over:
            break
        at, passed = at + 1, passed + found.size
    return at, log[at].first_record if at < len(log) else log[-1].next_record, passed


def check_segments(log: Sequence[Stored], start: Position, end: Position, found: Sequence[SegmentBounds]) -> None:
    wanted = [each for each in log if start <= each.start and each.end <= end]
    of_segments: dict[tuple[int, int], list[Stored]] = {}
    for each in wanted:
        of_segments.setdefault(each.start[:2], []).append(each)
    assert [each[:6] for each in found] == [
        (
            parts[0].start,
            parts[-1].end,
            parts[0].first_record,
            parts[-1].next_record,
            sum(part.size for part in parts),
            parts[0].broker_id,
        )
        for parts in of_segments.values()
    ]
    assert all(one.end < other.start for one, other in pairwise(found))


# -- histories -------------------------------------------------------------------------------------------------

APPENDS = st.tuples(
    st.just("append"),
    st.integers(3, SLOT_BYTES // 64).map(lambda units: 64 * units) | st.sampled_from([192, 1024]),
    st.integers(1, 9),
    st.integers(0, 20),
    st.integers(0, ENTRIES - 1),
    st.integers(1, 6),
)
STEPS = st.lists(
    APPENDS
    | st.tuples(st.just("flush"))
    | st.tuples(st.just("disk"), st.integers(1, 2))
    | st.tuples(st.just("move"), st.integers(1, 2))
    | st.tuples(st.just("truncate"), st.integers(0, ENTRIES - 1), st.integers(0, 99)),
    max_size=40,
)
LIMITS = st.one_of(
    st.integers(0, 40).map(lambda value: {"records_max": value}),
    st.integers(0, 3 * SLOT_BYTES).map(lambda value: {"bytes_max": value}),
    st.integers(-1, 22).map(lambda value: {"timestamp_us": value}),
)
QUERIES = st.lists(
    st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 60), st.none() | st.integers(0, 60), LIMITS), max_size=20
)


def boundaries(log: Sequence[Stored]) -> list[Position]:
    """All positions of an entry, in any form."""
    return [position for each in log for position in (each.start, each.end)]


async def run(history: Sequence[tuple[object, ...]], damaged: Sequence[tuple[int, int]], queries: object) -> None:
    with worlds() as world:
        for name, *arguments in history:
            await step(world, str(name), arguments)
        if damaged:
            for broker in world.map.brokers.values():
                world.to_disk(broker)
            for entry, number in damaged:
                world.damage(entry, number)
        await check(world, queries)


async def step(world: World, name: str, arguments: Sequence[object]) -> None:
    match name, *arguments:
        case ("append", int(size), int(records), int(time_us), int(entry), int(count)):
            for number in range(count):
                world.append(size, records, time_us * (number + 1) % 21, entry)
        case ("flush",):
            world.map.owner.engine.memory.segments.close_all()
            world.map.owner.engine.run()
        case ("disk", int(broker_id)):
            world.to_disk(world.map.brokers[broker_id])
        case ("move", int(broker_id)) if broker_id != world.map.info.assignments[0].broker_id:
            await world.map.move(broker_id)
        case ("truncate", int(entry), int(number)):
            await world.truncate(entry, number)


async def check(world: World, wanted: object) -> None:
    queries = [
        ChunkQuery(0, entry, [EARLIEST, *places][start % (len(places) + 1)], end, **limit)
        for entry, start, number, limit in wanted  # type: ignore[attr-defined]
        for places in [boundaries(world.logs[entry])]
        for end in [None if number is None or not places else places[number % len(places)]]
    ]
    for query, place in zip(queries, await locate(world.client, STREAM, queries), strict=True):
        check_place(world.logs[query.entry], query, place)
        if query.end is not None and world.logs[query.entry]:
            found = await segments(world.client, STREAM, 0, query.entry, query.start, query.end)
            check_segments(world.logs[query.entry], query.start, query.end, found)
    for entry, log in enumerate(world.logs):
        found = await segments(world.client, STREAM, 0, entry, EARLIEST, None)
        check_segments(log, EARLIEST, log[-1].end if log else EARLIEST, found)
    for time_us in (-1, 7, 21):
        places = (await positions_at(world.client, STREAM, time_us))[0]
        for entry, place in enumerate(places):
            check_place(world.logs[entry], ChunkQuery(0, entry, EARLIEST, timestamp_us=time_us), place)


def check_place(log: Sequence[Stored], query: ChunkQuery, place: ChunkPlace) -> None:
    if log:
        assert (index_of(log, place.position), place.record, place.bytes) == walk(log, query), (query, place)
    else:
        assert place.bytes == 0
    if query.end is not None and query.start <= query.end:
        assert query.start <= place.position <= query.end


@settings(max_examples=examples(300))
@given(STEPS, st.lists(st.tuples(st.integers(0, ENTRIES - 1), st.integers(0, 99)), max_size=3), QUERIES)
def test_places_and_segments_agree_with_a_walk_over_all_chunks(
    history: list[tuple[object, ...]], damaged: list[tuple[int, int]], queries: list[tuple[object, ...]]
) -> None:
    asyncio.run(run(history, damaged, queries))


@settings(max_examples=examples(60, quick=10))
@given(STEPS, st.integers(0, 99))
def test_the_error_about_a_removed_start_has_the_first_available_position(
    history: list[tuple[object, ...]], number: int
) -> None:
    async def lose() -> None:
        with worlds() as world:
            for name, *arguments in history:
                await step(world, str(name), arguments)
            await step(world, "append", (192, 1, 0, 0, 3))  # a third is removed below, so at least one chunk
            log = list(world.logs[0])
            await world.truncate(0, 1 + number % (len(log) // 3))
            for lost in log[: -len(world.logs[0])]:
                with pytest.raises(DataLost) as raised:
                    await locate(world.client, STREAM, [ChunkQuery(0, 0, lost.start, records_max=1)])
                available = Position(*raised.value.attributes["available_from"])
                assert lost.end <= available <= world.logs[0][0].start
                with pytest.raises(DataLost):
                    await segments(world.client, STREAM, 0, 0, lost.start, None)

    asyncio.run(lose())
