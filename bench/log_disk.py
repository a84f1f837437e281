"""How fast the log engine writes segments to disk and reads them back, as a ratio to the disk itself.

In each round, one after the other and with the same files of the same size: the raw disk (a new file each, written at
once around the page cache and synchronously; read back likewise), the engine in this process (the persistence manager
and the segment store, on their threads), and a broker between a producer and a consumer. The last one also pays for
transport, checksums and two more processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from pydantic import ByteSize

from bench.common import Broker, Figures, broker, directory, parser, sample_chunk, say, size
from kera.broker.engine import LogEngine
from kera.broker.settings import BrokerSettings
from kera.broker.storage.loads import LOADS_IN_FLIGHT_MAX
from kera.client import Client
from kera.core.base.settings import MIB
from kera.core.format.chunk import read_header
from kera.v1 import common_pb2

STREAM = 1
CHUNK_BYTES = MIB


def raw(root: Path, count: int, segment_bytes: int) -> tuple[float, float]:
    """Seconds to write and to read `count` files."""
    buffer = memoryview(mmap.mmap(-1, segment_bytes))
    buffer[:] = os.urandom(segment_bytes)
    paths = [root / f"raw-{number}" for number in range(count)]
    begun_s = time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        if os.pwritev(fd, [buffer], 0, os.RWF_DSYNC) != segment_bytes:
            raise OSError(f"{path} was not written at once")
        os.close(fd)
    written_s = time.perf_counter()
    with ThreadPoolExecutor(LOADS_IN_FLIGHT_MAX) as pool:  # as many at a time as the engine
        list(pool.map(lambda path: _read(path, segment_bytes), paths))
    read_s = time.perf_counter()
    for path in paths:
        path.unlink()
    return written_s - begun_s, read_s - written_s


def _read(path: Path, length: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    if os.preadv(fd, [_buffer(length)], 0) != length:
        raise OSError(f"{path} was not read at once")
    os.close(fd)


_buffers = threading.local()


def _buffer(length: int) -> memoryview:
    """A buffer for each thread, used again: fresh memory would cost more than the disk."""
    if not hasattr(_buffers, "view"):
        _buffers.view = memoryview(mmap.mmap(-1, length))
    return memoryview(_buffers.view)


class Engine:
    """The engine in this process, with one stream."""

    def __init__(self, engine: LogEngine) -> None:
        self._engine = engine
        info = common_pb2.StreamInfo(
            stream_id=STREAM,
            name="bench",
            config=common_pb2.StreamConfig(streamlets=1, brokers=1, entries=1, group_segments=16),
            assignments=[common_pb2.StreamletAssignment(streamlet_id=0, broker_id=1, broker_epoch=1)],
        )
        engine.streams.open(info, 1)
        self._streamlet = engine.streams.get(STREAM).streamlet(0)
        self._entry = self._streamlet.entries[0]
        self._sequence = 0
        self._payload = os.urandom(CHUNK_BYTES - 256)

    def _append(self) -> None:
        parts = sample_chunk(pa.py_buffer(self._payload), stream_id=STREAM, sequence=self._sequence)
        self._sequence += 1
        chunk = memoryview(parts.to_bytes())
        self._streamlet.publish(self._streamlet.append(chunk, read_header(chunk, 0)))

    async def spill(self, count: int) -> float:
        """Seconds to put `count` segments from memory on disk."""
        memory = self._engine.memory
        segments = memory.totals.segments_flushed + count
        closed: set[tuple[int, int]] = set()
        while len(closed) < count:
            self._append()
            head = self._entry.tail[-1]
            if not head.takes(CHUNK_BYTES):
                memory.close(head)
                closed.add(head.key)
        begun_s = time.perf_counter()  # nothing goes to disk before the loop has a turn
        while memory.totals.segments_flushed < segments:
            await asyncio.sleep(0.0005)
        return time.perf_counter() - begun_s

    async def load(self, count: int) -> float:
        """Seconds to bring the last `count` segments back into memory, in order, as a reader wants them."""
        memory, entry = self._engine.memory, self._entry
        keys = [key for key, _ in entry.segments()][-count:]
        while memory.slots.evict():
            pass
        loop = asyncio.get_running_loop()
        begun_s = time.perf_counter()
        for key in keys:
            there: asyncio.Future[None] = loop.create_future()
            memory.loads.load(entry, key, lambda error, there=there: there.set_result(None))  # type: ignore[misc]  # noqa: ARG005
            await there
            memory.slots.touched(entry.resident[key])
        return time.perf_counter() - begun_s


async def through_broker(
    made: Broker, client: Client, name: str, count: int, segment_bytes: int
) -> tuple[float, float]:
    """Seconds from the first record sent until the last whole segment is on disk; and to read all of them back."""
    await client.admin.create_stream(name)
    flushed = (await made.metrics())["segments_flushed_total"] + count
    value = os.urandom(CHUNK_BYTES // 64)
    batch = pa.record_batch({"value": pa.array([value] * 63, pa.binary())})
    sent = segment_bytes // (CHUNK_BYTES) * (count + 1)
    begun_s = time.perf_counter()
    async with client.producer(chunk_bytes_max=CHUNK_BYTES, request_bytes_max=2 * CHUNK_BYTES) as producer:
        for _ in range(sent):
            await producer.send_batch(name, batch)
        await producer.flush()
        await made.until(lambda metrics: metrics["segments_flushed_total"] >= flushed)
    written_s = time.perf_counter() - begun_s
    # Push it out of memory: another stream takes its place.
    evicted = (await made.metrics())["arena_slots"]
    await client.admin.create_stream(name + "-other")
    async with client.producer(chunk_bytes_max=CHUNK_BYTES, request_bytes_max=2 * CHUNK_BYTES) as producer:
        for _ in range(int(evicted + 1) * (segment_bytes // CHUNK_BYTES)):
            await producer.send_batch(name + "-other", batch)
    begun_s = time.perf_counter()
    received = 0
    async with client.consumer(name, start="earliest", end="latest", prefetch_bytes_max=32 * MIB) as consumer:
        async for chunk in consumer.batches():
            received += chunk.header.chunk_bytes
    read_s = (time.perf_counter() - begun_s) * count * segment_bytes / received
    await client.admin.delete_stream(name + "-other")
    await client.admin.delete_stream(name)
    return written_s, read_s


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """All rounds."""
    count, segment_bytes = arguments.segments, arguments.segment_bytes
    total = count * segment_bytes / 1e9
    figures = Figures("log_disk", arguments, root)
    settings = BrokerSettings(
        data_dir=root / "engine",
        arena_bytes=ByteSize((count + 8) * segment_bytes),
        segment_bytes=ByteSize(segment_bytes),
    )
    (root / "engine").mkdir()
    engine = await LogEngine.start(settings, root / "engine")
    arena_bytes = (count // 2 + 8) * segment_bytes
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(
            broker(root / "cluster", arena_bytes=arena_bytes, segment_bytes=segment_bytes)
        )
        client = await stack.enter_async_context(await Client.connect(made.cluster.bootstrap))
        inside = Engine(engine)
        for number in range(arguments.rounds + 1):
            say(f"round {number} of {arguments.rounds}" + ("" if number else ": warm-up, not counted"))
            seconds = {"raw": raw(root, count, segment_bytes)}
            seconds["engine"] = await inside.spill(count), await inside.load(count)
            seconds["broker"] = await through_broker(made, client, f"s{number}", count, segment_bytes)
            if not number:
                continue
            for which, what in enumerate(("write", "read")):
                for name, times in seconds.items():
                    figures.add(f"{name}: {what}", total / times[which], "GB/s")
                    if name != "raw":
                        figures.add(f"{name}: {what}, ratio to raw", seconds["raw"][which] / times[which], "")
    await engine.close()
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--segments", type=int, default=32, help="per round")
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
