"""Queries with ``latencyTarget`` under Spark's calls, with clocks that the test sets."""

import logging
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from kera.core.errors import InvalidArgument, Unavailable
from kera.spark_connector.columns import columns_of
from kera.spark_connector.planning.pacing import HOLD_S
from kera.spark_connector.reading.latency.pace import QueryPace
from kera.spark_connector.reading.streaming import BYTES_ANY, KeraStreamReader
from tests.unit.spark_connector.fakes import CHUNK_BYTES, SCHEMA, FakeClient

OPTIONS = {"kera.bootstrap.servers": "h:1", "subscribe": "numbers", "startingOffsets": "earliest"}
Queries = Callable[..., "Query"]
EPOCH_S = 1_000_000.0
"""The wall clock at the beginning of the test."""


class Query:
    """A streaming query, run as Spark runs it."""

    def __init__(self, cluster: FakeClient, **options: str) -> None:
        self.cluster = cluster
        self.now_s = 0.0
        self.slept_s: list[float] = []
        self.comes: list[tuple[float, list[int]]] = []
        """Chunks that arrive in the first streamlet while the planner sleeps, with their times."""
        self.pace = QueryPace(lambda: self.now_s, wall_s=lambda: EPOCH_S + self.now_s, sleep=self.sleep)
        self.reader = KeraStreamReader(
            {**OPTIONS, **options}, columns_of(SCHEMA, typed=True), now_s=lambda: self.now_s, pace=self.pace
        )
        self.start = self.reader.initialOffset()

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.pass_time(seconds)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        while self.comes and self.comes[0][0] <= self.now_s:
            at_s, chunks = self.comes.pop(0)
            self.come(*chunks, at_s=at_s)

    def come(self, *chunks: int, at_s: float | None = None) -> None:
        self.cluster.created_us = int((EPOCH_S + (self.now_s if at_s is None else at_s)) * 1e6)
        self.cluster.chunks[0][0] += chunks

    def ask(self, limit: Any = None) -> dict[str, Any] | None:
        end = self.reader.latestOffset(self.start, limit or self.reader.getDefaultReadLimit())
        return None if end == self.start else end

    def records(self, end: dict[str, Any]) -> int:
        return sum(piece.records for piece in self.reader.pieces(self.start, end))

    def run(self, seconds: float, limit: Any = None) -> int:
        """Run a micro-batch that must begin now and takes `seconds`; return its number of records."""
        end = self.ask(limit)
        assert end is not None
        taken = self.records(end)
        self.pass_time(seconds)
        self.start = end
        self.reader.commit(end)  # Spark commits later, which makes no difference
        return taken

    def learn(self, *seconds: float) -> None:
        """Run micro-batches of one chunk each."""
        for each in seconds:
            self.come(1)
            while (end := self.ask()) is None:
                self.pass_time(0.01)
            self.pass_time(each)
            self.start = end
        assert self.ask() is None
        self.pass_time(0.01)

    def held(self) -> float:
        """Ask until a micro-batch begins; return how long that takes."""
        begun_s = self.now_s
        while self.ask() is None:
            assert self.now_s < begun_s + 100
            self.pass_time(0.01)
        return self.now_s - begun_s


@pytest.fixture
def queries(cluster: FakeClient) -> Iterator[Queries]:
    made: list[Query] = []

    def make(**options: str) -> Query:
        made.append(Query(cluster, **options))
        return made[-1]

    yield make
    for query in made:
        query.reader.stop()


