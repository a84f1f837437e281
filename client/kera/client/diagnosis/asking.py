"""Asks the coordinator, and each daemon that it knows, for their state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kera.client import ClientSettings
from kera.client.admin.daemons import describe_daemon
from kera.client.diagnosis.cluster import health
from kera.core.credential_settings import secure
from kera.core.errors import KeraError
from kera.core.runtime import MACHINE

if TYPE_CHECKING:
    from kera.client import Client, ClusterDescription, RecoveryDescription, StreamDescription
    from kera.client.admin.daemons import DaemonDescription
    from kera.client.diagnosis.findings import Finding

ASKED_AT_ONCE = 32


class Picture(NamedTuple):
    """The answers of the cluster and its daemons."""

    cluster: ClusterDescription
    recoveries: list[RecoveryDescription]
    streams: list[StreamDescription]
    daemons: dict[str, DaemonDescription | KeraError]
    """The answers of all daemons that should run, by names such as ``broker 2``."""


async def look_with(
    client: Client,
    streams: Sequence[StreamDescription],
    settings: ClientSettings | None = None,
    *,
    coordinator: str = "",
) -> Picture:
    """Ask with a client and its settings. `streams`: the known streams. Raises `KeraError`."""
    cluster = await client.admin.describe_cluster()
    recoveries = await client.admin.recoveries()
    said = await describe_all(addresses_of(cluster, coordinator), settings)
    return Picture(cluster, recoveries, list(streams), said)


async def examine(client: Client, settings: ClientSettings, streams: Sequence[StreamDescription]) -> list[Finding]:
    """Return the findings about a cluster, as far as the user of `client` may know them. Raises `KeraError`."""
    return health(await look_with(client, streams, settings))


def addresses_of(cluster: ClusterDescription, coordinator: str = "") -> dict[str, str]:
    """Return the addresses of all daemons that should run, by name. `coordinator`: used if the cluster lists none."""
    coordinators = cluster.coordinators or ((coordinator,) if coordinator else ())
    addresses = {f"coordinator {address}": address for address in coordinators}
    addresses |= {f"broker {each.broker_id}": each.grpc_address for each in cluster.brokers if each.alive}
    return addresses | {f"backup {each.backup_id}": each.grpc_address for each in cluster.backups if each.alive}


async def describe_all(
    addresses: dict[str, str], settings: ClientSettings | None = None
) -> dict[str, DaemonDescription | KeraError]:
    """Return the description of each daemon, or the error. `settings`: of the caller; None: from the environment."""
    room = asyncio.Semaphore(ASKED_AT_ONCE)
    runtime = secure(MACHINE, settings or ClientSettings.load())

    async def describe(address: str) -> DaemonDescription | KeraError:
        async with room:
            try:
                return await describe_daemon(address, runtime=runtime)
            except KeraError as error:
                return error

    said = await asyncio.gather(*(describe(address) for address in addresses.values()))
    return dict(zip(addresses, said, strict=True))
