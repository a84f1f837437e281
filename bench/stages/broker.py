"""The stages of a broker: from the frame of a write to its answer, with and without a backup."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stages.around import (
    BROKER_ID,
    MESSAGE_BYTES_MAX,
    SEGMENT_BYTES,
    TURNS_MAX,
    Wire,
    chunk_of,
    daemon_connection,
    deliver,
    frame,
    header_of,
    next_turn,
    stream_info,
)
from bench.stages.part import MEMORY_BYTES, Load, Samples, now_ns, since
from kera.broker.backup_ways import BackupWays
from kera.broker.counters import Counters
from kera.broker.log.arena import Arena
from kera.broker.log.events import Events
from kera.broker.ownership.streams import Streams
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.replication.replicator import AnswerTimes, Replicator
from kera.broker.serving.service import BrokerService
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.settings import MIB
from kera.core.format.chunk import verify_header, verify_payload
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frames import FrameKind
from kera.v1 import backup_pb2, broker_pb2, common_pb2


class Writes:
    """A broker without a disk, with a stream without replicas and a stream with one."""

    def __init__(
        self,
        root: Path,
        loads: Sequence[Load],
        *,
        memory_bytes: int = MEMORY_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.loads = loads
        shm = Path("/dev/shm")  # noqa: S108 - the place of arenas
        self._arena = Arena.create(
            shm, arena_bytes=memory_bytes, slot_bytes=segment_bytes, data_dir=root, ephemeral=True
        )
        self._index = SegmentIndex.open(root / "index", durable=False)
        self._store = SegmentStore(root, LocalDisk(root), self._index)
        meta = {"clean": False, "next_physical_id": 1, "slot_bytes": segment_bytes}
        self._memory = PersistenceManager(self._arena, self._index, PhysicalIds(meta), Events())
        replication = Replication(
            ReplicationLimits(segment_bytes), lambda _changes, done: done(None), self._memory.events
        )
        self._streams = Streams(self._memory, Restart(None, self._index, self._store), replication)
        replicator = Replicator(replication, BackupWays(), timeout_ms=60_000)
        self._counters = Counters()
        service = BrokerService(
            self._streams, self._memory, replication, self._counters, pump=replicator.pump, read_bytes_max=MIB
        )
        self.writer = service.writer
        service.registered(BROKER_ID, [], 1)
        self.connection, self.wire = daemon_connection(service.service(), service.takers())
        """A producer's connection."""
        self.backup, self.backup_wire = FrameChannel("unix", "", MESSAGE_BYTES_MAX), Wire()
        """The connection to the backup."""
        self.backup.connection_made(self.backup_wire)
        replication.begin(1, [])
        replicator.begin(BROKER_ID, 1)
        replication.backups.update([common_pb2.BackupInfo(backup_id=1, node_id="other", segment_bytes=SEGMENT_BYTES)])
        replication.backup_up(1)
        replicator._links[1] = _Link(self.backup)  # type: ignore[assignment]
        self._stream_id = 0

    async def close(self) -> None:
        """Release the memory."""
        self.backup.connection_lost(None)
        self._index.close()
        self._arena.close()
        self.wire.abort()
        self.backup_wire.abort()

    def open(self, info: common_pb2.StreamInfo) -> int:
        """Open such a stream, until `drop`; returns its id."""
        self._stream_id += 1
        info.stream_id = self._stream_id
        self._streams.open(info, BROKER_ID, 1)
        return self._stream_id

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. Both streams use the same memory, one after the other."""
        for replicas in (0, 1):
            await self._round(load, replicas, samples)

    async def _round(self, load: Load, replicas: int, samples: Samples) -> None:
        self.open(stream_info(1, replicas=replicas))
        sequence = 0
        for number in range(load.requests + 1):
            bulk = b"".join(
                chunk_of(load.chunk_bytes, sequence + place, self._stream_id) for place in range(load.chunks)
            )
            sequence += load.chunks
            if number % 3 == 2 and not replicas:
                self._steps(load, memoryview(bulk), samples)
                continue
            message = broker_pb2.MultiWriteChunksRequest(chunk_count=load.chunks)
            await next_turn()
            request = frame(FrameKind.REQUEST, api.MULTI_WRITE_CHUNKS, number, message, [bulk])
            spent_ns = await deliver(self.connection, self.wire, request)
            spent_ns += await self._until_answered()
            self.wire.sent.clear()
            if number:  # the first one opens the segment
                what = "broker: frame to answer" + (", one copy" if replicas else "")
                samples.requests[what][load].append(spent_ns)
        if self._counters.chunks_refused:
            raise RuntimeError(f"the broker has refused {self._counters.chunks_refused} chunks")
        await self.drop()

    def _steps(self, load: Load, bulk: memoryview, samples: Samples) -> None:
        """Time most steps of a write, each for all chunks."""
        streamlet = self._streams.get(self._stream_id).streamlet(0)
        begun_ns, at, found = now_ns(), 0, []
        while at < len(bulk):
            header = verify_header(bulk, at)
            verify_payload(bulk, at, header)
            found.append((header, bulk[at : at + header.chunk_bytes]))
            at += header.chunk_bytes
        samples.requests["broker: of it verify"][load].append(since(begun_ns))
        begun_ns = now_ns()
        for header, chunk in found:
            streamlet.publish(streamlet.append(chunk, header))
        samples.requests["broker: of it append"][load].append(since(begun_ns))

    async def _until_answered(self) -> int:
        """Let slices run, and answer like backups, until the producer has its answer; returns the time."""
        spent_ns = 0
        for _ in range(TURNS_MAX):
            if self.wire.sent:
                return spent_ns
            spent_ns += await self._answer()
            begun_ns = now_ns()
            await asyncio.sleep(0)
            spent_ns += since(begun_ns)
        raise RuntimeError("the broker has not answered")

    async def _answer(self) -> int:
        sent, self.backup_wire.sent = self.backup_wire.sent, []
        spent_ns = 0
        for pieces in sent:
            header = header_of(pieces)
            replicate = header.method == api.REPLICATE.number
            answer: Any = backup_pb2.ReplicateResponse() if replicate else backup_pb2.FreeReplicasResponse()
            method: Any = api.REPLICATE if replicate else api.FREE_REPLICAS
            reply = frame(FrameKind.REPLY, method, header.request_id, answer)
            spent_ns += await deliver(self.backup, self.backup_wire, reply)
        return spent_ns

    async def drop(self) -> None:
        """Free all memory of the last stream."""
        self._streams.drop(self._stream_id)
        while jobs := self._memory.plan():
            for job in jobs:
                self._store.perform(job)
                self._memory.finished(job)
        for _ in range(4):
            await asyncio.sleep(0)
            await self._answer()
        self.wire.sent.clear()


class _Link:
    """A connected backup."""

    def __init__(self, channel: FrameChannel) -> None:
        self.channel = channel
        self.answers = AnswerTimes()

    def fail(self, reason: str) -> None:
        """It never fails."""
        raise RuntimeError(reason)
