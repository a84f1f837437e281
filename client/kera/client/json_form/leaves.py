"""Makes arrays of types without parts from parsed JSON: numbers, text, bytes and times.

Each function takes the values of a column, parsed by `texts`, with None for null. A value that the type cannot hold
exactly raises `Misfit`, with its place.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import math
import re
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyarrow import types

from kera.client.json_form.texts import Number, Symbol, shown
from kera.client.json_form.writing import is_bytes, is_text

Values: TypeAlias = Sequence[Any]


class Misfit(Exception):
    """A value is not of its type. Never leaves `kera.client.json_form`."""

    def __init__(self, at: int, reason: str, path: str = "") -> None:
        """`at`: index of the value in the column. `path`: the path from there to the wrong part, as in ``.a[3]``."""
        super().__init__(reason)
        self.at = at
        self.reason = reason
        self.path = path


def _each(kind: pa.DataType, values: Values, convert: Callable[[Any], Any]) -> list[Any]:
    """Convert each value with `convert`, which raises `ValueError` for a value that does not fit. Raises `Misfit`."""
    found = []
    for at, value in enumerate(values):
        try:
            found.append(None if value is None else convert(value))
        except (ValueError, OverflowError, InvalidOperation) as error:
            reason = str(error) if type(error) is ValueError else ""
            raise Misfit(at, reason or f"{shown(value)}, which does not fit {kind}") from None
    return found


def _wrong(value: Any, wanted: str) -> ValueError:
    return ValueError(f"{shown(value)}, not {wanted}")


def _nulls(kind: pa.DataType, values: Values) -> pa.Array:
    for at, value in enumerate(values):
        if value is not None:
            raise Misfit(at, f"{shown(value)}, not null")
    return pa.nulls(len(values), kind)


def _booleans(kind: pa.DataType, values: Values) -> pa.Array:
    def convert(value: Any) -> bool:
        if not isinstance(value, bool):
            raise _wrong(value, "true or false")
        return value

    return pa.array(_each(kind, values, convert), kind)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bounded(kind: pa.DataType, bits: int, *, signed: bool) -> Callable[[Any], int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

    def convert(value: Any) -> int:
        if not _is_integer(value):
            raise _wrong(value, f"an integer ({kind})")
        if not low <= value <= high:
            raise ValueError(f"{shown(value)}, which is out of the range of {kind}")
        return int(value)

    return convert


def _integers(kind: pa.DataType, values: Values) -> pa.Array:
    convert = _bounded(kind, kind.bit_width, signed=types.is_signed_integer(kind))
    return pa.array(_each(kind, values, convert), kind)


FLOAT_DIGITS = 17
"""A number with this many digits identifies one float64; more digits claim more precision than a float has."""
FLOAT64_DIGITS_MAX = 767
"""Maximum number of digits of a float64 that is written out in full."""
_SYMBOLS = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


def _floats(kind: pa.DataType, values: Values) -> pa.Array:
    """Have Arrow read numbers from text: it rounds once, to the nearest value of the type."""

    def convert(value: Any) -> str:
        if isinstance(value, str) and not isinstance(value, Number):
            if value in _SYMBOLS:
                return _SYMBOLS[value]
            raise _wrong(value, "a number")
        if not isinstance(value, Number) and not _is_integer(value):
            raise _wrong(value, "a number")
        return str(value)

    texts = _each(kind, values, convert)
    found = pa.array(texts, pa.string()).cast(kind)
    for at, (value, number) in enumerate(zip(values, found.to_pylist(), strict=True)):
        if value is None or (isinstance(value, str) and not isinstance(value, Number)):
            continue
        if number in (np.inf, -np.inf):
            raise Misfit(at, f"{shown(value)}, which is out of the range of {kind}")
        if claims_more(value, number):
            raise Misfit(at, f"{shown(value)}, which {kind} cannot hold exactly (it would be {number!r})")
    return found


def claims_more(value: int | Number, number: float, digits_max: int = FLOAT_DIGITS) -> bool:
    """Return whether a written number is more precise than its float, so that information would be lost.

    Up to `digits_max` digits may be rounded, because floats are usually written so; integers may not, and no other
    number may become 0.
    """
    if not math.isfinite(number):
        return True
    if isinstance(value, int):
        return int(number) != value
    digits = len(value.lower().partition("e")[0].lstrip("-0.").replace(".", "").rstrip("0"))
    if number == 0:
        return digits > 0
    if digits <= digits_max:
        return False
    if digits > FLOAT64_DIGITS_MAX:
        return True
    return Decimal(f"{number:.{digits - 1}e}") != Decimal(value)


def _decimals(kind: pa.DataType, values: Values) -> pa.Array:
    def convert(value: Any) -> Decimal:
        if not isinstance(value, str | int) or isinstance(value, bool | Symbol):
            raise _wrong(value, f"a number ({kind})")
        if isinstance(value, str) and not _DECIMAL.fullmatch(value):
            raise _wrong(value, f"a number ({kind})")
        sign, digits, exponent = Decimal(value).as_tuple()
        if not any(digits):
            return Decimal(0)
        shift = int(exponent) + kind.scale
        if len(digits) + int(exponent) > kind.precision - kind.scale:
            raise ValueError(f"{shown(value)}, which is out of the range of {kind}")
        if shift < 0 and any(digits[shift:]):
            raise ValueError(f"{shown(value)}, which has more digits than {kind}")
        kept = digits[:shift] if shift < 0 else digits + (0,) * shift
        return Decimal((sign, kept, -kind.scale))

    return pa.array(_each(kind, values, convert), kind)


_DECIMAL = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def _strings(kind: pa.DataType, values: Values) -> pa.Array:
    return pa.array(_each(kind, values, _string), kind)


def _string(value: Any) -> str:
    if not isinstance(value, str) or isinstance(value, Number | Symbol):
        raise _wrong(value, "text")
    _encoded(value)
    return value


def _encoded(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError("text with one half of a surrogate pair, which is not Unicode") from None


def _binary(kind: pa.DataType, values: Values) -> pa.Array:
    width = kind.byte_width if types.is_fixed_size_binary(kind) else None

    def convert(value: Any) -> bytes:
        found = bytes_of(value)
        if width is not None and len(found) != width:
            raise ValueError(f"{len(found)} bytes, and {kind} has {width}")
        return found

    return pa.array(_each(kind, values, convert), kind)


def bytes_of(value: Any) -> bytes:
    """Return the bytes of a text, or of an object with the single member ``base64``. Raises `ValueError`."""
    if is_base64(value):
        return from_base64(value["base64"])
    if not isinstance(value, str) or isinstance(value, Number | Symbol):
        raise _wrong(value, 'text or {"base64": "…"}')
    return _encoded(value)


def is_base64(value: Any) -> bool:
    """Return whether a value is an object with the single member ``base64``."""
    return isinstance(value, dict) and value.keys() == {"base64"}


def from_base64(value: Any) -> bytes:
    """Decode base64. Raises `ValueError`."""
    if not isinstance(value, str) or isinstance(value, Number | Symbol):
        raise _wrong(value, "base64 in a string")
    try:
        return base64.b64decode(value.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"{shown(value)}, which is not base64 ({str(error).lower()})") from None


def uuids(kind: pa.DataType, values: Values) -> pa.Array:
    """Make UUIDs from their usual text, or from the forms of other bytes. Raises `Misfit`."""

    def convert(value: Any) -> Any:
        if isinstance(value, str) and len(value) == 36:
            return {"base64": base64.b64encode(uuid.UUID(value).bytes).decode()}
        return value

    return _binary(kind, _each(kind, values, convert))


# -- times -----------------------------------------------------------------------------------------------------------

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DATE = r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
_CLOCK = r"([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:[.,]([0-9]+))?)?"
_TIMESTAMP = re.compile(rf"{_DATE}(?:[T ]{_CLOCK})?\s*(Z|z|[-+][0-9]{{2}}(?::?[0-9]{{2}})?)?")
_ONLY_DATE = re.compile(_DATE)
_ONLY_CLOCK = re.compile(_CLOCK)
_TIMEDELTA = re.compile(r"(?:(-?[0-9]+) days?, )?([0-9]+):([0-9]{2}):([0-9]{2})(?:\.([0-9]{6}))?")
_EPOCH = datetime.date(1970, 1, 1).toordinal()


def _numbers(
    kind: pa.DataType,
    values: Values,
    from_text: Callable[[str], int],
    fits: Callable[[int], bool] = lambda _: True,
) -> pa.Array:
    """Make times from text, or from integers in the unit of the type. `fits`: whether the type has such a value."""
    convert = _bounded(kind, kind.bit_width, signed=True)
    integers = pa.int32() if kind.bit_width == 32 else pa.int64()

    def number(value: Any) -> int:
        is_text = isinstance(value, str) and not isinstance(value, Number | Symbol)
        if not is_text and not _is_integer(value):
            raise _wrong(value, f"a {kind}")
        found = from_text(value) if is_text else value
        if not fits(found):
            raise ValueError(f"{shown(value)}, which is not a {kind}")
        try:
            return convert(found)
        except ValueError:
            raise ValueError(f"{shown(value)}, which is out of the range of {kind}") from None

    return pa.array(_each(kind, values, number), integers).view(kind)


def _per_second(kind: pa.DataType) -> int:
    digits: int = _DIGITS[kind.unit]
    return int(10**digits)


def _fraction(digits: str | None, kind: pa.DataType, value: str) -> int:
    wanted = _DIGITS[kind.unit]
    digits = digits or ""
    if digits[wanted:].strip("0"):
        raise ValueError(f"{shown(value)}, which has more digits than {kind}")
    return int(digits[:wanted].ljust(wanted, "0") or 0)


def _clock(hours: str | None, minutes: str | None, seconds: str | None, value: str) -> int:
    h, m, s = int(hours or 0), int(minutes or 0), int(seconds or 0)
    if h > 23 or m > 59 or s > 59:
        raise ValueError(f"{shown(value)}, which is not a time of day")
    return h * 3600 + m * 60 + s


def _day(match: re.Match[str], value: str) -> int:
    try:
        return datetime.date(int(match[1]), int(match[2]), int(match[3])).toordinal() - _EPOCH
    except ValueError as error:
        raise ValueError(f"{shown(value)}, which is not a date ({error})") from None


def _timestamps(kind: pa.DataType, values: Values) -> pa.Array:
    def from_text(value: str) -> int:
        match = _TIMESTAMP.fullmatch(value)
        if match is None:
            raise _wrong(value, "a time as in 2026-01-31T12:00:00Z")
        seconds = _day(match, value) * 86_400 + _clock(match[4], match[5], match[6], value)
        zone = match[8]
        if zone is not None and zone not in "Zz":
            offset = int(zone[1:3]) * 3600 + int(zone[-2:] if len(zone) > 3 else 0) * 60
            seconds -= offset if zone[0] == "+" else -offset
        return seconds * _per_second(kind) + _fraction(match[7], kind, value)

    return _numbers(kind, values, from_text)


def _dates(kind: pa.DataType, values: Values) -> pa.Array:
    unit = 1 if types.is_date32(kind) else 86_400_000

    def from_text(value: str) -> int:
        match = _ONLY_DATE.fullmatch(value)
        if match is None:
            raise _wrong(value, "a date as in 2026-01-31")
        return _day(match, value) * unit

    return _numbers(kind, values, from_text, lambda number: number % unit == 0)


def _times(kind: pa.DataType, values: Values) -> pa.Array:
    def from_text(value: str) -> int:
        match = _ONLY_CLOCK.fullmatch(value)
        if match is None:
            raise _wrong(value, "a time of day as in 12:30:00")
        seconds = _clock(match[1], match[2], match[3], value)
        return seconds * _per_second(kind) + _fraction(match[4], kind, value)

    day = 86_400 * _per_second(kind)
    return _numbers(kind, values, from_text, lambda number: 0 <= number < day)


def _durations(kind: pa.DataType, values: Values) -> pa.Array:
    """Make durations from integers, or from the text of Python's `timedelta`, which earlier versions wrote."""

    def from_text(value: str) -> int:
        match = _TIMEDELTA.fullmatch(value)
        if match is None:
            raise _wrong(value, f"an integer ({kind})")
        seconds = int(match[1] or 0) * 86_400 + int(match[2]) * 3600 + int(match[3]) * 60 + int(match[4])
        return seconds * _per_second(kind) + _fraction(match[5], kind, value)

    return _numbers(kind, values, from_text)


def _intervals(kind: pa.DataType, values: Values) -> pa.Array:
    small, large = (_bounded(each, each.bit_width, signed=True) for each in (pa.int32(), pa.int64()))

    def convert(value: Any) -> tuple[int, int, int]:
        if not isinstance(value, list) or len(value) != 3:
            raise _wrong(value, "a list of months, days and nanoseconds")
        return small(value[0]), small(value[1]), large(value[2])

    return pa.array(_each(kind, values, convert), kind)


Build: TypeAlias = Callable[[pa.DataType, Values], pa.Array]
"""Makes the array of a type from values. Raises `Misfit`."""
LEAVES: list[tuple[Callable[[pa.DataType], bool], Build]] = [
    (types.is_null, _nulls),
    (types.is_boolean, _booleans),
    (types.is_integer, _integers),
    (types.is_floating, _floats),
    (types.is_decimal, _decimals),
    (is_text, _strings),
    (is_bytes, _binary),
    (types.is_timestamp, _timestamps),
    (types.is_date, _dates),
    (types.is_time, _times),
    (types.is_duration, _durations),
    (types.is_interval, _intervals),
]
"""Builders of the types without parts; the first that fits counts."""
