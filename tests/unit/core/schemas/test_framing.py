"""Values that start with the id of their schema, as Kafka's users know them."""

import pytest

from kera.core.errors import InvalidArgument, NotFramed
from kera.core.schemas.framing import (
    FRAME_BYTES,
    SCHEMA_ID_MAX,
    frame,
    frame_of,
    message_path_to_bytes,
    split_message_path,
    unframe,
)


def test_a_frame_is_a_zero_and_the_id_in_network_order() -> None:
    assert frame(0x01020304, b"payload") == b"\x00\x01\x02\x03\x04payload"
    assert frame_of(7) == b"\x00\x00\x00\x00\x07"
    assert len(frame_of(SCHEMA_ID_MAX)) == FRAME_BYTES


@pytest.mark.parametrize("schema_id", [0, -1, SCHEMA_ID_MAX + 1])
def test_an_invalid_schema_id_is_refused(schema_id: int) -> None:
    with pytest.raises(InvalidArgument, match=str(schema_id)):
        frame(schema_id, b"")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "0 bytes"),
        (b"\x00\x00\x00\x00", "4 bytes"),
        (b'{"a": 1}', "0x7b"),
        (b"\x00\x00\x00\x00\x00payload", "schema 0"),
        (b"\x00\xff\xff\xff\xffpayload", "schema 4294967295"),
    ],
)
def test_the_error_about_a_value_without_a_frame_says_what_it_has(value: bytes, words: str) -> None:
    with pytest.raises(NotFramed, match=words) as caught:
        unframe(value)
    assert not caught.value.retriable


def test_the_commonest_message_path_is_one_byte() -> None:
    assert message_path_to_bytes([0]) == b"\x00"
    assert message_path_to_bytes([1]) == b"\x02\x02"
    assert message_path_to_bytes([1, 3]) == b"\x04\x02\x06"


@pytest.mark.parametrize("path", [[], [-1], [SCHEMA_ID_MAX + 1], [0] * 65])
def test_an_invalid_message_path_is_refused(path: list[int]) -> None:
    with pytest.raises(InvalidArgument):
        message_path_to_bytes(path)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\x80\x80\x80\x80\x80\x80\x80\x01",  # a number of more than 32 bits
        b"\x02",  # announces one number
        b"\x01",  # -1 numbers
        b"\x02\x01",  # the message -1
        b"\xfe\xff\xff\xff\x0f",  # the largest count of numbers
    ],
)
def test_bytes_without_a_valid_message_path_are_refused(payload: bytes) -> None:
    with pytest.raises(NotFramed):
        split_message_path(payload)
