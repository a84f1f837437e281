"""A producer and a consumer of one stream, as a process on a host of its own: used by `tests.chaos.network`.

It tells on standard output what happens, one JSON object per line, with times of the machine's monotonic clock:

    → {"ready": true}                    the stream is there, and both have begun
    → {"did": "acked", "at": 4711.5}     a record was acknowledged; at most one line per `TOLD_S`
    → {"did": "read", "at": 4711.6}      a record was read; the same
    → {"wrong": "…"}                     a record came twice, or not in its turn, or one of both has failed
    ← stop                               it sends no more, reads all that it has sent, and ends
    → {"sent": 1234, "read": 1234}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

from kera.client import Client, ClientSettings
from kera.core.base.process import die_with_parent
from kera.core.base.telemetry import configure_logging

STREAM = "s"
TOLD_S = 0.02
SEND_PAUSE_S = 0.01
PATIENCE_MS = 180_000
"""Longer than any cut: what is measured is when they go on, not when they give up."""
READY_TIMEOUT_S = 60.0


def tell(**what: Any) -> None:
    """A line for whoever started this process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Told:
    """Tells that something has happened, not too often."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told_s = 0.0

    def __call__(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._told_s + TOLD_S:
            self._told_s = now_s
            tell(did=self._what, at=now_s)


async def main(arguments: argparse.Namespace) -> None:
    """Produce and consume until told to stop."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, stopping.set)
    settings = ClientSettings(transport=arguments.transport, retry_timeout_ms=PATIENCE_MS)
    async with await Client.connect(arguments.bootstrap, settings) as client:
        await client.admin.create_stream(STREAM, streamlets=arguments.streamlets, replication=arguments.replication)
        reader = Reader(arguments.streamlets)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(reader.run(client))
            sent = await produce(client, arguments.streamlets, stopping)
            await reader.until(sent)
            reading.cancel()
        tell(sent=sum(sent), read=sum(reader.read))


async def produce(client: Client, streamlets: int, stopping: asyncio.Event) -> list[int]:
    """Send records 0, 1, … to each streamlet until told to stop; how many were acknowledged of each."""
    acked, sent = Told("acked"), [0] * streamlets
    async with client.producer(delivery_timeout_ms=PATIENCE_MS) as producer, asyncio.TaskGroup() as waiting:

        async def wait_for(delivery: Any) -> None:
            await delivery
            acked()

        await producer.prepare(STREAM)
        tell(ready=True)
        while not stopping.is_set():
            for streamlet in range(streamlets):
                delivery = producer.send(STREAM, str(sent[streamlet]).encode(), keys=b"k", streamlet=streamlet)
                sent[streamlet] += 1
                waiting.create_task(wait_for(delivery))
            await producer.drain()
            await asyncio.sleep(SEND_PAUSE_S)  # sleep: a load, not a flood
    return sent


class Reader:
    """Reads along, and counts."""

    def __init__(self, streamlets: int) -> None:
        self.read = [0] * streamlets
        """How many of each streamlet have come, and so the number of the next one."""
        self._came = asyncio.Event()

    async def run(self, client: Client) -> None:
        """Read for ever. Raises `ValueError` when a record comes out of its turn."""
        told = Told("read")
        async with client.consumer(STREAM, start="earliest") as consumer:
            async for record in consumer:
                due = self.read[record.streamlet]
                if int(record.value or b"-1") != due:
                    raise ValueError(f"record {record.value!r} came to streamlet {record.streamlet} and not {due}")
                self.read[record.streamlet] += 1
                told()
                self._came.set()

    async def until(self, sent: list[int]) -> None:
        """Wait until so many of each streamlet have been read."""
        while self.read != sent:
            self._came.clear()
            await self._came.wait()


def run() -> None:
    """Read the arguments and go."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bootstrap")
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--streamlets", type=int, default=2)
    parser.add_argument("--replication", type=int, default=0)
    arguments = parser.parse_args()
    die_with_parent()
    configure_logging("info")
    try:
        asyncio.run(main(arguments))
    except BaseExceptionGroup as error:
        tell(wrong="; ".join(f"{type(each).__name__}: {each}" for each in error.exceptions))
        raise
    except Exception as error:
        tell(wrong=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    run()
