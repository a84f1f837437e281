"""Epochs with security on: reading them takes the right to read, looking at them takes less, and quotas slow
readers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from kera.client import Client
from kera.client.cluster.cluster import Cluster
from kera.client.types import EntryBounds
from kera.core.access.rights import Operation
from kera.core.errors import NotAllowed, UnknownStream
from tests.integration.secured_cluster import Secured

pytestmark = pytest.mark.timeout(180)
WAIT_S = 60.0
MS = 1000
EPOCH_MS = 20
GRACE_S = 4
QUOTA = 5
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path_factory.mktemp("epochs"), stack, brokers=1, backups=0, replication=0)
        asyncio.run(secured.make_user("admin"))
        yield secured


@pytest.fixture
async def admin(secured: Secured) -> AsyncIterator[Client]:
    async with await secured.client("admin") as client:
        yield client


@pytest.fixture
async def stream(admin: Client) -> str:
    """A stream with two entries, one of them without records."""
    name = f"stream-{next(_numbers)}"
    await admin.admin.create_stream(name, streamlets=2, epoch_ms=EPOCH_MS, epoch_grace_ms=1000)
    return name


async def user(secured: Secured, resource: str, *operations: Operation) -> str:
    name = f"user-{next(_numbers)}"
    await secured.make_user(name)
    await secured.grant(f"user:{name}", resource, *operations)
    return name


async def write(admin: Client, stream: str, *times_us: int) -> None:
    async with admin.producer() as producer:
        await producer.prepare(stream)
        for time_us in times_us:
            producer.send(stream, b"%d" % time_us, timestamp_us=time_us, streamlet=0)
            await producer.flush()


async def test_a_reader_of_a_stream_reads_its_epochs_and_needs_its_group_to_commit(
    secured: Secured, admin: Client, stream: str
) -> None:
    reader = await user(secured, f"stream:{stream}", Operation.READ)
    now_us = time.time_ns() // 1000
    await write(admin, stream, *range(now_us, now_us + 5 * EPOCH_MS * MS, EPOCH_MS * MS))
    first = now_us // (EPOCH_MS * MS)
    async with await secured.client(reader) as client, asyncio.timeout(WAIT_S):
        async with client.epochs(stream, start=first, consumer_group="etl") as epochs:
            assert [(await anext(epochs)).number for _ in range(5)] == list(range(first, first + 5))
            with pytest.raises(NotAllowed, match="group:etl"):
                await epochs.commit()
        await secured.grant(f"user:{reader}", "group:etl", Operation.USE)
        async with client.epochs(stream, start=first, consumer_group="etl") as epochs:
            assert [(await anext(epochs)).number for _ in range(3)] == list(range(first, first + 3))
            await epochs.commit()
        async with client.epochs(stream, start="committed", consumer_group="etl") as epochs:
            assert (await anext(epochs)).number == first + 3


async def test_the_right_to_describe_allows_no_promise_and_no_epochs(
    secured: Secured, admin: Client, stream: str
) -> None:
    watcher = await user(secured, f"stream:{stream}", Operation.DESCRIBE)
    async with await secured.client(watcher) as client:
        with pytest.raises(NotAllowed, match="read"):
            await client.bounds(stream, promise=True)
        with pytest.raises(NotAllowed, match="read"):
            await client.epochs(stream, start="latest").start()
        bounds = await client.bounds(stream)
    seen = [entry for entries in bounds.values() for entry in entries]
    assert all(entry.promised_us is None for entry in seen)
    now_us = time.time_ns() // 1000
    assert all(entry.settled_us is not None and abs(entry.settled_us - now_us) < WAIT_S * 1e6 for entry in seen)
    long_ago = now_us - 3600 * MS * MS
    await write(admin, stream, long_ago)
    assert (await admin.bounds(stream))[0][0].watermark_us == long_ago, "there is no punctuation"


async def test_epochs_of_a_stream_without_rights_are_refused(secured: Secured, stream: str) -> None:
    stranger = await user(secured, f"stream:{stream}-else", Operation.READ)
    async with await secured.client(stranger) as client:
        with pytest.raises((NotAllowed, UnknownStream)):
            await client.epochs(stream, start="latest").start()


async def test_punctuating_needs_only_the_right_to_write(secured: Secured, admin: Client, stream: str) -> None:
    writer = await user(secured, f"stream:{stream}", Operation.WRITE)
    reader = await user(secured, f"stream:{stream}", Operation.READ)
    now_us = time.time_ns() // 1000
    await write(admin, stream, now_us)
    async with await secured.client(reader) as client, client.producer() as producer:
        with pytest.raises(NotAllowed, match="write"):
            await producer.punctuate(stream, now_us + 1)
    assert (await admin.bounds(stream))[0][0].watermark_us == now_us
    async with await secured.client(writer) as client:
        async with client.producer() as producer:
            await producer.punctuate(stream, now_us + 1)
        with pytest.raises(NotAllowed, match="read"):
            await client.epochs(stream, start="latest").start()
    assert (await admin.bounds(stream))[0][0].watermark_us == now_us + 1


@pytest.mark.slow
async def test_a_request_quota_slows_a_reader_of_epochs_without_losing_epochs(
    secured: Secured, admin: Client, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader asks brokers again and again how far silent entries are."""
    reader = await user(secured, f"stream:{stream}", Operation.READ)
    await admin.admin.alter_stream(stream, epoch_grace_ms=GRACE_S * 1000)
    await admin.access.set_quota(reader, requests_per_s=QUOTA)
    now_us = time.time_ns() // 1000
    await write(admin, stream, now_us, now_us + EPOCH_MS * MS)
    first, asked = now_us // (EPOCH_MS * MS), 0
    bounds = Cluster.bounds

    async def counted(self: Cluster, name: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        nonlocal asked
        found = await bounds(self, name, promise=promise)
        asked += 1
        return found

    monkeypatch.setattr(Cluster, "bounds", counted)
    async with await secured.client(reader) as client, asyncio.timeout(WAIT_S):
        begun_s = time.monotonic()
        async with client.epochs(stream, start=first) as epochs:
            found = [(await anext(epochs)) for _ in range(2)]
        took_s = time.monotonic() - begun_s
    assert [epoch.number for epoch in found] == [first, first + 1]
    assert took_s > GRACE_S - 1, "the silent entry is settled a grace behind the clock"
    assert asked <= QUOTA * (took_s + 2), "without a quota it looks twenty times a second"
