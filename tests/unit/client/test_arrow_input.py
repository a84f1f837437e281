"""Input of `send_batch` beyond batches of the stream's exact types: other forms of values, and data frames."""

import datetime
from decimal import Decimal
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from kera.client.producing.encoding.conforming import conform
from kera.core.errors import InvalidArgument, SchemaMismatch
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import FakeCluster, description, stream_info

NOW_US = 1_700_000_000_000_000
UTC = datetime.UTC
MOMENT = datetime.datetime(2026, 1, 31, 12, 0, 0, 123456, UTC)


def converted(given: pa.Array, wanted: pa.DataType, *, nullable: bool = True) -> pa.Array:
    """The given column after conversion for a stream with this type."""
    stream = description(schema=pa.schema([pa.field("x", wanted, nullable=nullable)]))
    return conform(pa.record_batch({"x": given}), stream, NOW_US)["x"]


SAME = [
    (pa.array(["a", None, "ü"], pa.large_string()), pa.string()),
    (pa.array(["a", None, "a much longer text than fits into a view"], pa.string_view()), pa.string()),
    (pa.array(["a", None], pa.string()), pa.large_string()),
    (pa.array([b"a", None], pa.large_binary()), pa.binary()),
    (pa.array([b"a", None], pa.binary_view()), pa.binary()),
    (pa.array(["a", "b", "a", None]).dictionary_encode(), pa.string()),
    (pa.array(["a", "b"], pa.large_string()).dictionary_encode(), pa.string()),
    (pa.RunEndEncodedArray.from_arrays([2, 3], [7, 8]), pa.int64()),
    (pa.array([1, None], pa.int8()), pa.int64()),
    (pa.array([1, 255], pa.uint8()), pa.uint32()),
    (pa.array([1, (1 << 32) - 1], pa.uint32()), pa.int64()),
    (pa.array([1.5, None], pa.float32()), pa.float64()),
    (pa.array([1000, None], pa.timestamp("s")), pa.timestamp("us")),
    (pa.array([1_000_000, None], pa.timestamp("ns")), pa.timestamp("us")),
    (pa.array([1000, None], pa.timestamp("ms", "Europe/Paris")), pa.timestamp("us", "UTC")),
    (pa.array([1000], pa.duration("ms")), pa.duration("us")),
    (pa.array([1000], pa.time32("ms")), pa.time64("us")),
    (pa.array([datetime.date(2026, 1, 31)], pa.date32()), pa.date64()),
    (pa.array([Decimal("1.5")], pa.decimal128(4, 1)), pa.decimal128(10, 2)),
    (pa.array([["a"], None, []], pa.large_list(pa.string_view())), pa.list_(pa.string())),
    (pa.array([[1, 2]], pa.list_(pa.int32(), 2)), pa.list_(pa.int64())),
    (pa.array([[1, 2], None, [], [3]], pa.list_view(pa.int32())), pa.list_(pa.int64())),
    (pa.array([["x"], None, ["y"]], pa.large_list_view(pa.string_view())).slice(1), pa.list_(pa.string())),
    (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), pa.list_(pa.int32())),
    (pa.array([{"a": "x"}, None], pa.struct([("a", pa.large_string())])), pa.struct([("a", pa.string())])),
    (pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.large_string())), pa.map_(pa.string(), pa.string())),
    (pa.array([[1]], pa.list_(pa.int32())), pa.list_(pa.field("item", pa.int32(), nullable=False))),
    (pa.nulls(2), pa.string()),
    (pa.array([], pa.large_string()), pa.string()),
    (pa.array(["x", "a", "b"], pa.large_string()).slice(1), pa.string()),
]


@pytest.mark.parametrize(("given", "wanted"), SAME, ids=[f"{given.type} as {wanted}" for given, wanted in SAME])
def test_another_form_of_the_same_values_is_converted(given: pa.Array, wanted: pa.DataType) -> None:
    found = converted(given, wanted)
    assert found.type == wanted
    found.validate(full=True)
    if pa.types.is_duration(wanted) or pa.types.is_timestamp(wanted) or pa.types.is_time(wanted):
        assert found.cast(given.type).to_pylist() == given.to_pylist()
    else:
        assert found.to_pylist() == given.to_pylist()


