"""Restart every daemon under load, one after the other, as an operator does: ``make chaos-restart``.

Producers write all the time, and consumers follow, in a cluster of three brokers and three backups. Each daemon in its
turn is stopped with SIGTERM and started again, and the next one has its turn when the streamlets are back: brokers and
backups, and the coordinator; with ``--zookeeper`` two coordinators, the one that leads among them.

Promised, and checked: no recovery begins; each broker ends with the streamlets that it had; no record fails, and all
are there once, in their producers' order, with ordinals that go on by one. How long a producer was without an
acknowledgement, over all that it writes to, is measured, with a time without a restart to compare it with: it depends
on the machine, and is a promise only with ``--stall-ms-max``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kera.client import Client
from kera.core.telemetry import configure_logging
from kera.local.cluster import LocalCluster
from tests.chaos.verdict import leaves
from tests.integration.control_support import (
    Reader,
    Writer,
    broker_id_of,
    broker_names,
    check_log,
    connect,
    control_cluster,
    reader,
    settle,
    until_registered,
    writer,
)
from tests.integration.replication_support import Wrong, backup_names, samples
from tests.integration.support import until

STREAMS = {
    # name: streamlets, entries, virtual logs
    "one-log": (12, 1, 1),
    "lanes": (6, 2, 2),
}
WRITERS = 2
"""Of each stream."""
PAUSE_S = 0.02
"""Between two records of a writer to a streamlet."""
BACK_TIMEOUT_S = 60.0
RECORDS_BETWEEN = 10
"""Of each streamlet, that are acknowledged before the next daemon has its turn."""
QUIET_S = 5.0
"""So long nothing is done, for the comparison."""


@dataclass(frozen=True)
class Turn:
    """What the restart of one daemon came to."""

    name: str
    away_s: float
    """From SIGTERM until it serves again."""
    back_s: float
    """From SIGTERM until all streamlets are where they were."""
    stall_s: float
    """The longest time without an acknowledgement of any producer."""
    streamlet_stall_s: float
    """Likewise, of any streamlet of any producer."""

    HEADING = f"{'daemon':<14} {'away':>8} {'all back':>9} {'producer':>9} {'streamlet':>10}"

    def __str__(self) -> str:
        return (
            f"{self.name:<14} {self.away_s:>6.2f} s {self.back_s:>7.2f} s {1000 * self.stall_s:>6.0f} ms"
            f" {1000 * self.streamlet_stall_s:>7.0f} ms"
        )


@dataclass(frozen=True)
class Load:
    """Who writes, and who reads."""

    client: Client
    writers: Mapping[str, list[Writer]]
    readers: Mapping[str, Reader]

    def all_writers(self) -> list[Writer]:
        """Of all streams."""
        return [each for writers in self.writers.values() for each in writers]

    def stalls_s(self, begun_s: float, ended_s: float) -> tuple[float, float]:
        """The longest time without an acknowledgement: of a producer, and of a streamlet of one."""
        gaps = [
            max((b - a for a, b in itertools.pairwise(times) if b >= begun_s and a <= ended_s), default=0.0)
            for times in (sorted(at for times in each.times_s for at in times) for each in self.all_writers())
        ]
        alone = [each.stall_s(range(len(each.sent)), begun_s, ended_s) for each in self.all_writers()]
        return max(gaps), max(alone)

    async def go_on(self) -> None:
        """Every streamlet takes records, and readers are well."""
        await asyncio.gather(*(each.go_on(count=RECORDS_BETWEEN) for each in self.all_writers()))
        for each in self.readers.values():
            if each.error is not None:
                raise each.error

    async def owners(self) -> dict[str, dict[int, int]]:
        """The broker of each streamlet, by stream."""
        found = {name: await self.client.admin.describe_stream(name) for name in self.writers}
        return {
            name: {number: one.broker_id for number, one in stream.assignments.items()}
            for name, stream in found.items()
        }


@contextlib.asynccontextmanager
async def under_load(cluster: LocalCluster, *, replication: int, pause_s: float = PAUSE_S) -> AsyncIterator[Load]:
    """Streams that are written to and read."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(await connect(cluster))
        writers: dict[str, list[Writer]] = {}
        readers: dict[str, Reader] = {}
        for name, (streamlets, entries, virtual_logs) in STREAMS.items():
            await client.admin.create_stream(
                name,
                streamlets=streamlets,
                entries=entries,
                group_segments=2,
                replication=replication,
                virtual_logs=virtual_logs if replication else 1,
            )
            writers[name] = [
                await stack.enter_async_context(writer(client, name, number, pause_s=pause_s))
                for number in range(WRITERS)
            ]
            readers[name] = await stack.enter_async_context(reader(client, name))
        yield Load(client, writers, readers)


