"""Several brokers and a coordinator in this process, as clients see them: streamlets move, crash and are recovered.

Nothing of the broker itself is used: what is promised to clients is written down here once more, in short. A streamlet
is one log (an entry each); its groups are at brokers by intervals; a move opens another group at another broker.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kera.client.cluster.cluster import Cluster
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.client.types import Interval, StreamDescription
from kera.core.chunk import HEADER_BYTES, Placement, iterate_chunks, place_chunk
from kera.core.errors import (
    KeraError,
    NotOwner,
    OutOfSequence,
    ProducerFenced,
    Recovering,
    SessionLost,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.ids import PRODUCER_EPOCHS, Position
from kera.core.record_batch import decode_payload
from kera.core.rpc import Answer, Channel, Method, Reply, api
from kera.core.rpc.wire import error_to_message
from kera.core.schema import DEFAULT_SCHEMA
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.unit.client.support import stream_info

STREAM_ID = 7
NEVER_S = 3600.0


@dataclass
class Stored:
    """A chunk in the log."""

    start: Position
    data: bytes
    records: int

    @property
    def end(self) -> Position:
        return self.start._replace(offset=self.start.offset + len(self.data))


@dataclass
class FleetStreamlet:
    """A streamlet with one entry, wherever its groups are."""

    intervals: list[Interval]
    log: list[Stored] = field(default_factory=list)
    next_group_id: int = 2
    sealed: bool = False
    recovering: set[int] = field(default_factory=set)
    """Groups that cannot be read yet."""
    producers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Epoch and next sequence of each."""
    opened: bool = True
    """The owner knows the stream."""

    @property
    def owner(self) -> int:
        return self.intervals[-1].broker_id

    @property
    def records(self) -> int:
        return sum(chunk.records for chunk in self.log)

    def holder(self, position: Position) -> int:
        """Index of the interval of a position."""
        later = [index for index, each in enumerate(self.intervals) if each.first_group_id <= position.group_id]
        return later[-1] if later else 0

    def new_group(self) -> int:
        self.next_group_id += 1
        return self.next_group_id - 1

    def append(self, data: bytes, records: int) -> Stored:
        group_id = self.intervals[-1].first_group_id
        last = self.log[-1] if self.log else None
        follows = last is not None and last.start.group_id >= group_id
        start = last.end if last is not None and follows else Position(group_id, 1, 0)
        placed = bytearray(data)
        place_chunk(placed, 0, Placement(start.group_id, start.segment_id, 0, self.records, 1))
        self.log.append(Stored(start, bytes(placed), records))
        return self.log[-1]


