from collections import Counter
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.metrics import CoordinatorMetrics
from kera.coordinator.operations.streams import PAGE_BYTES_MAX
from kera.coordinator.service import coordinator_service
from kera.core.errors import InvalidArgument, StaleEpoch, UnknownStream
from kera.core.rpc import api
from kera.core.rpc.method import Call, Method, Peer
from kera.v1 import common_pb2
from kera.v1 import coordinator_pb2 as messages
from tests.unit.coordinator.fake_cluster import Cluster, backup_registration
from tests.unit.coordinator.fake_cluster import registration as new_registration


class Client:
    """A client that calls the service as a transport does, and counts the outcomes that the hook sees."""

    def __init__(self, handlers: Handlers) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()
        self.service = coordinator_service(handlers, lambda *seen: self.seen.update([seen]))

    async def call(self, method: Method[Any, Any], message: Any) -> Any:
        reply: Any = self.service[method](Call(message, memoryview(b""), Peer("test", "test")))
        return (await reply).message


@pytest.fixture
def client(cluster: Cluster) -> Client:
    return Client(cluster.coordinator.handlers())


async def test_every_method_of_the_coordinator_is_served(client: Client) -> None:
    assert set(client.service) == {
        *api.COORDINATOR_METHODS,
        *api.CONSUMER_GROUPS_METHODS,
        *api.ACCESS_METHODS,
        *api.SCHEMA_REGISTRY_METHODS,
        *api.LATENCY_METHODS,
    }


async def test_a_stream_goes_from_creation_to_deletion(client: Client, cluster: Cluster) -> None:
    registered = await client.call(api.REGISTER_BROKER, new_registration("a"))
    assert registered.cluster_id == cluster.coordinator.state.cluster_id
    assert (registered.broker_id, registered.broker_epoch, registered.heartbeat_interval_ms) == (1, 1, 100)

    config = common_pb2.StreamConfig(streamlets=2, entries=1, group_segments=4)
    request = messages.CreateStreamRequest(name="orders", config=config)
    stream = (await client.call(api.CREATE_STREAM, request)).stream
    assert (stream.stream_id, stream.name, stream.config.streamlets) == (1, "orders", 2)

    assert (await client.call(api.GET_STREAM_ID, messages.GetStreamIdRequest(name="orders"))).stream_id == 1
    for described in (messages.DescribeStreamRequest(name="orders"), messages.DescribeStreamRequest(stream_id=1)):
        answer = await client.call(api.DESCRIBE_STREAM, described)
        assert answer.stream == stream
        assert [(broker.broker_id, broker.alive) for broker in answer.brokers] == [(1, True)]
    assert list((await client.call(api.LIST_STREAMS, messages.ListStreamsRequest())).streams) == [stream]
    altered = (await client.call(api.ALTER_STREAM, messages.AlterStreamRequest(name="orders", retention_ms=7))).stream
    assert (altered.stream_id, altered.config.retention_ms, altered.config_version) == (1, 7, 1)
    assert (await client.call(api.DELETE_STREAM, messages.DeleteStreamRequest(name="orders"))).stream_id == 1
    assert not (await client.call(api.LIST_STREAMS, messages.ListStreamsRequest())).streams


