"""``latencyTarget`` in Spark: sizes and starts of micro-batches; the bench measures durations."""

import time
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from tests.spark.support import Kera, Sent, both_engines, columnar_first, send_mib, sent, start, wait_until

pytestmark = pytest.mark.timeout(240)
RECORDS = 35


@columnar_first
def test_a_latency_target_combines_records_into_few_micro_batches_without_loss(
    kera: Kera, stream: str, tmp_path: Path, engine: str
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(5))
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(stream, startingOffsets="earliest", latencyTarget="5s"), tmp_path / "checkpoint", found)
    try:
        for first in (5, 10):  # the query learns the duration of micro-batches
            wait_until(lambda: query.exception() or sum(map(len, found.values())) == len(produced), "the records")  # noqa: B023  # called at once
            produced += kera.send(stream, range(first, first + 5))
        for first in range(15, RECORDS, 2):
            produced += kera.send(stream, range(first, first + 2))
        wait_until(lambda: query.exception() or sum(map(len, found.values())) == RECORDS, "the records")
        wait_until(lambda: not query.status["isTriggerActive"] or query.exception(), "the end of it")
        progress = [each["sources"][0] for each in query.recentProgress if each["numInputRows"]]
    finally:
        query.stop()

    assert query.exception() is None
    assert sorted(record for batch in found.values() for record in batch) == sorted(produced)
    assert len(found) <= 8, "thirteen times something came, as soon as it was taken or before"
    if engine == "columnar":  # Spark asks a Python source for no metrics
        assert all(source["metrics"]["latencyTargetMs"] == "5000" for source in progress)
        assert any(int(source["metrics"]["latencyHeldBackMs"]) > 0 for source in progress)


@columnar_first
def test_a_backlog_is_read_in_several_micro_batches_and_a_restart_goes_on(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    records = send_mib(kera, stream, 12, streamlets=2)
    sizes: dict[int, int] = {}

    def run(until: int) -> None:
        frame = kera.stream(stream, startingOffsets="earliest", latencyTarget="5s")
        query = (
            frame.writeStream.foreachBatch(lambda batch, number: sizes.update({number: batch.count()}))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            wait_until(lambda: query.exception() or sum(sizes.values()) >= until, "the records")
        finally:
            query.stop()
        assert query.exception() is None

    run(1)
    run(records)

    assert sum(sizes.values()) == records
    assert max(sizes.values()) < records
    assert sizes[0] < records / 2  # the first micro-batch has 4 MiB of 12


@pytest.mark.slow
@both_engines
def test_records_are_held_back_with_a_trigger_interval_and_read_once(
    kera: Kera, stream: str, tmp_path: Path, engine: str
) -> None:
    kera.create(stream, streamlets=2)
    produced: list[Sent] = []
    found: list[Sent] = []

    def take(batch: DataFrame, _: int) -> None:
        found.extend(sent(batch))

    frame = kera.stream(stream, startingOffsets="earliest", latencyTarget="10s")
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(processingTime="1 second").start()
    waited_s = 0.0
    try:
        for first in range(0, 20, 5):  # from all but the last one the query learns the duration of micro-batches
            begun_s = time.monotonic()
            produced += kera.send(stream, range(first, first + 5))
            expected = len(produced)
            wait_until(lambda: query.exception() or len(found) == expected, "the records")  # noqa: B023  # called at once
            waited_s = time.monotonic() - begun_s
        wait_until(lambda: not query.status["isTriggerActive"] or query.exception(), "the end of it")
        progress = [each["sources"][0] for each in query.recentProgress if each["numInputRows"]]
    finally:
        query.stop()

    assert query.exception() is None
    assert sorted(found) == sorted(produced)
    assert waited_s > 2, "without a target it begins within a second"
    if engine == "columnar":  # Spark asks a Python source for no metrics
        last = progress[-1]["metrics"]
        assert last["latencyTargetMs"] == "10000"
        assert int(last["latencyHeldBackMs"]) > 1000
        assert {"latencyPredictedMs", "latencyBytesMax", "latencyTookMs"} <= last.keys()


def test_progress_shows_the_shortest_target_when_the_target_cannot_be_kept(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(stream, startingOffsets="earliest", latencyTarget="100ms"), tmp_path / "c", found)

    def least_ms() -> int:
        kera.send(stream, range(3))
        progress = [each for each in query.recentProgress if each["numInputRows"]]
        return int(progress[-1]["sources"][0]["metrics"].get("latencyLeastMs", 0)) if progress else 0

    try:
        wait_until(lambda: query.exception() or least_ms() > 0, "what can be kept")
        said = least_ms()
    finally:
        query.stop()

    assert query.exception() is None
    assert said > 100, "Spark alone plans for longer"


@columnar_first
def test_available_now_reads_everything_in_one_micro_batch(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(100), flush_every=10)

    found, query = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest", latencyTarget="1s")

    assert sorted(found) == sorted(produced)
    assert len([each for each in query.recentProgress if each["numInputRows"]]) == 1


def test_real_time_mode_refuses_a_latency_target(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    writer = kera.stream(stream, latencyTarget="2s").writeStream.outputMode("update").format("console")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(realTime="5 seconds").start()  # type: ignore[call-overload]  # not in its overloads
    with pytest.raises(StreamingQueryException, match="latencyTarget: has no meaning in real-time mode"):
        query.awaitTermination(60)


@columnar_first
def test_a_query_on_the_path_of_a_latency_constraint_reports_its_durations(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(5))
    found: dict[int, list[Sent]] = {}
    options = {"startingOffsets": "earliest", "kera.group.id": stream}
    query = start(kera.stream(stream, **options), tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: query.exception() or stream in kera.groups(), "the query's cursor")
        kera.run(lambda client: client.latency.create(stream, [stream, f"group:{stream}"], 60_000, window_ms=60_000))

        def measured() -> bool:
            kera.send(stream, range(2))
            described = kera.run(lambda client: client.latency.describe(stream))
            return {"hand-over", "work"} <= {hop.hop for hop in described.hops if hop.chunks}

        wait_until(lambda: query.exception() or measured(), "figures of the query", timeout_s=120)
    finally:
        query.stop()
        kera.run(lambda client: client.latency.delete(stream))
    assert query.exception() is None
