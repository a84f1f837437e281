"""The checker of long loads: each kind of finding, and random histories compared with the other checker."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.checking.findings import EVIDENCE_MAX
from kera.client.checking.history import History, Place, Value
from kera.client.checking.ledger import Entry, Ledger
from kera.client.checking.numbers import STRANGE, VALUE_BYTES, Values, packed
from kera.client.checking.verdict import violations

HERE = (0, 0)


def values(*records: tuple[int, int]) -> np.ndarray:
    return np.array([packed(*record) if record[0] >= 0 else STRANGE for record in records], np.int64)


def told(_: int) -> str:
    return "b'else'"


class Seen:
    """A ledger with three records of a producer, acknowledged at their places; the test does the rest."""

    def __init__(self, *, may_lose: bool = False) -> None:
        self.now_s = 1.0
        self.read_back = False
        self.ledger = Ledger(lambda: self.now_s, may_lose=may_lose)
        self.ledger.add_producer()
        for number in range(3):
            assert self.ledger.send(0) == number
            self.ledger.acknowledge(0, number, Place(0, 0, number))

    def read(self, *records: tuple[int, int], first: int = 0, reader: str = "r") -> None:
        self.ledger.read(reader, HERE, first, values(*records), told)

    def store(self, *records: tuple[int, int], first: int = 0, entry: Entry = HERE) -> None:
        self.ledger.store(entry, first, values(*records), told)
        self.read_back = True

    def found(self, *, group: bool = False) -> dict[str, int]:
        self.ledger.close(group=group, read_back=self.read_back)
        return dict(self.ledger.findings.counts)


ALL = (0, 0), (0, 1), (0, 2)


def test_a_history_that_keeps_every_promise_has_no_finding() -> None:
    seen = Seen()
    seen.read(*ALL)
    seen.ledger.process(values(*ALL))
    seen.ledger.ends_at(HERE, (1, 1, 0), 3, 3, None)
    seen.store(*ALL)
    assert seen.found(group=True) == {}
    assert (seen.ledger.sent, seen.ledger.acknowledged) == (3, 3)


def test_a_missing_acknowledged_record_is_lost_with_its_place_and_time() -> None:
    seen = Seen()
    seen.store(*ALL[:2])
    assert seen.found() == {"lost": 1}
    (finding,) = seen.ledger.findings.kept
    assert finding[2:] == (0, 2, 0, 0, 2, 1.0)
    assert list(seen.ledger.findings.lines()) == [
        "lost: record 2 of producer 0 was acknowledged at streamlet 0, entry 0, record 2, and is not there (1.000 s)"
    ]


def test_a_record_stored_twice_is_found_within_a_chunk_and_across_entries() -> None:
    seen = Seen()
    seen.store((0, 0), (0, 1), (0, 1), (0, 2))
    assert seen.found()["stored twice"] == 1
    seen = Seen()
    seen.store(*ALL)
    seen.store((0, 2), entry=(1, 0))
    assert seen.found() == {"stored twice": 1}


def test_a_record_away_from_its_acknowledged_place_is_misplaced() -> None:
    seen = Seen()
    seen.store(*ALL[:2])
    seen.store((0, 2), entry=(1, 0))
    assert seen.found() == {"misplaced": 1}


def test_records_out_of_order_are_found_within_a_chunk_and_across_chunks() -> None:
    seen = Seen()
    seen.store((0, 1), (0, 0), (0, 2))
    assert seen.found() == {"out of order": 1, "misplaced": 2}
    seen = Seen()
    seen.store((0, 1), (0, 2))
    seen.store((0, 0), first=2)
    assert seen.found()["out of order"] == 1


def test_only_a_refused_record_must_not_be_stored_not_an_uncertain_one() -> None:
    seen = Seen()
    for what in (seen.ledger.refuse, lambda *_: seen.ledger.give_up()):
        what(0, seen.ledger.send(0))
    seen.store(*ALL, (0, 3), (0, 4))
    assert seen.found() == {"refused, yet stored": 1}
    assert seen.ledger.uncertain_stored == 1
    assert (seen.ledger.sent, seen.ledger.refused, seen.ledger.uncertain) == (5, 1, 1)


def test_a_record_that_was_never_sent_is_reported_once_with_its_value() -> None:
    seen = Seen()
    seen.read(*ALL, (-1, 0))
    seen.store(*ALL, (-1, 0), (0, 7))
    assert seen.found() == {"never sent": 2}
    assert "b'else' is at streamlet 0, entry 0, record 3" in next(seen.ledger.findings.lines())


def test_a_place_that_another_reader_saw_with_another_record_has_changed() -> None:
    seen = Seen()
    seen.read(*ALL)
    seen.now_s = 9.0
    seen.read((0, 0), (0, 2), (0, 1), reader="s")
    assert seen.ledger.findings.counts == {"changed": 2}
    assert seen.ledger.findings.kept[0].seconds == 1.0


def test_a_read_record_that_is_missing_at_the_end_has_vanished() -> None:
    seen = Seen()
    seen.ledger.give_up()
    seen.ledger.send(0)
    seen.read(*ALL, (0, 3))
    seen.store(*ALL)
    assert seen.found() == {"vanished": 1}


def test_records_that_a_reader_skips_or_gets_again_are_found() -> None:
    seen = Seen()
    seen.read((0, 0))
    seen.read((0, 2), first=2)
    assert seen.ledger.findings.counts == {"gap": 1}
    seen.read((0, 2), first=2)
    assert seen.ledger.findings.counts == {"gap": 1, "came again": 1}


def test_a_group_must_process_all_acknowledged_records_and_may_repeat_them() -> None:
    seen = Seen()
    seen.ledger.process(values(*ALL[:2]))
    seen.ledger.process(values(*ALL[:1]))
    assert seen.ledger.unprocessed() == 1
    assert seen.ledger.processed_again == 1
    assert seen.found(group=True) == {"not processed": 1}


def test_a_durable_end_must_not_go_back_or_be_before_acknowledged_records() -> None:
    seen = Seen()
    assert seen.ledger.floors() == {HERE: 3}
    seen.ledger.ends_at(HERE, (1, 1, 64), 2, 3, None)
    seen.ledger.ends_at(HERE, (1, 1, 64), 2, 3, None)
    assert seen.ledger.findings.counts == {"end behind": 1}, "once, however often somebody looks"
    seen.ledger.ends_at(HERE, (1, 1, 0), 3, 3, None)
    assert seen.ledger.findings.counts == {"end behind": 1, "end went back": 1}


@pytest.mark.parametrize("may_lose", [False, True])
def test_a_reported_loss_is_a_finding_unless_the_durability_allows_it(may_lose: bool) -> None:
    seen = Seen(may_lose=may_lose)
    seen.read(*ALL)
    seen.ledger.ends_at(HERE, (1, 1, 0), 3, 0, None)
    seen.ledger.ends_at(HERE, (2, 1, 0), 1, 3, ((1, 1, 0), (2, 1, 0)))
    assert not seen.ledger.tell_lost(HERE, "again"), "that is not news"
    seen.store((0, 0))
    assert seen.found() == ({} if may_lose else {"told as lost": 1, "lost": 2})
    assert seen.ledger.lost_as_told == (2 if may_lose else 0)


def test_a_group_need_not_process_records_reported_lost_unless_they_are_read_back() -> None:
    seen = Seen(may_lose=True)
    seen.ledger.process(values((0, 0)))
    assert (seen.ledger.losses.any_allowed, seen.ledger.unprocessed()) == (False, 2)
    seen.ledger.ends_at(HERE, (2, 1, 0), 1, 3, ((1, 1, 0), (2, 1, 0)))
    assert (seen.ledger.losses.any_allowed, seen.ledger.unprocessed()) == (True, 0), (
        "nobody knows whether they are there"
    )
    seen.store((0, 0), (0, 1))
    assert seen.ledger.unprocessed(read_back=True) == 1
    assert seen.found(group=True) == {"not processed": 1}
    assert seen.ledger.lost_as_told == 1


def test_a_group_must_process_a_record_read_before_a_reported_loss() -> None:
    seen = Seen(may_lose=True)
    seen.store((0, 0))
    seen.ledger.tell_lost(HERE, "from here to there", "the last reader")
    assert seen.ledger.unprocessed(read_back=True) == 1, "the record that was read, and not those behind it"
    seen.ledger.process(values((0, 0)))
    assert seen.ledger.unprocessed(read_back=True) == 0
    assert seen.found(group=True) == {}


def test_a_group_need_not_process_lost_records_that_other_readers_read() -> None:
    seen = Seen(may_lose=True)
    seen.read(*ALL)
    seen.ledger.process(values((0, 0)))
    seen.ledger.tell_lost(HERE, "from here to there", "r")
    assert seen.ledger.unprocessed() == 0
    seen.store((0, 0))
    seen.ledger.tell_lost(HERE, "from here to there", "the last reader")
    assert seen.ledger.unprocessed(read_back=True) == 0
    assert seen.found(group=True) == {}


@pytest.mark.parametrize("may_lose", [False, True])
def test_a_loss_in_another_entry_does_not_excuse_the_group(may_lose: bool) -> None:
    seen = Seen(may_lose=may_lose)
    for other in ((0, 1), (1, 0)):
        seen.ledger.tell_lost(other, "all of it")
    assert seen.ledger.unprocessed() == 3


def test_a_reported_loss_does_not_excuse_records_before_it() -> None:
    """The last reader hears of the loss at record 1: records before it are lost silently, records behind it are not."""
    seen = Seen(may_lose=True)
    seen.ledger.send(0)
    seen.ledger.acknowledge(0, 3, Place(0, 0, 1))
    seen.store((0, 9))
    seen.ledger.tell_lost(HERE, "from here to there", "the last reader")
    seen.store((0, 3), first=1)
    assert seen.found() == {"lost": 1, "never sent": 1}
    assert seen.ledger.findings.kept[-1].text.startswith("record 0 of producer 0 was acknowledged")
    assert seen.ledger.lost_as_told == 2


def test_an_unreadable_record_is_reported_once_for_all_readers() -> None:
    seen = Seen()
    for reader in ("r", "s"):
        seen.read(ALL[0], reader=reader)
        seen.ledger.unreadable(reader, HERE, 1, 1, "the chunk at (1, 1, 128)")
        seen.read(ALL[2], first=2, reader=reader)
    assert seen.found() == {"corrupt": 1}
    assert next(seen.ledger.findings.lines()).startswith("corrupt: r cannot read 1 record at")


def test_an_incomplete_read_back_reports_no_losses() -> None:
    seen = Seen()
    seen.ledger.store(HERE, 0, values(ALL[0]), told)
    assert seen.found() == {}


def test_further_findings_of_the_same_kind_are_counted() -> None:
    seen = Seen()
    for _ in range(EVIDENCE_MAX + 4):
        seen.ledger.acknowledge(0, seen.ledger.send(0), None)
    seen.store(*ALL)
    assert seen.found() == {"lost": EVIDENCE_MAX + 4}
    assert list(seen.ledger.findings.lines())[EVIDENCE_MAX:] == ["lost: and 4 more"]


def test_an_absurd_ordinal_is_reported_as_a_gap_and_takes_no_memory() -> None:
    seen = Seen()
    before = seen.ledger.memory_bytes
    seen.read((0, 0), first=1 << 24)
    assert seen.ledger.findings.counts == {"gap": 1}
    assert seen.ledger.memory_bytes == before


def test_a_ledger_takes_less_than_50_bytes_a_record() -> None:
    ledger = Ledger(lambda: 0.0)
    ledger.add_producer()
    count = 100_000
    for number in range(count):
        ledger.send(0)
        ledger.acknowledge(0, number, Place(0, 0, number))
    every = np.arange(count, dtype=np.int64)
    ledger.store(HERE, 0, every, told)
    ledger.process(every)
    assert ledger.memory_bytes / count < 50


def test_values_of_another_check_are_distinguished_from_foreign_values() -> None:
    mine, other = Values("0" * 8, 40), Values("f" * 8, 33)
    assert mine.is_of_another(other.make(3, 7))
    assert not any(map(mine.is_of_another, (None, b"", b"a stranger", other.make(3, 7)[1:])))


def test_values_are_recognized_in_columns_of_any_kind() -> None:
    made = Values("01234567", VALUE_BYTES + 2)
    ours = [made.make(3, 4), made.make(32_767, 999_999_999_999)]
    expected = [packed(3, 4), packed(32_767, 999_999_999_999)]
    assert list(made.recognize(pa.array(ours, pa.binary()))) == expected
    assert list(made.recognize(pa.array(ours, pa.large_binary()))) == expected
    mixed = pa.array([None, b"else", *ours, ours[0][:-1] + b"x", b"x" * len(ours[0]), None], pa.binary())
    assert list(made.recognize(mixed)) == [STRANGE, STRANGE, *expected, STRANGE, STRANGE, STRANGE]
    assert list(made.recognize(mixed[2:4])) == expected
    assert list(made.recognize(pa.array([None, None], pa.binary()))) == [STRANGE] * 2
    assert list(Values("other!!!", VALUE_BYTES + 2).recognize(pa.array(ours))) == [STRANGE] * 2


def test_the_ledger_agrees_with_the_other_checker_on_random_histories() -> None:
    for seed in range(300):
        of_ledger, of_other = verdicts(seed)
        assert bool(of_ledger) == bool(of_other), (seed, of_ledger, of_other)


def verdicts(seed: int) -> tuple[Any, Any]:
    """The findings of both checkers about a random history."""
    chance = random.Random(seed)
    history, ledger = History(), Ledger(lambda: 0.0)
    entries: list[list[tuple[int, int]]] = [[], []]
    for producer in range(2):
        ledger.add_producer()
        for _ in range(chance.randrange(6)):
            record, entry = (producer, ledger.send(producer)), chance.randrange(2)
            history.sent.add(_value(record))
            fate = chance.choice(("acknowledged", "acknowledged", "refused", "stored", "unknown"))
            if fate in ("acknowledged", "stored"):
                entries[entry].append(record)
            if fate == "acknowledged":
                place = chance.choice((Place(0, entry, len(entries[entry]) - 1), None))
                history.acknowledged[_value(record)] = place
                ledger.acknowledge(*record, place)
            elif fate == "refused":
                history.refused.add(_value(record))
                ledger.refuse(*record)
    stored = [list(each) for each in entries]
    read = [each[: chance.randrange(len(each) + 1)] for each in entries]
    for each in chance.choice(([], stored, read)):  # damage the stored or the read records, or neither
        _spoil(each, chance)
    processed = {record for each in stored for record in each if chance.random() < 0.95}
    for entry in range(2):
        history.read["r"] += [(Place(0, entry, at), _value(record)) for at, record in enumerate(read[entry])]
        history.stored += [(Place(0, entry, at), _value(record)) for at, record in enumerate(stored[entry])]
        ledger.read("r", (0, entry), 0, values(*read[entry]), told)
        ledger.store((0, entry), 0, values(*stored[entry]), told)
    history.processed["g"] = {_value(record) for record in processed}
    ledger.process(values(*processed))
    ledger.close(group=True)
    return ledger.findings.counts, violations(history)


def _value(record: tuple[int, int]) -> Value:
    return Value(f"{record[0]}", record[1])


def _spoil(records: list[tuple[int, int]], chance: random.Random) -> None:
    """Remove, repeat or move a record, or add one that was never sent."""
    match chance.randrange(5):
        case 0 if records:
            records.pop()
        case 1 if records:
            records.append(chance.choice(records))
        case 2:
            chance.shuffle(records)
        case 3:
            records.append((0, 99))
