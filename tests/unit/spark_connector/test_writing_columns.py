"""Columns of DataFrames become columns of streams."""

import datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kera.client import StreamDescription
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.spark_connector.writing.columns import RECORD_TYPES, Columns, DestinedRows, check
from tests.unit.client.support import description

UTC = datetime.UTC
TYPED = pa.schema(
    [
        pa.field("at", pa.timestamp("ms", tz="UTC")),
        pa.field("user", pa.string(), nullable=False),
        pa.field("count", pa.uint8()),
        pa.field("tags", pa.list_(pa.string())),
    ]
)
HEADERS = pa.list_(pa.field("element", pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])))


TYPES: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "smallint": ShortType(),
    "timestamp": TimestampType(),
    "timestamp_ntz": TimestampNTZType(),
    "array<binary>": ArrayType(BinaryType()),
    "array<string>": ArrayType(StringType()),
    "array<struct<key:string,value:binary>>": ArrayType(
        StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    ),
    "map<string,binary>": MapType(StringType(), BinaryType()),
    "map<string,string>": MapType(StringType(), StringType()),
}
"""Types by Spark's names, because parsing these names takes a JVM."""


def columns(ddl: str) -> StructType:
    pairs = [text.partition(" ") for text in ddl.split(", ")]
    return StructType([StructField(name, TYPES[kind]) for name, _, kind in pairs])


def by_destination(ddl: str, *arrays: pa.Array, stream: Any = True) -> list[DestinedRows]:
    given = columns(ddl)
    into = description() if stream is True else stream
    check(given, into)
    return list(Columns(given, into).by_destination(pa.RecordBatch.from_arrays(list(arrays), names=given.names)))


def rows(ddl: str, *arrays: pa.Array, stream: Any = True) -> list[dict[str, Any]]:
    (part,) = by_destination(ddl, *arrays, stream=stream)
    assert (part.stream, part.streamlet) == (None, None)
    return part.rows.to_pylist()  # type: ignore[no-any-return]


# --- accepted columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORD_TYPES)
def test_each_column_of_a_record_is_accepted_with_each_of_its_types(name: str) -> None:
    for kind in RECORD_TYPES[name]:
        check(columns(f"value binary, {name} {kind}" if name != "value" else f"value {kind}"), description())


def test_all_columns_of_a_reader_can_be_written() -> None:
    from kera.spark_connector.columns import columns_of

    check(columns_of(DEFAULT_SCHEMA, typed=False), description())
    check(columns_of(TYPED, typed=True), description(schema=TYPED))


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("value int", "column 'value' has to be binary or string for stream 's', not int"),
        ("value binary, key bigint", "column 'key' has to be binary or string for stream 's', not bigint"),
        ("value binary, timestamp timestamp_ntz", "column 'timestamp' has to be timestamp for stream 's'"),
        (
            "value binary, headers map<string,string>",
            "column 'headers' has to be array<struct<key:string,value:binary>",
        ),
        ("value binary, kye binary", "stream 's' has no column 'kye': did you mean 'key'?"),
        ("value binary, zzz binary", "stream 's' has no column 'zzz': it takes value, key, keys"),
        ("key binary", "stream 's' needs a column 'value' (binary or string)"),
        ("value binary, streamlet bigint", "column 'streamlet' has to be int"),
    ],
)
def test_the_error_for_an_unfit_column_names_it_and_the_expected_columns(ddl: str, message: str) -> None:
    with pytest.raises(SchemaMismatch) as raised:
        check(columns(ddl), description())

    assert message in raised.value.message
    assert raised.value.attributes["column"] in ddl + " value"


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        ("user string, value binary", "stream 's' has no column 'value': it takes at, user, count, tags"),
        ("user binary", "column 'user' has to be string for stream 's', not binary"),
        ("user string, count int", "column 'count' has to be smallint for stream 's', not int"),
        ("count smallint", "stream 's' needs a column 'user' (string)"),
    ],
)
def test_a_typed_stream_accepts_only_its_own_columns(ddl: str, message: str) -> None:
    with pytest.raises(SchemaMismatch) as raised:
        check(columns(ddl), description(schema=TYPED))

    assert message in raised.value.message


def test_rows_need_a_column_stream_when_the_query_names_none() -> None:
    check(columns("value binary, stream string"), None)
    with pytest.raises(SchemaMismatch, match=r"needs a column 'stream'.*or name the stream"):
        check(columns("value binary"), None)


