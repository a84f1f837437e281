"""The client without asyncio, for scripts, notebooks and web applications with threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self
from weakref import WeakSet

from kera.client.admin.locating import ChunkQuery, SegmentBounds, Unit
from kera.client.chunk_batch import ChunkBatch
from kera.client.client import READ_BYTES_MAX
from kera.client.client import Client as AsyncClient
from kera.client.consuming.groups.leases import LostGroup
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.consuming.start_and_end import End, Start
from kera.client.epochs.beginning import EpochStart
from kera.client.epochs.reader import EPOCH_BYTES_MAX, EpochEnd
from kera.client.positions import ChunkPlace, Places, Positions
from kera.client.serializers.choosing import DeserializerLike, SerializerLike
from kera.client.settings import ClientSettings, ConsumerSettings, ProducerSettings
from kera.client.sync.access import Access
from kera.client.sync.admin import Admin
from kera.client.sync.consumer import Consumer, GroupConsumer, following
from kera.client.sync.epochs import Epochs, OrderedConsumer
from kera.client.sync.handover import Handover
from kera.client.sync.latency import Latency
from kera.client.sync.loop_thread import loop_thread
from kera.client.sync.producer import Producer
from kera.client.sync.schemas import SchemaRegistry
from kera.client.types import EntryBounds, StreamDescription
from kera.client.unclosed import ends_in_order
from kera.core.base.ids import EntryId, Position
from kera.core.runtime import MACHINE, Runtime


class Client:
    """Connections to one cluster, shared by everything made from it; use it as a context manager.

    ::

        with Client("127.0.0.1:7400") as client:
            client.admin.create_stream("greetings")
            with client.producer() as producer:
                producer.send("greetings", b"hello")

    It has the methods and attributes of `kera.client.Client`, with the same names, and calls wait for their results.
    Several threads may use it. A separate thread, shared by all clients of a process, does the work.
    """

    def __init__(
        self, bootstrap: str, settings: ClientSettings | None = None, *, runtime: Runtime = MACHINE, **overrides: Any
    ) -> None:
        """Connect to the cluster whose coordinators are at `bootstrap`: ``host:port``, several with commas.

        `overrides` are fields of `ClientSettings`. If the cluster cannot be reached, the first call raises.
        """
        if settings is None or overrides:
            settings = ClientSettings.load(**{**(settings.model_dump() if settings else {}), **overrides})
        self._thread = loop_thread()
        self._client = self._thread.run(AsyncClient.connect(bootstrap, settings, runtime=runtime))
        self._handovers: WeakSet[Handover] = WeakSet()
        """Handovers of its producers, with the records that the asynchronous producers do not have yet."""
        self.admin = Admin(self._thread, self._client.admin)
        self.access = Access(self._thread, self._client.access)
        self.schemas = SchemaRegistry(self._thread, self._client.schemas)
        self.latency = Latency(self._thread, self._client.latency)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=ends_in_order(kind))

    def producer(
        self,
        settings: ProducerSettings | None = None,
        *,
        serializer: SerializerLike = None,
        key_serializer: SerializerLike = None,
        **overrides: Any,
    ) -> Producer:
        """Make a producer; see `kera.client.Client.producer`. The sending threads call the serializers."""

        def made() -> Handover:
            producer = self._client.producer(
                settings, serializer=serializer, key_serializer=key_serializer, **overrides
            )
            return Handover(self._thread, producer)

        handover: Handover = self._thread.run(_made(made))
        self._handovers.add(handover)
        return Producer(self._thread, handover)

    def consumer(
        self,
        *streams: str,
        start: Start | Places = "latest",
        end: End | Positions | None = None,
        streamlets: Sequence[int] | None = None,
        settings: ConsumerSettings | None = None,
        deserializer: DeserializerLike = None,
        key_deserializer: DeserializerLike = None,
        **overrides: Any,
    ) -> Consumer:
        """Make a consumer of `streams`; see `kera.client.Client.consumer`."""
        made = self._thread.run(
            _made(
                lambda: self._client.consumer(
                    *streams,
                    start=start,
                    end=end,
                    streamlets=streamlets,
                    settings=settings,
                    deserializer=deserializer,
                    key_deserializer=key_deserializer,
                    **overrides,
                )
            )
        )
        return Consumer(self._thread, made)

    def epochs(
        self,
        *streams: str,
        epoch_ms: int | None = None,
        start: EpochStart = "latest",
        end: EpochEnd | None = None,
        epoch_bytes_max: int = EPOCH_BYTES_MAX,
        settings: ConsumerSettings | None = None,
        **overrides: Any,
    ) -> Epochs:
        """Make a reader of closed epochs of `streams`, in order; see `kera.client.Client.epochs`."""
        made = self._thread.run(
            _made(
                lambda: self._client.epochs(
                    *streams,
                    epoch_ms=epoch_ms,
                    start=start,
                    end=end,
                    epoch_bytes_max=epoch_bytes_max,
                    settings=settings,
                    **overrides,
                )
            )
        )
        return Epochs(self._thread, made)

    def ordered_consumer(
        self,
        *streams: str,
        epoch_ms: int | None = None,
        start: EpochStart = "latest",
        end: EpochEnd | None = None,
        epoch_bytes_max: int = EPOCH_BYTES_MAX,
        settings: ConsumerSettings | None = None,
        deserializer: DeserializerLike = None,
        key_deserializer: DeserializerLike = None,
        **overrides: Any,
    ) -> OrderedConsumer:
        """Make a consumer of `streams` in one total order, by time; see `kera.client.Client.ordered_consumer`."""
        made = self._thread.run(
            _made(
                lambda: self._client.ordered_consumer(
                    *streams,
                    epoch_ms=epoch_ms,
                    start=start,
                    end=end,
                    epoch_bytes_max=epoch_bytes_max,
                    settings=settings,
                    deserializer=deserializer,
                    key_deserializer=key_deserializer,
                    **overrides,
                )
            )
        )
        return OrderedConsumer(self._thread, made)

    def group_consumer(
        self,
        consumer_group: str,
        streams: str | Sequence[str],
        settings: GroupConsumerSettings | None = None,
        *,
        on_lost: Callable[[list[LostGroup]], None] | None = None,
        deserializer: DeserializerLike = None,
        key_deserializer: DeserializerLike = None,
        **overrides: Any,
    ) -> GroupConsumer:
        """Make a consumer that shares `streams` with the other members of its consumer group.

        See `kera.client.Client.group_consumer`. `on_lost` is called on the client's thread, so it must not wait for
        anything.
        """
        made = self._thread.run(
            _made(
                lambda: self._client.group_consumer(
                    consumer_group,
                    streams,
                    settings,
                    on_lost=on_lost,
                    deserializer=deserializer,
                    key_deserializer=key_deserializer,
                    **overrides,
                )
            )
        )
        return GroupConsumer(self._thread, made)

    def describe(self, stream: str) -> StreamDescription:
        """Return the description of a stream, from cached metadata. Raises `UnknownStream`."""
        return self._thread.run(self._client.describe(stream))

    def bounds(self, stream: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        """Return the present bounds of each entry of each streamlet. `promise`: see `kera.client.Client.bounds`."""
        return self._thread.run(self._client.bounds(stream, promise=promise))

    def locate(self, stream: str, queries: Sequence[ChunkQuery], *, unit: Unit = "chunk") -> list[ChunkPlace]:
        """Return the places that readers of entries would reach after some records or bytes, or at a time.

        There is one place per query. `unit`: see `kera.client.Client.locate`.
        """
        return self._thread.run(self._client.locate(stream, queries, unit=unit))

    def segments(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position | None = None
    ) -> list[SegmentBounds]:
        """Return the segments of an entry from `start` up to `end`, or up to the present durable head."""
        return self._thread.run(self._client.segments(stream, streamlet_id, entry, start, end))

    def positions_at(self, stream: str, timestamp_us: int, *, unit: Unit = "chunk") -> dict[int, list[ChunkPlace]]:
        """Return, per streamlet and entry, the place of the first chunk or record at or after a time, or the end.

        `unit`: see `kera.client.Client.positions_at`.
        """
        return self._thread.run(self._client.positions_at(stream, timestamp_us, unit=unit))

    def positions_of(self, stream: str, records: Mapping[int, Sequence[int]]) -> dict[int, list[ChunkPlace]]:
        """Return the places of records, given by their ordinals per streamlet and entry, as ``{0: [1000]}``."""
        return self._thread.run(self._client.positions_of(stream, records))

    def commit(
        self, consumer_group: str, stream: str, positions: Mapping[EntryId, Position], *, unnamed: bool = False
    ) -> None:
        """Commit the positions of a consumer group in a stream, for readers with `read_range`."""
        self._thread.run(self._client.commit(consumer_group, stream, positions, unnamed=unnamed))

    def read_range(
        self,
        stream: str,
        streamlet_id: int,
        entry: int,
        start: Position | ChunkPlace,
        end: Position | None,
        *,
        bytes_max: int = READ_BYTES_MAX,
        settings: ConsumerSettings | None = None,
    ) -> Iterator[ChunkBatch]:
        """Yield the chunks of one entry from `start` up to exactly `end`, or up to the present durable head."""
        chunks = self._client.read_range(
            stream, streamlet_id, entry, start, end, bytes_max=bytes_max, settings=settings
        )
        return following(self._thread, chunks)

    def close(self, *, flush: bool = True) -> None:
        """Close all open objects made from this client, then all connections."""
        self._thread.end(self._close(flush=flush))

    async def _close(self, *, flush: bool) -> None:
        handovers = [handover.close(flush=flush) for handover in list(self._handovers)]
        found = await asyncio.gather(*handovers, return_exceptions=True)
        await self._client.close(flush=flush)
        for error in found:
            if isinstance(error, BaseException):
                raise error


async def _made(make: Callable[[], Any]) -> Any:
    """Call `make` on the client's thread, as its result belongs to that thread's event loop."""
    return make()
