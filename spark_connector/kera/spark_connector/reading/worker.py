"""The executors' side: the records of one partition as Arrow batches.

Chunks arrive as the producers made them, or joined by `kera.client` if they are very small. Small batches are joined
once more, because each batch costs Spark some 100 µs: with batches of 100 records a noop sink takes 2.3 M records/s,
with 1,000 3.1, with 10,000 and more 5.5 (local[2], 100-byte values). Large batches pass through without a copy. That is
why the bounds are below the 10,000 records at which Spark is fastest.

`kera.client` follows the chunks of a partition over all brokers that have some of them, even if they have moved since
planning; it waits for the chunks of a crashed broker while they are being recovered. If a broker is on the executor's
host, the chunks lie in the broker's memory (``sharedMemory``), and Spark copies from there.

Promises:

* a partition yields exactly the records that it was planned with, or an error; with ``failOnDataLoss=false``, the
  remaining records and a warning. It never yields fewer records silently;
* if a broker reuses the memory of chunks before Spark gets them, they are read again as copies. If it does so while
  Spark takes them, the error `MemoryReused` fails the task, and Spark runs it again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kera.core.base.ids import Position
from kera.core.errors import CorruptChunk, DataLost, Unavailable
from kera.spark_connector.columns import ChunkShaper, Shaper
from kera.spark_connector.connection import Connection
from kera.spark_connector.options.reading import ReadOptions, SharedMemory
from kera.spark_connector.planning import Piece
from kera.spark_connector.portal import shared
from kera.spark_connector.reading.chunks import Losses, chunks
from kera.spark_connector.reading.partition import KeraPartition

if TYPE_CHECKING:
    from kera.client import ChunkBatch, Client

BATCH_RECORDS = 8_192
"""Chunks are joined until they have this many records …"""
BATCH_BYTES = 1 << 20
"""… or this many bytes."""
BATCHES_AHEAD = 2
"""Batches fetched before Spark asks for them."""
WAY_OUT = "a query can end before it (endingOffsets) or begin after it (startingOffsets)"
"""How a query avoids a chunk that cannot be read; the columnar engine's message is the same."""

log = logging.getLogger(__name__)


class MemoryReused(Unavailable):
    """A broker's memory was reused while Spark took records from it. Read them again."""

    code = "memory_reused"


def read_partition(options: ReadOptions, partition: InputPartition, wanted: StructType) -> Iterator[pa.RecordBatch]:
    """Yield the records of `partition`, with the columns `wanted`."""
    if not isinstance(partition, KeraPartition):
        return  # for a batch query without partitions Spark makes an empty one
    piece, losses = partition.piece, Losses()
    connection = partition.connection or options.connection
    records = chunk_count = pushed_count = 0
    shape = _shaper(options, piece, wanted)
    left, shared_memory = piece, options.shared_memory
    while True:
        again: Position | None = None
        for gathered in _fetched(connection, options, left, shared_memory, losses):
            batches = _shaped(shape, gathered)
            if batches is None:
                again = gathered[0].start
                break
            chunk_count += sum(chunk.chunks for chunk in gathered)
            pushed_count += sum(chunk.pushed for chunk in gathered)
            records += sum(chunk.batch.num_rows for chunk in gathered)
            while batches:
                yield batches.pop(0)
            _require_intact(gathered, piece)
            del gathered, batches  # releases the broker's memory before waiting for more chunks
        if again is None:
            break
        log.info("%s: pushed chunks are no longer in the broker's memory; reading them again", _named(piece))
        left, shared_memory = replace(left, start=again), "never"
    _require_all(piece, records, losses)
    log.debug("%s: %d chunks, %d of them in the broker's memory", _named(piece), chunk_count, pushed_count)


def _fetched(
    connection: Connection, options: ReadOptions, piece: Piece, shared_memory: SharedMemory, losses: Losses
) -> Iterator[list[ChunkBatch]]:
    settings: dict[str, Any] = {"shared_memory": shared_memory}
    if _rows_are_chunks(options, piece):
        settings["joined_bytes_max"] = 0
    with shared(connection) as portal:
        yield from portal.iterate(lambda client: _gathered(client, piece, settings, losses), BATCHES_AHEAD)


def _rows_are_chunks(options: ReadOptions, piece: Piece) -> bool:
    return piece.typed and options.on_mismatch == "bytes"


def _shaper(
    options: ReadOptions, piece: Piece, wanted: StructType
) -> Callable[[list[ChunkBatch]], Iterator[pa.RecordBatch]]:
    """Return a function that turns consecutive chunks into Spark's batches."""
    if _rows_are_chunks(options, piece):
        whole = ChunkShaper(wanted, stream=piece.stream, epoch=piece.epoch)
        return lambda gathered: (whole.shape(chunk.batch, chunk.header) for chunk in gathered)
    shaper = Shaper(wanted, stream=piece.stream, typed=piece.typed, epoch=piece.epoch)
    return lambda gathered: shaper.shape([chunk.batch for chunk in gathered], gathered[0].header)


