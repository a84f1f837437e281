"""The coordinator's process: ``kera coordinator`` and ``python -m kera.coordinator``."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kera.coordinator.brokers import GrpcBrokers
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.lmdb_store import LmdbStore
from kera.coordinator.metrics import CoordinatorMetrics
from kera.coordinator.service import coordinator_service
from kera.coordinator.settings import CoordinatorSettings
from kera.core.clock import SystemClock
from kera.core.daemon import run_daemon, run_from_environment
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.telemetry import CollectorRegistry, serve_metrics


@asynccontextmanager
async def serve(settings: CoordinatorSettings) -> AsyncIterator[dict[str, Any]]:
    """Start a coordinator, yield where it is, stop it."""
    async with AsyncExitStack() as stack:
        store = LmdbStore(settings.data_dir, bytes_max=settings.metadata_bytes_max)
        stack.push_async_callback(store.close)
        brokers = GrpcBrokers(timeout_ms=settings.broker_timeout_ms)
        stack.push_async_callback(brokers.close)
        coordinator = await Coordinator.load(store, brokers, SystemClock(), settings)
        stack.push_async_callback(coordinator.close)

        registry = CollectorRegistry()
        metrics = CoordinatorMetrics(registry, coordinator)
        server = GrpcServer([coordinator_service(coordinator, metrics.observe)])
        stack.push_async_callback(server.close)
        port = await server.listen(settings.host, settings.port)
        ready: dict[str, Any] = {"grpc_address": f"{settings.host}:{port}"}
        if settings.metrics_port is not None:
            metrics_port = serve_metrics(registry, settings.host, settings.metrics_port)
            ready["metrics_address"] = f"{settings.host}:{metrics_port}"
        yield ready


def run(settings: CoordinatorSettings) -> int:
    """Run a coordinator until it is told to stop; returns the exit code of the process."""
    return run_daemon(lambda: serve(settings), name="coordinator", log_level=settings.log_level)


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(CoordinatorSettings, run)


if __name__ == "__main__":
    sys.exit(main())
