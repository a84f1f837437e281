"""A broker that pushes, seen from its readers: a real unix socket, and a small file as its memory.

It uses no code of the real broker. It pushes chunks of a `FakeStream`: by hand with `push` and `end`, or on its
own when `serving`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kera.client.cluster.timing import Timing
from kera.client.testing import FakeStream, StoredChunk
from kera.core.base.ids import Position
from kera.core.base.process import node_id
from kera.core.errors import KeraError
from kera.core.push import ALIVE, VERSION, Decoder, PushKind, Run, encode, encode_runs, numbers_of, taken_of
from kera.core.rpc.wire import error_to_message
from kera.v1 import common_pb2, push_pb2
from tests.unit.client.fake_support import Fleet

Reason = push_pb2.PushEnd
ROWS_AT, ROW_BYTES, SLOTS_AT = 64, 64, 16384
SLOTS, SLOT_BYTES = 128, 1 << 14
SOON = Timing(return_delay_s=0.001, push_again_s=0.01)
"""Short delays, so that tests do not wait for actions that happen after a while."""


class PushFleet(Fleet):
    """A fleet whose broker 1 is on this node, and pushes."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        super().__init__(fleet.fake, fleet.s, fleet.cluster)
        self.info = fleet.fake.brokers[1].info
        self.info.node_id, self.info.push_unix_path = node_id(), str(directory / "push.sock")
        self.pushing = PushBroker(fleet.s, directory)

    @property
    def pulled(self) -> int:
        """The number of reads that broker 1 got."""
        return self.fake.brokers[1].calls.count("MultiReadChunks")


