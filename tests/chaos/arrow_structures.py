"""Arrow messages with intact tables and a wrong structure: the counts, null bits and numbers of a schema.

The payload of an honest writer is taken apart into the nodes and buffers of its fields. Some of them are replaced with
things that no honest writer sends: null bits where Arrow has no nulls, offsets that do not ascend, types that a union
does not have, runs that end before they begin, views beyond their buffers. Then the message is put together again,
compressed if the source was, so that everything else is correct.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import pyarrow as pa
from pyarrow import types

from kera.core.format.lean.kinds import storage_of
from kera.core.format.record_batch import shape_of

ALIGNMENT_BYTES = 8
_U16, _U32, _I64, _PAIR = (struct.Struct(f"<{code}") for code in ("H", "I", "q", "qq"))
PLACES_MAX = 64
"""The most numbers of a buffer that are changed."""
_NUMBERS = (-1, 0, 1, 2, 3, 40, 41, 127, 255, 1 << 20, (1 << 31) - 1, -(1 << 31))


class Role(Enum):
    """The meaning of the numbers in a buffer."""

    VALIDITY = "validity"
    OFFSETS = "offsets"
    SIZES = "sizes"
    TYPE_IDS = "type ids"
    RUN_ENDS = "run ends"
    VIEWS = "views"
    DATA = "data"


class Field(NamedTuple):
    """A field, with its place in the message."""

    node: int
    buffers: tuple[tuple[int, Role, int], ...]
    """The index, the role, and the bytes per number of each buffer."""
    never_null: bool
    """Arrow has no nulls here: keys and entries of maps, ends of runs, and fields that say where something is."""


class Message:
    """A record-batch message, taken apart."""

    def __init__(self, payload: bytes, schema: pa.Schema, codec: str | None) -> None:
        """`payload`: a message of `schema` that an honest writer has made."""
        self._codec = codec
        shape = shape_of(memoryview(payload))
        self._head = bytearray(payload[: shape.body_at])
        self._nodes_at, self._buffers_at = shape.nodes_at, shape.buffers_at
        self.nodes = self._pairs(self._nodes_at)
        body = payload[shape.body_at :]
        self.buffers = [self._opened(body[at : at + size]) for at, size in self._pairs(self._buffers_at)]
        self._body_bytes_at = _body_bytes_at(payload)
        self.fields = list(_fields(schema, self._variadic(payload)))

    def _pairs(self, at: int) -> list[tuple[int, int]]:
        if not at:
            return []
        (count,) = _U32.unpack_from(self._head, at)
        return [_PAIR.unpack_from(self._head, at + 4 + _PAIR.size * number) for number in range(count)]

    def _opened(self, stored: bytes) -> bytes:
        if self._codec is None or not stored:
            return stored
        (size,) = _I64.unpack_from(stored)
        raw = stored[_I64.size :]
        return raw if size < 0 else pa.decompress(raw, size, self._codec, asbytes=True)

    def _stored(self, data: bytes) -> bytes:
        if self._codec is None or not data:
            return data
        return _I64.pack(len(data)) + bytes(pa.compress(data, self._codec, asbytes=True))

    def _variadic(self, payload: bytes) -> list[int]:
        """The number of data buffers of each field of views."""
        batch = _batch_at(payload)
        vtable = batch - struct.unpack_from("<i", payload, batch)[0]
        (vtable_bytes,) = _U16.unpack_from(payload, vtable)
        (at,) = _U16.unpack_from(payload, vtable + 12) if vtable_bytes > 12 else (0,)
        if not at:
            return []
        at += batch + _U32.unpack_from(payload, batch + at)[0]
        (count,) = _U32.unpack_from(payload, at)
        return [_I64.unpack_from(payload, at + 4 + 8 * number)[0] for number in range(count)]

    def to_bytes(self) -> bytes:
        """The message with its current nodes and buffers."""
        head, body = bytearray(self._head), bytearray()
        for number, node in enumerate(self.nodes):
            _PAIR.pack_into(head, self._nodes_at + 4 + _PAIR.size * number, *map(_signed, node))
        for number, data in enumerate(map(self._stored, self.buffers)):
            _PAIR.pack_into(head, self._buffers_at + 4 + _PAIR.size * number, len(body), len(data))
            body += data + bytes(-len(data) % ALIGNMENT_BYTES)
        if self._body_bytes_at:
            _I64.pack_into(head, self._body_bytes_at, len(body))
        return bytes(head + body)


def _signed(number: int) -> int:
    """Wrap a number to signed 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _batch_at(payload: bytes) -> int:
    """The offset of the table of the record batch."""
    message = 8 + _U32.unpack_from(payload, 8)[0]
    vtable = message - struct.unpack_from("<i", payload, message)[0]
    at: int = message + _U16.unpack_from(payload, vtable + 8)[0]
    return at + int(_U32.unpack_from(payload, at)[0])


def _body_bytes_at(payload: bytes) -> int:
    """The offset of the length of the body; 0 if the message does not have this field."""
    message = 8 + _U32.unpack_from(payload, 8)[0]
    vtable = message - struct.unpack_from("<i", payload, message)[0]
    (vtable_bytes,) = _U16.unpack_from(payload, vtable)
    (at,) = _U16.unpack_from(payload, vtable + 10) if vtable_bytes > 10 else (0,)
    return message + at if at else 0


def _fields(schema: pa.Schema, variadic: list[int]) -> Iterator[Field]:
    """All fields in the order of their nodes."""
    walk = _Walk(variadic)
    for kind in schema.types:
        yield from walk.field(kind)


