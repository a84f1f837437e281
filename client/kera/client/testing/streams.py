"""The streams of a fake cluster: their logs in memory, and the brokers that have them.

A streamlet is one log. Its groups are distributed over brokers in intervals, each with one group of one segment. A move
opens another group, at another broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from kera.client.types import Interval, position_of
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidArgument, NotOwner, OutOfSequence, ProducerFenced, UnknownStream
from kera.core.format.chunk import ChunkHeader, Placement, place_chunk, read_header
from kera.core.format.payload import open_payload
from kera.core.format.punctuation import encode_punctuation, is_punctuation
from kera.core.format.schema import schema_from_bytes
from kera.v1 import broker_pb2, common_pb2


class StoredChunk(NamedTuple):
    """A chunk in a log."""

    start: Position
    data: bytes
    records: int

    @property
    def end(self) -> Position:
        """The position of the next chunk."""
        return self.start._replace(offset=self.start.offset + len(self.data))


class Changes:
    """Wakes the waiting reads of all brokers."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._next

    def wake(self) -> None:
        """Wake the reads, after a change."""
        self._next.set()
        self._next = asyncio.Event()


class Attempt(NamedTuple):
    """A chunk that reached a broker, whether it was accepted or not."""

    time_s: float
    """The time by the event loop's clock."""
    broker_id: int
    streamlet_id: int


@dataclass
class FakeStreamlet:
    """A streamlet with one entry."""

    intervals: list[Interval]
    """The places of its groups; the last interval is the owner's."""
    log: list[StoredChunk] = field(default_factory=list)
    """Chunks that have not been truncated."""
    sealed: bool = False
    """Whether the owner refuses chunks."""
    opened: bool = True
    """Whether the owner knows that it is the owner."""
    recovering: set[int] = field(default_factory=set)
    """Groups that cannot be read yet."""
    producers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch and next sequence of each producer, by id."""
    records: int = 0
    """Number of appended records, including truncated ones."""
    _next_group_id: int = 2
    _truncated: Position = EARLIEST

    @property
    def owner(self) -> int:
        """The broker that accepts its chunks."""
        return self.intervals[-1].broker_id

    def interval_of(self, position: Position) -> int:
        """Return the index of the interval that has a position."""
        later = [index for index, each in enumerate(self.intervals) if each.first_group_id <= position.group_id]
        return later[-1] if later else 0

    def new_interval(self, broker_id: int) -> Interval:
        """Return a new interval, which begins with the next group."""
        self._next_group_id += 1
        return Interval(self._next_group_id - 1, broker_id, (self.records,))

    def append(self, data: bytes, records: int) -> StoredChunk:
        """Put a chunk of any origin at the end of the log."""
        group_id = self.intervals[-1].first_group_id
        last = self.log[-1] if self.log else None
        follows = last is not None and last.start.group_id >= group_id
        start = last.end if last is not None and follows else Position(group_id, 1, 0)
        placed = bytearray(data)
        place_chunk(placed, 0, Placement(start.group_id, start.segment_id, 0, self.records, 1))
        self.log.append(StoredChunk(start, bytes(placed), records))
        self.records += records
        return self.log[-1]

    def write(self, header: ChunkHeader, data: bytes) -> StoredChunk | None:
        """Append a producer's chunk and return it; None: a duplicate. Raises `ProducerFenced`, `OutOfSequence`."""
        epoch, expected = self.producers.get(header.producer_id, (0, 0))
        if header.producer_epoch < epoch:
            raise ProducerFenced("a later instance of the producer has written here")
        expected = 0 if header.producer_epoch > epoch else expected
        if header.sequence > expected:
            raise OutOfSequence("a chunk before this one is missing", expected_sequence=expected)
        if header.sequence < expected:
            return None
        self.producers[header.producer_id] = header.producer_epoch, header.sequence + 1
        return self.append(data, header.record_count)

    def punctuate(self, stream_id: int, streamlet_id: int, timestamp_us: int) -> bool:
        """Append the promise that no older records follow, and return whether it was appended.

        It is not appended to an empty log, or to a log that already has a time as late.
        """
        times = [read_header(chunk.data).max_timestamp_us for chunk in self.log]
        written = bool(times) and max(times) < timestamp_us
        if written:
            self.append(encode_punctuation(stream_id, streamlet_id, timestamp_us, timestamp_us), 0)
        return written

    def locate(self, query: broker_pb2.ChunkQuery) -> tuple[Position, int, int]:
        """Return the place of a query, the ordinal of the record there, and the bytes between. Raises `DataLost`."""
        start = position_of(query.start)
        self.check_start(start)
        end = position_of(query.end) if query.HasField("end") else None
        place, records, size = start, 0, 0
        for chunk in self.log:
            if chunk.start < start or (end is not None and chunk.start >= end):
                continue
            if query.HasField("timestamp_us"):
                if read_header(chunk.data).max_timestamp_us >= query.timestamp_us:
                    place = chunk.start
                    break
            elif size and (
                records + chunk.records > query.records_max
                if query.HasField("records_max")
                else size + len(chunk.data) > query.bytes_max
            ):
                break
            place, records, size = chunk.end, records + chunk.records, size + len(chunk.data)
        return place, self.records - sum(chunk.records for chunk in self.log if chunk.start >= place), size

    def truncate(self, position: Position) -> None:
        """Remove the chunks before a position."""
        self._truncated = max(self._truncated, position)
        self.log = [chunk for chunk in self.log if chunk.start >= self._truncated]

    def check_start(self, start: Position) -> None:
        """Raise `DataLost` if the records at `start` were truncated."""
        if start.group_id and start < self._truncated:
            raise DataLost(
                "the records from there on were truncated",
                lost_from=list(start),
                available_from=list(self._truncated),
                available_record=self.records - sum(chunk.records for chunk in self.log),
            )


