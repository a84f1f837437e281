"""Cut hosts off, silently, while clients produce and consume: ``make chaos-silence CUTS=8,30,60``.

Three hosts in network namespaces of this machine (``tests.namespaces``): the coordinator and a backup; two brokers; a
producer and a consumer. A cut has the switch drop every packet from and to one host, and tells nobody: connections
look as if the other end had nothing to say. Each round cuts off the host of the clients, or that of the brokers for
less than it takes to count as dead, and connects it again.

Promised, and checked: when the network is back, the producer is acknowledged, and the consumer reads, within
`GOES_ON_S`; no record is lost, none comes twice. And connections of clients whose host is gone for good are gone from
the brokers and from the coordinator within `GONE_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kera.core.base.process import DIE_WITH_PARENT_VARIABLE
from kera.core.base.settings import KIB, MIB
from kera.core.base.telemetry import configure_logging
from kera.local.cluster import LocalCluster
from tests.chaos.verdict import Wrong
from tests.namespaces import Host, hosts, why_not

GOES_ON_S = 2.0
GONE_S = 60.0
CONTROL, STORE, WORK = "control", "store", "work"
LINE_BYTES_MAX = 1 << 20
STEP_TIMEOUT_S = 60.0
LOOK_S = 0.1
DID = ("acked", "read")
ENVIRONMENT = {**os.environ, DIE_WITH_PARENT_VARIABLE: "1", "PYTHONPATH": str(Path(__file__).parents[2])}
"""Of processes on other hosts, which begin in another directory."""
VANISHING = 100


class Cut(NamedTuple):
    """One silent cut, and what came of it."""

    transport: str
    replication: int
    host: str
    seconds: float
    acked_s: float
    """From the network's return to the next record acknowledged."""
    read_s: float

    def __str__(self) -> str:
        return (
            f"{self.transport:4s} R={self.replication} {self.host:5s} cut {self.seconds:4.0f} s:"
            f" producer +{self.acked_s:.2f} s, consumer +{self.read_s:.2f} s"
        )


class SpreadCluster(LocalCluster):
    """Each daemon on its host."""

    def __init__(self, data_dir: Path, control: Host, store: Host, *, replication: int) -> None:
        super().__init__(
            brokers=2,
            backups=1,
            replication=replication,
            data_dir=data_dir,
            arena_bytes=32 * MIB,
            backup_memory_bytes=32 * MIB,
            segment_bytes=256 * KIB,
        )
        self._on = {"coordinator": control, "backup-1": control, "broker-1": store, "broker-2": store}

    def _argv_of(self, name: str) -> list[str]:
        host = self._on[name]
        return [*host.enter, *super()._argv_of(name), "--host", host.address, "--insecure"]


