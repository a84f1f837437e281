"""Shared by tests of recovery and migration: clusters that notice a death soon, loads that keep a ledger, timelines.

A `Writer` sends numbered records of its own to all streamlets of a stream, and keeps what was acknowledged, and when. A
`Reader` sees each record once, in its writer's order, with ordinals that grow by one, or reports what it saw instead.
`check_log` compares a stream with the ledgers of its writers.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import time
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kera.client import (
    Client,
    ClientSettings,
    Consumer,
    Delivery,
    Position,
    Producer,
    RecoveryDescription,
    StreamDescription,
)
from kera.core.base.settings import KIB, MIB
from kera.core.errors import KeraError
from kera.local.cluster import LocalCluster
from tests.chaos.verdict import Wrong
from tests.integration.replication_support import samples
from tests.integration.support import Members, number_of, until, value_of

HEARTBEAT_MS = 200
HEARTBEATS_MISSED_MAX = 8
DETECTION_S = HEARTBEAT_MS * HEARTBEATS_MISSED_MAX / 1000
"""A member that is silent for this long counts as dead; a shorter time would also hit live members of a busy
machine.
"""
SESSION_TIMEOUT_MS = 1_500
"""The same for a leading coordinator, by ZooKeeper."""
SEGMENT_BYTES = 64 * KIB
TIMEOUT_S = 60.0
WRITER_RECORDS = 1 << 32
"""Writer number w numbers its records from w * this on."""
FINISHED = ("done", "cancelled")


# -- clusters --------------------------------------------------------------------------------------------------


def control_cluster_of(
    data_dir: Path,
    *,
    brokers: int = 3,
    backups: int = 3,
    arena_bytes: int = 32 * MIB,
    backup_memory_bytes: int = 32 * MIB,
    segment_bytes: int = SEGMENT_BYTES,
    coordinator_settings: Mapping[str, int] | None = None,
    kind: type[LocalCluster] = LocalCluster,
    **arguments: Any,
) -> LocalCluster:
    """A cluster that keeps its data and notices a death within `DETECTION_S`; it has not been started."""
    return kind(
        data_dir=data_dir,
        brokers=brokers,
        backups=backups,
        arena_bytes=arena_bytes,
        backup_memory_bytes=backup_memory_bytes,
        segment_bytes=segment_bytes,
        coordinator_settings={
            "heartbeat_interval_ms": HEARTBEAT_MS,
            "heartbeats_missed_max": HEARTBEATS_MISSED_MAX,
            "zookeeper_session_timeout_ms": SESSION_TIMEOUT_MS,
            **(coordinator_settings or {}),
        },
        broker_settings={"metrics_port": 0, "repair_delay_ms": 1_000},
        **arguments,
    )


@contextlib.asynccontextmanager
async def control_cluster(data_dir: Path, **arguments: Any) -> AsyncIterator[LocalCluster]:
    """A started cluster of `control_cluster_of`; shared memory is left clean."""
    cluster = control_cluster_of(data_dir, **arguments)
    try:
        async with cluster:
            yield cluster
    finally:
        for name in broker_names(cluster):
            Path(cluster.ready[name]["arena_path"]).unlink(missing_ok=True)  # the file of a killed broker


async def connect(cluster: Members, **settings: Any) -> Client:
    """A client that soon gives up a request: a stopped broker never answers."""
    return await Client.connect(cluster.bootstrap, ClientSettings.load(**{"request_timeout_ms": 3_000, **settings}))


def broker_names(cluster: Members) -> list[str]:
    """All brokers, also those that do not run."""
    return [name for name in cluster.ready if name.startswith("broker")]


def broker_id_of(cluster: Members, name: str) -> int:
    """The id of a broker."""
    return int(cluster.ready[name]["broker_id"])


def broker_name(cluster: Members, broker_id: int) -> str:
    """The name of the broker with this id."""
    return next(name for name in broker_names(cluster) if broker_id_of(cluster, name) == broker_id)


async def streamlets_of(client: Client, stream: str, broker_id: int) -> list[int]:
    """The streamlets of a stream that a broker owns now."""
    description = await client.admin.describe_stream(stream)
    return [number for number, assignment in description.assignments.items() if assignment.broker_id == broker_id]


async def until_registered(client: Client, broker_id: int) -> None:
    """Wait until the coordinator knows that this broker lives."""
    async with asyncio.timeout(TIMEOUT_S):
        while not any(
            broker.alive and broker.broker_id == broker_id for broker in (await client.admin.describe_cluster()).brokers
        ):
            await asyncio.sleep(0.05)


DEFICIENT = "virtual_segments_deficient"
UNDER_WAY = ("replication_backlog", "replication_lag_bytes")


def _lacking(cluster: Members, name: str, prefixes: tuple[str, ...]) -> dict[str, float]:
    return {sample: value for sample, value in samples(cluster, name).items() if sample.startswith(prefixes) and value}


async def until_safe(cluster: Members, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until everything at all running brokers has its replicas. Nothing may be written meanwhile."""
    await _until_none_lack(cluster, (DEFICIENT, *UNDER_WAY), timeout_s)