class PushBroker:
    """See the head of this module."""

    def __init__(self, stream: FakeStream, directory: Path) -> None:
        self.stream = stream
        self.arena_path = directory / "arena"
        self.hello = push_pb2.PushHello(
            version=VERSION,
            broker_id=1,
            broker_epoch=11,
            arena_path=str(self.arena_path),
            arena_bytes=SLOTS_AT + SLOTS * SLOT_BYTES,
            slots=SLOTS,
            slot_bytes=SLOT_BYTES,
            slots_at=SLOTS_AT,
            rows_at=ROWS_AT,
            row_bytes=ROW_BYTES,
        )
        self.memory = bytearray(self.hello.arena_bytes)
        self.arena_path.touch(0o600)
        self.arena_path.write_bytes(self.memory)
        self.fd = os.open(self.arena_path, os.O_RDWR)
        self.send_fd = True
        self.refusing = False
        """Whether new connections are closed at once."""
        self.standing_still = False
        """Whether new connections get no greeting."""
        self.serving = False
        """Whether the broker pushes chunks on its own, one per run, as far as the window goes."""
        self.generations = [1] * SLOTS
        for slot in range(SLOTS):
            self._write_generation(slot)
        self.readers: list[_Reader] = []
        """All connections so far."""
        self._server: asyncio.Server | None = None

    async def start(self, path: str) -> None:
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Reader(self), path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for reader in self.readers:
            reader.lose()
        os.close(self.fd)

    @property
    def reader(self) -> _Reader:
        """The connection that was made last."""
        return self.readers[-1]

    def put(self, chunks: Sequence[StoredChunk], slot: int) -> int:
        """Write chunks into a slot; returns their place in the arena."""
        at = SLOTS_AT + slot * SLOT_BYTES + chunks[0].start.offset % (SLOT_BYTES // 2)
        os.pwrite(self.fd, b"".join(chunk.data for chunk in chunks), at)
        return at

    def reuse(self, slot: int) -> None:
        """Give the slot to another segment."""
        self.generations[slot] += 1
        self._write_generation(slot)
        os.pwrite(self.fd, os.urandom(SLOT_BYTES), SLOTS_AT + slot * SLOT_BYTES)

    def _write_generation(self, slot: int) -> None:
        os.pwrite(self.fd, self.generations[slot].to_bytes(8, "little"), ROWS_AT + slot * ROW_BYTES)


class _Reader(asyncio.Protocol):
    """One connection, and the messages that came over it."""

    def __init__(self, broker: PushBroker) -> None:
        self.broker = broker
        self.lanes: dict[int, push_pb2.PushLane] = {}
        """The lanes that have not ended."""
        self.subscribed: list[push_pb2.PushLane] = []
        self.consumer_groups: list[str] = []
        self.window_bytes = 0
        self.outstanding_bytes = 0
        self.taken_bytes = 0
        self.leases: Counter[int] = Counter()
        self.cancelled: list[int] = []
        self.closed = False
        self._decoder = Decoder()
        self._next: dict[int, int] = {}
        """The next chunk of the log to push, by lane."""
        self.transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.broker.readers.append(self)
        if self.broker.refusing:
            transport.abort()
            return
        if self.broker.standing_still:
            return
        fds = [self.broker.fd] if self.broker.send_fd else []
        with (
            contextlib.suppress(BrokenPipeError),  # the reader is gone already
            socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock,
        ):
            socket.send_fds(sock, [encode(PushKind.HELLO, self.broker.hello.SerializeToString())], fds)

    def connection_lost(self, _: object) -> None:
        self.closed = True
        self.leases.clear()

    def say_alive(self) -> None:
        """Say that the broker is alive."""
        self.transport.write(ALIVE)

    def lose(self) -> None:
        """Break the connection."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        for kind, body in self._decoder.feed(data):
            if kind is PushKind.SUBSCRIBE:
                message = push_pb2.PushSubscribe.FromString(body)
                self.window_bytes = message.window_bytes
                self.consumer_groups.append(message.consumer_group)
                self.subscribed += message.lanes
                for lane in message.lanes:
                    assert lane.lane not in self.lanes
                    self.lanes[lane.lane] = lane
            elif kind is PushKind.CANCEL:
                for number in numbers_of(body):
                    self.cancelled.append(number)
                    if number in self.lanes:
                        self.end(number, Reason.CANCELLED)
            elif kind is PushKind.TAKEN:
                self.taken_bytes += taken_of(body)
                self.outstanding_bytes -= taken_of(body)
                assert self.outstanding_bytes >= 0, "no more was taken than was pushed"
            else:
                assert kind is PushKind.RELEASE
                self.leases.subtract(numbers_of(body))
                assert min(self.leases.values()) >= 0, "no more was given back than was leased"
        if self.broker.serving:
            self.serve()

    @property
    def lane(self) -> int:
        """The lane that was opened last."""
        return self.subscribed[-1].lane

    @property
    def held(self) -> int:
        """The number of leases that readers hold."""
        return self.leases.total()

    def push(self, lane: int, chunks: Sequence[StoredChunk], slot: int, /, **changes: int) -> None:
        """Push one run; `changes` make it wrong."""
        at, length = self.broker.put(chunks, slot), sum(len(chunk.data) for chunk in chunks)
        group_id, segment_id, offset = chunks[0].start
        run = Run(lane, slot, self.broker.generations[slot], at, length, segment_id, group_id, offset, 0)
        self.leases[slot] += 1
        self.outstanding_bytes += length
        self.transport.write(encode_runs([run._replace(**changes)]))

    def end(self, lane: int, reason: Any, at: Position | None = None, error: KeraError | None = None) -> None:
        """End a lane."""
        wanted = self.lanes.pop(lane)
        message = push_pb2.PushEnd(lane=lane, reason=reason, next=wanted.start)
        index = self._next.get(lane)
        log = self.broker.stream.streamlets[wanted.start.streamlet_id].log
        if at is None and index:
            at = log[index - 1].end
        if at is not None:
            message.next.group_id, message.next.segment_id, message.next.position = at
        if error is not None:
            message.error.CopyFrom(error_to_message(error))
        self.transport.write(encode(PushKind.END, message.SerializeToString()))

    def serve(self) -> None:
        """Push all stored chunks, the lanes in turn. Each chunk has its own slot, as if it was a segment."""
        progress = True
        while progress:
            progress = False
            for number, lane in list(self.lanes.items()):
                log = self.broker.stream.streamlets[lane.start.streamlet_id].log
                start = position_of(lane.start)
                index = self._next.setdefault(number, sum(chunk.start < start for chunk in log))
                if lane.HasField("end") and index and log[index - 1].end >= position_of(lane.end):
                    self.end(number, Reason.REACHED)
                    continue
                if index == len(log):
                    continue
                size = len(log[index].data)
                if self.outstanding_bytes and self.outstanding_bytes + size > self.window_bytes:
                    return
                self.push(number, [log[index]], index % SLOTS)
                self._next[number] += 1
                progress = True


def position_of(cursor: common_pb2.Cursor) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position)
