"""An impostor: a client that writes to the stream under the ids of other producers, with chosen sequences.

It learns a producer's next sequence from the broker, as any client can, and then sends its own chunks: as the
producer's next ones, as already stored ones, and in a later epoch. That may fence producers. Promise: an acknowledged
record is stored once, whoever wrote it (``kera.client.checking``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa

from kera.client.checking.history import Value
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import KeraError, OutOfSequence, ProducerFenced
from kera.core.runtime import Runtime

if TYPE_CHECKING:
    from kera.client.client import Client
    from kera.client.producing.appender import Appender
    from tests.simulation.world.cluster import Cluster
    from tests.simulation.world.plan import Plan
    from tests.simulation.world.workload import Workload

LIKELY = 0.1
"""The probability that a seed has an impostor."""
FIRST_S = 3.0
"""The time by which producers have begun."""
PAUSE_S = 0.7
"""The mean time between two attempts."""
FAR_AHEAD = 1 << 40
"""A sequence that no producer reaches: the refusal names the expected one."""
BURST = 3


def draws_one(plan: Plan) -> bool:
    """Whether a plan has an impostor. Drawn separately, so that the rest of a plan stays unchanged."""
    return Random(f"impostor {plan.seed}").random() < LIKELY


class Impostor:
    """See the head of this module."""

    def __init__(self, cluster: Cluster, workload: Workload, stream: str) -> None:
        self._cluster = cluster
        self._workload = workload
        self._stream = stream
        self._random = Random(f"what the impostor of {cluster.plan.seed} does")
        self._sent = 0
        self.is_over = False
        """Whether it has written its last record; a read-back before would be incomplete."""

    async def main(self, runtime: Runtime) -> None:
        """Write under the ids of producers during the load."""
        try:
            await self._write(runtime)
        finally:
            self.is_over = True

    async def _write(self, runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._cluster.plan.load_s
        await asyncio.sleep(FIRST_S)  # sleep: virtual time, until producers have begun
        async with self._workload.connected(runtime) as client:
            while loop.time() < until_s:
                identities = sorted(self._workload.identities)
                if identities:
                    await self._pretend(client, *self._random.choice(identities))
                await asyncio.sleep(self._random.expovariate(1 / PAUSE_S))  # sleep: virtual time, between attempts

    async def _pretend(self, client: Client, producer_id: int, epoch: int) -> None:
        """Send a few chunks under the id of one producer."""
        streamlet_id = self._random.randrange(self._cluster.plan.streamlets)
        appender = await client.appender(
            self._stream, producer_id=PRODUCER_IDS.start, producer_epoch=epoch, chunk_bytes_max=4096
        )
        appender.producer_id = producer_id
        expected = await self._expected(appender, streamlet_id)
        attempt = self._random.choice(("next", "next", "again", "later epoch"))
        if attempt == "later epoch":
            appender.producer_epoch += 1
        for sequence in self._sequences(attempt, expected):
            if not await self._send(appender, streamlet_id, sequence):
                return

    async def _expected(self, appender: Appender, streamlet_id: int) -> int:
        try:
            await self._append(appender, streamlet_id, FAR_AHEAD, b"never stored")
        except OutOfSequence as error:
            return int(error.attributes["expected_sequence"])
        except ProducerFenced as error:
            appender.producer_epoch = int(error.attributes.get("producer_epoch", appender.producer_epoch))
        except KeraError:
            pass
        return 0

    def _sequences(self, attempt: str, expected: int) -> Iterator[int]:
        match attempt:
            case "next":
                yield from range(expected, expected + self._random.randint(1, BURST))
            case "again":
                yield self._random.randrange(max(1, expected))
            case _:
                yield 0

    async def _send(self, appender: Appender, streamlet_id: int, sequence: int) -> bool:
        value = Value(f"impostor-{self._sent}", 0)
        self._sent += 1
        self._workload.history.sent.add(value)
        try:
            await self._append(appender, streamlet_id, sequence, value.to_bytes())
        except KeraError as error:
            self._cluster.trace.note("operator", f"impostor does not get {value} stored: {error!r}")
            return False
        self._workload.history.acknowledged[value] = None
        return True

    @staticmethod
    async def _append(appender: Appender, streamlet_id: int, sequence: int, value: bytes) -> None:
        rows = appender.conform(pa.record_batch({"value": pa.array([value], pa.binary())}))
        await appender.append(streamlet_id, rows, sequence)
