"""The broker as an application: the stages of its start, one after the other; it stops in the reverse order.

`serve` lists the stages. Each stage is a function, so that a test can let it fail: everything that the stages before it
have started is stopped again. Two orders matter:

* The broker listens before it registers, because the coordinator passes its addresses on. It serves no stream before
  `own_streamlets`.
* The ties to the coordinator (`Place.ties`) end last, so the broker sends heartbeats as long as it writes to its disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kera.broker.counters import Counters, PushTotals
from kera.broker.engine import LogEngine
from kera.broker.figures import StreamFigures
from kera.broker.health import watch_clock, watch_log, watch_registration
from kera.broker.heartbeat import HeartbeatReport
from kera.broker.latency.series import HopCollector
from kera.broker.metrics import BrokerCollector
from kera.broker.ownership.clock_offset import ClockOffset
from kera.broker.ownership.coordinator_epoch import CoordinatorEpoch
from kera.broker.ownership.lease import Lease
from kera.broker.ownership.orders import Orders
from kera.broker.ownership.streams import name_of, not_here
from kera.broker.ownership.unknown import UnknownReport
from kera.broker.plugins import Plugins
from kera.broker.registration import BrokerDirectory, BrokerRegistration
from kera.broker.serving.push import Push
from kera.broker.serving.push_server import PushServer
from kera.broker.serving.service import BrokerService
from kera.broker.settings import BrokerSettings
from kera.broker.storage.index import OpenIndex, SegmentIndex
from kera.core.base.build import this_build
from kera.core.base.cpus import parse_cpus, run_on
from kera.core.base.home import expanded
from kera.core.base.settings import setting
from kera.core.base.telemetry import get_logger
from kera.core.errors import StaleEpoch
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.rpc.unix_socket import unix_socket_path
from kera.core.runtime import MACHINE, OpenInterface, Runtime
from kera.core.tracing import tracing_of
from kera.server.access.guard import Door
from kera.server.access.settings import guard_of, secure_daemon
from kera.server.feature_level import FEATURE_LEVEL
from kera.server.monitoring.monitor import Monitor
from kera.server.network import Offer, Place, listen, room_of
from kera.v1 import common_pb2

CONNECTION_WEIGHTS = {"frames": 2, "grpc": 1, "push": 1}
"""The shares of the interfaces in the maximum number of connections."""

log = get_logger("kera.broker")


class Parts(NamedTuple):
    """A broker's service, and the parts that its metrics and its registration use."""

    service: BrokerService
    plugins: Plugins
    guard: Door
    leader: CoordinatorEpoch
    counters: Counters
    pushed: PushTotals


@asynccontextmanager
async def serve(
    settings: BrokerSettings,
    runtime: Runtime = MACHINE,
    *,
    open_interface: OpenInterface = GrpcServer,
    open_index: OpenIndex = SegmentIndex.open_checked,
) -> AsyncIterator[dict[str, Any]]:
    """Start a broker, yield its addresses, paths and id, and stop it at the end."""
    runtime = secure_daemon(runtime, settings, settings.host)
    async with AsyncExitStack() as stack:
        room = room_of(settings, CONNECTION_WEIGHTS)
        place = await open_place(stack, settings, runtime)
        engine = await start_engine(stack, settings, runtime, place, open_index)
        parts = build_service(stack, settings, runtime, place, engine)
        ready = await open_interfaces(stack, settings, runtime, place, parts, room, open_interface)
        push = bind_push(stack, settings, place, engine, parts, room["push"])
        ready |= {"push_unix_path": str(_push_path(place)), "arena_path": str(engine.arena.path), **place.metrics}
        watch(place.monitor, engine, parts)
        registration = build_registration(settings, runtime, place, engine, parts)
        owned = await register(settings, runtime, registration, engine, ready)
        await own_streamlets(registration, engine, parts, owned)
        await push.start(registration.broker_id, registration.broker_epoch)
        await stay_registered(place, registration, engine, parts.service)
        place.monitor.health.started()
        yield {**ready, "broker_id": registration.broker_id}
        place.monitor.health.stopping()
        if settings.handover_ms and not settings.ephemeral:
            await hand_over(registration, parts.service, settings.handover_ms)


