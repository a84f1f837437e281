"""Numbers as they stand in a row: short, and told apart at a glance. Pure."""

from __future__ import annotations

import datetime

from kera.cli._latency_text import in_ms
from kera.core.base.sizes import format_size
from kera.core.base.spans import format_ms

NOBODY_KNOWS = "-"


def count_text(value: float | None) -> str:
    """A number of records for people: ``987``, ``12.3k``, ``4.5M``."""
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
    """A number of bytes likewise."""
    return NOBODY_KNOWS if value is None else format_size(round(value))


def ms_text(value: float | None) -> str:
    """A span of milliseconds, which are few."""
    if value is None:
        return NOBODY_KNOWS
    return f"{value:.3g} ms" if value < 1000 else format_ms(round(value))


def us_text(value: float | None) -> str:
    """A span of microseconds, which may be many."""
    return NOBODY_KNOWS if value is None else in_ms(value)


def part_text(value: float | None) -> str:
    """A part of 1."""
    return NOBODY_KNOWS if value is None else f"{value:.0%}"


def per_s(text: str) -> str:
    """The text of a figure as a rate."""
    return text if text == NOBODY_KNOWS else f"{text}/s"


def time_of_day(time_us: int) -> str:
    """Hours, minutes and seconds, as they are here."""
    return datetime.datetime.fromtimestamp(time_us / 1e6).astimezone().strftime("%H:%M:%S")
