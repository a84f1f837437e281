"""Many streams on one broker: the cost of creating them, of idle ones, of writing to each, and of a restart.

Each stream has one streamlet. Segments are small, and there are fewer slots than streams, unless ``--arena-bytes`` says
otherwise: so one record for each also shows how open segments make room for others.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.common import BROKER, Figures, broker, directory, parser, say, size
from kera.client import Client
from kera.core.base.settings import KIB, MIB

AT_ONCE = 16


async def for_each(count: int, action: Callable[[int], Awaitable[object]]) -> float:
    """Do something to each stream, some at a time; returns the seconds."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await action(number)

    begun_s = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(work())
    return time.monotonic() - begun_s


async def run(arguments: argparse.Namespace, root: Path) -> None:
    """Run each part once."""
    figures = Figures("log_streams", arguments, root)
    count = arguments.streams
    sizes = {"arena_bytes": arguments.arena_bytes, "segment_bytes": arguments.segment_bytes}
    async with broker(root, **sizes) as made:
        async with await Client.connect(made.cluster.bootstrap) as client:
            empty = made.memory()
            say(f"creating {count:,} streams")
            created_s = await for_each(count, lambda number: client.admin.create_stream(f"s{number}"))
            figures.add("create", created_s, "s")
            figures.add("create, each", created_s / count * 1e3, "ms")
            for kind in ("anon", "file"):
                figures.add(f"idle memory per stream ({kind})", (made.memory()[kind] - empty[kind]) / count, "B")
            say("one record each")
            async with client.producer(chunk_bytes_max=4 * KIB, delivery_timeout_ms=300_000) as producer:
                await for_each(count, lambda number: producer.prepare(f"s{number}"))
                begun_s = time.monotonic()
                pending = []
                for number in range(count):
                    pending.append(producer.send(f"s{number}", b"%d" % number))
                    if number % 100 == 0:
                        await producer.drain()
                for each in pending:
                    await each
                figures.add("one record each", time.monotonic() - begun_s, "s")
            for kind in ("anon", "file"):
                figures.add(
                    f"memory per stream with a record ({kind})", (made.memory()[kind] - empty[kind]) / count, "B"
                )
        for how in ("kill -9", "stop"):
            say(f"restart after {how}")
            child = made.cluster._child(BROKER)
            begun_s = time.monotonic()
            if how == "stop":
                figures.add("stop within 60 s", float(await child.stop(grace_s=60)), "1: yes")
                figures.add("stop", time.monotonic() - begun_s, "s")
                figures.notes["end"] = child.describe_exit()
            else:
                await child.kill()
            begun_s = time.monotonic()
            await made.cluster.restart(BROKER)
            figures.add(f"start after {how}", time.monotonic() - begun_s, "s")
            async with await Client.connect(made.cluster.bootstrap) as client:

                async def check(number: int, client: Client = client) -> None:
                    ((bounds,),) = (await client.bounds(f"s{number}")).values()
                    if bounds.next_record != 1:
                        raise SystemExit(f"stream s{number} has {bounds.next_record} records and not 1")

                await for_each(count, check)
    figures.print()


def main() -> int:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--streams", type=int, default=10_000)
    made.add_argument("--arena-bytes", type=size, default=128 * MIB)
    made.add_argument("--segment-bytes", type=size, default=16 * KIB)
    arguments = made.parse_args()
    with directory(arguments) as root:
        asyncio.run(run(arguments, root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
