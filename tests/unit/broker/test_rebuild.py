"""Rebuilding segments in the background: no failure ends it, and chunks that no backup has become holes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.broker.log.intervals import Interval
from kera.broker.records import TO_COME, Key, SegmentAddress, SegmentRecord
from kera.broker.recovery.plan import Known, StreamletMerge
from kera.broker.recovery.rebuild import Rebuild, RebuildLimits, keep_doing
from kera.broker.recovery.scan import ReplicasToRead, Scanned, VirtualKey
from kera.broker.recovery.survey import Materials
from kera.broker.storage.disk import LocalDisk
from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.base.ids import Position
from kera.core.errors import KeraError, Unavailable
from kera.core.format.chunk import read_header
from kera.core.format.header_table import table
from kera.v1 import common_pb2
from tests.unit.broker.fake_backup import FakeBackup
from tests.unit.broker.support import ADDRESS, BROKER_ID, CHUNK_BYTES, STREAM_ID, placed

REF = (STREAM_ID, 0)
FIRST, SECOND = ADDRESS, SegmentAddress(*ADDRESS[:4], ADDRESS.segment_id + 1)
KEY = VirtualKey(BROKER_ID, 1)
LIMITS = RebuildLimits(retry_s=0.01, rescan_s=0.01)


def record_of(first_record: int, chunks: int = 1) -> SegmentRecord:
    return SegmentRecord(TO_COME, chunks * CHUNK_BYTES, False, chunks, 0, first_record, chunks, 0, 0, 0)


class World:
    """Segments that are to come, and the parts of a broker that a rebuild needs."""

    def __init__(
        self,
        root: Path,
        records: dict[SegmentAddress, SegmentRecord] | None = None,
        calls: FileCalls = FILE_CALLS,
        limits: RebuildLimits = LIMITS,
    ) -> None:
        self.records = records or {FIRST: record_of(0, chunks=2)}
        self.backups: list[common_pb2.BackupInfo] = []
        self.found: Materials = Materials([], Scanned())
        """The result of the last look for replicas."""
        self.entry: Any = SimpleNamespace(exists=lambda _: True, committed={}, unsure=None)
        self.looks: list[Exception | str] = []
        """The results of the looks before that: an error, or why a backup is away."""
        index = SimpleNamespace(
            segment=self.records.get, segments_of_streamlet=lambda *_: iter(list(self.records.items()))
        )
        store: Any = SimpleNamespace(
            index=index,
            disk=LocalDisk(root, calls),
            arriving_path=lambda number: root / "arriving" / f"{number}",
            calls=calls,
        )
        memory: Any = SimpleNamespace(
            ids=SimpleNamespace(take=partial(next, count(5))), arrivals=SimpleNamespace(install=self.install)
        )
        replication: Any = SimpleNamespace(
            coverage=SimpleNamespace(covers=lambda *_: False, has_all_replicas=lambda _: True),
            backlog=SimpleNamespace(covered=True, add=lambda *_: None),
            logs=SimpleNamespace(close_open=lambda _: None),
        )
        self.rebuild = Rebuild(
            store,
            memory,
            replication,
            find=lambda _: self.entry,
            backups=lambda: self.backups,
            rescan=self.rescan,
            limits=limits,
        )

    def install(self, _entry: Any, key: Key, record: SegmentRecord, done: Callable[[KeraError | None], None]) -> None:
        self.records[SegmentAddress(*REF, 0, *key)] = record
        done(None)

    async def rescan(self, _refs: Any) -> Materials:
        match self.looks.pop(0) if self.looks else None:
            case Exception() as error:
                raise error
            case str() as away:
                return Materials([], Scanned(away={1: away}))
        return self.found

    def begin(self, materials: Materials | None) -> None:
        self.rebuild.begin(REF, frozenset({(9, 3)}), 0, materials, {0: Position(1, 1, 0)})

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)  # sleep: between looks

    @property
    def readable(self) -> bool:
        return self.rebuild.book.streamlets[REF].readable

    @property
    def waits_for(self) -> list[str]:
        return self.rebuild.book.streamlets[REF].waits_for


async def test_a_segment_that_no_backup_has_becomes_a_hole(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.looks = ["it is not alive"] * 5
    world.begin(Materials([], Scanned()))
    await world.until(lambda: any("are on no backup that answers; [1] do not" in each for each in world.waits_for))
    await world.until(lambda: world.readable)

    assert world.records == {FIRST: record_of(0, chunks=2)._replace(physical_id=5)}
    assert world.rebuild.book.totals.chunks_lost == 2
    world.rebuild.book.look()
    assert world.rebuild.book.streamlets[REF].restored, "holes need not be covered"
    await world.rebuild.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("error", [Unavailable("a bad moment"), RuntimeError("a defect")])
async def test_a_failed_look_for_replicas_is_repeated(tmp_path: Path, error: Exception, known: bool) -> None:
    world = World(tmp_path)
    world.looks = [error] * 3
    world.begin(Materials([], Scanned()) if known else None)
    if not known:
        await world.until(lambda: bool(world.waits_for))
        expected = "a bad moment" if isinstance(error, KeraError) else "unexpected error"
        assert expected in world.waits_for[0]
    await world.until(lambda: world.readable)
    assert world.looks == []
    await world.rebuild.close()


async def test_segments_of_one_replica_are_read_from_a_backup_that_is_back(tmp_path: Path) -> None:
    """The first replica is damaged, and another one has all the missing chunks."""
    chunks = [placed(0, FIRST, first_record=0), placed(1, SECOND, first_record=1)]
    merge = StreamletMerge(Known(*REF, 1, (Interval(0),)), {})
    merge.add(table([read_header(each) for each in chunks]), closed=True)
    damaged, whole = FakeBackup(1), FakeBackup(2)
    for backup in (damaged, whole):
        await backup.start()
        backup.replicas[1] = b"".join(chunks), True
    damaged.damaged = {(1, 0), (1, CHUNK_BYTES)}

    def on(*backup_ids: int) -> Materials:
        replicas = ReplicasToRead(KEY, 0, 2 * CHUNK_BYTES, backup_ids, first={FIRST, SECOND})
        return Materials([merge], Scanned({KEY: replicas}))

    world = World(tmp_path, {FIRST: record_of(0), SECOND: record_of(1)})
    world.backups = [damaged.message, whole.message]
    world.found = on(1, 2)
    world.begin(on(1))
    await world.until(lambda: world.readable)

    assert world.rebuild.book.totals.chunks_lost == 0
    assert not any(record.to_come for record in world.records.values())
    files = sorted((tmp_path / "arriving").iterdir())
    assert sorted(path.read_bytes()[:CHUNK_BYTES] for path in files) == sorted(chunks)
    await world.rebuild.close()
    for backup in (damaged, whole):
        await backup.server.close()


async def test_chunks_that_a_shorter_replica_lacks_are_read_from_the_next_one(tmp_path: Path) -> None:
    chunks = [placed(0, FIRST, first_record=0), placed(1, FIRST, first_record=1)]
    merge = StreamletMerge(Known(*REF, 1, (Interval(0),)), {})
    merge.add(table([read_header(each) for each in chunks]), closed=False)
    shorter, whole = FakeBackup(1), FakeBackup(2)
    for backup, has in ((shorter, chunks[:1]), (whole, chunks)):
        await backup.start()
        backup.replicas[1] = b"".join(has), False
    world = World(tmp_path)
    world.backups = [shorter.message, whole.message]
    world.begin(Materials([merge], Scanned({KEY: ReplicasToRead(KEY, 0, 2 * CHUNK_BYTES, (1, 2), first={FIRST})})))
    await world.until(lambda: world.readable)

    assert world.rebuild.book.totals.chunks_lost == 0
    (file,) = (tmp_path / "arriving").iterdir()
    assert file.read_bytes()[: 2 * CHUNK_BYTES] == b"".join(chunks)
    await world.rebuild.close()
    for backup in (shorter, whole):
        await backup.server.close()


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), RuntimeError("a defect")])
async def test_a_segment_whose_sync_fails_is_fetched_again_into_a_new_file(tmp_path: Path, error: Exception) -> None:
    """A disk reports a loss only once: if the next sync succeeds, the file may still lack data."""
    chunks = [placed(number, FIRST, first_record=number) for number in range(2)]
    merge = StreamletMerge(Known(*REF, 1, (Interval(0),)), {})
    merge.add(table([read_header(each) for each in chunks]), closed=True)
    backup = FakeBackup(1)
    await backup.start()
    backup.replicas[1] = b"".join(chunks), True
    synced: list[str] = []

    def sync(fd: int) -> None:
        name = Path(f"/proc/self/fd/{fd}").readlink().name
        synced.append(name)
        if synced.count("5") == 1 and name == "5":
            os.pwrite(fd, bytes(2 * CHUNK_BYTES), 0)  # as if its memory had been given to something else
            raise error

    world = World(
        tmp_path,
        calls=FileCalls(sync=sync),
        limits=RebuildLimits(retry_s=0.01, rescan_s=0.01, assembled_bytes_max=0),
    )
    world.backups = [backup.message]
    replicas = ReplicasToRead(KEY, 0, 2 * CHUNK_BYTES, (1,), first={FIRST})
    world.found = Materials([merge], Scanned({KEY: replicas}))
    with capture_logs():
        world.begin(world.found)
        await world.until(lambda: world.readable)

    record = world.records[FIRST]
    assert (synced.count("5"), record.physical_id) == (1, 6)
    assert world.rebuild.book.totals.chunks_lost == 0
    assert (tmp_path / "arriving" / "6").read_bytes()[: 2 * CHUNK_BYTES] == b"".join(chunks)
    await world.rebuild.close()
    await backup.server.close()


async def test_the_rebuild_of_a_removed_streamlet_ends(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.looks = ["it is not alive"] * 1000
    world.begin(Materials([], Scanned()))
    await world.until(lambda: bool(world.waits_for))
    world.rebuild.end(REF)
    assert world.rebuild.book.streamlets == {}
    assert world.rebuild.book.totals.segments_to_come == 0
    await world.rebuild.close()


async def test_an_unexpected_error_does_not_end_a_repeated_step() -> None:
    results = iter([None, RuntimeError("a defect"), False, True])

    async def step() -> bool | None:
        await asyncio.sleep(0)
        result = next(results)
        if isinstance(result, RuntimeError):
            raise result
        return result

    await keep_doing(step, retry_s=0.001)
    assert list(results) == []
