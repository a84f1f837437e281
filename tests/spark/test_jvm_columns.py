"""The columns of the columnar engine: the same names, types and values as in the Python engine, and no crash."""

import base64
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from struct import pack
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from kera.core.errors import CorruptChunk, SchemaMismatch
from kera.core.format import lean
from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    VERSIONS,
    Codec,
    Placement,
    encode_chunk,
    encode_payload,
    place_chunk,
    read_header,
)
from kera.core.format.joining import JOINED_PAYLOAD_BYTES_MAX
from kera.core.format.lean.layout import Kind, put_prefix, put_varint
from kera.core.format.payload import encode_lean
from kera.core.format.record_batch import decode_payload
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, Shaper, columns_of
from tests.chaos.arrow_structures import Message
from tests.chaos.chunk_uses import spark_has
from tests.chaos.chunks import lean_source, mutated, opened, whole
from tests.chaos.growing import GROWING, OTHERS, growing
from tests.examples import examples, first_quick
from tests.spark.jvm_harness import Harness, compiled, running

pytestmark = pytest.mark.timeout(180)

ALL_COLUMNS = StructType([*RECORD_COLUMNS, HEADERS_COLUMN])
FIRST_RECORD = 1000


@pytest.fixture(scope="module")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    folder = tmp_path_factory.mktemp("columns")
    with running([*compiled("kera.wire.ColumnsHarness"), str(folder)]) as harness:
        yield harness


def records(**columns: Sequence[Any]) -> pa.RecordBatch:
    count = len(next(iter(columns.values())))
    columns = {"timestamp": range(count), **columns}
    arrays = [pa.array(columns.get(field.name, [None] * count), field.type) for field in DEFAULT_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)


KEYED = records(
    timestamp=[1, 2, 3_000_000, 4, 5],
    keys=[[b"a", b"b"], [b"c"], [], None, [None, b"d"]],
    value=[b"x", None, b"", b"y" * 40, b"z"],
    headers=[[("h", b"1"), ("g", None)], None, [], [("\u00fc", b"")], [("i", b"2")]],
)


def chunk_of(
    batch: pa.RecordBatch, codec: Codec = Codec.NONE, *, typed: bool = False, version: int = ARROW_VERSION
) -> bytes:
    payload = encode_lean(batch, codec) if version == LEAN_VERSION else encode_payload(batch, codec)
    assert payload is not None
    return framed(payload, batch.num_rows, codec, typed=typed, version=version)


def framed(payload: pa.Buffer, records: int, codec: Codec = Codec.NONE, *, typed: bool, version: int) -> bytes:
    encoded = encode_chunk(
        payload, record_count=records, stream_id=7, streamlet_id=3, schema_id=1,
        producer_id=1, producer_epoch=0, sequence=0, created_us=0, min_timestamp_us=0, max_timestamp_us=0, codec=codec,
        typed=typed, version=version,
    )  # fmt: skip
    chunk = bytearray(encoded.to_bytes())
    place_chunk(chunk, 0, Placement(1, 0, 1, FIRST_RECORD, 1))
    return bytes(chunk)


def versions_of(schema: pa.Schema) -> tuple[int, ...]:
    """The versions of the format in which a schema can have chunks."""
    return VERSIONS if lean.is_lean(schema) else (ARROW_VERSION,)


def question(schema: pa.Schema, wanted: StructType, *, typed: bool) -> dict[str, Any]:
    return {
        "schema": text(schema_to_bytes(schema)),
        "typed": typed,
        "wanted": wanted.jsonValue(),
        "stream": "events",
    }


def loaded(
    java: Harness, chunks: Sequence[tuple[bytes, int]], schema: pa.Schema, wanted: StructType, *, typed: bool
) -> dict[str, Any]:
    """The JVM's rows of chunks, with the given number of records skipped in each."""
    given = [{"bytes": text(chunk), "skip": skip} for chunk, skip in chunks]
    return java.ask(method="rows", chunks=given, **question(schema, wanted, typed=typed))


def shaped(
    batches: pa.RecordBatch | list[pa.RecordBatch], chunk: bytes, wanted: StructType, *, typed: bool
) -> list[list[Any]]:
    """Python's rows of the same batches; `chunk` is the first of them."""
    batches = batches if isinstance(batches, list) else [batches]
    (shaped,) = Shaper(wanted, stream="events", typed=typed).shape(batches, read_header(chunk))
    columns = [[plain(value) for value in column] for column in shaped.columns]
    return [list(row) for row in zip(*columns, strict=True)] if columns else [[]] * sum(map(len, batches))


def require_same(
    java: Harness,
    batch: pa.RecordBatch,
    wanted: StructType | None = None,
    *,
    typed: bool = True,
    codec: Codec = Codec.NONE,
) -> list[list[Any]]:
    if wanted is None:
        wanted = columns_of(batch.schema, typed=True) if typed else ALL_COLUMNS
    chunks = [chunk_of(batch, codec, typed=typed, version=version) for version in versions_of(batch.schema)]
    answer = loaded(java, [(chunk, 0) for chunk in chunks], batch.schema, wanted, typed=typed)
    expected = shaped(batch, chunks[0], wanted, typed=typed)
    assert answer == {"batches": [expected] * len(chunks)}
    if lean.is_lean(batch.schema) and {*batch.schema.names, "key"} & {*wanted.names}:
        require_same_together(java, batch, wanted, typed=typed)
    return expected