def test_a_duplicate_column_is_refused() -> None:
    both = columns("value binary").add(columns("value binary")[0])

    with pytest.raises(SchemaMismatch, match="several columns 'value'"):
        check(both, description())


# --- values ------------------------------------------------------------------------------------------------


def test_text_becomes_bytes() -> None:
    assert rows("value string, key string", pa.array(["é", None]), pa.array([None, "k"])) == [
        {"value": "é".encode(), "keys": None},
        {"value": None, "keys": [b"k"]},
    ]


def test_keys_keep_their_order_and_may_be_empty_or_null() -> None:
    keys = pa.array([["a", "b"], [], None])

    assert rows("value binary, keys array<string>", pa.array([b""] * 3), keys) == [
        {"value": b"", "keys": [b"a", b"b"]},
        {"value": b"", "keys": []},
        {"value": b"", "keys": None},
    ]


def test_the_column_key_replaces_the_first_of_the_keys() -> None:
    ddl, value = "value binary, key binary, keys array<binary>", pa.array([b""] * 5)
    keys = pa.array([[b"a", b"b"], [b"a"], [], None, [b"a"]])

    changed = rows(ddl, value, pa.array([b"x", b"y", b"z", b"w", None]), keys)
    same = rows(ddl, value, pa.array([b"a", b"a", None, None, b"a"]), keys)

    assert [row["keys"] for row in changed] == [[b"x", b"b"], [b"y"], [b"z"], [b"w"], [b"a"]]
    assert [row["keys"] for row in same] == keys.to_pylist()


def test_headers_are_accepted_as_a_list_of_structs_and_as_a_map() -> None:
    lists = pa.array([[{"key": "a", "value": b"1"}, {"key": "b", "value": None}], None, []], HEADERS)
    maps = pa.array([[("a", b"1"), ("b", None)], None, []], pa.map_(pa.string(), pa.binary()))
    expected = [[("a", b"1"), ("b", None)], None, []]

    for slice_ in (slice(0, 3), slice(1, 3), slice(2, 3)):
        length = slice_.stop - slice_.start
        value = pa.array([b""] * length)
        for column, kind in ((lists, "array<struct<key:string,value:binary>>"), (maps, "map<string,binary>")):
            found = rows(f"value binary, headers {kind}", value, column.slice(slice_.start, length))
            assert [row["headers"] for row in found] == expected[slice_]


def test_a_timestamp_is_independent_of_the_time_zone_of_the_session() -> None:
    when = datetime.datetime(2024, 1, 31, 12, tzinfo=UTC)
    (row,) = rows(
        "value binary, timestamp timestamp", pa.array([b""]), pa.array([when], pa.timestamp("us", "Asia/Tokyo"))
    )

    assert row["timestamp"] == when


def test_comparisons_of_rows_ignore_only_a_missing_timestamp() -> None:
    assert Columns(columns("value binary"), description()).ignored == {"timestamp"}
    assert Columns(columns("value binary, timestamp timestamp"), description()).ignored == set()
    assert Columns(columns("user string"), description(schema=TYPED)).ignored == set()


def test_columns_are_converted_to_the_types_of_a_typed_stream() -> None:
    when = datetime.datetime(2024, 1, 31, tzinfo=UTC)
    (part,) = by_destination(
        "user string, count smallint, at timestamp, tags array<string>",
        pa.array(["ada"]),
        pa.array([255], pa.int16()),
        pa.array([when], pa.timestamp("us", "UTC")),
        pa.array([["x"]], pa.list_(pa.field("element", pa.string(), nullable=False))),
        stream=description(schema=TYPED),
    )

    assert part.rows.to_pylist() == [{"user": "ada", "count": 255, "at": when, "tags": ["x"]}]
    assert {name: part.rows.schema.field(name).type for name in TYPED.names} == {
        field.name: field.type for field in TYPED
    }


