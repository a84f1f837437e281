"""The uses that consumer groups make of an opened chunk: each looks at all its values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import pyarrow as pa
from pyspark.sql.types import StructType

from kera.cli._format import RecordOrigin, for_terminal, json_formatter, text_formatter
from kera.client.chunk_batch import ChunkBatch
from kera.client.consuming.delivering.records import records_of
from kera.client.types import StreamDescription
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.errors import SchemaMismatch
from kera.core.format.chunk import ChunkHeader
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.spark_connector.columns import RECORD_COLUMNS, Shaper, columns_of
from tests.unit.client.support import description

HEADER = ChunkHeader._make([0] * len(ChunkHeader._fields))._replace(group_id=1, segment_id=1)
PLACE = RecordOrigin(0, 0, 0)


VALUE_DOES_NOT_FIT = ("would lose data", "would result in out of bounds", "not in range")
"""Parts of errors that report a value that Spark's type cannot hold, such as a nanosecond."""


@cache
def stream_of(schema: pa.Schema) -> StreamDescription:
    typed = not schema.equals(DEFAULT_SCHEMA)
    return replace(description(), typed=True, schema=schema) if typed else description()


def records(batch: pa.RecordBatch) -> None:
    """Iterate, as `Consumer.records` does."""
    chunk = ChunkBatch(batch, HEADER, EARLIEST, EARLIEST, EntryId(7, 0, 0))
    for record in records_of(chunk, stream_of(batch.schema)):
        repr(record)


def printed(batch: pa.RecordBatch) -> None:
    """Print, as ``kera consume`` does."""
    stream = stream_of(batch.schema)
    for formatter in (json_formatter(stream), text_formatter(r"%k %T %s\n", stream)):
        for_terminal(formatter(batch, PLACE))


@cache
def wanted(schema: pa.Schema) -> StructType:
    return RECORD_COLUMNS if schema.equals(DEFAULT_SCHEMA) else columns_of(schema, typed=True)


@cache
def spark_has(schema: pa.Schema) -> bool:
    """Whether Spark's engines read such a stream at all: they do not support unions and list views."""
    try:
        wanted(schema)
    except SchemaMismatch:
        return False
    return True


def given_to_spark(batch: pa.RecordBatch) -> None:
    """Shape and serialize as Spark's Python engine does: Spark's JVM gets these very bytes."""
    typed = not batch.schema.equals(DEFAULT_SCHEMA)
    if not spark_has(batch.schema):
        return
    try:
        for shaped in Shaper(wanted(batch.schema), stream="s", typed=typed).shape([batch], HEADER):
            shaped.validate(full=True)
            shaped.serialize()
    except SchemaMismatch as error:
        if not any(words in str(error) for words in VALUE_DOES_NOT_FIT):
            raise


def reworked(batch: pa.RecordBatch) -> None:
    """Use columns as analyses do: look into them, pick rows, convert them, write them again.

    Anything that Arrow takes out of a column must be valid.
    """
    rows = batch.num_rows
    some = pa.array([at % 3 != 1 for at in range(rows)], pa.bool_())
    for column in batch.columns:
        for each in (column, *flattened(column)):
            each.validate(full=True)
        with contextlib.suppress(pa.ArrowNotImplementedError):  # Arrow cannot pick from every type
            column.take(pa.array([rows - 1, 0] if rows else [], pa.int64())).validate(full=True)
            column.filter(some).validate(full=True)
        for kind in (pa.large_string(), pa.binary(), pa.float64()):
            with contextlib.suppress(pa.ArrowException):
                column.cast(kind)
    with pa.ipc.new_stream(pa.BufferOutputStream(), batch.schema) as stream:
        stream.write_batch(batch)


def made_a_data_frame(batch: pa.RecordBatch) -> None:
    """Convert to pandas, which cannot represent every time."""
    with contextlib.suppress(pa.ArrowException, ValueError, OverflowError):
        batch.to_pandas()


def flattened(column: pa.Array) -> list[pa.Array]:
    """The arrays within a column, as Arrow gives them to a caller: also those below a null, if Arrow gives them."""
    if isinstance(column, pa.ExtensionArray):
        return flattened(column.storage)
    kind = column.type
    if pa.types.is_map(kind):
        within, without_nulls = [column.keys, column.items], []
    elif pa.types.is_struct(kind):
        within, without_nulls = [column.field(at) for at in range(kind.num_fields)], column.flatten()
    elif pa.types.is_union(kind):
        within, without_nulls = [column.field(at) for at in range(kind.num_fields)], []
    elif hasattr(column, "values"):
        within, without_nulls = [column.values], [column.flatten()] if hasattr(column, "flatten") else []
    else:
        return []
    # The inner arrays are visited further, and only once: some lists are nested forty deep.
    return [*without_nulls, *within, *(each for field in within for each in flattened(field))]


Uses: TypeAlias = tuple[Callable[[pa.RecordBatch], None], ...]
USES: Uses = (records, printed, given_to_spark, reworked, made_a_data_frame)
