"""The SDK's descriptions of streams, brokers, deliveries and records: plain immutable values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from kera.client import arguments
from kera.client.headers import Headers
from kera.client.stream_config import StreamConfig
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import InvalidArgument, ProtocolError, StreamletOutOfRange
from kera.core.format.chunk import ALIGNMENT_BYTES, Codec
from kera.core.format.schema import schema_from_bytes
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

_schema_of = lru_cache(maxsize=256)(schema_from_bytes)
"""A cached reader of schemas: many streams share a schema, and reading it takes most of the time of a description."""


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker, as the coordinator knows it."""

    broker_id: int
    node_id: str
    grpc_address: str
    frames_address: str
    frames_unix_path: str
    segment_bytes: int
    arena_bytes: int
    alive: bool
    broker_epoch: int = 0
    """Epoch of its last launch; 0: unknown."""
    draining: bool = False
    """Whether it is being emptied, and gets no streamlets."""
    push_unix_path: str = ""
    """Path of the socket over which it pushes to readers on its node; empty: it does not push."""
    restarting: bool = False
    """Whether it stops, or has stopped, for a restart: it gets nothing new, and its absence is not a loss."""
    grace_left_ms: int = 0
    """Time for which `restarting` still holds."""
    version: str = ""
    """Version of its program; empty: it does not report one."""
    feature_level: int = 0
    """See `ClusterDescription`."""
    cpus: str = ""
    """Processors of its host on which it runs, as ``0-3,8``; empty: all."""

    @classmethod
    def from_message(cls, info: common_pb2.BrokerInfo) -> BrokerDescription:
        """Make a description from its wire form."""
        return cls(
            broker_id=info.broker_id,
            node_id=info.node_id,
            grpc_address=info.grpc_address,
            frames_address=info.frames_address,
            frames_unix_path=info.frames_unix_path,
            segment_bytes=info.segment_bytes,
            arena_bytes=info.arena_bytes,
            alive=info.alive,
            draining=info.draining,
            broker_epoch=info.broker_epoch,
            push_unix_path=info.push_unix_path,
            restarting=info.restarting,
            grace_left_ms=info.grace_left_ms,
            version=info.version,
            feature_level=info.feature_level,
            cpus=info.cpus,
        )


@dataclass(frozen=True, slots=True)
class BackupDescription:
    """A backup, as the coordinator knows it."""

    backup_id: int
    node_id: str
    rack: str
    """Failure domain, such as a rack; empty: unknown."""
    grpc_address: str
    frames_address: str
    frames_unix_path: str
    segment_bytes: int
    memory_bytes: int
    disk_bytes: int
    free_memory_bytes: int
    """Free memory as of its last heartbeat."""
    free_disk_bytes: int
    alive: bool
    draining: bool = False
    """Whether it is being emptied, and gets no replicas."""
    restarting: bool = False
    """See `BrokerDescription`."""
    grace_left_ms: int = 0
    version: str = ""
    feature_level: int = 0

    @classmethod
    def from_message(cls, info: common_pb2.BackupInfo) -> BackupDescription:
        """Make a description from its wire form."""
        return cls(
            backup_id=info.backup_id,
            node_id=info.node_id,
            rack=info.rack,
            grpc_address=info.grpc_address,
            frames_address=info.frames_address,
            frames_unix_path=info.frames_unix_path,
            segment_bytes=info.segment_bytes,
            memory_bytes=info.memory_bytes,
            disk_bytes=info.disk_bytes,
            free_memory_bytes=info.free_memory_bytes,
            free_disk_bytes=info.free_disk_bytes,
            alive=info.alive,
            draining=info.draining,
            restarting=info.restarting,
            grace_left_ms=info.grace_left_ms,
            version=info.version,
            feature_level=info.feature_level,
        )


