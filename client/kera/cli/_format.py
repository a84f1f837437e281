r"""Turns record batches into the text that ``kera consume`` prints.

A format is text with tokens, as those of kcat:

    %s value    %k first key       %h headers, as name=value,name=value          %% a percent sign
    %T timestamp, microseconds since the epoch
    %t stream   %p streamlet       %e entry       %o offset: number of the record in its entry, from 0
    \n \t \r \\ \0 \xHH

It is applied to whole columns: Arrow joins them, and the memory of the joined column is the output.
`kera.client.json_form` makes JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.cli._run import UsageError
from kera.client.json_form import record_lines, row_lines, row_texts
from kera.client.json_form.writing import is_bytes, texts_of

if TYPE_CHECKING:
    from kera.client import StreamDescription

TOKENS = "skhtpeoT"

_PIECE = re.compile(r"%(.)|\\(x[0-9a-fA-F]{2}|.)|([^%\\]+)", re.DOTALL)
_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|.?)|([^\\]+)", re.DOTALL)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal or change the direction of text, besides line ends and tabs."""
_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


_PLACE_NAMES = ("stream", "streamlet", "entry", "offset")
_ORIGINS = {"t": "stream", "p": "streamlet", "e": "entry", "o": "offset"}


class RecordOrigin(NamedTuple):
    """The entry that has the records of a batch, and their offset in it."""

    streamlet: int
    entry: int
    first_record: int
    """Offset of the first record."""


Origin: TypeAlias = RecordOrigin | pa.RecordBatch
"""One origin of all records, or the origin of each as in `kera.client.OrderedBatch.origins`."""
Formatter = Callable[[pa.RecordBatch, Origin], Any]
"""Turns a batch into the bytes to print."""


def text_formatter(template: str, stream: StreamDescription) -> Formatter:
    """Return a formatter for `template`. Raises `UsageError` for a token that does not exist."""
    pieces = list(_parse(template))

    def format_batch(batch: pa.RecordBatch, origin: Origin) -> Any:
        return _join([_column(piece, batch, origin, stream) for piece in pieces], batch.num_rows)

    return format_batch


def json_formatter(stream: StreamDescription) -> Formatter:
    """Return a formatter that makes a JSON object per line: a row of a typed stream, else a record and its place."""

    def format_rows(batch: pa.RecordBatch, _: Origin) -> bytes:
        return row_lines(batch)

    def format_records(batch: pa.RecordBatch, origin: Origin) -> bytes:
        return record_lines(batch, lambda at, count: _place_texts(origin, at, count, stream))

    return format_rows if stream.typed else format_records


def for_terminal(data: Any) -> bytes:
    r"""Return text for a terminal: characters that would control the terminal become escapes such as \x1b."""
    text = bytes(data).decode(errors="backslashreplace")
    return _CONTROL.sub(lambda found: _escaped(ord(found[0])), text).encode()


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class _Token(NamedTuple):
    letter: str


def _parse(template: str) -> Iterator[bytes | _Token]:
    position = 0
    for match in _PIECE.finditer(template):
        if match.start() != position:
            break
        position = match.end()
        sign, escape, literal = match.groups()
        if literal is not None:
            yield literal.encode(errors="surrogateescape")  # bytes that are invalid in the locale stay as they are
        elif sign == "%":
            yield b"%"
        elif sign is not None:
            if sign not in TOKENS:
                known = " ".join("%" + letter for letter in TOKENS)
                raise UsageError(f"--format: there is no %{sign}; there are {known} and %%")
            yield _Token(sign)
        else:
            yield _meant(escape, "--format")
    if position != len(template):
        rest = template[position:]
        raise UsageError(rf"--format: {rest!r} is cut short; write %% or \\ for the sign itself")


def _place_texts(origin: Origin, at: int, count: int, stream: StreamDescription) -> pa.Array:
    """Return the members of JSON objects that say where records are, for `count` records from `at` on."""
    if isinstance(origin, pa.RecordBatch):
        places = origin.slice(at, count).columns[:4]
    else:
        first = origin.first_record + at
        fixed = (stream.name, origin.streamlet, origin.entry)
        places = [*(pa.array([each]).take(pa.array(np.zeros(count, np.int8))) for each in fixed)]
        places.append(pa.array(np.arange(first, first + count)))
    parts: list[Any] = []
    for name, column in zip(_PLACE_NAMES, places, strict=True):
        parts += [f'{", " if parts else ""}"{name}": ', texts_of(column)]
    return pc.binary_join_element_wise(*parts, "")


