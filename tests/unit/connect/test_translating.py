"""`kera.connect.planning.translating`: offsets of a source are translated into chunks of a copy."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.connect.errors import Untranslatable
from kera.connect.pieces import Span
from kera.connect.planning.rounds import Planned, Round, next_round
from kera.connect.planning.slicing import ends_of_slices
from kera.connect.planning.translating import OffsetTable

BEGUN = Round(0, "run", "topic t", 5)


def table(offset: int, *rounds: Round) -> OffsetTable:
    made = OffsetTable({0: offset})
    for each in rounds:
        made.add(Round.decode(each.encode()))
    return made


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[list[int]], list[Round]]:
    """Offsets of the records of each chunk, and the rounds of that copy."""
    gaps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=40))
    offsets = [offset - 1 for offset in accumulate(gaps)]
    cuts = sorted({0, len(offsets), *draw(st.lists(st.integers(0, len(offsets)), max_size=4))})
    chunks: list[list[int]] = []
    rounds = [BEGUN]
    place = 0
    for first, behind in pairwise(cuts):
        rows = offsets[first:behind]
        count = draw(st.integers(1, len(rows)))
        parts = [rows[start:end] for start, end in pairwise(ends_of_slices(len(rows), count))]
        consecutive = rows[-1] - place + 1 == len(rows)
        starts = () if consecutive else tuple(part[0] for part in parts)
        span = Span("0", place, rows[-1] + 1, len(rows))
        rounds.append(next_round(rounds[-1], "run", [Planned(span, None, {0: count}, starts)]))
        chunks += parts
        place = rows[-1] + 1
    return chunks, rounds


@given(copies(), st.data())
def test_a_translated_offset_skips_no_record_and_repeats_at_most_one_chunk(
    copied: tuple[list[list[int]], list[Round]], data: st.DataObject
) -> None:
    chunks, rounds = copied
    offset = data.draw(st.integers(0, chunks[-1][-1]))
    found = table(offset, *rounds).find(0)

    before = [each for chunk in chunks[: found.sequence] for each in chunk]
    assert all(each < offset for each in before)
    again = [each for chunk in chunks[found.sequence :] for each in chunk if each < offset]
    assert set(again) <= set(chunks[found.sequence])
    assert len(again) <= found.records_before_max <= len(chunks[found.sequence])


def test_a_journal_without_offsets_of_chunks_gives_the_first_chunk_of_the_piece() -> None:
    """The journal is from an earlier version, and offsets have gaps."""
    copied = next_round(BEGUN, "run", [Planned(Span("0", 0, 12, 10), None, {0: 2})])
    later = next_round(copied, "run", [Planned(Span("0", 12, 22, 10), None, {0: 2})])

    assert table(9, copied, later).find(0) == (0, 9)
    assert table(18, copied, later).find(0) == (3, 1)


def test_untranslatable_offsets_are_refused_with_a_reason() -> None:
    by_key = next_round(BEGUN, "run", [Planned(Span("0", 0, 10, 10), 1, {0: 1, 1: 1})])
    with pytest.raises(Untranslatable, match="another number of streamlets"):
        table(5, by_key).find(0)

    first = next_round(BEGUN, "run", [Planned(Span("0", 0, 10, 10), None, {0: 1})])
    second = next_round(first, "run", [Planned(Span("0", 10, 20, 10), None, {0: 1})])
    with pytest.raises(
        Untranslatable, match=r"no longer has offset 5 of partition 0: it has offsets from 10 on.*reset"
    ):
        table(5, second).find(0)
    with pytest.raises(Untranslatable, match="nothing of this partition"):
        table(5, replace(second, pieces=())).find(0)


def test_a_table_has_the_progress_of_a_copy() -> None:
    copied = next_round(BEGUN, "run", [Planned(Span("0", 3, 12, 9), None, {0: 2})])
    assert (table(1).copied_to(0), table(1).chunks_of(0)) == (None, 0)
    assert (table(1, copied).copied_to(0), table(1, copied).chunks_of(0)) == (12, 2)
