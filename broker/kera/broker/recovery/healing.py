"""Reads the damaged data of a segment file from backups, while a reader waits for the segment.

    a load finds damage ──► chunks of that segment from the replicas that may have some ──► the slot ──► a new file

The replicas are those of this broker's virtual segments. The index knows which of them cover a segment; of those that
it does not know, all of the stream are searched. When no data is missing any more, the segment gets a new file, and the
old one is set aside. Data that no replica has stays a hole, and readers get the error that it is lost. If a backup that
should have a replica cannot be asked, the reader has to try again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, NamedTuple

from kera.broker.backup_ways import BackupWays
from kera.broker.log.scan import address_of, scan_segment
from kera.broker.log.segment import Segment
from kera.broker.log.waiting import until_done
from kera.broker.records import SegmentAddress, SegmentRecord, place_of
from kera.broker.recovery.layout import positions_of
from kera.broker.recovery.merge import digest_of
from kera.broker.recovery.replica_fetcher import BackupLinks
from kera.broker.recovery.replica_reader import ReadLimits
from kera.broker.replication.manager import Replication
from kera.broker.storage.jobs import LoadJob
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.telemetry import get_logger
from kera.core.errors import CorruptChunk, KeraError, Recovering, Unavailable
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import ChunkHeader, verify_chunk
from kera.core.format.header_table import as_headers, table
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.recovery")

Chunks = dict[tuple[int, int], tuple[ChunkHeader, memoryview]]
"""Chunks by first record and digest, because the same chunk may come twice."""


class _Source(NamedTuple):
    virtual_segment_id: int
    backup_ids: list[int]
    due: bool
    """Whether it certainly has data of the segment, on backups that may only be away for a moment."""


class Healing:
    """Restores damaged segments from backups while readers wait, and marks a part that no replica has as lost.

    Belongs to one event loop.
    """

    def __init__(
        self,
        store: SegmentStore,
        memory: PersistenceManager,
        replication: Replication,
        *,
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        broker_id: Callable[[], int],
        ways: BackupWays,
        limits: ReadLimits,
    ) -> None:
        """`backups`: returns all known backups; `broker_id`: returns this broker's id, once it is known."""
        self._store = store
        self._memory = memory
        self._replication = replication
        self._backups = backups
        self._broker_id = broker_id
        self._limits = limits
        self._links = BackupLinks(ways, limits)
        self._tasks: set[asyncio.Task[None]] = set()

    def helps(self, job: LoadJob) -> bool:
        """Whether a load has found damage that backups may repair."""
        lacking = job.error is None and job.holes and not job.segment.dropped
        return bool(lacking) and any(True for _ in self._sources(job))

    def _sources(self, job: LoadJob) -> Iterator[_Source]:
        """Yield the virtual segments that have, or may have, missing data, and not only other data of the segment."""
        address, replication = job.segment.address, self._replication
        for place in (*replication.coverage.covering(address), *replication.logs.opened.values()):
            extents = [extent for extent in place.extents if extent.address == address]
            if any(extent.start < hole.end and hole.start < extent.end for extent in extents for hole in job.holes):
                yield _Source(place.virtual_segment_id, [*place.backups, *place.left], due=bool(place.backups))
        for virtual_segment_id, backup_ids in replication.backlog.strangers_of(address.stream_id).items():
            yield _Source(virtual_segment_id, backup_ids, due=False)

    def begin(self, job: LoadJob, done: Callable[[], None]) -> None:
        """Put missing data from backups into the segment's slot, then call `done`; `job` has the remaining damage."""

        def healed(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                job.failure = Unavailable("the broker stops")
            elif (error := task.exception()) is not None:
                log.error("healing a segment failed", segment=place_of(job.segment.address), exc_info=error)
            done()

        self._keep(self._heal(job)).add_done_callback(healed)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)
        return task

    async def _heal(self, job: LoadJob) -> None:
        segment = job.segment
        record = self._store.index.segment(segment.address)
        if record is None:
            return
        chunks: Chunks = {}
        reasons: list[str] = []
        for source in list(self._sources(job)):
            failed = await self._collect(source, segment.address, chunks)
            reasons += [failed] if failed else []
            if sum(len(chunk) for _, chunk in chunks.values()) >= record.length:
                break
        if chunks:
            damaged = len(job.holes)
            await asyncio.to_thread(_put, job, record, chunks)
            self._memory.totals.chunks_damaged += max(0, damaged - len(job.holes))  # the rest is counted later
        if job.holes and reasons:
            job.failure = Recovering(
                f"{place_of(segment.address)} is damaged on the broker's disk, and a backup that has it cannot be read"
                f" ({'; '.join(reasons)}); try again. Drain a backup that is gone for good",
                log=list(segment.entry.log_id),
            )
        elif not job.holes:
            segment.slot.pin()

            def written(task: asyncio.Task[None]) -> None:
                segment.slot.unpin()
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("writing a segment anew failed", segment=place_of(segment.address), exc_info=error)

            self._keep(self._write_anew(segment, record)).add_done_callback(written)

    async def _collect(self, source: _Source, address: SegmentAddress, chunks: Chunks) -> str:
        """Add a virtual segment's chunks of a segment to `chunks`; return why that has to be tried again, if so."""
        infos = {info.backup_id: info for info in self._backups()}
        reasons = []
        for backup_id in source.backup_ids:
            info = infos.get(backup_id)
            try:
                if info is None or not info.alive:
                    raise Unavailable("it is not alive")
                link = await self._links.get(info)
                async with link.turns:
                    request = backup_pb2.ReadReplicaRequest(
                        broker_id=self._broker_id(),
                        virtual_segment_id=source.virtual_segment_id,
                        bytes_max=self._limits.read_bytes_max,
                    )
                    request.streamlets.add(stream_id=address.stream_id, streamlet_ids=[address.streamlet_id])
                    whole = True
                    while True:
                        answer, found = await link.read(request)
                        whole = _add_chunks(found, address, chunks) and not answer.replica.chunks_damaged and whole
                        if answer.next_offset >= answer.replica.length or answer.next_offset <= request.offset:
                            break
                        request.offset = answer.next_offset
                if whole:
                    return ""
            except KeraError as error:
                if source.due or (info is not None and info.alive):
                    reasons.append(f"backup {backup_id}: {error.message}")
        return "; ".join(reasons)

    async def _write_anew(self, segment: Segment, record: SegmentRecord) -> None:
        """Write a segment that is complete in memory to a new file. If that fails, the next load heals it again."""
        store = self._store
        physical_id = self._memory.ids.take()
        arriving = store.arriving_path(physical_id)
        try:
            checksum = await asyncio.to_thread(store.write_arriving, physical_id, segment.slot.view, record.length)
        except OSError as error:
            log.error("cannot write a segment that was read from backups", path=str(arriving), error=str(error))
            return
        anew = record._replace(physical_id=physical_id, crc32c=checksum)
        arrivals, entry, key = self._memory.arrivals, segment.entry, segment.key
        await until_done(lambda done: arrivals.install(entry, key, anew, done, replaces=record.physical_id))
        now = store.index.segment(segment.address)
        if now is None or now.physical_id != physical_id:
            await asyncio.to_thread(store.disk.remove, arriving)  # the segment was removed meanwhile
            return
        segment.physical_id, segment.crc32c = physical_id, checksum
        aside = await asyncio.to_thread(store.set_aside, record.physical_id)
        log.warning(
            "read a damaged segment from backups, and wrote it to a new file",
            segment=place_of(segment.address),
            path=str(store.path(physical_id)),
            set_aside=str(aside or ""),
        )

    async def close(self) -> None:
        """End all healing, and close the connections to backups."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._links.close()


def _add_chunks(found: memoryview, address: SegmentAddress, chunks: Chunks) -> bool:
    """Add the chunks of a segment in an answer to `chunks`; return whether all chunks in the answer were whole."""
    at = 0
    while at < len(found):
        try:
            header = verify_chunk(found, at)
        except CorruptChunk:
            return False
        end = at + header.chunk_bytes
        if address_of(header) == address:
            chunks.setdefault((header.first_record, digest_of(header)), (header, found[at:end]))
        at = end
    return True


def _put(job: LoadJob, record: SegmentRecord, chunks: Chunks) -> None:
    """Fill the holes of a segment with chunks, and update the holes in `job`. Runs on a thread."""
    segment = job.segment
    in_order = sorted(chunks.values(), key=lambda item: (item[0].first_record, item[0].record_count))
    of_digest = {digest_of(header): chunk for header, chunk in in_order}
    headers, positions = positions_of(record, table([header for header, _ in in_order]))
    view = segment.slot.view
    filled = memoryview(bytearray(view[: record.length]))
    for header, at in zip(as_headers(headers), positions.tolist(), strict=True):
        chunk = of_digest[digest_of(header)]
        if any(hole.start <= at and at + len(chunk) <= hole.end for hole in job.holes):
            filled[at : at + len(chunk)] = chunk
    scan = scan_segment(filled, address=segment.address, length=record.length)
    if scan.holes or not record.crc32c or crc32c(filled) == record.crc32c:
        view[: record.length] = filled
        job.chunk_ends, job.holes = scan.chunk_ends, scan.holes