@pytest.mark.parametrize(
    ("ddl", "column", "message"),
    [
        ("user string, count smallint", pa.array([256], pa.int16()), "column 'count' does not fit into uint8"),
        (
            "user string, at timestamp",
            pa.array([1], pa.timestamp("us", "UTC")),
            "column 'at' does not fit into timestamp",
        ),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_an_error(ddl: str, column: pa.Array, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message.replace("[", r"\[")):
        by_destination(ddl, pa.array(["ada"]), column, stream=description(schema=TYPED))


@pytest.mark.parametrize(
    ("ddl", "column", "message"),
    [
        ("keys array<binary>", pa.array([[b"a", None]]), "column 'keys' has a null among the keys of a row"),
        (
            "headers array<struct<key:string,value:binary>>",
            pa.array([[{"key": None, "value": b""}]], HEADERS),
            "column 'headers' has a header without a key",
        ),
    ],
)
def test_null_keys_and_header_names_are_errors(ddl: str, column: pa.Array, message: str) -> None:
    with pytest.raises(SchemaMismatch, match=message):
        by_destination("value binary, " + ddl, pa.array([b""]), column)


# --- destinations ------------------------------------------------------------------------------------------


def test_rows_go_to_the_streams_and_streamlets_that_they_name() -> None:
    found = by_destination(
        "value binary, stream string, streamlet int",
        pa.array([b"0", b"1", b"2", b"3", b"4"]),
        pa.array(["a", "b", "a", "a", "b"]),
        pa.array([1, None, 0, 1, None], pa.int32()),
        stream=None,
    )

    assert {(part.stream, part.streamlet): part.rows["value"].to_pylist() for part in found} == {
        ("a", 1): [b"0", b"3"],
        ("a", 0): [b"2"],
        ("b", None): [b"1", b"4"],
    }


def test_the_stream_of_the_query_overrides_the_column() -> None:
    (part,) = by_destination("value binary, stream string", pa.array([b"0", b"1"]), pa.array(["a", None]))

    assert (part.stream, part.rows.num_rows) == (None, 2)


def test_a_row_without_a_stream_is_an_error() -> None:
    with pytest.raises(SchemaMismatch, match="column 'stream' is null"):
        by_destination("value binary, stream string", pa.array([b"0"]), pa.array([None], pa.string()), stream=None)


def test_a_batch_without_rows_has_no_parts() -> None:
    assert by_destination("value binary", pa.array([], pa.binary())) == []


TWO_CASES = pa.schema([("a", pa.int64()), ("A", pa.int64()), ("Other", pa.int64())])


@pytest.mark.parametrize(
    ("given", "sensitive", "meant"),
    [
        ("VALUE binary, Key binary", False, ["value", "key"]),
        ("value binary, key binary", True, ["value", "key"]),
        ("VALUE binary", True, "stream 's' has no column 'VALUE': did you mean 'value'?"),
        ("value binary, VALUE binary", False, "there are several columns 'value'"),
    ],
)
def test_columns_of_records_are_found_by_their_names(given: str, sensitive: bool, meant: list[str] | str) -> None:
    _find(given, description(), sensitive, meant)


@pytest.mark.parametrize(
    ("given", "sensitive", "meant"),
    [
        ("A bigint, a bigint, OTHER bigint", False, ["A", "a", "Other"]),
        ("A bigint, Other bigint, a bigint", True, ["A", "Other", "a"]),
        ("a bigint, other bigint", True, "stream 's' has no column 'other'"),
        ("Ä bigint", False, "stream 's' has no column 'Ä'"),
    ],
)
def test_columns_that_differ_only_in_case_are_distinct(given: str, sensitive: bool, meant: list[str] | str) -> None:
    _find(given, description(schema=TWO_CASES), sensitive, meant)


def test_an_ambiguous_column_name_is_refused() -> None:
    schema = pa.schema([("ab", pa.int64()), ("AB", pa.int64())])
    with pytest.raises(SchemaMismatch, match="column 'Ab' may be 'ab' or 'AB' of stream 's'"):
        check(columns("Ab bigint"), description(schema=schema))


def _find(given: str, stream: StreamDescription, sensitive: bool, meant: list[str] | str) -> None:
    frame = columns(given)
    if isinstance(meant, str):
        with pytest.raises(SchemaMismatch) as raised:
            Columns(frame, stream, case_sensitive=sensitive)
        assert meant in raised.value.message
        return
    assert check(frame, stream, case_sensitive=sensitive).names == meant
    arrays = [pa.array([b"%d" % at if "binary" in given else at]) for at in range(len(meant))]
    batch = pa.RecordBatch.from_arrays(arrays, names=frame.names)
    (rows,) = Columns(frame, stream, case_sensitive=sensitive).by_destination(batch)
    if stream.typed:
        assert rows.rows.to_pylist() == [{name: at for at, name in enumerate(meant)}]
    else:
        assert rows.rows["value"].to_pylist() == [b"%d" % meant.index("value")]
