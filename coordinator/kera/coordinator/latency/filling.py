"""Streams whose chunks are full before they have waited for as long as they may. Pure.

That they are full early is seen of what they took only where writers have gone by what they were granted: it takes a
heartbeat, a report of a writer and its answer until they know. Until then, and until a window has gone by, what was
known before counts. What is left of the time before in a window does little harm, as it is the longest that are looked
at; but where chunks may wait for much longer than before, or nobody had told writers anything, many short ones hide the
few that fill now, and all of them have to be out of the window. The time is the caller's, on a clock that does not go
back.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kera.coordinator.latency.splitting import UNLIMITED
from kera.core.latency.window import PARTS

EARLY = 0.7
"""A chunk that is filled in less than so much of what it may take is full, and not late."""
MOSTLY_EARLY = 0.5
"""So are most, if on average they are filled in less than this; one that goes with others has filled for longer."""
GROWTH = 2
"""Chunks that are full early keep so many times as long as the longest take: the load may halve within a window."""
USEFUL_US_MIN = 5_000
"""They may wait for so long in any case: some writers may go by settings of their own, and never wait."""
ADVICE_S = 5.0
"""Until all writers go by what is granted; advice counts for so long without being renewed."""


class _Granted(NamedTuple):
    """The time for which the chunks of a stream may wait."""

    gather_us: int
    since_s: float
    grown: bool
    """It is much more than before."""


class Filling:
    """Finds the streams whose chunks fill early, and limits the wait that their writers are granted."""

    def __init__(self) -> None:
        self._granted: dict[str, _Granted] = {}
        """By stream."""
        self._most_us: dict[str, float] = {}
        """By stream, of those whose chunks are full early."""

    def grant(self, stream: str, gather_us: int, now_s: float) -> None:
        """Chunks of a stream may wait for so long from now on."""
        known = self._granted.get(stream)
        if known is None or known.gather_us != gather_us:
            grown = known is None or gather_us > GROWTH * known.gather_us
            self._granted[stream] = _Granted(gather_us, now_s, grown)

    def look(self, stream: str, mean_us: int, p99_us: int, window_s: float, now_s: float) -> None:
        """Chunks took so long over the last window, in which some were closed.

        If a few are late of many that are full early, they get more time, and not all there is: machines are busy now
        and then, and others would have to learn anew what they may wait.
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
        """For how long chunks of a stream may wait at most, as it would be of no use."""
        return self._most_us.get(stream, UNLIMITED)

    def keep(self, streams: Collection[str]) -> None:
        """Forget all others: they have no constraint any more."""
        self._granted = {stream: known for stream, known in self._granted.items() if stream in streams}
        self._most_us = {stream: known for stream, known in self._most_us.items() if stream in streams}
