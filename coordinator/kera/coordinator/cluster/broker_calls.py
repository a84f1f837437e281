"""The coordinator's calls to brokers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Protocol

from kera.coordinator.cluster.peers import Peers, cannot_be_reached
from kera.core.base.address import split_address
from kera.core.errors import Unavailable
from kera.core.rpc import api
from kera.core.runtime import MACHINE, OpenChannel
from kera.v1 import broker_pb2, common_pb2

__all__ = ["TAKE_OVER_TIMEOUT_S", "BrokerCalls", "GrpcBrokerCalls", "cannot_be_reached"]

TAKE_OVER_TIMEOUT_S = 60.0
"""The time for a broker to read the headers of all replicas of a lost broker.

After a timeout the broker continues, and the same request, repeated, joins the work under way.
"""


class BrokerCalls(Protocol):
    """The coordinator's calls to brokers. Each call takes bounded time, and may be repeated.

    All raise `Unavailable`, `Uncertain` or the broker's error: `StaleEpoch` if it has had orders of a later
    coordinator.
    """

    async def open_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream: common_pb2.StreamInfo,
        *,
        coordinator_epoch: int,
        handed_over: Sequence[common_pb2.StreamletState] = (),
        created: bool = False,
    ) -> list[int]:
        """Have `broker` serve its streamlets of `stream`, and learn where the others are.

        `created`: the stream is new, and no broker has served it yet. Returns the streamlets that the broker cannot
        serve,
        because it never got the state that was handed over.
        """
        ...

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int, *, coordinator_epoch: int) -> None:
        """Have `broker` forget the stream."""
        ...

    async def seal_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream_id: int,
        streamlet_ids: Sequence[int],
        *,
        wait_ms: int,
        coordinator_epoch: int,
        assignments_version: int,
    ) -> list[common_pb2.StreamletState]:
        """Have `broker` accept no more chunks for streamlets, and return where they end.

        The broker refuses if it knows a later version of the assignments.
        """
        ...

    async def where_ended(
        self, broker: common_pb2.BrokerInfo, stream_id: int, streamlet_id: int, *, coordinator_epoch: int
    ) -> common_pb2.StreamletState:
        """Have `broker` return again where a streamlet ended that has moved away from it."""
        ...

    async def take_over(
        self, broker: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        """Have `broker` find out from backups where streamlets of a lost broker end."""
        ...

    async def measure_lag(
        self, broker: common_pb2.BrokerInfo, cursors: Sequence[common_pb2.Cursor]
    ) -> Sequence[broker_pb2.Lag]:
        """Have `broker` measure how much follows each cursor."""
        ...

    async def refuses(self, broker: common_pb2.BrokerInfo) -> bool:
        """Whether the broker's address refuses connections: all addresses of its host do.

        A timeout does not count: the broker may be slow.
        """
        ...


class GrpcBrokerCalls:
    """See `BrokerCalls`; over the brokers' open interface."""

    def __init__(self, *, timeout_ms: int, channel: OpenChannel = MACHINE.channel) -> None:
        self._timeout_s = timeout_ms / 1000
        self._peers = Peers(timeout_ms=timeout_ms, channel=channel)

    async def open_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream: common_pb2.StreamInfo,
        *,
        coordinator_epoch: int,
        handed_over: Sequence[common_pb2.StreamletState] = (),
        created: bool = False,
    ) -> list[int]:
        """See `BrokerCalls.open_streamlets`."""
        request = broker_pb2.OpenStreamletsRequest(
            stream=stream, coordinator_epoch=coordinator_epoch, handed_over=handed_over, created=created
        )
        answer = await self._peers.call(broker.grpc_address, api.OPEN_STREAMLETS, request)
        return list(answer.lacking)

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int, *, coordinator_epoch: int) -> None:
        """See `BrokerCalls.drop_stream`."""
        request = broker_pb2.DropStreamRequest(stream_id=stream_id, coordinator_epoch=coordinator_epoch)
        await self._peers.call(broker.grpc_address, api.DROP_STREAM, request)

    async def seal_streamlets(
        self,
        broker: common_pb2.BrokerInfo,
        stream_id: int,
        streamlet_ids: Sequence[int],
        *,
        wait_ms: int,
        coordinator_epoch: int,
        assignments_version: int,
    ) -> list[common_pb2.StreamletState]:
        """See `BrokerCalls.seal_streamlets`."""
        request = broker_pb2.SealStreamletsRequest(
            coordinator_epoch=coordinator_epoch,
            stream_id=stream_id,
            streamlet_ids=streamlet_ids,
            wait_ms=wait_ms,
            assignments_version=assignments_version,
        )
        timeout_s = wait_ms / 1000 + self._timeout_s
        answer = await self._peers.call(broker.grpc_address, api.SEAL_STREAMLETS, request, timeout_s=timeout_s)
        return list(answer.states)

    async def where_ended(
        self, broker: common_pb2.BrokerInfo, stream_id: int, streamlet_id: int, *, coordinator_epoch: int
    ) -> common_pb2.StreamletState:
        """See `BrokerCalls.where_ended`."""
        request = broker_pb2.SealStreamletsRequest(
            coordinator_epoch=coordinator_epoch, stream_id=stream_id, streamlet_ids=[streamlet_id], ended=True
        )
        answer = await self._peers.call(broker.grpc_address, api.SEAL_STREAMLETS, request)
        if len(answer.states) != 1:
            raise Unavailable(f"broker {broker.broker_id} does not say where streamlet {streamlet_id} ended")
        return answer.states[0]

    async def take_over(
        self, broker: common_pb2.BrokerInfo, request: broker_pb2.TakeOverRequest
    ) -> broker_pb2.TakeOverResponse:
        """See `BrokerCalls.take_over`."""
        return await self._peers.call(broker.grpc_address, api.TAKE_OVER, request, timeout_s=TAKE_OVER_TIMEOUT_S)

    async def measure_lag(
        self, broker: common_pb2.BrokerInfo, cursors: Sequence[common_pb2.Cursor]
    ) -> Sequence[broker_pb2.Lag]:
        """See `BrokerCalls.measure_lag`."""
        request = broker_pb2.MeasureLagRequest(cursors=cursors)
        answer = await self._peers.call(broker.grpc_address, api.MEASURE_LAG, request)
        if len(answer.lags) != len(cursors):
            raise Unavailable(
                f"broker {broker.broker_id} was asked about {len(cursors)} cursors, and answers otherwise"
            )
        return answer.lags

    async def refuses(self, broker: common_pb2.BrokerInfo) -> bool:
        """See `BrokerCalls.refuses`."""
        host, port = split_address(broker.grpc_address)
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for *_, address in found:  # one by one: of several errors asyncio makes one without a kind
                    if not await _refuses(*address[:2]):
                        return False
        except OSError:  # TimeoutError is one
            return False
        return True

    async def close(self) -> None:
        """Close the connections."""
        await self._peers.close()


async def _refuses(host: str, port: int) -> bool:
    """Whether one address of a host refuses connections. Raises `OSError` if it cannot be reached otherwise."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False
