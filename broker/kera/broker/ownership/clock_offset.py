"""How far this broker's time of day is from the coordinator's, according to the answers to heartbeats.

Brokers promise by their clocks that nothing older comes (docs/epochs.md). A broker that gets a streamlet continues by
its own clock, so the brokers' clocks have to agree within the grace of a stream: each within half of it with the
coordinator's clock. A broker whose clock is further off promises nothing, and logs a warning.
"""

from __future__ import annotations

from collections.abc import Callable

from kera.core.base.telemetry import get_logger

log = get_logger("kera.epochs")

COARSE_US = 100_000
"""Resolution of the time by which promises are made."""


class ClockOffset:
    """The clock offset of this broker; belongs to its event loop."""

    def __init__(self, now_us: Callable[[], int] = lambda: 0) -> None:
        """`now_us`: the time by which promises are made."""
        self._now_us = now_us
        self.least_us = 0
        """The minimum by which the clock is off; below 0: it is behind."""
        self.told_us: int | None = None
        """The grace for which the clock was reported as off; None: it was not."""

    def note(self, coordinator_us: int, round_trip_s: float) -> None:
        """Measure the offset by the coordinator's time in an answer; 0: the answer has no time."""
        if not coordinator_us:
            return
        round_trip_us = max(0, round(round_trip_s * 1e6))
        # When the coordinator read its clock, this clock was between its present time and a round trip before.
        ahead_us = self._now_us() - round_trip_us - coordinator_us
        behind_us = coordinator_us - self._now_us() - COARSE_US
        self.least_us = max(0, ahead_us) - max(0, behind_us)

    def is_within(self, grace_us: int) -> bool:
        """Whether other brokers can keep a promise by this clock in a stream with this grace; logs changes."""
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
