"""The parts of the protocol of NATS, and of JetStream's interface in it, that a benchmark needs."""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections import Counter
from typing import Any

from bench.compare.peers.raw import Batch
from bench.compare.peers.servers import HOST, START_S

BATCH_MAX = 1_000
"""Messages of an atomic batch."""
ACKNOWLEDGEMENT = re.compile(rb"MSG _A\w*\.(\d+) 1 +\d+\r\n")
_ACKNOWLEDGED_BATCH = re.compile(rb'MSG _A\w*\.(\d+) 1 +\d+\r\n{[^}]*"count":(\d+)}\r\n')
_EMPTY = b"PUB %b 0\r\n\r\n"
_CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"lang":"bench","version":"1","headers":true}\r\n'


class Nats:
    """A connection for blocking calls: it is set up with them, and then handed on."""

    def __init__(self, port: int, timeout_s: float = START_S) -> None:
        self.socket = socket.create_connection((HOST, port), timeout=timeout_s)
        self._buffer = b""
        self._inbox = b"_R" + uuid.uuid4().hex.encode()  # another connection's answers are not ours
        self._line()  # INFO
        self.socket.sendall(_CONNECT + b"SUB %b 0\r\n" % self._inbox)
        self.ping()

    def ping(self) -> None:
        """Return when the server has seen all earlier input."""
        self.socket.sendall(b"PING\r\n")
        while (line := self._line()) != b"PONG":
            if line.startswith(b"-ERR"):
                raise ValueError(line.decode())

    def request(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call JetStream. Raises ValueError with its error."""
        payload = json.dumps(body).encode() if body else b""
        self.socket.sendall(b"PUB $JS.API.%b %b %d\r\n%b\r\n" % (subject.encode(), self._inbox, len(payload), payload))
        while not (line := self._line()).startswith(b"MSG _R"):
            if line.startswith((b"-ERR", b"HMSG _R")):  # the latter: no server answers yet
                raise ValueError(line.decode())
            if line == b"PING":
                self.socket.sendall(b"PONG\r\n")
        answer: dict[str, Any] = json.loads(self._exactly(int(line.rsplit(b" ", 1)[1]) + 2))
        if "error" in answer:
            raise ValueError(f"{subject}: {answer['error'].get('description')}")
        return answer

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._receive()
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    def _receive(self) -> None:
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("NATS has closed the connection")
        self._buffer += data


def publish(subject: bytes, batch: Batch, inbox: bytes) -> bytes:
    """The records of a batch; acknowledgements go to an `inbox` (``_A…``) under the partition's number."""
    reply = b"%b.%d" % (inbox, batch.partition)
    if batch.keys is None:
        head = b"PUB %b %b %d\r\n" % (subject, reply, len(batch.values[0]))
        return head + (b"\r\n" + head).join(batch.values) + b"\r\n"
    requests = []
    for key, value in zip(batch.keys, batch.values, strict=True):
        headers = b"NATS/1.0\r\nkey: %b\r\n\r\n" % key
        sizes = b"%d %d" % (len(headers), len(headers) + len(value))
        requests.append(b"HPUB %b %b %b\r\n%b%b\r\n" % (subject, reply, sizes, headers, value))
    return b"".join(requests)


def publish_atomically(subject: bytes, batch: Batch, inbox: bytes) -> bytes:
    """The same as atomic batches, with one acknowledgement each: they are stored, and flushed, as a whole.

    The id of a batch is free again when the batch is stored, which is before the server looks at the next message.
    """
    identity = b"Nats-Batch-Id:%b-%d\r\nNats-Batch-Sequence:" % (inbox, batch.partition)
    requests, count = [], len(batch.values)
    for number, value in enumerate(batch.values):
        place = number % BATCH_MAX + 1
        last = place == BATCH_MAX or number + 1 == count
        headers = b"NATS/1.0\r\n%b%d\r\n" % (identity, place) + b"Nats-Batch-Commit:1\r\n" * last
        if batch.keys is not None:
            headers += b"key: %b\r\n" % batch.keys[number]
        headers += b"\r\n"
        reply = b"%b.%d " % (inbox, batch.partition) if last else b""
        sizes = b"%d %d" % (len(headers), len(headers) + len(value))
        requests.append(b"HPUB %b %b%b\r\n%b%b\r\n" % (subject, reply, sizes, headers, value))
    return b"".join(requests)


class Acknowledgements:
    """Counts the acknowledgements of `publish` or `publish_atomically` in the input of a connection, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Counter[int]:
        """The acknowledged records by partition. Raises ValueError for a refusal."""
        data = self._rest + data
        end = data.rfind(b"}\r\n") + 3
        if end < 3:
            whole, self._rest = b"", data
        else:
            whole, self._rest = data[:end], data[end:]
        if b'"error"' in whole or b"-ERR" in data:
            raise ValueError(whole[-500:].decode(errors="replace"))
        found = Counter(map(int, ACKNOWLEDGEMENT.findall(whole)))
        if b'"count":' in whole:
            for partition, count in _ACKNOWLEDGED_BATCH.findall(whole):
                found[int(partition)] += int(count) - 1
        return found


class Messages:
    """The messages in the input of a connection, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self.answers: list[bytes] = []
        """Answers for the server: that we are alive, and how far we are. The caller of `feed` takes them."""

    def feed(self, data: bytes) -> list[bytes]:
        """The values. Raises ValueError for an error."""
        data = self._rest + data
        values, at, length, find = [], 0, len(data), data.find
        while (end := find(b"\r\n", at)) >= 0:
            line, start = data[at:end], end + 2
            if line[:1] == b"M":  # MSG subject sid [reply] size
                stop = start + int(line[line.rindex(b" ") :])
                if stop + 2 > length:
                    break
                values.append(data[start:stop])
                at = stop + 2
            elif line[:1] == b"H":  # HMSG subject sid [reply] header-size size
                words = line.split()
                headers, stop = start + int(words[-2]), start + int(words[-1])
                if stop + 2 > length:
                    break
                if data.startswith(b"NATS/1.0 1", start):
                    self._control(data[start:headers], words)
                else:
                    values.append(data[headers:stop])
                at = stop + 2
            elif line.startswith(b"-ERR"):
                raise ValueError(line.decode())
            else:
                if line == b"PING":
                    self.answers.append(b"PONG\r\n")
                at = start
        self._rest = data[at:]
        return values

    def _control(self, headers: bytes, words: list[bytes]) -> None:
        if len(words) == 6:  # flow control
            self.answers.append(_EMPTY % words[3])
        elif (stalled := re.search(rb"Nats-Consumer-Stalled: (\S+)", headers)) is not None:
            self.answers.append(_EMPTY % stalled[1])
