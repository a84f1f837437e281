"""Self-descriptions of single daemons, including coordinators on standby. For diagnosis and live views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kera.core.errors import ProtocolError
from kera.core.rpc import Channel, api
from kera.core.rpc.method import call
from kera.core.runtime import MACHINE, Runtime
from kera.v1 import daemon_pb2

DESCRIBE_TIMEOUT_S = 3.0
_STATES = {value: name.removeprefix("HEALTH_STATE_").lower() for name, value in daemon_pb2.HealthState.items()}


@dataclass(frozen=True, slots=True)
class DaemonCheck:
    """A daemon's report on one of its prerequisites."""

    name: str
    state: str
    """``ok``; ``warning``: it works, but needs attention, or the daemon is newer and its state is not known here;
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
    """A daemon's description of itself: its build, place, checks and figures."""

    address: str
    role: str
    """``coordinator``, ``broker`` or ``backup``."""
    version: str
    commit: str
    """The commit that it was built from; empty: not known."""
    native: bool
    """Whether it runs with the native core."""
    node_id: str
    uptime_ms: int
    clock_ahead_ms: float
    """Difference of its time of day from this process's; negative: it is behind."""
    clock_unsure_ms: float
    """Maximum error of `clock_ahead_ms`: half of the round trip."""
    checks: tuple[DaemonCheck, ...]
    file_systems: tuple[FileSystemRoom, ...]
    feature_level: int = 0
    """See `ClusterDescription`."""
    security: bool = False
    """Whether every caller has to authenticate."""


async def describe_daemon(
    address: str, *, timeout_s: float = DESCRIBE_TIMEOUT_S, runtime: Runtime = MACHINE
) -> DaemonDescription:
    """Ask the daemon at `address` (``host:port`` of its open interface). Raises the error if it does not answer."""
    channel = runtime.channel(address)
    clock = runtime.clock
    try:
        # The first call makes the connection; the second one measures the round trip.
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


# -- figures -------------------------------------------------------------------------------------------------------

STREAMS_AT_ONCE = 5_000
"""Maximum number of streams in one request."""


class StreamFigures(NamedTuple):
    """A broker's counts for a stream since it was opened there, and its present replication lag."""

    records_appended: int
    bytes_appended: int
    bytes_read: int
    streamlets: int
    """Number of streamlets that it owns."""
    lag_bytes: int
    lag_ms: int
    epoch_lag_ms: int | None = None
    """How far the least settled entry is behind the clock; None: there are no epochs, or it does not report it."""
    epoch_entry: tuple[int, int] | None = None
    """The streamlet of that entry, and its number there."""
    epochs_held_up_ms: int = 0
    """How far it is behind beyond the grace period; 0 for a history."""


Labels = tuple[str, ...]
"""Names and values of a figure's labels, in turn."""


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """A daemon's counts since its start, and its present state."""

    launch_id: str
    """Id of the start: counts of different starts cannot be compared."""
    uptime_us: int
    """Time since the start, by its own clock."""
    figures: Mapping[str, Mapping[Labels, float]]
    """Figures, by their names in Prometheus and their labels."""
    streams: Mapping[int, StreamFigures]
    """Figures of streams, by id; a broker reports the streams that it has data of."""

    def value(self, name: str, *labels: str) -> float | None:
        """Return one figure; None: this kind or version of daemon does not have it."""
        return self.figures.get(name, {}).get(labels)


async def read_figures(channel: Channel, *, streams_max: int, timeout_s: float) -> DaemonFigures:
    """Ask the daemon behind `channel` for its figures, in several requests if it has many streams.

    Returns at most `streams_max` streams. `timeout_s` is for each answer. Raises the error if it does not answer, and
    `ProtocolError`.
    """
    streams: dict[int, StreamFigures] = {}
    after = 0
    while True:
        request = daemon_pb2.ReadFiguresRequest(
            streams_max=min(streams_max - len(streams), STREAMS_AT_ONCE), after_stream_id=after
        )
        said = await call(channel, api.READ_FIGURES, request, timeout_s=timeout_s)
        for each in said.streams:
            if each.stream_id <= after:
                raise ProtocolError("a daemon reported streams out of order", stream_id=each.stream_id)
            after = each.stream_id
            streams[after] = StreamFigures(
                each.records_appended,
                each.bytes_appended,
                each.bytes_read,
                each.streamlets,
                each.replication_lag_bytes,
                each.replication_lag_ms,
                *_epochs_of(each),
            )
        if not (said.more_streams and said.streams) or len(streams) >= streams_max:
            break
    figures: dict[str, dict[Labels, float]] = {}
    for figure in said.figures:
        figures.setdefault(figure.name, {})[tuple(figure.labels)] = figure.value
    return DaemonFigures(said.launch_id, said.uptime_us, figures, streams)


def _epochs_of(said: daemon_pb2.StreamFigures) -> tuple[int | None, tuple[int, int] | None, int]:
    if not said.HasField("epoch_lag_ms"):
        return None, None, 0
    return said.epoch_lag_ms, (said.epoch_streamlet_id, said.epoch_entry), said.epochs_held_up_ms
