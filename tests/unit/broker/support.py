"""Support for the broker's tests: chunks, a log engine without threads, streamlets, calls without sockets."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from kera.broker.counters import Counters, PushTotals
from kera.broker.log.arena import Arena, Slot
from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.log.intervals import Holding
from kera.broker.log.read_plan import ReadPlan, plan_read
from kera.broker.log.segment import Segment
from kera.broker.log.streamlet import PRODUCER_LIMITS, Appended, ProducerLimits, Streamlet
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.orders import Orders, StreamletRecovery
from kera.broker.ownership.streams import Streams
from kera.broker.plugins import Plugins
from kera.broker.records import SegmentAddress
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.service import BrokerService
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.jobs import Job
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import Turns
from kera.core.errors import KeraError
from kera.core.format.chunk import (
    HEADER_BYTES,
    ChunkHeader,
    Placement,
    encode_chunk,
    encode_payload,
    iterate_chunks,
    place_chunk,
    verify_header,
)
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc.method import Call, Method, Peer, Reply
from kera.server.access.guard import Door
from kera.v1 import broker_pb2, common_pb2

CHUNK_BYTES = 1024
SLOT_BYTES = 4 * CHUNK_BYTES
STREAM_ID = 7
ADDRESS = SegmentAddress(STREAM_ID, 0, 0, 1, 1)
"""The address of the first segment of the first entry."""
BROKER_ID = 3
EVERYTHING = 1 << 20


def chunk(producer: int = 1, sequence: int = 0, *, size: int = CHUNK_BYTES, fill: bytes = b"x", **fields: Any) -> bytes:
    """A chunk of `size` bytes. Its payload is `fill` instead of Arrow: the broker never looks into it."""
    header: dict[str, Any] = {
        "record_count": 1,
        "stream_id": STREAM_ID,
        "streamlet_id": 0,
        "schema_id": 1,
        "producer_id": producer,
        "producer_epoch": 0,
        "sequence": sequence,
        "created_us": 5,
        "min_timestamp_us": 10,
        "max_timestamp_us": 20,
    }
    return encode_chunk(pa.py_buffer((fill * size)[: size - HEADER_BYTES]), **(header | fields)).to_bytes()


def batch_chunk(producer: int = 1, sequence: int = 0, *, size: int = CHUNK_BYTES, **fields: Any) -> bytes:
    """A chunk of one record, valid for a broker that checks payloads; `size`: its approximate size."""
    batch = pa.RecordBatch.from_pylist([{"timestamp": 10, "value": b"x" * (size - HEADER_BYTES)}], DEFAULT_SCHEMA)
    data = encode_payload(batch).to_pybytes()
    return chunk(producer, sequence, size=HEADER_BYTES + len(data), fill=data, **fields)


def placed(
    sequence: int = 0, address: SegmentAddress = ADDRESS, *, durable_head: int = 0, first_record: int = 0, **fields: Any
) -> bytes:
    """A chunk as it lies in the segment with this address."""
    data = bytearray(chunk(sequence=sequence, stream_id=address.stream_id, streamlet_id=address.streamlet_id, **fields))
    place_chunk(data, 0, Placement(address.group_id, address.segment_id, address.entry, first_record, 9, durable_head))
    return bytes(data)


class FailingDisk(LocalDisk):
    """A disk that works until a test makes it fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.write_error = 0
        """Error number of all writes."""
        self.read_error = 0
        self.remove_error = 0
        self.sync_error = 0
        """Error number of syncs of removals."""
        self.written: list[Path] = []
        """Files in the order in which they were written to."""

    def write(self, path: Path, offset: int, data: memoryview) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error), str(path))
        self.written.append(path)
        super().write(path, offset, data)

    def remove(self, path: Path) -> None:
        if self.remove_error:
            raise OSError(self.remove_error, os.strerror(self.remove_error), str(path))
        super().remove(path)

    def sync_removals(self, paths: Iterable[Path]) -> None:
        if self.sync_error:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync_removals(paths)

    def read(self, path: Path, offset: int, into: memoryview) -> int:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error), str(path))
        return super().read(path, offset, into)


