import asyncio

import pytest

from kera.coordinator.cluster.catalog import GROUPS_PER_LAUNCH
from kera.coordinator.store.metadata import MetadataStoreFailed, MetadataStoreFull, Write
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.errors import (
    InternalError,
    InvalidArgument,
    StaleEpoch,
    StreamExists,
    TooFewBackups,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster


async def heartbeat(cluster: Cluster, broker_id: int, broker_epoch: int) -> None:
    await cluster.coordinator.members.heartbeat(
        coordinator_pb2.HeartbeatRequest(broker_id=broker_id, broker_epoch=broker_epoch)
    )


def owners(stream: common_pb2.StreamInfo) -> list[tuple[int, int, int]]:
    return [(owner.broker_id, owner.broker_epoch, owner.first_group_id) for owner in stream.assignments]


# --- creating streams ------------------------------------------------------------------------------------------


async def test_a_new_stream_is_open_on_its_brokers_before_the_answer(cluster: Cluster) -> None:
    for launch in ("a", "b", "c"):
        await cluster.register(launch)

    stream = await cluster.create("orders", streamlets=3, brokers=2)

    assert stream.stream_id == 1
    assert stream.created_us == cluster.clock.now_us()
    assert [owner.streamlet_id for owner in stream.assignments] == [0, 1, 2]
    assert owners(stream) == [(1, 1, 1), (2, 2, 1), (1, 1, 1)]
    assert sorted(cluster.brokers.opened) == [(1, "orders"), (2, "orders")]
    assert [broker.broker_id for broker in cluster.coordinator.state.brokers_of(stream)] == [1, 2]


async def test_new_streamlets_go_to_the_broker_with_the_fewest(cluster: Cluster) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    await cluster.create("one", streamlets=3)

    assert owners(await cluster.create("two", streamlets=1)) == [(2, 2, 1)]


async def test_a_stream_needs_live_brokers(cluster: Cluster) -> None:
    with pytest.raises(Unavailable, match="there is none"):
        await cluster.create("orders")
    await cluster.register("a")
    cluster.clock.advance(3600)
    with pytest.raises(Unavailable, match="there is none"):
        await cluster.create("orders")
    await heartbeat(cluster, 1, 1)
    assert (await cluster.create("orders")).stream_id == 1


async def test_a_stream_needs_as_many_live_backups_as_it_has_replicas(cluster: Cluster) -> None:
    await cluster.register("a")
    with pytest.raises(TooFewBackups, match=r"stream 'orders' needs 1 live backup \(its replication\), there is none"):
        await cluster.create("orders", replication=1)
    await cluster.register_backup("x")
    await cluster.register_backup("y")
    cluster.clock.advance(3600)
    await heartbeat(cluster, 1, 1)
    cluster.coordinator.members.backup_heartbeat(coordinator_pb2.BackupHeartbeatRequest(backup_id=2, backup_epoch=2))
    with pytest.raises(TooFewBackups, match=r"needs 2 live backups .* there is 1") as error:
        await cluster.create("orders", replication=2)
    assert error.value.attributes == {"stream": "orders", "replication": 2, "live_backups": 1}
    assert cluster.brokers.opened == []

    stream = await cluster.create("orders", replication=1)

    assert (stream.stream_id, stream.config.replication, stream.config.virtual_logs) == (1, 1, 1)
    assert stream.config.durability == common_pb2.DURABILITY_REPLICATED
    await cluster.create("plain", replication=0)  # an unreplicated stream needs no backups


async def test_a_stream_without_a_replication_gets_the_default_of_the_cluster(cluster: Cluster) -> None:
    cluster.settings = cluster.settings.model_copy(update={"default_replication": 1})
    await cluster.restart()
    await cluster.register("a")
    await cluster.register_backup("x")

    assert (await cluster.create("copied")).config.replication == 1
    plain = await cluster.create("plain", replication=0)

    assert plain.config.HasField("replication")
    assert plain.config.replication == 0
    assert plain.config.durability == common_pb2.DURABILITY_LEADER
    assert (await cluster.alter("plain", retention_ms=1)).config.replication == 0


async def test_a_stream_of_a_version_without_replication_stays_unreplicated(cluster: Cluster) -> None:
    await cluster.register("a")
    stream = await cluster.create("orders")
    stored = common_pb2.StreamInfo()
    stored.CopyFrom(stream)
    stored.config.ClearField("replication")
    stored.config.ClearField("virtual_logs")
    await cluster.edit(Write("streams/0000000000000001", stored.SerializeToString(), 1))
    cluster.settings = cluster.settings.model_copy(update={"default_replication": 1})

    after = await cluster.restart()

    assert after.state.catalog.streams() == [stream]
    altered = await cluster.alter("orders", retention_ms=1)
    assert (altered.config.replication, altered.config.virtual_logs, altered.config_version) == (0, 1, 1)


async def test_an_invalid_creation_changes_nothing(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")
    before = await cluster.store.list("")

    with pytest.raises(StreamExists):
        await cluster.create("orders", streamlets=5, brokers=5)
    with pytest.raises(InvalidArgument):
        await cluster.create("a b")
    with pytest.raises(InvalidArgument):
        await cluster.create("other", streamlets=0)

    assert await cluster.store.list("") == before


@pytest.mark.parametrize("failure", [Unavailable("nobody there"), Uncertain("no answer in 3 s")])
async def test_a_creation_fails_when_a_broker_gives_no_answer(cluster: Cluster, failure: Exception) -> None:
    await cluster.register("a")
    await cluster.register("b")
    cluster.brokers.failures[2] = failure

    with pytest.raises(Unavailable, match=f"broker 2 at b:1 gives no answer \\({failure}\\)") as error:
        await cluster.create("orders", streamlets=2)

    assert error.value.attributes == {"stream": "orders", "broker_id": 2}
    assert cluster.brokers.dropped == [(1, 1)]
    with pytest.raises(UnknownStream):
        cluster.coordinator.state.catalog.named("orders")
    cluster.brokers.failures.clear()
    assert (await cluster.create("orders", streamlets=2)).stream_id == 2


async def test_the_caller_of_a_creation_gets_the_refusal_of_a_broker(cluster: Cluster) -> None:
    await cluster.register("a")
    cluster.brokers.failures[1] = InvalidArgument("the group is larger than the arena")

    with pytest.raises(InvalidArgument, match="larger than the arena"):
        await cluster.create("orders")


async def test_an_unexpected_exception_of_a_broker_call_reaches_the_caller(cluster: Cluster) -> None:
    await cluster.register("a")
    cluster.brokers.failures[1] = ZeroDivisionError("defect")

    with pytest.raises(ZeroDivisionError):
        await cluster.create("orders")

    cluster.coordinator.state.catalog.check_free("orders")


async def test_a_second_creation_of_a_name_under_way_is_unavailable(cluster: Cluster) -> None:
    await cluster.register("a")
    first = await cluster.brokers.hold_up(cluster.create("orders"))

    with pytest.raises(Unavailable, match="is being created"):
        await cluster.create("orders")
    with pytest.raises(UnknownStream):
        cluster.coordinator.state.catalog.named("orders")

    cluster.brokers.answering.set()
    assert (await first).stream_id == 1


async def test_a_creation_fails_when_its_broker_restarts_meanwhile(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))

    _, streams = await cluster.register("b", broker_id=1)
    assert streams == []
    cluster.brokers.answering.set()

    with pytest.raises(Unavailable, match="was restarted meanwhile"):
        await creation
    assert cluster.coordinator.state.catalog.streams() == []
    assert cluster.brokers.dropped == [(1, 1)]


async def test_a_broker_that_registers_again_during_a_creation_keeps_the_stream(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))

    _, streams = await cluster.register("a", broker_id=1)
    assert [stream.name for stream in streams] == ["orders"]

    cluster.brokers.answering.set()
    assert (await creation).stream_id == 1


