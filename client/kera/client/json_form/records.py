"""Records of streams without their own columns as JSON: the form that ``kera consume --json`` prints.

    {"timestamp": "2026-01-31T12:00:00.000000Z", "key": "k", "value": "v", "headers": [["name", "value"]]}

Bytes are written as text if they are UTF-8. Other values and keys have a field ``value_base64`` or ``key_base64``
instead, because a value may be any JSON, also an object with a field ``base64``. Within ``keys`` and ``headers`` such
bytes are ``{"base64": "…"}``. A record with several keys, or with a null or no key in its list, has ``keys``; a record
without a list of keys has neither.

Reading accepts more: a value, a key or a header that is not text is stored as its JSON, byte for byte; headers may be
an object; a record without a time gets the present time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.client.json_form.building import array_of
from kera.client.json_form.leaves import Misfit, bytes_of, from_base64, is_base64
from kera.client.json_form.reading import lines_of, wrong_line
from kera.client.json_form.texts import cut, decoded, elements_of, members_of, parsed_line, shown
from kera.client.json_form.writing import ROWS_MAX, joined_lines, texts_of
from kera.core.format.schema import DEFAULT_SCHEMA

FIELDS = {"key", "keys", "key_base64", "value", "value_base64", "headers", "timestamp"}
PLACE_FIELDS = {"stream", "streamlet", "entry", "offset"}
"""Fields that ``kera consume --json`` adds; reading ignores them, so that a line can be stored in another place."""
_BASE64 = '{"base64": '

# -- writing ---------------------------------------------------------------------------------------------------------


def record_lines(batch: pa.RecordBatch, places: Callable[[int, int], pa.Array] | None = None) -> bytes:
    """Return a line with a JSON object for each record.

    `places` takes the index of a record and a number of records, and returns texts of the first members of each.
    """
    parts = []
    for at in range(0, batch.num_rows, ROWS_MAX):
        part = batch.slice(at, ROWS_MAX)
        first = "" if places is None else pc.binary_join_element_wise(places(at, part.num_rows), ", ", "")
        parts.append(joined_lines(_objects(part, first)))
    return b"".join(parts)


def _objects(batch: pa.RecordBatch, first: Any) -> pa.Array:
    times = texts_of(batch.column("timestamp"))
    keys, value, headers = _keys(batch.column("keys")), _bytes("value", batch.column("value")), batch.column("headers")
    more = ""
    if headers.null_count < len(headers):
        given = pc.binary_join_element_wise(', "headers": ', texts_of(headers), "")
        more = pc.if_else(headers.is_valid(), given, "")
    return pc.binary_join_element_wise("{", first, '"timestamp": ', times, keys, value, more, "}", "")


def _bytes(name: str, column: pa.Array) -> pa.Array:
    """Return a member for each record, called `name` if its bytes are text, or else `name` with ``_base64``."""
    texts = texts_of(column)
    found = pc.binary_join_element_wise(f', "{name}": ', texts, "")
    other = pc.starts_with(texts, _BASE64[0])
    if pc.any(other, min_count=0).as_py():
        inner = pc.utf8_slice_codeunits(texts, len(_BASE64), -1)
        found = pc.if_else(other, pc.binary_join_element_wise(f', "{name}_base64": ', inner, ""), found)
    return found


def _keys(keys: pa.Array) -> Any:
    if keys.null_count == len(keys):
        return ""
    lengths = np.asarray(pc.fill_null(pc.list_value_length(keys), 0))
    begins = np.cumsum(lengths) - lengths
    inner = keys.flatten()
    firsts = inner.take(pa.array(begins, mask=lengths == 0))
    one = np.asarray(firsts.is_valid()) & (lengths == 1)
    found = _bytes("key", firsts)
    if not one.all():
        lists = pc.binary_join_element_wise(', "keys": ', texts_of(keys), "")
        found = pc.if_else(pa.array(one), found, pc.if_else(keys.is_valid(), lists, ""))
    return found


# -- reading ---------------------------------------------------------------------------------------------------------


def records_of_lines(block: bytes, first_line: int = 1) -> pa.RecordBatch:
    """Return a record for each JSON object in the lines of `block`; blank lines are left out.

    `first_line` is the number of the first line. Raises `SchemaMismatch`, which names the line.
    """
    now_us = time.time_ns() // 1000
    numbers: list[int] = []
    columns: tuple[list[Any], ...] = ([], [], [], [])
    for number, line in lines_of(block, first_line):
        try:
            record = _record(decoded(line), now_us)
        except ValueError as error:
            raise wrong_line(number, error) from None
        numbers.append(number)
        for column, value in zip(columns, record, strict=True):
            column.append(value)
    times, *others = DEFAULT_SCHEMA.types
    try:
        timestamps = array_of(times, columns[0])
    except Misfit as error:
        raise wrong_line(numbers[error.at], f"timestamp is {error.reason}") from None
    arrays = [pa.array(column, kind) for column, kind in zip(columns[1:], others, strict=True)]
    return pa.RecordBatch.from_arrays([timestamps, *arrays], schema=DEFAULT_SCHEMA)


class _Json(NamedTuple):
    """A value, and the JSON that it was parsed from (empty if it is not needed)."""

    value: Any
    text: str


Headers: TypeAlias = list[tuple[str, bytes | None]]


class _Record(NamedTuple):
    timestamp: Any
    """The parsed JSON of the time."""
    keys: list[bytes | None] | None
    value: bytes | None
    headers: Headers | None


def _record(text: str, now_us: int) -> _Record:
    """Parse one record. Raises `ValueError`."""
    members = _plain_members(text) or _raw_members(text)
    if unknown := members.keys() - FIELDS - PLACE_FIELDS:
        raise ValueError(f"unknown field {cut(min(unknown))!r}; a record has {', '.join(sorted(FIELDS))}")
    given = {name: each for name, each in members.items() if each.value is not None}
    for one, other in _EXCLUSIVE:
        if one in given and other in given:
            raise ValueError(f"{one} and {other} are both given, and a record has one of them")
    time_ = given["timestamp"].value if "timestamp" in given else now_us
    return _Record(time_, _keys_of(given), _member(given, "value"), _headers_of(given.get("headers")))


_EXCLUSIVE = (("value", "value_base64"), ("key", "key_base64"), ("key", "keys"), ("key_base64", "keys"))


def _is_plain(value: Any) -> bool:
    """Return whether the value can be stored without its JSON text."""
    return value is None or type(value) is str or is_base64(value)


def _plain_members(text: str) -> dict[str, _Json] | None:
    """Return the members of a record whose values are all text, like most; None: others, or invalid JSON."""
    try:
        record = parsed_line(text)
    except ValueError:
        return None  # also for a name that repeats within a value, which is valid: the value is stored unchanged
    for name, value in record.items():
        match name, value:
            case "keys", list():
                plain = all(map(_is_plain, value))
            case "headers", list():
                plain = all(type(each) is list and len(each) == 2 and _is_plain(each[1]) for each in value)
            case "headers", dict():
                plain = all(map(_is_plain, value.values()))
            case _:
                plain = value is None or type(value) is str or name not in _ANY_JSON
        if not plain:
            return None
    return {name: _Json(value, "") for name, value in record.items()}


_ANY_JSON = {"key", "value"}


def _raw_members(text: str) -> dict[str, _Json]:
    found: dict[str, _Json] = {}
    for name, own, value in members_of(text):
        if name in found:
            raise ValueError(f"the name {cut(name)!r} comes twice in a record")
        found[name] = _Json(value if name in _ANY_JSON else _number(value), own)
    return found


def _number(value: Any) -> Any:
    """Convert integers: `members_of` leaves all numbers as text."""
    return int(value) if type(value) is not str and isinstance(value, str) and _is_short_integer(value) else value


def _is_short_integer(text: str) -> bool:
    return len(text) < 40 and text.removeprefix("-").isdigit()


def _member(given: dict[str, _Json], name: str) -> bytes | None:
    encoded = given.get(f"{name}_base64")
    if encoded is not None:
        return _named(f"{name}_base64", from_base64, encoded.value)
    own = given.get(name)
    if own is None:
        return None
    return _named(name, bytes_of, own.value) if type(own.value) is str else own.text.encode()


def _named(name: str, convert: Callable[[Any], bytes], value: Any) -> bytes:
    try:
        return convert(value)
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None


def _keys_of(given: dict[str, _Json]) -> list[bytes | None] | None:
    keys = given.get("keys")
    if keys is None:
        key = _member(given, "key")
        return None if key is None else [key]
    if not isinstance(keys.value, list):
        raise ValueError(f"keys is {shown(keys.value)}, not a list")  # noqa: TRY004 - one kind of error, whatever is in a line
    return [_part(f"keys[{at}]", each) for at, each in enumerate(_elements(keys))]


def _part(name: str, own: _Json) -> bytes | None:
    """Return the bytes of a key, or of the value of a header."""
    if own.value is None:
        return None
    return _named(name, bytes_of, own.value) if _is_plain(own.value) else own.text.encode()


def _elements(own: _Json) -> list[_Json]:
    if not own.text:
        return [_Json(value, "") for value in own.value]
    return [_Json(value, text) for text, value in elements_of(own.text)]


def _headers_of(own: _Json | None) -> Headers | None:
    if own is None:
        return None
    return [(name, _part(f"header {cut(name)!r}", value)) for name, value in _header_pairs(own)]


def _header_pairs(own: _Json) -> list[tuple[str, _Json]]:
    found: list[tuple[str, _Json]] = []
    if isinstance(own.value, dict):
        members = members_of(own.text) if own.text else [(name, "", value) for name, value in own.value.items()]
        found = [(name, _Json(value, text)) for name, text, value in members]
    elif isinstance(own.value, list):
        for at, each in enumerate(_elements(own)):
            pair = _elements(each) if isinstance(each.value, list) else []
            if len(pair) != 2 or type(pair[0].value) is not str:
                raise ValueError(f"headers[{at}] is {shown(each.value)}, not a list of a name and a value")
            found.append((pair[0].value, pair[1]))
    else:
        raise ValueError(f"headers is {shown(own.value)}, not a list of names and values")  # noqa: TRY004 - as above
    for name, _ in found:
        _named("the name of a header", bytes_of, name)
    return found
