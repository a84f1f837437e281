"""The streams of one broker, and the finding of the streamlet that a request means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kera.broker.entry import Entry
from kera.broker.jobs import Done, nothing
from kera.broker.persistence import PersistenceManager
from kera.broker.replication import Replication, StreamLogs
from kera.broker.restart import RestoredStreamlet
from kera.broker.retention import Rules
from kera.broker.segment_scan import SegmentAddress
from kera.broker.streamlet import Streamlet
from kera.core.errors import InvalidArgument, NotOwner, NotReplicated, StreamletOutOfRange, UnknownStream
from kera.core.ids import EntryId
from kera.v1 import common_pb2


class Stream:
    """A stream, as far as this broker is concerned with it."""

    def __init__(self, info: common_pb2.StreamInfo) -> None:
        self.stream_id = info.stream_id
        self.name = info.name
        self.streamlet_count = info.config.streamlets
        self.schema_ids = frozenset(schema.schema_id for schema in info.schemas)
        self.streamlets: dict[int, Streamlet] = {}
        """Those that this broker owns."""
        self.logs: StreamLogs | None = None
        """Its virtual logs, if it is replicated."""
        self.alter(info)

    def alter(self, info: common_pb2.StreamInfo) -> None:
        """Take over what can change while the stream is in use."""
        self.config_version = info.config_version
        self.durability = max(info.config.durability, common_pb2.DURABILITY_LEADER)
        """The level at which chunks are acknowledged, unless a request asks for another, and readable."""
        self.replication = info.config.replication
        self.virtual_logs = max(1, info.config.virtual_logs)
        if self.logs is not None:
            self.logs.by_replicas = self.by_replicas
        self.retention = Rules.of(info.config)
        for streamlet in self.streamlets.values():
            self._set_level(streamlet)

    @property
    def by_replicas(self) -> bool:
        """Whether readers and writers wait for backups."""
        return self.replication > 0 and self.durability > common_pb2.DURABILITY_LEADER

    @property
    def by_disk(self) -> bool:
        """Whether level persisted means the broker's own disk: there are no replicas."""
        return self.replication == 0

    def add(self, streamlet: Streamlet) -> None:
        """One more that this broker owns."""
        self.streamlets[streamlet.streamlet_id] = streamlet
        self._set_level(streamlet)

    def _set_level(self, streamlet: Streamlet) -> None:
        for entry in streamlet.entries:
            entry.by_replicas = self.by_replicas
            if self.durability == common_pb2.DURABILITY_LEADER:
                for segment in entry.tail:
                    segment.advance_durable_head(segment.head)
                entry.wake()

    def streamlet(self, streamlet_id: int) -> Streamlet:
        """A streamlet of this broker. Raises `StreamletOutOfRange` or `NotOwner`."""
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
        raise NotOwner(
            f"streamlet {streamlet_id} of stream {self.name!r} is owned by another broker",
            stream=self.name,
            streamlet_id=streamlet_id,
        )


class Restorer(Protocol):
    """Who knows what was there before: see ``kera.broker.restart``."""

    def restore(
        self, stream_id: int, streamlet_id: int, entries: int, first_group_id: int, *, persisted: bool = False
    ) -> RestoredStreamlet:
        """The state of a streamlet, to go on from."""
        ...


class Streams:
    """All streams with streamlets on this broker (the thesis's stream manager)."""

    def __init__(self, memory: PersistenceManager, restorer: Restorer, replication: Replication) -> None:
        self._memory = memory
        self._restorer = restorer
        self._replication = replication
        replication.coverage.exists = self._exists
        self._streams: dict[int, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def get(self, stream_id: int) -> Stream:
        """The stream with this id. Raises `UnknownStream`."""
        try:
            return self._streams[stream_id]
        except KeyError:
            raise UnknownStream(
                f"this broker has no stream with id {stream_id}; it may have been deleted", stream_id=stream_id
            ) from None

    def open(self, info: common_pb2.StreamInfo, broker_id: int) -> None:
        """Open the streamlets that `info` assigns to this broker; those that are open already stay as they are.

        The stream's configuration is taken over if it is newer. Raises `InvalidArgument` when it makes no sense.
        """
        config = info.config
        if not (config.streamlets and config.entries and config.group_segments):
            raise InvalidArgument(f"stream {info.name!r} has an incomplete configuration", stream=info.name)
        stream = self._streams.get(info.stream_id)
        if stream is None:
            stream = self._streams[info.stream_id] = Stream(info)
        elif info.config_version > stream.config_version:
            stream.alter(info)
            if stream.logs is not None:
                self._replication.set_virtual_logs(stream.logs, stream.virtual_logs)
        restored = []
        for assignment in info.assignments:
            if assignment.broker_id == broker_id and assignment.streamlet_id not in stream.streamlets:
                streamlet = self._restore(stream, info, assignment)
                stream.add(streamlet)
                restored.append(streamlet)
        if restored and stream.replication:
            self._restore_replicas(stream, restored, info.config.entries)

    def _restore_replicas(self, stream: Stream, restored: list[Streamlet], entries: int) -> None:
        """Have covered what the streamlets have and no virtual segment does."""
        if stream.logs is None:
            stream.logs = self._replication.open_stream(
                stream.stream_id,
                replication=stream.replication,
                entries=entries,
                virtual_logs=stream.virtual_logs,
                by_replicas=stream.by_replicas,
            )
        for streamlet in restored:
            for entry in streamlet.entries:
                self._replication.restore(stream.logs, entry)

    def entry(self, entry_id: EntryId) -> Entry | None:
        """An entry of a streamlet of this broker."""
        stream = self._streams.get(entry_id.stream_id)
        streamlet = stream.streamlets.get(entry_id.streamlet_id) if stream is not None else None
        return streamlet.entries[entry_id.entry] if streamlet is not None else None

    def _exists(self, address: SegmentAddress) -> bool:
        entry = self.entry(EntryId(*address[:3]))
        return entry is not None and entry.exists((address.group_id, address.segment_id))

    def _restore(
        self, stream: Stream, info: common_pb2.StreamInfo, assignment: common_pb2.StreamletAssignment
    ) -> Streamlet:
        restored = self._restorer.restore(
            stream.stream_id,
            assignment.streamlet_id,
            info.config.entries,
            max(1, assignment.first_group_id),
            persisted=stream.by_disk and stream.durability == common_pb2.DURABILITY_PERSISTED,
        )
        streamlet = Streamlet(
            stream.stream_id,
            assignment.streamlet_id,
            entries=restored.entries,
            group_segments=info.config.group_segments,
            broker_epoch=assignment.broker_epoch,
            next_group_id=restored.next_group_id,
            producers=restored.producers,
            memory=self._memory,
        )
        for entry in restored.moved:
            self._memory.collect(entry)
        for segment in restored.segments:
            self._memory.adopt(segment)
            if stream.by_disk and stream.durability > common_pb2.DURABILITY_LEADER:
                self._memory.persist([(segment, segment.head)], nothing)
        return streamlet

    def drop(self, stream_id: int, done: Done = nothing) -> None:
        """Free all of a stream, in memory at once; `done` when its files are gone, or if it is not here."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._replication.drop_stream(stream_id, NotReplicated("the stream was deleted", stream=stream.name))
            for streamlet in stream.streamlets.values():
                streamlet.drop()
        self._memory.drop_stream(stream_id, done)
