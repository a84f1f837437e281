"""Reads one range of an entry to its end and no further, from all brokers that have parts of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from kera.client.chunk_batch import ChunkBatch
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.delivering.chunks import Chunks
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.settings import ConsumerSettings
from kera.client.types import StreamDescription


async def read_range(
    cluster: Cluster,
    settings: ConsumerSettings,
    stream: StreamDescription,
    wanted: Wanted,
    *,
    first_record: int | None = None,
) -> AsyncGenerator[ChunkBatch, None]:
    """Yield the chunks of `wanted`, which has an end.

    `first_record`: leave out the records before this ordinal in the first chunk; None: deliver all. Raises the errors
    of `Consumer.batches`, and `InvalidArgument` for an end beyond the end of the entry.
    """
    fetcher, chunks = Fetcher(cluster, settings, complete=True), Chunks(cluster, settings)
    chunks.streams[stream.stream_id] = stream
    if first_record is not None:
        chunks.begin(wanted.entry, first_record)
    fetcher.add(stream, wanted)
    try:
        while (fetched := await fetcher.fetched()) is not None:
            chunks.open(fetched)
            while (batch := await chunks.following(copied=False)) is not None:
                yield batch
    finally:
        await fetcher.close()
