"""The cluster's feature level rises when all members have it, and keeps out members with a lower one."""

import pytest

from kera.coordinator.cluster.admission import VERSION_CHARACTERS_MAX
from kera.coordinator.cluster.feature_level import FEATURE_LEVEL_KEY, reached
from kera.coordinator.store.metadata import UnknownFormat, Write
from kera.coordinator.store.zookeeper_layout import candidate_id, candidate_level
from kera.core.errors import InvalidArgument
from kera.server.feature_level import FEATURE_LEVEL
from kera.v1 import coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster, backup_registration, registration

NEWER = FEATURE_LEVEL + 1


async def register(cluster: Cluster, launch: str, level: int, broker_id: int = 0, version: str = "1.0") -> None:
    request = registration(launch, broker_id)
    request.broker.feature_level, request.broker.version = level, version
    await cluster.coordinator.members.register_broker(request)


async def register_backup(cluster: Cluster, launch: str, level: int, backup_id: int = 0) -> None:
    await cluster.coordinator.members.register_backup(backup_registration(launch, backup_id, feature_level=level))


def level_of(cluster: Cluster) -> int:
    return cluster.coordinator.state.feature_level


@pytest.mark.parametrize(
    ("current", "coordinators", "members", "level"),
    [
        pytest.param(0, 3, [], 0, id="nobody-has-come"),
        pytest.param(0, 3, [3, 3], 3, id="all-have-it"),
        pytest.param(1, 3, [2, 3], 2, id="as-far-as-all-do"),
        pytest.param(1, 2, [3, 3], 2, id="coordinators-too"),
        pytest.param(2, 1, [1], 2, id="never-down"),
    ],
)
def test_the_feature_level_is_the_highest_that_all_have(
    current: int, coordinators: int, members: list[int], level: int
) -> None:
    assert reached(current, coordinators, members) == level


async def test_the_feature_level_rises_with_the_last_member_and_is_stored(cluster: Cluster) -> None:
    await register(cluster, "a", FEATURE_LEVEL)
    await register_backup(cluster, "x", FEATURE_LEVEL - 1)
    await cluster.settle()
    assert level_of(cluster) == FEATURE_LEVEL - 1
    await register_backup(cluster, "y", FEATURE_LEVEL, backup_id=1)
    await cluster.settle()
    assert level_of(cluster) == FEATURE_LEVEL
    await cluster.restart()
    assert level_of(cluster) == FEATURE_LEVEL


async def test_an_absent_member_holds_the_feature_level_back_until_it_is_forgotten(cluster: Cluster) -> None:
    await register(cluster, "a", FEATURE_LEVEL)
    await register(cluster, "b", FEATURE_LEVEL - 1)
    await cluster.silence(2)
    assert level_of(cluster) == FEATURE_LEVEL - 1
    await cluster.coordinator.forgetting.forget(coordinator_pb2.ForgetMemberRequest(broker_id=2, force=True))
    await cluster.settle()
    assert level_of(cluster) == FEATURE_LEVEL


async def test_the_feature_level_does_not_rise_above_feature_level_max(cluster: Cluster) -> None:
    cluster.settings = cluster.settings.model_copy(update={"feature_level_max": FEATURE_LEVEL - 1})
    await cluster.restart()
    await register(cluster, "a", NEWER)
    await cluster.settle()
    assert level_of(cluster) == FEATURE_LEVEL - 1


async def test_the_feature_level_does_not_rise_above_that_of_the_coordinator(cluster: Cluster) -> None:
    await register(cluster, "a", (1 << 32) - 1)
    await cluster.settle()
    assert level_of(cluster) == FEATURE_LEVEL


async def test_a_member_below_the_feature_level_is_refused(cluster: Cluster) -> None:
    await register(cluster, "a", FEATURE_LEVEL)
    await cluster.settle()
    with pytest.raises(InvalidArgument, match=r"version 0\.9 and feature level 0, and the cluster has level 2"):
        await register(cluster, "b", 0, version="0.9")
    with pytest.raises(InvalidArgument, match="start a broker of a newer version"):
        await register(cluster, "c", 0, broker_id=1)
    with pytest.raises(InvalidArgument, match="start a backup of a newer version"):
        await register_backup(cluster, "x", 0)
    (broker,) = cluster.coordinator.state.brokers.describe_all()
    assert (broker.version, broker.feature_level, broker.alive) == ("1.0", FEATURE_LEVEL, True)
    assert cluster.coordinator.state.backups.ids() == []


async def test_the_length_of_a_version_is_limited(cluster: Cluster) -> None:
    with pytest.raises(InvalidArgument, match="at most 100 characters"):
        await register(cluster, "a", FEATURE_LEVEL, version="1" * (VERSION_CHARACTERS_MAX + 1))


async def test_a_coordinator_below_the_feature_level_does_not_lead(cluster: Cluster) -> None:
    await cluster.edit(Write(FEATURE_LEVEL_KEY, str(NEWER).encode(), 0))
    with pytest.raises(UnknownFormat, match=rf"level is {NEWER}, and this coordinator's is {FEATURE_LEVEL}"):
        await cluster.restart()


def test_the_node_name_of_a_candidate_contains_its_feature_level() -> None:
    assert candidate_level(f"/kera/candidates/{candidate_id('3f-2a')}-0000000007") == FEATURE_LEVEL
    assert candidate_level("/kera/candidates/3f2a-0000000007") == 0, "of an earlier version"
    assert candidate_level("/kera.9/candidates/3f2a.x-0000000007") == 0
