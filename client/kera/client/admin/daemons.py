"""A single daemon's description of itself: any daemon, also a coordinator on standby. For diagnosis and live views."""

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
    """A daemon's report on one of the things that its work needs."""

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
    """A daemon's description of itself: its build, place, checks and figures."""

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
    """Every caller has to authenticate."""


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


# -- figures -------------------------------------------------------------------------------------------------------

STREAMS_AT_ONCE = 5_000
"""Asked for in one request."""


class StreamFigures(NamedTuple):
    """A broker's counts of a stream since it was opened there; lag: of its replication, now."""

    records_appended: int
    bytes_appended: int
    bytes_read: int
    streamlets: int
    """That it owns."""
    lag_bytes: int
    lag_ms: int
    epoch_lag_ms: int | None = None
    """How far the entry that is settled least is behind the clock; None: there are no epochs, or it does not say."""
    epoch_entry: tuple[int, int] | None = None
    """That one's streamlet, and its number there."""
    epochs_held_up_ms: int = 0
    """By how much more than the grace; of a history 0."""


Labels = tuple[str, ...]
"""Names and values of a figure's labels, in turn."""


@dataclass(frozen=True, slots=True)
class DaemonFigures:
    """A daemon's counts since its start, and its present state."""

    launch_id: str
    """Id of the start: counts of another start cannot be compared."""
    uptime_us: int
    """By its own clock."""
    figures: Mapping[str, Mapping[Labels, float]]
    """By names as Prometheus has them."""
    streams: Mapping[int, StreamFigures]
    """By id; of a broker, those of which it has something."""

    def value(self, name: str, *labels: str) -> float | None:
        """One figure; None: the daemon has none of that name, as others or older ones do."""
        return self.figures.get(name, {}).get(labels)


async def read_figures(channel: Channel, *, streams_max: int, timeout_s: float) -> DaemonFigures:
    """Ask the daemon behind `channel`, once, or as often as it has streams up to `streams_max`.

    `timeout_s` is that of each answer. Raises what keeps it from answering, and `ProtocolError`.
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
