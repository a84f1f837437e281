"""Reads the replicas of a virtual segment, one after the other, until no chunks are missing.

If a replica fails or is damaged, the next one is read. A backup that is being drained is given up when it fails; any
other is waited for. ``kera.broker.recovery.schedule`` decides the order of virtual segments, and
``kera.broker.recovery.assembly`` where chunks go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable

from kera.broker.backup_ways import BackupWays
from kera.broker.recovery.progress import RecoveryTotals, of_disk
from kera.broker.recovery.replica_reader import BackupLink, ReadLimits
from kera.broker.recovery.scan import Ref, ReplicasToRead, add_streamlets
from kera.core.base.repeated import Repeated
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, Unavailable
from kera.v1 import backup_pb2, common_pb2

log = get_logger("kera.recovery")


class BackupLinks:
    """The connections to backups, made when they are needed, and again after a loss."""

    def __init__(self, ways: BackupWays, limits: ReadLimits) -> None:
        self._ways = ways
        self._limits = limits
        self._links: dict[int, BackupLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, info: common_pb2.BackupInfo) -> BackupLink:
        """Return the connection to a backup. Raises `Unavailable`."""
        link = self._links.get(info.backup_id)
        if link is None or link.failed:
            if link is not None:  # a backup that hangs keeps its side open
                self._closing.add(task := asyncio.create_task(link.close()))
                task.add_done_callback(self._closing.discard)
            link = self._links[info.backup_id] = BackupLink(info, self._ways, self._limits)
        if not await link.connect():
            raise Unavailable(link.failed)
        return link

    async def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            with contextlib.suppress(KeraError):
                await link.close()
        if self._closing:
            await asyncio.wait(self._closing)


class ReplicaFetcher:
    """Reads the replicas of a virtual segment one after the other, until the missing chunks are complete.

    Belongs to one event loop.
    """

    def __init__(
        self,
        links: BackupLinks,
        totals: RecoveryTotals,
        *,
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        lacking: Callable[[ReplicasToRead], set[Ref]],
        take: Callable[[memoryview], Awaitable[str]],
        read_bytes_max: int,
    ) -> None:
        """`backups`: returns all known backups; `lacking`: returns the streamlets that need data of replicas.

        `take`: puts chunks in their places; returns what is wrong with them, if anything; raises errors of the disk.
        """
        self._links = links
        self._totals = totals
        self._backups = backups
        self._lacking = lacking
        self._take = take
        self._read_bytes_max = read_bytes_max
        self._cannot_write = Repeated(log)

    async def fetch(self, replicas: ReplicasToRead) -> str:
        """Read replicas until one is whole, or no data is missing that they may have.

        Returns why this must be tried again; empty if no replica has more data.
        """
        infos = {info.backup_id: info for info in self._backups()}
        reasons = []
        for backup_id in replicas.backup_ids:
            if backup_id in replicas.tried:
                continue
            info = infos.get(backup_id)
            if info is not None and info.draining and not info.alive:
                # The backup is gone for good. If it comes back nevertheless, the next scan finds it.
                replicas.backup_ids = tuple(each for each in replicas.backup_ids if each != backup_id)
                continue
            try:
                wrong = await self._fetch_from(info, replicas)
            except KeraError as error:
                self._totals.replicas_failed += 1
                if info is not None and info.draining:
                    replicas.tried.add(backup_id)  # a draining backup is given up when it fails
                else:
                    reasons.append(f"backup {backup_id}: {error.message}")
                continue
            except OSError as error:
                self._cannot_write.goes_on("cannot write recovered data; trying again", level="error", error=str(error))
                return of_disk(error)
            if not wrong:
                return ""
            replicas.tried.add(backup_id)
            log.warning("a replica is not whole", virtual_segment=list(replicas.key), backup_id=backup_id, reason=wrong)
        if not (reasons and self._lacking(replicas)):
            return ""
        broker_id, virtual_segment_id = replicas.key
        return f"virtual segment {virtual_segment_id:#x} of broker {broker_id} ({'; '.join(reasons)})"

    async def _fetch_from(self, info: common_pb2.BackupInfo | None, replicas: ReplicasToRead) -> str:
        """Read a replica as far as it is needed; return what is wrong with it. Raises errors of backup and disk."""
        if info is None or not info.alive:
            raise Unavailable("it is not alive")
        link = await self._links.get(info)
        async with link.turns:
            return await self._read(link, replicas)

    async def _read(self, link: BackupLink, replicas: ReplicasToRead) -> str:
        request = backup_pb2.ReadReplicaRequest(
            broker_id=replicas.key.broker_id,
            virtual_segment_id=replicas.key.virtual_segment_id,
            bytes_max=self._read_bytes_max,
        )
        streamlets: dict[int, set[int]] = {}
        for stream_id, streamlet_id in self._lacking(replicas):
            streamlets.setdefault(stream_id, set()).add(streamlet_id)
        add_streamlets(request, streamlets)
        wrong, length = "", replicas.length
        while request.offset < length:
            answer, chunks = await link.read(request)
            length = answer.replica.length
            if answer.next_offset <= request.offset:
                return f"it returned nothing at offset {request.offset}"
            if answer.replica.chunks_damaged:
                wrong = f"{answer.replica.chunks_damaged} chunks are damaged"
            if len(chunks):
                wrong = await self._take(chunks) or wrong
                self._cannot_write.over("recovered data can be written again")
            request.offset = answer.next_offset
            if not self._lacking(replicas):
                return ""
        if length < replicas.length:  # the next replica may have the rest
            return wrong or f"it has {length} of {replicas.length} bytes"
        return wrong