def require_same_together(java: Harness, batch: pa.RecordBatch, wanted: StructType, *, typed: bool) -> None:
    """Require the same for consecutive small chunks, with nulls in some of them, in all encodings."""
    middle = batch.num_rows // 2
    parts = [batch.slice(middle), batch, batch.slice(0, 0), batch.slice(0, middle), batch.slice(0, 1), batch]
    if all(field.nullable for field in batch.schema):
        nulls = [pa.nulls(3, kind) for kind in batch.schema.types]
        parts.insert(1, pa.RecordBatch.from_arrays(nulls, schema=batch.schema))
    first, *behind = chunks = [chunk_of(part, typed=typed, version=LEAN_VERSION) for part in parts]
    if max(map(len, chunks)) > JOINED_PAYLOAD_BYTES_MAX:
        return
    for skip in (0, 1):
        given = [{"bytes": text(first), "skip": skip, "behind": [text(chunk) for chunk in behind]}]
        answer = java.ask(method="rows", chunks=given, **question(batch.schema, wanted, typed=typed))
        assert answer == {"batches": [shaped(parts, first, wanted, typed=typed)[skip:]]}


def plain(value: pa.Scalar) -> Any:
    """As the program writes it: times are numbers, decimals text, bytes Base64, maps and structs lists."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.ListScalar):  # also a map, whose entries are structs
        return [plain(element) for element in value.values]
    if isinstance(value, pa.StructScalar):
        return [plain(field) for field in value.values()]
    if pa.types.is_temporal(value.type):
        return value.value
    if pa.types.is_decimal(value.type):
        return f"{value.as_py():f}"
    return text(value.as_py()) if pa.types.is_binary(value.type) else value.as_py()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("codec", [Codec.NONE, pytest.param(Codec.ZSTD, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", first_quick((name for name in GROWING if spark_has(growing(name).schema)), 2))
def test_a_chunk_that_would_expand_to_gigabytes_is_refused(java: Harness, name: str, codec: Codec) -> None:
    batch = growing(name)
    asked = question(batch.schema, columns_of(batch.schema, typed=True), typed=True)
    chunks = [chunk_of(batch, codec, typed=True)]
    if lean.is_lean(batch.schema):
        source = lean_source(batch, codec)
        chunks.append(framed(pa.py_buffer(source.payload), batch.num_rows, codec, typed=True, version=LEAN_VERSION))
    for outcome in java.ask(method="open", chunks=[text(chunk) for chunk in chunks], **asked)["outcomes"]:
        assert "CorruptChunk: " in outcome
        assert "written out" in outcome or "records" in outcome


@pytest.mark.parametrize("name", [name for name in OTHERS if spark_has(OTHERS[name]().schema)])
def test_harmless_chunks_of_expandable_types_are_read(java: Harness, name: str) -> None:
    batch = OTHERS[name]()
    asked = question(batch.schema, columns_of(batch.schema, typed=True), typed=True)
    some = batch if batch.num_rows < 1 << 20 else batch.slice(0, 1000)
    chunks = [text(chunk_of(some, typed=True, version=version)) for version in versions_of(batch.schema)]
    assert set(java.ask(method="open", chunks=chunks, **asked)["outcomes"]) == {"read"}


def of_type(at: pa.DataType, values: Sequence[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(values, at)], names=["a"])


@pytest.mark.parametrize("codec", first_quick(Codec, 2))
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(KEYED, id="all kinds of keys and headers"),
        pytest.param(KEYED.slice(1, 3), id="slice"),
        pytest.param(records(value=[b"a", b"b"]), id="only values"),
        pytest.param(records(keys=[[b"a"], [b"b"]], value=[b"v" * 1000] * 2), id="one key each"),
        pytest.param(records(value=[b"%d" % n for n in range(1000)]), id="many"),
        pytest.param(records(value=[b"%d," % n * n for n in range(300)]), id="several blocks of a codec"),
        pytest.param(KEYED.slice(0, 0), id="empty"),
    ],
)
def test_records_have_the_same_columns_as_in_python(java: Harness, batch: pa.RecordBatch, codec: Codec) -> None:
    require_same(java, batch, typed=False, codec=codec)


@pytest.mark.parametrize(
    "names",
    [
        ["value"],
        ["timestamp", "value"],
        ["headers", "key"],
        ["offset", "keys", "stream"],
        ["entry", "streamlet", "offset", "stream"],
        list(reversed(ALL_COLUMNS.names)),
        [],
    ],
    ids=lambda names: ",".join(names) or "none",
)
def test_only_requested_columns_are_read_in_the_requested_order(java: Harness, names: list[str]) -> None:
    wanted = StructType([ALL_COLUMNS[name] for name in names])
    for batch in (KEYED, KEYED.slice(0, 0)):
        require_same(java, batch, wanted, typed=False)


def test_the_payload_is_not_decoded_for_columns_of_the_position(java: Harness) -> None:
    chunk = chunk_of(KEYED)
    broken = chunk[:HEADER_BYTES] + b"\xff" * (len(chunk) - HEADER_BYTES)
    place = StructType([ALL_COLUMNS[name] for name in ("offset", "stream", "streamlet", "entry")])
    none = StructType([])

    answer = loaded(java, [(broken, 0)], DEFAULT_SCHEMA, place, typed=False)
    count = loaded(java, [(broken, 2)], DEFAULT_SCHEMA, none, typed=False)

    assert answer == {"batches": [[[FIRST_RECORD + n, "events", 3, 1] for n in range(5)]]}
    assert count == {"batches": [[[], [], []]]}


@pytest.mark.parametrize("skip", [0, 1, 4, 5])
def test_skipping_leaves_out_the_first_records(java: Harness, skip: int) -> None:
    chunk, compact = (chunk_of(KEYED, version=version) for version in VERSIONS)
    rows = shaped(KEYED, chunk, ALL_COLUMNS, typed=False)

    chunks = [(chunk, skip), (compact, skip), (chunk, 0), (compact, 0)]
    answer = loaded(java, chunks, DEFAULT_SCHEMA, ALL_COLUMNS, typed=False)

    assert answer == {"batches": [rows[skip:], rows[skip:], rows, rows]}


@pytest.mark.parametrize("version", VERSIONS)
def test_skipping_works_for_all_types(java: Harness, version: int) -> None:
    batch = of_all_types(version)
    wanted = columns_of(batch.schema, typed=True)
    chunk = chunk_of(batch, typed=True, version=version)

    answer = loaded(java, [(chunk, 1)], batch.schema, wanted, typed=True)

    assert answer == {"batches": [shaped(batch, chunk, wanted, typed=True)[1:]]}


def test_a_reader_loads_chunks_of_all_sizes_in_turn(java: Harness) -> None:
    batches = [KEYED, KEYED.slice(0, 0), records(value=[b"v"] * 3000), KEYED.slice(2), records(value=[None])]
    kinds = [(codec, version) for codec in Codec for version in VERSIONS]
    chunks = [(chunk_of(batch, codec, version=version), 0) for batch in batches for codec, version in kinds]

    answer = loaded(java, chunks, DEFAULT_SCHEMA, ALL_COLUMNS, typed=False)

    expected = [shaped(batch, chunk_of(batch), ALL_COLUMNS, typed=False) for batch in batches for _ in kinds]
    assert answer == {"batches": expected}


DAY = date(2024, 2, 29)
NOW = datetime(2024, 2, 29, 12, 30, 15, tzinfo=UTC)
LONG_AGO = datetime(1969, 12, 31, tzinfo=UTC)
LONG_TEXT = "longer than the twelve bytes of a view"
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.bool_(), [True, None, False]),
    (pa.int8(), [-128, None, 127]),
    (pa.int16(), [-(2**15), None, 2**15 - 1]),
    (pa.int32(), [-(2**31), None, 2**31 - 1]),
    (pa.int64(), [-(2**63), None, 2**63 - 1]),
    (pa.uint8(), [0, None, 255]),
    (pa.uint16(), [0, None, 2**16 - 1]),
    (pa.uint32(), [0, None, 2**32 - 1]),
    (pa.uint64(), [0, None, 2**64 - 1]),
    (pa.float16(), [1.5, None, -2.25]),
    (pa.float32(), [1.5, None, -0.1]),
    (pa.float64(), [1.5, None, 0.1]),
    (pa.decimal256(5, 2), [Decimal("123.45"), None, Decimal("-0.01")]),
    (pa.decimal128(10, 2), [Decimal("12345678.90"), None, Decimal("-0.01")]),
    (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), None, Decimal(-1)]),
    (pa.decimal256(38, 0), [Decimal(10**38 - 1), None, Decimal(1 - 10**38)]),
    (pa.string(), ["", None, "\u00e4\u20ac\U0001f600"]),
    (pa.large_string(), ["", None, LONG_TEXT]),
    (pa.string_view(), ["short", None, LONG_TEXT]),
    (pa.binary(), [b"", None, b"\x00\xff"]),
    (pa.large_binary(), [b"", None, LONG_TEXT.encode()]),
    (pa.binary_view(), [b"", None, LONG_TEXT.encode()]),
    (pa.binary(3), [b"abc", None, b"\x00\xff\x01"]),
    (pa.date32(), [DAY, None, date(1969, 12, 31)]),
    (pa.date64(), [DAY, None, date(1969, 12, 31)]),
    (pa.time32("s"), [time(1, 2, 3), None, time(23, 59, 59)]),
    (pa.time32("ms"), [time(1, 2, 3, 4000), None, time(0)]),
    (pa.time64("us"), [time(1, 2, 3, 4), None, time(23, 59, 59, 999999)]),
    (pa.time64("ns"), [time(1, 2, 3, 4), None, time(0)]),
    *[
        (pa.timestamp(unit, tz=tz), [NOW, None, LONG_AGO])
        for unit in ("s", "ms", "us", "ns")
        for tz in (None, "UTC", "Europe/Paris")
    ],
    *[
        (pa.duration(unit), [timedelta(days=3, seconds=4), None, timedelta(seconds=-1)])
        for unit in ("s", "ms", "us", "ns")
    ],
    (pa.null(), [None, None, None]),
    (pa.list_(pa.uint8()), [[1, None, 255], None, []]),
    (pa.large_list(pa.string()), [["a", None], None, []]),
    (pa.list_(pa.uint16(), 2), [[1, 2], None, [3, None]]),
    (pa.map_(pa.string(), pa.uint32()), [[("a", 1), ("b", None)], None, []]),
    (pa.struct([("x", pa.uint8()), ("y", pa.string_view())]), [{"x": 1, "y": LONG_TEXT}, None, {"x": None}]),
    (pa.list_(pa.list_(pa.time32("s"))), [[[time(1)], None, []], None, []]),
    (pa.list_(pa.struct([("x", pa.list_(pa.uint64()))])), [[{"x": [2**64 - 1]}, None], None, [{"x": None}]]),
    (pa.list_(pa.map_(pa.binary_view(), pa.float16())), [[[(b"k", 0.5)], None], None, [[]]]),
    (pa.map_(pa.uint8(), pa.list_(pa.string_view())), [[(1, ["a", None]), (2, None)], None, []]),
    (pa.map_(pa.string(), pa.struct([("x", pa.timestamp("ms"))])), [[("a", {"x": NOW})], None, [("b", None)]]),
    (pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.int64())))]), [{"m": [("a", [1])]}, None, {"m": None}]),
    (pa.struct([("s", pa.struct([("n", pa.null()), ("d", pa.date64())]))]), [{"s": {"d": DAY}}, None, {"s": None}]),
    (pa.large_list(pa.list_(pa.bool_(), 2)), [[[True, None], None], None, [[False, True]]]),
]


def _types() -> Iterator[Any]:
    """All types with their values; quick tests use the first type of each kind."""
    kinds: set[int] = set()
    for at, values in TYPES:
        yield pytest.param(at, values, id=str(at), marks=[pytest.mark.slow] if at.id in kinds else [])
        kinds.add(at.id)


each_type = pytest.mark.parametrize(("at", "values"), list(_types()))


def of_all_types(version: int, times: int = 1) -> pa.RecordBatch:
    """A column of each type that chunks of this version can have."""
    columns = [pa.array(values * times, at) for at, values in TYPES]
    there = [each for each in columns if version in versions_of(pa.schema([("a", each.type)]))]
    return pa.RecordBatch.from_arrays(there, names=[f"c{n}" for n in range(len(there))])


@each_type
def test_a_typed_column_has_the_same_type_and_values_as_in_python(
    java: Harness, at: pa.DataType, values: list[Any]
) -> None:
    batch = of_type(at, values)
    for codec in Codec:
        require_same(java, batch, codec=codec)
    require_same(java, of_type(at, values[:1] * 70))  # no nulls, and more values than bits in a word
    require_same(java, of_type(at, [None] * 3))
    require_same(java, of_type(at, []))
    require_same(java, of_type(at, [*values * 5]).slice(4, 9))
    require_same(java, of_type(at, values * 600))  # too many values for the packed form of a lean payload


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_and_nan_are_kept(java: Harness, value: float) -> None:
    for at in (pa.float16(), pa.float32(), pa.float64()):
        chunk = chunk_of(batch := of_type(at, [value, math.nan]), typed=True)
        answer = loaded(java, [(chunk, 0)], batch.schema, columns_of(batch.schema, typed=True), typed=True)
        assert answer == {"batches": [[["Infinity" if value > 0 else "-Infinity"], ["NaN"]]]}


@pytest.mark.parametrize("version", VERSIONS)
def test_columns_that_are_not_requested_are_skipped(java: Harness, version: int) -> None:
    batch = of_all_types(version)
    names = batch.schema.names
    everything = columns_of(batch.schema, typed=True)
    for codec in Codec:
        require_same(java, batch, everything, codec=codec)
    for name in random.Random(version).sample(names, examples(len(names), quick=6)):
        require_same(java, batch, StructType([everything[name]]))
    require_same(java, batch, StructType([everything[name] for name in reversed(names)]))


def test_a_column_that_a_chunk_lacks_is_null_or_an_error(java: Harness) -> None:
    batch = of_type(pa.int32(), [1, 2])
    wanted = StructType([StructField("new", LongType()), StructField("a", IntegerType())])
    chunk = chunk_of(batch, typed=True)
    require_same(java, batch, wanted)

    strict = StructType([StructField("new", LongType(), nullable=False)])
    answer = loaded(java, [(chunk, 0)], batch.schema, strict, typed=True)

    assert answer["error"].startswith("SchemaMismatch: a chunk of stream 'events' has no column 'new'")


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_of_structs_are_found_by_name(java: Harness, version: int) -> None:
    """Spark requests only the fields of a struct that a query uses, wherever the struct is."""
    words = pa.string() if version == LEAN_VERSION else pa.string_view()
    inner = pa.struct([("a", pa.int32()), ("b", words), ("c", pa.list_(pa.uint8()))])
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([{"a": 1, "b": LONG_TEXT, "c": [1]}, None], inner),
            pa.array([[{"a": 2, "b": "x", "c": [2, 3]}], []], pa.list_(inner)),
            pa.array([[("k", {"a": 3, "b": None, "c": None})], None], pa.map_(pa.string(), inner)),
        ],
        names=["s", "l", "m"],
    )
    pruned = StructType([StructField("c", ArrayType(ShortType()))])
    wanted = StructType(
        [
            StructField("m", MapType(StringType(), pruned)),
            StructField("l", ArrayType(pruned)),
            StructField("s", pruned),
        ]
    )

    chunk = chunk_of(batch, typed=True, version=version)
    answer = loaded(java, [(chunk, 0)], batch.schema, wanted, typed=True)

    assert answer == {"batches": [[[[["k", [None]]], [[[2, 3]]], [[1]]], [None, [], None]]]}

    names = StructType([StructField("headers", ArrayType(StructType([StructField("key", StringType())])))])
    answer = loaded(java, [(chunk_of(KEYED, version=version), 0)], DEFAULT_SCHEMA, names, typed=False)
    assert answer == {"batches": [[[[["h"], ["g"]]], [None], [[]], [[["\u00fc"]]], [[["i"]]]]]}


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (pa.timestamp("ns"), 1001, "would lose data"),
        (pa.timestamp("s", tz="UTC"), 2**62, "would be out of bounds"),
        (pa.duration("ns"), -1, "would lose data"),
        (pa.time64("us"), 2**62, "would be out of bounds"),
        (pa.date64(), 86_400_001, "would lose data"),
    ],
    ids=str,
)
def test_a_time_that_spark_cannot_represent_is_an_error_as_in_python(
    java: Harness, at: pa.DataType, value: int, why: str
) -> None:
    column = pa.array([None, value], pa.int64()).view(at)
    batch = pa.RecordBatch.from_arrays([column], names=["a"])
    wanted = columns_of(batch.schema, typed=True)
    chunk = chunk_of(batch, typed=True)
    with pytest.raises(SchemaMismatch, match="column 'a' has a value that Spark does not have"):
        shaped(batch, chunk, wanted, typed=True)

    answer = loaded(java, [(chunk, 0)], batch.schema, wanted, typed=True)

    assert answer["error"].startswith(f"SchemaMismatch: {at}".split(", tz", 1)[0].split("[day", 1)[0])
    assert f"{why}: {value}" in answer["error"]


def test_unsupported_types_are_reported_before_reading(java: Harness) -> None:
    def why(schema: pa.Schema, wanted: StructType, *, typed: bool = True) -> str | None:
        answer: str | None = java.ask(method="unsupported", **question(schema, wanted, typed=typed))["unsupported"]
        return answer

    for at, _ in TYPES:
        schema = pa.schema([("a", at)])
        assert why(schema, columns_of(schema, typed=True)) is None
    assert why(DEFAULT_SCHEMA, ALL_COLUMNS, typed=False) is None

    # Arrow's Java library lacks these types.
    narrow = pa.schema([("a", pa.int32()), ("b", pa.decimal32(5, 2))])
    assert "128-bit" in str(why(narrow, StructType([StructField("a", IntegerType())])))
    encoded = pa.schema([("a", pa.dictionary(pa.int8(), pa.string())), ("b", pa.int32())])
    assert "field 'a'" in str(why(encoded, StructType([StructField("a", StringType())])))
    assert "field 'a'" in str(why(encoded, StructType([StructField("b", IntegerType())])))
    text_as_number = why(pa.schema([("a", pa.string())]), StructType([StructField("a", LongType())]))
    assert text_as_number == "field 'a' has the Arrow type Utf8, which the columnar engine does not read as bigint"
    bytes_as_array = why(pa.schema([("a", pa.binary())]), StructType([StructField("a", ArrayType(BinaryType()))]))
    assert "does not read as array<binary>" in str(bytes_as_array)


def test_a_chunk_with_an_unfit_payload_is_corrupt(java: Harness) -> None:
    def error(chunk: bytes) -> str:
        return str(loaded(java, [(chunk, 0)], DEFAULT_SCHEMA, ALL_COLUMNS, typed=False)["error"])

    chunk = chunk_of(KEYED)
    garbage = chunk[:HEADER_BYTES] + b"\xff" * (len(chunk) - HEADER_BYTES)
    other_type = chunk_of(of_type(pa.int32(), [1, 2]))
    schema = chunk[:HEADER_BYTES] + schema_to_bytes(DEFAULT_SCHEMA)[: len(chunk) - HEADER_BYTES]
    schema += bytes(len(chunk) - len(schema))
    fewer = chunk[:HEADER_BYTES] + bytes(encode_payload(KEYED.slice(1)))
    fewer += bytes(len(chunk) - len(fewer))
    for corrupt in (garbage, other_type, schema, fewer):
        assert error(corrupt).startswith("CorruptChunk: chunk payload is not an Arrow record batch of the expected")


def lean_nodes(*parts: bytes, body: bytes = b"") -> pa.Buffer:
    """A lean payload of these nodes, without compression."""
    nodes = b"".join(parts)
    return pa.py_buffer(put_prefix(nodes, 0, compressed=False) + body)


NULLS, VALIDITY = bytes([Kind.NULL]), 0x20
FIXED_8, ONE = Kind.FIXED_8, 1 << 6
LENGTHS_1, LENGTHS_2, SAME = 2 << 6, 3 << 6, 1 << 6
INT64 = pa.int64()
UNFIT = {
    "no prefix": (INT64, pa.py_buffer(b"\1")),
    "nodes cut short": (INT64, pa.py_buffer(b"\xff\xff" + bytes(20))),
    "no node": (INT64, lean_nodes()),
    "a node too many": (INT64, lean_nodes(NULLS, NULLS)),
    "another kind": (INT64, lean_nodes(bytes([Kind.FIXED_4]), body=bytes(12))),
    "no kind": (INT64, lean_nodes(b"\x1f")),
    "nulls with validity": (INT64, lean_nodes(bytes([VALIDITY]), body=b"\0")),
    "one without it": (INT64, lean_nodes(bytes([FIXED_8 | ONE]), bytes(7))),
    "too short": (INT64, lean_nodes(bytes([FIXED_8]), body=bytes(23))),
    "too long": (INT64, lean_nodes(bytes([FIXED_8]), body=bytes(25))),
    "no encoding": (INT64, lean_nodes(bytes([FIXED_8 | 3 << 6]))),
    "wide deltas": (INT64, lean_nodes(bytes([FIXED_8 | 2 << 6]), bytes(8), b"\x08", body=bytes(24))),
    "negative deltas": (INT64, lean_nodes(bytes([FIXED_8 | 2 << 6]), bytes(8), b"\xff", body=bytes(24))),
    "a bit that is 2": (pa.bool_(), lean_nodes(bytes([Kind.BITS | ONE, 2]))),
    "a bit that is 255": (pa.bool_(), lean_nodes(bytes([Kind.BITS | ONE, 255]))),
    "another width": (pa.binary(4), lean_nodes(bytes([Kind.FIXED, 5]), body=bytes(15))),
    "one of a width": (pa.binary(4), lean_nodes(bytes([Kind.FIXED | ONE, 4]), bytes(4))),
    "an endless number": (pa.binary(), lean_nodes(bytes([Kind.BINARY | SAME]), b"\xff" * 12)),
    "a number that is too large": (pa.large_binary(), lean_nodes(bytes([Kind.LARGE_BINARY]), put_varint(2**40 + 1))),
    "more than offsets say": (pa.binary(), lean_nodes(bytes([Kind.BINARY]), put_varint(2**31), body=bytes(16))),
    "uneven": (pa.binary(), lean_nodes(bytes([Kind.BINARY | SAME, 4]), body=bytes(4))),
    "lengths that are less": (pa.binary(), lean_nodes(bytes([Kind.BINARY | LENGTHS_1, 4]), body=b"\1\1\1abcd")),
    "lengths that are more": (pa.binary(), lean_nodes(bytes([Kind.BINARY | LENGTHS_2, 1]), body=b"\xff" * 6 + b"a")),
    "offsets that descend": (pa.binary(), lean_nodes(bytes([Kind.BINARY, 1]), body=pack("<4i", 0, 1, 0, 1) + b"a")),
    "offsets below": (pa.binary(), lean_nodes(bytes([Kind.BINARY, 1]), body=pack("<4i", 0, -9, 0, 1) + b"a")),
    "offsets from 1": (pa.binary(), lean_nodes(bytes([Kind.BINARY, 1]), body=pack("<4i", 1, 1, 1, 1) + b"a")),
    "offsets beyond": (pa.binary(), lean_nodes(bytes([Kind.BINARY, 1]), body=pack("<4i", 0, 1, 1, 2) + b"a")),
    "offsets that end early": (pa.binary(), lean_nodes(bytes([Kind.BINARY, 2]), body=pack("<4i", 0, 1, 1, 1) + b"ab")),
    "large offsets": (
        pa.large_binary(),
        lean_nodes(bytes([Kind.LARGE_BINARY, 1]), body=pack("<4q", 0, 1 << 62, -1, 1) + b"a"),
    ),
    "lists of too few": (pa.list_(INT64), lean_nodes(bytes([Kind.LIST | SAME, 6, FIXED_8]), body=bytes(8 * 5))),
    "another number of each": (pa.list_(INT64, 2), lean_nodes(bytes([Kind.FIXED_LIST, 3]), NULLS)),
    "another number of fields": (pa.struct([("a", INT64)]), lean_nodes(bytes([Kind.STRUCT, 2]), NULLS, NULLS)),
    "a struct with an encoding": (pa.struct([("a", INT64)]), lean_nodes(bytes([Kind.STRUCT | ONE, 1]), NULLS)),
    "a map of nulls": (pa.map_(INT64, INT64), lean_nodes(bytes([Kind.LIST | SAME, 3]), NULLS)),
    "a map with null keys": (
        pa.map_(INT64, INT64),
        lean_nodes(bytes([Kind.LIST | SAME, 3, Kind.STRUCT, 2]), NULLS, NULLS),
    ),
    "a map with bits for its keys": (
        pa.map_(INT64, INT64),
        lean_nodes(
            bytes([Kind.LIST | SAME, 3, Kind.STRUCT, 2, Kind.FIXED_8 | VALIDITY]), NULLS, body=b"\7" + bytes(31)
        ),
    ),
    "a map with a null": (
        pa.map_(INT64, INT64),
        lean_nodes(bytes([Kind.LIST | SAME, 3, Kind.STRUCT | VALIDITY, 2]), NULLS, NULLS, body=b"\1"),
    ),
}


@pytest.mark.parametrize(("at", "payload"), UNFIT.values(), ids=UNFIT)
def test_an_invalid_lean_payload_is_refused_as_in_python(java: Harness, at: pa.DataType, payload: pa.Buffer) -> None:
    schema = pa.schema([("a", at)])
    with pytest.raises(CorruptChunk):
        lean.decode(payload, schema, records=3, codec=None, bytes_max=1 << 27, trusted=False)
    chunk = framed(payload, 3, typed=True, version=LEAN_VERSION)
    answer = loaded(java, [(chunk, 0)], schema, columns_of(schema, typed=True), typed=True)
    assert answer["error"].startswith("CorruptChunk: chunk payload is not lean data of the schema: ")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [[None, 1], [None, None]], ids=["some", "all"])
def test_nulls_in_a_column_that_is_not_nullable_are_refused(
    java: Harness, values: list[int | None], version: int
) -> None:
    """Spark would take them for zeros, because it does not look for nulls in such a column."""
    schema = pa.schema([pa.field("a", INT64, nullable=False)])
    chunk = chunk_of(pa.RecordBatch.from_pydict({"a": pa.array(values, INT64)}), typed=True, version=version)
    answer = loaded(java, [(chunk, 0)], schema, columns_of(schema, typed=True), typed=True)
    assert answer["error"].startswith("CorruptChunk: ")
    assert "null" in answer["error"]


def test_a_map_with_null_keys_in_an_arrow_message_is_refused(java: Harness) -> None:
    written = pa.RecordBatch.from_pydict(
        {"a": pa.array([[{"key": None, "value": 1}]], pa.list_(pa.struct([("key", INT64), ("value", INT64)])))}
    )
    schema = pa.schema([("a", pa.map_(INT64, INT64))])
    chunk = chunk_of(written, typed=True, version=ARROW_VERSION)
    answer = loaded(java, [(chunk, 0)], schema, columns_of(schema, typed=True), typed=True)
    assert "nulls in 'key', which is not nullable" in answer["error"]


@pytest.mark.parametrize(("entries", "where"), [([{"key": None, "value": b"x"}], "key"), ([None], "entries")])
def test_headers_without_a_name_in_an_arrow_message_are_refused(java: Harness, entries: list[Any], where: str) -> None:
    """In Spark, headers are lists of structs."""
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    written = KEYED.slice(0, 1).set_column(3, "headers", pa.array([entries], pairs))
    answer = loaded(java, [(chunk_of(written, version=ARROW_VERSION), 0)], DEFAULT_SCHEMA, ALL_COLUMNS, typed=False)
    assert f"1 nulls in '{where}', which is not nullable" in answer["error"]


@pytest.mark.parametrize("kind", [INT64, pa.list_(INT64)], ids=str)
@pytest.mark.parametrize("said", [0, 1, 2, 3, -1, -2])
def test_the_null_count_of_an_arrow_message_is_checked(java: Harness, kind: pa.DataType, said: int) -> None:
    """A count of 0 means no nulls, whatever the bits are; -1 leaves the count open."""
    schema = pa.schema([("a", kind)])
    value = 1 if kind == INT64 else [1]
    batch = pa.RecordBatch.from_arrays([pa.array([None, value, None], kind)], schema=schema)
    message = Message(encode_payload(batch).to_pybytes(), schema, None)
    message.nodes[0] = (3, said)
    payload = message.to_bytes()
    chunk = framed(pa.py_buffer(payload), 3, typed=True, version=ARROW_VERSION)
    answer = loaded(java, [(chunk, 0)], schema, columns_of(schema, typed=True), typed=True)
    try:
        batch = decode_payload(payload, schema)
    except CorruptChunk:
        assert answer["error"].startswith("CorruptChunk: ")
    else:
        assert [row[0] is None for row in answer["batches"][0]] == batch.column(0).is_null().to_pylist()
        assert said in {0, -1, 2}


def test_a_null_node_of_a_lean_payload_makes_its_children_null(java: Harness) -> None:
    inner = pa.struct([("a", pa.list_(INT64, 2)), ("b", pa.map_(pa.string(), pa.bool_())), ("c", pa.string_view())])
    schema = pa.schema([("a", pa.list_(inner, 2)), ("b", inner), ("c", pa.int16())])
    payload = lean_nodes(NULLS, bytes([Kind.STRUCT, 3]), NULLS, NULLS, NULLS, bytes([Kind.FIXED_2 | ONE]), b"\7\0")
    chunk = framed(payload, 2, typed=True, version=LEAN_VERSION)
    wanted = columns_of(schema, typed=True)
    answer = loaded(java, [(chunk, 0)], schema, wanted, typed=True)
    assert answer == {"batches": [[[None, [None, None, None], 7]] * 2]}
    many = framed(payload, 1 << 16, typed=True, version=LEAN_VERSION)
    assert len(loaded(java, [(many, 0)], schema, wanted, typed=True)["batches"][0]) == 1 << 16

    wide = pa.schema([("a", pa.list_(INT64, 10_000))])
    chunk = framed(lean_nodes(NULLS), 1 << 16, typed=True, version=LEAN_VERSION)
    answer = loaded(java, [(chunk, 0)], wide, columns_of(wide, typed=True), typed=True)
    assert "when each is written out" in answer["error"]


def test_the_number_of_records_without_bytes_is_bounded(java: Harness) -> None:
    schema = pa.schema([("a", INT64)])
    payload = lean_nodes(bytes([FIXED_8 | ONE]), bytes(8))
    for records, fits in ((1 << 16, True), ((1 << 16) + 1, False), ((1 << 32) - 1, False)):
        chunk = framed(payload, records, typed=True, version=LEAN_VERSION)
        (outcome,) = java.ask(
            method="open", chunks=[text(chunk)], **question(schema, columns_of(schema, typed=True), typed=True)
        )["outcomes"]
        assert outcome == "read" if fits else f"that say to be {records} records" in outcome


def test_a_mutated_lean_payload_is_refused_where_python_refuses_it(java: Harness) -> None:
    """There are two exceptions: LZ4's own checks, because a chunk has its own checksum; and text and values outside
    their type, such as decimals beyond their precision, which Spark accepts unchanged.
    """
    outcomes: Counter[tuple[str, bool]] = Counter()
    for source in whole():
        schema, typed = source.batch.schema, not source.batch.schema.equals(DEFAULT_SCHEMA)
        if source.version != LEAN_VERSION:
            continue
        payloads = [mutated(source, random.Random(seed)) for seed in range(40)]
        chunks = [
            framed(pa.py_buffer(each), source.batch.num_rows, source.codec, typed=typed, version=LEAN_VERSION)
            for each in payloads
        ]
        wanted = columns_of(schema, typed=True) if typed else ALL_COLUMNS
        asked = question(schema, wanted, typed=typed)
        answer = java.ask(method="open", chunks=[text(chunk) for chunk in chunks], **asked)
        for payload, outcome in zip(payloads, answer["outcomes"], strict=True):
            try:
                opened(source, payload)
                refused = ""
            except CorruptChunk as error:
                refused = error.message
            outcomes[outcome.partition(": ")[0], bool(refused)] += 1
            told = outcome == "read" or "CorruptChunk: " in outcome
            assert told, outcome
            taken = outcome == "read" and any(each in refused for each in ("text that", "LZ4", "do not fit the schema"))
            assert taken or (outcome == "read") != bool(refused), (refused, outcome)
    assert min(outcomes.values()) > 5


def flipped_everywhere(
    java: Harness,
    batch: pa.RecordBatch,
    codec: Codec,
    *,
    typed: bool,
    wanted: StructType,
    version: int = ARROW_VERSION,
) -> int:
    """Flip single bits, and load and read the chunk each time; return the number of errors.

    A chunk that can be joined is also loaded with another one behind it.
    """
    chunk = chunk_of(batch, codec, typed=typed, version=version)
    bits = range(8 * read_header(chunk).payload_bytes)
    most = examples(4_000, quick=300)
    flips = bits if len(bits) <= most else random.Random(batch.num_columns).sample(bits, most)
    asked = {"chunk": text(chunk), "flips": list(flips), **question(batch.schema, wanted, typed=typed)}
    answers = [java.ask(method="flip", **asked)]
    if version == LEAN_VERSION and codec == Codec.NONE:
        answers.append(java.ask(method="flip", behind=[text(chunk)], **asked))
    for answer in answers:
        assert "error" not in answer, json.dumps(answer)
        assert answer["corrupt"] + answer["read"] == len(flips)
        assert answer["corrupt"] == answers[0]["corrupt"]
    return int(answers[0]["corrupt"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("codec", list(Codec))
def test_any_flipped_bit_of_records_is_corrupt_or_harmless(java: Harness, codec: Codec, version: int) -> None:
    batch = pa.concat_batches([KEYED] * 4)
    assert flipped_everywhere(java, batch, codec, typed=False, wanted=ALL_COLUMNS, version=version) > 0


@each_type
def test_any_flipped_bit_of_a_typed_column_is_corrupt_or_harmless(
    java: Harness, at: pa.DataType, values: list[Any]
) -> None:
    batch = of_type(at, values * 3)
    wanted = columns_of(batch.schema, typed=True)
    for version in versions_of(batch.schema):
        assert flipped_everywhere(java, batch, Codec.NONE, typed=True, wanted=wanted, version=version) > 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("codec", first_quick(Codec, 2))
def test_a_loaded_chunk_can_be_read_after_its_bytes_were_overwritten(java: Harness, codec: Codec, version: int) -> None:
    typed = of_all_types(version, 20)
    for batch, wanted in ((KEYED, ALL_COLUMNS), (typed, columns_of(typed.schema, typed=True))):
        chunk = chunk_of(batch, codec, typed=batch is typed, version=version)
        answer = java.ask(
            method="rows",
            chunks=[{"bytes": text(chunk)}],
            scribbles=20,
            **question(batch.schema, wanted, typed=batch is typed),
        )
        assert answer == {"batches": []}


@pytest.mark.slow
def test_mutated_chunks_are_read_or_refused_as_corrupt(java: Harness) -> None:
    """A short run of ``make fuzz-chunks``."""
    from tests.chaos.chunks import mutated
    from tests.chaos.columnar_chunks import outcomes_of, word_of

    outcomes = Counter(word_of(outcome) for _, outcome in outcomes_of(java, 600, 7, mutated))
    assert set(outcomes) == {"read", "corrupt_chunk"}
    assert min(outcomes.values()) > 20
