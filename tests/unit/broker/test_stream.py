from typing import Any

import pytest

from kera.broker.arena import Arena
from kera.broker.stream import Streams
from kera.core.errors import InvalidArgument, NotOwner, StreamletOutOfRange, UnknownStream
from tests.unit.broker.support import BROKER_ID, STREAM_ID, stream_info

OTHER = BROKER_ID + 1


@pytest.fixture
def streams(arena: Arena) -> Streams:
    return Streams(arena)


def test_exactly_the_streamlets_that_are_assigned_to_the_broker_are_opened(streams: Streams) -> None:
    streams.open(stream_info(owners=(OTHER, BROKER_ID, OTHER, BROKER_ID), entries=3), BROKER_ID)
    stream = streams.get(STREAM_ID)

    assert sorted(stream.streamlets) == [1, 3]
    streamlet = stream.streamlet(3)
    assert (streamlet.streamlet_id, len(streamlet.entries), streamlet.broker_epoch) == (3, 3, 9)


def test_a_streamlet_of_another_broker_is_refused_and_worth_another_try(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    with pytest.raises(NotOwner) as raised:
        streams.get(STREAM_ID).streamlet(1)

    assert raised.value.retriable
    assert raised.value.attributes == {"stream": "stream-7", "streamlet_id": 1}


def test_a_streamlet_that_the_stream_does_not_have_is_refused_with_their_number(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    with pytest.raises(StreamletOutOfRange, match="0 to 1, not 2") as raised:
        streams.get(STREAM_ID).streamlet(2)

    assert raised.value.attributes == {"stream": "stream-7", "streamlet_id": 2, "streamlets": 2}


def test_a_stream_that_is_not_here_is_refused_by_its_id(streams: Streams) -> None:
    with pytest.raises(UnknownStream) as raised:
        streams.get(8)

    assert raised.value.attributes == {"stream_id": 8}


def test_opening_again_leaves_open_streamlets_as_they_are_and_adds_new_ones(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    before = streams.get(STREAM_ID).streamlet(0)
    streams.open(stream_info(owners=(BROKER_ID, BROKER_ID)), BROKER_ID)

    assert streams.get(STREAM_ID).streamlet(0) is before
    assert sorted(streams.get(STREAM_ID).streamlets) == [0, 1]
    assert len(streams) == 1


def test_groups_begin_where_the_assignment_says_and_never_with_0(streams: Streams) -> None:
    info = stream_info(owners=(BROKER_ID, BROKER_ID))
    info.assignments[0].first_group_id = 500
    info.assignments[1].first_group_id = 0
    streams.open(info, BROKER_ID)

    assert [streams.get(STREAM_ID).streamlet(index).first_group_id for index in (0, 1)] == [500, 1]


@pytest.mark.parametrize("missing", ["streamlets", "entries", "group_segments"])
def test_an_incomplete_configuration_opens_nothing(streams: Streams, missing: str) -> None:
    configuration: dict[str, Any] = {missing: 0}
    with pytest.raises(InvalidArgument, match="stream-7"):
        streams.open(stream_info(**configuration), BROKER_ID)

    assert len(streams) == 0


def test_a_dropped_stream_is_gone_and_the_others_stay(streams: Streams) -> None:
    streams.open(stream_info(7), BROKER_ID)
    streams.open(stream_info(8), BROKER_ID)
    streams.drop(7)
    streams.drop(7)

    assert [stream.stream_id for stream in streams] == [8]
    with pytest.raises(UnknownStream):
        streams.get(7)
