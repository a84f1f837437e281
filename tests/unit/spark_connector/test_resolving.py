"""Resolution of users' positions and times against the current streams."""

from dataclasses import replace

import pytest

from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidArgument
from kera.spark_connector.planning import Now, Question, heads, questions, resolve
from kera.spark_connector.planning.offsets import EntryOffset, Offsets, StreamOffsets, StreamRecreated
from kera.spark_connector.planning.places import Place, Time, Where
from tests.unit.spark_connector.worlds import at, entry, named, now_of, offsets, stream_now

NOW = now_of(stream_now({0: [entry(10), entry(0)], 1: [entry(5, first=3), entry(7)]}))
NOW_US = 1_000_000


def where_of(streamlets: dict[int, Place | list[Place]], **more: object) -> Where:
    return Where("startingOffsets", streams={"flights": streamlets}, **more)  # type: ignore[arg-type]


def resolved(
    where: Where, now: Now = NOW, *, found: dict[Question, EntryOffset] | None = None, loss: bool = False
) -> Offsets:
    asked = questions(where, now, now_us=NOW_US)
    assert set(asked) == set(found or {})
    return resolve(where, now, found or {}, now_us=NOW_US, fail_on_data_loss=not loss)


def test_earliest_and_latest_are_the_bounds_of_each_entry() -> None:
    assert resolved(Where("startingOffsets", "earliest")) == offsets((at(0), at(0)), (at(3), at(0)))
    assert resolved(Where("startingOffsets", "latest")) == heads(NOW) == offsets((at(10), at(0)), (at(8), at(7)))


@pytest.mark.parametrize("place", ["earliest", Position(0, 0, 0)])
def test_the_earliest_record_of_an_entry_that_begins_with_a_loss_is_lost_or_skipped(place: Place) -> None:
    bounds = replace(entry(10, group=2), lost=(EARLIEST, Position(2, 1, 0)))
    now = now_of(stream_now({0: [bounds]}))
    where = where_of({0: [place]})

    with pytest.raises(DataLost, match=r"option startingOffsets: .*lost with the memory.*failOnDataLoss") as caught:
        resolved(where, now)
    assert caught.value.attributes["lost_from"] == (0, 0, 0)
    assert caught.value.attributes["available_from"] == (2, 1, 0)
    assert resolved(where, now, loss=True) == offsets((at(0, group=2),))
    assert resolved(where_of({0: "latest"}), now) == offsets((at(10, group=2),))


def test_a_position_applies_to_all_entries_of_a_streamlet_and_a_list_has_one_per_entry() -> None:
    where = where_of({0: "latest", 1: ["earliest", at(2).position]})
    found = {Question(named(1, 1), at(2).position, at(2).position, None): at(2)}

    assert resolved(where, found=found) == offsets((at(10), at(0)), (at(3), at(2)))


def test_positions_at_the_bounds_need_no_request() -> None:
    where = where_of({0: [at(10).position, at(0).position], 1: [at(3), Position(0, 0, 0)]})

    assert resolved(where) == offsets((at(10), at(0)), (at(3), at(0)))


@pytest.mark.parametrize(
    ("streamlets", "words"),
    [
        ({0: "latest"}, r"must name each streamlet: stream 'flights' has \[0, 1\], the option names \[0\]"),
        ({0: "latest", 1: "latest", 2: "latest"}, r"the option names \[0, 1, 2\]"),
        ({0: ["latest"], 1: "latest"}, "streamlet 0 of stream 'flights' has 2 entries, 1 places are given"),
        ({0: ["latest"] * 3, 1: "latest"}, "has 2 entries, 3 places are given"),
    ],
)
def test_each_streamlet_and_each_entry_needs_a_position(streamlets: dict[int, Place | list[Place]], words: str) -> None:
    for ask in (resolved, lambda where: questions(where, NOW, now_us=0)):
        with pytest.raises(InvalidArgument, match=f"option startingOffsets: .*{words}"):
            ask(where_of(streamlets))


def test_an_unnamed_stream_gets_the_default_position_or_is_an_error() -> None:
    now = {**NOW, **now_of(stream_now({0: [entry(4)]}, "trains", 8))}

    settled_now = resolved(where_of({0: "latest", 1: "latest"}, unnamed="earliest"), now)
    assert settled_now.streams["trains"] == StreamOffsets(8, {0: (at(0),)})
    with pytest.raises(InvalidArgument, match="option startingOffsets: must name stream 'trains', too"):
        resolved(where_of({0: "latest", 1: "latest"}), now)


def test_naming_a_missing_stream_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="option startingOffsets: names stream 'flights', which does not exist"):
        resolved(where_of({0: "latest"}), {})


