"""Kill backups and then the broker, under load, and recover: ``python -m tests.chaos.replicas --rounds 20``.

Idempotent producers write all the time, to streams with one virtual log and with several. A round waits for a random
number of acknowledgements, kills any R-1 backups at a random moment, and the broker soon after. Of level ``persisted``
it then kills the other backups, too, and starts those again on what their disks have. With ``--freeze``, one of those
that are not killed does not answer for a while before.

Promised, and checked: what these backups have is every record that was acknowledged, once, byte for byte, at the place
that was told; and their replicas agree. Then everything is started again, and goes on: when the broker says that
nothing lacks a replica, all of it is checked again, over all backups. At the end the files of a cluster are checked
without it.
With the same seed it is killed at the same moments, as far as a scheduler lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import RunningCluster
from tests.chaos.verdict import Wrong, leaves
from tests.integration.replication_support import (
    Found,
    Writing,
    backup_names,
    check_agreement,
    check_files,
    check_recovered,
    in_threads,
    recover,
    replicated_cluster,
    until_quiet,
    until_replicated,
    writing,
)
from tests.integration.support import BROKER, tell, until

ROUND_TIMEOUT_S = 60.0
BACKUP_TIMEOUT_MS = 400
STREAMS = {
    # name: streamlets, entries, virtual logs, producers
    "one-log": (2, 1, 1, 1),
    "three-logs": (4, 1, 3, 1),
    "log-per-entry": (2, 2, 4, 2),
}
LIGHT: dict[str, Any] = {"pause_s": 0.005, "burst": 5, "chunk_bytes_max": 4 * KIB}
HEAVY: dict[str, Any] = {"pause_s": 0.0, "burst": 100, "chunk_bytes_max": 32 * KIB, "buffer_bytes_max": 4 * MIB}
"""So that several requests to a backup are under way, and gather to more than a virtual segment's worth."""


@dataclass
class Totals:
    """What was done and checked."""

    rounds: int = 0
    records: int = 0
    chunks: int = 0
    duplicates: int = 0
    cut: int = 0
    compared: int = 0

    def count(self, found: Found, records: int, compared: int) -> None:
        self.records += records
        self.chunks += sum(len(run.chunks) for run in found.result.runs)
        self.duplicates += found.result.duplicates
        self.cut += sum(len(cut.chunks) for cut in found.result.cuts)
        self.compared += compared


class Chaos:
    """The rounds with one cluster."""

    def __init__(
        self,
        cluster: RunningCluster,
        moments: random.Random,
        *,
        replication: int,
        durability: str,
        busy: int = 2000,
        heavy: bool = False,
        freeze: float = 0.0,
    ) -> None:
        """`busy`: so many records, at most, are acknowledged before something is killed.

        `heavy`: as fast as it goes. `freeze`: how often a backup that is not killed does not answer for some time.
        """
        self._replication = replication
        self._durability = durability
        self._cluster = cluster
        self._moments = moments
        self._busy = busy
        self._load = HEAVY if heavy else LIGHT
        self._freeze = freeze
        self._loads: list[Writing] = []

    async def run(self, rounds: int, totals: Totals) -> None:
        """Some rounds, one after the other."""
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(await Client.connect(self._cluster.bootstrap))
            for name, (streamlets, entries, virtual_logs, producers) in STREAMS.items():
                await client.admin.create_stream(
                    name,
                    streamlets=streamlets,
                    entries=entries,
                    group_segments=2,
                    durability=self._durability,
                    replication=self._replication,
                    virtual_logs=virtual_logs,
                )
                for _ in range(producers):
                    self._loads.append(await stack.enter_async_context(writing(client, name, **self._load)))
            for _ in range(rounds):
                await self._round(totals)

    async def _round(self, totals: Totals) -> None:
        begun_s = time.monotonic()
        cluster, moments = self._cluster, self._moments
        self._pause(paused=False)
        names = backup_names(cluster)
        wanted = self._acknowledged + moments.randrange(1, self._busy)
        await until(lambda: self._acknowledged >= wanted, ROUND_TIMEOUT_S)
        await asyncio.sleep(moments.random() * 0.1)  # sleep: a moment is what is wanted
        killed = moments.sample(names, self._replication - 1)
        left = [name for name in names if name not in killed]
        if moments.random() < self._freeze:
            await self._frozen(moments.choice(left))
        await in_threads(cluster.kill, killed)
        await asyncio.sleep(moments.choice((0, 0.01, 0.1, 0.5, 1.5)) * moments.random())  # sleep: the same
        await asyncio.to_thread(cluster.kill, BROKER)
        self._pause(paused=True)
        if self._durability == "persisted":
            await in_threads(cluster.kill, left)
            await in_threads(cluster.restart, left)
        found = await recover(cluster, left)
        records = check_recovered(found, self._loads)
        compared = await check_agreement(cluster, left)
        totals.count(found, records, compared)

        stopped = [*killed, BROKER]
        moments.shuffle(stopped)
        for name in stopped:
            await asyncio.to_thread(cluster.restart, name)
        await until(lambda: all(load.settled for load in self._loads), ROUND_TIMEOUT_S)
        await until_replicated(cluster, ROUND_TIMEOUT_S)
        await until_quiet(cluster, names, ROUND_TIMEOUT_S)
        again = await recover(cluster, names)
        totals.count(again, check_recovered(again, self._loads), await check_agreement(cluster, names))
        for load in self._loads:
            if load.errors:
                raise Wrong(f"{load.stream.name}: {len(load.errors)} records failed: {load.errors[0]!r}")
        totals.rounds += 1
        print(
            f"round {totals.rounds}: {time.monotonic() - begun_s:.1f} s; killed {', '.join(stopped)};"
            f" {records:,} records acknowledged, all there;"
            f" of {sum(len(run.chunks) for run in found.result.runs):,} chunks {found.result.duplicates} came twice,"
            f" {sum(len(cut.chunks) for cut in found.result.cuts)} cut",
            flush=True,
        )

    async def _frozen(self, name: str) -> None:
        """Have a backup not answer for so long that the broker leaves it; it loses nothing by that."""
        pid = self._cluster.processes[name]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * BACKUP_TIMEOUT_MS / 1000)  # sleep: what passes is the broker's time-out
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(self._moments.random() * 0.5)  # sleep: a moment is what is wanted

    @property
    def _acknowledged(self) -> int:
        return sum(len(load.acknowledged) for load in self._loads)

    def _pause(self, *, paused: bool) -> None:
        for load in self._loads:
            load.paused = paused


