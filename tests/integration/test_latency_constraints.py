"""Latency constraints in a real cluster: how writers apply them, how they are shown, and how they survive a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from kera.client import Client, LatencyDescription, Producer
from kera.core.base.settings import MIB
from kera.core.errors import InvalidArgument, LatencyConstraintExists, UnknownLatencyConstraint, UnknownStream
from kera.local.cluster import LocalCluster, RunningCluster
from tests.integration.command_line import run_kera
from tests.integration.support import until_found

pytestmark = pytest.mark.timeout(180)

PATH = "clicks, group:enrich, visits, group:dashboard"
READERS = {"clicks": "enrich", "visits": "dashboard"}
LIMIT_MS = 2_500
"""Long enough to tell chunks that wait from chunks that do not, however slow a machine is."""
WAITS_S = 0.9
"""A chunk that takes less did not wait: one of many takes less, even if the machine is busy."""
HEARTBEATS = {"heartbeat_interval_ms": 200, "heartbeats_missed_max": 40}


async def begin(bootstrap: str) -> None:
    """Make two streams, and let a consumer group begin to read each of them."""
    async with await Client.connect(bootstrap) as client:
        for stream, group in READERS.items():
            await client.admin.create_stream(stream)
            async with client.producer() as producer:
                await producer.prepare(stream)
                await producer.send(stream, b"first")
            async with client.group_consumer(group, [stream]) as consumer:
                async for _ in consumer.batches():
                    break


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    """A cluster whose streams tests share; each test deletes its own constraints."""
    with LocalCluster.running(brokers=1, arena_bytes=32 * MIB, coordinator_settings=HEARTBEATS) as running:
        asyncio.run(begin(running.bootstrap))
        yield running


@pytest.fixture
async def client(cluster: RunningCluster) -> AsyncIterator[Client]:
    async with await Client.connect(cluster.bootstrap) as client:
        yield client
        for each in await client.latency.constraints():
            await client.latency.delete(each.constraint.name)


async def acknowledged_s(producer: Producer, stream: str = "clicks") -> float:
    """How long a single record takes."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await producer.send(stream, b"x" * 100)
    return loop.time() - begun_s


async def until_it_takes(producer: Producer, least_s: float, most_s: float) -> None:
    async def look() -> bool:
        return least_s <= await acknowledged_s(producer) <= most_s

    await until_found(look)


def kera(cluster: RunningCluster, *arguments: str) -> str:
    """The output of a command that succeeds."""
    done = run_kera("latency", *arguments, "-b", cluster.bootstrap)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


async def test_writers_let_chunks_fill_for_as_long_as_a_constraint_allows(client: Client) -> None:
    async with client.producer() as producer:
        await producer.prepare("clicks")
        await until_it_takes(producer, 0, WAITS_S)
        await client.latency.create("arrival", ["clicks"], 100, window_ms=1_000)
        await client.latency.alter("arrival", limit_ms=LIMIT_MS)
        await until_it_takes(producer, WAITS_S, LIMIT_MS / 1000)

        async def measured() -> LatencyDescription | None:
            found = await client.latency.describe("arrival")
            return found if found.hops[0].mean_us > WAITS_S * 1e6 and found.hops[1].chunks else None

        sending = asyncio.create_task(until_it_takes(producer, LIMIT_MS, LIMIT_MS))  # it never ends
        found = await until_found(measured)
        sending.cancel()
        gather = found.hops[0]
        assert (gather.stream, gather.hop, found.state) == ("clicks", "gather", "held")
        assert gather.advised_us > WAITS_S * 1e6
        assert found.mean_us <= LIMIT_MS * 1000

        await client.latency.delete("arrival")
        await until_it_takes(producer, 0, WAITS_S)


@pytest.mark.slow
async def test_the_reason_names_a_producer_whose_linger_breaks_the_constraint(client: Client) -> None:
    await client.latency.create("arrival", ["clicks"], 100, window_ms=1_000)
    async with client.producer(linger_ms=400) as producer:
        await producer.prepare("clicks")

        async def broken() -> LatencyDescription | None:
            await producer.send("clicks", b"x")
            found = await client.latency.describe("arrival")
            return found if "linger_ms" in found.reason else None

        found = await until_found(broken)
    assert found.state == "violated"
    assert "; a producer of clicks sets linger_ms 400 itself, which overrides the constraint" in found.reason
    assert found.hops[0].own_linger_us == 400_000


