"""Spans of time as people write and read them: ``7d``, ``1.5 h``, ``30min``, ``120 ms``."""

from __future__ import annotations

import re

UNITS = "ms, s, min (or m), h, d or w"
"""For messages."""
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 7 * 86_400_000}
_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-z]+)")


def span_ms(text: str) -> float | None:
    """Return the milliseconds in `text`, a number with one of `UNITS`, possibly less than one; None: not a span."""
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or found[2] not in _UNITS_MS:
        return None
    return float(found[1]) * _UNITS_MS[found[2]]


def exact_span(milliseconds: int) -> str:
    """`milliseconds` with the largest unit that divides them, so that `span_ms` gives the same number again."""
    for unit in ("d", "h", "min", "s"):
        if milliseconds and not milliseconds % _UNITS_MS[unit]:
            return f"{milliseconds // _UNITS_MS[unit]} {unit}"
    return f"{milliseconds} ms"


def format_span(seconds: float) -> str:
    """A span of time for people: ``120 ms``, ``4.5 s``, ``3 min``, ``2.5 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds >= 100 * 86_400:
        return f"{seconds / 86_400:.0f} d"
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_ms(milliseconds: float) -> str:
    """Return a span of milliseconds as `format_span` writes it."""
    return format_span(milliseconds / 1000)
