"""The effect of a greedy client on a polite one: alone, beside one without a quota, and beside one that has one.

The polite client sends a small record every few milliseconds, whether the one before was answered or not, and reads
them back. The greedy one writes as much as it can, and reads another stream again and again, over connections of its
own. Each is a process, and both are users with a password; nothing is encrypted, and no memory is shared.

The greedy one writes at most ``--bytes-max`` in a round, and then only reads: what does not fit into the broker's
memory goes to disk, until the round is over. Such rounds are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import uvloop

from bench.common import IN_MEMORY, Figures, alternating, directory, parser, say, size
from kera.cli.bench._latency import Latencies
from kera.client import Client, ClientSettings
from kera.client.cluster.cluster import Cluster
from kera.core.access.credentials import of_daemon
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import MIB
from kera.core.runtime import MACHINE, secured
from kera.local.cluster import LocalCluster

PASSWORD = "correct horse battery"  # noqa: S105 - of clusters that live for seconds
SECRET = "a secret that all daemons of the cluster have"  # noqa: S105
POLITE, GREEDY, OLD = "polite", "greedy", "greedy-old"
ALONE, WITHOUT = "alone", "without a quota"
OF_ITS_OWN, DEFAULT = "with a quota of its own", "with the default quota"
KINDS = (ALONE, WITHOUT, OF_ITS_OWN, DEFAULT)
VALUE_BYTES = 1000
BATCH_RECORDS = 1000
BATCH_BYTES = VALUE_BYTES * BATCH_RECORDS
WARM_UP_S = 1.0
"""In this time, the greedy client begins, and uses up its initial allowance."""
PATIENCE_S = 60.0
"""A client that is not done after this time is given up."""
READ_BYTES = 64 * MIB
"""Size of the data that the greedy client reads again and again."""


def settings_of(user: str, transport: str) -> ClientSettings:
    """The settings of a client."""
    return ClientSettings(user=user, password=PASSWORD, transport="tcp" if transport == "tcp" else "grpc")


def batch() -> pa.RecordBatch:
    """Records that do not compress."""
    values = [random.Random(row).randbytes(VALUE_BYTES) for row in range(BATCH_RECORDS)]
    return pa.record_batch({"value": values})


# -- clients -------------------------------------------------------------------------------------------------------


async def polite(arguments: argparse.Namespace) -> dict[str, object]:
    """Send a record now and then; returns the times until each was acknowledged, and until it was read back."""
    acknowledged, delivered = Latencies(), Latencies()
    begun_s = time.perf_counter()
    count = int(arguments.seconds * arguments.records_per_s)

    async def read(client: Client) -> None:
        seen = 0
        async for record in client.consumer(POLITE, start="earliest", shared_memory="never"):
            delivered.add(time.perf_counter_ns() - int.from_bytes((record.value or b"")[:8], "little"))
            seen += 1
            if seen == count:
                return

    async with (
        await Client.connect(arguments.bootstrap, settings_of(POLITE, arguments.transport)) as client,
        client.producer() as producer,
    ):
        await producer.prepare(POLITE)
        tasks = [asyncio.create_task(read(client))]

        async def send(due_ns: int) -> None:
            await producer.send(POLITE, due_ns.to_bytes(8, "little") + bytes(VALUE_BYTES))
            acknowledged.add(time.perf_counter_ns() - due_ns)

        for number in range(count):
            due_s = begun_s + number / arguments.records_per_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(send(int(due_s * 1e9))))
        await asyncio.gather(*tasks)
    return {"acknowledged": acknowledged.encode(), "delivered": delivered.encode()}


class Greedy:
    """A client that writes and reads as much as it can."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._sent_bytes = self._written_bytes = self._read_bytes = self._throttled_ms = 0
        self.is_done = False
        """It has reached its limit and writes no more."""

    async def write(self) -> None:
        """Write up to the limit."""
        sent, waiting = batch(), deque[Any]()
        async with self._client.producer() as producer:
            try:
                while self._sent_bytes < self._arguments.bytes_max:
                    waiting.append(await producer.send_batch(GREEDY, sent))
                    self._sent_bytes += BATCH_BYTES
                    if len(waiting) > self._arguments.batches:
                        await waiting.popleft()
                        self._written_bytes += BATCH_BYTES
                self.is_done = True
            finally:
                self._throttled_ms += producer.throttled_ms
                await producer.close(flush=False)

    async def read(self) -> None:
        """Read the same data again and again."""
        while True:
            async with self._client.consumer(OLD, start="earliest", end="latest", shared_memory="never") as consumer:
                try:
                    async for chunk in consumer.batches():
                        self._read_bytes += chunk.header.chunk_bytes
                finally:
                    self._throttled_ms += consumer.throttled_ms

    def figures(self) -> Counter[str]:
        """The figures so far."""
        return Counter(written=self._written_bytes, read=self._read_bytes)

    @property
    def throttled_ms(self) -> int:
        """The time for which its answers were held back, for reads and writes that have ended."""
        return self._throttled_ms


async def greedy(arguments: argparse.Namespace) -> dict[str, object]:
    """Write and read as much as possible, until the process gets a signal; returns the amounts."""
    async with await Client.connect(arguments.bootstrap, settings_of(GREEDY, arguments.transport)) as client:
        work = Greedy(client, arguments)
        tasks = [asyncio.create_task(each()) for each in (work.write, work.read)]
        await asyncio.sleep(WARM_UP_S)
        print("ready", flush=True)
        begun_s, before = time.perf_counter(), work.figures()
        await asyncio.wait_for(asyncio.to_thread(sys.stdin.read), arguments.seconds + PATIENCE_S)
        seconds = time.perf_counter() - begun_s
        done = work.figures() - before
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    rates = {what: done[what] / seconds / 1e6 for what in ("written", "read")}
    return {**rates, "throttled_ms": work.throttled_ms, "is_done": work.is_done}


