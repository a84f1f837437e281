"""Restart every daemon under load, one after the other, as an operator does: ``make chaos-restart``.

The load and the verdict are those of `kera check`, in a cluster of three brokers and three backups. Each daemon in its
turn is stopped with SIGTERM and started again, and the next one has its turn when the streamlets are back: brokers and
backups, and the coordinator; with ``--zookeeper`` two coordinators, the one that leads among them.

Promised, and checked: no recovery begins; each broker ends with the streamlets that it had; no record fails, and what
`kera check` looks at is as promised. How long a producer was without an
acknowledgement, over all that it writes to, is measured, with a time without a restart to compare it with: it depends
on the machine, and is a promise only with ``--stall-ms-max``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kera.cli.check._options import Options
from kera.client import Client
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import LocalCluster
from tests.chaos.checked import LOAD_S_MAX, WITHIN_S, Load, under_check
from tests.chaos.verdict import Wrong, leaves
from tests.integration.control_support import (
    broker_id_of,
    broker_names,
    connect,
    control_cluster,
    until_registered,
)
from tests.integration.replication_support import backup_names, samples

STREAMS = {
    # name: streamlets, entries, virtual logs
    "one-log": (12, 1, 1),
    "lanes": (6, 2, 2),
}
PAUSE_S = 0.01
"""Between two records to a streamlet, in the mean."""
BACK_TIMEOUT_S = 60.0
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
    """The longest time without an acknowledgement of any producer; each stream has one."""
    streamlet_stall_s: float
    """Likewise, of any streamlet."""

    HEADING = f"{'daemon':<14} {'away':>8} {'all back':>9} {'producer':>9} {'streamlet':>10}"

    def __str__(self) -> str:
        return (
            f"{self.name:<14} {self.away_s:>6.2f} s {self.back_s:>7.2f} s {1000 * self.stall_s:>6.0f} ms"
            f" {1000 * self.streamlet_stall_s:>7.0f} ms"
        )


@dataclass(frozen=True)
class Loads:
    """What is on meanwhile, by stream."""

    client: Client
    loads: Mapping[str, Load]

    def begin_period(self) -> None:
        """Measure pauses from now on."""
        for load in self.loads.values():
            load.begin_period()

    def pauses_s(self) -> tuple[float, float]:
        """The longest time of this period without an acknowledgement: of a producer, and of a streamlet."""
        streamlets = {name: range(count) for name, (count, _, _) in STREAMS.items()}
        return (
            max(load.pause_s() for load in self.loads.values()),
            max(load.pause_s(streamlets[name]) for name, load in self.loads.items()),
        )

    async def go_on(self) -> None:
        """Every streamlet takes records, and readers have them."""
        await asyncio.gather(*(load.goes_on() for load in self.loads.values()))

    async def owners(self) -> dict[str, dict[int, int]]:
        """The broker of each streamlet, by stream."""
        found = {name: await self.client.admin.describe_stream(name) for name in self.loads}
        return {
            name: {number: one.broker_id for number, one in stream.assignments.items()}
            for name, stream in found.items()
        }

    @property
    def records(self) -> int:
        """That were acknowledged, and are there."""
        return sum(load.outcome.acknowledged for load in self.loads.values())


@contextlib.asynccontextmanager
async def under_load(cluster: LocalCluster, *, replication: int, pause_s: float = PAUSE_S) -> AsyncIterator[Loads]:
    """Streams that are written to and read. Raises `Wrong` behind it, in a group, unless all promises were kept."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(await connect(cluster))
        loads: dict[str, Load] = {}
        for name, (streamlets, entries, virtual_logs) in STREAMS.items():
            await client.admin.create_stream(
                name,
                streamlets=streamlets,
                entries=entries,
                group_segments=2,
                replication=replication,
                virtual_logs=virtual_logs if replication else 1,
            )
            options = Options(
                LOAD_S_MAX,
                stream=name,
                streamlets=streamlets,
                producers=1,
                readers=1,
                members=1,
                rate=streamlets / pause_s,
                within_s=WITHIN_S,
            )
            loads[name] = await stack.enter_async_context(under_check(cluster.bootstrap, options))
        yield Loads(client, loads)


async def roll(cluster: LocalCluster, load: Loads) -> list[Turn]:
    """Restart each daemon once. Raises `Wrong`."""
    turns = []
    await load.go_on()
    before = await load.owners()
    for name in [*backup_names(cluster), *broker_names(cluster), *_coordinators(cluster)]:
        load.begin_period()
        begun_s = time.monotonic()
        await cluster.restart(name)
        away_s = time.monotonic() - begun_s
        if name in broker_names(cluster):
            await until_registered(load.client, broker_id_of(cluster, name))
            await _until_back(load, before)
        back_s = time.monotonic() - begun_s
        await load.go_on()
        turns.append(Turn(name, away_s, back_s, *load.pauses_s()))
        print(turns[-1], flush=True)
        if recoveries := await load.client.admin.recoveries():
            raise Wrong(f"after the restart of {name}: {recoveries}")
    return turns


def _coordinators(cluster: LocalCluster) -> list[str]:
    return [name for name in cluster.ready if name.startswith("coordinator")]


async def _until_back(load: Loads, before: Mapping[str, Mapping[int, int]]) -> None:
    try:
        async with asyncio.timeout(BACK_TIMEOUT_S):
            while await load.owners() != before:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise Wrong(f"streamlets were at {before}, and are at {await load.owners()}") from None


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
                spread = Counter(owner for owners in (await load.owners()).values() for owner in owners.values())
                made_bytes = made_anew_bytes(cluster)
        print(
            f"R={replication}: {len(turns)} restarts, no recovery, {load.records:,} records, streamlets"
            f" {dict(sorted(spread.items()))}, longest without an acknowledgement"
            f" {1000 * max(turn.stall_s for turn in turns):.0f} ms (a producer)"
            f" {1000 * max(turn.streamlet_stall_s for turn in turns):.0f} ms (a streamlet),"
            f" {made_bytes:,} bytes replicated again",
            flush=True,
        )
        worst = max(turns, key=lambda turn: turn.stall_s)
        if arguments.stall_ms_max and worst.stall_s * 1000 > arguments.stall_ms_max:
            raise Wrong(f"{worst.name}: a producer was without an acknowledgement for {worst.stall_s:.3f} s")


async def _rounds(cluster: LocalCluster, load: Loads, arguments: argparse.Namespace) -> list[Turn]:
    await load.go_on()
    load.begin_period()
    await asyncio.sleep(QUIET_S)  # sleep: what passes is what is measured
    print(Turn.HEADING)
    print(Turn("(none)", 0, 0, *load.pauses_s()), flush=True)
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
