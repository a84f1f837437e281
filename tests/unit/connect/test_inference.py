"""`kera.connect.files.inference` and `.numbers`: types for files without types, so that no value changes."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.connect.files.numbers import Scan
from kera.connect.files.reading import reading_of, schema_of
from kera.connect.files.text import Position
from kera.core.errors import SchemaMismatch


def read(
    tmp_path: Path, kind: str, text: str, schema: pa.Schema | None = None, *, inferred: bool = False
) -> tuple[list[pa.DataType], list[Any]]:
    """The inferred types of a file, and its rows."""
    path = tmp_path / f"x.{kind}"
    path.write_text(text)
    found = schema_of(str(path), kind) if schema is None else schema
    rows = [
        row
        for batch, _ in reading_of(str(path), kind, found, inferred=inferred).batches(Position(0), 1 << 20)
        for row in batch.to_pylist()
    ]
    return found.types, [tuple(row.values()) for row in rows]


@pytest.mark.parametrize(
    ("texts", "kind", "values"),
    [
        (["1", "-5"], pa.int64(), [1, -5]),
        (["9007199254740993", "12345678901234567890"], pa.uint64(), [9007199254740993, 12345678901234567890]),
        (["-9007199254740993", "12345678901234567890"], pa.decimal128(38, 0), None),
        (["0.1", "2.5"], pa.float64(), [0.1, 2.5]),
        (["0.1", "0.30000000000000004"], pa.float64(), [0.1, 0.30000000000000004]),
        (["1.5", "169299987.353451120001"], pa.decimal128(38, 12), None),
        (["9007199254740993", "1.5"], pa.decimal128(38, 1), None),
    ],
)
@pytest.mark.parametrize("kind_of_file", ["csv", "jsonl"])
def test_the_type_of_a_column_of_numbers_holds_all_of_them(
    tmp_path: Path, kind_of_file: str, texts: list[str], kind: pa.DataType, values: list[Any] | None
) -> None:
    lines = [f'{{"v": {text}}}' for text in texts] if kind_of_file == "jsonl" else ["v", *texts]
    types, rows = read(tmp_path, kind_of_file, "\n".join(lines) + "\n")
    assert types == [kind]
    assert [value for (value,) in rows] == ([Decimal(text) for text in texts] if values is None else values)


@pytest.mark.parametrize(
    "texts", [["01234", "1"], ["+49", "1"], ["-0", "1"], ["9" * 60, "1"], ["1e400"], ["1.5", "007"], ["nan", "inf"]]
)
def test_csv_numbers_that_no_numeric_type_keeps_as_written_are_text(tmp_path: Path, texts: list[str]) -> None:
    assert read(tmp_path, "csv", "\n".join(["v", *texts, ""])) == ([pa.string()], [(text,) for text in texts])


def test_a_given_column_of_integers_accepts_leading_zeros(tmp_path: Path) -> None:
    assert read(tmp_path, "csv", "v\n01234\n", pa.schema([("v", pa.int64())]))[1] == [(1234,)]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.decimal128(38, 1)])
@pytest.mark.parametrize("text", ["01234", "-01", '"007"', " 00", "+49"])
def test_a_code_after_a_sample_of_numbers_is_refused(tmp_path: Path, kind: pa.DataType, text: str) -> None:
    code = text.strip('" ')
    said = re.escape(f"column 'v': {code}, which {kind} would change, in line 3")
    schema = pa.schema([("t", pa.string()), ("v", kind)])
    with pytest.raises(SchemaMismatch, match=said):
        read(tmp_path, "csv", f"t,v\n0.5,1\n-0.5,{text}\n", schema, inferred=True)


@pytest.mark.parametrize("text", ["-0", "0x10"])
def test_an_integer_after_the_sample_that_would_change_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"column 'v': {text}, which int64 would change, in line 3"):
        read(tmp_path, "csv", f"v\n1\n{text}\n", pa.schema([("v", pa.int64())]), inferred=True)


def test_plain_numbers_beside_codes_and_times_are_read_exactly(tmp_path: Path) -> None:
    schema = pa.schema([("code", pa.string()), ("i", pa.int64()), ("f", pa.float64())])
    rows = [("007", 0, 0.5), ("07:30:00", -10, -0.5), ("+49", 100, 1e-9), ("-0", -1, -0.0)]
    text = "".join(f"{code},{i},{f}\n" for code, i, f in rows)
    assert read(tmp_path, "csv", f"code,i,f\n{text}", schema, inferred=True)[1] == rows


@pytest.mark.parametrize("count", [0, 1, 65_530, 65_540, 131_072])
@pytest.mark.parametrize(
    ("text", "short", "plain"),
    [
        (b"1.5,-0.25\n", True, True),
        (b"123456789.123456,1\n", True, True),
        (b"1234567890123456,1\n", False, True),
        (b"123456789.1234567,1\n", False, True),
        (b"2E5,1\n", False, True),
        (b"1,01\n", True, False),
        (b'1,"+1"\n', True, False),
    ],
)
def test_a_scan_finds_long_and_unusual_numbers_anywhere_in_a_block(
    text: bytes, short: bool, plain: bool, count: int
) -> None:
    found = Scan(b"a" * count + b"\n" + text)
    assert (found.is_short(), found.is_plain()) == (short, plain)


@pytest.mark.parametrize("text", ["9007199254740993", "169299987.353451120001", "1e400", "1e-400"])
def test_a_csv_number_that_a_float_cannot_hold_is_refused_with_line_and_column(tmp_path: Path, text: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"column 'v': {text}, which double cannot hold exactly, in line 3"):
        read(tmp_path, "csv", f"v\n1.5\n{text}\n", pa.schema([("v", pa.float64())]))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"v": 1}\n\n{"v": "x"}\n', r"x\.jsonl: line 3: .*changed from number to string"),
        ('{"v": 1}\n{"v": 1e400}\n', r"x\.jsonl: line 2: column 'v' is 1e400, which no type of numbers holds"),
        ('{"v": NaN}\n{"v": 9007199254740993}\n', "line 2: column 'v' is 9007199254740993, which no type"),
        ("[1]\n", r"x\.jsonl: line 1: this is a list"),
        ('{\n"v": 1}\n', r"x\.jsonl: line 1: the JSON is not complete at the end of the line"),
    ],
)
def test_json_lines_without_a_common_type_are_refused_with_the_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match=says):
        read(tmp_path, "jsonl", text)


def test_a_number_of_more_than_38_digits_is_a_longer_decimal(tmp_path: Path) -> None:
    assert read(tmp_path, "jsonl", f'{{"v": {"9" * 60}}}\n') == ([pa.decimal256(76, 0)], [(Decimal("9" * 60),)])


def test_numbers_within_lists_and_objects_keep_their_digits(tmp_path: Path) -> None:
    types, rows = read(tmp_path, "jsonl", '{"u": {"l": [{"k": [1, null, 12345678901234567890]}]}}\n')
    assert types == [pa.struct([("l", pa.list_(pa.struct([("k", pa.list_(pa.uint64()))])))])]
    assert rows == [({"l": [{"k": [1, None, 12345678901234567890]}]},)]
