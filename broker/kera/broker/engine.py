"""The log engine of one broker: starts, runs and stops its arena, index, disk and persistence manager.

    start()   take over the last launch's arena or create one, open the index, find the existing data
    running   perform the persistence manager's jobs, on threads; retention, idle time-outs, retries by the clock
    close()   flush everything and remove the arena; if the disk does not take it, leave it in the arena

``kera.broker.ownership.streams`` knows the log's content and its owners; the service checks who may read and write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kera.broker.backup_ways import BackupWays
from kera.broker.log.arena import Arena
from kera.broker.log.arena_file import remove_orphans
from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.log.intervals import held_streamlets
from kera.broker.log.retention import new_starts
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.stream import Stream
from kera.broker.ownership.stream_records import assignments_version
from kera.broker.ownership.streams import Streams
from kera.broker.records import SegmentAddress
from kera.broker.recovery.healing import Healing
from kera.broker.recovery.rebuild import RebuildLimits
from kera.broker.recovery.replica_reader import ReadLimits
from kera.broker.recovery.takeover import Takeovers
from kera.broker.registration import BrokerIdentity
from kera.broker.replication.manager import Replication
from kera.broker.replication.repair import Repair
from kera.broker.replication.replicator import Replicator
from kera.broker.replication.virtual_index import dropped_streams, virtual_segments
from kera.broker.settings import BrokerSettings
from kera.broker.steady_time import SteadyTime
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import FORMAT, OpenIndex, SegmentIndex
from kera.broker.storage.jobs import Job, LoadJob
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore, report_damage
from kera.core.base.clock import Clock
from kera.core.base.ids import EntryId
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.base.turns import SLICE_S
from kera.core.errors import PathNotWritable, StartError
from kera.core.runtime import MACHINE, Runtime
from kera.server.lineage import comes_from
from kera.v1 import common_pb2

log = get_logger("kera.log")

TICK_S = 0.1
RETENTION_TICKS = 10
"""Retention rests for this many ticks before it looks at all streams with rules again."""
THREADS = 5
"""One commit, one flush, two loads and one removal can be under way."""
IDS_LOGGED_MAX = 100
"""Maximum number of stream ids in one log message."""
REPLICATE_TIMEOUT_S = 3.0
"""Part of the stop's flush time for data that backups do not have yet."""


