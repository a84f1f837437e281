"""Makes the schema of a model, batches of its instances, and instances of rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pydantic

from kera.client.serializers.columns.annotations import struct_of
from kera.client.serializers.columns.shapes import DoesNotFit
from kera.client.serializers.model_classes import is_model, what_is_wrong
from kera.client.serializers.protocols import Context
from kera.client.serializers.refusing import cannot_encode, undecodable
from kera.core.errors import CannotEncode, InvalidArgument


class ModelColumns:
    """Converts between instances of a model and rows of a stream."""

    def __init__(self, model: Any) -> None:
        """Raise `InvalidArgument` for a field that cannot be a column."""
        self.model = model
        self._struct = struct_of(model, model.__name__)
        self.schema = pa.schema(list(self._struct.kind))
        """The schema of a stream of such instances."""

    def batch(self, rows: Sequence[Any], schema: pa.Schema, stream: str) -> pa.RecordBatch:
        """Convert `rows` to columns for a stream with `schema`. Raises `CannotEncode`, with the field and the row."""
        try:
            return self._batch(rows, schema)
        except DoesNotFit as error:
            at = self._first_bad(rows, schema)
            refusal = cannot_encode(Context(stream), error.reason, f"{error.path} of row {at}" if rows else error.path)
            refusal.attributes.update(field=error.path, row=at)
            raise refusal from error

    def _batch(self, rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
        for row in rows:
            if row.__class__ is not self.model:  # a subclass may have further fields, without a column
                raise DoesNotFit("", f"it is {type(row).__name__}, not {self.model.__name__}")
        columns = dict(self._struct.columns(rows, schema))
        fields = [field for field in schema if field.name in columns]
        return pa.RecordBatch.from_arrays([columns[field.name] for field in fields], schema=pa.schema(fields))

    def _first_bad(self, rows: Sequence[Any], schema: pa.Schema) -> int:
        """Return the index of the first row that cannot be written; there must be one."""
        low, high = 0, len(rows)
        while high - low > 1:
            middle = (low + high) // 2
            try:
                self._batch(rows[low:middle], schema)
            except DoesNotFit:
                high = middle
            else:
                low = middle
        return low

    def row(self, row: Mapping[str, Any]) -> Any:
        """Make an instance of a row. Raises `CannotDecode`."""
        try:
            return self._struct.value(row)
        except pydantic.ValidationError as error:
            raise undecodable(what_is_wrong(error)) from error
        except Exception as error:  # the model's own code may raise anything
            raise undecodable(error) from error

    def check(self, schema: pa.Schema, stream: str) -> None:
        """Raise `InvalidArgument` unless a stream has all columns that the model requires."""
        for member in self._struct.members:
            if member.name not in schema.names and not member.optional:
                raise InvalidArgument(
                    f"stream {stream!r} has no column {member.name!r}, which {self.model.__name__} needs",
                    stream=stream,
                    field=member.name,
                )


def columns_of(model: Any) -> ModelColumns:
    """See `ModelColumns`."""
    if not is_model(model):
        raise InvalidArgument(f"{model!r} is neither a dataclass nor a pydantic model")
    return _columns_of(model)


@functools.lru_cache(maxsize=256)
def _columns_of(model: Any) -> ModelColumns:
    return ModelColumns(model)


def arrow_schema_of(model: Any) -> pa.Schema:
    """Return the schema of a stream of instances of a dataclass or a pydantic model: a column for each field.

    `kera.client.serializers.columns.annotations` lists the possible annotations. Raises `InvalidArgument` with the path
    of a field that cannot be a column.
    """
    return columns_of(model).schema


def batch_of(rows: Sequence[Any], schema: pa.Schema, stream: str) -> pa.RecordBatch:
    """Convert instances of one model to columns for a stream with `schema`.

    Raises `CannotEncode`, `InvalidArgument`.
    """
    if not rows:
        raise InvalidArgument("there are no rows")
    if not is_model(type(rows[0])):
        raise CannotEncode(
            f"rows are instances of a dataclass or a pydantic model, not {type(rows[0]).__name__}; send_batch takes"
            " columns",
            stream=stream,
        )
    return columns_of(type(rows[0])).batch(rows, schema, stream)
