"""One client neither stops the loop with what it asks for, nor the writers with answers that it does not take."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kera.core.rpc import Reply, api
from kera.core.rpc.method import Method, Peer
from tests.unit.broker.support import (
    BROKER_ID,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    cursor,
    read_range,
    sequences_of,
    stream_info,
)

LARGE = 20_000
REQUESTS: dict[Method[Any, Any], Callable[[], Any]] = {
    api.MEASURE_LAG: lambda: api.MEASURE_LAG.request(cursors=[cursor()] * LARGE),
    api.MULTI_READ_CHUNKS: lambda: api.MULTI_READ_CHUNKS.request(ranges=[read_range(entry=1)] * LARGE),
    api.DESCRIBE_STREAMLETS: lambda: api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID, streamlet_ids=[0] * LARGE),
}


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    """Owns streamlet 0 of stream 7, which has two entries."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID,), entries=2))
    broker.append(chunk(2, 0))
    return broker


@pytest.mark.parametrize("method", REQUESTS, ids=lambda method: method.name)
async def test_others_are_served_while_a_large_request_is_handled(broker: Broker, method: Method[Any, Any]) -> None:
    result = broker.start(method, REQUESTS[method]())
    assert not isinstance(result, Reply), "all of it was done at once"
    large = asyncio.ensure_future(result)
    served = 0
    while not large.done():
        served += 1
        await asyncio.sleep(0)
    assert served > 5
    message = large.result().message
    (rows,) = (getattr(message, name) for name in ("lags", "results", "streamlets") if hasattr(message, name))
    assert len(rows) == LARGE


async def test_a_stream_that_is_dropped_meanwhile_is_an_error_of_the_rest(broker: Broker) -> None:
    large = asyncio.ensure_future(broker.start(api.MEASURE_LAG, REQUESTS[api.MEASURE_LAG]()))
    slices = broker.broker.turns.slices
    while broker.broker.turns.slices == slices:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))
    lags = (await large).message.lags
    assert not lags[0].error.code
    assert lags[-1].error.code


async def test_writers_go_on_though_readers_do_not_take_their_answers(broker: Broker) -> None:
    answers, written = [], 1
    for number in range(12 * 4):  # four chunks to a slot, and eight slots
        assert not any(status.error.code for status in broker.append(chunk(2, written))), f"chunk {written}"
        written += 1
        answers.append(broker.read(read_range(), peer=Peer("tcp", str(number))))
        await asyncio.sleep(0)
    assert broker.broker.fetches.outgoing.slots <= broker.arena.slot_count // 4
    assert sequences_of(answers[0])[:2] == [0, 1]


async def test_answers_that_are_taken_hold_nothing(broker: Broker) -> None:
    outgoing = broker.broker.fetches.outgoing
    answers = [broker.read(read_range(), peer=Peer("tcp", str(number))) for number in range(40)]
    assert outgoing.slots == 1
    answers.clear()
    assert (outgoing.slots, outgoing.copied_bytes) == (0, 0)