async def until_replicas(cluster: Members, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until no virtual segment of a running broker lacks a replica. Records may be written meanwhile."""
    await _until_none_lack(cluster, (DEFICIENT,), timeout_s)


async def _until_none_lack(cluster: Members, prefixes: tuple[str, ...], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for name in broker_names(cluster):
        while name in cluster.processes and (lacking := await asyncio.to_thread(_lacking, cluster, name, prefixes)):
            if time.monotonic() > deadline_s:
                raise Wrong(f"{name} is under-replicated for {timeout_s} s: {lacking}")
            await asyncio.sleep(0.05)


def now_us() -> int:
    """As the coordinator tells time."""
    return time.time_ns() // 1000


# -- writers ---------------------------------------------------------------------------------------------------


class Writer:
    """Sends records of its own to all streamlets of a stream, each at its own pace, and keeps their outcomes."""

    def __init__(
        self, producer: Producer, stream: StreamDescription, number: int, *, pause_s: float, backlog_max: int
    ) -> None:
        """`backlog_max`: a streamlet with this many unanswered records gets no more."""
        count = stream.config.streamlets
        self.stream = stream
        self.number = number
        self.deliveries: list[list[Delivery]] = [[] for _ in range(count)]
        """By streamlet, in the order in which they were sent."""
        self.times_s = [array("d") for _ in range(count)]
        """When these arrived, by the monotonic clock."""
        self.sent = [0] * count
        self.errors: list[BaseException] = []
        self.paused = False
        self.stopping = False
        self._producer = producer
        self._pause_s = pause_s
        self._backlog_max = backlog_max
        self._waiting: list[deque[Any]] = [deque() for _ in range(count)]
        self._more = [asyncio.Event() for _ in range(count)]

    async def run(self) -> None:
        """Write until `stopping`, then wait for the records under way."""
        async with asyncio.TaskGroup() as tasks:
            for streamlet in range(self.stream.config.streamlets):
                tasks.create_task(self._send(streamlet))
                tasks.create_task(self._collect(streamlet))

    async def _send(self, streamlet: int) -> None:
        waiting, more = self._waiting[streamlet], self._more[streamlet]
        while not self.stopping:
            if not self.paused and len(waiting) < self._backlog_max:
                value = value_of(record_number(self.number, streamlet, self.sent[streamlet], len(self.sent)))
                waiting.append(self._producer.send(self.stream.name, value, streamlet=streamlet))
                self.sent[streamlet] += 1
                more.set()
            await asyncio.sleep(self._pause_s)
        more.set()

    async def _collect(self, streamlet: int) -> None:
        waiting, more = self._waiting[streamlet], self._more[streamlet]
        while True:
            while waiting:
                try:
                    self.deliveries[streamlet].append(await waiting[0])
                    self.times_s[streamlet].append(time.monotonic())
                except Exception as error:  # noqa: BLE001 - the test says what it expects
                    self.errors.append(error)
                waiting.popleft()
            if self.stopping and not waiting:
                return
            more.clear()
            await more.wait()

    @property
    def acknowledged(self) -> int:
        """The number of acknowledged records."""
        return sum(map(len, self.deliveries))

    @property
    def settled(self) -> bool:
        """Whether everything that was sent was acknowledged, or failed."""
        return self.acknowledged + len(self.errors) == sum(self.sent)

    @property
    def duplicates(self) -> int:
        """The number of records that had arrived before and were recognised."""
        return sum(delivery.duplicate for deliveries in self.deliveries for delivery in deliveries)

    def check(self) -> None:
        """Check that nothing that was sent has failed."""
        if self.errors:
            raise Wrong(f"{self.stream.name}: {len(self.errors)} records failed: {self.errors[0]!r}")

    async def go_on(
        self, streamlets: Iterable[int] | None = None, count: int = 5, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Wait until this many more records of each of these streamlets are acknowledged."""
        wanted = {number: len(self.deliveries[number]) + count for number in streamlets or range(len(self.sent))}
        with saying(lambda: f"{self.stream.name}: no {count} more of streamlets {list(wanted)}, but {self._state()}"):
            await until(
                lambda: all(len(self.deliveries[at]) >= enough for at, enough in wanted.items()) or bool(self.errors),
                timeout_s,
            )
        self.check()

    async def settle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Pause, and wait until everything is acknowledged."""
        self.paused = True
        with saying(lambda: f"{self.stream.name}: not all is acknowledged: {self._state()}"):
            await until(lambda: self.settled, timeout_s)
        self.check()

    def _state(self) -> str:
        return f"{[len(deliveries) for deliveries in self.deliveries]} of {self.sent}"

    def stall_s(self, streamlets: Iterable[int], begun_s: float, ended_s: float) -> float:
        """The longest time between two acknowledgements of one of these streamlets that touches this period."""
        return max((_longest_gap_s(self.times_s[at], begun_s, ended_s) for at in streamlets), default=0.0)


def record_number(writer: int, streamlet: int, ordinal: int, streamlets: int) -> int:
    """The number of a writer's record for a streamlet."""
    return writer * WRITER_RECORDS + ordinal * streamlets + streamlet


def _longest_gap_s(times_s: Sequence[float], begun_s: float, ended_s: float) -> float:
    first = max(bisect.bisect_left(times_s, begun_s) - 1, 0)
    last = min(bisect.bisect_right(times_s, ended_s), len(times_s) - 1)
    return max((times_s[at + 1] - times_s[at] for at in range(first, last)), default=0.0)


@contextlib.contextmanager
def saying(text: Callable[[], str]) -> Iterator[None]:
    """Time-outs say what the test waited for."""
    try:
        yield
    except TimeoutError:
        raise Wrong(text()) from None


@contextlib.asynccontextmanager
async def writer(
    client: Client,
    stream: str,
    number: int = 0,
    *,
    pause_s: float = 0.02,
    backlog_max: int = 200,
    chunk_bytes_max: int = 4 * KIB,
    delivery_timeout_ms: int = 120_000,
    **settings: Any,
) -> AsyncIterator[Writer]:
    """A writer in the background; everything is delivered when the block ends without an error."""
    async with client.producer(
        chunk_bytes_max=chunk_bytes_max, delivery_timeout_ms=delivery_timeout_ms, **settings
    ) as producer:
        description = await producer.prepare(stream)
        running = Writer(producer, description, number, pause_s=pause_s, backlog_max=backlog_max)
        task = asyncio.create_task(running.run())
        try:
            yield running
            running.stopping = True
            async with asyncio.timeout(TIMEOUT_S):
                await task
            running.check()
        finally:
            task.cancel()
            await asyncio.wait([task])


async def settle(writers: Sequence[Writer], timeout_s: float = TIMEOUT_S) -> None:
    """Send nothing more, and wait until everything that was sent is acknowledged."""
    await asyncio.gather(*(each.settle(timeout_s) for each in writers))


# -- readers ---------------------------------------------------------------------------------------------------


class Reader:
    """Reads a stream from its start, and checks each record against the record that is due."""

    def __init__(
        self,
        client: Client,
        stream: StreamDescription,
        *,
        keep: bool = False,
        foreign: bytes | None = None,
        **settings: Any,
    ) -> None:
        """`keep`: remember where each record was; `foreign`: the value of records that belong to no writer.

        `settings` are the consumer's.
        """
        self.stream = stream
        self.records = 0
        self.foreign_records = 0
        self.seen: dict[tuple[int, int], int] = {}
        """By streamlet and writer: how many of the writer's records, counted from its first."""
        self.places: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Likewise: the entry and the ordinal of each."""
        self.error: Exception | None = None
        self._client = client
        self._keep = keep
        self._foreign = foreign
        self._settings = settings
        self._ordinals: dict[tuple[int, int], int] = {}
        self._positions: dict[int, list[Position]] | None = None
        self._reopen = False

    def reopen(self) -> None:
        """At the next chunk, end this consumer, and continue with another one where it stopped."""
        self._reopen = True

    async def run(self) -> None:
        """Read until cancelled; a failure is kept in `error`."""
        try:
            while True:
                await self.read()
        except (KeraError, Wrong, AssertionError) as error:
            self.error = error

    async def read(self, end: Literal["latest"] | None = None) -> None:
        """One consumer's life: up to `end`, or until it is to be reopened."""
        start: Any = "earliest" if self._positions is None else self._positions
        async with self._client.consumer(self.stream.name, start=start, end=end, **self._settings) as consumer:
            await self._read(consumer)

    async def _read(self, consumer: Consumer) -> None:
        async for chunk in consumer.batches():
            entry = chunk.entry.streamlet_id, chunk.entry.entry
            self._check_ordinal(entry, chunk.header.first_record)
            for index, value in enumerate(chunk.batch.column("value").to_pylist()):
                if self._foreign is not None and value == self._foreign:
                    self.foreign_records += 1
                    continue
                self._take(entry, chunk.header.first_record + index, number_of(value))
            self._ordinals[entry] = chunk.header.first_record + chunk.batch.num_rows
            self._positions = consumer.positions()
            if self._reopen:
                self._reopen = False
                return

    def _check_ordinal(self, entry: tuple[int, int], ordinal: int) -> None:
        if (due := self._ordinals.get(entry, 0)) != ordinal:
            raise Wrong(f"{self.stream.name}: ordinal {ordinal} of {entry} came where {due} was due")

    def _take(self, entry: tuple[int, int], ordinal: int, number: int) -> None:
        streamlets = self.stream.config.streamlets
        source, rest = divmod(number, WRITER_RECORDS)
        at, streamlet = divmod(rest, streamlets)
        due = self.seen.get((streamlet, source), 0)
        if streamlet != entry[0] or at != due:
            raise Wrong(
                f"{self.stream.name}: record {at} for streamlet {streamlet} of writer {source} is in {entry} at"
                f" {ordinal}, where {due} was due"
            )
        self.seen[streamlet, source] = at + 1
        self.records += 1
        if self._keep:
            self.places.setdefault((streamlet, source), []).append((entry[1], ordinal))

    async def catch_up(self, writers: Iterable[Writer], timeout_s: float = TIMEOUT_S) -> None:
        """Wait until everything that was acknowledged was read; nothing may be written meanwhile."""
        wanted = sum(each.acknowledged for each in writers)
        with saying(lambda: f"{self.stream.name}: a reader has {self.records} of {wanted} records"):
            await until(lambda: self.records >= wanted or self.error is not None, timeout_s)
        if self.error is not None:
            raise self.error
        if self.records != wanted:
            raise Wrong(f"{self.stream.name}: {wanted} records were acknowledged, {self.records} read")


@contextlib.asynccontextmanager
async def reader(client: Client, stream: str, **settings: Any) -> AsyncIterator[Reader]:
    """A reader in the background."""
    settings = {"fetch_wait_ms": 100, **settings}
    running = Reader(client, await client.describe(stream), **settings)
    task = asyncio.create_task(running.run())
    try:
        yield running
        if running.error is not None:
            raise running.error
    finally:
        task.cancel()
        await asyncio.wait([task])


async def check_log(
    client: Client,
    stream: str,
    writers: Sequence[Writer],
    timeout_s: float = TIMEOUT_S,
    *,
    foreign: bytes | None = None,
) -> int:
    """Check that every acknowledged record is there once, in its writer's order, at the acknowledged place.

    Nothing may be under way. Returns the number of records, `foreign` ones included; raises `Wrong`.
    """
    found = Reader(client, await client.describe(stream), keep=True, foreign=foreign, shared_memory="never")
    with saying(lambda: f"{stream}: after {timeout_s} s {found.records} records were read"):
        async with asyncio.timeout(timeout_s):
            await found.read(end="latest")
    for each in writers:
        for streamlet, deliveries in enumerate(each.deliveries):
            places = found.places.get((streamlet, each.number), [])
            if len(places) != len(deliveries):
                raise Wrong(f"{stream}/{streamlet}: {len(deliveries)} were acknowledged, {len(places)} are there")
            for at, (delivery, place) in enumerate(zip(deliveries, places, strict=True)):
                # The answer to a repeat may name no place when the record is not in memory any more.
                if delivery.position is not None and place != (delivery.entry.entry, delivery.record):
                    raise Wrong(f"{stream}/{streamlet}: record {at} is at {place}, acknowledged was {delivery}")
    return found.records + found.foreign_records


# -- recoveries ------------------------------------------------------------------------------------------------


async def recoveries_since(client: Client, since_us: int) -> list[RecoveryDescription]:
    """The recoveries that were noticed since then."""
    return [each for each in await client.admin.recoveries() if each.detected_us >= since_us]


async def until_recovered(
    client: Client, broker_ids: Iterable[int], since_us: int, timeout_s: float = TIMEOUT_S
) -> list[RecoveryDescription]:
    """Wait until recoveries of all these brokers have begun since then, and no recovery is under way."""
    wanted = set(broker_ids)
    found: list[RecoveryDescription] = []
    with saying(lambda: f"recoveries of brokers {wanted} are not over after {timeout_s} s: {found}"):
        async with asyncio.timeout(timeout_s):
            while True:
                found = await client.admin.recoveries()
                new = [each for each in found if each.detected_us >= since_us]
                if wanted <= {each.broker_id for each in new} and all(each.phase in FINISHED for each in found):
                    return new
                await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Timeline:
    """When each event after a broker's death happened."""

    info: RecoveryDescription
    killed_us: int
    stall_s: float | None = None
    """The longest time between two acknowledgements of a streamlet that the broker had."""

    def since_kill_s(self, at_us: int) -> float | None:
        """Seconds after the kill; None: has not happened."""
        return (at_us - self.killed_us) / 1e6 if at_us else None

    @property
    def gb_per_s(self) -> float | None:
        """How fast data came back: from when the broker was fenced until all of it could be read."""
        if not (self.info.readable_us > self.info.fenced_us > 0):
            return None
        return self.info.bytes_recovered / 1e3 / (self.info.readable_us - self.info.fenced_us)

    def __str__(self) -> str:
        info = self.info
        steps = {
            "detected": info.detected_us,
            "fenced": info.fenced_us,
            "taken over": info.opened_us,
            "all readable": info.readable_us,
            "all restored": info.restored_us,
        }
        parts = [f"{what} {_seconds(self.since_kill_s(at_us))}" for what, at_us in steps.items()]
        if self.stall_s is not None:
            parts.insert(3, f"longest without acknowledgement {_seconds(self.stall_s)}")
        rate = "" if self.gb_per_s is None else f", {self.gb_per_s:.3f} GB/s"
        return (
            f"broker {info.broker_id} ({info.cause}; {info.phase}) to brokers {sorted(info.owner_ids)}: killed 0.000 s,"
            f" {', '.join(parts)}; {info.streamlets_total} streamlets, {info.bytes_recovered / 1e6:.2f} MB{rate}"
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
