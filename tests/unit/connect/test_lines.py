"""`kera.connect.files.lines`: lines of text as record batches."""

import datetime
import json

import pyarrow as pa
import pytest

from kera.connect.files.lines import json_to_batch, lines_to_batch, rows_to_batch
from kera.core.errors import SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

UTC = datetime.UTC


def test_each_line_is_a_value() -> None:
    batch = lines_to_batch(b"a\n\nb c\r\n\xff\n")

    assert batch.schema == DEFAULT_SCHEMA
    assert batch.column("value").to_pylist() == [b"a", b"", b"b c\r", b"\xff"]
    assert batch.column("keys").null_count == batch.column("headers").null_count == 4
    batch.validate(full=True)


def test_a_last_line_without_a_newline_counts() -> None:
    assert lines_to_batch(b"a\nb").column("value").to_pylist() == [b"a", b"b"]


def test_records_are_stamped_with_the_time_of_now() -> None:
    before = datetime.datetime.now(UTC)
    stamps = lines_to_batch(b"a\nb\n").column("timestamp").to_pylist()
    assert before - datetime.timedelta(seconds=1) < stamps[0] == stamps[1] <= datetime.datetime.now(UTC)


def test_what_is_before_the_separator_is_the_key() -> None:
    batch = lines_to_batch(b"k1::v1\nv2\n::v3\nk4::\nk5::a::b\n", b"::")

    batch.validate(full=True)
    assert batch.column("keys").to_pylist() == [[b"k1"], [], [b""], [b"k4"], [b"k5"]]
    assert batch.column("value").to_pylist() == [b"v1", b"v2", b"v3", b"", b"a::b"]


def test_a_json_line_gives_key_value_headers_and_timestamp() -> None:
    lines = [
        {"key": "k", "value": "v", "headers": {"h": "x", "n": 1}, "timestamp": 1_700_000_000_000_001},
        {"value": {"a": [1, "é"]}, "timestamp": "2026-01-02T03:04:05.000006Z"},
        {"keys": ["a", "b"], "value": None, "timestamp": "2026-01-02T03:04:05"},
        {
            "value_base64": "/w==",
            "key_base64": "AA==",
            "stream": "s",
            "streamlet": 0,
            "entry": 0,
            "offset": 7,
        },
    ]
    batch = json_to_batch("\n".join(json.dumps(line) for line in lines).encode() + b"\n\n")

    batch.validate(full=True)
    assert batch.schema == DEFAULT_SCHEMA
    assert batch.column("keys").to_pylist() == [[b"k"], [], [b"a", b"b"], [b"\0"]]
    assert batch.column("value").to_pylist() == [b"v", '{"a":[1,"é"]}'.encode(), None, b"\xff"]
    assert batch.column("headers").to_pylist() == [[("h", b"x"), ("n", b"1")], None, None, None]
    assert batch.column("timestamp").cast(pa.int64()).to_pylist()[:3] == [
        1_700_000_000_000_001,
        1_767_323_045_000_006,
        1_767_323_045_000_000,
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 8: "),
        ("[1]", "line 8: not a JSON object"),
        ('{"val": 1}', "line 8: unknown field val"),
        ('{"headers": 1}', "line 8: headers must be an object"),
        ('{"timestamp": 1.5}', "line 8: timestamp must be"),
        ('{"timestamp": "noon"}', "line 8: Invalid isoformat"),
        ('{"value_base64": "!"}', "line 8: "),
    ],
)
def test_a_json_line_that_is_no_record_is_named(line: str, says: str) -> None:
    with pytest.raises(SchemaMismatch, match=says) as caught:
        json_to_batch(b'{"value": "fine"}\n' + line.encode(), first_line=7)
    assert caught.value.attributes == {"line": 8}


SCHEMA = pa.schema(
    [
        ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("n", pa.int32()),
        ("tags", pa.list_(pa.string())),
        ("raw", pa.binary()),
    ]
)


def test_rows_of_a_typed_stream_come_from_json_objects() -> None:
    batch = rows_to_batch(
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
    assert rows_to_batch(b"\n", SCHEMA).num_rows == 0


@pytest.mark.parametrize("row", [b'{"m": 1}', b'{"n": "x"}', b'{"day": "noon"}', b"{", b'{"n": 5000000000}'])
def test_rows_that_do_not_fit_the_schema_are_named(row: bytes) -> None:
    with pytest.raises(
        SchemaMismatch, match=r"lines 5 to 6 are no rows of the stream \(columns: day, at, n, tags, raw\)"
    ):
        rows_to_batch(b'{"n": 1}\n' + row + b"\n", SCHEMA, first_line=5)
