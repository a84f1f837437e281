"""Offsets survive the checkpoint, and offsets of another source or a later version are refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.base.ids import Position
from kera.core.errors import InvalidArgument
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, Offsets, StreamOffsets

numbers = st.integers(0, 2**63 - 1)
entry_offsets = st.builds(EntryOffset, st.builds(Position, numbers, numbers, numbers), numbers)
streamlets = st.dictionaries(st.integers(0, 2**31), st.lists(entry_offsets, max_size=3).map(tuple), max_size=4)
streams = st.dictionaries(st.text(), st.builds(StreamOffsets, numbers, streamlets), max_size=3)
offsets = st.builds(Offsets, streams, st.none() | streams, st.text())


def at(record: int, group: int = 1) -> EntryOffset:
    return EntryOffset(Position(group, 1, record * 64), record)


def backwards(of: dict[str, StreamOffsets]) -> dict[str, StreamOffsets]:
    return {
        name: StreamOffsets(stream.stream_id, dict(reversed(list(stream.streamlets.items()))))
        for name, stream in reversed(list(of.items()))
    }


@given(offsets)
def test_offsets_survive_the_checkpoint(before: Offsets) -> None:
    assert Offsets.from_json(json.loads(json.dumps(before.to_json()))) == before


@given(streams, st.none() | streams)
def test_equal_offsets_give_the_same_json_in_any_order(
    there: dict[str, StreamOffsets], since: dict[str, StreamOffsets] | None
) -> None:
    one = Offsets(there, since, "readers")
    other = Offsets(backwards(there), since and backwards(since), "readers")

    assert one == other
    assert json.dumps(one.to_json()) == json.dumps(other.to_json())


@given(
    st.dictionaries(st.text(), st.builds(StreamOffsets, numbers, st.dictionaries(numbers, st.tuples(entry_offsets))))
)
def test_offsets_can_be_rebuilt_from_the_places_of_their_entries(there: dict[str, StreamOffsets]) -> None:
    with_lanes = {name: stream for name, stream in there.items() if stream.streamlets}

    assert Offsets.of(Offsets(there).places(), Offsets(there).stream_ids()) == Offsets(with_lanes)


def test_the_json_of_offsets_has_the_documented_form() -> None:
    stream = StreamOffsets(7, {1: (at(2),), 0: (at(3), at(4, group=2))})
    written = Offsets({"flights": stream}, {"flights": StreamOffsets(7, {0: (at(0),)})}, "spark-kera-source-1a2b3c4d")

    assert json.dumps(written.to_json()) == (
        '{"version": 2, "streams": {"flights": {"stream_id": 7, "streamlets":'
        ' {"0": [[1, 1, 192, 3], [2, 1, 256, 4]], "1": [[1, 1, 128, 2]]}}},'
        ' "since": {"flights": {"stream_id": 7, "streamlets": {"0": [[1, 1, 0, 0]]}}},'
        ' "group": "spark-kera-source-1a2b3c4d"}'
    )


def test_entries_come_in_order() -> None:
    there = {"b": StreamOffsets(8, {0: (at(1),)}), "a": StreamOffsets(7, {1: (at(2),), 0: (at(3), at(4))})}

    assert list(Offsets(there).entries()) == [
        (EntryName("a", 0, 0), at(3)),
        (EntryName("a", 0, 1), at(4)),
        (EntryName("a", 1, 0), at(2)),
        (EntryName("b", 0, 0), at(1)),
    ]


def test_a_checkpoint_of_version_1_is_read() -> None:
    document = {"stream": "flights", "stream_id": 7, "streamlets": {"0": [[1, 1, 128, 2]], "1": [[2, 1, 64, 1]]}}
    of_version_1 = {"flights": StreamOffsets(7, {0: (at(2),), 1: (at(1, group=2),)})}

    assert Offsets.from_json(document) == Offsets(of_version_1)
    assert Offsets.from_json({**document, "since": document["streamlets"]}) == Offsets(of_version_1, of_version_1)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"stream": "s", "stream_id": 1},
        {"stream": "s", "stream_id": 1, "streamlets": {"0": [[1, 2]]}},
        {"version": 2},
        {"version": 2, "streams": []},
        {"version": 2, "streams": {"s": {"streamlets": {}}}},
        {"version": 2, "streams": {"s": {"stream_id": 7, "streamlets": {"zero": []}}}},
        {"version": 2, "streams": {"s": {"stream_id": 7, "streamlets": {"0": [[1, 2, 3]]}}}},
    ],
)
def test_a_checkpoint_of_another_source_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"not of the kera source.*checkpointLocation of its own"):
        Offsets.from_json(document)


def test_the_error_for_a_checkpoint_of_a_later_version_names_the_version() -> None:
    with pytest.raises(InvalidArgument, match=r"offsets of version 3; this connector reads up to 2.*newer connector"):
        Offsets.from_json({"version": 3, "streams": {}})
