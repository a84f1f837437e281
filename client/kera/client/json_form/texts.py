"""Parses JSON without changing a number, and lays it out for people without parsing it.

Python's `json` turns numbers into floats, keeps the last of two equal names, and accepts some invalid JSON. Here a
number with a fraction or an exponent keeps its text (`Number`). A repeated name is an error, and so is text that is not
UTF-8 or not JSON; the error names the column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NoReturn

from kera.core.base.strict_json import unique_names

INTEGER_DIGITS_MAX = 100
"""More digits than any type has: the time to parse an integer grows with the square of their number."""
BOM = b"\xef\xbb\xbf"
SHOWN_MAX = 60
"""Maximum number of characters of a value in a message."""


class Number(str):
    """The text of a number with a fraction or an exponent, or with very many digits."""

    __slots__ = ()


class Symbol(str):
    """``NaN``, ``Infinity`` or ``-Infinity``: not JSON, but what many programs write."""

    __slots__ = ()


def _integer(text: str) -> int | Number:
    return int(text) if len(text) <= INTEGER_DIGITS_MAX else Number(text)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_exact = json.JSONDecoder(object_pairs_hook=unique_names, parse_float=Number, parse_int=_integer, parse_constant=Symbol)
_raw = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_no_number)
_lenient = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=Symbol)
_SPACE = re.compile(r"[ \t\r\n]*")


def cut(text: str) -> str:
    """Return the beginning of `text` for a message."""
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…"


def decoded(line: bytes) -> str:
    """Decode a line. Raises `ValueError` with the column of a byte that is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode(errors="replace")) + 1
        raise ValueError(f"byte 0x{line[error.start]:02x} in column {column} is not UTF-8") from None


def parsed_line(text: str) -> dict[str, Any]:
    """Parse the object in a line. Raises `ValueError`, with the column of a syntax error."""
    found: Any = _translated(text, _exact.decode)
    if not isinstance(found, dict):
        raise ValueError(_no_object(found))  # noqa: TRY004 - one kind of error, whatever is in a line
    return found


def _no_object(value: Any) -> str:
    return f"this is {shown(value)}, and each line has to be a JSON object"


def _syntax(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text.rstrip()) or "Unterminated string" in error.msg:
        return (
            f"the JSON is not complete at the end of the line (column {len(text.rstrip()) + 1}): each line has to be a"
            " whole JSON object, as jq -c prints them"
        )
    if error.msg == "Extra data":
        return f"more follows behind the JSON object, in column {error.colno}: each object needs a line of its own"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]} in column {error.colno}"


def members_of(text: str) -> list[tuple[str, str, Any]]:
    """Return the members of the object in `text`: name, the JSON text of the value, and the parsed value.

    Within values, names may repeat, and all numbers are `Number`. Raises `ValueError`.
    """
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise ValueError(_no_object(_translated(text, _raw.decode)))
    found: list[tuple[str, str, Any]] = _translated(text, _members)
    return found


def elements_of(text: str) -> list[tuple[str, Any]]:
    """Return the elements of the list in `text`: JSON text and parsed value, like `members_of`."""
    return [(own, value) for _, own, value in _translated(text, _members)]


def _translated(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(_syntax(text, error)) from None


def _members(text: str) -> list[tuple[str, str, Any]]:
    """Return the members of an object, or the elements of a list with empty names."""
    at = _skip(text, 0)
    named = text[at] == "{"
    end = "}" if named else "]"
    found: list[tuple[str, str, Any]] = []
    at = _skip(text, at + 1)
    while text[at : at + 1] != end:
        if found:
            at = _skip(text, _expect(text, at, ",", "',' delimiter"))
        name = ""
        if named:
            begin = _expect(text, at, '"', "property name enclosed in double quotes")
            name, at = scanstring(text, begin, True)  # noqa: FBT003 - it takes no keyword arguments
            at = _skip(text, _expect(text, _skip(text, at), ":", "':' delimiter"))
        value, behind = _raw.raw_decode(text, at)
        found.append((name, text[at:behind], value))
        at = _skip(text, behind)
    at = _skip(text, at + 1)
    if at < len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return found


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _expect(text: str, at: int, sign: str, name: str) -> int:
    if text[at : at + 1] != sign:
        raise json.JSONDecodeError(f"Expecting {name}", text, at)
    return at + 1


def shown(value: Any) -> str:
    """Describe a parsed value for messages."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str) and not isinstance(value, Number | Symbol):
        return f"the text {json.dumps(cut(value), ensure_ascii=False)}"
    return cut(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else json.dumps(value)


_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")|([\[{])|([\]}])|(,)|(:)|([^\s"\[\]{},:]+)|\s+', re.DOTALL)


def laid_out(text: str, *, indent: int = 2, depth_max: int = 20, length_max: int | None = None) -> str | None:
    """Lay out the JSON `text` with a line per member, without changing numbers or names; None: it is not JSON.

    JSON that is nested deeper than `depth_max` is laid out in one line, because it would be mostly spaces. Stops once
    there are more than `length_max` characters.
    """
    try:
        _lenient.decode(text)
    except (ValueError, RecursionError):
        return None
    depth = deepest = 0
    for token in _TOKEN.finditer(text):
        depth += (token[2] is not None) - (token[3] is not None)
        deepest = max(deepest, depth)
    parts: list[str] = []
    length = 0
    for part in _laid_out(text, " " * indent if deepest <= depth_max else None):
        parts.append(part)
        length += len(part)
        if length_max is not None and length > length_max:
            break
    return "".join(parts)


def _laid_out(text: str, indent: str | None) -> Iterator[str]:
    """Yield the parts of the text; `indent` None: all in one line."""
    depth = 0
    opened = False
    for token in _TOKEN.finditer(text):
        _, opens, closes, comma, colon, _ = token.groups()
        if token.lastindex is None:
            continue  # space
        depth -= bool(closes)
        if indent is not None and opened != bool(closes):
            yield "\n" + indent * depth
        opened = bool(opens)
        depth += opened
        yield token[0]
        if comma:
            yield " " if indent is None else "\n" + indent * depth
        elif colon:
            yield " "
