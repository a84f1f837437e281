"""Chunks become the columns that Spark expects."""

from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from kera.core.errors import SchemaMismatch
from kera.core.format.chunk import ChunkHeader
from kera.spark_connector.columns import (
    HEADERS_COLUMN,
    RECORD_COLUMNS,
    Shaper,
    check_columns,
    columns_of,
    columns_of_all,
    with_epoch,
    without_epoch,
)

DEFAULT_SCHEMA = pa.schema(
    [
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("keys", pa.list_(pa.binary())),
        ("value", pa.binary()),
        ("headers", pa.map_(pa.string(), pa.binary())),
    ]
)


def header(**fields: int) -> ChunkHeader:
    zeros: dict[str, Any] = dict.fromkeys(ChunkHeader._fields, 0)
    return ChunkHeader(**{**zeros, **fields})


def records(**columns: list[Any]) -> pa.RecordBatch:
    count = len(next(iter(columns.values())))
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in DEFAULT_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)


WITH_HEADERS = StructType([*RECORD_COLUMNS, HEADERS_COLUMN])


def shape(batch: pa.RecordBatch, wanted: StructType = RECORD_COLUMNS, **fields: int) -> pa.RecordBatch:
    (shaped,) = Shaper(wanted, stream="events", typed=False).shape([batch], header(**fields))
    assert shaped.schema.equals(to_arrow_schema(wanted, timezone="UTC"))  # Spark makes this comparison
    shaped.validate(full=True)
    return shaped


def typed(batch: pa.RecordBatch, wanted: StructType | None = None) -> pa.RecordBatch:
    wanted = wanted or columns_of(batch.schema, typed=True)
    (shaped,) = Shaper(wanted, stream="flights", typed=True).shape([batch], header())
    assert shaped.schema.equals(to_arrow_schema(wanted, timezone="UTC"))
    shaped.validate(full=True)
    return shaped


def test_a_record_has_the_columns_of_kafka_and_its_position() -> None:
    batch = records(
        timestamp=[1, 2],
        keys=[[b"a", b"b"], [b"c"]],
        value=[b"x", None],
        headers=[[("h", b"1"), ("g", None)], None],
    )

    shaped = shape(batch, WITH_HEADERS, streamlet_id=3, entry=1, first_record=100)

    assert shaped.drop_columns(["timestamp"]).to_pylist() == [
        {
            "key": b"a",
            "keys": [b"a", b"b"],
            "value": b"x",
            "stream": "events",
            "streamlet": 3,
            "entry": 1,
            "offset": 100,
            "headers": [{"key": "h", "value": b"1"}, {"key": "g", "value": None}],
        },
        {
            "key": b"c",
            "keys": [b"c"],
            "value": None,
            "stream": "events",
            "streamlet": 3,
            "entry": 1,
            "offset": 101,
            "headers": None,
        },
    ]
    assert shaped["timestamp"].cast(pa.int64()).to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "keys",
    [
        [None, None],
        [[], []],
        [[], [b"a"], None, [b"b", b"c"], [None], []],
        [[b"a"], [b"b"], [b"c"]],
    ],
)
def test_the_key_is_the_first_of_the_keys_or_null(keys: list[Any]) -> None:
    expected = [row[0] if row else None for row in keys]

    assert shape(records(keys=keys))["key"].to_pylist() == expected
    sliced = shape(records(keys=keys).slice(1))
    assert sliced["key"].to_pylist() == expected[1:]
    assert sliced["keys"].to_pylist() == keys[1:]


def test_a_slice_has_only_its_own_headers() -> None:
    batch = records(headers=[[("a", b"1")], None, [("b", b"2")], []])

    assert shape(batch.slice(1), WITH_HEADERS)["headers"].to_pylist() == [None, [{"key": "b", "value": b"2"}], []]


def test_values_are_not_copied() -> None:
    batch = records(keys=[[b"a"]], value=[b"x"])

    shaped = shape(batch)

    assert shaped["value"].buffers()[2].address == batch["value"].buffers()[2].address
    assert shaped["keys"].values.buffers()[2].address == batch["keys"].values.buffers()[2].address


def test_only_requested_columns_are_made() -> None:
    wanted = StructType([StructField("offset", LongType()), RECORD_COLUMNS["value"]])

    assert shape(records(value=[b"x"]), wanted, first_record=5).to_pylist() == [{"offset": 5, "value": b"x"}]


def test_columns_of_the_position_alone_have_one_row_per_record() -> None:
    wanted = StructType([RECORD_COLUMNS["offset"], RECORD_COLUMNS["stream"]])

    assert shape(records(value=[b"x", b"y"]), wanted, first_record=5).to_pylist() == [
        {"offset": 5, "stream": "events"},
        {"offset": 6, "stream": "events"},
    ]


