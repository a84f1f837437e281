"""A cluster in memory, for the connector's tests without daemons.

Every chunk has `CHUNK_BYTES` bytes, and an entry has one segment.
"""

from __future__ import annotations

# ruff: noqa: ARG002  # the real client decides on the parameters
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import pyarrow as pa

from kera.client import (
    Assignment,
    BrokerDescription,
    ChunkPlace,
    ChunkQuery,
    ClientSettings,
    ConsumerSettings,
    EntryBounds,
    SegmentBounds,
    StreamConfig,
    StreamDescription,
)
from kera.core.base.ids import EntryId, Position
from kera.core.errors import DataLost, KeraError, Unavailable, UnknownStream
from kera.core.format.chunk import ChunkHeader
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.tracing import OFF, Tracing

SCHEMA = pa.schema([("n", pa.int64())])
CHUNK_BYTES = 64
BROKER = BrokerDescription(
    broker_id=1,
    node_id="here",
    grpc_address="10.0.0.1:7500",
    frames_address="broker-1.invalid:7501",
    frames_unix_path="/run/frames",
    segment_bytes=1 << 20,
    arena_bytes=1 << 24,
    alive=True,
    push_unix_path="/run/push",
)


class Chunk(NamedTuple):
    batch: pa.RecordBatch
    header: ChunkHeader
    start: Position
    next: Position
    entry: EntryId
    memory: FakeClient | None
    """The broker's memory, if the chunk lies there."""
    chunks: int = 1

    @property
    def pushed(self) -> bool:
        return self.memory is not None

    @property
    def intact(self) -> bool:
        return self.memory is None or (self.memory.intact and self.start not in self.memory.reused)


def at(chunk: int) -> Position:
    """The position at which the chunk with this number starts."""
    return Position(1, 1, chunk * CHUNK_BYTES)


@dataclass
class FakeStream:
    """`chunks` has the record counts of each entry's chunks; the first `removed` chunks are gone."""

    stream_id: int
    chunks: dict[int, list[list[int]]]
    typed: bool = True
    removed: dict[int, int] = field(default_factory=dict)
    """Removed chunks, per streamlet."""
    broker: BrokerDescription = BROKER

    def description(self, name: str) -> StreamDescription:
        return StreamDescription(
            stream_id=self.stream_id,
            name=name,
            config=StreamConfig(
                streamlets=len(self.chunks),
                brokers=1,
                entries=max(map(len, self.chunks.values())),
                group_segments=16,
                durability="leader",
                codec="none",
            ),
            schema=SCHEMA if self.typed else DEFAULT_SCHEMA,
            schema_id=1,
            typed=self.typed,
            key_column=None,
            timestamp_column=None,
            assignments={streamlet: Assignment(self.broker.broker_id, 1, 1) for streamlet in self.chunks},
            created_us=0,
            brokers={self.broker.broker_id: self.broker},
        )

    def bounds(self) -> dict[int, list[EntryBounds]]:
        return {
            streamlet: [
                EntryBounds(
                    at(gone),
                    at(len(counts)),
                    sum(counts[:gone]),
                    sum(counts),
                    (len(counts) - gone) * CHUNK_BYTES,
                )
                for gone in [self.removed.get(streamlet, 0)]
                for counts in entries
            ]
            for streamlet, entries in self.chunks.items()
        }

    def require(self, streamlet: int, position: Position) -> None:
        gone = at(self.removed.get(streamlet, 0))
        if position < gone:
            raise DataLost("it was removed", lost_from=list(position), available_from=list(gone))

    def locate(self, query: ChunkQuery) -> ChunkPlace:
        self.require(query.streamlet_id, query.start)
        counts = self.chunks[query.streamlet_id][query.entry]
        first = query.start.offset // CHUNK_BYTES
        last = len(counts) if query.end is None else query.end.offset // CHUNK_BYTES
        place = first
        if query.timestamp_us is not None:  # a record's time is its number
            while place < last and sum(counts[: place + 1]) <= query.timestamp_us:
                place += 1
        else:
            while place < last and (
                place == first
                or (
                    sum(counts[first : place + 1]) <= query.records_max
                    if query.records_max is not None
                    else (place + 1 - first) * CHUNK_BYTES <= (query.bytes_max or 0)
                )
            ):
                place += 1
        return ChunkPlace(at(place), sum(counts[:place]), (place - first) * CHUNK_BYTES)


class FakeLatency:
    """Records a query's reports about its batches."""

    def __init__(self) -> None:
        self.watched: set[int] = set()
        """Streams with a latency constraint."""
        self.groups: list[str] = []
        self.done_batches: list[tuple[list[tuple[str, EntryId, int]], float]] = []
        """The contents and the duration of each batch."""
        self.told: list[list[str]] = []

    def batch_reports(self, consumer_group: str) -> Self:
        self.groups.append(consumer_group)
        return self

    def watches(self, stream_id: int) -> bool:
        return stream_id in self.watched

    async def done(self, taken: Sequence[Any], planned_s: float, done_s: float) -> None:
        self.done_batches.append(([tuple(one) for one in taken], done_s - planned_s))

    async def tell(self, streams: Sequence[str]) -> None:
        self.told.append(list(streams))


