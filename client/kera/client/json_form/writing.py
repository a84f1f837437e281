"""Converts Arrow columns to JSON, column by column: each function makes one text per value, and Arrow joins them.

| type | JSON |
|---|---|
| null, booleans, integers | ``null``, ``true``, ``12``; integers keep all digits |
| floats | the shortest number that is read as the same value; ``"NaN"``, ``"Infinity"``, ``"-Infinity"`` |
| decimals | text: ``"12.50"`` |
| text | text |
| bytes | text if they are UTF-8, else ``{"base64": "/w=="}``; the extension type for UUIDs: its usual text |
| timestamps | ``"2026-01-31T12:00:00.000000Z"`` with the digits of the unit; ``Z`` (UTC) if the type has a zone |
| dates, times of day | ``"2026-01-31"``, ``"12:00:00.000000"`` |
| durations | an integer, in the unit of the type |
| intervals | ``[months, days, nanoseconds]`` |
| lists of all kinds | ``[1, 2]`` |
| maps | a list of pairs: ``[["a", 1], ["b", null]]`` |
| structs | an object; a list of its values if names repeat |
| unions | ``[type code, value]`` |
| dictionaries, runs, extension types | the values that they represent |

A date or a timestamp outside of the years 1 to 9999 is an integer in the unit of the type.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

ROWS_MAX = 1 << 14
"""Number of rows that are converted at once: their texts have to fit into one array of 2 GiB."""
_NULL = "null"
_ESCAPED = r'["\\\x00-\x1f]'
_UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
"""Units per second."""
YEAR_1_S, YEAR_10000_S = -62_135_596_800, 253_402_300_800
DAY_S = 86_400
UUID_TYPE = "arrow.uuid"


def row_lines(batch: pa.RecordBatch) -> bytes:
    """Return a line with a JSON object for each row."""
    return b"".join(joined_lines(texts) for texts in row_texts(batch))


def row_texts(batch: pa.RecordBatch) -> Iterator[pa.Array]:
    """Yield JSON objects for rows, `ROWS_MAX` of them at a time."""
    for at in range(0, batch.num_rows, ROWS_MAX):
        part = batch.slice(at, ROWS_MAX)
        yield objects(part.schema.names, [texts_of(column) for column in part.columns], part.num_rows)


def joined_lines(texts: pa.Array) -> bytes:
    """Join `texts`, each followed by a newline."""
    lines = pc.binary_join_element_wise(texts, "", "\n")
    _, offsets, data = lines.buffers()
    ends = np.frombuffer(offsets, np.int32)
    return bytes(memoryview(data)[ends[lines.offset] : ends[lines.offset + len(lines)]]) if data is not None else b""


def objects(names: list[str], texts: list[pa.Array], count: int) -> pa.Array:
    """Return a JSON object for each of `count` rows, from the texts of its values."""
    if not names:
        return _same("{}", count)
    parts: list[Any] = []
    for at, (name, each) in enumerate(zip(names, texts, strict=True)):
        parts += [f"{', ' if at else '{'}{quoted(name)}: ", each]
    return pc.binary_join_element_wise(*parts, "}", "")


def quoted(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _same(text: str, count: int) -> pa.Array:
    return pa.array([text], pa.string()).take(pa.array(np.zeros(count, np.int8)))


def texts_of(column: pa.Array) -> pa.Array:
    """Return the JSON of each value of a column, as strings without nulls."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _uuids(column.storage) if kind.extension_name == UUID_TYPE else texts_of(column.storage)
    for is_one, write in _WRITERS:
        if is_one(kind):
            found = write(column)
            return found if isinstance(found, pa.Array) else found.combine_chunks()
    return pc.fill_null(column.cast(pa.string()), _NULL)


def _nulls(column: pa.Array) -> pa.Array:
    return _same(_NULL, len(column))


def _or_null(column: pa.Array, texts: pa.Array) -> pa.Array:
    """Return `texts`, with JSON null where `column` is null."""
    return pc.if_else(column.is_valid(), texts, _NULL) if column.null_count else texts


def _in_quotes(texts: pa.Array) -> pa.Array:
    """Return texts that need no escapes as JSON strings; nulls become JSON null."""
    return pc.fill_null(pc.binary_join_element_wise('"', texts, '"', ""), _NULL)


