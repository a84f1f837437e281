"""Lose and empty brokers whose logs contain chunks of a hostile writer.

Ordinary writers fill streams of each durability, with one and two replicas. Beside them a hostile client sends every
kind of chunk of `hostile_chunks` to the same streamlets, before a broker is lost, meanwhile, and afterwards. Half of
the clusters refuse such chunks as usual; in the others all of them get into the log (`unchecked`), as from an older
version: their brokers lack only the checks of incoming chunks, and restarted brokers have these, too.

    kill           the broker's process ends, and comes back only after others have its streamlets
    memory         its host crashed and is back: data that was only in memory is gone
    drain          kera cluster drain, repeated until the broker is drained; then it goes, with its memory
    drain --wait   the same, and the command ends when the broker is drained

After each, another broker is killed: recovered or moved data is recovered once more.

Promised, and checked with a separate reader that opens no hostile chunk: every acknowledged record is there, once, in
its writer's order, at the ordinal and place where it was acknowledged; ordinals have no gap; recoveries and drains end;
and ordinary consumers that skip unreadable chunks see the same records. At level ``leader`` no request is in flight
when a broker is lost, since that level promises nothing then, and readers get an error about possible loss. Also
checked: some hostile chunks were taken and some refused, and the log does or does not have chunks that brokers refuse.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from kera.client import Client, Position, StreamDescription
from kera.core.base.ids import EARLIEST
from kera.core.errors import CorruptChunk, DataLost, KeraError
from kera.core.format.chunk import HEADER_BYTES, ChunkHeader, iterate_chunks, verify_chunk
from kera.core.format.payload import open_payload
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.wire import error_from_message
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2, coordinator_pb2
from tests.chaos.hostile_chunks import FOREIGN, KINDS, Kind, Target, impersonating
from tests.chaos.running import Program, Run
from tests.chaos.unchecked import UncheckedCluster
from tests.chaos.verdict import Wrong
from tests.integration.control_support import (
    WRITER_RECORDS,
    Writer,
    broker_id_of,
    broker_name,
    connect,
    control_cluster,
    now_us,
    settle,
    streamlets_of,
    until_recovered,
    until_registered,
    until_safe,
    writer,
)
from tests.integration.support import number_of, until_found

LEVELS = ("leader", "replicated", "persisted")
REPLICATIONS = (1, 2)
EVENTS = ("kill", "memory", "drain", "drain --wait")
STREAMLETS, ENTRIES = 3, 2
"""Each broker has a streamlet."""
PAUSE_S = 0.05
"""Time between two records of a writer to a streamlet."""
END_S_MAX = 60.0
"""A recovery or drain of this little data that takes longer counts as stuck."""
REQUEST_TIMEOUT_S = 5.0
EntryKey = tuple[int, int]
"""Streamlet and entry."""


# -- contents of a log -------------------------------------------------------------------------------------------


class Stored(NamedTuple):
    """A chunk, and its place."""

    position: Position
    header: ChunkHeader
    data: bytes


class Channels:
    """Connections to brokers, by address."""

    def __init__(self) -> None:
        self._open: dict[str, FrameChannel] = {}

    async def to(self, address: str) -> Channel:
        """An open connection, or a new one. Raises `KeraError`."""
        channel = self._open.get(address)
        if channel is None or channel.closed:
            channel = self._open[address] = await FrameChannel.connect_tcp(address, timeout_s=REQUEST_TIMEOUT_S)
        return channel

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._open.values():
            await channel.close()


async def read_entry(client: Client, channels: Channels, name: str, which: EntryKey) -> list[Stored]:
    """All chunks of an entry as bytes, hostile ones too, from their current brokers. Raises `Wrong` for a loss."""
    streamlet, entry = which
    found: list[Stored] = []
    at = EARLIEST
    while True:
        stream = await client.admin.describe_stream(name)
        assignment = stream.assignments[streamlet]
        broker = stream.brokers[assignment.broker_at(at)]
        request = broker_pb2.MultiReadChunksRequest()
        start = request.ranges.add().start
        start.stream_id, start.streamlet_id, start.entry = stream.stream_id, streamlet, entry
        start.group_id, start.segment_id, start.position = at
        try:
            channel = await channels.to(broker.frames_address)
            reply = await channel.submit(api.MULTI_READ_CHUNKS, request, timeout_s=REQUEST_TIMEOUT_S)
            (result,) = reply.message.results
            if result.HasField("error"):
                raise error_from_message(result.error)
        except DataLost as error:
            if stream.config.durability != "leader":
                raise Wrong(f"{name}/{which} cannot be read from {at} on: {error!r}") from error
            at = Position(*error.attributes["available_from"])  # possible loss; ordinals show if records are missing
            continue
        except KeraError as error:
            if not error.retriable:
                raise Wrong(f"{name}/{which} cannot be read from {at} on: {error!r}") from error
            await asyncio.sleep(0.05)
            continue
        data = b"".join(map(bytes, reply.bulk))
        for header, offset in iterate_chunks(data):
            verify_chunk(data, offset)
            key = (header.group_id, header.segment_id)
            begin = found[-1].position.offset + found[-1].header.chunk_bytes if found else 0
            position = Position(*key, begin if found and found[-1].position[:2] == key else 0)
            found.append(Stored(position, header, data[offset : offset + header.chunk_bytes]))
        following = Position(result.next.group_id, result.next.segment_id, result.next.position)
        if not data and following == at and broker.broker_id == assignment.broker_id:
            return found
        at = following


@dataclass
class Seen:
    """The contents of a stream that a check has found."""

    records: int = 0
    """Records of ordinary writers."""
    foreign: int = 0
    """Hostile chunks."""
    empty: int = 0
    """Hostile chunks that claim to have no records."""
    unreadable: int = 0
    """Hostile chunks that no reader opens."""


async def check_stream(client: Client, channels: Channels, name: str, writers: Sequence[Writer]) -> Seen:
    """Check the promises for a stream; its writers must have no request in flight. Raises `Wrong`."""
    seen = Seen()
    stream = await client.describe(name)
    places: dict[EntryKey, list[tuple[int, int, Position]]] = {}
    """By writer and streamlet: the entry, the ordinal and the place of each record, in the order of the log."""
    for which in ((streamlet, entry) for streamlet in range(STREAMLETS) for entry in range(ENTRIES)):
        due = 0
        for position, header, data in await read_entry(client, channels, name, which):
            if header.first_record != due:
                raise Wrong(f"{name}/{which}: ordinal {header.first_record} is at {position}, {due} was due")
            due += header.record_count
            values = _ordinary(stream, header, data, seen)
            for index, value in enumerate(values):
                source, rest = divmod(number_of(value), WRITER_RECORDS)
                at, streamlet = divmod(rest, STREAMLETS)
                known = places.setdefault((source, streamlet), [])
                if streamlet != which[0] or at != len(known):
                    raise Wrong(
                        f"{name}/{which}: record {at} of writer {source} is at {position}, {len(known)} was due"
                    )
                known.append((which[1], header.first_record + index, position))
            seen.records += len(values)
    for each in writers:
        for streamlet, deliveries in enumerate(each.deliveries):
            known = places.get((each.number, streamlet), [])
            if len(known) != len(deliveries):
                raise Wrong(f"{name}/{streamlet}: {len(deliveries)} were acknowledged, {len(known)} are there")
            for at, (delivery, place) in enumerate(zip(deliveries, known, strict=True)):
                told = (delivery.entry.entry, delivery.record, delivery.position)
                # The answer to a repeated chunk that is no longer in memory may name no place.
                if delivery.position is not None and place != told:
                    raise Wrong(f"{name}/{streamlet}: record {at} is at {place}, acknowledged was {told}")
    if await _consumed(client, name) != seen.records:
        raise Wrong(f"{name}: a consumer was given other records than the {seen.records} that are there")
    return seen


def _ordinary(stream: StreamDescription, header: ChunkHeader, data: bytes, seen: Seen) -> list[bytes]:
    """The values of a chunk of an ordinary writer; any other chunk is counted instead."""
    payload = data[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    try:
        batch = open_payload(payload, stream.schema, header)
        values: list[bytes] = batch.column("value").to_pylist()
    except CorruptChunk:
        seen.unreadable += 1
        values = []
    if values and all(value and value != FOREIGN and value[:1].isdigit() for value in values):
        return values
    seen.foreign += 1
    seen.empty += not header.record_count
    return []


async def _consumed(client: Client, name: str) -> int:
    """The number of ordinary writers' records that a consumer receives that skips unreadable chunks."""
    count = 0
    start: Any = "earliest"
    async with asyncio.timeout(END_S_MAX):
        while True:
            consumer = client.consumer(name, start=start, end="latest", corrupt_chunks="skip")
            try:
                async with consumer:
                    async for chunk in consumer.batches():
                        values = chunk.batch.column("value").to_pylist()
                        count += sum(bool(value) and value != FOREIGN and value[:1].isdigit() for value in values)
                return count
            except DataLost as error:  # at level leader: skip the possible loss
                start = consumer.positions()
                available = Position(*error.attributes["available_from"])
                start[error.attributes["streamlet_id"]][error.attributes["entry"]] = available