def check_broker(brokers: Mapping[int, common_pb2.BrokerInfo], broker_id: int, *, crashed: bool = False) -> None:
    """Raise `InvalidArgument` unless there is such a broker, and it runs, or with `crashed` has crashed."""
    if broker_id not in brokers:
        raise InvalidArgument(f"there is no broker {broker_id!r}: the cluster has brokers 1 to {len(brokers)}")
    if brokers[broker_id].alive == crashed:
        raise InvalidArgument(f"broker {broker_id} {'still runs: crash it first' if crashed else 'does not run'}")


class FakeStream:
    """A stream and the places of its streamlets; streamlet `n` begins at the running broker with index `n`."""

    def __init__(
        self,
        message: common_pb2.StreamInfo,
        broker_ids: list[int],
        changes: Changes,
        brokers: Mapping[int, common_pb2.BrokerInfo],
    ) -> None:
        self.message = message
        """Configuration and schema, as the coordinator describes them."""
        count = message.config.streamlets
        self.streamlets = [FakeStreamlet([Interval(1, broker_ids[n % len(broker_ids)])]) for n in range(count)]
        self.attempts: list[Attempt] = []
        """The chunks that reached brokers, in order of arrival."""
        self._version = 1
        self._changes = changes
        self._brokers = brokers

    @property
    def stream_id(self) -> int:
        """The stream's id."""
        return self.message.stream_id

    @property
    def schema(self) -> pa.Schema:
        """The columns of its records."""
        return schema_from_bytes(self.message.schemas[0].arrow_schema)

    def table(self, streamlet_id: int | None = None) -> pa.Table:
        """Return the records of a streamlet, in order; None: of all streamlets, one after the other."""
        batches = []
        for streamlet in self.streamlets if streamlet_id is None else [self._streamlet(streamlet_id)]:
            for chunk in streamlet.log:
                header = read_header(chunk.data)
                if is_punctuation(header):
                    continue
                payload = chunk.data[header.header_bytes : header.header_bytes + header.payload_bytes]
                batches.append(open_payload(payload, self.schema, header))
        return pa.Table.from_batches(batches, self.schema)

    def values(self, streamlet_id: int | None = None) -> list[Any]:
        """Return the column ``value`` of a streamlet, in order; None: of all streamlets, one after the other."""
        return self.table(streamlet_id)["value"].to_pylist()  # type: ignore[no-any-return]

    # -- changes by a test -------------------------------------------------------------------------------------

    def append(self, streamlet_id: int, data: bytes, records: int) -> StoredChunk:
        """Put an encoded chunk at the end of a streamlet, as if a producer had sent it."""
        stored = self._streamlet(streamlet_id).append(data, records)
        self._changes.wake()
        return stored

    def seal(self, streamlet_id: int) -> None:
        """Make the owner of a streamlet refuse chunks, as at the beginning of a move."""
        self._streamlet(streamlet_id).sealed = True

    def unseal(self, streamlet_id: int) -> None:
        """Make the owner of a streamlet accept chunks again."""
        self._streamlet(streamlet_id).sealed = False

    def move(self, streamlet_id: int, broker_id: int, *, opened: bool = True) -> None:
        """Continue a streamlet at another broker, in another group.

        Without `opened`, that broker does not know yet that it is the owner; see `open`.
        """
        streamlet = self._streamlet(streamlet_id)
        check_broker(self._brokers, broker_id)
        streamlet.intervals.append(streamlet.new_interval(broker_id))
        streamlet.sealed, streamlet.opened = False, opened
        self._moved()

    def open(self, streamlet_id: int) -> None:
        """Let the owner of a streamlet know that it is the owner."""
        self._streamlet(streamlet_id).opened = True

    def relocate(self, streamlet_id: int, broker_id: int) -> None:
        """Make another broker the owner of all groups of a streamlet; the old owner has no part of it any more."""
        streamlet = self._streamlet(streamlet_id)
        check_broker(self._brokers, broker_id)
        streamlet.intervals = [each._replace(broker_id=broker_id) for each in streamlet.intervals]
        self._moved()

    def take_over(self, lost: int, new: int) -> None:
        """Make another broker recover a crashed broker's streamlets.

        It accepts chunks at once. Older chunks can be read after `recovered`.
        """
        check_broker(self._brokers, lost, crashed=True)
        check_broker(self._brokers, new)
        for streamlet in self.streamlets:
            if any(each.broker_id == lost for each in streamlet.intervals):
                streamlet.recovering = {chunk.start.group_id for chunk in streamlet.log}
                streamlet.intervals = [Interval(1, new), streamlet.new_interval(new)]
        self._moved()

    def recovered(self) -> None:
        """Make all records readable again."""
        for streamlet in self.streamlets:
            streamlet.recovering = set()
        self._changes.wake()

    def _streamlet(self, streamlet_id: int) -> FakeStreamlet:
        if streamlet_id not in range(len(self.streamlets)):
            raise InvalidArgument(
                f"stream {self.message.name!r} has streamlets 0 to {len(self.streamlets) - 1}, not {streamlet_id!r}"
            )
        return self.streamlets[streamlet_id]

    def _moved(self) -> None:
        self._version += 1
        self._changes.wake()

    # -- views of brokers and the coordinator ------------------------------------------------------------------

    def known_at(self, broker_id: int, streamlet_id: int) -> FakeStreamlet:
        """Return a streamlet that a broker has. Raises `UnknownStream` if the broker has no part of it."""
        streamlet = self._streamlet(streamlet_id)
        if broker_id not in {each.broker_id for each in streamlet.intervals}:
            raise UnknownStream("this broker has no part of the stream", stream_id=self.stream_id)
        if streamlet.owner == broker_id and not streamlet.opened:
            raise UnknownStream("not opened yet", stream_id=self.stream_id)
        return streamlet

    def owned_by(self, broker_id: int, streamlet_id: int) -> FakeStreamlet:
        """Return a streamlet that a broker may append to. Raises `NotOwner`, `UnknownStream`."""
        streamlet = self.known_at(broker_id, streamlet_id)
        if streamlet.owner != broker_id or streamlet.sealed:
            raise NotOwner("another broker has it", stream_id=self.stream_id, streamlet_id=streamlet_id)
        return streamlet

    def info(self) -> common_pb2.StreamInfo:
        """Return the coordinator's description of the stream."""
        info = common_pb2.StreamInfo()
        info.CopyFrom(self.message)
        info.assignments_version = self._version
        for streamlet_id, streamlet in enumerate(self.streamlets):
            assignment = info.assignments.add(
                streamlet_id=streamlet_id, broker_id=streamlet.owner, broker_epoch=1, first_group_id=1
            )
            for interval in streamlet.intervals if len(streamlet.intervals) > 1 else ():
                assignment.intervals.add(
                    first_group_id=interval.first_group_id,
                    broker_id=interval.broker_id,
                    first_records=interval.first_records,
                )
        return info
