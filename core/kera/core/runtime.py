"""The outside of a process: clocks, ids for new things, its node, files, connections over gRPC.

Daemons and the SDK get a `Runtime` where they are wired. It is the machine's own, unless somebody runs them elsewhere:
a simulation gives each process clocks that it sets, ids from a seed, a node of its own, a disk that fails, and
connections over a network that is not there. What goes through the event loop (its time, sockets, threads) is the
loop's to replace, and the order in which clients try again is drawn from the module `random`, as nothing depends on it.
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
        """One to ``host:port``, which is made, and made again, when something is sent."""
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
        """One server for any number of services, which does not listen yet.

        `tls`: its connections are encrypted; `doorkeeper`: finds out whose they are.
        """
        ...


class Heartbeats(Protocol):
    """Says that a member of a consumer group lives, beside the event loop, which its user's code may block."""

    @property
    def heard_s(self) -> float:
        """When the last word was sent that was answered, on the boot-time clock."""
        ...

    def answered(self, sent_s: float) -> None:
        """The coordinator has answered what was sent then, by other ways."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    def stop(self) -> None:
        """End; returns at once."""
        ...


class MakeHeartbeats(Protocol):
    """Makes those of one member."""

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
        """To the coordinators at `addresses`; `busy_ms`: for how long the member has been in its user's code."""
        ...


class OpenAuditStream(Protocol):
    """Opens a stream for what happened to access."""

    def __call__(self, stream: str, bootstrap: Callable[[], str], daemon: str, runtime: Runtime) -> AuditStream:
        """`bootstrap`: where coordinators are, asked for when it begins; `daemon`: whose events they are."""
        ...


def random_id() -> str:
    """An id that nobody else has."""
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Runtime:
    """The clocks, ids, files and connections that a process uses; a simulation gives its own."""

    clock: Clock = field(default_factory=SystemClock)
    new_id: Callable[[], str] = random_id
    node_id: Callable[[], str] = node_id
    """See `kera.core.base.process.node_id`."""
    process_name: Callable[[], str] = process_name
    """See `kera.core.base.process.process_name`."""
    channel: OpenChannel = GrpcChannel
    heartbeats: MakeHeartbeats | None = None
    """None: from a thread, see `kera.client.consuming.groups.keep_alive`."""
    files: FileCalls = FILE_CALLS
    """How daemons change what is on their disks; the databases of LMDB have calls of their own."""
    random: Random = field(default_factory=Random)
    """For choices among equals."""
    tls: Tls | None = None
    """Certificates; None: connections over the network are not encrypted."""
    introduction: Introduction | None = None
    """Shows daemons who we are; None: nobody, unless there is a certificate."""
    audit_stream: OpenAuditStream | None = None
    """How a daemon writes what happened to access into a stream; None: it cannot."""


MACHINE = Runtime()
"""The machine's own."""


def secured(runtime: Runtime, tls: Tls | None, introduction: Introduction | None = None) -> Runtime:
    """One whose connections over the network are encrypted, and shown who we are over."""
    channel = partial(GrpcChannel, tls=tls, introduction=introduction)
    return replace(runtime, channel=channel, tls=tls, introduction=introduction)
