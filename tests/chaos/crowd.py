"""Attack a cluster with security on as somebody who has no password, or one and means harm: ``make chaos-crowd``.

Beside a client that writes and reads all the time, asks the coordinator, and looks for health, one attack after the
other (`crowd_attacks`) goes on for some seconds. Told is, for each: how long what the client asks took before and
meanwhile, what failed; and of broker and coordinator the memory that is theirs alone, file descriptors, and lines of
their logs. With TLS and without.

Promised, and checked: nothing that the client asks fails; a daemon takes `MEMORY_MAX` at most for those who attack, and
its log has few lines of them. How long the client waits is told, and not checked: whoever attacks takes its part of the
processor, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client, ClientSettings, Position
from kera.core.access.credentials import of_daemon
from kera.core.access.passwords import verifier_for
from kera.core.base.settings import MIB
from kera.core.credential_settings import secure
from kera.core.errors import KeraError
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import call
from kera.core.runtime import MACHINE
from kera.core.security import Tls, TlsFiles
from kera.core.security.issuing import Authority
from kera.local.cluster import LocalCluster
from kera.v1 import access_pb2, broker_pb2
from tests.chaos.crowd_attacks import ATTACKS, HOST, Target

SECRET = "a secret that all daemons of the cluster have"
PASSWORD = "correct horse battery"
USER = "admin"
STREAM, LOAD = "much", "s"
STORED_BYTES = 48 * MIB
"""For those who read much."""
MEMORY_MAX = 400 * MIB
LINES_MAX = 400
"""Of a log, of each attack."""
PAUSE_S = 0.01
"""Between two things that the client asks."""
AFTER_S = 2.0
DAEMONS = ("broker-1", "coordinator")


# -- somebody who means well, in a process of its own ----------------------------------------------------------------


async def be_good(settings: ClientSettings, bootstrap: str) -> None:
    """Ask until it is ended; each answer is a line."""

    def tell(what: str, begun_s: float, error: str = "") -> None:
        now_s = time.monotonic()
        print(json.dumps([what, now_s, (now_s - begun_s) * 1000, error]), flush=True)

    async def write(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(LOAD)
            while True:
                begun_s = time.monotonic()
                try:
                    await producer.send(LOAD, b"%.6f" % begun_s)
                    tell("write", begun_s)
                except KeraError as error:
                    tell("write", begun_s, repr(error))
                await asyncio.sleep(PAUSE_S)

    async def read(client: Client) -> None:
        async with client.consumer(LOAD, start="latest") as consumer:
            async for chunk in consumer.batches():
                for value in chunk.batch["value"].to_pylist():
                    tell("read", float(value))

    async def ask() -> None:
        while True:
            begun_s = time.monotonic()
            try:
                async with await Client.connect(bootstrap, settings) as client:  # anew, as who starts does
                    await client.admin.describe_stream(LOAD)
                tell("connect", begun_s)
            except KeraError as error:
                tell("connect", begun_s, repr(error))
            await asyncio.sleep(0.1)  # sleep: so often somebody new comes

    async with await Client.connect(bootstrap, settings) as client:
        await asyncio.gather(write(client), read(client), ask())


class Sample(NamedTuple):
    """What one thing took."""

    what: str
    at_s: float
    ms: float
    error: str


@dataclass
class Good:
    """That process, and what it has told."""

    process: asyncio.subprocess.Process
    samples: list[Sample] = field(default_factory=list)

    async def listen(self) -> None:
        """Until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if line.startswith(b"["):
                self.samples.append(Sample(*json.loads(line)))

    def between(self, begin_s: float, end_s: float) -> str:
        """By what: how often, and the 99th percentile; raises nothing."""
        told = []
        for what in ("write", "read", "connect"):
            some = sorted(each.ms for each in self.samples if each.what == what and begin_s <= each.at_s < end_s)
            told.append(f"{some[len(some) * 99 // 100]:.0f}" if some else "–")
        return " / ".join(told)

    def errors(self, begin_s: float, end_s: float) -> Counter[str]:
        """What failed."""
        return Counter(each.error for each in self.samples if each.error and begin_s <= each.at_s < end_s)


