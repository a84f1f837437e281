"""The surroundings of the measured parts of KerA: connections that lead nowhere, a cluster of one, and chunks.

`Wire` stands for a connection (it keeps the bytes to send, and `deliver` fills a protocol's buffer like the kernel),
`Cluster` for the coordinator.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from bench.common import sample_chunk
from bench.stages.part import RECORD_BYTES, Load, now_ns, since
from kera.cli.bench._payload import make_batch, records_per_chunk
from kera.client.cluster.at_work import AtWork
from kera.client.cluster.push import PushChannel
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.client.types import StreamDescription
from kera.core.base.settings import MIB
from kera.core.format.chunk import Placement, encode_payload, place_chunk
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import Service
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frame_server import FrameServer, ServerConnection
from kera.core.rpc.frames import FrameHeader, FrameKind, decode_header, encode_frame
from kera.core.rpc.method import Method
from kera.core.rpc.taking import Taker
from kera.core.runtime import MACHINE
from kera.v1 import common_pb2, coordinator_pb2

SEGMENT_BYTES = 8 * MIB
MESSAGE_BYTES_MAX = 32 * MIB
TURNS_MAX = 1000
STREAM_ID = 1
BROKER_ID = 1


class Wire(asyncio.Transport):
    """A connection that leads nowhere: it keeps the bytes to send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[list[Any]] = []
        self.reading = True
        """Whether the protocol wants to read."""
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
        self.reading = False

    def resume_reading(self) -> None:
        """See `asyncio.Transport`."""
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See `asyncio.Transport`."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.Transport`."""
        return self._socket if name == "socket" else default

    def abort(self) -> None:
        """See `asyncio.Transport`."""
        self._socket.close()

    close = abort


async def deliver(protocol: asyncio.BufferedProtocol, wire: Wire, data: bytes) -> int:
    """Let a protocol receive bytes; returns the time without the kernel's copy.

    A daemon that has used its share of a turn reads on in the next one, and its work in between counts.
    """
    view, at, spent_ns = memoryview(data), 0, 0
    while at < len(view):
        for _ in range(TURNS_MAX):
            if wire.reading:
                break
            begun_ns = now_ns()
            await asyncio.sleep(0)
            spent_ns += since(begun_ns)
        else:
            raise RuntimeError("the protocol does not read on")
        buffer = memoryview(protocol.get_buffer(-1))
        piece = view[at : at + len(buffer)]
        buffer[: len(piece)] = piece
        begun_ns = now_ns()
        protocol.buffer_updated(len(piece))
        spent_ns += since(begun_ns)
        at += len(piece)
    return spent_ns


async def until_sent(wire: Wire) -> None:
    """Let the loop turn until the wire has bytes to send."""
    for _ in range(TURNS_MAX):
        if wire.sent:
            return
        await asyncio.sleep(0)
    raise RuntimeError("nothing was sent")


async def next_turn() -> None:
    """Let the loop turn: a connection whose requests had a slice takes the next one after the others."""
    for _ in range(4):
        await asyncio.sleep(0)


def header_of(pieces: Sequence[Any]) -> FrameHeader:
    """The header of a frame that was sent."""
    return decode_header(memoryview(pieces[0]), 0, MESSAGE_BYTES_MAX)


def frame(kind: FrameKind, method: Method[Any, Any], number: int, message: Any, bulk: Sequence[Any] = ()) -> bytes:
    """A frame as one piece."""
    return b"".join(memoryview(piece) for piece in encode_frame(kind, method, number, message, bulk, MESSAGE_BYTES_MAX))


def stream_info(stream_id: int = STREAM_ID, *, replicas: int = 0, streamlets: int = 1) -> common_pb2.StreamInfo:
    """A stream that has all its streamlets here."""
    durability = common_pb2.DURABILITY_REPLICATED if replicas else common_pb2.DURABILITY_LEADER
    config = common_pb2.StreamConfig(
        streamlets=streamlets, entries=1, group_segments=8, durability=durability, replication=replicas, virtual_logs=1
    )
    assignments = [
        common_pb2.StreamletAssignment(streamlet_id=streamlet, broker_id=BROKER_ID, broker_epoch=1, first_group_id=1)
        for streamlet in range(streamlets)
    ]
    schema = common_pb2.StreamSchema(schema_id=1, arrow_schema=schema_to_bytes(DEFAULT_SCHEMA))
    return common_pb2.StreamInfo(
        stream_id=stream_id, name="s", config=config, schemas=[schema], assignments=assignments
    )


