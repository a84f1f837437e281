"""Writes over gRPC, the open interface, as clients in other languages make them.

A client knows only the proto files and the chunk's header (docs/format.md). It is a process of its own that sends one
chunk a request over one stream, with the default settings of its gRPC, and keeps some of them in flight; chunks are
made before but for their sequence. The first half of the requests is to warm up.

The client in Java (``GrpcWrites.java``) needs a JDK and ``mvn``, which brings gRPC and protobuf for Java into
``~/.cache/kera-bench``, once. If something is missing, only the client in Python is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
import uvloop
from crc32c import crc32c

from bench.common import Broker, Figures, alternating, broker, directory, parser, sample_chunk, say, size
from kera.cli.bench._cpu import cpu_seconds
from kera.client import Client
from kera.client.producing.encoding.conforming import conform
from kera.client.producing.encoding.payloads import payloads
from kera.core.base.freed_memory import keep_freed_memory
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import GIB, KIB, MIB
from kera.v1 import broker_pb2

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "kera-bench"
GRPC_JAVA, PROTOBUF_JAVA = "1.76.0", "4.33.0"
BRING_S = 300.0
PATH = "/kera.v1.Broker/MultiWriteChunks"
VALUE_BYTES = 100
RECORD_BYTES_MAX = 140
"""Size of a record in a chunk: somewhat more than it takes, so that a request is not over its nominal size."""
SEQUENCE_AT, CHECKSUM_AT, CHECKSUM_END = 48, 84, 88
"""In a chunk's header."""


# -- the client in Python --------------------------------------------------------------------------------------


