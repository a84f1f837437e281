"""How the JVM reads a piece: pushed and pulled, from brokers that move, fail and send nonsense.

The readers are the real ones. The Java program ``kera.spark.read.Reading`` controls them for a test, without Spark.
"""

import base64
import contextlib
import itertools
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from kera.client import ChunkBatch, Client
from kera.client.types import StreamDescription
from kera.core.base.ids import Position
from kera.core.base.process import node_id
from kera.core.base.settings import KIB, MIB
from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    VERSIONS,
    Codec,
    encode_payload,
    read_header,
)
from kera.core.format.payload import encode_lean
from kera.core.format.schema import DEFAULT_SCHEMA, schema_to_bytes
from kera.core.push import ALIVE, HEAD, VERSION, PushKind, encode
from kera.local.cluster import RunningCluster
from kera.v1 import common_pb2, push_pb2
from tests.examples import first_quick
from tests.integration.support import BROKER, keeping_cluster, metric
from tests.spark.fake_broker import (
    BROKER_ID,
    CHUNK_BYTES,
    ENTRY,
    SLOT_BYTES,
    SLOTS_AT,
    TIMEOUT_S,
    Answering,
    FakeBroker,
    FakeService,
    chunk,
    run,
    with_checksum,
)
from tests.spark.jvm_harness import Threads, outcome, threads
from tests.spark.support import Kera, wait_until

SEGMENT_BYTES = 64 * KIB
PUSHED_AND_PULLED = pytest.mark.parametrize(
    ("shared_memory", "transport"),
    [("always", "auto"), pytest.param("never", "auto", marks=pytest.mark.slow), ("never", "tcp")],
)
PUSHED_FIRST = pytest.mark.parametrize(
    ("shared_memory", "transport"),
    [
        ("always", "auto"),
        pytest.param("never", "auto", marks=pytest.mark.slow),
        pytest.param("never", "tcp", marks=pytest.mark.slow),
    ],
)
"""Like `PUSHED_AND_PULLED`, but quick tests only push."""
Reason = push_pb2.PushEnd


