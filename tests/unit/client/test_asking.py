"""Errors of brokers: their meaning, and which routes the client forgets for them."""

import pytest

from kera.client.cluster.asking import ask_broker, is_route_error, of_broker, same_stream
from kera.core.errors import ArenaFull, NotOwner, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.v1 import broker_pb2
from tests.unit.client.fake_support import STREAM_ID, MakeFleet


def test_unknown_stream_from_a_broker_means_not_owner() -> None:
    error = of_broker(UnknownStream("never heard", stream_id=7))
    assert isinstance(error, NotOwner)
    assert is_route_error(error)
    assert "never heard" in error.message
    assert error.attributes == {"stream_id": 7}
    full = ArenaFull("")
    assert of_broker(full) is full
    assert not is_route_error(full)


async def test_an_unreachable_broker_makes_the_client_look_the_stream_up_again(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    stream = await fleet.cluster.stream("s")
    request = broker_pb2.DescribeStreamletsRequest(stream_id=STREAM_ID, streamlet_ids=[0])
    assert len((await ask_broker(fleet.cluster, stream, 1, api.DESCRIBE_STREAMLETS, request)).streamlets) == 1
    asked = fleet.questions()
    await fleet.cluster.stream("s")
    assert fleet.questions() == asked, "all is well"
    await fleet.fake.brokers[1].crash()
    with pytest.raises(Unavailable):
        await ask_broker(fleet.cluster, stream, 1, api.DESCRIBE_STREAMLETS, request)
    await fleet.cluster.stream("s")
    assert fleet.questions() == asked + 1


async def test_a_stream_created_again_is_not_the_same_stream(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    stream = await fleet.cluster.stream("s")
    assert same_stream(stream, STREAM_ID) is stream
    with pytest.raises(UnknownStream, match="deleted and created again"):
        same_stream(stream, STREAM_ID - 1)
