"""Fairness: a client blocks neither the loop with large requests nor the writers with answers that it does not take."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from kera.broker.log import waiting as waiting_module
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.read_sessions import ROUSED_AT_ONCE
from kera.core.base.ids import Position
from kera.core.base.turns import Turns
from kera.core.rpc import Reply, api
from kera.core.rpc.method import Method, Peer
from kera.v1 import broker_pb2
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    cursor,
    limited,
    read_range,
    sequences_of,
    stream_info,
)

LARGE = 1000
REQUESTS: dict[Method[Any, Any], Callable[[], Any]] = {
    api.MEASURE_LAG: lambda: api.MEASURE_LAG.request(cursors=[cursor()] * LARGE),
    api.MULTI_READ_CHUNKS: lambda: api.MULTI_READ_CHUNKS.request(ranges=[read_range(entry=1)] * LARGE),
    api.DESCRIBE_STREAMLETS: lambda: api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0] * LARGE),
}


@pytest.fixture
async def broker(engine: Engine, limits: ServingLimits) -> Broker:
    """A broker that owns streamlet 0 of stream 7, which has two entries. It gives way after each step."""
    turns = Turns(0.0, now=lambda: 0.0)
    broker = Broker(engine, stream_info(owners=(BROKER_ID,), entries=2), limits=limits, turns=turns)
    broker.append(chunk(2, 0))
    return broker


async def rounds_until(condition: Callable[[], bool]) -> int:
    """The rounds of the loop until `condition` holds."""
    rounds = 0
    async with asyncio.timeout(30):
        while not condition():
            rounds += 1
            await asyncio.sleep(0)
    return rounds


@pytest.mark.parametrize("method", REQUESTS, ids=lambda method: method.name)
async def test_others_are_served_while_a_large_request_is_handled(broker: Broker, method: Method[Any, Any]) -> None:
    result = broker.start(method, REQUESTS[method]())
    assert not isinstance(result, Reply), "all of it was done at once"
    large = asyncio.ensure_future(result)
    assert await rounds_until(large.done) >= LARGE
    message = large.result().message
    (rows,) = (getattr(message, name) for name in ("lags", "results", "streamlets") if hasattr(message, name))
    assert len(rows) == LARGE


async def test_dropping_a_stream_fails_the_rest_of_a_large_request(broker: Broker) -> None:
    large = asyncio.ensure_future(broker.start(api.MEASURE_LAG, REQUESTS[api.MEASURE_LAG]()))
    slices = broker.broker.turns.slices
    await rounds_until(lambda: broker.broker.turns.slices > slices + 10)
    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))
    lags = (await large).message.lags
    assert not lags[0].error.code
    assert lags[-1].error.code


async def test_writers_go_on_although_readers_do_not_take_their_answers(broker: Broker) -> None:
    answers, written = [], 1
    for number in range(12 * 4):  # four chunks to a slot, and eight slots
        assert not any(status.error.code for status in broker.append(chunk(2, written))), f"chunk {written}"
        written += 1
        answers.append(broker.read(read_range(), peer=Peer("tcp", str(number))))
        await asyncio.sleep(0)
    assert broker.broker.fetches.outgoing.slots <= broker.arena.slot_count // 4
    assert sequences_of(answers[0])[:2] == [0, 1]


async def test_taken_answers_hold_no_memory(broker: Broker) -> None:
    outgoing = broker.broker.fetches.outgoing
    answers = [broker.read(read_range(), peer=Peer("tcp", str(number))) for number in range(40)]
    assert outgoing.slots == 1
    answers.clear()
    assert (outgoing.slots, outgoing.copied_bytes) == (0, 0)


def session(number: int, ranges: int, **fields: Any) -> Any:
    """The first step of a read session that has nothing to read."""
    wanted = [broker_pb2.ReadRange(start=cursor(entry=1), handle=handle) for handle in range(ranges)]
    return api.MULTI_READ_CHUNKS.request(session_id=number, ranges=wanted, **fields)


def watched(broker: Broker) -> bool:
    return any(entry.waiters or entry.readers for entry in broker.streams.get(STREAM_ID).streamlet(0).entries)


@limited(forgotten_at_once=4)
async def test_the_sessions_of_a_closed_connection_are_forgotten_in_slices(broker: Broker) -> None:
    broker.append(chunk(3, 0))
    peer = Peer("tcp", "gone")
    for number in range(1, 101):
        assert isinstance(broker.start(api.MULTI_READ_CHUNKS, session(number, 4), peer=peer), Reply)
    peer.closed()
    assert watched(broker)
    assert await rounds_until(lambda: not watched(broker)) > 5
    assert broker.broker.sessions.ranges == 0


async def test_a_write_wakes_waiting_requests_a_few_at_a_time(broker: Broker) -> None:
    waiting = [
        asyncio.ensure_future(broker.start(api.MULTI_READ_CHUNKS, session(number, 1, wait_ms=60_000)))
        for number in range(1, 101)
    ]
    await rounds_until(lambda: broker.broker.sessions.ranges == 100)
    for _ in range(200):
        await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    broker.append(chunk(3, 0))
    slices = broker.broker.turns.slices
    done = [0]

    def are_done() -> bool:
        done.append(sum(each.done() for each in waiting))
        return done[-1] == 100

    await rounds_until(are_done)
    assert max(after - before for before, after in pairwise(done)) <= ROUSED_AT_ONCE
    assert broker.broker.turns.slices >= slices + 100 // ROUSED_AT_ONCE  # two quick requests may share a slice
    assert all(each.result().message.results for each in waiting)


@limited(woken_at_once=16)
async def test_many_ranges_of_an_entry_are_woken_in_slices(broker: Broker) -> None:
    broker.append(chunk(3, 0))
    reply = broker.start(api.MULTI_READ_CHUNKS, session(1, 400))
    assert not isinstance(reply, Reply)
    assert len((await reply).message.results) == 400
    broker.append(chunk(3, 1))
    told: list[int] = []
    for step in range(1, 401):
        answer = broker.start(
            api.MULTI_READ_CHUNKS, api.MULTI_READ_CHUNKS.request(session_id=1, step=step, wait_ms=60_000)
        )
        reply = answer if isinstance(answer, Reply) else await answer
        told += [result.handle for result in reply.message.results]
        if len(told) == 400:
            break
    assert 1 < step < 400
    assert sorted(told) == list(range(400)), "each is woken once"


async def test_a_read_of_many_ranges_is_woken_by_any_entry_and_forgotten_when_cancelled(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "FORGOTTEN_AT_ONCE", 1)
    ranges = [read_range(Position(1, 1, CHUNK_BYTES)), *[read_range(entry=1)] * 100]
    first, second = (asyncio.ensure_future(broker.read(*ranges, wait_ms=60_000)) for _ in range(2))
    await rounds_until(lambda: all(e.waiters for e in broker.streams.get(STREAM_ID).streamlet(0).entries))
    second.cancel()
    broker.append(chunk(3, 0))
    async with asyncio.timeout(20):
        assert sequences_of(await first)
    with pytest.raises(asyncio.CancelledError):
        await second
    await rounds_until(lambda: not any(e.waiters for e in broker.streams.get(STREAM_ID).streamlet(0).entries))
