"""The parts of KerA that a chunk goes through, each alone in this process: what `bench.stages` measures.

The classes are the real ones. Only what is around them is not: `Wire` stands for a connection (it keeps what it is
given to send, and `deliver` puts into a protocol's buffer what the kernel would), `Cluster` for the coordinator.

A part has `rounds`: requests of one `Load`, each timed for itself with the processor time of this thread. What is not
KerA's, such as making the chunks that a broker is to receive, is not timed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from crc32c import crc32c

from kera.backup.disks import DiskState
from kera.backup.frames import Layout
from kera.backup.metrics import Counters as BackupCounters
from kera.backup.service import BackupService
from kera.backup.slots import Slots
from kera.backup.store import ReplicaStore
from kera.broker.arena import Arena
from kera.broker.disk import LocalDisk
from kera.broker.metrics import Counters
from kera.broker.persistence import PersistenceManager
from kera.broker.replication import Limits, Replication
from kera.broker.replicator import Replicator
from kera.broker.restart import Restart
from kera.broker.segment_index import SegmentIndex
from kera.broker.segment_store import SegmentStore
from kera.broker.service import BrokerService
from kera.broker.stream import Streams
from kera.cli.bench._payload import make_batch, make_value, records_per_chunk
from kera.client.consumer import Consumer
from kera.client.producer import Producer
from kera.client.push import PushConnection
from kera.client.settings import ClientSettings, ConsumerSettings, ProducerSettings
from kera.client.types import StreamDescription
from kera.core.chunk import (
    Placement,
    chained_checksum,
    encode_chunk,
    encode_payload,
    place_chunk,
    verify_header,
    verify_payload,
)
from kera.core.process import DIE_WITH_PARENT_VARIABLE
from kera.core.push import Decoder, Run, encode_runs
from kera.core.rpc import Service, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import _ServerConnection, _Shared
from kera.core.rpc.frames import FrameHeader, Kind, decode_header, encode_frame
from kera.core.rpc.method import Method
from kera.core.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.settings import KIB, MIB
from kera.v1 import backup_pb2, broker_pb2, common_pb2, coordinator_pb2, push_pb2

RECORD_BYTES = 100
SEGMENT_BYTES = 8 * MIB
MEMORY_BYTES = 64 * MIB
"""Of the broker, the backup, and what is copied to: more than caches hold, of which a round goes through a part."""
MESSAGE_BYTES_MAX = 32 * MIB
ROUND_BYTES = 8 * MIB
REQUESTS_MAX = 24
"""In a round. A round is short, so that some of them are disturbed by nobody."""
TURNS_MAX = 1000
STREAM_ID = 1
BROKER_ID = 1
_LENGTHS = struct.Struct("<QQ")

now_ns = time.thread_time_ns


class Load(NamedTuple):
    """What a request carries."""

    chunks: int
    chunk_bytes: int

    @property
    def size_bytes(self) -> int:
        """Of all chunks."""
        return self.chunks * self.chunk_bytes

    @property
    def requests(self) -> int:
        """In a round."""
        return max(2, min(REQUESTS_MAX, ROUND_BYTES // self.size_bytes))


class Samples:
    """Nanoseconds of single requests by stage and load, of single records by what is done with them."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, defaultdict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.records: defaultdict[str, list[float]] = defaultdict(list)
        self.turns: list[float] = []
        """Of the event loop, with nothing to do."""


class Part(Protocol):
    """Something to measure."""

    @property
    def loads(self) -> Sequence[Load]:
        """What it can be measured with."""
        ...

    async def rounds(self, load: Load, samples: Samples) -> None:
        """Some requests."""


def _look_ns() -> int:
    """What looking at the clock twice takes, which is taken off each measurement."""
    times = [now_ns() for _ in range(10_000)]
    return min(after - before for before, after in itertools.pairwise(times))


LOOK_NS = _look_ns()


def since(begun_ns: int) -> int:
    """Processor time of this thread since then."""
    return now_ns() - begun_ns - LOOK_NS


# -- around the parts ----------------------------------------------------------------------------------------------


