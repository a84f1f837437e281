"""Routes of a producer: it follows streamlets over brokers, and a named one fences its predecessors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack
from typing import Any

import pyarrow as pa
import pytest

from kera.client.producing.lanes.lane import LAST_EPOCH, Lane
from kera.client.producing.lanes.stream_lanes import ProducerIdentity
from kera.client.producing.open_chunks.accumulator import Pending
from kera.client.producing.open_chunks.hooks import ChunkHooks
from kera.client.producing.open_chunks.stream_writer import StreamWriter
from kera.client.producing.outcomes.outcome import BatchDelivery
from kera.client.producing.producer import Producer
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.fill_time import Due, FillTime
from kera.client.producing.sending.routes import LIMITS, ProducerLimits, Routes
from kera.client.settings import ProducerSettings
from kera.client.types import Delivery, StreamDescription
from kera.core.base.ids import PRODUCER_EPOCHS
from kera.core.errors import (
    ClosedError,
    KeraError,
    ProducerFenced,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from tests.unit.client.fake_support import NEVER_S, Fleet, MakeFleet
from tests.unit.client.support import WAIT_S, until

CHUNK_BYTES_MAX = 48
"""So small that batches are not gathered, and that a record waits in its open chunk."""

MakeProducer = Callable[..., Producer]
MakeWriting = Callable[..., Awaitable["Writing"]]


@pytest.fixture
async def make_producer() -> AsyncIterator[MakeProducer]:
    async with AsyncExitStack() as stack:

        def make(fleet: Fleet, *, limits: ProducerLimits = LIMITS, **settings: Any) -> Producer:
            settings = {"chunk_bytes_max": CHUNK_BYTES_MAX, **settings}
            producer = Producer(fleet.cluster, ProducerSettings(**settings), limits=limits)
            stack.push_async_callback(producer.close, flush=False)
            return producer

        yield make


async def give(work: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await work


class Only(Awaitable[Delivery]):
    """The single delivery of a batch of one chunk."""

    def __init__(self, batch: BatchDelivery) -> None:
        self.batch = batch

    def __await__(self) -> Generator[Any, None, Delivery]:
        (delivery,) = yield from self.batch.__await__()
        return delivery


async def send(producer: Producer, *values: bytes, streamlet: int = 0) -> list[Awaitable[Delivery]]:
    """One chunk per value."""
    batches = [pa.record_batch({"value": [value]}) for value in values]
    return [Only(await producer.send_batch("s", batch, streamlet=streamlet)) for batch in batches]


class Writing:
    """The parts of a producer for one stream of one streamlet."""

    def __init__(self, fleet: Fleet, stream: StreamDescription, **settings: Any) -> None:
        options = ProducerSettings(**settings)
        self.buffer = Buffer(options.buffer_bytes_max)
        self.failures: list[KeraError] = []
        self.routes = Routes(
            fleet.cluster,
            options,
            self.buffer,
            close_due_chunks=self.close_due_chunks,
            fail=self.failures.append,
            limits=LIMITS,
        )
        self.writer = StreamWriter(
            stream, ProducerIdentity(1, 1, LAST_EPOCH), options, self.buffer, self.routes, {}, ChunkHooks()
        )

    def close_due_chunks(self, lanes: set[Lane], fill_time: FillTime, *, idle: bool) -> Due:
        return self.writer.close_due_chunks(lanes, fill_time, idle=idle)

    def send(self, value: bytes) -> Pending:
        self.buffer.take(len(value))
        return self.writer.open_chunk(0, len(value), 0).append(value, 0.0, len(value))

    async def send_chunk(self, value: bytes) -> Delivery:
        pending = self.send(value)
        self.writer.close_open_chunk(0)
        delivery: Delivery = await give(pending)
        return delivery

    async def look_again(self, fleet: Fleet) -> None:
        fleet.cluster.forget("s")
        await self.routes.refresh(self.writer.lanes)

    def close(self) -> None:
        self.routes.stop()
        self.buffer.close()


@pytest.fixture
async def make_writing() -> AsyncIterator[MakeWriting]:
    async with AsyncExitStack() as stack:

        async def make(fleet: Fleet, **settings: Any) -> Writing:
            writing = Writing(fleet, await fleet.cluster.stream("s"), **settings)
            stack.callback(writing.close)
            return writing

        yield make


class TestMoves:
    async def test_chunks_follow_a_moved_streamlet_and_idle_senders_end(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(streamlets=2)
        producer = make_producer(fleet)
        await send(producer, b"a", streamlet=0)
        await send(producer, b"b", streamlet=1)
        await give(producer.flush())
        assert producer.routes.broker_ids == [1, 2]
        fleet.s.move(0, 3)
        (second,) = await send(producer, b"c")
        assert (await give(second)).record == 1
        await send(producer, b"d", streamlet=1)
        await give(producer.flush())
        assert fleet.s.values(0) == [b"a", b"c"]
        assert fleet.s.values(1) == [b"b", b"d"]
        assert producer.routes.broker_ids == [2, 3], "a sender that serves nothing ends"

    async def test_writes_to_a_sealed_streamlet_are_retried_while_others_go_on(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(brokers=1, streamlets=2, retry_backoff_ms=50)
        producer = make_producer(fleet)
        await send(producer, b"a", streamlet=0)
        await give(producer.flush())
        fleet.s.seal(0)
        fleet.s.attempts.clear()
        waiting = asyncio.ensure_future(give((await send(producer, b"b", streamlet=0))[0]))
        await until(lambda: len(fleet.s.attempts) >= 4)
        times_s = [when_s for when_s, _, streamlet in fleet.s.attempts if streamlet == 0]
        assert times_s[1] - times_s[0] >= 0.005
        await give((await send(producer, b"c", streamlet=1))[0])
        assert not waiting.done()
        fleet.s.unseal(0)
        assert (await waiting).record == 1

    async def test_requests_in_flight_end_before_chunks_go_to_the_new_owner(
        self, make_fleet: MakeFleet, make_writing: MakeWriting
    ) -> None:
        fleet = await make_fleet(brokers=2)
        writing = await make_writing(fleet, request_bytes_max=1, requests_in_flight_max=3)
        await writing.send_chunk(b"a")
        fleet.fake.brokers[1].pause("MultiWriteChunks")
        for number in range(8):
            writing.send(b"%d" % number)
            writing.writer.close_open_chunks()
        await until(lambda: fleet.fake.brokers[1].requests.waiting == 3)
        fleet.s.move(0, 2)
        await writing.look_again(fleet)
        for _ in range(100):
            await asyncio.sleep(0)
        assert fleet.s.attempts[1:] == []
        assert fleet.fake.brokers[2].calls == []
        fleet.fake.brokers[1].resume()
        await give(writing.buffer.flush())
        assert writing.routes.broker_ids == [2]
        assert fleet.s.values() == [b"a", *(b"%d" % number for number in range(8))]
        assert [broker for _, broker, _ in fleet.s.attempts] == [1] * 4 + [2] * 8

    async def test_a_constantly_moving_streamlet_gets_each_record_once_and_in_order(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(brokers=3, streamlets=2)
        producer = make_producer(fleet, request_bytes_max=1)
        values = [b"%d" % number for number in range(300)]

        async def move() -> None:
            for number in range(40):
                fleet.s.seal(0)
                await asyncio.sleep(0.001)  # sleep: the test varies the pace of the moves
                fleet.s.move(0, 1 + number % 3, opened=bool(number % 2))
                await asyncio.sleep(0.002)  # sleep: likewise
                fleet.s.open(0)

        moving = asyncio.ensure_future(move())
        for first in range(0, 300, 10):
            await send(producer, *values[first : first + 10])
            await send(producer, *values[first : first + 10], streamlet=1)
            await asyncio.sleep(0.002)  # sleep: so that moves come in between
        await moving
        await give(producer.flush())
        assert fleet.s.values(0) == fleet.s.values(1) == values

    async def test_a_chunk_in_flight_survives_a_crash_and_goes_to_the_successor(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(brokers=2)
        producer = make_producer(fleet)
        await send(producer, b"a")
        await give(producer.flush())
        fleet.fake.brokers[1].pause("MultiWriteChunks")
        (in_flight,) = await send(producer, b"b")
        await until(lambda: fleet.fake.brokers[1].requests.waiting > 0)
        await fleet.fake.brokers[1].crash()
        fleet.fake.brokers[1].resume()
        asked = fleet.questions()
        await until(lambda: fleet.questions() > asked + 3)
        fleet.fake.take_over(1, 2)
        assert (await give(in_flight)).record == 1
        assert fleet.s.values() == [b"a", b"b"]
        assert producer.routes.broker_ids == [2]

    async def test_records_of_an_open_chunk_go_to_the_new_owner(
        self, make_fleet: MakeFleet, make_writing: MakeWriting
    ) -> None:
        fleet = await make_fleet(brokers=2)
        writing = await make_writing(fleet, linger_ms=50)
        await writing.send_chunk(b"a")
        gathering = writing.send(b"b")
        fleet.s.move(0, 2)
        await writing.look_again(fleet)
        assert (await give(gathering)).record == 1
        assert [broker for _, broker, _ in fleet.s.attempts] == [1, 2]

    async def test_a_write_succeeds_after_the_coordinator_was_away(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(brokers=1)
        producer = make_producer(fleet)
        await producer.prepare("s")
        fleet.s.seal(0)
        fleet.fake.coordinator.refuse(*[Unavailable("nobody leads")] * 2)
        (pending,) = await send(producer, b"a")
        await until(lambda: not fleet.fake.coordinator.requests.refusals_left)
        fleet.s.unseal(0)
        await give(pending)

    async def test_writes_to_a_deleted_stream_fail_at_once(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(streamlets=2)
        producer = make_producer(fleet, delivery_timeout_ms=round(NEVER_S * 1000))
        await send(producer, b"a")
        await send(producer, b"a", streamlet=1)
        await give(producer.flush())
        fleet.fake.delete_stream("s")
        first, second = await send(producer, b"b", b"c")
        for pending in (first, second):
            with pytest.raises(UnknownStream):
                await give(pending)

    async def test_closing_a_producer_ends_its_search_for_a_broker(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet()
        fleet.s.seal(0)
        producer = make_producer(fleet)
        (pending,) = await send(producer, b"a")
        await until(lambda: len(fleet.s.attempts) > 1 and producer.routes.searches > 0)
        await producer.close(flush=False)
        with pytest.raises(ClosedError):
            await give(pending)
        await until(lambda: not producer.routes.searches)


class TestNames:
    async def test_a_successor_takes_over_the_producer_id_and_fences_its_predecessor(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(streamlets=2)
        first = make_producer(fleet, name="loader", linger_ms=60_000)
        second = make_producer(fleet, name="loader")
        await give((await send(first, b"a"))[0])
        await give((await send(second, b"b"))[0])
        pending = await send(first, b"too late", b"as well")
        open_one = first.send("s", b"gathering", streamlet=1)
        for each in (*pending, open_one):
            with pytest.raises(ProducerFenced, match="a newer producer with the name 'loader' has taken over"):
                await give(each)
        with pytest.raises(ProducerFenced):
            first.send("s", b"more")
        with pytest.raises(ProducerFenced):
            await first.prepare("other")
        for _ in range(2):
            with pytest.raises(ProducerFenced):
                await give(first.flush())
        with pytest.raises(ProducerFenced):
            await give(first.close())
        await give((await send(second, b"c"))[0])
        assert fleet.s.values(0) == [b"a", b"b", b"c"]
        assert fleet.s.values(1) == []
        assert list(fleet.s.streamlets[0].producers) == [1]

    async def test_a_fenced_producer_still_gets_answers_from_other_brokers(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet(streamlets=2)
        first, second = make_producer(fleet, name="loader"), make_producer(fleet, name="loader")
        await give((await send(first, b"a"))[0])
        fleet.fake.brokers[2].pause("MultiWriteChunks")
        (in_flight,) = await send(first, b"b", streamlet=1)
        await until(lambda: fleet.fake.brokers[2].requests.waiting > 0)
        await give((await send(second, b"c"))[0])
        (fenced,) = await send(first, b"too late")
        with pytest.raises(ProducerFenced):
            await give(fenced)
        fleet.fake.brokers[2].resume()
        assert (await give(in_flight)).record == 0

    async def test_drain_ends_when_the_producer_is_fenced(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet()
        first, second = make_producer(fleet, name="x", buffer_bytes_max=1024), make_producer(fleet, name="x")
        await give((await send(first, b"a"))[0])
        await give((await send(second, b"b"))[0])
        fleet.fake.brokers[1].pause("MultiWriteChunks")
        first.send("s", b"x" * 900)
        draining = asyncio.ensure_future(first.drain())
        await until(lambda: fleet.fake.brokers[1].requests.waiting > 0)
        fleet.fake.brokers[1].resume()
        await give(draining)
        with pytest.raises(ProducerFenced):
            first.send("s", b"more")

    async def test_epochs_of_a_lane_stay_below_those_of_a_successor(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet()
        first = make_producer(fleet, name="loader")
        await give((await send(first, b"a"))[0])
        fleet.s.streamlets[0].producers.clear()  # the broker has lost the producer: the lane takes a new epoch
        await give((await send(first, b"b"))[0])
        assert fleet.s.streamlets[0].producers[1][0] == 2
        second = make_producer(fleet, name="loader")
        await give((await send(second, b"c"))[0])
        assert fleet.s.streamlets[0].producers[1][0] == 1 + PRODUCER_EPOCHS

    async def test_a_producer_closes_when_its_epochs_are_used_up(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet()
        producer = make_producer(fleet, limits=ProducerLimits(epochs=1), name="loader")
        await give((await send(producer, b"a"))[0])
        fleet.s.streamlets[0].producers.clear()
        with pytest.raises(ClosedError, match="1 epochs are used up; make a new one with the same name"):
            await give((await send(producer, b"b"))[0])
        with pytest.raises(ClosedError):
            producer.send("s", b"c")

    async def test_flush_of_a_fenced_producer_with_an_uncertain_chunk_raises_fenced(
        self, make_fleet: MakeFleet, make_producer: MakeProducer
    ) -> None:
        fleet = await make_fleet()
        first, second = make_producer(fleet, name="x"), make_producer(fleet, name="x")
        await give((await send(first, b"a"))[0])
        await give((await send(second, b"b"))[0])
        chunk_errors: list[KeraError] = []
        fleet.fake.brokers[1].refuse(Uncertain("no answer"))
        (pending,) = await send(first, b"c")
        try:
            await give(pending)
        except KeraError as error:
            chunk_errors.append(error)
        assert isinstance(chunk_errors[0], Uncertain)
        with pytest.raises(ProducerFenced):
            first.send("s", b"d")
        with pytest.raises(ProducerFenced):  # final, so it wins over the chunk's error, which says "try again"
            await give(first.flush())
