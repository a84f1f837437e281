"""A cluster with one stream that exists only in memory, for the connector's tests without daemons."""

# ruff: noqa: ARG002  # the real client decides on the parameters

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple, Self

import pyarrow as pa

from kera.client import ClientSettings
from kera.core.chunk import ChunkHeader
from kera.core.errors import UnknownStream
from kera.core.ids import EntryId, Position

SCHEMA = pa.schema([("n", pa.int64())])
CHUNK_BYTES = 64


class Bounds(NamedTuple):
    start: Position
    end: Position
    first_record: int
    next_record: int


class Chunk(NamedTuple):
    batch: pa.RecordBatch
    header: ChunkHeader
    start: Position
    next: Position
    entry: EntryId


class FakeClient:
    """Stands for `kera.client.Client`; `chunks` has the record counts of the chunks of each entry."""

    def __init__(self, chunks: dict[int, list[list[int]]]) -> None:
        self.stream_id = 7
        self.chunks = chunks
        self.closed = False
        self.read_ranges_open = 0
        self.connected = 0

    async def connect(self, bootstrap: str, settings: ClientSettings) -> Self:
        self.connected += 1
        return self

    @property
    def admin(self) -> Self:
        return self

    async def describe_stream(self, stream: str) -> Any:
        if stream != "numbers":
            raise UnknownStream(f"no stream is called {stream!r}", stream=stream)
        return SimpleNamespace(name=stream, stream_id=self.stream_id, schema=SCHEMA, typed=True)

    describe = describe_stream

    async def bounds(self, stream: str) -> dict[int, list[Bounds]]:
        return {
            streamlet: [
                Bounds(Position(1, 1, 0), Position(1, 1, len(counts) * CHUNK_BYTES), 0, sum(counts))
                for counts in entries
            ]
            for streamlet, entries in self.chunks.items()
        }

    async def read_range(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position
    ) -> AsyncIterator[Chunk]:
        self.read_ranges_open += 1
        try:
            counts = self.chunks[streamlet_id][entry]
            for index in range(start.offset // CHUNK_BYTES, end.offset // CHUNK_BYTES):
                first = sum(counts[:index])
                batch = pa.RecordBatch.from_arrays([pa.array(range(first, first + counts[index]))], schema=SCHEMA)
                fields: dict[str, Any] = dict.fromkeys(ChunkHeader._fields, 0)
                fields |= {"first_record": first, "record_count": counts[index], "payload_bytes": 8 * counts[index]}
                at, after = (Position(1, 1, number * CHUNK_BYTES) for number in (index, index + 1))
                yield Chunk(batch, ChunkHeader(**fields), at, after, EntryId(self.stream_id, streamlet_id, entry))
        finally:
            self.read_ranges_open -= 1

    async def close(self) -> None:
        self.closed = True
