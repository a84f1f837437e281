"""A broker's part in the epochs of a stream (docs/epochs.md): the times that it accepts, and its promises. Pure
data.
"""

from __future__ import annotations

from typing import NamedTuple

from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.v1 import common_pb2


class EpochRules(NamedTuple):
    """The rules of a stream with epochs; a stream without them has none."""

    by_clock: bool = False
    """The broker promises that nothing older than its clock says, less the grace, comes to entries."""
    grace_us: int = 0
    timestamp_ahead_us: int = 0
    """So far ahead of the clock the times of chunks may be; 0: as far as they like."""
    clock_until_us: int = 0
    """Up to then brokers have promised by their clocks, and do no more; 0: they never did, or do so now."""

    @property
    def are_kept(self) -> bool:
        """Whether the stream has epochs."""
        return self.grace_us > 0

    @classmethod
    def of(cls, config: common_pb2.StreamConfig) -> EpochRules:
        """The rules of a stream's configuration."""
        if not config.epoch_ms:
            return cls(clock_until_us=config.clock_until_us)
        grace_ms = config.epoch_grace_ms if config.HasField("epoch_grace_ms") else EPOCH_GRACE_MS
        ahead_ms = (
            config.timestamp_ahead_max_ms if config.HasField("timestamp_ahead_max_ms") else TIMESTAMP_AHEAD_MAX_MS
        )
        by_clock = config.punctuation == common_pb2.PUNCTUATION_CLOCK
        return cls(by_clock, grace_ms * 1000, ahead_ms * 1000, 0 if by_clock else config.clock_until_us)


NO_EPOCHS = EpochRules()
