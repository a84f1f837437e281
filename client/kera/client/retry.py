"""The one rule of retries: what is retriable is tried again, with growing pauses, until time runs out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from kera.client.settings import ClientSettings
from kera.core.errors import KeraError

T = TypeVar("T")

BACKOFF_S_MAX = 1.0


def is_retriable(error: BaseException) -> bool:
    """Whether the same request may succeed later without any change to it."""
    return isinstance(error, KeraError) and error.retriable


def backoff_s(settings: ClientSettings, attempt: int) -> float:
    """Pause before attempt number `attempt` (from 1 for the first retry)."""
    return min(BACKOFF_S_MAX, settings.retry_backoff_ms / 1000 * 2.0 ** min(attempt - 1, 16))


async def retrying(operation: Callable[[], Awaitable[T]], settings: ClientSettings) -> T:
    """Await `operation` until it succeeds, fails for good, or `retry_timeout_ms` is over; its last error comes out."""
    policy = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(is_retriable),
        wait=tenacity.wait_random_exponential(multiplier=settings.retry_backoff_ms / 1000, max=BACKOFF_S_MAX),
        stop=tenacity.stop_after_delay(settings.retry_timeout_ms / 1000),
        reraise=True,
    )
    return await policy(operation)