@dataclass(frozen=True, slots=True)
class UnlistedStream:
    """A stream that brokers hold and that is missing in the metadata, or has an older state there.

    The metadata may have been restored from an older copy.
    """

    stream_id: int
    name: str
    """Its former name; empty: no broker has stored the name."""
    bytes: int
    records: int
    """Sum of the ordinals at the ends of its entries."""
    broker_ids: tuple[int, ...]
    problem: str = ""
    """For a stream with an older state in the metadata: why it does not continue with the brokers' state."""

    @classmethod
    def from_message(cls, message: coordinator_pb2.UnknownStream) -> UnlistedStream:
        """Make a description from its wire form."""
        stream, broker_ids = message.stream, tuple(message.broker_ids)
        return cls(stream.stream_id, stream.name, message.bytes, message.records, broker_ids, message.problem)


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster's id and all brokers and backups it ever had."""

    cluster_id: str
    brokers: list[BrokerDescription]
    backups: list[BackupDescription]
    coordinators: tuple[str, ...] = ()
    """Addresses of the running coordinators, the leader first."""
    unknown_streams: tuple[UnlistedStream, ...] = ()
    """Streams that brokers hold and that are missing or older in the metadata; see `Admin.adopt_stream`."""
    catching_up: str = ""
    """A text about what the coordinator waits for, while its metadata are known to be older than the cluster."""
    feature_level: int = 0
    """Feature level of the cluster: all of its daemons have had that level."""
    security: bool = False
    """Whether security is on: all users must authenticate, and rules decide their rights."""


