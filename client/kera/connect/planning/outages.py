"""When a copy that follows tries again after an error, and what it says about that.

A copy outlives what passes: its source or its target restarts, or cannot be reached for a while. An error that may pass
is one whose ``retriable`` is set. It ends the copy all the same while the copy has not begun, since the address may be
wrong; nobody waits for a host that does not exist.

    begun ──error that may pass──► failing ──next attempt writes something, or lasts `STABLE_S`──► begun
                                   │     ▲
                                   └─────┘ next attempt fails: the pause doubles, up to `PAUSE_S_MAX`

A log gets a line when a copy starts to fail, one for each new kind of error (`CAUSES_MAX` at most), and one when it
goes on; never one per attempt.
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
"""An attempt that has lasted so long without an error has succeeded, also if there was nothing to write."""
PAUSES = random.Random()
CAUSES_MAX = 5
"""Kinds of errors that are reported within one outage."""


class Failed(NamedTuple):
    """The consequence of an error that may pass."""

    pause_s: float
    """Until the next attempt."""
    report: bool
    """It is the first one of this outage, or of another kind than those before it."""


class Resumed(NamedTuple):
    """An outage that is over."""

    down_s: float
    attempts: int


class Outages:
    """Follows the attempts of one copy."""

    def __init__(self, draw: Callable[[float, float], float] = PAUSES.uniform) -> None:
        """`draw`: a number between two, for pauses that differ between copies."""
        self._draw = draw
        self._has_begun = False
        self._failing_since_s: float | None = None
        self._attempts = 0
        """Attempts of this outage."""
        self._causes: set[tuple[type, str]] = set()
        """Kinds of errors of this outage that have been reported."""
        self._elsewhere = False
        """Within this outage, another process seemed to run the copy."""

    def began(self) -> None:
        """An attempt has reached both ends and knows where the copy goes on."""
        self._has_begun = True

    def failed(self, error: Exception, now_s: float) -> Failed | None:
        """An attempt has ended with `error`. None: that ends the copy."""
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
            # A write of our own, whose answer was lost, may have arrived after we had looked. A second one cannot.
            self._elsewhere = True
            return True
        return isinstance(error, KeraError) and error.retriable

    def succeeded(self, now_s: float) -> Resumed | None:
        """The attempt has written something, or has lasted `STABLE_S`. None: there was no outage."""
        if self._failing_since_s is None:
            return None
        resumed = Resumed(now_s - self._failing_since_s, self._attempts)
        self._failing_since_s, self._attempts, self._causes, self._elsewhere = None, 0, set(), False
        return resumed
