"""Streams that brokers hold and the coordinator does not know: which those are, and taking them up again."""

import pytest

from kera.coordinator.catalog import GROUPS_PER_LAUNCH
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, UnknownStream
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster

YOUNG = 77


def young(name: str = "young", *, epochs: tuple[int, ...] = (1, 2), version: int = 3) -> common_pb2.StreamInfo:
    """A stream with a streamlet at each of brokers 1, 2, …, which the coordinator has never heard of."""
    stream = common_pb2.StreamInfo(stream_id=YOUNG, name=name, assignments_version=version)
    stream.config.CopyFrom(
        common_pb2.StreamConfig(streamlets=len(epochs), entries=1, group_segments=4, replication=0, virtual_logs=1)
    )
    for number, epoch in enumerate(epochs):
        stream.assignments.add(streamlet_id=number, broker_id=number + 1, broker_epoch=epoch, first_group_id=1)
    return stream


async def tell(cluster: Cluster, broker_id: int, stream: common_pb2.StreamInfo) -> None:
    epoch = cluster.coordinator.state.brokers.epoch(broker_id)
    told = [coordinator_pb2.UnknownStream(stream=stream, bytes=100, records=5)]
    request = coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=epoch, unknown_streams=told)
    await cluster.coordinator.heartbeat(request)


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    for launch in ("a", "b"):
        await cluster.register(launch)
    return cluster


async def test_what_is_known_being_created_or_to_be_dropped_is_not_unknown(two: Cluster) -> None:
    known = (await two.create("orders")).stream_id
    gone = (await two.create("gone")).stream_id
    two.brokers.failures[2] = Unavailable("away")
    await two.coordinator.delete_stream("gone")

    assert await two.coordinator.unknown_of([known, gone, YOUNG]) == [YOUNG]


async def test_a_stream_is_adopted_with_its_id_once_all_its_brokers_have_told_of_it(two: Cluster) -> None:
    await tell(two, 1, young())
    with pytest.raises(Unavailable, match="broker 2"):
        await two.coordinator.adopt_stream("young")
    await tell(two, 2, young(version=2))
    (described,) = two.coordinator.unknown()
    assert (described.bytes, described.records, list(described.broker_ids)) == (200, 10, [1, 2])

    stream = await two.coordinator.adopt_stream("young")

    assert stream.stream_id == YOUNG
    assert stream.assignments_version == 4
    assert sorted(two.brokers.opened) == [(1, "young"), (2, "young")]
    assert two.coordinator.unknown() == []
    await two.restart()
    assert two.coordinator.stream("young") == stream
    assert (await two.create("later")).stream_id > YOUNG


async def test_launches_that_are_new_get_streamlets_with_groups_behind_the_old_ones(two: Cluster) -> None:
    await two.register("c", broker_id=2)
    for broker_id in (1, 2):
        await tell(two, broker_id, young())

    first, second = (await two.coordinator.adopt_stream(str(YOUNG))).assignments

    assert (first.broker_epoch, first.first_group_id) == (1, 1)
    assert (second.broker_epoch, second.first_group_id) == (3, 1 + GROUPS_PER_LAUNCH)


async def test_a_stream_whose_name_is_taken_is_adopted_under_another(two: Cluster) -> None:
    await two.create("young")
    for broker_id in (1, 2):
        await tell(two, broker_id, young())
    with pytest.raises(StreamExists, match="--name"):
        await two.coordinator.adopt_stream("young")

    assert (await two.coordinator.adopt_stream("young", "again")).name == "again"
    assert two.coordinator.stream("young").stream_id != YOUNG


async def test_what_nobody_has_told_of_or_nobody_can_describe_is_not_adopted(two: Cluster) -> None:
    with pytest.raises(UnknownStream):
        await two.coordinator.adopt_stream("young")
    await tell(two, 1, common_pb2.StreamInfo(stream_id=YOUNG))
    with pytest.raises(InvalidArgument, match="written down"):
        await two.coordinator.adopt_stream(str(YOUNG), "young")


async def test_what_a_launch_told_that_is_not_current_any_more_is_forgotten(two: Cluster) -> None:
    await tell(two, 1, young())
    await two.register("c", broker_id=1)

    assert two.coordinator.unknown() == []
