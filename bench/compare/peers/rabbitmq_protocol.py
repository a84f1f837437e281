"""The parts of RabbitMQ's stream protocol that a benchmark needs.

A frame is a length (4), a key (2), a version (2), and what the key says; numbers are big endian::

    Publish  publisher (1), count (4), count × [publishing id (8), length (4), message]
             or, for several messages under one id (a sub-batch entry, the top bit of its first byte set),
             publishing id (8), 0x80 (1), messages (2), bytes (4), bytes (4), messages × [length (4), message]
    Deliver  subscription (1), a chunk: 48 bytes of header, bloom filter, then entries of the two kinds

Without a publisher's name, publishing ids are not compared, only confirmed: ours are the number of messages under them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from bench.compare.peers.servers import HOST, START_S

DECLARE_PUBLISHER, PUBLISH, PUBLISH_CONFIRM, PUBLISH_ERROR = 1, 2, 3, 4
SUBSCRIBE, DELIVER, CREDIT = 7, 8, 9
CREATE, DELETE, PEER_PROPERTIES, SASL_HANDSHAKE, SASL_AUTHENTICATE = 0x0D, 0x0E, 0x11, 0x12, 0x13
TUNE, OPEN, CLOSE, HEARTBEAT = 0x14, 0x15, 0x16, 0x17
RESPONSE = 0x8000
OK = 1
CHUNK_HEADER_BYTES = 48
MESSAGES_MAX = 65_535
"""In a sub-batch entry."""
_KEY = struct.Struct(">HH")
_ENTRY = struct.Struct(">QBHII")


def frame(key: int, body: bytes) -> bytes:
    """A frame of version 1."""
    return struct.pack(">IHH", 4 + len(body), key, 1) + body


def text(words: str) -> bytes:
    """A string with its length before it."""
    encoded = words.encode()
    return struct.pack(">H", len(encoded)) + encoded


def publish(publisher: int, values: Sequence[bytes], together: int) -> bytes:
    """A frame with entries of `together` values each."""
    starts = range(0, len(values), together)
    entries = b"".join(_entry(values[at : at + together]) for at in starts)
    return frame(PUBLISH, struct.pack(">BI", publisher, len(starts)) + entries)


def _entry(values: Sequence[bytes]) -> bytes:
    length = struct.pack(">I", len(values[0]))
    if len(values) == 1:
        return struct.pack(">Q", 1) + length + values[0]
    data = length + length.join(values)
    return _ENTRY.pack(len(values), 0x80, len(values), len(data), len(data)) + data


def confirmed(body: bytes) -> int:
    """The number of messages of `publish` that a confirmation confirms."""
    return int(np.frombuffer(body, ">u8", offset=5).sum())


def chunk_messages(body: memoryview) -> int:
    """The number of messages in the chunk of a delivery."""
    count: int = struct.unpack_from(">I", body, 1 + 4)[0]
    return count


def chunk_values(body: memoryview) -> Iterator[memoryview]:
    """The values in the chunk of a delivery."""
    entries: int = struct.unpack_from(">H", body, 1 + 2)[0]
    at = 1 + CHUNK_HEADER_BYTES + body[1 + 44]  # the bloom filter's length is in the header's last four bytes
    for _ in range(entries):
        if body[at] & 0x80:
            messages, at = struct.unpack_from(">H", body, at + 1)[0], at + 11
        else:
            messages = 1
        for _ in range(messages):
            length = struct.unpack_from(">I", body, at)[0]
            yield body[at + 4 : at + 4 + length]
            at += 4 + length


class Frames:
    """The complete frames in the input of a connection, cut anywhere."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Key and body of each frame."""
        self._rest += data
        found, at = [], 0
        while len(self._rest) - at >= 4:
            end = at + 4 + int.from_bytes(self._rest[at : at + 4])
            if end > len(self._rest):
                break
            found.append((_KEY.unpack_from(self._rest, at + 4)[0], bytes(self._rest[at + 8 : end])))
            at = end
        del self._rest[:at]
        return found


class Stream:
    """A connection for blocking calls: it is set up with them, and then handed on."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=START_S)
        self._frames = Frames()
        self._waiting: list[tuple[int, bytes]] = []
        self._number = 0
        self.request(PEER_PROPERTIES, struct.pack(">I", 0))
        self.request(SASL_HANDSHAKE, b"")
        credentials = b"\0guest\0guest"
        self.request(SASL_AUTHENTICATE, text("PLAIN") + struct.pack(">I", len(credentials)) + credentials)
        tune = self._next(TUNE)
        self.socket.sendall(frame(TUNE, tune[:4] + struct.pack(">I", 0)))  # as large frames as it takes, no heartbeats
        self.request(OPEN, text("/"))

    def request(self, key: int, body: bytes) -> None:
        """Call, and wait for the answer. Raises ValueError for a refusal."""
        self._number += 1
        self.socket.sendall(frame(key, struct.pack(">I", self._number) + body))
        code = struct.unpack_from(">H", self._next(key | RESPONSE), 4)[0]
        if code != OK:
            raise ValueError(f"RabbitMQ answers {code} to request {key}")

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _next(self, key: int) -> bytes:
        while True:
            while self._waiting:
                found, body = self._waiting.pop(0)
                if found == key:
                    return body
            data = self.socket.recv(1 << 16)
            if not data:
                raise ConnectionError("RabbitMQ has closed the connection")
            self._waiting = self._frames.feed(data)
