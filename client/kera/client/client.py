"""The way in: a `Client` knows one cluster and makes producers, consumers and the admin."""

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
        if isinstance(cluster, str):  # as it is done without asyncio
            raise InvalidArgument(
                "a client is made by `await Client.connect(...)`; without asyncio by `kera.client.sync.Client(...)`"
            )
        self._cluster = cluster
        self._producers: WeakSet[Producer] = WeakSet()
        self._consumers: WeakSet[Consumer | GroupConsumer | Epochs | OrderedConsumer] = WeakSet()
        self.tracing = tracing_of(cluster.settings, "kera-client")
        """Traces of its producers and consumers; off, unless the settings or OpenTelemetry's variables say
        otherwise."""
        self.admin = Admin(cluster)
        self.access = Access(cluster)
        self.schemas = SchemaRegistry(cluster)
        self.latency = Latency(cluster)

    @classmethod
    async def connect(
        cls, bootstrap: str, settings: ClientSettings | None = None, *, runtime: Runtime = MACHINE
    ) -> Client:
        """A client of the cluster whose coordinators are at `bootstrap`: ``host:port``, several with commas.

        Connections are made when they are needed; a cluster that is not there shows at the first call. `runtime`: what
        the client gets from outside of its process, if that is not this machine.
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
        """A producer; `overrides` are fields of `ProducerSettings`.

        `serializer` and `key_serializer` make bytes of values and keys (see `kera.client.serializers`); None: they are
        bytes. A type stands for what serializes it: `str`, `int`, a dataclass, a pydantic model, a Protobuf message.
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
        """An appender to `stream`, for writers that choose their identity and count their chunks themselves.

        `payload` is that of `ProducerSettings`; None: what a producer would have without being told. `cut_at_epochs`:
        a chunk of a stream with epochs ends before the first row of a later one. `partitioner` is that of
        `ProducerSettings`, for `Appender.split`; the environment does not change it. `compares`: when a chunk is there
        already, the caller compares its rows with those that it has; else other rows raise `ProducerFenced`.

        The coordinator is asked what the stream is now: processes that live long may remember one that had the name
        before. Raises `UnknownStream`.
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
        """A consumer of `streams`; `overrides` are fields of `ConsumerSettings`.

        `deserializer` and `key_deserializer` make what `Record.value` and `Record.key` are of bytes (see
        `kera.client.serializers`); None: they are bytes. A type stands for what reads it, as that of a producer does;
        of a stream with columns, a dataclass or a pydantic model for its rows. Batches are not touched.

        `start` is ``"earliest"``, ``"latest"``, ``"committed"`` (where ``consumer_group`` has stopped, else with the
        oldest), positions (see `Consumer.positions`), or places as `positions_of` and `positions_at` return them;
        `end` is None (never), ``"latest"`` (what is there at the start) or positions. From a place within a chunk, the
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
        """The epochs of `streams`, in order, each when it is closed (docs/epochs.md).

        `epoch_ms`: how long they are, a multiple of each stream's own; None: the longest of these. `start`: the number
        of an epoch, ``"earliest"`` (the first that is whole), ``"latest"`` (the one that is being filled), or
        ``"committed"``; `end`: the number of the first that is not wanted, ``"latest"`` (the one that is being filled
        now), or None. An epoch is in memory as a whole: one of more than `epoch_bytes_max` is `RecordTooLarge`.
        `overrides` are fields of `ConsumerSettings`.
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
        """A consumer of `streams` in one total order, by time: the same for all (docs/epochs.md).

        The streams have to have epochs; records come when theirs is closed. `epoch_ms`, `start`, `end` and
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
        """A consumer that shares `streams` with the others of its consumer group.

        `overrides` are fields of `GroupConsumerSettings`. Each record goes to one of them, and cursors are kept by the
        coordinator. `on_lost` is called, instead of raising `LeaseLost`, when groups of segments have gone to others
        because this consumer was silent or stuck. Deserializers are as those of `consumer`.
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
        """The plug-ins of a consumer: latencies are measured for a group, and traces are made when tracing is on."""
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
        """A stream, from cached metadata. Raises `UnknownStream`."""
        return await self._cluster.stream(stream)

    async def bounds(self, stream: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        """Where each entry of each streamlet starts and ends now.

        `promise`, for readers of epochs: brokers are to promise that nothing older comes. That takes the right to read
        the stream, as it makes records late that are written later and are older. A reader of `Client.epochs` asks for
        it by itself.
        """
        return await self._cluster.bounds(stream, promise=promise)

    async def locate(self, stream: str, queries: Sequence[ChunkQuery], *, unit: Unit = "chunk") -> list[ChunkPlace]:
        """Where readers of entries would be after so many records or bytes, or at a time: one place per query.

        `unit`: by ``"chunk"``, places are chunk boundaries, and no chunk is read. By ``"record"``, they are exact:
        `ChunkPlace.record` is the record behind `records_max` records, or the first one at or after `timestamp_us`, and
        `skip_records` says how many records of the chunk at `position` lie before it. That reads one chunk for each
        query, and takes no `bytes_max`.

        Entries are followed over all brokers that have some of them. A damaged chunk counts as one with the records
        that are missing there, and no time. Raises `DataLost` when the start of a query has been removed,
        `InvalidCursor` for a position that is no chunk boundary, `InvalidArgument`, `UnknownStream`, and `Unavailable`
        as `Consumer.batches` does.
        """
        return await locate(self._cluster, stream, queries, unit=unit)

    async def segments(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position | None = None
    ) -> list[SegmentBounds]:
        """The segments of an entry from `start` up to `end`, or to the durable head of now, clipped to that range.

        They are in order, none of them is empty, and each is at one broker: places where a range can be cut at no cost.
        Cut it where they start: then what is missing between two of them is told to whoever reads the part before it.
        Raises what `locate` raises, and `InvalidCursor` for an `end` behind the durable head.
        """
        return await segments(self._cluster, stream, streamlet_id, entry, start, end)

    async def positions_at(
        self, stream: str, timestamp_us: int, *, unit: Unit = "chunk"
    ) -> dict[int, list[ChunkPlace]]:
        """Per streamlet, and per entry in it, the first chunk or record at or after a time, or the end.

        The time is in microseconds since the Unix epoch, and compares with the stream's timestamp column. By
        ``"chunk"`` the place is the start of the first chunk that has a record at or after the time; the chunk may
        begin with older records. By ``"record"`` it is that record itself, and one chunk of each entry is read to find
        it. The result can be a consumer's `start`. Times need not ascend: later records may be older than the time.

        Where records right before the place are lost, they may have been of that time: `ChunkPlace.lost_from` says from
        where on, and a consumer that starts there gets `DataLost`, or skips them, as its setting `on_data_lost` says.
        """
        return await positions_at(self._cluster, stream, timestamp_us, unit=unit)

    async def positions_of(self, stream: str, records: Mapping[int, Sequence[int]]) -> dict[int, list[ChunkPlace]]:
        """The places of records, by their ordinals (`Record.offset`) per streamlet and entry, as ``{0: [1000]}``.

        The result can be a consumer's `start`, if it names all entries of the stream. The ordinal that the next record
        will have stands for the end. Raises `DataLost` for a record that was removed (its attribute
        ``available_record`` is the oldest one), `InvalidArgument` for one beyond the end, and what `locate` raises.
        """
        return await positions_of(self._cluster, stream, records)

    async def commit(
        self, consumer_group: str, stream: str, positions: Mapping[EntryId, Position], *, unnamed: bool = False
    ) -> None:
        """Say how far a consumer group has read a stream, as `Consumer.commit` does, for who reads with `read_range`.

        `unnamed`: nobody has chosen the name. If only such calls use the consumer group, it is forgotten once it was
        idle for ``unnamed_group_retention_ms`` of the coordinator (a week); so repeat the call while the reader lives.

        Raises what `Consumer.commit` raises, and `UnknownStream` for entries of an earlier stream of the name.
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
        """The chunks of one entry from `start` up to exactly `end`, or up to the durable head of now.

        If `start` is a place within a chunk, the records of that chunk before it are left out. Follows the chunks over
        all brokers that have some of them; `ChunkBatch.pushed` says of each chunk how it came.
        Fetches ahead, as the settings say, with answers of `bytes_max` where it pulls. Raises what `Consumer.batches`
        raises, and `InvalidArgument` for an end that is not there.
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
        """Close what was made from this client and is still open, then all connections.

        Producers deliver what they have, unless `flush` is off; the first error of one is raised when all is closed.

        Batches that lie in a broker's memory are held by the connection: after this, they stay as they are only until
        the broker uses the memory again. Who needs them for longer copies them, or reads with `shared_memory` never.
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
    """Settings with `overrides`, which `method` was given by name. Raises `InvalidArgument` and `InvalidSettings`."""
    if settings is not None:
        arguments.instance("settings", settings, kind, f"{kind.__name__}, or single settings by their names")
    for name, value in overrides.items():
        field = kind.model_fields.get(name)
        if field is not None and field.annotation is bool and value is not None:
            arguments.flag(name, value)  # in variables and files text stands for it
        if field is None and closest(name, kind.model_fields) is None:
            meant = closest(name, inspect.signature(method).parameters)
            if meant is not None:
                raise InvalidSettings(f"{name}: there is no such parameter or setting; did you mean {meant!r}?")
    if settings is None:
        return kind.load(**overrides)
    return kind.load(**{**settings.model_dump(), **overrides}) if overrides else settings
