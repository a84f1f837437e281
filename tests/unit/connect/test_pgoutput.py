"""`kera.connect.postgres.pgoutput`: messages are decoded as the protocol's documentation specifies."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.connect.postgres.pgoutput import (
    EPOCH_US,
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Relation,
    RelationColumn,
    Truncate,
    Update,
    decode,
    format_lsn,
    parse_lsn,
)
from kera.core.errors import ProtocolError

ONE = b"t\0\0\0\x011"
ROW = b"\0\x03" + ONE + b"n" + b"u"
"""The text 1, null, and a value that was not logged."""


def test_a_transaction_has_the_place_and_time_of_its_commit() -> None:
    assert decode(b"B" + struct.pack(">QqI", 7, 5, 3)) == Begin(7, EPOCH_US + 5, 3)
    assert decode(b"C" + struct.pack(">BQQq", 0, 7, 9, 5)) == Commit(7, 9, EPOCH_US + 5)


def test_a_relation_has_its_columns_in_order() -> None:
    columns = b"\x01id\0" + struct.pack(">Ii", 23, -1) + b"\0\xc3\xa4\0" + struct.pack(">Ii", 1700, 655366)
    data = b"R" + struct.pack(">I", 16384) + b"public\0orders\0" + b"d\0\x02" + columns

    found = decode(data)

    expected = (RelationColumn("id", True, 23, -1), RelationColumn("ä", False, 1700, 655366))
    assert found == Relation(16384, "public", "orders", expected)


def test_a_value_that_was_not_logged_is_not_null() -> None:
    row = ("1", None, UNCHANGED)
    assert decode(b"I\0\0\0\x05N" + ROW) == Insert(5, row)
    assert decode(b"U\0\0\0\x05N" + ROW) == Update(5, None, False, row)
    assert decode(b"U\0\0\0\x05K" + ROW + b"N" + ROW) == Update(5, row, False, row)
    assert decode(b"U\0\0\0\x05O" + ROW + b"N" + ROW) == Update(5, row, True, row)
    assert decode(b"D\0\0\0\x05K" + ROW) == Delete(5, row, False)
    assert decode(b"D\0\0\0\x05O" + ROW) == Delete(5, row, True)


def test_a_truncation_names_its_tables() -> None:
    assert decode(b"T\0\0\0\x02\0\0\0\0\x05\0\0\0\x06") == Truncate((5, 6))


@pytest.mark.parametrize("data", [b"Onode", b"Y\0", b"M\0"])
def test_messages_that_are_not_about_rows_are_skipped(data: bytes) -> None:
    assert decode(data) is None


@pytest.mark.parametrize(
    "data", [b"", b"?", b"B\0", b"I\0\0\0\x05X" + ROW, b"I\0\0\0\x05N\0\x01t\0\0\0\x09x", b"I\0\0\0\x05N\0\x01?"]
)
def test_a_damaged_message_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode(data)


@pytest.mark.parametrize(("text", "lsn"), [("0/0", 0), ("16/B374D848", 0x16B374D848)])
def test_a_place_in_the_log_is_formatted_and_parsed(text: str, lsn: int) -> None:
    assert (parse_lsn(text), format_lsn(lsn)) == (lsn, text)
    with pytest.raises(ProtocolError):
        parse_lsn("nowhere")
