"""What backups have of a broker that is gone: how to ask them, what to read, and how it goes together (thesis 6.6).

    lists of replicas ──choose()──► per virtual segment the replicas, best first ──reads──► chunks, in any order
    chunks ──Merge──► per entry and segment the runs of chunks, with positions; gaps, what is cut, and conflicts

* A replica that is closed is as long as it should be; of others the longest has all that was acknowledged, and may have
  more. When a backup fails, or has damage in its replica, the next one is read, and what each of them has counts.
* The same chunk may be in several virtual segments: it is taken once. Two chunks in one place that differ are a
  conflict, which no failure of backups explains; of those the one of the later launch is taken.
* Ordinals of an entry have no gap. What is behind a hole was never acknowledged, and is cut; unless it is known to have
  been: because its virtual segment was closed, or its segment tells of a durable head. Then the hole is a *gap*: what
  was there has been removed by retention (and what is before it is only left because its virtual segment is), or more
  backups are gone than the stream has replicas. Who recovers and knows where entries start says so.
* In memory there are a few numbers per chunk, never its bytes.

Promises nothing while the broker still writes: who recovers has backups refuse it first (``FenceBroker``). The reading
is in ``kera.broker.recovery_scan`` (headers) and ``kera.broker.recovering`` (all of it).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kera.broker.segment_scan import SegmentAddress, address_of
from kera.core.chunk import ChunkHeader
from kera.core.errors import KeraError, Unavailable, Uncertain
from kera.core.ids import EntryId
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.telemetry import get_logger
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.recovery")

MESSAGE_BYTES_MAX = 1 << 30
"""A chunk may fill a segment, and goes as one piece."""


class Chunk(NamedTuple):
    """A chunk that a replica has; its bytes are somewhere else."""

    address: SegmentAddress
    first_record: int
    record_count: int
    chunk_bytes: int
    broker_epoch: int
    """Of the launch that appended it."""
    durable_head: int
    """Up to where its segment was durable then."""
    digest: int
    """All its checksums: two chunks that were verified and have the same one are the same bytes."""
    producer_id: int
    producer_epoch: int
    sequence: int
    created_us: int
    min_timestamp_us: int
    max_timestamp_us: int

    @property
    def entry(self) -> EntryId:
        """Whose ordinals it has."""
        return EntryId(*self.address[:3])

    @property
    def end_record(self) -> int:
        """Ordinal behind its last record."""
        return self.first_record + self.record_count


class Run(NamedTuple):
    """Chunks that follow each other in one segment."""

    address: SegmentAddress
    start: int | None
    """Position of the first one within the segment, in bytes. None: not known, as chunks before it are missing."""
    chunks: tuple[Chunk, ...]

    @property
    def length(self) -> int:
        """Of all chunks, in bytes."""
        return sum(chunk.chunk_bytes for chunk in self.chunks)


class Gap(NamedTuple):
    """Records that no replica has, though something behind them was acknowledged."""

    entry: EntryId
    first_record: int
    end_record: int


class Cut(NamedTuple):
    """Chunks behind a hole, that were never acknowledged: not part of what is recovered."""

    entry: EntryId
    end_record: int
    """Where the entry ends instead."""
    chunks: tuple[Chunk, ...]


class Conflict(NamedTuple):
    """Two chunks that cannot both be in the log."""

    taken: Chunk
    dropped: Chunk


@dataclass(slots=True)
class Recovered:
    """What came of reading."""

    runs: list[Run] = field(default_factory=list)
    """Of all entries, in the order of the log."""
    gaps: list[Gap] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    duplicates: int = 0
    """Chunks that came more than once."""


class Source(NamedTuple):
    """The replicas of one virtual segment."""

    virtual_segment_id: int
    replicas: tuple[tuple[int, backup_pb2.ReplicaInfo], ...]
    """By backup, the best first."""
    wanted_bytes: int
    """A replica with so many undamaged bytes has all that was acknowledged."""
    disagree: bool
    """Closed replicas differ: what each of them has is looked at."""


def choose(lists: Mapping[int, Iterable[backup_pb2.ReplicaInfo]]) -> list[Source]:
    """What to read of what backups (by id) have of one broker, in the order of virtual segments' ids.

    Of replicas that are as good as each other, that comes first whose backup has least to do so far.
    """
    found: dict[int, list[tuple[int, backup_pb2.ReplicaInfo]]] = {}
    for backup_id, infos in lists.items():
        for info in infos:
            found.setdefault(info.virtual_segment_id, []).append((backup_id, info))
    load = dict.fromkeys(lists, 0)
    sources = []
    for virtual_segment_id, replicas in sorted(found.items()):
        replicas.sort(
            key=lambda item: (item[1].chunks_damaged > 0, not item[1].closed, -item[1].length, load[item[0]], item[0])
        )
        load[replicas[0][0]] += replicas[0][1].length
        closed = {(info.length, info.checksum) for _, info in replicas if info.closed}
        lengths = [length for length, _ in closed] or [info.length for _, info in replicas]
        sources.append(Source(virtual_segment_id, tuple(replicas), max(lengths), len(closed) > 1))
    return sources


def digest_of(header: ChunkHeader) -> int:
    """See `Chunk.digest`."""
    return header.header_crc32c << 64 | header.payload_crc32c << 32 | header.placement_crc32c


class Merge:
    """Puts the chunks of all virtual segments in order. Pure; chunks may come in any order, and more than once."""

    def __init__(self, starts: Mapping[EntryId, int] | None = None) -> None:
        """`starts`: where entries start, as ordinals of records; of others, what is found first is the start."""
        self._starts = starts or {}
        self._entries: dict[EntryId, dict[int, Chunk]] = {}
        self._acknowledged: dict[EntryId, int] = {}
        """Of each entry, the ordinal behind the last record that is in a closed virtual segment."""
        self._addresses: dict[SegmentAddress, SegmentAddress] = {}
        self._conflicts: list[Conflict] = []
        self._duplicates = 0

    def add(self, header: ChunkHeader, *, closed: bool) -> Chunk | None:
        """Take note of a placed and verified chunk; None when it is there already, or lost a conflict.

        `closed`: it is within a virtual segment that was closed, so it was acknowledged.
        """
        address = address_of(header)
        chunk = Chunk(
            self._addresses.setdefault(address, address),  # once for all chunks of a segment
            header.first_record,
            header.record_count,
            header.chunk_bytes,
            header.broker_epoch,
            header.durable_head,
            digest_of(header),
            header.producer_id,
            header.producer_epoch,
            header.sequence,
            header.created_us,
            header.min_timestamp_us,
            header.max_timestamp_us,
        )
        entry = self._entries.setdefault(chunk.entry, {})
        if closed:
            self._acknowledged[chunk.entry] = max(self._acknowledged.get(chunk.entry, 0), chunk.end_record)
        known = entry.get(chunk.first_record)
        if known is not None:
            if known == chunk:
                self._duplicates += 1
                return None
            if known.broker_epoch >= chunk.broker_epoch:
                self._conflicts.append(Conflict(known, chunk))
                return None
            self._conflicts.append(Conflict(chunk, known))
        entry[chunk.first_record] = chunk
        return chunk

    def chunks(self) -> Iterator[Chunk]:
        """All that have come and were not dropped, of each entry in the order of its ordinals."""
        for _, chunks in sorted(self._entries.items()):
            yield from (chunk for _, chunk in sorted(chunks.items()))

    def finish(self) -> Recovered:
        """All chunks have come: what is there."""
        result = Recovered(conflicts=list(self._conflicts), duplicates=self._duplicates)
        for entry, chunks in sorted(self._entries.items()):
            ordered = _in_order([chunk for _, chunk in sorted(chunks.items())], result.conflicts)
            self._entry(entry, ordered, result)
        return result

    def _entry(self, entry: EntryId, chunks: Sequence[Chunk], result: Recovered) -> None:
        stretches = _stretches(chunks)
        start = self._starts.get(entry)
        if start is not None:
            # What retention has removed may be left, in virtual segments that others need: it is no part of the log.
            stretches = [stretch for stretch in stretches if stretch[-1].end_record > start]
        if not stretches:
            return
        acknowledged = self._acknowledged.get(entry, 0)
        from_start = start is None or stretches[0][0].first_record <= start
        known = [from_start or _counts(None, stretches[0], acknowledged)]
        known += [_counts(before, after, acknowledged) for before, after in pairwise(stretches)]
        kept = max((at for at, counts in enumerate(known, 1) if counts), default=0)
        if start is not None and kept and not from_start:
            result.gaps.append(Gap(entry, start, stretches[0][0].first_record))
        for before, after in pairwise(stretches[:kept]):
            result.gaps.append(Gap(entry, before[-1].end_record, after[0].first_record))
        for stretch in stretches[:kept]:
            result.runs += _runs(stretch, after=result.runs[-1] if result.runs else None)
        if kept < len(stretches):
            cut = tuple(chunk for stretch in stretches[kept:] for chunk in stretch)
            result.cuts.append(Cut(entry, stretches[kept - 1][-1].end_record if kept else start or 0, cut))


def _in_order(chunks: Iterable[Chunk], conflicts: list[Conflict]) -> list[Chunk]:
    """Chunks of an entry whose ordinals do not overlap and whose positions grow, of those in the order of ordinals."""
    ordered: list[Chunk] = []
    for chunk in chunks:
        while ordered and (chunk.first_record < ordered[-1].end_record or chunk.address < ordered[-1].address):
            if chunk.broker_epoch <= ordered[-1].broker_epoch:
                conflicts.append(Conflict(ordered[-1], chunk))
                break
            conflicts.append(Conflict(chunk, ordered.pop()))
        else:
            ordered.append(chunk)
    return ordered


def _stretches(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks of an entry, parted at the holes in their ordinals."""
    stretches: list[list[Chunk]] = []
    for chunk in chunks:
        if stretches and stretches[-1][-1].end_record == chunk.first_record:
            stretches[-1].append(chunk)
        else:
            stretches.append([chunk])
    return stretches