def test_offsets_of_a_deleted_stream_of_the_same_name_are_refused() -> None:
    where = where_of({0: "latest", 1: "latest"}, stream_ids={"flights": 6})

    with pytest.raises(
        StreamRecreated, match="deleted and created again: the offsets belong to incarnation 6, and it is 7 now"
    ):
        resolved(where)


# --- missing positions --------------------------------------------------------------------------------------


def test_a_position_of_removed_records_is_lost_or_the_first_remaining_one() -> None:
    where = where_of({0: "latest", 1: [at(2).position, "latest"]})

    with pytest.raises(
        DataLost, match=r"option startingOffsets: .* streamlet 1, entry 0 was removed.*failOnDataLoss"
    ) as caught:
        resolved(where)
    assert caught.value.attributes == {
        "option": "startingOffsets",
        "stream": "flights",
        "streamlet": 1,
        "entry": 0,
        "lost_from": (1, 1, 128),
        "available_from": (1, 1, 192),
    }
    assert resolved(where, loss=True) == offsets((at(10), at(0)), (at(3), at(7)))


def test_a_position_in_a_removed_group_without_lost_records_is_the_first_remaining_one() -> None:
    """Progress has the ordinal: the end of a group that was read completely and removed since."""
    now = now_of(stream_now({0: [entry(5, first=3, group=2)]}))

    assert resolved(where_of({0: [at(3)]}), now) == offsets((at(3, group=2),))
    with pytest.raises(DataLost):
        resolved(where_of({0: [at(2)]}), now)


def test_a_position_behind_the_head_is_refused_or_becomes_the_head() -> None:
    where = where_of({0: [at(11).position, "latest"], 1: "latest"})

    with pytest.raises(
        InvalidArgument, match=r"\(1, 1, 704\) is beyond the end of .*entry 0, which is \(1, 1, 640\). Use latest"
    ):
        resolved(where)
    assert resolved(where, loss=True) == heads(NOW)


# --- times --------------------------------------------------------------------------------------------------


def asked_for(timestamp_us: int) -> list[Question]:
    return [
        Question(named(0, 0), at(0).position, at(10).position, timestamp_us),
        Question(named(1, 0), at(3).position, at(8).position, timestamp_us),
        Question(named(1, 1), at(0).position, at(7).position, timestamp_us),
    ]


def test_a_time_is_looked_up_in_each_entry_with_records() -> None:
    found = dict(zip(asked_for(NOW_US - 60), (at(4), at(3), at(6)), strict=True))

    where = Where("startingTimestamp", Time(ago_us=60), behind="error")

    assert resolved(where, found=found) == offsets((at(4), at(0)), (at(3), at(6)))


def test_a_time_behind_some_entries_of_a_streamlet_means_their_ends() -> None:
    found = dict(zip(asked_for(50), (at(4), at(8), at(6)), strict=True))

    assert resolved(Where("startingTimestamp", Time(50), behind="error"), found=found) == offsets(
        (at(4), at(0)), (at(8), at(6))
    )


def test_a_time_behind_a_streamlet_is_an_error_or_means_its_end() -> None:
    found = dict(zip(asked_for(50), (at(4), at(8), at(7)), strict=True))

    words = "option startingTimestamp: no record of streamlet 1 of stream 'flights' .*ByTimestampStrategy to latest"
    with pytest.raises(InvalidArgument, match=words):
        resolved(Where("startingTimestamp", Time(50), behind="error"), found=found)
    found[asked_for(50)[1]] = EntryOffset(Position(1, 2, 0), 8)  # the end under its other name
    latest = resolved(Where("startingTimestamp", Time(50), behind="latest"), found=found)
    assert latest == offsets((at(4), at(0)), (at(8), at(7)))


def test_a_time_is_behind_the_end_of_an_empty_stream() -> None:
    now = now_of(stream_now({0: [entry(0)]}))

    assert resolved(Where("endingTimestamp", Time(50)), now) == offsets((at(0),))
    with pytest.raises(InvalidArgument, match="no record of streamlet 0"):
        resolved(Where("startingTimestamp", Time(50), behind="error"), now)


def test_each_time_of_a_streamlet_is_looked_up() -> None:
    first, second, third = (question for question in asked_for(0))
    found = {
        first._replace(timestamp_us=50): at(4),
        second._replace(timestamp_us=NOW_US - 5): at(5),
        third._replace(timestamp_us=NOW_US - 5): at(6),
    }

    where = where_of({0: Time(50), 1: Time(ago_us=5)}, behind="error")

    assert resolved(where, found=found) == offsets((at(4), at(0)), (at(5), at(6)))