def run(arguments: argparse.Namespace, totals: Totals) -> None:
    """All rounds, a few with each cluster."""
    moments = random.Random(arguments.seed)
    left = arguments.rounds
    while left:
        rounds = min(left, arguments.rounds_per_cluster)
        left -= rounds
        backups = arguments.replication + moments.choice((1, 1, 2))
        heavy = moments.random() < arguments.heavy
        sizes: dict[str, Any] = {
            "segment_bytes": MIB if heavy else 64 * KIB,
            "arena_bytes": 64 * MIB,
            "backup_memory_bytes": 32 * MIB,
        }
        sizes["backup_timeout_ms"] = BACKUP_TIMEOUT_MS if arguments.freeze else 2_000
        with tempfile.TemporaryDirectory(prefix="kera-chaos-") as directory:
            try:
                with replicated_cluster(Path(directory), backups, **sizes) as cluster:
                    try:
                        chaos = Chaos(
                            cluster,
                            moments,
                            replication=arguments.replication,
                            durability=arguments.durability,
                            busy=20_000 if heavy else 2_000,
                            heavy=heavy,
                            freeze=arguments.freeze,
                        )
                        asyncio.run(chaos.run(rounds, totals))
                    except BaseException:
                        tell(cluster)
                        raise
                checked = check_files(Path(directory))
                print(f"files: {checked['replicas']['replicas']} replicas, {len(checked['findings'])} warnings")
                for finding in checked["findings"]:
                    print(f"  {finding['path']}: {finding['text']}")
            except BaseException:
                if arguments.keep:
                    Path(directory).rename(arguments.keep)
                    Path(directory).mkdir()
                raise


def main() -> int:
    """Run, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments; printed")
    parser.add_argument("--replication", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--durability", choices=("replicated", "persisted"), default="replicated")
    parser.add_argument("--rounds-per-cluster", type=int, default=5)
    parser.add_argument("--heavy", type=float, default=0.5, metavar="P", help="clusters under heavy load, from 0 to 1")
    parser.add_argument("--freeze", type=float, default=0.0, metavar="P", help="how often a backup hangs, from 0 to 1")
    parser.add_argument("--keep", type=Path, help="where the data of a cluster goes with which a round failed")
    arguments = parser.parse_args()
    configure_logging("critical", daemon="chaos")  # that clients try again, and replicas end early, is wanted
    again = f"--replication {arguments.replication} --durability {arguments.durability} --seed {arguments.seed}"
    again += f" --heavy {arguments.heavy:g} --freeze {arguments.freeze:g}"
    again += f" --rounds-per-cluster {arguments.rounds_per_cluster}"
    print(f"{arguments.rounds} rounds, {again}", flush=True)
    totals = Totals()
    failures: list[Exception] = []
    try:
        run(arguments, totals)
    except* Exception as errors:  # noqa: BLE001 - whatever it is, it is the verdict
        failures = list(leaves(errors))
    for failure in failures:
        print(f"FAILED in round {totals.rounds + 1}: {failure!r}")
    print(
        f"{totals.rounds} rounds: {totals.records:,} records and {totals.chunks:,} chunks looked at,"
        f" {totals.duplicates:,} came twice, {totals.cut} cut; {totals.compared:,} replicas compared"
    )
    if failures:
        print(f"again: python -m tests.chaos.replicas --rounds {arguments.rounds} {again}")
        return 1
    print("PASSED: every acknowledged record is on the backups that are left, once, in its place")
    return 0


if __name__ == "__main__":
    sys.exit(main())
