"""`kera.cli._format`: record batches as text."""

import datetime
import decimal
import json
from typing import Any

import pyarrow as pa
import pytest

from kera.cli._format import RecordOrigin, for_terminal, json_formatter, text_formatter, unescaped
from kera.cli._run import UsageError
from kera.client import StreamConfig, StreamDescription
from kera.client.json_form import records_of_lines, rows_of_lines
from kera.core.format.schema import DEFAULT_SCHEMA

PLACE = RecordOrigin(streamlet=3, entry=1, first_record=41)


def stream(schema: pa.Schema = DEFAULT_SCHEMA, **fields: Any) -> StreamDescription:
    arguments: dict[str, Any] = {
        "stream_id": 1,
        "name": "demo",
        "config": StreamConfig(1, 0, 1, 1, "leader", "none"),
        "schema": schema,
        "schema_id": 1,
        "typed": schema is not DEFAULT_SCHEMA,
        "key_column": None,
        "timestamp_column": None,
        "assignments": {},
        "created_us": 0,
    }
    return StreamDescription(**(arguments | fields))


def records(*values: dict[str, Any]) -> pa.RecordBatch:
    return records_of_lines("\n".join(json.dumps(value) for value in values).encode())


RECORDS = records(
    {"key": "k1", "value": "v1", "timestamp": 5},
    {"value": "v2", "timestamp": 6},
    {"keys": ["k3", "second"], "value": None, "timestamp": 7},
)


def test_records_of_a_batch_may_come_from_different_entries() -> None:
    origins = pa.record_batch(
        [["a", "b", "a"], pa.array([1, 0, 2], pa.uint32()), [0, 1, 0], pa.array([9, 8, 7], pa.uint64()), [5, 6, 7]],
        ["stream", "streamlet", "entry", "offset", "timestamp_us"],
    )
    assert bytes(text_formatter(r"%t/%p/%e/%o@%T %k;", stream())(RECORDS, origins)) == (
        b"a/1/0/9@5 k1;b/0/1/8@6 ;a/2/0/7@7 k3;"
    )
    rows = [json.loads(line) for line in bytes(json_formatter(stream())(RECORDS, origins)).splitlines()]
    assert [(row["stream"], row["streamlet"], row["entry"], row["offset"]) for row in rows] == [
        ("a", 1, 0, 9),
        ("b", 0, 1, 8),
        ("a", 2, 0, 7),
    ]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"%s\n", b"v1\nv2\n\n"),
        (r"%k %s\n", b"k1 v1\n v2\nk3 \n"),
        (r"%t/%p/%e/%o@%T;", b"demo/3/1/41@5;demo/3/1/42@6;demo/3/1/43@7;"),
        (r"%o%%\t\x41\\\0\r", b"41%\tA\\\0\r42%\tA\\\0\r43%\tA\\\0\r"),
        ("é", "ééé".encode()),
        ("%t,", b"demo,demo,demo,"),
        ("", b""),
    ],
)
def test_a_format_is_applied_to_each_record(template: str, text: bytes) -> None:
    assert bytes(text_formatter(template, stream())(RECORDS, PLACE)) == text


def test_headers_are_printed_as_names_and_values() -> None:
    batch = records(
        {"value": "a", "headers": {"n": "1"}},
        {"value": "b", "headers": {"trace": "x", "empty": "", "none": None}},
        {"value": "c"},
        {"value": "d", "headers": {}},
    )
    expected = [b"a n=1;", b"b trace=x,empty=,none=;", b"c ;", b"d ;"]
    assert bytes(text_formatter(r"%s %h;", stream())(batch, PLACE)) == b"".join(expected)
    assert bytes(text_formatter(r"%s %h;", stream())(batch.slice(1, 2), PLACE)) == b"".join(expected[1:3])
    none = pa.record_batch({"v": [1, 2]})
    assert bytes(text_formatter("%h.", stream(none.schema))(none, PLACE)) == b".."


