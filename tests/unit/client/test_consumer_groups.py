"""What consumer groups report to the coordinator."""

from typing import Any, cast

import pytest

from kera.client.cluster.cluster import Cluster
from kera.client.consuming.committed import report_cursors
from kera.core.ids import EntryId, Position
from kera.core.rpc import Method
from tests.unit.client.support import description


class Asked:
    """A cluster that notes what it is asked."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    async def ask(self, _: Method[Any, Any], request: Any) -> None:
        self.requests.append(request)


async def test_cursors_of_many_streamlets_are_reported_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.client.consuming.committed.CURSORS_MAX", 6)
    stream, cluster = description(streamlets=7, entries=2), Asked()
    positions = {EntryId(stream.stream_id, number, 1): Position(number + 1, 1, 0) for number in range(7)}

    await report_cursors(cast(Cluster, cluster), "billing", stream, positions)

    assert [[one.streamlet_id for one in each.starts] for each in cluster.requests] == [[0, 1, 2], [3, 4, 5], [6]]
    assert all(each.forward_only and each.consumer_group == "billing" for each in cluster.requests)
    told = [
        (cursor.entry, cursor.group_id) for each in cluster.requests for one in each.starts for cursor in one.cursors
    ]
    assert [group for entry, group in told if entry == 1] == list(range(1, 8))
