"""Both engines share their planning: checkpoints have the same bytes, and a query may change its engine."""

import itertools
import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kera.local.cluster import RunningCluster
from kera.spark_connector import register
from tests.spark.support import Kera, Sent, sent, start

ENGINES = ("python", "columnar")
STRICT = {"startingOffsets": "earliest"}


@pytest.fixture
def by_engine(spark: SparkSession, cluster: RunningCluster) -> dict[str, Kera]:
    return {engine: Kera(spark, cluster.bootstrap, engine) for engine in ENGINES}


def offsets_of(checkpoint: Path) -> list[str]:
    """The text of the source's offset of each micro-batch."""
    files = sorted((checkpoint / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    return [path.read_text().splitlines()[-1] for path in files]


def plan_of(kera: Kera, stream: str) -> str:
    """Spark's plan for a read of the stream."""
    query = kera.read(stream)._jdf.queryExecution()
    return str(query.executedPlan().toString())


def test_the_option_engine_chooses_the_engine_and_the_default_is_columnar(
    by_engine: dict[str, Kera], kera: Kera, stream: str
) -> None:
    kera.create(stream)

    assert "KeraScan" not in plan_of(by_engine["python"], stream)
    assert "KeraScan" in plan_of(by_engine["columnar"], stream)
    assert "KeraScan" in plan_of(kera, stream), "the columnar engine is what one gets where it is loaded"


@pytest.mark.slow
def test_both_engines_read_a_mix_of_lean_and_arrow_chunks(
    by_engine: dict[str, Kera], kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100), flush_every=20, payload="arrow")
    produced += kera.send(stream, range(100, 200), flush_every=20, payload="lean")

    for engine in ENGINES:
        assert sorted(sent(by_engine[engine].read(stream))) == sorted(produced)
        found, _ = by_engine[engine].read_new(stream, tmp_path / engine, **STRICT)
        assert sorted(found) == sorted(produced)


@pytest.mark.slow
def test_the_python_data_source_can_be_registered_beside_the_jar(
    spark: SparkSession, by_engine: dict[str, Kera], kera: Kera, stream: str
) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(10))

    register(spark)  # under another name, because Spark refuses the name of a source in a jar

    for engine in ENGINES:
        assert sorted(sent(by_engine[engine].read(stream))) == sorted(produced)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"maxOffsetsPerTrigger": "90"}, {"maxBytesPerTrigger": "6000"}])
def test_checkpoints_of_both_engines_have_the_same_bytes(
    by_engine: dict[str, Kera], kera: Kera, stream: str, tmp_path: Path, options: dict[str, str]
) -> None:
    kera.create(stream, streamlets=2, entries=2)
    named = {**STRICT, **options, "kera.group.id": stream}
    produced: list[Sent] = []
    for first in (0, 300):
        produced += kera.send(stream, range(first, first + 300), flush_every=10)
        for engine in ENGINES:
            by_engine[engine].read_new(stream, tmp_path / engine, **named)

    python, columnar = (offsets_of(tmp_path / engine) for engine in ENGINES)
    assert python == columnar
    assert len(python) >= (6 if options else 2)
    (of_stream,) = json.loads(python[-1])["streams"].values()
    assert sum(place[3] for entries in of_stream["streamlets"].values() for place in entries) == len(produced)


@pytest.mark.parametrize("first", [ENGINES[0], pytest.param(ENGINES[1], marks=pytest.mark.slow)])
def test_a_query_may_change_its_engine_at_every_restart(
    by_engine: dict[str, Kera], kera: Kera, stream: str, tmp_path: Path, first: str
) -> None:
    kera.create(stream, streamlets=2)
    engines = itertools.cycle(ENGINES if first == ENGINES[0] else reversed(ENGINES))
    for numbers, engine in zip((range(100), range(100, 130), range(130, 130), range(130, 300)), engines, strict=False):
        produced = kera.send(stream, numbers, flush_every=20)

        found, _ = by_engine[engine].read_new(stream, tmp_path / "checkpoint", **STRICT, maxOffsetsPerTrigger="60")

        assert sorted(found) == sorted(produced)


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "repeating"), [ENGINES, ENGINES[::-1]])
def test_a_failed_micro_batch_is_the_same_with_the_other_engine(
    by_engine: dict[str, Kera], kera: Kera, stream: str, tmp_path: Path, failing: str, repeating: str
) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(50))
    attempts: dict[int, list[Sent]] = {}

    def fail(batch: object, number: int) -> None:
        attempts[number] = sent(batch)  # type: ignore[arg-type]  # a DataFrame
        raise RuntimeError("the sink is gone")

    frame = by_engine[failing].stream(stream, **STRICT)
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match="the sink is gone"):
        query.trigger(availableNow=True).start().awaitTermination()
    kera.send(stream, range(50, 80))
    again: dict[int, list[Sent]] = {}
    frame = by_engine[repeating].stream(stream, **STRICT)

    start(frame, tmp_path / "checkpoint", again, available_now=True).awaitTermination()

    assert sorted(again[0]) == sorted(attempts[0])
    assert len(again[0]) == 50
    assert len(again[1]) == 30
