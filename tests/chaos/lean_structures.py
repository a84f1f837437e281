"""Lean payloads with intact bytes and a wrong structure: nodes, counts and null bits of a given schema.

Spoilt bytes seldom pass the checks of numbers that have to agree. Here a payload is written node by node as an honest
writer does, with the places, lengths and offsets that its values need, and now and then with something that no honest
writer sends: nulls where Arrow has no nulls, another kind, another number of values, a struct with an extra field.
"""

from __future__ import annotations

import random

import pyarrow as pa
from pyarrow import types

from kera.core.format.lean.kinds import kind_of, storage_of, within
from kera.core.format.lean.layout import (
    BYTES,
    ENCODING_SHIFT,
    LARGE,
    LISTS,
    NODES_BYTES_MAX,
    TEXTS,
    VALIDITY,
    WIDTHS,
    WITH_DELTAS,
    Kind,
    Places,
    Values,
    aligned,
    put_prefix,
    put_varint,
)

VALUES_MAX = 200
"""Values that are written for a node: above that only the number is written."""
BITS_BYTES_MAX = 1 << 16
"""Bytes of bits that are written for a node."""
LENGTHS = (0, 0, 1, 1, 2, 3)
WORDS = "az é 𝄞".encode()


def structured(schema: pa.Schema, records: int, codec: str | None, random_: random.Random) -> bytes:
    """A payload of `records` records. About half of the payloads are right."""
    writer = _Writer(random_, odd=random_.choice((0.0, 0.02, 0.02, 0.1)))
    columns = list(schema.types)
    if writer.is_odd():
        columns = random_.choice((columns[:-1], [*columns, pa.int8()]))
    for kind in columns:
        writer.node(kind, records)
    nodes, body = bytes(writer.nodes[:NODES_BYTES_MAX]), bytes(writer.body)
    if codec is None:
        return put_prefix(nodes, 0, compressed=False) + body
    compressed: bytes = pa.compress(body, codec, asbytes=True)
    return put_prefix(nodes, len(body), compressed=True) + compressed


class _Writer:
    def __init__(self, random_: random.Random, odd: float) -> None:
        self.nodes = bytearray()
        self.body = bytearray()
        self._random = random_
        self._odd = odd
        """The probability of each wrong statement."""

    def is_odd(self) -> bool:
        return self._random.random() < self._odd

    def node(self, kind: pa.DataType, count: int, *, never_null: bool = False) -> None:
        """Write a node, and those within it. `never_null`: an honest writer has no nulls here."""
        random_, kind = self._random, storage_of(kind)
        found = kind_of(kind)
        if self.is_odd():
            found = random_.choice(list(Kind))
        if self.is_odd():
            count = random_.choice((0, count + 1, max(0, count - 1), 1 << 20))
        may_be_null = not never_null or self.is_odd()
        if found is None or found is Kind.NULL or ((may_be_null or not count) and random_.random() < 0.1):
            self.nodes.append(Kind.NULL)
            return
        flags = 0
        if may_be_null and random_.random() < 0.3:
            flags = VALIDITY
            size = min(-(-count // 8), BITS_BYTES_MAX)
            self._put(random_.randbytes(size) if random_.random() < 0.7 else b"\xff" * size, 1)
        if found in BYTES or found in LISTS:
            self._with_places(found, kind, flags, count)
        elif found is Kind.FIXED_LIST:
            size = kind.list_size if types.is_fixed_size_list(kind) else 2
            self._head(found, flags, 0, put_varint(size + self.is_odd()))
            self.node(kind.value_type if types.is_fixed_size_list(kind) else pa.int8(), count * size)
        elif found is Kind.STRUCT:
            fields = within(kind) if types.is_struct(kind) else [pa.int8()] * random_.randrange(4)
            self._struct(fields, flags, count)
        else:
            self._fixed(found, kind, flags, count)

    def _struct(self, fields: list[pa.DataType], flags: int, count: int, keys: int = 0) -> None:
        """`keys`: the number of first fields without nulls."""
        if self.is_odd():
            fields = fields[:-1]
        self._head(Kind.STRUCT, flags, 0, put_varint(len(fields) + self.is_odd()))
        for at, each in enumerate(fields):
            self.node(each, count, never_null=at < keys)

    def _with_places(self, found: Kind, kind: pa.DataType, flags: int, count: int) -> None:
        random_ = self._random
        written = min(count, VALUES_MAX)
        lengths = [random_.choice(LENGTHS) for _ in range(written)]
        encoding = random_.choice(list(Places))
        if encoding is Places.SAME:
            lengths = lengths[:1] * written
        total = sum(lengths) if written == count else (lengths[:1] or [0])[0] * count
        said = total + self.is_odd()
        self._head(found, flags, encoding, put_varint(said))
        if encoding is Places.OFFSETS:
            width, at = (8 if found in LARGE else 4), 0
            offsets = [0] + [at := at + length for length in lengths]
            self._put(b"".join(each.to_bytes(width, "little") for each in offsets), width)
        elif encoding is not Places.SAME:
            width = 1 if encoding is Places.LENGTHS_1 else 2
            self._put(b"".join(each.to_bytes(width, "little") for each in lengths), width)
        if found in BYTES:
            text = b"a" if found in TEXTS and random_.random() < 0.9 else WORDS
            self._put((text * -(-min(said, 1 << 12) // len(text)))[: min(said, 1 << 12)], 1)
        elif types.is_map(kind):
            entries = [kind.key_type, kind.item_type]
            if self.is_odd():
                self.node(pa.struct([("key", entries[0]), ("value", entries[1])]), total)
            else:
                self._struct(entries, 0, total, keys=1)
        else:
            self.node(kind.value_type if types.is_nested(kind) and hasattr(kind, "value_type") else pa.int8(), total)

    def _fixed(self, found: Kind, kind: pa.DataType, flags: int, count: int) -> None:
        random_ = self._random
        size = WIDTHS.get(found, 1)
        behind = b""
        if found is Kind.FIXED:
            size = kind.bit_width // 8 if types.is_fixed_size_binary(kind) or types.is_decimal(kind) else 4
            behind = put_varint(size + self.is_odd())
        choices = [Values.PLAIN]
        if found is not Kind.FIXED:
            choices.append(Values.ONE)
        if found in WITH_DELTAS:
            choices.append(Values.DELTAS)
        encoding = random_.choice(list(Values) if self.is_odd() else choices)
        width = min(-(-count // 8), BITS_BYTES_MAX) if found is Kind.BITS else min(count, VALUES_MAX) * size
        if encoding is Values.PLAIN:
            self._head(found, flags, encoding, behind)
            self._put(self._values(width), 1 if found in (Kind.BITS, Kind.FIXED) else size)
        elif encoding is Values.ONE:
            value = bytes([random_.randrange(2)]) if found is Kind.BITS else self._values(size)
            self._head(found, flags, encoding, behind + value)
        else:
            delta = random_.choice([each for each in (1, 2, 4) if each < size] or [1])
            self._head(found, flags, encoding, behind + self._values(size) + bytes([delta + self.is_odd()]))
            self._put(self._values(min(count, VALUES_MAX) * delta), delta)

    def _values(self, size: int) -> bytes:
        return bytes(size) if self._random.random() < 0.7 else self._random.randbytes(size)

    def _head(self, kind: Kind, flags: int, encoding: int, behind: bytes = b"") -> None:
        self.nodes.append(kind | flags | encoding << ENCODING_SHIFT)
        self.nodes += behind

    def _put(self, data: bytes, width: int) -> None:
        self.body += bytes(aligned(len(self.body), width) - len(self.body)) + data