class FleetBroker:
    """A connection to one of the brokers. See `kera.core.rpc.Channel`."""

    transport = "tcp"

    def __init__(self, fleet: "Fleet", broker_id: int) -> None:
        self.fleet = fleet
        self.broker_id = broker_id
        self.closed = False
        self.calls: list[str] = []
        """Names of the methods that were called."""
        self.wanted: list[int] = []
        """Streamlets of all ranges that were asked for."""
        self.sessions: dict[int, Any] = {}
        """Read sessions: the step of each, and its ranges by handle."""
        self.refused = 0
        """Ranges that were answered with an error."""
        self.reading: list[Callable[[bool], None]] = []
        """Reads that wait; each is tried again with each change."""
        self.cursors: list[Any] = []
        """Requests to truncate and to commit."""
        self.held: list[Callable[[], None]] | None = None
        """If it is a list: writes are not handled, and wait there."""

    def submit(
        self,
        method: Method[Any, Any],
        message: Any,
        bulk: Sequence[Any] = (),
        *,
        timeout_s: float,  # noqa: ARG002 - all is answered
    ) -> Answer[Reply[Any]]:
        loop = asyncio.get_running_loop()
        future: Answer[Reply[Any]] = Answer(loop=loop)
        self.calls.append(method.name)
        data = b"".join(bytes(memoryview(piece).cast("B")) for piece in bulk)
        request = method.request.FromString(message.SerializeToString())
        if method is api.MULTI_WRITE_CHUNKS and self.held is not None:
            self.held.append(lambda: self._carry(method, request, data, future))
        else:
            loop.call_soon(self._carry, method, request, data, future)
        return future

    def release(self) -> None:
        """Handle what was held, and hold nothing more."""
        held, self.held = self.held or [], None
        for go_on in held:
            go_on()

    def _carry(self, method: Method[Any, Any], request: Any, data: bytes, future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        if self.closed:
            future.set_exception(Unavailable("nobody listens"))
            return
        try:
            if method is api.MULTI_WRITE_CHUNKS:
                future.set_result(Reply(self._write(data)))
            elif method is api.MULTI_READ_CHUNKS:
                self._read(request, future)
            elif method is api.DESCRIBE_STREAMLETS:
                future.set_result(Reply(self._describe(request)))
            else:
                self.cursors.append(request)
                results = [broker_pb2.CursorResult(start=cursor) for cursor in request.cursors]
                future.set_result(Reply(method.response(results=results)))
        except KeraError as error:
            future.set_exception(error)

    async def close(self) -> None:
        self.closed = True

    def crash(self) -> None:
        """The connection is lost, and none can be made."""
        self.closed = True
        for again in self.reading:
            again(False)
        self.reading = []

    # -- what a broker does ------------------------------------------------------------------------------------

    def _streamlet(self, stream_id: int, streamlet_id: int) -> FleetStreamlet:
        if stream_id != STREAM_ID or self.fleet.deleted:
            raise UnknownStream("no such stream here", stream_id=stream_id)
        streamlet = self.fleet.streamlets[streamlet_id]
        if self.broker_id not in {each.broker_id for each in streamlet.intervals}:
            raise UnknownStream("nothing of the stream is here", stream_id=stream_id)
        if streamlet.owner == self.broker_id and not streamlet.opened:
            raise UnknownStream("not opened yet", stream_id=stream_id)
        return streamlet

    def _write(self, data: bytes) -> broker_pb2.MultiWriteChunksResponse:
        response = broker_pb2.MultiWriteChunksResponse()
        for header, at in iterate_chunks(data):
            status = response.statuses.add()
            self.fleet.attempts.append((asyncio.get_running_loop().time(), self.broker_id, header.streamlet_id))
            try:
                streamlet = self._streamlet(header.stream_id, header.streamlet_id)
                if streamlet.owner != self.broker_id or streamlet.sealed:
                    raise NotOwner("another broker has it")
                epoch, expected = streamlet.producers.get(header.producer_id, (0, 0))
                if header.producer_epoch < epoch:
                    raise ProducerFenced("fenced")
                expected = 0 if header.producer_epoch > epoch else expected
                if header.sequence > expected:
                    raise OutOfSequence("a gap", expected_sequence=expected)
                status.duplicate = header.sequence < expected
                if not status.duplicate:
                    streamlet.producers[header.producer_id] = header.producer_epoch, header.sequence + 1
                    stored = streamlet.append(data[at : at + header.chunk_bytes], header.record_count)
                    status.group_id, status.segment_id, status.position = stored.start
                    status.first_record = streamlet.records - header.record_count
                status.durability = common_pb2.DURABILITY_LEADER
            except KeraError as error:
                status.error.CopyFrom(error_to_message(error))
        self.fleet.changed()
        return response

    def _read(self, request: Any, future: asyncio.Future[Any]) -> None:
        self.wanted += [each.start.streamlet_id for each in request.ranges]
        ranges = self._session(request) if request.session_id else list(request.ranges)

        def look(alive: bool, *, last: bool = False) -> None:
            if future.done():
                return
            if not alive:
                future.set_exception(Uncertain("connection was lost"))
                return
            response = broker_pb2.MultiReadChunksResponse()
            bulk: list[bytes] = []
            found = False
            for wanted in ranges:
                result = response.results.add()
                told = self._range(wanted, result, bulk, request.bytes_max)
                found = found or told
                if request.session_id and not told:
                    del response.results[-1]
                elif request.session_id:
                    self._tell(request.session_id, wanted, result)
            response.session_kept = True
            if found or last or not request.wait_ms:
                future.set_result(Reply(response, (memoryview(b"".join(bulk)),)))
            else:
                self.reading.append(look)

        look(True)
        if not future.done():
            asyncio.get_running_loop().call_later(request.wait_ms / 1000, lambda: look(True, last=True))

    def _session(self, request: Any) -> list[Any]:
        """The ranges of a session, as they are with this request."""
        if request.step == 0:
            self.sessions[request.session_id] = [0, {}]
        elif request.session_id not in self.sessions or self.sessions[request.session_id][0] != request.step - 1:
            raise SessionLost("begin anew")
        session = self.sessions[request.session_id]
        session[0] = request.step
        for handle in request.removed:
            session[1].pop(handle, None)
        session[1].update({each.handle: each for each in request.ranges})
        return list(session[1].values())

    def _tell(self, session_id: int, wanted: Any, result: Any) -> None:
        """A range of a session advances, or has ended."""
        following, end = result.next, wanted.end
        result.handle = wanted.handle
        reached = wanted.HasField("end") and (following.group_id, following.segment_id, following.position) >= (
            *(end.group_id, end.segment_id),
            end.position,
        )
        result.ended = result.HasField("error") or reached or not result.length_bytes
        wanted.start.CopyFrom(following)
        if result.ended and session_id in self.sessions:
            self.sessions[session_id][1].pop(wanted.handle, None)

    def _range(self, wanted: Any, result: Any, bulk: list[bytes], bytes_max: int) -> bool:
        """Fill the result; whether it has something to tell."""
        start = Position(wanted.start.group_id, wanted.start.segment_id, wanted.start.position)
        result.next.CopyFrom(wanted.start)
        try:
            streamlet = self._streamlet(wanted.start.stream_id, wanted.start.streamlet_id)
            index = streamlet.holder(start)
            if streamlet.intervals[index].broker_id != self.broker_id:
                raise NotOwner("another broker has these groups")
            later = streamlet.intervals[index + 1] if index + 1 < len(streamlet.intervals) else None
            end = Position(later.first_group_id, 1, 0) if later is not None else Position(1 << 40, 1, 0)
            if wanted.HasField("end"):
                end = min(end, Position(wanted.end.group_id, wanted.end.segment_id, wanted.end.position))
            chunks = [chunk for chunk in streamlet.log if start <= chunk.start < end]
            if chunks and chunks[0].start.group_id in streamlet.recovering:
                raise Recovering("wait")
        except KeraError as error:
            result.error.CopyFrom(error_to_message(error))
            self.refused += 1
            return True
        taken = [
            chunk
            for number, chunk in enumerate(chunks)
            if not number or sum(len(each.data) for each in chunks[: number + 1]) <= bytes_max
        ]
        taken = [chunk for chunk in taken if chunk.start.group_id not in streamlet.recovering]
        following = taken[-1].end if taken else start
        if not taken and later is not None:
            following = Position(later.first_group_id, 1, 0)
        result.next.group_id, result.next.segment_id, result.next.position = following
        result.length_bytes = sum(len(chunk.data) for chunk in taken)
        bulk += [chunk.data for chunk in taken]
        return following != start

    def _describe(self, request: Any) -> broker_pb2.DescribeStreamletsResponse:
        response = broker_pb2.DescribeStreamletsResponse()
        for streamlet_id in request.streamlet_ids:
            streamlet = self._streamlet(request.stream_id, streamlet_id)
            here = [
                (number, chunk)
                for number, chunk in enumerate(streamlet.log)
                if streamlet.intervals[streamlet.holder(chunk.start)].broker_id == self.broker_id
            ]
            entry = response.streamlets.add(streamlet_id=streamlet_id).entries.add()
            if here:
                first, last = here[0][0], here[-1][0]
                entry.start.group_id, entry.start.segment_id, entry.start.position = here[0][1].start
                entry.end.group_id, entry.end.segment_id, entry.end.position = here[-1][1].end
                entry.first_record = sum(chunk.records for chunk in streamlet.log[:first])
                entry.next_record = sum(chunk.records for chunk in streamlet.log[: last + 1])
                entry.length_bytes = sum(len(chunk.data) for _, chunk in here)
        return response


class Fleet(Cluster):
    """The client's view of the cluster, over connections that lead to `FleetBroker`. One stream, ``s``."""

    def __init__(self, *, brokers: int = 3, streamlets: int = 1, timing: Timing | None = None, **settings: Any) -> None:
        options = {"retry_backoff_ms": 1, "retry_timeout_ms": 10_000, **settings}
        super().__init__("127.0.0.1:1", ClientSettings(**options), timing=timing)
        self.brokers = {number: FleetBroker(self, number) for number in range(1, brokers + 1)}
        self.streamlets = [FleetStreamlet([Interval(1, 1 + number % brokers)]) for number in range(streamlets)]
        self.version = 1
        self.deleted = False
        self.asked: list[Any] = []
        """Requests to the coordinator."""
        self.answering = asyncio.Event()
        """Cleared, the coordinator is asked and does not answer."""
        self.answering.set()
        self.failures: list[KeraError] = []
        """Of the next requests to the coordinator."""
        self.attempts: list[tuple[float, int, int]] = []
        """Time, broker and streamlet of each chunk that was sent."""
        self.names: dict[str, tuple[int, int]] = {}
        self.producer_id = 0
        self.connected: list[int] = []

    # -- what happens to a cluster -----------------------------------------------------------------------------

    def changed(self) -> None:
        """Wake the reads that wait."""
        for broker in self.brokers.values():
            waiting, broker.reading = broker.reading, []
            for again in waiting:
                again(not broker.closed)

    def seal(self, streamlet_id: int) -> None:
        self.streamlets[streamlet_id].sealed = True

    def move(self, streamlet_id: int, broker_id: int, *, opened: bool = True) -> None:
        """The streamlet goes on at another broker, in another group."""
        streamlet = self.streamlets[streamlet_id]
        streamlet.intervals.append(Interval(streamlet.new_group(), broker_id, (streamlet.records,)))
        streamlet.sealed, streamlet.opened = False, opened
        self.version += 1
        self.changed()

    def take_over(self, lost: int, new: int) -> None:
        """A crashed broker's streamlets go to another one, which has to recover them first."""
        for streamlet in self.streamlets:
            if any(each.broker_id == lost for each in streamlet.intervals):
                streamlet.recovering = {chunk.start.group_id for chunk in streamlet.log}
                streamlet.intervals = [Interval(1, new), Interval(streamlet.new_group(), new, (streamlet.records,))]
        self.version += 1
        self.changed()

    def recovered(self) -> None:
        for streamlet in self.streamlets:
            streamlet.recovering = set()
        self.changed()

    def info(self) -> common_pb2.StreamInfo:
        info = stream_info("s", STREAM_ID, streamlets=len(self.streamlets))
        info.assignments_version = self.version
        for assignment, streamlet in zip(info.assignments, self.streamlets, strict=True):
            assignment.broker_id = streamlet.owner
            if len(streamlet.intervals) > 1:
                for interval in streamlet.intervals:
                    assignment.intervals.add(
                        first_group_id=interval.first_group_id,
                        broker_id=interval.broker_id,
                        first_records=interval.first_records,
                    )
        return info

    def values(self, streamlet_id: int = 0) -> list[bytes]:
        """What is stored, in order."""
        found: list[bytes] = []
        for chunk in self.streamlets[streamlet_id].log:
            found += decode_payload(chunk.data[HEADER_BYTES:], DEFAULT_SCHEMA)["value"].to_pylist()
        return found

    # -- `Cluster`, without sockets ----------------------------------------------------------------------------

    async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
        self.asked.append(message)
        await asyncio.sleep(0)
        await self.answering.wait()
        if self.failures:
            raise self.failures.pop(0)
        if method is api.INIT_PRODUCER:
            return self._init_producer(message.name)
        if method is api.REPORT_BROKER:
            return coordinator_pb2.ReportBrokerResponse()
        assert method is api.DESCRIBE_STREAM
        if self.deleted:
            raise UnknownStream("deleted")
        brokers = [
            common_pb2.BrokerInfo(broker_id=number, broker_epoch=10 + number, segment_bytes=1 << 16)
            for number in self.brokers
        ]
        return coordinator_pb2.DescribeStreamResponse(stream=self.info(), brokers=brokers)

    def _init_producer(self, name: str) -> coordinator_pb2.InitProducerResponse:
        if name in self.names:
            producer_id, epoch = self.names[name]
            self.names[name] = producer_id, epoch + PRODUCER_EPOCHS
        else:
            self.producer_id += 1
            self.names[name or f"#{self.producer_id}"] = self.producer_id, 1
        producer_id, epoch = self.names[name or f"#{self.producer_id}"]
        return coordinator_pb2.InitProducerResponse(producer_id=producer_id, producer_epoch=epoch)

    async def channel(self, stream: StreamDescription, broker_id: int) -> Channel:
        assert broker_id in stream.brokers
        self.connected.append(broker_id)
        broker = self.brokers[broker_id]
        if broker.closed:
            raise Unavailable(f"broker {broker_id} is down")
        return broker
