"""Gets the chunks that have yet to come: reads replicas of launches that are gone, and makes segment files of them.

    index: segments that are to come ───┐
    headers that a scan has found ──────┴─► targets: which chunk goes where in which file
    replicas, read whole and in parallel, wanted-first ──► chunks, verified ──► put in place, in memory
    a segment that is complete ──► a durable file, with its name; its physical id in the index ──► readers, replication

* Wanted first: segments that a reader waits for, then those behind what consumer groups have read, then older ones. A
  virtual segment is read when its first wanted segment is; all that it has of others is taken along, and is not read
  again.
* A replica that fails or is damaged: the next one. None left: it waits, says so, and is tried again; and when nothing
  else is left to read, backups are asked anew what they have, as others may be back by then. What no replica has,
  though all backups answer that are not given up, becomes a hole in its segment, and readers are told that it is lost.
* Bounded: `PARALLEL_MAX` answers of `READ_BYTES_MAX` (or of one larger chunk) are in memory, and of the segments that
  they make what ``kera.broker.recovery.assembly`` allows. Files that are not complete are in a directory of their own,
  which a start empties: a restart in the middle looks through headers again and goes on with the segments still to
  come.
* What has come is covered anew by virtual segments of this broker, in the background
  (``kera.broker.replication.repair``), when nothing is left that can be read just now: the old replicas are there as
  long, and disks have one thing to do at a time. When all of a streamlet is covered, it is *restored*: the old replicas
  are not needed any more.

Writing, syncing and checking run on threads; all else belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from kera.broker.log.entry import Entry
from kera.broker.records import Key, SegmentAddress, SegmentRecord
from kera.broker.recovery.assembly import Assembly, Taken, Target, make_durable, put_in_place
from kera.broker.recovery.plan import Places, StreamletMerge, places
from kera.broker.recovery.replica_reader import BackupLink, ReadLimits
from kera.broker.recovery.scan import Ref, Replicas, Scanned, VirtualKey, add_streamlets
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.segment_files import SegmentStore
from kera.core.errors import KeraError, Unavailable
from kera.core.header_table import Headers, table
from kera.core.ids import Position
from kera.core.repeated import Repeated
from kera.core.telemetry import get_logger
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.recovery")

PARALLEL_MAX = 8
"""Replicas that are read at the same time."""
PER_BACKUP_MAX = 2
READ_BYTES_MAX = 8 << 20
"""In one answer: a whole replica of the usual size."""
THREADS = 4
SETTLERS = 2
"""Batches of files that are made durable at the same time."""
SETTLED_MAX = 4
"""Files in a batch."""
RETRY_S = 1.0
"""After a failure: of a backup, or of the disk."""
RESCAN_S = 5.0
"""Between looks for what no backup had, at least."""
RESCAN_REST = 20
"""So many times as long as a look took the next one waits: it reads the headers of all that is missing."""
WAITS_MAX = 20
"""Of what a streamlet waits for, so much is told."""
ORDER_REST = 10
"""So many times as long as it took to put all in order the next time waits: 6 µs for each segment that is to come."""
ORDER_REST_S_MAX = 1.0
CHECKED_MAX = 2_000
"""Segments of which a look at the progress finds out whether they are covered."""

Rescan = Callable[[set[Ref]], Awaitable["Materials"]]


@dataclass(slots=True)
class Materials:
    """What a scan has found of streamlets."""

    merges: Sequence[StreamletMerge]
    scanned: Scanned

    def chunks(self) -> dict[SegmentAddress, Headers]:
        """All chunks, by segment."""
        return {address: chunks for merge in self.merges for address, chunks in merge.chunks().items()}

    def places(self, records: Mapping[SegmentAddress, SegmentRecord]) -> dict[SegmentAddress, Places]:
        """Where the chunks of segments go."""
        chunks, none = self.chunks(), table()
        return {address: places(record, chunks.get(address, none)) for address, record in records.items()}


@dataclass(slots=True)
class Progress:
    """How far a streamlet is."""

    sources: frozenset[tuple[int, int]]
    records_lost: int = 0
    begun: bool = False
    """It is known what is to come."""
    bytes_total: int = 0
    bytes_to_come: int = 0
    to_come: set[SegmentAddress] = field(default_factory=set)
    uncovered: dict[SegmentAddress, int] = field(default_factory=dict)
    """Not covered by virtual segments of this broker, with their lengths."""
    bytes_uncovered: int = 0
    cannot_begin: str = ""
    """Why nobody can say where its chunks are, if so."""
    waits_for: list[str] = field(default_factory=list)

    @property
    def readable(self) -> bool:
        """All of it is here."""
        return self.begun and not self.to_come

    @property
    def restored(self) -> bool:
        """All of it is here, and has its replicas."""
        return self.readable and not self.uncovered


@dataclass(slots=True)
class Totals:
    """What has happened since the start."""

    bytes_recovered: int = 0
    bytes_restored: int = 0
    segments_recovered: int = 0
    segments_to_come: int = 0
    """As of now."""
    chunks_lost: int = 0
    replicas_failed: int = 0


class _Reading(NamedTuple):
    """What is left to be done of a virtual segment."""

    replicas: Replicas
    tried: set[int]
    """Backups whose replicas were no use."""


class Recovering:
    """See the head of this module. Belongs to one event loop."""

    def __init__(
        self,
        index: SegmentIndex,
        store: SegmentStore,
        memory: PersistenceManager,
        replication: Replication,
        *,
        find: Callable[[SegmentAddress], Entry | None],
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        rescan: Rescan,
        node_id: str = "",
    ) -> None:
        """`backups`: all there are; `rescan`: looks for chunks of streamlets once more."""
        self.totals = Totals()
        self.streamlets: dict[Ref, Progress] = {}
        self._index = index
        self._store = store
        self._memory = memory
        self._replication = replication
        self._find = find
        self._backups = backups
        self._rescan = rescan
        self._node_id = node_id
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(THREADS, "kera-recover")
        self._targets: dict[SegmentAddress, Target] = {}
        self._assembly = Assembly()
        self._readings: dict[VirtualKey, _Reading] = {}
        self._queue: deque[VirtualKey] = deque()
        self._urgent: deque[VirtualKey] = deque()
        self._failed: dict[VirtualKey, str] = {}
        """To be tried again, and why."""
        self._lacking: dict[SegmentAddress, str] = {}
        """What is on no backup that answers, in words."""
        self._exhausted: set[VirtualKey] = set()
        self._complete: deque[Target] = deque()
        self._uncovered: list[tuple[SegmentAddress, int]] = []
        """Segments that have come, with their lengths, and wait to be covered until others have."""
        self._links: dict[int, BackupLink] = {}
        self._cursors: dict[tuple[int, int, int], Position] = {}
        """Up to where entries were read by all consumer groups."""
        self._ordering = False
        self._order_rest_s = 0.0
        """Until the next time, so that many streamlets that begin one after the other are put in order together."""
        self._cannot_look = Repeated(log)
        self._rescan_s = 0.0
        """When what is nowhere may be looked for again."""
        self._more = asyncio.Event()
        self._settle_more = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = False
        self._reading_now: set[VirtualKey] = set()
        self._settling_fails = ""
        """Why what has come cannot be made durable, if so."""
        self._limits = ReadLimits(per_backup_max=PER_BACKUP_MAX, read_bytes_max=READ_BYTES_MAX)
        memory.when_awaited(self.wanted)

    @property
    def active(self) -> bool:
        """Whether anything has yet to come, or to be covered."""
        return any(not progress.restored for progress in self.streamlets.values())

    # -- what is to come -------------------------------------------------------------------------------------------

    def begin(
        self,
        ref: Ref,
        sources: frozenset[tuple[int, int]],
        records_lost: int,
        materials: Materials | None,
        cursors: Mapping[int, Position],
    ) -> None:
        """Get what is to come of a streamlet that is open; `materials`: what was found of it, if that is known."""
        self.streamlets[ref] = Progress(sources, records_lost)
        if not self._running:
            self._running = True
            for _ in range(PARALLEL_MAX):
                self._spawn(self._work())
            for _ in range(SETTLERS):
                self._spawn(self._settle_all())
            self._spawn(self._tend())
        self._spawn(self._begin(ref, self.streamlets[ref], materials, cursors))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("unexpected exception in a recovery task", exc_info=error)

    async def _begin(
        self, ref: Ref, progress: Progress, materials: Materials | None, cursors: Mapping[int, Position]
    ) -> None:
        found = await asyncio.to_thread(lambda: list(self._index.segments_of_streamlet(*ref)))
        if self.streamlets.get(ref) is not progress:
            return
        for address, record in found:
            if record.open or not self._exists(address):
                continue
            progress.bytes_total += record.length
            if record.to_come:
                progress.to_come.add(address)
                progress.bytes_to_come += record.length
            if not self._replication.coverage.covers(address, record.length):
                progress.uncovered[address] = record.length
                progress.bytes_uncovered += record.length
        progress.begun = True
        records = {address: record for address, record in found if address in progress.to_come}
        self._count()
        if not records:
            return
        while materials is None:
            try:
                materials = await self._rescan({ref})
            except KeraError as error:
                progress.cannot_begin = error.message
                await asyncio.sleep(RETRY_S)
            except Exception as error:  # a defect must not end recovery
                log.error("cannot look for what is to come", exc_info=error)
                progress.cannot_begin = _of_defect(error)
                await asyncio.sleep(RETRY_S)
            if self.streamlets.get(ref) is not progress:
                return
        progress.cannot_begin = ""
        self._cursors.update(((*ref, entry), position) for entry, position in cursors.items())
        spots = await asyncio.to_thread(materials.places, records)
        if self.streamlets.get(ref) is progress:
            self._add(records, spots, materials.scanned)
            self._order_soon()

    def _exists(self, address: SegmentAddress) -> bool:
        entry = self._find(address)
        return entry is not None and entry.exists((address.group_id, address.segment_id))

    def _add(
        self,
        records: Mapping[SegmentAddress, SegmentRecord],
        places_of: Mapping[SegmentAddress, Places],
        scanned: Scanned,
    ) -> None:
        """Take up segments that are to come."""
        for address, record in records.items():
            if address in self._targets:
                continue
            physical_id = self._memory.take_physical_id()
            spots = places_of[address]
            count = len(spots.first_records)
            self._targets[address] = Target(
                address,
                record,
                spots,
                self._store.arriving_path(physical_id),
                physical_id,
                bytearray(count),
                count,
                holes=count < record.chunk_count,
            )
        for key, replicas in scanned.replicas.items():
            mine = [each for each in (*replicas.first, *replicas.also) if each in records]
            known = self._readings.get(key)
            if known is not None:
                known.replicas.first |= replicas.first
                known.replicas.also |= replicas.also
                known.replicas.backup_ids = tuple(dict.fromkeys((*known.replicas.backup_ids, *replicas.backup_ids)))
            elif mine:
                self._readings[key] = _Reading(replicas, set())
            for address in mine:
                target = self._targets[address]
                if key not in target.sources:
                    target.sources.append(key)
            if mine:
                self._exhausted.discard(key)

    def _order_soon(self) -> None:
        if not self._ordering:
            self._ordering = True
            self._loop.call_later(self._order_rest_s, self._order)

    def _order(self) -> None:
        """Bring what is to be read into the order in which it is wanted."""
        begun_s = time.perf_counter()
        self._ordering = False
        ranks: dict[SegmentAddress, tuple[int, int]] = {}
        by_entry: dict[tuple[int, int, int], list[Target]] = {}
        for target in self._targets.values():
            by_entry.setdefault(target.address[:3], []).append(target)
        for entry_id, targets in by_entry.items():
            cursor = self._cursor(entry_id)
            targets.sort(key=lambda target: target.key)
            behind = [target for target in targets if (*target.key, target.record.length) > cursor]
            before = targets[: len(targets) - len(behind)]
            ranks.update((target.address, (0, number)) for number, target in enumerate(behind))
            ranks.update((target.address, (1, number)) for number, target in enumerate(reversed(before)))
        last = (2, 0)

        def rank(reading: _Reading) -> tuple[bool, tuple[int, int], VirtualKey]:
            replicas = reading.replicas
            wanted = replicas.first or replicas.also
            return not replicas.first, min((ranks.get(each, last) for each in wanted), default=last), replicas.key

        waiting = [reading for key, reading in self._readings.items() if key not in self._exhausted]
        self._queue = deque(reading.replicas.key for reading in sorted(waiting, key=rank))
        self._order_rest_s = min(ORDER_REST * (time.perf_counter() - begun_s), ORDER_REST_S_MAX)
        self._more.set()

    def _cursor(self, entry_id: tuple[int, int, int]) -> Position:
        entry = self._find(SegmentAddress(*entry_id, 0, 0))
        if entry_id in self._cursors:
            return self._cursors[entry_id]
        return min(entry.committed.values(), default=Position(0, 0, 0)) if entry is not None else Position(0, 0, 0)

    def wanted(self, entry: Entry, key: Key) -> None:
        """A reader waits for a segment."""
        target = self._targets.get(entry.address(key))
        if target is not None:
            self._urgent.extend(each for each in target.sources if each not in self._urgent)
            self._more.set()

    def end(self, ref: Ref) -> None:
        """The streamlet has come whole, or is gone."""
        progress = self.streamlets.pop(ref, None)
        if progress is not None:
            for target in [target for address, target in self._targets.items() if address[:2] == ref]:
                if target.settling:
                    self._forget(target)  # its file goes when it is whole, and has no place
                else:
                    self._discard(target)
            self._count()

    def _forget(self, target: Target) -> None:
        """A segment has come, or is gone."""
        self._targets.pop(target.address, None)
        self._lacking.pop(target.address, None)
        if not target.settling:  # what settles is needed until it is in its file
            self._assembly.release(target)
        progress = self.streamlets.get(target.address[:2])
        if progress is not None and target.address in progress.to_come:
            progress.to_come.discard(target.address)
            progress.bytes_to_come -= target.record.length
        if not self._targets:
            self._assembly.clear()
            self._readings.clear()
            self._exhausted.clear()
            self._failed.clear()
            self._queue.clear()
            self._urgent.clear()
        self._count()

    def _count(self) -> None:
        self.totals.segments_to_come = sum(len(progress.to_come) for progress in self.streamlets.values())

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            key = self._next()
            if key is None:
                self._cover_when_quiet()
                self._more.clear()
                await self._more.wait()
                continue
            self._reading_now.add(key)
            try:
                await self._read(self._readings[key])
            except Exception as error:  # a defect must not end recovery
                log.error("reading a replica failed", virtual_segment=list(key), exc_info=error)
                self._failed[key] = _of_defect(error)
            finally:
                self._reading_now.discard(key)

    def _next(self) -> VirtualKey | None:
        for queue in (self._urgent, self._queue):
            while queue:
                key = queue.popleft()
                reading = self._readings.get(key)
                if reading is None or key in self._exhausted or key in self._failed:
                    continue
                if self._open_targets(reading.replicas):
                    self._exhausted.add(key)  # nobody else begins with it; a failure takes it back
                    return key
        return None

    def _open_targets(self, replicas: Replicas) -> set[Ref]:
        """The streamlets for which it has something that is missing."""
        found: set[Ref] = set()
        for address in (*replicas.first, *replicas.also):
            target = self._targets.get(address)
            if target is not None and target.missing and not target.settling:
                if self._exists(address):
                    found.add(address[:2])
                else:
                    self._discard(target)
        return found

    def _discard(self, target: Target) -> None:
        """Retention has removed a segment before it came."""
        self._forget(target)
        self._unlink(target)

    def _unlink(self, target: Target) -> None:
        self._loop.run_in_executor(self._pool, lambda: target.path.unlink(missing_ok=True))

    async def _read(self, reading: _Reading) -> None:
        replicas = reading.replicas
        infos = {info.backup_id: info for info in self._backups()}
        reasons = []
        for backup_id in replicas.backup_ids:
            if backup_id in reading.tried:
                continue
            info = infos.get(backup_id)
            if info is not None and info.draining and not info.alive:
                # Gone for good. Should it come back all the same, the next look finds it.
                replicas.backup_ids = tuple(each for each in replicas.backup_ids if each != backup_id)
                continue
            try:
                if info is None or not info.alive:
                    raise Unavailable("it is not alive")
                link = await self._link(info)
                async with link.turns:
                    wrong = await self._replica(link, replicas)
            except KeraError as error:
                self.totals.replicas_failed += 1
                if info is not None and info.draining:
                    reading.tried.add(backup_id)  # it is given up: it was asked once more, and that is all
                else:
                    reasons.append(f"backup {backup_id}: {error.message}")
                continue
            except OSError as error:
                log.error("cannot write what is recovered; it is tried again", error=str(error))
                self._failed[replicas.key] = _of_disk(error)
                return
            if not wrong:
                return
            reading.tried.add(backup_id)
            log.warning("a replica is not whole", virtual_segment=list(replicas.key), backup_id=backup_id, reason=wrong)
        if reasons and self._open_targets(replicas):
            self._failed[replicas.key] = (
                f"virtual segment {replicas.key.virtual_segment_id:#x} of broker {replicas.key.broker_id}"
                f" ({'; '.join(reasons)})"
            )

    async def _link(self, info: common_pb2.BackupInfo) -> BackupLink:
        link = self._links.get(info.backup_id)
        if link is None or link.failed:
            if link is not None:
                self._spawn(link.close())  # a backup that hangs keeps its side open
            link = self._links[info.backup_id] = BackupLink(info, self._node_id, self._limits)
        if not await link.connect():
            raise Unavailable(link.failed)
        return link

    async def _replica(self, link: BackupLink, replicas: Replicas) -> str:
        """Read a replica as far as it is needed; returns what is wrong with it. Raises errors of backup and disk."""
        request = backup_pb2.ReadReplicaRequest(
            broker_id=replicas.key.broker_id,
            virtual_segment_id=replicas.key.virtual_segment_id,
            bytes_max=READ_BYTES_MAX,
        )
        streamlets: dict[int, set[int]] = {}
        for stream_id, streamlet_id in self._open_targets(replicas):
            streamlets.setdefault(stream_id, set()).add(streamlet_id)
        add_streamlets(request, streamlets)
        wrong, length = "", replicas.length
        while request.offset < length:
            answer, chunks = await link.read(request)
            length = answer.replica.length
            if answer.next_offset <= request.offset:
                return f"it answers nothing at offset {request.offset}"
            if answer.replica.chunks_damaged:
                wrong = f"{answer.replica.chunks_damaged} chunks are damaged"
            if len(chunks):
                taken = await self._loop.run_in_executor(
                    self._pool, put_in_place, chunks, self._targets, self._assembly
                )
                wrong = taken.wrong or wrong
                self._took(taken)
            request.offset = answer.next_offset
            if not self._open_targets(replicas):
                return ""
        return wrong

    def _took(self, taken: Taken) -> None:
        for target, number in taken.chunks:
            if not target.here[number]:
                target.here[number] = 1
                target.missing -= 1
                if not (target.missing or target.holes or target.settling) and target.address in self._targets:
                    self._completed(target)

    def _completed(self, target: Target) -> None:
        target.settling = True
        self._complete.append(target)
        self._settle_more.set()

    # -- files that are complete -----------------------------------------------------------------------------------

    async def _settle_all(self) -> None:
        while True:
            if not self._complete:
                self._settle_more.clear()
                await self._settle_more.wait()
                continue
            batch = [self._complete.popleft() for _ in range(min(SETTLED_MAX, len(self._complete)))]
            checksums = await self._synced(batch)
            if checksums is None:
                self._complete.extend(batch)
                await asyncio.sleep(RETRY_S)
                continue
            for target, checksum in zip(batch, checksums, strict=True):
                self._assembly.release(target)
                self._settle(target, checksum)

    async def _synced(self, batch: Sequence[Target]) -> list[int] | None:
        """Make files durable; returns their checksums, or None when it has to be tried again."""
        try:
            checksums = await self._loop.run_in_executor(self._pool, make_durable, batch, self._store.disk)
        except OSError as error:
            log.error("cannot sync what is recovered; it is tried again", error=str(error))
            self._settling_fails = _of_disk(error)
            return None
        except Exception as error:  # a defect must not end recovery
            log.error("syncing failed", exc_info=error)
            self._settling_fails = _of_defect(error)
            return None
        self._settling_fails = ""
        return checksums

    def _settle(self, target: Target, checksum: int) -> None:
        entry = self._find(target.address)
        if entry is None:
            self._discard(target)
            return
        # With holes, a look at each chunk is what finds them: no checksum spares it.
        record = target.record._replace(physical_id=target.physical_id, crc32c=0 if target.holes else checksum)
        self._memory.install(entry, target.key, record, lambda _error: self._settled(target))

    def _settled(self, target: Target) -> None:
        record = self._index.segment(target.address)
        if record is None or record.physical_id != target.physical_id:
            self._discard(target)
            return
        self.totals.segments_recovered += 1
        self.totals.bytes_recovered += record.length
        self._forget(target)
        self._uncovered.append((target.address, record.length))
        self._cover_when_quiet()

    def _cover_when_quiet(self) -> None:
        """Have covered what has come, unless there is more to read."""
        if self._reading_now or self._queue or self._urgent:
            return
        covered, self._uncovered = self._uncovered, []
        for address, length in covered:
            self._replication.recovered(address, length)

    # -- what does not come ----------------------------------------------------------------------------------------

    async def _tend(self) -> None:
        """Try again what has failed, and give up what nobody has."""
        while True:
            await asyncio.sleep(RETRY_S)
            quiet = not (self._reading_now or self._queue or self._urgent)
            failed, self._failed = self._failed, {}
            if failed:
                self._exhausted.difference_update(failed)
                self._order_soon()
            try:
                self._tell(failed)
                if quiet:
                    await self._look_for_lacking(failed)
                self._cannot_look.over("what is missing can be looked for again")
            except KeraError as error:
                self._cannot_look.goes_on("cannot look for what is missing; it is tried again", error=error.message)
            except Exception as error:  # a defect must not end recovery
                log.error("cannot look for what is missing; it is tried again", exc_info=error)

    def _tell(self, failed: Mapping[VirtualKey, str]) -> None:
        """Have each streamlet say what it waits for, of that which is known."""
        waits: dict[Ref, list[str]] = {}
        for key, reason in failed.items():
            reading = self._readings.get(key)
            for ref in self._open_targets(reading.replicas) if reading is not None else ():
                waits.setdefault(ref, []).append(reason)
        for address, reason in self._lacking.items():
            waits.setdefault(address[:2], []).append(reason)
        for ref, progress in self.streamlets.items():
            general = [progress.cannot_begin, self._settling_fails] if progress.to_come else []
            progress.waits_for = [*filter(None, general), *waits.get(ref, [])][:WAITS_MAX]

    async def _look_for_lacking(self, failed: Collection[VirtualKey]) -> None:
        """What is missing when all was read, but for what has `failed`: look once more who has it.

        What is on none of the backups that answer waits for those that do not, or is given up.
        """
        lacking = [target for target in self._targets.values() if not target.settling]
        if not lacking or self._loop.time() < self._rescan_s:
            return
        begun_s = self._loop.time()
        unread = {key for target in lacking for key in target.sources if not self._is_read(key)}
        materials = await self._rescan({target.address[:2] for target in lacking})
        spots = await asyncio.to_thread(materials.places, {target.address: target.record for target in lacking})
        now_s = self._loop.time()
        self._rescan_s = now_s + max(RESCAN_S, (now_s - begun_s) * RESCAN_REST)
        self._lacking.clear()
        for target in lacking:
            if self._targets.get(target.address) is not target or target.settling:
                continue
            if not self._exists(target.address):
                self._discard(target)
                continue
            before = self._replicas_of(target)
            if len(spots[target.address].first_records) > len(target.places.first_records):
                del self._targets[target.address]  # begin anew: where its chunks are was not known before
                self._assembly.release(target)
                self._unlink(target)
                self._add({target.address: target.record}, spots, materials.scanned)
                continue
            self._add_sources(target, materials)
            may_come = any(
                key in failed or key in self._failed or key in unread or key in self._reading_now
                for key in target.sources
            )
            if self._replicas_of(target) == before and not may_come:
                self._wait_or_give_up(target, materials.scanned.away)
        self._order_soon()

    def _is_read(self, key: VirtualKey) -> bool:
        """Whether a virtual segment was read to its end; else what is missing may still come from it."""
        return key in self._exhausted and key not in self._reading_now

    def _replicas_of(self, target: Target) -> int:
        """In how many places there is anything of a segment."""
        return sum(len(self._readings[key].replicas.backup_ids) for key in target.sources)

    def _add_sources(self, target: Target, materials: Materials) -> None:
        for key, replicas in materials.scanned.replicas.items():
            if target.address in replicas.first or target.address in replicas.also:
                known = self._readings.setdefault(key, _Reading(replicas, set())).replicas
                known.backup_ids = tuple(dict.fromkeys((*known.backup_ids, *replicas.backup_ids)))
                known.also.add(target.address)
                if key not in target.sources:
                    target.sources.append(key)
                if not self._readings[key].tried.issuperset(known.backup_ids):
                    self._exhausted.discard(key)

    def _wait_or_give_up(self, target: Target, away: Mapping[int, str]) -> None:
        lost = target.record.chunk_count - sum(target.here)
        if away:
            where = f"segment {target.key}, stream {target.address.stream_id}, streamlet {target.address.streamlet_id}"
            self._lacking[target.address] = (
                f"{lost} chunks of {where} are on no backup that answers; {sorted(away)} do not"
            )
            return
        target.holes = lost > 0
        self.totals.chunks_lost += lost
        if lost:
            log.error("chunks are on no backup any more", address=list(target.address), chunks=lost)
        self._completed(target)

    # -- how far it is ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See what is covered by now; bounded."""
        left = CHECKED_MAX
        coverage = self._replication.coverage
        for ref, progress in self.streamlets.items():
            for address in list(progress.uncovered)[:left]:
                left -= 1
                length = progress.uncovered[address]
                if address in progress.to_come:
                    progress.uncovered[address] = progress.uncovered.pop(address)  # its turn comes again
                elif not self._exists(address) or coverage.covers(address, length) or self._all_but_holes(address):
                    del progress.uncovered[address]
                    progress.bytes_uncovered -= length
                    self.totals.bytes_restored += length
            if progress.readable and progress.uncovered and self._rests:
                self._replication.close_soon(ref[0])  # what was in memory already is covered by what is still open
            if left <= 0:
                return

    @property
    def _rests(self) -> bool:
        """Nothing is left to be covered by virtual segments."""
        return self._replication.rests and not self._uncovered

    def _all_but_holes(self, address: SegmentAddress) -> bool:
        """Whether what is not covered of a segment never can be: it is damaged."""
        if not self._rests or not self._replication.coverage.is_settled(address):
            return False
        record = self._index.segment(address)
        return record is not None and not record.to_come and not record.crc32c

    async def close(self) -> None:
        """End; what has not come whole comes anew after the next start."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for link in self._links.values():
            with contextlib.suppress(KeraError):
                await link.close()
        await asyncio.to_thread(self._pool.shutdown)


def _of_defect(error: Exception) -> str:
    return f"of a defect: {error!r}"


def _of_disk(error: OSError) -> str:
    return f"the broker's disk: {error}"
