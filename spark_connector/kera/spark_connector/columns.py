"""A chunk's Arrow batch as the columns that Spark sees. Pure, and column by column: no code here looks at a record.

A typed stream has the columns of its schema. Any other stream has these, most of which Kafka's users know:

    key binary        the record's first key        stream string      name of the stream
    keys array        all of its keys               streamlet int      partition
    value binary                                    entry int          append entry in the streamlet
                                                    offset bigint      ordinal of the record in its entry
                                                    timestamp timestamp

and, on request, its headers (array of struct<key, value>). In micro-batches that end with epochs, each stream can have
one more column: the number of the epoch, which is the same for a whole partition.

Spark compares the Arrow schema of each batch with the expected one, down to the names inside of lists. Types that
Spark does not have are widened (unsigned integers, half floats, other time units, dictionaries, ...); a batch that
fits already passes unchanged.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DecimalType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from kera.core.errors import SchemaMismatch
from kera.core.format.chunk import ChunkHeader
from kera.spark_connector.options.names import ON_MISMATCH
from kera.spark_connector.options.reading import OnMismatch
from kera.spark_connector.spark_api import arrow_schema, spark_type

RECORD_COLUMNS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("keys", ArrayType(BinaryType())),
        StructField("value", BinaryType()),
        StructField("stream", StringType()),
        StructField("streamlet", IntegerType()),
        StructField("entry", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
"""Columns of a stream without a schema."""

HEADERS_COLUMN = StructField(
    "headers", ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
)
"""An additional column, with ``includeHeaders`` or in a ``.schema(...)`` that names it."""

EPOCH_COLUMN = StructField("epoch", LongType(), nullable=False)
"""The last column, with ``includeEpoch``."""

PRECISION_MAX = 38
"""Digits of Spark's largest decimal."""