class Jvm(Threads):
    """The Java program and its readers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process)
        self._names = itertools.count(1)

    def open(
        self,
        piece: dict[str, Any],
        *,
        payload_wanted: bool = True,
        python: Path | str = sys.executable,
        op: str = "open",
    ) -> "Reader":
        """A reader of `piece`; `python` runs its service."""
        reader = Reader(self, f"r{next(self._names)}")
        reader.do(op, piece=piece, payload_wanted=payload_wanted, python=str(python))
        return reader


class Read(NamedTuple):
    """A chunk as it was read; `crc` is over payload and padding."""

    start: Position
    next: Position
    first_record: int
    records: int
    crc: int


class Answer(NamedTuple):
    """The chunks that a read gave."""

    chunks: list[Read]
    in_place: set[bool]
    ended: bool


class Reader:
    """A reader of the JVM."""

    def __init__(self, jvm: Jvm, name: str) -> None:
        self._jvm = jvm
        self._name = name

    def do(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Call an operation. An exception of it becomes a `RuntimeError` with its class and text."""
        return _outcome(self._jvm.ask(self._name, op, **arguments))

    def ask(self, op: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Begin an operation."""
        return self._jvm.ask(self._name, op, **arguments)

    def begin(self, **arguments: Any) -> "Coming":
        """Begin to read on, see `next`."""
        return Coming(self._jvm.ask(self._name, "next", **arguments))

    def next(self, **arguments: Any) -> Answer:
        """Read at most `count` chunks, up to the end or a pause of `within` milliseconds."""
        return self.begin(**arguments).get()

    def close(self) -> dict[str, Any]:
        """Close it; return its counters and losses."""
        return self.do("close")

    def interrupt(self) -> None:
        """Interrupt and end its thread."""
        _outcome(self._jvm.ask(self._name, "interrupt"))


class Coming:
    """Chunks that a reader waits for."""

    def __init__(self, future: Future[dict[str, Any]]) -> None:
        self._future = future

    def get(self) -> Answer:
        """See `Reader.next`."""
        answer = _outcome(self._future)
        chunks = [
            Read(Position(*each["start"]), Position(*each["next"]), each["first_record"], each["records"], each["crc"])
            for each in answer["chunks"]
        ]
        assert all(each["intact"] for each in answer["chunks"])
        return Answer(chunks, {each["in_place"] for each in answer["chunks"]}, answer["ended"])


def _outcome(future: Future[dict[str, Any]]) -> dict[str, Any]:
    return outcome(future, 2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def jvm() -> Iterator[Jvm]:
    with threads("kera.spark.read.Reading") as process:
        yield Jvm(process)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """A broker with memory for 64 small segments, which recovers its chunks after a restart."""
    with keeping_cluster(tmp_path_factory.mktemp("cluster"), segment_bytes=SEGMENT_BYTES) as running:
        yield running


@pytest.fixture
def kera(cluster: RunningCluster) -> Kera:
    return Kera(cast("SparkSession", None), cluster.bootstrap)  # these tests do not need Spark


def fill(kera: Kera, stream: str, size: int, **settings: Any) -> list[ChunkBatch]:
    """Make a stream of `size` bytes; return its chunks as the Python client reads them."""
    kera.create(stream, streamlets=1, **settings)
    kera.run(lambda client: append(client, stream, size, payload="arrow"))
    return kera.run(lambda client: chunks_of(client, stream))


async def append(client: Client, stream: str, size: int, **settings: Any) -> None:
    async with client.producer(chunk_bytes_max=8 * KIB, **settings) as producer:
        await producer.prepare(stream)
        for number in range(size // KIB):
            producer.send(stream, number.to_bytes(4, "little") * (KIB // 4))
            await producer.drain()


async def chunks_of(client: Client, stream: str) -> list[ChunkBatch]:
    async with client.consumer(
        stream, start="earliest", end="latest", shared_memory="never", joined_bytes_max=0
    ) as consumer:
        return [each async for each in consumer.batches()]


def as_read(chunks: list[ChunkBatch]) -> list[Read]:
    return [
        Read(each.start, each.next, each.header.first_record, each.header.record_count, each.header.payload_crc32c)
        for each in chunks
    ]


def describe(kera: Kera, stream: str) -> StreamDescription:
    return kera.run(lambda client: client.admin.describe_stream(stream))


def piece_of(
    kera: Kera, stream: str, chunks: list[ChunkBatch], *, endless: bool = False, **other: Any
) -> dict[str, Any]:
    """A piece with these chunks, and with everything after them if it is endless."""
    description = describe(kera, stream)
    (broker,) = description.brokers.values()
    return piece(
        chunks[0].start,
        None if endless else chunks[-1].next,
        stream=stream,
        stream_id=description.stream_id,
        schema_id=description.schema_id,
        first_record=chunks[0].header.first_record,
        records=0 if endless else sum(each.header.record_count for each in chunks),
        connection={"bootstrap": kera.bootstrap, "files": {}},
        broker={
            "broker_id": broker.broker_id,
            "node_id": broker.node_id,
            "frames_address": broker.frames_address,
            "frames_unix_path": broker.frames_unix_path,
            "push_unix_path": broker.push_unix_path,
        },
        **other,
    )


NOWHERE: dict[str, Any] = {"bootstrap": "", "files": {}}
SETTINGS: dict[str, Any] = {
    "fetch_bytes_max": 64 * KIB,
    "prefetch_bytes_max": MIB,
    "request_timeout_ms": 10_000,
    "connect_timeout_ms": 5_000,
    "verify_checksums": True,
    "transport": "auto",
    "consumer_group": "test",
    "tls": None,
}


def piece(start: Position, end: Position | None, **other: Any) -> dict[str, Any]:
    """A piece; `other` are its fields, and those of its settings."""
    settings = {name: other.pop(name, value) for name, value in SETTINGS.items()}
    return {
        "stream": "s",
        "stream_id": ENTRY.stream_id,
        "streamlet": 0,
        "entry": 0,
        "start": list(start),
        "end": None if end is None else list(end),
        "first_record": 0,
        "records": 0,
        "bytes": 0,
        "typed": False,
        "schema": base64.b64encode(b"").decode(),
        "schema_id": 1,
        "fail_on_data_loss": True,
        "shared_memory": "auto",
        "connection": NOWHERE,
        "settings": settings,
        "hosts": [],
        **other,
    }


# --- a real broker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory_domain", "in_place"), [("eu", True), ("default", False), ("us", False)])
def test_shared_memory_is_read_only_within_its_memory_domain(
    jvm: Jvm, kera: Kera, stream: str, memory_domain: str, in_place: bool
) -> None:
    chunks = fill(kera, stream, 2 * SEGMENT_BYTES, memory_domain="eu")
    for _ in range(2):  # the second time over a kept connection
        reader = jvm.open(piece_of(kera, stream, chunks, memory_domain=memory_domain))
        answer = reader.next()
        assert answer.chunks == as_read(chunks)
        assert answer.in_place == {in_place}
        reader.close()


@PUSHED_AND_PULLED
def test_all_chunks_are_read_as_in_python(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    fill(kera, stream, 5 * SEGMENT_BYTES)
    kera.run(lambda client: append(client, stream, 5 * SEGMENT_BYTES, payload="lean"))
    chunks = kera.run(lambda client: chunks_of(client, stream))
    assert len({each.start[:2] for each in chunks}) > 5
    assert {each.header.version for each in chunks} == set(VERSIONS)
    reader = jvm.open(piece_of(kera, stream, chunks, shared_memory=shared_memory, transport=transport))
    answer = reader.next()
    assert answer.chunks == as_read(chunks)
    assert answer.ended
    in_place = shared_memory == "always"
    assert answer.in_place == {in_place}
    size = sum(each.header.chunk_bytes for each in chunks)
    told = reader.close()
    assert (told["chunks"], told["in_place"], told["pulled"]) == (
        len(chunks),
        size if in_place else 0,
        0 if in_place else size,
    )
    assert told["routes"] == 0


@PUSHED_FIRST
def test_a_range_in_the_middle_gives_only_its_own_chunks(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, 4 * SEGMENT_BYTES)
    for wanted in (chunks[3:-4], chunks[5:6], chunks[-1:]):
        reader = jvm.open(piece_of(kera, stream, wanted, shared_memory=shared_memory, transport=transport))
        assert reader.next().chunks == as_read(wanted)
        reader.close()
    nothing = piece_of(kera, stream, chunks[:1], shared_memory=shared_memory, transport=transport)
    reader = jvm.open({**nothing, "end": nothing["start"]})
    assert reader.next() == ([], set(), True)


def test_consecutive_pieces_share_a_connection_and_leave_no_lease(
    jvm: Jvm, cluster: RunningCluster, kera: Kera, stream: str
) -> None:
    chunks = fill(kera, stream, 4 * SEGMENT_BYTES)
    wait_until(lambda: metric(cluster, "arena_slots_leased") == 0, "leases of others")
    idle = metric(cluster, "push_connections")
    for each in chunks:
        reader = jvm.open(piece_of(kera, stream, [each], shared_memory="always"))
        assert reader.next().chunks == as_read([each])
        reader.close()
    assert metric(cluster, "push_connections") <= max(idle, 1)
    wait_until(lambda: metric(cluster, "arena_slots_leased") == 0, "leases")


def test_only_a_few_of_many_connections_are_kept(jvm: Jvm, cluster: RunningCluster, kera: Kera, stream: str) -> None:
    wanted = piece_of(kera, stream, fill(kera, stream, 8 * KIB), shared_memory="always")
    readers = [jvm.open(wanted) for _ in range(12)]
    for reader in readers:
        assert reader.next(count=1).chunks
    assert metric(cluster, "push_connections") >= 12
    for reader in readers:
        assert reader.next().ended
    wait_until(lambda: metric(cluster, "push_connections") <= 8, "connections that are closed")


def test_a_reader_that_closes_early_leaves_no_lease(jvm: Jvm, cluster: RunningCluster, kera: Kera, stream: str) -> None:
    chunks = fill(kera, stream, 4 * SEGMENT_BYTES)
    reader = jvm.open(piece_of(kera, stream, chunks, shared_memory="always"))
    assert reader.next(count=1).chunks == as_read(chunks[:1])
    assert metric(cluster, "arena_slots_leased") > 0
    reader.close()
    assert reader.close()["chunks"] == 1, "once more does nothing"
    wait_until(lambda: metric(cluster, "arena_slots_leased") == 0, "leases")


@pytest.mark.slow
def test_chunks_are_pulled_when_readers_hold_too_many_slots(
    jvm: Jvm, cluster: RunningCluster, kera: Kera, stream: str
) -> None:
    chunks = fill(kera, stream, 48 * SEGMENT_BYTES)
    piece = piece_of(kera, stream, chunks)
    firsts = {each.start[:2]: each for each in reversed(chunks)}
    held = []
    for first in list(firsts.values())[:40]:  # each holds another segment
        reader = jvm.open(piece_of(kera, stream, [first]))
        assert reader.next(count=1).chunks == as_read([first])
        held.append(reader)
    reader = jvm.open(piece)
    answer = reader.next()
    assert answer.chunks == as_read(chunks)
    assert False in answer.in_place
    assert metric(cluster, 'push_ends_total{reason="pull"}') >= 1
    for each in (reader, *held):
        each.close()
    wait_until(lambda: metric(cluster, "arena_slots_leased") == 0, "leases")


@PUSHED_AND_PULLED
def test_an_endless_piece_gives_records_written_meanwhile(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, SEGMENT_BYTES)
    reader = jvm.open(piece_of(kera, stream, chunks, endless=True, shared_memory=shared_memory, transport=transport))
    assert reader.next(count=len(chunks)).chunks == as_read(chunks)
    assert reader.next(within=50) == ([], set(), False)
    waiting = reader.begin(count=1)
    kera.run(lambda client: append(client, stream, 8 * KIB))
    assert waiting.get().chunks
    kera.run(lambda client: append(client, stream, SEGMENT_BYTES))
    everything = as_read(kera.run(lambda client: chunks_of(client, stream)))
    seen = reader.next(count=len(everything) - len(chunks) - 1)
    assert seen.chunks == everything[len(chunks) + 1 :]
    reader.close()


@PUSHED_FIRST
def test_an_interrupt_ends_the_wait_for_chunks(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, SEGMENT_BYTES)
    reader = jvm.open(piece_of(kera, stream, chunks, endless=True, shared_memory=shared_memory, transport=transport))
    assert reader.next(count=len(chunks)).chunks == as_read(chunks)
    waiting = reader.begin(count=1)
    reader.interrupt()
    with pytest.raises(RuntimeError, match="InterruptedIOException"):
        waiting.get()


@PUSHED_FIRST
def test_a_read_continues_after_the_broker_was_killed_and_restarted(
    jvm: Jvm, cluster: RunningCluster, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, 30 * SEGMENT_BYTES)
    wanted = piece_of(kera, stream, chunks, shared_memory=shared_memory, transport=transport, prefetch_bytes_max=1)
    reader = jvm.open(wanted)
    seen = reader.next(count=5).chunks
    cluster.kill(BROKER)
    coming = reader.begin()
    cluster.restart(BROKER)
    assert seen + coming.get().chunks == as_read(chunks)
    assert reader.close()["routes"] >= 1


def test_a_reader_without_a_broker_asks_the_service(jvm: Jvm, kera: Kera, stream: str) -> None:
    chunks = fill(kera, stream, SEGMENT_BYTES)
    reader = jvm.open({**piece_of(kera, stream, chunks), "broker": None})
    assert reader.next().chunks == as_read(chunks)
    assert reader.close()["routes"] == 1


@PUSHED_FIRST
def test_an_end_beyond_the_stream_is_an_error(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, SEGMENT_BYTES)
    wanted = piece_of(kera, stream, chunks, shared_memory=shared_memory, transport=transport)
    reader = jvm.open({**wanted, "end": [chunks[-1].next.group_id, chunks[-1].next.segment_id + 9, 64]})
    with pytest.raises(
        RuntimeError, match=f"InvalidArgument: .* is beyond the end of streamlet 0 of stream '{stream}'"
    ):
        reader.next()


@PUSHED_FIRST
def test_an_end_beyond_the_stream_is_a_loss_when_losses_are_tolerated(
    jvm: Jvm, kera: Kera, stream: str, shared_memory: str, transport: str
) -> None:
    chunks = fill(kera, stream, SEGMENT_BYTES)
    wanted = piece_of(kera, stream, chunks, shared_memory=shared_memory, transport=transport)
    end = [chunks[-1].next.group_id, chunks[-1].next.segment_id + 9, 64]
    reader = jvm.open({**wanted, "end": end, "fail_on_data_loss": False})
    answer = reader.next()
    assert answer.chunks == as_read(chunks)
    assert answer.ended
    (loss,) = reader.close()["losses"]
    assert "is beyond the end of streamlet 0" in loss


@pytest.mark.parametrize(
    ("broker", "settings", "text"),
    [
        ({"node_id": "elsewhere/1"}, {}, "broker 1 is on another node, elsewhere/1"),
        ({"push_unix_path": ""}, {}, "broker 1 does not push"),
        ({}, {"transport": "tcp"}, "brokers are to be reached by tcp"),
    ],
)
def test_the_error_for_unavailable_shared_memory_names_the_reason(
    jvm: Jvm, kera: Kera, stream: str, broker: dict[str, str], settings: dict[str, str], text: str
) -> None:
    wanted = piece_of(
        kera, stream, fill(kera, stream, SEGMENT_BYTES), shared_memory="always", **cast("dict[str, Any]", settings)
    )
    wanted["broker"] |= broker
    with pytest.raises(RuntimeError, match=f"InvalidArgument: shared_memory is 'always', but {text}"):
        jvm.open(wanted).next()


# --- a broker that the test controls -------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """Sockets need short paths."""
    path = Path(tempfile.mkdtemp(prefix="kera-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def broker(folder: Path) -> Iterator[FakeBroker]:
    with contextlib.closing(FakeBroker(folder)) as made:
        yield made


def at(chunks: int) -> Position:
    """The position after this number of chunks of the first segment."""
    return Position(1, 1, chunks * CHUNK_BYTES)


def place_of(broker: FakeBroker) -> dict[str, Any]:
    return {
        "broker_id": BROKER_ID,
        "node_id": node_id(),
        "frames_address": broker.frames_address,
        "frames_unix_path": "",
        "push_unix_path": str(broker.push_path),
    }


def fake_piece(broker: FakeBroker, chunks: int, **other: Any) -> dict[str, Any]:
    """The first chunks of the first segment."""
    return piece(at(0), at(chunks), broker=place_of(broker), **other)


def records(answer: Answer) -> list[int]:
    return [each.first_record for each in answer.chunks]


def test_the_rest_of_an_overwritten_slot_is_pulled(jvm: Jvm, broker: FakeBroker) -> None:
    chunks = [chunk(10 * number) for number in range(4)]
    broker.put(0, b"".join(chunks))
    reader = jvm.open(fake_piece(broker, 4))
    coming = reader.begin(count=2)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, 4 * CHUNK_BYTES))
    assert records(coming.get()) == [0, 10]
    assert reader.do("intact")["intact"]
    broker.put(0, chunk(990) * 4, generation=2)
    assert not reader.do("intact")["intact"]
    coming = reader.begin()
    answering = broker.frames()
    assert answering.asked_from() == at(2)
    answering.answer(at(4), b"".join(chunks[2:]))
    answer = coming.get()
    assert (records(answer), answer.in_place) == ([20, 30], {False})
    assert pushing.is_gone()
    assert reader.close()["routes"] == 0


def test_a_chunk_overwritten_while_it_was_read_is_pulled_again(jvm: Jvm, broker: FakeBroker) -> None:
    chunks = [chunk(10 * number) for number in range(3)]
    broker.put(0, b"".join(chunks))
    reader = jvm.open(fake_piece(broker, 3))
    coming = reader.begin(count=2)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, 3 * CHUNK_BYTES))
    assert records(coming.get()) == [0, 10]
    broker.put(0, chunk(990) * 3, generation=2)
    reader.do("again")
    coming = reader.begin()
    answering = broker.frames()
    assert answering.asked_from() == at(1)
    answering.answer(at(3), b"".join(chunks[1:]))
    answer = coming.get()
    assert (records(answer), answer.in_place, answer.ended) == ([10, 20], {False}, True)
    assert pushing.is_gone()


def test_a_row_overwritten_before_its_copy_is_pulled_once(jvm: Jvm, broker: FakeBroker) -> None:
    """In real-time mode, rows that were already given must not come again."""
    content = chunk(0)
    count = read_header(content).record_count
    assert count > 2
    broker.put(0, content)
    schema = base64.b64encode(schema_to_bytes(DEFAULT_SCHEMA)).decode()
    endless = {**fake_piece(broker, 1, schema=schema), "end": None}
    reader = jvm.open(endless, op="open_rows")
    coming = reader.ask("row", within=TIMEOUT_S * 1000)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, CHUNK_BYTES))
    assert _outcome(coming)["offset"] == 0
    assert reader.do("row", within=0)["offset"] == 1
    broker.put(0, chunk(990), generation=2)
    coming = reader.ask("row", within=TIMEOUT_S * 1000)
    answering = broker.frames()
    assert answering.asked_from() == at(0)
    answering.answer(at(1), content)
    found = [_outcome(coming)["offset"]]
    found += [reader.do("row", within=0)["offset"] for _ in range(count - 3)]
    assert found == list(range(2, count))


def test_small_chunks_at_hand_are_joined_within_the_bounds_of_the_piece(jvm: Jvm, broker: FakeBroker) -> None:
    """The piece begins and ends within a chunk; one chunk has version 1, and records are missing behind it."""
    versions = {0: LEAN_VERSION, 10: LEAN_VERSION, 20: LEAN_VERSION, 30: ARROW_VERSION, 50: LEAN_VERSION}
    content = [small_chunk(first, version=version) for first, version in versions.items()]
    content += [small_chunk(60), small_chunk(70)]
    *_, last, end = (Position(1, 1, offset) for offset in itertools.accumulate(map(len, content)))
    bounds = {"first_record": 3, "stop": [*last, 76], "records": 27 + 10 + 26}
    schema = base64.b64encode(schema_to_bytes(DEFAULT_SCHEMA)).decode()
    broker.put(0, b"".join(content))
    reader = jvm.open(piece(at(0), end, broker=place_of(broker), schema=schema, **bounds), op="open_batches")
    coming = reader.ask("batch")
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, end.offset))
    pushing.end(Reason.REACHED, end)
    batches = [_outcome(coming)["rows"], *(reader.do("batch")["rows"] for _ in range(3))]
    expected = [range(3, 30), range(30, 40), range(50, 76), range(0)]
    assert batches == [[[number, str(number)] for number in numbers] for numbers in expected]


def small_chunk(first_record: int, *, version: int = LEAN_VERSION) -> bytes:
    """A chunk whose values are the ordinals of its records."""
    numbers = range(first_record, first_record + 10)
    batch = pa.RecordBatch.from_pylist(
        [{"timestamp": 1, "value": b"%d" % number} for number in numbers], DEFAULT_SCHEMA
    )
    payload = encode_lean(batch, Codec.NONE) if version == LEAN_VERSION else encode_payload(batch)
    return chunk(first_record, version=version, payload=payload)


def test_a_slot_overwritten_before_its_first_read_is_pulled(jvm: Jvm, broker: FakeBroker) -> None:
    broker.put(0, b"\xff" * CHUNK_BYTES, generation=2)
    coming = jvm.open(fake_piece(broker, 1)).begin()
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, CHUNK_BYTES))
    answering = broker.frames()
    assert answering.asked_from() == at(0)
    answering.answer(at(1), chunk(0))
    assert records(coming.get()) == [0]


def test_runs_are_taken_and_released_once_and_the_connection_is_reused(jvm: Jvm, broker: FakeBroker) -> None:
    chunks = [chunk(10 * number) for number in range(4)]
    broker.put(0, b"".join(chunks[:2]))
    broker.put(1, b"".join(chunks[2:]))
    reader = jvm.open(fake_piece(broker, 4))
    coming = reader.begin()
    pushing = broker.greet()
    lane = pushing.subscribed()
    assert (lane.start.position, lane.end.position) == (0, 4 * CHUNK_BYTES)
    first, second = run(0, 2 * CHUNK_BYTES), run(1, 2 * CHUNK_BYTES, start=at(2))
    pushing.push(first)
    pushing.push(second)
    pushing.end(Reason.REACHED, at(4))
    assert records(coming.get()) == [0, 10, 20, 30]
    pushing.returned(4 * CHUNK_BYTES, [0, 1])
    coming = jvm.open(fake_piece(broker, 2)).begin()
    again = pushing.subscribed()
    assert again.lane != lane.lane
    pushing.push(first._replace(lane=again.lane))
    pushing.end(Reason.REACHED, at(2), lane=again.lane)
    assert records(coming.get()) == [0, 10]
    pushing.returned(2 * CHUNK_BYTES, [0])


def test_a_reader_that_closes_early_closes_its_connection(jvm: Jvm, broker: FakeBroker) -> None:
    broker.put(0, chunk(0) + chunk(10))
    reader = jvm.open(fake_piece(broker, 4))
    coming = reader.begin(count=1)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, 2 * CHUNK_BYTES))
    assert records(coming.get()) == [0]
    reader.close()
    assert pushing.is_gone()


@pytest.mark.parametrize(
    "odd",
    first_quick(
        [
            {"version": VERSION + 1},
            {"slots": 5},
            {"slots": 0},
            {"slot_bytes": 0},
            {"slot_bytes": (1 << 32) - 1, "slots": (1 << 32) - 1, "arena_bytes": (1 << 63) - 1},
            {"row_bytes": 4},
            {"rows_at": 4100},
            {"rows_at": 1 << 63},
            {"slots_at": (1 << 64) - 64},
            {"arena_bytes": 1 << 62, "rows_at": 1 << 61},
            {"arena_path": "/nowhere/at all"},
        ],
        4,
    ),
)
def test_a_reader_pulls_after_an_unfit_push_greeting(jvm: Jvm, broker: FakeBroker, odd: dict[str, Any]) -> None:
    coming = jvm.open(fake_piece(broker, 1)).begin()
    broker.greet(**odd)
    answering = broker.frames()
    answering.asked()
    answering.answer(at(1), chunk(0))
    answer = coming.get()
    assert (records(answer), answer.in_place) == ([0], {False})
    coming = jvm.open(fake_piece(broker, 1, shared_memory="always")).begin()
    broker.greet(**odd)
    with pytest.raises(RuntimeError, match=r"ProtocolError: .*(not a push|not as it says)|cannot map the broker"):
        coming.get()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="no message"),
        pytest.param(HEAD.pack((1 << 20) + 1, PushKind.HELLO), id="too long"),
        pytest.param(encode(PushKind.HELLO, b"\x0a\xff\xff\xff\xff\x0f"), id="cut short"),
        pytest.param(encode(PushKind.RUNS, b""), id="no greeting"),
    ],
)
def test_a_reader_pulls_after_bytes_that_are_no_push_greeting(jvm: Jvm, broker: FakeBroker, data: bytes) -> None:
    coming = jvm.open(fake_piece(broker, 1)).begin()
    assert broker.greet_with(data).is_gone()
    answering = broker.frames()
    answering.asked()
    answering.answer(at(1), chunk(0))
    assert records(coming.get()) == [0]


@pytest.mark.parametrize(
    "odd",
    first_quick(
        [
            {"slot": 4},
            {"slot": (1 << 32) - 1},
            {"lane": 2},
            {"arena_offset": SLOTS_AT - 64},
            {"arena_offset": SLOTS_AT + SLOT_BYTES - 64},
            {"arena_offset": (1 << 63) - 64},
            {"arena_offset": (1 << 64) - 64},
            {"length_bytes": 0},
            {"length_bytes": SLOT_BYTES + 64},
            {"length_bytes": (1 << 32) - 1},
            {"group_id": 0},
            {"group_id": 1 << 63},
            {"offset": (1 << 31) - 64},
            {"offset": 1 << 31},
        ],
        5,
    ),
)
def test_an_impossible_run_ends_the_connection(jvm: Jvm, broker: FakeBroker, odd: dict[str, int]) -> None:
    broker.put(0, chunk(0))
    for shared_memory in ("auto", "always"):
        coming = jvm.open(fake_piece(broker, 1, shared_memory=shared_memory)).begin()
        pushing = broker.greet()
        pushing.subscribed()
        pushing.push(run(0, CHUNK_BYTES)._replace(**odd))
        assert pushing.is_gone()
        if shared_memory == "always":
            with pytest.raises(RuntimeError, match="KeraException: ProtocolError"):
                coming.get()
        else:
            answering = broker.frames()
            answering.asked()
            answering.answer(at(1), chunk(0))
            assert records(coming.get()) == [0]


def damaged(at: int) -> bytes:
    data = bytearray(chunk(0))
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (damaged(0), "no chunk at offset 0"),
        (damaged(20), "chunk header at offset 0 does not match its checksum"),
        (damaged(100), "chunk placement at offset 0 does not match its checksum"),
        (damaged(HEADER_BYTES), "chunk payload at offset 0 does not match its checksum .stream 7, streamlet 0"),
        (damaged(CHUNK_BYTES - 1), "chunk payload at offset 0 does not match its checksum"),
        (chunk(0, version=3), "chunk at offset 0 has format version 3, this program knows 2 and older ones"),
        (chunk(0)[:64], "chunk header cut short at offset 0"),
        (chunk(0)[:-64], "chunk at offset 0 is cut short: 960 of 1024 payload bytes"),
    ],
)
@pytest.mark.parametrize("pushed", first_quick([True, False], 1))
def test_a_damaged_chunk_is_detected(jvm: Jvm, broker: FakeBroker, data: bytes, text: str, *, pushed: bool) -> None:
    broker.put(0, data)
    coming = jvm.open(fake_piece(broker, 1, shared_memory="always" if pushed else "never")).begin()
    if pushed:
        pushing = broker.greet()
        pushing.subscribed()
        pushing.push(run(0, len(data)))
    else:
        answering = broker.frames()
        answering.asked()
        answering.answer(at(1), data)
    with pytest.raises(RuntimeError, match=f"CorruptChunk: {text}"):
        coming.get()


@pytest.mark.parametrize("how", [{"payload_wanted": False}, {"verify_checksums": False}])
def test_payloads_are_not_verified_when_unwanted_or_switched_off(
    jvm: Jvm, broker: FakeBroker, how: dict[str, bool]
) -> None:
    broker.put(0, damaged(HEADER_BYTES))
    settings = {name: value for name, value in how.items() if name in SETTINGS}
    reader = jvm.open(fake_piece(broker, 1, **settings), payload_wanted=how.get("payload_wanted", True))
    coming = reader.begin(count=1)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, CHUNK_BYTES))
    assert records(coming.get()) == [0]
    reader.close()


def test_a_chunk_with_an_unknown_schema_is_an_error(jvm: Jvm, broker: FakeBroker) -> None:
    broker.put(0, chunk(0, schema_id=0))
    coming = jvm.open(fake_piece(broker, 1)).begin()
    pushing = broker.greet()
    pushing.subscribed()
    pushing.push(run(0, CHUNK_BYTES))
    with pytest.raises(RuntimeError, match=r"SchemaMismatch: chunk has schema 0, stream '.*' has none of that number"):
        coming.get()


def test_a_chunk_larger_than_the_requested_bytes_is_read(jvm: Jvm, broker: FakeBroker) -> None:
    large = chunk(0, payload_bytes=3 * MIB)
    end = Position(1, 2, CHUNK_BYTES)
    reader = jvm.open({**fake_piece(broker, 1, shared_memory="never"), "end": list(end)})
    coming = reader.begin()
    answering = broker.frames()
    assert answering.asked().bytes_max == 64 * KIB
    answering.answer(Position(1, 1, len(large)), large)
    assert answering.asked_from() == Position(1, 1, len(large)), "before anybody has looked at the chunks"
    answering.answer(end, chunk(10, segment=2))
    starts = [(each.start, each.next) for each in coming.get().chunks]
    assert starts == [(at(0), Position(1, 1, len(large))), (Position(1, 2, 0), end)]


def test_chunks_behind_the_end_are_left_out(jvm: Jvm, broker: FakeBroker) -> None:
    coming = jvm.open(fake_piece(broker, 1, shared_memory="never")).begin()
    answering = broker.frames()
    answering.asked()
    answering.answer(at(2), chunk(0) + chunk(10))
    assert records(coming.get()) == [0]


# --- requests to the service ---------------------------------------------------------------------------------


def unavailable(text: str) -> dict[str, Any]:
    return {"error": {"type": "Unavailable", "message": text, "retriable": True}}


def failed(service: FakeService) -> dict[str, Any]:
    """The first failure reported to the service."""
    (route,) = [each["params"] for each in service.asked if each["method"] == "route"]
    assert route["failed"]["broker_id"] == BROKER_ID
    return cast("dict[str, Any]", route["failed"]["error"])


MALFORMED = {
    "no frame": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "no checksum": b"KF\x01\x02" + bytes(28),
    "head too long": with_checksum(b"KF\x01\x02" + bytes(12) + ((4 << 20) + 1).to_bytes(4, "little") + bytes(12)),
    "bulk too long": with_checksum(b"KF\x01\x02" + bytes(16) + ((64 << 20) + 1).to_bytes(4, "little") + bytes(8)),
    "other version": with_checksum(b"KF\x02\x02" + bytes(28)),
    "no reply": with_checksum(b"KF\x01\x01" + bytes(28)),
}


@pytest.mark.parametrize("data", first_quick(MALFORMED.values(), 2), ids=MALFORMED)
def test_bytes_instead_of_a_frame_are_a_failure_of_the_broker(
    jvm: Jvm, broker: FakeBroker, folder: Path, data: bytes
) -> None:
    service = FakeService(folder, unavailable("enough"))
    reader = jvm.open(fake_piece(broker, 1, shared_memory="never"), python=service.program)
    coming = reader.begin()
    answering = broker.frames()
    answering.asked()
    answering.send(data)
    with pytest.raises(RuntimeError, match="Unavailable: enough"):
        coming.get()
    assert (failed(service)["code"], failed(service)["retriable"]) == ("unavailable", True)


@pytest.mark.parametrize(
    "odd",
    first_quick(
        [
            {"following": at(1), "data": chunk(0), "length": 64},
            {"following": at(1), "data": chunk(0), "length": (1 << 32) - 1},
            {"following": at(0), "data": chunk(0)},
            {"following": Position(0, 0, 0), "data": chunk(0)},
            {"following": at(1), "data": chunk(0), "request_id": 77},
        ],
        2,
    ),
)
def test_an_impossible_answer_is_a_failure_of_the_broker(
    jvm: Jvm, broker: FakeBroker, folder: Path, odd: dict[str, Any]
) -> None:
    service = FakeService(folder, unavailable("enough"))
    reader = jvm.open(fake_piece(broker, 1, shared_memory="never"), python=service.program)
    coming = reader.begin()
    answering = broker.frames()
    answering.asked()
    answering.answer(**odd)
    with pytest.raises(RuntimeError, match="Unavailable: enough"):
        coming.get()
    assert failed(service)["code"] == "unavailable"


@pytest.mark.parametrize("how", ["lane", "result", "frame"])
def test_errors_of_a_broker_reach_the_service_unchanged(jvm: Jvm, broker: FakeBroker, folder: Path, how: str) -> None:
    service = FakeService(folder, {"error": {"type": "DataLost", "message": "gone", "retriable": False}})
    error = common_pb2.Error(code="data_lost", message="gone", attributes={"available": "[1, 2, 0]"})
    wanted = fake_piece(broker, 1, shared_memory="always" if how == "lane" else "never")
    coming = jvm.open(wanted, python=service.program).begin()
    if how == "lane":
        pushing = broker.greet()
        pushing.subscribed()
        pushing.end(Reason.FAILED, at(0), error=error)
    else:
        answering = broker.frames()
        answering.asked()
        if how == "result":
            answering.answer(at(0), error=error)
        else:
            answering.refuse(error)
    with pytest.raises(RuntimeError, match="KeraException: DataLost: gone"):
        coming.get()
    attributes = {"available": "[1, 2, 0]"}
    assert failed(service) == {"code": "data_lost", "message": "gone", "retriable": False, "attributes": attributes}


def test_a_reader_follows_the_service_and_reports_its_losses(jvm: Jvm, broker: FakeBroker, folder: Path) -> None:
    service = FakeService(
        folder,
        {"result": {"broker": place_of(broker), "position": list(at(0))}},
        {"result": {"broker": place_of(broker), "position": list(at(2)), "lost": "a chunk was lost"}},
        {"result": {"end": True, "lost": "the rest was lost"}},
    )
    broker.put(0, chunk(0))
    broker.put(1, chunk(20))
    wanted = {**fake_piece(broker, 9), "broker": None, "fail_on_data_loss": False}
    reader = jvm.open(wanted, python=service.program)
    coming = reader.begin()
    pushing = broker.greet()
    assert pushing.subscribed().start.position == 0
    pushing.push(run(0, CHUNK_BYTES))
    pushing.hang_up()
    pushing = broker.greet()
    assert pushing.subscribed().start.position == 2 * CHUNK_BYTES
    pushing.push(run(1, CHUNK_BYTES, start=at(2)))
    pushing.end(Reason.MOVED, at(3))
    answer = coming.get()
    assert (records(answer), answer.ended) == ([0, 20], True)
    told = reader.close()
    assert (told["routes"], told["losses"]) == (3, ["a chunk was lost", "the rest was lost"])
    first, second, third = [each["params"] for each in service.asked]
    assert [each["position"] for each in (first, second, third)] == [list(at(0)), list(at(1)), list(at(3))]
    assert [each["progressed"] for each in (first, second, third)] == [False, True, True]
    assert (first["failed"], third["failed"]) == (None, None)
    assert second["failed"]["error"]["code"] == "unavailable"
    assert "was lost" in second["failed"]["error"]["message"]
    assert {second["reader"], third["reader"]} == {first["reader"]}
    assert first == {
        "reader": first["reader"],
        "connection": NOWHERE,
        "token": None,
        "stream": "s",
        "stream_id": ENTRY.stream_id,
        "streamlet": 0,
        "entry": 0,
        "position": list(at(0)),
        "end": list(at(9)),
        "fail_on_data_loss": False,
        "shared_memory": "auto",
        "progressed": False,
        "failed": None,
    }


@pytest.mark.parametrize("shared_memory", ["always", "never"])
def test_a_broker_without_an_answer_in_time_has_failed(
    jvm: Jvm, broker: FakeBroker, folder: Path, shared_memory: str
) -> None:
    service = FakeService(folder, unavailable("enough"))
    wanted = fake_piece(broker, 1, shared_memory=shared_memory, request_timeout_ms=100)
    coming = jvm.open(wanted, python=service.program).begin()
    if shared_memory == "always":
        pushing = broker.greet()
        pushing.subscribed()
    else:
        answering = broker.frames()
        answering.asked()
    with pytest.raises(RuntimeError, match="Unavailable: enough"):
        coming.get()
    assert "within 0.1 s" in failed(service)["message"]


def test_a_broker_without_signs_of_life_has_failed(jvm: Jvm, broker: FakeBroker, folder: Path) -> None:
    service = FakeService(folder, unavailable("enough"))
    wanted = {**fake_piece(broker, 1, shared_memory="always"), "end": None}
    coming = jvm.open(wanted, python=service.program).begin()
    pushing = broker.greet(alive_interval_ms=20)
    pushing.subscribed()
    with pytest.raises(RuntimeError, match="Unavailable: enough"):
        coming.get()
    assert "has said nothing for" in failed(service)["message"]


def test_a_connection_with_signs_of_life_is_reused(jvm: Jvm, broker: FakeBroker) -> None:
    broker.put(0, chunk(0))
    reader = jvm.open(fake_piece(broker, 1))
    coming = reader.begin()
    pushing = broker.greet(alive_interval_ms=1000)
    pushing.subscribed()
    pushing.send(ALIVE)
    pushing.push(run(0, CHUNK_BYTES))
    pushing.send(ALIVE)
    pushing.end(Reason.REACHED, at(1))
    assert records(coming.get()) == [0]
    pushing.returned(CHUNK_BYTES, [0])
    pushing.send(3 * ALIVE)
    coming = jvm.open(fake_piece(broker, 1)).begin()
    again = pushing.subscribed()
    pushing.push(run(0, CHUNK_BYTES, lane=again.lane))
    pushing.end(Reason.REACHED, at(1), lane=again.lane)
    assert records(coming.get()) == [0]


def test_a_missing_push_socket_is_a_failure_only_when_shared_memory_is_required(
    jvm: Jvm, broker: FakeBroker, folder: Path
) -> None:
    service = FakeService(folder, unavailable("enough"))
    broker.push_path.unlink()
    coming = jvm.open(fake_piece(broker, 1), python=service.program).begin()
    answering = broker.frames()
    answering.asked()
    answering.answer(at(1), chunk(0))
    assert records(coming.get()) == [0]
    assert service.asked == []
    with pytest.raises(RuntimeError, match="Unavailable: enough"):
        jvm.open(fake_piece(broker, 1, shared_memory="always"), python=service.program).next()
    assert "cannot connect to" in failed(service)["message"]


def test_a_broker_that_refuses_the_connection_has_failed(jvm: Jvm, broker: FakeBroker, folder: Path) -> None:
    service = FakeService(folder, unavailable("enough"))
    wanted = fake_piece(broker, 1, shared_memory="never")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        wanted["broker"]["frames_address"] = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RuntimeError, match="Unavailable: enough"):
            jvm.open(wanted, python=service.program).next()
    assert "Connection refused" in failed(service)["message"]


def test_a_broker_without_frames_is_an_error(jvm: Jvm, broker: FakeBroker) -> None:
    wanted = fake_piece(broker, 1, shared_memory="never")
    wanted["broker"]["frames_address"] = ""
    with pytest.raises(RuntimeError, match="InvalidArgument: broker 5 does not offer transport 'auto'"):
        jvm.open(wanted).next()


def test_an_endless_piece_returns_from_pulling_to_pushing(jvm: Jvm, broker: FakeBroker) -> None:
    broker.put(0, chunk(20))
    reader = jvm.open({**fake_piece(broker, 1), "end": None})
    coming = reader.begin(count=3)
    pushing = broker.greet()
    pushing.subscribed()
    pushing.end(Reason.PULL, at(0))
    answering = broker.frames()
    answering.asked()
    answering.answer(at(1), chunk(0))
    assert answering.asked_from() == at(1)
    answering.answer(at(2), chunk(10))
    answering_on = threading.Thread(target=_answer_nothing, args=(answering, at(2)), daemon=True)
    answering_on.start()
    lane = pushing.subscribed()
    assert lane.start.position == 2 * CHUNK_BYTES
    pushing.push(run(0, CHUNK_BYTES, lane=lane.lane, start=at(2)))
    answer = coming.get()
    assert (records(answer), answer.in_place) == ([0, 10, 20], {True, False})
    reader.close()
    answering.hang_up()
    answering_on.join(TIMEOUT_S)


def _answer_nothing(answering: Answering, position: Position) -> None:
    """Answer without records until the connection ends."""
    with contextlib.suppress(AssertionError, OSError):
        while True:
            answering.asked()
            answering.answer(position)
