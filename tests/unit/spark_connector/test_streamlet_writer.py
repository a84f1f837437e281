"""Compare-and-append against a log in memory, with interleaved, repeated and abandoned attempts."""

from collections import Counter
from collections.abc import Coroutine, Generator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kera.spark_connector.writing.rows import RowCounts
from kera.spark_connector.writing.streamlet_writer import StreamletWriter, TooManyRows
from tests.examples import examples

SCHEMA = pa.schema([("value", pa.int64()), ("at", pa.int64())])


def batch(values: list[int], at: int = 0) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, pa.int64()), pa.array([at] * len(values))], schema=SCHEMA)


def values(rows: pa.RecordBatch) -> list[int]:
    return rows["value"].to_pylist()  # type: ignore[no-any-return]


class Pause:
    """An attempt's wait for an answer; the test decides which attempts go on."""

    def __await__(self) -> Generator[None]:
        yield


class FakeLog:
    """Chunks of one name, as a broker keeps them."""

    def __init__(self) -> None:
        self.chunks: list[pa.RecordBatch] = []
        self.removed = 0
        """The number of removed chunks, from the oldest on."""
        self.writes = 0


class View:
    """The log, as one attempt sees it."""

    def __init__(self, log: FakeLog, chunk_rows: int, lost: "list[bool] | None" = None) -> None:
        self._log = log
        self._chunk_rows = chunk_rows
        self._lost = lost or []
        """Whether the answers to the next appends get lost, so that the chunk is sent again."""

    async def append(self, rows: pa.RecordBatch, sequence: int) -> tuple[int, bool]:
        part = rows.slice(0, self._chunk_rows)
        await Pause()  # on its way there
        duplicate = self._take(part, sequence)
        await Pause()  # on its way back
        if self._lost and self._lost.pop():
            duplicate = self._take(part, sequence)
            await Pause()
        return part.num_rows, duplicate

    def _take(self, part: pa.RecordBatch, sequence: int) -> bool:
        chunks = self._log.chunks
        assert sequence <= len(chunks), "the broker refuses a gap"
        self._log.writes += 1
        if sequence < len(chunks):
            return True
        chunks.append(part)
        return False

    async def stored(self, sequence: int) -> pa.RecordBatch | None:
        await Pause()
        return None if sequence < self._log.removed else self._log.chunks[sequence]


async def attempt(writer: StreamletWriter, batches: list[pa.RecordBatch]) -> None:
    """Write as a task does: rows arrive while others are in flight."""
    for rows in batches:
        writer.add(rows)
        await Pause()
        await writer.drain()


class Attempt:
    """One run of a task, step by step."""

    def __init__(self, log: FakeLog, rows: list[int], sizes: list[int], **how: Any) -> None:
        self.at = how.pop("at", 0)
        self.writer = StreamletWriter(View(log, how.pop("chunk_rows"), how.pop("lost", None)), **how)
        batches: list[pa.RecordBatch] = []
        start = 0
        while start < len(rows):
            size = sizes[len(batches) % len(sizes)]
            batches.append(batch(rows[start : start + size], self.at))
            start += size
        self._batches = batches
        self._work: Coroutine[None, None, None] | None = None
        self.ended = False

    def step(self) -> None:
        if self._work is None:
            self._work = attempt(self.writer, self._batches)
        try:
            self._work.send(None)
        except StopIteration:
            self.ended = True

    def run(self) -> None:
        while not self.ended:
            self.step()

    def give_up(self) -> None:
        if self._work is not None:
            self._work.close()
        self.ended = True


def run(log: FakeLog, rows: list[int], sizes: list[int] | None = None, **how: Any) -> StreamletWriter:
    how.setdefault("chunk_rows", 3)
    made = Attempt(log, rows, sizes or [4], **how)
    made.run()
    return made.writer


def stored(log: FakeLog) -> list[int]:
    return [value for chunk in log.chunks for value in values(chunk)]


@st.composite
def attempts_of(draw: st.DrawFn, rows: list[int], log: FakeLog) -> list[Attempt]:
    return [
        Attempt(
            log,
            draw(st.permutations(rows)),
            draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)),
            chunk_rows=draw(st.integers(1, 5)),
            lost=draw(st.lists(st.booleans(), max_size=4)),
            at=number,
            ignored=("at",),
        )
        for number in range(draw(st.integers(1, 5)))
    ]


@settings(max_examples=examples(800), deadline=None)
@given(st.data())
def test_every_row_is_stored_once_when_one_of_several_attempts_has_ended(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, 5), max_size=24), label="rows")
    log = FakeLog()
    attempts = data.draw(attempts_of(rows, log))
    while not any(each.ended for each in attempts):
        at = data.draw(st.integers(0, len(attempts) - 1))
        if len(attempts) > 1 and data.draw(st.integers(0, 19)) == 0:
            attempts.pop(at).give_up()
        else:
            attempts[at].step()
        assert not Counter(stored(log)) - Counter(rows), "no row is there more often than in the partition"

    assert Counter(stored(log)) == Counter(rows)
    for zombie in attempts:
        zombie.run()
    assert Counter(stored(log)) == Counter(rows), "those that are late add nothing"
    assert {each.writer.surplus for each in attempts} == {0}
    assert {each.writer.appended + each.writer.found for each in attempts} == {len(rows)}


