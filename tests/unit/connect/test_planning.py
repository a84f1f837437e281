"""`kera.connect.planning`: rounds in the journal, slices, rates."""

from dataclasses import replace

import pyarrow as pa
import pytest

from kera.connect.errors import CopyMismatch
from kera.connect.pieces import Span
from kera.connect.planning.rates import WINDOW_S, Rates
from kera.connect.planning.rounds import Chunks, Planned, Round, abandoned, next_round
from kera.connect.planning.slicing import slices, slices_needed
from kera.core.errors import InternalError

BEGUN = Round(0, "run", "topic t", 5)


def test_a_round_survives_encoding() -> None:
    planned = [Planned(Span("0", [1, 2], [3, 4], 7), 1, {0: 2, 1: 1}), Planned(Span("1", 0, 9, 9), None, {2: 1})]
    first = next_round(replace(BEGUN, partitioner="murmur2_random"), "run", planned)
    second = next_round(first, "other", [Planned(Span("0", [3, 4], [5, 6], 1), 2, {0: 1})])

    assert Round.decode(first.encode()) == first
    assert Round.decode(second.encode()) == second
    assert second.pieces[0].chunks == {0: Chunks(2, 1)}
    assert second.places == {"0": [5, 6], "1": 9}
    assert (second.number, second.records) == (2, 17)


def test_a_journal_keeps_the_start_of_each_chunk() -> None:
    gaps = next_round(BEGUN, "run", [Planned(Span("0", 0, 9, 4), None, {0: 2}, (1, 6))])

    assert Round.decode(gaps.encode()) == gaps
    assert b'"starts":{"0":[1,6]}' in gaps.encode()
    old = gaps.encode().replace(b',"starts":{"0":[1,6]}', b"")
    assert Round.decode(old).pieces[0].starts == ()


def test_a_piece_that_does_not_continue_the_previous_one_is_an_internal_error() -> None:
    first = next_round(BEGUN, "run", [Planned(Span("0", 0, 5, 5), 0, {0: 1})])

    with pytest.raises(InternalError):
        next_round(first, "run", [Planned(Span("0", 4, 6, 2), 0, {0: 1})])


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{}", b"\xff", BEGUN.encode()[:-5], BEGUN.encode().replace(b'"round":0', b'"round":-1')],
)
def test_a_damaged_journal_is_refused_with_a_remedy(data: bytes) -> None:
    with pytest.raises(CopyMismatch, match="kera connect forget"):
        Round.decode(data)


def test_a_journal_of_a_newer_program_is_refused() -> None:
    with pytest.raises(CopyMismatch, match="newer program"):
        Round.decode(BEGUN.encode().replace(b'"version":2', b'"version":3'))


def test_a_journal_of_version_1_can_be_read() -> None:
    data = (
        b'{"version":1,"round":1,"run":"me","source":"table t","stream_id":7,"records":2,"places":{"rows":["9"]},'
        b'"sequences":{"0":1},"pieces":[["rows",["1"],["9"],2,null,[[0,0,1]]]]}'
    )

    found = Round.decode(data)

    assert (found.epoch, found.spans) == (1, [Span("rows", ["1"], ["9"], 2)])
    assert abandoned(found, "me").places == {"rows": ["1"]}


def test_rows_are_cut_into_slices_within_the_size() -> None:
    rows = pa.record_batch({"v": ["x" * 10] * 90 + ["y" * 1000] * 10})

    count = slices_needed(rows, 2000)

    assert all(each.nbytes <= 2000 or each.num_rows == 1 for each in slices(rows, count))
    assert pa.Table.from_batches(slices(rows, count)).equals(pa.Table.from_batches([rows]))


def test_a_row_above_the_size_gets_its_own_slice() -> None:
    rows = pa.record_batch({"v": ["x" * 5000, "y" * 5000]})

    assert [each.num_rows for each in slices(rows, slices_needed(rows, 1000))] == [1, 1]


def test_rates_cover_the_last_seconds_and_give_the_remaining_records_and_time() -> None:
    rates = Rates(100.0, 1000)
    assert rates.standing(100.0).eta_s is None
    rates.add(100, 5000, 101.0)
    assert rates.standing(101.0).records_per_s == pytest.approx(100)
    assert rates.standing(101.0).eta_s == pytest.approx(9)
    for step in range(2, 50):
        rates.add(10, 500, 100.0 + step)
    standing = rates.standing(149.0)
    assert standing.records_per_s == pytest.approx(10, rel=0.2)
    assert standing.left == 1000 - 100 - 480
    assert rates.standing(149.0 + 2 * WINDOW_S).records_per_s == 0
    assert rates.average(200.0).records_per_s == pytest.approx(5.8)


def test_a_copy_of_unknown_size_has_no_remaining_time() -> None:
    rates = Rates(0.0, None)
    rates.add(1, 1, 1.0)
    assert rates.standing(2.0).left is None
    assert rates.standing(2.0).eta_s is None
