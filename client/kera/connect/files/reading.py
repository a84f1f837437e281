"""Reads one file from a position to its end, in batches of a stream's columns, each with the position after it.

Positions count rows of Parquet, or bytes of text. The caller decides whether the text after the last complete record is
a record, too (`Reading.tail`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from kera.client.arrow_input import NotTheSame, as_type
from kera.client.json_form import records_of_lines, rows_of_lines
from kera.connect.errors import Refused
from kera.connect.files.inference import columns_of_csv, columns_of_lines
from kera.connect.files.int96 import OldTimes
from kera.connect.files.numbers import Scan, first_changed, first_rewritten, holds_short
from kera.connect.files.text import CsvRecords, JsonRecords, Position, Records, TextFile, changed, mark_of
from kera.connect.records import key_lists
from kera.core.errors import SchemaMismatch
from kera.core.format.arrow_types import empty_batch
from kera.core.format.schema import DEFAULT_SCHEMA

BLOCK_BYTES = 1 << 20
TEXT_BYTES_MAX = 8 << 20
"""Size of the text that is parsed at once."""
SAMPLE_BYTES = 8 << 20
"""Size of the text from which columns are inferred."""
ROWS_MAX = 1 << 16
_CSV_ROW = re.compile(r"Row #(\d+)")
_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")


class Reading(Protocol):
    """One file, read once."""

    @property
    def size(self) -> int:
        """The size of the file in bytes; known after `batches`."""
        ...

    @property
    def is_cut(self) -> bool:
        """Whether the file is compressed, and its last frame is incomplete; known after `batches`."""
        ...

    @property
    def tail(self) -> bytes:
        """The text after the last complete record, which may become a record; known after `batches`."""
        ...

    def batches(self, start: Position, size: int) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """Yield the complete records after `start`, about `size` bytes each time, with the position after them."""
        ...

    def of_tail(self) -> tuple[pa.RecordBatch, Position] | None:
        """Return the tail as a record; None: it cannot be a complete record."""
        ...

    def between(self, start: Position, end: Position) -> pa.RecordBatch:
        """Return the records between two positions that `batches` has yielded before."""
        ...


def schema_of(path: str, kind: str) -> pa.Schema:
    """Return the columns that a file has, or seems to have. Raises `SchemaMismatch` with its name, and `Refused`."""
    try:
        match kind:
            case "parquet":
                with pq.ParquetFile(path) as file:
                    found = file.schema_arrow
            case "csv":
                found = _columns_of_csv(sample_of(path, CsvRecords(), SAMPLE_BYTES))
            case _:
                block = sample_of(path, JsonRecords(), SAMPLE_BYTES)
                if not block.strip():
                    raise pa.ArrowInvalid("it is empty, and has no columns")
                found = columns_of_lines(block)
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{path}: {error.message}", path=path) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"{path} is not a valid {kind} file: {error}", path=path) from error
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    if len(set(found.names)) < len(found.names) or not all(found.names):
        raise SchemaMismatch(f"{path} has several columns of one name, or one without a name: {found.names}")
    return pa.schema([pa.field(field.name, _plain(field.type), field.nullable) for field in found])


def _columns_of_csv(text: bytes) -> pa.Schema:
    found = _read_csv(text, None).schema
    strings = pa.schema([pa.field(name, pa.string()) for name in dict.fromkeys(found.names)])
    return columns_of_csv(found, _read_csv(text, strings))


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of a stream's column; a column without any value becomes text."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_null(kind):
        return pa.string()
    simple = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary()}
    return simple.get(kind, kind)


def reading_of(path: str, kind: str, schema: pa.Schema, *, inferred: bool = False) -> Reading:
    """Return the reading of a file of a kind. `inferred`: the columns were inferred from a file."""
    match kind:
        case "parquet":
            return ParquetReading(path, schema)
        case "csv":
            return TextReading(path, CsvText(schema, inferred=inferred))
        case _:
            return TextReading(path, JsonText(schema))


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Translate errors of reading a file within this context, so that they name the file."""
    try:
        yield
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{path}: {error.message}", path=path) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"{path}: {error}", path=path) from error
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error


# -- Parquet ---------------------------------------------------------------------------------------------------------