async def test_a_hanging_application_violates_its_constraint(client: Client) -> None:
    """This includes records that were taken or had arrived before its consumer learned of the constraint."""
    async with client.group_consumer("enrich", ["clicks"]) as consumer, client.producer() as producer:
        await producer.prepare("clicks")
        batches = consumer.batches()
        await producer.send("clicks", b"x")
        await anext(batches)
        await client.latency.create("hangs", ["clicks", "group:enrich"], 500, window_ms=1_000)

        async def late() -> LatencyDescription | None:
            await producer.send("clicks", b"x")
            found = await client.latency.describe("hangs")
            slow = {hop.hop for hop in found.hops if hop.mean_us > 2e6}
            return found if slow >= {"prefetch", "work"} and found.state in {"violated", "infeasible"} else None

        await until_found(late)


@pytest.mark.slow
async def test_the_reason_names_a_consumer_group_that_does_not_run(client: Client) -> None:
    await client.latency.create("idle", ["clicks", "group:enrich"], LIMIT_MS, window_ms=1_000)
    async with client.producer() as producer:
        await producer.prepare("clicks")

        async def named() -> LatencyDescription | None:
            await producer.send("clicks", b"x")
            found = await client.latency.describe("idle")
            return found if "nothing was measured of group:enrich, which reads clicks" in found.reason else None

        await until_found(named)


def test_the_command_line_creates_shows_alters_and_deletes_constraints(cluster: RunningCluster) -> None:
    made = kera(cluster, "create", "shown", "--path", PATH, "--limit", "300ms", "--p99")
    assert made == f"shown: {PATH} within 300 ms, for the 99th percentile over 15 s\n"
    assert "shown" in kera(cluster, "list")
    altered = kera(cluster, "alter", "shown", "--window", "1min", "--mean")
    assert altered == f"shown: {PATH} within 300 ms, for the mean over 60 s\n"
    told = json.loads(kera(cluster, "describe", "shown", "--json"))
    assert (told["path"], told["limit_ms"], told["window_ms"]) == (PATH.split(", "), 300.0, 60_000)
    assert len(told["hops"]) == 12
    first, *_ = kera(cluster, "describe", "shown").splitlines()
    assert first.split() == ["constraint", "shown"]
    assert kera(cluster, "delete", "shown", "--yes") == "deleted shown\n"
    assert json.loads(kera(cluster, "list", "--json")) == []


async def test_the_error_for_an_invalid_path_or_name_says_what_is_wrong(client: Client) -> None:
    create = client.latency.create
    with pytest.raises(UnknownStream, match="no stream 'orders'"):
        await create("c", ["orders"], 100)
    with pytest.raises(InvalidArgument, match="no consumer group 'nobody'"):
        await create("c", ["clicks", "group:nobody"], 100)
    with pytest.raises(InvalidArgument, match="'dashboard' does not read 'clicks'"):
        await create("c", ["clicks", "group:dashboard"], 100)
    with pytest.raises(InvalidArgument, match="would be a cycle"):
        await create("c", ["clicks", "group:enrich", "clicks"], 100)
    await create("c", ["clicks", "group:enrich", "visits"], 100)
    with pytest.raises(LatencyConstraintExists):
        await create("c", ["clicks"], 100)
    with pytest.raises(InvalidArgument, match="'c' is about the same path"):
        await create("d", ["clicks", "group:enrich", "visits"], 200)
    with pytest.raises(UnknownLatencyConstraint):
        await client.latency.describe("d")


async def test_constraints_survive_a_coordinator_restart_and_break_with_their_streams() -> None:
    async with LocalCluster(brokers=1, arena_bytes=32 * MIB, coordinator_settings=HEARTBEATS) as cluster:
        await begin(cluster.bootstrap)
        async with await Client.connect(cluster.bootstrap) as client:
            await outlast(cluster, client)


async def outlast(cluster: LocalCluster, client: Client) -> None:
    made = await client.latency.create("checkout", PATH.split(", "), 2_000, window_ms=1_000)
    async with client.producer() as producer:
        await producer.prepare("clicks")
        await until_it_takes(producer, 0.2, 2.0)
        await cluster.kill("coordinator")
        await cluster.restart("coordinator")
        assert (await client.latency.describe("checkout")).constraint == made

        async def advised() -> bool:
            return (await client.latency.describe("checkout")).hops[0].advised_us > 0

        await until_found(advised)
        await until_it_takes(producer, 0.2, 2.0)
    await client.admin.delete_stream("visits")
    found = await client.latency.describe("checkout")
    assert (found.state, found.reason[:30]) == ("broken", "stream 'visits' does not exist")
