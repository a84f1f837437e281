"""Parses JSON of any kind from untrusted senders: it must be unambiguous, and not nested too deeply for its readers."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from kera.core.base.strict_json import shown, unique_names
from kera.core.errors import InvalidSchema

DEPTH_MAX = 64
"""Maximum depth of nested objects and lists."""
_MARKS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)


def parsed_json(text: str, what: str) -> Any:
    """Return the value of `text`; messages call it `what`. Raises `InvalidSchema`."""
    check_depth(text, what)
    try:
        return json.loads(text, object_pairs_hook=unique_names, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise InvalidSchema(f"{what} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise InvalidSchema(f"{what} is not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        raise InvalidSchema(f"{what} is not JSON: {error}") from None


def check_depth(text: str, what: str) -> None:
    """Check the depth of nesting, before a recursive function reads the text. Raises `InvalidSchema`."""
    depth = 0
    for mark in _MARKS.finditer(text):
        match text[mark.start()]:
            case "[" | "{":
                depth += 1
                if depth > DEPTH_MAX:
                    raise InvalidSchema(f"{what} is nested deeper than {DEPTH_MAX} levels", limit=DEPTH_MAX)
            case "]" | "}":
                depth -= 1
            case _:
                pass


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is not a number that can be kept")
    return value
