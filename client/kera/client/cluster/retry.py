"""The one rule of retries: what is retriable is tried again, with growing pauses, until time runs out.

Three kinds of failure differ in how soon, and for how long, it is worth trying again:

* another broker has it (`NotOwner`), or nobody is there (`Unavailable`): a streamlet moves within milliseconds, so the
  first retries come after some; their pauses grow slowly;
* it is being recovered (`Recovering`): the cluster knows, and is at it. How long that takes depends on how much there
  is to recover, so this time does not count as failure; only ``recovery_timeout_ms`` bounds it;
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
"""Not the generator that programs, and tests, seed for themselves: a draw from here would change what they get."""


def jittered(pause_s: float) -> float:
    """About so long: many are not to come at once."""
    return PAUSES.uniform(pause_s / 2, pause_s)


def backoff_s(settings: ClientSettings, attempt: int) -> float:
    """Pause before attempt number `attempt` (from 1 for the first retry)."""
    return min(BACKOFF_S_MAX, settings.retry_backoff_ms / 1000 * 2.0 ** min(attempt - 1, 16))


def route_pause_s(settings: ClientSettings, attempt: int) -> float:
    """The same when a broker does not have what it was asked for, or is not there."""
    first_s = min(ROUTE_PAUSE_S_MIN, settings.retry_backoff_ms / 1000)
    return min(ROUTE_PAUSE_S_MAX, first_s * ROUTE_PAUSE_GROWTH ** min(attempt - 1, 32))


def pause_s(settings: ClientSettings, error: KeraError, attempt: int) -> float:
    """Pause before attempt number `attempt` after `error`."""
    pause = route_pause_s if isinstance(error, (NotOwner, Unavailable)) else backoff_s
    return pause(settings, attempt)


class RetryTime:
    """For how long something has been failing without a break, and whether that is long enough."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self.attempt = 0
        """Failures without a break."""
        self._deadline_s = 0.0
        self._recovery_deadline_s: float | None = None

    def succeeded(self) -> None:
        """The next failure is the first one again."""
        self.attempt = 0
        self._recovery_deadline_s = None

    def failed(self, error: BaseException, now_s: float) -> float | None:
        """The pause before the next attempt, in seconds; None: `error` is final, or time has run out."""
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
    """Await `operation` until it succeeds, fails for good, or time is over; its last error comes out.

    An answer that makes no sense is a `ProtocolError`.

    When an earlier attempt was `Uncertain`, it is the ``__cause__`` of the error that comes out: that attempt may have
    done what a later one is refused for.
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