def _counts(before: Sequence[Chunk] | None, after: Sequence[Chunk], acknowledged: int) -> bool:
    """Whether something behind a hole is known to have been acknowledged; `before` and `after`: what is around it."""
    if after[0].first_record < acknowledged:
        return True
    # In the segment in which the hole is, a durable head may be one of before it.
    return any(chunk.durable_head and (before is None or chunk.address > before[-1].address) for chunk in after)


def _runs(stretch: Sequence[Chunk], after: Run | None) -> list[Run]:
    """The runs of chunks that follow each other; `after`: the run before them."""
    parts: list[list[Chunk]] = []
    for chunk in stretch:
        if parts and parts[-1][0].address == chunk.address:
            parts[-1].append(chunk)
        else:
            parts.append([chunk])
    runs = []
    for part in parts:
        start: int | None = 0
        at = 0
        for chunk in part:
            if chunk.durable_head > at:  # it cannot be there: chunks before it are missing
                start = None
            at += chunk.chunk_bytes
        if after is not None and after.address == part[0].address:
            start = None  # a gap within a segment
        runs.append(Run(part[0].address, start, tuple(part)))
    return runs


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What bounds reading from a backup: so many answers of `read_bytes_max` (or of one larger chunk) are in memory."""

    per_backup_max: int = 2
    """Replicas that are read at the same time."""
    read_bytes_max: int = 1 << 20
    connect_timeout_s: float = 2.0
    timeout_s: float = 10.0
    """For one answer. A backup that takes longer has failed."""


class BackupLink:
    """The connection to one backup; it is not made again when it was lost."""

    def __init__(self, info: common_pb2.BackupInfo, node_id: str, limits: ReadLimits) -> None:
        self.failed = ""
        """Why it is of no use any more."""
        self.turns = asyncio.Semaphore(limits.per_backup_max)
        self._info = info
        self._local = bool(node_id) and info.node_id == node_id and bool(info.frames_unix_path)
        self._limits = limits
        self._channel: FrameChannel | None = None
        self._connecting = asyncio.Lock()

    async def list_replicas(self, broker_id: int) -> list[backup_pb2.ReplicaInfo]:
        """What the backup has of a broker; nothing when it fails."""
        replicas: list[backup_pb2.ReplicaInfo] = []
        request = backup_pb2.ListReplicasRequest(broker_id=broker_id)
        if not await self.connect():
            return replicas
        try:
            while self._channel is not None:
                future = self._channel.submit(api.LIST_REPLICAS, request, timeout_s=self._limits.timeout_s)
                message = (await future).message
                replicas += message.replicas
                if message.complete or not message.replicas:
                    return replicas
                request.after_virtual_segment_id = replicas[-1].virtual_segment_id
        except KeraError as error:
            self.failed = error.message
        return []

    async def connect(self) -> bool:
        """Connect, if that was not done yet; False when the backup has failed."""
        async with self._connecting:
            if self._channel is None and not self.failed:
                try:
                    self._channel = await self._connect()
                except KeraError as error:
                    self.failed = error.message
        return not self.failed

    async def read(self, request: backup_pb2.ReadReplicaRequest) -> tuple[backup_pb2.ReadReplicaResponse, memoryview]:
        """A piece of a replica. Raises what the backup answers, or why it cannot be asked."""
        if self._channel is None or self.failed:
            raise Unavailable(f"backup {self._info.backup_id} has failed: {self.failed}")
        try:
            future = self._channel.submit(api.READ_REPLICA, request, timeout_s=self._limits.timeout_s)
            reply = await future
        except (Unavailable, Uncertain) as error:
            self.failed = error.message
            raise
        pieces = reply.bulk
        return reply.message, pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    async def close(self) -> None:
        """Let go of the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def _connect(self) -> FrameChannel:
        timeout_s = self._limits.connect_timeout_s
        if self._local:
            with contextlib.suppress(Unavailable):
                return await FrameChannel.connect_unix(
                    self._info.frames_unix_path, timeout_s=timeout_s, bulk_bytes_max=MESSAGE_BYTES_MAX
                )
        return await FrameChannel.connect_tcp(
            self._info.frames_address, timeout_s=timeout_s, bulk_bytes_max=MESSAGE_BYTES_MAX
        )
