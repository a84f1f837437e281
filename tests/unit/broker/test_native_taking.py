"""Write requests that the native core takes from a buffer, compared with the path in Python.

Two brokers get the same bytes in the same reads, each over its own connection; one of them has the native core, which
takes whole requests, and single chunks of others. All visible state has to be equal: the frames of the answers,
segments (byte by byte), producers, counters, and replicas on backups.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from kera.broker.records import ProducerRecord
from kera.broker.serving import write
from kera.broker.serving.taking import refused_answers
from kera.broker.serving.write_access import AppendRules
from kera.core.errors import NotReplicated
from kera.core.native import native
from kera.core.rpc import api
from kera.core.rpc.frame_server import FrameServer, Timing
from kera.core.rpc.frames import HEADER_BYTES, FrameKind, decode_header, encode_frame, with_header
from kera.core.rpc.limits import BULK_BYTES_MAX, REQUESTS_IN_FLIGHT_MAX
from kera.v1 import broker_pb2
from tests.native_twins import needs_native
from tests.unit.broker.native_support import LEADER, PERSISTED, PRODUCERS, REPLICATED, STREAMS, Producers, Side, good
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import CHUNK_BYTES
from tests.unit.core.rpc.fake_transport import FakeTransport, feed

pytestmark = needs_native

READS = 60


def frames_in(data: bytes | bytearray) -> list[tuple[int, int, bytes]]:
    """The request, the kind and the head of each frame."""
    found, at, view = [], 0, memoryview(data)
    while at < len(view):
        header = decode_header(view, at, BULK_BYTES_MAX)
        end = at + HEADER_BYTES + header.head_bytes
        found.append((header.request_id, header.kind, bytes(view[at + HEADER_BYTES : end])))
        at = end
    return found


def frame(number: int, data: bytes, **fields: Any) -> bytes:
    message = broker_pb2.MultiWriteChunksRequest(**fields)
    return b"".join(encode_frame(FrameKind.REQUEST, api.MULTI_WRITE_CHUNKS, number, message, [data], BULK_BYTES_MAX))


class Connected(Side):
    """A broker with a connection; a test decides when requests go to its backups."""

    def __init__(
        self,
        make_engine: MakeEngine,
        *,
        takes: bool = True,
        lag_bytes_max: int = 1 << 30,
        settings: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(make_engine, lag_bytes_max=lag_bytes_max, pump=lambda: None, settings=settings)
        broker = self.broker.broker
        self.server = FrameServer(
            broker.service(), timing=Timing(slice_s=60.0), takers=broker.takers() if takes else None
        )
        self.connection = self.server.accept("unix")
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    def close(self) -> None:
        self.transport.closed = True
        self.connection.connection_lost(None)

    def feed(self, data: bytes, *splits: int) -> None:
        assert feed(self.connection, data, splits) == len(data)

    async def go_on(self) -> None:
        self.wire.pump()
        await super().go_on()

    async def answered(self) -> list[tuple[int, int, bytes]]:
        """All answers once no request waits, in the order of their requests."""
        async with asyncio.timeout(20):
            while self.server.requests_in_flight:
                await self.go_on()
            await self.go_on()
        return sorted(frames_in(self.transport.written))


class Counting:
    """The native core, with counts of the requests, and of the chunks of other requests, that it has taken."""

    def __init__(self) -> None:
        self.requests = self.held = self.chunks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(native, name)

    def take_writes(self, *arguments: Any) -> Any:
        assert native is not None
        result = native.take_writes(*arguments)
        self.requests += result[1]
        self.held += result[2]
        self.chunks += 0 if result[1] else result[4]
        return result


class Clients:
    """Makes the requests of clients."""

    def __init__(
        self, random: Random, times: Callable[[], int] | None = None, *, odd: float = 0.1, mixed: float = 0.1
    ) -> None:
        """`odd`: see `Producers`; `mixed`: the share of requests with chunks for several streamlets."""
        self.random = random
        self.producers = Producers(random, odd=odd, times=times)
        self.mixed = mixed
        self.number = 0

    def request(self) -> bytes:
        random = self.random
        self.number += 1
        if random.random() < self.mixed:
            data, durability = self.producers.request()
        else:  # what one producer sends to one streamlet
            where = random.choice([7, 9, 9, 9, *STREAMS]), random.choice([0, 0, 0, 0, 1]), PRODUCERS[0]
            data = [self.producers.chunk(*where) for _ in range(random.choice([1, 1, 2, 7]))]
            durability = random.choice([0] * 9 + [LEADER, REPLICATED if where[0] == 9 else 0])
        fields: dict[str, Any] = {"chunk_count": len(data), "durability": durability}
        if random.random() < 0.02:
            fields |= random.choice(
                [
                    {"durability": 9},
                    {"chunk_count": 9000},
                    {"request_id": 1 << 63},
                    {"chunk_count": 0},
                    {"chunks": b"x"},
                ]
            )
        if random.random() < 0.005:
            data = []
        return frame(self.number, b"".join(data), **fields)


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))]
Pair = Callable[..., tuple[Connected, Connected, Counting]]


@pytest.fixture
def pair(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Makes two brokers, with the native core and without."""

    def make(**settings: Any) -> tuple[Connected, Connected, Counting]:
        counting = Counting()
        monkeypatch.setattr(write, "native", counting)
        by_native = Connected(make_engine, **settings)
        monkeypatch.setattr(write, "native", None)
        return by_native, Connected(make_engine, takes=False, **settings), counting

    return make


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_native_core_and_python_agree_on_whole_requests(seed: int, pair: Pair) -> None:
    random = Random(seed)
    by_native, by_python, counting = pair()
    await compare(by_native, by_python, random, Clients(random))
    assert counting.requests > READS // 5
    assert counting.held > READS // 10


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_native_core_and_python_agree_on_single_chunks_of_requests(seed: int, pair: Pair) -> None:
    random = Random(seed)
    by_native, by_python, counting = pair(lag_bytes_max=random.choice([4 * CHUNK_BYTES, 1 << 30]))
    await compare(by_native, by_python, random, Clients(random, odd=1.0, mixed=1.0))
    assert by_native.broker.counters.chunks_refused > READS // 2
    assert counting.chunks > by_native.broker.counters.chunks_appended // 8