async def open_place(stack: AsyncExitStack, settings: BrokerSettings, runtime: Runtime) -> Place:
    """Check the settings before anything else, serve metrics, and lock the data directory.

    Raises `InvalidSettings`, and `StartError` if another broker uses the data directory.
    """
    settings.check_advertised_address()
    if settings.cpus:  # before other threads start, and before memory is allocated
        with setting("cpus"):
            run_on(parse_cpus(settings.cpus))
    with setting("data_dir"):
        data_dir = expanded(settings.data_dir).absolute()
    monitor = stack.enter_context(Monitor("broker", [data_dir], runtime=runtime, guarded=settings.security))
    metrics = monitor.serve(settings.host, settings.metrics_port)
    directory = BrokerDirectory(data_dir, runtime.new_id, runtime.files)
    stack.callback(directory.close)
    return Place(data_dir, directory, monitor, metrics, await stack.enter_async_context(AsyncExitStack()))


async def start_engine(
    stack: AsyncExitStack, settings: BrokerSettings, runtime: Runtime, place: Place, open_index: OpenIndex
) -> LogEngine:
    """Start the log engine, which reads the data of earlier launches on disk and in shared memory."""
    place.monitor.health.starting("it reads what is on its disk and in its memory")
    directory_id = place.directory.load_directory_id()
    engine = await LogEngine.start(settings, place.data_dir, runtime, directory_id=directory_id, open_index=open_index)
    stack.push_async_callback(engine.close)
    return engine


def build_service(
    stack: AsyncExitStack, settings: BrokerSettings, runtime: Runtime, place: Place, engine: LogEngine
) -> Parts:
    """Create the request handlers, and the guard in front of them."""
    guard = guard_of(
        settings,
        runtime,
        name_of=partial(name_of, engine.streams),
        unknown=not_here,
        coordinators=lambda: settings.coordinator,
        daemon="broker",
    )
    guard = stack.enter_context(place.monitor.guarded_by(guard))
    leader = CoordinatorEpoch(wanted=engine.streams.moved_starts.hurry)
    counters = Counters()
    plugins = Plugins(
        engine.streams,
        engine.replication,
        engine.replicator.pump,
        guard=guard,
        clock=runtime.clock,
        tracing=tracing_of(settings, "kera-broker"),
    )
    service = BrokerService(
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
        hooks=plugins.of_requests,
    )
    stack.push_async_callback(service.close)
    return Parts(service, plugins, guard, leader, counters, PushTotals())


async def open_interfaces(
    stack: AsyncExitStack,
    settings: BrokerSettings,
    runtime: Runtime,
    place: Place,
    parts: Parts,
    room: dict[str, int],
    open_interface: OpenInterface,
) -> dict[str, Any]:
    """Serve frames and gRPC; return the addresses."""
    service = parts.service.service()
    return await listen(
        stack,
        settings,
        runtime,
        Offer(service, [service, parts.guard.guarded(place.monitor.service())], parts.service.takers(), parts.guard),
        unix_socket_path(place.data_dir, "broker"),
        room=room,
        open_interface=open_interface,
        unix_socket_mode=settings.unix_socket_mode,
    )


def bind_push(
    stack: AsyncExitStack,
    settings: BrokerSettings,
    place: Place,
    engine: LogEngine,
    parts: Parts,
    connections_max: int,
) -> PushServer:
    """Bind the push socket; readers cannot connect before `PushServer.start`."""
    push = Push(
        engine.streams,
        engine.arena,
        engine.memory,
        parts.pushed,
        asyncio.get_running_loop(),
        holds=parts.plugins.latency.hand_over,
        hold_timer=parts.plugins.hold_timer,
    )
    server = PushServer(
        push, engine.arena, connections_max=connections_max, guard=parts.guard, mode=settings.unix_socket_mode
    )
    stack.push_async_callback(server.close)
    server.bind(_push_path(place))
    return server