async def test_a_crash_before_the_stream_is_written_leaves_only_a_used_id(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))

    crashed = cluster.coordinator
    await cluster.restart()
    assert cluster.coordinator.state.catalog.streams() == []
    cluster.brokers.answering.set()
    assert (await cluster.create("orders")).stream_id == 2
    _, streams = await cluster.register("a", broker_id=1)
    assert [stream.stream_id for stream in streams] == [2]

    creation.cancel()
    await crashed.close()


async def test_a_caller_that_gives_up_does_not_stop_a_creation_halfway(cluster: Cluster) -> None:
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))

    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    cluster.brokers.answering.set()
    await cluster.coordinator.close()

    assert cluster.coordinator.state.catalog.named("orders").stream_id == 1
    assert (await cluster.restart()).state.catalog.named("orders").stream_id == 1


# --- a store that fails ----------------------------------------------------------------------------------------


async def test_a_stream_that_cannot_be_written_does_not_exist(cluster: Cluster) -> None:
    store = cluster.store
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))
    store.failure = MetadataStoreFull("no room")
    cluster.brokers.answering.set()

    with pytest.raises(MetadataStoreFull):
        await creation

    assert cluster.coordinator.state.catalog.streams() == []
    assert cluster.brokers.dropped == [(1, 1)]
    store.failure = None
    assert (await cluster.create("orders")).stream_id == 2


