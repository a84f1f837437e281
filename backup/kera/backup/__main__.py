"""The backup's process: ``kera backup`` and ``python -m kera.backup``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from kera.backup.engine import FLUSH_TIMEOUT_S, Engine
from kera.backup.metrics import BackupCollector, Counters
from kera.backup.registration import DataDirectory, Registration
from kera.backup.service import BackupService
from kera.backup.settings import BackupSettings
from kera.core.daemon import STOP_TIMEOUT_S, run_daemon, run_from_environment
from kera.core.loop_lag import LoopLag
from kera.core.process import node_id
from kera.core.rpc.address import join_address, unix_socket_path
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.telemetry import serve_metrics
from kera.v1 import common_pb2


@asynccontextmanager
async def serve(settings: BackupSettings) -> AsyncIterator[dict[str, Any]]:
    """Start a backup, yield where it is, stop it."""
    async with AsyncExitStack() as stack:
        data_dir = settings.data_dir.expanduser().absolute()
        directory = DataDirectory(data_dir)
        stack.callback(directory.close)
        engine = await Engine.start(settings, data_dir, directory.load())
        stack.push_async_callback(engine.close)
        counters = Counters()
        backup = BackupService(engine, counters, read_bytes_max=settings.message_bytes_max)
        service = backup.service()

        frames = FrameServer(service, bulk_bytes_max=settings.message_bytes_max)
        stack.push_async_callback(frames.close)
        unix_path = unix_socket_path(data_dir, "backup")
        await frames.listen_unix(unix_path)
        frames_port = await frames.listen_tcp(settings.host, settings.frames_port)
        grpc_server = GrpcServer([service], bulk_bytes_max=settings.message_bytes_max)
        stack.push_async_callback(grpc_server.close)
        grpc_port = await grpc_server.listen(settings.host, settings.port)
        ready: dict[str, Any] = {
            "grpc_address": join_address(settings.host, grpc_port),
            "frames_address": join_address(settings.host, frames_port),
            "frames_unix_path": str(unix_path),
        }
        if settings.metrics_port is not None:
            registry = CollectorRegistry()
            registry.register(BackupCollector(counters, engine))
            lag = LoopLag()
            stack.callback(lag.close)
            registry.register(lag)
            metrics_port = serve_metrics(registry, settings.host, settings.metrics_port)
            ready["metrics_address"] = join_address(settings.host, metrics_port)

        registration = Registration(settings.coordinator, directory)
        stack.push_async_callback(registration.close)
        free = engine.free
        info = common_pb2.BackupInfo(
            node_id=node_id(),
            rack=settings.rack,
            segment_bytes=settings.segment_bytes,
            memory_bytes=settings.memory_bytes,
            disk_bytes=engine.disk_bytes,
            free_memory_bytes=free.memory_bytes,
            free_disk_bytes=free.disk_bytes,
            grpc_address=ready["grpc_address"],
            frames_address=ready["frames_address"],
            frames_unix_path=ready["frames_unix_path"],
        )
        await registration.register(info, settings.coordinator_timeout_ms / 1000)
        engine.registered(registration.backup_id, registration.cluster_id)
        backup.registered()
        ready["backup_id"] = registration.backup_id
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(registration.keep_alive(lambda: engine.free))
            try:
                yield ready
            finally:
                heartbeat.cancel()


def run(settings: BackupSettings) -> int:
    """Run a backup until it is told to stop; returns the exit code of the process."""
    return run_daemon(
        lambda: serve(settings),
        name="backup",
        log_level=settings.log_level,
        stop_timeout_s=FLUSH_TIMEOUT_S + STOP_TIMEOUT_S,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BackupSettings, run)


if __name__ == "__main__":
    sys.exit(main())
