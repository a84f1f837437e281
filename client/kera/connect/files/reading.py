"""Reads files, from any place of theirs: batches of a stream's columns, with where they end."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from kera.connect.errors import Refused
from kera.connect.files.lines import json_to_batch, rows_to_batch
from kera.connect.files.places import PACKED
from kera.connect.records import key_lists
from kera.core.errors import SchemaMismatch
from kera.core.schema import DEFAULT_SCHEMA

BLOCK_BYTES = 1 << 20
LINE_BYTES_MAX = 64 << 20
SAMPLE_BYTES = 8 << 20
"""Of these, columns are made out."""
ROWS_MAX = 1 << 16
RECORD_FIELDS = {"key", "keys", "key_base64", "value", "value_base64", "headers", "timestamp"}
PLACE_FIELDS = {"stream", "streamlet", "entry", "offset"}
_CSV_COLUMN = re.compile(r"In CSV column #(\d+): ")

Read = Callable[[str, int, pa.Schema, int], Iterator[tuple[pa.RecordBatch, int]]]
"""Batches of a file from a place on, of these columns and about so many bytes each, and where each ends."""


def schema_of(path: str, kind: str) -> pa.Schema:
    """The columns that a file has, or seems to have. Raises `SchemaMismatch` with its name."""
    try:
        match kind:
            case "parquet":
                found = pq.read_schema(path)
            case "csv":
                with _open_csv(path, None) as reader:
                    found = reader.schema
            case _:
                found = _schema_of_lines(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"{path} is no file of {kind}: {error}", path=path) from error
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error
    if len(set(found.names)) < len(found.names) or not all(found.names):
        raise SchemaMismatch(f"{path} has several columns of one name, or one without a name: {found.names}")
    return pa.schema([pa.field(field.name, _plain(field.type), field.nullable) for field in found])


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type of a stream's column; one of which all values are missing is text."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_null(kind):
        return pa.string()
    simple = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary()}
    return simple.get(kind, kind)


def reader_of(kind: str) -> Read:
    """What reads files of a kind."""
    return {"parquet": _parquet, "csv": _csv, "jsonl": _lines}[kind]


def translated(path: str, batches: Iterator[tuple[pa.RecordBatch, int]]) -> Iterator[tuple[pa.RecordBatch, int]]:
    """`batches` of a file, with errors that name it."""
    try:
        yield from batches
    except SchemaMismatch as error:
        raise SchemaMismatch(f"{path}: {error.message}", path=path) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
        raise SchemaMismatch(f"{path}: {error}", path=path) from error
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from error


# -- Parquet: places are rows ----------------------------------------------------------------------------------------


def _parquet(path: str, at: int, schema: pa.Schema, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    with pq.ParquetFile(path) as file:
        names = _known(file.schema_arrow.names, schema)
        begin = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            end = begin + group.num_rows
            if end > at:
                rows = max(1, min(ROWS_MAX, size * group.num_rows // max(1, group.total_byte_size)))
                for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=names):
                    skipped = min(batch.num_rows, max(0, at - begin))
                    begin += batch.num_rows
                    if skipped < batch.num_rows:
                        yield _records(batch.slice(skipped), schema), begin
            begin = end


def _known(names: list[str], schema: pa.Schema) -> list[str]:
    """`names`, if `schema` has them all. Raises `SchemaMismatch`."""
    takes = set(schema.names) | ({"key"} if schema is DEFAULT_SCHEMA else set())
    extra = [name for name in names if name not in takes]
    if extra:
        raise SchemaMismatch(
            f"has a column {extra[0]!r}, and the stream has none of that name, but {', '.join(schema.names)}"
        )
    return names


def _records(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """For a stream without columns of its own: text as the bytes that it is, and ``key`` as the only one of `keys`."""
    if schema is not DEFAULT_SCHEMA:
        return batch
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


# -- CSV: places are rows --------------------------------------------------------------------------------------------


def _csv(path: str, at: int, schema: pa.Schema, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    default = schema is DEFAULT_SCHEMA
    text = pa.schema([("timestamp", schema.field(0).type), ("key", pa.string()), ("value", pa.string())])
    wanted = text if default else schema
    names: list[str] = []
    try:
        with _open_csv(path, wanted, at, min(size, 16 << 20)) as reader:
            names = _known(reader.schema.names, schema)
            end = at
            for batch in reader:
                if batch.num_rows:
                    end += batch.num_rows
                    yield _records(batch, schema), end
    except pa.ArrowInvalid as error:
        found = _CSV_COLUMN.search(str(error))
        if found is None or not (names or (names := _header(path))):
            raise
        name = names[int(found[1])] if int(found[1]) < len(names) else found[1]
        raise SchemaMismatch(f"column {name!r}: {_CSV_COLUMN.sub('', str(error))}", column=name) from error


def _header(path: str) -> list[str]:
    with _open_csv(path, None) as reader:
        return list(reader.schema.names)


def _open_csv(path: str, schema: pa.Schema | None, skip: int = 0, block: int = BLOCK_BYTES) -> Any:
    return pa.csv.open_csv(
        path,
        read_options=pa.csv.ReadOptions(
            use_threads=False, block_size=max(block, BLOCK_BYTES), skip_rows_after_names=skip
        ),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=_csv_columns(schema),
    )


def _csv_columns(schema: pa.Schema | None) -> Any:
    """Text in quotes is what it is, also when it is empty; what is missing is null, and nothing else: NA is a name."""
    types = {field.name: field.type for field in schema} if schema is not None else None
    return pa.csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )


# -- lines of JSON: places are bytes ---------------------------------------------------------------------------------


def _blocks(path: str, at: int, size: int) -> Iterator[tuple[bytes, int]]:
    """Whole lines, and where they end. A last line need not have an end."""
    with pa.input_stream(path, compression="detect") as file:
        _skip(file, at, seekable=not path.endswith(PACKED))
        rest, end = b"", at
        while block := file.read(size):
            rest += block
            whole, newline, rest = rest.rpartition(b"\n")
            if newline:
                end += len(whole) + 1
                yield whole + newline, end
            elif len(rest) > LINE_BYTES_MAX:
                raise SchemaMismatch(f"a line behind byte {end} has more than {LINE_BYTES_MAX} bytes")
        if rest:
            yield rest, end + len(rest)


def _skip(file: Any, count: int, *, seekable: bool) -> None:
    if seekable:
        file.seek(count)
        return
    while count and (block := file.read(min(BLOCK_BYTES, count))):
        count -= len(block)


def _unexpected(block: bytes, schema: pa.Schema) -> str:
    """A field in lines that is no column; empty: there is none."""
    for line in filter(bytes.strip, block.split(b"\n")):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and (unknown := found.keys() - set(schema.names)):
                return f"has a field {min(unknown)!r}, and the stream has no column of that name: "
    return ""


def _lines(path: str, at: int, schema: pa.Schema, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    number = 1 if at == 0 else None
    for block, end in _blocks(path, at, min(size, BLOCK_BYTES)):
        first = number or 1
        try:
            batch = json_to_batch(block, first) if schema is DEFAULT_SCHEMA else rows_to_batch(block, schema, first)
        except SchemaMismatch as error:
            behind = "" if number else f" (lines are counted from byte {at})"
            unexpected = "" if schema is DEFAULT_SCHEMA else _unexpected(block, schema)
            raise SchemaMismatch(unexpected + error.message + behind) from error
        number = first + block.count(b"\n")
        if batch.num_rows:
            yield batch, end


def _schema_of_lines(path: str) -> pa.Schema:
    """What the first lines seem to have: the default schema, if they are records as kera consume prints them."""
    block, _ = next(_blocks(path, 0, SAMPLE_BYTES), (b"", 0))
    if not block.strip():
        raise pa.ArrowInvalid("it is empty, and nobody can say which columns it has")
    names: set[str] = set()
    for line in block.split(b"\n")[:100]:
        found = json.loads(line) if line.strip() else {}
        if not isinstance(found, dict):
            raise pa.ArrowInvalid("a line is no object of JSON")
        names |= found.keys()
    if names <= RECORD_FIELDS | PLACE_FIELDS and names & {"value", "value_base64"}:
        return DEFAULT_SCHEMA
    reading = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    return pa.json.read_json(pa.BufferReader(block), read_options=reading).schema
