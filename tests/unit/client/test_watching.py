"""Summaries of streams for a live view."""

from kera.client.admin.watching import StreamSummary
from kera.v1 import common_pb2


def test_a_streamlet_with_older_records_at_another_broker_counts_as_spread() -> None:
    info = common_pb2.StreamInfo(name="s")
    info.config.durability = common_pb2.DURABILITY_LEADER
    for streamlet_id, owner, holders in ((0, 1, ()), (1, 1, (1,)), (2, 1, (2, 1)), (3, 2, (1, 2))):
        assignment = info.assignments.add(streamlet_id=streamlet_id, broker_id=owner)
        for broker_id in holders:
            assignment.intervals.add(broker_id=broker_id)
    summary = StreamSummary.from_message(info)
    assert summary.spread == 2
    assert summary.owners == {1: 3, 2: 1}
    assert summary.holders == {1, 2}
