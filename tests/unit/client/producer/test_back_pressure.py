"""Back-pressure: a producer keeps to the limits of its buffer, of its requests in flight and of a request's size."""

import asyncio
import itertools

import pytest

from kera.client.producing.producer import Producer
from kera.client.producing.sending.buffer import Buffer
from kera.client.producing.sending.routes import ProducerLimits
from kera.client.settings import ProducerSettings
from kera.core.base.clock import FakeClock
from kera.core.errors import BufferFull, ClosedError, RecordTooLarge
from kera.v1 import broker_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import WAIT_S, FakeCluster, Fault, until


def fill(producer: Producer) -> int:
    """Send until the buffer is full; returns how many records it took."""
    for accepted in itertools.count():
        try:
            producer.send("s", b"x" * 100)
        except BufferFull:
            return accepted
    raise AssertionError


class TestBackPressure:
    async def test_a_full_buffer_refuses_and_drain_waits_for_room(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, buffer_bytes_max=16 << 10, chunk_bytes_max=2048)
        await producer.prepare("s")
        accepted = fill(producer)
        with pytest.raises(BufferFull) as caught:
            producer.send("s", b"x" * 100)
        assert caught.value.attributes["limit"] == 16 << 10
        assert 90 < accepted < 170
        draining = asyncio.ensure_future(producer.drain())
        await until(lambda: bool(cluster.loopback.held))
        assert not draining.done()
        cluster.loopback.default_fault = Fault.NONE
        cluster.loopback.release()
        await give(draining)
        producer.send("s", b"last")
        await give(producer.flush())
        assert len(cluster.values()) == accepted + 1

    async def test_a_record_larger_than_half_the_buffer_gets_through(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """A `drain` that stops at half of the buffer would return at once, for ever."""
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, buffer_bytes_max=32 << 10)
        await producer.prepare("s")
        producer.send("s", b"x" * (14 << 10))
        with pytest.raises(BufferFull):
            producer.send("s", b"y" * (24 << 10))
        draining = asyncio.ensure_future(producer.drain())
        await until(lambda: bool(cluster.loopback.held))
        assert not draining.done()
        cluster.loopback.default_fault = Fault.NONE
        cluster.loopback.release()
        await give(draining)
        await give(producer.send("s", b"y" * (24 << 10)))

    async def test_a_record_larger_than_the_buffer_is_sent_when_the_buffer_is_empty(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, buffer_bytes_max=4 << 10)
        await producer.prepare("s")
        await give(producer.send("s", b"x" * (20 << 10)))
        await give(await producer.send_batch("s", batch(b"x" * (20 << 10))))

    async def test_send_batch_waits_for_room(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, buffer_bytes_max=16 << 10, chunk_bytes_max=4096)
        sending = asyncio.ensure_future(producer.send_batch("s", batch(*[b"x" * 100] * 1000)))
        await until(lambda: bool(cluster.loopback.held))
        assert not sending.done()
        assert sum(header.payload_bytes for write in cluster.loopback.writes for header in write) <= 16 << 10
        cluster.loopback.default_fault = Fault.NONE
        cluster.loopback.release()
        await give(await give(sending))
        assert len(cluster.values()) == 1000

    async def test_chunks_do_not_linger_while_a_caller_waits_for_room(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, buffer_bytes_max=8 << 10, linger_ms=3_600_000)
        await producer.prepare("s")
        fill(producer)
        await give(producer.drain())
        producer.send("s", b"x" * 100)
        await give(producer.send_batch("s", batch(b"y" * (7 << 10))))

    async def test_requests_in_flight_reach_their_limit_and_no_more(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, requests_in_flight_max=3, chunk_bytes_max=1024, request_bytes_max=2048)
        await producer.send_batch("s", batch(*[b"x" * 100] * 200))
        await until(lambda: len(cluster.loopback.held) == 3)
        cluster.loopback.default_fault = Fault.NONE
        cluster.loopback.release()
        await give(producer.flush())
        assert cluster.loopback.in_flight_max == 3
        assert all(len(write) <= 2 for write in cluster.loopback.writes)

    async def test_a_request_has_no_more_chunks_than_its_limit(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        limits = ProducerLimits(request_chunks_max=3)
        producer = make_producer(cluster, limits=limits, chunk_bytes_max=1024, requests_in_flight_max=1)
        await producer.prepare("s")
        pending = [producer.send("s", b"%d" % number * 900) for number in range(10)]
        await producer.flush()
        assert all(each.done() for each in pending)
        assert max(map(len, cluster.loopback.writes)) == 3
        assert sum(map(len, cluster.loopback.writes)) == len(list(cluster.chunks()))

    async def test_a_request_is_no_larger_than_a_message(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.settings = cluster.settings.model_copy(update={"message_bytes_max": 8 << 10})
        producer = make_producer(cluster, chunk_bytes_max=1024, request_bytes_max=1 << 20)
        await give(await producer.send_batch("s", batch(*[b"x" * 100] * 500)))
        sizes = [sum(header.chunk_bytes for header in write) for write in cluster.loopback.writes]
        assert max(sizes) <= 8 << 10
        assert len(sizes) > 5

    @pytest.mark.parametrize("step_s", [-0.02, -3600.0, 3600.0])
    async def test_a_chunk_lingers_no_longer_when_the_wall_clock_steps(
        self, cluster: FakeCluster, step_s: float
    ) -> None:
        clock = FakeClock()
        async with Producer(cluster, ProducerSettings(linger_ms=20), clock) as producer:  # type: ignore[arg-type]
            await producer.prepare("s")
            pending = producer.send("s", b"a")
            clock.step(step_s)
            await give(pending)
            assert cluster.values() == [b"a"]

    async def test_a_chunk_lingers_for_the_time_of_the_setting(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=20)
        await producer.prepare("s")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        first = producer.send("s", b"a")
        await asyncio.sleep(0)
        second = producer.send("s", b"b")
        assert (await give(first)).position == (await give(second)).position
        assert loop.time() - began_s == pytest.approx(0.02, abs=0.002)


class TestRequestLimit:
    """Segments may be larger than a request: then the request's limit bounds the chunks."""

    LIMIT = 8 << 10

    @pytest.fixture
    async def narrow(self, make_cluster: MakeCluster) -> FakeCluster:
        cluster = make_cluster(segment_bytes=64 << 10)
        cluster.settings = cluster.settings.model_copy(update={"message_bytes_max": self.LIMIT})
        return cluster

    async def test_no_chunk_is_larger_than_a_request(self, narrow: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(narrow, chunk_bytes_max=48 << 10)
        await give(await producer.send_batch("s", batch(*[b"x" * 100] * 2000)))
        for _ in range(200):
            producer.send("s", b"y" * 100)
        await give(producer.flush())
        assert len(narrow.values()) == 2200
        assert max(header.chunk_bytes for header, _ in narrow.chunks()) <= self.LIMIT

    async def test_a_record_too_large_for_a_request_is_refused_at_once(
        self, narrow: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(narrow, chunk_bytes_max=48 << 10)
        await producer.prepare("s")
        with pytest.raises(RecordTooLarge, match=r"into a request .*message_bytes_max"):
            producer.send("s", b"x" * (self.LIMIT + 1))
        with pytest.raises(RecordTooLarge, match=r"into a request .*message_bytes_max"):
            await producer.send_batch("s", batch(b"x" * (self.LIMIT + 1)))


async def test_waiting_for_room_ends_when_closing_a_chunk_frees_room_or_the_buffer_fails() -> None:
    buffer = Buffer(100)
    buffer.take(80)
    async with asyncio.timeout(WAIT_S):
        await buffer.wait_for_room(50, lambda: buffer.release(80))
    buffer.take(80)

    def fail() -> None:
        buffer.fail(ClosedError("it has ended"))

    async with asyncio.timeout(WAIT_S):
        await buffer.wait_for_room(50, fail)


async def test_a_throttled_producer_sends_smaller_requests_one_at_a_time(
    cluster: FakeCluster, make_producer: MakeProducer
) -> None:
    """Requests that wait at the broker would only run out of time there."""
    channel, held_back_ms = cluster.loopback, 1500

    def hold_back(response: broker_pb2.MultiWriteChunksResponse) -> None:
        response.throttled_ms = held_back_ms

    channel.amend = hold_back
    producer = make_producer(cluster, chunk_bytes_max=1024, request_bytes_max=16 << 10, requests_in_flight_max=3)
    await producer.prepare("s")
    for _ in range(600):
        producer.send("s", b"x" * 100)
    await give(producer.flush())
    sizes = [sum(header.chunk_bytes for header in write) for write in channel.writes]
    assert producer.throttled_ms == held_back_ms * len(sizes)
    assert max(sizes[:3]) > 4 * max(sizes[8:])
    channel.in_flight_max = 0
    for _ in range(100):
        producer.send("s", b"x" * 100)
    await give(producer.flush())
    assert channel.in_flight_max == 1
    throttled_ms, held_back_ms = producer.throttled_ms, 0
    await give(producer.send("s", b"not held back"))
    for _ in range(200):
        producer.send("s", b"x" * 1000)
    await give(producer.flush())
    assert channel.in_flight_max == 3
    assert producer.throttled_ms == throttled_ms
