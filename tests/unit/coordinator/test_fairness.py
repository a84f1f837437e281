"""Large requests run in steps, and other clients get their answers between the steps."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kera.coordinator.service import coordinator_service
from kera.coordinator.store.metadata import MetadataStoreFull
from kera.core.base.turns import Turns
from kera.core.rpc import Call, Service, api
from kera.core.rpc.method import Method, Peer
from kera.v1 import common_pb2, consumer_group_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster, until

STREAMLETS = 300
ALWAYS_OVER = 0.0
"""A slice that is over after one step, so the number of steps does not depend on the speed."""


@pytest.fixture
async def wide(cluster: Cluster) -> common_pb2.StreamInfo:
    """A stream of many streamlets, in a cluster that gives way after each step."""
    await cluster.register("one")
    await cluster.register("two")
    made = await cluster.create("wide", streamlets=STREAMLETS)
    cluster.coordinator.state.turns = Turns(ALWAYS_OVER, now=lambda: 0.0)  # without pauses after slow steps
    return made


@pytest.fixture
async def service(cluster: Cluster, wide: common_pb2.StreamInfo) -> AsyncIterator[Service]:
    """The service of the cluster with that stream."""
    assert cluster.coordinator.state.catalog.named(wide.name) == wide
    yield coordinator_service(cluster.coordinator.handlers(), lambda *_: None)
    await cluster.coordinator.consumer_groups.close()


async def ask(service: Service, method: Method[Any, Any], request: Any, client: str) -> Any:
    answer = service[method](Call(request, memoryview(b""), Peer("grpc", client)))
    return (await asyncio.ensure_future(answer)).message  # type: ignore[arg-type]


def starts(stream_id: int) -> list[consumer_group_pb2.StreamletStart]:
    return [
        consumer_group_pb2.StreamletStart(
            stream_id=stream_id, streamlet_id=number, cursors=[common_pb2.Cursor(stream_id=stream_id)]
        )
        for number in range(STREAMLETS)
    ]


def reset(stream_id: int) -> consumer_group_pb2.ResetConsumerGroupRequest:
    return consumer_group_pb2.ResetConsumerGroupRequest(consumer_group="app", starts=starts(stream_id), force=True)


def consume(stream_id: int) -> consumer_group_pb2.ConsumeRoundRequest:
    seen = [
        consumer_group_pb2.SeenGroups(
            stream_id=stream_id,
            streamlet_id=number,
            through_group_id=3,
            groups=[consumer_group_pb2.SeenGroup(start=common_pb2.Cursor(stream_id=stream_id, group_id=1))],
        )
        for number in range(STREAMLETS)
    ]
    return consumer_group_pb2.ConsumeRoundRequest(
        consumer_group="app",
        member_id="member",
        session_timeout_ms=60_000,
        progress_timeout_ms=60_000,
        groups_max=1 << 20,
        stream_ids=[stream_id],
        starts=starts(stream_id),
        seen=seen,
    )


REQUESTS: dict[Method[Any, Any], Callable[[int], Any]] = {
    api.CREATE_STREAM: lambda _: coordinator_pb2.CreateStreamRequest(
        name="another", config=common_pb2.StreamConfig(streamlets=STREAMLETS, entries=1, group_segments=1)
    ),
    api.REBALANCE: lambda _: coordinator_pb2.RebalanceRequest(dry_run=True),
    api.DRAIN: lambda _: coordinator_pb2.DrainRequest(broker_id=1, ask=True),
    api.PREPARE_RESTART: lambda _: coordinator_pb2.PrepareRestartRequest(broker_id=1, epoch=1, stopping=True),
    api.HEARTBEAT: lambda _: coordinator_pb2.HeartbeatRequest(
        broker_id=1,
        broker_epoch=1,
        held_streams_told=True,
        held_streams=[coordinator_pb2.HeldStream(stream_id=number) for number in range(1, STREAMLETS)],
    ),
    api.REGISTER_BROKER: lambda _: coordinator_pb2.RegisterBrokerRequest(
        broker=common_pb2.BrokerInfo(broker_id=1, grpc_address="x:1"), launch_id="anew"
    ),
    api.RESET_CONSUMER_GROUP: reset,
    api.CONSUME_ROUND: consume,
}


@pytest.mark.parametrize("method", REQUESTS, ids=lambda method: method.name)
async def test_other_clients_get_answers_during_a_large_request(
    cluster: Cluster, service: Service, wide: common_pb2.StreamInfo, method: Method[Any, Any]
) -> None:
    broker = cluster.coordinator.state.brokers.describe_all()[0]
    request = REQUESTS[method](wide.stream_id)
    for field in ("epoch", "broker_epoch"):
        if hasattr(request, field):
            setattr(request, field, broker.broker_epoch)
    for one in cluster.coordinator.state.brokers.describe_all():
        await cluster.coordinator.members.heartbeat(
            coordinator_pb2.HeartbeatRequest(broker_id=one.broker_id, broker_epoch=one.broker_epoch)
        )
    large = asyncio.ensure_future(ask(service, method, request, "busy"))
    answered = 0
    while not large.done():
        await ask(service, api.GET_STREAM_ID, coordinator_pb2.GetStreamIdRequest(name="wide"), "other")
        answered += 1
    await large
    assert answered > STREAMLETS / 4


@pytest.mark.parametrize(
    ("method", "request_of"),
    [
        (api.FETCH_CONSUMER_GROUP, consumer_group_pb2.FetchConsumerGroupRequest),
        (api.DESCRIBE_CONSUMER_GROUP, consumer_group_pb2.DescribeConsumerGroupRequest),
    ],
    ids=["FetchConsumerGroup", "DescribeConsumerGroup"],
)
async def test_other_clients_get_answers_while_a_consumer_group_is_described(
    service: Service, wide: common_pb2.StreamInfo, method: Method[Any, Any], request_of: Any
) -> None:
    await ask(service, api.RESET_CONSUMER_GROUP, reset(wide.stream_id), "busy")
    request = request_of(consumer_group="app")
    if hasattr(request, "stream_id"):
        request.stream_id = wide.stream_id
    large = asyncio.ensure_future(ask(service, method, request, "busy"))
    answered = 0
    while not large.done():
        await ask(service, api.GET_STREAM_ID, coordinator_pb2.GetStreamIdRequest(name="wide"), "other")
        answered += 1
    assert len((await large).ListFields()[0][1]) == STREAMLETS
    assert answered > STREAMLETS / 4


async def test_other_clients_get_answers_while_the_metadata_are_copied(cluster: Cluster, service: Service) -> None:
    for number in range(40):
        await cluster.create(f"stream-{number}")
    request = coordinator_pb2.ReadMetadataRequest()
    large = asyncio.ensure_future(ask(service, api.READ_METADATA, request, "busy"))
    answered = 0
    while not large.done():
        await ask(service, api.GET_STREAM_ID, coordinator_pb2.GetStreamIdRequest(name="wide"), "other")
        answered += 1
    assert await large
    assert answered > 10


async def test_a_change_does_not_wait_for_all_changes_of_another_client(service: Service) -> None:
    done: list[str] = []

    async def init(client: str) -> None:
        await ask(service, api.INIT_PRODUCER, coordinator_pb2.InitProducerRequest(), client)
        done.append(client)

    many = [asyncio.ensure_future(init("many")) for _ in range(40)]
    await asyncio.sleep(0)
    await init("one")
    assert done.index("one") <= 4
    await asyncio.gather(*many)


async def test_a_round_fails_when_a_failed_write_has_undone_its_changes(
    cluster: Cluster, service: Service, wide: common_pb2.StreamInfo
) -> None:
    """The store refuses a write of another member, so the coordinator takes back the changes of both."""
    await ask(service, api.RESET_CONSUMER_GROUP, reset(wide.stream_id), "busy")
    state = cluster.coordinator.state
    large = asyncio.ensure_future(ask(service, api.CONSUME_ROUND, consume(wide.stream_id), "busy"))
    slices = state.turns.slices
    await until(lambda: state.turns.slices >= slices + 20, "the large request has begun")
    assert not large.done()

    cluster.store.failure = MetadataStoreFull("no room")
    leave = consumer_group_pb2.LeaveRequest(consumer_group="app", member_id="nobody")
    other = consumer_group_pb2.ConsumeRoundRequest()
    other.CopyFrom(consume(wide.stream_id))
    del other.starts[:], other.seen[:]
    other.member_id = "other"
    with pytest.raises(MetadataStoreFull, match="no room"):
        await ask(service, api.CONSUME_ROUND, other, "other")
    cluster.store.failure = None
    with pytest.raises(MetadataStoreFull, match="no room"):
        await large
    await ask(service, api.LEAVE, leave, "busy")
