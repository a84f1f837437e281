"""Messages as bytes: errors, and the (de)serialisers of messages with bulk.

The bulk field of a message is its last one, ``bytes chunks = 15``. Protobuf would copy it into the message and out
again; here the small fields go through protobuf and the bulk stays a `memoryview`. The bytes are the same
either way (a test holds them identical), so any protobuf client understands them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from kera.core.errors import KeraError, ProtocolError, error_from_wire, error_to_attributes
from kera.core.rpc.limits import ERROR_TEXT_BYTES_MAX
from kera.v1 import common_pb2

MessageT = TypeVar("MessageT", bound=Message)

BULK_FIELD = 15
_BULK_TAG = BULK_FIELD << 3 | 2
FIELDS_BEFORE_BULK_MAX = 256
"""A message that has bulk has few other fields; of one with more, protobuf finds the bulk faster."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def error_to_message(error: BaseException) -> common_pb2.Error:
    """`error` as it travels. One that is not KerA's own counts as a defect, and keeps only its type and text.

    It is short whatever the error says (`ERROR_TEXT_BYTES_MAX`), so that it always arrives.
    """
    if not isinstance(error, KeraError):
        return common_pb2.Error(code="internal", message=_short(f"{type(error).__name__}: {error}"))
    attributes = {}
    room = ERROR_TEXT_BYTES_MAX
    for name, text in error_to_attributes(error).items():
        room -= len(name.encode("utf-8", "replace")) + len(text)  # the text is JSON, and so ASCII
        if room >= 0:
            attributes[_short(name)] = text
    return common_pb2.Error(
        code=error.code, message=_short(error.message), retriable=error.retriable, attributes=attributes
    )


def _short(text: str) -> str:
    """`text` as protobuf takes it: valid UTF-8 (a file name need not be), and cut where it is too long."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > ERROR_TEXT_BYTES_MAX:
        data = data[: ERROR_TEXT_BYTES_MAX - 3] + b"..."
    return data.decode("utf-8", "ignore")


def error_from_message(message: common_pb2.Error) -> KeraError:
    """The error that travelled as `message`."""
    return error_from_wire(message.code, message.message, dict(message.attributes))


def parse(message_type: type[MessageT], data: Any) -> MessageT:
    """`data` as a message; raises `ProtocolError`."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise ProtocolError(f"not a {message_type.DESCRIPTOR.full_name} message: {error}") from error


def serialize_with_bulk(message: Message, bulk: Iterable[Any]) -> bytes:
    """The bytes of `message` with its bulk field set to the concatenation of `bulk`."""
    pieces = [memoryview(piece).cast("B") for piece in bulk]
    length = sum(len(piece) for piece in pieces)
    if not length:
        return message.SerializeToString()
    return b"".join((message.SerializeToString(), bytes((_BULK_TAG,)), _varint(length), *pieces))


def parse_with_bulk(message_type: type[MessageT], data: bytes) -> tuple[MessageT, memoryview]:
    """The message without its bulk field, and the bulk as a view of `data`.

    A foreign client may put the bulk field elsewhere than last; then protobuf reads it, at the price of a copy.
    """
    view = memoryview(data)
    end = _find_bulk(view)
    if end is None:
        message = parse(message_type, data)
        chunks = getattr(message, "chunks", b"")
        if chunks:
            message.ClearField("chunks")
        return message, memoryview(chunks)
    head_end, bulk_start = end
    return parse(message_type, view[:head_end]), view[bulk_start:]


def _find_bulk(view: memoryview) -> tuple[int, int] | None:
    """Where the message's head ends and its bulk starts, if the bulk is the last field; else None.

    None also for what this does not know, or finds odd: then protobuf decides.
    """
    at, end = 0, len(view)
    for _ in range(FIELDS_BEFORE_BULK_MAX):
        if at >= end:
            break
        field_at = at
        tag, at = _read_varint(view, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _read_varint(view, at)
        elif kind == _BYTES:
            length, at = _read_varint(view, at)
            if tag == _BULK_TAG:
                return (field_at, at) if at + length == end else None
            at += length
        elif kind == _FIXED64:
            at += 8
        elif kind == _FIXED32:
            at += 4
        else:
            return None
    return None


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for index in range(_VARINT_BYTES_MAX):
        if at >= len(view):
            break
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, at
    raise ProtocolError("message cut short")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
