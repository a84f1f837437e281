"""Checks users' arguments in public functions: a wrong kind of value is an `InvalidArgument` that names the parameter.

Without them, Python would take ``True`` for 1, and text in place of a number would fail deep inside some library, with
that library's error.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kera.core.errors import InvalidArgument

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = (1 << 64) - 1
TOLD_CHARS_MAX = 200
"""Maximum length of a value in an error message."""


def whole(parameter: str, value: Any, least: int, most: int, *, what: str = "") -> int:
    """Return `value` as a whole number from `least` to `most`; `what` explains the numbers in the error."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise wrong(parameter, value, f"a whole number from {least} to {most}{what}") from None
    if not least <= number <= most:
        raise wrong(parameter, value, f"a whole number from {least} to {most}{what}")
    return number


def seconds(parameter: str, value: Any) -> float | None:
    """Return `value` as seconds from 0 on, or None to wait for ever."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise wrong(parameter, value, "seconds from 0 on, or None to wait for ever")
    return None if value is None else float(value)


def text(parameter: str, value: Any, what: str = "text") -> str:
    """Return `value` if it is text that UTF-8 can encode."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        what = "text that UTF-8 has"
    raise wrong(parameter, value, what)


def flag(parameter: str, value: Any) -> bool:
    """Return `value` if it is True or False: Python would take many other values as true."""
    if not isinstance(value, bool):
        raise wrong(parameter, value, "True or False")
    return value


def names(parameter: str, value: Any) -> Sequence[str]:
    """Return `value` as a list of names. Refuses a single text: each of its letters would be a name."""
    if isinstance(value, str | bytes):
        raise wrong(parameter, value, f"a list of names, such as [{value!r}]")
    if isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise wrong(parameter, value, "a list of names")
    return [text(parameter, each, "a list of names, which are text") for each in value]


def instance(parameter: str, value: Any, kind: type, what: str) -> Any:
    """Return `value` if it is of `kind`."""
    if not isinstance(value, kind):
        raise wrong(parameter, value, what)
    return value


def all_of(parameter: str, values: Any, container: Any, kind: type, what: str) -> Any:
    """Return `values` if it is a `container` of items of `kind`."""
    if not isinstance(values, container) or not all(isinstance(each, kind) for each in values):
        raise wrong(parameter, values, what)
    return values


def wrong(parameter: str, value: Any, expected: str) -> InvalidArgument:
    """Return the error for a wrong value: it names the parameter, the value, and the expected values."""
    told = _told(value)
    return InvalidArgument(f"{parameter} is {told}, and takes {expected}", field=parameter, value=told)


def _told(value: Any) -> str:
    """Return a short text of a value. Python refuses to write numbers of thousands of digits."""
    try:
        told = repr(value)
    except ValueError:
        return f"a {type(value).__name__} that is too long to be written"
    return told if len(told) <= TOLD_CHARS_MAX else f"{told[:TOLD_CHARS_MAX]}..."
