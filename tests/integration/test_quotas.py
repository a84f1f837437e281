"""A cluster with security on whose users have quotas: exceeding a rate slows a user down, exceeding a limit is refused.

Traffic of several seconds is compared with a multiple of the rate, which no slow machine exceeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from kera.client import Client, Consumer, Producer
from kera.client.admin.quotas import Quota
from kera.client.producing.open_chunks.accumulator import Pending
from kera.core.access.rights import Operation
from kera.core.errors import InvalidArgument, NotAllowed, QuotaExceeded, Uncertain, UnknownUser
from tests.integration.secured_cluster import Secured
from tests.integration.support import until, until_found

pytestmark = pytest.mark.timeout(180)

Transport = Literal["tcp", "grpc"]
EACH_TRANSPORT = pytest.mark.parametrize("transport", ["tcp", pytest.param("grpc", marks=pytest.mark.slow)])
QUOTA = 1 << 20
"""Bytes per second; without it, a client writes and reads a hundred times as much."""
MEASURED_S = 2.5
VALUE = random.Random(7).randbytes(100_000)
WRITERS = 30
RECORDS = 200


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path_factory.mktemp("quotas"), stack, brokers=1, backups=0, replication=0)
        asyncio.run(secured.make_user("admin"))
        yield secured


@pytest.fixture
async def admin(secured: Secured) -> AsyncIterator[Client]:
    async with await secured.client("admin") as client:
        yield client


_numbers = itertools.count(1)


@pytest.fixture
async def user(secured: Secured) -> str:
    """A user that may write, read and create streams whose names begin with its own."""
    name = f"user-{next(_numbers)}"
    await secured.make_user(name)
    await secured.grant(f"user:{name}", f"stream:{name}*", Operation.READ, Operation.WRITE, Operation.CREATE)
    return name


class Writing:
    """A writer at full speed."""

    def __init__(self, producer: Producer, stream: str) -> None:
        self._producer = producer
        self._stream = stream
        self.acknowledged = 0
        """Acknowledged bytes."""

    async def run(self) -> None:
        await self._producer.prepare(self._stream)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(WRITERS):
                tasks.create_task(self._write())

    async def _write(self) -> None:
        while True:
            await self._producer.send(self._stream, VALUE)
            self.acknowledged += len(VALUE)


class Reading:
    """A reader at full speed."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.read = 0
        """Bytes read."""

    async def run(self) -> None:
        async for chunk in self._consumer.batches():
            self.read += chunk.header.chunk_bytes


async def rate_of(count: Callable[[], int], measured_s: float = MEASURED_S, least: float = 0.0) -> float:
    """The growth of a count per second; it is measured until the count has grown by `least`."""
    begun_s, begun = time.monotonic(), count()
    await until(lambda: time.monotonic() >= begun_s + measured_s and count() >= begun + least)
    return (count() - begun) / (time.monotonic() - begun_s)


