"""Small requests as fast as daemons can handle them, with the native core and without: ``python -m
bench.small_requests``.

A program in C (``small_requests.c``, compiled here) sends requests of one chunk over several connections, each with
some in flight, and does next to nothing else: so broker and backup are measured, as far as two shared cores allow. Each
connection is a producer of its own with a streamlet of its own. Then the same at a fixed rate over one connection, for
what an answer takes. `bench.replicated_requests` measures the same from Python, and `kera bench produce` with the whole
SDK.

Clusters with either core run beside each other and take turns. Chunks have records of 100 bytes, and are of the version
that the SDK makes with that core. That the broker has appended exactly what was sent is checked after each measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.common import (
    BROKER,
    IN_MEMORY,
    Broker,
    Figures,
    describe,
    directory,
    machine,
    parser,
    sample_chunk,
    say,
    size,
)
from bench.cpu import run_s
from kera.cli.bench._payload import make_batch
from kera.client import Client
from kera.client.producing.encoding.payloads import payloads
from kera.client.types import StreamDescription
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.base.settings import GIB, KIB
from kera.core.errors import UnknownStream
from kera.core.format.chunk import EncodedChunk
from kera.core.native import VARIABLE, native
from kera.core.rpc import api
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "bench/small_requests.c", ROOT / "core/native/crc32c.c")
VALUE_BYTES = 100
STREAM = "s"
PRODUCER_ID = 1_000_000
"""Producer id of the first connection."""
WARM_UP_S = 0.3
AT_A_RATE = 1000.0
CORES = {"native": "1", "Python": "0"}
"""By name: the value of the variable that chooses the core."""


class Load(NamedTuple):
    """The load and its daemons."""

    core: str
    copies: int
    """Copies on backups, besides the broker's."""
    request_bytes: int

    def __str__(self) -> str:
        return f"{self.core} core, {self.copies} copies, {self.request_bytes / KIB:g} KiB"


class NoCompiler(Exception):
    """The programs in C cannot be built; the message says what to install."""


def compiler() -> list[str]:
    """The command of a C compiler. Raises `NoCompiler`."""
    for words in map(shlex.split, (os.environ.get("CC", ""), "cc", "gcc", "clang")):
        if words and shutil.which(words[0]):
            return words
    raise NoCompiler("a part of this is in C, and there is no compiler: apt install gcc libc6-dev")


