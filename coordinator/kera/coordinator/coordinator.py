"""The coordinator's operations: each decides, writes, and only then acts or answers.

Invariants:

1. What was answered is in the store. Memory changes after the store, never before.
2. Changes are made one at a time (`_changing` is held from the decision to the end of the write), and run to their end
   even when the caller is gone: a caller that gives up in the middle must not leave memory behind the store.
3. A stream that can be seen has been opened by the brokers of its streamlets.

Creating a stream takes three steps. See `Coordinator.create_stream` for what a crash between them leaves.

    take a stream id (written) ──► brokers open their streamlets ──► write the stream, answer
                                        │ a broker fails
                                        ▼
                                   brokers drop it, the name is free again

Requests and answers as messages, and their counting, are left to ``service``.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kera.coordinator.brokers import Brokers, cannot_be_reached
from kera.coordinator.catalog import FIRST_GROUP_ID, Catalog, broker_ids_of
from kera.coordinator.ledger import Changes, Ledger, number
from kera.coordinator.membership import BACKUP, BROKER, InfoT, Membership, RecordT, Registration
from kera.coordinator.metadata import MetadataStore, MetadataStoreFailed
from kera.coordinator.placement import count_in_words, place
from kera.coordinator.settings import CoordinatorSettings
from kera.coordinator.validation import (
    altered_config,
    checked_config,
    checked_name,
    checked_schema,
    config_of_store,
)
from kera.core.clock import Clock
from kera.core.errors import KeraError, TooFewBackups, Unavailable, UnknownStream, invariant
from kera.core.telemetry import get_logger
from kera.v1 import common_pb2, coordinator_pb2

log = get_logger("kera.coordinator")

CLUSTER_ID = "cluster_id"
STREAMS = "streams/"
"""``streams/<id, 16 hexadecimal digits>`` → StreamInfo."""
LAST_STREAM_ID = "last/stream_id"
LAST_PRODUCER_ID = "last/producer_id"

FIRST_PRODUCER_EPOCH = 1

T = TypeVar("T")


def _members_prefix(noun: str) -> str:
    """Keys of the members of a kind.

    ``brokers/<id, 8 hexadecimal digits>`` → RegisterBrokerRequest, see `Registration.record`; of backups likewise.
    """
    return f"{noun}s/"


def _last_id(noun: str) -> str:
    """Key of the last id that was given to a member of a kind."""
    return f"last/{noun}_id"


def _last_epoch(noun: str) -> str:
    """Key of the last epoch of any launch of a kind."""
    return f"last/{noun}_epoch"


class Coordinator:
    """The state machine of a cluster. Belongs to one event loop; made with `load`."""

    def __init__(self, ledger: Ledger, brokers: Brokers, clock: Clock, settings: CoordinatorSettings) -> None:
        self._ledger = ledger
        self._brokers = brokers
        self._clock = clock
        self._catalog = Catalog()
        times = {
            "heartbeat_interval_ms": settings.heartbeat_interval_ms,
            "heartbeats_missed_max": settings.heartbeats_missed_max,
        }
        self._broker_members = Membership(BROKER, clock, **times)
        self._backup_members = Membership(BACKUP, clock, **times)
        self._changing = asyncio.Lock()
        self._operations: set[asyncio.Task[Any]] = set()
        self._default_replication = settings.default_replication
        self.heartbeat_interval_ms = settings.heartbeat_interval_ms

    @classmethod
    async def load(
        cls, store: MetadataStore, brokers: Brokers, clock: Clock, settings: CoordinatorSettings
    ) -> Coordinator:
        """The coordinator of what `store` has; an empty store becomes a new cluster."""
        self = cls(await Ledger.load(store), brokers, clock, settings)
        if self._ledger.get(CLUSTER_ID) is None:
            await self._ledger.write({CLUSTER_ID: uuid.uuid4().hex.encode()})
        for members in (self._broker_members, self._backup_members):
            for value in self._ledger.values(_members_prefix(members.kind.noun)):
                members.restore(value)
        for value in self._ledger.values(STREAMS):
            stream = common_pb2.StreamInfo.FromString(value)
            stream.config.CopyFrom(config_of_store(stream.config))
            self._catalog.add(stream)
        log.info(
            "loaded",
            cluster_id=self.cluster_id,
            streams=self.stream_count,
            brokers=len(self._broker_members.ids()),
            backups=len(self._backup_members.ids()),
        )
        return self

    async def close(self) -> None:
        """Let changes that have begun end, which takes bounded time. Store and brokers are closed by their owner."""
        if self._operations:
            await asyncio.wait(self._operations)

    # --- what is there -----------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str:
        """Made once, with the cluster."""
        value = self._ledger.get(CLUSTER_ID)
        invariant(value is not None, "a cluster has an id")
        return (value or b"").decode()

    @property
    def stream_count(self) -> int:
        """How many streams there are."""
        return len(self._catalog)

    @property
    def brokers_alive(self) -> int:
        """How many brokers are alive."""
        return len(self._broker_members.live_ids())

    @property
    def backups_alive(self) -> int:
        """How many backups are alive."""
        return len(self._backup_members.live_ids())

    def stream(self, name: str) -> common_pb2.StreamInfo:
        """The stream of this name. Raises `UnknownStream`."""
        return self._catalog.named(name)

    def stream_with_id(self, stream_id: int) -> common_pb2.StreamInfo:
        """The stream with this id. Raises `UnknownStream`."""
        return self._catalog.with_id(stream_id)

    def streams(self) -> list[common_pb2.StreamInfo]:
        """All streams, by name."""
        return self._catalog.streams()

    def brokers(self) -> list[common_pb2.BrokerInfo]:
        """All brokers that ever registered, each with whether it is alive."""
        return self._broker_members.describe_all()

    def backups(self) -> list[common_pb2.BackupInfo]:
        """All backups that ever registered, each with whether it is alive and what it has free."""
        return self._backup_members.describe_all()

    def brokers_of(self, stream: common_pb2.StreamInfo) -> list[common_pb2.BrokerInfo]:
        """The brokers that own streamlets of `stream`."""
        return [self._broker_members.describe(broker_id) for broker_id in broker_ids_of(stream)]

    # --- streams -----------------------------------------------------------------------------------------------

    async def create_stream(
        self, name: str, config: common_pb2.StreamConfig, schema: common_pb2.StreamSchema
    ) -> common_pb2.StreamInfo:
        """Create a stream, and return when its brokers serve it.

        The id is written first and the stream last. A crash between them leaves no stream, and on some brokers
        streamlets of an id that will never be used again: they hold no data, and the broker drops them when it
        registers next. So there is nothing to resume or to undo: a stream is there entirely or not at all, and whoever
        asked may ask again.

        Raises `StreamExists`, `InvalidArgument`, `SchemaMismatch`; `Unavailable` when there are too few brokers or one
        of them gives no answer; `TooFewBackups`; and what a broker answers.
        """
        stream = common_pb2.StreamInfo(
            name=checked_name(name),
            config=checked_config(config, default_replication=self._default_replication),
            schemas=[checked_schema(schema)],
        )
        return await self._to_the_end(self._create(stream))

    async def _create(self, stream: common_pb2.StreamInfo) -> common_pb2.StreamInfo:
        async with self._changing:
            self._catalog.check_free(stream.name)
            self._assign(stream)
            self._check_backups(stream)
            self._catalog.check_room(stream)
            stream.stream_id = self._ledger.next_number(LAST_STREAM_ID)
            stream.created_us = self._clock.now_us()
            await self._ledger.write({LAST_STREAM_ID: number(stream.stream_id)})
            self._catalog.reserve(stream)
        try:
            await self._open(stream)
            async with self._changing:
                self._check_epochs(stream)
                await self._ledger.write({_stream_key(stream): stream.SerializeToString()})
                self._catalog.add(stream)
        except MetadataStoreFailed:
            # The stream may be there after a restart; then its brokers had better have it. The store takes no further
            # write until then, so the name cannot be given to another stream.
            self._catalog.release(stream)
            raise
        except BaseException:
            self._catalog.release(stream)
            await self._drop(stream)
            raise
        log.info("stream created", stream=stream.name, stream_id=stream.stream_id, streamlets=stream.config.streamlets)
        return stream

    def _assign(self, stream: common_pb2.StreamInfo) -> None:
        counts = self._catalog.streamlet_counts()
        load = {broker_id: counts[broker_id] for broker_id in self._broker_members.live_ids()}
        owners = place(stream.config.streamlets, stream.config.brokers, load)
        for streamlet_id, broker_id in enumerate(owners):
            stream.assignments.add(
                streamlet_id=streamlet_id,
                broker_id=broker_id,
                broker_epoch=self._broker_members.epoch(broker_id),
                first_group_id=FIRST_GROUP_ID,
            )

    def _check_backups(self, stream: common_pb2.StreamInfo) -> None:
        # Nothing could be written to such a stream; whoever creates it should hear it, and not whoever writes first.
        needed, alive = stream.config.replication, self.backups_alive
        if alive < needed:
            raise TooFewBackups(
                f"stream {stream.name!r} needs {needed} live backup{'s' if needed > 1 else ''} (its replication),"
                f" there {count_in_words(alive)}; start more, or ask for less replication",
                stream=stream.name,
                replication=needed,
                live_backups=alive,
            )

    async def _open(self, stream: common_pb2.StreamInfo) -> None:
        brokers = self.brokers_of(stream)
        results = await _all_of(self._brokers.open_streamlets(broker, stream) for broker in brokers)
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

    def _check_epochs(self, stream: common_pb2.StreamInfo) -> None:
        # A broker that was started anew while we waited has opened nothing.
        for owner in stream.assignments:
            if self._broker_members.epoch(owner.broker_id) != owner.broker_epoch:
                raise Unavailable(
                    f"stream {stream.name!r} was not created: broker {owner.broker_id} was restarted meanwhile;"
                    " ask again",
                    stream=stream.name,
                    broker_id=owner.broker_id,
                )

    async def _drop(self, stream: common_pb2.StreamInfo) -> None:
        await self._tell(
            stream,
            lambda broker: self._brokers.drop_stream(broker, stream.stream_id),
            otherwise="broker keeps a stream that is gone until it registers again",
        )

    async def _tell(
        self,
        stream: common_pb2.StreamInfo,
        tell: Callable[[common_pb2.BrokerInfo], Coroutine[Any, Any, None]],
        *,
        otherwise: str,
    ) -> None:
        """Best effort: a broker that cannot be told learns it when it registers next."""
        brokers = self.brokers_of(stream)
        results = await _all_of(tell(broker) for broker in brokers)
        for broker, error in zip(brokers, results, strict=True):
            if error is not None:
                log.warning(otherwise, stream_id=stream.stream_id, broker_id=broker.broker_id, error=str(error))

    async def alter_stream(self, request: coordinator_pb2.AlterStreamRequest) -> common_pb2.StreamInfo:
        """Change what `request` sets of a stream's configuration; returns the stream.

        When it returns, the brokers that could be told go by the new configuration; others get it when they register.
        A request that changes nothing writes nothing, but the brokers are told again: it may be a repeated one.

        Raises `UnknownStream`, also when the stream is deleted meanwhile, and `InvalidArgument`.
        """
        return await self._to_the_end(self._alter(request))

    async def _alter(self, request: coordinator_pb2.AlterStreamRequest) -> common_pb2.StreamInfo:
        async with self._changing:
            known = self._catalog.named(request.name)
            stream = common_pb2.StreamInfo()
            stream.CopyFrom(known)
            stream.config.CopyFrom(altered_config(known.config, request))
            if stream.config != known.config:
                stream.config_version += 1
                self._catalog.check_room(stream)
                await self._ledger.write({_stream_key(stream): stream.SerializeToString()})
                self._catalog.add(stream)
                log.info("stream altered", stream=stream.name, config_version=stream.config_version)
        await self._tell(
            stream,
            lambda broker: self._brokers.open_streamlets(broker, stream),
            otherwise="broker goes by an older configuration of a stream until it registers again",
        )
        try:
            return self._catalog.with_id(stream.stream_id)
        except UnknownStream:
            await self._drop(stream)  # a broker that was told to drop it before may have opened it anew
            raise

    async def delete_stream(self, name: str) -> int:
        """Delete a stream; returns its id. When it returns, the brokers that could be told have dropped it.

        Raises `UnknownStream`.
        """
        return await self._to_the_end(self._delete(name))

    async def _delete(self, name: str) -> int:
        async with self._changing:
            stream = self._catalog.named(name)
            await self._ledger.write({_stream_key(stream): None})
            self._catalog.remove(stream)
        log.info("stream deleted", stream=name, stream_id=stream.stream_id)
        await self._drop(stream)
        return stream.stream_id

    # --- brokers, backups and producers ------------------------------------------------------------------------

    async def register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        """Make a launch of a broker the current one; returns it, and exactly the streams it has streamlets of.

        A launch that registers again gets the same answer. A new one fences the one before it; where it has lost the
        data of a streamlet, its group ids start above those it had (see `GROUPS_PER_LAUNCH`). Raises `InvalidArgument`.
        """
        return await self._to_the_end(self._register_broker(request))

    async def _register_broker(
        self, request: coordinator_pb2.RegisterBrokerRequest
    ) -> tuple[common_pb2.BrokerInfo, list[common_pb2.StreamInfo]]:
        async with self._changing:
            registration = self._decide(self._broker_members, request)
            broker_id, epoch = registration.member_id, registration.epoch
            moved = self._catalog.relaunched(broker_id, epoch) if registration.new_launch else []
            info = await self._admit(
                self._broker_members,
                registration,
                {_stream_key(stream): stream.SerializeToString() for stream in moved},
            )
            for stream in moved:
                self._catalog.add(stream)
            log.info(
                "broker registered",
                broker_id=broker_id,
                broker_epoch=epoch,
                new_launch=registration.new_launch,
                streams_moved=len(moved),
                address=info.grpc_address,
            )
            return info, self._catalog.of_launch(broker_id, epoch)

    async def register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        """Make a launch of a backup the current one; returns it.

        A launch that registers again gets the same answer. A new one fences the one before it.
        Raises `InvalidArgument`.
        """
        return await self._to_the_end(self._register_backup(request))

    async def _register_backup(self, request: coordinator_pb2.RegisterBackupRequest) -> common_pb2.BackupInfo:
        async with self._changing:
            registration = self._decide(self._backup_members, request)
            info = await self._admit(self._backup_members, registration, {})
            log.info(
                "backup registered",
                backup_id=info.backup_id,
                backup_epoch=info.backup_epoch,
                new_launch=registration.new_launch,
                address=info.grpc_address,
            )
            return info

    def _decide(self, members: Membership[RecordT, InfoT], request: RecordT) -> Registration[RecordT]:
        noun = members.kind.noun
        return members.decide(
            request,
            next_id=self._ledger.next_number(_last_id(noun)),
            next_epoch=self._ledger.next_number(_last_epoch(noun)),
        )

    async def _admit(
        self, members: Membership[RecordT, InfoT], registration: Registration[RecordT], consequences: Changes
    ) -> InfoT:
        """Store a registration with what follows from it; then it counts."""
        if registration.changed:
            noun = members.kind.noun
            changes: dict[str, bytes | None] = {
                f"{_members_prefix(noun)}{registration.member_id:08x}": registration.record.SerializeToString(),
                **consequences,
            }
            if registration.new_member:
                changes[_last_id(noun)] = number(registration.member_id)
            if registration.new_launch:
                changes[_last_epoch(noun)] = number(registration.epoch)
            await self._ledger.write(changes)
        return members.admit(registration)

    def heartbeat(self, broker_id: int, broker_epoch: int) -> None:
        """A broker says that it lives. Raises `StaleEpoch` when it must end."""
        self._broker_members.heartbeat(broker_id, broker_epoch)

    def backup_heartbeat(self, request: coordinator_pb2.BackupHeartbeatRequest) -> None:
        """A backup says that it lives, and what it has free. Raises `StaleEpoch` when it must end."""
        self._backup_members.heartbeat(
            request.backup_id,
            request.backup_epoch,
            free_memory_bytes=request.free_memory_bytes,
            free_disk_bytes=request.free_disk_bytes,
        )

    async def init_producer(self) -> tuple[int, int]:
        """A producer id that nobody had before, and its epoch."""
        return await self._to_the_end(self._init_producer())

    async def _init_producer(self) -> tuple[int, int]:
        async with self._changing:
            producer_id = self._ledger.next_number(LAST_PRODUCER_ID)
            await self._ledger.write({LAST_PRODUCER_ID: number(producer_id)})
        return producer_id, FIRST_PRODUCER_EPOCH

    async def _to_the_end(self, operation: Coroutine[Any, Any, T]) -> T:
        """Wait for `operation`, which goes on if the wait is cancelled. gRPC cancels when a caller gives up."""
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._operations.discard)
        return await asyncio.shield(task)


def _stream_key(stream: common_pb2.StreamInfo) -> str:
    return f"{STREAMS}{stream.stream_id:016x}"


async def _all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> list[BaseException | None]:
    """Wait for all calls; the error of each, or None."""
    return list(await asyncio.gather(*calls, return_exceptions=True))
