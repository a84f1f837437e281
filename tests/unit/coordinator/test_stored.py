"""What is stored of each principal's streams, as brokers tell, and who is told that its quota is used up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry

from kera.coordinator.metrics import CoordinatorMetrics
from kera.core.errors import InvalidArgument, QuotaExceeded
from kera.server.monitoring.access import PRINCIPALS_MAX
from kera.v1 import access_pb2, coordinator_pb2
from tests.metrics import shown
from tests.unit.coordinator.creators_support import ALICE, ROOT, called_by, create, limit, secure
from tests.unit.coordinator.fake_cluster import Cluster

FIRST, SECOND = 1, 2


@pytest.fixture
async def secured(cluster: Cluster) -> Cluster:
    """With security on, and two brokers that have nothing."""
    await secure(cluster, "user:root")
    await cluster.register("a")
    await cluster.register("b")
    for broker_id in (FIRST, SECOND):
        await tell(cluster, broker_id)
    return cluster


async def tell(cluster: Cluster, broker_id: int, **stored: int) -> coordinator_pb2.HeartbeatResponse:
    """A heartbeat of a broker that has something of users' streams."""
    return await tell_some(cluster, broker_id, stored, incomplete=False)


async def tell_some(
    cluster: Cluster, broker_id: int, stored: Mapping[str, int], *, incomplete: bool = True
) -> coordinator_pb2.HeartbeatResponse:
    """The same of one that has not looked at all that it has."""
    request = coordinator_pb2.HeartbeatRequest(
        broker_id=broker_id,
        broker_epoch=cluster.coordinator.state.brokers.epoch(broker_id),
        stored=[coordinator_pb2.StoredBytes(principal=f"user:{name}", bytes=size) for name, size in stored.items()],
        stored_incomplete=incomplete,
    )
    return await cluster.coordinator.members.heartbeat(request)


def full(answer: coordinator_pb2.HeartbeatResponse) -> dict[str, tuple[int, int]]:
    assert not answer.full_principals_incomplete
    return {each.principal: (each.stored_bytes, each.quota_bytes) for each in answer.full_principals}


async def test_what_all_brokers_have_counts(secured: Cluster) -> None:
    await limit(secured, "alice", stored_bytes=1000)
    assert full(await tell(secured, FIRST, alice=600, bob=9000)) == {}
    assert full(await tell(secured, SECOND, alice=400)) == {"user:alice": (1000, 1000)}
    assert full(await tell(secured, FIRST, alice=700, bob=9000)) == {"user:alice": (1100, 1000)}
    assert secured.coordinator.stored.most(1) == [("user:bob", 9000)]
    assert full(await tell(secured, SECOND, alice=0)) == {}
    assert full(await tell(secured, FIRST, alice=700)) == {}
    assert secured.coordinator.stored.most(10) == [("user:alice", 700)]


async def test_another_quota_holds_from_the_next_heartbeat_on(secured: Cluster) -> None:
    assert full(await tell(secured, FIRST, alice=600)) == {}
    await limit(secured, "alice", stored_bytes=500)
    assert full(await tell(secured, FIRST, alice=600)) == {"user:alice": (600, 500)}
    await limit(secured, "alice", stored_bytes=601)
    assert full(await tell(secured, FIRST, alice=600)) == {}
    await limit(secured, "alice", stored_bytes=0)
    assert full(await tell(secured, FIRST, alice=0)) == {"user:alice": (0, 0)}
    await limit(secured, "alice", stored_bytes=(1 << 64) - 1)
    assert full(await tell(secured, FIRST, alice=1 << 63)) == {}
    assert full(await tell(secured, SECOND, alice=1 << 63)) == {"user:alice": ((1 << 64) - 1, (1 << 64) - 1)}


