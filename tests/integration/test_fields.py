"""A foreign client sets each field of each request, and of a chunk's header, to whatever it likes.

Beside it ordinary clients write, read and share a stream, to which it writes as well. Whatever the outcome of the
requests: the records, positions and progress of others do not change, no daemon ends or stops answering, and after a
broker is lost everything that was acknowledged is there. The requests are made from the message types
(`field_mutants`), so a new field is tested automatically; a new method has to be named in `field_cases`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf.message import Message

from kera.client import Client
from kera.core.errors import KeraError
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import Channel, Method, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.chaos.verdict import Wrong
from tests.integration import field_mutants
from tests.integration.control_support import (
    Writer,
    broker_id_of,
    broker_names,
    check_log,
    connect,
    control_cluster,
    now_us,
    settle,
    until_recovered,
    writer,
)
from tests.integration.field_cases import CASES, Case, Theirs

pytestmark = pytest.mark.timeout(600)

ANSWER_S_MAX = 30.0
"""A small request of another client that takes longer counts as unanswered."""
REQUEST_TIMEOUT_S = 10.0
VICTIM, HOSTILE = "ordinary", "foreign"
FOREIGN = b"of somebody"
"""The value of the foreign client's records in the shared stream."""
STREAMLETS = 2


def leading_epoch(cluster: LocalCluster) -> int:
    """The epoch of the leading coordinator, from its log."""
    lines = (cluster.log_dir / "coordinator.log").read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return next(int(entry["epoch"]) for entry in reversed(logged) if entry["event"] == "leading")


def theirs_of(
    info: common_pb2.StreamInfo, brokers: dict[int, common_pb2.BrokerInfo], name: str, coordinator_epoch: int
) -> Theirs:
    return Theirs(
        stream=info,
        consumer_group=f"{name}-group",
        member=f"{name}-member",
        producer=f"{name}-producer",
        cursors=tuple(
            common_pb2.Cursor(stream_id=info.stream_id, streamlet_id=number, group_id=1, segment_id=1)
            for number in range(STREAMLETS)
        ),
        broker=brokers[info.assignments[0].broker_id],
        coordinator_epoch=coordinator_epoch,
    )


@dataclass
class Foreign:
    """The client that sets the fields."""

    cluster: LocalCluster
    coordinator: GrpcChannel
    brokers: dict[int, Channel]
    backups: list[Channel]
    hostile: Theirs
    victim: Theirs
    outcomes: Counter[str]
    defects: list[str]
    """Errors that daemons themselves call defects."""

    def channels(self, method: Method[Any, Any]) -> list[Channel]:
        if method.service in {api.COORDINATOR, api.CONSUMER_GROUPS, api.SCHEMA_REGISTRY, api.LATENCY}:
            return [self.coordinator]
        return list(self.brokers.values()) if method.service == api.BROKER else self.backups

    async def send(
        self, channel: Channel, method: Method[Any, Any], message: Message, bulk: tuple[bytes, ...] = ()
    ) -> None:
        """Send a request and count its outcome; a refusal has a code."""
        try:
            await channel.submit(method, message, bulk, timeout_s=REQUEST_TIMEOUT_S)
        except KeraError as error:
            self.outcomes[error.code] += 1
            if error.code == "internal" and "code" not in error.attributes:  # a daemon's own errors have that name
                self.defects.append(f"{method.name}: {error.message}")
        else:
            self.outcomes["answered"] += 1


@contextlib.asynccontextmanager
async def foreign_client(cluster: LocalCluster) -> AsyncIterator[Foreign]:
    async with contextlib.AsyncExitStack() as stack:
        coordinator = GrpcChannel(cluster.bootstrap)
        stack.push_async_callback(coordinator.close)

        async def described(name: str) -> coordinator_pb2.DescribeStreamResponse:
            request = coordinator_pb2.DescribeStreamRequest(name=name)
            return (await coordinator.submit(api.DESCRIBE_STREAM, request, timeout_s=REQUEST_TIMEOUT_S)).message

        async def connected(address: str) -> Channel:
            channel = await FrameChannel.connect_tcp(address, timeout_s=REQUEST_TIMEOUT_S)
            stack.push_async_callback(channel.close)
            return channel

        hostile, victim = await described(HOSTILE), await described(VICTIM)
        epoch = leading_epoch(cluster)
        known = {each.broker_id: each for each in [*hostile.brokers, *victim.brokers]}
        yield Foreign(
            cluster=cluster,
            coordinator=coordinator,
            brokers={number: await connected(each.frames_address) for number, each in known.items()},
            backups=[
                await connected(ready["frames_address"])
                for name, ready in cluster.ready.items()
                if name.startswith("backup")
            ],
            hostile=theirs_of(hostile.stream, known, HOSTILE, epoch),
            victim=theirs_of(victim.stream, known, VICTIM, epoch),
            outcomes=Counter(),
            defects=[],
        )


