"""The broker's process: ``kera broker`` and ``python -m kera.broker``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kera.broker.counters import Counters, PushTotals
from kera.broker.engine import LogEngine
from kera.broker.figures import StreamFigures
from kera.broker.health import watch_clock, watch_log, watch_registration
from kera.broker.heartbeat import HeartbeatReport
from kera.broker.latency.manager import LatencyManager
from kera.broker.latency.series import HopCollector
from kera.broker.metrics import BrokerCollector
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.orders import Orders
from kera.broker.ownership.streams import name_of, not_here
from kera.broker.ownership.unknown import UnknownReport
from kera.broker.registration import BrokerDirectory, BrokerRegistration
from kera.broker.serving.push import Push
from kera.broker.serving.push_server import PushServer
from kera.broker.serving.service import BrokerService
from kera.broker.settings import BrokerSettings
from kera.broker.storage.index import OpenIndex, SegmentIndex
from kera.core.base.address import advertised_address, host_of
from kera.core.base.build import this_build
from kera.core.base.cpus import parse_cpus, run_on
from kera.core.base.home import expanded
from kera.core.base.process import descriptor_limit
from kera.core.base.settings import setting
from kera.core.base.telemetry import get_logger
from kera.core.errors import StaleEpoch
from kera.core.rpc.connections import connections_max, parts_of
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.unix_socket import unix_socket_path
from kera.core.runtime import MACHINE, OpenInterface, Runtime
from kera.core.tracing import tracing_of
from kera.server.access.settings import guard_of, secure_daemon
from kera.server.daemon import run_daemon, run_from_environment
from kera.server.feature_level import FEATURE_LEVEL
from kera.server.monitoring.monitor import Monitor
from kera.v1 import common_pb2

CONNECTION_WEIGHTS = {"frames": 2, "grpc": 1, "push": 1}
"""How connections are divided among those who ask for them."""

log = get_logger("kera.broker")


def _watch(monitor: Monitor, engine: LogEngine, broker: BrokerService, counters: Counters, pushed: PushTotals) -> None:
    collector = BrokerCollector(
        counters,
        pushed,
        broker.latencies,
        engine,
        may_promise=broker.may_promise,
        clock_offset=broker.clock_offset,
    )
    monitor.add(collector)
    monitor.add(HopCollector(broker.latency, partial(name_of, engine.streams)))
    figures = StreamFigures(
        engine.streams,
        lambda: engine.replication.logs.now_ms,
        now_us=lambda: engine.memory.now_us,
        may_promise=broker.may_promise,
    )
    monitor.watch_streams(figures)
    watch_log(monitor.health, engine)
    watch_clock(monitor.health, broker.clock_offset)


@asynccontextmanager
async def serve(
    settings: BrokerSettings,
    runtime: Runtime = MACHINE,
    *,
    open_interface: OpenInterface = GrpcServer,
    open_index: OpenIndex = SegmentIndex.open_checked,
) -> AsyncIterator[dict[str, Any]]:
    """Start a broker, yield where it is, stop it."""
    runtime = secure_daemon(runtime, settings, settings.host)
    async with AsyncExitStack() as stack:
        room = parts_of(connections_max(settings.connections_max, descriptor_limit()), CONNECTION_WEIGHTS)
        data_dir = _prepare(settings)
        monitor = stack.enter_context(Monitor("broker", [data_dir], runtime=runtime, guarded=settings.security))
        metrics = monitor.serve(settings.host, settings.metrics_port)
        directory = BrokerDirectory(data_dir, runtime.new_id, runtime.files)
        stack.callback(directory.close)
        # What ties it to the coordinator ends last: as long as it writes to its disk, it says that it is there.
        ties = await stack.enter_async_context(AsyncExitStack())
        monitor.health.starting("it reads what is on its disk and in its memory")
        engine = await LogEngine.start(
            settings, data_dir, runtime, directory_id=directory.load_directory_id(), open_index=open_index
        )
        stack.push_async_callback(engine.close)
        arena, counters, pushed = engine.arena, Counters(), PushTotals()
        guard = stack.enter_context(
            monitor.guarded_by(
                guard_of(
                    settings,
                    runtime,
                    name_of=partial(name_of, engine.streams),
                    unknown=not_here,
                    coordinators=lambda: settings.coordinator,
                    daemon="broker",
                )
            )
        )
        leader = CoordinatorEpoch(wanted=engine.streams.moved_starts.hurry)
        broker = BrokerService(
            engine.streams,
            engine.memory,
            engine.replication,
            counters,
            pump=engine.replicator.pump,
            read_bytes_max=settings.message_bytes_max,
            orders=Orders(engine.streams, engine.memory, engine.takeovers, coordinator=leader),
            lease=Lease(runtime.clock.boottime_s),
            clock_offset=ClockOffset(lambda: engine.memory.now_us),
            guard=guard,
            tracing=tracing_of(settings, "kera-broker"),
            latency=LatencyManager(runtime.clock),
        )
        stack.push_async_callback(broker.close)
        service = broker.service()

        frames = FrameServer(
            service,
            bulk_bytes_max=settings.message_bytes_max,
            connections_max=room["frames"],
            arriving_bytes_max=settings.arriving_bytes_max,
            takers=broker.takers(),
            tls=runtime.tls,
            doorkeeper=guard.doorkeeper,
        )
        stack.push_async_callback(frames.close)
        unix_path = unix_socket_path(data_dir, "broker")
        await frames.listen_unix(unix_path, settings.unix_socket_mode)
        frames_port = await frames.listen_tcp(settings.host, settings.frames_port)
        push = PushServer(
            Push(
                engine.streams,
                arena,
                engine.memory,
                pushed,
                asyncio.get_running_loop(),
                holds=broker.latency.hand_over,
                hold_timer=engine.hold_timer,
            ),
            arena,
            connections_max=room["push"],
            guard=guard,
            mode=settings.unix_socket_mode,
        )
        stack.push_async_callback(push.close)
        push_path = unix_socket_path(data_dir, "push")
        push.bind(push_path)
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
            "push_unix_path": str(push_path),
            "arena_path": str(arena.path),
            **metrics,
        }
        _watch(monitor, engine, broker, counters, pushed)

        registration = BrokerRegistration(
            settings.coordinator,
            directory,
            engine.replicator.update_backups,
            leader=leader,
            report=HeartbeatReport(
                engine.streams,
                engine.takeovers.progress,
                clock=runtime.clock,
                replication=engine.replication,
                unknown=UnknownReport(engine.streams, lambda: leader.value),
                latency=broker.latency,
            ),
            lease=broker.lease,
            clock_offset=broker.clock_offset,
            fences=engine.streams.fences,
            owners=broker.producer_owners,
            access_version=lambda: guard.version,
            chosen_id=settings.broker_id,
            runtime=runtime,
        )
        ties.push_async_callback(registration.close)
        watch_registration(monitor.health, registration, broker.lease, runtime.clock)
        info = common_pb2.BrokerInfo(
            node_id=runtime.node_id(),
            grpc_address=ready["grpc_address"],
            frames_address=ready["frames_address"],
            frames_unix_path=ready["frames_unix_path"],
            push_unix_path=ready["push_unix_path"],
            segment_bytes=settings.segment_bytes,
            arena_bytes=settings.arena_bytes,
            version=this_build().version,
            feature_level=FEATURE_LEVEL,
            cpus=settings.cpus,
        )
        owned = await registration.register(
            info,
            settings.coordinator_timeout_ms / 1000,
            lost_memory=engine.restart.found.lost_memory,
            held=await asyncio.to_thread(engine.held_streams),
        )
        await engine.own(
            owned,
            registration.broker_id,
            registration.broker_epoch,
            registration.recovered_before_epoch,
            elsewhere=registration.elsewhere_stream_ids,
            has_holes=registration.has_holes,
            directory_id=registration.directory_id,
        )
        broker.registered(registration.broker_id, owned, registration.broker_epoch)
        await push.start(registration.broker_id, registration.broker_epoch)
        ready["broker_id"] = registration.broker_id
        tasks = await ties.enter_async_context(asyncio.TaskGroup())
        asking = partial(broker.producer_owners.ask_for_ever, registration.find_producers)
        for told in (registration.keep_alive, engine.replicator.until_fenced, asking):
            ties.callback(tasks.create_task(_until_replaced(told, broker)).cancel)
        monitor.health.started()
        yield ready
        monitor.health.stopping()
        if settings.handover_ms and not settings.ephemeral:
            await _hand_over(registration, broker, settings.handover_ms)


def _prepare(settings: BrokerSettings) -> Path:
    """Check the settings before anything is made; returns the data directory. Raises `InvalidSettings`."""
    with setting("advertised_address"):
        advertised_address(settings.advertised_address, settings.host, settings.port or 1)
    if settings.cpus:  # before there are other threads, and before memory is given
        with setting("cpus"):
            run_on(parse_cpus(settings.cpus))
    with setting("data_dir"):
        return expanded(settings.data_dir).absolute()


def _addresses(settings: BrokerSettings, grpc_port: int, frames_port: int) -> dict[str, str]:
    """Where others reach it."""
    with setting("advertised_address"):
        grpc_address = advertised_address(settings.advertised_address, settings.host, grpc_port)
    with setting("advertised_frames_address"):
        frames_host = settings.advertised_frames_address or host_of(settings.advertised_address)
        frames_address = advertised_address(frames_host, settings.host, frames_port)
    return {"grpc_address": grpc_address, "frames_address": frames_address}


async def _hand_over(registration: BrokerRegistration, broker: BrokerService, handover_ms: int) -> None:
    """This launch was told to stop, and the broker will start again: others go on meanwhile."""
    answer = await registration.hand_over(handover_ms)
    broker.orders.seal_all()
    if answer is not None:
        await registration.stops()
        log.info(
            "handed over; starting again is no crash for a time",
            streamlets=answer.streamlets_given,
            streamlets_that_wait=answer.streamlets_left,
            grace_ms=answer.grace_ms,
        )


async def _until_replaced(told: Callable[[], Awaitable[None]], broker: BrokerService) -> None:
    """Wait for what tells that a newer launch has taken over; from then on nothing is acknowledged."""
    try:
        await told()
    except StaleEpoch:
        broker.writer.fence()
        raise


def run(settings: BrokerSettings, runtime: Runtime = MACHINE) -> int:
    """Run a broker until it is told to stop; returns the exit code of the process."""
    return run_daemon(
        lambda: serve(settings, runtime),
        name="broker",
        log_level=settings.log_level,
        stop_timeout_s=settings.stop_timeout_s,
    )


def main() -> int:
    """Run with settings from the environment."""
    return run_from_environment(BrokerSettings, run)


if __name__ == "__main__":
    sys.exit(main())