def test_a_query_starts_with_a_small_micro_batch_and_grows_it(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.come(*[1] * 400_000)

    first = (4 << 20) // CHUNK_BYTES
    assert query.run(1.0) == first
    assert query.run(1.0) == pytest.approx(first * 1.8 / 1.2, rel=0.01)
    assert query.run(1.0) == pytest.approx(first * (1.8 / 1.2) ** 2, rel=0.01)


def test_a_micro_batch_is_held_back_until_its_records_would_be_late(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4, 0.4)
    query.come(1)

    assert query.held() == pytest.approx(1.8 - 0.4 * 1.2, abs=0.05)
    assert max(query.slept_s) <= 2 * HOLD_S + 0.01


def test_the_time_that_a_record_waited_elsewhere_counts(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4, 0.4)
    query.come(1)
    query.held()
    query.comes = [(query.now_s + 0.1, [1])]
    query.run(0.4)

    assert query.held() == pytest.approx(1.8 - 0.3 - 0.4 * 1.2, abs=0.05)
    query.learn(0.4)
    query.come(1)
    query.cluster.created_us -= 500_000  # the chunk was open for a long time
    assert query.held() == pytest.approx(1.8 - 0.5 - 0.4 * 1.2, abs=0.05)


def test_more_than_a_full_micro_batch_does_not_wait(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4, 0.4)
    query.come(*[1] * 10)

    assert query.run(0.4) in range(2, 5)  # one record took 0.4 s, so ten might take longer


def test_the_smaller_of_the_target_and_the_record_limit_applies(queries: Queries) -> None:
    query = queries(latencyTarget="2s", maxOffsetsPerTrigger="2")
    assert query.reader.getDefaultReadLimit() == ReadMaxRows(2)
    query.come(1, 1, 1, 1)
    assert query.run(0.1) == 2
    assert query.run(0.1) == 2
    query.come(1, 1, 1)
    assert query.run(0.1) == 2  # without a wait, as the micro-batch is full


def test_the_shorter_of_the_two_waits_applies(queries: Queries) -> None:
    query = queries(latencyTarget="10s", minOffsetsPerTrigger="3", maxTriggerDelay="5s")
    query.learn(1.0, 0.1, 0.1)
    query.come(1)
    assert query.held() < 6  # maxTriggerDelay ends the wait
    query.learn(0.1)
    query.come(1)
    assert query.ask() is None
    query.come(1, 1)
    assert query.run(0.1) == 3
    slow = queries(latencyTarget="2s", minOffsetsPerTrigger="1000")
    slow.start = query.start
    slow.learn(1.0, 0.4, 0.4, 0.4)
    slow.come(1)
    assert slow.held() < 2


def test_a_query_with_a_trigger_interval_does_not_sleep_and_begins_in_time(queries: Queries) -> None:
    query = queries(latencyTarget="4s")
    query.learn(1.0, 0.4, 0.4, 0.4)
    for _ in range(3):
        assert query.ask() is None
        query.pass_time(1.0)
    query.slept_s.clear()
    query.come(1)

    begun_s = query.now_s
    while query.ask() is None:
        query.pass_time(1.0)

    assert query.slept_s == []
    assert 2.0 <= query.now_s - begun_s <= 3.3


def test_without_a_target_nothing_is_held_back_and_no_record_is_read(queries: Queries, cluster: FakeClient) -> None:
    query = queries()
    assert query.reader.getDefaultReadLimit() == ReadAllAvailable()
    query.learn(0.4, 0.4, 0.4, 0.4)
    query.come(*[1] * 5)

    assert query.run(0.4) == 5
    assert query.slept_s == []
    assert query.reader.lag(query.start).keys() == {f"{which}OffsetsBehindLatest" for which in ("min", "max", "avg")}
    assert not cluster.shared_memory


def test_available_now_and_once_take_all_records_and_warn_that_the_target_has_no_effect(
    queries: Queries, caplog: pytest.LogCaptureFixture
) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4)
    query.come(*[1] * 20)
    with caplog.at_level(logging.WARNING):
        assert query.run(0.4, ReadAllAvailable()) == 20
    assert "latencyTarget: it has no effect with Trigger.Once" in caplog.text

    now = queries(latencyTarget="2s")
    now.come(*[1] * 100_000)
    now.reader.prepareForTriggerAvailableNow()
    with caplog.at_level(logging.WARNING):
        assert now.run(0.4) > 100_000
    assert "latencyTarget: it has no effect with Trigger.AvailableNow" in caplog.text
    assert now.slept_s == []


def test_the_default_read_limit_differs_from_that_of_trigger_once(queries: Queries) -> None:
    assert queries(latencyTarget="2s").reader.getDefaultReadLimit() == ReadMaxBytes(BYTES_ANY)


def test_real_time_mode_is_refused(queries: Queries) -> None:
    query = queries(latencyTarget="2s")

    with pytest.raises(InvalidArgument, match="option latencyTarget: has no meaning in real-time mode"):
        query.reader.real_time_pieces(query.start)


def test_the_warning_for_a_target_that_is_too_short_names_the_shortest_possible(
    queries: Queries, caplog: pytest.LogCaptureFixture
) -> None:
    query = queries(latencyTarget="400ms")
    with caplog.at_level(logging.WARNING):
        query.learn(2.0, *[0.9] * 7)

    (said,) = [record.message for record in caplog.records]
    assert "latencyTarget: 0.4 s cannot be kept" in said
    assert "micro-batch take 1 s" in said
    assert query.reader.lag(query.start)["latencyLeastMs"] == "1000"
    assert "trigger(realTime=...)" in said


def test_a_query_that_falls_behind_warns_once(queries: Queries, caplog: pytest.LogCaptureFixture) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, *[1.0] * 9)
    with caplog.at_level(logging.WARNING):
        for _ in range(16):
            query.come(*[1] * 10)
            query.run(1.5)

    assert [record.message[:40] for record in caplog.records] == ["latencyTarget: more records arrive than "]


def test_a_query_that_falls_behind_by_another_limit_does_not_warn(
    queries: Queries, caplog: pytest.LogCaptureFixture
) -> None:
    query = queries(latencyTarget="2s", maxOffsetsPerTrigger="2")
    query.come(*[1] * 10)
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            query.come(*[1] * 10)
            assert query.run(0.01) == 2

    assert caplog.records == []


