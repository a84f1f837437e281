"""The delay of epoch readers, and the cost of entries without writers: ``python -m bench.epochs_live``.

An ordered consumer reads eight streamlets, first with current records in all of them and then in seven. Reported: the
age of records when it delivers them, and the time from an epoch's end until its first records come. Then an ordered
consumer, a process of its own, reads a stream of ten thousand entries without writers, beside others that write and
read; reported are the broker's additional processor time, and the segments of its memory that this takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from bench.common import Broker, Figures, broker, directory, parser, say
from bench.cpu import run_s
from kera.client import Client
from kera.core.base.process import DIE_WITH_PARENT_VARIABLE, die_with_parent
from kera.core.base.settings import KIB, MIB

STREAMLETS = 8
EPOCH_MS, GRACE_MS = 500, 300
WRITE_EVERY_S = 0.005
SILENT, SILENT_STREAMLETS, SILENT_ENTRIES = "silent", 2500, 4
WARM_UP_S = 2.0


async def written(client: Client, stream: str, streamlets: int) -> None:
    """Write a record to each of the first `streamlets` streamlets, again and again."""
    async with client.producer(linger_ms=1) as producer:
        await producer.prepare(stream)
        while True:
            for streamlet in range(streamlets):
                producer.send(stream, b"x" * 100, streamlet=streamlet)
            await producer.drain()
            await asyncio.sleep(WRITE_EVERY_S)


@contextlib.asynccontextmanager
async def meanwhile(work: Any) -> AsyncIterator[None]:
    """Run work in the background while the block lasts."""
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def latency(client: Client, figures: Figures, seconds: float, *, silent: int) -> None:
    """Measure the age of current records when an ordered consumer gives them."""
    stream, name = f"live-{silent}", f"{silent} of {STREAMLETS} streamlets silent"
    await client.admin.create_stream(stream, streamlets=STREAMLETS, epoch_ms=EPOCH_MS, epoch_grace_ms=GRACE_MS)
    ages_us: list[Any] = []
    async with meanwhile(written(client, stream, STREAMLETS - silent)), client.ordered_consumer(stream) as consumer:
        until_s, last = time.monotonic() + WARM_UP_S + seconds, None
        async for ordered in consumer.batches():
            now_us = time.time_ns() / 1000
            if time.monotonic() > until_s:
                break
            if time.monotonic() > until_s - seconds:
                ages_us.append(now_us - ordered.origins["timestamp_us"].to_numpy())
                if ordered.epoch != last:
                    figures.add(f"{name}: after the epoch's end", now_us / 1000 - (ordered.epoch + 1) * EPOCH_MS, "ms")
                last = ordered.epoch
    ages_ms = np.concatenate(ages_us) / 1000
    for share in (50, 99, 100):
        figures.add(f"{name}: age of records, p{share}", float(np.percentile(ages_ms, share)), "ms")


async def consume(bootstrap: str) -> None:
    """The reader of silent entries: reports that it reads, and reads until it is killed."""
    async with await Client.connect(bootstrap) as client, client.ordered_consumer(SILENT) as consumer:
        sys.stdout.write("reads\n")
        sys.stdout.flush()
        async for _ in consumer.batches():
            pass


async def silence(client: Client, made: Broker, figures: Figures, arguments: argparse.Namespace) -> None:
    """Measure the cost of ten thousand silent entries, beside a load."""
    await client.admin.create_stream("beside", streamlets=STREAMLETS)
    await client.admin.create_stream(
        SILENT, streamlets=arguments.silent // SILENT_ENTRIES, entries=SILENT_ENTRIES, epoch_ms=1000
    )

    async def read_beside() -> None:
        async with client.consumer("beside") as consumer:
            async for _ in consumer.batches():
                pass

    free = (await made.metrics())["arena_slots_free"]
    async with client.ordered_consumer(SILENT, start="earliest") as consumer, meanwhile(anext(aiter(consumer))):
        await asyncio.sleep(WARM_UP_S)
        figures.add(
            "segments of memory that silent entries take", free - (await made.metrics())["arena_slots_free"], ""
        )
    async with meanwhile(written(client, "beside", STREAMLETS)), meanwhile(read_beside()):
        await asyncio.sleep(WARM_UP_S)
        await period(made, figures, "without a reader of silent entries", arguments.seconds)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.epochs_live",
            "--consume",
            made.cluster.bootstrap,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, DIE_WITH_PARENT_VARIABLE: "1"},
        )
        try:
            if process.stdout is None or not await asyncio.wait_for(process.stdout.readline(), 60):
                raise SystemExit("the reader of silent entries has ended")
            await asyncio.sleep(WARM_UP_S)
            await period(made, figures, f"with a reader of {arguments.silent:,} silent entries", arguments.seconds)
        finally:
            process.kill()
            await process.wait()


async def period(made: Broker, figures: Figures, name: str, seconds: float) -> None:
    """Measure the broker's processor time for `seconds`."""
    begun_s, begun = run_s(made.pid), time.monotonic()
    await asyncio.sleep(seconds)
    figures.add(f"{name}: broker", 100 * (run_s(made.pid) - begun_s) / (time.monotonic() - begun), "% of a core")


async def measure(arguments: argparse.Namespace) -> None:
    """Measure everything, and print."""
    with directory(arguments) as where:
        figures = Figures("epochs_live", arguments, where)
        async with (
            broker(None, arena_bytes=512 * MIB, segment_bytes=256 * KIB) as made,
            await Client.connect(made.cluster.bootstrap) as client,
        ):
            for silent in (0, 1):
                say(f"{silent} of {STREAMLETS} streamlets silent")
                await latency(client, figures, arguments.seconds, silent=silent)
            say(f"{arguments.silent:,} silent entries")
            await silence(client, made, figures, arguments)
        figures.print()


def main() -> None:
    """Measure."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=8.0, help="that are measured of each")
    made.add_argument("--silent", type=int, default=SILENT_STREAMLETS * SILENT_ENTRIES, help="entries")
    made.add_argument("--consume", metavar="BOOTSTRAP", help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.consume:
        die_with_parent()
        asyncio.run(consume(arguments.consume))
    else:
        asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