async def test_brokers_keep_a_stream_that_may_have_been_written(cluster: Cluster) -> None:
    store = cluster.store
    await cluster.register("a")
    creation = await cluster.brokers.hold_up(cluster.create("orders"))
    store.failure = MetadataStoreFailed("input/output error")
    cluster.brokers.answering.set()

    with pytest.raises(MetadataStoreFailed):
        await creation

    assert cluster.brokers.dropped == []
    store.failure = None
    assert (await cluster.restart()).state.catalog.named("orders").stream_id == 1


async def test_a_change_that_cannot_be_written_does_not_change_the_memory(cluster: Cluster) -> None:
    store = cluster.store
    await cluster.register("a")
    await cluster.create("orders")
    store.failure = MetadataStoreFull("no room")

    for change in (
        cluster.register("b"),
        cluster.register("b", 1),
        cluster.create("other"),
        cluster.coordinator.streams.delete("orders"),
        cluster.alter("orders", retention_ms=1),
        cluster.coordinator.producers.init(),
    ):
        with pytest.raises(MetadataStoreFull):
            await change

    assert [broker.broker_epoch for broker in cluster.coordinator.state.brokers.describe_all()] == [1]
    assert owners(cluster.coordinator.state.catalog.named("orders")) == [(1, 1, 1)]
    assert cluster.coordinator.state.catalog.named("orders").config_version == 0
    assert cluster.brokers.opened == [(1, "orders")]
    assert cluster.brokers.dropped == []
    store.failure = None
    assert await cluster.coordinator.producers.init() == (1, 1)


# --- altering streams ------------------------------------------------------------------------------------------


