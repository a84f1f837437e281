"""One timer for several times: it fires at the earliest of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Alarm:
    """Calls `call` at the earliest time that was set since it last fired; later times have to be set again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.at_s = math.inf
        """When it fires, on the loop's clock."""

    def set(self, at_s: float) -> None:
        """Fire at `at_s` at the latest."""
        if at_s < self.at_s:
            if self._timer is not None:
                self._timer.cancel()
            self.at_s = at_s
            self._timer = self._loop.call_at(at_s, self._goes_off)

    def stop(self) -> None:
        """Forget the time that was set; it can be set again."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self.at_s = None, math.inf

    def _goes_off(self) -> None:
        self._timer, self.at_s = None, math.inf
        self._call()
