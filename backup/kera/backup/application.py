"""The backup as an application: the stages of its start, one after the other; it stops in the reverse order.

`serve` lists the stages. Each stage is a function, so that a test can make it fail: everything that earlier stages have
started is stopped then. The backup listens before it registers, because the coordinator passes its addresses on. The
connection to the coordinator (`Place.ties`) ends last: as long as the backup writes to its disks, it sends heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from kera.backup.engine import Engine
from kera.backup.health import watch_disks, watch_registration
from kera.backup.metrics import BackupCollector, RequestCounters
from kera.backup.registration import BackupDirectory, BackupRegistration
from kera.backup.service import BackupService
from kera.backup.settings import BackupSettings
from kera.core.base.build import this_build
from kera.core.base.clock import Clock
from kera.core.base.home import expanded
from kera.core.base.settings import setting
from kera.core.base.telemetry import get_logger
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.unix_socket import unix_socket_path
from kera.core.runtime import MACHINE, OpenInterface, Runtime
from kera.server.access.guard import Door
from kera.server.access.settings import guard_of, secure_daemon
from kera.server.feature_level import FEATURE_LEVEL
from kera.server.monitoring.monitor import Monitor
from kera.server.network import Offer, Place, listen, room_of
from kera.v1 import common_pb2

CONNECTION_WEIGHTS = {"frames": 3, "grpc": 1}
"""Shares of the connections for each transport; brokers use frames."""

log = get_logger("kera.backup")

BEATS_UNTIL_TOLD = 1.25
"""Heartbeat intervals after which every broker knows that this backup stops, and opens no more replicas here."""
HANDOVER_CHECK_S = 0.02
"""Time between two checks whether brokers still have open replicas here."""


class Parts(NamedTuple):
    """A backup's service, and the guard in front of it."""

    service: BackupService
    guard: Door
    counters: RequestCounters


@asynccontextmanager
async def serve(
    settings: BackupSettings, runtime: Runtime = MACHINE, *, open_interface: OpenInterface = GrpcServer
) -> AsyncIterator[dict[str, Any]]:
    """Start a backup, yield its addresses and id, and stop it."""
    runtime = secure_daemon(runtime, settings, settings.host)
    async with AsyncExitStack() as stack:
        room = room_of(settings, CONNECTION_WEIGHTS)
        place = await open_place(stack, settings, runtime)
        engine = await start_engine(stack, settings, runtime, place)
        parts = build_service(stack, settings, runtime, place, engine)
        ready = await open_interfaces(stack, settings, runtime, place, parts, room, open_interface)
        place.monitor.add(BackupCollector(parts.counters, engine))
        watch_disks(place.monitor.health, engine)
        registration = build_registration(settings, runtime, place, parts)
        await register(settings, runtime, registration, engine, ready)
        parts.service.registered()
        await stay_registered(place, registration, engine)
        place.monitor.health.started()
        yield {**ready, **place.metrics, "backup_id": registration.backup_id}
        place.monitor.health.stopping()
        if settings.handover_ms and not settings.ephemeral:
            await hand_over(registration, engine, settings.handover_ms, runtime.clock)


async def open_place(stack: AsyncExitStack, settings: BackupSettings, runtime: Runtime) -> Place:
    """Check the settings before anything is created, serve metrics, and lock the directories.

    Raises `InvalidSettings`, and `StartError` if another backup uses them.
    """
    with setting("data_dir"):
        data_dir = expanded(settings.data_dir).absolute()
    settings.check_advertised_address()
    with setting("log_dirs"):
        log_dirs = [expanded(each).absolute() for each in settings.log_dirs]
    monitor = stack.enter_context(Monitor("backup", [data_dir, *log_dirs], runtime=runtime, guarded=settings.security))
    metrics = monitor.serve(settings.host, settings.metrics_port)
    directory = BackupDirectory(data_dir, runtime.new_id, runtime.files, besides=log_dirs)
    stack.callback(directory.close)
    return Place(data_dir, directory, monitor, metrics, await stack.enter_async_context(AsyncExitStack()))


async def start_engine(stack: AsyncExitStack, settings: BackupSettings, runtime: Runtime, place: Place) -> Engine:
    """Read the replicas that earlier launches have left on the disks."""
    place.monitor.health.starting("it reads what is on its disks")
    engine = await Engine.start(settings, place.data_dir, place.directory.load(), runtime)
    stack.push_async_callback(engine.close)
    return engine


def build_service(
    stack: AsyncExitStack, settings: BackupSettings, runtime: Runtime, place: Place, engine: Engine
) -> Parts:
    """Create the handlers of requests, and the guard in front of them."""
    counters = RequestCounters()
    service = BackupService(engine, counters, read_bytes_max=settings.message_bytes_max)
    guard = guard_of(settings, runtime, coordinators=lambda: settings.coordinator, daemon="backup")
    return Parts(service, stack.enter_context(place.monitor.guarded_by(guard)), counters)


async def open_interfaces(
    stack: AsyncExitStack,
    settings: BackupSettings,
    runtime: Runtime,
    place: Place,
    parts: Parts,
    room: Mapping[str, int],
    open_interface: OpenInterface,
) -> dict[str, Any]:
    """Serve frames and gRPC; returns the addresses."""
    guard = parts.guard
    service = guard.guarded({**parts.service.service(), **guard.service()})
    takers = {method: guard.taker(taker, of_daemons=True) for method, taker in parts.service.takers().items()}
    return await listen(
        stack,
        settings,
        runtime,
        Offer(service, [service, guard.guarded(place.monitor.service())], takers, guard),
        unix_socket_path(place.data_dir, "backup"),
        room=room,
        open_interface=open_interface,
    )


def build_registration(settings: BackupSettings, runtime: Runtime, place: Place, parts: Parts) -> BackupRegistration:
    """Create the part that registers the backup, and sends its heartbeats."""
    registration = BackupRegistration(
        settings.coordinator,
        place.directory,
        settings.backup_id,
        access_version=lambda: parts.guard.version,
        runtime=runtime,
    )
    place.ties.push_async_callback(registration.close)
    watch_registration(place.monitor.health, registration, runtime.clock)
    return registration


async def register(
    settings: BackupSettings,
    runtime: Runtime,
    registration: BackupRegistration,
    engine: Engine,
    ready: Mapping[str, Any],
) -> None:
    """Register the backup with the coordinator, for the cluster to which its replicas belong."""
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


async def stay_registered(place: Place, registration: BackupRegistration, engine: Engine) -> None:
    """Send heartbeats until `Place.ties` end."""
    tasks = await place.ties.enter_async_context(asyncio.TaskGroup())
    place.ties.callback(tasks.create_task(registration.keep_alive(lambda: engine.free)).cancel)


async def hand_over(registration: BackupRegistration, engine: Engine, handover_ms: int, clock: Clock) -> None:
    """Let brokers go on at other backups while this one stops and starts again."""
    begun_s = clock.monotonic_s()
    if await registration.leave():
        await asyncio.sleep(min(BEATS_UNTIL_TOLD * registration.heartbeat_interval_s, handover_ms / 1000))
        while engine.replicas_open:
            await asyncio.sleep(HANDOVER_CHECK_S)
            if clock.monotonic_s() >= begun_s + handover_ms / 1000:
                break
    await registration.stops()
    log.info("handed over; a restart in the grace period is not counted as a crash", replicas_open=engine.replicas_open)
