"""`kera.connect.files.lines`: lines of text as record batches."""

import datetime

import pytest

from kera.connect.files.lines import lines_to_batch
from kera.core.format.schema import DEFAULT_SCHEMA


def test_each_line_is_a_value() -> None:
    batch = lines_to_batch(b"a\n\nb c\r\n\xff\n")

    assert batch.schema == DEFAULT_SCHEMA
    assert batch.column("value").to_pylist() == [b"a", b"", b"b c\r", b"\xff"]
    assert batch.column("keys").null_count == batch.column("headers").null_count == 4
    batch.validate(full=True)


def test_a_last_line_without_a_newline_counts() -> None:
    assert lines_to_batch(b"a\nb").column("value").to_pylist() == [b"a", b"b"]


def test_records_get_the_current_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_901, datetime.UTC)
    monkeypatch.setattr("time.time_ns", lambda: round(now.timestamp() * 1e6) * 1000 + 999)
    assert lines_to_batch(b"a\nb\n").column("timestamp").to_pylist() == [now, now]


def test_the_text_before_the_separator_is_the_key() -> None:
    batch = lines_to_batch(b"k1::v1\nv2\n::v3\nk4::\nk5::a::b\n", b"::")

    batch.validate(full=True)
    assert batch.column("keys").to_pylist() == [[b"k1"], None, [b""], [b"k4"], [b"k5"]]
    assert batch.column("value").to_pylist() == [b"v1", b"v2", b"v3", b"", b"a::b"]
