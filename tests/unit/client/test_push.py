"""Readers of a broker that pushes: windows, leases, reused slots, the ends of lanes, lost connections."""

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.client.chunk_batch import ChunkBatch, PushedSlot
from kera.client.client import Client
from kera.client.cluster import fetch
from kera.client.cluster.fetch import Overwritten, Wanted, batches_of
from kera.client.cluster.push import PushChannel, SubscriptionEnd
from kera.client.cluster.push_connect import connect
from kera.client.consuming import consumer as consumer_module
from kera.client.consuming.consumer import Consumer
from kera.client.consuming.delivering.records import records_of
from kera.client.settings import ConsumerSettings
from kera.client.testing import StoredChunk
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError, NotOwner, Unavailable
from kera.core.push import VERSION, Decoder, Run, encode_runs
from kera.core.rpc import Channel
from kera.v1 import push_pb2
from tests.unit.client.fake_support import STREAM_ID, MakeFleet
from tests.unit.client.push_broker import SLOT_BYTES, SLOTS, SOON, PushFleet, Reason, position_of
from tests.unit.client.support import WAIT_S, description, until
from tests.unit.client.test_fetcher import put
from tests.unit.core.rpc.fake_transport import FakeTransport

MakeConsumer = Callable[..., Consumer]
VALUES = [b"%d" % number for number in range(6)]


@pytest.fixture
async def fleet(make_fleet: MakeFleet, tmp_path: Path) -> AsyncIterator[PushFleet]:
    """Broker 1 pushes; it has a streamlet of six chunks, with a value each."""
    fleet = PushFleet(await make_fleet(timing=SOON), tmp_path)
    put(fleet, *VALUES)
    await fleet.pushing.start(fleet.info.push_unix_path)
    yield fleet
    await fleet.pushing.close()


@pytest.fixture
async def make_consumer(fleet: PushFleet) -> AsyncIterator[MakeConsumer]:
    async with AsyncExitStack() as stack:

        def make(of: PushFleet = fleet, **options: Any) -> Consumer:
            start, end = options.pop("start", "earliest"), options.pop("end", None)
            settings = ConsumerSettings(**{"fetch_wait_ms": 60_000, "joined_bytes_max": 0, **options})
            consumer = Consumer(of.cluster, ("s",), settings, start=start, end=end)
            stack.push_async_callback(consumer.close)
            return consumer

        yield make


async def opened(fleet: PushFleet, lanes: int = 1) -> int:
    """Wait for the number of lanes that were opened over all connections, and return the last one."""
    readers = fleet.pushing.readers
    await until(lambda: sum(len(reader.subscribed) for reader in readers) >= lanes)
    return fleet.pushing.reader.lane


async def take(consumer: Consumer, count: int) -> list[Any]:
    taken: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            assert chunk.intact
            taken += chunk.batch["value"].to_pylist()
            if len(taken) >= count:
                break
    return taken


def log_of(fleet: PushFleet, streamlet: int = 0) -> list[StoredChunk]:
    return fleet.s.streamlets[streamlet].log


async def test_pushed_chunks_come_in_order_and_are_acknowledged_and_released(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(consumer_group="app"), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    reader.push(lane, log[2:5], 0)
    reader.push(lane, log[5:], 7)
    assert await taking == VALUES
    assert consumer.positions() == {0: [log[-1].end]}
    assert (fleet.pulled, reader.consumer_groups) == (0, ["app"])
    await consumer.close()
    await until(lambda: reader.taken_bytes == sum(len(chunk.data) for chunk in log) and reader.held == 0)


async def test_a_batch_lies_in_the_brokers_memory_and_holds_its_lease(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer()
    taking = asyncio.ensure_future(anext(consumer.batches()))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log_of(fleet)[:1], 3)
    chunk = await taking
    assert (chunk.pushed, chunk.intact) == (True, True)
    column = chunk.batch["value"]
    address = column.buffers()[2].address
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if "arena" in line]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in maps)
    del chunk, taking
    await consumer.close()
    await until(lambda: reader.taken_bytes > 0)
    gc.collect()
    assert reader.held == 1, "the column is enough to hold it"
    del column
    await until(lambda: reader.held == 0)


async def test_a_run_may_be_released_by_another_thread(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
    taking = asyncio.ensure_future(anext(consumer.batches()))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log_of(fleet)[:1], 3)
    held = [await taking]
    del taking
    await consumer.close()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    await until(lambda: reader.held == 0)


# --- a stuck broker ------------------------------------------------------------------------------------------


