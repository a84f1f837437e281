"""Brokers whose memory can be read in place: a push connection to each broker on this node, per memory domain, or the
reason why there is none.

The setting ``shared_memory`` decides. *auto*: if pushing fails, the reader pulls, and the log says so once; failures
that may pass are retried after a while. *always*: a failure is an error that names the obstacle.

A silent broker is handled differently: it hangs, and would not answer pulls either. Its readers get `Unavailable`, and
ask the coordinator where to go on, until the broker sends a greeting again.
"""

from __future__ import annotations

import asyncio
import math

from kera.client.cluster.push import PushChannel
from kera.client.cluster.push_connect import connect
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings, SharedMemory
from kera.client.types import BrokerDescription
from kera.core.base.closing import close_all
from kera.core.base.forks import Origin
from kera.core.base.telemetry import get_logger
from kera.core.errors import ClosedError, InvalidArgument, KeraError, NotAllowed, Unavailable
from kera.core.rpc.method import Introduction

log = get_logger("kera.push")

Place = tuple[int, str]
"""A broker, and a memory domain there."""


class Locality:
    """The push connections of a client. Belongs to one event loop."""

    def __init__(
        self, node_id: str, settings: ClientSettings, timing: Timing, introduction: Introduction | None = None
    ) -> None:
        self._introduction = introduction
        self._node_id = node_id
        self._timing = timing
        self._settings = settings
        self._connections: dict[Place, PushChannel] = {}
        self._connecting: dict[Place, asyncio.Lock] = {}
        self._refused: dict[Place, tuple[int, float]] = {}
        """The epoch of a broker's launch that cannot push to this client, and the time to try again."""
        self._origin = Origin()
        self._closed = False

    def reachable(self, broker: BrokerDescription | None, domain: str, wish: SharedMemory) -> bool:
        """Return whether to have a broker push data of a memory domain.

        Raises `InvalidArgument` when `wish` is *always* and it cannot.
        """
        if wish == "never" or broker is None:
            return False
        obstacle = self._obstacle(broker)
        if wish == "always":
            if obstacle is not None:
                raise InvalidArgument(
                    f"shared_memory is 'always', but {obstacle}", broker_id=broker.broker_id, node_id=broker.node_id
                )
            return True
        if obstacle is not None:
            return False
        epoch, again_s = self._refused.get((broker.broker_id, domain), (-1, 0.0))
        return epoch != broker.broker_epoch or asyncio.get_running_loop().time() >= again_s

    def _obstacle(self, broker: BrokerDescription) -> str | None:
        if self._settings.transport not in ("auto", "unix"):
            return f"brokers are to be reached by {self._settings.transport}"
        if broker.node_id != self._node_id:
            return f"broker {broker.broker_id} is on another node, {broker.node_id}"
        if not broker.push_unix_path:
            return f"broker {broker.broker_id} does not push"
        return None

    async def connection(self, broker: BrokerDescription, domain: str, wish: SharedMemory) -> PushChannel | None:
        """Return the connection to a broker that is `reachable`; None: it cannot be made, so pull.

        With *always*, raises the error: `InvalidArgument`, `NotAllowed`, `ProtocolError` or `Unavailable`. Raises
        `Unavailable` for a broker that is still silent, and `ClosedError` after `close`.
        """
        place = broker.broker_id, domain
        async with self._connecting.setdefault(place, asyncio.Lock()):
            self._check_open()
            known = self._connections.get(place)
            if known is not None and not known.closed:
                return known
            silent = False
            try:
                if known is not None and known.failure is not None and known.broker_epoch == broker.broker_epoch:
                    raise known.failure.with_traceback(None)  # raised repeatedly: the traceback would keep growing
                silent = known is not None and known.silent and known.broker_epoch == broker.broker_epoch
                found = await self._connect(broker, domain, self._timing.silent_greeting_s if silent else math.inf)
            except KeraError as error:
                if wish == "always" or (silent and error.retriable):
                    raise
                self._refuse(broker, domain, error)
                return None
            if self._closed:
                await found.close()
            self._check_open()
            self._connections[place] = found
            self._refused.pop(place, None)
            return found

    async def _connect(self, broker: BrokerDescription, domain: str, timeout_s_max: float) -> PushChannel:
        path, timeout_s = broker.push_unix_path, min(self._settings.connect_timeout_ms / 1000, timeout_s_max)
        found = await connect(
            path,
            timeout_s=timeout_s,
            domain=domain,
            introduction=self._introduction,
            return_delay_s=self._timing.return_delay_s,
        )
        if found.broker_id != broker.broker_id:
            await found.close()
            raise Unavailable(
                f"broker {found.broker_id} is at {path}, not broker {broker.broker_id}", broker_id=broker.broker_id
            )
        return found

    def _refuse(self, broker: BrokerDescription, domain: str, error: KeraError) -> None:
        place = broker.broker_id, domain
        epoch, _ = self._refused.get(place, (-1, 0.0))
        if epoch != broker.broker_epoch:
            log.info(
                "the broker's memory cannot be read in place; chunks are copied",
                broker_id=broker.broker_id,
                memory_domain=domain,
                error=error.message,
            )
        passes = error.retriable or isinstance(error, NotAllowed)  # rights may be granted later
        again_s = asyncio.get_running_loop().time() + self._timing.push_again_s if passes else math.inf
        self._refused[place] = broker.broker_epoch, again_s

    async def close(self) -> None:
        """Close all connections. No new ones can be made."""
        self._closed = True
        connections = list(self._connections.values())
        self._connections.clear()
        await close_all(each.close for each in connections)

    def _check_open(self) -> None:
        self._origin.check()
        if self._closed:
            raise ClosedError("the client is closed")