@contextlib.asynccontextmanager
async def running(work: Writing | Reading) -> AsyncIterator[None]:
    task = asyncio.create_task(work.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@EACH_TRANSPORT
async def test_a_greedy_writer_is_limited_to_its_quota(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    await admin.admin.create_stream(user, streamlets=4)
    await admin.access.set_quota(user, bytes_in_per_s=QUOTA)
    async with (
        await secured.client(user, transport=transport) as client,
        client.producer() as producer,
    ):
        writing = Writing(producer, user)
        async with running(writing):
            await until(lambda: producer.throttled_ms > 0)
            rate = await rate_of(lambda: writing.acknowledged, least=MEASURED_S * QUOTA / 4)
            await until(lambda: producer.throttled_ms > MEASURED_S * 250)
        assert rate < QUOTA * 2
        await producer.close(flush=False)


@EACH_TRANSPORT
async def test_a_greedy_reader_is_limited_to_its_quota(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    await admin.admin.create_stream(user, streamlets=4)
    async with admin.producer() as producer:
        await producer.prepare(user)
        for _ in range(RECORDS):
            producer.send(user, VALUE)
    await admin.access.set_quota(user, bytes_out_per_s=QUOTA)
    async with (
        await secured.client(user, transport=transport) as client,
        client.consumer(user, start="earliest", shared_memory="never") as consumer,
    ):
        reading = Reading(consumer)
        async with running(reading):
            await until(lambda: consumer.throttled_ms > 0)
            rate = await rate_of(lambda: reading.read, least=MEASURED_S * QUOTA / 4)
            await until(lambda: consumer.throttled_ms > MEASURED_S * 250)
        assert rate < QUOTA * 2
        await admin.access.set_quota(user)
        async with running(reading):
            await until(lambda: reading.read >= RECORDS * len(VALUE))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
async def test_a_changed_quota_applies_at_once_without_ending_connections(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    await admin.admin.create_stream(user, streamlets=2)
    await admin.access.set_quota(user, bytes_in_per_s=QUOTA // 4)
    async with (
        await secured.client(user, transport=transport) as client,
        client.producer() as producer,
    ):
        writing = Writing(producer, user)
        async with running(writing):
            await until(lambda: producer.throttled_ms > 0)
            slow = await rate_of(lambda: writing.acknowledged)
            assert not (await admin.access.set_quota(user, bytes_in_per_s=QUOTA * 8)).untold
            fast = await rate_of(lambda: writing.acknowledged, 1.0, least=4 * QUOTA)
            await admin.access.set_quota(user)
            throttled_ms = producer.throttled_ms
            before = writing.acknowledged
            await until(lambda: writing.acknowledged > before + 20 * QUOTA)
        assert slow < QUOTA
        assert fast > slow
        assert producer.throttled_ms < throttled_ms + 3000  # requests that were under way
        await producer.close(flush=False)


async def test_a_user_over_its_quota_does_not_slow_others(secured: Secured, admin: Client, user: str) -> None:
    await admin.admin.create_stream(user, streamlets=1)
    await admin.access.set_quota(user, requests_per_s=1, bytes_in_per_s=1)
    async with (
        await secured.client(user, transport="tcp") as client,
        client.producer() as greedy,
        admin.producer() as producer,
    ):
        await greedy.prepare(user)
        await producer.prepare(user)
        held_back = greedy.send(user, VALUE)
        others = 0
        while not held_back.done():
            await producer.send(user, b"small")
            others += 1
        await held_back
        assert greedy.throttled_ms > 0
        assert others > 1
        assert not producer.throttled_ms


@EACH_TRANSPORT
async def test_small_requests_count_against_the_quota(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    """Over frames, the native core handles them without the handlers as long as the quota lasts."""
    await admin.admin.create_stream(user, streamlets=1)
    await admin.access.set_quota(user, requests_per_s=40)
    async with await secured.client(user, transport=transport) as client, client.producer() as producer:
        await producer.prepare(user)
        acknowledged = 0

        async def write() -> None:
            nonlocal acknowledged
            while True:
                await producer.send(user, b"small")
                acknowledged += 1

        task = asyncio.create_task(write())
        await until(lambda: producer.throttled_ms > 0)
        rate = await rate_of(lambda: acknowledged, 1.0, least=40)
        task.cancel()
        assert rate < 80


async def test_concurrent_requests_to_the_coordinator_do_not_exceed_the_quota(
    secured: Secured, admin: Client, user: str
) -> None:
    await admin.admin.create_stream(user, streamlets=1)
    await admin.access.set_quota(user, requests_per_s=5)
    async with await secured.client(user) as client:
        begun_s = time.monotonic()
        await asyncio.gather(*(client.admin.list_streams() for _ in range(14)))
        assert time.monotonic() - begun_s >= 1.5


async def test_one_stream_too_many_is_refused(secured: Secured, admin: Client, user: str) -> None:
    await admin.access.set_quota(user, streams=2)
    async with await secured.client(user) as client:
        for number in range(2):
            await client.admin.create_stream(f"{user}-{number}", streamlets=1)
        with pytest.raises(QuotaExceeded) as raised:
            await client.admin.create_stream(f"{user}-2", streamlets=1)
        assert raised.value.message == (
            f"user:{user} has created 2 streams, and its quota of streams is 2; an administrator can raise it:"
            f" kera quota set {user} --streams MORE"
        )
        assert (await client.describe(f"{user}-0")).created_by == f"user:{user}"
        await admin.admin.create_stream(f"{user}-of-admin", streamlets=1)
        await admin.admin.delete_stream(f"{user}-0")
        await client.admin.create_stream(f"{user}-2", streamlets=1)


async def refused(producer: Producer, stream: str, streamlet: int | None = None) -> QuotaExceeded:
    """The refusal of a stream that takes no more; it comes with the next heartbeat or the one after that."""
    await producer.prepare(stream)

    async def refusal() -> QuotaExceeded | None:
        try:
            await producer.send(stream, VALUE, streamlet=streamlet)
        except QuotaExceeded as error:
            return error
        except Uncertain:
            return None  # the connection of the request was lost
        return None

    return await until_found(refusal)


async def taken(producer: Producer, stream: str) -> None:
    """Wait until a stream takes chunks again."""

    async def is_taken() -> bool:
        try:
            await producer.send(stream, VALUE)
        except QuotaExceeded:
            return False
        return True

    await until_found(is_taken)


@EACH_TRANSPORT
async def test_streams_of_a_user_over_its_quota_of_stored_bytes_refuse_records(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    """This holds for every writer, until something is deleted or the quota grows."""
    first, second = f"{user}-first", f"{user}-second"
    await admin.access.set_quota(user, stored_bytes=10 * len(VALUE))
    async with (
        await secured.client(user, transport=transport) as client,
        client.producer() as producer,
        admin.producer() as other,
    ):
        for name in (first, second):
            await client.admin.create_stream(name, streamlets=2)
        error = await refused(producer, first)
        assert error.attributes == {"quota": "stored_bytes", "value": 10 * len(VALUE), "principal": f"user:{user}"}
        assert error.message.startswith(f"user:{user} has stored ")
        assert error.message.endswith(
            f" bytes in its streams, as {first!r}, and its quota of stored bytes is {10 * len(VALUE)}; an"
            f" administrator can raise it: kera quota set {user} --stored-bytes MORE"
        )
        await producer.prepare(second)
        with pytest.raises(QuotaExceeded, match=f"user:{user} has stored"):
            await producer.send(second, VALUE)
        await other.prepare(first)
        with pytest.raises(QuotaExceeded, match=f"user:{user} has stored"):
            await other.send(first, VALUE)
        with pytest.raises(QuotaExceeded, match=f"user:{user} has stored"):
            await client.admin.create_stream(f"{user}-third", streamlets=1)
        await admin.admin.create_stream(f"{user}-of-admin", streamlets=1)
        await producer.prepare(f"{user}-of-admin")
        await producer.send(f"{user}-of-admin", VALUE)
        await admin.admin.delete_stream(first)
        await taken(producer, second)
        await admin.access.set_quota(user, stored_bytes=1)  # less than is stored
        await refused(producer, second)
        assert [record.value async for record in client.consumer(second, start="earliest", end="latest")]
        await admin.access.set_quota(user)
        await taken(producer, second)
        for each in (producer, other):
            await each.close(flush=False)


@pytest.mark.slow
async def test_refused_records_are_not_stored_and_acknowledged_ones_are_stored_once(
    secured: Secured, admin: Client, user: str
) -> None:
    """This holds although many requests are under way when the streams become full, and when they have room again."""
    outcomes: dict[bytes, bool] = {}
    recent = deque[bool](maxlen=100)

    async def outcome_of(value: bytes, sent: Pending) -> None:
        try:
            await sent
        except QuotaExceeded:
            outcomes[value] = False
        else:
            outcomes[value] = True
        recent.append(outcomes[value])

    async with await secured.client(user, transport="tcp") as client, client.producer(linger_ms=0) as producer:
        await client.admin.create_stream(user, streamlets=2)
        await producer.prepare(user)

        room = asyncio.Semaphore(50)

        def all_are(*, taken: bool) -> bool:
            return len(recent) == 100 and set(recent) == {taken}

        async def write() -> None:
            async with asyncio.TaskGroup() as tasks:
                for number in itertools.count():
                    await room.acquire()
                    if is_over:
                        return
                    value = b"%d:" % number + VALUE[: 1 + number % 1000]
                    task = tasks.create_task(outcome_of(value, producer.send(user, value)))
                    task.add_done_callback(lambda _: room.release())

        is_over = False
        writing = asyncio.create_task(write())
        for number in range(4):
            await admin.access.set_quota(user, stored_bytes=None if number % 2 else 0)
            await until(partial(all_are, taken=bool(number % 2)))
        is_over = True
        await writing
        await producer.close(flush=False)
        found = [each.value async for each in client.consumer(user, start="earliest", end="latest")]
    assert len(found) == len(set(found))
    assert set(found) == {value for value, taken in outcomes.items() if taken}


async def test_retention_makes_room_for_a_user_over_its_quota(secured: Secured, admin: Client, user: str) -> None:
    await admin.access.set_quota(user, stored_bytes=5 << 20)
    async with await secured.client(user) as client, client.producer() as producer:
        await client.admin.create_stream(user, streamlets=1, entries=1)
        await refused(producer, user)
        await admin.admin.alter_stream(user, retention_bytes=2 << 20)
        await taken(producer, user)
        await producer.close(flush=False)


@EACH_TRANSPORT
async def test_one_connection_too_many_is_refused(
    secured: Secured, admin: Client, user: str, transport: Transport
) -> None:
    await admin.admin.create_stream(user, streamlets=1)
    await admin.access.set_quota(user, connections=1)
    async with (
        await secured.client(user, transport=transport) as first,
        await secured.client(user, transport=transport, retry_timeout_ms=10_000) as second,
        first.producer() as producer,
    ):
        await producer.prepare(user)
        await producer.send(user, VALUE)
        async with second.producer() as other:
            await other.prepare(user)
            other.send(user, VALUE)
            with pytest.raises(QuotaExceeded, match=f"user:{user} has 1 connection to this daemon"):
                await other.flush()
            await admin.access.set_quota(user, connections=2)
            await other.send(user, VALUE)
            await producer.send(user, VALUE)


async def test_the_default_quota_applies_to_users_without_their_own(secured: Secured, admin: Client, user: str) -> None:
    try:
        await admin.access.set_default_quota(streams=0)
        async with await secured.client(user) as client:
            with pytest.raises(QuotaExceeded, match="its quota of streams is 0"):
                await client.admin.create_stream(user, streamlets=1)
            await admin.access.set_quota(user, connections=10)
            await client.admin.create_stream(user, streamlets=1)
        await admin.admin.create_stream(f"{user}-of-admin", streamlets=1)  # a super user has no quota
        assert await admin.access.default_quota() == Quota(streams=0)
        quotas = {each.name: each.quota for each in await admin.access.users()}
        assert quotas[user] == Quota(connections=10)
        assert not quotas["admin"]
    finally:
        await admin.access.set_default_quota()


async def test_only_administrators_set_quotas(secured: Secured, admin: Client, user: str) -> None:
    async with await secured.client(user) as client:
        with pytest.raises(NotAllowed):
            await client.access.set_quota(user)
        with pytest.raises(NotAllowed):
            await client.access.set_default_quota()
    with pytest.raises(UnknownUser, match="kera user create makes one"):
        await admin.access.set_quota("nobody-here", streams=1)
    with pytest.raises(InvalidArgument):
        await admin.access.set_quota("admin", bytes_in_per_s=0)


async def test_quotas_survive_restarts_of_the_coordinator_and_brokers(
    secured: Secured, admin: Client, user: str
) -> None:
    """A rate still slows its user down, and a user that has stored too much is still refused."""
    full = f"{user}-full"
    await secured.make_user(full)
    await secured.grant(f"user:{full}", f"stream:{full}", Operation.READ, Operation.WRITE, Operation.CREATE)
    await admin.admin.create_stream(user, streamlets=1)
    await admin.access.set_quota(user, bytes_in_per_s=1000)
    await admin.access.set_quota(full, stored_bytes=10 * len(VALUE))
    async with await secured.client(full) as client, client.producer() as producer:
        await client.admin.create_stream(full, streamlets=1)
        await refused(producer, full)
        for name in ("coordinator", "broker-1"):
            secured.cluster.restart(name)
        await refused(producer, full)
        await producer.close(flush=False)
    async with (
        await secured.client(user) as client,
        client.producer() as producer,
    ):
        await producer.prepare(user)
        await producer.send(user, VALUE)
        assert producer.throttled_ms > 0


@pytest.mark.slow
async def test_a_user_over_its_quota_of_stored_bytes_is_still_refused_after_restarts(
    secured: Secured, admin: Client, user: str
) -> None:
    await admin.access.set_quota(user, stored_bytes=10 * len(VALUE))
    async with await secured.client(user) as client, client.producer() as producer:
        await client.admin.create_stream(user, streamlets=1)
        await refused(producer, user)
        for names in (["coordinator"], ["broker-1"], ["coordinator", "broker-1"]):
            for name in names:
                secured.cluster.restart(name)
            await refused(producer, user)
        await producer.close(flush=False)
        assert sum([len(each.value or b"") async for each in client.consumer(user, start="earliest", end="latest")])


@pytest.mark.slow
async def test_brokers_take_no_more_while_a_restarted_coordinator_counts_stored_bytes(tmp_path: Path) -> None:
    """The bytes of each broker are within the quota, and only their sum exceeds it."""
    with contextlib.ExitStack() as stack:
        secured = Secured(tmp_path, stack, brokers=2, backups=0, replication=0)
        for name in ("admin", "alice"):
            await secured.make_user(name)
        await secured.grant("user:alice", "stream:alice*", Operation.READ, Operation.WRITE, Operation.CREATE)
        async with (
            await secured.client("admin") as admin,
            await secured.client("alice") as client,
            client.producer() as producer,
        ):
            await client.admin.create_stream("alice", streamlets=2)
            await producer.prepare("alice")
            for number in range(20):
                await producer.send("alice", VALUE, streamlet=number % 2)
            await admin.access.set_quota("alice", stored_bytes=15 * len(VALUE))
            await rate_of(lambda: 0)  # the bytes until both brokers know the quota would exceed it on one alone
            for streamlet in range(2):
                await refused(producer, "alice", streamlet)
            taken = 0

            async def probe(streamlet: int) -> None:
                nonlocal taken
                while True:
                    with contextlib.suppress(QuotaExceeded):
                        await producer.send("alice", VALUE, streamlet=streamlet)
                        taken += 1

            tasks = [asyncio.create_task(probe(streamlet)) for streamlet in range(2)]
            await asyncio.to_thread(secured.cluster.restart, "coordinator")
            await admin.admin.list_streams()
            await rate_of(lambda: taken)
            for task in tasks:
                assert not task.done(), task
                task.cancel()
            await asyncio.wait(tasks)
            assert not taken
            await producer.close(flush=False)
