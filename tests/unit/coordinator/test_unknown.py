"""Streams that brokers hold and the coordinator does not know, and how it takes them up again."""

from collections.abc import Iterable, Mapping

import pytest

from kera.coordinator.cluster.catalog import GROUPS_PER_LAUNCH
from kera.coordinator.cluster.keys import HANDOVERS, MOVES, streamlet_key
from kera.coordinator.ids import Launch
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, UnknownStream
from kera.server.lineage import comes_from, new_version
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster, registration

YOUNG = 77


def young(name: str = "young", *, epochs: tuple[int, ...] = (1, 2), version: int = 3) -> common_pb2.StreamInfo:
    """A stream unknown to the coordinator, with a streamlet at each of brokers 1, 2, …."""
    stream = common_pb2.StreamInfo(stream_id=YOUNG, name=name, assignments_version=version)
    stream.config.CopyFrom(
        common_pb2.StreamConfig(streamlets=len(epochs), entries=1, group_segments=4, replication=0, virtual_logs=1)
    )
    for number, epoch in enumerate(epochs):
        stream.assignments.add(streamlet_id=number, broker_id=number + 1, broker_epoch=epoch, first_group_id=1)
    return stream


def beat(cluster: Cluster, broker_id: int, *streams: common_pb2.StreamInfo) -> coordinator_pb2.HeartbeatRequest:
    """A heartbeat of a broker that holds these streams."""
    held = [
        coordinator_pb2.HeldStream(
            stream_id=one.stream_id, assignments_version=one.assignments_version, config_version=one.config_version
        )
        for one in streams
    ]
    epoch = cluster.coordinator.state.brokers.epoch(broker_id)
    return coordinator_pb2.HeartbeatRequest(
        broker_id=broker_id, broker_epoch=epoch, held_streams=held, held_streams_told=True
    )


async def tell(cluster: Cluster, broker_id: int, stream: common_pb2.StreamInfo) -> None:
    epoch = cluster.coordinator.state.brokers.epoch(broker_id)
    told = [coordinator_pb2.UnknownStream(stream=stream, bytes=100, records=5)]
    request = coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=epoch, unknown_streams=told)
    await cluster.coordinator.members.heartbeat(request)


async def all_tell(cluster: Cluster, broker_id: int, stream: common_pb2.StreamInfo) -> None:
    """Let all brokers report their streams, and one of them a later version of a stream than the metadata have."""
    for one in cluster.coordinator.state.brokers.ids():
        if one != broker_id:
            await cluster.coordinator.members.heartbeat(beat(cluster, one))
    assert (await cluster.coordinator.members.heartbeat(beat(cluster, broker_id, stream))).unknown_stream_ids == [
        stream.stream_id
    ]
    await tell(cluster, broker_id, stream)
    await cluster.coordinator.idle()


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    for launch in ("a", "b"):
        await cluster.register(launch)
    return cluster


async def test_a_stream_that_is_known_or_to_be_dropped_is_not_unknown(two: Cluster) -> None:
    known = (await two.create("orders")).stream_id
    gone = (await two.create("gone")).stream_id
    two.brokers.failures[2] = Unavailable("away")
    await two.coordinator.streams.delete("gone")

    held = [common_pb2.StreamInfo(stream_id=stream_id) for stream_id in (known, gone, YOUNG)]
    assert (await two.coordinator.members.heartbeat(beat(two, 1, *held))).unknown_stream_ids == [YOUNG]


async def test_a_stream_is_adopted_with_its_id_once_all_its_brokers_have_reported_it(two: Cluster) -> None:
    await tell(two, 1, young())
    with pytest.raises(Unavailable, match="broker 2"):
        await two.coordinator.unknown.adopt("young")
    await tell(two, 2, young(version=2))
    (described,) = two.coordinator.unknown.describe_all()
    assert (described.bytes, described.records, list(described.broker_ids)) == (200, 10, [1, 2])

    stream = await two.coordinator.unknown.adopt("young")

    assert stream.stream_id == YOUNG
    assert comes_from(stream, 3)
    assert stream.assignments_version > 3
    assert sorted(two.brokers.opened) == [(1, "young"), (2, "young")]
    assert two.coordinator.unknown.describe_all() == []
    await two.restart()
    assert two.coordinator.state.catalog.named("young") == stream
    assert (await two.create("later")).stream_id > YOUNG


