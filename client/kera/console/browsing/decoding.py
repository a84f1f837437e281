"""The display of values: documents with a layout, text unchanged, anything else in hexadecimal. Pure.

Whatever a record has, the result is text of bounded length, without characters that change how surrounding text reads.
It is not HTML: templates escape it.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

from kera.client.json_form import laid_out
from kera.console.browsing.row_json import bare

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_HEX_ROW = 16
_TIMES = (datetime.datetime, datetime.date, datetime.time)
TAKEN_APART_BYTES_MAX = 1 << 20
_TAKEN_APART = 32
"""A value longer than `TAKEN_APART_BYTES_MAX`, or than this multiple of the shown length, is shown as text, because
decoding it would delay all other requests."""
_BEGINS_JSON = (b"{", b"[")


class Shown(NamedTuple):
    """A value in a form for people."""

    kind: str
    """``null``, ``empty``, ``text``, ``hex``, or the format of a document."""
    text: str
    size_bytes: int
    """Size of the value itself."""
    cut: bool = False
    """Whether only the begin of the value is shown."""
    problem: str = ""
    """Why the value is not shown in the chosen format."""


def shown(value: bytes | None, length_max: int) -> Shown:
    """Show a value in at most `length_max` characters."""
    if value is None:
        return Shown("null", "", 0)
    if not value:
        return Shown("empty", "", 0)
    if value[:64].lstrip()[:1] in _BEGINS_JSON and is_taken_apart(value, length_max):
        document = shown_json(value, "json", len(value), length_max)
        if document is not None:
            return document
    # A character has at most four bytes, so later bytes than these cannot be shown.
    part = value[: 4 * length_max + 4]
    text = _text(part, whole=len(part) == len(value))
    if text is not None:
        return _cut("text", _plain(text), len(value), length_max, more=len(part) < len(value))
    return shown_hex(value, length_max)


def shown_json(value: bytes, kind: str, size_bytes: int, length_max: int) -> Shown | None:
    """Show JSON with a line per member, and numbers as they are written; None: it is not JSON."""
    try:
        text = laid_out(value.decode(), length_max=length_max)
    except UnicodeDecodeError:
        return None
    return None if text is None else _cut(kind, _plain(text), size_bytes, length_max)


def shown_text(value: bytes, length_max: int) -> Shown:
    """Show any value as text: each byte that is not UTF-8 becomes a replacement character."""
    part = value[: 4 * length_max + 4]
    text = part.decode(errors="replace")
    return _cut("text", _plain(text), len(value), length_max, more=len(part) < len(value))


def shown_hex(value: bytes, length_max: int) -> Shown:
    """Show any value in hexadecimal: rows of offset, bytes and letters."""
    rows = max(1, length_max // 80)
    dump = "\n".join(_hex_row(value, at) for at in range(0, min(len(value), rows * _HEX_ROW), _HEX_ROW))
    return Shown("hex", dump, len(value), cut=len(value) > rows * _HEX_ROW)


def is_taken_apart(value: bytes, length_max: int) -> bool:
    """Return whether to decode a value of which `length_max` characters are shown."""
    return len(value) <= min(TAKEN_APART_BYTES_MAX, _TAKEN_APART * max(length_max, 100))


def shown_columns(row: str, length_max: int) -> Shown:
    """Show a row of a typed stream, given its JSON."""
    text = laid_out(row, length_max=length_max) or row
    return _cut("json", _plain(text), len(text), length_max)


def shown_document(document: Any, kind: str, size_bytes: int, length_max: int) -> Shown:
    """Show the document decoded from a value of `size_bytes`. Raises `ValueError` and `RecursionError`."""
    text = json.dumps(jsonable(document, _room(length_max)), ensure_ascii=False, indent=2)
    text.encode()  # raises for lone surrogates, which cannot be sent
    return _cut(kind, _plain(text), size_bytes, length_max)


def shown_cell(cell: str, length_max: int) -> Shown:
    """Show a value of a column, given its JSON."""
    if cell == "null":
        return Shown("null", "", 0)
    text = bare(cell)
    return _cut("text", _plain(text), len(text), length_max) if text else Shown("empty", "", 0)


def brief(value: bytes | None, length_max: int = 120) -> str:
    """Show a key, or the value of a header, in one line."""
    if value is None:
        return "null"
    text = _text(value[: 4 * length_max + 4], whole=len(value) <= 4 * length_max + 4)
    line = value[:length_max].hex(" ") if text is None else _plain(text).replace("\n", "⏎").replace("\r", "")
    return line if len(line) <= length_max else line[:length_max] + "…"


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _room(length_max: int) -> Iterator[None]:
    """Return an iterator that allows `length_max` + 1 parts of a value.

    Each part takes at least one character, and a few bytes may have very many parts.
    """
    return repeat(None, length_max + 1)


def jsonable(value: Any, room: Iterator[None] | None = None) -> Any:
    """Convert an Arrow value into types of JSON; if it has more parts than `room` allows, keep the first ones."""
    room = repeat(None) if room is None else room
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else _NAMES.get(str(value), str(value))
        case bytes():
            text = text_of(value)
            return {"base64": base64.b64encode(value).decode()} if text is None else text
        case dict():
            return {str(name): jsonable(each, room) for _, (name, each) in zip(room, value.items(), strict=False)}
        case list() | tuple():
            return [jsonable(each, room) for _, each in zip(room, value, strict=False)]
    return value.isoformat() if isinstance(value, _TIMES) else str(value)


def plain(text: str) -> str:
    """Return foreign text without characters that would change how surrounding text reads."""
    return _plain(text)


def text_of(value: bytes) -> str | None:
    """Return a whole value as text; None if it is not UTF-8, or has characters that text does not have."""
    return _text(value, whole=True)


def _text(value: bytes, *, whole: bool) -> str | None:
    """Do what `text_of` does, also for the begin of a value: a character that is cut off at its end is left out."""
    try:
        text = value.decode()
    except UnicodeDecodeError as error:
        if whole or error.start < len(value) - 3:
            return None
        text = value[: error.start].decode()
    if "\x00" in text:
        return None
    strange = sum(1 for _ in _CONTROL.finditer(text))
    return None if strange * 10 > len(text) else text


def _plain(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _cut(kind: str, text: str, size_bytes: int, length_max: int, *, more: bool = False) -> Shown:
    return Shown(kind, text[:length_max], size_bytes, cut=more or len(text) > length_max)


def _hex_row(value: bytes, at: int) -> str:
    row = value[at : at + _HEX_ROW]
    letters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
    return f"{at:06x}  {row.hex(' '):<{3 * _HEX_ROW - 1}}  {letters}"
