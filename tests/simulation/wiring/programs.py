"""The real daemons and clients, as programs of simulated processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

from pydantic import ByteSize

from kera.backup import application as backup
from kera.backup.settings import BackupSettings
from kera.broker import application as broker
from kera.broker.settings import BrokerSettings
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_copy import copy_intact
from kera.client import Client
from kera.client.settings import ClientSettings
from kera.coordinator import application as coordinator
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.store.leadership import Alone, Election
from kera.coordinator.store.lmdb_store import LmdbStore, OpenEnvironment
from kera.coordinator.store.metadata import MetadataStore
from kera.coordinator.store.metadata_copy import put_back
from kera.coordinator.store.zookeeper_election import ZooKeeperElection
from kera.coordinator.store.zookeeper_store import ZooKeeperStore
from kera.core.base.blocks import FileCalls
from kera.core.runtime import Runtime
from tests.simulation.engine.process import Machine
from tests.simulation.wiring import zookeeper
from tests.simulation.wiring.directories import MEMORY
from tests.simulation.wiring.heartbeats import LoopHeartbeats
from tests.simulation.wiring.open_interface import FramedChannel, FramedServer

COORDINATOR_PORT = 7400
SEGMENT_BYTES = 8 << 10
MIB = 1 << 20
METADATA_BYTES_MAX = 16 * MIB

Serving = AbstractAsyncContextManager[Mapping[str, Any]]


def runtime_of(machine: Machine, random: Random, files: FileCalls) -> Runtime:
    """The runtime of a process on a machine."""
    return Runtime(
        clock=machine.clock,
        new_id=lambda: f"{random.getrandbits(128):032x}",
        node_id=lambda: machine.name,
        process_name=lambda: f"{machine.name}/1",
        channel=FramedChannel,
        heartbeats=LoopHeartbeats,
        random=random,
        files=files,
    )


async def zookeeper_on(machine: Machine, tree: zookeeper.Tree) -> None:
    """A ZooKeeper with the data of its disk."""
    await zookeeper.Server(tree, machine.address).serve()


def coordinator_of(machine: Machine, directory: Path, address: str, runtime: Runtime, **settings: Any) -> Serving:
    """One of several coordinators, with the ZooKeeper at `address`."""

    async def open_store(
        settings: CoordinatorSettings, runtime: Runtime, stack: AsyncExitStack
    ) -> tuple[MetadataStore, Callable[[str], Election]]:
        timeout_ms = settings.zookeeper_session_timeout_ms
        session: Any = await zookeeper.Session.connect(address, session_timeout_ms=timeout_ms, new_id=runtime.new_id)
        stack.push_async_callback(session.close)
        store = await ZooKeeperStore.open(session)
        stack.push_async_callback(store.close)
        return store, lambda own: ZooKeeperElection(session, own)

    return coordinator.serve(
        CoordinatorSettings(
            host=machine.address,
            insecure=True,
            port=COORDINATOR_PORT,
            data_dir=directory,
            zookeeper=f"{address}:{zookeeper.PORT}",
            **settings,
        ),
        runtime,
        open_interface=FramedServer,
        open_store=open_store,
    )


def coordinator_on(
    machine: Machine, directory: Path, runtime: Runtime, environment_of: OpenEnvironment, **settings: Any
) -> Serving:
    """A single coordinator with its own store."""

    async def open_store(
        settings: CoordinatorSettings, _runtime: Runtime, stack: AsyncExitStack
    ) -> tuple[MetadataStore, Callable[[str], Election]]:
        store = LmdbStore(settings.data_dir, bytes_max=settings.metadata_bytes_max, environment_of=environment_of)
        stack.push_async_callback(store.close)
        return store, Alone

    return coordinator.serve(
        CoordinatorSettings(
            host=machine.address,
            insecure=True,
            port=COORDINATOR_PORT,
            data_dir=directory,
            metadata_bytes_max=ByteSize(METADATA_BYTES_MAX),
            **settings,
        ),
        runtime,
        open_interface=FramedServer,
        open_store=open_store,
    )


async def put_back_on(directory: Path, environment_of: OpenEnvironment, data: bytes) -> None:
    """Restore metadata as `kera cluster restore` does while no coordinator runs."""
    store = LmdbStore(directory, bytes_max=METADATA_BYTES_MAX, environment_of=environment_of)
    try:
        await put_back(store, data, force=True)
    finally:
        await store.close()


def broker_on(
    machine: Machine,
    directory: Path,
    coordinators: str,
    runtime: Runtime,
    environment_of: OpenEnvironment,
    **settings: Any,
) -> Serving:
    """A broker."""
    shared = directory / MEMORY
    shared.mkdir(exist_ok=True)
    return broker.serve(
        BrokerSettings(
            coordinator=coordinators,
            host=machine.address,
            insecure=True,
            data_dir=directory / "data",
            shm_dir=shared,
            segment_bytes=ByteSize(SEGMENT_BYTES),
            arena_bytes=ByteSize(64 * SEGMENT_BYTES),
            **settings,
        ),
        runtime,
        open_interface=FramedServer,
        open_index=lambda path: SegmentIndex.open_checked(path, copy_intact, environment_of),
    )


def backup_on(machine: Machine, directory: Path, coordinators: str, runtime: Runtime, **settings: Any) -> Serving:
    """A backup."""
    return backup.serve(
        BackupSettings(
            coordinator=coordinators,
            host=machine.address,
            insecure=True,
            data_dir=directory / "data",
            segment_bytes=ByteSize(SEGMENT_BYTES),
            memory_bytes=ByteSize(64 * SEGMENT_BYTES),
            disk_bytes_max=ByteSize(64 * MIB),
            **settings,
        ),
        runtime,
        open_interface=FramedServer,
    )


@asynccontextmanager
async def client_on(coordinators: str, runtime: Runtime, **settings: Any) -> AsyncIterator[Client]:
    """A client of the cluster, which knows only the addresses of the coordinators."""
    async with await Client.connect(coordinators, ClientSettings(**settings), runtime=runtime) as client:
        yield client


async def until_stopped(
    serving: Callable[[], Serving], ready: Callable[[Mapping[str, Any]], None], stop: asyncio.Event
) -> None:
    """Serve until a stop is requested, and end orderly."""
    async with serving() as there:
        ready(there)
        await stop.wait()