async def test_a_long_list_of_streams_takes_several_requests(client: Client) -> None:
    await client.call(api.REGISTER_BROKER, new_registration("a"))
    config = common_pb2.StreamConfig(streamlets=PAGE_BYTES_MAX // 12, entries=1, group_segments=4)
    for name in "ba":
        await client.call(api.CREATE_STREAM, messages.CreateStreamRequest(name=name, config=config))
    first = await client.call(api.LIST_STREAMS, messages.ListStreamsRequest())
    assert ([stream.name for stream in first.streams], first.more) == (["a"], True)
    second = await client.call(api.LIST_STREAMS, messages.ListStreamsRequest(after="a"))
    assert ([stream.name for stream in second.streams], second.more) == (["b"], False)


async def test_a_new_launch_of_a_broker_makes_the_old_one_stale(client: Client) -> None:
    await client.call(api.REGISTER_BROKER, new_registration("a"))
    await client.call(api.HEARTBEAT, messages.HeartbeatRequest(broker_id=1, broker_epoch=1))
    await client.call(api.REGISTER_BROKER, new_registration("b", 1))
    with pytest.raises(StaleEpoch):
        await client.call(api.HEARTBEAT, messages.HeartbeatRequest(broker_id=1, broker_epoch=1))

    found = await client.call(api.DESCRIBE_CLUSTER, messages.DescribeClusterRequest())
    assert found.cluster_id
    assert [(broker.broker_id, broker.broker_epoch) for broker in found.brokers] == [(1, 2)]


async def test_brokers_learn_of_a_registered_backup(client: Client, cluster: Cluster) -> None:
    answer = await client.call(api.REGISTER_BACKUP, backup_registration("x"))
    assert answer.cluster_id == cluster.coordinator.state.cluster_id
    assert (answer.backup_id, answer.backup_epoch, answer.heartbeat_interval_ms) == (1, 1, 100)
    request = messages.BackupHeartbeatRequest(backup_id=1, backup_epoch=1, free_memory_bytes=5, free_disk_bytes=6)
    assert await client.call(api.BACKUP_HEARTBEAT, request) == messages.BackupHeartbeatResponse()

    registered = await client.call(api.REGISTER_BROKER, new_registration("a"))
    heartbeat = messages.HeartbeatRequest(broker_id=1, broker_epoch=1)
    for told in (
        registered,
        await client.call(api.HEARTBEAT, heartbeat),
        await client.call(api.DESCRIBE_CLUSTER, messages.DescribeClusterRequest()),
    ):
        (backup,) = told.backups
        assert (backup.backup_id, backup.backup_epoch, backup.alive) == (1, 1, True)
        assert (backup.memory_bytes, backup.free_memory_bytes, backup.free_disk_bytes) == (200, 5, 6)

    cluster.clock.advance(3600)
    await cluster.heartbeat(1)
    assert [one.alive for one in (await client.call(api.HEARTBEAT, heartbeat)).backups] == [False]


async def test_a_heartbeat_of_an_old_launch_of_a_backup_is_stale(client: Client) -> None:
    await client.call(api.REGISTER_BACKUP, backup_registration("x"))
    await client.call(api.REGISTER_BACKUP, backup_registration("y", 1))
    with pytest.raises(StaleEpoch, match="launch 1 of backup 1 is not the current one"):
        await client.call(api.BACKUP_HEARTBEAT, messages.BackupHeartbeatRequest(backup_id=1, backup_epoch=1))


async def test_brokers_learn_their_lease_and_the_coordinator_epoch(client: Client) -> None:
    registered = await client.call(api.REGISTER_BROKER, new_registration("a"))
    beaten = await client.call(api.HEARTBEAT, messages.HeartbeatRequest(broker_id=1, broker_epoch=1))
    for told in (registered, beaten):
        assert (told.lease_ms, told.coordinator_epoch) == (100 * 50, 1)


async def test_streamlets_move_brokers_drain_and_recoveries_are_listed(client: Client, cluster: Cluster) -> None:
    for launch in "abc":
        await client.call(api.REGISTER_BROKER, new_registration(launch))
    await client.call(api.REGISTER_BACKUP, backup_registration("x"))
    config = common_pb2.StreamConfig(streamlets=1, entries=1, group_segments=4, replication=1)
    await client.call(api.CREATE_STREAM, messages.CreateStreamRequest(name="s", config=config, creation_id="c1"))

    moved = await client.call(
        api.MOVE_STREAMLET, messages.MoveStreamletRequest(stream="s", streamlet_id=0, broker_id=2)
    )
    assert (moved.stream.assignments[0].broker_id, moved.stream.creation_id) == (2, "c1")
    await cluster.heartbeat(1, 2, 3)
    balanced = await client.call(api.REBALANCE, messages.RebalanceRequest(dry_run=True))
    assert [(one.broker_id, one.streamlets) for one in balanced.loads] == [(1, 0), (2, 1), (3, 0)]
    drained = await client.call(api.DRAIN, messages.DrainRequest(broker_id=2))
    assert (drained.done, drained.streamlets_owned) == (False, 1)
    await cluster.silence(1)  # whose drained streamlet is at broker 1 again
    (recovery,) = (await client.call(api.LIST_RECOVERIES, messages.ListRecoveriesRequest())).recoveries
    assert (recovery.broker_id, recovery.cause) == (1, "dead")
    assert await client.call(api.REPORT_BROKER, messages.ReportBrokerRequest(broker_id=9)) == (
        messages.ReportBrokerResponse()
    )


async def test_producers_get_an_id_and_an_epoch(client: Client) -> None:
    answer = await client.call(api.INIT_PRODUCER, messages.InitProducerRequest(name="loader"))
    assert (answer.producer_id, answer.producer_epoch) == (1, 1)


async def test_describing_a_stream_needs_a_name_or_an_id(client: Client) -> None:
    with pytest.raises(InvalidArgument, match="name or id"):
        await client.call(api.DESCRIBE_STREAM, messages.DescribeStreamRequest())


async def test_every_request_is_counted_once_with_its_outcome() -> None:
    def defect(_: messages.InitProducerRequest) -> None:
        raise ZeroDivisionError

    async def unknown(_: messages.GetStreamIdRequest) -> None:
        raise UnknownStream("none")

    handlers: Handlers = {
        api.LIST_STREAMS: lambda _: messages.ListStreamsResponse(),
        api.GET_STREAM_ID: unknown,
        api.INIT_PRODUCER: defect,
    }
    client = Client(handlers)
    await client.call(api.LIST_STREAMS, messages.ListStreamsRequest())
    with pytest.raises(UnknownStream):
        await client.call(api.GET_STREAM_ID, messages.GetStreamIdRequest(name="none"))
    with pytest.raises(ZeroDivisionError):
        await client.call(api.INIT_PRODUCER, messages.InitProducerRequest())

    assert client.seen == {
        ("ListStreams", "ok"): 1,
        ("GetStreamId", "unknown_stream"): 1,
        ("InitProducer", "internal"): 1,
    }


async def test_metrics_count_requests_members_and_streams(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.register_backup("y")
    await cluster.create("orders")
    metrics.observe("ListStreams", "ok")

    with metrics.leading(cluster.coordinator):
        text = generate_latest(registry).decode()

    assert 'kera_coordinator_requests_total{method="ListStreams",outcome="ok"} 1.0' in text
    assert "kera_coordinator_brokers_alive 1.0" in text
    assert "kera_coordinator_backups_alive 2.0" in text
    assert "kera_coordinator_streams 1.0" in text


async def test_metrics_count_dead_members_as_lost_unless_restarting_or_forgotten(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)

    def lost() -> tuple[float | None, float | None]:
        with metrics.leading(cluster.coordinator):
            kinds = ("brokers", "backups")
            brokers, backups = (registry.get_sample_value(f"kera_coordinator_{kind}_lost") for kind in kinds)
        return brokers, backups

    for launch in "abc":
        await cluster.register(launch)
    await cluster.register_backup("x")
    assert lost() == (0, 0)
    await cluster.silence(2)
    assert lost() == (1, 0)
    await cluster.coordinator.forgetting.forget(messages.ForgetMemberRequest(broker_id=2))
    assert lost() == (0, 0)

    state, restarts = cluster.coordinator.state, cluster.coordinator.restarts
    stop = messages.PrepareRestartRequest
    await restarts.prepare(stop(broker_id=1, epoch=state.brokers.epoch(1), stopping=True))
    await restarts.prepare(stop(backup_id=1, epoch=state.backups.epoch(1), stopping=True))
    assert (state.brokers.live_ids(), state.backups.live_ids(), lost()) == ([3], [], (0, 0))
    cluster.clock.advance(cluster.settings.restart_grace_ms / 1000)
    await cluster.heartbeat(3)
    assert lost() == (1, 1)


async def test_metrics_show_recoveries_and_moves(cluster: Cluster) -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", replication=1)
    await cluster.silence(1)
    metrics.observe_phase("fencing", 0.2)
    metrics.observe_move("ok", 0.02)
    metrics.observe_move("unavailable", 0.0)

    with metrics.leading(cluster.coordinator):
        text = generate_latest(registry).decode()

    assert 'kera_coordinator_recoveries{phase="recovering"} 1.0' in text
    assert 'kera_coordinator_recoveries{phase="done"} 0.0' in text
    for name in ("recovered_bytes", "restored_bytes", "records_lost"):
        assert f"kera_coordinator_recovery_{name} 0.0" in text
    assert "kera_coordinator_recovery_total_bytes 100.0" in text
    assert "kera_coordinator_recoveries_waiting 0.0" in text
    assert 'kera_coordinator_recovery_phase_seconds_sum{phase="fencing"} 0.2' in text
    assert 'kera_coordinator_moves_total{outcome="unavailable"} 1.0' in text
    assert "kera_coordinator_move_stall_seconds_count 1.0" in text
