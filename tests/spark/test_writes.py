"""``df.write.format("kera")`` and ``df.writeStream.format("kera")``: all rows are stored, and each once."""

import asyncio
import contextlib
import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.readwriter import DataStreamWriter

from kera.client import Client
from kera.client.producing.encoding.partitioner import streamlet_of
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.chaos import spark_job
from tests.spark.support import Kera, both_engines, columnar_first, numbers, wait_until, written

UTC = datetime.UTC
FAILED = (PySparkException, Py4JJavaError)
"""The errors of jobs that fail in Python or in the JVM."""
STREAMLETS = 4
HEADERS = (("h", b"x"), ("none", None), ("h", b""), ("", b"\xff"))

columnar = pytest.mark.parametrize("engine", ["columnar"], indirect=True)


def save(kera: Kera, frame: DataFrame, stream: str | None, *, mode: str = "append", **options: str) -> None:
    writer = frame.write.format("kera").option("kera.bootstrap.servers", kera.bootstrap).mode(mode)
    writer.option("engine", kera.engine).options(**options).save(stream)


def counting(kera: Kera, rows: int, partitions: int = 2) -> DataFrame:
    """Rows with the texts of 0, 1, … as values."""
    return kera.spark.range(rows, numPartitions=partitions).select(F.col("id").cast("string").alias("value"))


def failing_once(kera: Kera, stream: str, folder: Path, *, after: int) -> Callable[[DataFrame], DataFrame]:
    """Make one task fail once, after it has yielded some rows, and `after` rows of the query are stored."""
    bootstrap, marker = kera.bootstrap, folder / "has-failed"

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in range(10):  # small ones (`small_batches`), because the JVM would buffer larger ones
            yield next(batches)
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            wait_until(lambda: stored(bootstrap, stream) > after, "the first rows", 120)
            raise RuntimeError("this task fails once")
        yield from batches

    return lambda frame: frame.mapInArrow(check, frame.schema)


@pytest.fixture
def small_batches(kera: Kera) -> Iterator[None]:
    """Let rows go between the JVM and Python in batches of a thousand."""
    name = "spark.sql.execution.arrow.maxRecordsPerBatch"
    before = kera.spark.conf.get(name)
    kera.spark.conf.set(name, "1000")
    yield
    kera.spark.conf.set(name, str(before))


def stored(bootstrap: str, stream: str) -> int:
    """The number of records of a stream."""

    async def count() -> int:
        async with await Client.connect(bootstrap) as client:
            return sum(entry.next_record for entries in (await client.bounds(stream)).values() for entry in entries)

    return asyncio.run(count())


def shuffled(frame: DataFrame) -> DataFrame:
    """The rows of each partition in another order in each run, as after a shuffle between machines."""
    return frame.mapInArrow(spark_job.shuffled, frame.schema)


class Texts:
    """A folder of text files, one per micro-batch, whose lines are numbers."""

    def __init__(self, kera: Kera, folder: Path) -> None:
        self._kera = kera
        self._input = folder / "input"
        self._input.mkdir()
        self.checkpoint = folder / "checkpoint"
        self._files = 0

    def add(self, found: Iterable[int]) -> None:
        """Add a micro-batch."""
        draft = self._input / f".{self._files}"
        draft.write_text("".join(f"{number}\n" for number in found))
        draft.rename(self._input / f"{self._files:04}.txt")
        self._files += 1

    def frame(self) -> DataFrame:
        reader = self._kera.spark.readStream.format("text").option("maxFilesPerTrigger", 1)
        return reader.load(str(self._input))

    def write(self, frame: DataFrame, stream: str | None, **options: str) -> None:
        """Write all micro-batches to a stream, and stop."""
        query = self.writer(frame, **options).start(stream)
        query.awaitTermination()

    def writer(self, frame: DataFrame, **options: str) -> DataStreamWriter:
        writer = frame.writeStream.format("kera").option("kera.bootstrap.servers", self._kera.bootstrap)
        writer = writer.option("engine", self._kera.engine)
        return writer.options(**options).option("checkpointLocation", str(self.checkpoint)).trigger(availableNow=True)

    def forget_last_commit(self) -> int:
        """Make Spark take the last micro-batch for unfinished; return its number."""
        commits = self.checkpoint / "commits"
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
        (commits / str(last)).unlink()
        (commits / f".{last}.crc").unlink(missing_ok=True)
        return last


