"""The environment of a process: clocks, ids for new objects, its node, files, connections over gRPC.

Daemons and the SDK get a `Runtime` where they are wired: normally the real one of the machine. A simulation gives each
process its own: clocks that the simulation sets, ids from a seed, a separate node, a disk that fails, and connections
over a simulated network. Time, sockets and threads of the event loop are replaced with the loop itself. The order in
which clients retry is drawn from the module `random`, as nothing depends on it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Protocol

from kera.core.base.blocks import FILE_CALLS, FileCalls
from kera.core.base.clock import Clock, SystemClock
from kera.core.base.process import node_id, process_name
from kera.core.rpc.connections import CONNECTIONS_MAX_DEFAULT
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.grpc_options import CONNECTION_CALLS_MAX_DEFAULT
from kera.core.rpc.limits import BULK_BYTES_MAX
from kera.core.rpc.method import Channel, Doorkeeper, Introduction, Service
from kera.core.security import Tls

if TYPE_CHECKING:
    from kera.core.access.audit_events import AuditStream


class OpenChannel(Protocol):
    """Makes connections over the open interface."""

    def __call__(self, address: str, *, bulk_bytes_max: int = BULK_BYTES_MAX) -> Channel:
        """Return a connection to ``host:port``, which is established, and re-established, when a request is sent."""
        ...


class OpenServer(Protocol):
    """Serves the open interface."""

    async def listen(self, host: str, port: int) -> int:
        """Serve on `host`:`port` (0: any free one); returns the port. Raises `PortTaken`."""
        ...

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop accepting, give calls in progress `grace_s` seconds, then end them."""
        ...


class OpenInterface(Protocol):
    """Makes servers of the open interface."""

    def __call__(
        self,
        services: Sequence[Service],
        *,
        bulk_bytes_max: int = BULK_BYTES_MAX,
        connections_max: int = CONNECTIONS_MAX_DEFAULT,
        connection_calls_max: int = CONNECTION_CALLS_MAX_DEFAULT,
        tls: Tls | None = None,
        doorkeeper: Doorkeeper | None = None,
    ) -> OpenServer:
        """Return a server for any number of services, which does not listen yet.

        `tls`: encrypts its connections; `doorkeeper`: finds out who the peers are.
        """
        ...


class Heartbeats(Protocol):
    """Sends heartbeats of a consumer group's member outside of the event loop, which the user's code may block."""

    @property
    def heard_s(self) -> float:
        """When the last message was sent that the coordinator has answered, on the boot-time clock."""
        ...

    def answered(self, sent_s: float) -> None:
        """Note that the coordinator has answered another message of the member, which was sent at `sent_s`."""
        ...

    def start(self) -> None:
        """Begin to send heartbeats."""
        ...

    def stop(self) -> None:
        """Stop sending heartbeats; returns at once."""
        ...


class MakeHeartbeats(Protocol):
    """Makes the heartbeats of one member."""

    def __call__(
        self,
        addresses: Sequence[str],
        *,
        consumer_group: str,
        member_id: str,
        interval_s: float,
        busy_ms: Callable[[], int],
        clock: Clock,
    ) -> Heartbeats:
        """Return heartbeats to the coordinators at `addresses`.

        `busy_ms`: returns how long the member has been in its user's code.
        """
        ...


class OpenAuditStream(Protocol):
    """Opens the stream for the events of the audit log."""

    def __call__(self, stream: str, bootstrap: Callable[[], str], daemon: str, runtime: Runtime) -> AuditStream:
        """Return the stream; `bootstrap`: returns the coordinators' addresses at its start; `daemon`: the writer."""
        ...


def random_id() -> str:
    """Return a new unique id."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clocks, ids, files and connections that a process uses; a simulation replaces them."""

    clock: Clock = field(default_factory=SystemClock)
    new_id: Callable[[], str] = random_id
    node_id: Callable[[], str] = node_id
    """See `kera.core.base.process.node_id`."""
    process_name: Callable[[], str] = process_name
    """See `kera.core.base.process.process_name`."""
    channel: OpenChannel = GrpcChannel
    heartbeats: MakeHeartbeats | None = None
    """Makes heartbeats; None: a thread sends them, see `kera.client.consuming.groups.keep_alive`."""
    files: FileCalls = FILE_CALLS
    """The calls with which daemons change files; LMDB makes its own calls for its databases."""
    random: Random = field(default_factory=Random)
    """For choices among equals."""
    tls: Tls | None = None
    """Certificates; None: connections over the network are not encrypted."""
    introduction: Introduction | None = None
    """Authenticates this process with daemons; None: only a certificate can do that."""
    audit_stream: OpenAuditStream | None = None
    """Opens the stream into which a daemon writes audit events; None: it cannot."""


MACHINE = Runtime()
"""The real runtime of the machine."""


def secured(runtime: Runtime, tls: Tls | None, introduction: Introduction | None = None) -> Runtime:
    """Return a runtime whose connections over the network are encrypted and authenticated."""
    channel = partial(GrpcChannel, tls=tls, introduction=introduction)
    return replace(runtime, channel=channel, tls=tls, introduction=introduction)
