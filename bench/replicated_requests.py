"""Requests of one size through broker and backup: the capacity of the daemons, without the producer's own work.

Each load process has a connection of its own, keeps a number of requests in flight, and sends chunks that were encoded
before but for their headers (the sequence changes): so transport, broker and backup are measured, as far as two shared
cores allow. `kera bench produce` measures the same with the whole SDK.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvloop

from bench.common import BROKER, IN_MEMORY, Figures, alternating, directory, parser, sample_chunk, say, size
from bench.cpu import each_s
from kera.cli.bench._latency import Latencies
from kera.client import Client
from kera.client.producing.encoding.conforming import conform
from kera.client.producing.encoding.payloads import payloads
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import GIB, KIB, MIB
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2

VALUE_BYTES = 100
TIMEOUT_S = 30.0


async def load(arguments: argparse.Namespace) -> dict[str, object]:
    """Send for some seconds; returns the figures."""
    latencies, sent_bytes, waiting = Latencies(), 0, deque[tuple[int, asyncio.Future[Any]]]()
    async with await Client.connect(arguments.bootstrap) as client:
        stream = await client.admin.describe_stream("s")
        broker = next(iter(stream.brokers.values()))
        rows = arguments.request_bytes // (VALUE_BYTES + 40)
        values = [random.Random(row).randbytes(VALUE_BYTES) for row in range(rows)]
        batch = pa.record_batch({"value": values})
        (payload,) = payloads(conform(batch, stream, 0), stream, 1 << 30, 0)
        channel = await FrameChannel.connect_unix(broker.frames_unix_path, timeout_s=TIMEOUT_S)
        begun_s = time.perf_counter()
        sequence = 0
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        while (now_s := time.perf_counter()) < begun_s + arguments.seconds or waiting:
            while len(waiting) < arguments.in_flight and now_s < begun_s + arguments.seconds:
                chunk = sample_chunk(
                    payload.payload,
                    payload.record_count,
                    stream_id=stream.stream_id,
                    schema_id=stream.schema_id,
                    streamlet_id=arguments.number % stream.config.streamlets,
                    producer_id=1_000_000 + os.getpid(),
                    sequence=sequence,
                )
                sequence += 1
                sent_bytes += chunk.chunk_bytes
                future = channel.submit(api.MULTI_WRITE_CHUNKS, request, chunk, timeout_s=TIMEOUT_S)
                waiting.append((time.perf_counter_ns(), future))
            sent_ns, oldest = waiting.popleft()
            reply = await oldest
            latencies.add(time.perf_counter_ns() - sent_ns)
            (status,) = reply.message.statuses
            if status.HasField("error"):
                raise SystemExit(status.error.message)
        seconds = time.perf_counter() - begun_s
        await channel.close()
    cpu = time.process_time()
    return {"bytes": sent_bytes, "seconds": seconds, "requests": sequence, "latency": latencies.encode(), "cpu_s": cpu}


def metrics(cluster: LocalCluster) -> dict[str, float]:
    """The broker's metrics, by name."""
    url = f"http://{cluster.ready[BROKER]['metrics_address']}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run all kinds, in turn."""
    figures = Figures("replicated_requests", arguments, root)
    names = [f"R = {replication}, {length >> 10} KiB" for replication in (0, 1) for length in arguments.request_bytes]
    for number, name in enumerate(alternating(names, arguments.rounds)):
        replication, length = divmod(names.index(name), len(arguments.request_bytes))
        say(name)
        async with LocalCluster(
            backups=1,
            arena_bytes=arguments.memory_bytes,
            backup_memory_bytes=arguments.memory_bytes,
            broker_settings={"metrics_port": 0, **IN_MEMORY},
            backup_settings=IN_MEMORY,
            log_dir=root / f"logs-{number}",
        ) as cluster:
            async with await Client.connect(cluster.bootstrap) as client:
                level = "replicated" if replication else "leader"
                await client.admin.create_stream("s", replication=replication, durability=level)
            await measure(arguments, cluster, name, arguments.request_bytes[length], figures)
    figures.print()


async def measure(
    arguments: argparse.Namespace, cluster: LocalCluster, name: str, request_bytes: int, figures: Figures
) -> None:
    """Measure one round of one kind."""
    before = each_s(cluster.processes)
    children = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.replicated_requests", "--load", "--bootstrap", cluster.bootstrap,
            "--number", str(number), "--seconds", str(arguments.seconds), "--in-flight", str(arguments.in_flight),
            "--request-bytes", str(request_bytes),
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"}, stdout=asyncio.subprocess.PIPE,
        )
        for number in range(arguments.producers)
    ]  # fmt: skip
    outputs = [(await child.communicate())[0] for child in children]
    results = [json.loads(output) for output in outputs]
    cpu = {child: seconds - before[child] for child, seconds in each_s(cluster.processes).items()}
    total = sum(result["bytes"] for result in results)
    seconds = max(result["seconds"] for result in results)
    figures.add(f"{name}: throughput", total / seconds / 1e6, "MB/s")
    latencies = Latencies()
    latencies.add_encoded(*(result["latency"] for result in results))
    summary = latencies.summary() or {}
    for percentile in ("p50", "p99"):
        figures.add(f"{name}: time to acknowledgement, {percentile}", summary[percentile] / 1e3, "ms")
    found = metrics(cluster)
    batches = found["kera_broker_replication_batches_total"]
    if batches:
        figures.add(
            f"{name}: requests per batch to the backup", found["kera_broker_write_requests_total"] / batches, ""
        )
    for child in ("broker-1", "backup-1"):
        figures.add(f"{name}: CPU of {child}", cpu[child] / (total / 1e9), "s/GB")
        figures.add(
            f"{name}: CPU of {child}, each request", cpu[child] / sum(r["requests"] for r in results) * 1e6, "us"
        )


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--request-bytes", type=size, nargs="+", default=[16 * KIB, 64 * KIB, MIB])
    made.add_argument("--in-flight", type=int, default=16)
    made.add_argument("--producers", type=int, default=1)
    made.add_argument("--seconds", type=float, default=3.0)
    made.add_argument(
        "--memory-bytes", type=size, default=4 * GIB, help="of broker and backup: enough that no disk is waited for"
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--bootstrap", help=argparse.SUPPRESS)
    made.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.load:
        die_with_parent()
        (arguments.request_bytes,) = arguments.request_bytes
        print(json.dumps(uvloop.run(load(arguments))))
        return 0
    with directory(arguments) as root:
        uvloop.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
