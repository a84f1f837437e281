"""The coordinator as an application: the stages of its start, one after the other; it stops in the reverse order.

`serve` lists the stages. The coordinator first listens and then runs for leader, because others have to learn its
address. With an embedded store it is ready once it leads. With ZooKeeper it is ready once it runs for leader, and
redirects callers to the leader.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, NamedTuple

from kera.coordinator.cluster.backup_calls import GrpcBackupCalls
from kera.coordinator.cluster.broker_calls import GrpcBrokerCalls
from kera.coordinator.cluster.catalog import Catalog
from kera.coordinator.cluster.peers import GrpcMembers
from kera.coordinator.coordinator import Coordinator
from kera.coordinator.health import watch_leadership, watch_metadata, watch_records
from kera.coordinator.metrics import CoordinatorMetrics
from kera.coordinator.service import coordinator_service
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.leadership import Alone, Election, Leadership
from kera.coordinator.store.lmdb_store import LmdbStore
from kera.coordinator.store.metadata import MetadataStore
from kera.coordinator.store.metadata_copy import MetadataCopy, put_back
from kera.core.base.address import is_everywhere, join_address, split_address
from kera.core.base.home import expanded
from kera.core.base.settings import InvalidSettings, setting
from kera.core.rpc import Service, api
from kera.core.rpc.grpc_server import GrpcServer
from kera.core.runtime import MACHINE, OpenInterface, Runtime, secured
from kera.core.security.settings import tls_of
from kera.server.access.guard import Door, Guard
from kera.server.access.settings import guard_of, secure_daemon
from kera.server.monitoring.monitor import Monitor
from kera.server.network import room_of

CONNECTION_WEIGHTS = {"grpc": 1}
CONNECTION_CALLS_MAX = 8
"""Maximum of calls of one connection under way at once; it bounds how long others wait for a connection that floods."""

OpenStore = Callable[
    [CoordinatorSettings, Runtime, AsyncExitStack], Awaitable[tuple[MetadataStore, Callable[[str], Election]]]
]
"""Opens the store of the metadata; returns it, and a function that makes the election for a coordinator's address."""
METHODS = (
    *api.COORDINATOR_METHODS,
    *api.CONSUMER_GROUPS_METHODS,
    *api.ACCESS_METHODS,
    *api.SCHEMA_REGISTRY_METHODS,
    *api.LATENCY_METHODS,
)


class StreamNames:
    """The names of streams by their ids, while this coordinator leads."""

    def __init__(self) -> None:
        self._catalog: Catalog | None = None

    def name_of(self, stream_id: int) -> str | None:
        """Return the stream's name; None if the stream does not exist, or another coordinator leads."""
        stream = None if self._catalog is None else self._catalog.find(stream_id)
        return None if stream is None else stream.name

    @contextmanager
    def of(self, catalog: Catalog) -> Iterator[None]:
        """Use the names of `catalog` within the block."""
        self._catalog = catalog
        try:
            yield
        finally:
            self._catalog = None


class Place(NamedTuple):
    """The monitor of a coordinator, and the store of its metadata."""

    monitor: Monitor
    addresses: dict[str, Any]
    """The addresses of its metrics."""
    store: MetadataStore
    election_of: Callable[[str], Election]


