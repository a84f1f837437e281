"""``spark.readStream.format("kera")`` takes every record once, also over restarts."""

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from tests.spark.support import Kera, Sent, start, wait_until


def test_available_now_reads_what_is_there_and_a_restart_only_what_is_new(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2, entries=2)
    for numbers in (range(300), range(300, 350), range(350, 350), range(350, 900)):
        produced = kera.send(stream, numbers)

        found, _ = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest")

        assert sorted(found) == sorted(produced)


def test_a_running_query_takes_what_comes(kera: Kera, stream: str, tmp_path: Path) -> None:
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


def test_latest_starts_behind_what_is_there(kera: Kera, stream: str, tmp_path: Path) -> None:
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


def test_a_chunk_larger_than_max_offsets_per_trigger_is_taken_alone(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(100), flush_every=50)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="10")

    start(frame, tmp_path / "checkpoint", found, available_now=True).awaitTermination()

    assert [record for batch in found.values() for record in batch] == produced
    assert len(found) > 1


def test_a_query_may_start_at_given_offsets(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100))

    starting = json.dumps({stream: {"0": "earliest", "1": "latest"}})
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", startingOffsets=starting)

    assert sorted(found) == sorted(record for record in produced if record.streamlet == 0)


def test_progress_tells_how_far_behind_a_query_is(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.send(stream, range(100), flush_every=20)
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, startingOffsets="earliest", maxOffsetsPerTrigger="20")

    query = start(frame, tmp_path / "checkpoint", found, available_now=True)
    query.awaitTermination()

    source = query.recentProgress[0]["sources"][0]
    (end,), (latest,) = (json.loads(source[name])["streamlets"]["0"] for name in ("endOffset", "latestOffset"))
    assert latest[3] - end[3] == 80


def test_a_checkpoint_of_a_deleted_stream_is_refused(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.send(stream, range(10))
    kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest")

    kera.delete(stream)
    kera.create(stream)
    kera.send(stream, range(10))

    with pytest.raises(StreamingQueryException, match=r"deleted and created again.*new checkpointLocation"):
        kera.read_new(stream, tmp_path / "checkpoint", startingOffsets="earliest")


def test_a_streaming_query_with_an_end_is_refused(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)

    with pytest.raises(StreamingQueryException, match="option endingOffsets: a streaming query has no end"):
        kera.read_new(stream, tmp_path / "checkpoint", endingOffsets="latest")
