"""Numbers and times in a form for people. Pure."""

from __future__ import annotations

import datetime

from kera.core.base.spans import format_span

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def number(value: int) -> str:
    """Format a number like ``12 345``, with non-breaking spaces."""
    return f"{value:,}".replace(",", "\u202f")


def microseconds(value: float) -> str:
    """Format a span of microseconds, even a short one: ``0.12 ms``, ``4.2 ms``."""
    if not value or value >= 10_000:
        return format_span(value / 1e6)
    return f"{value / 1000:.1f} ms" if value >= 1_000 else f"{value / 1000:.2f} ms"


def moment(time_us: int | None) -> str:
    """Format microseconds since the epoch as a time of UTC, or as a number if it is out of range."""
    if time_us is None:
        return "–"
    try:
        when = _EPOCH + datetime.timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} µs"
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{when.microsecond // 1000:03d}"


def second(time_us: int | None) -> str:
    """Format microseconds since the epoch as a time of UTC, without fractions of a second."""
    return moment(time_us).partition(".")[0]


def iso(time_us: int | None) -> str:
    """Format microseconds since the epoch as ISO 8601, for programs; empty if it is out of range."""
    if time_us is None:
        return ""
    try:
        return (_EPOCH + datetime.timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return ""


def parse_moment(text: str) -> int:
    """Parse an ISO 8601 time, in UTC by default, into microseconds since the epoch. Raises `ValueError`."""
    when = datetime.datetime.fromisoformat(text.strip())
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    try:
        return (when - _EPOCH) // datetime.timedelta(microseconds=1)
    except OverflowError:
        raise ValueError(f"{text!r} is not a time from year 1 to 9999") from None


def plural(count: int, noun: str, many: str = "") -> str:
    """Format a count like ``1 record``, ``2 records``; `many`: the plural of an irregular noun."""
    return f"{number(count)} {noun if count == 1 else many or noun + 's'}"
