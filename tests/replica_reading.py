"""Reads all replicas that backups have of a broker, in one go, for comparison with the acknowledged records."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kera.broker.backup_ways import BackupWays
from kera.broker.records import SegmentAddress
from kera.broker.recovery.merge import Cut, Merge, Recovered
from kera.broker.recovery.replica_reader import BackupLink, ReadLimits, Source, choose
from kera.core.base.ids import EntryId
from kera.core.base.telemetry import get_logger
from kera.core.errors import CorruptChunk, KeraError
from kera.core.format.chunk import ChunkHeader, chained_checksum, verify_chunk
from kera.core.format.header_table import Headers, as_headers, chunk_bytes, column, end_records, table
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.recovery")

PARALLEL_MAX = 2
"""Maximal number of replicas that are read at the same time."""

Streamlets = Mapping[int, Collection[int]]
"""Streamlets by stream; an empty collection: all of the stream."""
Take = Callable[[ChunkHeader, memoryview], Awaitable[None]]
"""Takes the bytes of a chunk, which are valid while it runs. Several calls may run at the same time."""


class Unread(NamedTuple):
    """A virtual segment without a complete replica."""

    virtual_segment_id: int
    reasons: tuple[str, ...]
    """A reason for each replica."""


class Run(NamedTuple):
    """Consecutive chunks in one segment."""

    address: SegmentAddress
    start: int | None
    """Position of the first chunk within the segment, in bytes. None: unknown, because chunks before it are missing."""
    chunks: Headers

    @property
    def length(self) -> int:
        """The length of all chunks, in bytes."""
        return int(chunk_bytes(self.chunks).sum())


@dataclass(slots=True)
class ReplicasRead:
    """The result of reading."""

    runs: list[Run] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    gaps: list[tuple[EntryId, int, int]] = field(default_factory=list)
    """Records that no replica has, although later ones were acknowledged: first missing and next existing record."""
    conflicts: set[ChunkHeader] = field(default_factory=set)
    """Chunks that contradict the accepted ones."""
    duplicates: int = 0
    """Number of repeated chunks."""
    disagreeing: list[int] = field(default_factory=list)
    """Virtual segments whose closed replicas have different lengths or checksums."""
    unread: list[Unread] = field(default_factory=list)
    backups_failed: dict[int, str] = field(default_factory=dict)
    """Backups that did not answer, or stopped answering, with the reasons."""


async def read_replicas(
    backups: Iterable[common_pb2.BackupInfo],
    broker_id: int,
    streamlets: Streamlets | None = None,
    *,
    take: Take | None = None,
    node_id: str = "",
    limits: ReadLimits | None = None,
) -> ReplicasRead:
    """Read all replicas that `backups` have of a broker, or of some streamlets only.

    `take` gets the bytes of each chunk once, before the merge may cut it; chunks in conflict may all reach it.
    `node_id`: backups on this node are reached through their unix sockets. Raises the errors of `take`, in a group;
    failures of backups are in the result.
    """
    limits = limits or ReadLimits()
    links = {info.backup_id: BackupLink(info, BackupWays(node_id), limits) for info in backups}
    try:
        return await _Reading(links, broker_id, streamlets, take, Merge(), limits).run()
    finally:
        for link in links.values():
            await link.close()


class _Reading:
    """A run of `read_replicas`."""

    def __init__(
        self,
        links: Mapping[int, BackupLink],
        broker_id: int,
        streamlets: Streamlets | None,
        take: Take | None,
        merge: Merge,
        limits: ReadLimits,
    ) -> None:
        self._links = links
        self._broker_id = broker_id
        self._streamlets = streamlets
        self._take = take
        self._merge = merge
        self._limits = limits
        self._came: Counter[ChunkHeader] = Counter()
        self._unread: list[Unread] = []

    async def run(self) -> ReplicasRead:
        lists = await asyncio.gather(*(link.list_replicas(self._broker_id) for link in self._links.values()))
        sources = choose(dict(zip(self._links, lists, strict=True)))
        todo = iter(sources)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(min(PARALLEL_MAX, len(sources))):
                tasks.create_task(self._work(todo))
        result = _told(self._merge.finish(), self._came)
        result.disagreeing = [source.virtual_segment_id for source in sources if source.disagree]
        result.unread = sorted(self._unread)
        result.backups_failed = {backup_id: link.failed for backup_id, link in self._links.items() if link.failed}
        return result

    async def _work(self, todo: Iterable[Source]) -> None:
        for source in todo:
            await self._source(source)

    async def _source(self, source: Source) -> None:
        """Read replicas until one is complete, or none is left."""
        reasons: list[str] = []
        whole = False
        for backup_id, info in source.replicas:
            try:
                async with self._links[backup_id].turns:
                    missing = await self._replica(self._links[backup_id], info)
            except KeraError as error:
                missing = error.message
            if missing or info.length < source.wanted_bytes:
                reason = missing or f"it has {info.length} of {source.wanted_bytes} bytes"
                reasons.append(f"backup {backup_id}: {reason}")
                log.warning(
                    "a replica is not whole; the next one is read",
                    virtual_segment_id=source.virtual_segment_id,
                    backup_id=backup_id,
                    reason=reason,
                )
            else:
                whole = True
                if not source.disagree:
                    return
        if not whole:
            self._unread.append(Unread(source.virtual_segment_id, tuple(reasons)))

    async def _replica(self, link: BackupLink, info: backup_pb2.ReplicaInfo) -> str:
        """Read a replica; returns its defect, or an empty text. Raises errors of the backup."""
        request = backup_pb2.ReadReplicaRequest(
            broker_id=self._broker_id,
            virtual_segment_id=info.virtual_segment_id,
            bytes_max=self._limits.read_bytes_max,
        )
        for stream_id, streamlet_ids in (self._streamlets or {}).items():
            request.streamlets.add(stream_id=stream_id, streamlet_ids=sorted(streamlet_ids))
        wrong, checksum = "", 0
        while request.offset < info.length:
            answer, chunks = await link.read(request)
            if answer.next_offset <= request.offset:
                return f"it returned nothing at offset {request.offset}"
            if answer.replica.chunks_damaged:
                wrong = f"{answer.replica.chunks_damaged} chunks are damaged"
            try:
                checksum = await self._chunks(chunks, checksum, info)
            except CorruptChunk as error:
                wrong = error.message
            request.offset = answer.next_offset
        if not wrong and not self._streamlets and checksum != info.checksum:
            wrong = f"its chunks have checksum {checksum:08x} and not {info.checksum:08x}"
        return wrong

    async def _chunks(self, chunks: memoryview, checksum: int, info: backup_pb2.ReplicaInfo) -> int:
        """Take the chunks of an answer; returns the continued checksum. Raises `CorruptChunk`."""
        at = 0
        headers: list[ChunkHeader] = []
        try:
            while at < len(chunks):
                header = verify_chunk(chunks, at)
                if not header.placed or header.stream_id != info.stream_id:
                    raise CorruptChunk(f"the chunk at offset {at} of an answer belongs to another replica", offset=at)
                checksum = chained_checksum(chunks, at, checksum)
                end = at + header.chunk_bytes
                headers.append(header)
                self._came[header] += 1
                if self._came[header] == 1 and self._take is not None:
                    await self._take(header, chunks[at:end])
                at = end
        finally:
            self._merge.add(table(headers), closed=info.closed)
        return checksum


def _told(found: Recovered, came: Counter[ChunkHeader]) -> ReplicasRead:
    """The result for the chunks that were read, with all irregularities."""
    result = ReplicasRead(cuts=found.cuts, duplicates=came.total() - len(came), conflicts=set(came))
    for cut in found.cuts:
        result.conflicts.difference_update(as_headers(cut.chunks))
    for address, chunks in found.runs:
        result.conflicts.difference_update(as_headers(chunks))
        before = result.runs[-1] if result.runs else None
        if before is not None and before.address[:3] == address[:3]:
            end, first = int(end_records(before.chunks)[-1]), int(column(chunks, "first_record")[0])
            if end != first:
                result.gaps.append((EntryId(*address[:3]), end, first))
        sizes = chunk_bytes(chunks)
        # A durable head cannot be after its own chunk: if it seems to be, chunks before it are missing.
        whole = bool((column(chunks, "durable_head") <= sizes.cumsum() - sizes).all())
        is_first = before is None or before.address != address
        result.runs.append(Run(address, 0 if whole and is_first else None, chunks))
    return result
