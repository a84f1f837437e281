"""Rows of typed streams in KerA's common form of JSON (`kera.client.json_form`). Pure.

A row may have very many values in few bytes. So its JSON is made only from the values that can be shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property

import pyarrow as pa
from pyarrow import types

from kera.client.json_form import row_texts, texts_of
from kera.client.json_form.writing import has_names_twice, is_list, quoted

_PARTS_MAX = 1 << 20
_SEARCHED_MAX = 1 << 14
"""Number of characters of each row to search for text, if the rows of a chunk have more than `_PARTS_MAX` values."""


class Rows:
    """Consecutive rows of a chunk."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def cell(self, at: int, name: str, length: int) -> str:
        """Return the JSON of a value; if it is longer than `length`, JSON that begins with as many characters."""
        return _text(self._batch.column(name).slice(at, 1), length)

    def row(self, at: int, length: int) -> str:
        """Return the JSON of a row, with the same bound."""
        row = self._batch.slice(at, 1)
        return _joined("{}", ((f"{quoted(name)}: ", row.column(name)) for name in row.schema.names), length)

    def has(self, at: int, wanted: str) -> bool:
        """Return whether the JSON of a row contains `wanted`, in any case; for a very large row, only its begin."""
        if self._texts is None:
            return wanted in self.row(at, _SEARCHED_MAX).casefold()
        return wanted in self._texts[at].as_py().casefold()

    @cached_property
    def _texts(self) -> pa.ChunkedArray | None:
        if sum(_parts(column) for column in self._batch.columns) > _PARTS_MAX:
            return None
        return pa.chunked_array(list(row_texts(self._batch)), pa.string())


def _parts(column: pa.Array) -> int:
    """Return an upper bound of the number of values in `column`, including nested ones."""
    kind, inner = column.type, []
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(column.storage)
    if types.is_map(kind):
        begin, end = column.offsets[0].as_py(), column.offsets[len(column)].as_py()
        inner = [each.slice(begin, end - begin) for each in (column.keys, column.items)]
    elif is_list(kind):
        inner = [column.flatten()]
    elif types.is_struct(kind) or types.is_union(kind):
        inner = [column.field(at) for at in range(kind.num_fields)]
    elif types.is_dictionary(kind):
        inner = [column.dictionary]
    elif types.is_run_end_encoded(kind):
        inner = [column.values]
    return len(column) + sum(map(_parts, inner))


def _text(value: pa.Array, length: int) -> str:
    """Return the JSON of a single value, see `Rows.cell`."""
    kind = value.type
    if isinstance(kind, pa.BaseExtensionType) and _parts(value) > length:
        return _text(value.storage, length)
    if types.is_dictionary(kind):
        return _text(value.dictionary_decode(), length)
    is_taken_apart = types.is_map(kind) or is_list(kind) or types.is_struct(kind)
    if not is_taken_apart or not value.is_valid()[0].as_py() or _parts(value) <= length:
        return str(texts_of(value)[0])
    return _beginning(value, length)


def _beginning(value: pa.Array, length: int) -> str:
    """Return JSON with the parts of a value that can be shown: each has at least one character."""
    kind = value.type
    if types.is_map(kind):
        begin, end = value.offsets[0].as_py(), value.offsets[1].as_py()
        entries = ([("", each.slice(at, 1)) for each in (value.keys, value.items)] for at in range(begin, end))
        return _joined("[]", (_joined("[]", iter(pair), length) for pair in entries), length)
    if is_list(kind):
        inner = value.flatten().slice(0, length)
        if _parts(inner) <= length:
            return _joined("[]", texts_of(inner).to_pylist(), length)
        return _joined("[]", (("", inner.slice(at, 1)) for at in range(len(inner))), length)
    names = None if has_names_twice(kind) else [f"{quoted(field.name)}: " for field in kind]
    fields = ((names[at] if names else "", value.field(at)) for at in range(kind.num_fields))
    return _joined("[]" if names is None else "{}", fields, length)


def _joined(ends: str, parts: Iterable[str | tuple[str, pa.Array]], length: int) -> str:
    """Join texts, or names with single values, into an object or a list, up to `length` characters."""
    found: list[str] = []
    for part in parts:
        found.append(part if isinstance(part, str) else part[0] + _text(part[1], length))
        length -= len(found[-1])
        if length <= 0:
            break
    return f"{ends[0]}{', '.join(found)}{ends[1]}"


def bare(text: str) -> str:
    """Return the text of a JSON string, and any other JSON unchanged."""
    return str(json.loads(text)) if text.startswith('"') else text
