"""The backup's process: ``kera backup`` and ``python -m kera.backup``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kera.backup.engine import Engine
from kera.backup.health import watch_disks, watch_registration
from kera.backup.metrics import BackupCollector, RequestCounters
from kera.backup.registration import BackupDirectory, BackupRegistration
from kera.backup.service import BackupService
from kera.backup.settings import BackupSettings
from kera.core.base.address import advertised_address, host_of
from kera.core.base.build import this_build
from kera.core.base.clock import Clock
from kera.core.base.home import expanded
from kera.core.base.process import descriptor_limit
from kera.core.base.settings import setting
from kera.core.base.telemetry import get_logger
from kera.core.rpc.connections import connections_max, parts_of
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.unix_socket import unix_socket_path
from kera.core.runtime import MACHINE, OpenInterface, Runtime
from kera.server.access.settings import guard_of, secure_daemon
from kera.server.daemon import run_daemon, run_from_environment
from kera.server.feature_level import FEATURE_LEVEL
from kera.server.monitoring.monitor import Monitor
from kera.v1 import common_pb2

CONNECTION_WEIGHTS = {"frames": 3, "grpc": 1}
"""How connections are divided among those who ask for them: brokers use frames."""

log = get_logger("kera.backup")

BEATS_UNTIL_TOLD = 1.25
"""Heartbeat intervals after which every broker has heard that this backup stops, and opens nothing here any more."""
HANDOVER_CHECK_S = 0.02
"""Between two looks whether brokers still have something open here."""


@asynccontextmanager
async def serve(
    settings: BackupSettings, runtime: Runtime = MACHINE, *, open_interface: OpenInterface = GrpcServer
) -> AsyncIterator[dict[str, Any]]:
    """Start a backup, yield where it is, stop it."""
    runtime = secure_daemon(runtime, settings, settings.host)
    async with AsyncExitStack() as stack:
        room = parts_of(connections_max(settings.connections_max, descriptor_limit()), CONNECTION_WEIGHTS)
        with setting("data_dir"):
            data_dir = expanded(settings.data_dir).absolute()
        with setting("advertised_address"):  # before anything is made
            advertised_address(settings.advertised_address, settings.host, settings.port or 1)
        with setting("log_dirs"):
            log_dirs = [expanded(each).absolute() for each in settings.log_dirs]
        monitor = stack.enter_context(
            Monitor("backup", [data_dir, *log_dirs], runtime=runtime, guarded=settings.security)
        )
        metrics = monitor.serve(settings.host, settings.metrics_port)
        directory = BackupDirectory(data_dir, runtime.new_id, runtime.files, besides=log_dirs)
        stack.callback(directory.close)
        # What ties it to the coordinator ends last: as long as it writes to its disks, it says that it is there.
        ties = await stack.enter_async_context(AsyncExitStack())
        monitor.health.starting("it reads what is on its disks")
        engine = await Engine.start(settings, data_dir, directory.load(), runtime)
        stack.push_async_callback(engine.close)
        counters = RequestCounters()
        backup = BackupService(engine, counters, read_bytes_max=settings.message_bytes_max)
        guard = stack.enter_context(
            monitor.guarded_by(guard_of(settings, runtime, coordinators=lambda: settings.coordinator, daemon="backup"))
        )
        service = guard.guarded({**backup.service(), **guard.service()})
        takers = {method: guard.taker(taker, of_daemons=True) for method, taker in backup.takers().items()}

        frames = FrameServer(
            service,
            bulk_bytes_max=settings.message_bytes_max,
            connections_max=room["frames"],
            arriving_bytes_max=settings.arriving_bytes_max,
            takers=takers,
            tls=runtime.tls,
            doorkeeper=guard.doorkeeper,
        )
        stack.push_async_callback(frames.close)
        unix_path = unix_socket_path(data_dir, "backup")
        await frames.listen_unix(unix_path)
        frames_port = await frames.listen_tcp(settings.host, settings.frames_port)
        grpc_server = open_interface(
            [service, guard.guarded(monitor.service())],
            bulk_bytes_max=settings.message_bytes_max,
            connections_max=room["grpc"],
            tls=runtime.tls,
            doorkeeper=guard.doorkeeper,
        )
        stack.push_async_callback(grpc_server.close)
        grpc_port = await grpc_server.listen(settings.host, settings.port)
        ready: dict[str, Any] = {
            **_addresses(settings, grpc_port, frames_port),
            "frames_unix_path": str(unix_path),
            **metrics,
        }
        monitor.add(BackupCollector(counters, engine))
        watch_disks(monitor.health, engine)

        registration = BackupRegistration(
            settings.coordinator,
            directory,
            settings.backup_id,
            access_version=lambda: guard.version,
            runtime=runtime,
        )
        ties.push_async_callback(registration.close)
        watch_registration(monitor.health, registration, runtime.clock)
        free = engine.free
        info = common_pb2.BackupInfo(
            node_id=runtime.node_id(),
            rack=settings.rack,
            segment_bytes=settings.segment_bytes,
            memory_bytes=settings.memory_bytes,
            disk_bytes=engine.disk_bytes,
            free_memory_bytes=free.memory_bytes,
            free_disk_bytes=free.disk_bytes,
            grpc_address=ready["grpc_address"],
            frames_address=ready["frames_address"],
            frames_unix_path=ready["frames_unix_path"],
            version=this_build().version,
            feature_level=FEATURE_LEVEL,
        )
        await registration.register(info, settings.coordinator_timeout_ms / 1000)
        engine.registered(registration.backup_id, registration.cluster_id)
        backup.registered()
        ready["backup_id"] = registration.backup_id
        tasks = await ties.enter_async_context(asyncio.TaskGroup())
        ties.callback(tasks.create_task(registration.keep_alive(lambda: engine.free)).cancel)
        monitor.health.started()
        yield ready
        monitor.health.stopping()
        if settings.handover_ms and not settings.ephemeral:
            await _hand_over(registration, engine, settings.handover_ms, runtime.clock)


def _addresses(settings: BackupSettings, grpc_port: int, frames_port: int) -> dict[str, str]:
    """Where others reach it."""
    with setting("advertised_address"):
        grpc_address = advertised_address(settings.advertised_address, settings.host, grpc_port)
    with setting("advertised_frames_address"):
        frames_host = settings.advertised_frames_address or host_of(settings.advertised_address)
        frames_address = advertised_address(frames_host, settings.host, frames_port)
    return {"grpc_address": grpc_address, "frames_address": frames_address}


async def _hand_over(registration: BackupRegistration, engine: Engine, handover_ms: int, clock: Clock) -> None:
    """This launch was told to stop, and the backup will start again: brokers go on at others meanwhile."""
    begun_s = clock.monotonic_s()
    if await registration.leave():
        await asyncio.sleep(min(BEATS_UNTIL_TOLD * registration.heartbeat_interval_s, handover_ms / 1000))
        while engine.replicas_open:
            await asyncio.sleep(HANDOVER_CHECK_S)
            if clock.monotonic_s() >= begun_s + handover_ms / 1000:
                break
    await registration.stops()
    log.info("handed over; starting again is no crash for a time", replicas_open=engine.replicas_open)


def run(settings: BackupSettings, runtime: Runtime = MACHINE) -> int:
    """Run a backup until it is told to stop; returns the exit code of the process."""
    return run_daemon(
        lambda: serve(settings, runtime),
        name="backup",
        log_level=settings.log_level,
        stop_timeout_s=settings.stop_timeout_s,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BackupSettings, run)


if __name__ == "__main__":
    sys.exit(main())