async def load(address: str, template: bytes, in_flight: int, requests: int) -> dict[str, float]:
    """Send `requests`; returns the figures of the second half."""
    keep_freed_memory()  # the behaviour of Python's allocator is not the question here
    waiting, times, begun_s, begun_cpu_s = deque[float](), list[float](), 0.0, 0.0
    async with grpc.aio.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream(PATH)
        call, sent = stream(), 0
        for answered in range(requests):
            if answered == requests // 2:
                begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            while sent < requests and len(waiting) < in_flight:
                waiting.append(time.perf_counter())
                await call.write(request(template, sent))
                sent += 1
            response = broker_pb2.MultiWriteChunksResponse.FromString(await call.read())
            times.append(time.perf_counter() - waiting.popleft())
            if response.HasField("error") or any(status.HasField("error") for status in response.statuses):
                raise SystemExit(str(response))
        seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    times = sorted(times[requests // 2 :])
    p50, p99 = (times[len(times) * percent // 100] * 1e3 for percent in (50, 99))
    return {"requests": len(times), "seconds": seconds, "cpu_s": cpu_s, "p50_ms": p50, "p99_ms": p99}


def request(template: bytes, sequence: int) -> bytes:
    """A request with the chunk `template`, as the producer's next chunk."""
    head = bytearray(template[:CHECKSUM_AT])
    struct.pack_into("<Q", head, SEQUENCE_AT, sequence)
    chunk = b"".join((head, struct.pack("<I", crc32c(head)), memoryview(template)[CHECKSUM_END:]))
    message = broker_pb2.MultiWriteChunksRequest(request_id=sequence, chunk_count=1, chunks=chunk)
    return message.SerializeToString()


# -- the client in Java ----------------------------------------------------------------------------------------


class Missing(Exception):
    """The client in Java lacks something that could not be fetched."""


def java_client(where: Path) -> list[str]:
    """The command of the client in Java, made of the proto files. Raises `Missing`."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise Missing(f"there is no {tool}")
    cache = CACHE / f"grpc-java-{GRPC_JAVA}-{PROTOBUF_JAVA}"
    if not cache.is_dir():
        made = where / "java-parts"
        made.mkdir()
        pom = made / "pom.xml"
        grpc_parts = [("io.grpc", name, GRPC_JAVA) for name in ("grpc-netty-shaded", "grpc-protobuf", "grpc-stub")]
        dependencies = "".join(
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version>"
            "</dependency>"
            for group, name, version in [*grpc_parts, ("com.google.protobuf", "protobuf-java", PROTOBUF_JAVA)]
        )
        pom.write_text(
            "<project><modelVersion>4.0.0</modelVersion><groupId>bench</groupId><artifactId>bench</artifactId>"
            f"<version>1</version><dependencies>{dependencies}</dependencies></project>"
        )
        maven = ["mvn", "-B", "-q", "-f", str(pom), f"-DoutputDirectory={made}"]
        run_tool([*maven, "dependency:copy-dependencies", "-DincludeScope=runtime"])
        compiler = f"com.google.protobuf:protoc:{PROTOBUF_JAVA}:exe:linux-x86_64"
        run_tool([*maven, "dependency:copy", f"-Dartifact={compiler}"])
        cache.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, cache)
    (protoc,) = cache.glob("protoc-*.exe")
    protoc.chmod(0o755)
    out = where / "java"
    out.mkdir()
    proto = HERE.parent / "proto"
    files = [str(path) for path in (proto / "kera" / "v1").glob("*.proto")]
    run_tool([str(protoc), f"-I{proto}", f"--java_out={out}", *files])
    sources = [str(path) for path in (*out.rglob("*.java"), HERE / "GrpcWrites.java")]
    run_tool(["javac", "-nowarn", "-cp", f"{cache}/*", "-d", str(out), *sources])
    return ["java", "-XX:+UseParallelGC", "-Xmx512m", "-cp", f"{out}:{cache}/*", "GrpcWrites"]


def run_tool(argv: list[str]) -> None:
    """Run a command to its end. Raises `Missing`."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BRING_S, check=False)
    if done.returncode:
        raise Missing(f"{Path(argv[0]).name} failed: {(done.stdout + done.stderr).strip()[-500:]}")


# -- the measurement -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of client that is measured."""

    client: list[str]
    """Its command."""
    request_bytes: int
    in_flight: int


async def template(client: Client, name: str, request_bytes: int) -> bytes:
    """The first chunk of a producer, for its own stream."""
    stream = await client.admin.create_stream(name, durability="leader")
    batch = pa.record_batch({"value": [os.urandom(VALUE_BYTES) for _ in range(request_bytes // RECORD_BYTES_MAX)]})
    (payload,) = payloads(conform(batch, stream, 0), stream, 1 << 30, 0)
    made = sample_chunk(
        payload.payload,
        payload.record_count,
        stream_id=stream.stream_id,
        schema_id=stream.schema_id,
        producer_id=1_000_000,
    )
    return made.to_bytes()


async def measure(
    arguments: argparse.Namespace, daemon: Broker, name: str, kind: Kind, where: Path, figures: Figures
) -> None:
    """One round of one kind."""
    async with await Client.connect(daemon.cluster.bootstrap) as client:
        chunk = await template(client, "s", kind.request_bytes)
        file = where / "chunk"
        file.write_bytes(chunk)
        stream = await client.admin.describe_stream("s")
        address = next(iter(stream.brokers.values())).grpc_address
        requests = min(arguments.bytes // len(chunk), arguments.requests_max)
        before_s = cpu_seconds([daemon.pid])
        child = await asyncio.create_subprocess_exec(
            *kind.client, address, str(file), str(kind.in_flight), str(requests),
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"}, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        result = json.loads((await child.communicate())[0])
        broker_s = cpu_seconds([daemon.pid]) - before_s
        await client.admin.delete_stream("s")
    gigabytes = result["requests"] * len(chunk) / 1e9
    figures.add(f"{name}: throughput", gigabytes * 1e3 / result["seconds"], "MB/s")
    for percentile in ("p50", "p99"):
        figures.add(f"{name}: time to acknowledgement, {percentile}", result[f"{percentile}_ms"], "ms")
    figures.add(f"{name}: CPU of the client", result["cpu_s"] / gigabytes, "s/GB")
    figures.add(f"{name}: CPU of the broker", broker_s / (requests * len(chunk) / 1e9), "s/GB")
    figures.add(f"{name}: CPU of the broker, each request", broker_s / requests * 1e6, "us")


async def run(arguments: argparse.Namespace, where: Path) -> None:
    """All kinds, in turn."""
    figures = Figures("grpc_writes", arguments, where)
    clients = {"Python": [sys.executable, "-m", "bench.grpc_writes", "--load"]}
    try:
        clients["Java"] = java_client(where)
    except Missing as missing:
        figures.notes["Java"] = f"not measured: {missing}"
    kinds = {
        f"{language}, {length >> 10} KiB, {in_flight} in flight": Kind(command, length, in_flight)
        for language, command in clients.items()
        for length in arguments.request_bytes
        for in_flight in arguments.in_flight
    }
    async with broker(None, arena_bytes=arguments.memory_bytes, segment_bytes=8 * MIB) as daemon:
        for name in alternating(list(kinds), arguments.rounds):
            say(name)
            await measure(arguments, daemon, name, kinds[name], where, figures)
    figures.print()


def main() -> int:
    """Measure."""
    if sys.argv[1:2] == ["--load"]:
        die_with_parent()
        address, file, in_flight, requests = sys.argv[2:]
        print(json.dumps(uvloop.run(load(address, Path(file).read_bytes(), int(in_flight), int(requests)))))
        return 0
    made = parser(__doc__)
    made.add_argument("--request-bytes", type=size, nargs="+", default=[64 * KIB, MIB])
    made.add_argument("--in-flight", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--bytes", type=size, default=2 * GIB, help="of a round, if --requests-max allows it")
    made.add_argument("--requests-max", type=int, default=8000, help="of a round")
    made.add_argument(
        "--memory-bytes",
        type=size,
        default=3 * GIB,
        help="of the broker: more than a round, so that no disk is waited for",
    )
    made.add_argument("--rounds", type=int, default=3)
    arguments = made.parse_args()
    with directory(arguments) as where:
        uvloop.run(run(arguments, where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
