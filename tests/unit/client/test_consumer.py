"""The consumer against a real broker service without processes. Tests with processes are in tests/integration."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pyarrow as pa
import pytest

from kera.client.consuming.consumer import Consumer
from kera.client.settings import ConsumerSettings
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import ClosedError, CorruptChunk, InvalidArgument, StreamletOutOfRange, Uncertain, UnknownStream
from kera.core.format.chunk import HEADER_BYTES
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import WAIT_S, FakeCluster, Fault, stream_info, until

CHUNKS, ROWS = 20, 5
EXPECTED = [b"%d" % number for number in range(CHUNKS * ROWS)]

MakeConsumer = Callable[..., Consumer]

together = pytest.mark.parametrize("joined_bytes_max", [0, 1 << 20], ids=["alone", "together"])
"""Whether small chunks are joined into one batch."""


@pytest.fixture
async def make_consumer() -> AsyncIterator[MakeConsumer]:
    async with AsyncExitStack() as stack:

        def make(
            cluster: FakeCluster, *streams: str, start: Any = "earliest", end: Any = "latest", **settings: Any
        ) -> Consumer:
            options = ConsumerSettings(**{"fetch_wait_ms": 0, "joined_bytes_max": 0, **settings})
            consumer = Consumer(cluster, streams or ("s",), options, start=start, end=end)  # type: ignore[arg-type]
            stack.push_async_callback(consumer.close)
            return consumer

        yield make


@pytest.fixture
async def filled(cluster: FakeCluster, make_producer: MakeProducer) -> FakeCluster:
    await fill(cluster, make_producer)
    return cluster


async def fill(cluster: FakeCluster, make_producer: MakeProducer, stream: str = "s") -> None:
    producer = make_producer(cluster)
    for first in range(0, CHUNKS * ROWS, ROWS):
        await producer.send_batch(stream, pa.record_batch({"value": EXPECTED[first : first + ROWS]}))
        await producer.flush()  # a separate chunk


async def take_records(consumer: Consumer, count: int = len(EXPECTED)) -> list[bytes | None]:
    """Take `count` values, or all there are, and leave the loop as a caller may."""
    taken: list[bytes | None] = []
    async with asyncio.timeout(WAIT_S):
        async for record in consumer:
            taken.append(record.value)
            if len(taken) == count:
                break
    return taken


async def take_batches(consumer: Consumer, count: int = CHUNKS) -> list[bytes | None]:
    taken: list[bytes | None] = []
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            taken += chunk.batch["value"].to_pylist()
            count -= 1
            if not count:
                break
    return taken


@together
@pytest.mark.parametrize("records_max", [1, 3, ROWS, None])
async def test_polls_give_each_record_once_and_never_more_than_asked_for(
    filled: FakeCluster, make_consumer: MakeConsumer, records_max: int | None, joined_bytes_max: int
) -> None:
    consumer, taken = make_consumer(filled, joined_bytes_max=joined_bytes_max), []
    while records := await consumer.poll(WAIT_S, records_max=records_max):
        assert records_max is None or len(records) <= records_max
        taken += [record.value for record in records]
    assert taken == EXPECTED


@together
async def test_positions_after_a_poll_are_behind_its_records(
    filled: FakeCluster, make_consumer: MakeConsumer, joined_bytes_max: int
) -> None:
    consumer = make_consumer(filled, joined_bytes_max=joined_bytes_max)
    taken = [record.value for record in await consumer.poll(WAIT_S)]
    assert 0 < len(taken) <= len(EXPECTED)
    rest = make_consumer(filled, start=consumer.positions())
    assert taken + await take_records(rest) == EXPECTED


async def test_a_poll_returns_an_empty_list_when_its_time_is_over(
    cluster: FakeCluster, make_consumer: MakeConsumer, make_producer: MakeProducer
) -> None:
    consumer = make_consumer(cluster, end=None)
    assert await consumer.poll(0.01) == []
    await fill(cluster, make_producer)
    taken: list[bytes | None] = []
    async with asyncio.timeout(WAIT_S):
        while len(taken) < len(EXPECTED):
            taken += [record.value for record in await consumer.poll(0)]
            await asyncio.sleep(0)  # sleep: the consumer fetches meanwhile
    assert taken == EXPECTED


@pytest.mark.parametrize("wrong", [{"timeout_s": -1}, {"records_max": 0}, {"records_max": 1.5}])
async def test_a_poll_refuses_invalid_arguments(
    filled: FakeCluster, make_consumer: MakeConsumer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        await make_consumer(filled).poll(**wrong)


@together
@pytest.mark.parametrize("count", [1, ROWS, ROWS + 1, 7, len(EXPECTED)])
async def test_a_new_loop_goes_on_where_the_last_one_stopped(
    filled: FakeCluster, make_consumer: MakeConsumer, count: int, joined_bytes_max: int
) -> None:
    consumer, taken = make_consumer(filled, joined_bytes_max=joined_bytes_max), []
    while some := await take_records(consumer, count):
        taken += some
    assert taken == EXPECTED
    assert await take_records(consumer) == []
    assert await take_batches(consumer) == []


async def test_a_new_loop_over_batches_goes_on_where_the_last_one_stopped(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    consumer, taken = make_consumer(filled), []
    while some := await take_batches(consumer, 3):
        taken += some
    assert taken == EXPECTED


async def test_several_tasks_share_the_records_of_a_consumer(filled: FakeCluster, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(filled, end="latest")
    taken: list[bytes | None] = []

    async def take() -> None:
        async for record in consumer:
            taken.append(record.value)
            await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(take() for _ in range(3)))
    assert sorted(value or b"" for value in taken) == sorted(EXPECTED)


@together
async def test_several_tasks_share_the_batches_of_a_consumer(
    make_cluster: MakeCluster, make_producer: MakeProducer, make_consumer: MakeConsumer, joined_bytes_max: int
) -> None:
    cluster = make_cluster(stream_info("s", 7), stream_info("t", 8))
    for stream in ("s", "t"):
        await fill(cluster, make_producer, stream)
    consumer = make_consumer(cluster, "s", "t", joined_bytes_max=joined_bytes_max)
    taken: list[bytes | None] = []

    async def take() -> None:
        async for chunk in consumer.batches():
            taken.extend(chunk.batch["value"].to_pylist())
            await asyncio.sleep(0)  # let the other tasks run

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(take())
    assert Counter(taken) == Counter(2 * EXPECTED)


@together
@pytest.mark.parametrize("given", [0, 1, 3, CHUNKS])
@pytest.mark.parametrize("go_on", [take_records, take_batches])
async def test_batches_given_back_come_first_as_records_or_batches(
    filled: FakeCluster, make_consumer: MakeConsumer, joined_bytes_max: int, given: int, go_on: Any
) -> None:
    consumer = make_consumer(filled, joined_bytes_max=joined_bytes_max)
    taken: list[bytes | None] = []
    before = None
    while batches := await consumer.next_batches(4):
        for batch in batches[:given]:
            consumer.deliver(batch)
            taken += batch.batch["value"].to_pylist()
        consumer.give_back(batches[given:])
        if before == (before := len(taken)):
            break
    if given == 0:
        other = make_consumer(filled, start=consumer.positions())
        assert await take_records(other) == EXPECTED, "nothing was delivered"
    taken += await go_on(consumer)
    assert taken == EXPECTED


@together
@pytest.mark.parametrize("go_on", [take_records, take_batches])
@pytest.mark.parametrize("stopped_at", [0, 4, CHUNKS])
async def test_the_rows_of_a_failed_table_come_again(
    filled: FakeCluster, make_consumer: MakeConsumer, joined_bytes_max: int, stopped_at: int, go_on: Any
) -> None:
    consumer = make_consumer(filled, joined_bytes_max=joined_bytes_max)
    taken = await take_records(consumer, ROWS)
    before = consumer.positions()

    async def fail() -> None:
        async with consumer._all_left() as left:
            for _ in range(stopped_at):
                await anext(left, None)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await fail()
        assert consumer.positions() == before
    assert taken + await go_on(consumer) == EXPECTED


async def test_another_consumer_goes_on_at_the_positions_of_the_first(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(filled)
    await take_batches(consumer, 7)
    following = make_consumer(filled, start=consumer.positions())
    assert await take_batches(following) == EXPECTED[7 * ROWS :]


async def test_a_consumer_from_earliest_knows_the_position_of_the_oldest_record(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    """That record need not begin its segment: a wrong position would read records again, or miss a chunk boundary."""
    marks = make_consumer(filled)
    await take_batches(marks, 3)
    position = marks.positions()[0][0]
    streamlet = filled.streams.streamlet((await filled.stream("s")).stream_id, 0)
    filled.streams.move_start(streamlet.entries[0], position, 3 * ROWS)
    assert position.offset

    consumer = make_consumer(filled)
    assert await take_batches(consumer, 2) == EXPECTED[3 * ROWS : 5 * ROWS]
    assert await take_batches(make_consumer(filled, start=consumer.positions())) == EXPECTED[5 * ROWS :]


@together
@pytest.mark.parametrize(("delivered", "expected"), [(ROWS, ROWS), (ROWS + 1, ROWS), (2 * ROWS - 1, ROWS), (0, 0)])
async def test_a_chunk_is_delivered_with_its_last_record(
    filled: FakeCluster, make_consumer: MakeConsumer, delivered: int, expected: int, joined_bytes_max: int
) -> None:
    consumer = make_consumer(filled, joined_bytes_max=joined_bytes_max)
    await consumer.start()
    if delivered:
        await take_records(consumer, delivered)
    following = make_consumer(filled, start=consumer.positions())
    assert await take_records(following) == EXPECTED[expected:]


@together
async def test_a_chunk_begun_as_records_is_given_whole_as_a_batch(
    filled: FakeCluster, make_consumer: MakeConsumer, joined_bytes_max: int
) -> None:
    consumer = make_consumer(filled, joined_bytes_max=joined_bytes_max)
    await take_records(consumer, ROWS + 2)
    assert await take_batches(consumer) == EXPECTED[ROWS:]


async def test_start_and_end_can_be_positions(filled: FakeCluster, make_consumer: MakeConsumer) -> None:
    marks = make_consumer(filled)
    await take_batches(marks, 4)
    start = marks.positions()
    await take_batches(marks, 5)
    assert (
        await take_batches(make_consumer(filled, start=start, end=marks.positions())) == EXPECTED[4 * ROWS : 9 * ROWS]
    )


async def test_reading_from_latest_to_latest_gives_no_records(filled: FakeCluster, make_consumer: MakeConsumer) -> None:
    assert await take_batches(make_consumer(filled, start="latest")) == []


async def test_several_streams_are_read_and_a_stream_named_twice_only_once(
    make_cluster: MakeCluster, make_producer: MakeProducer, make_consumer: MakeConsumer
) -> None:
    cluster = make_cluster(stream_info("s", 7), stream_info("t", 8))
    await fill(cluster, make_producer, "s")
    await fill(cluster, make_producer, "t")
    consumer = make_consumer(cluster, "s", "t", "s")
    taken: dict[str, list[bytes | None]] = {"s": [], "t": []}
    async with asyncio.timeout(WAIT_S):
        async for record in consumer:
            taken[record.stream].append(record.value)
    assert taken == {"s": EXPECTED, "t": EXPECTED}
    assert list(consumer.positions("t")) == [0]


@pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST])
async def test_a_failed_fetch_is_retried(filled: FakeCluster, make_consumer: MakeConsumer, fault: Fault) -> None:
    filled.loopback.read_faults.extend([Fault.NONE, fault, Fault.NONE, fault, fault])
    assert await take_batches(make_consumer(filled, fetch_bytes_max=2000)) == EXPECTED


async def test_a_permanent_error_is_raised_each_time(filled: FakeCluster, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(filled, end=None)
    assert await take_records(consumer, ROWS) == EXPECTED[:ROWS]
    filled.streams.drop(7)
    del filled.infos["s"]
    for _ in range(2):
        with pytest.raises(UnknownStream):
            await take_records(consumer)


async def test_a_corrupt_chunk_is_an_error_each_time_and_is_not_skipped(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    segment = filled.segments()[0]
    segment.slot.view[segment.chunk_ends[2] + HEADER_BYTES + 8] ^= 1
    consumer = make_consumer(filled)
    assert await take_batches(consumer, 3) == EXPECTED[: 3 * ROWS]
    for _ in range(2):
        with pytest.raises(CorruptChunk):
            await take_batches(consumer)


async def test_prefetched_bytes_are_bounded(filled: FakeCluster, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer(filled, fetch_bytes_max=800, prefetch_bytes_max=1600)
    assert await take_batches(consumer, 1) == EXPECTED[:ROWS]
    await until(lambda: consumer.fetched_bytes >= 1600)
    read = filled.counters.bytes_read
    for _ in range(100):
        await asyncio.sleep(0)
    assert filled.counters.bytes_read == read <= 800 + 1600 + 800
    assert await take_batches(consumer) == EXPECTED[ROWS:]


async def test_closing_a_consumer_ends_waiting_reads_with_an_error(
    make_cluster: MakeCluster, make_consumer: MakeConsumer
) -> None:
    cluster = make_cluster(stream_info(streamlets=2))
    for start in ("earliest", "latest"):
        consumer = make_consumer(cluster, start=start, end=None, fetch_wait_ms=60_000)
        waiting = asyncio.ensure_future(take_records(consumer))
        await until(lambda seen=consumer: bool(seen.positions()))  # type: ignore[misc]
        await consumer.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await take_records(consumer)


async def test_a_consumer_that_was_never_started_can_be_closed(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(filled)
    await consumer.close()
    with pytest.raises(ClosedError):
        await consumer.start()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start": {1: [Position(1, 1, 0)]}}, "no position is given for streamlet 0"),
        ({"start": {0: []}}, "no position is given for streamlet 0, entry 0"),
        ({"shared_memory": "always"}, "on another node"),
    ],
)
async def test_missing_positions_and_impossible_shared_memory_are_refused(
    filled: FakeCluster, make_consumer: MakeConsumer, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await take_batches(make_consumer(filled, **options))


async def test_a_consumer_needs_a_stream_and_positions_go_with_one(filled: FakeCluster) -> None:
    settings = ConsumerSettings()
    with pytest.raises(InvalidArgument, match="needs a stream"):
        Consumer(filled, (), settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="single stream"):
        Consumer(filled, ("s", "t"), settings, start={0: [Position(1, 1, 0)]})  # type: ignore[arg-type]


async def test_reads_from_an_unreachable_broker_fail_after_the_retry_timeout(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    filled.settings = filled.settings.model_copy(update={"retry_timeout_ms": 30})
    filled.loopback.read_faults.extend([Fault.LOST] * 10_000)
    with pytest.raises(Uncertain):
        await take_batches(make_consumer(filled))


async def test_positions_include_entries_without_records(
    make_cluster: MakeCluster, make_producer: MakeProducer, make_consumer: MakeConsumer
) -> None:
    """Positions are lists by entry: a missing entry would shift the others."""
    cluster = make_cluster(stream_info(streamlets=2, entries=2))
    producer = make_producer(cluster)  # this gets the producer id 1, and so writes to entry 1
    await producer.send_batch("s", pa.record_batch({"value": EXPECTED}), streamlet=1)
    await producer.flush()
    consumer = make_consumer(cluster)
    assert await take_batches(consumer) == EXPECTED
    end = (await cluster.bounds("s"))[1][1].end
    assert consumer.positions() == {0: [EARLIEST, EARLIEST], 1: [EARLIEST, end]}
    assert await take_batches(make_consumer(cluster, start=consumer.positions())) == []


async def test_a_consumer_starts_at_the_committed_positions_of_its_group(
    filled: FakeCluster, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(filled, consumer_group="loader", start="committed")
    assert await take_batches(consumer, 3) == EXPECTED[: 3 * ROWS]
    await consumer.commit()
    (report,) = filled.reported
    assert (report.consumer_group, report.forward_only, report.force) == ("loader", True, False)
    after = make_consumer(filled, consumer_group="loader", start="committed")
    assert await take_batches(after) == EXPECTED[3 * ROWS :]
    with pytest.raises(InvalidArgument, match="consumer_group"):
        await make_consumer(filled, start="committed").start()


async def test_a_commit_says_how_far_each_stream_was_delivered(
    make_cluster: MakeCluster, make_producer: MakeProducer, make_consumer: MakeConsumer
) -> None:
    cluster = make_cluster(stream_info("s", 7), stream_info("t", 8))
    await fill(cluster, make_producer, "s")
    consumer = make_consumer(cluster, "s", "t", consumer_group="loader")
    await take_records(consumer, ROWS + 2)
    await consumer.commit()
    ((_, _, of_s), of_t) = cluster.committed
    assert of_s == {EntryId(7, 0, 0): consumer.positions("s")[0][0]}
    assert of_s[EntryId(7, 0, 0)] > EARLIEST
    assert of_t == ("loader", "t", {EntryId(8, 0, 0): EARLIEST})
    following = make_consumer(cluster, start={0: list(of_s.values())})
    assert await take_records(following) == EXPECTED[ROWS:]  # a partly read chunk does not count as taken

    await take_records(consumer)
    await consumer.close()
    await consumer.commit()
    end = (await cluster.bounds("s"))[0][0].end
    assert cluster.committed[2:] == [("loader", "s", {EntryId(7, 0, 0): end}), of_t]


async def test_a_consumer_closed_during_its_start_fetches_no_chunks(
    filled: FakeCluster, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, go_on = filled.stream, asyncio.Event()

    async def slowly(name: str) -> Any:
        await go_on.wait()
        return await look_up(name)

    monkeypatch.setattr(filled, "stream", slowly)
    consumer = make_consumer(filled)
    starting = asyncio.create_task(consumer.start())
    await asyncio.sleep(0)
    await consumer.close()
    go_on.set()
    with pytest.raises(ClosedError):
        await starting
    assert not len(consumer._fetcher.tasks)


POSITION = Position(1, 1, 0)


class TestMisspeltPlaces:
    @pytest.mark.parametrize(
        ("start", "meant"),
        [
            ("Latest", "did you mean 'latest'"),
            ("latset", "did you mean 'latest'"),
            ("end", "did you mean 'latest'"),
            ("now", "did you mean 'latest'"),
            ("beginning", "did you mean 'earliest'"),
            ("comitted", "did you mean 'committed'"),
            ("", "takes 'earliest', 'latest', 'committed'"),
            (0, "positions_at"),
            (None, "positions_at"),
            (POSITION, "positions_at"),
            ({0: POSITION}, "positions are"),
            ({0: 5}, "positions are"),
            ({"0": [POSITION]}, "positions are"),
            ({0: "latest"}, "positions are"),
            ({0: [5]}, "not a position"),
            ({0: [(1, 2)]}, "not a position"),
            ({0: [(1, 1, -1)]}, "not a position"),
        ],
    )
    def test_an_invalid_start_is_refused_at_once(self, filled: FakeCluster, start: Any, meant: str) -> None:
        with pytest.raises(InvalidArgument, match=meant):
            Consumer(filled, ("s",), ConsumerSettings(), start=start)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("end", "meant"),
        [
            ("now", "did you mean 'latest'"),
            ("Latest", "did you mean 'latest'"),
            ("earliest", "takes 'latest'"),
            (0, "is 0"),
        ],
    )
    def test_an_invalid_end_is_refused_at_once(self, filled: FakeCluster, end: Any, meant: str) -> None:
        with pytest.raises(InvalidArgument, match=meant):
            Consumer(filled, ("s",), ConsumerSettings(), start="earliest", end=end)  # type: ignore[arg-type]

    async def test_positions_of_a_missing_streamlet_are_refused(
        self, filled: FakeCluster, make_consumer: MakeConsumer
    ) -> None:
        positions = make_consumer(filled)
        await positions.start()
        given = positions.positions()
        with pytest.raises(StreamletOutOfRange, match="streamlets 0 to"):
            await make_consumer(filled, start={**given, 77: [POSITION]}).start()
