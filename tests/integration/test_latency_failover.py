"""Latency constraints on a real ZooKeeper, with two coordinators; the leader is killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kera.client import Client, LatencyConstraint, LatencyDescription, Producer
from kera.core.errors import KeraError, UnknownLatencyConstraint
from kera.local.cluster import LocalCluster
from tests.integration.control_support import connect, control_cluster
from tests.integration.support import until_found
from tests.integration.zookeeper import ZooKeeper

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

WINDOW_MS = 5_000
LIMIT_MS = 2_000
WAITS_S = 0.6
"""Long enough to tell chunks that wait for a constraint from chunks that go at once."""
OWN_LINGER_MS = 300
CONSTRAINTS = 30


@contextlib.asynccontextmanager
async def two_coordinators(directory: Path, zookeeper: ZooKeeper, root: str) -> AsyncIterator[LocalCluster]:
    async with control_cluster(
        directory, brokers=1, backups=0, coordinators=2, zookeeper=f"{zookeeper.address}/{root}"
    ) as cluster:
        yield cluster


async def leader_of(cluster: LocalCluster, client: Client) -> str:
    leader_at = (await client.admin.describe_cluster()).coordinators[0]
    return next(name for name, ready in cluster.ready.items() if ready.get("grpc_address") == leader_at)


async def send(producer: Producer, stream: str, sent: list[tuple[float, float]]) -> None:
    """Send one record after the other until cancelled; keep when each began, and how long it took."""
    while True:
        begun_s = time.monotonic()
        await producer.send(stream, b"x" * 100)
        sent.append((begun_s, time.monotonic() - begun_s))


async def test_advice_stays_and_figures_come_back_when_the_leader_is_lost(tmp_path: Path, zookeeper: ZooKeeper) -> None:
    async with two_coordinators(tmp_path, zookeeper, "late-figures") as cluster, await connect(cluster) as client:
        for stream in ("slow", "broken"):
            await client.admin.create_stream(stream, replication=0)
        made = await client.latency.create("slow", ["slow"], LIMIT_MS, window_ms=WINDOW_MS)
        await client.latency.create("broken", ["broken"], 50, window_ms=WINDOW_MS)
        sent: list[tuple[float, float]] = []
        async with client.producer() as producer, client.producer(linger_ms=OWN_LINGER_MS) as own:
            await producer.prepare("slow")
            await own.prepare("broken")
            sending = [
                asyncio.create_task(send(producer, "slow", sent)),
                asyncio.create_task(send(own, "broken", [])),
            ]
            try:
                await watch_a_failover(cluster, client, made, sent)
            finally:
                for each in sending:
                    each.cancel()


async def watch_a_failover(
    cluster: LocalCluster, client: Client, made: LatencyConstraint, sent: list[tuple[float, float]]
) -> None:
    async def violated(name: str = "broken") -> LatencyDescription | None:
        found = await client.latency.describe(name)
        return found if found.state == "violated" and found.violations else None

    async def held() -> LatencyDescription | None:
        found = await client.latency.describe("slow")
        waits = found.hops[0].mean_us > WAITS_S * 1e6
        return found if found.state == "held" and waits and found.hops[0].advised_us > WAITS_S * 1e6 else None

    async def goes_on() -> bool:
        return any(begun_s > killed_s for begun_s, _ in sent)

    before = await until_found(violated)
    await until_found(held)
    lost = await leader_of(cluster, client)
    sent.clear()
    await cluster.kill(lost)
    killed_s = time.monotonic()
    listed = await client.latency.constraints()  # answered as soon as another coordinator leads
    await until_found(goes_on)
    assert {each.constraint.name for each in listed} == {"slow", "broken"}
    assert next(each for each in listed if each.constraint.name == "slow").constraint == made

    await until_found(held)
    # Also without a coordinator, and with one that has not heard from brokers yet.
    assert min(took_s for _, took_s in sent) > WAITS_S, sent
    again = await until_found(violated)
    windows = (time.monotonic() - killed_s) / (WINDOW_MS / 1000)
    assert 1 <= again.violations <= windows + 1
    assert (again.created_us, again.reason) == (before.created_us, again.reason)
    assert "gather of broken exceeds its share the most; a producer of broken sets linger_ms 300" in again.reason


async def test_changes_while_the_leader_is_killed_are_all_or_nothing(tmp_path: Path, zookeeper: ZooKeeper) -> None:
    async with two_coordinators(tmp_path, zookeeper, "late-changes") as cluster, await connect(cluster) as client:
        await make_some(client)
        lost = await leader_of(cluster, client)
        async with await connect(cluster, retry_timeout_ms=1) as hasty:
            done = [asyncio.create_task(change(hasty, number)) for number in range(CONSTRAINTS)]
            await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
            await cluster.kill(lost)
            outcomes = await asyncio.gather(*done)
        await check_all_that_was_done(client, outcomes)


async def test_changes_while_zookeeper_is_lost_are_all_or_nothing(tmp_path: Path) -> None:
    with ZooKeeper(tmp_path / "zookeeper") as server:
        async with two_coordinators(tmp_path / "kera", server, "late") as cluster, await connect(cluster) as client:
            await make_some(client)
            async with await connect(cluster, retry_timeout_ms=1) as hasty:
                done = [asyncio.create_task(change(hasty, number)) for number in range(CONSTRAINTS)]
                await asyncio.wait(done, return_when=asyncio.FIRST_COMPLETED)
                server.pause()
                try:
                    outcomes = await asyncio.gather(*done)
                finally:
                    server.resume()
            assert not all(all(each) for each in outcomes)
            await check_all_that_was_done(client, outcomes)


async def make_some(client: Client) -> None:
    for number in range(CONSTRAINTS):
        await client.admin.create_stream(f"clicks-{number}", replication=0)
        for kind in ("altered", "deleted"):
            await client.latency.create(
                f"{kind}-{number}", [f"clicks-{number}"], 100, window_ms=window_of(kind, number)
            )


async def check_all_that_was_done(client: Client, outcomes: list[tuple[bool, bool, bool]]) -> None:
    """Check the outcomes, and that a repetition of each change succeeds whatever happened the first time."""
    known = {each.constraint.name: each.constraint for each in await client.latency.constraints()}
    for number, (created, altered, deleted) in enumerate(outcomes):
        one = known.get(f"created-{number}")
        assert one is not None or not created
        assert one is None or (one.limit_ms, one.window_ms) == (200, window_of("created", number))
        other = known[f"altered-{number}"]
        assert (other.limit_ms, other.statistic) in {(500, "p99"), *(() if altered else ((100, "mean"),))}
        assert f"deleted-{number}" not in known or not deleted
    assert all([all(await change(client, number)) for number in range(CONSTRAINTS)])
    assert {each.constraint.name for each in await client.latency.constraints()} == {
        f"{kind}-{number}" for kind in ("created", "altered") for number in range(CONSTRAINTS)
    }


def window_of(kind: str, number: int) -> int:
    """Each constraint has a window of its own, as two must not be equal."""
    return 1_000 * (1 + number) + ("created", "altered", "deleted").index(kind)


async def change(client: Client, number: int) -> tuple[bool, bool, bool]:
    """Create, alter and delete a constraint each; whether each change is certain."""
    latency = client.latency
    return (
        await is_done(
            latency.create(f"created-{number}", [f"clicks-{number}"], 200, window_ms=window_of("created", number))
        ),
        await is_done(latency.alter(f"altered-{number}", limit_ms=500, statistic="p99")),
        await is_done(latency.delete(f"deleted-{number}")),
    )


async def is_done(attempt: object) -> bool:
    try:
        await attempt  # type: ignore[misc]
    except UnknownLatencyConstraint:
        return True  # an earlier attempt has deleted it
    except KeraError as error:
        if not error.retriable:
            raise
        return False
    return True
