"""Returns bytes of the window and slots to the broker when readers have finished with pushed data.

Small returns wait for more, because each message costs both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from kera.core.push import BODY_BYTES_MAX, PushKind, encode_numbers, encode_taken

RETURN_DELAY_S = 0.05
"""Time for which returns wait for more before they are sent to the broker."""


class Returns:
    """The returns of one connection."""

    def __init__(self, send: Callable[[bytes], None], delay_s: float) -> None:
        self._send = send
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._taken_bytes = 0
        """Taken bytes that are not returned to the broker yet."""
        self._released: deque[int] = deque()
        """Released slots, once per run, that are not returned to the broker yet."""
        self._timer_set = False
        """Whether the timer is set. Sending at once leaves it alone: setting a timer from another thread is costly."""

    def taken(self, taken_bytes: int, *, at_once_bytes: float) -> None:
        """Return bytes of the window. Sends at once when `at_once_bytes` have gathered."""
        self._taken_bytes += taken_bytes
        if self._taken_bytes >= at_once_bytes:
            self._send_all()
        elif not self._timer_set:
            self._timer_set = True
            self._loop.call_later(self._delay_s, self._time_is_up)

    def let_go(self, slot: int) -> None:
        """Release the slot of a run that has no references left. Called from any thread, and the garbage collector."""
        self._released.append(slot)
        if not self._timer_set:
            self._timer_set = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and so are all connections
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