def test_a_slice_of_a_batch_gives_its_own_records() -> None:
    assert bytes(text_formatter(r"%k=%s,", stream())(RECORDS.slice(1, 2), PLACE)) == b"=v2,k3=,"
    assert bytes(text_formatter("%s", stream())(RECORDS.slice(0, 0), PLACE)) == b""


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("%x", "there is no %x; there are %s %k"),
        (r"\q", r"there is no \\q"),
        ("a%", "'%' is cut short"),
        ("\\", "cut short"),
    ],
)
def test_an_invalid_token_in_a_format_is_refused(template: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        text_formatter(template, stream())


def test_json_has_the_record_and_its_place() -> None:
    batch = records(
        {"key": "k", "value": "é", "headers": {"h": "x"}, "timestamp": 1_767_323_045_000_006},
        {"value_base64": "/w==", "timestamp": 0},
        {"keys": ["a", "b"], "timestamp": 0},
    )
    lines = bytes(json_formatter(stream())(batch, PLACE)).decode().splitlines()

    place = {"stream": "demo", "streamlet": 3, "entry": 1}
    assert [json.loads(line) for line in lines] == [
        {
            **place,
            "offset": 41,
            "timestamp": "2026-01-02T03:04:05.000006Z",
            "key": "k",
            "value": "é",
            "headers": [["h", "x"]],
        },
        {**place, "offset": 42, "timestamp": "1970-01-01T00:00:00.000000Z", "value_base64": "/w=="},
        {
            **place,
            "offset": 43,
            "timestamp": "1970-01-01T00:00:00.000000Z",
            "keys": ["a", "b"],
            "value": None,
        },
    ]


def test_null_values_stay_null_in_json() -> None:
    nothing = {"timestamp": None, "value": None, "keys": [None, b"a"], "headers": [("h", None)]}
    nullable = pa.schema([field.with_nullable(True) for field in DEFAULT_SCHEMA])
    line = bytes(json_formatter(stream())(pa.RecordBatch.from_pylist([nothing], nullable), PLACE))

    place = {"stream": "demo", "streamlet": 3, "entry": 1, "offset": 41}
    assert json.loads(line) == {
        **place,
        "timestamp": None,
        "keys": [None, "a"],
        "value": None,
        "headers": [["h", None]],
    }


def test_the_json_output_of_consume_can_be_produced_again() -> None:
    for batch in (
        RECORDS,
        records({"key_base64": "/w==", "value": "x", "headers": {"a": "b"}, "timestamp": 9}),
        records({"keys": ["a", None], "headers": {"a": None, "b": "null"}, "timestamp": 9}),
    ):
        assert records_of_lines(bytes(json_formatter(stream())(batch, PLACE))).equals(batch)


TYPED = pa.schema(
    [("id", pa.int64()), ("at", pa.timestamp("ms", tz="UTC")), ("day", pa.date32()), ("name", pa.string())]
)


def test_a_typed_stream_is_printed_as_rows() -> None:
    batch = rows_of_lines(b'{"id": 7, "at": "2026-01-02T03:04:05Z", "day": "2026-01-02", "name": "x"}\n{}\n', TYPED)
    description = stream(TYPED, key_column="id", timestamp_column="at")

    printed = bytes(json_formatter(description)(batch, PLACE))

    assert [json.loads(line) for line in printed.splitlines()] == [
        {"id": 7, "at": "2026-01-02T03:04:05.000Z", "day": "2026-01-02", "name": "x"},
        {"id": None, "at": None, "day": None, "name": None},
    ]
    assert rows_of_lines(printed, TYPED).equals(batch)
    assert bytes(text_formatter(r"%k %T\n", description)(batch, PLACE)) == b"7 1767323045000000\n \n"
    assert bytes(text_formatter("%k%T", stream(TYPED))(batch, PLACE)) == b""
    assert json.loads(bytes(text_formatter("%s", description)(batch.slice(0, 1), PLACE)))["id"] == 7


def test_other_types_are_printed_as_text() -> None:
    schema = pa.schema(
        [
            ("raw", pa.binary()),
            ("price", pa.decimal128(5, 2)),
            ("at", pa.timestamp("us")),
            ("t", pa.time64("us")),
        ]
    )
    batch = pa.RecordBatch.from_pylist(
        [{"raw": b"\xffx", "price": decimal.Decimal("1.50"), "at": None, "t": datetime.time(1, 2)}], schema
    )

    assert json.loads(bytes(json_formatter(stream(schema))(batch, PLACE))) == {
        "raw": {"base64": "/3g="},
        "price": "1.50",
        "at": None,
        "t": "01:02:00.000000",
    }


def test_control_characters_are_escaped_for_a_terminal() -> None:
    data = "a\tb\n\x1b[2J\x07\r\x00\x7f\x9b\u202eZürich ✓\n".encode() + b"\xff\xfe"
    assert for_terminal(data).decode() == ("a\tb\n\\x1b[2J\\x07\\x0d\\x00\\x7f\\x9b\\u202eZürich ✓\n\\xff\\xfe")


def test_a_time_beyond_the_range_of_python_is_printed_as_a_number() -> None:
    rows = pa.RecordBatch.from_pylist([{"timestamp": 1 << 61, "value": b"v"}], DEFAULT_SCHEMA)
    assert json.loads(bytes(json_formatter(stream())(rows, PLACE)))["timestamp"] == 1 << 61
    assert bytes(text_formatter("%T", stream())(rows, PLACE)) == b"%d" % (1 << 61)
    typed = pa.schema([("at", pa.timestamp("s"))])
    far = pa.RecordBatch.from_pydict({"at": pa.array([1 << 61], pa.timestamp("s"))})
    assert json.loads(bytes(json_formatter(stream(typed))(far, PLACE))) == {"at": 1 << 61}


@pytest.mark.parametrize(
    ("text", "meant"),
    [(r"\t", b"\t"), (r"a\x1fb", b"a\x1fb"), (r"\\t", rb"\t"), ("%s", b"%s"), ("—", "—".encode()), ("\udcff", b"\xff")],
)
def test_options_accept_the_escapes_of_a_format(text: str, meant: bytes) -> None:
    assert unescaped(text, "--key-separator") == meant


@pytest.mark.parametrize("text", ["\\", r"\q", r"\x1"])
def test_an_option_with_an_unknown_escape_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--key-separator: there is no"):
        unescaped(text, "--key-separator")


def test_undecodable_bytes_in_a_format_are_printed_unchanged() -> None:
    batch = records_of_lines(b'{"value": "v"}', 1)
    assert b"".join(bytes(part) for part in [text_formatter("%s\udcc3\udcbc", stream())(batch, PLACE)]) == b"v\xc3\xbc"