async def test_who_has_no_quota_of_its_own_goes_by_the_default_one(secured: Cluster) -> None:
    await limit(secured, "", stored_bytes=10)
    assert full(await tell(secured, FIRST, alice=600, root=600)) == {"user:alice": (600, 10)}
    await limit(secured, "alice", streams=5)
    assert full(await tell(secured, FIRST, alice=600, root=600)) == {}
    called_by(ROOT)
    await secured.coordinator.access.delete_user(access_pb2.DeleteUserRequest(name="alice"))
    assert full(await tell(secured, FIRST, alice=600)) == {"user:alice": (600, 10)}
    await limit(secured, "alice", stored_bytes=1000)  # one that is made anew has what the earlier one had
    assert full(await tell(secured, FIRST, alice=600)) == {}
    assert full(await tell(secured, FIRST, alice=1000)) == {"user:alice": (1000, 1000)}


async def test_who_has_too_much_creates_no_streams(secured: Cluster) -> None:
    await limit(secured, "alice", stored_bytes=1000)
    await tell(secured, FIRST, alice=999)
    await create(secured, ALICE, "one")
    await tell(secured, SECOND, alice=1)
    with pytest.raises(QuotaExceeded) as raised:
        await create(secured, ALICE, "two")
    assert raised.value.message == (
        "user:alice has stored 1000 bytes in its streams, and its quota of stored bytes is 1000; an administrator can"
        " raise it: kera quota set alice --stored-bytes MORE"
    )
    await create(secured, ROOT, "of-root")
    await tell(secured, SECOND)
    await create(secured, ALICE, "two")


async def test_a_coordinator_that_has_just_begun_knows_when_all_have_told(secured: Cluster) -> None:
    """Until then it says who is full for sure, and that others may be."""
    await limit(secured, "alice", stored_bytes=1000)
    await limit(secured, "bob", stored_bytes=1000)
    await secured.restart()
    answer = await tell(secured, FIRST, alice=600, bob=1200)
    assert answer.full_principals_incomplete
    assert [each.principal for each in answer.full_principals] == ["user:bob"]
    answer = await tell_some(secured, SECOND, {"alice": 400})
    assert answer.full_principals_incomplete
    assert [each.principal for each in answer.full_principals] == ["user:alice"]
    assert full(await tell(secured, SECOND, alice=500)) == {"user:alice": (1100, 1000)}


async def test_what_a_broker_has_had_counts_for_as_long_as_it_is_there(secured: Cluster) -> None:
    await limit(secured, "alice", stored_bytes=1000)
    await tell(secured, FIRST, alice=600)
    assert full(await tell(secured, SECOND, alice=600)) == {"user:alice": (1200, 1000)}
    await secured.register("a-again", FIRST)
    answer = await tell(secured, SECOND, alice=600)
    assert (len(answer.full_principals), answer.full_principals_incomplete) == (0, True)
    assert full(await tell(secured, FIRST, alice=600)) == {"user:alice": (1200, 1000)}
    secured.coordinator.state.brokers.declare_dead(FIRST)
    assert secured.coordinator.stored.of("user:alice") == 600
    assert full(await tell(secured, SECOND, alice=600)) == {}


async def test_metrics_have_those_who_have_the_most(secured: Cluster) -> None:
    await tell(secured, FIRST, **{f"user_{number}": number for number in range(1, PRINCIPALS_MAX + 3)})
    await tell(secured, SECOND, user_9=1000)
    metrics = CoordinatorMetrics(CollectorRegistry())
    with metrics.leading(secured.coordinator):
        text = shown(metrics)
    assert 'kera_principal_stored_bytes{principal="user:user_9"} 1009.0' in text
    assert text.count("kera_principal_stored_bytes{") == PRINCIPALS_MAX
    assert 'principal="user:user_1"' not in text


async def test_without_security_nobody_has_a_quota(cluster: Cluster) -> None:
    await cluster.register("a")
    assert full(await tell(cluster, FIRST, alice=1 << 40)) == {}


async def test_a_heartbeat_tells_of_so_many_principals_at_most(secured: Cluster) -> None:
    with pytest.raises(InvalidArgument, match="4096 stored, not 4097"):
        await secured.heartbeat(FIRST, stored=[coordinator_pb2.StoredBytes(principal="user:alice")] * 4097)
