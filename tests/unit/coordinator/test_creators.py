"""The creators of streams, and the quotas of streams and descriptions."""

from __future__ import annotations

import asyncio
import re

import pytest

from kera.core.errors import QuotaExceeded, StreamExists, Unavailable
from tests.unit.coordinator.creators_support import ALICE, BOB, DAEMON, ROOT, called_by, create, limit, secure
from tests.unit.coordinator.fake_cluster import Cluster


@pytest.fixture
async def secured(cluster: Cluster) -> Cluster:
    """A cluster with security on, a broker, and quotas of streams."""
    await secure(cluster)
    await cluster.register("a")
    await limit(cluster, "", streams=1)
    await limit(cluster, "alice", streams=2)
    return cluster


async def test_a_stream_keeps_the_name_of_its_creator(secured: Cluster) -> None:
    assert (await create(secured, ALICE, "one")).created_by == "user:alice"
    for number, who in enumerate((DAEMON, None)):
        assert not (await create(secured, who, f"other-{number}")).created_by
    await secured.restart()
    await secured.heartbeat(1)
    assert secured.coordinator.state.catalog.named("one").created_by == "user:alice"
    assert (await secured.alter("one", retention_ms=1000)).created_by == "user:alice"


async def test_a_stream_has_no_creator_without_security(cluster: Cluster) -> None:
    await cluster.register("a")
    assert not (await create(cluster, ALICE, "one")).created_by


async def test_a_creation_beyond_the_quota_of_streams_is_refused(secured: Cluster) -> None:
    for name in ("one", "two"):
        await create(secured, ALICE, name)
    with pytest.raises(QuotaExceeded) as raised:
        await create(secured, ALICE, "three")
    assert raised.value.message == (
        "user:alice has created 2 streams, and its quota of streams is 2; an administrator can raise it:"
        " kera quota set alice --streams MORE"
    )
    assert raised.value.attributes == {"quota": "streams", "value": 2, "principal": "user:alice"}
    assert not secured.coordinator.state.catalog.find(3)
    await secured.restart()
    await secured.heartbeat(1)
    with pytest.raises(QuotaExceeded):
        await create(secured, ALICE, "three")
    await secured.coordinator.streams.delete("one")
    await create(secured, ALICE, "three")
    await limit(secured, "alice", streams=3)
    await create(secured, ALICE, "four")
    with pytest.raises(StreamExists):
        await create(secured, ALICE, "four")


async def test_the_default_quota_applies_to_all_but_super_users_and_daemons(secured: Cluster) -> None:
    await create(secured, BOB, "b")
    with pytest.raises(QuotaExceeded, match="user:bob has created 1 stream, and its quota of streams is 1"):
        await create(secured, BOB, "b-2")
    for who in (ROOT, DAEMON):
        for number in range(3):
            await create(secured, who, f"{who.user}-{number}")


async def test_streams_being_created_count_towards_the_quota(secured: Cluster) -> None:
    secured.brokers.answering.clear()
    tasks = [asyncio.create_task(create(secured, BOB, f"b-{number}")) for number in range(3)]
    done, _ = await asyncio.wait(tasks, timeout=5, return_when=asyncio.FIRST_EXCEPTION)
    assert done
    secured.brokers.answering.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(type(each).__name__ for each in outcomes) == ["QuotaExceeded", "QuotaExceeded", "StreamInfo"]


async def test_a_failed_creation_does_not_count_towards_the_quota(secured: Cluster) -> None:
    secured.brokers.failures[1] = Unavailable("it does not answer")
    with pytest.raises(Unavailable):
        await create(secured, BOB, "b")
    secured.brokers.failures.clear()
    await create(secured, BOB, "b")


async def test_a_repeated_creation_finds_its_own_stream_at_the_quota(secured: Cluster) -> None:
    first = await create(secured, BOB, "b", creation_id="x")
    assert await create(secured, BOB, "b", creation_id="x") == first


async def test_one_user_cannot_use_up_the_room_for_stream_descriptions(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await secure(cluster)
    await cluster.register("a")
    size = (await create(cluster, ALICE, "a-0")).ByteSize()
    catalog = cluster.coordinator.state.catalog
    monkeypatch.setattr(catalog, "_bytes_max", 10 * size)
    await create(cluster, ALICE, "a-1")

    with pytest.raises(QuotaExceeded) as raised:
        await create(cluster, ALICE, "a-2")

    assert re.fullmatch(
        r"user:alice would have descriptions of streams of \d+ bytes, and the share of one principal is \d+; delete"
        r" streams, or create some with fewer streamlets, or have the coordinator run with a larger"
        r" principal_share_percent",
        raised.value.message,
    )
    assert raised.value.attributes == {"quota": "descriptions", "value": 10 * size // 4, "principal": "user:alice"}
    await create(cluster, BOB, "b-0")
    for number in range(3):
        await create(cluster, ROOT, f"r-{number}")
    called_by(ALICE)
    await cluster.alter("a-0", retention_ms=1000)
    with pytest.raises(QuotaExceeded):
        await cluster.alter("a-0", retention_consumer_groups={"names": [f"group-{number:099}" for number in range(10)]})
    await cluster.coordinator.streams.delete("a-1")
    await create(cluster, ALICE, "a-2")
