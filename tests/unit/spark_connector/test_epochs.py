"""Micro-batches of epochs have the same records as a naive reader of the whole log finds in these epochs."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.client import EntryBounds
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import EpochPassed, InvalidArgument
from kera.core.format.punctuation import NO_TIME
from kera.spark_connector.planning import Now, conclude, next_ends, ranges, revise
from kera.spark_connector.planning.epochs import (
    Cadence,
    begin,
    check_kept,
    closed_before,
    divided,
    held_up_by,
    next_epochs,
    reaches,
)
from kera.spark_connector.planning.offsets import EntryName, EntryOffset, EpochMark, Offsets
from kera.spark_connector.planning.places import Place, Time, Where
from kera.spark_connector.planning.resolving import Question
from tests.examples import examples
from tests.unit.spark_connector.worlds import now_of, stream_now

T = TypeVar("T")
MS = 1000
CHUNK_BYTES = 64
EARLY, LATE = Where("startingOffsets", "earliest"), Where("startingOffsets", "latest")


@dataclass
class FakeEntry:
    """A log of chunks: the greatest time of each, in ms, and its number of records (0: a punctuation)."""

    chunks: list[tuple[int, int]]
    promised: int | None = None
    """The time promised at the end of the log, in ms."""
    durable: int | None = None
    """The number of durable chunks; None: all."""
    removed: int = 0
    """The number of removed chunks."""
    moved: bool = False
    """Whether it moved to another broker, where its chunks are in another group."""

    @property
    def count(self) -> int:
        return len(self.chunks) if self.durable is None else self.durable

    def place(self, chunk: int) -> EntryOffset:
        if not self.chunks:
            return EntryOffset(Position(2, 0, 0) if self.moved else EARLIEST, 0)
        return EntryOffset(
            Position(2 if self.moved else 1, 1, chunk * CHUNK_BYTES), sum(records for _, records in self.chunks[:chunk])
        )

    def bounds(self) -> EntryBounds:
        start, end = self.place(self.removed), self.place(self.count)
        if not self.count:
            start = end = EntryOffset(Position(2, 0, 0) if self.moved else EARLIEST, 0)
        times = [time * MS for time, _ in self.chunks]
        return EntryBounds(
            start.position,
            end.position,
            start.record,
            end.record,
            self.count * CHUNK_BYTES,
            watermark_us=max(times, default=None),
            promised_us=None if self.promised is None else self.promised * MS,
            promised_at=self.place(len(self.chunks)).position,
            removed_watermark_us=max(times[: self.removed], default=None),
        )

    def locate(self, question: Question) -> EntryOffset:
        assert question.timestamp_us is not None
        first = question.start.offset // CHUNK_BYTES
        last = question.end.offset // CHUNK_BYTES
        for chunk in range(first, last):
            if self.chunks[chunk][0] * MS >= question.timestamp_us:
                return self.place(chunk)
        return self.place(last)

    def epochs(self, length: int) -> list[int]:
        """The epoch of each chunk, by reading the log from its beginning."""
        found, watermark = [], -(10**9)
        for time, _ in self.chunks:
            watermark = max(watermark, time)
            found.append(watermark // length)
        return found


@dataclass
class World:
    """A stream with one streamlet and these entries."""

    entries: list[FakeEntry]
    epoch_ms: int = 10
    by_clock: bool = True
    name: str = "flights"

    def now(self) -> Now:
        made = stream_now({0: [entry.bounds() for entry in self.entries]}, self.name)
        return now_of(replace(made, epoch_ms=self.epoch_ms, is_by_clock=self.by_clock))

    def decide(self, asking: Generator[list[Question], Mapping[Question, EntryOffset], T]) -> T:
        try:
            asked = next(asking)
            while True:
                asked = asking.send(
                    {question: self.entries[question.entry.entry].locate(question) for question in asked}
                )
        except StopIteration as decided:
            decision: T = decided.value
            return decision

    def first(self, cadence: Cadence, where: Where = EARLY, now_us: int = 0) -> Offsets:
        return stored(self.decide(begin(where, self.now(), cadence, now_us=now_us)))

    def following(
        self, before: Offsets, cadence: Cadence, *, until: int | None = None, fail: bool = True
    ) -> Offsets | None:
        """The end of the micro-batch after `before`, as it comes back from the checkpoint."""
        now = self.now()
        advance = next_ends(before, now, fail_on_data_loss=fail)
        asking = next_epochs(before, advance, now, cadence, until=until, fail_on_data_loss=fail)
        found = self.decide(asking)
        if found is None:
            return None
        is_first = before.epoch is not None and before.epoch.next is None
        return stored(conclude(before, found.advance, found.end, first=is_first, mark=found.mark))

    def records(self, before: Offsets, end: Offsets) -> list[tuple[int, int]]:
        """Entry and ordinal of each record of a micro-batch."""
        now = self.now()
        planned = revise(before, end, now, fail_on_data_loss=True)
        return [
            (there.entry.entry, record)
            for there in ranges(planned.start, planned.end, now)
            for record in range(there.start.record, there.end.record)
        ]

    def told(self, before: Offsets, end: Offsets) -> dict[int, list[tuple[int, int]]]:
        """The same records, by the epoch that their rows show."""
        now = self.now()
        planned = revise(before, end, now, fail_on_data_loss=True)
        assert end.epoch is not None
        found: dict[int, list[tuple[int, int]]] = {}
        for epoch, part in self.decide(divided(planned, end.epoch)):
            for there in ranges(part.start, part.end, now):
                rows = [(there.entry.entry, record) for record in range(there.start.record, there.end.record)]
                found.setdefault(epoch, []).extend(rows)
        return {epoch: rows for epoch, rows in found.items() if rows}

    def batches(
        self, cadence: Cadence, where: Where = EARLY, **options: Any
    ) -> list[tuple[EpochMark, list[tuple[int, int]]]]:
        """All micro-batches that can be planned now."""
        found = []
        before = self.first(cadence, where)
        while (end := self.following(before, cadence, **options)) is not None:
            assert end.epoch is not None
            found.append((end.epoch, self.records(before, end)))
            assert len(found) < 1000
            before = end
        return found

    def naive(self, length: int) -> dict[int, list[tuple[int, int]]]:
        """Entry and ordinal of each record, by epoch, in order."""
        found: dict[int, list[tuple[int, int]]] = {}
        for number, entry in enumerate(self.entries):
            record = 0
            for epoch, (_, records) in zip(entry.epochs(length), entry.chunks, strict=True):
                if records:
                    found.setdefault(epoch, []).extend((number, record + each) for each in range(records))
                record += records
        return found


def stored(offsets: Offsets) -> Offsets:
    return Offsets.from_json(offsets.to_json())


def ones(*times: int) -> list[tuple[int, int]]:
    return [(time, 1) for time in times]


def numbers(batches: list[tuple[EpochMark, list[tuple[int, int]]]]) -> list[tuple[int | None, int | None]]:
    return [(mark.first, mark.next) for mark, _ in batches]


def test_a_micro_batch_ends_at_the_same_time_in_all_entries() -> None:
    world = World([FakeEntry(ones(1, 11, 25)), FakeEntry(ones(2, 3, 4, 5, 12, 40))])

    ((mark, records),) = world.batches(Cadence(10))

    assert mark == EpochMark(10, 0, 2)
    assert records == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]


def test_a_late_record_is_read_with_the_epoch_of_its_position() -> None:
    world = World([FakeEntry(ones(1, 11, 5, 25))], epoch_ms=5)

    batches = world.batches(Cadence(10, at_most=1))

    assert [records for _, records in batches] == [[(0, 0)], [(0, 1), (0, 2)]]


def test_with_exactly_each_micro_batch_has_that_many_epochs_including_empty_ones() -> None:
    world = World([FakeEntry(ones(35, 91)), FakeEntry(ones(38, 95))])

    batches = world.batches(Cadence(10, exactly=2))

    assert numbers(batches) == [(3, 5), (5, 7), (7, 9)]
    assert [len(records) for _, records in batches] == [2, 0, 0]


def test_with_at_most_a_micro_batch_has_up_to_that_many_epochs_and_is_never_empty() -> None:
    world = World([FakeEntry(ones(35, 91, 101, 111, 121)), FakeEntry(ones(125))])

    batches = world.batches(Cadence(10, at_most=2))

    assert numbers(batches) == [(3, 5), (9, 11), (11, 12)]
    assert [len(records) for _, records in batches] == [1, 2, 1]


def test_a_lagging_entry_holds_up_the_epochs_of_all_entries() -> None:
    world = World([FakeEntry(ones(1, 100)), FakeEntry(ones(2, 15))])

    assert numbers(world.batches(Cadence(10))) == [(0, 1)]
    now = world.now()
    reached = reaches(next_ends(world.first(Cadence(10)), now, fail_on_data_loss=True), now)
    assert closed_before(reached, Cadence(10)) == 1
    assert held_up_by(reached) == (EntryName("flights", 0, 1), 15 * MS)


def test_a_promise_closes_the_epochs_of_a_silent_entry() -> None:
    world = World([FakeEntry(ones(1, 100)), FakeEntry(ones(2), promised=35), FakeEntry([], promised=47)])

    assert numbers(world.batches(Cadence(10))) == [(0, 3)]

    world.entries[1].durable = 0  # the promise stands behind a chunk that cannot be read yet
    assert world.batches(Cadence(10)) == []


def test_chunks_that_are_not_durable_close_no_epoch() -> None:
    world = World([FakeEntry(ones(1, 12, 45), durable=2), FakeEntry(ones(100))])

    assert numbers(world.batches(Cadence(10))) == [(0, 1)]
    assert numbers(world.batches(Cadence(10, exactly=1))) == [(0, 1)]
    assert world.batches(Cadence(10, exactly=2)) == []


def test_a_broker_that_has_not_recovered_all_chunks_closes_no_epoch() -> None:
    world = World([FakeEntry(ones(1, 12, 25), promised=200)])
    end = world.following(world.first(Cadence(10)), Cadence(10))
    assert end is not None

    world.entries[0].chunks = ones(1)
    assert world.following(end, Cadence(10)) is None


def test_an_empty_entry_without_promises_holds_up_no_epoch() -> None:
    world = World([FakeEntry(ones(1, 12)), FakeEntry([])], by_clock=False)
    assert numbers(world.batches(Cadence(10))) == [(0, 1)]

    world.by_clock = True
    assert world.batches(Cadence(10)) == []
    assert World([FakeEntry([])], by_clock=False).batches(Cadence(10)) == []


@pytest.mark.parametrize("moved", [False, True])
def test_records_for_an_epoch_that_was_already_read_are_an_error(moved: bool) -> None:
    world, cadence = World([FakeEntry(ones(1, 25)), FakeEntry([], moved=moved)], by_clock=False), Cadence(10)
    end = world.following(world.first(cadence), cadence)
    assert end is not None
    world.entries[1].chunks = ones(5, 26)
    world.entries[0].chunks += ones(38)

    with pytest.raises(EpochPassed, match=r"entry 1 got records of epochs before 2"):
        world.following(end, cadence)
    after = world.following(end, cadence, fail=False)
    world.entries[1].chunks += ones(48)
    after = world.following(end, cadence, fail=False)
    assert after is not None
    assert world.records(end, after) == [(0, 1), (1, 0), (1, 1)]


def test_a_query_begins_with_the_first_epoch_without_removed_records() -> None:
    world = World([FakeEntry(ones(1, 12, 25, 31, 45), removed=2), FakeEntry(ones(5, 22, 33, 51))])

    batches = world.batches(Cadence(10))

    assert batches == [(EpochMark(10, 2, 4), [(0, 2), (0, 3), (1, 1), (1, 2)])]


def test_a_query_from_latest_begins_with_the_open_epoch() -> None:
    world, cadence = World([FakeEntry(ones(1, 25)), FakeEntry(ones(17))]), Cadence(10, exactly=1)
    begins = world.first(cadence, LATE)
    assert begins.epoch == EpochMark(10, 1, None)
    world.entries[1].chunks += ones(14, 31)

    end = world.following(begins, cadence)
    assert end is not None
    assert end.epoch == EpochMark(10, 1, 2)
    assert world.records(begins, end) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("where", [Time(epoch_us=23 * MS), Time(ago_us=77 * MS)])
def test_a_query_begins_with_the_epoch_of_a_time_even_if_it_is_in_the_future(where: Time) -> None:
    world, cadence = World([FakeEntry(ones(1)), FakeEntry(ones(2, 35))]), Cadence(10)
    begins = world.first(cadence, Where("startingTimestamp", where), now_us=100 * MS)
    assert world.following(begins, cadence) is None
    world.entries[0].chunks += ones(5, 21, 32)

    end = world.following(begins, cadence)
    assert end is not None
    assert end.epoch == EpochMark(10, 2, 3)
    assert world.records(begins, end) == [(0, 2)]


def test_a_query_with_an_early_start_begins_with_the_first_epoch_that_has_records() -> None:
    world = World([FakeEntry(ones(75, 99)), FakeEntry(ones(81, 99))])
    for where in (EARLY, Where("startingTimestamp", Time(epoch_us=12 * MS))):
        assert numbers(world.batches(Cadence(10, exactly=1), where)) == [(7, 8), (8, 9)]


def test_available_now_ends_with_the_last_closed_epoch() -> None:
    world = World([FakeEntry(ones(1, 12, 25, 39))])

    assert numbers(world.batches(Cadence(10, exactly=2), until=2)) == [(0, 2)]
    assert numbers(world.batches(Cadence(10, exactly=2), until=1)) == []
    assert numbers(world.batches(Cadence(10), until=2)) == [(0, 2)]
    assert numbers(world.batches(Cadence(10), until=NO_TIME)) == []


def test_rows_have_the_epoch_of_their_position() -> None:
    world, cadence = (
        World([FakeEntry(ones(1, 12, 3, 25)), FakeEntry([*ones(2, 4), (15, 0), (3, 2), (31, 1)])]),
        Cadence(10),
    )
    begins = world.first(cadence)
    end = world.following(begins, cadence)
    assert end is not None

    assert world.told(begins, end) == {0: [(0, 0), (1, 0), (1, 1)], 1: [(0, 1), (0, 2), (1, 2), (1, 3)]}


@pytest.mark.parametrize(
    ("world", "message"),
    [
        (World([FakeEntry([])], epoch_ms=0), r"stream 'flights' has no epochs; kera stream alter flights --epoch"),
        (
            World([FakeEntry([])], epoch_ms=3),
            r"10 ms are not a multiple of the 3 ms of stream 'flights'",
        ),
    ],
)
def test_the_epochs_of_a_query_must_be_multiples_of_those_of_its_streams(world: World, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        world.first(Cadence(10))


def test_a_running_query_keeps_its_epochs_but_a_joining_stream_must_fit_them() -> None:
    world, cadence = World([FakeEntry(ones(1, 12, 25))]), Cadence(10)
    begins = world.first(cadence)
    world.epoch_ms = 3
    end = world.following(begins, cadence)
    assert end is not None
    assert end.epoch == EpochMark(10, 0, 2)

    with pytest.raises(InvalidArgument, match="not a multiple"):
        world.following(replace(end, streams={}), cadence)


def test_a_joining_stream_is_read_from_its_beginning() -> None:
    world, cadence = World([FakeEntry(ones(1, 12, 25)), FakeEntry(ones(3, 14, 28))]), Cadence(10)
    end = world.following(world.first(cadence), cadence)
    assert end is not None
    for entry in world.entries:
        entry.chunks += ones(39)

    unknown = replace(end, streams={})
    joined = world.following(unknown, cadence)
    assert joined is not None
    assert joined.epoch == EpochMark(10, 2, 3)
    assert world.records(unknown, joined) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize(
    "where",
    [Where("startingOffsets", streams={"flights": {0: "earliest"}}), Where("startingOffsets", Position(1, 1, 0))],
)
def test_a_query_with_epochs_refuses_start_positions_per_streamlet(where: Where) -> None:
    with pytest.raises(
        InvalidArgument, match=r"option startingOffsets: with option epoch .* earliest, latest, or a time"
    ):
        World([FakeEntry(ones(1))]).first(Cadence(10), where)


def test_a_checkpoint_without_epochs_or_with_other_epochs_is_refused() -> None:
    world, cadence = World([FakeEntry(ones(1, 12, 25))]), Cadence(10)
    begins = world.first(cadence)

    with pytest.raises(InvalidArgument, match="the checkpoint belongs to a query without it"):
        world.following(replace(begins, epoch=None), cadence)
    with pytest.raises(InvalidArgument, match="with epochs of 10 ms, not 20"):
        world.following(begins, Cadence(20))


def test_a_query_with_epochs_cannot_continue_without_them() -> None:
    begins = World([FakeEntry(ones(1, 12, 25))]).first(Cadence(10))

    with pytest.raises(InvalidArgument, match=r"epochs of 10 ms.* Set epoch to '10ms', or start .* new checkpoint"):
        check_kept(begins)
    check_kept(replace(begins, epoch=None))


def test_epoch_marks_survive_the_checkpoint() -> None:
    for mark in (None, EpochMark(10, None, None), EpochMark(10, 3, None), EpochMark(10, -3, 4)):
        offsets = Offsets({}, epoch=mark)
        assert stored(offsets) == offsets
    with pytest.raises(InvalidArgument, match="not of the kera source"):
        Offsets.from_json({"version": 2, "streams": {}, "epoch": {"ms": "x"}})


# -- against a naive model --------------------------------------------------------------------------------------

PLACES: st.SearchStrategy[Place] = st.one_of(
    st.just("earliest"), st.integers(-20, 150).map(lambda ms: Time(epoch_us=ms * MS))
)
CHUNKS = st.lists(st.tuples(st.integers(-15, 130), st.integers(0, 3)), max_size=12)


@settings(max_examples=examples(300), deadline=None)
@given(
    logs=st.lists(CHUNKS, min_size=1, max_size=4),
    visible=st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), max_size=6),
    place=PLACES,
    exactly=st.booleans(),
    count=st.none() | st.integers(1, 5),
    length=st.sampled_from([1, 7, 10, 40]),
)
def test_a_live_and_a_late_query_have_the_micro_batches_of_a_naive_reader(
    logs: list[list[tuple[int, int]]],
    visible: list[list[int]],
    place: Place,
    exactly: bool,
    count: int | None,
    length: int,
) -> None:
    """One query reads while the logs grow, with a restart after each micro-batch; the other reads complete logs."""
    end_of_time = 200
    whole = World([FakeEntry([*log, (end_of_time, 1)]) for log in logs], epoch_ms=length)
    cadence = Cadence(length, exactly=count or 1) if exactly else Cadence(length, at_most=count)
    where = Where("startingOffsets", place)

    growing = World([FakeEntry([]) for _ in logs], epoch_ms=length)
    live: list[tuple[EpochMark, list[tuple[int, int]]]] = []
    before = growing.first(cadence, where)
    shown = [0] * len(logs)
    for counts in [*visible, [100] * 4]:
        shown = [max(old, new) for old, new in zip(shown, counts, strict=False)]
        for entry, full, upto in zip(growing.entries, whole.entries, shown, strict=True):
            entry.chunks = full.chunks[:upto]
            entry.durable = max(0, len(entry.chunks) - 1) if upto % 2 and upto < len(full.chunks) else None
            entry.promised = full.chunks[upto][0] if upto % 3 and upto < len(full.chunks) else None
        while (end := growing.following(before, cadence)) is not None:
            assert end.epoch is not None
            live.append((end.epoch, growing.records(before, end)))
            told = growing.told(before, end)
            assert sorted(row for rows in told.values() for row in rows) == live[-1][1]
            naive = whole.naive(length)
            assert {epoch: sorted(rows) for epoch, rows in told.items()} == {epoch: naive[epoch] for epoch in told}
            before = end

    expected = {epoch: rows for epoch, rows in whole.naive(length).items() if epoch < end_of_time // length}
    if isinstance(place, Time):
        floor = place.at(0) // (length * MS)
        expected = {epoch: rows for epoch, rows in expected.items() if epoch >= floor}
    for mark, records in live:
        assert mark.first is not None
        assert mark.next is not None
        there = [row for epoch in range(mark.first, mark.next) for row in expected.pop(epoch, [])]
        assert records == sorted(there)
        assert not exactly or mark.next - mark.first == cadence.exactly
        assert cadence.at_most is None or mark.next - mark.first <= cadence.at_most
    if exactly:
        assert all(one.next == other.first for (one, _), (other, _) in itertools.pairwise(live))
        assert live == whole.batches(cadence, where)
        last = live[-1][0].next if live else None
        assert all(last is None or epoch >= last for epoch in expected), "only what makes no whole micro-batch is left"
    else:
        assert not expected
