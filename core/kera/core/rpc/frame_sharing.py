"""State shared by the connections of a frame server: methods, bounds, and the list of connections. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from kera.core.base.telemetry import get_logger
from kera.core.base.turns import Turns
from kera.core.errors import Unavailable
from kera.core.rpc.arriving import Arriving
from kera.core.rpc.connections import idlest
from kera.core.rpc.method import Handler, Method
from kera.core.rpc.strangers import Strangers
from kera.core.rpc.taking import Taker
from kera.core.security.refusals import Refusals

if TYPE_CHECKING:
    from kera.core.rpc.frame_server import ServerConnection, Timing

log = get_logger("kera.frames")

REFUSALS_LOGGED_S = 10.0


@dataclass(slots=True)
class Shared:
    """State that the connections of a server share."""

    methods: dict[int, tuple[Method[Any, Any], Handler]]
    takers: dict[int, Taker]
    bulk_bytes_max: int
    connections_max: int
    timing: Timing
    strangers: Strangers
    arriving: Arriving
    connections: dict[ServerConnection, None] = field(default_factory=dict)
    """In the order of arrival: of several that were quiet for equally long, the oldest is closed to make room."""
    evicted: int = 0
    """Connections that were closed to make room."""
    refused: int = 0
    refusals: Refusals = field(default_factory=partial(Refusals, "frames"))
    logged_s: float = -REFUSALS_LOGGED_S
    """When the log last said that there are too many connections."""
    turns: Turns = field(default_factory=Turns)
    """The turns of connections whose requests take long."""
    closing: bool = False
    """Whether the server is closing: connections that were still being accepted then are closed as well."""

    def admit(self, new: ServerConnection, now_s: float) -> None:
        """Make room for a connection, if need be by closing another one. Raises `Unavailable` if all are in use."""
        if len(self.connections) < self.connections_max:
            self.connections[new] = None
            return
        idle = idlest(self.connections)
        if now_s >= self.logged_s + REFUSALS_LOGGED_S:
            self.logged_s = now_s
            log.warning("too many connections", limit=self.connections_max, evicted=self.evicted, refused=self.refused)
        if idle is None:
            self.refused += 1
            raise Unavailable(
                f"the daemon has as many connections as it may, {self.connections_max}, and all are in use; raise"
                " connections_max",
                connections_max=self.connections_max,
            )
        self.evicted += 1
        self.connections.pop(idle, None)  # now, since `connection_lost` runs only in the loop's next round
        idle.abort()
        self.connections[new] = None