def _column(piece: bytes | _Token, batch: pa.RecordBatch, origin: Origin, stream: StreamDescription) -> Any:
    """Return the column, or the one value for all records, that a piece of the format stands for."""
    if isinstance(piece, bytes):
        return _constant(piece)
    if piece.letter in _ORIGINS:
        return _origin(piece.letter, batch.num_rows, origin, stream)
    return (_typed_column if stream.typed else _record_column)(piece.letter, batch, stream)


def _origin(letter: str, rows: int, origin: Origin, stream: StreamDescription) -> Any:
    if isinstance(origin, pa.RecordBatch):
        return _as_text(origin.column(_ORIGINS[letter]))
    match letter:
        case "t":
            return _constant(stream.name.encode())
        case "p":
            return _constant(b"%d" % origin.streamlet)
        case "e":
            return _constant(b"%d" % origin.entry)
    return _as_text(pa.array(np.arange(origin.first_record, origin.first_record + rows)))


def _record_column(letter: str, batch: pa.RecordBatch, _: StreamDescription) -> Any:
    """Key, value, headers or time of the records of an untyped stream."""
    match letter:
        case "k":
            return _first_keys(batch.column("keys"))
        case "h":
            return _headers(batch.column("headers"))
        case "T":
            return _microseconds(batch.column("timestamp"))
    return batch.column("value")


def _typed_column(letter: str, batch: pa.RecordBatch, stream: StreamDescription) -> Any:
    """The same of a typed stream: its key and timestamp columns if it has them, no headers, and the row as JSON."""
    match letter:
        case "k":
            return _as_text(batch.column(stream.key_column)) if stream.key_column else _constant(b"")
        case "h":
            return _constant(b"")
        case "T":
            return _microseconds(batch.column(stream.timestamp_column)) if stream.timestamp_column else _constant(b"")
    return pa.concat_arrays([*row_texts(batch), pa.array([], pa.string())]).cast(pa.binary())


def _join(columns: list[Any], count: int) -> Any:
    """Return the records' texts one after the other, in one buffer."""
    joined = pc.binary_join_element_wise(*columns, _constant(b""), null_handling="replace", null_replacement=b"")
    if isinstance(joined, pa.Scalar):
        return joined.as_py() * count
    _, offsets, data = joined.buffers()
    ends = np.frombuffer(offsets, np.int32)[joined.offset : joined.offset + len(joined) + 1]
    return memoryview(data)[ends[0] : ends[-1]] if data is not None else b""


def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())


def _microseconds(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz), safe=False).cast(pa.int64())
    return _as_text(column)


def _as_text(column: pa.Array) -> pa.Array:
    kind = column.type
    if is_bytes(kind):
        return column.cast(pa.binary())
    if pa.types.is_dictionary(kind):
        return _as_text(column.dictionary_decode())
    return column.cast(pa.string()).cast(pa.binary())


def _first_keys(keys: pa.ListArray) -> pa.Array:
    """Return the first key of each record, null for a record without keys."""
    lengths = pc.fill_null(pc.list_value_length(keys), 0).to_numpy(zero_copy_only=False)
    starts = keys.offsets.to_numpy()[: len(keys)]
    return keys.values.take(pa.array(starts, mask=lengths == 0))


def _headers(headers: pa.MapArray) -> pa.Array:
    """Return the headers of each record as ``name=value,name=value``; missing headers and null values are empty."""
    pairs = pc.binary_join_element_wise(
        headers.keys.cast(pa.binary()), headers.items, b"=", null_handling="replace", null_replacement=b""
    )
    return pc.binary_join(pa.ListArray.from_arrays(headers.offsets, pairs), b",")


def unescaped(text: str, option: str) -> bytes:
    r"""Return the bytes that the text of an option stands for; it may have the escapes of --format, such as \t.

    Raises `UsageError` for other escapes.
    """
    return b"".join(
        literal.encode(errors="surrogateescape") if literal else _meant(escape, option)
        for escape, literal in _ESCAPED.findall(text)
    )


def _meant(escape: str, option: str) -> bytes:
    if escape.startswith("x") and len(escape) == 3:
        return bytes.fromhex(escape[1:])
    if escape not in _ESCAPES:
        raise UsageError(rf"{option}: there is no \{escape}; there are \n \t \r \0 \\ \xHH")
    return _ESCAPES[escape]
