"""A producer id belongs to one writer: with security to a principal, without it one of two processes gets an error."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client
from kera.core.access.rights import Operation
from kera.core.base.ids import PRODUCER_IDS
from kera.core.errors import NotAllowed, OutOfSequence, ProducerFenced
from kera.local.cluster import LocalCluster
from tests.integration.secured_cluster import Secured

pytestmark = pytest.mark.timeout(180)
CHOSEN = PRODUCER_IDS[1234]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        data_dir = tmp_path_factory.mktemp("data")
        made = Secured(
            tmp_path_factory.mktemp("identity"), stack, brokers=1, backups=0, replication=0, data_dir=data_dir
        )
        asyncio.run(_make_users(made))
        yield made


async def _make_users(secured: Secured) -> None:
    for name in ("admin", "alice", "mallory"):
        await secured.make_user(name)


@pytest.fixture
async def clients(secured: Secured, request: pytest.FixtureRequest) -> AsyncIterator[dict[str, Client]]:
    """Clients of users that may write to a stream with the name of the test."""
    stream = request.node.originalname
    async with contextlib.AsyncExitStack() as stack:
        found = {
            name: await stack.enter_async_context(await secured.client(name)) for name in ("admin", "alice", "mallory")
        }
        await found["admin"].admin.create_stream(stream, streamlets=1)
        for name in ("alice", "mallory"):
            await secured.grant(f"user:{name}", f"stream:{stream}", Operation.READ, Operation.WRITE)
        yield found


async def stored(client: Client, stream: str) -> list[bytes]:
    async with client.consumer(stream, start="earliest", end="latest") as consumer:
        return [record.value async for record in consumer.records()]


async def impose(client: Client, stream: str, producer_id: int, epoch: int, sequence: int) -> None:
    """Append a record under another writer's id, which the SDK would not allow."""
    appender = await client.appender(stream, producer_id=CHOSEN, producer_epoch=epoch, chunk_bytes_max=4096)
    appender.producer_id = producer_id
    await appender.append(0, appender.conform(rows(b"impostor")), sequence)


def rows(value: bytes) -> pa.RecordBatch:
    return pa.record_batch(
        {"value": pa.array([value], pa.binary()), "timestamp": pa.array([1], pa.timestamp("us", tz="UTC"))}
    )


def identity(producer: Any) -> tuple[int, int]:
    return producer._writers.identity.producer_id, producer._writers.identity.first_epoch


async def test_nobody_writes_under_the_id_of_another_ones_producer(clients: dict[str, Client]) -> None:
    stream = "test_nobody_writes_under_the_id_of_another_ones_producer"
    async with clients["alice"].producer() as producer:
        await producer.prepare(stream)
        await producer.send(stream, b"first")
        for sequence, later in ((0, 0), (1, 0), (0, 1)):
            producer_id, epoch = identity(producer)
            with pytest.raises(NotAllowed, match=f"user:mallory may not write to stream:{stream} under producer id"):
                await impose(clients["mallory"], stream, producer_id, epoch + later, sequence)
        await producer.send(stream, b"second")
    with pytest.raises(NotAllowed, match="another principal owns it, or no principal does"):
        await impose(clients["mallory"], stream, identity(producer)[0] + (1 << 40), 1, 0)
    assert await stored(clients["admin"], stream) == [b"first", b"second"]


async def test_a_named_producer_is_for_those_who_may_use_its_name(secured: Secured, clients: dict[str, Client]) -> None:
    stream = "test_a_named_producer_is_for_those_who_may_use_its_name"
    await secured.grant("user:alice", "producer:billing", Operation.USE)
    async with clients["alice"].producer(name="billing") as producer:
        await producer.prepare(stream)
        await producer.send(stream, b"first")
        producer_id, epoch = identity(producer)
        with pytest.raises(NotAllowed, match="user:mallory may not use producer:billing"):
            await impose(clients["mallory"], stream, producer_id, epoch + 5, 0)
        await producer.send(stream, b"second")
        rule = await secured.grant("user:mallory", "producer:billing", Operation.USE)
        await impose(clients["mallory"], stream, producer_id, epoch, 2)
        await secured.revoke(rule)
        async with await secured.client("mallory") as mallory:
            with pytest.raises(NotAllowed, match="may not use producer:billing"):
                await impose(mallory, stream, producer_id, epoch, 3)


