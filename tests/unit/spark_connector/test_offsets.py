"""What a checkpoint holds comes back as it was, and is refused where it does not belong."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.core.errors import InvalidArgument
from kera.core.ids import Position
from kera.spark_connector.offsets import EntryOffset, StreamOffsets, StreamRecreated, parse_places

numbers = st.integers(0, 2**63 - 1)
entry_offsets = st.builds(EntryOffset, st.builds(Position, numbers, numbers, numbers), numbers)
streamlets = st.dictionaries(st.integers(0, 2**31), st.lists(entry_offsets, max_size=3).map(tuple), max_size=4)
offsets = st.builds(StreamOffsets, st.text(), numbers, streamlets, st.none() | streamlets)


@given(offsets)
def test_offsets_survive_the_checkpoint(before: StreamOffsets) -> None:
    after = StreamOffsets.from_json(json.loads(json.dumps(before.to_json())))

    assert after == before


@given(offsets)
def test_the_same_offsets_give_the_same_text_whatever_their_order(one: StreamOffsets) -> None:
    backwards = StreamOffsets(one.stream, one.stream_id, dict(reversed(list(one.streamlets.items()))), one.since)

    assert json.dumps(backwards.to_json()) == json.dumps(one.to_json())


def test_offsets_of_another_incarnation_are_refused_with_the_way_out() -> None:
    of_seven = StreamOffsets("flights", 7, {})

    of_seven.require(7)
    with pytest.raises(StreamRecreated, match=r"deleted and created again.*new checkpointLocation") as caught:
        of_seven.require(9)
    assert caught.value.attributes == {"stream": "flights", "checkpoint_stream_id": 7, "stream_id": 9}


@pytest.mark.parametrize(
    "document", [{}, {"stream": "s", "stream_id": 1}, {"stream": "s", "stream_id": 1, "streamlets": {"0": [[1, 2]]}}]
)
def test_a_checkpoint_of_another_source_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="not of the kera source"):
        StreamOffsets.from_json(document)


def test_what_progress_shows_can_be_given_as_starting_offsets() -> None:
    shown = StreamOffsets("flights", 7, {0: (EntryOffset(Position(1, 2, 64), 10),)}).to_json()

    assert parse_places("startingOffsets", json.dumps(shown), "flights").streamlets == {0: (Position(1, 2, 64),)}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"trains": {"0": -2}}',
        '{"flights": {"0": -2}, "trains": {"0": -2}}',
        '{"flights": {"x": -2}}',
        '{"flights": {"0": 17}}',
        '{"flights": {"0": [[1, 2]]}}',
        '{"flights": {"0": ["soon"]}}',
    ],
)
def test_offsets_that_name_no_place_are_refused_with_the_option_and_the_text(text: str) -> None:
    with pytest.raises(InvalidArgument, match="option startingOffsets") as caught:
        parse_places("startingOffsets", text, "flights")

    assert text in str(caught.value) or repr(text) in str(caught.value)
