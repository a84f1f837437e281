"""How long the console takes for each of its pages, on a cluster with many streams.

    python -m bench.console
    python -m bench.console --streams 1000 --rounds 5

Some streams have records, and consumer groups have read some of them. The console is a process of its own; requests go
over a connection that stays open, like a browser's. Reported per page: the time until it was complete, for the first
request and for later ones. Fails if a page took longer than `--bound-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from bench.common import Figures, directory, parser, say
from kera.client import Client
from kera.core.base.settings import MIB
from kera.local.cluster import LocalCluster

AT_ONCE = 16
GROUPS = 20
RECORDS = 5_000
PAGES = {
    "overview": "/",
    "streams, first page": "/streams",
    "streams, page 100": "/streams?page=100",
    "streams, search": "/streams?q=99",
    "streams, largest first": "/streams?sort=-size",
    "streams, newest first": "/streams?sort=-created",
    "stream": "/streams/stream-00007",
    "stream with 1,000 streamlets": "/streams/wide",
    "messages, newest": "/streams/stream-00000/messages",
    "messages, oldest": "/streams/stream-00000/messages?from=oldest&count=200",
    "messages, offset": "/streams/stream-00000/messages?from=offset&offset=2500",
    "messages, time": "/streams/stream-00000/messages?from=time&time=2020-01-01",
    "messages, text in all records": "/streams/stream-00000/messages?text=value+17",
    "record": "/streams/stream-00000/record?streamlet=0&entry=0&offset=1234",
    "consumer groups": "/groups",
    "consumer group": "/group?name=group-0",
    "brokers and backups": "/members",
    "recoveries and moves": "/operations",
}


async def fill(bootstrap: str, streams: int) -> None:
    """Create the data that the pages show."""
    async with await Client.connect(bootstrap) as client:
        numbers = iter(range(streams))

        async def create() -> None:
            for number in numbers:
                await client.admin.create_stream(f"stream-{number:05}")

        await asyncio.gather(*(create() for _ in range(AT_ONCE)))
        await client.admin.create_stream("wide", streamlets=1000)
        async with client.producer() as producer:
            for name in ("stream-00000", "stream-00007"):
                await producer.prepare(name)
                for at in range(RECORDS):
                    value = json.dumps({"order": at, "text": f"value {at}"}).encode()
                    producer.send(name, value, keys=b"key %d" % (at % 100))
        for number in range(GROUPS):
            await client.admin.reset_consumer_group(f"group-{number}", f"stream-{number:05}", "earliest")


@contextlib.contextmanager
def console(bootstrap: str) -> Iterator[str]:
    """A console of the cluster; yields its address."""
    command = [sys.executable, "-m", "kera.cli", "console", "--listen", "127.0.0.1:0", "--bootstrap", bootstrap]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KERA_")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            told = child.stdout.readline() if child.stdout is not None else ""
            yield told.rpartition("//")[2].strip().removesuffix("/")
        finally:
            child.terminate()


def ask(connection: http.client.HTTPConnection, address: str) -> float:
    """Milliseconds until a page was complete."""
    begun_s = time.monotonic()
    connection.request("GET", address)
    answer = connection.getresponse()
    answer.read()
    took_ms = (time.monotonic() - begun_s) * 1e3
    if answer.status != 200:
        raise SystemExit(f"{address} was answered with {answer.status}")
    return took_ms


def measure(where: str, rounds: int, pause_s: float, figures: Figures) -> None:
    """Request all pages in turn, again and again, like a user who looks at all of them."""
    connection = http.client.HTTPConnection(where, timeout=60)
    for number in range(rounds + 1):
        for name, address in PAGES.items():
            figures.add(f"{name}, the first time" if number == 0 else name, ask(connection, address), "ms")
        time.sleep(pause_s)  # cached data get old
    connection.close()


def print_pages(figures: Figures) -> float:
    """A line per page; returns the longest."""
    print("| page | first, ms | p50, ms | p99, ms | max, ms |\n|---|---|---|---|---|")
    longest = 0.0
    for name in PAGES:
        (first,), later = figures.values(f"{name}, the first time"), sorted(figures.values(name))
        p99 = later[min(len(later) - 1, round(len(later) * 0.99))]
        print(f"| {name} | {first:.0f} | {later[len(later) // 2]:.0f} | {p99:.0f} | {later[-1]:.0f} |")
        longest = max(longest, first, later[-1])
    return longest


def main() -> int:
    """Make a cluster, and ask its console."""
    made = parser(__doc__)
    made.add_argument("--streams", type=int, default=10_000)
    made.add_argument("--rounds", type=int, default=20)
    made.add_argument("--pause-s", type=float, default=1.0, help="between two rounds")
    made.add_argument("--bound-ms", type=float, default=300.0)
    arguments: argparse.Namespace = made.parse_args()
    with directory(arguments) as root:
        figures = Figures("console", arguments, root)
        with LocalCluster.running(brokers=2, arena_bytes=256 * MIB, data_dir=root / "cluster") as running:
            say(f"creating {arguments.streams:,} streams")
            asyncio.run(fill(running.bootstrap, arguments.streams))
            with console(running.bootstrap) as where:
                say(f"asking {where}")
                measure(where, arguments.rounds, arguments.pause_s, figures)
    figures.print()
    print()
    longest = print_pages(figures)
    if longest > arguments.bound_ms:
        print(f"\na page took {longest:.0f} ms, and {arguments.bound_ms:.0f} ms are the bound")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
