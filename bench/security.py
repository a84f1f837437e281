"""The cost of security: chunks written and read over TCP and gRPC, plain, authenticated, encrypted, and both, in turn.

The authenticated client is a user with a password, with rights to write and read.

A load process keeps requests in flight on one connection and sends chunks that were encoded before but for their
headers: so transport and broker are measured, as far as the shared cores allow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvloop

from bench.common import IN_MEMORY, Figures, alternating, directory, parser, sample_chunk, say, size
from kera.cli.bench._latency import Latencies
from kera.client import Client, ClientSettings
from kera.client.cluster.cluster import Cluster
from kera.client.producing.encoding.conforming import conform
from kera.client.producing.encoding.payloads import payloads
from kera.core.access.credentials import of_daemon
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB
from kera.core.credential_settings import secure
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.runtime import MACHINE, secured
from kera.core.security.issuing import Authority
from kera.core.security.settings import tls_of
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2

VALUE_BYTES = 1000
TIMEOUT_S = 30.0
WAYS = ("tcp", "gRPC")
WITH = ("", ", authenticated", " over TLS", " over TLS, authenticated")
KINDS = tuple(way + what for way in WAYS for what in WITH)
USER, PASSWORD = "bench", "correct horse battery"
SECRET = "a secret that all daemons of the cluster have"  # noqa: S105 - of clusters that live for seconds


def client_settings(arguments: argparse.Namespace, **settings: Any) -> ClientSettings:
    """The load's settings: its authorities, and its user."""
    known: dict[str, Any] = {"user": USER, "password": PASSWORD} if arguments.authenticated else {}
    return ClientSettings(tls_ca=arguments.ca, **known, **settings)


