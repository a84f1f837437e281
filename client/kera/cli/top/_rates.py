"""Rates from two answers of a daemon, whose counters may restart, and which may itself restart or vanish. Pure.

A rate is None for the first answer, for answers of two launches of a daemon, and for two answers of the same moment. It
is measured on the daemon's clock, so that a delayed answer does not falsify it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kera.cli.top._sample import Two
from kera.client.admin.daemons import StreamFigures

_UNLIMITED = "+Inf"


class StreamRates(NamedTuple):
    """The rates per second of a stream at one broker."""

    records: float
    bytes: float
    bytes_read: float


def seconds_between(two: Two) -> float | None:
    """Return the time between two answers; None: they give no rate."""
    before, now = two
    if before is None or before.launch_id != now.launch_id or now.uptime_us <= before.uptime_us:
        return None
    return (now.uptime_us - before.uptime_us) / 1e6


def rate(two: Two, *names: str) -> float | None:
    """Return the sum of the rates of counters, over all their labels."""
    seconds = seconds_between(two)
    if seconds is None or two.before is None:
        return None
    grown = 0.0
    for name in names:
        earlier = two.before.figures.get(name, {})
        for labels, value in two.now.figures.get(name, {}).items():
            grown += _grown(earlier.get(labels, 0.0), value)
    return grown / seconds


def rate_of(two: Two, name: str, *labels: str) -> float | None:
    """Return the rate of one counter with these labels; None also if the daemon has no such counter."""
    seconds, value = seconds_between(two), two.now.value(name, *labels)
    if seconds is None or two.before is None or value is None:
        return None
    return _grown(two.before.value(name, *labels) or 0.0, value) / seconds


def _grown(before: float, now: float) -> float:
    """Return the growth of a counter. A smaller value means that it has restarted at 0 within the launch."""
    return now - before if now >= before else now


def stream_rates(two: Two) -> dict[int, StreamRates]:
    """Return rates by the ids of the streams that the broker has now; empty: the answers give no rates."""
    seconds = seconds_between(two)
    if seconds is None or two.before is None:
        return {}
    earlier, nothing = two.before.streams, StreamFigures(0, 0, 0, 0, 0, 0)
    found = {}
    for stream_id, now in two.now.streams.items():
        before = earlier.get(stream_id, nothing)
        found[stream_id] = StreamRates(
            _grown(before.records_appended, now.records_appended) / seconds,
            _grown(before.bytes_appended, now.bytes_appended) / seconds,
            _grown(before.bytes_read, now.bytes_read) / seconds,
        )
    return found


def quantile_s(two: Two, histogram: str, part: float) -> float | None:
    """Return the quantile `part` of what a histogram has counted between the answers, in seconds; None: nothing.

    The result is the upper bound of a bucket. Times beyond the last finite bound count as that bound.
    """
    if seconds_between(two) is None or two.before is None:
        return None
    grown: dict[float, float] = {}
    earlier = two.before.figures.get(f"{histogram}_bucket", {})
    for labels, value in two.now.figures.get(f"{histogram}_bucket", {}).items():
        bound = _bound(labels)
        if bound is not None:
            grown[bound] = grown.get(bound, 0.0) + _grown(earlier.get(labels, 0.0), value)
    total = max(grown.values(), default=0.0)
    if not total:
        return None
    bounds = [bound for bound in sorted(grown) if bound != float("inf")]
    return next((bound for bound in bounds if grown[bound] >= total * part), bounds[-1] if bounds else None)


def _bound(labels: tuple[str, ...]) -> float | None:
    named: Mapping[str, str] = dict(zip(labels[::2], labels[1::2], strict=False))
    text = named.get("le")
    if text is None:
        return None
    try:
        return float("inf") if text == _UNLIMITED else float(text)
    except ValueError:  # from a daemon of another version
        return None