class Watch:
    """Sends each daemon small requests all the time, over connections of its own, and keeps the longest response
    time.
    """

    def __init__(self, foreign: Foreign) -> None:
        self._foreign = foreign
        self.longest_s: dict[str, float] = {}
        self.doing = ""
        self.during: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with foreign_client(self._foreign.cluster) as own, asyncio.TaskGroup() as tasks:
            victim = own.victim
            asked: list[tuple[str, Channel, Method[Any, Any], Message]] = [
                ("coordinator", own.coordinator, api.GET_STREAM_ID, CASES[api.GET_STREAM_ID].build(victim)),
            ]
            described = broker_pb2.DescribeStreamletsRequest(stream_id=victim.stream.stream_id)
            asked += [
                (f"broker {number}", channel, api.DESCRIBE_STREAMLETS, described)
                for number, channel in own.brokers.items()
            ]
            listed = CASES[api.LIST_REPLICAS].build(victim)
            asked += [(f"backup {at}", channel, api.LIST_REPLICAS, listed) for at, channel in enumerate(own.backups)]
            running = [tasks.create_task(self._ask(*each)) for each in asked]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def _ask(self, name: str, channel: Channel, method: Method[Any, Any], message: Message) -> None:
        while True:
            begun_s = time.monotonic()
            await channel.submit(method, message, timeout_s=2 * ANSWER_S_MAX)
            took_s = time.monotonic() - begun_s
            if took_s > self.longest_s.get(name, 0.0):
                self.longest_s[name], self.during[name] = took_s, self.doing
            await asyncio.sleep(0.005)

    def check(self) -> None:
        for name, took_s in self.longest_s.items():
            if took_s > ANSWER_S_MAX:
                raise Wrong(f"{name} took {took_s:.3f} s for a small request, during {self.during[name]!r}")


def sent(case: Case, hostile: Theirs, victim: Theirs) -> Iterator[tuple[str, Message]]:
    """The requests for a method: the valid one, and each with one field changed."""
    yield "as it should be", case.build(hostile)
    for told, message in field_mutants.messages(case.build(hostile), case.build(victim)):
        path, _, what = told.partition(" ")
        of_rights = any(path == each or path.startswith((f"{each}.", f"{each}[")) for each in case.rights)
        if not (what == "another's" and of_rights):
            yield told, message


def test_each_method_has_a_case() -> None:
    methods = (
        *api.BROKER_METHODS,
        *api.COORDINATOR_METHODS,
        *api.BACKUP_METHODS,
        *api.CONSUMER_GROUPS_METHODS,
        *api.SCHEMA_REGISTRY_METHODS,
        *api.LATENCY_METHODS,
    )
    assert set(CASES) == set(methods)


def chunk_of(theirs: Theirs, streamlet: int, sequence: int, producer_id: int, value: bytes = FOREIGN) -> bytes:
    batch = pa.RecordBatch.from_pylist([{"timestamp": 5, "value": value}] * 3, DEFAULT_SCHEMA)
    return encode_chunk(
        encode_payload(batch),
        record_count=3,
        stream_id=theirs.stream.stream_id,
        streamlet_id=streamlet,
        schema_id=theirs.stream.schemas[-1].schema_id,
        producer_id=producer_id,
        producer_epoch=0,
        sequence=sequence,
        created_us=now_us(),
        min_timestamp_us=5,
        max_timestamp_us=5,
    ).to_bytes()


async def new_producer(foreign: Foreign) -> int:
    request = coordinator_pb2.InitProducerRequest()
    reply = await foreign.coordinator.submit(api.INIT_PRODUCER, request, timeout_s=REQUEST_TIMEOUT_S)
    return int(reply.message.producer_id)


async def send_chunks(foreign: Foreign, watch: Watch) -> int:
    """Send chunks with every header field changed into the others' stream; each from a new producer, so that it is
    accepted.
    """
    victim = foreign.victim
    owner = foreign.brokers[victim.stream.assignments[0].broker_id]
    theirs = chunk_of(foreign.hostile, 1, 4, producer_id=await new_producer(foreign))
    valid = chunk_of(victim, 0, 0, producer_id=0)
    count = 0
    for told, _ in field_mutants.chunks(valid, theirs):
        name = told.split()[0]
        producer_id = await new_producer(foreign)
        first = chunk_of(victim, 0, 0, producer_id)
        if name == "sequence":  # the sequence of a known producer
            request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
            await foreign.send(owner, api.MULTI_WRITE_CHUNKS, request, (first,))
            first = chunk_of(victim, 0, 1, producer_id)
        changed = dict(field_mutants.chunks(first, theirs)).get(told)
        if changed is None:
            continue
        watch.doing = f"MultiWriteChunks: header, {told}"
        for chunks in ((changed,), (first, changed), (changed, changed)):
            request = broker_pb2.MultiWriteChunksRequest(chunk_count=len(chunks))
            await foreign.send(owner, api.MULTI_WRITE_CHUNKS, request, chunks)
            count += 1
    return count


