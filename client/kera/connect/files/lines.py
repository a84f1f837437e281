"""Converts lines of text into records, column by column, for ``kera produce`` without ``--json``.

A line is the value, or key and value with a separator between them. There is no Python object per record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.core.format.schema import DEFAULT_SCHEMA

_KEYS, _, _HEADERS = (DEFAULT_SCHEMA.field(name).type for name in ("keys", "value", "headers"))


def lines_to_batch(
    block: bytes, key_separator: bytes | None = None, headers: Sequence[tuple[str, bytes]] = ()
) -> pa.RecordBatch:
    """Return a record per line of `block`, with the present time and `headers`.

    With a separator, the text before its first occurrence is the key; a line without the separator has no key.
    """
    whole = pa.array([block.removesuffix(b"\n")], pa.binary())
    lines = pc.split_pattern(whole, pattern=b"\n").flatten()
    if key_separator is None:
        return _batch(lines, null_column(len(lines), _KEYS), headers)
    split = pc.split_pattern(lines, pattern=key_separator, max_splits=1)
    parts, starts = split.flatten(), split.offsets.to_numpy()
    has_key = np.diff(starts) == 2
    keys_end = pa.array(np.concatenate([[0], np.cumsum(has_key)]).astype(np.int32))
    keys = pa.ListArray.from_arrays(keys_end, parts.take(pa.array(starts[:-1][has_key])), mask=pa.array(~has_key))
    return _batch(parts.take(pa.array(starts[1:] - 1)), keys, headers)


def null_column(count: int, kind: pa.DataType) -> pa.Array:
    """Return `count` nulls. Unlike `pa.nulls`, a slice of it is not sent with the offsets of the whole array."""
    return _repeated(None, count, kind)


def _repeated(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.array([value], kind).take(pa.array(np.zeros(count, np.int8)))


def _batch(values: pa.Array, keys: pa.Array, headers: Sequence[tuple[str, bytes]]) -> pa.RecordBatch:
    count = len(values)
    each = _repeated(list(headers) or None, count, _HEADERS)
    now = pa.array(np.full(count, time.time_ns() // 1000)).cast(DEFAULT_SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays([now, keys, values, each], schema=DEFAULT_SCHEMA)
