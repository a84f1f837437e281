"""A broker's part in the epochs of a stream (docs/epochs.md): the times that it accepts, and its promises. Pure
data.
"""

from __future__ import annotations

from typing import NamedTuple

from kera.core.format.punctuation import EPOCH_GRACE_MS, TIMESTAMP_AHEAD_MAX_MS
from kera.v1 import common_pb2


class EpochRules(NamedTuple):
    """The epoch rules of a stream; a stream without epochs has the defaults."""

    by_clock: bool = False
    """Whether the broker promises that entries get no data older than its clock minus the grace."""
    grace_us: int = 0
    timestamp_ahead_us: int = 0
    """Maximum by which the times of chunks may be ahead of the clock; 0: no limit."""
    clock_until_us: int = 0
    """The time up to which brokers have promised by their clocks, if they no longer do; 0: they never did, or still
    do."""

    @property
    def are_kept(self) -> bool:
        """Whether the stream has epochs."""
        return self.grace_us > 0

    @classmethod
    def of(cls, config: common_pb2.StreamConfig) -> EpochRules:
        """Return the rules of a stream's configuration."""
        if not config.epoch_ms:
            return cls(clock_until_us=config.clock_until_us)
        grace_ms = config.epoch_grace_ms if config.HasField("epoch_grace_ms") else EPOCH_GRACE_MS
        ahead_ms = (
            config.timestamp_ahead_max_ms if config.HasField("timestamp_ahead_max_ms") else TIMESTAMP_AHEAD_MAX_MS
        )
        by_clock = config.punctuation == common_pb2.PUNCTUATION_CLOCK
        return cls(by_clock, grace_ms * 1000, ahead_ms * 1000, 0 if by_clock else config.clock_until_us)


NO_EPOCHS = EpochRules()
