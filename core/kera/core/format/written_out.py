"""The size of a record batch's values when each is written out.

In most of Arrow's types every value has its own bytes, so that a batch is as large as its buffers. In some types many
values can share the same bytes: views, list views, runs, dense unions. A few kilobytes of these can become gigabytes
for a reader that makes separate values of them, as Python, Spark and any conversion to another type do.

Pure. Promise: whatever the numbers in the arrays are, the outcome is a size or `CorruptChunk`. The values are not
written out to find it, and the cost grows only with the bytes of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import types

from kera.core.errors import CorruptChunk

INLINE_BYTES = 12
"""Length of the longest value that a view holds itself; longer values are in another buffer."""
LIST_BYTES = 64
"""Size of a list itself, as in Python: ten million empty ones take seconds, and most of a gigabyte."""
_VIEW_BYTES = 16
_SCHEMAS_KEPT = 256
_BITS = 8

_Numbers: TypeAlias = "npt.NDArray[np.int64]"
_Sizes: TypeAlias = "npt.NDArray[np.floating[Any]]"
_Before: TypeAlias = Callable[[_Numbers], _Sizes]
"""Returns, for each of the given places in an array, the total size of the values before it. It is a function of sums,
so that no array of sizes is needed where a million values are one run, or have no bytes at all."""


class _Kinds(NamedTuple):
    schema: pa.Schema
    shared: tuple[int, ...]
    without_bytes: bool
    never_null: tuple[int, ...]


_known: dict[int, _Kinds] = {}


def shared_columns(schema: pa.Schema) -> tuple[int, ...]:
    """Return the columns of `schema` with types, nested ones included, whose values can share the same bytes."""
    return _kinds(schema).shared


def may_grow(schema: pa.Schema) -> bool:
    """Return whether a batch can be larger than its buffers: it has `shared_columns`, or values that take no bytes."""
    kinds = _kinds(schema)
    return kinds.without_bytes or bool(kinds.shared)


def never_null_columns(schema: pa.Schema) -> tuple[int, ...]:
    """Return the columns of `schema` that are not nullable."""
    return _kinds(schema).never_null


def _kinds(schema: pa.Schema) -> _Kinds:
    known = _known.get(id(schema))
    if known is None:  # found by identity, with the schema kept: comparing schemas would cost more than all the rest
        if len(_known) >= _SCHEMAS_KEPT:
            _known.clear()
        within = [list(_within(kind)) for kind in schema.types]
        shared = tuple(at for at, kinds in enumerate(within) if any(map(_is_shared, kinds)))
        without_bytes = any(_is_without_bytes(kind) for kinds in within for kind in kinds)
        never_null = tuple(at for at, field in enumerate(schema) if not (field.nullable or types.is_null(field.type)))
        known = _Kinds(schema, shared, without_bytes, never_null)
        _known[id(schema)] = known
    return known


def check_written_out(batch: pa.RecordBatch, limit: int) -> None:
    """Raise `CorruptChunk` if the columns of `batch` would take more than `limit` bytes with each value written out.

    Only the columns that can be larger than their buffers count, see `shared_columns`. Of the batch, only the sizes of
    its buffers need have been validated (`RecordBatch.validate`).
    """
    total = 0.0
    for at in shared_columns(batch.schema):
        column = batch.column(at)
        total += float(_before(column, limit)(_place(len(column)))[0])
        if total > limit:
            raise _too_large(total, limit)


def _within(kind: pa.DataType) -> Iterator[pa.DataType]:
    """Yield `kind` and all types nested in it."""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    yield kind
    for at in range(kind.num_fields):
        yield from _within(kind.field(at).type)


def _is_view(kind: pa.DataType) -> bool:
    return bool(types.is_string_view(kind) or types.is_binary_view(kind))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(types.is_list_view(kind) or types.is_large_list_view(kind))


def _is_shared(kind: pa.DataType) -> bool:
    dense = types.is_union(kind) and kind.mode == "dense"
    return _is_view(kind) or _is_list_view(kind) or types.is_run_end_encoded(kind) or dense


def _is_without_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_null(kind)
        or (types.is_fixed_size_binary(kind) and kind.byte_width == 0)
        or (types.is_fixed_size_list(kind) and kind.list_size == 0)
        or (types.is_struct(kind) and kind.num_fields == 0)
    )


def _before(column: pa.Array, limit: int) -> _Before:
    """Return the sizes of `column`.

    Raises `CorruptChunk` if it, or an array nested in it, is larger than `limit`, as conversions convert all of it.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    find = _found(column, limit)
    total = float(find(_place(len(column)))[0])
    if total > limit:
        raise _too_large(total, limit)
    return find


def _found(column: pa.Array, limit: int) -> _Before:  # noqa: PLR0911 - one for each kind of type
    kind = column.type
    if _is_view(kind):
        return _sums(_lengths_of_views(column), limit)
    if types.is_struct(kind) and kind.num_fields:
        fields = [_before(column.field(at), limit) for at in range(kind.num_fields)]
        return lambda places: sum((field(places) for field in fields), np.zeros(len(places)))
    if types.is_fixed_size_list(kind) and kind.list_size:
        elements, size = _before(column.values, limit), kind.list_size
        return lambda places: elements(places * size) + places * LIST_BYTES
    if types.is_run_end_encoded(kind):
        return _of_runs(column, limit)
    if types.is_union(kind):
        return _sums(_of_union(column, limit), limit)
    if _is_list_view(kind):
        starts, counts = _numbers(column.offsets), _numbers(column.sizes)
        return _sums(_of_lists(column, starts, starts + counts, limit), limit)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = _numbers(column.offsets)
        return _sums(_of_lists(column, offsets[:-1], offsets[1:], limit), limit)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return _of_text(column, limit)
    width = _width(kind)
    return lambda places: places * width


