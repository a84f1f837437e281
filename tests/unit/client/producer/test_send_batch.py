"""`send_batch`: tables and batches of all sizes, and a batch with a bad part is refused as a whole."""

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.producing.encoding.conforming import Conformer
from kera.client.producing.encoding.partition_payloads import partition_payloads
from kera.client.producing.encoding.payloads import Payload, records_to_batch
from kera.client.producing.open_chunks import batches
from kera.core.errors import InvalidArgument, KeraError, RecordTooLarge, SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.producer_support import batch, give
from tests.unit.client.support import SEGMENT_BYTES, FakeCluster, Fault, until


class TestSendBatch:
    async def test_a_table_is_sent_batch_by_batch(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        table = pa.Table.from_batches([batch(b"a"), batch(), batch(b"b", b"c")])
        deliveries = await give(await producer.send_batch("s", table))
        assert [each.record_count for each in deliveries] == [1, 2]
        assert cluster.values() == [b"a", b"b", b"c"]

    async def test_a_batch_without_rows_has_no_deliveries(
        self, cluster: FakeCluster, make_producer: MakeProducer
    ) -> None:
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

    @pytest.mark.parametrize(("rows", "attempts", "divided"), [(150, 3, 1), (220, 2, 3)], ids=["fits", "too_large"])
    async def test_only_a_batch_that_does_not_fit_into_a_chunk_is_divided(
        self,
        cluster: FakeCluster,
        make_producer: MakeProducer,
        monkeypatch: pytest.MonkeyPatch,
        rows: int,
        attempts: int,
        divided: int,
    ) -> None:
        """The first batch is divided because its columns are new. 150 rows take 15,300 bytes in a chunk."""
        calls = {"whole": 0, "divided": 0}

        def whole(conformer: Conformer, *args: Any, **named: Any) -> Payload | None:
            calls["whole"] += 1
            return payload(conformer, *args, **named)

        def in_parts(*args: Any, **named: Any) -> Any:
            calls["divided"] += 1
            return partition_payloads(*args, **named)

        payload = Conformer.payload
        monkeypatch.setattr(Conformer, "payload", whole)
        monkeypatch.setattr(batches, "partition_payloads", in_parts)
        producer = make_producer(cluster, chunk_bytes_max=16 << 10)
        given = records_to_batch([b"x" * 100] * rows, [1] * rows, None, None)
        for _ in range(3):
            await give(await producer.send_batch("s", given, streamlet=0))
        assert calls == {"whole": attempts, "divided": divided}
        assert len(cluster.values()) == 3 * rows

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (batch(b"x" * SEGMENT_BYTES), RecordTooLarge),
            (pa.record_batch({"value": [b"a"], "timestamp": pa.array([None], DEFAULT_SCHEMA[0].type)}), SchemaMismatch),
        ],
    )
    async def test_a_table_with_a_bad_part_is_refused_as_a_whole(
        self, cluster: FakeCluster, make_producer: MakeProducer, bad: pa.RecordBatch, error: type[KeraError]
    ) -> None:
        producer = make_producer(cluster)
        filler = {"value": [b"good"], "timestamp": pa.array([1], DEFAULT_SCHEMA[0].type)}
        good = pa.record_batch({name: filler[name] for name in bad.schema.names}, schema=bad.schema)
        with pytest.raises(error):
            await producer.send_batch("s", pa.Table.from_batches([good, bad]))
        await give(producer.flush())
        assert cluster.values() == []

    async def test_a_list_is_refused_as_a_batch(self, cluster: FakeCluster, make_producer: MakeProducer) -> None:
        producer = make_producer(cluster)
        with pytest.raises(InvalidArgument, match=r"a RecordBatch, Table or .*, not list"):
            await producer.send_batch("s", [b"a"])

    async def test_cancelling_a_waiter_leaves_the_delivery_intact(
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
