"""Record batches as lean payloads.

Small columns are packed: lengths instead of offsets, differences instead of values. Large ones stay in Arrow's layout,
so that readers use them in place. A value that is the same in all records is written only once in either.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from kera.core.errors import CorruptChunk, InvalidArgument
from kera.core.format.lean.check import check_sizes, check_written
from kera.core.format.lean.kinds import bytes_of, kind_of, null_bytes
from kera.core.format.lean.layout import (
    BYTES,
    ENCODING_SHIFT,
    LARGE,
    LISTS,
    NODES_BYTES_MAX,
    VALIDITY,
    WITH_DELTAS,
    Kind,
    Places,
    Values,
    aligned,
    put_prefix,
    put_varint,
)
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.native import accelerated

PACKED_VALUES_MAX = 1024
"""A column with more values is not packed, so that readers use it in place."""
ONE_TIME = -1
"""See `encode_completed`."""
_TIME = DEFAULT_SCHEMA.field("timestamp").type
_LENGTHS_1_MAX, _LENGTHS_2_MAX = (1 << 8) - 1, (1 << 16) - 1


def encode(batch: pa.RecordBatch, codec: str | None, *, bytes_max: int) -> bytes | None:
    """Return the lean payload of a batch whose schema `is_lean`; `codec`: Arrow's name of the body's compression.

    None: readers would not accept it (see `check`), or its nodes take more bytes than the format allows. Raises
    `InvalidArgument` if its schema is not lean.
    """
    return encode_plain(batch, bytes_max) if codec is None else _encode(batch, codec, bytes_max)


@accelerated()
def encode_plain(batch: pa.RecordBatch, bytes_max: int) -> bytes | None:
    """Return the lean payload without compression, see `encode`."""
    return _encode(batch, None, bytes_max)


@accelerated()
def encode_completed(batch: pa.RecordBatch, sources: tuple[int, ...], time_us: int, bytes_max: int) -> bytes | None:
    """Return the lean payload of a batch with added columns, see `encode`; no arrays are made for these.

    `sources` has for each column of the payload the index of the batch's column, or `ONE_TIME` (`time_us` in all rows),
    or the result of `no_values` (nulls).
    """
    writer = _Writer()
    for source in sources:
        if source >= 0:
            writer.add(batch.column(source))
        elif source == ONE_TIME:
            writer.add(pa.repeat(pa.scalar(time_us, _TIME), batch.num_rows))
        else:
            writer.add_nulls(batch.num_rows, ONE_TIME - source)
    return _written(writer, batch.num_rows, None, bytes_max)


def no_values(kind: pa.DataType) -> int:
    """Return the source, for `encode_completed`, of a column of this type that a batch lacks."""
    return ONE_TIME - null_bytes(kind)


def _encode(batch: pa.RecordBatch, codec: str | None, bytes_max: int) -> bytes | None:
    writer = _Writer()
    for column in batch.columns:
        writer.add(column)
    return _written(writer, batch.num_rows, codec, bytes_max)


def _written(writer: _Writer, rows: int, codec: str | None, bytes_max: int) -> bytes | None:
    if len(writer.nodes) > NODES_BYTES_MAX:
        return None
    body = b"".join(writer.pieces)
    if codec is None:
        payload = put_prefix(bytes(writer.nodes), 0, compressed=False) + body
    else:
        prefix = put_prefix(bytes(writer.nodes), len(body), compressed=True)
        payload = prefix + pa.compress(body, codec, asbytes=True)
    try:
        layout = check_sizes(memoryview(payload), rows, compressed=codec is not None, bytes_max=bytes_max)
        check_written(layout, writer.null_bytes, compressed=codec is not None, bytes_max=bytes_max)
    except CorruptChunk:
        return None
    return payload


class _Writer:
    def __init__(self) -> None:
        self.nodes = bytearray()
        self.pieces: list[Any] = []
        """Pieces of the body."""
        self.null_bytes = 0
        """Size of the nulls in columns that have only nulls, beyond a byte for each."""
        self._end = 0

    def add(self, column: pa.Array) -> None:
        """Add a column as a node, with the nodes within it."""
        while isinstance(column, pa.ExtensionArray):
            column = column.storage
        kind, count = kind_of(column.type), len(column)
        if kind is None:
            raise InvalidArgument(f"there are no lean payloads of {column.type}", type=str(column.type))
        if kind is Kind.NULL or (count and column.null_count == count):
            self.add_nulls(count, null_bytes(column.type))
            return
        flags = 0
        if column.null_count:
            flags = VALIDITY
            self._put(_bits(column.buffers()[0], column.offset, count), 1)
        if kind in BYTES or kind in LISTS:
            self._with_places(column, kind, flags)
        elif kind is Kind.FIXED_LIST:
            size = column.type.list_size
            self._node(kind, flags, 0, put_varint(size))
            self.add(column.values.slice(column.offset * size, count * size))
        elif kind is Kind.STRUCT:
            self._node(kind, flags, 0, put_varint(column.type.num_fields))
            for at in range(column.type.num_fields):
                self.add(column.field(at))
        elif kind is Kind.BITS:
            self._bits(column, flags)
        else:
            self._fixed(column, kind, flags)

    def add_nulls(self, count: int, bytes_of_each: int) -> None:
        """Add a node that has only nulls."""
        self.nodes.append(Kind.NULL)
        self.null_bytes += count * (bytes_of_each - 1)

    def _bits(self, column: pa.Array, flags: int) -> None:
        values = _bits(column.buffers()[1], column.offset, len(column))
        if not flags and len(column):
            ones = int(np.unpackbits(values, count=len(column), bitorder="little").sum())
            if ones in (0, len(column)):
                self._node(Kind.BITS, flags, Values.ONE, bytes([ones > 0]))
                return
        self._node(Kind.BITS, flags, Values.PLAIN)
        self._put(values, 1)

    def _fixed(self, column: pa.Array, kind: Kind, flags: int) -> None:
        count, width = len(column), bytes_of(column.type)
        held = column.buffers()[1]
        raw = memoryview(held)[column.offset * width : (column.offset + count) * width] if held is not None else b""
        if kind is Kind.FIXED:
            self._node(kind, flags, Values.PLAIN, put_varint(width))
            self._put(raw, 1)
            return
        if count and width <= 8:
            values = np.frombuffer(raw, f"<u{width}")
            if values[0] == values[-1] and (values == values[0]).all():
                self._node(kind, flags, Values.ONE, bytes(raw[:width]))
                return
            if kind in WITH_DELTAS and count <= PACKED_VALUES_MAX and self._deltas(values, kind, flags, width):
                return
        self._node(kind, flags, Values.PLAIN)
        self._put(raw, width)

    def _deltas(self, values: npt.NDArray[Any], kind: Kind, flags: int, width: int) -> bool:
        signed = values.view(f"<i{width}")
        least = signed.min()
        span = int(signed.max()) - int(least)
        delta_bytes = next((each for each in (1, 2, 4) if span < 1 << 8 * each), width)
        if delta_bytes >= width:
            return False
        self._node(kind, flags, Values.DELTAS, least.tobytes() + bytes([delta_bytes]))
        self._put((values - least.view(f"<u{width}")).astype(f"<u{delta_bytes}"), delta_bytes)
        return True

    def _with_places(self, column: pa.Array, kind: Kind, flags: int) -> None:
        count, width = len(column), 8 if kind in LARGE else 4
        held = column.buffers()
        offsets = (
            np.frombuffer(held[1], f"<i{width}", count + 1, column.offset * width) if count else np.zeros(1, "<i4")
        )
        first = int(offsets[0])
        total = int(offsets[-1]) - first
        self._places(offsets, kind, flags, total, width)
        if kind in BYTES:
            self._put(b"" if held[2] is None else memoryview(held[2])[first : first + total], 1)
        elif types.is_map(column.type):
            entries = [column.keys.slice(first, total), column.items.slice(first, total)]
            self._node(Kind.STRUCT, 0, 0, put_varint(len(entries)))
            for each in entries:
                self.add(each)
        else:
            self.add(column.values.slice(first, total))

    def _places(self, offsets: npt.NDArray[Any], kind: Kind, flags: int, total: int, width: int) -> None:
        lengths = np.diff(offsets)
        least, most = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        if least == most:
            self._node(kind, flags, Places.SAME, put_varint(total))
        elif len(lengths) <= PACKED_VALUES_MAX and most <= _LENGTHS_1_MAX:
            self._node(kind, flags, Places.LENGTHS_1, put_varint(total))
            self._put(lengths.astype("<u1"), 1)
        elif len(lengths) <= PACKED_VALUES_MAX and most <= _LENGTHS_2_MAX:
            self._node(kind, flags, Places.LENGTHS_2, put_varint(total))
            self._put(lengths.astype("<u2"), 2)
        else:
            self._node(kind, flags, Places.OFFSETS, put_varint(total))
            self._put(offsets if not offsets[0] else offsets - offsets[0], width)

    def _node(self, kind: Kind, flags: int, encoding: int, behind: bytes = b"") -> None:
        self.nodes.append(kind | flags | encoding << ENCODING_SHIFT)
        self.nodes += behind

    def _put(self, data: Any, width: int) -> None:
        at = aligned(self._end, width)
        if at > self._end:
            self.pieces.append(bytes(at - self._end))
        self.pieces.append(data)
        self._end = at + memoryview(data).nbytes


def _bits(buffer: pa.Buffer, offset: int, count: int) -> npt.NDArray[np.uint8]:
    """Return `count` bits from bit `offset` on, as separate bytes; zeros follow the last bit."""
    first, size = offset // 8, -(-(offset % 8 + count) // 8)
    held = np.frombuffer(buffer, np.uint8, size, first)
    if offset % 8 == 0 and count % 8 == 0:
        return held
    return np.packbits(np.unpackbits(held, bitorder="little")[offset % 8 : offset % 8 + count], bitorder="little")
