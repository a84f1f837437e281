"""The cost of a write request for broker and backup, beside the kernel's part: ``python -m bench.request_cost``.

From the bytes that a socket has received to those that it is given to send: frames, messages, chunks, their copy at the
backup, answers. Requests of one chunk each; some of them come with one read of the socket, as they do when a producer
has several in flight. No socket and no disk. Each core runs in processes of its own, in turns; of each kind the least
counts, divided by its requests.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import uvloop

from bench.native_cost import beside
from bench.stages.around import Wire, frame, header_of, stream_info
from bench.stages.backup import Replicas
from bench.stages.broker import Writes
from bench.write_cost import Kind as Chunks
from bench.write_cost import bulk_of, payload_of
from kera.core.base.settings import MIB
from kera.core.rpc import api
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, FrameProtocol
from kera.v1 import broker_pb2

MEMORY_BYTES = 256 * MIB
ROUNDS = 200
SIZES = ((8, 1), (8, 16), (150, 1), (150, 3))
"""Records of a request, and requests of a read."""
BYTES_MAX = 24 * MIB
"""Size of all requests of a kind, for which the backup's memory has room."""


class Load(NamedTuple):
    """Requests that arrive together."""

    records: int
    requests: int
    """The number of requests that arrive with one read."""
    replicas: int

    def __str__(self) -> str:
        together = f"{self.requests} at once" if self.requests > 1 else "one at a time"
        return f"{self.records} records, {together}{', one copy' * self.replicas}"


LOADS = [Load(records, requests, replicas) for replicas in (0, 1) for records, requests in SIZES]


def give(protocol: FrameProtocol, data: bytes) -> int:
    """Let a protocol receive bytes with one read; returns the nanoseconds."""
    buffer = memoryview(protocol.get_buffer(-1))
    buffer[: len(data)] = data
    begun_ns = perf_counter_ns()
    protocol.buffer_updated(len(data))
    return perf_counter_ns() - begun_ns


def taken(wire: Wire) -> bytes:
    """Take the bytes that the protocol has sent."""
    sent, wire.sent = wire.sent, []
    return b"".join(memoryview(piece) for pieces in sent for piece in pieces)


def frames_in(data: bytes) -> int:
    """The number of frames."""
    count = at = 0
    while at < len(data):
        header = header_of([data[at:]])
        at += HEADER_BYTES + header.head_bytes + header.bulk_bytes
        count += 1
    return count


async def measure_load(writes: Writes, load: Load) -> dict[str, float]:
    """Nanoseconds of a request, at the broker and at the backup."""
    stream_id, backup = writes.open(stream_info(1, replicas=load.replicas)), Replicas(())
    chunks = Chunks(1, 1, load.records, lean=True)
    payload, sequences, message = payload_of(chunks), [0], broker_pb2.MultiWriteChunksRequest(chunk_count=1)
    request_bytes = len(bulk_of(chunks, payload, stream_id, [0]))
    at_broker, at_backup = [], []
    for _ in range(min(ROUNDS, BYTES_MAX // (request_bytes * load.requests))):
        data = b"".join(
            frame(
                FrameKind.REQUEST,
                api.MULTI_WRITE_CHUNKS,
                number,
                message,
                [bulk_of(chunks, payload, stream_id, sequences)],
            )
            for number in range(load.requests)
        )
        broker_ns, backup_ns, answers = give(writes.connection, data), 0, b""
        while frames_in(answers := answers + taken(writes.wire)) < load.requests or not writes.wire.reading:
            if copies := taken(writes.backup_wire):
                backup_ns += give(backup.connection, copies)
            if copied := taken(backup.wire):
                broker_ns += give(writes.backup, copied)
            begun_ns = perf_counter_ns()
            await asyncio.sleep(0)
            broker_ns += perf_counter_ns() - begun_ns
        at_broker.append(broker_ns)
        at_backup.append(backup_ns)
        await asyncio.sleep(0)
    await writes.drop()
    found = {f"broker: {load}": min(at_broker[1:]) / load.requests}
    return found | ({f"backup: {load}": min(at_backup[1:]) / load.requests} if load.replicas else {})


async def measure() -> dict[str, float]:
    """Nanoseconds of each kind, with the core of this process."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        writes = Writes(Path(root), [], memory_bytes=MEMORY_BYTES)
        for load in LOADS:
            found |= await measure_load(writes, load)
        await writes.close()
    return found


def table(python: dict[str, float], fast: dict[str, float]) -> str:
    """Both cores beside each other, in Markdown."""
    rows = ["| requests | Python, us | native, us | |", "|---|--:|--:|--:|"]
    rows += [
        f"| {what} | {python[what] / 1000:,.1f} | {fast[what] / 1000:,.1f} | {python[what] / fast[what]:.1f}× |"
        for what in fast
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure as the command line says."""
    beside(
        "bench.request_cost", lambda: uvloop.run(measure()), table, "Measure what a request costs, with either core."
    )


if __name__ == "__main__":
    main()
