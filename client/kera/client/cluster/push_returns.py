"""Pushed data that readers have finished with, on their way back to the broker: bytes of the window, and slots.

A little waits for more, as each message has a price at both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from kera.core.push import BODY_BYTES_MAX, PushKind, encode_numbers, encode_taken

RETURN_DELAY_S = 0.05
"""How long what was taken or let go of waits for more before the broker is told."""


class Returns:
    """The returns of one connection."""

    def __init__(self, send: Callable[[bytes], None], delay_s: float) -> None:
        self._send = send
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._taken_bytes = 0
        """Taken, and the broker has not been told."""
        self._released: deque[int] = deque()
        """Slots that were let go of, once per run, and the broker has not been told."""
        self._timer_set = False
        """Sending at once leaves the timer alone: to set one from another thread has a price."""

    def taken(self, taken_bytes: int, *, at_once_bytes: float) -> None:
        """So much of the window is free again. The broker is told at once when `at_once_bytes` have gathered."""
        self._taken_bytes += taken_bytes
        if self._taken_bytes >= at_once_bytes:
            self._send_all()
        elif not self._timer_set:
            self._timer_set = True
            self._loop.call_later(self._delay_s, self._time_is_up)

    def let_go(self, slot: int) -> None:
        """A run has no reference any more. Called from whatever thread drops it, and from the garbage collector."""
        self._released.append(slot)
        if not self._timer_set:
            self._timer_set = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and all connections with it
                self._loop.call_soon_threadsafe(self._loop.call_later, self._delay_s, self._time_is_up)

    def _time_is_up(self) -> None:
        self._timer_set = False
        self._send_all()

    def _send_all(self) -> None:
        message = b""
        if self._taken_bytes:
            message, self._taken_bytes = encode_taken(self._taken_bytes), 0
        while self._released:
            count = min(len(self._released), BODY_BYTES_MAX // 4)
            message += encode_numbers(PushKind.RELEASE, [self._released.popleft() for _ in range(count)])
        if message:
            self._send(message)
