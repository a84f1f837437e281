"""The parts of a record's way through a stream."""

from __future__ import annotations

from enum import IntEnum


class Hop(IntEnum):
    """One part of the way; each ends where the next one begins. The numbers are those in messages."""

    GATHER = 1
    """From when a record is accepted until its chunk is closed."""
    SEND = 2
    """Until the broker has appended the chunk."""
    REPLICATE = 3
    """Until the chunk is durable."""
    HAND_OVER = 4
    """Until the chunk is in the reader's queue."""
    PREFETCH = 5
    """Until the application takes the chunk."""
    WORK = 6
    """Until the first record that the application makes from the chunk was accepted; if it makes none, until it asks
    for the next chunk."""

    @property
    def word(self) -> str:
        """The name for people and metrics: ``hand-over``."""
        return self.name.lower().replace("_", "-")

    @property
    def of_reader(self) -> bool:
        """Whether it is measured separately for each consumer group."""
        return self >= Hop.HAND_OVER
