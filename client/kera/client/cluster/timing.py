"""How long the SDK waits where no setting says so: one object of a `Cluster`, so that tests need not wait as long."""

from __future__ import annotations

from dataclasses import dataclass

from kera.client.cluster.push_returns import RETURN_DELAY_S
from kera.core.latency.report import INTERVAL_S


@dataclass(frozen=True, slots=True)
class Timing:
    """In seconds."""

    metadata_wait_s: float = 2.0
    """For the coordinator's word where a stream is; after it, what was known before has to do."""
    report_again_s: float = 5.0
    """The same launch of a broker is not reported more often than this."""
    report_timeout_s: float = 5.0
    push_again_s: float = 1.0
    """After a broker could not push, its chunks are pulled for so long."""
    silent_greeting_s: float = 1.0
    """For the greeting of a broker that was silent."""
    interrupt_read_s: float = 0.02
    """A request to read is left open for so long after another range has come; then it is given up, for one with it."""
    latency_report_s: float = INTERVAL_S
    """Between two reports of what chunks of streams with a latency constraint take to their readers."""
    latency_learn_s: float = 5.0
    """The same while nothing is known of a constraint."""
    return_delay_s: float = RETURN_DELAY_S
    """How long what was taken of what a broker has pushed waits for more before the broker is told."""
