"""The broker's figures of single streams for live views: current ones, not those of the last heartbeat."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable

from kera.broker.ownership.epoch_lag import furthest_behind
from kera.broker.ownership.stream import Stream
from kera.server.monitoring.figures import OfStreams
from kera.v1 import daemon_pb2


class StreamFigures:
    """The `PerStream` figures of the broker's streams."""

    def __init__(
        self,
        streams: Iterable[Stream],
        now_ms: Callable[[], int],
        *,
        now_us: Callable[[], int],
        may_promise: Callable[[int], bool],
    ) -> None:
        """`now_ms`: the clock by which virtual logs measure the age of their lag. `now_us`: the time of day.

        `may_promise`: whether the broker may now promise that nothing older comes, given the grace of a stream.
        """
        self._streams = streams
        self._now_ms = now_ms
        self._now_us = now_us
        self._may_promise = may_promise

    def of_streams(self, after_stream_id: int, streams_max: int) -> Generator[None, None, OfStreams]:
        """See `PerStream`."""
        behind = (stream for stream in self._streams if stream.stream_id > after_stream_id)
        chosen = heapq.nsmallest(streams_max + 1, behind, key=lambda stream: stream.stream_id)
        found = []
        for stream in chosen[:streams_max]:
            figures = _figures(stream, self._now_ms())
            yield from self._add_epochs(figures, stream)
            found.append(figures)
            yield
        return OfStreams(found, more=len(chosen) > streams_max)

    def _add_epochs(self, figures: daemon_pb2.StreamFigures, stream: Stream) -> Generator[None, None, None]:
        now_us = self._now_us()
        furthest = yield from furthest_behind(stream, now_us, self._may_promise)
        if furthest is not None:
            figures.epoch_lag_ms = furthest.lag_ms(now_us)
            figures.epochs_held_up_ms = furthest.held_up_ms(stream.epochs, now_us)
            figures.epoch_streamlet_id, figures.epoch_entry = furthest.streamlet_id, furthest.entry


def _figures(stream: Stream, now_ms: int) -> daemon_pb2.StreamFigures:
    """Return a stream's figures: its own counts up to the last heartbeat, and those of its streamlets since then."""
    figures = daemon_pb2.StreamFigures(
        stream_id=stream.stream_id,
        records_appended=stream.records_appended,
        bytes_appended=stream.bytes_appended,
        bytes_read=stream.bytes_read,
    )
    for streamlet in stream.streamlets.values():
        figures.records_appended += streamlet.records_appended
        figures.bytes_appended += streamlet.bytes_appended
        figures.bytes_read += streamlet.bytes_read
        figures.streamlets += streamlet.owned
    for log in stream.logs.all() if stream.logs is not None else ():
        if log.lag_bytes:
            figures.replication_lag_bytes += log.lag_bytes
            figures.replication_lag_ms = max(figures.replication_lag_ms, log.lag_ms(now_ms))
    return figures
