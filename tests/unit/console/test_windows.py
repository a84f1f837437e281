import itertools
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.console.browsing.windows import EntryKey, Newest, Stretch, marks_from_text, marks_to_text, pick
from kera.core.errors import InvalidArgument


class R(NamedTuple):
    offset: int
    timestamp_us: int


@st.composite
def logs(draw: st.DrawFn) -> dict[EntryKey, list[R]]:
    """Entries with records whose times may be out of order."""
    times = st.lists(st.integers(0, 20), max_size=12)
    return {
        EntryKey(streamlet, 0): [R(offset, time) for offset, time in enumerate(draw(times))]
        for streamlet in range(draw(st.integers(1, 4)))
    }


@given(logs(), st.integers(1, 7), st.integers(1, 9), st.booleans(), st.integers(1, 3))
def test_pages_have_each_record_once_in_the_order_of_its_entry(
    log: dict[EntryKey, list[R]], count: int, step: int, backward: bool, every: int
) -> None:
    marks = {key: len(rows) if backward else 0 for key, rows in log.items()}
    seen: dict[EntryKey, list[R]] = {key: [] for key in log}
    for page in itertools.count():
        assert page < 200, "each page gets further"
        stretches = {}
        for key, rows in log.items():
            low, high = (max(0, marks[key] - step), marks[key]) if backward else (marks[key], marks[key] + step)
            high = min(high, len(rows))
            stretches[key] = Stretch(low, high, [row for row in rows[low:high] if row.offset % every == 0])
        taken, marks = pick(stretches, count, backward=backward)
        assert len(taken) <= count
        for key, row in taken:
            seen[key].append(row)
        if all(mark == (0 if backward else len(log[key])) for key, mark in marks.items()):
            break
    for key, rows in log.items():
        wanted = [row for row in rows if row.offset % every == 0]
        assert seen[key] == (wanted[::-1] if backward else wanted)


def test_records_of_several_entries_are_merged_by_time() -> None:
    one, two = EntryKey(0, 0), EntryKey(1, 0)
    stretches = {one: Stretch(0, 2, [R(0, 10), R(1, 30)]), two: Stretch(0, 2, [R(0, 20), R(1, 40)])}
    taken, marks = pick(stretches, 3, backward=False)
    assert [row.timestamp_us for _, row in taken] == [10, 20, 30]
    assert marks == {one: 2, two: 1}
    taken, marks = pick(stretches, 3, backward=True)
    assert [row.timestamp_us for _, row in taken] == [40, 30, 20]
    assert marks == {one: 1, two: 0}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 60))
def test_the_newest_rows_are_kept_with_the_offset_from_which_they_are_complete(
    weights: list[int], bytes_max: int
) -> None:
    newest: Newest[R] = Newest(bytes_max)
    for offset, weight in enumerate(weights):
        newest.add([R(offset, 0)], weight)
    kept = [row.offset for row in newest.rows]
    assert kept == list(range(len(weights)))[-len(kept) :]
    assert len(kept) == 1 or sum(weights[kept[0] :]) <= bytes_max
    assert newest.low == (kept[0] if len(kept) < len(weights) else None)


@given(
    st.dictionaries(st.tuples(st.integers(0, 70), st.integers(0, 3)), st.integers(0, 1 << 60), min_size=1),
    st.integers(0, 99),
)
def test_marks_survive_encoding_in_an_address(given_: dict[tuple[int, int], int], turn: int) -> None:
    marks = {EntryKey(*key): ordinal for key, ordinal in given_.items()}
    assert marks_from_text(marks_to_text(marks, turn), list(marks)) == (marks, turn)


@pytest.mark.parametrize(
    "text",
    ["", "~", "x.y", "0~0.0", "0~0.0.0.0", "0~5.0.1", "0~0.0.1~0.0.1", "0~0.0.-1", "0~0.0.zzzzzzzzzzzzzz", "0~०.0.1"],
)
def test_invalid_marks_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="start with the first page"):
        marks_from_text(text, [EntryKey(0, 0)])
