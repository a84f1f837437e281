"""Messages of Kafka as records, and records as messages."""

from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.connect.kafka.records import messages_of, rows_of
from kera.core.errors import SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

HEADERS = st.lists(st.tuples(st.sampled_from(["", "a", "ü"]), st.none() | st.binary(max_size=2)), max_size=4)


class Message(NamedTuple):
    """As confluent-kafka gives it."""

    given_headers: Any

    def timestamp(self) -> tuple[int, int]:
        return 1, 5

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
def test_headers_stay_as_they_are_both_ways(headers: list[Any], start: int) -> None:
    batch = rows_of([Message(each) for each in headers])
    assert [each or [] for each in batch.column("headers").to_pylist()] == [each or [] for each in headers]
    assert [own for *_, own in messages_of(batch.slice(start))] == [each or [] for each in headers[start:]]


def test_a_message_whose_header_has_a_name_that_is_not_utf8_is_named() -> None:
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


def test_a_name_with_a_zero_byte_is_refused_as_the_library_would_cut_it() -> None:
    batch = rows([("a", b"1")], [("b\0c", b"2")], None)
    with pytest.raises(SchemaMismatch, match=r"a header named 'b\\x00c'"):
        list(messages_of(batch))
    assert [own for *_, own in messages_of(batch.slice(2))] == [[]]
    assert [own for *_, own in messages_of(batch.slice(0, 1))] == [[("a", b"1")]]
