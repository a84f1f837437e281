"""Decides when a following copy retries after an error, and what it logs about that.

A copy survives temporary problems: its source or its target restarts, or cannot be reached for a while. An error is
temporary if its ``retriable`` is set. Before the copy has begun, even a temporary error ends it, because the address
may be wrong.

    begun ──temporary error──► failing ──next attempt writes something, or lasts `STABLE_S`──► begun
                               │     ▲
                               └─────┘ next attempt fails: the pause doubles, up to `PAUSE_S_MAX`

The log gets a line when a copy starts to fail, one for each new kind of error (`CAUSES_MAX` at most), and one when it
continues; never one per attempt.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from kera.connect.errors import CopyElsewhere
from kera.core.errors import KeraError

PAUSE_S_MIN = 0.2
PAUSE_S_MAX = 10.0
STABLE_S = 5.0
"""An attempt that lasts this long without an error has succeeded, even if there was nothing to write."""
PAUSES = random.Random()
CAUSES_MAX = 5
"""Maximum number of kinds of errors that are reported within one outage."""


class Failed(NamedTuple):
    """The consequence of a temporary error."""

    pause_s: float
    """The time until the next attempt."""
    report: bool
    """Whether to report the error: it is the first one of this outage, or of a new kind."""


class Resumed(NamedTuple):
    """An outage that is over."""

    down_s: float
    attempts: int


class Outages:
    """Follows the attempts of one copy."""

    def __init__(self, draw: Callable[[float, float], float] = PAUSES.uniform) -> None:
        """`draw`: returns a random number between two, so that pauses differ between copies."""
        self._draw = draw
        self._has_begun = False
        self._failing_since_s: float | None = None
        self._attempts = 0
        """Number of attempts in this outage."""
        self._causes: set[tuple[type, str]] = set()
        """Kinds of errors of this outage that have been reported."""
        self._elsewhere = False
        """Whether another process seemed to run the copy, in this outage."""

    def began(self) -> None:
        """Note that an attempt has reached both ends, and knows where the copy continues."""
        self._has_begun = True

    def failed(self, error: Exception, now_s: float) -> Failed | None:
        """Note that an attempt has ended with `error`, and return what to do. None: the copy ends."""
        if not self._has_begun or not self._may_pass(error):
            return None
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        ceiling_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2.0 ** min(self._attempts, 16))
        self._attempts += 1
        cause = type(error), "".join(each for each in str(error) if not each.isdigit())
        report = cause not in self._causes and len(self._causes) < CAUSES_MAX
        if report:
            self._causes.add(cause)
        return Failed(self._draw(ceiling_s / 2, ceiling_s), report)

    def _may_pass(self, error: Exception) -> bool:
        if isinstance(error, CopyElsewhere) and self._failing_since_s is not None and not self._elsewhere:
            # Our own write, whose answer was lost, may have arrived after we read the state. That happens only once.
            self._elsewhere = True
            return True
        return isinstance(error, KeraError) and error.retriable

    def succeeded(self, now_s: float) -> Resumed | None:
        """Note that the attempt has written something, or has lasted `STABLE_S`. Return the outage that this ends."""
        if self._failing_since_s is None:
            return None
        resumed = Resumed(now_s - self._failing_since_s, self._attempts)
        self._failing_since_s, self._attempts, self._causes, self._elsewhere = None, 0, set(), False
        return resumed