def _floats(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.string())
    whole = pc.match_substring_regex(texts, r"^-?[0-9]+$")
    texts = pc.if_else(whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
    if types.is_float16(column.type):
        column = column.cast(pa.float32())
    finite = pc.is_finite(column)
    if pc.all(finite, min_count=0).as_py():
        return pc.fill_null(texts, _NULL)
    for text, name in (("nan", "NaN"), ("-nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
        texts = pc.if_else(pc.equal(texts, text), f'"{name}"', texts)
    return pc.fill_null(texts, _NULL)


def _decimals(column: pa.Array) -> pa.Array:
    return _in_quotes(column.cast(pa.string()))


def _strings(column: pa.Array) -> pa.Array:
    texts = column.cast(pa.string())
    special = pc.fill_null(pc.match_substring_regex(texts, _ESCAPED), fill_value=False)
    if pc.any(special, min_count=0).as_py():
        escaped = [quoted(text)[1:-1] for text in texts.filter(special).to_pylist()]
        texts = pc.replace_with_mask(texts, special, pa.array(escaped, pa.string()))
    return _in_quotes(texts)


def _bytes(column: pa.Array) -> pa.Array:
    try:
        return _strings(column.cast(pa.binary()).cast(pa.string()))
    except pa.ArrowInvalid:
        return pa.array([_NULL if value is None else bytes_text(value) for value in column.to_pylist()], pa.string())


def bytes_text(value: bytes) -> str:
    """Return the JSON of bytes: text if they are UTF-8, else an object with their base64."""
    try:
        return quoted(value.decode())
    except UnicodeDecodeError:
        return f'{{"base64": "{base64.b64encode(value).decode()}"}}'


def _uuids(column: pa.Array) -> pa.Array:
    found = [_NULL if value is None else f'"{uuid.UUID(bytes=value)}"' for value in column.to_pylist()]
    return pa.array(found, pa.string())


def _timestamps(column: pa.Array) -> pa.Array:
    kind = column.type
    plain = column.view(pa.timestamp(kind.unit))  # if the type has a zone: the time in UTC
    second = _UNITS[kind.unit]

    def write(part: pa.Array) -> pa.Array:
        texts = pc.replace_substring(part.cast(pa.string()), " ", "T", max_replacements=1)
        return pc.binary_join_element_wise(texts, "", "Z" if kind.tz is not None else "")

    return _temporal(plain, YEAR_1_S * second, YEAR_10000_S * second, write)


def _dates(column: pa.Array) -> pa.Array:
    day = 1 if types.is_date32(column.type) else DAY_S * 1000
    return _temporal(column, YEAR_1_S // DAY_S * day, YEAR_10000_S // DAY_S * day, lambda part: part.cast(pa.string()))


def _times(column: pa.Array) -> pa.Array:
    return _in_quotes(column.cast(pa.string()))


def _temporal(column: pa.Array, low: int, high: int, write: Callable[[pa.Array], pa.Array]) -> pa.Array:
    """Write values from `low` up to `high`, without it, by `write`, and others as integers."""
    numbers = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    least, most = (each.as_py() for each in pc.min_max(numbers).values())
    if least is None or (least >= low and most < high):
        return _in_quotes(write(column))
    # The bounds may be out of the range of the type: nanoseconds do not reach the year 9999.
    inside = pc.and_(
        pc.greater_equal(numbers, pa.scalar(max(low, least), numbers.type)),
        pc.less_equal(numbers, pa.scalar(min(high - 1, most), numbers.type)),
    )
    kept = pc.if_else(inside, numbers, pa.scalar(0, numbers.type)).view(column.type)
    return pc.fill_null(pc.if_else(inside, _in_quotes(write(kept)), numbers.cast(pa.string())), _NULL)


def _durations(column: pa.Array) -> pa.Array:
    return pc.fill_null(column.view(pa.int64()).cast(pa.string()), _NULL)


_INTERVAL = np.dtype([("months", np.int32), ("days", np.int32), ("nanoseconds", np.int64)])


def _intervals(column: pa.Array) -> pa.Array:
    found = np.frombuffer(column.buffers()[1], _INTERVAL, len(column), column.offset * _INTERVAL.itemsize)
    parts: list[Any] = ["["]
    for at, name in enumerate(_INTERVAL.names or ()):
        parts += [", " if at else "", pa.array(np.ascontiguousarray(found[name])).cast(pa.string())]
    return _or_null(column, pc.binary_join_element_wise(*parts, "]", ""))


def _lists(column: pa.Array) -> pa.Array:
    lengths: Any = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    return _brackets(column, lengths, texts_of(column.flatten()))


def _brackets(column: pa.Array, lengths: Any, texts: pa.Array) -> pa.Array:
    """Return JSON lists of `texts`, which are the elements of the lists of `column`, in order."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    inner = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), texts), ", ")
    return _or_null(column, pc.binary_join_element_wise("[", inner, "]", ""))


def _maps(column: pa.Array) -> pa.Array:
    offsets = np.frombuffer(column.buffers()[1], np.int32, len(column) + 1, column.offset * 4)
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    lengths: Any = np.diff(offsets)
    texts = pairs(texts_of(column.keys.slice(first, count)), texts_of(column.items.slice(first, count)))
    if column.null_count:  # a null map may have invisible entries
        valid = np.asarray(column.is_valid())
        texts = texts.filter(pa.array(np.repeat(valid, lengths)))
        return _brackets(column, lengths * valid, texts)
    return _brackets(column, lengths, texts)


def pairs(one: pa.Array, other: pa.Array) -> pa.Array:
    """Return JSON lists of two values, from their texts."""
    return pc.binary_join_element_wise("[", one, ", ", other, "]", "")


def has_names_twice(kind: pa.DataType) -> bool:
    """Return whether a struct has two fields of the same name, which a JSON object cannot hold."""
    names = [kind.field(at).name for at in range(kind.num_fields)]
    return len(set(names)) < len(names)


def _structs(column: pa.Array) -> pa.Array:
    kind = column.type
    texts = [texts_of(column.field(at)) for at in range(kind.num_fields)]
    if not has_names_twice(kind):
        names = [kind.field(at).name for at in range(kind.num_fields)]
        return _or_null(column, objects(names, texts, len(column)))
    parts: list[Any] = []
    for at, each in enumerate(texts):
        parts += [", " if at else "[", each]
    return _or_null(column, pc.binary_join_element_wise(*parts, "]", ""))


def _unions(column: pa.Array) -> pa.Array:
    # Not by `type_codes` and `offsets`: for a slice, they are those of the whole array.
    buffers, count, first = column.buffers(), len(column), column.offset
    codes = np.frombuffer(buffers[1], np.int8, count, first)
    found = np.empty(count, object)
    for number, code in enumerate(column.type.type_codes):
        own = np.flatnonzero(codes == code)
        if not len(own):
            continue
        places: Any = own
        if column.type.mode == "dense":
            places = np.frombuffer(buffers[2], np.int32, count, first * 4)[own]
        texts = texts_of(column.field(number)).take(pa.array(places))
        found[own] = [f"[{code}, {text}]" for text in texts.to_pylist()]
    return pa.array(found, pa.string())


def _runs(column: pa.Array) -> pa.Array:
    at = np.arange(column.offset, column.offset + len(column))
    return texts_of(column.values).take(pa.array(np.searchsorted(np.asarray(column.run_ends), at, side="right")))


def _dictionaries(column: pa.Array) -> pa.Array:
    return pc.fill_null(texts_of(column.dictionary).take(column.indices), _NULL)


def is_text(kind: pa.DataType) -> bool:
    """Return whether values are text."""
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Return whether values are bytes."""
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether values are lists of any kind."""
    return bool(
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


_WRITERS: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]]] = [
    (types.is_null, _nulls),
    (types.is_floating, _floats),
    (types.is_decimal, _decimals),
    (is_text, _strings),
    (is_bytes, _bytes),
    (types.is_timestamp, _timestamps),
    (types.is_date, _dates),
    (types.is_time, _times),
    (types.is_duration, _durations),
    (types.is_interval, _intervals),
    (types.is_map, _maps),
    (is_list, _lists),
    (types.is_struct, _structs),
    (types.is_union, _unions),
    (types.is_run_end_encoded, _runs),
    (types.is_dictionary, _dictionaries),
]
"""Writers by type; the first that fits counts. Arrow itself writes booleans and integers."""
