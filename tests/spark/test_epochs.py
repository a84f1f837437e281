"""Micro-batches of epochs in real queries: each query has the same records under the same numbers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual name
from pyspark.sql.streaming.query import StreamingQuery

from kera.client import Client, Delivery
from tests.spark.support import Kera, columnar_first, wait_until

SECOND_US = 1_000_000
STREAMLETS = 4
Rows = dict[int, list[tuple[int, int, int]]]
"""By the number of a micro-batch: epoch, streamlet and time in seconds of each row."""


def send(kera: Kera, stream: str, times_s: dict[int, list[float]], *, flush_every: int = 1) -> None:
    """Send records with these times to these streamlets, in this order; `flush_every` records make a chunk."""

    async def send_all(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(stream)
            waiting: list[Awaitable[Delivery]] = []
            for streamlet, times in times_s.items():
                for number, time_s in enumerate(times, start=1):
                    time_us = int(time_s * SECOND_US)
                    waiting.append(producer.send(stream, b"%d" % time_us, timestamp_us=time_us, streamlet=streamlet))
                    if number % flush_every == 0:
                        await producer.flush()
            await producer.flush()
            await asyncio.gather(*waiting)

    kera.run(send_all)


def history(kera: Kera, stream: str, streamlets: int = STREAMLETS, epoch_ms: int = 1000) -> None:
    """Create a stream whose records close its epochs."""
    kera.create(stream, streamlets=streamlets, epoch_ms=epoch_ms, punctuation="producers")


def start(
    kera: Kera, stream: str, checkpoint: Path, found: Rows, *, available_now: bool = True, **options: str
) -> StreamingQuery:
    """Start a query that puts the rows of each micro-batch into `found`."""
    frame = kera.stream(stream, **{"startingOffsets": "earliest", "epoch": "1s", "includeEpoch": "true"} | options)

    def take(batch: DataFrame, number: int) -> None:
        rows = batch.select("epoch", "streamlet", F.unix_seconds("timestamp").alias("at")).collect()
        found[number] = sorted((row.epoch, row.streamlet, row.at) for row in rows)

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if available_now else writer).start()


def ended(query: StreamingQuery) -> StreamingQuery:
    assert query.awaitTermination(120)
    return query


def error_of(query: StreamingQuery) -> str:
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    return str(caught.value)


@columnar_first
def test_micro_batches_of_epochs_are_the_same_live_in_a_backfill_and_from_a_checkpoint(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    history(kera, stream)
    send(kera, stream, {0: [100], 1: [100.5], 2: [103], 3: [101]})  # so that each streamlet holds up epochs
    live: Rows = {}
    query = start(kera, stream, tmp_path / "live", live, available_now=False, epochsPerTrigger="2")
    try:
        send(kera, stream, {0: [101, 102.5, 104], 1: [101, 101.5, 104], 2: [100, 104], 3: [108]})
        wait_until(lambda: query.exception() or len(live) >= 3, "two micro-batches")
        send(kera, stream, {0: [107, 109.5], 1: [105, 106, 108], 2: [110]})
        wait_until(lambda: query.exception() or len(live) >= 5, "four micro-batches")
    finally:
        query.stop()
    assert query.exception() is None

    backfill: Rows = {}
    ended(start(kera, stream, tmp_path / "backfill", backfill, epochsPerTrigger="2"))
    assert backfill == live
    assert backfill == {
        0: [],
        1: [(100, 0, 100), (100, 1, 100), (101, 0, 101), (101, 1, 101), (101, 1, 101), (101, 3, 101)],
        2: [(102, 0, 102), (103, 2, 100), (103, 2, 103)],
        3: [(104, 0, 104), (104, 1, 104), (104, 2, 104), (105, 1, 105)],
        4: [(106, 1, 106), (107, 0, 107)],
    }

    again: Rows = {}
    checkpoint = tmp_path / "backfill"
    for name in ("4", ".4.crc"):
        (checkpoint / "commits" / name).unlink()  # micro-batch 4 is planned but not committed
    ended(start(kera, stream, checkpoint, again, epochsPerTrigger="2"))
    assert again == {4: backfill[4]}

    send(kera, stream, {number: [112] for number in range(STREAMLETS)})
    ended(start(kera, stream, checkpoint, again, epochsPerTrigger="2"))
    assert again == {4: backfill[4], 5: [(108, 1, 108), (108, 3, 108), (109, 0, 109)], 6: [(110, 2, 110)]}


@columnar_first
def test_micro_batches_end_with_epochs_in_all_entries_and_available_now_with_the_last_closed_one(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    history(kera, stream, 2, epoch_ms=500)
    send(kera, stream, {0: [10, 11, 12, 20, 31.5], 1: [10, 11, 30]}, flush_every=1)
    found: Rows = {}

    query = ended(start(kera, stream, tmp_path / "checkpoint", found, maxEpochsPerTrigger="2"))

    assert [{at for _, _, at in rows} for rows in found.values()] == [{10, 11}, {12}, {20}]
    end = json.loads(query.lastProgress["sources"][0]["endOffset"]) if query.lastProgress else {}
    assert end["epoch"] == {"ms": 1000, "first": 20, "next": 22}


@columnar_first
def test_records_that_spark_writes_in_time_order_are_in_the_epochs_of_their_times(kera: Kera, stream: str) -> None:
    history(kera, stream, 1)
    rows = kera.spark.range(1000, numPartitions=1).select(
        F.col("id").cast("string").alias("value"), F.timestamp_micros(F.col("id") * 10_000).alias("timestamp")
    )
    writer = rows.write.format("kera").option("kera.bootstrap.servers", kera.bootstrap).mode("append")
    writer.option("engine", kera.engine).save(stream)

    async def read(client: Client) -> dict[int, list[int]]:
        async with client.epochs(stream, start="earliest", end=9) as reader:
            return {epoch.number: [int(row["value"]) for row in epoch.rows().to_pylist()] async for epoch in reader}

    assert kera.run(read) == {number: list(range(100 * number, 100 * number + 100)) for number in range(9)}


@columnar_first
@pytest.mark.slow
def test_a_silent_entry_with_punctuation_by_the_clock_holds_up_no_epoch(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream, streamlets=2, epoch_ms=100, epoch_grace_ms=50)
    found: Rows = {}
    query = start(kera, stream, tmp_path / "checkpoint", found, available_now=False, epoch="100ms")
    try:
        send_now(kera, stream)
        wait_until(lambda: query.exception() or any(found.values()), "what was sent just now")
    finally:
        query.stop()
    assert query.exception() is None


def send_now(kera: Kera, stream: str) -> None:
    async def send_one(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(stream)
            await producer.send(stream, b"now", streamlet=0)

    kera.run(send_one)


@columnar_first
@pytest.mark.slow
def test_a_query_with_a_watermark_has_the_same_micro_batches_live_and_in_a_backfill(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    """Without micro-batches without data, because Spark makes these depending on its load."""
    history(kera, stream, 2)
    kera.spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        send(kera, stream, {0: [100, 101.5], 1: [100.5]})
        live: dict[int, list[tuple[int, int]]] = {}
        query = start_counting(kera, stream, tmp_path / "live", live, available_now=False)
        try:
            for due in range(2, 7):
                send(kera, stream, {0: [100 + due], 1: [100.5 + due]})
                wait_until(functools.partial(has_done, query, live, due + 1), "the epochs that were closed")
        finally:
            query.stop()
        assert query.exception() is None
        backfill: dict[int, list[tuple[int, int]]] = {}
        ended(start_counting(kera, stream, tmp_path / "backfill", backfill, available_now=True))
    finally:
        kera.spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")

    assert backfill == live
    assert backfill[1] == backfill[2] == [], "windows are closed with the next micro-batch, or the one after that"
    assert backfill[3] == [(100, 2)]


def has_done(query: StreamingQuery, found: dict[int, list[tuple[int, int]]], count: int) -> bool:
    return query.exception() is not None or len(found) >= count


def start_counting(
    kera: Kera, stream: str, checkpoint: Path, found: dict[int, list[tuple[int, int]]], *, available_now: bool
) -> StreamingQuery:
    """Start a query that counts the records of each second, and emits a count when its second is over."""
    counts = (
        kera.stream(stream, startingOffsets="earliest", epoch="1s", epochsPerTrigger="1")
        .withWatermark("timestamp", "0 seconds")
        .groupBy(F.window("timestamp", "1 second"))
        .count()
        .select(F.unix_seconds("window.start").alias("start"), "count")
    )

    def take(batch: DataFrame, number: int) -> None:
        found[number] = sorted((row.start, row["count"]) for row in batch.collect())

    writer = counts.writeStream.outputMode("append").foreachBatch(take)
    writer = writer.option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if available_now else writer).start()


@columnar_first
@pytest.mark.slow
def test_a_query_started_before_any_record_has_the_micro_batches_of_a_later_one(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    history(kera, stream, 1)
    live: Rows = {}
    query = start(kera, stream, tmp_path / "live", live, available_now=False, epochsPerTrigger="1")
    try:
        wait_until(lambda: query.exception() or live, "the micro-batch that Spark makes of nothing")
        send(kera, stream, {0: [10, 11, 12]})
        wait_until(lambda: query.exception() or len(live) >= 3, "the epochs that were closed")
    finally:
        query.stop()
    assert query.exception() is None

    backfill: Rows = {}
    ended(start(kera, stream, tmp_path / "backfill", backfill, epochsPerTrigger="1"))
    assert backfill == live == {0: [], 1: [(10, 0, 10)], 2: [(11, 0, 11)]}


@pytest.mark.slow
def test_micro_batches_of_several_streams_end_at_the_same_time(kera: Kera, stream: str, tmp_path: Path) -> None:
    names = [f"{stream}-{name}" for name in ("one", "other")]
    for name, epoch_ms in zip(names, (250, 500), strict=True):
        history(kera, name, 1, epoch_ms=epoch_ms)
    send(kera, names[0], {0: [10, 11, 12, 13, 14]})
    send(kera, names[1], {0: [12, 13.5]})
    frame = kera.stream(None, subscribe=",".join(names), startingOffsets="earliest", epoch="1s", epochsPerTrigger="1")
    found: dict[int, list[tuple[str, int]]] = {}

    def take(batch: DataFrame, number: int) -> None:
        rows = batch.select("stream", F.unix_seconds("timestamp").alias("at")).collect()
        found[number] = sorted((row.stream.removeprefix(f"{stream}-"), row.at) for row in rows)

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    ended(writer.trigger(availableNow=True).start())

    assert found == {0: [], 1: [("one", 10)], 2: [("one", 11)], 3: [("one", 12), ("other", 12)]}


@columnar_first
def test_rows_of_a_typed_stream_have_their_epochs(kera: Kera, stream: str, tmp_path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("n", pa.int32())])
    kera.create(stream, schema=schema, timestamp_column="at", epoch_ms=1000, punctuation="producers")

    async def send_batches(client: Client) -> None:
        async with client.producer() as producer:
            for first in (10, 11, 12, 13):
                times = pa.array([first * SECOND_US] * 3, pa.timestamp("us", "UTC"))
                batch = pa.RecordBatch.from_arrays([times, pa.array([first] * 3, pa.int32())], schema=schema)
                await producer.send_batch(stream, batch)
                await producer.flush()

    kera.run(send_batches)
    options = {"startingOffsets": "earliest", "epoch": "2s", "includeEpoch": "true"}
    frame = kera.stream(stream, **options)
    assert frame.columns == ["at", "n", "epoch"]
    found: dict[int, list[Any]] = {}

    def take(batch: DataFrame, number: int) -> None:
        found[number] = sorted((row.epoch, row.n) for row in batch.groupBy("epoch", "n").count().collect())

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
    ended(writer.trigger(availableNow=True).start())

    assert found == {0: [(5, 10), (5, 11)]}


@pytest.mark.slow
def test_progress_names_the_entry_that_holds_up_the_next_epoch(kera: Kera, stream: str, tmp_path: Path) -> None:
    history(kera, stream, 2)
    send(kera, stream, {0: [10, 11, 12, 20], 1: [10, 11, 14.5]})
    found: Rows = {}

    query = ended(start(kera, stream, tmp_path / "checkpoint", found))

    (source,) = (query.lastProgress or {"sources": []})["sources"]
    assert source["metrics"]["closedEpochsWaiting"] == "0"
    assert source["metrics"]["nextEpochHeldUpBy"] == f"{stream}/1/0"
    assert source["metrics"]["nextEpochSettledUntil"] == "1970-01-01T00:00:14.500000+00:00"
    assert json.loads(source["latestOffset"])["epoch"] == {"ms": 1000, "next": 14}


@columnar_first
@pytest.mark.parametrize(
    ("epoch_ms", "options", "message"),
    [
        (0, {}, "has no epochs; kera stream alter"),
        pytest.param(700, {}, "1000 ms are not a multiple of the 700 ms of stream", marks=pytest.mark.slow),
        pytest.param(
            1000,
            {"startingOffsetsByTimestamp": '{"STREAM": {"0": 1}}'},
            "a query begins at the same time in all entries",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_streams_and_starts_that_do_not_fit_the_epochs_are_refused(
    kera: Kera, stream: str, tmp_path: Path, epoch_ms: int, options: dict[str, str], message: str
) -> None:
    history(kera, stream, 1, epoch_ms=epoch_ms)
    options = {name: value.replace("STREAM", stream) for name, value in options.items()}

    assert message in error_of(start(kera, stream, tmp_path / "checkpoint", {}, available_now=True, **options))


@columnar_first
@pytest.mark.slow
def test_a_checkpoint_is_refused_with_other_epochs_or_without(kera: Kera, stream: str, tmp_path: Path) -> None:
    history(kera, stream, 1)
    send(kera, stream, {0: [10, 11, 12]})
    ended(start(kera, stream, tmp_path / "checkpoint", {}))
    kera.run(lambda client: client.admin.alter_stream(stream, epoch_ms=700))
    ended(start(kera, stream, tmp_path / "checkpoint", {}))  # the query keeps its epochs

    message = error_of(start(kera, stream, tmp_path / "checkpoint", {}, epoch="7s"))
    assert "with epochs of 1000 ms, not 7000" in message
    without = kera.stream(stream, startingOffsets="earliest").writeStream.foreachBatch(lambda *_: None)
    without = without.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    message = error_of(without.start())
    assert "Set epoch to '1000ms', or start the query with a new checkpointLocation" in message
    ended(start(kera, stream, tmp_path / "checkpoint", {}))  # the checkpoint is still usable


# -- late records -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_record_is_dropped_as_late_with_micro_batches_of_epochs(kera: Kera, stream: str, tmp_path: Path) -> None:
    """One of four streamlets is an hour behind, and the watermark does not wait."""
    history(kera, stream, epoch_ms=60_000)
    hour, rows = 3600, 120
    first = {streamlet: 0 if streamlet == 3 else hour for streamlet in range(STREAMLETS)}
    times = {
        streamlet: [*(begin + number * hour / rows for number in range(rows)), 3 * hour]
        for streamlet, begin in first.items()
    }
    send(kera, stream, times, flush_every=10)
    oracle: dict[int, int] = {}
    for time_s in (each for row in times.values() for each in row[:-1]):
        oracle[int(time_s) // 600 * 600] = oracle.get(int(time_s) // 600 * 600, 0) + 1

    as_it_comes, dropped = windows(kera, stream, tmp_path / "as-it-comes", maxOffsetsPerTrigger="80")
    assert dropped > 0
    assert sum(as_it_comes.values()) < sum(oracle.values())
    with_epochs, dropped = windows(kera, stream, tmp_path / "with-epochs", epoch="10m", maxEpochsPerTrigger="1")
    assert dropped == 0
    assert with_epochs == oracle


def windows(kera: Kera, stream: str, checkpoint: Path, **options: str) -> tuple[dict[int, int], int]:
    """The number of records per ten minutes, and the number of records dropped as late."""
    counts = (
        kera.stream(stream, startingOffsets="earliest", **options)
        .withWatermark("timestamp", "0 seconds")
        .groupBy(F.window("timestamp", "10 minutes"))
        .count()
        .select(F.unix_seconds("window.start").alias("start"), "count")
    )
    found: dict[int, int] = {}

    def take(batch: DataFrame, _: int) -> None:
        found.update({row.start: row["count"] for row in batch.collect()})

    writer = counts.writeStream.outputMode("update").foreachBatch(take).option("checkpointLocation", str(checkpoint))
    query = ended(writer.trigger(availableNow=True).start())
    found.pop(3 * 3600, None)  # the records that close the last epoch
    progress = [each["stateOperators"][0]["numRowsDroppedByWatermark"] for each in query.recentProgress]
    return found, sum(progress)