# -- the hostile client ------------------------------------------------------------------------------------------


class Hostile:
    """Sends chunks of all kinds to streams, one kind after the other."""

    def __init__(self, client: Client, channels: Channels, streams: Sequence[str], kinds: Sequence[Kind]) -> None:
        self._client = client
        self._channels = channels
        self._streams = streams
        self._kinds = kinds
        self.spared: set[str] = set()
        """Streams that get no hostile chunks now."""
        self.sent: Counter[str] = Counter()
        """Chunks sent, by stream."""
        self.taken: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.defects: list[str] = []
        """Errors that brokers report as internal defects."""

    async def round(self) -> None:
        """Send each kind once to each stream, to one streamlet after the other."""
        for number, kind in enumerate(self._kinds):
            for at, name in enumerate(self._streams):
                if name in self.spared:
                    continue
                streamlet = (number + at) % STREAMLETS
                with contextlib.suppress(KeraError):  # the broker may be lost: others get the kinds that follow
                    await self._send(name, streamlet, kind)

    async def go_on(self) -> None:
        """Repeat rounds until cancelled."""
        while True:
            await self.round()
            await asyncio.sleep(0)  # if all streams are spared

    async def impersonate(self) -> None:
        """Send old and future chunks under the ids of the ordinary writers."""
        for name in self._streams:
            for streamlet in range(STREAMLETS):
                for entry in range(ENTRIES):
                    chunks = await read_entry(self._client, self._channels, name, (streamlet, entry))
                    stream = await self._client.describe(name)
                    ordinary = [one.header for one in chunks if _ordinary(stream, one.header, one.data, Seen())]
                    for last in ordinary[-1:]:
                        target = Target(stream.stream_id, streamlet, stream.schema_id)
                        theirs = (last.producer_id, last.producer_epoch, last.sequence)
                        await self._submit(name, streamlet, impersonating(target, *theirs))

    async def _send(self, name: str, streamlet: int, kind: Kind) -> None:
        answer = await self._client._cluster.ask(api.INIT_PRODUCER, coordinator_pb2.InitProducerRequest())
        stream = await self._client.describe(name)
        target = Target(stream.stream_id, streamlet, stream.schema_id)
        await self._submit(name, streamlet, kind.build(target, answer.producer_id))

    async def _submit(self, name: str, streamlet: int, chunks: list[bytes]) -> None:
        """Send the chunks of one kind in one request: the later ones show what an earlier one breaks."""
        stream = await self._client.admin.describe_stream(name)
        broker = stream.brokers[stream.assignments[streamlet].broker_id]
        channel = await self._channels.to(broker.frames_address)
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
        reply = await channel.submit(api.MULTI_WRITE_CHUNKS, request, chunks, timeout_s=REQUEST_TIMEOUT_S)
        self.sent[name] += len(chunks)
        for status in reply.message.statuses:
            self.outcomes[status.error.code or "taken"] += 1
            self.taken[name] += not status.error.code
            if status.error.code == "internal":
                self.defects.append(status.error.message)


