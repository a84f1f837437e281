"""A producer or consumer of Redis streams, see `bench.compare.worker`."""

from __future__ import annotations

import asyncio
import importlib
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence

from bench.compare.peers import raw
from bench.compare.peers.redis_protocol import Replies, adds, command
from bench.compare.peers.servers import HOST
from bench.compare.worker import Worker, due_of, run_async

RECEIVE_BYTES = 1 << 18
READ_RECORDS = 5_000
"""The maximum of each stream for each command."""
WAIT_MS = 10_000


class Producer(raw.Pipeline):
    """Pipelines XADD; with replicas, a WAIT behind each batch acknowledges it."""

    def __init__(self, worker: Worker, streams: Sequence[bytes]) -> None:
        super().__init__(worker)
        self._streams = streams
        self._replies = Replies()
        self._replicas = worker.workload.replicas
        self._order: deque[list[int]] = deque()
        """[partition, records] of unanswered commands: answers come in the order of commands."""
        if self._replicas:
            self.batch_bytes_max = 128 << 10

    def encode(self, batch: raw.Batch) -> bytes:
        """One command for each record: no command adds several."""
        wait = command(b"WAIT", b"%d" % self._replicas, b"%d" % WAIT_MS) if self._replicas else b""
        return adds(self._streams[batch.partition], batch) + wait

    def send(self, partition: int, request: bytes, count: int, due_ns: int) -> None:
        """Write, and remember the partition of the answers."""
        self._order.append([partition, count])
        super().send(partition, request, count, due_ns)

    def data_received(self, data: bytes) -> None:
        """Count ids, or WAITs."""
        try:
            added, waits = self._replies.feed(data)
        except ValueError as error:
            self.fail(error)
            return
        if self._replicas:
            self._waited(waits)
        else:
            self._added(added)

    def _waited(self, waits: Sequence[int]) -> None:
        for replicas in waits:
            if replicas < self._replicas:
                self.fail(TimeoutError(f"{replicas} replicas after {WAIT_MS} ms"))
                return
            self.acknowledge(*self._order.popleft())

    def _added(self, count: int) -> None:
        while count:
            first = self._order[0]
            some = min(first[1], count)
            self.acknowledge(first[0], some)
            first[1] -= some
            count -= some
            if not first[1]:
                self._order.popleft()


def _streams(worker: Worker) -> list[bytes]:
    names, streamlets = worker.task.settings["streams"], worker.workload.streamlets
    return [names[stream * streamlets + each].encode() for stream, each in worker.task.partitions]


async def produce(worker: Worker) -> None:
    """Produce as `bench.compare.peers.raw` does."""
    connected = socket.create_connection((HOST, worker.task.settings["port"]))
    await raw.produce(worker, connected, lambda: Producer(worker, _streams(worker)))


async def consume(worker: Worker) -> None:
    """Read with XREAD of all streams, which waits for records; hiredis, written in C, parses the answers."""
    connected = socket.create_connection((HOST, worker.task.settings["port"]))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(0)
    await worker.begin()
    await worker.until_stopped(_read(worker, connected))


async def _read(worker: Worker, connected: socket.socket) -> None:
    loop, reader, timed = asyncio.get_running_loop(), importlib.import_module("hiredis").Reader(), worker.workload.rate
    positions = dict.fromkeys(_streams(worker), b"0-0")
    head = (b"XREAD", b"COUNT", b"%d" % READ_RECORDS, b"BLOCK", b"0", b"STREAMS")
    while True:
        await loop.sock_sendall(connected, command(*head, *positions, *positions.values()))
        while (answer := reader.gets()) is False:
            if not (data := await loop.sock_recv(connected, RECEIVE_BYTES)):
                raise ConnectionError("Redis has closed the connection")
            reader.feed(data)
        if isinstance(answer, Exception):
            raise answer
        now_ns = time.monotonic_ns()
        for stream, entries in answer:
            positions[stream] = entries[-1][0]
            worker.seen(len(entries), now_ns)
            if timed:
                for _, fields in entries:
                    worker.arrived(due_of(fields[-1]), now_ns)


if __name__ == "__main__":
    sys.exit(run_async(produce, consume))