class LogEngine:
    """Owns a broker's arena, index and disk, and runs the jobs that keep its log durable.

    Created with `start`; belongs to one event loop.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        arena: Arena,
        restart: Restart,
        memory: PersistenceManager,
        runtime: Runtime,
        rebuild_limits: RebuildLimits | None = None,
        tick_s: float = TICK_S,
    ) -> None:
        clock, node_id = runtime.clock, runtime.node_id()
        ways = BackupWays(node_id, runtime.tls, runtime.introduction)
        self.arena = arena
        self.restart = restart
        self.memory = memory
        self.replication = Replication(
            settings.replication_limits(),
            memory.index_writer.note,
            memory.events,
            exists=self._exists,
            spared=lambda stream_id: stream_id in self.streams.unknown,
            node_id=node_id,
            now_ms=memory.now_ms,
            random=runtime.random,
        )
        self.streams = Streams(memory, restart, self.replication)
        self.replicator = Replicator(self.replication, ways, timeout_ms=settings.backup_timeout_ms)
        self.takeovers = Takeovers(
            restart,
            memory,
            self.streams,
            self.replication,
            backups=lambda: self.replicator.known_backups,
            broker_id=lambda: self.replicator.broker_id,
            ways=ways,
            limits=rebuild_limits or RebuildLimits(),
        )
        self._healing = Healing(
            restart.store,
            memory,
            self.replication,
            backups=lambda: self.replicator.known_backups,
            broker_id=lambda: self.replicator.broker_id,
            ways=ways,
            limits=ReadLimits(read_bytes_max=settings.segment_bytes),
        )
        self._settings = settings
        self._clock = clock
        self._index = restart.index
        self._store = restart.store
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(THREADS, "kera-disk")
        self._dispatching = self._stopped = False
        self._jobs: set[asyncio.Future[None]] = set()
        self._changed = asyncio.Event()
        self._started_s = clock.monotonic_s()
        self._time = SteadyTime(clock)
        self._failing: dict[str, Repeated] = {}
        """The parts of the periodic work that have failed."""
        memory.events.disk_work.listen(self._work)
        memory.events.backup_work.listen(self.replicator.pump_soon)
        self._ticking = asyncio.create_task(self._tick(tick_s))
        self._retaining = asyncio.create_task(self._retain_for_ever(tick_s * RETENTION_TICKS))
        self._repairing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        settings: BrokerSettings,
        data_dir: Path,
        runtime: Runtime = MACHINE,
        *,
        directory_id: str = "",
        rebuild_limits: RebuildLimits | None = None,
        tick_s: float = TICK_S,
        open_index: OpenIndex = SegmentIndex.open_checked,
    ) -> LogEngine:
        """Open the log in `data_dir`, which this process has locked. Raises `StartError` and its subclasses.

        `directory_id`: the directory's id from its identity; empty if it has none yet.
        """
        clock = runtime.clock
        begun_s = clock.monotonic_s()
        root = data_dir / "log"
        # Memory that names a new directory belongs to a former one in its place, so its content is not needed.
        new = not root.exists() and not any((data_dir / name).exists() for name in BrokerIdentity.names())
        index, whole = await asyncio.to_thread(_open_index, root, open_index)
        _check_directory(root, index, directory_id)
        store = SegmentStore(root, LocalDisk(root, runtime.files), index, calls=runtime.files)
        arena = None if new else Arena.attach(settings.shm_dir, data_dir)
        remove_orphans(settings.shm_dir, data_dir, keep=arena.paths if arena is not None else ())
        restart = Restart(arena, index, store)
        await asyncio.to_thread(restart.look, index_whole=whole, slot_bytes=settings.segment_bytes)
        if arena is not None and _differs(arena, settings):
            log.info("the size of the memory has changed: writing its content to disk", path=str(arena.path))
            await cls._drain(settings, arena, restart, runtime)
            arena = None
            restart = Restart(None, index, store, restart.found, taken_in=restart.taken_in)
        if arena is None:
            arena = await asyncio.to_thread(
                Arena.create,
                settings.shm_dir,
                arena_bytes=settings.arena_bytes,
                slot_bytes=settings.segment_bytes,
                data_dir=data_dir,
                ephemeral=settings.ephemeral,
            )
        memory = await _memory(arena, index, settings.segment_bytes, clock, settings.flush_delay_ms)
        engine = cls(settings, arena, restart, memory, runtime, rebuild_limits, tick_s)
        log.info(
            "log opened",
            seconds=round(clock.monotonic_s() - begun_s, 3),
            **{name: getattr(restart.found, name) for name in restart.found.__slots__},
        )
        return engine

    @classmethod
    async def _drain(cls, settings: BrokerSettings, arena: Arena, restart: Restart, runtime: Runtime) -> None:
        """Write everything in an arena to disk, however long that takes, and remove it. Raises `StartError`."""
        memory = await _memory(arena, restart.index, arena.slot_bytes, runtime.clock)
        engine = cls(settings, arena, restart, memory, runtime)
        if not await engine._stop(close_index=False, flush_timeout_s=None):
            await asyncio.to_thread(restart.index.close, clean=False)
            raise StartError(
                f"{memory.segments.bytes_left} bytes of {arena.path} are in memory only and could not be written to"
                f" disk ({memory.disk.error or 'see the log'}), so the size of the memory cannot change now; start"
                f" with --arena-bytes {arena.slot_count * arena.slot_bytes} --segment-bytes {arena.slot_bytes} until"
                " they are",
                path=str(arena.path),
                bytes=memory.segments.bytes_left,
            )

    async def own(
        self,
        owned: Iterable[common_pb2.StreamInfo],
        broker_id: int,
        broker_epoch: int,
        recovered_before_epoch: int | None = None,
        elsewhere: Iterable[int] = (),
        *,
        has_holes: bool = False,
        directory_id: str = "",
    ) -> None:
        """Drop the data of streamlets that other brokers have now; the service opens the streamlets in `owned`.

        `elsewhere`: further streams that the coordinator knows, and that have no streamlets for this broker. All other
        streams are unknown to it. They are kept until an order comes to drop or to open them, because the coordinator's
        metadata may be older than they are.
        `recovered_before_epoch`: data of launches before this epoch is, or was, recovered from their replicas (0: no
        data; None: unknown, so replicas of streams that no longer belong to this broker are spared). `has_holes`: data
        that an earlier launch had in memory was lost, and is still being recovered. `directory_id`: the id of the data
        directory, which the log remembers, so that another broker does not take it for its own (empty: unchanged).
        """
        if has_holes:
            self.streams.withhold()
        owned = list(owned)
        found = await asyncio.to_thread(lambda: list(virtual_segments(self._index)))
        held = held_streamlets(owned, broker_id)
        keep = {stream_id for stream_id, _ in held}
        there = self.held_streams()
        known = {info.stream_id for info in owned} | set(elsewhere)
        overtaken = {info.stream_id for info in owned if not comes_from(info, there.get(info.stream_id, 0))}
        ids = self.memory.ids
        meta = ids.meta
        recover_before = max(meta.get("recover_before_epoch", 0), recovered_before_epoch or 0)
        spare_before = meta.get("spare_before_epoch", 0)
        if self.restart.found.lost_memory:
            recover_before = broker_epoch
        elif recovered_before_epoch is None and any(each.stream_id not in keep for each in found):
            spare_before = broker_epoch
        ids.remember(
            recover_before_epoch=recover_before,
            spare_before_epoch=spare_before,
            lost_memory=False,
            directory_id=directory_id or meta.get("directory_id", ""),
        )
        await asyncio.to_thread(self._index.commit, [], ids.meta)
        self.replication.begin(
            broker_epoch,
            found,
            recover_before_epoch=recover_before,
            spare_before_epoch=spare_before,
            dropped=await asyncio.to_thread(dropped_streams, self._index),
        )
        self.replicator.begin(broker_id, broker_epoch)
        gone = known - keep - overtaken

        def is_gone(stream_id: int, streamlet_id: int) -> bool:
            moved = stream_id in keep - overtaken and (stream_id, streamlet_id) not in held
            return stream_id in gone or moved

        if self.restart.taken_in:
            await asyncio.to_thread(self.restart.leave_alone, is_gone)
        for stream_id in gone & there.keys():
            log.info("dropping a stream that other brokers have completely now", stream_id=stream_id)
            self.memory.removals.drop_stream(stream_id)
        for stream_id, streamlet_id in {entry[:2] for entry in self._index.entries()} - held:
            if stream_id in keep - overtaken:
                log.info(
                    "dropping a streamlet that moved to another broker", stream_id=stream_id, streamlet_id=streamlet_id
                )
                self.streams.removal.remove(stream_id, streamlet_id)
        self.restart.drop_leftovers(is_gone)
        self.replication.coverage.keep_streams(there.keys() - gone)
        await asyncio.to_thread(self._keep_unknown, there.keys() - known)
        repair = Repair(
            self.replication,
            self.memory,
            find=self._entry,
            pump=self.replicator.pump,
            bytes_per_s=self._repair_bytes_per_s,
        )
        self._repairing = asyncio.create_task(repair.run())

    def held_streams(self) -> dict[int, int]:
        """Return the streams that have data here, each with the latest recorded version of its assignments."""
        ids = self._index.stream_ids() | {entry.stream_id for entry in self.restart.leftovers()}
        return {stream_id: assignments_version(self._index, stream_id) for stream_id in ids}

    def _keep_unknown(self, stream_ids: Iterable[int]) -> None:
        for stream_id in sorted(stream_ids):
            self.streams.unknown[stream_id] = self.restart.unserved(stream_id)
        if self.streams.unknown:
            log.warning(
                "the coordinator does not know some streams that are here; they are kept, and not served. Its metadata"
                " may have been restored from a copy that is older than they are",
                stream_ids=list(self.streams.unknown)[:IDS_LOGGED_MAX],
                streams=len(self.streams.unknown),
                bytes=sum(held.bytes for held in self.streams.unknown.values()),
            )

    def _repair_bytes_per_s(self) -> int:
        settings = self._settings
        return max(settings.repair_bytes_per_s, settings.recovery_bytes_per_s if self.takeovers.active else 0)

    def _entry(self, address: SegmentAddress) -> Entry | None:
        return self.streams.entry(EntryId(*address[:3]))

    def _exists(self, address: SegmentAddress) -> bool:
        return self.streams.exists(address)

    # -- running -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if not (self._dispatching or self._stopped):
            self._dispatching = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for job in self.memory.plan():
            future = self._loop.run_in_executor(self._pool, self._store.perform, job)
            self._jobs.add(future)
            future.add_done_callback(lambda done, job=job: self._done(job, done))  # type: ignore[misc]

    def _done(self, job: Job, future: asyncio.Future[None]) -> None:
        self._jobs.discard(future)
        future.result()  # `perform` raises nothing
        if isinstance(job, LoadJob) and self._healing.helps(job):
            self._healing.begin(job, lambda: self._finished(job))
        else:
            self._finished(job)

    def _finished(self, job: Job) -> None:
        if isinstance(job, LoadJob):
            report_damage(self._store.path(job.segment.physical_id), job.holes)
        self.memory.finished(job)
        self._changed.set()

    async def _tick(self, tick_s: float) -> None:
        while True:
            await asyncio.sleep(tick_s)
            now_s = self._clock.monotonic_s()
            now_ms, now_us, idle_close_ms = int(now_s * 1000), self._time.now_us(), self._settings.idle_close_ms
            self._try("memory", partial(self.memory.tick, now_ms, now_us, idle_close_ms=idle_close_ms))
            self._try("replication", partial(self.replication.tick, now_ms))
            if (now_s - self._started_s) * 1000 >= self._settings.reader_grace_ms:
                while self.arena.inherited:
                    self._try("memory of the last launch", self.arena.inherited.pop().release)

    def _try(self, what: str, work: Callable[[], object]) -> None:
        """Do a part of the periodic work. Its failure is logged, and stops neither other parts nor later ones."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a defect must not stop the clock of everything else
            failing = self._failing.setdefault(what, Repeated(log))
            failing.goes_on("periodic work failed; it goes on", level="error", part=what, exc_info=error)

    async def _retain_for_ever(self, rest_s: float) -> None:
        """Look at all streams with rules again and again, in slices: there may be many, on a disk that is slow."""
        while True:
            await asyncio.sleep(rest_s)
            until_s = self._loop.time() + SLICE_S
            for stream in [stream for stream in self.streams if stream.retention]:
                for streamlet_id, streamlet in list(stream.streamlets.items()):
                    if self._loop.time() >= until_s:
                        await asyncio.sleep(0)
                        until_s = self._loop.time() + SLICE_S
                    known = self.streams.by_id.get(stream.stream_id)
                    if known is stream and stream.streamlets.get(streamlet_id) is streamlet:
                        self._try("retention", partial(self._retain, stream, streamlet))

    def _retain(self, stream: Stream, streamlet: Streamlet) -> None:
        for entry, position, record in new_starts(streamlet, stream.retention, self.memory.now_us):
            self.streams.move_start(entry, position, record)
        if stream.retention.age_us:
            self.memory.close_older(streamlet.entries.made, stream.retention.age_us // 1000)

    # -- the end -----------------------------------------------------------------------------------------------

    async def close(self, *, flush: bool = True) -> None:
        """Flush everything, unless the broker is ephemeral. Data that the disk does not take stays in the arena.

        `flush`: if False, flush nothing, so that the next launch finds the same as after a crash.
        """
        await self._stop(flush=flush, close_index=True, flush_timeout_s=self._settings.stop_flush_ms / 1000)

    async def _stop(self, *, flush: bool = True, close_index: bool, flush_timeout_s: float | None) -> bool:
        """Stop; return whether all data is on disk. The arena is removed only then, or if the broker is ephemeral."""
        clean = False
        flush = flush and not self._settings.ephemeral
        if flush:
            for entry in self.restart.leftovers():  # of streams that were not opened: the arena will be removed
                for segment in self.restart.restore_entry(entry):
                    self.memory.adopt(segment)
            self.memory.segments.close_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(flush_timeout_s):
                    await self._replicated()
                    clean = await self._flushed()
                    while self.memory.removals.removing:
                        await self._progress()
        self._ticking.cancel()
        self._retaining.cancel()
        if self._repairing is not None:
            self._repairing.cancel()
            await asyncio.wait([self._repairing])
        await self.takeovers.close()
        await self._healing.close()
        await self.replicator.close()
        self._stopped = True
        if self._jobs:
            await asyncio.wait(self._jobs)
        await asyncio.to_thread(self._pool.shutdown)
        # The jobs that were under way at the time-out may have written the rest.
        clean = clean or (flush and self.memory.idle and self.memory.disk.error is None)
        try:
            if clean:
                await asyncio.to_thread(self._index.commit, [], dict(self.memory.ids.meta, clean=True))
        except OSError:
            clean = False
        if flush and not clean:
            log.error(
                "not all data are on disk; shared memory keeps the rest for the next start, unless the host goes down",
                bytes=self.memory.segments.bytes_left,
                stop_flush_ms=self._settings.stop_flush_ms,
                disk_error=str(self.memory.disk.error or ""),
                path=str(self.arena.path),
            )
        if close_index:
            await asyncio.to_thread(self._index.close, clean=clean)
        self.arena.close(keep=not clean and not self._settings.ephemeral)
        return clean

    async def _replicated(self) -> None:
        """Wait until backups have all data and have closed their replicas, for a limited time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLICATE_TIMEOUT_S):
                while not self.replication.logs.settled:
                    self.replication.logs.close_open()
                    await asyncio.sleep(TICK_S / 10)

    async def _flushed(self) -> bool:
        """Wait until everything is on disk; False if the disk does not take it, or data still waits for backups."""
        while not self.memory.idle:
            if self.memory.disk.error is not None or self.memory.waits_for_replicas:
                return False
            await self._progress()
        return True

    async def _progress(self) -> None:
        """Wait until a job is done."""
        self._changed.clear()
        self._work()
        await self._changed.wait()


def _open_index(root: Path, opening: OpenIndex) -> tuple[SegmentIndex, bool]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        return opening(root / "index")
    except OSError as error:
        raise PathNotWritable(
            f"cannot write the log in {root}: {error.strerror}; choose another --data-dir", path=str(root)
        ) from error


def _check_directory(root: Path, index: SegmentIndex, directory_id: str) -> None:
    """Raise `StartError` for the log of another broker: most of it would be dropped as data of other brokers."""
    found = index.meta().get("directory_id", "")
    if found and directory_id and found != directory_id:
        index.close(clean=index.was_closed)
        raise StartError(
            f"{root} is not the log of the broker that {root.parent / BrokerIdentity.names()[0]} names: files of two"
            f" data directories were mixed up; put each back in its place (the log is of directory {found}, the broker"
            f" of {directory_id})",
            path=str(root),
        )


async def _memory(
    arena: Arena, index: SegmentIndex, slot_bytes: int, clock: Clock, flush_delay_ms: int = 0
) -> PersistenceManager:
    found = index.meta()
    meta = {
        "format": FORMAT,
        "clean": False,
        "slot_bytes": max(slot_bytes, found.get("slot_bytes", 0)),
        "next_physical_id": found.get("next_physical_id", 1),
        "first_unsettled_id": found.get("next_physical_id", 1),
        "recover_before_epoch": found.get("recover_before_epoch", 0),
        "spare_before_epoch": found.get("spare_before_epoch", 0),
        "lost_memory": found.get("lost_memory", False),
        "directory_id": found.get("directory_id", ""),
    }
    await asyncio.to_thread(index.commit, [], meta)
    return PersistenceManager(
        arena,
        index,
        PhysicalIds(meta),
        Events(),
        now_ms=int(clock.monotonic_s() * 1000),
        now_us=clock.now_us(),
        flush_delay_ms=flush_delay_ms,
    )


def _differs(arena: Arena, settings: BrokerSettings) -> bool:
    return (arena.slot_bytes, arena.slot_count) != (
        settings.segment_bytes,
        settings.arena_bytes // settings.segment_bytes,
    )
