"""The parts of RESP, the protocol of Redis, that a benchmark of its streams needs."""

from __future__ import annotations

from collections.abc import Sequence

from bench.compare.peers.raw import Batch


def command(*words: bytes) -> bytes:
    """A command, as an array of strings."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def adds(stream: bytes, batch: Batch) -> bytes:
    """An XADD for each record: its value is field v, its key field k."""
    head = b"$4\r\nXADD\r\n$%d\r\n%b\r\n$1\r\n*\r\n" % (len(stream), stream)
    if batch.keys is None:
        head = b"*5\r\n" + head + b"$1\r\nv\r\n$%d\r\n" % len(batch.values[0])
        return head + (b"\r\n" + head).join(batch.values) + b"\r\n"
    head = b"*7\r\n" + head
    return b"".join(
        head + b"$1\r\nk\r\n$%d\r\n%b\r\n$1\r\nv\r\n$%d\r\n%b\r\n" % (len(key), key, len(value), value)
        for key, value in zip(batch.keys, batch.values, strict=True)
    )


class Replies:
    """Counts the answers to `adds` and to WAIT in the input of a connection, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> tuple[int, Sequence[int]]:
        """The number of records with ids, and the number of replicas for each WAIT. Raises ValueError for a refusal."""
        data = self._rest + data
        end = data.rfind(b"\r\n") + 2
        if end < 2:
            self._rest = data
            return 0, ()
        before = data.rfind(b"\r\n", 0, end - 2)
        last = before + 2 if before >= 0 else 0
        if data.startswith(b"$", last):  # the length of an id, without the id yet
            end = last
        whole, self._rest = data[:end], data[end:]
        if whole.startswith(b"-") or b"\r\n-" in whole:
            at = 0 if whole.startswith(b"-") else whole.index(b"\r\n-") + 2
            raise ValueError(whole[at : whole.index(b"\r\n", at)].decode())
        waits = [int(line[1:]) for line in whole.split(b"\r\n") if line.startswith(b":")] if b":" in whole else ()
        return whole.count(b"$"), waits
