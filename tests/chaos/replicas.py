"""Kill backups and then the broker, under load, and recover.

Idempotent producers write all the time, to streams with one virtual log and with several. A round waits for a random
number of acknowledgements, kills any R-1 backups at a random moment, and the broker soon after. At level ``persisted``
it then kills the other backups, too, and restarts them with the contents of their disks. With ``--freeze``, one of the
surviving backups does not answer for a while before.

Promised, and checked: these backups have every acknowledged record, once, byte for byte, at the acknowledged place;
and their replicas agree. Then everything is started again, and goes on: when the broker reports that no replica is
missing, all of this is checked again, over all backups. At the end the files of a cluster are checked without the
running cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
from collections import Counter
from typing import Any

from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.local.cluster import RunningCluster
from tests.chaos.running import Program, Run, positive
from tests.chaos.verdict import Wrong
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
from tests.integration.support import BROKER, until

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
"""Keeps several requests to a backup in flight, which gather to more than a virtual segment's worth."""


class Chaos:
    """The rounds with one cluster."""

    def __init__(
        self,
        run: Run,
        cluster: RunningCluster,
        *,
        heavy: bool,
    ) -> None:
        """`heavy`: as fast as possible."""
        arguments = run.arguments
        self._run = run
        self._replication = arguments.replication
        self._durability = arguments.durability
        self._cluster = cluster
        self._moments = run.moments
        self._busy = arguments.busy * 10 if heavy else arguments.busy
        self._load = HEAVY if heavy else LIGHT
        self._freeze = arguments.freeze
        self._loads: list[Writing] = []

    async def run(self, rounds: int) -> None:
        """Run some rounds, one after the other."""
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
                await self._round()

    async def _round(self) -> None:
        cluster, moments = self._cluster, self._moments
        self._pause(paused=False)
        names = backup_names(cluster)
        wanted = self._acknowledged + moments.randrange(1, self._busy)
        await until(lambda: self._acknowledged >= wanted, ROUND_TIMEOUT_S)
        await self._run.moment(0.1)
        killed = moments.sample(names, self._replication - 1)
        left = [name for name in names if name not in killed]
        if moments.random() < self._freeze:
            await self._frozen(moments.choice(left))
        await in_threads(cluster.kill, killed)
        await self._run.moment(moments.choice((0, 0.01, 0.1, 0.5, 1.5)))
        await asyncio.to_thread(cluster.kill, BROKER)
        self._pause(paused=True)
        if self._durability == "persisted":
            await in_threads(cluster.kill, left)
            await in_threads(cluster.restart, left)
        found = await recover(cluster, left)
        records = await self._check(found, left)

        stopped = [*killed, BROKER]
        moments.shuffle(stopped)
        for name in stopped:
            await asyncio.to_thread(cluster.restart, name)
        await until(lambda: all(load.settled for load in self._loads), ROUND_TIMEOUT_S)
        await until_replicated(cluster, ROUND_TIMEOUT_S)
        await until_quiet(cluster, names, ROUND_TIMEOUT_S)
        again = await recover(cluster, names)
        await self._check(again, names)
        for load in self._loads:
            if load.errors:
                raise Wrong(f"{load.stream.name}: {len(load.errors)} records failed: {load.errors[0]!r}")
        self._run.tell(
            f"killed {', '.join(stopped)}; {records:,} records acknowledged, all there; of"
            f" {sum(len(run.chunks) for run in found.result.runs):,} chunks {found.result.duplicates} came twice,"
            f" {sum(len(cut.chunks) for cut in found.result.cuts)} cut"
        )

    async def _check(self, found: Found, names: list[str]) -> int:
        """Check that these backups have correct and equal data; returns the number of records. Raises `Wrong`."""
        records = check_recovered(found, self._loads)
        self._run.seen += Counter(
            {
                "records": records,
                "chunks": sum(len(run.chunks) for run in found.result.runs),
                "chunks that came twice": found.result.duplicates,
                "chunks cut": sum(len(cut.chunks) for cut in found.result.cuts),
                "replicas compared": await check_agreement(self._cluster, names),
            }
        )
        return records

    async def _frozen(self, name: str) -> None:
        """Stop a backup until the broker drops it; it loses no data by that."""
        pid = self._cluster.processes[name]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(2 * BACKUP_TIMEOUT_MS / 1000)  # sleep: longer than the broker's time-out
        os.kill(pid, signal.SIGCONT)
        await self._run.moment(0.5)

    @property
    def _acknowledged(self) -> int:
        return sum(len(load.acknowledged) for load in self._loads)

    def _pause(self, *, paused: bool) -> None:
        for load in self._loads:
            load.paused = paused


async def work(run: Run) -> None:
    """Run all rounds, a few with each cluster."""
    arguments, moments = run.arguments, run.moments
    while left := arguments.rounds - run.seen["rounds"]:
        backups = arguments.replication + moments.choice((1, 1, 2))
        heavy = moments.random() < arguments.heavy
        sizes: dict[str, Any] = {
            "segment_bytes": MIB if heavy else 64 * KIB,
            "arena_bytes": 64 * MIB,
            "backup_memory_bytes": 32 * MIB,
            "backup_timeout_ms": BACKUP_TIMEOUT_MS if arguments.freeze else 2_000,
        }
        with run.cluster_folder() as folder:
            with replicated_cluster(folder, backups, **sizes) as cluster:
                await Chaos(run, cluster, heavy=heavy).run(min(left, arguments.rounds_per_cluster))
            checked = await asyncio.to_thread(check_files, folder)
        print(f"files: {checked['replicas']['replicas']} replicas, {len(checked['findings'])} warnings")
        for finding in checked["findings"]:
            print(f"  {finding['path']}: {finding['text']}")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this program."""
    parser.add_argument("--replication", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--durability", choices=("replicated", "persisted"), default="replicated")
    parser.add_argument("--rounds-per-cluster", type=positive, default=5)
    parser.add_argument("--heavy", type=float, default=0.5, help="clusters under heavy load, from 0 to 1")
    parser.add_argument("--freeze", type=float, default=0.0, help="how often a backup hangs, from 0 to 1")
    parser.add_argument("--busy", type=int, default=2_000, help="records before something is killed, at most")


REPLICAS = Program(
    __doc__ or "",
    "every acknowledged record is on the backups that are left, once, in its place",
    work,
    rounds=20,
    options=options,
)