def test_a_repeat_in_the_same_order_compares_no_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FakeLog()
    run(log, list(range(20)))
    monkeypatch.setattr(RowCounts, "_digests", None)

    again = run(log, list(range(20)))

    assert (again.appended, again.found) == (0, 20)
    assert stored(log) == list(range(20))


def test_a_repeat_with_larger_chunks_finds_its_rows_in_the_smaller_ones() -> None:
    log = FakeLog()
    run(log, list(range(10)), chunk_rows=2)

    again = run(log, list(range(14)), [14], chunk_rows=5)

    assert (again.found, again.appended) == (10, 4)
    assert stored(log) == list(range(14))


def test_an_attempt_goes_on_after_a_lost_one() -> None:
    log = FakeLog()
    first = Attempt(log, list(range(20)), [20], chunk_rows=3)
    while len(log.chunks) < 4:
        first.step()
    first.give_up()

    second = run(log, list(range(19, -1, -1)))

    assert (second.found, second.appended) == (12, 8)
    assert sorted(stored(log)) == list(range(20))


def test_rows_that_differ_only_in_an_ignored_column_are_equal() -> None:
    log = FakeLog()
    run(log, [1, 2, 3, 4], at=100, ignored=("at",))

    again = run(log, [4, 1, 2, 3], at=200, ignored=("at",))

    assert (again.found, again.appended) == (4, 0)


def test_rows_that_differ_in_a_compared_column_are_not_equal() -> None:
    log = FakeLog()
    run(log, [1, 2], at=100)

    again = run(log, [1, 2], at=200)

    assert (again.found, again.appended, again.surplus) == (0, 2, 2)


def test_a_repeat_with_other_rows_stores_all_of_them_and_counts_the_surplus() -> None:
    log = FakeLog()
    run(log, [1, 2, 3, 4, 5])

    again = run(log, [1, 7, 3, 8, 8])

    assert not Counter([1, 7, 3, 8, 8]) - Counter(stored(log))
    assert again.surplus == 3


def test_a_chunk_that_retention_has_removed_counts_as_stored() -> None:
    log = FakeLog()
    run(log, list(range(9)))
    log.removed = 2

    again = run(log, list(range(9)))

    assert (again.found, again.appended) == (9, 0)


def test_a_surplus_beyond_the_limit_is_an_error() -> None:
    log = FakeLog()
    run(log, list(range(30)), chunk_rows=10)

    with pytest.raises(TooManyRows, match="smaller partitions"):
        run(log, list(range(29, -1, -1)), [1], surplus_max=12)


def test_waiting_rows_are_counted_and_each_append_reports_progress() -> None:
    log, told = FakeLog(), list[int]()
    made: Attempt = Attempt(log, [1, 2, 3], [3], chunk_rows=1, progressed=lambda: told.append(made.writer.queued_bytes))
    made.step()
    assert made.writer.queued_bytes == batch([1, 2, 3]).nbytes
    assert made.writer.waits
    made.run()

    assert told == [batch([1, 2]).nbytes, batch([1]).nbytes, 0]
    assert not made.writer.waits


# --- rows as a multiset ------------------------------------------------------------------------------------


def test_a_row_can_be_taken_as_often_as_it_was_added() -> None:
    counts = RowCounts()
    counts.add(batch([1, 1, 2]))

    assert values(counts.take(batch([1, 3, 1, 1, 2, 2]))) == [3, 1, 2]
    assert counts.total == 0
    assert values(counts.take(batch([1, 2]))) == [1, 2]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([float("nan"), -0.0, 0.0, 1e300, None]),
        pa.array([b"a", b"", None, b"a\0"]),
        pa.array([[b"a", None], [], None, [b"a"]]),
        pa.array([[("a", b"1")], None, [("a", b"1"), ("b", b"")]], pa.map_(pa.string(), pa.binary())),
        pa.array([1, None, 2**62], pa.timestamp("us", tz="UTC")).slice(0, 2),
        pa.array([{"x": 1, "y": None}, None, {"x": None, "y": 2}]),
    ],
    ids=lambda column: str(column.type),
)
def test_rows_of_all_types_are_distinguished_and_found_again(column: pa.Array) -> None:
    rows = pa.RecordBatch.from_arrays([column], names=["value"])
    counts = RowCounts()
    counts.add(rows)

    back = rows.take(pa.array(range(len(column) - 1, -1, -1)))
    assert counts.take(back).num_rows == 0
    assert counts.take(back).num_rows == len(column)
