"""Micro-batches keep within their limits, share them fairly among entries, and wait no longer than allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.spark_connector.planning.admission import BatchLimits, EntryShare, Take, Wait, Waiting, decide
from kera.spark_connector.planning.offsets import EntryName

A, B, C = (EntryName("flights", 0, 0), EntryName("flights", 0, 1), EntryName("trains", 0, 0))


def there(records: int, length_bytes: int = 0, most: int | None = None) -> Waiting:
    return Waiting(records, length_bytes, length_bytes if most is None else most)


def shares(waiting: dict[EntryName, Waiting], limits: BatchLimits) -> dict[EntryName, EntryShare]:
    decision = decide(waiting, limits, waited_ms=0)
    assert isinstance(decision, Take)
    return dict(decision.shares)


def test_without_limits_a_micro_batch_takes_everything() -> None:
    assert shares({A: there(900), C: there(100)}, BatchLimits()) == {}


def test_shares_of_records_follow_the_backlog_and_no_entry_is_left_out() -> None:
    waiting = {A: there(900), B: there(1), C: there(100)}

    assert shares(waiting, BatchLimits(records_max=1001)) == {}
    assert shares(waiting, BatchLimits(records_max=100)) == {
        A: EntryShare(89, None),
        B: EntryShare(1, None),
        C: EntryShare(9, None),
    }
    assert shares(waiting, BatchLimits(records_max=1)) == dict.fromkeys(waiting, EntryShare(1, None))


def test_shares_of_bytes_follow_the_estimates() -> None:
    waiting = {A: there(1, 900), C: there(1, 100)}

    assert shares(waiting, BatchLimits(bytes_max=1000)) == {}
    assert shares(waiting, BatchLimits(bytes_max=100)) == {A: EntryShare(None, 90), C: EntryShare(None, 10)}


def test_a_byte_limit_holds_when_the_estimate_is_too_low() -> None:
    waiting = {A: there(1, 300, most=5000), C: there(1, 100)}

    assert shares(waiting, BatchLimits(bytes_max=800)) == {A: EntryShare(None, 600), C: EntryShare(None, 200)}


def test_record_and_byte_limits_apply_together() -> None:
    waiting = {A: there(30, 900), C: there(10, 100)}

    assert shares(waiting, BatchLimits(records_max=20, bytes_max=100)) == {A: EntryShare(15, 90), C: EntryShare(5, 10)}
    assert shares(waiting, BatchLimits(records_max=40, bytes_max=100)) == {
        A: EntryShare(None, 90),
        C: EntryShare(None, 10),
    }
    assert shares(waiting, BatchLimits(records_max=20, bytes_max=1000)) == {
        A: EntryShare(15, None),
        C: EntryShare(5, None),
    }


@pytest.mark.parametrize(
    ("records", "waited_ms", "available_now", "waits"),
    [
        (9, 0, False, True),
        (9, 59_999, False, True),
        (9, 60_000, False, False),
        (9, None, False, False),  # the first of a launch, as with Kafka
        (9, 0, True, False),
        (10, 0, False, False),
    ],
)
def test_a_micro_batch_waits_for_its_minimum_up_to_the_maximal_delay(
    records: int, waited_ms: int | None, available_now: bool, waits: bool
) -> None:
    limits = BatchLimits(records_min=10, delay_max_ms=60_000)

    decision = decide({A: there(records)}, limits, waited_ms=waited_ms, available_now=available_now)

    assert decision == (Wait(records) if waits else Take({}))


def test_the_minimum_counts_all_entries_together() -> None:
    limits = BatchLimits(records_min=10)

    assert decide({A: there(4), B: there(4)}, limits, waited_ms=0) == Wait(8)
    assert decide({A: there(4), B: there(4), C: there(2)}, limits, waited_ms=0) == Take({})
    assert decide({}, limits, waited_ms=0) == Wait(0)


def test_a_minimum_and_a_maximum_work_together() -> None:
    limits = BatchLimits(records_max=20, records_min=10)

    assert decide({A: there(9)}, limits, waited_ms=0) == Wait(9)
    assert decide({A: there(40)}, limits, waited_ms=0) == Take({A: EntryShare(20, None)})


entries = st.builds(EntryName, st.sampled_from(["a", "b"]), st.integers(0, 3), st.integers(0, 2))
amounts = st.tuples(st.integers(1, 10**12), st.integers(1, 10**12), st.integers(0, 10**12)).map(
    lambda given: Waiting(given[0], given[1], given[1] + given[2])
)


@given(st.dictionaries(entries, amounts, min_size=1), st.integers(1, 10**12), st.integers(1, 10**12))
def test_shares_stay_within_the_limits_but_for_one_chunk_per_entry(
    waiting: dict[EntryName, Waiting], records_max: int, bytes_max: int
) -> None:
    found = shares(waiting, BatchLimits(records_max=records_max, bytes_max=bytes_max))

    def taken(entry: EntryName) -> tuple[int, int]:
        """The most records and bytes that the entry may give; 1 stands for at least one chunk."""
        share = found.get(entry, EntryShare(None, None))
        return (
            waiting[entry].records if share.records_max is None else share.records_max,
            waiting[entry].bytes_most if share.bytes_max is None else share.bytes_max,
        )

    records = [taken(entry)[0] for entry in waiting]
    length_bytes = [taken(entry)[1] for entry in waiting]
    assert all(amount >= 1 for amount in records + length_bytes)
    assert sum(amount for amount in records if amount > 1) <= records_max
    assert sum(amount for amount in length_bytes if amount > 1) <= bytes_max