async def test_new_launches_get_adopted_streamlets_with_later_groups(two: Cluster) -> None:
    await two.register("c", broker_id=2)
    for broker_id in (1, 2):
        await tell(two, broker_id, young())

    first, second = (await two.coordinator.unknown.adopt(str(YOUNG))).assignments

    assert (first.broker_epoch, first.first_group_id) == (1, 1)
    assert (second.broker_epoch, second.first_group_id) == (3, 3 * GROUPS_PER_LAUNCH)


async def test_a_stream_whose_name_is_taken_can_be_adopted_under_another(two: Cluster) -> None:
    await two.create("young")
    for broker_id in (1, 2):
        await tell(two, broker_id, young())
    with pytest.raises(StreamExists, match="--name"):
        await two.coordinator.unknown.adopt("young")

    assert (await two.coordinator.unknown.adopt("young", "again")).name == "again"
    assert two.coordinator.state.catalog.named("young").stream_id != YOUNG


async def test_an_unreported_or_undescribed_stream_cannot_be_adopted(two: Cluster) -> None:
    with pytest.raises(UnknownStream):
        await two.coordinator.unknown.adopt("young")
    await tell(two, 1, common_pb2.StreamInfo(stream_id=YOUNG))
    with pytest.raises(InvalidArgument, match="no broker has its configuration"):
        await two.coordinator.unknown.adopt(str(YOUNG), "young")


async def test_reports_of_an_earlier_launch_are_forgotten(two: Cluster) -> None:
    await tell(two, 1, young())
    await two.heartbeat(1, held_streams_told=True)
    launch = Launch(1, two.coordinator.state.brokers.epoch(1))
    assert two.coordinator.unknown.reports.has_told(launch)
    await two.register("c", broker_id=1)

    assert two.coordinator.unknown.describe_all() == []
    assert not two.coordinator.unknown.reports.has_told(launch)


async def moved_since_a_copy(two: Cluster) -> tuple[common_pb2.StreamInfo, common_pb2.StreamInfo]:
    """A stream as in the metadata, and as its brokers know it after a move of its streamlet to the other broker."""
    known = await two.create("orders", streamlets=1)
    later = common_pb2.StreamInfo()
    later.CopyFrom(known)
    old = later.assignments[0].broker_id
    later.assignments[0].broker_id = 3 - old
    later.assignments[0].broker_epoch = two.coordinator.state.brokers.epoch(3 - old)
    later.assignments[0].intervals.add(first_group_id=1, broker_id=old)
    later.assignments[0].intervals.add(first_group_id=9, broker_id=3 - old, first_records=[70])
    new_version(later, two.coordinator.state.coordinator_epoch + 5)
    return known, later


async def test_a_stream_that_moved_since_a_copy_continues_as_its_brokers_know_it(two: Cluster) -> None:
    _, later = await moved_since_a_copy(two)
    await tell(two, later.assignments[0].broker_id, later)
    await two.coordinator.idle()
    assert "has yet to report" in two.coordinator.unknown.describe_all()[0].problem

    await all_tell(two, later.assignments[0].broker_id, later)

    assert two.coordinator.state.catalog.named("orders") == later
    assert {two.brokers.streams[one, later.stream_id].assignments_version for one in (1, 2)} == {
        later.assignments_version
    }
    assert two.coordinator.unknown.describe_all() == []
    assert (await two.coordinator.members.heartbeat(beat(two, 1, later))).unknown_stream_ids == []


async def test_an_owner_between_copy_and_restore_learns_that_another_broker_is_owner(two: Cluster) -> None:
    """Only the new owner had learned of the move before older metadata were restored."""
    await two.register("c")
    between, later = await moved_since_a_copy(two)
    owner = later.assignments[0].broker_id
    between = common_pb2.StreamInfo()
    between.CopyFrom(later)
    between.assignments[0].broker_id = 3
    between.assignments[0].intervals[-1].broker_id = 3
    new_version(later, two.coordinator.state.coordinator_epoch + 5)
    await two.coordinator.members.heartbeat(beat(two, 3, between))
    await tell(two, 3, between)

    await all_tell(two, owner, later)

    assert two.coordinator.state.catalog.named("orders") == later
    assert two.brokers.streams[3, later.stream_id].assignments_version == later.assignments_version