async def test_an_id_that_a_writer_chose_is_its_own_and_stays_so(secured: Secured, clients: dict[str, Client]) -> None:
    stream = "test_an_id_that_a_writer_chose_is_its_own_and_stays_so"
    await impose(clients["alice"], stream, CHOSEN, 1, 0)
    for again in (False, True):
        if again:
            for name in ("broker-1", "coordinator"):
                secured.cluster.restart(name)
        with pytest.raises(NotAllowed, match="user:mallory may not write"):
            await impose(clients["mallory"], stream, CHOSEN, 1, 1)
        await impose(clients["alice"], stream, CHOSEN, 1, 1 + again)
    assert len(await stored(clients["admin"], stream)) == 3


# --- without security ----------------------------------------------------------------------------------------------

FORKED = """
import asyncio, os, sys
import pyarrow as pa
from kera.client import Client

def tell(what, value):
    # One call of the system, so that lines of the two processes do not mix.
    os.write(1, f"{{what}} {{value.decode()}}\\n".encode())

async def write(identity, who, count):
    async with await Client.connect(sys.argv[1]) as client:
        appender = await client.appender(sys.argv[2], producer_id={chosen}, producer_epoch=1, chunk_bytes_max=4096)
        appender.producer_id = identity
        for number in range(count):
            value = f"{{who}}-{{number}}".encode()
            rows = appender.conform(pa.record_batch({{"value": pa.array([value], pa.binary())}}))
            try:
                await appender.append(0, rows, number)
            except Exception as error:
                tell(type(error).__name__, value)
                return
            tell("stored", value)

child = os.fork()
asyncio.run(write(int(sys.argv[3]), "child" if child == 0 else "parent", 20))
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    "chosen", [pytest.param(False, id="given"), pytest.param(True, id="chosen", marks=pytest.mark.slow)]
)
async def test_acknowledged_records_of_two_processes_with_one_id_are_stored(
    cluster: LocalCluster, chosen: bool
) -> None:
    stream = f"forked-{chosen}"
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream(stream, streamlets=1)
        async with client.producer() as producer:
            await producer.prepare(stream)
            producer_id = CHOSEN if chosen else identity(producer)[0]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FORKED.format(chosen=CHOSEN), cluster.bootstrap, stream, str(producer_id),
            stdout=asyncio.subprocess.PIPE, env=os.environ,
        )  # fmt: skip
        told, _ = await process.communicate()
        lines = [line.split() for line in told.decode().splitlines()]
        acknowledged = [value for what, value in lines if what == "stored"]
        found = [value.decode() for value in await stored(client, stream)]

    assert sorted(found) == sorted(acknowledged), lines
    assert {what for what, _ in lines} == {"stored", "ProducerFenced"}, "one of them is told"


async def test_a_producer_whose_id_another_writer_uses_is_fenced(cluster: LocalCluster) -> None:
    async with await Client.connect(cluster.bootstrap) as client:
        await client.admin.create_stream("copied", streamlets=1)
        producer = client.producer()
        await producer.prepare("copied")
        await producer.send("copied", b"first")
        await impose(client, "copied", *identity(producer), 1)
        with pytest.raises(ProducerFenced, match="another writer uses producer id"):
            await producer.send("copied", b"second")
        with pytest.raises(ProducerFenced, match="another writer uses producer id"):
            await producer.close()
        with pytest.raises(OutOfSequence):
            await impose(client, "copied", *identity(producer), 9)
        assert await stored(client, "copied") == [b"first", b"impostor"]
