"""Points in time as people write them: so long ago, or ISO 8601."""

from __future__ import annotations

import datetime
import re

from kera.cli._run import UsageError

_SPAN = re.compile(r"(\d{1,6})([smhd])")
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def parse_time_us(text: str, now_us: int, *, name: str) -> int:
    """The time that `text` means, in microseconds since 1970. Raises `UsageError` that mentions `name`."""
    span = _SPAN.fullmatch(text)
    if span is not None:
        return now_us - int(span[1]) * _UNITS_S[span[2]] * 1_000_000
    try:
        moment = datetime.datetime.fromisoformat(text)
        return (moment.astimezone(datetime.UTC) - _EPOCH) // datetime.timedelta(microseconds=1)
    except (ValueError, OverflowError):
        raise UsageError(
            f"{name}: {text!r} is neither a span like 10m or 2h nor a time like 2026-01-31T12:00", name=name
        ) from None