async def test_a_broker_learns_that_a_stream_it_holds_is_elsewhere(two: Cluster) -> None:
    """The broker's version is not later than the metadata, so no other step would tell the broker."""
    await two.register("c")
    known, _ = await moved_since_a_copy(two)

    response = await two.coordinator.members.heartbeat(beat(two, 3, known))
    await two.settle()

    assert not response.unknown_stream_ids
    assert two.brokers.streams[3, known.stream_id] == known
    assert two.coordinator.state.untold() == []


async def test_an_owner_gets_a_lost_handover_state_from_the_previous_owner(two: Cluster) -> None:
    """The move was written, the new owner died before it got the state, and older metadata were restored."""
    _, later = await moved_since_a_copy(two)
    (assignment,) = later.assignments
    owner, before = assignment.broker_id, 3 - assignment.broker_id
    two.brokers.lacking = {0}
    two.brokers.ends[later.stream_id, 0] = common_pb2.StreamletState(next_group_id=9, next_records=[70])
    two.brokers.failures[before] = Unavailable("no answer")

    await all_tell(two, before, later)
    await two.settle()
    assert (owner, later.stream_id, 0) not in two.brokers.handed_over

    await two.restart()  # the remaining work is in the store
    del two.brokers.failures[before]
    await two.heartbeat(1, 2)
    await two.settle()
    assert two.brokers.handed_over[owner, later.stream_id, 0].next_records == [70]
    assert two.brokers.asked_where == [(before, later.stream_id, 0)]
    assert not await two.store.list("moves/")


async def test_an_owner_that_went_on_since_a_copy_gets_no_old_handover_state(two: Cluster) -> None:
    """With the old state it would give the same group ids again, and take known chunks for new ones."""
    known = await two.create("orders", streamlets=1)
    owner = known.assignments[0].broker_id
    move = coordinator_pb2.Move(stream="orders", streamlet_id=0, from_broker_id=3 - owner, to_broker_id=owner)
    ended = common_pb2.StreamletState(streamlet_id=0, next_group_id=8, next_records=[24])
    keys = [streamlet_key(kind, known.stream_id, 0) for kind in (MOVES, HANDOVERS)]
    values = [each.SerializeToString() for each in (move, ended)]
    await two.coordinator.state.write(dict(zip(keys, values, strict=True)))
    later = common_pb2.StreamInfo()
    later.CopyFrom(known)
    later.assignments[0].first_group_id = 12
    new_version(later, two.coordinator.state.coordinator_epoch + 5)

    await two.restart()
    await two.heartbeat(1, 2)
    await all_tell(two, owner, later)
    await two.settle()

    assert comes_from(two.coordinator.state.catalog.named("orders"), later.assignments_version)
    assert (owner, known.stream_id, 0) not in two.brokers.handed_over
    assert [await two.store.get(key) for key in keys] == [None, None]


async def test_an_owner_with_its_handover_state_does_not_get_it_again(two: Cluster) -> None:
    _, later = await moved_since_a_copy(two)
    await all_tell(two, later.assignments[0].broker_id, later)
    await two.settle()
    assert two.brokers.asked_where == []


async def test_a_stream_waits_for_a_restarting_broker_before_it_continues(two: Cluster) -> None:
    """It may know later assignments than the present brokers; otherwise both owners would go on."""
    known, later = await moved_since_a_copy(two)
    latest = common_pb2.StreamInfo()
    latest.CopyFrom(later)
    new_version(latest, two.coordinator.state.coordinator_epoch + 5)
    owner = later.assignments[0].broker_id
    epoch = two.coordinator.state.brokers.epoch(3 - owner)
    stopping = coordinator_pb2.PrepareRestartRequest(broker_id=3 - owner, epoch=epoch, stopping=True)
    await two.coordinator.restarts.prepare(stopping)

    await tell(two, owner, later)
    await two.coordinator.idle()
    assert two.coordinator.state.catalog.named("orders") == known

    request = registration("again", 3 - owner)
    request.held_streams.add(stream_id=latest.stream_id, assignments_version=latest.assignments_version)
    await two.coordinator.members.register_broker(request)
    await all_tell(two, 3 - owner, latest)
    await two.coordinator.idle()
    assert comes_from(two.coordinator.state.catalog.named("orders"), latest.assignments_version)


