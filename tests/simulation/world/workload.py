"""What clients do, and the history of what they saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kera.client import Client
from kera.client.checking.history import History, Place, Value
from kera.client.types import Delivery, Record
from kera.core.errors import KeraError, NotAccepted
from kera.core.runtime import Runtime
from tests.simulation.wiring import programs
from tests.simulation.world.cluster import Cluster

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
        """Producers that have had an answer to everything."""
        self.repeats = 0
        """Records that had arrived already when they were sent again, as producers were told."""

    def connected(self, runtime: Runtime) -> Any:
        """A client."""
        return programs.client_on(self._cluster.coordinators, runtime, **CLIENT_SETTINGS)

    async def create(self, runtime: Runtime) -> None:
        """Make the stream."""
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
        """Sends its records over the time of the load, some at once, and waits for all of them."""

        async def main(runtime: Runtime) -> None:
            plan = self._plan
            async with (
                self.connected(runtime) as client,
                client.producer(
                    name=name if plan.named else "",
                    delivery_timeout_ms=DELIVERY_TIMEOUT_MS,
                    chunk_bytes_max=4096,
                    request_bytes_max=32_768,
                ) as producer,
            ):
                await producer.prepare(STREAM)
                who = f"{name}#{producer._identity.first_epoch}" if plan.named else name
                pause_s = plan.load_s * plan.burst / plan.records
                for first in range(0, plan.records, plan.burst):
                    if first:
                        await asyncio.sleep(pause_s)  # sleep: virtual time, over which the load comes
                    numbers = range(first, min(first + plan.burst, plan.records))
                    await asyncio.gather(*(self._send(producer, Value(who, number)) for number in numbers))
            self.produced.add(name)  # else it was fenced, and ends with that
            self._cluster.trace.note(name, f"has sent everything as {who}")

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
        """Reads everything from the beginning on, as it comes."""

        async def main(runtime: Runtime) -> None:
            async with (
                self.connected(runtime) as client,
                client.consumer(STREAM, start="earliest", shared_memory="never") as consumer,
            ):
                async for record in consumer.records():
                    self.history.read[name].append(_seen(record))

        return main

    def member(self) -> Program:
        """Takes its part of the stream, as one of the consumer group."""

        async def main(runtime: Runtime) -> None:
            async with (
                self.connected(runtime) as client,
                client.group_consumer(GROUP, STREAM, on_lost=lambda _: None, shared_memory="never") as consumer,
            ):
                async for record in consumer.records():
                    self.history.processed[GROUP].add(_seen(record)[1])

        return main

    async def read_back(self, runtime: Runtime) -> None:
        """Read what is stored in the end."""
        async with (
            self.connected(runtime) as client,
            client.consumer(STREAM, start="earliest", end="latest", shared_memory="never") as consumer,
        ):
            stored = [_seen(record) async for record in consumer.records()]
        self.history.stored = stored
        self._cluster.trace.note("operator", f"has read back {len(stored)} records")

    async def recovered(self, client: Client) -> bool:
        """Whether the coordinator has nothing left to recover."""
        return all(each.phase in {"done", "cancelled"} for each in await client.admin.recoveries())


def programs_of(workload: Workload, plan: Plan) -> dict[str, Program]:
    """By machine."""
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
    """What is stored of a producer behind something of its successor, whose epochs are later."""
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
