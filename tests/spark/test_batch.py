"""``spark.read.format("kera")`` reads each produced record once, with its types."""

import asyncio
import datetime as dt
import decimal
import json
import logging
import re
import time
from collections.abc import Iterator
from typing import cast

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import functions as F  # noqa: N812  # the usual name

from kera.client import Client
from kera.core.base.process import node_id
from kera.spark_connector import KeraDataSource
from kera.spark_connector.columns import RECORD_COLUMNS
from tests.integration.unreadable import write_a_chunk_that_nobody_can_read
from tests.spark.support import Kera, Sent, both_engines, columnar_first, send_mib, sent


@both_engines
@pytest.mark.parametrize("entries", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_batch_read_equals_what_was_produced(kera: Kera, stream: str, entries: int) -> None:
    kera.create(stream, streamlets=3, entries=entries)
    produced = kera.send(stream, range(500)) + kera.send(stream, range(500, 1000), flush_every=50)

    assert sorted(sent(kera.read(stream))) == sorted(produced)


@columnar_first
def test_a_record_has_the_documented_columns(kera: Kera, stream: str) -> None:
    kera.create(stream)

    async def send(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(stream)
            producer.send(stream, b"x", keys=[b"a", b"b"], timestamp_us=1_000_000, headers={"h": b"1"})
            producer.send(stream, None, timestamp_us=2_000_000)

    kera.run(send)
    assert kera.read(stream).columns[-1] == "timestamp"
    frame = kera.read(stream, includeHeaders="true")

    assert frame.dtypes == [
        ("key", "binary"),
        ("keys", "array<binary>"),
        ("value", "binary"),
        ("stream", "string"),
        ("streamlet", "int"),
        ("entry", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    first, second = frame.orderBy("offset").collect()
    assert (first.key, first["keys"], first.value) == (b"a", [b"a", b"b"], b"x")
    assert [tuple(header) for header in first.headers] == [("h", b"1")]
    assert (first.stream, first.streamlet, first.entry, first.offset) == (stream, 0, 0, 0)
    assert first.timestamp == dt.datetime.fromtimestamp(1)  # noqa: DTZ006  # Spark gives local time without a zone
    assert (second.key, second.value, second.offset) == (None, None, 1)


TYPES = pa.table(
    {
        "time": pa.array([0, 1_700_000_000_000_001], pa.timestamp("us", tz="UTC")),
        "seconds": pa.array([0, 1_700_000_000], pa.timestamp("s", tz="UTC")),
        "wall": pa.array([5, None], pa.timestamp("ms")),
        "flag": pa.array([True, None]),
        "tiny": pa.array([-1, None], pa.int8()),
        "unsigned": pa.array([2**32 - 1, 0], pa.uint32()),
        "huge": pa.array([2**64 - 1, None], pa.uint64()),
        "real": pa.array([0.5, None], pa.float32()),
        "amount": pa.array([decimal.Decimal("12.34"), None], pa.decimal128(10, 2)),
        "day": pa.array([dt.date(2013, 1, 1), None]),
        "name": pa.array(["ä", None]),
        "long_name": pa.array(["b", None], pa.large_string()),
        "category": pa.array(["x", "x"]).dictionary_encode(),
        "blob": pa.array([b"\x00", None]),
        "list": pa.array([[1, None], None], pa.list_(pa.int64())),
        "struct": pa.array([{"a": 1, "b": ["x"]}, None], pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))])),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
    }
)


@columnar_first
def test_a_typed_stream_has_its_own_columns_and_values(kera: Kera, stream: str) -> None:
    table = TYPES.drop_columns(["category"])  # chunks cannot hold dictionaries
    kera.create(stream, schema=table.schema, timestamp_column="time")

    async def send(client: Client) -> None:
        async with client.producer() as producer:
            await producer.send_batch(stream, table)

    kera.run(send)
    frame = kera.read(stream)
    read = frame.orderBy("time").toArrow()

    assert dict(frame.dtypes) == {
        "time": "timestamp",
        "seconds": "timestamp",
        "wall": "timestamp_ntz",
        "flag": "boolean",
        "tiny": "tinyint",
        "unsigned": "bigint",
        "huge": "decimal(20,0)",
        "real": "float",
        "amount": "decimal(10,2)",
        "day": "date",
        "name": "string",
        "long_name": "string",
        "blob": "binary",
        "list": "array<bigint>",
        "struct": "struct<a:int,b:array<string>>",
        "map": "map<string,int>",
    }
    for name in table.column_names:
        assert read[name].cast(table[name].type).to_pylist() == table[name].to_pylist(), name


@columnar_first
@pytest.mark.slow
def test_a_stream_of_many_segments_and_groups_is_read_completely(kera: Kera, stream: str) -> None:
    table = pa.table({"n": range(200_000), "text": ["x" * 20] * 200_000})
    kera.create(stream, streamlets=2, group_segments=2, schema=table.schema)

    async def send(client: Client) -> int:
        async with client.producer(chunk_bytes_max=64 << 10) as producer:
            for first in range(0, table.num_rows, 10_000):
                await producer.send_batch(stream, table[first : first + 10_000])
        bounds = await client.bounds(stream)
        return max(entries[0].end.group_id for entries in bounds.values())

    assert kera.run(send) > 1
    read = kera.read(stream)

    assert sorted(read.select("n").toArrow()["n"].to_pylist()) == list(range(200_000))


