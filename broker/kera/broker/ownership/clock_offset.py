"""How far this broker's time of day is from the coordinator's, as far as answers to heartbeats tell.

Brokers promise by their clocks that nothing older comes (docs/epochs.md). One that gets a streamlet goes on from what
its own clock says, so these have to agree: within the grace of a stream, or rather each within half of it with the
coordinator's. Who is further off promises nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.base.telemetry import get_logger

log = get_logger("kera.epochs")

COARSE_US = 100_000
"""The time that promises are made by is read so often."""


class ClockOffset:
    """The clock offset of this broker; belongs to its event loop."""

    def __init__(self, now_us: Callable[[], int] = lambda: 0) -> None:
        """`now_us`: the time that promises are made by."""
        self._now_us = now_us
        self.least_us = 0
        """So far it is off at least; below 0: it is behind."""
        self.told_us: int | None = None
        """The grace for which it is off, as was told; None: nothing was."""

    def note(self, coordinator_us: int, round_trip_s: float) -> None:
        """An answer that took so long has told the coordinator's time; 0: it does not tell it."""
        if not coordinator_us:
            return
        round_trip_us = max(0, round(round_trip_s * 1e6))
        # When it was told, our time was between what it is now and a round trip before.
        ahead_us = self._now_us() - round_trip_us - coordinator_us
        behind_us = coordinator_us - self._now_us() - COARSE_US
        self.least_us = max(0, ahead_us) - max(0, behind_us)

    def is_within(self, grace_us: int) -> bool:
        """Whether what is promised by this clock can be kept by others."""
        within = abs(self.least_us) <= grace_us // 2
        if within and grace_us == self.told_us:
            self.told_us = None
            log.info("the clock agrees with the coordinator's again: epochs of silent entries are closed")
        elif not within and self.told_us is None:
            self.told_us = grace_us
            log.warning(
                "the clock is off, so epochs of entries without writers stay open; synchronize the clocks",
                off_s=round(self.least_us / 1e6, 3),
                limit_s=grace_us / 2e6,
            )
        return within