@pytest.fixture
def texts(kera: Kera, tmp_path: Path) -> Texts:
    return Texts(kera, tmp_path)


# --- columns -----------------------------------------------------------------------------------------------


@both_engines
def test_records_are_written_with_all_their_columns(kera: Kera, stream: str) -> None:
    kera.create(stream)
    when = datetime.datetime(2024, 1, 31, 12, 30, 15, 123456, tzinfo=UTC)
    frame = kera.spark.createDataFrame(
        [
            (bytearray(b"1"), "a", when, [Row(key=name, value=value) for name, value in HEADERS]),
            (None, None, when, None),
        ],
        "value binary, key string, timestamp timestamp, headers array<struct<key: string, value: binary>>",
    )

    save(kera, frame.coalesce(1), stream)

    first, second = written(kera, stream)
    micros = int(when.timestamp()) * 1_000_000 + 123456
    assert (first.value, first.key, first.timestamp_us, first.headers.pairs) == (b"1", b"a", micros, HEADERS)
    assert (second.value, second.key, second.timestamp_us, second.headers.pairs) == (None, None, micros, ())


@columnar_first
@pytest.mark.slow
def test_a_map_with_repeated_keys_becomes_all_headers(kera: Kera, stream: str, tmp_path: Path) -> None:
    """Spark does not make such a map itself, but keeps one from a file."""
    kera.create(stream)
    kind = DEFAULT_SCHEMA.field("headers").type
    table = pa.table({"value": [b"1", b"2"], "headers": pa.array([list(HEADERS), None], kind)})
    pq.write_table(table, tmp_path / "headers.parquet")

    save(kera, kera.spark.read.parquet(str(tmp_path / "headers.parquet")).coalesce(1), stream)

    assert [record.headers.pairs for record in written(kera, stream)] == [HEADERS, ()]
    first, second = kera.read(stream, includeHeaders="true").orderBy("offset").collect()
    assert (tuple((name, value) for name, value in first.headers), second.headers) == (HEADERS, None)


@columnar_first
def test_rows_with_a_key_go_to_the_same_streamlet_as_from_a_producer(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=STREAMLETS)
    frame = counting(kera, 200).withColumn("key", F.concat(F.lit("k"), F.col("value") % 10))

    save(kera, frame, stream)

    records = written(kera, stream)
    assert numbers(kera, stream) == Counter(range(200))
    assert all(record.streamlet == streamlet_of(record.key or b"", STREAMLETS) for record in records)
    assert all(record.key == b"k%d" % (int(record.value or b"") % 10) for record in records)