@columnar_first
@pytest.mark.slow
def test_an_empty_stream_gives_an_empty_data_frame(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)

    assert kera.read(stream).count() == 0


@columnar_first
@pytest.mark.slow
def test_starting_and_ending_offsets_bound_a_read(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)
    before = kera.send(stream, range(100))

    async def ends(client: Client) -> dict[int, tuple[int, int, int]]:
        return {streamlet: entries[0].end for streamlet, entries in (await client.bounds(stream)).items()}

    middle = kera.run(ends)
    after = kera.send(stream, range(100, 200))
    places = json.dumps({stream: {streamlet: [list(end)] for streamlet, end in middle.items()}})

    assert sorted(sent(kera.read(stream, endingOffsets=places))) == sorted(before)
    assert sorted(sent(kera.read(stream, startingOffsets=places))) == sorted(after)
    only_first = json.dumps({stream: {"0": "earliest", "1": "latest"}})
    assert {record.streamlet for record in sent(kera.read(stream, startingOffsets=only_first))} == {0}


@columnar_first
def test_only_the_columns_of_a_given_schema_are_read(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(3))
    reader = kera.reader()

    frame = reader.schema("offset bigint, value binary").load(stream)

    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [(0, b"v0"), (1, b"v1"), (2, b"v2")]
    assert reader.schema("headers array<struct<key:string,value:binary>>").load(stream).count() == 3


@columnar_first
def test_several_streams_are_read_as_one(kera: Kera, stream: str) -> None:
    produced = {}
    for name, streamlets in ((stream, 2), (f"{stream}-b", 1), (f"{stream}-c", 1)):
        kera.create(name, streamlets=streamlets)
        produced[name] = kera.send(name, range(50))
    one, two, three = produced
    everything = sorted(record for records in produced.values() for record in records)

    assert sorted(sent(kera.read(subscribe=f"{one}, {three}"))) == sorted(produced[one] + produced[three])
    assert sorted(sent(kera.read(subscribePattern=f"{stream}(-[bc])?"))) == everything
    assigned = kera.read(assign=json.dumps({one: [1], two: [0]}))
    assert sorted(sent(assigned)) == sorted([r for r in produced[one] if r.streamlet == 1] + produced[two])
    assert {row.stream for row in assigned.select("stream").distinct().collect()} == {one, two}


@columnar_first
@pytest.mark.slow
def test_records_are_found_by_time(kera: Kera, stream: str) -> None:
    kera.create(stream)
    produced = kera.send(stream, range(0, 1_000_000, 1000), flush_every=100)  # a record per ms, from 1970 on

    def read(**options: str) -> list[Sent]:
        return sent(kera.read(stream, **options))

    assert read(startingTimestamp="500") == produced[500:]
    assert read(endingTimestamp="500") == produced[:500]
    assert (
        read(startingTimestamp="1970-01-01T00:00:00.2", endingTimestamp="1970-01-01T01:00:00.4+01:00")
        == (produced[200:400])
    )
    by_streamlet = json.dumps({stream: {"0": 300}})
    assert read(startingOffsetsByTimestamp=by_streamlet, startingOffsets="earliest") == produced[300:]
    assert read(startingTimestamp="900", startingOffsetsByTimestamp=by_streamlet) == produced[900:]
    assert (
        read(startingOffsetsByTimestamp=by_streamlet, endingOffsetsByTimestamp=json.dumps({stream: {"0": 400}}))
        == (produced[300:400])
    )
    assert read(startingTimestamp="-1h", startingOffsetsByTimestampStrategy="latest") == []
    with pytest.raises(Exception, match="startingTimestamp"):
        read(startingTimestamp="-1h")


@columnar_first
def test_times_may_be_relative_to_now(kera: Kera, stream: str) -> None:
    kera.create(stream)
    now_us = time.time_ns() // 1000
    long_ago = kera.send(stream, range(now_us - 7_200_000_000, now_us - 7_200_000_000 + 10))
    recent = kera.send(stream, range(now_us, now_us + 10))

    assert sent(kera.read(stream, startingTimestamp="-1h")) == recent
    assert sent(kera.read(stream, endingTimestamp="-3600s")) == long_ago


