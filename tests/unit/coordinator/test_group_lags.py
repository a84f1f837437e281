"""Lags of consumer groups: which brokers are asked, how their answers add up, and the metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from kera.coordinator.consumer_groups.lags import TRIES_MAX, GroupLags, Key, done_behind_cursors, where_to_ask
from kera.coordinator.consumer_groups.progress import Group, StreamletProgress
from kera.coordinator.metrics import CoordinatorMetrics
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidCursor, KeraError, Recovering, Unavailable
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2
from tests.metrics import shown
from tests.unit.coordinator.fake_cluster import Cluster
from tests.unit.coordinator.test_intervals import assignment

APP = Key("app", "s")


def place(cursor: common_pb2.Cursor) -> tuple[int, int]:
    return cursor.entry, cursor.group_id


@pytest.fixture
async def lags(cluster: Cluster) -> GroupLags:
    """The lags of consumer group ``app`` in stream ``s``: two brokers, two streamlets with one entry each."""
    await cluster.register("one")
    await cluster.register("two")
    await cluster.create("s", streamlets=2)
    begin(cluster, "app")
    return cluster.coordinator.group_lags


def begin(cluster: Cluster, consumer_group: str) -> None:
    """Put a consumer group at the beginning of both streamlets."""
    for streamlet_id in (0, 1):
        record = StreamletProgress(1, streamlet_id, [EARLIEST]).to_message(consumer_group)
        cluster.coordinator.consumer_groups.registry.take_up(record.SerializeToString(), 0.0)


def failed(error: KeraError) -> broker_pb2.Lag:
    return broker_pb2.Lag(error=error_to_message(error))


def test_all_brokers_with_groups_from_the_cursor_on_are_asked() -> None:
    moved = assignment((1, 1), (2, 57), (1, 90))
    progress = StreamletProgress(1, 0, [EARLIEST, Position(60, 2, 128), Position(95, 1, 0)])
    asked = [(broker_id, place(cursor)) for broker_id, cursor in where_to_ask(progress, moved)]
    assert asked == [(1, (0, 0)), (2, (0, 57)), (2, (1, 60)), (1, (1, 90)), (1, (2, 95))]


def test_records_done_after_a_cursor_do_not_count_as_lag() -> None:
    progress = StreamletProgress(1, 0, [Position(3, 1, 64)])
    progress.groups = {
        (3, 0): Group(0, Position(3, 1, 64), first_record=10, next_record=12),
        (4, 0): Group(0, Position(4, 9, 0), done=True, first_record=20, end_record=30),
        (5, 0): Group(0, Position(5, 1, 0), first_record=30, next_record=33),
        (6, 0): Group(0, Position(6, 9, 0), done=True, first_record=40),
    }
    assert done_behind_cursors(progress) == 10 + 3, (
        "before the cursor is before it, and what is unknown counts as unread"
    )


async def test_the_lag_is_the_sum_over_all_streamlets(cluster: Cluster, lags: GroupLags) -> None:
    cluster.brokers.lag = lambda _, cursor: broker_pb2.Lag(records=10 + cursor.streamlet_id)
    await lags.ask()
    assert lags.records == {APP: 21}
    assert sorted(broker_id for broker_id, _ in cluster.brokers.measured) == [1, 2]


async def test_the_lag_keeps_its_last_value_when_a_broker_does_not_answer(cluster: Cluster, lags: GroupLags) -> None:
    cluster.brokers.lag = lambda *_: broker_pb2.Lag(records=10)
    await lags.ask()
    cluster.brokers.lag = lambda *_: broker_pb2.Lag(records=50)
    cluster.brokers.failures[2] = Unavailable("it is away")
    await lags.ask()
    assert lags.records == {APP: 20}


async def test_records_that_were_removed_unread_do_not_count_as_lag(cluster: Cluster, lags: GroupLags) -> None:
    def lag(_: int, cursor: common_pb2.Cursor) -> broker_pb2.Lag:
        if cursor.streamlet_id == 0 and cursor.group_id < 4:
            return failed(DataLost("it was removed", available_from=[4, 1, 0]))
        if cursor.streamlet_id == 1:
            return failed(InvalidCursor("there is no such place"))
        return broker_pb2.Lag(records=7)

    cluster.brokers.lag = lag
    await lags.ask()
    assert lags.records == {APP: 7}


async def test_a_broker_that_keeps_answering_data_lost_is_asked_a_limited_number_of_times(
    cluster: Cluster, lags: GroupLags
) -> None:
    """This holds whether the broker names the same place each time or a later one."""
    cluster.brokers.lag = lambda *_: failed(DataLost("it was removed", available_from=[4, 1, 0]))
    await lags.ask()
    assert lags.records == {APP: 0}
    assert len(cluster.brokers.measured) == 4

    cluster.brokers.measured.clear()
    cluster.brokers.lag = lambda _, cursor: failed(DataLost("", available_from=[cursor.group_id + 1, 1, 0]))
    await lags.ask()
    assert lags.records == {APP: 0}
    assert len(cluster.brokers.measured) == 2 * TRIES_MAX


async def test_the_lag_keeps_its_last_value_while_a_broker_recovers(cluster: Cluster, lags: GroupLags) -> None:
    cluster.brokers.lag = lambda *_: broker_pb2.Lag(records=10)
    await lags.ask()
    cluster.brokers.lag = lambda *_: failed(Recovering("ask again"))
    await lags.ask()
    assert lags.records == {APP: 20}


async def test_a_dead_broker_is_not_asked_and_its_last_lag_is_kept(cluster: Cluster, lags: GroupLags) -> None:
    cluster.brokers.lag = lambda *_: broker_pb2.Lag(records=10)
    await lags.ask()
    cluster.brokers.measured.clear()
    cluster.coordinator.state.brokers.declare_dead(2)
    await lags.ask()
    assert lags.records == {APP: 20}
    assert [broker_id for broker_id, _ in cluster.brokers.measured] == [1]


async def test_the_number_of_measured_places_is_limited_and_the_rest_is_counted(cluster: Cluster) -> None:
    lags = GroupLags(cluster.coordinator.state, cluster.coordinator.consumer_groups.registry, 0, places_max=3)
    await cluster.register("one")
    await cluster.create("s", streamlets=2)
    for name in ("a", "b", "c"):
        begin(cluster, name)
    await lags.ask()
    assert (list(lags.records), lags.left_out) == ([Key("a", "s")], 2)


async def test_each_broker_asked_about_an_entry_counts_towards_the_limit(cluster: Cluster, lags: GroupLags) -> None:
    await cluster.coordinator.migration.move("s", 0, 2)
    few = GroupLags(cluster.coordinator.state, cluster.coordinator.consumer_groups.registry, 0, places_max=2)
    await few.ask()
    await lags.ask()
    assert (few.records, few.left_out) == ({}, 1)
    assert sum(len(cursors) for _, cursors in cluster.brokers.measured) == 3


async def test_metrics_show_lags(cluster: Cluster, lags: GroupLags) -> None:
    cluster.brokers.lag = lambda *_: broker_pb2.Lag(records=10)
    await lags.ask()
    made = CoordinatorMetrics(CollectorRegistry())
    with made.leading(cluster.coordinator):
        text, totals = shown(made), shown(made, everything=False)
    assert 'kera_coordinator_consumer_group_lag_records{consumer_group="app",stream="s"} 20.0' in text
    assert "kera_coordinator_consumer_group_lags_left_out 0.0" in text
    assert "lag_records" not in totals
    fewer = CoordinatorMetrics(CollectorRegistry(), consumer_groups_max=0)
    with fewer.leading(cluster.coordinator):
        assert "kera_coordinator_consumer_group_lags_left_out 1.0" in shown(fewer)
