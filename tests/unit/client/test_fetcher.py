"""The fetcher: readers follow streamlets over brokers through moves, crashes and recovery."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa
import pytest

from kera.client.client import Client
from kera.client.cluster.fetch import Wanted
from kera.client.cluster.timing import Timing
from kera.client.consuming.consumer import Consumer
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.settings import ConsumerSettings
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import (
    ClosedError,
    DataLost,
    InvalidArgument,
    InvalidCursor,
    NotOwner,
    ProtocolError,
    Recovering,
    Unavailable,
    UnknownStream,
)
from kera.core.format.chunk import encode_chunk, encode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.fake_support import NEVER_S, STREAM_ID, Fleet, MakeFleet
from tests.unit.client.support import WAIT_S, until

MakeConsumer = Callable[..., Consumer]


@pytest.fixture
async def make_consumer() -> AsyncIterator[MakeConsumer]:
    async with AsyncExitStack() as stack:

        def make(fleet: Fleet, **options: Any) -> Consumer:
            start, end = options.pop("start", "earliest"), options.pop("end", None)
            settings = ConsumerSettings(**{"fetch_wait_ms": 60_000, **options})
            consumer = Consumer(fleet.cluster, ("s",), settings, start=start, end=end)
            stack.push_async_callback(consumer.close)
            return consumer

        yield make


def put(fleet: Fleet, *values: bytes, streamlet: int = 0) -> None:
    """One chunk per value."""
    for value in values:
        columns = {"timestamp": [0], "keys": [None], "value": [value], "headers": [None]}
        batch = pa.record_batch([pa.array(columns[name.name], name.type) for name in DEFAULT_SCHEMA], DEFAULT_SCHEMA)
        chunk = encode_chunk(
            encode_payload(batch),
            record_count=1,
            stream_id=STREAM_ID,
            streamlet_id=streamlet,
            schema_id=1,
            producer_id=1,
            producer_epoch=1,
            sequence=0,
            created_us=0,
            min_timestamp_us=0,
            max_timestamp_us=0,
        )
        fleet.s.append(streamlet, chunk.to_bytes(), 1)


async def take(consumer: Consumer, count: int) -> list[bytes | None]:
    taken: list[bytes | None] = []
    if not count:
        return taken
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            taken += chunk.batch["value"].to_pylist()
            if len(taken) >= count:
                break
    return taken


async def test_a_reader_follows_a_streamlet_over_its_moves(make_fleet: MakeFleet, make_consumer: MakeConsumer) -> None:
    fleet = await make_fleet()
    put(fleet, b"a", b"b")
    fleet.s.move(0, 2)
    put(fleet, b"c")
    fleet.s.move(0, 1)
    put(fleet, b"d")
    fleet.s.move(0, 3)
    put(fleet, b"e")
    consumer = make_consumer(fleet)
    assert await take(consumer, 5) == [b"a", b"b", b"c", b"d", b"e"]
    await until(lambda: bool(fleet.fake.brokers[3].reads_waiting))
    waiting = [number for number, broker in fleet.fake.brokers.items() if broker.reads_waiting]
    assert waiting == [3], "readers without ranges end"
    assert [broker.ranges_refused for broker in fleet.fake.brokers.values()] == [0, 0, 0], "nobody was asked in vain"


async def test_a_range_added_as_an_answer_arrives_is_fetched(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(brokers=1, streamlets=2)
    put(fleet, b"a", streamlet=0)
    put(fleet, b"b", streamlet=1)
    fetcher = Fetcher(fleet.cluster, ConsumerSettings(fetch_wait_ms=60_000))
    stream = await fleet.cluster.stream("s")
    first, second = (Wanted(EntryId(STREAM_ID, number, 0), EARLIEST, None) for number in range(2))
    channel = await fleet.cluster.channel(stream, 1)
    submit = channel.submit

    def submit_and_add(*request: Any, **options: Any) -> Any:
        answer = submit(*request, **options)
        if len(fetcher_ranges) == 1:  # before the waiting task wakes up
            fetcher_ranges.append(second)
            answer.add_done_callback(lambda _: fetcher.add(stream, second))
        return answer

    fetcher_ranges = [first]
    channel.submit = submit_and_add  # type: ignore[method-assign]
    fetcher.add(stream, first)
    async with asyncio.timeout(WAIT_S):
        taken = [await fetcher.fetched(), await fetcher.fetched()]
    assert [item.entry.streamlet_id for item in taken if item is not None] == [0, 1]
    await fetcher.close()


async def test_a_reader_waiting_at_the_end_follows_a_move(make_fleet: MakeFleet, make_consumer: MakeConsumer) -> None:
    fleet = await make_fleet(streamlets=2)
    put(fleet, b"a")
    consumer = make_consumer(fleet)
    assert await take(consumer, 1) == [b"a"]
    await until(lambda: bool(fleet.fake.brokers[1].reads_waiting and fleet.fake.brokers[2].reads_waiting))
    fleet.s.move(0, 2)  # broker 2 holds the request of the other streamlet's reader, for want of data
    put(fleet, b"b")
    assert await take(consumer, 1) == [b"b"]
    assert consumer.positions()[0] == [Position(2, 1, fleet.s.streamlets[0].log[-1].end.offset)]


async def test_a_reader_at_the_end_of_an_interval_moves_to_the_next_one(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    """The broker may drop the old interval, and then the reader could not prove that it lost no records."""
    fleet = await make_fleet()
    put(fleet, b"a")
    consumer = make_consumer(fleet)
    assert await take(consumer, 1) == [b"a"]
    taking = asyncio.ensure_future(take(consumer, 1))
    fleet.s.move(0, 2)
    await until(lambda: consumer.positions() == {0: [Position(2, 1, 0)]})
    put(fleet, b"b")
    assert await taking == [b"b"]


async def test_a_position_unknown_to_a_replaced_broker_is_read_from_its_successor(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    """A replaced broker that has not noticed does not know the groups that its successor has created."""
    fleet = await make_fleet()
    put(fleet, b"a")
    older = fleet.s.info()
    fleet.s.move(0, 2)
    put(fleet, b"b")
    fleet.fake.coordinator.describe_as(STREAM_ID, older)
    fleet.fake.brokers[1].pause()
    consumer = make_consumer(fleet, start={0: [Position(2, 1, 0)]})
    taking = asyncio.ensure_future(take(consumer, 1))
    await until(lambda: bool(fleet.fake.brokers[1].calls))
    fleet.fake.coordinator.describe_as(STREAM_ID, None)
    fleet.fake.brokers[1].refuse(InvalidCursor("it has no group 2"))
    fleet.fake.brokers[1].resume()
    assert await taking == [b"b"]


async def test_a_position_unknown_to_every_broker_is_an_error(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet()
    put(fleet, b"a")
    fleet.fake.brokers[1].refuse_all(InvalidCursor("it has no group 9"))
    with pytest.raises(InvalidCursor, match="it has no group 9"):
        await take(make_consumer(fleet, start={0: [Position(9, 1, 0)]}), 1)


async def test_a_reader_passes_over_empty_intervals(make_fleet: MakeFleet, make_consumer: MakeConsumer) -> None:
    fleet = await make_fleet()
    for broker_id in (2, 3, 2):
        fleet.s.move(0, broker_id)
    put(fleet, b"a")
    assert await take(make_consumer(fleet), 1) == [b"a"]


async def test_a_reader_starts_at_the_broker_that_has_its_position(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet()
    put(fleet, b"a", b"b")
    fleet.s.move(0, 2)
    put(fleet, b"c", b"d")
    fleet.s.move(0, 3)
    first = make_consumer(fleet)
    assert await take(first, 3) == [b"a", b"b", b"c"]
    fleet.fake.brokers[1].requests.log.clear()
    assert await take(make_consumer(fleet, start=first.positions()), 1) == [b"d"]
    assert fleet.fake.brokers[1].calls == []


async def test_only_the_moved_range_is_requested_again(make_fleet: MakeFleet, make_consumer: MakeConsumer) -> None:
    """Metadata is stale, and the old broker does not have the streamlet any more."""
    fleet = await make_fleet(brokers=2, streamlets=3)
    put(fleet, b"a", streamlet=0)
    put(fleet, b"c", streamlet=2)
    await fleet.cluster.stream("s")
    fleet.s.relocate(0, 2)
    consumer = make_consumer(fleet)
    assert sorted(await take(consumer, 2)) == [b"a", b"c"]  # type: ignore[type-var]
    await until(lambda: bool(fleet.fake.brokers[1].reads_waiting))
    assert set(fleet.wanted(1)) == {0, 2}
    assert fleet.wanted(1).count(0) == 1, "asked once, and refused"


async def test_a_broker_that_has_not_opened_the_streamlet_is_asked_again(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet()
    fleet.s.move(0, 2, opened=False)
    put(fleet, b"a")
    taking = asyncio.ensure_future(take(make_consumer(fleet), 1))
    await until(lambda: fleet.fake.brokers[2].calls.count("MultiReadChunks") >= 2)
    fleet.s.open(0)
    assert await taking == [b"a"]


async def test_a_reader_survives_a_crash_and_reads_other_brokers_meanwhile(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet(brokers=2, streamlets=2)
    put(fleet, b"a", b"b")
    consumer = make_consumer(fleet)
    assert await take(consumer, 2) == [b"a", b"b"]
    await fleet.fake.brokers[1].crash()
    put(fleet, b"of another", streamlet=1)
    assert await take(consumer, 1) == [b"of another"]
    fleet.fake.take_over(1, 2)
    put(fleet, b"c")
    assert await take(consumer, 1) == [b"c"]


async def test_a_reader_waits_for_a_recovery_beyond_the_retry_timeout(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet(retry_timeout_ms=20)
    put(fleet, b"a")
    await fleet.fake.brokers[1].crash()
    fleet.fake.take_over(1, 2)
    put(fleet, b"b")
    taking = asyncio.ensure_future(take(make_consumer(fleet), 2))
    # The pauses between the attempts double from 1 ms on: in total they are longer than the timeout.
    await until(lambda: fleet.fake.brokers[2].calls.count("MultiReadChunks") > 6)
    assert not taking.done()
    fleet.fake.recovered()
    assert await taking == [b"a", b"b"]


async def test_a_recovery_that_never_ends_fails_after_its_timeout(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet(recovery_timeout_ms=50)
    put(fleet, b"a")
    await fleet.fake.brokers[1].crash()
    fleet.fake.take_over(1, 2)
    with pytest.raises(Recovering):
        await take(make_consumer(fleet), 1)


async def test_a_streamlet_that_no_broker_opens_fails_after_the_retry_timeout(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet(retry_timeout_ms=50)
    fleet.s.move(0, 2, opened=False)
    put(fleet, b"a")
    with pytest.raises(NotOwner, match="not opened yet"):
        await take(make_consumer(fleet), 1)


async def test_reading_a_deleted_stream_fails_at_once(make_fleet: MakeFleet, make_consumer: MakeConsumer) -> None:
    fleet = await make_fleet(retry_timeout_ms=round(NEVER_S * 1000))
    put(fleet, b"a")
    consumer = make_consumer(fleet)
    await take(consumer, 1)
    fleet.fake.delete_stream("s")
    with pytest.raises(UnknownStream):
        await take(consumer, 1)


async def test_a_reader_follows_a_move_after_the_coordinator_was_away(
    make_fleet: MakeFleet, make_consumer: MakeConsumer
) -> None:
    fleet = await make_fleet()
    put(fleet, b"a")
    consumer = make_consumer(fleet)
    await take(consumer, 1)
    fleet.fake.coordinator.refuse(*[Unavailable("nobody leads")] * 3)
    fleet.s.move(0, 2, opened=False)
    await until(lambda: not fleet.fake.coordinator.requests.refusals_left)
    fleet.s.open(0)
    put(fleet, b"b")
    assert await take(consumer, 1) == [b"b"]


@pytest.mark.parametrize("end", ["latest", None])
async def test_read_range_follows_a_streamlet_over_its_moves(make_fleet: MakeFleet, end: str | None) -> None:
    fleet = await make_fleet()
    put(fleet, b"a", b"b")
    fleet.s.move(0, 2)
    put(fleet, b"c")
    fleet.s.move(0, 3)
    put(fleet, b"d")
    client = Client(fleet.cluster)
    stop = (await client.bounds("s"))[0][0].end if end else None
    taken: list[bytes] = []
    async for chunk in client.read_range("s", 0, 0, Position(0, 0, 0), stop, bytes_max=1):
        taken += chunk.batch["value"].to_pylist()
    assert taken == [b"a", b"b", b"c", b"d"]
    with pytest.raises(InvalidArgument, match="beyond the end"):
        async for _ in client.read_range("s", 0, 0, Position(1, 1, 0), Position(9, 1, 0)):
            pass
    await client.close()


async def test_bounds_cover_all_intervals(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet()
    (empty,) = (await fleet.cluster.bounds("s"))[0]
    assert (empty.start, empty.end, empty.next_record) == (Position(0, 0, 0), Position(0, 0, 0), 0)
    fleet.s.move(0, 2)
    put(fleet, b"a", b"b")
    fleet.s.move(0, 3)
    put(fleet, b"c")
    fleet.s.move(0, 2)
    log = fleet.s.streamlets[0].log
    (bounds,) = (await fleet.cluster.bounds("s"))[0]
    assert (bounds.start, bounds.first_record) == (Position(2, 1, 0), 0)
    assert (bounds.end, bounds.next_record) == (Position(4, 1, 0), 3)
    assert bounds.length_bytes == sum(len(chunk.data) for chunk in log)
    put(fleet, b"d")
    (bounds,) = (await fleet.cluster.bounds("s"))[0]
    assert (bounds.end, bounds.next_record) == (log[-1].end, 4)


@pytest.fixture
async def make_fetcher() -> AsyncIterator[Callable[[Fleet], Fetcher]]:
    async with AsyncExitStack() as stack:

        def make(fleet: Fleet) -> Fetcher:
            fetcher = Fetcher(fleet.cluster, ConsumerSettings(fetch_wait_ms=60_000))
            stack.push_async_callback(fetcher.close)
            return fetcher

        yield make


async def add(fetcher: Fetcher, fleet: Fleet, streamlet: int) -> None:
    fetcher.add(await fleet.cluster.stream("s"), Wanted(EntryId(STREAM_ID, streamlet, 0), EARLIEST, None))


async def test_many_ranges_in_quick_succession_share_requests(
    make_fleet: MakeFleet, make_fetcher: Callable[[Fleet], Fetcher]
) -> None:
    interrupt_s, loop = 0.05, asyncio.get_running_loop()
    fleet = await make_fleet(brokers=1, streamlets=60, timing=Timing(interrupt_read_s=interrupt_s))
    fetcher = make_fetcher(fleet)
    await add(fetcher, fleet, 0)
    await until(lambda: bool(fleet.fake.brokers[1].reads_waiting))
    began_s = loop.time()
    for streamlet in range(1, 60):
        await add(fetcher, fleet, streamlet)
        await asyncio.sleep(0)
    await until(lambda: set(fleet.wanted(1)) == set(range(60)))
    assert fleet.fake.brokers[1].calls.count("MultiReadChunks") <= 2 + (loop.time() - began_s) / interrupt_s


async def test_a_new_range_does_not_interrupt_a_request_that_is_answered_soon(
    make_fleet: MakeFleet, make_fetcher: Callable[[Fleet], Fetcher]
) -> None:
    fleet = await make_fleet(brokers=1, streamlets=2, timing=Timing(interrupt_read_s=NEVER_S))
    fetcher = make_fetcher(fleet)
    put(fleet, b"b", streamlet=1)
    await add(fetcher, fleet, 0)
    await until(lambda: bool(fleet.fake.brokers[1].reads_waiting))
    await add(fetcher, fleet, 1)
    put(fleet, b"a", streamlet=0)
    async with asyncio.timeout(WAIT_S):
        arrived = [await fetcher.fetched() for _ in range(2)]
    assert [each.entry.streamlet_id for each in arrived if each is not None] == [0, 1]
    assert fleet.wanted(1) == [0, 1], "asked for once each: the session was not begun anew"


async def test_a_cancelled_close_of_a_fetcher_raises_and_ends_waiting_takes(
    make_fleet: MakeFleet,
) -> None:
    """A swallowed cancellation would make a timeout around the call wait for ever."""
    fleet = await make_fleet(brokers=1)
    fetcher = Fetcher(fleet.cluster, ConsumerSettings())
    begun, end = asyncio.Event(), asyncio.Event()

    async def slow_to_end(*_: Any) -> Any:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await end.wait()

    fleet.cluster.channel = slow_to_end  # type: ignore[method-assign, assignment]
    fetcher.add(await fleet.cluster.stream("s"), Wanted(EntryId(STREAM_ID, 0, 0), EARLIEST, None))
    await begun.wait()
    waiting = asyncio.ensure_future(fetcher.take())
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(fetcher.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0)
    end.set()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ClosedError):
            await waiting


async def test_a_range_is_fetched_after_its_broker_left_before_the_first_connection(
    make_fleet: MakeFleet, make_fetcher: Callable[[Fleet], Fetcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = await make_fleet(brokers=2, streamlets=2)
    fetcher = make_fetcher(fleet)
    monkeypatch.setattr(fleet.cluster.locality, "reachable", lambda broker, *_: broker and broker.broker_id == 1)
    before = await fleet.cluster.stream("s")
    fleet.s.relocate(0, 2)
    put(fleet, b"a")
    fleet.cluster.forget("s")
    after = await fleet.cluster.stream("s")
    fetcher.add(before, Wanted(EntryId(STREAM_ID, 0, 0), EARLIEST, None))
    without_it = replace(after, brokers={2: after.brokers[2]})
    fetcher.add(without_it, Wanted(EntryId(STREAM_ID, 1, 0), EARLIEST, None))
    async with asyncio.timeout(WAIT_S):
        arrived = await fetcher.fetched()
    assert arrived is not None
    assert arrived.entry.streamlet_id == 0


@pytest.mark.parametrize("on_data_lost", ["raise", "skip"])
async def test_a_consumer_fails_on_lost_data_or_skips_it_as_the_setting_says(
    make_fleet: MakeFleet, on_data_lost: Literal["raise", "skip"]
) -> None:
    fleet = await make_fleet(brokers=1)
    put(fleet, b"a", b"b", b"c")
    streamlet = fleet.s.streamlets[0]
    first, gone, left = (chunk.start for chunk in streamlet.log)
    streamlet.truncate(left)
    settings = ConsumerSettings(on_data_lost=on_data_lost)
    consumer = Consumer(fleet.cluster, ("s",), settings, start={0: [gone]}, end="latest")
    async with asyncio.timeout(WAIT_S), consumer:
        if on_data_lost == "raise":
            with pytest.raises(DataLost):
                await anext(consumer.batches())
        else:
            assert [chunk.batch["value"].to_pylist() async for chunk in consumer.batches()] == [[b"c"]]
            assert consumer.positions()[0][0] > left > first


async def test_a_gap_without_a_known_end_is_rejected(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(brokers=1)
    fleet.fake.brokers[1].refuse_all(DataLost("gone", available_from=[1, "x"]))
    consumer = Consumer(fleet.cluster, ("s",), ConsumerSettings(on_data_lost="skip"), start="earliest")
    async with asyncio.timeout(WAIT_S), consumer:
        with pytest.raises(ProtocolError, match="the start of an entry: gone"):
            await anext(consumer.batches())
