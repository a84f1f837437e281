"""Truncation and commits: cursors go to the brokers that own them. And the admin's requests to the coordinator."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from kera.client.admin.admin import Admin
from kera.client.cluster.cluster import Cluster
from kera.client.settings import ClientSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import (
    InvalidArgument,
    InvalidCursor,
    KeraError,
    NotOwner,
    StreamletOutOfRange,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.rpc import Answer, Channel, Method, Reply, api
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.unit.client.support import stream_info

END = Position(4, 2, 640)


class CursorBroker:
    """A connection to a broker that owns some streamlets and keeps the cursors that it gets."""

    transport = "tcp"
    closed = False

    def __init__(self, *streamlets: int) -> None:
        self.streamlets = set(streamlets)
        self.sent: list[tuple[Method[Any, Any], dict[EntryId, Position]]] = []
        self.consumer_groups: set[str] = set()
        self.failures: deque[KeraError] = deque()
        """The failures of the next requests."""
        self.refused: dict[int, KeraError] = {}
        """The errors for cursors of these streamlets."""

    def submit(
        self, method: Method[Any, Any], message: Any, bulk: Sequence[Any] = (), *, timeout_s: float
    ) -> Answer[Reply[Any]]:
        assert (list(bulk), timeout_s) == ([], 10.0)
        future: Answer[Reply[Any]] = Answer(loop=asyncio.get_running_loop())
        cursors = {
            EntryId(each.stream_id, each.streamlet_id, each.entry): Position(
                each.group_id, each.segment_id, each.position
            )
            for each in message.cursors
        }
        self.sent.append((method, cursors))
        if method is api.COMMIT_CURSORS:
            self.consumer_groups.add(message.consumer_group)
        if self.failures:
            future.set_exception(self.failures.popleft())
        else:
            future.set_result(Reply(method.response(results=[self._result(each) for each in message.cursors])))
        return future

    def _result(self, cursor: common_pb2.Cursor) -> broker_pb2.CursorResult:
        error = self.refused.get(cursor.streamlet_id)
        if cursor.streamlet_id not in self.streamlets:
            error = NotOwner("another broker has it")
        return broker_pb2.CursorResult(start=cursor, error=error_to_message(error) if error else None)

    async def close(self) -> None:
        pass


class TwoBrokers(Cluster):
    """A cluster without sockets: broker 1 has streamlet 0 of ``s``, and broker 2 has streamlets 1 and 2."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1", ClientSettings(retry_backoff_ms=1, retry_timeout_ms=10_000))
        self.brokers = {1: CursorBroker(0), 2: CursorBroker(1, 2)}
        self.info = stream_info(streamlets=3, entries=2)
        self.owners = [1, 2, 2]
        self.asked: list[tuple[Method[Any, Any], Any]] = []

    async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
        self.asked.append((method, message))
        if method is api.DESCRIBE_STREAM:
            for assignment, owner in zip(self.info.assignments, self.owners, strict=True):
                assignment.broker_id = owner
            return coordinator_pb2.DescribeStreamResponse(stream=self.info)
        return None

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        assert stream.name == "s"
        return self.brokers[broker_id]

    async def bounds(self, name: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        assert name == "s"
        assert not promise
        bound = EntryBounds(EARLIEST, END, 0, 0, 0)
        return {streamlet: [bound, bound] for streamlet in range(3)}

    def sent(self, broker_id: int) -> list[dict[EntryId, Position]]:
        return [cursors for _, cursors in self.brokers[broker_id].sent]


@pytest.fixture
async def cluster() -> AsyncIterator[TwoBrokers]:
    made = TwoBrokers()
    yield made
    await made.close()


@pytest.fixture
def admin(cluster: TwoBrokers) -> Admin:
    return Admin(cluster)


ONE, OTHER = Position(1, 1, 64), Position(2, 2, 128)


async def test_each_broker_gets_the_cursors_of_its_own_streamlets(cluster: TwoBrokers, admin: Admin) -> None:
    positions = {2: [OTHER], 0: [EARLIEST, ONE], 1: [ONE, OTHER]}

    assert await admin.truncate_stream("s", positions) == {0: [EARLIEST, ONE], 1: [ONE, OTHER], 2: [OTHER]}

    assert cluster.sent(1) == [{EntryId(7, 0, 0): EARLIEST, EntryId(7, 0, 1): ONE}]
    assert cluster.sent(2) == [{EntryId(7, 2, 0): OTHER, EntryId(7, 1, 0): ONE, EntryId(7, 1, 1): OTHER}]
    assert {method for broker in cluster.brokers.values() for method, _ in broker.sent} == {api.TRUNCATE_STREAMLETS}


async def test_a_broker_without_cursors_is_not_asked(cluster: TwoBrokers, admin: Admin) -> None:
    assert await admin.truncate_stream("s", {0: [ONE]}) == {0: [ONE]}
    assert await admin.truncate_stream("s", {}) == {}
    assert (len(cluster.sent(1)), len(cluster.sent(2))) == (1, 0)


async def test_truncating_to_latest_uses_the_end_of_each_entry(cluster: TwoBrokers, admin: Admin) -> None:
    assert await admin.truncate_stream("s", "latest") == {key: [END, END] for key in range(3)}
    assert len(cluster.sent(2)[0]) == 4


@pytest.mark.parametrize(
    ("to", "error", "text"),
    [
        ("earliest", InvalidArgument, "takes 'latest', or positions"),
        ("Latest", InvalidArgument, "did you mean 'latest'"),
        (0, InvalidArgument, "takes 'latest', or positions"),
        ({0: ONE}, InvalidArgument, "positions are"),
        ({3: [ONE]}, StreamletOutOfRange, "has streamlets 0 to 2, not 3"),
        ({0: [ONE, ONE, ONE]}, InvalidArgument, "have entries 0 to 1, not 2"),
    ],
)
async def test_an_invalid_truncation_is_refused_before_any_request(
    cluster: TwoBrokers, admin: Admin, to: Any, error: type[KeraError], text: str
) -> None:
    with pytest.raises(error, match=text):
        await admin.truncate_stream("s", to)
    assert cluster.sent(1) == cluster.sent(2) == []


@pytest.mark.parametrize("failure", [Unavailable("nobody listens"), Uncertain("connection was lost")])
async def test_a_failed_request_is_retried(cluster: TwoBrokers, admin: Admin, failure: KeraError) -> None:
    cluster.brokers[2].failures.append(failure)
    await admin.commit_cursors("loader", "s", {0: [ONE], 1: [OTHER]})
    assert cluster.sent(2) == [{EntryId(7, 1, 0): OTHER}] * 2


async def test_cursors_follow_a_streamlet_that_has_moved(cluster: TwoBrokers, admin: Admin) -> None:
    await cluster.stream("s")
    cluster.owners = [1, 1, 2]
    cluster.brokers[1].streamlets, cluster.brokers[2].streamlets = {0, 1}, {2}

    assert await admin.truncate_stream("s", {1: [ONE]}) == {1: [ONE]}

    assert cluster.sent(1) == cluster.sent(2) == [{EntryId(7, 1, 0): ONE}]


async def test_an_error_of_one_streamlet_is_raised_after_all_brokers_answered(
    cluster: TwoBrokers, admin: Admin
) -> None:
    cluster.brokers[1].refused[0] = InvalidCursor("no chunk starts there")
    with pytest.raises(InvalidCursor, match="no chunk starts there"):
        await admin.truncate_stream("s", {0: [ONE], 1: [ONE]})
    assert (len(cluster.sent(1)), len(cluster.sent(2))) == (1, 1)


async def test_positions_of_a_deleted_stream_are_refused_for_a_new_stream_of_its_name(
    cluster: TwoBrokers,
) -> None:
    with pytest.raises(UnknownStream, match="deleted and created again"):
        await cluster.commit("loader", "s", {EntryId(6, 0, 0): ONE})
    assert cluster.sent(1) == []
    assert "s" not in cluster._streams


async def test_a_commit_carries_its_consumer_group_and_needs_one(cluster: TwoBrokers, admin: Admin) -> None:
    await admin.commit_cursors("loader", "s", {0: [ONE], 1: [OTHER]})
    assert [broker.consumer_groups for broker in cluster.brokers.values()] == [{"loader"}, {"loader"}]
    with pytest.raises(InvalidArgument, match="name it with consumer_group"):
        await admin.commit_cursors("", "s", {0: [ONE]})


# --- the admin's requests to the coordinator --------------------------------------------------------------------


async def test_a_stream_is_created_with_its_retention(cluster: TwoBrokers, admin: Admin) -> None:
    rules: dict[str, Any] = {
        "retention_ms": 1000,
        "retention_bytes": 5,
        "retention_consumer_groups": ("loader", "audit"),
        "retention_consumed": True,
    }
    cluster.info = stream_info(streamlets=3, **rules)

    stream = await admin.create_stream("s", **rules)

    config = cluster.asked[0][1].config
    for name, value in rules.items():
        asked = getattr(config, name)
        assert (tuple(asked) if name == "retention_consumer_groups" else asked) == value
        assert getattr(stream.config, name) == value


async def test_an_alteration_returns_the_current_configuration_not_the_cached_one(
    cluster: TwoBrokers, admin: Admin
) -> None:
    assert (await admin.describe_stream("s")).config.retention_ms == 0
    cluster.info.config.retention_ms = 9
    assert (await admin.alter_stream("s", durability="persisted")).config.retention_ms == 9
