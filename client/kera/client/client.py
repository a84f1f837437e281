"""The entry point of the SDK: a `Client` is for one cluster and makes producers, consumers and the admin."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self
from weakref import WeakSet

from kera.client import arguments
from kera.client.admin.access import Access
from kera.client.admin.admin import Admin
from kera.client.admin.latency import Latency
from kera.client.admin.locating import ChunkQuery, SegmentBounds, Unit, locate, positions_at, positions_of, segments
from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.committed import report_cursors
from kera.client.consuming.consumer import Consumer
from kera.client.consuming.delivering.decoding import Decoding
from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.groups.leases import LostGroup
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.client.consuming.latency.hooks import reader_latency
from kera.client.consuming.plugins import Plugins
from kera.client.consuming.range_reading import read_range
from kera.client.consuming.start_and_end import End, Start
from kera.client.consuming.traced import ConsumerTraces
from kera.client.epochs.beginning import EpochStart
from kera.client.epochs.ordered_consumer import OrderedConsumer
from kera.client.epochs.reader import EPOCH_BYTES_MAX, EpochEnd, Epochs
from kera.client.positions import ChunkPlace, Places, Positions, check_position
from kera.client.producing.appender import Appender
from kera.client.producing.producer import Producer
from kera.client.producing.serializing import Serialization
from kera.client.schemas.registry import SchemaRegistry
from kera.client.serializers.choosing import DeserializerLike, SerializerLike
from kera.client.settings import ClientSettings, ConsumerSettings, PartitionerName, ProducerSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.client.unclosed import ends_in_order
from kera.core.base.ids import EntryId, Position
from kera.core.base.settings import InvalidSettings
from kera.core.base.spelling import closest
from kera.core.errors import InvalidArgument
from kera.core.runtime import MACHINE, Runtime
from kera.core.tracing import tracing_of

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
        if isinstance(cluster, str):  # an address, as the client without asyncio takes it
            raise InvalidArgument(
                "a client is made by `await Client.connect(...)`; without asyncio by `kera.client.sync.Client(...)`"
            )
        self._cluster = cluster
        self._producers: WeakSet[Producer] = WeakSet()
        self._consumers: WeakSet[Consumer | GroupConsumer | Epochs | OrderedConsumer] = WeakSet()
        self.tracing = tracing_of(cluster.settings, "kera-client")
        """Tracing of its producers and consumers; off, unless the settings or OpenTelemetry's variables enable it."""
        self.admin = Admin(cluster)
        self.access = Access(cluster)
        self.schemas = SchemaRegistry(cluster)
        self.latency = Latency(cluster)

    @classmethod
    async def connect(
        cls, bootstrap: str, settings: ClientSettings | None = None, *, runtime: Runtime = MACHINE
    ) -> Client:
        """Return a client of the cluster whose coordinators are at `bootstrap`: ``host:port``, several with commas.

        Connections are made when they are needed; an unreachable cluster shows at the first call. `runtime`: clock,
        network and the like, if they are not those of this machine.
        """
        if settings is not None:
            arguments.instance("settings", settings, ClientSettings, "ClientSettings")
        return cls(Cluster(bootstrap, settings or ClientSettings.load(), runtime=runtime))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(flush=ends_in_order(kind))

    def producer(
        self,
        settings: ProducerSettings | None = None,
        *,
        serializer: SerializerLike = None,
        key_serializer: SerializerLike = None,
        **overrides: Any,
    ) -> Producer:
        """Make a producer; `overrides` are fields of `ProducerSettings`.

        `serializer` and `key_serializer` make bytes of values and keys (see `kera.client.serializers`); None: values or
        keys are bytes. A type selects its serializer: `str`, `int`, a dataclass, a pydantic model, a Protobuf message.
        """
        runtime = self._cluster.runtime
        clock = None if runtime is MACHINE else runtime.clock
        settings = _merged(ProducerSettings, settings, overrides, Client.producer)
        serialization = None
        if serializer is not None or key_serializer is not None:
            register = settings.register_schemas
            serialization = Serialization(serializer, key_serializer, self.schemas, register_schemas=register)
        producer = Producer(self._cluster, settings, clock, serialization=serialization, tracing=self.tracing)
        self._producers.add(producer)
        return producer

    async def appender(
        self,
        stream: str,
        *,
        producer_id: int,
        producer_epoch: int,
        chunk_bytes_max: int,
        payload: Literal["auto", "arrow", "lean"] | None = None,
        cut_at_epochs: bool = True,
        partitioner: PartitionerName = "crc32c",
        compares: bool = False,
    ) -> Appender:
        """Make an appender to `stream`, for writers that choose their identity and count their chunks themselves.

        `payload` is that of `ProducerSettings`; None: the default of a producer. `cut_at_epochs`: a chunk of a stream
        with epochs ends before the first row of a later one. `partitioner` is that of `ProducerSettings`, for
        `Appender.split`; the environment does not change it. `compares`: when a chunk with the same sequence is stored
        already, the caller compares the rows; otherwise, other rows raise `ProducerFenced`.

        Asks the coordinator for the stream, because a long-lived process may have cached an earlier stream of the name.
        Raises `UnknownStream`.
        """
        lean = ProducerSettings.load(payload=payload).lean
        self._cluster.forget(stream)
        return Appender(
            self._cluster,
            await self._cluster.stream_or_last_seen(stream),
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            chunk_bytes_max=chunk_bytes_max,
            lean=lean,
            cut_at_epochs=cut_at_epochs,
            partitioner=partitioner,
            compares=compares,
        )

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
        """Make a consumer of `streams`; `overrides` are fields of `ConsumerSettings`.

        `deserializer` and `key_deserializer` make `Record.value` and `Record.key` from bytes (see
        `kera.client.serializers`); None: they stay bytes. A type selects its deserializer, as for a producer; for a
        stream with columns, it is a dataclass or a pydantic model of its rows. Deserializers do not affect batches.

        `start` is ``"earliest"``, ``"latest"``, ``"committed"`` (where ``consumer_group`` has stopped, or else the
        oldest record), positions (see `Consumer.positions`), or places from `positions_of` and `positions_at`; `end` is
        None (never), ``"latest"`` (the end at the time of the start) or positions. From a place within a chunk, the
        consumer leaves out the chunk's records before it. Its `positions` and commits stay at the ends of chunks.
        `streamlets`: read only these; None: all.
        """
        merged = _merged(ConsumerSettings, settings, overrides, Client.consumer)
        decoding = self._decoding(deserializer, key_deserializer, merged)
        consumer = Consumer(
            self._cluster,
            streams,
            merged,
            start=start,
            end=end,
            streamlets=streamlets,
            decoding=decoding,
            make_decoding=partial(self._decoding, settings=merged),
            plugins=self._plugins(merged.consumer_group),
        )
        self._consumers.add(consumer)
        return consumer

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
        """Make a reader of the epochs of `streams`, in order, each when it is closed (docs/epochs.md).

        `epoch_ms`: their length, a multiple of each stream's own; None: the longest of these. `start`: the number of an
        epoch, ``"earliest"`` (the first complete one), ``"latest"`` (the open one), or ``"committed"``;
        `end`: the number of the epoch to stop before, ``"latest"`` (the open one), or None. An
        epoch is held in memory as a whole: one of more than `epoch_bytes_max` raises `RecordTooLarge`. `overrides` are
        fields of `ConsumerSettings`.
        """
        merged = _merged(ConsumerSettings, settings, overrides, Client.epochs)
        reader = self._epochs(streams, merged, epoch_ms, start, end, epoch_bytes_max)
        self._consumers.add(reader)
        return reader

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
        """Make a consumer of `streams` in one total order, by time: the same for all such consumers (docs/epochs.md).

        The streams must have epochs; records come when their epoch is closed. `epoch_ms`, `start`, `end` and
        `epoch_bytes_max` are those of `epochs`, deserializers those of `consumer`, `overrides` fields of
        `ConsumerSettings`.
        """
        merged = _merged(ConsumerSettings, settings, overrides, Client.ordered_consumer)
        decoding = self._decoding(deserializer, key_deserializer, merged)
        epochs = self._epochs(streams, merged, epoch_ms, start, end, epoch_bytes_max, copied=True)
        consumer = OrderedConsumer(
            epochs,
            is_bounded=end is not None,
            decoding=decoding,
            make_decoding=partial(self._decoding, settings=merged),
        )
        self._consumers.add(consumer)
        return consumer

    def _epochs(
        self,
        streams: Sequence[str],
        settings: ConsumerSettings,
        epoch_ms: int | None,
        start: EpochStart,
        end: EpochEnd | None,
        epoch_bytes_max: int,
        *,
        copied: bool = False,
    ) -> Epochs:
        return Epochs(
            self._cluster,
            streams,
            settings,
            epoch_ms=epoch_ms,
            start=start,
            end=end,
            epoch_bytes_max=arguments.whole("epoch_bytes_max", epoch_bytes_max, 1, arguments.UINT32_MAX << 10),
            copied=copied,
        )

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
        """Make a consumer that shares `streams` with the other consumers of its consumer group.

        `overrides` are fields of `GroupConsumerSettings`. Each record goes to one of the consumers, and the coordinator
        keeps the cursors. `on_lost` is called, instead of raising `LeaseLost`, when groups of segments have gone to
        other consumers because this one was silent or stuck. Deserializers are those of `consumer`.
        """
        names = (streams,) if isinstance(streams, str) else streams
        merged = _merged(GroupConsumerSettings, settings, overrides, Client.group_consumer)
        decoding = self._decoding(deserializer, key_deserializer, merged)
        consumer = GroupConsumer(
            self._cluster,
            consumer_group,
            names,
            merged,
            on_lost=on_lost,
            decoding=decoding,
            plugins=self._plugins(consumer_group),
        )
        self._consumers.add(consumer)
        return consumer

    def _plugins(self, consumer_group: str) -> Plugins:
        """Return the plug-ins of a consumer: measurements of latency if it has a group, and spans if tracing is on."""
        traces = partial(ConsumerTraces, self.tracing, consumer_group) if self.tracing.is_on else None
        return Plugins(reader_latency(self._cluster, consumer_group), traces)

    def _decoding(
        self, deserializer: DeserializerLike, key_deserializer: DeserializerLike, settings: ConsumerSettings
    ) -> Decoding | None:
        if deserializer is None and key_deserializer is None:
            return None
        undecodable, clock = settings.undecodable_records, self._cluster.runtime.clock
        return Decoding(deserializer, key_deserializer, self.schemas, undecodable=undecodable, clock=clock)

    async def describe(self, stream: str) -> StreamDescription:
        """Return the description of a stream, from cached metadata if possible. Raises `UnknownStream`."""
        return await self._cluster.stream(stream)

    async def bounds(self, stream: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        """Return where each entry of each streamlet starts and ends now.

        `promise`, for readers of epochs: have brokers promise that no older records will follow. This needs the right
        to read the stream, because older records that are written later become late. A reader of `Client.epochs` does
        this automatically.
        """
        return await self._cluster.bounds(stream, promise=promise)

    async def locate(self, stream: str, queries: Sequence[ChunkQuery], *, unit: Unit = "chunk") -> list[ChunkPlace]:
        """Find places in entries after a number of records or bytes, or at a time: one place per query.

        `unit`: with ``"chunk"``, places are chunk boundaries, and no chunk is read. With ``"record"``, they are exact:
        `ChunkPlace.record` is the record behind `records_max` records, or the first one at or after `timestamp_us`, and
        `skip_records` is the number of records before it in the chunk at `position`. This reads one chunk for each
        query, and takes no `bytes_max`.

        Follows entries over all brokers that have parts of them. A damaged chunk counts with the records that are
        missing there, and without a time. Raises `DataLost` when the start of a query has been removed, `InvalidCursor`
        for a position that is no chunk boundary, `InvalidArgument`, `UnknownStream`, and `Unavailable` as
        `Consumer.batches` does.
        """
        return await locate(self._cluster, stream, queries, unit=unit)

    async def segments(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position | None = None
    ) -> list[SegmentBounds]:
        """Return the segments of an entry from `start` to `end`, or to the present durable head, clipped to the range.

        They are in order, none is empty, and each is at one broker, so a range can be cut there at no cost. Cut it
        where they start: then the reader of the part before gets the error about records missing between two of them.
        Raises the errors of `locate`, and `InvalidCursor` for an `end` behind the durable head.
        """
        return await segments(self._cluster, stream, streamlet_id, entry, start, end)

    async def positions_at(
        self, stream: str, timestamp_us: int, *, unit: Unit = "chunk"
    ) -> dict[int, list[ChunkPlace]]:
        """Find, for each streamlet and entry, the first chunk or record at or after a time, or the end.

        The time is in microseconds since the Unix epoch, and compares with the stream's timestamp column. With
        ``"chunk"`` the place is the start of the first chunk that has a record at or after the time; the chunk may
        begin with older records. With ``"record"`` it is that record itself, and one chunk of each entry is read to
        find it. The result can be a consumer's `start`. Times need not ascend: later records may be older than the
        time.

        If records right before the place are lost, they may have been of that time: `ChunkPlace.lost_from` is where the
        loss begins, and a consumer that starts there gets `DataLost`, or skips the loss, by its setting `on_data_lost`.
        """
        return await positions_at(self._cluster, stream, timestamp_us, unit=unit)

    async def positions_of(self, stream: str, records: Mapping[int, Sequence[int]]) -> dict[int, list[ChunkPlace]]:
        """Find the places of records, by their ordinals (`Record.offset`) per streamlet and entry, as ``{0: [1000]}``.

        The result can be a consumer's `start`, if it names all entries of the stream. The ordinal of the next record to
        be written stands for the end. Raises `DataLost` for a record that was removed (its attribute
        ``available_record`` is the oldest one), `InvalidArgument` for one beyond the end, and the errors of `locate`.
        """
        return await positions_of(self._cluster, stream, records)

    async def commit(
        self, consumer_group: str, stream: str, positions: Mapping[EntryId, Position], *, unnamed: bool = False
    ) -> None:
        """Commit how far a consumer group has read a stream, like `Consumer.commit`, for readers with `read_range`.

        `unnamed`: the name was generated. If only such calls use the consumer group, it is deleted once it was idle for
        ``unnamed_group_retention_ms`` of the coordinator (a week); so repeat the call while the reader lives.

        Raises the errors of `Consumer.commit`, and `UnknownStream` for entries of an earlier stream of the name.
        """
        arguments.all_of("positions", positions, Mapping, EntryId, "a mapping of EntryId to Position")
        arguments.flag("unnamed", unnamed)
        positions = {entry: check_position("positions", position) for entry, position in positions.items()}
        await self._cluster.commit(consumer_group, stream, positions)
        found = await self._cluster.stream(stream)
        await report_cursors(self._cluster, consumer_group, found, positions, unnamed=unnamed)

    async def read_range(
        self,
        stream: str,
        streamlet_id: int,
        entry: int,
        start: Position | ChunkPlace,
        end: Position | None,
        *,
        bytes_max: int = READ_BYTES_MAX,
        settings: ConsumerSettings | None = None,
    ) -> AsyncIterator[ChunkBatch]:
        """Yield the chunks of one entry from `start` up to exactly `end`, or up to the present durable head.

        If `start` is a place within a chunk, the records of that chunk before it are left out. Follows the entry over
        all brokers that have parts of it; `ChunkBatch.pushed` shows how each chunk came. Fetches ahead, by the
        settings, with answers of `bytes_max` when it pulls. Raises the errors of `Consumer.batches`, and
        `InvalidArgument` for an end beyond the end of the entry.
        """
        settings = settings or ConsumerSettings.load()
        arguments.whole("bytes_max", bytes_max, 1, arguments.UINT32_MAX)
        description = await self._cluster.stream(stream)
        entry_id = description.entry_id(streamlet_id, entry)
        first_record = None
        if isinstance(start, ChunkPlace):
            first_record = start.record if start.skip_records else None
            start = start.start
        start = check_position("start", start)
        end = None if end is None else check_position("end", end)
        if end is None:
            end = (await self._cluster.bounds(stream))[streamlet_id][entry].end
        if end <= start:
            return
        settings = settings.model_copy(update={"fetch_bytes_max": bytes_max})
        wanted = Wanted(entry_id, start, end)
        async for batch in read_range(self._cluster, settings, description, wanted, first_record=first_record):
            yield batch

    async def close(self, *, flush: bool = True) -> None:
        """Close all open producers and consumers of this client, then all connections.

        Producers deliver their records, unless `flush` is off; the first error is raised when all is closed.

        The connection holds batches that lie in a broker's memory: after this, they stay valid only until the broker
        uses the memory again. To keep them for longer, copy them, or read with `shared_memory` never.
        """
        if self._cluster.is_inherited:
            return
        try:
            found = await asyncio.gather(
                *(consumer.close() for consumer in list(self._consumers)),
                *(producer.close(flush=flush) for producer in list(self._producers)),
                return_exceptions=True,
            )
        finally:
            await self._cluster.close()
        for error in found:
            if isinstance(error, BaseException):
                raise error


def _merged(kind: Any, settings: Any, overrides: dict[str, Any], method: Callable[..., Any]) -> Any:
    """Merge settings with the keyword arguments of `method`. Raises `InvalidArgument` and `InvalidSettings`."""
    if settings is not None:
        arguments.instance("settings", settings, kind, f"{kind.__name__}, or single settings by their names")
    for name, value in overrides.items():
        field = kind.model_fields.get(name)
        if field is not None and field.annotation is bool and value is not None:
            arguments.flag(name, value)  # only variables and files may have text for it
        if field is None and closest(name, kind.model_fields) is None:
            meant = closest(name, inspect.signature(method).parameters)
            if meant is not None:
                raise InvalidSettings(f"{name}: there is no such parameter or setting; did you mean {meant!r}?")
    if settings is None:
        return kind.load(**overrides)
    return kind.load(**{**settings.model_dump(), **overrides}) if overrides else settings
