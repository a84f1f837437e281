"""The figures of a daemon for live views: over gRPC, so that no metrics port needs to be open.

The same figures as Prometheus reads, without help texts; per stream those that change with each record, by the
stream's id. Two answers of one launch make a rate; of two launches they do not, see ``launch_id``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import NamedTuple, Protocol

from prometheus_client.core import Metric

from kera.v1 import daemon_pb2

STREAMS_AT_ONCE_MAX = 10_000
"""In one answer, some 40 bytes each."""
_CREATED = "_created"
"""Samples that tell since when there is a counter, which nobody makes a rate of."""


class OfStreams(NamedTuple):
    """The figures of some streams, one by one."""

    streams: list[daemon_pb2.StreamFigures]
    more: bool
    """There are others behind them."""


class PerStream(Protocol):
    """A source of figures of single streams."""

    def of_streams(self, after_stream_id: int, streams_max: int) -> Generator[None, None, OfStreams]:
        """The figures of the first `streams_max` streams with higher ids, by id; yields where it may be interrupted."""
        ...


def figures_of(families: Iterable[Metric]) -> list[daemon_pb2.Figure]:
    """The samples of metrics."""
    return [
        daemon_pb2.Figure(
            name=sample.name, value=sample.value, labels=[text for pair in sample.labels.items() for text in pair]
        )
        for family in families
        for sample in family.samples
        if not sample.name.endswith(_CREATED)
    ]
