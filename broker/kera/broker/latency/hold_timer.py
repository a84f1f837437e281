"""One timer of an event loop for all that is held back: whatever is due first sets it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kera.core.base.alarm import Alarm


class HoldTimer:
    """Calls all who listen when something may be due; who still holds something sets it again."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._alarm = Alarm(loop, self._call)
        self._listeners: list[Callable[[], object]] = []

    def listen(self, call: Callable[[], object]) -> None:
        """Call when something may be due."""
        self._listeners.append(call)

    def set_in(self, seconds: float) -> None:
        """Something is due by then."""
        self._alarm.set(self._loop.time() + max(0.0, seconds))

    def _call(self) -> None:
        for call in self._listeners:
            call()