def _width(kind: pa.DataType) -> float:
    """Return the size of a value of a fixed-width type: at least a byte, also for bits and for types without bytes."""
    if types.is_fixed_size_binary(kind):
        return max(1.0, float(kind.byte_width))  # the number of bits overflows
    try:
        return max(1.0, float(kind.bit_width) / _BITS)
    except ValueError:
        return 1.0


def _place(number: int) -> _Numbers:
    return np.array([number], np.int64)


def _numbers(numbers: pa.Array) -> _Numbers:
    if numbers.null_count:
        raise _no_batch("an array of places with nulls")
    return np.asarray(numbers, np.int64)


def _sums(sizes: _Sizes, limit: int) -> _Before:
    """Return the sums of `sizes`. Each value counts as at least a byte, and at most `limit` + 1, which is too much."""
    sums = np.zeros(len(sizes) + 1)
    np.cumsum(np.clip(sizes, 1, limit + 1), out=sums[1:])
    return lambda places: sums[places]


def _lengths_of_views(column: pa.Array) -> _Sizes:
    """Return the size of each view. Views of nulls count too, since Arrow's casts copy them; honest writers make them
    empty.

    Raises `CorruptChunk` if a view, even that of a null, reaches beyond its buffers; Arrow does not validate views of
    nulls.
    """
    _, views, *data = column.buffers()
    if not len(column):
        return np.zeros(0)
    rows = np.frombuffer(views, np.int32, 4 * len(column), _VIEW_BYTES * column.offset).reshape(-1, 4)
    lengths = rows[:, 0].astype(np.int64)
    far = rows[lengths > INLINE_BYTES]
    sizes = np.array([0 if buffer is None else buffer.size for buffer in data], np.int64)
    known = (far[:, 2] >= 0) & (far[:, 2] < len(sizes)) & (far[:, 3] >= 0)
    if (lengths < 0).any() or not known.all() or (far[:, 3].astype(np.int64) + far[:, 0] > sizes[far[:, 2]]).any():
        raise _no_batch("a view that reaches out of its buffers")
    return lengths.astype(np.float64)


def _of_those_there(column: pa.Array, sizes: Any) -> _Sizes:
    """Return `sizes` with 0 for nulls, whatever their offsets are."""
    found: _Sizes = np.array(sizes, np.float64)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return found


def _of_text(column: pa.Array, limit: int) -> _Before:
    wide = types.is_large_string(column.type) or types.is_large_binary(column.type)
    offsets = column.buffers()[1]
    if not len(column):
        return _sums(np.zeros(0), limit)
    width = np.int64 if wide else np.int32
    found = np.frombuffer(offsets, width, len(column) + 1, column.offset * np.dtype(width).itemsize)
    return _sums(np.diff(found).astype(np.float64), limit)


def _of_lists(column: pa.Array, starts: _Numbers, ends: _Numbers, limit: int) -> _Sizes:
    elements = _before(column.values, limit)
    if (starts < 0).any() or (ends < starts).any() or (ends > len(column.values)).any():
        raise _no_batch("a list that reaches out of its elements")
    return _of_those_there(column, elements(ends) - elements(starts) + LIST_BYTES)


def _of_runs(column: pa.Array, limit: int) -> _Before:
    values = column.values
    ends = _numbers(column.run_ends)
    if len(ends) != len(values) or (np.diff(ends, prepend=0) <= 0).any() or (len(column) and not len(ends)):
        raise _no_batch("runs that do not follow each other")
    if not len(ends):
        return lambda places: places * 0.0
    one = _before(values, limit)
    at = np.arange(len(values))
    sums = np.concatenate([[0.0], np.cumsum((one(at + 1) - one(at)) * np.diff(ends, prepend=0))])
    bounds = np.concatenate([[0], ends])

    return lambda places: np.interp(places, bounds, sums)  # within a run all values are the same


def _of_union(column: pa.Array, limit: int) -> _Sizes:
    kind = column.type
    dense = kind.mode == "dense"
    if len(column):
        codes = _numbers(column.type_codes)
        places = _numbers(column.offsets) if dense else np.arange(len(column))
    else:  # its buffers may be absent, and Arrow looks into them
        codes = places = np.zeros(0, np.int64)
    sizes = np.zeros(len(column))
    known = np.zeros(len(column), bool)
    for at, code in enumerate(kind.type_codes):
        child = column.field(at)
        one = _before(child, limit)
        mine = codes == code
        found = places[mine]
        if (found < 0).any() or (found >= len(child)).any():
            raise _no_batch("a value of a union that is in none of its fields")
        sizes[mine] = one(found + 1) - one(found)
        known |= mine
    if not known.all():
        raise _no_batch("a value of a union with a type that the union lacks")
    return sizes


def _too_large(size: float, limit: int) -> CorruptChunk:
    return CorruptChunk(
        f"the values of a chunk's record batch would become {size:.0f} bytes or more when each is written out; at most"
        f" {limit} are taken (decompressed_bytes_max)",
        expanded_bytes=int(size),
        limit=limit,
    )


def _no_batch(why: str) -> CorruptChunk:
    return CorruptChunk(f"chunk payload is not an Arrow record batch: {why}")