def test_metrics_show_the_pace_and_end_the_running_micro_batch(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4)
    query.come(1)
    while (end := query.ask()) is None:
        query.pass_time(0.01)
    query.pass_time(0.4)
    shown = query.reader.lag(end)
    query.start = end
    query.pass_time(30)  # the trigger has a long interval

    assert shown["latencyTargetMs"] == "2000"
    assert int(shown["latencyTookMs"]) == pytest.approx(400, abs=2)
    assert int(shown["latencyPredictedMs"]) == pytest.approx(480, abs=10)
    # Halved, as a smaller size tells the cost of a start and of a byte apart.
    assert int(shown["latencyBytesMax"]) == pytest.approx(CHUNK_BYTES * 1.8 / 0.48 / 2, abs=2)
    assert int(shown["latencyHeldBackMs"]) == pytest.approx(1800 - 480, abs=60)
    query.come(1)
    assert query.ask() is None or int(query.reader.lag(end)["latencyPredictedMs"]) < 1000


def test_a_record_that_cannot_be_read_is_aged_from_when_it_was_seen(
    queries: Queries, cluster: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4, 0.4, 0.4)
    looks = []

    async def refused(*_: object, **__: object) -> AsyncIterator[None]:
        looks.append(1)
        if looks:
            raise InvalidArgument("not now")
        yield

    monkeypatch.setattr(cluster, "read_range", refused)
    query.come(1)

    assert query.held() == pytest.approx(1.8 - 0.4 * 1.2, abs=0.15)
    assert len(looks) == 1


@pytest.mark.parametrize("off_s", [-7200.0, 7200.0])
def test_a_producer_clock_that_is_off_by_hours_does_not_change_the_pace(
    queries: Queries, caplog: pytest.LogCaptureFixture, off_s: float
) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, *[0.4] * 6)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            query.come(1)
            query.cluster.created_us += int(off_s * 1e6)
            assert query.held() == pytest.approx(1.8 - 0.4, abs=0.15)
            assert query.run(0.4) == 1
            assert query.ask() is None

    said = [record.message[:65] for record in caplog.records]
    assert said == (["latencyTarget: records have timestamps 7.2e+03 s before their arr"] if off_s < 0 else [])


def test_records_removed_while_they_are_held_back_are_not_read(queries: Queries, cluster: FakeClient) -> None:
    query = queries(latencyTarget="2s", failOnDataLoss="false")
    query.learn(1.0, *[0.4] * 6)
    query.come(1, 1, 1)
    assert query.ask() is None
    cluster.streams["numbers"].removed[0] = len(cluster.chunks[0][0]) - 1

    assert query.held() <= 2
    assert query.records(query.ask() or {}) == 1


def test_a_query_recovers_from_brokers_that_vanish_while_records_are_held_back(
    queries: Queries, cluster: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, *[0.4] * 6)
    query.come(1)
    assert query.ask() is None

    async def gone(*_: object, **__: object) -> None:
        raise Unavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "bounds", gone)
        with pytest.raises(Unavailable):
            query.ask()
        query.pass_time(30)

    assert query.run(0.4) == 1, "at once: it is late"
    assert query.ask() is None
    query.come(1)
    assert query.held() > 1


def test_a_query_on_an_empty_stream_does_not_sleep(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    for _ in range(100):
        assert query.ask() is None
        query.pass_time(0.01)

    assert query.slept_s == []
    assert query.reader.lag(query.start).keys() == {f"{which}OffsetsBehindLatest" for which in ("min", "max", "avg")}
    query.come(1)
    assert query.run(0.4) == 1


def test_entries_with_a_larger_backlog_give_more_records(queries: Queries, cluster: FakeClient) -> None:
    query = queries(latencyTarget="2s")
    query.come(*[1] * 100_000)
    cluster.chunks[1][0] += [1, 1]
    end = query.ask()

    assert end is not None
    taken = {piece.entry.streamlet_id: piece.records for piece in query.reader.pieces(query.start, end)}
    assert taken[0] > 1000
    assert taken[1] <= 2


def test_a_query_makes_progress_when_a_chunk_exceeds_the_limit(queries: Queries) -> None:
    query = queries(latencyTarget="100ms")
    query.come(*[1] * 8)
    taken = 0
    for _ in range(8):
        if taken < 8:
            taken += query.run(10.0)

    assert taken == 8


def test_a_pickled_pace_starts_empty(queries: Queries) -> None:
    query = queries(latencyTarget="2s")
    query.learn(1.0, 0.4)

    assert query.pace.figures()["latencyTargetMs"] == "2000"
    copy: QueryPace = pickle.loads(pickle.dumps(query.pace))
    assert copy.figures() == {}
