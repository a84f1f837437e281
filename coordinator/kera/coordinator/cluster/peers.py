"""Connections to daemons, by address. A connection is kept until a call on it fails; the next call opens a new one."""

from __future__ import annotations

from kera.core.errors import Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.method import Channel, Method, RequestT, ResponseT, call
from kera.core.runtime import MACHINE, OpenChannel
from kera.v1 import access_pb2


class Peers:
    """Calls daemons over their open interface."""

    def __init__(self, *, timeout_ms: int, channel: OpenChannel = MACHINE.channel) -> None:
        self._timeout_s = timeout_ms / 1000
        self._channels: dict[str, Channel] = {}
        self._open = channel

    async def call(
        self, address: str, method: Method[RequestT, ResponseT], message: RequestT, *, timeout_s: float | None = None
    ) -> ResponseT:
        """Call a daemon. Raises `Unavailable`, `Uncertain` or the daemon's error."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._open(address)
        try:
            return await call(channel, method, message, timeout_s=timeout_s or self._timeout_s)
        except (Unavailable, Uncertain) as error:
            # gRPC waits longer and longer before it connects again, up to two minutes; a daemon that came back under
            # its old address would be refused for that long. An error that the daemon itself sent shows that the
            # connection is sound.
            if cannot_be_reached(error) and self._channels.get(address) is channel:
                del self._channels[address]
                await channel.close()
            raise

    async def close(self) -> None:
        """Close the connections."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()


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
