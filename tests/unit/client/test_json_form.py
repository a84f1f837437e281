"""`kera.client.json_form`: lines of JSON as records and rows, and the errors for wrong lines."""

import datetime
import json
from typing import Any

import pyarrow as pa
import pytest

from kera.client.json_form import laid_out, record_lines, records_of_lines, row_lines, rows_of_lines
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

UTC = datetime.UTC


def values(*lines: str) -> list[Any]:
    found: list[Any] = records_of_lines("\n".join(lines).encode()).column("value").to_pylist()
    return found


def test_a_line_gives_key_value_headers_and_timestamp() -> None:
    lines = [
        {"key": "k", "value": "v", "headers": {"h": "x", "n": 1}, "timestamp": 1_700_000_000_000_001},
        {"value": {"a": [1, "é"]}, "timestamp": "2026-01-02T03:04:05.000006Z"},
        {"keys": ["a", "b"], "value": None, "timestamp": "2026-01-02T03:04:05"},
        {"value_base64": "/w==", "key_base64": "AA==", "stream": "s", "streamlet": 0, "entry": 0, "offset": 7},
    ]
    batch = records_of_lines("\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode() + b"\n\n")

    batch.validate(full=True)
    assert batch.schema == DEFAULT_SCHEMA
    assert batch.column("keys").to_pylist() == [[b"k"], None, [b"a", b"b"], [b"\0"]]
    assert batch.column("value").to_pylist() == [b"v", '{"a": [1, "é"]}'.encode(), None, b"\xff"]
    assert batch.column("headers").to_pylist() == [[("h", b"x"), ("n", b"1")], None, None, None]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist()[:3] == [
        1_700_000_000_000_001,
        1_767_323_045_000_006,
        1_767_323_045_000_000,
    ]


@pytest.mark.parametrize(
    "text",
    [
        "169299987.353451120001",
        "1e400",
        "23958446825181076828",
        '{"a": 1, "a": 2}',
        '{ "a" :1.10 }',
        '{"base64": "AA=="}',
        "9" * 5000,
        "-0.0",
        "true",
    ],
)
def test_a_value_of_json_is_stored_byte_for_byte(text: str) -> None:
    assert values(f'{{"value": {text}}}') == [text.encode()]


def test_headers_are_pairs_in_their_order_and_may_repeat() -> None:
    line = '{"headers": [["a", "1"], ["b", {"base64": "/w=="}], ["a", null], ["", {"n": 1.10}]]}'
    (headers,) = records_of_lines(line.encode()).column("headers").to_pylist()
    assert headers == [("a", b"1"), ("b", b"\xff"), ("a", None), ("", b'{"n": 1.10}')]


def test_keys_that_are_not_text_are_base64_and_null_is_not_empty() -> None:
    keys = [None, [], [None], [b""], [b"\xff"], [b"a", b"\xff", None]]
    batch = pa.RecordBatch.from_pylist(
        [{"timestamp": 0, "keys": each, "value": b"", "headers": []} for each in keys], DEFAULT_SCHEMA
    )
    lines = record_lines(batch)
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [{name: row[name] for name in row if name.startswith("key")} for row in rows] == [
        {},
        {"keys": []},
        {"keys": [None]},
        {"key": ""},
        {"key_base64": "/w=="},
        {"keys": ["a", {"base64": "/w=="}, None]},
    ]
    assert records_of_lines(lines).equals(batch)


def test_byte_order_mark_crlf_blank_lines_and_a_missing_last_line_end_are_accepted() -> None:
    block = b'\xef\xbb\xbf{"value": "a"}\r\n\r\n  \n\t{"value": "b"} \n{"value": "c"}'
    assert records_of_lines(block).column("value").to_pylist() == [b"a", b"b", b"c"]
    schema = pa.schema([("value", pa.string())])
    assert rows_of_lines(block, schema).column("value").to_pylist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"not complete at the end of the line \(column 2\)"),
        ('{"value": "a', "not complete at the end"),
        ("[1]", "this is a list, and each line has to be a JSON object"),
        ("5", "this is 5, and each line"),
        ('{"val": 1}', "unknown field 'val'; a record has headers, key"),
        ('{"headers": 1}', "headers is 1, not a list of names and values"),
        ('{"headers": [["a"]]}', r"headers\[0\] is a list, not a list of a name and a value"),
        ('{"headers": [[1, "a"]]}', r"headers\[0\] is a list, not"),
        ('{"headers": [["a", {"base64": "!"}]]}', "header 'a' is the text \"!\", which is not base64"),
        ('{"keys": 5}', "keys is 5, not a list"),
        ('{"keys": "abc"}', 'keys is the text "abc", not a list'),
        ('{"keys": {"a": 1}}', "keys is an object, not a list"),
        ('{"key": "a", "keys": ["a"]}', "key and keys are both given"),
        ('{"value": "a", "value_base64": "YQ=="}', "value and value_base64 are both given"),
        ('{"timestamp": 1.5}', "timestamp is 1.5, not a timestamp"),
        ('{"timestamp": true}', "timestamp is true, not a timestamp"),
        ('{"timestamp": 1e30}', "timestamp is 1e30, not a timestamp"),
        ('{"timestamp": 100000000000000000000000}', "timestamp is 1000.*out of the range"),
        ('{"timestamp": "noon"}', 'timestamp is the text "noon", not a time as in'),
        ('{"timestamp": "2026-01-02T03:04:05.1234567Z"}', "which has more digits than timestamp"),
        ('{"timestamp": "2026-02-30"}', "which is not a date"),
        ('{"value_base64": "!"}', 'value_base64 is the text "!", which is not base64'),
        ('{"value_base64": 5}', "value_base64 is 5, not base64 in a string"),
        ('{"value": "\\ud800"}', "value is text with one half of a surrogate pair"),
        ('{"value": NaN}', "NaN is not JSON"),
        ('{"value": [1,]}', "not JSON: .* in column 14"),
        ('{"value": 1} {"value": 2}', "more follows behind the JSON object, in column 14"),
        ('{"value": 1, "value": 2}', "the name 'value' comes twice"),
        ('{"value":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ("[" * 5000, "nested too deep|not complete"),
    ],
)
def test_the_error_names_the_line_that_is_not_a_record(line: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match="^line 8: .*" + says) as caught:
        records_of_lines(b'{"value": "fine"}\n' + line.encode(), first_line=7)
    assert caught.value.attributes == {"line": 8}
    assert len(caught.value.message) < 250