def _shaped(
    shape: Callable[[list[ChunkBatch]], Iterator[pa.RecordBatch]], gathered: list[ChunkBatch]
) -> list[pa.RecordBatch] | None:
    """Return the chunks as batches for Spark; None: their broker's memory no longer has them."""
    try:
        batches = list(shape(gathered))
    except Exception:
        if _intact(gathered):
            raise
        return None  # the error came from other bytes than the chunks
    return batches if _intact(gathered) else None


def _intact(gathered: list[ChunkBatch]) -> bool:
    return all(chunk.intact for chunk in gathered)


def _require_intact(gathered: list[ChunkBatch], piece: Piece) -> None:
    if not _intact(gathered):
        raise MemoryReused(
            f"{_named(piece)}: its broker is gone, and its memory was used again while Spark took records from it; the"
            " task has to be run again",
            stream=piece.stream,
            streamlet=piece.entry.streamlet_id,
            entry=piece.entry.entry,
        )


def _require_all(piece: Piece, records: int, losses: Losses) -> None:
    if records == piece.records:
        return
    what = f"{_named(piece)} gave {records} of the {piece.records} records between {tuple(piece.start)} and"
    what = f"{what} {tuple(piece.end)}"
    if losses.reasons and records < piece.records:
        log.warning("failOnDataLoss=false: %s; %s", what, "; ".join(losses.reasons))
        return
    raise DataLost(
        what,
        stream=piece.stream,
        streamlet=piece.entry.streamlet_id,
        entry=piece.entry.entry,
        records=records,
        records_planned=piece.records,
    )


def _named(piece: Piece) -> str:
    return f"stream '{piece.stream}', streamlet {piece.entry.streamlet_id}, entry {piece.entry.entry}"


async def _gathered(
    client: Client, piece: Piece, settings: Mapping[str, Any], losses: Losses
) -> AsyncGenerator[list[ChunkBatch], None]:
    """Yield the partition's chunks in lists, each of which makes a batch of a good size."""
    from kera.client import ConsumerSettings

    gathered: list[ChunkBatch] = []
    records = length_bytes = 0
    async with contextlib.aclosing(chunks(client, piece, ConsumerSettings.load(**settings), losses)) as source:
        async for fetched in _with_sparks_way_out(source):
            chunk = _from_first_record(_up_to_stop(fetched, piece), piece)
            if gathered and chunk.header.first_record != gathered[-1].header.first_record + gathered[-1].batch.num_rows:
                yield gathered  # records are missing in between, and the ordinals of a batch must be consecutive
                gathered = []
                records = length_bytes = 0
            gathered.append(chunk)
            records += chunk.header.record_count
            length_bytes += chunk.header.payload_bytes
            if records >= BATCH_RECORDS or length_bytes >= BATCH_BYTES:
                yield gathered
                gathered = []
                records = length_bytes = 0
    if gathered:
        yield gathered


async def _with_sparks_way_out(source: AsyncGenerator[ChunkBatch, None]) -> AsyncGenerator[ChunkBatch, None]:
    """Yield from `source`. An error about a chunk then names the options of a query instead of a consumer's."""
    try:
        async for fetched in source:
            yield fetched
    except CorruptChunk as error:
        text = error.message.removesuffix('corrupt_chunks="skip" continues after it') + WAY_OUT
        raise CorruptChunk(text, **error.attributes) from error


def _from_first_record(chunk: ChunkBatch, piece: Piece) -> ChunkBatch:
    """Return `chunk` without the records before the piece's first one, if the piece begins with this chunk.

    An earlier micro-batch has read those records.
    """
    header = chunk.header
    given = min(piece.first_record - header.first_record, header.record_count)
    if given <= 0 or chunk.start != piece.start:
        return chunk
    return chunk._replace(
        batch=chunk.batch.slice(given),
        header=header._replace(first_record=header.first_record + given, record_count=header.record_count - given),
    )


def _up_to_stop(chunk: ChunkBatch, piece: Piece) -> ChunkBatch:
    """Return `chunk` without the records of the next micro-batch, if the piece ends within it."""
    if piece.stop is None or chunk.next <= piece.stop.position:
        return chunk
    count = min(max(piece.stop.record - chunk.header.first_record, 0), chunk.header.record_count)
    return chunk._replace(batch=chunk.batch.slice(0, count), header=chunk.header._replace(record_count=count))
