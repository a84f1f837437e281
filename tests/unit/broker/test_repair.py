"""Repair copies data with too few replicas again, from memory or disk, at its pace, whatever is removed meanwhile."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable

import pytest

from kera.broker.log.entry import Entry
from kera.broker.ownership.stream import Stream
from kera.broker.records import Hole, SegmentAddress
from kera.broker.replication.repair import Repair
from kera.core.base.ids import EntryId, Position
from kera.v1 import common_pb2
from tests.unit.broker.replication_support import Replicated, nothing_pinned
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID, Engine

DELAY_MS = 1000
FAST = 1 << 40


class Repairing(Replicated):
    """A replicated broker with a running repair."""

    def __init__(self, engine: Engine, *, bytes_per_s: int = FAST, up: bool = True, **limits: int) -> None:
        super().__init__(engine, up=up, repair_delay_ms=DELAY_MS, wait_ms_max=5000, **limits)
        self.runs = asyncio.create_task(
            Repair(
                self.replication,
                engine.memory,
                find=self._find,
                pump=self.wire.pump,
                bytes_per_s=lambda: bytes_per_s,
                rest_s=0.001,
                failed_rest_s=0.001,
                set_aside_s=0.001,
            ).run()
        )

    def _find(self, address: SegmentAddress) -> Entry | None:
        return self.engine.streams.entry(EntryId(*address[:3]))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Go on until the condition holds."""
        async with asyncio.timeout(20):
            while not condition():
                assert not self.runs.done(), "repair has ended"
                self.finish()
                await asyncio.sleep(0.001)

    def closed(self, chunks: int = 6, **config: int) -> Stream:
        """A stream whose chunks are in closed virtual segments."""
        stream = self.open(**config)
        self.append(stream, chunks)
        self.finish()
        self.close_all()
        return stream

    def fail(self) -> None:
        """Lose, for good, a backup that has replicas."""
        id_ = next(each.backups[0] for each in self.replication.coverage.segments.values())
        self.wire.lose(id_, memory=True)
        self.wire.tick(DELAY_MS)

    def repaired(self) -> bool:
        """Whether the repair is complete."""
        return not (
            self.replication.coverage.deficient
            or self.replication.backlog.extents
            or self.replication.coverage.replacing
        )


@pytest.fixture
async def world(engine: Engine) -> AsyncIterator[Repairing]:
    world = Repairing(engine)
    yield world
    world.runs.cancel()
    await asyncio.wait([world.runs])


async def test_replicas_of_a_lost_backup_are_made_again(world: Repairing) -> None:
    stream = world.closed()
    world.fail()
    assert world.replication.coverage.deficient
    await world.until(world.repaired)

    assert world.copies(stream) == [2] * 6
    assert nothing_pinned(world.engine)


async def test_segments_that_are_only_on_disk_are_loaded_for_the_repair(world: Repairing) -> None:
    stream = world.closed(8)
    world.engine.memory.segments.close_all()
    world.finish()
    entry = stream.streamlets[0].entries[0]
    slots = world.engine.fill_memory() + [world.engine.memory.slots.allocate() for _ in range(len(entry.resident))]
    for slot in slots:
        slot.retire()
    assert entry.resident == {}
    world.fail()
    await world.until(world.repaired)

    assert world.copies(stream) == [2] * 8
    assert nothing_pinned(world.engine)


@pytest.mark.parametrize("bytes_max", [CHUNK_BYTES + 10, 10], ids=["a-chunk-fits", "no-chunk-fits"])
async def test_a_repair_batch_has_no_more_bytes_than_its_limit_or_a_single_chunk(
    world: Repairing, bytes_max: int
) -> None:
    world.replication.limits.request_bytes_max = bytes_max
    stream = world.closed(4)
    world.fail()
    before = world.replication.totals.batches
    await world.until(world.repaired)

    assert world.replication.totals.batches - before == 4
    assert world.copies(stream) == [2] * 4


async def test_repair_keeps_to_its_pace(engine: Engine) -> None:
    world = Repairing(engine, bytes_per_s=10 * CHUNK_BYTES, request_bytes_max=CHUNK_BYTES)
    loop = asyncio.get_running_loop()
    world.closed(4)
    world.fail()
    begun_s = loop.time()
    await world.until(world.repaired)
    world.runs.cancel()
    await asyncio.wait([world.runs])

    assert loop.time() - begun_s >= 0.3  # the first batch goes at once, each other one a tenth of a second later


async def test_repair_replicates_the_backlog(engine: Engine) -> None:
    world = Repairing(engine, up=False)
    stream = world.open(durability=common_pb2.DURABILITY_LEADER)
    world.append(stream, 4)
    assert stream.logs is not None
    for batch in stream.logs.logs[0]._queue:
        batch.waiters.clear()
    world.replication.backlog.shed(stream.logs)
    assert world.replication.backlog.extents
    world.wire.connect()
    await world.until(world.repaired)
    world.runs.cancel()
    await asyncio.wait([world.runs])

    assert world.copies(stream) == [2] * 4


