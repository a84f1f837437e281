"""One timer of an event loop for everything that is held back, set for the first item that is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kera.core.base.alarm import Alarm


class HoldTimer:
    """Calls all listeners when something may be due; a listener that still holds items sets it again."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._alarm = Alarm(loop, self._call)
        self._listeners: list[Callable[[], object]] = []

    def listen(self, call: Callable[[], object]) -> None:
        """Call `call` when something may be due."""
        self._listeners.append(call)

    def set_in(self, seconds: float) -> None:
        """Call the listeners in `seconds` at the latest."""
        self._alarm.set(self._loop.time() + max(0.0, seconds))

    def _call(self) -> None:
        for call in self._listeners:
            call()
