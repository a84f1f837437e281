"""Batch reports: a query that reads in batches reports their latency to brokers."""

import pytest

from kera.client.cluster.timing import Timing
from kera.client.consuming.latency.batch_reports import BatchReports, TakenEntry
from kera.core.base.ids import EntryId
from kera.core.latency.hop import Hop
from kera.v1 import latency_pb2
from tests.unit.client.support import FakeCluster, stream_info

STREAM_ID = 7
BUDGET = latency_pb2.StreamBudget(stream_id=STREAM_ID, window_ms=60_000, hand_over_us=5_000)


@pytest.fixture
def quick(cluster: FakeCluster) -> FakeCluster:
    cluster.timing = Timing(latency_report_s=0.0, latency_learn_s=0.0)
    return cluster


def figures(cluster: FakeCluster) -> dict[Hop, tuple[str, int, int]]:
    found = cluster.plugins.latency.figures()
    return {each.hop: (each.consumer_group, each.chunks, each.mean_us) for each in found if each.hop.of_reader}


async def test_a_batch_is_reported_as_hand_over_and_work(quick: FakeCluster) -> None:
    quick.plugins.latency.set_budgets(1, [BUDGET])
    reports = BatchReports(quick, "app", now_s=lambda: 1000.0)  # type: ignore[arg-type]
    assert not reports.watches(STREAM_ID)
    await reports.tell(["s"])
    assert reports.watches(STREAM_ID)

    created_us = quick.plugins.latency.now_us() - 5_000_000
    await reports.done([TakenEntry("s", EntryId(STREAM_ID, 0, 0), created_us)], 1000.0, 1000.25)
    await reports.tell(["s"])

    told = figures(quick)
    assert told.keys() == {Hop.HAND_OVER, Hop.WORK}
    assert told[Hop.WORK] == ("app", 1, 250_000)
    assert 4_900_000 < told[Hop.HAND_OVER][2] < 65_000_000


async def test_without_a_constraint_no_batch_is_reported_and_brokers_are_asked_rarely(cluster: FakeCluster) -> None:
    now_s = 0.0
    reports = BatchReports(cluster, "app", now_s=lambda: now_s)  # type: ignore[arg-type]
    await reports.tell(["s"])
    cluster.plugins.latency.set_budgets(1, [BUDGET])
    now_s = 4.9
    await reports.done([TakenEntry("s", EntryId(STREAM_ID, 0, 0), 1)], 0.0, 1.0)
    await reports.tell(["s"])
    assert not reports.watches(STREAM_ID)
    now_s = 5.1
    await reports.tell(["s"])

    assert reports.watches(STREAM_ID)
    assert figures(cluster) == {}


async def test_batches_of_a_missing_streamlet_or_of_an_earlier_stream_of_the_name_are_not_reported(
    quick: FakeCluster,
) -> None:
    quick.plugins.latency.set_budgets(1, [BUDGET])
    reports = BatchReports(quick, "app")  # type: ignore[arg-type]
    await reports.tell(["s"])
    await reports.done([TakenEntry("s", EntryId(STREAM_ID, 99, 0), 1)], 0.0, 1.0)
    quick.infos["s"] = stream_info(stream_id=STREAM_ID + 1)
    await reports.done([TakenEntry("s", EntryId(STREAM_ID, 0, 0), 1)], 0.0, 1.0)
    await reports.tell(["s"])

    assert figures(quick) == {}
