"""Shared by tests of replication: clusters with backups, a load that keeps the outcome of each record, and recovery."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kera.broker.log.scan import address_of
from kera.client import Client, Delivery, Producer
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId
from kera.core.base.settings import KIB, MIB
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, read_header
from kera.core.format.header_table import as_headers
from kera.core.format.payload import open_payload
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.local.cluster import LocalCluster, RunningCluster
from kera.v1 import backup_pb2, common_pb2
from tests.chaos.verdict import Wrong
from tests.integration.support import BROKER, TIMEOUT_S, Members, arena_of, number_of, until, value_of
from tests.replica_reading import ReplicasRead, read_replicas

SEGMENT_BYTES = 64 * KIB
BROKER_ID = 1
QUIET_POLLS = 8


@contextlib.contextmanager
def replicated_cluster(
    data_dir: Path,
    backups: int,
    *,
    backup_memory_bytes: int = 16 * MIB,
    arena_bytes: int = 32 * MIB,
    segment_bytes: int = SEGMENT_BYTES,
    **settings: object,
) -> Iterator[RunningCluster]:
    """A cluster of one broker and some backups that keeps its data; shared memory is left clean."""
    settings = {"metrics_port": 0, "repair_delay_ms": 1_000, **settings}
    arena: Path | None = None
    try:
        with LocalCluster.running(
            data_dir=data_dir,
            backups=backups,
            arena_bytes=arena_bytes,
            backup_memory_bytes=backup_memory_bytes,
            segment_bytes=segment_bytes,
            coordinator_settings={"heartbeat_interval_ms": 200, "heartbeats_missed_max": 40},
            broker_settings=settings,
        ) as running:
            try:
                yield running
            finally:
                arena = arena_of(running)
    finally:
        if arena is not None:
            arena.unlink(missing_ok=True)  # the file of a killed broker


def backup_names(cluster: Members) -> list[str]:
    """All backups, also those that do not run."""
    return [name for name in cluster.ready if name.startswith("backup")]


def backup_name(cluster: Members, backup_id: int) -> str:
    """The name of the backup with this id."""
    return next(name for name in backup_names(cluster) if cluster.ready[name]["backup_id"] == backup_id)


def backup_infos(cluster: RunningCluster, names: Iterable[str]) -> list[common_pb2.BackupInfo]:
    """The addresses of backups."""
    ready = [cluster.ready[name] for name in names]
    return [common_pb2.BackupInfo(backup_id=each["backup_id"], frames_address=each["frames_address"]) for each in ready]


async def in_threads(function: object, names: Iterable[str]) -> None:
    """Call one of the cluster's blocking methods for all of `names` at once."""
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(asyncio.to_thread(function, name) for name in names))  # type: ignore[arg-type]


def samples(cluster: Members, daemon: str = BROKER) -> dict[str, float]:
    """The metrics of a daemon: by name without ``kera_broker_`` or ``kera_backup_``, with labels."""
    url = f"http://{cluster.ready[daemon]['metrics_address']}/metrics"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    prefix = f"kera_{daemon.partition('-')[0]}_"
    pairs = (line.removeprefix(prefix).rpartition(" ") for line in lines if line.startswith(prefix))
    return {name: float(value) for name, _, value in pairs}


def under_replicated(cluster: RunningCluster) -> dict[str, float]:
    """The broker's gauges of things with too few replicas; empty if there are none."""
    names = ("virtual_segments_deficient", "replication_backlog", "replication_lag_bytes")
    return {name: value for name, value in samples(cluster).items() if name.startswith(names) and value}


