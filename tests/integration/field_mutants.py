"""Values that a foreign client may set in each field of a message or chunk header. Pure: it sends nothing.

From a valid request, `messages` makes requests that differ from it in one field: absent, zero, the largest and the
smallest value that the field can have, another's (that of a second request), an enumeration's number that nobody knows,
text that is long, hostile or no name; a list that is empty, has each element twice, has very many, or the wrong order.
It goes into messages within messages, and into the first element of lists of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from crc32c import crc32c
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kera.core.format.chunk import HEADER_CRC_AT

MANY = 1_000
"""The number of elements of a very long list."""
UNKNOWN = 99
"""A number that no enumeration has."""
DEPTH_MAX = 4
"""The depth of messages within messages."""
_RANGES = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_INT64: (-(1 << 63), (1 << 63) - 1),
}
_TEXTS = ("", "x" * 70_000, "\x00\x1b[2J\u202e\n", "../../etc/passwd", "{}'\"%s")

HEADER_FIELDS = {
    # name: offset, format, smallest, largest; in the part of a chunk's header that its producer writes
    "magic": (0, "<I", 0, (1 << 32) - 1),
    "version": (4, "<B", 0, 255),
    "flags": (5, "<B", 0, 255),
    "header_bytes": (6, "<H", 0, (1 << 16) - 1),
    "payload_bytes": (8, "<I", 0, (1 << 32) - 1),
    "record_count": (12, "<I", 0, (1 << 32) - 1),
    "stream_id": (16, "<Q", 0, (1 << 64) - 1),
    "streamlet_id": (24, "<I", 0, (1 << 32) - 1),
    "schema_id": (28, "<I", 0, (1 << 32) - 1),
    "producer_id": (32, "<Q", 0, (1 << 64) - 1),
    "producer_epoch": (40, "<I", 0, (1 << 32) - 1),
    "codec": (44, "<I", 0, (1 << 32) - 1),
    "sequence": (48, "<Q", 0, (1 << 64) - 1),
    "created_us": (56, "<q", -(1 << 63), (1 << 63) - 1),
    "min_timestamp_us": (64, "<q", -(1 << 63), (1 << 63) - 1),
    "max_timestamp_us": (72, "<q", -(1 << 63), (1 << 63) - 1),
    "payload_crc32c": (80, "<I", 0, (1 << 32) - 1),
}
PLACEMENT_FIELDS = {
    # likewise, in the part that brokers write
    "group_id": (88, "<Q", 0, (1 << 64) - 1),
    "segment_id": (96, "<I", 0, (1 << 32) - 1),
    "entry": (100, "<I", 0, (1 << 32) - 1),
    "first_record": (104, "<Q", 0, (1 << 64) - 1),
    "broker_epoch": (112, "<Q", 0, (1 << 64) - 1),
    "durable_head": (120, "<I", 0, (1 << 32) - 1),
}


def messages(valid: Message, other: Message) -> Iterator[tuple[str, Message]]:
    """Messages that differ from `valid` in one field, each with the field's path and the kind of change.

    `other` is a like request of somebody else.
    """
    for path, mutate in _changes(type(valid)(), valid, other, "", DEPTH_MAX):
        changed = type(valid)()
        changed.CopyFrom(valid)
        mutate(changed)
        yield path, changed


def _changes(kind: Any, valid: Any, other: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """For the message at `path`: each change, and a function that applies it to a message of the same kind."""
    for field in kind.DESCRIPTOR.fields:
        name = f"{path}{field.name}"
        if field.is_repeated:
            yield from _list_changes(field, valid, other, name, depth)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield f"{name} absent", _cleared(field)
            yield f"{name} empty", _emptied(field)
            if valid.HasField(field.name) and depth:
                yield from (
                    (told, _within(field, mutate))
                    for told, mutate in _changes(
                        getattr(valid, field.name), getattr(valid, field.name), getattr(other, field.name),
                        f"{name}.", depth - 1,
                    )
                )  # fmt: skip
        else:
            yield f"{name} absent", _cleared(field)
            values = dict(_values(field))
            if getattr(other, field.name) != getattr(valid, field.name):
                values["another's"] = getattr(other, field.name)
            yield from ((f"{name} {told}", _set(field, value)) for told, value in values.items())


def _list_changes(field: Any, valid: Any, other: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    elements = list(getattr(valid, field.name))
    others = list(getattr(other, field.name))
    yield f"{name} absent", _cleared(field)
    if others and others != elements:
        yield f"{name} another's", _listed(field, others)
    if not elements:
        return
    yield f"{name} repeated", _listed(field, [each for each in elements for _ in range(2)])
    yield f"{name} very many", _listed(field, elements * MANY)
    if len(elements) > 1:
        yield f"{name} in the wrong order", _listed(field, elements[::-1])
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        if depth:
            for told, mutate in _changes(elements[0], elements[0], (others or elements)[0], f"{name}[0].", depth - 1):
                yield told, _in_first(field, mutate)
    else:
        for told, value in _values(field):
            yield f"{name}[0] {told}", _listed(field, [value, *elements[1:]])


def _values(field: Any) -> Iterator[tuple[str, Any]]:
    if field.type in _RANGES:
        smallest, largest = _RANGES[field.type]
        yield "zero", 0
        yield "largest", largest
        yield "almost the largest", largest - 1
        if smallest:
            yield "smallest", smallest
    elif field.type == FieldDescriptor.TYPE_BOOL:
        yield "true", True
        yield "false", False
    elif field.type == FieldDescriptor.TYPE_ENUM:
        yield "unknown", UNKNOWN
        yield "largest", (1 << 31) - 1
        yield "smallest", -(1 << 31)
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield from ((f"text {number}", text) for number, text in enumerate(_TEXTS))
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield "empty", b""
        yield "noise", bytes(range(256)) * 4


def _set(field: Any, value: Any) -> Any:
    return lambda message: setattr(message, field.name, value)


def _cleared(field: Any) -> Any:
    return lambda message: message.ClearField(field.name)


def _emptied(field: Any) -> Any:
    def mutate(message: Any) -> None:
        message.ClearField(field.name)
        getattr(message, field.name).SetInParent()

    return mutate


def _listed(field: Any, elements: list[Any]) -> Any:
    def mutate(message: Any) -> None:
        message.ClearField(field.name)
        getattr(message, field.name).extend(elements)

    return mutate


def _within(field: Any, change: Any) -> Any:
    return lambda message: change(getattr(message, field.name))


def _in_first(field: Any, change: Any) -> Any:
    return lambda message: change(getattr(message, field.name)[0])


# -- chunks ------------------------------------------------------------------------------------------------------------


def with_field(chunk: bytes, name: str, value: int) -> bytes:
    """`chunk` with one field of its header changed, and checksums that match."""
    changed = bytearray(chunk)
    offset, layout, _, _ = HEADER_FIELDS.get(name) or PLACEMENT_FIELDS[name]
    struct.pack_into(layout, changed, offset, value)
    struct.pack_into("<I", changed, HEADER_CRC_AT, crc32c(bytes(changed[:HEADER_CRC_AT])))
    if name in PLACEMENT_FIELDS:
        struct.pack_into("<I", changed, 124, crc32c(bytes(changed[88:124])))
    return bytes(changed)


def field_of(chunk: bytes, name: str) -> int:
    """A field of a chunk's header."""
    offset, layout, _, _ = HEADER_FIELDS.get(name) or PLACEMENT_FIELDS[name]
    return int(struct.unpack_from(layout, chunk, offset)[0])


def chunks(valid: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
    """Chunks that differ from `valid` in one field of the header, each with its name and the kind of change."""
    for name, (_, _, smallest, largest) in {**HEADER_FIELDS, **PLACEMENT_FIELDS}.items():
        was, others = field_of(valid, name), field_of(other, name)
        values = {
            "zero": 0, "one": 1, "largest": largest, "almost the largest": largest - 1, "smallest": smallest,
            "the next": min(was + 1, largest), "the one before": max(was - 1, smallest), "another's": others,
        }  # fmt: skip
        told: set[int] = {was}
        for what, value in values.items():
            if value not in told:
                told.add(value)
                yield f"{name} {what}", with_field(valid, name, value)