class _Walk:
    def __init__(self, variadic: list[int]) -> None:
        self._nodes = self._buffers = 0
        self._variadic = iter(variadic)

    def field(self, kind: pa.DataType, *, never_null: bool = False) -> Iterator[Field]:
        kind = storage_of(kind)
        roles = _roles(kind)
        if types.is_string_view(kind) or types.is_binary_view(kind):
            roles += [(Role.DATA, 1)] * next(self._variadic)
        first = self._buffers
        self._buffers += len(roles)
        self._nodes += 1
        buffers = tuple((first + at, role, width) for at, (role, width) in enumerate(roles))
        yield Field(self._nodes - 1, buffers, never_null)
        if types.is_map(kind):
            yield from self._entries(kind)
        elif types.is_run_end_encoded(kind):
            yield Field(self._nodes, tuple(self._run_ends(kind)), never_null=True)
            self._nodes += 1
            yield from self.field(kind.value_type)
        else:
            for at in range(kind.num_fields):
                yield from self.field(kind.field(at).type)

    def _entries(self, kind: pa.DataType) -> Iterator[Field]:
        yield Field(self._nodes, ((self._buffers, Role.VALIDITY, 1),), never_null=True)
        self._nodes += 1
        self._buffers += 1
        yield from self.field(kind.key_type, never_null=True)
        yield from self.field(kind.item_type)

    def _run_ends(self, kind: pa.DataType) -> Iterator[tuple[int, Role, int]]:
        yield self._buffers, Role.VALIDITY, 1
        yield self._buffers + 1, Role.RUN_ENDS, kind.run_end_type.bit_width // 8
        self._buffers += 2


def _roles(kind: pa.DataType) -> list[tuple[Role, int]]:  # noqa: PLR0911 - a kind of type each
    validity = (Role.VALIDITY, 1)
    if types.is_null(kind) or types.is_run_end_encoded(kind):
        return []
    if types.is_union(kind):
        return [(Role.TYPE_IDS, 1)] + ([(Role.OFFSETS, 4)] if kind.mode == "dense" else [])
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return [validity]
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        width = 8 if types.is_large_list_view(kind) else 4
        return [validity, (Role.OFFSETS, width), (Role.SIZES, width)]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return [validity, (Role.OFFSETS, 8 if types.is_large_list(kind) else 4)]
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return [validity, (Role.VIEWS, 4)]
    if types.is_string(kind) or types.is_binary(kind):
        return [validity, (Role.OFFSETS, 4), (Role.DATA, 1)]
    if types.is_large_string(kind) or types.is_large_binary(kind):
        return [validity, (Role.OFFSETS, 8), (Role.DATA, 1)]
    return [validity, (Role.DATA, 1)]


def restructured(payload: bytes, schema: pa.Schema, codec: str | None, random_: random.Random) -> bytes:
    """`payload`, of a batch of `schema`, with one to three wrong fields."""
    message = Message(payload, schema, codec)
    if not message.fields:
        return payload
    for _ in range(random_.choice((1, 1, 2, 3))):
        field = random_.choice(message.fields)
        if field.never_null and random_.random() < 0.5:
            _put_nulls(message, field, random_)
        else:
            random_.choice((_put_node, _put_nulls, _put_numbers, _put_numbers, _put_numbers, _cut))(
                message, field, random_
            )
    return message.to_bytes()


def _put_node(message: Message, field: Field, random_: random.Random) -> None:
    """Put another number of values or nulls."""
    length, nulls = message.nodes[field.node]
    wild = random_.choice((0, -1, 1, length - 1, length + 1, 2 * length, 1 << 31, (1 << 63) - 1, -(1 << 63)))
    message.nodes[field.node] = (length, wild) if random_.random() < 0.5 else (wild, nulls)


def _put_nulls(message: Message, field: Field, random_: random.Random) -> None:
    """Put null bits, and a number of nulls that may not match."""
    bits = [number for number, role, _ in field.buffers if role is Role.VALIDITY]
    length, _ = message.nodes[field.node]
    if not bits or not 0 <= length < 1 << 16:
        return
    data = random_.choice((bytes(-(-length // 8)), random_.randbytes(-(-length // 8))))
    nulls = sum(not data[at // 8] >> at % 8 & 1 for at in range(length))
    message.buffers[bits[0]] = data
    message.nodes[field.node] = length, random_.choice((nulls, nulls, nulls, 0, -1, 1, length))


def _put_numbers(message: Message, field: Field, random_: random.Random) -> None:
    """Put other offsets, sizes, types, ends or views; or other bytes of values."""
    if not field.buffers:
        return
    number, role, width = random_.choice(field.buffers)
    data = bytearray(message.buffers[number])
    places = len(data) // width
    if not places:
        return
    for _ in range(random_.choice((1, 1, 2, min(places, PLACES_MAX)))):
        at = random_.choice((0, places - 1, random_.randrange(places))) * width
        was = int.from_bytes(data[at : at + width], "little", signed=True)
        found = random_.choice((was + 1, was - 1, -was, random_.choice(_NUMBERS)))
        if role is Role.DATA and random_.random() < 0.5:
            found = random_.randrange(256)
        data[at : at + width] = (found % (1 << 8 * width)).to_bytes(width, "little")
    message.buffers[number] = bytes(data)


def _cut(message: Message, field: Field, random_: random.Random) -> None:
    """Make a buffer shorter than its values, or empty."""
    if field.buffers:
        number, _, _ = random_.choice(field.buffers)
        data = message.buffers[number]
        message.buffers[number] = data[: random_.choice((0, len(data) // 2, max(0, len(data) - 1)))]
