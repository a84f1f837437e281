"""The figures of hops, as metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily

from kera.broker.latency.manager import LatencyManager
from kera.server.monitoring.sources import Steps

SERIES_MAX = 2000
"""Maximum number of series; each hop has two."""


class HopCollector:
    """Mean and p99 of each hop, of streams with a latency constraint. A `Source` of metrics."""

    def __init__(self, manager: LatencyManager, name_of: Callable[[int], str | None]) -> None:
        """`name_of`: returns the name of a stream; None if it is not here."""
        self._manager = manager
        self._name_of = name_of

    def steps(self, *, everything: bool) -> Steps:
        """See `Source`."""
        family = GaugeMetricFamily(
            "kera_broker_latency_hop_seconds",
            "latency of a hop of a stream with a latency constraint, over its window, as this broker measured it",
            labels=["stream", "hop", "consumer_group", "statistic"],
        )
        yield
        if not everything:
            return [family]
        for each in self._manager.figures():
            name = self._name_of(each.stream_id)
            if name is None:
                continue
            if len(family.samples) >= SERIES_MAX:
                break
            labels = [name, each.hop.word, each.consumer_group]
            family.add_metric([*labels, "mean"], each.mean_us / 1e6)
            family.add_metric([*labels, "p99"], each.p99_us / 1e6)
        return [family]
