"""Failed requests: the producer retries in bounded time and stores a chunk once, or the delivery fails with a cause."""

import asyncio

import numpy as np
import pytest

from kera.core.errors import (
    ArenaFull,
    CorruptChunk,
    InvalidArgument,
    KeraError,
    NotAccepted,
    NotOwner,
    NotReplicated,
    TooFewBackups,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.rpc.wire import error_to_message
from kera.v1 import broker_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import FakeCluster, Fault, stream_info, until


class TestFailures:
    @pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST])
    async def test_a_lost_request_is_retried_and_its_chunks_are_stored_once(
        self, cluster: FakeCluster, make_producer: MakeProducer, fault: Fault
    ) -> None:
        cluster.loopback.faults.extend([Fault.NONE, fault, Fault.NONE, fault, fault])
        producer = make_producer(cluster, chunk_bytes_max=1024, request_bytes_max=2048)
        values = [b"%d" % number for number in range(2000)]
        deliveries = await give(await producer.send_batch("s", batch(*values)))
        assert cluster.values() == values
        assert [each.record for each in deliveries] == np.cumsum(
            [0, *(d.record_count for d in deliveries[:-1])]
        ).tolist()
        assert any(each.duplicate for each in deliveries) is (fault is Fault.ANSWER_LOST)
        assert "s" in cluster.forgotten  # the streamlet may be on another broker by now

    async def test_a_write_that_a_full_arena_refused_is_retried(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        errors = [ArenaFull("no room"), ArenaFull("no room")]
        cluster.loopback.refuse = lambda: errors.pop() if errors else None
        producer = make_producer(cluster)
        assert len(await give(await producer.send_batch("s", batch(b"a")))) == 1
        assert not errors

    async def test_a_refused_chunk_fails_and_the_next_is_stored(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        errors: list[KeraError] = [CorruptChunk("a flipped bit")]
        cluster.loopback.refuse = lambda: errors.pop() if errors else None
        producer = make_producer(cluster, chunk_bytes_max=256, request_bytes_max=256)
        first = await producer.send_batch("s", batch(b"first"))
        second = await producer.send_batch("s", batch(b"second"))
        with pytest.raises(CorruptChunk):
            await give(first)
        await give(second)
        assert cluster.values() == [b"second"]

    async def test_flush_raises_the_first_error_once(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        errors: list[KeraError] = [InvalidArgument("second"), CorruptChunk("first")]
        cluster.loopback.refuse = lambda: errors.pop() if errors else None
        producer = make_producer(cluster)
        await producer.send_batch("s", batch(b"a"))
        await until(lambda: len(errors) == 1)
        await producer.send_batch("s", batch(b"b"))
        with pytest.raises(CorruptChunk):
            await give(producer.flush())
        await give(producer.flush())
        await producer.send_batch("s", batch(b"c"))
        await give(producer.flush())
        assert cluster.values() == [b"c"]

    async def test_flush_waits_only_for_records_sent_before_it(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """Another caller that keeps sending must not hold up the flush."""
        cluster.loopback.faults.append(Fault.HELD)
        producer = make_producer(cluster, request_bytes_max=1)
        await producer.send_batch("s", batch(b"a"))
        flushing = asyncio.ensure_future(producer.flush())
        await until(lambda: bool(cluster.loopback.held))
        cluster.loopback.default_fault = Fault.HELD
        await producer.send_batch("s", batch(b"b"))
        cluster.loopback.release()
        await give(flushing)
        assert cluster.values() == [b"a"]

    async def test_a_record_that_never_left_the_producer_fails_as_not_accepted(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.NOT_SENT
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        pending = producer.send("s", b"a")
        with pytest.raises(Unavailable):
            await give(pending)
        assert issubclass(Unavailable, NotAccepted)

    async def test_a_record_that_may_be_stored_fails_as_uncertain(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.faults.append(Fault.ANSWER_LOST)
        cluster.loopback.default_fault = Fault.NOT_SENT
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(Uncertain, match="nobody listens"):
            await give(producer.send("s", b"a"))
        assert cluster.values() == [b"a"]

    async def test_the_delivery_timeout_ends_a_delivery_before_a_longer_request_timeout(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.request_timeout_s = 3600.0
        cluster.loopback.default_fault = Fault.NO_ANSWER
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(Uncertain):
            await give(producer.send("s", b"a"))

    @pytest.mark.parametrize("kind", [NotReplicated, TooFewBackups])
    async def test_a_write_is_retried_until_there_are_enough_backups(
        self, cluster: FakeCluster, make_producer: MakeProducer, kind: type[KeraError]
    ) -> None:
        refusals = [kind("1 of 2 backups") for _ in range(3)]
        cluster.loopback.refuse = lambda: refusals.pop() if refusals else None
        producer = make_producer(cluster)
        await producer.prepare("s")
        await give(producer.send("s", b"a"))
        assert cluster.values() == [b"a"]
        (header,) = {
            (header.producer_id, header.producer_epoch, header.sequence)
            for headers in cluster.loopback.writes
            for header in headers
        }
        assert header[2] == 0
        assert len(cluster.loopback.writes) == 4

    async def test_a_chunk_appended_but_not_replicated_is_stored_once(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        errors = [NotReplicated("1 of 2 backups"), NotReplicated("1 of 2 backups")]

        def fail(message: broker_pb2.MultiWriteChunksResponse) -> None:
            if errors:
                message.statuses[0].Clear()
                message.statuses[0].error.CopyFrom(error_to_message(errors.pop()))

        cluster.loopback.amend = fail
        producer = make_producer(cluster)
        await producer.prepare("s")
        delivery = await give(producer.send("s", b"a"))
        assert delivery.duplicate
        assert cluster.values() == [b"a"]

    @pytest.mark.parametrize("kind", [NotReplicated, TooFewBackups])
    async def test_a_delivery_without_enough_backups_fails_with_that_cause_after_its_timeout(
        self, cluster: FakeCluster, make_producer: MakeProducer, kind: type[KeraError]
    ) -> None:
        cluster.loopback.refuse = lambda: kind("the stream needs 2 backups, there is 1")
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(kind, match="the stream needs 2 backups, there is 1"):
            await give(producer.send("s", b"a"))
        assert len(cluster.loopback.writes) > 1

    async def test_a_delivery_whose_last_attempt_gets_no_answer_names_the_cause_before_it(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.refuse = lambda: NotReplicated("1 of 2 backups")
        cluster.loopback.faults.append(Fault.NONE)
        cluster.loopback.default_fault = Fault.NO_ANSWER
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(NotReplicated, match=r"no answer within .* s; before that: 1 of 2 backups"):
            await give(producer.send("s", b"a"))

    async def test_a_chunk_that_no_broker_takes_fails_after_the_delivery_timeout(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.refuse = lambda: NotOwner("another broker has it")
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(NotOwner, match="another broker has it"):
            await give(producer.send("s", b"a"))
        assert len(cluster.loopback.writes) > 1
        cluster.loopback.refuse = lambda: None
        await give(producer.send("s", b"b"))
        assert cluster.values() == [b"b"]

    async def test_the_next_delivery_succeeds_after_a_failed_one(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.LOST
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(Uncertain):
            await give(producer.send("s", b"a"))
        cluster.loopback.default_fault = Fault.NONE
        await give(producer.send("s", b"b"))
        assert cluster.values() == [b"b"]

    async def test_records_in_an_open_chunk_fail_in_time_too(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """Another chunk keeps the sender busy, and nothing else would close the chunk of these records."""
        cluster.connects.extend([Unavailable("nobody listens")] * 1000)
        producer = make_producer(cluster, delivery_timeout_ms=100)
        await producer.prepare("s")
        pending = [producer.send("s", b"a")]
        for _ in range(6):
            remaining = len(cluster.connects)
            await until(lambda seen=remaining: len(cluster.connects) < seen)  # type: ignore[misc]
            pending.append(producer.send("s", b"b"))
        for each in pending:
            with pytest.raises(Unavailable):
                await give(each)

    async def test_a_connection_that_closes_at_once_is_opened_again(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.closes = 3
        producer = make_producer(cluster)
        await producer.prepare("s")
        await give(producer.send("s", b"a"))
        assert cluster.values() == [b"a"]

    async def test_a_restarted_broker_without_memory_takes_the_next_records(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        await give(await producer.send_batch("s", batch(b"a")))
        await give(await producer.send_batch("s", batch(b"b")))
        await cluster.loopback.close()
        cluster.restart_broker()
        await give(await producer.send_batch("s", batch(b"c")))
        await give(await producer.send_batch("s", batch(b"d")))
        assert cluster.values() == [b"c", b"d"]

    async def test_a_send_to_a_deleted_stream_fails_with_unknown_stream(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        stream = await producer.prepare("s")
        await give(producer.send("s", b"a"))
        cluster.streams.drop(stream.stream_id)
        del cluster.infos["s"]
        with pytest.raises(UnknownStream, match="it was deleted, or another broker had this address"):
            await give(producer.send("s", b"b"))
        await cluster.loopback.close()  # a new connection does not need the coordinator to know the stream either
        with pytest.raises(UnknownStream):
            await give(producer.send("s", b"c"))

    async def test_a_stream_created_again_with_fewer_streamlets_is_another_stream(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info(streamlets=4))
        producer = make_producer(cluster)
        await producer.prepare("s")
        await give(producer.send("s", b"a", streamlet=3))
        cluster.infos["s"] = stream_info(stream_id=8, streamlets=1)
        await cluster.loopback.close()
        cluster.restart_broker()
        for _ in range(2):
            with pytest.raises(UnknownStream):
                await give(producer.send("s", b"b", streamlet=3))

    async def test_preparing_a_stream_again_finds_the_new_stream_of_that_name(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        await producer.send_batch("s", batch(b"old"))
        await give(producer.flush())
        cluster.infos["s"] = stream_info(stream_id=8, streamlets=2)
        await cluster.loopback.close()
        cluster.restart_broker()
        late = await producer.send_batch("s", batch(b"too late"))
        for told in (producer.flush(), late):
            with pytest.raises(UnknownStream):
                await give(told)
        gathering = producer.send("s", b"too late as well")
        assert (await producer.prepare("s")).stream_id == 8
        producer.send("s", b"new", streamlet=1)
        with pytest.raises(UnknownStream):
            await give(producer.flush())
        with pytest.raises(UnknownStream):
            await give(gathering)
        assert cluster.values("s", 1) == [b"new"]

    async def test_other_streams_may_be_prepared_while_the_producer_connects(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info("s", 7), *(stream_info(f"t{number}", 10 + number) for number in range(20)))
        producer = make_producer(cluster)
        await producer.prepare("s")
        pending = producer.send("s", b"a")
        await asyncio.gather(*(producer.prepare(f"t{number}") for number in range(20)))
        await give(pending)
