"""The rule of all retries: retriable errors are retried, with growing pauses, until time runs out.

Three kinds of failure differ in how soon, and for how long, a retry is worthwhile:

* another broker has the data (`NotOwner`), or the broker does not answer (`Unavailable`): a streamlet moves within
  milliseconds, so the first retries come after a few milliseconds, and their pauses grow slowly;
* the data are being recovered (`Recovering`): how long that takes depends on the amount of data, so this time does not
  count as failure; only ``recovery_timeout_ms`` bounds it;
* everything else: ``retry_backoff_ms``, doubling.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kera.client.cluster.sense import making_sense
from kera.client.settings import ClientSettings
from kera.core.errors import KeraError, NotOwner, Recovering, Unavailable, Uncertain

T = TypeVar("T")

BACKOFF_S_MAX = 1.0
ROUTE_PAUSE_S_MIN = 0.005
ROUTE_PAUSE_S_MAX = 0.5
ROUTE_PAUSE_GROWTH = 1.5
PAUSES = random.Random()
"""A separate generator: programs and tests that seed the global one would otherwise get other numbers."""


def jittered(pause_s: float) -> float:
    """Shorten a pause at random, by up to half, so that many clients do not retry at the same time."""
    return PAUSES.uniform(pause_s / 2, pause_s)


def backoff_s(settings: ClientSettings, attempt: int) -> float:
    """Return the pause before retry number `attempt`, from 1."""
    return min(BACKOFF_S_MAX, settings.retry_backoff_ms / 1000 * 2.0 ** min(attempt - 1, 16))


def route_pause_s(settings: ClientSettings, attempt: int) -> float:
    """Return the pause before retry number `attempt` when a broker does not have the data, or does not answer."""
    first_s = min(ROUTE_PAUSE_S_MIN, settings.retry_backoff_ms / 1000)
    return min(ROUTE_PAUSE_S_MAX, first_s * ROUTE_PAUSE_GROWTH ** min(attempt - 1, 32))


def pause_s(settings: ClientSettings, error: KeraError, attempt: int) -> float:
    """Return the pause before retry number `attempt` after `error`."""
    pause = route_pause_s if isinstance(error, (NotOwner, Unavailable)) else backoff_s
    return pause(settings, attempt)


class RetryTime:
    """Tracks how long an operation has been failing without a success, and when to give up."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self.attempt = 0
        """Number of failures since the last success."""
        self._deadline_s = 0.0
        self._recovery_deadline_s: float | None = None

    def succeeded(self) -> None:
        """Note a success: the next failure counts as the first one."""
        self.attempt = 0
        self._recovery_deadline_s = None

    def failed(self, error: BaseException, now_s: float) -> float | None:
        """Note a failure. Returns the pause before the next attempt; None: `error` is final, or time has run out."""
        if not isinstance(error, KeraError) or not error.retriable:
            return None
        retry_timeout_s = self._settings.retry_timeout_ms / 1000
        if self.attempt == 0:
            self._deadline_s = now_s + retry_timeout_s
        if isinstance(error, Recovering):
            if self._recovery_deadline_s is None:
                self._recovery_deadline_s = now_s + self._settings.recovery_timeout_ms / 1000
            self._deadline_s = min(now_s + retry_timeout_s, self._recovery_deadline_s)
        self.attempt += 1
        return None if now_s >= self._deadline_s else pause_s(self._settings, error, self.attempt)


async def retrying(operation: Callable[[], Awaitable[T]], settings: ClientSettings) -> T:
    """Await `operation` until it succeeds, fails for good, or time is over; then raise its last error.

    An invalid answer is a `ProtocolError`, see `making_sense`.

    If an earlier attempt was `Uncertain`, it becomes the ``__cause__`` of the raised error: that attempt may have
    succeeded, so that a later one was refused.
    """
    patience = RetryTime(settings)
    loop = asyncio.get_running_loop()
    uncertain: Uncertain | None = None
    while True:
        try:
            with making_sense():
                return await operation()
        except KeraError as error:
            pause = patience.failed(error, loop.time())
            if pause is None:
                if uncertain is not None and uncertain is not error:
                    raise error from uncertain
                raise
            if isinstance(error, Uncertain):
                uncertain = error
        await asyncio.sleep(jittered(pause))