async def until_replicated(cluster: RunningCluster, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until everything has its replicas; nothing may be written meanwhile. Raises `Wrong` after the time-out."""
    try:
        await until(lambda: not under_replicated(cluster), timeout_s)
    except TimeoutError:
        raise Wrong(f"under-replicated for {timeout_s} s: {under_replicated(cluster)}") from None


class Writing:
    """Sends records 0, 1, … to the streamlets of a stream in turn, and keeps the outcome of each."""

    def __init__(
        self, producer: Producer, stream: StreamDescription, *, pause_s: float = 0.005, burst: int = 5
    ) -> None:
        """`burst`: this many records, then a pause."""
        self.stream = stream
        self.acknowledged: list[tuple[int, Delivery]] = []
        """Numbers and deliveries, in the order of arrival."""
        self.errors: list[BaseException] = []
        self.sent = 0
        self.paused = False
        self.stopping = False
        self._producer = producer
        self._pause_s = pause_s
        self._burst = burst
        self._waiting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Write until `stopping`; then wait for the records under way."""
        while not self.stopping:
            if self.paused:
                await asyncio.sleep(self._pause_s)
                continue
            for _ in range(self._burst):
                streamlet = self.sent % self.stream.config.streamlets
                pending = self._producer.send(self.stream.name, value_of(self.sent), streamlet=streamlet)
                task = asyncio.create_task(self._delivered(self.sent, pending))
                self._waiting.add(task)
                task.add_done_callback(self._waiting.discard)
                self.sent += 1
            await self._producer.drain()
            await asyncio.sleep(self._pause_s)
        if self._waiting:
            await asyncio.wait(self._waiting)

    async def _delivered(self, number: int, pending: object) -> None:
        try:
            self.acknowledged.append((number, await pending))  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - the test says what it expects
            self.errors.append(error)

    @property
    def settled(self) -> bool:
        """Whether everything that was sent was acknowledged, or failed."""
        return len(self.acknowledged) + len(self.errors) == self.sent


@contextlib.asynccontextmanager
async def writing(
    client: Client,
    stream: str,
    *,
    pause_s: float = 0.005,
    burst: int = 5,
    chunk_bytes_max: int = 4 * KIB,
    **settings: Any,
) -> AsyncIterator[Writing]:
    """A producer that writes in the background; everything is delivered when the block ends without an error."""
    async with client.producer(chunk_bytes_max=chunk_bytes_max, **settings) as producer:
        description = await producer.prepare(stream)
        running = Writing(producer, description, pause_s=pause_s, burst=burst)
        task = asyncio.create_task(running.run())
        try:
            yield running
            running.stopping = True
            async with asyncio.timeout(TIMEOUT_S):
                await task
        finally:
            task.cancel()
            await asyncio.wait([task])


@dataclass
class Found:
    """The recovered chunks in order, and their bytes."""

    result: ReplicasRead
    data: dict[ChunkHeader, bytes] = field(default_factory=dict)

    def chunks(self) -> Iterator[tuple[ChunkHeader, int | None]]:
        """All chunks that are part of the log, and their positions."""
        for run in self.result.runs:
            at = run.start
            for chunk in as_headers(run.chunks):
                yield chunk, at
                at = None if at is None else at + chunk.chunk_bytes


async def recover(cluster: RunningCluster, names: Sequence[str], broker_id: int = BROKER_ID) -> Found:
    """Read everything that these backups have of the broker."""
    data: dict[ChunkHeader, bytes] = {}

    async def take(chunk: ChunkHeader, view: memoryview) -> None:
        data[chunk] = bytes(view)

    result = await read_replicas(backup_infos(cluster, names), broker_id, take=take)
    return Found(result, data)


def check_recovered(found: Found, loads: Iterable[Writing]) -> int:
    """Check that every acknowledged record is there once, at the acknowledged place; returns the number of records.

    Raises `Wrong`, with the missing records.
    """
    result = found.result
    for name in ("conflicts", "gaps", "unread", "disagreeing", "backups_failed"):
        if getattr(result, name):
            raise Wrong(f"recovery tells of {name}: {getattr(result, name)}")
    loads = list(loads)
    schemas = {load.stream.stream_id: load.stream.schema for load in loads}
    numbers: dict[tuple[EntryId, int], int] = {}
    places: dict[tuple[EntryId, int], tuple[int, int, int | None]] = {}
    for chunk, position in found.chunks():
        if chunk.stream_id not in schemas:
            continue
        data = found.data[chunk]
        header = read_header(data)
        payload = memoryview(data)[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        batch = open_payload(payload, schemas[chunk.stream_id], header)
        for index, value in enumerate(batch.column("value").to_pylist()):
            key = EntryId(*address_of(chunk)[:3]), chunk.first_record + index
            if key in numbers:
                raise Wrong(f"record {key} is there twice")
            numbers[key] = number_of(value)
            places[key] = chunk.group_id, chunk.segment_id, position
    for load in loads:
        _check_load(load, numbers, places)
    return sum(len(load.acknowledged) for load in loads)


def _check_load(
    load: Writing,
    numbers: dict[tuple[EntryId, int], int],
    places: dict[tuple[EntryId, int], tuple[int, int, int | None]],
) -> None:
    missing, other, moved = [], [], []
    here = {(entry, number) for (entry, _), number in numbers.items()}
    for number, delivery in load.acknowledged:
        key = delivery.entry, delivery.record
        if delivery.position is None:  # a repeat of a record that is only on the broker's disk has no known place
            if (delivery.entry, number) not in here:
                missing.append((number, delivery))
        elif key not in numbers:
            missing.append((number, delivery))
        elif numbers[key] != number:
            other.append((number, delivery, numbers[key]))
        elif tuple(delivery.position) != places[key]:
            moved.append((number, delivery, places[key]))
    for what, wrong in (("not there", missing), ("another record there", other), ("elsewhere", moved)):
        if wrong:
            raise Wrong(f"{load.stream.name}: {len(wrong)} acknowledged records are {what}: {wrong[:3]} … {wrong[-1]}")
    of_entry: dict[tuple[EntryId, int], int] = {}
    for (entry, ordinal), number in numbers.items():
        if entry.stream_id == load.stream.stream_id:
            before = of_entry.setdefault((entry, number), ordinal)
            if before != ordinal:
                raise Wrong(f"{load.stream.name}: record {number} is at ordinals {before} and {ordinal} of {entry}")


async def list_replicas(
    cluster: RunningCluster, name: str, broker_id: int = BROKER_ID
) -> dict[int, backup_pb2.ReplicaInfo]:
    """The replicas that one backup has of the broker, by virtual segment."""
    channel = await FrameChannel.connect_tcp(cluster.ready[name]["frames_address"], timeout_s=TIMEOUT_S)
    try:
        request = backup_pb2.ListReplicasRequest(broker_id=broker_id)
        found: dict[int, backup_pb2.ReplicaInfo] = {}
        while True:
            message = (await channel.submit(api.LIST_REPLICAS, request, timeout_s=TIMEOUT_S)).message
            found |= {info.virtual_segment_id: info for info in message.replicas}
            if message.complete:
                return found
            request.after_virtual_segment_id = message.replicas[-1].virtual_segment_id
    finally:
        await channel.close()


async def until_quiet(cluster: RunningCluster, names: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
    """Wait until the content of backups no longer changes: a broker frees replicas in the background."""
    unmoved, last = 0, None
    async with asyncio.timeout(timeout_s):
        while unmoved < QUIET_POLLS:
            await asyncio.sleep(0.05)
            now = [await list_replicas(cluster, name) for name in names]
            unmoved = unmoved + 1 if now == last else 0
            last = now


async def _contents(cluster: RunningCluster, name: str) -> dict[int, tuple[backup_pb2.ReplicaInfo, bytes]]:
    """The bytes of all replicas of one backup."""
    infos = await list_replicas(cluster, name)
    channel = await FrameChannel.connect_tcp(cluster.ready[name]["frames_address"], timeout_s=TIMEOUT_S)
    contents = {}
    try:
        for number, info in infos.items():
            data = bytearray()
            while len(data) < info.length:
                request = backup_pb2.ReadReplicaRequest(
                    broker_id=BROKER_ID, virtual_segment_id=number, offset=len(data), bytes_max=MIB
                )
                reply = await channel.submit(api.READ_REPLICA, request, timeout_s=TIMEOUT_S)
                if reply.message.replica.chunks_damaged or not reply.bulk:
                    raise Wrong(f"{name} has a damaged replica: {reply.message}")
                data += b"".join(reply.bulk)
            contents[number] = info, bytes(data)
    finally:
        await channel.close()
    return contents


async def check_agreement(cluster: RunningCluster, names: Iterable[str]) -> int:
    """Check that replicas of one virtual segment agree as far as they go; returns how many were compared.

    Nothing may be written meanwhile. Raises `Wrong`.
    """
    first: dict[int, tuple[str, backup_pb2.ReplicaInfo, bytes]] = {}
    compared = 0
    for name in names:
        for number, (info, data) in (await _contents(cluster, name)).items():
            other, other_info, other_data = first.setdefault(number, (name, info, data))
            common = min(len(data), len(other_data))
            if data[:common] != other_data[:common]:
                at = next(at for at in range(common) if data[at] != other_data[at])
                raise Wrong(f"virtual segment {number:#x} differs at {at}: {name} {info}, {other} {other_info}")
            if info.closed and other_info.closed and info.length != other_info.length:
                raise Wrong(f"virtual segment {number:#x} was closed differently: {name} {info}, {other} {other_info}")
            if info.closed:
                first[number] = name, info, data
            compared += name != other
    return compared


def check_files(data_dir: Path) -> dict[str, Any]:
    """The report of ``kera verify`` on the directories of a stopped cluster. Raises `Wrong` if it has damage."""
    directories = [str(path) for path in sorted(data_dir.iterdir()) if path.name.startswith(("broker-", "backup-"))]
    argv = [sys.executable, "-m", "kera.cli", "verify", "--json", *directories]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False)
    document: dict[str, Any] = json.loads(ended.stdout) if ended.stdout else {"findings": [ended.stderr]}
    if ended.returncode:
        raise Wrong(f"kera verify ended with {ended.returncode}: {document['findings']}")
    return document
