"""Appending chunk by chunk under a name that the caller chooses: for writers that must be able to repeat themselves.

A `Producer` asks the coordinator for an identity, and forgets it when it ends. The caller of an `Appender` provides the
identity: it derives producer id and epoch from the work (a query, a job), and counts the chunks. So a process that
repeats the work appends under the same name, and the broker says for each chunk whether it is stored already:

* the broker takes chunk `sequence` only when it has stored exactly the chunks before it, of this producer, epoch and
  streamlet;
* a stored chunk with this sequence may be the caller's own (sent before, and the answer was lost) or that of another
  writer under the same name. The broker compares payloads: when they differ, the append raises `ProducerFenced`, unless
  the caller `compares` the stored chunk on its own. Rows without a timestamp get the current time, so a repeat of the
  same rows only has the same payload if they have timestamps;
* a higher epoch shuts out the lower ones of its producer (`ProducerFenced`), streamlet by streamlet, from its first
  chunk on.

This is compare-and-append: an append succeeds only if the caller knows how many chunks there were before it.

An appender repeats an attempt with unknown outcome, with the same sequence, so that each call ends with an answer or an
error. `OutOfSequence` is an error, too: chunks that the caller believes to be stored are not. The caller makes one call
at a time per streamlet, chooses ids that the coordinator gives to no producer (`PRODUCER_IDS`), and remembers them.
"""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import pyarrow as pa

from kera.client import arguments
from kera.client.cluster.asking import broker_failed, same_stream, submit_to_broker
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.retry import RetryTime, jittered
from kera.client.producing.encoding.conforming import Conformer
from kera.client.producing.encoding.epoch_cuts import rows_of_first_epoch
from kera.client.producing.encoding.partitioner import CRC32C, PARTITIONERS, partition_by_key, primary_keys
from kera.client.producing.encoding.payloads import Payload, check_rows, payloads
from kera.client.types import StreamDescription
from kera.core.base.ids import PRODUCER_IDS, EntryId, Position
from kera.core.errors import (
    InternalError,
    InvalidArgument,
    KeraError,
    OutOfSequence,
    ProducerFenced,
    StreamletOutOfRange,
)
from kera.core.format.chunk import PAYLOAD_BYTES_MAX, EncodedChunk, encode_chunk
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2


class AppendResult(NamedTuple):
    """The result of a call of `Appender.append`."""

    record_count: int
    """Number of rows in the chunk: it has the first ones of those given."""
    duplicate: bool
    """Whether a chunk with this sequence was stored before: that one counts, and `entry` and `position` are its own."""
    entry: EntryId
    position: Position | None
    """None for a duplicate of a chunk that is no longer in the broker's memory, or has been removed since."""
    same: bool | None = None
    """For a duplicate: whether the stored chunk has the payload of this one. None: the broker does not know, because it
    remembers only the payloads of the last 256 chunks besides those of the chunks in its memory."""


