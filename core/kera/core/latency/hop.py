"""The parts of a record's way through a stream."""

from __future__ import annotations

from enum import IntEnum


class Hop(IntEnum):
    """One part of the way; each ends where the next one begins. The numbers are those of the messages."""

    GATHER = 1
    """From when a record is accepted until its chunk is closed."""
    SEND = 2
    """Until the broker has appended the chunk."""
    REPLICATE = 3
    """Until it is durable."""
    HAND_OVER = 4
    """Until it is in the reader's queue."""
    PREFETCH = 5
    """Until the application takes it."""
    WORK = 6
    """Until the first record that it makes of the chunk was accepted; of none, until it asks for the next one."""

    @property
    def word(self) -> str:
        """As people read it, and metrics have it: ``hand-over``."""
        return self.name.lower().replace("_", "-")

    @property
    def of_reader(self) -> bool:
        """It is measured of each consumer group by itself."""
        return self >= Hop.HAND_OVER