async def load(arguments: argparse.Namespace) -> dict[str, object]:
    """Write for some seconds, then read everything back; returns the figures."""
    settings = client_settings(arguments)
    runtime = secure(MACHINE, settings)
    known: dict[str, Any] = {"tls": runtime.tls, "introduction": runtime.introduction}
    async with await Client.connect(arguments.bootstrap, settings) as client:
        stream = await client.admin.describe_stream("s")
        broker = next(iter(stream.brokers.values()))
        rows = arguments.request_bytes // (VALUE_BYTES + 20)
        values = [random.Random(row).randbytes(VALUE_BYTES) for row in range(rows)]
        (payload,) = payloads(conform(pa.record_batch({"value": values}), stream, 0), stream, 1 << 30, 0)
        channel: Channel = (
            await FrameChannel.connect_tcp(broker.frames_address, timeout_s=TIMEOUT_S, **known)
            if arguments.transport == "tcp"
            else GrpcChannel(broker.grpc_address, **known)
        )

        def write(sequence: int) -> asyncio.Future[Any]:
            chunk = sample_chunk(
                payload.payload,
                payload.record_count,
                stream_id=stream.stream_id,
                schema_id=stream.schema_id,
                streamlet_id=0,
                producer_id=1_000_000 + os.getpid(),
                sequence=sequence,
            )
            request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
            return channel.submit(api.MULTI_WRITE_CHUNKS, request, chunk, timeout_s=TIMEOUT_S)

        latencies, waiting, sequence = Latencies(), deque[tuple[int, asyncio.Future[Any]]](), 0
        begun_s = time.perf_counter()
        while (now_s := time.perf_counter()) < begun_s + arguments.seconds or waiting:
            while len(waiting) < arguments.in_flight and now_s < begun_s + arguments.seconds:
                waiting.append((time.perf_counter_ns(), write(sequence)))
                sequence += 1
            sent_ns, oldest = waiting.popleft()
            (status,) = (await oldest).message.statuses
            latencies.add(time.perf_counter_ns() - sent_ns)
            if status.HasField("error"):
                raise SystemExit(status.error.message)
        write_s = time.perf_counter() - begun_s
        await channel.close()
    transport = "tcp" if arguments.transport == "tcp" else "grpc"
    settings = client_settings(arguments, transport=transport)
    read_bytes, begun_s = 0, time.perf_counter()
    async with await Client.connect(arguments.bootstrap, settings) as client:
        async for chunk in client.consumer("s", start="earliest", end="latest", shared_memory="never").batches():
            read_bytes += chunk.header.payload_bytes
    return {
        "write_mb_per_s": sequence * len(payload.payload) / write_s / 1e6,
        "read_mb_per_s": read_bytes / (time.perf_counter() - begun_s) / 1e6,
        "latency": latencies.encode(),
    }


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run all kinds, in turn."""
    figures = Figures("security", arguments, root)
    authority, _ = Authority.open_or_make(root / "certificates")
    one = authority.issue("127.0.0.1")
    secret = root / "secret"
    secret.write_text(SECRET)
    certificates = {"tls_ca": authority.path, "tls_cert": one.cert, "tls_key": one.key}
    kinds = [kind for kind in KINDS if kind.startswith(tuple(arguments.transports))]
    for number, kind in enumerate(alternating(kinds, arguments.rounds)):
        say(kind)
        encrypted, authenticated = "TLS" in kind, "authenticated" in kind
        settings: dict[str, object] = dict(certificates) if encrypted else {}
        if authenticated:
            settings |= {"security": True, "cluster_secret_file": secret}
        async with LocalCluster(
            arena_bytes=arguments.memory_bytes,
            coordinator_settings=settings,
            broker_settings={**settings, **IN_MEMORY},
            log_dir=root / f"logs-{number}",
        ) as cluster:
            ca = authority.path if encrypted else None
            await prepare(cluster.bootstrap, ca, authenticated=authenticated)
            await measure(arguments, cluster.bootstrap, kind, ca, figures, authenticated=authenticated)
    for what in ("write", "read"):
        for way in arguments.transports:
            for extra in WITH[1:]:
                ratio = figures.median(f"{way}{extra}: {what}") / figures.median(f"{way}: {what}")
                figures.notes[f"{way}, {what}: {extra.strip(', ')} / plain"] = f"{ratio:.2f}"
    figures.print()


async def prepare(bootstrap: str, ca: Path | None, *, authenticated: bool) -> None:
    """Create a stream, and a user with the rights to write and read it."""
    introduction = of_daemon(SECRET) if authenticated else None
    runtime = secured(MACHINE, tls_of(ClientSettings(tls_ca=ca)), introduction)
    async with Client(Cluster(bootstrap, ClientSettings(), runtime=runtime)) as client:
        await client.admin.create_stream("s", durability="leader")
        if authenticated:
            await client.access.create_user(USER, PASSWORD)
            await client.access.grant(f"user:{USER}", ["read", "write"], "stream:s")


async def measure(
    arguments: argparse.Namespace, bootstrap: str, kind: str, ca: Path | None, figures: Figures, *, authenticated: bool
) -> None:
    """Measure one round of one kind."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.security", "--load", "--bootstrap", bootstrap,
        "--transport", "tcp" if kind.startswith("tcp") else "gRPC", "--seconds", str(arguments.seconds),
        "--in-flight", str(arguments.in_flight), "--request-bytes", str(arguments.request_bytes),
        *(("--ca", str(ca)) if ca else ()), *(("--authenticated",) if authenticated else ()),
        env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"}, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    result = json.loads((await child.communicate())[0])
    for what in ("write", "read"):
        figures.add(f"{kind}: {what}", result[f"{what}_mb_per_s"], "MB/s")
    latencies = Latencies()
    latencies.add_encoded(result["latency"])
    summary = latencies.summary() or {}
    for percentile in ("p50", "p99"):
        figures.add(f"{kind}: time to acknowledgement, {percentile}", summary[percentile] / 1e3, "ms")


def main() -> None:
    """Measure, or be the load."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=2.0)
    made.add_argument("--in-flight", type=int, default=8)
    made.add_argument("--request-bytes", type=size, default=256 * KIB)
    made.add_argument("--memory-bytes", type=size, default=4096 * MIB)
    made.add_argument("--transports", nargs="+", choices=WAYS, default=list(WAYS))
    for name in ("--bootstrap", "--transport"):
        made.add_argument(name, default="", help=argparse.SUPPRESS)
    made.add_argument("--ca", type=Path, default=None, help=argparse.SUPPRESS)
    made.add_argument("--authenticated", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.load:
        die_with_parent()
        print(json.dumps(uvloop.run(load(arguments))))
        return
    with directory(arguments) as root:
        uvloop.run(run(arguments, root))


if __name__ == "__main__":
    main()
