"""The stages of a backup: from the frame of a replica's bytes to its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.stages.around import (
    BROKER_ID,
    SEGMENT_BYTES,
    STREAM_ID,
    daemon_connection,
    deliver,
    frame,
    header_of,
    next_turn,
    placed_chunks,
)
from bench.stages.part import MEMORY_BYTES, Load, Samples
from kera.backup.disks import DiskState
from kera.backup.frames import Layout
from kera.backup.metrics import RequestCounters
from kera.backup.service import BackupService
from kera.backup.slots import Slots
from kera.backup.store import ReplicaStore
from kera.core.base.settings import MIB
from kera.core.format.chunk import chained_checksum
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind
from kera.v1 import backup_pb2


class Replicas:
    """A backup that keeps replicas in memory."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        disk = DiskState(0, "", Layout(SEGMENT_BYTES), 1 << 50, 0)
        disk.set_free_bytes(1 << 50)
        self._store = ReplicaStore(
            Slots(MEMORY_BYTES // SEGMENT_BYTES, SEGMENT_BYTES), [disk], (1, "bench"), on_work=lambda: None
        )
        engine: Any = _BackupEngine(self._store)
        service = BackupService(engine, RequestCounters(), read_bytes_max=MIB)
        service.registered()
        self.connection, self.wire = daemon_connection(service.service(), service.takers())
        """A broker's connection."""
        self._virtual_segment_id = 0

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        bulk, first = memoryview(placed_chunks(load)), self._virtual_segment_id + 1
        offset, checksum = SEGMENT_BYTES, 0
        for number in range(load.requests + 1):
            opens = offset + len(bulk) > SEGMENT_BYTES
            if opens:
                self._virtual_segment_id += 1
                offset = checksum = 0
            for at in range(0, len(bulk), len(bulk) // load.chunks):
                checksum = chained_checksum(bulk, at, checksum)
            message = backup_pb2.ReplicateRequest(
                broker_id=BROKER_ID,
                broker_epoch=1,
                stream_id=STREAM_ID,
                virtual_segment_id=self._virtual_segment_id,
                offset=offset,
                checksum=checksum,
            )
            offset += len(bulk)
            await next_turn()
            request = frame(FrameKind.REQUEST, api.REPLICATE, number, message, [bulk])
            spent_ns = await deliver(self.connection, self.wire, request)
            (answer,) = self.wire.sent
            self.wire.sent.clear()
            if header_of(answer).kind != FrameKind.REPLY:
                raise RuntimeError("the backup has refused a request")
            if number and (not opens or 2 * len(bulk) > SEGMENT_BYTES):
                samples.requests["backup: frame to answer"][load].append(spent_ns)
        self._store.free(BROKER_ID, range(first, self._virtual_segment_id + 1), lambda _error: None)
        for job in self._store.persistence.plan():
            self._store.persistence.finished(job)


class _BackupEngine:
    """An engine that only has the store."""

    def __init__(self, store: ReplicaStore) -> None:
        self.store = store
