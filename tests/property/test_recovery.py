"""Brokers crash, with and without their memory, backups come and go: acknowledged chunks are present, once, in place.

Everything is real but the coordinator, in one process: brokers, backups, their disks and connections. The histories are
random; each number always gives the same history.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from kera.broker.serving import write as writing
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2
from tests.examples import first_quick
from tests.unit.broker.conftest import shm_dir  # noqa: F401 - a fixture
from tests.unit.broker.support import STREAM_ID, chunk, cursor, stream_info
from tests.unit.broker.takeover_support import Cluster, Node, cluster, header_of

HISTORIES = 6
STEPS = 14
ENTRIES = 2
PRODUCERS = 3
BACKUPS = 3


class History:
    """A random history."""

    def __init__(self, world: Cluster, random: Random, *, records_min: int = 1) -> None:
        self.world = world
        self.records_min = records_min
        self.random = random
        self.owner = 1
        self.info = stream_info(
            owners=[1],
            replication=2,
            durability=random.choice([common_pb2.DURABILITY_REPLICATED, common_pb2.DURABILITY_PERSISTED]),
            entries=ENTRIES,
        )
        self.sequences = [0] * PRODUCERS
        self.acknowledged: list[list[int]] = [[] for _ in range(PRODUCERS)]
        self.started: set[int] = set()
        self.stored: dict[tuple[int, int], bytes] = {}
        """(Producer, sequence) → the whole chunk as it was first read."""
        self.places: dict[int, list[tuple[Position, int]]] = {entry: [] for entry in range(ENTRIES)}
        """Positions that readers had, and the ordinal of the next record there."""
        self.removed: dict[int, int] = dict.fromkeys(range(ENTRIES), 0)
        self.starts: dict[int, common_pb2.EntryStart] = {}
        """The starts of entries that the coordinator knows."""
        self.recovered: dict[int, int] = {}
        """Broker → the epoch before which its launches were recovered."""
        self.steps: list[str] = []

    @property
    def node(self) -> Node:
        return self.world.nodes[self.owner]

    async def begin(self) -> None:
        epoch = self.world.epoch()
        self.info.assignments[0].broker_epoch = epoch
        self.info.assignments_version = 1
        await self.start(1, epoch, self.info)

    async def start(self, number: int, epoch: int, *streams: common_pb2.StreamInfo) -> None:
        node = self.world.nodes[number]
        await node.start(epoch, *streams, recovered_before_epoch=self.recovered.get(number, 0))
        self.started.add(number)
        up = sum(backup.engine is not None for backup in self.world.backups)
        await node.until(lambda: node.engine.replication.backups.up_count == up)

    async def run(self, steps: int) -> None:
        await self.begin()
        for _ in range(steps):
            name = self.random.choices(
                ["write", "crash", "crash_memory", "backup", "read", "remove", "restore"], [8, 1, 2, 1, 3, 1, 1]
            )[0]
            self.steps.append(name)
            await getattr(self, name)()
        for backup in self.world.backups:
            if backup.engine is None:
                await backup.start()
        self.node.told()
        await self.write()
        await self.read()
        await self.restore(wait=True)
        await self.read()

    async def write(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            producer = self.random.randrange(PRODUCERS)
            first = self.sequences[producer]
            count = self.random.randrange(1, 6)
            chunks = [self.chunk(producer, first + at) for at in range(count)]
            async with asyncio.timeout(30):
                while True:
                    statuses = await self.node.write(*chunks)
                    if not any(status.error.code for status in statuses):
                        break
                    codes = {status.error.code for status in statuses}
                    assert codes <= {"", "too_few_backups", "not_replicated", "not_persisted", "out_of_sequence"}, codes
                    self.node.told()
                    await asyncio.sleep(0.01)  # sleep: until there are backups
            self.sequences[producer] = first + count
            self.acknowledged[producer] += range(first, first + count)

    def chunk(self, producer: int, sequence: int) -> bytes:
        size = (256, 512, 1024, 2048)[(producer + sequence * 7) % 4]
        records = max(self.records_min, (producer * 3 + sequence * 5) % 3)
        return chunk(producer, sequence, size=size, fill=bytes([65 + sequence % 26]), record_count=records)

    async def unknown(self) -> None:
        """Send chunks that are on their way when the broker dies."""
        producer = self.random.randrange(PRODUCERS)
        data = [self.chunk(producer, self.sequences[producer] + at) for at in range(2)]
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=2)
        writing = asyncio.ensure_future(self.node.ask(api.MULTI_WRITE_CHUNKS, request, b"".join(data)))
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(0)  # sleep: turns of the loop
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError, KeraError):
            await writing

    async def crash(self) -> None:
        """The process dies and comes back with its memory."""
        await self.unknown()
        await self.node.kill()
        epoch = self.world.epoch()
        self.info.assignments[0].broker_epoch = epoch
        await self.start(self.owner, epoch, self.info)

    async def crash_memory(self) -> None:
        """The host dies; another broker takes over, or the same one, without its memory."""
        if sum(backup.engine is None for backup in self.world.backups) > 1:
            return
        await self.unknown()
        lost = self.owner
        await self.node.kill(memory=True)
        self.started.discard(lost)
        self.owner = self.random.randrange(3) + 1
        if self.owner not in self.started:
            epoch = self.world.epoch()
            await self.start(self.owner, epoch, *([self.info] if self.owner == lost else []))
        response, self.info = await self.world.take_over(self.info, lost, self.owner, starts=self.starts.values())
        assert not response.waits_for
        assert not response.records_lost, f"{response.records_lost} records lost"
        before = max(each.before_epoch for each in self.info.assignments[0].sources if each.broker_id == lost)
        self.recovered[lost] = before

    async def backup(self) -> None:
        """A backup ends, or comes back."""
        away = [backup for backup in self.world.backups if backup.engine is None]
        if away:
            await away[0].start()
        elif not any(self.info.assignments[0].sources):
            await self.random.choice(self.world.backups).stop()
        for number in self.started:
            self.world.nodes[number].told()

    async def restore(self, *, wait: bool = False) -> None:
        """The coordinator learns that everything is recovered, if it is."""
        assignment = self.info.assignments[0]
        if not assignment.sources or any(backup.engine is None for backup in self.world.backups):
            return
        if not wait and self.random.random() < 0.5:
            return
        await self.node.until_restored()
        sources = list(assignment.sources)
        del assignment.sources[:]
        self.info.assignments_version += 1
        await self.node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=self.info))
        for source in sources:
            for backup in self.world.backups:
                await backup.free(source.broker_id, source.before_epoch)

    async def remove(self) -> None:
        """Retention."""
        index = self.random.randrange(ENTRIES)
        entry = self.node.engine.streams.get(STREAM_ID).streamlet(0).entries[index]
        segments = list(entry.segments())
        if len(segments) > 3:
            (group_id, segment_id), found = segments[1]
            entry.start, entry.start_record = Position(group_id, segment_id, 0), found.first_record
            self.starts[index] = common_pb2.EntryStart(
                start=cursor(entry.start, entry=index), first_record=found.first_record
            )
            self.node.engine.memory.removals.collect(entry)
            self.info.config.retention_bytes = 1 << 40  # the stream may have lost something
            self.removed[index] = found.first_record

    async def read(self) -> None:
        """Check that all chunks are present, once, in order and in place."""
        for entry in range(ENTRIES):
            found, end = await self.node.read(entry=entry)
            headers = [header_of(data) for data in found]
            for before, after in pairwise(headers):
                assert after.first_record == before.first_record + before.record_count
            there: dict[int, list[int]] = {}
            for header, data in zip(headers, found, strict=True):
                there.setdefault(header.producer_id, []).append(header.sequence)
                known = self.stored.setdefault((header.producer_id, header.sequence), data)
                assert known == data, "a chunk has changed"
            first = headers[0].first_record if headers else 0
            assert first <= self.removed[entry], f"entry {entry} starts at {first} and not at {self.removed[entry]}"
            for producer in range(PRODUCERS):
                if producer % ENTRIES == entry:
                    mine = there.get(producer, [])
                    assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True
                    wanted = self.acknowledged[producer][-1:]
                    assert set(wanted) <= set(mine) or self.removed[entry], f"producer {producer} misses {wanted}"
                    if not self.removed[entry]:
                        assert set(self.acknowledged[producer]) <= set(mine)
            for position, record in self.places[entry]:
                if record > self.removed[entry] and position != EARLIEST:
                    again, _ = await self.node.read(position, entry=entry)
                    assert again == found[len(found) - len(again) :]
                    if again:
                        assert header_of(again[0]).first_record == record
            next_record = headers[-1].first_record + headers[-1].record_count if headers else 0
            self.places[entry] = [*self.places[entry][-3:], (end, next_record)]


async def run(root: Path, shm_dir: Path, number: int, **settings: int) -> None:  # noqa: F811 - the fixture's
    async with cluster(root, shm_dir, BACKUPS) as world:
        history = History(world, Random(number), **settings)
        try:
            await history.run(STEPS)
        except BaseException as error:
            error.add_note(f"history {number}: {' '.join(history.steps)}")
            raise
        finally:
            for broker_id in history.started:
                await world.nodes[broker_id].kill(memory=True)


@pytest.mark.parametrize("number", first_quick(range(HISTORIES), 2))
async def test_acknowledged_chunks_survive_crashes(
    number: int,
    tmp_path: Path,
    shm_dir: Path,  # noqa: F811 - the fixture
) -> None:
    await run(tmp_path, shm_dir, number)


@pytest.mark.parametrize("number", first_quick(range(100, 100 + HISTORIES // 2), 1))
async def test_acknowledged_chunks_survive_crashes_despite_chunks_without_records(
    number: int,
    tmp_path: Path,
    shm_dir: Path,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "check_sent", lambda _: None)  # former brokers accepted such chunks
    await run(tmp_path, shm_dir, number, records_min=0)