async def test_an_altered_stream_is_stored_and_sent_to_its_brokers(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register("b")
    created = await cluster.create("orders", streamlets=2)

    consumer_groups = coordinator_pb2.ConsumerGroupNames(names=["loader", "audit"])
    stream = await cluster.alter("orders", retention_ms=1000, retention_consumer_groups=consumer_groups)

    assert (created.config_version, stream.config_version) == (0, 1)
    assert (stream.config.retention_ms, list(stream.config.retention_consumer_groups)) == (1000, ["loader", "audit"])
    assert (stream.stream_id, owners(stream)) == (created.stream_id, owners(created))
    assert cluster.brokers.streams == {(1, 1): stream, (2, 1): stream}
    assert cluster.coordinator.state.catalog.named("orders") == stream
    assert (await cluster.restart()).state.catalog.named("orders") == stream


async def test_an_alteration_keeps_the_settings_that_it_does_not_name(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")
    await cluster.alter("orders", retention_ms=1000, durability=common_pb2.DURABILITY_PERSISTED)
    await cluster.alter("orders", retention_bytes=5)

    stream = await cluster.alter("orders", retention_ms=0)

    assert stream.config_version == 3
    assert (stream.config.retention_ms, stream.config.retention_bytes) == (0, 5)
    assert stream.config.durability == common_pb2.DURABILITY_PERSISTED


async def test_virtual_logs_can_be_altered_up_to_the_number_of_streamlets(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders", streamlets=4)

    assert (await cluster.alter("orders", virtual_logs=4)).config_version == 1
    with pytest.raises(InvalidArgument, match="virtual_logs must be between 1 and 4, not 5"):
        await cluster.alter("orders", virtual_logs=5)

    assert (await cluster.restart()).state.catalog.named("orders").config.virtual_logs == 4


async def test_an_alteration_needs_no_live_backups(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register_backup("x")
    await cluster.create("orders", replication=1)
    cluster.clock.advance(3600)

    assert (await cluster.alter("orders", durability=common_pb2.DURABILITY_PERSISTED)).config_version == 1


async def test_an_alteration_that_changes_nothing_is_sent_to_brokers_and_not_written(cluster: Cluster) -> None:
    """It may repeat an alteration whose answer was lost and that some brokers missed."""
    await cluster.register("a")
    await cluster.create("orders")
    cluster.brokers.failures[1] = Unavailable("nobody there")
    altered = await cluster.alter("orders", retention_ms=1000)
    assert cluster.brokers.streams[1, 1].config_version == 0
    cluster.brokers.failures.clear()
    before = await cluster.store.list("")

    assert await cluster.alter("orders", retention_ms=1000) == altered

    assert await cluster.store.list("") == before
    assert cluster.brokers.streams[1, 1] == altered


async def test_an_invalid_alteration_changes_nothing(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")
    await cluster.alter(
        "orders",
        retention_consumed=True,
        retention_consumer_groups=coordinator_pb2.ConsumerGroupNames(names=["loader"]),
    )
    before, opened = await cluster.store.list(""), list(cluster.brokers.opened)

    with pytest.raises(UnknownStream):
        await cluster.alter("other", retention_ms=1)
    with pytest.raises(InvalidArgument, match="needs replication of at least 1"):
        await cluster.alter("orders", durability=common_pb2.DURABILITY_REPLICATED)
    with pytest.raises(InvalidArgument, match="needs retention_consumer_groups"):
        await cluster.alter("orders", retention_consumer_groups=coordinator_pb2.ConsumerGroupNames())

    assert (await cluster.store.list(""), cluster.brokers.opened) == (before, opened)
    assert cluster.coordinator.state.catalog.named("orders").config_version == 1


@pytest.mark.parametrize("failure", [Unavailable("nobody there"), Uncertain("no answer in 3 s")])
async def test_an_absent_broker_learns_of_an_alteration_when_it_registers(cluster: Cluster, failure: Exception) -> None:
    await cluster.register("a")
    await cluster.register("b")
    await cluster.create("orders", streamlets=2)
    cluster.brokers.failures[1] = failure

    altered = await cluster.alter("orders", retention_ms=1000)

    assert cluster.brokers.streams[2, 1] == altered
    _, (stream,) = await cluster.register("a2", broker_id=1)
    assert (stream.config.retention_ms, stream.config_version) == (1000, 1)


async def test_a_stream_that_is_deleted_while_it_is_altered_stays_deleted(cluster: Cluster) -> None:
    """If brokers got the alteration after the deletion, they would open the stream anew."""
    await cluster.register("a")
    await cluster.create("orders")
    alteration = await cluster.brokers.hold_up(cluster.alter("orders", retention_ms=1000))

    await cluster.coordinator.streams.delete("orders")
    cluster.brokers.answering.set()

    with pytest.raises(UnknownStream):
        await alteration
    assert cluster.brokers.streams == {}


async def test_concurrent_alterations_all_take_effect(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")

    await asyncio.gather(
        *(cluster.alter("orders", retention_ms=number) for number in range(1, 11)),
        cluster.register("a2", broker_id=1),
        cluster.alter("orders", retention_bytes=5),
    )

    stream = cluster.coordinator.state.catalog.named("orders")
    assert stream.config_version == 11
    assert (stream.config.retention_ms, stream.config.retention_bytes) == (10, 5)
    assert owners(stream) == [(1, 2, 2 * GROUPS_PER_LAUNCH)]


async def test_a_caller_that_gives_up_does_not_stop_an_alteration_halfway(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders")
    alteration = await cluster.brokers.hold_up(cluster.alter("orders", retention_ms=1000))

    alteration.cancel()
    with pytest.raises(asyncio.CancelledError):
        await alteration
    cluster.brokers.answering.set()
    await cluster.coordinator.close()

    assert cluster.brokers.streams[1, 1].config.retention_ms == 1000


# --- deleting streams ------------------------------------------------------------------------------------------


async def test_brokers_drop_a_deleted_stream_and_its_id_is_not_used_again(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register("b")
    await cluster.create("orders", streamlets=2)

    assert await cluster.coordinator.streams.delete("orders") == 1

    assert sorted(cluster.brokers.dropped) == [(1, 1), (2, 1)]
    with pytest.raises(UnknownStream):
        await cluster.coordinator.streams.delete("orders")
    await cluster.restart()
    assert (await cluster.create("orders")).stream_id == 2


async def test_an_absent_broker_learns_of_a_deletion_when_it_registers(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("gone")
    await cluster.create("kept")
    cluster.brokers.failures[1] = Unavailable("nobody there")

    assert await cluster.coordinator.streams.delete("gone") == 1

    _, streams = await cluster.register("a", broker_id=1)
    assert [stream.name for stream in streams] == ["kept"]


# --- brokers ---------------------------------------------------------------------------------------------------


async def test_brokers_get_ids_and_epochs(cluster: Cluster) -> None:
    first, streams = await cluster.register("a")
    second, _ = await cluster.register("b")

    assert streams == []
    assert [(info.broker_id, info.broker_epoch) for info in (first, second)] == [(1, 1), (2, 2)]
    assert len(cluster.coordinator.state.cluster_id) == 32
    assert cluster.coordinator.state.brokers.describe_all() == [first, second]
    assert len(cluster.coordinator.state.brokers.live_ids()) == 2


async def test_a_new_launch_owns_its_streamlets_with_a_new_epoch_and_new_groups(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register("b")
    await cluster.create("shared", streamlets=2)

    info, streams = await cluster.register("a2", broker_id=1)

    assert (info.broker_id, info.broker_epoch) == (1, 3)
    assert [owners(stream) for stream in streams] == [[(1, 3, 3 * GROUPS_PER_LAUNCH), (2, 2, 1)]]
    assert cluster.coordinator.state.catalog.streams() == streams
    with pytest.raises(StaleEpoch):
        await heartbeat(cluster, 1, 1)
    await heartbeat(cluster, 1, 3)


async def test_a_launch_that_registers_again_keeps_its_streamlets(cluster: Cluster) -> None:
    await cluster.register("a")
    stream = await cluster.create("orders")
    _, streams = await cluster.register("a", broker_id=1)
    assert streams == [stream]


async def test_a_dead_broker_stays_a_member_and_an_owner(cluster: Cluster) -> None:
    await cluster.register("a")
    stream = await cluster.create("orders")
    cluster.clock.advance(3600)

    assert [broker.alive for broker in cluster.coordinator.state.brokers.describe_all()] == [False]
    assert [broker.alive for broker in cluster.coordinator.state.brokers_of(stream)] == [False]
    assert len(cluster.coordinator.state.brokers.live_ids()) == 0


# --- backups ---------------------------------------------------------------------------------------------------


async def test_backups_have_their_own_ids_and_epochs(cluster: Cluster) -> None:
    await cluster.register("a")
    first = await cluster.register_backup("x", rack="r1")
    second = await cluster.register_backup("y")
    again = await cluster.register_backup("y", backup_id=2)
    relaunched = await cluster.register_backup("x2", backup_id=1)

    backups = [first, second, again, relaunched]
    assert [(info.backup_id, info.backup_epoch) for info in backups] == [(1, 1), (2, 2), (2, 2), (1, 3)]
    assert first.rack == "r1"
    assert cluster.coordinator.state.backups.describe_all() == [relaunched, second]
    assert (len(cluster.coordinator.state.backups.live_ids()), len(cluster.coordinator.state.brokers.live_ids())) == (
        2,
        1,
    )
    with pytest.raises(StaleEpoch):
        cluster.coordinator.members.backup_heartbeat(
            coordinator_pb2.BackupHeartbeatRequest(backup_id=1, backup_epoch=1)
        )


async def test_a_restart_keeps_backups_but_not_their_free_space(cluster: Cluster) -> None:
    await cluster.register_backup("x", free_memory_bytes=7)
    await cluster.register_backup("y")
    request = coordinator_pb2.BackupHeartbeatRequest(
        backup_id=2, backup_epoch=2, free_memory_bytes=100, free_disk_bytes=1000
    )
    cluster.coordinator.members.backup_heartbeat(request)
    known = cluster.coordinator.state.backups.describe_all()
    assert [(info.free_memory_bytes, info.free_disk_bytes) for info in known] == [(7, 0), (100, 1000)]
    assert len(await cluster.store.list("backups/")) == 2
    assert list(await cluster.store.list("backups/")) == ["backups/00000001", "backups/00000002"]

    after = await cluster.restart()

    assert [(info.backup_id, info.free_memory_bytes, info.alive) for info in after.state.backups.describe_all()] == [
        (1, 0, True),
        (2, 0, True),
    ]
    after.members.backup_heartbeat(request)
    assert after.state.backups.describe_all()[1] == known[1]
    assert (await cluster.register_backup("z")).backup_id == 3


# --- restarts --------------------------------------------------------------------------------------------------


async def test_a_restart_keeps_streams_brokers_and_epochs(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.register("b")
    await cluster.create("orders", streamlets=4)
    await cluster.register("a2", broker_id=1)
    before = cluster.coordinator

    after = await cluster.restart()

    assert after is not before
    assert after.state.cluster_id == before.state.cluster_id
    assert after.state.catalog.streams() == before.state.catalog.streams()
    assert after.state.brokers.describe_all() == before.state.brokers.describe_all()
    await heartbeat(cluster, 1, 3)
    assert (await cluster.register("c"))[0].broker_id == 3


async def test_producer_ids_are_never_used_again(cluster: Cluster) -> None:
    assert await cluster.coordinator.producers.init() == (1, 1)
    assert await cluster.coordinator.producers.init() == (2, 1)
    assert await (await cluster.restart()).producers.init() == (3, 1)


async def test_a_named_producer_keeps_its_id_and_gets_later_epochs(cluster: Cluster) -> None:
    assert await cluster.coordinator.producers.init("loader") == (1, 1)
    assert await cluster.coordinator.producers.init() == (2, 1)
    assert await cluster.coordinator.producers.init("other") == (3, 1)
    assert await cluster.coordinator.producers.init("loader") == (1, 1 + PRODUCER_EPOCHS)
    after = await cluster.restart()
    assert await after.producers.init("loader") == (1, 1 + 2 * PRODUCER_EPOCHS)
    assert await after.producers.init("other") == (3, 1 + PRODUCER_EPOCHS)
    for name in ("a/b", "x" * 250, " "):
        with pytest.raises(InvalidArgument, match="a producer cannot be called"):
            await after.producers.init(name)
    assert await after.producers.init() == (4, 1)


async def test_concurrent_instances_of_a_name_get_different_epochs(cluster: Cluster) -> None:
    found = await asyncio.gather(*(cluster.coordinator.producers.init("loader") for _ in range(20)))
    assert sorted(found) == [(1, 1 + number * PRODUCER_EPOCHS) for number in range(20)]


async def test_concurrent_changes_get_different_numbers(cluster: Cluster) -> None:
    ids = await asyncio.gather(*(cluster.coordinator.producers.init() for _ in range(20)))
    assert len({producer_id for producer_id, _ in ids}) == 20

    infos = await asyncio.gather(*(cluster.register(f"launch-{number}") for number in range(10)))
    assert {info.broker_id for info, _ in infos} == set(range(1, 11))
    assert {info.broker_epoch for info, _ in infos} == set(range(1, 11))

    streams = await asyncio.gather(*(cluster.create(f"stream-{number}") for number in range(10)))
    assert {stream.stream_id for stream in streams} == set(range(1, 11))
    assert len({owner.broker_id for stream in streams for owner in stream.assignments}) == 10


async def test_two_stored_streams_of_one_name_are_an_internal_error(cluster: Cluster) -> None:
    await cluster.register("a")
    stream = await cluster.create("orders")
    stream.stream_id = 9
    await cluster.edit(Write("streams/0000000000000009", stream.SerializeToString(), 0))

    with pytest.raises(InternalError):
        await cluster.restart()
