"""The broker's process: ``kera broker`` and ``python -m kera.broker``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from kera.broker.heartbeat_report import HeartbeatReport
from kera.broker.log_engine import FLUSH_TIMEOUT_S, LogEngine
from kera.broker.metrics import BrokerCollector, Counters, PushTotals
from kera.broker.push import Push
from kera.broker.push_server import PushServer
from kera.broker.registration import DataDirectory, Registration
from kera.broker.service import BrokerService
from kera.broker.settings import BrokerSettings
from kera.core.daemon import STOP_TIMEOUT_S, run_daemon, run_from_environment
from kera.core.errors import StaleEpoch
from kera.core.loop_lag import LoopLag
from kera.core.process import node_id
from kera.core.rpc.address import join_address, unix_socket_path
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.telemetry import serve_metrics
from kera.v1 import common_pb2


@asynccontextmanager
async def serve(settings: BrokerSettings) -> AsyncIterator[dict[str, Any]]:
    """Start a broker, yield where it is, stop it."""
    async with AsyncExitStack() as stack:
        data_dir = settings.data_dir.expanduser().absolute()
        directory = DataDirectory(data_dir)
        stack.callback(directory.close)
        engine = await LogEngine.start(settings, data_dir)
        stack.push_async_callback(engine.close)
        arena, counters, pushed = engine.arena, Counters(), PushTotals()
        broker = BrokerService(
            engine.streams,
            engine.memory,
            engine.replication,
            counters,
            pump=engine.replicator.pump,
            read_bytes_max=settings.message_bytes_max,
            takeovers=engine.takeovers,
        )
        stack.push_async_callback(broker.close)
        service = broker.service()

        frames = FrameServer(service, bulk_bytes_max=settings.message_bytes_max)
        stack.push_async_callback(frames.close)
        unix_path = unix_socket_path(data_dir, "broker")
        await frames.listen_unix(unix_path)
        frames_port = await frames.listen_tcp(settings.host, settings.frames_port)
        push = PushServer(Push(engine.streams, arena, engine.memory, pushed, asyncio.get_running_loop()), arena)
        stack.push_async_callback(push.close)
        push_path = unix_socket_path(data_dir, "push")
        push.bind(push_path)
        grpc_server = GrpcServer([service], bulk_bytes_max=settings.message_bytes_max)
        stack.push_async_callback(grpc_server.close)
        grpc_port = await grpc_server.listen(settings.host, settings.port)
        ready: dict[str, Any] = {
            "grpc_address": join_address(settings.host, grpc_port),
            "frames_address": join_address(settings.host, frames_port),
            "frames_unix_path": str(unix_path),
            "push_unix_path": str(push_path),
            "arena_path": str(arena.path),
        }
        if settings.metrics_port is not None:
            registry = CollectorRegistry()
            registry.register(BrokerCollector(counters, pushed, engine))
            lag = LoopLag()
            stack.callback(lag.close)
            registry.register(lag)
            metrics_port = serve_metrics(registry, settings.host, settings.metrics_port)
            ready["metrics_address"] = join_address(settings.host, metrics_port)

        registration = Registration(
            settings.coordinator,
            directory,
            engine.replicator.backups_are,
            on_coordinator=broker.orders.heard_of,
            report=HeartbeatReport(engine.streams, engine.takeovers.progress, replication=engine.replication),
            lease=broker.lease,
            fences=engine.streams.fences,
        )
        stack.push_async_callback(registration.close)
        info = common_pb2.BrokerInfo(
            node_id=node_id(),
            grpc_address=ready["grpc_address"],
            frames_address=ready["frames_address"],
            frames_unix_path=ready["frames_unix_path"],
            push_unix_path=ready["push_unix_path"],
            segment_bytes=settings.segment_bytes,
            arena_bytes=settings.arena_bytes,
        )
        owned = await registration.register(
            info, settings.coordinator_timeout_ms / 1000, lost_memory=engine.restart.found.lost_memory
        )
        await engine.own(owned, registration.broker_id, registration.broker_epoch, registration.recovered_before_epoch)
        broker.registered(registration.broker_id, owned, registration.broker_epoch)
        await push.start(registration.broker_id, registration.broker_epoch)
        ready["broker_id"] = registration.broker_id
        async with asyncio.TaskGroup() as tasks:
            heartbeat = tasks.create_task(_until_replaced(registration.keep_alive, broker))
            fenced = tasks.create_task(_until_replaced(engine.replicator.until_fenced, broker))
            try:
                yield ready
            finally:
                heartbeat.cancel()
                fenced.cancel()


async def _until_replaced(told: Callable[[], Awaitable[None]], broker: BrokerService) -> None:
    """Wait for what tells that a newer launch has taken over; from then on nothing is acknowledged."""
    try:
        await told()
    except StaleEpoch:
        broker.writer.fence()
        raise


def run(settings: BrokerSettings) -> int:
    """Run a broker until it is told to stop; returns the exit code of the process."""
    return run_daemon(
        lambda: serve(settings),
        name="broker",
        log_level=settings.log_level,
        stop_timeout_s=FLUSH_TIMEOUT_S + STOP_TIMEOUT_S,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BrokerSettings, run)


if __name__ == "__main__":
    sys.exit(main())
