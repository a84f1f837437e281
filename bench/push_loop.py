"""The same bytes again and again through push: does the broker copy any, and does anything grow?

A stream is in the broker's memory. A consumer, a process of its own, reads it from its start to its end, and again,
until ``--bytes`` were handed over, with one client and so one push connection. Counted meanwhile:

* copies on the broker's read side: what it says it copied to answer reads (``bytes_read_total``), against what it
  pushed (``push_bytes_total``). And from outside, without believing it: its processor time per GB, beside what one copy
  of a GB takes on this machine (``memcpy``, measured here).
* copies at the consumer: of each chunk, whether the bytes of its values lie in the mapping of the arena (of
  ``/proc/self/maps``). To look costs about half of what it costs to read a small chunk: so that is done in every
  `LOOK_EVERY`-th pass, which counts for no speed.
* memory: what of the broker is resident after the first tenth, and at the end; the consumer's own (anonymous) likewise.

Fails when a byte was copied, when fewer bytes were pushed than handed over, when records are missing, when slots stay
leased, or when the broker's memory has grown by more than ``--growth-bytes-max``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.common import TIMEOUT_S, Broker, Figures, broker, directory, parser, say, size
from bench.cpu import run_s
from kera.cli.bench._payload import make_batch
from kera.client import Client
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import GIB, MIB

STREAM = "loop"
RECORD_BYTES = 100
CHUNK_BYTES_PER_ROW = 160
COPY_BYTES = 256 * MIB
LOOK_EVERY = 4


class Wrong(Exception):
    """A byte was copied, lost or kept."""


# -- the consumer, a process of its own ----------------------------------------------------------------------------


class Mapping:
    """The place of the arena in this process's memory."""

    def __init__(self, arena: str) -> None:
        self._arena = arena
        self._ranges: list[range] = []

    def has(self, address: int) -> bool:
        """Whether this byte belongs to the arena."""
        if not any(address in each for each in self._ranges):
            self._ranges = [
                range(*(int(end, 16) for end in line.split()[0].split("-")))
                for line in Path("/proc/self/maps").read_text().splitlines()
                if line.rstrip().endswith(self._arena)
            ]
        return any(address in each for each in self._ranges)


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


async def consume(bootstrap: str, arena: str, passes: int, *, verify: bool) -> None:
    """Read the stream `passes` times; report after each pass."""
    mapping = Mapping(arena)
    async with await Client.connect(bootstrap) as client:
        for number in range(passes):
            records = chunk_bytes = in_place = 0
            looks = number % LOOK_EVERY == 0
            begun_s, cpu_s = time.monotonic(), time.process_time()
            settings: dict[str, Any] = {
                "shared_memory": "always",
                "verify_checksums": verify,
                "validate_chunks": verify,
            }
            async with client.consumer(STREAM, start="earliest", end="latest", **settings) as consumer:
                async for chunk in consumer.batches():
                    records += chunk.batch.num_rows
                    chunk_bytes += chunk.header.chunk_bytes
                    if looks:
                        in_place += mapping.has(chunk.batch["value"].buffers()[2].address) * chunk.header.chunk_bytes
            found = {
                "looks": looks,
                "records": records,
                "chunk_bytes": chunk_bytes,
                "in_place_bytes": in_place,
                "seconds": time.monotonic() - begun_s,
                "cpu_s": time.process_time() - cpu_s,
                "anonymous_bytes": anonymous_bytes(),
            }
            print(json.dumps(found), flush=True)


# -- the measurement -------------------------------------------------------------------------------------------------


