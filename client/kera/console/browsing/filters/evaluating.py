"""Decides whether a record fits a filter expression.

Missing fields are null. Values of different types are never equal and have no order: ``==``, ``<``, ``<=``, ``>`` and
``>=`` of them are false, and ``!=`` is true. All numbers have one type; true and false are not numbers. Lists and
objects are equal to nothing. A field or a function that is used as a condition holds unless it is null or false.
"""

from __future__ import annotations

import datetime
import operator
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Protocol

from kera.console.browsing.filters.parsing import Call, Compare, Every, Field, In, Literal, Node, Not, Some

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TIMES = (datetime.datetime, datetime.date, datetime.time)
_NUMBER, _TEXT, _TRUTH, _NULL = "number", "text", "truth", "null"


class Subject(Protocol):
    """A record for expressions."""

    @property
    def value(self) -> Any:
        """The decoded value."""
        ...

    @property
    def keys(self) -> Sequence[Any]:
        """The decoded keys; the first one is ``key``."""
        ...

    @property
    def headers(self) -> Mapping[str, Any]:
        """The headers, with one value per name."""
        ...

    @property
    def streamlet(self) -> int:
        """The number of the streamlet in the stream."""
        ...

    @property
    def entry(self) -> int:
        """The number of the entry in the streamlet."""
        ...

    @property
    def offset(self) -> int:
        """The ordinal of the record in its entry."""
        ...

    @property
    def time_us(self) -> int:
        """The record's time in microseconds since the epoch."""
        ...


def fits(tree: Node, subject: Subject) -> bool:
    """Return whether a record fits. It never raises, whatever the record has."""
    return _holds(_evaluated(tree, subject))


def _holds(value: Any) -> bool:
    return value is not None and value is not False


def _evaluated(node: Node, subject: Subject) -> Any:  # noqa: PLR0911 - a kind of node each
    match node:
        case Literal(value):
            return value
        case Field(root, path):
            return _at(_root(root, subject), path)
        case Call(function, arguments):
            return _FUNCTIONS[function](*(_evaluated(each, subject) for each in arguments))
        case Compare(sign, left, right):
            return _compared(sign, _evaluated(left, subject), _evaluated(right, subject))
        case In(operand, among):
            found = _evaluated(operand, subject)
            return any(_equal(found, each.value) for each in among)
        case Not(condition):
            return not _holds(_evaluated(condition, subject))
        case Every(conditions):
            return all(_holds(_evaluated(each, subject)) for each in conditions)
        case Some(conditions):
            return any(_holds(_evaluated(each, subject)) for each in conditions)


def _root(name: str, subject: Subject) -> Any:
    match name:
        case "key":
            return subject.keys[0] if subject.keys else None
        case "time":
            return subject.time_us
    return getattr(subject, name)


def _at(value: Any, path: Sequence[str | int]) -> Any:
    """Return a field of a value; null if it is missing."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, Mapping) else None
        else:
            value = value[step] if isinstance(value, list | tuple) and step < len(value) else None
    return _simple(value)


def _simple(value: Any) -> Any:
    """Convert a value into one of the types of expressions. Times become text, in the form of their display."""
    match value:
        case None | bool() | int() | float() | str() | list() | tuple() | Mapping():
            return value
        case bytes():
            return value.decode(errors="replace")
        case Decimal():
            return value if value.is_finite() else float("nan")
    return value.isoformat() if isinstance(value, _TIMES) else str(value)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return _NULL
        case bool():
            return _TRUTH
        case int() | float() | Decimal():
            return _NUMBER
        case str():
            return _TEXT
    return ""


def _equal(one: Any, other: Any) -> bool:
    kind = _type_of(one)
    return kind != "" and kind == _type_of(other) and bool(one == other)


def _compared(sign: str, left: Any, right: Any) -> bool:
    if sign == "==":
        return _equal(left, right)
    if sign == "!=":
        return not _equal(left, right)
    kind = _type_of(left)
    return kind in {_NUMBER, _TEXT} and kind == _type_of(right) and _ORDER[sign](left, right)


def _contains(whole: Any, part: Any) -> bool:
    """Return whether `part` is text within text, an element of a list, or a name of an object."""
    if isinstance(whole, str):
        return isinstance(part, str) and part in whole
    if isinstance(whole, list | tuple):
        return any(_equal(_simple(each), part) for each in whole)
    return isinstance(whole, Mapping) and isinstance(part, str) and part in whole


def _of_texts(test: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    return lambda one, other: isinstance(one, str) and isinstance(other, str) and test(one, other)


def _lower(text: Any) -> str | None:
    return text.casefold() if isinstance(text, str) else None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, str | list | tuple | Mapping) else None


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "contains": _contains,
    "starts_with": _of_texts(str.startswith),
    "ends_with": _of_texts(str.endswith),
    "lower": _lower,
    "length": _length,
}
