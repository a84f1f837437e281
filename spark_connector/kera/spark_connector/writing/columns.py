"""The columns of a DataFrame as the columns of a stream. Pure, and column by column.

A typed stream takes the columns of its schema, with the types that a reader sees (``columns``). Any other stream takes
these; only the value is required:

    value binary or string                   timestamp timestamp  when it happened; by default when it is written
    key binary or string                     headers array of struct<key: string, value: binary>, or map
    keys array of binary or string           streamlet int        the destination; by default the key decides
    stream string                            the destination, unless the query names one stream

With both ``key`` and ``keys``, the key replaces the first of the keys. So the columns that a reader gives can be
written unchanged; ``entry`` and ``offset``, which the broker assigns, are ignored.

Names and types are checked before a query starts (`check`), values when they arrive.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructField, StructType

from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.spark_connector.columns import columns_of

if TYPE_CHECKING:
    from kera.client import StreamDescription

_TEXT = ("binary", "string")
RECORD_TYPES: Mapping[str, tuple[str, ...]] = {
    "value": _TEXT,
    "key": _TEXT,
    "keys": ("array<binary>", "array<string>"),
    "timestamp": ("timestamp",),
    "headers": ("array<struct<key:string,value:binary>>", "map<string,binary>"),
    "stream": ("string",),
    "streamlet": ("int",),
    "entry": ("int",),
    "offset": ("bigint",),
}
"""The columns that a stream without a schema takes, with Spark's names of their types."""

_KEYS = DEFAULT_SCHEMA.field("keys").type
_HEADERS = DEFAULT_SCHEMA.field("headers").type
_TIMESTAMP = DEFAULT_SCHEMA.field("timestamp").type


class DestinedRows(NamedTuple):
    """Rows with one destination."""

    stream: str | None
    """The destination; None: the stream of the query."""
    streamlet: int | None
    """The destination; None: the rows' keys decide."""
    rows: pa.RecordBatch
    """The rows, with columns of the stream."""


def check(given: StructType, stream: StreamDescription | None, *, case_sensitive: bool = False) -> StructType:
    """Return the columns `given` of a DataFrame under the stream's names. Raises `SchemaMismatch` if they do not fit.

    The columns are for `stream`, or, if that is None, for streams without a schema that the rows name.
    `case_sensitive` is ``spark.sql.caseSensitive``: whether ``ID`` and ``id`` are different columns.
    """
    target = "the stream" if stream is None else f"stream '{stream.name}'"
    typed = stream is not None and stream.typed
    own = columns_of(stream.schema, typed=True) if stream is not None and typed else StructType()
    types = {field.name: (field.dataType.simpleString(),) for field in own} if typed else dict(RECORD_TYPES)
    seen: dict[str, StructField] = {}
    for field in given:
        name = field.name if case_sensitive else _regardless_of_case(field.name, types, target)
        if name in seen:
            raise SchemaMismatch(f"there are several columns '{name}'", column=name)
        seen[name] = StructField(name, field.dataType, field.nullable)
        if name not in types:
            same = [each for each in types if each.lower() == name.lower()]
            close = same or difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it takes {', '.join(types)}"
            raise SchemaMismatch(f"{target} has no column '{name}': {hint}", column=name)
        expected = types[name]
        if field.dataType.simpleString() not in expected:
            raise SchemaMismatch(
                f"column '{name}' has to be {' or '.join(expected)} for {target}, not {field.dataType.simpleString()}",
                column=name,
            )
    needed = [field.name for field in own if not field.nullable] if typed else ["value"]
    if stream is None:
        needed.append("stream")
    for name in needed:
        if name not in seen:
            how = ", or name the stream: save(name), start(name) or an option" if name == "stream" else ""
            raise SchemaMismatch(f"{target} needs a column '{name}' ({' or '.join(types[name])}){how}", column=name)
    return StructType(list(seen.values()))


def _regardless_of_case(name: str, known: Iterable[str], target: str) -> str:
    """Return the known name that `name` means: the same name, or the only one that differs just in case.

    Return `name` itself if no known name matches. Raises `SchemaMismatch` if several names match.
    """
    same = [each for each in known if each.lower() == name.lower()]
    if name in same or not same:
        return name
    if len(same) > 1:
        raise SchemaMismatch(f"column '{name}' may be {' or '.join(map(repr, same))} of {target}", column=name)
    return same[0]