async def fill(client: Client, records: int, chunk_rows: int) -> None:
    """Write the stream."""
    await client.admin.create_stream(STREAM, streamlets=2)
    batch = make_batch(RECORD_BYTES, chunk_rows)
    async with client.producer(chunk_bytes_max=max(MIB, chunk_rows * CHUNK_BYTES_PER_ROW)) as producer:
        for number in range(records // chunk_rows):
            await producer.send_batch(STREAM, batch, streamlet=number % 2)
        await producer.flush()


def copy_s_per_gb() -> float:
    """The best time of one core to copy a GB."""
    source, target = b"\1" * COPY_BYTES, memoryview(bytearray(COPY_BYTES))
    target[:] = source
    begun_s = time.process_time()
    for _ in range(4):
        target[:] = source
    return (time.process_time() - begun_s) / (4 * COPY_BYTES / 1e9)


async def passes(made: Broker, arguments: argparse.Namespace, count: int, records: int) -> list[dict[str, Any]]:
    """Let the consumer read `count` times; returns its report of each pass, and the broker's resident memory after
    it.
    """
    task = {
        "bootstrap": made.cluster.bootstrap,
        "arena": str(made.arena),
        "passes": count,
        "verify": arguments.verify,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.push_loop", "--worker", json.dumps(task)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
    )
    if process.stdout is None:
        raise Wrong("no output")
    found: list[dict[str, Any]] = []
    handed_over = 0
    said_s = time.monotonic()
    try:
        while len(found) < count:
            async with asyncio.timeout(TIMEOUT_S):
                line = await process.stdout.readline()
            if not line:
                raise Wrong(f"the consumer ended with code {await process.wait()}")
            one = json.loads(line) | {f"broker_{name}": value for name, value in made.memory().items()}
            if one["records"] != records:
                raise Wrong(f"pass {len(found)} had {one['records']:,} of {records:,} records")
            found.append(one)
            handed_over += one["chunk_bytes"]
            if time.monotonic() - said_s > 10:
                said_s = time.monotonic()
                say(f"{handed_over / 1e9:.0f} GB")
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return found


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Fill, loop, and check."""
    figures = Figures("push_loop", arguments, root)
    records = arguments.stream_bytes // RECORD_BYTES // arguments.chunk_rows * arguments.chunk_rows
    arena_bytes = (records * CHUNK_BYTES_PER_ROW // (8 * MIB) + 8) * 8 * MIB
    async with (
        broker(None, arena_bytes=arena_bytes, segment_bytes=8 * MIB) as made,
        await Client.connect(made.cluster.bootstrap) as client,
    ):
        await fill(client, records, arguments.chunk_rows)
        bounds = await client.bounds(STREAM)
        stream_bytes = sum(entry.length_bytes for entries in bounds.values() for entry in entries)
        count = -(-arguments.bytes // stream_bytes)
        say(f"{count} times {stream_bytes / 1e9:.2f} GB")
        before, before_s = await made.metrics(), run_s(made.pid)
        found = await passes(made, arguments, count, records)
        broker_s = run_s(made.pid) - before_s
        await made.until(lambda metrics: metrics["arena_slots_leased"] == 0)
        after = await made.metrics()

    handed_over = sum(one["chunk_bytes"] for one in found)
    counted = {name: after[name] - before[name] for name in ("bytes_read_total", "push_bytes_total", "push_runs_total")}
    size_gb = handed_over / 1e9
    figures.add("handed over", size_gb, "GB")
    figures.add("pushed, says the broker", counted["push_bytes_total"] / 1e9, "GB")
    figures.add("copied for reads, says the broker", counted["bytes_read_total"] / handed_over, "bytes per byte")
    looked = [one for one in found if one["looks"]]
    timed = [one for one in found if not one["looks"]] or found
    in_place = sum(one["in_place_bytes"] for one in looked) / sum(one["chunk_bytes"] for one in looked)
    figures.add("in the mapped arena, at the consumer", in_place, "of what was looked at")
    figures.add("runs", counted["push_runs_total"] / size_gb, "per GB")
    figures.add("broker's CPU", broker_s / size_gb, "s/GB")
    figures.add("CPU of one copy", copy_s_per_gb(), "s/GB")
    for one in timed:
        figures.add("a pass", one["chunk_bytes"] / 1e9 / one["seconds"], "GB/s")
        figures.add("consumer's CPU", one["cpu_s"] / (one["chunk_bytes"] / 1e9), "s/GB")
    consumer_s_per_gb = sum(one["cpu_s"] for one in timed) / (sum(one["chunk_bytes"] for one in timed) / 1e9)
    figures.add("per core of broker and consumer", 1 / (broker_s / size_gb + consumer_s_per_gb), "GB/s")
    early, last = found[len(found) // 10], found[-1]
    growth = last["broker_anon"] - early["broker_anon"]
    figures.add("broker's own memory, after a tenth", early["broker_anon"] / MIB, "MiB")
    figures.add("broker's own memory, at the end", last["broker_anon"] / MIB, "MiB")
    figures.add("consumer's own memory, after a tenth", early["anonymous_bytes"] / MIB, "MiB")
    figures.add("consumer's own memory, at the end", last["anonymous_bytes"] / MIB, "MiB")
    figures.print()
    if counted["bytes_read_total"] or any(one["in_place_bytes"] != one["chunk_bytes"] for one in looked):
        raise Wrong("bytes were copied")
    if counted["push_bytes_total"] < handed_over:
        raise Wrong("more was handed over than pushed")
    if growth > arguments.growth_bytes_max:
        raise Wrong(f"the broker's memory has grown by {growth:,} bytes")


def main() -> int:
    """Measure, or be the consumer."""
    made = parser(__doc__)
    made.add_argument("--bytes", type=size, default=100 * 10**9, help="to hand over in all")
    made.add_argument("--stream-bytes", type=size, default=1 * GIB, help="values of the stream")
    made.add_argument("--chunk-rows", type=int, default=10_000, help="records of 100 bytes in a chunk")
    made.add_argument("--growth-bytes-max", type=size, default=8 * MIB)
    made.add_argument(
        "--no-verify", dest="verify", action="store_false", help="the consumer checks neither checksums nor payloads"
    )
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker is not None:
        die_with_parent()
        asyncio.run(consume(**json.loads(arguments.worker)))
        return 0
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
