import asyncio

import pytest
import structlog

from kera.coordinator.store.metadata import VersionConflict
from kera.core.errors import InvalidArgument, StreamExists, Unavailable, Uncertain
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import Cluster, until

MB = 10**6


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two brokers and a backup; the replicated stream ``orders`` has one streamlet on each broker."""
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", streamlets=2, replication=1)
    return cluster


async def report(cluster: Cluster, broker_id: int, broker_epoch: int = 0) -> None:
    request = coordinator_pb2.ReportBrokerRequest(broker_id=broker_id, broker_epoch=broker_epoch, reason="refused")
    cluster.coordinator.control.report(request)
    await cluster.coordinator.idle()


def owners(cluster: Cluster, name: str = "orders") -> list[int]:
    return [one.broker_id for one in cluster.coordinator.state.catalog.named(name).assignments]


# --- reports of clients ------------------------------------------------------------------------------------------


async def test_a_reported_broker_whose_address_refuses_connections_is_recovered_at_once(two: Cluster) -> None:
    two.brokers.refused = {1}
    await report(two, 1, 1)

    assert owners(two) == [2, 2]
    (recovery,) = two.coordinator.recoveries.describe_all()
    assert (recovery.broker_id, recovery.cause) == (1, "reported")


async def test_a_report_of_an_answering_or_unknown_broker_is_ignored(two: Cluster) -> None:
    await report(two, 1)
    two.brokers.refused = {1}
    await report(two, 1, 7)  # another launch
    await report(two, 9)

    assert two.coordinator.recoveries.describe_all() == []
    assert len(two.coordinator.state.brokers.live_ids()) == 2


async def test_a_reported_broker_that_sends_a_heartbeat_between_two_checks_lives(two: Cluster) -> None:
    two.brokers.refused = {1}
    two.clock.advance(0.01)
    two.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1))
    await asyncio.sleep(0)  # the first check
    await two.heartbeat(1)
    await two.coordinator.idle()

    assert two.coordinator.recoveries.describe_all() == []


async def test_a_refusing_broker_is_not_declared_dead_before_its_next_heartbeat_is_overdue(
    two: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.settings = two.settings.model_copy(update={"heartbeat_interval_ms": 200, "report_grace_ms": 1})
    await two.restart()
    two.brokers.refused = {1}
    two.clock.advance(0.05)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def until_then(seconds: float) -> None:
        if not pauses:
            await two.heartbeat(1)
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", until_then)
    two.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1))
    await two.coordinator.idle()

    assert pauses[0] == pytest.approx(0.25 - 0.05), "when it has missed one"
    assert two.coordinator.recoveries.describe_all() == []


async def test_a_failure_to_tell_a_broker_of_a_stream_is_forgotten_when_the_stream_is_deleted(two: Cluster) -> None:
    two.brokers.failures[1] = Unavailable("nobody there")
    await two.alter("orders", retention_ms=1000)
    await two.settle()
    work = two.coordinator.control._work
    assert work.failure((1, "tell"))
    await two.coordinator.streams.delete("orders")
    await two.settle()
    assert not work.failure((1, "tell"))


async def test_a_reported_broker_that_registers_anew_between_two_checks_lives(two: Cluster) -> None:
    two.brokers.refused = {1}
    two.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1))
    await asyncio.sleep(0)
    await two.register("a2", broker_id=1)
    await two.coordinator.idle()

    assert two.coordinator.recoveries.describe_all() == []


async def test_a_reported_broker_that_is_forgotten_between_two_checks_is_no_error(two: Cluster) -> None:
    two.brokers.refused = {1}
    two.coordinator.control.report(coordinator_pb2.ReportBrokerRequest(broker_id=1))
    await asyncio.sleep(0)
    two.coordinator.state.brokers.forget(1)
    with structlog.testing.capture_logs() as logs:
        await two.coordinator.idle()

    assert logs == []


async def test_a_started_coordinator_recovers_dead_brokers_unasked(two: Cluster) -> None:
    two.settings = two.settings.model_copy(update={"heartbeat_interval_ms": 10})
    coordinator = await two.restart()
    two.coordinator.state.brokers.declare_dead(1)
    coordinator.start()
    await until(lambda: owners(two) == [2, 2], "broker 2 owns all streamlets")
    await coordinator.close()

    assert [one.cause for one in coordinator.recoveries.describe_all()] == ["dead"]


async def test_a_replaced_coordinator_gives_no_more_orders(two: Cluster) -> None:
    stale = two.coordinator
    await two.restart()
    await two.coordinator.producers.init()
    with pytest.raises(VersionConflict):
        await stale.producers.init()
    assert stale.state.lost.done()
    orders = len(two.brokers.epochs)

    stale.state.brokers.declare_dead(1)
    stale.tick()
    await stale.idle()

    assert len(two.brokers.epochs) == orders
    assert stale.recoveries.describe_all() == []
    stale.start()
    await stale.close()


# --- load --------------------------------------------------------------------------------------------------------


async def load(cluster: Cluster, broker_id: int, *bytes_per_s: int) -> None:
    """Send a heartbeat with the load of the streamlets of stream ``busy``, whose id is 2."""
    loads = [
        coordinator_pb2.StreamletLoad(stream_id=2, streamlet_id=number, bytes_per_s=rate, read_bytes_per_s=rate)
        for number, rate in enumerate(bytes_per_s)
    ]
    await cluster.heartbeat(broker_id, loads=loads)


@pytest.fixture
async def busy(cluster: Cluster) -> Cluster:
    """All streamlets are on the first of two brokers."""
    await cluster.register("a")
    await cluster.create("quiet")
    await cluster.create("busy", streamlets=2)
    await cluster.register("b")
    await cluster.heartbeat(2)
    await load(cluster, 1, 10 * MB, 10 * MB)
    return cluster


async def test_a_dry_run_explains_and_moves_nothing(busy: Cluster) -> None:
    response = await busy.coordinator.balancing.rebalance(dry_run=True)

    (move,) = response.moves
    assert (move.stream, move.streamlet_id, move.from_broker_id, move.to_broker_id) == ("busy", 0, 1, 2)
    assert "2.0 times the mean" in move.reason
    assert [
        (one.broker_id, one.bytes_per_s, one.streamlets, one.bytes_per_s_after, one.streamlets_after)
        for one in response.loads
    ] == [(1, 40 * MB, 3, 20 * MB, 2), (2, 0, 0, 20 * MB, 1)]
    assert owners(busy, "busy") == [1, 1]


async def test_rebalancing_leaves_a_streamlet_alone_that_it_has_just_moved(busy: Cluster) -> None:
    response = await busy.coordinator.balancing.rebalance(dry_run=False)
    assert not response.moves[0].HasField("error")
    assert owners(busy, "busy") == [2, 1]

    await load(busy, 2, 50 * MB)
    assert owners(busy, "busy") == [2, 1]
    assert not (await busy.coordinator.balancing.rebalance(dry_run=True)).moves


async def test_a_failed_move_is_reported_and_the_next_plan_moves_another_streamlet(busy: Cluster) -> None:
    busy.brokers.failures[1] = Unavailable("not durable in time")

    response = await busy.coordinator.balancing.rebalance(dry_run=False)

    assert [one.error.message for one in response.moves] == ["not durable in time"]
    assert owners(busy, "busy") == [1, 1]

    busy.brokers.failures.clear()
    await busy.settle()
    (move,) = (await busy.coordinator.balancing.rebalance(dry_run=True)).moves
    assert (move.stream, move.streamlet_id) == ("busy", 1), "the one that failed is left alone for a while"


async def test_load_that_an_earlier_launch_measured_does_not_count(busy: Cluster) -> None:
    await busy.register("a2", broker_id=1)
    await busy.heartbeat(1)
    assert [one.bytes_per_s for one in (await busy.coordinator.balancing.rebalance(dry_run=True)).loads] == [0, 0]


async def test_reads_of_older_groups_elsewhere_do_not_hide_the_load_of_the_owner(busy: Cluster) -> None:
    await busy.coordinator.migration.move("busy", 1, 2)
    await busy.coordinator.migration.move("busy", 1, 1)
    await busy.restart()
    await load(busy, 1, 10 * MB, 10 * MB)
    await busy.heartbeat(2, loads=[coordinator_pb2.StreamletLoad(stream_id=2, streamlet_id=1, read_bytes_per_s=5)])

    loads = (await busy.coordinator.balancing.rebalance(dry_run=True)).loads
    assert [one.bytes_per_s for one in loads] == [40 * MB, 0]


async def test_rebalancing_fails_until_all_brokers_have_reported_their_load(busy: Cluster) -> None:
    await busy.restart()  # the next coordinator has had no heartbeats yet
    await busy.heartbeat(2)
    with pytest.raises(Unavailable, match="broker 1 has not said yet how busy it is"):
        await busy.coordinator.balancing.rebalance(dry_run=False)

    await load(busy, 1, 10 * MB, 10 * MB)
    (move,) = (await busy.coordinator.balancing.rebalance(dry_run=True)).moves
    assert move.stream == "busy"


async def test_loop_busy_times_count_once_all_brokers_report_them(busy: Cluster) -> None:
    loads = [
        coordinator_pb2.StreamletLoad(stream_id=2, streamlet_id=number, bytes_per_s=rate)
        for number, rate in enumerate((30_000, 10_000))
    ]
    await busy.heartbeat(1, loads=loads, loop_busy_permille=800)
    plan = await busy.coordinator.balancing.rebalance(dry_run=True)
    assert [one.stream for one in plan.moves] == ["quiet"], "broker 2 does not tell"
    assert [one.busy_permille for one in plan.loads] == [0, 0]

    await busy.heartbeat(2, loop_busy_permille=10)
    plan = await busy.coordinator.balancing.rebalance(dry_run=True)
    assert [(one.stream, one.streamlet_id) for one in plan.moves] == [("busy", 0)]
    assert [(one.busy_permille, one.busy_permille_after) for one in plan.loads] == [(800, 200), (0, 600)]
    await busy.heartbeat(1, loads=loads, loop_busy_permille=1 << 31)  # a loop is busy for 1000 permille at most
    assert (await busy.coordinator.balancing.rebalance(dry_run=True)).loads[0].busy_permille == 1000


async def test_streamlets_are_rebalanced_at_the_interval_that_is_set(busy: Cluster) -> None:
    busy.settings = busy.settings.model_copy(update={"rebalance_interval_ms": 1000})
    await busy.restart()
    await busy.heartbeat(2)
    await load(busy, 1, 10 * MB, 10 * MB)
    await busy.settle()
    assert owners(busy, "busy") == [1, 1]

    for _ in range(20):
        busy.clock.advance(0.1)
        await busy.settle()
    assert owners(busy, "busy") == [2, 1]


async def test_rebalancing_catches_up_when_a_silent_broker_reports_its_load(busy: Cluster) -> None:
    busy.settings = busy.settings.model_copy(update={"rebalance_interval_ms": 60_000, "heartbeat_interval_ms": 30_000})
    await busy.restart()
    busy.clock.advance(60)
    await busy.heartbeat(2)
    await busy.settle()
    assert owners(busy, "busy") == [1, 1]

    await load(busy, 1, 10 * MB, 10 * MB)
    await busy.settle()
    assert owners(busy, "busy") == [2, 1]


async def test_rebalancing_moves_nothing_to_a_draining_broker(busy: Cluster) -> None:
    await busy.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2))
    assert not (await busy.coordinator.balancing.rebalance(dry_run=True)).moves


# --- repeated creations ------------------------------------------------------------------------------------------


async def create(cluster: Cluster, name: str, creation_id: str) -> common_pb2.StreamInfo:
    config = common_pb2.StreamConfig(streamlets=1, entries=1, group_segments=4)
    return await cluster.coordinator.streams.create(name, config, common_pb2.StreamSchema(), creation_id)


async def test_a_repeated_request_to_create_finds_its_own_stream(two: Cluster) -> None:
    made = await create(two, "s", "id-1")

    assert await create(two, "s", "id-1") == made
    assert await (await two.restart()).streams.create("s", made.config, made.schemas[0], "id-1") == made
    for other in ("id-2", ""):
        with pytest.raises(StreamExists):
            await create(two, "s", other)
    with pytest.raises(InvalidArgument, match="at most 64 characters"):
        await create(two, "t", "x" * 65)


async def test_a_repeated_request_to_create_waits_for_the_first(two: Cluster) -> None:
    first = await two.brokers.hold_up(create(two, "s", "id-1"))
    second = asyncio.create_task(create(two, "s", "id-1"))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(Unavailable, match="is being created"):
        await create(two, "s", "id-2")
    two.brokers.answering.set()

    assert (await second).stream_id == two.coordinator.state.catalog.named("s").stream_id
    two.brokers.failures[1] = two.brokers.failures[2] = Unavailable("nobody there")
    results = await asyncio.gather(create(two, "t", "id-3"), create(two, "t", "id-3"), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, Unavailable]


@pytest.mark.parametrize("returns", ["by itself", "as another launch", "never"])
async def test_a_change_is_sent_again_to_a_broker_that_missed_it(cluster: Cluster, returns: str) -> None:
    for launch in ("a", "b"):
        await cluster.register(launch)
    stream = await cluster.create("orders", streamlets=2)
    cluster.brokers.failures[2] = Uncertain("no answer in 3 s")
    await cluster.alter("orders", retention_ms=1)
    await cluster.settle()
    assert not cluster.brokers.streams[2, stream.stream_id].config.retention_ms
    opened = len(cluster.brokers.opened)

    if returns == "never":
        await cluster.coordinator.streams.delete("orders")
    cluster.brokers.failures.clear()
    if returns == "as another launch":
        await cluster.register("c", broker_id=2)
    for _ in range(3):
        await cluster.settle()

    assert len(cluster.brokers.opened) == opened + (returns != "never")
    if returns != "never":
        assert cluster.brokers.streams[2, stream.stream_id].config.retention_ms == 1
