"""A pushed consumer that checks every byte, as a process to be killed: used by `tests.chaos.push`.

It reads a stream of `support.value_of` records from the given positions, and reports the chunks that it has read on
standard output, one JSON object each:

    → {"ready": true}                                     it is connected
    → {"streamlet": 0, "first": 14, "count": 3, "next": [1, 0, 4096], "pushed": true}
    → {"overwritten": "open", "changed": true}            another segment has taken the memory of a chunk
    → {"wrong": "…"}                                      a promise was broken; the process ends
    ← stop                                                it closes its client and ends

It holds chunks for a while after it has reported them, so that it always has leases when something happens to it, and
looks at their bytes once more before it releases them: while a chunk is intact they may not have changed. It reports
a chunk that is no longer intact; if that happens before its records were copied, it reads the chunk again. It copies
first and then decodes: a process may stand still anywhere, and decoding overwritten bytes follows offsets to anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import deque
from typing import Any, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from kera.client import ChunkBatch, Client, ClientSettings, Consumer, ConsumerSettings, Position
from kera.core.base.process import die_with_parent
from kera.core.base.settings import KIB
from kera.core.base.telemetry import configure_logging
from tests.chaos.verdict import Wrong
from tests.integration.support import number_of

HELD_MAX = 16
HELD_S = 0.3
LOOK_S = 0.02


class Held(NamedTuple):
    """A reported chunk that is still held."""

    chunk: ChunkBatch
    checksum: int
    until_s: float


def checksum_of(chunk: ChunkBatch) -> int:
    """The checksum of the bytes of all values, in place."""
    return int(crc32c(memoryview(chunk.batch["value"].buffers()[2])))


def copies_of(column: pa.Array) -> list[pa.Buffer | None]:
    """Copies of its buffers. Reads no offset: in memory that was reused, offsets point anywhere."""
    return [buffer and pa.py_buffer(buffer.to_pybytes()) for buffer in column.buffers()]


def tell(**what: Any) -> None:
    """Write a line to the parent process."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class Reader:
    """Reads chunks, reports them, holds them, and checks them again."""

    def __init__(self, client: Client, stream: str, positions: dict[int, list[Position]], due: dict[int, int]) -> None:
        """`due`: the number that each streamlet goes on with; streamlets take turns, as `support.Load` sends."""
        self._client = client
        self._stream = stream
        self._positions = positions
        self._due = due
        self._held: deque[Held] = deque()

    async def run(self) -> None:
        """Read for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._let_go_in_time())
            while True:
                async with self._client.consumer(
                    self._stream,
                    start=self._positions,
                    settings=ConsumerSettings(
                        shared_memory="always",
                        joined_bytes_max=0,
                        fetch_wait_ms=50,
                        prefetch_bytes_max=128 * KIB,
                        fetch_bytes_max=64 * KIB,
                    ),
                ) as consumer:
                    await self._read(consumer)

    async def _read(self, consumer: Consumer) -> None:
        """Read until a chunk has to be read again."""
        async for chunk in consumer.batches():
            column = chunk.batch["value"]
            copies = copies_of(column)
            checksum = checksum_of(chunk)
            if not chunk.intact:  # the copies may hold anything
                tell(overwritten="open", changed=True)
                self._positions = consumer.positions()
                self._positions[chunk.entry.streamlet_id][chunk.entry.entry] = chunk.start
                return
            copied = pa.Array.from_buffers(column.type, len(column), copies, offset=column.offset)
            self._take(chunk, copied.to_pylist())
            self._hold(chunk, checksum)

    def _take(self, chunk: ChunkBatch, values: list[bytes | None]) -> None:
        streamlet = chunk.entry.streamlet_id
        first = self._due[streamlet]
        for value in values:
            try:
                number = number_of(value)
            except (AssertionError, ValueError) as error:
                raise Wrong(f"{streamlet}: {error} where {self._due[streamlet]} was due") from error
            if number != self._due[streamlet]:
                raise Wrong(f"{streamlet}: record {number} came where {self._due[streamlet]} was due")
            self._due[streamlet] += len(self._due)
        tell(streamlet=streamlet, first=first, count=len(values), next=chunk.next, pushed=chunk.pushed)

    # -- holding -----------------------------------------------------------------------------------------------

    def _hold(self, chunk: ChunkBatch, checksum: int) -> None:
        self._held.append(Held(chunk, checksum, asyncio.get_running_loop().time() + HELD_S))
        while len(self._held) > HELD_MAX:
            self._let_go(self._held.popleft())

    async def _let_go_in_time(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = asyncio.get_running_loop().time()
            while self._held and self._held[0].until_s <= now_s:
                self._let_go(self._held.popleft())

    def _let_go(self, held: Held) -> None:
        changed = checksum_of(held.chunk) != held.checksum
        if not held.chunk.intact:  # asked after the look: it may have happened meanwhile
            tell(overwritten="held", changed=changed)
        elif changed:
            raise Wrong(f"the bytes at {tuple(held.chunk.start)} have changed, and they are said to be intact")


async def work(task: dict[str, Any]) -> None:
    """Read until the command to stop."""
    stop = asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    # On a machine with other work, a broker takes a while to start again.
    settings = ClientSettings(retry_timeout_ms=60_000)
    async with await Client.connect(task["bootstrap"], settings) as client:
        positions = {int(key): [Position(*at) for at in places] for key, places in task["positions"].items()}
        due = {int(key): number for key, number in task["due"].items()}
        tell(ready=True)
        reading = asyncio.create_task(Reader(client, task["stream"], positions, due).run())
        await asyncio.wait({stop, reading}, return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and (error := reading.exception()) is not None:
            tell(wrong=repr(error))
            os._exit(1)  # a thread waits for standard input, and asyncio for that
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


def main() -> None:
    """Run as a consumer."""
    die_with_parent()
    configure_logging("error", daemon="consumer")  # not to standard output
    asyncio.run(work(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
