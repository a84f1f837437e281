"""Points in time as people write them: a time span ago, or ISO 8601."""

from __future__ import annotations

import datetime
import re

from kera.cli._durations import parse_duration_ms
from kera.cli._run import UsageError

AGO_MS_MAX = 1_000_000 * 86_400_000
"""The longest time span."""
_SPAN = re.compile(r"[\d.]+\s*[a-z]+")
"""The form of a time span."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def parse_time_us(text: str, now_us: int, *, name: str) -> int:
    """Return the time in `text`, in microseconds since 1970. Raises `UsageError` that mentions `name`."""
    if _SPAN.fullmatch(text.strip()):
        ago_ms = parse_duration_ms(text, name=name)
        if ago_ms > AGO_MS_MAX:
            raise UsageError(f"{name}: {text!r} is more than 1000000d, and a span goes no further back")
        return now_us - ago_ms * 1000
    try:
        moment = datetime.datetime.fromisoformat(text)
        return (moment.astimezone(datetime.UTC) - _EPOCH) // datetime.timedelta(microseconds=1)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}: {text!r} is neither a span like 10min or 2h nor a time like 2026-01-31T12:00", name=name
        ) from None
