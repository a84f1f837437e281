"""Asks backups for a lost broker's replicas, and chooses which of them to read (thesis 6.6).

    lists of replicas ──choose()──► per virtual segment the replicas, best first ──`BackupLink`──► headers, or chunks

A closed replica has its full length; of open ones, the longest has all acknowledged data, and may have more. If a
backup fails, or its replica is damaged, the next one is read; the data of all of them counts.

The results are only right if the broker no longer writes: a recovery first fences it on backups, see
docs/design-notes.md, "Fencing". ``kera.broker.recovery.scan`` reads headers, ``kera.broker.recovery.replica_fetcher``
reads chunks, and ``kera.broker.recovery.merge`` merges them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kera.broker.backup_ways import BackupWays
from kera.core.errors import KeraError, Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.v1 import backup_pb2, common_pb2


class Source(NamedTuple):
    """The replicas of one virtual segment."""

    virtual_segment_id: int
    replicas: tuple[tuple[int, backup_pb2.ReplicaInfo], ...]
    """The replicas, each with its backup, the best first."""
    wanted_bytes: int
    """A replica with this many undamaged bytes has all acknowledged data."""
    disagree: bool
    """Whether closed replicas differ, so that all of them have to be read."""


def choose(lists: Mapping[int, Iterable[backup_pb2.ReplicaInfo]]) -> list[Source]:
    """Choose which replicas of a broker to read, from the lists of backups (by id), by virtual segment id.

    Of equally good replicas, the one on the backup with the least to read so far comes first.
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


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of reading from a backup, which bound the answers in memory; a single larger chunk may exceed them."""

    per_backup_max: int = 2
    """Maximum number of replicas that are read at the same time."""
    read_bytes_max: int = 1 << 20
    connect_timeout_s: float = 2.0
    timeout_s: float = 10.0
    """Maximum time for one answer; a backup that takes longer has failed."""


class BackupLink:
    """The connection to one backup; after a loss it does not reconnect."""

    def __init__(self, info: common_pb2.BackupInfo, ways: BackupWays, limits: ReadLimits) -> None:
        self.failed = ""
        """Why the connection has failed; empty: it has not."""
        self.headers_damaged = 0
        """Number of replicas, of any broker, that the backup has lost and cannot name."""
        self.turns = asyncio.Semaphore(limits.per_backup_max)
        self._info = info
        self._ways = ways
        self._limits = limits
        self._channel: FrameChannel | None = None
        self._connecting = asyncio.Lock()

    async def list_replicas(self, broker_id: int) -> list[backup_pb2.ReplicaInfo]:
        """Return the backup's replicas of a broker; none if it fails."""
        replicas: list[backup_pb2.ReplicaInfo] = []
        request = backup_pb2.ListReplicasRequest(broker_id=broker_id)
        if not await self.connect():
            return replicas
        try:
            while self._channel is not None:
                future = self._channel.submit(api.LIST_REPLICAS, request, timeout_s=self._limits.timeout_s)
                message = (await future).message
                replicas += message.replicas
                self.headers_damaged = message.headers_damaged
                if message.complete or not message.replicas:
                    return replicas
                request.after_virtual_segment_id = replicas[-1].virtual_segment_id
        except KeraError as error:
            self.failed = error.message
        return []

    async def connect(self) -> bool:
        """Connect, unless connected already; False if the backup has failed."""
        async with self._connecting:
            if self._channel is None and not self.failed:
                try:
                    self._channel = await self._ways.connect(self._info, timeout_s=self._limits.connect_timeout_s)
                except KeraError as error:
                    self.failed = error.message
        return not self.failed

    async def read(self, request: backup_pb2.ReadReplicaRequest) -> tuple[backup_pb2.ReadReplicaResponse, memoryview]:
        """Read a piece of a replica. Raises the error of the backup, or why it cannot be asked."""
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
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()
