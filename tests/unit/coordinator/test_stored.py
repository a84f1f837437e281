"""Stored bytes of each principal, as brokers report them, and the principals that are over their quotas."""

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
    """A cluster with security on, and two brokers that have reported no bytes."""
    await secure(cluster, "user:root")
    await cluster.register("a")
    await cluster.register("b")
    for broker_id in (FIRST, SECOND):
        await tell(cluster, broker_id)
    return cluster


async def tell(cluster: Cluster, broker_id: int, **stored: int) -> coordinator_pb2.HeartbeatResponse:
    """Send a heartbeat of a broker with the stored bytes of users."""
    return await tell_some(cluster, broker_id, stored, incomplete=False)


async def tell_some(
    cluster: Cluster, broker_id: int, stored: Mapping[str, int], *, incomplete: bool = True
) -> coordinator_pb2.HeartbeatResponse:
    """Send the same heartbeat of a broker that has not counted all of its bytes yet."""
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


async def test_stored_bytes_are_the_sum_over_all_brokers(secured: Cluster) -> None:
    await limit(secured, "alice", stored_bytes=1000)
    assert full(await tell(secured, FIRST, alice=600, bob=9000)) == {}
    assert full(await tell(secured, SECOND, alice=400)) == {"user:alice": (1000, 1000)}
    assert full(await tell(secured, FIRST, alice=700, bob=9000)) == {"user:alice": (1100, 1000)}
    assert secured.coordinator.stored.most(1) == [("user:bob", 9000)]
    assert full(await tell(secured, SECOND, alice=0)) == {}
    assert full(await tell(secured, FIRST, alice=700)) == {}
    assert secured.coordinator.stored.most(10) == [("user:alice", 700)]


async def test_a_changed_quota_takes_effect_with_the_next_heartbeat(secured: Cluster) -> None:
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


async def test_users_without_their_own_quota_have_the_default_quota(secured: Cluster) -> None:
    await limit(secured, "", stored_bytes=10)
    assert full(await tell(secured, FIRST, alice=600, root=600)) == {"user:alice": (600, 10)}
    await limit(secured, "alice", streams=5)
    assert full(await tell(secured, FIRST, alice=600, root=600)) == {}
    called_by(ROOT)
    await secured.coordinator.access.delete_user(access_pb2.DeleteUserRequest(name="alice"))
    assert full(await tell(secured, FIRST, alice=600)) == {"user:alice": (600, 10)}
    await limit(secured, "alice", stored_bytes=1000)  # a new user of the same name has the earlier one's bytes
    assert full(await tell(secured, FIRST, alice=600)) == {}
    assert full(await tell(secured, FIRST, alice=1000)) == {"user:alice": (1000, 1000)}


async def test_a_user_over_its_quota_of_stored_bytes_cannot_create_streams(secured: Cluster) -> None:
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


async def test_full_principals_are_incomplete_until_all_brokers_have_reported(secured: Cluster) -> None:
    """Until then the coordinator names the principals that are surely full, and says that others may be."""
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


async def test_the_stored_bytes_of_a_broker_count_while_it_is_alive(secured: Cluster) -> None:
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


async def test_metrics_show_the_principals_with_the_most_stored_bytes(secured: Cluster) -> None:
    await tell(secured, FIRST, **{f"user_{number}": number for number in range(1, PRINCIPALS_MAX + 3)})
    await tell(secured, SECOND, user_9=1000)
    metrics = CoordinatorMetrics(CollectorRegistry())
    with metrics.leading(secured.coordinator):
        text = shown(metrics)
    assert 'kera_principal_stored_bytes{principal="user:user_9"} 1009.0' in text
    assert text.count("kera_principal_stored_bytes{") == PRINCIPALS_MAX
    assert 'principal="user:user_1"' not in text


async def test_quotas_do_not_apply_without_security(cluster: Cluster) -> None:
    await cluster.register("a")
    assert full(await tell(cluster, FIRST, alice=1 << 40)) == {}


async def test_the_number_of_principals_in_a_heartbeat_is_limited(secured: Cluster) -> None:
    with pytest.raises(InvalidArgument, match="4096 stored, not 4097"):
        await secured.heartbeat(FIRST, stored=[coordinator_pb2.StoredBytes(principal="user:alice")] * 4097)
