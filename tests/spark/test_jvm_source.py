"""``format("kera")`` with the jar loaded: plans, metrics, errors, and the planner's process."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from kera.client import Client
from tests.spark.support import Kera, Sent, start, wait_until

PYTHON = "spark.kera.python"
SERVICE = "kera.spark_connector.service"


@pytest.fixture
def engine() -> str:
    return "columnar"


def plan_of(frame: DataFrame) -> str:
    """Spark's plan for the query."""
    return str(frame._jdf.queryExecution().executedPlan().toString())


def scan_metrics(frame: DataFrame) -> dict[str, int]:
    """Spark's counters for the scan of a collected frame."""
    scan = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
    names = ("keraChunks", "keraBytesInPlace", "keraBytesPulled", "keraRoutes")
    return {name: scan.metrics().apply(name).value() for name in names}


def planners(spark: SparkSession) -> set[int]:
    """The planner processes of Spark's JVM."""
    jvm = int(spark._jvm.org.apache.spark.util.Utils.getProcessName().split("@")[0])  # type: ignore[union-attr]
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = re.search(r"^PPid:\s*(\d+)$", (process / "status").read_text(), re.MULTILINE)
            command = (process / "cmdline").read_text().split("\0")
        except OSError:  # the process has ended meanwhile
            continue
        if parent and int(parent[1]) == jvm and SERVICE in command:
            found.add(int(process.name))
    return found


@contextmanager
def with_python(spark: SparkSession, python: str) -> Iterator[None]:
    """Let the driver plan with `python`."""
    conf = spark.sparkContext._jsc.sc().conf()  # the configuration itself, and not a copy
    before = dict(spark.sparkContext.getConf().getAll()).get(PYTHON)
    conf.set(PYTHON, python)
    try:
        yield
    finally:
        conf.remove(PYTHON)
        if before is not None:
            conf.set(PYTHON, before)


@contextmanager
def warnings_of_source(spark: SparkSession, path: Path) -> Iterator[Path]:
    """Write the warnings of KeraSource into a file, a line each."""
    log4j = spark._jvm.org.apache.logging.log4j  # type: ignore[union-attr]
    appender = log4j.core.appender.FileAppender.newBuilder().withFileName(str(path)).setName("to a test").build()
    appender.start()
    logger = log4j.LogManager.getLogger("kera.spark.KeraSource")
    level = logger.getLevel()
    log4j.core.config.Configurator.setLevel("kera.spark.KeraSource", log4j.Level.WARN)
    logger.addAppender(appender)
    try:
        yield path
    finally:
        logger.removeAppender(appender)
        log4j.core.config.Configurator.setLevel("kera.spark.KeraSource", level)
        appender.stop()


# -- plans and rows ------------------------------------------------------------------------------------------------


def test_a_query_reads_only_the_columns_that_it_uses(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(10))

    frame = kera.read(stream).filter("offset < 3").select("value")

    assert re.search(r"BatchScan kera\[value#\d+, offset#\d+L\] KeraScan columnar", plan_of(frame))
    assert [bytes(row.value) for row in frame.collect()] == [b"v0", b"v1", b"v2"]


def test_records_are_counted_without_reading_a_column(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(100), flush_every=10)

    frame = kera.read(stream).groupBy().count()

    assert "BatchScan kera[] KeraScan columnar" in plan_of(frame)
    assert frame.collect()[0][0] == 100


@pytest.mark.slow
def test_a_nested_field_of_the_headers_can_be_selected(kera: Kera, stream: str) -> None:
    kera.create(stream)

    async def send(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(stream)
            producer.send(stream, b"x", headers={"h": b"1"})
            producer.send(stream, b"y")

    kera.run(send)
    frame = kera.read(stream, includeHeaders="true").select("offset", "headers.key")

    assert re.search(r"BatchScan kera\[offset#\d+L, headers#\d+\] KeraScan columnar", plan_of(frame))
    assert [tuple(row) for row in frame.collect()] == [(0, ["h"]), (1, None)]


@pytest.mark.slow
def test_filters_and_groups_give_the_same_with_both_engines(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(500), flush_every=30)

    def counted(engine: str) -> list[tuple[object, ...]]:
        frame = kera.read(stream, engine=engine).filter("offset % 3 = 1").groupBy(f.col("key").cast("string"))
        return sorted(tuple(row) for row in frame.agg(f.count("*"), f.max("value"), f.min("timestamp")).collect())

    assert counted("columnar") == counted("python")
    assert sum(row[1] for row in counted("columnar")) in range(166, 168)  # type: ignore[misc]  # of two entries


def test_a_batch_reads_the_records_present_when_it_is_planned(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(10))
    frame = kera.read(stream)
    before = frame.select("offset")
    assert len(before.collect()) == 10

    kera.send(stream, range(10, 15))

    assert len(before.collect()) == 10, "a plan that was made reads the same again"
    assert frame.count() == 15


# -- metrics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared_memory", "used", "unused"),
    [("always", "keraBytesInPlace", "keraBytesPulled"), ("never", "keraBytesPulled", "keraBytesInPlace")],
)
def test_metrics_show_whether_chunks_were_read_in_place_or_pulled(
    kera: Kera, stream: str, shared_memory: str, used: str, unused: str
) -> None:
    kera.create(stream)
    kera.send(stream, range(100), flush_every=10)
    frame = kera.read(stream, sharedMemory=shared_memory).select("value")
    assert len(frame.collect()) == 100

    metrics = scan_metrics(frame)

    assert metrics["keraChunks"] == 10
    assert metrics[used] > 0
    assert metrics[unused] == 0
    assert metrics["keraRoutes"] == 0