class Interval(NamedTuple):
    """Groups of a streamlet at one broker: from `first_group_id` up to the first group of the next interval."""

    first_group_id: int
    broker_id: int
    first_records: tuple[int, ...] = ()
    """Per entry, the ordinal of the first record of the interval; empty: all 0."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The owner of a streamlet, and the places of its groups."""

    broker_id: int
    """The owner, which accepts the streamlet's chunks."""
    broker_epoch: int
    first_group_id: int
    intervals: tuple[Interval, ...] = ()
    """The intervals in the order of their groups, the owner's last; empty: all groups are at the owner."""

    def broker_at(self, position: Position) -> int:
        """Return the broker that has the group of `position`; for `EARLIEST`, the broker with the oldest groups."""
        if not self.intervals:
            return self.broker_id
        holder = self.intervals[0].broker_id
        for interval in self.intervals[1:]:
            if interval.first_group_id > position.group_id:
                break
            holder = interval.broker_id
        return holder

    @property
    def broker_ids(self) -> tuple[int, ...]:
        """All brokers that have groups of the streamlet, each once; the owner is the last one."""
        holders = dict.fromkeys(interval.broker_id for interval in self.intervals)
        holders.pop(self.broker_id, None)
        return (*holders, self.broker_id)


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """A stream, the places of its streamlets, and the brokers that have them."""

    stream_id: int
    name: str
    config: StreamConfig
    schema: pa.Schema
    schema_id: int
    typed: bool
    key_column: str | None
    timestamp_column: str | None
    assignments: Mapping[int, Assignment]
    created_us: int
    created_by: str = ""
    """The principal that created it, as ``user:alice``; empty: a daemon, or security was off."""
    brokers: Mapping[int, BrokerDescription] = field(default_factory=dict)
    assignments_version: int = 0
    """A number that grows with each change of `assignments`."""
    config_version: int = 0
    """A number that grows with each change of `config`, and with added columns."""
    earlier_schemas: Mapping[int, pa.Schema] = field(default_factory=dict)
    """The versions of `schema` before columns were added, by id; each has the first columns of `schema`."""
    message_bytes_max: int = field(default=0, repr=False, compare=False)
    """Maximum size of the client's requests; 0: unknown."""
    codec: Codec = field(init=False, repr=False, compare=False)
    """Compression of the stream's chunks."""
    segment_bytes_min: int = field(init=False, repr=False, compare=False)
    """Maximum size of a chunk of the stream, so that it fits into all segments and into a request; 0: not known."""

    def __post_init__(self) -> None:
        """Compute the codec and the size limit once, as each chunk needs them."""
        object.__setattr__(self, "codec", Codec[self.config.codec.upper()])
        limit = min((broker.segment_bytes for broker in self.brokers.values()), default=0)
        if self.message_bytes_max:
            limit = min(limit or self.message_bytes_max, self.message_bytes_max & -ALIGNMENT_BYTES)
        object.__setattr__(self, "segment_bytes_min", limit)

    def schema_of(self, schema_id: int) -> pa.Schema | None:
        """Return the version of the schema with this id, as named by chunks; None: it is not known."""
        return self.schema if schema_id == self.schema_id else self.earlier_schemas.get(schema_id)

    def is_older_than(self, other: StreamDescription) -> bool:
        """Return whether `other` replaces this one: it is a later stream of this name, or a later state of this one."""
        if self.stream_id != other.stream_id:
            return self.stream_id < other.stream_id
        versions = self.assignments_version, self.config_version
        return versions < (other.assignments_version, other.config_version)

    def broker_of(self, streamlet_id: int, position: Position | None = None) -> BrokerDescription | None:
        """Return the broker that has a position of a streamlet, if known; without a position, the streamlet's owner."""
        assignment = self.assignments[streamlet_id]
        return self.brokers.get(assignment.broker_id if position is None else assignment.broker_at(position))

    def entry_id(self, streamlet_id: int, entry: int) -> EntryId:
        """Return the id of an entry. Raises `StreamletOutOfRange` or `InvalidArgument` for a missing one."""
        streamlets, entries = self.config.streamlets, self.config.entries
        streamlet_id, entry = streamlet_number(streamlet_id, "streamlet_id"), _number("entry", entry)
        if not 0 <= streamlet_id < streamlets:
            raise StreamletOutOfRange(
                f"stream {self.name!r} has streamlets 0 to {streamlets - 1}, not {streamlet_id}",
                stream=self.name,
                streamlet_id=streamlet_id,
                streamlets=streamlets,
            )
        if not 0 <= entry < entries:
            raise InvalidArgument(
                f"streamlets of stream {self.name!r} have entries 0 to {entries - 1}, not {entry}",
                stream=self.name,
                entry=entry,
                entries=entries,
            )
        return EntryId(self.stream_id, streamlet_id, entry)

    @classmethod
    def from_message(
        cls, info: common_pb2.StreamInfo, brokers: Sequence[common_pb2.BrokerInfo] = (), *, message_bytes_max: int = 0
    ) -> StreamDescription:
        """Make a description from its wire form, with the newest schema.

        Raises `ProtocolError` and `SchemaMismatch`.
        """
        schema = max(info.schemas, key=lambda version: version.schema_id, default=None)
        if schema is None:
            raise ProtocolError(f"stream {info.name!r} was described without a schema", stream=info.name)
        config, assigned = info.config, {item.streamlet_id for item in info.assignments}
        if not config.streamlets:
            raise ProtocolError(f"stream {info.name!r} was described without any streamlets", stream=info.name)
        if len(assigned) < config.streamlets or not all(number in assigned for number in range(config.streamlets)):
            raise ProtocolError(f"stream {info.name!r} was described without all of its streamlets", stream=info.name)
        return cls(
            stream_id=info.stream_id,
            name=info.name,
            config=StreamConfig.from_message(config),
            schema=_schema_of(schema.arrow_schema),
            schema_id=schema.schema_id,
            typed=schema.typed,
            key_column=schema.key_column or None,
            timestamp_column=schema.timestamp_column or None,
            assignments={
                item.streamlet_id: Assignment(
                    item.broker_id,
                    item.broker_epoch,
                    item.first_group_id,
                    tuple(
                        Interval(interval.first_group_id, interval.broker_id, tuple(interval.first_records))
                        for interval in item.intervals
                    ),
                )
                for item in info.assignments
            },
            created_us=info.created_us,
            created_by=info.created_by,
            brokers={broker.broker_id: BrokerDescription.from_message(broker) for broker in brokers},
            assignments_version=info.assignments_version,
            config_version=info.config_version,
            earlier_schemas={
                version.schema_id: _schema_of(version.arrow_schema)
                for version in info.schemas
                if version.schema_id != schema.schema_id
            },
            message_bytes_max=message_bytes_max,
        )


def streamlet_number(given: object, parameter: str = "streamlet") -> int:
    """Return `given` as the number of a streamlet, which need not exist. Raises `InvalidArgument`."""
    return _number(parameter, given)


def _number(parameter: str, given: Any) -> int:
    return given if given.__class__ is int else arguments.whole(parameter, given, 0, arguments.UINT32_MAX)


