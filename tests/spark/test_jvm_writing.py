"""How the JVM writes: the same chunks as Python, each row once, to brokers that move, fail and send nonsense.

The writers are the real ones. The Java program ``kera.spark.write.Writing`` controls them for tests, without Spark.
"""

import base64
import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import BinaryType, StructType

from kera.client import Client
from kera.client.producing.encoding.partitioner import streamlet_of
from kera.core.base.settings import MIB
from kera.core.format.chunk import HEADER_BYTES, LEAN_VERSION, ChunkHeader, Codec, padded, verify_chunk
from kera.core.format.lean import encode
from kera.core.format.payload import open_payload
from kera.core.format.record_batch import DECOMPRESSED_BYTES_MAX
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.local.cluster import RunningCluster
from kera.spark_connector.service.writes import open_write, rows_as_json
from kera.v1 import common_pb2
from tests.examples import examples, first_quick
from tests.spark.fake_broker import TIMEOUT_S, Answering, FakeBroker, FakeService
from tests.spark.jvm_harness import Threads, outcome, threads
from tests.spark.support import Kera, numbers, wait_until

STREAM_ID = 7
PRODUCER_ID = (1 << 64) - 5
EPOCH = 3
VALUES = "value binary"
STAYS_S = 3.0
"""A write that takes longer than this waits until everything is sent."""
CUT_OFF_ATTEMPTS = 10
BOTH = "keys array<string>, key string, value binary"

Row = list[Any]


class Writer:
    """A writer of the JVM."""

    def __init__(self, jvm: Threads, name: str) -> None:
        self._jvm = jvm
        self._name = name

    def begin(self, op: str, **arguments: Any) -> Future[dict[str, Any]]:
        """Begin an operation."""
        return self._jvm.ask(self._name, op, **arguments)

    def do(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Call an operation. An exception of it becomes a `RuntimeError` with its class and text."""
        return done(self.begin(op, **arguments))

    def interrupt(self) -> None:
        """Interrupt and end its thread."""
        self.do("interrupt")


def done(future: Future[dict[str, Any]]) -> dict[str, Any]:
    return outcome(future, 2 * TIMEOUT_S)


class Writers:
    """Makes writers to brokers that a test plays."""

    def __init__(self, jvm: Threads, folder: Path, broker: FakeBroker) -> None:
        self._jvm = jvm
        self._folder = folder
        self._names = itertools.count(1)
        self.broker = broker
        self.service: FakeService

    def open(
        self, columns: str, *answers: dict[str, Any], streamlets: int = 1, keyless: int = 0, **target: Any
    ) -> Writer:
        """A writer of rows with these columns; the service gives exactly these answers."""
        self.service = FakeService(self._folder, *answers)
        writer = Writer(self._jvm, f"{self._folder}-{next(self._names)}")
        known = {
            "connection": {"bootstrap": "nowhere:1", "files": {}},
            "stream": "s",
            "stream_id": STREAM_ID,
            "schema_id": 1,
            "codec": 0,
            "streamlets": streamlets,
            "chunk_bytes": MIB,
            "chunk_bytes_max": 8 * MIB,
            "epoch_us": 0,
            "room": "a segment",
            "request_timeout_ms": 10_000,
            "connect_timeout_ms": 5_000,
            "transport": "auto",
            "brokers": [at(self.broker)],
            "owners": [1] * streamlets,
        }
        writer.do(
            "open",
            columns=columns,
            target={**known, **target},
            producer_id=PRODUCER_ID - (1 << 64),
            producer_epoch=EPOCH,
            keyless=keyless,
            python=str(self.service.program),
        )
        return writer

    def threads(self) -> int:
        """The number of threads in the JVM, without that of a new writer."""
        return int(Writer(self._jvm, "threads").do("threads")["threads"])

    def due(self) -> int:
        """The number of threads that send due chunks."""
        return int(Writer(self._jvm, "threads").do("due")["due"])

    def asked(self, method: str) -> list[dict[str, Any]]:
        """The parameters of the requests to the service with this method."""
        return [each["params"] for each in self.service.asked if each["method"] == method]


def at(broker: FakeBroker, number: int = 1) -> dict[str, Any]:
    return {"broker_id": number, "frames_address": broker.frames_address}


def moved_to(broker: FakeBroker, number: int = 1, streamlets: int = 1) -> dict[str, Any]:
    """The service's answer about failed streamlets."""
    return {"result": {"brokers": [at(broker, number)], "owners": [number] * streamlets}}


def found(batch: pa.RecordBatch | None, *, timed: bool = False) -> dict[str, Any]:
    """The service's answer about a stored chunk."""
    rows = None if batch is None else rows_as_json(batch, timed=timed)
    return {"result": {"rows": rows, "end": [1, 1, 4096]}}


def refused(kind: str, message: str) -> dict[str, Any]:
    """An error of the service that ends a task."""
    return {"error": {"type": kind, "message": message, "retriable": False}}


@pytest.fixture(scope="module")
def jvm() -> Iterator[Threads]:
    with threads("kera.spark.write.Writing") as process:
        yield Threads(process)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    made = FakeBroker(tmp_path)
    yield made
    made.close()


@pytest.fixture
def other_broker(tmp_path: Path) -> Iterator[FakeBroker]:
    (tmp_path / "other").mkdir()
    made = FakeBroker(tmp_path / "other")
    yield made
    made.close()


@pytest.fixture
def writers(jvm: Threads, tmp_path: Path, broker: FakeBroker) -> Writers:
    return Writers(jvm, tmp_path, broker)


def text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def values(*numbers: int) -> list[Row]:
    return [[text(b"%d" % number)] for number in numbers]


def read(chunk: bytes) -> tuple[ChunkHeader, pa.RecordBatch]:
    """Read a chunk with all the checks of a broker."""
    header = verify_chunk(memoryview(chunk))
    assert (header.stream_id, header.producer_id, header.producer_epoch) == (STREAM_ID, PRODUCER_ID, EPOCH)
    assert (header.version, header.schema_id, header.flags) == (LEAN_VERSION, 1, min(header.codec, 1))
    assert len(chunk) == HEADER_BYTES + padded(header.payload_bytes)
    payload = pa.py_buffer(chunk).slice(HEADER_BYTES, header.payload_bytes)
    return header, open_payload(payload, DEFAULT_SCHEMA, header)


def numbers_in(chunk: bytes) -> list[int]:
    return [int(value) for value in read(chunk)[1].column("value").to_pylist()]


def rows_of(*numbers: int) -> pa.RecordBatch:
    """Rows as Python's writer stores them."""
    return records([(0, None, b"%d" % number, None) for number in numbers])


def records(rows: list[tuple[int, Any, Any, Any]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, DEFAULT_SCHEMA, strict=True)],
        schema=DEFAULT_SCHEMA,
    )


