"""The waits of other clients while one client asks a daemon with many streams, groups, segments and replicas.

    make bench RUN=fairness-deep
    python -m bench.fairness_deep --only ListGroups --streams 1000

Requests here are small, or as large as daemons send them to each other, but they are about large objects.
``bench.fairness`` is about large requests. One client, a process of its own, has `--pipelined` of them under way all
the time. Other clients, each on a connection of its own, send small requests again and again: one reads, one writes.
Reported: the time of these. Fails if a 99th percentile is above `--bound-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from google.protobuf.message import Message

from bench.common import Figures, directory, parser, say
from bench.fairness_flood import FRAMES, GRPC, PUSH, Flood, flooding
from kera.client import Client
from kera.core.base.settings import KIB, MIB
from kera.core.errors import KeraError
from kera.core.format.chunk import Placement, chained_checksum, encode_chunk, encode_payload, place_chunk
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.push import PushKind, encode, encode_numbers
from kera.core.rpc import Method, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.frames import FrameKind, encode_frame
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.limits import REPLICATED_BYTES_MAX
from kera.core.rpc.method import call
from kera.local.cluster import LocalCluster
from kera.v1 import backup_pb2, broker_pb2, common_pb2, consumer_group_pb2, coordinator_pb2, push_pb2

TIMEOUT_S = 120.0
SEGMENT_BYTES = 64 * KIB
BACKUP_SEGMENT_BYTES = 8 * MIB
LANES = 30_000
LARGEST_STREAMLETS, LARGEST_ENTRIES = 16_384, 64
"""Streamlets and entries of a stream."""
STRANGER, READER = 900_003, 900_004
"""Ids of brokers that do not exist; a backup has their replicas."""
CONSUMER_GROUP = "deep"
TIMEOUT_MS = 600_000


@dataclass(frozen=True)
class World:
    """The large parts of the cluster."""

    small: common_pb2.StreamInfo
    deep: common_pb2.StreamInfo
    """One entry, many groups of a segment each."""
    long: common_pb2.StreamInfo
    """One entry, one group of many segments."""
    wide: common_pb2.StreamInfo
    """Many streamlets."""
    broker: common_pb2.BrokerInfo


@dataclass(frozen=True)
class Case:
    """A request, and the daemon that it goes to."""

    name: str
    daemon: str
    flood: Flood


def tiny_chunk(stream_id: int, streamlet_id: int, sequence: int, value_bytes: int = 0) -> bytes:
    """A chunk of one record."""
    batch = pa.RecordBatch.from_pylist([{"timestamp": 1, "value": bytes(value_bytes)}], DEFAULT_SCHEMA)
    return encode_chunk(
        encode_payload(batch),
        record_count=1,
        stream_id=stream_id,
        streamlet_id=streamlet_id,
        schema_id=1,
        producer_id=7,
        producer_epoch=1,
        sequence=sequence,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
    ).to_bytes()


def placed(chunk: bytes, count: int, checksum: int = 0) -> tuple[bytes, int]:
    """`count` copies of a chunk, each placed, and the checksum of them all; `checksum`: of the bytes before them."""
    data = bytearray(chunk * count)
    for number in range(count):
        at = number * len(chunk)
        place_chunk(data, at, Placement(1, 1, 0, number, 1))
        checksum = chained_checksum(data, at, checksum)
    return bytes(data), checksum


# -- the world -----------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def world(where: Path, arguments: argparse.Namespace) -> AsyncIterator[tuple[LocalCluster, World]]:
    """A cluster with many large objects."""
    cluster = LocalCluster(
        data_dir=where,
        backups=1,
        arena_bytes=128 * MIB,
        backup_memory_bytes=256 * MIB,
        segment_bytes=SEGMENT_BYTES,
        backup_settings={"segment_bytes": BACKUP_SEGMENT_BYTES},
    )
    async with cluster, await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("small", streamlets=2)
        await client.admin.create_stream("deep", group_segments=1)
        await client.admin.create_stream("long", group_segments=1024)
        await client.admin.create_stream("wide", streamlets=arguments.streamlets)
        say(f"{arguments.streams} streams")
        numbers = iter(range(arguments.streams))
        await asyncio.gather(*(_create(client, numbers) for _ in range(32)))
        say(f"{arguments.segments} segments")
        async with client.producer(linger_ms=0) as producer:
            for name in ("small", "deep", "long"):
                await producer.prepare(name)
            value = bytes(SEGMENT_BYTES * 2 // 3)
            for _ in range(arguments.segments // 16):
                sent = [producer.send(name, value, streamlet=0) for name in ("deep", "long") for _ in range(16)]
                for each in sent:
                    await each
        asked = client._cluster  # the raw messages, which the SDK does not show

        async def described(name: str) -> common_pb2.StreamInfo:
            answer = await asked.ask(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(name=name))
            return answer.stream

        known = await asked.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest())
        small, deep, long, wide = [await described(name) for name in ("small", "deep", "long", "wide")]
        made = World(small, deep, long, wide, known.brokers[0])
        say(f"{arguments.replicas} replicas")
        await _replicas(cluster, made, arguments.replicas)
        await _consumer_group(cluster, made)
        yield cluster, made


async def _create(client: Client, numbers: Iterator[int]) -> None:
    for number in numbers:
        await client.admin.create_stream(f"stream-{number}")


async def _replicas(cluster: LocalCluster, made: World, count: int) -> None:
    backup = await FrameChannel.connect_tcp(cluster.ready["backup-1"]["frames_address"], timeout_s=10)
    small = placed(tiny_chunk(made.small.stream_id, 0, 0), 1)
    for number in range(1, count + 1):
        while True:
            try:
                await _replicate(backup, STRANGER, number, *small, close=True)
                break
            except KeraError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.05)
    one = tiny_chunk(made.small.stream_id, 0, 0)
    offset = checksum = 0
    while offset < BACKUP_SEGMENT_BYTES - MIB:
        chunks, checksum = placed(one, REPLICATED_BYTES_MAX // len(one), checksum)
        await _replicate(backup, READER, 1, chunks, checksum, close=False, offset=offset)
        offset += len(chunks)
    await backup.close()


async def _replicate(
    channel: FrameChannel, broker_id: int, number: int, chunks: bytes, checksum: int, *, close: bool, offset: int = 0
) -> None:
    request = backup_pb2.ReplicateRequest(
        broker_id=broker_id,
        broker_epoch=1,
        stream_id=1,
        virtual_segment_id=number,
        checksum=checksum,
        close=close,
        offset=offset,
    )
    await channel.submit(api.REPLICATE, request, [memoryview(chunks)], timeout_s=TIMEOUT_S)


async def _consumer_group(cluster: LocalCluster, made: World) -> None:
    """Make a consumer group that has begun all streamlets of the wide stream, and knows all groups of the deep one."""
    channel = GrpcChannel(cluster.bootstrap)
    wide = [
        consumer_group_pb2.StreamletStart(
            stream_id=made.wide.stream_id,
            streamlet_id=number,
            cursors=[common_pb2.Cursor(stream_id=made.wide.stream_id, streamlet_id=number)],
        )
        for number in range(len(made.wide.assignments))
    ]
    for first in range(0, len(wide), 1024):
        request = consumer_group_pb2.ResetConsumerGroupRequest(
            consumer_group=CONSUMER_GROUP, starts=wide[first : first + 1024], force=True
        )
        await call(channel, api.RESET_CONSUMER_GROUP, request, timeout_s=TIMEOUT_S)
    await channel.close()


# -- the cases -----------------------------------------------------------------------------------------------------


class Cases:
    """The cases of a cluster."""

    def __init__(self, cluster: LocalCluster, made: World, pipelined: int) -> None:
        self._cluster = cluster
        self._made = made
        self._pipelined = pipelined

    def all(self) -> Iterator[Case]:
        """All cases, one after the other."""
        yield from self._of_broker()
        yield from self._of_backup()
        yield from self._of_coordinator()
        yield from self._of_consumer_groups()
        yield from self._of_the_largest_stream()

    def _framed(
        self, daemon: str, method: Method[Any, Any], request: Message, bulk: bytes = b"", what: str = ""
    ) -> Case:
        pieces: list[Any] = encode_frame(FrameKind.REQUEST, method, 1, request, [bulk] if bulk else [], 1 << 30)
        address = self._cluster.ready[daemon]["frames_address"]
        flood = Flood(FRAMES, address, b"".join(map(bytes, pieces)), pipelined=self._pipelined)
        return Case(f"{method.name}{what}", daemon, flood)

    def _unary(self, method: Method[Any, Any], request: Message, what: str = "") -> Case:
        request_bytes = request.SerializeToString()
        flood = Flood(GRPC, self._cluster.bootstrap, request_bytes, method.path, self._pipelined)
        return Case(f"{method.name}{what}", "coordinator", flood)

    def _of_the_largest_stream(self) -> Iterator[Case]:
        """Create and delete it again and again, while others wait at the coordinator and at a broker."""
        in_turn = []
        for number in range(self._pipelined):
            name = f"largest-{number}"
            config = common_pb2.StreamConfig(
                streamlets=LARGEST_STREAMLETS, entries=LARGEST_ENTRIES, group_segments=1, replication=0
            )
            create = coordinator_pb2.CreateStreamRequest(name=name, config=config)
            create.schema.CopyFrom(self._made.small.schemas[0])
            delete = coordinator_pb2.DeleteStreamRequest(name=name)
            asked: tuple[tuple[Method[Any, Any], Message], ...] = (
                (api.CREATE_STREAM, create),
                (api.DELETE_STREAM, delete),
            )
            in_turn.append(tuple((method.path, message.SerializeToString()) for method, message in asked))
        flood = Flood(GRPC, self._cluster.bootstrap, b"", pipelined=self._pipelined, in_turn=tuple(in_turn))
        for daemon in ("coordinator", "broker-1"):
            yield Case(f"CreateStream, DeleteStream of the largest, at {daemon}", daemon, flood)

    def _of_broker(self) -> Iterator[Case]:
        deep, long = ({"stream_id": each.stream_id, "streamlet_id": 0} for each in (self._made.deep, self._made.long))
        wide = self._made.wide.stream_id
        broker = "broker-1"
        yield self._framed(
            broker,
            api.GET_NEXT_GROUPS,
            broker_pb2.GetNextGroupsRequest(**deep, consumer_group="deep", groups_max=1 << 30),
        )
        yield self._framed(broker, api.GET_NEXT_SEGMENTS, broker_pb2.GetNextSegmentsRequest(**long, group_id=1))
        yield self._framed(broker, api.GET_AVAILABLE_GROUPS, broker_pb2.GetAvailableGroupsRequest(**deep))
        yield self._framed(
            broker, api.GET_AVAILABLE_SEGMENTS, broker_pb2.GetAvailableSegmentsRequest(**long, group_id=1)
        )
        yield self._framed(broker, api.DESCRIBE_STREAMLETS, broker_pb2.DescribeStreamletsRequest(stream_id=wide))
        yield self._framed(broker, api.LIST_GROUPS, broker_pb2.ListGroupsRequest(**deep))
        yield self._framed(broker, api.LIST_GROUPS, broker_pb2.ListGroupsRequest(**long), what=" of many segments")
        yield self._framed(broker, api.LIST_SEGMENTS, broker_pb2.ListSegmentsRequest(start=common_pb2.Cursor(**long)))
        yield self._framed(
            broker,
            api.LOCATE_CHUNKS,
            broker_pb2.LocateChunksRequest(
                queries=[broker_pb2.ChunkQuery(start=common_pb2.Cursor(**deep), timestamp_us=1 << 60)] * 256
            ),
        )
        yield self._framed(
            broker,
            api.MULTI_READ_CHUNKS,
            broker_pb2.MultiReadChunksRequest(
                ranges=[
                    broker_pb2.ReadRange(start=common_pb2.Cursor(**deep, group_id=number, segment_id=1))
                    for number in range(1, 257)
                ]
            ),
        )
        yield self._framed(
            broker,
            api.MEASURE_LAG,
            broker_pb2.MeasureLagRequest(cursors=[common_pb2.Cursor(**each) for each in (deep, long)]),
        )
        yield self._framed(
            broker,
            api.OPEN_STREAMLETS,
            broker_pb2.OpenStreamletsRequest(stream=self._made.wide),
            what=" as it is already",
        )
        yield self._framed(
            broker,
            api.SEAL_STREAMLETS,
            broker_pb2.SealStreamletsRequest(
                stream_id=wide, streamlet_ids=range(len(self._made.wide.assignments)), wait_ms=1
            ),
        )
        lanes = [
            push_pb2.PushLane(
                lane=number,
                start=common_pb2.Cursor(stream_id=wide, streamlet_id=number % len(self._made.wide.assignments)),
            )
            for number in range(1, LANES)
        ]
        messages = encode(PushKind.SUBSCRIBE, push_pb2.PushSubscribe(lanes=lanes).SerializeToString())
        messages += encode_numbers(PushKind.CANCEL, range(1, LANES))
        yield Case("push: lanes", broker, Flood(PUSH, self._cluster.ready[broker]["push_unix_path"], messages))

    def _of_backup(self) -> Iterator[Case]:
        backup = "backup-1"
        one = tiny_chunk(self._made.small.stream_id, 0, 0)
        chunks, checksum = placed(one, REPLICATED_BYTES_MAX // len(one))
        request = backup_pb2.ReplicateRequest(
            broker_id=STRANGER + 2, broker_epoch=1, stream_id=1, virtual_segment_id=1, checksum=checksum
        )
        yield self._framed(backup, api.REPLICATE, request, chunks, " of tiny chunks")
        for headers_only, what in ((False, ""), (True, " headers")):
            read = backup_pb2.ReadReplicaRequest(broker_id=READER, virtual_segment_id=1, headers_only=headers_only)
            yield self._framed(backup, api.READ_REPLICA, read, what=what)
        yield self._framed(backup, api.LIST_REPLICAS, backup_pb2.ListReplicasRequest(broker_id=STRANGER))

    def _of_coordinator(self) -> Iterator[Case]:
        wide = self._made.wide.stream_id
        yield self._unary(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(name="wide"))
        yield self._unary(api.LIST_STREAMS, coordinator_pb2.ListStreamsRequest())
        yield self._unary(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest())
        yield self._unary(api.READ_METADATA, coordinator_pb2.ReadMetadataRequest())
        yield self._unary(api.REBALANCE, coordinator_pb2.RebalanceRequest(dry_run=True))
        yield self._unary(api.DRAIN, coordinator_pb2.DrainRequest(broker_id=self._made.broker.broker_id, ask=True))
        yield self._unary(api.LIST_RECOVERIES, coordinator_pb2.ListRecoveriesRequest())
        yield self._unary(
            api.HEARTBEAT,
            coordinator_pb2.HeartbeatRequest(
                broker_id=self._made.broker.broker_id,
                broker_epoch=self._made.broker.broker_epoch,
                held_streams=[coordinator_pb2.HeldStream(stream_id=number) for number in range(1, 10_000)],
                loads=[coordinator_pb2.StreamletLoad(stream_id=wide, streamlet_id=number) for number in range(1000)],
            ),
        )
        yield self._unary(
            api.CREATE_STREAM,
            coordinator_pb2.CreateStreamRequest(name="wide", config=self._made.wide.config),
            " that is there",
        )

    def _of_consumer_groups(self) -> Iterator[Case]:
        wide = self._made.wide.stream_id
        yield self._unary(
            api.FETCH_CONSUMER_GROUP,
            consumer_group_pb2.FetchConsumerGroupRequest(consumer_group=CONSUMER_GROUP, stream_id=wide),
        )
        yield self._unary(
            api.DESCRIBE_CONSUMER_GROUP, consumer_group_pb2.DescribeConsumerGroupRequest(consumer_group=CONSUMER_GROUP)
        )
        yield self._unary(api.LIST_CONSUMER_GROUPS, consumer_group_pb2.ListConsumerGroupsRequest())
        starts = [
            consumer_group_pb2.StreamletStart(
                stream_id=wide, streamlet_id=number, cursors=[common_pb2.Cursor(stream_id=wide, streamlet_id=number)]
            )
            for number in range(min(1024, len(self._made.wide.assignments)))
        ]
        yield self._unary(
            api.RESET_CONSUMER_GROUP,
            consumer_group_pb2.ResetConsumerGroupRequest(consumer_group=CONSUMER_GROUP, starts=starts, force=True),
        )
        yield self._unary(
            api.CONSUME_ROUND,
            consumer_group_pb2.ConsumeRoundRequest(
                consumer_group=CONSUMER_GROUP,
                member_id="member",
                session_timeout_ms=TIMEOUT_MS,
                progress_timeout_ms=TIMEOUT_MS,
                groups_max=1 << 20,
                stream_ids=[wide, self._made.deep.stream_id],
                seen=[
                    consumer_group_pb2.SeenGroups(
                        stream_id=wide,
                        streamlet_id=number,
                        through_group_id=100,
                        groups=[
                            consumer_group_pb2.SeenGroup(
                                start=common_pb2.Cursor(stream_id=wide, streamlet_id=number, group_id=group)
                            )
                            for group in range(1, 4)
                        ],
                    )
                    for number in range(len(self._made.wide.assignments))
                ],
            ),
        )


# -- measuring -----------------------------------------------------------------------------------------------------

Ask = Callable[[], Awaitable[object]]


@contextlib.asynccontextmanager
async def small_ones(cluster: LocalCluster, made: World, daemon: str) -> AsyncIterator[dict[str, Ask]]:
    """The other clients' requests to a daemon: something to read and something to write, each on a connection of its
    own.
    """
    async with contextlib.AsyncExitStack() as stack:
        if daemon == "coordinator":
            channels = [GrpcChannel(cluster.bootstrap) for _ in range(2)]
            for channel in channels:
                stack.push_async_callback(channel.close)
            named = coordinator_pb2.GetStreamIdRequest(name="small")
            yield {
                "reads": lambda: call(channels[0], api.GET_STREAM_ID, named, timeout_s=TIMEOUT_S),
                "writes": lambda: call(
                    channels[1], api.INIT_PRODUCER, coordinator_pb2.InitProducerRequest(), timeout_s=TIMEOUT_S
                ),
            }
            return
        address = cluster.ready[daemon]["frames_address"]
        reader = await FrameChannel.connect_tcp(address, timeout_s=10)
        writer = await FrameChannel.connect_tcp(address, timeout_s=10)
        stack.push_async_callback(reader.close)
        stack.push_async_callback(writer.close)
        if daemon == "backup-1":
            listing = backup_pb2.ListReplicasRequest(broker_id=READER, replicas_max=1)
            chunk, checksum = placed(tiny_chunk(1, 0, 0), 1)
            yield {
                "reads": lambda: call(reader, api.LIST_REPLICAS, listing, timeout_s=TIMEOUT_S),
                "writes": lambda: _replicate(writer, STRANGER + 1, 1, chunk, checksum, close=False),
            }
            return
        request = broker_pb2.MultiReadChunksRequest(
            ranges=[broker_pb2.ReadRange(start=common_pb2.Cursor(stream_id=made.small.stream_id))]
        )
        repeated = tiny_chunk(made.small.stream_id, 1, 0)
        yield {
            "reads": lambda: call(reader, api.MULTI_READ_CHUNKS, request, timeout_s=TIMEOUT_S),
            "writes": lambda: writer.submit(
                api.MULTI_WRITE_CHUNKS,
                broker_pb2.MultiWriteChunksRequest(chunk_count=1),
                [memoryview(repeated)],
                timeout_s=TIMEOUT_S,
            ),
        }


async def measured(ask: Ask, until_s: float) -> list[float]:
    """Milliseconds, sorted."""
    took_ms: list[float] = []
    while time.perf_counter() < until_s or not took_ms:
        at_s = time.perf_counter()
        await ask()
        took_ms.append((time.perf_counter() - at_s) * 1000)
    return sorted(took_ms)


async def run(arguments: argparse.Namespace) -> int:
    """Measure all, on a cluster of its own; the exit code."""
    failed = 0
    with directory(arguments) as where:
        figures = Figures("fairness of daemons that have much", arguments, where)
        async with world(where, arguments) as (cluster, made):
            for case in Cases(cluster, made, arguments.pipelined).all():
                if arguments.only and not any(case.name.startswith(each) for each in arguments.only):
                    continue
                async with small_ones(cluster, made, case.daemon) as asks:
                    with flooding(case.flood) as progress:
                        until_s = time.perf_counter() + arguments.seconds
                        took = await asyncio.gather(*(measured(ask, until_s) for ask in asks.values()))
                        answered, refused = progress.answered.value, progress.refused.value
                told = []
                for name, took_ms in zip(asks, took, strict=True):
                    p99_ms = took_ms[len(took_ms) * 99 // 100]
                    figures.add(f"{case.name}: {name}", p99_ms, "ms")
                    late = p99_ms > arguments.bound_ms
                    failed += late
                    told.append(
                        f"{name} p99 {p99_ms:.1f} ms, longest {took_ms[-1]:.1f} of {len(took_ms)}{' <-- late' * late}"
                    )
                say(f"{case.name}: {'; '.join(told)}; {answered} answered, {refused} refused")
        figures.print()
    say(f"{failed} above {arguments.bound_ms:g} ms")
    return 1 if failed else 0


def main() -> None:
    """See the head of this module."""
    made = parser(__doc__)
    made.add_argument("--pipelined", type=int, default=40)
    made.add_argument("--bound-ms", type=float, default=20.0)
    made.add_argument("--seconds", type=float, default=3.0, help="for which each case is measured")
    made.add_argument("--streams", type=int, default=10_000)
    made.add_argument("--streamlets", type=int, default=4_096, help="of the wide stream")
    made.add_argument("--segments", type=int, default=1_024, help="of the deep stream, and of the long one")
    made.add_argument("--replicas", type=int, default=500)
    made.add_argument("--only", nargs="*", help="cases whose names begin so")
    raise SystemExit(asyncio.run(run(made.parse_args())))


if __name__ == "__main__":
    main()
