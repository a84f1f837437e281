"""The way in: a `Client` knows one cluster and makes producers, consumers and the admin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

from kera.client.admin import Admin
from kera.client.cluster import Cluster
from kera.client.consumer import Consumer, End, Positions, Start
from kera.client.fetch import Fetched, Fetcher, Wanted, batches_of
from kera.client.group_consumer import GroupConsumer, LostGroup
from kera.client.group_settings import GroupSettings
from kera.client.producer import Producer
from kera.client.retry import is_route_error, of_broker, retrying
from kera.client.settings import ClientSettings, ConsumerSettings, ProducerSettings
from kera.client.types import ChunkBatch, EntryBounds, StreamDescription
from kera.core.errors import InvalidArgument, KeraError, UnknownStream
from kera.core.ids import Position

READ_BYTES_MAX = 4 << 20


class Client:
    """Connections to one cluster, shared by everything made from it; use it as an async context manager.

    ::

        async with await Client.connect("127.0.0.1:7400") as client:
            await client.admin.create_stream("greetings")
            async with client.producer() as producer:
                await producer.prepare("greetings")
                await producer.send("greetings", b"hello")
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.admin = Admin(cluster)

    @classmethod
    async def connect(cls, bootstrap: str, settings: ClientSettings | None = None) -> Client:
        """A client of the cluster whose coordinators are at `bootstrap`: ``host:port``, several with commas.

        Connections are made when they are needed; a cluster that is not there shows at the first call.
        """
        return cls(Cluster(bootstrap, settings or ClientSettings.load()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def producer(self, settings: ProducerSettings | None = None, **overrides: Any) -> Producer:
        """A producer; `overrides` are fields of `ProducerSettings`."""
        return Producer(self._cluster, _merged(ProducerSettings, settings, overrides))

    def consumer(
        self,
        *streams: str,
        start: Start | Positions = "latest",
        end: End | Positions | None = None,
        settings: ConsumerSettings | None = None,
        **overrides: Any,
    ) -> Consumer:
        """A consumer of `streams`; `overrides` are fields of `ConsumerSettings`.

        `start` is ``"earliest"``, ``"latest"``, ``"committed"`` (where ``application_id`` has stopped, else with the
        oldest), or positions (see `Consumer.positions`); `end` is None (never), ``"latest"`` (what is there at the
        start) or positions.
        """
        return Consumer(self._cluster, streams, _merged(ConsumerSettings, settings, overrides), start=start, end=end)

    def group_consumer(
        self,
        application_id: str,
        streams: str | Sequence[str],
        settings: GroupSettings | None = None,
        *,
        on_lost: Callable[[list[LostGroup]], None] | None = None,
        **overrides: Any,
    ) -> GroupConsumer:
        """A consumer that shares `streams` with the others of its application; `overrides` are of `GroupSettings`.

        Each record goes to one of them, and cursors are kept by the coordinator. `on_lost` is called, instead of
        raising `LeaseLost`, when groups of segments have gone to others because this consumer was silent or stuck.
        """
        names = (streams,) if isinstance(streams, str) else streams
        merged = _merged(GroupSettings, settings, overrides)
        return GroupConsumer(self._cluster, application_id, names, merged, on_lost=on_lost)

    async def describe(self, stream: str) -> StreamDescription:
        """A stream, from cached metadata. Raises `UnknownStream`."""
        return await self._cluster.stream(stream)

    async def bounds(self, stream: str) -> dict[int, list[EntryBounds]]:
        """Where each entry of each streamlet starts and ends now."""
        return await self._cluster.bounds(stream)

    async def read_range(
        self,
        stream: str,
        streamlet_id: int,
        entry: int,
        start: Position,
        end: Position | None,
        *,
        bytes_max: int = READ_BYTES_MAX,
        settings: ConsumerSettings | None = None,
    ) -> AsyncIterator[ChunkBatch]:
        """The chunks of one entry from `start` up to exactly `end`, or up to the durable head of now.

        Follows them over all brokers that have some of them. Fetches one answer ahead. Raises what `Consumer.batches`
        raises.
        """
        settings = settings or ConsumerSettings.load()
        description = await self._cluster.stream(stream)
        entry_id = description.entry_id(streamlet_id, entry)
        if end is None:
            end = (await self._cluster.bounds(stream))[streamlet_id][entry].end
        if end <= start:
            return
        fetchers: list[Fetcher] = []

        async def fetch(wanted: Wanted) -> Fetched:
            async def attempt() -> Fetched:
                try:
                    fetcher = await self._fetcher(stream, wanted, settings, fetchers)
                    (answer,) = await fetcher.fetch(
                        [wanted], bytes_max=bytes_max, wait_ms=0, timeout_s=self._cluster.request_timeout_s
                    )
                    if answer.error is not None:
                        raise of_broker(answer.error)
                except KeraError as error:
                    if is_route_error(error):
                        self._cluster.forget(stream)
                    raise
                return answer

            return await retrying(attempt, self._cluster.settings)

        position = start
        ahead = asyncio.ensure_future(fetch(Wanted(entry_id, position, end)))
        try:
            while position < end:
                fetched = await ahead
                if fetched.next == position and not fetched.buffers:
                    raise InvalidArgument(
                        f"{tuple(end)} lies behind the end of streamlet {streamlet_id} of stream {stream!r}",
                        stream=stream,
                        streamlet_id=streamlet_id,
                    )
                position = fetched.next
                if position < end:
                    ahead = asyncio.ensure_future(fetch(Wanted(entry_id, position, end)))
                for batch in batches_of(
                    fetched, description.schema, description.schema_id, verify=settings.verify_checksums
                ):
                    yield batch
        finally:
            ahead.cancel()
            ahead.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody wants it any more

    async def _fetcher(
        self, stream: str, wanted: Wanted, settings: ConsumerSettings, fetchers: list[Fetcher]
    ) -> Fetcher:
        """The fetcher of the broker that has the start of a range, made anew when the connection is."""
        description = await self._cluster.stream_or_last_seen(stream)
        if description.stream_id != wanted.entry.stream_id:
            raise UnknownStream(
                f"stream {stream!r} was deleted and created again", stream=stream, stream_id=wanted.entry.stream_id
            )
        broker_id = description.assignments[wanted.entry.streamlet_id].broker_at(wanted.start)
        channel = await self._cluster.channel(description, broker_id)
        if not fetchers or fetchers[-1].channel is not channel:
            fetchers.append(Fetcher(channel, settings))
        return fetchers[-1]

    async def close(self) -> None:
        """Close all connections. Producers and consumers should be closed before.

        Batches that lie in a broker's memory are held by the connection: after this, they stay as they are only until
        the broker uses the memory again. Who needs them for longer copies them, or reads with `shared_memory` never.
        """
        await self._cluster.close()


def _merged(kind: Any, settings: Any, overrides: dict[str, Any]) -> Any:
    if settings is None:
        return kind.load(**overrides)
    return kind.load(**{**settings.model_dump(), **overrides}) if overrides else settings