def test_consecutive_chunks_become_one_batch_with_consecutive_ordinals() -> None:
    chunks = [records(keys=[[b"a"], []], value=[b"1", b"2"]), records(keys=[None], value=[b"3"])]

    (merged,) = Shaper(RECORD_COLUMNS, stream="events", typed=False).shape(chunks, header(first_record=7))

    assert merged["offset"].to_pylist() == [7, 8, 9]
    assert merged["key"].to_pylist() == [b"a", None, None]
    assert merged["value"].to_pylist() == [b"1", b"2", b"3"]


def test_chunks_before_and_after_a_schema_change_stay_separate_batches() -> None:
    old = pa.RecordBatch.from_arrays([pa.array([1])], names=["a"])
    new = pa.RecordBatch.from_arrays([pa.array([2]), pa.array(["x"])], names=["a", "b"])
    wanted = columns_of(new.schema, typed=True)

    shaped = Shaper(wanted, stream="flights", typed=True).shape([old, old, new], header())

    assert [batch.to_pydict() for batch in shaped] == [{"a": [1, 1], "b": [None, None]}, {"a": [2], "b": ["x"]}]


def test_an_empty_batch_stays_empty() -> None:
    assert shape(records(value=[])).num_rows == 0


def test_a_typed_batch_that_fits_passes_untouched() -> None:
    schema = pa.schema(
        [("t", pa.timestamp("us", tz="UTC")), pa.field("n", pa.int64(), nullable=False), ("s", pa.string())]
    )
    batch = pa.RecordBatch.from_arrays([pa.array([1], schema[0].type), pa.array([2]), pa.array(["x"])], schema=schema)

    assert typed(batch) is batch


@pytest.mark.parametrize(
    ("values", "at", "spark"),
    [
        ([1, 255], pa.uint8(), "smallint"),
        ([1, 65535], pa.uint16(), "int"),
        ([1, 2**32 - 1], pa.uint32(), "bigint"),
        ([1, 2**64 - 1], pa.uint64(), "decimal(20,0)"),
        ([1.5], pa.float16(), "float"),
        ([1], pa.timestamp("s", tz="UTC"), "timestamp"),
        ([1], pa.timestamp("ms", tz="Europe/Paris"), "timestamp"),
        ([1000], pa.timestamp("ns"), "timestamp_ntz"),
        ([86_400_000], pa.date64(), "date"),
        ([1], pa.time32("s"), "time(6)"),
        ([1], pa.duration("s"), "interval day to second"),
        (["a", "b", "a"], pa.dictionary(pa.int32(), pa.string()), "string"),
        (["a"], pa.large_string(), "string"),
        (["a"], pa.string_view(), "string"),
        ([b"a"], pa.large_binary(), "binary"),
        ([b"abcd"], pa.binary(4), "binary"),
        ([[1], None, []], pa.large_list(pa.uint16()), "array<int>"),
        ([[1, 2]], pa.list_(pa.int32(), 2), "array<int>"),
        ([{"a": 1, "b": ["x"]}], pa.struct([("a", pa.uint8()), ("b", pa.list_(pa.string()))]), None),
        ([[("k", 1)]], pa.map_(pa.string(), pa.uint8()), "map<string,smallint>"),
        ([[["x"]], [None]], pa.list_(pa.list_(pa.large_string())), "array<array<string>>"),
        ([True, None], pa.bool_(), "boolean"),
    ],
)
def test_types_that_spark_lacks_are_converted(values: list[Any], at: pa.DataType, spark: str | None) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array(values, at)], names=["c"])
    columns = columns_of(batch.schema, typed=True)

    shaped = typed(batch, columns)

    assert spark is None or columns["c"].dataType.simpleString() == spark
    assert shaped["c"].to_pylist() == batch["c"].to_pylist()


def test_the_error_for_an_unsupported_type_names_its_column() -> None:
    with pytest.raises(SchemaMismatch, match="column 'd' has the Arrow type decimal256"):
        columns_of(pa.schema([("d", pa.decimal256(50, 2))]), typed=True)


def test_the_error_for_an_unsupported_value_says_where_it_is() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([None, 1001]).view(pa.timestamp("ns"))], names=["at"])
    shaper = Shaper(columns_of(batch.schema, typed=True), stream="s", typed=True)

    with pytest.raises(
        SchemaMismatch, match=r"column 'at' has a value that Spark does not have.*lose data: 1001"
    ) as told:
        list(shaper.shape([batch], header(streamlet_id=3, entry=1, first_record=70)))
    place = {"stream": "s", "streamlet_id": 3, "entry": 1, "record": 70, "column": "at"}
    assert told.value.attributes == place


