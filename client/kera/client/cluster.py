"""The SDK's view of the cluster: cached metadata, and one connection per broker.

Metadata is what the coordinator said last; whoever learns that it is stale (`NotOwner`, `UnknownStream`, a lost
connection) says `forget`, and the next look asks again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kera.client.retry import retrying
from kera.client.settings import ClientSettings, Transport
from kera.client.types import (
    BackupDescription,
    BrokerDescription,
    ClusterDescription,
    EntryBounds,
    StreamDescription,
    fill_cursor,
    position_of,
)
from kera.core.errors import InvalidArgument, KeraError, NotOwner, Unavailable, Uncertain, UnknownStream
from kera.core.ids import EntryId, Position
from kera.core.process import node_id
from kera.core.rpc import Channel, Method, api
from kera.core.rpc.frame_client import FrameChannel
from kera.core.rpc.grpc_client import GrpcChannel
from kera.core.rpc.method import RequestT, ResponseT, call
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, coordinator_pb2


class _Connection(NamedTuple):
    channel: Channel
    broker_epoch: int
    """Of the broker's launch, as far as was known."""


class Cluster:
    """Shared by the producers, consumers and the admin of one `Client`."""

    def __init__(self, bootstrap: str, settings: ClientSettings) -> None:
        addresses = [address.strip() for address in bootstrap.split(",") if address.strip()]
        for address in addresses:
            host, separator, port = address.rpartition(":")
            if not (host and separator and port.isdigit()):
                raise InvalidArgument(f"bootstrap address {address!r} is not host:port", address=address)
        if not addresses:
            raise InvalidArgument("no bootstrap address; give host:port of the coordinator")
        self.settings = settings
        self._node_id = node_id()
        self._coordinators = [GrpcChannel(address, bulk_bytes_max=settings.message_bytes_max) for address in addresses]
        self._streams: dict[str, StreamDescription] = {}
        self._connections: dict[int, _Connection] = {}
        self._connecting: dict[int, asyncio.Lock] = {}

    @property
    def request_timeout_s(self) -> float:
        """Time for one answer."""
        return self.settings.request_timeout_ms / 1000

    async def ask(self, method: Method[RequestT, ResponseT], message: RequestT) -> ResponseT:
        """Call the coordinator, with retries; of several, the first that answers."""

        async def attempt() -> ResponseT:
            last: Unavailable | None = None
            for channel in self._coordinators:
                try:
                    return await call(channel, method, message, timeout_s=self.request_timeout_s)
                except Unavailable as error:
                    if "address" not in error.attributes:
                        raise  # it was reached, and what it needs is not there
                    last = error
            raise Unavailable(
                f"no coordinator can be reached ({last.message if last else 'none is known'});"
                " is the cluster running (kera dev)?"
            )

        return await retrying(attempt, self.settings)

    async def stream(self, name: str) -> StreamDescription:
        """The stream called `name`, from the cache if it is there. Raises `UnknownStream`."""
        known = self._streams.get(name)
        if known is None:
            answer = await self.ask(api.DESCRIBE_STREAM, coordinator_pb2.DescribeStreamRequest(name=name))
            known = self._streams[name] = StreamDescription.from_message(answer.stream, answer.brokers)
        return known

    def forget(self, name: str) -> None:
        """Ask the coordinator again about a stream, next time."""
        self._streams.pop(name, None)

    async def describe(self) -> ClusterDescription:
        """All brokers and backups."""
        answer = await self.ask(api.DESCRIBE_CLUSTER, coordinator_pb2.DescribeClusterRequest())
        return ClusterDescription(
            answer.cluster_id,
            [BrokerDescription.from_message(info) for info in answer.brokers],
            [BackupDescription.from_message(info) for info in answer.backups],
        )

    async def bounds(self, name: str) -> dict[int, list[EntryBounds]]:
        """Starts and ends of all entries, asked of the brokers now; by streamlet."""

        async def attempt() -> dict[int, list[EntryBounds]]:
            stream = await self.stream(name)
            streamlets: dict[int, list[int]] = {}
            for streamlet_id, assignment in stream.assignments.items():
                streamlets.setdefault(assignment.broker_id, []).append(streamlet_id)
            try:
                answers = await asyncio.gather(
                    *(self._describe_streamlets(stream, broker, owned) for broker, owned in streamlets.items())
                )
            except (NotOwner, Unavailable, UnknownStream):
                self.forget(name)  # of a stream that was deleted, another one may have the name by now
                raise
            merged = {streamlet_id: entries for answer in answers for streamlet_id, entries in answer.items()}
            return dict(sorted(merged.items()))

        return await retrying(attempt, self.settings)

    async def _describe_streamlets(
        self, stream: StreamDescription, broker_id: int, streamlet_ids: Sequence[int]
    ) -> dict[int, list[EntryBounds]]:
        channel = await self.channel(stream, broker_id)
        request = broker_pb2.DescribeStreamletsRequest(stream_id=stream.stream_id, streamlet_ids=streamlet_ids)
        answer = await call(channel, api.DESCRIBE_STREAMLETS, request, timeout_s=self.request_timeout_s)
        return {
            info.streamlet_id: [EntryBounds.from_message(entry) for entry in info.entries] for info in answer.streamlets
        }

    async def truncate(self, name: str, positions: Mapping[EntryId, Position]) -> dict[EntryId, Position]:
        """Remove what is before `positions`; where these entries start now. See `Admin.truncate_stream`."""
        return await self._with_cursors(name, positions, api.TRUNCATE_STREAMLETS, broker_pb2.TruncateStreamletsRequest)

    async def commit(self, application_id: str, name: str, positions: Mapping[EntryId, Position]) -> None:
        """Tell the brokers how far an application has read. See `Admin.commit_cursors`."""
        if not application_id:
            raise InvalidArgument("a commit is an application's; name it with application_id")
        new_request = partial(broker_pb2.CommitCursorsRequest, application_id=application_id)
        await self._with_cursors(name, positions, api.COMMIT_CURSORS, new_request)

    async def _with_cursors(
        self,
        name: str,
        positions: Mapping[EntryId, Position],
        method: Method[Any, Any],
        new_request: Callable[[], broker_pb2.TruncateStreamletsRequest | broker_pb2.CommitCursorsRequest],
    ) -> dict[EntryId, Position]:
        """Send each broker the cursors of its streamlets; the starts that they answer.

        All brokers have answered, or failed to, when the first error is raised. After one that is retriable all are
        asked again: to say the same twice does no harm.
        """

        async def attempt() -> dict[EntryId, Position]:
            stream = await self.stream(name)
            owned: dict[int, list[EntryId]] = {}

            async def ask(broker_id: int) -> list[tuple[EntryId, broker_pb2.CursorResult]]:
                request = new_request()
                for entry in owned[broker_id]:
                    fill_cursor(request.cursors.add(), entry, positions[entry])
                channel = await self.channel(stream, broker_id)
                answer = await call(channel, method, request, timeout_s=self.request_timeout_s)
                return list(zip(owned[broker_id], answer.results, strict=True))

            starts = {}
            try:
                for entry in positions:
                    if entry.stream_id != stream.stream_id:
                        raise UnknownStream(
                            f"stream {name!r} was deleted and created again", stream=name, stream_id=entry.stream_id
                        )
                    owned.setdefault(stream.assignments[entry.streamlet_id].broker_id, []).append(entry)
                for answer in await asyncio.gather(*map(ask, owned), return_exceptions=True):
                    if isinstance(answer, BaseException):
                        raise answer
                    for entry, result in answer:
                        if result.HasField("error"):
                            raise error_from_message(result.error)
                        starts[entry] = position_of(result.start)
            except (NotOwner, Unavailable, UnknownStream):
                self.forget(name)
                raise
            return starts

        return await retrying(attempt, self.settings)

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        """A live connection to a broker that `stream` names. Raises `Unavailable`."""
        broker_epoch = max(
            (owner.broker_epoch for owner in stream.assignments.values() if owner.broker_id == broker_id), default=0
        )
        known = self._live(broker_id, broker_epoch)
        if known is not None:
            return known
        broker = stream.brokers.get(broker_id)
        if broker is None:
            raise Unavailable(f"broker {broker_id} of stream {stream.name!r} is not known", broker_id=broker_id)
        async with self._connecting.setdefault(broker_id, asyncio.Lock()):
            known = self._live(broker_id, broker_epoch)
            if known is not None:
                return known
            old = self._connections.get(broker_id)
            channel = await self._connect(broker)
            self._connections[broker_id] = _Connection(channel, broker_epoch)
        if old is not None:
            await old.channel.close()
        return channel

    def _live(self, broker_id: int, broker_epoch: int) -> Channel | None:
        """The connection, if it still leads to the broker.

        One over frames closes when the other end has gone. One over gRPC does not: it counts for the launch it was made
        for, as a later one may be elsewhere.
        """
        known = self._connections.get(broker_id)
        if known is None or known.channel.closed:
            return None
        if known.channel.transport == "grpc" and known.broker_epoch < broker_epoch:
            return None
        return known.channel

    async def _connect(self, broker: BrokerDescription) -> Channel:
        last: Unavailable | None = None
        for transport in self._transports(broker):
            try:
                return await self._connect_by(transport, broker)
            except Unavailable as error:
                last = error
        raise last or Unavailable(
            f"broker {broker.broker_id} does not offer transport {self.settings.transport}", broker_id=broker.broker_id
        )

    def _transports(self, broker: BrokerDescription) -> list[Transport]:
        """Those that can work, the fastest first."""
        local = broker.node_id == self._node_id and Path(broker.frames_unix_path).exists()
        offered: list[Transport] = []
        if broker.frames_unix_path and local:
            offered.append("unix")
        if broker.frames_address:
            offered.append("tcp")
        offered.append("grpc")
        wanted = self.settings.transport
        return offered if wanted == "auto" else [transport for transport in offered if transport == wanted]

    async def _connect_by(self, transport: Transport, broker: BrokerDescription) -> Channel:
        timeout_s = self.settings.connect_timeout_ms / 1000
        bulk_bytes_max = self.settings.message_bytes_max
        if transport == "unix":
            return await FrameChannel.connect_unix(
                broker.frames_unix_path, timeout_s=timeout_s, bulk_bytes_max=bulk_bytes_max
            )
        if transport == "tcp":
            return await FrameChannel.connect_tcp(
                broker.frames_address, timeout_s=timeout_s, bulk_bytes_max=bulk_bytes_max
            )
        channel = GrpcChannel(broker.grpc_address, bulk_bytes_max=bulk_bytes_max)
        try:
            # It connects with the first call. Without one, a broker that is just away would be "found" here, and with
            # the slowest transport for good.
            await call(channel, api.DESCRIBE_STREAMLETS, broker_pb2.DescribeStreamletsRequest(), timeout_s=timeout_s)
        except (Unavailable, Uncertain) as error:
            await channel.close()
            raise Unavailable(error.message, **error.attributes) from error
        except KeraError:
            pass  # it answers: no stream has the id 0
        return channel

    async def close(self) -> None:
        """Close all connections."""
        channels = [*(connection.channel for connection in self._connections.values()), *self._coordinators]
        self._connections.clear()
        await asyncio.gather(*(channel.close() for channel in channels))