class Columns:
    """Turns batches with the columns `given` into rows of streams."""

    def __init__(self, given: StructType, stream: StreamDescription | None, *, case_sensitive: bool = False) -> None:
        """Raises the errors of `check`."""
        self._in_order = check(given, stream, case_sensitive=case_sensitive).names
        self._names = set(self._in_order)
        self._types = {field.name: field.type for field in stream.schema} if stream and stream.typed else None
        self._by_row = stream is None
        self.ignored = frozenset[str]() if self._types or "timestamp" in self._names else frozenset(["timestamp"])
        """Columns of the stream that are filled in on writing, and so differ when the rows are written again."""

    def by_destination(self, batch: pa.RecordBatch) -> Iterator[DestinedRows]:
        """Yield the rows of `batch` by destination. Raises `SchemaMismatch` for values that the stream cannot have."""
        if not batch.num_rows:
            return
        batch = batch.rename_columns(self._in_order)
        if self._types is not None:
            columns = {name: _cast(name, batch.column(name), self._types[name]) for name in batch.schema.names}
            yield DestinedRows(None, None, pa.RecordBatch.from_pydict(columns))
            return
        rows = pa.RecordBatch.from_pydict(self._record(batch))
        streams = batch.column("stream") if self._by_row else None
        streamlets = batch.column("streamlet") if "streamlet" in self._names else None
        if streams is not None and streams.null_count:
            raise SchemaMismatch("column 'stream' is null: it says where a row is to be written", column="stream")
        for stream, at in _groups(streams, batch.num_rows):
            some = rows if at is None else rows.take(at)
            numbers = streamlets if at is None or streamlets is None else streamlets.take(at)
            for streamlet, within in _groups(numbers, some.num_rows):
                yield DestinedRows(stream, streamlet, some if within is None else some.take(within))

    def _record(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        columns = {"value": _cast("value", batch.column("value"), pa.binary())}
        if self._names & {"key", "keys"}:
            columns["keys"] = _keys(
                batch.column("key") if "key" in self._names else None,
                batch.column("keys") if "keys" in self._names else None,
            )
        if "timestamp" in self._names:
            columns["timestamp"] = _cast("timestamp", batch.column("timestamp"), _TIMESTAMP)
        if "headers" in self._names:
            columns["headers"] = _headers(batch.column("headers"))
        return columns


def _cast(name: str, column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise SchemaMismatch(f"column '{name}' does not fit into {kind}: {error}", column=name) from error


def _groups(column: pa.Array | None, rows: int) -> Iterator[tuple[Any, pa.Array | None]]:
    """Yield each distinct value of a column, and the indexes of its rows; None: all rows."""
    if column is None or column.null_count == rows:
        yield None, None
        return
    encoded = pc.dictionary_encode(column, null_encoding="encode")
    values = encoded.dictionary.to_pylist()
    if len(values) == 1:
        yield values[0], None
        return
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    for code, value in enumerate(values):
        yield value, pa.array(np.flatnonzero(codes == code))


def _keys(key: pa.Array | None, keys: pa.Array | None) -> pa.Array:
    if keys is not None:
        keys = _cast("keys", keys, _KEYS)
        if keys.flatten().null_count:
            raise SchemaMismatch("column 'keys' has a null among the keys of a row", column="keys")
    if key is None:
        return keys
    key = _cast("key", key, pa.binary())
    if keys is None:
        return _lists(key.is_valid(), pc.cast(key.is_valid(), pa.int64()), key.drop_null())
    if pc.list_slice(keys, 0, 1).equals(_keys(key, None)):
        return keys  # the columns come from a reader
    pairs = zip(key.to_pylist(), keys.to_pylist(), strict=True)
    return pa.array([rest if first is None else [first, *(rest or ())[1:]] for first, rest in pairs], _KEYS)


def _headers(column: pa.Array) -> pa.Array:
    if pa.types.is_map(column.type):
        return _cast("headers", column, _HEADERS)
    names, contents = column.flatten().flatten()
    if names.null_count:
        raise SchemaMismatch("column 'headers' has a header without a key", column="headers")
    offsets = _offsets(column.is_valid(), pc.fill_null(pc.list_value_length(column), 0))
    return pa.MapArray.from_arrays(
        offsets, _cast("headers", names, pa.string()), _cast("headers", contents, pa.binary()), type=_HEADERS
    )


def _lists(valid: pa.Array, lengths: pa.Array, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(_offsets(valid, lengths), values, type=_KEYS)


def _offsets(valid: pa.Array, lengths: pa.Array) -> pa.Array:
    """Return where each list starts (null for a null list), and where the last one ends."""
    ends = np.cumsum(lengths.to_numpy(zero_copy_only=False), dtype=np.int32)
    starts = np.concatenate([np.zeros(1, np.int32), ends])
    null = np.concatenate([~valid.to_numpy(zero_copy_only=False), np.zeros(1, bool)])
    return pa.array(starts, pa.int32(), mask=null)