async def compare(by_native: Connected, by_python: Connected, random: Random, clients: Clients) -> None:
    """Send the same requests to both, and compare their states and answers."""
    for _ in range(READS):
        data = b"".join(clients.request() for _ in range(random.choice([1, 1, 2, 6])))
        splits = [random.randrange(len(data)) for _ in range(random.choice([0, 0, 1, 3]))]
        for side in (by_native, by_python):
            side.feed(data, *splits)
        if random.random() < 0.3:
            await by_native.go_on()
            await by_python.go_on()
        if random.random() < 0.5:  # without a comparison, the core's memory lasts from one request to the next
            assert list(by_native.seen()) == list(by_python.seen())
            assert by_native.server.requests_in_flight == by_python.server.requests_in_flight
    assert await by_native.answered() == await by_python.answered()
    assert list(by_native.seen()) == list(by_python.seen())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mixed", [0.1, 1.0])
async def test_the_native_core_and_python_keep_the_same_promises_of_epochs(seed: int, mixed: float, pair: Pair) -> None:
    random = Random(seed)
    settings = {"epoch_ms": 1, "epoch_grace_ms": 1, "timestamp_ahead_max_ms": random.choice([0, 1])}
    by_native, by_python, counting = pair(settings=settings)
    now_us = 10_000
    clients = Clients(random, lambda: now_us + random.choice([1500, *range(-4000, -900, 70)]), mixed=mixed)
    for _ in range(READS):
        data = b"".join(clients.request() for _ in range(random.choice([1, 1, 2, 6])))
        now_us += random.randrange(200)
        promises = random.random() < 0.3
        for side in (by_native, by_python):
            side.engine.memory.tick(0, now_us, idle_close_ms=1 << 40)
            for stream_id in (7, 9, 10) if promises else ():
                streamlet = side.broker.streams.streamlet(stream_id, 0)
                for entry in streamlet.entries:
                    streamlet.promise(entry)
            side.feed(data)
        if random.random() < 0.3:
            await by_native.go_on()
            await by_python.go_on()
        assert list(by_native.seen()) == list(by_python.seen())
    assert await by_native.answered() == await by_python.answered()
    assert list(by_native.seen()) == list(by_python.seen())
    assert by_native.broker.counters.punctuations > 2
    if mixed < 1:
        assert counting.requests > READS // 10
    else:
        assert counting.chunks > by_native.broker.counters.chunks_appended // 8


def next_frames(count: int, stream_id: int = 9, first: int = 0) -> bytes:
    random = Random(1)
    return b"".join(
        frame(number + 1, good(random, stream_id=stream_id, producer=PRODUCERS[0], sequence=number))
        for number in range(first, first + count)
    )


