"""Spark's real-time mode: tasks read on, and a micro-batch ends where they are when its time is up."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from tests.spark.support import Kera, Sent, start, wait_until

EARLIEST = {"startingOffsets": "earliest"}
MIN_DURATION = "spark.sql.streaming.realTimeMode.minBatchDuration"
ALLOW_CHECKPOINT = "spark.sql.streaming.realTimeMode.dangerouslyAllowCheckpointV1.enabled"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def engine() -> str:
    return "columnar"


@pytest.fixture(autouse=True)
def short_batches(spark: SparkSession) -> Iterator[None]:
    """Allow micro-batches shorter than Spark's minimum of 5 s."""
    spark.conf.set(MIN_DURATION, "1s")
    yield
    spark.conf.unset(MIN_DURATION)


@pytest.fixture
def queries(spark: SparkSession) -> Iterator[None]:
    """Stop the queries that a test leaves running."""
    yield
    for query in spark.streams.active:
        query.stop()


def real_time(frame: DataFrame, duration: str = "1 second") -> DataStreamWriter:
    """A writer that runs a query over `frame` in real-time mode."""
    writer = frame.writeStream.outputMode("update")
    return writer.trigger(realTime=duration)  # type: ignore[call-overload, no-any-return]  # not in its overloads


class Told:
    """A query that shows each record at once in properties of the JVM, because Python's sinks get them later."""

    def __init__(self, frame: DataFrame, prefix: str, duration: str) -> None:
        name = f"concat_ws(' ', '{prefix}', stream, streamlet, entry, offset, key)"
        tell = f"java_method('java.lang.System', 'setProperty', {name}, CAST(value AS STRING)) AS told"
        self._prefix = f"{prefix} "
        self._system = frame.sparkSession._jvm.java.lang.System  # type: ignore[union-attr]
        self.query = real_time(frame.selectExpr(tell), duration).foreach(lambda _: None).start()

    def all(self) -> list[tuple[str, Sent]]:
        """Each record with its stream, in order."""
        assert self.query.isActive, self.query.exception()
        everything = self._system.getProperties().toString()  # one call instead of one per name
        found = re.findall(rf"\b{re.escape(self._prefix)}(\S+) (\d+) (\d+) (\d+) (\w+)=(\w+)", everything)
        return sorted(
            (stream, Sent(int(streamlet), int(entry), int(offset), key.encode(), value.encode()))
            for stream, streamlet, entry, offset, key, value in found
        )

    def wait(self, expected: list[tuple[str, Sent]]) -> None:
        """Wait for as many records as expected; they must be equal."""
        wait_until(lambda: len(self.all()) >= len(expected), f"{len(expected)} records")
        assert self.all() == sorted(expected)

    def source_behind(self, stream: str) -> dict[str, Any]:
        """The source in the progress of the last micro-batch; empty while it lacks the stream."""
        progress = self.query.lastProgress
        source: dict[str, Any] = json.loads(progress.json)["sources"][0] if progress else {}
        return source if stream in str(source.get("endOffset")) else {}

    def close(self) -> None:
        """Stop the query, and clear its properties."""
        self.query.stop()
        for name in list(self._system.getProperties().stringPropertyNames()):
            if name.startswith(self._prefix):
                self._system.clearProperty(name)


class Outcome(NamedTuple):
    """The output of a query with a foreach writer."""

    committed: list[int]
    """Its finished micro-batches."""
    offsets: list[int]
    """The offsets of the records in these micro-batches."""


