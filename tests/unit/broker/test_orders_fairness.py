"""Orders about thousands of streamlets give way to other requests, and no order stays half done."""

import asyncio
from typing import Any

import pytest

from kera.broker.log.streamlet import Streamlet
from kera.core.base.turns import Turns
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.rpc.method import Method
from kera.v1 import broker_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, stream_info

STREAMLETS = 300
ALWAYS_OVER = 0.0
"""A slice that is over after one step."""


@pytest.fixture
def turns() -> Turns:
    """The turns of orders."""
    return Turns(ALWAYS_OVER)


@pytest.fixture
async def broker(engine: Engine, turns: Turns) -> Broker:
    """A broker that owns a stream of one streamlet, and gives way after each step."""
    return Broker(engine, stream_info(8, owners=(BROKER_ID,)), order_turns=turns)


def order() -> broker_pb2.OpenStreamletsRequest:
    return broker_pb2.OpenStreamletsRequest(stream=stream_info(owners=(BROKER_ID,) * STREAMLETS, entries=64))


async def rounds(broker: Broker, method: Method[Any, Any], request: Any) -> int:
    """Count the rounds of the loop until the answer comes."""
    answer = asyncio.ensure_future(broker.start(method, request))
    count = 0
    while not answer.done():
        count += 1
        await asyncio.sleep(0)
    await answer
    return count


async def test_opening_sealing_and_dropping_a_stream_give_way_to_other_requests(broker: Broker) -> None:
    assert await rounds(broker, api.OPEN_STREAMLETS, order()) > STREAMLETS / 2
    assert len(broker.streams.get(STREAM_ID).streamlets) == STREAMLETS
    broker.append(chunk(3, 0))
    seal = broker_pb2.SealStreamletsRequest(stream_id=STREAM_ID, streamlet_ids=range(STREAMLETS), wait_ms=1000)
    assert await rounds(broker, api.SEAL_STREAMLETS, seal) > STREAMLETS / 2
    assert all(each.sealed for each in broker.streams.get(STREAM_ID).streamlets.values())
    drop = broker_pb2.DropStreamRequest(stream_id=STREAM_ID)
    assert await rounds(broker, api.DROP_STREAM, drop) > STREAMLETS / 2
    assert STREAM_ID not in broker.streams


@pytest.mark.parametrize("method", [api.OPEN_STREAMLETS, api.DROP_STREAM], ids=lambda method: method.name)
async def test_an_order_under_way_is_carried_out_though_the_caller_has_given_up(
    broker: Broker, turns: Turns, method: Method[Any, Any]
) -> None:
    gone: list[Streamlet] = []
    if method is api.DROP_STREAM:
        await rounds(broker, api.OPEN_STREAMLETS, order())
        gone += broker.streams.get(STREAM_ID).streamlets.values()
    request = order() if method is api.OPEN_STREAMLETS else broker_pb2.DropStreamRequest(stream_id=STREAM_ID)
    slices = turns.slices
    answer = asyncio.ensure_future(broker.start(method, request))
    while turns.slices < slices + STREAMLETS // 2:
        await asyncio.sleep(0)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    if method is api.OPEN_STREAMLETS:
        assert len(broker.streams.get(STREAM_ID).streamlets) == STREAMLETS
    else:
        assert all(list(each.entries) == [] for each in gone)  # each was dropped


async def test_sealing_more_streamlets_than_there_are_is_refused(broker: Broker) -> None:
    request = broker_pb2.SealStreamletsRequest(stream_id=8, streamlet_ids=[0] * 100_000, wait_ms=1)
    with pytest.raises(InvalidArgument, match="100000 are to be sealed"):
        await broker.ask(api.SEAL_STREAMLETS, request)
    assert broker.streams.get(8).streamlets[0].takes_chunks
