"""The connector's features on a version of Spark: test_spark_versions.py runs it with that version's Python.

It creates its streams in the given cluster, and prints its results as one line of JSON.
"""

import asyncio
import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  # the usual name

from kera.client import Client

EARLIEST = {"startingOffsets": "earliest"}
COLUMNS = pa.schema([("user", pa.string()), ("fare", pa.int32()), ("at", pa.timestamp("us"))])
ADDED = pa.schema([("tip", pa.float64()), ("tags", pa.list_(pa.string()))])


class Job:
    """A session, and a cluster."""

    def __init__(self, bootstrap: str, folder: Path) -> None:
        self.bootstrap = bootstrap
        self.folder = folder
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        self.spark = builder.config("spark.driver.memory", "512m").getOrCreate()

    def with_client(self, work: Callable[[Client], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            async with await Client.connect(self.bootstrap) as client:
                return await work(client)

        return asyncio.run(connected())

    def create(self, stream: str, **arguments: Any) -> None:
        self.with_client(lambda client: client.admin.create_stream(stream, **arguments))

    def send(self, stream: str, numbers: range) -> None:
        async def send(client: Client) -> None:
            async with client.producer() as producer:
                await producer.prepare(stream)
                for number in numbers:
                    producer.send(stream, b"v%d" % number, keys=b"k%d" % (number % 7))

        self.with_client(send)

    def send_rows(self, stream: str, columns: dict[str, list[Any]], schema: pa.Schema) -> None:
        async def send(client: Client) -> None:
            async with client.producer() as producer:
                await producer.send_batch(stream, pa.record_batch(columns, schema=schema))

        self.with_client(send)

    def read(self, stream: str, **options: str) -> DataFrame:
        reader = self.spark.read.format("kera").option("kera.bootstrap.servers", self.bootstrap)
        return reader.options(**options).load(stream)

    def stream(self, stream: str, **options: str) -> DataFrame:
        reader = self.spark.readStream.format("kera").option("kera.bootstrap.servers", self.bootstrap)
        return reader.options(**{**EARLIEST, **options}).load(stream)

    def values(self, stream: str) -> list[int]:
        """The values of a stream as numbers, sorted."""
        return sorted(int(row.value[1:]) for row in self.read(stream).select(F.col("value").cast("string")).collect())

    # -- features --------------------------------------------------------------------------------------------------

    def batch(self) -> bool:
        self.create("batch", streamlets=2)
        self.send("batch", range(300))
        frame = self.read("batch")
        assert frame.columns == ["key", "keys", "value", "stream", "streamlet", "entry", "offset", "timestamp"]
        assert self.values("batch") == list(range(300))
        assert frame.where("timestamp > current_timestamp() - interval 1 hour").count() == 300
        return True

    def typed_with_added_columns(self) -> bool:
        self.create("typed", schema=COLUMNS)
        self.send_rows("typed", {"user": ["a", "b"], "fare": [1, 2], "at": [1, 2]}, COLUMNS)
        self.with_client(lambda client: client.admin.alter_stream("typed", add_columns=ADDED))
        schema = pa.schema([*COLUMNS, *ADDED])
        rows: dict[str, list[Any]] = {"user": ["c"], "fare": [3], "at": [3], "tip": [0.5], "tags": [["x"]]}
        self.send_rows("typed", rows, schema)
        frame = self.read("typed")
        assert dict(frame.dtypes)["at"] == "timestamp_ntz", frame.dtypes
        found = sorted(tuple(row) for row in frame.select("user", "fare", "tip", "tags").collect())
        assert found == [("a", 1, None, None), ("b", 2, None, None), ("c", 3, 0.5, ["x"])], found
        return True

    def streaming_across_restarts(self) -> bool:
        self.create("clicks", streamlets=2)
        found: list[int] = []

        def take(frame: DataFrame, _: int) -> None:
            found.extend(int(row.value[1:]) for row in frame.select(F.col("value").cast("string")).collect())

        def begin() -> Any:
            writer = self.stream("clicks").writeStream.foreachBatch(take)
            return writer.option("checkpointLocation", str(self.folder / "clicks")).start()

        count = 0
        for _ in range(3):
            query = begin()
            for _ in range(2):
                self.send("clicks", range(count, count + 100))
                count += 100
                query.processAllAvailable()
            query.stop()
            self.send("clicks", range(count, count + 50))  # while it is not running
            count += 50
        query = begin()
        query.processAllAvailable()
        query.stop()
        assert sorted(found) == list(range(count)), (len(found), count)
        writer = self.stream("clicks").writeStream.foreachBatch(take).trigger(availableNow=True)
        writer.option("checkpointLocation", str(self.folder / "clicks")).start().awaitTermination()
        assert len(found) == count
        return True

    def from_stream_to_stream_exactly_once(self) -> bool:
        self.create("source", streamlets=2)
        self.create("copy")
        checkpoint = self.folder / "copy"

        def run() -> None:
            frame = self.stream("source").select("key", "value")
            writer = frame.writeStream.format("kera").option("kera.bootstrap.servers", self.bootstrap)
            writer = writer.option("stream", "copy").option("checkpointLocation", str(checkpoint))
            writer.trigger(availableNow=True).start().awaitTermination()

        self.send("source", range(200))
        run()
        self.send("source", range(200, 400))
        run()
        commits = sorted((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        for path in (checkpoint / "commits").glob(f"*{commits[-1].name}*"):
            path.unlink()  # as after a kill just before the commit
        run()
        assert self.values("copy") == list(range(400))
        return True

    def batch_exactly_once(self) -> bool:
        self.create("written")
        for _ in range(2):
            frame = self.spark.range(100).selectExpr("concat('v', id) as value", "cast(id as string) as key")
            writer = frame.write.format("kera").option("kera.bootstrap.servers", self.bootstrap).mode("append")
            writer.option("txnAppId", "nightly").option("txnVersion", "1").save("written")
        assert self.values("written") == list(range(100))
        return True

    def lost_records(self) -> bool:
        """A query reports lost records, even those lost while it was not running."""
        self.create("lossy")
        checkpoint = str(self.folder / "lossy")

        def run(**options: str) -> None:
            writer = self.stream("lossy", **options).writeStream.format("noop").option("checkpointLocation", checkpoint)
            writer.trigger(availableNow=True).start().awaitTermination()

        self.send("lossy", range(10))
        run()
        self.send("lossy", range(10, 20))
        self.with_client(lambda client: client.admin.truncate_stream("lossy", "latest"))
        self.send("lossy", range(20, 30))
        told = ""
        try:
            run()
        except Exception as error:  # noqa: BLE001 - it is looked at
            told = str(error)
        assert "10 records of stream 'lossy'" in told, told
        run(failOnDataLoss="false")
        return True

    def limits(self) -> str:
        """``obeyed``, or what is said instead."""
        self.create("limited")
        for number in range(5):
            self.send("limited", range(number * 10, number * 10 + 10))
        sizes: list[int] = []
        frame = self.stream("limited", maxOffsetsPerTrigger="10")
        writer = frame.writeStream.foreachBatch(lambda batch, _: sizes.append(batch.count()))
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
        except Exception as error:  # noqa: BLE001 - it is looked at
            return next(line for line in str(error).splitlines() if "this is Spark" in line)
        assert sum(sizes) == 50, sizes
        return "obeyed" if max(sizes) == 10 else f"sizes {sizes}"

    def epochs(self) -> str:
        """``obeyed``, or what is said instead."""
        self.create("timed", epoch_ms=1000, punctuation="producers")

        async def send(client: Client) -> None:
            async with client.producer() as producer:
                await producer.prepare("timed")
                for second in (10, 10, 11, 12, 13):
                    producer.send("timed", b"v", timestamp_us=second * 1_000_000)
                    await producer.flush()

        self.with_client(send)
        found: list[list[int]] = []
        frame = self.stream("timed", epoch="1s", epochsPerTrigger="1", includeEpoch="true")
        writer = frame.writeStream.foreachBatch(lambda batch, _: found.append([row.epoch for row in batch.collect()]))
        try:
            writer.trigger(availableNow=True).start().awaitTermination()
        except Exception as error:  # noqa: BLE001 - it is looked at
            return next(line for line in str(error).splitlines() if "this is Spark" in line)
        return "obeyed" if found == [[], [10, 10], [11], [12]] else f"micro-batches {found}"

    def columnar(self) -> str:
        """The error for a request of the columnar engine."""
        from kera.spark_connector import configure
        from kera.spark_connector.engine import EngineMissing

        try:
            configure(SparkSession.builder)
        except EngineMissing as error:
            return error.message
        return ""


def main() -> None:
    """Check all features, and print the results."""
    bootstrap, folder = sys.argv[1], Path(sys.argv[2])
    shutil.rmtree(folder, ignore_errors=True)
    job = Job(bootstrap, folder)
    told: dict[str, Any] = {"spark": pyspark.__version__, "python": sys.version.split()[0]}
    for look in (
        job.batch,
        job.typed_with_added_columns,
        job.streaming_across_restarts,
        job.from_stream_to_stream_exactly_once,
        job.batch_exactly_once,
        job.lost_records,
        job.limits,
        job.epochs,
        job.columnar,
    ):
        try:
            told[look.__name__] = look()
        except Exception as error:  # noqa: BLE001 - the other features are checked all the same
            told[look.__name__] = f"{type(error).__name__}: {error}"[:2000]
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