def test_the_error_names_line_and_column_of_a_byte_that_is_not_utf_8() -> None:
    with pytest.raises(SchemaMismatch, match="line 2: byte 0xff in column 12 is not UTF-8"):
        records_of_lines(b'{}\n{"value": "\xff"}\n')


SCHEMA = pa.schema(
    [
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("n", pa.int32()),
        ("tags", pa.list_(pa.string())),
        ("raw", pa.binary()),
    ]
)


def test_rows_of_a_typed_stream_come_from_objects() -> None:
    batch = rows_of_lines(
        b'{"day": "2026-01-02", "at": "2026-01-02T03:04:05Z", "n": 1, "tags": ["a"], "raw": "x"}\n{"n": 2}\n',
        SCHEMA,
    )

    assert batch.schema == SCHEMA
    assert batch.to_pylist() == [
        {
            "day": datetime.date(2026, 1, 2),
            "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "n": 1,
            "tags": ["a"],
            "raw": b"x",
        },
        {"day": None, "at": None, "n": 2, "tags": None, "raw": None},
    ]
    assert rows_of_lines(b"\n", SCHEMA).num_rows == 0


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"m": 1}', "there is no column 'm' in the stream; it has day, at, n, tags, raw"),
        ('{"n": "x"}', "column 'n' is the text \"x\", not an integer"),
        ('{"n": 1.0}', "column 'n' is 1.0, not an integer"),
        ('{"n": true}', "column 'n' is true, not an integer"),
        ('{"n": 5000000000}', "column 'n' is 5000000000, which is out of the range of int32"),
        ('{"n": 1, "n": 2}', "the name 'n' comes twice"),
        ('{"day": "noon"}', "column 'day' is the text \"noon\", not a date"),
        ('{"tags": ["a", 5]}', r"column 'tags\[1\]' is 5, not text"),
        ('{"raw": {"base64": "/w="}}', "column 'raw' is the text \"/w=\", which is not base64"),
        ("{", "not complete"),
        ("{}{}", "more follows behind the JSON object, in column 3"),
    ],
)
def test_the_error_names_line_and_column_of_a_row_that_does_not_fit(row: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match="^line 7: .*" + says) as caught:
        rows_of_lines(b'{"n": 1}\n\n' + row.encode() + b"\n", SCHEMA, first_line=5)
    assert caught.value.attributes == {"line": 7}


