"""Helpers of the tests with Spark: producing, and reading through the connector."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kera.client import Client, Delivery, Record
from kera.spark_connector import register

T = TypeVar("T")

QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options for a JVM with a short life, in which better compilation does not pay."""

both_engines = pytest.mark.parametrize("engine", ["python", "columnar"], indirect=True)
"""Runs a test with the fixture `kera` or `engine` once per engine, because the outcomes must be equal."""
columnar_first = pytest.mark.parametrize(
    "engine", [pytest.param("python", marks=pytest.mark.slow), "columnar"], indirect=True
)
"""Like `both_engines`, but quick tests use only one engine, because Spark starts a Python process for each plan."""


def with_kera(spark: SparkSession) -> SparkSession:
    """`spark` with the connector; Spark does not find it when the path of Python has a space."""
    if " " in sys.executable:
        register(spark)
    return spark


class Sent(NamedTuple):
    """A record as it was sent, with its position."""

    streamlet: int
    entry: int
    offset: int
    key: bytes
    value: bytes


class Kera:
    """A cluster as a user of Spark sees it."""

    def __init__(self, spark: SparkSession, bootstrap: str, engine: str = "auto") -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.engine = engine

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """The result of `work` with a client of the cluster."""

        async def connected() -> T:
            async with await Client.connect(self.bootstrap) as client:
                return await work(client)

        return asyncio.run(connected())

    def create(self, stream: str, **arguments: Any) -> int:
        """Create a stream; return its id."""

        async def create(client: Client) -> int:
            return (await client.admin.create_stream(stream, **arguments)).stream_id

        return self.run(create)

    def delete(self, stream: str) -> None:
        """Delete a stream."""
        self.run(lambda client: client.admin.delete_stream(stream))

    def streams(self) -> list[str]:
        """Names of all streams."""

        async def names(client: Client) -> list[str]:
            return [each.name for each in await client.admin.list_streams()]

        return self.run(names)

    def send(self, stream: str, numbers: Iterable[int], *, flush_every: int = 0, **settings: Any) -> list[Sent]:
        """Send one record per number (key ``k<n mod 7>``, value ``v<n>``); `flush_every` records make a chunk."""

        async def send(client: Client) -> list[Sent]:
            async with client.producer(**settings) as producer:
                await producer.prepare(stream)
                waiting: list[tuple[bytes, bytes, Awaitable[Delivery]]] = []
                for count, number in enumerate(numbers, start=1):
                    key, value = b"k%d" % (number % 7), b"v%d" % number
                    waiting.append((key, value, producer.send(stream, value, keys=key, timestamp_us=number)))
                    if flush_every and count % flush_every == 0:
                        await producer.flush()
                await producer.flush()
                found = [(key, value, await delivery) for key, value, delivery in waiting]
            return [Sent(d.entry.streamlet_id, d.entry.entry, d.record, key, value) for key, value, d in found]

        return self.run(send)

    def read(self, stream: str | None = None, **options: str) -> DataFrame:
        """The stream, or the subscription of `options`, as a batch."""
        return self.reader().options(**options).load(stream)

    def stream(self, stream: str | None = None, **options: str) -> DataFrame:
        """The same as a stream."""
        reader = self.spark.readStream.format("kera").option("kera.bootstrap.servers", self.bootstrap)
        return reader.option("engine", self.engine).options(**options).load(stream)

    def reader(self) -> DataFrameReader:
        """A reader for batches from the cluster, with the engine."""
        reader = self.spark.read.format("kera").option("kera.bootstrap.servers", self.bootstrap)
        return reader.option("engine", self.engine)

    def lag(self, group: str) -> int:
        """The lag of a query with this name in records, as ``kera group describe`` shows it."""

        async def measure(client: Client) -> int:
            entries = (await client.admin.describe_consumer_group(group)).entries
            assert entries, f"{group} has read nothing"
            return sum(entry.lag.records for entry in entries if entry.lag is not None)

        return self.run(measure)

    def groups(self) -> list[str]:
        """Names of all consumer groups."""

        async def names(client: Client) -> list[str]:
            return [each.consumer_group for each in await client.admin.consumer_groups()]

        return self.run(names)

    def read_new(self, stream: str | None, checkpoint: Path, **options: str) -> tuple[list[Sent], StreamingQuery]:
        """The records that are new for a query with this checkpoint, and the query, which has ended."""
        found: dict[int, list[Sent]] = {}
        query = start(self.stream(stream, **options), checkpoint, found, available_now=True)
        query.awaitTermination()
        return [record for batch in found.values() for record in batch], query


def written(kera: Kera, stream: str) -> list[Record]:
    """All records of a stream, in the order of each entry."""

    async def read(client: Client) -> list[Record]:
        async with client.consumer(stream, start="earliest", end="latest") as consumer:
            return [record async for record in consumer]

    return sorted(kera.run(read), key=lambda record: (record.streamlet, record.entry, record.offset))


def numbers(kera: Kera, stream: str) -> Counter[int]:
    """The values of a stream as numbers."""
    return Counter(int(record.value or b"") for record in written(kera, stream))


def start(
    frame: DataFrame, checkpoint: Path, found: dict[int, list[Sent]], *, available_now: bool = False
) -> StreamingQuery:
    """Start a query that puts the records of each micro-batch into `found`, by its number."""

    def take(batch: DataFrame, number: int) -> None:
        found[number] = sent(batch)

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if available_now else writer).start()


def sent(frame: DataFrame) -> list[Sent]:
    """The records of `frame`."""
    return [
        Sent(row.streamlet, row.entry, row.offset, bytes(row.key), bytes(row.value))
        for row in frame.select(*Sent._fields).collect()
    ]


RECORDS_PER_MIB = 128


def send_mib(kera: Kera, stream: str, count: int, *, streamlets: int) -> int:
    """Send `count` MiB, evenly over the streamlets; return the number of records."""

    async def send(client: Client) -> int:
        async with client.producer() as producer:
            await producer.prepare(stream)
            for number in range(count * RECORDS_PER_MIB):
                value = bytes((1 << 20) // RECORDS_PER_MIB)
                producer.send(stream, value, keys=b"k", timestamp_us=number, streamlet=number % streamlets)
                await producer.drain()
        return count * RECORDS_PER_MIB

    return kera.run(send)


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = 60.0) -> T:
    """Wait for the first true value of `condition`, and return it."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.02)