# --- chunks ------------------------------------------------------------------------------------------------


def some_rows(seed: int, count: int) -> list[tuple[int, Any, Any, Any]]:
    """Rows with random properties per column."""
    dice = random.Random(seed)
    longest = dice.choice([0, 1, 9, 300, 70_000 // max(1, count // 20)])
    same, nulls = dice.random() < 0.3, dice.choice([0.0, 0.2, 1.0])
    spread = dice.choice([1, 200, 60_000, 1 << 31, 1 << 40])
    has_keys, has_headers = dice.random() < 0.7, dice.random() < 0.5

    def blob() -> bytes:
        return dice.randbytes(longest if same else dice.randint(0, longest))

    def maybe(made: Any) -> Any:
        return None if dice.random() < nulls else made

    return [
        (
            1_700_000_000_000_000 + dice.randrange(spread),
            maybe([blob() for _ in range(dice.choice([1, 1, 0, 3]))]) if has_keys else None,
            maybe(blob()),
            maybe([(f"h\u00e9{n}", maybe(blob())) for n in range(dice.randint(0, 2))]) if has_headers else None,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("codec", "count"),
    [
        (Codec.NONE, 1),
        pytest.param(Codec.NONE, 7, marks=pytest.mark.slow),
        pytest.param(Codec.NONE, 1024, marks=pytest.mark.slow),
        (Codec.NONE, 1025),
        (Codec.LZ4, 300),
        pytest.param(Codec.ZSTD, 300, marks=pytest.mark.slow),
    ],
)
def test_chunks_are_byte_for_byte_the_same_as_in_python(writers: Writers, codec: Codec, count: int) -> None:
    """Compressed payloads may differ in their bytes, and only their contents are compared."""
    for seed in range(examples(30, quick=4)):
        rows = some_rows(seed, count)
        headers = "array<struct<key: string, value: binary>>"
        writer = writers.open(
            f"timestamp timestamp, keys array<binary>, value binary, headers {headers}",
            chunk_bytes=256 * MIB,
            codec=int(codec),
        )
        writer.do(
            "write",
            rows=[
                [
                    time_us,
                    None if keys is None else [text(key) for key in keys],
                    text(value),
                    None if pairs is None else [[text(name.encode()), text(content)] for name, content in pairs],
                ]
                for time_us, keys, value, pairs in rows
            ],
        )
        committing = writer.begin("commit")
        connection = writers.broker.frames()
        chunk = connection.asked_to_write()
        connection.status()
        assert done(committing)["appended"] == count
        header, batch = read(chunk)
        expected = records(rows)
        assert batch.equals(expected)
        payload = chunk[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        assert header.codec == codec
        if codec is Codec.NONE:
            assert payload == encode(expected, None, bytes_max=DECOMPRESSED_BYTES_MAX), seed
        times = [row[0] for row in rows]
        assert (header.min_timestamp_us, header.max_timestamp_us) == (min(times), max(times))
        connection.hang_up()


@pytest.mark.parametrize(
    ("columns", "row", "expected"),
    [
        ("value string, key binary", [text(b"v"), text(b"k")], ([b"k"], b"v", None)),
        ("value binary, key string", [None, None], (None, None, None)),
        (BOTH, [[text(b"a"), text(b"b")], text(b"k"), None], ([b"k", b"b"], None, None)),
        (BOTH, [[text(b"a"), text(b"b")], None, None], ([b"a", b"b"], None, None)),
        (BOTH, [None, text(b"k"), None], ([b"k"], None, None)),
        (BOTH, [[], None, None], ([], None, None)),
        (
            "headers map<string, binary>, value binary",
            [[[text(b"h"), text(b"i")], [text(b"x"), None]], None],
            (None, None, [("h", b"x"), ("i", None)]),
        ),
        ("entry int, offset bigint, value binary", [1, 2, text(b"v")], (None, b"v", None)),
    ],
)  # fmt: skip
def test_columns_of_rows_become_columns_of_records(
    writers: Writers, columns: str, row: Row, expected: tuple[Any, Any, Any]
) -> None:
    writer = writers.open(columns)
    writer.do("write", rows=[row])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    header, batch = read(connection.asked_to_write())
    connection.status()
    done(committing)

    assert tuple(batch.column(name)[0].as_py() for name in ("keys", "value", "headers")) == expected
    (time_us,) = batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert time_us == header.created_us == header.min_timestamp_us, "those without a time are of when they are written"


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        ("value binary, timestamp timestamp", [None, None], "SchemaMismatch: stream 's': column 'timestamp' takes no"),
        ("value binary, keys array<binary>", [None, [None]], "SchemaMismatch: column 'keys' has a null among the keys"),
        (
            "value binary, headers array<struct<key: string, value: binary>>",
            [None, [[None, None]]],
            "SchemaMismatch: column 'headers' has a header without a key",
        ),
        (
            "value binary, headers map<string, binary>",
            [None, [[text(b"\xff")], [None]]],
            "column 'headers' has a key that is not UTF-8",
        ),
        ("value binary, streamlet int", [None, 2], "StreamletOutOfRange: stream 's' has streamlets 0 to 1, not 2"),
        ("value binary, streamlet int", [None, -1], "StreamletOutOfRange: stream 's' has streamlets 0 to 1, not -1"),
        ("value binary", [text(bytes(MIB))], "RecordTooLarge: record of 1048768 bytes does not fit into a segment"),
    ],
)
def test_values_that_do_not_fit_are_errors(writers: Writers, columns: str, row: Row, message: str) -> None:
    writer = writers.open(columns, streamlets=2, chunk_bytes=64 << 10, chunk_bytes_max=MIB)
    with pytest.raises(RuntimeError, match=message):
        writer.do("write", rows=[row])


def test_rows_go_to_the_same_streamlets_as_in_python(writers: Writers) -> None:
    writer = writers.open("key binary, streamlet int, value binary", streamlets=5, keyless=3)
    keys = [b"k%d" % number for number in range(50)]
    writer.do("write", rows=[[text(key), None, text(key)] for key in keys])
    writer.do("write", rows=[[None, None, text(b"keyless")], [text(b"k1"), 4, text(b"told")], [text(b""), None, None]])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    there: dict[int, list[bytes]] = {}
    for _ in range(5):
        header, batch = read(connection.asked_to_write())
        there[header.streamlet_id] = batch.column("value").to_pylist()
        connection.status()
    assert done(committing)["appended"] == 53
    assert there.pop(3)[-1] == b"keyless"
    assert there.pop(4)[-1] == b"told"
    assert there.pop(0)[-1] is None
    assert there == {each: [key for key in keys if streamlet_of(key, 5) == each] for each in (1, 2)}


@pytest.mark.parametrize("streamlets", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_equal_rows_are_cut_into_equal_chunks(writers: Writers, streamlets: int) -> None:
    dice = random.Random(streamlets)
    rows = [[text(dice.randbytes(dice.choice([10, 100, 3_000]))), text(dice.randbytes(4))] for _ in range(2_000)]
    seen = []
    for step in (2_000, 7):
        writer = writers.open("value binary, key binary", streamlets=streamlets, chunk_bytes=64 << 10)
        for first in range(0, len(rows), step):
            writer.begin("write", rows=rows[first : first + step])
        committing = writer.begin("commit")
        connection = writers.broker.frames()
        headers: list[ChunkHeader] = []
        while sum(header.record_count for header in headers) < len(rows):
            headers.append(read(connection.asked_to_write())[0])
            connection.status()
        assert done(committing)["appended"] == len(rows)
        connection.hang_up()
        assert max(header.chunk_bytes for header in headers) <= 128 << 10
        seen.append(sorted((header.streamlet_id, header.sequence, header.record_count) for header in headers))
    assert seen[0] == seen[1]
    assert len(seen[0]) > 10


# --- right and wrong answers of a broker ----------------------------------------------------------------------


def test_a_task_without_rows_makes_no_request(writers: Writers) -> None:
    told = writers.open(VALUES).do("commit")
    assert (told["appended"], told["found"], told["surplus"]) == (0, 0, 0)
    assert writers.service.asked == []


def test_one_chunk_of_each_streamlet_is_in_flight(writers: Writers) -> None:
    writer = writers.open("value binary, streamlet int", streamlets=2, chunk_bytes=1000)
    rows = [[text(bytes(600)), number % 2] for number in range(8)]
    committing = [writer.begin("write", rows=rows), writer.begin("commit")][1]
    connection = writers.broker.frames()
    first = connection.asked_to_write()
    first_id = connection.request_id
    second = connection.asked_to_write()
    assert {read(first)[0].streamlet_id, read(second)[0].streamlet_id} == {0, 1}
    connection.status()
    third = connection.asked_to_write()
    assert (read(third)[0].streamlet_id, read(third)[0].sequence) == (read(second)[0].streamlet_id, 1)
    connection.status()
    connection.status(request_id=first_id)
    fourth = connection.asked_to_write()
    assert (read(fourth)[0].streamlet_id, read(fourth)[0].sequence) == (read(first)[0].streamlet_id, 1)
    connection.status()
    assert done(committing)["appended"] == 8


def test_with_a_latency_target_chunks_are_sent_between_calls(writers: Writers) -> None:
    writer = writers.open(VALUES, latency_target_ms=50)
    assert writers.due() == 1
    writer.do("write", rows=values(1, 2))
    connection = writers.broker.frames()
    assert numbers_in(connection.asked_to_write()) == [1, 2]
    connection.status()
    writer.do("write", rows=values(3))
    chunk = connection.asked_to_write()
    assert (numbers_in(chunk), read(chunk)[0].sequence) == ([3], 1)
    connection.status()
    writer.do("write", rows=values(4))
    committing = writer.begin("commit")
    assert numbers_in(connection.asked_to_write()) == [4]
    connection.status()
    assert done(committing)["appended"] == 4
    wait_until(lambda: writers.due() == 0, "the end of its thread", TIMEOUT_S)


def test_without_a_latency_target_a_partial_chunk_waits(writers: Writers) -> None:
    wait_until(lambda: writers.due() == 0, "the end of the threads of earlier writers", TIMEOUT_S)
    writer = writers.open(VALUES)
    for number in (1, 2):
        writer.do("write", rows=values(number))
    assert writers.due() == 0
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    assert numbers_in(connection.asked_to_write()) == [1, 2]
    connection.status()
    done(committing)


def test_an_error_between_calls_is_raised_by_the_next_call(writers: Writers) -> None:
    writer = writers.open(VALUES, refused("ProducerFenced", "out of date"), latency_target_ms=20)
    writer.do("write", rows=values(1))
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status(error=common_pb2.Error(code="producer_fenced", message="by 9"))

    def goes_on() -> bool:
        writer.do("write", rows=values(2))
        return False

    with pytest.raises(RuntimeError, match="out of date"):
        wait_until(goes_on, "an error", TIMEOUT_S)
    writer.do("abort")


def test_a_task_with_a_latency_target_ends_while_its_broker_is_silent(writers: Writers) -> None:
    writer = writers.open(VALUES, latency_target_ms=20)
    writer.do("write", rows=values(1))
    writers.broker.frames().asked_to_write()
    writer.do("abort")
    wait_until(lambda: writers.due() == 0, "the end of its thread", TIMEOUT_S)


def test_a_lost_answer_is_resolved_by_the_stored_rows(writers: Writers) -> None:
    writer = writers.open(VALUES, moved_to(writers.broker), found(rows_of(1, 2)))
    writer.do("write", rows=values(1, 2))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    first = connection.asked_to_write()
    connection.hang_up()
    connection = writers.broker.frames()
    assert connection.asked_to_write() == first
    connection.status(duplicate=True, entry=1, group_id=3, segment_id=2, position=128)
    told = done(committing)
    assert (told["appended"], told["found"], told["surplus"]) == (0, 2, 0)
    (routed,), (read_back,) = writers.asked("route_write"), writers.asked("stored_rows")
    (failed,) = routed["failed"]
    assert (failed["streamlet"], failed["progressed"], failed["error"]["code"]) == (0, True, "uncertain")
    assert read_back["position"] == [3, 2, 128]
    assert (read_back["producer_id"] % (1 << 64), read_back["producer_epoch"]) == (PRODUCER_ID, EPOCH)
    assert (read_back["entry"], read_back["sequence"], read_back["after"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("stored", "sent", "told"),
    [
        pytest.param([1, 2], [3, 4, 5, 6], (4, 2, 0), id="an earlier attempt was cut off sooner"),
        pytest.param([5, 2], [1, 3, 4, 6], (4, 2, 0), id="in another order"),
        pytest.param([2, 2, 5], [1, 3, 4, 6], (4, 2, 1), id="one of them once more than there are"),
        pytest.param([7, 8], [1, 2, 3, 4, 5, 6], (6, 0, 2), id="others"),
        pytest.param([6, 5, 4, 3, 2, 1], [], (0, 6, 0), id="all"),
        pytest.param(None, [], (0, 6, 0), id="removed since"),
    ],
)
def test_rows_that_are_already_stored_are_left_out(
    writers: Writers, stored: list[int] | None, sent: list[int], told: tuple[int, int, int]
) -> None:
    writer = writers.open(VALUES, found(None if stored is None else rows_of(*stored)))
    writer.do("write", rows=values(1, 2, 3, 4, 5, 6))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    assert numbers_in(connection.asked_to_write()) == [1, 2, 3, 4, 5, 6]
    connection.status(duplicate=True)
    if sent:
        chunk = connection.asked_to_write()
        assert (numbers_in(chunk), read(chunk)[0].sequence) == (sent, 1)
        connection.status()
    outcome = done(committing)
    assert (outcome["appended"], outcome["found"], outcome["surplus"]) == told
    assert writers.asked("stored_rows")[0]["position"] is None


def test_rows_found_before_they_were_written_are_left_out_later(writers: Writers) -> None:
    stored = rows_of(3, 1)
    writer = writers.open(VALUES, found(stored), chunk_bytes=40)
    writer.do("write", rows=values(1, 2))
    connection = writers.broker.frames()
    assert numbers_in(connection.asked_to_write()) == [1, 2]
    connection.status(duplicate=True)
    writing = writer.begin("write", rows=values(3, 4))
    committing = writer.begin("commit")
    chunk = connection.asked_to_write()
    assert read(chunk)[0].sequence == 1
    sent = numbers_in(chunk)
    connection.status()
    while len(sent) < 2:
        sent += numbers_in(connection.asked_to_write())
        connection.status()
    done(writing)
    told = done(committing)
    assert (sorted(sent), told["appended"], told["found"], told["surplus"]) == ([2, 4], 2, 2, 0)


def test_a_given_timestamp_is_part_of_a_row(writers: Writers) -> None:
    stored = records([(5, None, b"a", None), (6, None, b"b", None)])
    writer = writers.open("value binary, timestamp timestamp", found(stored, timed=True))
    writer.do("write", rows=[[text(b"b"), 6], [text(b"a"), 7], [text(b"a"), 5]])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status(duplicate=True)
    batch = read(connection.asked_to_write())[1]
    connection.status()
    assert done(committing)["found"] == 2
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [7]


def test_keys_and_headers_are_part_of_a_row(writers: Writers) -> None:
    stored = records([(0, [b"k"], b"v", [("h", b"x")]), (0, [b"l"], b"v", None), (0, None, None, [("h", None)])])
    columns = "key binary, value binary, headers map<string, binary>"
    writer = writers.open(columns, found(stored))
    rows = [
        [text(b"l"), text(b"v"), None],
        [text(b"k"), text(b"v"), [[text(b"h")], [text(b"y")]]],
        [None, None, [[text(b"h")], [None]]],
        [text(b"k"), text(b"v"), [[text(b"h")], [text(b"x")]]],
    ]
    writer.do("write", rows=rows)
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status(duplicate=True)
    batch = read(connection.asked_to_write())[1]
    connection.status()
    assert done(committing)["found"] == 3
    assert batch.column("headers").to_pylist() == [[("h", b"y")]]
    assert batch.column("keys").to_pylist() == [[b"k"]]


@pytest.mark.parametrize("size", first_quick([0, 33, 5_000, 1, 31, 32, 34, 100, 162, 163], 3))
def test_the_request_is_repeated_after_a_reset_anywhere_in_it(writers: Writers, size: int) -> None:
    writer = writers.open(VALUES, moved_to(writers.broker))
    writer.do("write", rows=[[text(bytes(10_000))]])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.receive(size)
    connection.reset()
    connection = writers.broker.frames()
    assert read(connection.asked_to_write())[0].sequence == 0
    connection.status()
    assert done(committing)["appended"] == 1
    assert len(writers.asked("route_write")) == 1


@pytest.mark.parametrize("size", first_quick([31, 1, 32, 40], 1))
def test_the_request_is_repeated_after_a_disconnect_within_the_answer(writers: Writers, size: int) -> None:
    writer = writers.open(VALUES, moved_to(writers.broker))
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.asked_to_write()
    whole = status_frame(connection.request_id, group_id=1, segment_id=1, position=64, first_record=100)
    assert size < len(whole)
    connection.send(whole[:size])
    connection.hang_up()
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status()
    assert done(committing)["appended"] == 1


def status_frame(request_id: int, **status: Any) -> bytes:
    sent: list[bytes] = []
    Recording(request_id, sent).status(**status)
    return sent[0]


class Recording(Answering):
    """Keeps frames instead of sending them."""

    def __init__(self, request_id: int, sent: list[bytes]) -> None:
        self.request_id = request_id
        self._sent = sent

    def send(self, data: bytes) -> None:
        self._sent.append(data)


def test_a_silent_broker_is_given_up_at_the_timeout(writers: Writers) -> None:
    writer = writers.open(VALUES, moved_to(writers.broker), request_timeout_ms=200)
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    silent = writers.broker.frames()
    first = silent.asked_to_write()
    connection = writers.broker.frames()
    assert connection.asked_to_write() == first
    connection.status()
    assert done(committing)["appended"] == 1
    (failed,) = writers.asked("route_write")[0]["failed"]
    assert failed["error"]["code"] == "uncertain"
    assert "no answer from" in failed["error"]["message"]


def test_the_service_names_another_broker_for_an_unreachable_one(writers: Writers, other_broker: FakeBroker) -> None:
    writers.broker.close()
    writer = writers.open(VALUES, moved_to(other_broker, 2))
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    connection = other_broker.frames()
    connection.asked_to_write()
    connection.status()
    assert done(committing)["appended"] == 1
    (failed,) = writers.asked("route_write")[0]["failed"]
    assert failed["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    "code", first_quick(["not_owner", "disk_full", "arena_full", "not_persisted", "out_of_sequence"], 1)
)
def test_a_rejected_chunk_goes_to_the_broker_that_the_service_names(
    writers: Writers, other_broker: FakeBroker, code: str
) -> None:
    writer = writers.open(VALUES, moved_to(other_broker, 2), moved_to(other_broker, 2))
    writer.do("write", rows=values(1, 2))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    first = connection.asked_to_write()
    attributes = {"broker_id": "5"}
    connection.status(error=common_pb2.Error(code=code, message="because", attributes=attributes))
    connection = other_broker.frames()
    assert connection.asked_to_write() == first
    connection.status(error=common_pb2.Error(code=code, message="again"))
    assert connection.asked_to_write() == first
    connection.status()
    assert done(committing)["appended"] == 2
    once, again = (each["failed"] for each in writers.asked("route_write"))
    assert once == [
        {"streamlet": 0, "progressed": True, "error": {"code": code, "message": "because", "attributes": attributes}}
    ]
    assert (again[0]["progressed"], again[0]["error"]["message"]) == (False, "again")


def test_a_final_error_of_the_service_ends_the_task(writers: Writers) -> None:
    writer = writers.open(VALUES, refused("CorruptChunk", "no such thing"))
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status(error=common_pb2.Error(code="corrupt_chunk", message="no such thing"))
    with pytest.raises(RuntimeError, match="KeraException: CorruptChunk: no such thing"):
        done(committing)


def test_an_error_while_rows_arrive_is_raised_by_write(writers: Writers) -> None:
    writer = writers.open(VALUES, refused("ProducerFenced", "too late"), chunk_bytes=64 << 10)
    writing = writer.begin("write", rows=[[text(bytes(1000))]], times=1 << 30)
    connection = writers.broker.frames()
    connection.asked_to_write()
    connection.status(error=common_pb2.Error(code="producer_fenced", message="too late"))
    with pytest.raises(RuntimeError, match="KeraException: ProducerFenced: too late"):
        done(writing)
    writer.do("abort")


@pytest.mark.parametrize(
    "nonsense", first_quick(["status twice", "bytes", "no status", "another request", "chunks", "error of all"], 2)
)
def test_an_invalid_answer_leads_to_a_retry(writers: Writers, nonsense: str) -> None:
    writer = writers.open(VALUES, moved_to(writers.broker))
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    first = connection.asked_to_write()
    match nonsense:
        case "status twice":
            connection.status(copies=2)
        case "no status":
            connection.status(copies=0)
        case "another request":
            connection.status(request_id=connection.request_id + 1)
        case "chunks":
            connection.status(bulk=b"KERA")
        case "bytes":
            connection.send(bytes(100))
        case _:
            connection.refuse(common_pb2.Error(code="protocol", message="no frame"), request_id=0)
    connection = writers.broker.frames()
    assert connection.asked_to_write() == first
    connection.status()
    assert done(committing)["appended"] == 1
    (failed,) = writers.asked("route_write")[0]["failed"]
    assert failed["error"]["code"] == "uncertain"


def test_streamlets_that_fail_together_are_one_request_to_the_service(writers: Writers) -> None:
    count = 50
    writer = writers.open("value binary, streamlet int", moved_to(writers.broker, 1, count), streamlets=count)
    writer.do("write", rows=[[text(b"v"), number] for number in range(count)])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    for _ in range(count):
        connection.asked_to_write()
    connection.reset()
    connection = writers.broker.frames()
    for _ in range(count):
        connection.asked_to_write()
        connection.status()
    assert done(committing)["appended"] == count
    (routed,) = writers.asked("route_write")
    assert sorted(each["streamlet"] for each in routed["failed"]) == list(range(count))


# --- bounds ------------------------------------------------------------------------------------------------


def test_a_task_waits_while_its_broker_does_not_acknowledge(writers: Writers) -> None:
    """At most 32 MiB and a chunk may wait, far less than these rows need."""
    writer = writers.open(VALUES)
    row = [text(bytes(1_000_000))]
    writing = writer.begin("write", rows=[row], times=200)
    connection = writers.broker.frames()
    acknowledged = 0
    for _ in range(40):
        acknowledged += read(connection.asked_to_write())[0].record_count
        assert not writing.done(), "it cannot have got rid of what nobody has taken"
        connection.status()
    committing = writer.begin("commit")
    while acknowledged < 200:
        acknowledged += read(connection.asked_to_write())[0].record_count
        connection.status()
    assert done(writing) is not None
    assert done(committing)["appended"] == 200


def cut_off(writers: Writers, row: Row) -> Writer:
    """A writer whose connection was lost in the middle of a chunk of twelve such rows.

    On a busy machine the write may take so long that it waits until everything is sent; then it is tried again.
    """
    limits = {"chunk_bytes": 12_000_000, "chunk_bytes_max": 64 * MIB, "request_timeout_ms": 60_000}
    for _ in range(CUT_OFF_ATTEMPTS):
        writer = writers.open(VALUES, moved_to(writers.broker), **limits)
        writing = writer.begin("write", rows=[row], times=12)
        connection = writers.broker.frames()
        connection.receive(1_000)
        try:
            assert "error" not in writing.result(STAYS_S)
        except TimeoutError:
            writer.interrupt()
            connection.reset()
        else:
            connection.reset()
            return writer
    pytest.fail(f"each of {CUT_OFF_ATTEMPTS} writes waited until everything was sent")


def test_a_chunk_cut_off_between_calls_is_sent_completely_by_the_next_call(writers: Writers) -> None:
    """A broker waits only briefly for the rest of a chunk; a task may be away for longer between calls.

    The chunk is larger than the buffers of sockets.
    """
    row = [text(bytes(1_000_000))]
    writer = cut_off(writers, row)
    writing = writer.begin("write", rows=[row])
    connection = writers.broker.frames()
    assert len(connection.asked_to_write()) > 12_000_000
    done(writing)
    connection.status()
    committing = writer.begin("commit")
    connection.asked_to_write()
    connection.status()
    assert done(committing)["appended"] == 13


def test_at_most_64_chunks_are_in_flight(writers: Writers) -> None:
    count = 200
    writer = writers.open("value binary, streamlet int", streamlets=count, request_timeout_ms=60_000)
    writer.do("write", rows=[[text(b"v"), number] for number in range(count)])
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    ids = []
    for _ in range(64):
        connection.asked_to_write()
        ids.append(connection.request_id)
    assert connection.is_silent()
    for number in range(64, count):
        connection.status(request_id=ids.pop(0))
        assert read(connection.asked_to_write())[0].streamlet_id == number
        ids.append(connection.request_id)
    for number in ids:
        connection.status(request_id=number)
    assert done(committing)["appended"] == count


def test_an_interrupt_ends_the_wait_and_leaves_no_thread(writers: Writers) -> None:
    before = writers.threads()
    writer = writers.open(VALUES)
    writer.do("write", rows=values(1))
    committing = writer.begin("commit")
    connection = writers.broker.frames()
    connection.asked_to_write()
    writer.interrupt()
    with pytest.raises(RuntimeError, match="InterruptedIOException"):
        done(committing)
    wait_until(lambda: writers.threads() <= before, "the end of its thread", TIMEOUT_S)


def test_writers_reuse_their_connection(writers: Writers) -> None:
    connection: Answering | None = None
    for _ in range(3):
        writer = writers.open(VALUES)
        writer.do("write", rows=values(1))
        committing = writer.begin("commit")
        connection = connection or writers.broker.frames()
        connection.asked_to_write()
        connection.status()
        done(committing)


# --- a real cluster ----------------------------------------------------------------------------------------


@pytest.fixture
def kera(cluster: RunningCluster) -> Kera:
    return Kera(cast("SparkSession", None), cluster.bootstrap)  # these tests do not need Spark


def attempt(jvm: Threads, kera: Kera, stream: str, name: str, *, chunk_bytes: int) -> Writer:
    """An attempt at the same task."""
    columns = StructType().add("key", BinaryType()).add("value", BinaryType())
    given = {"kera.bootstrap.servers": kera.bootstrap, "stream": stream}
    target = open_write(given, columns, overwrite=False, query=None, name=stream, partitions=1, case_sensitive=False)
    writer = Writer(jvm, f"{stream}-{name}")
    (producer_id,) = target["producer_ids"]
    writer.do(
        "open",
        columns="key binary, value binary",
        target={**target, "chunk_bytes": chunk_bytes},
        producer_id=producer_id,
        producer_epoch=1,
        keyless=0,
        python=sys.executable,
    )
    return writer


def test_a_task_follows_a_streamlet_that_moves(jvm: Threads, kera: Kera, stream: str) -> None:
    kera.create(stream, streamlets=1)
    writer = attempt(jvm, kera, stream, "moving", chunk_bytes=10_000)
    for first in range(0, 1_000, 250):
        rows = [[None, text(b"%d" % number)] for number in range(first, first + 250)]
        writer.do("write", rows=rows)
        move(kera, stream)

    assert writer.do("commit")["appended"] == 1_000
    assert numbers(kera, stream) == Counter(range(1_000))


def move(kera: Kera, stream: str) -> None:
    """Move the only streamlet of a stream to the other broker."""

    async def move(client: Client) -> None:
        described = await client.admin.describe_stream(stream)
        brokers = {broker.broker_id for broker in (await client.admin.describe_cluster()).brokers}
        (other,) = brokers - {described.assignments[0].broker_id}
        await client.admin.move_streamlet(stream, 0, other)

    kera.run(move)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_concurrent_and_consecutive_attempts_store_each_row_once(
    jvm: Threads, kera: Kera, stream: str, seed: int
) -> None:
    dice = random.Random(seed)
    kera.create(stream, streamlets=3)
    sent = [*range(examples(3_000, quick=1_000)), *range(100)]
    rows = [[text(b"k%d" % number), text(b"%d" % number)] for number in sent]
    attempts = []
    for name in range(6):
        writer = attempt(jvm, kera, stream, str(name), chunk_bytes=dice.choice([500, 3_000, 40_000]))
        mine = dice.sample(rows, len(rows)) if name else rows
        some = mine if name % 2 else mine[: len(mine) // 2]
        attempts += [writer.begin("write", rows=some[first : first + 250]) for first in range(0, len(some), 250)]
        attempts.append(writer.begin("commit" if name % 2 else "abort"))
    for each in attempts:
        done(each)

    last = attempt(jvm, kera, stream, "last", chunk_bytes=1_000)
    last.do("write", rows=dice.sample(rows, len(rows)))
    told = last.do("commit")

    assert (told["appended"], told["found"], told["surplus"]) == (0, len(rows), 0)
    assert numbers(kera, stream) == Counter(sent)