@dataclass(frozen=True, slots=True)
class EntryBounds:
    """The present start and end of an entry of a streamlet."""

    start: Position
    end: Position
    """The durable head."""
    first_record: int
    next_record: int
    length_bytes: int
    lost: tuple[Position, Position] | None = None
    """The last range that may have been lost with a broker's memory: from the first position up to the second. Behind
    it, ordinals may have begun again."""
    watermark_us: int | None = None
    """The greatest time of a written record; None: there are no records, or it is not known."""
    promised_us: int | None = None
    """For a stream with epochs, if requested: the promise that no older records follow at or behind `promised_at`,
    except behind a punctuation; None: there is no promise."""
    promised_at: Position = EARLIEST
    removed_watermark_us: int | None = None
    """An upper limit for the times of records removed before `start`; None: no records were removed."""
    settled_us: int | None = None
    """For a stream with epochs: the time up to which it is settled, by its records, or by the promise that its broker
    would make; None: it is not settled."""

    @property
    def starts_behind_loss(self) -> bool:
        """Whether a loss ends at the start of the entry, so that a reader from the earliest record misses records."""
        return self.lost is not None and self.lost[0] < self.start <= self.lost[1]

    @classmethod
    def from_message(cls, info: broker_pb2.EntryInfo) -> EntryBounds:
        """Make the bounds from their wire form."""
        return cls(
            start=position_of(info.start),
            end=position_of(info.end),
            first_record=info.first_record,
            next_record=info.next_record,
            length_bytes=info.length_bytes,
            lost=(position_of(info.lost_from), position_of(info.lost_to)) if info.HasField("lost_to") else None,
            watermark_us=info.watermark_us if info.HasField("watermark_us") else None,
            promised_us=info.promised_us if info.HasField("promised_us") else None,
            promised_at=position_of(info.promised_at),
            removed_watermark_us=info.removed_watermark_us if info.HasField("removed_watermark_us") else None,
            settled_us=info.settled_us if info.HasField("settled_us") else None,
        )


MaybeNone: TypeAlias = Any
"""A value that is rarely None, so type checkers do not require a check."""


class Delivery(NamedTuple):
    """The result for a stored record, or for a stored chunk of a batch."""

    stream: str
    entry: EntryId
    position: Position | MaybeNone
    """Position of the chunk; None: not known, see `duplicate`."""
    record: int | MaybeNone
    """Ordinal of the record (the first one of a chunk) within its entry; None: not known."""
    record_count: int
    durability: str
    """The durability level that was reached."""
    duplicate: bool
    """Whether an earlier attempt had already arrived; `position` and `record` are those of the earlier attempt. They
    are None if that chunk is no longer in the broker's memory."""
    virtual_segment: int = 0
    """The virtual segment that has the chunk on backups; 0: none, or not known."""
    backups: tuple[int, ...] = ()
    """The backups that have this virtual segment."""


class Record(NamedTuple):
    """One record, as Python values."""

    stream: str
    streamlet: int
    entry: int
    offset: int
    """Ordinal within the entry, from 0."""
    timestamp_us: int
    """Time of the event (the stream's timestamp column), or of acceptance, in microseconds since the Unix epoch."""
    key: Any
    """The primary key, the first of `keys`: bytes, or None, or the result of the consumer's key deserializer."""
    keys: tuple[bytes, ...]
    value: Any
    """Bytes, or None, or the result of the consumer's deserializer."""
    headers: Headers
    """The headers in the order of sending; ``headers["a"]`` is the last value of a repeated name."""
    row: Mapping[str, Any] | None
    """All columns, for a stream with its own schema."""


def fill_cursor(cursor: common_pb2.Cursor, entry: EntryId, position: Position) -> None:
    """Fill in `cursor` with a position of an entry."""
    cursor.stream_id, cursor.streamlet_id, cursor.entry = entry
    cursor.group_id, cursor.segment_id, cursor.position = position


def position_of(cursor: common_pb2.Cursor) -> Position:
    """Return the position in a cursor."""
    return Position(cursor.group_id, cursor.segment_id, cursor.position)
