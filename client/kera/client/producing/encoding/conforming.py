"""Conform users' batches to exactly the columns of a stream, or refuse them.

Pure functions over Arrow data, and a class that remembers the columns of the last batch: mostly the next one has the
same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from kera.client.arrow_input import NotTheSame, as_type, null_column
from kera.client.producing.encoding.payloads import Payload, time_range
from kera.client.types import StreamDescription
from kera.core.errors import SchemaMismatch
from kera.core.format.chunk import LEAN_VERSION, Codec
from kera.core.format.lean import ONE_TIME, encode_completed, is_lean, no_values
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.format.written_out import may_grow

_TIMESTAMP = DEFAULT_SCHEMA.field("timestamp").type
_REQUIRED = [field.name for field in DEFAULT_SCHEMA if not field.nullable]


def conform(batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> pa.RecordBatch:
    """Return `batch` with exactly the columns of the stream's schema, in its order.

    Adds missing columns that may be null, and the timestamp of the default schema. Does not copy columns of the right
    type; converts other columns if all their values stay the same (`arrow_input.as_type`). Raises `SchemaMismatch` for
    any other difference, and for values that readers would refuse, such as text that is not UTF-8: a batch may have
    been made from arbitrary memory.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise _mismatch(stream, f"the batch is not valid for Arrow: {error}") from error
    schema = stream.schema
    if batch.schema.equals(schema) and not _has_forbidden_nulls(batch, stream):
        return batch
    names = batch.schema.names
    if len(set(names)) < len(names):
        raise _mismatch(stream, f"the batch has several columns {Counter(names).most_common(1)[0][0]!r}")
    extra = set(names) - set(schema.names)
    if extra:
        raise _mismatch(stream, f"has no column {min(extra)!r}")
    arrays = []
    for field in schema:
        at = batch.schema.get_field_index(field.name)
        if at >= 0:
            column = batch.column(at)
            if column.type != field.type:
                try:
                    column = as_type(column, field.type)
                except NotTheSame as error:
                    why = f": {error}" if str(error) else ""
                    text = f"column {field.name!r} is {field.type}, the batch has {column.type}{why}"
                    raise _mismatch(stream, text) from error
            if not field.nullable and column.null_count:
                raise _mismatch(stream, f"column {field.name!r} takes no nulls, the batch has {column.null_count}")
            arrays.append(column)
        elif _is_time_of_record(field, stream):
            arrays.append(_one_time(now_us, batch.num_rows))
        else:
            arrays.append(_left_out(field, batch.num_rows, stream))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@dataclass(frozen=True, slots=True)
class _Fit:
    """How batches of one schema become batches of the stream's schema, when no column has to be converted."""

    schema: pa.Schema
    """The schema of the batches."""
    wanted: pa.Schema
    """The schema of the stream."""
    sources: tuple[int, ...]
    """The source of each column of the stream, in the form that `encode_completed` takes."""
    required: tuple[int, ...]
    """The batch's columns that take no nulls."""
    lean: bool
    """Whether every batch that is small enough can be one lean chunk."""
    keyed: bool
    """Whether keys decide the streamlets of rows."""
    timed: bool
    """Whether batches have the column with the times of records."""

    def columns(self, batch: pa.RecordBatch, now_us: int) -> pa.RecordBatch:
        """Return `batch` with the stream's columns."""
        count, given, wanted = batch.num_rows, batch.columns, self.wanted
        columns = [
            given[source]
            if source >= 0
            else _one_time(now_us, count)
            if source == ONE_TIME
            else null_column(count, wanted.field(at).type)
            for at, source in enumerate(self.sources)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=wanted)

    def has_forbidden_nulls(self, batch: pa.RecordBatch) -> bool:
        """Return whether a column of `batch` that takes no nulls has some."""
        return any(batch.column(at).null_count for at in self.required)


