"""The plan of a reset: how many records a group reads again, and how many it skips."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client.admin.reset_plan import OffsetSpan, compare


@pytest.mark.parametrize(
    ("unread", "new_offset", "again", "skipped"),
    [
        ([(60, 100)], 60, 0, 0),
        ([(60, 100)], 40, 20, 0),
        ([(60, 100)], 70, 0, 10),
        ([(60, 100)], 100, 0, 40),
        ([(100, 100)], 0, 100, 0),
        # Consumers work side by side: 20 to 30 is unread, 30 to 60 was read, and 60 to 100 was not.
        ([(20, 30), (60, 100)], 25, 30, 5),
        ([(20, 30), (60, 100)], 10, 40, 0),
        ([(20, 30), (60, 100)], 80, 0, 30),
    ],
)
def test_a_reset_counts_records_read_again_and_records_skipped(
    unread: list[OffsetSpan], new_offset: int, again: int, skipped: int
) -> None:
    assert compare(unread, new_offset, 100) == (again, skipped)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_the_counts_equal_a_count_record_by_record(was_read: list[bool], data: st.DataObject) -> None:
    end = len(was_read)
    new_offset = data.draw(st.integers(0, end))
    spans = [(number, number + 1) for number, read in enumerate(was_read) if not read]
    assert compare(spans, new_offset, end) == (sum(was_read[new_offset:]), was_read[:new_offset].count(False))