class FakeClient:
    """Stands in for `kera.client.Client`; has the stream "numbers"."""

    def __init__(self, chunks: dict[int, list[list[int]]]) -> None:
        self.streams = {"numbers": FakeStream(7, chunks)}
        self.closed = False
        self.tracing: Tracing = OFF
        self.latency = FakeLatency()
        self.read_ranges_open = 0
        self.connected = 0
        self.settings: list[ClientSettings] = []
        """The settings of each connection."""
        self.intact = True
        """Whether the broker's memory still holds the chunks."""
        self.reused: set[Position] = set()
        """Chunks whose memory was used again."""
        self.unnamed: dict[str, bool] = {}
        """By consumer group: whether its last commit was marked as unnamed."""
        self.committed: dict[tuple[str, str], dict[EntryId, Position]] = {}
        """Committed positions, by consumer group and stream."""
        self.commits = 0
        self.away = False
        """Whether the coordinator does not answer."""
        self.looked_for: list[Position] = []
        """The start of each `locate` query."""
        self.commit_error: KeraError | None = None
        self.created_us = 0
        """The creation time of all chunks."""
        self.shared_memory: set[str] = set()
        self.joined_bytes_max: set[int] = set()
        """The values of this setting in calls of `read_range`."""

    @property
    def chunks(self) -> dict[int, list[list[int]]]:
        return self.streams["numbers"].chunks

    @chunks.setter
    def chunks(self, chunks: dict[int, list[list[int]]]) -> None:
        self.streams["numbers"].chunks = chunks

    @property
    def stream_id(self) -> int:
        return self.streams["numbers"].stream_id

    @stream_id.setter
    def stream_id(self, stream_id: int) -> None:
        self.streams["numbers"].stream_id = stream_id

    def stream(self, name: str) -> FakeStream:
        if name not in self.streams:
            raise UnknownStream(f"no stream is called {name!r}", stream=name)
        return self.streams[name]

    async def connect(self, bootstrap: str, settings: ClientSettings) -> Self:
        self.connected += 1
        self.settings.append(settings)
        return self

    @property
    def admin(self) -> Self:
        return self

    async def list_streams(self) -> list[Any]:
        return [stream.description(name) for name, stream in sorted(self.streams.items())]

    async def describe_stream(self, stream: str) -> Any:
        self._require_coordinator()
        return self.stream(stream).description(stream)

    describe = describe_stream

    async def bounds(self, stream: str, *, promise: bool = False) -> dict[int, list[EntryBounds]]:
        return self.stream(stream).bounds()

    def _require_coordinator(self) -> None:
        if self.away:
            raise Unavailable("nobody is there")

    async def locate(self, stream: str, queries: Sequence[ChunkQuery]) -> list[ChunkPlace]:
        self.looked_for += [query.start for query in queries]
        return [self.stream(stream).locate(query) for query in queries]

    async def segments(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position
    ) -> list[SegmentBounds]:
        found = self.stream(stream)
        found.require(streamlet_id, start)
        counts = found.chunks[streamlet_id][entry]
        first, last = (sum(counts[: place.offset // CHUNK_BYTES]) for place in (start, end))
        return [SegmentBounds(start, end, first, last, end.offset - start.offset, 1, resident=True)]

    async def commit(
        self, consumer_group: str, stream: str, positions: Mapping[EntryId, Position], *, unnamed: bool = False
    ) -> None:
        self.unnamed[consumer_group] = unnamed
        self.commits += 1
        if self.commit_error is not None:
            raise self.commit_error
        self.committed[consumer_group, stream] = dict(positions)

    async def read_range(
        self,
        stream: str,
        streamlet_id: int,
        entry: int,
        start: Position,
        end: Position,
        *,
        bytes_max: int = 0,
        settings: ConsumerSettings,
    ) -> AsyncIterator[Chunk]:
        self.read_ranges_open += 1
        self.shared_memory.add(settings.shared_memory)
        self.joined_bytes_max.add(settings.joined_bytes_max)
        try:
            found = self.stream(stream)
            found.require(streamlet_id, start)
            counts = found.chunks[streamlet_id][entry]
            for index in range(start.offset // CHUNK_BYTES, end.offset // CHUNK_BYTES):
                found.require(streamlet_id, at(index))
                first = sum(counts[:index])
                batch = pa.RecordBatch.from_arrays([pa.array(range(first, first + counts[index]))], schema=SCHEMA)
                fields: dict[str, Any] = dict.fromkeys(ChunkHeader._fields, 0)
                fields |= {"created_us": self.created_us}
                fields |= {"first_record": first, "record_count": counts[index], "payload_bytes": 8 * counts[index]}
                of = EntryId(found.stream_id, streamlet_id, entry)
                memory = None if settings.shared_memory == "never" else self
                yield Chunk(batch, ChunkHeader(**fields), at(index), at(index + 1), of, memory)
        finally:
            self.read_ranges_open -= 1

    async def close(self) -> None:
        self.closed = True