def test_an_object_on_several_lines_is_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"line 1: the JSON is not complete at the end of the line .*jq -c"):
        rows_of_lines(b'{\n "n": 1\n}\n', SCHEMA)


NESTED = pa.schema(
    [("s", pa.struct([("l", pa.list_(pa.struct([("x", pa.float32())])))])), ("m", pa.map_(pa.int8(), pa.int8()))]
)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"s": {"l": [{"x": 1}, {"x": "y"}]}}', r"column 's\.l\[1\]\.x' is the text \"y\", not a number"),
        ('{"s": {"l": [{"x": 1e39}]}}', r"column 's\.l\[0\]\.x' is 1e39, which is out of the range of float"),
        ('{"s": {"y": 1}}', "column 's' is an object with the field 'y', which the type does not have"),
        ('{"m": [[1, 2], [null, 3]]}', r"column 'm\[1\]\[0\]' is null, which it may not be"),
        ('{"m": [[1, 2, 3]]}', r"column 'm\[0\]' is a list, not a list of key and value"),
    ],
)
def test_the_error_names_the_path_of_a_wrong_value_within_a_column(row: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match=says):
        rows_of_lines(row.encode(), NESTED)


def test_the_error_for_a_null_field_names_the_line_of_its_struct() -> None:
    schema = pa.schema([("s", pa.struct([pa.field("x", pa.int8(), nullable=False)]))])
    with pytest.raises(SchemaMismatch, match=r"line 3: column 's\.x' is null, which it may not be"):
        rows_of_lines(b'{"s": null}\n{"s": {"x": 1}}\n{"s": {}}\n', schema)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.float64(), "9007199254740993"),
        (pa.float64(), "169299987.353451120001"),
        (pa.float64(), "1e400"),
        (pa.float64(), "1e-400"),
        (pa.float32(), "16777217"),
        (pa.int64(), "9223372036854775808"),
        (pa.decimal128(5, 2), "1.001"),
        (pa.decimal128(5, 2), "1000"),
    ],
)
def test_a_number_that_its_type_cannot_hold_is_refused_instead_of_rounded(kind: pa.DataType, text: str) -> None:
    with pytest.raises(SchemaMismatch, match=f"line 1: column 'v' is {text[:20]}"):
        rows_of_lines(f'{{"v": {text}}}'.encode(), pa.schema([("v", kind)]))


def test_rows_written_by_earlier_versions_are_read() -> None:
    schema = pa.schema(
        [("f", pa.float64()), ("d", pa.duration("us")), ("m", pa.map_(pa.string(), pa.int8())), ("u", pa.uuid())]
    )
    old = (
        b'{"f": NaN, "d": "-1 day, 23:59:59.999999", "m": [["k", 1]], "u": "01010101-0101-0101-0101-010101010101"}\n'
        b'{"f": -Infinity, "d": "1:02:03", "m": {"k": 1}}\n'
    )
    assert row_lines(rows_of_lines(old, schema)) == (
        b'{"f": "NaN", "d": -1, "m": [["k", 1]], "u": "01010101-0101-0101-0101-010101010101"}\n'
        b'{"f": "-Infinity", "d": 3723000000, "m": [["k", 1]], "u": null}\n'
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a":1.10,"a":[1e400, {}]}', '{\n  "a": 1.10,\n  "a": [\n    1e400,\n    {}\n  ]\n}'),
        ("[]", "[]"),
        ('{"s": "a,b:{c}"}', '{\n  "s": "a,b:{c}"\n}'),
        ("[" * 30 + "1" + "]" * 30, "[" * 30 + "1" + "]" * 30),
        ('{"a": }', None),
        ("[" * 5000, None),
    ],
)
def test_json_is_laid_out_without_changing_its_values(text: str, expected: str | None) -> None:
    assert laid_out(text) == expected
