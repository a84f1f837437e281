"""Attack a cluster with security on, as a stranger without a password, or as a known user with bad intentions.

Beside a client that writes and reads all the time, asks the coordinator, and checks health, one attack after the
other (`crowd_attacks`) goes on for some seconds. Reported are, for each: how long requests of the client took before
and during the attack, and which failed; and for broker and coordinator the memory that is theirs alone, file
descriptors, and lines of their logs. The attacks run with TLS and without.

Promised, and checked: no request of the client fails, or stays without an answer; no attacker is let in; a daemon
takes at most `MEMORY_MAX` for attackers, and its log has few lines about them. An attack that reaches no daemon is a
failure, too. The client's waiting times are reported, and not checked: attackers take their part of the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client, ClientSettings, Position
from kera.core.base.settings import MIB
from kera.core.credential_settings import secure
from kera.core.runtime import MACHINE
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2
from tests.chaos.crowd_attacks import ARRIVED, ATTACKS, LET_IN, OF_TLS, Target
from tests.chaos.running import Program, Run
from tests.chaos.verdict import Wrong
from tests.fuzz.greedy import anonymous_bytes
from tests.fuzz.probe import ANSWER_S_MAX, Probing, probing
from tests.fuzz.secured import secured_cluster

STREAM, LOAD = "much", "s"
STORED_BYTES = 48 * MIB
"""Data for attackers that read a lot."""
MEMORY_MAX = 400 * MIB
LINES_MAX = 400
"""Lines of a log, in each attack."""
AFTER_S = 2.0
ASKED = ("write", "read", "connect")
"""Requests that the client repeats all the time."""
DAEMONS = ("broker-1", "coordinator")


# -- resources of daemons ----------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Resources of one daemon."""

    memory: int
    """Bytes that are the daemon's own."""
    descriptors: int
    lines: int
    """Lines of the daemon's log."""


def taken(cluster: LocalCluster, name: str) -> Taken:
    """The resources of a daemon now."""
    pid = cluster.processes[name]
    lines = (cluster.log_dir / f"{name}.log").read_bytes().count(b"\n")
    return Taken(anonymous_bytes(pid), len(list(Path(f"/proc/{pid}/fd").iterdir())), lines)


@dataclass
class Row:
    """An attack, and its result."""

    name: str
    told: Sequence[Mapping[str, Any]]
    """The client's reports from before the attack, during it, and after it."""
    did: Counter[str]
    daemons: dict[str, tuple[Taken, Taken, Taken]]
    """Before, at most, and after."""

    @property
    def wrong(self) -> list[str]:
        """Promises that were broken."""
        errors = Counter(error for told in self.told for error in told["errors"])
        wrong = [f"{count} times {error}" for error, count in errors.items()]
        for when, told in zip(("before", "meanwhile", "afterwards"), self.told, strict=True):
            wrong += [f"no {what} was answered {when}" for what in ASKED if not told[what]]
        if not has_arrived(self.did):
            wrong.append(f"it has reached nobody: {dict(self.did)}")
        if self.did[LET_IN]:
            wrong.append(f"{self.did[LET_IN]} times somebody was let in")
        for name, (before, most, _) in self.daemons.items():
            if most.memory - before.memory > MEMORY_MAX:
                wrong.append(f"{name} took {(most.memory - before.memory) // MIB} MiB")
            if most.lines - before.lines > LINES_MAX:
                wrong.append(f"{name} logged {most.lines - before.lines} lines")
        return wrong

    def __str__(self) -> str:
        told = []
        for before, most, after in self.daemons.values():
            memory = " → ".join(f"{each.memory / MIB:.0f}" for each in (before, most, after))
            descriptors = " → ".join(str(each.descriptors) for each in (before, most, after))
            told.append(f"{memory} | {descriptors} | {most.lines - before.lines}")
        did = ", ".join(f"{count:,} {what}" for what, count in self.did.most_common(4))
        quiet, busy, _ = map(p99, self.told)
        return f"| {self.name} | {quiet} | {busy} | {' | '.join(told)} | {did} |"


def has_arrived(did: Counter[str]) -> bool:
    """Whether an attack has reached a daemon."""
    return any(did[what] for what in ARRIVED)


HEAD = (
    "| attack | p99 of write / read / connect before, ms | meanwhile | broker: MiB before → most → after | descriptors"
    " | lines | coordinator: MiB | descriptors | lines | what it did |\n|---|---|---|---|---|---|---|---|---|---|"
)


