"""Closing a producer delivers its records, or fails each delivery with the cause."""

import asyncio

import pytest

from kera.core.errors import ClosedError, Uncertain
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import FakeCluster, Fault, until


class TestClose:
    async def test_leaving_the_context_delivers(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        async with make_producer(cluster, linger_ms=60_000) as producer:
            await producer.prepare("s")
            pending = producer.send("s", b"a")
        assert (await give(pending)).record == 0

    async def test_an_exception_leaves_the_context_without_waiting_for_deliveries(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster)

        async def fail() -> None:
            async with producer:
                await producer.send_batch("s", batch(b"a"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await give(fail())

    async def test_a_closed_producer_refuses_records_and_batches(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        await producer.close()
        await producer.close()
        with pytest.raises(ClosedError):
            producer.send("s", b"a")
        with pytest.raises(ClosedError):
            await producer.send_batch("s", batch(b"a"))

    async def test_closing_without_a_flush_tells_uncertain_from_unsent_deliveries(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        # Chunks are so small that no batch is gathered.
        producer = make_producer(
            cluster, requests_in_flight_max=1, request_bytes_max=1, chunk_bytes_max=48, linger_ms=60_000
        )
        sent = await producer.send_batch("s", batch(b"sent"))
        queued = await producer.send_batch("s", batch(b"queued"))
        gathering = producer.send("s", b"gathering")
        await until(lambda: bool(cluster.loopback.held))
        await producer.close(flush=False)
        cluster.loopback.release()  # the producer no longer waits for the answer
        with pytest.raises(Uncertain):
            await give(sent)
        for pending in (queued, gathering):
            with pytest.raises(ClosedError):
                await give(pending)
        assert cluster.values() == [b"sent"]

    async def test_send_batch_fails_when_the_producer_closes_while_it_waits_for_room(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, buffer_bytes_max=8 << 10, chunk_bytes_max=4096)
        sending = asyncio.ensure_future(producer.send_batch("s", batch(*[b"x" * 100] * 1000)))
        await until(lambda: bool(cluster.loopback.held))
        await producer.close(flush=False)
        with pytest.raises(ClosedError):
            await give(sending)

    async def test_send_batch_fails_when_the_producer_closes_while_it_queues_chunks(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """A chunk that was queued after the end would wait for ever."""
        producer = make_producer(cluster, chunk_bytes_max=1024, request_bytes_max=1024)
        await producer.prepare("s")
        sending = asyncio.ensure_future(producer.send_batch("s", batch(*[b"x" * 100] * 1000)))
        await asyncio.sleep(0)
        await producer.close(flush=False)
        with pytest.raises(ClosedError):
            await give(sending)
