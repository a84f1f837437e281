"""The waits of other clients while one client sends the largest possible requests: every method of every daemon.

    make bench RUN=fairness
    python -m bench.fairness --methods MeasureLag MultiReadChunks

Of each method, requests are made as large as they can be: one for each of its repeated fields, which is repeated until
the message is as large as the transport takes, and one with as many of the smallest chunks as fit. One client sends
`--pipelined` of them at once, again and again for at least a second; meanwhile another client, on a connection of its
own, sends small requests one after the other (to a broker: reads and writes in turn). Reported: the time of the small
requests, and how many of the large ones were refused. Fails if a 99th percentile is above `--bound-ms`.

In practice, the flooding client is on another machine: here it only gets processor time that the others leave (`nice`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from bench.common import Figures, directory, parser, say
from bench.fairness_flood import NICE
from kera.client import Client
from kera.core.base.settings import MIB
from kera.core.errors import KeraError
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import Method, call
from kera.local.cluster import LocalCluster
from kera.v1 import broker_pb2, coordinator_pb2
from tests.integration.field_cases import CASES, Theirs

LARGE_BYTES_MAX = 30 * MIB
"""Maximum of requests that only daemons send."""
BULK_BYTES = 30 * MIB
TIMEOUT_S = 120.0
CONTEXT = get_context("spawn")
SECONDS_MIN = 1.0
SEND_BUFFER_BYTES = 128 << 10


@dataclass(frozen=True)
class Request:
    """A large request."""

    method: Method[Any, Any]
    what: str
    message: Message
    bulk: bytes = b""


# -- large requests ----------------------------------------------------------------------------------------------


def repeated_fields(message: Message, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all repeated fields that are not empty; within repeated messages, those of the first element."""
    for field, value in message.ListFields():
        here = (*path, field.name)
        if field.is_repeated:
            yield here
            if field.type == FieldDescriptor.TYPE_MESSAGE:
                yield from repeated_fields(value[0], here)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from repeated_fields(value, here)


