"""The producer against a real broker service without processes: order, back-pressure, deliveries, errors."""

import asyncio
import itertools
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.producing.accumulator import Accumulator
from kera.client.producing.buffer import Buffer
from kera.client.producing.limits import ProducerLimits
from kera.client.producing.outcome import Outcome
from kera.client.producing.partitioner import streamlet_of
from kera.client.producing.producer import Producer
from kera.client.settings import ProducerSettings
from kera.core.clock import FakeClock
from kera.core.errors import (
    ArenaFull,
    BufferFull,
    ClosedError,
    CorruptChunk,
    InvalidArgument,
    KeraError,
    NotAccepted,
    NotReplicated,
    RecordTooLarge,
    SchemaMismatch,
    StreamletOutOfRange,
    TooFewBackups,
    Unavailable,
    Uncertain,
    UnknownStream,
)
from kera.core.rpc.wire import error_to_message
from kera.core.schema import DEFAULT_SCHEMA
from kera.v1 import broker_pb2, common_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import SEGMENT_BYTES, WAIT_S, FakeCluster, Fault, stream_info, until

KEYS = DEFAULT_SCHEMA.field("keys").type
TYPED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


def batch(*values: bytes, **columns: Any) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary()), **columns})


async def give(awaitable: Any) -> Any:
    """Its result, in bounded time."""
    async with asyncio.timeout(WAIT_S):
        return await awaitable


def fill(producer: Producer) -> int:
    """Send until the buffer is full; returns how many records it took."""
    for accepted in itertools.count():
        try:
            producer.send("s", b"x" * 100)
        except BufferFull:
            return accepted
    raise AssertionError


