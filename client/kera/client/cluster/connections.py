"""Connections to brokers for requests: one each, by the fastest transport that works.

An unreachable broker is reported to the coordinator, which then checks the broker: so a crash is noticed before the
broker's heartbeats are missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kera.client.settings import ClientSettings, Transport
from kera.client.types import BrokerDescription, StreamDescription
from kera.core.base.closing import close_all
from kera.core.base.forks import Origin
from kera.core.errors import AuthenticationFailed, ClosedError, KeraError, Unavailable, Uncertain
from kera.core.rpc import Channel, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.method import Introduction, call
from kera.core.runtime import MACHINE, OpenChannel
from kera.core.security import Tls
from kera.v1 import broker_pb2


class _Connection(NamedTuple):
    channel: Channel
    broker_epoch: int
    """Epoch of the broker's launch, as far as known."""


class Connections:
    """The connections of one client. Belongs to one event loop."""

    def __init__(
        self,
        node_id: str,
        settings: ClientSettings,
        *,
        report_again_s: float,
        report: Callable[[BrokerDescription, Unavailable], None],
        open_channel: OpenChannel = MACHINE.channel,
        tls: Tls | None = None,
        introduction: Introduction | None = None,
    ) -> None:
        """`report`: tells the coordinator, without waiting, that a broker cannot be reached; called at most once every
        `report_again_s` for the same launch of a broker.
        """
        self._node_id = node_id
        self._settings = settings
        self._open_channel = open_channel
        self._tls = tls
        self._introduction = introduction
        self._report_again_s = report_again_s
        self._report = report
        self._reported: dict[int, tuple[int, float]] = {}
        """The last reported epoch of each broker, and the time of the report."""
        self._connections: dict[int, _Connection] = {}
        self._connecting: dict[int, asyncio.Lock] = {}
        self._origin = Origin()
        self._closed = False

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        """Return a live connection to a broker that `stream` names.

        Raises `Unavailable`, and `ClosedError` after `close`.
        """
        self._origin.check()
        broker = stream.brokers.get(broker_id)
        broker_epoch = 0 if broker is None else broker.broker_epoch
        known = self._live(broker_id, broker_epoch)
        if known is not None:
            return known
        if broker is None:
            raise Unavailable(f"broker {broker_id} of stream {stream.name!r} is not known", broker_id=broker_id)
        async with self._connecting.setdefault(broker_id, asyncio.Lock()):
            known = self._live(broker_id, broker_epoch)
            if known is not None:
                return known
            old = self._connections.get(broker_id)
            self._check_open()
            try:
                channel = await self._connect(broker)
            except Unavailable as error:
                self._report_once(broker, error)
                raise
            if self._closed:
                await channel.close()
            self._check_open()
            self._connections[broker_id] = _Connection(channel, broker_epoch)
        if old is not None:
            await old.channel.close()
        return channel

    def _live(self, broker_id: int, broker_epoch: int) -> Channel | None:
        """Return the connection, if it still leads to the broker.

        A connection over frames closes when the other end does. One over gRPC does not: it is valid only for the launch
        of the broker that it was made for, because a later launch may be at another address.
        """
        known = self._connections.get(broker_id)
        if known is None or known.channel.closed:
            return None
        if known.channel.transport == "grpc" and known.broker_epoch < broker_epoch:
            return None
        return known.channel

    def _report_once(self, broker: BrokerDescription, error: Unavailable) -> None:
        now_s = asyncio.get_running_loop().time()
        epoch, reported_s = self._reported.get(broker.broker_id, (-1, 0.0))
        if epoch == broker.broker_epoch and now_s < reported_s + self._report_again_s:
            return
        self._reported[broker.broker_id] = broker.broker_epoch, now_s
        self._report(broker, error)

    async def _connect(self, broker: BrokerDescription) -> Channel:
        last: Unavailable | None = None
        for transport in self._transports(broker):
            try:
                return await self._connect_by(transport, broker)
            except Unavailable as error:
                last = error
        raise last or Unavailable(
            f"broker {broker.broker_id} does not offer transport {self._settings.transport}", broker_id=broker.broker_id
        )

    def _transports(self, broker: BrokerDescription) -> list[Transport]:
        """Return the transports that can work, the fastest first."""
        local = broker.node_id == self._node_id and _is_there(broker.frames_unix_path)
        offered: list[Transport] = []
        if broker.frames_unix_path and local:
            offered.append("unix")
        if broker.frames_address:
            offered.append("tcp")
        offered.append("grpc")
        wanted = self._settings.transport
        return offered if wanted == "auto" else [transport for transport in offered if transport == wanted]

    async def _connect_by(self, transport: Transport, broker: BrokerDescription) -> Channel:
        timeout_s = self._settings.connect_timeout_ms / 1000
        bulk_bytes_max = self._settings.message_bytes_max
        if transport == "unix":
            return await FrameChannel.connect_unix(
                broker.frames_unix_path,
                timeout_s=timeout_s,
                bulk_bytes_max=bulk_bytes_max,
                introduction=self._introduction,
            )
        if transport == "tcp":
            return await FrameChannel.connect_tcp(
                broker.frames_address,
                timeout_s=timeout_s,
                bulk_bytes_max=bulk_bytes_max,
                tls=self._tls,
                introduction=self._introduction,
            )
        channel = self._open_channel(broker.grpc_address, bulk_bytes_max=bulk_bytes_max)
        try:
            # gRPC connects with the first call. Without a call, the client would keep a gRPC channel to a broker that
            # is just away, and stay with the slowest transport for good.
            await call(channel, api.DESCRIBE_STREAMLETS, broker_pb2.DescribeStreamletsRequest(), timeout_s=timeout_s)
        except (Unavailable, Uncertain) as error:
            await channel.close()
            raise Unavailable(error.message, **error.attributes) from error
        except AuthenticationFailed:
            await channel.close()
            raise
        except KeraError:
            pass  # the broker answers, with an error because no stream has the id 0
        return channel

    async def close(self) -> None:
        """Close all connections. No new ones can be made."""
        self._closed = True
        channels = [connection.channel for connection in self._connections.values()]
        self._connections.clear()
        await close_all(channel.close for channel in channels)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the client is closed")


def _is_there(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # not a valid path
        return False
