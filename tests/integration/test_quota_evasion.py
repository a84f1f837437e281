"""Clients that do not wait for their answers as the SDK does: their quota still limits them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest

from kera.client.types import StreamDescription
from kera.core.access.credentials import Credentials
from kera.core.access.rights import Operation
from kera.core.errors import KeraError
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc import api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import Channel
from kera.v1 import broker_pb2, coordinator_pb2
from tests.integration.secured_cluster import PASSWORD, Secured
from tests.integration.support import until

pytestmark = pytest.mark.timeout(180)

EACH_TRANSPORT = pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow)])
STREAM = "stream"
QUOTA = 256 << 10
"""Bytes per second."""
CHUNK = 64 << 10
VALUE = random.Random(7).randbytes(CHUNK)
MEASURED_S = 2.0
TIMEOUT_S = 30.0
IDS = 960
"""The number of producer ids. A user gets them in blocks of 64, 128, 256 and 512; the last 512 are used."""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path_factory.mktemp("evasion"), stack, brokers=1, backups=0, replication=0)
        asyncio.run(secured.make_user("admin"))
        asyncio.run(secured.make_user("mallory"))
        asyncio.run(secured.grant("user:mallory", f"stream:{STREAM}*", Operation.WRITE))
        yield secured


class Attack:
    """An attack on a stream of its own."""

    def __init__(self, secured: Secured, transport: str) -> None:
        self._secured = secured
        self._transport = transport
        self._name = f"{STREAM}-{next(_numbers)}"
        self._stream: StreamDescription
        self._ids: Iterator[int] = iter(())

    async def begin(self) -> None:
        async with await self._secured.client("admin") as admin:
            await admin.access.set_quota("mallory", bytes_in_per_s=QUOTA)
            await admin.admin.create_stream(self._name, streamlets=1)
            self._stream = await admin.describe(self._name)
        async with await self._secured.client("mallory") as client:
            request = coordinator_pb2.InitProducerRequest()
            answers = [await client._cluster.ask(api.INIT_PRODUCER, request) for _ in range(IDS)]
        self._ids = iter([answer.producer_id for answer in answers[-512:]])
        channel = await self.connect()
        for _ in range(2):  # at the first write, the broker asks for the owner of these ids
            await asyncio.wait([self.write(channel)])
        await channel.close()

    async def connect(self) -> Channel:
        shown = Credentials(user="mallory", password=lambda: PASSWORD)
        ready, tls = self._secured.cluster.ready["broker-1"], self._secured.tls
        if self._transport == "grpc":
            return GrpcChannel(ready["grpc_address"], tls=tls, introduction=shown)
        return await FrameChannel.connect_tcp(ready["frames_address"], timeout_s=TIMEOUT_S, tls=tls, introduction=shown)

    def write(self, channel: Channel) -> asyncio.Future[object]:
        """Write a chunk of a producer that the broker does not know."""
        chunk = encode_chunk(
            encode_payload(pa.RecordBatch.from_pylist([{"timestamp": 0, "value": VALUE}], DEFAULT_SCHEMA)),
            record_count=1,
            stream_id=self._stream.stream_id,
            streamlet_id=0,
            schema_id=self._stream.schema_id,
            producer_id=next(self._ids),
            producer_epoch=1,
            sequence=0,
            created_us=0,
            min_timestamp_us=0,
            max_timestamp_us=0,
        )
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        return asyncio.ensure_future(
            channel.submit(api.MULTI_WRITE_CHUNKS, request, [chunk.to_bytes()], timeout_s=TIMEOUT_S)
        )

    async def stored(self) -> int:
        """The number of stored chunks."""
        async with await self._secured.client("admin") as admin:
            records = admin.consumer(self._name, start="earliest", end="latest")
            return sum([batch.header.record_count async for batch in records.batches()])


@EACH_TRANSPORT
async def test_a_client_that_does_not_wait_for_answers_stays_within_its_quota(secured: Secured, transport: str) -> None:
    attack = Attack(secured, transport)
    await attack.begin()
    channel = await attack.connect()
    begun_s = time.monotonic()
    writes = [attack.write(channel) for _ in range(200)]
    await until(lambda: time.monotonic() > begun_s + MEASURED_S)
    while (stored := await attack.stored()) < QUOTA / CHUNK:
        pass  # the test's time-out bounds it
    seconds = time.monotonic() - begun_s
    await channel.close()
    await asyncio.gather(*writes, return_exceptions=True)
    assert stored < (seconds + 2) * QUOTA / CHUNK + 4


@EACH_TRANSPORT
async def test_a_client_that_reconnects_instead_of_waiting_stays_within_its_quota(
    secured: Secured, transport: str
) -> None:
    attack = Attack(secured, transport)
    await attack.begin()
    begun_s = time.monotonic()
    attempts = 0

    def stored_max() -> float:
        """The chunks that the quota admits until now, with those that are admitted before the quota is known."""
        return (time.monotonic() - begun_s + 2) * QUOTA / CHUNK + 12

    async def once() -> None:
        nonlocal attempts
        channel = await attack.connect()
        write = attack.write(channel)
        await asyncio.wait([write], timeout=0.1)
        attempts += 1
        with contextlib.suppress(KeraError):
            await channel.close()
        write.cancel()
        await asyncio.wait([write])

    async def work() -> None:
        while time.monotonic() < begun_s + MEASURED_S or attempts <= stored_max():
            await once()

    await asyncio.gather(*(work() for _ in range(4)))
    assert await attack.stored() < stored_max()
