"""Sizes, tables and column types as text."""

import pyarrow as pa
import pytest

from kera.cli._run import UsageError
from kera.cli._sizes import parse_size
from kera.cli._table import fields, format_time, table
from kera.cli.stream import parse_columns
from kera.core.base.sizes import format_size
from kera.core.base.spelling import plural


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8388608", 8 << 20),
        ("8MiB", 8 << 20),
        ("8 MiB", 8 << 20),
        ("1GB", 10**9),
        ("1.5KiB", 1536),
        ("1_000", 1000),
    ],
)
def test_a_size_has_an_optional_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "5x", "MiB", "-5MiB"])
def test_an_invalid_size_is_named_with_its_flag(text: str) -> None:
    with pytest.raises(UsageError, match=r"--arena-bytes: .* is not a size"):
        parse_size(text, name="--arena-bytes")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (100, "100 B"),
        (1024, "1 KiB"),
        (1500, "1.5 KiB"),
        (256 << 20, "256 MiB"),
        (3 << 50, "3 PiB"),
        (1 << 62, "4096 PiB"),
    ],
)
def test_sizes_are_shown_with_the_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text


def test_numbers_are_aligned_to_the_right_and_text_to_the_left() -> None:
    assert table(("NAME", "ROWS", "X"), [("a", 5, ""), ("longer", 1000, None)]).split("\n") == [
        "NAME    ROWS  X",
        "a          5  -",
        "longer  1000  -",
    ]


def test_fields_are_aligned_one_per_line() -> None:
    assert fields([("a", 1), ("long", "x\ny"), ("empty", "")], indent=" ").split("\n") == [
        " a      1",
        " long   x",
        "        y",
        " empty  -",
    ]
    assert fields([]) == ""


def test_only_one_takes_the_singular() -> None:
    assert [plural(n, "broker") for n in (0, 1, 2)] == ["0 brokers", "1 broker", "2 brokers"]


def test_columns_are_given_with_the_type_names_of_arrow() -> None:
    columns = [
        "id:int64",
        "at:timestamp[us, UTC]",
        "local:timestamp[ms]",
        "zoned:timestamp[ns, tz=Europe/Berlin]",
        "tags:list<string>",
        "deep:list<item: list<int8>>",
        "price:decimal128(10, 2)",
        "day:date32",
        "ok:bool",
    ]
    expected = pa.schema(
        [
            ("id", pa.int64()),
            ("at", pa.timestamp("us", "UTC")),
            ("local", pa.timestamp("ms")),
            ("zoned", pa.timestamp("ns", "Europe/Berlin")),
            ("tags", pa.list_(pa.string())),
            ("deep", pa.list_(pa.list_(pa.int8()))),
            ("price", pa.decimal128(10, 2)),
            ("day", pa.date32()),
            ("ok", pa.bool_()),
        ]
    )
    assert parse_columns(columns) == expected


def test_the_types_of_a_shown_schema_can_be_given_again() -> None:
    schema = parse_columns(
        ["a:timestamp[us, UTC]", "b:list<double>", "c:date32", "d:large_string", "e:decimal128(3, 1)"]
    )
    assert parse_columns([f"{field.name}:{field.type}" for field in schema]) == schema


@pytest.mark.parametrize("column", ["id", ":int64", "id:", "id:integer", "id:list<what>"])
def test_an_invalid_column_is_named(column: str) -> None:
    with pytest.raises(UsageError, match=f"--column {column}: "):
        parse_columns([column])


@pytest.mark.parametrize("time_us", [-(1 << 63), (1 << 63) - 1])
def test_a_time_beyond_the_years_of_python_is_shown_in_microseconds(time_us: int) -> None:
    assert format_time(time_us) == f"{time_us} µs"
