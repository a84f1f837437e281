"""Other streams, which come and go: operators create a stream, write to it, and delete it, all under faults.

Promise: until its deletion is requested, such a stream has every acknowledged record once. After its acknowledged
deletion it is unknown, and after all faults none of its data is left in brokers' files or in replicas. Brokers report
a stream that older metadata lack, and it has all of its records once it is adopted. No two streams have the same id.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from kera.client import Client
from kera.core.errors import CorruptChunk, KeraError, StreamExists, UnknownStream
from kera.core.format.chunk import HEADER_BYTES, verify_header
from kera.core.runtime import Runtime
from tests.simulation.wiring import programs
from tests.simulation.world import disk_faults, people
from tests.simulation.world.copies import replicated_streams

if TYPE_CHECKING:
    from tests.simulation.engine.process import Process
    from tests.simulation.world.cluster import Cluster
    from tests.simulation.world.plan import Fault, Plan

KIND = "other stream"
LIKELY = 0.6
"""The probability that a seed has other streams, if it may."""
RECORDS = 12
BURST = 4
PAUSE_S = 0.5
PATIENCE_MS = 30_000


@dataclass(slots=True)
class Other:
    """A stream, as its creator knows it."""

    name: str
    acknowledged: set[bytes] = field(default_factory=set)
    is_made: bool = False
    end_wanted: bool = False
    """Its deletion was requested."""
    writer: Process | None = None


class OtherStreams:
    """See the head of this module."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._streams: dict[Fault, Other] = {}
        self._ids: set[int] = set()
        self.problems: list[str] = []

    def begin(self, fault: Fault) -> None:
        """If the fault is another stream, create it and write to it."""
        if fault.kind == KIND:
            other = self._streams[fault] = Other(f"other-{len(self._streams) + 1}")

            async def main(runtime: Runtime) -> None:
                async with self._connected(runtime) as client:
                    await self._write(client, other)

            other.writer = self._cluster.run_client("operator", main)

    def end(self, fault: Fault) -> None:
        """Delete it."""
        if other := self._streams.get(fault):
            other.end_wanted = True

            async def main(runtime: Runtime) -> None:
                async with self._connected(runtime) as client:
                    try:
                        await client.admin.delete_stream(other.name)
                    except KeraError as error:
                        self._cluster.trace.note("operator", f"could not delete {other.name}: {error!r}")

            self._cluster.run_client("operator", main)

    async def settle(self, runtime: Runtime) -> None:
        """Check the present streams, delete all, and wait until no data is left of them."""
        while any(one.writer is not None and one.writer.alive for one in self._streams.values()):
            await asyncio.sleep(1.0)  # sleep: virtual time, until all writers have ended
        async with programs.client_on(self._cluster.coordinators, runtime, retry_timeout_ms=PATIENCE_MS) as client:
            for other in self._streams.values():
                if other.is_made and not other.end_wanted and await self._adopted(client, other):
                    await self._look_at(client, other)
                with suppress(UnknownStream):
                    await client.admin.delete_stream(other.name)
            told = ""
            while left := ", ".join(await self._left(client)):
                if left != told:
                    self._cluster.trace.note("operator", f"of streams that were deleted there is left: {left}")
                told = left
                await asyncio.sleep(1.0)  # sleep: virtual time, between looks
                for other in self._streams.values():
                    if people.OLD_METADATA in self._cluster.plan.kinds and await self._adopted(client, other):
                        await client.admin.delete_stream(other.name)

    def _connected(self, runtime: Runtime) -> AbstractAsyncContextManager[Client]:
        return programs.client_on(self._cluster.coordinators, runtime, retry_timeout_ms=3000)

    async def _write(self, client: Client, other: Other) -> None:
        plan = self._cluster.plan
        try:
            with suppress(StreamExists):  # the answer to the first request was lost
                made = await client.admin.create_stream(
                    other.name,
                    streamlets=2,
                    replication=plan.replication,
                    durability=plan.durability,
                )
                if made.stream_id in self._ids:
                    self.problems.append(f"id {made.stream_id} of stream {other.name} is another one's")
                self._ids.add(made.stream_id)
            other.is_made = True
            async with client.producer(delivery_timeout_ms=PATIENCE_MS) as producer:
                await producer.prepare(other.name)
                for first in range(0, RECORDS, BURST):
                    values = [f"{other.name}/{number}".encode() for number in range(first, first + BURST)]
                    await asyncio.gather(*(producer.send(other.name, value) for value in values))
                    other.acknowledged.update(values)
                    await asyncio.sleep(PAUSE_S)  # sleep: virtual time, between bursts
        except KeraError as error:
            self._cluster.trace.note("operator", f"could not write to {other.name}: {error!r}")

    async def _adopted(self, client: Client, other: Other) -> bool:
        """Whether a stream exists, after its adoption if older metadata lack it.

        Waits until brokers have reported a stream that must exist.
        """
        while other.name not in {stream.name for stream in await client.admin.list_streams()}:
            if people.OLD_METADATA not in self._cluster.plan.kinds:
                return True  # the check of its records finds that it is gone
            with suppress(UnknownStream):
                await client.admin.adopt_stream(other.name)
                continue
            if other.end_wanted or not other.acknowledged:
                return False
            await asyncio.sleep(1.0)  # sleep: virtual time, between looks
        return True

    async def _look_at(self, client: Client, other: Other) -> None:
        """Check all records of a stream that was not deleted, unless it may be damaged."""
        if disk_faults.BITS in self._cluster.plan.kinds:
            return
        found: Counter[bytes] = Counter()
        try:
            async with client.consumer(other.name, start="earliest", end="latest", shared_memory="never") as consumer:
                async for record in consumer.records():
                    found[record.value or b""] += 1
        except UnknownStream:
            if not other.end_wanted:  # its deletion may have been requested meanwhile
                self.problems.append(f"stream {other.name} is gone, and nobody has deleted it")
            return
        lost, doubled = sorted(other.acknowledged - found.keys()), [one for one, times in found.items() if times > 1]
        if lost or doubled:
            self.problems.append(f"of stream {other.name} {lost} are lost, and {doubled} there more than once")

    async def _left(self, client: Client) -> list[str]:
        """Messages about data that is left of deleted streams."""
        plan, names = self._cluster.plan, {other.name for other in self._streams.values()}
        try:
            known = {stream.name: stream.stream_id for stream in await client.admin.list_streams()}
            kept = {stream_id for name, stream_id in known.items() if name not in names}
            replicas = await replicated_streams(client) - kept if plan.replication else set()
        except KeraError as error:
            return [f"nobody knows what, {error!r}"]
        left = [f"{name}, which is listed" for name in sorted(names & known.keys())]
        left += [f"replicas of stream {stream_id}" for stream_id in sorted(replicas)]
        return left + [f"{name} with a segment of stream {one}" for name, one in self._in_files() if one not in kept]

    def _in_files(self) -> Iterator[tuple[str, int]]:
        """The brokers and the streams of segments in files."""
        for name in self._cluster.plan.broker_names:
            for path in sorted((self._cluster.directories.of(name) / "data").rglob("*.segment")):
                with suppress(FileNotFoundError, CorruptChunk):
                    yield name, verify_header(memoryview(path.read_bytes()[:HEADER_BYTES]), 0).stream_id


def draw(plan: Plan) -> Iterator[tuple[float, float]]:
    """The start and the life of each; drawn separately, so that the rest of a plan stays unchanged."""
    random = Random(f"others {plan.seed}")
    if random.random() > LIKELY:
        return
    at_s = random.uniform(1.0, plan.load_s / 2)
    while at_s < plan.load_s:
        yield at_s, random.choice((0.05, 1.0, 5.0, 15.0)) * (0.5 + random.random())
        at_s += random.expovariate(1 / 5.0)
