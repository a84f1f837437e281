"""`kera.client.Latency` for those who write no asyncio. Written by ``python -m scripts.sync_sdk``."""

from __future__ import annotations

from collections.abc import Sequence

from kera.client.admin.latency import WINDOW_MS, LatencyConstraint, LatencyDescription, Statistic
from kera.client.admin.latency import Latency as AsyncLatency
from kera.client.sync.loop_thread import LoopThread


class Latency:
    """Latency constraints. Get it as `Client.latency`.

    What each method promises and raises is in `kera.client.Latency`.
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
        """Say how late records may be on a path: ``["clicks", "group:enrich", "visits", "group:dashboard"]``."""
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
        """Change a constraint; what is None stays as it is."""
        return self._thread.run(
            self._latency.alter(name, path=path, limit_ms=limit_ms, window_ms=window_ms, statistic=statistic)
        )

    def delete(self, name: str) -> None:
        """Forget a constraint: buffers go by the other constraints of their streams, or by their own settings again."""
        self._thread.run(self._latency.delete(name))

    def constraints(self) -> list[LatencyDescription]:
        """All that who asks may describe, by name, without their hops but for the worst of each."""
        return self._thread.run(self._latency.constraints())

    def describe(self, name: str) -> LatencyDescription:
        """One, with what each hop of its path takes."""
        return self._thread.run(self._latency.describe(name))