def watch(monitor: Monitor, engine: LogEngine, parts: Parts) -> None:
    """Add the broker's metrics, stream figures, and health checks."""
    broker = parts.service
    collector = BrokerCollector(
        parts.counters,
        parts.pushed,
        broker.latencies,
        engine,
        may_promise=broker.may_promise,
        clock_offset=broker.clock_offset,
    )
    monitor.add(collector)
    monitor.add(HopCollector(parts.plugins.latency, partial(name_of, engine.streams)))
    figures = StreamFigures(
        engine.streams,
        lambda: engine.replication.logs.now_ms,
        now_us=lambda: engine.memory.now_us,
        may_promise=broker.may_promise,
    )
    monitor.watch_streams(figures)
    watch_log(monitor.health, engine)
    watch_clock(monitor.health, broker.clock_offset)


def build_registration(
    settings: BrokerSettings, runtime: Runtime, place: Place, engine: LogEngine, parts: Parts
) -> BrokerRegistration:
    """Create the part that registers the broker, and sends its heartbeats."""
    broker, leader = parts.service, parts.leader
    report = HeartbeatReport(
        engine.streams,
        engine.takeovers.progress,
        clock=runtime.clock,
        replication=engine.replication,
        unknown=UnknownReport(engine.streams, lambda: leader.value),
        latency=parts.plugins.latency,
    )
    registration = BrokerRegistration(
        settings.coordinator,
        place.directory,
        engine.replicator.update_backups,
        leader=leader,
        report=report,
        lease=broker.lease,
        clock_offset=broker.clock_offset,
        fences=engine.streams.fences,
        owners=broker.producer_owners,
        access_version=lambda: parts.guard.version,
        chosen_id=settings.broker_id,
        runtime=runtime,
    )
    place.ties.push_async_callback(registration.close)
    watch_registration(place.monitor.health, registration, broker.lease, runtime.clock)
    return registration


async def register(
    settings: BrokerSettings,
    runtime: Runtime,
    registration: BrokerRegistration,
    engine: LogEngine,
    ready: dict[str, Any],
) -> Sequence[common_pb2.StreamInfo]:
    """Register the broker with the coordinator; return the streams that it has parts of."""
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
    return await registration.register(
        info,
        settings.coordinator_timeout_ms / 1000,
        lost_memory=engine.restart.found.lost_memory,
        held=await asyncio.to_thread(engine.held_streams),
    )


async def own_streamlets(
    registration: BrokerRegistration, engine: LogEngine, parts: Parts, owned: Sequence[common_pb2.StreamInfo]
) -> None:
    """Drop data that belongs to other brokers by now, and begin to serve the rest."""
    await engine.own(
        owned,
        registration.broker_id,
        registration.broker_epoch,
        registration.recovered_before_epoch,
        elsewhere=registration.elsewhere_stream_ids,
        has_holes=registration.has_holes,
        directory_id=registration.directory_id,
    )
    parts.service.registered(registration.broker_id, owned, registration.broker_epoch)


async def stay_registered(
    place: Place, registration: BrokerRegistration, engine: LogEngine, broker: BrokerService
) -> None:
    """Send heartbeats, and look up producers' owners, until `Place.ties` end. A newer launch ends the broker."""
    tasks = await place.ties.enter_async_context(asyncio.TaskGroup())
    ask_for_owners = partial(broker.producer_owners.ask_for_ever, registration.find_producers)
    for run in (registration.keep_alive, engine.replicator.until_fenced, ask_for_owners):
        place.ties.callback(tasks.create_task(_until_replaced(run, broker)).cancel)


async def hand_over(registration: BrokerRegistration, broker: BrokerService, handover_ms: int) -> None:
    """Hand streamlets over to other brokers while this one stops and starts again."""
    answer = await registration.hand_over(handover_ms)
    broker.orders.seal_all()
    if answer is not None:
        await registration.stops()
        log.info(
            "handed over; a restart in the grace period is not counted as a crash",
            streamlets=answer.streamlets_given,
            streamlets_that_wait=answer.streamlets_left,
            grace_ms=answer.grace_ms,
        )


def _push_path(place: Place) -> Path:
    return unix_socket_path(place.data_dir, "push")


async def _until_replaced(run: Callable[[], Awaitable[None]], broker: BrokerService) -> None:
    """Run until a newer launch has taken over; then fence the writer, so that it acknowledges nothing any more."""
    try:
        await run()
    except StaleEpoch:
        broker.writer.fence()
        raise
