"""Rebuilds the segments of recovered streamlets: reads replicas of lost launches, and makes segment files of them.

    index: segments that have to come ──┐
    headers that a scan has found ──────┴─► targets: which chunk goes where in which file
    replicas, in the order of `Schedule`, read by `ReplicaFetcher` ──► chunks, verified ──► put in place, in memory
    a complete segment ──`Installer`──► a durable file, with its name, in the index ──► readers, replication

* If a replica fails or is damaged, the next one is read. If none is left, the virtual segment is tried again later, and
  the reason is reported. When nothing else is left to read, backups are asked again what they have, because others may
  be back by then. Data that no replica has, although all backups answer that are not given up, becomes a hole in its
  segment, and readers get the error that it is lost.
* `RebuildLimits` bounds the answers in memory, and the segments that are put together there. Incomplete files are in a
  separate directory, which a start empties: a restart in the middle scans headers again, and goes on with the segments
  that still have to come.
* The recovered data is covered by virtual segments of this broker, in the background
  (``kera.broker.replication.repair``), when nothing more can be read for now: until then the old replicas exist, and
  disks do one thing at a time. A streamlet is *restored* when all of it is covered; then the old replicas are no longer
  needed.

Writing, syncing and checking run on threads; everything else belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kera.broker.backup_ways import OVER_TCP, BackupWays
from kera.broker.log.entry import Entry
from kera.broker.records import Key, SegmentAddress, SegmentRecord
from kera.broker.recovery.assembly import Assembly, Target, put_in_place
from kera.broker.recovery.installer import Installer
from kera.broker.recovery.layout import Places
from kera.broker.recovery.progress import UNEXPECTED, ProgressBook, RebuildProgress
from kera.broker.recovery.replica_fetcher import BackupLinks, ReplicaFetcher
from kera.broker.recovery.replica_reader import ReadLimits
from kera.broker.recovery.scan import Launches, Ref, ReplicasToRead, Scanned
from kera.broker.recovery.schedule import Schedule
from kera.broker.recovery.survey import Materials
from kera.broker.replication.manager import Replication
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError
from kera.v1 import common_pb2

log = get_logger("kera.recovery")

THREADS = 4
INSTALLING_MAX = 2
"""Maximum number of batches of files that are installed at the same time."""
RESCAN_REST = 20
"""Pause before the next scan, as a multiple of the last scan's time: a scan reads the headers of all missing data."""
ORDER_REST = 10
"""Pause before the next ordering, as a multiple of the last one's time: 6 µs for each segment to come."""
ORDER_REST_S_MAX = 1.0

Rescan = Callable[[set[Ref]], Awaitable[Materials]]


@dataclass(frozen=True, slots=True)
class RebuildLimits:
    """Limits and pauses of rebuilding."""

    parallel_max: int = 8
    """Maximum number of replicas that are read at the same time."""
    per_backup_max: int = 2
    read_bytes_max: int = 8 << 20
    """Maximum size of one answer: a whole replica of the usual size."""
    assembled_bytes_max: int = 64 << 20
    """Maximum size of the segments that are put together in memory."""
    retry_s: float = 1.0
    """Pause after a failure of a backup or of the disk."""
    rescan_s: float = 5.0
    """Minimum pause between scans for data that no backup had."""
    order_rest_s: float = 0.0
    """Pause before the replicas are put in order for the first time, because many streamlets may begin in a row."""


async def keep_doing(step: Callable[[], Awaitable[bool | None]], *, retry_s: float) -> None:
    """Repeat a step until it returns True. Unexpected exceptions are logged, and do not end the repetition."""
    done, failing = False, Repeated(log)
    while not done:
        try:
            done = bool(await step())
            failing.over("a recovery task goes on")
        except Exception as error:  # noqa: BLE001 - it is logged
            failing.goes_on("unexpected exception in a recovery task", level="error", exc_info=error)
            await asyncio.sleep(retry_s)


