"""Changes messages of protobuf field by field, not byte by byte. Pure.

A message is taken apart into its fields, including those of messages within it. It is put together again with some
fields absent, repeated, in another order, of another kind, or with values that no honest peer sends; or with unknown
fields, and messages within messages within messages. Most results are valid messages again, so they reach the handlers,
while messages with flipped bytes seldom do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, NamedTuple, TypeAlias

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.fuzz.mutating import mutated, near, wild

VARINT, FIXED64, BYTES, GROUP, GROUP_END, FIXED32 = range(6)
TEXTS = (
    b"",
    b"x" * 70_000,
    b"\x00\x1b[2J\n",
    b"../../etc/passwd",
    b"\xff\xfe\x80",
    b"{}'\"%s%n",
    "𝄞\u202e".encode(),
    b"0",
)
MANY = 1_000
SELDOM = 0.05
"""How often a repetition is a long one: such messages take longest to make."""
DEEP = (2, 20, 99, 101, 1_000, 5_000)
"""Depths of nested messages. Protobuf itself takes a hundred messages within each other."""
BYTES_MAX = 1 << 19
"""Length limit of a changed message: few requests are larger."""


_SMALL = [bytes([number]) for number in range(0x80)]


Descriptor: TypeAlias = Any
"""Protobuf has several classes of descriptors with the same interface."""


class Field(NamedTuple):
    """A field as it is on the wire."""

    number: int
    kind: int
    value: Any
    """A number, bytes, or the fields of a message."""
    within: Descriptor = None
    """The descriptor, if the field is a message."""


def fields_of(data: bytes, descriptor: Descriptor) -> list[Field]:
    """The fields of a message that protobuf has written."""
    found: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        value: Any
        if kind == VARINT:
            value, at = _read_varint(data, at)
        elif kind == BYTES:
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
        else:
            width = 8 if kind == FIXED64 else 4
            value, at = data[at : at + width], at + width
        known = descriptor.fields_by_number.get(number) if descriptor is not None else None
        within = known.message_type if known is not None else None
        found.append(Field(number, kind, fields_of(value, within) if within is not None else value, within))
    return found


def data_of(fields: list[Field]) -> bytes:
    """The message that these fields make."""
    out = bytearray()
    for number, kind, value, _ in fields:
        out += varint(number << 3 | kind)
        if kind == VARINT:
            out += varint(value)
        elif kind == BYTES:
            data = data_of(value) if isinstance(value, list) else value
            out += varint(len(data)) + data
        else:
            out += value
    return bytes(out)


def varint(value: int, width: int = 0) -> bytes:
    """A number as protobuf writes it; padded to `width` bytes, which protobuf never does."""
    if 0 <= value < 0x80 and width < 2:
        return _SMALL[value]
    out = bytearray()
    value %= 1 << 64
    while value >= 0x80 or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def spoilt(message: Message, random_: Random) -> bytes:
    """The bytes of `message`, with one or several fields changed, or a few bytes."""
    if random_.random() < 0.1:
        return mutated(message.SerializeToString(), random_)
    fields = fields_of(message.SerializeToString(), message.DESCRIPTOR)
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        random_.choice(_CHANGES)(_place(fields, message.DESCRIPTOR, random_), random_)
    data = data_of(fields)
    if random_.random() < 0.03:
        data += random_.choice(_TAILS)(random_)
    return data[:BYTES_MAX]


class _Place(NamedTuple):
    """A message and the index of one of its fields; -1 stands for the message itself."""

    fields: list[Field]
    at: int
    descriptor: Descriptor


def _place(fields: list[Field], descriptor: Descriptor, random_: Random) -> _Place:
    """A field of a message, or of one within it; or the message itself."""
    at = random_.randrange(-1, len(fields))
    if at >= 0 and isinstance(fields[at].value, list) and random_.random() < 0.7:
        return _place(fields[at].value, fields[at].within, random_)
    return _Place(fields, at, descriptor)


def _absent(place: _Place, _: Random) -> None:
    if place.at >= 0:
        del place.fields[place.at]


def _repeated(place: _Place, random_: Random) -> None:
    if place.at >= 0:
        field, count = place.fields[place.at], random_.choice((1, 1, 2))
        if random_.random() < SELDOM:
            count = min(MANY, BYTES_MAX // (len(data_of([field])) + len(data_of(place.fields))))
        place.fields[place.at : place.at] = [_copied(field) for _ in range(count)]


def _copied(field: Field) -> Field:
    """A copy of a field: later changes to it leave the other copies alone."""
    if not isinstance(field.value, list):
        return field
    return field._replace(value=[_copied(each) for each in field.value])


def _reordered(place: _Place, random_: Random) -> None:
    random_.shuffle(place.fields)


def _valued(place: _Place, random_: Random) -> None:
    """Give the field, or one that the message could have, another value of its kind."""
    if place.at < 0:
        _added(place, random_)
        return
    field = place.fields[place.at]
    if isinstance(field.value, list):
        value: Any = random_.choice(([], [*field.value, *_copied(field).value], field.value[: len(field.value) // 2]))
    elif field.kind == VARINT:
        value = near(random_, field.value)
    elif field.kind == BYTES:
        value = random_.choice((*TEXTS, mutated(field.value, random_), _packed(random_)))
    else:
        value = random_.randbytes(len(field.value))
    place.fields[place.at] = field._replace(value=value)


def _added(place: _Place, random_: Random) -> None:
    """Add a field of the message's type, which it may have already."""
    if place.descriptor is None or not place.descriptor.fields:
        return
    known = random_.choice(list(place.descriptor.fields))
    kind = {
        FieldDescriptor.CPPTYPE_MESSAGE: BYTES,
        FieldDescriptor.CPPTYPE_STRING: BYTES,
        FieldDescriptor.CPPTYPE_DOUBLE: FIXED64,
        FieldDescriptor.CPPTYPE_FLOAT: FIXED32,
    }.get(known.cpp_type, VARINT)
    value: Any
    if known.message_type is not None:
        value = []
        inner = _Place(value, -1, known.message_type)
        for _ in range(random_.choice((0, 1, 3))):
            _added(inner, random_)
    elif kind == BYTES:
        value = random_.choice(TEXTS)
    elif kind == VARINT:
        value = wild(random_)
    else:
        value = random_.randbytes(8 if kind == FIXED64 else 4)
    place.fields.append(Field(known.number, kind, value, known.message_type))