class ParquetReading:
    """See `Reading`. An incomplete file of Parquet cannot be read, so there is no tail."""

    is_cut = False
    tail = b""

    def __init__(self, path: str, schema: pa.Schema) -> None:
        self.size = 0
        self._path = path
        self._schema = schema

    def batches(self, start: Position, size: int) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """See `Reading`. Raises `SourceChanged` if the file is not the one that was copied."""
        mark = mark_of(self._path)
        if start.mark not in ("", mark):
            raise changed(self._path, f"it is another file than the one with {start.at} copied rows")
        with pq.ParquetFile(self._path) as file:
            names = _known(file.schema_arrow.names, self._schema)
            old_times = OldTimes(self._path, file.schema, self._schema)
            begin = 0
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                end = begin + group.num_rows
                if end > start.at:
                    rows = max(1, min(ROWS_MAX, size * group.num_rows // max(1, group.total_byte_size)))
                    batches = file.iter_batches(batch_size=rows, row_groups=[number], columns=names)
                    for batch in old_times.checked(batches, number, rows, begin):
                        skipped = min(batch.num_rows, max(0, start.at - begin))
                        begin += batch.num_rows
                        if skipped < batch.num_rows:
                            yield _records(batch.slice(skipped), self._schema), Position(begin, mark)
                begin = end
        self.size = os.stat(self._path).st_size  # noqa: PTH116 - names

    def of_tail(self) -> None:
        """Return None, because there is no tail. See `Reading`."""

    def between(self, start: Position, end: Position) -> pa.RecordBatch:
        """See `Reading`."""
        parts = []
        for rows, behind in self.batches(start, BLOCK_BYTES):
            parts.append(rows.slice(0, rows.num_rows - max(0, behind.at - end.at)))
            if behind.at >= end.at:
                break
        return pa.concat_batches(parts) if parts else empty_batch(self._schema)


def _known(names: list[str], schema: pa.Schema) -> list[str]:
    """Return `names`. Raises `SchemaMismatch` unless `schema` has them all."""
    takes = set(schema.names) | ({"key"} if schema is DEFAULT_SCHEMA else set())
    extra = [name for name in names if name not in takes]
    if extra:
        raise SchemaMismatch(f"has a column {extra[0]!r}, and the stream has only {', '.join(schema.names)}")
    return names


def _of_stream(column: pa.Array, field: pa.Field) -> pa.Array:
    """Convert a column to its type in the stream. Raises `SchemaMismatch` if that would change values."""
    if column.type == field.type:
        return column
    try:
        return as_type(column, field.type)
    except NotTheSame as error:
        why = f": {error}" if str(error) else ""
        raise SchemaMismatch(
            f"column {field.name!r} is {field.type} in the stream, and {column.type} in the file{why}",
            column=field.name,
        ) from error


def _records(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch to the columns of the stream.

    For a stream without a schema, text becomes bytes, and ``key`` becomes the only one of `keys`.
    """
    if schema is not DEFAULT_SCHEMA:
        fields = [schema.field(name) for name in batch.schema.names]
        converted = [_of_stream(column, field) for column, field in zip(batch.columns, fields, strict=True)]
        return pa.RecordBatch.from_arrays(converted, names=batch.schema.names)
    columns = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if name in {"key", "value"}:
            text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            as_bytes = column.cast(pa.binary()) if text else column
            columns["keys" if name == "key" else name] = key_lists(as_bytes) if name == "key" else as_bytes
        elif name == "timestamp" and pa.types.is_timestamp(kind) and kind.tz is None:
            columns[name] = column.cast(pa.timestamp("us")).cast(DEFAULT_SCHEMA.field("timestamp").type)
        else:
            columns[name] = column
    return pa.record_batch(columns)


# -- text ------------------------------------------------------------------------------------------------------------


class Text(Protocol):
    """A format of text files."""

    @property
    def records(self) -> Records:
        """The rules for the ends of records."""
        ...

    def begin(self, path: str) -> int:
        """Return where in the file the first record begins."""
        ...

    def batch(self, text: bytes, line: int, behind: str) -> pa.RecordBatch:
        """Return the rows of `text`, which begins with line number `line`; `behind` says where counting starts."""
        ...


class TextReading:
    """See `Reading`."""

    def __init__(self, path: str, text: Text) -> None:
        self._path = path
        self._text = text
        self._file = TextFile(path, text.records)
        self._line, self._behind = 1, ""

    @property
    def size(self) -> int:
        """See `Reading`."""
        return self._file.size

    @property
    def is_cut(self) -> bool:
        """See `Reading`."""
        return self._file.is_cut

    @property
    def tail(self) -> bytes:
        """See `Reading`."""
        return self._file.tail if self._file.tail.strip() else b""

    def batches(self, start: Position, size: int) -> Iterator[tuple[pa.RecordBatch, Position]]:
        """See `Reading`."""
        first = self._text.begin(self._path)
        if start.at < first:
            start = Position(first)
            self._line = 2
        elif start.at:
            self._behind = f" (lines are counted from byte {start.at})"
        for text, position in self._file.blocks(start, min(size, TEXT_BYTES_MAX)):
            rows = self._text.batch(text, self._line, self._behind)
            self._line += text.count(b"\n")
            if rows.num_rows:
                yield rows, position

    def of_tail(self) -> tuple[pa.RecordBatch, Position] | None:
        """See `Reading`."""
        tail = self._file.tail
        if not self._text.records.is_whole(tail):
            return None
        return self._text.batch(tail, self._line, self._behind), self._file.behind_tail()

    def between(self, start: Position, end: Position) -> pa.RecordBatch:
        """See `Reading`."""
        start = max(start, Position(self._text.begin(self._path)))
        return self._text.batch(self._file.between(start, end), 1, f" (lines are counted from byte {start.at})")


class CsvText:
    """CSV, with the names of its columns in the first row."""

    records = CsvRecords()

    def __init__(self, schema: pa.Schema, *, inferred: bool = False) -> None:
        """`inferred`: a number with leading zeros may be a code, and is refused instead of changed."""
        text = pa.schema([("timestamp", schema.field(0).type), ("key", pa.string()), ("value", pa.string())])
        self._schema = schema
        self._wanted = text if schema is DEFAULT_SCHEMA else schema
        self._inferred = inferred
        self._names: list[str] = []

    def begin(self, path: str) -> int:
        """See `Text`. Raises `SchemaMismatch` for columns that the stream does not have."""
        header = sample_of(path, self.records, BLOCK_BYTES)
        end = self.records.first_end(header)
        if not end:
            return 0  # the row of names may be incomplete, and there are no rows after it
        self._names = _known(_read_csv(header[:end], None).schema.names, self._schema)
        return end

    def batch(self, text: bytes, line: int, behind: str) -> pa.RecordBatch:
        """See `Text`. Raises `SchemaMismatch` with the column's name for a value that does not fit."""
        if not self._names or not text.strip(b"\r\n"):
            return empty_batch(self._schema)
        try:
            rows = self._rows(text, line, behind)
        except pa.ArrowInvalid as error:
            found = _CSV_COLUMN.search(str(error))
            if found is None:
                said = _CSV_ROW.sub(lambda row: f"Row #{line - 1 + int(row[1])}", str(error))
                raise SchemaMismatch(said + behind.replace("lines", "rows")) from error
            name = self._names[int(found[1])] if int(found[1]) < len(self._names) else found[1]
            raise SchemaMismatch(f"column {name!r}: {_CSV_COLUMN.sub('', str(error))}", column=name) from error
        return _records(rows, self._schema)

    def _rows(self, text: bytes, line: int, behind: str) -> pa.RecordBatch:
        """Parse rows. Raises `SchemaMismatch` for a number that its column would change, and Arrow's errors."""
        numbers = [field for field in self._wanted if field.name in self._names and _is_number(field.type)]
        floats = [field for field in numbers if pa.types.is_floating(field.type)]
        scan = Scan(text)
        if self._inferred and numbers and not scan.is_plain():
            for field, texts in self._texts(text, numbers):
                if (at := first_rewritten(texts)) is not None:
                    raise SchemaMismatch(
                        f"column {field.name!r}: {texts[at]}, which {field.type} would change, in line {line + at}"
                        f"{behind}; all values were plain numbers where types were made out: create the stream by hand,"
                        " with text for this column, or copy into it without --create for its number alone",
                        column=field.name,
                    )
        rows = _read_csv(text, self._wanted, self._names)
        short = bool(floats) and scan.is_short()
        checked = [field for field in floats if not short or not holds_short(rows.column(field.name))]
        for field, texts in self._texts(text, checked):
            if (at := first_changed(texts, rows.column(field.name))) is not None:
                raise SchemaMismatch(
                    f"column {field.name!r}: {texts[at]}, which {field.type} cannot hold exactly, in line"
                    f" {line + at}{behind}: use a column of decimals or text",
                    column=field.name,
                )
        return rows

    def _texts(self, text: bytes, fields: list[pa.Field]) -> Iterator[tuple[pa.Field, pa.Array]]:
        """Yield `fields` with their values as text, without surrounding spaces."""
        if fields:
            wanted = pa.schema([field.with_type(pa.string()) for field in fields])
            found = _read_csv(text, wanted, self._names, only=wanted.names)
            for field in fields:
                yield field, pc.utf8_trim_whitespace(found.column(field.name))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _read_csv(
    text: bytes, schema: pa.Schema | None, names: list[str] | None = None, *, only: list[str] | None = None
) -> pa.RecordBatch:
    """Parse complete rows. `names`: the columns, if the first row does not name them; `only`: the columns to read."""
    table = pa.csv.read_csv(
        pa.BufferReader(text),
        read_options=pa.csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=_csv_columns(schema, only),
    )
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else empty_batch(table.schema)


def _csv_columns(schema: pa.Schema | None, only: list[str] | None) -> Any:
    """Return the options of columns: only a missing value is null. Empty text in quotes, or NA, is not null."""
    types = {field.name: field.type for field in schema} if schema is not None else None
    return pa.csv.ConvertOptions(
        column_types=types,
        include_columns=only or [],
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )


class JsonText:
    """Lines of JSON."""

    records = JsonRecords()

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def begin(self, path: str) -> int:
        """See `Text`."""
        del path
        return 0

    def batch(self, text: bytes, line: int, behind: str) -> pa.RecordBatch:
        """See `Text`. Raises `SchemaMismatch` with the line."""
        schema = self._schema
        try:
            return records_of_lines(text, line) if schema is DEFAULT_SCHEMA else rows_of_lines(text, schema, line)
        except SchemaMismatch as error:
            raise SchemaMismatch(error.message + behind) from error


def sample_of(path: str, records: Records, size: int) -> bytes:
    """Return the first complete records of a file, about `size` bytes; without a complete record, the whole text."""
    file = TextFile(path, records)
    text, _ = next(file.blocks(Position(0), size), (b"", None))
    return text or file.tail
