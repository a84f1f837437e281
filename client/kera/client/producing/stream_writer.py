"""What a producer keeps per stream: open chunks, and a lane per streamlet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from kera.client.producing.accumulator import Accumulator
from kera.client.producing.encoding import too_large
from kera.client.producing.lane import Lane, LaneIdentity
from kera.client.producing.partitioner import primary_keys, split_by_streamlet
from kera.client.producing.routes import Route
from kera.client.types import StreamDescription, streamlet_number
from kera.core.errors import KeraError, SchemaMismatch, StreamletOutOfRange, UnknownStream

if TYPE_CHECKING:
    from kera.client.producing.producer import Producer

BATCH_OVERHEAD_BYTES = 1024
"""Chunk header, and what Arrow adds to a batch of one row; estimated from above."""


class ProducerIdentity(NamedTuple):
    """What the coordinator has given to a producer."""

    producer_id: int
    first_epoch: int
    last_epoch: int
    """Of the epochs that are this instance's."""


class StreamWriter:
    """What the producer keeps per stream."""

    def __init__(self, producer: Producer, stream: StreamDescription, identity: ProducerIdentity) -> None:
        self._producer = producer
        self.stream = stream
        self.streamlet_count = stream.config.streamlets
        self.sticky_streamlet = identity.producer_id % self.streamlet_count
        """Where records without keys go; moves on with each chunk."""
        self.lanes = [
            Lane(
                LaneIdentity(
                    stream.name,
                    stream.stream_id,
                    streamlet,
                    identity.producer_id,
                    stream.codec,
                    stream.typed,
                ),
                identity.first_epoch,
                last_epoch=identity.last_epoch,
                route=Route(self),
            )
            for streamlet in range(self.streamlet_count)
        ]
        self.open_chunks: dict[int, Accumulator] = {}
        """By streamlet: the chunk that takes its next record."""
        self.deleted: UnknownStream | None = None
        """Says that the stream is not there any more."""

    def open_chunk(self, streamlet: int, record_bytes: int) -> Accumulator:
        """The open chunk of a streamlet. Raises `StreamletOutOfRange`, `RecordTooLarge`, `SchemaMismatch`."""
        accumulator = self.open_chunks.get(streamlet)
        if accumulator is None or record_bytes > self._producer.settings.chunk_bytes_max:
            self._check(streamlet, record_bytes)
        if accumulator is None:
            producer = self._producer
            accumulator = Accumulator(self.stream.name, streamlet, producer.loop.time())
            self.open_chunks[streamlet] = accumulator
            producer.routes.sender(self.lanes[streamlet]).chunk_opened()
        return accumulator

    def _check(self, streamlet: int, record_bytes: int) -> None:
        if self.stream.typed:
            raise SchemaMismatch(
                f"stream {self.stream.name!r} has a schema of its own; use send_batch", stream=self.stream.name
            )
        self.check_streamlet(streamlet)
        limit = self.stream.segment_bytes_min
        if limit and record_bytes + BATCH_OVERHEAD_BYTES > limit:
            raise too_large(record_bytes, limit, self.stream)

    def check_streamlet(self, streamlet: int) -> None:
        """Raises `StreamletOutOfRange`."""
        if not 0 <= streamlet < self.streamlet_count:
            raise StreamletOutOfRange(
                f"stream {self.stream.name!r} has streamlets 0 to {self.streamlet_count - 1}, not {streamlet}",
                stream=self.stream.name,
                streamlet_id=streamlet,
                streamlets=self.streamlet_count,
            )

    def checked_streamlet(self, streamlet: object) -> int:
        """`streamlet` as a number of one. Raises `InvalidArgument`, `StreamletOutOfRange`."""
        number = streamlet_number(streamlet)
        self.check_streamlet(number)
        return number

    def partition(self, batch: pa.RecordBatch, streamlet: int | None) -> list[tuple[int, pa.RecordBatch]]:
        """`batch` by streamlet, all of it in the one that is given."""
        if streamlet is not None:
            return [(streamlet, batch)]
        keyless = self.sticky_streamlet
        self._move_on()
        if self.streamlet_count == 1:
            return [(0, batch)]
        if self.stream.typed:
            if self.stream.key_column is None:
                return [(keyless, batch)]
            keys = batch.column(self.stream.key_column)
        else:
            column = batch.column("keys")
            if column.null_count == batch.num_rows:
                return [(keyless, batch)]
            keys = primary_keys(column)
        return split_by_streamlet(batch, keys, self.streamlet_count, keyless)

    def forget(self, accumulator: Accumulator) -> None:
        """The open chunk is being closed; the next record opens another."""
        del self.open_chunks[accumulator.streamlet]
        if accumulator.streamlet == self.sticky_streamlet:
            self._move_on()

    def _move_on(self) -> None:
        self._producer.filling.pop(self.stream.name, None)
        self.sticky_streamlet = (self.sticky_streamlet + 1) % self.streamlet_count

    def close_open_chunk(self, streamlet: int) -> None:
        """Send what has gathered for a streamlet."""
        accumulator = self.open_chunks.get(streamlet)
        if accumulator is not None:
            self._producer.close_chunk(self, accumulator)

    def close_open_chunks(self) -> None:
        """Send what has gathered."""
        for accumulator in list(self.open_chunks.values()):
            self._producer.close_chunk(self, accumulator)

    def abandon(self, error: KeraError) -> None:
        """Send nothing more; what has gathered fails with `error`."""
        for accumulator in self.open_chunks.values():
            accumulator.fail(error)
        self.open_chunks.clear()
        self._producer.filling.pop(self.stream.name, None)
