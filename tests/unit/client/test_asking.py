"""What a broker's error means, and what is forgotten for it."""

import pytest

from kera.client.cluster.asking import ask_broker, is_route_error, of_broker, same_stream
from kera.core.errors import ArenaFull, NotOwner, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.v1 import broker_pb2
from tests.unit.client.fake_support import STREAM_ID, MakeFleet


def test_a_broker_that_does_not_know_a_stream_is_not_its_owner() -> None:
    error = of_broker(UnknownStream("never heard", stream_id=7))
    assert isinstance(error, NotOwner)
    assert is_route_error(error)
    assert "never heard" in error.message
    assert error.attributes == {"stream_id": 7}
    full = ArenaFull("")
    assert of_broker(full) is full
    assert not is_route_error(full)


async def test_a_broker_that_cannot_be_reached_is_looked_up_again(make_fleet: MakeFleet) -> None:
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


async def test_a_stream_that_was_created_again_is_another_one(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    stream = await fleet.cluster.stream("s")
    assert same_stream(stream, STREAM_ID) is stream
    with pytest.raises(UnknownStream, match="deleted and created again"):
        same_stream(stream, STREAM_ID - 1)
