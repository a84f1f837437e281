"""The cost of replication for a broker besides time: memory for references, and copies. In this process, without
sockets.

Chunks of one stream go through virtual logs whose backups answer at once; segments fill, close and leave the memory, as
they do in a broker. Counted:

* memory that Python has allocated when only replication's records of the log are left (`tracemalloc`, exact);
* bytes that are copied: a chunk's copy into the arena is one; what goes to the transport for replication is compared
  with the arena's own addresses, and every byte that is elsewhere would be another.

Not counted are the transport's own: the kernel's copy into the socket, and the one out of it at the backup, which then
copies once, into the replica (its metric ``kera_backup_bytes_appended`` counts that).
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from array import array
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.common import Figures, directory, parser, sample_chunk, say, size
from kera.broker.log.arena import Arena
from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.records import SegmentAddress
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_log import Close, Send
from kera.broker.storage.index import SegmentIndex
from kera.core.base.ids import EntryId
from kera.core.base.settings import KIB, MIB
from kera.core.format.chunk import verify_header
from kera.v1 import common_pb2

STREAM_ID = 1
WARM_UP_SEGMENTS = 10


class Broker:
    """The parts of a broker that replication needs."""

    def __init__(self, root: Path, arguments: argparse.Namespace) -> None:
        segment_bytes = arguments.segment_bytes
        self.arena = Arena.create(
            Path("/dev/shm"),  # noqa: S108 - shared memory is the point
            arena_bytes=2 * segment_bytes,
            slot_bytes=segment_bytes,
            data_dir=root,
            ephemeral=True,
        )
        self.replication = Replication(ReplicationLimits(segment_bytes), lambda _changes, done: done(None), Events())
        self.replication.begin(1, [])
        backups = [
            common_pb2.BackupInfo(backup_id=number + 1, node_id=str(number), segment_bytes=segment_bytes)
            for number in range(arguments.replication)
        ]
        self.replication.backups.update(backups)
        for backup in backups:
            self.replication.backup_up(backup.backup_id)
        self.logs = self.replication.logs.open_stream(
            STREAM_ID,
            replication=arguments.replication,
            entries=1,
            virtual_logs=arguments.virtual_logs,
            by_replicas=True,
        )
        index = SegmentIndex.open(root / "index", durable=False)
        self.entries = [Entry(EntryId(STREAM_ID, number, 0), index) for number in range(arguments.streamlets)]
        self.appended = self.sent = self.sent_elsewhere = self.chunks = 0
        memory = np.frombuffer(next(self.arena.slots()).view, np.uint8).__array_interface__["data"][0]
        self._addresses = range(memory, memory + 2 * segment_bytes)

    def fill(self, entry: Entry, group_id: int, chunk: memoryview) -> None:
        """Write a segment, have it replicated, and give its memory away."""
        header = verify_header(chunk)
        address = SegmentAddress(*entry.log_id, group_id, 1)
        segment = Segment.open(entry, address, self.arena.allocate(), entry.next_record)
        entry.by_replicas = True
        while segment.takes(len(chunk)):
            start = segment.append(chunk, header, 1, 0)
            self.appended += len(chunk)
            self.chunks += 1
            self.replication.logs.append(self.logs.of(entry.log_id.streamlet_id, 0), segment, start, segment.head)
            self._pump()
        segment.slot.retire()

    def _pump(self) -> None:
        while effects := self.replication.logs.pump():
            for effect in effects:
                if isinstance(effect, Send):
                    self._send(effect)
                elif isinstance(effect, Close):
                    self.replication.closed_replica(effect)

    def _send(self, send: Send) -> None:
        for view in send.batch.views():
            self.sent += len(view)
            if np.frombuffer(view, np.uint8).__array_interface__["data"][0] not in self._addresses:
                self.sent_elsewhere += len(view)
        self.replication.logs.acknowledged(send)


def chunk_of(length: int) -> memoryview:
    """A chunk; its content does not matter here."""
    return memoryview(sample_chunk(pa.py_buffer(bytes(length - 128)), stream_id=STREAM_ID).to_bytes())


def allocated() -> int:
    """The bytes of Python objects that were not made here."""
    gc.collect()
    here = tracemalloc.Filter(inclusive=False, filename_pattern=__file__)
    traces = tracemalloc.take_snapshot().filter_traces([here]).traces
    return sum(trace.size for trace in traces)


def run(arguments: argparse.Namespace, root: Path) -> None:
    """Measure each size of chunks."""
    figures = Figures("replication_cost", arguments, root)
    for chunk_bytes in arguments.chunk_bytes:
        say(f"chunks of {chunk_bytes} bytes")
        path = root / str(chunk_bytes)
        path.mkdir()
        broker, chunk = Broker(path, arguments), chunk_of(chunk_bytes)
        group_ids = array("I", range(1, arguments.segments + 1))
        for group_id in group_ids[:WARM_UP_SEGMENTS]:  # one-time growth is over
            for entry in broker.entries:
                broker.fill(entry, group_id, chunk)
        tracemalloc.start()
        before, chunks = allocated(), broker.chunks
        for group_id in group_ids[WARM_UP_SEGMENTS:]:
            for entry in broker.entries:
                broker.fill(entry, group_id, chunk)
        grown = allocated() - before
        tracemalloc.stop()
        chunks = broker.chunks - chunks
        of = f"chunks of {chunk_bytes // KIB} KiB"
        figures.add(f"{of}: memory for references, per chunk", grown / chunks, "B")
        figures.add(f"{of}: the same per GB of log", grown / (chunks * chunk_bytes / 1e9) / 1e3, "KB")
        copied = broker.appended + broker.sent_elsewhere
        figures.add(f"{of}: bytes copied by the broker per byte appended", copied / broker.appended, "B")
        figures.add(f"{of}: bytes sent from the arena per byte appended", broker.sent / broker.appended, "B")
        closed = broker.replication.virtual_segments["closed"]
        figures.add(f"{of}: closed virtual segments", closed, "")
        broker.arena.close()
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--chunk-bytes", type=size, nargs="+", default=[1 * KIB, 16 * KIB, 256 * KIB])
    made.add_argument("--segments", type=int, default=60, help="of each streamlet")
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    made.add_argument("--streamlets", type=int, default=4)
    made.add_argument("--virtual-logs", type=int, default=1)
    made.add_argument("--replication", type=int, default=1)
    arguments = made.parse_args()
    if arguments.segments <= WARM_UP_SEGMENTS:
        made.error(f"--segments has to be more than {WARM_UP_SEGMENTS}, which are there to warm up")
    with directory(arguments) as root:
        run(arguments, root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
