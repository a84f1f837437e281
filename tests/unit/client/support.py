"""Helpers of the client's tests: a broker without processes and sockets, and a connection to it with faults."""

import asyncio
import enum
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from kera.broker.counters import Counters
from kera.broker.log.arena import Arena
from kera.broker.log.events import Events
from kera.broker.log.segment import Segment
from kera.broker.ownership.streams import Streams
from kera.broker.plugins import Plugins
from kera.broker.replication.limits import ReplicationLimits
from kera.broker.replication.manager import Replication
from kera.broker.serving.limits import ServingLimits
from kera.broker.serving.service import BrokerService
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.physical_ids import PhysicalIds
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.client.cluster.at_work import AtWork
from kera.client.cluster.locality import Locality
from kera.client.cluster.timing import Timing
from kera.client.settings import ClientSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EntryId, Position
from kera.core.errors import KeraError, Unavailable, Uncertain, UnknownStream
from kera.core.format.chunk import ChunkHeader, iterate_chunks
from kera.core.format.payload import open_payload
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.rpc import Answer, Channel, Method, Reply, api
from kera.core.rpc.method import Call, Peer
from kera.core.runtime import MACHINE
from kera.v1 import broker_pb2, common_pb2, consumer_group_pb2, coordinator_pb2

BROKER_ID = 3
BROKER_EPOCH = 9
SEGMENT_BYTES = 64 << 10
WAIT_S = 20.0
"""Bound on every wait: long, since it only ends a test that fails."""


def stream_info(
    name: str = "s",
    stream_id: int = 7,
    *,
    streamlets: int = 1,
    entries: int = 1,
    codec: int = common_pb2.CODEC_NONE,
    schema: pa.Schema | None = None,
    key_column: str = "",
    timestamp_column: str = "",
    **retention: Any,
) -> common_pb2.StreamInfo:
    return common_pb2.StreamInfo(
        stream_id=stream_id,
        name=name,
        config=common_pb2.StreamConfig(
            streamlets=streamlets,
            entries=entries,
            group_segments=2,
            durability=common_pb2.DURABILITY_LEADER,
            codec=codec,  # type: ignore[arg-type]
            **retention,
        ),
        schemas=[
            common_pb2.StreamSchema(
                schema_id=1,
                arrow_schema=schema_to_bytes(DEFAULT_SCHEMA if schema is None else schema),
                key_column=key_column,
                timestamp_column=timestamp_column,
                typed=schema is not None,
            )
        ],
        assignments=[
            common_pb2.StreamletAssignment(
                streamlet_id=streamlet, broker_id=BROKER_ID, broker_epoch=BROKER_EPOCH, first_group_id=1
            )
            for streamlet in range(streamlets)
        ],
    )


def broker_info(segment_bytes: int = SEGMENT_BYTES) -> common_pb2.BrokerInfo:
    return common_pb2.BrokerInfo(broker_id=BROKER_ID, segment_bytes=segment_bytes, alive=True)


def description(segment_bytes: int = SEGMENT_BYTES, **fields: Any) -> StreamDescription:
    return StreamDescription.from_message(stream_info(**fields), [broker_info(segment_bytes)])


class Fault(enum.Enum):
    """The fate of a request."""

    NONE = enum.auto()
    NOT_SENT = enum.auto()
    """`Unavailable`: the broker never sees it."""
    LOST = enum.auto()
    """`Uncertain`, and the broker never sees it."""
    ANSWER_LOST = enum.auto()
    """`Uncertain`, and the broker has handled it."""
    NO_ANSWER = enum.auto()
    """Handled, and not answered until its time is up."""
    HELD = enum.auto()
    """Neither handled nor answered until `release`."""