class Engine:
    """The log engine without loop and threads: a test decides when the planned jobs are done."""

    def __init__(
        self,
        arena: Arena,
        root: Path,
        restart: Restart | None = None,
        *,
        flush_delay_ms: int = 0,
        reserve_slots: int = 0,
        limits: ReplicationLimits | None = None,
        random: Random | None = None,
    ) -> None:
        """`restart`: the restart of a launch that goes on from existing data; None: a launch that finds nothing.

        `reserve_slots`: by default a test can use all of the memory.
        """
        self.events = Events()
        self.arena = arena
        self.root = root
        self.index = SegmentIndex.open(root / "index", durable=False) if restart is None else restart.index
        self.disk = FailingDisk(root)
        self.store = SegmentStore(root, self.disk, self.index)
        self.restart = restart or Restart(None, self.index, self.store)
        next_physical_id = self.index.meta().get("next_physical_id", 1)
        meta = {"clean": False, "next_physical_id": next_physical_id, "slot_bytes": arena.slot_bytes}
        self.index.commit([], meta)
        self.memory = PersistenceManager(
            arena,
            self.index,
            PhysicalIds(meta),
            self.events,
            flush_delay_ms=flush_delay_ms,
            reserve_slots=reserve_slots,
        )
        self.replication = Replication(
            limits or ReplicationLimits(arena.slot_bytes),
            self.memory.index_writer.note,
            self.events,
            exists=lambda address: self.streams.exists(address),  # noqa: PLW0108 - `streams` does not exist yet
            spared=lambda stream_id: stream_id in self.streams.unknown,
            random=random,
        )
        self.streams = Streams(self.memory, self.restart, self.replication)
        self.streamlets = 0

    def run(self) -> None:
        """Do all planned jobs."""
        while jobs := self.memory.plan():
            for job in jobs:
                self.perform(job)

    def perform(self, job: Job) -> None:
        """Do a job."""
        self.store.perform(job)
        self.memory.finished(job)

    def fill_memory(self) -> list[Slot]:
        """Take all free slots, as other streams would."""
        return [self.arena.allocate() for _ in range(self.arena.free_slots)]

    def close(self) -> None:
        """Close the index."""
        self.index.close()


class Outcome:
    """Stands for a waiter for the disk."""

    def __init__(self) -> None:
        self.calls: list[KeraError | None] = []

    def __call__(self, error: KeraError | None) -> None:
        self.calls.append(error)


