"""The figures of a daemon for live views: over gRPC, so that no metrics port needs to be open.

They are the same figures that Prometheus reads, without help texts; for single streams only those that change with each
record, by the stream's id. A rate can be computed from two answers of the same launch only, see ``launch_id``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import NamedTuple, Protocol

from prometheus_client.core import Metric

from kera.v1 import daemon_pb2

STREAMS_AT_ONCE_MAX = 10_000
"""Maximum of streams in one answer; each takes some 40 bytes."""
_CREATED = "_created"
"""Suffix of samples with the time at which a counter was created; a rate of these is useless."""


class OfStreams(NamedTuple):
    """The figures of some streams, one by one."""

    streams: list[daemon_pb2.StreamFigures]
    more: bool
    """Whether there are streams with higher ids."""


class PerStream(Protocol):
    """A source of figures of single streams."""

    def of_streams(self, after_stream_id: int, streams_max: int) -> Generator[None, None, OfStreams]:
        """Return the figures of the first `streams_max` streams above an id, in the order of their ids.

        Yields where it may be interrupted.
        """
        ...


def figures_of(families: Iterable[Metric]) -> list[daemon_pb2.Figure]:
    """Return the samples of metrics as figures."""
    return [
        daemon_pb2.Figure(
            name=sample.name, value=sample.value, labels=[text for pair in sample.labels.items() for text in pair]
        )
        for family in families
        for sample in family.samples
        if not sample.name.endswith(_CREATED)
    ]
