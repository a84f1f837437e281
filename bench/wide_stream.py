"""The cost of a stream of thousands of streamlets when hardly anything is written to it, and others beside it.

    python -m bench.wide_stream

One consumer, a process of its own, pulls all streamlets (``shared_memory=never``); a producer writes `--rate` records a
second, each to another streamlet. Meanwhile another client writes single records to a stream of one streamlet, one
after the other, each awaited. Measured: the processor time of the broker and of the consumer, in percent of a core, and
the time of the other client's writes; everything is first measured without the consumer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

from bench.common import Broker, Figures, broker, directory, parser, say
from bench.cpu import run_s
from kera.client import Client
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB

STREAM, OTHER = "wide", "other"
PAUSE_S = 0.02
"""The pause between two writes of the other client."""


async def consume(bootstrap: str) -> None:
    """The consumer: prints a line when it has reached the end, then reads until it is killed."""
    async with await Client.connect(bootstrap) as client, client.consumer(STREAM, shared_memory="never") as consumer:
        first = True
        async for _ in consumer.batches():
            if first:
                sys.stdout.write("reads\n")
                sys.stdout.flush()
                first = False


async def write_slowly(client: Client, rate: float, until_s: float, streamlets: int) -> int:
    """Write one record at a time, at `rate`, to one streamlet after the other; returns their number."""
    sent = 0
    async with client.producer(linger_ms=0) as producer:
        await producer.prepare(STREAM)
        begun_s = time.monotonic()
        while time.monotonic() < until_s:
            await producer.send(STREAM, b"x" * 100, streamlet=sent % streamlets)
            sent += 1
            await asyncio.sleep(max(0.0, begun_s + sent / rate - time.monotonic()))
    return sent


async def write_beside(client: Client, until_s: float) -> list[float]:
    """The times of single writes to another stream, in milliseconds, sorted."""
    took_ms: list[float] = []
    async with client.producer(linger_ms=0) as producer:
        await producer.prepare(OTHER)
        while time.monotonic() < until_s:
            begun_s = time.perf_counter()
            await producer.send(OTHER, b"x" * 100)
            took_ms.append((time.perf_counter() - begun_s) * 1000)
            await asyncio.sleep(PAUSE_S)
    return sorted(took_ms)


async def period(
    client: Client, made: Broker, arguments: argparse.Namespace, figures: Figures, name: str, pid: int | None
) -> None:
    """Run the load for a while; returns its cost."""
    begun_s, until_s = time.monotonic(), time.monotonic() + arguments.seconds
    of_broker_s, of_consumer_s = run_s(made.pid), run_s(pid) if pid else 0.0
    sent, took_ms = await asyncio.gather(
        write_slowly(client, arguments.rate, until_s, arguments.streamlets), write_beside(client, until_s)
    )
    elapsed_s = time.monotonic() - begun_s
    figures.add(f"{name}: records", sent / elapsed_s, "1/s")
    figures.add(f"{name}: broker", 100 * (run_s(made.pid) - of_broker_s) / elapsed_s, "% of a core")
    if pid:
        figures.add(f"{name}: consumer", 100 * (run_s(pid) - of_consumer_s) / elapsed_s, "% of a core")
    figures.add(f"{name}: writes beside it, median", took_ms[len(took_ms) // 2], "ms")
    figures.add(f"{name}: writes beside it, p99", took_ms[len(took_ms) * 99 // 100], "ms")
    figures.add(f"{name}: writes beside it, longest", took_ms[-1], "ms")


async def run(arguments: argparse.Namespace) -> None:
    """Measure on a cluster of its own."""
    with directory(arguments) as where:
        figures = Figures("wide_stream", arguments, where)
        async with (
            broker(where, arena_bytes=512 * MIB, segment_bytes=64 * KIB) as made,
            await Client.connect(made.cluster.bootstrap) as client,
        ):
            await client.admin.create_stream(STREAM, streamlets=arguments.streamlets)
            await client.admin.create_stream(OTHER)
            say("without the consumer")
            await period(client, made, arguments, figures, "alone", None)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bench.wide_stream", "--worker", json.dumps(made.cluster.bootstrap)),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
            )
            try:
                await write_slowly(client, 10, time.monotonic() + 5, arguments.streamlets)
                if process.stdout is None or not await asyncio.wait_for(process.stdout.readline(), 60):
                    raise SystemExit("the consumer has ended")
                say("with it")
                await period(client, made, arguments, figures, "consumer", process.pid)
            finally:
                process.kill()
                await process.wait()
        figures.print()


def main(argv: list[str] | None = None) -> None:
    """See the head of this module."""
    made = parser(__doc__)
    made.add_argument("--streamlets", type=int, default=8192)
    made.add_argument("--rate", type=float, default=25.0, help="records a second")
    made.add_argument("--seconds", type=float, default=20.0)
    made.add_argument("--worker", help=argparse.SUPPRESS)
    arguments: Any = made.parse_args(argv)
    if arguments.worker:
        die_with_parent()
        asyncio.run(consume(json.loads(arguments.worker)))
    else:
        asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