async def test_a_query_right_after_the_write_does_not_keep_brokers_from_learning_of_a_stream(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, later = await moved_since_a_copy(two)
    state, unknown = two.coordinator.state, two.coordinator.unknown
    write, described = state.write, list[list[coordinator_pb2.UnknownStream]]()

    async def write_and_be_asked(
        changes: Mapping[str, bytes | None], streams: Iterable[common_pb2.StreamInfo] = ()
    ) -> None:
        await write(changes, streams)
        described.append(unknown.describe_all())

    monkeypatch.setattr(state, "write", write_and_be_asked)
    await all_tell(two, later.assignments[0].broker_id, later)

    assert described[-1] == []
    assert {two.brokers.streams[one, later.stream_id].assignments_version for one in (1, 2)} == {
        later.assignments_version
    }


async def test_columns_added_since_a_copy_are_taken_up(two: Cluster) -> None:
    later = common_pb2.StreamInfo()
    later.CopyFrom(await two.create("orders", streamlets=1))
    later.schemas.add(schema_id=991, arrow_schema=b"later")
    later.config_version += 7

    await all_tell(two, later.assignments[0].broker_id, later)

    assert two.coordinator.state.catalog.named("orders") == later


async def test_a_launch_with_later_assignments_gets_no_stream_before_they_are_taken_up(
    two: Cluster,
) -> None:
    known, later = await moved_since_a_copy(two)
    owner = known.assignments[0].broker_id
    request = coordinator_pb2.RegisterBrokerRequest(
        broker=common_pb2.BrokerInfo(broker_id=owner, grpc_address="x:1"),
        launch_id="later",
        held_streams=[
            coordinator_pb2.HeldStream(stream_id=later.stream_id, assignments_version=later.assignments_version)
        ],
    )

    answer = await two.coordinator.members.register_broker(request)

    assert (list(answer.streams), list(answer.elsewhere_stream_ids)) == ([], [])
    assert two.coordinator.state.catalog.named("orders") == known
    await all_tell(two, owner, later)
    assert two.coordinator.state.catalog.named("orders").assignments[0].broker_id == 3 - owner


async def test_conflicting_assignments_are_reported_and_can_be_adopted(two: Cluster) -> None:
    known, later = await moved_since_a_copy(two)
    await two.register("c", broker_id=known.assignments[0].broker_id)  # a new version, as it reported none
    ours = two.coordinator.state.catalog.named("orders")

    await all_tell(two, later.assignments[0].broker_id, later)

    assert two.coordinator.state.catalog.named("orders") == ours
    (described,) = two.coordinator.unknown.describe_all()
    assert "conflict with the metadata" in described.problem
    with pytest.raises(InvalidArgument, match="keeps its name"):
        await two.coordinator.unknown.adopt("orders", "another")

    adopted = await two.coordinator.unknown.adopt("orders")

    assert adopted.assignments[0].broker_id == later.assignments[0].broker_id
    assert [one.first_group_id for one in adopted.assignments[0].intervals] == [1, 9]
    assert all(comes_from(adopted, one.assignments_version) for one in (known, ours, later))
    assert two.coordinator.state.catalog.named("orders") == adopted
    assert two.coordinator.unknown.describe_all() == []


async def test_a_stream_waits_for_an_owner_that_is_not_in_the_metadata(two: Cluster) -> None:
    _, later = await moved_since_a_copy(two)
    later.assignments[0].broker_id = later.assignments[0].intervals[1].broker_id = 3

    await all_tell(two, 1, later)
    (described,) = two.coordinator.unknown.describe_all()
    assert "broker 3" in described.problem
    await two.register("c")
    await all_tell(two, 1, later)

    assert two.coordinator.state.catalog.named("orders").assignments[0].broker_id == 3


async def test_a_broker_can_report_its_streams_in_several_heartbeats(two: Cluster) -> None:
    _, later = await moved_since_a_copy(two)
    owner = later.assignments[0].broker_id
    await two.coordinator.members.heartbeat(beat(two, 3 - owner))
    part = beat(two, owner, later)
    part.held_streams_told = False

    assert (await two.coordinator.members.heartbeat(part)).unknown_stream_ids == [later.stream_id]
    await tell(two, owner, later)
    await two.coordinator.idle()
    assert "has yet to report" in two.coordinator.unknown.describe_all()[0].problem
    assert (await two.coordinator.members.heartbeat(beat(two, owner))).unknown_stream_ids == []
    await tell(two, owner, later)
    await two.coordinator.idle()

    assert two.coordinator.state.catalog.named("orders") == later