class Runs:
    """A query in real-time mode that can be stopped and restarted; it outputs files."""

    def __init__(self, frame: DataFrame, folder: Path) -> None:
        self.frame = frame
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.count = 0

    def committed(self) -> set[int]:
        """The finished micro-batches of all runs."""
        return {int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*")}

    def ends(self) -> dict[int, list[int]]:
        """Group, segment, offset and record of the end of each micro-batch, for a stream with one entry."""
        files = {int(path.name): path for path in (self.checkpoint / "offsets").glob("[0-9]*")}
        documents = {number: json.loads(path.read_text().splitlines()[-1]) for number, path in files.items()}
        return {
            number: place
            for number, document in documents.items()
            for stream in document["streams"].values()
            for (place,) in stream["streamlets"].values()
        }

    def come_to(self) -> int:
        """The ordinal of the first record behind all finished micro-batches."""
        ended = self.committed()
        return self.ends()[max(ended)][3] if ended else 0

    def run(self) -> Outcome:
        """Run the query until a micro-batch with records has ended, and stop it during another one."""
        before, begin = self.committed(), self.come_to()
        self.count += 1
        output = self.folder / f"run-{self.count}"
        output.mkdir()
        writer = real_time(self.frame).foreach(_writer(str(output)))
        query = writer.option("checkpointLocation", str(self.checkpoint)).start()

        def advanced() -> bool:
            assert query.isActive, query.exception()
            return self.come_to() > begin

        try:
            wait_until(advanced, "a micro-batch to end")
        finally:
            query.stop()
        ids = sorted(self.committed() - before)
        return Outcome(ids, [offset for number in ids for offset in _written(output, number)])


def _writer(folder: str) -> Any:
    """A foreach writer that puts the offsets of each micro-batch into another file."""

    class Writer:
        def open(self, partition: int, number: int) -> bool:
            self.path = f"{folder}/{number}-{partition}"
            self.offsets: list[int] = []
            return True

        def process(self, row: Row) -> None:
            self.offsets.append(row.offset)

        def close(self, error: Exception | None) -> None:
            if error is None:
                with open(self.path, "w") as file:  # noqa: PTH123 - a worker lacks this module's imports
                    file.write("\n".join(map(str, self.offsets)))

    return Writer()


def _written(folder: Path, number: int) -> list[int]:
    return [int(line) for path in folder.glob(f"{number}-*") for line in path.read_text().splitlines()]


# -- output --------------------------------------------------------------------------------------------------------


def test_records_are_output_while_their_micro_batch_runs(kera: Kera, stream: str) -> None:
    kera.create(stream, entries=2)
    produced = [(stream, record) for record in kera.send(stream, range(100), flush_every=10)]

    with closing(Told(kera.stream(stream, **EARLIEST), stream, "10 minutes")) as told:
        told.wait(produced)
        for number in range(100, 105):
            produced += [(stream, record) for record in kera.send(stream, [number])]
            told.wait(produced)
        assert told.query.lastProgress is None, "no micro-batch has ended"


@pytest.mark.slow
def test_a_joining_stream_is_read_from_the_next_micro_batch_on(kera: Kera, stream: str) -> None:
    names = [f"{stream}-{letter}" for letter in "ab"]
    kera.create(names[0])
    produced = [(names[0], record) for record in kera.send(names[0], range(10))]
    frame = kera.stream(None, subscribePattern=f"{stream}-.*", **EARLIEST, **{"kera.group.id": stream})

    with closing(Told(frame, stream, "1 second")) as told:
        told.wait(produced)
        kera.create(names[1])
        produced += [(names[1], record) for record in kera.send(names[1], range(5))]
        told.wait(produced)

        source = wait_until(lambda: told.source_behind(names[1]), "its micro-batch to end")
        assert source["metrics"]["maxOffsetsBehindLatest"] == "0"
        wait_until(lambda: kera.lag(stream) == 0, "the cursor to be stored")


# -- ends of micro-batches -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_record_is_output_once_across_micro_batches_restarts_and_engines(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)
    count = len(kera.send(stream, range(8000), linger_ms=60_000, chunk_bytes_max=1 << 19))
    slow = "java_method('java.lang.Thread', 'sleep', 1L) AS slept"  # so that the micro-batch ends within the chunk
    runs = Runs(kera.stream(stream, **EARLIEST).selectExpr("offset", slow), tmp_path)

    first, second = runs.run(), runs.run()

    assert second.committed[0] == first.committed[-1] + 1
    done = runs.come_to()
    assert 0 < done < count, "the last micro-batch has ended within the records"
    assert len({tuple(place[:3]) for place in runs.ends().values()}) == 1, "which are one chunk"
    assert first.offsets + second.offsets == list(range(done)), "once, where micro-batches have ended"

    kera.send(stream, range(count, count + 100))
    for other in ("python", "columnar"):
        checkpoint = tmp_path / other
        shutil.copytree(runs.checkpoint, checkpoint)
        rest, _ = Kera(kera.spark, kera.bootstrap, other).read_new(stream, checkpoint)
        assert sorted(record.offset for record in rest) == list(range(done, count + 100))

    # As if it had been killed just before the commit of the last micro-batch.
    last = max(runs.committed())
    begin = runs.ends()[last - 1][3]
    for other in ("python", "columnar"):
        checkpoint = tmp_path / f"{other}-again"
        shutil.copytree(runs.checkpoint, checkpoint)
        for path in (checkpoint / "commits").glob(f"*{last}*"):
            path.unlink()
        found: dict[int, list[Sent]] = {}
        frame = Kera(kera.spark, kera.bootstrap, other).stream(stream)
        start(frame, checkpoint, found, available_now=True).awaitTermination()
        assert sorted(record.offset for record in found.pop(last)) == list(range(begin, done)), "up to within the chunk"
        rest = [record for batch in found.values() for record in batch]
        assert sorted(record.offset for record in rest) == list(range(done, count + 100))


@pytest.mark.slow
def test_real_time_mode_continues_from_a_checkpoint_of_micro_batches(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.send(stream, range(50), flush_every=20)
    runs = Runs(kera.stream(stream), tmp_path)
    before, _ = kera.read_new(stream, runs.checkpoint, **EARLIEST)
    kera.send(stream, range(50, 80))

    kera.spark.conf.set(ALLOW_CHECKPOINT, "true")  # the ban is about state, and this query is stateless
    try:
        found = runs.run()
    finally:
        kera.spark.conf.unset(ALLOW_CHECKPOINT)

    assert len(before) == 50
    assert found.offsets == list(range(50, 80))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("queries")
@pytest.mark.slow
def test_real_time_mode_refuses_the_python_engine(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    writer = real_time(kera.stream(stream, engine="python")).foreach(_writer(str(tmp_path)))

    with pytest.raises(Exception, match=r"INPUT_STREAM_NOT_SUPPORTED"):
        writer.start().awaitTermination(60)


@pytest.mark.usefixtures("queries")
@pytest.mark.slow
def test_real_time_mode_refuses_the_sink_kera(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.create(f"{stream}-copy")
    writer = real_time(kera.stream(stream).select("value")).format("kera").option("stream", f"{stream}-copy")
    writer = writer.option("kera.bootstrap.servers", kera.bootstrap).option("checkpointLocation", str(tmp_path))

    with pytest.raises(Exception, match=r"sink.* not in the sink allowlist"):
        writer.start().awaitTermination(60)
