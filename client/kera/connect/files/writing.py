"""Writes rows into a file in one of three formats, and reports rows that the format cannot hold."""

from __future__ import annotations

from typing import IO, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from kera.client.json_form import record_lines, row_lines
from kera.core.errors import SchemaMismatch

GROUP_ROWS = 1 << 16
GROUP_BYTES = 16 << 20
"""Size of a row group of Parquet, unless `GROUP_ROWS` is reached before."""
_NO_TEXT = "is not UTF-8 text, which {kind} cannot hold: write Parquet"


class Writer(Protocol):
    """A file that is being written."""

    def write(self, rows: pa.RecordBatch) -> None:
        """Append rows."""
        ...

    def end(self) -> None:
        """Write the rows that are held back. The caller closes the file."""
        ...


def writer_of(kind: str, file: IO[bytes], schema: pa.Schema, *, typed: bool) -> Writer:
    """Return the writer of `file`. Raises `SchemaMismatch` for columns that the format cannot hold."""
    match kind:
        case "parquet":
            return Parquet(file, schema)
        case "csv":
            return Csv(file, schema, typed=typed)
    return JsonLines(file, typed=typed)


class Parquet:
    """Writes Parquet, and gathers rows into row groups."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(file, schema, compression="zstd")
        self._schema = schema
        self._rows: list[pa.RecordBatch] = []
        self._count = self._bytes = 0

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Writer`."""
        self._rows.append(rows)
        self._count, self._bytes = self._count + rows.num_rows, self._bytes + rows.nbytes
        if self._count >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_batches(self._rows, self._schema))
        self._rows, self._count, self._bytes = [], 0, 0

    def end(self) -> None:
        """See `Writer`."""
        self._flush()
        self._writer.close()


class Csv:
    """Writes CSV. Text has quotes, and a missing value has none, so that readers can distinguish them."""

    def __init__(self, file: IO[bytes], schema: pa.Schema, *, typed: bool) -> None:
        self._typed = typed
        if typed:
            for field in schema:
                if pa.types.is_nested(field.type):
                    raise SchemaMismatch(f"column {field.name!r} is {field.type}, which CSV cannot hold: write Parquet")
            self._schema = pa.schema([pa.field(field.name, _as_text(field.type)) for field in schema])
        else:
            self._schema = pa.schema([schema.field(0), ("key", pa.string()), ("value", pa.string())])
        self._writer = pa.csv.CSVWriter(file, self._schema)

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Writer`. Raises `SchemaMismatch` for bytes that are not text, and for headers."""
        columns = list(rows.columns) if self._typed else _key_and_value(rows)
        found = []
        for field, column in zip(self._schema, columns, strict=True):
            found.append(_text(column, field.name, "CSV") if column.type != field.type else column)
        if len(found) == 1 and found[0].null_count:
            name = self._schema.names[0]
            raise SchemaMismatch(
                f"a row with {name!r} as its only column has no value, and readers skip empty lines of CSV: write"
                " Parquet or JSON lines",
                column=name,
            )
        self._writer.write_batch(pa.RecordBatch.from_arrays(found, schema=self._schema))

    def end(self) -> None:
        """See `Writer`."""
        self._writer.close()


def _as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else kind


def _text(column: pa.Array, name: str, kind: str) -> pa.Array:
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        raise SchemaMismatch(f"a value of column {name!r} " + _NO_TEXT.format(kind=kind), column=name) from error


def _key_and_value(rows: pa.RecordBatch) -> list[pa.Array]:
    """Return time, key and value. Raises `SchemaMismatch` for records with headers or several keys."""
    keys, headers = rows.column("keys"), rows.column("headers")
    if (pc.max(pc.list_value_length(keys)).as_py() or 0) > 1:
        raise SchemaMismatch("a record has several keys, which CSV cannot hold: write Parquet")
    if headers.null_count < rows.num_rows and any(headers.to_pylist()):
        raise SchemaMismatch("a record has headers, which CSV cannot hold: write Parquet or JSON lines")
    first = pa.array([each[0] if each else None for each in keys.to_pylist()], pa.binary())
    return [rows.column("timestamp"), first, rows.column("value")]


class JsonLines:
    """Writes lines in the form of ``kera consume --json``, without the places of records."""

    def __init__(self, file: IO[bytes], *, typed: bool) -> None:
        self._file = file
        self._typed = typed

    def write(self, rows: pa.RecordBatch) -> None:
        """See `Writer`."""
        self._file.write(row_lines(rows) if self._typed else record_lines(rows))

    def end(self) -> None:
        """See `Writer`."""