@columnar_first
@pytest.mark.slow
def test_a_stream_is_cut_into_more_partitions_than_it_has_streamlets(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2, group_segments=2)
    produced = send_mib(kera, stream, 8, streamlets=2)

    for options, at_least in (({"minPartitions": "6"}, 6), ({"maxRecordsPerPartition": str(produced // 5)}, 5)):
        frame = kera.read(stream, **options)
        assert frame.rdd.getNumPartitions() >= at_least
        tasks = frame.groupBy(F.spark_partition_id().alias("task")).agg(F.count("*").alias("records")).collect()
        assert len(tasks) >= at_least
        assert sum(row.records for row in tasks) == produced
        assert frame.select("streamlet", "offset").distinct().count() == produced


@columnar_first
def test_an_unreadable_chunk_fails_only_queries_that_read_it(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=1, entries=1)

    def end() -> str:
        bounds = kera.run(lambda client: client.bounds(stream))
        return json.dumps({stream: {0: [list(bounds[0][0].end)]}})

    before, first = kera.send(stream, range(10)), end()
    asyncio.run(write_a_chunk_that_nobody_can_read(kera.bootstrap, stream))
    last, after = end(), kera.send(stream, range(10, 20))

    place = re.escape(str(tuple(json.loads(first)[stream]["0"][0])))
    told = rf"CorruptChunk: chunk at {place} of stream '{stream}', [^\n]*not an Arrow record batch[^\n]*endingOffsets"
    with pytest.raises(Exception, match=told):
        kera.read(stream).collect()
    assert sent(kera.read(stream, endingOffsets=first)) == before
    assert sent(kera.read(stream, startingOffsets=last)) == after


@columnar_first
def test_metadata_lists_the_partitions_of_a_read(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100))

    rows = kera.read(stream, metadata="partitions").orderBy("streamlet").collect()
    pulled = kera.read(stream, metadata="partitions", sharedMemory="never").collect()

    assert [(row.stream, row.streamlet, row.entry) for row in rows] == [(stream, 0, 0), (stream, 1, 0)]
    assert sum(row.records for row in rows) == len(produced)
    assert {row.broker for row in rows} <= {1, 2}
    assert {row.node for row in rows} == {node_id()}
    assert {row.access for row in rows} == {"push"}
    assert {row.access for row in pulled} == {"pull"}
    places = json.dumps({stream: {str(row.streamlet): [row.end] for row in rows}})
    assert kera.read(stream, endingOffsets=places).count() == len(produced)


@columnar_first
@pytest.mark.slow
def test_metadata_lists_streams(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=3, entries=2)
    kera.create(f"{stream}-typed", schema=pa.schema([("n", pa.int64())]))
    kera.send(stream, range(10))

    rows = {row.name: row for row in kera.read(metadata="streams").collect()}

    mine = rows[stream]
    assert (mine.streamlets, mine.entries, mine.durability, mine.replication) == (3, 2, "leader", 0)
    assert (mine.records, mine.bytes > 0, mine.typed) == (10, True, False)
    assert (rows[f"{stream}-typed"].typed, rows[f"{stream}-typed"].schema) == (True, "n: int64")
    only = kera.read(metadata="streams", subscribePattern=f"{stream}-t.*").select("name", "records")
    assert [tuple(row) for row in only.collect()] == [(f"{stream}-typed", 0)]


@columnar_first
@pytest.mark.parametrize("shared_memory", ["auto", "always", "never"])
@pytest.mark.slow
def test_records_are_the_same_with_and_without_shared_memory(kera: Kera, stream: str, shared_memory: str) -> None:
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(500), flush_every=50)

    assert sorted(sent(kera.read(stream, sharedMemory=shared_memory))) == sorted(produced)


@pytest.mark.parametrize(("shared_memory", "in_place"), [("auto", True), ("never", False)])
def test_a_task_on_a_brokers_node_reads_its_memory_unless_sharing_is_off(
    kera: Kera,
    stream: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    shared_memory: str,
    in_place: bool,
) -> None:
    monkeypatch.setenv("KERA_CONSUMER_JOINED_BYTES_MAX", "0")  # otherwise small chunks are joined as copies
    kera.create(stream)
    kera.send(stream, range(100), flush_every=10)
    options = {"kera.bootstrap.servers": kera.bootstrap, "subscribe": stream, "sharedMemory": shared_memory}
    reader = KeraDataSource(options).reader(RECORD_COLUMNS)

    with caplog.at_level(logging.DEBUG, logger="kera.spark_connector"):
        (partition,) = reader.partitions()
        assert sum(batch.num_rows for batch in cast("Iterator[pa.RecordBatch]", reader.read(partition))) == 100

    assert f"10 chunks, {10 if in_place else 0} of them in the broker's memory" in caplog.text


@columnar_first
@pytest.mark.slow
def test_an_unknown_option_gets_a_suggestion(kera: Kera, stream: str) -> None:
    with pytest.raises(AnalysisException, match=r"unknown option .*: did you mean startingOffsets\?"):
        kera.read(stream, startingOffset="earliest")


@columnar_first
@pytest.mark.slow
def test_the_error_for_an_unknown_stream_names_it(kera: Kera, stream: str) -> None:
    with pytest.raises(AnalysisException, match=stream):
        kera.read(stream)


@columnar_first
@pytest.mark.slow
def test_a_missing_column_gets_a_suggestion(kera: Kera, stream: str) -> None:
    kera.create(stream)
    reader = kera.reader()

    with pytest.raises(AnalysisException, match="no column 'vaule': did you mean 'value'"):
        reader.schema("vaule binary").load(stream).collect()
