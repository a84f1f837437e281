"""How a task writes its rows, with appenders in memory."""

# ruff: noqa: ARG002  # the real client decides on the parameters

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from kera.client import AppendResult, StreamDescription
from kera.client.producing.encoding.partitioner import streamlet_of
from kera.core.base.ids import EntryId, Position
from kera.core.errors import KeraError, ProducerFenced, SchemaMismatch, Unavailable, UnknownStream
from kera.spark_connector.writing import task as writing_task
from kera.spark_connector.writing.task import Name, TaskWriter
from kera.spark_connector.writing.writers import task_name
from tests.unit.client.support import description

GIVEN = StructType([StructField("value", BinaryType()), StructField("key", BinaryType())])
STREAMLETS = 3
SEGMENT_BYTES = 64 << 10
NAME = Name(1 << 63, 1, keyless=4)


class Chunk(NamedTuple):
    batch: pa.RecordBatch
    header: Any
    next: Position


class Header(NamedTuple):
    producer_id: int
    producer_epoch: int
    sequence: int


class FakeAppender:
    """Keeps the appended rows; stands in for `kera.client.Appender`."""

    def __init__(self, client: "FakeClient", stream: StreamDescription, name: Name) -> None:
        self._client = client
        self.stream = stream
        self.producer_id, self.producer_epoch = name.producer_id, name.producer_epoch
        self.chunk_bytes_max = 1 << 20

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    def split(self, rows: pa.RecordBatch, keyless: int) -> list[tuple[int, pa.RecordBatch]]:
        found: dict[int, list[int]] = {}
        for at, keys in enumerate(rows["keys"].to_pylist() if "keys" in rows.schema.names else [None] * len(rows)):
            found.setdefault(streamlet_of(keys[0], STREAMLETS) if keys else keyless, []).append(at)
        return [(streamlet, rows.take(pa.array(at))) for streamlet, at in sorted(found.items())]

    async def append(self, streamlet_id: int, rows: pa.RecordBatch, sequence: int) -> AppendResult:
        await self._client.open.wait()
        if streamlet_id in self._client.errors:
            raise self._client.errors[streamlet_id]
        chunks = self._client.chunks.setdefault((self.stream.name, streamlet_id), [])
        duplicate = sequence < len(chunks)
        if not duplicate:
            chunks.append(rows)
        return AppendResult(rows.num_rows, duplicate, EntryId(7, streamlet_id, 0), Position(1, 1, sequence))


class FakeClient:
    """A cluster with the streams ``s`` and ``t``."""

    def __init__(self) -> None:
        self.chunks: dict[tuple[str, int], list[pa.RecordBatch]] = {}
        self.errors: dict[int, KeraError] = {}
        self.open = asyncio.Event()
        self.open.set()

    async def appender(
        self, stream: str, *, producer_id: int, producer_epoch: int, chunk_bytes_max: int, compares: bool
    ) -> FakeAppender:
        assert compares, "the writer looks at what is stored"
        if stream not in ("s", "t", "typed"):
            raise UnknownStream("no", stream=stream)
        schema = pa.schema([("n", pa.int64())]) if stream == "typed" else None
        made = description(SEGMENT_BYTES, name=stream, streamlets=STREAMLETS, schema=schema)
        return FakeAppender(self, made, Name(producer_id, producer_epoch, 0))

    async def read_range(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: None, *, settings: object
    ) -> AsyncIterator[Chunk]:
        batch = self.chunks[stream, streamlet_id][start.offset]
        yield Chunk(batch, Header(NAME.producer_id, NAME.producer_epoch, start.offset), start._replace(offset=-1))

    def values(self) -> Counter[bytes]:
        return Counter(
            value for chunks in self.chunks.values() for chunk in chunks for value in chunk["value"].to_pylist()
        )


@pytest.fixture
async def client() -> FakeClient:
    return FakeClient()


