"""Numbers and times as people read them. Pure."""

from __future__ import annotations

import datetime

from kera.core.base.spans import format_span

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def number(value: int) -> str:
    """``12 345``, with spaces that do not break."""
    return f"{value:,}".replace(",", "\u202f")


def microseconds(value: float) -> str:
    """A span of microseconds, also of few: ``0.12 ms``, ``4.2 ms``."""
    if not value or value >= 10_000:
        return format_span(value / 1e6)
    return f"{value / 1000:.1f} ms" if value >= 1_000 else f"{value / 1000:.2f} ms"


def moment(time_us: int | None) -> str:
    """Microseconds since the epoch as a time of UTC; as the number that it is, where there is no such time."""
    if time_us is None:
        return "–"
    try:
        when = _EPOCH + datetime.timedelta(microseconds=time_us)
    except OverflowError:
        return f"{time_us} µs"
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{when.microsecond // 1000:03d}"


def second(time_us: int | None) -> str:
    """The same without what is less than a second."""
    return moment(time_us).partition(".")[0]


def iso(time_us: int | None) -> str:
    """The same for programs; empty where there is no such time."""
    if time_us is None:
        return ""
    try:
        return (_EPOCH + datetime.timedelta(microseconds=time_us)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return ""


def parse_moment(text: str) -> int:
    """Microseconds since the epoch of an ISO 8601 time, of UTC unless it says otherwise. Raises `ValueError`."""
    when = datetime.datetime.fromisoformat(text.strip())
    if when.tzinfo is None:
        when = when.replace(tzinfo=datetime.UTC)
    try:
        return (when - _EPOCH) // datetime.timedelta(microseconds=1)
    except OverflowError:
        raise ValueError(f"{text!r} is not a time from year 1 to 9999") from None


def plural(count: int, noun: str, many: str = "") -> str:
    """``1 record``, ``2 records``; `many`: of a noun that takes more than an s."""
    return f"{number(count)} {noun if count == 1 else many or noun + 's'}"
