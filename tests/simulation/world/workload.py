"""The programs of clients, and the history of their observations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from kera.client import Client
from kera.client.checking.history import History, Place, Value
from kera.client.checking.verdict import EVIDENCE_MAX
from kera.client.types import Delivery, Record
from kera.core.base.ids import Position
from kera.core.errors import DataLost, KeraError, NotAccepted, ProducerFenced
from kera.core.runtime import Runtime
from tests.simulation.wiring import programs
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.copies import copies_of, too_few
from tests.simulation.world.owners import not_taken_by_owners

if TYPE_CHECKING:
    from tests.simulation.world.plan import Plan

STREAM = "events"
GROUP = "workers"
CLIENT_SETTINGS = {"request_timeout_ms": 5000, "retry_timeout_ms": 120_000, "connect_timeout_ms": 1500}
DELIVERY_TIMEOUT_MS = 200_000
Program = Callable[[Runtime], Coroutine[Any, Any, None]]


class Workload:
    """The programs of the clients' machines."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._plan = cluster.plan
        self.history = History()
        self.produced: set[str] = set()
        """Producers that have got all their answers."""
        self.identities: set[tuple[int, int]] = set()
        """The ids and first epochs of producers."""
        self.repeats = 0
        """Records that were acknowledged as repeats."""
        self._positions: dict[str, dict[int, list[Position]]] = {}
        """The positions at which stopped readers continue."""
        self.told_removed = 0
        """The number of times that a reader found its next records removed."""

    def connected(self, runtime: Runtime) -> Any:
        """Connect a client."""
        return programs.client_on(self._cluster.coordinators, runtime, **CLIENT_SETTINGS)

    async def create(self, runtime: Runtime) -> None:
        """Create the stream."""
        plan = self._plan
        async with self.connected(runtime) as client:
            await client.admin.create_stream(
                STREAM,
                streamlets=plan.streamlets,
                entries=plan.entries,
                replication=plan.replication,
                durability=plan.durability,
                virtual_logs=min(2, plan.streamlets),
            )

    def producer(self, name: str) -> Program:
        """A program that sends its records in bursts during the load, and waits for all acknowledgements."""

        async def send_all(runtime: Runtime) -> None:
            plan = self._plan
            async with (
                self.connected(runtime) as client,
                client.producer(
                    name=name if plan.named else "",
                    delivery_timeout_ms=DELIVERY_TIMEOUT_MS,
                    chunk_bytes_max=4096,
                    request_bytes_max=32_768,
                    latency_target_ms=plan.latency_target_ms,
                ) as producer,
            ):
                await producer.prepare(STREAM)
                self.identities.add((producer._writers.identity.producer_id, producer._writers.identity.first_epoch))
                who = f"{name}#{producer._writers.identity.first_epoch}" if plan.named else name
                pause_s = plan.load_s * plan.burst / plan.records
                for first in range(0, plan.records, plan.burst):
                    if first:
                        await asyncio.sleep(pause_s)  # sleep: virtual time, between bursts
                    numbers = range(first, min(first + plan.burst, plan.records))
                    await asyncio.gather(*(self._send(producer, Value(who, number)) for number in numbers))
            self.produced.add(name)  # a fenced producer does not get here
            self._cluster.trace.note(name, f"has sent everything as {who}")

        async def main(runtime: Runtime) -> None:
            try:
                await send_all(runtime)
            except ProducerFenced:
                if not self._plan.impostor:
                    raise
                self.produced.add(name)

        return main

    async def _send(self, producer: Any, value: Value) -> None:
        history, plan = self.history, self._plan
        padding = b"." * plan.record_bytes
        key = f"{value.producer} {value.number % (2 * plan.streamlets)}".encode()
        history.sent.add(value)
        try:
            delivery: Delivery = await producer.send(STREAM, value.to_bytes(), keys=key, headers={"padding": padding})
        except NotAccepted:
            history.refused.add(value)
        except KeraError as error:
            self._cluster.trace.note(value.producer, f"does not know of {value}: {error!r}")
        else:
            place = None
            if delivery.record is not None:
                place = Place(delivery.entry.streamlet_id, delivery.entry.entry, delivery.record)
            history.acknowledged[value] = place
            self.repeats += delivery.duplicate

    def reader(self, name: str) -> Program:
        """A program that reads everything from the beginning or from its last position, and skips removed records."""

        async def main(runtime: Runtime) -> None:
            async with self.connected(runtime) as client:
                await self._read(client, name, self.history.read[name].append)

        return main

    async def _read(
        self,
        client: Client,
        name: str,
        take: Callable[[tuple[Place, Value]], None],
        end: Literal["latest"] | None = None,
    ) -> None:
        while True:
            start: Literal["earliest"] | dict[int, list[Position]] = self._positions.get(name) or "earliest"
            async with client.consumer(STREAM, start=start, end=end, shared_memory="never") as consumer:
                try:
                    async for record in consumer.records():
                        take(_seen(record))
                    return
                except DataLost as gap:
                    self._check_removed(name, gap)
                    streamlet_id, entry = gap.attributes["streamlet_id"], gap.attributes["entry"]
                    behind = consumer.positions()
                    behind[streamlet_id][entry] = Position(*gap.attributes["available_from"])
                    self._positions[name] = behind
                except asyncio.CancelledError:
                    if positions := consumer.positions():
                        self._positions[name] = positions
                    raise

    def _check_removed(self, name: str, gap: DataLost) -> None:
        """Raise a gap that a reader has found, unless its records were removed on request."""
        told = gap.attributes
        entry = told["streamlet_id"], told["entry"]
        record = max((end for _, end in told.get("lost_records", [])), default=told.get("available_record"))
        if record is None or record > self.history.removed.get(entry, 0):
            raise gap
        self.told_removed += 1
        self._cluster.trace.note(name, f"goes on behind what was removed: {gap}")

    def member(self) -> Program:
        """A program that reads its part of the stream as a member of the consumer group."""

        async def main(runtime: Runtime) -> None:
            async with (
                self.connected(runtime) as client,
                client.group_consumer(GROUP, STREAM, on_lost=lambda _: None, shared_memory="never") as consumer,
            ):
                while True:
                    try:
                        async for record in consumer.records():
                            self.history.processed[GROUP].add(_seen(record)[1])
                    except DataLost as gap:  # raised once; the next call continues after it
                        self._check_removed("member", gap)

        return main

    async def read_back(self, runtime: Runtime) -> None:
        """Read all stored records at the end."""
        stored: list[tuple[Place, Value]] = []
        async with self.connected(runtime) as client:
            await self._read(client, "operator", stored.append, end="latest")
        self.history.stored = stored
        self._cluster.trace.note("operator", f"has read back {len(stored)} records")

    async def replicated(self, runtime: Runtime) -> None:
        """Wait until backups have the promised number of copies of all records."""

        async def too_few_of(client: Client) -> list[str]:
            stream_id = (await client.describe(STREAM)).stream_id
            return list(too_few(self.history, await copies_of(client, stream_id), self._plan.replication))

        await self._until_none(runtime, too_few_of)

    async def taken_by_owners(self, runtime: Runtime) -> None:
        """Wait until only its owner accepts chunks of each streamlet."""
        await self._until_none(runtime, lambda client: not_taken_by_owners(client, STREAM))

    async def _until_none(self, runtime: Runtime, look: Callable[[Client], Awaitable[list[str]]]) -> None:
        """Wait until a check finds no problem."""
        told = list[str]()
        async with self.connected(runtime) as client:
            while True:
                try:
                    wrong = (await look(client))[:EVIDENCE_MAX]
                except KeraError as error:
                    wrong = [f"the cluster does not tell: {error!r}"]
                if not wrong:
                    return
                for line in wrong if wrong != told else ():
                    self._cluster.trace.note("operator", line)
                told = wrong
                await asyncio.sleep(1.0)  # sleep: virtual time, between looks


def programs_of(workload: Workload, plan: Plan) -> dict[str, Program]:
    """The programs, by machine."""
    found: dict[str, Program] = {}
    for name in plan.client_names:
        kind = name.partition("-")[0]
        match kind:
            case "producer":
                found[name] = workload.producer(name)
            case "reader":
                found[name] = workload.reader(name)
            case _:
                found[name] = workload.member()
    return found


def fenced_too_late(stored: Iterable[tuple[Place, Value]]) -> Iterator[str]:
    """Messages about records of a producer that are stored behind records of its successor, with a later epoch."""
    last: dict[tuple[int, int, str], int] = {}
    for place, value in stored:
        name, _, epoch = value.producer.partition("#")
        if epoch:
            key = place.streamlet_id, place.entry, name
            if int(epoch) < last.get(key, 0):
                yield f"of a fenced producer: {value} at {place}, behind one of epoch {last[key]}"
            last[key] = max(last.get(key, 0), int(epoch))


def _seen(record: Record) -> tuple[Place, Value]:
    return Place(record.streamlet, record.entry, record.offset), Value.from_bytes(record.value)