async def test_a_reader_reconnects_to_a_silent_broker_and_goes_on_where_it_stopped(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    fleet.pushing.hello.alive_interval_ms = 10
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    await until(lambda: reader.closed)
    again = await opened(fleet, 2)
    assert fleet.pushing.reader is not reader
    assert position_of(fleet.pushing.reader.subscribed[-1].start) == log[2].start
    fleet.pushing.reader.push(again, log[2:], 1)
    assert await taking == VALUES


async def test_a_reader_does_not_pull_from_a_broker_that_sends_no_greeting(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    fleet.pushing.hello.alive_interval_ms = 10
    consumer = make_consumer()
    taking = asyncio.ensure_future(anext(consumer.batches()))
    await opened(fleet)
    asked = fleet.questions()
    fleet.pushing.standing_still = True
    await until(lambda: fleet.questions() > asked + 2)
    assert fleet.pulled == 0
    fleet.pushing.standing_still, fleet.pushing.serving = False, True
    assert (await taking).pushed


async def test_a_reader_stays_with_a_broker_that_says_it_is_alive(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    fleet.pushing.hello.alive_interval_ms = 10
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(anext(consumer.batches()))
    lane, reader = await opened(fleet), fleet.pushing.reader
    for _ in range(200):
        reader.say_alive()
        await asyncio.sleep(0.001)  # sleep: in total several times as long as a silent broker gets
    assert not reader.closed
    reader.push(lane, log[:1], 0)
    assert (await taking).pushed


# --- reused slots --------------------------------------------------------------------------------------------


async def test_a_run_whose_slot_was_reused_before_it_came_is_requested_again(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    reader.push(lane, log[2:3], 1, generation=fleet.pushing.generations[1] - 1)
    reader.push(lane, log[3:4], 2)  # the reader must not take this run for the next one
    again = await opened(fleet, 2)
    assert position_of(reader.subscribed[-1].start) == log[2].start
    assert reader.cancelled == [lane]
    reader.push(again, log[2:], 3)
    assert await taking == VALUES
    await consumer.close()
    await until(lambda: reader.held == 0 and reader.outstanding_bytes == 0)
    assert fleet.pulled == 0


async def lose_slot(fleet: PushFleet, slot: int) -> None:
    """The broker puts another segment into the slot without a release, as the connection is gone."""
    fleet.pushing.refusing = True
    fleet.pushing.reader.lose()
    fleet.pushing.reuse(slot)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("way", ["batches", "records"])
async def test_chunks_whose_slot_was_reused_before_they_were_opened_are_read_again(
    fleet: PushFleet, make_consumer: MakeConsumer, way: str, verify: bool
) -> None:
    """The reader never delivers the new bytes, with or without checksums."""
    consumer, log = make_consumer(verify_checksums=verify), log_of(fleet)
    chunks: Any = consumer.batches() if way == "batches" else consumer.records()
    taken: list[Any] = []
    taking = asyncio.ensure_future(anext(chunks))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:3], 0)
    reader.push(lane, log[3:4], 1)
    reader.push(lane, log[4:], 2)
    taken.append(await taking)
    await until(lambda: consumer.fetched_ahead == 2)
    await lose_slot(fleet, 0)  # two of its chunks are not open yet
    fleet.pushing.reuse(2)
    async with asyncio.timeout(WAIT_S):
        taken += [await anext(chunks) for _ in range(5)]
    if way == "batches":
        assert [chunk.pushed for chunk in taken] == [True, False, False, True, False, False]
        assert [chunk.intact for chunk in taken] == [False, True, True, True, True, True]
        assert [chunk.batch["value"][0].as_py() for chunk in taken[1:]] == VALUES[1:]
        assert [chunk.start for chunk in taken] == [chunk.start for chunk in log]
    else:
        assert [record.value for record in taken] == VALUES
    assert consumer.positions() == {0: [log[-1].end]}


async def test_cancelling_a_read_while_chunks_are_read_again_skips_none(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    asked: list[int] = []
    answering = asyncio.Event()
    channel = fleet.cluster.channel

    async def slowly(stream: StreamDescription, broker_id: int) -> Channel:
        asked.append(broker_id)
        await answering.wait()
        return await channel(stream, broker_id)

    fleet.cluster.channel = slowly  # type: ignore[method-assign]
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(anext(consumer.batches()))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log, 0)
    taken = [await taking]
    await lose_slot(fleet, 0)
    giving_up = asyncio.ensure_future(anext(consumer.batches()))
    await until(lambda: bool(asked))
    giving_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await giving_up
    answering.set()
    async with asyncio.timeout(WAIT_S):
        taken += [await anext(consumer.batches()) for _ in range(5)]
    assert [chunk.start for chunk in taken] == [chunk.start for chunk in log]
    assert len(asked) >= 2, "what nobody has waited for is begun again"


async def test_records_are_made_from_copies_of_pushed_chunks(
    fleet: PushFleet, make_consumer: MakeConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are made one by one from trusted offsets, so the memory must not change meanwhile."""
    in_place: list[bool] = []

    def noted(chunk: ChunkBatch, stream: StreamDescription) -> Iterator[Record]:
        in_place.append(chunk.pushed)
        return records_of(chunk, stream)

    monkeypatch.setattr(consumer_module, "records_of", noted)
    consumer, log = make_consumer(), log_of(fleet)
    rows = aiter(consumer)
    taking = asyncio.ensure_future(anext(rows))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 1)
    assert (await taking).value == b"0"
    assert in_place == [False]
    chunk = await anext(consumer.batches())
    assert (chunk.pushed, chunk.start) == (True, log[1].start)


async def test_read_range_reads_overwritten_chunks_again(fleet: PushFleet) -> None:
    client, log = Client(fleet.cluster), log_of(fleet)
    chunks = client.read_range("s", 0, 0, EARLIEST, log[-1].end)
    taking = asyncio.ensure_future(anext(chunks))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log, 0)
    reader.end(lane, Reason.REACHED, log[-1].end)
    taken = [await taking]
    fleet.pushing.reuse(0)
    taken += [chunk async for chunk in chunks]
    assert [chunk.pushed for chunk in taken] == [True] + [False] * 5
    assert [chunk.start for chunk in taken] == [chunk.start for chunk in log]
    assert [chunk.batch["value"][0].as_py() for chunk in taken[1:]] == VALUES[1:]


async def test_a_bad_chunk_counts_as_overwritten_only_if_its_slot_was_reused() -> None:
    buffer = pa.py_buffer(bytes(256))
    for intact, expected in ((True, KeraError), (False, Overwritten)):
        slot = PushedSlot([1 if intact else 2], 0, 1)
        entry, start = EntryId(STREAM_ID, 0, 0), Position(1, 1, 0)
        wrong = fetch.Fetched(entry, start, Position(1, 1, 256), [buffer], 0, None, slot)
        with pytest.raises(expected):
            list(batches_of(wrong, description(), ConsumerSettings()))


# --- the window ----------------------------------------------------------------------------------------------


async def test_the_window_is_the_prefetch_limit_of_the_consumer(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    fleet.pushing.serving = True
    size = len(log_of(fleet)[0].data)
    consumer = make_consumer(prefetch_bytes_max=2 * size)
    await consumer.start()
    await opened(fleet)
    reader = fleet.pushing.reader
    assert reader.window_bytes == 2 * size
    await until(lambda: reader.outstanding_bytes == 2 * size)
    assert await take(consumer, 6) == VALUES
    await until(lambda: reader.outstanding_bytes == 0)


async def test_an_idle_consumer_does_not_stop_the_others(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    """Several consumers share a connection and its window."""
    put(fleet, *[b"more %d" % number + bytes(1000) for number in range(100)])
    fleet.pushing.serving = True
    expected = fleet.s.values()
    idle = [make_consumer(prefetch_bytes_max=4000) for _ in range(3)]
    for consumer in idle:
        await consumer.start()
    await opened(fleet, 3)
    busy = make_consumer(prefetch_bytes_max=4000)
    assert await take(busy, len(expected)) == expected
    reader = fleet.pushing.reader
    assert reader.window_bytes <= 4 * 4000 + SLOT_BYTES
    assert len(fleet.pushing.readers) == 1
    await busy.close()
    for consumer in idle:
        assert await take(consumer, len(expected)) == expected
        await consumer.close()
    await until(lambda: reader.held == 0 and reader.outstanding_bytes == 0)
    assert fleet.pulled == 0


async def test_a_window_is_limited_to_an_eighth_of_the_arena(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    await make_consumer(prefetch_bytes_max=1 << 40).start()
    await opened(fleet)
    assert fleet.pushing.reader.window_bytes == SLOTS * SLOT_BYTES // 8


# --- ends of lanes -------------------------------------------------------------------------------------------


async def test_a_pushed_range_ends_at_its_end_position(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    fleet.pushing.serving = True
    log = log_of(fleet)
    consumer = make_consumer(start={0: [log[1].start]}, end={0: [log[4].start]})
    assert await take(consumer, 99) == VALUES[1:4]
    assert position_of(fleet.pushing.reader.subscribed[0].end) == log[4].start
    await until(lambda: fleet.pushing.reader.held == 0)
    assert fleet.pulled == 0


async def test_a_range_follows_a_moved_streamlet(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    fleet.s.move(0, 2)
    put(fleet, b"moved")
    log = log_of(fleet)
    taking = asyncio.ensure_future(take(make_consumer(), 7))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:6], 0)
    reader.end(lane, Reason.MOVED, Position(log[-1].start.group_id, 1, 0))
    assert await taking == [*VALUES, b"moved"]
    assert (fleet.pulled, fleet.fake.brokers[2].calls.count("MultiReadChunks") > 0) == (0, True)


async def test_a_reader_told_to_pull_pulls_and_later_opens_a_lane_again(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(fetch_bytes_max=1), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 8))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    reader.end(lane, Reason.PULL, log[1].end)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await until(lambda: fleet.pulled >= 1 and loop.time() > began_s + 0.05)
    put(fleet, b"6")  # this answer is the occasion to open a lane again
    again = await opened(fleet, 2)
    start = position_of(reader.subscribed[-1].start)
    rest = [chunk for chunk in log if chunk.start >= start]
    if rest:
        reader.push(again, rest, 1)
    put(fleet, b"7")
    reader.push(again, log[7:], 2)
    assert await taking == [*VALUES, b"6", b"7"]


@pytest.mark.parametrize("error", [Unavailable("no room"), NotOwner("not here"), InvalidCursor("no boundary")])
async def test_a_lane_that_fails_with_a_temporary_error_is_opened_again(
    fleet: PushFleet, make_consumer: MakeConsumer, error: KeraError
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    fleet.pushing.serving = True
    reader.end(lane, Reason.FAILED, log[1].end, error)
    assert await taking == VALUES


async def test_a_permanent_error_is_raised_after_the_pushed_chunks(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    reader.end(lane, Reason.FAILED, log[1].end, DataLost("gone", available_from=[9, 1, 0]))
    with pytest.raises(DataLost, match="gone"):
        await taking
    assert consumer.positions() == {0: [log[1].end]}


@pytest.mark.parametrize("taken", [0, 2])
async def test_read_range_refuses_an_end_beyond_the_stream(fleet: PushFleet, taken: int) -> None:
    """A broker that pushes refuses such a lane at once; the error is the same as with pulling."""
    client, log = Client(fleet.cluster), log_of(fleet)
    chunks = client.read_range("s", 0, 0, log[6 - taken].start if taken else log[-1].end, Position(9, 1, 0))
    got: list[bytes] = []

    async def read() -> None:
        async for chunk in chunks:
            got.extend(chunk.batch["value"].to_pylist())

    async def refuse() -> None:
        for lanes in itertools.count(1):
            lane = await opened(fleet, lanes)
            fleet.pushing.reader.end(lane, Reason.FAILED, error=InvalidCursor("such an end will not come"))

    refusing = asyncio.ensure_future(refuse())
    with pytest.raises(InvalidArgument, match="beyond the end"):
        await read()
    refusing.cancel()
    assert got == VALUES[6 - taken :]


async def test_closing_a_consumer_releases_all_leases_and_window_bytes(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    await consumer.start()
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    await until(lambda: consumer.fetched_ahead == 1)
    await consumer.close()
    reader.push(lane, log[2:], 1)  # on its way when the consumer closed
    await until(lambda: reader.cancelled == [lane] and reader.held == 0 and reader.outstanding_bytes == 0)
    assert not reader.closed, "other consumers of the client may use it"


# --- connections ---------------------------------------------------------------------------------------------


async def test_all_consumers_of_a_client_share_a_connection(fleet: PushFleet, make_consumer: MakeConsumer) -> None:
    fleet.pushing.serving = True
    async with asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(take(make_consumer(), 6)) for _ in range(5)]
    assert [each.result() for each in reading] == [VALUES] * 5
    assert len(fleet.pushing.readers) == 1


async def test_a_lost_connection_is_reopened_and_no_chunk_comes_twice(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    reader.transport.close()
    fleet.pushing.serving = True
    assert await taking == VALUES
    assert len(fleet.pushing.readers) == 2
    assert position_of(fleet.pushing.reader.subscribed[0].start) == log[1].end


async def test_a_lane_over_a_closed_connection_ends_at_once(fleet: PushFleet) -> None:
    connection = await connect(fleet.info.push_unix_path, timeout_s=WAIT_S)
    subscriber = connection.subscriber("", 1000)
    await connection.close()
    ends: list[SubscriptionEnd] = []
    subscriber.open(Wanted(EntryId(STREAM_ID, 0, 0), EARLIEST, None), lambda _: None, ends.append)
    await until(lambda: bool(ends))
    assert (ends[0].next, type(ends[0].error)) == (EARLIEST, Unavailable)


async def test_a_reader_goes_on_at_the_broker_that_took_over_from_a_crashed_one(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 7))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    fleet.pushing.refusing = True
    await fleet.fake.brokers[1].crash()
    reader.transport.close()
    fleet.fake.take_over(1, 2)
    put(fleet, b"6")
    fleet.fake.recovered()
    assert await taking == [*VALUES, b"6"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lane": 77},
        {"slot": SLOTS},
        {"arena_offset": 0},
        {"length_bytes": SLOT_BYTES + 1},
        {"length_bytes": 0},
        {"group_id": 0},
        {"offset": (1 << 32) - 1},
    ],
)
async def test_an_invalid_run_ends_the_connection_and_is_not_delivered(
    fleet: PushFleet, make_consumer: MakeConsumer, changes: dict[str, int]
) -> None:
    consumer, log = make_consumer(), log_of(fleet)
    taking = asyncio.ensure_future(take(consumer, 6))
    lane, reader = await opened(fleet), fleet.pushing.reader
    reader.push(lane, log[:2], 0)
    fleet.pushing.refusing = True
    reader.push(lane, log[2:4], 1, **changes)
    assert await taking == VALUES
    assert reader.closed
    assert fleet.pulled > 0


async def test_a_failed_connection_is_garbage_collected_with_its_runs() -> None:
    """The garbage collector does not see Arrow's references, so they must not be part of a cycle."""

    def fail() -> "weakref.ref[PushChannel]":
        hello = push_pb2.PushHello(slots=1, slot_bytes=64, slots_at=64, rows_at=0, row_bytes=8, arena_bytes=128)
        channel = PushChannel(hello, memoryview(bytearray(128)), Decoder(), "somewhere", return_delay_s=0.001)
        channel.connection_made(FakeTransport())
        arrived: list[fetch.Fetched] = []
        wanted = fetch.Wanted(EntryId(STREAM_ID, 0, 0), Position(1, 1, 0), None)
        channel.subscriber("", 1 << 20).open(wanted, arrived.append, lambda _: None)
        good = Run(1, 0, 0, 64, 32, 1, 1, 0, 0)
        channel.data_received(encode_runs([good, good]))  # a repeated run is invalid
        assert len(arrived) == 1
        assert channel.failure is not None
        channel.connection_lost(None)
        return weakref.ref(channel)

    failed = fail()
    await until(lambda: gc.collect() >= 0 and failed() is None)  # a timer holds the channel for a moment


# --- readers that cannot use the channel ---------------------------------------------------------------------


async def test_a_consumer_with_shared_memory_never_opens_no_push_connection(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    consumer = make_consumer(shared_memory="never")
    assert await take(consumer, 6) == VALUES
    assert fleet.pushing.readers == []


async def test_a_client_over_tcp_gets_copies_and_refuses_shared_memory_always(
    make_fleet: MakeFleet, tmp_path: Path, make_consumer: MakeConsumer
) -> None:
    fleet = PushFleet(await make_fleet(transport="tcp"), tmp_path)
    put(fleet, *VALUES)
    assert await take(make_consumer(fleet), 6) == VALUES
    with pytest.raises(InvalidArgument, match="by tcp"):
        await take(make_consumer(fleet, shared_memory="always"), 6)
    await fleet.pushing.close()


async def test_push_is_tried_again_with_the_next_launch_of_a_broker_that_could_not_push(
    fleet: PushFleet, make_consumer: MakeConsumer
) -> None:
    async def pushed() -> bool:
        consumer = make_consumer()
        chunk = await anext(consumer.batches())
        await consumer.close()
        return chunk.pushed

    fleet.pushing.hello.version = 99
    assert [await pushed() for _ in range(3)] == [False] * 3
    assert len(fleet.pushing.readers) == 1, "nothing would be better the next time"
    fleet.pushing.hello.version, fleet.pushing.serving = VERSION, True
    fleet.info.broker_epoch += 1
    fleet.cluster.forget("s")
    assert [await pushed() for _ in range(3)] == [True] * 3
    assert len(fleet.pushing.readers) == 2
