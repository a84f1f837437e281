"""How long each buffer of a stream may hold records, as the coordinator has told."""

from __future__ import annotations

from typing import NamedTuple

from kera.v1 import latency_pb2

STREAMS_MAX = 1000
"""Of which there are budgets; the coordinator has no more constraints than that."""
WINDOW_MS_MIN = 100
WINDOW_MS_MAX = 3_600_000
WAIT_US_MAX = 3_600_000_000
"""An hour: nothing waits for longer, whatever is told."""


class Budget(NamedTuple):
    """Of a stream; what is odd is bounded, as whoever gets it would rather wait for too little."""

    window_s: float
    gather_us: int
    replicate_us: int
    hand_over_us: int

    @classmethod
    def of(cls, message: latency_pb2.StreamBudget) -> Budget:
        """As a message has it."""
        window_ms = min(max(message.window_ms, WINDOW_MS_MIN), WINDOW_MS_MAX)
        waits = (message.gather_us, message.replicate_us, message.hand_over_us)
        return cls(window_ms / 1000, *(min(each, WAIT_US_MAX) for each in waits))
