"""`send`: a record is stored as sent, in the streamlet of its key, and its delivery names the place."""

import asyncio
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.producing.encoding.partitioner import PARTITIONERS, Partitioner, streamlet_of
from kera.core.errors import (
    CorruptChunk,
    InvalidArgument,
    RecordTooLarge,
    SchemaMismatch,
    StreamletOutOfRange,
    UnknownStream,
)
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.v1 import broker_pb2, common_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import SEGMENT_BYTES, WAIT_S, FakeCluster, stream_info

KEYS = DEFAULT_SCHEMA.field("keys").type
TYPED = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string())])


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
    async def test_a_request_asks_for_the_durability_of_the_settings(
        self, cluster: FakeCluster, make_producer: MakeProducer, durability: str | None, level: int
    ) -> None:
        producer = make_producer(cluster, durability=durability)
        cluster.loopback.refuse = lambda: CorruptChunk("no matter")
        with pytest.raises(CorruptChunk):
            await give(await producer.send_batch("s", batch(b"a")))
        assert cluster.loopback.levels == [level]

    async def test_records_sent_without_a_pause_go_in_one_chunk(
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

    async def test_keys_decide_the_streamlet_and_records_without_keys_spread(
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

    @pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
    async def test_send_and_send_batch_agree_on_the_streamlet_of_a_key(
        self, make_cluster: MakeCluster, make_producer: MakeProducer, partitioner: Partitioner
    ) -> None:
        cluster = make_cluster(stream_info(streamlets=5))
        producer = make_producer(cluster, partitioner=partitioner.name)
        keys = [b"a", b"\xff\0", *(b"%d" % number for number in range(60))]
        lists = pa.array([[key, b"second"] for key in keys], KEYS)
        deliveries = await give(await producer.send_batch("s", batch(*keys, keys=lists)))
        assert sum(each.record_count for each in deliveries) == len(keys)
        for key in keys:
            producer.send("s", key, keys=key)
        await give(producer.flush())
        for streamlet in range(5):
            stored = cluster.values("s", streamlet)
            expected = [key for key in keys if streamlet_of(key, 5, partitioner) == streamlet]
            assert stored == expected + expected

    @pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
    async def test_an_empty_key_spreads_where_the_partitioner_takes_no_empty_keys(
        self, make_cluster: MakeCluster, make_producer: MakeProducer, partitioner: Partitioner
    ) -> None:
        cluster = make_cluster(stream_info(streamlets=4))
        producer = make_producer(cluster, chunk_bytes_max=4096, partitioner=partitioner.name)
        await producer.prepare("s")
        for _ in range(1000):
            producer.send("s", b"x" * 30, keys=b"")
        await give(producer.flush())
        lists = pa.array([[b"", b"second"]] * 1000, KEYS)
        for _ in range(4):
            await give(await producer.send_batch("s", batch(*[b"y" * 30] * 1000, keys=lists)))
        found = {streamlet for streamlet in range(4) if cluster.values("s", streamlet)}
        if partitioner.takes_empty:
            assert found == {streamlet_of(b"", 4, partitioner)}
        else:
            assert found == set(range(4))

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

    async def test_an_accepted_record_does_not_change_with_the_callers_objects(
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
    async def test_an_invalid_record_is_refused_and_its_neighbours_are_stored(
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

    async def test_a_record_is_refused_only_if_it_does_not_fit_into_a_segment(
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
