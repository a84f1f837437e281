"""``latencyTarget`` in Spark: sizes and starts of micro-batches; the bench measures durations."""

import time
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from tests.spark.support import Kera, Sent, columnar_first, send_mib, sent, start, wait_until

pytestmark = pytest.mark.timeout(240)


@columnar_first
@pytest.mark.parametrize("interval", [None, "1 second"])
@pytest.mark.slow
def test_records_are_held_back_for_a_latency_target_and_read_once(
    kera: Kera, stream: str, tmp_path: Path, engine: str, interval: str | None
) -> None:
    kera.create(stream, streamlets=2)
    produced: list[Sent] = []
    found: list[Sent] = []
    metrics: dict[str, str] = {}

    def take(batch: DataFrame, _: int) -> None:
        found.extend(sent(batch))

    def held_back() -> bool:
        begun_s = time.monotonic()
        produced.extend(kera.send(stream, range(5)))
        wait_until(lambda: query.exception() or len(found) >= len(produced), "the records")
        assert query.exception() is None
        if engine == "python":  # Spark asks a Python source for no metrics, and starts its processes in the first round
            return len(produced) > 5 and time.monotonic() - begun_s > 5
        wait_until(lambda: query.exception() or not query.status["isTriggerActive"], "the end of the micro-batch")
        metrics.update([each for each in query.recentProgress if each["numInputRows"]][-1]["sources"][0]["metrics"])
        return int(metrics["latencyHeldBackMs"]) > 0

    frame = kera.stream(stream, startingOffsets="earliest", latencyTarget="10s")
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = (writer.trigger(processingTime=interval) if interval else writer).start()
    try:
        # Not the first ones: from these the query learns how long micro-batches take.
        wait_until(lambda: query.exception() or held_back(), "a micro-batch that was held back", 120)
    finally:
        query.stop()

    assert query.exception() is None
    assert sorted(found) == sorted(produced)
    if engine == "columnar":
        assert metrics["latencyTargetMs"] == "10000"
        assert {"latencyPredictedMs", "latencyBytesMax", "latencyTookMs"} <= metrics.keys()


@columnar_first
def test_a_backlog_is_read_in_several_micro_batches_and_a_restart_goes_on(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    records = send_mib(kera, stream, 12, streamlets=2)
    sizes: dict[int, int] = {}

    def run(until: int) -> None:
        frame = kera.stream(stream, startingOffsets="earliest", latencyTarget="2s")
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
def test_progress_shows_the_shortest_target_when_the_target_cannot_be_kept(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)

    def take(batch: DataFrame, _: int) -> None:
        batch.count()
        time.sleep(0.2)  # sleep: the work takes longer than the target

    writer = kera.stream(stream, startingOffsets="earliest", latencyTarget="100ms").writeStream.foreachBatch(take)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def least_ms() -> int:
        assert query.exception() is None
        kera.send(stream, range(3))
        progress = [each for each in query.recentProgress if each["numInputRows"]]
        return int(progress[-1]["sources"][0]["metrics"].get("latencyLeastMs", 0)) if progress else 0

    try:
        assert wait_until(least_ms, "the shortest target", 120) > 200, "each micro-batch takes longer"
    finally:
        query.stop()


@columnar_first
def test_available_now_reads_everything_in_one_micro_batch(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(100), flush_every=10)

    found, query = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest", latencyTarget="1s")

    assert sorted(found) == sorted(produced)
    assert len([each for each in query.recentProgress if each["numInputRows"]]) == 1


@pytest.mark.slow
def test_real_time_mode_refuses_a_latency_target(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    writer = kera.stream(stream, latencyTarget="2s").writeStream.outputMode("update").format("console")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(realTime="5 seconds").start()  # type: ignore[call-overload]  # not in its overloads
    with pytest.raises(StreamingQueryException, match="latencyTarget: has no meaning in real-time mode"):
        query.awaitTermination(60)


@columnar_first
@pytest.mark.slow
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
