"""A producer at a fixed rate, a process of its own: ``python -m bench.due {kera,kafka} BOOTSTRAP STREAM …``.

Each value begins with its due time and not with its send time, so a late producer hides nothing. It prints ``ready``
when it is connected, begins at the input ``go``, and prints at the end how many records it has sent and the greatest
delay of a record.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kera.client import Client
from kera.core.base.process import die_with_parent

DIGITS = 16
"""Digits of the time in microseconds, at the beginning of a value."""
TICK_S = 0.001


def values(first: int, end: int, start_us: int, rate: int, record_bytes: int) -> list[bytes]:
    """The records `first` to `end` of those due from `start_us` on."""
    return [
        f"{start_us + number * 1_000_000 // rate:0{DIGITS}d}".encode().ljust(record_bytes, b".")
        for number in range(first, end)
    ]


async def at_rate(
    send: Callable[[list[bytes]], Awaitable[None]], rate: int, seconds: float, record_bytes: int
) -> tuple[int, float]:
    """Send the due records each millisecond; returns their number, and the greatest delay in seconds."""
    total, sent, late_s = int(rate * seconds), 0, 0.0
    start_us, start_s = time.time_ns() // 1000, time.monotonic()
    while sent < total:
        gone_s = time.monotonic() - start_s
        due = min(total, int(gone_s * rate) + 1)
        if due > sent:
            late_s = max(late_s, gone_s - sent / rate)
            await send(values(sent, due, start_us, rate, record_bytes))
            sent = due
        await asyncio.sleep(TICK_S)
    return sent, late_s


async def to_kera(arguments: argparse.Namespace) -> tuple[int, float]:
    """Send with the project's own client."""
    async with await Client.connect(arguments.bootstrap) as client, client.producer() as producer:
        await producer.prepare(arguments.stream)

        async def send(some: list[bytes]) -> None:
            for value in some:
                producer.send(arguments.stream, value)
            await producer.drain()

        await _go()
        done = await at_rate(send, arguments.rate, arguments.seconds, arguments.record_bytes)
        await producer.flush()
        return done


async def to_kafka(arguments: argparse.Namespace) -> tuple[int, float]:
    """Send with confluent-kafka, from the folder that ``--client`` names."""
    sys.path.append(str(arguments.client))
    settings = {"bootstrap.servers": arguments.bootstrap, "linger.ms": 0, "acks": 1}
    producer = importlib.import_module("confluent_kafka").Producer(settings)
    producer.list_topics(arguments.stream, timeout=30)

    async def send(some: list[bytes]) -> None:
        for value in some:
            producer.produce(arguments.stream, value)
        producer.poll(0)

    await _go()
    done = await at_rate(send, arguments.rate, arguments.seconds, arguments.record_bytes)
    if producer.flush(30):
        raise TimeoutError("Kafka did not acknowledge all records")
    return done


async def _go() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> int:
    """Run by `bench.spark_engines`."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("kind", choices=("kera", "kafka"))
    made.add_argument("bootstrap")
    made.add_argument("stream")
    made.add_argument("--rate", type=int, default=1000)
    made.add_argument("--seconds", type=float, default=10.0)
    made.add_argument("--record-bytes", type=int, default=100)
    made.add_argument("--client", type=Path)
    arguments = made.parse_args()
    die_with_parent()
    sent, late_s = asyncio.run((to_kera if arguments.kind == "kera" else to_kafka)(arguments))
    print(sent, late_s, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
