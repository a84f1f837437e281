"""``spark.readStream.format("kera")`` reads every record once, also over restarts."""

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

from tests.spark.support import Kera, Sent, both_engines, columnar_first, send_mib, start, wait_until


@columnar_first
def test_available_now_reads_all_records_and_a_restart_only_new_ones(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2, entries=2)
    for numbers in (range(300), range(300, 350), range(350, 350), range(350, 900)):
        produced = kera.send(stream, numbers)

        found, _ = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest")

        assert sorted(found) == sorted(produced)


@both_engines
def test_a_running_query_reads_new_records_once(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(stream, startingOffsets="earliest"), tmp_path / "checkpoint", found)
    produced: list[Sent] = []
    try:
        for first in (0, 100, 200):
            produced += kera.send(stream, range(first, first + 100))
            wait_until(lambda: query.exception() or sum(map(len, found.values())) == len(produced), "the records")  # noqa: B023  # called at once
    finally:
        query.stop()

    assert sorted(record for batch in found.values() for record in batch) == sorted(produced)


@columnar_first
@pytest.mark.slow
def test_latest_starts_behind_the_present_records(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(100))
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(stream), tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: 0 in found or query.exception(), "the first micro-batch")
        produced = kera.send(stream, range(100, 150))
        wait_until(lambda: sum(map(len, found.values())) >= len(produced) or query.exception(), "the records")
    finally:
        query.stop()

    assert sorted(record for batch in found.values() for record in batch) == sorted(produced)


@columnar_first
def test_micro_batches_keep_to_max_offsets_per_trigger_in_whole_chunks(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(1000), flush_every=20)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="130")

    start(frame, tmp_path / "checkpoint", found, available_now=True).awaitTermination()

    sizes = [len(batch) for batch in found.values()]
    assert max(sizes) <= 130
    assert len(sizes) >= 1000 / 130
    assert [record for batch in found.values() for record in batch] == produced


@columnar_first
@pytest.mark.slow
def test_a_chunk_larger_than_max_offsets_per_trigger_is_taken_alone(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(100), flush_every=50)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="10")

    start(frame, tmp_path / "checkpoint", found, available_now=True).awaitTermination()

    assert [record for batch in found.values() for record in batch] == produced
    assert len(found) > 1


@columnar_first
@pytest.mark.slow
def test_a_query_may_start_at_given_offsets(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100))

    starting = json.dumps({stream: {"0": "earliest", "1": "latest"}})
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets=starting)

    assert sorted(found) == sorted(record for record in produced if record.streamlet == 0)


@columnar_first
def test_progress_has_the_end_the_latest_offset_and_the_lag(
    kera: Kera, stream: str, tmp_path: Path, engine: str
) -> None:
    kera.create(stream)
    kera.send(stream, range(100), flush_every=20)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="20")

    query = start(frame, tmp_path / "checkpoint", found, available_now=True)
    query.awaitTermination()

    source = query.recentProgress[0]["sources"][0]
    (end,), (latest,) = (
        json.loads(source[name])["streams"][stream]["streamlets"]["0"] for name in ("endOffset", "latestOffset")
    )
    assert latest[3] - end[3] == 80
    if engine == "columnar":  # Spark asks a Python source for no metrics
        assert source["description"] == f"Kera[{stream}]"
        assert source["metrics"] == {
            "minOffsetsBehindLatest": "80",
            "maxOffsetsBehindLatest": "80",
            "avgOffsetsBehindLatest": "80.0",
        }


@columnar_first
@pytest.mark.slow
def test_micro_batches_keep_to_max_bytes_per_trigger(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(400), flush_every=20)
    (planned,) = kera.read(stream, metadata="partitions").collect()
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxBytesPerTrigger=str(planned.bytes // 4))

    start(frame, tmp_path / "checkpoint", found, available_now=True).awaitTermination()

    assert len(found) >= 4
    assert max(map(len, found.values())) <= 100
    assert [record for batch in found.values() for record in batch] == produced


@columnar_first
@pytest.mark.slow
def test_a_micro_batch_waits_for_the_minimal_number_of_records(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, minOffsetsPerTrigger="50", maxTriggerDelay="1h")
    query = start(frame, tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: query.exception() or 0 in found, "the first micro-batch")
        for first in range(0, 100, 20):
            kera.send(stream, range(first, first + 20))
        wait_until(lambda: query.exception() or len(found) >= 2, "a micro-batch")
    finally:
        query.stop()
    assert query.exception() is None
    assert all(len(batch) >= 50 for number, batch in found.items() if number)


@columnar_first
@pytest.mark.slow
def test_available_now_reads_all_of_several_streams_within_the_limits(kera: Kera, stream: str, tmp_path: Path) -> None:
    names = [stream, f"{stream}-b"]
    produced = []
    for name in names:
        kera.create(name, streamlets=2)
        produced += kera.send(name, range(200), flush_every=10)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(
        subscribe=",".join(names), startingOffsets="earliest", maxOffsetsPerTrigger="100", minOffsetsPerTrigger="90"
    )

    start(frame, tmp_path / "checkpoint", found, available_now=True).awaitTermination()

    assert sorted(record for batch in found.values() for record in batch) == sorted(produced)
    assert len(found) >= 4
    assert max(map(len, found.values())) <= 100


@columnar_first
def test_micro_batches_are_cut_into_more_tasks_than_streamlets(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, group_segments=2)
    count = send_mib(kera, stream, 5, streamlets=1)
    tasks: list[int] = []

    def take(batch: DataFrame, _: int) -> None:
        tasks.append(batch.rdd.getNumPartitions())
        assert batch.select("offset").distinct().count() == count

    frame = kera.stream(stream, startingOffsets="earliest", minPartitions="4").select("offset")
    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()

    assert tasks[0] >= 4


@columnar_first
@pytest.mark.slow
def test_a_streaming_query_with_an_end_is_refused(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)

    with pytest.raises(StreamingQueryException, match="option endingOffsets: a streaming query has no end"):
        kera.read_new(stream, tmp_path / "checkpoint", endingOffsets="latest")