# -- what daemons take -------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Of one daemon."""

    memory: int
    """Bytes that are its own."""
    descriptors: int
    lines: int
    """Of its log."""


def taken(cluster: LocalCluster, name: str) -> Taken:
    """Now."""
    directory = Path(f"/proc/{cluster.processes[name]}")
    memory = next(line for line in (directory / "status").read_text().splitlines() if line.startswith("RssAnon"))
    lines = (cluster.log_dir / f"{name}.log").read_bytes().count(b"\n")
    return Taken(int(memory.split()[1]) << 10, len(list((directory / "fd").iterdir())), lines)


@dataclass
class Row:
    """An attack, and what it came to."""

    name: str
    before: str
    during: str
    errors: Counter[str]
    did: Counter[str]
    daemons: dict[str, tuple[Taken, Taken, Taken]]
    """Before, at most, and after."""

    @property
    def wrong(self) -> list[str]:
        """Promises that were broken."""
        wrong = [f"{count} times {error}" for error, count in self.errors.items()]
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
        return f"| {self.name} | {self.before} | {self.during} | {' | '.join(told)} | {did} |"


HEAD = (
    "| attack | p99 of write / read / connect before, ms | meanwhile | broker: MiB before → most → after | descriptors"
    " | lines | coordinator: MiB | descriptors | lines | what it did |\n|---|---|---|---|---|---|---|---|---|---|"
)


# -- a cluster ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def attacked(root: Path, *, encrypted: bool) -> AsyncIterator[tuple[LocalCluster, ClientSettings]]:
    """A cluster that has something to read, and the settings of who may do all."""
    authority, _ = Authority.open_or_make(root / "certificates")
    one = authority.issue(HOST)
    secret = root / "secret"
    secret.write_text(SECRET)
    settings: dict[str, object] = {
        "security": True,
        "cluster_secret_file": secret,
        "super_users": [f"user:{USER}"],
        "metrics_port": 0,
    }
    if encrypted:
        settings |= {"tls_cert": one.cert, "tls_key": one.key, "tls_ca": authority.path, "tls_client_auth": "optional"}
    client_settings = ClientSettings(
        tls_ca=authority.path if encrypted else None, user=USER, password=PASSWORD, transport="tcp"
    )
    cluster = LocalCluster(
        arena_bytes=256 * MIB, coordinator_settings=settings, broker_settings={**settings, "flush_delay_ms": 3_600_000}
    )
    async with cluster:
        tls = Tls(TlsFiles(ca=authority.path)) if encrypted else None
        channel = GrpcChannel(cluster.bootstrap, tls=tls, introduction=of_daemon(SECRET))
        request = access_pb2.PutUserRequest(name=USER, create=True, scram=verifier_for(PASSWORD))
        await call(channel, api.PUT_USER, request, timeout_s=10)
        await channel.close()
        async with await Client.connect(cluster.bootstrap, client_settings) as client:
            for name in (STREAM, LOAD):
                await client.admin.create_stream(name, streamlets=1, replication=0)
            async with client.producer() as producer:
                await producer.prepare(STREAM)
                value = bytes(100_000)
                for _ in range(STORED_BYTES // len(value)):
                    producer.send(STREAM, value)
        yield cluster, client_settings


async def target_of(cluster: LocalCluster, settings: ClientSettings, connections: int) -> Target:
    """Where the attacks go."""
    ports: list[dict[Any, int]] = []
    for name in DAEMONS:
        ready = cluster.ready[name]
        ways = {"frames": "frames_address", "grpc": "grpc_address", "metrics": "metrics_address"}
        ports.append({way: int(ready[key].rpartition(":")[2]) for way, key in ways.items() if key in ready})
    runtime = secure(MACHINE, settings)
    read = broker_pb2.MultiReadChunksRequest(bytes_max=32 * MIB)
    async with await Client.connect(cluster.bootstrap, settings) as client:
        stream = await client.admin.describe_stream(STREAM)
        start = read.ranges.add().start
        at = Position(0, 0, 0)
        start.stream_id, start.streamlet_id, start.entry = stream.stream_id, 0, 0
        start.group_id, start.segment_id, start.position = at
    assert runtime.introduction is not None
    return Target(ports[0], ports[1], runtime.tls, runtime.introduction, read, connections)


async def run(arguments: argparse.Namespace, root: Path, *, encrypted: bool) -> list[Row]:
    """All attacks that are asked for, in one cluster."""
    rows = []
    async with attacked(root, encrypted=encrypted) as (cluster, settings):
        ca = ["--ca", str(settings.tls_ca)] if encrypted else []
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.crowd", "--good", cluster.bootstrap, *ca), stdout=subprocess.PIPE
        )
        good = Good(process)
        listening = asyncio.create_task(good.listen())
        try:
            for name in arguments.attacks or ATTACKS:
                target = await target_of(cluster, settings, arguments.connections)
                rows.append(await one(name, cluster, target, good, arguments.before, arguments.seconds))
                print(rows[-1], flush=True)
                for wrong in rows[-1].wrong:
                    print(f"  WRONG: {wrong}", flush=True)
        finally:
            process.kill()
            await process.wait()
            listening.cancel()
    return rows


