from typing import Any

import pytest

from kera.broker.log.retention import Rules
from kera.broker.log.streamlet import ProducerLimits
from kera.broker.ownership.streams import Streams
from kera.core.errors import InvalidArgument, NotOwner, ProducerFenced, StreamletOutOfRange, UnknownStream
from kera.core.format.chunk import verify_header
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Engine, Log, Outcome, chunk, stream_info

OTHER = BROKER_ID + 1


@pytest.fixture
def streams(engine: Engine) -> Streams:
    return engine.streams


def test_exactly_the_assigned_streamlets_are_opened(streams: Streams) -> None:
    streams.open(stream_info(owners=(OTHER, BROKER_ID, OTHER, BROKER_ID), entries=3), BROKER_ID)
    stream = streams.get(STREAM_ID)

    assert sorted(stream.streamlets) == [1, 3]
    streamlet = stream.streamlet(3)
    assert (streamlet.streamlet_id, len(streamlet.entries), streamlet.broker_epoch) == (3, 3, 9)


def test_a_streamlet_of_another_broker_is_refused_with_a_retriable_error(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    with pytest.raises(NotOwner) as raised:
        streams.get(STREAM_ID).streamlet(1)

    assert raised.value.retriable
    assert raised.value.attributes == {"stream": "stream-7", "streamlet_id": 1}


def test_the_error_for_a_streamlet_out_of_range_names_the_number_of_streamlets(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    with pytest.raises(StreamletOutOfRange, match="0 to 1, not 2") as raised:
        streams.get(STREAM_ID).streamlet(2)

    assert raised.value.attributes == {"stream": "stream-7", "streamlet_id": 2, "streamlets": 2}


def test_a_stream_that_is_not_here_is_refused_by_its_id(streams: Streams) -> None:
    with pytest.raises(UnknownStream) as raised:
        streams.get(8)

    assert raised.value.attributes == {"stream_id": 8}


def test_a_fence_holds_for_open_streamlets_and_for_later_ones(streams: Streams) -> None:
    streams.open(stream_info(owners=(BROKER_ID, OTHER)), BROKER_ID)
    fences = coordinator_pb2.ProducerFences(version=1, producer_ids=[1], first_epochs=[4])
    streams.fences.note(fences)
    streams.open(stream_info(owners=(BROKER_ID, BROKER_ID)), BROKER_ID)

    for streamlet_id in (0, 1):
        made = chunk(streamlet_id=streamlet_id, producer_id=1, producer_epoch=3)
        with pytest.raises(ProducerFenced):
            streams.get(STREAM_ID).streamlet(streamlet_id).append(memoryview(made), verify_header(made))


def test_incomplete_fences_are_ignored_and_do_not_change_the_version(streams: Streams) -> None:
    streams.fences.note(coordinator_pb2.ProducerFences(version=1, producer_ids=[1], first_epochs=[4]))
    streams.fences.note(coordinator_pb2.ProducerFences(version=2, producer_ids=[1, 2], first_epochs=[5]))

    assert (streams.fences.version, streams.fences.first_epochs) == (1, {1: 4})


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

    assert [streams.get(STREAM_ID).streamlet(index).next_group_id for index in (0, 1)] == [500, 1]


@pytest.mark.parametrize("missing", ["streamlets", "entries", "group_segments"])
def test_an_incomplete_configuration_opens_nothing(streams: Streams, missing: str) -> None:
    configuration: dict[str, Any] = {missing: 0}
    with pytest.raises(InvalidArgument, match="stream-7"):
        streams.open(stream_info(**configuration), BROKER_ID)

    assert len(streams) == 0


def test_a_dropped_stream_is_gone_and_the_others_stay(engine: Engine, streams: Streams) -> None:
    streams.open(stream_info(7), BROKER_ID)
    streams.open(stream_info(8), BROKER_ID)
    done = Outcome()
    streams.drop(7)
    streams.drop(7, done)
    engine.run()

    assert done.calls == [None]
    assert [stream.stream_id for stream in streams] == [8]
    assert [7 in streams, 8 in streams] == [False, True]
    with pytest.raises(UnknownStream):
        streams.get(7)


# --- configuration -----------------------------------------------------------------------------------------


def test_a_newer_configuration_is_taken_over_and_an_older_one_is_not(streams: Streams) -> None:
    for version, retention_ms in ((2, 2000), (1, 1000), (3, 3000), (2, 2000)):
        info = stream_info(retention_ms=retention_ms, durability=common_pb2.DURABILITY_PERSISTED)
        info.config_version = version
        streams.open(info, BROKER_ID)

    stream = streams.get(STREAM_ID)
    assert (stream.config_version, stream.retention) == (3, Rules(age_us=3_000_000))
    assert stream.durability == common_pb2.DURABILITY_PERSISTED


def test_the_default_durability_of_a_stream_is_level_leader(streams: Streams) -> None:
    streams.open(stream_info(), BROKER_ID)

    assert streams.get(STREAM_ID).durability == common_pb2.DURABILITY_LEADER


# --- what was there before ---------------------------------------------------------------------------------


def test_a_streamlet_goes_on_from_what_is_on_disk(engine: Engine, streams: Streams) -> None:
    before = Log(engine)
    before.append_many(5)
    engine.memory.segments.close_all()
    engine.run()
    streams.open(stream_info(), BROKER_ID)
    streamlet = streams.get(STREAM_ID).streamlet(0)

    assert streamlet.available_groups() == (1, 1)
    assert streamlet.next_group_id == 2
    assert streamlet.producers == before.streamlet.producers


def test_producers_forgotten_at_a_start_are_removed_from_the_index(
    engine: Engine,
) -> None:
    before = Log(engine)
    for producer in range(1, 8):
        before.append(producer)
    engine.memory.segments.close_all()
    engine.run()
    streams = Streams(engine.memory, engine.restart, engine.replication, ProducerLimits(kept=2, spare=1))
    streams.open(stream_info(), BROKER_ID)
    engine.run()

    assert set(streams.get(STREAM_ID).streamlet(0).producers) == {6, 7}, "those who came last"
    assert set(engine.index.producers(STREAM_ID, 0)) == {6, 7}


def test_a_dropped_stream_leaves_no_file_and_no_record(engine: Engine, streams: Streams) -> None:
    streams.open(stream_info(), BROKER_ID)
    streams.open(stream_info(8), BROKER_ID)
    for stream_id in (STREAM_ID, 8):
        streamlet = streams.get(stream_id).streamlet(0)
        for sequence in range(5):
            data = memoryview(chunk(1, sequence, stream_id=stream_id))
            streamlet.append(data, verify_header(data))
    engine.memory.segments.close_all()
    engine.run()
    assert len(list(engine.store.physical_ids())) == 4
    done = Outcome()
    streams.drop(STREAM_ID, done)
    assert done.calls == [], "not before the files are gone"
    engine.run()

    assert done.calls == [None]
    assert len(list(engine.store.physical_ids())) == 2
    assert engine.index.stream_ids() == {8}
    assert engine.index.keys_of_stream(STREAM_ID) == []
