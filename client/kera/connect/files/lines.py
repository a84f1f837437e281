"""Lines of text to Arrow record batches, column by column: what ``kera produce`` sends.

Three forms of a line: the value itself, key and value with a separator between, and a JSON object.
`lines_to_batch` handles the first two without a Python object per record; `json_to_batch` needs one where the
stream takes any bytes, as headers are free-form; for typed streams `rows_to_batch` leaves it all to Arrow's
reader.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from kera.core.arrow_types import empty_batch
from kera.core.errors import SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

_KEYS, _, _HEADERS = (DEFAULT_SCHEMA.field(name).type for name in ("keys", "value", "headers"))
_FIELDS = {"key", "keys", "key_base64", "value", "value_base64", "headers", "timestamp"}
_PLACE = {"stream", "streamlet", "entry", "offset"}
"""What ``kera consume --json`` adds; a line may be handed on as it is, to be stored in another place."""


def lines_to_batch(
    block: bytes, key_separator: bytes | None = None, headers: Sequence[tuple[str, bytes]] = ()
) -> pa.RecordBatch:
    """A record per line of `block`, stamped with the time of now; each has `headers`.

    With a separator, what is before its first occurrence is the key; a line without it has none.
    """
    whole = pa.array([block.removesuffix(b"\n")], pa.binary())
    lines = pc.split_pattern(whole, pattern=b"\n").flatten()
    if key_separator is None:
        return _batch(lines, null_column(len(lines), _KEYS), headers)
    split = pc.split_pattern(lines, pattern=key_separator, max_splits=1)
    parts, starts = split.flatten(), split.offsets.to_numpy()
    has_key = np.diff(starts) == 2
    keys_end = np.concatenate([[0], np.cumsum(has_key)]).astype(np.int32)
    keys = pa.ListArray.from_arrays(keys_end, parts.take(pa.array(starts[:-1][has_key])))
    return _batch(parts.take(pa.array(starts[1:] - 1)), keys, headers)


def json_to_batch(block: bytes, first_line: int = 1) -> pa.RecordBatch:
    """A record per JSON object in the lines of `block`, with ``key``, ``value``, ``headers``, ``timestamp``.

    A timestamp is microseconds since the epoch or ISO 8601; without one it is now. Keys, values and headers
    that are no strings are stored as JSON, and null as null. Raises `SchemaMismatch` naming the line, counted from
    `first_line`.
    """
    now_us = time.time_ns() // 1000
    columns: tuple[list[Any], ...] = ([], [], [], [])
    for number, line in enumerate(block.split(b"\n"), first_line):
        if not line.strip():
            continue
        try:
            record = _parse_record(line, now_us)
        except ValueError as error:
            raise SchemaMismatch(f"line {number}: {error}", line=number) from None
        for column, value in zip(columns, record, strict=True):
            column.append(value)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, DEFAULT_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=DEFAULT_SCHEMA)


def rows_to_batch(block: bytes, schema: pa.Schema, first_line: int = 1) -> pa.RecordBatch:
    """A row of `schema` per JSON object in `block`. Raises `SchemaMismatch` naming the lines of `block`."""
    readable = pa.schema([pa.field(field.name, _readable_type(field.type)) for field in schema])
    try:
        table = pa.json.read_json(
            io.BytesIO(block),
            read_options=pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa.json.ParseOptions(explicit_schema=readable, unexpected_field_behavior="error"),
        )
        batches = table.cast(schema).combine_chunks().to_batches()
    except (pa.ArrowInvalid, ValueError) as error:
        last_line = first_line + block.removesuffix(b"\n").count(b"\n")
        columns = ", ".join(schema.names)
        raise SchemaMismatch(
            f"lines {first_line} to {last_line} are no rows of the stream (columns: {columns}): {error}",
            first_line=first_line,
            last_line=last_line,
        ) from None
    return batches[0] if batches else empty_batch(schema)


def null_column(count: int, kind: pa.DataType) -> pa.Array:
    """`count` nulls. A slice of what `pa.nulls` makes carries the offsets of the whole when it is sent."""
    return _repeated(None, count, kind)


def _repeated(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.array([value], kind).take(pa.array(np.zeros(count, np.int8)))


def _readable_type(kind: pa.DataType) -> pa.DataType:
    """What Arrow's JSON reader is to make of a column, before it is cast to `kind`."""
    if pa.types.is_date(kind):
        return pa.string()  # the reader wants a number of days; the cast knows 2026-01-02
    if pa.types.is_timestamp(kind) and kind.unit in ("s", "ms"):
        return pa.timestamp("us", tz=kind.tz)  # the reader refuses digits below the unit, even zeros
    return kind


def _batch(values: pa.Array, keys: pa.Array, headers: Sequence[tuple[str, bytes]]) -> pa.RecordBatch:
    count = len(values)
    each = _repeated(list(headers) or None, count, _HEADERS)
    now = pa.array(np.full(count, time.time_ns() // 1000)).cast(DEFAULT_SCHEMA.field("timestamp").type)
    return pa.RecordBatch.from_arrays([now, keys, values, each], schema=DEFAULT_SCHEMA)


_Columns = tuple[int, list[bytes | None], bytes | None, list[tuple[str, bytes | None]] | None]
"""Of a record: timestamp, keys, value, headers."""


def _parse_record(line: bytes, now_us: int) -> _Columns:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one kind of error, whatever is in a line
    unknown = record.keys() - _FIELDS - _PLACE
    if unknown:
        known = ", ".join(sorted(_FIELDS))
        raise ValueError(f"unknown field {min(unknown)}; a record has {known}")
    keys = record.get("keys") or [key for key in [_bytes_of(record, "key")] if key is not None]
    headers = record.get("headers")
    if headers is not None and not isinstance(headers, dict):
        raise ValueError("headers must be an object")
    return (
        _timestamp_us(record.get("timestamp"), now_us),
        [_bytes_or_null(key) for key in keys],
        _bytes_of(record, "value"),
        None if headers is None else [(name, _bytes_or_null(value)) for name, value in headers.items()],
    )


def _bytes_of(record: dict[str, Any], name: str) -> bytes | None:
    encoded = record.get(name + "_base64")
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    return _bytes_or_null(record.get(name))


def _bytes_or_null(value: Any) -> bytes | None:
    return None if value is None else _to_bytes(value)


def _to_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _timestamp_us(value: Any, now_us: int) -> int:
    if value is None:
        return now_us
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        raise ValueError("timestamp must be microseconds since the epoch or ISO 8601 text")  # noqa: TRY004 - as above
    moment = datetime.datetime.fromisoformat(value)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (moment - epoch) // datetime.timedelta(microseconds=1)