# -- a cluster ---------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the table."""

    event: str
    in_log: bool
    replication: int
    level: str
    acknowledged: int
    sent: int
    taken: int
    seen: Seen
    ended_s: tuple[float, ...]
    """Durations of the recoveries or drains."""

    def check(self) -> None:
        """Check that hostile chunks were sent, and that the log has refusable ones only if wanted. Raises `Wrong`."""
        if not self.sent > self.taken > 0 or bool(self.seen.empty) is not self.in_log or not self.acknowledged:
            raise Wrong(f"this has shown nothing of hostile chunks: {self}")

    def __str__(self) -> str:
        where = "in the log" if self.in_log else "refused"
        took = " + ".join(f"{each:.1f}" for each in self.ended_s)
        return (
            f"| {self.event} | {where} | {self.replication} | {self.level} | {self.acknowledged} | {self.sent} |"
            f" {self.taken} | {self.seen.foreign} ({self.seen.empty}, {self.seen.unreadable}) | {took} |"
        )


HEAD = (
    "| event | hostile chunks | R | level | acknowledged records, all found once | hostile sent | taken |"
    " in the log at the end (empty, unreadable) | ended after s |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass
class Loaded:
    """A stream and its writer."""

    name: str
    replication: int
    level: str
    writer: Writer


class Round:
    """One cluster, from beginning to end."""

    def __init__(self, cluster: LocalCluster, client: Client, hostile: Hostile, streams: Sequence[Loaded]) -> None:
        self.cluster = cluster
        self.client = client
        self.hostile = hostile
        self.streams = streams
        self.ended_s: list[float] = []

    async def lose(self, event: Callable[[str], Awaitable[None]]) -> None:
        """Do `event` to a broker that owns a part of each stream, under load and attack."""
        await self._quiet()
        name = await self._owner()
        self.hostile.spared = {stream.name for stream in self.streams if stream.level == "leader"}
        self._load(lambda stream: stream.level != "leader")
        await self._go_on(lambda stream: stream.level != "leader")
        attack = asyncio.create_task(self.hostile.go_on())
        try:
            begun_s = time.monotonic()
            await event(name)
            self.ended_s.append(time.monotonic() - begun_s)
            self.hostile.spared = set()
            self._load(lambda _: True)
            await self._go_on(lambda _: True)
        finally:
            attack.cancel()
            await asyncio.wait([attack])
        if not attack.cancelled():
            attack.result()

    def _load(self, which: Callable[[Loaded], bool]) -> None:
        for stream in self.streams:
            stream.writer.paused = not which(stream)

    async def _go_on(self, which: Callable[[Loaded], bool]) -> None:
        async with asyncio.timeout(END_S_MAX):
            await asyncio.gather(*(stream.writer.go_on() for stream in self.streams if which(stream)))

    async def _quiet(self) -> None:
        """Wait until all acknowledged records are as durable as the level of their stream wants."""
        await settle([stream.writer for stream in self.streams], END_S_MAX)
        await until_safe(self.cluster, END_S_MAX)

    async def _owner(self) -> str:
        """The broker that owns the most streamlets."""
        owned: Counter[int] = Counter()
        for stream in self.streams:
            description = await self.client.admin.describe_stream(stream.name)
            owned.update(assignment.broker_id for assignment in description.assignments.values())
        return broker_name(self.cluster, owned.most_common(1)[0][0])

    async def kill(self, name: str) -> None:
        """Kill a broker, and wait until others have its streamlets."""
        begun_us = now_us()
        await self.cluster.kill(name)
        await until_recovered(self.client, [broker_id_of(self.cluster, name)], begun_us, END_S_MAX)

    async def memory(self, name: str) -> None:
        """Kill a broker, restart it without its memory, and wait until its streamlets are recovered."""
        begun_us = now_us()
        await self.cluster.kill(name)
        Path(self.cluster.ready[name]["arena_path"]).unlink()
        await self.cluster.restart(name)
        await until_recovered(self.client, [broker_id_of(self.cluster, name)], begun_us, END_S_MAX)

    async def drain(self, name: str, *options: str) -> None:
        """Drain a broker, then kill it, and delete its memory."""

        async def drained() -> bool:
            return "is drained" in await self._kera("drain", name, *options)

        await until_found(drained, END_S_MAX)
        await self.cluster.kill(name)
        Path(self.cluster.ready[name]["arena_path"]).unlink()

    async def _kera(self, *arguments: str) -> str:
        what, name, *options = arguments
        member = f"broker-{broker_id_of(self.cluster, name)}"
        command = [sys.executable, "-m", "kera.cli", "cluster", what, member, *options]
        command += ["--bootstrap", self.cluster.bootstrap]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=END_S_MAX, check=False
        )
        if done.returncode:
            raise Wrong(f"{' '.join(command[3:])} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    async def all_back(self) -> None:
        """Restart brokers that do not run; from now on they check incoming chunks."""
        if isinstance(self.cluster, UncheckedCluster):
            self.cluster.checked = True
        for name in self.cluster.ready:
            if name not in self.cluster.processes:
                await self.cluster.restart(name)
                await until_registered(self.client, broker_id_of(self.cluster, name))
                if name.startswith("broker"):
                    await self._kera("drain", name, "--undo")

    async def check(self, channels: Channels) -> list[Seen]:
        """Check all streams."""
        await self._quiet()
        if self.hostile.defects:
            raise Wrong(f"brokers call it a defect: {self.hostile.defects[:3]}")
        for stream in self.streams:
            for broker_id in [broker_id_of(self.cluster, name) for name in self.cluster.processes if "broker" in name]:
                await streamlets_of(self.client, stream.name, broker_id)  # the coordinator answers
        return [await check_stream(self.client, channels, each.name, [each.writer]) for each in self.streams]


@contextlib.asynccontextmanager
async def loaded(client: Client, replications: Sequence[int], levels: Sequence[str]) -> AsyncIterator[list[Loaded]]:
    """Create streams of all these kinds, each with a writer."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for replication in replications:
            for level in levels:
                name = f"{level}-{replication}"
                await client.admin.create_stream(
                    name,
                    streamlets=STREAMLETS,
                    entries=ENTRIES,
                    group_segments=2,
                    replication=replication,
                    durability=level,
                    virtual_logs=1 + replication % 2,
                )
                load = await stack.enter_async_context(writer(client, name, pause_s=PAUSE_S))
                found.append(Loaded(name, replication, level, load))
        yield found


async def one(
    event: str,
    directory: Path,
    *,
    in_log: bool,
    replications: Sequence[int] = REPLICATIONS,
    levels: Sequence[str] = LEVELS,
    kinds: Sequence[Kind] = KINDS,
) -> list[Row]:
    """Run an event on one cluster; returns a row for each stream. Raises `Wrong`."""
    channels = Channels()
    kind = UncheckedCluster if in_log else LocalCluster
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(channels.close)
        cluster = await stack.enter_async_context(control_cluster(directory, kind=kind))
        client = await stack.enter_async_context(await connect(cluster))
        streams = await stack.enter_async_context(loaded(client, replications, levels))
        hostile = Hostile(client, channels, [each.name for each in streams], kinds)
        this = Round(cluster, client, hostile, streams)
        await asyncio.gather(*(each.writer.go_on() for each in streams))
        await hostile.round()
        await hostile.impersonate()
        name, _, option = event.partition(" ")
        options = [option] if option else []
        await this.lose(lambda broker: getattr(this, name)(broker, *options))
        await this.check(channels)
        await this.all_back()
        await this.lose(this.kill)
        seen = await this.check(channels)
        rows = [
            Row(
                event,
                in_log,
                each.replication,
                each.level,
                each.writer.acknowledged,
                hostile.sent[each.name],
                hostile.taken[each.name],
                one,
                tuple(this.ended_s),
            )
            for each, one in zip(streams, seen, strict=True)
        ]
        for row in rows:
            row.check()
        return rows


async def work(run: Run) -> None:
    """Run all combinations, and print a table; failures come in a group, after all clusters."""
    arguments, failures = run.arguments, list[Exception]()
    print(HEAD, flush=True)
    for in_log, event in product((False, True), arguments.kinds):
        try:
            with run.cluster_folder() as folder:
                rows = await one(
                    event, folder, in_log=in_log, replications=arguments.replication, levels=arguments.levels
                )
        except Exception as error:  # noqa: BLE001 - every error is part of the verdict
            print(f"FAILED: {event}, {'in the log' if in_log else 'refused'}: {error!r}", flush=True)
            failures.append(error)
        else:
            print(*rows, sep="\n", flush=True)
            run.seen += Counter({"clusters": 1, "records": sum(row.acknowledged for row in rows)})
    if failures:
        raise ExceptionGroup("clusters", failures)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this program."""
    parser.add_argument("--replication", type=int, nargs="+", choices=(1, 2, 3), default=list(REPLICATIONS))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))


HOSTILE = Program(
    __doc__ or "",
    "every acknowledged record is there, once, where it was",
    work,
    kinds=EVENTS,
    options=options,
    seeded=False,
)
