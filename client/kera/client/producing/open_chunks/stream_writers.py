"""The streams that a producer writes to, each with a `StreamWriter`; and the producer's identity."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from kera.client import arguments
from kera.client.cluster.cluster import Cluster
from kera.client.producing.lanes.lane import LAST_EPOCH, Lane
from kera.client.producing.lanes.stream_lanes import ProducerIdentity
from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.open_chunks.hooks import ChunkHooks
from kera.client.producing.open_chunks.stream_writer import StreamWriter
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import Due, FillTime, all_of
from kera.client.producing.sending.hooks import Plugins
from kera.client.producing.sending.routes import ProducerLimits, Routes
from kera.client.settings import ProducerSettings
from kera.core.errors import ClosedError, KeraError, Unavailable, UnknownStream
from kera.core.rpc import api
from kera.v1 import coordinator_pb2


class StreamWriters:
    """The writers of all streams that a producer uses, and their common identity. Belongs to one `Producer`."""

    def __init__(
        self,
        cluster: Cluster,
        settings: ProducerSettings,
        buffer: Buffer,
        *,
        fail: Callable[[KeraError], None],
        limits: ProducerLimits,
        plugins: Plugins | None = None,
        hooks: ChunkHooks | None = None,
    ) -> None:
        """`fail`: fails the producer as a whole, see `Routes`. `hooks`: None if nothing is plugged in."""
        self.by_name: dict[str, StreamWriter] = {}
        self.filling: dict[str, Accumulator] = {}
        """By stream: the open chunk that takes its next record, if that record is only a value."""
        self.open_chunks: dict[str, tuple[int, dict[int, Accumulator]]] = {}
        """By stream: its number of streamlets, and the open chunks of its writer."""
        self.routes = Routes(
            cluster, settings, buffer, close_due_chunks=self.close_due_chunks, fail=fail, limits=limits, plugins=plugins
        )
        self.identity: ProducerIdentity | None = None
        """Given by the coordinator when the first stream is looked up."""
        self._cluster = cluster
        self._settings = settings
        self._buffer = buffer
        self._epochs = limits.epochs
        self._hooks = ChunkHooks() if hooks is None else hooks
        self._preparing = asyncio.Lock()

    async def writer(self, name: str) -> StreamWriter:
        """Return the writer of a stream; looks a deleted stream up again. Raises `UnknownStream`."""
        arguments.text("stream", name, "the name of a stream")
        writer = self.by_name.get(name)
        if writer is not None and writer.deleted is None and not self._buffer.is_inherited:
            return writer
        if self._buffer.failure is not None:
            raise self._buffer.failure
        async with self._preparing:
            writer = self.by_name.get(name)
            if writer is None or writer.deleted is not None:
                stream = await self._cluster.stream(name)
                if self.identity is None:
                    self.identity = await self._init()
                if writer is not None:
                    writer.close_open_chunks()  # they fail, like the chunks before them
                writer = self.by_name[name] = StreamWriter(
                    stream, self.identity, self._settings, self._buffer, self.routes, self.filling, self._hooks
                )
                self.open_chunks[name] = writer.streamlet_count, writer.open_chunks
            return writer

    async def _init(self) -> ProducerIdentity:
        name = self._settings.name
        answer = await self._cluster.ask(api.INIT_PRODUCER, coordinator_pb2.InitProducerRequest(name=name))
        last_epoch = answer.producer_epoch + self._epochs - 1 if name else LAST_EPOCH
        return ProducerIdentity(answer.producer_id, answer.producer_epoch, last_epoch)

    async def look_again(self, name: str) -> None:
        """Look up a stream again after a broker has called it unknown."""
        if (writer := self.by_name.get(name)) is not None:
            with suppress(Unavailable):
                await self.routes.refresh(writer.lanes)

    def not_ready(self, stream: str) -> KeraError:
        """Return the error that explains why a stream takes no records now."""
        if self._buffer.closed:
            return ClosedError("the producer is closed")
        if self._buffer.failure is not None:
            return self._buffer.failure
        return UnknownStream(f"stream {stream!r} is not prepared; await producer.prepare({stream!r})", stream=stream)

    def close_due_chunks(self, lanes: set[Lane], fill_time: FillTime, *, idle: bool) -> Due:
        """Close the due chunks and gatherings of all streams, see `StreamWriter.close_due_chunks`."""
        return all_of([writer.close_due_chunks(lanes, fill_time, idle=idle) for writer in self.by_name.values()])

    def close_open_chunks(self) -> None:
        """Close all open chunks and gatherings."""
        for writer in self.by_name.values():
            writer.close_open_chunks()

    def open_records(self) -> Counter[str]:
        """Return the number of records in open chunks and gatherings, by stream."""
        return Counter({name: writer.open_records() for name, writer in self.by_name.items()})

    def fail(self, error: KeraError) -> None:
        """Give up all chunks that are not in flight, and all open ones."""
        for writer in self.by_name.values():
            writer.abandon(error)
            self.routes.abandon(writer.lanes, error)

    def close(self, error: KeraError) -> None:
        """Fail all records in open chunks and gatherings with `error`."""
        for writer in self.by_name.values():
            writer.abandon(error)
