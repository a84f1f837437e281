"""What the broker's tests are made with: chunks, streamlets with a producer's counters, calls without sockets."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from kera.broker.arena import Arena
from kera.broker.metrics import Counters
from kera.broker.service import BrokerService
from kera.broker.stream import Streams
from kera.broker.streamlet import Appended, ReadPlan, Streamlet
from kera.core.chunk import HEADER_BYTES, ChunkHeader, encode_chunk, iterate_chunks, verify_header
from kera.core.ids import EARLIEST, Position
from kera.core.rpc.method import Call, Method, Peer, Reply
from kera.v1 import broker_pb2, common_pb2

CHUNK_BYTES = 256
SLOT_BYTES = 4 * CHUNK_BYTES
STREAM_ID = 7
BROKER_ID = 3
EVERYTHING = 1 << 20


def chunk(producer: int = 1, sequence: int = 0, *, size: int = CHUNK_BYTES, fill: bytes = b"x", **fields: Any) -> bytes:
    """A chunk of `size` bytes, whose payload is no Arrow but `fill`: the broker never looks into it."""
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
    return encode_chunk(pa.py_buffer(fill * (size - HEADER_BYTES)), **(header | fields)).to_bytes()


class Log:
    """A streamlet, and the next sequence of each of its producers."""

    def __init__(
        self, arena: Arena, *, entries: int = 1, group_segments: int = 2, first_group_id: int = 1, broker_epoch: int = 9
    ) -> None:
        self.streamlet = Streamlet(
            0,
            entries=entries,
            group_segments=group_segments,
            broker_epoch=broker_epoch,
            first_group_id=first_group_id,
            arena=arena,
        )
        self.sequences: Counter[int] = Counter()

    def append(
        self, producer: int = 1, sequence: int | None = None, *, publish: bool = True, **fields: Any
    ) -> Appended:
        """Append a chunk, the producer's next one unless `sequence` says otherwise, and let readers see it."""
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
        """Sequences of the chunks that a read gives, and where the next one goes on."""
        plan = self.streamlet.read(entry, start, end, bytes_max, strict=strict)
        return [header.sequence for header in headers(plan)], plan.next


def position(appended: Appended) -> Position:
    """Where the chunk starts."""
    return Position(appended.group_id, appended.segment_id, appended.position)


def headers(plan: ReadPlan) -> list[ChunkHeader]:
    """Of all chunks of a plan, in order."""
    return [header for segment, start, end in plan.ranges for header, _ in iterate_chunks(segment.slot.view[start:end])]


def stream_info(stream_id: int = STREAM_ID, *, owners: Sequence[int] = (BROKER_ID,), **config: Any) -> Any:
    """A stream with one streamlet for each of `owners`, of which only `BROKER_ID` is the broker under test."""
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


class Broker:
    """A broker's service over an arena, called as a transport calls it."""

    def __init__(self, arena: Arena, *streams: common_pb2.StreamInfo, read_bytes_max: int = EVERYTHING) -> None:
        self.arena = arena
        self.counters = Counters()
        self.streams = Streams(arena)
        self.broker = BrokerService(self.streams, arena, self.counters, read_bytes_max=read_bytes_max)
        self.service = self.broker.service()
        self.peer = Peer("unix", "")
        if streams:
            self.broker.registered(BROKER_ID, streams)

    def start(
        self, method: Method[Any, Any], message: Any, bulk: bytes | bytearray = b"", peer: Peer | None = None
    ) -> Any:
        """What the handler returns: a reply, or an awaitable for one."""
        return self.service[method](Call(message, memoryview(bulk), peer or self.peer))

    async def ask(self, method: Method[Any, Any], message: Any) -> Any:
        """The answer's message."""
        result = self.start(method, message)
        return (result if isinstance(result, Reply) else await result).message

    def append(self, *chunks: bytes, count: int | None = None, durability: int = 0) -> list[broker_pb2.ChunkStatus]:
        """Statuses of a write."""
        request = broker_pb2.MultiWriteChunksRequest(
            chunk_count=len(chunks) if count is None else count,
            durability=durability,  # type: ignore[arg-type]
        )
        reply = self.broker.multi_write_chunks(Call(request, memoryview(b"".join(chunks)), self.peer))
        return list(reply.message.statuses)

    def read(self, *ranges: broker_pb2.ReadRange, peer: Peer | None = None, **fields: Any) -> Any:
        """What the handler of a read returns."""
        request = broker_pb2.MultiReadChunksRequest(ranges=ranges, **fields)
        return self.broker.multi_read_chunks(Call(request, memoryview(b""), peer or self.peer))


def cursor(start: Position = EARLIEST, *, stream_id: int = STREAM_ID, streamlet: int = 0, entry: int = 0) -> Any:
    """`start` as it travels."""
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
    """Where a result says to go on."""
    return Position(result.next.group_id, result.next.segment_id, result.next.position)


def sequences_of(reply: Reply[Any]) -> list[int]:
    """Of all chunks that a reply to a read carries."""
    return [header.sequence for piece in reply.bulk for header, _ in iterate_chunks(piece)]
