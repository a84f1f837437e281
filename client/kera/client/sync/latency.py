"""`kera.client.Latency` without asyncio: calls wait for their results. Made by `scripts.sync_sdk`."""

from __future__ import annotations

from collections.abc import Sequence

from kera.client.admin.latency import WINDOW_MS, LatencyConstraint, LatencyDescription, Statistic
from kera.client.admin.latency import Latency as AsyncLatency
from kera.client.sync.loop_thread import LoopThread


class Latency:
    """Latency constraints. Get it as `Client.latency`.

    Its methods do the same as those of `kera.client.Latency`; the docstrings there name the errors.
    """

    def __init__(self, thread: LoopThread, latency: AsyncLatency) -> None:
        self._thread = thread
        self._latency = latency

    def create(
        self,
        name: str,
        path: Sequence[str],
        limit_ms: float,
        *,
        window_ms: int = WINDOW_MS,
        statistic: Statistic = "mean",
    ) -> LatencyConstraint:
        """Limit how late records may be on a path: ``["clicks", "group:enrich", "visits", "group:dashboard"]``."""
        return self._thread.run(self._latency.create(name, path, limit_ms, window_ms=window_ms, statistic=statistic))

    def alter(
        self,
        name: str,
        *,
        path: Sequence[str] | None = None,
        limit_ms: float | None = None,
        window_ms: int | None = None,
        statistic: Statistic | None = None,
    ) -> LatencyConstraint:
        """Change a constraint; None changes nothing."""
        return self._thread.run(
            self._latency.alter(name, path=path, limit_ms=limit_ms, window_ms=window_ms, statistic=statistic)
        )

    def delete(self, name: str) -> None:
        """Delete a constraint: buffers follow the other constraints of their streams, or their own settings again."""
        self._thread.run(self._latency.delete(name))

    def constraints(self) -> list[LatencyDescription]:
        """Return all constraints that the caller may describe, by name, each with only its worst hop."""
        return self._thread.run(self._latency.constraints())

    def describe(self, name: str) -> LatencyDescription:
        """Return one constraint, with the times of all hops of its path."""
        return self._thread.run(self._latency.describe(name))
