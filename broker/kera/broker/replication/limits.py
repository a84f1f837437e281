"""Limits of replication; see the settings of the broker."""

from __future__ import annotations

from dataclasses import dataclass

from kera.core.rpc.limits import REPLICATED_BYTES_MAX


@dataclass(slots=True)
class ReplicationLimits:
    """The sizes, counts and time-outs that bound a broker's replication; the broker's settings set them."""

    segment_bytes: int
    """Size of a virtual segment."""
    request_bytes_max: int = REPLICATED_BYTES_MAX
    """Maximum of chunks that go to a backup at once."""
    pipelined_bytes_min: int = 256 << 10
    """While a request is under way, the next one is sent only if it has as much; smaller ones go on gathering."""
    in_flight_bytes_max: int = 4 << 20
    """Maximum of a virtual log's requests under way."""
    lag_bytes_max: int = 64 << 20
    """Maximum of a virtual log's data that were appended and are not on backups; then writers wait."""
    wait_ms_max: int = 5_000
    """How long a write waits for backups, before its writer is told that it is not known what will become of it."""
    idle_close_ms: int = 60_000
    """A virtual segment to which nobody has written for so long closes."""
    repair_delay_ms: int = 10_000
    """How long a backup may be away before what it had is repaired."""
