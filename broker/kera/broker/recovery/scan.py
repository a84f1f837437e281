"""Scans the replicas of lost launches for chunks of some streamlets; it reads only the chunks' headers.

    backups ──list──► replicas of the sources' launches ──choose()──► per virtual segment the best first
            ──headers──► a `StreamletMerge` each, and where each chunk can be read (`ReplicasToRead`)

For each virtual segment one replica is read, and the next one if it is not whole. All backups are read at the same
time, a few replicas of each. The scan fences no launches: the coordinator has fenced lost launches at the backups that
it calls alive, and a broker that is being emptied still lives.

A scan costs 128 bytes of network per chunk, and as much memory until the places of the chunks are known and their
headers forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kera.broker.backup_ways import OVER_TCP, BackupWays
from kera.broker.records import SegmentAddress
from kera.broker.recovery.plan import StreamletMerge
from kera.broker.recovery.replica_reader import BackupLink, ReadLimits, Source, choose
from kera.core.errors import CorruptChunk, KeraError
from kera.core.format.chunk import HEADER_BYTES
from kera.core.format.header_table import verify_headers
from kera.v1 import backup_pb2, common_pb2

HEADERS_BYTES_MAX = 128 << 10
"""Maximum size of one answer, so that its headers do not block the loop."""
PARALLEL_PER_BACKUP = 3

Ref = tuple[int, int]
"""A stream and one of its streamlets."""
Launches = tuple[int, int]
"""A broker, and an epoch: all its launches before that epoch."""


class VirtualKey(NamedTuple):
    """Names a virtual segment."""

    broker_id: int
    virtual_segment_id: int


@dataclass(slots=True)
class ReplicasToRead:
    """The replicas of a virtual segment to read, and the segments that need them."""

    key: VirtualKey
    number: int
    """Number in the order in which virtual segments were found."""
    length: int
    backup_ids: tuple[int, ...]
    """The backups with replicas, the best first, without those that turned out to be gone for good."""
    first: set[SegmentAddress] = field(default_factory=set)
    """Segments whose chunks were taken from this virtual segment."""
    also: set[SegmentAddress] = field(default_factory=set)
    """Segments whose chunks it has, but that other virtual segments have, too."""
    tried: set[int] = field(default_factory=set)
    """Backups whose replicas were read, and are of no use."""

    @property
    def segments(self) -> tuple[SegmentAddress, ...]:
        """The segments that it has chunks of."""
        return *self.first, *self.also

    def include(self, found: ReplicasToRead) -> None:
        """Add the findings of another scan."""
        self.first |= found.first
        self.also |= found.also
        self.length = max(self.length, found.length)
        self.backup_ids = tuple(dict.fromkeys((*self.backup_ids, *found.backup_ids)))


@dataclass(slots=True)
class Scanned:
    """The replicas to read, and the problems of the scan."""

    replicas: dict[VirtualKey, ReplicasToRead] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    """Descriptions of virtual segments without a replica that could be read completely."""
    away: dict[int, str] = field(default_factory=dict)
    """Backups that did not answer (any more), or could not read a replica, each with the reason."""
    incomplete: dict[int, str] = field(default_factory=dict)
    """Backups that have lost replicas that they cannot name, each with a description."""


async def scan(
    backups: Iterable[common_pb2.BackupInfo],
    wanted: Mapping[Launches, Mapping[Ref, StreamletMerge]],
    *,
    ways: BackupWays = OVER_TCP,
    limits: ReadLimits | None = None,
) -> Scanned:
    """Scan for chunks of streamlets; `wanted`: the streamlets, by the launches that may have had them.

    The result includes the failures of backups.
    """
    limits = limits or ReadLimits(per_backup_max=PARALLEL_PER_BACKUP, read_bytes_max=HEADERS_BYTES_MAX)
    result = Scanned()
    links: dict[int, BackupLink] = {}
    for info in backups:
        if info.alive:
            links[info.backup_id] = BackupLink(info, ways, limits)
        else:
            result.away[info.backup_id] = "it is not alive"
    try:
        await asyncio.gather(*(link.connect() for link in links.values()))
        for launches, merges in sorted(wanted.items()):
            if merges:
                await _Scan(links, launches, merges, result, limits).run()
        every = {id(merge): merge for merges in wanted.values() for merge in merges.values()}
        for merge in every.values():
            await asyncio.to_thread(_note_origins, merge, list(result.replicas.values()))
        result.away.update((backup_id, link.failed) for backup_id, link in links.items() if link.failed)
        result.incomplete.update(
            (backup_id, f"{link.headers_damaged} of its replicas are lost, as their headers are damaged")
            for backup_id, link in links.items()
            if link.headers_damaged
        )
        return result
    finally:
        for link in links.values():
            await link.close()


def _note_origins(merge: StreamletMerge, replicas: Sequence[ReplicasToRead]) -> None:
    for origin in merge.origins():
        its = replicas[origin.source]
        (its.first if origin.taken else its.also).add(origin.address)


class _Scan:
    """The scan of one broker's launches."""

    def __init__(
        self,
        links: Mapping[int, BackupLink],
        launches: Launches,
        merges: Mapping[Ref, StreamletMerge],
        result: Scanned,
        limits: ReadLimits,
    ) -> None:
        self._links = links
        self._launches = launches
        self._merges = merges
        self._result = result
        self._limits = limits
        self._streamlets: dict[int, list[int]] = {}
        for stream_id, streamlet_id in sorted(merges):
            self._streamlets.setdefault(stream_id, []).append(streamlet_id)

    async def run(self) -> None:
        lists = await asyncio.gather(*(self._list(link) for link in self._links.values()))
        todo = iter(choose(dict(zip(self._links, lists, strict=True))))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(max(1, len(self._links)) * self._limits.per_backup_max):
                tasks.create_task(self._work(todo))

    async def _list(self, link: BackupLink) -> list[backup_pb2.ReplicaInfo]:
        broker_id, before_epoch = self._launches
        return wanted_replicas(await link.list_replicas(broker_id), before_epoch, self._streamlets)

    async def _work(self, todo: Iterable[Source]) -> None:
        for source in todo:
            await self._source(source)

    async def _source(self, source: Source) -> None:
        infos = source.replicas
        key = VirtualKey(self._launches[0], source.virtual_segment_id)
        found = self._result.replicas
        if key not in found:  # otherwise it was scanned for another source, of a later launch
            backup_ids = tuple(each for each, _ in infos)
            found[key] = ReplicasToRead(key, len(found), source.wanted_bytes, backup_ids)
        number = found[key].number
        reasons = []
        whole = False
        for backup_id, info in infos:
            try:
                async with self._links[backup_id].turns:
                    missing = await self._replica(self._links[backup_id], info, number, source)
            except KeraError as error:  # this is not damage: the backup may be able to read it later
                missing = error.message
                self._result.away[backup_id] = f"it cannot read a replica: {missing}"
            if not missing and info.length < source.wanted_bytes:
                missing = f"it has {info.length} of {source.wanted_bytes} bytes"
            if missing:
                reasons.append(f"backup {backup_id}: {missing}")
            else:
                whole = True
                if not source.disagree:
                    break
        if not whole:
            self._result.unread.append(
                f"virtual segment {source.virtual_segment_id:#x} of broker {key.broker_id} ({'; '.join(reasons)})"
            )

    async def _replica(self, link: BackupLink, info: backup_pb2.ReplicaInfo, number: int, source: Source) -> str:
        """Scan a replica; return what is wrong with it, if anything. Raises errors of the backup."""
        request = backup_pb2.ReadReplicaRequest(
            broker_id=self._launches[0],
            virtual_segment_id=info.virtual_segment_id,
            bytes_max=self._limits.read_bytes_max,
            headers_only=True,
        )
        add_streamlets(request, {info.stream_id: self._streamlets[info.stream_id]})
        wrong = ""
        while request.offset < info.length:
            answer, headers = await link.read(request)
            if answer.next_offset <= request.offset:
                return f"it returned nothing at offset {request.offset}"
            if answer.replica.chunks_damaged:
                wrong = f"{answer.replica.chunks_damaged} chunks are damaged"
            having = sum(replica.length >= answer.next_offset for _, replica in source.replicas)
            wrong = self._take(headers, info, number, having) or wrong
            request.offset = answer.next_offset
        return wrong

    def _take(self, buffer: memoryview, info: backup_pb2.ReplicaInfo, number: int, having: int) -> str:
        """Pass on the headers of an answer up to the first wrong one; return what is wrong with that, if anything.

        `having`: the number of backups that have all of them.
        """
        wrong = ""
        try:
            headers = verify_headers(buffer)
        except CorruptChunk as error:
            wrong = error.message
            headers = verify_headers(buffer[: error.attributes["offset"]])
        numbers = np.unique(headers["streamlet_id"]).tolist()
        merges = {each: self._merges.get((info.stream_id, each)) for each in numbers}
        ours = (headers["stream_id"] == info.stream_id) & (headers["group_id"] != 0)
        ours &= np.isin(headers["streamlet_id"], [each for each, merge in merges.items() if merge is not None])
        if not ours.all():
            at = int(np.argmin(ours))
            wrong = f"the chunk at offset {at * HEADER_BYTES} of an answer belongs to another replica"
            headers = headers[:at]
        for each, merge in merges.items():
            if merge is not None:
                sure = having >= merge.known.replication
                merge.add(headers[headers["streamlet_id"] == each], closed=info.closed, source=number, sure=sure)
        return wrong


def wanted_replicas(
    infos: Iterable[backup_pb2.ReplicaInfo], before_epoch: int, streams: Collection[int]
) -> list[backup_pb2.ReplicaInfo]:
    """Return the replicas of launches before an epoch, and of the given streams."""
    return [info for info in infos if info.broker_epoch < before_epoch and info.stream_id in streams]


def add_streamlets(request: backup_pb2.ReadReplicaRequest, streamlets: Mapping[int, Iterable[int]]) -> None:
    """Restrict a request to chunks of these streamlets."""
    for stream_id, streamlet_ids in streamlets.items():
        request.streamlets.add(stream_id=stream_id, streamlet_ids=sorted(streamlet_ids))
