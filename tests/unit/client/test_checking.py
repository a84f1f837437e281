from __future__ import annotations

import pytest

from kera.client.checking.history import History, Place, Value
from kera.client.checking.verdict import EVIDENCE_MAX, violations

FIRST, SECOND = Value("p", 0), Value("p", 1)
HERE, NEXT = Place(0, 0, 0), Place(0, 0, 1)


def good() -> History:
    """Two records of a producer, both acknowledged, read and processed."""
    history = History()
    history.sent |= {FIRST, SECOND}
    history.acknowledged |= {FIRST: HERE, SECOND: None}
    history.read["r"] += [(HERE, FIRST), (NEXT, SECOND)]
    history.processed["g"] |= {FIRST, SECOND}
    history.stored = [(HERE, FIRST), (NEXT, SECOND)]
    return history


def test_a_history_that_keeps_every_promise_has_no_violation() -> None:
    assert violations(good()) == []


def test_an_unacknowledged_record_may_be_stored_or_not() -> None:
    history = good()
    del history.acknowledged[SECOND]
    history.sent.add(Value("p", 2))
    assert violations(history) == []


def test_a_missing_acknowledged_record_is_a_violation() -> None:
    history = good()
    history.stored.pop()
    assert violations(history)[0].startswith("lost: p/1 was acknowledged")


def test_a_record_stored_twice_is_a_violation() -> None:
    history = good()
    history.stored.append((Place(0, 0, 2), SECOND))
    assert any(text.startswith("stored more than once: p/1 is at") for text in violations(history))


def test_records_away_from_their_acknowledged_places_are_a_violation() -> None:
    history = good()
    history.stored = [(HERE, SECOND), (NEXT, FIRST)]
    history.read.clear()
    told = violations(history)
    assert any(text.startswith("not where it was acknowledged: p/0") for text in told)
    assert any(text.startswith("out of order: p/0") for text in told)


def test_records_of_different_producers_may_be_in_any_order() -> None:
    history = good()
    other = Value("q", 0)
    history.sent.add(other)
    history.stored = [(HERE, FIRST), (NEXT, SECOND), (Place(0, 1, 0), other), (Place(0, 0, 2), Value("a", 0))]
    history.sent.add(Value("a", 0))
    assert violations(history) == []


def test_a_stored_record_that_was_refused_or_never_sent_is_a_violation() -> None:
    history = good()
    history.sent = {FIRST}
    assert any(text.startswith("never sent: p/1") for text in violations(history))
    history.refused.add(SECOND)
    assert any(text.startswith("refused, and yet stored: p/1") for text in violations(history))


def test_a_gap_in_stored_or_read_records_is_a_violation() -> None:
    history = good()
    history.read["r"].pop(0)
    assert violations(history) == ["reader r went from record -1 to 1 (p/1) in streamlet 0, entry 0, record 1"]
    history = good()
    history.stored[1] = (Place(0, 0, 2), SECOND)
    history.read.clear()
    assert violations(history) == ["the stream went from record 0 to 2 (p/1) in streamlet 0, entry 0, record 2"]


def test_a_read_record_that_is_missing_at_the_end_is_a_violation() -> None:
    history = good()
    del history.acknowledged[SECOND]
    history.stored.pop()
    history.processed.clear()
    assert violations(history) == [
        "r has read p/1 at streamlet 0, entry 0, record 1, where there is None at the end",
    ]


def test_an_acknowledged_record_that_a_group_never_got_is_a_violation() -> None:
    history = good()
    history.processed["g"].discard(FIRST)
    assert violations(history) == ["consumer group g was never given p/0, which was acknowledged"]


def test_further_violations_of_the_same_kind_are_counted() -> None:
    history = good()
    history.processed["g"] = set()
    history.acknowledged |= {Value("p", number): None for number in range(2, 20)}
    history.stored += [(Place(0, 0, number), Value("p", number)) for number in range(2, 20)]
    history.sent |= history.acknowledged.keys()
    told = violations(history)
    assert len(told) == EVIDENCE_MAX + 1
    assert told[-1] == f"… and {20 - EVIDENCE_MAX} more of the last kind"


def test_a_value_reads_back_from_its_bytes_and_other_bytes_are_refused() -> None:
    assert Value.from_bytes(Value("a/b", 7).to_bytes()) == Value("a/b", 7)
    with pytest.raises(ValueError, match="which no producer has sent"):
        Value.from_bytes(b"else")