def task(
    client: FakeClient, given: StructType = GIVEN, stream: str | None = "s", name: Name = NAME, **limits: int
) -> TaskWriter:
    return TaskWriter(client, given, stream, name, **limits)  # type: ignore[arg-type]


def batch(numbers: range, *, keyed: bool = True, size: int = 100) -> pa.RecordBatch:
    values = [(b"%d" % number).ljust(size) for number in numbers]
    keys = [b"%d" % number if keyed else None for number in numbers]
    return pa.record_batch({"value": pa.array(values, pa.binary()), "key": pa.array(keys, pa.binary())})


async def write(made: TaskWriter, *batches: pa.RecordBatch) -> writing_task.Written:
    try:
        for each in batches:
            await made.write(each)
        return await made.finish()
    finally:
        await made.close()


async def test_all_rows_are_written_once_and_a_repeated_attempt_adds_none(client: FakeClient) -> None:
    batches = [batch(range(start, start + 700)) for start in range(0, 7000, 700)]
    expected = Counter(value for each in batches for value in each["value"].to_pylist())

    first = await write(task(client), *batches)
    assert (first.appended, first.found, first.surplus) == (7000, 0, 0)
    assert client.values() == expected
    assert min(len(chunks) for chunks in client.chunks.values()) > 5, "each streamlet got many chunks"
    again = await write(task(client), *batches)

    assert (again.appended, again.found, again.surplus) == (0, 7000, 0)
    assert client.values() == expected


async def test_chunks_depend_on_nothing_but_the_rows_before_them(client: FakeClient) -> None:
    other = FakeClient()
    other.open.clear()
    batches = [batch(range(start, start + 700)) for start in range(0, 7000, 700)]
    await write(task(client), *batches)

    made = task(other)
    for each in batches:
        await made.write(each)
    other.open.set()  # nothing was answered before
    await made.finish()

    for place, chunks in client.chunks.items():
        assert sum(chunk.num_rows for chunk in other.chunks[place]) == sum(chunk.num_rows for chunk in chunks)
        assert [chunk.num_rows for chunk in other.chunks[place]] == [chunk.num_rows for chunk in chunks]


async def test_a_latency_target_writes_rows_before_the_chunk_is_full_or_the_task_ends(client: FakeClient) -> None:
    made = task(client, latency_target_ms=20)
    await made.write(batch(range(10)))
    async with asyncio.timeout(10):
        while sum(client.values().values()) < 10:
            await asyncio.sleep(0.001)
    first = {place: len(chunks) for place, chunks in client.chunks.items()}
    await made.write(batch(range(10, 20)))
    async with asyncio.timeout(10):
        while sum(client.values().values()) < 20:
            await asyncio.sleep(0.001)

    assert set(first.values()) == {1}
    assert (await made.finish()).appended == 20
    await made.close()


async def test_a_repeated_attempt_with_a_latency_target_stores_nothing_twice(client: FakeClient) -> None:
    made = task(client, latency_target_ms=20)
    for start in range(0, 300, 100):  # the attempt ends in the middle
        await made.write(batch(range(start, start + 100)))
        async with asyncio.timeout(10):
            while sum(client.values().values()) < start + 100:
                await asyncio.sleep(0.001)
    await made.close()

    again = await write(task(client, latency_target_ms=60_000), batch(range(1000)))

    assert (again.appended, again.found, again.surplus) == (700, 300, 0)
    assert max(client.values().values()) == 1


