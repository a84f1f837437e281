"""One timer for many times: it goes off at the earliest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls at the earliest of the times that were set since it last went off; who wants more sets it again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.at_s = math.inf
        """When it goes off, on the loop's clock."""

    def set(self, at_s: float) -> None:
        """Go off then, or earlier."""
        if at_s < self.at_s:
            if self._timer is not None:
                self._timer.cancel()
            self.at_s = at_s
            self._timer = self._loop.call_at(at_s, self._goes_off)

    def stop(self) -> None:
        """Go off no more; what is set from now on counts."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at_s = None, math.inf

    def _goes_off(self) -> None:
        self._timer, self.at_s = None, math.inf
        self._call()
