"""Shared by tests that kill brokers: clusters that keep their data, a load, and the metrics and logs of brokers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kera.client import Client, Consumer, Delivery, Position, Producer
from kera.core.base.settings import KIB, MIB
from kera.core.errors import DataLost
from kera.local.cluster import LocalCluster, RunningCluster

T = TypeVar("T")

TIMEOUT_S = 60.0
BROKER = "broker-1"
NOISE = random.Random(7).randbytes(64 * KIB)


class Members(Protocol):
    """The parts of a cluster that these helpers use, for every kind of cluster."""

    @property
    def bootstrap(self) -> str: ...
    @property
    def processes(self) -> dict[str, int]: ...
    @property
    def ready(self) -> dict[str, dict[str, Any]]: ...
    @property
    def log_dir(self) -> Path: ...


@contextlib.contextmanager
def keeping_cluster(
    data_dir: Path, *, arena_bytes: int = 4 * MIB, segment_bytes: int = 64 * KIB, **settings: object
) -> Iterator[RunningCluster]:
    """A cluster of one persistent broker with metrics; shared memory is left clean."""
    settings = {"metrics_port": 0, **settings}
    with LocalCluster.running(
        data_dir=data_dir, arena_bytes=arena_bytes, segment_bytes=segment_bytes, broker_settings=settings
    ) as running:
        try:
            yield running
        finally:
            last = arena_of(running)
    last.unlink(missing_ok=True)  # a killed broker leaves it, and a broker that could not put everything on disk


def arena_of(cluster: RunningCluster) -> Path:
    """The broker's memory."""
    return Path(cluster.ready[BROKER]["arena_path"])


def lose_host(cluster: RunningCluster) -> None:
    """Kill a broker as a crash of its host does: its process and memory are gone, and its disk stays."""
    cluster.kill(BROKER)
    arena_of(cluster).unlink()


