"""The coordinator's metrics: an adapter from its hooks to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from kera.coordinator.coordinator import Coordinator


class CoordinatorMetrics:
    """Made once per registry; `observe` is the hook of the service."""

    def __init__(self, registry: CollectorRegistry, coordinator: Coordinator) -> None:
        self._requests = Counter(
            "kera_coordinator_requests",
            "Requests answered, by method and outcome: ok, the code of the error, or cancelled by the caller.",
            ("method", "outcome"),
            registry=registry,
        )
        brokers = Gauge("kera_coordinator_brokers_alive", "Brokers whose heartbeats arrive.", registry=registry)
        brokers.set_function(lambda: coordinator.brokers_alive)
        backups = Gauge("kera_coordinator_backups_alive", "Backups whose heartbeats arrive.", registry=registry)
        backups.set_function(lambda: coordinator.backups_alive)
        streams = Gauge("kera_coordinator_streams", "Streams that exist.", registry=registry)
        streams.set_function(lambda: coordinator.stream_count)

    def observe(self, method: str, outcome: str) -> None:
        """Count a request."""
        self._requests.labels(method, outcome).inc()