class Log:
    """A streamlet, and the next sequence of each of its producers."""

    def __init__(
        self,
        engine: Engine,
        *,
        entries: int = 1,
        group_segments: int = 2,
        first_group_id: int = 1,
        broker_epoch: int = 9,
        streamlet_id: int | None = None,
        producer_limits: ProducerLimits = PRODUCER_LIMITS,
    ) -> None:
        """`streamlet_id`: by default the id of a new streamlet."""
        if streamlet_id is None:
            streamlet_id = engine.streamlets
            engine.streamlets += 1
        restored = engine.restart.restore(STREAM_ID, streamlet_id, entries, first_group_id)
        self.streamlet = Streamlet(
            STREAM_ID,
            streamlet_id,
            entries=restored.entries,
            group_segments=group_segments,
            next_group_id=restored.next_group_id,
            producers=restored.producers,
            memory=engine.memory,
            held=Holding(broker_epoch=broker_epoch),
            producer_limits=producer_limits,
        )
        for segment in restored.segments:
            engine.memory.adopt(segment)
        self.engine = engine
        self.sequences: Counter[int] = Counter(
            {producer: record.next_sequence for producer, record in restored.producers.items()}
        )

    @property
    def entry(self) -> Entry:
        """The first entry."""
        return self.streamlet.entries[0]

    def append(
        self, producer: int = 1, sequence: int | None = None, *, publish: bool = True, **fields: Any
    ) -> Appended:
        """Append a chunk, by default with the producer's next sequence, and let readers see it."""
        fields.setdefault("streamlet_id", self.streamlet.streamlet_id)
        data = chunk(producer, self.sequences[producer] if sequence is None else sequence, **fields)
        appended = self.streamlet.append(memoryview(data), verify_header(data))
        if sequence is None:
            self.sequences[producer] += 1
        if publish:
            self.streamlet.publish(appended)
        return appended

    def append_many(self, count: int, producer: int = 1, **fields: Any) -> list[Appended]:
        """Append `count` chunks of one producer."""
        return [self.append(producer, **fields) for _ in range(count)]

    def read(
        self,
        start: Position = EARLIEST,
        end: Position | None = None,
        bytes_max: int = EVERYTHING,
        *,
        entry: int = 0,
        strict: bool = False,
    ) -> tuple[list[int], Position]:
        """Read: sequences of the chunks, and the next position. Segments on disk are loaded."""
        plan = plan_read(self.streamlet, entry, start, end, bytes_max, strict=strict)
        while plan.missing is not None and not plan.ranges:
            self.engine.memory.loads.load(self.streamlet.entries[entry], plan.missing, Outcome())
            self.engine.run()
            plan = plan_read(self.streamlet, entry, start, end, bytes_max, strict=strict)
        return [header.sequence for header in headers(plan)], plan.next

    def read_all(self, start: Position = EARLIEST, *, entry: int = 0) -> list[int]:
        """Sequences of all chunks from `start` on, read one segment after the other."""
        found, following = self.read(start, entry=entry)
        sequences = list(found)
        while found:
            found, following = self.read(following, entry=entry)
            sequences += found
        return sequences

    def segments(self) -> list[Segment]:
        """All segments that are in memory, in the order of the log."""
        return [segment for entry in self.streamlet.entries for _, segment in sorted(entry.resident.items())]


def position(appended: Appended) -> Position:
    """The position of the chunk's start."""
    return Position(appended.group_id, appended.segment_id, appended.position)


def place(appended: Appended) -> tuple[int, int, int, int, int, bool]:
    """The chunk's entry, group, segment, position, first record, and whether it is a repeat."""
    return appended[:6]


def headers(plan: ReadPlan) -> list[ChunkHeader]:
    """The headers of all chunks of a plan, in order."""
    return [header for segment, start, end in plan.ranges for header, _ in iterate_chunks(segment.slot.view[start:end])]


def stream_info(stream_id: int = STREAM_ID, *, owners: Sequence[int] = (BROKER_ID,), **config: Any) -> Any:
    """A stream with one streamlet for each of `owners`; only `BROKER_ID` is the broker under test."""
    settings: dict[str, Any] = {"streamlets": len(owners), "entries": 1, "group_segments": 2} | config
    return common_pb2.StreamInfo(
        stream_id=stream_id,
        name=f"stream-{stream_id}",
        config=common_pb2.StreamConfig(**settings),
        schemas=[common_pb2.StreamSchema(schema_id=1)],
        assignments=[
            common_pb2.StreamletAssignment(streamlet_id=index, broker_id=owner, broker_epoch=9, first_group_id=1)
            for index, owner in enumerate(owners)
        ],
    )


def limited(**limits: int) -> pytest.MarkDecorator:
    """Give the test's broker these `ServingLimits`."""
    return pytest.mark.parametrize("limits", [ServingLimits(**limits)], ids=["limited"])


