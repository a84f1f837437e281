"""Creating, altering and deleting streams.

Creating a stream takes three steps. `StreamOperations.create` describes what a crash between them leaves.

    take a stream id (written) ──► brokers open their streamlets ──► write the stream, answer
                                        │ a broker fails
                                        ▼
                                   the name is free again, brokers drop it (see ``drops``)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kera.coordinator.cluster.broker_calls import cannot_be_reached
from kera.coordinator.cluster.catalog import FIRST_GROUP_ID, broker_ids_of
from kera.coordinator.cluster.column_schemas import NOTHING, ColumnSchemas
from kera.coordinator.cluster.handlers import Handlers
from kera.coordinator.cluster.keys import HANDOVERS, MOVES, STARTS, stream_key, streamlets_path
from kera.coordinator.cluster.placement import count_in_words, place
from kera.coordinator.cluster.state import State, all_of
from kera.coordinator.cluster.validation import (
    altered_config,
    check_alteration,
    checked_config,
    checked_creation_id,
    checked_name,
    checked_schema,
    extended_schema,
    note_clock,
)
from kera.coordinator.operations.creators import Creators
from kera.coordinator.operations.drops import Drops
from kera.coordinator.operations.feature_levels import FeatureLevels
from kera.coordinator.operations.producer_owners import ProducerOwners
from kera.coordinator.store.ledger import number
from kera.coordinator.store.metadata import MetadataStoreFailed
from kera.core.access.identity import Identity
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, KeraError, TooFewBackups, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.server.access.guard import check_caller
from kera.server.feature_level import EPOCHS
from kera.server.lineage import new_version
from kera.v1 import common_pb2
from kera.v1 import coordinator_pb2 as messages

log = get_logger("kera.coordinator")

LAST_STREAM_ID = "last/stream_id"
PAGE_BYTES_MAX = 64 << 10
"""Maximum of the streams in one answer of ListStreams, unless a single one takes more: this much takes some 2 ms."""


class _Placed(NamedTuple):
    """The owners of the streamlets of a new stream."""

    owners: list[int]
    """Owners by streamlet."""
    streamlets: Counter[int]
    """Numbers of streamlets by broker."""
    epochs: dict[int, int]
    """Epochs of the owning launches, by broker."""


class StreamOperations:
    """The operations on streams."""

    def __init__(
        self,
        state: State,
        drops: Drops,
        spread: Callable[[str], Awaitable[common_pb2.StreamInfo]],
        creators: Creators,
        columns: ColumnSchemas,
        levels: FeatureLevels,
        producer_owners: ProducerOwners,
    ) -> None:
        """`spread` moves a stream to as many brokers as its configuration says, and returns the stream."""
        self._levels = levels
        self._producer_owners = producer_owners
        self._columns = columns
        self._creators = creators
        self._state = state
        self._spread = spread
        self._drops = drops
        self._creations: dict[tuple[str, str], asyncio.Task[common_pb2.StreamInfo]] = {}
        """Creations with an id, by the stream's name and that id."""
        self._placing: Counter[int] = Counter()
        """Streamlets, by broker, of streams that are being created and that the catalog does not count yet."""

    def handlers(self) -> Handlers:
        """Return the handlers of requests, by method."""
        return {
            api.CREATE_STREAM: self._answer_create,
            api.GET_STREAM_ID: self._answer_id,
            api.DESCRIBE_STREAM: self._answer_description,
            api.LIST_STREAMS: self._answer_list,
            api.DELETE_STREAM: self._answer_delete,
            api.ALTER_STREAM: self._answer_alter,
        }

    async def _answer_create(self, request: messages.CreateStreamRequest) -> messages.CreateStreamResponse:
        stream = await self.create(request.name, request.config, request.schema, request.creation_id)
        return messages.CreateStreamResponse(stream=stream)

    def _answer_id(self, request: messages.GetStreamIdRequest) -> messages.GetStreamIdResponse:
        return messages.GetStreamIdResponse(stream_id=self._state.catalog.named(request.name).stream_id)

    def _answer_description(self, request: messages.DescribeStreamRequest) -> messages.DescribeStreamResponse:
        match request.WhichOneof("stream"):
            case "name":
                stream = self._state.catalog.named(request.name)
            case "stream_id":
                stream = self._state.catalog.with_id(request.stream_id)
            case _:
                raise InvalidArgument("DescribeStream needs the stream's name or id")
        return messages.DescribeStreamResponse(stream=stream, brokers=self._state.brokers_of(stream))

    def _answer_list(self, request: messages.ListStreamsRequest) -> messages.ListStreamsResponse:
        streams, more = self._state.catalog.page(request.after, PAGE_BYTES_MAX)
        return messages.ListStreamsResponse(streams=streams, more=more)

    async def _answer_delete(self, request: messages.DeleteStreamRequest) -> messages.DeleteStreamResponse:
        return messages.DeleteStreamResponse(stream_id=await self.delete(request.name))

    async def _answer_alter(self, request: messages.AlterStreamRequest) -> messages.AlterStreamResponse:
        return messages.AlterStreamResponse(stream=await self.alter(request))

    async def create(
        self,
        name: str,
        config: common_pb2.StreamConfig,
        schema: common_pb2.StreamSchema,
        creation_id: str = "",
    ) -> common_pb2.StreamInfo:
        """Create a stream, and return when its brokers serve it.

        The id is written first and the stream last. A crash between them leaves no stream, and on some brokers
        streamlets of an id that will never be used again: they hold no data, and the next leader has them dropped. So
        there is nothing to resume: a stream exists entirely or not at all. A caller may repeat its request: with the
        same `creation_id` it gets the stream that the first request has created, or is about to.

        Raises `StreamExists`, `InvalidArgument`, `SchemaMismatch`, `QuotaExceeded`; `Unavailable` if there are too few
        brokers or one of them does not answer; `TooFewBackups`; and a broker's error.
        """
        known = self._state.catalog.created_by(name, creation_id)
        if known is not None:
            return known
        if under_way := self._creations.get((name, creation_id)):
            return await asyncio.shield(under_way)
        stream = common_pb2.StreamInfo(
            name=checked_name(name),
            config=checked_config(config, default_replication=self._state.settings.default_replication),
            schemas=[checked_schema(schema)],
            creation_id=checked_creation_id(creation_id),
        )
        who = self._creators.caller()
        stream.created_by = "" if who is None else who.principal
        if not creation_id:
            return await self._state.to_the_end(self._create(stream, who))
        creation = asyncio.create_task(self._state.to_the_end(self._create(stream, who)))
        self._creations[name, creation_id] = creation
        creation.add_done_callback(lambda _: self._ended(name, creation_id))
        return await asyncio.shield(creation)

    def _ended(self, name: str, creation_id: str) -> None:
        creation = self._creations.pop((name, creation_id))
        if not creation.cancelled():
            creation.exception()  # callers that wait got the error; without any, it is no defect

    async def _create(self, stream: common_pb2.StreamInfo, who: Identity | None) -> common_pb2.StreamInfo:
        state, catalog = self._state, self._state.catalog
        catalog.check_free(stream.name)
        self._check_backups(stream)
        columns = stream.schemas[0]
        compared = await self._columns.compare(stream.name, columns.arrow_schema) if columns.typed else None
        placed = self._place(stream)
        if stream.config.epoch_ms:
            await self._levels.require(EPOCHS, "streams have epochs")
        self._placing.update(placed.streamlets)  # before the first wait, so that the next request counts them
        try:
            await self._assign(stream, placed)
            async with state.changing:
                check_caller()
                catalog.check_free(stream.name)
                catalog.check_room(stream)
                self._creators.check(who)
                self._creators.check_share(stream)
                self._check_epochs(stream, placed)
                stream.stream_id = state.next_id(LAST_STREAM_ID)
                stream.created_us = state.clock.now_us()
                new_version(stream, state.coordinator_epoch)
                needed = self._drops.needed(stream, placed.epochs)
                await state.write({LAST_STREAM_ID: number(stream.stream_id), **needed})
                catalog.reserve(stream, placed.streamlets)
        finally:
            self._placing.subtract(placed.streamlets)
        try:
            await self._open(stream)
            async with state.changing:
                self._check_epochs(stream, placed)
                registration = NOTHING
                if columns.typed:
                    registration = self._columns.register(stream.name, columns.arrow_schema, compared)
                await state.write({**self._drops.not_needed(stream), **registration.changes}, [stream])
                registration.apply()
        except MetadataStoreFailed:
            # The stream may exist after a restart, and its brokers should have it then. The store takes no further
            # write until then, so the name cannot be given to another stream.
            catalog.release(stream)
            raise
        except BaseException:
            catalog.release(stream)
            await self._drops.carry_out(stream)
            raise
        log.info("stream created", stream=stream.name, stream_id=stream.stream_id, streamlets=stream.config.streamlets)
        return stream

    def _place(self, stream: common_pb2.StreamInfo) -> _Placed:
        brokers = self._state.brokers
        counts = self._state.catalog.streamlet_counts() + self._placing
        load = {broker_id: counts[broker_id] for broker_id in brokers.open_ids()}
        owners = place(stream.config.streamlets, stream.config.brokers, load)
        streamlets = Counter(owners)
        return _Placed(owners, streamlets, {broker_id: brokers.epoch(broker_id) for broker_id in streamlets})

    async def _assign(self, stream: common_pb2.StreamInfo, placed: _Placed) -> None:
        pace = self._state.pace()
        for streamlet_id, broker_id in enumerate(placed.owners):
            await pace.step()
            stream.assignments.add(
                streamlet_id=streamlet_id,
                broker_id=broker_id,
                broker_epoch=placed.epochs[broker_id],
                first_group_id=FIRST_GROUP_ID,
            )

    def _check_backups(self, stream: common_pb2.StreamInfo) -> None:
        # Nothing could be written to such a stream; its creator should learn that, rather than its first writer.
        needed, alive = stream.config.replication, len(self._state.backups.open_ids())
        if alive < needed:
            raise TooFewBackups(
                f"stream {stream.name!r} needs {needed} live backup{'s' if needed > 1 else ''} (its replication),"
                f" there {count_in_words(alive)}; start more, or ask for less replication",
                stream=stream.name,
                replication=needed,
                live_backups=alive,
            )

    async def _open(self, stream: common_pb2.StreamInfo) -> None:
        state = self._state
        brokers = state.brokers_of(stream)
        results = await all_of(
            state.broker_calls.open_streamlets(broker, stream, coordinator_epoch=state.coordinator_epoch, created=True)
            for broker in brokers
        )
        for broker, error in zip(brokers, results, strict=True):
            if error is None:
                continue
            if isinstance(error, KeraError) and cannot_be_reached(error):
                raise Unavailable(
                    f"stream {stream.name!r} was not created: broker {broker.broker_id} at {broker.grpc_address} gives"
                    f" no answer ({error}); ask again when it is back or counts as dead",
                    stream=stream.name,
                    broker_id=broker.broker_id,
                ) from error
            raise error

    def _check_epochs(self, stream: common_pb2.StreamInfo, placed: _Placed) -> None:
        # A broker that was restarted while we waited has opened nothing; one that is fenced never will.
        for broker_id, epoch in placed.epochs.items():
            if self._state.brokers.epoch(broker_id) != epoch:
                raise Unavailable(
                    f"stream {stream.name!r} was not created: broker {broker_id} was restarted meanwhile; ask again",
                    stream=stream.name,
                    broker_id=broker_id,
                )

    async def alter(self, request: messages.AlterStreamRequest) -> common_pb2.StreamInfo:
        """Change the fields of a stream's configuration that `request` sets, and add columns; return the stream.

        When it returns, the reachable brokers use the new configuration; the others get it once they can be reached. If
        the request sets `brokers`, the stream is spread over that many. A request that changes nothing writes nothing,
        but the brokers get the configuration again: the request may be a repeated one.

        Raises `UnknownStream`, also if the stream is deleted meanwhile, `InvalidArgument`, `SchemaMismatch`, and
        `Unavailable`
        while the metadata may be older than the cluster.
        """
        check_alteration(request)
        compared = None
        if request.add_columns:
            extended = self._extended(self._state.catalog.named(request.name), request)
            for version in extended:
                compared = await self._columns.compare(request.name, version.arrow_schema)
        if request.epoch_ms and not self._state.catalog.named(request.name).config.epoch_ms:
            await self._levels.require(EPOCHS, "streams have epochs")
        stream = await self._state.to_the_end(self._alter(request, compared))
        return await self._spread(request.name) if request.HasField("brokers") else stream

    def _extended(
        self, stream: common_pb2.StreamInfo, request: messages.AlterStreamRequest
    ) -> list[common_pb2.StreamSchema]:
        return extended_schema(stream, request.add_columns, self._state.number_after) if request.add_columns else []

    async def _alter(self, request: messages.AlterStreamRequest, compared: object) -> common_pb2.StreamInfo:
        state = self._state
        async with state.changing:
            check_caller()
            state.check_caught_up()
            known = state.catalog.named(request.name)
            stream = common_pb2.StreamInfo()
            stream.CopyFrom(known)
            stream.config.CopyFrom(altered_config(known.config, request))
            note_clock(stream.config, known.config, state.clock.now_us() + state.settings.lease_ms * 1000)
            extended = self._extended(known, request)
            stream.schemas.extend(extended)
            registration = NOTHING
            for version in extended:
                registration = self._columns.register(stream.name, version.arrow_schema, compared)
            if stream != known:
                # Above the brokers' version, even if that is from after the copy that our metadata were restored from.
                stream.config_version = state.number_after(stream.config_version)
                state.catalog.check_room(stream)
                self._creators.check_share(stream)
                await state.write(registration.changes, [stream])
                registration.apply()
                log.info("stream altered", stream=stream.name, config_version=stream.config_version)
        await state.tell(stream, otherwise="broker not yet notified of a stream's new configuration")
        try:
            return state.catalog.with_id(stream.stream_id)
        except UnknownStream:
            # A broker that had dropped it before may have opened it again.
            await state.change(state.write(self._drops.needed(stream, broker_ids_of(stream))))
            await self._drops.carry_out(stream)
            raise

    async def delete(self, name: str) -> int:
        """Delete a stream; return its id.

        When it returns, the reachable brokers have dropped it; the others do later.

        Raises `UnknownStream`, and `Unavailable` while the metadata may be older than the cluster.
        """
        return await self._state.to_the_end(self._delete(name))

    async def _delete(self, name: str) -> int:
        state = self._state
        async with state.changing:
            check_caller()
            state.check_caught_up()
            stream = state.catalog.named(name)
            about_streamlets = (streamlets_path(prefix, stream.stream_id) for prefix in (STARTS, HANDOVERS, MOVES))
            gone = [key for path in about_streamlets for key in state.ledger.children(path)]
            changes = dict.fromkeys([stream_key(stream.stream_id), *gone])
            forgotten = self._columns.forget(stream.name) if stream.schemas[0].typed else NOTHING
            changes |= self._producer_owners.forgotten(stream.stream_id)
            await state.write({**changes, **self._drops.needed(stream), **forgotten.changes})
            forgotten.apply()
            self._producer_owners.forget(stream.stream_id)
            state.catalog.remove(stream)
        log.info("stream deleted", stream=name, stream_id=stream.stream_id)
        await self._drops.carry_out(stream)
        return stream.stream_id