async def one(name: str, cluster: LocalCluster, target: Target, good: Good, before_s: float, seconds: float) -> Row:
    """An attack."""
    while not good.samples:
        await asyncio.sleep(0.1)
    quiet_s = time.monotonic()
    await asyncio.sleep(before_s)  # sleep: what the client is told without an attack is measured
    before = most = {each: taken(cluster, each) for each in DAEMONS}
    begun_s = time.monotonic()
    attack = asyncio.ensure_future(ATTACKS[name](target))
    while time.monotonic() < begun_s + seconds and not attack.done():
        now = {each: taken(cluster, each) for each in DAEMONS}
        most = {each: Taken(*map(max, most[each], now[each])) for each in DAEMONS}
        await asyncio.sleep(0.1)
    ended_s = time.monotonic()
    if not attack.done():
        attack.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await attack
    await asyncio.sleep(AFTER_S)  # sleep: what is left of it is measured
    after = {each: taken(cluster, each) for each in DAEMONS}
    return Row(
        name,
        good.between(quiet_s, begun_s),
        good.between(begun_s, ended_s),
        good.errors(begun_s, ended_s + AFTER_S),
        target.did,
        {each: (before[each], most[each], after[each]) for each in DAEMONS},
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=12.0, help="for which each attack goes on")
    parser.add_argument("--before", type=float, default=5.0, help="seconds before each attack")
    parser.add_argument("--connections", type=int, default=5000, help="of those who only connect")
    parser.add_argument("--attacks", nargs="*", choices=ATTACKS, help="absent: all")
    parser.add_argument("--tls", choices=["on", "off"], help="absent: both, one after the other")
    parser.add_argument("--good", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    parser.add_argument("--ca", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.good:
        settings = ClientSettings(tls_ca=arguments.ca, user=USER, password=PASSWORD, transport="tcp")
        asyncio.run(be_good(settings, arguments.good))
        return
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of connections that daemons close it would say a lot
    rows: list[Row] = []
    for encrypted in (True, False):
        if arguments.tls in {None, "on" if encrypted else "off"}:
            print(f"\n{'with' if encrypted else 'without'} TLS\n\n{HEAD}", flush=True)
            with tempfile.TemporaryDirectory(prefix="kera-chaos-crowd-") as root:
                rows += asyncio.run(run(arguments, Path(root), encrypted=encrypted))
    if any(row.wrong for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