# -- a cluster ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def attacked(root: Path, *, encrypted: bool) -> AsyncIterator[LocalCluster]:
    """A cluster with data to read; clients of this process have all rights."""
    coordinator = {"tls_client_auth": "optional"} if encrypted else {}
    broker = {**coordinator, "flush_delay_ms": 3_600_000}
    sizes = {"arena_bytes": 256 * MIB, "coordinator_settings": coordinator, "broker_settings": broker}
    async with secured_cluster(root, encrypted=encrypted, **sizes) as (cluster, _):
        async with await Client.connect(cluster.bootstrap, settings()) as client:
            for name in (STREAM, LOAD):
                await client.admin.create_stream(name, streamlets=1, replication=0)
            async with client.producer() as producer:
                await producer.prepare(STREAM)
                value = bytes(100_000)
                for _ in range(STORED_BYTES // len(value)):
                    producer.send(STREAM, value)
        yield cluster


def settings() -> ClientSettings:
    """Settings with all rights: the environment names the user."""
    return ClientSettings(transport="tcp")


async def target_of(cluster: LocalCluster, connections: int) -> Target:
    """The target of the attacks."""
    ports: list[dict[Any, int]] = []
    for name in DAEMONS:
        ready = cluster.ready[name]
        ways = {"frames": "frames_address", "grpc": "grpc_address", "metrics": "metrics_address"}
        ports.append({way: int(ready[key].rpartition(":")[2]) for way, key in ways.items() if key in ready})
    runtime = secure(MACHINE, settings())
    read = broker_pb2.MultiReadChunksRequest(bytes_max=32 * MIB)
    async with await Client.connect(cluster.bootstrap, settings()) as client:
        stream = await client.admin.describe_stream(STREAM)
        start = read.ranges.add().start
        at = Position(0, 0, 0)
        start.stream_id, start.streamlet_id, start.entry = stream.stream_id, 0, 0
        start.group_id, start.segment_id, start.position = at
    assert runtime.introduction is not None
    return Target(ports[0], ports[1], runtime.tls, runtime.introduction, read, connections)


async def attacks(run: Run, root: Path, *, encrypted: bool) -> list[Row]:
    """Run all selected attacks that make sense with this encryption, in one cluster."""
    arguments, rows = run.arguments, list[Row]()
    kinds = [name for name in arguments.kinds if encrypted or name not in OF_TLS]
    async with (
        attacked(root, encrypted=encrypted) as cluster,
        probing(cluster.bootstrap, LOAD, KERA_CLIENT_TRANSPORT="tcp") as good,
    ):
        for name in kinds:
            target = await target_of(cluster, arguments.connections)
            rows.append(await one(name, cluster, target, good, arguments.before, arguments.seconds))
            print(rows[-1], flush=True)
            run.seen["attacks"] += 1
    return rows


async def one(name: str, cluster: LocalCluster, target: Target, good: Probing, before_s: float, seconds: float) -> Row:
    """Run one attack."""
    await good.report()
    await asyncio.sleep(before_s)  # sleep: measures the client without an attack
    quiet = await answers(good)
    before = most = {each: taken(cluster, each) for each in DAEMONS}
    attack = asyncio.ensure_future(ATTACKS[name](target))
    arrived, end_s = False, time.monotonic() + ANSWER_S_MAX
    while time.monotonic() < end_s and not attack.done():
        if not arrived and has_arrived(target.did):
            arrived, end_s = True, time.monotonic() + seconds
        now = {each: taken(cluster, each) for each in DAEMONS}
        most = {each: Taken(*map(max, most[each], now[each])) for each in DAEMONS}
        await asyncio.sleep(0.1)
    busy = await answers(good)
    attack.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attack
        raise Wrong(f"{name}: the attack has ended by itself")
    await asyncio.sleep(AFTER_S)  # sleep: measures the after-effects
    left = await answers(good)
    after = {each: taken(cluster, each) for each in DAEMONS}
    daemons = {each: (before[each], most[each], after[each]) for each in DAEMONS}
    return Row(name, (quiet, busy, left), target.did, daemons)


async def answers(good: Probing) -> dict[str, Any]:
    """The client's report since the last one; waits for an answer of each kind until it is overdue."""
    told, deadline_s = await good.report(), time.monotonic() + ANSWER_S_MAX
    while not all(told[what] for what in ASKED) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.1)
        more = await good.report()
        told = {name: found or more[name] for name, found in told.items()}
    return told


def p99(told: Mapping[str, Any]) -> str:
    """The client's waiting times; – where no answer came."""
    return " / ".join(f"{told[what]['p99']:.0f}" if told[what] else "–" for what in ASKED)


async def work(run: Run) -> None:
    """Run all attacks, with TLS and without; failures come in a group, after all attacks."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it would log every connection that a daemon closes
    rows: list[Row] = []
    for encrypted in (True, False):
        if run.arguments.tls in {None, "on" if encrypted else "off"}:
            print(f"\n{'with' if encrypted else 'without'} TLS\n\n{HEAD}", flush=True)
            with run.cluster_folder() as folder:
                rows += await attacks(run, folder, encrypted=encrypted)
    if not rows:
        raise Wrong("these attacks are on TLS: nothing was done without it")
    if wrong := [Wrong(f"{row.name}: {text}") for row in rows for text in row.wrong]:
        raise ExceptionGroup("attacks", wrong)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this program."""
    parser.add_argument("--seconds", type=float, default=12.0, help="for which each attack goes on that has arrived")
    parser.add_argument("--before", type=float, default=5.0, help="seconds before each attack")
    parser.add_argument("--connections", type=int, default=5000, help="of those who only connect")
    parser.add_argument("--tls", choices=["on", "off"], help="absent: both, one after the other")


CROWD = Program(
    __doc__ or "",
    "nobody else was refused, and daemons stayed small",
    work,
    kinds=tuple(ATTACKS),
    options=options,
    seeded=False,
)
