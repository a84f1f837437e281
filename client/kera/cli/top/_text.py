"""Numbers as text in rows: short, and easy to compare at a glance. Pure."""

from __future__ import annotations

import datetime

from kera.cli._latency_text import in_ms
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms

NOBODY_KNOWS = "-"


def count_text(value: float | None) -> str:
    """Return a number of records for people: ``987``, ``12.3k``, ``4.5M``."""
    if value is None:
        return NOBODY_KNOWS
    sign, size = ("-" if value < 0 else ""), abs(value)
    for unit in ("", "k", "M", "G", "T"):
        if size < 999.95 or unit == "T":
            digits = 0 if not unit and (size >= 10 or size == int(size)) else 1
            return f"{sign}{size:.{digits}f}{unit}"
        size /= 1000
    raise AssertionError  # not reached: the last unit takes everything


def size_text(value: float | None) -> str:
    """Return a number of bytes for people."""
    return NOBODY_KNOWS if value is None else format_size(round(value))


def ms_text(value: float | None) -> str:
    """Return a time in milliseconds for people; below a second with three digits."""
    if value is None:
        return NOBODY_KNOWS
    return f"{value:.3g} ms" if value < 1000 else format_ms(round(value))


def us_text(value: float | None) -> str:
    """Return a time in microseconds for people."""
    return NOBODY_KNOWS if value is None else in_ms(value)


def part_text(value: float | None) -> str:
    """Return a part of 1 as a percentage."""
    return NOBODY_KNOWS if value is None else f"{value:.0%}"


def per_s(text: str) -> str:
    """Return the text of a figure as a rate per second."""
    return text if text == NOBODY_KNOWS else f"{text}/s"


def time_of_day(time_us: int) -> str:
    """Return hours, minutes and seconds in local time."""
    return datetime.datetime.fromtimestamp(time_us / 1e6).astimezone().strftime("%H:%M:%S")
