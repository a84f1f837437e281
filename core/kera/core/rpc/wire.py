"""Messages as bytes: errors, and the (de)serialisers of messages with bulk.

The bulk field of a message is its last one, ``bytes chunks = 15``. Protobuf would copy it into the message and out
again; here the small fields go through protobuf and the bulk stays a `memoryview`. The bytes are the same
either way (a test holds them identical), so any protobuf client understands them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from kera.core.errors import KeraError, ProtocolError, RecordTooLarge, error_from_wire, error_to_attributes
from kera.core.rpc.limits import ERROR_TEXT_BYTES_MAX
from kera.v1 import common_pb2

MessageT = TypeVar("MessageT", bound=Message)

BULK_FIELD = 15
_BULK_TAG = BULK_FIELD << 3 | 2
FIELDS_BESIDE_BULK_MAX = 256
"""Only answers, whose fields repeat, have more fields beside their bulk: there protobuf finds the bulk faster."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def error_to_message(error: BaseException) -> common_pb2.Error:
    """Return `error` as a message. An error that is not KerA's counts as a defect, and keeps only its type and text.

    The message is short whatever the error says (`ERROR_TEXT_BYTES_MAX`), so that it always arrives.
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
    """Return `text` as protobuf accepts it: valid UTF-8 (a file name need not be), and cut if it is too long."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > ERROR_TEXT_BYTES_MAX:
        data = data[: ERROR_TEXT_BYTES_MAX - 3] + b"..."
    return data.decode("utf-8", "ignore")


def error_from_message(message: common_pb2.Error) -> KeraError:
    """Return the error that was sent as `message`."""
    return error_from_wire(message.code, message.message, dict(sorted(message.attributes.items())))


def parse(message_type: type[MessageT], data: Any) -> MessageT:
    """Return `data` as a message. Raises `ProtocolError`."""
    try:
        return message_type.FromString(data)
    except DecodeError as error:
        raise _no_message(message_type.DESCRIPTOR.full_name, error) from error


def _parse_more(message: Message, data: Any) -> None:
    """Add fields that follow those of `message`: of a field that occurs twice, the last one counts."""
    try:
        message.MergeFromString(data)
    except DecodeError as error:
        raise _no_message(message.DESCRIPTOR.full_name, error) from error


def _no_message(name: str, error: DecodeError) -> ProtocolError:
    return ProtocolError(f"not a {name} message: {error}")


def serialize_with_bulk(message: Message, bulk: Iterable[Any]) -> bytes:
    """Return the bytes of `message` with its bulk field set to the concatenation of `bulk`."""
    pieces = [memoryview(piece).cast("B") for piece in bulk]
    length = sum(len(piece) for piece in pieces)
    if not length:
        return message.SerializeToString()
    return b"".join((message.SerializeToString(), bytes((_BULK_TAG,)), _varint(length), *pieces))


def parse_with_bulk(
    message_type: type[MessageT], data: bytes, head_bytes_max: int | None = None
) -> tuple[MessageT, memoryview]:
    """Return the message without its bulk field, and the bulk as a view of `data`.

    A foreign client may put the bulk field before other fields. Raises `ProtocolError`, and `RecordTooLarge` if there
    are more than `head_bytes_max` bytes beside the bulk.
    """
    view = memoryview(data)
    found = _find_bulk(view)
    head_bytes = len(view) if found is None else len(view) - (found.end - found.field_at)
    if head_bytes_max is not None and head_bytes > head_bytes_max:
        raise RecordTooLarge(
            f"{message_type.DESCRIPTOR.name} has {head_bytes} bytes beside its bulk, over the limit {head_bytes_max}",
            message_bytes=len(view),
            limit=head_bytes_max,
        )
    if found is None:
        message = parse(message_type, data)
        chunks = getattr(message, "chunks", b"")
        if chunks:
            message.ClearField("chunks")
        return message, memoryview(chunks)
    message = parse(message_type, view[: found.field_at])
    if found.end < len(view):
        _parse_more(message, view[found.end :])
    return message, view[found.start : found.end]


class _Bulk(NamedTuple):
    """The place of the bulk field in a message."""

    field_at: int
    start: int
    """The offset of its content."""
    end: int


def _find_bulk(view: memoryview) -> _Bulk | None:
    """Return the place of the bulk field; None: there is none, or there are too many other fields.

    None also for fields that this function does not know, or finds odd: then protobuf decides.
    """
    at, end = 0, len(view)
    found: _Bulk | None = None
    for _ in range(FIELDS_BESIDE_BULK_MAX):
        if at >= end:
            return found if at == end else None
        field_at = at
        tag, at = _read_varint(view, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _read_varint(view, at)
        elif kind == _BYTES:
            length, at = _read_varint(view, at)
            if tag == _BULK_TAG:
                if found is not None:
                    return None
                found = _Bulk(field_at, at, at + length)
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