async def test_repair_skips_segments_removed_meanwhile(world: Repairing) -> None:
    stream = world.closed(8)
    world.engine.memory.segments.close_all()
    world.finish()
    entry = stream.streamlets[0].entries[0]
    world.fail()
    entry.start, entry.start_record = Position(1, 2, 0), 4
    world.engine.memory.removals.collect(entry)
    await world.until(world.repaired)

    assert world.copies(stream) == [2] * 4


async def test_dropping_a_stream_ends_its_repair_and_no_other(world: Repairing) -> None:
    world.closed(4)
    other = world.open(8)
    world.append(other, 2)
    world.finish()
    world.close_all()
    world.wire.lose(1, memory=True)
    world.wire.lose(2, memory=True)
    world.wire.tick(DELAY_MS)
    world.engine.streams.drop(STREAM_ID)
    world.wire.connect()
    world.wire.tick(DELAY_MS)
    await world.until(world.repaired)

    assert world.copies(other) == [2, 2]
    assert {replica.stream_id for b in world.wire.backups.values() for replica in b.replicas.values()} == {8}


async def test_repair_skips_damaged_chunks(world: Repairing) -> None:
    stream = world.closed(4)
    segment = stream.streamlets[0].entries[0].resident[1, 1]
    segment.holes.append(Hole(CHUNK_BYTES, 2 * CHUNK_BYTES, "test"))
    world.fail()
    await world.until(world.repaired)

    assert world.copies(stream)[0::2] == [2, 2]
    assert world.copies(stream)[1] == 0


class Unreadable:
    """A stream with a virtual segment of two segments: the second one is only on disk and cannot be read."""

    def __init__(self, world: Repairing) -> None:
        self.world = world
        world.replication.limits.request_bytes_max = CHUNK_BYTES
        self.stream = world.closed(2, replication=3)
        world.append(self.stream, 4)
        world.finish()
        world.close_all()
        memory = world.engine.memory
        memory.segments.close_all()
        world.finish()
        self.entry = self.stream.streamlets[0].entries[0]
        self.entry.resident[1, 1].slot.pin()
        slots = [*world.engine.fill_memory(), memory.slots.allocate()]
        for slot in slots:
            slot.retire()
        self.entry.resident[1, 1].slot.unpin()
        assert list(self.entry.resident) == [(1, 1)]
        world.engine.disk.read_error = errno.EIO

    def lose_copies(self) -> None:
        """A backup comes back empty, so all its replicas have to be made again."""
        self.world.wire.lose(1, memory=True)
        self.world.wire.tick(DELAY_MS)
        self.world.wire.connect(1)

    def attempts(self) -> int:
        """How often the broker has tried to read the second segment."""
        return self.world.engine.memory.totals.disk_errors


async def test_unreadable_data_does_not_block_the_repair_of_other_virtual_segments(world: Repairing) -> None:
    unreadable = Unreadable(world)
    other = world.open(8, replication=3)
    world.append(other, 2)
    world.finish()
    world.close_all()
    unreadable.lose_copies()
    await world.until(lambda: world.copies(other) == [3, 3])

    assert world.copies(unreadable.stream) == [3, 3, 3, 3, 2, 2]
    assert not world.repaired()


async def test_readable_data_is_copied_only_once_while_reads_of_the_rest_are_retried(world: Repairing) -> None:
    unreadable = Unreadable(world)
    unreadable.lose_copies()
    await world.until(lambda: unreadable.attempts() >= 2)
    copied = world.replication.totals.bytes_repaired
    await world.until(lambda: unreadable.attempts() >= 5)
    assert world.replication.totals.bytes_repaired == copied
    world.engine.disk.read_error = 0
    await world.until(world.repaired)

    assert world.copies(unreadable.stream) == [3] * 6
    assert world.replication.totals.bytes_repaired == copied + 2 * CHUNK_BYTES
    assert nothing_pinned(world.engine)


async def test_without_enough_backups_repair_waits_for_them(world: Repairing) -> None:
    stream = world.closed(2)
    one, two = next(iter(world.replication.coverage.segments.values())).backups
    world.wire.lose(one, memory=True)
    world.wire.lose(two)
    world.wire.tick(DELAY_MS)
    await asyncio.wait([world.runs], timeout=0.01)
    assert not world.repaired()
    world.wire.connect(one)
    world.wire.tick(DELAY_MS)
    await world.until(world.repaired)

    assert min(world.copies(stream)) >= 2


async def test_a_slow_repair_batch_is_waited_for_and_not_sent_twice(world: Repairing) -> None:
    world.closed(2)
    for backup in world.wire.backups.values():
        backup.full = True
    world.fail()
    logs = world.replication.logs.streams[STREAM_ID]
    await world.until(lambda: logs.repair is not None and logs.repair.busy)
    assert logs.repair is not None
    lag = logs.repair.lag_bytes
    for _ in range(3):
        world.wire.tick(5001)
        await world.until(lambda: True)
        await asyncio.wait([world.runs], timeout=0.02)

    assert (lag, logs.repair.lag_bytes) == (2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
