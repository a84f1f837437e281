"""The network of a daemon: the settings that all daemons share, and the interfaces of brokers and backups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ByteSize, Field, model_validator

from kera.core.base.address import advertised_address, host_of
from kera.core.base.process import descriptor_limit
from kera.core.base.settings import MIB, setting
from kera.core.data_dir import DataDirectory
from kera.core.rpc import Service
from kera.core.rpc.arriving import ARRIVING_BYTES_MAX
from kera.core.rpc.connections import connections_max, parts_of
from kera.core.rpc.frame_server import FrameServer
from kera.core.rpc.method import Method
from kera.core.rpc.taking import Taker
from kera.core.rpc.unix_socket import OWN_USER
from kera.core.runtime import OpenInterface, Runtime
from kera.server.access.guard import Door
from kera.server.access.settings import DaemonAccessSettings
from kera.server.daemon import STOP_TIMEOUT_S
from kera.server.monitoring.monitor import Monitor

MESSAGE_BYTES_MAX = 1024 * MIB
"""Limited because gRPC counts the bytes of a message in 31 bits."""


class NetworkSettings(DaemonAccessSettings):
    """The addresses of a daemon, its number of connections, and its log level."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. Local by default; any other address needs tls_cert and tls_client_auth.",
    )
    port: int = Field(0, ge=0, le=65535, description="Port of the open interface (gRPC); 0 takes any free one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of Prometheus metrics. 0: any free one; absent: no metrics, as daemons on one host would"
        " compete for a default port.",
    )
    connections_max: int | None = Field(
        None,
        ge=8,
        description="Connections served at once; each kind, such as frames or gRPC, has a part of them. Absent: the"
        " limit of open files (ulimit -n) without the daemon's own files, at most 10,000.",
    )
    log_level: str = Field("info", description="debug, info, warning or error.")


class MemberSettings(NetworkSettings):
    """The settings of a broker or a backup: also the coordinator with which it registers, and its framed transport."""

    coordinator: str = Field(
        "127.0.0.1:7400",
        description="host:port of the coordinator; several are separated by commas.",
    )
    coordinator_timeout_ms: int = Field(
        10_000, ge=0, description="How long to wait at the start for a coordinator that cannot be reached, in ms."
    )
    frames_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Port of framed transport, which KerA's own clients and brokers use; 0 takes any free one.",
    )
    advertised_address: str = Field(
        "",
        description="host, or host:port, at which others reach the open interface, if it differs from the address it"
        " listens on. Needed with --host 0.0.0.0.",
    )
    advertised_frames_address: str = Field(
        "",
        description="The same for framed transport. Empty: the host of advertised_address, with the port on which the"
        " daemon listens.",
    )
    message_bytes_max: ByteSize = Field(
        ByteSize(32 * MIB), description="Largest request or response: bounds the memory of one connection."
    )
    arriving_bytes_max: ByteSize = Field(
        ByteSize(ARRIVING_BYTES_MAX),
        ge=1 * MIB,
        description="Memory for incoming large requests over frames, shared by all connections; further requests wait.",
    )
    ephemeral: bool = Field(
        default=False,
        description="The daemon never starts again: it writes nothing to disk at its end, and others may remove its"
        " files.",
    )
    handover_ms: int
    stop_flush_ms: int

    @model_validator(mode="after")
    def _message_size(self) -> Self:
        if self.message_bytes_max > MESSAGE_BYTES_MAX:
            raise ValueError(f"message_bytes_max must be at most {MESSAGE_BYTES_MAX}")
        return self

    @property
    def stop_timeout_s(self) -> float:
        """The time after which a stop ends the process at once."""
        return STOP_TIMEOUT_S + (0 if self.ephemeral else (self.handover_ms + self.stop_flush_ms) / 1000)

    def check_advertised_address(self) -> None:
        """Check the advertised address, before anything is created. Raises `InvalidSettings`."""
        self._advertised("advertised_address", self.advertised_address, self.port or 1)

    def addresses(self, grpc_port: int, frames_port: int) -> dict[str, str]:
        """Return the addresses at which others reach a daemon that listens on these ports. Raises `InvalidSettings`."""
        frames_host = self.advertised_frames_address or host_of(self.advertised_address)
        return {
            "grpc_address": self._advertised("advertised_address", self.advertised_address, grpc_port),
            "frames_address": self._advertised("advertised_frames_address", frames_host, frames_port),
        }

    def _advertised(self, name: str, address: str, port: int) -> str:
        with setting(name):
            return advertised_address(address, self.host, port)


class Place(NamedTuple):
    """The data directory and monitor of a broker or a backup, and its connection to the coordinator."""

    data_dir: Path
    directory: DataDirectory
    monitor: Monitor
    metrics: dict[str, str]
    """The address of its metrics, if it has them."""
    ties: AsyncExitStack


class Offer(NamedTuple):
    """The services that a daemon offers over its interfaces."""

    framed: Service
    """The services over frames; `takers` serves some of these methods from the connection's buffer."""
    open: Sequence[Service]
    """The services over gRPC."""
    takers: Mapping[Method[Any, Any], Taker]
    guard: Door


async def listen(
    stack: AsyncExitStack,
    settings: MemberSettings,
    runtime: Runtime,
    offer: Offer,
    unix_path: Path,
    *,
    room: Mapping[str, int],
    open_interface: OpenInterface,
    unix_socket_mode: int = OWN_USER,
) -> dict[str, Any]:
    """Serve an offer over frames, on a unix socket and TCP, and over gRPC, until `stack` ends.

    `room`: the number of connections of each kind. Returns the addresses, as the daemon announces them.
    """
    frames = FrameServer(
        offer.framed,
        bulk_bytes_max=settings.message_bytes_max,
        connections_max=room["frames"],
        arriving_bytes_max=settings.arriving_bytes_max,
        takers=offer.takers,
        tls=runtime.tls,
        doorkeeper=offer.guard.doorkeeper,
    )
    stack.push_async_callback(frames.close)
    await frames.listen_unix(unix_path, unix_socket_mode)
    frames_port = await frames.listen_tcp(settings.host, settings.frames_port)
    server = open_interface(
        offer.open,
        bulk_bytes_max=settings.message_bytes_max,
        connections_max=room["grpc"],
        tls=runtime.tls,
        doorkeeper=offer.guard.doorkeeper,
    )
    stack.push_async_callback(server.close)
    grpc_port = await server.listen(settings.host, settings.port)
    return {**settings.addresses(grpc_port, frames_port), "frames_unix_path": str(unix_path)}


def room_of(settings: NetworkSettings, weights: Mapping[str, int]) -> dict[str, int]:
    """Return how many connections of each kind a daemon serves at once. Raises `InvalidSettings`."""
    return parts_of(connections_max(settings.connections_max, descriptor_limit()), weights)