async def test_without_a_latency_target_rows_wait_for_the_end(client: FakeClient) -> None:
    made = task(client)
    await made.write(batch(range(10)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not client.chunks
    await made.finish()
    await made.close()
    assert client.chunks


async def test_an_error_while_a_task_waits_for_rows_is_raised_by_a_later_write(client: FakeClient) -> None:
    client.errors = dict.fromkeys(range(STREAMLETS), Unavailable("gone"))
    made = task(client, latency_target_ms=10)

    async def go_on() -> None:
        while True:
            await made.write(batch(range(10)))
            await asyncio.sleep(0.001)

    with pytest.raises(Unavailable, match="gone"):
        await asyncio.wait_for(go_on(), 10)
    await made.close()


async def test_rows_without_a_key_go_to_the_tasks_streamlet(client: FakeClient) -> None:
    await write(task(client), batch(range(10), keyed=False))

    assert list(client.chunks) == [("s", NAME.keyless % STREAMLETS)]


async def test_a_task_waits_while_too_many_bytes_are_in_flight(client: FakeClient) -> None:
    client.open.clear()
    made = task(client, queued_bytes_max=100_000, gathered_bytes_max=50_000)
    done = 0

    async def run() -> None:
        nonlocal done
        for start in range(0, 10_000, 100):
            await made.write(batch(range(start, start + 100)))
            done += 1

    running = asyncio.create_task(run())
    for _ in range(1000):
        await asyncio.sleep(0)
    assert 0 < done * 100 * 116 < 300_000
    client.open.set()
    await running
    written = await made.finish()

    assert written.appended == 10_000


async def test_a_failed_append_ends_the_task_with_its_error(client: FakeClient) -> None:
    client.errors[0] = Unavailable("gone")
    with pytest.raises(Unavailable, match="gone"):
        await write(task(client), *(batch(range(start, start + 1000)) for start in range(0, 20_000, 1000)))

    client.errors[0] = ProducerFenced("by 9", producer_epoch=9)
    with pytest.raises(ProducerFenced, match=r"a later batch of this query.*out of date \(by 9\)"):
        await write(task(client), batch(range(100)))


async def test_rows_go_to_the_streams_and_streamlets_that_they_name(client: FakeClient) -> None:
    given = StructType([GIVEN.fields[0], StructField("stream", StringType()), StructField("streamlet", IntegerType())])
    rows = pa.record_batch(
        {
            "value": [b"a", b"b", b"c"],
            "stream": ["s", "t", "s"],
            "streamlet": pa.array([2, 0, None], pa.int32()),
        }
    )

    await write(task(client, given, None), rows)

    found = {place: [chunk["value"].to_pylist() for chunk in chunks] for place, chunks in client.chunks.items()}
    assert found == {("s", 2): [[b"a"]], ("t", 0): [[b"b"]], ("s", NAME.keyless % STREAMLETS): [[b"c"]]}


@pytest.mark.parametrize(
    ("stream", "error", "message"),
    [
        ("nowhere", UnknownStream, "there is no stream 'nowhere'; create it first: kera stream create nowhere"),
        ("typed", SchemaMismatch, "stream 'typed' has a schema of its own"),
    ],
)
async def test_the_error_for_an_unsuitable_stream_names_it(
    client: FakeClient, stream: str, error: type[KeraError], message: str
) -> None:
    given = StructType([GIVEN.fields[0], StructField("stream", StringType())])

    with pytest.raises(error, match=message):
        await write(task(client, given, None), pa.record_batch({"value": [b"a"], "stream": [stream]}))


async def test_a_task_without_rows_writes_nothing(client: FakeClient) -> None:
    written = await write(task(client))

    assert (written.appended, written.found, client.chunks) == (0, 0, {})


def test_the_name_of_a_task_identifies_its_work() -> None:
    name = task_name("query", "q", 3, 10)

    assert name == task_name("query", "q", 3, 10)
    assert name.producer_epoch == 11
    later = task_name("query", "q", 3, 11)
    assert (later.producer_id, later.producer_epoch) == (name.producer_id, 12)
    others = [task_name("batch", "q", 3, 10), task_name("query", "p", 3, 10), task_name("query", "q", 4, 10)]
    assert len({name.producer_id, *(other.producer_id for other in others)}) == 4
    assert all(1 << 63 <= each.producer_id < 1 << 64 for each in (name, *others))
