"""Messages of Kafka as records, and records as messages."""

from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.connect.kafka.records import TIME_MS_MAX, messages_of, rows_of
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA

HEADERS = st.lists(st.tuples(st.sampled_from(["", "a", "ü"]), st.none() | st.binary(max_size=2)), max_size=4)


class Message(NamedTuple):
    """A message as confluent-kafka returns it."""

    given_headers: Any
    time_ms: int = 5

    def timestamp(self) -> tuple[int, int]:
        return 1, self.time_ms

    def offset(self) -> int:
        return 7

    def partition(self) -> int:
        return 3

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"

    def headers(self) -> Any:
        return self.given_headers


def rows(*headers: Any) -> pa.RecordBatch:
    rest = {"timestamp": 5, "keys": [b"k"], "value": b"v"}
    return pa.RecordBatch.from_pylist([{**rest, "headers": each} for each in headers], DEFAULT_SCHEMA)


@given(st.lists(st.none() | HEADERS, min_size=1, max_size=4), st.integers(0, 3))
def test_headers_survive_both_directions(headers: list[Any], start: int) -> None:
    batch = rows_of([Message(each) for each in headers])
    assert [each or [] for each in batch.column("headers").to_pylist()] == [each or [] for each in headers]
    assert [own for *_, own in messages_of(batch.slice(start))] == [each or [] for each in headers[start:]]


def test_a_header_name_that_is_not_utf_8_is_refused_with_its_message() -> None:
    class Strange(Message):
        def headers(self) -> Any:
            raise SystemError("returned a result with an exception set")

        def topic(self) -> str:
            return "clicks"

        def partition(self) -> int:
            return 3

        def offset(self) -> int:
            return 42

    with pytest.raises(SchemaMismatch, match="topic clicks, partition 3, offset 42: the name of a header is not UTF-8"):
        rows_of([Message(None), Strange(None)])


def test_a_header_name_with_a_zero_byte_is_refused() -> None:
    batch = rows([("a", b"1")], [("b\0c", b"2")], None)
    with pytest.raises(SchemaMismatch, match=r"a header named 'b\\x00c'"):
        list(messages_of(batch))
    assert [own for *_, own in messages_of(batch.slice(2))] == [[]]
    assert [own for *_, own in messages_of(batch.slice(0, 1))] == [[("a", b"1")]]


@given(st.integers(-TIME_MS_MAX, TIME_MS_MAX) | st.sampled_from([-1, -2, 1, TIME_MS_MAX, -TIME_MS_MAX]))
def test_times_survive_both_directions(time_ms: int) -> None:
    batch = rows_of([Message(None, time_ms)])
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [0 if time_ms == -1 else 1000 * time_ms]
    assert [found for found, *_ in messages_of(batch)] == [time_ms or -1]


@pytest.mark.parametrize("time_ms", [TIME_MS_MAX + 1, 2**63 - 1, -(2**63)])
def test_a_time_beyond_the_range_of_records_is_refused_with_its_offset(time_ms: int) -> None:
    with pytest.raises(SchemaMismatch, match=f"offset 7 of partition 3 has a time of {time_ms} ms"):
        rows_of([Message(None), Message(None, time_ms)])


def test_a_record_of_the_first_millisecond_of_1970_has_no_time_in_kafka() -> None:
    batch = rows([], [])
    for time_us in (0, 999):
        early = batch.set_column(0, DEFAULT_SCHEMA.field(0), pa.array([time_us] * 2).cast(DEFAULT_SCHEMA.field(0).type))
        assert {found for found, *_ in messages_of(early)} == {-1}
    early = batch.set_column(0, DEFAULT_SCHEMA.field(0), pa.array([5, -1]).cast(DEFAULT_SCHEMA.field(0).type))
    with pytest.raises(SchemaMismatch, match="-1 us since 1970"):
        list(messages_of(early))
