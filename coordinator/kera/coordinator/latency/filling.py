"""Streams whose chunks are full before their permitted wait is over. Pure.

Measurements show this only after the writers have applied the wait that they were granted, which takes a heartbeat, a
report of the writer and its answer. Until then, and until one more window is over, the earlier finding stays. Older
measurements within a window do little harm, since the longest waits count. But if chunks may wait for much longer than
before, or writers had no grant before, many short waits hide the few chunks that fill now, and all short ones have to
leave the window first. The caller passes the time of a clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kera.coordinator.latency.splitting import UNLIMITED
from kera.core.latency.window import PARTS

EARLY = 0.7
"""A chunk that takes less than this share of its permitted wait is full, not late."""
MOSTLY_EARLY = 0.5
"""Most chunks are full early if the mean is below this share, as a chunk that is sent with others has filled
for longer.
"""
GROWTH = 2
"""Chunks that fill early keep this many times the wait of the slowest ones: the load may halve within a window."""
USEFUL_US_MIN = 5_000
"""Minimum wait that chunks keep in any case: some writers may use their own settings, and never wait."""
ADVICE_S = 5.0
"""Time until all writers apply a grant, in seconds: advice that is not renewed expires after this time."""


class _Granted(NamedTuple):
    """How long the chunks of a stream may wait."""

    gather_us: int
    since_s: float
    grown: bool
    """Whether it is much longer than before."""


class Filling:
    """Finds the streams whose chunks fill early, and limits the wait that their writers are granted."""

    def __init__(self) -> None:
        self._granted: dict[str, _Granted] = {}
        """The last grant, by stream."""
        self._most_us: dict[str, float] = {}
        """The limit, by stream, for streams whose chunks fill early."""

    def grant(self, stream: str, gather_us: int, now_s: float) -> None:
        """Note that chunks of a stream may wait for `gather_us` from now on."""
        known = self._granted.get(stream)
        if known is None or known.gather_us != gather_us:
            grown = known is None or gather_us > GROWTH * known.gather_us
            self._granted[stream] = _Granted(gather_us, now_s, grown)

    def look(self, stream: str, mean_us: int, p99_us: int, window_s: float, now_s: float) -> None:
        """Evaluate how long chunks took over the last window, in which some were closed.

        If a few chunks are late and many are full early, the wait grows, but not to the whole grant: machines are busy
        now and then, and other streams would have to adapt their waits again.
        """
        granted_us, since_s, grown = self._granted.get(stream, _Granted(0, now_s, grown=False))
        settling_s = max(window_s, ADVICE_S)
        if grown:
            settling_s = ADVICE_S + window_s * (1 + 1 / PARTS)  # a window moves on by a part of itself
        if now_s < since_s + settling_s:
            return
        if p99_us < EARLY * granted_us or mean_us < MOSTLY_EARLY * granted_us:
            self._most_us[stream] = max(USEFUL_US_MIN, GROWTH * p99_us)
        else:
            self._most_us.pop(stream, None)

    def most_us(self, stream: str) -> float:
        """Return the wait beyond which more would be of no use to the chunks of a stream."""
        return self._most_us.get(stream, UNLIMITED)

    def keep(self, streams: Collection[str]) -> None:
        """Forget all streams but these: the others have no constraint any more."""
        self._granted = {stream: known for stream, known in self._granted.items() if stream in streams}
        self._most_us = {stream: known for stream, known in self._most_us.items() if stream in streams}
