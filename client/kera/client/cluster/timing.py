"""Times that no setting controls: one object of a `Cluster`, so that tests can make them shorter."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client.cluster.push_returns import RETURN_DELAY_S
from kera.core.latency.report import INTERVAL_S


@dataclass(frozen=True, slots=True)
class Timing:
    """Times in seconds."""

    metadata_wait_s: float = 2.0
    """Wait for the coordinator's description of a stream; after it, the last known description is used."""
    report_again_s: float = 5.0
    """Minimum time between two reports of the same launch of a broker."""
    report_timeout_s: float = 5.0
    push_again_s: float = 1.0
    """How long chunks are pulled from a broker that could not push, before it is tried again."""
    silent_greeting_s: float = 1.0
    """Wait for the greeting of a broker that was silent."""
    interrupt_read_s: float = 0.02
    """How long a request to read stays open after another range has come, before a request with this range replaces
    it."""
    latency_report_s: float = INTERVAL_S
    """Time between two reports of reader latencies, for streams with a latency constraint."""
    latency_learn_s: float = 5.0
    """Time between two reports while no constraint is known."""
    return_delay_s: float = RETURN_DELAY_S
    """How long returns of pushed data wait for more before they are sent to the broker."""
