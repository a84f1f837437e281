"""The cost of a write request for a broker's writer, with and without the native core: ``python -m bench.write_cost``.

Chunks of one producer, to one streamlet or divided among many, from the call of the handler to its answer: no
connection, no replicas and no disk. Each core runs in processes of its own, in turns; the least time of each request
counts.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import NamedTuple

import pyarrow as pa

from bench.native_cost import beside, records
from bench.stages.around import stream_info
from bench.stages.broker import Writes
from kera.core.format.chunk import ARROW_VERSION, LEAN_VERSION, Codec, encode_chunk, encode_payload
from kera.core.format.payload import encode_lean
from kera.core.rpc import Call, Reply
from kera.core.rpc.method import Peer
from kera.v1 import broker_pb2

SEGMENT_BYTES = 256 << 10
MEMORY_BYTES = 1100 * SEGMENT_BYTES
REQUESTS = 200
BYTES_MAX = 200 << 20
"""Size of all requests of a kind; the memory has room for them."""


class Kind(NamedTuple):
    """Requests of one kind."""

    streamlets: int
    chunks: int
    records: int
    lean: bool

    def __str__(self) -> str:
        chunks = f"{self.chunks} chunk{'s' * (self.chunks > 1)} of {self.records} record{'s' * (self.records > 1)}"
        return f"{chunks}{' each' * (self.chunks > 1)}, {'lean' if self.lean else 'arrow'}" + (
            f", {self.streamlets:,} streamlets" if self.streamlets > 1 else ""
        )


KINDS = [
    Kind(1, 1, 1, lean=True),
    Kind(1, 1, 10, lean=True),
    Kind(1, 1, 150, lean=True),
    Kind(1, 16, 10, lean=True),
    Kind(1, 16, 10, lean=False),
    Kind(1, 16, 150, lean=True),
    Kind(1024, 1024, 10, lean=True),
    Kind(1024, 1024, 10, lean=False),
]


def payload_of(kind: Kind) -> pa.Buffer | bytes:
    """The payload of each chunk."""
    batch = records(kind.records)
    payload = encode_lean(batch, Codec.NONE) if kind.lean else encode_payload(batch)
    if payload is None:
        raise ValueError("the default schema is lean")
    return payload


def bulk_of(kind: Kind, payload: pa.Buffer | bytes, stream_id: int, sequences: list[int]) -> memoryview:
    """The chunks of the next request."""
    pieces = []
    for number in range(kind.chunks):
        streamlet_id = number % kind.streamlets
        chunk = encode_chunk(
            payload,
            record_count=kind.records,
            stream_id=stream_id,
            streamlet_id=streamlet_id,
            schema_id=1,
            producer_id=1 << 40,
            producer_epoch=0,
            sequence=sequences[streamlet_id],
            created_us=1,
            min_timestamp_us=1,
            max_timestamp_us=2,
            version=LEAN_VERSION if kind.lean else ARROW_VERSION,
        )
        sequences[streamlet_id] += 1
        pieces.append(chunk.to_bytes())
    return memoryview(b"".join(pieces))


async def measure_kind(writes: Writes, kind: Kind) -> int:
    """Nanoseconds of the fastest request; the first one opens segments, and does not count."""
    stream_id = writes.open(stream_info(1, streamlets=kind.streamlets))
    payload, sequences, peer = payload_of(kind), [0] * kind.streamlets, Peer("unix", "")
    message, found = broker_pb2.MultiWriteChunksRequest(chunk_count=kind.chunks), []
    request_bytes = len(bulk_of(kind, payload, stream_id, [0] * kind.streamlets))
    for _ in range(min(REQUESTS, BYTES_MAX // request_bytes)):
        bulk = bulk_of(kind, payload, stream_id, sequences)
        begun_ns = perf_counter_ns()
        reply = writes.writer.write(Call(message, bulk, peer))
        found.append(perf_counter_ns() - begun_ns)
        if not isinstance(reply, Reply) or any(status.HasField("error") for status in reply.message.statuses):
            raise RuntimeError(f"a broker did not take {kind}")
    await writes.drop()
    return min(found[1:])


async def measure() -> dict[str, float]:
    """Nanoseconds of each kind, with the core of this process."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        writes = Writes(Path(root), [], memory_bytes=MEMORY_BYTES, segment_bytes=SEGMENT_BYTES)
        found: dict[str, float] = {str(kind): await measure_kind(writes, kind) for kind in KINDS}
        await writes.close()
        return found


def table(python: dict[str, float], fast: dict[str, float]) -> str:
    """Both cores beside each other, in Markdown."""
    rows = ["| request | Python, us | native, us | a chunk, native, us | |", "|---|--:|--:|--:|--:|"]
    rows += [
        f"| {kind} | {python[str(kind)] / 1000:,.1f} | {fast[str(kind)] / 1000:,.1f} |"
        f" {fast[str(kind)] / kind.chunks / 1000:.2f} | {python[str(kind)] / fast[str(kind)]:.0f}× |"
        for kind in KINDS
    ]
    return "\n".join(rows)


def main() -> None:
    """Measure as the command line says."""
    beside("bench.write_cost", lambda: asyncio.run(measure()), table, "Measure what a write costs, with either core.")


if __name__ == "__main__":
    main()