class Cluster:
    """The cluster for producers and consumers, and for code that asks whether its brokers can be reached."""

    def __init__(self, push: PushChannel | None = None, *, streamlets: int = 1) -> None:
        """`push`: the channel over which a broker pushes; None: it does not push. `streamlets`: of its stream."""
        self.settings = ClientSettings()
        self.request_timeout_s = 60.0
        self.is_inherited = False
        self.timing = Timing()
        self.runtime = MACHINE
        self.at_work = AtWork(MACHINE.clock)
        self.session_ids = itertools.count(1)
        self.wire = Wire()
        self.channel_made = FrameChannel("unix", "", MESSAGE_BYTES_MAX)
        self.channel_made.connection_made(self.wire)
        self.locality = self
        self._push = push
        broker = common_pb2.BrokerInfo(broker_id=BROKER_ID, segment_bytes=SEGMENT_BYTES, alive=True)
        self._stream = StreamDescription.from_message(stream_info(streamlets=streamlets), [broker])

    async def stream(self, _name: str) -> StreamDescription:
        """See `kera.client.cluster.cluster`; the same applies to the following methods."""
        return self._stream

    async def stream_or_last_seen(self, _name: str) -> StreamDescription:
        """The same."""
        return self._stream

    async def ask(self, _method: Any, _message: Any) -> coordinator_pb2.InitProducerResponse:
        """A producer's identity."""
        return coordinator_pb2.InitProducerResponse(producer_id=1, producer_epoch=1)

    async def channel(self, _stream: Any, _broker_id: int) -> FrameChannel:
        """The connection to the broker."""
        return self.channel_made

    def reachable(self, _broker: Any, _domain: str, _wish: Any) -> bool:
        """Whether the broker pushes."""
        return self._push is not None

    async def connection(self, _broker: Any, _domain: str, _wish: Any) -> PushChannel | None:
        """The push channel."""
        return self._push

    def close(self) -> None:
        """Close the connection."""
        self.channel_made.connection_lost(None)
        self.wire.abort()


@functools.cache
def batch_of(chunk_bytes: int) -> pa.RecordBatch:
    """A batch of records of 100 bytes, as many as a chunk takes."""
    return make_batch(RECORD_BYTES, records_per_chunk(RECORD_BYTES, chunk_bytes))


@functools.cache
def _payload_of(chunk_bytes: int) -> pa.Buffer:
    return encode_payload(batch_of(chunk_bytes))


def chunk_of(chunk_bytes: int, sequence: int, stream_id: int = STREAM_ID) -> bytearray:
    """A chunk as the producer sends it."""
    records = batch_of(chunk_bytes).num_rows
    made = sample_chunk(_payload_of(chunk_bytes), records, stream_id=stream_id, sequence=sequence)
    return bytearray(made.to_bytes())


@functools.cache
def placed_chunks(load: Load) -> bytes:
    """Chunks as they follow each other in a broker's memory."""
    chunks, records = [], batch_of(load.chunk_bytes).num_rows
    for number in range(load.chunks):
        chunks.append(chunk_of(load.chunk_bytes, number))
        place_chunk(chunks[-1], 0, Placement(1, 1, 0, number * records, 1, 0))
    return b"".join(chunks)


def daemon_connection(
    service: Service, takers: Mapping[Method[Any, Any], Taker] | None = None
) -> tuple[ServerConnection, Wire]:
    """A client's connection to a daemon, at the daemon's side."""
    server, wire = FrameServer(service, bulk_bytes_max=MESSAGE_BYTES_MAX, takers=takers), Wire()
    connection = server.accept("unix")
    connection.connection_made(wire)
    return connection, wire
