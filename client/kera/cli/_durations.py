"""Spans of time as people write and read them: ``7d``, ``12h``, ``30min`` (or ``30m``), ``4.5 s``, ``120 ms``."""

from __future__ import annotations

from kera.cli._run import UsageError
from kera.core.base.spans import span_ms


def parse_duration_ms(text: str, *, name: str = "duration") -> int:
    """Milliseconds in `text`, see `kera.core.base.spans`. Raises `UsageError` that mentions `name`."""
    found_ms = span_ms(text)
    if found_ms is None:
        raise UsageError(f"{name}: {text!r} is no span of time; write 7d, 12h, 30min, 90s or 250ms", name=name)
    if 0 < found_ms < 1:  # rounded to 0 it would turn off what it is to set
        raise UsageError(f"{name}: {text!r} is less than a millisecond, and that is the shortest", name=name)
    return round(found_ms)


def format_ms(milliseconds: int) -> str:
    """A span of time for people: ``120 ms``, ``4.5 s``, ``3 min``, ``2.5 h``."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    seconds = milliseconds / 1000
    if seconds >= 100 * 86_400:
        return f"{seconds / 86_400:.0f} d"
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.3g} {unit}"
    return f"{seconds:.3g} s"