def disk_bytes(path: Path) -> int:
    """The disk space of the segments below `path`."""
    total = 0
    for file in path.rglob("*.segment"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512
    return total


def fill_up(disk: Path, leave_bytes: int) -> Path:
    """A file that takes all but `leave_bytes` of the disk; the broker may be taking some at the same time."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while (room := shutil.disk_usage(disk).free - leave_bytes) > 0:
            file.write(bytes(min(room, MIB)))
    return filler


def metrics(cluster: RunningCluster) -> dict[str, int]:
    """The broker's metrics, by name without the common prefix."""
    url = f"http://{cluster.ready[BROKER]['metrics_address']}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    pairs = (line.removeprefix("kera_broker_").split() for line in lines if line.startswith("kera_broker_"))
    return {name: int(float(value)) for name, value in pairs if not name.endswith("_created")}


def metric(cluster: RunningCluster, name: str) -> int:
    """One metric of the broker."""
    return metrics(cluster)[name]


def tell(cluster: RunningCluster) -> None:
    """Print information that helps to understand a failure."""
    with contextlib.suppress(OSError):
        print(metrics(cluster))  # noqa: T201 - pytest shows it
    print((cluster.log_dir / f"{BROKER}.log").read_text()[-8000:])  # noqa: T201 - the same


def log_events(cluster: RunningCluster, event: str) -> list[dict[str, Any]]:
    """The broker's log entries with this event."""
    lines = (cluster.log_dir / f"{BROKER}.log").read_text().splitlines()
    return [entry for line in lines if line.startswith("{") and (entry := json.loads(line)).get("event") == event]


def troubles(told: dict[str, Any]) -> list[dict[str, str]]:
    """The warnings and problems of `kera cluster health` or `kera top`, without those that are not the cluster's fault.

    These are how full this machine's disk is, and a feature level that rises a moment after the last daemon has come.
    """
    found = [each for each in told["findings"] if each["severity"] != "ok"]
    return [each for each in found if each["subject"] != "feature level" and not each["text"].endswith(" are free")]


async def until(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for `condition`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def until_found(look: Callable[[], Awaitable[T | None]], timeout_s: float = TIMEOUT_S) -> T:
    """Call `look` until it returns something, and return that."""
    async with asyncio.timeout(timeout_s):
        while not (answer := await look()):
            await asyncio.sleep(0.02)
        return answer


def value_of(number: int) -> bytes:
    """The record with this number: its length and bytes depend on the number."""
    start = number * 31 % (len(NOISE) - 2048)
    return b"%d:" % number + NOISE[start : start + 100 + number % 1500]


def number_of(value: bytes | None) -> int:
    """The number of this record; all its bytes are compared."""
    number = int((value or b"").partition(b":")[0])
    assert value == value_of(number), f"record {number} has other bytes"
    return number


class Load:
    """Sends records 0, 1, … to the streamlets in turn, all the time, and keeps the outcome of each."""

    def __init__(self, producer: Producer, stream: str, streamlets: int, pause_s: float) -> None:
        self._producer = producer
        self._pause_s = pause_s
        self.stream = stream
        self.streamlets = streamlets
        self.deliveries: list[Delivery] = []
        """The outcomes of record 0, 1, …"""
        self.sent = 0
        self.stopping = False

    async def run(self) -> None:
        pending: list[Any] = []
        while not self.stopping:
            for _ in range(10):
                streamlet = self.sent % self.streamlets
                pending.append(self._producer.send(self.stream, value_of(self.sent), keys=b"key", streamlet=streamlet))
                self.sent += 1
            await self._producer.drain()
            await asyncio.sleep(self._pause_s)  # a load, not a flood
            done = next((at for at, each in enumerate(pending) if not self._done(each)), len(pending))
            self.deliveries += [await delivery for delivery in pending[:done]]
            del pending[:done]
        self.deliveries += [await delivery for delivery in pending]

    @staticmethod
    def _done(pending: Any) -> bool:
        return bool(pending._accumulator.delivered.done())

    def of(self, streamlet: int) -> list[tuple[int, Delivery]]:
        """The deliveries to a streamlet, with the numbers of the records."""
        found = list(enumerate(self.deliveries))[streamlet :: self.streamlets]
        assert all(each.entry.streamlet_id == streamlet for _, each in found)
        return found


@contextlib.asynccontextmanager
async def load(
    producer: Producer, stream: str = "s", streamlets: int = 2, timeout_s: float = TIMEOUT_S, pause_s: float = 0.002
) -> AsyncIterator[Load]:
    """A load in the background; it is ended and delivered when the block ends."""
    running = Load(producer, stream, streamlets, pause_s)
    async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
        tasks.create_task(running.run())
        try:
            yield running
        finally:
            running.stopping = True


class Follower:
    """Reads until an error ends it."""

    def __init__(self, consumer: Consumer, streamlets: int = 2) -> None:
        self._consumer = consumer
        self.seen: dict[int, list[int]] = {streamlet: [] for streamlet in range(streamlets)}
        self.error: DataLost | None = None

    async def run(self) -> None:
        try:
            async for record in self._consumer:
                self.seen[record.streamlet].append(number_of(record.value))
        except DataLost as error:
            self.error = error


async def read(
    client: Client, stream: str = "s", streamlets: int = 2, timeout_s: float = TIMEOUT_S
) -> dict[int, list[int]]:
    """The numbers of the records in each streamlet, in order; all their bytes are compared."""
    found: dict[int, list[int]] = {streamlet: [] for streamlet in range(streamlets)}
    ahead: dict[str, Any] = {"prefetch_bytes_max": MIB, "fetch_bytes_max": MIB // 4}  # writers need some memory, too
    start: Any = "earliest"
    async with asyncio.timeout(timeout_s):
        while True:
            consumer = client.consumer(stream, start=start, end="latest", **ahead)
            try:
                async with consumer:
                    async for record in consumer:
                        found[record.streamlet].append(number_of(record.value))
                return found
            except DataLost as error:  # over the gap, like a reader that wants the rest
                start = consumer.positions()
                available = Position(*error.attributes["available_from"])
                start[error.attributes["streamlet_id"]][error.attributes["entry"]] = available