class TestSend:
    async def test_a_record_is_delivered_with_its_place(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        stream = await producer.prepare("s")
        first = producer.send("s", b"a", keys=b"k", timestamp_us=5, headers={"h": b"x"})
        second = producer.send("s", None)
        deliveries = [await give(first), await give(second)]
        assert [each.record for each in deliveries] == [0, 1]
        assert {each.entry for each in deliveries} == {(stream.stream_id, 0, 0)}
        assert (deliveries[0].stream, deliveries[0].durability, deliveries[0].duplicate) == ("s", "leader", False)
        rows = cluster.stored().to_pylist()
        assert [row["value"] for row in rows] == [b"a", None]
        assert [row["keys"] for row in rows] == [[b"k"], None]
        assert rows[0]["headers"] == [("h", b"x")]
        assert int(rows[0]["timestamp"].timestamp() * 1e6) == 5
        assert abs(rows[1]["timestamp"].timestamp() - time.time()) < WAIT_S

    async def test_a_delivery_names_the_backups_of_its_virtual_segment(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        segments = {1: 5 << 32 | 1, 2: 5 << 32 | 2}

        def place(message: broker_pb2.MultiWriteChunksResponse) -> None:
            for number, status in enumerate(message.statuses):
                status.virtual_segment_id = (segments[1], segments[2], segments[1], 0)[number]
            for number, segment in segments.items():
                message.virtual_segments.add(virtual_segment_id=segment, backup_ids=[number, 7])

        cluster.loopback.amend = place
        producer = make_producer(cluster, chunk_bytes_max=4096)
        parts = [give(await producer.send_batch("s", batch(b"x" * 3000))) for _ in range(4)]
        deliveries = [delivery for (delivery,) in await asyncio.gather(*parts)]
        assert len(cluster.loopback.writes) == 1
        assert [(each.virtual_segment, each.backups) for each in deliveries] == [
            (segments[1], (1, 7)),
            (segments[2], (2, 7)),
            (segments[1], (1, 7)),
            (0, ()),
        ]
        assert deliveries[0].backups is deliveries[2].backups

    async def test_the_records_of_a_chunk_have_its_backups(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        def place(message: broker_pb2.MultiWriteChunksResponse) -> None:
            message.statuses[0].virtual_segment_id = 9
            message.virtual_segments.add(virtual_segment_id=9, backup_ids=[1, 2])

        cluster.loopback.amend = place
        producer = make_producer(cluster)
        await producer.prepare("s")
        pending = [producer.send("s", b"a"), producer.send("s", b"b")]
        deliveries = [await give(each) for each in pending]
        assert [(each.record, each.virtual_segment, each.backups) for each in deliveries] == [
            (0, 9, (1, 2)),
            (1, 9, (1, 2)),
        ]

    @pytest.mark.parametrize(
        ("durability", "level"),
        [
            (None, common_pb2.DURABILITY_UNSPECIFIED),
            ("leader", common_pb2.DURABILITY_LEADER),
            ("persisted", common_pb2.DURABILITY_PERSISTED),
        ],
    )
    async def test_a_request_asks_for_the_level_of_the_settings(
        self, cluster: FakeCluster, make_producer: MakeProducer, durability: str | None, level: int
    ) -> None:
        producer = make_producer(cluster, durability=durability)
        cluster.loopback.refuse = lambda: CorruptChunk("no matter")
        with pytest.raises(CorruptChunk):
            await give(await producer.send_batch("s", batch(b"a")))
        assert cluster.loopback.levels == [level]

    async def test_what_is_sent_at_once_goes_as_one_chunk(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        for number in range(100):
            producer.send("s", b"%d" % number)
        await give(producer.flush())
        assert cluster.values() == [b"%d" % number for number in range(100)]
        assert cluster.counters.chunks_appended == 1

    async def test_a_stream_has_to_be_prepared(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        with pytest.raises(UnknownStream, match=r"await producer\.prepare"):
            producer.send("s", b"a")
        with pytest.raises(UnknownStream, match="no stream 'other'"):
            await producer.prepare("other")

    async def test_keys_decide_the_streamlet_and_no_key_spreads(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info(streamlets=4))
        producer = make_producer(cluster, chunk_bytes_max=4096)
        await producer.prepare("s")
        for number in range(2000):
            producer.send("s", b"keyed", keys=[b"%d" % (number % 50), b"second"])
            producer.send("s", b"x" * 30)
        producer.send("s", b"empty key", keys=b"")
        await give(producer.flush())
        for streamlet in range(4):
            stored = cluster.stored("s", streamlet).to_pylist()
            keyed = [row["keys"][0] for row in stored if row["keys"] is not None]
            assert all(streamlet_of(key, 4) == streamlet for key in keyed)
            assert len(stored) - len(keyed) > 100

    async def test_send_and_send_batch_agree_on_the_streamlet_of_a_key(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info(streamlets=5))
        producer = make_producer(cluster)
        keys = [b"", b"a", b"\xff\0", *(b"%d" % number for number in range(30))]
        lists = pa.array([[key, b"second"] for key in keys], KEYS)
        deliveries = await give(await producer.send_batch("s", batch(*keys, keys=lists)))
        assert sum(each.record_count for each in deliveries) == len(keys)
        for key in keys:
            producer.send("s", key, keys=key)
        await give(producer.flush())
        for streamlet in range(5):
            stored = cluster.values("s", streamlet)
            expected = [key for key in keys if streamlet_of(key, 5) == streamlet]
            assert stored == expected + expected

    async def test_records_of_all_kinds_share_a_chunk(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        kinds: list[dict[str, Any]] = [
            {},
            {"timestamp_us": 5},
            {},
            {"keys": b"k"},
            {},
            {"headers": {"h": b"x"}},
            {},
            {"streamlet": 0},
            {},
        ]
        pending = [producer.send("s", b"%d" % number, **kind) for number, kind in enumerate(kinds)]
        assert [(await give(each)).record for each in pending] == list(range(len(kinds)))
        assert len(cluster.loopback.writes) == 1
        rows = cluster.stored().to_pylist()
        assert [row["value"] for row in rows] == [b"%d" % number for number in range(len(kinds))]
        assert [row["keys"] for row in rows] == [[b"k"] if "keys" in kind else None for kind in kinds]
        assert [row["headers"] for row in rows] == [[("h", b"x")] if "headers" in kind else None for kind in kinds]
        assert [int(row["timestamp"].timestamp() * 1e6) == 5 for row in rows] == [
            "timestamp_us" in kind for kind in kinds
        ]

    async def test_a_streamlet_can_be_named(self, make_cluster: MakeCluster, make_producer: MakeProducer) -> None:
        cluster = make_cluster(stream_info(streamlets=3))
        producer = make_producer(cluster)
        await producer.send_batch("s", batch(b"a", keys=pa.array([[b"k"]], KEYS)), streamlet=2)
        producer.send("s", b"b", keys=b"k", streamlet=2)
        await give(producer.flush())
        assert cluster.values("s", 2) == [b"a", b"b"]

    async def test_what_is_accepted_does_not_change_with_the_callers_objects(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        keys, headers = [b"k"], {"h": b"1"}
        producer.send("s", b"a", keys=keys, headers=headers)
        keys[0], headers["h"] = b"changed", b"changed"
        await give(producer.flush())
        (row,) = cluster.stored().to_pylist()
        assert (row["keys"], row["headers"]) == ([b"k"], [("h", b"1")])

    @pytest.mark.parametrize(
        ("record", "text"),
        [
            ({"value": "text"}, "value is str"),
            ({"value": 5}, "value is int"),
            ({"value": bytearray(b"a")}, "value is bytearray"),
            ({"value": b"a", "keys": "text"}, "keys is 'text', and takes bytes"),
            ({"value": b"a", "keys": 5}, "keys is 5, and takes bytes"),
            ({"value": b"a", "keys": None}, "keys is None"),
            ({"value": b"a", "keys": [5]}, "key is int"),
            ({"value": b"a", "keys": bytearray(b"a")}, "keys is bytearray"),
            ({"value": b"a", "headers": 5}, "headers is 5"),
            ({"value": b"a", "headers": ["h"]}, "headers is"),
            ({"value": b"a", "streamlet": "0"}, "streamlet is '0', and takes a whole number"),
            ({"value": b"a", "streamlet": False}, "streamlet is False"),
            ({"value": b"a", "streamlet": 0.0}, "streamlet is 0.0"),
            ({"value": b"a", "timestamp_us": True}, "timestamp_us is True"),
            ({"value": b"a", "keys": [b"a", None]}, "key is NoneType"),
            ({"value": b"a", "timestamp_us": 1.5}, "whole microseconds"),
            ({"value": b"a", "timestamp_us": "now"}, "whole microseconds"),
            ({"value": b"a", "timestamp_us": 1 << 63}, "whole number from"),
            ({"value": b"a", "headers": {"h": "text"}}, "header 'h' is str"),
            ({"value": b"a", "headers": {b"h": b""}}, "name is text"),
            ({"value": b"a", "headers": {"\ud800": b""}}, "name is text"),
        ],
    )
    async def test_what_is_no_record_is_refused_and_spoils_nothing(
        self, cluster: FakeCluster, make_producer: MakeProducer, record: dict[str, Any], text: str
    ) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        before = producer.send("s", b"before")
        with pytest.raises(InvalidArgument, match=text):
            producer.send("s", **record)
        after = producer.send("s", b"after", timestamp_us=np.int64(7))  # type: ignore[arg-type]
        assert [(await give(before)).record, (await give(after)).record] == [0, 1]
        assert cluster.values() == [b"before", b"after"]

    async def test_a_streamlet_out_of_range_is_refused(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        for streamlet in (-1, 1):
            with pytest.raises(StreamletOutOfRange, match="0 to 0"):
                producer.send("s", b"a", streamlet=streamlet)
            with pytest.raises(StreamletOutOfRange):
                await producer.send_batch("s", batch(b"a"), streamlet=streamlet)
        await give(producer.flush())
        assert cluster.values() == []

    async def test_a_record_for_no_segment_is_refused_and_one_that_just_fits_is_not(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, chunk_bytes_max=4096)
        await producer.prepare("s")
        producer.send("s", b"before")
        with pytest.raises(RecordTooLarge, match=str(SEGMENT_BYTES)):
            producer.send("s", b"x" * SEGMENT_BYTES)
        large = producer.send("s", b"x" * (SEGMENT_BYTES - 2048))
        producer.send("s", b"after")
        assert (await give(large)).record == 1
        await give(producer.flush())
        assert [len(value) for value in cluster.values()] == [6, SEGMENT_BYTES - 2048, 5]

    async def test_a_typed_stream_takes_batches_only(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info(schema=TYPED, streamlets=3, key_column="text"))
        producer = make_producer(cluster)
        await producer.prepare("s")
        with pytest.raises(SchemaMismatch, match="use send_batch"):
            producer.send("s", b"a")
        rows = pa.record_batch({"text": ["a", None, "b", "a"], "id": [1, 2, 3, 4]})
        await give(await producer.send_batch("s", rows))
        places = {row["id"]: streamlet for streamlet in range(3) for row in cluster.stored("s", streamlet).to_pylist()}
        assert {number: places[number] for number in (1, 3, 4)} == {
            1: streamlet_of(b"a", 3),
            3: streamlet_of(b"b", 3),
            4: streamlet_of(b"a", 3),
        }


class TestSendBatch:
    async def test_records_and_batches_keep_their_order(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        producer.send("s", b"1")
        await producer.send_batch("s", batch(b"2", b"3"))
        producer.send("s", b"4")
        producer.send("s", b"5")
        await producer.send_batch("s", batch(b"6"))
        await give(producer.flush())
        assert cluster.values() == [b"1", b"2", b"3", b"4", b"5", b"6"]

    async def test_a_table_is_as_good_as_a_batch(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        table = pa.Table.from_batches([batch(b"a"), batch(), batch(b"b", b"c")])
        deliveries = await give(await producer.send_batch("s", table))
        assert [each.record_count for each in deliveries] == [1, 2]
        assert cluster.values() == [b"a", b"b", b"c"]

    async def test_no_rows_are_no_deliveries(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        assert await give(await producer.send_batch("s", batch())) == []

    async def test_a_million_rows_without_keys_are_not_too_large(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(segment_bytes=1 << 20)
        producer = make_producer(cluster)
        rows = pa.record_batch({"value": pa.array(np.zeros(1_000_000, "S1")).cast(pa.binary())})
        await give(await producer.send_batch("s", rows))
        assert cluster.counters.records_appended == 1_000_000
        assert cluster.counters.bytes_appended < 30_000_000

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (batch(b"x" * SEGMENT_BYTES), RecordTooLarge),
            (pa.record_batch({"value": [b"a"], "timestamp": pa.array([None], DEFAULT_SCHEMA[0].type)}), SchemaMismatch),
        ],
    )
    async def test_a_bad_part_is_found_before_a_good_one_is_accepted(
        self, cluster: FakeCluster, make_producer: MakeProducer, bad: pa.RecordBatch, error: type[KeraError]
    ) -> None:
        producer = make_producer(cluster)
        filler = {"value": [b"good"], "timestamp": pa.array([1], DEFAULT_SCHEMA[0].type)}
        good = pa.record_batch({name: filler[name] for name in bad.schema.names}, schema=bad.schema)
        with pytest.raises(error):
            await producer.send_batch("s", pa.Table.from_batches([good, bad]))
        await give(producer.flush())
        assert cluster.values() == []

    async def test_what_is_no_batch_is_refused(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        with pytest.raises(InvalidArgument, match=r"a RecordBatch, Table or .*, not list"):
            await producer.send_batch("s", [b"a"])

    async def test_who_gives_up_waiting_leaves_the_deliveries(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster)
        delivery = await producer.send_batch("s", batch(b"a"))
        waiting = asyncio.ensure_future(delivery)
        await until(lambda: bool(cluster.loopback.held))
        waiting.cancel()
        await asyncio.wait([waiting])
        cluster.loopback.release()
        ((first),) = await give(delivery)
        assert first.record == 0


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

    async def test_a_record_of_more_than_half_the_buffer_gets_through(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """`drain` that was content with half of the buffer would come back at once, for ever."""
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

    async def test_a_record_larger_than_the_buffer_goes_when_it_is_empty(
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

    async def test_nothing_lingers_while_somebody_waits_for_room(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, buffer_bytes_max=8 << 10, linger_ms=3_600_000)
        await producer.prepare("s")
        fill(producer)
        await give(producer.drain())
        producer.send("s", b"x" * 100)
        await give(producer.send_batch("s", batch(b"y" * (7 << 10))))

    async def test_so_many_requests_are_in_flight_and_no_more(
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

    async def test_a_request_has_no_more_chunks_than_a_broker_takes(
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

    async def test_a_request_is_no_larger_than_a_message_may_be(
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

    async def test_a_chunk_lingers(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster, linger_ms=20)
        await producer.prepare("s")
        began_s = time.monotonic()
        first = producer.send("s", b"a")
        await asyncio.sleep(0)
        second = producer.send("s", b"b")
        assert (await give(first)).position == (await give(second)).position
        assert time.monotonic() - began_s >= 0.02


class TestRequestLimit:
    """Segments may be larger than what a request takes: then that bounds the chunks."""

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

    async def test_a_record_that_no_request_takes_is_refused_at_once(
        self, narrow: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(narrow, chunk_bytes_max=48 << 10)
        await producer.prepare("s")
        with pytest.raises(RecordTooLarge, match=r"into a request .*message_bytes_max"):
            producer.send("s", b"x" * (self.LIMIT + 1))
        with pytest.raises(RecordTooLarge, match=r"into a request .*message_bytes_max"):
            await producer.send_batch("s", batch(b"x" * (self.LIMIT + 1)))


class TestFailures:
    @pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST])
    async def test_what_is_lost_on_the_way_is_sent_again_and_stored_once(
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
        assert "s" in cluster.forgotten  # the broker may be elsewhere by now

    async def test_a_broker_without_room_is_asked_again(
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

    async def test_flush_waits_for_what_was_there_when_it_was_called(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """Somebody else who sends all the time must not keep it."""
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

    async def test_a_record_nobody_could_send_fails_as_not_accepted(
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

    async def test_a_delivery_takes_no_longer_than_its_time_whatever_a_request_may_take(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.request_timeout_s = 3600.0
        cluster.loopback.default_fault = Fault.NO_ANSWER
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(Uncertain):
            await give(producer.send("s", b"a"))

    @pytest.mark.parametrize("kind", [NotReplicated, TooFewBackups])
    async def test_what_too_few_backups_hold_up_is_sent_again_until_they_are_there(
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

    async def test_a_chunk_that_is_appended_and_not_replicated_is_stored_once(
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
    async def test_a_delivery_that_backups_hold_up_for_too_long_fails_with_that_cause(
        self, cluster: FakeCluster, make_producer: MakeProducer, kind: type[KeraError]
    ) -> None:
        cluster.loopback.refuse = lambda: kind("the stream needs 2 backups, there is 1")
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(kind, match="the stream needs 2 backups, there is 1"):
            await give(producer.send("s", b"a"))
        assert len(cluster.loopback.writes) > 1

    async def test_a_delivery_whose_last_attempt_gets_no_answer_fails_with_the_cause_before(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.loopback.refuse = lambda: NotReplicated("1 of 2 backups")
        cluster.loopback.faults.append(Fault.NONE)
        cluster.loopback.default_fault = Fault.NO_ANSWER
        producer = make_producer(cluster, delivery_timeout_ms=50)
        await producer.prepare("s")
        with pytest.raises(NotReplicated, match=r"no answer within .* s; before that: 1 of 2 backups"):
            await give(producer.send("s", b"a"))

    async def test_after_a_delivery_that_failed_the_next_one_is_made(
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

    async def test_records_that_wait_in_an_open_chunk_fail_in_time_as_well(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        """They are behind a chunk that keeps the sender busy, and nothing else would close theirs."""
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

    async def test_a_connection_that_is_closed_as_soon_as_it_is_there_is_made_again(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster.closes = 3
        producer = make_producer(cluster)
        await producer.prepare("s")
        await give(producer.send("s", b"a"))
        assert cluster.values() == [b"a"]

    async def test_a_broker_that_has_lost_its_memory_takes_the_rest(
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

    async def test_a_stream_that_was_deleted_is_named(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        stream = await producer.prepare("s")
        await give(producer.send("s", b"a"))
        cluster.streams.drop(stream.stream_id)
        del cluster.infos["s"]
        with pytest.raises(UnknownStream, match="may have been deleted"):
            await give(producer.send("s", b"b"))
        await cluster.loopback.close()  # nor does a new connection need the coordinator to know it
        with pytest.raises(UnknownStream):
            await give(producer.send("s", b"c"))

    async def test_a_stream_that_was_created_again_smaller_is_another_one(
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

    async def test_a_stream_that_was_created_again_is_found_by_preparing_it(
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

    async def test_another_stream_may_be_prepared_while_the_producer_connects(
        self, make_cluster: MakeCluster, make_producer: MakeProducer
    ) -> None:
        cluster = make_cluster(stream_info("s", 7), *(stream_info(f"t{number}", 10 + number) for number in range(20)))
        producer = make_producer(cluster)
        await producer.prepare("s")
        pending = producer.send("s", b"a")
        await asyncio.gather(*(producer.prepare(f"t{number}") for number in range(20)))
        await give(pending)


class TestClose:
    async def test_leaving_the_context_delivers(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        async with make_producer(cluster, linger_ms=60_000) as producer:
            await producer.prepare("s")
            pending = producer.send("s", b"a")
        assert (await give(pending)).record == 0

    async def test_an_exception_in_the_context_is_not_kept_up(
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

    async def test_a_closed_producer_takes_nothing(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        await producer.prepare("s")
        await producer.close()
        await producer.close()
        with pytest.raises(ClosedError):
            producer.send("s", b"a")
        with pytest.raises(ClosedError):
            await producer.send_batch("s", batch(b"a"))

    async def test_without_flushing_it_says_what_may_be_stored(
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
        cluster.loopback.release()  # the answer comes to nobody
        with pytest.raises(Uncertain):
            await give(sent)
        for pending in (queued, gathering):
            with pytest.raises(ClosedError):
                await give(pending)
        assert cluster.values() == [b"sent"]

    async def test_who_waits_for_room_is_told(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        cluster.loopback.default_fault = Fault.HELD
        producer = make_producer(cluster, buffer_bytes_max=8 << 10, chunk_bytes_max=4096)
        sending = asyncio.ensure_future(producer.send_batch("s", batch(*[b"x" * 100] * 1000)))
        await until(lambda: bool(cluster.loopback.held))
        await producer.close(flush=False)
        with pytest.raises(ClosedError):
            await give(sending)

    async def test_a_batch_that_is_being_sent_is_told(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        """What was queued after the end would wait for ever."""
        producer = make_producer(cluster, chunk_bytes_max=1024, request_bytes_max=1024)
        await producer.prepare("s")
        sending = asyncio.ensure_future(producer.send_batch("s", batch(*[b"x" * 100] * 1000)))
        await asyncio.sleep(0)
        await producer.close(flush=False)
        with pytest.raises(ClosedError):
            await give(sending)


class TestFutureLike:
    async def test_a_delivery_says_whether_it_is_there_and_calls_back_once(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        called: list[object] = []
        pending = producer.send("s", b"a")
        whole = await producer.send_batch("s", batch(b"b", b"c"))
        for each in (pending, whole):
            each.add_done_callback(called.append)
        later = producer.send("s", b"d")
        assert not later.done()
        with pytest.raises(asyncio.InvalidStateError):
            later.result()
        await give(producer.flush())
        await until(lambda: len(called) == 2)
        assert pending.done()
        assert whole.done()
        assert called == [pending, whole]
        assert (pending.result().record, pending.exception()) == (0, None)
        assert [each.record_count for each in whole.result()] == [2]
        later.add_done_callback(called.append)
        assert called == [pending, whole], "never from within the call"
        await until(lambda: called[-1] is later)

    async def test_a_callback_of_what_fails_comes_too_and_may_fail_itself(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
        producer = make_producer(cluster, linger_ms=60_000)
        await producer.prepare("s")
        pending, called = producer.send("s", b"a"), list[object]()
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        pending.add_done_callback(lambda _: 1 / 0)
        pending.add_done_callback(called.append)
        await producer.close(flush=False)
        await until(lambda: bool(called))
        assert isinstance(pending.exception(), ClosedError)
        with pytest.raises(ClosedError):
            pending.result()
        assert [type(error) for error in told] == [ZeroDivisionError]

    async def test_of_a_chunk_that_is_split_each_record_has_its_own_part(self) -> None:
        outcomes = [Outcome(), Outcome()]
        accumulator = Accumulator("s", 0, 0.0)
        accumulator.delivered = outcomes[0]
        first, second = accumulator.append(b"a", 0.0, 1), accumulator.append(b"b", 0.0, 1)
        called: list[object] = []
        for each in (first, second):
            each.add_done_callback(called.append)
        accumulator.split([1, 1], outcomes)
        outcomes[0].settle(ClosedError("one"))
        await until(lambda: called == [first])
        assert (first.done(), second.done()) == (True, False)
        outcomes[1].settle(ClosedError("two"))
        await until(lambda: called == [first, second])


async def test_room_that_is_made_by_closing_what_is_open_is_seen() -> None:
    buffer = Buffer(100)
    buffer.take(80)
    async with asyncio.timeout(WAIT_S):
        await buffer.wait_for_room(50, lambda: buffer.release(80))
    buffer.take(80)

    def fail() -> None:
        buffer.fail(ClosedError("it has ended"))

    async with asyncio.timeout(WAIT_S):
        await buffer.wait_for_room(50, fail)