async def known(side: Connected, stream_id: int = 9) -> None:
    """Write the producer's first chunk, so that the core takes the next ones."""
    side.feed(next_frames(1, stream_id))
    await side.answered()
    side.transport.written.clear()


async def test_a_waiting_answer_counts_as_a_request_in_flight(make_engine: MakeEngine) -> None:
    side = Connected(make_engine)
    await known(side)
    side.feed(next_frames(5, first=1))
    assert side.server.requests_in_flight == 5
    assert not side.connection.evictable
    assert not side.transport.written
    assert [request for request, _, _ in await side.answered()] == [2, 3, 4, 5, 6]
    assert side.server.requests_in_flight == 0


async def test_reading_stops_at_the_limit_of_requests_in_flight(make_engine: MakeEngine) -> None:
    side = Connected(make_engine)
    await known(side)
    data = next_frames(REQUESTS_IN_FLIGHT_MAX + 20, first=1)
    taken = feed(side.connection, data)
    assert side.server.requests_in_flight == REQUESTS_IN_FLIGHT_MAX
    assert not side.transport.reading
    while taken < len(data):
        await side.go_on()
        taken += feed(side.connection, data[taken:])
    assert len(await side.answered()) == REQUESTS_IN_FLIGHT_MAX + 20


@pytest.mark.parametrize("message", [b"\x98\x80\x80\x80\x80\x00\x01", b"\x98\x80\x80\x80\x80\x80\x80\x80\x80\x00\x01"])
async def test_a_message_whose_tag_is_too_long_is_refused_as_by_protobuf(
    message: bytes, make_engine: MakeEngine
) -> None:
    side = Connected(make_engine)
    await known(side)
    chunk = good(Random(1), stream_id=9, producer=PRODUCERS[0], sequence=1)
    side.feed(with_header(message, FrameKind.REQUEST, api.MULTI_WRITE_CHUNKS.number, 2, len(chunk)) + chunk)
    assert [(request, kind) for request, kind, _ in await side.answered()] == [(2, FrameKind.ERROR)]


@pytest.mark.parametrize("reads", [1, 3])
async def test_answers_to_a_closed_connection_are_dropped_and_the_connection_is_freed(
    make_engine: MakeEngine, reads: int
) -> None:
    side = Connected(make_engine)
    await known(side)
    for read in range(reads):
        side.feed(next_frames(2, first=1 + 2 * read))
    side.close()
    connection = weakref.ref(side.connection)
    del side.connection
    assert connection() is not None, "who will be answered"
    while any(log.busy for log in side.engine.replication.logs.streams[9].all()):
        await side.go_on()
    await side.go_on()
    gc.collect()
    assert not side.transport.written
    assert connection() is None


async def test_a_broker_that_was_replaced_refuses_held_and_new_requests(make_engine: MakeEngine) -> None:
    side = Connected(make_engine)
    await known(side)
    side.feed(next_frames(3, first=1))
    side.broker.broker.writer.fence()
    side.feed(next_frames(1, first=4))
    responses = [
        broker_pb2.MultiWriteChunksResponse.FromString(head) for _, _, head in frames_in(side.transport.written)
    ]
    codes = [status.error.code for response in responses for status in response.statuses]
    assert sorted(codes) == ["not_owner", *["not_replicated"] * 3]


def test_refusing_held_answers_refuses_all_their_chunks() -> None:
    statuses = broker_pb2.MultiWriteChunksResponse()
    statuses.statuses.add(group_id=1)
    statuses.statuses.add(group_id=1, position=9)
    data = statuses.SerializeToString()
    held = b"".join(number.to_bytes(8, "little") + len(data).to_bytes(4, "little") + data for number in (5, 6))
    found = frames_in(refused_answers(held, NotReplicated("so it is")))
    assert [request for request, _, _ in found] == [5, 6]
    for _, kind, head in found:
        assert kind == FrameKind.REPLY
        response = broker_pb2.MultiWriteChunksResponse.FromString(head)
        assert [status.error.message for status in response.statuses] == ["so it is"] * 2
        assert [status.group_id for status in response.statuses] == [0, 0]


RULES: tuple[Any, ...] = ({}, None, None, tuple, 0, True, None)
STREAM_ATTRIBUTES = ("by_disk", "durability", "lean_types", "logs", "streamlets")
"""The attributes of a stream that the native core reads."""


