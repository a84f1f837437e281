"""Brokers drop the streams that they should not have, even if they or the leader were away meanwhile."""

import contextlib

import pytest

from kera.core.errors import Unavailable, Uncertain
from kera.v1 import coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster, registration


async def left(cluster: Cluster) -> list[str]:
    """The keys of the drops that are still to do, in the store."""
    return list(await cluster.store.list("drops/"))


async def test_a_broker_that_did_not_answer_drops_a_deleted_stream_later(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    await cluster.create("orders", streamlets=2)
    cluster.brokers.failures[2] = Uncertain("no answer in 3 s")

    await cluster.coordinator.streams.delete("orders")
    await cluster.settle()
    assert cluster.brokers.dropped == [(1, 1)]
    cluster.brokers.failures.clear()
    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1), (2, 1)]
    assert await left(cluster) == []
    await cluster.settle()
    assert len(cluster.brokers.dropped) == 2


async def test_the_next_leader_has_brokers_drop_a_deleted_stream(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")
    cluster.brokers.failures[1] = Unavailable("the leader ends before it has told anybody")
    await cluster.coordinator.streams.delete("orders")
    cluster.brokers.failures.clear()

    await cluster.restart()
    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1)]
    assert await left(cluster) == []


async def test_the_next_leader_has_brokers_drop_an_unfinished_stream(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))
    crashed = cluster.coordinator

    await cluster.restart()
    cluster.brokers.answering.set()
    await cluster.create("orders")
    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1)]
    assert await left(cluster) == []
    assert cluster.coordinator.state.catalog.named("orders").stream_id == 2
    creation.cancel()
    await crashed.close()


@pytest.mark.parametrize("failure", [Uncertain("no answer in 3 s"), ZeroDivisionError("defect")])
async def test_a_broker_that_may_have_opened_a_failed_stream_drops_it(cluster: Cluster, failure: Exception) -> None:
    await cluster.register("a")
    cluster.brokers.failures[1] = failure
    with contextlib.suppress(Unavailable, ZeroDivisionError):
        await cluster.create("orders")
    cluster.brokers.failures.clear()

    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1)]
    assert await left(cluster) == []


async def test_a_stream_being_created_is_not_dropped(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))
    assert len(await left(cluster)) == 1

    await cluster.settle()
    cluster.brokers.answering.set()
    await creation
    await cluster.settle()

    assert cluster.brokers.dropped == []
    assert await left(cluster) == []


async def test_an_absent_broker_drops_a_deleted_stream_when_it_is_back(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    await cluster.create("orders", streamlets=2)
    cluster.brokers.failures[2] = Unavailable("connection refused")
    await cluster.coordinator.streams.delete("orders")
    await cluster.silence(2)
    asked = len(cluster.brokers.epochs)

    await cluster.settle()
    assert len(cluster.brokers.epochs) == asked
    cluster.brokers.failures.clear()
    await cluster.register("c", broker_id=2)
    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1), (2, 1)]
    assert await left(cluster) == []


async def test_a_fenced_broker_drops_a_deleted_stream_when_it_is_back(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    for launch in ("x", "y"):
        await cluster.register_backup(launch)
    await cluster.create("orders", streamlets=2, replication=1)
    await cluster.silence(2)
    assert cluster.coordinator.state.brokers.is_fenced(2)

    await cluster.coordinator.streams.delete("orders")
    await cluster.settle()
    assert await left(cluster)
    await cluster.register("c", broker_id=2)
    await cluster.settle()

    assert cluster.brokers.dropped == [(1, 1), (2, 1)]
    assert await left(cluster) == []


async def test_every_broker_drops_a_deleted_stream_even_one_that_never_owned_it(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    stream = await cluster.create("orders")
    await cluster.settle()

    await cluster.coordinator.streams.delete("orders")
    await cluster.settle()

    assert sorted(cluster.brokers.dropped) == [(1, stream.stream_id), (2, stream.stream_id)]


async def test_a_registering_broker_learns_which_of_its_streams_belong_to_others(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    ours = await cluster.create("orders")
    theirs = await cluster.create("payments")
    assert [one.assignments[0].broker_id for one in (ours, theirs)] == [1, 2]
    unknown, newer = 77, theirs.assignments_version + 1
    for version, elsewhere in ((0, [theirs.stream_id]), (newer, [])):
        held = [
            coordinator_pb2.HeldStream(stream_id=stream_id, assignments_version=version)
            for stream_id in (ours.stream_id, theirs.stream_id, unknown)
        ]
        request = registration("a", 1)
        request.held_streams.extend(held)
        answer = await cluster.coordinator.members.register_broker(request)
        assert answer.elsewhere_stream_ids == elsewhere


async def test_a_stored_registration_does_not_contain_held_streams(cluster: Cluster) -> None:
    request = registration("a")
    request.held_streams.add(stream_id=7)
    await cluster.coordinator.members.register_broker(request)

    (value,) = [entry.value for entry in (await cluster.store.list("brokers/")).values()]
    assert not coordinator_pb2.RegisterBrokerRequest.FromString(value).held_streams
