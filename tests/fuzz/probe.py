"""A client that behaves well, in a process of its own. It reports how long its writes and reads take.

    python -m tests.fuzz.probe BOOTSTRAP STREAM

It writes a record every `PAUSE_S` to each streamlet, reads them, and every `CONNECT_PAUSE_S` connects anew and asks for
a description. Each line on standard input is answered with the percentiles and errors since the line before, as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from kera.client import Client, ClientSettings
from kera.core.errors import KeraError
from tests.chaos.processes import Process

PAUSE_S = 0.01
CONNECT_PAUSE_S = 0.1
ANSWER_S_MAX = 60.0
WRONG_MAX, TEXT_MAX = 5, 1_000


class Probe:
    """Writes, reads and connects, and records how long each takes."""

    def __init__(self, client: Client, stream: str, streamlets: int) -> None:
        self._client = client
        self._stream = stream
        self._streamlets = streamlets
        self.written_s: list[float] = []
        self.read_s: list[float] = []
        self.connected_s: list[float] = []
        self.wrong: list[str] = []
        self.acknowledged = self.read = 0

    async def write(self, streamlet: int) -> None:
        """Write one record after the other."""
        async with self._client.producer() as producer:
            await producer.prepare(self._stream)
            while True:
                begun_s = time.monotonic()
                try:
                    await producer.send(self._stream, b"%.9f" % begun_s, streamlet=streamlet)
                except KeraError as error:
                    self._note(f"write: {error!r}")
                else:
                    self.acknowledged += 1
                    self.written_s.append(time.monotonic() - begun_s)
                await asyncio.sleep(PAUSE_S)

    async def follow(self) -> None:
        """Read each record as it comes."""
        while True:
            try:
                async with self._client.consumer(self._stream, start="earliest", shared_memory="never") as consumer:
                    async for record in consumer:
                        self.read += 1
                        self.read_s.append(time.monotonic() - float(record.value or b"0"))
            except KeraError as error:
                self._note(f"read: {error!r}")
                await asyncio.sleep(PAUSE_S)

    async def connect(self, bootstrap: str) -> None:
        """Connect anew, as a starting client does, and ask for a description."""
        while True:
            begun_s = time.monotonic()
            try:
                async with await Client.connect(bootstrap, ClientSettings()) as client:
                    await client.admin.describe_stream(self._stream)
            except KeraError as error:
                self._note(f"connect: {error!r}")
            else:
                self.connected_s.append(time.monotonic() - begun_s)
            await asyncio.sleep(CONNECT_PAUSE_S)

    def _note(self, text: str) -> None:
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append(text[:TEXT_MAX])

    def report(self) -> dict[str, Any]:
        """The percentiles and errors since the last report."""
        found = {"write": percentiles(self.written_s), "read": percentiles(self.read_s), "errors": self.wrong}
        found["connect"] = percentiles(self.connected_s)
        self.written_s, self.read_s, self.connected_s, self.wrong = [], [], [], []
        return {**found, "acknowledged": self.acknowledged, "read_records": self.read}


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Percentiles of times, in milliseconds."""
    ordered = sorted(times_s)
    if not ordered:
        return {}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))], 2) for name, part in at.items()
    }


class Probing:
    """A handle on the process of the probe."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def report(self) -> dict[str, Any]:
        """The percentiles and errors since the last report."""
        return await self._process.answer(ANSWER_S_MAX, "report")


@contextlib.asynccontextmanager
async def probing(bootstrap: str, stream: str, **env: str) -> AsyncIterator[Probing]:
    """Run a probe, which writes and reads meanwhile."""
    process = await Process.start("tests.fuzz.probe", bootstrap, stream, env=env)
    try:
        yield Probing(process)
    finally:
        await process.end()


async def main(bootstrap: str, stream: str) -> None:
    """Run a probe, and answer each line of standard input with a report."""
    async with await Client.connect(bootstrap, ClientSettings()) as client:
        described = await client.describe(stream)
        probe = Probe(client, stream, described.config.streamlets)
        tasks = [asyncio.create_task(probe.write(number)) for number in range(described.config.streamlets)]
        tasks += [asyncio.create_task(probe.follow()), asyncio.create_task(probe.connect(bootstrap))]
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while await reader.readline():
            sys.stdout.write(json.dumps(probe.report()) + "\n")
            sys.stdout.flush()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