async def roll(cluster: LocalCluster, load: Load) -> list[Turn]:
    """Restart each daemon once. Raises `Wrong`."""
    turns = []
    await load.go_on()
    before = await load.owners()
    for name in [*backup_names(cluster), *broker_names(cluster), *_coordinators(cluster)]:
        begun_s = time.monotonic()
        await cluster.restart(name)
        away_s = time.monotonic() - begun_s
        if name in broker_names(cluster):
            await until_registered(load.client, broker_id_of(cluster, name))
            await _until_back(load, before)
        back_s = time.monotonic() - begun_s
        await load.go_on()
        turns.append(Turn(name, away_s, back_s, *load.stalls_s(begun_s, time.monotonic())))
        print(turns[-1], flush=True)
        if recoveries := await load.client.admin.recoveries():
            raise Wrong(f"after the restart of {name}: {recoveries}")
    return turns


def _coordinators(cluster: LocalCluster) -> list[str]:
    return [name for name in cluster.ready if name.startswith("coordinator")]


async def _until_back(load: Load, before: Mapping[str, Mapping[int, int]]) -> None:
    try:
        async with asyncio.timeout(BACK_TIMEOUT_S):
            while await load.owners() != before:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Wrong(f"streamlets were at {before}, and are at {await load.owners()}") from None


async def check(load: Load) -> int:
    """Whether all that was acknowledged is there, once, in order; how many records that are."""
    await settle(load.all_writers())
    for name, each in load.readers.items():
        await each.catch_up(load.writers[name])
    return sum([await check_log(load.client, name, writers) for name, writers in load.writers.items()])


def made_anew_bytes(cluster: LocalCluster) -> int:
    """What brokers have replicated again."""
    name = "replication_bytes_repaired_total"
    return int(sum(samples(cluster, broker).get(name, 0) for broker in broker_names(cluster)))


@contextlib.asynccontextmanager
async def clusters(directory: Path, *, zookeeper: bool, backups: int = 3) -> AsyncIterator[LocalCluster]:
    """A cluster, with its own ZooKeeper if that is wanted; heartbeats and all else as by default."""
    defaults = {
        "heartbeat_interval_ms": 1_000,
        "report_grace_ms": 1_000,
        "zookeeper_session_timeout_ms": 4_000,
    }
    async with contextlib.AsyncExitStack() as stack:
        arguments: dict[str, Any] = {}
        if zookeeper:
            from tests.integration.zookeeper import ZooKeeper

            server = stack.enter_context(ZooKeeper(directory / "zookeeper"))
            arguments = {"coordinators": 2, "zookeeper": server.address}
        path = directory / "cluster"
        yield await stack.enter_async_context(
            control_cluster(path, backups=backups, coordinator_settings=defaults, **arguments)
        )


async def run(arguments: argparse.Namespace) -> None:
    """All rounds, with one cluster for each R. Raises `Wrong`."""
    for replication in arguments.replication:
        with tempfile.TemporaryDirectory(prefix="kera-chaos-") as directory:
            async with (
                clusters(Path(directory), zookeeper=arguments.zookeeper) as cluster,
                under_load(cluster, replication=replication, pause_s=arguments.pause_ms / 1000) as load,
            ):
                turns = await _rounds(cluster, load, arguments)
                records = await check(load)
                spread = Counter(owner for owners in (await load.owners()).values() for owner in owners.values())
                print(
                    f"R={replication}: {len(turns)} restarts, no recovery, {records:,} records, streamlets"
                    f" {dict(sorted(spread.items()))}, longest without an acknowledgement"
                    f" {1000 * max(turn.stall_s for turn in turns):.0f} ms (a producer)"
                    f" {1000 * max(turn.streamlet_stall_s for turn in turns):.0f} ms (a streamlet),"
                    f" {made_anew_bytes(cluster):,} bytes replicated again",
                    flush=True,
                )
        worst = max(turns, key=lambda turn: turn.stall_s)
        if arguments.stall_ms_max and worst.stall_s * 1000 > arguments.stall_ms_max:
            raise Wrong(f"{worst.name}: a producer was without an acknowledgement for {worst.stall_s:.3f} s")


async def _rounds(cluster: LocalCluster, load: Load, arguments: argparse.Namespace) -> list[Turn]:
    await load.go_on()
    begun_s, writers = time.monotonic(), load.all_writers()
    await until(lambda: time.monotonic() - begun_s >= QUIET_S or any(each.errors for each in writers))
    print(Turn.HEADING)
    print(Turn("(none)", 0, 0, *load.stalls_s(begun_s, time.monotonic())), flush=True)
    return [turn for _ in range(arguments.rounds) for turn in await roll(cluster, load)]


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="how often each daemon is restarted")
    parser.add_argument("--replication", type=int, nargs="+", choices=(0, 1, 2), default=[1])
    parser.add_argument("--pause-ms", type=float, default=1000 * PAUSE_S, help="between records, of each streamlet")
    parser.add_argument("--stall-ms-max", type=float, default=0, help="longest time without an acknowledgement; 0: any")
    parser.add_argument("--zookeeper", action="store_true", help="two coordinators, and a ZooKeeper")
    arguments = parser.parse_args()
    configure_logging("critical", daemon="chaos")  # that clients try again is wanted
    failures: list[Exception] = []
    try:
        asyncio.run(run(arguments))
    except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
        failures = list(leaves(errors))
    for failure in failures:
        print(f"FAILED: {failure!r}")
    if not failures:
        print("PASSED: no recovery, every broker has its streamlets, every record is there once, in order")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