@pytest.mark.parametrize(
    "arguments", [(), (1,) * 8, ((), None, b"", None, 0, 0, 0, 0), ((1,) * 6, None, b"", 0, 0, 0, 0, 0)]
)
def test_a_call_with_wrong_arguments_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.take_writes(*arguments)


@pytest.mark.parametrize("level", [None, 0])
@pytest.mark.parametrize("index", [4, 5])
def test_negative_numbers_are_refused(level: int | None, index: int) -> None:
    assert native is not None
    arguments: list[Any] = [RULES, None, b"x", level, 9, 1, 0, 0]
    arguments[index] = -1
    with pytest.raises(ValueError, match="negative"):
        native.take_writes(*arguments)


@pytest.mark.parametrize("level", [None, 0])
def test_data_without_a_usable_request_or_chunk_is_not_taken(level: int | None) -> None:
    assert native is not None
    whole = frame(1, good(Random(1), stream_id=7))
    for data in (b"", b"x", b"x" * 200, whole[:-1], whole, b"KF" + bytes(30)):
        assert native.take_writes(RULES, None, data, level, 1 << 20, 9, 0, 0) == (0, 0, 0, b"", 0, 0, 0)


def test_the_fields_of_the_rules_match_those_that_c_reads() -> None:
    assert native is not None
    assert tuple(native.APPEND_RULES.split()) == AppendRules._fields


@pytest.mark.parametrize("missing", STREAM_ATTRIBUTES)
async def test_a_stream_without_one_of_its_attributes_is_an_error_and_nothing_is_appended(
    make_engine: MakeEngine, missing: str
) -> None:
    assert native is not None
    side = Connected(make_engine)
    await known(side, 7)
    before = list(side.seen())
    stream = side.broker.streams.get(7)
    lacking: Any = SimpleNamespace(**{name: getattr(stream, name) for name in STREAM_ATTRIBUTES if name != missing})
    data = good(Random(1), stream_id=7, producer=PRODUCERS[0], sequence=1)
    rules = AppendRules({7: stream}, print, print, ProducerRecord, 1 << 20, check_payloads=True)
    with pytest.raises(AttributeError, match=missing):
        native.take_writes(rules._replace(streams={7: lacking}), None, data, 0, 0, 9, 0, 0)
    assert list(side.seen()) == before
    assert native.take_writes(rules, None, data, 0, 0, 9, 0, 0)[4] == 1, "the chunk is good"


@pytest.mark.parametrize(
    "held", [b"x", bytes(12 + 1), bytes(8) + b"\x02\0\0\0" + b"\x1a\x7f", bytes(8) + b"\x01\0\0\0\x1a"]
)
def test_malformed_held_answers_are_refused(held: bytes) -> None:
    assert native is not None
    with pytest.raises(ValueError, match="held"):
        native.held_answers(held, 1, [1])


@pytest.mark.parametrize("arguments", [(), (1, 1, []), (b"", "x", []), (b"", 1, ["x"])])
def test_a_call_for_held_answers_with_wrong_arguments_is_refused(arguments: tuple[Any, ...]) -> None:
    assert native is not None
    with pytest.raises(TypeError):
        native.held_answers(*arguments)


@pytest.mark.parametrize("backup_ids", [[], [1], [1, 200, (1 << 32) - 1], list(range(1, 1001))])
@pytest.mark.parametrize("virtual_segment_id", [1, 1 << 33, (1 << 64) - 1])
def test_native_answers_equal_the_encoded_messages(backup_ids: list[int], virtual_segment_id: int) -> None:
    assert native is not None
    response, held = broker_pb2.MultiWriteChunksResponse(), b""
    for number in range(3):
        response.statuses.add(
            entry=number,
            group_id=1 << 62,
            segment_id=number << 30,
            position=64,
            first_record=number,
            durability=PERSISTED,
        )
    data = response.SerializeToString()
    held = (7).to_bytes(8, "little") + len(data).to_bytes(4, "little") + data
    for status in response.statuses:
        status.virtual_segment_id = virtual_segment_id
    response.virtual_segments.add(virtual_segment_id=virtual_segment_id, backup_ids=backup_ids)
    response.all_stored = len(response.statuses) > 1
    expected = b"".join(encode_frame(FrameKind.REPLY, api.MULTI_WRITE_CHUNKS, 7, response, (), BULK_BYTES_MAX))
    assert native.held_answers(held, virtual_segment_id, backup_ids) == expected


def test_durability_levels_have_their_numbers_in_messages() -> None:
    assert (LEADER, REPLICATED, PERSISTED) == (1, 2, 3)
