"""What a single daemon tells of itself: any of them, also a coordinator that stands by. For diagnosis."""

from __future__ import annotations

from dataclasses import dataclass

from kera.core.rpc import api
from kera.core.rpc.method import call
from kera.core.runtime import MACHINE, Runtime
from kera.v1 import daemon_pb2

DESCRIBE_TIMEOUT_S = 3.0
_STATES = {value: name.removeprefix("HEALTH_STATE_").lower() for name, value in daemon_pb2.HealthState.items()}


@dataclass(frozen=True, slots=True)
class DaemonCheck:
    """What a daemon says of one of the things that its work needs."""

    name: str
    state: str
    """``ok``; ``warning``: it works, and somebody should look at this, or it is newer and says what is not known here;
    ``problem``: it cannot do its work."""
    text: str


@dataclass(frozen=True, slots=True)
class FileSystemRoom:
    """The file system of a directory that a daemon writes to."""

    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class DaemonDescription:
    """See the head of this module."""

    address: str
    role: str
    """``coordinator``, ``broker`` or ``backup``."""
    version: str
    commit: str
    """Empty: nobody knows."""
    native: bool
    """Its native core runs."""
    node_id: str
    uptime_ms: int
    clock_ahead_ms: float
    """Its time of day compared with this process's; negative: it is behind."""
    clock_unsure_ms: float
    """By so much that may be wrong: half of what asking took."""
    checks: tuple[DaemonCheck, ...]
    file_systems: tuple[FileSystemRoom, ...]
    feature_level: int = 0
    """See `ClusterDescription`."""
    security: bool = False
    """Whoever asks it for anything has to authenticate."""


async def describe_daemon(
    address: str, *, timeout_s: float = DESCRIBE_TIMEOUT_S, runtime: Runtime = MACHINE
) -> DaemonDescription:
    """Ask the daemon at `address` (``host:port`` of its open interface). Raises what keeps it from answering."""
    channel = runtime.channel(address)
    clock = runtime.clock
    try:
        # The first call makes the connection: what is measured is the second one.
        await call(channel, api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest(), timeout_s=timeout_s)
        sent_s, sent_us = clock.monotonic_s(), clock.now_us()
        said = await call(channel, api.DESCRIBE_DAEMON, daemon_pb2.DescribeDaemonRequest(), timeout_s=timeout_s)
        took_ms = (clock.monotonic_s() - sent_s) * 1000
    finally:
        await channel.close()
    return DaemonDescription(
        address=address,
        role=said.role,
        version=said.version,
        commit=said.commit,
        native=said.native,
        node_id=said.node_id,
        uptime_ms=said.uptime_ms,
        clock_ahead_ms=(said.now_us - sent_us) / 1000 - took_ms / 2,
        clock_unsure_ms=took_ms / 2,
        checks=tuple(DaemonCheck(each.name, _STATES.get(each.state, "warning"), each.text) for each in said.checks),
        file_systems=tuple(FileSystemRoom(each.path, each.size_bytes, each.free_bytes) for each in said.file_systems),
        feature_level=said.feature_level,
        security=said.security,
    )
