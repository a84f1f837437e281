"""Finds numbers of CSV that a column would change, at little cost if there are none.

Arrow reads columns of numbers several times as fast as columns of text. So each block of text is scanned first, with a
few operations on all of its bytes (`Scan`). Only a block that may have such a number is checked value by value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kera.client.json_form.leaves import FLOAT_DIGITS, claims_more
from kera.client.json_form.texts import Number

FLOAT_DIGITS_SURE = 15
"""Number of decimal digits that a float64 keeps exactly."""
_INTEGERS_EXACT = {16: 2.0**11, 32: 2.0**24, 64: 2.0**53}
"""Up to this bound, floats with the given number of bits hold all integers."""
_REWRITTEN = r"^\s*([+]|-?0[0-9xX]|-0+\s*$)"
"""The begin of a number whose text would change: leading zeros, a plus sign, hexadecimal, or a negative zero."""
_ZERO, _NINE, _POINT, _PLUS, _MINUS, _EXPONENT = b"09.+-e"
_SEPARATOR_MAX = ord(",")
"""The largest byte that may come before a field: commas, quotes, spaces, ends of lines."""
_GOES_ON = np.isin(np.arange(256), list(b"0123456789xX"))
"""Whether a byte after a zero shows that the number's text would change."""
_PART_BYTES = 1 << 16
_OVERLAP = FLOAT_DIGITS_SURE + 2


class Scan:
    """Checks a block of text for forms of numbers, by its bytes alone."""

    def __init__(self, text: bytes) -> None:
        self._bytes = np.frombuffer(b"\n\n%b\n\n" % text, np.uint8)

    def is_short(self) -> bool:
        """Return whether no number has an exponent, or more than `FLOAT_DIGITS_SURE` digits."""
        return not any(_has_long(part) for part in self._parts())

    def is_plain(self) -> bool:
        """Return whether no field begins like `_REWRITTEN`."""
        return not any(_has_rewritten(part) for part in self._parts())

    def _parts(self) -> Iterator[Any]:
        """Yield parts that fit into the processor's cache. They overlap by the length of the context of a byte."""
        for begin in range(0, len(self._bytes), _PART_BYTES):
            yield self._bytes[begin : begin + _PART_BYTES + _OVERLAP]


def _has_long(part: Any) -> bool:
    digit = (part - np.uint8(_ZERO)) <= _NINE - _ZERO
    within = digit | (part == _POINT)
    if bool((within[:-1] & ((part[1:] | np.uint8(0x20)) == _EXPONENT)).any()):
        return True
    run = FLOAT_DIGITS_SURE + 1
    return _has_run(digit, run) or _has_run(within, run + 1)


def _has_rewritten(part: Any) -> bool:
    first = part[1:-2]
    begins = np.flatnonzero((part[:-3] <= _SEPARATOR_MAX) & ((first == _ZERO) | (first == _PLUS) | (first == _MINUS)))
    first, second, third = part[begins + 1], part[begins + 2], part[begins + 3]
    negative = third[(first == _MINUS) & (second == _ZERO)]
    return bool((first == _PLUS).any() or _GOES_ON[second[first == _ZERO]].any() or (negative != _POINT).any())


def _has_run(flags: Any, length: int) -> bool:
    """Return whether at least `length` successive flags are true."""
    found, have = flags, 1
    while have < length and len(found):
        step = min(have, length - have)
        found = found[step:] & found[:-step]
        have += step
    return bool(found.any())


def holds_short(values: pa.Array) -> bool:
    """Return whether floats surely equal the numbers that they were made from, which satisfy `Scan.is_short`."""
    if not types.is_float32(values.type):
        return bool(types.is_float64(values.type))
    return bool(pc.all(pc.less(pc.abs(values), _INTEGERS_EXACT[32])).as_py() is not False)


def first_changed(texts: pa.Array, values: pa.Array) -> int | None:
    """Return the index of the first of `texts` whose number differs from its float in `values`; None: none differs."""
    kind = values.type
    wide = values.cast(pa.float64())
    lengths = pc.binary_length(texts)
    zeros = _places(pc.and_(pc.equal(wide, 0.0), pc.greater(lengths, 1)))
    tiny = _places(pc.match_substring_regex(texts.take(zeros), "^[^eE]*[1-9]"))
    large = pc.greater_equal(pc.abs(wide), _INTEGERS_EXACT[kind.bit_width])
    odd = _places(pc.and_(pc.or_(large, pc.greater(lengths, FLOAT_DIGITS_SURE + 1)), pc.not_equal(wide, 0.0)))
    found = [zeros[tiny[0].as_py()].as_py()] if len(tiny) else []
    digits = FLOAT_DIGITS_SURE if types.is_float64(kind) else FLOAT_DIGITS
    texts, values = texts.take(odd), values.take(odd)
    for at in _places(pc.not_equal(values.cast(pa.string()), texts)).to_pylist():
        text, number = texts[at].as_py(), values[at].cast(pa.float64()).as_py()
        if any(letter.isalpha() and letter not in "eE" for letter in text):
            continue  # NaN, infinity
        plain = text.removeprefix("+")
        is_integer = plain.removeprefix("-").isdigit() and len(plain) < 400
        if abs(number) == float("inf") or claims_more(int(plain) if is_integer else Number(plain), number, digits):
            found.append(odd[at].as_py())
            break
    return min(found, default=None)


def _places(flags: pa.Array) -> pa.Array:
    return pc.indices_nonzero(pc.fill_null(flags, fill_value=False))


def first_rewritten(texts: pa.Array) -> int | None:
    """Return the index of the first of `texts` that a number would not keep, see `_REWRITTEN`; None: there is none."""
    found = pc.index(pc.match_substring_regex(texts, _REWRITTEN), value=True).as_py()
    return None if found < 0 else int(found)