def compile_load(folder: Path) -> Path:
    """Compile the load generator in `folder`. Raises `NoCompiler`."""
    made = folder / "small_requests"
    command = [*compiler(), "-std=c11", "-O2", f"-I{ROOT / 'core/native'}", *map(str, SOURCES), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


def chunk_of(stream: StreamDescription, request_bytes: int, producer_id: int, *, lean: bool) -> EncodedChunk:
    """The first chunk of a producer, with as many records as fit; each producer has its own streamlet."""
    for rows in range(request_bytes // VALUE_BYTES, 0, -1):
        (payload,) = payloads(make_batch(VALUE_BYTES, rows), stream, 1 << 30, 0, lean=lean)
        chunk = sample_chunk(
            payload.payload,
            payload.record_count,
            stream_id=stream.stream_id,
            schema_id=stream.schema_id,
            streamlet_id=producer_id % stream.config.streamlets,
            producer_id=producer_id,
            version=payload.version,
        )
        if chunk.chunk_bytes <= request_bytes:
            return chunk
    raise ValueError(f"no record of {VALUE_BYTES} bytes fits into a chunk of {request_bytes}")


def frames_of(chunks: Sequence[EncodedChunk]) -> bytes:
    """A request for each chunk, one after the other."""
    message = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
    requests = (
        encode_frame(FrameKind.REQUEST, api.MULTI_WRITE_CHUNKS, 1, message, chunk, BULK_BYTES_MAX) for chunk in chunks
    )
    return b"".join(bytes(piece) for request in requests for piece in request)


class Measurement:
    """Daemons with both cores, and their measurements."""

    def __init__(self, program: Path, arguments: argparse.Namespace, folder: Path) -> None:
        self.figures = Figures("small_requests", arguments, folder)
        self._program = program
        self._arguments = arguments
        self._folder = folder
        self._clusters: dict[str, LocalCluster] = {}

    async def start(self, stack: AsyncExitStack, cores: Sequence[str]) -> None:
        """Start a broker and a backup with each core, until the stack ends."""
        for core in cores:
            self._clusters[core] = await stack.enter_async_context(
                LocalCluster(
                    backups=1,
                    arena_bytes=self._arguments.memory_bytes,
                    backup_memory_bytes=self._arguments.memory_bytes,
                    broker_settings={"metrics_port": 0, **IN_MEMORY},
                    backup_settings=IN_MEMORY,
                    env={VARIABLE: CORES[core]},
                )
            )

    async def play(self, load: Load) -> None:
        """Play a round: as fast as possible, then at a rate."""
        cluster = self._clusters[load.core]
        fast = await self._sent(cluster, load, 0.0)
        figures, name, seconds = self.figures, str(load), self._arguments.seconds
        figures.add(f"{name}: requests", fast["answered"] / seconds, "1/s")
        figures.add(f"{name}: throughput", fast["answered"] * fast["chunk_bytes"] / seconds / 1e6, "MB/s")
        for process in ("load", BROKER, "backup-1"):
            figures.add(f"{name}: {process}", fast[process] / fast["sent"] / fast["chunk_bytes"] * 1e9, "CPU-s/GB")
        steady = await self._sent(cluster, load, AT_A_RATE)
        for percentile in ("p50", "p99"):
            figures.add(f"{name}: {percentile} at {AT_A_RATE:,.0f}/s", steady[f"{percentile}_us"], "us")

    async def _sent(self, cluster: LocalCluster, load: Load, rate: float) -> dict[str, Any]:
        """The load generator's output, the length of a chunk, and the processor seconds of each process."""
        stream = await self._new_stream(cluster, load.copies)
        producers = range(PRODUCER_ID, PRODUCER_ID + self._arguments.connections)
        lean = load.core == "native"
        chunks = [chunk_of(stream, load.request_bytes, producer_id, lean=lean) for producer_id in producers]
        frames, path = frames_of(chunks), self._folder / "frames"
        path.write_bytes(frames)
        socket = next(iter(stream.brokers.values())).frames_unix_path
        numbers = (len(frames) // len(chunks), self._arguments.in_flight, rate, WARM_UP_S, self._arguments.seconds)
        broker, before_s = Broker(cluster), each_s(cluster)
        before = (await broker.metrics())["chunks_appended_total"]
        child = await asyncio.create_subprocess_exec(
            self._program, socket, path, *map(str, numbers), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
        if child.returncode:
            raise SystemExit(f"the load generator has ended with {child.returncode}")
        found: dict[str, Any] = json.loads(output)
        spent_s = {name: seconds - before_s[name] for name, seconds in each_s(cluster).items()}
        appended = (await broker.metrics())["chunks_appended_total"] - before
        if appended != found["sent"]:
            raise SystemExit(f"{found['sent']} chunks were acknowledged, and the broker has appended {appended:.0f}")
        return {**found, **spent_s, "load": found["cpu_s"], "chunk_bytes": chunks[0].chunk_bytes}

    async def _new_stream(self, cluster: LocalCluster, copies: int) -> StreamDescription:
        """A stream in place of the last one, whose memory it may use."""
        async with await Client.connect(cluster.bootstrap) as client:
            with contextlib.suppress(UnknownStream):
                await client.admin.delete_stream(STREAM)
            return await client.admin.create_stream(
                STREAM,
                streamlets=self._arguments.connections,
                replication=copies,
                durability="replicated" if copies else "leader",
            )


def each_s(cluster: LocalCluster) -> dict[str, float]:
    """Processor time of each daemon so far."""
    return {name: run_s(pid) for name, pid in cluster.processes.items()}


def table(figures: Figures, loads: Sequence[Load]) -> str:
    """A line for each load, in Markdown."""
    rows = [
        "| core | copies | request | requests/s | MB/s | CPU-s/GB: load | broker | backup | p50, µs | p99, µs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for load in loads:
        head = [load.core, str(load.copies), f"{load.request_bytes / KIB:g} KiB"]
        cells = [figures.cell(name) for name in figures.names if name.startswith(f"{load}: ")]
        rows.append(f"| {' | '.join(head + cells)} |")
    return "\n".join(rows)


async def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Run all rounds."""
    program, cores = compile_load(folder), list(CORES)
    if native is None:
        say("there is no native core here: only Python is measured")
        cores.remove("native")
    where = machine(folder)
    loads = [
        Load(core, copies, request_bytes)
        for copies in (0, 1)
        for request_bytes in arguments.request_bytes
        for core in cores
    ]
    measurement = Measurement(program, arguments, folder)
    async with AsyncExitStack() as stack:
        await measurement.start(stack, cores)
        for number in range(arguments.rounds):
            say(f"round {number + 1} of {arguments.rounds}")
            for load in loads:
                await measurement.play(load)
    figures = measurement.figures
    print(f"{describe(where)}\n\n{table(figures, loads)}\n\n{figures.json()}")


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--request-bytes", type=size, nargs="+", default=[KIB, 16 * KIB])
    made.add_argument("--connections", type=int, default=4)
    made.add_argument("--in-flight", type=int, default=16, help="requests of each connection")
    made.add_argument("--seconds", type=float, default=1.0, help="of each measurement, besides those that warm up")
    made.add_argument("--memory-bytes", type=size, default=3 * GIB, help="of broker and backup: it has all of a round")
    made.add_argument("--rounds", type=int, default=3)
    arguments = made.parse_args()
    os.environ.setdefault(DIE_WITH_PARENT_VARIABLE, "1")
    with directory(arguments) as folder:
        try:
            uvloop.run(run(arguments, folder))
        except NoCompiler as error:
            say(str(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
