"""Positions of entries sort in the order of the log."""

from kera.core.base.ids import EARLIEST, EntryId, Position


def test_positions_compare_in_log_order() -> None:
    in_log_order = [
        Position(1, 1, 0),
        Position(1, 1, 192),
        Position(1, 2, 0),
        Position(2, 1, 0),
        Position(10, 1, 0),
    ]

    mixed = [in_log_order[index] for index in (3, 0, 4, 2, 1)]

    assert sorted(mixed) == in_log_order


def test_earliest_comes_before_every_real_position() -> None:
    assert Position(group_id=1, segment_id=1, offset=0) > EARLIEST


def test_an_entry_id_can_be_a_dictionary_key() -> None:
    assert {EntryId(1, 2, 3): "a"}[EntryId(1, 2, 3)] == "a"