class Rebuild:
    """Rebuilds the segments of recovered streamlets from replicas, in bounded memory, until each is on disk.

    Belongs to one event loop.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: PersistenceManager,
        replication: Replication,
        *,
        find: Callable[[SegmentAddress], Entry | None],
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        rescan: Rescan,
        ways: BackupWays = OVER_TCP,
        limits: RebuildLimits,
    ) -> None:
        """`find`: returns the entry of a segment; `backups`: returns all known backups; `rescan`: scans again."""
        self._store = store
        self._memory = memory
        self._find = find
        self._rescan = rescan
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, "kera-recover")
        self.book = ProgressBook(store.index, replication, exists=self._exists)
        self._schedule = Schedule()
        self._assembly = Assembly(limits.assembled_bytes_max)
        read_limits = ReadLimits(per_backup_max=limits.per_backup_max, read_bytes_max=limits.read_bytes_max)
        self._links = BackupLinks(ways, read_limits)
        self._fetcher = ReplicaFetcher(
            self._links,
            self.book.totals,
            backups=backups,
            lacking=self._lacking_streamlets,
            take=self._take,
            read_bytes_max=limits.read_bytes_max,
        )
        self._installer = Installer(
            store,
            memory,
            self._assembly,
            self._threads,
            find=find,
            on_installed=self._installed,
            on_gone=self._discard,
            on_unsure=self._get_again,
            retry_s=limits.retry_s,
        )
        self._targets: dict[SegmentAddress, Target] = {}
        """The segments to come, until they are installed. Threads read it, too."""
        self._cursors: dict[EntryId, Position] = {}
        """The positions up to which all consumer groups have read entries, as far as the coordinator has sent them."""
        self._nowhere: dict[SegmentAddress, str] = {}
        """Segments with chunks that no answering backup has, each with a description."""
        self._more_to_read = asyncio.Event()
        self._ordering = False
        """Whether an ordering of the replicas to read is scheduled."""
        self._order_rest_s = limits.order_rest_s
        """Pause before the next ordering, so that streamlets that begin in a row are ordered together."""
        self._rescan_at_s = 0.0
        """When the next scan for missing chunks may begin."""
        self._cannot_look = Repeated(log)
        self._tasks: set[asyncio.Task[None]] = set()

    # -- segments to come ------------------------------------------------------------------------------------------

    def begin(
        self,
        ref: Ref,
        sources: frozenset[Launches],
        records_lost: int,
        materials: Materials | None,
        cursors: Mapping[int, Position],
    ) -> None:
        """Begin to get the missing data of an open streamlet; `materials`: the chunks found by a scan, if known."""
        progress = self.book.begin(ref, sources, records_lost)
        self._cursors.update((EntryId(*ref, entry), position) for entry, position in cursors.items())
        if not self._tasks:
            steps = [self._read_next] * self._limits.parallel_max + [self._installer.install_some] * INSTALLING_MAX
            for step in (*steps, self._tend):
                self._keep_doing(step)
        self._keep_doing(partial(self._begin, ref, progress, materials))

    def _keep_doing(self, step: Callable[[], Awaitable[bool | None]]) -> None:
        self._tasks.add(task := asyncio.create_task(keep_doing(step, retry_s=self._limits.retry_s)))
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, ref: Ref, progress: RebuildProgress, materials: Materials | None) -> bool:
        """Find out which chunks of a streamlet have to come, and their places; False if that has to be repeated."""
        found = await asyncio.to_thread(lambda: list(self._store.index.segments_of_streamlet(*ref)))
        if self.book.streamlets.get(ref) is not progress:
            return True
        if not progress.begun:
            self.book.measure(progress, found)
        records = {address: record for address, record in found if address in progress.to_come}
        if not records:
            return True
        places: dict[SegmentAddress, Places] = {}
        cannot_begin = UNEXPECTED
        try:
            materials = materials or await self._rescan({ref})
            places = await asyncio.to_thread(materials.places, records)
            cannot_begin = ""
        except KeraError as error:
            cannot_begin = error.message
        finally:
            progress.cannot_begin = cannot_begin
        if self.book.streamlets.get(ref) is not progress:
            return True
        if materials is None or cannot_begin:
            await asyncio.sleep(self._limits.retry_s)
            return False
        self._add(records, places, materials.scanned)
        self._order_soon()
        return True

    def _exists(self, address: SegmentAddress) -> bool:
        entry = self._find(address)
        return entry is not None and entry.exists((address.group_id, address.segment_id))

    def _get_again(self, target: Target) -> None:
        """Get all of a segment again, into another file, because the disk has not made its file durable."""
        if self._targets.get(target.address) is target:
            self._begin_anew(target, {target.address: target.places}, Scanned())
            self._schedule.again(target.address, self._installer.failing)
        else:
            self._discard(target)

    def _add(
        self,
        records: Mapping[SegmentAddress, SegmentRecord],
        places: Mapping[SegmentAddress, Places],
        scanned: Scanned,
    ) -> None:
        """Add segments that have to come."""
        for address, record in records.items():
            if address not in self._targets:
                physical_id = self._memory.ids.take()
                path = self._store.arriving_path(physical_id)
                self._targets[address] = Target.of(address, record, places[address], path, physical_id)
        self._schedule.add(scanned.replicas.values(), records, new=True)
        for address in records:
            if _is_unsure(self._find, address):
                self._schedule.want(address)

    def _order_soon(self) -> None:
        if not self._ordering:
            self._ordering = True
            self._loop.call_later(self._order_rest_s, self._order)

    def _order(self) -> None:
        begun_s = self._loop.time()
        self._ordering = False
        lengths = {address: target.record.length for address, target in self._targets.items()}
        self._schedule.order(lengths, self._cursor)
        self._order_rest_s = min(ORDER_REST * (self._loop.time() - begun_s), ORDER_REST_S_MAX)
        self._more_to_read.set()

    def _cursor(self, entry_id: EntryId) -> Position:
        if entry_id in self._cursors:
            return self._cursors[entry_id]
        entry = self._find(SegmentAddress(*entry_id, 0, 0))
        return min(entry.committed.values(), default=EARLIEST) if entry is not None else EARLIEST

    def wanted(self, entry: Entry, key: Key) -> None:
        """Read a segment first, because a reader waits for it."""
        self._schedule.want(entry.address(key))
        self._more_to_read.set()

    def end(self, ref: Ref) -> None:
        """Stop rebuilding a streamlet that is restored, or was dropped."""
        for target in [target for address, target in self._targets.items() if address[:2] == ref]:
            if target.installing:
                self._forget(target)  # its file is removed once it is complete, because the index does not take it
            else:
                self._discard(target)
        self.book.end(ref)

    def _forget(self, target: Target) -> None:
        """Forget a segment that has come, or was removed."""
        self._targets.pop(target.address, None)
        self._nowhere.pop(target.address, None)
        if not target.installing:  # installing needs the memory until the data is in the file
            self._assembly.release(target)
        self.book.forget(target.address, target.record.length)
        self._schedule.forget(target.address)
        if not self._targets:
            self._assembly.clear()

    def _discard(self, target: Target) -> None:
        """Forget a segment that was removed before it has come, and remove its file."""
        self._forget(target)
        self._loop.run_in_executor(self._threads, self._store.disk.remove, target.path)

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read_next(self) -> None:
        replicas = self._schedule.next(self._lacks)
        if replicas is None:
            if self._schedule.quiet:
                self.book.cover()
            self._more_to_read.clear()
            await self._more_to_read.wait()
            return
        failure = UNEXPECTED
        try:
            failure = await self._fetcher.fetch(replicas)
        finally:
            self._schedule.ended(replicas.key, failure)

    def _lacks(self, address: SegmentAddress) -> bool:
        """Whether a segment needs chunks; not if retention has removed it before it came."""
        target = self._targets.get(address)
        if target is None or not target.missing or target.installing:
            return False
        if self._exists(address):
            return True
        self._discard(target)
        return False

    def _lacking_streamlets(self, replicas: ReplicasToRead) -> set[Ref]:
        return {address[:2] for address in replicas.segments if self._lacks(address)}

    async def _take(self, chunks: memoryview) -> str:
        """Put the chunks of an answer in their places; return what is wrong with them. Raises errors of the disk."""
        run = self._loop.run_in_executor
        taken = await run(self._threads, put_in_place, chunks, self._targets, self._assembly, self._store.calls)
        for target, number in taken.chunks:
            if not target.here[number]:
                target.here[number] = 1
                target.missing -= 1
                complete = not (target.missing or target.holes or target.installing)
                if complete and target.address in self._targets:
                    self._installer.add(target)
        return taken.wrong

    def _installed(self, target: Target) -> None:
        self._forget(target)
        self.book.installed(target.address, target.record.length, waited_for=_is_unsure(self._find, target.address))
        if self._schedule.quiet:  # otherwise it is covered later, see the module's docstring
            self.book.cover()

    # -- missing chunks --------------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Retry failed replicas, and give up chunks that no backup has."""
        await asyncio.sleep(self._limits.retry_s)
        quiet = self._schedule.quiet
        failed = self._schedule.retry()
        if failed:
            self._order_soon()
        self._note_waits(failed)
        try:
            if quiet:
                await self._look_for_lacking()
            self._cannot_look.over("missing chunks can be searched for again")
        except KeraError as error:
            self._cannot_look.goes_on("cannot search for missing chunks; retrying", error=error.message)

    def _note_waits(self, failed: Iterable[tuple[ReplicasToRead, str]]) -> None:
        """Set the reasons for which each streamlet waits, as far as known."""
        waits: defaultdict[Ref, list[str]] = defaultdict(list)
        for replicas, reason in failed:
            for ref in self._lacking_streamlets(replicas):
                waits[ref].append(reason)
        for address, reason in self._nowhere.items():
            waits[address[:2]].append(reason)
        self.book.note_waits(waits, self._installer.failing)

    async def _look_for_lacking(self) -> None:
        """Scan backups again for missing chunks, when all replicas were read or have failed.

        Chunks on no backup that answers wait for the backups that do not answer; if all answer, they are given up.
        """
        schedule = self._schedule
        lacking = {address: target for address, target in self._targets.items() if not target.installing}
        if not lacking or self._loop.time() < self._rescan_at_s:
            return
        begun_s = self._loop.time()
        unread = schedule.unread(lacking)
        materials = await self._rescan({target.address[:2] for target in lacking.values()})
        records = {address: target.record for address, target in lacking.items()}
        places = await asyncio.to_thread(materials.places, records)
        now_s = self._loop.time()
        self._rescan_at_s = now_s + max(self._limits.rescan_s, (now_s - begun_s) * RESCAN_REST)
        self._nowhere.clear()
        for address, target in list(lacking.items()):
            if self._targets.get(address) is not target or target.installing:
                del lacking[address]
            elif not self._exists(address):
                self._discard(target)
                del lacking[address]
        counts = {address: schedule.count_replicas(address) for address in lacking}
        schedule.add(materials.scanned.replicas.values(), lacking, new=False)
        for address, target in lacking.items():
            if len(places[address].first_records) > len(target.places.first_records):
                self._begin_anew(target, places, materials.scanned)
            elif schedule.count_replicas(address) == counts[address] and not schedule.may_come(address, unread):
                self._wait_or_give_up(target, materials.scanned.away)
        self._order_soon()

    def _begin_anew(self, target: Target, places: Mapping[SegmentAddress, Places], scanned: Scanned) -> None:
        """Get all of a segment again: more places of its chunks are known now, or the data that has come is lost."""
        del self._targets[target.address]
        self._assembly.release(target)
        self._loop.run_in_executor(self._threads, self._store.disk.remove, target.path)
        self._add({target.address: target.record}, places, scanned)

    def _wait_or_give_up(self, target: Target, away: Mapping[int, str]) -> None:
        lost = target.record.chunk_count - sum(target.here)
        if away:
            where = f"segment {target.key}, stream {target.address.stream_id}, streamlet {target.address.streamlet_id}"
            self._nowhere[target.address] = (
                f"{lost} chunks of {where} are on no backup that answers; {sorted(away)} do not"
            )
            return
        target.holes = lost > 0
        self.book.totals.chunks_lost += lost
        if lost:
            log.error("chunks are on no backup any more", address=list(target.address), chunks=lost)
        self._installer.add(target)

    async def close(self) -> None:
        """End the rebuild; incomplete segments come again after the next start."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._links.close()
        await asyncio.to_thread(self._threads.shutdown)


def _is_unsure(find: Callable[[SegmentAddress], Entry | None], address: SegmentAddress) -> bool:
    """Whether a segment is in the unsure tail of its entry, so that readers wait for its replicas."""
    entry = find(address)
    return entry is not None and entry.unsure is not None and address[3:] >= entry.unsure.position[:2]
