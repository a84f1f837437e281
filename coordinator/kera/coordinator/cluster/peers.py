"""Connections to daemons, by address. A connection is kept until a call on it fails; the next call opens a new one.

Calls that are under way on the failed connection go on: a busy daemon that leaves one call without an answer may be
about to answer another one, which has more time.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kera.core.errors import Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.method import Channel, Method, RequestT, ResponseT, call
from kera.core.runtime import MACHINE, OpenChannel
from kera.v1 import access_pb2

IDLE_S = 600.0
"""A connection without calls for this many seconds is closed when another one is opened: its daemon may have moved."""


@dataclass(eq=False, slots=True)
class _Connection:
    channel: Channel
    used_s: float
    """The time of the last call, on the loop's clock."""
    calls: int = 0
    """Calls under way."""


class Peers:
    """Calls daemons over their open interface."""

    def __init__(self, *, timeout_ms: int, channel: OpenChannel = MACHINE.channel) -> None:
        self._timeout_s = timeout_ms / 1000
        self._connections: dict[str, _Connection] = {}
        self._open = channel

    async def call(
        self, address: str, method: Method[RequestT, ResponseT], message: RequestT, *, timeout_s: float | None = None
    ) -> ResponseT:
        """Call a daemon. Raises `Unavailable`, `Uncertain` or the daemon's error."""
        now_s = asyncio.get_running_loop().time
        connection, idle = self._connections.get(address), list[_Connection]()
        if connection is None:
            idle = self._take_idle(now_s())
            connection = self._connections[address] = _Connection(self._open(address), now_s())
        connection.calls += 1
        try:
            for unused in idle:
                await unused.channel.close()
            return await call(connection.channel, method, message, timeout_s=timeout_s or self._timeout_s)
        except (Unavailable, Uncertain) as error:
            # gRPC waits longer and longer before it connects again, up to two minutes; a daemon that came back under
            # its old address would be refused for that long. An error that the daemon itself sent shows that the
            # connection is sound.
            if cannot_be_reached(error) and self._connections.get(address) is connection:
                del self._connections[address]
            raise
        finally:
            connection.calls -= 1
            connection.used_s = now_s()
            if not connection.calls and self._connections.get(address) is not connection:
                await connection.channel.close()

    def _take_idle(self, now_s: float) -> list[_Connection]:
        idle = [
            address
            for address, connection in self._connections.items()
            if not connection.calls and now_s - connection.used_s > IDLE_S
        ]
        return [self._connections.pop(address) for address in idle]

    async def close(self) -> None:
        """Close the connections."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.channel.close()


class GrpcMembers:
    """Sends members the users and rules, see `kera.coordinator.access.telling.TellMember`."""

    def __init__(self, *, timeout_ms: int, channel: OpenChannel = MACHINE.channel) -> None:
        self._peers = Peers(timeout_ms=timeout_ms, channel=channel)

    async def __call__(self, address: str, request: access_pb2.ApplyAccessRequest, *, timeout_s: float) -> None:
        """See `TellMember`."""
        await self._peers.call(address, api.APPLY_ACCESS, request, timeout_s=timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._peers.close()


def cannot_be_reached(error: BaseException) -> bool:
    """Whether the daemon gave no answer, as opposed to a refusal."""
    return type(error) in {Unavailable, Uncertain}