_WIDENED: dict[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.time32("s"): pa.time64("ns"),
    pa.time32("ms"): pa.time64("ns"),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


CHUNK_CONTENT_TYPE = ("content-type", b"application/vnd.apache.arrow.stream")
"""The header of a row that is a whole chunk, see `ChunkShaper`."""


class HasColumns(Protocol):
    """The part of a stream's description that determines its columns."""

    @property
    def stream_id(self) -> int:
        """The stream's id, which is lower for an older stream."""

    @property
    def name(self) -> str:
        """The stream's name, for errors."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the stream's chunks."""

    @property
    def typed(self) -> bool:
        """Whether `schema` has the columns of the stream."""


def columns_of_all(streams: Iterable[HasColumns], *, headers: bool, on_mismatch: OnMismatch = "fail") -> StructType:
    """Return the columns of a DataFrame of `streams`.

    They are the columns of records if there is no stream, or if typed streams are read as bytes. Some streams may lack
    the last columns of the others if these are nullable, as happens while columns are added to one stream after the
    other. Other differences raise `SchemaMismatch`, unless such streams are skipped: those that do not fit the oldest
    ones.
    """
    records = columns_of(pa.schema([]), typed=False, headers=headers)
    if on_mismatch == "bytes":
        return records
    columns: StructType | None = None
    first = ""
    for stream in sorted(streams, key=lambda stream: stream.stream_id):
        own = columns_of(stream.schema, typed=stream.typed, headers=headers)
        if columns is None or _extends(own, columns):
            columns, first = own, stream.name
        elif not _extends(columns, own) and on_mismatch == "fail":
            raise SchemaMismatch(
                f"streams '{first}' and '{stream.name}' do not have the same columns: {columns.simpleString()} and"
                f" {own.simpleString()}. Make a DataFrame of each, or say with option {ON_MISMATCH} what happens to the"
                " others: skip or bytes",
                streams=[first, stream.name],
            )
    return columns or records


def _extends(columns: StructType, others: StructType) -> bool:
    """Return whether `columns` begin with those of `others`, and any further ones are nullable."""
    count = len(others)
    return _types(columns)[:count] == _types(others) and all(field.nullable for field in columns.fields[count:])


def _types(columns: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in columns]


def columns_of(schema: pa.Schema, *, typed: bool, headers: bool = False) -> StructType:
    """Return the columns of a stream with this Arrow schema; raises `SchemaMismatch` for a type that Spark lacks."""
    if not typed:
        return StructType([*RECORD_COLUMNS, HEADERS_COLUMN]) if headers else RECORD_COLUMNS
    fields = []
    for field in schema:
        try:
            column = spark_type(_widened(field.type))
            if isinstance(column, DecimalType) and column.precision > PRECISION_MAX:
                raise ValueError(f"at most {PRECISION_MAX} digits")
            fields.append(StructField(field.name, column, field.nullable))
        except Exception as error:  # Spark raises various errors for types that it does not have
            raise SchemaMismatch(
                f"column '{field.name}' has the Arrow type {field.type}, which Spark does not have",
                column=field.name,
                type=str(field.type),
            ) from error
    return StructType(fields)


def check_columns(wanted: StructType, there: StructType, what: str) -> None:
    """Raise `SchemaMismatch` unless `wanted` (from ``.schema(...)``) is a subset of `there`, the columns of `what`.

    `what` may also lack the last columns of `wanted`, if they are nullable and all others match.
    """
    if _extends(wanted, there):
        return
    types = {field.name: field.dataType for field in there}
    for field in wanted:
        if field.name not in types:
            close = difflib.get_close_matches(field.name, types, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(types)}"
            raise SchemaMismatch(f"{what} has no column '{field.name}': {hint}", column=field.name)
        if field.dataType.simpleString() != types[field.name].simpleString():
            raise SchemaMismatch(
                f"column '{field.name}' of {what} is {types[field.name].simpleString()},"
                f" not {field.dataType.simpleString()}",
                column=field.name,
            )


def with_epoch(columns: StructType) -> StructType:
    """Return `columns` with the epoch column; raises `SchemaMismatch` if they have a column of that name."""
    if EPOCH_COLUMN.name in columns.names:
        raise SchemaMismatch(
            "option includeEpoch: there is a column 'epoch' already: leave the option out", column=EPOCH_COLUMN.name
        )
    return StructType([*columns, EPOCH_COLUMN])


def without_epoch(wanted: StructType) -> StructType:
    """Return `wanted` without the epoch column; raises `SchemaMismatch` if that column has another type."""
    for field in wanted:
        if field.name == EPOCH_COLUMN.name and field.dataType != EPOCH_COLUMN.dataType:
            raise SchemaMismatch(f"column 'epoch' is bigint, not {field.dataType.simpleString()}", column=field.name)
    return StructType([field for field in wanted if field.name != EPOCH_COLUMN.name])


class Shaper:
    """Turns chunks of one entry into batches with exactly the columns `wanted`, in their order."""

    def __init__(self, wanted: StructType, *, stream: str, typed: bool, epoch: int | None = None) -> None:
        """`epoch`: the epoch of all chunks; None: the batches have no epoch column."""
        self._epoch = epoch
        self._schema = arrow_schema(wanted)
        self._stream = stream
        self._typed = typed
        self._sources = set(wanted.names) | ({"keys"} if "key" in wanted.names and not typed else set())
        """The columns of chunks that `wanted` needs."""

    def shape(self, batches: Sequence[pa.RecordBatch], header: ChunkHeader) -> Iterator[pa.RecordBatch]:
        """Yield one batch for `batches`, the content of consecutive chunks that start with the chunk of `header`.

        (If the schema changes in between, yield one batch for each run of chunks with the same schema.)
        """
        first_record = header.first_record
        for schema, run in itertools.groupby(map(self._needed, batches), key=lambda batch: batch.schema):
            batch = _merged(list(run), schema)
            yield self._shaped(batch, header._replace(first_record=first_record))
            first_record += batch.num_rows

    def _needed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        names = [name for name in batch.schema.names if name in self._sources]
        if len(names) == batch.num_columns:
            return batch
        return batch.select(names) if names else batch  # a batch without columns would lose its length

    def _shaped(self, batch: pa.RecordBatch, header: ChunkHeader) -> pa.RecordBatch:
        if self._typed and batch.schema.equals(self._schema):
            return batch
        content = _Content(batch, header, self._stream)
        columns = [self._made(field, content) for field in self._schema]
        fitting = [self._fitting(column, field, header) for column, field in zip(columns, self._schema, strict=True)]
        return pa.RecordBatch.from_arrays(fitting, schema=self._schema)

    def _made(self, field: pa.Field, content: _Content) -> pa.Array:
        if self._epoch is not None and field.name == EPOCH_COLUMN.name:
            return pa.repeat(pa.scalar(self._epoch, pa.int64()), content.batch.num_rows)
        return self._column(field, content.batch) if self._typed else _RECORD[field.name](content)

    def _fitting(self, column: pa.Array, field: pa.Field, header: ChunkHeader) -> pa.Array:
        try:
            return _fit(column, field)
        except pa.ArrowInvalid as error:
            raise SchemaMismatch(
                f"stream '{self._stream}', streamlet {header.streamlet_id}, entry {header.entry}, from record"
                f" {header.first_record} on: column '{field.name}' has a value that Spark does not have: {error}",
                stream=self._stream,
                streamlet_id=header.streamlet_id,
                entry=header.entry,
                record=header.first_record,
                column=field.name,
            ) from error

    def _column(self, field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
        at = batch.schema.get_field_index(field.name)
        if at >= 0:
            return batch.column(at)
        if field.nullable:  # the chunk is older than the column
            return pa.nulls(batch.num_rows, field.type)
        raise SchemaMismatch(
            f"a chunk of stream '{self._stream}' has no column '{field.name}', which is not nullable",
            column=field.name,
        )


class ChunkShaper:
    """Turns whole chunks of a typed stream into rows with the columns of a record: one row for each chunk.

    ``value`` has the chunk's rows as an Arrow IPC stream, as the header ``content-type`` says; ``offset`` is the
    ordinal of the chunk's first row in the entry, and ``timestamp`` the earliest time of its rows.
    """

    def __init__(self, wanted: StructType, *, stream: str, epoch: int | None = None) -> None:
        self._schema = arrow_schema(wanted)
        self._stream = stream
        self._epoch = epoch

    def shape(self, batch: pa.RecordBatch, header: ChunkHeader) -> pa.RecordBatch:
        """Return one row for `batch`, the content of the chunk with `header`."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        values: dict[str, Any] = {
            "value": sink.getvalue().to_pybytes(),
            "stream": self._stream,
            "streamlet": header.streamlet_id,
            "entry": header.entry,
            "offset": header.first_record,
            "timestamp": header.min_timestamp_us,
            "headers": [dict(zip(("key", "value"), CHUNK_CONTENT_TYPE, strict=True))],
            "epoch": self._epoch,
        }
        columns = [pa.array([values.get(field.name)], field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _merged(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays([batch.column(index) for batch in batches]) for index in range(len(schema))]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _fit(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type == field.type and not pa.types.is_nested(column.type):
        return column
    # Nested types also differ in inner names: "item" in Arrow is "element" in Spark. Casting them keeps the buffers.
    return column.cast(field.type)


def _widened(at: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(at):
        return _widened(at.value_type)
    if pa.types.is_list(at) or pa.types.is_large_list(at) or pa.types.is_fixed_size_list(at):
        return pa.list_(at.value_field.with_type(_widened(at.value_type)))
    if pa.types.is_map(at):
        return pa.map_(_widened(at.key_type), at.item_field.with_type(_widened(at.item_type)))
    if pa.types.is_struct(at):
        return pa.struct([field.with_type(_widened(field.type)) for field in at])
    return _WIDENED.get(at, at)


class _Content(NamedTuple):
    """The inputs of a record's columns."""

    batch: pa.RecordBatch
    header: ChunkHeader
    stream: str


def _first_keys(content: _Content) -> pa.Array:
    keys = content.batch.column("keys")
    if keys.null_count == len(keys):
        return pa.nulls(len(keys), pa.binary())
    offsets = keys.offsets
    first = offsets.slice(0, len(keys))
    has_key = pc.greater(offsets.slice(1), first)
    if keys.null_count:
        has_key = pc.and_(has_key, keys.is_valid())
    return keys.values.take(pc.if_else(has_key, first, None))


def _ordinals(content: _Content) -> pa.Array:
    first = content.header.first_record
    return pa.array(np.arange(first, first + content.batch.num_rows, dtype=np.int64))


def _own(name: str) -> Callable[[_Content], pa.Array]:
    return lambda content: content.batch.column(name)


def _constant(at: pa.DataType, value: Callable[[_Content], object]) -> Callable[[_Content], pa.Array]:
    return lambda content: pa.repeat(pa.scalar(value(content), at), content.batch.num_rows)


_RECORD: dict[str, Callable[[_Content], pa.Array]] = {
    "key": _first_keys,
    "keys": _own("keys"),
    "value": _own("value"),
    "stream": _constant(pa.string(), lambda content: content.stream),
    "streamlet": _constant(pa.int32(), lambda content: content.header.streamlet_id),
    "entry": _constant(pa.int32(), lambda content: content.header.entry),
    "offset": _ordinals,
    "timestamp": _own("timestamp"),
    "headers": _own("headers"),
}
