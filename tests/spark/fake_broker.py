"""A broker that a test controls message by message: its push socket, its memory and its frames.

And a fake of the planner's service with prepared answers.
"""

import json
import mmap
import select
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
from crc32c import crc32c

from kera.client.types import fill_cursor, position_of
from kera.core.base.ids import EntryId, Position
from kera.core.format.chunk import ARROW_VERSION, Placement, encode_chunk, place_chunk
from kera.core.push import VERSION, Decoder, PushKind, Run, encode, encode_runs, numbers_of, taken_of
from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES as FRAME_HEADER_BYTES
from kera.core.rpc.frames import FrameKind, decode_header, encode_error, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.v1 import broker_pb2, common_pb2, push_pb2

TIMEOUT_S = 20.0
ENTRY = EntryId(7, 0, 0)
BROKER_ID = 5
FIRST = Position(1, 1, 0)
ROWS_AT = 4096
SLOTS_AT = 8192
SLOTS = 4
SLOT_BYTES = 64 << 10


def chunk(
    first_record: int,
    *,
    group: int = 1,
    segment: int = 1,
    schema_id: int = 1,
    payload_bytes: int = 1000,
    version: int = ARROW_VERSION,
    payload: pa.Buffer | None = None,
) -> bytes:
    """A chunk of ten records, as a broker stores it; without a `payload` it contains no Arrow data."""
    if payload is None:
        payload = pa.py_buffer(bytes((first_record + at) % 251 for at in range(payload_bytes)))
    made = encode_chunk(
        payload,
        record_count=10,
        stream_id=ENTRY.stream_id,
        streamlet_id=ENTRY.streamlet_id,
        schema_id=schema_id,
        producer_id=1,
        producer_epoch=1,
        sequence=first_record // 10,
        created_us=0,
        min_timestamp_us=0,
        max_timestamp_us=0,
        version=version,
    )
    placed = bytearray(made.to_bytes())
    place_chunk(placed, 0, Placement(group, segment, ENTRY.entry, first_record, 1))
    return bytes(placed)


CHUNK_BYTES = len(chunk(0))


class FakeBroker:
    """Listens on a push socket and for frames; the memory is a file."""

    def __init__(self, folder: Path) -> None:
        self.arena_path = folder / "arena"
        self.arena_bytes = SLOTS_AT + SLOTS * SLOT_BYTES
        self.arena_path.write_bytes(bytes(self.arena_bytes))
        with self.arena_path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), self.arena_bytes)
        self.hello: dict[str, Any] = {
            "version": VERSION,
            "broker_id": BROKER_ID,
            "broker_epoch": 1,
            "arena_path": str(self.arena_path),
            "arena_bytes": self.arena_bytes,
            "slots": SLOTS,
            "slot_bytes": SLOT_BYTES,
            "slots_at": SLOTS_AT,
            "rows_at": ROWS_AT,
            "row_bytes": 64,
        }
        self.push_path = folder / "push.sock"
        self._push = _listening(socket.AF_UNIX, str(self.push_path))
        self._frames = _listening(socket.AF_INET, ("127.0.0.1", 0))
        host, port = self._frames.getsockname()
        self.frames_address = f"{host}:{port}"
        self._connections: list[socket.socket] = []

    def close(self) -> None:
        """Close all sockets and the memory."""
        for each in (self._push, self._frames, *self._connections):
            each.close()
        self.memory.close()

    def put(self, slot: int, data: bytes, *, generation: int = 1) -> None:
        """Put these bytes into a slot."""
        at = SLOTS_AT + slot * SLOT_BYTES
        self.memory[at : at + len(data)] = data
        self.memory[ROWS_AT + slot * 64 : ROWS_AT + slot * 64 + 8] = generation.to_bytes(8, "little")

    def greet(self, **hello: Any) -> "Pushing":
        """Accept the next reader and send it a hello."""
        message = push_pb2.PushHello(**{**self.hello, **hello})
        return self.greet_with(encode(PushKind.HELLO, message.SerializeToString()))

    def greet_with(self, data: bytes) -> "Pushing":
        """Accept the next reader and send it these bytes first."""
        connection = self._accept(self._push)
        connection.sendall(data)
        return Pushing(connection)

    def frames(self) -> "Answering":
        """Accept the next connection for frames."""
        return Answering(self._accept(self._frames))

    def _accept(self, listening: socket.socket) -> socket.socket:
        connection, _ = listening.accept()
        connection.settimeout(TIMEOUT_S)
        self._connections.append(connection)
        return connection