class LoopbackChannel:
    """A connection to a `BrokerService` in this process. See `kera.core.rpc.Channel`."""

    transport = "tcp"

    def __init__(self, service: BrokerService) -> None:
        self.closed = False
        self.faults: deque[Fault] = deque()
        """The faults of the next writes, in order; later writes succeed."""
        self.default_fault = Fault.NONE
        self.read_faults: deque[Fault] = deque()
        """The faults of the next reads, in order."""
        self.stands_still: Callable[[Any], bool] = lambda _: False
        """Called for each request: whether it never gets an answer."""
        self.refuse: Callable[[], KeraError | None] = lambda: None
        """Called for each write: an error for the request as a whole."""
        self.amend: Callable[[broker_pb2.MultiWriteChunksResponse], None] = lambda _: None
        """Changes the answer to each write, before the client gets it."""
        self.levels: list[int] = []
        """The durability that each write asked for."""
        self.writes: list[list[ChunkHeader]] = []
        """Headers of the chunks of each write that was submitted."""
        self._in_flight: list[Answer[Reply[Any]]] = []
        self.in_flight_max = 0
        self.held: list[Callable[[], None]] = []
        self._handlers = service.service()
        self.peer = Peer(self.transport, "loopback")
        self._loop = asyncio.get_running_loop()

    def submit(
        self, method: Method[Any, Any], message: Any, bulk: Sequence[Any] = (), *, timeout_s: float
    ) -> Answer[Reply[Any]]:
        future: Answer[Reply[Any]] = Answer(loop=self._loop)
        request = method.request.FromString(message.SerializeToString())
        data = memoryview(b"".join(bytes(memoryview(piece).cast("B")) for piece in bulk))
        fault = Fault.HELD if self.stands_still(request) else Fault.NONE
        if method is api.MULTI_WRITE_CHUNKS:
            fault = self.faults.popleft() if self.faults else self.default_fault
            self.levels.append(request.durability)
            self.writes.append([header for header, _ in iterate_chunks(data)])
            self._in_flight = [each for each in self._in_flight if not each.done()] + [future]
            self.in_flight_max = max(self.in_flight_max, len(self._in_flight))
        elif method is api.MULTI_READ_CHUNKS and self.read_faults:
            fault = self.read_faults.popleft()
        self._loop.call_soon(self._carry, fault, method, Call(request, data, self.peer), future, timeout_s)
        return future

    def _carry(
        self, fault: Fault, method: Method[Any, Any], call: Call[Any], future: asyncio.Future[Reply[Any]], time_s: float
    ) -> None:
        if self.closed or fault is Fault.NOT_SENT:
            _fail(future, Unavailable("nobody listens"))
        elif fault is Fault.LOST:
            _fail(future, Uncertain("connection was lost"))
        elif fault is Fault.ANSWER_LOST:
            self._handlers[method](call)
            _fail(future, Uncertain("connection was lost"))
        elif fault is Fault.NO_ANSWER:
            self._handlers[method](call)
            self._loop.call_later(time_s, _fail, future, Uncertain(f"no answer within {time_s:g} s"))
        elif fault is Fault.HELD:
            self.held.append(lambda: self._carry(Fault.NONE, method, call, future, time_s))
        else:
            self._handle(method, call, future)

    def release(self) -> None:
        """Carry out the held requests, in order."""
        held, self.held = self.held, []
        for go_on in held:
            go_on()

    def _handle(self, method: Method[Any, Any], call: Call[Any], future: asyncio.Future[Reply[Any]]) -> None:
        try:
            error = self.refuse() if method is api.MULTI_WRITE_CHUNKS else None
            if error is not None:
                raise error
            result = self._handlers[method](call)
        except KeraError as error:
            _fail(future, error)
            return
        amend = self.amend if method is api.MULTI_WRITE_CHUNKS else lambda _: None

        def answer(reply: Reply[Any]) -> None:
            amend(reply.message)
            _answer(future, reply)

        if isinstance(result, Reply):
            answer(result)
        else:
            task = asyncio.ensure_future(result)
            task.add_done_callback(lambda done: answer(done.result()) if not done.cancelled() else None)

    async def close(self) -> None:
        """The broker frees what this connection has leased."""
        self.closed = True
        self.peer.closed()


def _fail(future: asyncio.Future[Any], error: KeraError) -> None:
    if not future.done():
        future.set_exception(error)


def _answer(future: asyncio.Future[Any], reply: Reply[Any]) -> None:
    if not future.done():
        data = b"".join(reply.bulk)
        future.set_result(Reply(reply.message, (memoryview(data),) if data else ()))


