"""Streams that get more columns, and subscriptions to streams with different columns."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from kera.client import Client
from tests.spark.support import Kera, columnar_first, wait_until

pytestmark = columnar_first

COLUMNS = pa.schema([("user", pa.string()), pa.field("fare", pa.int32(), nullable=False)])
ADDED = pa.schema([("tip", pa.float64()), ("tags", pa.list_(pa.string()))])
EARLIEST = {"startingOffsets": "earliest"}
Rows = list[tuple[Any, ...]]


def send(kera: Kera, stream: str, numbers: range, *, added: bool = False) -> None:
    """Send a chunk of rows, with or without the added columns."""

    async def work(client: Client) -> None:
        rows: dict[str, Any] = {
            "user": [f"u{number}" for number in numbers],
            "fare": pa.array(numbers, pa.int32()),
        }
        if added:
            rows["tip"] = [number / 2 for number in numbers]
            rows["tags"] = [["a", f"b{number}"] for number in numbers]
        async with client.producer() as producer:
            await producer.send_batch(stream, pa.record_batch(rows))

    kera.run(work)


def add_columns(kera: Kera, stream: str) -> None:
    kera.run(lambda client: client.admin.alter_stream(stream, add_columns=ADDED))


def row(number: int, *, added: bool = False) -> tuple[Any, ...]:
    return (f"u{number}", number, *((number / 2, ["a", f"b{number}"]) if added else (None, None)))


def start(frame: DataFrame, checkpoint: Path, found: dict[int, Rows], *, available_now: bool = False) -> StreamingQuery:
    """Start a query that puts the rows of each micro-batch into `found`, by its number."""

    def take(batch: DataFrame, number: int) -> None:
        found[number] = [tuple(row) for row in batch.collect()]

    writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(availableNow=True) if available_now else writer).start()


def all_of(found: dict[int, Rows]) -> Rows:
    return [row for _, rows in sorted(found.items()) for row in rows]


def wait_for(query: StreamingQuery, found: dict[int, Rows], count: int) -> None:
    wait_until(lambda: query.exception() or len(all_of(found)) >= count, f"{count} rows")
    assert query.exception() is None
    query.processAllAvailable()  # until the micro-batch is committed


# -- added columns ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_memory", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_rows_older_than_a_column_have_null_in_it(kera: Kera, stream: str, shared_memory: str) -> None:
    kera.create(stream, schema=COLUMNS)
    send(kera, stream, range(3))
    add_columns(kera, stream)
    send(kera, stream, range(3, 6), added=True)
    send(kera, stream, range(6, 8))

    frame = kera.read(stream, sharedMemory=shared_memory)
    assert frame.columns == ["user", "fare", "tip", "tags"]
    expected = [row(number, added=3 <= number < 6) for number in range(8)]
    assert sorted(map(tuple, frame.collect()), key=lambda found: found[1]) == expected
    assert [found.tip for found in frame.select("tip").where("tip is not null").collect()] == [1.5, 2.0, 2.5]
    assert frame.count() == 8


def test_a_query_gets_new_columns_only_after_a_restart(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, schema=COLUMNS)
    send(kera, stream, range(3))
    found: dict[int, Rows] = {}
    query = start(kera.stream(stream, **EARLIEST), tmp_path, found)
    try:
        wait_for(query, found, 3)
        add_columns(kera, stream)
        send(kera, stream, range(3, 6), added=True)
        wait_for(query, found, 6)
    finally:
        query.stop()
    assert all_of(found) == [row(number)[:2] for number in range(6)]

    send(kera, stream, range(6, 8))
    send(kera, stream, range(8, 10), added=True)
    again: dict[int, Rows] = {}
    start(kera.stream(stream), tmp_path, again, available_now=True).awaitTermination()
    assert all_of(again) == [row(6), row(7), row(8, added=True), row(9, added=True)]


@pytest.mark.slow
def test_streams_with_and_without_an_added_column_are_read_together(kera: Kera, stream: str, tmp_path: Path) -> None:
    names = [f"{stream}-{letter}" for letter in "ab"]
    for name in names:
        kera.create(name, schema=COLUMNS)
    send(kera, names[0], range(2))
    found: dict[int, Rows] = {}
    query = start(kera.stream(None, subscribePattern=f"{stream}-.*", **EARLIEST), tmp_path, found)
    try:
        wait_for(query, found, 2)
        add_columns(kera, names[1])
        send(kera, names[1], range(2, 4), added=True)
        wait_for(query, found, 4)
    finally:
        query.stop()
    assert all_of(found) == [row(number)[:2] for number in range(4)]

    frame = kera.read(None, subscribePattern=f"{stream}-.*")
    assert sorted(map(tuple, frame.collect()), key=lambda found: found[1]) == [
        row(number, added=number >= 2) for number in range(4)
    ]


# -- streams with other columns --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stream_with_other_columns_ends_a_query_or_is_skipped(kera: Kera, stream: str, tmp_path: Path) -> None:
    pattern = {"subscribePattern": f"{stream}.*", **EARLIEST}
    kera.create(stream, schema=COLUMNS)
    send(kera, stream, range(3))
    by_strict: dict[int, Rows] = {}
    by_lenient: dict[int, Rows] = {}
    strict = start(kera.stream(None, **pattern), tmp_path / "strict", by_strict)
    lenient = start(kera.stream(None, onSchemaMismatch="skip", **pattern), tmp_path / "lenient", by_lenient)
    try:
        wait_for(strict, by_strict, 3)
        wait_for(lenient, by_lenient, 3)
        kera.create(f"{stream}-0")
        kera.send(f"{stream}-0", range(5))
        wait_until(strict.exception, "the error")
        assert f"{stream}-0" in str(strict.exception())
        assert "onSchemaMismatch" in str(strict.exception())
        send(kera, stream, range(3, 6))
        wait_for(lenient, by_lenient, 6)
    finally:
        strict.stop()
        lenient.stop()
    assert all_of(by_lenient) == [row(number)[:2] for number in range(6)]

    send(kera, stream, range(6, 7))
    start(kera.stream(None, onSchemaMismatch="skip", **pattern), tmp_path / "lenient", by_lenient, available_now=True)
    wait_until(lambda: len(all_of(by_lenient)) == 7, "the rest")
    assert kera.read(None, subscribePattern=f"{stream}.*", onSchemaMismatch="skip").count() == 7
    with pytest.raises(Exception, match="do not have the same columns"):
        kera.read(None, subscribePattern=f"{stream}.*")


@pytest.mark.slow
def test_with_bytes_typed_streams_are_read_beside_others(kera: Kera, stream: str, tmp_path: Path, engine: str) -> None:
    options = {"subscribePattern": f"{stream}.*", "onSchemaMismatch": "bytes", **EARLIEST, "includeHeaders": "true"}
    kera.create(stream)
    kera.send(stream, range(3), flush_every=3)
    if engine == "columnar":
        with pytest.raises(Exception, match="with onSchemaMismatch=bytes Python reads"):
            kera.stream(None, **options)
        options["engine"] = "auto"
    found: dict[int, Rows] = {}
    frame = kera.stream(None, **options).select("stream", "key", "value", "offset", "headers")
    query = start(frame, tmp_path, found)
    try:
        wait_for(query, found, 3)
        kera.create(f"{stream}-typed", schema=COLUMNS)
        send(kera, f"{stream}-typed", range(4))
        add_columns(kera, f"{stream}-typed")
        send(kera, f"{stream}-typed", range(4, 6), added=True)
        send(kera, f"{stream}-typed", range(6, 7), added=True)
        wait_for(query, found, 6)
    finally:
        query.stop()
    rows = all_of(found)
    assert [bytes(row[2]) for row in rows[:3]] == [b"v0", b"v1", b"v2"]
    assert [row[0::3] for row in rows[3:]] == [(f"{stream}-typed", offset) for offset in (0, 4, 6)]
    assert [[tuple(header) for header in row[4]] for row in rows[3:]] == [
        [("content-type", bytearray(b"application/vnd.apache.arrow.stream"))]
    ] * 3
    tables = [pa.ipc.open_stream(bytes(row[2])).read_all() for row in rows[3:]]
    assert [table["fare"].to_pylist() for table in tables] == [[0, 1, 2, 3], [4, 5], [6]]
    assert tables[1]["tip"].to_pylist() == [2.0, 2.5]