@pytest.mark.parametrize(
    ("given", "wanted", "text"),
    [
        (pa.array([1]), pa.int32(), "column 'x' is int32, the batch has int64"),
        (pa.array([1], pa.uint64()), pa.int64(), "is int64, the batch has uint64"),
        (pa.array([1], pa.int8()), pa.uint8(), "is uint8, the batch has int8"),
        (pa.array([1.0]), pa.float32(), "is float, the batch has double"),
        (pa.array([1]), pa.float64(), "is double, the batch has int64"),
        (pa.array(["1"]), pa.int64(), "is int64, the batch has string"),
        (pa.array([1]), pa.string(), "is string, the batch has int64"),
        (pa.array([b"\xff"]), pa.string(), "is string, the batch has binary"),
        (pa.array(["a"]), pa.binary(), "is binary, the batch has string"),
        (pa.array([True]), pa.int8(), "is int8, the batch has bool"),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), r"is timestamp\[us\], the batch has .*without loss"),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("us", "UTC"), "in which time zone"),
        (pa.array([1], pa.timestamp("us", "UTC")), pa.timestamp("us"), "take its time zone away"),
        (pa.array([Decimal("1.55")], pa.decimal128(4, 2)), pa.decimal128(10, 1), "is decimal128"),
        (pa.array([[1, None]]), pa.list_(pa.field("item", pa.int64(), nullable=False)), "nulls in a part"),
        (pa.array([["a"]]), pa.list_(pa.int64()), "the batch has list<"),
        (pa.array([{"b": 1}]), pa.struct([("a", pa.int64())]), "the batch has struct<b"),
    ],
)
def test_a_lossy_or_ambiguous_conversion_is_refused_with_column_and_types(
    given: pa.Array, wanted: pa.DataType, text: str
) -> None:
    with pytest.raises(SchemaMismatch, match=text):
        converted(given, wanted)


def test_converting_one_column_does_not_copy_the_others() -> None:
    stream = description(schema=pa.schema([("a", pa.int64()), ("b", pa.string())]))
    same = pa.array([1, 2, 3])
    batch = conform(pa.record_batch({"a": same, "b": pa.array(["x"] * 3, pa.large_string())}), stream, NOW_US)
    assert batch["a"].buffers()[1].address == same.buffers()[1].address


def test_a_nullable_column_without_nulls_fits_a_column_that_takes_no_nulls() -> None:
    assert converted(pa.array(["a"], pa.large_string()), pa.string(), nullable=False).to_pylist() == ["a"]
    with pytest.raises(SchemaMismatch, match="takes no nulls, the batch has 1"):
        converted(pa.array(["a", None], pa.large_string()), pa.string(), nullable=False)


TYPED = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("kind", pa.string()),
    ]
)
ROWS = [
    {"id": number, "name": None if number == 1 else f"n{number}", "at": MOMENT, "kind": "ab"[number % 2]}
    for number in range(5)
]


def of_pandas() -> pd.DataFrame:
    frame = pd.DataFrame(ROWS)
    return frame.astype({"kind": "category"})


def of_polars() -> pl.DataFrame:
    return pl.DataFrame(ROWS).with_columns(pl.col("kind").cast(pl.Categorical))


def table() -> pa.Table:
    return pa.Table.from_pylist(ROWS, TYPED)


class OnlyArray:
    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return table().combine_chunks().to_batches()[0].__arrow_c_array__(requested_schema)


class OnlyStream:
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return table().__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "make",
    [
        of_pandas,
        lambda: of_pandas().set_index("id"),
        lambda: of_pandas().iloc[[0, 1, 2, 3, 4]].set_axis([9, 8, 7, 6, 5]),
        lambda: of_pandas().convert_dtypes(),
        of_polars,
        table,
        lambda: table().to_reader(max_chunksize=2),
        OnlyArray,
        OnlyStream,
    ],
    ids=["pandas", "index", "other index", "nullable", "polars", "table", "reader", "array", "stream"],
)
async def test_data_frames_and_arrow_objects_are_sent(
    make_cluster: MakeCluster, make_producer: MakeProducer, make: Any
) -> None:
    cluster: FakeCluster = make_cluster(stream_info(schema=TYPED))
    await (await make_producer(cluster).send_batch("s", make()))
    assert cluster.stored().to_pylist() == ROWS


async def test_data_frames_with_bytes_are_sent_as_records(cluster: FakeCluster, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster)
    await (await producer.send_batch("s", pl.DataFrame({"value": [b"a", b"b"], "keys": [[b"k"], None]})))
    await (await producer.send_batch("s", pd.DataFrame({"value": [b"c"]})))
    rows = cluster.stored().to_pylist()
    assert [row["value"] for row in rows] == [b"a", b"b", b"c"]
    assert [row["keys"] for row in rows] == [[b"k"], None, None]


@pytest.mark.parametrize("given", [[{"id": 1}], {"id": [1]}, b"x", None, pd.Series([1]), pl.Series([1])])
async def test_input_that_is_not_columns_is_refused_by_its_type_name(
    cluster: FakeCluster, make_producer: MakeProducer, given: Any
) -> None:
    with pytest.raises((InvalidArgument, SchemaMismatch), match=type(given).__name__ + "|no column"):
        await make_producer(cluster).send_batch("s", given)


async def test_a_reader_with_a_bad_batch_sends_nothing(make_cluster: MakeCluster, make_producer: MakeProducer) -> None:
    cluster = make_cluster(stream_info(schema=TYPED))
    good, bad = table().to_batches()[0], table().to_batches()[0].set_column(0, TYPED[0], pa.nulls(5, pa.int64()))
    producer = make_producer(cluster)
    with pytest.raises(SchemaMismatch, match="takes no nulls"):
        await producer.send_batch("s", pa.RecordBatchReader.from_batches(TYPED, [good, bad]))
    await producer.flush()
    assert list(cluster.chunks()) == []
