"""Limits of replication; see the settings of the broker."""

from __future__ import annotations

from dataclasses import dataclass

from kera.core.rpc.limits import REPLICATED_BYTES_MAX


@dataclass(slots=True)
class ReplicationLimits:
    """The sizes, counts and time-outs that bound a broker's replication, from the broker's settings."""

    segment_bytes: int
    """Size of a virtual segment."""
    request_bytes_max: int = REPLICATED_BYTES_MAX
    """Maximum size of the chunks in one request to a backup."""
    pipelined_bytes_min: int = 256 << 10
    """While a request is under way, the next one is sent only if it has this size; smaller ones gather more."""
    in_flight_bytes_max: int = 4 << 20
    """Maximum size of a virtual log's requests under way."""
    lag_bytes_max: int = 64 << 20
    """Maximum size of a virtual log's data that is not on backups yet; beyond it, writers wait."""
    wait_ms_max: int = 5_000
    """How long a write waits for backups before its writer gets the error that the outcome is unknown."""
    idle_close_ms: int = 60_000
    """A virtual segment without new data for this time is closed."""
    repair_delay_ms: int = 10_000
    """How long a backup may be away before its replicas are copied elsewhere."""
