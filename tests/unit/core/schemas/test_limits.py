from __future__ import annotations

from typing import Any

import pytest

from kera.core.errors import InvalidArgument, InvalidSchema
from kera.core.schemas import (
    DEFINITION_BYTES_MAX,
    MESSAGE_CHARS_MAX,
    SUBJECT_CHARS_MAX,
    Compatibility,
    SchemaType,
    checked_message,
    checked_subject,
    checked_text,
    stream_of,
)
from kera.v1 import schema_pb2


@pytest.mark.parametrize(
    "subject", ["", "a b", "a/b", "é", "x" * (SUBJECT_CHARS_MAX + 1), "a\n", None, b"orders-value"]
)
def test_an_invalid_subject_is_refused(subject: Any) -> None:
    with pytest.raises(InvalidArgument, match="a subject cannot be called"):
        checked_subject(subject)


def test_a_stream_with_the_longest_name_has_a_subject() -> None:
    assert checked_subject("s" * 249 + "-value")


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ("", "empty"),
        ("x" * (DEFINITION_BYTES_MAX + 1), "the limit is 262144"),
        ("é" * (DEFINITION_BYTES_MAX // 2 + 1), "the limit is 262144"),
        ("\ud800", "UTF-8 has not"),
        (b"{}", "text, not bytes"),
        (None, "text, not NoneType"),
    ],
)
def test_a_definition_that_is_empty_too_long_or_not_text_is_refused(definition: Any, said: str) -> None:
    with pytest.raises(InvalidSchema, match=said):
        checked_text(definition)


def test_a_definition_at_the_limit_is_accepted() -> None:
    assert checked_text("x" * DEFINITION_BYTES_MAX)


@pytest.mark.parametrize("message", ["1a", "a..b", ".a", "a.", "a b", "a" * (MESSAGE_CHARS_MAX + 1), "a\n", None, 7])
def test_an_invalid_message_name_is_refused(message: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a full Protobuf message name"):
        checked_message(message, SchemaType.PROTOBUF)


def test_only_protobuf_schemas_take_a_message_name() -> None:
    assert checked_message("shop.v1.Order", SchemaType.PROTOBUF) == "shop.v1.Order"
    with pytest.raises(InvalidArgument, match="leave message out"):
        checked_message("shop.v1.Order", SchemaType.AVRO)


@pytest.mark.parametrize(
    ("subject", "stream"),
    [
        ("orders-value", "orders"),
        ("orders-key", "orders"),
        ("orders", "orders"),
        ("orders-value-value", "orders-value"),
        ("-value", "-value"),
    ],
)
def test_a_subject_belongs_to_a_stream(subject: str, stream: str) -> None:
    assert stream_of(subject) == stream


def test_kinds_and_modes_have_the_numbers_of_the_messages() -> None:
    for kind in SchemaType:
        assert schema_pb2.SchemaType.Name(kind.wire) == f"SCHEMA_TYPE_{kind.upper()}"
        assert SchemaType.from_wire(kind.wire) is kind
    for mode in Compatibility:
        assert schema_pb2.Compatibility.Name(mode.wire) == f"COMPATIBILITY_{mode.upper()}"
        assert Compatibility.from_wire(mode.wire) is mode


@pytest.mark.parametrize("number", [0, 99])
def test_an_unknown_number_gives_no_kind_and_no_mode(number: int) -> None:
    assert SchemaType.from_wire(number) is None
    assert Compatibility.from_wire(number) is None


def test_modes_have_their_directions() -> None:
    asked = {mode: (mode.backward, mode.forward, mode.transitive) for mode in Compatibility}
    assert asked == {
        Compatibility.NONE: (False, False, False),
        Compatibility.BACKWARD: (True, False, False),
        Compatibility.FORWARD: (False, True, False),
        Compatibility.FULL: (True, True, False),
        Compatibility.BACKWARD_TRANSITIVE: (True, False, True),
        Compatibility.FORWARD_TRANSITIVE: (False, True, True),
        Compatibility.FULL_TRANSITIVE: (True, True, True),
    }
