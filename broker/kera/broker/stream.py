"""The streams of one broker, and the finding of the streamlet that a request means."""

from __future__ import annotations

from collections.abc import Iterator

from kera.broker.arena import Arena
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


class Streams:
    """All streams with streamlets on this broker (the thesis's stream manager)."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._streams: dict[int, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

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

        Raises `InvalidArgument` when the configuration makes no sense.
        """
        config = info.config
        if not (config.streamlets and config.entries and config.group_segments):
            raise InvalidArgument(f"stream {info.name!r} has an incomplete configuration", stream=info.name)
        stream = self._streams.get(info.stream_id)
        if stream is None:
            stream = self._streams[info.stream_id] = Stream(info)
        for assignment in info.assignments:
            if assignment.broker_id == broker_id and assignment.streamlet_id not in stream.streamlets:
                stream.streamlets[assignment.streamlet_id] = Streamlet(
                    assignment.streamlet_id,
                    entries=config.entries,
                    group_segments=config.group_segments,
                    broker_epoch=assignment.broker_epoch,
                    first_group_id=max(1, assignment.first_group_id),
                    arena=self._arena,
                )

    def drop(self, stream_id: int) -> None:
        """Free everything of a stream; one that is not here is dropped already."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            for streamlet in stream.streamlets.values():
                streamlet.drop()