def filled(message: Message, path: tuple[str, ...], bytes_max: int) -> Message:
    """A copy in which a field is repeated until the message is almost as large as it may be."""
    made = type(message)()
    made.CopyFrom(message)
    within: Any = made
    for name in path[:-1]:
        within = getattr(within, name)
        within = within if isinstance(within, Message) else within[0]
    field: Any = getattr(within, path[-1])
    before, once = made.ByteSize(), list(field)
    field.extend(once)
    each = max(1, made.ByteSize() - before)
    field.extend(list(itertools.islice(itertools.cycle(once), (bytes_max - 2 * before) * len(once) // (each + 2))))
    while made.ByteSize() > bytes_max - 1024:
        del field[len(field) * 19 // 20 :]
    return made


def requests_of(method: Method[Any, Any], theirs: Theirs) -> Iterator[Request]:
    """All large requests of a method, and the plain one."""
    message = CASES[method].build(theirs)
    yield Request(method, "as it is", message)
    bytes_max = LARGE_BYTES_MAX if method.large_request else method.request_bytes_max
    for path in repeated_fields(message):
        yield Request(method, ".".join(path), filled(message, path, bytes_max))
    if method is api.MULTI_WRITE_CHUNKS:
        for what, chunk in (("chunks", small_chunk(theirs)), ("headers alone", small_chunk(theirs)[:128])):
            count = BULK_BYTES // len(chunk)
            yield Request(method, what, broker_pb2.MultiWriteChunksRequest(chunk_count=count), chunk * count)
    if method is api.REPLICATE:
        chunk = small_chunk(theirs)
        count = BULK_BYTES // len(chunk)
        yield Request(method, "chunks", message, chunk * count)


def small_chunk(theirs: Theirs) -> bytes:
    """A chunk of one record."""
    batch = pa.RecordBatch.from_pylist([{"timestamp": 1, "value": b""}], DEFAULT_SCHEMA)
    return encode_chunk(
        encode_payload(batch),
        record_count=1,
        stream_id=theirs.stream.stream_id,
        streamlet_id=0,
        schema_id=1,
        producer_id=7,
        producer_epoch=1,
        sequence=0,
        created_us=1,
        min_timestamp_us=1,
        max_timestamp_us=1,
    ).to_bytes()


# -- measuring -----------------------------------------------------------------------------------------------------


class Flooding(FrameChannel):
    """A connection of the flooding client.

    The kernel copies the data of a call without interruption by priority: 20 ms for megabytes, on a core that another
    machine would not use. So the kernel gets little at a time.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As the base class does, and with a small buffer."""
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def send_all(address: str, request: Request, pipelined: int, *, frames: bool) -> tuple[int, int]:
    """Send `pipelined` requests at once, again and again for `SECONDS_MIN`; returns how many, and how many were
    refused.
    """
    channel: Any = await Flooding.connect_tcp(address, timeout_s=10) if frames else GrpcChannel(address)

    async def one() -> bool:
        bulk = [memoryview(request.bulk)] if request.bulk else []
        try:
            message = (await channel.submit(request.method, request.message, bulk, timeout_s=TIMEOUT_S)).message
        except KeraError:
            return True
        statuses = getattr(message, "statuses", ())
        return bool(statuses) and all(status.HasField("error") for status in statuses)

    sent = refused = 0
    until_s = time.perf_counter() + SECONDS_MIN
    while not sent or time.perf_counter() < until_s:
        refused += sum(await asyncio.gather(*(one() for _ in range(pipelined))))
        sent += pipelined
    await channel.close()
    return sent, refused


def sender(pipe: Connection) -> None:
    """A process of its own, so that the cost of making requests does not count as the daemon's."""
    os.nice(NICE)
    while (task := pipe.recv()) is not None:
        address, frames, number, what, message, bulk, pipelined = task
        method = next(each for each in CASES if each.number == number)
        request = Request(method, what, method.request.FromString(message), bulk)
        pipe.send(asyncio.run(send_all(address, request, pipelined, frames=frames)))


async def measured(
    pipe: Connection, target: tuple[str, bool], request: Request, pipelined: int, small: Callable[[], Awaitable[object]]
) -> tuple[list[float], tuple[int, int], float]:
    """The milliseconds of small requests, sorted; the number of large ones sent and refused; and the total time."""
    message = request.message.SerializeToString()
    begun_s = time.perf_counter()
    await asyncio.to_thread(pipe.send, (*target, request.method.number, request.what, message, request.bulk, pipelined))
    took_ms: list[float] = []
    while not (took_ms and pipe.poll()):
        at_s = time.perf_counter()
        await small()
        took_ms.append((time.perf_counter() - at_s) * 1000)
    elapsed_s = time.perf_counter() - begun_s
    return sorted(took_ms), pipe.recv(), elapsed_s


@contextlib.asynccontextmanager
async def world(where: Any) -> AsyncIterator[tuple[Client, LocalCluster, Theirs]]:
    """A cluster, and the objects that large requests are about."""
    async with (
        LocalCluster(data_dir=where, backups=1, arena_bytes=256 * MIB) as cluster,
        await Client.connect(cluster.bootstrap) as client,
    ):
        for name in ("large", "small"):
            await client.admin.create_stream(name, streamlets=2)
            async with client.producer() as producer:
                await producer.prepare(name)
                for streamlet in range(2):
                    await producer.send(name, b"x", streamlet=streamlet)
        yield client, cluster, await theirs_of(client)


async def theirs_of(client: Client) -> Theirs:
    """The identities of the other client that the cases need."""
    cluster = client._cluster  # the raw messages, which the SDK does not show
    answer = await cluster.ask(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(name="large"))
    described = await cluster.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest())
    bounds = await client.bounds("large")
    cursors = []
    for streamlet_id, entries in bounds.items():
        cursor = broker_pb2.ReadRange().start
        cursor.stream_id, cursor.streamlet_id = answer.stream.stream_id, streamlet_id
        cursor.group_id, cursor.segment_id, cursor.position = entries[0].start
        cursors.append(cursor)
    return Theirs(
        stream=answer.stream,
        consumer_group="large-app",
        member="member",
        producer="large-producer",
        cursors=tuple(cursors),
        broker=described.brokers[0],
        coordinator_epoch=0,
    )


async def run(arguments: argparse.Namespace) -> int:
    """Measure all, on a cluster of its own; the exit code."""
    failed = 0
    with directory(arguments) as where:
        figures = Figures("fairness", arguments, where)
        async with world(where) as (client, cluster, theirs):
            addresses = {
                "kera.v1.Broker": cluster.ready["broker-1"]["frames_address"],
                "kera.v1.Backup": cluster.ready["backup-1"]["frames_address"],
            }
            numbers = itertools.count()
            async with client.producer(linger_ms=0) as producer:
                await producer.prepare("small")

                async def ask_broker() -> None:
                    if next(numbers) % 2:
                        await producer.send("small", b"y", streamlet=0)
                        return
                    await client.bounds("small")

                async def ask_coordinator() -> None:
                    await client.admin.stream_id("small")

                pipe, theirs_end = CONTEXT.Pipe()
                process = CONTEXT.Process(target=sender, args=(theirs_end,), daemon=True)
                process.start()
                backup = await FrameChannel.connect_tcp(addresses["kera.v1.Backup"], timeout_s=10)

                async def ask_backup() -> None:
                    message: Any = CASES[api.LIST_REPLICAS].build(theirs)
                    await call(backup, api.LIST_REPLICAS, message, timeout_s=TIMEOUT_S)

                asks = {"kera.v1.Broker": ask_broker, "kera.v1.Backup": ask_backup}
                for method in CASES:
                    if arguments.methods and method.name not in arguments.methods:
                        continue
                    for request in requests_of(method, theirs):
                        address = addresses.get(method.service)
                        target = (address, True) if address else (cluster.bootstrap, False)
                        took_ms, (sent, refused), elapsed_s = await measured(
                            pipe, target, request, arguments.pipelined, asks.get(method.service, ask_coordinator)
                        )
                        p99_ms = took_ms[len(took_ms) * 99 // 100]
                        name = f"{method.name}: {request.what}"
                        figures.add(name, p99_ms, "ms")
                        late = "  <-- above the bound" if p99_ms > arguments.bound_ms else ""
                        failed += bool(late)
                        size = request.message.ByteSize() + len(request.bulk)
                        say(
                            f"{name}, {size:,} bytes: p99 {p99_ms:.1f} ms, longest {took_ms[-1]:.1f} ms of"
                            f" {len(took_ms)} small ones; {refused} of {sent} refused,"
                            f" {elapsed_s:.1f} s{late}"
                        )
                pipe.send(None)
                process.join()
                await backup.close()
        figures.print()
    say(f"{failed} above {arguments.bound_ms:g} ms")
    return 1 if failed else 0


def main() -> None:
    """See the head of this module."""
    made = parser(__doc__)
    made.add_argument("--pipelined", type=int, default=40)
    made.add_argument("--bound-ms", type=float, default=20.0)
    made.add_argument("--methods", nargs="*", help="only these")
    raise SystemExit(asyncio.run(run(made.parse_args())))


if __name__ == "__main__":
    main()