def _of_another_kind(place: _Place, random_: Random) -> None:
    if place.at >= 0:
        kind = random_.choice((VARINT, FIXED64, BYTES, FIXED32))
        value: Any = {VARINT: wild(random_), FIXED64: random_.randbytes(8), FIXED32: random_.randbytes(4)}.get(
            kind, random_.randbytes(9)
        )
        place.fields[place.at] = Field(place.fields[place.at].number, kind, value)


def _unknown(place: _Place, random_: Random) -> None:
    number = random_.choice((0, 15, 16, 99, 19_000, (1 << 29) - 1))
    place.fields.insert(random_.randrange(len(place.fields) + 1), Field(number, BYTES, random_.choice(TEXTS)))


def _nested(place: _Place, random_: Random) -> None:
    """Add messages within each other, in a field that is a message if there is one."""
    numbers = [field.number for field in place.fields if field.within is not None] or [random_.choice((1, 15, 99))]
    number = random_.choice(numbers)
    place.fields.append(Field(number, BYTES, _deep(number, random_.choice(DEEP))))


@cache
def _deep(number: int, depth: int) -> bytes:
    tag, data = varint(number << 3 | BYTES), b""
    for _ in range(depth):
        data = tag + varint(len(data)) + data
    return data


def _packed(random_: Random) -> bytes:
    some = b"".join(varint(wild(random_)) for _ in range(3))
    return some * random_.choice((1, 1, MANY))


_CHANGES: tuple[Callable[[_Place, Random], None], ...] = (
    *(_absent, _repeated, _reordered, _valued, _valued, _valued, _valued),
    *(_added, _added, _of_another_kind, _unknown, _nested),
)
_TAILS: tuple[Callable[[Random], bytes], ...] = (
    lambda random_: varint(wild(random_), width=10),
    lambda random_: varint(random_.choice((1, 3, 15)) << 3 | BYTES) + varint(wild(random_)),
    lambda random_: varint(random_.choice((1, 15)) << 3 | GROUP) * random_.choice(DEEP),
    lambda _: varint(1 << 3 | GROUP_END),
    lambda _: b"\xff" * 11,
    lambda random_: varint(3 << 3 | VARINT, width=5) + varint(1, width=10) + random_.randbytes(3),
)
"""Ends that are not valid lists of fields."""