class Clients:
    """The process of `network_client`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._changed = asyncio.Condition()
        self._last: dict[str, float] = {}
        """When what happened last, by the monotonic clock, which is the same on all hosts of a machine."""
        self._ready = False
        self._wrong: str | None = None
        self._result: dict[str, int] | None = None
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, host: Host, bootstrap: str, log: Path, *arguments: str) -> AsyncIterator[Clients]:
        """A producer and a consumer on a host."""
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(*host.enter, sys.executable, "-m", "tests.chaos.network_client", bootstrap, *arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=ENVIRONMENT,
                limit=LINE_BYTES_MAX,
            )
        clients = cls(process)
        try:
            await clients._until(lambda: clients._ready)
            yield clients
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await clients._listening

    async def _listen(self) -> None:
        stdout = self._process.stdout
        while stdout is not None and (line := await stdout.readline()):
            what = json.loads(line)
            async with self._changed:
                if "did" in what:
                    self._last[what["did"]] = what["at"]
                elif "wrong" in what:
                    self._wrong = what["wrong"]
                elif "sent" in what:
                    self._result = what
                self._ready = self._ready or "ready" in what
                self._changed.notify_all()
        async with self._changed:
            self._wrong = self._wrong or ("they have ended" if self._result is None else None)
            self._changed.notify_all()

    async def _until(self, condition: Any, timeout_s: float = STEP_TIMEOUT_S) -> None:
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: condition() or self._wrong is not None)
        if self._wrong is not None:
            raise Wrong(self._wrong)

    async def first_after(self, what: str, since_s: float, timeout_s: float) -> float:
        """When something happened for the first time after a moment, from that on."""
        await self._until(lambda: self._last.get(what, 0.0) > since_s, timeout_s)
        return self._last[what] - since_s

    async def both_go_on(self, since_s: float, timeout_s: float = STEP_TIMEOUT_S) -> tuple[float, float]:
        """How long after a moment a record was acknowledged, and one was read."""
        acked, read = await asyncio.gather(*(self.first_after(what, since_s, timeout_s) for what in DID))
        return acked, read

    async def stop(self) -> int:
        """Have them end; how many records there were, all of which have come."""
        if self._process.stdin is not None:
            self._process.stdin.write(b"stop\n")
        await self._until(lambda: self._result is not None)
        result = self._result or {}
        if result["sent"] != result["read"]:
            raise Wrong(f"{result['sent']} records were acknowledged, and {result['read']} read")
        return result["sent"]


async def cut(host: Host, clients: Clients, seconds: float) -> tuple[float, float]:
    """Cut a host off for a while; how long it takes from then on until producer and consumer go on."""
    await clients.both_go_on(time.monotonic())
    host.cut_off()
    try:
        await asyncio.sleep(seconds)  # sleep: the cut itself
    finally:
        host.reconnect()
    return await clients.both_go_on(time.monotonic(), timeout_s=seconds + STEP_TIMEOUT_S)


async def cuts(
    directory: Path, where: Sequence[tuple[str, float]], *, transport: str, replication: int
) -> AsyncIterator[Cut]:
    """A cluster on hosts of its own, and one cut after the other: which host, and for how long."""
    with hosts(CONTROL, STORE, WORK) as (control, store, work):
        by_name = {host.name: host for host in (control, store, work)}
        cluster = SpreadCluster(directory / "data", control, store, replication=replication)
        arguments = ("--transport", transport, "--replication", str(replication))
        log = directory / "clients.log"
        async with cluster, Clients.running(work, cluster.bootstrap, log, *arguments) as clients:
            for name, seconds in where:
                acked_s, read_s = await cut(by_name[name], clients, seconds)
                yield Cut(transport, replication, name, seconds, acked_s, read_s)
            await clients.stop()


def connections_from(host: Host, at: Host) -> int:
    """How many TCP connections from one host the kernel of another one still has."""
    command = [*at.enter, "ss", "-Htn", "state", "established", "dst", host.address]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=STEP_TIMEOUT_S)
    return len(listed.stdout.splitlines())


async def vanish(directory: Path, count: int = VANISHING) -> AsyncIterator[tuple[int, float]]:
    """Clients whose host is cut off for good: how many connections there were, and after how long none is left."""
    with hosts(CONTROL, STORE, WORK) as (control, store, work):
        cluster = SpreadCluster(directory / "data", control, store, replication=0)
        async with cluster:
            addresses = [cluster.ready["broker-1"]["frames_address"], cluster.ready["coordinator"]["grpc_address"]]
            process = await asyncio.create_subprocess_exec(
                *(*work.enter, sys.executable, "-m", "tests.chaos.network_vanishing", str(count), *addresses),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=ENVIRONMENT,
            )
            try:
                assert process.stdout is not None
                async with asyncio.timeout(STEP_TIMEOUT_S):
                    await process.stdout.readline()
                before = connections_from(work, store) + connections_from(work, control)
                if before < 2 * count:
                    raise Wrong(f"{before} connections were made, and not {2 * count}")
                work.cut_off()
                since_s = time.monotonic()
                while left := connections_from(work, store) + connections_from(work, control):
                    if time.monotonic() > since_s + 2 * GONE_S:
                        raise Wrong(f"{left} of {before} connections are still there after {2 * GONE_S:.0f} s")
                    await asyncio.sleep(LOOK_S)
                yield before, time.monotonic() - since_s
            finally:
                process.kill()
                await process.wait()


@contextlib.contextmanager
def directory_of(kept: Path | None) -> Iterator[Path]:
    """Where data and logs are."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="kera-network-") as made:
        yield Path(made)


async def main(arguments: argparse.Namespace) -> int:
    """All cuts that were asked for; the exit code."""
    late = 0
    seconds = [float(each) for each in arguments.cuts.split(",")]
    for transport in arguments.transports.split(","):
        for replication in (0, 1):
            where = [(WORK, each) for each in seconds] + [(STORE, arguments.store_cut)] * (arguments.store_cut > 0)
            with directory_of(arguments.directory and arguments.directory / f"{transport}-{replication}") as directory:
                async for done in cuts(directory, where, transport=transport, replication=replication):
                    ok = max(done.acked_s, done.read_s) <= GOES_ON_S
                    late += not ok
                    print(done, "" if ok else "TOO LATE", flush=True)
    if arguments.vanish:
        with directory_of(arguments.directory and arguments.directory / "vanish") as directory:
            async for count, gone_s in vanish(directory, arguments.vanish):
                late += gone_s > GONE_S
                print(f"{count} connections of clients that vanished: gone after {gone_s:.1f} s", flush=True)
    return 1 if late else 0


def run() -> int:
    """Read the arguments and go."""
    parser = argparse.ArgumentParser(description="See the head of this module.")
    parser.add_argument("--cuts", default="8,30,60", help="lengths of the cuts of the clients' host, in seconds")
    parser.add_argument("--store-cut", type=float, default=5.0, help="of the brokers' host; 0: none")
    parser.add_argument("--transports", default="tcp,grpc")
    parser.add_argument("--vanish", type=int, default=VANISHING, help="clients that vanish; 0: none")
    parser.add_argument("--directory", type=Path, help="keep data and logs here")
    arguments = parser.parse_args()
    configure_logging("warning")
    reason = why_not()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    return asyncio.run(main(arguments))


if __name__ == "__main__":
    sys.exit(run())