@asynccontextmanager
async def serve(
    settings: CoordinatorSettings,
    runtime: Runtime = MACHINE,
    *,
    open_interface: OpenInterface = GrpcServer,
    open_store: OpenStore | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """Start a coordinator, yield its addresses, stop it. `open_store`: by default the settings choose the store."""
    check_addresses(settings)
    room = room_of(settings, CONNECTION_WEIGHTS)
    runtime = secure_daemon(runtime, settings, settings.host)
    async with AsyncExitStack() as stack:
        place = await open_place(stack, settings, runtime, open_store or _store)
        metrics = CoordinatorMetrics(place.monitor.registry)
        place.monitor.add(metrics)
        leadership, guard = build_leadership(stack, settings, runtime, place, metrics)
        services = (leadership.service(METHODS, metrics.observe), place.monitor.service(), guard.service())
        server = open_interface(
            [guard.guarded(service) for service in services],
            connections_max=room["grpc"],
            connection_calls_max=CONNECTION_CALLS_MAX,
            tls=runtime.tls,
            doorkeeper=guard.doorkeeper,
        )
        stack.push_async_callback(server.close)
        port = await server.listen(settings.host, settings.port)
        await run_for_leader(stack, settings, place, leadership, port)
        place.monitor.health.started()
        yield {"grpc_address": join_address(settings.host, port), **place.addresses}
        place.monitor.health.stopping()


def check_addresses(settings: CoordinatorSettings) -> None:
    """Check the address at which others reach the coordinator. Raises `InvalidSettings`."""
    if settings.advertised_address:
        with setting("advertised_address"):
            split_address(settings.advertised_address)
    elif settings.zookeeper and is_everywhere(settings.host):
        raise InvalidSettings(
            f"with --host {settings.host} other hosts cannot reach this coordinator by its address; add"
            " --advertised-address",
            host=settings.host,
        )


async def open_place(
    stack: AsyncExitStack, settings: CoordinatorSettings, runtime: Runtime, open_store: OpenStore
) -> Place:
    """Serve metrics, and open the store of the metadata. Raises `InvalidSettings`."""
    if settings.zookeeper_tls and runtime.tls is None:
        raise InvalidSettings("zookeeper_tls needs certificates: set tls_cert, tls_key and tls_ca")
    with setting("data_dir"):
        disks = [] if settings.zookeeper else [expanded(settings.data_dir).absolute()]
    monitor = stack.enter_context(Monitor("coordinator", disks, runtime=runtime, guarded=settings.security))
    addresses = monitor.serve(settings.host, settings.metrics_port)
    monitor.health.starting("it opens the store of the metadata")
    return Place(monitor, dict(addresses), *await open_store(settings, runtime, stack))


def build_leadership(
    stack: AsyncExitStack,
    settings: CoordinatorSettings,
    runtime: Runtime,
    place: Place,
    metrics: CoordinatorMetrics,
) -> tuple[Leadership, Door]:
    """Make the part that runs for leader, and the guard in front of the coordinator."""
    names = StreamNames()
    # Late: the guard asks for the leader and its address only when it runs.
    guard = guard_of(
        settings,
        runtime,
        name_of=names.name_of,
        not_told=lambda: leadership.not_leader(),  # noqa: PLW0108
        coordinators=lambda: leadership.address,
        daemon="coordinator",
    )
    guard = stack.enter_context(place.monitor.guarded_by(guard))
    leadership = Leadership(
        lambda store, epoch: _office(
            settings, runtime, metrics, store, epoch, lambda: leadership.feature_level, guard, names
        ),
        now=runtime.clock.boottime_s,
        wall_us=runtime.clock.now_us,
    )
    watch_leadership(place.monitor.health, leadership, metrics.catching_up)
    if isinstance(place.store, LmdbStore):
        watch_metadata(place.monitor.health, place.store)
    elif settings.zookeeper:
        watch_records(place.monitor.health, metrics.changed_by_others)
    return leadership, guard


async def run_for_leader(
    stack: AsyncExitStack, settings: CoordinatorSettings, place: Place, leadership: Leadership, port: int
) -> None:
    """Run for leader until `stack` ends; with an embedded store, wait until this coordinator leads."""
    # A lone coordinator redirects nobody; if it listens on all interfaces, the host name says more than 0.0.0.0.
    host = socket.gethostname() if is_everywhere(settings.host) else settings.host
    address = settings.advertised_address or join_address(host, port)
    tasks = await stack.enter_async_context(asyncio.TaskGroup())
    running = tasks.create_task(leadership.run(place.store, place.election_of(address), address))
    stack.callback(running.cancel)
    if not settings.zookeeper:
        await leadership.until_first_term()


async def _store(
    settings: CoordinatorSettings,
    runtime: Runtime,
    stack: AsyncExitStack,
    *,
    for_copy: bool = False,
    replace_damaged: bool = False,
) -> tuple[MetadataStore, Callable[[str], Election]]:
    """Open the store that the settings choose; see `OpenStore`.

    `for_copy` and `replace_damaged`: for `restore`, see `LmdbStore`.
    """
    if not settings.zookeeper:
        lmdb_store = LmdbStore(
            settings.data_dir,
            bytes_max=settings.metadata_bytes_max,
            for_copy=for_copy,
            replace_damaged=replace_damaged,
        )
        stack.push_async_callback(lmdb_store.close)
        return lmdb_store, Alone
    # Late, as a lone coordinator needs no ZooKeeper client.
    from kera.coordinator.store.zookeeper_election import ZooKeeperElection  # noqa: PLC0415
    from kera.coordinator.store.zookeeper_session import ZooKeeperAddress, ZooKeeperSession  # noqa: PLC0415
    from kera.coordinator.store.zookeeper_store import ZooKeeperStore  # noqa: PLC0415

    with setting("zookeeper"):
        where = ZooKeeperAddress.parse(settings.zookeeper)
    session = await ZooKeeperSession.connect(
        where,
        session_timeout_ms=settings.zookeeper_session_timeout_ms,
        new_id=runtime.new_id,
        tls=runtime.tls if settings.zookeeper_tls else None,
    )
    stack.push_async_callback(session.close)
    store = await ZooKeeperStore.open(session)
    stack.push_async_callback(store.close)
    return store, lambda address: ZooKeeperElection(session, address)


async def restore(settings: CoordinatorSettings, data: bytes, *, force: bool) -> MetadataCopy:
    """Put a copy of metadata back where a coordinator with these settings keeps them; none may run there.

    With `force` the copy replaces existing metadata, even damaged ones. An interrupted restore continues without it.
    """
    async with AsyncExitStack() as stack:
        runtime = secured(MACHINE, tls_of(settings))
        store, _ = await _store(settings, runtime, stack, for_copy=True, replace_damaged=force)
        return await put_back(store, data, force=force)


@asynccontextmanager
async def _office(
    settings: CoordinatorSettings,
    runtime: Runtime,
    metrics: CoordinatorMetrics,
    store: MetadataStore,
    epoch: int,
    feature_level_of_coordinators: Callable[[], int],
    guard: Door,
    names: StreamNames,
) -> AsyncIterator[Service]:
    """The service of the leading coordinator, for as long as it leads."""
    async with AsyncExitStack() as stack:
        if isinstance(guard, Guard):
            stack.callback(guard.authenticator.forget)
        members = GrpcMembers(timeout_ms=settings.broker_timeout_ms, channel=runtime.channel)
        stack.push_async_callback(members.close)
        brokers = GrpcBrokerCalls(timeout_ms=settings.broker_timeout_ms, channel=runtime.channel)
        stack.push_async_callback(brokers.close)
        backups = GrpcBackupCalls(timeout_ms=settings.broker_timeout_ms, channel=runtime.channel)
        stack.push_async_callback(backups.close)
        coordinator = await Coordinator.load(
            store,
            brokers,
            backups,
            runtime.clock,
            settings,
            coordinator_epoch=epoch,
            new_id=runtime.new_id,
            feature_level_of_coordinators=feature_level_of_coordinators,
            observe_phase=metrics.observe_phase,
            observe_move=metrics.observe_move,
            guard=guard if isinstance(guard, Guard) else None,
            tell_member=members,
        )
        stack.push_async_callback(coordinator.close)
        stack.enter_context(names.of(coordinator.state.catalog))
        if isinstance(guard, Guard):
            stack.callback(guard.authenticator.forget)  # before the names go: without them no stream seems to exist
        coordinator.start()
        stack.enter_context(metrics.leading(coordinator))
        yield coordinator_service(coordinator.handlers(), metrics.observe)