def _listening(family: socket.AddressFamily, address: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen()
    listening.settimeout(TIMEOUT_S)
    return listening


def run(slot: int, length: int, *, lane: int = 1, generation: int = 1, start: Position = FIRST, **other: int) -> Run:
    """A run from the beginning of a slot; `other` replaces fields of it."""
    at = SLOTS_AT + slot * SLOT_BYTES
    made = Run(lane, slot, generation, at, length, start.segment_id, start.group_id, start.offset, 0)
    return made._replace(**other)


class Pushing:
    """The broker's side of a push connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._messages = self._read()

    def _read(self) -> Iterator[tuple[PushKind, bytes]]:
        decoder = Decoder()
        while data := self._connection.recv(1 << 16):
            yield from decoder.feed(data)

    def subscribed(self) -> push_pb2.PushLane:
        """The lane that the reader subscribes to."""
        kind, body = next(self._messages)
        assert kind is PushKind.SUBSCRIBE
        (lane,) = push_pb2.PushSubscribe.FromString(body).lanes
        return lane

    def returned(self, taken: int, released: Sequence[int]) -> None:
        """Wait until the reader has taken and released this much, in any messages."""
        slots: list[int] = []
        while taken > 0 or len(slots) < len(released):
            kind, body = next(self._messages)
            if kind is PushKind.TAKEN:
                taken -= taken_of(body)
            else:
                assert kind is PushKind.RELEASE
                slots += numbers_of(body)
        assert (taken, slots) == (0, list(released))

    def is_gone(self) -> bool:
        """Wait for a message or the end of the connection; whether it ended."""
        return next(self._messages, None) is None

    def send(self, data: bytes) -> None:
        """Push bytes."""
        self._connection.sendall(data)

    def push(self, *runs: Run) -> None:
        """Push runs."""
        self.send(encode_runs(runs))

    def end(
        self,
        reason: push_pb2.PushEnd.Reason.ValueType,
        following: Position,
        *,
        lane: int = 1,
        error: common_pb2.Error | None = None,
    ) -> None:
        """End a lane."""
        message = push_pb2.PushEnd(lane=lane, reason=reason, error=error)
        fill_cursor(message.next, ENTRY, following)
        self.send(encode(PushKind.END, message.SerializeToString()))

    def hang_up(self) -> None:
        """Close the connection."""
        self._connection.close()


class Answering:
    """The broker's side of a framed connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.request_id = 0

    def asked(self) -> broker_pb2.MultiReadChunksRequest:
        """The next request."""
        header = decode_header(memoryview(self._exactly(FRAME_HEADER_BYTES)), 0, BULK_BYTES_MAX)
        assert (header.kind, header.method) == (FrameKind.REQUEST, api.MULTI_READ_CHUNKS.number)
        self.request_id = header.request_id
        return broker_pb2.MultiReadChunksRequest.FromString(self._exactly(header.head_bytes))

    def asked_from(self) -> Position:
        """The start of the range of the next request."""
        (wanted,) = self.asked().ranges
        return position_of(wanted.start)

    def asked_to_write(self) -> bytes:
        """The chunk of the next request."""
        header = decode_header(memoryview(self._exactly(FRAME_HEADER_BYTES)), 0, BULK_BYTES_MAX)
        assert (header.kind, header.method) == (FrameKind.REQUEST, api.MULTI_WRITE_CHUNKS.number)
        self.request_id = header.request_id
        request = broker_pb2.MultiWriteChunksRequest.FromString(self._exactly(header.head_bytes))
        assert request == broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        return self._exactly(header.bulk_bytes)

    def status(self, *, request_id: int | None = None, copies: int = 1, bulk: bytes = b"", **status: Any) -> None:
        """Answer with the status of a chunk."""
        message = broker_pb2.MultiWriteChunksResponse(statuses=[broker_pb2.ChunkStatus(**status)] * copies)
        number = self.request_id if request_id is None else request_id
        pieces = encode_frame(
            FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, number, message, [bulk] if bulk else [], BULK_BYTES_MAX
        )
        self.send(b"".join(bytes(piece) for piece in pieces))

    def receive(self, size: int) -> bytes:
        """The next `size` bytes, whatever they are."""
        return self._exactly(size)

    def is_silent(self, time_s: float = 0.1) -> bool:
        """Whether no bytes come for a moment."""
        readable, _, _ = select.select([self._connection], [], [], time_s)
        return not readable

    def reset(self) -> None:
        """Reset the connection, and drop bytes in flight."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()

    def answer(
        self,
        following: Position,
        data: bytes = b"",
        *,
        length: int | None = None,
        error: common_pb2.Error | None = None,
        request_id: int | None = None,
    ) -> None:
        """Answer the last request."""
        self.send(self.frame(following, data, length=length, error=error, request_id=request_id))

    def frame(
        self,
        following: Position,
        data: bytes = b"",
        *,
        length: int | None = None,
        error: common_pb2.Error | None = None,
        request_id: int | None = None,
    ) -> bytes:
        """The bytes of an answer."""
        message = broker_pb2.MultiReadChunksResponse()
        row = message.results.add(length_bytes=len(data) if length is None else length, error=error)
        fill_cursor(row.next, ENTRY, following)
        number = self.request_id if request_id is None else request_id
        pieces = encode_frame(
            FrameKind.REPLY, api.MULTI_READ_CHUNKS, number, message, [data] if data else [], BULK_BYTES_MAX
        )
        return b"".join(bytes(piece) for piece in pieces)

    def refuse(self, error: common_pb2.Error, *, request_id: int | None = None) -> None:
        """Answer with an error frame."""
        number = self.request_id if request_id is None else request_id
        self.send(encode_error(api.MULTI_READ_CHUNKS.number, number, error))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self._connection.sendall(data)

    def hang_up(self) -> None:
        """Shut the connection down, even for a thread that waits for the next request."""
        self._connection.shutdown(socket.SHUT_RDWR)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        missing = memoryview(data)
        while missing:
            count = self._connection.recv_into(missing)
            assert count, "the reader is gone"
            missing = missing[count:]
        return bytes(data)


def with_checksum(header: bytes) -> bytes:
    """A frame header with changed fields, and a matching checksum."""
    return header[:28] + crc32c(header[:28]).to_bytes(4, "little")


class FakeService:
    """A program in place of the planner's service; it gives its prepared answers in order."""

    def __init__(self, folder: Path, *answers: dict[str, Any]) -> None:
        self.program = folder / "python"
        self._asked = folder / "asked"
        self._asked.touch()
        (folder / "answers").write_text(json.dumps(answers))
        self.program.write_text(
            _SERVICE.format(python=sys.executable, folder=str(folder), version=version("kera"), methods=_ANSWERED)
        )
        self.program.chmod(0o755)

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The requests so far, without greetings."""
        return [json.loads(line) for line in self._asked.read_text().splitlines()]


_ANSWERED = ("route", "route_write", "stored_rows")
_SERVICE = """#!/bin/sh
''"exec" "{python}" "-I" "-S" "$0"
import json, sys
answers = json.load(open({folder!r} + "/answers"))
for line in sys.stdin:
    request = json.loads(line)
    if request["method"] == "hello":
        answer = {{"result": {{"version": {version!r}, "pid": 1}}}}
    else:
        with open({folder!r} + "/asked", "a") as asked:
            asked.write(line)
        answer = answers.pop(0) if request["method"] in {methods!r} else {{"result": {{}}}}
    print(json.dumps({{"id": request["id"], **answer}}), flush=True)
"""
