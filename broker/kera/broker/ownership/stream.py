"""A stream at this broker: its configuration, and its streamlets that are here."""

from __future__ import annotations

from functools import lru_cache

from kera.broker.log.epochs import EpochRules
from kera.broker.log.retention import Rules
from kera.broker.log.streamlet import Streamlet
from kera.broker.replication.virtual_logs import StreamLogs
from kera.core.errors import NotOwner, StreamletOutOfRange
from kera.core.format.lean import Known, learn
from kera.core.format.schema import DEFAULT_SCHEMA, schema_from_bytes
from kera.core.push import DEFAULT_DOMAIN
from kera.v1 import common_pb2

SCHEMAS_KEPT = 256


class Stream:
    """A stream at this broker: its configuration, and its streamlets that are here."""

    def __init__(self, info: common_pb2.StreamInfo) -> None:
        self.stream_id = info.stream_id
        self.name = info.name
        self.created_by = info.created_by
        """The principal that has created it; empty: unknown, so no quota counts it."""
        self.created_us = info.created_us
        self.streamlet_count = info.config.streamlets
        self.streamlets: dict[int, Streamlet] = {}
        """The streamlets that this broker owns, or has older groups of."""
        self.owners: dict[int, int] = {}
        """The broker that owns each of these streamlets, according to the last known assignments."""
        self.spread: dict[int, common_pb2.StreamletAssignment] = {}
        """The intervals (only) of those of these streamlets that have been at several brokers."""
        self.logs: StreamLogs | None = None
        """Its virtual logs, if it is replicated."""
        self.bytes_appended = self.records_appended = self.bytes_read = 0
        """Counted since it was opened here, as far as heartbeats have reported."""
        self.assignments_version = 0
        """The version of the assignments that are carried out here."""
        self.alter(info)

    def alter(self, info: common_pb2.StreamInfo) -> None:
        """Take over the parts of a configuration that can change while the stream is in use."""
        self.config_version = info.config_version
        self.schemas = {schema.schema_id: _known(schema.arrow_schema) for schema in info.schemas}
        """The versions of its schema: producers may continue with an older one."""
        self.lean_types = {schema_id: known.type for schema_id, known in self.schemas.items()}
        """The types of the schemas, for the native core."""
        self.durability = max(info.config.durability, common_pb2.DURABILITY_LEADER)
        """The level at which chunks become readable, and are acknowledged unless a request asks for another level."""
        self.replication = info.config.replication
        self.virtual_logs = max(1, info.config.virtual_logs)
        self.by_replicas = self.replication > 0 and self.durability > common_pb2.DURABILITY_LEADER
        """Whether readers and writers wait for backups."""
        self.memory_priority = info.config.memory_priority
        self.memory_domain = info.config.memory_domain or DEFAULT_DOMAIN
        self.replication_priority = info.config.replication_priority
        self.epochs = EpochRules.of(info.config)
        self.by_disk = self.replication == 0
        """Whether level persisted means the broker's own disk: there are no replicas."""
        if self.logs is not None:
            self.logs.set_by_replicas(self.by_replicas)
            self.logs.set_priority(self.replication_priority)
        self.retention = Rules.of(info.config)
        for streamlet in self.streamlets.values():
            self._set_level(streamlet)

    def add(self, streamlet: Streamlet) -> None:
        """Add a streamlet that has data here."""
        self.streamlets[streamlet.streamlet_id] = streamlet
        self._set_level(streamlet)

    def assign(self, assignment: common_pb2.StreamletAssignment) -> None:
        """Remember where the groups of a streamlet are."""
        streamlet_id = assignment.streamlet_id
        self.owners[streamlet_id] = assignment.broker_id
        if assignment.intervals:
            self.spread[streamlet_id] = common_pb2.StreamletAssignment(intervals=assignment.intervals)
        else:
            self.spread.pop(streamlet_id, None)

    def remove(self, streamlet_id: int) -> None:
        """Remove a streamlet that has no data here any more."""
        del self.streamlets[streamlet_id], self.owners[streamlet_id]
        self.spread.pop(streamlet_id, None)

    def set_epochs(self, streamlet: Streamlet) -> None:
        """Set the epoch rules of a streamlet; call this also when this broker has become its owner."""
        streamlet.set_epochs(self.epochs)

    def _set_level(self, streamlet: Streamlet) -> None:
        self.set_epochs(streamlet)
        streamlet.entries.set_by_replicas(self.by_replicas)
        streamlet.entries.set_memory_priority(self.memory_priority)
        streamlet.entries.set_memory_domain(self.memory_domain)
        if self.durability == common_pb2.DURABILITY_LEADER:
            for entry in streamlet.entries.made:
                for segment in entry.tail:
                    segment.advance_durable_head(segment.head)
                entry.wake()

    def streamlet(self, streamlet_id: int) -> Streamlet:
        """Return a streamlet of this broker. Raises `StreamletOutOfRange` or `NotOwner`."""
        streamlet = self.streamlets.get(streamlet_id)
        if streamlet is not None:
            return streamlet
        if streamlet_id >= self.streamlet_count:
            raise StreamletOutOfRange(
                f"stream {self.name!r} has streamlets 0 to {self.streamlet_count - 1}, not {streamlet_id}",
                stream=self.name,
                streamlet_id=streamlet_id,
                streamlets=self.streamlet_count,
            )
        raise self.not_owner(streamlet_id)

    def not_owner(self, streamlet_id: int) -> NotOwner:
        """Return the error for a streamlet that this broker does not have, or takes no chunks for."""
        streamlet = self.streamlets.get(streamlet_id)
        moves = streamlet is not None and streamlet.sealed
        return NotOwner(
            f"streamlet {streamlet_id} of stream {self.name!r} is "
            + ("about to move to another broker" if moves else "owned by another broker"),
            stream=self.name,
            streamlet_id=streamlet_id,
        )


@lru_cache(SCHEMAS_KEPT)
def _known(arrow_schema: bytes) -> Known:
    """Return the properties of a schema; empty: the default one, which most streams share. Raises `SchemaMismatch`."""
    return learn(schema_from_bytes(arrow_schema) if arrow_schema else DEFAULT_SCHEMA)
