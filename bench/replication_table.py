"""Time to acknowledgement at a fixed rate, over streamlets × producers × virtual logs: the cost of partitions.

The table of Pravega's paper (10 to 500 segments: p95 6.6-12.4 ms; Kafka 4.6-98 ms), for one broker and one backup on
one machine. Records of 1 KB come one by one at a fixed total rate (open loop: a record's time counts from when it was
due, so a late one is not hidden), from all producers in turn, each to a random streamlet. Each cell is measured with
one virtual log for the whole stream and with one per streamlet, in turn.

Producers are connections of this one process, which also is what the machine has to run besides the daemons. Segments
are small, as each streamlet has an open one, and each virtual log an open replica.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.common import describe, directory, machine, parser, say, size
from bench.cpu import each_s
from kera.cli.bench._latency import Latencies
from kera.client import Client, Producer
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import LocalCluster

RECORD_BYTES = 1000
TICK_S = 0.001
CELL_TIMEOUT_S = 60.0
LATE_SHARE_MAX = 0.05
"""If a larger share of a cell's records was sent too late, the cell says that this process was the bottleneck."""


class Cell(NamedTuple):
    """One measurement."""

    durability: str
    streamlets: int
    producers: int
    virtual_logs: int


async def load(
    producers: Sequence[Producer], stream: str, cell: Cell, *, rate: float, seconds: float
) -> tuple[Latencies, float]:
    """Send at `rate` for `seconds`; returns the times, and the share of records that were sent over 2 ms too late."""
    value = random.Random(1).randbytes(RECORD_BYTES)
    places = random.Random(2)
    turns = itertools.cycle(producers)
    now_s = time.perf_counter  # the loop's own clock has only milliseconds
    latencies, waiting, late = Latencies(), set[asyncio.Future[Any]](), 0
    total = round(rate * seconds)
    begun_s = now_s()
    sent = 0
    while sent < total:
        due = min(total, int((now_s() - begun_s) * rate) + 1)
        while sent < due:
            due_s = begun_s + sent / rate
            late += now_s() - due_s > 2 * TICK_S
            pending = next(turns).send(stream, value, streamlet=places.randrange(cell.streamlets))
            future = asyncio.ensure_future(pending)

            def done(future: asyncio.Future[Any], due_s: float = due_s) -> None:
                future.result()
                latencies.add(int((now_s() - due_s) * 1e9))
                waiting.discard(future)

            waiting.add(future)
            future.add_done_callback(done)
            sent += 1
        await asyncio.sleep(TICK_S)
    async with asyncio.timeout(CELL_TIMEOUT_S):
        while waiting:
            await asyncio.sleep(TICK_S)
    return latencies, late / total


async def measure(cluster: LocalCluster, cell: Cell, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell, with a stream of its own."""
    name = f"{cell.durability}-{cell.streamlets}-{cell.producers}-{cell.virtual_logs}-{time.monotonic_ns()}"
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(await Client.connect(cluster.bootstrap)) for _ in range(cell.producers)
        ]
        producers = [await stack.enter_async_context(client.producer()) for client in clients]
        admin = clients[0].admin
        await admin.create_stream(
            name,
            streamlets=cell.streamlets,
            durability=cell.durability,
            replication=1,
            virtual_logs=cell.virtual_logs,
        )
        for producer in producers:
            await producer.prepare(name)
        rate = arguments.rate
        await load(producers, name, cell, rate=rate, seconds=arguments.warm_up)
        gc.collect()
        cpu_before, begun_s = each_s(cluster.processes), time.monotonic()
        latencies, late = await load(producers, name, cell, rate=rate, seconds=arguments.seconds)
        cpu = {
            child: (seconds - cpu_before[child]) / (time.monotonic() - begun_s)
            for child, seconds in each_s(cluster.processes).items()
        }
        await admin.delete_stream(name)
    return {**cell._asdict(), **(latencies.summary() or {}), "late": late, "cpu": cpu}


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Measure the whole table."""
    rows: list[dict[str, Any]] = []
    sizes = {"arena_bytes": arguments.memory_bytes, "segment_bytes": arguments.segment_bytes}
    async with LocalCluster(
        data_dir=root, backups=1, backup_settings={"memory_bytes": arguments.memory_bytes}, **sizes
    ) as cluster:
        for durability, streamlets, producers in itertools.product(
            arguments.durability, arguments.streamlets, arguments.producers
        ):
            for virtual_logs in sorted({1, streamlets}):
                cell = Cell(durability, streamlets, producers, virtual_logs)
                say(str(cell))
                rows.append(await measure(cluster, cell, arguments))
    head = machine(root)
    print(f"## replication_table\n\n{describe(head)}; {arguments.rate:,.0f} records of 1 KB per second in all\n")
    print(
        "| level | streamlets | producers | virtual logs | p50 ms | p95 ms | p99 ms | broker CPU | backup CPU | late |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        times = " | ".join(f"{row[name] / 1000:.2f}" for name in ("p50", "p95", "p99"))
        cpu = " | ".join(f"{row['cpu'][child]:.2f}" for child in ("broker-1", "backup-1"))
        late = f"{row['late']:.1%}" + (" (!)" if row["late"] > LATE_SHARE_MAX else "")
        print(
            f"| {row['durability']} | {row['streamlets']} | {row['producers']} | {row['virtual_logs']}"
            f" | {times} | {cpu} | {late} |"
        )
    for durability in arguments.durability:
        few = [row["p95"] for row in rows if row["durability"] == durability and row["virtual_logs"] == 1]
        print(
            f"\n{durability}, one virtual log: p95 {min(few) / 1000:.2f}-{max(few) / 1000:.2f} ms over the table,"
            f" a factor of {max(few) / min(few):.1f}"
        )
    print("\n" + json.dumps({"bench": "replication_table", "machine": head, "rate": arguments.rate, "rows": rows}))


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--rate", type=float, default=3_000, help="records per second, of all producers together")
    made.add_argument("--seconds", type=float, default=5.0, help="of a cell")
    made.add_argument("--warm-up", type=float, default=1.5, metavar="SECONDS")
    made.add_argument("--streamlets", type=int, nargs="+", default=[1, 10, 100, 500])
    made.add_argument("--producers", type=int, nargs="+", default=[1, 10, 50])
    made.add_argument(
        "--durability", nargs="+", choices=["replicated", "persisted"], default=["replicated", "persisted"]
    )
    made.add_argument("--memory-bytes", type=size, default=512 * MIB, help="of the broker, and of the backup")
    made.add_argument("--segment-bytes", type=size, default=256 * KIB)
    arguments = made.parse_args()
    with directory(arguments) as root:
        uvloop.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
