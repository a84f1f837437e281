"""How long an open chunk may fill, and the result of closing due chunks. Times are on the loop's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kera.client.producing.lanes.lane import Lane

TIMER_S = 0.001
"""Precision of an event loop's timers: a timer that goes off too early would be set again and again."""


class FillTime(Protocol):
    """Decides how long one producer's chunks for one broker may fill."""

    @property
    def holds(self) -> bool:
        """Whether chunks may have to wait for a time, and not only for an answer."""
        ...

    @property
    def grace_s(self) -> float:
        """How long after its time the sender may look at a due chunk."""
        ...

    def wait_s(self, stream_id: int, now_s: float) -> float:
        """Return how long a chunk of a stream may fill; 0: until nothing is in flight."""
        ...

    def early_s(self, wait_s: float, others: int) -> float:
        """Return how much before the end of `wait_s` a chunk may go along with `others` due ones; 0: it may not."""
        ...


class Linger:
    """Chunks fill for ``linger_ms``, and without that until nothing is in flight."""

    def __init__(self, linger_ms: float | None) -> None:
        self._linger_s = (linger_ms or 0.0) / 1000
        self.holds = bool(self._linger_s)
        self.grace_s = 0.0 if linger_ms is None else TIMER_S

    def wait_s(self, stream_id: int, now_s: float) -> float:  # noqa: ARG002 - the same for all, always
        """See `FillTime`; likewise what follows."""
        return self._linger_s

    def early_s(self, wait_s: float, others: int) -> float:  # noqa: ARG002 - the user has set the time
        """Return 0: no chunk goes early."""
        return 0.0


class Due(NamedTuple):
    """The result of closing due chunks."""

    closed: bool
    """Whether any chunk was due, and is closed."""
    next_s: float | None
    """Time at which the next chunk is due; None: no chunk waits for a time."""
    since_s: float | None = None
    """Time at which the first closed chunk was due; None: no closed chunk waited for a time."""


NOTHING_DUE = Due(closed=False, next_s=None)


class CloseDueChunks(Protocol):
    """Closes open chunks."""

    def __call__(self, lanes: set[Lane], fill_time: FillTime, *, idle: bool) -> Due:
        """Close due chunks of `lanes`. A chunk that need not wait for a time is due if `idle`: nothing is in flight."""
        ...


def earlier(one_s: float | None, other_s: float | None) -> float | None:
    """Return the earlier one of two times; None is not a time."""
    if one_s is None or other_s is None:
        return other_s if one_s is None else one_s
    return min(one_s, other_s)


def all_of(found: Sequence[Due]) -> Due:
    """Combine several results."""
    if len(found) == 1:
        return found[0]
    next_s = min((each.next_s for each in found if each.next_s is not None), default=None)
    since_s = min((each.since_s for each in found if each.since_s is not None), default=None)
    return Due(any(each.closed for each in found), next_s, since_s)
