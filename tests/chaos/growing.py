"""Small, valid record batches whose values fill gigabytes when each is written out; and similar ones that stay small.

Each uses types that a stream's schema may have. The batches that stay small use the same types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

MANY = 2_000_000_000
VALUE = b"x" * (1 << 20)
ROWS = 5_000
FEW = 40


def _one_of(*columns: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(columns), names=[f"c{at}" for at in range(len(columns))])


def _offsets(*numbers: int) -> pa.Buffer:
    return pa.py_buffer(np.array(numbers, np.int32))


def _nulls_in_a_list() -> pa.RecordBatch:
    return _one_of(pa.Array.from_buffers(pa.list_(pa.null()), 1, [None, _offsets(0, MANY)], children=[pa.nulls(MANY)]))


def _nulls_in_a_fixed_list() -> pa.RecordBatch:
    return _one_of(pa.Array.from_buffers(pa.list_(pa.null(), MANY), 1, [None], children=[pa.nulls(MANY)]))


def _empty_structs() -> pa.RecordBatch:
    empty = pa.Array.from_buffers(pa.struct([]), MANY, [None])
    return _one_of(pa.Array.from_buffers(pa.list_(pa.struct([])), 1, [None, _offsets(0, MANY)], children=[empty]))


def _structs_of_nulls() -> pa.RecordBatch:
    kind: pa.DataType = pa.null()
    inner = pa.nulls(1 << 26)
    for _ in range(5):
        kind = pa.struct([("a", kind)])
        inner = pa.Array.from_buffers(kind, len(inner), [None], children=[inner])
    return _one_of(pa.Array.from_buffers(pa.list_(kind), 1, [None, _offsets(0, len(inner))], children=[inner]))


def _empty_binaries() -> pa.RecordBatch:
    empty = pa.Array.from_buffers(pa.binary(0), MANY, [None, pa.py_buffer(b"")])
    return _one_of(pa.Array.from_buffers(pa.list_(pa.binary(0)), 1, [None, _offsets(0, MANY)], children=[empty]))


def _views_of(kind: pa.DataType, rows: int) -> pa.Array:
    one = pa.array([VALUE if kind == pa.binary_view() else VALUE.decode()], kind)
    _, view, data = one.buffers()
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(bytes(view) * rows), data])


def _lists_of_lists() -> pa.RecordBatch:
    """Ten list views of all previous ones, five times: this multiplies the values by a hundred thousand."""
    values = pa.array(range(FEW * 1000), pa.int64())
    for _ in range(5):
        values = pa.ListViewArray.from_arrays(
            pa.array([0] * 10, pa.int32()), pa.array([len(values)] * 10, pa.int32()), values
        )
    return _one_of(values)


def _runs(values: pa.Array, rows: int) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), values)


def _runs_in_a_list() -> pa.RecordBatch:
    runs = _runs(pa.array([VALUE]), MANY)
    return _one_of(pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), runs))


def _dense_union() -> pa.RecordBatch:
    codes, places = pa.array([0] * ROWS, pa.int8()), pa.array([0] * ROWS, pa.int32())
    return _one_of(pa.UnionArray.from_dense(codes, places, [pa.array([VALUE])]))


_GROWING: dict[str, Callable[[], pa.RecordBatch]] = {
    "list of nulls": _nulls_in_a_list,
    "fixed-size list of nulls": _nulls_in_a_fixed_list,
    "list of empty structs": _empty_structs,
    "structs of nulls": _structs_of_nulls,
    "list of empty binaries": _empty_binaries,
    "views": lambda: _one_of(_views_of(pa.binary_view(), ROWS)),
    "views of text": lambda: _one_of(_views_of(pa.string_view(), ROWS)),
    "views in a struct": lambda: _one_of(pa.StructArray.from_arrays([_views_of(pa.binary_view(), ROWS)], ["a"])),
    "list views of list views": _lists_of_lists,
    "runs": lambda: _one_of(_runs(pa.array([VALUE.decode()]), 50_000)),
    "runs in a list": _runs_in_a_list,
    "runs of list views": lambda: _one_of(_runs(_lists_of_lists().column(0).slice(0, 1), 1000)),
    "dense union": _dense_union,
}
GROWING = tuple(_GROWING)
IN_METADATA = (*GROWING[:5], "runs in a list")
"""The batches whose growth a broker sees in the metadata."""


@cache
def growing(name: str) -> pa.RecordBatch:
    """One of `GROWING`."""
    return _GROWING[name]()


def _some_views(kind: pa.DataType) -> pa.Array:
    words = ["", None, "short", "a value that is in a buffer"] * (FEW // 4)
    return pa.array(words if kind == pa.string_view() else [word and word.encode() for word in words], kind)


def _some_list_views() -> pa.RecordBatch:
    values = pa.array(range(10), pa.int64())
    starts, counts = [5, 0, 3, 9] * (FEW // 4), [5, 10, 0, 1] * (FEW // 4)
    small = pa.ListViewArray.from_arrays(pa.array(starts, pa.int32()), pa.array(counts, pa.int32()), values)
    large = pa.LargeListViewArray.from_arrays(pa.array(starts, pa.int64()), pa.array(counts, pa.int64()), values)
    return _one_of(small, large)


def _some_runs() -> pa.RecordBatch:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3, 4, FEW], pa.int32()), pa.array(["abc", None, "de"]))
    return _one_of(runs)


def _some_unions() -> pa.RecordBatch:
    codes = pa.array([0, 1] * (FEW // 2), pa.int8())
    dense = pa.UnionArray.from_dense(
        codes, pa.array([0, 0] * (FEW // 2), pa.int32()), [pa.array([7], pa.int64()), pa.array(["text"])]
    )
    return _one_of(dense)


def _some_nested() -> pa.RecordBatch:
    views = _some_views(pa.string_view())
    starts = pa.array([0, 2, 2, 5, FEW], pa.int32())
    lists = pa.ListArray.from_arrays(starts, views)
    maps = pa.MapArray.from_arrays(starts, pa.array([f"key {at}" for at in range(FEW)]), views)
    pairs = pa.FixedSizeListArray.from_arrays(_some_views(pa.string_view()).slice(0, 8), 2)
    structs = pa.StructArray.from_arrays([pa.array(range(4), pa.int64()), lists], ["a", "b"])
    return _one_of(lists, pairs, structs, maps)


OTHERS: dict[str, Callable[[], pa.RecordBatch]] = {
    "views": lambda: _one_of(_some_views(pa.binary_view()), _some_views(pa.string_view())),
    "list views": _some_list_views,
    "runs": _some_runs,
    "unions": _some_unions,
    "nested": _some_nested,
    "nulls": lambda: _one_of(pa.nulls(60_000), pa.array([True] * 60_000)),
    "nulls in lists": lambda: _one_of(pa.array([[None] * 3, [], None, [None]], pa.list_(pa.null()))),
    "unions in nulls": lambda: _one_of(pa.nulls(60, pa.list_(_some_unions().column(0).type))),
    "none": lambda: _some_nested().slice(0, 0),
    "bits": lambda: _one_of(pa.array(np.zeros(1 << 24, bool))),
}
"""Batches that must not be refused."""
