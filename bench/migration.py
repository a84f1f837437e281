"""Streamlets move between brokers under load: how long their producers wait.

* ``moves``: a streamlet of a small stream goes back and forth; how long there was no acknowledgement, over all moves.
* ``sizes``: the same with more and more in the stream, most of it on disk only: a move takes the metadata, so that it
  should cost the same.
* ``spread``: a stream on one broker goes to three under load, and one of these is drained.

A steady producer sends a record to each streamlet every few milliseconds; a stall is the longest time between two
acknowledgements of the streamlet around its move. Without a move it is that pause and a round trip: measured, too.
Everything is read and compared at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from bench.common import TIMEOUT_S, Figures, directory, parser, say, size
from bench.steady import Filled, Steady, check, fill, steady
from kera.client import Client
from kera.core.base.settings import GIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import LocalCluster

PARTS = ("moves", "sizes", "spread")
AFTER_RECORDS = 30
"""This many records of the moved streamlet are acknowledged before the next step."""


@contextlib.asynccontextmanager
async def running(
    arguments: argparse.Namespace, root: Path, brokers: int
) -> AsyncIterator[tuple[LocalCluster, Client, list[int]]]:
    """A cluster, a client, and the ids of the brokers."""
    cluster = LocalCluster(
        data_dir=root,
        brokers=brokers,
        backups=max(arguments.replication, 1),
        arena_bytes=arguments.arena_bytes,
        segment_bytes=arguments.segment_bytes,
    )
    async with cluster, await Client.connect(cluster.bootstrap) as client:
        yield cluster, client, [cluster.ready[f"broker-{number}"]["broker_id"] for number in range(1, brokers + 1)]


async def back_and_forth(client: Client, stream: str, load: Steady, moves: int) -> list[tuple[float, float, float]]:
    """Move streamlet 0 `moves` times; for each move: the producers' stall, the brokers' own stall, and the whole
    call.
    """
    found = []
    brokers = [broker.broker_id for broker in (await client.admin.describe_cluster()).brokers if broker.alive]
    at = (await client.admin.describe_stream(stream)).assignments[0].broker_id
    for _ in range(moves):
        at = brokers[(brokers.index(at) + 1) % len(brokers)]
        begun_s = time.monotonic()
        moved = await client.admin.move_streamlet(stream, 0, at)
        ended_s = time.monotonic()
        await load.go_on([0], AFTER_RECORDS)
        found.append((load.stall_s([0], begun_s, time.monotonic()), moved.stall_us / 1e6, ended_s - begun_s))
    return found


def add(figures: Figures, of: str, moves: Sequence[tuple[float, float, float]]) -> None:
    """Quantiles of stalls, and the medians of the rest."""
    stalls_ms, own_ms, calls_ms = (np.array(column) * 1e3 for column in zip(*moves, strict=True))
    for name, value in (
        ("p50", np.percentile(stalls_ms, 50)),
        ("p99", np.percentile(stalls_ms, 99)),
        ("max", stalls_ms.max()),
    ):
        figures.add(f"{of}: without acknowledgement, {name}", float(value), "ms")
    figures.add(f"{of}: without an owner, median", float(np.median(own_ms)), "ms")
    figures.add(f"{of}: the whole move, median", float(np.median(calls_ms)), "ms")
    figures.add(f"{of}: moves", len(moves), "")


async def measure_moves(arguments: argparse.Namespace, root: Path, figures: Figures) -> None:
    """Move a small stream many times."""
    async with running(arguments, root, 2) as (_, client, _):
        await client.admin.create_stream("moves", streamlets=2, replication=arguments.replication)
        async with steady(client, "moves", pause_s=arguments.pause_ms / 1000) as load:
            await load.go_on(count=200)
            begun_s = time.monotonic()
            await load.go_on(count=500)
            figures.add(
                "no move: without acknowledgement, max", load.stall_s([0], begun_s, time.monotonic()) * 1e3, "ms"
            )
            add(figures, "moves", await back_and_forth(client, "moves", load, arguments.moves))
        await check(client, "moves", Filled(2, arguments.record_bytes), load.sent)


async def measure_sizes(arguments: argparse.Namespace, root: Path, figures: Figures) -> None:
    """Move a few times after each growth of the stream."""
    async with running(arguments, root, 2) as (_, client, _):
        await client.admin.create_stream("sizes", replication=arguments.replication)
        filled = Filled(1, arguments.record_bytes)
        small = 0
        for wanted in sorted(arguments.sizes):
            seconds = await fill(client, "sizes", filled, wanted - filled.bytes)
            say(f"  {filled.bytes / 1e9:.2f} GB in the stream, the last of it in {seconds:.0f} s")
            async with steady(client, "sizes", first=small, pause_s=arguments.pause_ms / 1000) as load:
                await load.go_on(count=100)
                name = f"{filled.bytes / 1e6:,.0f} MB in the stream"
                add(figures, name, await back_and_forth(client, "sizes", load, arguments.moves_per_size))
            small = load.sent[0]
        say("  reading all of it")
        seconds = await check(client, "sizes", filled, [small])
        figures.add("reading all of it, from two brokers", filled.bytes / 1e9 / seconds, "GB/s")


async def measure_spread(arguments: argparse.Namespace, root: Path, figures: Figures) -> None:
    """Measure with one broker, then three, then two."""
    async with running(arguments, root, 3) as (_, client, brokers):
        await client.admin.create_stream("spread", streamlets=6, brokers=1, replication=arguments.replication)
        filled = Filled(6, arguments.record_bytes)
        await fill(client, "spread", filled, arguments.spread_bytes)
        async with steady(client, "spread", pause_s=0.01) as load:
            await load.go_on()
            begun_s = time.monotonic()
            await client.admin.alter_stream("spread", brokers=3)
            figures.add("from one broker to three: until it is done", time.monotonic() - begun_s, "s")
            await load.go_on()
            stall_s = load.stall_s(range(6), begun_s, time.monotonic())
            figures.add("from one broker to three: without acknowledgement, max", stall_s * 1e3, "ms")
            owners = {each.broker_id for each in (await client.admin.describe_stream("spread")).assignments.values()}
            figures.add("from one broker to three: owners then", len(owners), "")

            begun_s = time.monotonic()
            async with asyncio.timeout(TIMEOUT_S):
                while not (status := await client.admin.drain_broker(brokers[0])).done:
                    if not status.streamlets_owned and "drained: until it owns nothing" not in figures.notes:
                        figures.notes["drained: until it owns nothing"] = f"{time.monotonic() - begun_s:.2f} s"
                    await asyncio.sleep(0.05)
            figures.add("drained under load: until nothing of it is needed", time.monotonic() - begun_s, "s")
            await load.go_on()
            stall_s = load.stall_s(range(6), begun_s, time.monotonic())
            figures.add("drained under load: without acknowledgement, max", stall_s * 1e3, "ms")
        await check(client, "spread", filled, load.sent)


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """All parts."""
    figures = Figures("migration", arguments, root)
    for name, measure in zip(PARTS, (measure_moves, measure_sizes, measure_spread), strict=True):
        if name in arguments.parts:
            say(name)
            await measure(arguments, root / name, figures)
    figures.notes["checked"] = "everything was read at the end of each part, and nothing was lost, repeated or changed"
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument("--replication", type=int, default=1)
    made.add_argument("--moves", type=int, default=100)
    made.add_argument("--moves-per-size", type=int, default=20)
    made.add_argument("--sizes", type=size, nargs="+", default=[10 * MIB, 1 * GIB, 10 * GIB])
    made.add_argument("--spread-bytes", type=size, default=256 * MIB)
    made.add_argument("--pause-ms", type=float, default=2.0, help="between two records of the steady producer")
    made.add_argument("--record-bytes", type=int, default=1000)
    made.add_argument("--arena-bytes", type=size, default=512 * MIB, help="memory of each broker")
    made.add_argument("--segment-bytes", type=size, default=8 * MIB)
    arguments = made.parse_args()
    configure_logging("error", daemon="bench")  # clients log their search for new owners, which is measured
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