class Asked:
    """A cluster that gives the answer of its test."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.requests: list[Any] = []

    async def ask(self, _: Method[Any, Any], message: Any) -> Any:
        self.requests.append(message)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class FakeCluster:
    """Stands in for `kera.client.cluster.cluster.Cluster`: one broker, in this process."""

    def __init__(
        self,
        directory: Path,
        *infos: common_pb2.StreamInfo,
        segment_bytes: int = SEGMENT_BYTES,
        slots: int = 64,
        limits: ServingLimits | None = None,
    ) -> None:
        self.limits = limits
        self.is_inherited = False
        self.settings = ClientSettings(retry_backoff_ms=1, retry_timeout_ms=10_000)
        self.request_timeout_s = 10.0
        self.timing = Timing()
        self.runtime = MACHINE
        self.session_ids = itertools.count(1)
        self.at_work = AtWork(self.runtime.clock)
        self.locality = Locality("here", self.settings, self.timing)
        self.arena = Arena.create(
            directory, arena_bytes=slots * segment_bytes, slot_bytes=segment_bytes, data_dir=directory, ephemeral=True
        )
        self.directory = directory
        self.launches = 0
        self.infos = {info.name: info for info in infos or (stream_info(),)}
        self.broker_info = broker_info(segment_bytes)
        self.counters = Counters()
        self.producer_id = 0
        self.connects: deque[KeraError] = deque()
        """Errors of the next attempts to connect."""
        self.closes = 0
        """How many of the next connections close before a client can use them."""
        self.forgotten: list[str] = []
        self.committed: list[tuple[str, str, Mapping[EntryId, Position]]] = []
        self.reported: list[consumer_group_pb2.ResetConsumerGroupRequest] = []
        """The requests to the coordinator that reset a consumer group's cursors."""
        self.restart_broker()

    def restart_broker(self) -> None:
        """Launch the broker again: nothing of the old launch is left, and new data stays in memory."""
        self.launches += 1
        root = self.directory / f"launch-{self.launches}"
        index = SegmentIndex.open(root / "index", durable=False)
        memory = PersistenceManager(self.arena, index, PhysicalIds({"next_physical_id": 1}), Events())
        limits = ReplicationLimits(self.arena.slot_bytes)
        replication = Replication(limits, memory.index_writer.note, memory.events)
        self.streams = Streams(memory, Restart(None, index, SegmentStore(root, LocalDisk(root), index)), replication)
        self.plugins = Plugins(self.streams, replication, lambda: None)
        self.service = BrokerService(
            self.streams,
            memory,
            replication,
            self.counters,
            pump=lambda: None,
            limits=self.limits,
            hooks=self.plugins.of_requests,
        )
        self.service.registered(BROKER_ID, self.infos.values())
        self.open_channel: LoopbackChannel | None = None

    @property
    def loopback(self) -> LoopbackChannel:
        """The connection that the client uses, or will use."""
        if self.open_channel is None or self.open_channel.closed:
            self.open_channel = LoopbackChannel(self.service)
        return self.open_channel

    async def stream(self, name: str) -> StreamDescription:
        if name not in self.infos:
            raise UnknownStream(f"there is no stream {name!r}", stream=name)
        return StreamDescription.from_message(
            self.infos[name], [self.broker_info], message_bytes_max=self.settings.message_bytes_max
        )

    async def stream_or_last_seen(self, name: str) -> StreamDescription:
        return await self.stream(name)

    async def ask(self, method: Method[Any, Any], message: Any, **_: Any) -> Any:
        if method is api.RESET_CONSUMER_GROUP:
            self.reported.append(message)
            return consumer_group_pb2.ResetConsumerGroupResponse()
        if method is api.FETCH_CONSUMER_GROUP:
            cursors = [cursor for report in self.reported for start in report.starts for cursor in start.cursors]
            return consumer_group_pb2.FetchConsumerGroupResponse(cursors=cursors)
        assert method is api.INIT_PRODUCER
        self.producer_id += 1
        return coordinator_pb2.InitProducerResponse(producer_id=self.producer_id, producer_epoch=1)

    async def channel(self, _: StreamDescription, broker_id: int) -> Channel:
        assert broker_id == BROKER_ID
        if self.connects:
            raise self.connects.popleft()
        loopback = self.loopback
        if self.closes:
            self.closes -= 1
            await loopback.close()
        return loopback

    async def bounds(self, name: str) -> dict[int, list[EntryBounds]]:
        request = broker_pb2.DescribeStreamletsRequest(stream_id=self.infos[name].stream_id)
        reply = self.service.service()[api.DESCRIBE_STREAMLETS](Call(request, memoryview(b""), Peer("tcp", "loopback")))
        assert isinstance(reply, Awaitable)
        answer = (await reply).message
        return {
            each.streamlet_id: [EntryBounds.from_message(entry) for entry in each.entries] for each in answer.streamlets
        }

    async def commit(self, consumer_group: str, name: str, positions: Mapping[EntryId, Position]) -> None:
        self.committed.append((consumer_group, name, positions))

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    # -- stored data -------------------------------------------------------------------------------------------

    def chunks(self, name: str = "s", streamlet: int = 0, entry: int = 0) -> Iterator[tuple[ChunkHeader, memoryview]]:
        """Header and payload of each chunk that readers can see, in order."""
        for segment in self.segments(name, streamlet, entry):
            for header, at in iterate_chunks(segment.slot.view, 0, segment.durable_head):
                payload_at = at + header.header_bytes
                yield header, segment.slot.view[payload_at : payload_at + header.payload_bytes]

    def segments(self, name: str = "s", streamlet: int = 0, entry: int = 0) -> list[Segment]:
        """All segments of an entry, in order."""
        return self.streams.get(self.infos[name].stream_id).streamlet(streamlet).entries[entry].tail

    def stored(self, name: str = "s", streamlet: int = 0, entry: int = 0) -> pa.Table:
        """All rows of an entry."""
        schema = StreamDescription.from_message(self.infos[name]).schema
        batches = [
            open_payload(bytes(payload), schema, header) for header, payload in self.chunks(name, streamlet, entry)
        ]
        return pa.Table.from_batches(batches, schema)

    def values(self, name: str = "s", streamlet: int = 0) -> list[bytes]:
        """The column ``value`` of a streamlet with one entry."""
        return self.stored(name, streamlet)["value"].to_pylist()  # type: ignore[no-any-return]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)