async def send_fields(foreign: Foreign, watch: Watch, *, internal: bool) -> int:
    count = 0
    for method, case in CASES.items():
        if case.internal is not internal:
            continue
        for channel in foreign.channels(method):
            for told, message in sent(case, foreign.hostile, foreign.victim):
                watch.doing = f"{method.name}: {told}"
                bulk: tuple[bytes, ...] = ()
                if method is api.MULTI_WRITE_CHUNKS:
                    bulk = (chunk_of(foreign.hostile, 0, 0, producer_id=77),)
                await foreign.send(channel, method, message, bulk)
                count += 1
    return count


@contextlib.asynccontextmanager
async def ordinary_group(client: Client) -> AsyncIterator[list[tuple[int, int, int]]]:
    """A consumer group of two members that reads the ordinary stream; yields the places of the records, in order."""
    seen: list[tuple[int, int, int]] = []

    async def consume() -> None:
        async with client.group_consumer(f"{VICTIM}-group", VICTIM, start="earliest") as consumer:
            async for chunk in consumer.batches():
                seen.extend(
                    (chunk.entry.streamlet_id, chunk.entry.entry, chunk.header.first_record + at)
                    for at in range(chunk.batch.num_rows)
                )

    tasks = [asyncio.create_task(consume()) for _ in range(2)]
    try:
        yield seen
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def check(client: Client, writers: list[Writer], seen: list[tuple[int, int, int]]) -> None:
    """Check that everything acknowledged is there, and that the group has got each record once."""
    await settle(writers)
    records = await check_log(client, VICTIM, writers, foreign=FOREIGN)
    async with asyncio.timeout(REQUEST_TIMEOUT_S * 3):
        while len(set(seen)) < records:
            await asyncio.sleep(0.05)
    again = [place for place, count in Counter(seen).items() if count > 1]
    if again or len(seen) != records:
        raise Wrong(f"the group was given {len(again)} records again, of {records}: {again[:5]}")
    for each in writers:
        each.paused = False


@contextlib.asynccontextmanager
async def attacked(directory: Path) -> AsyncIterator[tuple[LocalCluster, Client, Writer, list[tuple[int, int, int]]]]:
    """A cluster with ordinary clients, and a stream for the foreign client."""
    settings = {"heartbeats_missed_max": 15}  # two cores that run two test workers are slow
    async with (
        control_cluster(directory, brokers=2, backups=2, coordinator_settings=settings) as cluster,
        await connect(cluster, request_timeout_ms=10_000) as client,
    ):
        for name in (VICTIM, HOSTILE):
            await client.admin.create_stream(name, streamlets=STREAMLETS, entries=2, replication=1)
        async with writer(client, VICTIM) as load, ordinary_group(client) as seen:
            await load.go_on()
            yield cluster, client, load, seen


async def test_no_field_value_of_a_foreign_client_affects_other_clients(tmp_path: Path) -> None:
    async with attacked(tmp_path) as (cluster, client, load, seen):
        async with foreign_client(cluster) as foreign:
            watch = Watch(foreign)
            async with watch.running():
                requests = await send_chunks(foreign, watch)
                requests += await send_fields(foreign, watch, internal=False)
            print(f"{requests} requests: {dict(foreign.outcomes)}; longest answers {watch.longest_s}")  # noqa: T201
        assert sorted(cluster.processes) == sorted(cluster.ready), "a daemon has ended"
        assert foreign.defects == []
        await load.go_on()
        await check(client, [load], seen)
        watch.check()

        lost = broker_names(cluster)[0]
        killed_us = now_us()
        await cluster.kill(lost)
        await until_recovered(client, [broker_id_of(cluster, lost)], killed_us)
        await load.go_on()
        await load.settle()
        await check_log(client, VICTIM, [load], foreign=FOREIGN)


@pytest.mark.slow
async def test_no_field_value_of_a_daemon_request_affects_other_clients(tmp_path: Path) -> None:
    """No recovery follows: the cluster waits for members that registered and never answer, as for real ones."""
    async with attacked(tmp_path) as (cluster, client, load, seen):
        async with foreign_client(cluster) as foreign:
            watch = Watch(foreign)
            async with watch.running():
                requests = await send_fields(foreign, watch, internal=True)
            print(f"{requests} requests: {dict(foreign.outcomes)}; longest answers {watch.longest_s}")  # noqa: T201
        assert sorted(cluster.processes) == sorted(cluster.ready), "a daemon has ended"
        assert foreign.defects == []
        await load.go_on()
        await check(client, [load], seen)
        watch.check()