class Broker:
    """A broker's service over an engine, called as a transport calls it."""

    def __init__(
        self,
        engine: Engine,
        *streams: common_pb2.StreamInfo,
        read_bytes_max: int = EVERYTHING,
        takeovers: StreamletRecovery | None = None,
        limits: ServingLimits | None = None,
        turns: Turns | None = None,
        order_turns: Turns | None = None,
        pump: Callable[[], None] = lambda: None,
        check_payloads: bool = False,
        guard: Door | None = None,
    ) -> None:
        self.engine = engine
        self.arena = engine.arena
        self.counters, self.pushed = Counters(), PushTotals()
        self.streams = engine.streams
        orders = Orders(
            engine.streams,
            engine.memory,
            takeovers,
            coordinator=CoordinatorEpoch(confirmed=False),
            turns=order_turns,
            retry_interval_s=0.001,
        )
        self.plugins = Plugins(self.streams, engine.replication, pump, guard=guard)
        self.broker = BrokerService(
            self.streams,
            engine.memory,
            engine.replication,
            self.counters,
            pump=pump,
            read_bytes_max=read_bytes_max,
            orders=orders,
            check_payloads=check_payloads,
            limits=limits,
            turns=turns,
            guard=guard,
            hooks=self.plugins.of_requests,
        )
        self.service = self.broker.service()
        self.peer = Peer("unix", "")
        self.paused = False
        """While true, the disk neither reads nor writes."""
        self._loop = asyncio.get_running_loop()
        engine.events.disk_work.listen(self._work)
        if streams:
            self.broker.registered(BROKER_ID, streams)

    def _work(self) -> None:
        if not self.paused:
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        if not self.paused:
            self.engine.run()

    def resume(self) -> None:
        """Let the disk go on."""
        self.paused = False
        self._run()

    def start(
        self, method: Method[Any, Any], message: Any, bulk: bytes | bytearray = b"", peer: Peer | None = None
    ) -> Any:
        """Call a handler; the result is a reply, or an awaitable for one."""
        return self.service[method](Call(message, memoryview(bulk), peer or self.peer))

    async def ask(self, method: Method[Any, Any], message: Any) -> Any:
        """The answer's message."""
        result = self.start(method, message)
        return (result if isinstance(result, Reply) else await result).message

    def write(
        self, *chunks: bytes, count: int | None = None, durability: int = 0
    ) -> Reply[Any] | Awaitable[Reply[Any]]:
        """Call the handler of writes, and return its result."""
        request = broker_pb2.MultiWriteChunksRequest(
            chunk_count=len(chunks) if count is None else count,
            durability=durability,  # type: ignore[arg-type]
        )
        return self.broker.writer.write(Call(request, memoryview(b"".join(chunks)), self.peer))

    def append(self, *chunks: bytes, count: int | None = None, durability: int = 0) -> list[broker_pb2.ChunkStatus]:
        """Write, and return the statuses of the answer, which comes at once."""
        reply = self.write(*chunks, count=count, durability=durability)
        assert isinstance(reply, Reply), "the write waits"
        return list(reply.message.statuses)

    def read(self, *ranges: broker_pb2.ReadRange, peer: Peer | None = None, **fields: Any) -> Any:
        """Call the handler of reads, and return its result."""
        request = broker_pb2.MultiReadChunksRequest(ranges=ranges, **fields)
        return self.broker.fetches.read(Call(request, memoryview(b""), peer or self.peer))


def cursor(start: Position = EARLIEST, *, stream_id: int = STREAM_ID, streamlet: int = 0, entry: int = 0) -> Any:
    """`start` as a message."""
    return common_pb2.Cursor(
        stream_id=stream_id,
        streamlet_id=streamlet,
        entry=entry,
        group_id=start.group_id,
        segment_id=start.segment_id,
        position=start.offset,
    )


def read_range(start: Position = EARLIEST, end: Position | None = None, **where: int) -> broker_pb2.ReadRange:
    """A range of a read."""
    return broker_pb2.ReadRange(start=cursor(start, **where), end=None if end is None else cursor(end, **where))


def next_of(result: broker_pb2.ReadResult) -> Position:
    """The next position in a result."""
    return Position(result.next.group_id, result.next.segment_id, result.next.position)


def sequences_of(reply: Reply[Any]) -> list[int]:
    """The sequences of all chunks in a reply to a read."""
    return [header.sequence for piece in reply.bulk for header, _ in iterate_chunks(piece)]
