"""The streams of one broker, and the finding of the streamlet that a request means."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kera.broker.jobs import Done, nothing
from kera.broker.persistence import PersistenceManager
from kera.broker.restart import RestoredStreamlet
from kera.broker.retention import Rules
from kera.broker.streamlet import Streamlet
from kera.core.errors import InvalidArgument, NotOwner, StreamletOutOfRange, UnknownStream
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
        self.alter(info)

    def alter(self, info: common_pb2.StreamInfo) -> None:
        """Take over what can change while the stream is in use."""
        self.config_version = info.config_version
        self.durability = max(info.config.durability, common_pb2.DURABILITY_LEADER)
        """The level at which chunks are acknowledged, unless a request asks for another, and readable."""
        self.retention = Rules.of(info.config)

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

    def __init__(self, memory: PersistenceManager, restorer: Restorer) -> None:
        self._memory = memory
        self._restorer = restorer
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
        for assignment in info.assignments:
            if assignment.broker_id == broker_id and assignment.streamlet_id not in stream.streamlets:
                stream.streamlets[assignment.streamlet_id] = self._restore(stream, info, assignment)

    def _restore(
        self, stream: Stream, info: common_pb2.StreamInfo, assignment: common_pb2.StreamletAssignment
    ) -> Streamlet:
        restored = self._restorer.restore(
            stream.stream_id,
            assignment.streamlet_id,
            info.config.entries,
            max(1, assignment.first_group_id),
            persisted=stream.durability == common_pb2.DURABILITY_PERSISTED,
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
            if stream.durability == common_pb2.DURABILITY_LEADER:
                segment.advance_durable_head(segment.head)
            else:
                self._memory.persist([(segment, segment.head)], nothing)
        return streamlet

    def drop(self, stream_id: int, done: Done = nothing) -> None:
        """Free all of a stream, in memory at once; `done` when its files are gone, or if it is not here."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            for streamlet in stream.streamlets.values():
                streamlet.drop()
        self._memory.drop_stream(stream_id, done)
