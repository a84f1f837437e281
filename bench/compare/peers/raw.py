"""Producers that speak a server's protocol directly, on one socket: the fastest possible clients.

Requests are encoded before the clock runs, if the workload has prepared records; so the client costs next to nothing,
and the figures are those of the server. Requests are written without waiting, up to a window of records that are not
acknowledged; answers are counted as they come.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, cast

from bench.compare.worker import Worker, make_keys, make_values, stamped
from bench.compare.workload import DUE_BYTES

BATCHES_BYTES_MAX = 64 << 20
"""The size of all prepared batches of a process."""
KEYS = 1 << 16
"""The number of different prepared records, if records have keys."""


@dataclass(frozen=True)
class Batch:
    """Records for one partition."""

    partition: int
    values: Sequence[bytes]
    keys: Sequence[bytes] | None

    def head(self, count: int) -> Self:
        """The first records."""
        return type(self)(self.partition, self.values[:count], None if self.keys is None else self.keys[:count])


class Pipeline(asyncio.Protocol):
    """A producer's connection. Answers come in order for each partition."""

    window = 10_000
    """At most this many records, and a batch, are unacknowledged."""
    batch_bytes_max = 1 << 20
    batch_records_min = 1
    """For servers that are faster with larger batches than the workload's, up to `batch_bytes_max`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._waiting: defaultdict[int, deque[list[int]]] = defaultdict(deque)
        """By partition: [unacknowledged records, due time] of each batch."""
        self._unacknowledged = 0
        self._room: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._writable = True
        self.transport: asyncio.Transport

    # -- for those who know the protocol

    def encode(self, batch: Batch) -> bytes:
        """The request, or requests, that store a batch."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Parse answers, and call `acknowledge` or `fail`."""
        raise NotImplementedError

    def acknowledge(self, partition: int, count: int) -> None:
        """The next `count` records of a partition are stored."""
        waiting = self._waiting[partition]
        self._unacknowledged -= count
        while count:
            if not waiting:
                self.fail(RuntimeError("more acknowledgements than records"))
                return
            first = waiting[0]
            some = min(first[0], count)
            self._worker.acknowledged(some, first[1])
            first[0] -= some
            count -= some
            if not first[0]:
                waiting.popleft()
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the producer with this error."""
        self._failure = self._failure or error
        self._wake()

    # -- of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin on a new connection."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(4 << 20)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the producer: the server closed the connection."""
        self.fail(exc or ConnectionError("the server has closed the connection"))

    def pause_writing(self) -> None:
        """Pause: the server does not read as fast as we write."""
        self._writable = False

    def resume_writing(self) -> None:
        """Continue: the server reads again."""
        self._writable = True
        self._wake()

    # -- the producer

    def send(self, partition: int, request: bytes, count: int, due_ns: int) -> None:
        """Write a request that stores `count` records."""
        self._waiting[partition].append([count, due_ns])
        self._unacknowledged += count
        self._worker.sent(count)
        self.transport.write(request)

    @property
    def full(self) -> bool:
        """Whether the window is closed, or the server does not read."""
        return self._unacknowledged >= self.window or not self._writable

    async def room(self) -> None:
        """Wait until the window is open."""
        await self._until(lambda: not self.full)

    async def finished(self) -> None:
        """Wait until everything is acknowledged."""
        await self._until(lambda: not self._unacknowledged)
        self.transport.abort()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure is not None:
                raise self._failure
            self._room = self._loop.create_future()
            await self._room
        if self._failure is not None:
            raise self._failure


async def produce(worker: Worker, connected: socket.socket, protocol: Callable[[], Pipeline]) -> None:
    """Be a producer on an open connection."""
    connected.settimeout(0)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _, pipeline = await asyncio.get_running_loop().create_connection(protocol, sock=connected)
    if worker.task.rate:
        await _at_rate(worker, pipeline)
    elif worker.workload.send == "record":
        await _by_record(worker, pipeline)
    else:
        await _by_batch(worker, pipeline)
    await pipeline.finished()


async def _at_rate(worker: Worker, pipeline: Pipeline) -> None:
    """Send each record as a request, when it is due."""
    rest = make_values(worker.workload.record_bytes - DUE_BYTES, 1)[0]
    places = itertools.cycle(_places(worker))
    await worker.begin()
    async for due_ns in worker.due():
        partition, key = next(places)
        batch = Batch(partition, [stamped(due_ns, rest)], None if key is None else [key])
        pipeline.send(partition, pipeline.encode(batch), 1, due_ns)
        if pipeline.full:
            await pipeline.room()


async def _by_record(worker: Worker, pipeline: Pipeline) -> None:
    """Encode one record with each call; write when there is enough."""
    size = batch_records(worker, pipeline)
    values = itertools.cycle(make_values(worker.workload.record_bytes, 1_000))
    places = itertools.cycle(_places(worker))
    await worker.begin()
    while more := worker.more:
        encoded: defaultdict[int, list[bytes]] = defaultdict(list)
        for partition, key in itertools.islice(places, min(size, more)):
            encoded[partition].append(pipeline.encode(Batch(partition, [next(values)], None if key is None else [key])))
        given_ns = time.monotonic_ns()
        for partition, requests in encoded.items():
            pipeline.send(partition, b"".join(requests), len(requests), given_ns)
        await pipeline.room()


async def _by_batch(worker: Worker, pipeline: Pipeline) -> None:
    """Send requests that were encoded before."""
    batches = prepared(worker, batch_records(worker, pipeline))
    requests = itertools.cycle([(batch, pipeline.encode(batch)) for batch in batches])
    await worker.begin()
    while more := worker.more:
        batch, request = next(requests)
        if len(batch.values) > more:
            batch = batch.head(more)
            request = pipeline.encode(batch)
        pipeline.send(batch.partition, request, len(batch.values), time.monotonic_ns())
        await pipeline.room()


def batch_records(worker: Worker, pipeline: Pipeline) -> int:
    """The number of records in a full batch."""
    workload = worker.workload
    share = BATCHES_BYTES_MAX // len(worker.task.partitions)
    wanted = max(int(workload.batch_bytes), pipeline.batch_records_min * workload.record_bytes)
    return max(1, min(wanted, pipeline.batch_bytes_max, share) // workload.record_bytes)


def prepared(worker: Worker, size: int) -> list[Batch]:
    """Batches of `size` for the partitions in turn, or, with keys, in the order of the keys."""
    values = make_values(worker.workload.record_bytes, size)
    if worker.workload.keys == "none":
        return [Batch(partition, values, None) for partition in range(len(worker.task.partitions))]
    by_partition: defaultdict[int, list[bytes]] = defaultdict(list)
    batches = []
    for partition, key in _places(worker):
        keys = by_partition[partition]
        keys.append(key or b"")
        if len(keys) == size:
            batches.append(Batch(partition, values, by_partition.pop(partition)))
    return batches + [Batch(partition, values[: len(keys)], keys) for partition, keys in by_partition.items()]


def _places(worker: Worker) -> Iterator[tuple[int, bytes | None]]:
    """The partition, as an index of the task's partitions, and the key of some records, to cycle through."""
    streams, streamlets = worker.task.streams, worker.workload.streamlets
    keys = make_keys(worker.workload, KEYS, seed=worker.task.index)
    if keys is None:
        yield from ((partition, None) for partition in range(len(worker.task.partitions)))
        return
    for key, stream in zip(keys, itertools.cycle(range(len(streams)))):
        yield stream * streamlets + zlib.crc32(key) % streamlets, key