@columnar_first
@pytest.mark.slow
def test_rows_without_a_key_go_to_one_streamlet_per_partition(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=STREAMLETS)

    save(kera, counting(kera, 90, partitions=3), stream)

    records = written(kera, stream)
    assert numbers(kera, stream) == Counter(range(90))
    assert Counter(record.streamlet for record in records) == {0: 30, 1: 30, 2: 30}
    assert all(record.streamlet == int(record.value or b"") // 30 for record in records), "and in order"


def test_a_typed_stream_accepts_its_own_columns(kera: Kera, stream: str) -> None:
    schema = pa.schema([("user", pa.string()), pa.field("n", pa.uint32(), nullable=False), ("at", pa.timestamp("ms"))])
    kera.create(stream, schema=schema, key_column="user", streamlets=2)
    frame = kera.spark.range(100).select(F.col("id").alias("n"), F.concat(F.lit("u"), F.col("id") % 5).alias("user"))

    save(kera, frame, stream)

    rows = [record.row for record in written(kera, stream)]
    assert sorted((row["n"], row["user"], row["at"]) for row in rows if row) == [
        (n, f"u{n % 5}", None) for n in range(100)
    ]


def test_rows_go_to_the_stream_and_streamlet_that_they_name(kera: Kera, stream: str) -> None:
    for name in (stream, stream + "-other"):
        kera.create(name, streamlets=2)
    other = F.col("value") % 2 == 1
    frame = counting(kera, 40).select(
        "value",
        F.when(other, stream + "-other").otherwise(stream).alias("stream"),
        F.when(other, 1).alias("streamlet").cast("int"),
        F.lit("k").alias("key"),
    )
    try:
        save(kera, frame, None)

        assert numbers(kera, stream) == Counter(range(0, 40, 2))
        records = written(kera, stream + "-other")
        assert sorted(int(record.value or b"") for record in records) == list(range(1, 40, 2))
        assert {record.streamlet for record in records} == {1}
    finally:
        kera.delete(stream + "-other")


@columnar_first
@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("cast(id as int) as value", "column 'value' has to be binary or string for stream"),
        pytest.param(
            "cast(id as string) as valeu", "has no column 'valeu': did you mean 'value'?", marks=pytest.mark.slow
        ),
        pytest.param("cast(id as string) as key", "needs a column 'value'", marks=pytest.mark.slow),
    ],
)
def test_columns_that_do_not_fit_are_an_error_before_the_query_runs(
    kera: Kera, stream: str, column: str, message: str
) -> None:
    kera.create(stream)

    with pytest.raises(PySparkException) as raised:
        save(kera, kera.spark.range(3).selectExpr(column), stream)
    assert message in str(raised.value)
    assert written(kera, stream) == []


@columnar_first
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"mode": "overwrite"}, 'a stream only grows: use .mode("append")'),
        pytest.param({"mode": "ignore"}, "Append", marks=pytest.mark.slow),
        pytest.param({"txnAppId": "a"}, "txnVersion is missing", marks=pytest.mark.slow),
        pytest.param({"subscribe": "a"}, "to write, use stream", marks=pytest.mark.slow),
        pytest.param({"latencyTarget": "1ms"}, "latencyTarget: must be at least 10ms", marks=pytest.mark.slow),
    ],
)
def test_wrong_modes_and_options_are_refused(kera: Kera, stream: str, how: dict[str, str], message: str) -> None:
    kera.create(stream)

    with pytest.raises(PySparkException) as raised:
        save(kera, counting(kera, 3), stream, **how)
    assert message in str(raised.value)


@columnar_first
def test_the_error_for_a_missing_stream_names_it(kera: Kera, stream: str) -> None:
    with pytest.raises(PySparkException, match=f"there is no stream '{stream}'; create it first: kera stream create"):
        save(kera, counting(kera, 3), stream)


@pytest.mark.slow
def test_the_error_for_a_missing_stream_in_a_row_names_it(kera: Kera, stream: str) -> None:
    with pytest.raises(PySparkException, match=f"there is no stream '{stream}'; create it first: kera stream create"):
        save(kera, counting(kera, 3).withColumn("stream", F.lit(stream)), None)


@pytest.mark.slow
def test_a_null_in_a_column_that_is_not_nullable_is_an_error(kera: Kera, stream: str) -> None:
    kera.create(stream, schema=pa.schema([pa.field("n", pa.int64(), nullable=False)]))

    with pytest.raises(PySparkException, match="column 'n' takes no nulls"):
        save(kera, kera.spark.sql("select cast(null as bigint) n"), stream)


@columnar_first
@pytest.mark.slow
def test_a_data_frame_without_rows_writes_nothing(kera: Kera, stream: str) -> None:
    kera.create(stream)

    save(kera, counting(kera, 0), stream)

    assert written(kera, stream) == []


