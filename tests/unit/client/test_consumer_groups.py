"""Consumer groups: cursors reported to the coordinator, lag, and the unread ranges."""

from typing import Any, cast

import pytest

from kera.client.admin.consumer_groups import known_groups, measure_lag, unread
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.committed import report_cursors
from kera.client.types import StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.errors import ProtocolError
from kera.core.rpc import Method, Reply
from kera.v1 import broker_pb2, common_pb2, consumer_group_pb2
from tests.unit.client.support import description


class Asked:
    """A cluster that notes its requests."""

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


async def test_an_answer_with_missing_lags_is_a_protocol_error() -> None:
    class Brokers:
        request_timeout_s = 1.0

        def forget(self, _: str) -> None:
            pass

        async def stream(self, _: str) -> StreamDescription:
            return description()

        async def channel(self, *_: Any) -> Any:
            return self

        async def submit(self, *_: Any, **__: Any) -> Any:
            return Reply(broker_pb2.MeasureLagResponse())

    entry = EntryId(description().stream_id, 0, 0)
    with pytest.raises(ProtocolError, match="invalid answer"):
        await measure_lag(cast(Cluster, Brokers()), "s", [(entry, Position(1, 1, 0))])


def test_each_part_of_a_split_group_is_unread_up_to_its_end() -> None:
    """These ranges are the lag of a consumer group, and a reset reads them again."""

    def at(group_id: int, offset: int) -> common_pb2.Cursor:
        return common_pb2.Cursor(group_id=group_id, segment_id=1, position=offset)

    part = consumer_group_pb2.GroupProgress
    parts = [
        part(next=at(3, 64), end=at(3, 640)),
        part(next=at(3, 1280), end=at(3, 1280), part=1, done=True),
        part(next=at(3, 1280), part=2),
    ]
    progress = consumer_group_pb2.StreamletProgress(groups=[part(next=at(3, 64), parts=parts), part(next=at(4, 0))])
    assert unread(Position(3, 1, 64), known_groups(progress, 0)) == [
        (Position(3, 1, 64), Position(3, 1, 640)),
        (Position(3, 1, 1280), Position(4, 1, 0)),
        (Position(4, 1, 0), None),
    ]
    assert known_groups(progress, 1) == []