class Wire(asyncio.Transport):
    """A connection that leads nowhere: it keeps what it is to send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[Any]] = []
        self._socket = socket.socket(socket.AF_UNIX)

    def write(self, data: Any) -> None:
        """See `asyncio.Transport`."""
        self.sent.append([data])

    def writelines(self, list_of_data: Any) -> None:
        """See `asyncio.Transport`."""
        self.sent.append(list(list_of_data))

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return False

    def pause_reading(self) -> None:
        """See `asyncio.Transport`."""

    def resume_reading(self) -> None:
        """See `asyncio.Transport`."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.Transport`."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.Transport`."""
        return self._socket if name == "socket" else default

    def abort(self) -> None:
        """See `asyncio.Transport`."""
        self._socket.close()

    close = abort


def deliver(protocol: asyncio.BufferedProtocol, data: bytes) -> int:
    """Have a protocol receive bytes; what that takes, without the copy that the kernel would make."""
    view, at, spent_ns = memoryview(data), 0, 0
    while at < len(view):
        buffer = memoryview(protocol.get_buffer(-1))
        piece = view[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        begun_ns = now_ns()
        protocol.buffer_updated(len(piece))
        spent_ns += since(begun_ns)
        at += len(piece)
    return spent_ns


async def until_sent(wire: Wire) -> None:
    """Let the loop turn until something is sent."""
    for _ in range(TURNS_MAX):
        if wire.sent:
            return
        await asyncio.sleep(0)
    raise RuntimeError("nothing was sent")


def header_of(pieces: Sequence[Any]) -> FrameHeader:
    """The header of a frame that was sent."""
    return decode_header(memoryview(pieces[0]), 0, MESSAGE_BYTES_MAX)


def frame(kind: Kind, method: Method[Any, Any], number: int, message: Any, bulk: Sequence[Any] = ()) -> bytes:
    """A frame in one piece."""
    return b"".join(memoryview(piece) for piece in encode_frame(kind, method, number, message, bulk, MESSAGE_BYTES_MAX))


def stream_info(stream_id: int = STREAM_ID, *, replicas: int = 0) -> common_pb2.StreamInfo:
    """A stream of one streamlet."""
    durability = common_pb2.DURABILITY_REPLICATED if replicas else common_pb2.DURABILITY_LEADER
    config = common_pb2.StreamConfig(
        streamlets=1, entries=1, group_segments=8, durability=durability, replication=replicas, virtual_logs=1
    )
    assignment = common_pb2.StreamletAssignment(broker_id=BROKER_ID, broker_epoch=1, first_group_id=1)
    schema = common_pb2.StreamSchema(schema_id=1, arrow_schema=schema_to_bytes(DEFAULT_SCHEMA))
    return common_pb2.StreamInfo(
        stream_id=stream_id, name="s", config=config, schemas=[schema], assignments=[assignment]
    )


class Cluster:
    """What producers and consumers ask of a cluster; also where its brokers can be reached."""

    def __init__(self, push: PushConnection | None = None) -> None:
        """`push`: a broker pushes over this; None: it does not."""
        self.settings = ClientSettings()
        self.request_timeout_s = 60.0
        self.wire = Wire()
        self.channel_made = FrameChannel("unix", "", MESSAGE_BYTES_MAX)
        self.channel_made.connection_made(self.wire)
        self.locality = self
        self._push = push
        broker = common_pb2.BrokerInfo(broker_id=BROKER_ID, segment_bytes=SEGMENT_BYTES, alive=True)
        self._stream = StreamDescription.from_message(stream_info(), [broker])

    async def stream(self, _name: str) -> StreamDescription:
        """See `kera.client.cluster`; likewise all that follows."""
        return self._stream

    async def stream_or_last_seen(self, _name: str) -> StreamDescription:
        """The same."""
        return self._stream

    async def ask(self, _method: Any, _message: Any) -> coordinator_pb2.InitProducerResponse:
        """An identity."""
        return coordinator_pb2.InitProducerResponse(producer_id=1, producer_epoch=1)

    async def channel(self, _stream: Any, _broker_id: int) -> FrameChannel:
        """To the broker."""
        return self.channel_made

    def reachable(self, _broker: Any, _wish: Any) -> bool:
        """Whether it pushes."""
        return self._push is not None

    async def connection(self, _broker: Any, _wish: Any) -> PushConnection | None:
        """Over what."""
        return self._push

    def close(self) -> None:
        """Let go of the connection."""
        self.channel_made.connection_lost(None)
        self.wire.abort()


@functools.cache
def batch_of(chunk_bytes: int) -> pa.RecordBatch:
    """Of records of 100 bytes, as many as a chunk takes."""
    return make_batch(RECORD_BYTES, records_per_chunk(RECORD_BYTES, chunk_bytes))


@functools.cache
def _payload_of(chunk_bytes: int) -> pa.Buffer:
    return encode_payload(batch_of(chunk_bytes))


def chunk_of(chunk_bytes: int, sequence: int, stream_id: int = STREAM_ID) -> bytearray:
    """As a producer sends it."""
    batch = batch_of(chunk_bytes)
    encoded = encode_chunk(
        _payload_of(chunk_bytes),
        record_count=batch.num_rows,
        stream_id=stream_id,
        streamlet_id=0,
        schema_id=1,
        producer_id=1,
        producer_epoch=0,
        sequence=sequence,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
    )
    return bytearray(encoded.to_bytes())


@functools.cache
def placed_chunks(load: Load) -> bytes:
    """As they follow each other in a broker's memory."""
    chunks, records = [], batch_of(load.chunk_bytes).num_rows
    for number in range(load.chunks):
        chunks.append(chunk_of(load.chunk_bytes, number))
        place_chunk(chunks[-1], 0, Placement(1, 1, 0, number * records, 1, 0))
    return b"".join(chunks)


def _connection(service: Service) -> tuple[_ServerConnection, Wire]:
    """A client's connection to a daemon, at the daemon's side."""
    methods = {method.number: (method, handler) for method, handler in service.items()}
    connection, wire = _ServerConnection(_Shared(methods, MESSAGE_BYTES_MAX), "unix"), Wire()
    connection.connection_made(wire)
    return connection, wire


# -- what the machine can do ---------------------------------------------------------------------------------------


class Memory:
    """The limits: to copy the bytes of a request once, to take the checksum of each chunk, to turn the loop once."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self._target = memoryview(bytearray(MEMORY_BYTES))
        self._target[:] = bytes(MEMORY_BYTES)
        self._at = 0

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. The source is as warm as what was just received; the target goes on, as a log does."""
        source = memoryview(bytes(load.chunk_bytes))
        for _ in range(load.requests):
            if self._at + load.size_bytes > MEMORY_BYTES:
                self._at = 0
            begun_ns = now_ns()
            for at in range(self._at, self._at + load.size_bytes, load.chunk_bytes):
                self._target[at : at + load.chunk_bytes] = source
            samples.requests["copy"][load].append(since(begun_ns))
            self._at += load.size_bytes
            begun_ns = now_ns()
            for _ in range(load.chunks):
                crc32c(source)
            samples.requests["crc32c"][load].append(since(begun_ns))
            begun_ns = now_ns()
            await asyncio.sleep(0)
            samples.turns.append(since(begun_ns))


class Sockets:
    """The kernel's part: bytes through a socket to another process, which says when it has them."""

    def __init__(self, kind: str, loads: Sequence[Load], ours: socket.socket) -> None:
        self.loads = [load for load in loads if load.chunks == 1]
        self._kind = kind
        self._ours = ours

    @classmethod
    @contextlib.contextmanager
    def connected(cls, kind: str, loads: Sequence[Load]) -> Iterator[Sockets]:
        """With the other process; `kind`: unix or tcp."""
        ours, theirs = _socket_pair(kind)
        with ours:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", "bench.stages", "--other-end", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
                )
            try:
                ours.recv(1)
                yield cls(kind, loads, ours)
            finally:
                ours.close()
                process.kill()
                process.wait()

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        data = bytes(load.size_bytes)
        self._ours.sendall(_LENGTHS.pack(load.size_bytes, load.requests))
        for _ in range(load.requests):
            begun_ns = now_ns()
            self._ours.sendall(data)
            samples.requests[f"{self._kind} socket: send"][load].append(since(begun_ns))
            self._ours.recv(1)
        answer = memoryview(bytearray(8 * load.requests))
        _receive(self._ours, answer)
        samples.requests[f"{self._kind} socket: receive"][load] += answer.cast("Q").tolist()


def _socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MIB)  # as frames have it
        return pair
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


def _receive(end: socket.socket, into: memoryview) -> bool:
    """Fill `into`; False when there is no more."""
    at = 0
    while at < len(into):
        found = end.recv_into(into[at:])
        if not found:
            return False
        at += found
    return True


def be_other_end(descriptor: int) -> None:
    """What `Sockets` sends to: receives, and tells the processor time of each message after the last."""
    with socket.socket(fileno=descriptor) as end:
        end.sendall(b"\1")
        buffer, lengths = memoryview(bytearray(MEMORY_BYTES)), memoryview(bytearray(_LENGTHS.size))
        while _receive(end, lengths):
            size, count = _LENGTHS.unpack(lengths)
            spent_ns = []
            for _ in range(count):
                begun_ns = now_ns()
                if not _receive(end, buffer[:size]):
                    return
                spent_ns.append(max(0, since(begun_ns)))
                end.sendall(b"\1")
            end.sendall(struct.pack(f"{count}Q", *spent_ns))


# -- producers -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _producer(load: Load) -> AsyncIterator[tuple[Producer, Cluster]]:
    cluster: Any = Cluster()
    # Nothing closes or leaves before all chunks of a request are there.
    settings = ProducerSettings(chunk_bytes_max=2 * load.chunk_bytes, request_bytes_max=MESSAGE_BYTES_MAX)
    async with Producer(cluster, settings) as producer:
        await producer.prepare("s")
        yield producer, cluster
    cluster.close()


def _stored(pieces: Sequence[Any], chunks: int) -> bytes:
    """A broker's answer to a write."""
    response = broker_pb2.MultiWriteChunksResponse()
    for _ in range(chunks):
        response.statuses.add(group_id=1, segment_id=1, position=4096, first_record=1000, durability=1)
    return frame(Kind.REPLY, api.MULTI_WRITE_CHUNKS, header_of(pieces).request_id, response)


class Batches:
    """`send_batch`, up to the frame that is given to the transport; the answer, up to what was awaited."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. The first request also connects."""
        batch = batch_of(load.chunk_bytes)
        async with _producer(load) as (producer, cluster):
            for number in range(load.requests + 1):
                begun_ns = now_ns()
                pending = [await producer.send_batch("s", batch) for _ in range(load.chunks)]
                await until_sent(cluster.wire)
                there_ns = since(begun_ns)
                (request,) = cluster.wire.sent
                cluster.wire.sent.clear()
                answer = _stored(request, load.chunks)
                back_ns = deliver(cluster.channel_made, answer)
                begun_ns = now_ns()
                for each in pending:
                    await each
                back_ns += since(begun_ns)
                if number:
                    samples.requests["producer: send_batch to frame"][load].append(there_ns)
                    samples.requests["producer: answer to delivery"][load].append(back_ns)


class Records:
    """`send`, and what comes of a chunk's records: closed, encoded, and in a frame."""

    RECORDS_MIN = 1000

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = [load for load in loads if load.chunks == 1]

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        value, records = make_value(RECORD_BYTES), batch_of(load.chunk_bytes).num_rows
        keys = [b"key-%d" % number for number in range(RECORD_BYTES)]
        async with _producer(load) as (producer, cluster):
            send, wire = producer.send, cluster.wire
            for number in range(load.requests + 1):
                keyed = records >= self.RECORDS_MIN and number % 2 == 0
                begun_ns = now_ns()
                if keyed:
                    for record in range(records):
                        send("s", value, keys=keys[record % RECORD_BYTES])
                else:
                    for _ in range(records):
                        send("s", value)
                sent_ns = since(begun_ns)
                begun_ns = now_ns()
                await until_sent(wire)
                framed_ns = since(begun_ns)
                (request,) = wire.sent
                wire.sent.clear()
                deliver(cluster.channel_made, _stored(request, 1))
                if records >= self.RECORDS_MIN and number:
                    what = "send, a value and a key" if keyed else "send, a value"
                    samples.records[what].append(sent_ns / records)
                if number and not keyed:
                    samples.requests["producer: records to frame"][load].append(framed_ns)


# -- the broker ----------------------------------------------------------------------------------------------------


class Writes:
    """A broker without a disk: a stream without replicas, and one with one."""

    def __init__(self, root: Path, loads: Sequence[Load]) -> None:
        self.loads = loads
        shm = Path("/dev/shm")  # noqa: S108 - where arenas are
        self._arena = Arena.create(
            shm, arena_bytes=MEMORY_BYTES, slot_bytes=SEGMENT_BYTES, data_dir=root, ephemeral=True
        )
        self._index = SegmentIndex.open(root / "index", durable=False)
        self._store = SegmentStore(root, LocalDisk(root), self._index)
        meta = {"clean": False, "next_physical_id": 1, "slot_bytes": SEGMENT_BYTES}
        self._memory = PersistenceManager(self._arena, self._index, next_physical_id=1, meta=meta)
        replication = Replication(Limits(SEGMENT_BYTES), lambda _changes, done: done(None))
        self._memory.on_gone = replication.coverage.gone
        self._streams = Streams(self._memory, Restart(None, self._index, self._store), replication)
        replicator = Replicator(replication, node_id="", timeout_ms=60_000)
        self._counters = Counters()
        service = BrokerService(
            self._streams, self._memory, replication, self._counters, pump=replicator.pump, read_bytes_max=MIB
        )
        service.registered(BROKER_ID, [], 1)
        self._connection, self._wire = _connection(service.service())
        self._backup, self._backup_wire = FrameChannel("unix", "", MESSAGE_BYTES_MAX), Wire()
        self._backup.connection_made(self._backup_wire)
        replication.begin(1, [])
        replicator.begin(BROKER_ID, 1)
        replication.backups.are([common_pb2.BackupInfo(backup_id=1, node_id="other", segment_bytes=SEGMENT_BYTES)])
        replication.backup_up(1)
        replicator._links[1] = _Link(self._backup)  # type: ignore[assignment]
        self._stream_id = 0

    async def close(self) -> None:
        """Give the memory back."""
        self._backup.connection_lost(None)
        self._memory.on_work = lambda: None
        self._index.close()
        self._arena.close()

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. Both streams are in the same memory, one after the other."""
        for replicas in (0, 1):
            await self._round(load, replicas, samples)

    async def _round(self, load: Load, replicas: int, samples: Samples) -> None:
        self._stream_id += 1
        self._streams.open(stream_info(self._stream_id, replicas=replicas), BROKER_ID, 1)
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
            spent_ns = deliver(self._connection, frame(Kind.REQUEST, api.MULTI_WRITE_CHUNKS, number, message, [bulk]))
            if replicas:
                spent_ns += await self._replicate()
            if not self._wire.sent:
                raise RuntimeError("the broker has not answered")
            self._wire.sent.clear()
            if number:  # the first one opens the segment
                what = "broker: frame to answer" + (", one copy" if replicas else "")
                samples.requests[what][load].append(spent_ns)
        if self._counters.chunks_refused:
            raise RuntimeError(f"the broker has refused {self._counters.chunks_refused} chunks")
        await self._drop()

    def _steps(self, load: Load, bulk: memoryview, samples: Samples) -> None:
        """What a write is made of, most of it: each step for all chunks."""
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

    async def _replicate(self) -> int:
        """Answer as backups do until the producer is answered; what that takes here."""
        spent_ns = 0
        for _ in range(TURNS_MAX):
            if self._wire.sent:
                return spent_ns
            spent_ns += self._answer()
            begun_ns = now_ns()
            await asyncio.sleep(0)
            spent_ns += since(begun_ns)
        raise RuntimeError("the chunks were not replicated")

    def _answer(self) -> int:
        sent, self._backup_wire.sent = self._backup_wire.sent, []
        spent_ns = 0
        for pieces in sent:
            header = header_of(pieces)
            replicate = header.method == api.REPLICATE.number
            answer: Any = backup_pb2.ReplicateResponse() if replicate else backup_pb2.FreeReplicasResponse()
            method: Any = api.REPLICATE if replicate else api.FREE_REPLICAS
            spent_ns += deliver(self._backup, frame(Kind.REPLY, method, header.request_id, answer))
        return spent_ns

    async def _drop(self) -> None:
        """Free all that the round has written."""
        self._streams.drop(self._stream_id)
        while jobs := self._memory.plan():
            for job in jobs:
                self._store.perform(job)
                self._memory.finished(job)
        for _ in range(4):
            await asyncio.sleep(0)
            self._answer()
        self._wire.sent.clear()


class _Link:
    """A backup that is connected."""

    def __init__(self, channel: FrameChannel) -> None:
        self.channel = channel

    def fail(self, reason: str) -> None:
        """It never does."""
        raise RuntimeError(reason)


class Replicas:
    """A backup that keeps replicas in memory."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        disk = DiskState(0, "", Layout(SEGMENT_BYTES), 1 << 50, 0)
        disk.looked(1 << 50)
        self._store = ReplicaStore(Slots(MEMORY_BYTES // SEGMENT_BYTES, SEGMENT_BYTES), [disk])
        engine: Any = _BackupEngine(self._store)
        service = BackupService(engine, BackupCounters(), read_bytes_max=MIB)
        service.registered()
        self._connection, self._wire = _connection(service.service())
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
            spent_ns = deliver(self._connection, frame(Kind.REQUEST, api.REPLICATE, number, message, [bulk]))
            (answer,) = self._wire.sent
            self._wire.sent.clear()
            if header_of(answer).kind != Kind.REPLY:
                raise RuntimeError("the backup has refused a request")
            if number and (not opens or 2 * len(bulk) > SEGMENT_BYTES):
                samples.requests["backup: frame to answer"][load].append(spent_ns)
        self._store.free(BROKER_ID, range(first, self._virtual_segment_id + 1), lambda _error: None)
        for job in self._store.plan():
            self._store.finished(job)


class _BackupEngine:
    """Only the store."""

    def __init__(self, store: ReplicaStore) -> None:
        self.store = store


# -- consumers -----------------------------------------------------------------------------------------------------


class Pulls:
    """The bytes of an answer, up to the batches in the loop of an application."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`."""
        cluster: Any = Cluster()
        bulk = placed_chunks(load)
        async with Consumer(cluster, ("s",), ConsumerSettings(), start="earliest") as consumer:
            batches: Any = consumer.batches()
            for number in range(load.requests + 1):
                await until_sent(cluster.wire)
                (request,) = cluster.wire.sent
                cluster.wire.sent.clear()
                response = broker_pb2.MultiReadChunksResponse()
                result = response.results.add(length_bytes=len(bulk))
                result.next.CopyFrom(
                    common_pb2.Cursor(stream_id=STREAM_ID, group_id=1, segment_id=1, position=(number + 1) * len(bulk))
                )
                answer = frame(Kind.REPLY, api.MULTI_READ_CHUNKS, header_of(request).request_id, response, [bulk])
                spent_ns = deliver(cluster.channel_made, answer)
                begun_ns = now_ns()
                for _ in range(load.chunks):
                    await anext(batches)
                spent_ns += since(begun_ns)
                if number:
                    samples.requests["pull: answer to batches"][load].append(spent_ns)
            await batches.aclose()
        cluster.close()


class Pushes:
    """A message about a run of chunks, up to the batches in the loop of an application; and to records."""

    RECORDS_LOAD = Load(1, 256 * KIB)
    _SLOTS_AT = 8 * KIB

    def __init__(self, loads: Sequence[Load], *, verify: bool) -> None:
        self.loads = loads
        self._verify = verify
        self._memory = memoryview(bytearray(self._SLOTS_AT + SEGMENT_BYTES))

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. A run is where another has been, so the bytes are warm when they fit into a cache."""
        length = len(placed_chunks(load))
        self._memory[self._SLOTS_AT : self._SLOTS_AT + length] = placed_chunks(load)
        what = "push: run to batches" + ("" if self._verify else ", no checksums")
        async with self._consumer() as (consumer, connection):
            batches: Any = consumer.batches()
            for number in range(load.requests + 1):
                message = self._run(number, length)
                begun_ns = now_ns()
                connection.data_received(message)
                for _ in range(load.chunks):
                    await anext(batches)
                if number:
                    samples.requests[what][load].append(since(begun_ns))
            await batches.aclose()
        if self._verify and load == self.RECORDS_LOAD:
            await self._records(length, samples)

    async def _records(self, length: int, samples: Samples) -> None:
        count = batch_of(self.RECORDS_LOAD.chunk_bytes).num_rows
        async with self._consumer() as (consumer, connection):
            records: Any = consumer.records()
            for number in range(self.RECORDS_LOAD.requests):
                message = self._run(number, length)
                begun_ns = now_ns()
                connection.data_received(message)
                left = count
                async for _ in records:
                    left -= 1
                    if not left:
                        break
                samples.records["records()"].append(since(begun_ns) / count)
            await records.aclose()

    @contextlib.asynccontextmanager
    async def _consumer(self) -> AsyncIterator[tuple[Consumer, PushConnection]]:
        hello = push_pb2.PushHello(
            version=1,
            broker_id=BROKER_ID,
            broker_epoch=1,
            slots=64,
            slot_bytes=SEGMENT_BYTES,
            slots_at=self._SLOTS_AT,
            rows_at=64,
            row_bytes=64,
        )
        connection = PushConnection(hello, self._memory.toreadonly(), Decoder(), "")
        wire = Wire()
        connection.connection_made(wire)
        cluster: Any = Cluster(connection)
        settings = ConsumerSettings(verify_checksums=self._verify)
        async with Consumer(cluster, ("s",), settings, start="earliest") as consumer:
            await until_sent(wire)  # it has subscribed
            yield consumer, connection
        cluster.close()
        wire.abort()

    def _run(self, number: int, length: int) -> bytes:
        return encode_runs([Run(1, 0, 0, self._SLOTS_AT, length, 1, 1, number * length, 0)])