def test_a_chunk_older_than_a_column_gets_nulls() -> None:
    old = pa.RecordBatch.from_arrays([pa.array([1])], names=["a"])
    wanted = StructType([StructField("a", LongType()), StructField("b", StringType())])

    assert typed(old, wanted).to_pylist() == [{"a": 1, "b": None}]
    with pytest.raises(SchemaMismatch, match="'b', which is not nullable"):
        typed(old, StructType([StructField("a", LongType()), StructField("b", StringType(), nullable=False)]))


def test_requested_columns_must_exist_with_their_types() -> None:
    there = StructType([StructField("carrier", StringType()), StructField("distance", LongType())])

    check_columns(StructType([there["distance"]]), there, "flights")
    with pytest.raises(SchemaMismatch, match="no column 'carier': did you mean 'carrier'"):
        check_columns(StructType([StructField("carier", StringType())]), there, "flights")
    with pytest.raises(SchemaMismatch, match="is bigint, not int"):
        check_columns(StructType([StructField("distance", IntegerType())]), there, "flights")


# --- several streams ------------------------------------------------------------------------------------------------


class Stream(NamedTuple):
    name: str
    stream_id: int
    schema: pa.Schema
    typed: bool = True


FARES = [("user", pa.string()), ("fare", pa.int32())]
RIDES = Stream("rides", 3, pa.schema(FARES))
TIPPED = Stream("tipped", 4, pa.schema([*FARES, ("tip", pa.float64())]))
URLS = Stream("urls", 2, pa.schema([("url", pa.string())]))
EVENTS = Stream("events", 5, DEFAULT_SCHEMA, typed=False)


def test_streams_that_lack_only_last_columns_are_read_with_all_columns() -> None:
    for streams in ([RIDES, TIPPED], [TIPPED, RIDES]):
        assert columns_of_all(streams, headers=False).names == ["user", "fare", "tip"]


@pytest.mark.parametrize(
    "other",
    [
        URLS,
        EVENTS,
        Stream("other-type", 9, pa.schema([("user", pa.string()), ("fare", pa.int64())])),
        Stream("required", 9, pa.schema([*FARES, pa.field("tip", pa.float64(), nullable=False)])),
        Stream("in-front", 9, pa.schema([("tip", pa.float64()), *FARES])),
    ],
)
def test_the_error_for_streams_with_other_columns_names_the_option(other: Stream) -> None:
    with pytest.raises(SchemaMismatch, match=r"'rides'.*onSchemaMismatch"):
        columns_of_all([RIDES, other], headers=False)


def test_skip_leaves_out_streams_that_do_not_fit_the_oldest_one() -> None:
    assert columns_of_all([EVENTS, TIPPED, RIDES], headers=False, on_mismatch="skip").names == ["user", "fare", "tip"]
    assert columns_of_all([RIDES, TIPPED, URLS], headers=False, on_mismatch="skip").names == ["url"]


def test_with_bytes_all_streams_have_the_columns_of_records() -> None:
    for streams in ([RIDES, URLS], [EVENTS, RIDES], []):
        assert columns_of_all(streams, headers=False, on_mismatch="bytes") == RECORD_COLUMNS


def test_a_stream_may_lack_nullable_columns_at_the_end() -> None:
    wanted, there = (columns_of(stream.schema, typed=True) for stream in (TIPPED, RIDES))
    check_columns(wanted, there, "stream 'rides'")
    with pytest.raises(SchemaMismatch, match="has no column 'user'"):
        check_columns(wanted, columns_of(URLS.schema, typed=True), "stream 'urls'")


@pytest.mark.parametrize("typed", [True, False])
def test_the_epoch_of_a_row_is_its_last_column(typed: bool) -> None:
    own = columns_of(pa.schema([("n", pa.int64())]), typed=True) if typed else StructType([RECORD_COLUMNS["offset"]])
    wanted = with_epoch(own)
    batch = pa.RecordBatch.from_pydict({"n": pa.array([5, 6], pa.int64())})

    (shaped,) = Shaper(wanted, stream="s", typed=typed, epoch=17).shape([batch], header(first_record=5))

    assert [column.to_pylist() for column in shaped.columns] == [[5, 6], [17, 17]]
    assert without_epoch(wanted) == own


def test_include_epoch_refuses_a_stream_with_a_column_called_epoch() -> None:
    with pytest.raises(SchemaMismatch, match="option includeEpoch: there is a column 'epoch' already"):
        with_epoch(StructType().add("epoch", "string"))
    with pytest.raises(SchemaMismatch, match="column 'epoch' is bigint, not string"):
        without_epoch(StructType().add("epoch", "string"))