class Appender:
    """Appends to one stream with one producer id and epoch. Made by `Client.appender`."""

    def __init__(  # noqa: PLR0913 - what an appender is made of
        self,
        cluster: Cluster,
        stream: StreamDescription,
        *,
        producer_id: int,
        producer_epoch: int,
        chunk_bytes_max: int,
        lean: bool = False,
        cut_at_epochs: bool = True,
        partitioner: str = CRC32C.name,
        compares: bool = False,
    ) -> None:
        """`lean`: write version 2 of the format, where the schema permits it. `cut_at_epochs`: end a chunk before the
        first row of a later epoch, if the stream has epochs. `partitioner`: how `split` places keys. `compares`: the
        caller compares the rows when a chunk with this sequence is stored already, so other rows are not an error.

        Raises `InvalidArgument` for ids that only the coordinator gives out, epochs of more than 32 bits, and an
        unknown partitioner.
        """
        producer_id = arguments.whole("producer_id", producer_id, 0, arguments.UINT64_MAX)
        arguments.whole("producer_epoch", producer_epoch, 0, arguments.UINT64_MAX)
        arguments.whole("chunk_bytes_max", chunk_bytes_max, 1, PAYLOAD_BYTES_MAX)
        if producer_id not in PRODUCER_IDS:
            raise InvalidArgument(f"producer id {producer_id} is not one for appenders", producer_id=producer_id)
        if not 0 < producer_epoch < 1 << 32:
            raise InvalidArgument(f"epoch {producer_epoch} is not in 1 … 2^32-1", producer_epoch=producer_epoch)
        self.stream = stream
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        limit = stream.segment_bytes_min
        self.chunk_bytes_max = min(chunk_bytes_max, limit) if limit else chunk_bytes_max
        """No chunk of several records is larger."""
        if partitioner not in PARTITIONERS:
            raise arguments.wrong("partitioner", partitioner, f"one of {', '.join(PARTITIONERS)}")
        self._partitioner = PARTITIONERS[partitioner]
        self._lean = lean
        self._cuts = cut_at_epochs
        self._conformer = Conformer()
        self._compares = compares
        self._cluster = cluster

    def at_epoch(self, producer_epoch: int) -> Appender:
        """Return an appender for the same stream and producer, with another epoch. Raises `InvalidArgument`."""
        return Appender(
            self._cluster,
            self.stream,
            producer_id=self.producer_id,
            producer_epoch=producer_epoch,
            chunk_bytes_max=self.chunk_bytes_max,
            lean=self._lean,
            cut_at_epochs=self._cuts,
            partitioner=self._partitioner.name,
            compares=self._compares,
        )

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return `batch` with the columns of the stream; see `kera.client.producing.encoding.conforming.conform`.

        Raises `SchemaMismatch`, and `RecordTooLarge` for a row that fits into no segment.
        """
        rows = self._conformer.conform(batch, self.stream, _now_us())
        check_rows(rows, self.stream, lean=self._lean)
        return rows

    def split(self, rows: pa.RecordBatch, keyless: int) -> list[tuple[int, pa.RecordBatch]]:
        """Split conforming `rows` by streamlet, as a producer does; rows without a key go to streamlet `keyless`."""
        stream, count = self.stream, self.stream.config.streamlets
        if not rows.num_rows:
            return []
        if not stream.typed:
            keys = rows.column("keys")
            if keys.null_count == rows.num_rows:
                return [(keyless, rows)]
            return partition_by_key(rows, primary_keys(keys), count, keyless, self._partitioner).parts()
        if stream.key_column is None:
            return [(keyless, rows)]
        return partition_by_key(rows, rows.column(stream.key_column), count, keyless, self._partitioner).parts()

    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
        """Append the first of the conforming `rows`, as many as one chunk takes, as chunk number `sequence`.

        All appenders with the same setting of `lean` cut the same rows in the same way, each time. Raises
        `InvalidArgument` when there are no rows, `OutOfSequence`, `ProducerFenced` when a higher epoch has written or
        another chunk is stored with this sequence, `UnknownStream` when the stream has been deleted since,
        `RecordTooLarge`, `StreamletOutOfRange`, and `Uncertain` or the broker's last error when no attempt succeeds
        within ``retry_timeout_ms``.
        """
        if not 0 <= streamlet_id < self.stream.config.streamlets:
            raise StreamletOutOfRange(
                f"stream {self.stream.name!r} has streamlets 0 to {self.stream.config.streamlets - 1},"
                f" not {streamlet_id}",
                stream=self.stream.name,
                streamlet_id=streamlet_id,
                streamlets=self.stream.config.streamlets,
            )
        if not rows.num_rows:
            raise InvalidArgument(
                f"chunk {sequence} would have no rows; append some, or nothing under this number",
                stream=self.stream.name,
                streamlet_id=streamlet_id,
            )
        if self._cuts:
            rows = rows.slice(0, rows_of_first_epoch(rows, self.stream))
        now_us = _now_us()
        payload = next(payloads(rows, self.stream, self.chunk_bytes_max, now_us, lean=self._lean))
        chunk = self._encode(streamlet_id, payload, sequence, now_us)
        patience = RetryTime(self._cluster.settings)
        while True:
            try:
                appended = self._appended(streamlet_id, payload, await self._send(streamlet_id, chunk))
            except KeraError as error:
                # Waiting would not bring back the missing chunks: only the caller could send them.
                final = isinstance(error, OutOfSequence)
                pause_s = None if final else patience.failed(error, asyncio.get_running_loop().time())
                if pause_s is None:
                    raise
            else:
                if appended.same is False and not self._compares:
                    raise self._other_rows(streamlet_id, sequence)
                return appended
            await asyncio.sleep(jittered(pause_s))

    def _encode(self, streamlet_id: int, payload: Payload, sequence: int, now_us: int) -> EncodedChunk:
        stream = self.stream
        return encode_chunk(
            payload.payload,
            record_count=payload.record_count,
            stream_id=stream.stream_id,
            streamlet_id=streamlet_id,
            schema_id=payload.schema_id,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            sequence=sequence,
            created_us=now_us,
            min_timestamp_us=payload.min_timestamp_us,
            max_timestamp_us=payload.max_timestamp_us,
            codec=stream.codec,
            typed=stream.typed,
            version=payload.version,
        )

    async def _send(self, streamlet_id: int, chunk: EncodedChunk) -> broker_pb2.ChunkStatus:
        """Make one attempt, at the last known owner of the streamlet."""
        stream = same_stream(await self._cluster.stream_or_last_seen(self.stream.name), self.stream.stream_id)
        broker_id = stream.assignments[streamlet_id].broker_id
        request = broker_pb2.MultiWriteChunksRequest(chunk_count=1)
        reply = await submit_to_broker(self._cluster, stream, broker_id, api.MULTI_WRITE_CHUNKS, request, chunk)
        statuses = reply.message.statuses
        if len(statuses) != 1:
            raise InternalError(f"broker {broker_id} answered {len(statuses)} chunks of 1", broker_id=broker_id)
        if statuses[0].HasField("error"):
            raise broker_failed(self._cluster, stream.name, error_from_message(statuses[0].error))
        return statuses[0]

    def _appended(self, streamlet_id: int, payload: Payload, status: broker_pb2.ChunkStatus) -> AppendResult:
        position = Position(status.group_id, status.segment_id, status.position) if status.group_id else None
        entry = EntryId(self.stream.stream_id, streamlet_id, status.entry)
        same = status.same if status.HasField("same") else None
        return AppendResult(payload.record_count, status.duplicate, entry, position, same)

    def _other_rows(self, streamlet_id: int, sequence: int) -> ProducerFenced:
        return ProducerFenced(
            f"chunk {sequence} of producer id {self.producer_id} in streamlet {streamlet_id} of stream"
            f" {self.stream.name!r} has other rows than these: another writer uses the id, or the rows have changed;"
            " these are not stored",
            stream=self.stream.name,
            streamlet_id=streamlet_id,
            producer_id=self.producer_id,
            sequence=sequence,
        )


def _now_us() -> int:
    return time.time_ns() // 1000
