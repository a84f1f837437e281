"""Spans of time as people write them: ``7d``, ``12h``, ``30min`` (or ``30m``), ``4.5 s``, ``120 ms``."""

from __future__ import annotations

from kera.cli._run import UsageError
from kera.core.base.spans import span_ms


def parse_duration_ms(text: str, *, name: str = "duration") -> int:
    """Return the milliseconds in `text`, see `kera.core.base.spans`. Raises `UsageError` that mentions `name`."""
    found_ms = span_ms(text)
    if found_ms is None:
        raise UsageError(f"{name}: {text!r} is not a duration; write 7d, 12h, 30min, 90s or 250ms", name=name)
    if 0 < found_ms < 1:  # rounded to 0, it would turn the setting off
        raise UsageError(f"{name}: {text!r} is less than a millisecond, and that is the shortest", name=name)
    return round(found_ms)