# -- rounds --------------------------------------------------------------------------------------------------------


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run all kinds, in turn, each with a cluster of its own."""
    figures = Figures("quotas", arguments, root)
    secret = root / "secret"
    secret.write_text(SECRET)
    settings: dict[str, object] = {"security": True, "cluster_secret_file": secret}
    for number, kind in enumerate(alternating(KINDS, arguments.rounds)):
        say(kind)
        async with LocalCluster(
            arena_bytes=arguments.memory_bytes,
            coordinator_settings=settings,
            broker_settings={**settings, **IN_MEMORY},
            log_dir=root / f"logs-{number}",
        ) as cluster:
            await prepare(cluster.bootstrap, arguments, kind)
            await measure(arguments, cluster.bootstrap, kind, figures)
    for what in ("acknowledged", "delivered"):
        for percentile in ("p50", "p99"):
            for kind in KINDS[1:]:
                of = figures.median(f"{kind}: {what}, {percentile}") / figures.median(f"{ALONE}: {what}, {percentile}")
                figures.notes[f"{what}, {percentile}: {kind} / {ALONE}"] = f"{of:.2f}"
    figures.print()


async def prepare(bootstrap: str, arguments: argparse.Namespace, kind: str) -> None:
    """Create two users, and the streams that they write and read."""
    runtime = secured(MACHINE, None, of_daemon(SECRET))
    async with Client(Cluster(bootstrap, ClientSettings(), runtime=runtime)) as client:
        for user in (POLITE, GREEDY):
            await client.access.create_user(user, PASSWORD)
            await client.access.grant(f"user:{user}", ["read", "write"], f"stream:{user}*")
        await client.admin.create_stream(POLITE, durability="leader")
        await client.admin.create_stream(GREEDY, durability="leader", retention_bytes=READ_BYTES)
        await client.admin.create_stream(OLD, durability="leader")
        async with client.producer() as producer:
            for _ in range(READ_BYTES // BATCH_BYTES):
                await producer.send_batch(OLD, batch())
        quota = {"bytes_in_per_s": arguments.quota, "bytes_out_per_s": arguments.quota}
        if kind == OF_ITS_OWN:
            await client.access.set_quota(GREEDY, **quota)
        elif kind == DEFAULT:
            await client.access.set_default_quota(**quota)


async def measure(arguments: argparse.Namespace, bootstrap: str, kind: str, figures: Figures) -> None:
    """Measure one round of one kind."""
    other = None if kind == ALONE else await start(arguments, bootstrap, GREEDY)
    if other is not None and other.stdout is not None:
        await other.stdout.readline()
    child = await start(arguments, bootstrap, POLITE)
    result = await outcome(child, arguments)
    if other is not None:
        done = await outcome(other, arguments)
        for what in ("written", "read"):
            figures.add(f"{kind}: {what} by the greedy one", done[what], "MB/s")
        figures.add(f"{kind}: throttled, as the greedy one is told", done["throttled_ms"], "ms")
        if done["is_done"]:
            figures.notes[kind] = "the greedy one has written all that it may, and then only read"
    for what in ("acknowledged", "delivered"):
        latencies = Latencies()
        latencies.add_encoded(result[what])
        for percentile, at in (("p50", 50), ("p99", 99)):
            figures.add(f"{kind}: {what}, {percentile}", latencies.ms(at), "ms")


async def start(arguments: argparse.Namespace, bootstrap: str, load: str) -> asyncio.subprocess.Process:
    """Start a client as a process."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.quotas", "--load", load, "--bootstrap", bootstrap,
        "--transport", arguments.transport, "--seconds", str(arguments.seconds),
        "--records-per-s", str(arguments.records_per_s), "--batches", str(arguments.batches),
        "--bytes-max", str(arguments.bytes_max),
        env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def outcome(child: asyncio.subprocess.Process, arguments: argparse.Namespace) -> Any:
    """The measurements of a client, after its end."""
    try:
        async with asyncio.timeout(arguments.seconds + 2 * PATIENCE_S):
            return json.loads((await child.communicate(b""))[0])
    except TimeoutError:
        child.kill()
        raise SystemExit("a client did not come to its end") from None


def main() -> None:
    """Measure, or be a client."""
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--seconds", type=float, default=4.0)
    made.add_argument("--records-per-s", type=int, default=200, help="of the polite client")
    made.add_argument("--batches", type=int, default=16, help="of 1 MB, that the greedy client has under way")
    made.add_argument("--quota", type=size, default=10_000_000, help="of the greedy client, each way, bytes per second")
    made.add_argument("--bytes-max", type=size, default=4096 * MIB, help="that the greedy client writes in a round")
    made.add_argument("--memory-bytes", type=size, default=512 * MIB)
    made.add_argument("--transport", choices=("tcp", "gRPC"), default="tcp")
    made.add_argument("--bootstrap", default="", help=argparse.SUPPRESS)
    made.add_argument("--load", choices=(POLITE, GREEDY), help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.load:
        die_with_parent()
        with contextlib.suppress(KeyboardInterrupt):
            print(json.dumps(uvloop.run({POLITE: polite, GREEDY: greedy}[arguments.load](arguments))))
        return
    with directory(arguments) as root:
        uvloop.run(run(arguments, root))


if __name__ == "__main__":
    main()
