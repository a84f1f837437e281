"""Rows that a producer turns into columns before it sends them: instances of models, and data frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic_core

from kera.client.arrow_input import Columns, record_batches
from kera.client.serializers.columns.models import batch_of
from kera.client.serializers.protocols import Context
from kera.client.serializers.refusing import cannot_encode
from kera.client.types import StreamDescription
from kera.core.errors import InvalidArgument, SchemaMismatch
from kera.core.format.arrow_types import empty_batch
from kera.core.format.schema import DEFAULT_SCHEMA

JSON_ROWS = 65_536
"""Maximum number of rows of a frame that are Python objects at once."""
_KEYS = DEFAULT_SCHEMA.field("keys").type


def batch_of_rows(rows: Iterable[Any], stream: StreamDescription) -> pa.RecordBatch:
    """Convert instances of a model to a batch of a stream's columns. Raises `CannotEncode`, `SchemaMismatch`."""
    if not stream.typed:
        raise SchemaMismatch(
            f"stream {stream.name!r} has no columns of its own: send each with a serializer, or create the stream with"
            " schema=",
            stream=stream.name,
        )
    given = list(rows)
    return batch_of(given, stream.schema, stream.name) if given else empty_batch(stream.schema)


def columns_of_frame(
    frame: Columns,
    stream: StreamDescription,
    *,
    value_column: str | None,
    key_column: str | None,
    timestamp_column: str | None,
) -> list[pa.RecordBatch]:
    """Convert a frame to batches of a stream's columns; see `Producer.send_frame`."""
    batches = record_batches(frame)
    named = {"value_column": value_column, "key_column": key_column, "timestamp_column": timestamp_column}
    given = {parameter: name for parameter, name in named.items() if name is not None}
    if stream.typed:
        if given:
            raise InvalidArgument(
                f"stream {stream.name!r} has columns, and columns of the frame go to those of the same name: leave"
                f" {', '.join(given)} out",
                stream=stream.name,
            )
        return batches or [empty_batch(stream.schema)]
    for batch in batches:
        for parameter, name in given.items():
            if batch.schema.names.count(name) != 1:
                raise InvalidArgument(f"{parameter} is {name!r}, and the frame has {', '.join(batch.schema.names)}")
        others = [name for name in batch.schema.names if name not in given.values()]
        if value_column is not None and others:
            raise InvalidArgument(
                f"columns {', '.join(others)} of the frame go nowhere: take them out, or leave value_column out, and"
                " values are JSON of all columns that are neither key nor time"
            )
        if value_column is None and not others:
            raise InvalidArgument("no column of the frame is left for the value")
    if not batches:
        return [empty_batch(stream.schema)]
    return [_of_default(batch, stream.name, value_column, key_column, timestamp_column) for batch in batches]


def _of_default(
    batch: pa.RecordBatch, stream: str, value: str | None, key: str | None, timestamp: str | None
) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {}
    if timestamp is not None:
        columns["timestamp"] = batch.column(timestamp)
        if not pa.types.is_timestamp(columns["timestamp"].type):
            raise InvalidArgument(f"column {timestamp!r} is {columns['timestamp'].type}, not a time")
    if key is not None:
        columns["keys"] = _key_lists(_as_bytes(batch.column(key), key, "key_column"))
    if value is not None:
        columns["value"] = _as_bytes(batch.column(value), value, "value_column")
    else:
        rest = batch.drop_columns([name for name in (key, timestamp) if name is not None])
        columns["value"] = pa.chunked_array(
            [_as_json(rest.slice(at, JSON_ROWS), stream) for at in range(0, max(1, batch.num_rows), JSON_ROWS)],
            pa.binary(),
        ).combine_chunks()
    if isinstance(columns["value"], pa.ChunkedArray):  # more values than fit into one array
        raise InvalidArgument("the values of the frame are more than 2 GiB: send it in parts")
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _as_bytes(column: pa.Array, name: str, parameter: str) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_bytes(column.dictionary_decode(), name, parameter)
    if pa.types.is_integer(kind) and parameter == "key_column":  # the same bytes as for a typed stream's key column
        return column.cast(pa.string()).cast(pa.binary())
    try:
        text_or_bytes = (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary_view,
            pa.types.is_null,
        )
        if any(fits(kind) for fits in text_or_bytes):
            return column.cast(pa.binary())
    except pa.ArrowException as error:
        raise InvalidArgument(f"column {name!r} cannot be bytes: {error}") from error
    raise InvalidArgument(f"{parameter} is {name!r}, a column of {kind}, and takes one of text or bytes")


def _key_lists(keys: pa.Array) -> pa.Array:
    """Make a list of one key for each row, or null for a row without a key."""
    mask = keys.is_null() if keys.null_count else None
    there = np.ones(len(keys), np.int32)
    if mask is not None:
        there[mask.to_numpy(zero_copy_only=False)] = 0
        keys = keys.drop_null()
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(there, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), keys, type=_KEYS, mask=mask)


def _as_json(batch: pa.RecordBatch, stream: str) -> pa.Array:
    rows = batch.to_pylist(maps_as_pydicts="strict")
    try:
        return pa.array(
            [pydantic_core.to_json(row, inf_nan_mode="null", bytes_mode="base64") for row in rows], pa.binary()
        )
    except (pydantic_core.PydanticSerializationError, ValueError, TypeError) as error:
        raise cannot_encode(Context(stream), error) from error
