"""What the coordinator asks of brokers. Connections are kept; one that fails is replaced at the next call."""

from __future__ import annotations

from typing import Protocol

from kera.core.errors import KeraError, Unavailable, Uncertain
from kera.core.rpc import api
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import Method, RequestT, ResponseT, call
from kera.v1 import broker_pb2, common_pb2


class Brokers(Protocol):
    """The brokers, as the coordinator reaches them. Each call takes bounded time, and may be repeated."""

    async def open_streamlets(self, broker: common_pb2.BrokerInfo, stream: common_pb2.StreamInfo) -> None:
        """Have `broker` serve its streamlets of `stream`. Raises `Unavailable`, `Uncertain` or what it answers."""
        ...

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int) -> None:
        """Have `broker` forget the stream. Raises `Unavailable`, `Uncertain` or what it answers."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class GrpcBrokers:
    """See `Brokers`; over the brokers' open interface."""

    def __init__(self, *, timeout_ms: int) -> None:
        self._timeout_s = timeout_ms / 1000
        self._channels: dict[str, GrpcChannel] = {}

    async def open_streamlets(self, broker: common_pb2.BrokerInfo, stream: common_pb2.StreamInfo) -> None:
        """See `Brokers.open_streamlets`."""
        await self._call(broker, api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=stream))

    async def drop_stream(self, broker: common_pb2.BrokerInfo, stream_id: int) -> None:
        """See `Brokers.drop_stream`."""
        await self._call(broker, api.DROP_STREAM, broker_pb2.DropStreamRequest(stream_id=stream_id))

    async def close(self) -> None:
        """See `Brokers.close`."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _call(
        self, broker: common_pb2.BrokerInfo, method: Method[RequestT, ResponseT], message: RequestT
    ) -> None:
        address = broker.grpc_address
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = GrpcChannel(address)
        try:
            await call(channel, method, message, timeout_s=self._timeout_s)
        except (Unavailable, Uncertain):
            # gRPC waits longer and longer before it connects again, up to two minutes; a broker that came back under
            # its old address would be refused for that long.
            if self._channels.get(address) is channel:
                del self._channels[address]
                await channel.close()
            raise


def cannot_be_reached(error: KeraError) -> bool:
    """Whether the broker gave no answer, as opposed to a refusal."""
    return isinstance(error, Unavailable | Uncertain)