class Conformer:
    """`conform`, for one stream: quick with a batch that has the columns of the one before."""

    def __init__(self) -> None:
        self._fit: _Fit | None = None

    def conform(self, batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> pa.RecordBatch:
        """See the function of this name."""
        fit = self._fitting(batch, stream)
        if fit is not None:
            return fit.columns(batch, now_us)
        made = conform(batch, stream, now_us)
        self._fit = _fit_of(batch.schema, stream)
        return made

    def payload(
        self, batch: pa.RecordBatch, stream: StreamDescription, now_us: int, *, keyless: bool
    ) -> Payload | None:
        """Return one lean payload of a whole batch with the columns of the last one, or None if that is not possible.

        `keyless`: return one only if no keys decide the streamlets of its rows.
        """
        fit = self._fit
        if fit is None or not fit.lean or (keyless and fit.keyed) or self._fitting(batch, stream) is None:
            return None
        made = encode_completed(batch, fit.sources, now_us, DECOMPRESSED_BYTES_MAX)
        if made is None:
            return None
        low, high = time_range(batch, stream, now_us) if fit.timed else (now_us, now_us)
        return Payload(made, batch.num_rows, low, high, stream.schema_id, LEAN_VERSION)

    def small(self, batch: pa.RecordBatch, stream: StreamDescription, now_us: int) -> pa.RecordBatch | None:
        """Return a valid batch in columns that become the stream's columns without a look at the values.

        None: such a batch is not gathered with others.
        """
        if may_grow(stream.schema) or not is_lean(stream.schema) or not batch.num_columns:
            return None
        if self.takes(batch, stream):
            return batch
        try:
            conforming = self.conform(batch, stream, now_us)
        except SchemaMismatch:
            return None
        return batch if self.takes(batch, stream) else conforming

    def takes(self, batch: pa.RecordBatch, stream: StreamDescription) -> bool:
        """Return whether the batch is valid, and has the columns of the last one, which needed no conversion."""
        return self._fitting(batch, stream) is not None

    def _fitting(self, batch: pa.RecordBatch, stream: StreamDescription) -> _Fit | None:
        fit = self._fit
        if fit is None or fit.wanted is not stream.schema or not batch.schema.equals(fit.schema):
            return None
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid:
            return None
        return None if fit.has_forbidden_nulls(batch) else fit


def _fit_of(schema: pa.Schema, stream: StreamDescription) -> _Fit | None:
    """Return the fit for batches with the schema of one that has conformed; None: columns have to be converted."""
    wanted = stream.schema
    at = {name: number for number, name in enumerate(schema.names)}
    if any(schema.field(field.name).type != field.type for field in wanted if field.name in at):
        return None
    key, time = (stream.key_column, stream.timestamp_column) if stream.typed else ("keys", "timestamp")
    return _Fit(
        schema,
        wanted,
        tuple(
            at[field.name]
            if field.name in at
            else ONE_TIME
            if _is_time_of_record(field, stream)
            else no_values(field.type)
            for field in wanted
        ),
        required=tuple(at[name] for name in _required(stream) if name in at),
        lean=stream.codec is Codec.NONE and is_lean(wanted) and not may_grow(wanted),
        keyed=key is not None and (stream.typed or key in at),
        timed=time is not None and time in at,
    )


def _is_time_of_record(field: pa.Field, stream: StreamDescription) -> bool:
    return not stream.typed and field.name == "timestamp"


def _one_time(now_us: int, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(now_us, _TIMESTAMP), count)


def _has_forbidden_nulls(batch: pa.RecordBatch, stream: StreamDescription) -> bool:
    """Return whether the batch has nulls in a column that takes none in the stream; the batch may lack the column."""
    for name in _required(stream):
        at = batch.schema.get_field_index(name)
        if at >= 0 and batch.column(at).null_count:
            return True
    return False


def _left_out(field: pa.Field, count: int, stream: StreamDescription) -> pa.Array:
    """Return nulls for a column that a batch does not have. Raises `SchemaMismatch` when it cannot have any."""
    if not field.nullable:
        raise _mismatch(stream, f"needs column {field.name!r}")
    try:
        return null_column(count, field.type)
    except pa.ArrowNotImplementedError as error:
        text = f"needs column {field.name!r}: Arrow makes no nulls of type {field.type}"
        raise _mismatch(stream, text) from error


def _required(stream: StreamDescription) -> Sequence[str]:
    """Return the names of the columns that take no nulls."""
    if not stream.typed:
        return _REQUIRED
    return [field.name for field in stream.schema if not field.nullable]


def _mismatch(stream: StreamDescription, text: str) -> SchemaMismatch:
    return SchemaMismatch(f"stream {stream.name!r}: {text}", stream=stream.name, schema_id=stream.schema_id)
