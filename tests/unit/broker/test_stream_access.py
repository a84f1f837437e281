"""Requests under way: access to streams that come later, and senders that lose their rights meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.ownership.streams import name_of, not_here
from kera.broker.serving.fetch import READ_RANGES_AT_ONCE
from kera.broker.serving.limits import ServingLimits
from kera.core.access.identity import Identity
from kera.core.access.rights import Operation
from kera.core.errors import Unavailable
from kera.core.rpc import Reply, api
from kera.core.rpc.method import Method, Peer
from kera.server.access.audit import Audit
from kera.server.access.guard import Guard
from kera.server.access.requirements import Need
from kera.v1 import access_pb2, broker_pb2, latency_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, cursor, read_range, stream_info
from tests.unit.core.access.support import DAEMON, Now, authenticator, rule, table, user

SECRET = 8
"""A stream that comes later."""
EVERYTHING = (Operation.DESCRIBE, Operation.READ, Operation.WRITE, Operation.DELETE)


class Guarded(Broker):
    """A broker that has a guard with rules, called by alice."""

    def __init__(self, engine: Engine, *rules: access_pb2.AccessRule, slow: bool = False) -> None:
        self.guard = Guard(
            authenticator(Now()), Audit(Now()), name_of=lambda number: name_of(engine.streams, number), unknown=not_here
        )
        mine = rule("user:alice", f"stream:stream-{STREAM_ID}", *EVERYTHING)
        used = rule("user:alice", "group:*", Operation.USE)
        self.rules = [mine, used, *rules]
        self.guard.apply(table(1, [user("alice")], self.rules), 1)
        super().__init__(engine, stream_info(), guard=self.guard)
        self.paused = slow
        self.peer.end = lambda: None
        self.guard.known.meet(self.peer, Identity("alice"))

    def make_secret(self) -> None:
        """Another stream comes to this broker, with a chunk in it."""
        self.streams.open(stream_info(SECRET), BROKER_ID)
        daemon = Peer("unix", "")
        self.guard.known.meet(daemon, DAEMON)
        self.start(
            api.MULTI_WRITE_CHUNKS,
            broker_pb2.MultiWriteChunksRequest(chunk_count=1),
            chunk(1, 0, stream_id=SECRET),
            peer=daemon,
        )


async def answer_of(result: Any) -> Reply[Any]:
    if isinstance(result, Reply):
        return result
    async with asyncio.timeout(20):
        reply: Reply[Any] = await result
        return reply


async def session_read(broker: Guarded) -> Reply[Any]:
    """The answer of a read session that named a stream by its id before the stream was there."""
    limit = ServingLimits().results_max
    ranges = [broker_pb2.ReadRange(handle=n, start=cursor(stream_id=1000 + n)) for n in range(limit)]
    ranges.append(broker_pb2.ReadRange(handle=limit, start=cursor(stream_id=SECRET)))
    first = broker.start(api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(session_id=5, ranges=ranges))
    assert len((await answer_of(first)).message.results) == limit
    broker.make_secret()
    return await answer_of(broker.start(api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(session_id=5, step=1)))


async def test_a_session_without_rights_gets_no_stream_that_comes_after_its_id_was_named(engine: Engine) -> None:
    answer = await session_read(Guarded(engine))
    assert [each.error.code for each in answer.message.results] == ["unknown_stream"]
    assert not answer.bulk


async def test_a_session_with_rights_reads_a_stream_that_comes_later(engine: Engine) -> None:
    answer = await session_read(Guarded(engine, rule("user:alice", f"stream:stream-{SECRET}", Operation.READ)))
    assert sum(map(len, answer.bulk)) > 0


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        (
            api.MULTI_READ_CHUNKS,
            broker_pb2.MultiReadChunksRequest(ranges=[read_range(stream_id=SECRET)] * (READ_RANGES_AT_ONCE + 1)),
        ),
        (api.TRUNCATE_STREAMLETS, broker_pb2.TruncateStreamletsRequest(cursors=[cursor(stream_id=SECRET)])),
        (
            api.COMMIT_CURSORS,
            broker_pb2.CommitCursorsRequest(consumer_group="g", cursors=[cursor(stream_id=SECRET)]),
        ),
        (api.MEASURE_LAG, broker_pb2.MeasureLagRequest(cursors=[cursor(stream_id=SECRET)])),
        (
            api.LOCATE_CHUNKS,
            broker_pb2.LocateChunksRequest(queries=[broker_pb2.ChunkQuery(start=cursor(stream_id=SECRET))]),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else "",
)
async def test_a_slow_request_has_no_access_to_a_stream_that_comes_meanwhile(
    engine: Engine, method: Method[Any, Any], request_: Any
) -> None:
    broker = Guarded(engine)
    result = broker.start(method, request_)  # rights are checked at once, the rest comes later
    broker.make_secret()
    answer = (await answer_of(result)).message
    (items,) = (value for _, value in answer.ListFields() if not isinstance(value, int))
    assert {each.error.code for each in items} == {"unknown_stream"}


async def test_a_write_that_waits_for_room_fails_when_its_sender_loses_a_right(
    make_engine: Callable[..., Engine],
) -> None:
    broker = Guarded(make_engine(slots=2), slow=True)
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=10)
    bulk = b"".join(chunk(1, sequence) for sequence in range(10))
    waiting = asyncio.ensure_future(broker.start(api.MULTI_WRITE_CHUNKS, request, bulk))
    await asyncio.sleep(0)
    # The sender keeps the right to write, but loses another one that it has used: its connection ends.
    broker.guard.check(broker.peer, Need(Operation.USE, "group:g"))
    broker.guard.apply(table(2, [user("alice")], broker.rules[:1]), 1)
    assert broker.peer.dismissed
    broker.resume()
    statuses = (await waiting).message.statuses
    assert [status.error.code for status in statuses] == [""] * 8 + ["authentication_failed"] * 2


async def test_a_starting_broker_is_unavailable_instead_of_calling_a_stream_unknown(engine: Engine) -> None:
    broker = Guarded(engine)
    starting = Broker(engine, guard=broker.guard)
    request = broker_pb2.GetAvailableGroupsRequest(stream_id=SECRET)
    with pytest.raises(Unavailable, match="the broker is starting"):
        starting.start(api.GET_AVAILABLE_GROUPS, request, peer=broker.peer)


async def test_latency_reports_count_only_from_peers_that_may_use_the_stream(engine: Engine) -> None:
    """Other peers do not learn that the stream has a latency constraint."""
    broker = Guarded(engine)
    broker.make_secret()
    manager = broker.plugins.latency
    manager.set_budgets(1, [latency_pb2.StreamBudget(stream_id=each, window_ms=1000) for each in (STREAM_ID, SECRET)])
    samples = [
        latency_pb2.HopSample(
            stream_id=each, hop=latency_pb2.HOP_WORK, count=1, sum_us=5, max_us=5, buckets=[0] * 5 + [1]
        )
        for each in (STREAM_ID, SECRET)
    ]
    request = broker_pb2.MultiReadChunksRequest(latency=latency_pb2.LatencyReport(samples=samples))
    answer = await answer_of(broker.start(api.MULTI_READ_CHUNKS, request))
    assert [advice.stream_id for advice in answer.message.advice] == [STREAM_ID]
    assert [figures.stream_id for figures in manager.figures()] == [STREAM_ID]
    write = broker_pb2.MultiWriteChunksRequest(chunk_count=1, latency=latency_pb2.LatencyReport(samples=samples))
    written = await answer_of(broker.start(api.MULTI_WRITE_CHUNKS, write, chunk(1, 0)))
    assert [advice.stream_id for advice in written.message.advice] == [STREAM_ID]