@columnar_first
@pytest.mark.slow
def test_many_partitions_with_empty_ones_are_written_completely(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=STREAMLETS)
    frame = counting(kera, 200, partitions=40).where(F.col("value") % 20 < 7)

    save(kera, frame, stream)

    assert numbers(kera, stream) == Counter(number for number in range(200) if number % 20 < 7)


@columnar_first
def test_many_large_rows_fill_many_chunks_and_segments(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)
    frame = kera.spark.range(3000, numPartitions=2).select(
        F.rpad(F.col("id").cast("string"), 2000, " ").alias("value"), F.col("id").cast("string").alias("key")
    )

    save(kera, frame, stream)

    assert numbers(kera, stream) == Counter(range(3000))


@columnar_first
@pytest.mark.usefixtures("small_batches")
def test_a_latency_target_stores_rows_while_their_task_waits_for_others(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    """The rows do not wait for a full chunk or for the end of the task, which here waits for them."""
    kera.create(stream, streamlets=2)
    bootstrap, marker = kera.bootstrap, tmp_path / "seen"

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in range(10):  # as in `failing_once`, for the same reason
            yield next(batches)
        wait_until(lambda: stored(bootstrap, stream) > 0, "the first rows", 120)
        marker.touch()
        yield from batches

    frame = counting(kera, 20_000, partitions=1).select(F.rpad("value", 100, " ").alias("value"))
    save(kera, frame.mapInArrow(slowly, frame.schema), stream, latencyTarget="200ms")

    assert marker.exists()
    assert numbers(kera, stream) == Counter(range(20_000))


@columnar_first
@pytest.mark.usefixtures("small_batches")
@pytest.mark.slow
def test_a_failed_write_with_a_latency_target_is_completed_by_a_retry(kera: Kera, stream: str, tmp_path: Path) -> None:
    """The clock decides where chunks are cut, so the retry cuts them differently."""
    kera.create(stream, streamlets=3)
    frame = counting(kera, 30_000).select(F.rpad("value", 100, " ").alias("value"), F.col("value").alias("key"))
    frame = failing_once(kera, stream, tmp_path, after=15_000)(frame)
    options = {"txnAppId": "job", "txnVersion": "1", "latencyTarget": "20ms"}
    with pytest.raises(FAILED, match="this task fails once"):
        save(kera, frame, stream, **options)
    assert 15_000 < numbers(kera, stream).total() < 30_000

    save(kera, frame, stream, **options)

    assert numbers(kera, stream) == Counter(range(30_000))


@columnar
@pytest.mark.parametrize(
    ("options", "named", "what"),
    [
        ({"schema": pa.schema([("value", pa.string())])}, True, "streams with a schema of their own"),
        pytest.param({}, False, "rows that each name their stream", marks=pytest.mark.slow),
    ],
)
def test_the_error_for_unsupported_columnar_writes_says_the_way_out(
    kera: Kera, stream: str, options: dict[str, Any], what: str, *, named: bool
) -> None:
    kera.create(stream, **options)
    frame = counting(kera, 3)

    with pytest.raises(PySparkException) as raised:
        save(kera, frame if named else frame.withColumn("stream", F.lit(stream)), stream if named else None)
    assert f"option engine: the columnar engine does not write {what}" in str(raised.value)
    assert "set it to python, and Python workers write" in str(raised.value)


@pytest.fixture
def auto_is_columnar(kera: Kera) -> Iterator[None]:
    kera.spark.conf.set("spark.kera.autoWrites", "columnar")
    yield
    kera.spark.conf.unset("spark.kera.autoWrites")


def planned_write(kera: Kera, frame: DataFrame, stream: str) -> str:
    """Spark's description of a write."""
    jvm: Any = kera.spark._jvm
    options = {"kera.bootstrap.servers": kera.bootstrap, "stream": stream, "engine": kera.engine}
    schema = frame._jdf.schema()
    given = jvm.org.apache.spark.sql.util.CaseInsensitiveStringMap(options)
    info = jvm.org.apache.spark.sql.connector.write.LogicalWriteInfoImpl(
        "query", schema, given, *[jvm.java.util.Optional.empty()] * 2
    )
    gateway: Any = kera.spark.sparkContext._gateway
    transforms = gateway.new_array(jvm.org.apache.spark.sql.connector.expressions.Transform, 0)
    return str(
        jvm.kera.spark.KeraSource().getTable(schema, transforms, options).newWriteBuilder(info).build().description()
    )


@pytest.mark.parametrize("engine", ["auto", "python", "columnar"], indirect=True)
def test_python_writes_unless_the_columnar_engine_is_requested(kera: Kera, stream: str, engine: str) -> None:
    kera.create(stream)

    planned = planned_write(kera, counting(kera, 1), stream)

    assert ("KeraWrite columnar" in planned) == (engine == "columnar")


@pytest.mark.usefixtures("auto_is_columnar")
@pytest.mark.parametrize("typed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_python_writes_unsupported_streams_when_auto_means_columnar(kera: Kera, stream: str, *, typed: bool) -> None:
    kera.create(stream, schema=pa.schema([("value", pa.string())]) if typed else None)
    frame = counting(kera, 30)
    assert ("KeraWrite columnar" in planned_write(kera, frame, stream)) == (not typed)

    save(kera, frame, stream)

    rows = [record.row["value"] if record.row else (record.value or b"").decode() for record in written(kera, stream)]
    assert Counter(rows) == Counter(map(str, range(30)))
    with pytest.raises(PySparkException, match="a stream only grows"):
        save(kera, frame, stream, mode="overwrite")


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@columnar_first
@pytest.mark.slow
def test_rows_are_written_to_a_compressed_stream(kera: Kera, stream: str, codec: str) -> None:
    kera.create(stream, codec=codec, streamlets=2)
    value = F.rpad(F.col("value"), 100, " ").alias("value")

    save(kera, counting(kera, 20_000).select(value, F.col("value").alias("key")), stream)

    assert numbers(kera, stream) == Counter(range(20_000))
    read = kera.read(stream).select(F.trim(F.col("value").cast("string")).alias("value"))
    assert sorted(int(row.value) for row in read.collect()) == list(range(20_000))


# --- batches again -----------------------------------------------------------------------------------------


@columnar_first
@pytest.mark.slow
def test_writing_the_same_rows_twice_stores_them_twice(kera: Kera, stream: str) -> None:
    kera.create(stream)
    for _ in range(2):
        save(kera, counting(kera, 10), stream)

    assert numbers(kera, stream) == Counter(dict.fromkeys(range(10), 2))


@columnar_first
def test_a_write_with_a_transaction_adds_its_rows_once(kera: Kera, stream: str) -> None:
    kera.create(stream)
    for version in ("7", "7", "8", "8"):
        save(kera, counting(kera, 50), stream, txnAppId="job", txnVersion=version)

    assert numbers(kera, stream) == Counter(dict.fromkeys(range(50), 2))
    with pytest.raises(FAILED, match="higher txnVersion of this txnAppId"):
        save(kera, counting(kera, 50), stream, txnAppId="job", txnVersion="7")
    assert numbers(kera, stream).total() == 100


@columnar_first
@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("reordered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_write_that_failed_in_the_middle_is_completed_by_a_retry(
    kera: Kera, stream: str, tmp_path: Path, *, reordered: bool
) -> None:
    kera.create(stream, streamlets=3)
    frame = counting(kera, 50_000).select(F.rpad("value", 100, " ").alias("value"), F.col("value").alias("key"))
    # This is more than the other task has, so the failing task has stored some rows.
    frame = failing_once(kera, stream, tmp_path, after=25_000)(shuffled(frame) if reordered else frame)
    with pytest.raises(FAILED, match="this task fails once"):
        save(kera, frame, stream, txnAppId="job", txnVersion="1")
    assert numbers(kera, stream).total() > 25_000

    save(kera, frame, stream, txnAppId="job", txnVersion="1")

    assert numbers(kera, stream) == Counter(range(50_000))


# --- streaming ---------------------------------------------------------------------------------------------


@both_engines
def test_a_streaming_query_writes_each_micro_batch(kera: Kera, stream: str, texts: Texts) -> None:
    kera.create(stream, streamlets=2)
    for first in (0, 100, 200):
        texts.add(range(first, first + 100))
    texts.write(texts.frame(), stream)
    texts.add(range(300, 400))
    texts.write(texts.frame(), stream)

    assert numbers(kera, stream) == Counter(range(400))
    assert len({record.streamlet for record in written(kera, stream)}) == 2, "keyless rows of batches are spread"


@both_engines
@pytest.mark.parametrize("reordered", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_repeated_micro_batch_adds_no_rows(kera: Kera, stream: str, texts: Texts, *, reordered: bool) -> None:
    kera.create(stream, streamlets=2)
    frame = texts.frame().repartition(2, "value").withColumn("key", F.col("value"))
    for first in (0, 500):
        texts.add([*range(first, first + 500), *range(first, first + 50)])
    texts.write(frame, stream)
    before = written(kera, stream)
    assert texts.forget_last_commit() == 1

    texts.write(shuffled(frame) if reordered else frame, stream)

    assert (texts.checkpoint / "commits" / "1").exists(), "it was run again"
    assert written(kera, stream) == before
    texts.add(range(1000, 1100))
    texts.write(frame, stream)
    twice = [*range(50), *range(500, 550)]
    assert numbers(kera, stream) == Counter([*range(1100), *twice])


@pytest.mark.parametrize("engines", [("python", "columnar"), ("columnar", "python")])
@pytest.mark.slow
def test_a_micro_batch_is_completed_by_the_other_engine(
    kera: Kera, stream: str, texts: Texts, engines: tuple[str, str]
) -> None:
    kera.create(stream, streamlets=2)
    first, second = engines
    frame = texts.frame().repartition(2, "value").select("value", F.col("value").alias("key"))
    texts.add([*range(500), *range(50)])
    texts.write(frame, stream, engine=first)
    assert texts.forget_last_commit() == 0
    before = written(kera, stream)

    texts.write(shuffled(frame), stream, engine=second)

    assert written(kera, stream) == before
    texts.add(range(500, 600))
    texts.write(frame, stream, engine=second)
    assert numbers(kera, stream) == Counter([*range(600), *range(50)])


@pytest.mark.usefixtures("small_batches")
@pytest.mark.slow
def test_a_micro_batch_that_failed_in_the_middle_is_completed_by_a_retry(
    kera: Kera, stream: str, texts: Texts, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2)
    texts.add(range(40_000))
    frame = shuffled(texts.frame().repartition(2, "value").select(F.rpad("value", 100, " ").alias("value")))
    frame = failing_once(kera, stream, tmp_path, after=21_000)(frame)
    with pytest.raises(StreamingQueryException, match="this task fails once"):
        texts.write(frame, stream)
    assert numbers(kera, stream).total() > 21_000

    texts.write(frame, stream)

    assert numbers(kera, stream) == Counter(range(40_000))


@columnar_first
@pytest.mark.slow
def test_a_query_in_complete_mode_is_refused(kera: Kera, stream: str, texts: Texts) -> None:
    kera.create(stream)
    texts.add([1, 2, 2])
    counts = texts.frame().groupBy("value").count().select("value")

    query = texts.writer(counts).outputMode("complete").start(stream)
    with pytest.raises(StreamingQueryException, match="use append, or foreachBatch"):
        query.awaitTermination()


@columnar_first
@pytest.mark.slow
def test_updates_are_written_once_by_batches_with_the_micro_batch_as_version(
    kera: Kera, stream: str, texts: Texts
) -> None:
    kera.create(stream)
    counts = texts.frame().groupBy("value").count()
    frame = counts.select(F.to_json(F.struct("value", "count")).alias("value"), F.col("value").alias("key"))

    def write(batch: DataFrame, number: int) -> None:
        for _ in range(2):  # as after a restart
            save(kera, batch, stream, txnAppId=stream, txnVersion=str(number))

    for _ in range(2):
        texts.add([1, 2, 2])
    writer = frame.writeStream.outputMode("update").foreachBatch(write).trigger(availableNow=True)
    writer.option("checkpointLocation", str(texts.checkpoint)).start().awaitTermination()

    found = [json.loads(record.value or b"") for record in written(kera, stream)]
    assert sorted((each["value"], each["count"]) for each in found) == [("1", 1), ("1", 2), ("2", 2), ("2", 4)]


@columnar_first
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no stream 'nowhere'; create it first: kera stream create nowhere"),
        pytest.param({"txnAppId": "a", "txnVersion": "1"}, "known by its checkpoint", marks=pytest.mark.slow),
        pytest.param(
            {"startingOffsets": "earliest"}, "option startingOffsets does not apply here", marks=pytest.mark.slow
        ),
    ],
)
def test_the_error_of_a_streaming_query_that_cannot_write_names_the_reason(
    texts: Texts, options: dict[str, str], message: str
) -> None:
    texts.add([1])

    with pytest.raises(StreamingQueryException) as raised:
        texts.write(texts.frame(), "nowhere", **options)
    assert message in str(raised.value)


@columnar_first
def test_records_that_were_read_can_be_written_unchanged(kera: Kera, stream: str, tmp_path: Path) -> None:
    copy = stream + "-copy"
    kera.create(stream, streamlets=2)
    kera.create(copy, streamlets=2)
    sent = kera.send(stream, range(300))
    frame = kera.stream(stream, startingOffsets="earliest", includeHeaders="true").drop("stream")
    writer = frame.writeStream.format("kera").option("kera.bootstrap.servers", kera.bootstrap)
    writer = writer.option("engine", kera.engine)
    try:
        writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start(copy).awaitTermination()

        found = [(record.streamlet, record.key, record.value) for record in written(kera, copy)]
        assert sorted(found) == sorted((record.streamlet, record.key, record.value) for record in sent)
    finally:
        kera.delete(copy)


@pytest.mark.slow
@both_engines
def test_column_names_follow_the_setting_case_sensitive(kera: Kera) -> None:
    plain, typed = f"cases-{kera.engine}", f"cases-typed-{kera.engine}"
    kera.create(plain)
    kera.create(typed, schema=pa.schema([("a", pa.int64()), ("A", pa.int64())]))
    frame = kera.spark.range(1).selectExpr("'k' AS Key", "'v' AS VALUE")
    save(kera, frame, plain)
    assert [(record.key, record.value) for record in written(kera, plain)] == [(b"k", b"v")]

    before = kera.spark.conf.get("spark.sql.caseSensitive")
    kera.spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(FAILED, match="has no column 'Key': did you mean 'key'"):
            save(kera, frame, plain)
        both = kera.spark.range(1).selectExpr("1L AS A", "2L AS a")
        both.write.format("kera").option("kera.bootstrap.servers", kera.bootstrap).mode("append").save(typed)
        read = kera.reader().load(typed)
        assert read.select("A").collect() == [Row(A=1)]
        assert read.collect() == [Row(a=2, A=1)]
    finally:
        kera.spark.conf.set("spark.sql.caseSensitive", str(before))
    pruned = kera.reader().load(plain).select("VALUE")
    assert [bytes(row[0]) for row in pruned.collect()] == [b"v"]