# -- writing -------------------------------------------------------------------------------------------------------


def test_writing_does_not_need_the_columnar_engine(kera: Kera, stream: str) -> None:
    kera.create(stream)
    rows = kera.spark.createDataFrame([("a",)], "value string")

    with with_python(kera.spark, "/nowhere/python-that-writes"):
        rows.write.format("kera").option("kera.bootstrap.servers", kera.bootstrap).mode("append").save(stream)

    assert kera.read(stream).count() == 1


# -- the planner's process -----------------------------------------------------------------------------------------


def test_a_query_goes_on_when_its_planner_is_killed(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(stream, startingOffsets="earliest"), tmp_path / "checkpoint", found)
    produced: list[Sent] = []
    killed: set[int] = set()
    try:
        for first in (0, 100, 200):
            produced += kera.send(stream, range(first, first + 100))
            wait_until(lambda: query.exception() or sum(map(len, found.values())) >= len(produced), "the records")  # noqa: B023  # called at once
            running = planners(kera.spark)
            assert running
            assert not running & killed
            for process in running:
                os.kill(process, signal.SIGKILL)
            killed |= running
    finally:
        query.stop()

    assert query.exception() is None
    assert sorted(record for batch in found.values() for record in batch) == sorted(produced)


@pytest.mark.slow
def test_a_query_from_latest_keeps_its_start_when_its_planner_is_killed(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)
    kera.send(stream, range(10))
    found: dict[int, list[Sent]] = {}
    frame = kera.stream(stream, minOffsetsPerTrigger="50", maxTriggerDelay="1h")
    query = start(frame, tmp_path / "checkpoint", found)
    try:
        wait_until(lambda: query.exception() or 0 in found, "the first micro-batch")
        for process in planners(kera.spark):
            os.kill(process, signal.SIGKILL)
        produced = kera.send(stream, range(10, 70))
        wait_until(lambda: query.exception() or sum(map(len, found.values())) >= 60, "the records")
    finally:
        query.stop()

    assert query.exception() is None
    assert [record for batch in found.values() for record in batch] == produced


@pytest.mark.slow
def test_a_batch_is_planned_after_the_planner_was_killed(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(10))
    frame = kera.read(stream)
    for process in planners(kera.spark):
        os.kill(process, signal.SIGKILL)

    assert frame.count() == 10


# -- errors --------------------------------------------------------------------------------------------------------


def test_the_error_for_a_missing_python_says_the_way_out(kera: Kera, stream: str) -> None:
    kera.create(stream)

    with (
        with_python(kera.spark, "/nowhere/python-that-is-required"),
        pytest.raises(
            AnalysisException, match=r"option engine: .*`/nowhere/python-that-is-required -m .*leave the option"
        ),
    ):
        kera.read(stream)


@pytest.mark.parametrize(
    ("script", "what"),
    [
        pytest.param("exit 3", "has ended at once; is kera", marks=pytest.mark.slow),
        ("""read line; echo '{"id": 1, "result": {"version": "0.0.1"}}'; read line""", "is of kera 0.0.1"),
    ],
)
def test_the_error_for_an_unfit_planner_names_the_reason(
    kera: Kera, stream: str, tmp_path: Path, script: str, what: str
) -> None:
    kera.create(stream)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)

    with with_python(kera.spark, str(python)), pytest.raises(AnalysisException, match=re.escape(what)):
        kera.read(stream)


@pytest.mark.parametrize("given_columns", [pytest.param(True, marks=pytest.mark.slow), False])
def test_python_reads_when_the_planner_is_missing(kera: Kera, stream: str, given_columns: bool) -> None:
    kera.create(stream)
    kera.send(stream, range(10))
    reader = kera.reader().option("engine", "auto")

    with with_python(kera.spark, "/nowhere/python-that-may-be-missing"):
        frame = (reader.schema("value binary") if given_columns else reader).load(stream)
        assert "KeraScan" not in plan_of(frame)

    assert len(frame.collect()) == 10


@pytest.mark.slow
def test_one_warning_says_that_python_reads_because_the_planner_is_missing(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)

    with warnings_of_source(kera.spark, tmp_path / "log") as log, with_python(kera.spark, "/nowhere/said-once"):
        for _ in range(3):
            assert kera.read(stream, engine="auto").count() == 0

    (warning,) = log.read_text().splitlines()
    assert "/nowhere/said-once" in warning
    assert "engine=python" in warning


@pytest.mark.slow
def test_an_unknown_engine_gets_a_suggestion(kera: Kera, stream: str) -> None:
    kera.create(stream)

    with pytest.raises(AnalysisException, match=r"option engine: .*did you mean columnar"):
        kera.read(stream, engine="colunmar")


def test_errors_of_the_planner_keep_their_name_and_text(kera: Kera, stream: str) -> None:
    with pytest.raises(AnalysisException, match=f"UnknownStream: no stream is called '{stream}'"):
        kera.read(stream)
    kera.create(stream)
    with pytest.raises(AnalysisException, match="InvalidArgument: option startingOffsets: a batch query cannot start"):
        kera.read(stream, startingOffsets="latest").collect()


def test_a_stream_deleted_before_a_batch_runs_is_an_unknown_stream(kera: Kera, stream: str) -> None:
    kera.create(stream)
    frame = kera.read(stream)
    kera.delete(stream)

    with pytest.raises(AnalysisException, match="UnknownStream"):
        frame.collect()
