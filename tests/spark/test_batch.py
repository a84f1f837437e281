"""``spark.read.format("kera")`` gives what was produced: all of it, once, with its types."""

import datetime as dt
import decimal
import json

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException

from kera.client import Client
from tests.spark.support import Kera, sent


@pytest.mark.parametrize("entries", [1, 2])
def test_a_batch_read_equals_what_was_produced(kera: Kera, stream: str, entries: int) -> None:
    kera.create(stream, streamlets=3, entries=entries)
    produced = kera.send(stream, range(500)) + kera.send(stream, range(500, 1000), flush_every=50)

    assert sorted(sent(kera.read(stream))) == sorted(produced)


def test_columns_of_a_record(kera: Kera, stream: str) -> None:
    kera.create(stream)

    async def send(client: Client) -> None:
        async with client.producer() as producer:
            await producer.prepare(stream)
            producer.send(stream, b"x", keys=[b"a", b"b"], timestamp_us=1_000_000, headers={"h": b"1"})
            producer.send(stream, None, timestamp_us=2_000_000)

    kera.run(send)
    frame = kera.read(stream)

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


def test_a_typed_stream_has_its_own_columns_and_values(kera: Kera, stream: str) -> None:
    table = TYPES.drop_columns(["category"])  # a chunk has no place for dictionaries
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


def test_a_stream_of_many_segments_and_groups_is_read_whole(kera: Kera, stream: str) -> None:
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


def test_an_empty_stream_is_an_empty_frame(kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=2)

    assert kera.read(stream).count() == 0


def test_starting_and_ending_offsets_bound_what_is_read(kera: Kera, stream: str) -> None:
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


def test_only_the_columns_of_a_given_schema_are_read(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(3))
    reader = kera.spark.read.format("kera").option("kera.bootstrap.servers", kera.bootstrap)

    frame = reader.schema("offset bigint, value binary").load(stream)

    assert [tuple(row) for row in frame.orderBy("offset").collect()] == [(0, b"v0"), (1, b"v1"), (2, b"v2")]


def test_the_stream_may_be_named_by_subscribe(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(3))
    reader = kera.spark.read.format("kera").option("kera.bootstrap.servers", kera.bootstrap)

    assert reader.option("subscribe", stream).load().count() == 3


def test_an_unknown_option_gets_a_suggestion(kera: Kera, stream: str) -> None:
    with pytest.raises(AnalysisException, match=r"unknown option .*: did you mean startingOffsets\?"):
        kera.read(stream, startingOffset="earliest")


def test_an_unknown_stream_is_named(kera: Kera, stream: str) -> None:
    with pytest.raises(AnalysisException, match=stream):
        kera.read(stream)


def test_a_column_that_is_not_there_gets_a_suggestion(kera: Kera, stream: str) -> None:
    kera.create(stream)
    reader = kera.spark.read.format("kera").option("kera.bootstrap.servers", kera.bootstrap)

    with pytest.raises(AnalysisException, match="no column 'vaule': did you mean 'value'"):
        reader.schema("vaule binary").load(stream).collect()
