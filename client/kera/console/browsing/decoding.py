"""The display of values: documents laid out, text as it is, anything else in hexadecimal. Pure.

Whatever somebody has put into a record, what comes out of here is text of bounded length, without characters that
change how what is around them reads. It is not HTML: templates see to that.
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
"""A value that is longer than that, or so many times as long as what is shown of it, is shown as text: taking it apart
would hold up everybody else."""
_BEGINS_JSON = (b"{", b"[")


class Shown(NamedTuple):
    """A value as people read it."""

    kind: str
    """``null``, ``empty``, ``text``, ``hex``, or the format of a document."""
    text: str
    size_bytes: int
    """Size of the value itself."""
    cut: bool = False
    """There is more of it."""
    problem: str = ""
    """Why it is not shown in the format that was chosen."""


def shown(value: bytes | None, length_max: int) -> Shown:
    """A value in at most `length_max` characters."""
    if value is None:
        return Shown("null", "", 0)
    if not value:
        return Shown("empty", "", 0)
    if value[:64].lstrip()[:1] in _BEGINS_JSON and is_taken_apart(value, length_max):
        document = shown_json(value, "json", len(value), length_max)
        if document is not None:
            return document
    # A character has at most four bytes; bytes behind the last character that is shown need not be looked at.
    part = value[: 4 * length_max + 4]
    text = _text(part, whole=len(part) == len(value))
    if text is not None:
        return _cut("text", _plain(text), len(value), length_max, more=len(part) < len(value))
    return shown_hex(value, length_max)


def shown_json(value: bytes, kind: str, size_bytes: int, length_max: int) -> Shown | None:
    """JSON with a line per member, and every number as it is written; None: it is not JSON."""
    try:
        text = laid_out(value.decode(), length_max=length_max)
    except UnicodeDecodeError:
        return None
    return None if text is None else _cut(kind, _plain(text), size_bytes, length_max)


def shown_text(value: bytes, length_max: int) -> Shown:
    """Any value as text: each byte that is not UTF-8 becomes a replacement character."""
    part = value[: 4 * length_max + 4]
    text = part.decode(errors="replace")
    return _cut("text", _plain(text), len(value), length_max, more=len(part) < len(value))


def shown_hex(value: bytes, length_max: int) -> Shown:
    """Any value in hexadecimal: rows of offset, bytes and letters."""
    rows = max(1, length_max // 80)
    dump = "\n".join(_hex_row(value, at) for at in range(0, min(len(value), rows * _HEX_ROW), _HEX_ROW))
    return Shown("hex", dump, len(value), cut=len(value) > rows * _HEX_ROW)


def is_taken_apart(value: bytes, length_max: int) -> bool:
    """Whether somebody looks into a value of which `length_max` characters are shown."""
    return len(value) <= min(TAKEN_APART_BYTES_MAX, _TAKEN_APART * max(length_max, 100))


def shown_columns(row: str, length_max: int) -> Shown:
    """A row of a typed stream, of its JSON."""
    text = laid_out(row, length_max=length_max) or row
    return _cut("json", _plain(text), len(text), length_max)


def shown_document(document: Any, kind: str, size_bytes: int, length_max: int) -> Shown:
    """The document that a value of `size_bytes` was decoded to. Raises `ValueError` and `RecursionError`."""
    text = json.dumps(jsonable(document, _room(length_max)), ensure_ascii=False, indent=2)
    text.encode()  # it may have halves of characters, which cannot be sent
    return _cut(kind, _plain(text), size_bytes, length_max)


def shown_cell(cell: str, length_max: int) -> Shown:
    """A value of a column, of its JSON."""
    if cell == "null":
        return Shown("null", "", 0)
    text = bare(cell)
    return _cut("text", _plain(text), len(text), length_max) if text else Shown("empty", "", 0)


def brief(value: bytes | None, length_max: int = 120) -> str:
    """A key, or the value of a header, in one line."""
    if value is None:
        return "null"
    text = _text(value[: 4 * length_max + 4], whole=len(value) <= 4 * length_max + 4)
    line = value[:length_max].hex(" ") if text is None else _plain(text).replace("\n", "⏎").replace("\r", "")
    return line if len(line) <= length_max else line[:length_max] + "…"


_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _room(length_max: int) -> Iterator[None]:
    """For so many parts of a value: each takes a character at least, and few bytes may have very many."""
    return repeat(None, length_max + 1)


def jsonable(value: Any, room: Iterator[None] | None = None) -> Any:
    """A value of Arrow's in the types of JSON; of a value with more parts than `room` has, the first ones."""
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
    """Text of others without characters that would change how what is around it reads."""
    return _plain(text)


def text_of(value: bytes) -> str | None:
    """A whole value as text; None if it is not UTF-8, or has characters that text does not have."""
    return _text(value, whole=True)


def _text(value: bytes, *, whole: bool) -> str | None:
    """The same of a value, or of the beginning of one, whose last character may be cut off: that one is left out."""
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
