"""The log engine with its real disk and index; the test does its jobs in orders that threads might choose."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kera.broker.engine import _memory
from kera.broker.log.arena import Arena
from kera.broker.log.intervals import Holding
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import Streamlet
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.jobs import Job, StoreJob
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.clock import SystemClock
from kera.core.format.chunk import Codec, encode_chunk, read_header

SLOT_BYTES = 16 << 10
STREAM = 1


class Launch:
    """One launch of an engine, without its loop and threads: the test does its jobs."""

    def __init__(self, store: SegmentStore, arena: Arena, memory: PersistenceManager, restart: Restart) -> None:
        self.store = store
        self.arena = arena
        self.memory = memory
        self._restart = restart
        self._streamlets: dict[int, Streamlet] = {}
        self._sequences: dict[int, int] = {}

    @classmethod
    async def start(cls, root: Path, shm_dir: Path) -> Launch:
        index, whole = SegmentIndex.open_checked(root / "index")
        store = SegmentStore(root, LocalDisk(root), index)
        found = Arena.attach(shm_dir, root)
        restart = Restart(found, index, store)
        restart.look(index_whole=whole, slot_bytes=SLOT_BYTES)
        arena = found or Arena.create(
            shm_dir, arena_bytes=16 * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=root, ephemeral=False
        )
        return cls(store, arena, await _memory(arena, index, SLOT_BYTES, SystemClock()), restart)

    def streamlet(self, streamlet_id: int) -> Streamlet:
        if streamlet_id not in self._streamlets:
            restored = self._restart.restore(STREAM, streamlet_id, 1, 1)
            self._streamlets[streamlet_id] = Streamlet(
                STREAM,
                streamlet_id,
                entries=restored.entries,
                group_segments=4,
                next_group_id=restored.next_group_id,
                producers=restored.producers,
                memory=self.memory,
                held=Holding(broker_epoch=1),
            )
        return self._streamlets[streamlet_id]

    def append(self, streamlet_id: int) -> Segment:
        """Append a chunk; returns its segment."""
        sequence = self._sequences[streamlet_id] = self._sequences.get(streamlet_id, -1) + 1
        parts = encode_chunk(
            pa.py_buffer(bytes(3000)),
            record_count=1,
            stream_id=STREAM,
            streamlet_id=streamlet_id,
            schema_id=1,
            producer_id=1,
            producer_epoch=0,
            sequence=sequence,
            created_us=1,
            min_timestamp_us=1,
            max_timestamp_us=1,
            codec=Codec.NONE,
            typed=False,
        )
        chunk = memoryview(parts.to_bytes())
        segment = self.streamlet(streamlet_id).append(chunk, read_header(chunk, 0)).segment
        assert segment is not None
        return segment

    def plan(self) -> StoreJob:
        (job,) = self.memory.plan()
        assert isinstance(job, StoreJob)
        return job

    def perform(self, job: Job) -> None:
        self.store.perform(job)
        assert job.error is None
        self.memory.finished(job)

    def kill(self) -> None:
        self.store.index.close()
        self.arena.close(keep=True)


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


async def test_physical_ids_are_not_reused_when_jobs_end_out_of_order(tmp_path: Path, shm_dir: Path) -> None:
    launch = await Launch.start(tmp_path, shm_dir)
    while not (first := launch.append(0)).closed and len(first.chunk_ends) < 5:
        pass
    launch.memory.close(first)
    flush = launch.plan()
    second = launch.append(1)
    launch.memory.commits.persist([(second, second.head)], lambda _: None)
    commit = launch.plan()
    launch.perform(commit)  # planned later, and done earlier
    launch.perform(flush)
    launch.memory.close(second)
    launch.perform(launch.plan())
    used = {record.physical_id for _, record in launch.store.index.all_segments()}
    assert used == {first.physical_id, second.physical_id}
    launch.kill()

    launch = await Launch.start(tmp_path, shm_dir)
    third = launch.append(2)
    launch.memory.close(third)
    launch.perform(launch.plan())
    launch.kill()
    assert third.physical_id not in used


async def test_a_segment_whose_flush_was_interrupted_is_not_leased_to_a_reader(tmp_path: Path, shm_dir: Path) -> None:
    launch = await Launch.start(tmp_path, shm_dir)
    segment = launch.append(0)
    launch.memory.close(segment)
    launch.plan()
    launch.kill()

    launch = await Launch.start(tmp_path, shm_dir)
    inherited = list(launch.arena.inherited)
    launch.kill()
    assert inherited == []
